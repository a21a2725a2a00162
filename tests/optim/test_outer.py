"""`OuterSGD`: equal to torch.optim.SGD, to its slow twin and to plain arithmetic; its state; where it must work.

Run as a program, this file is one of the two processes of the DTensor test.
"""

from __future__ import annotations

import copy
import functools
import itertools
import json
import math
import os
import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import MagicMock, create_autospec

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from forked import in_processes
from replicas import same_bits, through_file
from twophase import restart as restart_module
from twophase.diloco.engine import DiLoCo
from twophase.optim import functional
from twophase.optim.functional import buffer_dtype, outer_step_
from twophase.optim.outer import OuterSGD
from twophase.optim.products import Angles, dots
from twophase.optim.reference import ReferenceOuter
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
    ask,
    convert,
    parse,
)
from twophase.rule import OuterRule

RULES = [
    OuterRule(lr, 0.9, nesterov, form)  # type: ignore[arg-type]
    for nesterov, (form, lr) in itertools.product([False, True], [("sum", 0.07), ("ema", 0.7)])
]
POLICIES = [Never(), Periodic(3), Cycle((2, 3, 1)), AtRounds((4, 9)), Soft(3, 0.2, 0.1), Soft(2, -0.3, 0.6)]
SHAPES = [(), (1,), (7,), (3, 5), (2, 3, 4), (33, 17)]
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
COUNTERS = ("rounds", "rounds_since_restart", "restarts", "policy_state")

each_rule = pytest.mark.parametrize("rule", RULES, ids=OuterRule.describe)
each_policy = pytest.mark.parametrize("policy", POLICIES, ids=str)


def randoms(seed: int, shapes: Sequence[tuple[int, ...]] = SHAPES, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype) for shape in shapes]


def parameters(seed: int, shapes: Sequence[tuple[int, ...]] = SHAPES, dtype: torch.dtype = torch.float64) -> list[Any]:
    return [nn.Parameter(x) for x in randoms(seed, shapes, dtype)]


