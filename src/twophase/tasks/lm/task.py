"""The language model as a task: a Llama, windows of text or tokens, cross-entropy and perplexity."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, cast

import torch
from torch import Tensor, nn

from twophase.base.config import UsageError
from twophase.diloco.group import SingleProcess
from twophase.tasks.lm.config import TrainConfig
from twophase.tasks.lm.corpus import Corpus, build, verify
from twophase.tasks.lm.evaluate import numbers, total_nats
from twophase.tasks.lm.model import Llama
from twophase.tasks.lm.speed import flops_per_token
from twophase.tasks.lm.step import Step, drawn
from twophase.training.device import check_memory, moved

_EVALUATED_LOGITS = 1 << 28

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
        """Compute loss and perplexity on the held-out text; as `LanguageStep.evaluate` on a CPU."""
        tokens, targets = self.corpus.validation()
        logits = tokens.shape[1] * self.vocabulary_size  # of a window; in float32, they should not take over
        batch = max(1, min(64, _EVALUATED_LOGITS // logits))
        pair = moved((tokens, targets), next(model.parameters()).device)
        return numbers(total_nats(model, pair[0], pair[1], batch), targets, self.corpus.token_bytes)

    def describe(self) -> dict[str, Any]:
        """Describe the corpus, and the unit of the loss."""
        return self.corpus.description | {"loss_unit": "nats a token"}

    def data_fault(self, *, wait: bool = False) -> str:
        """Return what is wrong with token files that were taken on trust; `wait` until all are read."""
        verification = self.corpus.verification
        return verification.finish() if wait else verification.fault

    def step(self, device: torch.device, replicas: int, communicator: SingleProcess) -> LanguageStep:
        """Make what computes in pieces, with compiled code and chosen attention kernels; begin to verify the data."""
        self.corpus.verification.start()
        return LanguageStep(self, device, replicas, communicator)

    def check(self, device: torch.device) -> None:
        """Refuse a text that cannot be read, and a choice of kernels that the device lacks.

        Raises:
            UsageError: naming the option.
        """
        config = self.config
        if device.type != "cuda" and config.compute.attention != "auto":
            raise UsageError(
                f"--compute.attention is {config.compute.attention}; --device {config.device} has no choice of "
                "kernels, so leave it at auto"
            )
        data = self.corpus.data  # reads the text, which may be refused
        for option, count in {"validation-windows": data.validation_windows, "batch-size": data.batch_size}.items():
            check_memory(
                f"--data.{option} {count} windows of {data.sequence_length} tokens",
                # Read, and as int64 tokens and targets.
                3 * 8 * count * data.sequence_length,
                torch.device("cpu"),
                f"lower --data.{option} or --data.sequence-length",
            )

    def check_data(self, steps: int) -> None:
        """Refuse a run that would read a window of tokens twice."""
        self.corpus.check_enough(steps)

    def verify_data(self) -> None:
        """Read all token files and compare them with their checksums."""
        verify(self.config.data, self.config.model.vocabulary_size)


class LanguageStep(Step):
    """`Step` with what the training loop asks of it besides: evaluation and speed."""

    def __init__(self, task: LanguageTask, device: torch.device, replicas: int, communicator: SingleProcess) -> None:
        config = task.config
        super().__init__(config, task.vocabulary_size, device, replicas, communicator)
        self.task = task
        self.tokens = config.step_tokens
        self.loss_bound = 3 * math.log(task.vocabulary_size)
        self.data_name = f"--data.corpus {config.data.corpus}"

    def evaluate(self, model: nn.Module) -> Mapping[str, float]:
        """Compute loss and perplexity on the held-out text; on a GPU in the pieces of a training step."""
        if self.device.type != "cuda":  # logits are cheap there, and the digits of earlier records stay
            return self.task.evaluate(model)
        tokens, targets = self.task.corpus.validation()
        nats = self.nats(cast("Llama", model), *moved((tokens, targets), self.device))
        return numbers(nats, targets, self.task.corpus.token_bytes)

    def rates(self, batches: int, seconds: float) -> dict[str, float]:
        """Compute tokens and floating-point operations a second, by both countings of attention."""
        rate = batches * self.tokens / seconds if seconds > 0 else 0.0
        flops = flops_per_token(self.config.model, self.vocabulary_size, self.config.data.sequence_length)
        return {
            "tokens_per_second": rate,
            "flops_per_second": rate * flops.causal,
            "flops_per_second_palm": rate * flops.palm,
        }
