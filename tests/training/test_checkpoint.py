"""Checkpoints appear whole or not at all, behind the training's back, and a damaged one is refused by name."""

from __future__ import annotations

import errno
import json
import resource
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from twophase.base.config import UsageError
from twophase.diloco.comm import Communicator, SingleProcess
from twophase.training import checkpoint, parts, snapshot
from twophase.training.checkpoint import ENGINE, Writer, replica_file

FULL = OSError(errno.ENOSPC, "No space left on device")
PATIENCE = 20.0
"""Seconds until a test that waits in vain gives up."""


def writer(folder: Path, communicator: Communicator | None = None, **options: Any) -> Writer:
    settings = {"fingerprint": "abc", "keep": 2} | options
    return Writer(folder, communicator=communicator or SingleProcess(), **settings)


def state(step: int) -> dict[str, Any]:
    return {ENGINE: {"x": torch.arange(5) + step}, replica_file(0): {"y": torch.ones(3)}}


def save(folder: Path, step: int, **options: Any) -> None:
    with writer(folder, **options) as saving:
        saving.save(step, state(step), {"step": step, "seconds": 1.5})


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def breaking(monkeypatch: pytest.MonkeyPatch, error: BaseException, where: Callable[[Path], bool]) -> None:
    """Let the writing of some parts fail half way."""
    write = parts.write

    def half(path: Path, *arguments: Any) -> dict[str, Any]:
        if where(path):
            path.write_bytes(b"half")
            raise error
        return write(path, *arguments)

    monkeypatch.setattr(parts, "write", half)


@contextmanager
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, threading.Event]]:
    """Writing begins, says so, and then waits for leave."""
    begun, leave = threading.Event(), threading.Event()
    write = parts.write

    def slow(*arguments: Any) -> dict[str, Any]:
        begun.set()
        assert leave.wait(PATIENCE), "nobody let the writing go on"
        return write(*arguments)

    monkeypatch.setattr(parts, "write", slow)
    yield begun, leave
    leave.set()


# --------------------------------------------------------------------------------------------------------- what is kept


def test_round_trip(tmp_path: Path) -> None:
    """What is saved is what is loaded, tensors and numbers, and other readers of safetensors find it, too."""
    save(tmp_path, 7)
    newest = checkpoint.latest(tmp_path)
    assert newest is not None
    loaded = checkpoint.Checkpoint(newest, "abc")
    assert loaded.step == checkpoint.latest_step(tmp_path) == 7
    assert torch.equal(loaded.part(ENGINE)["x"], torch.arange(5) + 7)
    assert loaded.progress() == {"step": 7, "seconds": 1.5}
    assert torch.equal(load_file(newest / ENGINE)["x"], torch.arange(5) + 7)
    assert names(newest) == [ENGINE, "manifest.json", "progress.json", replica_file(0)]


def test_keeps_the_newest(tmp_path: Path) -> None:
    """Only the newest `keep` stay, by step number and not by name or time."""
    for step in (5, 1000, 20, 20000000, 100000000):
        save(tmp_path, step, keep=3)
    assert names(tmp_path) == ["step-00001000", "step-100000000", "step-20000000"]
    assert checkpoint.latest_step(tmp_path) == 100000000


def test_nothing_there(tmp_path: Path) -> None:
    """A run without checkpoints has no latest one, whether or not its folder exists."""
    assert checkpoint.latest(tmp_path) is None
    assert checkpoint.latest_step(tmp_path / "absent") is None


def test_half_written_is_no_checkpoint(tmp_path: Path) -> None:
    """What a crash left under its temporary name is not taken for a checkpoint, and is cleared away."""
    save(tmp_path, 3)
    for left in (".writing-step-00000009", ".writing-step-00000001"):  # half written, half removed
        (tmp_path / left).mkdir()
        (tmp_path / left / ENGINE).write_bytes(b"half")
    assert checkpoint.latest_step(tmp_path) == 3
    checkpoint.clean(tmp_path)
    assert names(tmp_path) == ["step-00000003"]


@pytest.mark.parametrize("name", [ENGINE, replica_file(0), "progress.json"])
@pytest.mark.parametrize("harm", ["truncate", "flip", "flip the first", "remove"])
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
    elif harm == "flip the first":
        part.write_bytes(bytes([data[0] ^ 128]) + data[1:])
    else:
        part.unlink()
    with pytest.raises(UsageError, match=rf"step-00000009 is damaged: .*{name}.*rename that folder.*step-00000003"):
        checkpoint.Checkpoint(tmp_path / "step-00000009", "abc")
    assert checkpoint.Checkpoint(tmp_path / "step-00000003", "abc").step == 3


