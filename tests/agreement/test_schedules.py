"""Outer schedules: the engine's rounds are those of `theory.rollout`, in every form and under restarts."""

from __future__ import annotations

import numpy as np
import pytest

from policies import RULES
from quadratic import ROUNDS, SIGMA, assert_agree, disturbances, engine_run
from twophase.restart import convert, parse
from twophase.rule import OuterRule
from twophase.theory.rollout import rollout


@pytest.mark.parametrize("policy", ["never", "3", "soft:3:0.2:0.1", "norm:1.5"])
@pytest.mark.parametrize("rule", RULES, ids=OuterRule.describe)
@pytest.mark.parametrize("schedule", ["linear:2", "momentum:0.5"])
def test_engine_and_rollout_agree(schedule: str, rule: OuterRule, policy: str):
    """Anchors, restarts and norms of a scheduled run, with noise."""
    restart, noise = convert(RULES[0], parse(policy), rule.form)[1], disturbances(2)
    places, reports = engine_run(rule, restart, noise, schedule=schedule)
    expected = rollout(rule, SIGMA, ROUNDS, restart, schedule=schedule, noise=noise)
    assert_agree(places, reports, expected.residual, expected.restarts)
    for report, g in zip(reports, expected.pseudo_gradient, strict=True):
        assert report.pseudo_gradient_norm == pytest.approx(np.linalg.norm(g), abs=1e-12)
