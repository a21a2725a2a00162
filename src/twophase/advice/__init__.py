"""The theory's words about a rule or a run."""
