"""The state of an engine: read it, save it as tensors, numbers and text, and check it before it is loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from twophase.diloco.agreement import first_unlike
from twophase.diloco.communicator import Communicator
from twophase.diloco.flat import checksum
from twophase.diloco.fragment import Fragment
from twophase.diloco.setting import Schedule, Setting, check_needs
from twophase.diloco.sync import Part, Sync
from twophase.optim.outer import OuterSGD
from twophase.policies.checks import check_count

_COUNTS = ("round", "inner_step", "taken", "syncs")
_KEYS = {"anchor", "layout", "fragments", "under_way", "schedule", *_COUNTS}


class EngineState:
    """Read an engine between two steps, save it and load it; `DiLoCo` inherits all of it."""

    communicator: Communicator
    replicas: list[nn.Module]
    replica_count: int
    fragments: list[Fragment]
    anchor: dict[str, Tensor]
    schedule: Schedule
    round: int
    """Rounds that all fragments have ended."""
    inner_step: int
    """Inner steps since the round began."""
    taken: int
    """Inner steps of each replica since the run began."""
    syncs: int
    """Syncs that have ended, over all fragments."""
    _setting: Setting
    _under_way: list[Sync]

    @property
    def under_way(self) -> bool:
        """True if the result of a reduction is still to be applied (only with a delay)."""
        return bool(self._under_way)

    @property
    def at_anchor(self) -> bool:
        """True if the replicas equal the anchor: no inner step since the last sync, and no reduction under way."""
        return not (self.schedule.mixing or self._under_way or any(fragment.steps for fragment in self.fragments))

    @contextmanager
    def anchored(self, number: int = 0) -> Iterator[nn.Module]:
        """Yield a replica with the anchor's parameters, for an evaluation; restore its own afterwards.

        Between the syncs of several fragments, or while a reduction is under way, no replica equals the anchor.

        Args:
            number: number of the replica in this process.
        """
        if self.at_anchor:
            yield self.replicas[number]
            return
        with self._setting.lend(number) as replica:
            self._setting.write(number, [fragment.anchor_views for fragment in self.fragments])
            yield replica

    def checksum(self) -> str:
        """Return sixteen hexadecimal digits that depend on every bit of the anchor, which all processes share."""
        return checksum(self._setting.anchor)

    def state_dict(self) -> dict[str, Any]:
        """Return anchor, outer optimizers and position, the same on every process.

        Models, inner optimizers and error-feedback residuals (`wire_state_dict`) complete the run.

        It holds tensors, numbers and text only, so no reader needs a pickle that runs code. The tensors are live: save
        them before the next step, or clone them. It waits for a reduction under way; then call it on all processes.
        """
        self._setting.check_whole()
        for sync in self._under_way:
            sync.settle()
        return {
            "anchor": self._setting.anchor,
            "layout": _layout(self._setting),
            "fragments": [
                {"name": f.name, "round": f.round, "steps": f.steps, "outer": f.outer.state_dict()}
                for f in self.fragments
            ],
            "under_way": [_saved_sync(sync) for sync in self._under_way],
            "schedule": _saved_schedule(self.schedule),
            **{name: getattr(self, name) for name in _COUNTS},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`. Construct the engine first, then load it, the models and the inner optimizers.

        As for every torch optimizer, the saved settings (lr, momentum, restart policy) replace the constructor's. A
        state in which the replicas were the anchor also sets them to it.

        Raises:
            ValueError: not an engine's state, a state of another model, a position outside this engine's rounds, or a
                restart policy that needs missing signals. Nothing has been changed.
        """
        _check(state, self._setting, self.schedule)
        for sync in self._under_way:  # else it would write its sum into the loaded state
            sync.settle()
        self._load(state)
        if self.at_anchor:
            self._setting.restore()

    @torch.no_grad()
    def _load(self, state: Mapping[str, Any]) -> None:
        setting = self._setting
        before = [fragment.outer.state_dict() for fragment in self.fragments]
        try:
            for fragment, saved in zip(self.fragments, state["fragments"], strict=True):
                fragment.outer.load_state_dict(saved["outer"])  # first: it may refuse
        except Exception:  # by a later fragment: undo the earlier ones
            for fragment, outer in zip(self.fragments, before, strict=True):
                fragment.outer.load_state_dict(outer)
            raise
        setting.anchor.copy_(state["anchor"])
        for fragment, saved in zip(self.fragments, state["fragments"], strict=True):
            fragment.round, fragment.steps, fragment.torn = saved["round"], saved["steps"], False
        self.round, self.inner_step, self.taken, self.syncs = (state[name] for name in _COUNTS)
        setting.look_up(self.fragments)
        self._under_way = [_load_sync(saved, setting) for saved in state["under_way"]]

    def wire_state_dict(self) -> dict[str, Any]:
        """Return this process's error-feedback residuals by fragment; empty on float32.

        They differ between processes, so each process saves its own. It waits for a reduction under way, whose second
        stage changes them; then call it on all processes.
        """
        for sync in self._under_way:
            sync.settle()
        return {f.name: state for f in self.fragments if (state := f.channel.state_dict())}

    def load_wire_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `wire_state_dict()`; set the residuals of other fragments to zero."""
        for fragment in self.fragments:
            if fragment.name in state:
                fragment.channel.load_state_dict(state[fragment.name])
            else:
                fragment.channel.clear()


def _saved_sync(sync: Sync) -> dict[str, Any]:
    return {
        "fragments": [fragment.number for fragment in sync.fragments],
        "steps": [part.steps for part in sync.parts],
        "sums": [fragment.gradient for fragment in sync.fragments],
        "age": sync.age,
        "replicas": sync.replicas,
        "divisors": [fragment.divisor for fragment in sync.fragments],
        "bytes_sent": sync.bytes_sent,
    }


def _load_sync(saved: Mapping[str, Any], setting: Setting) -> Sync:
    fragments = [setting.fragments[number] for number in saved["fragments"]]
    parts = []
    for fragment, steps, total, divisor in zip(
        fragments, saved["steps"], saved["sums"], saved["divisors"], strict=True
    ):
        fragment.gradient.copy_(total)
        fragment.divisor = divisor
        parts.append(Part(fragment, steps))
    sync = Sync(setting, saved["replicas"], parts, blocking=False)
    sync.age, sync.bytes_before = saved["age"], saved["bytes_sent"]
    return sync


def _check(state: Mapping[str, Any], setting: Setting, schedule: Schedule) -> None:
    """Refuse a state of another engine, model or schedule, in one sentence that names the difference."""
    missing = _KEYS - state.keys() if isinstance(state, Mapping) else _KEYS
    if missing:
        raise ValueError(
            f"DiLoCo.load_state_dict: the state lacks {', '.join(sorted(missing))}; pass what state_dict() returned"
        )
    current: dict[str, Any] = {
        "fragments": [fragment.name for fragment in setting.fragments],
        "parameters of the model": _layout(setting),
        "elements of the anchor": setting.anchor.numel(),
        "param groups": [_group_sizes(fragment.outer.state_dict()) for fragment in setting.fragments],
    }
    stored: dict[str, Any] = {
        "fragments": [saved["name"] for saved in state["fragments"]],
        "parameters of the model": state["layout"],
        "elements of the anchor": state["anchor"].numel(),
        "param groups": [_group_sizes(saved["outer"]) for saved in state["fragments"]],
    }
    if state["under_way"]:  # a reduction ends by the schedule that it began in
        current["schedules of the reduction under way"] = _saved_schedule(schedule)
        stored["schedules of the reduction under way"] = state["schedule"]
    difference = first_unlike(current, stored, ("this engine", "the state"))
    if difference is not None:
        raise ValueError(
            f"DiLoCo.load_state_dict: {difference}; build the engine with the checkpoint's model, fragments, param "
            "groups and schedule, or start a new run"
        )
    _check_values(state, setting)
    if state["inner_step"] >= schedule.inner_steps:
        raise ValueError(
            f"DiLoCo.load_state_dict: the state was saved after {state['inner_step']} inner steps of its round, but "
            f"inner_steps is {schedule.inner_steps}. Use the checkpoint's, or a checkpoint of a round's end"
        )
    pairs = zip(setting.fragments, state["fragments"], strict=True)
    groups = [g for f, saved in pairs if isinstance(f.outer, OuterSGD) for g in saved["outer"]["param_groups"]]
    check_needs([group for group in groups if "restart" in group], setting.supplied)


def _check_values(state: Mapping[str, Any], setting: Setting) -> None:
    """Refuse counts below 0, numbers of fragments that do not exist, and sums of another shape."""
    numbers: list[int] = []
    counts = {name: state[name] for name in _COUNTS}
    for saved in state["fragments"]:
        counts |= {f"{saved['name']}'s {name}": saved[name] for name in ("round", "steps")}
    for sync in state["under_way"]:
        numbers += sync["fragments"]
        counts |= {f"a sync's {name}": sync[name] for name in ("age", "replicas", "bytes_sent")}
        counts |= {f"a sync's steps of {number}": steps for number, steps in enumerate(sync["steps"])}
    for name, value in counts.items():
        check_count("DiLoCo.load_state_dict", name, value, 0)
    valid = range(len(setting.fragments))
    if any(check_count("DiLoCo.load_state_dict", "a fragment's number", number, 0) not in valid for number in numbers):
        raise ValueError(f"DiLoCo.load_state_dict: the state has fragments {numbers}, this engine {len(valid)}")
    pairs = [(setting.anchor, state["anchor"])]
    for sync in state["under_way"]:
        pairs += zip((setting.fragments[number].gradient for number in sync["fragments"]), sync["sums"], strict=True)
    for tensor, saved in pairs:
        if (saved.shape, saved.dtype) != (tensor.shape, tensor.dtype):
            raise ValueError(
                f"DiLoCo.load_state_dict: the state has {saved.dtype} of shape {tuple(saved.shape)} where this engine "
                f"has {tensor.dtype} of shape {tuple(tensor.shape)}; pass what state_dict() returned"
            )


def _layout(setting: Setting) -> list[list[object]]:
    """Return names and shapes of the parameters in the anchor, as plain lists."""
    return [[slot.name, list(slot.shape)] for fragment in setting.fragments for slot in fragment.layout.slots]


def _group_sizes(outer: Mapping[str, Any]) -> list[int]:
    return [len(group["params"]) for group in outer["param_groups"]]


def _saved_schedule(schedule: Schedule) -> dict[str, Any]:
    return {"inner_steps": schedule.inner_steps, "stagger": schedule.stagger, "delay": schedule.delay}
