"""A model's operations by formula are those that torch counts."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from twophase.tasks.lm.config import ModelConfig, flops_per_token
from twophase.tasks.lm.model import Llama

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
