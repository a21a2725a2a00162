"""The cross-entropy of a linear head, without the logits of a whole batch in float32.

The logits of the paper's model for one replica's batch, 131,072 x 32,000, take 16.8 GB in float32. Here they exist for
some rows at a time, and their gradient is made meanwhile, so nothing of their size is kept for the backward pass.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own custom
from torch import Tensor

WHOLE = 1 << 22
"""Logits up to this number, in float32 or float64, are computed at once: at a laptop's sizes pieces only cost time."""
PIECE = {"cpu": 1 << 22, "cuda": 1 << 27}
"""Logits that exist at a time otherwise: enough rows for a matrix product to be efficient."""
COMPILED_PIECE = 1 << 29
"""The same in code that was compiled for a GPU, which keeps two bytes of each and nothing in float32."""


def cross_entropy(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Compute the mean cross-entropy of a linear head, -(1/N) sum_i log softmax(W x_i)[target_i], in nats a token.

    Args:
        x: (rows, size), in the type that is computed in.
        weight: W, (vocabulary, size), in the type of the weights; the product is computed in that of `x`.
        targets: (rows,) int64.

    Returns:
        A scalar; at least float32. Sums over the vocabulary and over rows are at least float32 for all types.
    """
    logits = targets.numel() * weight.shape[0]
    if logits <= WHOLE and weight.dtype == x.dtype and x.dtype in (torch.float32, torch.float64):
        return F.cross_entropy(F.linear(x, weight), targets)
    piece = COMPILED_PIECE if _in_order(x) else PIECE.get(x.device.type, PIECE["cuda"])
    rows = max(piece // weight.shape[0], 1)
    tile = 256 if rows > 256 else 1  # whole tiles of a matrix product
    rows -= rows % tile
    if _in_order(x):  # pieces of one size: the library chooses its kernels by the shape
        count = math.ceil(targets.numel() / rows)
        rows = math.ceil(targets.numel() / count / tile) * tile
    return in_pieces(x, weight, targets, rows)


def in_pieces(x: Tensor, weight: Tensor, targets: Tensor, rows: int) -> Tensor:
    """Compute `cross_entropy` with the logits of `rows` rows at a time, rows >= 1.

        z = W x_i,   p = softmax(z) in float32,   dL/dz = (p - e_target) / N,
        dL/dx_i = W^T dL/dz,   dL/dW = sum_i dL/dz x_i^T

    dL/dz is rounded to the type of `x` for the two products, as in mixed precision. The sum of dL/dW over pieces is in
    at least float32.

    Source: the idea of Wijmans et al., "Cut your losses in large-vocabulary language models" (2024), in plain PyTorch.
    """
    if not torch.is_grad_enabled():
        return _forward(x, weight, targets, rows, gradients=False)[0]
    return _InPieces.apply(x, weight, targets, rows)  # pyright: ignore[reportReturnType] - apply is not typed


class _InPieces(torch.autograd.Function):
    """Value and gradient in one pass over the pieces; the backward pass only scales."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, rows: int) -> Tensor:
        loss, grad_x, grad_weight = _forward(x, weight, targets, rows, gradients=True)
        ctx.save_for_backward(grad_x, grad_weight)
        return loss

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (scale,) = outputs
        grad_x, grad_weight = ctx.saved_tensors
        # Not in place: a graph may be walked twice.
        return (grad_x * scale).to(grad_x.dtype), grad_weight * scale.to(grad_weight.dtype), None, None


def _forward(
    x: Tensor, weight: Tensor, targets: Tensor, rows: int, *, gradients: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the loss and, if asked, its gradients with respect to x and weight."""
    exact = torch.promote_types(x.dtype, torch.float32)
    cast = weight.to(x.dtype)
    count = targets.numel()
    total = torch.zeros((), dtype=exact, device=x.device)
    grad_weight = torch.zeros(weight.shape if gradients else 0, dtype=exact, device=x.device)
    grads_x: list[Tensor] = []
    for part, labels in zip(x.split(rows), targets.split(rows), strict=True):
        piece = after(part, [total, grad_weight, *grads_x[-1:]]) if _in_order(x) else part
        z = F.linear(piece, cast).to(exact)
        index = labels[:, None]
        log_sum = torch.logsumexp(z, -1, keepdim=True)
        total = total + (log_sum - z.gather(1, index)).sum()
        if gradients:
            # The column test instead of a scatter: it fuses with the exponential.
            columns = torch.arange(z.shape[1], device=z.device)
            slope = (((z - log_sum).exp() - (columns == index).to(exact)) / count).to(x.dtype)
            grads_x.append(slope @ cast)
            grad_weight = grad_weight + (slope.t() @ piece).to(exact)
    grad_x = torch.cat(grads_x) if gradients else x.new_zeros(0)
    return total / count, grad_x, grad_weight.to(weight.dtype)


def _in_order(x: Tensor) -> bool:
    """Return whether each piece must wait for the one before.

    On a GPU the compiler runs the first product of every piece before the second of any, so all logits exist at once.
    On a CPU it keeps the written order.
    """
    return x.device.type != "cpu" and torch.compiler.is_compiling()


@torch.library.custom_op("twophase::after", mutates_args=())
def after(x: Tensor, others: list[Tensor]) -> Tensor:
    """Copy `x`; compiled code does so only after the other tensors are computed."""
    del others
    return x.clone()


@after.register_fake
def _(x: Tensor, others: list[Tensor]) -> Tensor:
    del others
    return torch.empty_like(x)
