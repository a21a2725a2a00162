"""The keystone of the shelf: every value that says it is linear has the engine's numbers in `theory.rollout`.

The values are those of the registry, so that a new one is held here by itself. The oracle of the engine is the theory's
own arithmetic, which shares nothing with it but the values; `tests/optim/` holds the engine to other programs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from policies import RULES
from quadratic import ROUNDS, SIGMA, assert_agree, disturbances, engine_run
from twophase.restart import Never, RestartPolicy, convert, parse
from twophase.rule import OuterRule
from twophase.shelf import base
from twophase.shelf.base import SLOTS, Filter, Slot
from twophase.shelf.outer import Outer, as_outer, outer
from twophase.shelf.text import parse as parse_value
from twophase.shelf.text import registered
from twophase.theory.rollout import Block, rollout, rollout_blocks

VARIANTS: dict[Slot, list[str]] = {
    "method": ["delayed-nesterov:every=3:share=0.2", "delayed-nesterov:every=1", "gpa:mu_x=0.6:mu_y=0.3"],
    "filter": [],
    "schedule": ["cosine:rounds=15:warmup=4:final=0.1", "linear:warmup=3", "momentum:start=0.5:warmup=7"],
    "readout": ["tail:rounds=3", "ema:decay=0"],
}
POLICIES = ["never", "3", "soft:3:0.2:0.1", "gradient", "norm:1.5", "test-half:3", "probe:keep,drop,1.3"]


def linear(slot: Slot) -> list[str]:
    """The linear values of a slot with their defaults, and some with other fields."""
    return [name for name, kind in registered(slot).items() if kind.linear] + VARIANTS[slot]


def built(method: str, **slots: str) -> Outer:
    """An outer optimizer that is stable on the quadratic, with a schedule that ends with the run."""
    lr = 0.5 if "gpa" in method or "schedule-free" in method else 0.1
    values = {"filter": "none", "schedule": "constant", "readout": "last"} | slots
    rest: list[Any] = [parse_value(slot, values[slot]) for slot in SLOTS[1:]]
    rest[1] = rest[1].over(ROUNDS)
    return Outer(parse_value("method", method, {"lr": lr, "momentum": 0.9}), *rest)


def assert_same(value: Outer, policy: RestartPolicy, noise: np.ndarray | None = None) -> None:
    """The engine's anchors, readouts, restarts and norms are those of the rollout."""
    readouts: list[np.ndarray] = []
    places, reports = engine_run(value, policy, noise, readouts=readouts)
    expected = rollout(value, SIGMA, ROUNDS, policy, noise=0.0 if noise is None else noise)
    assert_agree(places, reports, expected.residual, expected.restarts)
    np.testing.assert_allclose(readouts, expected.readout[1:], rtol=0, atol=1e-12)
    for report, g, m in zip(reports, expected.pseudo_gradient, expected.buffer, strict=False):
        assert report.pseudo_gradient_norm == pytest.approx(np.linalg.norm(g), abs=1e-12)
        if value.rule().momentum:
            assert report.buffer_norm == pytest.approx(np.linalg.norm(m), abs=1e-12)


@pytest.mark.parametrize("more", [0, 2])
@pytest.mark.parametrize("rule", RULES, ids=OuterRule.describe)
@pytest.mark.parametrize("schedule", linear("schedule"))
def test_schedules(schedule: str, rule: OuterRule, more: int):
    """Every schedule with heavy ball and Nesterov in both forms, under policies that count, and some that measure."""
    place = linear("schedule").index(schedule) + more
    number = (place + RULES.index(rule)) % 4  # no restart, hard, soft and measured ones, with two rules each
    number += place % (len(POLICIES) - 3) if number == 3 else 0
    policy = convert(RULES[0], parse(POLICIES[number]), rule.form)[1]
    assert_same(built(str(as_outer(rule).method), schedule=schedule), policy, disturbances(1 + number % 3))


@pytest.mark.slow
@pytest.mark.parametrize("method", linear("method"))
def test_methods(method: str):
    """Every linear method, restarted and under a schedule where it has a first moment; others refuse a restart."""
    value = built(method)
    assert_same(value, Never())
    assert_same(built(method, schedule="warmup"), Never(), disturbances(2))
    for text in POLICIES[1:5]:
        if value.method.first_moment or value.method.plain:
            assert_same(value, parse(text), disturbances(3))
        else:
            with pytest.raises(ValueError, match="first moment"):
                rollout(value, SIGMA, ROUNDS, text)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["never", "3", "gradient"])
