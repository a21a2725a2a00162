"""`theory.mixing`: the linear program, the search for a finite run, the Chebyshev limit."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from typing import Any

import mpmath
import numpy as np
import pytest

import oracle
from amount import amount
from oracle import HB, NAG, SIX, THREE, random_rule
from twophase.restart import AtRounds, Never
from twophase.rule import FORMS, OuterRule
from twophase.theory.contraction import log_restart_factor, restart_can_help, restart_table
from twophase.theory.mixing import Schedule, best_schedule, chebyshev_rate, mixed_periods
from twophase.theory.modes import asymptotic_rate
from twophase.theory.periods import best_period, log_final_loss
from twophase.theory.rollout import rollout

GONE = oracle.NILPOTENT[0]  # at sigma 1: chi_1 = -1/2, then 0
LOG_10 = math.log(10)

# --- the best mix in the long run (R24) ---------------------------------------------------------------------------

ANCHORS = [  # interval, rule, no restart, best fixed rate and period, rate of the mix
    ((0.3, 0.95), HB, 0.0527, 0.1315, 7, 0.1946),
    ((0.3, 0.95), OuterRule(7.0, 0.9, False, "ema"), 0.0527, 0.3605, 2, 0.5051),
    ((0.3, 0.95), OuterRule(7.0, 0.9, True, "ema"), 0.1705, 0.5092, 1, 0.7152),
]


@pytest.mark.parametrize(("ends", "rule", "none", "fixed", "period", "mix"), ANCHORS, ids=["HB 1", "HB 7", "NAG 7"])
def test_anchors_of_mixes(
    ends: tuple[float, float], rule: OuterRule, none: float, fixed: float, period: int, *, mix: float
) -> None:
    """R24's table, 241 modes, K <= 40; the same rule in the other form gives the same."""
    sigma = np.linspace(*ends, 241)
    for form in FORMS:
        mixture = mixed_periods(rule.to(form), sigma, max_period=40)
        assert (mixture.rate, mixture.fixed_rate) == pytest.approx((mix, fixed), abs=0.00006)
        assert mixture.fixed_period == period
    assert np.min(asymptotic_rate(rule, sigma)) == pytest.approx(none, abs=0.00006)


def check_mix(rule: OuterRule, sigma: Any, max_period: int) -> Any:
    """A mix is valid, its rates are those of its parts, and it is no worse than any single period."""
    mix = mixed_periods(rule, sigma, max_period=max_period)
    assert sum(mix.shares) == pytest.approx(1, rel=1e-14)
    assert min(mix.shares) > 0
    assert list(mix.periods) == sorted(set(mix.periods) & set(range(1, max_period + 1)))
    values = np.atleast_1d(np.asarray(sigma, dtype=float))
    rates = -restart_table(rule, values, max_period)[1] / np.arange(1, max_period + 1)[:, None]
    assert mix.fixed_period == best_period(rule, values, max_period=max_period)
    assert mix.fixed_rate == pytest.approx(rates.min(axis=1).max(), rel=1e-11)
    assert mix.rate >= mix.fixed_rate
    parts = np.array([rates[k - 1] for k in mix.periods])
    assert mix.rate == pytest.approx((np.array(mix.shares) @ parts).min(), rel=1e-12, abs=1e-300)
    return mix


@pytest.mark.slow
def test_mixes_are_between_the_best_period_and_chebyshev() -> None:
    """R24 and R25: fixed <= mix <= Chebyshev on random spectra and rules, stable or not."""
    rng, gains = random.Random(2), 0
    for _ in range(amount(30, 80)):
        rule = random_rule(rng, rng.choice([1.0, 1.0, 4.0]))
        low = rng.choice([rng.uniform(0.05, 0.5), 10 ** rng.uniform(-4, -1)])
        sigma = np.sort([low, rng.uniform(low, 1), *(rng.uniform(low, 1) for _ in range(rng.randint(0, 30)))])
        mix = check_mix(rule, sigma, rng.choice([1, 2, 8, 30]))
        whole = mixed_periods(rule, np.linspace(sigma[0], sigma[-1], 150), max_period=12)
        assert whole.fixed_rate <= whole.rate <= chebyshev_rate(sigma[0], sigma[-1]) * (1 + 1e-9)
        gains += mix.rate > 1.01 * mix.fixed_rate > 0
    assert gains >= 3


