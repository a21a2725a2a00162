"""Run folders: whose they are, what survives a kill, and when a run is finished."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twophase.base.config import UsageError, fingerprint, load_yaml, to_tree
from twophase.base.files import write_atomic
from twophase.runs.folder import RunFolder, check_place, list_some, read_lines, read_summary


@dataclass(frozen=True)
class Outer:
    """A group of values."""

    lr: float = 0.7
    restart: str = "never"


@dataclass(frozen=True)
class Config:
    """A small configuration."""

    outer: Outer = field(default_factory=Outer)
    betas: tuple[float, float] = (0.9, 1e-5)
    steps: int = 10
    nesterov: bool = True


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


def test_claim_makes_the_folder(tmp_path: Path) -> None:
    """A missing folder, parents included, is made, and config.yaml holds the resolved configuration."""
    path = tmp_path / "a" / "b"
    with RunFolder.claim(path, Config()) as folder:
        assert load_yaml(path / "config.yaml") == to_tree(Config())
        assert not folder.resumed
        assert folder.fingerprint == fingerprint(Config())
        assert folder.path == path
        assert folder.checkpoint_dir == path / "checkpoint"
        assert folder.weights == path / "weights.safetensors"
        assert folder.summary() is None


@pytest.mark.parametrize("leftover", [[], [".tmp-config.yaml-1-ab"], [".lock"], [".lock", ".tmp-x"]])
def test_claim_takes_an_empty_folder(tmp_path: Path, leftover: list[str]) -> None:
    """A folder that holds nothing, or only our own leftovers, counts as empty."""
    for name in leftover:
        (tmp_path / name).touch()
    with RunFolder.claim(tmp_path, Config()) as folder:
        assert not folder.resumed


def test_claim_resumes_the_same_run(tmp_path: Path) -> None:
    """The same configuration claims the folder again, and config.yaml keeps its bytes."""
    RunFolder.claim(tmp_path, Config()).release()
    before = contents(tmp_path)
    with RunFolder.claim(tmp_path, Config()) as folder:
        assert folder.resumed
    assert contents(tmp_path) == before


def test_claim_refuses_another_run(tmp_path: Path) -> None:
    """Another configuration is refused by a message with the folder, the differing values and the remedy."""
    RunFolder.claim(tmp_path, Config()).release()
    before = contents(tmp_path)
    with pytest.raises(UsageError) as error:
        RunFolder.claim(tmp_path, Config(outer=Outer(lr=0.9), steps=20))
    for part in (
        str(tmp_path),
        "another run",
        "outer.lr is 0.7 there, 0.9 here",
        "steps is 10 there, 20 here",
        "--out",
    ):
        assert part in str(error.value)
    assert contents(tmp_path) == before


def test_refused_folder_is_left_untouched(tmp_path: Path) -> None:
    """A folder with foreign files is refused without so much as a lock file being added to it."""
    (tmp_path / "thesis.tex").write_text("all of it")
    with pytest.raises(UsageError, match=r"thesis\.tex.*choose another --out"):
        RunFolder.claim(tmp_path, Config())
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_long_lists_of_differences_are_cut() -> None:
    """At most six differences are listed, the rest is counted."""
    assert list_some([str(i) for i in range(6)]) == "0; 1; 2; 3; 4; 5"
    assert list_some([str(i) for i in range(9)]) == "0; 1; 2; 3; 4; 5; and 3 more"


def test_claim_refuses_a_file(tmp_path: Path) -> None:
    """A file in place of the folder, or of one of its parents, is refused and kept."""
    file = tmp_path / "file"
    file.write_text("precious")
    for path in (file, file / "run"):
        with pytest.raises(UsageError, match=r"file.*choose another --out"):
            RunFolder.claim(path, Config())
    assert file.read_text() == "precious"


@pytest.mark.parametrize("content", [b"", b"outer: [", b"- 1\n", b"\xff\xfe\x00"])
def test_claim_refuses_a_damaged_config(tmp_path: Path, content: bytes) -> None:
    """A config.yaml that is not a YAML mapping is refused and kept."""
    (tmp_path / "config.yaml").write_bytes(content)
    with pytest.raises(UsageError, match=r"config\.yaml is damaged"):
        RunFolder.claim(tmp_path, Config())
    assert (tmp_path / "config.yaml").read_bytes() == content


def test_claim_refuses_an_unwritable_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A place that cannot be written is a usage error that gives the system's reason, at every one of the steps."""

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    for target, name in ((Path, "mkdir"), (os, "open"), (Path, "iterdir"), (os, "fsync")):
        with monkeypatch.context() as patch:
            patch.setattr(target, name, refuse)
            with pytest.raises(UsageError, match=r"Permission denied.*choose another --out"):
                RunFolder.claim(tmp_path / name, Config())
    RunFolder.claim(tmp_path / "fsync", Config()).release()  # what the last refusal left behind is no obstacle


