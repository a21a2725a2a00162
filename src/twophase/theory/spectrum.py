"""Estimate effective progress from what a run observes: its anchors and its pseudo-gradients.

In the mode model `g = sigma x`, so between rounds `dg = sigma dx` whatever momentum and restarts did. With noise in
every g the plain ratio `<dg, dx> / <dx, dx>` is biased, because dx_t holds the noise of g_t, and so does dg_t. The
previous step dx_{t-1} holds neither the noise of g_t nor that of g_{t+1}: it is the instrument,

    sigma = sum_t <dg_t, dx_{t-1}> / sum_t <dx_t, dx_{t-1}>,    dx_t = x_{t+1} - x_t,  dg_t = g_{t+1} - g_t.

Limits. The noise must be white between rounds and the curvature constant over the window. Several modes give an
average with weights `<dx_t, dx_{t-1}>` that may be negative, so the estimate can leave their range; it is reported
as it is, above 1 too. The standard error takes coordinates as independent samples: noise that is correlated between
coordinates makes it too small, modes of different sigma count as error and make it larger.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from twophase.theory.inputs import Floats, check_count, check_numbers


@dataclass(frozen=True, slots=True, eq=False)
class ProgressEstimate:
    """Hold estimated effective progress, of all coordinates together (shape ()) or of each block (shape (blocks,)).

    Args:
        sigma: the estimate; nan where there is none to use. Not clipped: it may exceed 1.
        standard_error: its standard error; nan where there is no estimate, with a single coordinate, and from products.
        usable: whether there is an estimate: the denominator is positive and the ratio positive and finite. Where it is
            False, keep what was used before (a period, for example).
        labels: the blocks' labels in the order of `sigma`, sorted; None for one estimate.
    """

    sigma: Floats
    standard_error: Floats
    usable: NDArray[np.bool_]
    labels: NDArray[Any] | None = None


def estimate_progress(
    anchors: ArrayLike, pseudo_gradients: ArrayLike, *, blocks: ArrayLike | None = None
) -> ProgressEstimate:
    """Return the effective progress from recorded anchors and pseudo-gradients.

    `sigma = sum_t <dg_t, dx_{t-1}> / sum_t <dx_t, dx_{t-1}>`. Standard error, with
    `u_i = sum_t dx_{t-1,i} (dg_{t,i} - sigma dx_{t,i})` over n coordinates:
    `sqrt(n / (n - 1) sum_i u_i^2) / sum_t <dx_t, dx_{t-1}>`.

    Args:
        anchors: x_t at which g_t was measured, shape (rounds, coordinates), rounds >= 3.
        pseudo_gradients: g_t, the same shape.
        blocks: a label (whole number or text) for each coordinate, shape (coordinates,), for an estimate a block.

    Returns:
        ProgressEstimate of shape (), or (blocks,) with the labels sorted. Infinities and nan in the data are no error:
        their estimate is not usable.

    Raises:
        ValueError: shapes that do not fit, fewer than 3 rounds, or values that are not numbers.

    Source: theory note R29.

    >>> x = np.array([[1.0, 2.0], [0.7, 1.4], [0.3, 0.6], [-0.1, -0.2]])
    >>> float(estimate_progress(x, 0.5 * x).sigma)
    0.5
    """
    where = "estimate_progress"
    x, g = check_numbers(where, "anchors", anchors), check_numbers(where, "pseudo_gradients", pseudo_gradients)
    if x.ndim != 2 or x.shape != g.shape or x.shape[1] == 0 or len(x) < 3:
        raise ValueError(
            f"{where}: anchors have shape {x.shape} and pseudo_gradients {g.shape}; give both as (rounds, "
            "coordinates), with at least 3 rounds"
        )
    estimator = ProgressEstimator(x.shape[1], blocks)
    for anchor, pseudo_gradient in zip(x, g, strict=True):
        estimator.add(anchor, pseudo_gradient)
    return estimator.estimate()


class ProgressEstimator:
    """Hold the estimate of `estimate_progress`, round by round: the same numbers from O(dimension) memory.

    Args:
        dimension: number of coordinates, >= 1.
        blocks: a label for each coordinate, shape (dimension,), for an estimate a block.

    Raises:
        ValueError: a dimension below 1, or labels that do not fit it.

    >>> estimator = ProgressEstimator(2)
    >>> for x in np.array([[1.0, 2.0], [0.7, 1.4], [0.3, 0.6]]):
    ...     estimator.add(x, 0.5 * x)
    >>> float(estimator.estimate().sigma), estimator.rounds
    (0.5, 3)
    """

    def __init__(self, dimension: int, blocks: ArrayLike | None = None) -> None:
        self.dimension = check_count("ProgressEstimator", "dimension", dimension)
        labels = np.zeros(dimension, int) if blocks is None else np.asarray(blocks)
        if labels.shape != (dimension,) or labels.dtype.kind not in "iuUb":
            raise ValueError(
                f"ProgressEstimator: blocks have shape {labels.shape} and type {labels.dtype}; give a whole number or "
                f"a text for each coordinate, shape ({dimension},)"
            )
        unique, self._members, self._sizes = np.unique(labels, return_inverse=True, return_counts=True)
        self._labels = None if blocks is None else unique
        self.reset()

    def reset(self) -> None:
        """Begin a new window: forget everything, the last anchor too."""
        self.rounds = 0
        """Rounds added since the window began; an estimate needs 3."""
        self._last: tuple[Floats, Floats] | None = None
        self._step: Floats | None = None
        # Sums over rounds for each coordinate, of dx_{t-1} dg_t and of dx_{t-1} dx_t.
        self._changes, self._steps = np.zeros(self.dimension), np.zeros(self.dimension)

    def add(self, anchor: ArrayLike, pseudo_gradient: ArrayLike) -> None:
        """Take in a round.

        Args:
            anchor: x_t before the round's outer step, shape (dimension,).
            pseudo_gradient: g_t, measured there, averaged over replicas, shape (dimension,).

        Raises:
            ValueError: another shape, or values that are not numbers.
        """
        where = "ProgressEstimator.add"
        # Copies: a run's anchor changes in place.
        x, g = check_numbers(where, "anchor", anchor), check_numbers(where, "pseudo_gradient", pseudo_gradient)
        for what, values in (("anchor", x), ("pseudo_gradient", g)):
            if values.shape != (self.dimension,):
                raise ValueError(f"{where}: {what} has shape {values.shape}; give ({self.dimension},)")
        with np.errstate(all="ignore"):
            if self._last is not None:
                step, change = x - self._last[0], g - self._last[1]
                if self._step is not None:
                    self._changes += self._step * change
                    self._steps += self._step * step
                self._step = step
        self._last = (x, g)
        self.rounds += 1

    def estimate(self) -> ProgressEstimate:
        """Return the estimate from the window so far; not usable before the third round."""
        with np.errstate(all="ignore"):
            numerator, denominator = self._total(self._changes), self._total(self._steps)
            sigma, usable = _usable(numerator / denominator, denominator)
            residuals = self._changes - (numerator / denominator)[self._members] * self._steps
            spread = self._total(residuals**2) * self._sizes / (self._sizes - 1)
            error = np.where(usable & (self._sizes > 1), np.sqrt(spread) / denominator, np.nan)
        shape = () if self._labels is None else sigma.shape
        return ProgressEstimate(sigma.reshape(shape), error.reshape(shape), usable.reshape(shape), self._labels)

    def _total(self, values: Floats) -> Floats:
        """Return the sums over the coordinates of each block."""
        if self._labels is None:
            return values.sum(keepdims=True)  # pairwise, where bincount adds one after the other
        return np.bincount(self._members, weights=values, minlength=len(self._sizes)).astype(np.float64)


def estimate_from_products(step_products: ArrayLike, change_products: ArrayLike) -> ProgressEstimate:
    """Return the effective progress from inner products, which a distributed run can all-reduce as scalars.

    `sigma = sum_t <dg_t, dx_{t-1}> / sum_t <dx_t, dx_{t-1}>`.

    Args:
        step_products: `<dx_t, dx_{t-1}>`, one a round from the third pseudo-gradient on, shape (rounds,), or
            (rounds, blocks) for an estimate a block.
        change_products: `<dg_t, dx_{t-1}>`, the same shape.

    Returns:
        ProgressEstimate of shape (), or (blocks,), without standard errors (they would need the coordinates). Products
        that are infinite or nan are no error: their estimate is not usable.

    Raises:
        ValueError: shapes that do not fit, no rounds, or values that are not numbers.

    Source: theory note R29.

    >>> float(estimate_from_products([1.0, 0.5], [0.5, 0.25]).sigma)
    0.5
    """
    where = "estimate_from_products"
    steps = check_numbers(where, "step_products", step_products)
    changes = check_numbers(where, "change_products", change_products)
    if steps.ndim not in (1, 2) or steps.shape != changes.shape or steps.size == 0:
        raise ValueError(
            f"{where}: step_products have shape {steps.shape} and change_products {changes.shape}; give both as "
            "(rounds,) or (rounds, blocks), from the third pseudo-gradient on"
        )
    with np.errstate(all="ignore"):
        denominator = steps.sum(axis=0)
        sigma, usable = _usable(changes.sum(axis=0) / denominator, denominator)
    return ProgressEstimate(sigma, np.full(sigma.shape, np.nan), usable)


def _usable(ratio: Floats, denominator: Floats) -> tuple[Floats, NDArray[np.bool_]]:
    """Return the ratio, nan where it is no estimate, and whether it is one."""
    usable = np.asarray((denominator > 0) & (ratio > 0) & np.isfinite(ratio))
    return np.where(usable, ratio, np.nan), usable
