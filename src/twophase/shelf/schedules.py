"""Outer schedules: learning rate and momentum as functions of the round."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from twophase.policies.checks import check_count
from twophase.rule import OuterRule
from twophase.shelf.base import Schedule, register

_TEST = "tests/shelf/test_schedules.py"
_LEAST_MOMENTUM = 1e-300


@register("constant")
@dataclass(frozen=True)
class Constant(Schedule):
    """The method's own learning rate and momentum in every round."""

    equation = "lr_t = lr"
    test = _TEST

    def at(self, rule: OuterRule, number: int, age: int) -> OuterRule:
        """Return the rule itself."""
        del number, age
        return rule


@register("warmup")
@dataclass(frozen=True)
class Warmup(Schedule):
    """A linear rise of the learning rate from `start` to its own value over some rounds, then constant."""

    equation = "lr_t = lr (start + (1 - start) min(1, t / warmup))"
    source = "torch.optim.lr_scheduler.LinearLR"
    test = _TEST

    warmup: int = 10
    start: float = 0.0

    def __post_init__(self) -> None:
        check_count("schedule warmup", "warmup", self.warmup)
        self.check("start", 0.0, 1.0, "0")

    def at(self, rule: OuterRule, number: int, age: int) -> OuterRule:
        """Return the rule of a round."""
        del age
        return replace(rule, lr=rule.lr * (self.start + (1 - self.start) * min(1.0, number / self.warmup)))


@dataclass(frozen=True)
class _Decay(Schedule):
    rounds: int = 0
    warmup: int = 0
    final: float = 0.0

    def __post_init__(self) -> None:
        check_count(f"schedule {self.name}", "rounds", self.rounds, 0)
        check_count(f"schedule {self.name}", "warmup", self.warmup, 0)
        self.check("final", 0.0, 100.0, "0.1")  # above 1 it rises

    def at(self, rule: OuterRule, number: int, age: int) -> OuterRule:
        """Return the rule of a round."""
        del age
        if not self.rounds:
            raise ValueError(f"schedule {self}: rounds is 0, the run's own, which is not known here; give rounds=N")
        if number <= self.warmup:
            return replace(rule, lr=rule.lr * number / self.warmup)
        share = min(1.0, (number - 1 - self.warmup) / max(1, self.rounds - self.warmup))
        return replace(rule, lr=rule.lr * (self.final + (1 - self.final) * self._shape(share)))

    def _shape(self, share: float) -> float:
        raise NotImplementedError


@register("cosine")
@dataclass(frozen=True)
class Cosine(_Decay):
    """A cosine from the learning rate to `final` times it, over `rounds` (0: the run's) after a warmup."""

    equation = "lr_t = lr (final + (1 - final) (1 + cos(pi (t-1) / T)) / 2)"
    source = "torch.optim.lr_scheduler.CosineAnnealingLR"
    test = _TEST

    def _shape(self, share: float) -> float:
        return (1 + math.cos(math.pi * share)) / 2


@register("linear")
@dataclass(frozen=True)
class Linear(_Decay):
    """A line from the learning rate to `final` times it, over `rounds` (0: the run's); with final above 1 a rise."""

    equation = "lr_t = lr (1 - (1 - final) (t-1) / T)"
    source = "torch.optim.lr_scheduler.LinearLR"
    test = _TEST

    def _shape(self, share: float) -> float:
        return 1 - share


@register("transient")
@dataclass(frozen=True)
class Transient(Schedule):
    """The bias correction of a momentum buffer that begins at 0, again after each restart.

    With it the update's weights on past pseudo-gradients add up to the same number in every round, for hard restarts
    after the step. A restart before g is mixed in still has the factor of the cycle that ends. After a soft restart,
    which keeps or injects something, steps are too long. Methods that make this correction themselves, or whose updates
    have a length of their own, are refused.
    """

    equation = "lr_t = lr / (1 - b^a),  a: rounds since the restart, with Nesterov one more"
    source = "Adam's bias correction, arXiv 1412.6980"
    test = _TEST

    def at(self, rule: OuterRule, number: int, age: int) -> OuterRule:
        """Return the rule of a round."""
        del number
        if rule.momentum == 0:
            return rule
        return replace(rule, lr=rule.lr / -math.expm1((age + rule.nesterov) * math.log(rule.momentum)))


@register("momentum")
@dataclass(frozen=True)
class MomentumWarmup(Schedule):
    """A rise of the momentum from `start` to its own value over some rounds (0: the run's); one of 0 stays 0."""

    equation = "b_t = start + (b - start) min(1, (t-1) / warmup)"
    source = "Sutskever et al. 2013; modded-nanogpt"
    test = _TEST

    warmup: int = 10
    start: float = 0.0

    def over(self, rounds: int) -> MomentumWarmup:
        """Return the same schedule where `warmup=0` stands for a run of so many rounds."""
        return self if self.warmup else replace(self, warmup=rounds)

    def __post_init__(self) -> None:
        check_count("schedule momentum", "warmup", self.warmup, 0)
        self.check("start", 0.0, 1 - 1e-12, "0")

    def at(self, rule: OuterRule, number: int, age: int) -> OuterRule:
        """Return the rule of a round."""
        del age
        if not self.warmup:
            raise ValueError(f"schedule {self}: warmup is 0, the run's own rounds, which are not known here; give them")
        share = min(1.0, (number - 1) / self.warmup)
        momentum = self.start + (rule.momentum - self.start) * share
        # At momentum 0 an optimizer has no buffer, and a later round would lack this one's pseudo-gradient.
        return replace(rule, momentum=max(momentum, _LEAST_MOMENTUM)) if rule.momentum else rule
