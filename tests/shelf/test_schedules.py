"""Outer schedules against torch's schedulers, against sums of weights, and in the optimizer and a run."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from outers import flat, give, parameters, randoms
from replicas import same_bits
from twophase.optim.optimizer import OuterOptimizer
from twophase.rule import OuterRule
from twophase.shelf.outer import outer
from twophase.shelf.text import parse, registered
from twophase.tasks.lm.config import TrainConfig
from twophase.training.config import OuterConfig

RULE = OuterRule(0.7, 0.9)
LR = torch.optim.lr_scheduler


def rates(text: str, rounds: int, rule: OuterRule = RULE) -> list[float]:
    """The learning rates of the first rounds."""
    return [parse("schedule", text).at(rule, number, number).lr for number in range(1, rounds + 1)]


def torch_rates(build: Any, epochs: range) -> list[float]:
    """The learning rates of a scheduler of torch, in epochs from 0."""
    optimizer = torch.optim.SGD(parameters(0, [(1,)]), RULE.lr)
    scheduler, values = build(optimizer), []
    for _ in range(epochs.stop):
        values.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return values[epochs.start :]


@pytest.mark.parametrize(
    ("text", "build", "epochs"),
    [
        ("constant", lambda o: LR.ConstantLR(o, 1.0), range(12)),
        ("cosine:rounds=12:final=0.1", lambda o: LR.CosineAnnealingLR(o, 12, 0.1 * RULE.lr), range(12)),
        ("linear:rounds=12:final=0.25", lambda o: LR.LinearLR(o, 1.0, 0.25, 12), range(16)),
        ("warmup:warmup=5:start=0.2", lambda o: LR.LinearLR(o, 0.2, 1.0, 5), range(1, 13)),
    ],
)
def test_learning_rates_are_torch_s(text: str, build: Any, epochs: range):
    """Round t has the rate of torch's epoch t - 1, and a warm-up, which has no round at its start, that of epoch t."""
    np.testing.assert_allclose(rates(text, len(epochs)), torch_rates(build, epochs), rtol=1e-12)


@pytest.mark.parametrize("name", ["cosine", "linear"])
def test_decays_end_with_their_rounds(name: str):
    """A warm-up goes before; then the rate falls from the whole to its final share, and stays there."""
    values = rates(f"{name}:rounds=10:warmup=4:final=0.1", 20)
    np.testing.assert_allclose(values[:5], [RULE.lr * share for share in (0.25, 0.5, 0.75, 1, 1)])
    assert all(a > b for a, b in pairwise(values[4:11]))
    np.testing.assert_allclose(values[10:], 0.1 * RULE.lr)
    assert rates(f"{name}:rounds=3:warmup=5", 8) == pytest.approx([0.7 * s for s in (0.2, 0.4, 0.6, 0.8, 1, 1, 0, 0)])


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("form", ["sum", "ema"])
def test_transient_evens_the_weights_out(form: str, nesterov: bool):
    """On a constant pseudo-gradient every step has the length of the limit, from the first on and after restarts."""
    method = f"sgd:lr=0.3:momentum=0.8:form={form}:nesterov={str(nesterov).lower()}"
    steps = []
    for schedule in ("transient", "constant"):
        x = parameters(0, [(4,)])
        restart = 4 if schedule == "transient" else "never"
        optimizer = OuterOptimizer(x, outer(method, schedule=schedule), restart=restart)
        for _ in range(200 if schedule == "constant" else 11):
            give(x, [torch.ones(4, dtype=torch.float64)])
            before = x[0].detach().clone()
            optimizer.step()
            steps.append(float((before - x[0].detach()).mean()))
    np.testing.assert_allclose(steps[:11], steps[-1], rtol=1e-12)


