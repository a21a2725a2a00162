"""One run: what it leaves, what its policies see, how it diverges, and what it refuses to go on with."""

from __future__ import annotations

import json
import math
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import textmaker
from commands import outcome
from trained import newest, run, trainer_of
from twophase.config import update
from twophase.errors import UsageError
from twophase.files import read_jsonl
from twophase.restart import RestartPolicy
from twophase.runs.config import inner_lr
from twophase.runs.folder import RunFolder
from twophase.tasks.lm.config import TrainConfig
from twophase.tasks.lm.task import corpus_of
from twophase.training import checkpoint


def test_outcome(config: TrainConfig, whole: Path) -> None:
    """The summary counts rounds, restarts and tokens; each log has its lines, and validations as configured."""
    summary = json.loads((whole / "summary.json").read_text())
    assert (summary["rounds"], summary["restarts"], summary["steps"]) == (4, 2, 22)
    assert (summary["tokens"], summary["diverged"], summary["exit_reason"]) == (22 * 2 * 4 * 16, False, "finished")
    assert summary["perplexity"] == pytest.approx(math.exp(summary["validation_loss"]))
    assert summary["perplexity"] < 60  # uniform would be 96
    rounds, metrics, steps = (read_jsonl(whole / f"{name}.jsonl") for name in ("rounds", "metrics", "steps"))
    facts = [(line["step"], line["inner_steps"], line["partial"], line["restarted"]) for line in rounds]
    assert facts == [(6, 6, False, False), (12, 6, False, True), (18, 6, False, False), (22, 4, True, True)]
    assert ["perplexity" in line for line in metrics] == [False, True, False, True]
    assert [line["inner_lr"] for line in metrics] == [inner_lr(config, step - 1) for step in (6, 12, 18, 22)]
    assert [line["step"] for line in steps] == [4, 8, 12, 16, 20]
    assert all(math.isfinite(value) and value > 0 for line in steps for value in line.values())
    means = [
        sum(line["train_loss"] * weight for line, weight in zip(log, weights, strict=False)) / sum(weights)
        for log, weights in ((steps[:3], (4, 4, 4)), (metrics[:2], (6, 6)))
    ]
    assert means[0] == pytest.approx(means[1], rel=1e-12)


GOLDEN = {
    "train_loss": [4.4937783, 4.2595999, 4.0026261, 3.9437581],
    "validation_loss": [4.0546324, 3.9206116],
}
"""Of this run, as the first version trained it."""


def test_golden_numbers(whole: Path) -> None:
    """A rewrite of the loop, the engine, the model or the data changes no step."""
    for name, numbers in GOLDEN.items():
        found = [line[name] for line in read_jsonl(whole / "metrics.jsonl") if name in line]
        assert found == pytest.approx(numbers, rel=1e-5)


def test_weights_are_the_anchor(config: TrainConfig, whole: Path) -> None:
    """The weights file holds the final anchor, which after a round is what every replica holds."""
    weights = load_file(whole / "weights.safetensors")
    trainer = trainer_of(config)
    trainer.load(newest(whole))
    assert "model" not in newest(whole).part("replica-000")
    states = [
        trainer.engine.anchor,
        newest(whole).anchor(),
        *(replica.model.state_dict() for replica in trainer.replicas),
    ]
    for state in states:
        assert state.keys() == weights.keys()
        assert all(torch.equal(state[name], value) for name, value in weights.items())


