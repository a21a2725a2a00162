"""A tree of tensors and plain values as one safetensors file, bit for bit and without pickle.

The tensors lie in the file under readable paths (`model.blocks.0.output`, `inner.state.3.exp_avg`), so that any reader
of safetensors finds them. What is left of the tree, with keys that are numbers, tuples, NaN and all, is JSON in the
file's metadata.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

ENDING = ".safetensors"
_TREE = "tree"
"""Name of the metadata that hold the tree."""
_PIECE = 1 << 24
"""Bytes that are copied, hashed and written at a time."""
_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(slots=True)
class Part:
    """A tree taken apart.

    Args:
        tree: the tree as JSON, with names where its tensors were.
        tensors: from name to tensor.
    """

    tree: str
    tensors: dict[str, Tensor]


def take_apart(tree: Any) -> Part:
    """Separate the tensors of a tree from the rest.

    Args:
        tree: dictionaries (with keys that are text, numbers, bool or None), lists, tuples, None, bool, int, float, text
            and dense tensors, nested as deep as one likes.

    Returns:
        The part; its tensors are the tree's own, which a later step may change.

    Raises:
        ValueError: anything else in the tree, by its path.

    >>> part = take_apart({"state": {0: {"step": torch.tensor(3.0)}}, "betas": (0.9, 0.95)})
    >>> list(part.tensors)
    ['state.0.step']
    >>> put_together(part)
    {'state': {0: {'step': tensor(3.)}}, 'betas': (0.9, 0.95)}
    """
    tensors: dict[str, Tensor] = {}
    return Part(json.dumps(_described(tree, "", tensors)), tensors)


def put_together(part: Part) -> Any:
    """The tree that `take_apart` was given; every tensor is one of its own, also where some shared their memory."""
    return _rebuilt(json.loads(part.tree), part.tensors)


def write(path: Path, part: Part, check: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Write a part and wait until the disk has it.

    The file is written here and not by safetensors' own function, which wants all tensors in main memory at once and
    whose output would have to be read again for the hash. This way one piece at a time is copied from the device, the
    hash is of what was meant (so a disk that wrote something else is found out), and other threads run meanwhile.

    Args:
        path: the file.
        part: what to write; its tensors must be contiguous.
        check: called before each piece; may raise to end the writing.

    Returns:
        Length and SHA-256 of the file: `{"bytes": …, "sha256": …}`.

    Raises:
        OSError: the file cannot be written, or the disk is full.
    """
    digest, length = hashlib.sha256(), 0
    with path.open("wb") as file:
        for piece in _pieces(part):
            check()
            file.write(piece)
            digest.update(piece)
            length += len(piece)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": length, "sha256": digest.hexdigest()}


def read(path: Path) -> Any:
    """The tree in a file, with contiguous tensors on the CPU.

    Raises:
        ValueError: a safetensors file that `write` has not written.
    """
    with safe_open(path, framework="pt") as file:
        tree = (file.metadata() or {}).get(_TREE)
        if tree is None:
            raise ValueError(f"{path} holds tensors but no tree of them; it was not written as part of a checkpoint")
        # Copies: the reader's own tensors are views of the file, and optimizers go on with what they are given.
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - not a dictionary
    return put_together(Part(tree, tensors))


def _described(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """A value in JSON: lists and plain values as they are, everything else as an object with one entry for its kind."""
    if isinstance(value, Tensor):
        name = _free_name(path, tensors)
        tensors[name] = _storable(value, path)
        return {"tensor": name}
    if isinstance(value, Mapping):
        # Pairs: JSON's own keys are text, and lose their types and their order.
        return {"dict": [[_key(k, path), _described(v, _join(path, k), tensors)] for k, v in value.items()]}
    if isinstance(value, list | tuple):
        items = [_described(item, _join(path, index), tensors) for index, item in enumerate(value)]
        return items if isinstance(value, list) else {"tuple": items}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(float(value))}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ValueError(
        f"a checkpoint cannot hold {path or 'a part'}, of type {type(value).__name__}; make it a tensor, a number, "
        "text, or a dictionary, list or tuple of these"
    )


def _key(key: Any, path: str) -> Any:
    if key is None or isinstance(key, bool | int | float | str):
        return _described(key, path, {})
    raise ValueError(f"a checkpoint cannot hold {path or 'a part'}: its key {key!r} is neither text nor a number")


def _rebuilt(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_rebuilt(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {_rebuilt(key, tensors): _rebuilt(item, tensors) for key, item in content}
    if kind == "tuple":
        return tuple(_rebuilt(item, tensors) for item in content)
    assert kind == "float"
    return float(content)


def _join(path: str, key: Any) -> str:
    text = str(key).encode(errors="backslashreplace").decode()  # half a surrogate pair is no UTF-8
    return f"{path}.{text}" if path else text


def _free_name(path: str, taken: Mapping[str, Tensor]) -> str:
    """The path, or with a number behind it where {1: …} and {"1": …} give the same one."""
    name, number = path or "tensor", 1
    while name in taken or name == "__metadata__":  # the format keeps that one for itself
        number += 1
        name = f"{path or 'tensor'}~{number}"
    return name


def _storable(tensor: Tensor, path: str) -> Tensor:
    if tensor.layout != torch.strided or tensor.dtype not in _TYPES:
        raise ValueError(
            f"a checkpoint cannot hold {path or 'a part'}, a tensor of {tensor.dtype} and {tensor.layout}; give it as "
            "a dense tensor of another type"
        )
    return tensor.detach()


def _pieces(part: Part) -> Iterator[Any]:
    """The bytes of a file: length of the header, header, and the tensors one after the other."""
    # Wide types first: then each tensor starts at a multiple of its element's size.
    tensors = sorted(part.tensors.items(), key=lambda item: -item[1].element_size())
    header: dict[str, Any] = {"__metadata__": {"format": "pt", _TREE: part.tree}}
    end = 0
    for name, tensor in tensors:
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for _, tensor in tensors:
        assert tensor.is_contiguous()
        for piece in tensor.view(-1).view(torch.uint8).split(_PIECE):
            yield piece.cpu().numpy()
