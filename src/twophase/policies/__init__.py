"""Hold restart and step policies as values (standard library only)."""
