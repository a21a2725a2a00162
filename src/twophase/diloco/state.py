"""Save the engine's state as tensors, numbers and text; check it before anything changes, and load it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from twophase.diloco.agreement import first_unlike
from twophase.diloco.membership import Members, Position
from twophase.diloco.setting import Schedule, Setting, check_needs
from twophase.diloco.sweep import goes_on_device
from twophase.diloco.sync import Part, Sync
from twophase.diloco.weighing import Weighing
from twophase.optim.outer import OuterSGD
from twophase.policies.checks import check_count

_KEYS = {"anchor", "layout", "fragments", "under_way", "schedule", "launching", "round", "inner_step", "syncs"}


def save(setting: Setting, position: Position, under_way: Sequence[Sync], schedule: Schedule) -> dict[str, Any]:
    """Return the state, with live tensors; the sums under way are waited for."""
    for sync in under_way:
        sync.settle()
    return {
        "anchor": setting.anchor,
        "layout": _layout(setting),
        "fragments": [
            {"name": f.name, "round": f.round, "steps": f.steps, "outer": f.outer.state_dict()}
            for f in setting.fragments
        ],
        "under_way": [
            {
                "fragments": [fragment.number for fragment in sync.fragments],
                "steps": [part.steps for part in sync.parts],
                "sums": [fragment.gradient for fragment in sync.fragments],
                "age": sync.age,
                "replicas": sync.members.replicas,
                "divisors": [fragment.divisor for fragment in sync.fragments],
                "bytes_sent": sync.bytes_sent,
                "squares": sync.mean_squares(),
                "weighings": [_saved_weighing(part.weighing) for part in sync.parts],
            }
            for sync in under_way
        ],
        "schedule": _saved_schedule(schedule),
        **asdict(position),
        "borrowed": sorted(position.borrowed),
    }


@torch.no_grad()
def load(state: Mapping[str, Any], setting: Setting, position: Position, *, at_once: bool) -> list[Sync]:
    """Continue from a state that `check` has passed.

    Args:
        state: what `save` has returned.
        setting: its fragments are loaded.
        position: set to the state's; after a heal the membership marks all of its fragments as borrowed.
        at_once: of the newest sync, where an earlier release's state does not say.

    Returns:
        The syncs that were under way.
    """
    before = [fragment.outer.state_dict() for fragment in setting.fragments]
    try:
        for fragment, saved in zip(setting.fragments, state["fragments"], strict=True):
            fragment.outer.load_state_dict(saved["outer"])  # first: it may refuse
    except Exception:  # by one of several, after others have loaded
        for fragment, outer in zip(setting.fragments, before, strict=True):
            fragment.outer.load_state_dict(outer)
        raise
    setting.anchor.copy_(state["anchor"])
    for fragment, saved in zip(setting.fragments, state["fragments"], strict=True):
        fragment.round, fragment.steps, fragment.torn = saved["round"], saved["steps"], False
    position.round, position.inner_step, position.syncs = state["round"], state["inner_step"], state["syncs"]
    # Where an earlier version's state does not say, whole rounds were all as long.
    position.taken = state.get("taken", state["round"] * state["schedule"]["inner_steps"] + state["inner_step"])
    position.launching, position.at_once = list(state["launching"]), state.get("at_once", at_once)
    position.borrowed = set(state.get("borrowed", ()))
    position.run, position.present = state.get("run", 0), list(state.get("present", ()))
    setting.look_up(setting.fragments)
    return [_load_sync(saved, setting) for saved in state["under_way"]]


def _saved_weighing(weighing: Weighing | None) -> dict[str, Any] | None:
    if weighing is None:
        return None
    numbers = {"total": weighing.total, "rejected": weighing.rejected, "memory": dict(weighing.memory)}
    return numbers | {"weights": list(weighing.weights)}


def _load_sync(saved: Mapping[str, Any], setting: Setting) -> Sync:
    count, replicas = len(setting.modules), saved["replicas"]
    fragments = [setting.fragments[number] for number in saved["fragments"]]
    divisors = saved.get("divisors") or [replicas] * len(fragments)
    means = saved.get("squares") or [None] * len(fragments)
    weighings = saved.get("weighings") or [None] * len(fragments)
    parts = []
    for fragment, steps, total, divisor, mean, weighing in zip(
        fragments, saved["steps"], saved["sums"], divisors, means, weighings, strict=True
    ):
        fragment.gradient.copy_(total)
        fragment.on_device, fragment.divisor = goes_on_device(fragment), divisor
        square = None if mean is None else torch.tensor(mean * count, dtype=torch.float64)
        parts.append(Part(fragment, steps, square, weighing=Weighing(**weighing) if weighing else None))
    sync = Sync(setting, Members(count, replicas), parts, at_once=False)
    sync.age, sync.bytes_before = saved["age"], saved["bytes_sent"]
    return sync


def check(state: Mapping[str, Any], setting: Setting, schedule: Schedule) -> None:
    """Refuse a state of another engine, model or schedule, in one sentence that names the difference."""
    missing = _KEYS - state.keys() if isinstance(state, Mapping) else _KEYS
    if missing:
        raise ValueError(
            f"DiLoCo.load_state_dict: the state lacks {', '.join(sorted(missing))}; pass what state_dict() returned"
        )
    here: dict[str, Any] = {
        "fragments": [fragment.name for fragment in setting.fragments],
        "parameters of the model": _layout(setting),
        "elements of the anchor": setting.anchor.numel(),
        "param groups": [_group_sizes(fragment.outer.state_dict()) for fragment in setting.fragments],
    }
    there: dict[str, Any] = {
        "fragments": [saved["name"] for saved in state["fragments"]],
        "parameters of the model": state["layout"],
        "elements of the anchor": state["anchor"].numel(),
        "param groups": [_group_sizes(saved["outer"]) for saved in state["fragments"]],
    }
    if state["under_way"] and setting.communicator.elastic:  # nor could it be given to a replica that lacks it
        raise ValueError(
            "DiLoCo.load_state_dict: the state has a reduction under way, whose result may never be where processes "
            "come and go; save it in the run that it is of, after steps until engine.under_way is False"
        )
    if state["under_way"]:  # a reduction, which ends by the schedule that it began in
        here["schedules of the reduction under way"] = _saved_schedule(schedule)
        there["schedules of the reduction under way"] = state["schedule"]
    difference = first_unlike(here, there, ("this engine", "the state"))
    if difference is not None:
        raise ValueError(
            f"DiLoCo.load_state_dict: {difference}; build the engine with the checkpoint's model, fragments, param "
            "groups and schedule, or start a new run"
        )
    _check_values(state, setting)
    if state["inner_step"] >= schedule.inner_steps:
        raise ValueError(
            f"DiLoCo.load_state_dict: the state was saved after {state['inner_step']} inner steps of its round, but "
            f"inner_steps is {schedule.inner_steps}; use the checkpoint's, or a checkpoint of a round's end"
        )
    pairs = zip(setting.fragments, state["fragments"], strict=True)
    groups = [g for f, saved in pairs if isinstance(f.outer, OuterSGD) for g in saved["outer"]["param_groups"]]
    check_needs([group for group in groups if "restart" in group], setting.supplied)


def _check_values(state: Mapping[str, Any], setting: Setting) -> None:
    """Refuse counts that are none, numbers of fragments that there are not, and sums of another shape."""
    numbers = [*state["launching"], *state.get("borrowed", ())]
    counts = {name: state[name] for name in ("round", "inner_step", "syncs")}
    for saved in state["fragments"]:
        counts |= {f"{saved['name']}'s {name}": saved[name] for name in ("round", "steps")}
    for sync in state["under_way"]:
        numbers += sync["fragments"]
        counts |= {f"a sync's {name}": sync[name] for name in ("age", "replicas", "bytes_sent")}
        counts |= {f"a sync's steps of {number}": steps for number, steps in enumerate(sync["steps"])}
    for what, value in counts.items():
        check_count("DiLoCo.load_state_dict", what, value, 0)
    there = range(len(setting.fragments))
    if any(check_count("DiLoCo.load_state_dict", "a fragment's number", number, 0) not in there for number in numbers):
        raise ValueError(f"DiLoCo.load_state_dict: the state has fragments {numbers}, this engine {len(there)}")
    pairs = [(setting.anchor, state["anchor"])]
    for sync in state["under_way"]:
        pairs += zip((setting.fragments[number].gradient for number in sync["fragments"]), sync["sums"], strict=True)
    for here, saved in pairs:
        if (saved.shape, saved.dtype) != (here.shape, here.dtype):
            raise ValueError(
                f"DiLoCo.load_state_dict: the state has {saved.dtype} of shape {tuple(saved.shape)} where this engine "
                f"has {here.dtype} of shape {tuple(here.shape)}; pass what state_dict() returned"
            )


def _layout(setting: Setting) -> list[list[object]]:
    """Return names and shapes of the parameters in the anchor, as plain lists."""
    return [[slot.name, list(slot.shape)] for fragment in setting.fragments for slot in fragment.layout.slots]


def _group_sizes(outer: Mapping[str, Any]) -> list[int]:
    return [len(group["params"]) for group in outer["param_groups"]]


def _saved_schedule(schedule: Schedule) -> dict[str, Any]:
    return {"inner_steps": schedule.inner_steps, "stagger": schedule.stagger, "delay": schedule.delay}
