"""`twophase train`: one run; and what the commands that train share: their options, and the run's configuration."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tyro.conf import UseAppendAction

from twophase.config import dump_yaml, flatten, load_yaml, parse, to_tree, update
from twophase.errors import UsageError
from twophase.runs.folder import RECORDED


@dataclass(frozen=True)
class RunOptions:
    """Options of the commands that train."""

    out: Path | None = None
    """Folder of results; an unfinished one is resumed."""
    quiet: bool = False
    """Show no progress."""
    task: str = "lm"
    """What to train: lm, digits, hf:MODEL, FILE.py:CLASS, module:CLASS."""
    recipe: str | None = None
    """Begin with a recipe's values: paper_150m, small, nano; files and options win."""
    config: UseAppendAction[tuple[Path, ...]] = ()
    """YAML file with values; of several a later one wins, and options win over all."""
    print_config: bool = False
    """Print the resolved configuration and stop."""


@dataclass(frozen=True)
class Options(RunOptions):
    """Train one run; repeat the command to resume it."""

    track: tuple[str, ...] = ()
    """Send the metrics to tensorboard, trackio or wandb as well; the run does not depend on them."""
    timeout: float | None = None
    """Under torchrun: seconds for the start of all ranks, and for each collective (600 on GPUs, 1800 without)."""


O = TypeVar("O", bound=RunOptions)  # noqa: E741


def parse_run(options: type[O], argv: Sequence[str], command: str) -> tuple[O, Any, set[str]]:
    """Return a command's options, the run's configuration, and the paths that were given for it.

    Defaults or a recipe come first, then the files from left to right, then options. `--print-config` ends here.
    """
    from twophase.recipes.pretraining import at_pace, recipe
    from twophase.tasks.registry import LM, config_class

    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--task")
    first.add_argument("--recipe")
    first.add_argument("--config", action="append", default=[], type=Path)
    known, _ = first.parse_known_args(argv)  # the task's own options are not known before the task is
    files = [(f"--config {path}: ", flatten(load_yaml(path))) for path in known.config]
    name = known.task or next((values["task.name"] for _, values in reversed(files) if "task.name" in values), LM)
    if known.recipe and name != LM:
        raise UsageError(f"--recipe: must be left out with --task {name}, got {known.recipe}")
    base = recipe(known.recipe) if known.recipe else config_class(name)()
    given: set[str] = set()
    for place, values in files:
        if values.get(RECORDED):
            raise UsageError(f"{place}is of a loop of your own; its program makes the run")
        base = update(base, values, place)
        given |= values.keys()
    own, config = parse(options, argv, f"twophase {command}", base)
    before, named = flatten(to_tree(base)), {word.partition("=")[0].replace("-", "_") for word in argv}
    given |= {path for path, value in flatten(to_tree(config)).items() if f"__{path}" in named or value != before[path]}
    config = at_pace(config, keep=given) if known.recipe else config
    if own.print_config:
        print(dump_yaml(config), end="")
        raise SystemExit(0)
    return own, config, given


def main(argv: Sequence[str]) -> int:
    """Run the command; return its exit status."""
    # Torch reads it when it is imported: a rank's death would else print stack traces before our one message.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    options, config, _ = parse_run(Options, argv, "train")
    from twophase.api import default_folder, train_run

    out = options.out or default_folder(config)
    summary = train_run(config, out, track=options.track, quiet=options.quiet, timeout=options.timeout)
    if summary["exit_reason"] == "stopped":
        return int(summary["status"])
    if os.environ.get("RANK", "0") != "0":
        return int(summary["diverged"])
    head = f"{out}: {config.describe()}, S = {config.inner_steps}"
    if summary["diverged"]:
        words = f"diverged at step {summary['steps']} of {config.steps}"
    else:
        words = f"validation loss {summary['validation_loss']:.4g}"
        if summary.get("perplexity") is not None:
            words = f"validation perplexity {summary['perplexity']:.3f} a token"
        if summary.get("perplexity_per_byte") is not None:
            words += f" ({summary['perplexity_per_byte']:.3f} a byte)"
        words += f", {summary['rounds']} rounds, {summary['restarts']} restarts, {summary['seconds']:.1f} s"
    print(f"{head}: {words}")
    return int(summary["diverged"])


def report_command(folder: Path) -> str:
    """Return the command that reports on a folder."""
    return shlex.join(["twophase", "report", str(folder)])
