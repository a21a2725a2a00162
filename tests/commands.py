"""What tests of the command line start from."""

from __future__ import annotations

import hashlib
from pathlib import Path

SMALL = (
    "--model.layers 1 --model.hidden-size 16 --model.intermediate-size 24 --data.sequence-length 16 "
    "--data.batch-size 4 --data.validation-windows 8 --steps 22 --inner-steps 6 --checkpoint-every 1"
).split()


def snapshot(folder: Path) -> dict[str, str]:
    """Every file under a folder with the digest of its content."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
