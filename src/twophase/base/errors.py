"""Two errors that end a program: a mistake of the user's, and a failure while running."""


class UsageError(ValueError):
    """A mistake of the user's, with the remedy in its message; the command line ends with status 2."""


class RunError(RuntimeError):
    """A failure that ends a run, with the remedy in its message; the command line ends with status 1."""
