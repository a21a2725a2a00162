"""One comparison of methods, for sweeps, tuning, the demo and the bench."""
