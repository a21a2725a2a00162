"""Loss and perplexity of a language model on the held-out windows of a corpus."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own custom
from numpy.typing import NDArray
from torch import Tensor

from twophase.tasks.lm.data import Corpus
from twophase.training.distributed import to_device

MOST_LOGITS = 1 << 28
"""Logits of a forward pass: in float32 those of large vocabularies should not take over the memory."""

Model = Callable[[Tensor], Tensor]
"""Maps tokens (batch, length) to logits (batch, length, vocabulary)."""


def evaluate(model: Model, corpus: Corpus, vocabulary_size: int, device: torch.device) -> dict[str, float]:
    """Return loss in nats a token, perplexity and, where the bytes of tokens are known, perplexity per byte."""
    tokens, targets = corpus.validation()
    batch = max(1, min(64, MOST_LOGITS // (tokens.shape[1] * vocabulary_size)))
    inputs, labels = to_device((tokens, targets), device)
    return numbers(total_nats(model, inputs, labels, batch), targets, corpus.token_bytes)


@torch.no_grad()
def total_nats(model: Model, tokens: Tensor, targets: Tensor, batch: int) -> float:
    """Return the cross-entropy in nats, summed over all targets: in float64, from losses of at least float32.

    Tokens and targets, (windows, length) int64, are on the model's device. `batch` windows a forward pass change the
    memory that is needed, not the result.
    """
    nats = 0.0
    for inputs, labels in zip(tokens.split(batch), targets.split(batch), strict=True):
        logits = model(inputs).flatten(0, -2)
        if logits.dtype in (torch.bfloat16, torch.float16):
            logits = logits.float()
        nats += F.cross_entropy(logits, labels.flatten(), reduction="none").cpu().double().sum().item()
    return nats


def numbers(nats: float, targets: NDArray[np.integer], token_bytes: NDArray[np.integer] | None) -> dict[str, float]:
    """Return L = nats / N, its exponential and, with UTF-8 bytes of each token, (vocabulary,), that of nats a byte.

    Perplexities that overflow are inf, and a NaN of the model stays a NaN: divergence is a result, not an error.
    """
    means = {"perplexity": nats / targets.size}
    if token_bytes is not None and (size := int(token_bytes[targets].sum())):
        means["perplexity_per_byte"] = nats / size
    perplexities = {name: math.inf if mean > 709 else math.exp(mean) for name, mean in means.items()}
    return {"loss": means["perplexity"], **perplexities}
