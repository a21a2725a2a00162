"""The two errors that a command answers with one line instead of a traceback, and their words in Python."""

import re
from collections.abc import Iterator
from contextlib import contextmanager


class UsageError(ValueError):
    """A mistake of the user's: the message names the option, its value and its range; a command ends with status 2."""


class RunError(RuntimeError):
    """A run cannot go on: the message says why and what to do; a command ends with status 1."""


@contextmanager
def python_words() -> Iterator[None]:
    """Raise these errors in the words of a caller in Python; as a decorator, from a function that programs call."""
    try:
        yield
    except (UsageError, RunError) as error:
        error.args = (in_python(str(error)),)
        raise


def in_python(text: str) -> str:
    """Write a command's words as those of a call.

    >>> in_python("--inner-steps: must be at least 1; repeat the command")
    'inner_steps: must be at least 1; repeat the call'
    """
    text = re.sub(r"(?<![^\s(])--([a-z][\w.-]*)", lambda found: found[1].replace("-", "_"), text)
    return re.sub(r"\bcommand\b", "call", text)
