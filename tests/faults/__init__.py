"""Faults on purpose: kills, power cuts, failing calls, damaged files, odd inputs (docs/reliability.md)."""
