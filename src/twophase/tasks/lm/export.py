"""`twophase export RUN DIR`: a run's anchor as a Hugging Face folder, tokenizer included.

    DIR/config.json, generation_config.json, model.safetensors     a LlamaForCausalLM
    DIR/tokenizer.json, tokenizer_config.json, …                   what turns text into the ids it was trained on
    DIR/twophase.json                                              which run it came from; makes DIR an export of ours

`AutoModelForCausalLM.from_pretrained(DIR)` gives the loss that the run's own model has, to float32 rounding.
"""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from twophase.base.config import UsageError, fingerprint, from_tree, load_yaml
from twophase.base.files import TEMPORARY, sync_folder, write_atomic
from twophase.diloco.flat import checksum, plan
from twophase.runs.folder import CONFIG, ENV, SUMMARY
from twophase.tasks.lm.config import TrainConfig
from twophase.tasks.lm.export_tokenizer import Ids, tokenizer_source, write_tokenizer
from twophase.tasks.lm.model import Llama
from twophase.training import checkpoint

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
RECORD = "twophase.json"
_WEIGHTS, _CHECKPOINTS = "weights.safetensors", "checkpoint"


def export(run: Path, out: Path, *, dtype: str = "float32", data: Path | None = None, tokenizer: bool = True) -> Path:
    """Write the anchor of a run as a Hugging Face folder.

    A finished run gives its final weights, any other those of its newest checkpoint. The folder appears whole or not
    at all; an earlier export in its place stays until then.

    Args:
        run: the run's folder (the --out of `twophase train`, or the folder of a sweep's cell).
        out: the folder to write; missing, empty, or an earlier export.
        dtype: of the weights, `float32` or `bfloat16`; the anchor is float32.
        data: where the token shards are now that the run was trained on, if they have moved.
        tokenizer: whether to write the tokenizer, too.

    Returns:
        `out`.

    Raises:
        UsageError: no run, one without weights, damaged files, token shards that are gone or are others, an `out` that
            holds something else, or `transformers` missing.
        OSError: `out` cannot be written; what was there is unchanged.
    """
    if dtype not in DTYPES:
        raise UsageError(f"--dtype is {dtype!r}; it must be one of {', '.join(DTYPES)}")
    if importlib.util.find_spec("transformers") is None:
        raise UsageError("export needs the package transformers; pip install 'twophase[hf]'")
    run, out = Path(run), Path(out)
    config, identity = run_config(run)
    _check_place(out)
    source = tokenizer_source(config, _json(run / ENV), data) if tokenizer else None
    anchor = _anchor(run, config, identity)
    model = _model(config, anchor)
    with _replacing(out) as folder:
        ids = write_tokenizer(folder, config, source, anchor.vocabulary_size) if tokenizer else Ids()
        _write_model(folder, model, config, ids, DTYPES[dtype])
        record = {
            "run": identity,
            "steps": anchor.step,
            "source": anchor.source,
            "dtype": dtype,
            "parameters": sum(weight.numel() for weight in model.parameters()),
            "corpus": config.data.corpus,
            "tokenizer": ids.name,
            "tokenizer_ids": ids.size,
            "files": sorted([*(path.name for path in folder.iterdir()), RECORD]),
        }
        write_atomic(folder / RECORD, json.dumps(record, indent=1) + "\n")
    return out


def describe(out: Path) -> str:
    """An export in two lines."""
    record = json.loads((out / RECORD).read_text(encoding="utf-8"))
    if record["tokenizer"]:
        text = f"tokenizer: {record['tokenizer']}, {record['tokenizer_ids']:,} ids"
    else:
        text = f"no tokenizer: {record['corpus']} does not say what its ids mean, or it was not asked for"
    return (
        f"{out}: LlamaForCausalLM, {record['parameters']:,} parameters in {record['dtype']}, the anchor after "
        f"{record['steps']:,} inner steps ({record['source']})\n{text}"
    )


# ----------------------------------------------------------------------------------------------------- reading the run


@dataclass(frozen=True, eq=False)
class _Anchor:
    """The weights under this package's names, and where they come from."""

    weights: dict[str, Tensor]
    source: str
    step: int

    @property
    def vocabulary_size(self) -> int:
        return self.weights["embedding"].shape[0]


def run_config(run: Path) -> tuple[TrainConfig, str]:
    """The configuration of a run's folder, and its fingerprint.

    Raises:
        UsageError: no folder, none of a run, or a configuration that this version cannot read.
    """
    path = run / CONFIG
    if not path.is_file():
        what = "there is no such folder" if not run.is_dir() else f"holds no {CONFIG}, so it is not the folder of a run"
        raise UsageError(f"{run}: {what}; give the --out of `twophase train`, or the folder of one run of a sweep")
    try:
        tree = load_yaml(path)
        return from_tree(TrainConfig, tree), fingerprint(tree)
    except (UsageError, TypeError, ValueError, AttributeError) as error:
        fault = str(error).removeprefix(f"--config {path}: ")
        raise UsageError(f"{path} cannot be used ({fault}); put the run's own {CONFIG} back") from None


