"""What the commands that train share: their options, and the configuration before its own options."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tyro.conf import UseAppendAction

from twophase.config import flatten, load_yaml, parse, update
from twophase.errors import UsageError

PROGRAM = "twophase"


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


O = TypeVar("O", bound=RunOptions)  # noqa: E741


def parse_run(options: type[O], argv: Sequence[str], command: str) -> tuple[O, Any, set[str]]:
    """Return a command's options, the run's configuration, and the paths that were given for it.

    Defaults or a recipe come first, then the files from left to right, then options.
    """
    from twophase.recipes.pretraining import at_pace, recipe
    from twophase.tasks.registry import LM, config_class

    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--task", default=LM)
    first.add_argument("--recipe")
    first.add_argument("--config", action="append", default=[], type=Path)
    known, _ = first.parse_known_args(argv)  # the task's own options are not known before the task is
    files = [(f"--config {path}: ", flatten(load_yaml(path))) for path in known.config]
    name = next((values["task.name"] for _, values in reversed(files) if "task.name" in values), LM)
    name = known.task if known.task != LM else name
    if known.recipe and name != LM:
        raise UsageError(f"--recipe: must be left out with --task {name}, got {known.recipe}")
    base = recipe(known.recipe) if known.recipe else config_class(name)()
    given: set[str] = set()
    for place, values in files:
        base = update(base, values, place)
        given |= values.keys()
    own, config = parse(options, argv, f"{PROGRAM} {command}", base)
    here, there = flatten_config(config), flatten_config(base)
    named = {word.partition("=")[0].removeprefix("--").replace("-", "_") for word in argv if word.startswith("--")}
    given |= {path for path, value in here.items() if path in named or value != there[path]}
    return own, at_pace(config, keep=given) if known.recipe else config, given


def flatten_config(config: Any) -> dict[str, Any]:
    """Return all values of a configuration by dotted path."""
    from twophase.config import to_tree

    return flatten(to_tree(config))


def command_line(argv: Sequence[str]) -> str:
    """Return the command line as it can be repeated from here."""
    script = Path(sys.argv[0])
    start = ["python", "-m", PROGRAM] if script.name == "__main__.py" else [sys.argv[0]]
    return shlex.join([*start, *argv])


def report_command(folder: Path) -> str:
    """Return the command that reports on a folder."""
    return shlex.join([PROGRAM, "report", str(folder)])
