"""Functions that return configurations and sweeps."""
