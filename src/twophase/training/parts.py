"""A tree of tensors and plain values as one safetensors file, bit for bit and without pickle.

The tensors lie in the file under readable paths (`model.blocks.0.output`, `inner.state.3.exp_avg`), so any reader of
safetensors finds them. The rest of the tree, with its numeric keys and tuples, is JSON in the file's metadata.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from twophase.base.files import replacing

ENDING = ".safetensors"
_TREE = "tree"  # the metadata that hold the tree
_DIGEST = "sha256"  # and the digest of a sealed file's content


@dataclass(slots=True)
class Part:
    """A tree as JSON, with names where its tensors were, and the tensors by name."""

    tree: str
    tensors: dict[str, Tensor]


def take_apart(tree: Any) -> Part:
    """Separate the tensors of a tree from the rest.

    Args:
        tree: dictionaries, lists, tuples, None, bool, int, float, text and dense tensors, nested.

    Returns:
        The part; its tensors are those of the tree, and a later step may change them.

    Raises:
        ValueError: another type in the tree; the message has its path.

    >>> import torch
    >>> part = take_apart({"state": {0: {"step": torch.tensor(3.0)}}, "betas": (0.9, 0.95)})
    >>> list(part.tensors)
    ['state.0.step']
    >>> put_together(part)
    {'state': {0: {'step': tensor(3.)}}, 'betas': (0.9, 0.95)}
    """
    tensors: dict[str, Tensor] = {}

    def encode(value: Any, path: str) -> Any:
        if isinstance(value, Tensor):
            name = path or "tensor"
            while name in tensors:  # {1: …} and {"1": …} give the same path
                name += "~"
            tensors[name] = value.detach()
            return {"tensor": name}
        prefix = f"{path}." if path else ""
        if isinstance(value, Mapping):
            # Pairs: JSON's own keys are text, and lose their types and their order.
            return {"dict": [[encode(key, path), encode(item, f"{prefix}{key}")] for key, item in value.items()]}
        if isinstance(value, list | tuple):
            items = [encode(item, f"{prefix}{index}") for index, item in enumerate(value)]
            return items if isinstance(value, list) else {"tuple": items}
        if value is None or isinstance(value, bool | int | float | str):
            return value
        raise ValueError(
            f"a checkpoint cannot hold {path or 'a part'}, of type {type(value).__name__}; make it a tensor, a number, "
            "text, or a dictionary, list or tuple of these"
        )

    return Part(json.dumps(encode(tree, "")), tensors)


def put_together(part: Part) -> Any:
    """Return the tree that `take_apart` separated."""

    def decode(value: Any) -> Any:
        if isinstance(value, list):
            return [decode(item) for item in value]
        if not isinstance(value, dict):
            return value
        ((kind, content),) = value.items()
        if kind == "tensor":
            return part.tensors[content]
        if kind == "dict":
            return {decode(key): decode(item) for key, item in content}
        if kind == "tuple":
            return tuple(decode(item) for item in content)
        return float(content)  # earlier versions wrote {"float": "nan"}

    return decode(json.loads(part.tree))


def write(path: Path, part: Part, *, sealed: bool = False) -> None:
    """Write a part, with contiguous tensors, and wait until the disk has it.

    Args:
        path: the file.
        part: a tree that `take_apart` returned.
        sealed: record the SHA-256 of the content in the file, for a file that no manifest lists.

    Raises:
        OSError: the file cannot be written, or the disk is full.
    """
    metadata = {"format": "pt", _TREE: part.tree} | ({_DIGEST: _digest(part)} if sealed else {})
    try:
        save_file(part.tensors, path, metadata=metadata)
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1]))) from error
    with path.open("rb") as file:
        os.fsync(file.fileno())


def save(path: Path, tree: Any) -> None:
    """Write a tree as a sealed file, atomically and durably; `load` returns it.

    Raises:
        OSError: the file cannot be written, or the disk is full.
        ValueError: as `take_apart`.
    """
    part = take_apart(tree)
    addresses: set[int] = set()
    for name, tensor in part.tensors.items():
        dense = tensor.contiguous()
        # Tied weights are one tensor with two names, which safetensors refuses.
        part.tensors[name] = dense.clone() if dense.data_ptr() in addresses else dense
        addresses.add(dense.data_ptr())
    with replacing(path) as temporary:
        write(temporary, part, sealed=True)


def read(path: Path, *, sealed: bool = False) -> Any:
    """Read the tree in a file, with contiguous tensors on the CPU; compare a sealed file's content with its SHA-256.

    Raises:
        ValueError: a safetensors file that `write` has not written, or whose content differs from its SHA-256.
    """
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
        tree = metadata.get(_TREE)
        if tree is None:
            raise ValueError(f"{path} holds tensors but no tree of them; it was not written as part of a checkpoint")
        # Copies: the reader's tensors are views of the file, and optimizers change theirs in place.
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - not a dictionary
    part = Part(tree, tensors)
    if sealed and metadata.get(_DIGEST) != _digest(part):
        raise ValueError("its content differs from its SHA-256")
    return put_together(part)


def load(path: Path, whose: str) -> Any:
    """Read what `save` has written.

    Args:
        path: the file.
        whose: the call that reads, for the message.

    Raises:
        ValueError: the file is damaged.
    """
    try:
        return read(path, sealed=True)
    except (SafetensorError, ValueError) as error:
        raise ValueError(f"{whose}: {path} is damaged ({error}); put it back, or resume from another one") from None


def _digest(part: Part) -> str:
    """Return the SHA-256 of a tree and of each tensor's name, type, shape and bytes."""
    digest = hashlib.sha256(part.tree.encode())
    for name, tensor in sorted(part.tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
