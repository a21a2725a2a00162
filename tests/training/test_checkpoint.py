"""Checkpoints appear whole or not at all, in the background, and a damaged one is refused by name."""

from __future__ import annotations

import errno
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from threads import PATIENCE, Member, together
from twophase.base.config import RunError, UsageError
from twophase.diloco.group import SingleProcess
from twophase.training import checkpoint, parts, snapshot
from twophase.training.checkpoint import ENGINE, Writer, replica_file

FULL = OSError(errno.ENOSPC, "No space left on device")


def writer(folder: Path, communicator: SingleProcess | None = None, **options: Any) -> Writer:
    settings = {"fingerprint": "abc", "keep": 2} | options
    return Writer(folder, communicator=communicator or SingleProcess(), **settings)


def state(step: int) -> dict[str, Any]:
    return {ENGINE: {"x": torch.arange(5) + step}, replica_file(0): {"y": torch.ones(3)}}


def save(folder: Path, *steps: int, **options: Any) -> None:
    with writer(folder, **options) as saving:
        for step in steps:
            saving.save(step, state(step), {"step": step, "seconds": 1.5})


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def fail_to_write(monkeypatch: pytest.MonkeyPatch, error: BaseException, name: str = "") -> None:
    """Let the writing of some parts fail half way."""
    write = parts.write

    def half(path: Path, part: parts.Part) -> None:
        if path.name.startswith(name):
            path.write_bytes(b"half")
            raise error
        write(path, part)

    monkeypatch.setattr(parts, "write", half)


@contextmanager
def paused_writing(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, threading.Event]]:
    """Let writing begin, set the first event, and wait for the second."""
    begun, resume = threading.Event(), threading.Event()
    write = parts.write

    def slow(*arguments: Any) -> None:
        begun.set()
        assert resume.wait(PATIENCE), "the test did not let the writing go on"
        write(*arguments)

    monkeypatch.setattr(parts, "write", slow)
    yield begun, resume
    resume.set()


# ---------------------------------------------------------------------------------------------------- what is on disk


def test_round_trip(tmp_path: Path) -> None:
    """What is saved is what is loaded, and other readers of safetensors find it, too; half a checkpoint is none."""
    assert checkpoint.latest(tmp_path) is None
    assert checkpoint.latest_step(tmp_path / "absent") is None
    save(tmp_path, 7)
    (tmp_path / ".writing-step-00000009").mkdir()  # half written
    (tmp_path / "step-00000010.bad").mkdir()  # renamed as the message about damage says
    newest = checkpoint.latest(tmp_path)
    assert newest is not None
    loaded = checkpoint.Checkpoint(newest, "abc")
    assert loaded.step == checkpoint.latest_step(tmp_path) == 7
    assert torch.equal(loaded.part(ENGINE)["x"], torch.arange(5) + 7)
    assert torch.equal(load_file(newest / ENGINE)["x"], torch.arange(5) + 7)
    assert loaded.progress() == {"step": 7, "seconds": 1.5}
    assert names(newest) == [ENGINE, "manifest.json", "progress.json", replica_file(0)]
    checkpoint.clean(tmp_path)
    assert names(tmp_path) == ["step-00000007", "step-00000010.bad"]


def test_keeps_the_newest(tmp_path: Path) -> None:
    """Only the newest `keep` stay, by step number and not by name or time."""
    save(tmp_path, 5, 1000, 20, 20000000, 100000000, keep=3)
    assert names(tmp_path) == ["step-00001000", "step-100000000", "step-20000000"]
    assert checkpoint.latest_step(tmp_path) == 100000000


def of_first_format(record: dict[str, Any]) -> str:
    del record["format"]
    return json.dumps(record)


