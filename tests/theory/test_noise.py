"""Outer momentum and inner noise: exact means against simulations, and bounds on what momentum gains."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import oracle
from twophase import theory
from twophase.rule import FORMS, OuterRule

AVERAGING = OuterRule(1.0, 0.0)
MODES = np.array([1.0, 0.3, 0.02])
each_rule = pytest.mark.parametrize(
    "rule", [OuterRule(1.3, 0.6, ahead, form) for ahead in (False, True) for form in FORMS]
)


@each_rule
def test_stationary_variance(rule: OuterRule) -> None:
    """R32: that of a rollout in the long run, and the limit of the exact loss; infinite where nothing holds a mode."""
    sigma, lr, steps = np.array([0.2, 0.6, 1.0]), 0.7, 3
    run = theory.rollout(rule, sigma, 400, noise=1.0, replicas=2, seeds=60)
    assert run.residual[200:].var(axis=(0, 1)) == pytest.approx(theory.stationary_variance(rule, sigma) / 2, rel=0.08)
    keep = 1 - lr * MODES
    noise = (lr * 0.1) ** 2 / 2 * (1 - keep ** (2 * steps)) / (1 - keep**2)
    found = theory.expected_loss(rule, MODES, lr, inner_steps=steps, rounds=4000, noise=0.1, replicas=2)
    exact = noise * theory.stationary_variance(rule, 1 - keep**steps)
    assert found == pytest.approx((MODES * exact).sum() / 2, rel=1e-9)
    assert np.isinf(theory.stationary_variance(OuterRule(9.0, 0.5, rule.nesterov), [0.0, 1.0])).all()


@each_rule
def test_expected_loss(rule: OuterRule) -> None:
    """Without noise that of a rollout; with it the mean of inner SGD in plain numbers, under a schedule."""
    rates, start = np.array([[0.2], [0.9]]), [1.0, 2.0, 3.0]
    found = theory.expected_loss([rule, AVERAGING], MODES, rates, inner_steps=4, rounds=6, noise=0.0, initial=start)
    sigma = theory.effective_progress(MODES, rates[..., None], 4)
    run = theory.rollout([rule, AVERAGING], sigma, 6, initial=start)
    assert found == pytest.approx((MODES * run.residual[-1] ** 2).sum(-1) / 2)
    random, schedule, noise = np.random.default_rng(0), np.linspace(1.8, 0, 24), np.array([0.3, 0.2, 0.1])
    x, m = np.ones((20_000, 3)), np.zeros((20_000, 3))
    for etas in schedule.reshape(6, 4):
        replicas = np.repeat(x[None], 2, axis=0)
        for eta in etas:
            replicas = replicas - eta * (MODES * replicas + noise * random.standard_normal(replicas.shape))
        x, m, _ = oracle.one_round(rule, 1.0, x, m, noise=-replicas.mean(0), number=float)
    known = theory.expected_loss(rule, MODES, 1.0, inner_steps=4, rounds=6, noise=noise, replicas=2, schedule=schedule)
    assert (MODES * x**2).sum(-1).mean() / 2 == pytest.approx(known, rel=0.03)
    with pytest.raises(ValueError, match="schedule"):
        theory.expected_loss(rule, MODES, 1.0, inner_steps=4, rounds=6, noise=noise, schedule=schedule[1:])


@pytest.mark.parametrize("ahead", [False, True], ids=["heavy ball", "nesterov"])
def test_noise_and_rate_beside_those_of_c_times_the_inner_rate(ahead: bool) -> None:
    """R32 and R33 for all rules with lr <= 1, and that the bounds are no wider than they are said to be."""
    lr, b = np.linspace(0.05, 1, 20)[:, None, None], np.linspace(0, 0.99, 100)[:, None]
    rule, c, eta = theory.rule_grid(lr, b, ahead), lr / (1 - b), np.geomspace(1e-5, 0.99, 99)
    sigma, larger = theory.effective_progress(eta, 1.0, 8), c * eta
    ratio = theory.stationary_variance(rule, sigma) / theory.stationary_variance(AVERAGING, sigma) / c
    low, high = (0.0, 1.28) if ahead else (0.5, 1 + 1e-9)
    assert low < ratio.min() < 0.6
    assert 0.99 < ratio.max() < high
    allowed = (c >= 1) & (larger < 1)
    assert ahead or (ratio <= (2 - eta) / (2 - larger) + 1e-9)[allowed].all()
    rate, slow = theory.asymptotic_rate(rule, sigma), theory.regime(rule, sigma) == "real_below"
    moved = -np.expm1(-rate) / (c * sigma)
    assert ((moved > 1 - 1e-9) & (moved < 1 + np.sqrt(b)))[slow & (b > 0)].all()
    assert (rate >= -8 * np.log1p(-larger.clip(max=0.99)) * (1 - 1e-9))[slow & allowed & (larger < 0.99)].all()


SPREAD = 10 ** (-3 * np.arange(32) / 31)


def gains(heard: Any, rounds: int = 200, *, modes: Any = SPREAD, ahead: bool = False) -> tuple[float, float, float]:
    """What momentum gains exactly where the slowest mode does not oscillate, and the bounds."""
    rates, momenta = 2.0 ** np.arange(-8, 0.1, 0.5), np.array([0, 0.2, 0.4, 0.6, 0.75, 0.85, 0.9, 0.95])
    rules = theory.rule_grid(np.array([0.3, 0.6, 1.0])[:, None], momenta, ahead)[..., None]
    losses, averaging = (
        theory.expected_loss(each, modes, rates, inner_steps=4, rounds=rounds, noise=heard, replicas=2)
        for each in (rules, AVERAGING)
    )
    slow = np.isin(theory.regime(rules, theory.effective_progress(modes[-1], rates, 4)), ["real_below", "critical"])
    gain = averaging.min() / losses[slow | (momenta[:, None] == 0)].min()
    return gain, *theory.momentum_gain(modes, 1.0, 4 * rounds, noise=heard, replicas=2)


def test_momentum_gain() -> None:
    """R34: heavy ball lies within the bounds, to 10 %, by fast noise above twice the lower; Nesterov exceeds them."""
    for noise, at_cap in ((0.003, True), (0.01, True), (0.03, False), (0.3, False)):
        gain, low, high = gains(noise * SPREAD**0.5)
        assert 0.9 * low <= gain <= 1.1 * high
        assert (low > 2) == at_cap
    few, low, _ = gains(0.001 * SPREAD**0.5, rounds=50)
    assert few < low / 5
    heavy, low, high = gains([0.00714, 0], 474, modes=np.array([1, 0.0015]))
    nesterov = gains([0.00714, 0], 474, modes=np.array([1, 0.0015]), ahead=True)[0]
    assert 2.2 * low < heavy < high < nesterov / 1.5


def test_momentum_gain_of_one_mode() -> None:
    """The closed form: the best rate is 0.3."""
    for cap, exact in ((0.1, (np.exp(3 - 1) + 1) / 4), (0.2, (np.exp(3 - 2) + 2) / 4), (0.3, 1), (5, 1)):
        low, high = theory.momentum_gain(0.01, cap, 500, noise=(0.2 * np.exp(-3)) ** 0.5)
        assert (low, high) == (pytest.approx(exact), pytest.approx(4 * low * 4 / (4 + np.log(4))))
    assert theory.momentum_gain([1.0, 0.01], 1.0, 500, noise=1e9) == (1, 1)
    with_still = theory.momentum_gain([1.0, 0.01, 0.0], 1.0, 500, noise=0.01)
    assert with_still == theory.momentum_gain([1.0, 0.01], 1.0, 500, noise=0.01)
    with pytest.raises(ValueError, match="noise"):
        theory.momentum_gain(1.0, 1.0, 9, noise=0.0)
