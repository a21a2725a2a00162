"""Grids: which configurations a sweep runs, of which methods, and what each of them is the control of."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from twophase.config import Tree, fingerprint, flatten, get, require, to_tree, update
from twophase.errors import UsageError
from twophase.files import write_atomic

MOMENTUM_FREE = "momentum-free"
"""Name of the method outer SGD without momentum."""
SPEC, RUNS = "sweep.json", "runs"
"""A sweep's description in its folder, and the folder of its runs."""


@dataclass(frozen=True, slots=True)
class Axis:
    """Values to try for one configuration value, in the order of the table and the figure."""

    path: str
    """Dotted path of the value, for example `outer.lr`."""
    values: tuple[Any, ...]


@dataclass(frozen=True)
class Cell:
    """One run of a sweep."""

    arm: str
    """Name of its method."""
    values: Mapping[str, Any]
    """What identifies it, by dotted path."""
    config: Any
    """Its whole configuration, without values that it ignores (`RunConfig.plain`)."""
    control_of: str | None = None
    """Run id of the cell that it is the control of."""

    @cached_property
    def run_id(self) -> str:
        """Fingerprint of the configuration: the name of the run's folder, the same in every sweep."""
        return fingerprint(self.config)


@dataclass(frozen=True)
class Sweep:
    """Cells to run and compare, in the order of the table: variations of a base configuration.

    Those with equal configurations share a run, which trains once.
    """

    base: Any
    cells: Sequence[Cell]

    @cached_property
    def runs(self) -> dict[str, Any]:
        """Configuration of each run by its id, in the order of the cells."""
        return {cell.run_id: cell.config for cell in self.cells}

    @cached_property
    def paths(self) -> tuple[str, ...]:
        """The dotted paths that vary, in order of first appearance."""
        return tuple(dict.fromkeys(path for cell in self.cells for path in cell.values))

    def values(self, cell: Cell) -> dict[str, Any]:
        """Return a cell's value at every path that varies, whether its own method varies it or not.

        An outer learning rate or momentum that is the method's own is written out.
        """
        own = {f"outer.{name}": value for name, value in cell.config.outer.numbers().items()}
        values = {path: get(cell.config, path) for path in self.paths}
        return {path: own.get(path) if value is None else value for path, value in values.items()}

    def spec(self) -> Tree:
        """Return base and runs, the latter by what they change, as JSON values for `sweep.json`."""
        base = flatten(to_tree(self.base))
        runs = {
            run: {path: value for path, value in flatten(to_tree(config)).items() if value != base[path]}
            for run, config in self.runs.items()
        }
        return {"base": to_tree(self.base), "runs": runs}


def write_spec(sweep: Sweep, folder: Path) -> None:
    """Write a sweep's description into its folder; a later one of the same base may have further runs.

    Raises:
        UsageError: the folder holds another sweep, or something else.
    """
    spec, path = sweep.spec(), folder / SPEC
    if path.exists():
        saved = json.loads(path.read_bytes())
        here, there = flatten(spec["base"]), flatten(saved["base"])
        for name in {**here, **there}:
            require(here.get(name) == there.get(name), name, here.get(name), f"{there.get(name)} as in {folder}")
        if saved.get("runs", {}).keys() - spec["runs"]:
            raise UsageError(f"--out {folder}: belongs to a sweep with other cells; give another --out")
    elif folder.is_dir() and any(file.name != RUNS and file.name[0] != "." for file in folder.iterdir()):
        raise UsageError(f"--out {folder}: must be empty or a sweep's folder, holds no {SPEC}")
    folder.mkdir(parents=True, exist_ok=True)
    if (text := json.dumps(spec, indent=1) + "\n") != (path.read_text() if path.exists() else ""):
        write_atomic(path, text)


def product(base: Any, axes: Sequence[Axis], name: str = "", fixed: Mapping[str, Any] | None = None) -> list[Cell]:
    """Combine the axes' values on top of a base configuration in every way; the last axis runs fastest.

    They are of one method, called `name`. A value may also be the text that an option takes. `fixed` are values that
    all cells share.

    Raises:
        UsageError: an unknown path, a value of the wrong type, an axis without values or with a repeated one.
    """
    cells = []
    for combination in itertools.product(*(fitted(base, axis) for axis in axes)):
        given = {**(fixed or {}), **dict(zip((axis.path for axis in axes), combination, strict=True))}
        config = update(base, given, "--axis ")
        cells.append(Cell(name, {path: get(config, path) for path in given}, config.plain()))
    return cells


def fitted(base: Any, axis: Axis) -> list[Any]:
    """Return the values of an axis as their field has them; raise a UsageError as `product` does."""
    values = [get(update(base, {axis.path: value}, "--axis "), axis.path) for value in axis.values]
    if not values or len(set(map(repr, values))) < len(values):
        raise UsageError(f"--axis {axis.path}: must have one or more values, each once, got {list(axis.values)}")
    return values
