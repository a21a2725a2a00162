"""What a comparison of tuned methods came to: a table, and the command of each method's best setting."""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twophase.config import flatten, to_tree
from twophase.judge.cells import pandas
from twophase.judge.decision import Decision
from twophase.progress import duration
from twophase.sweeps.table import format_table, readable, with_unit
from twophase.training.config import RunConfig
from twophase.tuning.methods import CONTROL


@dataclass(frozen=True)
class Tuned:
    """Result of a method.

    Args:
        method: its text.
        settings: number of settings tried.
        seconds: duration of all its runs, those of the fresh seeds included.
        command: the `twophase train` command of its best setting; None where every setting diverged.
        numbers: tuned values of that, by dotted path.
        tuned: geometric mean of its results over the tuning seeds.
        results: its results, one a fresh seed; None where that run diverged.
        open: whether it has an untried neighbour (`search.has_untried`).
        decision: comparison with averaging; None of averaging, and where either has no setting.
    """

    method: str
    settings: int
    seconds: float
    command: str | None = None
    numbers: Mapping[str, Any] | None = None
    tuned: float | None = None
    results: tuple[float | None, ...] = ()
    open: bool = False
    decision: Decision | None = None

    @property
    def fresh(self) -> float | None:
        """Geometric mean over the fresh seeds, which is what is compared; None where one diverged."""
        finite = [value for value in self.results if value is not None]
        return statistics.geometric_mean(finite) if finite and len(finite) == len(self.results) else None

    @property
    def word(self) -> str:
        """`better`, `equivalent`, `worse`, `undecided`, `control`, `all diverged` or `no control`.

        A method that may be better elsewhere is `open` in the place of undecided, and equivalent or worse `so far`.
        """
        if self.command is None:
            return "all diverged"
        if self.decision is None:
            return "control" if self.method == CONTROL else "no control"
        word = self.decision.word
        return word if not self.open or word == "better" else "open" if word == "undecided" else f"{word} so far"

    def row(self) -> dict[str, Any]:
        """Return it as values by name; `ratio` is averaging's result over its own, with its interval."""
        ratios = self.decision.ratios() if self.decision else (None,) * 3
        own = {"method": self.method, "word": self.word, "fresh": self.fresh}
        own |= dict(zip(("ratio", "low", "high"), ratios, strict=True))
        own |= {name: getattr(self, name) for name in ("tuned", "settings", "open", "seconds", "command")}
        return own | dict(self.numbers or {})


@dataclass(frozen=True)
class TuneResults:
    """Results of a comparison; as text it is what `twophase tune` prints.

    Args:
        path: the sweep of the fresh seeds.
        measure: quantity of a result: `perplexity` or `validation loss`.
        points: number of settings that each method was allowed.
        fresh: the fresh seeds.
        methods: best first.
    """

    path: Path
    measure: str
    points: int
    fresh: tuple[int, ...]
    methods: tuple[Tuned, ...]

    def frame(self) -> Any:
        """Return a row a method as a pandas table, its tuned values included."""
        return pandas().DataFrame([tuned.row() for tuned in self.methods])

    def __str__(self) -> str:
        lines = []
        for tuned in self.methods:
            row, diverged = tuned.row(), tuned.results.count(None)
            ratio, low, high = ("" if row[name] is None else f"{row[name]:.4g}" for name in ("ratio", "low", "high"))
            result = f"{diverged} of {len(tuned.results)} diverged" if diverged else readable(tuned.fresh)
            interval = f"{low} to {high}" if low else ""
            lines.append([tuned.method, tuned.settings, duration(tuned.seconds), result, ratio, interval, tuned.word])
        measure, seeds = with_unit(self.measure), " ".join(map(str, self.fresh))
        head = ["method", "settings", "time", measure, f"against {CONTROL}", "interval", "word"]
        text = [
            f"{format_table(head, lines)}\n",
            f"settings: tried, of {self.points} allowed; time: of all runs; {measure}: geometric mean over the fresh",
            f"seeds {seeds}, held out from tuning; against {CONTROL}: ratio of these means, above 1",
            f"where the method is better, with its interval (Student's t, 95 % for all {len(lines) - 1} together).",
            "equivalent: surely within 1 %. undecided: these seeds do not tell.",
        ]
        if names := ", ".join(tuned.method for tuned in self.methods if tuned.open):
            text += [
                f"The best setting has an untried neighbour: {names}. The optimum may lie",
                "outside of what was tried, or between (open, so far); more points go on from here.",
            ]
        return "\n".join([*text, "", *(f"{each.command}  # {each.method}" for each in self.methods if each.command)])


def train_command(config: RunConfig) -> str:
    """Return the `twophase train` command of a run."""
    values, defaults = flatten(to_tree(config)), flatten(to_tree(type(config)()))
    words = ["twophase", "train", *(["--task", values["task.name"]] if "task.name" in values else [])]
    for path, value in values.items():
        if value != defaults[path]:
            texts = value if isinstance(value, str | list) else str(value).lower()  # true, false, none
            words += [f"--{path.replace('_', '-')}", *(map(str, texts) if isinstance(texts, list) else [texts])]
    return shlex.join(words)
