"""`twophase data prepare` and `twophase data info`."""

from __future__ import annotations

import argparse
import os
import re
import signal
from pathlib import Path

from twophase.cli.commands import between, plain_parser
from twophase.number import number
from twophase.text.meta import META, TRAIN, VALIDATION, Meta, read_meta
from twophase.text.prepare import Request, prepare
from twophase.text.shards import open_shards
from twophase.text.sources import C4, KINDS
from twophase.training.config import MOST_THREADS

_SUFFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9, "t": 10**12}
_LARGEST = 10**18


def main(arguments: list[str]) -> int:
    """Run `twophase data` with these words and return its exit status.

    Raises:
        UsageError: a mistake in what was asked.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_help()
    elif options.command == "info":
        print(describe(options.folder, read_meta(options.folder)))
        if options.verify:
            open_shards(options.folder, trust=False)
            print("  verified     every shard has the SHA-256 that it was prepared with")
    else:
        _prepare(options)
    return 0


def _prepare(options: argparse.Namespace) -> None:
    if options.threads is not None:
        os.environ["RAYON_NUM_THREADS"] = str(options.threads)  # tokenizers reads it when it first encodes
        os.environ["TOKENIZERS_PARALLELISM"] = "true" if options.threads > 1 else "false"
    request = Request(
        sources=tuple(options.source),
        out=options.out,
        kind="json" if options.kind == C4 else options.kind,
        tokenizer=options.tokenizer,
        end_of_text=options.end_of_text,
        tokens=options.tokens,
        validation=tuple(options.validation),
        held_out=options.held_out,
        validation_tokens=options.validation_tokens,
        column=options.column,
        shard_tokens=options.shard_tokens,
        train_bytes=options.train_bytes,
    )
    finished = (options.out / META).exists()
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # it ends the command as Ctrl-C does
    try:
        meta = prepare(request, quiet=options.quiet)
    finally:
        signal.signal(signal.SIGTERM, before)
    print(describe(options.out, meta) + ("\nit was finished before: nothing to do" if finished else ""))


def _parser() -> argparse.ArgumentParser:
    parser = plain_parser("data")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    text = "what a folder of token shards holds"
    info = commands.add_parser("info", help=text, description=text)
    info.add_argument("folder", type=Path, metavar="DIR", help="the --out of `twophase data prepare`")
    info.add_argument("--verify", action="store_true", help="read all shards and compare them with their checksums")
    text = "text to token shards that every run reads through memory maps; repeat the command to resume it"
    add = commands.add_parser("prepare", help=text, description=text).add_argument
    add(
        "source",
        nargs="+",
        metavar="SOURCE",
        help="files, folders or patterns of .json.gz, .jsonl, .parquet or .txt files; or c4, streamed from the hub",
    )
    add("--out", type=Path, required=True, metavar="DIR", help="folder of the shards; an unfinished one is resumed")
    add(
        "--kind",
        choices=("auto", C4, *KINDS),
        default="auto",
        help="what the files are (auto: by what their names end in; c4 and json: JSON lines)",
    )
    add(
        "--tokenizer",
        default="mistral",
        metavar="NAME",
        help="mistral (from the installed mistral-common), bytes, bpe:SIZE (learnt from the text), a folder, or a "
        "Hugging Face id (%(default)s)",
    )
    add("--end-of-text", metavar="TOKEN", help="token that ends a document, where the tokenizer names none")
    add("--tokens", type=_count, metavar="N", help="stop after so many training tokens, such as 3.3e9 or 10M (all)")
    add(
        "--validation",
        nargs="+",
        default=[],
        metavar="SOURCE",
        help="text of the validation split (C4's own, where it is there; else --held-out)",
    )
    add(
        "--held-out",
        type=between(0, 1, number),
        default=0.005,
        metavar="SHARE",
        help="share of the documents that validate, chosen by a hash of their text (%(default)s)",
    )
    add("--validation-tokens", type=_count, metavar="N", help="validation tokens at most (all)")
    add("--column", default="text", help="name of the text in JSON objects and Parquet tables (%(default)s)")
    add("--shard-tokens", type=_count, default=100_000_000, metavar="N", help="tokens of a shard (100M)")
    add("--train-bytes", type=_count, default=50_000_000, metavar="N", help="text that bpe:SIZE learns from (50M)")
    add("--threads", type=between(1, MOST_THREADS), metavar="N", help="threads of the tokenizer (as many as cores)")
    add("--quiet", action="store_true", help="show no progress")
    return parser


def _count(word: str) -> int:
    """Return a number of things, as people write it: 3.3e9, 10M, 100_000.

    >>> [_count(word) for word in ("3.3e9", "10M", "1_000")]
    [3300000000, 10000000, 1000]
    """
    match = re.fullmatch(r"([0-9][0-9_]*\.?[0-9]*(?:e[0-9]+)?)([kmgbt]?)", word.strip().lower())
    if not match:
        raise argparse.ArgumentTypeError(f"{word!r} is no number; write for example 3.3e9, 10M or 500000")
    number, scale = match[1].replace("_", ""), _SUFFIXES[match[2]]
    if float(number) * scale >= _LARGEST:
        raise argparse.ArgumentTypeError(f"{word!r} is too large; it must be below {_LARGEST:.0e}")
    return int(number) * scale if number.isdecimal() else round(float(number) * scale)


def describe(folder: Path, meta: Meta) -> str:
    """Return what a folder holds, in a few lines."""
    files = list(meta.source.get("files", ()))
    more = f" and {len(files) - 1:,} more files" if len(files) > 1 else ""
    lines = [
        f"{folder}: {meta.dtype} token shards",
        f"  tokenizer    {meta.tokenizer}, {meta.vocabulary_size:,} ids, end of text {meta.end_of_text}, "
        f"sha256 {meta.tokenizer_sha256[:12]}",
        f"  source       {files[0] if files else 'unknown'}{more}",
    ]
    for split in (TRAIN, VALIDATION):
        shards = meta.splits.get(split, ())
        documents, text = sum(shard.documents for shard in shards), sum(shard.text_bytes for shard in shards)
        per_token = f", {text / meta.tokens(split):.2f} bytes a token" if shards else ""
        lines.append(
            f"  {split:12} {meta.tokens(split):,} tokens in {len(shards)} shards, {documents:,} documents, "
            f"{text / 1e6:,.1f} MB of text{per_token}"
        )
    return "\n".join([*lines, f"  fingerprint  {meta.fingerprint[:12]}"])