def give(params: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    for p, g in zip(params, gradients, strict=True):
        p.grad = g.clone()


def run(outer: OuterSGD, rounds: range, *, measure: bool = False) -> None:
    """Rounds with pseudo-gradients that are a function of the round's number and the parameters' shapes."""
    for number in rounds:
        for group in outer.param_groups:
            params = group["params"]
            give(params, randoms(1000 + number, [tuple(p.shape) for p in params], params[0].dtype))
        outer.step(measure=measure)


def simulate(rule: OuterRule, policy: RestartPolicy, x: float, gradients: Sequence[float]) -> list[tuple[float, float]]:
    """(x, m) after each round on one number: the equations of house.md, written without any of our code.

    For scheduled policies only.
    """
    b, m, age, state, places = rule.momentum, 0.0, 0, policy.initial_state(), []
    for number, g in enumerate(gradients, start=1):
        age += 1
        old = m
        if rule.form == "sum":
            m = b * old + g
            x = x - rule.lr * (g + b * m) if rule.nesterov else x - rule.lr * m
        else:
            m = b * old + (1 - b) * g
            x = x - rule.lr * ((1 + b) * m - b * old) if rule.nesterov else x - rule.lr * m
        answer = ask(policy, state, RoundSignal(number, age))
        state, event = answer.state, answer.restart
        if event is not None:
            m, age = event.retain * m + event.inject * g, 0
        places.append((x, m))
    return places


# --- equal to torch.optim.SGD, bit for bit ------------------------------------------------------------------------

PIECES = 300_001  # elements: three internal pieces of 2^17 and a tail that no vector register fills


def sgd_tensors(seed: int) -> list[Tensor]:
    """Many shapes: scalar, empty, tiny, transposed, sliced, larger than an internal piece, and zeros of both signs."""
    generator = torch.Generator().manual_seed(seed)
    draw = functools.partial(torch.randn, generator=generator)
    zeros = torch.tensor([0.0, -0.0, 0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45])
    return [
        *(draw(shape) for shape in SHAPES),
        draw(()),
        draw(0),
        draw(4, 0, 3),
        draw(5, 9).t(),
        draw(6, 4, 10)[:, ::2, ::3],
        draw(12, 1).expand(12, 1),
        draw(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        draw(PIECES),
        draw(800, 700),
        draw(700, 800).t(),
        zeros.roll(seed % 8),
        zeros.flip(0),
    ]


@pytest.mark.parametrize("foreach", [False, True], ids=["loop", "foreach"])
@pytest.mark.parametrize(
    ("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)], ids=["plain", "heavy ball", "nesterov"]
)
def test_equals_torch_sgd_bit_for_bit(momentum: float, nesterov: bool, foreach: bool):
    """With Never() in sum form, parameters and buffers of several groups are torch.optim.SGD's over 20 steps."""
    ours, theirs = ([nn.Parameter(x) for x in sgd_tensors(0)] for _ in range(2))

    def groups(params: list[Any]) -> list[dict[str, Any]]:
        second = {"lr": 0.03, "momentum": momentum / 3}
        return [{"params": params[::2]}, {"params": params[1::4]} | second, {"params": params[3::4], "lr": 1.5}]

    outer = OuterSGD(groups(ours), lr=0.7, momentum=momentum, nesterov=nesterov)
    sgd = torch.optim.SGD(groups(theirs), lr=0.7, momentum=momentum, nesterov=nesterov, foreach=foreach)
    for step in range(1, 21):
        gradients = sgd_tensors(step)
        for p, q, g in zip(ours, theirs, gradients, strict=True):
            p.grad, q.grad = g, g.clone()
        outer.step()
        sgd.step()
    assert all(same_bits(p, q) for p, q in zip(ours, theirs, strict=True))
    if momentum:
        for p, q in zip(ours, theirs, strict=True):
            assert same_bits(outer.state[p]["momentum_buffer"], sgd.state[q]["momentum_buffer"])


@pytest.fixture(params=["fused", "fused, 2 threads", "inexact", "missing", "changed"])
def fused(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Torch's fused kernel as it is, rounding in another way, gone, and with other arguments."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2 if "2" in request.param else 1)
    kernel = torch._fused_sgd_

    def inexact(params: list[Tensor], *rest: Any, **options: Any) -> None:
        kernel(params, *rest, **options)
        params[0][:1] *= 1 + torch.finfo(params[0].dtype).eps

    def changed(params: list[Tensor]) -> None: ...

    if request.param == "missing":
        monkeypatch.delattr(torch, "_fused_sgd_")
    elif request.param in ("inexact", "changed"):
        monkeypatch.setattr(torch, "_fused_sgd_", {"inexact": inexact, "changed": changed}[request.param])
    functional.fused_is_exact.cache_clear()
    yield request.param
    functional.fused_is_exact.cache_clear()
    torch.set_num_threads(threads)


LENGTHS = [*range(201), 1000, 4097, 65_537, 2**17 - 1, 2**17, 2**17 + 15, PIECES]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("nesterov", "form"), [(False, "sum"), (True, "sum"), (False, "ema"), (True, "ema")])
def test_every_path_has_the_bits_of_torch_sgd(
    nesterov: bool, form: Any, dtype: torch.dtype, fused: str, monkeypatch: pytest.MonkeyPatch
):
    """Any length and place, fresh or not, whatever the kernel: torch.optim.SGD's bits, in EMA form the plain path's."""

    def draw(seed: int) -> list[Tensor]:  # the second half begins between vectors
        generator = torch.Generator().manual_seed(seed)
        long = [torch.randn(length + 1, dtype=dtype, generator=generator) for length in LENGTHS]
        return [x[1:] if number % 2 else x[:-1] for number, x in enumerate(long)]

    taken = []
    if fused.startswith("fused"):
        kernel = torch._fused_sgd_

        def spy(params: list[Tensor], *rest: Any, **options: Any) -> None:
            taken.append(len(params) > 1)  # the probe has one
            kernel(params, *rest, **options)

        monkeypatch.setattr(torch, "_fused_sgd_", spy)
    ours, plain = ([x.clone() for x in draw(0)] for _ in range(2))
    theirs = [[nn.Parameter(x.clone()) for x in draw(0)] for _ in range(2)]
    buffers, plain_buffers = [torch.full_like(x, math.nan) for x in ours], [torch.empty_like(x) for x in ours]
    sgds = [
        torch.optim.SGD(params, lr=0.7, momentum=0.9, nesterov=nesterov, foreach=foreach)
        for params, foreach in zip(theirs, (False, True), strict=True)
    ]
    for step in range(3):
        gradients = draw(step + 1)
        rule = functional.UpdateRule(0.7, 0.9, nesterov, form, fresh=step == 0)
        outer_step_(ours, gradients, buffers, lr=0.7, momentum=0.9, nesterov=nesterov, form=form, fresh=step == 0)
        functional.in_pieces_(list(zip(plain, gradients, plain_buffers, strict=True)), rule)
        for params, sgd in zip(theirs, sgds, strict=True):
            give(params, gradients)
            sgd.step()
    assert all(map(same_bits, ours, plain))
    assert all(map(same_bits, buffers, plain_buffers))
    if form == "sum":
        for params, sgd in zip(theirs, sgds, strict=True):
            assert all(map(same_bits, ours, params))
            assert all(same_bits(m, sgd.state[p]["momentum_buffer"]) for m, p in zip(buffers, params, strict=True))
    # On a machine where the kernel rounds in another way, not taking it is right.
    was_taken, known = any(taken), form == "sum" or not nesterov
    exact = functional.fused_is_exact(dtype, functional.UpdateRule(0.7, 0.9, nesterov, form, fresh=False))
    assert was_taken == (known and exact)
    assert not exact or fused.startswith("fused")


def test_the_fused_kernel_gets_only_what_it_takes(monkeypatch: pytest.MonkeyPatch):
    """Plain contiguous float32 and float64 tensors, up to a multiple of 16 elements, and the rules that it knows."""
    seen: list[Any] = []

    def spy(params: list[Tensor], gradients: list[Tensor], buffers: list[Tensor], **_: Any) -> None:
        seen.append([(p.dtype, p.numel()) for p in params])
        assert all(len({t.dtype for t in row}) == 1 for row in zip(params, gradients, buffers, strict=True))

    monkeypatch.setattr(torch, "_fused_sgd_", spy)
    monkeypatch.setattr(functional, "fused_is_exact", lambda *_: True)

    class Sub(Tensor): ...

    def step(*shape: int, types: tuple[torch.dtype, ...] = (torch.float32,) * 3, view: Any = None, **rule: Any) -> Any:
        seen.clear()
        x, g, m = (torch.ones(shape, dtype=dtype) for dtype in types)
        x = view(x) if view else x
        settings: dict[str, Any] = {"lr": 0.7, "momentum": 0.9, "nesterov": True, "form": "sum"} | rule
        outer_step_([x], [g.view(x.shape)], [m.view(x.shape)], **settings)
        return [*seen]

    half, single, double = torch.bfloat16, torch.float32, torch.float64
    assert step(5, 7) == step(5, 7, nesterov=False) == step(5, 7, fresh=True) == [[(single, 32)]]
    assert step(16, types=(double,) * 3) == [[(double, 16)]]
    assert step(48, form="ema", nesterov=False) == [[(single, 48)]]
    for nothing in (
        step(15),
        step(0),
        step(16, 32, view=torch.t),
        step(16, view=lambda x: x.as_subclass(Sub)),
        step(16, types=(half,) * 3),
        step(16, types=(half, half, single)),
        step(16, types=(single, double, single)),
        step(16, form="ema"),
        step(16, form="ema", nesterov=False, fresh=True),
        step(16, momentum=0.0),
    ):
        assert nothing == []
    seen.clear()
    outer_step_([], [], [], lr=0.7, momentum=0.9, nesterov=True, form="sum")
    assert seen == []


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("layout", ["param", "gradient", "both"])
def test_equals_torch_sgd_on_odd_strides(layout: str, nesterov: bool):
    """Parameters and gradients that lie differently in memory give torch.optim.SGD's bits too."""
    generator = torch.Generator().manual_seed(0)

    def draw(odd: bool) -> Tensor:
        return torch.randn(37, 53, generator=generator).t() if odd else torch.randn(53, 37, generator=generator)

    start = draw(layout != "gradient")
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    outer = OuterSGD([ours], 0.7, 0.9, nesterov=nesterov)
    sgd = torch.optim.SGD([theirs], 0.7, 0.9, nesterov=nesterov)
    for _ in range(20):
        ours.grad = theirs.grad = draw(layout != "param")
        outer.step()
        sgd.step()
    assert same_bits(ours, theirs)


@pytest.mark.parametrize("nesterov", [False, True])
def test_equals_torch_sgd_when_gradients_come_and_go(nesterov: bool):
    """A parameter without a gradient is left alone and joins with a fresh buffer, as in torch.optim.SGD, in bits."""
    ours, theirs = parameters(0, dtype=torch.float32), parameters(0, dtype=torch.float32)
    outer = OuterSGD(ours, 0.7, 0.9, nesterov=nesterov)
    sgd = torch.optim.SGD(theirs, 0.7, 0.9, nesterov=nesterov)
    for step in range(20):
        give(ours, randoms(step + 1, dtype=torch.float32))
        give(theirs, randoms(step + 1, dtype=torch.float32))
        for index in range(len(ours)):
            if (step + index) % 3 == 0 or step < index:
                ours[index].grad = theirs[index].grad = None
        outer.step()
        sgd.step()
        assert all(same_bits(p, q) for p, q in zip(ours, theirs, strict=True))


def test_equals_torch_sgd_under_a_scheduler():
    """Learning-rate schedulers drive it as they drive torch.optim.SGD, momentum cycling included, in bits."""
    ours, theirs = parameters(0, dtype=torch.float32), parameters(0, dtype=torch.float32)
    outer, sgd = OuterSGD(ours, 0.7, 0.9), torch.optim.SGD(theirs, 0.7, 0.9)
    schedules = [
        torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=20) for optimizer in (outer, sgd)
    ]
    rates = set()
    for step in range(20):
        give(ours, randoms(step + 1, dtype=torch.float32))
        give(theirs, randoms(step + 1, dtype=torch.float32))
        outer.step()
        sgd.step()
        if step < 19:
            for schedule in schedules:
                schedule.step()
        rates.add((outer.param_groups[0]["lr"], outer.param_groups[0]["momentum"]))
        assert all(same_bits(p, q) for p, q in zip(ours, theirs, strict=True))
    assert len(rates) >= 15


# --- equal to arithmetic and to the slow twin ---------------------------------------------------------------------


@each_rule
@each_policy
def test_equals_the_printed_equations(rule: OuterRule, policy: RestartPolicy):
    """On one float64 number, optimizer and slow twin follow the equations of house.md, x and m, over 20 rounds."""
    gradients = [math.sin(t * t) + 0.3 for t in range(1, 21)]
    param = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
    outer = OuterSGD.from_rule([param], rule, policy)
    twin = ReferenceOuter([param], rule, policy)
    for g, (x, m) in zip(gradients, simulate(rule, policy, 1.5, gradients), strict=True):
        param.grad = torch.tensor(g, dtype=torch.float64)
        outer.step()
        twin.round([param.grad])
        assert param.item() == pytest.approx(x, rel=1e-13, abs=1e-14)
        assert twin.x[0].item() == pytest.approx(x, rel=1e-13, abs=1e-14)
        assert outer.state[param]["momentum_buffer"].item() == pytest.approx(m, rel=1e-13, abs=1e-14)
        assert twin.m[0].item() == pytest.approx(m, rel=1e-13, abs=1e-14)


@each_rule
@each_policy
def test_fast_equals_slow_twin(rule: OuterRule, policy: RestartPolicy):
    """On blocks of many shapes the fast optimizer and its slow twin agree to 1e-13 for 25 rounds."""
    params = parameters(0)
    outer, twin = OuterSGD.from_rule(params, rule, policy), ReferenceOuter(params, rule, policy)
    for number in range(1, 26):
        gradients = randoms(number)
        give(params, gradients)
        outer.step()
        twin.round(gradients)
        for p, x, m in zip(params, twin.x, twin.m, strict=True):
            torch.testing.assert_close(p.detach(), x, rtol=1e-13, atol=1e-13)
            torch.testing.assert_close(outer.state[p]["momentum_buffer"], m, rtol=1e-13, atol=1e-13)
    group = outer.param_groups[0]
    assert (group["rounds"], group["rounds_since_restart"]) == (twin.t, twin.age) == (25, twin.age)


@each_rule
def test_fast_equals_slow_twin_for_adaptive_policies(rule: OuterRule, norm_ratio: type[RestartPolicy]):
    """Restarts before the mixing, decided from norms, happen in the same rounds with the same effect and memory."""
    policy = norm_ratio(1.2, 3) if rule.form == "sum" else norm_ratio(0.3, 3)  # type: ignore[call-arg]
    params = parameters(0)
    outer, twin = OuterSGD.from_rule(params, rule, policy), ReferenceOuter(params, rule, policy)
    for number in range(1, 31):
        gradients = [g + 0.5 for g in randoms(number)]
        give(params, gradients)
        outer.step()
        twin.round(gradients)
        for p, x in zip(params, twin.x, strict=True):
            torch.testing.assert_close(p.detach(), x, rtol=1e-12, atol=1e-12)
        assert outer.param_groups[0]["rounds_since_restart"] == twin.age
        assert outer.param_groups[0]["policy_state"] == pytest.approx(twin.policy_state)
    assert 3 <= outer.param_groups[0]["restarts"] <= 8


def test_groups_keep_their_own_rule_period_and_age():
    """A restart period per block is a param group: each group is the twin of its own rule and policy."""
    blocks = [parameters(seed, SHAPES[3:]) for seed in range(4)]
    settings: list[dict[str, Any]] = [
        {"restart": Periodic(2)},
        {"restart": "cycle:3,4", "lr": 0.3, "nesterov": True},
        {"restart": 5, "form": "ema", "momentum": 0.6},
        {},
    ]
    groups = [{"params": block} | setting for block, setting in zip(blocks, settings, strict=True)]
    outer = OuterSGD(groups, lr=0.1, momentum=0.9, restart="soft:4:0.5:0.1")
    rules = [
        OuterRule(0.1, 0.9),
        OuterRule(0.3, 0.9, nesterov=True),
        OuterRule(0.1, 0.6, form="ema"),
        OuterRule(0.1, 0.9),
    ]
    policies = [Periodic(2), Cycle((3, 4)), Periodic(5), Soft(4, 0.5, 0.1)]
    twins = [ReferenceOuter(b, rule, policy) for b, rule, policy in zip(blocks, rules, policies, strict=True)]
    for number in range(1, 24):
        for index, (block, twin) in enumerate(zip(blocks, twins, strict=True)):
            gradients = randoms(10 * number + index, SHAPES[3:])
            give(block, gradients)
            twin.round(gradients)
        outer.step()
    for block, twin, group in zip(blocks, twins, outer.param_groups, strict=True):
        for p, x in zip(block, twin.x, strict=True):
            torch.testing.assert_close(p.detach(), x, rtol=1e-12, atol=1e-12)
        assert group["rounds_since_restart"] == twin.age
    assert [group["restarts"] for group in outer.param_groups] == [11, 6, 4, 5]
    assert [group["restart"] for group in outer.param_groups] == ["2", "cycle:3,4", "5", "soft:4:0.5:0.1"]


@each_rule
@each_policy
def test_forms_are_one_trajectory(rule: OuterRule, policy: RestartPolicy):
    """Rule and policy converted to the other form take the same path, and the buffers differ by 1 - momentum."""
    other = convert(rule, policy, "ema" if rule.form == "sum" else "sum")
    here, there = parameters(0), parameters(0)
    ours, theirs = OuterSGD.from_rule(here, rule, policy), OuterSGD.from_rule(there, *other)
    run(ours, range(20))
    run(theirs, range(20))
    factor = other[0].injection / rule.injection
    for p, q in zip(here, there, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(
            factor * ours.state[p]["momentum_buffer"], theirs.state[q]["momentum_buffer"], rtol=1e-12, atol=1e-12
        )


def test_the_docstrings_numbers():
    """Heavy ball, lr 0.5, b = 0.9, K = 2, g = 0.1: steps of 0.05, 0.095, and 0.05 again after the restart."""
    x = nn.Parameter(torch.tensor([1.0], dtype=torch.float64))
    outer = OuterSGD([x], lr=0.5, momentum=0.9, restart=2)
    places = []
    for _ in range(4):
        x.grad = torch.tensor([0.1], dtype=torch.float64)
        outer.step()
        places.append(x.item())
    assert places == pytest.approx([0.95, 0.855, 0.805, 0.71])


# --- reductions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["sum", "ema"])
@pytest.mark.parametrize("nesterov", [False, True])
@each_policy
def test_momentum_zero_is_plain_sgd(form: Any, nesterov: bool, policy: RestartPolicy):
    """Momentum 0, in either form and under any policy, is SGD of the same lr, in bits, and keeps no buffers."""
    ours, theirs = parameters(0, dtype=torch.float32), parameters(0, dtype=torch.float32)
    outer = OuterSGD(ours, 0.7, 0.0, nesterov=nesterov, form=form, restart=policy)
    sgd = torch.optim.SGD(theirs, 0.7)
    for number in range(12):
        for params in (ours, theirs):
            give(params, randoms(number, dtype=torch.float32))
        outer.step(measure=number % 2 == 0)
        sgd.step()
    assert all(same_bits(p, q) for p, q in zip(ours, theirs, strict=True))
    assert not any(outer.state.values())


@each_rule
@pytest.mark.parametrize("policy", [Periodic(1), Soft(1, 0, 0), Cycle((1, 1)), AtRounds(tuple(range(1, 21)))], ids=str)
def test_period_one_is_momentum_free(rule: OuterRule, policy: RestartPolicy):
    """A restart every round is SGD with lr times 1 (sum), 1+b (sum, Nesterov), 1-b (EMA), 1-b^2 (EMA, Nesterov)."""
    b = rule.momentum
    factor = {("sum", False): 1, ("sum", True): 1 + b, ("ema", False): 1 - b, ("ema", True): 1 - b * b}
    ours, theirs = parameters(0), parameters(0)
    outer = OuterSGD.from_rule(ours, rule, policy)
    sgd = torch.optim.SGD(theirs, rule.lr * factor[rule.form, rule.nesterov])
    for number in range(20):
        for params in (ours, theirs):
            give(params, randoms(number))
        outer.step()
        sgd.step()
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-13, atol=1e-13)


@each_rule
@pytest.mark.parametrize(
    "policy", [Periodic(12), Periodic(13), AtRounds((12, 40)), Cycle((12,)), Soft(4, 1, 0)], ids=str
)
def test_restarts_that_cannot_show_are_no_restarts(rule: OuterRule, policy: RestartPolicy):
    """A period at or above the number of rounds, and a soft restart that retains everything, equal Never(), in bits."""
    ours, theirs = parameters(0, dtype=torch.float32), parameters(0, dtype=torch.float32)
    run(OuterSGD.from_rule(ours, rule, policy), range(12))
    run(OuterSGD.from_rule(theirs, rule), range(12))
    assert all(same_bits(p, q) for p, q in zip(ours, theirs, strict=True))


@each_rule
def test_soft_restart_of_nothing_is_hard(rule: OuterRule):
    """Soft(K, 0, 0) equals Periodic(K), in bits."""
    ours, theirs = parameters(0, dtype=torch.float32), parameters(0, dtype=torch.float32)
    run(OuterSGD.from_rule(ours, rule, Soft(3, 0, 0)), range(12))
    run(OuterSGD.from_rule(theirs, rule, Periodic(3)), range(12))
    assert all(same_bits(p, q) for p, q in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_hard_restart_forgets_anything(poison: float):
    """After a hard restart the buffer is exactly zero, also where it held NaN or infinity (0 x inf would be NaN)."""
    params = parameters(0)
    outer = OuterSGD(params, 0.1, 0.9, restart=2)
    for p, g in zip(params, randoms(1), strict=True):
        p.grad = torch.full_like(g, poison)
    outer.step()
    assert not outer.state[params[3]]["momentum_buffer"].isfinite().any()
    outer.step()
    assert all(outer.state[p]["momentum_buffer"].count_nonzero() == 0 for p in params)


@pytest.mark.parametrize("inject", [0.0, 0.25])
def test_restart_before_the_first_mixing(register_policy: Callable[[str], Any], inject: float):
    """A restart before the first mixing acts on a buffer of zeros: m = inject g, then the ordinary update."""

    @register_policy("test-first")
    @dataclass(frozen=True, slots=True)
    class First(RestartPolicy):
        inject: float

        def decide(self, state: State, signal: RoundSignal) -> tuple[State, Restart | None]:
            return state, Restart(0.5, self.inject, before=True) if signal.round == 1 else None

    param = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))
    outer, twin = (
        OuterSGD([param], 0.5, 0.5, restart=First(inject)),
        ReferenceOuter([param], OuterRule(0.5, 0.5), First(inject)),
    )
    param.grad = torch.tensor(1.0, dtype=torch.float64)
    outer.step(measure=True)
    twin.round([param.grad])
    assert param.item() == twin.x[0].item() == 1 - 0.5 * (0.5 * inject + 1)
    assert outer.last_round[0].gain == 0.5 * (0.5 * inject + 1)
    assert outer.param_groups[0]["rounds_since_restart"] == twin.age == 1


# --- state --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("saved_after", [1, 5, 6, 7])
@pytest.mark.parametrize("carry", [through_file, lambda state: state], ids=["file", "memory"])
def test_resumes_in_the_middle_of_a_cycle(dtype: torch.dtype, saved_after: int, carry: Callable[[Any], Any]):
    """Saved after any round and loaded into a new optimizer, the run ends with the same bits, buffers and counters."""
    settings: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "nesterov": True, "restart": "cycle:3,4"}
    whole, first = parameters(0, dtype=dtype), parameters(0, dtype=dtype)
    straight, outer = OuterSGD(whole, **settings), OuterSGD(first, **settings)
    run(straight, range(16))
    run(outer, range(saved_after))
    second = [nn.Parameter(p.detach().clone()) for p in first]
    resumed = OuterSGD(second, **settings)
    resumed.load_state_dict(carry(outer.state_dict()))
    for p, q in zip(first, second, strict=True):
        assert same_bits(outer.state[p]["momentum_buffer"], resumed.state[q]["momentum_buffer"])
    run(resumed, range(saved_after, 16))
    for p, q in zip(whole, second, strict=True):
        assert same_bits(p, q)
        assert same_bits(straight.state[p]["momentum_buffer"], resumed.state[q]["momentum_buffer"])
    for key in COUNTERS:
        assert resumed.param_groups[0][key] == straight.param_groups[0][key]
    assert straight.param_groups[0]["restarts"] == 4  # after rounds 3, 7, 10, 14


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_buffers_of_16_bit_parameters_are_float32(dtype: torch.dtype):
    """Buffers are float32 and hold what 16 bits cannot, before and after loading; the base class would cast them."""
    params = parameters(0, dtype=dtype)
    outer = OuterSGD(params, 0.1, 0.9)
    run(outer, range(5))
    fresh = OuterSGD([nn.Parameter(p.detach().clone()) for p in params], 0.1, 0.9)
    fresh.load_state_dict(outer.state_dict())
    for p, q in zip(params, fresh.param_groups[0]["params"], strict=True):
        kept = fresh.state[q]["momentum_buffer"]
        assert kept.dtype == torch.float32
        assert same_bits(kept, outer.state[p]["momentum_buffer"])
    widest = fresh.state[fresh.param_groups[0]["params"][-1]]["momentum_buffer"]
    assert not torch.equal(widest, widest.to(dtype).float())
    assert buffer_dtype(params[0]) == torch.float32
    assert buffer_dtype(torch.zeros(1, dtype=torch.float64)) == torch.float64


