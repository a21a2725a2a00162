"""What a benchmark's figures are held against."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

import bounds
from modules import load

FOLDER = Path(str(bounds.__file__)).parent
RUNNER = load(FOLDER / "__main__.py")


@pytest.mark.parametrize(
    ("value", "status"), [(1.5, 0), (2.5, 0), (2.6, 1), (1.4, 1), (math.nan, 1), (math.inf, 1), (None, 0)]
)
def test_status_says_whether_a_bound_is_broken(
    value: float | None, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A value beyond its bound, or NaN, gives status 1 and one line; the figures are the last line whatever happens."""
    monkeypatch.setattr(bounds, "BOUNDS", {"walk": {"ratio": {"min": 1.5, "max": 2.5}, "absent": {"max": 1.0}}})
    figures = {"ratio": value, "seconds": 7.0}
    assert bounds.finish("walk", figures) == status
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == status + 1
    assert json.dumps(json.loads(lines[-1])) == json.dumps(figures)


def test_stored_bounds() -> None:
    """Each bound belongs to a benchmark that exists, has a limit and the source of its number."""
    for name, stored in bounds.BOUNDS.items():
        assert (FOLDER / f"{name.removesuffix('_gpu')}.py").is_file(), name
        for figure, bound in stored.items():
            assert bound.keys() & {"min", "max"}, (name, figure)
            assert bound.keys() <= {"min", "max", "goal", "source"}, (name, figure)
            if "goal" in bound:  # harder than the bound, or it would be none
                assert bound["goal"] < bound["max"] if "max" in bound else bound["goal"] > bound["min"], (name, figure)
            assert bound.get("source"), (name, figure)


def test_all_are_run_and_summed_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Those after a failed one are run, too; each has a line with what became of it; any failure is status 1."""
    programs = {
        "good": ("""print('words'); print('{"ratio": 1.0}')""", "ok"),
        "broken": ("""print('{"ratio": 9.0}'); raise SystemExit(1)""", "a bound is broken"),
        "torn": ("print('words'); raise KeyError('x')", "failed, status 1"),
        "killed": ("import os; print('{}', flush=True); os.kill(os.getpid(), 9)", "failed, status -9"),
        "idle": ("print('{}')", "skipped"),
        "renamed": ("""print('{"other": 1.0}')""", "not measured: ratio"),
    }
    for name, (program, _) in programs.items():
        (tmp_path / f"{name}.py").write_text(program)
    monkeypatch.setattr(RUNNER, "FOLDER", tmp_path)
    monkeypatch.setattr(RUNNER, "BENCHMARKS", dict.fromkeys(programs, ()))
    monkeypatch.setattr(RUNNER, "BOUNDS", {"renamed": {"ratio": {"max": 1.0}}})
    assert RUNNER.main([]) == 1
    lines = capfd.readouterr().out.splitlines()
    summary = [line.split(maxsplit=3) for line in lines[-len(programs) :]]
    assert {words[0]: words[3] for words in summary} == {name: outcome for name, (_, outcome) in programs.items()}
    assert "words" in lines
    assert RUNNER.main(["good", "idle"]) == 0
    assert RUNNER.main(["gone"]) == 2


def test_no_benchmark_is_forgotten() -> None:
    """Each program in the folder is run."""
    assert {path.stem for path in FOLDER.glob("*.py")} - {"__main__", "bounds"} == set(RUNNER.BENCHMARKS)
    assert set(bounds.BOUNDS) >= set(RUNNER.BENCHMARKS)
