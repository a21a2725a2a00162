"""`python -m twophase` is the command `twophase`."""

import os
import sys

from twophase.cli.main import main


def run() -> None:
    """Run the command line and end the process with its status."""
    status = main()
    if os.environ.get("WORLD_SIZE", "1") != "1":
        # Gloo's threads may still drop references to tensors while the interpreter is being torn down, which aborts
        # the process (seen a few times in a hundred ends of a run, under load). Everything is on disk: leave at once.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


if __name__ == "__main__":
    run()
