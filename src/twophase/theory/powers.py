"""Raise the one-round matrix T to powers: one power for each mode, or all of them in a table.

All powers of a T commute, and two numbers hold one: x = [T^K]_11 = chi_K and p with `[T^K]_21 = p T_21`. They have
twice a double's digits and a separate exponent; a mode that has barely moved also has its deficit d = 1 - x.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from twophase.theory import doubled
from twophase.theory.doubled import Arrays, Doubled, choose
from twophase.theory.inputs import Floats
from twophase.theory.kernel import Mode, Round

Signs: TypeAlias = NDArray[np.int8]
Whole: TypeAlias = NDArray[np.int64]

_LOG_2 = float(np.log(2.0))
_CHUNK = 2048  # modes at a time: their arrays stay in the processor's cache
_WIDTH, _BLOCK = 2**17, 2**15  # numbers of exact powers, entries of a table at a time
_CANCELLATION = 400.0  # rounding is 7e-16 of a table entry's terms, and may be 3e-13 of chi log|chi|


@dataclass(slots=True)
class Power(Arrays):
    """Hold T^K of modes, times 2^-exponent; x is 1 - d while `slow`, with |d| <= 1/2 and exponent 0."""

    x: Doubled
    d: Doubled
    p: Doubled
    exponent: Whole
    slow: NDArray[np.bool_]

    @classmethod
    def zeroth(cls, matrix: Round) -> Power:
        """Return T^0."""
        zero = np.zeros_like(matrix.reach.hi)
        nothing = Doubled(zero, zero)
        return cls(Doubled(zero + 1, zero), nothing, nothing, zero.astype(np.int64), zero == 0)

    @classmethod
    def first(cls, matrix: Round) -> Power:
        """Return T."""
        zero, slow = np.zeros_like(matrix.reach.hi), np.abs(matrix.reach.hi) <= 0.5
        x = choose(slow, lambda: 1 - matrix.reach, lambda: matrix.corner)
        return cls(x, _small_deficit(matrix.reach, slow), Doubled(zero + 1, zero), zero.astype(np.int64), slow)

    def times(self, other: Power, matrix: Round) -> Power:
        """Return the product with another power of the same T."""
        turn = matrix.cross * (self.p * other.p)
        slow, zero = self.slow & other.slow, np.zeros_like(turn.hi)
        d = Doubled(zero, zero)
        if slow.any():
            d = self.d + other.d - self.d * other.d - turn
            slow = slow & (np.abs(d.hi) <= 0.5)
            d = _small_deficit(d, slow)
        x = choose(slow, lambda: 1 - d, lambda: self.x * other.x + turn)
        p = self.p * other.x + (self.x - matrix.lead * self.p) * other.p
        exponent = self.exponent + other.exponent
        size = np.maximum(np.abs(x.hi), np.abs(p.hi))
        if np.any((size < 1e-60) | (size > 1e60)):  # back to a comfortable range, exactly; those of slow modes are
            shift = np.where(slow, 0, np.frexp(size)[1])
            x, p, exponent = x.scaled(-shift), p.scaled(-shift), exponent + shift
        return Power(x, d, p, exponent, slow)

    def log_factor(self) -> tuple[Signs, Floats]:
        """Return the sign and log of |chi| = |x|."""
        near = np.abs(self.exponent) < 500  # then the exponent can go into x, and |chi| next to 1 is seen as such
        x, exponent = self.x.scaled(np.where(near, self.exponent, 0)), np.where(near, 0, self.exponent)
        sign = np.sign(x.hi)
        above = np.abs(x.hi) - 1
        with np.errstate(divide="ignore", invalid="ignore"):
            far = np.log(np.abs(x.hi)) + np.where(x.hi != 0, x.lo / x.hi, 0.0)
            log = np.where(np.abs(above) < 0.5, np.log1p(above) + sign * x.lo / (1 + above), far) + exponent * _LOG_2
            slow = np.log1p(-self.d.hi) - self.d.lo / (1 - self.d.hi)
        return sign.astype(np.int8), np.where(self.slow, slow, log) + 0.0


def power(mode: Mode, periods: Whole) -> Power:
    """Return T^K of modes along one axis, each for its own K, by repeated squaring."""
    matrix = mode.round()
    block, result, rest = Power.first(matrix), Power.zeroth(matrix), periods.copy()
    is_zeroth = True  # so that a product with it need not be computed
    while rest.any():
        odd = (rest & 1).astype(bool)
        if odd.any():
            product = block if is_zeroth else result.times(block, matrix)
            result, is_zeroth = product if odd.all() else doubled.where(odd, product, result), False
        rest >>= 1
        if rest.any():
            block = block.times(block, matrix)
    return result


def log_factors(mode: Mode, indices: Whole, periods: Whole) -> tuple[Signs, Floats]:
    """Return the sign and log|chi_K| of the modes `mode[places]`, each for its own K."""
    sign, log = np.empty(indices.size, np.int8), np.empty(indices.size)
    for begin in range(0, indices.size, _CHUNK):
        part = slice(begin, begin + _CHUNK)
        sign[part], log[part] = power(mode[indices[part]], periods[part]).log_factor()
    return sign, log


def table(mode: Mode, rounds: int) -> tuple[Signs, Floats]:
    """Return the sign and log|chi_K| of modes along one axis for K = 1 ... rounds, each of shape (rounds, modes).

    T^K is a coarse power times a fine power, both with twice the digits; the product is in doubles. Where its terms
    cancel, or |chi| is next to 1, it is computed again from both.
    """
    stretch = 1 << (rounds.bit_length() // 2)
    stretches = -(-rounds // stretch)
    sign, log = np.empty((stretches, stretch, mode.size), np.int8), np.empty((stretches, stretch, mode.size))
    width = max(1, _WIDTH // (stretch + stretches))
    for begin in range(0, mode.size, width):
        modes = slice(begin, begin + width)
        _fill(mode[modes].round(), sign[:, :, modes], log[:, :, modes])
    shape = stretches * stretch, mode.size
    return sign.reshape(shape)[:rounds], log.reshape(shape)[:rounds]


def _powers(base: Power, matrix: Round, count: int) -> Power:
    """Return base^1 ... base^count along a new first axis, by doubling."""
    powers = base[None]
    while len(powers.slow) < count:
        more = powers.times(powers[-1], matrix)
        powers = powers.each(lambda few, others: np.concatenate([few, others]), more)
    return powers[:count]


def _fill(matrix: Round, sign: Signs, log: Floats) -> None:
    """Fill the tables of some modes, of shape (stretches, rounds of a stretch, modes)."""
    stretches, stretch, _ = log.shape
    fine = _powers(Power.first(matrix), matrix, stretch)
    coarse = Power.zeroth(matrix)[None]
    if stretches > 1:
        more = _powers(fine[-1], matrix, stretches - 1)
        coarse = coarse.each(lambda zeroth, others: np.concatenate([zeroth, others]), more)
    rows = max(1, _BLOCK // fine.slow.size)
    for begin in range(0, stretches, rows):
        block = slice(begin, begin + rows)
        start, within = coarse[block][:, None], fine[None]
        turn = (matrix.cross.hi * start.p.hi) * within.p.hi
        plain = start.x.hi * within.x.hi
        x = plain + turn
        d = start.d.hi + within.d.hi * start.x.hi - turn
        slow = start.slow & within.slow & (np.abs(d) <= 0.5)
        with np.errstate(divide="ignore", invalid="ignore"):
            logs = np.log(np.abs(x))
            logs += (start.exponent + within.exponent) * _LOG_2
            unsure = ~(np.abs(plain) + np.abs(turn) <= _CANCELLATION * np.abs(x * logs)) & ~slow
        logs[slow] = np.log1p(-d[slow]) + 0.0
        signs = np.sign(x)
        indices = np.nonzero(unsure)
        if indices[0].size:
            row, k, column = indices
            signs[indices], logs[indices] = (
                coarse[begin + row, column].times(fine[k, column], matrix[column]).log_factor()
            )
        sign[block], log[block] = signs, logs


def _small_deficit(d: Doubled, slow: NDArray[np.bool_]) -> Doubled:
    """Return the deficit while it is of use; 0 afterwards, so that it cannot overflow."""
    return d.each(lambda part: np.where(slow, part, 0.0))
