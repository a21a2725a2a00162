"""The machinery of studies: discovery, files, determinism, messages."""

from __future__ import annotations

import csv
import errno
import inspect
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import twophase
from twophase.base.config import UsageError
from twophase.base.files import write_atomic
from twophase.figures import style
from twophase.studies import study

THEORY = ("period_criteria", "mixed_periods", "outer_schedules", "restart_mechanism", "robustness_toy")
DETAILS = {
    "mixed_periods": ("schedules", "tuned"),
    "period_criteria": ("rounds",),
    "restart_mechanism": ("oscillation", "tuning"),
    "robustness_toy": ("nesterov", "shares"),
}
TOY = '''
"""A study that costs nothing."""

import numpy as np

from twophase.figures.style import look, new_figure
from twophase.studies.study import Result

QUESTION = "Is it so?"
CALLS = []


def table(*, quick=False):
    CALLS.append(quick)
    nan = float("nan")
    rows = [{"x": 1, "y": 0.1 + 0.2}, {"x": np.int64(2), "y": nan, "z": True}, {"x": np.float64(3), "y": None}]
    numbers = {"nan": nan, "inf": np.inf, "list": np.array([1.0, -np.inf]), 3: np.float64(1) / 3, "n": np.int8(4)}
    return Result(rows, numbers, {"interval": (0, np.bool_(True))})


def answer(result):
    return f"It is.\\n{len(result.rows)} rows."


def draw(result):
    figure, axes = new_figure(2.0)
    axes[0, 0].plot([row["x"] for row in result.rows], **look(1, every=1))
    return figure
'''


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A folder of studies with `toy` in it, in place of the package's own."""
    folder = tmp_path / "studies"
    folder.mkdir()
    (folder / "toy.py").write_text(TOY, encoding="utf-8")
    (folder / "_helper.py").write_text("", encoding="utf-8")
    monkeypatch.setattr(study, "_FOLDER", folder)
    monkeypatch.setattr(sys.modules["twophase.studies"], "__path__", [str(folder)])
    yield study.load("toy")
    sys.modules.pop("twophase.studies.toy", None)


def test_a_study_is_its_file(toy: Any) -> None:
    """A module in the folder is a study without being named anywhere; helpers with an underscore are none."""
    assert study.names() == ["toy"]
    assert study.questions() == {"toy": toy.QUESTION} == {"toy": "Is it so?"}


def test_every_study_is_complete() -> None:
    """Each module of the folder has its parts, and a question of one line with a question mark."""
    questions = study.questions()
    assert set(THEORY) <= set(questions)
    for name, question in questions.items():
        assert question.endswith("?")
        assert len(question.splitlines()) == 1
        assert len(question) <= 100
        module = study.load(name)
        assert all(callable(getattr(module, part)) for part in ("table", "answer", "draw"))
        assert hasattr(module, "sweep") == (name not in (*THEORY, "linear_network"))


def test_four_files(toy: Any, tmp_path: Path) -> None:
    """A study leaves picture, PDF, rows and facts, and nothing else; `quick` reaches the computation and the facts."""
    out = tmp_path / "deep" / "out"
    outcome = study.run("toy", out, quick=True)
    assert [path.name for path in outcome.paths] == ["toy.png", "toy.pdf", "toy.csv", "toy.json"]
    assert set(out.iterdir()) == set(outcome.paths)
    assert outcome.answer == "It is.\n3 rows."
    assert toy.CALLS == [True]
    png = outcome.paths[0].read_bytes()
    assert png.startswith(b"\x89PNG")
    assert int.from_bytes(png[16:20]) == round(6.75 * 200)
    assert b"/FontFile2" in outcome.paths[1].read_bytes()  # the fonts travel with the PDF
    with outcome.paths[2].open(newline="") as file:
        assert list(csv.reader(file)) == [["x", "y", "z"], ["1", "0.3", ""], ["2", "", "true"], ["3", "", ""]]
    text = outcome.paths[3].read_text(encoding="utf-8")
    assert not any(word in text for word in ("NaN", "Infinity"))
    assert json.loads(text) == {
        "study": "toy",
        "question": "Is it so?",
        "version": twophase.__version__,
        "settings": {"quick": True, "interval": [0, True]},
        "numbers": {"nan": None, "inf": None, "list": [1.0, None], "3": 0.333333333333, "n": 4},
        "answer": ["It is.", "3 rows."],
    }


def test_long_lines_are_folded() -> None:
    """Long lines are folded with an indent and keep every word; tables and short lines stay as they are."""
    text = "short\n" + "word " * 50 + "\n" + "a   b" * 40
    lines = study.folded(text).splitlines()
    assert (lines[0], lines[-1]) == ("short", "a   b" * 40)
    assert all(len(line) <= 110 for line in lines[1:-1])
    assert all(line.startswith("  word") for line in lines[2:-1])
    assert " ".join(lines[1:-1]).split() == ["word"] * 50


