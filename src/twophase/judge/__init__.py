"""One comparison of arms: settings, controls, pairs, intervals."""