@each_rule
def test_16_bit_step_rounds_once(rule: OuterRule):
    """A bfloat16 parameter takes the step of float32 arithmetic on its float32 buffer, rounded at the end."""
    x = nn.Parameter(randoms(0, [(50,)], torch.bfloat16)[0])
    outer = OuterSGD.from_rule([x], rule)
    m = torch.zeros(50)
    b, w = rule.momentum, 1.0 if rule.form == "sum" else 1 - rule.momentum
    for number in range(1, 8):
        before = x.detach().float()
        x.grad = randoms(number, [(50,)], torch.bfloat16)[0]
        outer.step()
        m = b * m + w * x.grad.float()
        step = w * x.grad.float() + b * m if rule.nesterov else m
        torch.testing.assert_close(outer.state[x]["momentum_buffer"], m, rtol=1e-6, atol=1e-7)
        # One rounding to a significand of 8 bits: half a unit in the last place, at most 2^-8 of the value.
        torch.testing.assert_close(x.detach().float(), before - rule.lr * step, rtol=2**-7.99, atol=1e-6)


def test_loading_copies():
    """After a load neither side sees what happens on the other, in buffers, counters and policy memory."""
    params = parameters(0)
    outer = OuterSGD(params, 0.1, 0.9, restart=3)
    run(outer, range(4))
    state = outer.state_dict()
    frozen = copy.deepcopy(state)
    other = OuterSGD(parameters(1), 0.1, 0.9, restart=3)
    other.load_state_dict(state)
    run(other, range(4, 9))
    for index, entry in frozen["state"].items():
        assert same_bits(entry["momentum_buffer"], state["state"][index]["momentum_buffer"])
    assert outer.param_groups[0]["rounds"] == 4
    theirs = other.state[other.param_groups[0]["params"][3]]["momentum_buffer"].clone()
    run(outer, range(4, 6))
    assert same_bits(theirs, other.state[other.param_groups[0]["params"][3]]["momentum_buffer"])
    assert other.param_groups[0]["rounds"] == 9


