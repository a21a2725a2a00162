"""One run of any task, top to bottom."""
