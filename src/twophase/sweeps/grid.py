"""Grids: which configurations a sweep runs, in which arms, and what each of them is the control of."""

from __future__ import annotations

import itertools
import math
import re
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from twophase.base.config import (
    Tree,
    UsageError,
    differences,
    fingerprint,
    fit,
    get,
    hints_of,
    to_tree,
    with_values,
)
from twophase.number import did_you_mean
from twophase.restart import parse

MOMENTUM_FREE = "momentum-free"
"""Name of the arm of outer SGD without momentum."""
MOST_CELLS = 100_000
"""Cells of a product at most; each takes a few kilobytes of this process's memory."""
_WORDS = tuple[str, ...]
_NO_WORDS = "none"
_NEXT_WORD = re.compile(r",\s*(?=[^,=\s][^,=]*=)")


@dataclass(frozen=True, slots=True)
class Axis:
    """Values to try for one configuration value, in the order of the table and the figure."""

    path: str
    """Dotted path of the value, for example `outer.lr`."""
    values: tuple[Any, ...]


@dataclass(frozen=True)
class Cell:
    """One run of a sweep.

    Args:
        arm: name of the group that the cell is compared within.
        values: values that identify it, by dotted path.
        config: its whole configuration.
        control_of: run id of the cell that it is the control of, or None.
    """

    arm: str
    values: Mapping[str, Any]
    config: Any
    control_of: str | None = None

    @cached_property
    def tree(self) -> Tree:
        """The configuration as plain values."""
        return to_tree(self.config)

    @cached_property
    def run_id(self) -> str:
        """Fingerprint of the configuration: the name of the run's folder, the same in every sweep."""
        return fingerprint(self.tree)


@dataclass(frozen=True)
class Sweep:
    """A set of cells to run and compare.

    Two cells may share a run when their configurations are identical; it is run once and counts for both.

    Args:
        name: name of the sweep, for people.
        base: the configuration that the cells vary.
        cells: cells in the order of the table.

    Raises:
        UsageError: no cells.
        ValueError: two configurations with one run id, or a control of a run that is not in the sweep.
    """

    name: str
    base: Any
    cells: Sequence[Cell]
    runs: Mapping[str, Any] = field(init=False, repr=False, compare=False)
    """From run id to configuration, each run once, in the order of the cells."""
    paths: tuple[str, ...] = field(init=False, repr=False, compare=False)
    """The dotted paths that vary, in order of first appearance."""

    def __post_init__(self) -> None:
        """Refuse an empty sweep and run ids that do not identify."""
        if not self.cells:
            raise UsageError(f"sweep {self.name}: there are no cells to run; give at least one --axis")
        trees: dict[str, Tree] = {}
        for cell in self.cells:
            if trees.setdefault(cell.run_id, cell.tree) != cell.tree:
                raise ValueError(
                    f"Sweep: two configurations share the run id {cell.run_id}; change a seed in one of them"
                )
        for cell in self.cells:
            if cell.control_of is not None and cell.control_of not in trees:
                raise ValueError(f"Sweep: a cell of {cell.arm!r} is the control of {cell.control_of}, which is no cell")
        object.__setattr__(self, "cells", tuple(self.cells))
        object.__setattr__(self, "runs", {cell.run_id: cell.config for cell in self.cells})
        object.__setattr__(self, "paths", tuple(dict.fromkeys(path for cell in self.cells for path in cell.values)))

    @cached_property
    def identity(self) -> str:
        """Fingerprint of `spec()`."""
        return fingerprint(self.spec())

    def values(self, cell: Cell) -> dict[str, Any]:
        """Return a cell's value at every path that varies in the sweep, whether its own arm varies it or not.

        An outer learning rate or momentum that is the method's own is written out.
        """
        values = {path: get(cell.config, path) for path in self.paths}
        if None in values.values():
            own = {f"outer.{name}": value for name, value in cell.config.outer.numbers().items()}
            values = {path: own.get(path) if value is None else value for path, value in values.items()}
        return values

    def spec(self) -> Tree:
        """Describe what identifies the sweep as plain JSON values: name, base, axes and cells."""
        rows = [self.values(cell) for cell in self.cells]
        return {
            "name": self.name,
            "base": to_tree(self.base),
            "axes": {path: list(map(_json, dict.fromkeys(row[path] for row in rows))) for path in self.paths},
            "cells": [
                {
                    "arm": cell.arm,
                    "run": cell.run_id,
                    "values": {path: _json(row[path]) for path in cell.values},
                    "control_of": cell.control_of,
                }
                for cell, row in zip(self.cells, rows, strict=True)
            ],
        }


