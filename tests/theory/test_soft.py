"""`theory.soft`: the soft restart that removes a mode, cycles with one, and the warm restart, against 50 digits."""

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
from twophase.restart import Soft, convert
from twophase.rule import FORMS, Form, OuterRule
from twophase.theory.contraction import restart_factor
from twophase.theory.inputs import rule_grid
from twophase.theory.modes import effective_step
from twophase.theory.rollout import rollout
from twophase.theory.soft import best_injection, cycle_matrix, soft_restart, warm_restart_factor

HB = OuterRule(1.0, 0.9, False, "ema")
NAG = OuterRule(1.0, 0.9, True, "ema")
SIX = np.array([0.95, 0.85, 0.75, 0.60, 0.45, 0.30])
KINDS = pytest.mark.parametrize("nesterov", [False, True], ids=["heavy ball", "Nesterov"])
FORM = pytest.mark.parametrize("form", FORMS)


def rule_of(step: float, sigma: float, momentum: float, nesterov: bool, form: Form) -> OuterRule:
    """The rule that gives a mode of that sigma (about) the effective step."""
    return OuterRule(step / sigma / (1 - momentum if form == "ema" else 1), momentum, nesterov, form)


def draw(rng: random.Random, nesterov: bool, form: Form) -> tuple[OuterRule, float, int]:
    """A mode of any regime and a period."""
    step = rng.choice([rng.uniform(0.01, 1), 10 ** rng.uniform(-6, 0), rng.uniform(0.8, 1.2), rng.uniform(1, 4)])
    sigma = rng.uniform(0.02, 1)
    return rule_of(step, sigma, rng.uniform(0.02, 0.98), nesterov, form), sigma, rng.randint(1, 25)


def one_round(rule: OuterRule, sigma: float, x: Any, m: Any) -> tuple[Any, Any, Any]:
    """New x and m after the literal update of the rule's form, and the pseudo-gradient that it used."""
    b, lr, g = mpmath.mpf(rule.momentum), mpmath.mpf(rule.lr), mpmath.mpf(sigma) * x
    weight = 1 - b if rule.form == "ema" else mpmath.mpf(1)
    new = b * m + weight * g
    return x - lr * (b * new + weight * g if rule.nesterov else new), new, g


def simulated(
    rule: OuterRule, sigma: float, start: tuple[Any, Any], rounds: int, soft: tuple[int, Any, Any]
) -> list[tuple[Any, Any]]:
    """The states (x, m) of `rounds` rounds with a soft restart (period, retain, inject) after the round's update."""
    period, retain, inject = soft
    x, m = (mpmath.mpf(v) for v in start)
    states = [(x, m)]
    for number in range(1, rounds + 1):
        x, m, g = one_round(rule, sigma, x, m)
        if number % period == 0:
            m = retain * m + inject * g
        states.append((x, m))
    return states


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


def off(found: Any, exact: Any) -> float:
    """Relative error."""
    return abs(float((mpmath.mpf(float(found)) - exact) / exact))


# --- the soft restart that removes a mode (R26) -------------------------------------------------------------------


@FORM
@KINDS
def test_soft_restart_is_the_formula_to_the_last_digits(nesterov: bool, form: Form) -> None:
    """R26 at 50 digits: relative error below 1e-14 in every regime, next to cancellations and to s = 1 too."""
    rng, worst = random.Random(f"{nesterov} {form}"), 0.0
    cases = [draw(rng, nesterov, form) for _ in range(150)]
    cases += [
        (rule_of(1 + sign * 10.0**-power, 0.7, 0.6, nesterov, form), 0.7, period)
        for sign, power, period in itertools.product((-1, 1), (1, 4, 8, 12, 14), (1, 2, 3))
    ]
    cases += [(rule_of(10.0**-power, 0.7, 0.9, nesterov, form), 0.7, 5) for power in (3, 10, 30, 90, 200)]
    for rule, sigma, period in cases:
        retain, inject = soft_restart(rule, sigma, period)
        with mpmath.workdps(oracle.digits_for(rule, sigma)):
            exact = optimum(rule, sigma, period)
            worst = max(worst, off(retain, exact[0]), off(inject, exact[1]))
    assert worst < 1e-14