def best_of_pairs(rates: Any) -> Any:
    """The best mix for two modes, exactly: some pair of periods attains it; `rates` is (K, 2)."""
    best = max(min(row) for row in rates)
    for (a, b), (c, d) in itertools.combinations(rates, 2):
        if (a - b) * (c - d) < 0:  # one is better for the one mode, one for the other
            share = (d - c) / ((a - b) + (d - c))
            best = max(best, min(share * a + (1 - share) * c, share * b + (1 - share) * d))
    return best


def test_mixes_of_two_modes_are_optimal() -> None:
    """For two modes the optimum is a mix of two periods at most: all pairs, in 50 digits, give the same rate."""
    rng, pairs = random.Random(3), 0
    for _ in range(amount(25, 60)):
        rule, sigma = random_rule(rng, rng.choice([1.0, 3.0])), [rng.uniform(0.02, 1), rng.uniform(0.02, 1)]
        with mpmath.workdps(oracle.DIGITS):
            tables = [oracle.factors(rule, s, 16) for s in sigma]
            best = best_of_pairs([tuple(-mpmath.log(abs(t[k])) / (k + 1) for t in tables) for k in range(16)])
        mix = mixed_periods(rule, sigma, max_period=16)
        assert mix.rate == pytest.approx(float(best), rel=1e-7)
        assert len(mix.periods) <= 2
        pairs += len(mix.periods) == 2
    assert pairs > 5


@pytest.mark.parametrize(
    ("rule", "sigma", "period"),
    [
        *((HB, sigma, 20) for tiny in (1e-9, 1e-100, 1e-310) for sigma in ([tiny], [tiny, tiny / 2, 0.95, 0.3])),
        *((rule, np.linspace(low, 1, 121), 40) for rule, low in ((HB, 0.02), (NAG, 0.02), (OuterRule(0.5, 0.6), 0.01))),
        (OuterRule(0.9, 0.001), [1.0, 0.99], 700),  # chi far below 1e-308
    ],
)
def test_no_gain_where_the_slowest_modes_do_not_oscillate(rule: OuterRule, sigma: Any, period: int) -> None:
    """R24 and R17: with slow real modes, however slow, the mix is the longest period: 1.00 times its rate."""
    assert not restart_can_help(rule, min(sigma))
    mix = check_mix(rule, sigma, period)
    assert mix.rate == pytest.approx(mix.fixed_rate, rel=2e-3)
    assert mix.fixed_period == period


def test_mixes_where_a_factor_is_zero_or_nearly() -> None:
    """A zero factor has an infinite rate; two modes that two periods remove are both gone; next to zeros: no harm."""
    once = mixed_periods(GONE, [1.0], max_period=9)
    assert (once.periods, once.rate, once.fixed_period, once.fixed_rate) == ((2,), math.inf, 2, math.inf)
    both = mixed_periods(OuterRule(2.0, 0.5, form="ema"), [1.0, 0.5], max_period=9)  # chi_1 = 0 and chi_2 = 0
    assert (both.rate, both.fixed_rate) == (math.inf, pytest.approx(math.log(2), rel=1e-12))
    # One mode that K = 1 removes costs nothing in the long run: the rate is that of the other one alone.
    rule = OuterRule(1.0, 0.5)
    other = mixed_periods(rule, 0.3, max_period=20)
    assert other.rate * (1 - 1e-3) < check_mix(rule, [1.0, 0.3], 20).rate <= other.rate
    for power in range(1, 17, 3):
        assert check_mix(rule, [1 - 10.0**-power, 0.3], 20).rate <= other.rate * (1 + 1e-12)


