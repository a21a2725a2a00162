"""The outer rule as a value: its equations in both forms, the conversions, its range."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twophase.rule import Form, OuterRule

LR = st.floats(1e-6, 1e3)
MOMENTUM = st.floats(0, 0.999)
RULES = st.builds(OuterRule, LR, MOMENTUM, st.booleans(), st.sampled_from(["sum", "ema"]))
GRADIENTS = st.lists(st.floats(-10, 10), min_size=1, max_size=12)


def other_form(form: Form) -> Form:
    return "ema" if form == "sum" else "sum"


def trajectory(rule: OuterRule, gradients: Sequence[float]) -> list[float]:
    """The rule's equations as house.md prints them, on one number; x starts at 0."""
    b, x, m = rule.momentum, 0.0, 0.0
    places = []
    for g in gradients:
        old = m
        if rule.form == "sum":
            m = b * m + g
            step = g + b * m if rule.nesterov else m
        else:
            m = b * m + (1 - b) * g
            step = (1 + b) * m - b * old if rule.nesterov else m
        x -= rule.lr * step
        places.append(x)
    return places


@given(RULES)
def test_there_and_back_is_the_rule(rule: OuterRule):
    """Two conversions give the rule back, to two roundings of lr; everything else is unchanged."""
    back = rule.to(other_form(rule.form)).to(rule.form)
    assert math.isclose(back.lr, rule.lr, rel_tol=4e-16)
    assert dataclasses.replace(back, lr=rule.lr) == rule


@given(RULES)
def test_conversion_factor(rule: OuterRule):
    """`lr_sum = lr_ema (1 - momentum)`, and a conversion to the rule's own form changes nothing."""
    ema, total = rule.to("ema"), rule.to("sum")
    assert math.isclose(total.lr, ema.lr * (1 - rule.momentum), rel_tol=4e-16)
    assert (ema.form, total.form) == ("ema", "sum")
    assert rule.to(rule.form) == rule


@given(RULES, GRADIENTS)
def test_both_forms_are_one_trajectory(rule: OuterRule, gradients: list[float]):
    """A rule and its conversion move x along the same path for any pseudo-gradients (theory note R3)."""
    here = trajectory(rule, gradients)
    there = trajectory(rule.to(other_form(rule.form)), gradients)
    scale = rule.to("ema").lr * max(map(abs, gradients)) * len(gradients) * (1 + rule.momentum)
    assert here == pytest.approx(there, rel=1e-12, abs=1e-13 * scale + 1e-300)


def test_dilocos_usual_rule_is_seven():
    """DiLoCo's (0.7, 0.9) in sum form is lr 7 in EMA form."""
    assert OuterRule(0.7, 0.9, nesterov=True).to("ema").lr == pytest.approx(7, rel=1e-15)


@given(RULES)
def test_injection_is_the_first_buffer(rule: OuterRule):
    """`injection` is the buffer after one round with g = 1: 1 in sum form, 1 - momentum in EMA form."""
    assert rule.injection == (1 if rule.form == "sum" else 1 - rule.momentum)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((-0.1, 0.9), ["OuterRule", "lr", "-0.1", ">= 0"]),
        ((math.nan, 0.9), ["OuterRule", "lr", "nan", "finite"]),
        ((math.inf, 0.9), ["OuterRule", "lr", "inf", "finite"]),
        (("0.7", 0.9), ["OuterRule", "lr", "'0.7'", "number"]),
        ((0.7, 1), ["OuterRule", "momentum", "is 1;", "[0, 1)", "never forgets"]),
        ((0.7, 1.0), ["OuterRule", "momentum", "1.0", "[0, 1)"]),
        ((0.7, -0.1), ["OuterRule", "momentum", "-0.1", "[0, 1)"]),
        ((0.7, math.nan), ["OuterRule", "momentum", "nan", "[0, 1)"]),
        ((0.7, None), ["OuterRule", "momentum", "None", "[0, 1)"]),
        ((0.7, 0.9, "ema"), ["OuterRule", "nesterov", "'ema'", "True or False"]),
        ((0.7, 0.9, True, "EMA"), ["OuterRule", "form", "'EMA'", '"ema"', '"sum"']),
        ((0.7, 0.9, True, None), ["OuterRule", "form", "None", '"ema"', '"sum"']),
    ],
)
def test_impossible_values_say_what_to_do(arguments: tuple, words: list[str]):
    """A value outside its range raises a ValueError with the call, the argument, its value, the range, the remedy."""
    with pytest.raises(ValueError, match="OuterRule") as caught:
        OuterRule(*arguments)
    assert all(word in str(caught.value) for word in words), caught.value


def test_unknown_form_in_a_conversion_is_refused():
    """`to` refuses a form that does not exist and says which call it was."""
    with pytest.raises(ValueError, match=r"OuterRule\.to: form is 'mean'.*\"sum\".*\"ema\""):
        OuterRule(0.7, 0.9).to("mean")  # type: ignore[arg-type]


def test_ends_of_the_ranges_are_allowed():
    """Zero lr and zero momentum are rules; the largest momentum below 1 is one too."""
    assert OuterRule(0, 0).to("ema") == OuterRule(0, 0, form="ema")
    assert OuterRule(1.0, math.nextafter(1, 0)).to("ema").lr == pytest.approx(2.0**53)


@given(RULES)
def test_a_rule_is_a_value(rule: OuterRule):
    """Equal fields make equal rules with equal hashes, and no field can be changed."""
    twin = OuterRule(rule.lr, rule.momentum, rule.nesterov, rule.form)
    assert twin == rule
    assert hash(twin) == hash(rule)
    assert {rule: 1}[twin] == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        rule.lr = 1.0  # type: ignore[misc]


def test_numbers_of_numpy_become_plain():
    """JSON and checkpoints take a rule that was made of NumPy's floats."""
    rule = OuterRule(np.float32(0.5), np.float64(0.9))  # type: ignore[arg-type]
    assert (type(rule.lr), type(rule.momentum)) == (float, float)


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