@FORM
@KINDS
def test_soft_restart_removes_the_mode_from_any_state(nesterov: bool, form: Form) -> None:
    """R26, tight: at the exact optimum (x, m) is 0 after two cycles; at ours it is 1e-12 of what the state was."""
    rng, worst = random.Random(f"state {nesterov} {form}"), 0.0
    for number in range(60):
        rule, sigma, period = draw(rng, nesterov, form)
        start = (rng.gauss(0, 1), rng.gauss(0, 1) * rng.choice([0, 1, 10]))
        with mpmath.workdps(oracle.digits_for(rule, sigma)):
            exact = optimum(rule, sigma, period)
            if number < 20:
                states = simulated(rule, sigma, start, 2 * period, (period, *exact))
                assert max(map(abs, states[-1])) < mpmath.mpf(10) ** -46 * max(abs(v) for s in states for v in s)
            retain, inject = (mpmath.mpf(float(v)) for v in soft_restart(rule, sigma, period))
            states = simulated(rule, sigma, start, 2 * period, (period, retain, inject))
            # In (x, lr m), which have one scale: the terms that cancel, times what a cycle can make of their errors.
            lr, t = mpmath.mpf(rule.lr), oracle.power(oracle.matrix(rule, sigma), period)
            grown = max(abs(t[0, 0]), abs(t[0, 1] / lr), abs(t[1, 0] * lr), abs(t[1, 1]), 1)
            terms = max(
                abs(v)
                for (x, _), (_, m, g) in ((states[k], one_round(rule, sigma, *states[k])) for k in (period - 1, -2))
                for v in (x, lr * m, lr * retain * m, lr * inject * g)
            )
            worst = max(worst, float((abs(states[-1][0]) + abs(lr * states[-1][1])) / (terms * grown)))
    assert worst < 1e-13


@KINDS
def test_soft_restart_in_a_rollout(nesterov: bool) -> None:
    """The policy `Soft` with these numbers leaves rounding errors of a mode after two cycles, in both forms."""
    for form, period in itertools.product(FORMS, (1, 3, 7)):
        rule = OuterRule(1.2, 0.85, nesterov, "ema").to(form)
        retain, inject = soft_restart(rule, 0.6, period)
        run = rollout(rule, [0.6], 2 * period + 4, restart=Soft(period, float(retain), float(inject)))
        assert abs(run.residual[2 * period :]).max() < 1e-14
        assert abs(run.residual[: 2 * period]).min() > 1e-9


def test_soft_restart_of_the_other_form() -> None:
    """The same trajectory: `retain` is the same, `inject_sum = inject_ema / (1 - momentum)`, as `convert` says."""
    for rule, period in itertools.product((HB, NAG, OuterRule(0.4, 0.3, True, "ema")), (1, 4, 9)):
        retain, inject = soft_restart(rule, 0.7, period)
        other, policy = convert(rule, Soft(period, float(retain), float(inject)), "sum")
        assert isinstance(policy, Soft)
        assert soft_restart(other, 0.7, period) == pytest.approx((policy.retain, policy.inject), rel=1e-13)


def test_soft_restart_at_a_cancellation_is_a_hard_one() -> None:
    """R26: chi_R = 0 if and only if retain = inject = 0, exactly; the signs change with chi_R."""
    zeros = OuterRule(0.5, 0.5)  # phase pi/4: chi is exactly 0 at 2, 6, 10, ...
    for period in range(1, 15):
        retain, inject = soft_restart(zeros, 1.0, period) if period % 4 else (math.nan, math.nan)
        if period % 4 == 2:
            assert (retain, inject) == (0, 0)
            assert math.copysign(1, retain) == math.copysign(1, inject) == 1
        elif period % 4:
            assert retain != 0
            assert inject != 0
    assert soft_restart(OuterRule(1.0, 0.5), 1.0, 1) == (0, 0)
    with pytest.raises(ValueError, match="soft_restart: after period 4 this mode leaves no trace"):
        soft_restart(zeros, 1.0, 4)  # p_4 = 0: the buffer is empty by itself
    before = soft_restart(HB, 0.95, [5, 6])  # chi_5 > 0 > chi_6
    assert before[0][0] < 0 < before[0][1]
    assert before[1][1] < 0 < before[1][0]


