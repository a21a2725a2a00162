"""Check numbers where they enter the theory. A ValueError names the argument, its range and the value."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats: TypeAlias = NDArray[np.float64]
Whole: TypeAlias = NDArray[np.int64]

_LARGEST_COUNT = 2**53 - 1


def numbers(name: str, value: ArrayLike, low: float = -np.inf, high: float = np.inf) -> Floats:
    """Return finite numbers from `low` to `high` as float64."""
    try:
        values = np.asarray(value, dtype=np.float64)
    except OverflowError:  # an int beyond all doubles
        values = np.asarray(np.inf)
    wrong = ~(np.isfinite(values) & (values >= low) & (values <= high))
    if wrong.any():
        raise ValueError(f"{name} must be finite and in [{low:g}, {high:g}], got {values[wrong][0]:g}")
    return values


def counts(name: str, value: ArrayLike, least: int = 1) -> Whole:
    """Return whole numbers >= `least`, below 2^53."""
    values = numbers(name, value, least, _LARGEST_COUNT)
    if np.any(values != np.floor(values)) or not values.size:
        raise ValueError(f"{name} must be whole numbers >= {least}, got {value!r:.100}")
    return values.astype(np.int64)


def count(name: str, value: ArrayLike, least: int = 1) -> int:
    """Return one such number."""
    values = counts(name, value, least)
    if values.ndim:
        raise ValueError(f"{name} must be one number, got {value!r:.100}")
    return int(values)


def progress_of(sigma: ArrayLike) -> Floats:
    """Return `sigma` with its modes along the last axis, at least one; a single number is one mode."""
    values = np.atleast_1d(numbers("sigma", sigma, 0, 1))
    if not values.shape[-1]:
        raise ValueError("sigma must have at least one mode, got none")
    return values


def shares(weights: ArrayLike | None, modes: int) -> Floats:
    """Return the modes' weights, normalised to sum 1; equal ones for None."""
    if weights is None:
        return np.full(modes, 1 / modes)
    values = np.atleast_1d(numbers("weights", weights, 0))
    if values.shape != (modes,) or not values.any():
        raise ValueError(f"weights must be one for each of {modes} modes, not all 0, got {weights!r:.100}")
    scaled = values / values.max()  # first, so that the sum of huge ones does not overflow
    return scaled / scaled.sum()
