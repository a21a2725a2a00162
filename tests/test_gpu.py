"""The benchmarks that want a GPU: what they do without one, and with damaged or missing things."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import gpu
import textmaker
from gpu_parts import driver, run
from gpu_parts.records import Record, Settings, Unfinished

PROGRAM = gpu.HERE / "gpu.py"
ABSENT = "tyro docstring_parser optuna alembic sqlalchemy rich scipy datasets submitit".split()
"""Packages that a bare machine with a GPU does not have."""
FILES = {
    *(f"{part}.{ending}" for part in gpu.PARTS for ending in ("json", "log")),
    *(f"probe-{name}.csv" for name in ("kernels", "products", "attention", "sum", "variants")),
    *("engine-phases.csv", "run.csv", "run.png", "nano.csv", "figures.json"),
}


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """Options of a toy's parts on a small text; a new folder."""
    text = textmaker.write(tmp_path / "text.txt", documents=200)
    return ["--out", str(tmp_path / "out"), "--tiny", "--corpus", f"file:{text}", "--work", str(tmp_path / "work")]


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What the program does to its process is undone."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", "")
    yield
    torch.set_num_threads(1)


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_all_parts(tmp_path: Path, words: list[str]):
    """With few packages all parts leave files and figures; a second call does nothing, one after a cut what is left."""
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({ABSENT!r}))\n")
    out = tmp_path / "out"

    def call() -> tuple[dict[str, float], list[str]]:
        ended = subprocess.run(
            [sys.executable, str(PROGRAM), *words, "--seed", "0"],
            env=os.environ | {"PYTHONPATH": str(bare)}, cwd=tmp_path, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert ended.returncode == 0, ended.stdout + ended.stderr
        lines = ended.stdout.splitlines()
        return json.loads(lines[-1]), lines[:-1]

    figures, said = call()
    assert set(contents(out)) == FILES
    assert sum(map(len, contents(out).values())) < 1 << 20
    for name in ("rho", "eager_ratio", "compiled_ratio", "peak_memory_gb", "tokens_ratio_s1", "nano_nesterov_best_k"):
        assert figures[name] > 0
    assert (figures["resume_same_bits"], figures["units_left"], figures["nano_cells"]) == (1, 0, 20)
    rows = table(out / "probe-sum.csv")
    step = float(rows[-1]["ms"])
    assert step == pytest.approx(sum(float(row["ms"]) for row in rows if row["part"] not in ("step", "sum of kernels")))
    assert [row["cell"] for row in table(out / "nano.csv")].count("auto-1-auto") == 1
    before = contents(out)
    again, said = call()
    assert (again, said, contents(out)) == (figures, [], before)


@pytest.mark.slow
def test_killed_call(tmp_path: Path, words: list[str]):
    """A call that is killed takes its unit's process with it, and the next one does what it had not done."""
    command = [sys.executable, str(PROGRAM), *words, "--seed", "1", "--parts", "nano"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        for line in process.stdout:
            if line.startswith("seed 1, nesterov-0.7-3"):
                break
        (unit,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        process.kill()
    end = time.monotonic() + 20
    while Path(f"/proc/{unit}").exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert not Path(f"/proc/{unit}").exists()
    before = [row["cell"] for row in table(tmp_path / "out" / "nano.csv")]
    assert before[3:4] == ["nesterov-0.7-3"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rows = [row["cell"] for row in table(tmp_path / "out" / "nano.csv")]
    assert rows[: len(before)] == before
    assert len(set(rows)) == len(rows) == 20
    assert said.count("perplexity ") == 20 - len(before)


def launched(monkeypatch: pytest.MonkeyPatch, failing: str = "") -> list[str]:
    """Have units end at once, one of them badly; the list is of those that were begun."""
    begun: list[str] = []

    def launch(part: str, unit: str, options: Any, end: float) -> int:
        del options, end
        begun.append(part)
        return driver.REFUSED if unit == failing else driver.DONE

    monkeypatch.setattr(driver, "launch", launch)
    return begun


DAMAGED = (
    '{"tiny": true, "uni',
    "[]",
    '{"tiny": true, "units": {"a": 3}, "rows": []}',
    '{"tiny": true, "units": {"kernels": {"figures": {"step_ms": 1.0}}}, "rows": []}',  # without its classes
    '{"tiny": false, "units": {}, "rows": []}',  # not damaged, but of the whole model
)


@pytest.mark.parametrize("content", DAMAGED)
def test_damaged_record(
    tmp_path: Path, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], content: str
):
    """A part whose record is damaged, or of another model, is left alone with one message; the others run."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "probe.json").write_text(content)
    begun = launched(monkeypatch)
    assert gpu.main(words) == 1
    said = [line for line in capsys.readouterr().out.splitlines() if "probe.json" in line]
    assert len(said) == 1
    assert "--out" in said[0]
    assert {"engine", "run", "nano"} <= set(begun)
    assert (tmp_path / "out" / "probe.json").read_text() == content


def test_failed_unit(words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """After a unit that failed the others run; the status says so, and another call is asked for."""
    begun = launched(monkeypatch, failing="overhead")
    assert gpu.main(words) == 1
    assert begun == ["probe"] * 4 + ["engine"] * 3 + ["run", "nano"]
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["units_left"] == 2  # overhead, and the second seed


def refused(capsys: pytest.CaptureFixture[str], words: list[str], *named: str) -> None:
    """Nothing is begun, and one line names what is wrong and the remedy."""
    assert gpu.main(words) == 2
    (line,) = capsys.readouterr().out.splitlines()
    assert all(word in line for word in named), line


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_no_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Without a GPU nothing is begun, and the message names the way to try it."""
    refused(capsys, ["--out", str(tmp_path / "out")], "--tiny")
    assert not (tmp_path / "out").exists()


def test_refusals(
    tmp_path: Path, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """A file in the place of the folder, and a missing package that all parts need, are refused in one line."""
    begun = launched(monkeypatch)
    (tmp_path / "out").touch()
    refused(capsys, words, "--out")
    (tmp_path / "out").unlink()
    monkeypatch.setitem(sys.modules, "yaml", None)
    refused(capsys, words, "PyYAML", "--wheels")
    assert not begun


def wheel(folder: Path, name: str, content: bytes | None = None) -> None:
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.whl"
    if content is not None:
        path.write_bytes(content)
        return
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name.split('-', maxsplit=1)[0]}.py", "VALUE = 3\n")


def test_wheels(tmp_path: Path):
    """Wheels for this Python can be imported from, those for another are passed over."""
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    for tags in (
        "pure-1-py3-none-any",
        f"fitting-1-{python}-{python}-any",
        "foreign-1-cp27-cp27m-any",
        "os2-1-py3-none-os2",
    ):
        wheel(tmp_path / "wheels", tags)
    gpu.unpack(tmp_path / "wheels", tmp_path / "place")
    assert {path.name for path in (tmp_path / "place").iterdir()} == {"pure.py", "fitting.py"}


@pytest.mark.parametrize("content", [None, b"no zip file"])
def test_bad_wheels(
    tmp_path: Path,
    words: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    content: bytes | None,
):
    """Without the folder, or with a damaged wheel, there is one message, and the parts run with what is installed."""
    if content is not None:
        wheel(tmp_path / "wheels", "broken-1-py3-none-any", content)
    begun = launched(monkeypatch)
    assert gpu.main([*words, "--wheels", str(tmp_path / "wheels")]) == 1
    assert sum("--wheels" in line for line in capsys.readouterr().out.splitlines()) == 1
    assert set(begun) == set(gpu.PARTS)


def unit_says(capsys: pytest.CaptureFixture[str], words: list[str], unit: str, *options: str) -> tuple[int, list[str]]:
    """The status of a unit in this process, and its lines."""
    Path(words[words.index("--out") + 1]).mkdir(exist_ok=True)
    status = gpu.main([*words, "--unit", unit, *options])
    return status, capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("unit", ["run.curve", "nano.seed0", "probe.kernels"])
def test_too_little_memory(
    tmp_path: Path, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], unit: str
):
    """A device on which not even one sequence fits ends a unit with one message and the remedy; nothing is recorded."""

    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("twophase.tasks.lm.step.loss", full)
    status, (line,) = unit_says(capsys, words, unit, "--deadline", str(time.time() + 60))
    assert status == driver.REFUSED
    assert "out of memory at --compute.micro-batch 1" in line
    assert not (tmp_path / "out" / f"{unit.partition('.')[0]}.json").exists()


def test_unexpected_error(
    tmp_path: Path, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """An error that nothing foresaw is one line, and its traceback is in the log."""

    def fail(*_: Any) -> None:
        raise AssertionError("a kernel\nwithout a name")

    monkeypatch.setitem(run.UNITS, "curve", fail)
    status, lines = unit_says(capsys, words, "run.curve")
    assert (status, len(lines)) == (driver.FAILED, 1)
    assert "Traceback" in (tmp_path / "out" / "run.log").read_text()


def test_run_stops_and_goes_on(tmp_path: Path, words: list[str]):
    """A run that stops near its deadline keeps its curve, and goes on to the same losses as one that does not stop."""
    corpus = words[words.index("--corpus") + 1]

    def losses(out: str, *deadlines: float) -> list[str]:
        place = tmp_path / out
        place.mkdir()
        for seconds in deadlines:
            settings = Settings(place, tmp_path / f"{out}-work", time.time() + seconds, tiny=True, corpus=corpus)
            settings.work.mkdir(exist_ok=True)
            try:
                run.curve(settings, Record(place, "run", tiny=True))
            except Unfinished:
                assert not (place / "run.json").exists()
                assert (place / "run.csv").exists()
        assert "curve" in Record(place, "run", tiny=True).units
        return [row["validation_loss"] for row in table(place / "run.csv")]

    assert losses("parts", -1.0, 1000.0) == losses("whole", 1000.0)
