"""`theory.advise` and `theory.controls`: the choices are what the theory's own functions say."""

from __future__ import annotations

import itertools
import random
from typing import Any, cast

import numpy as np
import pytest

from oracle import SIX
from runmaker import EMA
from twophase import theory
from twophase.restart import Never, Periodic, mean_outer_gain
from twophase.rule import FORMS, OuterRule


def cases() -> list[tuple[theory.Advice, list[float], list[float] | None]]:
    """Random questions: rules of any kind and form (some unstable, some without momentum), horizons or none."""
    rng, answered = random.Random(1), []
    for _ in range(30):
        form, momentum = rng.choice(FORMS), rng.choice([0.0, rng.uniform(0.05, 0.97), rng.uniform(0.5, 0.97)])
        step = rng.choice([rng.uniform(0.01, 1.1), rng.uniform(0.01, 1.1), rng.uniform(1, 4)])
        rule = OuterRule(step / (1 - momentum if form == "ema" else 1), momentum, rng.random() < 0.5, form)
        sigma = [rng.choice([rng.uniform(0.01, 1), 0.0]) for _ in range(rng.randint(1, 6))] + [0.7]
        weights = None if rng.random() < 0.5 else [rng.choice([0.0, 1.0, rng.random()]) for _ in sigma[1:]] + [0.5]
        rounds = rng.choice([None, rng.randint(1, 9), rng.randint(10, 120)])
        answered.append((theory.advise(rule, sigma, weights=weights, rounds=rounds), sigma, weights))
    return answered


def test_each_criterion_and_its_numbers() -> None:
    """Every objective has the theory's own period, slowest rate and loss; the first only where it is better."""
    for advice, sigma, weights in cases():
        rule, rounds, shares = advice.rule, advice.rounds, np.ones(len(sigma)) if weights is None else np.array(weights)
        moving = (np.array(sigma) > 0) & (shares > 0)
        np.testing.assert_array_equal(advice.sigma, np.array(sigma)[moving])
        np.testing.assert_allclose(advice.weights, shares[moving] / shares[moving].sum())
        options: dict[str, Any] = {"weights": advice.weights, "max_period": advice.max_period, "rounds": rounds}
        for item in (*advice.criteria, advice.without):
            period = item.period
            if period is not None:
                assert period == theory.best_period(rule, advice.sigma, objective=cast(Any, item.name), **options)
            rate = (
                theory.restart_rate(rule, advice.sigma, period)
                if period
                else theory.asymptotic_rate(rule, advice.sigma)
            )
            assert item.rate == np.min(rate)
            if rounds is not None:
                loss = theory.log_final_loss(rule, advice.sigma, rounds, period or rounds, advice.weights)
                assert item.log_loss == pytest.approx(float(loss), rel=1e-12)
        best, without = advice.recommended, advice.without
        if best.period is None:
            assert advice.hurt == 0
        else:
            assert advice.hurt == theory.hurt_share(rule, advice.sigma, best.period, advice.weights)
            assert (best.log_loss or 0) < (without.log_loss or 0) if rounds else best.rate > without.rate


@pytest.mark.parametrize("rounds", [None, 20])
@pytest.mark.parametrize(
    ("rule", "sigma"),
    [
        (OuterRule(0.7, 0.0), [0.5, 0.2]),
        (OuterRule(0.7, 1e-13), [0.5, 0.2]),
        (OuterRule(2.0, 0.5, nesterov=True, form="ema"), [1.0]),
        (OuterRule(0.01, 0.5), [0.5, 0.2]),
    ],
    ids=["no-momentum", "tiny-momentum", "nilpotent", "real"],
)
def test_no_restart_where_none_can_help(rule: OuterRule, sigma: list[float], rounds: int | None) -> None:
    """Where no mode oscillates the advice is never to restart, though all periods may do the same (Theorem 1)."""
    assert theory.advise(rule, sigma, rounds=rounds).recommended.period is None


@pytest.mark.parametrize("rule", [EMA, OuterRule(0.7, 0.9, nesterov=True), OuterRule(0.3, 0.5, True)])
def test_controls(rule: OuterRule) -> None:
    """R31 and E11: no momentum at the same step and at the same mean gain, and the momentum tuned on a grid."""

    def slowest(other: OuterRule) -> float:
        return float(np.min(theory.asymptotic_rate(other, SIX)))

    lr, ema_lr = rule.to("sum").lr, rule.to("ema").lr
    momenta = [*np.linspace(0, 0.995, 200).tolist(), rule.momentum]
    best = max(slowest(OuterRule(ema_lr, b, rule.nesterov, "ema")) for b in momenta)
    for period, rounds in itertools.product((None, 1, 3, 7), (None, 2, 25)):
        gain = ema_lr
        if period or rounds:
            gain = mean_outer_gain(rule, Never() if period is None else Periodic(period), rounds or period or 1)
        rates = list(theory.controls(rule, SIX, period, rounds).values())
        assert rates == pytest.approx([slowest(OuterRule(lr, 0.0)), slowest(OuterRule(gain, 0.0)), best], rel=1e-9)


def test_a_tuned_momentum_is_not_worse_than_the_rules_own() -> None:
    """Above 0.995, too, where the best momentum of a rule with a large EMA lr lies."""
    for rule in (OuterRule(1.0, 0.999), OuterRule(0.7, 0.999, True)):
        tuned = list(theory.controls(rule, [1.0, 0.95, 0.3], 3).values())[-1]
        assert tuned >= float(np.min(theory.asymptotic_rate(rule, [1.0, 0.95, 0.3]))) > 0


def test_range_of_periods() -> None:
    """As asked; otherwise the horizon, or three times the longest first cancellation, at most 10000."""
    assert theory.advise(EMA, SIX, max_period=11).max_period == 11
    long = theory.advise(EMA, SIX, rounds=10**9)
    assert (long.max_period, long.recommended.period) == (10_000, 7)
    assert theory.advise(EMA, [0.03]).max_period > 3 * theory.cancellation_periods(EMA, 0.03, 1)[0]