def test_second_claim_is_refused(tmp_path: Path) -> None:
    """While one process trains, another is told so; after the release it may go on."""
    first = RunFolder.claim(tmp_path, Config())
    before = contents(tmp_path)
    with pytest.raises(UsageError, match="another process is training in this folder"):
        RunFolder.claim(tmp_path, Config())
    assert contents(tmp_path) == before
    first.release()
    first.release()  # safe to repeat
    RunFolder.claim(tmp_path, Config()).release()


def test_failed_claim_releases_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A claim that fails after it has locked the folder leaves it free."""
    with monkeypatch.context() as patch:
        patch.setattr("twophase.runs.folder.dump_yaml", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            RunFolder.claim(tmp_path, Config())
    RunFolder.claim(tmp_path, Config()).release()


def test_death_releases_the_lock(tmp_path: Path) -> None:
    """A process that is killed by SIGKILL leaves a folder that can be claimed at once."""
    script = (
        "import sys, time; from pathlib import Path; from twophase.runs.folder import RunFolder\n"
        "from dataclasses import dataclass\n"
        "@dataclass(frozen=True)\n"
        "class Config:\n    steps: int = 1\n"
        "folder = RunFolder.claim(Path(sys.argv[1]), Config()); print('claimed', flush=True); time.sleep(60)"
    )

    @dataclass(frozen=True)
    class Small:
        steps: int = 1

    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"claimed\n"
        with pytest.raises(UsageError, match="another process"):
            RunFolder.claim(tmp_path, Small())
        process.send_signal(signal.SIGKILL)
    with RunFolder.claim(tmp_path, Small()) as folder:
        assert folder.resumed


def test_finished_run(tmp_path: Path) -> None:
    """A finished run's summary comes back with its fingerprint, in this process and from the folder alone."""
    with RunFolder.claim(tmp_path, Config()) as folder:
        folder.finish({**GOOD, "best": math.inf})
        assert folder.summary() == {**GOOD, "best": None, "config": fingerprint(Config())}
    assert read_summary(tmp_path) == read_summary(tmp_path, fingerprint(Config())) == folder.summary()
    assert read_summary(tmp_path, "0" * 12) is None


def test_diverged_run_may_lack_numbers(tmp_path: Path) -> None:
    """A diverged run whose loss is NaN is finished, with null in standard JSON."""
    with RunFolder.claim(tmp_path, Config()) as folder:
        folder.finish({**GOOD, "validation_loss": math.nan, "perplexity": math.inf, "diverged": True})
        assert '"perplexity": null' in (tmp_path / "summary.json").read_text()
        assert (folder.summary() or {})["validation_loss"] is None


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("validation_loss", "2.0"),
        ("validation_loss", math.nan),
        ("perplexity", True),
        ("tokens", 1.5),
        ("tokens", True),
        ("seconds", None),
        ("diverged", 0),
        ("exit_reason", None),
    ],
)
def test_finish_refuses_what_would_not_validate(tmp_path: Path, key: str, value: object) -> None:
    """A summary with a value of the wrong type is our own mistake, is named, and is not written."""
    with RunFolder.claim(tmp_path, Config()) as folder:
        with pytest.raises(ValueError, match=rf"RunFolder\.finish: .*{key}"):
            folder.finish({**GOOD, key: value})
        with pytest.raises(ValueError, match=rf"has no '{key}'"):
            folder.finish({name: item for name, item in GOOD.items() if name != key})
        assert not (tmp_path / "summary.json").exists()


@pytest.mark.parametrize("damage", ["cut", "empty", "list", "latin", "other", "type", "config gone", "config damaged"])
def test_damaged_summary_is_not_finished(tmp_path: Path, damage: str) -> None:
    """Whatever is wrong with summary.json, the run counts as not finished and nothing is raised."""
    with RunFolder.claim(tmp_path, Config()) as folder:
        folder.finish(GOOD)
    path, text = tmp_path / "summary.json", (tmp_path / "summary.json").read_text()
    record = json.loads(text)
    damaged = {
        "cut": text[:-20],
        "empty": "",
        "list": "[]",
        "other": json.dumps({**record, "config": "0" * 12}),
        "type": json.dumps({**record, "tokens": "many"}),
    }
    if damage in damaged:
        path.write_text(damaged[damage])
    elif damage == "latin":
        path.write_bytes(b'{"exit_reason": "\xe9"}')
    elif damage == "config gone":
        (tmp_path / "config.yaml").unlink()
    else:
        (tmp_path / "config.yaml").write_text("{")
    assert read_summary(tmp_path) is None


