"""What a run's record says about its outer loop: does it oscillate, overshoot or lag. No torch."""
