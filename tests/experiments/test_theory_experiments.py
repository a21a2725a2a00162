"""The experiments on linear modes: the numbers that docs quote, and independent oracles."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import mixed_periods
import outer_schedules
import period_criteria
import restart_mechanism
import robustness_toy
from common import Result, select
from model import SIX, WIDE
from schedules import InnerPhases, OuterSchedule, best_rates, inner_phases, second_moments
from twophase.rule import OuterRule
from twophase.theory.periods import best_period, log_final_loss
from twophase.theory.rollout import rollout


def printed(text: str) -> Any:
    """The value that was printed, to half a unit of its last digit."""
    digits = len(text.partition(".")[2])
    return pytest.approx(float(text), abs=0.5000001 * 10**-digits, rel=0)


@pytest.fixture(scope="module")
def mechanism() -> Result:
    """Paper figure 1, in full."""
    return restart_mechanism.table()


ANCHORS = {
    # A1: one mode, 80 rounds, heavy ball by period, Nesterov, and outer SGD
    "single/none": "-3.96", "single/best": "-64.54", "single/nag_none": "-7.45", "single/nag_best": "-36.8",
    "single/best_period": 5, "single/rate_period": 5, "single/factor_period": 75, "single/sgd": "-208",
    "single/by_period": {5: "-64.54", 15: "-24.5", 4: "-23.7", 6: "-17.9", 75: "-10.0"},
    # E1: the least |chi_K| depends on the range of K; E18: tuned Nesterov is what its grid makes it
    "single/factor_period_by_max_period": {10: 5, 20: 15, 40: 35, 80: 75},
    "single/nag_tuned/[0.5, 1)/log10_loss": "-50.3", "single/nag_tuned/[0.3, 0.99]/log10_loss": "-80.2",
    # A2: six modes, 120 rounds: global periods, a period per mode, the paper's criterion, tuned rules
    "six/none": "-6.16", "six/own": "-32.04", "six/sgd": "-38.3", "six/best_period": 7, "six/minimax_period": 7,
    "six/own_periods": (5, 5, 6, 7, 8, 10), "six/factor_period_by_max_period": {11: 6, 20: 17, 120: 120},
    "six/tuned_without_restart/hb/momentum": "0.30", "six/tuned_without_restart/hb/log10_loss": "-63.0",
    # A3: blocks of 9 modes: one period, a period per block, both heuristics
    "blocks/9/none": "-6.01", "blocks/9/best": "-8.85", "blocks/9/own": "-17.81", "blocks/9/heuristic": "-13.55",
    "blocks/9/corrected": "-15.56", "blocks/9/periods/own": (5, 7, 13), "blocks/21/best_period": 8,
    # A4 and R15: first zero, how far |x_t| exceeds rho^t, and the sigma from which a period gains
    "oscillation/0.95/first_zero": "5.04", "oscillation/0.1/largest_ratio_to_radius": "1.136",
    "oscillation/lowest_sigma_that_gains": {3: "0.267", 5: "0.184", 7: "0.143"},
}  # fmt: skip
"""The theory note's anchors, by their place among the numbers; a text has the digits that the note prints."""


@pytest.mark.slow
def test_mechanism_has_the_anchors(mechanism: Result) -> None:
    """Each anchor of paper figure 1 has its printed digits."""

    def wanted(anchor: Any) -> Any:
        if isinstance(anchor, dict):
            return {key: wanted(item) for key, item in anchor.items()}
        return printed(anchor) if isinstance(anchor, str) else anchor

    for path, anchor in ANCHORS.items():
        value: Any = mechanism.numbers
        for name in path.split("/"):
            value = value[name]
        assert value == wanted(anchor), path


@pytest.mark.slow
def test_mechanism_curves_end_at_the_exact_losses(mechanism: Result) -> None:
    """The simulated curves that are drawn end at the exact final losses, to 1e-9 dex."""
    nine = mechanism.numbers["blocks"]["9"]
    ends = {row["kind"]: row["log10_loss"] for row in select(mechanism.rows, panel="c")}  # the last of each
    exact = {"none": "none", "global": "best", "factor": "heuristic", "own": "own", "heuristic": "corrected"}
    assert all(ends[kind] == pytest.approx(nine[key], abs=1e-9) for kind, key in exact.items())


GOOD = {  # anchor A5: shares of good cells without restarts, with the best period of each cell, with K=3
    "six modes, ema, HB": (".66", ".79", ".70"),
    "six modes, ema, NAG": (".59", ".65", ".60"),
    "six modes, sum, HB": (".75", ".93", ".75"),
    "six modes, sum, NAG": (".68", ".71", ".67"),
    "wide, ema, HB": (".48", ".48", ".26"),
    "wide, ema, NAG": (".35", ".35", ".20"),
    "wide, sum, HB": (".57", ".62", ".42"),
    "wide, sum, NAG": (".37", ".39", ".29"),
}


@pytest.mark.slow
def test_toy_shares_and_cells() -> None:
    """Anchor A5; the best period rescues no cell (R18); cells drawn at random equal a simulation."""
    result = robustness_toy.table()
    for name, facts in result.numbers.items():
        good, diverged = facts["good"], facts["diverged"]
        assert [good["none"], good["best"], good["every_3"]] == [printed(text) for text in GOOD[name]], name
        assert diverged["best"] == diverged["none"] <= diverged["every_3"], name
    spectra = {"six modes": SIX, "wide": WIDE}
    for index in np.random.default_rng(0).integers(len(result.rows), size=10):
        row = result.rows[index]
        rule = OuterRule(row["lr"], row["momentum"], row["rule"] == "NAG", row["form"])
        for key, period in (("none", 60), ("best", row["best_period"]), ("every_3", 3)):
            loss = rollout(rule, spectra[row["spectrum"]], 60, period).loss[-1]
            assert row[key] == pytest.approx(math.log10(loss), abs=2e-6)  # rows are rounded to 1e-6


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
