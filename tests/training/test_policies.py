"""Restart policies in a run: the signals that they receive, and what cannot be had."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from trained import run
from twophase.config import update
from twophase.files import read_jsonl
from twophase.restart import RestartPolicy
from twophase.runs.config import inner_lr
from twophase.tasks.lm.config import TrainConfig


def test_signals_of_a_round(short_run: TrainConfig, tmp_path: Path, register_policy: Callable[[str], Any]) -> None:
    """The mean of a round's losses over the replicas, its last learning rate, the share done."""
    seen = []

    @register_policy("seeing")
    @dataclass(frozen=True)
    class Seeing(RestartPolicy):
        needs = frozenset({"train_loss", "progress", "inner_lr"})

        def decide(self, state, signal):  # type: ignore[no-untyped-def]
            seen.append(signal.extra)
            return state, None

    config = update(short_run, {"inner_steps": 9, "log_every": 1, "outer.restart": "seeing"})
    run(config, tmp_path)
    losses = [line["train_loss"] for line in read_jsonl(tmp_path / "steps.jsonl")]
    for signals, (start, stop) in zip(seen, ((0, 9), (9, 18), (18, 22)), strict=True):
        assert signals["train_loss"] == pytest.approx(sum(losses[start:stop]) / (stop - start), rel=1e-6)
        assert (signals["progress"], signals["inner_lr"]) == (stop / 22, inner_lr(config, stop - 1))


def test_a_policy_that_sees_nan_ends_the_run(
    short_run: TrainConfig, tmp_path: Path, register_policy: Callable[[str], Any]
) -> None:
    """A needed signal that is not finite ends the run as diverged, in its round, and the run stays so."""

    @register_policy("lossy")
    @dataclass(frozen=True)
    class Lossy(RestartPolicy):
        needs = frozenset({"train_loss"})

        def decide(self, state, signal):  # type: ignore[no-untyped-def]
            pytest.fail(f"asked about {signal} after {state}")

    config = update(short_run, {"outer.restart": "lossy", "inner.lr": 1e30})
    summary = run(config, tmp_path)
    assert (summary["diverged"], summary["exit_reason"], summary["steps"]) == (True, "diverged", 6)
    (line,) = read_jsonl(tmp_path / "rounds.jsonl")
    assert "train_loss" in line["groups"][0]["not_finite"]
    assert run(config, tmp_path)["diverged"]
