"""Estimate effective progress from what a run observes: its anchors and its pseudo-gradients.

In the mode model `g = sigma x`, so between rounds `dg = sigma dx` whatever momentum and restarts did. With noise in
every g the plain ratio `<dg, dx> / <dx, dx>` is biased, because dx_t holds the noise of g_t, and so does dg_t. The
previous step dx_{t-1} holds neither the noise of g_t nor that of g_{t+1}: it is the instrument.

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

from twophase.theory.inputs import Floats, check_numbers


@dataclass(frozen=True, slots=True, eq=False)
class ProgressEstimate:
    """Hold estimated effective progress, of all coordinates together (shape ()) or of each block (shape (blocks,)).

    Args:
        sigma: the estimate; nan where there is none to use. Not clipped: it may exceed 1.
        standard_error: its standard error; nan where there is no estimate, and with a single coordinate.
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

    `sigma = sum_t <dg_t, dx_{t-1}> / sum_t <dx_t, dx_{t-1}>` with `dx_t = x_{t+1} - x_t`, `dg_t = g_{t+1} - g_t`.
    Standard error, with `u_i = sum_t dx_{t-1,i} (dg_{t,i} - sigma dx_{t,i})` over n coordinates:
    `sqrt(n / (n - 1) sum_i u_i^2) / sum_t <dx_t, dx_{t-1}>`.

    Args:
        anchors: x_t at which g_t was measured, shape (rounds, coordinates), rounds >= 3.
        pseudo_gradients: g_t, averaged over replicas, the same shape.
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
    labels = np.zeros(x.shape[1], int) if blocks is None else np.asarray(blocks)
    if labels.dtype == object and all(isinstance(label, str) for label in labels.flat):  # a column of pandas
        labels = labels.astype(str)
    if labels.shape != x.shape[1:] or labels.dtype.kind not in "iuUb":
        raise ValueError(
            f"{where}: blocks have shape {labels.shape} and type {labels.dtype}; give a whole number or a text for "
            f"each coordinate, shape ({x.shape[1]},)"
        )
    unique, members, sizes = np.unique(labels, return_inverse=True, return_counts=True)

    def total(values: Floats) -> Floats:
        """Return the sums over the coordinates of each block."""
        return np.array([values[members == block].sum() for block in range(len(sizes))])

    with np.errstate(all="ignore"):
        steps, changes = np.diff(x, axis=0), np.diff(g, axis=0)
        along, across = (steps[:-1] * steps[1:]).sum(axis=0), (steps[:-1] * changes[1:]).sum(axis=0)
        denominator = total(along)
        ratio = total(across) / denominator
        usable = (denominator > 0) & (ratio > 0) & np.isfinite(ratio)
        spread = total((across - ratio[members] * along) ** 2) * sizes / (sizes - 1)
        error = np.where(usable & (sizes > 1), np.sqrt(spread) / denominator, np.nan)
        sigma = np.where(usable, ratio, np.nan)
    shape = () if blocks is None else sigma.shape
    return ProgressEstimate(
        sigma.reshape(shape), error.reshape(shape), usable.reshape(shape), None if blocks is None else unique
    )
