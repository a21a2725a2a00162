"""The machinery of studies. A study is one module in this folder; adding the file is all that is needed.

It holds

* `QUESTION = "..."`, one line;
* `table(*, quick: bool = False) -> Result`, pure computation; `quick` for a coarser one;
* `answer(result) -> str`, a few plain lines: what the numbers say, with their controls, and what does not hold;
* `draw(result) -> Figure`, from the result alone: one idea, at most about six panels, its title (`headline`) composed
  from the numbers that it shows;
* where there is more to see, `details(result) -> dict[str, Figure]`, further figures by what is put behind the name.

A study that also holds `sweep` is a *sweep study*: its numbers come from runs that have to be trained first. It holds

* `sweep(scale) -> Sweep`, its cells;
* `table(rows, scale) -> Result` in the place of the above, from the rows of the sweep's table;
* `answer` and `draw` as above.

A sweep study with `TAKES_TASK = True` also runs on a task in place of the built-in model. Its cells vary values that
every task has, and its words name its measure by `_lm.judged`.

A study that chooses its later cells by the results of earlier ones holds `CHOOSES_RUNS = True`. Its `sweep(scale,
rows)` is called with more rows until it adds no cell, and must begin each time with the cells that it had before.

One of these whose later cells depend on the trained runs themselves also holds

* `measure(scale, rows, runs, measured) -> dict`, measurements by run id so far; `sweep` and `table` then take that as a
  further argument.

A study imports torch only when its table is made, so that a list of studies does without.

`run` writes `NAME.png` and `.pdf`, `NAME-DETAIL.png` and `.pdf`, `NAME.csv` (the rows) and, last, `NAME.json` (numbers,
settings, question, version). The same input gives the same bytes.
"""

from __future__ import annotations

import csv
import io
import json
import math
import pkgutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from textwrap import fill
from typing import Any

from twophase import __version__
from twophase.base.config import UsageError
from twophase.base.files import DIGITS, table_text
from twophase.base.reading import read_bytes, read_json_object
from twophase.figures.style import check_numbers, rendered, styled, write_files
from twophase.number import did_you_mean
from twophase.recipes.paper import LAPTOP, QUICK, SCALES, Scale
from twophase.studies._training import train_in_stages
from twophase.sweeps.run import RUNS, Status
from twophase.sweeps.table import LOSS, Row, measure_of
from twophase.tasks.named import LM, task_label

_FOLDER = Path(__file__).parent
_COLUMNS = 110
_LOSS_NAMES = {"perplexity": "validation_loss"}
"""What a study's perplexities are called in the files of a task that has none."""


@dataclass(frozen=True, slots=True)
class Result:
    """The rows and numbers of a study.

    Args:
        rows: the lines of the CSV, from column name to value; everything that the figure shows.
        numbers: values behind the answer, by name; may be nested dicts and lists.
        settings: inputs of the computation.
    """

    rows: list[dict[str, Any]]
    numbers: dict[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)


