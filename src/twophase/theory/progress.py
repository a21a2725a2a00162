"""Compute effective progress: the share of a mode that one inner phase of gradient descent removes."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from twophase.theory.checks import Floats, counts, numbers

_ROUNDING = 1e-12  # an inner_lr of 1 / eigenvalue may make a product beyond 1 by that much


def effective_progress(eigenvalue: ArrayLike, inner_lr: ArrayLike, inner_steps: ArrayLike) -> Any:
    """Return the share of a mode that one inner phase of gradient descent removes.

    `sigma = 1 - (1 - inner_lr eigenvalue)^inner_steps`, so that the pseudo-gradient is `g = sigma x`. It holds for
    deterministic gradient descent on a quadratic, with one replica or equal data. Replicas with different data or
    AdamW inner steps are outside the model.

    Args:
        eigenvalue: lambda >= 0 of the mode's curvature, any shape.
        inner_lr: eta >= 0 of the inner gradient descent; `inner_lr * eigenvalue` must not exceed 1.
        inner_steps: S >= 1, inner steps a round.

    Returns:
        sigma in [0, 1], of the broadcast shape; accurate for tiny eigenvalues too.

    Source: paper section 2, equation for g_t and sigma; theory note R1.

    >>> float(effective_progress(0.5, 1.0, 3))
    0.875
    """
    values, rates = numbers("eigenvalue", eigenvalue, 0), numbers("inner_lr", inner_lr, 0)
    steps = counts("inner_steps", inner_steps)
    with np.errstate(over="ignore", divide="ignore"):  # log1p(-1) = -inf is meant: the mode is removed at once
        product = _step("inner_lr * eigenvalue", values * rates)
        # A product below all doubles of full precision is taken with the steps first, which is all that counts there.
        tiny = np.maximum(values, rates) * steps * np.minimum(values, rates)
        return np.where(product < 1e-290, np.minimum(tiny, 1.0), -np.expm1(steps * np.log1p(-product)))[()] + 0.0


def scheduled_progress(
    eigenvalue: ArrayLike, inner_lrs: ArrayLike, *, weight_decay: float = 0.0, clip: bool = False
) -> Any:
    """Return the share of a mode that an inner phase removes if its learning rate changes from step to step.

    `sigma = 1 - prod_t (1 - eta_t (lambda + decay))`. Of a preconditioned optimizer with the step `-eta P^-1 gradient`
    and P held fixed over the round, the eigenvalues are those of `P^-1/2 H P^-1/2`. An inner optimizer that averages
    gradients (AdamW's first moment, coefficient b) takes such steps only of modes with `eta lambda` well below `1 - b`.

    Args:
        eigenvalue: lambda >= 0 of the (preconditioned) curvature, any shape.
        inner_lrs: eta_t >= 0 of each inner step of the round, in order, shape (S,), S >= 1.
        weight_decay: decoupled weight decay, >= 0.
        clip: True to cut a step beyond the minimum, `eta_t (lambda + decay) > 1`, to one that reaches it: the mode
            counts as removed. False refuses such a mode.

    Returns:
        sigma in [0, 1], of the shape of `eigenvalue`.

    Source: paper section 2 (sigma for a constant learning rate); theory note R1.

    >>> float(scheduled_progress(0.5, [1.0, 0.5, 0.0]))
    0.625
    """
    values, rates = numbers("eigenvalue", eigenvalue, 0), numbers("inner_lrs", inner_lrs, 0)
    if rates.ndim != 1 or not rates.size:
        raise ValueError(f"inner_lrs must be one for each inner step, shape (S,), got shape {rates.shape}")
    total = values + numbers("weight_decay", weight_decay, 0)
    log_product = np.zeros_like(total)  # one step after the other: no array of modes x steps
    with np.errstate(divide="ignore", over="ignore"):
        for rate in rates:
            step = rate * total
            step = np.minimum(step, 1.0) if clip else _step("inner_lr * (eigenvalue + weight_decay)", step)
            log_product = log_product + np.log1p(-step)
    return -np.expm1(log_product)[()] + 0.0


def _step(name: str, product: Floats) -> Floats:
    """Return a product that does not exceed 1, where gradient descent would overshoot."""
    if np.any(product > 1 + _ROUNDING):
        raise ValueError(f"{name} must be at most 1, got {np.max(product):g}; lower inner_lr")
    return np.minimum(product, 1.0)
