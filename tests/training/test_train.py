"""A run of the recipe: its outcome, its logs, stopping and resuming, divergence."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import resource
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import shardmaker
import textmaker
from commands import outcome
from forked import Forked
from trained import newest, run, run_in_parts, stop_after
from twophase.base.config import RunError, UsageError, dump_yaml, fingerprint, with_values
from twophase.cli.main import main
from twophase.diloco.group import SingleProcess
from twophase.runs.folder import LOGS, RunFolder, read_lines
from twophase.runs.log import read_log
from twophase.tasks.lm.config import TrainConfig
from twophase.tasks.lm.task import LanguageTask, corpus_of
from twophase.training import checkpoint, parts
from twophase.training.config import inner_lr
from twophase.training.train import _restore, train
from twophase.training.trainer import Trainer

FULL = OSError(errno.ENOSPC, "No space left on device")


def trainer_of(config: TrainConfig) -> Trainer:
    return Trainer(LanguageTask(config), config, SingleProcess())


def checkpoints(path: Path) -> list[str]:
    return sorted(entry.name for entry in (path / "checkpoint").iterdir())


# --------------------------------------------------------------------------------------------------------- what is left


def test_outcome(config: TrainConfig, whole: Path) -> None:
    """The summary counts rounds, restarts and tokens; each log has a line a round, and validations as configured."""
    summary = json.loads((whole / "summary.json").read_text())
    assert (summary["rounds"], summary["restarts"], summary["steps"]) == (4, 2, 22)
    assert summary["tokens"] == 22 * 2 * 4 * 16
    assert (summary["diverged"], summary["exit_reason"]) == (False, "finished")
    assert summary["perplexity"] == pytest.approx(math.exp(summary["validation_loss"]))
    assert summary["perplexity"] < 60  # uniform would be 96
    rounds = read_lines(whole / "rounds.jsonl")
    assert [line["inner_steps"] for line in rounds] == [6, 6, 6, 4]
    assert [line["partial"] for line in rounds] == [False, False, False, True]
    assert [line["restarted"] for line in rounds] == [False, True, False, True]
    assert [line["step"] for line in rounds] == [6, 12, 18, 22]
    metrics = read_lines(whole / "metrics.jsonl")
    assert ["perplexity" in line for line in metrics] == [False, True, False, True]
    assert [line["inner_lr"] for line in metrics] == [inner_lr(config, step - 1) for step in (6, 12, 18, 22)]


def test_weights_are_the_anchor(config: TrainConfig, whole: Path) -> None:
    """The weights file holds the final anchor, which after a round is what every replica holds."""
    weights = load_file(whole / "weights.safetensors")
    trainer = trainer_of(config)
    with RunFolder.claim(whole, config) as folder:
        _restore(trainer, folder)
    for state in (trainer.engine.anchor, *(replica.model.state_dict() for replica in trainer.replicas)):
        assert state.keys() == weights.keys()
        assert all(torch.equal(state[name], value) for name, value in weights.items())


@pytest.mark.parametrize("stop", [8, 12])
def test_what_a_checkpoint_holds(config: TrainConfig, tmp_path: Path, stop: int) -> None:
    """Tensors under their own names, a replica's weights inside a round only; and how the run computes."""
    run(config, tmp_path, should_stop=stop_after(stop))
    folder = newest(tmp_path)
    replicas = [checkpoint.replica_file(number) for number in (0, 1)]
    assert {path.name for path in folder.iterdir()} == {
        checkpoint.ENGINE, *replicas, "manifest.json", "progress.json"
    }  # fmt: skip
    trainer = trainer_of(config)
    parameters = dict(trainer.replicas[0].model.named_parameters())
    for name in replicas:
        tensors = load_file(folder / name)
        weights = {key.removeprefix("model.") for key in tensors if key.startswith("model.")}
        assert weights == (set(parameters) if stop % config.inner_steps else set())
        assert sum(key.startswith("inner.state.") for key in tensors) == 3 * len(parameters)
    assert "anchor" in load_file(folder / checkpoint.ENGINE)
    (saved,) = checkpoint.Checkpoint(folder, fingerprint(config)).progress()["execution"]
    assert saved != trainer.execution == {}
    with RunFolder.claim(tmp_path, config) as claimed:
        _restore(trainer, claimed)
    assert trainer.execution == saved


# -------------------------------------------------------------------------------------------------- stopped and resumed


@pytest.mark.parametrize("stops", [(3,), (8, 14, 20), (1, 2, 6, 21)])
def test_resumed_equals_uninterrupted(config: TrainConfig, whole: Path, tmp_path: Path, stops: tuple[int, ...]) -> None:
    """Stopped inside and at the end of rounds and resumed, a run leaves the same bytes, numbers and log lines."""
    run_in_parts(config, tmp_path / "run", stops)
    assert outcome(tmp_path / "run") == outcome(whole)


