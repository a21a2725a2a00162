"""The least configuration that a sweep can plan, for tests with workers that train nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from twophase.base.config import LATER
from twophase.policies.base import RestartPolicy
from twophase.policies.text import parse
from twophase.rule import OuterRule


@dataclass(frozen=True)
class Outer:
    """What planning reads of an outer optimizer."""

    lr: float = 0.7
    momentum: float = 0.9
    restart: str = "never"

    def rule(self) -> OuterRule:
        """As the real one."""
        return OuterRule(self.lr, self.momentum)

    def policy(self) -> RestartPolicy:
        """As the real one."""
        return parse(self.restart)


@dataclass(frozen=True)
class Config:
    """A run; `mode` says how its fake worker behaves."""

    mode: str = "ok"
    seed: int = 0
    outer: Outer = field(default_factory=Outer)
    steps: int = 12
    inner_steps: int = 2
    betas: tuple[float, float] = (0.9, 0.99)
    schedule: str = field(default="cosine", metadata=LATER)
    probed: ClassVar[int] = 0
    shares_steps: ClassVar[bool] = True
