"""The outer rule as a value: its range, and plain numbers; test_restart.py has the conversion between its forms."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from twophase.rule import OuterRule, whole_number


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        *(("lr", (value, 0.9)) for value in (-0.1, math.nan, math.inf, "0.7", None)),
        *(("momentum", (0.7, value)) for value in (1, -0.1, math.nan, "0.9", None)),
        *(("nesterov", (0.7, 0.9, value)) for value in ("ema", None)),
        *(("form", (0.7, 0.9, True, value)) for value in ("EMA", None)),
    ],
)
def test_refused_values_are_named(name: str, arguments: Any):
    """A value outside its range is a ValueError with the argument's name; so is a form of a conversion."""
    with pytest.raises(ValueError, match=name):
        OuterRule(*arguments)
    with pytest.raises(ValueError, match="form"):
        OuterRule(0.7, 0.9).to("mean")  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [0, 10**15 + 1, 2.0, True, "3", None, np.float64(3)])
def test_whole_numbers(value: Any):
    """A whole number from 1, NumPy's included, and nothing else."""
    assert type(whole_number("rounds", np.int64(3))) is int
    with pytest.raises(ValueError, match="rounds"):
        whole_number("rounds", value)


def test_numbers_of_numpy():
    """They become plain ones; no line for people has a zero with a sign."""
    number: Any = np.float32
    rule = OuterRule(number(0.5), np.float64(0.875), nesterov=bool(np.True_))
    assert [type(value) for value in (rule.lr, rule.momentum)] == [float, float]
    assert "-0" not in OuterRule(-0.0, -0.0).describe()
