"""A run that is stopped anywhere and repeated has the bits and the logs of an uninterrupted one, on any ranks."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from commands import outcome
from forked import bring, in_processes
from policies import Longer
from trained import run, weightless_bytes
from twophase.config import to_tree, update
from twophase.diloco.group import ProcessGroup
from twophase.restart import Restart, RestartPolicy, register
from twophase.tasks.lm.config import TrainConfig
from twophase.tasks.registry import config_of


@register("test-worse")
@dataclass(frozen=True)
class Worse(RestartPolicy):
    """A policy that restarts when the training loss has risen."""

    needs = frozenset({"train_loss"})

    def decide(self, state, signal):  # type: ignore[no-untyped-def]
        loss = signal.value("train_loss")
        return {"loss": loss}, Restart() if loss > state.get("loss", math.inf) else None


STEEP = {"inner.lr": 0.03, "outer.lr": 4.0, "inner_steps": 4, "outer.restart": "test-worse"}
"""Outer steps so long that the loss rises again and again."""
CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {"outer.method": "averaging", "evaluate_every": 1},
    "restarts": {"outer.restart": "soft:2:0.5:0.1", "log_every": 4},
    "auto": {"outer.restart": "auto", "inner_steps": 3},
    "policy with a memory": {"outer.restart": str(Longer(2)), "inner_steps": 3},
    "policy of the loss": STEEP,
    "schedule": {"outer.schedule": "linear:2", "outer.filter": "clip:0.1"},
    "schedule of the momentum": {"outer.schedule": "momentum:0"},
    "outer adamw": {"outer.method": "adamw", "outer.restart": "2", "outer.filter": "orthogonal"},
    "fragments, delay, mixing": {
        "sync.fragments": ("3",), "sync.restart": ("0=1", "1=2", "2=never"), "sync.delay": 2, "sync.mixing": 0.5,
        "evaluate_every": 1,
    },
    "named fragments, int8": {"sync.fragments": ("ends=embed|head|norm", "rest=."), "sync.compression": "int8"},
    "bfloat16": {"sync.compression": "bfloat16", "sync.fragments": ("2",), "sync.stagger": False, "sync.delay": 1},
    "inner sgd": {"inner.method": "sgd", "inner.momentum": 0.5},
    "inner muon": {"inner.method": "muon", "inner.clip_norm": 0.5},
    "schedule-free": {"inner.method": "schedule-free", "inner.schedule": "constant"},
    "mixed precision": {"compute.precision": "bf16-mixed", "compute.micro_batch": 2},
}  # fmt: skip
SEEN_BY_RANKS = [
    name for name in CONFIGS if name not in ("plain", "schedule of the momentum", "inner sgd", "inner muon")
]
"""Those of which ranks send each other what no other has them send."""
STOPS = (1, 6, 8, 20)
"""Inner steps at which runs are stopped: in and at the ends of rounds, while reductions are under way."""


def differences(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    return [name for name in wanted if found[name] != wanted[name]]


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_resumed_equals_uninterrupted(short_run: TrainConfig, tmp_path: Path, name: str) -> None:
    """Weights, summary and logs are equal; stopped by request, and before a sync, where forks begin."""
    config = update(short_run, CONFIGS[name])
    summary = run(config, tmp_path / "whole")
    assert summary["exit_reason"] == "finished"
    if name.startswith("policy"):
        assert summary["restarts"] > 0
    for number, stop in enumerate(STOPS):
        how: dict[str, Any] = {"stop" if number % 2 == 0 else "asked_at": stop}
        assert run(config, tmp_path / "parts", **how)["steps"] == stop
    run(config, tmp_path / "parts")
    assert differences(outcome(tmp_path / "parts"), outcome(tmp_path / "whole")) == []


# -------------------------------------------------------------------------------------------------------- on two ranks


def on_a_rank(rank: int) -> dict[str, Any]:
    """Train every configuration resumed, and from where one process has stopped, up to step 14."""
    folder, group = Path(sys.argv[2]), ProcessGroup(timeout=60)
    for number, tree in enumerate(json.loads((folder / "configs.json").read_text())):
        config, place = config_of(tree), folder / str(number)
        for stop in (6, 8, 20, None):
            run(config, place / "two", group=group, stop=stop)
        run(config, place / "one, two, one", group=group, stop=14)
    return {"rank": rank}


@pytest.mark.dist
def test_ranks_equal_one_process(short_run: TrainConfig, tmp_path: Path) -> None:
    """Two ranks, resumed again and again, and a run that goes from one process to two and back: the bits of one.

    With compression what a rank owed is lost where the number of ranks changes.
    """
    configs = {name: update(short_run, CONFIGS[name]) for name in SEEN_BY_RANKS}
    folders = {name: tmp_path / str(number) for number, name in enumerate(configs)}
    for name, config in configs.items():
        run(config, folders[name] / "one")
        run(config, folders[name] / "one, two, one", stop=8)
    (tmp_path / "configs.json").write_text(json.dumps(list(map(to_tree, configs.values()))))
    in_processes(__file__, tmp_path, 2)
    for name, config in configs.items():
        assert run(config, folders[name] / "one, two, one")["exit_reason"] == "finished"
        one = weightless_bytes(outcome(folders[name] / "one"))
        for other in ("two", "one, two, one") if config.sync.compression == "float32" else ("two",):
            assert differences(weightless_bytes(outcome(folders[name] / other)), one) == [], (name, other)


if __name__ == "__main__":
    bring(on_a_rank, 2)
