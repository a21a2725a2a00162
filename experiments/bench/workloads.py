"""The protocol of the bench: workloads, methods and budgets, fixed before the runs.

A workload is a task with a size, a length, a communication period, a number of replicas and an inner schedule. At each
of them every method tries the same number of settings on tuning seeds, by the search of `twophase tune`; its best one
is compared with averaging's on held-out seeds. A change of anything raises `PROTOCOL`, and numbers of different
protocols are never compared. The stored rows, `reference.csv`, are of protocol 1 (registration-1.md), which had a
bracketing search and other methods; their names are in `tables.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from twophase.api import run_config
from twophase.runs.config import RunConfig
from twophase.tasks.registry import LM

PROTOCOL = 3
HEAVY_BALL, NESTEROV = "heavy-ball outer.momentum=~0.6", "nesterov outer.momentum=~0.6"
"""DiLoCo's momentum of 0.9 is known to be far from good here, so the search begins below."""
_FILTER = "outer.filter=orthogonal"
METHODS = (
    "averaging outer.restart=auto",
    f"averaging {_FILTER}",
    f"averaging outer.restart=auto {_FILTER}",
    "averaging outer.lr=~1 outer.schedule=linear:2",
    f"{HEAVY_BALL} outer.schedule=momentum:0",
    "averaging outer.restart=along:~0.5",
    "averaging outer.restart=ramp:~0.5",
    "averaging outer.restart=gain:~1",
    *(
        f"{rule}{restart}"
        for rule in (HEAVY_BALL, NESTEROV)
        for restart in ("", " outer.restart=3", " outer.restart=K")
    ),
    f"{NESTEROV} {_FILTER}",
    *(f"{rule}{restart}" for rule in ("adamw", "muon") for restart in ("", " outer.restart=3")),
)
"""Compared with averaging at the first eight workloads."""
FEW = (*METHODS[:3], METHODS[6], NESTEROV, f"{NESTEROV} outer.restart=3")
"""At the workloads that are there for a trend."""


@dataclass(frozen=True)
class Workload:
    """Where methods are compared; `values` of the configuration are by dotted path, `few` means `FEW` methods alone."""

    title: str
    values: Mapping[str, Any]
    few: bool = False

    def base(self) -> RunConfig:
        """Return the configuration of its runs; searches begin at its inner learning rate."""
        values = {"inner.lr": 8e-3, "inner.schedule": "cosine", **self.values}
        return run_config(values.pop("task", LM), values)


def _runs(replicas: int, inner_steps: int, rounds: int, **values: Any) -> dict[str, Any]:
    dotted = {path.replace("__", "."): value for path, value in values.items()}
    return {"replicas": replicas, "inner_steps": inner_steps, "steps": rounds * inner_steps, **dotted}


def _width(hidden_size: int, heads: int, rounds: int, lr: float) -> dict[str, Any]:
    model = {
        "model__hidden_size": hidden_size,
        "model__intermediate_size": hidden_size * 11 // 4,
        "model__heads": heads,
    }
    return _runs(2, 16, rounds, inner__lr=lr, **model)


WORKLOADS = {
    "short": Workload("2 replicas, S = 16, 30 rounds, cosine, width 32", _runs(2, 16, 30)),
    "non-iid": Workload(
        "4 replicas, each with its own kind of document, S = 16, 30 rounds",
        _runs(4, 16, 30, data__split="non-iid", data__batch_size=4),
    ),
    "one-replica": Workload("1 replica, S = 16, 60 rounds", _runs(1, 16, 60)),
    "code": Workload(
        "2 replicas, a second text, S = 16, 30 rounds, wsd",
        _runs(2, 16, 30, data__corpus="python-code", inner__schedule="wsd"),
    ),
    "digits": Workload(
        "4 replicas, a small image classifier, S = 8, 20 rounds", _runs(4, 8, 20, task="digits", inner__lr=32e-3)
    ),
    "sparse": Workload("2 replicas, S = 64, 12 rounds, wsd", _runs(2, 64, 12, inner__schedule="wsd", inner__lr=4e-3)),
    "eight": Workload("8 replicas, S = 8, 30 rounds", _runs(8, 8, 30, data__batch_size=4)),
    "long": Workload("2 replicas, S = 16, 60 rounds", _runs(2, 16, 60)),
    "width-64": Workload("as short, 15 rounds, width 64", _width(64, 2, 15, 8e-3), few=True),
    "width-128": Workload("as short, 15 rounds, width 128", _width(128, 4, 15, 4e-3), few=True),
    "width-256": Workload("as short, 10 rounds, width 256", _width(256, 8, 10, 2e-3), few=True),
    "inner-muon": Workload(
        "as short, inner Muon in the place of AdamW", _runs(2, 16, 30, inner__method="muon", inner__lr=16e-3), few=True
    ),
}
TRIAL = Workload("digits, 2 replicas, 2 rounds: shows that the bench runs", _runs(2, 4, 2, task="digits"))
"""Outside the protocol."""


@dataclass(frozen=True)
class Size:
    """Budget of a method at a workload: settings of its search, tuning seeds, and held-out (`fresh`) seeds."""

    points: int
    seeds: tuple[int, ...]
    fresh: tuple[int, ...]
    workloads: Mapping[str, Workload]

    def at(self, workload: Workload) -> tuple[int, tuple[int, ...]]:
        """Return settings and held-out seeds there: five eighths of the settings and five seeds where `few`."""
        return (max(self.points * 5 // 8, 1), self.fresh[:5]) if workload.few else (self.points, self.fresh)


SIZES = {
    "tiny": Size(1, (0,), (100, 101), {"trial": TRIAL}),
    "quick": Size(10, (0,), tuple(range(100, 105)), {k: w for k, w in WORKLOADS.items() if not w.few}),
    "full": Size(16, (0, 1), tuple(range(100, 110)), WORKLOADS),
}
