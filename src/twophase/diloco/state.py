"""Save the engine's state as tensors, numbers and text; check it before anything changes, and load it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from twophase.diloco.membership import Elastic, Fixed, Members, Position
from twophase.diloco.setting import Setting
from twophase.diloco.sweep import goes_on_device
from twophase.diloco.sync import Part, Sync
from twophase.optim.outer import OuterSGD

_KEYS = ("anchor", "layout", "fragments", "under_way", "schedule", "launching", "round", "inner_step", "syncs")


def check_whole(setting: Setting) -> None:
    """Refuse to go on from an outer step that was interrupted."""
    if True in [fragment.torn for fragment in setting.fragments]:
        raise ValueError(
            "DiLoCo: the last outer step was interrupted, and a part of the anchor is ahead of the others; go back "
            "to the newest checkpoint with load_state_dict()"
        )


def save(
    setting: Setting,
    position: Position,
    under_way: Sequence[Sync],
    membership: Fixed | Elastic,
    schedule: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the state, with live tensors; the sums under way are waited for.

    Raises:
        ValueError: an outer step was interrupted, or another process may still undo what is under way.
    """
    check_whole(setting)
    if under_way and setting.communicator.elastic:
        raise ValueError(
            "DiLoCo.state_dict: a reduction is under way, and a process that leaves may still undo it; take inner "
            "steps until engine.under_way is False, and save then"
        )
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
            }
            for sync in under_way
        ],
        "schedule": dict(schedule),
        "launching": list(position.launching),
        "at_once": position.at_once,
        "borrowed": sorted(membership.borrowed),
        "round": position.round,
        "inner_step": position.inner_step,
        "syncs": position.syncs,
    }


@torch.no_grad()
def load(
    state: Mapping[str, Any], setting: Setting, position: Position, membership: Fixed | Elastic, *, delay: int
) -> list[Sync]:
    """Continue from a state that `check` has passed.

    Args:
        state: what `save` has returned.
        setting: its fragments are loaded.
        position: set to the state's.
        membership: takes over which fragments hold a peer's progress; after a heal it marks all of them.
        delay: the engine's, for a state that does not say whether its newest sync ended where it began.

    Returns:
        The syncs that were under way.
    """
    membership.borrowed = set(state.get("borrowed", ()))
    for fragment, saved in zip(setting.fragments, state["fragments"], strict=True):
        fragment.outer.load_state_dict(saved["outer"])  # first: it may refuse
    setting.anchor.copy_(state["anchor"])
    for fragment, saved in zip(setting.fragments, state["fragments"], strict=True):
        fragment.round, fragment.steps, fragment.torn = saved["round"], saved["steps"], False
    position.round, position.inner_step, position.syncs = state["round"], state["inner_step"], state["syncs"]
    position.launching = list(state["launching"])
    position.at_once = state.get("at_once", delay == 0)
    setting.look_up(setting.fragments)
    return [_load_sync(saved, setting) for saved in state["under_way"]]


def _load_sync(saved: Mapping[str, Any], setting: Setting) -> Sync:
    count, replicas = len(setting.modules), saved["replicas"]
    fragments = [setting.fragments[number] for number in saved["fragments"]]
    divisors = saved.get("divisors") or [replicas] * len(fragments)
    means = saved.get("squares") or [None] * len(fragments)
    parts = []
    for fragment, steps, total, divisor, mean in zip(
        fragments, saved["steps"], saved["sums"], divisors, means, strict=True
    ):
        fragment.gradient.copy_(total)
        fragment.on_device, fragment.divisor = goes_on_device(fragment), divisor
        square = None if mean is None else torch.tensor(mean * count, dtype=torch.float64)
        parts.append(Part(fragment, steps, square))
    sync = Sync(setting, Members(count, replicas), parts, at_once=False)
    sync.age, sync.bytes_before = saved["age"], saved["bytes_sent"]
    return sync


def policy_groups(state: Mapping[str, Any], setting: Setting) -> list[Mapping[str, Any]]:
    """Return the saved param groups that bring a restart policy."""
    pairs = zip(setting.fragments, state["fragments"], strict=True)
    groups = [saved["outer"]["param_groups"] for fragment, saved in pairs if isinstance(fragment.outer, OuterSGD)]
    return [group for of_fragment in groups for group in of_fragment if "restart" in group]


def check(state: Mapping[str, Any], setting: Setting, schedule: Mapping[str, Any]) -> None:
    """Refuse a state of another engine, model or schedule, in one sentence that names the difference."""
    problem = _misfit(state, setting, schedule)
    if problem is not None:
        raise ValueError(f"DiLoCo.load_state_dict: {problem}")


def _misfit(state: Mapping[str, Any], setting: Setting, schedule: Mapping[str, Any]) -> str | None:
    missing = set(_KEYS) - set(state)
    if missing:
        return f"the state lacks {', '.join(sorted(missing))}; pass what state_dict() returned"
    names = [fragment.name for fragment in setting.fragments]
    saved_names = [fragment["name"] for fragment in state["fragments"]]
    if saved_names != names:
        return (
            f"the state has the fragments {', '.join(saved_names)} and this engine {', '.join(names)}; build the "
            "engine with the checkpoint's fragments"
        )
    if state["layout"] != _layout(setting):
        return "the state belongs to a model of other parameters; build the model of the checkpoint, or start a new run"
    if state["anchor"].shape != setting.anchor.shape:
        return (
            f"the anchor has {state['anchor'].numel()} elements instead of {setting.anchor.numel()}; the state is "
            "damaged"
        )
    for fragment, saved in zip(setting.fragments, state["fragments"], strict=True):
        sizes = [len(group["params"]) for group in fragment.outer.param_groups]
        saved_sizes = [len(group["params"]) for group in saved["outer"]["param_groups"]]
        if sizes != saved_sizes:
            return (
                f"fragment {fragment.name} has param groups of {saved_sizes} parameters in the state and of {sizes} "
                "here; build the engine with the checkpoint's fragments and param groups"
            )
    inner_steps = schedule["inner_steps"]
    if state["inner_step"] >= inner_steps:
        return (
            f"the state was saved after {state['inner_step']} inner steps of its round, but inner_steps is "
            f"{inner_steps}; use the checkpoint's, or a checkpoint of a round's end"
        )
    saved_schedule = state["schedule"]
    unlike = [key for key in schedule if schedule[key] != saved_schedule.get(key)]
    if unlike and state["under_way"]:
        differences = ", ".join(f"{key} is {saved_schedule.get(key)} (here {schedule[key]})" for key in unlike)
        return (
            f"a reduction is under way in the state, and its {differences}; use the checkpoint's, or a checkpoint of "
            "a run's end"
        )
    return None


def _layout(setting: Setting) -> list[list[object]]:
    """Return names and shapes of the parameters in the anchor, as plain lists."""
    return [row for fragment in setting.fragments for row in fragment.layout.describe()]
