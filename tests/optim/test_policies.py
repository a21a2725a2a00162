"""`OuterSGD` under every policy: its slow twin, resumed runs, exact reductions, divergence."""

from __future__ import annotations

import copy
import math
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from outers import buffers, counters, flat, give, noises, parameters, randoms
from policies import ALL, RULES, SCHEDULED, SUPPLIED, each_rule
from reference_outer import ReferenceOuter
from replicas import same_bits, through_file
from twophase.optim.outer import BUFFER, OuterSGD
from twophase.restart import MEASURED, convert, parse
from twophase.rule import OuterRule

SHAPES = [(), (7,), (3, 5), (33, 17)]
PROMISED = ("loss", "inner_lr", "progress")
ROUNDS = 18

each_policy = pytest.mark.parametrize("text", ALL)


def gradients(params: list[Any], number: int) -> list[Tensor]:
    """A third of the parameters, which draws them to 0, and noise."""
    noise = noises(100 + number, tuple(p.shape for p in params), params[0].dtype)
    return [p.detach() / 3 + draw / 4 for p, draw in zip(params, noise, strict=True)]


def half_square(params: list[Any]) -> float:
    return 0.5 * sum(float((p.detach().double() ** 2).sum()) for p in params)


def signals(params: list[Any], pulls: list[Tensor], number: int) -> dict[str, float]:
    ends = half_square([p.detach() - g for p, g in zip(params, pulls, strict=True)]) * (1 + 0.5 * (number % 3 == 1))
    inner_lr, progress = 0.1 * (1 + math.cos(number)) + 0.01, (number + 1) / ROUNDS
    return {"loss": ends, "inner_lr": inner_lr, "progress": progress}


def take(outer: OuterSGD, params: list[Any], number: int, **options: Any) -> list[Tensor]:
    """One round; its pseudo-gradients."""
    pulls = gradients(params, number)
    give(params, pulls)
    outer.step(signals=signals(params, pulls, number), **options)
    return pulls


def outer_of(params: list[Any], rule: OuterRule, text: str) -> OuterSGD:
    policy = convert(RULES[0], parse(text), rule.form)[1]
    return OuterSGD.from_rule(params, rule, policy, signals=PROMISED)


@pytest.mark.parametrize(
    ("rule", "text"), [(RULES[(n + more) % 4], text) for n, text in enumerate([*SCHEDULED, *ALL]) for more in (0, 3)]
)
def test_slow_twin(rule: OuterRule, text: str):
    """Parameters, buffers, cycles and memories are those of the twin that writes the equations out."""
    params, plain = parameters(0, SHAPES), parameters(0, SHAPES)
    outer, other = outer_of(params, rule, text), OuterSGD.from_rule(plain, rule)
    (group,) = outer.param_groups
    twin = ReferenceOuter(flat(params), rule, parse(group["restart"]))
    for number in range(ROUNDS):
        pulls = gradients(params, number)
        twin.round(flat(pulls), signals(params, pulls, number))
        take(outer, params, number)
        take(other, plain, number)
        torch.testing.assert_close(flat(params), twin.x, rtol=0, atol=1e-11)
        torch.testing.assert_close(flat(buffers(outer)), twin.m, rtol=0, atol=1e-11)
        assert (group["rounds"], group["rounds_since_restart"]) == (twin.t, twin.age)
        assert group["policy_state"] == pytest.approx(twin.policy_state, rel=1e-9)
    assert not torch.allclose(flat(params), flat(plain), atol=1e-6)


