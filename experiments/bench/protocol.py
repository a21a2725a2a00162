"""What the bench compares: places, arms and budget, fixed before the runs.

A place is a task with a size, a length, a communication period, a number of replicas and an inner schedule. At every
place each arm has the same number of settings for its search, on tuning seeds; what it found is judged on held-out
seeds. All of it is the protocol; a change of anything raises `PROTOCOL`, and numbers of different protocols are never
compared. The search is `bracket`. The stored tables are of protocol 1, whose arms are in `tables.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from twophase.config import update
from twophase.tasks.registry import LM, config_class

FOLDER = Path(__file__).parent
sys.path.insert(1, str(FOLDER.parent))  # policies and common, of all experiments

PROTOCOL = 2
HEAVY_BALL, NESTEROV = "heavy-ball outer.momentum=~0.6", "nesterov outer.momentum=~0.6"
"""Rules whose momentum is tuned, and where its search begins."""
AUTO, FILTER, RAMP = "averaging outer.restart=auto", "outer.filter=orthogonal", "averaging outer.restart=ramp:~0.5"
CANDIDATES = (AUTO, f"averaging {FILTER}", f"{AUTO} {FILTER}")
"""Arms without an outer number to tune."""
SCHEDULES = (
    "averaging outer.lr=~1 outer.schedule=linear:2",
    f"{HEAVY_BALL} outer.schedule=momentum:0",
    RAMP,
    "averaging outer.restart=along:~0.5",
    "averaging outer.restart=gain:~1",
)
"""Controls of `auto`: what depends on the round alone, or is one part of it."""
_RESTARTS = ("", " outer.restart=3", " outer.restart=K")
MOMENTUM = tuple(f"{rule}{restart}" for rule in (HEAVY_BALL, NESTEROV) for restart in _RESTARTS)
OTHERS = (f"{NESTEROV} {FILTER}", *(f"{name}{restart}" for name in ("adamw", "muon") for restart in _RESTARTS[:2]))
ARMS = (*CANDIDATES, *SCHEDULES, *MOMENTUM, *OTHERS)
"""Beside averaging, at every place of the full list."""
FEW = (*CANDIDATES, RAMP, NESTEROV, f"{NESTEROV} outer.restart=3")
"""At the places that are there for a trend."""


@dataclass(frozen=True)
class Place:
    """Where arms are compared; `values` of the configuration are by dotted path."""

    name: str
    title: str
    values: Mapping[str, Any]
    task: str = LM
    few: bool = False
    """Whether only `FEW` are compared, with five eighths of the settings, on five held-out seeds."""

    def base(self) -> Any:
        """Return the configuration of its runs, of which the inner learning rate is where searches begin."""
        named = {"task.name": self.task} if self.task != LM else {}
        return update(config_class(self.task)(), {**named, "inner.lr": 8e-3, "inner.schedule": "cosine", **self.values})

    @property
    def arms(self) -> tuple[str, ...]:
        """Arms that are compared with averaging."""
        return FEW if self.few else ARMS


def _place(name: str, title: str, replicas: int, inner_steps: int, steps: int, **values: Any) -> Place:
    task, few = values.pop("task", LM), values.pop("few", False)
    dotted = {path.replace("__", "."): value for path, value in values.items()}
    return Place(name, title, {"replicas": replicas, "inner_steps": inner_steps, "steps": steps} | dotted, task, few)


PLACES = (
    _place("short", "2 replicas, S = 16, 30 rounds, cosine, width 32", 2, 16, 480),
    _place("non-iid", "4 replicas, each with its own kind of document, S = 16, 30 rounds", 4, 16, 480,
           data__split="non-iid", data__batch_size=4),
    _place("one-replica", "1 replica, S = 16, 60 rounds", 1, 16, 960),
    _place("code", "2 replicas, a second text, S = 16, 30 rounds, wsd", 2, 16, 480,
           data__corpus="python-code", inner__schedule="wsd"),
    _place("digits", "4 replicas, a small image classifier, S = 8, 20 rounds", 4, 8, 160,
           task="digits", inner__lr=32e-3),
    _place("sparse", "2 replicas, S = 64, 12 rounds, wsd", 2, 64, 768, inner__schedule="wsd", inner__lr=4e-3),
    _place("eight", "8 replicas, S = 8, 30 rounds", 8, 8, 240, data__batch_size=4),
    _place("long", "2 replicas, S = 16, 60 rounds", 2, 16, 960),
    _place("width-64", "as short, 15 rounds, width 64", 2, 16, 240, few=True,
           model__hidden_size=64, model__intermediate_size=176),
    _place("width-128", "as short, 15 rounds, width 128", 2, 16, 240, few=True,
           model__hidden_size=128, model__intermediate_size=352, model__heads=4, inner__lr=4e-3),
    _place("width-256", "as short, 10 rounds, width 256", 2, 16, 160, few=True,
           model__hidden_size=256, model__intermediate_size=704, model__heads=8, inner__lr=2e-3),
    _place("inner-muon", "as short, inner Muon in the place of AdamW", 2, 16, 480, few=True,
           inner__method="muon", inner__lr=16e-3),
)  # fmt: skip
"""All places; the first eight have all arms."""


@dataclass(frozen=True)
class Size:
    """How much is spent on an arm at a place: settings of its search, tuning seeds, and held-out (`fresh`) seeds."""

    points: int
    seeds: tuple[int, ...]
    fresh: tuple[int, ...]
    places: tuple[str, ...] = field(default=tuple(place.name for place in PLACES))

    def at(self, place: Place) -> Size:
        """Return what is spent at a place."""
        if not place.few:
            return self
        return Size(max(self.points * 5 // 8, 1), self.seeds, self.fresh[:5], self.places)


FULL = Size(16, (0, 1), tuple(range(100, 110)))
QUICK = Size(10, (0,), tuple(range(100, 105)), tuple(place.name for place in PLACES if not place.few))
TRIAL = _place("trial", "digits, 2 replicas, 2 rounds: shows that the bench runs", 2, 4, 8, task="digits")
"""No place of the protocol."""
TINY = Size(1, (0,), (100, 101), (TRIAL.name,))
SIZES = {"tiny": TINY, "quick": QUICK, "full": FULL}
