"""`OuterSGD` under every policy: its slow twin, resumed runs, exact reductions, candidates, divergence."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from outers import buffers, counters, flat, give, noises, parameters, randoms
from policies import ALL, PROBING, RULES, SCHEDULED, SUPPLIED, each_rule
from reference_outer import ReferenceOuter
from replicas import same_bits, through_file
from twophase.optim.optimizer import OuterOptimizer
from twophase.optim.outer import BUFFER, OuterSGD
from twophase.restart import MEASURED, convert, parse
from twophase.rule import OuterRule
from twophase.shelf.outer import outer

SHAPES = [(), (7,), (3, 5), (33, 17)]
PROMISED = ("loss_start", "loss_end", "inner_lr", "progress", "probes")
ROUNDS = 18

each_policy = pytest.mark.parametrize("text", ALL)


def gradients(params: list[Any], number: int) -> list[Tensor]:
    """A third of the parameters, which draws them to 0, and noise."""
    noise = noises(100 + number, tuple(p.shape for p in params), params[0].dtype)
    return [p.detach() / 3 + draw / 4 for p, draw in zip(params, noise, strict=True)]


def half_square(params: list[Any]) -> float:
    return 0.5 * sum(float((p.detach().double() ** 2).sum()) for p in params)


def signals(params: list[Any], pulls: list[Tensor], number: int) -> dict[str, float]:
    ends = half_square([p.detach() - g for p, g in zip(params, pulls, strict=True)])
    inner_lr, progress = 0.1 * (1 + math.cos(number)) + 0.01, (number + 1) / ROUNDS
    return {"loss_start": half_square(params), "loss_end": ends, "inner_lr": inner_lr, "progress": progress}


def take(outer: OuterSGD, params: list[Any], number: int, **options: Any) -> list[Tensor]:
    """One round; its pseudo-gradients."""
    pulls = gradients(params, number)
    give(params, pulls)
    outer.step(signals=signals(params, pulls, number), probe=lambda: half_square(params), **options)
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
    loss = (lambda x: half_square([x])) if text in PROBING else None
    twin = ReferenceOuter(flat(params), rule, parse(group["restart"]), loss)
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
        *((RULES[0], text) for text in ("cycle:2,3", "test-longer:3", "auto", "loss:0.5", "probe:keep,average")),
        (OuterRule(0.1, 0.0), "loss:0.5"),
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
@pytest.mark.parametrize(
    ("text", "plain"), [("norm:1e30", "never"), ("probe:keep,1e-30", "never"), ("probe:1e-30,drop", "1")]
)
def test_reductions_are_exact(rule: OuterRule, text: str, plain: str):
    """Rules at their edge have the bits of the simpler rule that they then are."""
    ends = []
    for policy in (text, plain):
        params = parameters(0, SHAPES, torch.float32)
        outer = OuterSGD.from_rule(params, rule, policy, signals=PROMISED)
        for number in range(8):
            take(outer, params, number)
        ends.append([p.detach() for p in params])
    if plain == "1":  # drop before the mixing is a restart after the round before, where only whether it helps differs
        assert all(torch.allclose(p, q, atol=1e-5) for p, q in zip(*ends, strict=True))
    else:
        assert all(torch.equal(p, q) for p, q in zip(*ends, strict=True))


# --- candidates -------------------------------------------------------------------------------------------------------


def probed(params: list[Any]) -> tuple[list[Tensor], Callable[[], float]]:
    """The places that are probed, and the probe, to which the first of them is the best."""
    seen: list[Tensor] = []

    def probe() -> float:
        seen.append(flat(params))
        return float(len(seen))

    return seen, probe


def test_candidates_are_tried_from_the_same_place():
    """Each candidate is probed where it would lead to from the round's start, and the best is taken from there."""
    params = parameters(0)
    seen, probe = probed(params)
    words = "probe:keep,drop,half,average,fresh,1.3"
    outer = OuterSGD(params, 0.3, 0.9, nesterov=True, restart=words, signals=["probes"])
    for number in range(2):
        give(params, randoms(number))
        outer.step(probes=[0, 1, 1, 1, 1, 1])  # keeps
    give(params, randoms(7))
    before, g, m = flat(params), flat(randoms(7)), flat(buffers(outer))
    outer.step(probe=probe)
    assert len(seen) == 6
    torch.testing.assert_close(flat(params), seen[0], rtol=0, atol=1e-12)  # out as it was, then the candidate's step
    steps = [(1, 0.3, 0.27), (0, 0.3, 0.27), (0.5, 0.3, 0.27), (1, 1, 0), (0, 1, 0), (1, 1.3, 0)]
    for anchor, (retain, along_g, along_m) in zip(seen, steps, strict=True):
        step = along_g * g + along_m * (0.9 * retain * m + g)
        torch.testing.assert_close(anchor, before - step, rtol=0, atol=1e-12)