def test_rounds_of_fragments_are_logged(short_run: TrainConfig, tmp_path: Path) -> None:
    """A line a sync, which names the fragment and its own round; a validation is the anchor's, not a replica's."""
    values = {"sync.fragments": ("3",), "sync.restart": ("0=1", "1=2", "2=never")}
    run(update(short_run, values), tmp_path / "run")
    rounds = read_jsonl(tmp_path / "run" / "rounds.jsonl")
    assert [line["step"] for line in rounds] == [2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22]
    parts = [part for line in rounds for part in line["fragments"]]
    assert [part["name"] for part in parts] == [*"012012012", "0", "1", "0", "2"]  # at the end what is left
    for part in parts:
        period = {"0": 1, "1": 2}.get(part["name"])
        assert part["restarted"] == (period is not None and part["round"] % period == 0)
    assert [line["complete"] for line in rounds] == [line["step"] % 6 == 0 or line["step"] == 22 for line in rounds]
    delayed = update(short_run, {"sync.delay": 4, "sync.mixing": 0.5})
    often, once = (run(update(delayed, {"evaluate_every": n}), tmp_path / str(n)) for n in (1, 0))
    assert often["checksum"] == once["checksum"]
    losses = [line["validation_loss"] for line in read_jsonl(tmp_path / "1" / "metrics.jsonl")]
    assert len(losses) == 3  # after steps 10, 16 and 22
    assert (losses[-1], losses) == (often["validation_loss"], sorted(losses, reverse=True))


@pytest.mark.parametrize("lost", [["summary.json"], ["summary.json", "weights.safetensors"]])
def test_killed_at_the_very_end(config: TrainConfig, whole: Path, tmp_path: Path, lost: list[str]) -> None:
    """A run whose last files are missing writes them again, the same, without training."""
    shutil.copytree(whole, tmp_path / "run")
    for name in lost:
        (tmp_path / "run" / name).unlink()
    run(config, tmp_path / "run", on_line=lambda line: pytest.fail(f"trained again: {line}"))
    assert outcome(tmp_path / "run") == outcome(whole)