def test_loading_replaces_everything():
    """Loading an early state into an optimizer that went further drops its buffers, counters and memory."""
    params = parameters(0)
    outer = OuterSGD(params, 0.1, 0.9, restart=3)
    start = copy.deepcopy(outer.state_dict())
    places = [p.detach().clone() for p in params]
    run(outer, range(5))
    first = [p.detach().clone() for p in params]
    outer.load_state_dict(start)
    assert not any("momentum_buffer" in outer.state[p] for p in params)
    with torch.no_grad():
        for p, x in zip(params, places, strict=True):
            p.copy_(x)
    run(outer, range(5))
    assert all(same_bits(p, x) for p, x in zip(params, first, strict=True))
    assert outer.param_groups[0]["rounds"] == 5


def test_state_is_plain():
    """`state_dict` holds tensors, numbers and text only, and all counters are Python ints (torchft note, section 5)."""
    outer = OuterSGD([{"params": parameters(0), "restart": Soft(3, 0.2, 0.1)}], 0.1, 0.9, restart=Periodic(2))
    run(outer, range(4))
    group = outer.state_dict()["param_groups"][0]
    assert group["restart"] == "soft:3:0.2:0.1"
    assert all(type(group[key]) is int for key in COUNTERS[:3])
    assert {type(value) for value in group.values()} <= {int, float, bool, str, list}
    assert [group[key] for key in COUNTERS] == [4, 1, 1, "{}"]


@pytest.mark.parametrize("nesterov", [False, True])
def test_state_of_torch_sgd_loads(nesterov: bool):
    """A checkpoint of torch.optim.SGD continues here with SGD's bits; its rounds count from the loading."""
    theirs = parameters(0, dtype=torch.float32)
    sgd = torch.optim.SGD(theirs, 0.7, 0.9, nesterov=nesterov)
    for number in range(5):
        give(theirs, randoms(number, dtype=torch.float32))
        sgd.step()
    ours = [nn.Parameter(p.detach().clone()) for p in theirs]
    outer = OuterSGD(ours, 0.1, 0.5)
    outer.load_state_dict(through_file(sgd.state_dict()))
    for number in range(5, 10):
        for params, optimizer in ((ours, outer), (theirs, sgd)):
            give(params, randoms(number, dtype=torch.float32))
            optimizer.step()
    assert all(same_bits(p, q) for p, q in zip(ours, theirs, strict=True))
    assert outer.param_groups[0]["rounds"] == 5
    assert outer.param_groups[0]["restart"] == "never"


@pytest.mark.parametrize("restart", ["2", "soft:2:0.2:0.1", "gradient"])
def test_state_of_torch_sgd_keeps_the_policy_given_here(restart: str):
    """What SGD's state does not speak of stays: policy and `together`; form, lr and momentum are SGD's."""
    theirs = parameters(0)
    sgd = torch.optim.SGD(theirs, 0.7, 0.9)
    for number in range(3):
        give(theirs, randoms(number))
        sgd.step()
    ours, twin = ([nn.Parameter(p.detach().clone()) for p in theirs] for _ in range(2))
    outer = OuterSGD(ours, 0.1, 0.5, form="ema", restart=restart, together=True)
    outer.load_state_dict(through_file(sgd.state_dict()))
    (group,) = outer.param_groups
    assert (group["restart"], group["together"], group["form"]) == (restart, True, "sum")
    assert (group["lr"], group["momentum"], group["rounds"]) == (0.7, 0.9, 0)
    other = OuterSGD(twin, 0.7, 0.9, restart=restart, together=True)  # built as it ought to be, with SGD's buffers
    for p, q in zip(twin, theirs, strict=True):
        other.state[p]["momentum_buffer"] = sgd.state[q]["momentum_buffer"].clone()
    run(outer, range(3, 8))
    run(other, range(3, 8))
    assert all(same_bits(p, q) for p, q in zip(ours, twin, strict=True))
    assert restart == "gradient" or outer.param_groups[0]["restarts"] == 2


@pytest.mark.parametrize(("policy", "lacks"), [("loss", "loss_end, loss_start"), ("probe:keep,drop", "probes")])
def test_a_loaded_policy_that_needs_what_is_not_promised_is_refused(policy: str, lacks: str):
    """As at construction, and nothing is loaded; with the promise it is."""
    needs = parse(policy).needs
    state = OuterSGD(parameters(0), 0.7, 0.9, restart=policy, signals=needs).state_dict()
    outer = OuterSGD(parameters(0), 0.1, 0.5, restart=3)
    with pytest.raises(ValueError, match=rf"loaded state's restart policy {policy}.* needs {lacks}; .*construction"):
        outer.load_state_dict(state)
    assert (outer.param_groups[0]["lr"], outer.param_groups[0]["restart"]) == (0.1, "3")
    promised = OuterSGD(parameters(0), 0.1, 0.5, restart=3, signals=needs)
    promised.load_state_dict(state)
    assert promised.param_groups[0]["restart"] == str(parse(policy))


@pytest.mark.parametrize("fault", ["signals", "probes", "sparse", "lr"])
def test_a_round_that_one_group_refuses_has_happened_in_none(fault: str):
    """Whatever the second group lacks, the first has not moved either; the next call is the same round."""
    policy, needs = {"signals": ("loss", ["loss_start", "loss_end"]), "probes": ("probe:keep,drop", ["probes"])}.get(
        fault, ("never", [])
    )
    params, twin = parameters(0), parameters(0)
    same = OuterSGD(twin, 0.5, 0.9)
    groups = [{"params": params[:1]}, {"params": params[1:], "restart": policy}]
    outer = OuterSGD(groups, 0.5, 0.9, signals=needs)
    given = {"signals": {"loss_start": 1.0, "loss_end": 1.0}, "probe": lambda: 1.0}
    give(params, randoms(1))
    outer.step(**given)
    before = [p.detach().clone() for p in params]
    give(params, randoms(2))
    if fault == "sparse":
        params[1].grad = randoms(2)[1].to_sparse()
    if fault == "lr":
        outer.param_groups[1]["lr"] = -1.0
    with pytest.raises(ValueError, match="OuterSGD"):
        outer.step(**{key: value for key, value in given.items() if not key.startswith(fault[:5])})
    assert all(same_bits(p, q) for p, q in zip(params, before, strict=True))
    assert [group["rounds"] for group in outer.param_groups] == [1, 1]
    outer.param_groups[1]["lr"] = 0.5
    give(params, randoms(2))
    outer.step(**given)
    for number in (1, 2):
        give(twin, randoms(number))
        same.step()
    assert [group["rounds"] for group in outer.param_groups] == [2, 2]
    assert all(same_bits(p, q) for p, q in zip(params, twin, strict=True))


@pytest.mark.parametrize("value", [None, "low", torch.ones(2)])
def test_what_is_no_number_is_refused_by_name(value: Any):
    """A signal or a probe's loss that is none, before anything moves; a scalar tensor is one."""
    params = parameters(0)
    needs = ["loss_start", "loss_end"]
    outer = OuterSGD(params, 0.5, 0.9, restart="loss", signals=needs)
    give(params, randoms(1))
    before = [p.detach().clone() for p in params]
    with pytest.raises(ValueError, match=r"signals\['loss_end'\] is .*; give a single number"):
        outer.step(signals={"loss_start": 1.0, "loss_end": value})
    outer.step(signals={"loss_start": 1.0, "loss_end": torch.tensor(1.0)})  # type: ignore[dict-item]
    assert outer.param_groups[0]["rounds"] == 1
    params = parameters(0)
    probing = OuterSGD(params, 0.5, 0.9, restart="probe:keep,drop", signals=["probes"])
    give(params, randoms(1))
    with pytest.raises(ValueError, match=r"what probe\(\) returned is .*; give a single number"):
        probing.step(probe=lambda: value)
    assert all(same_bits(p, q) for p, q in zip(params, before, strict=True))


