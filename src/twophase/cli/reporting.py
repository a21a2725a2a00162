"""What `twophase report` does once its options are read."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from twophase.advice.text import describe as describe_diagnosis
from twophase.advice.verdict import diagnose
from twophase.errors import UsageError
from twophase.figures.style import check_numbers
from twophase.files import write_atomic
from twophase.judge.verdict import WITHIN, verdict
from twophase.judge.verdict_text import describe, part_stem, write
from twophase.progress import meter
from twophase.report.overlay import MOST_RUNS, common_folder, overlay
from twophase.report.page import DOCTYPE, counted, relative
from twophase.report.run import FILES, result_words, run_report
from twophase.report.sweep import sweep_report
from twophase.report.sweep_record import is_sweep, read_sweep
from twophase.runs.folder import COMPARE, REPORT
from twophase.runs.record import RunRecord, is_run, read_record
from twophase.sweeps.grid import RUNS

if TYPE_CHECKING:
    from twophase.cli.report import Options

_States = dict[Path, list[tuple[int, int]]]
_VERDICT = '{\n "within": '
"""Beginning of a `verdict.json`."""


def write_pages(options: Options) -> None:
    """Write the page, with `--watch` repeatedly until all runs have ended."""
    _check(options)
    several = len(options.folders) > 1
    usual = common_folder(list(options.folders)) / COMPARE if several else next(iter(options.folders)) / REPORT
    # A part of a sweep has a separate page, and a separate verdict.
    page = options.out or usual.with_name(part_stem(usual.stem, _where(options)) + usual.suffix)
    _check_page(page)
    if is_sweep(next(iter(options.folders))):
        stem = next(iter(options.folders)) / part_stem("verdict", _where(options))
        check_numbers([stem.with_name(f"{stem.name}.{kind}") for kind in ("md", "json")], _VERDICT, str(stem.parent))
    states: _States = {}
    if options.watch is not None:
        print(f"watching {' '.join(map(str, options.folders))}; the page is {page}, Ctrl-C ends the watch", flush=True)
        try:
            while _write_page(options, page, options.watch, states):
                time.sleep(options.watch)
        except KeyboardInterrupt:
            print(file=sys.stderr)
    _write_page(options, page, 0, states)  # without the script that shows the newest


def _check(options: Options) -> None:
    for word in options.where:
        if "=" not in word:
            raise UsageError(f"--where {word}: write a path and a value, such as inner_steps=20")
    paths = [word.partition("=")[0] for word in options.where]
    if twice := {path for path in paths if paths.count(path) > 1}:
        raise UsageError(f"--where {min(twice)} is given twice; a cell has one value of it: give one")
    folders = list(options.folders)
    if len(folders) > 1:
        if sweeps := [folder for folder in folders if is_sweep(folder)]:
            raise UsageError(
                f"{sweeps[0]}: is the folder of a sweep, and only runs are laid over each other. Give it alone (its "
                f"page compares its runs), or folders below {sweeps[0] / RUNS}"
            )
        if len(folders) > MOST_RUNS or len({folder.resolve() for folder in folders}) < len(folders):
            raise UsageError(f"{len(folders)} runs: give two to {MOST_RUNS} different ones")
    for name in ("runs", "where", "controls", "within") if not is_sweep(folders[0]) else ():
        if getattr(options, name):
            raise UsageError(f"--{name} is for sweeps, and {folders[0]} is not the folder of one; leave it out")


def _check_page(page: Path) -> None:
    """Refuse to replace a file that is neither empty nor a page, such as one of a run."""
    if page.is_file():
        with page.open("rb") as file:
            if file.read(len(DOCTYPE)) not in (b"", DOCTYPE.encode()):
                raise UsageError(f"{page}: holds something else than a page; name a new file, or move this one away")


def _where(options: Options) -> dict[str, str]:
    return dict(word.split("=", 1) for word in options.where)


def _write_page(options: Options, page: Path, refresh: float, states: _States) -> bool:
    """Write the page of runs or of a sweep, at the end in words, too; return whether a run is unfinished."""
    folder, *others = options.folders
    if others:
        records = [read_record(path) for path in options.folders]
        write_atomic(page, overlay(records, page.parent, refresh=refresh))
        if not refresh:
            print("\n".join([*(f"{record.path}: {result_words(record)}" for record in records), f"page {page}"]))
        return any(record.state == "running" for record in records)
    if is_sweep(folder):
        return _sweep(options, page, refresh, states)
    record = read_record(folder)
    diagnosis = diagnose(record)
    write_atomic(page, run_report(record, diagnosis, refresh=refresh, back=_back(record, page)))
    if not refresh:
        print(f"{describe_diagnosis(diagnosis, str(folder))}\n\nreport {page}")
    return record.state == "running"


def _back(record: RunRecord, page: Path) -> str | None:
    """Return the path to the report of the sweep that a run belongs to, if there is one."""
    runs = record.path.resolve().parent
    report = runs.parent / REPORT
    belongs = runs.name == RUNS and is_sweep(runs.parent) and report.is_file()
    return relative(report, page.parent) if belongs else None


def _sweep(options: Options, page: Path, refresh: float, states: _States) -> bool:
    """Write a sweep's page, and those of its runs if asked; return whether a run is unfinished."""
    folder, where = next(iter(options.folders)), _where(options)
    record = read_sweep(folder, where, page.parent)
    if options.runs:
        record.problems += _write_runs(folder / RUNS, page, states)
    within, controls = tuple(options.within or WITHIN), tuple(options.controls)
    write_atomic(page, sweep_report(record, within=within, controls=controls, refresh=refresh))
    if not refresh:
        judged = verdict(record.rows, within, controls)
        paths = write(judged, folder, where)
        more = f", and {'that' if len(states) == 1 else 'those'} of {counted(len(states), 'run')}" if states else ""
        print("\n".join([describe(judged), "", *map(str, paths), f"report {page}{more}"]))
    return record.going


def _write_runs(runs: Path, page: Path, states: _States) -> list[str]:
    """Write the page of each run that differs from `states`, and update that; return why damaged runs have none."""
    faults: list[str] = []
    changed: _States = {}
    for folder in filter(is_run, sorted(runs.iterdir()) if runs.is_dir() else []):
        if folder.is_symlink():  # its page would be written somewhere else
            continue
        files = [(folder / name).stat() for name in FILES if (folder / name).exists()]
        state = [(file.st_size, file.st_mtime_ns) for file in files]
        if states.get(folder) != state:
            changed[folder] = state
    # The later turns of a watch have a page or two to write.
    with meter("pages", len(changed), quiet=bool(states) or not changed) as show:
        for count, (folder, state) in enumerate(changed.items(), start=1):
            try:
                record = read_record(folder)
                _check_page(folder / REPORT)
            except UsageError as error:  # the other runs still get their pages
                faults.append(str(error))
                continue
            write_atomic(folder / REPORT, run_report(record, diagnose(record), back=relative(page, folder)))
            states[folder] = state
            show(count, folder.name)
    return faults