def _anchor(run: Path, config: TrainConfig, identity: str) -> _Anchor:
    path = run / _WEIGHTS
    if path.is_file():
        weights = _final(path, config, identity)
    else:
        newest = checkpoint.latest(run / _CHECKPOINTS)
        ended = _json(run / SUMMARY).get("config") == identity
        if newest is None and ended:  # a sweep's run keeps no checkpoints
            raise UsageError(
                f"{run}: the run has ended, but there is neither its {_WEIGHTS} nor a checkpoint; put that file back, "
                f"or delete {SUMMARY} and repeat the run's command, or its sweep's, which then trains it again"
            )
        if newest is None:
            raise UsageError(
                f"{run}: the run is not finished and has no checkpoint yet; repeat its `twophase train` command first"
            )
        state = f"has ended and has no {_WEIGHTS} any more" if ended else "is not finished"
        saved = checkpoint.Checkpoint(newest, identity)
        weights = _Anchor(anchor_of(saved), f"checkpoint {newest.name} of a run that {state}", saved.step)
    if not all(bool(weight.isfinite().all()) for weight in weights.weights.values()):
        raise UsageError(
            f"{run}: its weights hold numbers that are not finite (the run has diverged); nothing was written; export "
            "another run"
        )
    return weights


def _final(path: Path, config: TrainConfig, identity: str) -> _Anchor:
    """The final weights, checked against the checksum of the run's summary."""
    try:
        with safe_open(path, framework="pt") as file:
            owner = (file.metadata() or {}).get("config", identity)
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
    except (SafetensorError, OSError) as error:
        raise _damaged(path, str(error)) from None
    if owner != identity:
        raise UsageError(f"{path} belongs to another run ({owner}, here {identity}); put the run's own file back")
    summary = _json(path.with_name(SUMMARY))
    recorded, steps = summary.get("checksum"), summary.get("steps", 0)
    if isinstance(recorded, str) and _checksum(path, weights, config) != recorded:
        raise _damaged(path, f"its content differs from the checksum in {SUMMARY}")
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
        raise UsageError(
            f"{path.with_name(SUMMARY)} is damaged: its steps is {steps!r}, not a whole number >= 0; delete it and "
            "repeat the run's `twophase train` command, which writes it again from the last checkpoint"
        )
    return _Anchor(weights, "the end of the run", steps)


def _checksum(path: Path, weights: Mapping[str, Tensor], config: TrainConfig) -> str:
    """The engine's checksum of these weights: of one flat vector in the order of the model's parameters."""
    if "embedding" not in weights:
        raise _damaged(path, "it holds no embedding")
    with torch.device("meta"):
        model = Llama(config.model, weights["embedding"].shape[0], seed=0)
    layout = plan((name, tuple(weight.shape)) for name, weight in model.named_parameters())
    flat = torch.zeros(layout.numel)
    for slot, view in zip(layout.slots, layout.views(flat), strict=True):
        if slot.name not in weights or weights[slot.name].shape != slot.shape:
            raise _damaged(path, f"{slot.name} is missing or has another shape than {CONFIG} says")
        view.copy_(weights[slot.name])
    return checksum(flat)


def anchor_of(saved: checkpoint.Checkpoint) -> dict[str, Tensor]:
    """Read the anchor of a checkpoint as weights by name."""
    state = saved.part(checkpoint.ENGINE)
    layout = plan((name, tuple(shape)) for name, shape in state["layout"])
    return {slot.name: view for slot, view in zip(layout.slots, layout.views(state["anchor"]), strict=True)}


def _model(config: TrainConfig, anchor: _Anchor) -> Llama:
    model = Llama(config.model, anchor.vocabulary_size, seed=0)
    try:
        model.load_state_dict(anchor.weights)
    except RuntimeError as error:
        fault = " ".join(str(error).split())
        raise UsageError(f"the weights do not fit the run's {CONFIG} ({fault}); put the run's own files back") from None
    return model


def _json(path: Path) -> dict[str, Any]:
    """What a JSON file holds; nothing when it is missing or damaged."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def _damaged(path: Path, why: str) -> UsageError:
    return UsageError(
        f"{path} is damaged: {why}; delete it and {SUMMARY} and repeat the run's `twophase train` command, which "
        "writes both again from the last checkpoint"
    )


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


def _check_place(out: Path) -> None:
    """Refuse a place that holds anything but an earlier export."""
    _restore(out)
    try:
        names = {path.name for path in out.iterdir()}
    except FileNotFoundError:
        return
    except OSError as error:
        raise UsageError(f"{out}: cannot be used ({error.strerror}); choose another folder") from None
    if not names:
        return
    if RECORD not in names:
        raise UsageError(f"{out}: is not empty and no earlier export (it has no {RECORD}); choose another folder")
    foreign = sorted(names - set(_json(out / RECORD).get("files", [])) - {RECORD})
    if foreign:
        raise UsageError(
            f"{out}: holds {foreign[0]!r}, which is not of the earlier export there and would be lost; move it away, "
            "or choose another folder"
        )


@contextmanager
def _replacing(out: Path) -> Iterator[Path]:
    """A folder to fill, which then takes the place of `out`; on an error `out` stays as it is."""
    out = out.resolve()
    out.parent.mkdir(parents=True, exist_ok=True)
    folder = out.with_name(f"{TEMPORARY}{out.name}-{os.getpid()}-{secrets.token_hex(4)}")
    folder.mkdir()
    try:
        yield folder
        for path in folder.iterdir():
            _sync(path)
        sync_folder(folder)
        old = _old(out)
        if out.exists():
            shutil.rmtree(old, ignore_errors=True)
            out.rename(old)
        folder.rename(out)
        sync_folder(out.parent)
        shutil.rmtree(old, ignore_errors=True)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        _restore(out)
        raise


def _restore(out: Path) -> None:
    """Put an earlier export back that was set aside by an export which did not end."""
    out = out.resolve()
    if _old(out).is_dir() and not out.exists():
        _old(out).rename(out)


def _old(out: Path) -> Path:
    return out.with_name(f"{TEMPORARY}{out.name}-old")


def _sync(path: Path) -> None:
    if path.is_file():
        with path.open("rb") as file:
            os.fsync(file.fileno())
