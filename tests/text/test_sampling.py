"""Shuffles without memory: permutations by formula, and which window a replica reads when."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from twophase.text.sampling import permute, window_of

words64 = st.integers(0, 2**64 - 1)
keys = st.tuples(words64, words64)
M = 2**64 - 1


def slow(place: int, n: int, key: tuple[int, int]) -> int:
    """One value of the permutation, with Python's own integers, written from the definition."""
    half = 1
    while 4**half < n:
        half += 1
    round_keys = np.random.Philox(key=key[0] + 2**64 * key[1]).random_raw(8).tolist()
    while True:
        high, low = divmod(place, 2**half)
        for round_key in round_keys:
            z = (low + round_key) & M
            z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & M
            z = ((z ^ z >> 27) * 0x94D049BB133111EB) & M
            high, low = low, high ^ ((z ^ z >> 31) % 2**half)
        place = high * 2**half + low
        if place < n:
            return place


@given(st.one_of(st.integers(1, 70), st.integers(1, 5000)), keys)
def test_every_value_comes_once(n: int, key: tuple[int, int]):
    """The values at 0 … n-1 are 0 … n-1, each once, for every n and key."""
    assert np.array_equal(np.sort(permute(np.arange(n), n, key)), np.arange(n))


@given(st.data(), st.integers(1, 2**62), keys)
def test_equals_the_definition_in_whole_numbers(data: st.DataObject, n: int, key: tuple[int, int]):
    """NumPy's wrapping words give what Python's integers give, up to the largest n, for places of any shape."""
    places = data.draw(st.lists(st.integers(0, n - 1), min_size=4, max_size=4))
    expected = np.array([slow(place, n, key) for place in places]).reshape(2, 2)
    for dtype in (np.int64, np.uint64):
        permuted = permute(np.array(places, dtype).reshape(2, 2), n, key)
        assert permuted.dtype == np.int64
        assert np.array_equal(permuted, expected)
    assert permute(np.array(places[0]), n, key) == expected[0, 0]


def test_golden_values():
    """The order of a run stays the same over versions: these values were printed once, and are a permutation."""
    golden = [1, 3, 5, 4, 2, 0]
    assert sorted(golden) == list(range(6))
    assert golden == [slow(place, 6, (0, 0)) for place in range(6)] == permute(np.arange(6), 6, (0, 0)).tolist()
    large = permute(np.array([0, 1, 10**9]), 10**9 + 1, (7, 8)).tolist()
    assert large == [273086950, 881685358, 362386292]
    assert large == [slow(place, 10**9 + 1, (7, 8)) for place in (0, 1, 10**9)]


def test_every_value_is_as_likely_at_every_place():
    """Over many keys, consecutive ones in either word, values are uniform at each place (chi-square at 1e-6)."""
    n = 7
    for make in (lambda k: (k, 0), lambda k: (0, k)):
        table = np.zeros((n, n))
        for k in range(20 * n):
            table[np.arange(n), permute(np.arange(n), n, make(k))] += 1
        # A sum of permutation matrices has fixed rows and columns: (n-1)^2 degrees of freedom, of variance n/(n-1).
        statistic = ((table - 20) ** 2 / 20).sum() * (n - 1) / n
        assert stats.chi2.sf(statistic, (n - 1) ** 2) > 1e-6
        assert stats.chi2.cdf(statistic, (n - 1) ** 2) > 1e-6


@given(st.integers(1, 40), st.integers(0, 5), st.integers(0, 2**64), st.integers(0, 9))
def test_an_epoch_reads_every_window_once(windows: int, replica: int, seed: int, epoch: int):
    """Samples e w … (e+1) w - 1 are a permutation of the w windows."""
    order = window_of(seed, replica, np.arange(epoch * windows, (epoch + 1) * windows), windows)
    assert sorted(order.tolist()) == list(range(windows))


def test_samples_may_be_asked_for_in_any_batches():
    """Batches across the borders of epochs and of the remembered blocks give what single samples give."""
    windows = 10_007  # more than two blocks
    whole = window_of(3, 1, np.arange(2 * windows), windows)
    assert np.array_equal(np.sort(whole[windows:]), np.arange(windows))
    for start in (0, 4090, 8190, 10_000, 14_000):
        batch = window_of(3, 1, np.arange(start, start + 33), windows)
        assert np.array_equal(batch, whole[start : start + 33])
        assert window_of(3, 1, np.array([start]), windows)[0] == whole[start]
    jumbled = np.array([20_000, 3, 9_000, 10_006, 10_007])
    assert np.array_equal(window_of(3, 1, jumbled, windows), whole[jumbled])


def test_seed_replica_and_epoch_each_change_the_order():
    """All orders of two seeds, replicas and epochs differ; a seed counts modulo 2^64."""
    windows = 50
    orders = [
        tuple(window_of(seed, replica, np.arange(epoch * windows, (epoch + 1) * windows), windows).tolist())
        for seed in (0, 1)
        for replica in (0, 1, 2)
        for epoch in (0, 1, 2)
    ]
    assert len(set(orders)) == len(orders)
    assert np.array_equal(window_of(2**64 + 1, 0, np.arange(9), 50), window_of(1, 0, np.arange(9), 50))
