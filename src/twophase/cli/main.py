"""The command line: `twophase demo | train | data | export | sweep | sweep-worker | report | ...`.

Each command is a module of this package with a `main` of its words; `commands` describes them. A command imports torch
only when it runs, so that `--help` answers without it. Exit status 0 is success, 1 a failure while running (a single
run that diverged included). Status 2 is a mistake in the request, with one message. Status 130 or 143 is a stop by
Ctrl-C or SIGTERM; the same command resumes.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from importlib import import_module

from twophase.base.errors import FULL, RunError, UsageError, is_out_of_memory, message_of
from twophase.cli.commands import COMMANDS, HIDDEN, PROGRAM, interrupted
from twophase.number import did_you_mean


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line (without the program's name) and return its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_overview())
        return 0
    if arguments[0] in ("-V", "--version"):
        from twophase import __version__

        print(f"{PROGRAM} {__version__}")
        return 0
    name, *rest = arguments
    if name not in COMMANDS:
        return _complain(PROGRAM, f"{name!r} is no command; {did_you_mean(name, COMMANDS)}")
    try:
        return import_module(f"twophase.cli.{name.replace('-', '_')}").main(rest)
    except UsageError as error:
        return _complain(f"{PROGRAM} {name}", str(error))
    except KeyboardInterrupt:
        return interrupted(arguments)
    except BrokenPipeError:  # the reader of our output, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except FULL as error:
        if not (isinstance(error, RunError | OSError) or is_out_of_memory(error)):
            raise
        return _complain(f"{PROGRAM} {name}", message_of(error), "failed", status=1)


def _overview() -> str:
    lines = [f"  {name:12} {text}" for name, text in COMMANDS.items() if name not in HIDDEN]
    return (
        f"usage: {PROGRAM} COMMAND [OPTIONS]\n\n"
        "Two-phase training (DiLoCo, local SGD) with outer momentum that knows when to forget.\n\n"
        + "\n".join(lines)
        + f"\n\n{PROGRAM} COMMAND --help lists a command's options."
    )


def _complain(where: str, text: str, what: str = "error", status: int = 2) -> int:
    rank = os.environ.get("RANK", "0")
    if rank != "0":
        where = f"{where} (process {rank})"
        if "TORCHELASTIC_RUN_ID" in os.environ:
            # Most mistakes are in every process, and torchrun ends all when one has ended: let rank 0 report first.
            time.sleep(2)
    print(f"{where}: {what}: {text}", file=sys.stderr)
    return status
