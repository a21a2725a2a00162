"""The outer optimizer of a run: its part of the configuration, and what that stands for. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from twophase.config import require
from twophase.errors import UsageError
from twophase.optim.names import NAMES, RULES, TORCH, read_filter
from twophase.optim.schedules import Schedule
from twophase.restart import RestartPolicy, parse
from twophase.rule import Form, OuterRule

LARGEST = 1e30
"""The largest factor, well inside float32's range."""


@dataclass(frozen=True)
class OuterConfig:
    """The outer optimizer: how the replicas' progress is combined once a round."""

    method: str = "averaging"
    """averaging of the replicas; heavy-ball or nesterov momentum (nesterov is DiLoCo's published rule); adamw; muon; or
    FILE.py:FUNCTION, your function from named parameters to a torch optimizer."""
    lr: float | None = None
    """Outer learning rate, in the form named below; none is the method's own: averaging 1, heavy-ball and nesterov 0.7,
    adamw 0.02, muon 0.1."""
    momentum: float | None = None
    """Outer momentum, in [0, 1); none is the method's own, 0.9. Averaging has no momentum."""
    form: Form = "sum"
    """`sum` (as torch.optim.SGD) or `ema` (as the restart paper); lr_sum = lr_ema (1 - momentum)."""
    restart: str = "never"
    """Restarts of the momentum: never, a period such as 3, cycle:5,6,10, at:4,9, soft:3:0.2:0.1, or the adaptive policy
    auto."""
    filter: str = "none"
    """Filter of the pseudo-gradient before the update: none, orthogonal, or clip:1, a bound on its norm."""
    schedule: str = "constant"
    """Outer learning rate and momentum over the run: constant, linear:2 (on a line to twice the learning rate) or
    momentum:0 (the momentum rises from 0)."""

    def __post_init__(self) -> None:
        known = self.method in NAMES or ".py:" in self.method
        require(known, "outer.method", self.method, f"one of {', '.join(NAMES)}, or a function FILE.py:FUNCTION")
        name = "restart"
        try:
            object.__setattr__(self, "restart", str(parse(self.restart)))  # one writing of each policy
            name = "filter"
            read_filter(self.filter)
            name = "schedule"
            Schedule.parse(self.schedule)
        except ValueError as error:
            raise UsageError(f"--outer.{name}: {error}") from None
        require(0 <= (self.lr or 0) <= LARGEST, "outer.lr", self.lr, f"in [0, {LARGEST:g}]")
        require(0 <= (self.momentum or 0) < 1, "outer.momentum", self.momentum, "in [0, 1)")

    @cached_property
    def policy(self) -> RestartPolicy:
        """The restart policy."""
        return parse(self.restart)

    def rule(self) -> OuterRule | None:
        """Return the rule; None for a method that is no rule.

        >>> OuterConfig("nesterov", lr=0.5).rule()
        OuterRule(lr=0.5, momentum=0.9, nesterov=True, form='sum')
        """
        if self.method not in RULES:
            return None
        own = RULES[self.method]
        momentum = own.momentum if self.momentum is None or self.method == "averaging" else self.momentum
        return OuterRule(own.lr if self.lr is None else self.lr, momentum, own.nesterov, self.form)

    def numbers(self) -> dict[str, float]:
        """Return learning rate and momentum as they are used; nothing for a user's function."""
        if (rule := self.rule()) is not None:
            return {"lr": rule.lr, "momentum": rule.momentum}
        own = zip(("lr", "momentum"), (self.lr, self.momentum), TORCH.get(self.method, ()), strict=False)
        return {name: number if given is None else float(given) for name, given, number in own}

    def describe(self) -> str:
        """Describe the outer optimizer in words, without its restart policy."""
        rule, numbers = self.rule(), self.numbers()
        if self.method == "averaging":
            text = f"averaging lr {numbers['lr']:g}"
        elif rule is not None:
            text = rule.describe()
        else:
            text = " ".join([self.method, *(f"{name} {value:g}" for name, value in numbers.items())])
        text += f", filter {self.filter}" if self.filter != "none" else ""
        return text + (f", schedule {self.schedule}" if self.schedule != "constant" else "")

    def ignored(self) -> dict[str, Any]:
        """Return the values that are given and change nothing, by name, as they are by default."""
        rule, policy = self.rule(), self.policy
        names = ["lr", "momentum"] if rule is None and self.method not in TORCH else []
        if policy.takes_steps:
            names += ["lr", "momentum", "form", "schedule", "method"]
        elif rule is None or rule.momentum == 0:
            names += ["form", *(["restart"] if rule is not None else [])]
        if self.method == "averaging":
            names += ["momentum"]
        defaults = OuterConfig()
        return {name: getattr(defaults, name) for name in names if getattr(self, name) != getattr(defaults, name)}

    def plain(self) -> OuterConfig:
        """Return the same outer optimizer with every number written out and what changes nothing left out."""
        return replace(self, **(self.ignored() | ({} if self.policy.takes_steps else self.numbers())))

    @property
    def is_rule(self) -> bool:
        """True if a rule and a restart policy describe it completely."""
        return self.method in RULES and (self.filter, self.schedule) == ("none", "constant")


def options_of(rule: OuterRule) -> dict[str, Any]:
    """Return the values of an `OuterConfig` that stand for a rule.

    >>> options_of(OuterRule(0.7, 0.9, nesterov=True))
    {'method': 'nesterov', 'lr': 0.7, 'momentum': 0.9, 'form': 'sum'}
    """
    method = "averaging" if rule.momentum == 0 else "nesterov" if rule.nesterov else "heavy-ball"
    return {"method": method, "lr": rule.lr, "momentum": rule.momentum or None, "form": rule.form}
