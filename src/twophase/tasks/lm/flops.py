"""Floating-point operations and parameters of a model, by formula (no torch here)."""

from __future__ import annotations

from typing import NamedTuple

from twophase.tasks.lm.config import ModelConfig


class Flops(NamedTuple):
    """Operations of training on one token: with half of attention's square, as it is masked, and with all of it."""

    causal: float
    palm: float


def flops_per_token(model: ModelConfig, vocabulary_size: int, length: int) -> Flops:
    """Count operations a token: 6 a weight of every matrix product, and attention over sequences of so many tokens.

        palm = 6 (n_blocks + n_head) + 12 layers hidden length,     causal = palm - 6 layers hidden length

    A multiply-add counts 2, the backward pass twice the forward; the embedding's look-up, norms and recomputation do
    not count.

    Source: Chowdhery et al., "PaLM" (2022), appendix B.

    >>> paper = ModelConfig(layers=12, hidden_size=1024, intermediate_size=2688, heads=16)
    >>> [round(count / 1e9, 3) for count in flops_per_token(paper, 32000, 2048)]
    [1.244, 1.395]
    """
    products = matrix_count(model) + vocabulary_size * model.hidden_size
    square = 12.0 * model.layers * model.hidden_size * length
    return Flops(6 * products + square / 2, 6 * products + square)


def matrix_count(model: ModelConfig) -> int:
    """Count the weights of the blocks' matrices."""
    size = model.hidden_size
    kv = (model.kv_heads or model.heads) * size // model.heads
    return model.layers * (size * (size + 2 * kv) + size * size + 3 * size * model.intermediate_size)


def parameter_count(model: ModelConfig, vocabulary_size: int) -> int:
    """Count all parameters: blocks, norms, embedding, and the head unless it is the embedding.

    >>> parameter_count(ModelConfig(layers=12, hidden_size=1024, intermediate_size=2688, heads=16), 32000)
    214983680
    """
    tables = 1 if model.tie_embeddings else 2
    norms = (2 * model.layers + 1) * model.hidden_size
    return matrix_count(model) + norms + tables * vocabulary_size * model.hidden_size
