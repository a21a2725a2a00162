"""The configuration of a language-model run: model, data, and what every run has (no torch here)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from twophase.base.config import LATER
from twophase.training.config import LARGEST_LR, RunConfig, require, whole_numbers
from twophase.training.config import check as check_run

MOST_LAYERS, MOST_NUMBERS = 1000, 10**7
"""Layers, and what else a model and its batches have of one kind; products of them are limited by the memory."""
VOCABULARY_SIZES = {"char": 96, "bytes": 256}


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
    """The tokenizer that tokens: must have been made with: its name, such as mistral, or 8 or more digits of its
    SHA-256; empty takes any."""
    sequence_length: int = 64
    """Tokens of a training sequence."""
    batch_size: int = 8
    """Sequences a replica and inner step."""
    held_out: float = 0.08
    """Share of the documents that is held out for validation; tokens: brings its own validation split."""
    split: Literal["iid", "non-iid"] = field(default="iid", metadata=LATER)
    """Division of a text's documents among replicas: iid (in random order) or non-iid (in the corpus's order: another
    part of library or file for each). The held-out documents are the same."""
    validation_windows: int = 256
    """Sequences of a validation, spread evenly over the held-out text."""


@dataclass(frozen=True)
class LanguageConfig:
    """Model and data of the training."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)


@dataclass(frozen=True)
class TrainConfig(RunConfig, LanguageConfig):
    """One DiLoCo run of a small language model."""

    # Fields come in reverse order of the bases: model and data first, as config.yaml files have them.

    @property
    def step_tokens(self) -> int:
        """Tokens of an inner step of one replica."""
        return self.data.batch_size * self.data.sequence_length


def check(config: TrainConfig) -> TrainConfig:
    """Return the configuration if it can be run.

    Raises:
        UsageError: naming the option, its value, the range and the remedy.
    """
    model, batch = config.model, config.data.batch_size
    sizes = ["model.hidden_size", "model.intermediate_size", "model.heads"]
    sizes += ["data.sequence_length", "data.batch_size", "data.validation_windows"]
    require(
        config,
        [
            *whole_numbers(1, MOST_LAYERS, "model.layers"),
            *whole_numbers(1, MOST_NUMBERS, *sizes),
            *whole_numbers(0, MOST_NUMBERS, "model.vocabulary_size"),
            (
                "model.hidden_size",
                lambda size: size % (2 * model.heads) == 0,
                f"a multiple of 2 x heads = {2 * model.heads} (rotary pairs)",
            ),
            (
                "model.kv_heads",
                lambda heads: heads == 0 or (heads > 0 and model.heads % heads == 0),
                f"0 (as many as heads) or a divisor of --model.heads {model.heads}",
            ),
            ("model.rope_theta", lambda theta: 0 < theta <= LARGEST_LR, f"above 0 and at most {LARGEST_LR:g}"),
            ("model.norm_eps", lambda eps: 0 < eps <= LARGEST_LR, f"above 0 and at most {LARGEST_LR:g}"),
            (
                "data.split",
                lambda name: name == "iid" or not config.data.corpus.startswith("tokens:"),
                "iid with tokens:, which replicas share in the order of the shards",
            ),
            ("data.held_out", lambda share: 0 < share < 1, "between 0 and 1, for example 0.08"),
            (
                "compute.micro_batch",
                lambda size: size == 0 or (size > 0 and batch % size == 0),
                f"0 (as many as the memory holds) or a divisor of --data.batch-size {batch}",
            ),
        ],
    )
    check_run(config)
    return config
