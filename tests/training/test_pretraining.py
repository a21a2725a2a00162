"""From a text to a trained and exported model by the command line: prepared once, killed, dealt anew, the same bits."""

from __future__ import annotations

import json
import random
import re
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

import shardmaker
import textmaker
from commands import SMALL, outcome, scalars, snapshot
from forked import Forked
from trained import end_group, newest, run, start_group, stop_after
from twophase.base.config import from_tree, load_yaml, to_tree
from twophase.cli.main import main
from twophase.recipes.pretraining import nano
from twophase.runs.folder import read_lines, read_summary
from twophase.sweep.table import read_rows
from twophase.tasks.lm import step
from twophase.tasks.lm.config import TrainConfig
from twophase.tasks.lm.corpus import Corpus, build
from twophase.tasks.lm.speed import flops_per_token
from twophase.text.meta import TRAIN, VALIDATION, read_meta
from twophase.text.shards import Windows
from twophase.training import checkpoint
from twophase.training.config import ComputeConfig

pytest.importorskip("pyarrow", reason="the extra 'data' is not installed")

T, BATCH, END = 16, 4, 256
STEPS, LOG_EVERY = 84, 4
# A round has 6 steps, so lines of steps.jsonl begin and end inside rounds.
LONG = f"--steps {STEPS} --log-every {LOG_EVERY} --evaluate-every 4 --outer.restart 3".split()
MIXED = "--compute.precision bf16-mixed --compute.micro-batch 2".split()
ODD = "Naïve words \u2013 and 😀, in more bytes than characters.\n\n" * 9


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text of some 60 paragraphs."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(f"{ODD}{textmaker.text()}", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def shards(text: Path) -> Path:
    """It, prepared by the command."""
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


# ----------------------------------------------------------------------------------------------- killed and dealt anew


@pytest.mark.slow
def test_killed_at_random_moments(tmp_path: Path, small: list[str], whole: Path) -> None:
    """SIGKILL again and again: all files are in the end those of the undisturbed run, each step is logged once."""
    folder, source, kills = tmp_path / "run", random.Random(0), 0
    while not (folder / "summary.json").exists():
        before = checkpoint.latest_step(folder / "checkpoint")
        process = Forked("train", *small, *LONG, "--out", folder)
        while process.poll() is None and checkpoint.latest_step(folder / "checkpoint") == before:
            time.sleep(0.005)
        time.sleep(source.uniform(0, 0.15))
        if kills < 3:
            process.kill()
            kills += process.wait() == -signal.SIGKILL
        _, errors = process.communicate(timeout=120)
        assert process.returncode in (0, -signal.SIGKILL), errors
    assert kills >= 2, "the run was over before it could be killed; make it longer"
    assert outcome(folder) == outcome(whole)
    same_losses(folder, whole)
    lines = [read_lines(path / "steps.jsonl") for path in (folder, whole)]
    for key in ("step", "train_loss", "inner_lr"):
        assert [line[key] for line in lines[0]] == [line[key] for line in lines[1]]


@pytest.mark.slow
@pytest.mark.dist
def test_two_processes_equal_one(tmp_path: Path, small: list[str], whole: Path) -> None:
    """With a process for each replica a run ends with the bits that one process computes for both."""
    words = ["train", *small, *LONG, "--out", str(tmp_path / "run")]
    ended = end_group(start_group(tmp_path, words, words), tmp_path)
    assert [status for status, _ in ended] == [0, 0], ended
    same_losses(tmp_path / "run", whole)


