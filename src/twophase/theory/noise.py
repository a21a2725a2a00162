"""Draw the replicas' disturbances of a rollout, or take those that the caller gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from twophase.policies.checks import check_count
from twophase.theory.inputs import Floats, check_counts, check_numbers


@dataclass(frozen=True, slots=True)
class Noise:
    """Hold the replicas' disturbances: their mean and their mean square, (rounds, [seeds], modes)."""

    mean: Floats | None
    square: Floats | None
    replicas: int

    def of(self, modes: slice) -> Noise:
        """Return the part of some modes."""
        if self.mean is None or self.square is None:
            return self
        return Noise(self.mean[..., modes], self.square[..., modes], self.replicas)


def disturbance(
    where: str, noise: ArrayLike, replicas: int, seeds: int | Sequence[int] | None, *, size: tuple[int, int]
) -> Noise:
    """Return the replicas' noise; without noise and seeds there is none."""
    values, replicas = check_finite(where, "noise", noise), check_count(where, "replicas", replicas)
    if values.ndim:
        if values.ndim != 3 or values.shape[::2] != size or values.shape[1] == 0:
            raise ValueError(
                f"{where}: noise has shape {values.shape}; give a standard deviation, or every disturbance: shape "
                f"(rounds, replicas, modes) = ({size[0]}, replicas, {size[1]})"
            )
        if replicas not in (1, values.shape[1]):
            raise ValueError(f"{where}: replicas is {replicas}, but noise holds {values.shape[1]}; leave replicas out")
        if seeds is not None:
            raise ValueError(f"{where}: seeds go with noise that is drawn; leave them out, or give noise as a number")
        return Noise(values.mean(axis=1), (values**2).mean(axis=1), values.shape[1])
    if values < 0:
        raise ValueError(f"{where}: noise is {values.item()!r}; a standard deviation is >= 0")
    if seeds is None:
        if not values:
            return Noise(None, None, replicas)
        mean, square = _draws(0, replicas, size)
        return Noise(values * mean, values**2 * square, replicas)
    if np.ndim(seeds) == 0:
        chosen = range(check_count(where, "seeds", seeds))
    else:
        chosen = check_counts(where, "seeds", seeds, least=0).ravel().tolist()
    means, squares = zip(*(_draws(seed, replicas, size) for seed in chosen), strict=True)
    return Noise(values * np.stack(means, axis=1), values**2 * np.stack(squares, axis=1), replicas)


def _draws(seed: int, replicas: int, size: tuple[int, int]) -> tuple[Floats, Floats]:
    """Draw standard normals; return mean and mean square over replicas, (rounds, modes), a stream for each replica."""
    total, square = np.zeros(size), np.zeros(size)
    for replica in range(replicas):
        stream = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(replica,)))
        draw = stream.standard_normal(size)
        total += draw
        square += draw * draw
    return total / replicas, square / replicas


def check_finite(where: str, what: str, value: ArrayLike) -> Floats:
    """Return `value` as a float64 array of finite numbers; else raise a ValueError."""
    array = check_numbers(where, what, value)
    if not np.isfinite(array).all():
        raise ValueError(f"{where}: {what} holds {array[~np.isfinite(array)][0].item()!r}; give finite numbers")
    return array
