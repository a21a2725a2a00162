"""The shipped task `hf:MODEL`: a causal language model of transformers, on the same texts and tokens as `lm`."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own custom
from torch import Tensor, nn

from twophase.errors import UsageError
from twophase.tasks.lm.config import DataConfig
from twophase.tasks.lm.data import Corpus
from twophase.tasks.lm.task import CorpusTask, corpus_of
from twophase.text.sources import optional


@dataclass(frozen=True)
class HuggingFace(CorpusTask):
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

    @cached_property
    def _config(self) -> Any:
        """The model's configuration, read from a folder or the hub."""
        return optional("transformers", "hf").AutoConfig.from_pretrained(self.source)

    @property
    def vocabulary_size(self) -> int:
        """Logits of a token; of a multimodal model, those of its language model."""
        return self._config.get_text_config().vocab_size

    @property
    def data(self) -> Corpus:
        """Text or tokens, read when they are first needed."""
        names = ("corpus", "vocabulary", "sequence_length", "batch_size", "validation_windows")
        try:
            config = DataConfig(**{name: getattr(self, name) for name in names})
            return corpus_of(config, self.replicas, self.vocabulary_size, Path.cwd())
        except UsageError as error:  # which names the options of `lm`
            raise UsageError(str(error).replace("--data.", "--task.").replace("--model.", "the model's ")) from None

    @cached_property
    def _pretrained(self) -> nn.Module:
        kind = optional("transformers", "hf").AutoModelForCausalLM
        return kind.from_pretrained(self.source, config=self._config, dtype=torch.float32)

    def model(self, seed: int) -> nn.Module:
        """Return the model in float32, on the CPU, in training mode."""
        if self.weights:
            return copy.deepcopy(self._pretrained).train()  # from_pretrained switches dropout off
        torch.manual_seed(seed)
        return optional("transformers", "hf").AutoModelForCausalLM.from_config(self._config, dtype=torch.float32)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Compute the mean cross-entropy in nats a token."""
        return F.cross_entropy(self.logits(model, batch).flatten(0, -2), batch[1].flatten())

    def logits(self, model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        """Compute the logits (batch, length, vocabulary)."""
        return model(input_ids=batch[0], use_cache=False).logits

    def describe(self) -> dict[str, Any]:
        """Describe the corpus and the model: its configuration, and digits of the weights that it begins with."""
        return super().describe() | {"model": self._config.to_diff_dict(), "weights": self._digest}

    @cached_property
    def _digest(self) -> str | dict[str, str]:
        """Digits of pretrained weights: a name on the hub, and a folder, may have others tomorrow."""
        if not self.weights:
            return {}
        digest = hashlib.sha256()
        for name, tensor in self._pretrained.state_dict().items():
            digest.update(name.encode())
            digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy())
        return digest.hexdigest()
