"""Drawing: what every figure shares, and the figures of sweeps, periods and blocks."""