@pytest.mark.parametrize("schedule", ["momentum:warmup=6", "warmup:warmup=4"])
@pytest.mark.parametrize("filtering", ["none", "clip"])
def test_the_candidate_that_keeps_is_the_step_taken(filtering: str, schedule: str):
    """Behind a filter and under a schedule, too: the probed place is where the round ends."""
    params = parameters(0)
    seen, probe = probed(params)
    value = outer(RULES[0], filter=filtering, schedule=schedule)
    optimizer = OuterOptimizer(params, value, "probe:keep,average", signals=["probes"])
    for number in range(8):
        give(params, [g * (1 - 3 * (number % 3 == 2)) for g in randoms(number)])
        seen.clear()
        optimizer.step(probe=probe)
        torch.testing.assert_close(flat(params), seen[0], rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    "method",
    ["adamw:lr=0.1", "muon", "delayed-nesterov", "gpa", "torch:optimizer=NAdam", "torch:optimizer=SGD:options=lr=0.1"],
)
def test_a_candidate_moves_groups_of_other_methods_too(method: str):
    """Beside a group that probes, each other group goes where its round ends: losses are of the point that follows."""
    params = parameters(0, [(3, 5), (4, 2)])
    seen, probe = probed(params)
    groups = [{"params": params[:1], "restart": "probe:keep,average"}, {"params": params[1:], "method": method}]
    optimizer = OuterOptimizer(groups, RULES[0], signals=["probes"])
    for number in range(4):
        give(params, randoms(number, [(3, 5), (4, 2)]))
        seen.clear()
        optimizer.step(probe=probe)
        torch.testing.assert_close(flat(params), seen[0], rtol=0, atol=1e-12)


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


def test_groups_with_different_probes_are_refused():
    """Groups are probed together, so two different probing policies are refused, and equal ones decide alike."""
    first, *others = parameters(0, SHAPES)
    groups = [{"params": [first], "restart": "probe:keep,average"}, {"params": others, "restart": "probe:keep,drop"}]
    with pytest.raises(ValueError, match="different probing policies"):
        OuterSGD(groups, 0.1, 0.9, signals=["probes"])
    groups[1]["restart"] = "probe:keep,average"
    outer = OuterSGD(groups, 2.0, 0.9, signals=["probes"])
    for number in range(4):
        take(outer, [first, *others], number, measure=True)
        assert len({round(group.gain, 9) == 1 for group in outer.last_round}) == 1


# --- what is missing, or not finite -----------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [*SUPPLIED, *PROBING])
def test_what_is_not_promised_is_refused(text: str):
    """A policy whose signals or probes are not promised is refused when it is built, with what to write."""
    needs = sorted(parse(text).needs - MEASURED)
    remedy = r"step\(probe=\.\.\.\)" if text in PROBING else r"step\(signals=\.\.\.\)"
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
        broken = signals(params, pulls, 3) | ({name: math.nan} if name in ("loss_end", "inner_lr", "progress") else {})
        warned = pytest.warns(RuntimeWarning, match=rf"round 4 .*{name}.*not finite.*has diverged")
        with warned if not measure else nullcontext():
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
