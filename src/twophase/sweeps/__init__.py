"""Many runs that share their steps: grids, plans, the queue, workers, tables."""
