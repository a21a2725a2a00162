"""The machinery of studies. A study is one module in this folder; adding the file is all that is needed.

It holds

* `QUESTION: str`, one line;
* `table(*, quick: bool = False) -> Result`, pure computation; `quick` for a coarser one;
* `answer(result) -> str`, a few plain lines: what was found, with its controls, and what does not hold;
* `draw(result) -> Figure`, from the result alone.

`run` writes `NAME.png`, `NAME.pdf`, `NAME.csv` (the rows) and, last, `NAME.json` (the numbers, with settings, question
and version), byte for byte the same for the same input.
"""

from __future__ import annotations

import ast
import json
import math
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any, Protocol, cast

from twophase import __version__
from twophase.config import UsageError
from twophase.experiment.figure import DIGITS, rendered, styled, table_text, write_files

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FOLDER = Path(__file__).parent
_COLUMNS = 110


@dataclass(frozen=True, slots=True)
class Result:
    """What a study has computed.

    Args:
        rows: the lines of the CSV, from column name to value; everything that the figure shows.
        numbers: what the answer rests on, by name; values may be nested dicts and lists.
        settings: what the numbers were computed with.
    """

    rows: list[dict[str, Any]]
    numbers: dict[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a study has left.

    Args:
        paths: the files written.
        answer: the lines for people, long ones folded.
    """

    paths: list[Path]
    answer: str


class Study(Protocol):
    """What a module in this folder holds."""

    QUESTION: str

    def table(self, *, quick: bool = False) -> Result:
        """Compute."""
        ...

    def answer(self, result: Result) -> str:
        """Say what was found."""
        ...

    def draw(self, result: Result) -> Figure:
        """Draw it."""
        ...


def names() -> list[str]:
    """The studies there are, sorted."""
    return sorted(
        module.name
        for module in pkgutil.iter_modules([str(_FOLDER)])
        if module.name != "study" and not module.name.startswith("_")
    )


def questions() -> dict[str, str]:
    """The question of every study, by name.

    Read off the source, so that a list of studies imports none of them: some need torch, or an extra.
    """
    found = {}
    for name in names():
        tree = ast.parse((_FOLDER / f"{name}.py").read_text(encoding="utf-8"))
        values = {
            ast.unparse(target): node.value
            for node in tree.body
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None
            for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        }
        found[name] = ast.literal_eval(values["QUESTION"])
    return found


def load(name: str) -> Study:
    """The module of a study.

    Raises:
        UsageError: there is no such study.
    """
    if name not in names():
        raise UsageError(f"{name!r} is no study; choose from {', '.join(names())}")
    return cast("Study", import_module(f"twophase.studies.{name}"))


def run(name: str, out: Path, quick: bool = False) -> Outcome:
    """Compute a study, draw it, and write its four files.

    Args:
        name: of the study.
        out: folder of the files; made if it does not exist.
        quick: coarser and faster; the files say so.

    Raises:
        UsageError: no such study, matplotlib is not installed, or the files cannot be written.
    """
    study = load(name)
    with styled():  # this and the folder before the computation: what is wrong is told at once
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--out {out}: cannot be made ({error.strerror}); choose another folder") from None
        result = study.table(quick=quick)
        pictures = rendered(study.draw(result), palette=True)
    answer = study.answer(result)
    facts = {
        "study": name,
        "question": study.QUESTION,
        "version": __version__,
        "settings": {"quick": quick} | result.settings,
        "numbers": result.numbers,
        "answer": answer.splitlines(),
    }
    text = json.dumps(_plain(facts), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    return Outcome(write_files(out / name, pictures | {".csv": table_text(result.rows), ".json": text}), folded(answer))


def folded(text: str) -> str:
    """Text whose long lines are folded for a terminal; lines of a table, which hold runs of spaces, stay."""
    return "\n".join(
        line if "   " in line else fill(line, _COLUMNS, subsequent_indent="  ", break_on_hyphens=False)
        for line in text.splitlines()
    )


def _plain(value: Any) -> Any:
    """A value as JSON has it: NumPy's types become plain, NaN and infinities null."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if hasattr(value, "tolist"):  # NumPy's arrays and scalars
        return _plain(value.tolist())
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    return value
