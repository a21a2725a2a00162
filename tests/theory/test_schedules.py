"""Moments under gradient noise and the best outer rates: against simulated replicas, `rollout` and closed forms."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from twophase.rule import OuterRule
from twophase.theory.inputs import rule_grid
from twophase.theory.modes import scheduled_progress
from twophase.theory.rollout import rollout
from twophase.theory.schedules import InnerPhases, best_rates, inner_phases, moments, single_mode_rates

EIGENVALUES = np.array([1.0, 0.3, 0.05])
NOISE = np.array([0.8, 0.5, 0.2])
RATES = np.linspace(0.6, 0.1, 6 * 4).reshape(6, 4)
"""Inner learning rates of six rounds of four steps, all different."""


def sampled(rule: OuterRule, replicas: int, period: int, final: float, samples: int) -> Any:
    """Draws of x and m after RATES, from replicas that take every inner step with noise of their own, by hand."""
    stream = np.random.default_rng(7)
    x = 1.0 + 0.5 * stream.standard_normal((samples, 3))
    m = np.zeros_like(x)
    w = 1 if rule.form == "sum" else 1 - rule.momentum
    for t, rates in enumerate(RATES):
        lr = rule.lr * (1 - (1 - final) * t / len(RATES))
        theta = np.repeat(x[None], replicas, axis=0)
        for eta in rates:
            theta = (1 - eta * EIGENVALUES) * theta - eta * NOISE * stream.standard_normal(theta.shape)
        g = x - theta.mean(axis=0)
        m = rule.momentum * m + w * g
        x = x - lr * (w * g + rule.momentum * m if rule.nesterov else m)
        if (t + 1) % period == 0:
            m = np.zeros_like(m)
    return x, m


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("rule", [OuterRule(0.8, 0.6), OuterRule(2.0, 0.5, nesterov=True, form="ema")])
def test_moments_are_those_of_simulated_replicas(rule: OuterRule, replicas: int) -> None:
    """Means, second moments and loss lie within five standard errors of 20,000 simulations of every inner step."""
    # Within five errors lie all 64 comparisons but for one seed in about 27,000.
    phases = inner_phases(EIGENVALUES, RATES, NOISE, replicas)
    exact_moments = moments(rule, phases, 4, schedule="linear:final=2", initial=1.0, spread=0.5)
    x, m = sampled(rule, replicas, 4, 2.0, samples := 20_000)
    for draws, exact in (
        (x, exact_moments.mean_x),
        (m, exact_moments.mean_m),
        (x * x, exact_moments.xx),
        (x * m, exact_moments.xm),
        (m * m, exact_moments.mm),
    ):
        error = draws.std(axis=0) / np.sqrt(samples)
        assert np.all(np.abs(draws.mean(axis=0) - exact[-1]) < 5 * error)
    losses = x**2 @ EIGENVALUES / 2
    assert abs(losses.mean() - exact_moments.loss(EIGENVALUES)[-1]) < 5 * losses.std() / np.sqrt(samples)


@pytest.mark.parametrize("restart", ["never", "3", "cycle:2,5", "soft:3:0.2:0.1"])
@pytest.mark.parametrize("schedule", ["constant", "linear:final=2", "momentum:warmup=0:start=0.1", "transient"])
def test_without_noise_it_is_the_rollout(restart: str, schedule: str) -> None:
    """With constant inner rates and no noise, x and m are those of `rollout`, and second moments their products."""
    rules = rule_grid([0.3, 0.9], [[0.3], [0.8]], [[False], [True]])
    phases = inner_phases(EIGENVALUES, np.full((12, 4), 0.4))
    exact_moments = moments(rules, phases, restart, schedule=schedule, initial=[1.0, -2.0, 0.5])
    sigma = scheduled_progress(EIGENVALUES, np.full(4, 0.4))
    assert np.abs(phases.progress - sigma).max() < 1e-15
    for index, rule in np.ndenumerate(rules):
        run = rollout(rule, sigma, 12, restart, schedule=schedule, initial=[1.0, -2.0, 0.5])
        x, m = run.residual, run.buffer
        for part, expected in (("mean_x", x), ("mean_m", m), ("xx", x * x), ("xm", x * m), ("mm", m * m)):
            error = np.abs(getattr(exact_moments, part)[:, *index] - expected).max()
            assert error < 1e-12 * max(1.0, np.abs(expected).max()), part  # some of these grow


def test_replicas_divide_the_noise() -> None:
    """What noise adds is proportional to 1 / R, so that infinitely many replicas have none."""
    added = []
    clean = moments(OuterRule(0.9, 0.5), inner_phases(EIGENVALUES, RATES)).xx
    for replicas in (1, 8, 10**15):
        noisy = moments(OuterRule(0.9, 0.5), inner_phases(EIGENVALUES, RATES, NOISE, replicas)).xx
        added.append(noisy - clean)
    assert np.allclose(added[0], 8 * added[1], rtol=1e-12, atol=1e-15)
    assert np.abs(added[2]).max() < 1e-14


def test_several_runs_at_once() -> None:
    """Leading axes of the inner rates, and rules that broadcast with them, are as many runs by themselves."""
    peaks, lrs = np.array([0.5, 1.0])[:, None, None], [0.7, 1.0, 1.3]
    exact_moments = moments(rule_grid(lrs, 0.4)[:, None], inner_phases(EIGENVALUES, peaks * RATES, NOISE, 2)).loss(
        EIGENVALUES
    )
    assert exact_moments.shape == (7, 3, 2)
    alone = moments(OuterRule(1.3, 0.4), inner_phases(EIGENVALUES, 0.5 * RATES, NOISE, 2)).loss(EIGENVALUES)
    assert np.allclose(exact_moments[:, 2, 0], alone, rtol=1e-13)


# ------------------------------------------------------------------------------------------------ the best rates


def loss_of(rates: Any, phases: InnerPhases, eigenvalues: Any = EIGENVALUES) -> float:
    """Expected final loss of momentum-free outer rates by the plain recursion of second moments."""
    p = np.ones(len(eigenvalues))
    for nu, sigma, variance in zip(rates, phases.progress, phases.variance, strict=True):
        p = (1 - nu * sigma) ** 2 * p + nu**2 * variance
    return float(eigenvalues @ p / 2)


@pytest.mark.parametrize("replicas", [1, 8])
def test_best_rates_are_stationary_and_beat_constants(replicas: int) -> None:
    """The loss is that of the recursion, no derivative is left by either reckoning, and no constant rate is as good."""
    phases = inner_phases(EIGENVALUES, RATES, NOISE, replicas)
    best = best_rates(phases, EIGENVALUES)
    assert best.loss == pytest.approx(loss_of(best.rates, phases), rel=1e-13)
    scaled = InnerPhases(best.rates[:, None] * phases.progress, best.rates[:, None] ** 2 * phases.variance)
    assert best.loss == pytest.approx(moments(OuterRule(1.0, 0.0), scaled).loss(EIGENVALUES)[-1], rel=1e-13)
    for t in range(len(best.rates)):
        shift = np.eye(len(best.rates))[t] * 1e-4
        slope = (loss_of(best.rates + shift, phases) - loss_of(best.rates - shift, phases)) / 2e-4
        assert abs(best.gradient[t]) < 1e-6 * best.loss
        assert abs(slope) < 1e-5 * best.loss  # central differences err by the square of the shift
    constants = moments(rule_grid(np.linspace(0.05, 3, 60), 0.0), phases).loss(EIGENVALUES)[-1]
    assert best.loss < constants.min()


def test_one_mode_has_a_closed_form() -> None:
    """Of one mode the sweeps find the closed form, whose `p_t` is the inverse of a sum of precisions."""
    phases = inner_phases(EIGENVALUES, RATES, NOISE, 2)
    closed = single_mode_rates(phases, initial=2.0)
    for j, eigenvalue in enumerate(EIGENVALUES):
        single = InnerPhases(phases.progress[:, j : j + 1], phases.variance[:, j : j + 1])
        best = best_rates(single, [eigenvalue], initial=2.0)
        assert np.allclose(best.rates, closed[:, j], rtol=1e-12)
        precision = 1 / 2.0 + np.sum(phases.progress[:, j] ** 2 / phases.variance[:, j])
        assert best.loss == pytest.approx(eigenvalue / 2 / precision, rel=1e-12)


@pytest.mark.parametrize("falls", [True, False])
def test_the_rate_rises_where_the_inner_one_falls_fast(falls: bool) -> None:
    """For small steps the best rate is `1 / (eta_t S lambda (t + t_0))`: it rises where eta_t falls faster."""
    t = np.arange(1, 41)
    eta = 1e-4 * (1 / (1 + t) ** 2 if falls else 1 / (1 + t) ** 0.5)
    rates = single_mode_rates(inner_phases([1.0], np.repeat(eta[:, None], 8, axis=1), 0.01, 4))[:, 0]
    expected = 1 / (eta * 8 * (t + 0.01**2 / (4 * 8)))
    assert np.allclose(rates, expected, rtol=2e-3)
    assert np.all(np.diff(rates) > 0) == falls
    assert np.all(np.diff(rates) < 0) != falls
