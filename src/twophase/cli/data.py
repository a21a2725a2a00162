"""`twophase data prepare` and `twophase data verify`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from twophase.config import parse
from twophase.errors import RunError, UsageError
from twophase.text.prepare import Request, prepare
from twophase.text.shards import damaged, read_meta

USAGE = """usage: twophase data prepare SOURCE … --out DIR    turn text into token shards
       twophase data verify DIR                   compare all shards of a folder with their SHA-256

twophase data COMMAND --help lists a command's options."""


@dataclass(frozen=True)
class VerifyOptions:
    """Read all shards of a folder and compare them with their SHA-256."""

    folder: Positional[Path] = Path()
    """The --out of `twophase data prepare`."""


def main(argv: Sequence[str]) -> int:
    """Run `twophase data` with these words and return its exit status."""
    command, *words = argv or ["--help"]
    if command in ("-h", "--help"):
        print(USAGE)
        return 0
    if command == "prepare":
        request, _ = parse(Request, words, "twophase data prepare")
        folder, meta, checked = request.out, prepare(request), []
    elif command == "verify":
        options, _ = parse(VerifyOptions, words, "twophase data verify")
        folder, meta, checked = options.folder, read_meta(options.folder), ["every shard has its SHA-256"]
        if names := damaged(options.folder):
            raise RunError(f"{folder}: damaged: {', '.join(names)}; delete them and repeat `data prepare`")
    else:
        raise UsageError(f"data {command}: must be prepare or verify")
    ids = f"{meta.vocabulary_size:,} ids, {meta.tokenizer_sha256[:12]}"
    sizes = [f"  {split:11} {meta.tokens(split):,} tokens in {len(meta.splits[split])} shards" for split in meta.splits]
    print(f"{folder}: {meta.dtype} ids of {meta.tokenizer} ({ids})", *sizes, *checked, sep="\n")
    return 0
