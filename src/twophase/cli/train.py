"""`twophase train`: one run."""

from __future__ import annotations

import argparse
import math
import os
import re
import signal
import sys
from datetime import date
from pathlib import Path
from typing import Any

from twophase.base.config import RunError, UsageError, fingerprint, flatten, to_tree
from twophase.base.leash import follow_torchrun
from twophase.base.progress import meter, round_text, step_text
from twophase.base.reading import read_json_object
from twophase.cli.commands import (
    between,
    config_options,
    interrupted,
    print_config,
    run_parser,
    train_config,
    verify_option,
)
from twophase.number import number
from twophase.runs.folder import ENV, SUMMARY, read_summary, weights_fault
from twophase.tasks.lm.config import TrainConfig
from twophase.tasks.named import TASK
from twophase.training.config import RunConfig

_SECONDS = between(1e-3, 1e7, number)


def main(arguments: list[str]) -> int:
    """Run the command; return its exit status."""
    follow_torchrun()
    # Torch reads it when it is imported: a peer's death would else print stack traces before our one message.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    parser = run_parser("train", on_demand=["processes"])
    config_options(parser)
    parser.add_argument(
        "--track",
        nargs="+",
        default=[],
        metavar="TRACKER",
        help="send the metrics to tensorboard, trackio or wandb as well; the run does not depend on them",
    )
    parser.add_argument(
        "--accept-logs",
        action="store_true",
        help="resume although a log was shortened, altered or lost since the checkpoint; a line in it marks the gap",
    )
    verify_option(parser)
    _process_options(parser)
    options, config = train_config(parser, arguments)
    if options.print_config:
        return print_config(config)
    out = options.out or default_folder(config)
    if options.verify:  # before a finished run's result, too
        from twophase.tasks.build import task_of

        if verify_data := getattr(task_of(config), "verify_data", None):
            verify_data()
    summary = finished(out, config) or train_run(out, config, options)
    lead = os.environ.get("RANK", "0") == "0"
    if summary["exit_reason"] == "stopped":
        if lead:
            interrupted(["train", *arguments])
        return summary["status"]
    if lead:
        print(describe_run(out, config, summary))
    return 1 if summary["diverged"] else 0


def finished(out: Path, config: RunConfig) -> dict[str, Any] | None:
    """Return the summary of a finished run, or None where the folder has none.

    Raises:
        RunError: its weights are damaged, or the file that says what it was trained on.
        UsageError: its text file, or the file or data of its task, has changed since.
    """
    summary = read_summary(out, fingerprint(config))
    if summary is None:
        return None
    if fault := weights_fault(out, summary):
        raise RunError(fault)
    option, fingerprint_now = _trained_on(config)
    if fingerprint_now is not None:  # an edited file and the same command: another run, not this result
        try:
            before = read_json_object(out / ENV)["corpus"]["fingerprint"]
        except (OSError, ValueError, LookupError, TypeError):
            raise RunError(
                f"{out / ENV}, which names the data of the finished run, is missing or damaged. Put it back, or "
                f"delete {SUMMARY} and repeat the command, which resumes from the last checkpoint"
            ) from None
        if before != fingerprint_now:
            raise UsageError(
                f"{option}: its file or data has changed since the run in {out} ended; choose another --out for a "
                "new run, or put them back"
            )
    return summary


def _trained_on(config: RunConfig) -> tuple[str, str | None]:
    """Return the option that names a run's data, and their fingerprint now.

    None stands for data that may rightly differ: Python's texts, and moved files. Token shards have checksums.
    """
    if isinstance(config, TrainConfig):
        from twophase.tasks.lm.corpus import text_fingerprint

        return f"--data.corpus {config.data.corpus}", text_fingerprint(config.data.corpus)
    from twophase.tasks.build import task_of

    name = config.task.name  # type: ignore[attr-defined]
    return f"--task {name}", task_of(config).describe()["fingerprint"]


_NAMED = ("outer.", "inner_steps", "seed", f"{TASK}.name", "sync.restart")
"""Values that the name of a folder has in any case."""


