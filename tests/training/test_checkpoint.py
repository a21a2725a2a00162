"""Checkpoints appear whole or not at all, and of a damaged one the name is said and the one before is taken."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from commands import outcome
from replicas import same_bits
from threads import Member, together
from trained import ALONE, newest, run, trainer_of
from twophase.errors import UsageError
from twophase.tasks.lm.config import TrainConfig
from twophase.training import checkpoint
from twophase.training.checkpoint import Checkpointer, DamagedError

WEIRD = {
    0: torch.tensor([1.0, -0.0, math.nan, math.inf]),
    "a.b": [torch.tensor([[1.5], [-3.0]], dtype=torch.bfloat16), (1, 2.5, None, True, "é")],
    "view": torch.arange(24.0).reshape(4, 6).t()[1:3],
    "scalar": torch.tensor(2**62 + 1),
    "empty": {},
}


def save(folder: Path, *steps: int, keep: int = 2) -> None:
    saving = Checkpointer(folder, ALONE, keep)
    for step in steps:
        saving.save(step, {"engine": WEIRD, "replica-000": {"y": torch.ones(3) * step}}, {"step": step})
    saving.close()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_round_trip(tmp_path: Path) -> None:
    """What was there when `save` returned comes back with every bit; the folder holds files and a manifest."""
    live = {"x": torch.arange(10.0)}
    saving = Checkpointer(tmp_path, ALONE, keep=2)
    saving.save(7, {"engine": WEIRD, "live": live}, {"seconds": 1.5})
    live["x"].zero_()
    saving.close()
    saved = checkpoint.latest(tmp_path)
    assert saved is not None
    assert (saved.progress, saved.step) == ({"seconds": 1.5}, 7)
    assert names(saved.path) == ["engine.pt", "live.pt", "manifest-000.json"]
    assert torch.equal(saved.part("live")["x"], torch.arange(10.0))
    loaded = saved.part("engine")
    assert (list(loaded), loaded["a.b"][1]) == (list(WEIRD), (1, 2.5, None, True, "é"))
    for name in (0, "view", "scalar"):
        assert same_bits(loaded[name], WEIRD[name])  # type: ignore[arg-type]
    assert same_bits(loaded["a.b"][0], WEIRD["a.b"][0])  # type: ignore[index]


def test_keeps_the_newest(tmp_path: Path) -> None:
    """Only the newest `keep` stay, by step number and not by name or time."""
    save(tmp_path, 5, 1000, 20, 20000000, 100000000, keep=3)
    assert names(tmp_path) == ["step-00001000", "step-100000000", "step-20000000"]
    assert checkpoint.complete(tmp_path)[-1].step == 100000000


def test_incomplete_ones_do_not_count(tmp_path: Path) -> None:
    """Without each rank's manifest a checkpoint is none, spoils no later save, and goes with the older ones."""
    assert checkpoint.latest(tmp_path / "absent") is None
    save(tmp_path, 3, 9)
    (tmp_path / "step-00000009" / "manifest-000.json").unlink()
    shutil.copytree(tmp_path / "step-00000003", tmp_path / "step-00000012")
    manifest = tmp_path / "step-00000012" / "manifest-000.json"
    manifest.write_text(manifest.read_text().replace('"ranks": 1', '"ranks": 2'))
    assert checkpoint.complete(tmp_path)[-1].step == 3
    save(tmp_path, 9)
    assert checkpoint.complete(tmp_path)[-1].step == 9
    save(tmp_path, 12)
    assert names(tmp_path) == ["step-00000009", "step-00000012"]


def damage(path: Path, how: str) -> None:
    """Cut a file, flip a bit in it, or remove it."""
    data = path.read_bytes()
    path.unlink()
    if how != "gone":
        middle = len(data) // 2
        path.write_bytes(data[:middle] + (b"" if how == "cut" else bytes([data[middle] ^ 4]) + data[middle + 1 :]))


@pytest.mark.parametrize(("name", "how"), [("engine.pt", "cut"), ("engine.pt", "flipped"), ("replica-001.pt", "gone")])
def test_a_damaged_one_is_named_and_the_one_before_is_taken(
    config: TrainConfig, whole: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, *, name: str, how: str
) -> None:
    """And the run ends with the bits of an undisturbed one, also when no sound checkpoint is left."""
    for steps in ((12, 14), (14,)):
        run(config, tmp_path, asked_at=14)
        for step in steps:
            damage(tmp_path / "checkpoint" / f"step-{step:08d}" / name, how)
        with pytest.raises(DamagedError, match=name):
            trainer_of(config).load(newest(tmp_path))
        run(config, tmp_path)
        assert outcome(tmp_path) == outcome(whole)
        assert all(f"step-{step:08d}.damaged" in caplog.text for step in steps)
        caplog.clear()
        shutil.rmtree(tmp_path)


def test_every_rank_writes_its_own(tmp_path: Path) -> None:
    """A checkpoint of two ranks counts when both have written; a rank that cannot ends both with its reason."""

    def work(member: Member) -> None:
        saving = Checkpointer(tmp_path / "checkpoint", member, keep=1)
        for step in (1, 2):
            saving.save(step, {f"replica-{member.rank:03d}": {"x": torch.ones(2) * member.rank}}, {})
        saving.close()
        if member.rank == 1:
            saving.folder = tmp_path / "absent" / "nowhere"
            (tmp_path / "absent").write_text("no folder")
        saving.save(3, {"x": 1}, {})
        saving.close()

    ends = together(2, work)
    assert [type(end).__name__ for end in ends] == ["RunError", "NotADirectoryError"]
    assert checkpoint.complete(tmp_path / "checkpoint")[-1].step == 2
    saved = newest(tmp_path)
    assert [float(saved.part(f"replica-{rank:03d}")["x"][0]) for rank in (0, 1)] == [0.0, 1.0]
    assert not (tmp_path / "checkpoint" / "step-00000001").exists()


class Odd(torch.optim.SGD):
    """An optimizer whose state a checkpoint cannot hold."""

    def step(self, closure: Any = None) -> Any:
        self.state[self.param_groups[0]["params"][0]]["seen"] = {1, 2}
        return super().step(closure)


def test_an_inner_state_that_cannot_be_loaded_is_refused(
    config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the first checkpoint, and not when the run resumes from it."""
    from twophase.tasks.lm.task import LanguageTask

    inner = lambda _, model, config: Odd(model.parameters(), config.lr)  # noqa: E731
    monkeypatch.setattr(LanguageTask, "inner", inner, raising=False)
    with pytest.raises(UsageError, match="inner optimizer"):
        run(config, tmp_path)
    assert not checkpoint.complete(tmp_path / "checkpoint")
