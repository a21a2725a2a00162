"""Digests of tensors and of optimizers, by which ranks compare their bits in a few bytes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
import xxhash
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_wrapper


def digest(tensors: Sequence[Tensor]) -> str:
    """Return sixteen hexadecimal digits that depend on every bit of tensors and their order; on a CPU it is XXH3."""
    if not all(t.is_cpu for t in tensors):
        return digest_on_device(tensors)
    state = xxhash.xxh3_64()
    for t in tensors:
        state.update(as_bytes(t).numpy().data)
    return state.hexdigest()


def as_bytes(t: Tensor) -> Tensor:
    """Return the bytes of a tensor's elements, flat, on its device; of a quantized weight those of its parts."""
    if is_wrapper(t):
        return torch.cat([as_bytes(getattr(t, name)) for name in t.__tensor_flatten__()[0]])  # type: ignore[attr-defined]
    return t.detach().resolve_conj().resolve_neg().reshape(-1).contiguous().view(torch.uint8)


def digest_on_device(tensors: Sequence[Tensor]) -> str:
    """As `digest`, by a few operations on any device, of which one number reaches the host.

    Each 64-bit word is mixed with its place by one-to-one functions, and the results are added up modulo 2^64. A single
    flipped bit changes one word, and so the sum.
    """
    device = next((t.device for t in tensors if not t.is_cpu), None)  # a step count may lie on the CPU
    total = torch.zeros((), dtype=torch.int64, device=device)
    for number, t in enumerate(tensors):
        for start, piece in enumerate(as_bytes(t).split(1 << 27)):
            if len(piece) % 8 or piece.storage_offset() % 8:  # torch reads eight bytes from multiples of eight alone
                piece = nn.functional.pad(piece, (0, -len(piece) % 8))  # noqa: PLW2901 - the same bytes
            words = piece.view(torch.int64)
            place = torch.arange(len(words), device=words.device).add_((number << 40) + (start << 24))
            word = words.bitwise_xor(place.mul_(_ODD[0])).mul_(_ODD[1])
            total += word.bitwise_xor_((word >> 32) & 0xFFFFFFFF).mul_(_ODD[0]).sum()
    return f"{total.item() % (1 << 64):016x}"


_ODD = (0x9E3779B97F4A7C15 - (1 << 64), 0xC2B2AE3D27D4EB4F - (1 << 64))
"""Odd 64-bit constants, of the golden ratio and of xxhash, as signed words."""


def of_optimizer(optimizer: Optimizer) -> tuple[str, str]:
    """Return the digests of an optimizer's tensors, and of its settings and counters."""
    parts: list[dict[str, Any]] = [group | {"params": None} for group in optimizer.param_groups]
    parts += [optimizer.state.get(p, {}) for group in optimizer.param_groups for p in group["params"]]
    tensors = [part[key] for part in parts for key in sorted(part) if isinstance(part[key], Tensor)]
    plain = [{key: value for key, value in part.items() if not isinstance(value, Tensor)} for part in parts]
    text = json.dumps(plain, sort_keys=True, default=lambda value: repr(value).partition(" at 0x")[0])
    return digest(tensors), xxhash.xxh3_64_hexdigest(text.encode())