def product(base: Any, axes: Sequence[Axis], arm: str = "", fixed: Mapping[str, Any] | None = None) -> list[Cell]:
    """Combine the axes' values on top of a base configuration in every way; the last axis runs fastest.

    Args:
        base: a tree of frozen dataclasses.
        axes: axes that vary. A value may also be given as the text that the command line takes.
        arm: name of the arm that these cells form.
        fixed: values that all of them share, from dotted path to value; they are part of each cell's `values`.

    Returns:
        The cells. Whole numbers given for a float become floats and restart policies their canonical text, so that
        equal settings have equal run ids.

    Raises:
        UsageError: an unknown path, a value of the wrong type, an axis without values or with a repeated one, or too
            many cells.
    """
    if (count := math.prod(len(axis.values) for axis in axes)) > MOST_CELLS:
        raise UsageError(f"the axes make {count:,} cells; a sweep has at most {MOST_CELLS:,}: leave out values")
    shared = {path: _fitted(base, path, [value])[0] for path, value in (fixed or {}).items()}
    columns = [_fitted(base, axis.path, axis.values) for axis in axes]
    cells = []
    for combination in itertools.product(*columns):
        values = shared | dict(zip((axis.path for axis in axes), combination, strict=True))
        cells.append(Cell(arm, values, with_values(base, values)))
    return cells


def parse_axes(words: Sequence[Sequence[str]], base: Any) -> list[Axis]:
    """Parse axes of the command line: each entry is `[path, value, value, ...]`, from `--axis outer.lr 0.3 0.7`.

    Args:
        words: one entry an `--axis`, not empty.
        base: the configuration that gives the types; a path that ends in `restart` takes policies. A setting of
            several words takes sets of words, each set as one text (`words_of`).

    Raises:
        UsageError: an unknown path, no values, a value of the wrong type, a repeated axis or a repeated value.
    """
    axes: dict[str, Axis] = {}
    for entry in words:
        path = entry[0].replace("-", "_")
        if path in axes:
            raise UsageError(f"--axis {path} is given twice; put all its values behind one --axis")
        axes[path] = Axis(path, tuple(_fitted(base, path, entry[1:])))
    return list(axes.values())


def words_of(text: str) -> tuple[str, ...]:
    """Split the one text that an axis has for a setting of several words, such as `sync.restart`, into these words.

    A comma ends a word where `NAME=` follows it; other commas belong to the word. `none` is no words at all.

    >>> words_of("ends=at:4,9,blocks=3")
    ('ends=at:4,9', 'blocks=3')
    """
    return () if text == _NO_WORDS else tuple(_NEXT_WORD.split(text.strip()))


def text_of(words: tuple[str, ...]) -> str:
    """Join the words of a setting that has several; `words_of` reads the text.

    >>> text_of(("a=3", "b=cycle:5,6")), text_of(())
    ('a=3,b=cycle:5,6', 'none')
    """
    return ",".join(words) or _NO_WORDS


def extends(new: Mapping[str, Any], saved: Mapping[str, Any]) -> bool:
    """Return whether a `Sweep.spec()` holds all cells of another of the same name and base, and perhaps more."""

    def cells(spec: Mapping[str, Any]) -> list[tuple[Any, ...]]:
        return [(cell["arm"], cell["run"], cell["control_of"]) for cell in spec["cells"]]

    return all(new[key] == saved[key] for key in ("name", "base")) and set(cells(saved)) <= set(cells(new))


