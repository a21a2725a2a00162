"""The state of an `OuterSGD`: resumed runs, copies, distributed checkpoints, states of torch.optim.SGD, refusals."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from outers import buffers, counters, flat, parameters, run, scalar
from policies import ALL
from replicas import same_bits, through_file
from twophase.optim.outer_sgd import BUFFER, OuterSGD
from twophase.restart import parse

SIGNALS: dict[str, Any] = {
    "signals": lambda number: {"loss": np.float32(number % 3), "inner_lr": 0.1 * (number % 3), "progress": number / 18}
}


def by_file(outer: OuterSGD, params: list[Any], _: Path) -> tuple[OuterSGD, list[Any]]:
    new = [nn.Parameter(value) for value in through_file([p.detach() for p in params])]
    other = OuterSGD(new, 0.5)
    other.load_state_dict(through_file(outer.state_dict()))
    return other, new


def by_checkpoint(outer: OuterSGD, params: list[Any], folder: Path) -> tuple[OuterSGD, list[Any]]:
    """By `torch.distributed.checkpoint`, which restores what a fresh optimizer's state has, too."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    new = [nn.Parameter(p.detach().clone()) for p in params]
    group, model = outer.param_groups[0], nn.ParameterList(new)
    other = OuterSGD(
        new, 0.5, group["momentum"] / 2, restart="auto" if parse(group["restart"]).takes_steps else "never"
    )
    dcp.save({"outer": get_optimizer_state_dict(nn.ParameterList(params), outer)}, checkpoint_id=folder, no_dist=True)
    state: dict[str, Any] = {"outer": get_optimizer_state_dict(model, other)}
    assert counters(other)[:3] == [0, 0, 0]  # the step that it takes to see what there is is no round
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    set_optimizer_state_dict(model, other, state["outer"])
    return other, new


def by_copy(outer: OuterSGD, *_: Any) -> tuple[OuterSGD, list[Any]]:
    other = pickle.loads(pickle.dumps(copy.deepcopy(outer)))  # noqa: S301 - our own bytes
    return other, other.param_groups[0]["params"]


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # torch's own
@pytest.mark.parametrize("way", [by_file, by_checkpoint, by_copy])
@pytest.mark.parametrize(
    ("text", "dtype", "stop", "momentum"),
    [
        *((text, torch.float32, (1, 5, 10)[n % 3], 0.9) for n, text in enumerate(["never", *ALL])),
        *(("cycle:3,4", dtype, 5, 0.9) for dtype in (torch.bfloat16, torch.float16, torch.float64)),
        *((text, torch.float32, 5, 0.0) for text in ("3", "auto", "test-rising:0.5")),
    ],
)
def test_resumed_is_uninterrupted(  # noqa: PLR0917 - what a run consists of
    way: Callable[..., Any], text: str, dtype: torch.dtype, stop: int, momentum: float, tmp_path: Path
):
    """Taken up after a round, a run ends with the bits, buffers, counters and policy of an uninterrupted one."""
    whole, first = parameters(0, dtype=dtype), parameters(0, dtype=dtype)
    straight, outer = (
        OuterSGD(params, 0.1, momentum, nesterov=True, form="ema", restart=text) for params in (whole, first)
    )
    run(straight, range(14), **SIGNALS)
    run(outer, range(stop), **SIGNALS)
    resumed, params = way(outer, first, tmp_path)
    assert not outer.state or all(map(same_bits, buffers(outer), buffers(resumed)))
    run(resumed, range(stop, 14), params, **SIGNALS)
    assert all(map(same_bits, params, whole))
    assert not outer.state or all(map(same_bits, buffers(resumed), buffers(straight)))
    assert counters(resumed) == counters(straight)
    assert resumed.param_groups[0]["restart"] == straight.param_groups[0]["restart"] == str(parse(text))


def test_a_state_is_plain():
    """Tensors, numbers and text: what goes into a group as NumPy's comes out as plain; it loads and saves alike."""
    number: Any = np.float32
    x = scalar(1.0)
    outer = OuterSGD([{"params": [x], "lr": number(0.5), "momentum": number(0.25)}], 0.1, restart="soft:2:0.5:1")
    run(outer, range(3))
    state = outer.state_dict()
    (group,) = state["param_groups"]
    assert {type(value) for value in group.values()} <= {int, float, str, bool, list, type(None)}
    assert (group["lr"], group["momentum"], group["restart"]) == (0.5, 0.25, "soft:2:0.5:1")
    outer.load_state_dict(through_file(state))
    assert outer.state_dict() == state


