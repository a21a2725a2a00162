"""What no model, batch or run can have is refused by its option; a model's size by formula is that of the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from twophase.config import update
from twophase.errors import UsageError
from twophase.tasks.lm.config import ModelConfig, TrainConfig, flops_per_token
from twophase.tasks.lm.model import Llama


@pytest.mark.parametrize(
    "values",
    [
        {"model.layers": 0},
        {"model.hidden_size": 34, "model.heads": 4},
        {"model.kv_heads": 4, "model.heads": 2},
        {"model.kv_heads": -1},
        {"model.norm_eps": float("nan")},
        {"model.vocabulary_size": -1},
        {"data.sequence_length": 0},
        {"data.held_out": 1.0},
        {"data.split": "non-iid", "data.corpus": "tokens:shards"},
        {"compute.micro_batch": 3, "data.batch_size": 8},
        {"compute.micro_batch": -2},
        {"compute.attention": "cudnn", "deterministic": True},
    ],
    ids=str,
)
def test_values_that_cannot_be(values: dict[str, Any]) -> None:
    """One line with option, range and value; each alone, as a cross-check of two fields too."""
    option = next(iter(values)).replace("_", "-")
    with pytest.raises(UsageError, match=rf"^--{option}: [^\n]*{next(iter(values.values()))}$"):
        update(TrainConfig(), values)


SHAPES = [
    ModelConfig(),
    ModelConfig(layers=3, hidden_size=48, intermediate_size=100, heads=4, kv_heads=2),
    ModelConfig(layers=1, hidden_size=32, intermediate_size=64, heads=2, tie_embeddings=True),
]


@pytest.mark.parametrize("config", SHAPES)
def test_operations(config: ModelConfig) -> None:
    """Torch's own count: 3 times the products' forward, and attention's whole square."""
    length = 24
    model = Llama(config, 77, seed=0)
    tokens = torch.zeros(2, length, dtype=torch.int64)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as forward:  # others are not counted on CPUs
        model(tokens)
    # The counter takes the whole square, of which half is masked. A backward pass of products costs twice the forward.
    counted = 3 * forward.get_total_flops() / tokens.numel()
    half = 6 * config.layers * config.hidden_size * length
    assert flops_per_token(config, 77, length) == pytest.approx(counted - half, rel=1e-12)