def default_folder(config: RunConfig) -> Path:
    """Return the folder of a run without `--out`: the day, its setting in words, and its fingerprint.

    By its fingerprint it is found again on another day. (The time of day would be another one in another process.)
    """
    identity = fingerprint(config)
    earlier = sorted(Path("runs").glob(f"*{identity}"))
    if earlier:
        return earlier[0]
    setting = f"{config.outer.describe()} {_restart(config)} S {config.inner_steps} seed {config.seed}"
    if hasattr(config, TASK):
        setting = f"{config.task.name.rpartition(':')[2]} {setting}"  # type: ignore[attr-defined]
    defaults = flatten(to_tree(type(config)()))
    changed = {path: value for path, value in flatten(to_tree(config)).items() if defaults.get(path) != value}
    for path, value in changed.items():
        if not path.startswith(_NAMED):
            setting += f" {path.rpartition('.')[2].replace('_', ' ')} {value}"
    label = re.sub("[^A-Za-z0-9.]+", "-", setting)[:75].strip("-.")
    return Path("runs") / f"{date.today()}-{label}-{identity}"


def _restart(config: RunConfig) -> str:
    """Return when the momentum restarts: each fragment's own policy, or one for all."""
    return f"restart {', '.join(config.sync.restart) or config.outer.policy()}"


def _process_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("processes", "Processes of torchrun.")
    group.add_argument(
        "--sync-timeout",
        type=_SECONDS,
        metavar="S",
        help="seconds for a reduction under torchrun (600 on GPUs, 1800 without)",
    )
    group.add_argument(
        "--start-timeout",
        type=_SECONDS,
        default=600.0,
        metavar="S",
        help="seconds to wait for the other processes of torchrun at the start (600)",
    )


def train_run(out: Path, config: RunConfig, options: argparse.Namespace) -> dict[str, Any]:
    """Train what is not finished yet."""
    from twophase.runs.trackers import check, tracked
    from twophase.tasks.build import task_of
    from twophase.training.outer import outer_line
    from twophase.training.preflight import preflight
    from twophase.training.session import claimed, process_group, signals, take_device, world_size
    from twophase.training.train import train

    trackers = check(options.track)  # before a folder is made
    take_device(config)
    task = task_of(config)
    preflight(config, task, world_size())  # before a folder is made for what cannot be run
    with (
        process_group(config, options.start_timeout, options.sync_timeout) as communicator,
        signals() as stopped,
        claimed(out, config, communicator, accept_logs=options.accept_logs) as folder,
        tracked(folder, trackers, run_name=out.name, config=to_tree(config), lead=communicator.rank == 0) as recorder,
    ):
        if communicator.rank == 0 and not options.quiet:
            print(outer_line(config), file=sys.stderr)
        with meter("train", config.steps, quiet=options.quiet or communicator.rank > 0) as show:
            summary = train(
                task,
                config,
                recorder,
                communicator=communicator,
                on_round=lambda line: show(line["step"], round_text(line)),
                on_step=lambda line: show(line["step"], step_text(line)),
                should_stop=stopped.is_set,
            )
        # Where the signal came to another process, this one stops with it and has none.
        return summary | {"status": 128 + (stopped.number or signal.SIGINT)}


def describe_run(out: Path, config: RunConfig, summary: dict[str, Any]) -> str:
    """Describe a finished run in one line."""
    head = f"{out}: {config.outer.describe()}, {_restart(config)}, S = {config.inner_steps}"
    if summary["diverged"]:
        return f"{head}: diverged at step {summary.get('steps', 'unknown')} of {config.steps}"
    counts = ", ".join(f"{summary.get(name, 'unknown')} {name}" for name in ("rounds", "restarts"))
    return f"{head}: {_result(summary)}, {counts}, {summary['seconds']:.1f} s"


def _result(summary: dict[str, Any]) -> str:
    """Describe a run's validation: its perplexity, or where the task has none its loss."""
    if "perplexity" not in summary:
        return f"validation loss {summary['validation_loss']:.4g}"
    per_token, per_byte = (
        f"{math.nan if summary.get(name) is None else summary[name]:.3f}"
        for name in ("perplexity", "perplexity_per_byte")
    )
    return f"validation perplexity {per_token} a token" + ("" if per_byte == "nan" else f" ({per_byte} a byte)")
