"""The linear theory and the task that it describes."""

from __future__ import annotations

from pathlib import Path

import pytest

from modules import load
from twophase.rule import OuterRule


def test_gain_is_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """By factors at the cap of the inner rate, nothing where noise limits it: within a quarter of what is measured."""
    linear = load(Path(__file__).parents[2] / "experiments" / "regimes" / "linear.py")
    monkeypatch.setattr(linear, "RULES", (OuterRule(1.0, 0.0), OuterRule(0.3, 0.3), OuterRule(1.0, 0.9, nesterov=True)))
    monkeypatch.setattr(linear, "RATES", [0.8 / 2**k for k in range(6)])
    for noise, at_cap in ((0.03, True), (3.0, False)):
        found = linear.gains(linear.WORK, noise)
        assert found["gain, measured"] == pytest.approx(found["gain, predicted"], rel=0.25)
        assert (found["gain, measured"] > 2) == at_cap == (found["measured"] == 1)
