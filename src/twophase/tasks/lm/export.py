"""`twophase export RUN DIR`: a run's anchor as a Hugging Face folder, tokenizer included.

    DIR/config.json, generation_config.json, model.safetensors     a LlamaForCausalLM
    DIR/tokenizer.json, tokenizer_config.json, …                   what turns text into the ids it was trained on
    DIR/twophase.json                                              which run it came from

`AutoModelForCausalLM.from_pretrained(DIR)` gives the loss that the run's own model has, to float32 rounding.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from twophase.config import fingerprint, load_yaml, require, update
from twophase.errors import RunError, UsageError
from twophase.files import sha256, sync_folder
from twophase.runs.folder import CHECKPOINTS, CONFIG, ENV, SUMMARY, WEIGHTS, read_summary
from twophase.tasks.lm.config import TrainConfig
from twophase.tasks.lm.data import TOKENS
from twophase.tasks.lm.model import Llama
from twophase.text.shards import META, TOKENIZER, read_meta
from twophase.text.tokenizers import CHARACTERS
from twophase.training import checkpoint

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
RECORD = "twophase.json"
Ids = dict[str, Any]


def export(
    run: Path, out: Path, *, dtype: str = "float32", data: Path | None = None, tokenizer: bool = True
) -> dict[str, Any]:
    """Write the anchor of a run as a Hugging Face folder, whole or not at all; return its `twophase.json`.

    A finished run gives its final weights, any other those of its newest checkpoint.

    Args:
        run: the run's folder (the --out of `twophase train`, or the folder of a sweep's cell).
        out: the folder to write; missing or empty.
        dtype: type of the weights, `float32` or `bfloat16`; the anchor is float32.
        data: new folder of the run's token shards, if they have moved.
        tokenizer: True to write the tokenizer, too.

    Raises:
        UsageError: no run of `lm`, one without weights, token shards of another tokenizer, or `out` holds something.
        RunError: the run's weights are damaged, or it has diverged.
    """
    require(dtype in DTYPES, "dtype", dtype, f"one of {', '.join(DTYPES)}")
    if importlib.util.find_spec("transformers") is None:
        raise UsageError("export: needs transformers; pip install 'twophase[hf]'")
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise UsageError(f"{out}: must be missing or an empty folder")
    tree = load_yaml(run / CONFIG) if (run / CONFIG).is_file() else {}
    if "task" in tree or "model" not in tree:
        raise UsageError(f"{run}: must be a run of --task lm, is {tree['task']['name'] if tree else 'no run'}")
    config = update(TrainConfig(), tree)
    weights, origin, steps = _weights(run)
    if not all(bool(weight.isfinite().all()) for weight in weights.values()):
        raise RunError(f"{run}: its weights are not finite, because the run has diverged")
    model = Llama(config.model, weights["embedding"].shape[0], seed=0)
    model.load_state_dict(weights)
    shards = _shards(run, config, data) if tokenizer else None
    with _whole_folder(out.absolute()) as folder:
        has_ids = tokenizer and (shards is not None or not config.data.corpus.startswith(TOKENS))
        ids = _write_tokenizer(folder, config, shards) if has_ids else {}
        _write_model(folder, model, config, ids, DTYPES[dtype])
        record = {
            "run": fingerprint(tree),
            "steps": steps,
            "source": origin,
            "dtype": dtype,
            "parameters": sum(weight.numel() for weight in model.parameters()),
            "corpus": config.data.corpus,
            "tokenizer": ids.get("name"),
            "tokenizer_ids": ids.get("size", 0),
        }
        (folder / RECORD).write_text(json.dumps(record, indent=1) + "\n")
    return record


def _weights(run: Path) -> tuple[dict[str, Tensor], str, int]:
    """Return the weights that are evaluated, by name, where they come from, and the inner steps taken."""
    summary = read_summary(run)
    # Weights without a summary are those of a run that was killed, or that repeats its end.
    if summary is not None and (run / WEIGHTS).is_file():
        if sha256(run / WEIGHTS) != summary["weights_sha256"]:
            raise RunError(f"{run / WEIGHTS}: damaged; delete it and {SUMMARY}, and repeat the run's command")
        return safetensors.torch.load_file(run / WEIGHTS), "the end of the run", summary["steps"]
    newest = checkpoint.latest(run / CHECKPOINTS)
    if newest is None:
        raise UsageError(f"{run}: has neither {WEIGHTS} nor a checkpoint; repeat the run's command")
    return newest.anchor(), f"checkpoint {newest.path.name}", newest.progress["done"]["step"]


def _shards(run: Path, config: TrainConfig, data: Path | None) -> Path | None:
    """Return the folder of token shards that the run has read; None of a text, or of .bin files without a tokenizer."""
    corpus = config.data.corpus
    trained_with = json.loads((run / ENV).read_text())["corpus"].get("tokenizer_sha256")
    if not trained_with:
        return None
    folder = data or Path(corpus.removeprefix(TOKENS)).expanduser()
    found = read_meta(folder).tokenizer_sha256 if (folder / META).is_file() else "none"
    if found != trained_with:
        raise UsageError(
            f"--data: must be shards of the run's tokenizer {trained_with[:12]}, {folder} has {found[:12]}"
        )
    return folder


def _write_tokenizer(folder: Path, config: TrainConfig, shards: Path | None) -> Ids:
    """Write a tokenizer's files; return its name, its number of ids, and those that begin and end a text."""
    if shards is None:
        made = text_tokenizer(config.data.vocabulary, config.data.sequence_length)
        made.save_pretrained(folder)
        return {"name": config.data.vocabulary, "size": len(made)}
    from transformers import AutoTokenizer  # noqa: PLC0415 - an optional package, and slow to import

    shutil.copytree(shards / TOKENIZER, folder, dirs_exist_ok=True)
    meta, read = read_meta(shards), AutoTokenizer.from_pretrained(folder, local_files_only=True)
    ids = {"begin": read.bos_token_id, "end": meta.end_of_text}
    return {"name": meta.tokenizer, "size": meta.vocabulary_size} | ids


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
        replacements = [("\t", "    "), ("\r\n", "\n"), (Regex(r"[^ -~\n]"), "?")]  # in the order of `encode_text`
        made.normalizer = normalizers.Sequence([normalizers.Replace(old, new) for old, new in replacements])
        made.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, clean_up_tokenization_spaces=False, model_max_length=max_length
    )


