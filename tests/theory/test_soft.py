"""`theory.soft`: the soft restart that removes a mode, cycles with one, and the warm restart."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import mpmath
import numpy as np
import pytest
import torch

import oracle
from amount import amount
from oracle import HB, KINDS, NAG
from twophase.rule import FORMS, Form, OuterRule
from twophase.theory.contraction import restart_factor
from twophase.theory.inputs import rule_grid
from twophase.theory.modes import effective_step
from twophase.theory.soft import cycle_matrix, soft_restart

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
    t = oracle.matrix(rule, sigma)
    trace, determinant = t[0, 0] + t[1, 1], t[0, 0] * t[1, 1] - t[0, 1] * t[1, 0]
    before, p = mpmath.mpf(0), mpmath.mpf(1)
    for _ in range(period - 1):
        before, p = p, trace * p - determinant * before
    chi = (trace * p - determinant * before) - b * p
    lr = mpmath.mpf(rule.lr) / (1 if rule.form == "ema" else 1 - b)  # the paper's nu
    inject = (1 - s) * chi / (lr * b * b * share * p) if rule.nesterov else chi / (lr * b * share * p)
    return -chi / (b * p), inject / (1 if rule.form == "ema" else 1 - b)


def assert_optimum(rule: OuterRule, sigma: float, period: int, within: float) -> None:
    """The two numbers are those of the formula, to a relative error."""
    values = soft_restart(rule, sigma, period)
    with mpmath.workdps(oracle.digits_for(rule, sigma)):
        for value, exact in zip(values, optimum(rule, sigma, period), strict=True):
            assert abs(float((mpmath.mpf(float(value)) - exact) / exact)) < within, (rule, sigma, period)


# --- the soft restart that removes a mode (R26) -------------------------------------------------------------------


@pytest.mark.slow
@FORM
@KINDS
def test_soft_restart_is_the_formula_to_the_last_digits(nesterov: bool, form: Form) -> None:
    """R26 at 50 digits: relative error below 1e-14 in every regime, next to cancellations and to s = 1 too."""
    rng = random.Random(f"{nesterov} {form}")
    for _ in range(amount(40, 150)):
        rule, sigma, period = draw(rng, nesterov, form)
        assert_optimum(rule, sigma, period, 1e-14)
        if not nesterov or effective_step(rule, sigma) < 1:
            retain, inject = soft_restart(rule, sigma, period)
            assert (retain < 0) != (inject < 0)  # outside the paper's [0, 1]^2
    for sign, power, period in itertools.product((-1, 1), (1, 4, 8, 12, 14), (1, 2, 3)):
        assert_optimum(*oracle.at(1 + sign * 10.0**-power, 0.6, nesterov, form, 0.7), period, 1e-14)
    for power in (3, 30, 200):
        assert_optimum(*oracle.at(10.0**-power, 0.9, nesterov, form, 0.7), 5, 1e-14)


@FORM
@KINDS
def test_soft_restart_removes_the_mode_from_any_state(nesterov: bool, form: Form) -> None:
    """R26, tight: at the exact optimum (x, m) is 0 after two cycles; in doubles it is 1e-12 of what the state was."""
    rng = random.Random(f"state {nesterov} {form}")
    for number in range(amount(20, 60)):
        rule, sigma, period = draw(rng, nesterov, form)
        start = (rng.gauss(0, 1), rng.gauss(0, 1) * rng.choice([0, 1, 10]))
        with mpmath.workdps(oracle.digits_for(rule, sigma)):
            if number < 8:
                states = simulated(rule, sigma, start, 2 * period, (period, *optimum(rule, sigma, period)))
                assert max(map(abs, states[-1])) < mpmath.mpf(10) ** -46 * max(abs(v) for s in states for v in s)
            retain, inject = (mpmath.mpf(float(v)) for v in soft_restart(rule, sigma, period))
            states = simulated(rule, sigma, start, 2 * period, (period, retain, inject))
            # In (x, lr m), which have one scale: the terms that cancel, times what a cycle can make of their errors.
            lr, t = mpmath.mpf(rule.lr), oracle.power(oracle.matrix(rule, sigma), period)
            grown = max(abs(t[0, 0]), abs(t[0, 1] / lr), abs(t[1, 0] * lr), abs(t[1, 1]), 1)
            terms = 0
            for k in (period - 1, -2):
                _, m, g = oracle.one_round(rule, sigma, *states[k])
                terms = max(terms, *map(abs, (states[k][0], lr * m, lr * retain * m, lr * inject * g)))
            assert float((abs(states[-1][0]) + abs(lr * states[-1][1])) / (terms * grown)) < 1e-13


def test_soft_restart_at_a_cancellation_is_a_hard_one() -> None:
    """R26: chi_R = 0 if and only if retain = inject = 0, exactly; the signs change with chi_R."""
    zeros = OuterRule(0.5, 0.5)  # phase pi/4: chi is exactly 0 at 2, 6, 10, ...; p_4 = 0: the buffer is empty by itself
    for period in range(1, 15):
        if period % 4:
            numbers = soft_restart(zeros, 1.0, period)
            assert all((number == 0) == (period % 4 == 2) for number in numbers)
            assert period % 4 != 2 or {math.copysign(1, number) for number in numbers} == {1.0}
    retain, inject = soft_restart(HB, 0.95, [5, 6])  # chi_5 > 0 > chi_6
    assert retain[0] < 0 < inject[0]
    assert inject[1] < 0 < retain[1]


@pytest.mark.parametrize(
    ("rule", "sigma", "period"),
    [
        (HB, 0.5, 20_000),
        (NAG, 0.5, 30_000),
        (OuterRule(1 - 1e-9, 0.9, True), 1.0, 200),
        (OuterRule(300.0, 0.5), 1.0, 400),
        (OuterRule(1e90, 0.5), 1.0, 7),
    ],
)
def test_soft_restart_where_the_state_underflows_or_overflows(rule: OuterRule, sigma: float, period: int) -> None:
    """The quotients of x and m keep their digits where both are below 1e-308 or beyond 1e308."""
    assert_optimum(rule, sigma, period, 1e-13)
    retain, inject = soft_restart(HB, 5e-324, 3)  # inject is beyond all doubles
    assert (retain, inject) == (pytest.approx(-0.41, abs=0.001), math.inf)
    assert soft_restart(OuterRule(1.0, 5e-324), 0.5, 3) == (-math.inf, math.inf)


def test_shapes() -> None:
    """Rules, sigma and period broadcast; matrices have their axes last."""
    rules, sigma, periods = rule_grid([[0.1], [0.4]], 0.9), [0.3, 0.5, 0.9], [[[2]], [[3]], [[7]]]
    values = np.asarray(soft_restart(rules, sigma, periods))
    assert values.shape[-3:] == (3, 2, 3)
    for place in np.ndindex(3, 2, 3):
        single = soft_restart(rules[place[1], 0], sigma[place[2]], periods[place[0]][0][0])
        np.testing.assert_array_equal(values[..., *place], np.asarray(single))
    assert np.asarray(soft_restart(HB, [], 3)).shape[-1] == 0
    matrices = cycle_matrix(rules, sigma, 4, 0.2, 0.1)
    for i, j in np.ndindex(2, 3):
        np.testing.assert_allclose(matrices[i, j], cycle_matrix(rules[i, 0], sigma[j], 4, 0.2, 0.1), rtol=1e-14)
    assert matrices.shape == (2, 3, 2, 2)
    few = sigma[:2]  # as many as a matrix has columns
    cycles = cycle_matrix(rules, few, 3, *soft_restart(rules, few, 3))
    for i, j in np.ndindex(2, 2):
        single = cycle_matrix(rules[i, 0], few[j], 3, *soft_restart(rules[i, 0], few[j], 3))
        np.testing.assert_allclose(cycles[i, j], single, rtol=1e-13, atol=1e-15)
    assert cycle_matrix(HB, 0.5, 3, [0.1, 0.2, 0.3]).shape == (3, 2, 2)
    assert cycle_matrix(HB, [], 3).shape == (0, 2, 2)


# --- one round, several modes (R27) -------------------------------------------------------------------------------


@FORM
@KINDS
def test_soft_restart_every_round(nesterov: bool, form: Form) -> None:
    """R27: the closed forms at R = 1; in another cycle they still make x 0 in the next round, and m bring it back."""
    for lr, b, sigma in ((1.0, 0.9, 0.3), (0.4, 0.5, 0.95), (2.0, 0.7, 0.5)):
        rule = OuterRule(lr, b, nesterov, "ema").to(form)
        s, scale = lr * (1 - b) * sigma, 1 if form == "ema" else 1 / (1 - b)
        a = 1 - (1 + b) * s if nesterov else 1 - s
        inject = scale * (a * (1 - s) / (lr * b * b * sigma) if nesterov else (1 - s) / (lr * b * sigma))
        assert soft_restart(rule, sigma, 1) == pytest.approx((-a / b, inject), rel=1e-13)
        with mpmath.workdps(oracle.DIGITS):
            states = simulated(rule, sigma, (0.8, -0.3), 4, (2, *optimum(rule, sigma, 1)))
            assert abs(states[3][0]) < mpmath.mpf(10) ** -45
            assert abs(states[3][1]) > 1e-3
            after = oracle.one_round(rule, sigma, *states[3])[0]
            assert nesterov or abs(after / (-mpmath.mpf(rule.momentum) * states[2][0]) - 1) < 1e-40


@FORM
def test_best_injection_is_the_best(form: Form) -> None:
    """R27: heavy ball, R = 1, retain 0: (1-s)^2 / (4 lr b sigma) gives the radius |1-s| / 2, no other less."""
    rng = random.Random(form)
    for _ in range(amount(25, 60)):
        rule, sigma, _ = draw(rng, False, form)
        s = float(oracle.step(rule, sigma))
        inject = (1 - s) ** 2 / (4 * rule.lr * rule.momentum * sigma)
        radii = [
            float(np.abs(np.linalg.eigvals(cycle_matrix(rule, sigma, 1, 0.0, weight * inject))).max())
            for weight in (1.0, 0.0, 0.5, 0.9, 1.1, 2.0, -1.0)
        ]
        assert radii[0] == pytest.approx(abs(1 - s) / 2, rel=1e-6, abs=1e-7)
        assert min(radii[1:]) > abs(1 - s) / 2


# --- one whole cycle ----------------------------------------------------------------------------------------------


@FORM
@KINDS
def test_cycle_matrix_is_what_a_cycle_does(nesterov: bool, form: Form) -> None:
    """R rounds of the literal update and the soft restart, from both unit vectors; hard: chi_R and zeros below."""
    rng = random.Random(f"cycle {nesterov} {form}")
    for _ in range(amount(25, 60)):
        rule, sigma, period = draw(rng, nesterov, form)
        # retain 1, inject 0 is no restart: the power of T itself
        retain, inject = rng.choice([(0.0, 0.0), (rng.uniform(-1, 1), rng.uniform(-2, 2)), (1.0, 0.0)])
        matrix = cycle_matrix(rule, sigma, period, retain, inject)
        for column, start in enumerate(((1, 0), (0, 1))):
            with mpmath.workdps(oracle.DIGITS):
                exact = simulated(rule, sigma, start, period, (period, retain, inject))[-1]
            size = max(1e-300, *(abs(float(v)) for v in exact), abs(matrix[:, column]).max())
            assert max(abs(float(f - e)) for f, e in zip(matrix[:, column], exact, strict=True)) < 1e-12 * size
        hard = cycle_matrix(rule, sigma, period)
        assert hard[1].tolist() == [0, 0]
        assert hard[0, 0] == pytest.approx(float(restart_factor(rule, sigma, period)), rel=1e-9, abs=1e-12)


# --- the warm restart (R28) ---------------------------------------------------------------------------------------


def warm_restart_factor(rule: OuterRule, sigma: float, period: int) -> float:
    """R28: what a cycle leaves of a mode when the buffer begins as g, in EMA form."""
    x, m = cycle_matrix(rule, sigma, period)[0]
    return x + sigma * m


def test_anchor_of_warm_restarts() -> None:
    """R28: b .9, EMA lr 1, sigma 1: 0, -.9, -1.62 where a cold start has .900, .720, .486."""
    warm = [warm_restart_factor(HB, 1.0, period) for period in (1, 2, 3)]
    assert warm == pytest.approx([0, -0.9, -1.62], abs=1e-12)
    assert restart_factor(HB, 1.0, [1, 2, 3]) == pytest.approx([0.9, 0.72, 0.486], abs=1e-12)


@pytest.mark.parametrize("warm", [True, False])
@pytest.mark.parametrize("period", [1, 2, 7])
def test_warm_restart_is_what_torch_does(period: int, warm: bool) -> None:
    """R28: `torch.optim.SGD(dampening=momentum)` with its buffer dropped every K rounds; zeroed, it is a cold start."""
    lr, b, sigma = 0.8, 0.7, 0.6
    x = torch.nn.Parameter(torch.ones((), dtype=torch.float64))
    optimizer = torch.optim.SGD([x], lr=lr, momentum=b, dampening=b)
    for number in range(3 * period):
        if number % period == 0:
            optimizer.state[x]["momentum_buffer"] = None if warm else torch.zeros_like(x)
        x.grad = sigma * x.detach()
        optimizer.step()
    factor = (warm_restart_factor if warm else restart_factor)(OuterRule(lr, b, form="ema"), sigma, period)
    assert float(x.detach()) == pytest.approx(float(factor) ** 3, rel=1e-12, abs=1e-14)


def test_a_mode_that_is_gone_needs_no_restart() -> None:
    """Sigma 1 at lr 1 is nilpotent: after two rounds there is nothing to remove, in an array as by itself."""
    rule = OuterRule(1.0, 0.5, True)
    assert soft_restart(rule, 1.0, 3) == (0, 0)
    retain, inject = soft_restart(rule, [1.0, 0.5], 3)
    assert (retain[0], inject[0]) == (0, 0)
    assert (retain[1], inject[1]) == soft_restart(rule, 0.5, 3)