@pytest.mark.parametrize(
    ("name", "harm", "message"),
    [
        (ENGINE, lambda data: data[: len(data) // 2], ENGINE),
        (replica_file(0), lambda data: bytes([data[0] ^ 128]) + data[1:], replica_file(0)),
        ("progress.json", lambda data: data[:-3] + bytes([data[-3] ^ 1]) + data[-2:], "progress.json"),
        (ENGINE, None, ENGINE),
        ("manifest.json", lambda _: b"{", "manifest.json"),
        ("manifest.json", lambda _: b"[]", "manifest.json"),
        ("manifest.json", lambda _: b'{"files": {"x": 1}}', "manifest.json"),
        ("manifest.json", lambda data: data.replace(b'"step": 9', b'"step": "9"'), "a step that is no number"),
        ("manifest.json", lambda data: data.replace(b'"step": 9', b'"step": 4'), "that of step 4"),
    ],
)
def test_damage_is_named(tmp_path: Path, name: str, harm: Callable[[bytes], bytes] | None, message: str) -> None:
    """A file that is cut, changed or gone is refused with its name, the remedy, and the step that would then follow."""
    save(tmp_path, 3, 9)
    path = tmp_path / "step-00000009" / name
    data = path.read_bytes()
    path.unlink()
    if harm is not None:
        path.write_bytes(harm(data))
    with pytest.raises(UsageError, match=rf"step-00000009 is damaged: .*{message}.*rename that folder.*step-00000003"):
        checkpoint.Checkpoint(path.parent, "abc")
    assert checkpoint.Checkpoint(tmp_path / "step-00000003", "abc").step == 3


def test_foreign_checkpoints(tmp_path: Path) -> None:
    """Those of another configuration or format are refused with both names; intact content that does not fit, too."""
    save(tmp_path, 3)
    folder = tmp_path / "step-00000003"
    for error, kind, message in (
        (KeyError("anchor"), UsageError, f"damaged: {ENGINE}: 'anchor'"),
        (RunError("stop"), RunError, "^stop$"),
        (MemoryError("none left"), MemoryError, "none left"),
    ):
        with pytest.raises(kind, match=message), checkpoint.Checkpoint(folder, "abc").content(ENGINE):
            raise error
    with pytest.raises(UsageError, match=r"fingerprint abc, here xyz"):
        checkpoint.Checkpoint(folder, "xyz")
    (folder / "manifest.json").write_text(of_first_format(json.loads((folder / "manifest.json").read_text())))
    with pytest.raises(UsageError, match=r"in format 1, .* reads format 4\. Finish"):
        checkpoint.Checkpoint(folder, "abc")


# ------------------------------------------------------------------------------------------------------- in the thread


def test_saves_the_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What changes after `save` has returned and before anything is written does not change the checkpoint."""
    live = {"x": torch.arange(10.0), "view": torch.arange(6.0).view(2, 3).t(), "number": 1}
    progress = {"step": 5}
    with paused_writing(monkeypatch) as (begun, resume), writer(tmp_path) as saving:
        saving.save(5, {ENGINE: live}, progress)
        assert begun.wait(PATIENCE)
        live["x"].zero_()
        live["view"].zero_()
        live["number"] = progress["step"] = 2
        saving.poll()  # which does not wait
        assert checkpoint.latest(tmp_path) is None
        resume.set()
    loaded = checkpoint.Checkpoint(tmp_path / "step-00000005", "abc")
    part = loaded.part(ENGINE)
    assert torch.equal(part["x"], torch.arange(10.0))
    assert torch.equal(part["view"], torch.arange(6.0).view(2, 3).t())
    assert (part["number"], loaded.progress()) == (1, {"step": 5})


def test_snapshots_reuse_their_memory() -> None:
    """The second copy of a state lies where the first one was; what has changed its shape or type moves."""
    snapshots = snapshot.Snapshots()
    first = snapshots.take({"x": {"a": torch.ones(3), "b": torch.ones(2)}}).parts["x"].tensors
    place = first["a"].data_ptr()
    tree = {"a": torch.zeros(3), "b": torch.ones(2, dtype=torch.float64), "c": torch.ones(1)}
    second = snapshots.take({"x": tree}).parts["x"].tensors
    assert second["a"].data_ptr() == place
    assert {name: (tensor.dtype, tensor.tolist()) for name, tensor in second.items()} == {
        "a": (torch.float32, [0.0] * 3),
        "b": (torch.float64, [1.0] * 2),
        "c": (torch.float32, [1.0]),
    }


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("reserve", [0.0, 2.0])
def test_snapshot_of_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reserve: float) -> None:
    """Copies on the device, and in main memory where there is no room, hold what was there when they were taken."""
    monkeypatch.setattr(snapshot, "_RESERVE", reserve)
    x = torch.arange(1 << 24, device="cuda", dtype=torch.float32)
    live = {"x": x, "t": x.view(1 << 12, 1 << 12).t(), "step": torch.tensor(3.0, device="cuda"), "cpu": torch.ones(2)}
    with writer(tmp_path) as saving:
        for step in (1, 2):
            x.fill_(0.0).add_(torch.arange(1 << 24, device="cuda"))
            saving.save(step, {ENGINE: live}, {})
            x.zero_()
    part = checkpoint.Checkpoint(tmp_path / "step-00000002", "abc").part(ENGINE)
    expected = torch.arange(1 << 24, dtype=torch.float32)
    assert torch.equal(part["x"], expected)
    assert torch.equal(part["t"], expected.view(1 << 12, 1 << 12).t())
    assert (part["step"].item(), part["cpu"].tolist()) == (3.0, [1.0, 1.0])
    copy = saving._snapshots._copies[ENGINE, "x"]
    assert (copy.is_cuda, copy.is_pinned()) == (reserve == 0.0, reserve == 2.0)


@pytest.mark.parametrize("size", [1, 2])
def test_what_progress_counts_is_on_the_disk_before(tmp_path: Path, size: int) -> None:
    """The logs are synced in the thread, before a checkpoint that counts them has its name."""
    calls: list[tuple[str, int | None]] = []

    def before() -> None:
        calls.append((threading.current_thread().name, checkpoint.latest_step(tmp_path)))

    def save_one(pair: SingleProcess) -> None:
        with writer(tmp_path, pair, before=before if pair.rank == 0 else lambda: None) as saving:
            saving.save(4, {replica_file(pair.rank): {}} | ({ENGINE: {}} if pair.rank == 0 else {}), {})

    assert (together(2, save_one) if size == 2 else save_one(SingleProcess())) in (None, [None, None])
    assert calls == [("checkpoint-4", None)]
    assert checkpoint.latest_step(tmp_path) == 4


# ---------------------------------------------------------------------------------------------------- what goes wrong


@pytest.mark.parametrize("call", ["save", "poll", "close"])
def test_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """A full disk is reported once, with folder and reason; older checkpoints stay, and nothing half written does.

    Once there is space again, the same writer goes on.
    """
    save(tmp_path, 1)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.*") if path.is_file()}
    message = (
        rf"checkpoint of step 2 cannot be written to {tmp_path} \(No space left on device\); free space there .*"
        "resumes from its checkpoint of step 1, which is whole"
    )
    saving = writer(tmp_path)
    with monkeypatch.context() as patch:
        fail_to_write(patch, FULL, replica_file(0))
        saving.save(2, state(2), {})
        assert saving._thread is not None
        saving._thread.join(PATIENCE)
        with pytest.raises(OSError, match=message):
            saving.save(3, state(3), {}) if call == "save" else getattr(saving, call)()
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.*") if path.is_file()} == before
    with saving:
        saving.save(4, state(4), {})
    assert names(tmp_path) == ["step-00000001", "step-00000004"]


def test_other_failures_are_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is no fault of the disk is raised as it is, and at once where it can be seen at once."""
    with monkeypatch.context() as patch:
        fail_to_write(patch, MemoryError("none left"))
        with pytest.raises(MemoryError, match="none left"):
            save(tmp_path, 2)
    with pytest.raises(ValueError, match=r"cannot hold x, of type object"), writer(tmp_path) as saving:
        saving.save(3, {ENGINE: {"x": object()}}, {})
    assert names(tmp_path) == []


@pytest.mark.parametrize(("error", "complete"), [(ValueError, ["step-00000002"]), (KeyboardInterrupt, [])])
def test_an_error_in_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException], complete: list[str]
) -> None:
    """An error completes the checkpoint on its way, and a second Ctrl-C drops it; the error itself is raised."""

    def train() -> None:
        with writer(tmp_path) as saving:
            saving.save(2, state(2), {})
            assert begun.wait(PATIENCE)
            threading.Timer(0.1, resume.set).start()
            raise error("in training")

    with paused_writing(monkeypatch) as (begun, resume), pytest.raises(error, match="in training"):
        train()
    checkpoint.clean(tmp_path)
    assert names(tmp_path) == complete


