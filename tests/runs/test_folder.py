"""Run folders: which run they belong to, what survives a kill, and when a run is finished."""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakerun import Config, Outer
from twophase.base.config import UsageError, fingerprint, load_yaml, to_tree
from twophase.base.files import write_atomic
from twophase.runs.folder import LOGS, METRICS, ROUNDS, RunFolder, read_lines, read_summary, weights_fault

GOOD = {
    "validation_loss": 2.0,
    "perplexity": 7.4,
    "tokens": 640,
    "seconds": 1.5,
    "diverged": False,
    "exit_reason": "end of training",
}


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


@pytest.mark.parametrize("leftovers", [[], [".tmp-config.yaml-1-ab"], [".lock"], [".lock", ".tmp-x"]])
def test_claim_makes_the_folder(tmp_path: Path, leftovers: list[str]) -> None:
    """A folder that is missing, or holds our own leftovers alone, gets config.yaml; a second claim changes nothing."""
    path = tmp_path / "a" / "b"
    for name in leftovers:
        path.mkdir(parents=True, exist_ok=True)
        (path / name).touch()
    with RunFolder.claim(path, Config()) as folder:
        assert load_yaml(path / "config.yaml") == to_tree(Config())
        assert folder.fingerprint == fingerprint(Config())
        assert folder.checkpoint_dir == path / "checkpoint"
        assert folder.summary() is None
    before = contents(tmp_path)
    RunFolder.claim(path, Config()).release()
    assert contents(tmp_path) == before


OTHER = Config(outer=Outer(lr=0.9), steps=20)


@pytest.mark.parametrize(
    ("name", "text", "config", "message"),
    [
        ("", b"", OTHER, "another run: outer.lr is 0.7 there, 0.9 here; steps is 12 there, 20 here; choose another"),
        ("thesis.tex", b"all of it", Config(), r"holds 'thesis\.tex' but no config\.yaml"),
        *(
            ("config.yaml", text, Config(), r"config\.yaml is damaged")
            for text in (b"", b"outer: [", b"- 1\n", b"\xff\xfe\x00")
        ),
    ],
)
def test_claim_refuses(tmp_path: Path, name: str, text: bytes, config: Config, message: str) -> None:
    """A folder of another run or of something else is refused with a remedy, without so much as a lock file in it."""
    if name:
        (tmp_path / name).write_bytes(text)
    else:
        RunFolder.claim(tmp_path, Config()).release()
    before = sorted(tmp_path.iterdir()), contents(tmp_path)
    with pytest.raises(UsageError, match=message) as error:
        RunFolder.claim(tmp_path, config)
    assert str(error.value).startswith(f"--out {tmp_path}: ")
    assert (sorted(tmp_path.iterdir()), contents(tmp_path)) == before


def test_claim_refuses_an_unwritable_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file in the way, or a place that cannot be written, is a usage error with the reason, at each of the steps."""
    file = tmp_path / "file"
    file.write_text("precious")
    for path in (file, file / "run"):
        with pytest.raises(UsageError, match=r"file.*choose another --out"):
            RunFolder.claim(path, Config())
    assert file.read_text() == "precious"

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    for target, name in ((Path, "mkdir"), (os, "open"), (Path, "iterdir"), (os, "fsync")):
        with monkeypatch.context() as patch:
            patch.setattr(target, name, refuse)
            with pytest.raises(UsageError, match=r"Permission denied.*choose another --out"):
                RunFolder.claim(tmp_path / name, Config())
    RunFolder.claim(tmp_path / "fsync", Config()).release()  # what the last refusal left behind is no obstacle


def test_second_claim_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one process trains, another is refused; after the release, or a claim that failed, it may go on."""
    first = RunFolder.claim(tmp_path, Config())
    with pytest.raises(UsageError, match="another process is training in this folder"):
        RunFolder.claim(tmp_path, Config())
    first.release()
    first.release()  # safe to repeat
    with monkeypatch.context() as patch:
        patch.setattr("twophase.runs.folder.load_yaml", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            RunFolder.claim(tmp_path, Config())
    RunFolder.claim(tmp_path, Config()).release()


@pytest.mark.parametrize("is_taken", [False, True])
def test_a_folder_that_was_moved_away_is_not_written(tmp_path: Path, is_taken: bool) -> None:
    """A run whose folder was moved or removed ends, also where another process has a run of that name by then."""
    path, moved = tmp_path / "run", tmp_path / "moved"
    with RunFolder.claim(path, Config()) as first, ExitStack() as stack:
        first.log(ROUNDS, {"step": 1})
        path.rename(moved)
        if is_taken:
            stack.enter_context(RunFolder.claim(path, Config())).log(ROUNDS, {"step": 1})
        before = contents(tmp_path)
        ends = (lambda _: first.write_weights(b""), lambda _: first.finish(GOOD))
        for write in (*(partial(first.log, name) for name in LOGS), *ends):
            with pytest.raises(FileNotFoundError, match="moved, removed or replaced"):
                write({"step": 2})
        assert contents(tmp_path) == before
    with RunFolder.claim(moved, Config()) as folder:
        (moved / "rounds.jsonl").rename(moved / "old")
        folder.log(ROUNDS, {"step": 2})
        (moved / "rounds.jsonl").unlink()
        with pytest.raises(FileNotFoundError, match=r"rounds\.jsonl"):
            folder.log(ROUNDS, {"step": 3})


def test_a_run_without_standard_input(tmp_path: Path) -> None:
    """The lock of the first run of a service has the descriptor 0, which counts as one."""
    lines = "import os, pathlib; os.close(0)", "from twophase.runs.folder import RunFolder"
    script = "\n".join([*lines, "RunFolder.claim(pathlib.Path('run'), {'steps': 1}).log('rounds.jsonl', {'step': 1})"])
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True)
    assert (tmp_path / "run" / "rounds.jsonl").read_text() == '{"step": 1}\n'