@pytest.mark.parametrize("lost", [["summary.json"], ["summary.json", "weights.safetensors"]])
def test_killed_at_the_very_end(config: TrainConfig, whole: Path, tmp_path: Path, lost: list[str]) -> None:
    """A run whose last files are missing writes them again, the same, without training."""
    shutil.copytree(whole, tmp_path / "run")
    for name in lost:
        (tmp_path / "run" / name).unlink()
    run(config, tmp_path / "run", on_round=lambda line: pytest.fail(f"trained again: {line}"))
    assert outcome(tmp_path / "run") == outcome(whole)


def test_trains_on_while_a_checkpoint_is_written(
    config: TrainConfig, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounds end while a checkpoint is on its way; each checkpoint leads to the same end."""
    config = replace(config, checkpoint_every=1, keep_checkpoints=9)
    released = threading.Event()
    write = parts.write

    def slow(path: Path, part: parts.Part) -> None:
        if path.parent.name.endswith("06"):  # after the first round; the second one lets it go on
            assert released.wait(30), "training waited for the disk"
        write(path, part)

    def release(line: dict[str, Any]) -> None:
        if line["step"] == 12:
            assert checkpoint.latest(tmp_path / "run" / "checkpoint") is None
            released.set()

    monkeypatch.setattr(parts, "write", slow)
    run(config, tmp_path / "run", on_round=release)
    expected: dict[str, Any] = outcome(whole) | {"config": (tmp_path / "run" / "config.yaml").read_bytes()}
    expected["summary"]["config"] = fingerprint(config)
    expected["weights"] = (tmp_path / "run" / "weights.safetensors").read_bytes()
    expected["summary"]["weights_sha256"] = hashlib.sha256(expected["weights"]).hexdigest()
    assert outcome(tmp_path / "run") == expected
    assert load_same(tmp_path / "run", whole)
    names = checkpoints(tmp_path / "run")
    assert names == [f"step-{step:08d}" for step in (6, 12, 18, 22)]
    for name in names[:0:-1]:
        shutil.rmtree(tmp_path / "run" / "checkpoint" / name)
        (tmp_path / "run" / "summary.json").unlink()
        run(config, tmp_path / "run")
        assert outcome(tmp_path / "run") == expected


def load_same(path: Path, other: Path) -> bool:
    """Compare weights; the file's metadata name the configuration."""
    weights, others = (load_file(folder / "weights.safetensors") for folder in (path, other))
    return weights.keys() == others.keys() and all(torch.equal(weights[name], others[name]) for name in weights)


def test_a_round_begun_by_one_process_is_ended_by_several(config: TrainConfig, tmp_path: Path) -> None:
    """The losses of an unfinished round are each replica's own, and go on where that replica does."""

    class Second(SingleProcess):
        """A second process of two, as far as the loading of progress is concerned."""

        rank = 1

    run(config, tmp_path, should_stop=stop_after(3))
    with RunFolder.claim(tmp_path, config) as folder:
        alone, other = trainer_of(config), Trainer(LanguageTask(config), config, Second())
        del other.replicas[0]
        other.replicas[0].number = 1
        for trainer in (alone, other):
            _restore(trainer, folder)
    first, second = (replica.round_losses for replica in alone.replicas)
    assert first != second == other.replicas[0].round_losses
    assert len(first) == 3
    assert sum(first) / 3 == pytest.approx(math.log(LanguageTask(config).vocabulary_size), rel=0.1)


def test_a_checkpoint_that_one_process_does_not_see(config: TrainConfig, tmp_path: Path) -> None:
    """A process whose folder lacks process 0's newest checkpoint says so, and not that it is damaged."""

    class Second(SingleProcess):
        """The second process of two, which is told of a later step."""

        rank, size = 1, 2

        def gather_json(self, value: Any, *, shards: bool = False) -> list[Any]:  # noqa: ARG002
            return [12, value] if type(value) is int else [value]

    run(config, tmp_path, should_stop=stop_after(8))
    words = r"step-00000012 is not in the folder that process 1 sees.*an --out that all"
    with RunFolder.claim(tmp_path, config) as folder, pytest.raises(UsageError, match=words):
        _restore(Trainer(LanguageTask(config), config, Second()), folder)


def test_changed_text_is_refused(config: TrainConfig, tmp_path: Path) -> None:
    """A run goes on only with the text that it began with; with the old one back it does."""
    path = textmaker.write(tmp_path / "text.txt")
    config = with_values(config, {"data.corpus": f"file:{path}"})
    run(config, tmp_path / "run", should_stop=stop_after(8))
    old = path.read_bytes()
    textmaker.write(path, seed=1)
    corpus_of.cache_clear()
    with pytest.raises(UsageError, match=r"--data\.corpus file:.*: its file or data is not the one"):
        run(config, tmp_path / "run")
    path.write_bytes(old)
    corpus_of.cache_clear()
    assert run(config, tmp_path / "run")["exit_reason"] == "finished"


def test_lost_lines_of_a_log_are_noticed(
    config: TrainConfig, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A log cut below its checkpoint ends the command with status 2; with --accept-logs the run has the same end."""
    (tmp_path / "config.yaml").write_text(dump_yaml(config))
    words = ["train", "--config", str(tmp_path / "config.yaml"), "--out", str(tmp_path / "run"), "--quiet"]
    run(config, tmp_path / "run", should_stop=stop_after(14))
    log = tmp_path / "run" / "rounds.jsonl"
    log.write_bytes(log.read_bytes().splitlines(keepends=True)[0])
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"twophase train: error: {log}: is not the log that the checkpoint of step 14 counts")
    assert main([*words, "--accept-logs"]) == 0
    lines, (gap,) = read_log(log)
    assert ([line["round"] for line in lines], gap["step"]) == ([1, 3, 4], 14)
    assert load_same(tmp_path / "run", whole)


# ---------------------------------------------------------------------------------------------------------- a full disk


@pytest.mark.parametrize("name", ["write_env", "rewind", "finish", *LOGS])
def test_full_disk_elsewhere(config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Whatever file of the run the disk refuses, the message names the folder and the remedy."""
    log = RunFolder.log

    def full(*words: Any, **_: Any) -> None:
        if name in LOGS and words[1] != name:
            return log(*words)
        raise FULL

    monkeypatch.setattr(RunFolder, "log" if name in LOGS else name, full)
    message = rf"run's files cannot be written to {tmp_path}/run \(No space left on device\); free space there"
    with pytest.raises(OSError, match=message):
        run(config, tmp_path / "run")


@pytest.mark.slow
def test_command_on_a_full_disk(config: TrainConfig, whole: Path, tmp_path: Path) -> None:
    """The command says it in one line with status 1; with space again, the same command does the run."""
    (tmp_path / "config.yaml").write_text(dump_yaml(config))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40 << 10, limits[1]))
    try:
        process = Forked("train", "--config", tmp_path / "config.yaml", "--quiet", "--out", tmp_path / "run")
        _, errors = process.communicate(60)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert process.returncode == 1, errors
    (line,) = errors.splitlines()
    assert line.startswith(f"twophase train: failed: the checkpoint of step 12 cannot be written to {tmp_path}/run/")
    assert "(File too large); free space there" in line
    assert line.endswith("the run starts from the beginning, for it has no checkpoint yet")
    assert checkpoints(tmp_path / "run") == []
    run(config, tmp_path / "run")
    assert outcome(tmp_path / "run") == outcome(whole)


