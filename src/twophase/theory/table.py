"""Tabulate restart factors up to a largest period: in doubles, and with more digits where these do not suffice.

The recurrence begins anew from the exact state every `_STRETCH` rounds, so that rounding cannot pile up. Entries next
to a zero of chi, or where |chi| crosses 1, are computed once more by themselves; modes that collapse (nearly nilpotent)
or alternate in sign (s > 1 + b) have twice the digits throughout.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from twophase.theory.inputs import Floats
from twophase.theory.kernel import Mode
from twophase.theory.powers import LOG_2, Column, Power, Signs, log_factors, nearly_nilpotent

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
    sign, log, again = np.empty(grid, np.int8), np.empty(grid), []
    for begin in range(0, width, _CHUNK):
        columns = slice(begin, begin + _CHUNK)
        for group, start in enumerate(_starts(points[columns], depth, groups)):
            block = (slice(group * depth, (group + 1) * depth), slice(None), columns)
            places = _fill(start, group * depth * _STRETCH, sign[block], log[block])
            again.append(places + np.array([group * depth, 0, begin]))
    stretch, k, where = np.concatenate(again).T if again else np.empty((3, 0), np.int64)
    sign[stretch, k, where], log[stretch, k, where] = log_factors(points, where, stretch * _STRETCH + k + 1)
    rows = grid[0] * grid[1]
    return sign.reshape(rows, width)[:rounds], log.reshape(rows, width)[:rounds]


def _starts(points: Mode, depth: int, groups: int) -> Iterator[Column]:
    """Return the exact states from which `depth` stretches begin side by side, one group of stretches after another."""
    columns, have = Column.first(points), 1
    if groups * depth > 1:
        leap = Power.one_round(points)
        for _ in range(_STRETCH.bit_length() - 1):
            leap = leap.squared()
        while have < depth:
            columns, leap, have = columns.joined(columns.after(leap.repeated(have))), leap.squared(), 2 * have
        leap = leap.repeated(depth)
        for _ in range(groups - 1):
            yield columns
            columns = columns.after(leap)
    yield columns


def _fill(start: Column, done: int, sign: Signs, log: Floats) -> NDArray[np.int64]:
    """Fill arrays of shape (stretches, rounds, modes): the periods from done + 1 on, in stretches side by side.

    Returns the places (stretch, round, mode; one a row) that deserve a second look.
    """
    depth, rounds, width = log.shape
    mode = start.mode
    outline = _Outline.of(mode, done + _STRETCH * np.repeat(np.arange(depth), width))
    again: list[NDArray[np.int64]] = []
    recurrence = _Recurrence(start)
    for k in range(rounds):
        recurrence.advance(k)
        # Straight into the row of the result where it is one piece of memory.
        signs = sign[0, k] if depth == 1 else np.empty(depth * width, np.int8)
        logs = log[0, k] if depth == 1 else np.empty(depth * width)
        recurrence.emit(signs, logs)
        if depth > 1:
            sign[:, k], log[:, k] = signs.reshape(depth, width), logs.reshape(depth, width)
        suspects = outline.suspects(k, logs, recurrence.fast)
        if suspects.size:
            again.append(_places(k, suspects, width))
    delicate = outline.delicate
    if delicate.size:
        rare = nearly_nilpotent(mode[delicate])
        again += [_places(k, delicate[rare], width) for k in range(rounds)]
        delicate = delicate[~rare]
    if delicate.size:
        part = start.of(delicate)
        block = Power.one_round(part.mode)
        places = delicate // width, delicate % width
        for k in range(rounds):
            part = part.after(block)
            sign[places[0], k, places[1]], log[places[0], k, places[1]] = part.log_factor()
    return np.concatenate(again) if again else np.empty((0, 3), np.int64)


def _places(k: int, where: NDArray[np.int64], width: int) -> NDArray[np.int64]:
    return np.stack([where // width, np.full(where.size, k), where % width], axis=1)


class _Recurrence:
    """Iterate in doubles: `n <- b n + s x`, then `x <- x - n` (heavy ball) or `x - (b n + s x)` (Nesterov)."""

    def __init__(self, start: Column) -> None:
        self.mode = start.mode
        self.b, self.s, ahead = self.mode.momentum, self.mode.step.hi, self.mode.nesterov
        self.x, self.n, self.exponent = start.x.hi.copy(), start.n.hi.copy(), start.exponent.copy()
        self.scaled = bool(self.exponent.any())
        self.slow = np.flatnonzero(start.slow)
        """Modes that are followed by d = 1 - x, which adds up what x loses."""
        self.d = start.d.hi[self.slow]
        self.fast = ~start.slow
        self.linear = self.mode.linear if self.mode.linear.any() else None
        self.heavy_balls = None if ahead.all() else ~ahead
        self.all_heavy_balls = not ahead.any()
        self.push, self.look_ahead = np.empty_like(self.x), np.empty_like(self.x)
        # Rounds that cannot leave the range of doubles when they begin within [1e-30, 1e100].
        self.every = 16 if self.s.max(initial=0.0) < 1e5 else 1

    def advance(self, number: int) -> None:
        """Return one round."""
        np.multiply(self.s, self.x, out=self.push)
        self.n *= self.b
        self.n += self.push
        step = self.n
        if not self.all_heavy_balls:
            step = np.multiply(self.b, self.n, out=self.look_ahead)
            step += self.push
            if self.heavy_balls is not None:
                np.copyto(step, self.n, where=self.heavy_balls)
        if self.linear is None:
            self.x -= step
        else:
            np.subtract(self.x, step, out=self.x, where=~self.linear)
        if self.slow.size:
            self.d += step[self.slow]
            stay = np.abs(self.d) <= 0.5
            if self.linear is not None:
                stay |= self.linear[self.slow]
            if not stay.all():
                self.fast[self.slow[~stay]] = True
                self.slow, self.d = self.slow[stay], self.d[stay]
        if number % self.every == 0:
            self._rescale()

    def _rescale(self) -> None:
        size = np.maximum(np.abs(self.x), np.abs(self.n))
        if np.any((size < 1e-30) & (size > 0)) or size.max(initial=0.0) > 1e100:
            shift = np.frexp(size)[1]
            shift[self.slow] = 0
            self.x, self.n = np.ldexp(self.x, -shift), np.ldexp(self.n, -shift)
            self.exponent += shift
            self.scaled = bool(self.exponent.any())

    def emit(self, signs: Signs, logs: Floats) -> None:
        """Write the signs and log|chi| of this round."""
        np.abs(self.x, out=logs)
        with np.errstate(divide="ignore"):
            np.log(logs, out=logs)
        if self.scaled:
            logs += self.exponent * LOG_2
        np.subtract((self.x > 0).view(np.int8), (self.x < 0).view(np.int8), out=signs)
        if self.slow.size:
            signs[self.slow] = 1
            if self.linear is None:
                logs[self.slow] = np.log1p(-self.d) + 0.0
            else:
                some = self.mode[self.slow]
                exact = np.log1p(-np.where(some.linear, 0.0, self.d))
                logs[self.slow] = np.where(some.linear, -some.real_size(self.d), exact) + 0.0


@dataclass(slots=True)
class _Outline:
    """Find by rough estimates where doubles may not suffice: next to zeros, near |chi| = 1, nearly nilpotent."""

    low: Floats
    """log|chi| below which a mode that oscillates is next to a zero, before the first round of the stretch."""
    fall: Floats
    """What its envelope loses a round."""
    top: float
    """No mode's log|chi| exceeds this, nor this plus k times `top_fall` after k rounds."""
    top_fall: float
    delicate: NDArray[np.int64]

    @classmethod
    def of(cls, mode: Mode, starts: NDArray[np.int64]) -> _Outline:
        b, s = mode.momentum, np.where(mode.linear, 0.0, mode.step.hi)
        ahead = mode.nesterov
        reach = np.where(ahead, (1 + b) * s, s)
        half_trace, lead = (1 + b - reach) / 2, (1 - b - reach) / 2
        determinant = np.where(ahead, b * (1 - s), b)
        disc = half_trace * half_trace - determinant
        turning = disc < 0
        half = np.sqrt(np.abs(disc))
        with np.errstate(divide="ignore", invalid="ignore"):
            fall = np.where(turning, np.log(np.abs(determinant)) / 2, 0.0)
            envelope = np.where(turning, np.log(np.hypot(half, lead) / half) + starts * fall, -np.inf)
            radius = np.where(turning, np.sqrt(np.abs(determinant)), np.abs(half_trace) + half)
        # Modes that alternate in sign (s > 1 + b, hardly a rule in use): there rounding grows with the square of the
        # rounds, next to the upper edge. A real mode with a positive trace never comes back to 1.
        delicate = (radius < _COLLAPSE) | (half_trace < 0)
        envelope[delicate] = -np.inf
        top = float(envelope.max(initial=-np.inf))
        return cls(envelope + _NEAR_ZERO, fall, top, float(fall.max(initial=-np.inf)), np.flatnonzero(delicate))

    def suspects(self, k: int, logs: Floats, fast: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Return the modes with a log after round k (from 0) that deserves a second look; slow ones do not."""
        self.low += self.fall
        suspect = logs < self.low
        if self.top + (k + 1) * self.top_fall > -_NEAR_ONE:
            suspect |= (np.abs(logs) < _NEAR_ONE) & fast
            suspect[self.delicate] = False
        return np.flatnonzero(suspect) if suspect.any() else np.empty(0, np.int64)
