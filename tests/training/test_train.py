"""A run of the recipe: its outcome, its logs, stopping and resuming, divergence."""

from __future__ import annotations

import errno
import itertools
import json
import math
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import textmaker
from twophase.base.config import UsageError, dump_yaml, fingerprint, from_tree, load_yaml, to_tree, with_values
from twophase.diloco.comm import SingleProcess
from twophase.runs.folder import RunFolder, read_lines
from twophase.tasks.build import build_task
from twophase.tasks.lm.config import TrainConfig, check
from twophase.tasks.lm.task import corpus_of as build
from twophase.training import checkpoint, parts
from twophase.training.inner import inner_lr
from twophase.training.preflight import preflight
from twophase.training.train import _restore, train
from twophase.training.trainer import Trainer


@pytest.fixture
def config(short_run: TrainConfig) -> TrainConfig:
    """A short run with a restart after the second round."""
    return with_values(short_run, {"outer.restart": "2"})


def run(config: TrainConfig, path: Path, **options: Any) -> dict[str, Any]:
    with RunFolder.claim(path, config) as folder:
        return train(build_task(config), config, folder, **options)


def admit(config: TrainConfig) -> None:
    preflight(check(config), build_task(config))


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
    trainer = Trainer(build_task(config), config, SingleProcess())
    with RunFolder.claim(tmp_path / "run", config) as folder:
        _restore(trainer, folder)
    for state in (trainer.engine.anchor, *(replica.model.state_dict() for replica in trainer.replicas)):
        assert state.keys() == weights.keys()
        assert all(torch.equal(state[name], value) for name, value in weights.items())


def test_step_log(config: TrainConfig, tmp_path: Path) -> None:
    """Every `log_every` steps a line with the mean loss since the last one; a resumed run repeats and misses none."""
    config = replace(config, log_every=4)
    run(config, tmp_path / "whole")
    for stop in (6, 3, 2):  # after 6, 9 and 11 steps
        calls = iter(range(1, 1000))
        run(config, tmp_path / "run", should_stop=lambda s=stop, c=calls: next(c) >= s)
    run(config, tmp_path / "run")
    lines = [read_lines(tmp_path / name / "steps.jsonl") for name in ("whole", "run")]
    assert [line["step"] for line in lines[0]] == [4, 8, 12, 16, 20]
    for key in ("step", "train_loss", "inner_lr"):
        assert [line[key] for line in lines[0]] == [line[key] for line in lines[1]]
    rounds = read_lines(tmp_path / "whole" / "metrics.jsonl")
    by_step = sum(line["train_loss"] for line in lines[0][:3]) / 3
    by_round = sum(line["train_loss"] for line in rounds[:2]) / 2
    assert by_step == pytest.approx(by_round, rel=1e-6)  # the first 12 steps, in either partition
    run(replace(config, log_every=0), tmp_path / "none")
    assert not (tmp_path / "none" / "steps.jsonl").exists()


@pytest.mark.parametrize("stop", [8, 12])
def test_what_a_checkpoint_holds(config: TrainConfig, tmp_path: Path, stop: int) -> None:
    """Tensors under their own names, and no pickle; a replica's weights inside a round only, when they are its own."""
    calls = iter(range(1, 1000))
    run(config, tmp_path / "run", should_stop=lambda: next(calls) >= stop)
    newest = checkpoint.latest(tmp_path / "run" / "checkpoint")
    assert newest is not None
    found = {path.name for path in newest.iterdir()}
    replicas = [checkpoint.replica_file(number) for number in (0, 1)]
    assert found == {checkpoint.ENGINE, *replicas, "manifest.json", "progress.json"}
    parameters = dict(Trainer(build_task(config), config, SingleProcess()).replicas[0].model.named_parameters())
    for name in replicas:
        tensors = load_file(newest / name)
        weights = {key.removeprefix("model.") for key in tensors if key.startswith("model.")}
        assert weights == (set(parameters) if stop % config.inner_steps else set())
        assert sum(key.startswith("inner.state.") for key in tensors) == 3 * len(parameters)
    assert "anchor" in load_file(newest / checkpoint.ENGINE)


