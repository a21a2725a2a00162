"""Evaluation: the numbers against NumPy in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from twophase.tasks.lm.task import evaluate

CPU = torch.device("cpu")
TOKEN_BYTES = np.array([1, 1, 2, 3, 4, 1, 2])


def bigram(scale: float = 1.0, dtype: torch.dtype = torch.float32) -> nn.Embedding:
    """A model whose logits depend on the present token only."""
    weights = torch.randn(7, 7, generator=torch.Generator().manual_seed(0))
    return nn.Embedding(7, 7, _weight=(scale * weights).to(dtype))


def windows() -> tuple[Tensor, Tensor]:
    ids = torch.randint(7, (5, 12), generator=torch.Generator().manual_seed(1))
    return ids[:, :-1], ids[:, 1:]


@pytest.mark.parametrize("batch", [1, 2, 100])
@pytest.mark.parametrize(
    ("dtype", "precision"),
    # A bfloat16 model is judged by the exact loss of its rounded logits, not by a loss rounded to eight bits.
    [(torch.float32, 1e-6), (torch.float64, 1e-14), (torch.bfloat16, 1e-6)],
)
def test_equals_the_definition(batch: int, dtype: torch.dtype, precision: float):
    """Loss and both perplexities follow from the definition, whatever the batch; nothing is kept for a gradient."""
    model, (tokens, targets) = bigram(dtype=dtype), windows()
    logits = model.weight.detach().double().numpy()[tokens.numpy()]
    chosen = np.take_along_axis(logits, targets.numpy()[..., None], -1)[..., 0]
    nats = float((np.log(np.exp(logits).sum(-1)) - chosen).sum())
    judged = (tokens.numpy(), targets.numpy())
    expected = {
        "loss": nats / 55,
        "perplexity": math.exp(nats / 55),
        "perplexity_per_byte": math.exp(nats / TOKEN_BYTES[targets.numpy()].sum()),
    }
    assert evaluate(model, judged, TOKEN_BYTES, CPU, batch) == pytest.approx(expected, rel=10 * precision)
    assert model.weight.grad is None
    assert "perplexity_per_byte" not in evaluate(model, judged, None, CPU, batch)


@pytest.mark.parametrize(("scale", "perplexity"), [(1e5, math.inf), (math.nan, math.nan)])
def test_divergence_is_a_result(scale: float, perplexity: float):
    """A diverged model gives inf or NaN, not an exception."""
    tokens, targets = windows()
    result = evaluate(bigram(scale), (tokens.numpy(), targets.numpy()), TOKEN_BYTES, CPU, 2)
    assert result["perplexity"] == pytest.approx(perplexity, nan_ok=True)
    assert result["perplexity_per_byte"] == pytest.approx(perplexity, nan_ok=True)
