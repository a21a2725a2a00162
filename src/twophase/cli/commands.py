"""The table of commands, and what their parsers share."""

from __future__ import annotations

import argparse
import itertools
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twophase.base.options import Parser
from twophase.number import whole_number

if TYPE_CHECKING:
    from twophase.training.config import RunConfig

PROGRAM = "twophase"
COMMANDS = {
    "demo": "train a small language model over a grid, with and without restarts, and draw it",
    "train": "one run; repeat the command to resume it",
    "data": "turn text into token shards once, for all runs that train on it",
    "export": "write a run's model as a Hugging Face folder, with its tokenizer",
    "sweep": "a grid of runs; repeat the command to resume it",
    "tune": "which outer optimizer: every arm tuned with the same budget, then judged on fresh seeds",
    "report": "a run, several over each other, or a sweep as one HTML page; of a sweep also the verdict",
    "diagnose": "does a run's outer loop oscillate, overshoot or lag, and what the theory suggests",
    "period": "when to restart a rule on a spectrum, what it gains, and where it cannot help",
    "explore": "write an interactive page (one file): what restarts do while you move the hyperparameters",
    "sweep-worker": "one more worker for a sweep that was started elsewhere, here or on any machine",
}
"""What each command does; its module in this package has its name."""
HIDDEN = ("sweep-worker",)
"""Commands that the overview leaves out: scripts call them."""


def plain_parser(command: str, **options: Any) -> Parser:
    """Make the parser of a command, without options."""
    return Parser(f"{PROGRAM} {command}", description=COMMANDS[command], **options)


def run_parser(command: str, **options: Any) -> Parser:
    """Make the parser of a command that trains: `--out` and `--quiet`."""
    parser = plain_parser(command, **options)
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of results; an unfinished one is resumed")
    parser.add_argument("--quiet", action="store_true", help="show no progress")
    return parser


def config_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that a configuration is read from."""
    parser.add_argument(
        "--task",
        metavar="NAME",
        help="what to train: lm, digits, hf:MODEL, FILE.py:CLASS",
    )
    parser.add_argument(
        "--recipe", metavar="NAME", help="start from a recipe's values: paper_150m, small, nano; files and options win"
    )
    parser.add_argument(
        "--config",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="YAML file with values; several are laid over each other, options win",
    )
    parser.add_argument("--print-config", action="store_true", help="print the resolved configuration and stop")


def verify_option(parser: argparse.ArgumentParser) -> None:
    """Add the option `--verify`."""
    parser.add_argument(
        "--verify",
        action="store_true",
        help="read all token shards and compare them with their checksums before anything else; otherwise shards "
        "that were right before are read during training",
    )


def train_config(parser: Parser, arguments: list[str]) -> tuple[argparse.Namespace, RunConfig]:
    """Parse all words: the parser's own options, and the checked configuration from YAML files and its own options.

    Args:
        parser: the parser; the options of the task's configuration are added to it.
        arguments: words of the command line.
    """
    from twophase.base.config import UsageError, flatten, load_yaml, overlaid, with_values
    from twophase.base.options import add_values, values_given
    from twophase.recipes.pretraining import at_pace, recipe
    from twophase.tasks.lm.config import TrainConfig
    from twophase.tasks.named import LM, TASK, check, config_class

    # The task's own options are not known before it is.
    files = {Path(word): load_yaml(Path(word)) for word in option_values("--config", arguments)}
    in_files = [flatten(tree).get(f"{TASK}.name") for tree in files.values()]
    name = [LM, *(str(name) for name in in_files if name), *option_values("--task", arguments)][-1]
    default = config_class(name)()
    add_values(parser, default, "run")
    parser.on_demand |= {name for name, part in vars(default).items() if is_dataclass(part) and name != TASK}
    options = parser.parse_args(arguments)
    if options.recipe is not None and name != LM:
        raise UsageError(f"--recipe {options.recipe} is for --task {LM}; with --task {name} leave it out")
    config: RunConfig = default if options.recipe is None else recipe(options.recipe)
    paths: list[str] = []
    for path, tree in files.items():
        config = overlaid(config, tree, f"--config {path}")
        paths += flatten(tree)
    config = with_values(config, {f"{TASK}.name": name} if name != LM else {})
    values = values_given(options, config)
    config = with_values(config, values)
    if options.recipe:
        assert isinstance(config, TrainConfig)
        config = at_pace(config, keep={*paths, *values})
    return options, check(config)


def option_values(option: str, arguments: Sequence[str]) -> list[str]:
    """Return the values that an option is given, before all options are known."""
    pairs = itertools.pairwise([*arguments, ""])
    return [word.partition("=")[2] or after for word, after in pairs if word.partition("=")[0] == option]


def between(smallest: float, largest: float, read: Callable[[str], Any] = whole_number) -> Callable[[str], Any]:
    """Return an argument's type: whole numbers of a range, or what else `read` reads."""

    def parsed(word: str) -> Any:
        try:
            value = read(word)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        if not smallest <= value <= largest:
            raise argparse.ArgumentTypeError(f"is {value}; it must be from {smallest:,} to {largest:,}")
        return value

    return parsed


def print_config(config: RunConfig) -> int:
    """Print the resolved configuration; return the exit status."""
    from twophase.base.config import dump_yaml

    print(dump_yaml(config, whole=True), end="")
    return 0


def config_paths() -> frozenset[str]:
    """Return the dotted paths of all values that a run's configuration has in this version."""
    from twophase.base.config import values_of
    from twophase.tasks.lm.config import TrainConfig

    return frozenset(values_of(TrainConfig()))


def interrupted(arguments: Sequence[str]) -> int:
    """Print the command that resumes; return the exit status."""
    print(f"stopped; resume with: {command_line(arguments)}", file=sys.stderr)
    return 130


def report_command(folder: Path) -> str:
    """Return the command that reports on a folder, as a shell takes it."""
    return shlex.join([PROGRAM, "report", str(folder)])


def command_line(arguments: Sequence[str]) -> str:
    """Return the command line as it can be repeated from here."""
    script = Path(sys.argv[0])
    start = ["python", "-m", PROGRAM] if script.name == "__main__.py" else [sys.argv[0]]
    return shlex.join([*start, *arguments])
