"""The language model as a task: a Llama, windows of text or tokens, cross-entropy and perplexity."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, cast

import torch
from torch import Tensor, nn

from twophase.diloco.group import SingleProcess
from twophase.tasks.lm.config import TrainConfig
from twophase.tasks.lm.data import Corpus, build
from twophase.tasks.lm.evaluate import evaluate
from twophase.tasks.lm.model import Llama
from twophase.tasks.lm.step import Step, drawn

corpus_of = lru_cache(maxsize=2)(build)  # a sweep's worker trains many runs on the same text


@dataclass(frozen=True)
class LanguageTask:
    """The task of a run's configuration; its corpus is read when it is first needed."""

    config: TrainConfig

    @cached_property
    def corpus(self) -> Corpus:
        """Text or tokens."""
        config = self.config
        return corpus_of(config.data, config.replicas, config.model.vocabulary_size)

    @property
    def vocabulary_size(self) -> int:
        """Rows of embedding and head."""
        return self.config.model.vocabulary_size or self.corpus.vocabulary_size

    def model(self, seed: int) -> Llama:
        """Draw a fresh Llama."""
        return drawn(self.config, self.vocabulary_size, seed)

    def batch(self, seed: int, step: int, replica: int) -> Any:
        """Read tokens and targets of a replica's inner step, each (batch, length) int64."""
        return self.corpus.batch(seed, step, replica)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Compute the mean cross-entropy in nats a token."""
        return cast("Llama", model).loss(*batch)

    def logits(self, model: nn.Module, batch: Any) -> Tensor:
        """Compute the logits that the loss is the cross-entropy of."""
        return model(batch[0])

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Compute loss and perplexity on the held-out text."""
        return evaluate(model, self.corpus, self.vocabulary_size, next(model.parameters()).device)

    def describe(self) -> dict[str, Any]:
        """Describe the corpus, and the unit of the loss."""
        return self.corpus.description | {"loss_unit": "nats a token"}

    def step(self, device: torch.device, replicas: int, group: SingleProcess) -> Step:
        """Make what computes in pieces, with compiled code and chosen attention kernels."""
        del replicas
        return Step(self.config, self.vocabulary_size, device, group, self.evaluate)

    def check_data(self, steps: int) -> None:
        """Refuse a run that would read a window of tokens twice."""
        self.corpus.check_enough(steps)
