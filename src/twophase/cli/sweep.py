"""`twophase sweep`: a grid of runs."""

from __future__ import annotations

import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tyro.conf import UseAppendAction

from twophase.cli.train import RunOptions, parse_run, report_command
from twophase.errors import UsageError


@dataclass(frozen=True)
class SweepOptions:
    """Options of the commands around a sweep."""

    out: Path | None = None
    """Folder of results; an unfinished one is resumed."""
    quiet: bool = False
    """Show no progress."""
    workers: int | None = None
    """Processes that train (default: one a GPU, or one for each --threads cores). The same command on another machine
    that sees the folder brings further ones."""
    dry_run: bool = False
    """Say what would be run and how long it takes, and stop."""


@dataclass(frozen=True)
class Options(SweepOptions, RunOptions):
    """Train a grid of runs; repeat the command to resume it, or elsewhere to help."""

    axis: UseAppendAction[tuple[tuple[str, ...], ...]] = ()
    """A value's path and what to try for it: --axis outer.lr 0.3 0.7 --axis outer.restart never 3. Several words that
    are one value have commas: --axis sync.restart none a=3,b=5."""
    controls: bool = False
    """Add controls for restarts: momentum-free runs, plain averaging, and gain-matched runs without restarts."""


def main(argv: Sequence[str]) -> int:
    """Run the command; return its exit status."""
    options, config, given = parse_run(Options, argv, "sweep")
    from twophase.recipes.controls import grid_of
    from twophase.sweeps.grid import Axis, Sweep

    axes = [Axis(path.replace("-", "_"), tuple(values)) for path, *values in filter(None, options.axis)]
    for axis in axes:
        if axis.path in given:
            raise UsageError(f"--{axis.path}: must be given once, as an option or as an axis with all its values")
        given.add(axis.path)
    sweep = Sweep(config, grid_of(config, axes, controls=options.controls))
    out = options.out or Path("runs/sweep")

    def results(rows: list[Any]) -> str:
        from twophase.compare.sweep import compare_sweep, describe
        from twophase.figures.heatmap import sweep_figure
        from twophase.figures.style import save, styled
        from twophase.sweeps.table import TABLE

        figure = out / "figures" / "sweep.png"
        with styled():
            save(figure, sweep_figure(rows))
        page = f"page   {report_command(out)}"
        return f"\n{describe(compare_sweep(rows))}\n\ntable  {out / TABLE}\nfigure {figure}\n{page}"

    return run(sweep, out, options, results=results)


def run(
    sweep: Any,
    out: Path,
    options: SweepOptions,
    *,
    results: Callable[[list[Any]], str],
    on_rows: Callable[[list[Any]], Any] = lambda _: "",
) -> int:
    """Run a sweep, or only plan it, and print what came out; return the exit status.

    `results` draws rows into the folder's `figures` and tells them; `on_rows` is as of `run_sweep`.
    """
    from twophase.figures.style import check_drawing
    from twophase.progress import duration
    from twophase.sweeps.grid import RUNS
    from twophase.sweeps.runner import ERROR, run_sweep
    from twophase.training.distributed import stop_on_signal

    if options.dry_run:
        print(_plan(sweep, options.workers or 1))
        return 0
    check_drawing()  # what cannot be drawn is refused before hours of runs
    with stop_on_signal() as stop:
        outcome = run_sweep(
            sweep, out, workers=options.workers, quiet=options.quiet, on_rows=on_rows, should_stop=stop.is_set
        )
    counts = Counter({row.run: row.state for row in outcome.rows}.values())
    said = ", ".join(f"{count} {state}" for state, count in counts.items())
    print(f"{out}: {said} in {duration(outcome.seconds)}")
    for run_id, error in outcome.errors.items():
        place = out / RUNS / run_id / ERROR
        print(f"run {run_id} failed, this command tries it again: {error.splitlines()[0]} ({place})", file=sys.stderr)
    if stop.number:
        return 128 + stop.number
    (out / "figures").mkdir(exist_ok=True)
    print(results(outcome.rows))
    return int(bool(outcome.errors))


def _plan(sweep: Any, workers: int) -> str:
    """Say what a sweep will execute, and how long that takes, by a few timed steps of its first run."""
    from twophase.diloco.group import SingleProcess
    from twophase.progress import duration
    from twophase.sweeps.fork import tree
    from twophase.tasks.registry import task_of
    from twophase.training.trainer import Trainer

    configs, left = [*sweep.runs.values()], sum(node.steps for node in tree(sweep.runs).values())
    trainer, times = Trainer(task_of(configs[0]), configs[0], SingleProcess()), []
    for _ in range(min(12, configs[0].steps)):
        clock = time.perf_counter()
        trainer.inner_step()
        trainer.synchronize()
        trainer.read_losses()  # a GPU's steps are only launched before
        times.append(time.perf_counter() - clock)
    step = statistics.median(times)
    return (
        f"{len(sweep.cells)} cells are {len(configs)} different runs of {sum(each.steps for each in configs)} inner "
        f"steps; {left} are left, for runs share what they have in common. About {duration(left * step / workers)}, "
        f"by {len(times)} timed steps of {1e3 * step:.1f} ms and without validations; workers: {workers}."
    )