def test_execution_is_restored(config: TrainConfig, tmp_path: Path) -> None:
    """A resumed run computes in the way that its first part has chosen, whatever it would choose itself."""
    calls = iter(range(1, 1000))
    run(config, tmp_path / "run", should_stop=lambda: next(calls) >= 3)
    newest = checkpoint.latest(tmp_path / "run" / "checkpoint")
    assert newest is not None
    (saved,) = checkpoint.Checkpoint(newest, fingerprint(config)).progress()["execution"]
    assert saved
    trainer = Trainer(build_task(config), config, SingleProcess())
    assert trainer.execution != saved
    with RunFolder.claim(tmp_path / "run", config) as folder:
        _restore(trainer, folder)
    assert trainer.execution == saved


def test_trains_on_while_a_checkpoint_is_written(
    config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounds end while a checkpoint is on its way, it holds the state from before them, and the run is the same."""
    whole = run(config, tmp_path / "whole")
    config = replace(config, checkpoint_every=1)
    released = threading.Event()
    write = parts.write

    def slow(path: Path, *arguments: Any) -> dict[str, Any]:
        if path.parent.name.endswith("06"):  # after the first round; the second one lets it go on
            assert released.wait(30), "training waited for the disk"
        return write(path, *arguments)

    monkeypatch.setattr(parts, "write", slow)

    def release(line: dict[str, Any]) -> None:
        if line["step"] == 12:
            assert checkpoint.latest(tmp_path / "run" / "checkpoint") is None
            released.set()

    summary = run(replace(config, keep_checkpoints=9), tmp_path / "run", on_round=release)
    assert timeless(summary) == timeless(whole)
    found = sorted(path.name for path in (tmp_path / "run" / "checkpoint").iterdir())
    assert found == [f"step-{step:08d}" for step in (6, 12, 18, 22)]
    # Each of them leads to the same end.
    for newest in found[:0:-1]:
        (tmp_path / "run" / "checkpoint" / newest).rename(tmp_path / f"{newest}.bad")
        (tmp_path / "run" / "summary.json").unlink()
        again = run(replace(config, keep_checkpoints=9), tmp_path / "run")
        assert timeless(again) == timeless(whole)
        shutil.rmtree(tmp_path / f"{newest}.bad")


_KILLED = """
import time
import torch
torch.set_num_threads(1)
from twophase.training import parts
write = parts.write

def slow(path, *arguments):
    if path.parent.name.endswith("12") and path.name == "replica-001.safetensors":
        path.write_bytes(b"half of it")
        print("writing", flush=True)
        time.sleep(600)
    return write(path, *arguments)

parts.write = slow
from twophase.__main__ import run
run()
"""


@pytest.mark.slow
def test_killed_while_writing(config: TrainConfig, tmp_path: Path) -> None:
    """SIGKILL in the middle of writing leaves the previous checkpoint, from which the run ends as if uninterrupted."""
    config = replace(config, checkpoint_every=1, keep_checkpoints=1)
    (tmp_path / "config.yaml").write_text(dump_yaml(config))
    whole = run(config, tmp_path / "whole")
    words = ["train", "--config", str(tmp_path / "config.yaml"), "--out", str(tmp_path / "run"), "--quiet"]
    with subprocess.Popen([sys.executable, "-c", _KILLED, *words], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "writing\n"
        rounds = tmp_path / "run" / "rounds.jsonl"
        while len(rounds.read_text().splitlines()) < 3:  # so that lines are there that must go
            time.sleep(0.01)
        process.kill()
    folder = tmp_path / "run" / "checkpoint"
    assert sorted(path.name for path in folder.iterdir()) == [".writing-step-00000012", "step-00000006"]
    assert timeless(run(config, tmp_path / "run")) == timeless(whole)
    assert [path.name for path in folder.iterdir()] == ["step-00000022"]
    same_files(tmp_path / "run", tmp_path / "whole")


def test_full_disk(config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is full ends the run with one message, the earlier checkpoint stays, and a repeated run goes on."""
    config = replace(config, checkpoint_every=1, keep_checkpoints=1)
    whole = run(config, tmp_path / "whole")
    write = parts.write

    def full(path: Path, *arguments: Any) -> dict[str, Any]:
        if path.parent.name.endswith("12"):
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(parts, "write", full)
        message = (
            rf"checkpoint of step 12 cannot be written to {tmp_path}/run/checkpoint \(No space left on device\); free"
        )
        with pytest.raises(OSError, match=message):
            run(config, tmp_path / "run")
    assert [path.name for path in (tmp_path / "run" / "checkpoint").iterdir()] == ["step-00000006"]
    assert timeless(run(config, tmp_path / "run")) == timeless(whole)
    same_files(tmp_path / "run", tmp_path / "whole")


@pytest.mark.parametrize("name", ["write_env", "log_round", "log_metrics", "rewind", "finish"])
def test_full_disk_elsewhere(config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Whatever file of the run the disk refuses, the message names the folder and the remedy."""

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(RunFolder, name, full)
    message = rf"run's files cannot be written to {tmp_path}/run \(No space left on device\); free space there"
    with pytest.raises(OSError, match=message):
        run(config, tmp_path / "run")


@pytest.mark.slow
def test_command_on_a_full_disk(config: TrainConfig, tmp_path: Path) -> None:
    """The command says it in one line with status 1; with space again, the same command does the run."""
    (tmp_path / "config.yaml").write_text(dump_yaml(config))
    command = [sys.executable, "-m", "twophase", "train", "--config", str(tmp_path / "config.yaml"), "--quiet"]
    command += ["--out", str(tmp_path / "run")]
    limited = ["sh", "-c", 'ulimit -f 40; exec "$@"', "sh", *command]  # 20 or 40 KiB a file, by the shell
    done = subprocess.run(limited, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"twophase train: failed: the checkpoint of step 12 cannot be written to {tmp_path}/run/")
    assert "(File too large); free space there" in line
    assert list((tmp_path / "run" / "checkpoint").iterdir()) == []
    assert timeless(run(config, tmp_path / "run")) == timeless(run(config, tmp_path / "whole"))
    same_files(tmp_path / "run", tmp_path / "whole")


def same_files(one: Path, other: Path) -> None:
    """Equal weights, byte for byte, and equal lines in the logs, times excepted."""
    assert (one / "weights.safetensors").read_bytes() == (other / "weights.safetensors").read_bytes()
    for log in ("metrics.jsonl", "rounds.jsonl"):
        lines = [[timeless(line) for line in read_lines(path / log)] for path in (one, other)]
        assert lines[0] == lines[1]


def in_parts(config: TrainConfig, path: Path, stops: Sequence[int]) -> dict[str, Any]:
    """A run that is stopped after each of these steps and resumed."""
    for stop in stops:
        calls = iter(range(1, 1000))
        start = checkpoint.latest_step(path / "checkpoint") or 0
        # Asked once a step, the last step excepted.
        part = run(config, path, should_stop=lambda s=stop, b=start, c=calls: b + next(c) >= s)
        assert part["exit_reason"] == "stopped"
        assert part["steps"] == stop
    return run(config, path)


@pytest.mark.parametrize("stops", [(3,), (6,), (8, 14, 20), (21,), (1, 2, 3, 13)])
def test_resumed_equals_uninterrupted(config: TrainConfig, tmp_path: Path, stops: tuple[int, ...]) -> None:
    """Stopped inside and at the end of rounds and resumed, a run ends with the same bytes, numbers and log lines."""
    whole = run(config, tmp_path / "whole")
    assert timeless(in_parts(config, tmp_path / "parts", stops)) == timeless(whole)
    same_files(tmp_path / "parts", tmp_path / "whole")


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


def test_a_round_begun_by_one_process_is_ended_by_several(config: TrainConfig, tmp_path: Path) -> None:
    """The losses of an unfinished round are each replica's own, and go on where that replica does."""

    class Second(SingleProcess):
        """A second process of two, as far as the loading of progress is concerned."""

        rank = 1

    config = replace(config, replicas=2)
    calls = iter(range(1, 1000))
    run(config, tmp_path / "run", should_stop=lambda: next(calls) >= 3)
    with RunFolder.claim(tmp_path / "run", config) as folder:
        alone, other = (
            Trainer(build_task(config), config, SingleProcess()),
            Trainer(build_task(config), config, Second()),
        )
        del other.replicas[0]
        other.replicas[0].number = 1
        for trainer in (alone, other):
            _restore(trainer, folder)
    assert alone.done.round_steps == other.done.round_steps == 3
    first, second = (replica.round_losses for replica in alone.replicas)
    assert first != second == other.replicas[0].round_losses
    assert sum(first) / 3 == pytest.approx(math.log(build_task(config).vocabulary_size), rel=0.1)


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


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"inner.schedule": "constant"}, [2.0, 2.0, 2.0, 2.0, 2.0]),
        ({"inner.schedule": "linear"}, [2.0, 1.0, 2 * 21 / 90, 2 * 10 / 90, 2 / 90]),
        ({"inner.schedule": "wsd"}, [2.0, 2.0, 2.0, 1.0, 0.1]),
        ({"inner.schedule": "wsd", "inner.decay": 0.5}, [2.0, 1.8, 2 * 21 / 50, 0.4, 0.04]),
        ({"inner.schedule": "wsd", "inner.decay": 0.0}, [2.0, 2.0, 2.0, 2.0, 2.0]),
        ({"inner.schedule": "wsd", "inner.decay": 0.9}, [2.0, 1.0, 2 * 21 / 90, 2 * 10 / 90, 2 / 90]),
    ],
)
def test_inner_schedules(values: dict[str, Any], expected: list[float]) -> None:
    """What follows the warmup, by hand; the warmup is the same."""
    config = with_values(TrainConfig(steps=100, inner_steps=10), {"inner.lr": 2.0, "inner.warmup": 0.1, **values})
    check(config)
    assert [inner_lr(config, step) for step in (0, 4, 9)] == pytest.approx([0.2, 1.0, 2.0])
    assert [inner_lr(config, step) for step in (10, 55, 79, 90, 99)] == pytest.approx(expected)


