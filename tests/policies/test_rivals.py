"""What a restart must beat: each rule against a table or a trajectory by hand, and its own source's equations."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from policies import asked, columns, each_rule, fired
from twophase.policies.base import AVERAGING
from twophase.restart import Restart, RestartPolicy, Step, mean_outer_gain, parse
from twophase.rule import OuterRule
from twophase.theory.rollout import Rollout, rollout

GRADIENTS = np.random.default_rng(3).normal(size=14)


def driven(rule: OuterRule, policy: RestartPolicy | str, gradients: Sequence[float] = GRADIENTS) -> Rollout:  # type: ignore[assignment]
    """The rollout on given pseudo-gradients: a mode without progress of its own, pushed by them from x = 0."""
    values = np.asarray(gradients)
    return rollout(rule, [0.0], len(values), policy, noise=values[:, None, None], initial=0.0)


# --- cap ----------------------------------------------------------------------------------------------------------


def test_cap_written_out():
    """The update is shortened, in its direction, to the gain of the cap where it exceeds it, and never lengthened."""
    measured = (1.0, 0.0, 0.0), (1.0, 10.0, 1.0), (2.0, 10.0, 0.5), (1.0, 10.0, -1.0), (0.0, 1.0, 0.0)
    rows = columns("pseudo_gradient_norm buffer_norm cosine", *measured)
    # Heavy ball, lr 0.5: gain 0.5 (0.9 c m / g + 1).
    gains = [0.5, 5.0, 1.625, -4.0, math.nan]
    answers = asked("cap:1", rows, OuterRule(0.5, 0.9))
    for answer, gain in zip(answers, gains, strict=True):
        assert answer.restart is None
        assert (answer.step is not None) == (gain > 1)
        if answer.step is not None:
            assert (answer.step.along_g, answer.step.along_m) == pytest.approx((0.5 / gain, 0.45 / gain))
    # Nesterov: 0.5 (g + 0.9 m_new) = 0.5 (1.9 g + 0.81 m), gain 0.5 (1 + 0.9 (0.9 c m / g + 1)).
    shortened = asked("cap:1", rows, OuterRule(0.5, 0.9, nesterov=True))[2].step
    gain = 0.5 * (1 + 0.9 * 3.25)
    assert shortened is not None
    assert (shortened.along_g, shortened.along_m) == pytest.approx((0.95 / gain, 0.405 / gain))


# --- bound --------------------------------------------------------------------------------------------------------


def test_bound_written_out():
    """The buffer is shortened to the bound and keeps its direction; that counts as no restart."""
    rows = columns("pseudo_gradient_norm buffer_norm", (1, 0), (1, 1.5), (1, 3.0), (2, 12.0), (0, 4))
    answers = asked("bound:1.5", rows)
    restarts = [None if answer.restart is None else answer.restart.retain for answer in answers]
    assert restarts == [None, None, 0.5, 0.25, 0.0]
    assert all(answer.restart is None or not answer.restart.counts for answer in answers)
    assert all(answer.restart is None or answer.restart.before for answer in answers)
    assert fired(answers) == []


# --- slowmo -------------------------------------------------------------------------------------------------------


def test_slowmo_written_out():
    """The buffer is rescaled by the ratio of the learning rates where they differ, from the second round on."""
    answers = asked("slowmo", columns("inner_lr", 0.1, 0.2, 0.2, 0.05, 0.0, 0.1))
    ratios = (None, 2.0, None, 0.25, 0, None)
    restarts = [None if ratio is None else Restart(ratio, before=True, counts=False) for ratio in ratios]
    assert [answer.restart for answer in answers] == restarts
    assert answers[-1].state == {"lr": 0.1}


def test_slowmo_is_slowmo():
    """Its own equations `u <- b u + g / gamma_t`, `x <- x - a gamma_t u` with a changing gamma: the same places."""
    rule, x, u, m, y = OuterRule(0.7, 0.8), 0.0, 0.0, 0.0, 0.0
    gammas = 0.1 * (1.1 + np.cos(np.arange(len(GRADIENTS))))
    answers = asked("slowmo", columns("inner_lr", *gammas.tolist()), rule)
    for g, gamma, answer in zip(GRADIENTS, gammas, answers, strict=True):
        u = 0.8 * u + g / gamma
        x -= 0.7 * gamma * u
        along_g, along_m = answer.weights(rule)
        retain = 1.0 if answer.restart is None else answer.restart.retain
        y -= along_g * g + along_m * m
        m = 0.8 * retain * m + g
        assert y == pytest.approx(x, rel=1e-12)
        assert m == pytest.approx(gamma * u, rel=1e-12)


# --- reseed -------------------------------------------------------------------------------------------------------


@each_rule
def test_a_constant_gradient_does_not_notice_a_seed(rule: OuterRule):
    """Once the buffer is what a constant g makes it, every later round has the full step."""
    run = driven(rule, "reseed:3", [1.0] * 12)
    np.testing.assert_allclose(-np.diff(run.residual[3:, 0]), rule.to("ema").lr, rtol=1e-12)


# --- debiased -----------------------------------------------------------------------------------------------------


@each_rule
@pytest.mark.parametrize("text", ["debiased", "debiased:1", "debiased:3"])
def test_debiased_makes_full_steps(rule: OuterRule, text: str):
    """On a constant g every step has the rule's stationary length, from the first round and after each restart."""
    run = driven(rule, text, [1.0] * 12)
    np.testing.assert_allclose(-np.diff(run.residual[:, 0]), rule.to("ema").lr, rtol=1e-12)
    for rounds in (1, 2, 7, 12):
        assert mean_outer_gain(rule, parse(text), rounds) == pytest.approx(rule.to("ema").lr, rel=1e-12)
    period = int(text.partition(":")[2] or 0)
    assert (np.flatnonzero(run.restarts) + 1).tolist() == ([*range(period, 13, period)] if period else [])


# --- lookahead ----------------------------------------------------------------------------------------------------


def test_lookahead_written_out():
    """Plain averaging up to and with the early share and after the late one; the rule's own step in between."""
    answers = asked("lookahead:0.2:0.3", columns("progress", *(done / 10 for done in range(1, 11))))
    assert [answer.step for answer in answers] == 2 * [AVERAGING] + 5 * [None] + 3 * [AVERAGING]
    assert all(answer.restart is None for answer in answers)
    assert Step(1.0, 0.0) == AVERAGING
