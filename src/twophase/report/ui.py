"""What `twophase ui` shows: the runs and sweeps below a folder as a list, with their pages, made on request.

Nothing is written. A page is made again when a file of its folder has changed. No path leads out of the folder, neither
by `..` nor by a link.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from twophase.advice.verdict import diagnose
from twophase.base.config import UsageError, flatten, load_yaml
from twophase.base.reading import read_json_object
from twophase.report.maps import perplexity_text
from twophase.report.overlay import MOST_RUNS, overlay
from twophase.report.page import Html, asset, counted, link, page, section, table, tag
from twophase.report.run import FILES, result_words, run_report
from twophase.report.sweep import sweep_report
from twophase.report.sweep_record import is_sweep, read_sweep
from twophase.runs.folder import CONFIG, LOCK, METRICS, SUMMARY
from twophase.runs.log import read_log
from twophase.runs.record import LARGEST, RunRecord, is_run, read_record
from twophase.sweeps.run import SPEC, TABLE
from twophase.sweeps.table import arm_name, read_rows, settings
from twophase.sweeps.work import RUNS

SECONDS = 5.0
"""Interval at which the list, and pages of unfinished runs, reload."""
VIEW = "/view/"
"""Address below which a folder has its page."""
_MOST_ENTRIES, _MOST_PAGES, _DEEPEST = 1_000, 32, 5
_Stamp = tuple[Any, ...]


class Library:
    """The runs and sweeps below a folder.

    Args:
        root: the folder.
        known_paths: dotted paths of a configuration of this version; see `read_record`.
    """

    def __init__(self, root: Path, known_paths: frozenset[str] = frozenset()) -> None:
        self.root = root.resolve()
        self._known_paths = known_paths
        self._lock = threading.Lock()  # a browser asks for several pages at once, which share what follows
        self._rows: dict[Path, tuple[_Stamp, list[object]]] = {}
        self._pages: dict[Path, tuple[_Stamp, str]] = {}

    def at(self, parts: Sequence[str]) -> Path:
        """Return the folder at a path below the root.

        Raises:
            UsageError: the path leads out of the root, or to no folder.
        """
        path = self.root.joinpath(*parts)
        odd = any(part in ("", ".", "..") or {"/", "\\", "\0"} & set(part) for part in parts)
        if odd or not path.is_dir() or not path.resolve().is_relative_to(self.root):
            raise UsageError(f"{'/'.join(parts)}: is no folder below {self.root}")
        return path

    def list_page(self) -> str:
        """Return the page with all runs and sweeps, the newest first."""
        all_folders = self._folders()
        folders = all_folders[:_MOST_ENTRIES]
        with self._lock:
            rows = [self._remembered(self._rows, folder, _row) for folder in folders]
        ordered = sorted(zip(folders, rows, strict=True), key=lambda pair: str(pair[1][-1]), reverse=True)
        lines, root_link = [], tag("a", "this folder", href=VIEW)
        for folder, row in ordered:
            path = folder.relative_to(self.root).as_posix()
            target = Html(link(path, path).replace('href="', f'href="{VIEW}', 1)) if path != "." else root_link
            box = tag("input", type="checkbox", name="run", value=quote(os.fsencode(path)), aria_label=f"choose {path}")
            lines.append([target, box if row[0] == "run" else None, *row])
        header = ["folder", "choose", "kind", "state", "result", "outer optimizer", "restart", "changed"]
        count = counted(len(all_folders), "folder")
        which = count if len(lines) == len(all_folders) else f"The newest {len(lines):,} of {count}"
        caption = f"{which} below {self.root}; the runs of a sweep are on its page."
        states = [tag("option", state, value="" if state == "any state" else state) for state in _STATES]
        filters = tag(
            "p",
            tag("label", "Filter ", tag("input", type="search", id="words", autocomplete="off")),
            " ",
            tag("label", "State ", tag("select", *states, id="state")),
            " ",
            tag("span", id="count", role="status"),
        )
        form = tag(
            "form",
            filters,
            table(header, lines, caption=caption),
            tag("p", tag("button", "Lay the chosen runs over each other", type="submit")),
            action=VIEW,
            method="get",
        )
        note = "This page only reads the folders, and shows their newest state every few seconds."
        return page("Runs and sweeps", note, section("All", form, anchor="all"), scripts=[asset("ui.js")], served=True)

    def folder_page(self, parts: Sequence[str]) -> str:
        """Return the page of a run or a sweep.

        Raises:
            UsageError: it is neither, or is damaged.
        """
        folder = self.at(parts)
        with self._lock:
            made = self._remembered(self._pages, folder, self._page)
            while len(self._pages) > _MOST_PAGES:
                self._pages.pop(next(iter(self._pages)))
        return made

    def overlay_page(self, paths: Sequence[str]) -> str:
        """Return the page of several runs over each other.

        Raises:
            UsageError: fewer than two, more than `MOST_RUNS`, one twice, or a folder that is no run.
        """
        if not 2 <= len(set(paths)) == len(paths) <= MOST_RUNS:
            raise UsageError(f"{counted(len(paths), 'run')} chosen; choose two to {MOST_RUNS} different ones")
        folders = [self.at([] if path == "." else path.split("/")) for path in paths]
        records = [read_record(folder, self._known_paths) for folder in folders]
        return overlay(records, self.root, refresh=SECONDS)

    def _folders(self) -> list[Path]:
        """Return the folders of runs and sweeps, the newest first; those inside of one belong to it."""
        folders = []
        for directory, names, _ in os.walk(self.root):
            folder = Path(directory)
            if is_sweep(folder) or _is_begun(folder):
                folders.append(folder)
                names.clear()
            elif len(folder.relative_to(self.root).parts) >= _DEEPEST:
                names.clear()
        return sorted(folders, key=_changed_at, reverse=True)

    def _page(self, folder: Path) -> str:
        if is_sweep(folder):
            return sweep_report(read_sweep(folder), refresh=SECONDS)
        record = read_record(folder, self._known_paths)
        in_sweep = folder.parent.name == RUNS and folder.parent != self.root and is_sweep(folder.parent.parent)
        return run_report(record, diagnose(record), refresh=SECONDS, back="../.." if in_sweep else None)

    @staticmethod
    def _remembered(memory: dict[Path, tuple[_Stamp, Any]], folder: Path, make: Callable[[Path], Any]) -> Any:
        """Return what was made of a folder, made again if its files have changed since."""
        stamp = _stamp(folder)
        if folder not in memory or memory[folder][0] != stamp:
            memory.pop(folder, None)  # the newest is last
            memory[folder] = stamp, make(folder)
        return memory[folder][1]


_STATES = ("any state", "finished", "unfinished", "diverged", "damaged")


def _is_begun(folder: Path) -> bool:
    """Tell a run from a folder with a configuration that a user has put there."""
    return is_run(folder) and any((folder / name).exists() for name in (LOCK, *FILES[1:]))


def _changed_at(folder: Path) -> int:
    """Return when a file or folder right inside of a folder changed last, without looking into a sweep's runs."""
    with suppress(OSError):  # gone since
        return max((entry.stat(follow_symlinks=False).st_mtime_ns for entry in os.scandir(folder)), default=0)
    return 0


