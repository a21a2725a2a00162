"""The keystone: theory and torch, which never import each other, give the same numbers on a float64 quadratic.

`DiLoCo` with in-process replicas, and `OuterSGD` alone, follow `theory.rollout` to 1e-12: every kind, form and policy,
restarts of blocks, adaptive decisions round by round, and replicas that are disturbed differently.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from policies import MODELLED, RULES, each_rule
from quadratic import REPLICAS, ROUNDS, SIGMA, assert_agree, disturbances, engine_run
from twophase.diloco.engine import RoundReport
from twophase.optim.outer import OuterSGD
from twophase.restart import (
    AtRounds,
    Cycle,
    Never,
    Periodic,
    Restart,
    RestartPolicy,
    RoundSignal,
    Soft,
    State,
    convert,
    parse,
)
from twophase.rule import OuterRule
from twophase.theory.rollout import Block, Rollout, rollout, rollout_blocks

KEYSTONE = [Never(), Periodic(1), Periodic(3), Cycle((2, 5)), AtRounds((4, 9)), Soft(3, 0.2, 0.1), Soft(4, -0.4, 0.8)]


@each_rule
@pytest.mark.parametrize("policy", KEYSTONE, ids=str)
def test_keystone(rule: OuterRule, policy: RestartPolicy):
    """Two replicas with equal data follow the exact modes, restarts included; the report has the modes' norms."""
    places, reports = engine_run(rule, policy)
    expected = rollout(rule, SIGMA, ROUNDS, policy)
    assert_agree(places, reports, expected.residual, expected.restarts)
    for t, report in enumerate(reports):
        g, m = expected.pseudo_gradient[t], expected.buffer[t]
        assert report.pseudo_gradient_norm == pytest.approx(np.linalg.norm(g), abs=1e-12)
        assert report.buffer_norm == pytest.approx(np.linalg.norm(m), abs=1e-12)


def named(value: Any) -> str:
    return value.describe() if isinstance(value, OuterRule) else str(value)


@pytest.mark.parametrize(
    ("rule", "policy", "replicas"),
    [(rule, policy, REPLICAS[(n + k) % 4]) for k, policy in enumerate(KEYSTONE) for n, rule in enumerate(RULES)],
    ids=named,
)
def test_disturbed_replicas(rule: OuterRule, policy: RestartPolicy, replicas: int):
    """Replicas that are disturbed differently follow the rollout with the same disturbances."""
    noise = disturbances(replicas)
    places, reports = engine_run(rule, policy, noise)
    expected = rollout(rule, SIGMA, ROUNDS, policy, noise=noise)
    assert_agree(places, reports, expected.residual, expected.restarts)


@each_rule
def test_outer_optimizer_alone(rule: OuterRule):
    """`OuterSGD` on `g = sigma x` has the residuals and the buffers, in its own form, of the rollout."""
    for policy in KEYSTONE:
        expected = rollout(rule, SIGMA, ROUNDS, policy)
        x = nn.Parameter(torch.ones(len(SIGMA), dtype=torch.float64))
        outer = OuterSGD.from_rule([x], rule, policy)
        for t in range(ROUNDS):
            x.grad = torch.from_numpy(SIGMA) * x.detach()
            outer.step()
            np.testing.assert_allclose(x.detach(), expected.residual[t + 1], rtol=0, atol=1e-12)
            np.testing.assert_allclose(outer.state[x]["momentum_buffer"], expected.buffer[t + 1], rtol=0, atol=1e-12)


# --- policies that measure ----------------------------------------------------------------------------------------


@pytest.fixture
def against(register_policy: Callable[[str], Any]) -> type[RestartPolicy]:
    """The gradient rule: restart when g points against the buffer, hard or soft, before the mixing or after it."""

    @register_policy("against")
    @dataclass(frozen=True, slots=True)
    class Against(RestartPolicy):
        retain: float = 0.0
        inject: float = 0.0
        before: int = 1

        needs: ClassVar[frozenset[str]] = frozenset({"cosine"})

        def decide(self, state: State, signal: RoundSignal) -> tuple[State, Restart | None]:
            assert signal.cosine is not None
            fires = signal.cosine < 0 and signal.rounds_since_restart > 1
            return state, Restart(self.retain, self.inject, self.before == 1) if fires else None

    return Against


def policies(against: Any, norm_ratio: Any) -> list[RestartPolicy]:
    """Adaptive policies that fire in some rounds and not in others."""
    return [against(), against(0.3, -0.1), against(0.2, 0.1, 0), norm_ratio(0.6, 1)]


