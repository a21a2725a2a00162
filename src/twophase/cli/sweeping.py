"""What the commands around a sweep do: check it, say what it will cost, run it, show it."""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from twophase.base.config import RunError, UsageError
from twophase.base.progress import duration, meter
from twophase.cli.commands import between, verify_option
from twophase.figures.style import check_drawing
from twophase.runs.folder import list_some
from twophase.sweeps.grid import Sweep
from twophase.sweeps.plan import plan
from twophase.sweeps.run import TABLE, Outcome, Status, read_plan, read_summaries, run_sweep
from twophase.sweeps.table import Row, format_table, read_rows
from twophase.sweeps.work import Work
from twophase.tasks.named import TASK

if TYPE_CHECKING:
    from rich.console import RenderableType

    from twophase.training.config import RunConfig

MOST_CELLS = 1000
"""Cells that are run without `--yes`."""
MOST_WORKERS = 10_000
_TIMED_STEPS = 12

Results = Callable[[list[Row], Sweep, Path], str]
"""Draws a sweep and says what came out, from its rows."""
Picture = Callable[[list[Row]], "RenderableType"]
"""Makes what a terminal shows of a sweep while it runs."""


def _is_text_file(corpus: str) -> bool:
    path = corpus.removeprefix("file:")
    return path != corpus and os.path.isfile(os.path.expanduser(path))  # noqa: PTH111, PTH113 - Path's may raise


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that every command around a sweep has."""
    add_workers(parser, "; 0 starts none and only writes the plan, for workers elsewhere")
    parser.add_argument("--dry-run", action="store_true", help="say what would be run and how long it takes, and stop")
    parser.add_argument(
        "--no-merge", action="store_true", help="run cells apart that are the same run in exact arithmetic"
    )
    verify_option(parser)
    parser.add_argument("--yes", action="store_true", help=f"run more than {MOST_CELLS} cells without asking")
    parser.add_argument(
        "--in-memory",
        type=between(0, 10**6),
        metavar="N",
        help="states at branches that a worker holds in memory at most, each about the size of a checkpoint (8)",
    )


def add_workers(parser: argparse.ArgumentParser, more: str = "") -> None:
    """Add the option `--workers`."""
    text = f"worker processes (default: one a core, here {_cores()}, or one a GPU){more}"
    parser.add_argument("--workers", type=between(0, MOST_WORKERS), default=None, metavar="N", help=text)


def workers_of(workers: int | None) -> int:
    """Return how many workers that option asks for, where the device is not known yet."""
    return _cores() if workers is None else workers


@contextmanager
def watched(title: str, *, quiet: bool, picture: Picture | None = None) -> Iterator[Callable[[Status], None]]:
    """Show the progress of sweeps one after the other, each on a new display; yield the function for `run_sweep`.

    The picture is made at the start and for every run that ends.
    """
    with ExitStack() as displays:
        show: Callable[[int, str], None] = lambda *_: None  # noqa: E731
        drawn: RenderableType = ""

        def tell(status: Status) -> None:
            nonlocal show, drawn
            if picture is not None:
                drawn = picture(status.rows())
            if status.event == "begun":
                displays.close()
                above = (lambda: drawn) if picture is not None else None
                # a plain line for every run: its setting and perplexity is what there is to see
                display = meter(title, status.total, quiet=quiet, plain_seconds=0.0, picture=above)
                show = displays.enter_context(display)
            show(status.done, _status_text(status))

        yield tell


def complete(
    sweep: Sweep, folder: Path, *, texts: Mapping[str, str], workers: int | None = None, quiet: bool = False
) -> None:
    """Run all of a sweep from Python, where a failed run is an exception.

    `texts` is what `preflight_all` returned; without a number of workers there is one a core, or one a GPU.

    Raises:
        UsageError: as `run_sweep`.
        RunError: a run failed; the same call tries it again.
    """
    devices = devices_of(sweep.runs.values())
    with watched(sweep.name, quiet=quiet) as progress:
        outcome = run_sweep(
            sweep,
            folder,
            workers=workers if workers is not None else len(devices) or _cores(),
            threads=max(config.threads for config in sweep.runs.values()),
            devices=devices,
            texts=texts,
            progress=progress,
        )
    for run, error in outcome.errors.items():
        raise RunError(f"{folder}: {len(outcome.errors)} runs failed, {run} with: {error}")


def _status_text(status: Status) -> str:
    """Say what has just happened, and how many runs did not simply finish."""
    parts = [f"{status.setting or status.run}: {status.result or status.event}"] if status.run else []
    parts += [status.error] if status.event == "replaced" else []
    counts = {"finished before": status.skipped, "diverged": status.diverged, "failed": status.failed}
    parts += [f"{count} {name}" for name, count in counts.items() if count]
    return "; ".join(parts)


def run(
    sweep: Sweep,
    out: Path,
    options: argparse.Namespace,
    *,
    repeat: str,
    results: Results,
    picture: Picture | None = None,
) -> int:
    """Run a sweep, show it, and print its results.

    `options` are those of `add_options`, and `quiet`; `repeat` is the command that repeats all this.

    Returns:
        The exit status.
    """
    name = f"twophase {sweep.name}" if sweep.name == "sweep" else "twophase"
    if len(sweep.cells) > MOST_CELLS and not (options.yes or options.dry_run):
        raise UsageError(
            f"the grid has {len(sweep.cells)} cells ({len(sweep.runs)} runs), more than {MOST_CELLS}; look at them "
            "with --dry-run, then add --yes"
        )
    devices = devices_of(sweep.runs.values())
    workers = (len(devices) or _cores()) if options.workers is None else options.workers
    work, texts = read_plan(sweep, out), None
    # An edited task or text and the same command must not give the old table in silence.
    may_change = any(hasattr(config, TASK) or _is_text_file(config.data.corpus) for config in sweep.runs.values())
    if options.dry_run or may_change or work is None or not all(map(work.finished, work.runs)):
        from twophase.tasks.build import preflight_all

        # Refuses what cannot be used here before a folder is made.
        texts = preflight_all(sweep.runs.values(), verify=options.verify)
    if options.dry_run:
        print(dry_run(sweep, out, workers=max(workers, 1), merge=not options.no_merge))
        return 0
    check_drawing()  # what cannot be drawn is refused before hours of runs
    with watched(sweep.name, quiet=options.quiet, picture=picture) as progress:
        outcome = run_sweep(
            sweep,
            out,
            workers=workers,
            threads=max(config.threads for config in sweep.runs.values()),
            merge=not options.no_merge,
            devices=devices,
            texts=texts,
            in_memory=options.in_memory,
            progress=progress,
        )
    print(f"{out}: {_counts_text(outcome)} in {duration(outcome.seconds)}")
    _explain(name, outcome, read_plan(sweep, out), repeat=repeat, workers=workers)
    status = 1 if outcome.errors else 0
    try:
        print(results(read_rows(out / TABLE), sweep, out))
    except UsageError as error:
        if not outcome.errors:
            raise
        print(f"{name}: {error}", file=sys.stderr)  # on a full disk there is no room for a figure either
    return status


def _counts_text(outcome: Outcome) -> str:
    parts = {
        "runs finished": outcome.finished,
        "diverged": outcome.diverged,
        "failed": outcome.failed,
        "were finished before": outcome.skipped,
    }
    return ", ".join(f"{count} {name}" for name, count in parts.items() if count or name == "runs finished")


def _explain(name: str, outcome: Outcome, work: Work | None, *, repeat: str, workers: int) -> None:
    """Print what merging saved, what failed, and how to go on."""
    if work is not None and work.counts["runs"] < work.counts["cells"]:
        print(
            f"{work.counts['cells']} cells are {work.counts['runs']} different runs; {work.counts['steps_asked']} "
            f"inner steps asked, {work.counts['steps']} in the plan"
        )
    runs_by_error: dict[str, list[str]] = {}  # a full disk or a missing text fails many in the same way
    for run, error in outcome.errors.items():
        runs_by_error.setdefault(error.replace(run, "RUN"), []).append(run)
    for error, runs in runs_by_error.items():
        several = f"{len(runs)} runs failed: {error} ({list_some(runs)})"
        only = f"run {runs[0]} failed: {outcome.errors[runs[0]]}"
        print(f"{name}: {only if len(runs) == 1 else several}", file=sys.stderr)
    if outcome.errors:
        print(f"try the failed runs again with: {repeat}", file=sys.stderr)
    if workers == 0 and work is not None and outcome.skipped < len(work.runs):
        print(f"see how far it is, and draw what is there, with: {repeat}")


def dry_run(sweep: Sweep, out: Path, *, workers: int, merge: bool) -> str:
    """Say what a sweep asks for, what will be executed, and how long that takes, by a few timed steps."""
    finished = set(read_summaries(list(sweep.runs), out))
    made = plan(sweep, merge=merge, finished=finished)
    pending = set(made.runs) - finished
    # What a started forest has on disk is not counted.
    steps = sum(node.steps for node in made.forest.nodes.values() if not pending.isdisjoint(node.runs))
    step_seconds, run_seconds = _timed(next(iter(sweep.runs.values())))
    seconds = (steps * step_seconds + len(pending) * run_seconds) / workers
    table = [
        ["cells asked", made.cells],
        ["distinct runs", len(made.runs)],
        ["of them finished", len(made.runs) - len(pending)],
        ["inner steps asked", made.steps_asked],
        ["inner steps to execute", steps],
        ["asked / to execute", f"{made.steps_asked / steps:.2f}" if steps else "nothing left"],
    ]
    return (
        f"{format_table(['', ''], table).lstrip()}\n\n"
        f"Merging leaves {len(made.runs)} of {len(sweep.runs)} runs, sharing leaves {made.steps} of "
        f"{sum(config.steps for config in made.runs.values())} inner steps.\n"
        f"Estimated time: {duration(seconds)} with {workers} worker{'s' * (workers > 1)} "
        f"({1e3 * step_seconds:.1f} ms an inner step of all replicas, {1e3 * run_seconds:.0f} ms a run for "
        f"validation). Measured here on one run's first {_TIMED_STEPS} steps."
    )


def _timed(config: RunConfig) -> tuple[float, float]:
    """Measure seconds of an inner step of all replicas, and of a run's validation."""
    import torch

    from twophase.diloco.group import SingleProcess
    from twophase.tasks.build import task_of
    from twophase.training.trainer import Trainer

    trainer = Trainer(task_of(config), config, SingleProcess())
    times = []
    for _ in range(min(_TIMED_STEPS, config.steps)):
        clock = time.perf_counter()
        trainer.inner_step()
        trainer.synchronize()
        trainer.settle()  # a GPU's steps are only launched before
        times.append(time.perf_counter() - clock)
    clock = time.perf_counter()
    trainer.validate()
    judged = time.perf_counter() - clock
    if trainer.compute.device.type == "cuda":  # the memory is for the workers
        del trainer
        gc.collect()
        torch.cuda.empty_cache()
    return statistics.median(times), judged


def devices_of(configs: Iterable[RunConfig]) -> list[str]:
    """List the GPUs for the workers of some runs; none where they need none."""
    if not any(config.device == "cuda" for config in configs):
        return []
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",") if visible else [str(number) for number in range(torch.cuda.device_count())]


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
