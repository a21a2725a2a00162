"""Values of JSON become numbers, one by one or a column at a time."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from twophase.experiment.jsonl import column, number

NUMBERS = st.floats() | st.integers() | st.booleans() | st.none() | st.just(10**400)
VALUES = NUMBERS | st.text(max_size=3) | st.lists(st.integers(), max_size=2)


@given(st.lists(NUMBERS, max_size=8) | st.lists(VALUES, max_size=8), st.booleans())
def test_a_column_is_its_numbers(values: list[Any], flag: bool) -> None:
    """A column has what each value is by itself: finite numbers, flags where they count, and nan for all else."""
    found = column(values, flag=flag)
    np.testing.assert_array_equal(found, [number(value, flag=flag) for value in values])
    for value, seen in zip(values, found.tolist(), strict=True):
        taken = isinstance(value, (int, float)) and (flag or not isinstance(value, bool))
        if taken and -1e308 < value < 1e308:
            assert seen == value or abs(seen - value) <= 1e-15 * abs(value)
        elif not taken or not -(10**309) < value < 10**309 or math.isinf(value):
            assert math.isnan(seen)
