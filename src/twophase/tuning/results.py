"""What a comparison of tuned methods came to: a table, and the command of each method's best setting."""

from __future__ import annotations

import math
import shlex
import statistics
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from twophase.compare.compare import ALPHA, Comparison
from twophase.config import flatten, to_tree
from twophase.progress import duration
from twophase.runs.config import RunConfig
from twophase.sweeps.table import cell_text, format_table, readable
from twophase.tuning.methods import CONTROL


@dataclass(frozen=True)
class Tuned:
    """A method at its best setting.

    Args:
        method: its text.
        word: that of its comparison with averaging, but `open` in the place of equal, undecided and worse where more
            settings may be better; `control` of averaging itself, `all diverged` without any setting.
        settings: number of settings tried.
        seconds: duration of all its runs, those of the fresh seeds included.
        open: whether the best setting has an untried neighbour (`search.has_untried`).
        tuned: geometric mean of its results over the tuning seeds.
        results: its results, one a fresh seed; infinite where that run diverged.
        comparison: averaging with it on the fresh seeds; None of averaging itself.
        command: the `twophase train` command of the best setting.
        numbers: the tuned values of that, by dotted path.
    """

    method: str
    word: str
    settings: int
    seconds: float
    open: bool = False
    tuned: float | None = None
    results: tuple[float, ...] = ()
    comparison: Comparison | None = None
    command: str | None = None
    numbers: Mapping[str, Any] = field(default_factory=dict)

    @property
    def fresh(self) -> float:
        """Geometric mean of the results, which is what is compared; infinite where a run diverged."""
        return statistics.geometric_mean(self.results) if self.results else math.inf

    def row(self) -> dict[str, Any]:
        """Return it as values by name, the tuned ones last."""
        interval = {name: getattr(self.comparison, name, None) for name in ("ratio", "low", "high")}
        about = {name: getattr(self, name) for name in ("tuned", "settings", "open", "seconds", "command", "results")}
        return {"method": self.method, "word": self.word, "fresh": self.fresh, **interval, **about, **self.numbers}


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
        import pandas as pd  # noqa: PLC0415 - an extra, and slow to import

        return pd.DataFrame([tuned.row() for tuned in self.methods])

    def __str__(self) -> str:
        lines = []
        for each in self.methods:
            result = readable(each.fresh) or f"{each.results.count(math.inf)} of {len(each.results)} diverged"
            against = each.comparison.texts() if each.comparison else (None, None)
            lines.append([each.method, each.settings, duration(each.seconds), result, *against, each.word])
        head = ["method", "settings", "time", self.measure, f"against {CONTROL}", "interval", "word"]
        caption = (
            f"settings: tried, of {self.points} allowed; time: of all runs; {self.measure}: geometric mean over the "
            f"fresh seeds {' '.join(map(str, self.fresh))}, held out from tuning; against {CONTROL}: ratio of these "
            "means, above 1 where the method is better, with its interval "
            f"({1 - ALPHA:.0%} for all {len(lines) - 1} together)."
        )
        text = [format_table(head, lines), "", textwrap.fill(caption, 100)]
        if names := ", ".join(each.method for each in self.methods if each.open):
            text += [f"The best setting has an untried neighbour: {names}. More points go on from here."]
        return "\n".join([*text, "", *(f"{each.command}  # {each.method}" for each in self.methods if each.command)])


def train_command(config: RunConfig) -> str:
    """Return the `twophase train` command of a run."""
    values, defaults = flatten(to_tree(config)), flatten(to_tree(type(config)()))
    words = ["twophase", "train", *(["--task", values["task.name"]] if "task.name" in values else [])]
    for path, value in values.items():
        if value != defaults[path]:
            texts = map(str, value) if isinstance(value, list) else [cell_text(value) or "none"]
            words += [f"--{path.replace('_', '-')}", *texts]
    return shlex.join(words)
