"""Checkpoints appear whole or not at all, and a damaged one is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from twophase.config import UsageError
from twophase.diloco.comm import SingleProcess
from twophase.lm import checkpoint


def save(folder: Path, step: int, *, keep: int = 2, fingerprint: str = "abc") -> None:
    checkpoint.save(
        folder,
        step,
        {"engine.pt": {"x": torch.arange(5) + step}, checkpoint.replica_file(0): {"y": torch.ones(3)}},
        {"step": step, "seconds": 1.5},
        fingerprint=fingerprint,
        keep=keep,
        communicator=SingleProcess(),
    )


def test_round_trip(tmp_path: Path) -> None:
    """What is saved is what is loaded, tensors and numbers."""
    save(tmp_path, 7)
    newest = checkpoint.latest(tmp_path)
    assert newest is not None
    loaded = checkpoint.Checkpoint(newest, "abc")
    assert loaded.step == checkpoint.latest_step(tmp_path) == 7
    assert torch.equal(loaded.part("engine.pt")["x"], torch.arange(5) + 7)
    assert loaded.progress() == {"step": 7, "seconds": 1.5}


def test_keeps_the_newest(tmp_path: Path) -> None:
    """Only the newest `keep` stay, by step number and not by name length or time."""
    for step in (5, 1000, 20, 100000000):
        save(tmp_path, step, keep=3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000020", "step-00001000", "step-100000000"]
    assert checkpoint.latest_step(tmp_path) == 100000000


def test_nothing_there(tmp_path: Path) -> None:
    """A run without checkpoints has no latest one, whether or not its folder exists."""
    assert checkpoint.latest(tmp_path) is None
    assert checkpoint.latest_step(tmp_path / "absent") is None


def test_half_written_is_no_checkpoint(tmp_path: Path) -> None:
    """What a crash left under its temporary name is not taken for a checkpoint, and is cleared away."""
    save(tmp_path, 3)
    (tmp_path / ".writing-step-00000009").mkdir()
    (tmp_path / ".writing-step-00000009" / "engine.pt").write_bytes(b"half")
    assert checkpoint.latest_step(tmp_path) == 3
    checkpoint.clean(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]


@pytest.mark.parametrize("name", ["engine.pt", "replica-000.pt", "progress.json"])
@pytest.mark.parametrize("harm", ["truncate", "flip", "remove"])
def test_damage_is_named(tmp_path: Path, name: str, harm: str) -> None:
    """A part that is cut, changed or gone is refused with its name, the remedy, and the step that would then follow."""
    save(tmp_path, 3)
    save(tmp_path, 9)
    part = tmp_path / "step-00000009" / name
    data = part.read_bytes()
    if harm == "truncate":
        part.write_bytes(data[: len(data) // 2])
    elif harm == "flip":
        part.write_bytes(data[:-3] + bytes([data[-3] ^ 1]) + data[-2:])
    else:
        part.unlink()
    with pytest.raises(UsageError, match=rf"step-00000009 is damaged: .*{name}.*rename that folder.*step-00000003"):
        checkpoint.Checkpoint(tmp_path / "step-00000009", "abc")


@pytest.mark.parametrize("content", ["", "{", "[]", json.dumps({"files": {}})])
def test_bad_manifest(tmp_path: Path, content: str) -> None:
    """An unreadable manifest is damage like any other."""
    save(tmp_path, 3)
    (tmp_path / "step-00000003" / "manifest.json").write_text(content)
    with pytest.raises(UsageError, match=r"is damaged: its manifest\.json cannot be read.*from the beginning"):
        checkpoint.Checkpoint(tmp_path / "step-00000003", "abc")


def test_of_another_configuration(tmp_path: Path) -> None:
    """A checkpoint of another configuration is refused with both fingerprints."""
    save(tmp_path, 3, fingerprint="abc")
    with pytest.raises(UsageError, match=r"another configuration \(fingerprint abc, here xyz\); choose another --out"):
        checkpoint.Checkpoint(tmp_path / "step-00000003", "xyz")


def test_renamed_is_no_checkpoint(tmp_path: Path) -> None:
    """A damaged checkpoint that was renamed as its message says is out of the way."""
    save(tmp_path, 3)
    save(tmp_path, 9)
    (tmp_path / "step-00000009").rename(tmp_path / "step-00000009.bad")
    assert checkpoint.latest_step(tmp_path) == 3
