"""A run is a folder: writing it, reading it, and metrics beside it (no torch)."""
