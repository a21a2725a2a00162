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

    values: Mapping[str, Any]
    few: bool = False

    def base(self) -> RunConfig:
        """Return the configuration of its runs; searches begin at its inner learning rate."""
        values = {"inner.lr": 8e-3, "inner.schedule": "cosine", **self.values}
        return run_config(values.pop("task", LM), values)


def _runs(replicas: int, inner_steps: int, rounds: int, values: Mapping[str, Any] | None = None) -> dict[str, Any]:
    return {"replicas": replicas, "inner_steps": inner_steps, "steps": rounds * inner_steps, **(values or {})}


def _width(width: int, heads: int, rounds: int, lr: float) -> dict[str, Any]:
    sizes = {"model.hidden_size": width, "model.intermediate_size": width * 11 // 4, "model.heads": heads}
    return _runs(2, 16, rounds, {"inner.lr": lr, **sizes})


WORKLOADS = {
    "short": Workload(_runs(2, 16, 30)),  # the small Llama, width 32
    "non-iid": Workload(_runs(4, 16, 30, {"data.split": "non-iid", "data.batch_size": 4})),  # a kind of text a replica
    "one-replica": Workload(_runs(1, 16, 60)),
    "code": Workload(_runs(2, 16, 30, {"data.corpus": "python-code", "inner.schedule": "wsd"})),
    "digits": Workload(_runs(4, 8, 20, {"task": "digits", "inner.lr": 32e-3})),  # a small image classifier
    "sparse": Workload(_runs(2, 64, 12, {"inner.schedule": "wsd", "inner.lr": 4e-3})),
    "eight": Workload(_runs(8, 8, 30, {"data.batch_size": 4})),
    "long": Workload(_runs(2, 16, 60)),
    "width-64": Workload(_width(64, 2, 15, 8e-3), few=True),
    "width-128": Workload(_width(128, 4, 15, 4e-3), few=True),
    "width-256": Workload(_width(256, 8, 10, 2e-3), few=True),
    "inner-muon": Workload(_runs(2, 16, 30, {"inner.method": "muon", "inner.lr": 16e-3}), few=True),
}
TRIAL = Workload(_runs(2, 4, 2, {"task": "digits"}))
"""Outside the protocol: shows that the bench runs."""


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