@pytest.mark.parametrize("slot", ["filter", "readout"])
def test_filters_and_readouts(slot: Slot, policy: str):
    """Every linear filter and readout, in front of and behind momentum SGD and delayed Nesterov."""
    for text in linear(slot):
        assert_same(built("nesterov", **{slot: text}), parse(policy), disturbances(2))
        assert_same(built("delayed-nesterov", **{slot: text}), parse(policy), disturbances(2))


@pytest.mark.parametrize("policy", ["never", "gradient", "loss:0.0", "probe:keep,drop,1.3"])
def test_a_filter_that_scales(policy: str, monkeypatch: pytest.MonkeyPatch):
    """The method, norms and probes see the filtered g; losses are where the replicas have come to."""

    @dataclass(frozen=True)
    class Halved(Filter):
        name = "halved"
        linear = True

        def factor(self, age: float) -> float:
            assert age == 0
            return 0.5

    monkeypatch.setitem(base.REGISTRY["filter"], "halved", Halved)
    assert_same(built("nesterov", filter="halved"), parse(policy), disturbances(3))


@pytest.mark.parametrize("slot", SLOTS)
def test_others_are_refused(slot: Slot):
    """What is not linear is refused with its name and the names of what is."""
    for name, kind in registered(slot).items():
        if kind.linear:
            continue
        value = outer(name) if slot == "method" else outer("sgd", **{slot: name})  # type: ignore[arg-type]
        assert not isinstance(value, OuterRule)
        with pytest.raises(ValueError, match=name) as refusal:
            rollout(value, SIGMA, ROUNDS)
        assert all(inside in str(refusal.value) for inside, other in registered(slot).items() if other.linear)


@pytest.mark.parametrize("rule", RULES, ids=OuterRule.describe)
@pytest.mark.parametrize("period", [None, 1, 3, 7])
def test_transient_weights_add_up(rule: OuterRule, period: int | None):
    """With `transient` and hard restarts the update of a constant g is the stationary one in every round."""
    value = outer(rule, schedule="transient")
    run = rollout(value, [0.0], 20, "never" if period is None else period, noise=np.ones((20, 1, 1)))
    stationary = rule.to("ema").lr
    np.testing.assert_allclose(-np.diff(run.residual[:, 0]), stationary, rtol=1e-12)


def test_reductions():
    """A rule with nothing in the other slots is itself; so is one with a mean over one anchor."""
    for rule in RULES:
        expected = rollout(rule, SIGMA, ROUNDS, 3)
        for value in (as_outer(rule), as_outer(rule).method, outer(rule, readout="tail:rounds=1")):
            run = rollout(value, SIGMA, ROUNDS, 3)
            for name in ("residual", "buffer", "pseudo_gradient", "restarts", "loss", "readout"):
                np.testing.assert_array_equal(getattr(run, name), getattr(expected, name))
    nesterov = rollout(OuterRule(0.1, 0.9, nesterov=True), SIGMA, ROUNDS, 3)
    delayed = rollout(outer("delayed-nesterov:lr=0.1:every=1"), SIGMA, ROUNDS, 3)
    np.testing.assert_allclose(delayed.residual, nesterov.residual, rtol=0, atol=1e-14)


def test_seeds_and_blocks():
    """Each seed has restarts of its own, and its own age in the schedule; blocks take methods as well."""
    value = outer("nesterov:lr=0.1", schedule="transient")
    together = rollout(value, SIGMA, ROUNDS, "gradient", noise=0.3, seeds=3)
    assert len({tuple(column) for column in together.restarts.T}) == 3
    for seed in range(3):
        alone = rollout(value, SIGMA, ROUNDS, "gradient", noise=0.3, seeds=[seed])
        np.testing.assert_allclose(together.residual[:, seed], alone.residual[:, 0], rtol=0, atol=1e-13)
    blocks = rollout_blocks([Block(SIGMA, value, 3), Block(SIGMA, OuterRule(0.1, 0.9))], ROUNDS)
    np.testing.assert_array_equal(blocks.blocks[0].residual, rollout(value, SIGMA, ROUNDS, 3).residual)
