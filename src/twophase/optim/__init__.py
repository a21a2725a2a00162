"""Outer optimizers for one process (torch)."""
