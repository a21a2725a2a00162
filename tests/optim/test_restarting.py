"""`Restarting`: equal to torch's own optimizers in a loop that makes them anew; its groups, state and refusals."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from outers import counters, flat, parameters, run
from replicas import same_bits, through_file
from twophase.optim.restarting import Restarting
from twophase.restart import parse

SHAPES = [(7,), (3, 5), (6, 2)]

BUILDS: dict[str, Callable[[list[Any]], Sequence[torch.optim.Optimizer]]] = {
    "adamw": lambda params: [torch.optim.AdamW(params, lr=0.05, betas=(0.9, 0.99), weight_decay=0.0)],
    "weight decay": lambda params: [torch.optim.AdamW(params, lr=0.05, weight_decay=0.3)],
    "momentum": lambda params: [torch.optim.SGD(params, lr=0.1, momentum=0.5)],
    "several": lambda params: [
        torch.optim.Muon([p for p in params if p.ndim == 2], lr=0.1, weight_decay=0.0, momentum=0.9),
        torch.optim.SGD([p for p in params if p.ndim != 2], lr=0.7, momentum=0.9, nesterov=True),
    ],
}
RESTARTS: dict[str, list[int]] = {"never": [], "3": [3, 6, 9, 12], "cycle:2,3": [2, 5, 7, 10, 12], "at:4,9": [4, 9]}


class Anew:
    """Torch's optimizers in a loop that makes them anew where they restart: behind the round's update, or before it."""

    def __init__(self, name: str, params: list[Any], restarts: list[int], before: bool = False) -> None:
        self.build, self.restarts, self.before, self.rounds = partial(BUILDS[name], params), restarts, before, 0
        self.optimizers = self.build()

    def step(self) -> None:
        self.rounds += 1
        fires = self.rounds in self.restarts
        if fires and self.before:
            self.optimizers = self.build()
        for each in self.optimizers:
            each.step()
        if fires and not self.before:
            self.optimizers = self.build()


def restarting(name: str, params: list[Any], restart: Any) -> Restarting:
    built = BUILDS[name](params)
    return Restarting(built[0] if len(built) == 1 else built, restart)


@pytest.mark.parametrize("restart", RESTARTS)
@pytest.mark.parametrize("name", BUILDS)
def test_equals_torchs_optimizer_made_anew(name: str, restart: str):
    """Bit for bit, and the groups count rounds and restarts."""
    params, twins = parameters(0, SHAPES), parameters(0, SHAPES)
    outer = restarting(name, params, restart)
    run(outer, range(13), params)
    run(Anew(name, twins, RESTARTS[restart]), range(13), twins)
    assert all(map(same_bits, params, twins))
    fired = RESTARTS[restart]
    for group in outer.param_groups:
        assert (group["rounds"], group["restarts"]) == (13, len(fired))
        assert group["rounds_since_restart"] == 13 - max(fired, default=0)


@pytest.mark.parametrize("name", BUILDS)
def test_a_policy_may_restart_before_the_update(name: str):
    """The round's pseudo-gradient is then the first of the new state."""
    params, twins = parameters(0, SHAPES), parameters(0, SHAPES)
    outer = restarting(name, params, "test-early:3:0:0")
    run(outer, range(8), params)
    run(Anew(name, twins, [3, 6], before=True), range(8), twins)
    assert all(map(same_bits, params, twins))
    assert counters(outer)[:3] == [8, 3, 2]


@pytest.mark.parametrize("name", BUILDS)
def test_resumed_is_uninterrupted(name: str):
    """After any round, through a file that is loaded with `weights_only`, with its restart; a copy shares nothing."""
    params, others = parameters(0, SHAPES), parameters(0, SHAPES)
    outer, other = restarting(name, params, "test-longer:2"), restarting(name, others, "test-longer:2")
    for number in range(9):
        run(outer, [number], params)
        run(other, [number], others)
        state, twin = through_file(other.state_dict()), copy.deepcopy(other)
        other = restarting(name, others, "never")
        other.load_state_dict(state)
        run(twin, [50])
    assert all(map(same_bits, params, others))
    assert counters(outer) == counters(other)


def test_groups_have_restarts_of_their_own_and_follow_a_scheduler():
    """A group names its restart; one without gradients takes no round; a late one steps; schedulers set the rates."""
    first, second, more = parameters(0, SHAPES[:2]), parameters(1, SHAPES[:2]), parameters(2, SHAPES[:1])
    outer = Restarting(torch.optim.Adam([{"params": first, "restart": 2}, {"params": second}], lr=0.1), restart=3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(outer, 0.5)
    for number in range(6):
        run(outer, [number], [*first, *second] if number % 2 else first)
        scheduler.step()
        outer.zero_grad()
    assert [(group["rounds"], group["restarts"]) for group in outer.param_groups] == [(6, 3), (3, 1)]
    assert outer.param_groups[0]["lr"] == pytest.approx(0.1 / 2**6)
    outer.add_param_group({"params": more})
    before = flat(more)
    run(outer, [6], more)
    assert not torch.equal(before, flat(more))
    assert counters(outer)[8:11] == [1, 1, 0]
    assert outer.step(lambda: torch.is_grad_enabled() and 9.0) == 9.0


def test_what_is_of_a_buffer_alone_is_refused():
    """Steps of a policy, a share of the buffer that stays, norms, signals: at construction, or in the step."""
    for restart in ("auto", "soft:3:0.2:0.1", "test-half:3", "norm:0.1", "test-rising:0.0", parse("test-shrink")):
        with pytest.raises(ValueError, match="restart"):
            Restarting(torch.optim.Adam(parameters(0)), restart)
    params = parameters(0)
    outer = Restarting(torch.optim.Adam(params, lr=0.1), "test-early:2:0.5:0")
    run(outer, [0])
    before = flat(params)
    with pytest.raises(ValueError, match="restart"):
        run(outer, [1])
    assert torch.equal(flat(params), before)
    assert counters(outer)[0] == 1


@pytest.mark.parametrize("name", ["sgd", "bare"])
def test_the_state_of_another_optimizer_changes_nothing(name: str):
    """Nor that of one that does not restart."""
    params = parameters(0, SHAPES)
    outer = Restarting(torch.optim.Adam(params, lr=0.1), 3)
    before = outer.state_dict()
    other: Any = torch.optim.Adam(params) if name == "bare" else Restarting(torch.optim.SGD(params, 0.1))
    with pytest.raises(ValueError, match="state"):
        outer.load_state_dict(other.state_dict())
    assert outer.state_dict() == before


def test_saving_by_torchs_checkpoint_changes_nothing():
    """A restart empties the state; the step by which torch learns what it holds is no round, and leaves no count."""
    params, twins = parameters(0, SHAPES), parameters(0, SHAPES)
    outer, twin = (Restarting(torch.optim.AdamW(each, 0.1), 3) for each in (params, twins))
    for number in range(6):
        for each, optimizer in ((params, outer), (twins, twin)):
            run(optimizer, [number], each)
        outer.zero_grad()  # else torch refuses
        get_optimizer_state_dict(nn.ParameterList(params), outer)
    assert [group["rounds"] for group in outer.param_groups] == [6]
    assert all(map(same_bits, params, twins))