@FORM
@KINDS
def test_soft_restart_leaves_the_papers_box(nesterov: bool, form: Form) -> None:
    """R26: whenever chi_R is not 0 (Nesterov: and s < 1) one of the two is negative, outside [0, 1]^2."""
    rng = random.Random(f"box {nesterov} {form}")
    for _ in range(100):
        rule, sigma, period = draw(rng, nesterov, form)
        if not nesterov or effective_step(rule, sigma) < 1:
            retain, inject = soft_restart(rule, sigma, period)
            assert (retain < 0) != (inject < 0)


def test_soft_restart_where_the_state_underflows_or_overflows() -> None:
    """The quotients of x and m keep their digits where both are below 1e-308 or beyond 1e308."""
    for rule, sigma, period in (
        (HB, 0.5, 20_000),
        (NAG, 0.5, 30_000),
        (OuterRule(1 - 1e-9, 0.9, True), 1.0, 200),
        (OuterRule(300.0, 0.5), 1.0, 400),
        (OuterRule(1e90, 0.5), 1.0, 7),
    ):
        retain, inject = soft_restart(rule, sigma, period)
        with mpmath.workdps(oracle.digits_for(rule, sigma)):
            exact = optimum(rule, sigma, period)
            assert off(retain, exact[0]) < 1e-13
            assert off(inject, exact[1]) < 1e-13
    retain, inject = soft_restart(HB, 5e-324, 3)  # inject is beyond all doubles
    assert retain == pytest.approx(-0.41, abs=0.001)
    assert inject == math.inf
    assert soft_restart(OuterRule(1.0, 5e-324), 0.5, 3) == (-math.inf, math.inf)


def test_soft_restart_shapes() -> None:
    """Rules, sigma and period broadcast."""
    rules = rule_grid([[0.1], [0.4]], 0.9)
    retain, inject = soft_restart(rules, [0.3, 0.5, 0.9], [[[2]], [[3]], [[4]], [[7]]])
    assert retain.shape == inject.shape == (4, 2, 3)
    for place in np.ndindex(4, 2, 3):
        single = soft_restart(rules[place[1], 0], [0.3, 0.5, 0.9][place[2]], [2, 3, 4, 7][place[0]])
        assert (retain[place], inject[place]) == single
    assert [part.shape for part in soft_restart(HB, [], 3)] == [(0,), (0,)]
    assert np.ndim(soft_restart(HB, 0.5, 3)[0]) == 0


# --- one round, several modes (R27) -------------------------------------------------------------------------------


@FORM
@KINDS
def test_soft_restart_every_round(nesterov: bool, form: Form) -> None:
    """R27: the closed forms at R = 1; in another cycle they still make x 0 in the next round, and m bring it back."""
    for lr, b, sigma in ((1.0, 0.9, 0.3), (0.4, 0.5, 0.95), (2.0, 0.7, 0.5)):
        rule = OuterRule(lr, b, nesterov, "ema").to(form)
        s, scale = lr * (1 - b) * sigma, 1 if form == "ema" else 1 / (1 - b)
        a = 1 - (1 + b) * s if nesterov else 1 - s
        retain = -a / b
        inject = scale * (a * (1 - s) / (lr * b * b * sigma) if nesterov else (1 - s) / (lr * b * sigma))
        assert soft_restart(rule, sigma, 1) == pytest.approx((retain, inject), rel=1e-13)
        with mpmath.workdps(oracle.DIGITS):
            exact = optimum(rule, sigma, 1)
            states = simulated(rule, sigma, (0.8, -0.3), 4, (2, *exact))
            assert abs(states[3][0]) < mpmath.mpf(10) ** -45
            assert abs(states[3][1]) > 1e-3
            if not nesterov:
                again = simulated(rule, sigma, (0.8, -0.3), 4, (2, *exact))[2][0]
                after = one_round(rule, sigma, *states[3])[0]
                assert abs(after / (-mpmath.mpf(rule.momentum) * again) - 1) < 1e-40


