"""The cross-entropy in pieces against the plain one, in value and gradient; evaluation against NumPy in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own custom
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from twophase.tasks.lm import loss
from twophase.tasks.lm.loss import cross_entropy, in_pieces
from twophase.tasks.lm.task import evaluate


def case(rows: int, size: int, vocabulary: int, dtype: torch.dtype, weight_dtype: torch.dtype | None = None):
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, size, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(vocabulary, size, generator=generator).to(weight_dtype or dtype).requires_grad_()
    return x, weight, torch.randint(vocabulary, (rows,), generator=generator)


def exact(x: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Value and gradients in float64, by torch's own functions."""
    a, b = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    value = F.cross_entropy(F.linear(a, b), targets)
    grad_x, grad_weight = torch.autograd.grad(value, (a, b))
    return value, grad_x, grad_weight


@given(rows=st.integers(1, 40), pieces=st.integers(1, 45), vocabulary=st.integers(1, 30))
def test_pieces_of_any_size_give_the_plain_loss(rows: int, pieces: int, vocabulary: int):
    """In float64 value and both gradients are those of the whole, to rounding, however the rows are cut."""
    x, weight, targets = case(rows, 5, vocabulary, torch.float64)
    value = in_pieces(x, weight, targets, pieces)
    got = (value, *torch.autograd.grad(value, (x, weight)))
    for pieced, plain in zip(got, exact(x, weight, targets), strict=True):
        torch.testing.assert_close(pieced, plain, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_mixed_precision(weight_dtype: torch.dtype):
    """With bfloat16 inputs, value and gradients are within its rounding; the weight's gradient has its own type."""
    x, weight, targets = case(300, 32, 50, torch.bfloat16, weight_dtype)
    value = in_pieces(x, weight, targets, 64)
    assert value.dtype == torch.float32
    grads = torch.autograd.grad(value, (x, weight))
    assert [grad.dtype for grad in grads] == [torch.bfloat16, weight_dtype]
    rounded = weight.detach().bfloat16()
    for pieced, plain in zip((value, *grads), exact(x, rounded, targets), strict=True):
        assert (pieced.double() - plain).norm() <= 1e-2 * plain.norm()


def test_huge_logits_neither_overflow_nor_vanish():
    """With logits of thousands the loss is their difference, and the gradient stays finite."""
    x = torch.tensor([[4000.0], [4000.0]], requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0]], requires_grad=True)
    value = in_pieces(x, weight, torch.tensor([0, 1]), 1)
    assert value.item() == 4000.0  # (0 + 8000) / 2
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(value, (x, weight)))


def test_small_float32_takes_torchs_own_path():
    """At a laptop's sizes the loss and its gradients are bit for bit those of `F.cross_entropy`."""
    x, weight, targets = case(64, 16, 96, torch.float32)
    pieced, plain = cross_entropy(x, weight, targets), F.cross_entropy(F.linear(x, weight), targets)
    assert torch.equal(pieced, plain)
    assert torch.equal(torch.autograd.grad(pieced, weight)[0], torch.autograd.grad(plain, weight)[0])


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation made."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out


@pytest.mark.parametrize("grad", [True, False])
def test_the_whole_batchs_logits_never_exist(monkeypatch: pytest.MonkeyPatch, grad: bool):
    """Forward and backward make no tensor as large as the logits: at most one piece of them, or the head."""
    monkeypatch.setattr(loss, "PIECE", {"cpu": 64 * 500, "cuda": 0})
    monkeypatch.setattr(loss, "WHOLE", 0)
    x, weight, targets = case(1024, 8, 500, torch.float32)
    with Largest() as seen, torch.set_grad_enabled(grad):
        value = cross_entropy(x, weight, targets)
        if grad:
            value.backward()
    assert seen.numel == 64 * 500


def test_compiled_pieces_wait_for_the_one_before(monkeypatch: pytest.MonkeyPatch):
    """On a GPU each waits for all that the one before has made, so that the logits of two never exist at once."""
    waits: list[int] = []
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    monkeypatch.setattr(loss, "after", lambda x, others: (waits.append(len(others)), x)[1])
    x, weight = (torch.empty(rows, 5, device="meta", requires_grad=True) for rows in (20, 30))
    in_pieces(x, weight, torch.empty(20, device="meta", dtype=torch.int64), 7).backward()
    assert waits == [2, 3, 3]


def test_compiled_pieces_are_bounded(monkeypatch: pytest.MonkeyPatch):
    """On a GPU, too, no piece has more logits than allowed, whatever the batch; its rows are whole tiles."""
    sizes: list[int] = []
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    monkeypatch.setattr(loss, "in_pieces", lambda *arguments: sizes.append(arguments[3]))
    for rows in (131072, 131072 + 300, 5000, 200):
        x, weight = (torch.empty(size, 8, device="meta", dtype=torch.bfloat16) for size in (rows, 32000))
        cross_entropy(x, weight, torch.empty(rows, device="meta", dtype=torch.int64))
    assert len(sizes) == 4
    assert all(size * 32000 <= loss.COMPILED_PIECE and size % 256 == 0 for size in sizes)


@pytest.mark.slow
def test_the_operation_that_orders_is_a_well_behaved_one():
    """Its fake, its schema and its place in compiled code agree with it."""
    x, others = torch.randn(3, 4), [torch.zeros(()), torch.ones(2)]
    torch.library.opcheck(loss.after, (x, others))
    assert torch.equal(loss.after(x, others), x)


# Evaluation

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
