"""The engine's state: saved as tensors, numbers and text, checked before anything changes, and loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from twophase.diloco.membership import Elastic, Fixed, Members, Position
from twophase.diloco.sweep import goes_on_device
from twophase.diloco.sync import Setting, Sync
from twophase.optim.outer import OuterSGD

_KEYS = ("anchor", "layout", "fragments", "under_way", "schedule", "launching", "round", "inner_step", "syncs")


def check_saving(setting: Setting, under_way: Sequence[Sync]) -> None:
    """Refuse to save what another process may still undo, or what is half done."""
    check_whole(setting)
    if under_way and setting.communicator.elastic:
        raise ValueError(
            "DiLoCo.state_dict: a reduction is under way, and a process that leaves may still undo it; take inner "
            "steps until engine.under_way is False, and save then"
        )


def check_whole(setting: Setting) -> None:
    """Refuse to go on from an outer step that was interrupted."""
    if any(fragment.torn for fragment in setting.replicas.fragments):
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
    """Return the state, with live tensors; the sums under way have arrived."""
    replicas = setting.replicas
    return {
        "anchor": replicas.anchor,
        "layout": replicas.layout.describe(),
        "fragments": [
            {"name": f.name, "round": f.round, "steps": f.steps, "outer": f.outer.state_dict()}
            for f in replicas.fragments
        ],
        "under_way": [
            {
                "fragments": [fragment.number for fragment in sync.fragments],
                "steps": sync.steps,
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
    replicas = setting.replicas
    membership.borrowed = set(state.get("borrowed", ()))
    pairs = list(zip(replicas.fragments, state["fragments"], strict=True))
    for fragment, saved in pairs:
        fragment.outer.load_state_dict(saved["outer"])  # first: it may refuse
    replicas.anchor.copy_(state["anchor"])
    for fragment, saved in pairs:
        fragment.round, fragment.steps, fragment.torn = saved["round"], saved["steps"], False
    position.round, position.inner_step, position.syncs = state["round"], state["inner_step"], state["syncs"]
    position.launching = list(state["launching"])
    position.at_once = state.get("at_once", delay == 0)
    replicas.reshard()
    return [_load_sync(saved, setting) for saved in state["under_way"]]


def _load_sync(saved: Mapping[str, Any], setting: Setting) -> Sync:
    replicas = setting.replicas
    fragments = [replicas.fragments[number] for number in saved["fragments"]]
    divisors = saved.get("divisors") or [saved["replicas"]] * len(fragments)
    for fragment, total, divisor in zip(fragments, saved["sums"], divisors, strict=True):
        fragment.gradient.copy_(total)
        fragment.on_device, fragment.divisor = goes_on_device(fragment), divisor
    sync = Sync(setting, fragments, Members(len(replicas), saved["replicas"]), list(saved["steps"]))
    sync.age, sync.bytes_before = saved["age"], saved["bytes_sent"]
    for mean in saved.get("squares", ()):
        sync.squares.append(None if mean is None else torch.tensor(mean * len(replicas), dtype=torch.float64))
    return sync


def policy_groups(state: Mapping[str, Any], setting: Setting) -> list[Mapping[str, Any]]:
    """Return the saved param groups that bring a restart policy."""
    pairs = zip(setting.replicas.fragments, state["fragments"], strict=True)
    groups = [saved["outer"]["param_groups"] for fragment, saved in pairs if isinstance(fragment.outer, OuterSGD)]
    return [group for of_fragment in groups for group in of_fragment if "restart" in group]


def check(state: Mapping[str, Any], setting: Setting, schedule: Mapping[str, Any]) -> None:
    """Refuse a state of another engine, model or schedule, in one sentence that names the difference."""
    problem = _misfit(state, setting, schedule)
    if problem is not None:
        raise ValueError(f"DiLoCo.load_state_dict: {problem}")


def _misfit(state: Mapping[str, Any], setting: Setting, schedule: Mapping[str, Any]) -> str | None:
    replicas = setting.replicas
    missing = set(_KEYS) - set(state)
    if missing:
        return f"the state lacks {', '.join(sorted(missing))}; pass what state_dict() returned"
    names = [fragment.name for fragment in replicas.fragments]
    saved_names = [fragment["name"] for fragment in state["fragments"]]
    if saved_names != names:
        return (
            f"the state has the fragments {', '.join(saved_names)} and this engine {', '.join(names)}; build the "
            "engine with the checkpoint's fragments"
        )
    if state["layout"] != replicas.layout.describe():
        return "the state belongs to a model of other parameters; build the model of the checkpoint, or start a new run"
    if state["anchor"].shape != replicas.anchor.shape:
        return (
            f"the anchor has {state['anchor'].numel()} elements instead of {replicas.anchor.numel()}; the state is "
            "damaged"
        )
    for fragment, saved in zip(replicas.fragments, state["fragments"], strict=True):
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
