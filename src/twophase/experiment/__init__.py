"""Runs and sweeps as folders: grids, launching, tables, figures (no torch here)."""
