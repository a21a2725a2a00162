"""Outer optimizers of runs that share replicas and anchor: their counters, their buffers, and the steps that agree."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from twophase.diloco.fragment import Fragment, views_of
from twophase.optim.outer_sgd import BUFFER, COUNTERS, OuterSGD
from twophase.restart import Decision, Restart, RestartPolicy, RoundSignal, age_after, ask
from twophase.sweeps.history import ABSENT, ZERO, bits
from twophase.training.config import RunConfig


class Outers:
    """The outer optimizers of some runs. Equal buffers are stored once, by the names that `history.bits` gives them."""

    def __init__(self, configs: Mapping[str, RunConfig]) -> None:
        self.configs = configs
        self.counters: dict[str, dict[str, Any]] = {}
        """From run to what its `OuterSGD` counts."""
        self.buffers: dict[str, list[Tensor]] = {}
        """From the name of a buffer to its tensors."""
        self._names: dict[str, str] = {}
        """From run to the name of its buffer."""
        self._histories: dict[str, list[str]] = {}
        """From run to the name of its buffer after each round."""
        self._scratch: OuterSGD | None = None
        self._copy: Tensor | None = None

    def begin(self, runs: Iterable[str]) -> None:
        """Start runs before their first round."""
        for run in runs:
            self.counters[run] = dict.fromkeys(COUNTERS, 0) | {"policy_state": {}}
            self._names[run] = ABSENT

    def restrict(self, runs: Iterable[str]) -> None:
        """Drop all runs but these."""
        self.counters = {run: self.counters[run] for run in runs}
        self._names = {run: self._names[run] for run in runs}

    def state(self) -> dict[str, Any]:
        """Return the argument of `restore`; the tensors are live."""
        return {"buffers": self.buffers, "held": dict(self._names), "counters": dict(self.counters)}

    def restore(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Continue from what `state` has returned."""
        self.buffers = {name: [part.to(device) for part in parts] for name, parts in state["buffers"].items()}
        self._names, self.counters = state["held"], state["counters"]

    def classes(self, runs: Iterable[str], number: int) -> list[list[str]]:
        """Group the runs by their outer step in round `number`, from 1: rule, buffer and restart."""
        classes: dict[Any, list[str]] = {}
        for run in runs:
            outer, counters = self.configs[run].outer, self.counters[run]
            policy = outer.policy()
            if policy.needs:
                happening: Any = (policy, repr(counters))
            else:
                happening = _counted(policy, counters, number)[1]
            classes.setdefault((outer.rule(), self._names[run], happening), []).append(run)
        return list(classes.values())

    def load(self, outer: OuterSGD, run: str) -> None:
        """Make an optimizer that of a run: its rule, policy, counters and buffer."""
        config = self.configs[run].outer
        (group,) = outer.param_groups
        rule = dataclasses.asdict(config.known_rule())
        group.update(rule | {"restart": config.policy()} | self.counters[run])
        outer.state.clear()  # of a step that has failed
        for param, buffer in zip(group["params"], self.buffers.get(self._names[run], ()), strict=False):
            outer.state[param][BUFFER] = buffer.clone()  # other runs may have the same buffer

    def unload(self, outer: OuterSGD, members: Iterable[str], number: int) -> dict[str, list[Tensor]]:
        """Take counters and buffer back after a class's outer step; the new buffer by its name."""
        (group,) = outer.param_groups
        buffers: dict[str, list[Tensor]] = {}
        for run in members:
            policy = self.configs[run].outer.policy()
            if policy.needs:
                self.counters[run] = {key: group[key] for key in (*COUNTERS, "policy_state")}
            else:
                self.counters[run] = _counted(policy, self.counters[run], number)[0]
            name = self._names[run] = self._history(run)[number - 1]
            if name not in (ABSENT, ZERO) and name not in buffers:
                buffers[name] = [outer.state[param][BUFFER] for param in group["params"]]
        for param in group["params"]:
            outer.state[param].pop(BUFFER, None)  # the optimizer's next step must not write into it
        return buffers

    def repeat(self, run: str, before: Tensor, fragment: Fragment, signals: Mapping[str, float]) -> OuterSGD:
        """Take another class's outer step on a scratch copy of the anchor; a RuntimeError if it comes out otherwise.

        Args:
            run: a run of that class.
            before: the anchor before the round, flat.
            fragment: the whole model after the first class's step, with its gradient.
            signals: measurements of the round. At momentum 0 a policy may need signals, although they change nothing
                but the count of its restarts.
        """
        if self._scratch is None or self._copy is None:
            self._copy = torch.empty_like(before)
            self._scratch = OuterSGD(views_of(self._copy, [view.shape for view in fragment.views]), lr=0.0)
        scratch = self._scratch
        self._copy.copy_(before)
        for param, gradient in zip(scratch.param_groups[0]["params"], fragment.gradient_views, strict=True):
            param.grad = gradient
        self.load(scratch, run)
        scratch.step(measure=True, signals=signals)
        if not torch.allclose(self._copy, fragment.anchor, rtol=0.0, atol=0.0, equal_nan=True):
            raise RuntimeError(
                f"forest: run {run} does not take the update of the runs that should share this round with it. This "
                "is a fault of the plan; please report it with the sweep's plan.json"
            )
        return scratch

    def _history(self, run: str) -> list[str]:
        if run not in self._histories:
            config = self.configs[run]
            history = bits(config.outer.known_rule(), config.outer.policy(), config.rounds)
            self._histories[run] = [update.buffer for update in history]
        return self._histories[run]


def _counted(policy: RestartPolicy, counters: Mapping[str, Any], number: int) -> tuple[dict[str, Any], Decision]:
    """Return a scheduled policy's counters after a round, as `OuterSGD` keeps them, and its decision."""
    age = counters["rounds_since_restart"] + 1
    memory, decision, _ = ask(policy, counters["policy_state"], RoundSignal(number, age))
    restarts = counters["restarts"] + isinstance(decision, Restart)
    after = {"rounds": number, "rounds_since_restart": age_after(decision, age), "restarts": restarts}
    return after | {"policy_state": memory}, decision
