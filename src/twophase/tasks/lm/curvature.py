"""Curvature of a language model by block: Gauss-Newton products, the largest eigenvalues, and the density of all.

    G = (1/N) sum_i J_i^T (diag p_i - p_i p_i^T) J_i,      J_i = d logits_i / d parameters,   p_i = softmax(logits_i)

is the generalised Gauss-Newton matrix of the mean cross-entropy over N tokens: the Hessian of the loss without the
curvature of the logits themselves. It is never formed; a product with it is a product with J, one with the small matrix
of each token, and one with J^T. Restricted to a block, all other parameters stand still.

An inner optimizer that divides the gradient by D (AdamW: `D = sqrt(v) + eps`, v the corrected second moment) takes the
step `-lr D^-1 gradient`. In the coordinates `y = D^1/2 x` that is gradient descent on a loss whose curvature is
`D^-1/2 G D^-1/2`: the modes that shrink independently are those of that matrix, which is as symmetric as G.

Source: Schraudolph, "Fast curvature matrix-vector products" (2002); Ghorbani, Krishnan and Xiao, "An investigation into
neural net optimization via Hessian eigenvalue density" (2019), for the density.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.linalg import eigh_tridiagonal
from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigsh
from torch import Tensor, nn
from torch.func import functional_call, vjp
from torch.nn.attention import SDPBackend, sdpa_kernel

Floats = NDArray[np.float64]
Product = Callable[[Floats], Floats]

_KEPT_LOGITS = 1 << 24
"""Up to this number of logits in all pieces their graphs are kept between products, which makes a product four times as
quick; beyond they are built anew each time."""
_PIECE_TOKENS = 1 << 13
"""Small batches go through the model together, up to this number of tokens: at a laptop's sizes calls cost most."""
_ACCURACY = 1e-3
"""Relative accuracy of the largest eigenvalues."""
_ROOM = 1 << 27
"""Numbers that the vectors of one Lanczos run may take (1 GiB): of larger blocks fewer are kept."""
_SMALL = 64
"""Blocks up to this size are decomposed exactly."""


class GaussNewton:
    """The Gauss-Newton matrix of a block as a linear operator.

    Args:
        model: from tokens to logits; its parameters must be finite. Gradients of it are neither read nor written.
        batches: tokens, (sequences, length) int64 each; the mean is over all their tokens. Targets are not needed: the
            matrix does not depend on them.
        names: of the block's parameters, in the order of the operator's coordinates.
        scale: what each coordinate is multiplied with on both sides, by parameter name: `D^-1/2` for the preconditioned
            matrix. None is all ones.

    Attributes:
        size: number of coordinates.
        products: how many vectors it has been applied to.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Sequence[Tensor],
        names: Sequence[str],
        scale: Mapping[str, Tensor] | None = None,
    ) -> None:
        parameters = {name: weight.detach() for name, weight in model.named_parameters()}
        self._model = model
        self._block = {name: parameters.pop(name) for name in names}
        self._still = parameters
        self._pieces = _joined(batches)
        self._tokens = sum(piece.numel() for piece in self._pieces)
        self._scale = None if scale is None else _flat([scale[name].to(self._block[name]) for name in names])
        self._kept: list[_Piece] | None = None
        self.size = sum(weight.numel() for weight in self._block.values())
        self.products = 0

    def __call__(self, vector: Floats) -> Floats:
        """The product with a vector, (size,) float64; computed in the model's own type."""
        like = next(iter(self._block.values()))
        v = torch.from_numpy(np.ascontiguousarray(vector, dtype=np.float64)).to(like)
        if self._scale is not None:
            v = v * self._scale
        parts = v.split([weight.numel() for weight in self._block.values()])
        tangent = {
            name: part.view(weight.shape) for (name, weight), part in zip(self._block.items(), parts, strict=True)
        }
        total = torch.zeros_like(v)
        with sdpa_kernel(SDPBackend.MATH):  # the others cannot be differentiated twice
            for piece in self._graphs():
                found = piece(tangent, self._tokens)
                total += _flat([found[name] for name in self._block])
        if self._scale is not None:
            total = total * self._scale
        self.products += 1
        return total.cpu().double().numpy()

    def _graphs(self) -> Any:
        if self._kept is not None:
            return self._kept
        made = (_Piece(self._model, self._block, self._still, tokens) for tokens in self._pieces)
        with torch.no_grad():
            logits = self._tokens * self._model(self._pieces[0][:1]).shape[-1]  # it also fills the rotation tables
        if logits <= _KEPT_LOGITS:
            self._kept = list(made)
            return self._kept
        return made


