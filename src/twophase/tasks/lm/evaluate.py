"""Loss and perplexity of a language model on given windows."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own custom
from numpy.typing import NDArray
from torch import Tensor, nn


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation found.

    Args:
        loss: mean cross-entropy, nats a token.
        perplexity: exp(loss), per token.
        perplexity_per_byte: exp(nats / UTF-8 bytes), which compares vocabularies.
        tokens: number of targets that were judged.
    """

    loss: float
    perplexity: float
    perplexity_per_byte: float
    tokens: int


def evaluate(
    model: nn.Module, tokens: Tensor, targets: Tensor, token_bytes: NDArray[np.integer] | None, batch: int
) -> Evaluation:
    """Mean cross-entropy over all targets, L = -(1/N) sum_i log softmax(logits_i)[target_i], and its exponentials.

    Perplexities that overflow are inf, and a NaN of the model stays a NaN: divergence is a result, not an error. The
    model is put in evaluation mode and every module of it back into its own.

    Args:
        model: from (batch, length) int64 to logits (batch, length, vocabulary).
        tokens: (windows, length) int64, on the model's device.
        targets: (windows, length) int64, on the model's device.
        token_bytes: (vocabulary,), UTF-8 bytes of each token; None where they are not known, which makes the perplexity
            per byte a NaN.
        batch: windows a forward pass; it changes the memory that is needed, not the result.

    Returns:
        Loss, perplexities and number of tokens; summed in float64 from losses of at least float32.

    Raises:
        ValueError: no window, or a batch below 1.
    """
    if batch < 1:
        raise ValueError(f"evaluate: batch is {batch}; it must be at least 1 window")
    if targets.numel() == 0:
        raise ValueError(f"evaluate: targets has shape {tuple(targets.shape)}; there must be at least one target")
    modes = [(module, module.training) for module in model.modules()]
    nats = 0.0
    model.eval()
    try:
        with torch.no_grad():
            for inputs, wanted in zip(tokens.split(batch), targets.split(batch), strict=True):
                logits = model(inputs).flatten(0, -2)
                if logits.dtype in (torch.bfloat16, torch.float16):
                    logits = logits.float()
                nats += F.cross_entropy(logits, wanted.flatten(), reduction="none").cpu().double().sum().item()
    finally:
        for module, training in modes:
            module.training = training
    return evaluation(nats, targets.cpu().numpy(), token_bytes)


def evaluation(nats: float, targets: NDArray[np.integer], token_bytes: NDArray[np.integer] | None) -> Evaluation:
    """Loss and perplexities from the sum of the losses over all targets.

    Args:
        nats: the sum.
        targets: tokens that were judged, of any shape.
        token_bytes: as for `evaluate`.
    """
    count = targets.size
    size_bytes = 0 if token_bytes is None else int(token_bytes[targets].sum())
    loss = nats / count
    return Evaluation(loss, _exp(loss), _exp(nats / size_bytes) if size_bytes else math.nan, count)


def _exp(exponent: float) -> float:
    try:
        return math.exp(exponent)
    except OverflowError:
        return math.inf
