"""Say what a run's outer loop does, and when to restart a rule on given modes."""

from twophase.diagnose.diagnosis import BlockState, Diagnosis, describe, diagnose

__all__ = ["BlockState", "Diagnosis", "describe", "diagnose"]