class _Piece:
    """The graph of some sequences: from a change of the block to that of the logits, and back."""

    def __init__(
        self, model: nn.Module, block: Mapping[str, Tensor], still: Mapping[str, Tensor], tokens: Tensor
    ) -> None:
        def logits(parameters: Mapping[str, Tensor]) -> Tensor:
            return functional_call(model, {**still, **parameters}, (tokens,))

        value, self._back = vjp(logits, dict(block))[:2]
        # J v is the transpose of u -> J^T u, which is linear: its product from behind. So both graphs can be kept,
        # and forward-mode derivatives, which would run the model anew for each product, are not needed.
        self._forward = vjp(lambda u: self._back(u)[0], torch.zeros_like(value))[1]
        self._probabilities = value.detach().softmax(-1)

    def __call__(self, tangent: Mapping[str, Tensor], tokens: int) -> dict[str, Tensor]:
        """This piece's share of the product."""
        (change,) = self._forward(dict(tangent))
        weighted = self._probabilities * change
        slope = weighted - self._probabilities * weighted.sum(-1, keepdim=True)
        return self._back(slope / tokens)[0]


def _joined(batches: Sequence[Tensor]) -> list[Tensor]:
    """The batches, neighbours of one length together as far as that saves calls."""
    pieces: list[Tensor] = []
    for tokens in batches:
        last = pieces[-1] if pieces else None
        fits = last is not None and last.shape[1] == tokens.shape[1] and last.numel() + tokens.numel() <= _PIECE_TOKENS
        if last is not None and fits:
            pieces[-1] = torch.cat([last, tokens])
        else:
            pieces.append(tokens)
    return pieces


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


# ------------------------------------------------------------------------------------------------------- eigenvalues


@dataclass(frozen=True, slots=True, eq=False)
class Density:
    """The eigenvalues of a matrix as points with weights.

    Args:
        nodes: eigenvalues, ascending, >= 0.
        weights: the share of all eigenvalues that each stands for; they sum to 1.
        exact: whether these are the eigenvalues themselves.
    """

    nodes: Floats
    weights: Floats
    exact: bool = False

    @property
    def mean(self) -> float:
        """Mean eigenvalue: the trace over the size."""
        return float(self.nodes @ self.weights)


def lanczos(product: Product, start: Floats, steps: int) -> tuple[Floats, Floats]:
    """The tridiagonal matrix of a symmetric one in the Krylov space of a vector.

    Every new vector is made orthogonal to all before, twice: without that, copies of the largest eigenvalues appear.

    Args:
        product: with the matrix.
        start: (size,), not zero.
        steps: at most so many, and no more than the space has dimensions.

    Returns:
        Diagonal (k,) and off-diagonal (k - 1,), 1 <= k <= min(steps, size).
    """
    basis = np.zeros((min(steps, start.size), start.size))
    basis[0] = start / np.linalg.norm(start)
    diagonal: list[float] = []
    beside: list[float] = []
    for step in range(len(basis)):
        left = product(basis[step])
        diagonal.append(float(basis[step] @ left))
        for _ in range(2):
            left = left - basis[: step + 1].T @ (basis[: step + 1] @ left)
        length = float(np.linalg.norm(left))
        scale = max(map(abs, [*diagonal, *beside]))
        # Where no more is left than rounding the space is exhausted. (Rounding of products in float32 is larger, and is
        # gone on with: what follows then has next to no weight in the start.)
        if step + 1 == len(basis) or length <= 1e-12 * scale:
            break
        beside.append(length)
        basis[step + 1] = left / length
    return np.array(diagonal), np.array(beside)


@dataclass(frozen=True, slots=True, eq=False)
class Eigenpairs:
    """The largest eigenvalues of a matrix.

    Args:
        values: descending, >= 0, shape (count,).
        vectors: orthonormal, shape (size, count).
    """

    values: Floats
    vectors: Floats


