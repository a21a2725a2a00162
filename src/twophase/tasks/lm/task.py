"""The language model as a task: a Llama, windows of text or tokens, cross-entropy and perplexity."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own custom
from numpy.typing import NDArray
from torch import Tensor, nn

from twophase.diloco.group import SingleProcess
from twophase.tasks.lm.config import DataConfig, TrainConfig
from twophase.tasks.lm.data import Corpus, Ids, build
from twophase.tasks.lm.model import Llama
from twophase.tasks.lm.step import Step, drawn
from twophase.training.distributed import to_device

MOST_LOGITS = 1 << 28
"""Logits of a forward pass: in float32 those of large vocabularies should not take over the memory."""


@lru_cache(maxsize=2)  # a sweep's worker trains many runs on the same text
def corpus_of(data: DataConfig, replicas: int, vocabulary_size: int, folder: Path) -> Corpus:
    """Return the corpus of a run; a relative path in it begins at `folder`, the working directory."""
    del folder
    return build(data, replicas, vocabulary_size)


@torch.no_grad()
def evaluate(
    logits: Callable[[Tensor], Tensor],
    windows: tuple[Ids, Ids],
    token_bytes: NDArray[Any] | None,
    device: torch.device,
    batch: int,
) -> dict[str, float]:
    """Return loss L = nats / N, perplexity exp(L) and, where the bytes of tokens are known, that of nats a byte.

    `logits` maps tokens (batch, length) on the device to (batch, length, vocabulary); the windows are tokens and
    targets, each (windows, length). The sum is in float64, of losses of at least float32. Perplexities that overflow
    are inf, and a NaN stays a NaN: divergence is a result, not an error.
    """
    nats, targets = 0.0, windows[1]
    for inputs, labels in zip(*(part.split(batch) for part in to_device(windows, device)), strict=True):
        scores = logits(inputs).flatten(0, -2)
        if scores.dtype in (torch.bfloat16, torch.float16):
            scores = scores.float()
        nats += F.cross_entropy(scores, labels.flatten(), reduction="none").cpu().double().sum().item()
    means = {"perplexity": nats / targets.size}
    if token_bytes is not None and (size := int(token_bytes[targets].sum())):
        means["perplexity_per_byte"] = nats / size
    perplexities = {name: math.inf if mean > 709 else math.exp(mean) for name, mean in means.items()}
    return {"loss": means["perplexity"], **perplexities}


class CorpusTask:
    """What tasks share that have `data`, a corpus, `vocabulary_size`, and `logits` of which the loss is the mean."""

    def batch(self: Any, seed: int, step: int, replica: int) -> tuple[Ids, Ids]:
        """Read tokens and targets of a replica's inner step, each (batch, length) int64."""
        return self.data.batch(seed, step, replica)

    def evaluate(self: Any, model: nn.Module) -> dict[str, float]:
        """Compute loss and perplexity on the held-out windows."""
        windows, device = self.data.validation(), next(model.parameters()).device
        batch = max(1, min(64, MOST_LOGITS // (windows[0].shape[1] * self.vocabulary_size)))
        return evaluate(lambda tokens: self.logits(model, [tokens]), windows, self.data.token_bytes, device, batch)

    def describe(self: Any) -> dict[str, Any]:
        """Describe the corpus, and the unit of the loss."""
        return self.data.description | {"loss_unit": "nats a token"}

    def check_data(self: Any, steps: int) -> None:
        """Refuse a run that would read a window of tokens twice."""
        self.data.check_enough(steps)


@dataclass(frozen=True)
class LanguageTask(CorpusTask):
    """The task of a run's configuration."""

    config: TrainConfig

    @cached_property
    def data(self) -> Corpus:
        """Text or tokens, read when they are first needed."""
        config = self.config
        return corpus_of(config.data, config.replicas, config.model.vocabulary_size, Path.cwd())

    @property
    def vocabulary_size(self) -> int:
        """Rows of embedding and head."""
        return self.config.model.vocabulary_size or self.data.vocabulary_size

    def model(self, seed: int) -> Llama:
        """Draw a fresh Llama."""
        return drawn(self.config, self.vocabulary_size, seed)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Compute the mean cross-entropy in nats a token."""
        return cast("Llama", model).loss(*batch)

    def logits(self, model: nn.Module, batch: Any) -> Tensor:
        """Compute the logits that the loss is the cross-entropy of."""
        return model(batch[0])

    def step(self, device: torch.device, replicas: int, group: SingleProcess) -> Step:
        """Make what computes in pieces, with compiled code and chosen attention kernels."""
        del replicas
        return Step(self.config, self.vocabulary_size, device, group, self.evaluate)
