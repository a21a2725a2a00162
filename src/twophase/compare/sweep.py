"""What a sweep's table says: each method on its own, and against the controls.

A method is what `cells.csv` calls an arm: cells that share form, outer method, filter, schedule and restart, and are
tuned over the other axes. Three kinds of methods are controls: those with cells that are linked to the cells that they
control (`control_of`), those named as controls, and outer SGD without momentum. Every other method is compared with
every control, with a linked one where it has cells of the method; and one with restarts with the same one without. It
is done in two ways:

* tuned: each at its own best setting, or at one of those that diverged where all did. Settings were chosen on the seeds
  that compare them, which favours the method with more settings; the fresh seeds of `twophase tune` do not.
* matched: cell by cell, by the geometric mean of the cells of a seed. A linked control is matched with what it
  controls, another one where cells agree on every axis that varies within either. Matched are cells that have finished
  on both sides; pairs of the same runs are no evidence and left out.

`compare` decides, corrected for the number of all these comparisons.
"""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

from twophase.compare.compare import ALPHA, Comparison, compare
from twophase.errors import UsageError
from twophase.sweeps.table import (
    ABOVE_ZERO,
    Row,
    Setting,
    cell_text,
    format_table,
    measure_of,
    method_name,
    place_words,
    readable,
    settings,
)

Pair: TypeAlias = tuple[Setting, Setting]
"""A setting of a method, and its match among a control's."""

_HEAD = ("method", "control", "by", "cells", "ratio", "interval", "seeds", "diverged", "word")
_RESTARTS = {"outer.restart": "never", "sync.restart": "none"}
_USUAL = {"outer.filter": "none", "outer.schedule": "constant", **_RESTARTS}
"""What a method has there whose outer step is that of plain SGD."""
WITHIN = 0.25
"""Relative distance from the best of all within which a setting works, in the table."""


@dataclass(frozen=True)
class Method:
    """A method's settings.

    Args:
        name: its name in `cells.csv`.
        is_control: whether the others are compared with it.
        settings: at least one.
        lowest: lowest mean of all settings of all methods; None when nothing has finished.
    """

    name: str
    is_control: bool
    settings: tuple[Setting, ...]
    lowest: float | None

    @cached_property
    def best(self) -> Setting | None:
        """The finished setting of the lowest mean, the first of equals; None when nothing has finished."""
        return _best(self.settings)

    @property
    def finished(self) -> int:
        """Number of settings of which every seed has finished."""
        return sum(each.state == "finished" for each in self.settings)

    @property
    def diverged(self) -> int:
        """Number of settings of which a seed diverged."""
        return sum(each.state == "diverged" for each in self.settings)

    @property
    def missing(self) -> int:
        """Number of settings of which a seed is missing or failed, and none diverged."""
        return len(self.settings) - self.finished - self.diverged

    @cached_property
    def varied(self) -> tuple[str, ...]:
        """Dotted paths of the values that vary within the method."""
        first = self.settings[0].values
        return tuple(path for path in first if any(each.values.get(path) != first[path] for each in self.settings))

    def within(self, share: float) -> int:
        """Return the number of settings whose mean is at most (1 + share) times the best of all methods."""
        bound = (self.lowest or 0.0) * (1 + share)
        return sum(each.result is not None and each.result <= bound for each in self.settings)


@dataclass(frozen=True)
class Against:
    """A method against a control.

    Args:
        method: its name.
        control: the control's.
        tuned: each at its own best setting; of no seeds where one has none yet.
        matched: by the geometric mean over matched cells; None without any.
        cells: number of cells of that mean.
        left_out: matched cells that diverged or are missing on a side.
    """

    method: str
    control: str
    tuned: Comparison
    matched: Comparison | None
    cells: int
    left_out: int = 0

    def __str__(self) -> str:
        return format_table(_HEAD, _lines([self]))

    def frame(self) -> Any:
        """Return it as a pandas table: a row each for tuned and matched."""
        return _frame([self])


@dataclass(frozen=True)
class SweepComparison:
    """What a sweep's table says.

    Args:
        best: the setting of the lowest mean of all; None when nothing has finished.
        methods: in order of appearance.
        against: by control, then by method.
        notes: limits of these numbers.
    """

    best: Setting | None
    methods: tuple[Method, ...]
    against: tuple[Against, ...]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        return describe(self)

    def frame(self) -> Any:
        """Return every method against every control as a pandas table: a row each for tuned and matched."""
        return _frame(self.against)

    @property
    def comparisons(self) -> int:
        """Number of comparisons, for which each one is corrected."""
        return sum(1 + (each.matched is not None) for each in self.against)


