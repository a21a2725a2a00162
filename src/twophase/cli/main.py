"""The command line: `twophase demo | train | data | export | sweep | tune | report | …`.

Each command is a module of this package with a `main` of its words. A command imports torch only when it runs, so that
`--help` answers without it. Exit status 0 is success, 1 a failure while running (a single run that diverged included),
2 a mistake in the request, with one line; 130 or 143 is a stop by Ctrl-C or SIGTERM, and the same command resumes.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

COMMANDS = {
    "demo": "train a small language model over a grid, with and without restarts, and draw it",
    "train": "one run; repeat the command to resume it",
    "data": "turn text into token shards once, for all runs that train on it",
    "export": "write a run's model as a Hugging Face folder, with its tokenizer",
    "sweep": "a grid of runs; repeat the command to resume it, or elsewhere to help",
    "tune": "which outer optimizer: every method tuned with the same budget, then compared on fresh seeds",
    "report": "a run, several over each other, or a sweep as one HTML page; of a sweep also its comparison",
    "diagnose": "does a run's outer loop diverge, take too large a step or oscillate, and which change to try",
    "period": "when to restart a rule in the linear model, beside the best setting without restarts",
    "explore": "write an interactive page (one file): what restarts do while you move the hyperparameters",
}
"""What each command does; its module in this package has its name."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line (without the program's name) and return its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        commands = "\n".join(f"  {name:9} {text}" for name, text in COMMANDS.items())
        print(
            "usage: twophase COMMAND [OPTIONS]\n\n"
            "Two-phase training (DiLoCo, local SGD): replicas that communicate every S steps, and settings for it.\n\n"
            f"{commands}\n\ntwophase COMMAND --help lists a command's options."
        )
        return 0
    if words[0] in ("-V", "--version"):
        from twophase import __version__

        print(f"twophase {__version__}")
        return 0
    name, *rest = words
    rank = os.environ.get("RANK", "0")
    from twophase.config import meant
    from twophase.errors import RunError, UsageError

    try:
        if name not in COMMANDS:
            raise UsageError(f"must be one of {', '.join(COMMANDS)}{meant(name, COMMANDS)}")
        status = import_module(f"twophase.cli.{name}").main(rest)
    except KeyboardInterrupt:
        status = 130
    except BrokenPipeError:  # the reader of our output, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (UsageError, RunError, OSError) as error:
        text, status = str(error), 2 if isinstance(error, UsageError) else 1
        if isinstance(error, OSError):  # a full disk, a read-only folder, a missing file
            if error.errno is None:
                raise
            place = f"{error.filename}: " if error.filename else ""
            text = f"{place}{error.strerror}; the same command resumes what was begun"
        if rank != "0" and "TORCHELASTIC_RUN_ID" in os.environ:
            time.sleep(2)  # torchrun ends all when one has ended, and most mistakes are in all: let rank 0 report first
        print(f"twophase {name}{f' (rank {rank})' * (rank != '0')}: {text}", file=sys.stderr)
    if status > 128 and rank == "0":
        program = ["python", "-m", "twophase"] if Path(sys.argv[0]).name == "__main__.py" else [sys.argv[0]]
        print(f"stopped; resume with: {shlex.join([*program, *words])}", file=sys.stderr)
    return status
