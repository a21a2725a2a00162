"""Rollouts: equal to literal loops and to each other."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

import oracle
from oracle import HB, NAG
from policies import Oracle, each_rule
from twophase.restart import Never, Periodic, Soft, parse
from twophase.rule import OuterRule
from twophase.theory import Block, rollout, rollout_blocks, rule_grid

SIX = np.array(oracle.SIX)
SAMPLES = [Never(), Periodic(3), Soft(4, -0.4, 0.8), parse("gradient"), parse("norm:1.5"), parse("test-half:3")]
PARTS = ("residual", "buffer", "pseudo_gradient", "restarts", "loss")


@each_rule
@pytest.mark.parametrize(
    "restart", ["never", "1", "3", "cycle:2,5", "at:4,9", "soft:4:-0.4:0.8", "test-early:3:-0.3:0.7"]
)
def test_equals_a_literal_loop(rule: OuterRule, restart: str):
    """x, m and g of each mode equal the printed equations in plain numbers, with noise too; restarts come when due."""
    sigma, start, policy = np.array([0.0, 0.03, 0.4, 0.95, 1.0]), np.array([1.0, -2.0, 3.0, 0.5, 1.0]), parse(restart)
    run = rollout(rule, sigma, 20, policy, initial=start)
    noise = np.random.default_rng(1).normal(size=(20, 3, 5))
    disturbed = rollout(rule, sigma, 20, restart, noise=noise)
    for found, initial, added in ((run, start, np.zeros((20, 5))), (disturbed, np.ones(5), noise.mean(axis=1))):
        loop = Oracle(rule, policy, initial)
        for t in range(20):
            g, count = sigma * loop.x + added[t], loop.restarts
            loop.round(g)
            expected = (loop.x, loop.m, g)
            for array, exact in zip(
                (found.residual[1:], found.buffer[1:], found.pseudo_gradient), expected, strict=True
            ):
                np.testing.assert_allclose(array[t], exact, rtol=0, atol=1e-13)
            assert found.restarts[t] == (loop.restarts > count)
    np.testing.assert_allclose(run.loss, (run.residual**2).mean(axis=-1) / 2, rtol=1e-14)


@pytest.mark.parametrize("restart", SAMPLES, ids=repr)
def test_many_equal_singles(restart: Any):
    """Arrays of rules, sigmas, starts and seeds give the bits of one rollout each, whatever the policy."""
    grid = rule_grid([[0.05], [0.2], [0.3]], [0.0, 0.9], [False, True])
    sigma, start = np.array([SIX, SIX / 3])[:, None, None], np.array([[1.0], [-2.0]])
    options: dict[str, Any] = {"noise": 0.05, "replicas": 2, "weights": range(6)}
    many = rollout(grid, sigma, 20, restart, initial=start, seeds=[4, 0], **options)
    assert many.residual.shape == (21, 2, 2, 3, 2, 6)
    for n, i, j, k in itertools.product(range(2), range(2), range(3), range(2)):
        single = rollout(grid[j, k], sigma[i, 0, 0], 20, restart, initial=start[k, 0], seeds=[[4, 0][n]], **options)
        for name in PARTS:
            np.testing.assert_array_equal(getattr(many, name)[:, n, i, j, k], getattr(single, name)[:, 0], err_msg=name)
    adaptive = bool(restart.needs)
    assert (many.restarts != many.restarts[:, :1, :1, :1, :1]).any() == adaptive  # otherwise one decision for all


@pytest.mark.parametrize("replicas", [1, 9])
def test_noise_has_the_stated_deviation(replicas: int):
    """What is added to sigma x is white and Gaussian with the given deviation, over its root for several replicas."""
    run = rollout(HB, np.full(50, 0.5), 40, noise=0.3, replicas=replicas, seeds=20)
    added = (run.pseudo_gradient - 0.5 * run.residual[:-1]) / (0.3 / math.sqrt(replicas))
    for power, moment, spread in ((1, 0, 1), (2, 1, 2), (4, 3, 96)):
        assert (added**power).mean() == pytest.approx(moment, abs=4 * math.sqrt(spread / added.size))
    for axis in range(3):  # rounds, seeds, modes
        a, b = np.delete(added, 0, axis), np.delete(added, -1, axis)
        assert (a * b).mean() == pytest.approx(0, abs=4 / math.sqrt(a.size))


def test_seeds_are_reproducible():
    """A seed's draws depend on nothing but the seed: not on other seeds, more rounds, or the rule."""

    def residual(rule: Any, rounds: int, **options: Any) -> Any:
        return rollout(rule, SIX, rounds, **{"noise": 0.1, **options}).residual

    base = residual(HB, 9, seeds=[3])
    for other in (
        residual(HB, 9, seeds=[5, 3])[:, 1:],
        residual(HB, 9, seeds=4)[:, 3:],
        residual(HB, 15, seeds=[3])[:10],
        residual([NAG, HB], 9, seeds=[3])[:, :, 1],
    ):
        np.testing.assert_array_equal(other, base)
    assert (residual(HB, 9, seeds=[4])[1:] != base[1:]).all()
    np.testing.assert_array_equal(residual(HB, 9), residual(HB, 9, seeds=1)[:, 0])


def test_blocks_are_separate():
    """Each block equals a rollout of its own with the block's share of the noise; its policy sees only this block."""
    noise = np.random.default_rng(2).normal(size=(20, 2, 5)) * 0.1
    blocks = [
        Block([0.9, 0.3], OuterRule(0.7, 0.9), parse("gradient")),
        Block([0.5], NAG, "soft:3:0.2:0.1", weights=[3.0]),
        Block([0.2, 0.1], OuterRule(0.3, 0.8, True), parse("gradient"), weights=[0.5, 0.0]),
    ]
    start = np.array([1.0, 2.0, 3.0, -1.0, 1.0])
    run = rollout_blocks(blocks, 20, noise=noise, initial=start)
    for block, part, whole in zip(blocks, (slice(0, 2), slice(2, 3), slice(3, 5)), run.blocks, strict=True):
        options: dict[str, Any] = {"noise": noise[..., part], "initial": start[..., part], "weights": block.weights}
        alone = rollout(block.rule, block.sigma, 20, block.restart, **options)
        for name in PARTS:
            np.testing.assert_array_equal(getattr(whole, name), getattr(alone, name))
    assert min(block.restarts.sum() for block in run.blocks) > 0
    assert (run.blocks[0].restarts != run.blocks[2].restarts).any()
    x = np.concatenate([block.residual for block in run.blocks], axis=-1)
    np.testing.assert_allclose(run.loss, (x**2 @ [1, 1, 3, 0.5, 0]) / 5.5 / 2, rtol=1e-13)


@each_rule
@pytest.mark.parametrize("restart", ["gradient", "norm:1.5", "auto", "gain:1"])
def test_decisions_do_not_depend_on_the_units(rule: OuterRule, restart: str) -> None:
    """Anchors whose squares over- or underflow are decided on like others: x is in units of its own."""
    run = rollout(rule, SIX, 30, restart)
    for power in (-600, 900):
        other = rollout(rule, SIX, 30, restart, initial=math.ldexp(1.0, power))
        np.testing.assert_array_equal(other.restarts, run.restarts)
        np.testing.assert_allclose(other.residual, np.ldexp(run.residual, power), rtol=1e-9)