# ----------------------------------------------------------------------------------------------------------- divergence


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
    config = with_values(config, values)
    summary = run(config, tmp_path)
    assert (summary["diverged"], summary["exit_reason"]) == (True, "diverged")
    assert summary["steps"] < 22
    (tmp_path / "summary.json").unlink()  # killed between the last checkpoint and the summary
    assert run(config, tmp_path)["diverged"]
    assert json.loads((tmp_path / "summary.json").read_text())["steps"] == summary["steps"]


# ------------------------------------------------------------------------------------------------------- damaged tokens


@pytest.fixture
def tokens(config: TrainConfig, tmp_path: Path) -> TrainConfig:
    """The short run on token shards that were opened before."""
    ids = [np.arange(size, dtype=np.uint16) * 7 % 90 for size in (4000, 600)]
    folder = shardmaker.prepared(tmp_path / "tokens", ids[:1], ids[1:], 90)
    values = with_values(config, {"data.corpus": f"tokens:{folder}"})
    LanguageTask(values).corpus.batch(0, 0, 0)
    corpus_of.cache_clear()
    return values


def test_damaged_tokens_end_a_run(tokens: TrainConfig, tmp_path: Path) -> None:
    """A run on a shard with a flipped bit never finishes; repaired, the repeated command gives the same bytes."""
    run(tokens, tmp_path / "whole")
    shard, folder = tmp_path / "tokens" / "train-00000.bin", tmp_path / "run"
    shardmaker.flip(shard)
    corpus_of.cache_clear()
    with pytest.raises(RunError, match=r"train-00000\.bin was damaged since .*damaged-data keeps what rests on it"):
        run(tokens, folder)
    assert {path.name for path in folder.iterdir()} == {".lock", "config.yaml", "env.json", "damaged-data"}
    corpus_of.cache_clear()
    with pytest.raises(UsageError, match="its SHA-256 is"):  # refused before it begins
        run(tokens, folder)
    shardmaker.flip(shard)
    corpus_of.cache_clear()
    run(tokens, folder)
    assert outcome(folder) == outcome(tmp_path / "whole")


def test_damage_that_is_seen_early_ends_a_run_early(tokens: TrainConfig, tmp_path: Path) -> None:
    """The fault is asked for after every step."""
    shardmaker.flip(tmp_path / "tokens" / "validation-00000.bin")
    rounds: list[int] = []
    task = LanguageTask(tokens)
    task.corpus.verification.start()
    task.corpus.verification.finish()
    with RunFolder.claim(tmp_path / "run", tokens) as folder, pytest.raises(RunError, match=r"-00000\.bin was damaged"):
        train(task, tokens, folder, on_round=lambda line: rounds.append(line["round"]))
    assert rounds == []
