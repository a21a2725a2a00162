"""A command in a folder, in a process whose memory ends soon: `limited.py BYTES FOLDER WORDS...`.

The command's libraries are loaded before: Python itself reads a source file wrongly where memory ends (a SyntaxError).
"""

from __future__ import annotations

import os
import resource
import sys
from importlib import import_module
from pathlib import Path

from twophase.cli.main import main

if __name__ == "__main__":
    for name in ("torch", "pandas", "scipy.linalg", "tokenizers", f"twophase.cli.{sys.argv[3].replace('-', '_')}"):
        import_module(name)
    present = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    most = present + int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    os.chdir(sys.argv[2])
    sys.exit(main(sys.argv[3:]))
