"""`theory.inputs`: what is taken and what is refused, with messages that name the call, the argument and the remedy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from twophase.rule import FORMS, OuterRule
from twophase.theory.inputs import (
    check_counts,
    check_modes,
    check_sigma,
    check_steps,
    check_weights,
    rule_arrays,
    rule_grid,
)

RULE = OuterRule(0.7, 0.9)


def refused(message: str) -> Any:
    return pytest.raises(ValueError, match=message)


# --- rules --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_grid_of_rules(form: Any) -> None:
    """Learning rate, momentum and kind broadcast to an array of rules of the form named."""
    grid = rule_grid([[0.5], [0.7], [0.9]], [0.0, 0.9], True, form)
    assert grid.shape == (3, 2)
    assert grid.dtype == object
    assert grid[1, 1] == OuterRule(0.7, 0.9, True, form)
    assert rule_grid(0.5, 0.9, [False, True]).tolist() == [OuterRule(0.5, 0.9), OuterRule(0.5, 0.9, True)]
    assert rule_grid(0.5, 0.9).shape == ()
    assert rule_grid(0.5, 0.9)[()] == OuterRule(0.5, 0.9)
    assert rule_grid([], 0.9).shape == (0,)
    assert rule_grid(np.ones((2, 1, 1)), np.full((3, 1), 0.5), [False, True, False, True]).shape == (2, 3, 4)
    assert all(type(v) is float for v in (grid[0, 0].lr, grid[0, 0].momentum))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([0.5, -1], 0.9), r"OuterRule: lr is -1\.0"),
        ((0.5, [0.5, 1.0]), r"OuterRule: momentum is 1\.0; it must lie in \[0, 1\)"),
        ((0.5, math.nan), "OuterRule: momentum is nan"),
        ((math.inf, 0.5), "OuterRule: lr is inf"),
        ((0.5, 0.5, False, "emma"), "OuterRule: form is 'emma'"),
        (([1, 2, 3], [0.1, 0.2]), "shape mismatch"),
    ],
)
def test_grids_refused(arguments: Any, message: str) -> None:
    """One bad value in a grid is refused as it would be alone."""
    with refused(message):
        rule_grid(*arguments)


def test_numbers_of_rules() -> None:
    """One rule gives arrays without axes; nested lists and arrays give theirs, forms and kinds mixed as they like."""
    one = rule_arrays("here", RULE)
    assert one.shape == ()
    assert (one.lr, one.momentum, one.injection, one.nesterov, one.ema) == (0.7, 0.9, 1.0, False, False)
    mixed = [[RULE, OuterRule(7.0, 0.75, True, "ema")]]
    for rules in (mixed, np.array(mixed, dtype=object), tuple(map(tuple, mixed))):
        many = rule_arrays("here", rules)  # type: ignore[arg-type] - tuples will do as lists
        assert many.shape == (1, 2)
        assert many.lr.tolist() == [[0.7, 7.0]]
        assert many.momentum.tolist() == [[0.9, 0.75]]
        assert many.injection.tolist() == [[1.0, 0.25]]
        assert many.nesterov.tolist() == many.ema.tolist() == [[False, True]]


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (0.7, r"here: rule is 0\.7; give an OuterRule such as OuterRule\(0\.7, 0\.9\), or an array of them"),
        ("sum", "here: rule is 'sum'"),
        (None, "here: rule is None"),
        ([], r"here: rule is \[\]"),
        ([RULE, None], "here: rule is None"),
        ([[RULE], [0.9]], r"here: rule is 0\.9"),
        ({"lr": 0.7}, "here: rule is {'lr': 0.7}"),
    ],
)
def test_rules_refused(rule: Any, message: str) -> None:
    """Anything but rules, wherever it stands in a list; and an empty list."""
    with refused(message):
        rule_arrays("here", rule)


# --- modes --------------------------------------------------------------------------------------------------------


def test_sigma_is_a_float_array() -> None:
    """Numbers, lists and arrays of any shape and kind, from 0 to 1 with both ends."""
    for value in (0.5, 1, 0, np.float32(0.25), [0.1, 0.2], np.zeros((2, 0, 3)), [[0, 1]], []):
        found = check_sigma("here", value)
        assert found.dtype == np.float64
        assert found.shape == np.shape(value)
        np.testing.assert_array_equal(found, value)
    assert check_modes("here", 0.5).tolist() == [0.5]
    assert check_modes("here", [[0.5, 0.6]]).shape == (1, 2)
    assert check_modes("here", np.zeros((0, 3))).shape == (0, 3)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (1.5, r"here: sigma is 1\.5; effective progress lies in \[0, 1\]; effective_progress computes it"),
        (-1e-300, r"here: sigma is -1e-300"),
        (math.nan, "here: sigma is nan"),
        (math.inf, "here: sigma is inf"),
        ([0.5, math.nextafter(1, 2)], r"here: sigma\[1\] is 1\.0000000000000002"),
        ([[0.5, 0.6], [0.7, -0.1]], r"here: sigma\[1, 1\] is -0\.1"),
        ([0.5, math.nan], r"here: sigma\[1\] is nan"),
        ("0.5x", "here: sigma is '0.5x'; give a number or an array of numbers"),
        (None, "here: sigma is None|here: sigma is nan"),
        (True, "here: sigma is True"),
        ([True, False], r"here: sigma is \[True, False\]"),
        (0.5 + 0j, r"here: sigma is \(0\.5\+0j\)"),
        ([[0.5], [0.5, 0.6]], "here: sigma is"),
        ({"a": 1}, "here: sigma is"),
    ],
)
def test_sigma_refused(value: Any, message: str) -> None:
    """The entry that is out of range is named with its place; what is no number is refused as a whole."""
    for check in (check_sigma, check_modes):
        with refused(message):
            check("here", value)


@pytest.mark.parametrize("value", [[], np.zeros((2, 0))])
def test_no_modes_refused(value: Any) -> None:
    """A spectrum has at least one mode."""
    with refused("here: sigma is empty; give at least one mode"):
        check_modes("here", value)


# --- weights ------------------------------------------------------------------------------------------------------


def test_weights_are_normalised() -> None:
    """To sum 1, whatever their size; equal when None; zeros stay."""
    assert check_weights("here", None, 4).tolist() == [0.25] * 4
    assert check_weights("here", [1, 3], 2).tolist() == [0.25, 0.75]
    assert check_weights("here", 5, 1).tolist() == [1.0]
    assert check_weights("here", [0, 2, 0], 3).tolist() == [0, 1, 0]
    for scale in (1e-300, 1e-310, 1e300, 1.7e308 / 3):
        found = check_weights("here", [scale, 2 * scale, 3 * scale], 3)
        np.testing.assert_allclose(found, [1 / 6, 1 / 3, 1 / 2], rtol=1e-12)
    assert check_weights("here", [1e-300, 1], 2)[0] == 1e-300
    assert check_weights("here", [1.7e308] * 3, 3).tolist() == [1 / 3] * 3


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1, 2, 3], r"here: weights have shape \(3,\); give one a mode, shape \(2,\)"),
        ([[1, 2]], r"here: weights have shape \(1, 2\)"),
        ([], r"here: weights have shape \(0,\)"),
        (1, r"here: weights have shape \(1,\)"),
        ([1, -2], r"here: weights\[1\] is -2\.0; a weight is a finite number >= 0"),
        ([math.nan, 1], r"here: weights\[0\] is nan"),
        ([math.inf, 1], r"here: weights\[0\] is inf"),
        ([0, 0], "here: weights are all 0; at least one must be positive"),
        (["a", 1], "here: weights is"),
        ([True, True], "here: weights is"),
    ],
)
def test_weights_refused(weights: Any, message: str) -> None:
    """Wrong shapes, negative and infinite ones, and none that counts."""
    with refused(message):
        check_weights("here", weights, 2)


# --- counts and steps ---------------------------------------------------------------------------------------------


def test_counts_are_whole_numbers() -> None:
    """Integers and floats that are whole, as int64; the least allowed one depends on the caller."""
    for value in (
        3,
        3.0,
        np.int8(3),
        np.uint64(3),
        np.float16(3),
        np.float32(3),
        [1, 2],
        [[1.0, 2.0]],
        range(1, 5),
        2**53 - 1,
    ):
        found = check_counts("here", "period", value)
        assert found.dtype == np.int64
        assert found.shape == np.shape(value)
    assert check_counts("here", "period", 0, least=0) == 0
    assert check_counts("here", "period", 10**9) == 10**9


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (0, "here: period is 0; it must be a whole number >= 1"),
        (-1, "here: period is -1"),
        (2.5, r"here: period is 2\.5"),
        ([3, 0], r"here: period\[1\] is 0"),
        ([[3, 1.5]], r"here: period\[0, 1\] is 1\.5"),
        (math.nan, "here: period is nan"),
        (math.inf, "here: period is inf"),
        (2**53, "here: period is 9007199254740992"),
        (2**70, "here: period is 1180591620717411303424"),
        (True, "here: period is True"),
        ("3", "here: period is '3'"),
        ([], r"here: period is \[\]"),
        (None, "here: period is None"),
        (3 + 0j, r"here: period is \(3\+0j\)"),
    ],
)
def test_counts_refused(value: Any, message: str) -> None:
    """Zeros, fractions, truths, words, nothing, and numbers beyond exact doubles."""
    with refused(message):
        check_counts("here", "period", value)


def test_steps_beyond_meaning_refused() -> None:
    """An effective step above 1e100 is refused with its size; none at all is fine."""
    check_steps("here", np.array([1e100, 0.0]))
    check_steps("here", np.zeros(0))
    with refused(r"here: the effective step lr \* sigma reaches 2e\+100; lr must keep it below 1e100"):
        check_steps("here", np.array([0.0, 2e100]))