def test_a_buffer_left_over_from_a_larger_momentum_takes_no_part():
    """At momentum 0 the buffer counts as none: in the step, in what is measured and reported, and for policies."""
    params = parameters(0)
    outer = OuterSGD(params, 0.7, 0.9, restart="norm:1.5")
    run(outer, range(3), measure=True)
    assert outer.last_round[0].buffer_norm > 0
    outer.param_groups[0]["momentum"] = 0.0
    before = [p.detach().clone() for p in params]
    run(outer, range(3, 4), measure=True)
    (told,) = outer.last_round
    g = flat([p.grad for p in params])
    update = flat(before) - flat([p.detach() for p in params])
    assert (told.buffer_norm, told.cosine) == (0, 0)
    assert told.gain == pytest.approx(float(update @ g / (g @ g)))
    assert told.gain == pytest.approx(0.7)


def test_state_with_empty_buffers_loads():
    """A buffer saved as None, as some versions of torch.optim.SGD write before the first step, is no buffer."""
    params = parameters(0)
    state = torch.optim.SGD(params, 0.7, 0.9).state_dict()
    state["state"] = {index: {"momentum_buffer": None} for index in range(len(params))}
    outer = OuterSGD(params, 0.1)
    outer.load_state_dict(state)
    run(outer, range(3), measure=True)
    twin = parameters(0)
    run(OuterSGD(twin, 0.7, 0.9), range(3))
    assert all(same_bits(p, q) for p, q in zip(params, twin, strict=True))


@pytest.mark.parametrize("option", [{"dampening": 0.9}, {"weight_decay": 0.1}, {"maximize": True}])
def test_state_that_cannot_be_honoured_is_refused(option: dict[str, Any]):
    """A torch.optim.SGD state with dampening, weight decay or maximize is refused by name; nothing is loaded."""
    params = parameters(0)
    sgd = torch.optim.SGD(params, 0.7, 0.9, **option)
    outer = OuterSGD(params, 0.1, 0.5)
    (name,) = option
    with pytest.raises(ValueError, match=rf"OuterSGD: the loaded state has {name}="):
        outer.load_state_dict(sgd.state_dict())
    assert outer.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])  # noqa: S301
def test_copies_go_on_alike(clone: Callable[[Any], Any]):
    """A deep copy or pickle of parameters and optimizer continues with the same bits, restarts included."""
    params = parameters(0)
    outer = OuterSGD(params, 0.1, 0.9, restart=3)
    run(outer, range(4), measure=True)
    others, twin = clone((params, outer))
    assert twin.last_round == []
    run(outer, range(4, 9))
    run(twin, range(4, 9))
    assert all(same_bits(p, q) for p, q in zip(params, others, strict=True))
    assert twin.param_groups[0]["restarts"] == 3


def test_state_passes_through_distributed_checkpoints_helpers():
    """`torch.distributed.checkpoint.state_dict` carries buffers, counters and policies by parameter name."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    def build(seed: int) -> tuple[nn.Module, OuterSGD]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        return model, OuterSGD(model.parameters(), 0.1, 0.9, restart="cycle:2,3")

    model, outer = build(0)
    run(outer, range(4))
    state = get_optimizer_state_dict(model, outer)
    other_model, other = build(1)
    other_model.load_state_dict(model.state_dict())
    set_optimizer_state_dict(other_model, other, state)
    for key in (*COUNTERS, "restart", "lr", "momentum"):
        assert other.param_groups[0][key] == outer.param_groups[0][key]
    run(outer, range(4, 8))
    run(other, range(4, 8))
    assert all(same_bits(p, q) for p, q in zip(model.parameters(), other_model.parameters(), strict=True))


# --- the round, group by group ------------------------------------------------------------------------------------


@each_rule
@pytest.mark.parametrize("policy", ["3", "soft:2:0.3:0.5", "norm-ratio:0.5:2"])
def test_gradients_are_only_read(rule: OuterRule, policy: str, norm_ratio: type[RestartPolicy]):
    """The caller's gradients stay the same tensors with the same bits, and nothing writes to them even in passing."""
    assert norm_ratio.name == "norm-ratio"
    params = parameters(0)
    outer = OuterSGD.from_rule(params, rule, policy)
    gradients = randoms(1)
    for p, g in zip(params, gradients, strict=True):
        p.grad = g
    for _ in range(6):
        outer.step(measure=True)
    for p, g, original in zip(params, gradients, randoms(1), strict=True):
        assert p.grad is g
        assert same_bits(g, original)
        assert g._version == 0


def test_group_without_gradients_takes_no_round():
    """A group in which no parameter has a gradient keeps its age; the others go on; one gradient is enough."""
    first, second = parameters(0), parameters(1)
    outer = OuterSGD([{"params": first}, {"params": second}], 0.1, 0.9, restart=2)
    give(first, randoms(2))
    outer.step()
    outer.step()
    assert [group["rounds"] for group in outer.param_groups] == [2, 0]
    assert all(same_bits(p, x) for p, x in zip(second, randoms(1), strict=True))
    second[0].grad = torch.ones_like(second[0])
    outer.step()
    assert [group["rounds"] for group in outer.param_groups] == [3, 1]
    assert [group["restarts"] for group in outer.param_groups] == [1, 0]
    assert all(same_bits(p, x) for p, x in zip(second[1:], randoms(1)[1:], strict=True))
    for p in first + second:
        p.grad = None
    outer.step(measure=True)
    assert [group["rounds"] for group in outer.param_groups] == [3, 1]
    assert outer.last_round == []


def test_closure_is_evaluated_with_gradients():
    """The closure runs once, before the step, with autograd on, and its value is returned."""
    x = nn.Parameter(torch.tensor(3.0, dtype=torch.float64))
    outer = OuterSGD([x], 0.5)
    calls = []

    def closure() -> Tensor:
        calls.append(x.item())
        outer.zero_grad()
        loss = x * x
        loss.backward()
        return loss

    assert outer.step(closure) == 9
    assert outer.step(None) is None
    assert calls == [3.0]
    assert x.item() == 3 - 0.5 * 6 - 0.5 * 6


def test_sparse_gradients_are_refused():
    """A sparse gradient raises a ValueError with the remedy, and the round has not happened."""
    embedding = nn.Embedding(10, 3, sparse=True)
    outer = OuterSGD(embedding.parameters(), 0.1, 0.9)
    embedding(torch.tensor([1, 2])).sum().backward()
    before = embedding.weight.detach().clone()
    with pytest.raises(ValueError, match=r"OuterSGD: a pseudo-gradient is sparse; make it dense with \.to_dense\(\)"):
        outer.step()
    assert torch.equal(embedding.weight, before)
    assert outer.param_groups[0]["rounds"] == 0


@pytest.mark.parametrize("new", ["norm-ratio:0.1:2", "object", 2, "2"], ids=str)
def test_policy_may_be_changed_between_rounds(norm_ratio: type[RestartPolicy], new: Any):
    """A policy, text or period written into a param group holds from the next round on, with its own memory."""
    policy = norm_ratio(0.1, 2) if new == "object" else parse(new)  # type: ignore[call-arg]
    params = parameters(0)
    outer = OuterSGD(params, 0.1, 0.9)
    run(outer, range(3))
    outer.param_groups[0]["restart"] = policy if new == "object" else new
    run(outer, range(3, 5))
    assert outer.param_groups[0]["restart"] == str(policy)
    assert outer.param_groups[0]["restarts"] == 1  # the ratio is large at once; 2 divides round 4
    assert set(outer.param_groups[0]["policy_state"]) == set(policy.initial_state())
    through_file(outer.state_dict())


def test_policy_object_put_there_twice_starts_anew(norm_ratio: type[RestartPolicy]):
    """Putting a policy object into a group forgets the memory of the policy that was there."""
    params = parameters(0)
    outer = OuterSGD(params, 0.1, 0.9, restart=norm_ratio(0.1, 9))  # type: ignore[call-arg]
    run(outer, range(3))
    assert outer.param_groups[0]["restarts"] == 1  # the second round; then it keeps quiet
    outer.param_groups[0]["restart"] = norm_ratio(0.1, 9)  # type: ignore[call-arg]
    run(outer, range(3, 4))
    assert outer.param_groups[0]["restarts"] == 2


def test_named_parameters_and_late_groups():
    """Named parameters are taken, and a group added later begins at age 0 with its own values."""
    model = nn.Linear(3, 2)
    outer = OuterSGD(model.named_parameters(), 0.1, 0.9, restart=2)
    run(outer, range(3))
    extra = nn.Parameter(torch.ones(2))
    outer.add_param_group({"params": [("extra", extra)], "restart": Periodic(5), "form": "ema"})
    run(outer, range(3, 5))
    assert outer.param_groups[0]["param_names"] == ["weight", "bias"]
    assert [group["rounds"] for group in outer.param_groups] == [5, 2]
    assert outer.param_groups[1]["restart"] == "5"
    assert [group["form"] for group in outer.param_groups] == ["sum", "ema"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"lr": -0.1}, ["lr is -0.1", ">= 0"]),
        ({"lr": math.nan}, ["lr is nan", "finite"]),
        ({"lr": 0.1, "momentum": 1.0}, ["momentum is 1.0", "[0, 1)"]),
        ({"lr": 0.1, "form": "mean"}, ["form is 'mean'", '"sum"', '"ema"']),
        ({"lr": 0.1, "restart": "sometimes"}, ["'sometimes'", "never", "cycle:5,6,10"]),
        ({"lr": 0.1, "restart": 0}, ["period is 0", ">= 1"]),
    ],
)
def test_impossible_values_say_what_to_do(arguments: dict[str, Any], words: list[str]):
    """A value outside its range, for all parameters or in one group, raises a ValueError with value, range, remedy."""
    for build in (
        lambda: OuterSGD(parameters(0), **arguments),
        lambda: OuterSGD([{"params": parameters(0)} | arguments], 0.1, 0.9),
    ):
        with pytest.raises(ValueError, match=r"is") as caught:
            build()
        assert all(word in str(caught.value) for word in words), caught.value


