"""A run of the recipe: its outcome, its logs, stopping and resuming, divergence."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import textmaker
from twophase.config import UsageError, with_values
from twophase.diloco.comm import SingleProcess
from twophase.experiment.run import RunFolder, read_lines
from twophase.lm import checkpoint
from twophase.lm.config import DataConfig, ModelConfig, TrainConfig, check
from twophase.lm.train import _restore, train
from twophase.lm.trainer import Trainer, inner_lr, preflight
from twophase.lm.trainer import _corpus as build


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    """A run of a second: 3 full rounds and a shorter one, with a restart after the second."""
    corpus = textmaker.write(tmp_path / "text.txt")
    base = TrainConfig(
        model=ModelConfig(layers=1, hidden_size=16, intermediate_size=24),
        data=DataConfig(corpus=f"file:{corpus}", sequence_length=16, batch_size=4, validation_windows=8),
        steps=22,
        inner_steps=6,
        checkpoint_every=2,
    )
    return with_values(base, {"outer.restart": "2"})


def run(config: TrainConfig, path: Path, **options: Any) -> dict[str, Any]:
    with RunFolder.claim(path, config) as folder:
        return train(config, folder, **options)


def timeless(record: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key not in ("seconds", "engine_share")}


def test_outcome(config: TrainConfig, tmp_path: Path) -> None:
    """The summary counts rounds, restarts and tokens, learns something, and is what lies on disk."""
    summary = run(config, tmp_path / "run")
    assert (summary["rounds"], summary["restarts"], summary["steps"]) == (4, 2, 22)
    assert summary["tokens"] == 22 * 2 * 4 * 16
    assert not summary["diverged"]
    assert summary["exit_reason"] == "finished"
    assert summary["perplexity"] == pytest.approx(math.exp(summary["validation_loss"]))
    assert summary["perplexity"] < 60  # uniform would be 96
    saved = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert {key: saved[key] for key in summary} == summary


def test_logs(config: TrainConfig, tmp_path: Path) -> None:
    """One line a round in each log; the last round is shorter and says so; validation where it was asked for."""
    run(replace(config, evaluate_every=2), tmp_path / "run")
    rounds = read_lines(tmp_path / "run" / "rounds.jsonl")
    assert [line["inner_steps"] for line in rounds] == [6, 6, 6, 4]
    assert [line["partial"] for line in rounds] == [False, False, False, True]
    assert [line["restarted"] for line in rounds] == [False, True, False, True]
    assert [line["step"] for line in rounds] == [6, 12, 18, 22]
    metrics = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert ["perplexity" in line for line in metrics] == [False, True, False, True]
    assert [line["inner_lr"] for line in metrics] == [inner_lr(config, step - 1) for step in (6, 12, 18, 22)]


def test_weights_are_the_anchor(config: TrainConfig, tmp_path: Path) -> None:
    """The weights file holds the final anchor, which after a round is what every replica holds."""
    run(config, tmp_path / "run")
    weights = load_file(tmp_path / "run" / "weights.safetensors")
    newest = checkpoint.latest(tmp_path / "run" / "checkpoint")
    assert newest is not None
    for replica in (0, 1):
        state = torch.load(newest / checkpoint.replica_file(replica), weights_only=True)
        assert all(torch.equal(state["model"][name], value) for name, value in weights.items())


@pytest.mark.parametrize("stops", [(3,), (6,), (8, 14, 20), (21,), (1, 2, 3, 13)])
def test_resumed_equals_uninterrupted(config: TrainConfig, tmp_path: Path, stops: tuple[int, ...]) -> None:
    """Stopped inside and at the end of rounds and resumed, a run ends with the same bytes, numbers and log lines."""
    whole = run(config, tmp_path / "whole")
    for stop in stops:
        calls = iter(range(1, 1000))
        start = checkpoint.latest_step(tmp_path / "parts" / "checkpoint") or 0
        # Asked once a step, the last step excepted.
        part = run(config, tmp_path / "parts", should_stop=lambda s=stop, b=start, c=calls: b + next(c) >= s)
        assert part["exit_reason"] == "stopped"
        assert part["steps"] == stop
    parts = run(config, tmp_path / "parts")
    assert timeless(parts) == timeless(whole)
    assert (tmp_path / "parts" / "weights.safetensors").read_bytes() == (
        tmp_path / "whole" / "weights.safetensors"
    ).read_bytes()
    for log in ("metrics.jsonl", "rounds.jsonl"):
        lines = [[timeless(line) for line in read_lines(tmp_path / name / log)] for name in ("whole", "parts")]
        assert lines[0] == lines[1]


@pytest.mark.parametrize("lost", [["summary.json"], ["summary.json", "weights.safetensors"]])
def test_killed_at_the_very_end(config: TrainConfig, tmp_path: Path, lost: list[str]) -> None:
    """A run whose last files are missing writes them again, the same, without training."""
    whole = run(config, tmp_path / "run")
    weights = (tmp_path / "run" / "weights.safetensors").read_bytes()
    for name in lost:
        (tmp_path / "run" / name).unlink()

    def complain(line: dict[str, Any]) -> None:
        raise AssertionError(f"trained again: {line}")

    again = run(config, tmp_path / "run", on_round=complain)
    assert timeless(again) == timeless(whole)
    assert (tmp_path / "run" / "weights.safetensors").read_bytes() == weights


@pytest.mark.parametrize("values", [{"outer.lr": 300.0}, {"inner.lr": 1e30}, {"divergence_loss": 0.5}])
def test_divergence_is_data(config: TrainConfig, tmp_path: Path, values: dict[str, float]) -> None:
    """A loss above the bound, or none at all (NaN), ends the run early, is recorded as such, and stays so."""
    config = with_values(config, values)
    summary = run(config, tmp_path / "run")
    assert summary["diverged"]
    assert summary["exit_reason"] == "diverged"
    assert summary["steps"] < config.steps
    (tmp_path / "run" / "summary.json").unlink()  # killed between the last checkpoint and the summary
    again = run(config, tmp_path / "run")
    assert again["diverged"]
    assert again["steps"] == summary["steps"]


@pytest.mark.parametrize("lr", [300.0, 2000.0, 30000.0])
def test_blown_up_by_the_last_round(config: TrainConfig, tmp_path: Path, lr: float) -> None:
    """A run whose only outer step destroys it is diverged, however large or infinite its validation loss."""
    config = with_values(config, {"outer.lr": lr, "steps": 6, "inner_steps": 6})
    assert run(config, tmp_path / "run")["diverged"]
    saved = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert saved["diverged"] is True
    assert saved["exit_reason"] == "diverged"


def test_changed_text_is_refused(config: TrainConfig, tmp_path: Path) -> None:
    """A run does not go on with another text than it began with; with the old one back it does."""
    calls = iter(range(1, 1000))
    run(config, tmp_path / "run", should_stop=lambda: next(calls) >= 8)
    path = tmp_path / "text.txt"
    old = path.read_bytes()
    textmaker.write(path, seed=1)
    build.cache_clear()
    with pytest.raises(UsageError, match=r"--data\.corpus file:.*: the text is not the one that this run began with"):
        run(config, tmp_path / "run")
    path.write_bytes(old)
    build.cache_clear()
    assert run(config, tmp_path / "run")["exit_reason"] == "finished"


def test_a_round_begun_by_one_process_counts_once(config: TrainConfig, tmp_path: Path) -> None:
    """The losses of an unfinished round are kept by the first process only when several go on with it."""

    class Second(SingleProcess):
        """A second process of one, as far as the loading of progress is concerned."""

        rank = 1

    calls = iter(range(1, 1000))
    run(config, tmp_path / "run", should_stop=lambda: next(calls) >= 3)
    with RunFolder.claim(tmp_path / "run", config) as folder:
        assert _restore(Trainer(config, SingleProcess()), folder).round_loss > 0
        other = Trainer(replace(config, replicas=2), Second())
        other.replicas = []
        assert _restore(other, folder).round_loss == 0


def test_seeds_differ(config: TrainConfig, tmp_path: Path) -> None:
    """The seed changes the run, and the same seed repeats it."""
    sums = [run(replace(config, seed=seed), tmp_path / str(n))["checksum"] for n, seed in enumerate((0, 1, 0))]
    assert sums[0] == sums[2] != sums[1]


def test_inner_lr() -> None:
    """Linear warmup to the peak, then cosine to zero, against the formula by hand."""
    config = with_values(TrainConfig(steps=100, inner_steps=10), {"inner.lr": 2.0, "inner.warmup": 0.1})
    assert [inner_lr(config, step) for step in (0, 4, 9)] == pytest.approx([0.2, 1.0, 2.0])
    assert inner_lr(config, 10) == 2.0
    assert inner_lr(config, 55) == pytest.approx(1.0)
    assert inner_lr(config, 99) == pytest.approx(1 + math.cos(math.pi * 89 / 90), abs=1e-12)
    flat = with_values(config, {"inner.warmup": 0.0})
    assert inner_lr(flat, 0) == 2.0
    assert inner_lr(with_values(config, {"inner.warmup": 1.0}), 99) == 2.0


BAD_VALUES = [
    ({"outer.momentum": 1.0}, r"--outer\.momentum is 1\.0; it must lie in \[0, 1\)"),
    ({"outer.lr": -0.1}, r"--outer\.lr is -0\.1; it must be a finite number >= 0"),
    ({"outer.restart": "0"}, r"--outer\.restart: .*period is 0; it must be a whole number >= 1"),
    ({"outer.restart": "often"}, r"--outer\.restart: restart 'often' is not known; write never"),
    (
        {"inner_steps": 23},
        r"--inner-steps is 23; it must be at most steps \(22\); lower --inner-steps",
    ),
    ({"inner_steps": 0}, r"--inner-steps is 0; it must be a whole number >= 1"),
    ({"replicas": 0}, r"--replicas is 0"),
    ({"inner.lr": 0.0}, r"--inner\.lr is 0\.0; it must be a finite number above 0"),
    ({"inner.lr": math.nan}, r"--inner\.lr is nan"),
    ({"inner.betas": (0.9, 1.0)}, r"--inner\.betas"),
    ({"inner.warmup": 1.5}, r"--inner\.warmup is 1\.5"),
    ({"inner.weight_decay": -1.0}, r"--inner\.weight-decay is -1\.0"),
    ({"inner.clip_norm": -1.0}, r"--inner\.clip-norm"),
    ({"data.held_out": 1.0}, r"--data\.held-out is 1\.0; it must be between 0 and 1"),
    ({"model.hidden_size": 17}, r"--model\.hidden-size is 17; it must be a multiple of 2 x heads = 4"),
    ({"model.kv_heads": 3}, r"--model\.kv-heads is 3"),
    ({"model.rope_theta": 0.0}, r"--model\.rope-theta"),
    ({"model.norm_eps": 0.0}, r"--model\.norm-eps"),
    ({"seed": -1}, r"--seed is -1"),
    ({"seed": 2**63}, r"--seed is 9223372036854775808; it must be a whole number >= 0 and below 2\^63"),
    ({"device": "meta"}, r"--device meta cannot be used here"),
    ({"evaluate_every": -1}, r"--evaluate-every"),
    ({"divergence_loss": -1.0}, r"--divergence-loss"),
    ({"device": "abacus"}, r"--device abacus cannot be used here .*; use --device cpu"),
]


@pytest.mark.parametrize(("values", "message"), BAD_VALUES)
def test_impossible_values(config: TrainConfig, values: dict[str, Any], message: str) -> None:
    """Each impossible value is refused before anything is made, by option, value, range and remedy."""
    with pytest.raises(UsageError, match=message):
        preflight(with_values(config, values))


def test_defaults_are_possible() -> None:
    """The default configuration passes its own check."""
    assert check(TrainConfig()) == TrainConfig()


def test_replicas_and_processes(config: TrainConfig) -> None:
    """Replicas that the processes cannot share evenly are refused with both numbers."""
    with pytest.raises(UsageError, match=r"--replicas is 2 and there are 3 processes.*--replicas 3"):
        preflight(config, processes=3)