@pytest.mark.parametrize("content", ["", "{", "[]", json.dumps({"files": {}}), json.dumps({"files": {"x": 1}})])
def test_bad_manifest(tmp_path: Path, content: str) -> None:
    """An unreadable manifest is damage like any other."""
    save(tmp_path, 3)
    (tmp_path / "step-00000003" / "manifest.json").write_text(content)
    with pytest.raises(UsageError, match=r"is damaged: its manifest\.json cannot be read.*from the beginning"):
        checkpoint.Checkpoint(tmp_path / "step-00000003", "abc")


def test_manifest_of_another_step(tmp_path: Path) -> None:
    """A manifest whose step is not the folder's is damage."""
    save(tmp_path, 3)
    (tmp_path / "step-00000003").rename(tmp_path / "step-00000004")
    with pytest.raises(UsageError, match=r"step-00000004 is damaged: its manifest\.json is that of step 3"):
        checkpoint.Checkpoint(tmp_path / "step-00000004", "abc")


def test_of_another_configuration(tmp_path: Path) -> None:
    """A checkpoint of another configuration is refused with both fingerprints."""
    save(tmp_path, 3, fingerprint="abc")
    with pytest.raises(UsageError, match=r"another configuration \(fingerprint abc, here xyz\); choose another --out"):
        checkpoint.Checkpoint(tmp_path / "step-00000003", "xyz")


def test_of_another_version(tmp_path: Path) -> None:
    """A checkpoint of the first format, whose parts were pickles, is refused with what can be done about it."""
    save(tmp_path, 3)
    manifest = tmp_path / "step-00000003" / "manifest.json"
    record = json.loads(manifest.read_text())
    del record["format"]
    manifest.write_text(json.dumps(record))
    with pytest.raises(UsageError, match=r"in format 1 and this version of twophase reads format 3; finish the run wi"):
        checkpoint.Checkpoint(tmp_path / "step-00000003", "abc")


def test_renamed_is_no_checkpoint(tmp_path: Path) -> None:
    """A damaged checkpoint that was renamed as its message says is out of the way."""
    save(tmp_path, 3)
    save(tmp_path, 9)
    (tmp_path / "step-00000009").rename(tmp_path / "step-00000009.bad")
    assert checkpoint.latest_step(tmp_path) == 3


# ------------------------------------------------------------------------------------------------------- in the thread


def test_saves_the_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What changes after `save` has returned and before anything is written does not change the checkpoint."""
    live = {"x": torch.arange(10.0), "view": torch.arange(6.0).view(2, 3).t(), "number": 1}
    progress = {"step": 5}
    with held(monkeypatch) as (begun, leave), writer(tmp_path) as saving:
        saving.save(5, {ENGINE: live}, progress)
        assert begun.wait(PATIENCE)
        live["x"].zero_()
        live["view"].zero_()
        live["number"] = progress["step"] = 2
        assert checkpoint.latest(tmp_path) is None
        leave.set()
    loaded = checkpoint.Checkpoint(tmp_path / "step-00000005", "abc")
    part = loaded.part(ENGINE)
    assert torch.equal(part["x"], torch.arange(10.0))
    assert torch.equal(part["view"], torch.arange(6.0).view(2, 3).t())
    assert part["number"] == 1
    assert loaded.progress() == {"step": 5}


def test_snapshots_reuse_their_memory() -> None:
    """The second copy of a state lies where the first one was; what has changed its shape or type moves."""
    snapshots = snapshot.Snapshots()
    tree = {"a": torch.ones(3), "b": torch.ones(2)}
    first = snapshots.take({"x": tree}).parts["x"].tensors
    places = {name: tensor.data_ptr() for name, tensor in first.items()}
    tree = {"a": torch.zeros(3), "b": torch.ones(2, dtype=torch.float64), "c": torch.ones(1)}
    second = snapshots.take({"x": tree}).parts["x"].tensors
    assert second["a"].data_ptr() == places["a"]
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
    whole = torch.arange(1 << 24, dtype=torch.float32)
    assert torch.equal(part["x"], whole)
    assert torch.equal(part["t"], whole.view(1 << 12, 1 << 12).t())
    assert (part["step"].item(), part["cpu"].tolist()) == (3.0, [1.0, 1.0])
    kept = saving._snapshots._copies[ENGINE, "x"]
    assert kept.is_cuda == (reserve == 0.0)
    assert kept.is_pinned() == (reserve == 2.0)


def test_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save waits until the previous checkpoint is complete, and leaving the block until the last one is."""
    events: list[str] = []
    write = parts.write

    def slow(path: Path, *arguments: Any) -> dict[str, Any]:
        events.append(f"begin {path.parent.name[-1]}")
        time.sleep(0.05)
        events.append(f"end {path.parent.name[-1]}")
        return write(path, *arguments)

    monkeypatch.setattr(parts, "write", slow)
    with writer(tmp_path) as saving:
        for step in (1, 2, 3):
            saving.save(step, {ENGINE: {"x": torch.tensor(step)}}, {})
    assert events == [f"{what} {step}" for step in (1, 2, 3) for what in ("begin", "end")]
    assert names(tmp_path) == ["step-00000002", "step-00000003"]


