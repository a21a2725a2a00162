"""`twophase.train`, `twophase.sweep` and `twophase.tune`: what the commands of these names call."""

from __future__ import annotations

import dataclasses
import json
import re
import signal
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twophase.config import fingerprint, flatten, require, to_tree, update
from twophase.errors import RunError, UsageError, python_words
from twophase.files import sha256
from twophase.progress import line_text, meter
from twophase.runs.config import RunConfig, outer_line
from twophase.runs.folder import ENV, SUMMARY, WEIGHTS, RunFolder, require_locks
from twophase.runs.record import read_summary
from twophase.runs.trackers import call_each, open_trackers
from twophase.tasks.registry import LM, config_class, forbid_import_time_calls, name_of, task_of

if TYPE_CHECKING:
    from twophase.report.results import Run
    from twophase.report.results import Sweep as SweepResults
    from twophase.tuning.results import TuneResults

Values = RunConfig | Mapping[str, Any] | None


@python_words()
def train(
    task: Any = LM,
    config: Values = None,
    out: str | Path | None = None,
    *,
    track: str | Sequence[str] = (),
    quiet: bool = False,
) -> Run:
    """Train one run of a task, or resume it, and return it as `twophase.load` does; as `twophase train`.

    Args:
        task: a name (`lm`, `digits`, `hf:MODEL`, `FILE.py:CLASS`), or an object with the methods of a task.
        config: values of the run by dotted path or nested, such as `{"outer.lr": 0.7, "steps": 960}`, or a whole
            configuration without `task`. The others are those of `twophase.runs.config`.
        out: the run's folder; by default one below `runs/` with a readable name, found again by the same values.
        track: trackers that get every line as well: tensorboard, trackio, wandb.
        quiet: show no progress.

    Raises:
        UsageError: values that cannot be run, or a folder of another run.
        RunError: the run was stopped by a signal; the same call resumes it.
    """
    from twophase.report.results import load  # noqa: PLC0415 - SciPy, seconds

    resolved = run_config(task, config)
    folder = default_folder(resolved) if out is None else Path(out)
    with _as_it_was():
        summary = train_run(resolved, folder, track=[track] if isinstance(track, str) else track, quiet=quiet)
    if summary["exit_reason"] == "stopped":
        raise RunError(f"{folder}: the run was stopped at step {summary['steps']}; the same call resumes it")
    return load(folder)  # type: ignore[return-value]


@python_words()
def sweep(
    task: Any,
    axes: Mapping[str, Sequence[Any]],
    config: Values = None,
    out: str | Path = "runs/sweep",
    *,
    controls: bool = False,
    workers: int | None = None,
    quiet: bool = False,
) -> SweepResults:
    """Run a grid of runs of a task, or resume it, and return it as `twophase.load` does; as `twophase sweep`.

    A script that calls this has its calls below `if __name__ == "__main__":`, because worker processes read its file
    when it defines the task.

    Args:
        task: as for `train`.
        config: as for `train`; what the runs share.
        out: the sweep's folder.
        quiet: show no progress.
        axes: values to try by dotted path, such as `{"outer.lr": [0.3, 0.7], "outer.restart": ["never", 3]}`; those of
            the task are below `task.`.
        controls: add momentum-free runs, plain averaging and gain-matched controls of restarted runs.
        workers: processes that train; one means this process. By default one a GPU, or one for each `threads` cores.

    Raises:
        RunError: a run failed, and its folder says why; the same call tries it again.
    """
    from twophase.recipes.controls import grid_of  # noqa: PLC0415 - not where --help is asked
    from twophase.report.results import load  # noqa: PLC0415
    from twophase.sweeps.grid import Axis, Sweep  # noqa: PLC0415
    from twophase.sweeps.runner import run_sweep  # noqa: PLC0415

    if words := [path for path, values in axes.items() if isinstance(values, str) or not isinstance(values, Iterable)]:
        raise UsageError(f"axes: {words[0]} must be a list of the values to try, got {axes[words[0]]!r}")
    base, folder = run_config(task, config), Path(out)
    cells = grid_of(base, [Axis(path, tuple(values)) for path, values in axes.items()], controls=controls)
    with _as_it_was():
        run_sweep(Sweep(base, cells), folder, workers=workers, quiet=quiet).check(folder)
    return load(folder)  # type: ignore[return-value]


def run_config(task: Any, config: Values) -> RunConfig:
    """Return the configuration of a task, given by name or as an object, with some values."""
    forbid_import_time_calls()
    if isinstance(config, RunConfig):
        return config
    values, own = flatten(config or {}), {}
    if isinstance(task, str):
        base = config_class(values.get("task.name", task) if task == LM else task)()
    elif isinstance(task, type):
        raise UsageError(f"task: must be a name or an object, such as {task.__name__}(), got the class")
    elif getattr(task, "__dict__", None) and not dataclasses.is_dataclass(task):
        raise UsageError(f"task: {type(task).__name__} must be a dataclass, for another process to make it, too")
    else:
        base = config_class(name_of(type(task)))()
        fields = dataclasses.fields(base.task)  # type: ignore[attr-defined]
        own = {f"task.{field.name}": getattr(task, field.name) for field in fields if field.name != "name"}
    return update(update(base, own, "task: "), values, "config: ")


