"""The tokenizer of an exported run: that of its token shards, or one that gives the ids of `char` and `bytes`."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twophase.base.config import UsageError
from twophase.base.files import write_atomic
from twophase.base.reading import read_json_object
from twophase.tasks.lm.config import TrainConfig
from twophase.tasks.lm.corpus import TOKENS
from twophase.tasks.lm.tokens import CHARACTERS
from twophase.text.meta import META, TOKENIZER, read_meta
from twophase.text.tokenizer import AS_WRITTEN, CONFIG_JSON, byte_characters


def text_tokenizer(name: str, max_length: int) -> Any:
    """Return a `transformers.PreTrainedTokenizerFast` that gives the ids of `char` or `bytes`.

    It has no special tokens, so every text means itself. Lone surrogates, which are no text to it, it refuses.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers  # noqa: PLC0415 - optional
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415 - an optional package, and slow to import

    # One token a character and nothing to merge; `bytes` are seen as characters that can be printed.
    characters = byte_characters() if name == "bytes" else CHARACTERS
    made = Tokenizer(models.BPE(vocab={character: number for number, character in enumerate(characters)}, merges=[]))
    if name == "bytes":
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        made.decoder = decoders.ByteLevel()
    else:
        replacements = [("\t", "    "), ("\r\n", "\n"), (Regex(r"[^ -~\n]"), "?")]  # in the order of `encode`
        made.normalizer = normalizers.Sequence([normalizers.Replace(old, new) for old, new in replacements])
        made.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, clean_up_tokenization_spaces=False, model_max_length=max_length
    )


@dataclass(frozen=True)
class Ids:
    """A tokenizer's name and number of ids, and the ids that begin and end a text."""

    name: str | None = None
    size: int = 0
    begin: int | None = None
    end: int | None = None


def tokenizer_source(config: TrainConfig, env: Mapping[str, Any], data: Path | None) -> Path | None:
    """Return the folder of token shards whose tokenizer is to be copied; None if nothing is to be copied."""
    corpus = config.data.corpus
    if not corpus.startswith(TOKENS):
        if data is not None:
            raise UsageError(
                f"--data {data}: the run read text with --data.vocabulary {config.data.vocabulary}, so there are no "
                "token shards to name; leave --data out"
            )
        return None
    recorded = env.get("corpus")
    recorded = recorded if isinstance(recorded, dict) else {}
    expected = recorded.get("tokenizer_sha256")
    folder = data or Path(os.path.expanduser(corpus.removeprefix(TOKENS)))  # noqa: PTH111 - Path's raises
    remedy = (
        "name the folder of the run's own token shards with --data DIR, or write the model only with --no-tokenizer"
    )
    if not (folder / META).is_file() and data is None:
        if expected is None and (recorded or folder.exists()):
            return None  # .bin files, which do not name their tokenizer
        raise UsageError(f"{folder}: the token shards that the run was trained on are not there any more; {remedy}")
    meta = read_meta(folder)
    if expected is not None and meta.tokenizer_sha256 != expected:
        raise UsageError(
            f"{folder}: was made with the tokenizer {meta.tokenizer} ({meta.tokenizer_sha256[:12]}), and the run was "
            f"trained with {recorded.get('tokenizer', 'another')} ({str(expected)[:12]}); {remedy}"
        )
    if not (folder / TOKENIZER).is_dir():
        raise UsageError(f"{folder}: its {TOKENIZER}/ is missing; prepare the folder again; or {remedy}")
    return folder


def write_tokenizer(folder: Path, config: TrainConfig, source: Path | None, rows: int) -> Ids:
    """Write the files of a folder's tokenizer, or of one for text, for a model of so many rows."""
    if source is None:
        if config.data.corpus.startswith(TOKENS):
            return Ids()
        made = text_tokenizer(config.data.vocabulary, config.data.sequence_length)
        made.save_pretrained(folder)
        return Ids(config.data.vocabulary, len(made))
    meta = read_meta(source)
    if meta.vocabulary_size > rows:
        raise UsageError(
            f"{source}: its tokenizer has {meta.vocabulary_size:,} ids, and the run's model {rows:,}; name the folder "
            "of the run's own token shards with --data DIR"
        )
    shutil.copytree(source / TOKENIZER, folder, dirs_exist_ok=True)
    if (settings := folder / CONFIG_JSON).is_file():  # those of an earlier version name the class that was there
        write_atomic(settings, json.dumps(read_json_object(settings) | AS_WRITTEN, indent=1) + "\n")
    from transformers import AutoTokenizer  # noqa: PLC0415 - an optional package, and slow to import

    try:
        read = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # its readers raise many types
        fault = " ".join(str(error).split())[:300]
        raise UsageError(
            f"{source / TOKENIZER} cannot be read ({fault}); prepare the folder again, or write the model only with "
            "--no-tokenizer"
        ) from None
    return Ids(meta.tokenizer, meta.vocabulary_size, read.bos_token_id, meta.end_of_text)