def test_replicas_read_apart(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In all steps of that run no window is read by both replicas, nor by one of them twice."""
    config, read, numbers = configuration(whole), Windows.__getitem__, []

    def recorded(self: Windows, wanted: np.ndarray) -> np.ndarray:
        numbers.extend(wanted.tolist())
        return read(self, wanted)

    monkeypatch.setattr(Windows, "__getitem__", recorded)
    corpus = build(config.data, config.replicas, config.model.vocabulary_size)
    for number in range(STEPS):
        for replica in range(config.replicas):
            corpus.batch(config.seed, number, replica)
    assert len(set(numbers)) == len(numbers) == STEPS * config.replicas * BATCH


@pytest.mark.slow
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


# --------------------------------------------------------------------------------------------------------------- export


@pytest.mark.slow
def test_export(tmp_path: Path, text: Path, shards: Path, small: list[str]) -> None:
    """Transformers find the validation loss of the run's summary, and in the text the ids of the shards."""
    pytest.importorskip("transformers", reason="the extra hf is not installed")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    meta = read_meta(shards)
    splits = {
        split: [np.fromfile(shards / shard.file, meta.dtype) for shard in meta.splits[split]]
        for split in (TRAIN, VALIDATION)
    }
    (held_out,) = splits[VALIDATION]
    windows = (len(held_out) - 1) // T  # all that there are
    words = [*small, "--compute.precision", "float32", "--data.validation-windows", str(windows)]
    assert command("train", *words, "--out", tmp_path / "run") == 0
    assert command("export", tmp_path / "run", tmp_path / "hf") == 0

    ids = torch.from_numpy(held_out[: windows * T + 1].astype(np.int64))
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", local_files_only=True).eval()
    with torch.no_grad():
        logits = model(ids[:-1].view(windows, T)).logits
    loss = torch.nn.functional.cross_entropy(logits.double().flatten(0, 1), ids[1:]).item()
    summary = read_summary(tmp_path / "run")
    assert summary is not None
    # Two programmes that sum in other orders: a few units in the last place of logits near 5.
    assert summary["validation_loss"] == pytest.approx(loss, rel=3e-6)

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf", local_files_only=True)
    seen: list[str] = []
    for shard in [*splits[TRAIN], held_out]:
        assert shard[-1] == END
        for document in np.split(shard, np.flatnonzero(shard == END) + 1)[:-1]:
            words = bytes(document[:-1].tolist()).decode()
            assert tokenizer(words)["input_ids"] == document[:-1].tolist()
            seen += words.split("\n\n")
    assert model.config.eos_token_id == tokenizer.eos_token_id == END
    original = text.read_text(encoding="utf-8")
    assert sorted(seen) == sorted(paragraph for paragraph in original.split("\n\n") if paragraph)


# ----------------------------------------------------------------------------------------------------------- few tokens


@pytest.fixture
def few(tmp_path: Path) -> Path:
    """Two training shards of 29 and 11 windows, each window known by its first token, and 8 windows to validate on."""
    train = [np.arange(0, 29 * T + 3, dtype=np.uint16), np.arange(500, 500 + 11 * T + 1, dtype=np.uint16)]
    return shardmaker.prepared(tmp_path / "few", train, [np.arange(8 * T + 1, dtype=np.uint16)], 700)


FIRST_TOKENS = [*range(0, 29 * T, T), *range(500, 500 + 11 * T, T)]


def test_few_tokens(
    tmp_path: Path, few: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused before a folder is made; the steps that it names are possible; --repeat reads all before any twice."""
    read: dict[int, list[int]] = {0: [], 1: []}
    batch = Corpus.batch

    def recorded(self: Corpus, seed: int, step: int, replica: int) -> tuple[np.ndarray, np.ndarray]:
        tokens, targets = batch(self, seed, step, replica)
        read[replica] += tokens[:, 0].tolist()
        return tokens, targets

    monkeypatch.setattr(Corpus, "batch", recorded)
    words = ["train", *SMALL, "--inner-steps", "2", "--data.corpus", f"tokens:{few}"]
    assert command(*words, "--out", tmp_path / "run") == 2  # 22 x 4 windows, and a replica has 20
    errors = capsys.readouterr().err
    assert len(errors.splitlines()) == 1
    assert "--repeat" in errors
    assert [path.name for path in tmp_path.iterdir()] == ["few"]

    steps = re.search(r"--steps (\d+), or", errors)
    assert steps
    assert command(*words, "--steps", steps[1], "--out", tmp_path / "short") == 0
    assert sorted(read[0] + read[1]) == FIRST_TOKENS  # 5 steps take all of them

    read[0].clear()
    read[1].clear()
    assert command(*words, "--repeat", "--out", tmp_path / "run") == 0
    for replica, windows in read.items():
        assert len(windows) == 22 * BATCH
        for epoch in range(4):
            epoch_windows = windows[20 * epoch : 20 * (epoch + 1)]
            assert sorted(epoch_windows) == FIRST_TOKENS[20 * replica : 20 * (replica + 1)]
        assert len(set(windows[80:])) == 8
    summary = read_summary(tmp_path / "run")
    assert summary is not None
    assert (summary["exit_reason"], summary["tokens"]) == ("finished", 22 * 2 * BATCH * T)


# ---------------------------------------------------------------------------------------------------------- steps.jsonl


def test_lines_about_steps(tmp_path: Path, small: list[str], whole: Path) -> None:
    """A line every so many steps, of positive numbers that agree with each other and with the rounds; or no file."""
    lines = read_lines(whole / "steps.jsonl")
    assert [line["step"] for line in lines] == list(range(LOG_EVERY, STEPS + 1, LOG_EVERY))
    flops = flops_per_token(configuration(whole).model, END + 1, T)
    for line in lines:
        assert set(line) == {
            "step",
            "train_loss",
            "inner_lr",
            "tokens_per_second",
            "flops_per_second",
            "flops_per_second_palm",
            "peak_memory_bytes",
        }
        assert all(np.isfinite(value) and value > 0 for value in line.values())
        assert line["flops_per_second"] / line["tokens_per_second"] == pytest.approx(flops.causal, rel=1e-12)
        assert line["flops_per_second_palm"] / line["tokens_per_second"] == pytest.approx(flops.palm, rel=1e-12)
    rounds = read_lines(whole / "metrics.jsonl")
    assert np.mean([line["train_loss"] for line in lines]) == pytest.approx(
        np.mean([line["train_loss"] for line in rounds]), rel=1e-12
    )
    assert command("train", *small, "--out", tmp_path / "run") == 0
    assert (tmp_path / "run" / "rounds.jsonl").exists()
    assert not (tmp_path / "run" / "steps.jsonl").exists()


# --------------------------------------------------------------------------------------------------------------- sweeps


@pytest.mark.slow
def test_sweep(tmp_path: Path, small: list[str]) -> None:
    """A sweep on shards, whose runs share inner steps, gives the files of each run alone."""
    axes, folder = "--axis outer.lr 0.3 0.7 --axis outer.restart never 2".split(), tmp_path / "sweep"
    options = [*small, "--steps", "12", "--inner-steps", "3"]
    words = ["sweep", *options, *axes, "--out", folder, "--workers", "0"]
    assert command(*words) == 0
    assert command("sweep-worker", "--out", folder) == 0
    assert command(*words) == 0
    rows = read_rows(folder / "cells.csv")
    assert [row.state for row in rows] == ["finished"] * 4
    for row in rows:
        values = [word for path, value in row.values.items() for word in (f"--{path}", str(value))]
        assert command("train", *options, *values, "--out", tmp_path / row.run) == 0
        assert outcome(tmp_path / row.run) == outcome(folder / "runs" / row.run)
    assert len({(folder / "runs" / row.run / "weights.safetensors").read_bytes() for row in rows}) == 4


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


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--recipe mini", "--recipe is 'mini'; it must be one of paper_150m, small, nano"),
        pytest.param(
            "--device cuda",
            "--device cuda cannot be used here",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here"),
        ),
    ],
)
def test_refusals(
    tmp_path: Path, small: list[str], capsys: pytest.CaptureFixture[str], words: str, message: str
) -> None:
    """A recipe or a device that is missing is named in one line, before a folder is made."""
    assert command("train", *small, *words.split(), "--out", tmp_path / "run") == 2
    errors = capsys.readouterr().err
    assert len(errors.splitlines()) == 1
    assert message in errors
    assert not (tmp_path / "run").exists()


# ----------------------------------------------------------------------------------- what a run has decided for itself


@pytest.mark.slow
def test_decisions_are_kept(tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run goes on with the pieces that its first part chose, though it would choose others with today's memory."""
    compute = ComputeConfig(precision="bf16-mixed", micro_batch=0)
    config = replace(configuration(whole), steps=22, log_every=0, evaluate_every=0, compute=compute)

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


# ------------------------------------------------------------------------------------------------------------- trackers


def test_tensorboard(tmp_path: Path, small: list[str]) -> None:
    """TensorBoard shows the loss of every round, and the run's own files are those of a run without it."""
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    tracked, plain = tmp_path / "tracked", tmp_path / "plain"
    assert command("train", *small, "--out", tracked, "--track", "tensorboard") == 0
    assert command("train", *small, "--out", plain) == 0
    assert outcome(tracked) == outcome(plain)
    more = {path for path in snapshot(tracked).keys() - snapshot(plain).keys() if "tensorboard/" not in path}
    assert more == {"tracking.json"}
    rounds = read_lines(plain / "metrics.jsonl")
    assert [line["step"] for line in rounds] == [6, 12, 18, 22]
    assert scalars(tracked)["loss/train"] == [
        (line["step"], pytest.approx(line["train_loss"], rel=1e-6)) for line in rounds
    ]
