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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from twophase.base.config import UsageError, from_tree
from twophase.base.files import replacing, sync_folder, write_atomic
from twophase.base.reading import json_object_or_none
from twophase.runs.folder import CHECKPOINTS, CONFIG, ENV, SUMMARY, WEIGHTS, read_summary, weights_fault
from twophase.runs.record import run_config
from twophase.tasks.lm.config import TrainConfig
from twophase.tasks.lm.export_tokenizer import Ids, tokenizer_source, write_tokenizer
from twophase.tasks.lm.model import Llama
from twophase.training import checkpoint

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
RECORD = "twophase.json"


def export(
    run: Path, out: Path, *, dtype: str = "float32", data: Path | None = None, tokenizer: bool = True
) -> dict[str, Any]:
    """Write the anchor of a run as a Hugging Face folder.

    A finished run gives its final weights, any other those of its newest checkpoint. The folder appears whole or not
    at all.

    Args:
        run: the run's folder (the --out of `twophase train`, or the folder of a sweep's cell).
        out: the folder to write; missing or empty.
        dtype: type of the weights, `float32` or `bfloat16`; the anchor is float32.
        data: new folder of the run's token shards, if they have moved.
        tokenizer: True to write the tokenizer, too.

    Returns:
        What `twophase.json` holds.

    Raises:
        UsageError: no run, one without weights, damaged files, token shards that are gone or are others, an `out` that
            holds something, or `transformers` missing.
        OSError: `out` cannot be written; nothing is left of it.
    """
    if dtype not in DTYPES:
        raise UsageError(f"--dtype is {dtype!r}; it must be one of {', '.join(DTYPES)}")
    if importlib.util.find_spec("transformers") is None:
        raise UsageError("export needs the package transformers; pip install 'twophase[hf]'")
    config, identity = run_config(run, _config_or_task)
    if isinstance(config, str):
        raise UsageError(f"{run}: its task is {config}, and export is for --task lm alone")
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise UsageError(f"{out}: is there already and not an empty folder; remove it, or choose another DIR")
    source = tokenizer_source(config, json_object_or_none(run / ENV) or {}, data) if tokenizer else None
    weights, origin, steps = _weights(run, identity)
    if not all(bool(weight.isfinite().all()) for weight in weights.values()):
        raise UsageError(
            f"{run}: its weights hold numbers that are not finite (the run has diverged); nothing was written; export "
            "another run"
        )
    model = _model(config, weights, run)
    out.parent.mkdir(parents=True, exist_ok=True)
    with replacing(out.resolve()) as folder:  # an empty folder there gives way
        folder.mkdir()
        ids = write_tokenizer(folder, config, source, model.vocabulary_size) if tokenizer else Ids()
        _write_model(folder, model, config, ids, DTYPES[dtype])
        record = {
            "run": identity,
            "steps": steps,
            "source": origin,
            "dtype": dtype,
            "parameters": sum(weight.numel() for weight in model.parameters()),
            "corpus": config.data.corpus,
            "tokenizer": ids.name,
            "tokenizer_ids": ids.size,
        }
        write_atomic(folder / RECORD, json.dumps(record, indent=1) + "\n")
        _sync(folder)
    return record


def describe(out: Path, record: Mapping[str, Any]) -> str:
    """Return two lines about an export."""
    text = f"no tokenizer: {record['corpus']} does not say what its ids mean, or it was not asked for"
    if record["tokenizer"]:
        text = f"tokenizer: {record['tokenizer']}, {record['tokenizer_ids']:,} ids"
    return (
        f"{out}: LlamaForCausalLM, {record['parameters']:,} parameters in {record['dtype']}, the anchor after "
        f"{record['steps']:,} inner steps ({record['source']})\n{text}"
    )


# ----------------------------------------------------------------------------------------------------- reading the run


def _config_or_task(tree: Mapping[str, Any]) -> TrainConfig | str:
    """Return the configuration of a run of the language model, or the name of another task."""
    task = tree.get("task")
    return str(task["name"]) if isinstance(task, Mapping) and "name" in task else from_tree(TrainConfig, tree)


def _weights(run: Path, identity: str) -> tuple[dict[str, Tensor], str, int]:
    """Return the weights that are evaluated, by name, where they come from, and the inner steps taken."""
    summary = read_summary(run, identity)
    # Weights without a summary are those of a run that was killed, or that repeats its end.
    if summary is not None and (run / WEIGHTS).is_file():
        if fault := weights_fault(run, summary):
            raise UsageError(fault)
        try:
            weights = safetensors.torch.load_file(run / WEIGHTS)
        except SafetensorError as error:  # of a summary without their SHA-256, as earlier versions wrote it
            raise UsageError(
                f"{run / WEIGHTS} is damaged: {error}; delete it and {SUMMARY} and repeat the run's `twophase train` "
                "command, which writes both again from the last checkpoint"
            ) from None
        return weights, "the end of the run", summary.get("steps", 0)

    def read(newest: Path) -> tuple[dict[str, Tensor], str, int]:
        saved = checkpoint.Checkpoint(newest, identity)
        return saved.anchor(), newest.name, saved.step

    newest = checkpoint.read_latest(run / CHECKPOINTS, read)
    if newest is None and summary is not None:  # a sweep's run keeps no checkpoints
        raise UsageError(
            f"{run}: the run has ended, but there is neither its {WEIGHTS} nor a checkpoint. Put that file back, or "
            f"delete {SUMMARY} and repeat the run's or sweep's command, which then trains it again"
        )
    if newest is None:
        raise UsageError(
            f"{run}: the run is not finished and has no checkpoint yet; repeat its `twophase train` command first"
        )
    state = f"has ended and has no {WEIGHTS} any more" if summary is not None else "is not finished"
    weights, name, step = newest
    return weights, f"checkpoint {name} of a run that {state}", step


def _model(config: TrainConfig, weights: Mapping[str, Tensor], run: Path) -> Llama:
    """Return a run's model with these weights, on the CPU; refuse weights that do not fit its configuration."""
    try:
        model = Llama(config.model, weights["embedding"].shape[0], seed=0)
        model.load_state_dict(weights)
    except (KeyError, RuntimeError) as error:
        fault = " ".join(str(error).split())
        raise UsageError(
            f"{run}: the weights do not fit the run's {CONFIG} ({fault}); put the run's own files back"
        ) from None
    return model


# -------------------------------------------------------------------------------------------------- writing the folder


def _write_model(folder: Path, model: Llama, config: TrainConfig, ids: Ids, dtype: torch.dtype) -> None:
    from transformers import GenerationConfig, LlamaConfig  # noqa: PLC0415 - an optional package, and slow to import

    special = {"bos_token_id": ids.begin, "eos_token_id": ids.end, "pad_token_id": None}
    LlamaConfig(
        **model.hf_config(config.data.sequence_length),
        **special,
        architectures=["LlamaForCausalLM"],
        dtype=str(dtype).removeprefix("torch."),
    ).save_pretrained(folder)
    GenerationConfig(**special).save_pretrained(folder)
    weights = {name: weight.to(dtype) for name, weight in model.to_hf().items()}
    try:
        safetensors.torch.save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    except SafetensorError as error:  # its way of saying that the disk is full
        raise OSError(f"{folder / 'model.safetensors'} cannot be written: {error}; free space and repeat") from None


def _sync(folder: Path) -> None:
    """Bring a folder and its files to the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    sync_folder(folder)
