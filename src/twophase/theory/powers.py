"""Raise the one-round matrix T to powers, with twice a double's digits and a separate exponent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from twophase.theory import doubled
from twophase.theory.doubled import Doubled
from twophase.theory.inputs import Floats
from twophase.theory.kernel import Mode

Signs: TypeAlias = NDArray[np.int8]

LOG_2 = float(np.log(2.0))
_COLLAPSE = 1e-3  # size of the eigenvalues below which a mode is nearly nilpotent
_CHUNK = 2048  # modes at a time: their arrays stay in the processor's cache


def log_factors(points: Mode, where: NDArray[np.int64], periods: NDArray[np.int64]) -> tuple[Signs, Floats]:
    """Return the sign and log|chi| of the modes `points[where]` (all along one axis), each for its own period."""
    sign, log = np.empty(where.size, np.int8), np.empty(where.size)
    for begin in range(0, where.size, _CHUNK):
        part = slice(begin, begin + _CHUNK)
        some, counts = points[where[part]], periods[part]
        by_doubling = nearly_nilpotent(some) & (counts > 2)
        if by_doubling.all():
            sign[part], log[part] = _by_doubling(some, counts)
            continue
        sign[part], log[part] = _by_squaring(some, counts)
        if by_doubling.any():
            places = begin + np.flatnonzero(by_doubling)
            sign[places], log[places] = _by_doubling(some[by_doubling], counts[by_doubling])
    return sign, log


def nearly_nilpotent(points: Mode) -> NDArray[np.bool_]:
    """Find where T is far larger than its eigenvalues: its powers are then differences of nearly equal numbers."""
    b, ahead = points.momentum, points.nesterov
    free = np.where(points.linear, 1.0, (1 - points.step.hi) - points.step.lo)  # 1 - s, roughly
    trace, determinant = np.where(ahead, (1 + b) * free, free + b), np.where(ahead, b * free, b)
    small = (np.abs(trace) < _COLLAPSE) & (np.abs(determinant) < _COLLAPSE**2)
    return small & (determinant != 0)


def _by_squaring(mode: Mode, periods: NDArray[np.int64]) -> tuple[Signs, Floats]:
    return Column.power(mode, periods).log_factor()


def _by_doubling(mode: Mode, periods: NDArray[np.int64]) -> tuple[Signs, Floats]:
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
    with np.errstate(divide="ignore"):
        log = np.log(np.abs(chi.hi)) + np.where(chi.hi != 0, chi.lo / np.where(chi.hi != 0, chi.hi, 1), 0.0)
    return np.sign(chi.hi).astype(np.int8), log + (exponent + unit * (periods - 1)) * LOG_2


@dataclass(slots=True)
class Column:
    """Hold the first column (x, n) of T^K times 2^-exponent, with twice a double's digits; n is lr times the buffer.

    While `slow`, x is 1 - d with |d| <= 1/2, and the exponent is 0. A mode with so small a step that its square is
    nothing even to 32 digits is followed to first order: its d and n are in units of 2^`Mode.exponent`.
    """

    mode: Mode
    x: Doubled
    d: Doubled
    n: Doubled
    exponent: NDArray[np.int64]
    slow: NDArray[np.bool_]

    @classmethod
    def first(cls, mode: Mode) -> Column:
        """Return the column of T^0: x = 1, n = 0."""
        zero = np.zeros(mode.size)
        unit, nothing = Doubled(zero + 1, zero), Doubled(zero, zero)
        return cls(mode, unit, nothing, nothing, np.zeros(mode.size, np.int64), np.ones(mode.size, bool))

    @classmethod
    def power(cls, mode: Mode, periods: NDArray[np.int64]) -> Column:
        """Compute by repeated squaring of T, each mode for its own period."""
        block, column, rest = Power.one_round(mode), cls.first(mode), periods.copy()
        while rest.any():
            odd = (rest & 1).astype(bool)
            if odd.any():
                column = column.after(block).where(odd, column)
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
        return Column(self.mode, x, _small_deficit(d, slow), n, exponent, slow)

    def where(self, chosen: NDArray[np.bool_], other: Column) -> Column:
        """Return this column where chosen, the other elsewhere."""
        x, d, n = (doubled.where(chosen, a, b) for a, b in ((self.x, other.x), (self.d, other.d), (self.n, other.n)))
        return Column(
            self.mode,
            x,
            d,
            n,
            np.where(chosen, self.exponent, other.exponent),
            np.where(chosen, self.slow, other.slow),
        )

    def of(self, some: NDArray[np.int64]) -> Column:
        """Return some of the modes."""
        return Column(self.mode[some], self.x[some], self.d[some], self.n[some], self.exponent[some], self.slow[some])

    def joined(self, other: Column) -> Column:
        """Join both along the modes."""
        return Column(*(_joined(getattr(self, name), getattr(other, name)) for name in self.__slots__))

    def log_factor(self) -> tuple[Signs, Floats]:
        """Return the sign and log of |chi| = |x|."""
        near = np.abs(self.exponent) < 500  # then the exponent can go into x, and |chi| next to 1 is seen as such
        x, exponent = self.x.scaled(np.where(near, self.exponent, 0)), np.where(near, 0, self.exponent)
        sign = np.sign(x.hi)
        above = np.abs(x.hi) - 1
        with np.errstate(divide="ignore", invalid="ignore"):
            log = np.log(np.abs(x.hi)) + np.where(x.hi != 0, x.lo / x.hi, 0.0)
            log = np.where(np.abs(above) < 0.5, np.log1p(above) + sign * x.lo / (1 + above), log)
            slow = np.log1p(-self.d.hi) - self.d.lo / (1 - self.d.hi)
        slow = np.where(self.mode.linear, -self.mode.real_size(self.d.hi), slow)
        return np.where(self.slow, 1, sign).astype(np.int8), np.where(self.slow, slow, log + exponent * LOG_2) + 0.0


@dataclass(slots=True)
class Power:
    """Hold a power of T, 2^exponent [[x, upper], [lower, corner]], in coordinates (x, n), with x = 1 - d where slow."""

    x: Doubled
    d: Doubled
    upper: Doubled
    lower: Doubled
    corner: Doubled
    exponent: NDArray[np.int64]
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

    def repeated(self, count: int) -> Power:
        """Return the same for `count` copies of the modes, one after the other."""
        block = self
        while block.exponent.size < count * self.exponent.size:
            block = _joined(block, block)
        return block

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


def _joined(a: Any, b: Any) -> Any:
    if isinstance(a, np.ndarray):
        return np.concatenate([a, b])
    return type(a)(*(_joined(getattr(a, name), getattr(b, name)) for name in a.__slots__))


def _small_deficit(d: Doubled, slow: NDArray[np.bool_]) -> Doubled:
    """Return the deficit while it is of use; 0 afterwards, so that it cannot overflow."""
    return Doubled(np.where(slow, d.hi, 0.0), np.where(slow, d.lo, 0.0))


def _rescaled(
    parts: tuple[Doubled, ...], exponent: NDArray[np.int64], slow: NDArray[np.bool_]
) -> tuple[tuple[Doubled, ...], NDArray[np.int64]]:
    """Return the same numbers with their largest near 1, where they have left the comfortable range; exact."""
    size = np.maximum.reduce([np.abs(part.hi) for part in parts])
    if not np.any(((size < 1e-60) | (size > 1e60)) & (size > 0) & ~slow):
        return parts, exponent
    shift = np.where(slow, 0, np.frexp(size)[1])
    return tuple(part.scaled(-shift) for part in parts), exponent + shift
