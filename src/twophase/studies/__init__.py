"""Studies: one claim per file, computed, drawn and answered by `twophase study NAME`; see `study.py`."""
