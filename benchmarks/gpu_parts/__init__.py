"""The parts of gpu.py: what each measures, in units that are done once."""
