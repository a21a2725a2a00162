"""Which window is read when: shuffles that need no memory, so that a resumed run reads on where it stopped.

A shuffled list of a billion windows would take gigabytes in every process. A keyed permutation is a formula instead.
Any process computes the place of any window in any epoch on demand, without earlier state.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

Index = NDArray[np.int64]

_ROUNDS = 8  # four make a secure cipher of wide words (Luby and Rackoff); words of a few bits want more
_BLOCK = 4096
"""Samples with windows that are computed together: NumPy's overhead is then shared by many small batches."""


def permute(index: NDArray[np.integer[Any]], n: int, key: tuple[int, int]) -> Index:
    """Return a pseudo-random permutation of 0 … n-1, at any places of it.

    A balanced Feistel network (L, R) <- (R, L xor f_r(R)) permutes the 4^h >= n words of 2h bits for any f. Its value
    is mapped again until it is below n (cycle walking), which permutes 0 … n-1: fewer than four turns on average.

    Args:
        index: places, in [0, n), of any shape.
        n: length of the permutation, 1 <= n <= 2^62.
        key: two numbers, taken modulo 2^64; another key is another permutation.

    Returns:
        Values in [0, n), in the shape of `index`.

    Source: Black and Rogaway, "Ciphers with arbitrary finite domains" (2002); the round keys are raw words of Philox,
        which NumPy promises to keep.

    >>> permute(np.arange(6), 6, key=(0, 0)).tolist()
    [1, 3, 5, 4, 2, 0]
    """
    positions = np.asarray(index)
    half = max((n - 1).bit_length() + 1, 2) // 2
    keys = _round_keys(key[0] % 2**64, key[1] % 2**64)
    values = _feistel(positions.astype(np.uint64).reshape(-1), half, keys)
    outside = np.flatnonzero(values >= n)
    while outside.size:
        again = _feistel(values[outside], half, keys)
        values[outside] = again
        outside = outside[again >= n]
    return values.astype(np.int64).reshape(positions.shape)


def window_of(seed: int, replica: int, sample: Index, windows: int) -> Index:
    """Return the window that a replica reads as its sample number i: a pure function of (seed, replica, i).

    Epoch e = i // windows reads every window once, in the order of the permutation of key (seed, replica, e).

    Args:
        seed: seed of the run, >= 0; taken modulo 2^64.
        replica: >= 0, below 2^24.
        sample: (n,), numbers i >= 0.
        windows: number of the replica's windows, >= 1.

    Returns:
        (n,), in [0, windows).

    >>> sorted(window_of(0, 0, np.arange(5, 10), 5).tolist())
    [0, 1, 2, 3, 4]
    """
    chosen = np.empty(sample.shape, np.int64)
    epoch, position = np.divmod(sample, windows)
    block = position // _BLOCK
    for e, b in set(zip(epoch.tolist(), block.tolist(), strict=True)):
        selected = (epoch == e) & (block == b)
        chosen[selected] = _order(seed % 2**64, replica, e, b, windows)[position[selected] - b * _BLOCK]
    return chosen


@lru_cache(maxsize=64)
def _order(seed: int, replica: int, epoch: int, block: int, windows: int) -> Index:
    """Return a block of an epoch's order; cached, because the next batches read it as well."""
    positions = np.arange(block * _BLOCK, min((block + 1) * _BLOCK, windows))
    return permute(positions, windows, (seed, (replica << 40) + epoch))


@lru_cache(maxsize=256)
def _round_keys(low: int, high: int) -> NDArray[np.uint64]:
    return np.random.Philox(key=low + (high << 64)).random_raw(_ROUNDS)


def _feistel(words: NDArray[np.uint64], half: int, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mix words of 2 half bits; one-dimensional, because NumPy warns of overflow in scalars alone."""
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    high, low = words >> shift, words & mask
    for key in keys:
        mixed = low + key
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)  # the finaliser of SplitMix64
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        high, low = low, high ^ ((mixed ^ (mixed >> np.uint64(31))) & mask)
    return (high << shift) | low
