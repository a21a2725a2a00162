"""`twophase.train`, `twophase.sweep` and `twophase.tune`: the commands of these names, from Python, with any task."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from twophase.base.config import RunError, UsageError, flatten, overlaid, to_tree
from twophase.cli.sweeping import complete
from twophase.cli.train import default_folder, finished, train_run
from twophase.cli.tuning import TuneResults, Tuning, run_tuning
from twophase.recipes.arms import ARMS, check_arm_options
from twophase.recipes.controls import grid_of
from twophase.report.results import Run, load
from twophase.report.results import Sweep as SweepResults
from twophase.restart import RestartPolicy
from twophase.sweeps.grid import Axis, Sweep
from twophase.tasks.named import LM, TASK, check, check_is_called_by_a_program, config_class, name_of
from twophase.training.config import RunConfig


def train(
    task: Any = LM,
    config: RunConfig | Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    *,
    track: str | Sequence[str] = (),
    quiet: bool = False,
) -> Run:
    """Train one run of a task, or resume it, and return its results; as `twophase train`.

    Args:
        task: a name (`lm`, `digits`, `hf:MODEL`, `FILE.py:CLASS`), or an object with the methods of a task.
        config: values of the run by dotted path or nested, such as `{"outer.lr": 0.7, "steps": 960}`, or a whole
            configuration without `task`. Further values are those of `twophase.training.config`, as of the command.
        out: the run's folder; by default one below `runs/` with a readable name, found again by the same values.
        track: trackers that get every line as well: tensorboard, trackio, wandb.
        quiet: show no progress.

    Returns:
        The run, as `twophase.load` reads it.

    Raises:
        UsageError: values that cannot be run, or a folder of another run.
        RunError: the run was stopped by a signal, or its weights were damaged; the same call resumes it.
    """
    resolved = _configuration(task, config)
    folder = default_folder(resolved) if out is None else Path(out)
    if finished(folder, resolved) is None:
        options = argparse.Namespace(
            start_timeout=600.0, sync_timeout=None, accept_logs=False,
            track=[track] if isinstance(track, str) else list(track), quiet=quiet,
        )  # fmt: skip
        import torch  # noqa: PLC0415 - as in the commands, which say what is wrong before it is loaded

        threads = torch.get_num_threads()
        try:
            summary = train_run(folder, resolved, options)
        finally:  # the caller's own training goes on with as many as before
            torch.set_num_threads(threads)
        if summary["exit_reason"] == "stopped":
            raise RunError(f"{folder}: the run was stopped at step {summary['steps']}; the same call resumes it")
    results = load(folder)
    assert isinstance(results, Run)
    return results


def sweep(
    task: Any,
    axes: Mapping[str, Sequence[Any]],
    config: RunConfig | Mapping[str, Any] | None = None,
    out: str | Path = "runs/sweep",
    *,
    controls: bool = False,
    workers: int | None = None,
    quiet: bool = False,
) -> SweepResults:
    """Run a grid of runs of a task, or resume it, and return its results; as `twophase sweep`.

    A script that calls this has its calls below `if __name__ == "__main__":`, because worker processes read its file
    when it defines the task.

    Args:
        task: as for `train`.
        axes: values to try by dotted path, such as `{"outer.lr": [0.3, 0.7], "outer.restart": ["never", 3]}`; those of
            the task are below `task.`.
        config: as for `train`; what the runs share.
        out: the sweep's folder.
        controls: add momentum-free runs, plain averaging and gain-matched controls of restarted runs.
        workers: worker processes; by default one a core, or one a GPU.
        quiet: show no progress.

    Returns:
        The sweep, as `twophase.load` reads it.

    Raises:
        UsageError: values that cannot be run, or a folder of another sweep.
        RunError: a run could not be done; the same call tries it again.
    """
    from twophase.tasks.build import preflight_all  # noqa: PLC0415 - torch

    base = _configuration(task, config)
    grid = []
    for path, values in axes.items():
        if isinstance(values, str) or not isinstance(values, Iterable):
            raise UsageError(f"axes: {path} is {values!r}; give a list of the values to try")
        if isinstance(config, Mapping) and path in (flat := flatten(config)) and not _is_whole(flat):
            raise UsageError(f"axes: {path} is in config, too; leave it out of one of them")
        grid.append(Axis(path, tuple(values)))
    plan, folder = Sweep("sweep", base, grid_of(base, grid, controls=controls)), Path(out)
    complete(plan, folder, texts=preflight_all(plan.runs.values()), workers=workers, quiet=quiet)
    results = load(folder)
    assert isinstance(results, SweepResults)
    return results


def tune(
    task: Any,
    arms: Sequence[str] = ARMS,
    config: RunConfig | Mapping[str, Any] | None = None,
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

    A script that calls this has its calls below `if __name__ == "__main__":`, as for `sweep`.

    Args:
        task: as for `train`.
        arms: what is held against averaging, such as `"nesterov"`, `"nesterov@3"`, `"adamw@K"` or `"auto"`
            (`twophase.recipes.arms`).
        config: as for `train`; what the runs share. Its `inner.lr` is where the search of that begins.
        out: the comparison's folder.
        points: settings that each arm may try, >= 1.
        budget: seconds for all of it, in the place of points; by default two hours.
        seeds: tuning seeds, over which a setting's results are averaged.
        fresh: seeds of the final comparison, two or more that are not among the tuning seeds.
        workers: worker processes, >= 1; by default one a core, or one a GPU.
        quiet: show no progress.

    Returns:
        The arms, best first, each with its setting, its results on the fresh seeds and a word; `print` shows the table.

    Raises:
        UsageError: values that cannot be run, a folder of another comparison, or a budget that does not reach.
        RunError: a run could not be done, and the same call tries it again; or every setting of every arm diverged.
    """
    if isinstance(config, Mapping) and not _is_whole(flat := flatten(config)):
        check_arm_options(flat)
    tuning = Tuning(_configuration(task, config), arms, points, budget, seeds, fresh)
    return run_tuning(tuning, Path(out), workers=workers, quiet=quiet)


