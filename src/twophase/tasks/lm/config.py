"""The configuration of a language-model run: model, data, and what every run has; and a model's size by formula."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from twophase.config import require
from twophase.runs.config import RunConfig


@dataclass(frozen=True)
class ModelConfig:
    """A Llama-like decoder."""

    layers: int = 2
    """Number of decoder blocks."""
    hidden_size: int = 32
    """Width of the residual stream."""
    intermediate_size: int = 88
    """Width of the SwiGLU."""
    heads: int = 2
    """Query heads; head size = hidden_size / heads, which must be even."""
    kv_heads: int = 0
    """Key and value heads (grouped-query attention); 0 means as many as heads."""
    tie_embeddings: bool = False
    """Use the embedding matrix as the output head."""
    rope_theta: float = 10000.0
    """Base of the rotary position embedding."""
    norm_eps: float = 1e-5
    """Added to the mean square in RMSNorm."""
    vocabulary_size: int = 0
    """Rows of embedding and head; 0 means as many as the data's vocabulary has, and it may not have fewer."""

    def __post_init__(self) -> None:
        for name in ("layers", "hidden_size", "intermediate_size", "heads"):
            require(getattr(self, name) >= 1, f"model.{name}", getattr(self, name), "at least 1")
        pairs = 2 * self.heads
        require(
            self.hidden_size % pairs == 0, "model.hidden_size", self.hidden_size, f"a multiple of 2 x heads, {pairs}"
        )
        fits = self.kv_heads == 0 or (self.kv_heads > 0 and self.heads % self.kv_heads == 0)
        require(fits, "model.kv_heads", self.kv_heads, f"0 (as many as heads) or a divisor of heads, {self.heads}")
        for name in ("rope_theta", "norm_eps"):
            require(0 < getattr(self, name) < math.inf, f"model.{name}", getattr(self, name), "above 0")
        require(self.vocabulary_size >= 0, "model.vocabulary_size", self.vocabulary_size, "at least 0")


@dataclass(frozen=True)
class DataConfig:
    """Text, tokens and batches."""

    corpus: str = "python"
    """`python` (documentation and docstrings of the running Python) or `python-code` (functions and classes of its
    library). Or `file:PATH` (text, or JSON lines, gzip too), or `tokens:PATH` (a folder of `twophase data prepare`, or
    .bin files of nanoGPT)."""
    vocabulary: Literal["char", "bytes"] = "char"
    """`char` (95 printable ASCII characters and newline) or `bytes` (256); tokens: brings its own."""
    tokenizer: str = ""
    """The tokenizer that tokens: must have been made with, such as mistral; empty takes any."""
    sequence_length: int = 64
    """Tokens of a training sequence."""
    batch_size: int = 8
    """Sequences a replica and inner step."""
    held_out: float = 0.08
    """Share of the documents that is held out for validation; tokens: brings its own validation split."""
    split: Literal["iid", "non-iid"] = "iid"
    """Division of a text's documents among replicas: iid (in random order) or non-iid (in the corpus's order: another
    part of library or file for each). The held-out documents are the same."""
    validation_windows: int = 256
    """Sequences of a validation, spread evenly over the held-out text."""

    def __post_init__(self) -> None:
        for name in ("sequence_length", "batch_size", "validation_windows"):
            require(getattr(self, name) >= 1, f"data.{name}", getattr(self, name), "at least 1")
        require(0 < self.held_out < 1, "data.held_out", self.held_out, "between 0 and 1")
        # Token shards have one shuffled order of windows an epoch, of which each replica reads a share.
        fits = self.split == "iid" or not self.corpus.startswith("tokens:")
        require(fits, "data.split", self.split, "iid with tokens:")


@dataclass(frozen=True)
class LanguageConfig:
    """Model and data of the training."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)


@dataclass(frozen=True)
class TrainConfig(RunConfig, LanguageConfig):
    """One DiLoCo run of a small language model."""

    # Fields come in reverse order of the bases: model and data first, as config.yaml files have them.

    def __post_init__(self) -> None:
        super().__post_init__()
        size, batch = self.compute.micro_batch, self.data.batch_size
        fits = size == 0 or (size > 0 and batch % size == 0)
        require(fits, "compute.micro_batch", size, f"0 (as many as fit) or a divisor of data.batch_size, {batch}")
        # The backward pass of cuDNN adds in any order, so such a run would not repeat.
        fits = not (self.deterministic and self.compute.attention == "cudnn")
        require(fits, "compute.attention", self.compute.attention, "another kernel with --deterministic")

    @property
    def step_tokens(self) -> int:
        """Tokens of an inner step of one replica."""
        return self.data.batch_size * self.data.sequence_length


def flops_per_token(model: ModelConfig, vocabulary_size: int, length: int) -> float:
    """Count operations of training on a token, 6 (n_blocks + n_head) + 6 layers hidden length.

    A multiply-add counts 2, the backward pass twice the forward, attention's square half, as it is masked; the
    embedding's look-up, norms and recomputation do not count. With the whole square it is PaLM's count.

    >>> paper = ModelConfig(layers=12, hidden_size=1024, intermediate_size=2688, heads=16)
    >>> round(flops_per_token(paper, 32000, 2048) / 1e9, 3)
    1.244
    """
    size = model.hidden_size
    kv = (model.kv_heads or model.heads) * size // model.heads
    blocks = model.layers * (size * (size + 2 * kv) + size * size + 3 * size * model.intermediate_size)
    products = blocks + vocabulary_size * size
    return 6 * products + 6.0 * model.layers * size * length