def test_loading_copies_and_replaces_everything():
    """Neither side sees what happens on the other; what was there before is gone, with the buffers."""
    (outer, other) = (OuterSGD(parameters(seed, dtype=torch.float32), 0.1, 0.9, restart=3) for seed in (0, 1))
    start = copy.deepcopy(outer.state_dict()) | {"state": {0: {BUFFER: None}}}  # as old versions of torch.optim.SGD do
    run(outer, range(4))
    run(other, range(9))
    frozen = flat(buffers(outer))
    other.load_state_dict(outer.state_dict())
    run(other, range(4, 9))
    assert torch.equal(flat(buffers(outer)), frozen)
    assert (counters(outer)[0], counters(other)[0]) == (4, 9)
    other.load_state_dict(start)
    run(other, range(1), measure=True)
    assert (counters(other)[:3], other.last_round[0].buffer_norm) == ([1, 1, 0], 0)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("restart", ["never", "2", "norm:0.1"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_of_torch_sgd_loads(restart: str, nesterov: bool, dtype: torch.dtype):
    """A run of torch.optim.SGD goes on with its bits, lr and momentum, in sum form; policy and counts are one's own."""
    theirs = parameters(0, dtype=dtype)
    sgd = torch.optim.SGD(theirs, 0.7, 0.9, nesterov=nesterov)
    run(sgd, range(3))
    params = [nn.Parameter(p.detach().clone()) for p in theirs]
    outer = OuterSGD(params, 0.1, 0.5, form="ema", restart=restart)
    outer.load_state_dict(through_file(sgd.state_dict()))
    (group,) = outer.param_groups
    names = ("restart", "form", "lr", "momentum", "rounds", "nesterov")
    assert " ".join(str(group[name]) for name in names) == f"{restart} sum 0.7 0.9 0 {nesterov}"
    for optimizer in (outer, sgd):
        run(optimizer, range(3, 8))
    assert all(m.dtype == torch.float32 and m.shape == p.shape for m, p in zip(buffers(outer), params, strict=True))
    assert all(map(same_bits, params, theirs)) == (restart == "never" and dtype == torch.float32)
    assert (counters(outer)[2] > 0) == (restart != "never")


def changed(**values: Any) -> dict[str, Any]:
    """The state of an `OuterSGD` of one number, with other values in its group."""
    outer = OuterSGD([scalar(0.0)], 0.7, 0.9, restart="test-longer:3")
    run(outer, range(2))
    state = outer.state_dict()
    state["param_groups"][0] |= values
    return state


def of_torch(optimizer: Any, *args: Any, shapes: Any = ((1,),), **options: Any) -> dict[str, Any]:
    outer = optimizer(parameters(0, shapes, torch.float32), *args, **options)
    run(outer, range(1))
    return outer.state_dict()


@pytest.mark.parametrize(
    ("name", "state"),
    [
        *((name, changed(**{name: 0.5})) for name in ("dampening", "weight_decay", "maximize")),
        ("lr", changed(lr=-1.0)),
        ("momentum", changed(momentum=1.0)),
        ("form", changed(form="mean")),
        ("restart", changed(restart="sometimes")),
        ("momentum", of_torch(torch.optim.Adam)),
        ("shape", of_torch(torch.optim.SGD, 0.7, 0.9, shapes=[(2,)])),
        ("parameter group", of_torch(torch.optim.SGD, 0.7, 0.9, shapes=[(1,), (1,)])),
        ("parameter groups", changed() | {"param_groups": 2 * changed()["param_groups"]}),
    ],
)
def test_a_refused_state_changes_nothing(name: str, state: dict[str, Any]):
    """The state of another optimizer, of other parameters, or with what an outer step has not, is refused by name."""
    outer = OuterSGD([scalar(0.0)], 0.1, 0.5, restart=3)
    run(outer, range(2))
    before = copy.deepcopy(outer.state_dict())
    given = copy.deepcopy(state["param_groups"])
    with pytest.raises(ValueError, match=name):
        outer.load_state_dict(state)
    assert (outer.state_dict(), state["param_groups"]) == (before, given)
    run(outer, range(2, 4))
