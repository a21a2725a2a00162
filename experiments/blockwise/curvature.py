"""Curvature of a loss in a block of a model's parameters, all others fixed, and its eigenvalues from products alone.

    G = (1/N) sum_i J_i^T (diag p_i - p_i p_i^T) J_i,      J_i = d logits_i / d parameters,   p_i = softmax(logits_i)

is the generalised Gauss-Newton matrix of the mean cross-entropy over N predictions: the Hessian of the loss without the
curvature of the logits. It is never formed.

Source: Schraudolph, "Fast curvature matrix-vector products" (2002).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.linalg import eigh_tridiagonal
from scipy.sparse.linalg import LinearOperator, eigsh
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

Floats = NDArray[np.floating[Any]]
Product = Callable[[Floats], Floats]
"""Product of a symmetric matrix with a vector, (size,) float64."""
Logits = Callable[[nn.Module, Any], Tensor]
"""Logits of a model on a batch, classes along the last dimension."""


class _Called(nn.Module):
    """A function of a model as a module, of which `functional_call` can replace the parameters."""

    def __init__(self, model: nn.Module, logits: Logits) -> None:
        super().__init__()
        self.model, self.logits = model, logits

    def forward(self, batch: Any) -> Tensor:
        return self.logits(self.model, batch)


def gauss_newton(
    model: nn.Module, batches: Sequence[Any], names: Sequence[str], logits: Logits, scale: Tensor
) -> Product:
    """Return the product with the Gauss-Newton matrix of a block.

    Args:
        model: in evaluation mode, with finite parameters.
        batches: over which the matrix is a mean, of equal size.
        names: the block's parameters, in the order of the coordinates.
        logits: those of the model on a batch.
        scale: factor of each coordinate on both sides, (size,): `D^-1/2` for the preconditioned matrix.
    """
    called = _Called(model, logits)
    weights = {name: weight.detach() for name, weight in called.named_parameters()}
    leaves = [weights[f"model.{name}"].clone().requires_grad_() for name in names]
    named = weights | dict(zip((f"model.{name}" for name in names), leaves, strict=True))
    with sdpa_kernel(SDPBackend.MATH):  # the other kernels cannot be differentiated twice
        products = [_product_of(functional_call(called, named, (batch,)), leaves) for batch in batches]

    def product(vector: Floats) -> Floats:
        v = torch.from_numpy(np.ascontiguousarray(vector)).to(leaves[0].dtype) * scale
        parts = v.split([leaf.numel() for leaf in leaves])
        tangent = [part.view_as(leaf) for part, leaf in zip(parts, leaves, strict=True)]
        with sdpa_kernel(SDPBackend.MATH):
            rows = [torch.cat([part.reshape(-1) for part in one(tangent)]) for one in products]
        return (sum(rows) / len(rows) * scale).double().numpy()

    return product


def _product_of(logits: Tensor, leaves: Sequence[Tensor]) -> Callable[[Sequence[Tensor]], Sequence[Tensor]]:
    """J v is the derivative by u of the linear map u -> J^T u, so that both graphs stay and none is built again."""
    u = torch.zeros_like(logits, requires_grad=True)
    transposed = torch.autograd.grad(logits, leaves, u, create_graph=True, materialize_grads=True)
    p, count = logits.detach().softmax(-1), logits.shape[:-1].numel()

    def product(tangent: Sequence[Tensor]) -> Sequence[Tensor]:
        (change,) = torch.autograd.grad(transposed, u, tangent, retain_graph=True)
        weighted = p * change
        slope = (weighted - p * weighted.sum(-1, keepdim=True)) / count
        return torch.autograd.grad(logits, leaves, slope, retain_graph=True, materialize_grads=True)

    return product


def density(product: Product, size: int, *, steps: int = 32, probes: int = 2, apart: int = 10) -> tuple[Floats, Floats]:
    """Return the eigenvalues of a symmetric matrix and the share of all that each stands for, by Lanczos quadrature.

    For a random unit vector z the eigenvalues of its tridiagonal matrix are the nodes of the Gauss quadrature of
    `z^T f(A) z`, with the squared first components of their eigenvectors as weights; its mean is `trace f(A) / size`.
    The `apart` largest carry most of the trace with an almost random weight in z: they are found by ARPACK, taken out
    of z, and counted by themselves. Up to 64 coordinates the matrix is decomposed exactly.

    Returns:
        Eigenvalues, ascending; shares, which sum to 1.

    Source: Ubaru, Chen and Saad, "Fast estimation of tr(f(A)) via stochastic Lanczos quadrature" (2017); the largest
    apart as in Meyer et al., "Hutch++" (2021).
    """
    if size <= 64:
        matrix = np.stack([product(column) for column in np.eye(size)])
        return np.linalg.eigvalsh((matrix + matrix.T) / 2), np.full(size, 1 / size)
    generator = np.random.default_rng(0)
    start = product(generator.standard_normal(size))
    if not start.any():  # ARPACK refuses a matrix of zeros
        return np.zeros(1), np.ones(1)
    operator = LinearOperator((size, size), matvec=product, dtype=np.float64)  # pyright: ignore[reportCallIssue]
    values, vectors = eigsh(operator, apart, which="LA", v0=start, tol=1e-3)  # type: ignore[arg-type]
    nodes, shares = [values], [np.full(len(values), 1 / size)]

    def rest(vector: Floats) -> Floats:
        return vector - vectors @ (vectors.T @ vector)

    for _ in range(probes):
        tridiagonal = lanczos(lambda v: rest(product(v)), rest(generator.choice([-1.0, 1.0], size)), steps)
        ritz_values, ritz_vectors = eigh_tridiagonal(*tridiagonal)
        nodes.append(ritz_values)
        shares.append(ritz_vectors[0] ** 2 * (1 - len(values) / size) / probes)
    order = np.argsort(np.concatenate(nodes), kind="stable")
    return np.concatenate(nodes)[order], np.concatenate(shares)[order]


def lanczos(product: Product, start: Floats, steps: int) -> tuple[Floats, Floats]:
    """Return the tridiagonal matrix of a symmetric matrix in the Krylov space of a vector: diagonal, off-diagonal.

    Every new vector is made orthogonal to all before, twice: without that, copies of the largest eigenvalues appear.
    It ends where the space has no more dimensions.
    """
    basis, diagonal, off_diagonal = [start / np.linalg.norm(start)], list[float](), list[float]()
    while True:
        image = product(basis[-1])
        diagonal.append(float(basis[-1] @ image))
        matrix = np.array(basis)
        for _ in range(2):
            image = image - matrix.T @ (matrix @ image)
        length = float(np.linalg.norm(image))
        if len(basis) == steps or length <= 1e-12 * max(map(abs, [*diagonal, *off_diagonal])):
            return np.array(diagonal), np.array(off_diagonal)
        off_diagonal.append(length)
        basis.append(np.asarray(image / length, dtype=np.float64))
