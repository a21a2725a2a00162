"""`twophase report`: writes the page of a run or a sweep, once or as long as it goes on, and says it in words."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import twophase.studies.policies  # noqa: F401 - the runs of a study may name policies of it
from twophase.advice.text import describe as describe_diagnosis
from twophase.advice.verdict import diagnose
from twophase.base.config import UsageError
from twophase.base.files import write_atomic
from twophase.base.progress import meter
from twophase.cli.commands import config_paths, plain_parser
from twophase.judge.verdict import WITHIN, verdict
from twophase.judge.verdict_text import describe, write
from twophase.report.labels import REPORT
from twophase.report.page import counted, relative
from twophase.report.run import run_report
from twophase.report.sweep import sweep_report
from twophase.report.sweep_record import is_sweep, read_sweep
from twophase.runs.folder import CONFIG, ENV, METRICS, ROUNDS, STEPS, SUMMARY
from twophase.runs.record import RunRecord, is_run, read_record
from twophase.sweep.work import RUNS

WATCH_SECONDS = 10.0
_FILES = (CONFIG, ENV, METRICS, ROUNDS, STEPS, SUMMARY)
_State = tuple[tuple[int, int] | None, ...]


@dataclass(frozen=True)
class Wish:
    """What is asked for.

    Args:
        folder: of the run or sweep.
        out: the file to write; None means `report.html` in the folder.
        watch: seconds between two writings while the run goes on; None means once.
        runs: also write the report of every run of a sweep.
        within, controls: as `twophase.judge.verdict.verdict` takes them.
        where: as `twophase.judge.verdict.select` takes it.
        known: dotted paths that a configuration of this version has; empty where they are not known.
    """

    folder: Path
    out: Path | None = None
    watch: float | None = None
    runs: bool = False
    within: tuple[float, ...] = WITHIN
    controls: tuple[str, ...] = ()
    where: tuple[tuple[str, str], ...] = ()
    known_paths: frozenset[str] = frozenset()

    @property
    def page(self) -> Path:
        """The file to write."""
        return self.out or self.folder / REPORT


def report(wish: Wish, say: Callable[[str], None] = print) -> int:
    """Write the report and say what it says.

    Args:
        wish: what is asked for.
        say: takes the words.

    Returns:
        The exit status.

    Raises:
        UsageError: a folder of neither, options that do not fit, or a file that cannot be written.
    """
    _check(wish)
    once = _Sweep(wish).write if is_sweep(wish.folder) else partial(_run, wish)
    if wish.watch is None:
        once(say, None)
        return 0
    say(f"watching {wish.folder}; the page is {wish.page}, Ctrl-C ends the watch")
    try:
        while once(_silent, wish.watch):
            time.sleep(wish.watch)
    except KeyboardInterrupt:
        print(file=sys.stderr)
    once(say, None)  # without the script that shows the newest
    return 0


def _silent(_: str) -> None:
    pass


def _check(wish: Wish) -> None:
    folder = wish.folder
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise UsageError(f"{folder}: {what}; give the folder of a run or a sweep, its --out")
    if wish.watch is not None and not 1 <= wish.watch <= 86400:
        raise UsageError(f"--watch {wish.watch:g}: give seconds between 1 and 86400, such as --watch 10")
    if wish.out is not None and wish.out.is_dir():
        raise UsageError(f"--out {wish.out}: is a folder; give the file to write, such as {wish.out / REPORT}")
    if is_sweep(folder):
        return
    if not is_run(folder) and not any(is_run(entry) for entry in folder.glob("replica-*")):
        raise UsageError(
            f"{folder}: is the folder of neither a run (it has no config.yaml, rounds.jsonl, metrics.jsonl or "
            "summary.json) nor a sweep (no sweep.json or cells.csv); give the --out of twophase train or sweep"
        )
    for option, value in (("--runs", wish.runs), ("--where", wish.where), ("--controls", wish.controls)):
        if value:
            raise UsageError(f"{option} is for sweeps, and {folder} is the folder of a run; leave it out")


def _write(path: Path, text: str) -> None:
    try:
        write_atomic(path, text, durable=False)
    except OSError as error:
        raise UsageError(
            f"{path}: the report cannot be written ({error.strerror}); choose another file with --out"
        ) from None


def _run(wish: Wish, say: Callable[[str], None], refresh: float | None) -> bool:
    """Write a run's page; whether the run goes on."""
    record = read_record(wish.folder, wish.known_paths)
    diagnosis = diagnose(record)
    _write(wish.page, run_report(record, diagnosis, refresh=refresh, back=_back(record, wish.page)))
    say(describe_diagnosis(diagnosis, str(wish.folder)))
    say(f"\nreport {wish.page}")
    return record.state == "unfinished"