# ---------------------------------------------------------------------------------------------------- what goes wrong


@pytest.mark.parametrize("told", ["save", "poll", "close"])
def test_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: str) -> None:
    """A full disk is told once, with folder, reason and remedy; older checkpoints stay, and nothing half written does.

    Once there is space again, the same writer goes on.
    """
    save(tmp_path, 1)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.*") if path.is_file()}
    message = rf"checkpoint of step 2 cannot be written to {tmp_path} \(No space left on device\); free space there"
    saving = writer(tmp_path)
    with monkeypatch.context() as patch:
        breaking(patch, FULL, lambda path: path.name == replica_file(0))
        saving.save(2, state(2), {})
        assert saving._thread is not None
        saving._thread.join(PATIENCE)
        with pytest.raises(OSError, match=message):
            saving.save(3, state(3), {}) if told == "save" else getattr(saving, told)()
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.*") if path.is_file()} == before
    assert names(tmp_path) == ["step-00000001"]
    with saving:
        saving.save(4, state(4), {})
        saving.poll()
    assert names(tmp_path) == ["step-00000001", "step-00000004"]


def test_a_limit_on_file_sizes(tmp_path: Path) -> None:
    """The system's own refusal in the middle of a large part is the one message, and leaves nothing behind."""
    save(tmp_path, 1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(OSError, match=r"step 2 cannot be written to .* \(File too large\)"), writer(tmp_path) as it:
            it.save(2, {ENGINE: {"x": torch.ones(1 << 20)}}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert names(tmp_path) == ["step-00000001"]
    assert checkpoint.Checkpoint(tmp_path / "step-00000001", "abc").step == 1


def test_no_folder_can_be_made(tmp_path: Path) -> None:
    """A folder that cannot be made is named at once."""
    (tmp_path / "checkpoint").write_text("a file")
    with pytest.raises(OSError, match=rf"step 2 cannot be written to {tmp_path / 'checkpoint'} \("):
        save(tmp_path / "checkpoint", 2)
    assert (tmp_path / "checkpoint").read_text() == "a file"


def test_other_failures_come_to_light(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is no fault of the disk is raised as it is, and at once where it can be seen at once."""
    with monkeypatch.context() as patch:
        breaking(patch, MemoryError("none left"), lambda _: True)
        with pytest.raises(MemoryError, match="none left"):
            save(tmp_path, 2)
    with pytest.raises(ValueError, match=r"cannot hold x, of type object"), writer(tmp_path) as saving:
        saving.save(3, {ENGINE: {"x": object()}}, {})
    assert names(tmp_path) == []


@pytest.mark.parametrize(("error", "kept"), [(ValueError, ["step-00000002"]), (KeyboardInterrupt, [])])
def test_an_error_in_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException], kept: list[str]
) -> None:
    """An error completes the checkpoint on its way, and a second Ctrl-C drops it; the error itself comes out."""

    def train() -> None:
        with writer(tmp_path) as saving:
            saving.save(2, state(2), {})
            assert begun.wait(PATIENCE)
            threading.Timer(0.1, leave.set).start()
            raise error("in training")

    with held(monkeypatch) as (begun, leave), pytest.raises(error, match="in training"):
        train()
    checkpoint.clean(tmp_path)
    assert names(tmp_path) == kept


def test_an_error_in_training_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When training fails, the failed checkpoint is a note to its error."""
    breaking(monkeypatch, FULL, lambda _: True)
    with pytest.raises(ValueError, match="in training") as caught:
        fail_in_training(writer(tmp_path))
    assert "No space left on device" in caught.value.__notes__[0]


# -------------------------------------------------------------------------------------------------- several processes


class Pair(SingleProcess):
    """Two processes, as far as a writer is concerned, in two threads; refuses collectives of other threads."""

    size = 2

    def __init__(self, rank: int, shared: list[Any], barrier: threading.Barrier) -> None:
        self.rank = rank
        self._shared = shared
        self._barrier = barrier

    def gather(self, value: Any) -> list[Any]:
        """As of a process group."""
        assert not threading.current_thread().name.startswith("checkpoint-"), "a collective in the writing thread"
        self._shared[self.rank] = value
        self._barrier.wait(PATIENCE)
        values = list(self._shared)
        self._barrier.wait(PATIENCE)
        return values


def both(work: Callable[[Pair], None]) -> list[BaseException | None]:
    """Do the work of two processes; what each has raised."""
    shared, barrier = [None, None], threading.Barrier(2)
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(work, Pair(rank, shared, barrier)) for rank in (0, 1)]
        return [future.exception() for future in futures]


def save_half(folder: Path, pair: Pair, step: int) -> None:
    with writer(folder, pair) as saving:
        mine = {replica_file(pair.rank): {"y": torch.full((3,), float(pair.rank))}}
        saving.save(step, mine | ({ENGINE: {"x": torch.ones(2)}} if pair.rank == 0 else {}), {"rank": pair.rank})
    assert checkpoint.latest_step(folder) == step, "a process left before the checkpoint was complete"


def test_two_processes(tmp_path: Path) -> None:
    """The parts of both end in one checkpoint, which is there when either goes on; process 0's numbers count."""
    assert both(lambda pair: save_half(tmp_path, pair, 3)) == [None, None]
    assert names(tmp_path / "step-00000003") == [
        ENGINE,
        "manifest.json",
        "progress.json",
        replica_file(0),
        replica_file(1),
    ]
    loaded = checkpoint.Checkpoint(tmp_path / "step-00000003", "abc")
    assert [loaded.part(replica_file(rank))["y"].tolist() for rank in (0, 1)] == [[0.0] * 3, [1.0] * 3]
    assert loaded.progress() == {"rank": 0}


@pytest.mark.parametrize("name", [replica_file(0), replica_file(1)])
def test_one_of_two_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A process that cannot write stops both with the same message, and neither waits for what will not come."""
    assert both(lambda pair: save_half(tmp_path, pair, 3)) == [None, None]
    breaking(monkeypatch, FULL, lambda path: path.name == name)
    errors = both(lambda pair: save_half(tmp_path, pair, 5))
    assert all(isinstance(error, OSError) for error in errors)
    assert str(errors[0]) == str(errors[1])
    assert "step 5 cannot be written" in str(errors[0])
    assert "No space left on device" in str(errors[0])
    assert names(tmp_path) == ["step-00000003"]


def test_process_0_cannot_make_the_folder(tmp_path: Path) -> None:
    """A refusal that only process 0 meets reaches both."""
    (tmp_path / "checkpoint").write_text("a file")
    errors = both(lambda pair: save_half(tmp_path / "checkpoint", pair, 5))
    assert str(errors[0]) == str(errors[1])
    assert "step 5 cannot be written" in str(errors[0])


def test_folders_that_are_not_shared(tmp_path: Path) -> None:
    """Processes that do not see the same folder are told so."""
    errors = both(lambda pair: save_half(tmp_path / str(pair.rank), pair, 5))
    assert str(errors[0]) == str(errors[1])
    assert "choose an --out that all processes see" in str(errors[0])


def test_patience_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Process 0 does not wait for ever for a process that has gone, and says which it was."""
    shared, barrier = [None, None], threading.Barrier(2)
    alone = Pair(0, shared, barrier)
    monkeypatch.setattr(alone, "gather", lambda value: [value, None])  # the other one answers and never writes
    with pytest.raises(OSError, match=r"process 1 has not written its part in 0\.1 seconds"):
        save_to(writer(tmp_path, alone, patience=0.1))


def test_two_processes_and_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in process 0's training ends its wait for the others at once."""
    alone = Pair(0, [None, None], threading.Barrier(2))
    monkeypatch.setattr(alone, "gather", lambda value: [value, None])
    saving = writer(tmp_path, alone, patience=10 * PATIENCE)
    with pytest.raises(ValueError, match="in training"):
        fail_in_training(saving)
    assert saving._thread is not None
    assert not saving._thread.is_alive()
    assert checkpoint.latest(tmp_path) is None


def save_to(saving: Writer) -> None:
    with saving:
        saving.save(2, state(2), {})
        assert saving._thread is not None
        saving._thread.join(PATIENCE)


def fail_in_training(saving: Writer) -> None:
    with saving:
        saving.save(2, state(2), {})
        raise ValueError("in training")
