"""`twophase tune`: outer optimizers compared, each at its own best."""