def test_an_error_in_training_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When training fails, the failed checkpoint is a note to its error."""
    fail_to_write(monkeypatch, FULL)
    saving = writer(tmp_path)
    saving.save(2, state(2), {})
    error = ValueError("in training")
    saving.__exit__(ValueError, error, None)
    assert "No space left on device" in error.__notes__[0]


# -------------------------------------------------------------------------------------------------- several processes


def save_half(folder: Path, pair: Member, *, poll: bool = False) -> None:
    with writer(folder, pair) as saving:
        mine = {replica_file(pair.rank): {"y": torch.full((3,), float(pair.rank))}}
        saving.save(3, mine | ({ENGINE: {"x": torch.ones(2)}} if pair.rank == 0 else {}), {"rank": pair.rank})
        while poll and saving._thread is not None:
            saving.poll()
    assert checkpoint.latest_step(folder) == 3, "a process left before the checkpoint was complete"


@pytest.mark.parametrize("poll", [False, True])
def test_two_processes(tmp_path: Path, poll: bool) -> None:
    """The parts of both end in one checkpoint, which is there when either goes on; process 0's numbers count."""
    assert together(2, lambda pair: save_half(tmp_path, pair, poll=poll)) == [None, None]
    files = [ENGINE, "manifest.json", "progress.json", replica_file(0), replica_file(1)]
    assert names(tmp_path / "step-00000003") == files
    loaded = checkpoint.Checkpoint(tmp_path / "step-00000003", "abc")
    assert [loaded.part(replica_file(rank))["y"].tolist() for rank in (0, 1)] == [[0.0] * 3, [1.0] * 3]
    assert loaded.progress() == {"rank": 0}


@pytest.mark.parametrize("name", [replica_file(0), replica_file(1), "manifest.json"])
def test_one_of_two_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A process that cannot write stops both with the same message."""
    save(tmp_path, 1)
    fail_to_write(monkeypatch, FULL, name)
    if name == "manifest.json":  # process 0 fails when both have written their parts

        def full(*_: Any) -> None:
            raise FULL

        monkeypatch.setattr(checkpoint, "write_atomic", full)
    errors = together(2, lambda pair: save_half(tmp_path, pair))
    assert all(isinstance(error, OSError) for error in errors)
    assert str(errors[0]) == str(errors[1])
    assert "step 3 cannot be written" in str(errors[0])
    assert names(tmp_path) == ["step-00000001"]


def test_folders_of_two_processes(tmp_path: Path) -> None:
    """A folder that process 0 cannot make, or process 1 does not see, ends both with the same message."""
    (tmp_path / "file").write_text("a file")
    for folder in ("file", "{}"):
        errors = together(2, lambda pair, folder=folder: save_half(tmp_path / folder.format(pair.rank), pair))
        assert str(errors[0]) == str(errors[1])
        assert "step 3 cannot be written" in str(errors[0])
    assert "choose an --out that all processes see" in str(errors[0])