def test_finished_run(tmp_path: Path) -> None:
    """A finished run's summary comes back with its fingerprint, in this process and from the folder alone.

    A diverged run whose loss is NaN is finished, with null in standard JSON; no task needs a perplexity.
    """
    with RunFolder.claim(tmp_path, Config()) as folder:
        folder.finish({**GOOD, "best": math.inf})
        expected = {**GOOD, "best": None, "config": fingerprint(Config())}
        summary = folder.summary() or {}
        assert summary == read_summary(tmp_path) == read_summary(tmp_path, folder.fingerprint)
        assert {key: value for key, value in summary.items() if key != "summary_sha256"} == expected
        assert read_summary(tmp_path, "0" * 12) is None
        folder.finish({**GOOD, "validation_loss": math.nan, "perplexity": math.inf, "diverged": True})
        assert (folder.summary() or {})["validation_loss"] is None
        folder.finish({key: value for key, value in GOOD.items() if key != "perplexity"})
        assert folder.summary() is not None


@pytest.mark.parametrize("key", [key for key in GOOD if key != "perplexity"])
def test_finish_refuses_what_would_not_validate(tmp_path: Path, key: str) -> None:
    """A summary with a value of the wrong type, or without it, is our own mistake, is named, and is not written."""
    with RunFolder.claim(tmp_path, Config()) as folder:
        with pytest.raises(ValueError, match=rf"RunFolder\.finish: .*{key}"):
            folder.finish({**GOOD, key: [2.0]})
        with pytest.raises(ValueError, match=rf"has no '{key}'"):
            folder.finish({name: item for name, item in GOOD.items() if name != key})
        assert not (tmp_path / "summary.json").exists()


ODD_NUMBERS = {
    "validation_loss": ("1" + "0" * 400, "1" + "0" * 5000, "NaN", "-Infinity", "1e400", "null", '"2.0"'),
    "tokens": ("-1" + "0" * 400, "1.5", "true"),
    "seconds": ("1e300", "null"),
    "diverged": ("0",),
    "exit_reason": ("null",),
    "perplexity": ('"7.4"', "[7.4]", "1" + "0" * 400, "true"),
    "engine_share": ("{}",),
    "rounds": ("1.5", '"3"', "null"),
    "restarts": ("true",),
    "steps": ("1" + "0" * 400,),
}


@pytest.mark.parametrize(("key", "text"), [(key, text) for key, texts in ODD_NUMBERS.items() for text in texts])
def test_odd_numbers_are_no_outcome(tmp_path: Path, key: str, text: str) -> None:
    """A number that no float holds, or a value of another kind, means that the run is not finished."""
    with RunFolder.claim(tmp_path, Config()) as folder:
        folder.finish({**GOOD, "rounds": 4, "restarts": 1, "steps": 12, "engine_share": None})
    path = tmp_path / "summary.json"
    record = json.loads(path.read_text())
    del record["summary_sha256"]  # which would refuse every change
    path.write_text(json.dumps(record))
    assert read_summary(tmp_path) is not None
    path.write_text(json.dumps(record | {key: "odd"}).replace('"odd"', text))
    assert read_summary(tmp_path) is None


