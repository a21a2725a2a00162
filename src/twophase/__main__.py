"""`python -m twophase` is the command `twophase`."""

import sys

from twophase.cli import main

if __name__ == "__main__":
    sys.exit(main())