@pytest.mark.parametrize(
    ("rule", "replicas", "number"),
    [(rule, (None, 1, 3)[(n + k) % 3], k) for k in range(4) for n, rule in enumerate(RULES)],
    ids=named,
)
def test_adaptive_decisions_coincide(rule: OuterRule, replicas: int | None, number: int, against: Any, norm_ratio: Any):
    """Adaptive policies, shown the engine's measures and the theory's, decide alike in every round."""
    policy = policies(against, norm_ratio)[number]
    noise = None if replicas is None else disturbances(replicas)
    places, reports = engine_run(rule, policy, noise)
    expected = rollout(rule, SIGMA, ROUNDS, policy, noise=0.0 if noise is None else noise)
    assert_agree(places, reports, expected.residual, expected.restarts)
    assert 0 < expected.restarts.sum() < ROUNDS


def assert_gains(reports: Sequence[RoundReport], expected: Rollout) -> None:
    """The reported gains are those of the updates."""
    g, moved = expected.pseudo_gradient, -np.diff(expected.residual, axis=0)
    gains = (moved * g).sum(axis=1) / (g * g).sum(axis=1)
    assert [report.gain for report in reports] == pytest.approx(gains.tolist(), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize(
    ("rule", "text"),
    [(RULES[(n + more) % 4], text) for n, text in enumerate(MODELLED) for more in (0, 3)],
    ids=named,
)
def test_our_policies_in_the_engine(rule: OuterRule, text: str):
    """Every policy of ours, given what it needs, decides as in the theory and moves alike, with 1 to 3 replicas."""
    noise = disturbances(1 + RULES.index(rule) % 3)
    policy = convert(RULES[0], parse(text), rule.form)[1]
    places, reports = engine_run(rule, policy, noise)
    expected = rollout(rule, SIGMA, ROUNDS, policy, noise=noise)
    assert_agree(places, reports, expected.residual, expected.restarts)
    assert_gains(reports, expected)
    assert not any(report.not_finite for report in reports)
    assert np.abs(rollout(rule, SIGMA, ROUNDS, noise=noise).residual - expected.residual).max() > 1e-3


@each_rule
@pytest.mark.parametrize("text", MODELLED)
def test_our_policies_in_the_optimizer_alone(rule: OuterRule, text: str):
    """`OuterSGD`, given the same numbers, follows the theory too: places, buffers and restarts."""
    noise = disturbances(1)
    policy = convert(RULES[0], parse(text), rule.form)[1]
    expected = rollout(rule, SIGMA, ROUNDS, policy, noise=noise)
    x = nn.Parameter(torch.ones(len(SIGMA), dtype=torch.float64))
    outer = OuterSGD.from_rule([x], rule, policy, signals=["inner_lr", "progress"])
    for t in range(ROUNDS):
        x.grad = torch.from_numpy(SIGMA) * x.detach() + torch.from_numpy(noise[t, 0])
        before = outer.param_groups[0]["restarts"]
        outer.step(signals={"inner_lr": 1.0, "progress": (t + 1) / ROUNDS})
        assert outer.param_groups[0]["restarts"] - before == expected.restarts[t]
        np.testing.assert_allclose(x.detach(), expected.residual[t + 1], rtol=0, atol=1e-12)
        np.testing.assert_allclose(outer.state[x]["momentum_buffer"], expected.buffer[t + 1], rtol=0, atol=1e-12)


def test_restarts_of_blocks(against: Any, norm_ratio: Any):
    """Param groups with rules and policies of their own follow the rollout of blocks, disturbed or not."""
    outers = [
        (OuterRule(0.15, 0.9), [Never(), Periodic(3), against(), Soft(2, -0.2, 0.3)]),
        (OuterRule(1.0, 0.8, nesterov=True, form="ema"), [against(), Cycle((2, 5)), norm_ratio(0.6, 1), Periodic(1)]),
        (OuterRule(0.3, 0.7, nesterov=True), [norm_ratio(0.6, 1), against(0.3, -0.1), AtRounds((4, 9)), Never()]),
    ]
    fired = set()
    for choice, replicas in [(0, None), (0, 4), (1, 2), (2, 4), (3, None), (3, 2)]:
        rules = [(rule, options[choice]) for rule, options in outers]

        def build(params: list[tuple[str, Any]], rules: Any = rules) -> OuterSGD:
            groups = [
                {
                    "params": [p],
                    "lr": r.lr,
                    "momentum": r.momentum,
                    "nesterov": r.nesterov,
                    "form": r.form,
                    "restart": k,
                }
                for (_, p), (r, k) in zip(params, rules, strict=True)
            ]
            return OuterSGD(groups, lr=0.1)

        noise = None if replicas is None else disturbances(replicas)
        places, reports = engine_run(build, noise=noise)
        blocks = [Block(SIGMA[2 * i : 2 * i + 2], rule, policy) for i, (rule, policy) in enumerate(rules)]
        expected = rollout_blocks(blocks, ROUNDS, noise=0.0 if noise is None else noise)
        joined = np.concatenate([run.residual for run in expected.blocks], axis=-1)
        for number, run in enumerate(expected.blocks):
            groups = [report.groups[number] for report in reports]
            assert_agree(places[:, 2 * number : 2 * number + 2], groups, run.residual, run.restarts)
            fired.add(tuple(run.restarts))
        np.testing.assert_allclose((places**2).mean(axis=-1) / 2, expected.loss, rtol=0, atol=1e-12)
        assert not np.allclose(joined, rollout(rules[0][0], SIGMA, ROUNDS, rules[0][1]).residual, atol=1e-3)
    assert len(fired) > 8  # the blocks and the disturbances made for different decisions


@pytest.mark.parametrize("rule", [*RULES, OuterRule(0.5, 0.0), OuterRule(1e60, 0.9), OuterRule(1e200, 0.9, True)])
@pytest.mark.parametrize("rounds", [(), (4, 7, 12)])
def test_policies_are_shown_the_same(rule: OuterRule, rounds: tuple[int, ...], register_policy: Callable[[str], Any]):
    """Counters, norms and cosine are the optimizer's, also without momentum; both ask until the run diverges.

    That is sooner for the optimizer, whose norms are roots of sums of squares, which overflow first.
    """
    seen: list[RoundSignal] = []

    @register_policy("witness")
    @dataclass(frozen=True, slots=True)
    class Witness(RestartPolicy):
        needs: ClassVar[frozenset[str]] = frozenset({"pseudo_gradient_norm", "buffer_norm", "cosine"})

        def decide(self, state: State, signal: RoundSignal) -> tuple[State, Restart | None]:
            seen.append(signal)
            due = signal.round in rounds
            return state, Restart(0.5, 0.1, before=signal.round % 2 == 1) if due else None

    rollout(rule, SIGMA, ROUNDS, "witness")
    x = nn.Parameter(torch.ones(len(SIGMA), dtype=torch.float64))
    outer = OuterSGD.from_rule([x], rule, "witness")
    asked = len(seen)
    diverges = rule.lr > 1
    assert asked < ROUNDS if diverges else asked == ROUNDS
    with pytest.warns(RuntimeWarning, match="has diverged") if diverges else nullcontext():
        for _ in range(ROUNDS):
            x.grad = torch.from_numpy(SIGMA) * x.detach()
            outer.step()
    by_optimizer = seen[asked:]
    assert 0 < len(by_optimizer) <= asked if diverges else len(by_optimizer) == ROUNDS
    for theory, torch_side in zip(seen, by_optimizer, strict=False):
        assert (theory.round, theory.rounds_since_restart) == (torch_side.round, torch_side.rounds_since_restart)
        for name in ("pseudo_gradient_norm", "buffer_norm", "cosine"):
            a, b = getattr(theory, name), getattr(torch_side, name)
            assert a == pytest.approx(b, rel=1e-9, abs=1e-12, nan_ok=True), (name, theory, torch_side)


# --- the keystone can fail ----------------------------------------------------------------------------------------


def test_keystone_sees_a_wrong_rule():
    """Another momentum, form, kind, lr, period, soft restart or sigma is 1e-3 and more away from the engine."""
    rule, policy = OuterRule(0.1, 0.9), Periodic(3)
    places, _ = engine_run(rule, policy)
    for other, restart, sigma in [
        (replace(rule, momentum=0.89), policy, SIGMA),
        (replace(rule, form="ema"), policy, SIGMA),
        (replace(rule, nesterov=True), policy, SIGMA),
        (replace(rule, lr=0.101), policy, SIGMA),
        (rule, Periodic(4), SIGMA),
        (rule, Soft(3, 0.1, 0.0), SIGMA),
        (rule, policy, 0.99 * SIGMA),
    ]:
        assert np.abs(rollout(other, sigma, ROUNDS, restart).residual - places).max() > 1e-3


def test_keystone_sees_wrong_disturbances(against: Any):
    """Disturbances that are left out, shifted by a round, given to other modes or only of one replica show."""
    rule, policy, noise = OuterRule(0.1, 0.9), against(), disturbances(3)
    places, reports = engine_run(rule, policy, noise)
    for wrong in (0 * noise, np.roll(noise, 1, axis=0), noise[..., ::-1], noise[:, :1], 1.01 * noise):
        run = rollout(rule, SIGMA, ROUNDS, policy, noise=wrong)
        assert np.abs(run.residual - places).max() > 1e-3
    quiet = rollout(rule, SIGMA, ROUNDS, policy)
    assert [report.restarted for report in reports] != quiet.restarts.tolist()
