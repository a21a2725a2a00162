"""The shipped task `hf:NAME_OR_PATH`: a causal language model of transformers, on the same texts and tokens as `lm`."""

from __future__ import annotations

import copy
import hashlib
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own custom
from torch import Tensor, nn

from twophase.base.errors import UsageError
from twophase.tasks.lm.config import DataConfig
from twophase.tasks.lm.corpus import TOKENS, Corpus, build, verify
from twophase.tasks.lm.evaluate import numbers, total_nats
from twophase.text.shards import is_prepared
from twophase.training.device import moved

_EVALUATED_LOGITS = 1 << 26


@dataclass(frozen=True)
class HuggingFace:
    """Any AutoModelForCausalLM, from its configuration alone or with its weights."""

    source: str
    weights: bool = False
    """Start from the pretrained weights; else from fresh ones, with the configuration alone."""
    corpus: str = "python"
    """Text or tokens, as data.corpus of the built-in model."""
    vocabulary: Literal["char", "bytes"] = "bytes"
    """Tokens of a text; tokens: brings its own, which must be the model's."""
    sequence_length: int = 64
    """Tokens of a training sequence."""
    batch_size: int = 8
    """Sequences a replica and inner step."""
    validation_windows: int = 256
    """Sequences of a validation."""
    replicas: int = 1

    def __post_init__(self) -> None:
        """Refuse sizes that no batch can have."""
        for name in ("sequence_length", "batch_size", "validation_windows"):
            if (value := getattr(self, name)) < 1:
                raise UsageError(f"--task.{name.replace('_', '-')} is {value}; it must be at least 1")

    @cached_property
    def _config(self) -> Any:
        """The model's configuration, read from a folder or the hub."""
        try:
            from transformers import AutoConfig  # noqa: PLC0415 - an extra
        except ImportError:
            raise UsageError(f"--task hf:{self.source} needs transformers; install twophase[hf]") from None
        try:
            return AutoConfig.from_pretrained(self.source)
        except (OSError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise UsageError(
                f"--task hf:{self.source}: no configuration of a model there ({reason}); give a folder with its "
                "config.json, or a name on the hub"
            ) from None

    @property
    def _sizes(self) -> Any:
        """The part of the configuration with vocabulary and positions: of a multimodal model, its language model's."""
        return self._config.get_text_config()

    @property
    def _data(self) -> DataConfig:
        names = ("corpus", "vocabulary", "sequence_length", "batch_size", "validation_windows")
        return DataConfig(**{name: getattr(self, name) for name in names})

    @property
    def _ids(self) -> int:
        """Number of ids of .bin files, which do not state it; 0 if the data does."""
        path = Path(os.path.expanduser(self.corpus.removeprefix(TOKENS)))  # noqa: PTH111 - Path's may raise
        return 0 if not self.corpus.startswith(TOKENS) or is_prepared(path) else self._sizes.vocab_size

    @cached_property
    def _corpus(self) -> Corpus:
        with _task_options():
            corpus = build(self._data, self.replicas, self._ids)
        if corpus.vocabulary_size > self._sizes.vocab_size:
            raise UsageError(
                f"--task.corpus {self.corpus}: its {corpus.vocabulary_size:,} tokens are more than the "
                f"{self._sizes.vocab_size:,} of hf:{self.source}; prepare the text with the model's own tokenizer"
            )
        corpus.verification.start()
        return corpus

    def model(self, seed: int) -> nn.Module:
        """Return the model in float32, on the CPU, in training mode."""
        config = self._config
        if self.weights:
            return copy.deepcopy(self._pretrained).train()  # from_pretrained switches dropout off
        from transformers import AutoModelForCausalLM  # noqa: PLC0415 - an extra, which `_config` has checked

        torch.manual_seed(seed)
        return self._fitting(AutoModelForCausalLM.from_config(config, dtype=torch.float32))

    def _fitting(self, model: Any) -> nn.Module:
        """Return a model that has a position for each token of a sequence; rotary ones go beyond what they name."""
        limit = getattr(self._sizes, "max_position_embeddings", None)
        if limit and self.sequence_length > limit:
            tables = [part for part in model.modules() if isinstance(part, nn.Embedding)]
            # Some models learn one or two positions more, such as that of padding.
            if any(limit <= t.num_embeddings <= limit + 2 for t in tables if t is not model.get_input_embeddings()):
                raise UsageError(
                    f"--task.sequence-length is {self.sequence_length}, and hf:{self.source} has learned {limit} "
                    f"positions (its max_position_embeddings); give at most {limit}"
                )
        return model

    @cached_property
    def _pretrained(self) -> nn.Module:
        from transformers import AutoModelForCausalLM  # noqa: PLC0415 - as above

        with torch.device("cpu"):
            model = AutoModelForCausalLM.from_pretrained(self.source, config=self._config, dtype=torch.float32)
        return self._fitting(model)

    def batch(self, seed: int, step: int, replica: int) -> Any:
        """Read tokens and targets of a replica's inner step, each (batch, length) int64."""
        return self._corpus.batch(seed, step, replica)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Compute the mean cross-entropy in nats a token."""
        return F.cross_entropy(self.logits(model, batch).flatten(0, -2), batch[1].flatten())

    def logits(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Compute the logits (batch, length, vocabulary)."""
        return _logits(model, batch[0])

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Compute loss and perplexity on the held-out text."""
        tokens, targets = self._corpus.validation()
        batch = max(1, min(64, _EVALUATED_LOGITS // (tokens.shape[1] * self._sizes.vocab_size)))
        inputs, labels = moved((tokens, targets), next(model.parameters()).device)
        result = numbers(total_nats(partial(_logits, model), inputs, labels, batch), targets, self._corpus.token_bytes)
        return {name: value for name, value in result.items() if not math.isnan(value) or name == "loss"}

    def describe(self) -> dict[str, Any]:
        """Describe the corpus and the model: its configuration, and digits of the weights that it begins with."""
        return {
            **self._corpus.description,
            "model": self._config.to_diff_dict(),
            "weights": self._weights_digest if self.weights else {},
            "loss_unit": "nats a token",
        }

    @cached_property
    def _weights_digest(self) -> str:
        """Digits of the loaded weights: a name on the hub, and a folder, may have others tomorrow."""
        digest = hashlib.sha256()
        for name, tensor in self._pretrained.state_dict().items():
            digest.update(name.encode())
            digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy())
        return digest.hexdigest()

    def check_data(self, steps: int) -> None:
        """Refuse a run that would read a window of tokens twice."""
        with _task_options():
            self._corpus.check_enough(steps)

    def verify_data(self) -> None:
        """Read all token files and compare them with their checksums."""
        with _task_options():
            verify(self._data, self._ids)

    def data_fault(self, *, wait: bool = False) -> str:
        """Return what is wrong with token files that were taken on trust; `wait` until all are read."""
        verification = self._corpus.verification
        return verification.finish() if wait else verification.fault


@contextmanager
def _task_options() -> Iterator[None]:
    """Translate option names in errors of the lm corpus."""
    try:
        yield
    except UsageError as error:
        raise UsageError(str(error).replace("--data.", "--task.")) from None


def _logits(model: nn.Module, tokens: Tensor) -> Tensor:
    return model(input_ids=tokens, use_cache=False).logits
