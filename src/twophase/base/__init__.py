"""Configuration trees, atomic files, progress: what every room may use (standard library and PyYAML)."""