def spec_differences(new: Mapping[str, Any], saved: Mapping[str, Any]) -> list[str]:
    """List what differs between two `Sweep.spec()`s, one phrase each, in the words of the command."""
    phrases = [f"its name is {saved['name']} there, {new['name']} here"] if saved["name"] != new["name"] else []
    phrases += differences(new["base"], saved["base"])
    phrases += [f"axis {phrase}" for phrase in differences(new["axes"], saved["axes"])]
    if not phrases and saved != new:
        phrases.append(f"{len(saved['cells'])} cells there, {len(new['cells'])} here, or the same in other arms")
    return phrases


def _fitted(base: Any, path: str, values: Sequence[Any]) -> list[Any]:
    """Convert the values of an axis, or their texts, to the one writing that its path has; refuse what does not fit."""
    if not values:
        raise UsageError(f"--axis {path} has no values; write them behind it")
    hint, fits_policies = _hint(base, path), path.rpartition(".")[2] == "restart"
    fitted: list[Any] = []
    alike: list[Any] = []
    for value in values:
        if hint == _WORDS:
            words = words_of(value) if isinstance(value, str) else value
            fitted.append(_fitted_words(path, words, fits_policies=fits_policies))
        elif fits_policies:
            fitted.append(_canonical(path, str(value)))
        else:
            try:
                fitted.append(fit(hint, value))
            except ValueError as error:
                raise UsageError(f"--axis {path}: {error}") from None
        # The policies of blocks are the same in any order.
        alike.append(sorted(fitted[-1]) if hint == _WORDS and fits_policies else fitted[-1])
        if alike[-1] in alike[:-1]:
            text = text_of(fitted[-1]) if hint == _WORDS else fitted[-1]
            raise UsageError(f"--axis {path}: the value {text} is given twice; leave one out")
    return fitted


def _hint(base: Any, path: str) -> Any:
    """Return the declared type of a value that an axis can vary."""
    hints = hints_of(type(base))
    if path in hints:
        if typing.get_origin(hints[path]) is tuple and hints[path] != _WORDS:
            raise UsageError(
                f"--axis {path}: its value is {get(base, path)!r}; an axis varies a single number, word or true/false, "
                "or words"
            )
        return hints[path]
    if inside := [name for name in hints if name.startswith(f"{path}.")]:
        raise UsageError(f"--axis {path} is a group of values; name one of them: {', '.join(inside)}")
    remedy = did_you_mean(path, hints, f"the values are: {', '.join(hints)}")
    raise UsageError(f"--axis {path}: there is no such configuration value; {remedy}")


def _fitted_words(path: str, words: Any, *, fits_policies: bool) -> tuple[str, ...]:
    """Return a set of words with a text that can be read in one way only, restart policies in their one writing."""
    if not isinstance(words, tuple) or not all(isinstance(word, str) for word in words):
        raise UsageError(f"--axis {path}: {words!r} is no set of words")
    pairs = []
    for word in words:
        name, equals, rest = word.partition("=")
        # With an `=` in a value, no reader could tell the comma before NAME= from one inside of that value.
        if "=" in rest or not (equals or (len(words) == 1 and not fits_policies)):
            raise UsageError(
                f"--axis {path}: {word!r} is not NAME=VALUE; write one for each name with a comma between them, such "
                f"as {'a=3,b=cycle:5,6' if fits_policies else 'a=embedding|head,b=.'}, and no other ="
            )
        pairs.append(f"{name}={_canonical(path, rest)}" if fits_policies else word)
    return tuple(pairs)


def _canonical(path: str, policy: str) -> str:
    """Return a restart policy in its one writing."""
    try:
        return str(parse(policy))
    except ValueError as error:
        raise UsageError(f"--axis {path}: {error}") from None


def _json(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