def test_a_run_from_before_the_schedules_is_the_same_run(tmp_path: Path) -> None:
    """A configuration that was written without them, and sizes of a probe, has the same fingerprint, and is read."""
    before = to_tree(TrainConfig())
    assert "schedule" not in before["inner"]
    assert "probe_sequences" not in before["outer"]
    assert from_tree(TrainConfig, before) == TrainConfig()
    path = tmp_path / "config.yaml"
    path.write_text(dump_yaml(TrainConfig()))
    assert fingerprint(from_tree(TrainConfig, load_yaml(path))) == fingerprint(TrainConfig()) == "52b976f3b5af"
    for values in ({"inner.schedule": "wsd", "inner.decay": 0.1}, {"outer.probe_sequences": 2}):
        other = with_values(TrainConfig(), values)
        assert fingerprint(other) != fingerprint(TrainConfig())
        assert from_tree(TrainConfig, to_tree(other)) == other
    with pytest.raises(UsageError, match=r"absent values inner\.lr$"):
        from_tree(TrainConfig, {**before, "inner": {k: v for k, v in before["inner"].items() if k != "lr"}})


BAD_VALUES = [
    (
        {"inner.decay": 0.1},
        r"--inner\.decay is 0\.1; it must be left alone with --inner\.schedule cosine; it is for wsd",
    ),
    ({"inner.schedule": "wsd", "inner.decay": 0.95}, r"--inner\.decay is 0\.95; it must be .*\[0, 0\.9\]"),
    ({"outer.momentum": 1.0}, r"--outer\.momentum is 1\.0; it must lie in \[0, 1\)"),
    ({"outer.lr": 1e200}, r"--outer\.lr is 1e\+200; it must be at most 1e\+30"),
    ({"outer.lr": -0.1}, r"--outer\.lr is -0\.1; it must be a finite number >= 0"),
    ({"outer.restart": "0"}, r"--outer\.restart: .*period is 0; it must be a whole number >= 1"),
    ({"outer.restart": "often"}, r"--outer\.restart: restart 'often' is not known; write never"),
    (
        {"outer.probe_sequences": 5},
        r"--outer\.probe-sequences is 5; it must be a whole number from 1 to --data\.batch-size 4, or 0 \(all of the",
    ),
    ({"outer.probe_sequences": -1}, r"--outer\.probe-sequences is -1; it must be a whole number from 1 to"),
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
        admit(with_values(config, values))


def test_defaults_are_possible() -> None:
    """The default configuration passes its own check."""
    assert check(TrainConfig()) == TrainConfig()


def test_replicas_and_processes(config: TrainConfig) -> None:
    """Replicas that the processes cannot share evenly are refused with both numbers."""
    with pytest.raises(UsageError, match=r"--replicas is 2 and there are 3 processes.*--replicas 3"):
        preflight(config, build_task(config), processes=3)


# --- restart policies that have a memory, or need what the trainer measures ------------------------------------------

STEEP = {"inner.lr": 0.03, "outer.lr": 4.0}
"""Outer steps so long that the loss rises again and again."""
MEMORY, LOSSES, ROUNDS = "policy_state", "round_losses", "begun"
"""What checkpoints hold for policies, by its key: of their own, of a round under way, of each fragment's round."""


@pytest.mark.parametrize(
    ("policy", "values", "stops", "fires", "remembers"),
    [
        # Each stop is inside a round; those of `loss` and the last of `speed` inside one at whose end they fire.
        ("loss", STEEP | {"inner_steps": 4}, (6, 18), True, (MEMORY,)),
        ("loss", STEEP | {"sync.fragments": ("2",)}, (8, 13), True, (MEMORY, LOSSES, ROUNDS)),
        ("speed", {"inner_steps": 4}, (6, 21), True, (MEMORY,)),
        ("tracked", {"inner_steps": 3}, (5, 14), True, (MEMORY,)),  # after the third round it knows a longer period
        ("auto", {"inner_steps": 3}, (5, 14), False, (MEMORY,)),
        ("slowmo", {}, (8, 13), False, (MEMORY,)),
        ("probe:drop,average", {}, (8, 13), True, ()),
        ("lookahead:0.3:0.3", {}, (8, 13), False, ()),
    ],
)
def test_needy_policies_resume(
    config: TrainConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    policy: str,
    values: dict[str, Any],
    stops: tuple[int, ...],
    fires: bool,
    remembers: tuple[str, ...],
) -> None:
    """A run whose policy decides by what it remembers, or is told, ends the same when it is stopped and resumed.

    And would not if any of what a checkpoint holds for the policy were lost.
    """
    config = with_values(config, {"outer.restart": policy, "outer.momentum": 0.9, **values})
    whole = run(config, tmp_path / "whole")
    assert (whole["restarts"] > 0) is fires
    assert not whole["diverged"]
    assert timeless(in_parts(config, tmp_path / "parts", stops)) == timeless(whole)
    same_files(tmp_path / "parts", tmp_path / "whole")
    plain = run(with_values(config, {"outer.restart": "never"}), tmp_path / "plain")
    assert plain["checksum"] != whole["checksum"]
    for key in remembers:
        with monkeypatch.context() as patch:
            losing(patch, key)
            assert in_parts(config, tmp_path / key, stops)["checksum"] != whole["checksum"], key


def losing(patch: pytest.MonkeyPatch, key: str) -> None:
    """Checkpoints are read as if nothing of that name were in them."""

    def without(tree: Any) -> Any:
        if isinstance(tree, dict):
            return {name: without(branch) for name, branch in tree.items() if name != key}
        return [without(branch) for branch in tree] if isinstance(tree, list) else tree

    part, progress = checkpoint.Checkpoint.part, checkpoint.Checkpoint.progress
    patch.setattr(checkpoint.Checkpoint, "part", lambda self, name: without(part(self, name)))
    patch.setattr(checkpoint.Checkpoint, "progress", lambda self: without(progress(self)))


def test_signals_of_a_round(config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What policies are told: means of the first and last quarter of a round's losses, its last rate, its share."""
    seen: list[dict[str, float]] = []
    losses: list[float] = []
    judge, settle = Trainer.end_round, Trainer.settle

    def noted(self: Trainer, report: Any) -> dict[str, Any]:
        seen.append(dict(report.signals))
        return judge(self, report)

    def settled(self: Trainer) -> None:
        losses.extend(loss.item() for loss in self._losses)
        settle(self)

    monkeypatch.setattr(Trainer, "end_round", noted)
    monkeypatch.setattr(Trainer, "settle", settled)
    run(with_values(config, {"inner_steps": 9, "replicas": 2}), tmp_path / "run")
    mean = [sum(losses[2 * step : 2 * step + 2]) / 2 for step in range(22)]
    for told, (start, stop) in zip(seen, ((0, 9), (9, 18), (18, 22)), strict=True):
        quarter = (stop - start) // 4
        assert told["loss_start"] == pytest.approx(sum(mean[start : start + quarter]) / quarter, rel=1e-6)
        assert told["loss_end"] == pytest.approx(sum(mean[stop - quarter : stop]) / quarter, rel=1e-6)
        assert told["train_loss"] == pytest.approx(sum(mean[start:stop]) / (stop - start), rel=1e-6)
        assert told["progress"] == stop / 22
        assert told["inner_lr"] == inner_lr(config, stop - 1)


@pytest.mark.parametrize(
    ("cut", "begins"),
    [
        # From one outer step of a fragment to its next; S = 8, 22 steps. Without a delay each round ends at its sync.
        ((2, 0, 0.0), {"0": [0, 4, 12, 20, 22], "1": [0, 8, 16, 22]}),
        ((4, 0, 0.0), {"0": [0, 2, 10, 18, 22], "1": [0, 4, 12, 20, 22], "2": [0, 6, 14, 22], "3": [0, 8, 16, 22]}),
        ((2, 3, 0.0), {"0": [0, 7, 15, 22], "1": [0, 11, 19, 22]}),
        # What is left at the end of a mixed run belongs to a round of its own, in which nothing was trained.
        ((1, 4, 0.5), {"0": [0, 12, 20, 22]}),
        ((1, 7, 0.5), {"0": [0, 15, 22, 22]}),
    ],
)
def test_signals_of_a_fragments_round(
    config: TrainConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cut: tuple[int, int, float],
    begins: dict[str, list[int]],
) -> None:
    """Each fragment is told the losses of its own round, whatever the others do meanwhile, and in a resumed run too."""
    told: dict[str, list[tuple[float, float]]] = {}
    losses: list[float] = []
    tell, settle = Trainer._signals, Trainer.settle

    def noted(self: Trainer, stop: float, fragments: Any) -> dict[str, float]:
        found = tell(self, stop, fragments)
        for name in fragments:
            told.setdefault(name, []).append((found["loss_start"], found["loss_end"]))
        return found

    def settled(self: Trainer) -> None:
        losses.extend(loss.item() for loss in self._losses)
        settle(self)

    monkeypatch.setattr(Trainer, "_signals", noted)
    monkeypatch.setattr(Trainer, "settle", settled)
    values = {"sync.fragments": (str(cut[0]),), "sync.delay": cut[1], "sync.mixing": cut[2]}
    config = with_values(config, values | {"inner_steps": 8, "replicas": 1})
    run(config, tmp_path / "whole")
    assert len(losses) == 22
    wanted: dict[str, list[tuple[float, float]]] = {}
    for name, ends in begins.items():
        for start, stop in itertools.pairwise(ends):
            quarter = max(1, (stop - start) // 4)
            of_round = losses[start:stop]
            ends_of = (of_round[:quarter], of_round[-quarter:]) if of_round else ([0.0], [0.0])
            wanted.setdefault(name, []).append(tuple(sum(part) / len(part) for part in ends_of))  # type: ignore[arg-type]
    assert told.keys() == wanted.keys()
    for name, rounds in wanted.items():
        assert told[name] == [pytest.approx(pair, rel=1e-6) for pair in rounds], name
    whole = {name: list(rounds) for name, rounds in told.items()}
    told.clear()
    calls = iter(range(1, 1000))
    run(config, tmp_path / "parts", should_stop=lambda: next(calls) >= 9)
    run(config, tmp_path / "parts")
    assert told == whole


@pytest.mark.parametrize(("policy", "name"), [("loss", "loss_start"), ("probe:keep,average", "probes")])
def test_a_policy_that_sees_nan_ends_the_run(
    config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str, name: str
) -> None:
    """What a policy needs and is not finite ends the run as diverged, in the round in which it was, and stays so."""
    signals, probe = Trainer._signals, Trainer._probe

    def broken(self: Trainer, stop: float, fragments: Any) -> dict[str, float]:
        found = signals(self, stop, fragments)
        return found | ({name: math.nan} if name in found and self.done.step == 12 else {})

    def nowhere(self: Trainer, model: Any, number: int, round_: int) -> float:
        return math.nan if self.done.step == 12 else probe(self, model, number, round_)

    monkeypatch.setattr(Trainer, "_signals", broken)
    monkeypatch.setattr(Trainer, "_probe", nowhere)
    summary = run(with_values(config, {"outer.restart": policy}), tmp_path / "run")
    assert (summary["diverged"], summary["exit_reason"], summary["steps"]) == (True, "diverged", 12)
    told = [line["groups"][0]["not_finite"] for line in read_lines(tmp_path / "run" / "rounds.jsonl")]
    assert told == [[], [name]]
    assert run(with_values(config, {"outer.restart": policy}), tmp_path / "run")["diverged"]