def test_trains_on_while_a_checkpoint_is_written(
    config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next round ends while the disk is slow; the checkpoint is that of its own step all the same."""
    config, released, save = (
        update(config, {"checkpoint_every": 1, "keep_checkpoints": 9}),
        threading.Event(),
        torch.save,
    )
    run(config, tmp_path / "quick")

    def slow(*arguments: Any) -> None:
        assert released.wait(30), "training waited for the disk"
        save(*arguments)

    monkeypatch.setattr(torch, "save", slow)
    run(config, tmp_path / "slow", on_line=lambda line: released.set() if line["step"] == 12 else None)
    for folder in ("quick", "slow"):
        assert [saved.step for saved in checkpoint.complete(tmp_path / folder / "checkpoint")] == [6, 12, 18, 22]
    for saved in checkpoint.complete(tmp_path / "slow" / "checkpoint"):
        assert saved.files == checkpoint.read(tmp_path / "quick" / "checkpoint" / saved.path.name).files  # type: ignore[union-attr]


def test_changed_text_is_refused(config: TrainConfig, tmp_path: Path) -> None:
    """A run goes on only with the text that it began with; with the old one back it does."""
    path = textmaker.write(tmp_path / "text.txt")
    config = update(config, {"data.corpus": f"file:{path}"})
    run(config, tmp_path / "run", asked_at=8)
    old = path.read_bytes()
    textmaker.write(path, seed=1)
    corpus_of.cache_clear()
    with pytest.raises(UsageError, match=r"--out .*changed"):
        run(config, tmp_path / "run")
    path.write_bytes(old)
    corpus_of.cache_clear()
    assert run(config, tmp_path / "run")["exit_reason"] == "finished"


@pytest.mark.parametrize(
    "values",
    [
        {"outer.lr": 300.0},
        {"inner.lr": 1e30},
        {"divergence_loss": 0.5},
        {"outer.lr": 300.0, "steps": 6},  # blown up by the only outer step, to a large loss
        {"outer.lr": 30000.0, "steps": 6},  # and to an infinite one
    ],
)
def test_divergence_is_data(config: TrainConfig, tmp_path: Path, values: dict[str, Any]) -> None:
    """A loss above the bound, or none at all (NaN), ends the run early, is recorded as such, and stays so."""
    config = update(config, values)
    summary = run(config, tmp_path)
    assert (summary["diverged"], summary["exit_reason"]) == (True, "diverged")
    assert summary["steps"] < 22
    (tmp_path / "summary.json").unlink()  # killed between the last checkpoint and the summary
    assert run(config, tmp_path)["diverged"]
    assert json.loads((tmp_path / "summary.json").read_text())["steps"] == summary["steps"]


def test_a_finished_run_may_write_no_checkpoint(config: TrainConfig, whole: Path, tmp_path: Path) -> None:
    """With `discard`, as in a sweep, none at its end, also where an earlier call was stopped."""
    run(config, tmp_path, asked_at=14, discard=True)
    assert checkpoint.complete(tmp_path / "checkpoint")[-1].step == 14
    run(config, tmp_path, discard=True)
    assert outcome(tmp_path) == outcome(whole)
    assert checkpoint.complete(tmp_path / "checkpoint")[-1].step < 22


def test_decisions_are_kept(short_run: TrainConfig, tmp_path: Path) -> None:
    """A run goes on with the pieces that memory made its first part choose, in and at the ends of rounds."""
    config = update(short_run, {"compute.precision": "bf16-mixed", "steps": 14})

    def train(name: str, micro: int = 0, stop: int | None = None) -> None:
        trainer = trainer_of(config)
        if micro:
            trainer.compute.chosen["micro_batch"] = micro
        with RunFolder.claim(tmp_path / name, config) as folder:
            assert trainer.run(folder.path, folder, stop=stop)["execution"]["micro_batch"] == (micro or 1)

    train("little", 1)
    train("plenty", 4)
    for stop in (8, 12):
        train("parts", 1, stop)
        train("parts")
        assert outcome(tmp_path / "parts") == outcome(tmp_path / "little")
        (tmp_path / "parts").rename(tmp_path / f"parts-{stop}")
    assert outcome(tmp_path / "plenty")["weights"] != outcome(tmp_path / "little")["weights"]


@pytest.fixture
def seen(register_policy: Callable[[str], Any]) -> list[Any]:
    """What the policy `seeing` is told in each round, which it asks for and answers with nothing."""
    signals: list[Any] = []

    @register_policy("seeing")
    @dataclass(frozen=True)
    class Seeing(RestartPolicy):
        needs = frozenset({"train_loss", "progress", "inner_lr"})

        def decide(self, state, signal):  # type: ignore[no-untyped-def]
            signals.append(signal.extra)
            return state, None

    return signals


def test_signals_of_a_round(short_run: TrainConfig, tmp_path: Path, seen: list[Any]) -> None:
    """The mean of a round's losses over the replicas, its last learning rate, the share done."""
    config = update(short_run, {"inner_steps": 9, "log_every": 1, "outer.restart": "seeing"})
    run(config, tmp_path)
    losses = [line["train_loss"] for line in read_jsonl(tmp_path / "steps.jsonl")]
    for signals, (start, stop) in zip(seen, ((0, 9), (9, 18), (18, 22)), strict=True):
        assert signals["train_loss"] == pytest.approx(sum(losses[start:stop]) / (stop - start), rel=1e-6)
        assert (signals["progress"], signals["inner_lr"]) == (stop / 22, inner_lr(config, stop - 1))


def test_a_policy_that_would_see_nan_ends_the_run(short_run: TrainConfig, tmp_path: Path, seen: list[Any]) -> None:
    """A needed signal that is not finite ends the run as diverged, in its round, and the run stays so."""
    config = update(short_run, {"outer.restart": "seeing", "inner.lr": 1e30})
    summary = run(config, tmp_path)
    assert (summary["diverged"], summary["exit_reason"], summary["steps"]) == (True, "diverged", 6)
    assert seen == []
    (line,) = read_jsonl(tmp_path / "rounds.jsonl")
    assert "train_loss" in line["groups"][0]["not_finite"]
    assert run(config, tmp_path)["diverged"]