def _back(record: RunRecord, page: Path) -> str | None:
    """Where the report of the sweep lies that a run belongs to, if there is one."""
    sweep = record.path.resolve().parent.parent
    belongs = record.path.resolve().parent.name == RUNS and is_sweep(sweep)
    return relative(sweep / REPORT, page.parent) if belongs and (sweep / REPORT).is_file() else None


@dataclass
class _Sweep:
    """The pages of a sweep, and of its runs if they are asked for.

    Args:
        wish: what is asked for.
        written: the state in which each run was when its page was written, so that a watch writes only what changed.
    """

    wish: Wish
    written: dict[Path, _State] = field(default_factory=dict)

    def write(self, say: Callable[[str], None], refresh: float | None) -> bool:
        """Write the sweep's page; whether it goes on."""
        wish = self.wish
        record = read_sweep(wish.folder, dict(wish.where))
        if wish.runs:
            record.problems += self._write_runs()
        text = sweep_report(record, wish.page.parent, within=wish.within, controls=wish.controls, refresh=refresh)
        _write(wish.page, text)
        if refresh is None:
            judged = verdict(record.rows, wish.within, wish.controls)
            paths = write(judged, wish.folder, dict(wish.where))
            count = len(self.written)
            pages = [
                f"report {wish.page}",
                *([f"and {'that' if count == 1 else 'those'} of {counted(count, 'run')}"] if count else []),
            ]
            say("\n".join([describe(judged), "", *map(str, paths), ", ".join(pages)]))
        return record.going

    def _write_runs(self) -> list[str]:
        """Write each run's own page into its folder, if it has changed; return why damaged runs have none."""
        faults: list[str] = []
        runs = self.wish.folder / RUNS
        folders = sorted(runs.iterdir()) if runs.is_dir() else []
        states = {folder: _state(folder) for folder in folders if is_run(folder)}
        changed = [folder for folder, state in states.items() if self.written.get(folder) != state]
        # The later turns of a watch have a page or two to write.
        with meter("pages", len(changed), quiet=bool(self.written) or not changed) as show:
            for count, folder in enumerate(changed, start=1):
                try:
                    record = read_record(folder, self.wish.known_paths)
                except UsageError as error:  # the other runs still get their pages
                    faults.append(str(error))
                    continue
                _write(folder / REPORT, run_report(record, back=relative(self.wish.page, folder)))
                self.written[folder] = states[folder]
                show(count, folder.name)
        return faults


def _state(folder: Path) -> _State:
    """Size and time of each file of a run that its page shows; None for one that is not there."""
    state: list[tuple[int, int] | None] = []
    for name in _FILES:
        try:
            status = (folder / name).stat()
            state.append((status.st_size, status.st_mtime_ns))
        except OSError:
            state.append(None)
    return tuple(state)


def main(words: list[str]) -> int:
    """Run the command; return its exit status."""
    from twophase.judge.verdict import WITHIN

    parser = plain_parser("report")
    parser.add_argument("folder", type=Path, metavar="RUN|SWEEP", help="folder of the run or sweep, its --out")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the page to write (report.html in the folder)")
    parser.add_argument(
        "--watch",
        type=float,
        nargs="?",
        const=WATCH_SECONDS,
        metavar="SECONDS",
        help=f"write the page again every so many seconds while the run goes on ({WATCH_SECONDS:g}); it then shows the "
        "newest by itself, until that is switched off on it",
    )
    parser.add_argument("--runs", action="store_true", help="of a sweep: also write the report of each of its runs")
    parser.add_argument(
        "--within",
        type=float,
        nargs="+",
        default=WITHIN,
        metavar="X",
        help="of a sweep: distances from the best of all that robustness areas are given for, relative "
        f"(default {' '.join(map(str, WITHIN))})",
    )
    parser.add_argument(
        "--controls",
        nargs="+",
        default=(),
        metavar="ARM",
        help="of a sweep: further arms to compare the others with, besides linked and momentum-free ones",
    )
    parser.add_argument(
        "--where",
        nargs="+",
        default=(),
        metavar="PATH=VALUE",
        help="of a sweep: judge only the cells with these values, such as inner_steps=20",
    )
    options = parser.parse_args(words)
    for word in options.where:
        if "=" not in word:
            raise UsageError(f"--where {word}: write a path and a value, such as inner_steps=20")
    where = tuple(dict(word.split("=", 1) for word in options.where).items())
    within, controls = tuple(options.within), tuple(options.controls)
    known_paths = config_paths()
    return report(Wish(options.folder, options.out, options.watch, options.runs, within, controls, where, known_paths))