@contextmanager
def _as_it_was() -> Iterator[None]:
    """Give the caller's own computing its number of threads and its random numbers back."""
    import torch  # noqa: PLC0415 - seconds

    threads, gpus = torch.get_num_threads(), [torch.cuda.current_device()] if torch.cuda.is_available() else []
    try:
        with torch.random.fork_rng(gpus):
            yield
    finally:
        torch.set_num_threads(threads)


def train_run(
    config: RunConfig, out: Path, *, track: Sequence[str] = (), quiet: bool = False, timeout: float | None = None
) -> dict[str, Any]:
    """Train one run, or what is left of it, on this rank; return its summary.

    Arguments are as of `train`; `timeout` is the seconds for the start of all ranks and for each collective. Values
    that cannot be run here are refused before a folder is made.
    """
    from twophase.training import distributed  # noqa: PLC0415 - torch
    from twophase.training.trainer import Trainer  # noqa: PLC0415

    require_locks()
    require(timeout is None or 0 < timeout <= 1e6, "timeout", timeout, "above 0 and at most 1e6 seconds")
    if config.outer.method == "averaging" and config.outer.momentum:
        wanted = "left out with averaging, but heavy-ball and nesterov have one"
        require(False, "outer.momentum", config.outer.momentum, wanted)
    trackers = open_trackers(track, out, to_tree(config)) if track else []
    if (out / SUMMARY).exists() and (summary := finished(config, out)) is not None:
        return summary
    with ExitStack() as stack:
        group = stack.enter_context(distributed.process_group(distributed.device_of(config.device), timeout))
        stop = stack.enter_context(distributed.stop_on_signal())
        trainer = Trainer(task_of(config), config, group)
        folder, on_line = None, lambda _: None
        with distributed.raised_on_all_ranks(group):
            if group.rank == 0:
                folder = stack.enter_context(RunFolder.claim(out, config))
                folder.trackers = trackers
                if trackers:
                    stack.callback(call_each, trackers, "close")
        if folder and not quiet:
            print(outer_line(config), file=sys.stderr)
            show = stack.enter_context(meter("train", config.steps))
            on_line = lambda line: show(line["step"], line_text(line))  # noqa: E731
        summary = trainer.run(out, folder, on_line=on_line, should_stop=stop.is_set)
        # Where the signal came to another rank, this one stops with it and has none.
        return summary | {"status": 128 + (stop.number or signal.SIGINT)}


def finished(config: RunConfig, out: Path) -> dict[str, Any] | None:
    """Return the summary of a finished run, or None where the folder has none.

    A UsageError says that its task, text or tokens have changed since, a RunError that its weights are damaged.
    """
    summary, weights = read_summary(out, fingerprint(config)), out / WEIGHTS
    if summary is None:
        return None
    data = json.loads((out / ENV).read_bytes())["corpus"]["fingerprint"]
    if data != task_of(config).describe()["fingerprint"]:
        raise UsageError(f"--out {out}: the data or the task have changed since the run ended; give another --out")
    if weights.exists() and sha256(weights) != summary.get("weights_sha256"):
        raise RunError(f"{weights} is damaged; delete it and summary.json, and repeat the command")
    return summary


def default_folder(config: RunConfig) -> Path:
    """Return the folder of a run without `--out`: its setting in words, and its fingerprint."""
    task = getattr(config, "task", None)
    name = task.name.rpartition(":")[2] if task else ""
    words = f"{name} {config.describe()} S {config.inner_steps} seed {config.seed}"
    label = re.sub("[^A-Za-z0-9.]+", "-", words)[:75].strip("-.")
    return Path("runs") / f"{label}-{fingerprint(config)}"


@python_words()
def tune(
    task: Any,
    methods: str | Sequence[str] | None = None,
    config: Values = None,
    out: str | Path = "runs/tune",
    *,
    points: int | None = None,
    budget: float | None = None,
    seeds: Sequence[int] = (0, 1),
    fresh: Sequence[int] = (100, 101, 102, 103, 104),
    workers: int | None = None,
    quiet: bool = False,
) -> TuneResults:
    """Compare outer optimizers on a task, each tuned with as many settings, or resume that; as `twophase tune`.

    Args:
        task: as for `train`.
        config: as for `sweep`; the search of the inner learning rate begins at its own.
        out: the comparison's folder.
        workers: as for `sweep`.
        quiet: show no progress.
        methods: what is held against averaging, such as `"nesterov outer.restart=3"` (`twophase.tuning.methods`); by
            default averaging, its filter `orthogonal`, Muon inside, and Nesterov.
        points: settings that each method tries, >= 1.
        budget: seconds for all of it, in the place of points; by default two hours.
        seeds: tuning seeds, over which a setting's results are averaged.
        fresh: seeds of the final comparison, two or more that are not among the tuning seeds.

    Returns:
        The methods, best first, each with its setting, its results on the fresh seeds and a word; `print` shows them.

    Raises:
        UsageError: values that cannot be run, or a budget that does not reach.
        RunError: a run failed, and its folder says why; or every setting of averaging diverged.
    """
    from twophase.tuning.methods import METHODS, check_paths  # noqa: PLC0415 - not where --help is asked
    from twophase.tuning.tune import Tuning, run_tuning  # noqa: PLC0415

    if isinstance(config, Mapping):
        check_paths(flatten(config))
    methods = [methods] if isinstance(methods, str) else methods or METHODS
    base = run_config(task, config)
    with _as_it_was():
        tuning = Tuning(base, methods, points, budget, seeds, fresh)
        return run_tuning(tuning, Path(out), workers=workers, quiet=quiet)