def compare_sweep(rows: Sequence[Row], controls: Collection[str] = ()) -> SweepComparison:
    """Compare the methods of a sweep with its controls.

    Args:
        rows: the sweep's rows, or some of them, in any order.
        controls: names of further methods that serve as controls.

    Raises:
        UsageError: a control that is no method.
    """
    every = settings(rows)
    groups: dict[str, list[Setting]] = {}
    for setting in every:
        groups.setdefault(setting.arm, []).append(setting)
    if unknown := [name for name in controls if name not in groups]:
        raise UsageError(f"--controls: must be among {', '.join(map(repr, groups)) or 'none'}, got {unknown[0]!r}")
    links: dict[str, dict[str, set[str]]] = {}
    for row in rows:
        if row.control_of is not None:
            links.setdefault(row.arm, {}).setdefault(row.run, set()).add(row.control_of)
    best = _best(every)
    methods = tuple(
        Method(name, name in links or name in controls or _is_momentum_free(group), tuple(group), best and best.result)
        for name, group in groups.items()
    )
    pairs = [
        (method, control, _matched(method, control, links.get(control.name)))
        for control in methods
        for method in methods
        if not method.is_control and (control.is_control or _only_restarts(method, control))
    ]
    pairs = [(method, control, cells) for method, control, cells in pairs if cells or control.name not in links]
    count = sum(1 + any(map(_is_finished, cells)) for _, _, cells in pairs)
    against = tuple(_against(*pair, comparisons=count) for pair in pairs)
    return SweepComparison(best, methods, against, tuple(_notes(rows, methods, against)))


def select(rows: Sequence[Row], where: Mapping[str, str]) -> list[Row]:
    """Return the rows with some values, written as in `cells.csv`; a number is equal however it is written."""
    chosen = list(rows)
    for path, text in where.items():
        there = dict.fromkeys(cell_text(row.values[path]) for row in chosen if path in row.values)
        chosen = [row for row in chosen if path in row.values and _is_value(row.values[path], text)]
        if not chosen:
            raise UsageError(f"--where {path}: must be one of {', '.join(there) or 'no values'}, got {text}")
    return chosen


class Table(NamedTuple):
    """A table for readers."""

    title: str
    caption: str
    header: tuple[str, ...]
    rows: list[list[Any]]


def tables(comparison: SweepComparison) -> list[Table]:
    """Return a comparison as tables; what is not known is None."""
    measure, rows = (
        measure_of(row for method in comparison.methods for each in method.settings for row in each.rows),
        [],
    )
    for method in comparison.methods:
        best = method.best
        counts = [len(method.settings), method.finished, method.diverged, method.missing, method.within(WITHIN)]
        spread = None if best is None or best.spread is None else f"{best.spread:.2g}"
        reached = [readable(best.result), spread, len(best.rows)] if best else [None] * 3
        at = best and place_words(best.values, method.varied)
        rows.append([method_name(method.name), "yes" if method.is_control else None, *counts, *reached, at])
    near = f"within {WITHIN:.0%}"
    head = ("method", "control", "settings", "finished", "diverged", "missing", near, "best", "spread", "seeds", "at")
    caption = f"Best: mean {measure} over the seeds, with its standard deviation; {near} of the best of all: settings."
    found = [Table("Methods", caption, head, rows)]
    if comparison.against:
        words = (
            f"Ratio: {measure} of the control over that of the method, above 1 where the method is better; interval "
            f"at {1 - ALPHA:.0%} for all {comparison.comparisons} together. Tuned: each at its best setting, chosen on "
            "these seeds; matched: geometric mean over equal or linked cells."
        )
        found.append(Table("Against the controls", words, _HEAD, [*_lines(comparison.against)]))
    return found


def headlines(comparison: SweepComparison) -> list[str]:
    """Return a sentence on restarts, and one on the best method with a control: the tuned bests, ratio, interval."""
    methods = {method.name: method for method in comparison.methods}
    known = [
        ((mine, best), (other, least), each.tuned)
        for each in comparison.against
        if (best := (mine := methods[each.method]).best) and (least := (other := methods[each.control]).best)
    ]
    known.sort(key=lambda found: [best.result or 0.0 for _, best in found[:2]])
    of_restarts = [found for found in known if _only_restarts(found[0][0], found[1][0])]
    lines = []
    for *sides, found in [*of_restarts[:1], *known[:1]]:
        words = []
        for method, best in sides:
            place = place_words(best.values, method.varied)
            words.append(f"{readable(best.result)} by {method_name(method.name)}{f' ({place})' * bool(place)}")
        ratio, interval = found.texts()
        said = f"ratio {ratio}{f' ({interval})' * bool(interval)}, {found.word}"
        lines.append(f"Best {measure_of(sides[0][1].rows)}: {', '.join(words)}; {said}.")
    return [*dict.fromkeys(lines)]


def describe(comparison: SweepComparison) -> str:
    """Return a comparison as text for a terminal."""
    parts = [
        "\n".join([each.title, format_table(each.header, each.rows), textwrap.fill(each.caption, 100)])
        for each in tables(comparison)
    ]
    return "\n\n".join(
        filter(None, [textwrap.fill(" ".join(headlines(comparison)), 100), *parts, "\n".join(comparison.notes)])
    )


