"""The decoder: transformers' Llama as the oracle, and the promises about seeds, types, lengths and state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from twophase.tasks.lm.config import ModelConfig, flops_per_token
from twophase.tasks.lm.model import Llama

VOCABULARY = 37
DEMO = ModelConfig()
CONFIGS = [
    DEMO,
    ModelConfig(layers=1, hidden_size=6, intermediate_size=5, heads=1),
    ModelConfig(layers=2, hidden_size=32, intermediate_size=40, heads=4, kv_heads=1),
    ModelConfig(hidden_size=48, heads=6, kv_heads=2, tie_embeddings=True),
    ModelConfig(layers=3, tie_embeddings=True, rope_theta=500.0, norm_eps=1e-2),
]


def built(config: ModelConfig = DEMO, seed: int = 0) -> Llama:
    """A model whose norms are random as well, so that no two weights could be exchanged unnoticed."""
    model = Llama(config, VOCABULARY, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        if "norm" in name:
            weight.data += 0.3 * torch.randn(weight.shape, generator=generator)
    return model


def ids(batch: int = 3, length: int = 20, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    windows = torch.randint(VOCABULARY, (batch, length + 1), generator=generator)
    return windows[:, :-1], windows[:, 1:]


def twin(model: Llama) -> Any:
    """Transformers' model of the same configuration, with the weights of ours."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(**model.hf_config(), attn_implementation="sdpa")
    with torch.random.fork_rng():
        theirs = transformers.LlamaForCausalLM(config).eval()
    result = theirs.load_state_dict(model.to_hf(), strict=model.head is not None)
    assert not result.unexpected_keys
    assert set(result.missing_keys) <= {"lm_head.weight"}
    return theirs


def assert_close(value: Tensor, expected: Tensor, bound: float = 1e-5) -> None:
    assert value.shape == expected.shape
    assert (value - expected).abs().max().item() <= bound


@pytest.mark.parametrize("config", CONFIGS)
def test_logits_and_gradients_are_those_of_transformers(config: ModelConfig):
    """With the same weights, logits at several lengths, loss and each matrix's gradient differ by at most 1e-5."""
    model = built(config)
    theirs = twin(model)
    for length in (1, 20, 64):
        tokens, _ = ids(length=length)
        assert_close(model(tokens), theirs(tokens).logits)
    tokens, targets = ids()
    loss = model.loss(tokens, targets)
    loss.backward()
    expected = torch.nn.functional.cross_entropy(theirs(tokens).logits.flatten(0, 1), targets.flatten())
    expected.backward()
    assert_close(loss, expected)
    gradients = Llama(config, VOCABULARY, seed=0)  # holds gradients in place of weights, to have them under their names
    for holder, weight in zip(gradients.parameters(), model.parameters(), strict=True):
        assert weight.grad is not None
        holder.data.copy_(weight.grad)
    exported = gradients.to_hf()
    reference = {name: weight.grad for name, weight in theirs.named_parameters()}
    assert exported.keys() == reference.keys()
    for name, gradient in reference.items():
        assert_close(exported[name], gradient)


def test_lengths_may_alternate():
    """A model used at several lengths in turn gives at each what a fresh one gives, and prefixes agree.

    Tables that an evaluation made under inference mode do not keep a later backward pass from working; none is saved.
    """
    model = built()
    with torch.inference_mode():
        model(ids()[0])
    model.loss(*ids()).backward()
    tokens, _ = ids(length=40)
    for length in (40, 7, 40, 1, 23):
        fresh = built()(tokens[:, :length])
        assert torch.equal(model(tokens[:, :length]), fresh)
        assert_close(fresh, model(tokens)[:, :length])
    assert list(model.state_dict()) == [name for name, _ in model.named_parameters()]


def test_a_seed_decides_the_weights_and_nothing_else():
    """Equal seeds give equal weights in any type, others different ones; the global generator is not touched."""
    state = torch.get_rng_state()
    first, again, other = (Llama(DEMO, 96, seed=seed) for seed in (5, 5, 6))
    assert torch.equal(torch.get_rng_state(), state)
    assert sum(weight.numel() for weight in first.parameters()) == 31_392  # as docs/demo.md says
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not torch.equal(first.embedding, other.embedding)
    torch.set_default_dtype(torch.float64)
    try:
        double = Llama(DEMO, 96, seed=5)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(double.embedding, first.embedding.double())


@pytest.mark.parametrize("config", CONFIGS)
def test_operations(config: ModelConfig):
    """Torch's own count: 3 times the products' forward, and attention's whole square."""
    length = 24
    model = Llama(config, VOCABULARY, seed=0)
    tokens = torch.zeros(2, length, dtype=torch.int64)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as forward:  # others are not counted on CPUs
        model(tokens)
    # The counter takes the whole square, of which half is masked. A backward pass of products costs twice the forward.
    counted = 3 * forward.get_total_flops() / tokens.numel()
    half = 6 * config.layers * config.hidden_size * length
    assert flops_per_token(config, VOCABULARY, length) == pytest.approx(counted - half, rel=1e-12)