DAMAGES = ["{", "", "[]", '{"exit_reason": "\xe9"}', "other", "a digit", "config gone", "config damaged"]


@pytest.mark.parametrize("damage", [*DAMAGES, pytest.param("[" * 100_000, id="nested")])
def test_damaged_summary_is_not_finished(tmp_path: Path, damage: str) -> None:
    """Whatever is wrong with summary.json, the run counts as not finished and nothing is raised."""
    with RunFolder.claim(tmp_path, Config()) as folder:
        folder.finish(GOOD)
    path, config = tmp_path / "summary.json", tmp_path / "config.yaml"
    if damage == "other":
        path.write_text(json.dumps({**json.loads(path.read_text()), "config": "0" * 12}))
    elif damage == "a digit":
        path.write_text(json.dumps({**json.loads(path.read_text()), "validation_loss": 2.5}))
    elif damage == "config gone":
        config.unlink()
    elif damage == "config damaged":
        config.write_text("{")
    else:
        path.write_text(damage, encoding="latin-1")
    assert read_summary(tmp_path) is None


def test_damaged_weights_are_named(tmp_path: Path) -> None:
    """Weights of another content than the summary recorded are a fault; removed ones and those of old runs are none."""
    with RunFolder.claim(tmp_path, Config()) as folder:
        folder.write_weights(bytes(1000))
        folder.finish(GOOD)
        summary = folder.summary() or {}
    assert weights_fault(tmp_path, summary) == ""
    path = tmp_path / "weights.safetensors"
    path.write_bytes(bytes(999) + b"\1")
    fault = weights_fault(tmp_path, summary)
    assert fault.startswith(f"{path} is damaged: its SHA-256 differs")
    assert "delete it and summary.json and repeat" in fault
    assert weights_fault(tmp_path, GOOD) == ""
    path.unlink()
    assert weights_fault(tmp_path, summary) == ""


@pytest.mark.timeout(30)
def test_a_pipe_is_never_waited_for(tmp_path: Path) -> None:
    """A pipe in the place of a summary, of weights or of a log counts as damage."""
    with RunFolder.claim(tmp_path, Config()) as folder:
        folder.write_weights(b"weights")
        folder.finish(GOOD)
        summary = folder.summary() or {}
    for name in ("summary.json", "weights.safetensors", "rounds.jsonl"):
        (tmp_path / name).unlink(missing_ok=True)
        os.mkfifo(tmp_path / name)
    assert read_summary(tmp_path) is None
    assert "cannot be read (it is a pipe" in weights_fault(tmp_path, summary)
    with pytest.raises(UsageError, match="it is a pipe"):
        read_lines(tmp_path / "rounds.jsonl")
    with pytest.raises(IsADirectoryError):
        write_atomic(Path(), "text")


def test_logs_are_standard_json(tmp_path: Path) -> None:
    """Every record is one line of standard JSON at once, with null for what is not finite; env.json is written once."""
    with RunFolder.claim(tmp_path, Config()) as folder:
        folder.write_env({"python": "3.11", "load": math.nan})
        folder.write_env({"python": "3.12"})
        assert json.loads((tmp_path / "env.json").read_text()) == {"python": "3.11", "load": None}
        folder.log(METRICS, {"step": 1, "loss": math.nan})
        folder.log(METRICS, {"step": 2, "per_block": {"a": [math.inf, 1.0], "b": (-math.inf,)}})
        folder.log(ROUNDS, {"round": 1, "restart": True, "note": "ß"})
        for line in (tmp_path / "metrics.jsonl").read_text().splitlines():
            json.loads(line, parse_constant=pytest.fail)
        expected = [{"step": 1, "loss": None}, {"step": 2, "per_block": {"a": [None, 1.0], "b": [None]}}]
        assert read_lines(tmp_path / "metrics.jsonl") == expected
        assert read_lines(tmp_path / "rounds.jsonl") == [{"round": 1, "restart": True, "note": "ß"}]


@given(before=st.integers(0, 4), after=st.integers(0, 4), torn=st.binary(max_size=5).filter(lambda b: b"\n" not in b))
def test_rewind_repeats_and_loses_no_line(
    tmp_path_factory: pytest.TempPathFactory, before: int, after: int, torn: bytes
) -> None:
    """After a rewind to a checkpoint, the logs hold exactly the lines before it, torn last lines or not."""
    path = tmp_path_factory.mktemp("run")
    with RunFolder.claim(path, Config()) as folder:
        for step in range(before):
            folder.log(ROUNDS, {"round": step})
        position = json.loads(json.dumps(folder.position()))
        for step in range(before, before + after):
            folder.log(ROUNDS, {"round": step})
        with (path / "rounds.jsonl").open("ab") as file:
            file.write(torn)
        folder.rewind(position)
        folder.log(ROUNDS, {"round": before})
        assert [record["round"] for record in read_lines(path / "rounds.jsonl")] == [*range(before + 1)]


