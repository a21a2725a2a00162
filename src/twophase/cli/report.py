"""`twophase report`: the page of a run, of several runs or of a sweep, once or again and again during training."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import tyro
from tyro.conf import Positional

from twophase.config import parse, require
from twophase.errors import UsageError
from twophase.runs.folder import COMPARE, REPORT
from twophase.sweeps.grid import RUNS

_MARK = b'<meta name="generator" content="twophase'
"""What stands at the top of every page of ours."""


@dataclass(frozen=True)
class Options:
    """A run, several over each other, or a sweep as one HTML page; of a sweep also its comparison."""

    folders: Positional[tuple[Path, ...]] = tyro.MISSING
    """Folder of the run or sweep, its --out; several runs are laid over each other."""
    out: Path | None = None
    """The page to write: report.html in the folder, with --where named after it; of several runs compare.html in the
    folder that holds all."""
    watch: int | None = None
    """Write the page again every so many seconds while a run goes on; the page then loads again by itself."""
    runs: bool = False
    """Of a sweep: also write the report of each of its runs."""
    controls: tuple[str, ...] = ()
    """Of a sweep: further methods that serve as controls, besides linked and momentum-free ones."""
    where: tuple[str, ...] = ()
    """Of a sweep: only the cells with these values, such as inner_steps=20."""


def main(argv: Sequence[str]) -> int:
    """Run the command; return its exit status."""
    options, _ = parse(Options, argv, "twophase report")
    from twophase.runs.record import is_run

    require(options.watch is None or 1 <= options.watch <= 86_400, "watch", options.watch, "1 to 86,400 seconds")
    if not options.folders:
        raise UsageError("must be given the folder of a run or a sweep, its --out")
    folder, *others = options.folders
    write = _runs if others else _run if is_run(folder) else _sweep
    if write is not _sweep and (given := [name for name in ("runs", "controls", "where") if getattr(options, name)]):
        raise UsageError(f"--{given[0]}: must be left out, {folder} is not the folder of a sweep")
    if options.watch:
        print(f"watching {' '.join(map(str, options.folders))}; Ctrl-C ends the watch", flush=True)
        with suppress(KeyboardInterrupt):
            while write(options, options.watch)[0]:
                time.sleep(options.watch)
    print(write(options, 0)[1])  # the last page does not load again
    return 0


def save(page: Path, html: str) -> None:
    """Write a page, over an older page of ours alone."""
    from twophase.files import write_atomic

    if page.is_file() and (old := page.read_bytes()) and _MARK not in old[:500]:
        raise UsageError(f"--out {page}: must be a new file or a page of twophase, holds something else")
    page.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(page, html)


def _run(options: Options, refresh: float, of_sweep: Path | None = None) -> tuple[bool, str]:
    """Write the page of a run; return whether the run is unfinished, and its result in words."""
    from twophase.report.page import href
    from twophase.report.run import result_words, run_page
    from twophase.runs.record import read_record

    (folder,) = options.folders
    record, page = read_record(folder), options.out or folder / REPORT
    runs = folder.resolve().parent
    if runs.name == RUNS and (runs.parent / REPORT).is_file():
        of_sweep = of_sweep or runs.parent / REPORT
    save(page, run_page(record, refresh=refresh, back=of_sweep and href(of_sweep, page.parent)))
    return record.state == "running", f"{result_words(record)}\nreport {page}"


def _runs(options: Options, refresh: float) -> tuple[bool, str]:
    """Write several runs over each other; return whether one is unfinished, and their results in words."""
    from twophase.report.run import common_folder, overlay_page, result_words
    from twophase.runs.record import read_record

    records = [read_record(folder) for folder in options.folders]
    page = options.out or common_folder(options.folders) / COMPARE
    save(page, overlay_page(records, page.parent, refresh=refresh))
    words = "\n".join(f"{record.path}: {result_words(record)}" for record in records)
    return any(record.state == "running" for record in records), f"{words}\npage {page}"


def _sweep(options: Options, refresh: float) -> tuple[bool, str]:
    """Write a sweep's page, and those of its runs if asked; return whether one is unfinished, and the comparison."""
    from twophase.compare.sweep import compare_sweep, describe
    from twophase.report.sweep import read_sweep, sweep_report
    from twophase.runs.config import named_values
    from twophase.runs.record import is_run

    (folder,), where = options.folders, named_values("where", options.where, empty=True)
    # a part of a sweep has a page of its own
    part = "".join(f"-{path}={text}".replace("/", "_") for path, text in where.items())
    page = options.out or folder / f"{Path(REPORT).stem}{part}.html"
    for path in sorted((folder / RUNS).glob("*")) if options.runs else []:
        if is_run(path):
            _run(Options((path,)), 0, page)
    record = read_sweep(folder, where, page.parent)
    save(page, sweep_report(record, controls=options.controls, refresh=refresh))
    return record.going, f"{describe(compare_sweep(record.rows, options.controls))}\n\nreport {page}"