def _found(against: Iterable[Against]) -> Iterator[tuple[list[Any], Comparison]]:
    for each in against:
        names = [method_name(each.method), method_name(each.control)]
        matched = f"{each.cells} of {each.cells + each.left_out}" if each.left_out else each.cells
        yield [*names, "tuned", None], each.tuned
        if each.matched is not None:
            yield [*names, "matched", matched], each.matched


def _lines(against: Iterable[Against]) -> Iterator[list[Any]]:
    for about, found in _found(against):
        yield [*about, *found.texts(), found.seeds, found.diverged, found.word]


def _frame(against: Iterable[Against]) -> Any:
    import pandas as pd  # noqa: PLC0415 - an extra

    return pd.DataFrame([dict(zip(_HEAD, about)) | asdict(found) for about, found in _found(against)])  # noqa: B905


def _best(group: Iterable[Setting]) -> Setting | None:
    finished = [setting for setting in group if setting.result is not None]
    return min(finished, key=lambda setting: setting.result or 0.0, default=None)


def _is_momentum_free(group: Iterable[Setting]) -> bool:
    """Return whether settings are outer SGD without momentum; values of an axis that the sweep lacks are the usual."""
    return all(
        each.values.get("outer.momentum") == 0
        and all(cell_text(each.values.get(path)) in ("", text) for path, text in _USUAL.items())
        for each in group
    )


def _restarts(method: Method) -> bool:
    values = method.settings[0].values
    return any(cell_text(values.get(path)) not in ("", text) for path, text in _RESTARTS.items())


def _only_restarts(method: Method, other: Method) -> bool:
    """Return whether a method is another one with restarts."""
    mine, others = (each.settings[0].values for each in (method, other))
    paths = ("outer.form", "outer.method", *_USUAL.keys() - _RESTARTS)
    return _restarts(method) and not _restarts(other) and all(mine.get(path) == others.get(path) for path in paths)


def _matched(method: Method, control: Method, links: Mapping[str, Collection[str]] | None) -> list[Pair]:
    """Pair the settings of a method with those of a control, without pairs of the same runs.

    `links` has the runs that each run of a linked control controls.
    """
    if links:
        pairs = [
            (mine, other)
            for other in control.settings
            for mine in method.settings
            if any(not set(mine.runs).isdisjoint(links.get(run, ())) for run in other.runs)
        ]
    else:
        varied = [path for path in method.settings[0].values if path in {*method.varied, *control.varied}]
        at = {tuple(map(other.values.get, varied)): other for other in control.settings}
        places = [(mine, tuple(map(mine.values.get, varied))) for mine in method.settings]
        pairs = [(mine, at[place]) for mine, place in places if place in at]
    # Pairs of the same runs in several places are one comparison.
    unique = {(mine.runs, other.runs): (mine, other) for mine, other in pairs if set(mine.runs) != set(other.runs)}
    return [*unique.values()]


def _is_finished(cells: Pair) -> bool:
    return all(cell.state == "finished" for cell in cells)


def _against(method: Method, control: Method, cells: Sequence[Pair], comparisons: int) -> Against:
    tuned = compare(_tuned(method), _tuned(control), comparisons=comparisons)
    finished, matched = [pair for pair in cells if _is_finished(pair)], None
    if finished:
        seeds = set.intersection(*(set(cell.by_seed) for pair in finished for cell in pair))
        sides = [
            {seed: statistics.geometric_mean(cell.by_seed[seed] for cell in side) for seed in seeds}
            for side in zip(*finished, strict=True)
        ]
        matched = compare(*sides, comparisons=comparisons)
    return Against(method.name, control.name, tuned, matched, len(finished), len(cells) - len(finished))


def _tuned(method: Method) -> Mapping[Any, float]:
    """Return the results of the best setting by seed; where each diverged, of the one with the most other seeds."""
    diverged = [cell for cell in method.settings if cell.state == "diverged"] if not method.missing else []
    best = method.best or max(diverged, key=lambda cell: sum(map(math.isfinite, cell.by_seed.values())), default=None)
    return best.by_seed if best else {}


def _notes(rows: Sequence[Row], methods: Sequence[Method], against: Sequence[Against]) -> Iterator[str]:
    if not against:
        yield "Nothing to compare: it takes a method beside a linked, named or momentum-free control."
    if methods and all(len(each.rows) == 1 for method in methods for each in method.settings):
        yield "One seed: no intervals."
    if any(method.finished < len(method.settings) for method in methods):
        yield "Settings with a diverged or a missing seed are in no mean; the sweep's command runs what is missing."
    if any(row.state == "finished" and row.outcome is None and row.perplexity is None for row in rows):
        yield f"Finished runs without a result: {ABOVE_ZERO}."


def _is_value(value: Any, text: str) -> bool:
    with suppress(ValueError):
        if type(value) in (int, float):
            return float(text) == value
    return cell_text(value) == text