@FORM
def test_best_injection_is_the_best(form: Form) -> None:
    """R27: heavy ball, R = 1, retain 0: the radius is |1-s| / 2, a double root, and no other injection has less."""
    rng = random.Random(form)
    for _ in range(60):
        rule, sigma, _ = draw(rng, False, form)
        inject, rate = best_injection(rule, sigma)
        s, b = oracle.step(rule, sigma), mpmath.mpf(rule.momentum)
        exact = (1 - s) ** 2 / (4 * mpmath.mpf(rule.lr) * b * mpmath.mpf(sigma))
        assert off(inject, exact) < 1e-13
        assert off(rate, -mpmath.log(abs(1 - s) / 2)) < 1e-13 * max(1, 1 / abs(float(rate)))

        def radius(weight: float, rule: OuterRule = rule, sigma: float = sigma) -> float:
            return float(np.abs(np.linalg.eigvals(cycle_matrix(rule, sigma, 1, 0.0, weight))).max())

        best = float(abs(1 - s) / 2)
        assert radius(float(inject)) == pytest.approx(best, rel=1e-6, abs=1e-7)
        for other in (0.0, 0.5, 0.9, 1.1, 2.0, -1.0):
            assert radius(other * float(inject)) > best
    near = rule_of(1 - 1e-10, 0.7, 0.6, False, form)  # the digits of 1 - s are kept
    inject, rate = best_injection(near, 0.7)
    with mpmath.workdps(oracle.DIGITS):
        s = oracle.step(near, 0.7)
        exact = (1 - s) ** 2 / (4 * mpmath.mpf(near.lr) * mpmath.mpf(0.6) * mpmath.mpf(0.7))
        assert off(inject, exact) < 1e-14
        assert off(rate, -mpmath.log(abs(1 - s) / 2)) < 1e-14


def test_best_injection_at_the_ends() -> None:
    """At s = 1 nothing is needed and the rate is infinite; shapes broadcast; what cannot be is refused."""
    assert best_injection(OuterRule(1.0, 0.5), 1.0) == (0, math.inf)
    inject, rate = best_injection(rule_grid([[0.1], [0.2]], 0.5), [0.1, 0.2, 0.3])
    assert inject.shape == rate.shape == (2, 3)


def six_mode_loss(rule: OuterRule, period: int, cycles: int, retain: float, inject: float) -> float:
    """Log10 of the six modes' loss after whole cycles."""
    matrices = np.linalg.matrix_power(cycle_matrix(rule, SIX, period, retain, inject), cycles)
    return math.log10(np.mean(matrices[:, 0, 0] ** 2) / 2)