def _write_model(folder: Path, model: Llama, config: TrainConfig, ids: Ids, dtype: torch.dtype) -> None:
    from transformers import GenerationConfig, LlamaConfig  # noqa: PLC0415 - an optional package, and slow to import

    special = {"bos_token_id": ids.get("begin"), "eos_token_id": ids.get("end"), "pad_token_id": None}
    options: dict[str, Any] = model.hf_config(config.data.sequence_length) | special
    options["dtype"] = str(dtype).removeprefix("torch.")
    LlamaConfig(**options, architectures=["LlamaForCausalLM"]).save_pretrained(folder)
    GenerationConfig(**special).save_pretrained(folder)
    weights = {name: weight.to(dtype) for name, weight in model.to_hf().items()}
    # Not by save_file, whose error where the disk is full is no OSError.
    (folder / "model.safetensors").write_bytes(safetensors.torch.save(weights, metadata={"format": "pt"}))


@contextmanager
def _whole_folder(out: Path) -> Iterator[Path]:
    """Yield a temporary folder beside `out`, which takes its name when the block ends; an error removes it."""
    temporary = out.with_name(f".{out.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)  # of an export that was killed
    temporary.mkdir(parents=True)
    try:
        yield temporary
        for path in temporary.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        temporary.rename(out)  # an empty folder there gives way
        sync_folder(out.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def byte_characters() -> list[str]:
    """Return the character by which byte-level tokenizers, since GPT-2, write each byte."""
    printed = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printed else chr(next(others)) for byte in range(256)]