# --- what a round measures ----------------------------------------------------------------------------------------


@each_rule
@pytest.mark.parametrize("policy", ["never", "1", "3", "soft:2:0.3:0.5", "norm-ratio:0.5:1"])
@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_reported_round_is_the_measured_one(
    rule: OuterRule, policy: str, momentum: float, norm_ratio: type[RestartPolicy]
):
    """Norms, cosine and gain of each group equal what is measured from outside: <update, g> / <g, g> and so on."""
    assert norm_ratio.name == "norm-ratio"
    groups = [parameters(0, SHAPES[:4]), parameters(1, SHAPES[4:])]
    outer = OuterSGD(
        [{"params": groups[0]}, {"params": groups[1], "lr": 0.3, "form": "sum"}],
        rule.lr,
        momentum,
        nesterov=rule.nesterov,
        form=rule.form,
        restart=policy,
    )
    restarts = 0
    for number in range(8):
        before = [[p.detach().clone() for p in params] for params in groups]
        buffers = [
            [outer.state[p].get("momentum_buffer", torch.zeros_like(p)).clone() for p in params] for params in groups
        ]
        for index, params in enumerate(groups):
            give(params, randoms(2 * number + index, [tuple(p.shape) for p in params]))
        outer.step(measure=True)
        for index, params in enumerate(groups):
            g = flat([p.grad for p in params])
            m = flat(buffers[index])
            update = flat(before[index]) - flat(params)
            seen = outer.last_round[index]
            assert seen.pseudo_gradient_norm == pytest.approx(float(g.norm()), rel=1e-12)
            assert seen.buffer_norm == pytest.approx(float(m.norm()), rel=1e-12, abs=1e-300)
            cosine = float(g @ m / (g.norm() * m.norm())) if m.count_nonzero() else 0.0
            assert seen.cosine == pytest.approx(cosine, rel=1e-9, abs=1e-12)
            assert seen.gain == pytest.approx(float(update @ g / (g @ g)), rel=1e-9, abs=1e-12)
            restarts += seen.restarted
    assert restarts == sum(group["restarts"] for group in outer.param_groups)
    assert restarts > 0 or policy == "never" or momentum == 0


def flat(tensors: Sequence[Any]) -> Tensor:
    return torch.cat([t.detach().double().reshape(-1) for t in tensors])


def test_measures_parameters_that_have_no_buffer_yet():
    """When some parameters of a group join later, their buffer counts as 0 and their gradient counts."""
    params = parameters(0)
    outer = OuterSGD(params, 0.1, 0.9)
    give(params[:3], randoms(1)[:3])
    outer.step()
    buffers = flat([outer.state[p]["momentum_buffer"] for p in params[:3]])
    give(params, randoms(2))
    before = flat(params)
    outer.step(measure=True)
    g = flat(randoms(2))
    seen, inner = outer.last_round[0], g[: len(buffers)] @ buffers
    assert seen.pseudo_gradient_norm == pytest.approx(float(g.norm()), rel=1e-12)
    assert seen.buffer_norm == pytest.approx(float(buffers.norm()), rel=1e-12)
    assert seen.cosine == pytest.approx(float(inner / (g.norm() * buffers.norm())), rel=1e-9)
    assert seen.gain == pytest.approx(float((before - flat(params)) @ g / (g @ g)), rel=1e-9)


def test_measuring_changes_nothing():
    """A run that measures ends with the bits of a run that does not; unmeasured rounds leave no report."""
    ours, theirs = parameters(0, dtype=torch.float32), parameters(0, dtype=torch.float32)
    measured, plain = OuterSGD(ours, 0.1, 0.9, restart=3), OuterSGD(theirs, 0.1, 0.9, restart=3)
    run(measured, range(7), measure=True)
    run(plain, range(7))
    assert all(same_bits(p, q) for p, q in zip(ours, theirs, strict=True))
    assert len(measured.last_round) == 1
    assert plain.last_round == []


def test_zero_gradient_has_no_gain():
    """With g = 0 the gain is NaN, the cosine 0, and nothing fails."""
    x = nn.Parameter(torch.ones(3))
    outer = OuterSGD([x], 0.1, 0.9)
    x.grad = torch.zeros(3)
    outer.step(measure=True)
    seen = outer.last_round[0]
    assert (seen.pseudo_gradient_norm, seen.buffer_norm, seen.cosine) == (0, 0, 0)
    assert math.isnan(seen.gain)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_angles_against_float64(dtype: torch.dtype):
    """Norms and cosine over tensors of many shapes, one larger than a piece, equal a float64 computation."""
    shapes = [*SHAPES, (0,), (PIECES,)]
    g, m = randoms(0, shapes, dtype), [x + y for x, y in zip(randoms(0, shapes), randoms(1, shapes), strict=True)]
    m = [x.to(torch.float64 if dtype == torch.float64 else torch.float32) for x in m]
    g[3], m[3] = randoms(2, [(5, 3)], dtype)[0].t(), m[3]
    seen = Angles.of(dots(g, m))
    a, b = flat(g), flat(m)
    tolerance = 1e-13 if dtype == torch.float64 else 2e-5  # each piece is a float32 dot product
    assert seen.pseudo_gradient_norm == pytest.approx(float(a.norm()), rel=tolerance)
    assert seen.buffer_norm == pytest.approx(float(b.norm()), rel=tolerance)
    assert seen.cosine == pytest.approx(float(a @ b / (a.norm() * b.norm())), rel=tolerance)
    assert seen.cosine == pytest.approx(0.7, abs=0.01)  # m = g + independent noise of the same size: 1/sqrt(2)


def test_opposed_coordinates_become_exact_zeros():
    """Whatever they hold; the others, and a NaN, which has no sign, stay."""
    m, g = torch.tensor([math.inf, -2.0, 3.0, math.nan]), torch.tensor([-1.0, math.inf, 1.0, 1.0])
    functional.restart_([m], [g], 0.0, 0.0, opposed=True)
    assert m[:3].tolist() == [0.0, 0.0, 3.0]
    assert math.isnan(m[3])


def test_angles_at_the_edges():
    """No buffers and zero buffers count as m = 0; parallel vectors have |cosine| at most 1; NaN shows."""
    g = randoms(0, SHAPES, torch.float32)
    norm = pytest.approx(float(flat(g).norm()), rel=1e-6)
    zeros = [torch.zeros_like(x) for x in g]
    for buffers in ([], zeros):
        seen = Angles.of(dots(g, buffers))
        assert (seen.pseudo_gradient_norm, seen.buffer_norm, seen.cosine) == (norm, 0, 0)
    assert Angles.of(dots(zeros, g)).cosine == 0
    for seed in range(20):
        x = randoms(seed, [(1000,)], torch.float32)
        for factor, sign in ((0.3, 1), (-7.1, -1)):
            cosine = Angles.of(dots(x, [factor * x[0]])).cosine
            assert cosine == pytest.approx(sign, abs=1e-6)
            assert abs(cosine) <= 1
    for size in (1e-150, 1e-90, 1e90, 1e150):  # whose squares' product is no double any more
        for sign in (1, -1):
            a, b = (
                torch.tensor([3.0, 4.0], dtype=torch.float64) * size,
                torch.tensor([sign * size], dtype=torch.float64),
            )
            assert Angles.of(dots([a], [b.repeat(2) * torch.tensor([3.0, 4.0])])).cosine == pytest.approx(sign)
    poisoned = Angles.of(dots([torch.tensor([1.0, math.nan])], [torch.ones(2)]))
    assert math.isnan(poisoned.pseudo_gradient_norm)
    assert math.isnan(poisoned.cosine)


# --- DTensor ------------------------------------------------------------------------------------------------------

MIXED = [((7, 3), "shard 0"), ((4, 6), "shard 1"), ((5,), "replicate"), ((), "plain"), ((6, 2), "plain")]


@dataclass(frozen=True, slots=True)
class Turned(RestartPolicy):
    """Hard restart before the mixing when the cosine between g and the buffer is below `limit`."""

    limit: float
    needs: ClassVar[frozenset[str]] = frozenset({"cosine"})

    def decide(self, state: State, signal: RoundSignal) -> tuple[State, Restart | None]:
        """Look at the angle."""
        assert signal.cosine is not None
        return state, Restart(before=True) if signal.cosine < self.limit and signal.rounds_since_restart > 1 else None


