"""`twophase report`: the page of a run, of several runs or of a sweep, once or during training, and in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro
from tyro.conf import Positional

from twophase.config import parse


@dataclass(frozen=True)
class Options:
    """A run, several over each other, or a sweep as one HTML page; of a sweep also the verdict."""

    folders: Positional[tuple[Path, ...]] = tyro.MISSING
    """Folder of the run or sweep, its --out; several runs are laid over each other."""
    out: Path | None = None
    """The page to write: report.html in the folder, with --where named after it; of several runs compare.html in the
    folder that holds all."""
    watch: float | None = None
    """Rewrite the page every so many seconds while a run goes on; it then reloads by itself."""
    runs: bool = False
    """Of a sweep: also write the report of each of its runs."""
    within: tuple[float, ...] = ()
    """Of a sweep: distances from the best of all that robustness areas are given for, relative, such as 0.05."""
    controls: tuple[str, ...] = ()
    """Of a sweep: further arms that serve as controls, besides linked and momentum-free ones."""
    where: tuple[str, ...] = ()
    """Of a sweep: judge only the cells with these values, such as inner_steps=20."""


def main(argv: Sequence[str]) -> int:
    """Run the command; return its exit status."""
    options, _ = parse(Options, argv, "twophase report")
    from twophase.cli.reporting import write_pages  # what reads and draws is slow to import

    write_pages(options)
    return 0
