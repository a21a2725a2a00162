"""A command in a folder, in a process whose memory ends soon: `limited.py BYTES FOLDER WORDS...`."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

from twophase.cli.main import main

if __name__ == "__main__":
    present = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    most = present + int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    os.chdir(sys.argv[2])
    sys.exit(main(sys.argv[3:]))