def distributed_run(wrap: Callable[[Tensor, str], Tensor], policy: str, rounds: int = 10) -> dict[str, Any]:
    """The same rounds on parameters that `wrap` makes of whole tensors; whole tensors and counters come back."""
    params = [nn.Parameter(wrap(x, how)) for x, (_, how) in zip(randoms(0, [s for s, _ in MIXED]), MIXED, strict=True)]
    outer = OuterSGD(params, 0.1, 0.9, nesterov=True, restart=policy)
    cosines = []
    for number in range(rounds):
        gradients = randoms(number + 1, [shape for shape, _ in MIXED])
        for p, g, (_, how) in zip(params, gradients, MIXED, strict=True):
            p.grad = wrap(g, how)
        outer.step(measure=True)
        cosines.append(outer.last_round[0].cosine)
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in params]  # type: ignore[operator]
    return {
        "x": [p.detach().clone() for p in whole],
        "cosines": cosines,
        "counters": [outer.param_groups[0][key] for key in COUNTERS],
    }


def sharded(mesh: Any) -> Callable[[Tensor, str], Tensor]:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    def wrap(tensor: Tensor, how: str) -> Tensor:
        if how == "plain":
            return tensor
        kind, *dim = how.split()
        return distribute_tensor(tensor, mesh, [Shard(int(dim[0])) if kind == "shard" else Replicate()])

    return wrap


def join(rank: int, size: int, store: Path) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    return init_device_mesh("cpu", (size,))


@pytest.fixture
def mesh_of_one(tmp_path: Path) -> Iterator[Any]:
    yield join(0, 1, tmp_path / "store")
    dist.destroy_process_group()


def assert_same_run(ours: dict[str, Any], whole: dict[str, Any]) -> None:
    for a, b in zip(ours["x"], whole["x"], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)
    assert ours["cosines"] == pytest.approx(whole["cosines"], rel=1e-9, abs=1e-12)
    assert ours["counters"] == whole["counters"]


@pytest.mark.parametrize("policy", ["never", "3", "soft:2:0.3:0.5", "test-turned:0.1"])
def test_dtensors_in_one_process(mesh_of_one: Any, register_policy: Callable[[str], Any], policy: str):
    """DTensor parameters, mixed with plain ones in a group, step like whole tensors, adaptive restarts included."""
    register_policy("test-turned")(Turned)
    assert_same_run(distributed_run(sharded(mesh_of_one), policy), distributed_run(lambda x, _: x, policy))


def test_dtensor_state_round_trip(mesh_of_one: Any):
    """The state of DTensor parameters loads into a new optimizer over them, dtype and shards kept."""
    wrap = sharded(mesh_of_one)
    params = [nn.Parameter(wrap(x, "shard 0")) for x in randoms(0, [(6, 2), (8,)], torch.bfloat16)]
    outer = OuterSGD(params, 0.1, 0.9, restart=3)
    for p, g in zip(params, randoms(1, [(6, 2), (8,)], torch.bfloat16), strict=True):
        p.grad = wrap(g, "shard 0")
    outer.step()
    other = OuterSGD(params, 0.1, 0.9, restart=3)
    other.load_state_dict(copy.deepcopy(outer.state_dict()))
    for p in params:
        ours, theirs = (optimizer.state[p]["momentum_buffer"] for optimizer in (other, outer))
        assert ours.dtype == torch.float32
        assert ours.placements == theirs.placements
        assert same_bits(ours.full_tensor(), theirs.full_tensor())


@pytest.mark.dist
@pytest.mark.slow
def test_dtensors_in_two_processes(tmp_path: Path, register_policy: Callable[[str], Any]):
    """Two processes with half of each shard step like the whole tensor and decide alike, adaptive restarts included."""
    register_policy("test-turned")(Turned)
    found = in_processes(__file__, tmp_path, 2)
    for policy in ("3", "test-turned:0.1"):
        whole = distributed_run(lambda x, _: x, policy)
        assert 2 <= whole["counters"][2] < 9
        for answers in found:
            assert_same_run(answers[policy], whole)