def test_rewind_of_missing_and_torn_logs(tmp_path: Path) -> None:
    """A missing log stays missing, a torn one keeps its whole lines, and no position means from the start."""
    with RunFolder.claim(tmp_path, Config()) as folder:
        assert {name: mark["bytes"] for name, mark in folder.position().items()} == {
            "metrics.jsonl": 0,
            "rounds.jsonl": 0,
            "steps.jsonl": 0,
        }
        folder.rewind(folder.position())
        assert not (tmp_path / "rounds.jsonl").exists()
        (tmp_path / "rounds.jsonl").write_bytes(b'{"round": 0}\n{"rou')
        folder.rewind({"rounds.jsonl": 17})
        assert (tmp_path / "rounds.jsonl").read_bytes() == b'{"round": 0}\n'
        folder.rewind({})
        assert (tmp_path / "rounds.jsonl").read_bytes() == b""


def test_read_lines_tolerates_a_cut_end_only(tmp_path: Path) -> None:
    """A last line that was cut is left out; damage before it is an error that names the line."""
    path = tmp_path / "metrics.jsonl"
    assert read_lines(path) == []
    path.write_bytes(b'{"a": 1}\n{"a": 2}\n{"a": \xc3')
    assert read_lines(path) == [{"a": 1}, {"a": 2}]
    for damage in (b"{\n", b"3\n", b"\xff\n"):
        path.write_bytes(b'{"a": 1}\n' + damage + b'{"a": 2}\n')
        with pytest.raises(UsageError, match="line 2 is not a JSON object"):
            read_lines(path)


def test_write_atomic_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that fails before its end leaves the old content and no temporary file."""
    path = tmp_path / "file"
    write_atomic(path, "old ß")
    assert path.read_bytes() == "old ß".encode()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            write_atomic(path, b"new")
    assert contents(tmp_path) == {"file": "old ß".encode()}
    write_atomic(path, b"new")
    assert contents(tmp_path) == {"file": b"new"}


def test_whole_numbers_written_as_such_still_match(tmp_path: Path) -> None:
    """A config.yaml with 1 where the configuration says 1.0 is the same run, and its summary validates."""
    config = replace(Config(), outer=Outer(lr=1.0))
    RunFolder.claim(tmp_path, config).release()
    path = tmp_path / "config.yaml"
    path.write_text(path.read_text().replace("lr: 1.0", "lr: 1"))
    with RunFolder.claim(tmp_path, config) as folder:
        folder.finish(GOOD)
        assert folder.summary() == read_summary(tmp_path)
        assert folder.summary() is not None


def test_a_record_set_aside(tmp_path: Path) -> None:
    """A record set aside never covers another."""
    line = {"step": 4, "round": 2, "checksum": "00ff"}
    with RunFolder.claim(tmp_path, Config()) as folder:
        folder.log(ROUNDS, line)
        folder.checkpoint_dir.mkdir()
        (folder.checkpoint_dir / "state").touch()
        first = folder.set_aside("parted")
        assert sorted(path.name for path in first.iterdir()) == ["checkpoint", "rounds.jsonl"]
        assert (first / "checkpoint" / "state").exists()
        assert not folder.checkpoint_dir.exists()
        folder.log(ROUNDS, line)
        second = folder.set_aside("parted")
        assert (first.name, second.name) == ("parted", "parted-2")
        assert read_lines(second / "rounds.jsonl") == [line]


def test_a_kill_while_a_record_is_set_aside_leaves_no_checkpoint_without_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint goes first: one whose logs are gone would be refused by every later command."""
    rename, renamed = Path.rename, itertools.count(1)

    def killed(path: Path, target: Path) -> Path:
        if next(renamed) == 2:
            raise SystemExit
        return rename(path, target)

    with RunFolder.claim(tmp_path, Config()) as folder:
        folder.log(ROUNDS, {"step": 4})
        folder.checkpoint_dir.mkdir()
        monkeypatch.setattr(Path, "rename", killed)
        with pytest.raises(SystemExit):
            folder.set_aside("parted")
        assert (tmp_path / "rounds.jsonl").exists()
        assert not folder.checkpoint_dir.exists()
