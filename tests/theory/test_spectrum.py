"""Estimating effective progress: exact without noise, honest about its error with noise."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oracle import HB, SIX, THREE
from twophase.restart import AtRounds, Never, Periodic, Soft
from twophase.rule import OuterRule
from twophase.theory.periods import rounded_period
from twophase.theory.rollout import rollout
from twophase.theory.spectrum import estimate_progress


def observed(sigma: Any, rounds: int, rule: OuterRule = HB, restart: Any = "never", **options: Any) -> tuple[Any, Any]:
    """Anchors and pseudo-gradients of a rollout, each of shape (rounds, ..., coordinates)."""
    run = rollout(rule, sigma, rounds, restart, **options)
    return run.residual[:-1], run.pseudo_gradient


# --- without noise ------------------------------------------------------------------------------------------------


@given(
    st.floats(0.01, 1),
    st.builds(OuterRule, st.floats(0.05, 0.6), st.floats(0, 0.98), st.booleans()),
    st.sampled_from([Never(), Periodic(1), Periodic(3), AtRounds((2,)), Soft(2, -0.3, 0.5)]),
    st.integers(3, 12),
)
def test_one_mode_is_exact(sigma: float, rule: OuterRule, restart: Any, rounds: int):
    """R29: without noise and with one sigma the estimate is sigma, for any rule, restarts and starts."""
    x, g = observed(np.full(5, sigma), rounds, rule, restart, initial=[1.0, -2.0, 0.5, 3.0, 0.1])
    steps = np.diff(x, axis=0)
    along = steps[1:] * steps[:-1]
    estimate = estimate_progress(x, g)
    assert estimate.usable == (along.sum() > 0)
    if np.abs(along).sum() < 100 * along.sum():  # otherwise steps cancel, and rounding decides
        assert estimate.sigma == pytest.approx(sigma, rel=1e-9)
        assert estimate.standard_error < 1e-8


def test_modes_are_averaged():
    """Several modes give the average with weights <dx_t, dx_{t-1}>; coordinates that stand still do not count."""
    sigma = np.array([0.2, 0.5, 0.9, 0.0])
    x, g = observed(sigma, 8)
    weights = (np.diff(x, axis=0)[1:] * np.diff(x, axis=0)[:-1]).sum(axis=0)
    assert weights[3] == 0
    assert estimate_progress(x, g).sigma == pytest.approx(weights @ sigma / weights.sum(), rel=1e-13)


@pytest.mark.parametrize(
    ("sigma", "periods", "expected"),
    [([0.95], [3, 5, 5, 5], -41.5), (SIX, [3, 6, 6, 7, 9, 10], -8.73), (THREE, [3, 5, 6, 9, 13, 13], -6.65)],
)
def test_periods_from_estimates(sigma: Any, periods: list[int], expected: float):
    """R29, rule "est": a period for each cycle from the estimate of the last gives the note's periods and losses."""
    ends = [0, 3]
    while ends[-1] < 60:
        x, g = observed(sigma, ends[-1], restart=AtRounds(tuple(ends[1:])))
        estimate = estimate_progress(x[ends[-2] :], g[ends[-2] :]).sigma
        ends.append(ends[-1] + max(2, int(rounded_period(HB, estimate))))
    assert np.diff(ends)[: len(periods)].tolist() == periods
    loss = rollout(HB, sigma, 60, AtRounds(tuple(ends[1:]))).loss[-8:].mean()
    assert np.log10(loss) == pytest.approx(expected, abs=0.05 if len(sigma) == 1 else 0.005)


# --- with noise ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("noise", "spread"), [(0.2, 0.011), (0.5, 0.027)])
def test_accuracy_under_noise(noise: float, spread: float):
    """R29: sigma .6, 7 rounds, 1000 coordinates: no bias, and the standard deviation that the note gives."""
    x, g = observed(np.full(1000, 0.6), 7, noise=0.6 * noise, seeds=400)
    sigma = np.array([estimate_progress(x[:, i], g[:, i]).sigma for i in range(400)])
    assert sigma.std() / 0.6 == pytest.approx(spread, rel=0.12)  # 3 standard errors of a deviation of 400
    assert sigma.mean() == pytest.approx(0.6, abs=3.5 * sigma.std() / 20)
    steps, changes = np.diff(x, axis=0), np.diff(g, axis=0)
    naive = (changes * steps).sum(axis=(0, 2)) / (steps**2).sum(axis=(0, 2))
    assert naive.mean() / 0.6 > 1.09  # without the instrument the bias is many standard errors


@pytest.mark.parametrize(
    ("coordinates", "noise", "rounds", "restart", "low"),
    [(100, 0.2, 7, "never", 0.93), (300, 0.5, 7, "3", 0.93), (10, 0.5, 7, "never", 0.88)],
)
def test_standard_error_covers(coordinates: int, noise: float, rounds: int, restart: str, low: float):
    """Two standard errors (1.96) hold the truth about 95 times in 100, and one about 68 times."""
    count = 1000
    x, g = observed(np.full(coordinates, 0.6), rounds, restart=restart, noise=0.6 * noise, seeds=count)
    estimates = [estimate_progress(x[:, i], g[:, i]) for i in range(count)]
    away = np.array([abs(e.sigma - 0.6) / e.standard_error for e in estimates if e.usable])
    assert len(away) > 0.98 * count
    assert low < (away < 1.96).mean() < 0.97
    assert 0.64 < (away < 1).mean() < 0.73


