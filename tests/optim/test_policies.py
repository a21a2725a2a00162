"""`OuterSGD` under the policies that measure, step and probe: its slow twin, 16 bits, exact reductions, divergence."""

from __future__ import annotations

import copy
import io
import itertools
import math
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from policies import ALL, PROBING, SUPPLIED
from twophase.optim.functional import outer_step_
from twophase.optim.outer import BUFFER, OuterSGD
from twophase.optim.reference import ReferenceOuter
from twophase.restart import Step, convert, parse
from twophase.rule import OuterRule

RULES = [
    OuterRule(lr, 0.9, nesterov, form)  # type: ignore[arg-type]
    for nesterov, (form, lr) in itertools.product([False, True], [("sum", 0.1), ("ema", 1.0)])
]
SHAPES = [(), (7,), (3, 5), (33, 17)]
PROMISED = ("loss_start", "loss_end", "inner_lr", "progress", "probes")
ROUNDS = 18

each_rule = pytest.mark.parametrize("rule", RULES, ids=OuterRule.describe)
each_policy = pytest.mark.parametrize("text", ALL)


def parameters(dtype: torch.dtype = torch.float64) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(s, generator=generator, dtype=torch.float64).to(dtype)) for s in SHAPES]


def gradients(params: list[Any], number: int) -> list[Tensor]:
    """A third of the parameters, which draws them to 0, and noise."""
    generator = torch.Generator().manual_seed(100 + number)
    noise = [torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype) for p in params]
    return [p.detach() / 3 + draw / 4 for p, draw in zip(params, noise, strict=True)]


def half_square(params: list[Any]) -> float:
    return 0.5 * sum(float((p.detach().double() ** 2).sum()) for p in params)


def signals(params: list[Any], given: list[Tensor], number: int) -> dict[str, float]:
    ends = half_square([p.detach() - g for p, g in zip(params, given, strict=True)])
    inner_lr = 0.1 * (1 + math.cos(number)) + 0.01
    return {
        "loss_start": half_square(params),
        "loss_end": ends,
        "inner_lr": inner_lr,
        "progress": (number + 1) / ROUNDS,
    }


def take(outer: OuterSGD, params: list[Any], number: int, **options: Any) -> list[Tensor]:
    """One round; its pseudo-gradients."""
    given = gradients(params, number)
    for p, g in zip(params, given, strict=True):
        p.grad = g
    outer.step(signals=signals(params, given, number), probe=lambda: half_square(params), **options)
    return given


def outer_of(params: list[Any], rule: OuterRule, text: str) -> OuterSGD:
    policy = convert(RULES[0], parse(text), rule.form)[1]
    return OuterSGD.from_rule(params, rule, policy, signals=PROMISED)


# --- the slow twin ------------------------------------------------------------------------------------------------


@each_rule
@each_policy
def test_slow_twin(rule: OuterRule, text: str):
    """Parameters, buffers, cycles and memories are those of the twin that writes the equations out."""
    params = parameters()
    outer = outer_of(params, rule, text)
    twin = ReferenceOuter(params, rule, parse(outer.param_groups[0]["restart"]))
    twin.loss = half_square if text in PROBING else None  # type: ignore[assignment]
    (group,) = outer.param_groups
    for number in range(ROUNDS):
        given = gradients(params, number)
        twin.extra = signals(params, given, number)
        twin.round(given)
        take(outer, params, number)
        for p, x, m in zip(params, twin.x, twin.m, strict=True):
            torch.testing.assert_close(p.detach(), x, rtol=0, atol=1e-11)
            torch.testing.assert_close(outer.state[p][BUFFER], m, rtol=0, atol=1e-11)
        assert (group["rounds"], group["rounds_since_restart"]) == (twin.t, twin.age)
        assert group["policy_state"] == pytest.approx(twin.policy_state, rel=1e-9)
    plain = parameters()
    other = OuterSGD.from_rule(plain, rule)
    for number in range(ROUNDS):
        take(other, plain, number)
    assert not all(torch.allclose(p, q, atol=1e-6) for p, q in zip(params, plain, strict=True))


@each_policy
@pytest.mark.parametrize("stop", [1, 4, 11])
def test_resumed_is_uninterrupted(text: str, stop: int):
    """Saved through a file after any round and taken up, a run ends with the bits and counters of one that was not."""
    rule, whole = RULES[3], parameters(torch.float32)
    straight = outer_of(whole, rule, text)
    first = parameters(torch.float32)
    outer = outer_of(first, rule, text)
    for number in range(ROUNDS):
        take(straight, whole, number)
        if number == stop:
            file = io.BytesIO()
            torch.save([outer.state_dict(), [p.detach() for p in first]], file)
            file.seek(0)
            state, values = torch.load(file, weights_only=True)
            first = [nn.Parameter(value) for value in values]
            outer = outer_of(first, OuterRule(0.5, 0.5), "never")
            outer.load_state_dict(state)
        take(outer, first, number)
    assert all(torch.equal(p, q) for p, q in zip(first, whole, strict=True))
    ours, theirs = ({k: v for k, v in one.param_groups[0].items() if k != "params"} for one in (outer, straight))
    assert ours == theirs


