"""Soft restarts: the one that removes a mode, and cycles with one, against mpmath."""

from __future__ import annotations

import math
import random
from typing import Any

import mpmath
import numpy as np
import pytest

import oracle
from amount import amount
from oracle import HB, KINDS
from twophase.rule import FORMS, Form, OuterRule
from twophase.theory import cycle_matrix, effective_step, restart_factor, rule_grid, soft_restart

FORM = pytest.mark.parametrize("form", FORMS)


def draw(rng: random.Random, nesterov: bool, form: Form) -> tuple[OuterRule, float, int]:
    """A mode of any regime and a period."""
    step = rng.choice([rng.uniform(0.01, 1), 10 ** rng.uniform(-6, 0), rng.uniform(0.8, 1.2), rng.uniform(1, 4)])
    return *oracle.at(step, rng.uniform(0.02, 0.98), nesterov, form, rng.uniform(0.02, 1)), rng.randint(1, 25)


def simulated(rule: OuterRule, sigma: float, start: Any, rounds: int, soft: tuple[int, Any, Any]) -> list[Any]:
    """The states (x, m) of `rounds` rounds with a soft restart (period, retain, inject) after the round's update."""
    period, *event = soft
    return oracle.simulated(rule, sigma, rounds, lambda t: t % period == 0 and event, start)


def optimum(rule: OuterRule, sigma: float, period: int) -> tuple[Any, Any]:
    """R26: retain and inject on the rule's own buffer, by the paper's letters and p_k, in the working precision."""
    b, s, share = mpmath.mpf(rule.momentum), oracle.step(rule, sigma), mpmath.mpf(sigma)
    power, one = oracle.power(oracle.matrix(rule, sigma), period), oracle.matrix(rule, sigma)
    chi, p = power[0, 0], power[0, 1] / one[0, 1]
    lr = mpmath.mpf(rule.lr) / (1 if rule.form == "ema" else 1 - b)  # the paper's nu
    inject = (1 - s) * chi / (lr * b * b * share * p) if rule.nesterov else chi / (lr * b * share * p)
    return -chi / (b * p), inject / (1 if rule.form == "ema" else 1 - b)


@FORM
@KINDS
def test_soft_restart_removes_the_mode_from_any_state(nesterov: bool, form: Form) -> None:
    """R26, tight: the formula in every regime; with it (x, m) is 0 after two cycles; one number is negative."""
    rng = random.Random(f"state {nesterov} {form}")
    for _ in range(amount(40, 150)):
        rule, sigma, period = draw(rng, nesterov, form)
        values = soft_restart(rule, sigma, period)
        if not nesterov or effective_step(rule, sigma) < 1:
            assert (values[0] < 0) != (values[1] < 0)  # outside the paper's [0, 1]^2
        with mpmath.workdps(oracle.digits_for(rule, sigma)):
            exact = optimum(rule, sigma, period)
            # Next to a zero of chi or of p the errors of both show, which are shares of the envelope.
            t = oracle.power(oracle.matrix(rule, sigma), period)
            chi, p = t[0, 0], t[0, 1] / oracle.matrix(rule, sigma)[0, 1]
            size = max(abs(chi), mpmath.exp(oracle.log_envelope(rule, sigma, period)))
            within = 1e-12 * period * size * (1 / abs(chi) + 1 / abs(p))
            assert all(abs(float(v) - e) <= within * abs(e) for v, e in zip(values, exact, strict=True))
            states = simulated(rule, sigma, (rng.gauss(0, 1), rng.gauss(0, 9)), 2 * period, (period, *exact))
            assert max(map(abs, states[-1])) < mpmath.mpf(10) ** -46 * max(abs(v) for s in states for v in s)


def test_soft_restart_at_a_cancellation_is_a_hard_one() -> None:
    """R26: chi_R = 0 if and only if retain = inject = 0, exactly; the signs change with chi_R."""
    zeros = OuterRule(0.5, 0.5)  # phase pi/4: chi is exactly 0 at 2, 6, 10, ...; p_4 = 0: the buffer is empty by itself
    for period in range(1, 15):
        if period % 4:
            numbers = soft_restart(zeros, 1.0, period)
            assert all((number == 0) == (period % 4 == 2) for number in numbers)
    retain, inject = soft_restart(HB, 0.95, [5, 6])  # chi_5 > 0 > chi_6
    assert retain[0] < 0 < inject[0]
    assert inject[1] < 0 < retain[1]


def test_soft_restart_at_the_ends() -> None:
    """What is gone needs no restart; beyond doubles is infinite."""
    assert soft_restart(HB, 5e-324, 3) == (pytest.approx(-0.41, abs=0.001), math.inf)
    assert soft_restart(OuterRule(1.0, 0.5, True), 1.0, 3) == (0, 0)  # nilpotent


@FORM
@KINDS
def test_cycle_matrix_is_what_a_cycle_does(nesterov: bool, form: Form) -> None:
    """R rounds of the literal update and the soft restart, from both unit vectors; hard: chi_R and zeros below."""
    rng = random.Random(f"cycle {nesterov} {form}")
    for _ in range(amount(25, 60)):
        rule, sigma, period = draw(rng, nesterov, form)
        retain, inject = rng.choice([(0.0, 0.0), (rng.uniform(-1, 1), rng.uniform(-2, 2)), (1.0, 0.0)])
        matrix = cycle_matrix(rule, sigma, period, retain, inject)
        for column, start in enumerate(((1, 0), (0, 1))):
            with mpmath.workdps(oracle.DIGITS):
                exact = simulated(rule, sigma, start, period, (period, retain, inject))[-1]
            size = max(1e-300, *(abs(float(v)) for v in exact), abs(matrix[:, column]).max())
            assert max(abs(float(f - e)) for f, e in zip(matrix[:, column], exact, strict=True)) < 1e-11 * size
        several = cycle_matrix(
            rule_grid(rule.lr, [[0.3], [rule.momentum]], nesterov, form), [0.2, sigma], period, retain, inject
        )
        np.testing.assert_allclose(several[1, 1], matrix, rtol=1e-13)
        hard = cycle_matrix(rule, sigma, period)
        assert hard[1].tolist() == [0, 0]
        assert hard[0, 0] == pytest.approx(float(restart_factor(rule, sigma, period)), rel=1e-9, abs=1e-12)
