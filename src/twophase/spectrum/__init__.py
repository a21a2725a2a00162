"""Curvature of a trained run by block, what a round removes of it, and the periods that follow."""