def worker(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    restart_module.register("test-turned")(Turned)
    wrap = sharded(join(rank, 2, folder / "store"))
    found = {policy: distributed_run(wrap, policy) for policy in ("3", "test-turned:0.1")}
    torch.save(found, folder / f"{rank}.pt")
    dist.destroy_process_group()


# --- inside torchft's DiLoCo --------------------------------------------------------------------------------------


def torchft_manager() -> MagicMock:
    """A torchft Manager of one replica: the all-reduce leaves its tensor alone and every round commits."""
    manager_module = pytest.importorskip("torchft.manager")
    from torchft.work import _DummyWork

    manager = create_autospec(manager_module.Manager)
    manager._use_async_quorum = False
    manager.errored.return_value = None
    manager.current_step.return_value = 0
    manager.should_commit.return_value = True
    manager.allreduce.side_effect = lambda tensor, should_quantize=False: _DummyWork(tensor)  # noqa: ARG005
    return manager


def small_model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def inner_steps(model: nn.Module, inner: torch.optim.Optimizer, steps: range) -> Iterator[int]:
    """Inner training on data that is a function of the step."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randn(16, 4, generator=generator), torch.randn(16, 3, generator=generator)
        inner.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        inner.step()
        yield step


@pytest.mark.parametrize("policy", ["never", "3", "cycle:2,3", "soft:3:0.2:0.1", "norm-ratio:1.5:1"])
def test_inside_torchft(policy: str, norm_ratio: type[RestartPolicy]):
    """Unchanged inside torchft's DiLoCo, it gives our engine's weights, bit for bit, over 10 rounds with restarts."""
    assert norm_ratio.name == "norm-ratio"
    local_sgd = pytest.importorskip("torchft.local_sgd")
    rule, count = OuterRule(0.7, 0.9, nesterov=True), 4

    theirs = small_model(0)
    inner = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
    outer = OuterSGD.from_rule(theirs.parameters(), rule, policy)
    manager = torchft_manager()
    with local_sgd.DiLoCo(manager, [theirs], inner, outer, sync_every=count):
        for _ in inner_steps(theirs, inner, range(10 * count)):
            pass
    assert manager.should_commit.call_count == 10

    ours = small_model(0)
    inner = torch.optim.AdamW(ours.parameters(), lr=1e-2)
    engine = DiLoCo(ours, rule, restart=policy, inner_steps=count)
    for _ in inner_steps(ours, inner, range(10 * count)):
        engine.step()
    assert engine.round == 10
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert same_bits(p, q)
    assert isinstance(engine.outer, OuterSGD)
    for key in COUNTERS:
        assert outer.param_groups[0][key] == engine.outer.param_groups[0][key]
    assert outer.param_groups[0]["restarts"] > 0 or policy == "never"


@pytest.mark.parametrize("policy", ["3", "norm-ratio:1.5:1"])
def test_heals_inside_torchft(policy: str, norm_ratio: type[RestartPolicy]):
    """A joiner that loads what torchft moves has equal counters and weights ever after, through the next restarts."""
    assert norm_ratio.name == "norm-ratio"
    local_sgd = pytest.importorskip("torchft.local_sgd")
    replicas = []
    for seed in (0, 1):
        model = small_model(seed)
        inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
        outer = OuterSGD(model.parameters(), 0.7, 0.9, nesterov=True, restart=policy)
        manager = torchft_manager()
        diloco = local_sgd.DiLoCo(manager, [model], inner, outer, sync_every=2)
        (key, load, save), _ = manager.register_state_dict_fn.call_args
        assert "0" in key
        replicas.append((diloco, model, inner, outer, load, save))
    donor, joiner = replicas
    with donor[0], joiner[0]:
        for _ in inner_steps(donor[1], donor[2], range(10)):
            pass
        for _ in inner_steps(joiner[1], joiner[2], range(100, 102)):  # one round alone, on other data
            pass
        moved = through_file({"outer": donor[5](), "model": donor[1].state_dict(), "inner": donor[2].state_dict()})
        joiner[1].load_state_dict(moved["model"])
        joiner[2].load_state_dict(moved["inner"])
        joiner[4](moved["outer"])
        for start in range(10, 24, 2):
            for _, model, inner, *_ in replicas:
                for _ in inner_steps(model, inner, range(start, start + 2)):
                    pass
            for p, q in zip(donor[1].parameters(), joiner[1].parameters(), strict=True):
                assert same_bits(p, q)
            for key in COUNTERS:
                assert donor[3].param_groups[0][key] == joiner[3].param_groups[0][key]
    assert donor[3].param_groups[0]["rounds"] == 12
    assert donor[3].param_groups[0]["restarts"] >= 3


if __name__ == "__main__":
    worker(int(sys.argv[1]), Path(sys.argv[2]))


def test_candidates_are_tried_from_the_same_place():
    """Each candidate is probed where it would lead to from the round's start, and the best is taken from there."""
    params, seen = parameters(0), []
    words = "probe:keep,drop,half,average,fresh,1.3"
    outer = OuterSGD(params, 0.3, 0.9, nesterov=True, restart=words, signals=["probes"])
    for number in range(2):
        give(params, randoms(number))
        outer.step(probes=[0, 1, 1, 1, 1, 1])  # keeps
    give(params, randoms(7))
    before = [p.detach().clone() for p in params]
    buffers = [outer.state[p]["momentum_buffer"].clone() for p in params]

    def probe() -> float:
        seen.append([p.detach().clone() for p in params])
        return float(len(seen))

    outer.step(probe=probe)  # of which the first is the best
    assert len(seen) == 6
    for p, x in zip(params, seen[0], strict=True):  # it has come out as it was, and taken the candidate's step
        torch.testing.assert_close(p.detach(), x, rtol=0, atol=1e-12)
    for place, (retain, along_g, along_m) in zip(
        seen,
        [(1, 0.3, 0.27), (0, 0.3, 0.27), (0.5, 0.3, 0.27), (1, 1, 0), (0, 1, 0), (1, 1.3, 0)],
        strict=True,
    ):
        for x, old, g, m in zip(place, before, randoms(7), buffers, strict=True):
            torch.testing.assert_close(x, old - along_g * g - along_m * (0.9 * retain * m + g), rtol=0, atol=1e-12)


def test_a_probe_that_fails_changes_nothing():
    """An exception in the probe leaves the parameters and counters as they were."""
    params = parameters(0)
    outer = OuterSGD(params, 0.3, 0.9, restart="probe:keep,average", signals=["probes"])
    give(params, randoms(1))

    def probe() -> float:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        outer.step(probe=probe)
    assert all(same_bits(p.detach(), x) for p, x in zip(params, randoms(0), strict=True))
    assert outer.param_groups[0]["rounds"] == 0


def scalar(value: float) -> nn.Parameter:
    return nn.Parameter(torch.tensor([value]))


def test_signals_are_kept_as_plain_numbers():
    """A tensor that the caller goes on using does not change a policy's memory, and NumPy's numbers can be loaded."""
    x, end = scalar(1.0), torch.tensor(1.0)
    outer = OuterSGD([x], lr=0.5, momentum=0.9, restart="loss", signals=["loss_start", "loss_end"])
    x.grad = torch.ones(1)
    given: dict[str, Any] = {"loss_start": torch.tensor(3.0), "loss_end": end}
    outer.step(signals=given)
    end += 9
    outer.step(signals={"loss_start": np.float64(2.0), "loss_end": np.float64(1.5)})
    assert outer.param_groups[0]["restarts"] == 1  # 2 after an end at 1: the outer step made it worse
    saved = through_file(outer.state_dict())["param_groups"][0]["policy_state"]
    assert json.loads(saved) == {"end": 1.5}


def test_a_memory_that_no_checkpoint_can_hold_is_told():
    """Numbers of NumPy's keep their kind; anything else is refused with the policy's name."""
    outer = OuterSGD([scalar(1.0)], lr=0.5, momentum=0.9, restart="auto")
    outer.param_groups[0]["policy_state"] = {"count": np.int64(3), "norm": np.float32(0.5), "end": torch.tensor(2.0)}
    text = outer.state_dict()["param_groups"][0]["policy_state"]
    assert text == '{"count": 3, "norm": 0.5, "end": 2.0}'
    outer.param_groups[0]["policy_state"] = {"all": np.ones(3)}
    with pytest.raises(
        TypeError, match=r"OuterSGD: restart policy auto remembers .*; a policy's memory must be numbers"
    ):
        outer.state_dict()


def test_states_hold_plain_numbers():
    """NumPy's numbers, of the caller or of a scheduler, and a policy that has not begun yet, come through the disk."""
    x = scalar(1.0)
    given: dict[str, Any] = {"lr": np.logspace(-1, 0, 3)[1], "momentum": np.float32(0.5), "nesterov": np.bool_(True)}
    outer = OuterSGD([x], **given)
    torch.optim.lr_scheduler.LambdaLR(outer, lambda t: np.cos(t / 10))
    outer.param_groups[0]["restart"] = Periodic(5)
    saved = through_file(outer.state_dict())["param_groups"][0]
    assert (type(saved["lr"]), type(saved["initial_lr"]), type(saved["momentum"])) == (float, float, float)
    assert (saved["nesterov"], saved["restart"]) == (True, "5")
    assert json.loads(saved["policy_state"]) == Periodic(5).initial_state()
    assert outer.param_groups[0]["restart"] == Periodic(5)  # asking for the state has begun nothing


def test_auto_keeps_its_buffer():
    """A momentum of 0 that comes later, with a state or by the caller, is refused as it is at construction."""
    x = scalar(1.0)
    outer = OuterSGD([x], lr=0.5, momentum=0.9, restart="auto")
    with pytest.raises(ValueError, match="restart policy auto needs a buffer, and at momentum 0 there is none"):
        outer.load_state_dict(torch.optim.SGD([scalar(1.0)], lr=0.7).state_dict())
    assert outer.param_groups[0]["momentum"] == 0.9
    outer.param_groups[0]["momentum"] = 0.0
    x.grad = torch.ones(1)
    with pytest.raises(ValueError, match="restart policy auto needs a buffer, and at momentum 0 there is none"):
        outer.step()
    assert (x.item(), outer.param_groups[0]["rounds"]) == (1.0, 0)


@pytest.mark.parametrize(("restart", "left"), [("2", 0.0), ("soft:2:0.25:0.5", 0.25)])
def test_parameters_without_a_gradient_restart_with_their_group(restart: str, left: float):
    """What rests in the round of a restart begins the new cycle like the others, with a pseudo-gradient of 0."""
    a, b, c = scalar(0.0), scalar(0.0), scalar(0.0)
    outer = OuterSGD([a, b, c], lr=0.1, momentum=0.9, restart=restart)
    a.grad, b.grad = torch.ones(1), torch.ones(1)
    outer.step()
    b.grad = None
    outer.step()
    assert outer.param_groups[0]["restarts"] == 1
    assert (outer.state[b]["momentum_buffer"].item(), b.item()) == (left, pytest.approx(-0.1))
    assert "momentum_buffer" not in outer.state.get(c, {})
    assert len(outer.state_dict()["state"]) == 2


def test_norms_of_complex_parameters():
    """|z| counts, as in torch's norm: both parts of a coordinate."""
    x = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    outer = OuterSGD([x, y := scalar(0.0)], lr=0.1, momentum=0.9, restart="norm:1.5")
    x.grad, y.grad = torch.tensor([3 + 2.9j, 1j]), torch.tensor([2.0])
    outer.step(measure=True)
    norm = math.sqrt(float(torch.linalg.vector_norm(x.grad)) ** 2 + 4)
    assert outer.last_round[0].pseudo_gradient_norm == pytest.approx(norm)
    outer.step(measure=True)
    assert outer.last_round[0].cosine == pytest.approx(1)


@pytest.mark.parametrize("bad", [{"restart": "foo"}, {"lr": -1.0}, {"restart": "loss"}])
def test_refused_group_leaves_nothing(bad: dict[str, Any]):
    """A param group that is refused is not there, and may be added once it is mended."""
    outer, more = OuterSGD([scalar(0.0)], lr=0.5, momentum=0.9), scalar(0.0)
    with pytest.raises(ValueError, match=r"OuterSGD|restart"):
        outer.add_param_group({"params": [more]} | bad)
    assert len(outer.param_groups) == 1
    outer.add_param_group({"params": [more]})
    assert len(outer.param_groups) == 2


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_distributed_checkpoints_take_no_round(momentum: float):
    """To learn what a state holds, torch's `get_optimizer_state_dict` takes a step of its own, which is no round."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    def build() -> tuple[nn.Linear, OuterSGD]:
        model = nn.Linear(3, 2)
        names = ["loss_start", "loss_end"]
        return model, OuterSGD(model.parameters(), lr=0.1, momentum=momentum, restart="loss", signals=names)

    model, outer = build()
    shown: dict[str, Any] = dict(get_optimizer_state_dict(model, outer))
    assert shown["param_groups"][0]["rounds"] == 0
    assert outer.param_groups[0]["rounds"] == 0
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    outer.step(signals={"loss_start": 2.0, "loss_end": 1.5})
    saved = get_optimizer_state_dict(model, outer)
    other, twin = build()
    set_optimizer_state_dict(other, twin, saved)
    group = twin.param_groups[0]
    assert (group["rounds"], group["lr"], group["policy_state"]) == (1, 0.1, {"end": 1.5})
    buffers = [[o.state[p].get("momentum_buffer") for p in m.parameters()] for m, o in ((model, outer), (other, twin))]
    assert all(a is b is None or same_bits(a, b) for a, b in zip(*buffers, strict=True))


def test_a_round_at_learning_rate_zero_is_a_round():
    """Only a step without state and without any pseudo-gradient is taken for one of torch's own."""
    x = scalar(1.0)
    outer = OuterSGD([x], lr=0.0, momentum=0.9)
    x.grad = torch.ones(1)
    outer.step()
    x.grad = torch.zeros(1)
    outer.step()
    assert (outer.param_groups[0]["rounds"], x.item()) == (2, 1.0)


@pytest.mark.parametrize("state", [{}, {"state": {}}, torch.optim.Adam([torch.zeros(1)]).state_dict()])
def test_states_of_other_optimizers_are_refused(state: dict[str, Any]):
    """What is no state of an SGD is refused with the remedy."""
    outer = OuterSGD([scalar(0.0)], lr=0.5)
    with pytest.raises(ValueError, match=r"no state of an OuterSGD or a torch.optim.SGD.*state_dict\(\) of one"):
        outer.load_state_dict(state)


@each_rule
def test_parameters_on_several_devices(rule: OuterRule):
    """One group over several devices steps as torch.optim.SGD does; meta stands in for the second one."""
    here, there = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3, device="meta"))
    alone = nn.Parameter(torch.ones(3))
    outers = [OuterSGD.from_rule([here, there], rule), OuterSGD.from_rule([alone], rule)]
    for _ in range(3):
        for p in (here, there, alone):
            p.grad = torch.full_like(p, 0.5)
        for outer in outers:
            outer.step()
    assert same_bits(here, alone)
