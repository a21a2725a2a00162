"""`twophase.train` is the command: the same run in the same folder, and the caller's process is left as it was."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import textmaker
import twophase
from commands import outcome
from toytask import Toy
from twophase.api import default_folder, run_config
from twophase.cli.main import main
from twophase.config import to_tree, update
from twophase.errors import RunError, UsageError
from twophase.runs.folder import RUN_ID, RunFolder
from twophase.tasks.lm.config import TrainConfig
from twophase.tasks.lm.task import corpus_of

SHORT = {"steps": 12, "inner_steps": 4, "checkpoint_every": 1}
WORDS = "--steps 12 --inner-steps 4 --checkpoint-every 1 --quiet".split()


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield
    torch.set_num_threads(1)


def test_train_is_the_command() -> None:
    """Default options, default folder, weights and logs are the command's; a finished run returns at once."""
    assert main(["train", "--task", "digits", *WORDS]) == 0
    (folder,) = Path("runs").iterdir()
    before = outcome(folder)
    twophase.train("digits", SHORT, quiet=True)
    assert [path.name for path in Path("runs").iterdir()] == [folder.name]
    twophase.train("digits", SHORT, out="here", quiet=True)
    assert outcome(Path("here")) == outcome(folder) == before
    shutil.rmtree("here/checkpoint")
    (Path("here") / "rounds.jsonl").unlink()
    twophase.train("digits", SHORT, out="here", quiet=True)
    assert not Path("here/rounds.jsonl").exists()


@dataclass(frozen=True)
class Random(Toy):
    """Draws from torch's own generator, and is stopped by a file."""

    share: float = 0.1

    def loss(self, model: Any, batch: Any) -> Any:
        if Path("stop").exists():
            Path("stop").unlink()
            signal.raise_signal(signal.SIGINT)
        return super().loss(model, (torch.nn.functional.dropout(batch[0], self.share), batch[1]))


def test_an_own_task_leaves_the_callers_process_as_it_was() -> None:
    """Its thread count, its random numbers and its signal handlers; the run's do not depend on them."""
    handler, runs = signal.getsignal(signal.SIGINT), []
    for threads, seed in ((1, 5), (2, 6)):
        torch.set_num_threads(threads)
        torch.manual_seed(seed)
        expected = torch.rand(3)
        torch.manual_seed(seed)
        twophase.train(Random(share=0.3), SHORT, out=f"run-{seed}", quiet=True)
        assert torch.equal(torch.rand(3), expected)
        assert (torch.get_num_threads(), signal.getsignal(signal.SIGINT)) == (threads, handler)
        runs.append(outcome(Path(f"run-{seed}")))
    assert runs[0] == runs[1]


def test_stopped_and_repeated() -> None:
    """A signal raises a RunError; the same call resumes, to the bits of an undisturbed run."""
    Path("stop").touch()
    with pytest.raises(RunError, match="the same call"):
        twophase.train(Random(), SHORT, out="parts", quiet=True)
    assert not Path("parts/summary.json").exists()
    for out in ("parts", "whole"):
        twophase.train(Random(), SHORT, out=out, quiet=True)
    assert outcome(Path("parts")) == outcome(Path("whole"))


def test_what_is_refused() -> None:
    """Another run's folder, one in use, changed data of a finished run, damaged weights, a class for a task."""
    config = {**SHORT, "data.corpus": f"file:{textmaker.write(Path('text.txt').absolute(), documents=20)}"}
    twophase.train("lm", config, out="run", quiet=True)
    with pytest.raises(UsageError, match=r"^seed: must be 0"):
        twophase.train("lm", config | {"seed": 1}, out="run", quiet=True)
    with RunFolder.claim(Path("free"), run_config("digits", SHORT)), pytest.raises(UsageError, match="in use"):
        twophase.train("digits", SHORT, out="free", quiet=True)
    textmaker.write(Path("text.txt"), documents=20, seed=1)
    corpus_of.cache_clear()
    with pytest.raises(UsageError, match="changed"):
        twophase.train("lm", config, out="run", quiet=True)
    textmaker.write(Path("text.txt"), documents=20)
    corpus_of.cache_clear()
    Path("run/weights.safetensors").write_bytes(b"0" + Path("run/weights.safetensors").read_bytes()[1:])
    with pytest.raises(RunError, match="weights"):
        twophase.train("lm", config, out="run", quiet=True)
    with pytest.raises(UsageError, match=r"Toy\(\)"):
        twophase.train(Toy, quiet=True)
    with pytest.raises(UsageError, match=r"^axes: .*outer\.lr"):
        twophase.sweep("digits", {"outer.lr": 0.3})  # type: ignore[dict-item]
    with pytest.raises(UsageError, match=r"^axis: .*outer\.lr"):
        twophase.sweep("digits", {})
    with pytest.raises(UsageError, match=r"^budget: "):
        twophase.tune("digits", "nesterov", budget="10m")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "averaging-lr-1-restart-never-S-16-seed-0-"),
        ({"outer.method": "adamw", "outer.restart": "cycle:5,6"}, "adamw-lr-0.02-momentum-0.9-restart-cycle-5-6-"),
        ({"sync.fragments": ("60",), "sync.restart": tuple(f"{i}=3" for i in range(60))}, "averaging"),
    ],
)
def test_a_run_without_a_folder_has_its_setting_as_name(changes: dict[str, Any], name: str) -> None:
    """The folder says what the run is, and is found again by the same values."""
    config = update(TrainConfig(), changes)
    folder = default_folder(config)
    assert folder.parent == Path("runs")
    assert name in folder.name
    assert RUN_ID.fullmatch(folder.name)
    assert folder == default_folder(config) != default_folder(update(config, {"steps": 32}))


def test_values_in_python() -> None:
    """Nested or by path, with a period as a number; those of a task's object and those given beside it."""
    config = run_config(Toy(batch_size=8), {"outer": {"restart": 3}, "sync.fragments": ["2"], "inner.betas": [0, 0.5]})
    tree = to_tree(config)
    assert (tree["task"]["batch_size"], tree["outer"]["restart"], tree["sync"]["fragments"]) == (8, "3", ["2"])
    assert config.inner.betas == (0.0, 0.5)
    assert run_config("lm", config) is config
