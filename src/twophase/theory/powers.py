"""Raise the one-round matrix T to powers, with twice a double's digits and a separate exponent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from twophase.theory import doubled
from twophase.theory.doubled import Arrays, Doubled
from twophase.theory.inputs import Floats
from twophase.theory.kernel import Mode

Signs: TypeAlias = NDArray[np.int8]
Whole: TypeAlias = NDArray[np.int64]

LOG_2 = float(np.log(2.0))
_COLLAPSE = 1e-3  # size of the eigenvalues below which a mode is nearly nilpotent
_CHUNK = 2048  # modes at a time: their arrays stay in the processor's cache


def log_factors(points: Mode, where: Whole, periods: Whole) -> tuple[Signs, Floats]:
    """Return the sign and log|chi| of the modes `points[where]` (all along one axis), each for its own period."""
    sign, log = np.empty(where.size, np.int8), np.empty(where.size)
    for begin in range(0, where.size, _CHUNK):
        part = slice(begin, begin + _CHUNK)
        modes, counts = points[where[part]], periods[part]
        by_doubling = nearly_nilpotent(modes) & (counts > 2)
        if not by_doubling.all():
            sign[part], log[part] = Column.power(modes, counts).log_factor(modes)
        if by_doubling.any():
            places = begin + np.flatnonzero(by_doubling)
            sign[places], log[places] = _by_doubling(modes[by_doubling], counts[by_doubling])
    return sign, log


def nearly_nilpotent(points: Mode) -> NDArray[np.bool_]:
    """Find where T is far larger than its eigenvalues: its powers are then differences of nearly equal numbers."""
    b, ahead = points.momentum, points.nesterov
    free = np.where(points.linear, 1.0, (1 - points.step.hi) - points.step.lo)  # 1 - s, roughly
    trace, determinant = np.where(ahead, (1 + b) * free, free + b), np.where(ahead, b * free, b)
    small = (np.abs(trace) < _COLLAPSE) & (np.abs(determinant) < _COLLAPSE**2)
    return small & (determinant != 0)


def _by_doubling(mode: Mode, periods: Whole) -> tuple[Signs, Floats]:
    """Compute from trace and determinant alone: `chi_K = p_{K+1} - b p_K` (theory note R6), for nearly nilpotent modes.

    `p_{2k} = p_k (2 p_{k+1} - tr p_k)` and `p_{2k+1} = p_{k+1}^2 - D p_k^2`. In units of a power of 2 near the
    eigenvalues, so that the numbers are of one size: `p_k = unit^(k-1)` times what is followed here.
    """
    _, trace, determinant, _ = mode.pieces()
    unit = np.frexp(np.maximum(np.abs(trace.hi), np.sqrt(np.abs(determinant.hi))))[1].astype(np.int64)
    tr, d = trace.scaled(-unit), determinant.scaled(-2 * unit)
    zero, exponent, never = np.zeros(mode.size), np.zeros(mode.size, np.int64), np.zeros(mode.size, bool)
    p, after = Doubled(zero, zero), Doubled(zero + 1, zero)  # p_0, p_1
    for bit in reversed(range(int(periods.max()).bit_length())):
        p, after = p * (after * 2 - tr * p), after * after - d * (p * p)
        odd = ((periods >> bit) & 1).astype(bool)
        p, after = doubled.where(odd, after, p), doubled.where(odd, tr * after - d * p, after)
        (p, after), exponent = _rescaled((p, after), 2 * exponent, never)
    chi = after.scaled(unit) - p * mode.momentum
    return np.sign(chi.hi).astype(np.int8), _log_size(chi) + (exponent + unit * (periods - 1)) * LOG_2


@dataclass(slots=True)
class Column(Arrays):
    """Hold the first column (x, n) of T^K times 2^-exponent, with twice a double's digits; n is lr times the buffer.

    While `slow`, x is 1 - d with |d| <= 1/2, and the exponent is 0. A mode with so small a step that its square is
    nothing even to 32 digits is followed to first order: its d and n are in units of 2^`Mode.exponent`.
    """

    x: Doubled
    d: Doubled
    n: Doubled
    exponent: Whole
    slow: NDArray[np.bool_]

    @classmethod
    def first(cls, size: int) -> Column:
        """Return the column of T^0 for so many modes: x = 1, n = 0."""
        zero = np.zeros(size)
        nothing = Doubled(zero, zero)
        return cls(Doubled(zero + 1, zero), nothing, nothing, np.zeros(size, np.int64), np.ones(size, bool))

    @classmethod
    def power(cls, mode: Mode, periods: Whole) -> Column:
        """Compute by repeated squaring of T, each mode for its own period."""
        block, column, rest = Power.one_round(mode), cls.first(mode.size), periods.copy()
        while rest.any():
            odd = (rest & 1).astype(bool)
            if odd.any():
                column = doubled.where(odd, column.after(block), column)
            rest >>= 1
            if rest.any():
                block = block.squared()
        return column

    def after(self, block: Power) -> Column:
        """Return this column multiplied by a power of T."""
        q, cross = block.second_order, block.upper * self.n
        d = block.d + self.d - block.d * self.d * q - cross
        slow = block.slow & self.slow & (np.abs(d.hi * q) <= 0.5)
        x = doubled.where(slow, 1 - d * q, block.x * self.x + cross)
        n = block.lower * self.x + block.corner * self.n
        (x, n), exponent = _rescaled((x, n), self.exponent + block.exponent, slow)
        return Column(x, _small_deficit(d, slow), n, exponent, slow)

    def log_factor(self, mode: Mode) -> tuple[Signs, Floats]:
        """Return the sign and log of |chi| = |x|."""
        near = np.abs(self.exponent) < 500  # then the exponent can go into x, and |chi| next to 1 is seen as such
        x, exponent = self.x.scaled(np.where(near, self.exponent, 0)), np.where(near, 0, self.exponent)
        sign = np.sign(x.hi)
        above = np.abs(x.hi) - 1
        with np.errstate(divide="ignore", invalid="ignore"):
            log = np.where(np.abs(above) < 0.5, np.log1p(above) + sign * x.lo / (1 + above), _log_size(x))
            slow = np.log1p(-self.d.hi) - self.d.lo / (1 - self.d.hi)
        slow = np.where(mode.linear, -mode.real_size(self.d.hi), slow)
        return np.where(self.slow, 1, sign).astype(np.int8), np.where(self.slow, slow, log + exponent * LOG_2) + 0.0


@dataclass(slots=True)
class Power(Arrays):
    """Hold a power of T, 2^exponent [[x, upper], [lower, corner]], in coordinates (x, n), with x = 1 - d where slow."""

    x: Doubled
    d: Doubled
    upper: Doubled
    lower: Doubled
    corner: Doubled
    exponent: Whole
    slow: NDArray[np.bool_]
    second_order: Floats
    """0 where a mode is followed to first order in its step, 1 elsewhere."""

    @classmethod
    def one_round(cls, mode: Mode) -> Power:
        """Return T itself."""
        zero, ahead, s = np.zeros(mode.shape), mode.nesterov, mode.step
        b = Doubled(mode.momentum, zero)
        q = np.where(mode.linear, 0.0, 1.0)
        d = doubled.where(ahead, (2 - mode.decay) * s, s)
        upper = -doubled.where(ahead, b * b, b)
        slow = np.abs(d.hi * q) <= 0.5
        return cls(1 - d * q, _small_deficit(d, slow), upper, s, b, np.zeros(mode.shape, np.int64), slow, q)

    def squared(self) -> Power:
        """Return the product with itself."""
        q, cross, trace = self.second_order, self.upper * self.lower, self.x + self.corner
        d = self.d * 2 - self.d * self.d * q - cross
        slow = self.slow & (np.abs(d.hi * q) <= 0.5)
        x = doubled.where(slow, 1 - d * q, self.x * self.x + cross)
        corner = self.corner * self.corner + cross * q
        parts = (x, self.upper * trace, self.lower * trace, corner)
        (x, upper, lower, corner), exponent = _rescaled(parts, 2 * self.exponent, slow)
        return Power(x, _small_deficit(d, slow), upper, lower, corner, exponent, slow, q)


def _log_size(number: Doubled) -> Floats:
    """Return log|number|, -inf at 0."""
    with np.errstate(divide="ignore"):
        return np.log(np.abs(number.hi)) + np.where(number.hi != 0, number.lo / np.where(number.hi, number.hi, 1), 0.0)


def _small_deficit(d: Doubled, slow: NDArray[np.bool_]) -> Doubled:
    """Return the deficit while it is of use; 0 afterwards, so that it cannot overflow."""
    return d.each(lambda part: np.where(slow, part, 0.0))


def _rescaled(
    parts: tuple[Doubled, ...], exponent: Whole, slow: NDArray[np.bool_]
) -> tuple[tuple[Doubled, ...], Whole]:
    """Return the same numbers with their largest near 1, where they have left the comfortable range; exact."""
    size = np.maximum.reduce([np.abs(part.hi) for part in parts])
    if not np.any(((size < 1e-60) | (size > 1e60)) & (size > 0) & ~slow):
        return parts, exponent
    shift = np.where(slow, 0, np.frexp(size)[1])
    return tuple(part.scaled(-shift) for part in parts), exponent + shift
