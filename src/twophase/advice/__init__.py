"""Put the theory's results about a rule or a run into words."""
