"""The outer rule as a value: its equations in both forms, the conversions, its range."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies import simulate
from twophase.rule import OuterRule

LR = st.floats(1e-6, 1e3)
MOMENTUM = st.floats(0, 0.999)
RULES = st.builds(OuterRule, LR, MOMENTUM, st.booleans(), st.sampled_from(["sum", "ema"]))
GRADIENTS = st.lists(st.floats(-10, 10), min_size=1, max_size=12)


@given(RULES, GRADIENTS)
def test_both_forms_are_one_trajectory(rule: OuterRule, gradients: list[float]):
    """`lr_sum = lr_ema (1 - momentum)`, and there and back is the rule, to two roundings of lr.

    A rule and its conversion move x along the same path for any pseudo-gradients (theory note R3).
    """
    ema, total = rule.to("ema"), rule.to("sum")
    assert (ema.form, total.form, rule.to(rule.form)) == ("ema", "sum", rule)
    assert math.isclose(total.lr, ema.lr * (1 - rule.momentum), rel_tol=4e-16)
    other = total if rule.form == "ema" else ema
    back = other.to(rule.form)
    assert math.isclose(back.lr, rule.lr, rel_tol=4e-16)
    assert dataclasses.replace(back, lr=rule.lr) == rule
    here, there = ([x for x, _ in simulate(each, gradients)] for each in (rule, other))
    scale = ema.lr * max(map(abs, gradients)) * len(gradients) * (1 + rule.momentum)
    assert here == pytest.approx(there, rel=1e-12, abs=1e-13 * scale + 1e-300)


def test_dilocos_usual_rule_is_seven():
    """DiLoCo's (0.7, 0.9) in sum form is lr 7 in EMA form."""
    assert OuterRule(0.7, 0.9, nesterov=True).to("ema").lr == pytest.approx(7, rel=1e-15)


@given(RULES)
def test_a_rule_is_a_value(rule: OuterRule):
    """Equal fields make equal rules with equal hashes, no field can be changed, and `injection` is the first buffer."""
    twin = OuterRule(rule.lr, rule.momentum, rule.nesterov, rule.form)
    assert twin == rule
    assert {rule: 1}[twin] == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        rule.lr = 1.0  # type: ignore[misc]
    assert rule.injection == simulate(rule, [1.0])[0][1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-0.1, 0.9), "lr is -0.1; .*>= 0"),
        ((math.nan, 0.9), "lr is nan; .*finite"),
        ((math.inf, 0.9), "lr is inf; .*finite"),
        (("0.7", 0.9), "lr is '0.7'; .*number"),
        ((0.7, 1), r"momentum is 1; .*\[0, 1\).*never forgets"),
        ((0.7, 1.0), "momentum is 1.0; "),
        ((0.7, -0.1), "momentum is -0.1; "),
        ((0.7, math.nan), "momentum is nan; "),
        ((0.7, None), "momentum is None; "),
        ((0.7, 0.9, "ema"), "nesterov is 'ema'; .*True or False"),
        ((0.7, 0.9, True, "EMA"), 'form is \'EMA\'; .*"sum".*"ema"'),
        ((0.7, 0.9, True, None), "form is None; "),
    ],
)
def test_impossible_values_say_what_to_do(arguments: tuple, message: str):
    """A value outside its range raises a ValueError with the call, the argument, its value, the range, the remedy."""
    with pytest.raises(ValueError, match=f"OuterRule: {message}"):
        OuterRule(*arguments)


def test_unknown_form_in_a_conversion_is_refused():
    """`to` refuses a form that does not exist and says which call it was."""
    with pytest.raises(ValueError, match=r"OuterRule\.to: form is 'mean'.*\"sum\".*\"ema\""):
        OuterRule(0.7, 0.9).to("mean")  # type: ignore[arg-type]


def test_ends_of_the_ranges_are_allowed():
    """Zero lr and zero momentum are rules; the largest momentum below 1 is one too."""
    assert OuterRule(0, 0).to("ema") == OuterRule(0, 0, form="ema")
    assert OuterRule(1.0, math.nextafter(1, 0)).to("ema").lr == pytest.approx(2.0**53)


def test_numbers_of_numpy_become_plain():
    """JSON and checkpoints take a rule that was made of NumPy's floats."""
    rule = OuterRule(np.float32(0.5), np.float64(0.9), nesterov=np.True_)  # type: ignore[arg-type]
    assert (type(rule.lr), type(rule.momentum), type(rule.nesterov)) == (float, float, bool)


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (OuterRule(0.7, 0.9, nesterov=True), "Nesterov lr 0.7 momentum 0.9 (sum form)"),
        (OuterRule(1, 0.5, form="ema"), "heavy ball lr 1 momentum 0.5 (EMA form)"),
        (OuterRule(1, 0, nesterov=True), "momentum-free lr 1 momentum 0 (sum form)"),
    ],
)
def test_description_names_the_form(rule: OuterRule, text: str):
    """Every place that prints a rule names its form (house.md section 4)."""
    assert rule.describe() == text
