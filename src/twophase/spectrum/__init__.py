"""The curvature of a trained model by block, what a round's inner steps remove of it, and the periods that follow."""
