"""Draw the replicas' disturbances of a rollout, or take those that the caller gives."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from twophase.theory.checks import Floats, count, counts, numbers


def disturbance(noise: ArrayLike, replicas: int, seeds: int | Sequence[int] | None, size: tuple[int, int]) -> Floats:
    """Return the replicas' mean disturbance, (rounds, [seeds], modes): from its standard deviation, or as given."""
    values, number = numbers("noise", noise), count("replicas", replicas)
    if values.ndim:
        if values.ndim != 3 or values.shape[::2] != size or not values.shape[1]:
            shape = f"(rounds, replicas, modes) = ({size[0]}, replicas, {size[1]})"
            raise ValueError(f"noise must be a standard deviation or have shape {shape}, got shape {values.shape}")
        if number not in (1, values.shape[1]) or seeds is not None:
            raise ValueError(f"replicas and seeds must be left out with explicit noise, got {replicas} and {seeds}")
        return values.mean(axis=1)
    deviation = float(numbers("noise", noise, 0))
    if seeds is None:
        return deviation * _draws(0, number, size) if deviation else np.zeros(size)
    chosen = counts("seeds", seeds, least=0 if np.ndim(seeds) else 1)
    each = chosen.ravel().tolist() if chosen.ndim else range(int(chosen))
    return deviation * np.stack([_draws(seed, number, size) for seed in each], axis=1)


def _draws(seed: int, replicas: int, size: tuple[int, int]) -> Floats:
    """Draw standard normals; return their mean over the replicas, (rounds, modes), a stream for each replica."""
    streams = [np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(each,))) for each in range(replicas)]
    total = np.zeros(size)
    for stream in streams:
        total += stream.standard_normal(size)
    return total / replicas
