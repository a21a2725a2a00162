"""Schedules of the outer learning rate and momentum over the rounds of a run, as values without tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from twophase.rule import OuterRule

_WANTED = "schedule must be constant, linear:2 (a factor in [0, 100]) or momentum:0 (a momentum in [0, 1))"


@dataclass(frozen=True, slots=True)
class Schedule:
    """How learning rate and momentum of an outer rule change over a run of T rounds, t = 1 ... T.

    | text         | what changes                                                                        |
    |--------------|-------------------------------------------------------------------------------------|
    | `constant`   | nothing                                                                             |
    | `linear:2`   | lr_t = lr (1 + (2 - 1) (t-1) / T): on a line to twice its value; `linear:0` decays  |
    | `momentum:0` | b_t = 0 + (b - 0) (t-1) / T: the momentum rises from 0 to its own value             |

    `end` is the number: of `linear` the last learning rate over the first, in [0, 100]; of `momentum` the first
    momentum, in [0, 1). A ValueError refuses others.

    >>> Schedule.parse("linear:2").at(OuterRule(0.5, 0.0), 6, 10).lr
    0.75
    """

    kind: str = "constant"
    end: float = 0.0

    def __post_init__(self) -> None:
        is_right = {"constant": self.end == 0, "linear": 0 <= self.end <= 100, "momentum": 0 <= self.end < 1}
        if not is_right.get(self.kind, False):
            raise ValueError(f"{_WANTED}, got {self.kind!r} with {self.end}")

    @classmethod
    def parse(cls, text: str | Schedule) -> Schedule:
        """Return the schedule of a text form; a schedule is returned as it is."""
        if isinstance(text, Schedule):
            return text
        kind, _, end = text.strip().partition(":")
        try:
            return cls(kind, 0.0 if text.strip() == "constant" else float(end))
        except ValueError:
            raise ValueError(f"{_WANTED}, got {text!r}") from None

    def at(self, rule: OuterRule, number: int, rounds: int) -> OuterRule:
        """Return the rule of round `number`, from 1, in a run of `rounds`; later rounds have the last one's values."""
        if self.kind == "constant":
            return rule
        share = min(1.0, (number - 1) / max(1, rounds))
        if self.kind == "linear":
            return replace(rule, lr=rule.lr * (self.end + (1 - self.end) * (1 - share)))
        momentum = self.end + (rule.momentum - self.end) * share
        # At momentum 0 an optimizer has no buffer, and a later round would lack this one's pseudo-gradient.
        return replace(rule, momentum=max(momentum, 1e-300)) if rule.momentum else rule


def follow(optimizer: Any, schedule: Schedule, rounds: int) -> None:
    """Set learning rate and momentum of each param group before every step, as a schedule over `rounds` says.

    Args:
        optimizer: an `OuterSGD` or a `Restarting` with its first numbers: call this before a state is loaded.
        schedule: of learning rates; one of the momentum goes with an `OuterSGD`.
        rounds: of the run.

    Raises:
        ValueError: a schedule of the momentum of another optimizer.
    """
    if schedule.kind == "momentum" and "form" not in optimizer.param_groups[0]:
        raise ValueError(f"schedule {schedule.kind} must be of heavy-ball or nesterov, got {type(optimizer).__name__}")
    rules = [OuterRule(group["lr"], group["momentum"] if "form" in group else 0.0) for group in optimizer.param_groups]

    def set_numbers(optimizer: Any, *_: Any) -> None:
        for group, rule in zip(optimizer.param_groups, rules, strict=True):
            now = schedule.at(rule, group["rounds"] + 1, rounds)
            group["lr"] = now.lr
            if schedule.kind == "momentum":
                group["momentum"] = now.momentum

    optimizer.register_step_pre_hook(set_numbers)
