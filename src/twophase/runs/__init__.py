"""A run is a folder: writing it, reading it, and sending metrics to trackers (no torch)."""
