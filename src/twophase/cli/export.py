"""`twophase export`: a run as a Hugging Face folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro
from tyro.conf import Positional

from twophase.config import parse


@dataclass(frozen=True)
class Options:
    """Write a run's model as a folder that transformers reads."""

    run: Positional[Path] = tyro.MISSING
    """Folder of the run, or of a sweep's cell."""
    out: Positional[Path] = tyro.MISSING
    """Folder to write; missing or empty."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights."""
    data: Path | None = None
    """The run's token shards, if they are no longer where it read them."""
    tokenizer: bool = True
    """Write the tokenizer, too."""


def main(argv: list[str]) -> int:
    """Run the command; return its exit status."""
    options, _ = parse(Options, argv, "twophase export")
    from twophase.tasks.lm.export import export

    record = export(**vars(options))
    made = f"{record['parameters']:,} parameters in {record['dtype']}, {record['tokenizer'] or 'no'} tokenizer"
    print(f"{options.out}: {made}; after {record['steps']:,} inner steps ({record['source']})")
    return 0
