"""Compute eigenvalues of a large symmetric matrix from its products alone: the largest, and the density of all.

Source: Ghorbani, Krishnan and Xiao, "An investigation into neural net optimization via Hessian eigenvalue density"
(2019).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from scipy.linalg import eigh_tridiagonal
from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigsh

from twophase.theory.inputs import Floats

Product = Callable[[Floats], Floats]

_ACCURACY = 1e-3  # relative, of the largest eigenvalues
_ROOM = 1 << 27  # numbers that the vectors of a Lanczos run may take (1 GiB); larger matrices keep fewer vectors
_SMALL = 64  # coordinates up to which a matrix is decomposed exactly


def lanczos(product: Product, start: Floats, steps: int) -> tuple[Floats, Floats]:
    """Return the tridiagonal matrix of a symmetric matrix in the Krylov space of a vector: diagonal, off-diagonal.

    Every new vector is made orthogonal to all before, twice: without that, copies of the largest eigenvalues appear.
    It ends after `steps` vectors, or where the space has no more dimensions.
    """
    basis = np.zeros((min(steps, start.size), start.size))
    basis[0] = start / np.linalg.norm(start)
    diagonal: list[float] = []
    off_diagonal: list[float] = []
    for step in range(len(basis)):
        image = product(basis[step])
        diagonal.append(float(basis[step] @ image))
        for _ in range(2):
            image = image - basis[: step + 1].T @ (basis[: step + 1] @ image)
        length = float(np.linalg.norm(image))
        # Below rounding the space is exhausted. (Rounding of float32 products is larger and does not stop here; what
        # follows from it has next to no weight in the start.)
        if step + 1 == len(basis) or length <= 1e-12 * max(map(abs, [*diagonal, *off_diagonal])):
            break
        off_diagonal.append(length)
        basis[step + 1] = image / length
    return np.array(diagonal), np.array(off_diagonal)


def largest_eigenpairs(product: Product, size: int, count: int, *, floor: float = 0.0) -> tuple[Floats, Floats]:
    """Return the largest eigenvalues of a symmetric matrix, to about 0.1 %, and their vectors.

    Args:
        product: product of the matrix with a vector.
        size: rows of the matrix, >= 1.
        count: eigenvalues to return, >= 1; fewer where the matrix has fewer, or where ARPACK does not converge.
        floor: value that replaces lower ones; -inf for a matrix that is not positive semidefinite.

    Returns:
        Values (count,), descending, >= floor, and orthonormal vectors (size, count).
    """
    if size <= _SMALL:
        values, vectors = np.linalg.eigh(_matrix(product, size))
        return np.maximum(values[::-1][:count], floor), vectors[:, ::-1][:, :count]
    image = product(np.random.default_rng(0).standard_normal(size))
    count = min(count, size - 1)
    if not np.any(image):  # ARPACK refuses a matrix of zeros
        return np.zeros(count), np.eye(size, count)
    operator = LinearOperator((size, size), matvec=product, dtype=np.float64)  # pyright: ignore[reportCallIssue]
    vectors_in_memory = min(size, max(2 * count + 1, 20 if 20 * size <= _ROOM else 8))
    try:
        values, vectors = eigsh(operator, count, which="LA", v0=image, tol=_ACCURACY, ncv=vectors_in_memory)  # type: ignore[arg-type]
    except ArpackNoConvergence as error:
        values, vectors = error.eigenvalues, error.eigenvectors
    order = np.argsort(values)[::-1]
    return np.maximum(values[order], floor), vectors[:, order]


def density(
    product: Product,
    size: int,
    *,
    steps: int,
    probes: int,
    largest: tuple[Floats, Floats] | None = None,
    seed: int = 0,
    floor: float = 0.0,
) -> tuple[Floats, Floats]:
    """Return the density of eigenvalues by stochastic Lanczos quadrature.

    For a random unit vector z the eigenvalues t_j of its tridiagonal matrix are nodes of the Gauss quadrature of
    `z^T f(A) z`. The weights are the squared first components of their eigenvectors; degrees up to 2 steps - 1 are
    exact. The mean over random z is `trace f(A) / size`. The few directions that carry most of the trace have an almost
    random weight in z. They are taken out of z and counted by themselves.

    Args:
        product: product of a symmetric matrix with a vector.
        size: rows of the matrix, >= 1; up to 64 it is decomposed exactly.
        steps: Lanczos steps, >= 1; fewer where their vectors would take more than 1 GiB, but not below 8.
        probes: random vectors, >= 1.
        largest: largest eigenvalues of the matrix, fewer than `size`, and their vectors; see `largest_eigenpairs`.
        seed: seed of the random vectors.
        floor: value that replaces lower ones, as in `largest_eigenpairs`.

    Returns:
        Eigenvalues, ascending and >= floor, and the share of all eigenvalues that each stands for; the shares sum to 1.

    Source: Golub and Welsch (1969). Ubaru, Chen and Saad, "Fast estimation of tr(f(A)) via stochastic Lanczos
    quadrature" (2017). The largest apart as in Meyer et al., "Hutch++" (2021).

    >>> nodes, weights = density(lambda v: np.array([1.0, 2.0, 5.0]) * v, 3, steps=3, probes=1)
    >>> nodes.round(9).tolist(), round(float(nodes @ weights), 9)
    ([1.0, 2.0, 5.0], 2.666666667)
    """
    if size <= _SMALL:
        return np.maximum(np.linalg.eigvalsh(_matrix(product, size)), floor), np.full(size, 1 / size)
    values, vectors = largest or (np.zeros(0), np.zeros((size, 0)))
    generator = np.random.default_rng(seed)
    nodes, weights = [values], [np.full(len(values), 1 / size)]

    def rest(vector: Floats) -> Floats:
        return vector - vectors @ (vectors.T @ vector)

    for _ in range(probes):
        start = rest(generator.choice([-1.0, 1.0], size))
        tridiagonal = lanczos(lambda v: rest(product(v)), start, min(steps, max(_ROOM // size, 8)))
        ritz_values, ritz_vectors = eigh_tridiagonal(*tridiagonal)
        nodes.append(np.maximum(ritz_values, floor))  # rounding can make zeros a little negative
        weights.append(ritz_vectors[0] ** 2 * (1 - len(values) / size) / probes)
    order = np.argsort(np.concatenate(nodes), kind="stable")
    return np.concatenate(nodes)[order], np.concatenate(weights)[order]


def _matrix(product: Product, size: int) -> Floats:
    matrix = np.stack([product(column) for column in np.eye(size)])
    return (matrix + matrix.T) / 2