def _configuration(task: Any, config: RunConfig | Mapping[str, Any] | None) -> RunConfig:
    """Return the checked configuration of a task, given by name or as an object, with some values."""
    check_is_called_by_a_program()
    if isinstance(config, RunConfig) and task in (None, LM):  # LM: the task that train() has where it is left out
        return check(config)
    if isinstance(config, Mapping) and task == LM:
        task = flatten(config).get(f"{TASK}.name", LM)
    if isinstance(task, type):
        raise UsageError(
            f"the task is the class {task.__name__}; give an object, such as {task.__name__}(), or its name"
        )
    name, values = (task, {}) if isinstance(task, str) else (name_of(type(task)), _options(task))
    if isinstance(config, RunConfig):
        other = getattr(getattr(config, TASK, None), "name", LM)
        if name != other:
            raise UsageError(f"the task is {name}, and config is one of {other}; leave the task out, or config")
        return check(config)
    base = config_class(name)()
    names = {field.name for field in dataclasses.fields(getattr(base, TASK))} if hasattr(base, TASK) else set()
    tree = {TASK: {path: value for path, value in values.items() if path in names}} if values else {}
    if config is not None and not isinstance(config, Mapping):
        raise UsageError(f"config is a {type(config).__name__}; give values by dotted path, or a configuration")
    flat = flatten(config or {})
    texts = {path: str(value) if isinstance(value, RestartPolicy) else value for path, value in flat.items()}
    return check(overlaid(overlaid(base, tree, "the task"), texts, "config"))


def _is_whole(flat: Mapping[str, Any]) -> bool:
    """Whether values are a run's whole configuration, such as `Run.config`, in place of what the user has chosen."""
    return flatten(to_tree(RunConfig())).keys() <= flat.keys()


def _options(task: Any) -> dict[str, Any]:
    """Return the values that made a task."""
    if dataclasses.is_dataclass(task):
        return {field.name: getattr(task, field.name) for field in dataclasses.fields(task) if field.init}
    if getattr(task, "__dict__", None):
        raise UsageError(
            f"the task {type(task).__name__} holds values that another process would not have; make it a dataclass "
            "whose fields they are"
        )
    return {}
