"""`twophase export RUN DIR`: a run's anchor as a Hugging Face folder, tokenizer included.

    DIR/config.json, generation_config.json, model.safetensors     a LlamaForCausalLM
    DIR/tokenizer.json, tokenizer_config.json, …                   what turns text into the ids it was trained on
    DIR/twophase.json                                              which run it came from

`AutoModelForCausalLM.from_pretrained(DIR)` gives the loss that the run's own model has, to float32 rounding.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from twophase.config import fingerprint, load_yaml, require, update
from twophase.errors import RunError, UsageError
from twophase.files import replacing, sha256
from twophase.runs.folder import CHECKPOINTS, CONFIG, ENV, SUMMARY, WEIGHTS
from twophase.runs.record import read_summary
from twophase.tasks.lm.config import TrainConfig
from twophase.tasks.lm.data import TOKENS
from twophase.tasks.lm.model import Llama
from twophase.text.shards import META, TOKENIZER, read_meta
from twophase.text.sources import optional
from twophase.text.tokenizers import text_tokenizer
from twophase.training import checkpoint

RECORD = "twophase.json"


def export(
    run: Path, out: Path, *, dtype: str = "float32", data: Path | None = None, tokenizer: bool = True
) -> dict[str, Any]:
    """Write the anchor of a run as a Hugging Face folder, whole or not at all; return its `twophase.json`.

    A finished run gives its final weights, any other those of its newest checkpoint. Arguments are the options of
    `twophase export`.

    Raises:
        UsageError: no run of `lm`, one without weights, token shards of another tokenizer, or `out` holds something.
        RunError: the run's weights are damaged, or it has diverged.
    """
    require(dtype in ("float32", "bfloat16"), "dtype", dtype, "float32 or bfloat16")
    hf = optional("transformers", "hf")
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise UsageError(f"{out}: must be missing or an empty folder")
    tree = load_yaml(run / CONFIG) if (run / CONFIG).is_file() else {}
    if "task" in tree or "model" not in tree:
        name = tree["task"]["name"] if "task" in tree else "a loop of your own" if tree else "no run"
        raise UsageError(f"{run}: must be a run of --task lm, is {name}")
    config = update(TrainConfig(), tree)
    weights, origin, steps = _weights(run)
    if not all(bool(weight.isfinite().all()) for weight in weights.values()):
        raise RunError(f"{run}: its weights are not finite, because the run has diverged")
    model = Llama(config.model, weights["embedding"].shape[0], seed=0)
    model.load_state_dict(weights)
    out.absolute().parent.mkdir(parents=True, exist_ok=True)
    with replacing(out.absolute()) as folder:
        folder.mkdir()
        ids = _write_tokenizer(hf, folder, run, config, data) if tokenizer else {}
        special = {"bos_token_id": ids.get("begin"), "eos_token_id": ids.get("end"), "pad_token_id": None}
        options = model.hf_config(config.data.sequence_length) | special
        hf.LlamaConfig(**options, dtype=dtype, architectures=["LlamaForCausalLM"]).save_pretrained(folder)
        hf.GenerationConfig(**special).save_pretrained(folder)
        written = {name: weight.to(getattr(torch, dtype)) for name, weight in model.to_hf().items()}
        # Not by save_file, whose error where the disk is full is no OSError.
        (folder / "model.safetensors").write_bytes(safetensors.torch.save(written, metadata={"format": "pt"}))
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


def _write_tokenizer(hf: Any, folder: Path, run: Path, config: TrainConfig, data: Path | None) -> dict[str, Any]:
    """Write a tokenizer's files; return its name, its number of ids, and those that begin and end a text.

    That of token shards is copied from where they are now; .bin files of nanoGPT have none.
    """
    vocabulary, corpus = config.data.vocabulary, config.data.corpus
    if not corpus.startswith(TOKENS):
        options = {"clean_up_tokenization_spaces": False, "model_max_length": config.data.sequence_length}
        made = hf.PreTrainedTokenizerFast(tokenizer_object=text_tokenizer(vocabulary), **options)
        made.save_pretrained(folder)
        return {"name": vocabulary, "size": len(made)}
    trained_with = json.loads((run / ENV).read_text())["corpus"]["tokenizer_sha256"]
    if not trained_with:
        return {}
    shards = data or Path(corpus.removeprefix(TOKENS)).expanduser()
    found = read_meta(shards).tokenizer_sha256 if (shards / META).is_file() else "none"
    fits = f"shards of the run's tokenizer {trained_with[:12]}"
    require(found == trained_with, "data", f"{found[:12]} of {shards}", fits)
    shutil.copytree(shards / TOKENIZER, folder, dirs_exist_ok=True)
    meta, read = read_meta(shards), hf.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return {"name": meta.tokenizer, "size": meta.vocabulary_size, "begin": read.bos_token_id, "end": meta.end_of_text}