@each_policy
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_distributed_checkpoints_carry_the_memory(text: str, tmp_path: Path):
    """`torch.distributed.checkpoint`, which restores the leaves that a fresh state has, brings back all of it."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import (
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    def build(seed: int) -> tuple[nn.Module, OuterSGD]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        return model, outer_of(list(model.parameters()), RULES[0], text)

    (model, outer), (other, twin) = build(0), build(1)
    for number in range(5):
        take(outer, list(model.parameters()), number)
    dcp.save({"outer": get_optimizer_state_dict(model, outer)}, checkpoint_id=tmp_path, no_dist=True)
    found = {"outer": get_optimizer_state_dict(other, twin)}
    dcp.load(found, checkpoint_id=tmp_path, no_dist=True)
    set_optimizer_state_dict(other, twin, found["outer"])
    ours, theirs = ({k: v for k, v in one.param_groups[0].items() if k != "params"} for one in (outer, twin))
    assert ours == theirs
    buffers = ([one.state[p][BUFFER] for p in one.param_groups[0]["params"]] for one in (outer, twin))
    assert all(map(torch.equal, *buffers))


# --- 16 bits ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [(1.0, 0.0), (0.0, 0.3), (0.7, 0.21)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_step_rounds_16_bit_parameters_once(dtype: torch.dtype, step: tuple[float, float]):
    """`x - a g - b m` of 16-bit parameters is the exact one rounded to their type: half a unit in the last place."""
    params, given, held = (
        [p.detach() for p in parameters(dtype)],
        gradients(parameters(dtype), 0),
        gradients(parameters(torch.float32), 1),
    )
    expected = [
        x.double() - step[0] * g.double() - step[1] * m.double() for x, g, m in zip(params, given, held, strict=True)
    ]
    outer_step_(params, given, held, lr=9.0, momentum=0.9, nesterov=True, form="sum", step=Step(*step))
    for x, exact in zip(params, expected, strict=True):
        unit = torch.finfo(dtype).eps * 2 ** torch.floor(torch.log2(exact.abs()))
        assert bool(((x.double() - exact).abs() <= 0.501 * unit).all())
        assert x.dim() == 0 or not bool((x.double() == exact).all())  # there was something to round


# --- reductions, bit for bit --------------------------------------------------------------------------------------


@each_rule
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_closed_gate_is_plain_averaging(rule: OuterRule, dtype: torch.dtype):
    """`lookahead:1:0` has the bits of momentum 0 and lr 1, and so of torch.optim.SGD."""
    ours, theirs = parameters(dtype), parameters(dtype)
    outer, plain = outer_of(ours, rule, "lookahead:1:0"), torch.optim.SGD(theirs, lr=1.0)
    for number in range(6):
        take(outer, ours, number)
        for p, g in zip(theirs, gradients(theirs, number), strict=True):
            p.grad = g
        plain.step()
    assert all(torch.equal(p, q) for p, q in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("along_g", [1.0, 0.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_step_that_keeps_nothing_of_the_buffer(dtype: torch.dtype, along_g: float):
    """`x <- x - a g, m <- g`, as of `auto` where |g| has not shrunk: SGD's bits, and nothing of the old m is read."""
    ours, plain = [p.detach() for p in parameters(dtype)], parameters(dtype)
    given = gradients(plain, 0)
    held = [torch.full_like(g, math.nan, dtype=torch.promote_types(dtype, torch.float32)) for g in given]
    step = Step(along_g, 0.0, mix=(0.0, 1.0))
    outer_step_(ours, given, held, lr=9.0, momentum=0.9, nesterov=True, form="ema", step=step)
    for p, g in zip(plain, given, strict=True):
        p.grad = g
    torch.optim.SGD(plain, lr=along_g).step()
    assert all(map(torch.equal, ours, plain))
    assert all(torch.equal(m, g.to(m.dtype)) for m, g in zip(held, given, strict=True))


@each_rule
@pytest.mark.parametrize(
    ("text", "plain"),
    [
        *(("cosine:0", "gradient"), ("cap:1e30", "never"), ("bound:1e30", "never"), ("norm:1e30", "never")),
        *(("lookahead:0:0", "never"), ("probe:keep,1e-30", "never"), ("probe:1e-30,drop", "1")),
    ],
)
def test_reductions_are_exact(rule: OuterRule, text: str, plain: str):
    """Rules at their edge have the bits of the simpler rule that they then are."""
    ends = []
    for one in (text, plain):
        params = parameters(torch.float32)
        outer = OuterSGD.from_rule(params, rule, one, signals=PROMISED)
        for number in range(8):
            take(outer, params, number)
        ends.append([p.detach() for p in params])
    if plain == "1":  # drop before the mixing is a restart after the round before, where only whether it helps differs
        assert all(torch.allclose(p, q, atol=1e-5) for p, q in zip(*ends, strict=True))
    else:
        assert all(torch.equal(p, q) for p, q in zip(*ends, strict=True))


