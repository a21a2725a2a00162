"""Loss and perplexity of a language model on given windows."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own custom
from numpy.typing import NDArray
from torch import Tensor


@torch.no_grad()
def total_nats(model: Callable[[Tensor], Tensor], tokens: Tensor, targets: Tensor, batch: int) -> float:
    """Return the cross-entropy summed over all targets, -sum_i log softmax(logits_i)[target_i].

    Args:
        model: function of (batch, length) int64; returns logits (batch, length, vocabulary).
        tokens: (windows, length) int64, on the model's device.
        targets: (windows, length) int64, on the model's device.
        batch: windows a forward pass, >= 1; it changes the memory that is needed, not the result.

    Returns:
        Nats; summed in float64 from losses of at least float32.
    """
    nats = 0.0
    for inputs, labels in zip(tokens.split(batch), targets.split(batch), strict=True):
        logits = model(inputs).flatten(0, -2)
        if logits.dtype in (torch.bfloat16, torch.float16):
            logits = logits.float()
        nats += F.cross_entropy(logits, labels.flatten(), reduction="none").cpu().double().sum().item()
    return nats


def numbers(nats: float, targets: NDArray[np.integer], token_bytes: NDArray[np.integer] | None) -> dict[str, float]:
    """Return the numbers of an evaluation: L = nats / N, its exponential, and that of nats a byte.

    Perplexities that overflow are inf, and a NaN of the model stays a NaN: divergence is a result, not an error.

    Args:
        nats: sum of `total_nats`.
        targets: the N tokens that were predicted, of any shape.
        token_bytes: (vocabulary,), UTF-8 bytes of each token; None where they are not known, which makes the perplexity
            per byte a NaN.
    """
    size_bytes = 0 if token_bytes is None else int(token_bytes[targets].sum())
    loss = nats / targets.size
    per_byte = _exp(nats / size_bytes) if size_bytes else math.nan
    return {"loss": loss, "perplexity": _exp(loss), "perplexity_per_byte": per_byte}


def _exp(exponent: float) -> float:
    try:
        return math.exp(exponent)
    except OverflowError:
        return math.inf