@pytest.mark.parametrize(("rule", "sigma"), [(HB, [0.0]), (HB, [0.0, 0.5]), (OuterRule(0.0, 0.9), [0.5])])
def test_mixes_of_modes_that_never_move(rule: OuterRule, sigma: list[float]) -> None:
    """Sigma 0 or lr 0: rate 0, without a sign."""
    mix = mixed_periods(rule, sigma, max_period=10)
    assert (mix.rate, mix.fixed_rate, mix.fixed_period) == (0, 0, 1)
    assert math.copysign(1, mix.rate) == math.copysign(1, mix.fixed_rate) == 1


# --- a schedule for a run of known length -------------------------------------------------------------------------


def residuals(rule: OuterRule, sigma: Any, counts: dict[int, int], tail: int) -> Any:
    """Log of what a schedule leaves of each mode, from its factors."""
    lengths = [*counts, tail]
    logs = [log_restart_factor(rule, sigma, length)[1] for length in lengths]
    return sum(count * log for count, log in zip([*counts.values(), 1], logs, strict=True))


def log_mean(logs: Any) -> Any:
    """Log of the loss of equally weighted modes, on the last axis."""
    return np.log(np.mean(np.exp(2 * logs), axis=-1) / 2)


def check_schedule(schedule: Schedule, rule: OuterRule, sigma: Any, rounds: int, weights: Any = None) -> None:
    """Whole cycles that fill the run, a policy that does just that, and the loss that it has."""
    assert all(k >= 1 and count >= 1 for k, count in schedule.counts.items())
    lengths = [k for k, count in schedule.counts.items() for _ in range(count)]
    assert lengths == sorted(lengths)
    assert sum(lengths) + schedule.tail == rounds
    assert schedule.tail >= 0
    run = rollout(rule, sigma, rounds, restart=schedule.policy, weights=weights)
    if abs(schedule.log_loss) < 600:
        assert math.log(run.loss[-1]) == pytest.approx(schedule.log_loss, rel=1e-9, abs=1e-9)
    ends = [end for end in itertools.accumulate(lengths) if end < rounds]
    assert schedule.policy == (AtRounds(tuple(ends)) if ends else Never())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sigma", "loss", "noted"),
    [
        (SIX, -20.939, ({2: 1, 5: 2, 6: 7, 8: 1, 10: 5}, 8)),
        (THREE, -16.6435, ({5: 1, 6: 2, 7: 3, 12: 3, 14: 2, 15: 1}, 3)),
    ],
    ids=["six modes", "three blocks"],
)
def test_anchor_schedules(sigma: Any, loss: float, noted: Any) -> None:
    """R24, T 120, K <= 20: the note's own schedules have the losses noted, and the search finds no worse ones."""
    schedule = best_schedule(HB, sigma, rounds=120, max_period=20)
    check_schedule(schedule, HB, sigma, 120)
    assert log_mean(residuals(HB, sigma, *noted)) / LOG_10 == pytest.approx(loss, abs=0.005)
    assert schedule.log_loss / LOG_10 <= loss + 5e-4


@pytest.mark.slow
def test_schedules_are_never_worse_than_a_single_period() -> None:
    """Random rules (stable or not), spectra, weights and horizons: no K <= max_period is better, nor is none."""
    rng, better = random.Random(4), 0
    for _ in range(amount(25, 60)):
        rule = random_rule(rng, rng.choice([1.0, 1.0, 4.0]))
        sigma = [rng.uniform(0.02, 1) for _ in range(rng.randint(1, 7))]
        weights = None if rng.random() < 0.5 else [rng.choice([0.0, 1e-6, 1.0]) for _ in sigma[1:]] + [1.0]
        rounds, largest = rng.randint(1, 70), rng.choice([1, 3, 10, 20])
        schedule = best_schedule(rule, sigma, rounds=rounds, max_period=largest, weights=weights)
        check_schedule(schedule, rule, sigma, rounds, weights)
        assert all(k <= largest for k in schedule.counts)
        singles = log_final_loss(rule, sigma, rounds, [*range(1, min(largest, rounds) + 1), rounds], weights)
        assert schedule.log_loss <= singles.min() + 1e-12 * abs(singles.min())
        better += schedule.log_loss < singles.min() - 0.01
    assert better > 3


