"""`meta.json`: the content of a folder of token shards, with checksums.

    DIR/meta.json               this
    DIR/train-00000.bin …       token ids, little-endian, nothing else in the file (so nanoGPT reads them too)
    DIR/validation-00000.bin …
    DIR/token_bytes.npy         (vocabulary_size,) UTF-8 bytes that each id stands for; 0 for the end of a text
    DIR/tokenizer/              what turns text into these ids: a Hugging Face folder

`meta.json` is written last and atomically: a folder is whole if and only if it validates. Documents follow each other,
each ended by the id `end_of_text`, and never cross the border of two shards.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from twophase.base.config import UsageError, fingerprint
from twophase.base.files import write_atomic
from twophase.base.reading import read_json_object

META = "meta.json"
TOKEN_BYTES = "token_bytes.npy"  # noqa: S105 - no secret
TOKENIZER = "tokenizer"
FORMAT = 1
DTYPES = {"uint16": 2, "uint32": 4}
"""Types of token ids, and their bytes."""
TRAIN, VALIDATION = "train", "validation"
SHARD = re.compile(r"(train|validation)-[0-9]+\.bin")
"""Names of token files."""


@dataclass(frozen=True)
class Shard:
    """One file of token ids: its name, what it holds, UTF-8 bytes of its text, its largest id, and its SHA-256."""

    file: str
    tokens: int
    documents: int
    text_bytes: int
    largest: int
    sha256: str


@dataclass(frozen=True)
class Meta:
    """A folder of token shards.

    Args:
        tokenizer: name for people: `mistral`, `bytes`, `bpe`, or a Hugging Face id or folder.
        tokenizer_sha256: hash of all that decides the ids, hexadecimal; equal tokenizers have equal hashes.
        dtype: a key of `DTYPES`.
        source: description of the text, as plain values for the record.
        splits: shards of `train` and `validation`, in order.
        token_bytes_sha256: hash of `token_bytes.npy`, hexadecimal; empty in a folder of earlier versions.
    """

    tokenizer: str
    tokenizer_sha256: str
    vocabulary_size: int
    end_of_text: int
    dtype: str
    source: Mapping[str, Any]
    splits: Mapping[str, tuple[Shard, ...]] = field(default_factory=dict)
    token_bytes_sha256: str = ""

    def tokens(self, split: str) -> int:
        """Return number of token ids of a split."""
        return sum(shard.tokens for shard in self.splits.get(split, ()))

    @property
    def fingerprint(self) -> str:
        """SHA-256 of what a run sees of this folder: the tokenizer and every shard's content, in order."""
        seen = [self.tokenizer_sha256, self.dtype, self.end_of_text]
        shards = {split: [shard.sha256 for shard in shards] for split, shards in sorted(self.splits.items())}
        return hashlib.sha256(json.dumps([seen, shards], sort_keys=True).encode()).hexdigest()


def write_meta(folder: Path, meta: Meta) -> None:
    """Declare a folder whole."""
    record = {"format": FORMAT, **asdict(meta)}
    write_atomic(folder / META, json.dumps(record | {"fingerprint": fingerprint(record)}, indent=1) + "\n")


def read_splits(splits: Mapping[str, Any]) -> dict[str, tuple[Shard, ...]]:
    """Return the shards by split that JSON describes; a ValueError where one lies outside of the folder."""
    made = {name: tuple(Shard(**shard) for shard in shards) for name, shards in splits.items()}
    for shard in itertools.chain.from_iterable(made.values()):
        if not SHARD.fullmatch(shard.file):  # what is resumed is cut to its length: no file elsewhere
            raise ValueError(f"its shard {shard.file!r} is no file of the folder")
    return made


def read_meta(folder: Path) -> Meta:
    """Return what a folder holds.

    Raises:
        UsageError: no `meta.json`, a damaged one, or one of a newer format.
    """
    path = folder / META
    try:
        record = read_json_object(path)
        if record["format"] > FORMAT:
            raise UsageError(f"{path} is of a newer format than this version reads; install a newer twophase")
        if record.pop("fingerprint", None) not in (None, fingerprint(record)):  # earlier versions wrote none
            raise ValueError("it has changed since it was written")
        del record["format"]
        record["splits"] = read_splits(record["splits"])
        return Meta(**record)
    except FileNotFoundError:
        raise UsageError(
            f"{folder} holds no {META}: it is no finished folder of token shards. Make one with `twophase data prepare "
            f"… --out {folder}` (repeat the command if it was interrupted)"
        ) from None
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read ({error.strerror}); name the folder of `twophase data prepare`"
        ) from None
    except UsageError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UsageError(f"{path} is damaged ({error}); prepare the folder again") from None
