"""Draw the replicas' disturbances of a rollout, or take those that the caller gives."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from twophase.theory.inputs import Floats, check_count, check_counts, check_finite


def disturbance(
    where: str, noise: ArrayLike, replicas: int, seeds: int | Sequence[int] | None, *, size: tuple[int, int]
) -> Floats:
    """Return the replicas' mean disturbance, (rounds, [seeds], modes): from its standard deviation, or as given."""
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
        return values.mean(axis=1)
    if values < 0:
        raise ValueError(f"{where}: noise is {values.item()!r}; a standard deviation is >= 0")
    if seeds is None:
        return values * _draws(0, replicas, size) if values else np.zeros(size)
    numbers = check_counts(where, "seeds", seeds, least=0 if np.ndim(seeds) else 1)
    drawn = [
        _draws(seed, replicas, size) for seed in (numbers.ravel().tolist() if numbers.ndim else range(int(numbers)))
    ]
    return values * np.stack(drawn, axis=1)


def _draws(seed: int, replicas: int, size: tuple[int, int]) -> Floats:
    """Draw standard normals; return their mean over the replicas, (rounds, modes), a stream for each replica."""
    total = np.zeros(size)
    for replica in range(replicas):
        stream = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(replica,)))
        total += stream.standard_normal(size)
    return total / replicas