def partitions(rounds: int, largest: int) -> Iterator[dict[int, int]]:
    """Every multiset of cycle lengths up to `largest` that sums to at most `rounds`."""
    if largest == 0:
        yield {}
        return
    for count in range(rounds // largest + 1):
        for rest in partitions(rounds - count * largest, largest - 1):
            yield {**rest, **({largest: count} if count else {})}


@pytest.mark.slow
def test_schedules_of_short_runs_are_optimal_or_nearly() -> None:
    """Against every multiset of cycles, T <= 16: the search mostly finds the optimum and always comes near it."""
    rng, exact = random.Random(5), 0
    for _ in range(16):
        rule, sigma = random_rule(rng), [rng.uniform(0.05, 1) for _ in range(rng.randint(1, 3))]
        rounds, largest = rng.randint(8, 16), rng.randint(3, 6)
        table = np.concatenate([np.zeros((1, len(sigma))), restart_table(rule, sigma, largest)[1]])
        best = float(log_final_loss(rule, sigma, rounds, rounds))
        for counts in partitions(rounds, largest):
            tail = rounds - sum(k * n for k, n in counts.items())
            if tail <= largest:
                best = min(best, float(log_mean(sum(n * table[k] for k, n in counts.items()) + table[tail])))
        loss = best_schedule(rule, sigma, rounds=rounds, max_period=largest).log_loss
        assert best - 1e-9 <= loss <= best + 0.5
        exact += loss <= best + 1e-6
    assert exact >= 14


def test_schedules_with_exact_zeros() -> None:
    """A mode that is gone does not count; when all are gone the loss is 0; deep losses beyond doubles are exact."""
    for rule in (OuterRule(1.0, 0.5), GONE):
        assert best_schedule(rule, [1.0], rounds=30, max_period=10).log_loss == -math.inf
    gone = OuterRule(2.0, 0.5, form="ema")
    both = best_schedule(gone, [1.0, 0.5], rounds=30, max_period=10)  # K = 1 removes one, K = 2 the other
    assert both.log_loss == -math.inf
    check_schedule(both, gone, [1.0, 0.5], 30)
    rule = OuterRule(1.0, 0.5)
    schedule = best_schedule(rule, [1.0, 0.3], rounds=30, max_period=10)
    alone = best_schedule(rule, [1.0, 0.3], rounds=30, max_period=10, weights=[0, 1])
    assert 1 <= schedule.counts.get(1, 0) + (schedule.tail == 1) <= 2  # once is enough; with two the rest is even
    assert alone.log_loss - math.log(2) - 1e-9 <= schedule.log_loss < alone.log_loss + 8
    residual = float(residuals(rule, 0.3, schedule.counts, schedule.tail))
    assert schedule.log_loss == pytest.approx(2 * residual - math.log(4), rel=1e-12)
    fast = OuterRule(0.9, 0.001)
    deep = best_schedule(fast, [1.0, 0.99], rounds=1400, max_period=100)
    assert deep.log_loss == pytest.approx(float(log_final_loss(fast, [1.0, 0.99], 1400, 1400)), rel=1e-12)


def test_schedules_at_the_ends() -> None:
    """One round, max_period 1, max_period beyond T, slow modes, no momentum, nothing that moves, modes of weight 0."""
    assert best_schedule(HB, 0.5, rounds=1, max_period=20) == Schedule({}, 1, float(log_final_loss(HB, 0.5, 1, 1)))
    for sigma, rounds, longest in (([0.001, 0.01], 100, 12), ([0.5], 7, 1000)):
        assert best_schedule(HB, sigma, rounds=rounds, max_period=longest).counts == {}
    assert best_schedule(HB, [0.9, 0.3], rounds=30, max_period=1).counts in ({}, {1: 30})
    for rule, sigma in ((OuterRule(0.0, 0.9), 0.5), (HB, 0.0)):
        assert best_schedule(rule, sigma, rounds=9, max_period=4).log_loss == pytest.approx(-math.log(2))
    plain = OuterRule(0.5, 0.0)
    check_schedule(best_schedule(plain, [0.5, 0.3], rounds=30, max_period=10), plain, [0.5, 0.3], 30)
    with_zero = best_schedule(HB, [0.5, 0.3, 0.0], rounds=30, max_period=10, weights=[1, 0, 0])
    assert with_zero == best_schedule(HB, [0.5], rounds=30, max_period=10)


# --- the limit of all schedules (R25) -----------------------------------------------------------------------------


def exact_chebyshev(low: float, high: float, rounds: int | None) -> Any:
    """R25 to 50 digits and more."""
    with mpmath.workdps(60 + 2 * max(0, int(-mpmath.log10(mpmath.mpf(low) / high)))):
        k = mpmath.mpf(high) / mpmath.mpf(low)
        if rounds is None:
            return -mpmath.log((mpmath.sqrt(k) - 1) / (mpmath.sqrt(k) + 1))
        return mpmath.log(mpmath.cosh(rounds * mpmath.acosh((k + 1) / (k - 1)))) / rounds


def test_chebyshev_numbers() -> None:
    """R25: 1.271, .655, .285 in the limit and 1.2425, .6260, .2559 at T = 24 for k = 3.17, 10, 50."""
    low, high = np.array([0.3, 0.1, 0.02]), np.array([0.95, 1.0, 1.0])
    assert chebyshev_rate(low, high) == pytest.approx([1.271, 0.655, 0.285], abs=0.0005)
    assert chebyshev_rate(low, high, 24) == pytest.approx([1.2425, 0.6260, 0.2559], abs=0.00005)


def test_chebyshev_is_accurate_everywhere() -> None:
    """To a few units of the last digit: wide intervals, ends that nearly meet, few rounds and 1e9."""
    ends = [(0.3, 0.95), (1e-3, 1.0), (1e-18, 1.0), (1e-300, 1.0), (0.5, 0.5 + 1e-15), (np.nextafter(0.3, 0), 0.3)]
    for (low, high), rounds in itertools.product(ends, (None, 1, 2, 10, 1000, 10**6)):
        rate = chebyshev_rate(low, high, rounds)
        assert abs(float(mpmath.mpf(float(rate)) / exact_chebyshev(low, high, rounds) - 1)) < 2e-15
    assert chebyshev_rate(0.3, 0.95, 10**9) == pytest.approx(float(chebyshev_rate(0.3, 0.95)), rel=1e-9)


def test_chebyshev_bounds_every_schedule() -> None:
    """R25: on random intervals no schedule of T rounds has a larger worst-case rate; one round attains it."""
    rng, closest = random.Random(6), 0.0
    for _ in range(amount(60, 150)):
        rule, low = random_rule(rng, 2.5), rng.uniform(0.01, 0.8)
        high = rng.uniform(low * 1.05, 1)
        cycles = [rng.randint(1, 12) for _ in range(rng.randint(1, 6))]
        logs = log_restart_factor(rule, np.linspace(low, high, 200), np.array(cycles)[:, None])[1]
        rate = -logs.sum(axis=0).max() / sum(cycles)
        bound = chebyshev_rate(low, high, sum(cycles))
        assert rate <= bound
        closest = max(closest, rate / bound)
    assert closest > 0.4
    # plain descent with the best step on [low, high]
    rate = -log_restart_factor(OuterRule(2 / (0.3 + 0.9), 0.0), np.array([0.3, 0.9]), 1)[1].max()
    assert rate == pytest.approx(float(chebyshev_rate(0.3, 0.9, 1)), rel=1e-13)
