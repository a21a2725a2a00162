"""What a comparison of tuned methods came to: a table, and the command of each method's best setting."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from twophase.config import flatten, to_tree
from twophase.judge.cells import pandas
from twophase.progress import duration
from twophase.runs.config import RunConfig
from twophase.sweeps.table import format_table, readable
from twophase.tuning.methods import CONTROL


@dataclass(frozen=True)
class Tuned:
    """Result of a method.

    Args:
        method: its text.
        word: `better`, `equivalent`, `worse` or `undecided` against averaging, `open` in the place of the last three
            where more settings may be better; `control`, `all diverged` or `no control`.
        fresh: geometric mean of its results over the fresh seeds, which is what is compared; None where one diverged.
        ratio: averaging's result over its own, above 1 where the method is better.
        low, high: interval of the ratio.
        tuned: geometric mean of its results over the tuning seeds.
        settings: number of settings tried.
        open: whether its best setting has an untried neighbour (`search.has_untried`).
        seconds: duration of all its runs, those of the fresh seeds included.
        command: the `twophase train` command of its best setting; None where every setting diverged.
        numbers: tuned values of that, by dotted path.
        results: its results, one a fresh seed; None where that run diverged.
    """

    method: str
    word: str = "all diverged"
    fresh: float | None = None
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    tuned: float | None = None
    settings: int = 0
    open: bool = False
    seconds: float = 0.0
    command: str | None = None
    numbers: Mapping[str, Any] = field(default_factory=dict)
    results: tuple[float | None, ...] = ()

    def row(self) -> dict[str, Any]:
        """Return it as values by name, the tuned ones last."""
        own = {name: value for name, value in vars(self).items() if name not in ("numbers", "results")}
        return {**own, **self.numbers}


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
        for each in self.methods:
            diverged = each.results.count(None)
            result = f"{diverged} of {len(each.results)} diverged" if diverged else readable(each.fresh)
            ratio = "" if each.ratio is None else f"{each.ratio:.4g}"
            interval = "" if each.low is None else f"{each.low:.4g} to {each.high:.4g}"
            lines.append([each.method, each.settings, duration(each.seconds), result, ratio, interval, each.word])
        measure, seeds = self.measure, " ".join(map(str, self.fresh))
        head = ["method", "settings", "time", measure, f"against {CONTROL}", "interval", "word"]
        text = [
            f"{format_table(head, lines)}\n",
            f"settings: tried, of {self.points} allowed; time: of all runs; {measure}: geometric mean over the fresh",
            f"seeds {seeds}, held out from tuning; against {CONTROL}: ratio of these means, above 1",
            f"where the method is better, with its interval (Student's t, 95 % for all {len(lines) - 1} together).",
        ]
        if names := ", ".join(each.method for each in self.methods if each.open):
            text += [f"The best setting has an untried neighbour: {names}. More points go on from here."]
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
