"""From a text to a trained model by the command line: prepared once, killed, dealt anew, the same bits."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import shardmaker
import textmaker
from commands import SMALL, outcome
from extras import need
from trained import end_group, newest, run, start_group, stop_after
from twophase.base.config import from_tree, load_yaml, to_tree
from twophase.cli.main import main
from twophase.recipes.pretraining import nano
from twophase.runs.folder import read_lines, read_summary
from twophase.tasks.lm import step
from twophase.tasks.lm.config import TrainConfig
from twophase.tasks.lm.speed import flops_per_token
from twophase.training import checkpoint
from twophase.training.config import ComputeConfig

need("pyarrow", "the extra 'data' is not installed")

T, BATCH, END = 16, 4, 256
STEPS, LOG_EVERY = 84, 4
# A round has 6 steps, so lines of steps.jsonl begin and end inside rounds.
LONG = f"--steps {STEPS} --log-every {LOG_EVERY} --evaluate-every 4 --outer.restart 3".split()
MIXED = "--compute.precision bf16-mixed --compute.micro-batch 2".split()


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text of some 60 paragraphs, prepared by the command."""
    text = textmaker.write(tmp_path_factory.mktemp("text") / "text.txt")
    words = ["data", "prepare", text, "--tokenizer", "bytes", "--held-out", "0.1", "--shard-tokens", "9k", "--quiet"]
    assert command(*words, "--out", text.parent / "shards") == 0
    return text.parent / "shards"


@pytest.fixture(scope="module")
def small(shards: Path) -> list[str]:
    """Options of a run of 22 steps on these shards, in mixed precision and pieces of batches."""
    return [*SMALL, *MIXED, "--data.corpus", f"tokens:{shards}"]


