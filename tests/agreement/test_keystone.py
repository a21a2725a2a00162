"""The keystone: theory and torch, which never import each other, give the same numbers on a float64 quadratic.

`DiLoCo` with in-process replicas follows `theory.rollout` to 1e-12: every rule, form, policy and schedule, restarts of
blocks, adaptive decisions round by round, and replicas that are disturbed differently.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
import pytest

from policies import MODELLED, RULES, convert
from quadratic import REPLICAS, ROUNDS, SIGMA, assert_agree, disturbances, engine_run
from twophase.optim.outer_sgd import OuterSGD
from twophase.restart import AtRounds, Cycle, Never, Periodic, Soft, parse
from twophase.rule import OuterRule
from twophase.theory import Block, rollout, rollout_blocks

KEYSTONE = [Never(), Periodic(1), Periodic(3), Cycle((2, 5)), AtRounds((4, 9)), Soft(3, 0.2, 0.1), Soft(4, -0.4, 0.8)]
POLICIES = [*map(str, KEYSTONE), *MODELLED]
SCHEDULES = ["constant", "linear:2", "momentum:0.5"]


@pytest.mark.parametrize(
    ("rule", "text", "replicas", "schedule"),
    [
        (rule, text, REPLICAS[(n + k) % 4], SCHEDULES[(n + k // 4) % 3])
        for k, text in enumerate(POLICIES)
        for n, rule in enumerate(RULES)
    ],
)
def test_keystone(rule: OuterRule, text: str, replicas: int, schedule: str):
    """Disturbed replicas follow the rollout with the same disturbances; the reports have its restarts and norms."""
    policy, noise = convert(RULES[0], parse(text), rule.form)[1], disturbances(replicas)
    places, reports = engine_run(rule, policy, noise, schedule=schedule)
    expected = rollout(rule, SIGMA, ROUNDS, policy, noise=noise, schedule=schedule)
    assert_agree(places, reports, expected.residual, expected.restarts)
    g, m, moved = expected.pseudo_gradient, expected.buffer[:-1], -np.diff(expected.residual, axis=0)
    columns = np.array([[r.pseudo_gradient_norm, r.buffer_norm, r.gain] for r in reports]).T
    gains = (moved * g).sum(axis=1) / (g * g).sum(axis=1)
    np.testing.assert_allclose(columns, [*np.linalg.norm([g, m], axis=2), gains], rtol=1e-9, atol=1e-9)
    assert not any(group.not_finite for report in reports for group in report.groups)
    plain = rollout(rule, SIGMA, ROUNDS, noise=noise, schedule=schedule)
    assert text == "never" or np.abs(plain.residual - expected.residual).max() > 1e-3


def test_restarts_of_blocks():
    """Param groups with rules and policies of their own follow the rollout of blocks, disturbed or not."""
    outers = [
        (OuterRule(0.15, 0.9), ["never", "3", "gradient", "soft:2:-0.2:0.3"]),
        (OuterRule(1.0, 0.8, nesterov=True, form="ema"), ["gradient", "cycle:2,5", "norm:0.6", "auto"]),
        (OuterRule(0.3, 0.7, nesterov=True), ["norm:0.6", "test-longer:2", "at:4,9", "never"]),
    ]
    fired = set()
    for choice, replicas in [(0, None), (0, 4), (1, 2), (2, 4), (3, None), (3, 2)]:
        rules = [(rule, parse(texts[choice])) for rule, texts in outers]

        def build(params: list[tuple[str, Any]], rules: Any = rules) -> OuterSGD:
            pairs = zip(params, rules, strict=True)
            groups = [{"params": [p], "restart": policy} | asdict(rule) for (_, p), (rule, policy) in pairs]
            return OuterSGD(groups, lr=0.1)

        noise = None if replicas is None else disturbances(replicas)
        places, reports = engine_run(build, noise=noise)
        blocks = [Block(SIGMA[2 * i : 2 * i + 2], rule, policy) for i, (rule, policy) in enumerate(rules)]
        expected = rollout_blocks(blocks, ROUNDS, noise=0.0 if noise is None else noise)
        for number, run in enumerate(expected.blocks):
            groups = [report.groups[number] for report in reports]
            assert_agree(places[:, 2 * number : 2 * number + 2], groups, run.residual, run.restarts)
            fired.add(tuple(run.restarts))
        np.testing.assert_allclose((places**2).mean(axis=-1) / 2, expected.loss, rtol=0, atol=1e-12)
    assert len(fired) > 8  # the blocks and the disturbances made for different decisions
