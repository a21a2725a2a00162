"""Tabulate restart factors up to a largest period: in doubles, and with more digits where these do not suffice.

The recurrence begins anew from the exact state every `_STRETCH` rounds, so that rounding cannot pile up. Entries next
to a zero of chi, or where |chi| crosses 1, are computed once more by themselves. Modes that collapse (nearly
nilpotent), alternate in sign (s > 1 + b) or hardly move (s below 2^-400) have twice the digits throughout.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from twophase.theory.inputs import Floats
from twophase.theory.kernel import Mode
from twophase.theory.powers import LOG_2, Column, Power, Signs, Whole, log_factors, nearly_nilpotent

_STRETCH = 64  # rounds between two exact states, a power of 2
_CHUNK = 4096  # modes at a time: their arrays stay in the processor's cache
_NEAR_ZERO = -9.2  # log of |chi| relative to its envelope below which an entry is computed anew
_NEAR_ONE = 0.05  # |log chi| below which it is
_COLLAPSE = 0.1  # spectral radius below which a round cancels more than a digit: nearly nilpotent modes


def table(points: Mode, rounds: int) -> tuple[Signs, Floats]:
    """Return the sign and log|chi_K| of the modes (along one axis) for K = 1 ... rounds, each (rounds, modes)."""
    width = points.size
    depth = 1  # of few modes, several stretches are done side by side
    while depth * _STRETCH < rounds and 2 * depth * width <= _CHUNK:
        depth *= 2
    groups = -(-rounds // (depth * _STRETCH))
    grid = (groups * depth, min(rounds, _STRETCH), width)
    sign, log, again = np.empty(grid, np.int8), np.empty(grid), [np.empty((3, 0), np.int64)]
    for begin in range(0, width, _CHUNK):
        modes = points[begin : begin + _CHUNK]
        side_by_side = modes.each(lambda array: np.tile(array, depth))
        for group, start in enumerate(_starts(modes, depth, groups)):
            first = group * depth
            block = slice(first, first + depth), slice(None), slice(begin, begin + _CHUNK)
            for k, places in _fill(side_by_side, start, first * _STRETCH, sign[block], log[block]):
                stretch, column = np.divmod(places, modes.size)
                again.append(np.stack([first + stretch, np.full(places.size, k), begin + column]))
    stretch, k, where = np.concatenate(again, axis=1)
    sign[stretch, k, where], log[stretch, k, where] = log_factors(points, where, stretch * _STRETCH + k + 1)
    shape = grid[0] * grid[1], width
    return sign.reshape(shape)[:rounds], log.reshape(shape)[:rounds]


def _starts(modes: Mode, depth: int, groups: int) -> Iterator[Column]:
    """Return the exact states from which `depth` stretches begin side by side, one group of stretches after another."""
    columns = Column.first(modes.size)[None]
    leap = Power.one_round(modes)
    if groups * depth > 1:
        for _ in range(_STRETCH.bit_length() - 1):
            leap = leap.squared()
    while len(columns.slow) < depth:
        columns = columns.each(lambda near, far: np.concatenate([near, far]), columns.after(leap))
        leap = leap.squared()
    for _ in range(groups - 1):
        yield columns.each(np.ravel)
        columns = columns.after(leap)
    yield columns.each(np.ravel)


def _fill(mode: Mode, start: Column, done: int, sign: Signs, log: Floats) -> Iterator[tuple[int, Whole]]:
    """Fill arrays of shape (stretches, rounds, modes): the periods from done + 1 on, in stretches side by side.

    Yields the rounds and the modes of all stretches (along one axis) that deserve a second look.
    """
    depth, rounds, width = log.shape
    recurrence = _Recurrence(mode, start, done + _STRETCH * np.repeat(np.arange(depth), width))
    nilpotent = nearly_nilpotent(mode[recurrence.delicate])
    rare, delicate = recurrence.delicate[nilpotent], recurrence.delicate[~nilpotent]
    exact, delicate_modes, (stretch, column) = start[delicate], mode[delicate], np.divmod(delicate, width)
    one_round = Power.one_round(delicate_modes)
    for k in range(rounds):
        # Straight into the row of the result where it is one piece of memory.
        signs = sign[0, k] if depth == 1 else np.empty(depth * width, np.int8)
        logs = log[0, k] if depth == 1 else np.empty(depth * width)
        recurrence.advance(k, signs, logs)
        if depth > 1:
            sign[:, k], log[:, k] = signs.reshape(depth, width), logs.reshape(depth, width)
        if (places := recurrence.suspects(k, logs)).size:
            yield k, places
        if delicate.size:
            exact = exact.after(one_round)
            sign[stretch, k, column], log[stretch, k, column] = exact.log_factor(delicate_modes)
    yield from ((k, rare) for k in range(rounds) if rare.size)


class _Recurrence:
    """Iterate in doubles: `n <- b n + s x`, then `x <- x - n` (heavy ball) or `x - (b n + s x)` (Nesterov).

    Rough estimates tell where doubles may not suffice: next to zeros and near |chi| = 1 (`suspects`), and all along
    (`delicate`).
    """

    def __init__(self, mode: Mode, start: Column, rounds_done: Whole) -> None:
        self.b, self.s, ahead = mode.momentum, np.where(mode.linear, 0.0, mode.step.hi), mode.nesterov
        self.x, self.n, self.exponent = start.x.hi.copy(), start.n.hi.copy(), start.exponent.copy()
        self.scaled = bool(self.exponent.any())
        self.slow = np.flatnonzero(start.slow)
        """Modes that are followed by d = 1 - x, which adds up what x loses."""
        self.d = start.d.hi[self.slow]
        self.fast = ~start.slow
        self.heavy_balls = None if ahead.all() else ~ahead
        self.all_heavy_balls = not ahead.any()
        self.push, self.look_ahead = np.empty_like(self.x), np.empty_like(self.x)
        # Rounds that cannot leave the range of doubles when they begin within [1e-30, 1e100].
        self.every = 16 if self.s.max(initial=0.0) < 1e5 else 1
        self._estimate(mode, rounds_done)

    def _estimate(self, mode: Mode, rounds_done: Whole) -> None:
        b, s = self.b, self.s
        reach = np.where(mode.nesterov, (1 + b) * s, s)
        half_trace, lead = (1 + b - reach) / 2, (1 - b - reach) / 2
        determinant = np.where(mode.nesterov, b * (1 - s), b)
        disc = half_trace * half_trace - determinant
        turning = disc < 0
        half = np.sqrt(np.abs(disc))
        with np.errstate(divide="ignore", invalid="ignore"):
            fall = np.where(turning, np.log(np.abs(determinant)) / 2, 0.0)
            envelope = np.where(turning, np.log(np.hypot(half, lead) / half) + rounds_done * fall, -np.inf)
            radius = np.where(turning, np.sqrt(np.abs(determinant)), np.abs(half_trace) + half)
        # Modes that alternate in sign (s > 1 + b, hardly a rule in use): there rounding grows with the square of the
        # rounds, next to the upper edge. A real mode with a positive trace never comes back to 1.
        delicate = (radius < _COLLAPSE) | (half_trace < 0) | mode.linear
        envelope[delicate] = -np.inf
        self.delicate = np.flatnonzero(delicate)
        self.low, self.fall = envelope + _NEAR_ZERO, fall
        """log|chi| below which a mode that oscillates is next to a zero, and what its envelope loses a round."""
        self.top, self.top_fall = float(envelope.max(initial=-np.inf)), float(fall.max(initial=-np.inf))
        """After k rounds no mode's log|chi| exceeds top + k top_fall."""

    def advance(self, number: int, signs: Signs, logs: Floats) -> None:
        """Go on by one round, and write its signs and log|chi|."""
        np.multiply(self.s, self.x, out=self.push)
        self.n *= self.b
        self.n += self.push
        step = self.n
        if not self.all_heavy_balls:
            step = np.multiply(self.b, self.n, out=self.look_ahead)
            step += self.push
            if self.heavy_balls is not None:
                np.copyto(step, self.n, where=self.heavy_balls)
        self.x -= step
        if self.slow.size:
            self.d += step[self.slow]
            stay = np.abs(self.d) <= 0.5
            if not stay.all():
                self.fast[self.slow[~stay]] = True
                self.slow, self.d = self.slow[stay], self.d[stay]
        if number % self.every == 0:
            self._rescale()
        np.abs(self.x, out=logs)
        with np.errstate(divide="ignore"):
            np.log(logs, out=logs)
        if self.scaled:
            logs += self.exponent * LOG_2
        np.subtract((self.x > 0).view(np.int8), (self.x < 0).view(np.int8), out=signs)
        signs[self.slow], logs[self.slow] = 1, np.log1p(-self.d) + 0.0

    def _rescale(self) -> None:
        size = np.maximum(np.abs(self.x), np.abs(self.n))
        if np.any((size < 1e-30) & (size > 0)) or size.max(initial=0.0) > 1e100:
            shift = np.frexp(size)[1]
            shift[self.slow] = 0
            self.x, self.n = np.ldexp(self.x, -shift), np.ldexp(self.n, -shift)
            self.exponent += shift
            self.scaled = bool(self.exponent.any())

    def suspects(self, k: int, logs: Floats) -> Whole:
        """Return the modes with a log after round k (from 0) that deserves a second look; slow ones do not."""
        self.low += self.fall
        suspect = logs < self.low
        if self.top + (k + 1) * self.top_fall > -_NEAR_ONE:
            suspect |= (np.abs(logs) < _NEAR_ONE) & self.fast
            suspect[self.delicate] = False
        return np.flatnonzero(suspect)
