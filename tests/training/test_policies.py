"""Restart policies in a run: the signals that they receive, and what checkpoints hold for them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from commands import outcome
from policies import Longer
from trained import run, run_in_parts
from twophase.base.config import UsageError, with_values
from twophase.restart import Restart, RestartPolicy
from twophase.runs.folder import read_lines
from twophase.tasks.lm.config import TrainConfig
from twophase.training import checkpoint
from twophase.training.config import inner_lr
from twophase.training.trainer import Trainer

STEEP = {"inner.lr": 0.03, "outer.lr": 4.0}
"""Outer steps so long that the loss rises again and again."""
MEMORY = "policy_state"
"""Key in checkpoints: a policy's own memory."""


@pytest.fixture(autouse=True)
def _worse(register_policy: Callable[[str], Any]) -> None:
    """A user's own policy: it restarts when the training loss has risen."""

    @register_policy("worse")
    @dataclass(frozen=True, slots=True)
    class Worse(RestartPolicy):
        needs = frozenset({"train_loss"})

        def decide(self, state, signal):  # type: ignore[no-untyped-def]
            loss = signal.value("train_loss")
            return {"loss": loss}, Restart() if loss > state.get("loss", math.inf) else None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "values", "stops", "fires", "remembers"),
    [
        # Each stop is inside a round; those of `worse` inside one at whose end it fires.
        ("worse", STEEP | {"inner_steps": 4}, (6, 18), True, (MEMORY,)),
        ("worse", STEEP | {"sync.fragments": ("2",)}, (8, 13), True, (MEMORY,)),
        (str(Longer(3)), {"inner_steps": 3}, (5, 14), True, (MEMORY,)),
        ("auto", {"inner_steps": 3}, (5, 14), False, (MEMORY,)),
        ("ramp:0.5", {}, (8, 13), False, ()),
    ],
)
def test_resumed_equals_uninterrupted(
    short_run: TrainConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    policy: str,
    values: dict[str, Any],
    stops: tuple[int, ...],
    fires: bool,
    remembers: tuple[str, ...],
) -> None:
    """A run whose policy has a memory, or needs signals, ends the same when it is stopped and resumed.

    And would not if any of what a checkpoint holds for the policy were lost.
    """
    config = with_values(short_run, {"outer.restart": policy, **values})
    summary = run(config, tmp_path / "whole")
    assert (summary["restarts"] > 0) is fires
    assert not summary["diverged"]
    run_in_parts(config, tmp_path / "parts", stops)
    assert outcome(tmp_path / "parts") == outcome(tmp_path / "whole")
    for key in remembers:
        with monkeypatch.context() as patch:
            forget(patch, key)
            assert run_in_parts(config, tmp_path / key, stops)["checksum"] != summary["checksum"], key


def forget(patch: pytest.MonkeyPatch, key: str) -> None:
    """Let checkpoints be read as if nothing of that name were in them."""

    def without(tree: Any) -> Any:
        if isinstance(tree, dict):
            rest = {name: without(branch) for name, branch in tree.items() if name != key}
            return rest | ({key: "{}"} if key == MEMORY and key in tree else {})  # a state without it is refused
        return [without(branch) for branch in tree] if isinstance(tree, list) else tree

    part, progress = checkpoint.Checkpoint.part, checkpoint.Checkpoint.progress
    patch.setattr(checkpoint.Checkpoint, "part", lambda self, name: without(part(self, name)))
    patch.setattr(checkpoint.Checkpoint, "progress", lambda self: without(progress(self)))


@pytest.fixture
def losses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Every training loss that a trainer reads from the device."""
    read: list[float] = []
    settle = Trainer.settle

    def recorded(self: Trainer) -> None:
        read.extend(loss.item() for loss in self._losses)
        settle(self)

    monkeypatch.setattr(Trainer, "settle", recorded)
    return read


def test_signals_of_a_round(
    short_run: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, losses: list[float]
) -> None:
    """The mean of a round's losses over the replicas, its last learning rate, the share done."""
    seen: list[dict[str, float]] = []
    end_round = Trainer.end_round

    def recorded(self: Trainer, report: Any) -> dict[str, Any]:
        seen.append(dict(report.signals))
        return end_round(self, report)

    monkeypatch.setattr(Trainer, "end_round", recorded)
    config = with_values(short_run, {"inner_steps": 9})
    run(config, tmp_path)
    mean = [sum(losses[2 * step : 2 * step + 2]) / 2 for step in range(22)]
    for signals, (start, stop) in zip(seen, ((0, 9), (9, 18), (18, 22)), strict=True):
        assert signals["train_loss"] == pytest.approx(sum(mean[start:stop]) / (stop - start), rel=1e-6)
        assert (signals["progress"], signals["inner_lr"]) == (stop / 22, inner_lr(config, stop - 1))


def test_a_policy_that_sees_nan_ends_the_run(
    short_run: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A needed signal that is not finite ends the run as diverged, in its round, and the run stays so."""
    signals_of = Trainer._signals

    def broken(self: Trainer, stop: float) -> dict[str, float]:
        return signals_of(self, stop) | ({"progress": math.nan} if self.done.step == 12 else {})

    monkeypatch.setattr(Trainer, "_signals", broken)
    config = with_values(short_run, {"outer.restart": "ramp:0.5"})
    summary = run(config, tmp_path)
    assert (summary["diverged"], summary["exit_reason"], summary["steps"]) == (True, "diverged", 12)
    assert [line["groups"][0]["not_finite"] for line in read_lines(tmp_path / "rounds.jsonl")] == [[], ["progress"]]
    assert run(config, tmp_path)["diverged"]


def test_a_policy_that_needs_what_training_lacks(
    short_run: TrainConfig, tmp_path: Path, register_policy: Callable[[str], Any]
) -> None:
    """It is refused before any training, with the option and the signal's name."""

    @register_policy("warm")
    @dataclass(frozen=True, slots=True)
    class Warm(RestartPolicy):
        needs = frozenset({"temperature", "cosine"})

        def decide(self, state, signal):  # type: ignore[no-untyped-def]
            return state, Restart() if signal.value("temperature") > 1 else None

    with pytest.raises(UsageError, match=r"outer\.restart.* temperature"):
        run(with_values(short_run, {"outer.restart": "warm"}), tmp_path)
    assert not (tmp_path / "rounds.jsonl").exists()


def test_learning_rate_zero_is_a_run(short_run: TrainConfig, tmp_path: Path) -> None:
    """Where the anchor never moves every round counts and is measured all the same."""
    run(with_values(short_run, {"outer.lr": 0.0, "outer.restart": "2"}), tmp_path)
    lines = read_lines(tmp_path / "rounds.jsonl")
    assert [line["restarted"] for line in lines] == [number % 2 == 0 for number in range(1, len(lines) + 1)]
    assert all(line["pseudo_gradient_norm"] > 0 for line in lines)