# --- what is missing, or not finite -------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [*SUPPLIED, *PROBING])
def test_what_is_not_promised_is_refused(text: str):
    """A policy whose signals or probes nobody has promised is refused when it is built, with what to write."""
    needs = sorted(parse(text).needs)
    remedy = r"step\(probe=\.\.\.\)" if text in PROBING else r"step\(signals=\.\.\.\)"
    with pytest.raises(ValueError, match=rf"needs {', '.join(needs)}; .*{remedy}.*signals={re.escape(repr(needs))}"):
        OuterSGD(parameters(), 0.1, 0.9, restart=text)
    outer = OuterSGD(parameters(), 0.1, 0.9, restart=text, signals=needs)
    for params in (group["params"] for group in outer.param_groups):
        for p in params:
            p.grad = torch.ones_like(p)
    with pytest.raises(ValueError, match=remedy):
        outer.step()
    assert outer.param_groups[0]["rounds"] == 0
    assert all(torch.equal(p, q) for p, q in zip(outer.param_groups[0]["params"], parameters(), strict=True))


@pytest.mark.parametrize("text", [text for text in ALL if parse(text).needs])
def test_a_broken_signal_is_a_divergence(text: str):
    """What is not finite warns in a bare optimizer, is named where it is measured, and is never a silent decision.

    The rule's own update is taken, the memory stays, and the next round is as usual.
    """
    rule, (name, *_) = OuterRule(0.1, 0.9), sorted(parse(text).needs)
    ends = []
    for measure in (False, True):
        params = parameters()
        outer = outer_of(params, rule, text)
        (group,) = outer.param_groups
        for number in range(3):
            take(outer, params, number)
        memory, count = copy.deepcopy(group["policy_state"]), group["restarts"]
        given = gradients(params, 3)
        measured = name in ("cosine", "buffer_norm", "pseudo_gradient_norm")
        if name == "buffer_norm":
            outer.state[params[1]][BUFFER][0] = math.nan
        elif measured:
            given[1][0] = math.nan
        for p, g in zip(params, given, strict=True):
            p.grad = g
        broken = signals(params, given, 3) | ({name: math.nan} if name in ("loss_end", "inner_lr", "progress") else {})
        told = pytest.warns(RuntimeWarning, match=rf"round 4 .*{name}.*not finite.*has diverged")
        with told if not measure else nullcontext():
            outer.step(signals=broken, probe=lambda: math.nan, measure=measure)
        assert (group["policy_state"], group["restarts"], group["rounds"]) == (memory, count, 4)
        if measure:
            (seen,) = outer.last_round
            assert name in seen.not_finite
            assert not seen.restarted
        ends.append([p.detach() for p in params])
        if not measured:
            take(outer, params, 4)  # without a warning, which would be an error
    assert all(torch.equal(p.nan_to_num(9), q.nan_to_num(9)) for p, q in zip(*ends, strict=True))


def test_groups_with_different_probes_are_refused():
    """Groups are probed together, so two different probing policies are refused, and equal ones decide alike."""
    first, *others = parameters()
    groups = [{"params": [first], "restart": "probe:keep,average"}, {"params": others, "restart": "probe:keep,drop"}]
    with pytest.raises(ValueError, match="different probing policies"):
        OuterSGD(groups, 0.1, 0.9, signals=["probes"])
    groups[1]["restart"] = "probe:keep,average"
    outer = OuterSGD(groups, 2.0, 0.9, signals=["probes"])
    for number in range(4):
        take(outer, [first, *others], number, measure=True)
        assert len({round(group.gain, 9) == 1 for group in outer.last_round}) == 1


def test_groups_decide_together() -> None:
    """With `together` two groups restart where one group of both would; without it each goes by its own angles."""
    start, generator = torch.ones(6, dtype=torch.float64), torch.Generator().manual_seed(0)
    given = [torch.randn(6, dtype=torch.float64, generator=generator) for _ in range(30)]
    paths = {}
    for kind in ("one", "together", "apart"):
        params = [nn.Parameter(start.clone())] if kind == "one" else [nn.Parameter(x) for x in start.clone().split(3)]
        groups = [{"params": [p]} for p in params]
        outer = OuterSGD(groups, lr=0.1, momentum=0.9, restart="gradient", together=kind == "together")
        for g in given:
            for p, part in zip(params, g.split([p.numel() for p in params]), strict=True):
                p.grad = part.clone()
            outer.step()
        paths[kind] = torch.cat([p.detach() for p in params]), [group["restarts"] for group in outer.param_groups]
    torch.testing.assert_close(paths["together"][0], paths["one"][0], rtol=0, atol=1e-12)
    assert paths["together"][1] == paths["one"][1] * 2
    assert paths["apart"][1] != paths["together"][1]
