"""The fault tests: a sample of them in a few minutes, and that they see the faults that they look for."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest

from faults import calls, run
from faults.calls import Disk, Fault
from faults.children import Ended, begin, ended
from faults.interruptions import bad_end
from faults.scenes import Stage
from forked import Program
from twophase.base.files import write_atomic


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Stage:
    return Stage(tmp_path_factory.mktemp("stage"))


def test_a_power_cut_leaves_what_was_synced(tmp_path: Path) -> None:
    """Bytes count from their file's fsync on, names from their folder's, or at once; nothing else can be left."""
    folder, cut = tmp_path / "out", tmp_path / "out.cut"
    folder.mkdir()
    (folder / "old").write_bytes(b"old")
    disk = Disk(folder)
    (folder / "log").write_bytes(b"line")
    disk.sync(folder / "log")
    with (folder / "log").open("ab") as file:
        file.write(b"more")
    (folder / "old").rename(folder / "new")
    tails = set()
    for seed in range(20):
        for late, names in ((True, {"old"}), (False, {"new", "log"})):
            disk.cut(random.Random(seed), late=late)
            assert {path.name for path in cut.iterdir()} == names
            for path in cut.iterdir():
                tails.add(path.read_bytes()) if path.name == "log" else None
                path.unlink()
            cut.rmdir()
    assert {b"line", b"linemore", b"line\0\0\0\0"} <= tails
    assert all(tail.startswith(b"line") and len(tail) <= 8 for tail in tails)


CASES: dict[str, tuple[int, dict[str, bytes]]] = {
    calls.KILL: (-9, {"a": b"old"}),
    calls.HALF: (-9, {"a": b"old", ".tmp": b"ne"}),
    calls.FULL: (1, {"a": b"old"}),
    calls.SHORT: (1, {"a": b"old"}),
}


@pytest.mark.parametrize("kind", CASES)
def test_a_fault_comes_at_its_call(tmp_path: Path, kind: str) -> None:
    """At its second call, the write into the temporary file, a process dies or meets an error, as asked for."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "a").write_bytes(b"old")
    fault = Fault(out, kind, 2 if kind != calls.KILL else 3)

    def call() -> int:
        calls.install(fault)
        write_atomic(out / "a", b"new!")
        return 0

    log = tmp_path / "log"
    end = ended(begin(call, log), log)
    status, wanted = CASES[kind]
    assert end.status == status, end
    now = {path.name[:4]: path.read_bytes() for path in out.iterdir()}
    if kind != calls.KILL:
        assert now == wanted
    assert now["a"] in (b"old", b"new!")


@pytest.mark.slow
def test_faults_are_seen(tmp_path: Path, stage: Stage) -> None:
    """Another byte, a temporary file, a traceback and a hang are each a failure; an equal folder is none."""
    scene = stage.scene("data bytes")
    wanted = stage.wanted(scene)
    out, log = tmp_path / "out", tmp_path / "log"
    assert bad_end(scene.run(out, log), out, wanted) == ""
    (out / ".tmp-x").touch()
    assert "temporary files: .tmp-x" in bad_end(scene.run(out, log), out, wanted)
    (out / ".tmp-x").unlink()
    shard = out / "train-00000.bin"
    shard.write_bytes(b"?" + shard.read_bytes()[1:])
    assert "byte differences: train-00000.bin" in bad_end(Ended(0, "", ""), out, wanted)

    def fails() -> int:
        raise AssertionError("of ours")

    def hangs() -> int:
        os.read(os.pipe()[0], 1)
        return 0

    assert [ended(begin(call, log), log, 2.0).fault for call in (fails, hangs)] == ["traceback", "hang"]


@pytest.mark.dist
@pytest.mark.timeout(900)
def test_a_sample(tmp_path: Path) -> None:
    """Some kills and inputs of a fixed seed: no byte differs, nothing is silent, hangs or leaves a file."""
    words = "--kills 5 --inputs 20 --seed 0 --processes 1 --out".split()
    out, err, failures = tmp_path / "said", tmp_path / "errors", tmp_path / run.FAILURES
    program = str(Path(__file__).with_name("__main__.py"))
    status = Program([program, *words, str(tmp_path)], out, err, os.environ).wait()
    assert not failures.exists(), failures.read_text()
    assert status == 0, out.read_text() + err.read_text()
    figures = json.loads(out.read_text().splitlines()[-1])
    assert (figures["kills"], figures["inputs"]) == (6, 20)


def test_cases_are_repeatable() -> None:
    """Equal seeds give equal cases, another seed others, and the shares hold."""
    assert run.plan(100, 1000, 3) == run.plan(100, 1000, 3)
    assert run.plan(100, 1000, 3) != run.plan(100, 1000, 4)
    assert len(run.plan(1000, 10_000, 0)) == 11_000