def select(rows: Iterable[Mapping[str, Any]], **values: Any) -> list[Any]:
    """Return the rows that have these values."""
    return [row for row in rows if all(row.get(name) == value for name, value in values.items())]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The files that a study wrote, and the lines of its answer, long ones folded."""

    paths: list[Path]
    answer: str


def names() -> list[str]:
    """Return the names of all studies, sorted."""
    modules = {module.name for module in pkgutil.iter_modules([str(_FOLDER)])}
    return sorted(name for name in modules - {"study", "policies"} if not name.startswith("_"))


def questions() -> dict[str, str]:
    """Return the question of every study, by name."""
    return {name: load(name).QUESTION for name in names()}


def question(study: Any, task: str = LM) -> str:
    """Return the question of a study's module, of a task where that takes the language model's place."""
    return study.QUESTION if task == LM else study.QUESTION.replace("a language model", task_label(task))


def load(name: str) -> Any:
    """Import the module of a study.

    Raises:
        UsageError: there is no such study.
    """
    if name not in names():
        raise UsageError(f"{name!r} is no study; {did_you_mean(name, names())}")
    return import_module(f"twophase.studies.{name}")


def run(
    name: str,
    out: Path,
    quick: bool = False,
    *,
    scale: str | Scale | None = None,
    workers: int = 1,
    progress: Callable[[Status], None] | None = None,
    **options: Any,
) -> Outcome:
    """Compute a study, draw it, and write its files.

    A sweep study first trains its missing runs, in the folder `NAME` next to its files (`NAME-SCALE` at another scale
    than the laptop's). Repeating the call resumes it. The runs themselves lie in `runs`, so that a run that several
    studies need is trained once.

    Args:
        name: file name of the study, without `.py`.
        out: folder of the files; made if it does not exist.
        quick: coarser and faster.
        scale: size of a sweep study, by name or as a value: `laptop` when None and not quick, or `paper`. For a task in
            place of the built-in model: `scale_named("laptop").at(config)`.
        workers: worker processes of a sweep study.
        progress: called when a sweep begins and whenever a run ends (see `sweep.run`).
        options: further arguments of `run_sweep` for a sweep study, such as `devices`.

    Raises:
        UsageError: no such study or scale, matplotlib is not installed, a run that is impossible here, or the files
            cannot be written.
        RunError: runs that could not be trained, by name; nothing is drawn without them.
    """
    study = load(name)
    size = _scale(name, study, quick, scale)
    with styled():  # this and the folder before the computation, so that their errors come first
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--out {out}: cannot be made ({error.strerror}); choose another folder") from None
        check_numbers([out / f"{name}.csv", out / f"{name}.json"], f'{{\n  "study": "{name}"', f"--out {out}")
        if size is None:
            result = study.table(quick=quick)
        else:
            options = {"runs": out / RUNS, "workers": workers, "progress": progress} | options
            result = _table(study, *train_in_stages(study, size, _folder(name, out, size), **options))
        pictures = _pictures(study, result)
    answer = study.answer(result)
    facts = {
        "study": name,
        "question": study.QUESTION if size is None else question(study, size.task),
        "version": __version__,
        "settings": {"quick": quick} | ({} if size is None else {"scale": size.name}) | result.settings,
        "numbers": result.numbers,
        "answer": answer.splitlines(),
    }
    names_in_files = _LOSS_NAMES if result.settings.get("measure") == LOSS else {}
    lines = [{names_in_files.get(key, key): value for key, value in row.items()} for row in result.rows]
    text = json.dumps(_plain(facts, names_in_files), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    return Outcome(write_files(out / name, pictures | {".csv": table_text(lines), ".json": text}), folded(answer))


def _table(study: Any, rows: Sequence[Row], scale: Scale, *measured: Any) -> Result:
    """Make the table of a sweep study; of a task, with its name and what it is judged by."""
    result = study.table(rows, scale, *measured)
    if scale.task != LM:
        result.settings.update(task=scale.task, measure=measure_of(rows))
    return result


def redraw(name: str, folder: Path) -> list[Path]:
    """Draw a study's figures again next to its `NAME.csv` and `NAME.json`, from these; computes nothing else.

    Raises:
        UsageError: no such study or one that trains nothing, matplotlib is not installed, or files that are missing or
            not of this study.
    """
    study, stem = load(name), folder / name
    if not hasattr(study, "sweep"):
        raise UsageError(f"--redraw: the study {name} needs no runs; leave the option out, it is computed in a minute")
    with styled():
        try:
            names_here = {written: name for name, written in _LOSS_NAMES.items()}
            facts = _plain(read_json_object(stem.with_suffix(".json")), names_here)
            lines = list(csv.DictReader(io.StringIO(read_bytes(stem.with_suffix(".csv")).decode(), newline="")))
            rows = [{names_here.get(key, key): _value(key, word) for key, word in line.items()} for line in lines]
            pictures = _pictures(study, Result(rows, facts["numbers"], facts["settings"]))
        except (OSError, csv.Error, ArithmeticError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise UsageError(
                f"--redraw: {stem}.csv and {stem}.json do not hold this study ({type(error).__name__}: {error}); name "
                "their folder by --out, or leave --redraw out to compute them"
            ) from None
    return write_files(stem, pictures)


def _value(column: str, word: str) -> Any:
    """Read a cell of a study's table: a number where it is one, None where it is empty; a policy is text."""
    if column.endswith("restart"):
        return word or None
    for number in (int, float):
        try:
            return number(word)
        except ValueError:
            pass
    return {"": None, "true": True, "false": False}.get(word, word)


def _pictures(study: Any, result: Result) -> dict[str, bytes]:
    """Draw the figures of a result; by what follows the study's name in the name of their files."""
    figures = {"": study.draw(result)}
    if hasattr(study, "details"):
        figures |= {f"-{name}": figure for name, figure in study.details(result).items()}
    return {
        name + ending: picture
        for name, figure in figures.items()
        for ending, picture in rendered(figure, palette=True).items()
    }


def _folder(name: str, out: Path, scale: Scale) -> Path:
    """Return the folder of a study's sweep."""
    return out / (name if scale.name == LAPTOP.name else f"{name}-{scale.name}")


def _scale(name: str, study: Any, quick: bool, scale: str | Scale | None) -> Scale | None:
    """Return the scale that is asked for; None for a study that trains nothing."""
    if isinstance(scale, Scale) and scale.task != LM and not hasattr(study, "TAKES_TASK"):
        able = ", ".join(other for other in names() if hasattr(load(other), "TAKES_TASK"))
        raise UsageError(f"--task {scale.task}: the study {name} takes no task; those that do are {able}")
    if not hasattr(study, "sweep"):
        if scale is not None:
            raise UsageError(f"--scale: the study {name} trains nothing and has no scale; leave the option out")
        return None
    return scale if isinstance(scale, Scale) else scale_named(scale, quick=quick)


def scale_named(scale: str | None = None, *, quick: bool = False) -> Scale:
    """Return a scale by its name, the laptop's by default; refuse an unknown one, or two."""
    if scale is not None and quick and scale != QUICK.name:
        raise UsageError(f"--quick is a separate scale; leave out either it or --scale {scale}")
    chosen = QUICK.name if quick else scale or LAPTOP.name
    if chosen not in SCALES:
        raise UsageError(f"--scale {chosen!r} is not known; {did_you_mean(chosen, SCALES)}")
    return SCALES[chosen]


def folded(text: str) -> str:
    """Fold long lines for a terminal; lines of a table, which hold runs of spaces, stay."""
    return "\n".join(
        line if "   " in line else fill(line, _COLUMNS, subsequent_indent="  ", break_on_hyphens=False)
        for line in text.splitlines()
    )


def _plain(value: Any, renamed: Mapping[str, str]) -> Any:
    """Convert a value for JSON: NumPy's types become plain, NaN and infinities null, some names others."""
    if isinstance(value, Mapping):
        return {renamed.get(key, str(key)): _plain(item, renamed) for key, item in value.items()}
    if hasattr(value, "tolist"):  # NumPy's arrays and scalars
        return _plain(value.tolist(), renamed)
    if isinstance(value, (list, tuple)):
        return [_plain(item, renamed) for item in value]
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    return value