@pytest.fixture(scope="module")
def whole(small: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The undisturbed run of `[*small, *LONG]`."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert command("train", *small, *LONG, "--out", folder) == 0
    return folder


def command(*words: str | Path) -> int:
    """A command in this process, which spares importing torch again."""
    return main([str(word) for word in words])


def configuration(folder: Path) -> TrainConfig:
    return from_tree(TrainConfig, load_yaml(folder / "config.yaml"))


def same_losses(folder: Path, whole: Path) -> None:
    """Weights and losses are those of another run, byte for byte."""
    for name in ("weights.safetensors", "metrics.jsonl"):
        assert (folder / name).read_bytes() == (whole / name).read_bytes()


# ------------------------------------------------------------------------------------------- steps, and dealt anew


@pytest.mark.slow
def test_lines_about_steps(whole: Path) -> None:
    """A line every so many steps, of positive numbers that agree with each other and with the rounds."""
    lines, rounds = (read_lines(whole / f"{name}.jsonl") for name in ("steps", "metrics"))
    assert [line["step"] for line in lines] == list(range(LOG_EVERY, STEPS + 1, LOG_EVERY))
    flops = flops_per_token(configuration(whole).model, END + 1, T)
    for line in lines:
        assert all(np.isfinite(value) and value > 0 for value in line.values())
        assert line["peak_memory_bytes"] > 1e6
        assert line["flops_per_second"] / line["tokens_per_second"] == pytest.approx(flops.causal, rel=1e-12)
        assert line["flops_per_second_palm"] / line["tokens_per_second"] == pytest.approx(flops.palm, rel=1e-12)
    means = [np.mean([line["train_loss"] for line in log]) for log in (lines, rounds)]
    assert means[0] == pytest.approx(means[1], rel=1e-12)


@pytest.mark.dist
def test_processes_come_and_go(tmp_path: Path, small: list[str], whole: Path) -> None:
    """Begun by one process up to the middle of a round, gone on with by two, and ended by one: the same bits."""
    folder, words = tmp_path / "run", ["train", *small, *LONG, "--out", str(tmp_path / "run")]
    assert run(configuration(whole), folder, should_stop=stop_after(15))["steps"] == 15
    processes = start_group(tmp_path, words, words)
    while processes[0].poll() is None and (checkpoint.latest_step(folder / "checkpoint") or 0) < 18:
        time.sleep(0.005)
    for process in processes:
        process.terminate()
    ended = end_group(processes, tmp_path)
    assert all(status != 0 for status, _ in ended), "the run was over before it could be stopped; make it longer"
    assert any("resume with" in errors for _, errors in ended)
    assert not (folder / "summary.json").exists()
    assert 18 <= (checkpoint.latest_step(folder / "checkpoint") or 0) < STEPS
    assert command(*words) == 0
    same_losses(folder, whole)  # round 3's too: float64 holds the sum of a few float32, whatever its order


# ----------------------------------------------------------------------------------------------------------- few tokens


@pytest.mark.slow
def test_few_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Refused before a folder is made; the steps that it names are possible, and with --repeat all of them."""
    arrays = [np.arange(windows * T + 1, dtype=np.uint16) for windows in (40, 8)]
    few = shardmaker.prepared(tmp_path / "few", arrays[:1], arrays[1:], 700)
    words = ["train", *SMALL, "--inner-steps", "2", "--data.corpus", f"tokens:{few}"]
    assert command(*words, "--out", tmp_path / "run") == 2  # 22 x 4 windows, and a replica has 20
    (line,) = capsys.readouterr().err.splitlines()
    assert "--repeat" in line
    assert [path.name for path in tmp_path.iterdir()] == ["few"]
    steps = re.search(r"--steps (\d+), or", line)
    assert steps
    assert command(*words, "--steps", steps[1], "--out", tmp_path / "short") == 0
    assert command(*words, "--repeat", "--out", tmp_path / "run") == 0
    summary = read_summary(tmp_path / "run")
    assert summary is not None
    assert (summary["exit_reason"], summary["tokens"]) == ("finished", 22 * 2 * BATCH * T)
    assert json.loads((tmp_path / "run" / "env.json").read_text())["loss_unit"] == "nats a token"


# -------------------------------------------------------------------------------------------------- recipes and devices


def test_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--recipe starts from the recipe's values; a file wins over them, and an option over both."""

    def printed(*words: str | Path) -> dict[str, Any]:
        assert command("train", *words, "--print-config") == 0
        return yaml.safe_load(capsys.readouterr().out)

    recipe = printed("--recipe", "nano")
    assert recipe["model"] == to_tree(nano())["model"]
    (tmp_path / "a.yaml").write_text("steps: 100\nouter: {lr: 0.5, momentum: 0.5}\n")
    words = ["--recipe", "nano", "--config", tmp_path / "a.yaml"]
    assert printed(*words) == recipe | {"steps": 100, "outer": recipe["outer"] | {"lr": 0.5, "momentum": 0.5}}
    outer = recipe["outer"] | {"lr": 0.1, "momentum": 0.5}
    assert printed(*words, "--outer.lr", "0.1") == recipe | {"steps": 100, "outer": outer}


# ----------------------------------------------------------------------------------- what a run has decided for itself


@pytest.mark.slow
def test_decisions_are_kept(tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run goes on with the pieces that its first part chose, though it would choose others with today's memory."""
    compute = ComputeConfig(precision="bf16-mixed", micro_batch=0)
    config = replace(configuration(whole), steps=14, log_every=0, evaluate_every=0, compute=compute)

    def chosen(name: str, memory: int, should_stop: Callable[[], bool] = lambda: False) -> list[dict[str, Any]]:
        monkeypatch.setattr(step, "memory_bytes", lambda _: memory)
        run(config, tmp_path / name, should_stop=should_stop)
        return json.loads((newest(tmp_path / name) / "progress.json").read_text())["execution"]

    little, plenty = 0, 1 << 50
    assert [execution["micro_batch"] for execution in chosen("little", little)] == [1]
    assert [execution["micro_batch"] for execution in chosen("plenty", plenty)] == [BATCH]
    outcomes = {name: outcome(tmp_path / name) for name in ("little", "plenty")}
    assert outcomes["little"]["weights"] != outcomes["plenty"]["weights"], "the size of pieces changes no bit"
    # Stopped inside a round, and at the end of one.
    for name, stop, first, then in (("little", 8, little, plenty), ("plenty", 12, plenty, little)):
        before = chosen(f"parts-{name}", first, stop_after(stop))
        assert chosen(f"parts-{name}", then) == before
        assert outcome(tmp_path / f"parts-{name}") == outcomes[name]
