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

from twophase.config import get, require, update
from twophase.errors import UsageError
from twophase.runs.config import RunConfig, named_values
from twophase.sweeps.grid import Cell
from twophase.tuning.search import Point, Scale, rounded

CONTROL = "averaging"
"""The method that all others are held against."""
METHODS = (CONTROL, f"{CONTROL} outer.filter=orthogonal", "nesterov", f"{CONTROL} inner.method=muon")
"""What is compared where nothing is asked for."""
INNER_LR, MOMENTUM, RESTART = "inner.lr", "outer.momentum", "outer.restart"
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
        paths: dotted paths of what it varies.
    """

    text: str
    base: RunConfig
    scales: Mapping[str, Scale]
    paths: tuple[str, ...]

    @property
    def start(self) -> Point:
        """The setting that the search begins with."""
        return tuple(scale.start for scale in self.scales.values())

    def config(self, point: Point, seed: int = 0) -> RunConfig:
        """Return a run of a setting."""
        values = {path: scale.text(x) for (path, scale), x in zip(self.scales.items(), point, strict=True)}
        return update(self.base, {**values, "seed": seed})

    def cell(self, point: Point, seed: int) -> Cell:
        """Return a run of a setting as a cell of a sweep."""
        config = self.config(point, seed).plain()
        return Cell(self.text, {path: get(config, path) for path in (*self.paths, "seed")}, config)


def check_paths(paths: Iterable[str]) -> None:
    """Refuse options, by dotted path, that every method has its own value of."""
    for path in paths:
        if path in ("seed", "sync.restart") or path.startswith("outer."):
            remedy = "--seeds and --fresh" if path == "seed" else "--methods, such as 'nesterov outer.restart=3'"
            raise UsageError(f"--{path.replace('_', '-')}: must be left out; every method has its own, in {remedy}")


def read_method(text: str, base: RunConfig) -> Method:
    """Return a method that varies a configuration, whose outer optimizer is the default.

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
    tuned = {INNER_LR: f"~{base.inner.lr:g}"} | own | given
    scales = {
        path: _scale(path, value, found, base.rounds)
        for path, value in tuned.items()
        if (found := _TUNED.search(value)) and path not in ignored
    }
    return Method(text, base, scales, tuple(dict.fromkeys(["outer.method", *given, *scales])))


def _scale(path: str, value: str, found: re.Match[str], rounds: int) -> Scale:
    """Return the scale of a number that is tuned from a value such as `~0.6`, or `ramp:~0.5` of a policy."""
    start, template = float(found[1]), value.replace(found[0], "~")
    require(start > 0, "methods", f"{path}={value}", "a number above 0 behind ~")
    if (path, template) == (RESTART, "~"):
        return Scale(start, 1, max(rounds, start), is_whole=True)
    # A factor of 16 each way, of a momentum its odds; 8 for the other outer numbers.
    reach, is_odds = 16.0 if path in (INNER_LR, MOMENTUM) else 8.0, path == MOMENTUM
    start = start / (1 - start) if is_odds else start
    return Scale(rounded(start), rounded(start / reach), rounded(start * reach), is_odds, template=template)