@pytest.mark.parametrize(("text", "stop"), [(text, (1, 11)[n % 2]) for n, text in enumerate(ALL)])
def test_resumed_is_uninterrupted(text: str, stop: int):
    """Saved through a file after any round and taken up, a run ends with the bits and counters of one that was not."""
    rule, whole, first = RULES[3], parameters(0, SHAPES, torch.float32), parameters(0, SHAPES, torch.float32)
    straight, outer = outer_of(whole, rule, text), outer_of(first, rule, text)
    for number in range(ROUNDS):
        take(straight, whole, number)
        if number == stop:
            state, values = through_file([outer.state_dict(), [p.detach() for p in first]])
            first = [nn.Parameter(value) for value in values]
            outer = outer_of(first, OuterRule(0.5, 0.5), "never")
            outer.load_state_dict(state)
        take(outer, first, number)
    assert all(map(torch.equal, first, whole))
    assert counters(outer) == counters(straight)
    assert outer.param_groups[0]["restart"] == straight.param_groups[0]["restart"]


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        *((RULES[0], text) for text in ("cycle:2,3", "test-longer:3", "auto", "test-rising:0.5")),
        (OuterRule(0.1, 0.0), "test-rising:0.5"),
    ],
)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")  # torch 2.9's own
def test_distributed_checkpoints_carry_the_memory(rule: OuterRule, text: str, tmp_path: Path):
    """`torch.distributed.checkpoint` brings back all of it; the step that it takes to see what there is is no round."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    def build(seed: int) -> tuple[nn.Module, OuterSGD]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        return model, outer_of(list(model.parameters()), rule, text)

    (model, outer), (other, twin) = build(0), build(1)
    for number in range(5):
        take(outer, list(model.parameters()), number)
    dcp.save({"outer": get_optimizer_state_dict(model, outer)}, checkpoint_id=tmp_path, no_dist=True)
    state: dict[str, Any] = {"outer": get_optimizer_state_dict(other, twin)}
    assert state["outer"]["param_groups"][0]["rounds"] == twin.param_groups[0]["rounds"] == 0
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    set_optimizer_state_dict(other, twin, state["outer"])
    assert counters(outer) == counters(twin)
    assert twin.param_groups[0]["rounds"] == 5
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert outer.state[p].keys() == twin.state[q].keys() == ({BUFFER} if rule.momentum else set())
        assert not rule.momentum or same_bits(outer.state[p][BUFFER], twin.state[q][BUFFER])


@each_rule
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_steps_along_g_are_plain_averaging(rule: OuterRule, dtype: torch.dtype):
    """`gain:0` has the bits of momentum 0 and lr 1, and so of torch.optim.SGD."""
    outer_params, plain_params = parameters(0, SHAPES, dtype), parameters(0, SHAPES, dtype)
    outer, plain = outer_of(outer_params, rule, "gain:0"), torch.optim.SGD(plain_params, lr=1.0)
    for number in range(6):
        take(outer, outer_params, number)
        give(plain_params, gradients(plain_params, number))
        plain.step()
    assert all(torch.equal(p, q) for p, q in zip(outer_params, plain_params, strict=True))


# --- reductions, bit for bit ------------------------------------------------------------------------------------------


@each_rule
def test_a_policy_that_never_fires_changes_no_bit(rule: OuterRule):
    """Rules at their edge have the bits of the simpler rule that they then are."""
    ends = []
    for policy in ("norm:1e30", "never"):
        params = parameters(0, SHAPES, torch.float32)
        outer = OuterSGD.from_rule(params, rule, policy, signals=PROMISED)
        for number in range(8):
            take(outer, params, number)
        ends.append([p.detach() for p in params])
    assert all(torch.equal(p, q) for p, q in zip(*ends, strict=True))


# --- what is missing, or not finite -----------------------------------------------------------------------------------


@pytest.mark.parametrize("text", SUPPLIED)
def test_what_is_not_promised_is_refused(text: str):
    """A policy whose signals are not promised is refused when it is built, with what to write."""
    needs = sorted(parse(text).needs - MEASURED)
    remedy = r"step\(signals=\.\.\.\)"
    with pytest.raises(ValueError, match=rf"needs {', '.join(needs)}; .*{remedy}.*signals={re.escape(repr(needs))}"):
        OuterSGD(parameters(0, SHAPES), 0.1, 0.9, restart=text)
    outer = OuterSGD(parameters(0, SHAPES), 0.1, 0.9, restart=text, signals=needs)
    params = outer.param_groups[0]["params"]
    give(params, randoms(1, SHAPES))
    with pytest.raises(ValueError, match=remedy):
        outer.step()
    assert outer.param_groups[0]["rounds"] == 0
    assert all(map(same_bits, params, randoms(0, SHAPES)))


@pytest.mark.parametrize("text", [text for text in ALL if parse(text).needs])
def test_a_broken_signal_is_a_divergence(text: str):
    """What is not finite warns, or is named where it is measured; the rule's own update is taken, and memory stays."""
    rule, (name, *_) = OuterRule(0.1, 0.9), sorted(parse(text).needs)
    ends = []
    for measure in (False, True):
        params = parameters(0, SHAPES)
        outer = outer_of(params, rule, text)
        (group,) = outer.param_groups
        for number in range(3):
            take(outer, params, number)
        memory, count = copy.deepcopy(group["policy_state"]), group["restarts"]
        pulls = gradients(params, 3)
        measured = name in ("cosine", "buffer_norm", "pseudo_gradient_norm")
        if name == "buffer_norm":
            outer.state[params[1]][BUFFER][0] = math.nan
        elif measured:
            pulls[1][0] = math.nan
        give(params, pulls)
        broken = signals(params, pulls, 3) | ({name: math.nan} if name in PROMISED else {})
        warned = pytest.warns(RuntimeWarning, match=rf"round 4 .*{name}.*not finite.*has diverged")
        with warned if not measure else nullcontext():
            outer.step(signals=broken, measure=measure)
        assert (group["policy_state"], group["restarts"], group["rounds"]) == (memory, count, 4)
        if measure:
            (seen,) = outer.last_round
            assert name in seen.not_finite
            assert not seen.restarted
        ends.append([p.detach() for p in params])
        if not measured:
            take(outer, params, 4)  # without a warning, which would be an error
    assert all(torch.equal(p.nan_to_num(9), q.nan_to_num(9)) for p, q in zip(*ends, strict=True))