@pytest.mark.parametrize(
    ("rule", "period", "rounds", "soft", "hard"),
    [
        (HB, 7, 63, -11.0, -8.0),
        (HB, 3, 63, -12.8, -4.3),
        (OuterRule(0.9, 0.7, True, "ema"), 3, 24, -9.7, -5.3),
    ],
    ids=["HB 7", "HB 3", "NAG 3"],
)
def test_anchor_of_several_modes(rule: OuterRule, period: int, rounds: int, soft: float, hard: float) -> None:
    """R27: the best (retain, inject) of a grid of .05 in [0, 1]^2 against a hard restart, six modes."""
    grid = np.arange(21) / 20
    found = min(six_mode_loss(rule, period, rounds // period, a, b) for a, b in itertools.product(grid, grid))
    assert found == pytest.approx(soft, abs=0.05)
    assert six_mode_loss(rule, period, rounds // period, 0, 0) == pytest.approx(hard, abs=0.05)


# --- one whole cycle ----------------------------------------------------------------------------------------------


@FORM
@KINDS
def test_cycle_matrix_is_what_a_cycle_does(nesterov: bool, form: Form) -> None:
    """R rounds of the literal update and the soft restart, from both unit vectors; hard: chi_R and zeros below."""
    rng, worst = random.Random(f"cycle {nesterov} {form}"), 0.0
    for _ in range(60):
        rule, sigma, period = draw(rng, nesterov, form)
        retain, inject = rng.choice([(0.0, 0.0), (rng.uniform(-1, 1), rng.uniform(-2, 2)), (1.0, 0.0)])
        found = cycle_matrix(rule, sigma, period, retain, inject)
        for column, start in enumerate(((1, 0), (0, 1))):
            with mpmath.workdps(oracle.DIGITS):
                exact = simulated(rule, sigma, start, period, (period, retain, inject))[-1]
            size = max(1e-300, *(abs(float(v)) for v in exact), abs(found[:, column]).max())
            worst = max(worst, *(abs(float(f - e)) / size for f, e in zip(found[:, column], exact, strict=True)))
        hard = cycle_matrix(rule, sigma, period)
        assert hard[1].tolist() == [0, 0]
        assert hard[0, 0] == pytest.approx(float(restart_factor(rule, sigma, period)), rel=1e-9, abs=1e-12)
        # retain 1, inject 0 is no restart: the power of T itself
        with mpmath.workdps(oracle.DIGITS):
            whole = oracle.power(oracle.matrix(rule, sigma), period)
        np.testing.assert_allclose(
            cycle_matrix(rule, sigma, period, 1.0, 0.0), np.array(whole.tolist(), dtype=float), rtol=1e-9, atol=1e-12
        )
    assert worst < 1e-12


def test_cycle_matrix_at_the_optimum_is_nilpotent() -> None:
    """R26: both eigenvalues 0, the square 0, to rounding."""
    for rule, period in itertools.product((HB, NAG, OuterRule(0.3, 0.6, True)), (1, 3, 8)):
        retain, inject = soft_restart(rule, 0.7, period)
        matrix = cycle_matrix(rule, 0.7, period, float(retain), float(inject))
        scale = np.diag([1.0, rule.lr])
        matrix = scale @ matrix @ np.linalg.inv(scale)
        assert abs(matrix @ matrix).max() < 1e-14 * max(1, abs(matrix).max() ** 2)
        assert abs(np.trace(matrix)) < 1e-14 * abs(matrix).max()


def test_cycle_matrix_shapes() -> None:
    """Rules and sigma broadcast, matrices last."""
    rules = rule_grid([[0.1], [0.4]], 0.9)
    found = cycle_matrix(rules, [0.3, 0.5, 0.9], 4, 0.2, 0.1)
    assert found.shape == (2, 3, 2, 2)
    for i, j in np.ndindex(2, 3):
        np.testing.assert_allclose(found[i, j], cycle_matrix(rules[i, 0], [0.3, 0.5, 0.9][j], 4, 0.2, 0.1), rtol=1e-14)
    assert cycle_matrix([HB, NAG], 0.3, 2, 0.2, 0.1).shape == (2, 2, 2)
    assert cycle_matrix(HB, [], 3).shape == (0, 2, 2)
    assert cycle_matrix(OuterRule(0.5, 0.5), 1.0, 2).tolist() == [[0.0, -0.25], [0.0, 0.0]]


# --- the warm restart (R28) ---------------------------------------------------------------------------------------


def warmed(rule: OuterRule, sigma: float, period: int) -> tuple[Any, Any]:
    """x_K where the cycle's first buffer is g (EMA form) instead of (1-b) g, and the largest |x| on the way."""
    ema = rule.to("ema") if rule.momentum == 0 else rule
    b, share = mpmath.mpf(ema.momentum), mpmath.mpf(sigma)
    lr = mpmath.mpf(ema.lr) / (1 if ema.form == "ema" else 1 - b)
    x, m, largest = mpmath.mpf(1), mpmath.mpf(0), mpmath.mpf(1)
    for number in range(period):
        g = share * x
        new = g if number == 0 else b * m + (1 - b) * g
        # R28: m_0 = sigma x_0 before the round, so that m_1 = b g + (1-b) g = g
        x, m = x - lr * (b * new + (1 - b) * g if ema.nesterov else new), new
        largest = max(largest, abs(x))
    return x, largest


@FORM
@KINDS
def test_warm_restart_against_50_digits(nesterov: bool, form: Form) -> None:
    """R28: x_K of the cycle whose first buffer is g, in both forms of the same trajectory."""
    rng, worst = random.Random(f"warm {nesterov} {form}"), 0.0
    for _ in range(100):
        rule, sigma, period = draw(rng, nesterov, form)
        with mpmath.workdps(oracle.DIGITS):
            exact, largest = warmed(rule, sigma, period)
            t = oracle.power(oracle.matrix(rule.to("ema"), sigma), period)
            assert abs(float((t[0, 0] + mpmath.mpf(sigma) * t[0, 1] - exact) / largest)) < 1e-12
        found = warm_restart_factor(rule, sigma, period)
        worst = max(worst, abs(float((mpmath.mpf(float(found)) - exact) / largest)))
    assert worst < 1e-14


def test_anchor_of_warm_restarts() -> None:
    """R28: b .9, EMA lr 1, sigma 1: 0, -.9, -1.62 where a cold start has .900, .720, .486."""
    assert warm_restart_factor(HB, 1.0, [1, 2, 3]) == pytest.approx([0, -0.9, -1.62], abs=1e-12)
    assert warm_restart_factor(HB.to("sum"), 1.0, [1, 2, 3]) == pytest.approx([0, -0.9, -1.62], abs=1e-12)
    assert restart_factor(HB, 1.0, [1, 2, 3]) == pytest.approx([0.9, 0.72, 0.486], abs=1e-12)


@pytest.mark.parametrize("period", [1, 2, 3, 7])
def test_warm_restart_is_what_torch_does(period: int) -> None:
    """R28: `torch.optim.SGD(dampening=momentum)` with its buffer dropped every K rounds; zeroed, it is a cold start."""
    lr, b, sigma = 0.8, 0.7, 0.6
    rule = OuterRule(lr, b, form="ema")
    for warm in (True, False):
        x = torch.nn.Parameter(torch.ones((), dtype=torch.float64))
        optimizer = torch.optim.SGD([x], lr=lr, momentum=b, dampening=b)
        if not warm:
            optimizer.state[x]["momentum_buffer"] = torch.zeros_like(x)
        for number in range(1, 3 * period + 1):
            x.grad = sigma * x.detach()
            optimizer.step()
            if number % period == 0:
                if warm:
                    optimizer.state[x]["momentum_buffer"] = None
                else:
                    optimizer.state[x]["momentum_buffer"].zero_()
        factor = warm_restart_factor(rule, sigma, period) if warm else restart_factor(rule, sigma, period)
        assert float(x.detach()) == pytest.approx(float(factor) ** 3, rel=1e-12, abs=1e-14)


def test_warm_restart_at_the_ends() -> None:
    """Shapes; far periods under- and overflow without a word; without momentum it is the cold one."""
    rules = rule_grid([[0.1], [0.4]], 0.9)
    found = warm_restart_factor(rules, [0.3, 0.5, 0.9], [[[2]], [[3]]])
    assert found.shape == (2, 2, 3)
    assert found[1, 0, 2] == warm_restart_factor(rules[0, 0], 0.9, 3)
    assert warm_restart_factor(HB, [], 3).shape == (0,)
    assert abs(warm_restart_factor(HB, 0.5, 10**6)) == 0
    assert abs(warm_restart_factor(OuterRule(100.0, 0.5), 1.0, 1000)) == math.inf
    plain = OuterRule(0.3, 0.0)
    for period in (1, 2, 9):
        assert warm_restart_factor(plain, 0.5, period) == pytest.approx(
            float(restart_factor(plain, 0.5, period)), rel=1e-14
        )
