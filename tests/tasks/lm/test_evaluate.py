"""Evaluation: the numbers against NumPy in float64, and nothing left changed."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from twophase.tasks.lm.evaluate import Evaluation, evaluate

ONE_BYTE = np.ones(7, np.int64)


class Bigram(nn.Module):
    """Logits that depend on the present token only."""

    def __init__(self, vocabulary: int = 7, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        weights = torch.randn(vocabulary, vocabulary, generator=torch.Generator().manual_seed(0))
        self.table = nn.Parameter((scale * weights).to(dtype))
        self.inner = nn.Dropout(0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits, with a dropout that only evaluation mode turns off."""
        return self.inner(self.table[tokens])


def windows(count: int = 5, length: int = 11, vocabulary: int = 7) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(vocabulary, (count, length + 1), generator=generator)
    return ids[:, :-1], ids[:, 1:]


def expected(model: Bigram, tokens: Tensor, targets: Tensor) -> float:
    """Total nats, in float64, from the definition."""
    logits = model.table.detach().double().numpy()[tokens.numpy()]
    chosen = np.take_along_axis(logits, targets.numpy()[..., None], -1)[..., 0]
    return float((np.log(np.exp(logits).sum(-1)) - chosen).sum())


@pytest.mark.parametrize("batch", [1, 2, 5, 100])
def test_equals_the_definition(batch: int):
    """Loss and both perplexities follow from the definition, whatever the batch, with dropout off."""
    model, (tokens, targets) = Bigram(), windows()
    token_bytes = np.array([1, 1, 2, 3, 4, 1, 2])
    nats, count = expected(model, tokens, targets), targets.numel()
    found = evaluate(model, tokens, targets, token_bytes, batch)
    assert found.tokens == count
    assert found.loss == pytest.approx(nats / count, rel=1e-6)
    assert found.perplexity == pytest.approx(math.exp(nats / count), rel=1e-5)
    assert found.perplexity_per_byte == pytest.approx(math.exp(nats / token_bytes[targets.numpy()].sum()), rel=1e-5)


def test_float64_is_judged_in_float64():
    """A float64 model loses nothing: its loss agrees with NumPy's to rounding."""
    model, (tokens, targets) = Bigram(dtype=torch.float64), windows()
    found = evaluate(model, tokens, targets, ONE_BYTE, 2)
    assert found.loss == pytest.approx(expected(model, tokens, targets) / targets.numel(), rel=1e-14)


def test_bfloat16_is_judged_in_float32():
    """A bfloat16 model is judged by the exact loss of its rounded logits, not by a loss rounded to eight bits."""
    model, (tokens, targets) = Bigram(dtype=torch.bfloat16), windows()
    found = evaluate(model, tokens, targets, ONE_BYTE, 2)
    assert found.loss == pytest.approx(expected(model, tokens, targets) / targets.numel(), rel=1e-6)


def test_one_byte_tokens_make_both_perplexities_equal():
    """Where every token is one byte, perplexity per byte is perplexity per token."""
    model, (tokens, targets) = Bigram(), windows()
    found = evaluate(model, tokens, targets, ONE_BYTE, 3)
    assert found.perplexity == found.perplexity_per_byte


def test_overflow_is_infinite_and_nan_stays():
    """A diverged model gives inf or NaN, not an exception."""
    tokens, targets = windows()
    huge = evaluate(Bigram(scale=1e5), tokens, targets, ONE_BYTE, 2)
    assert math.isfinite(huge.loss)
    assert huge.perplexity == huge.perplexity_per_byte == math.inf
    broken = evaluate(Bigram(scale=math.nan), tokens, targets, ONE_BYTE, 2)
    assert all(map(math.isnan, (broken.loss, broken.perplexity, broken.perplexity_per_byte)))
    infinite = Bigram()
    infinite.table.data[:, 0] = -math.inf
    assert evaluate(infinite, tokens, torch.zeros_like(targets), ONE_BYTE, 2).perplexity == math.inf


@pytest.mark.parametrize("fails", [False, True])
def test_modes_are_restored(fails: bool):
    """Each module is back in its own mode afterwards, mixed modes and failures included."""
    model, (tokens, targets) = Bigram(), windows()
    model.train()
    model.inner.eval()
    if fails:
        with pytest.raises(IndexError):
            evaluate(model, tokens + 7, targets, ONE_BYTE, 2)
    else:
        evaluate(model, tokens, targets, ONE_BYTE, 2)
    assert (model.training, model.inner.training) == (True, False)


def test_leaves_no_gradient():
    """Nothing is recorded for a backward pass."""
    model, (tokens, targets) = Bigram(), windows()
    result = evaluate(model, tokens, targets, ONE_BYTE, 2)
    assert isinstance(result, Evaluation)
    assert model.table.grad is None
    assert torch.is_grad_enabled()


def test_impossible_arguments_are_refused():
    """No target or no batch is refused, naming the argument and its value."""
    model, (tokens, targets) = Bigram(), windows()
    with pytest.raises(ValueError, match="batch is 0"):
        evaluate(model, tokens, targets, ONE_BYTE, 0)
    with pytest.raises(ValueError, match=r"targets has shape \(0, 11\)"):
        evaluate(model, tokens[:0], targets[:0], ONE_BYTE, 1)
