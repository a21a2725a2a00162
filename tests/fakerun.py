"""The least configuration that a sweep can plan, for tests with workers that train nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from twophase.base.config import LATER, from_tree, with_values
from twophase.restart import RestartPolicy, parse
from twophase.rule import OuterRule
from twophase.runs.folder import RunFolder
from twophase.sweeps.grid import Axis, Sweep, product
from twophase.sweeps.work import Work


@dataclass(frozen=True)
class Outer:
    """What planning reads of an outer optimizer."""

    lr: float = 0.7
    momentum: float = 0.9
    restart: str = "never"

    def known_rule(self) -> OuterRule:
        """As the real one."""
        return OuterRule(self.lr, self.momentum)

    rule = known_rule

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
    shares_steps: ClassVar[bool] = True


def grid(**axes: Sequence[Any]) -> Sweep:
    """A grid over values of the outer optimizer."""
    return Sweep("fake", Config(), product(Config(), [Axis(f"outer.{name}", tuple(axes[name])) for name in axes]))


def work_of(folder: Path) -> Work:
    """The plan in a sweep's folder."""
    made = Work.read(folder)
    assert made is not None
    return made


def finish(plan: Work, run: str) -> None:
    """Leave what a run leaves that ended well."""
    config = with_values(from_tree(Config, plan.base), plan.runs[run])
    with RunFolder.claim(plan.run_folder(run), config) as folder:
        numbers = {"validation_loss": 2.0, "perplexity": 7.4, "tokens": 1, "seconds": 1.0}
        folder.finish(numbers | {"diverged": False, "exit_reason": "end"})
