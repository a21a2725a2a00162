"""`theory.inputs`: what is taken and what is refused, with messages that name the call, the argument and the entry."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from twophase.rule import FORMS, OuterRule
from twophase.theory.inputs import (
    check_count,
    check_counts,
    check_finite,
    check_modes,
    check_sigma,
    check_steps,
    check_weights,
    rule_arrays,
    rule_grid,
)

RULE = OuterRule(0.7, 0.9)
NO_NUMBERS = ["0.5x", None, True, [True, False], 0.5 + 0j, [[0.5], [0.5, 0.6]], {"a": 1}, ["a", 1]]


@pytest.mark.parametrize("form", FORMS)
def test_grid_of_rules(form: Any) -> None:
    """Learning rate, momentum and kind broadcast to an array of rules of the form named."""
    grid = rule_grid([[0.5], [0.7], [0.9]], [0.0, 0.9], True, form)
    assert (grid.shape, grid.dtype) == ((3, 2), object)
    assert grid[1, 1] == OuterRule(0.7, 0.9, True, form)
    assert rule_grid(0.5, 0.9, [False, True]).tolist() == [OuterRule(0.5, 0.9), OuterRule(0.5, 0.9, True)]
    assert rule_grid(0.5, 0.9)[()] == OuterRule(0.5, 0.9)
    assert rule_grid([], 0.9).shape == (0,)


def test_numbers_of_rules() -> None:
    """One rule gives arrays without axes; nested lists and arrays give theirs, forms and kinds mixed as they like."""
    arrays = rule_arrays("here", RULE)
    assert arrays.shape == ()
    assert (arrays.lr, arrays.momentum, arrays.injection, arrays.nesterov, arrays.ema) == (0.7, 0.9, 1.0, False, False)
    mixed = [[RULE, OuterRule(7.0, 0.75, True, "ema")]]
    for rules in (mixed, np.array(mixed, dtype=object), tuple(map(tuple, mixed))):
        many = rule_arrays("here", rules)  # type: ignore[arg-type] - tuples will do as lists
        assert [column.tolist() for column in (many.lr, many.momentum, many.injection, many.nesterov, many.ema)] == [
            [[0.7, 7.0]],
            [[0.9, 0.75]],
            [[1.0, 0.25]],
            [[False, True]],
            [[False, True]],
        ]


@pytest.mark.parametrize("scale", [1e-300, 1e-310, 1.0, 1e300, 1.7e308 / 3])
def test_weights_are_normalised(scale: float) -> None:
    """To sum 1, whatever their size; equal when None; zeros stay."""
    np.testing.assert_allclose(check_weights("here", [scale, 0, 2 * scale, 3 * scale], 4), [1 / 6, 0, 1 / 3, 1 / 2])
    assert check_weights("here", None, 4).tolist() == [0.25] * 4
    assert check_weights("here", 5, 1).tolist() == [1.0]
    assert check_weights("here", [1e-300, 1], 2)[0] == 1e-300
    assert check_weights("here", [1.7e308] * 3, 3).tolist() == [1 / 3] * 3


@pytest.mark.parametrize(
    "value",
    [3, 3.0, np.int8(3), np.uint64(3), np.float16(3), [1, 2], [[1.0, 2.0]], range(1, 5), 10**9, 2**53 - 1],
)
def test_counts_are_whole_numbers(value: Any) -> None:
    """Integers and floats that are whole, as int64; the least allowed one depends on the caller."""
    counts = check_counts("here", "period", value)
    assert (counts.dtype, counts.shape) == (np.int64, np.shape(value))
    np.testing.assert_array_equal(counts, value)
    assert check_counts("here", "period", 0, least=0) == 0


def weights(where: str, value: Any) -> Any:
    """The weights of two modes."""
    return check_weights(where, value, 2)


def period(where: str, value: Any) -> Any:
    return check_counts(where, "period", value)


REFUSED: list[tuple[Callable[..., Any], Any, str]] = [
    (lambda _, v: rule_grid(v, 0.9), [0.5, -1], r"OuterRule: lr is -1\.0"),
    (lambda _, v: rule_grid(0.5, v), [0.5, 1.0], r"OuterRule: momentum is 1\.0; it must lie in \[0, 1\)"),
    (lambda _, v: rule_grid(0.5, 0.5, False, v), "emma", "OuterRule: form is 'emma'"),
    (lambda _, v: rule_grid(v, [0.1, 0.2]), [1, 2, 3], "shape mismatch"),
    (rule_arrays, 0.7, r"here: rule is 0\.7; give an OuterRule such as OuterRule\(0\.7, 0\.9\), or an array of them"),
    *((rule_arrays, rule, f"here: rule is {rule!r}") for rule in ("sum", None)),
    (rule_arrays, [], r"here: rule is \[\]"),
    (rule_arrays, [RULE, None], "here: rule is None"),
    (rule_arrays, [[RULE], [0.9]], r"here: rule is 0\.9"),
    (check_sigma, 1.5, r"here: sigma is 1\.5; effective progress lies in \[0, 1\]; effective_progress computes it"),
    (check_sigma, -1e-300, "here: sigma is -1e-300"),
    (check_sigma, [0.5, math.nextafter(1, 2)], r"here: sigma\[1\] is 1\.0000000000000002"),
    (check_modes, [[0.5, 0.6], [0.7, -0.1]], r"here: sigma\[1, 1\] is -0\.1"),
    (check_modes, [0.5, math.nan], r"here: sigma\[1\] is nan"),
    *((check_modes, value, "here: sigma is") for value in NO_NUMBERS),
    *((check_modes, value, "here: sigma is empty; give at least one mode") for value in ([], np.zeros((2, 0)))),
    (weights, [1, 2, 3], r"here: weights have shape \(3,\); give one a mode, shape \(2,\)"),
    *((weights, value, "here: weights have shape") for value in ([[1, 2]], [], 1)),
    (weights, [1, -2], r"here: weights\[1\] is -2\.0; a weight is a finite number >= 0"),
    *((weights, [value, 1], rf"here: weights\[0\] is {value}") for value in (math.nan, math.inf)),
    (weights, [0, 0], "here: weights are all 0; at least one must be positive"),
    *((weights, value, "here: weights is") for value in (["a", 1], [True, True])),
    *(
        (period, value, f"here: period is {value}; it must be a whole number >= 1")
        for value in (0, -1, 2.5, math.nan, math.inf, 2**53, 2**70)
    ),
    (period, [3, 0], r"here: period\[1\] is 0"),
    (period, [[3, 1.5]], r"here: period\[0, 1\] is 1\.5"),
    *((period, value, "here: period is .*whole number") for value in (*NO_NUMBERS, "3", [])),
    (lambda where, v: check_count(where, "rounds", v), [3, 4], "here: rounds is .*; give one number, not several"),
    (lambda where, v: check_finite(where, "noise", v), [1.0, math.inf], r"here: noise\[1\] is inf.*finite"),
    (lambda where, v: check_finite(where, "lr", v, 0), -1, r"here: lr is -1\.0; it must be a finite number >= 0"),
    (check_steps, np.array([0.0, 2e100]), r"here: the effective step lr \* sigma reaches 2e\+100; .* below 1e100"),
]


@pytest.mark.parametrize(("check", "value", "message"), REFUSED)
def test_refused(check: Callable[..., Any], value: Any, message: str) -> None:
    """The entry that is out of range is named with its place; what is no number is refused as a whole."""
    with pytest.raises(ValueError, match=message):
        check("here", value)