def largest_eigenpairs(product: Product, size: int, count: int, seed: int = 0) -> Eigenpairs:
    """The largest eigenvalues of a symmetric, positive semidefinite matrix, to about 0.1 %, and their vectors.

    Args:
        product: with the matrix.
        size: of the matrix, >= 1.
        count: how many, >= 1; fewer come back where the matrix has fewer, or where not all could be found.
        seed: of the starting vector.
    """
    if size <= _SMALL:
        values, vectors = np.linalg.eigh(_matrix(product, size))
        return Eigenpairs(np.maximum(values[::-1][:count], 0.0), vectors[:, ::-1][:, :count])
    start = np.random.default_rng(seed).standard_normal(size)
    image = product(start)
    wanted = min(count, size - 1)
    if not np.any(image):  # ARPACK refuses a matrix of zeros
        return Eigenpairs(np.zeros(wanted), np.eye(size, wanted))
    operator = LinearOperator((size, size), matvec=product, dtype=np.float64)  # pyright: ignore[reportCallIssue]
    kept = min(size, max(2 * wanted + 1, 20 if 20 * size <= _ROOM else 8))
    options: dict[str, Any] = {"which": "LA", "v0": image, "tol": _ACCURACY, "ncv": kept}
    try:
        values, vectors = eigsh(operator, wanted, **options)
    except ArpackNoConvergence as error:
        values, vectors = error.eigenvalues, error.eigenvectors
    order = np.argsort(values)[::-1]
    return Eigenpairs(np.maximum(values[order], 0.0), vectors[:, order])


def density(
    product: Product, size: int, *, steps: int, probes: int, known: Eigenpairs | None = None, seed: int = 0
) -> Density:
    """The density of eigenvalues by stochastic Lanczos quadrature.

    For a random unit vector z the eigenvalues t_j of its tridiagonal matrix, with the squared first components of their
    eigenvectors as weights, are the Gauss quadrature of `z^T f(A) z`: exact for polynomials up to degree 2 steps - 1.
    Its mean over random z is `trace f(A) / size`. One direction among many thousands has a weight in z that is mostly
    chance; so the few that carry most of the trace, where they are known, are taken out of z and counted as they are.
    A block of at most 64 coordinates is decomposed exactly.

    Args:
        product: with a symmetric, positive semidefinite matrix.
        size: of the matrix, >= 1.
        steps: of Lanczos, >= 1; fewer where their vectors would take more than 1 GiB, but not below 8.
        probes: random vectors, >= 1.
        known: its largest eigenvalues, fewer than `size`.
        seed: of the random vectors.

    Source: Golub and Welsch (1969); Ubaru, Chen and Saad, "Fast estimation of tr(f(A)) via stochastic Lanczos
    quadrature" (2017); the known ones apart as in Meyer et al., "Hutch++" (2021).

    >>> found = density(lambda v: np.array([1.0, 2.0, 5.0]) * v, 3, steps=3, probes=1)
    >>> found.nodes.round(9).tolist(), round(found.mean, 9)
    ([1.0, 2.0, 5.0], 2.666666667)
    """
    if size <= _SMALL:
        values = np.linalg.eigvalsh(_matrix(product, size))
        return Density(np.maximum(values, 0.0), np.full(size, 1 / size), exact=True)
    values, vectors = (np.zeros(0), np.zeros((size, 0))) if known is None else (known.values, known.vectors)
    generator = np.random.default_rng(seed)
    steps = min(steps, max(_ROOM // size, 8))
    nodes, weights = [values], [np.full(len(values), 1 / size)]

    def rest(vector: Floats) -> Floats:
        return vector - vectors @ (vectors.T @ vector)

    for _ in range(probes):
        start = rest(generator.choice([-1.0, 1.0], size))
        diagonal, beside = lanczos(lambda v: rest(product(v)), start, steps)
        found, first = eigh_tridiagonal(diagonal, beside)
        nodes.append(np.maximum(found, 0.0))  # rounding can make zeros a little negative
        weights.append(first[0] ** 2 * (1 - len(values) / size) / probes)
    order = np.argsort(np.concatenate(nodes), kind="stable")
    return Density(np.concatenate(nodes)[order], np.concatenate(weights)[order])


def _matrix(product: Product, size: int) -> Floats:
    matrix = np.stack([product(column) for column in np.eye(size)])
    return (matrix + matrix.T) / 2
