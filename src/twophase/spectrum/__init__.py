"""Curvature of a trained model by block, what a round removes of it, and the pages about both."""