def _stamp(folder: Path) -> _Stamp:
    """Return the size and time of each file that a page of a folder is made of."""
    folders = [folder]
    if is_sweep(folder) and (folder / RUNS).is_dir():
        folders += sorted((folder / RUNS).iterdir())
    files = [path / name for path in folders for name in (*FILES, SPEC, TABLE)]
    states = []
    for file in files:
        with suppress(OSError):  # not there, or gone since
            state = file.stat()
            states.append((str(file), state.st_size, state.st_mtime_ns))
    return tuple(states)


def _row(folder: Path) -> list[object]:
    """Return kind, state, result, rule, restart and time of change of a folder; what cannot be read is damaged."""
    newest = max((time for _, _, time in _stamp(folder)), default=0)
    changed = f"{datetime.fromtimestamp(newest / 1e9).astimezone():%Y-%m-%d %H:%M:%S}"
    kind = "sweep" if is_sweep(folder) else "run"
    try:
        return [kind, *(_sweep_row(folder) if kind == "sweep" else _run_row(folder)), changed]
    except (UsageError, OSError, ValueError, TypeError) as error:
        return [kind, "damaged", str(error), "", "", changed]


def _run_row(folder: Path) -> list[object]:
    """Return state, result, rule and restart of a run, from the few files that hold them."""
    record, newest = RunRecord(folder), dict[str, float]()
    if (folder / CONFIG).is_file():
        record.config = flatten(load_yaml(folder / CONFIG))
    if (folder / SUMMARY).is_file():
        record.summary = read_json_object(folder / SUMMARY)
    for line in read_log(folder / METRICS)[0]:
        newest |= {name: v for name, v in line.items() if isinstance(v, (int, float)) and abs(v) <= LARGEST}
    record.metrics = {name: np.array([value]) for name, value in newest.items()}
    return [record.state, result_words(record).partition(": ")[2], record.outer_words, record.restart]


def _sweep_row(folder: Path) -> list[object]:
    """Return state, result, rule and restart of a sweep."""
    if not (folder / TABLE).is_file():
        return ["unfinished", "no table yet", "", ""]
    cells = settings(read_rows(folder / TABLE))
    finished = [setting for setting in cells if setting.result is not None]
    missing = sum(setting.state == "missing" for setting in cells)
    best = min(finished, key=lambda setting: setting.result or 0.0, default=None)
    text = f"{len(finished)} of {counted(len(cells), 'setting')} finished"
    if best is not None:
        text += f"; best {best.measure} {perplexity_text(best.result)}{f', {arm_name(best.arm)}' if best.arm else ''}"
    arms = len({setting.arm for setting in cells})
    return ["unfinished" if missing else "finished", text, f"{counted(arms, 'arm')}", ""]
