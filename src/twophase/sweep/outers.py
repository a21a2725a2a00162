"""Outer optimizers of runs that share replicas and anchor: their counters, their buffers, and the steps that agree."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from twophase.optim.groups import COUNTERS
from twophase.optim.outer import BUFFER, OuterSGD
from twophase.policies.base import Answer
from twophase.sweep.history import ABSENT, ZERO, answers, bits
from twophase.tasks.lm.config import TrainConfig

Counters = dict[str, Any]
"""What an `OuterSGD` counts, and the memory of its policy."""


class _Course:
    """What is known of a run's outer optimizer before the run, round by round."""

    def __init__(self, config: TrainConfig) -> None:
        self.rule, self.policy = config.outer.rule(), config.outer.policy()
        history = bits(self.rule, self.policy, config.rounds, config.probed)
        self.buffers = [update.buffer for update in history]
        """Names of the buffer."""
        self.answers: list[Answer] = []
        """Of the policy; none where it measures, and so of its counters."""
        self.counters: list[Counters] = []
        age = restarts = 0
        for number, answer in enumerate(() if self.policy.needs else answers(self.rule, self.policy, config.rounds), 1):
            age, restarts = answer.age(age + 1), restarts + answer.restarted
            counters = {"rounds": number, "rounds_since_restart": age, "restarts": restarts}
            self.counters.append(counters | {"policy_state": answer.state})
            self.answers.append(answer)


class Outers:
    """The outer optimizers of some runs. Equal buffers are stored once, under the name that `history.bits` gives them.

    Args:
        configs: from run id to configuration.
    """

    def __init__(self, configs: Mapping[str, TrainConfig]) -> None:
        self.configs = configs
        self.counters: dict[str, Counters] = {}
        self.buffers: dict[str, list[Tensor]] = {}
        """From the name of a buffer to its tensors."""
        self._names: dict[str, str] = {}
        """From run to the name of its buffer."""
        self._courses: dict[str, _Course] = {}
        self._scratch: OuterSGD | None = None

    def begin(self, runs: Iterable[str]) -> None:
        """Start runs before their first round."""
        for run in runs:
            initial = self.configs[run].outer.policy().initial_state()
            self.counters[run] = dict.fromkeys(COUNTERS, 0) | {"policy_state": initial}
            self._names[run] = ABSENT

    def restrict(self, runs: Iterable[str]) -> None:
        """Drop all runs but these."""
        self.counters = {run: self.counters[run] for run in runs}
        self._names = {run: self._names[run] for run in runs}

    def state(self) -> dict[str, Any]:
        """What `restore` takes; the tensors are live."""
        return {"buffers": self.buffers, "held": dict(self._names), "counters": dict(self.counters)}

    def restore(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Continue from what `state` has returned."""
        self.buffers = {name: [part.to(device) for part in parts] for name, parts in state["buffers"].items()}
        self._names, self.counters = state["held"], state["counters"]

    def classes(self, runs: Iterable[str], number: int) -> list[list[str]]:
        """The runs by what their outer optimizers do in a round, counted from 1: rule, buffer and restart."""
        classes: dict[Any, list[str]] = {}
        for run in runs:
            course = self._course(run)
            if course.policy.needs:
                happening: Any = (course.policy, repr(self.counters[run]))
            else:
                answer = course.answers[number - 1]
                happening = (answer.restart, answer.step)
            classes.setdefault((course.rule, self._names[run], happening), []).append(run)
        return list(classes.values())

    def load(self, outer: OuterSGD, run: str) -> None:
        """Make an optimizer that of a run: its rule, policy, counters and buffer."""
        course, (group,) = self._course(run), outer.param_groups
        group.update(dataclasses.asdict(course.rule) | {"restart": str(course.policy)} | self.counters[run])
        buffer = self.buffers.get(self._names[run])
        for index, param in enumerate(group["params"]):
            if buffer is None:
                outer.state[param].pop(BUFFER, None)
            else:
                outer.state[param][BUFFER] = buffer[index].clone()  # other runs may have the same buffer

    def unload(self, outer: OuterSGD, members: Iterable[str], number: int) -> dict[str, list[Tensor]]:
        """Take counters and buffer back after a class's outer step; the new buffer by its name."""
        (group,) = outer.param_groups
        buffers: dict[str, list[Tensor]] = {}
        for run in members:
            course = self._course(run)
            measured = {key: group[key] for key in (*COUNTERS, "policy_state")}
            self.counters[run] = measured if course.policy.needs else course.counters[number - 1]
            name = self._names[run] = course.buffers[number - 1]
            if name not in (ABSENT, ZERO) and name not in buffers:
                buffers[name] = [outer.state[param][BUFFER] for param in group["params"]]
        for param in group["params"]:
            outer.state[param].pop(BUFFER, None)  # the optimizer's next step must not write into it
        return buffers

    def repeat(self, run: str, before: list[Tensor], anchor: list[Tensor], signals: Mapping[str, float]) -> OuterSGD:
        """Take another class's outer step on a scratch copy of the anchor.

        Args:
            run: a run of that class.
            before: the anchor before the round.
            anchor: the anchor after the first class's step, with its gradient.
            signals: what the round has measured. At momentum 0 a policy may need signals, although they change nothing
                but the count of its restarts.

        Raises:
            RuntimeError: the copy does not come out as the anchor.
        """
        scratch = self._scratch = self._scratch or OuterSGD([torch.empty_like(view) for view in anchor], lr=0.0)
        params = scratch.param_groups[0]["params"]
        for param, old, view in zip(params, before, anchor, strict=True):
            param.copy_(old)
            param.grad = view.grad
        self.load(scratch, run)
        scratch.step(measure=True, signals=signals)
        if not all(
            torch.allclose(*pair, rtol=0.0, atol=0.0, equal_nan=True) for pair in zip(params, anchor, strict=True)
        ):
            raise RuntimeError(
                f"forest: run {run} does not take the update of the runs that it should share this round with: a fault "
                "of the plan; please report it with the sweep's plan.json"
            )
        return scratch

    def _course(self, run: str) -> _Course:
        if run not in self._courses:
            self._courses[run] = _Course(self.configs[run])
        return self._courses[run]