def test_unknown_name() -> None:
    """A name that is no study is one line that names those there are."""
    with pytest.raises(
        UsageError,
        match=r"^'figure_1' is no study; choose from .*mixed_periods, .*robustness_toy, soft_restart, wires$",
    ):
        study.run("figure_1", Path("nowhere"))
    for name in ("study", "_model", "__init__"):
        with pytest.raises(UsageError, match="is no study"):
            study.load(name)


def test_missing_matplotlib_is_said_before_the_work(toy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without matplotlib the message says what to install, nothing is computed and nothing written."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError, match=r"pip install 'twophase\[plot\]'"):
        study.run("toy", tmp_path / "out")
    assert toy.CALLS == []
    assert not (tmp_path / "out").exists()


def test_folder_that_cannot_be_made(toy: Any, tmp_path: Path) -> None:
    """A file where the folder should be is a usage error that names option and path, before anything is computed."""
    (tmp_path / "out").write_text("")
    with pytest.raises(UsageError, match=r"--out .*out: cannot be made \(File exists\); choose another folder"):
        study.run("toy", tmp_path / "out")
    assert toy.CALLS == []


@pytest.mark.parametrize("ending", [".csv", ".json"])
def test_files_of_something_else_stay(toy: Any, tmp_path: Path, ending: str) -> None:
    """A table or JSON file of the study's name that no study has written is refused before anything is computed."""
    foreign = tmp_path / f"toy{ending}"
    foreign.write_text("{}")
    with pytest.raises(UsageError, match=rf"--out .*: would replace .*toy\{ending}, .*choose another name or folder"):
        study.run("toy", tmp_path)
    assert toy.CALLS == []
    assert foreign.read_text() == "{}"


@pytest.mark.slow
@pytest.mark.parametrize("fit", [1, 2])
@pytest.mark.usefixtures("toy")
def test_files_that_a_full_disk_cut_short_are_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fit: int
) -> None:
    """However many of a study's files were written, they are its own when it is run again."""
    written = iter([write_atomic] * fit)

    def write(path: Path, content: str | bytes) -> None:
        if (action := next(written, None)) is None:
            raise OSError(errno.ENOSPC, "No space left on device")
        action(path, content)

    monkeypatch.setattr(style, "write_atomic", write)
    with pytest.raises(UsageError, match="No space left"):
        study.run("toy", tmp_path / "out")
    assert len(list((tmp_path / "out").iterdir())) == fit
    monkeypatch.setattr(style, "write_atomic", write_atomic)
    assert all(path.is_file() for path in study.run("toy", tmp_path / "out").paths)


def light(rendered: Any) -> Any:
    """Render the first figure in full, and later ones without a layout, which takes longer than all the rest."""
    figures = []

    def render(figure: Any, **options: Any) -> dict[str, bytes]:
        figures.append(figure)
        if len(figures) == 1:
            return rendered(figure, **options)
        figure.set_layout_engine(None)
        figure.savefig(file := io.BytesIO(), format="png", dpi=50)
        return {".png": file.getvalue(), ".pdf": b""}

    return render


@pytest.mark.slow
def test_theory_studies_need_no_torch_and_repeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every theory study, run from the command line, loads no torch; in another process one repeats bit for bit."""
    code = (
        f"import io, sys\nfrom typing import Any\n{inspect.getsource(light)}\nfrom twophase.cli.main import main\n"
        "from twophase.studies import mixed_periods, outer_schedules, robustness_toy, study\n"
        "mixed_periods.INTERVALS, robustness_toy.PERIODS = mixed_periods.INTERVALS[:1], (1, 2, 3, 60)\n"
        "outer_schedules._FINALS, outer_schedules.PLACES = (1.0, 2.0), ('short',)\n"
        "outer_schedules.ARMS = dict([*outer_schedules.ARMS.items()][:4])\n"
        "study.rendered = light(study.rendered)\n"
        "for name in sys.argv[2:]:\n"
        "    assert main(['study', name, '--quick', '--out', sys.argv[1]]) == 0\n"
        "assert not {'torch', 'matplotlib.pyplot'} & set(sys.modules)"
    )
    words = [sys.executable, "-W", "error", "-c", code, str(tmp_path / "a"), *THEORY]
    environment = os.environ | {"PYTHONHASHSEED": "7"}
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    written = {name + ending for name in THEORY for ending in (".png", ".pdf", ".csv", ".json")}
    written |= {
        f"{name}-{detail}{ending}" for name, some in DETAILS.items() for detail in some for ending in (".png", ".pdf")
    }
    assert {path.name for path in (tmp_path / "a").iterdir()} == written
    for name in THEORY:
        facts = json.loads((tmp_path / "a" / f"{name}.json").read_text(encoding="utf-8"), parse_constant=pytest.fail)
        assert study.folded("\n".join(facts["answer"])) in done.stdout, name
        assert facts["settings"]["quick"] is True
    monkeypatch.setattr(study, "rendered", light(study.rendered))
    for path in study.run(THEORY[0], tmp_path / "b", quick=True).paths:  # with random draws
        assert path.read_bytes() == (tmp_path / "a" / path.name).read_bytes(), path.name