def test_standard_error_is_the_printed_one():
    """The standard error equals its equation, written out coordinate by coordinate."""
    x, g = observed([0.3, 0.6, 0.9], 6, noise=0.1)
    sigma = float(estimate_progress(x, g).sigma)
    squares, denominator = 0.0, 0.0
    for i in range(3):
        u = 0.0
        for t in range(1, 5):
            before, dx, dg = x[t, i] - x[t - 1, i], x[t + 1, i] - x[t, i], g[t + 1, i] - g[t, i]
            u += before * (dg - sigma * dx)
            denominator += before * dx
        squares += u**2
    expected = math.sqrt(3 / 2 * squares) / denominator
    assert estimate_progress(x, g).standard_error == pytest.approx(expected, rel=1e-12)


def test_blocks_are_separate():
    """Each block's estimate is that of its coordinates alone; labels come sorted, whole numbers or text."""
    labels = np.array(["head", "body", "body", "tail", "head", "body"])
    x, g = observed(np.linspace(0.2, 0.9, 6), 9, noise=0.02)
    by_block = estimate_progress(x, g, blocks=labels)
    assert by_block.labels is not None
    assert by_block.labels.tolist() == ["body", "head", "tail"]
    for number, label in enumerate(by_block.labels):
        alone = estimate_progress(x[:, labels == label], g[:, labels == label])
        assert by_block.sigma[number] == pytest.approx(alone.sigma, rel=1e-13)
        assert by_block.standard_error[number] == pytest.approx(alone.standard_error, rel=1e-10, nan_ok=True)
    assert np.isnan(by_block.standard_error).tolist() == [False, False, True]  # one coordinate has no spread
    np.testing.assert_array_equal(by_block.sigma, estimate_progress(x, g, blocks=labels.astype(object)).sigma)
    numbers = np.unique(labels, return_inverse=True)[1]
    np.testing.assert_array_equal(by_block.sigma, estimate_progress(x, g, blocks=5 - 2 * numbers).sigma[::-1])
    whole = estimate_progress(x, g)
    assert whole.sigma.shape == whole.standard_error.shape == whole.usable.shape == ()
    assert whole.labels is None
    assert estimate_progress(x, g, blocks=[7] * 6).sigma[0] == pytest.approx(whole.sigma, rel=1e-13)
    wild = x.copy()
    wild[1:, 1], wild[1:, 2] = np.inf, np.nan  # a block that has diverged leaves the others
    assert estimate_progress(wild, g, blocks=labels).usable.tolist() == [False, True, True]


# --- no usable estimate, and odd data -----------------------------------------------------------------------------


ALTERNATING = np.array([1, -1, 1, -1, 1, -1])[:, None]
SPOILT = np.where(np.arange(24).reshape(6, 4) == 13, 1.0, 0.0)  # one entry
NO_ESTIMATES: dict[str, Callable[[Any], tuple[Any, Any]]] = {
    "falling": lambda x: (x, -0.5 * x),
    "alternating": lambda x: (x * ALTERNATING, 0.5 * x * ALTERNATING),
    "still": lambda x: (np.ones_like(x), 0.5 * x),
    "flat": lambda x: (x, np.ones_like(x)),
    "inf": lambda x: (np.where(SPOILT, np.inf, x), 0.5 * x),
    "nan": lambda x: (x, np.where(SPOILT, np.nan, 0.5 * x)),
    "growing": lambda _: observed(np.ones(4), 6, OuterRule(1e200, 0.9)),
}


@pytest.mark.parametrize("name", NO_ESTIMATES)
def test_no_estimate(name: str):
    """A ratio <= 0, a denominator <= 0, no movement and no finite data give nan that is marked, and no warning."""
    estimate = estimate_progress(*NO_ESTIMATES[name](observed(np.full(4, 0.5), 6)[0]))
    assert not estimate.usable.any()
    assert np.isnan(estimate.sigma).all()
    assert np.isnan(estimate.standard_error).all()


X = np.arange(12.0).reshape(4, 3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: estimate_progress(X[:2], X[:2]), r"estimate_progress: anchors have shape \(2, 3\).*at least 3 rounds"),
        (lambda: estimate_progress(X, X[:3]), r"anchors have shape \(4, 3\).*\(3, 3\).*\(rounds, coordinates\)"),
        (lambda: estimate_progress("x", X), "estimate_progress: anchors is 'x'"),
        (lambda: estimate_progress(X, X > 0), "estimate_progress: pseudo_gradients is .*numbers"),
        (lambda: estimate_progress(X, X, blocks=[0, 1]), r"estimate_progress: blocks have shape \(2,\).*shape \(3,\)"),
        (lambda: estimate_progress(X, X, blocks=[0.5, 1, 2]), "blocks .* float64.*whole number or a text"),
    ],
)
def test_refused(call: Callable[[], Any], message: str):
    """Each impossible input is a ValueError that names it and the remedy."""
    with pytest.raises(ValueError, match=f"(?s){message}"):
        call()
