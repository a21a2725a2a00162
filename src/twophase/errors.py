"""The two errors that a command answers with one line instead of a traceback."""


class UsageError(ValueError):
    """A mistake of the user's: the message names the option, its value and its range; a command ends with status 2."""


class RunError(RuntimeError):
    """A run cannot go on: the message says why and what to do; a command ends with status 1."""
