"""The experiments on linear modes: the numbers that docs quote, and independent oracles."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import mixed_periods
import outer_schedules
import period_criteria
from schedules import InnerPhases, OuterSchedule, best_rates, inner_phases, second_moments
from twophase.theory import best_period, log_final_loss


def printed(text: str) -> Any:
    """The value that was printed, to half a unit of its last digit."""
    digits = len(text.partition(".")[2])
    return pytest.approx(float(text), abs=0.5000001 * 10**-digits, rel=0)


REGRETS = {"minimax": (0.00, 0.33), "factor 11": (1.31, 1.84), "factor 20": (1.08, 1.75), "factor 60": (1.20, 1.80)}
"""R22: median and mean, from other draws of the same distribution."""


@pytest.mark.slow
def test_regrets_of_criteria() -> None:
    """R22's regrets lie within three standard errors of ours; exact loss has none, and none is below 0."""
    numbers = period_criteria.table(quick=True).numbers
    for name, pair in REGRETS.items():
        for key, value in zip(("median", "mean"), pair, strict=True):
            facts = numbers["60"][name]
            assert abs(facts[key] - value) <= 3 * math.sqrt(2) * facts[f"{key}_error"] + 0.005, name
    assert all(facts["loss"]["exact"] == 1 and facts["loss"]["q90"] == 0 for facts in numbers.values())
    draws = period_criteria.Draws.make(10)
    logs, losses = draws.losses(12)
    choices = period_criteria._choices(draws, logs, losses)
    for i, (rule, sigma, weights) in enumerate(zip(draws.rules, draws.sigma, draws.weights, strict=True)):
        exact = log_final_loss(rule, sigma, 12, range(1, 13), weights) / np.log(10)
        assert losses[:, i] == pytest.approx(exact, abs=1e-9)
        assert choices["loss"][i] + 1 == best_period(rule, sigma, weights=weights, max_period=12, rounds=12)
        assert choices["minimax"][i] + 1 == best_period(rule, sigma, weights=weights, max_period=12)


@pytest.mark.slow
def test_mixed_periods_have_the_rates_of_the_note() -> None:
    """R24 and R25: mixes, Chebyshev's ceiling above all of them, and the best schedules of the paper's spectra."""
    numbers = mixed_periods.table(quick=True).numbers
    facts = mixed_periods._rates(((0.3, 0.95), "HB"), 1.0, mixed_periods.MODES)
    wanted = {"none": ".0527", "fixed": ".1315", "mix": ".1946", "chebyshev": "1.271", "sgd_tuned": ".654"}
    assert {key: facts[key] for key in wanted} == {key: printed(text) for key, text in wanted.items()}
    for facts in numbers["rates"].values():
        assert max(facts[name] for name in mixed_periods._RATES) <= facts["chebyshev"] + 1e-9
        assert facts["heavy_ball_tuned"] == pytest.approx(facts["chebyshev"], rel=1e-6)
    six, three = numbers["schedules"].values()
    assert (six["none"], six["fixed"], six["mix"]) == (printed("-6.16"), printed("-14.45"), printed("-20.94"))
    assert (three["none"], three["fixed"], three["mix"]) == (printed("-6.01"), printed("-8.85"), printed("-16.64"))


# --------------------------------------------------------------------------------------------------- outer schedules

EIGENVALUES, NOISE = np.array([1.0, 0.3, 0.05]), np.array([0.8, 0.5, 0.2])
INNER_LRS = np.linspace(0.6, 0.1, 6 * 4).reshape(6, 4)
"""Inner learning rates of six rounds of four steps, all different."""


def test_moments_are_those_of_simulated_replicas() -> None:
    """Second moments lie within five standard errors of 20,000 simulations of every inner step (R32)."""
    stream = np.random.default_rng(7)
    x = np.ones((20_000, 3))
    m = np.zeros_like(x)
    for t, rates in enumerate(INNER_LRS):
        theta = np.repeat(x[None], 3, axis=0)
        for eta in rates:
            theta = (1 - eta * EIGENVALUES) * theta - eta * NOISE * stream.standard_normal(theta.shape)
        g = x - theta.mean(axis=0)
        m = 0.5 * m + g
        x = x - 0.8 * (1 + t / len(INNER_LRS)) * (g + 0.5 * m)
        m = 0 * m if t == 3 else m
    exact = second_moments(inner_phases(EIGENVALUES, INNER_LRS, NOISE, 3), 0.8, 0.5, OuterSchedule(True, 4, 2.0))
    assert np.all(np.abs((x * x).mean(axis=0) - exact) < 5 * (x * x).std(axis=0) / math.sqrt(20_000))


def test_best_rates_are_stationary_and_have_a_closed_form() -> None:
    """No change of a rate lowers the loss, and of one mode the rates are those of dynamic programming (R33)."""
    phases = inner_phases(EIGENVALUES, INNER_LRS, NOISE, 2)
    rates, loss = best_rates(phases, EIGENVALUES)

    def loss_of(nu: Any) -> float:
        scaled = InnerPhases(nu[:, None] * phases.progress, nu[:, None] ** 2 * phases.variance)
        return float(EIGENVALUES @ second_moments(scaled, 1.0, 0.0, OuterSchedule())) / 2

    assert loss == pytest.approx(loss_of(rates), rel=1e-13)
    assert all(loss_of(rates + shift) > loss for shift in (*1e-3 * np.eye(6), *-1e-3 * np.eye(6)))
    single = InnerPhases(phases.progress[:, :1], phases.variance[:, :1])
    p = 1 / (1 + np.cumsum(single.progress**2 / single.variance))
    assert best_rates(single, [1.0])[0] == pytest.approx((single.progress / single.variance)[:, 0] * p, rel=1e-12)


@pytest.mark.slow
def test_a_tuned_arm_is_as_good_as_its_special_cases() -> None:
    """The course of the best rates under a cosine that docs print, and no arm behind what it holds."""
    model = outer_schedules.Model(outer_schedules.base("short"), outer_schedules.NOISE, outer_schedules.MODES)
    facts, _ = outer_schedules._schedule(model)
    assert facts["gain_best"] > facts["gain_line"] >= facts["gain_constant"] >= 0
    losses = {name: model.tuned(arm)["loss"] for name, arm in [*outer_schedules.ARMS.items()][:4]}
    assert losses["heavy-ball:momentum=~0.6"] <= losses["memoryless"] * (1 + 1e-12) <= losses["averaging"] * (1 + 1e-12)