def test_env_is_written_once(tmp_path: Path) -> None:
    """A resumed run keeps the record of where it began."""
    with RunFolder.claim(tmp_path, Config()) as folder:
        folder.write_env({"python": "3.11", "load": math.nan})
        folder.write_env({"python": "3.12"})
    assert json.loads((tmp_path / "env.json").read_text()) == {"python": "3.11", "load": None}


def test_logs_are_standard_json(tmp_path: Path) -> None:
    """Every record is one line of standard JSON at once, with null for what is not finite, nested values included."""
    with RunFolder.claim(tmp_path, Config()) as folder:
        folder.log_metrics({"step": 1, "loss": math.nan})
        folder.log_metrics({"step": 2, "loss": 1.5, "per_block": {"a": [math.inf, 1.0], "b": (-math.inf,)}})
        folder.log_round({"round": 1, "restart": True, "note": "ß"})
        for line in (tmp_path / "metrics.jsonl").read_text().splitlines():
            json.loads(line, parse_constant=pytest.fail)
        assert read_lines(tmp_path / "metrics.jsonl") == [
            {"step": 1, "loss": None},
            {"step": 2, "loss": 1.5, "per_block": {"a": [None, 1.0], "b": [None]}},
        ]
        assert read_lines(tmp_path / "rounds.jsonl") == [{"round": 1, "restart": True, "note": "ß"}]


@given(before=st.integers(0, 4), after=st.integers(0, 4), torn=st.binary(max_size=5).filter(lambda b: b"\n" not in b))
def test_rewind_repeats_and_loses_no_line(
    tmp_path_factory: pytest.TempPathFactory, before: int, after: int, torn: bytes
) -> None:
    """After a rewind to a checkpoint, the logs hold exactly the lines before it, torn last lines or not."""
    path = tmp_path_factory.mktemp("run")
    with RunFolder.claim(path, Config()) as folder:
        for step in range(before):
            folder.log_round({"round": step})
        position = json.loads(json.dumps(folder.position()))
        for step in range(before, before + after):
            folder.log_round({"round": step})
        with (path / "rounds.jsonl").open("ab") as file:
            file.write(torn)
        folder.rewind(position)
        folder.log_round({"round": before})
        assert [record["round"] for record in read_lines(path / "rounds.jsonl")] == [*range(before + 1)]


def test_rewind_of_missing_and_short_logs(tmp_path: Path) -> None:
    """A missing log stays missing, a shorter one keeps its whole lines, and no position means from the start."""
    with RunFolder.claim(tmp_path, Config()) as folder:
        assert folder.position() == {"metrics.jsonl": 0, "rounds.jsonl": 0, "steps.jsonl": 0}
        folder.rewind({"metrics.jsonl": 10, "rounds.jsonl": 10})
        assert not (tmp_path / "rounds.jsonl").exists()
        (tmp_path / "rounds.jsonl").write_bytes(b'{"round": 0}\n{"rou')
        folder.rewind({"metrics.jsonl": 10, "rounds.jsonl": 1000})
        assert (tmp_path / "rounds.jsonl").read_bytes() == b'{"round": 0}\n'
        folder.rewind()
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


def test_check_place_tells_free_from_ours(tmp_path: Path) -> None:
    """A missing or empty folder is free, one with the marker is ours, and looking changes nothing."""
    assert not check_place(tmp_path / "nothing", "sweep.json", "sweep")
    assert not (tmp_path / "nothing").exists()
    assert not check_place(tmp_path, "sweep.json", "sweep")
    (tmp_path / "sweep.json").touch()
    assert check_place(tmp_path, "sweep.json", "sweep")


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


def test_the_newest_round_and_a_record_set_aside(tmp_path: Path) -> None:
    """The last whole line counts, whatever is wrong with others; a record that is set aside never covers another."""
    with RunFolder.claim(tmp_path, Config()) as folder:
        assert folder.last_round() is None
        line = {"step": 4, "checksum": "00ff"}
        (tmp_path / "rounds.jsonl").write_text(f'damaged\n{json.dumps(line)}\n{{"step": 8')
        assert folder.last_round() == line
        for text in ("", "[1]\n", "no json\n", '{"step": 4}\n'):
            (tmp_path / "rounds.jsonl").write_text(text)
            assert folder.last_round() is None
        folder.checkpoint_dir.mkdir()
        (folder.checkpoint_dir / "held").touch()
        first = folder.set_aside("parted")
        assert sorted(path.name for path in first.iterdir()) == ["checkpoint", "rounds.jsonl"]
        assert (first / "checkpoint" / "held").exists()
        assert not folder.checkpoint_dir.exists()
        folder.log_round(line)
        second = folder.set_aside("parted")
        assert (first.name, second.name) == ("parted", "parted-2")
        assert read_lines(second / "rounds.jsonl") == [line]
        assert folder.resumed is False
    with RunFolder.claim(tmp_path, Config()) as folder:
        assert folder.resumed
