"""What the parts of gpu.py have measured so far, as files that another call, on another machine, goes on from."""

from __future__ import annotations

import csv
import io
import json
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import twophase
from twophase.base.config import UsageError
from twophase.base.files import write_atomic
from twophase.recipes.pretraining import RECIPES
from twophase.tasks.lm.config import DataConfig, ModelConfig, TrainConfig

Figures = dict[str, float]


class Unfinished(Exception):  # noqa: N818 - no error
    """The time is over, and the next call goes on."""


@dataclass(frozen=True)
class Settings:
    """How a unit measures.

    Args:
        out: folder of the results.
        work: folder of checkpoints and other large files, for this machine only.
        deadline: when to stop, as `time.time()`.
        tiny: a toy model on a CPU.
        corpus: text to train on.
        attention: kernel that our step must take, or `auto`.
        seed: of the grid's runs.
    """

    out: Path
    work: Path
    deadline: float
    tiny: bool = False
    corpus: str = "python"
    attention: str = "auto"
    seed: int = 0

    def remaining(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.time()

    def config(self, recipe: str) -> TrainConfig:
        """A recipe on the text that was asked for, or the toy in its place."""
        config = RECIPES[recipe]()
        words = {"vocabulary": "bytes"} if not self.corpus.startswith("tokens:") else {}
        data = replace(config.data, corpus=self.corpus, tokenizer="", **words)
        compute = replace(config.compute, attention=self.attention)
        config = replace(config, data=data, compute=compute, repeat=True, seed=self.seed)
        return toy(config) if self.tiny else config


def toy(config: TrainConfig) -> TrainConfig:
    """The smallest model of the recipe's kind, on a CPU, with the recipe's optimizers and text."""
    data = DataConfig(config.data.corpus, sequence_length=32, batch_size=4, validation_windows=4)
    return replace(
        config,
        model=ModelConfig(layers=1, hidden_size=32, intermediate_size=88, heads=2, vocabulary_size=256),
        data=replace(data, vocabulary=config.data.vocabulary),
        compute=replace(config.compute, precision="float32", compile=False),
        device="cpu",
    )


class Record:
    """OUT/PART.json: an entry for each unit that has been done, and rows of one that grows while it is being done.

    Args:
        out: folder of the results.
        part: name of the part.
        tiny: whether they are a toy's, which are never mixed with others.

    Raises:
        UsageError: the file is damaged, or of the other kind.
    """

    def __init__(self, out: Path, part: str, *, tiny: bool) -> None:
        self.path = out / f"{part}.json"
        self.units: dict[str, dict[str, Any]] = {}
        self.rows: list[dict[str, Any]] = []
        self._tiny = tiny
        if not self.path.exists():
            return
        try:
            tree = json.loads(self.path.read_text(encoding="utf-8"))
            self.units, self.rows, was_tiny = tree["units"], tree["rows"], tree["tiny"]
            for entry in self.units.values():
                _ = [float(value) for value in entry["figures"].values()]
            _ = [row.keys() for row in self.rows]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise self.damage(error) from None
        if was_tiny != tiny:
            kinds = ("a toy (--tiny)", "the whole model")
            raise UsageError(
                f"--out {out}: {self.path.name} is of {kinds[tiny]} and this call of {kinds[not tiny]}; choose another "
                "--out"
            )

    def damage(self, error: Exception) -> UsageError:
        """The refusal of a file that is not as it was written."""
        return UsageError(
            f"--out {self.path.parent}: {self.path.name} is damaged ({type(error).__name__}: {error}); remove that "
            "file to measure its part again, or choose another --out"
        )

    def done(self, unit: str, figures: Figures, **facts: Any) -> None:
        """Keep what a unit has measured, with date, machine and versions."""
        device = torch.cuda.get_device_name() if torch.cuda.is_available() and not self._tiny else "CPU"
        versions = {"torch": torch.__version__, "cuda": torch.version.cuda, "twophase": twophase.__version__}
        versions["python"] = platform.python_version()
        where = {"date": time.strftime("%Y-%m-%d %H:%M"), "device": device, **versions}
        self.units[unit] = {"figures": {k: round(v, 5) for k, v in figures.items()}, **facts, **where}
        self.save()

    def save(self) -> None:
        """Write the file."""
        tree = {"tiny": self._tiny, "units": self.units, "rows": self.rows}
        write_atomic(self.path, json.dumps(tree, indent=1) + "\n")

    @property
    def figures(self) -> Figures:
        """Those of all units."""
        return {name: value for entry in self.units.values() for name, value in entry["figures"].items()}


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows as a csv file; the columns are all that occur, in the order in which they do."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomic(path, text.getvalue())


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as lines for people."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    cells = [columns, *([_short(row.get(name)) for name in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells)


def _short(value: Any) -> str:
    text = "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


@contextmanager
def short_of_memory(what: str) -> Iterator[None]:
    """Turn a device that is out of memory into one message."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        reason = str(error).splitlines()[0]
        raise UsageError(
            f"{what}: the GPU has too little memory ({reason}); free it, or measure on a GPU with more"
        ) from error