def test_momentum_rises():
    """Momentum goes in equal steps to its own value; from 0 the first round's pseudo-gradient is remembered, too."""
    schedule = parse("schedule", "momentum:warmup=4:start=0.5")
    values = [schedule.at(RULE, number, 1).momentum for number in range(1, 7)]
    np.testing.assert_allclose(values, [0.5, 0.6, 0.7, 0.8, 0.9, 0.9])
    assert schedule.at(OuterRule(1.0, 0.0), 1, 1).momentum == 0
    x, m = parameters(0, [(5,)]), 0.0
    optimizer = OuterOptimizer(x, outer("heavy-ball", schedule="momentum:warmup=3"))
    expected = x[0].detach().clone()
    for number in range(1, 7):
        (g,) = randoms(number, [(5,)])
        give(x, [g])
        optimizer.step()
        m = 0.9 * min(1, (number - 1) / 3) * m + g
        expected -= 0.7 * m
        torch.testing.assert_close(x[0].detach(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", registered("schedule"))
def test_the_optimizer_takes_the_round_s_rule(name: str):
    """A scheduled run is one in which each round's learning rate and momentum were set by hand."""
    schedule = parse("schedule", name).over(9)
    runs = []
    for by_hand in (False, True):
        params = parameters(0, [(3, 5)])
        value: Any = outer("fedadam", schedule="constant" if by_hand else schedule)
        optimizer = OuterOptimizer(params, value, restart=4)
        (group,) = optimizer.param_groups
        for number in range(1, 10):
            if by_hand:
                rule = schedule.at(value.rule(), number, group["rounds_since_restart"] + 1)
                group |= {"lr": rule.lr, "momentum": rule.momentum}
            give(params, randoms(number, [(3, 5)]))
            optimizer.step()
        runs.append(flat(params))
    assert same_bits(*runs)


@pytest.mark.parametrize("method", registered("method"))
def test_every_method_takes_the_learning_rate(method: str):
    """In the first round, a quarter of the learning rate is a quarter of the step."""
    steps = []
    for schedule in ("constant", "warmup:warmup=4"):
        params = parameters(0, [(3, 5), (4,)])
        before = flat(params)
        optimizer = OuterOptimizer(params, outer(method, schedule=schedule))
        give(params, randoms(1, [(3, 5), (4,)]))
        optimizer.step()
        steps.append(before - flat(params))
    torch.testing.assert_close(steps[0], 4 * steps[1], rtol=1e-9, atol=1e-12)


def test_schedules_reach_torch_optimizers():
    """A torch optimizer under a schedule of learning rate or momentum is one whose settings were set by hand."""
    text = "torch:optimizer=Adam:options=lr=0.1,betas=0.8/0.99"
    for schedule in ("warmup:warmup=4", "momentum:warmup=4:start=0.2"):
        params, others = (parameters(0, [(3, 5)]) for _ in range(2))
        optimizer = OuterOptimizer(params, outer(text, schedule=schedule))
        adam = torch.optim.Adam(others, betas=(0.0, 0.99))
        for number in range(1, 9):
            share = min(1.0, number / 4)
            is_lr = schedule.startswith("warmup")
            momentum = 0.8 if is_lr else 0.2 + 0.6 * min(1.0, (number - 1) / 4)
            adam.param_groups[0] |= {"lr": 0.1 * share if is_lr else 0.1, "betas": (momentum, 0.99)}
            for x, each in ((params, optimizer), (others, adam)):
                give(x, randoms(number, [(3, 5)]))
                each.step()
            torch.testing.assert_close(flat(params), flat(others), rtol=1e-12, atol=1e-12)


def test_a_run_s_decay_ends_with_the_run():
    """`rounds=0` stands for the run's own number; without a run it is refused where the optimizer is made."""
    config = TrainConfig(outer=OuterConfig(schedule="cosine"), steps=120, inner_steps=6)
    value: Any = config.outer.value(config.rounds)
    assert value.schedule.rounds == 20
    with pytest.raises(ValueError, match="rounds"):
        OuterOptimizer(parameters(0), outer("adamw", schedule="cosine"))


def test_schedules_that_rise_over_the_run():
    """A final share above 1 is a rising rate; a momentum's warm-up of 0 is the whole run's, once known."""
    assert rates("linear:rounds=4:final=2", 5) == pytest.approx(
        [RULE.lr * (1 + share) for share in (0, 0.25, 0.5, 0.75, 1)]
    )
    ramp = parse("schedule", "momentum:warmup=0")
    with pytest.raises(ValueError, match="warmup is 0"):
        ramp.at(RULE, 1, 1)
    assert [ramp.over(4).at(RULE, t, 1).momentum for t in (1, 3, 5)] == pytest.approx(
        [0, RULE.momentum / 2, RULE.momentum]
    )
