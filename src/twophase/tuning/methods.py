"""Methods of a comparison: an outer optimizer with any further values, and the numbers that are tuned.

    METHOD [PATH=VALUE …]      nesterov      averaging outer.filter=orthogonal      averaging inner.method=muon

Tuned are the inner learning rate, and the outer learning rate and momentum of every method but averaging. A value fixes
its number (`nesterov outer.momentum=0.9`); one behind `~` is tuned from there (`averaging outer.lr=~1`). The period of
`outer.restart=K` is tuned, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from twophase.config import get, require, update
from twophase.errors import UsageError
from twophase.sweeps.grid import Cell
from twophase.training.config import OuterConfig, RunConfig, named_values
from twophase.tuning.search import Point, Scale, rounded

C = TypeVar("C", bound=RunConfig)
CONTROL = "averaging"
"""The method that all others are held against."""
METHODS = (CONTROL, f"{CONTROL} outer.filter=orthogonal", "nesterov", f"{CONTROL} inner.method=muon")
"""What is compared where nothing is asked for."""
INNER_LR, MOMENTUM, RESTART = "inner.lr", "outer.momentum", "outer.restart"
_REACH = {INNER_LR: 16.0, MOMENTUM: 16.0}
"""Factor each way within which a number, of a momentum its odds, is tuned; 8 for all others."""
_TUNED = re.compile(r"~([0-9][0-9.eE+-]*)")
_PERIOD = "~3"
"""Where the search of a period begins."""


@dataclass(frozen=True)
class Method:
    """A method of a comparison; `read_method` makes it.

    Args:
        text: how it was written; its name everywhere.
        base: its configuration where nothing is tuned.
        scales: scale of each tuned number, by dotted path.
        templates: the value that each is a part of; `~` stands for the number.
        paths: dotted paths of what it varies.
    """

    text: str
    base: RunConfig
    scales: Mapping[str, Scale]
    templates: Mapping[str, str]
    paths: tuple[str, ...]

    @property
    def start(self) -> Point:
        """The setting that the search begins with."""
        return tuple(scale.start for scale in self.scales.values())

    def config(self, point: Point, seed: int = 0) -> RunConfig:
        """Return a run of a setting."""
        pairs = zip(self.scales.items(), point, strict=True)
        values = {path: self.templates[path].replace("~", scale.text(x)) for (path, scale), x in pairs}
        return update(self.base, {**values, "seed": seed})

    def cell(self, point: Point, seed: int) -> Cell:
        """Return a run of a setting as a cell of a sweep."""
        config = self.config(point, seed).plain()
        return Cell(self.text, {path: get(config, path) for path in (*self.paths, "seed")}, config)


def without_outer(config: C) -> C:
    """Return a configuration without what every method has its own value of."""
    return replace(config, outer=OuterConfig(), sync=replace(config.sync, restart=()), seed=0)


def check_paths(paths: Iterable[str]) -> None:
    """Refuse options, by dotted path, that every method has its own value of."""
    for path in paths:
        if path in ("seed", "sync.restart") or path.startswith("outer."):
            remedy = "--seeds and --fresh" if path == "seed" else "--methods, such as 'nesterov outer.restart=3'"
            raise UsageError(f"--{path.replace('_', '-')}: must be left out; every method has its own, in {remedy}")


def read_method(text: str, base: RunConfig) -> Method:
    """Return a method that varies a configuration (`without_outer`).

    Raises:
        UsageError: an unknown method or path, or a value that is out of its range.
    """
    name, *words = text.split() or [""]
    given = {path.replace("-", "_"): value for path, value in named_values("methods", words).items()}
    if given.get(RESTART) == "K":
        given[RESTART] = _PERIOD
    try:
        check_paths(path for path in given if path == "seed")
        fixed = {path: _TUNED.sub(r"\1", value) for path, value in given.items()}
        base = update(base, {"outer.method": name, **fixed}, "")
    except UsageError as error:
        raise UsageError(f"--methods {text}: {error}") from None
    own = {} if name == CONTROL else {f"outer.{key}": f"~{value:g}" for key, value in base.outer.numbers().items()}
    ignored = {f"outer.{key}" for key in replace(base.outer, lr=0.5, momentum=0.5).ignored()}
    scales, templates = {}, {}
    for path, value in ({INNER_LR: f"~{base.inner.lr:g}"} | own | given).items():
        if path not in ignored and (found := _TUNED.search(value)):
            is_period = path == RESTART and value == _PERIOD
            scales[path] = _scale(path, float(found[1]), base.rounds if is_period else 0)
            templates[path] = value.replace(found[0], "~")
    return Method(text, base, scales, templates, tuple(dict.fromkeys(["outer.method", *given, *scales])))


def _scale(path: str, start: float, rounds: int) -> Scale:
    """Return the scale of a number, or of a period where `rounds` is above 0."""
    if rounds:
        return Scale(start, 1, max(rounds, start), is_whole=True)
    require(start > 0, "methods", f"{path}=~{start:g}", "above 0 where a search begins")
    is_odds, reach = path == MOMENTUM, _REACH.get(path, 8.0)
    start = start / (1 - start) if is_odds else start
    return Scale(rounded(start), rounded(start / reach), rounded(start * reach), is_odds)
