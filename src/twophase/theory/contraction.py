"""The restart factor chi_K: what one cycle of K rounds, begun with an empty buffer, leaves of a mode.

`chi_K = [T^K]_11 = x_K / x_0` from `m_0 = 0`. Given as (sign, log|chi|), since its powers over a run underflow.

Two ways to it, for every regime alike and without a closed form:

* one period (`log_restart_factor`): T^K by repeated squaring with twice a double's digits;
* all periods up to a largest one (`restart_table`): the recurrence itself in doubles, begun anew from the exact state
  every `_STRETCH` rounds so that rounding cannot pile up, and the few entries where a double's digits do not suffice
  (next to a zero of chi, or where |chi| crosses 1) taken from the first way.

In both a mode that has barely moved is followed by its deficit d = 1 - chi, so that slow modes keep their digits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from twophase.theory import doubled
from twophase.theory.doubled import Doubled
from twophase.theory.inputs import Floats, Rules, check_counts
from twophase.theory.modes import Mode

Signs: TypeAlias = NDArray[np.int8]

_STRETCH = 64  # rounds between two exact states of a table, a power of 2
_CHUNK = 4096  # modes at a time: their arrays stay in the processor's cache
_POWER_CHUNK = 2048  # the same for the first way, which keeps more arrays
_NEAR_ZERO = -9.2  # log of |chi| relative to its envelope below which a table's entry is computed anew
_NEAR_ONE = 0.02  # |log chi| below which it is
_COLLAPSE = 0.1  # spectral radius below which a round cancels more than a digit: nearly nilpotent modes
_LOG_2 = float(np.log(2.0))


def log_restart_factor(rule: Rules, sigma: ArrayLike, period: ArrayLike) -> tuple[Any, Any]:
    """Sign and logarithm of the restart factor: `chi_K = [T^K]_11`, as (sign chi_K, log|chi_K|).

    Args:
        rule: one rule or an array of rules.
        sigma: effective progress in [0, 1].
        period: K >= 0, whole numbers below 2^53; all three broadcast. K = 0 gives chi = 1.

    Returns:
        (sign, log): sign is -1, 0 or 1; the logarithm is natural, -inf at an exact zero. Relative error of the
        logarithm about 1e-15, whatever the regime, next to zeros of chi too, and for K up to at least 1e6.

    Raises:
        ValueError: sigma outside [0, 1], a period that is no whole number >= 0.

    Source: paper section 3, proposition 1 (valid in every regime through T^K); theory note R6 and F3.

    >>> from twophase.rule import OuterRule
    >>> sign, log = log_restart_factor(OuterRule(1.0, 0.9, form="ema"), 0.95, 8000)
    >>> int(sign), round(float(log), 2)
    (1, -421.58)
    """
    mode, periods = Mode.of("log_restart_factor", rule, sigma), check_counts("log_restart_factor", "period", period, 0)
    shape = np.broadcast_shapes(mode.shape, periods.shape)
    points, where = mode.flat(), np.broadcast_to(np.arange(max(mode.size, 1)).reshape(mode.shape), shape).reshape(-1)
    sign, log = log_factors(points, where, np.broadcast_to(periods, shape).reshape(-1))
    return sign.reshape(shape)[()], log.reshape(shape)[()]


def restart_factor(rule: Rules, sigma: ArrayLike, period: ArrayLike) -> Any:
    """The restart factor `chi_K = [T^K]_11` itself: the share of a mode that is left after a cycle of K rounds.

    Underflows to 0 below about 1e-308; `log_restart_factor` does not.

    Source: paper section 3, proposition 1; theory note R6. Arguments, shapes and errors as `log_restart_factor`.

    >>> from twophase.rule import OuterRule
    >>> round(float(restart_factor(OuterRule(1.0, 0.9, form="ema"), 0.95, 5)), 7)
    0.0098321
    """
    sign, log = log_restart_factor(rule, sigma, period)
    with np.errstate(over="ignore"):
        return sign * np.exp(log)


def restart_rate(rule: Rules, sigma: ArrayLike, period: ArrayLike) -> Any:
    """Contraction a round with a restart every K rounds: `r_K = -log|chi_K| / K`, in nats a round.

    Returns:
        The rate; +inf where chi_K is exactly 0, negative where the restarted mode grows. Slow modes keep their digits.

    Raises:
        ValueError: sigma outside [0, 1], a period that is no whole number >= 1.

    Source: paper section 3; theory note R7 and F3.

    >>> from twophase.rule import OuterRule
    >>> round(float(restart_rate(OuterRule(1.0, 0.9, form="ema"), 0.95, 5)), 5)
    0.92442
    """
    periods = check_counts("restart_rate", "period", period)
    return -log_restart_factor(rule, sigma, periods)[1] / periods + 0.0


def restart_table(rule: Rules, sigma: ArrayLike, max_period: int) -> tuple[Signs, Floats]:
    """Restart factors of all periods 1 ... max_period at once.

    Args:
        rule: one rule or an array of rules.
        sigma: effective progress in [0, 1]; broadcasts against the rules to some shape.
        max_period: the largest period, a whole number >= 1.

    Returns:
        (sign, log|chi|), each of shape (max_period, ...): entry K-1 belongs to period K. The signs are int8. Relative
        error of the logarithm below 1e-12 (next to a zero of chi: of chi relative to its envelope).

    Raises:
        ValueError: sigma outside [0, 1], a max_period that is no whole number >= 1.

    Source: theory note F2.

    >>> from twophase.rule import OuterRule
    >>> sign, log = restart_table(OuterRule(1.0, 0.9, form="ema"), 0.95, 6)
    >>> (sign * np.exp(log)).round(5).tolist()
    [0.905, 0.73353, 0.50951, 0.2595, 0.00983, -0.2158]
    """
    mode = Mode.of("restart_table", rule, sigma)
    rounds = int(check_counts("restart_table", "max_period", max_period))
    points, width = mode.flat(), mode.size
    depth = 1  # of few modes, several stretches are done side by side
    while depth * _STRETCH < rounds and 2 * depth * width <= _CHUNK:
        depth *= 2
    groups = -(-rounds // (depth * _STRETCH))
    grid = (groups * depth, min(rounds, _STRETCH), width)
    sign, log, again = np.empty(grid, np.int8), np.empty(grid), []
    for left in range(0, width, _CHUNK):
        columns = slice(left, left + _CHUNK)
        for group, start in enumerate(_starts(points[columns], depth, groups)):
            block = (slice(group * depth, (group + 1) * depth), slice(None), columns)
            places = _fill(start, group * depth * _STRETCH, sign[block], log[block])
            again.append(places + np.array([group * depth, 0, left]))
    stretch, k, where = np.concatenate(again).T if again else np.empty((3, 0), np.int64)
    sign[stretch, k, where], log[stretch, k, where] = log_factors(points, where, stretch * _STRETCH + k + 1)
    shape = (grid[0] * grid[1], *mode.shape)
    return sign.reshape(shape)[:rounds], log.reshape(shape)[:rounds]


def closed_form(rule: Rules, sigma: ArrayLike, period: ArrayLike) -> Any:
    """The restart factor as the paper writes it, extended to every regime; in plain doubles, for reading and checks.

    Oscillatory: `rho^K (cos K phi + C sin K phi)`. Otherwise, with real eigenvalues l1 and l2, |l1| >= |l2|:
    `(l1^K + l2^K)/2 + (a - b)/2 (l1^K - l2^K)/(l1 - l2)`, whose last quotient is `K l^(K-1)` at a double root. Use
    `restart_factor` for results: this one underflows, and loses digits of slow modes and at large K.

    Source: paper section 3, proposition 1; theory note R6 to R12.

    >>> from twophase.rule import OuterRule
    >>> round(float(closed_form(OuterRule(2.0, 0.5, True, "ema"), 1.0, 1)), 3)  # nilpotent
    -0.5
    """
    mode, periods = Mode.of("closed_form", rule, sigma), check_counts("closed_form", "period", period, 0)
    disc, trace, determinant, lead = (part.hi for part in mode.pieces())
    half = np.sqrt(np.abs(disc)) / 2
    turning = disc < 0
    with np.errstate(divide="ignore", invalid="ignore", under="ignore"):
        rho, angle = np.sqrt(np.abs(determinant)), np.arctan2(half, trace / 2)
        turned = rho**periods * (np.cos(periods * angle) + lead / (2 * half) * np.sin(periods * angle))
        first = np.where(trace < 0, trace / 2 - half, trace / 2 + half)
        second = np.where(first != 0, determinant / np.where(first != 0, first, 1), 0.0)
        quotient = second / np.where(first != 0, first, 1)
        gap = np.where(first != 0, 2 * half / np.abs(first), 1.0)  # 1 - l2/l1, without the cancellation
        shares = np.where(gap > 0, (1 - quotient**periods) / np.where(gap > 0, gap, 1), periods)  # (1-q^K)/(1-q)
        bracket = (1 + quotient**periods) / 2 + lead / (2 * np.where(first != 0, first, 1)) * shares
        # With both roots 0 the trace a + b is 0, so that chi_1 = a = (a - b)/2, and nothing is left after that.
        gone = np.where(periods == 0, 1.0, np.where(periods == 1, lead / 2, 0.0))
        real = np.where(first != 0, first**periods * bracket, gone)
    return np.where(turning, turned, real)[()]


# ------------------------------------------------------------------------------------------------------- one period


def log_factors(points: Mode, where: NDArray[np.int64], periods: NDArray[np.int64]) -> tuple[Signs, Floats]:
    """Sign and log|chi| of the modes `points[where]` (all along one axis), each for its own period."""
    sign, log = np.empty(where.size, np.int8), np.empty(where.size)
    for left in range(0, where.size, _POWER_CHUNK):
        part = slice(left, left + _POWER_CHUNK)
        sign[part], log[part] = Column.power(points[where[part]], periods[part]).log_factor()
    return sign, log


@dataclass(slots=True)
class Column:
    """The first column (x, n) of T^K times 2^-exponent, with twice a double's digits; n is lr times the buffer.

    While `slow`, x is 1 - d with |d| <= 1/2, and the exponent is 0. A mode whose step is so small that its square is
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
        """Of T^0: x = 1, n = 0."""
        zero = np.zeros(mode.size)
        one, nothing = Doubled(zero + 1, zero), Doubled(zero, zero)
        return cls(mode, one, nothing, nothing, np.zeros(mode.size, np.int64), np.ones(mode.size, bool))

    @classmethod
    def power(cls, mode: Mode, periods: NDArray[np.int64]) -> Column:
        """By repeated squaring of T, each mode for its own period."""
        block, column, rest = _Block.one_round(mode), cls.first(mode), periods.copy()
        while rest.any():
            odd = (rest & 1).astype(bool)
            if odd.any():
                column = column.after(block).where(odd, column)
            rest >>= 1
            if rest.any():
                block = block.squared()
        return column

    def after(self, block: _Block) -> Column:
        """This column multiplied by a power of T."""
        q, cross = block.second_order, block.upper * self.n
        d = block.d + self.d - block.d * self.d * q - cross
        slow = block.slow & self.slow & (np.abs(d.hi * q) <= 0.5)
        x = doubled.where(slow, 1 - d * q, block.x * self.x + cross)
        n = block.lower * self.x + block.corner * self.n
        (x, n), exponent = _rescaled((x, n), self.exponent + block.exponent, slow)
        return Column(self.mode, x, _kept(d, slow), n, exponent, slow)

    def where(self, chosen: NDArray[np.bool_], other: Column) -> Column:
        """This column where chosen, the other elsewhere."""
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
        """Some of the modes."""
        return Column(self.mode[some], self.x[some], self.d[some], self.n[some], self.exponent[some], self.slow[some])

    def joined(self, other: Column) -> Column:
        """Both, one after the other."""
        return Column(*(_joined(getattr(self, name), getattr(other, name)) for name in self.__slots__))

    def log_factor(self) -> tuple[Signs, Floats]:
        """Sign and log of |chi| = |x|."""
        near = np.abs(self.exponent) < 500  # then the exponent can go into x, and |chi| next to 1 is seen as such
        x, exponent = self.x.scaled(np.where(near, self.exponent, 0)), np.where(near, 0, self.exponent)
        sign = np.sign(x.hi)
        above = np.abs(x.hi) - 1
        with np.errstate(divide="ignore", invalid="ignore"):
            log = np.log(np.abs(x.hi)) + np.where(x.hi != 0, x.lo / x.hi, 0.0)
            log = np.where(np.abs(above) < 0.5, np.log1p(above) + sign * x.lo / (1 + above), log)
            slow = np.log1p(-self.d.hi) - self.d.lo / (1 - self.d.hi)
        slow = np.where(self.mode.linear, -self.mode.real_size(self.d.hi), slow)
        return np.where(self.slow, 1, sign).astype(np.int8), np.where(self.slow, slow, log + exponent * _LOG_2) + 0.0


@dataclass(slots=True)
class _Block:
    """A power of T: 2^exponent [[x, upper], [lower, corner]] in the coordinates (x, n), with x = 1 - d where slow."""

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
    def one_round(cls, mode: Mode) -> _Block:
        """T itself."""
        zero, ahead, s = np.zeros(mode.shape), mode.nesterov, mode.step
        b = Doubled(mode.momentum, zero)
        q = np.where(mode.linear, 0.0, 1.0)
        d = doubled.where(ahead, (2 - mode.decay) * s, s)
        upper = -doubled.where(ahead, b * b, b)
        slow = np.abs(d.hi * q) <= 0.5
        return cls(1 - d * q, _kept(d, slow), upper, s, b, np.zeros(mode.shape, np.int64), slow, q)

    def repeated(self, count: int) -> _Block:
        """The same for `count` copies of the modes, one after the other."""
        block = self
        while block.exponent.size < count * self.exponent.size:
            block = _joined(block, block)
        return block

    def squared(self) -> _Block:
        """The product with itself."""
        q, cross, trace = self.second_order, self.upper * self.lower, self.x + self.corner
        d = self.d * 2 - self.d * self.d * q - cross
        slow = self.slow & (np.abs(d.hi * q) <= 0.5)
        x = doubled.where(slow, 1 - d * q, self.x * self.x + cross)
        corner = self.corner * self.corner + cross * q
        parts = (x, self.upper * trace, self.lower * trace, corner)
        (x, upper, lower, corner), exponent = _rescaled(parts, 2 * self.exponent, slow)
        return _Block(x, _kept(d, slow), upper, lower, corner, exponent, slow, q)


def _joined(a: Any, b: Any) -> Any:
    if isinstance(a, np.ndarray):
        return np.concatenate([a, b])
    return type(a)(*(_joined(getattr(a, name), getattr(b, name)) for name in a.__slots__))


def _kept(d: Doubled, slow: NDArray[np.bool_]) -> Doubled:
    """The deficit while it is of use; 0 afterwards, so that it cannot overflow."""
    return Doubled(np.where(slow, d.hi, 0.0), np.where(slow, d.lo, 0.0))


def _rescaled(
    parts: tuple[Doubled, ...], exponent: NDArray[np.int64], slow: NDArray[np.bool_]
) -> tuple[tuple[Doubled, ...], NDArray[np.int64]]:
    """The same numbers with their largest near 1, where they have left the comfortable range; exact."""
    size = np.maximum.reduce([np.abs(part.hi) for part in parts])
    if not np.any(((size < 1e-60) | (size > 1e60)) & (size > 0) & ~slow):
        return parts, exponent
    shift = np.where(slow, 0, np.frexp(size)[1])
    return tuple(part.scaled(-shift) for part in parts), exponent + shift


# ------------------------------------------------------------------------------------------------------- all periods


def _starts(points: Mode, depth: int, groups: int) -> Iterator[Column]:
    """The exact states from which `depth` stretches begin side by side, one group of stretches after another."""
    columns, have = Column.first(points), 1
    if groups * depth > 1:
        leap = _Block.one_round(points)
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
            again.append(np.stack([suspects // width, np.full(suspects.size, k), suspects % width], axis=1))
    if outline.collapsing.size:
        part = start.of(outline.collapsing)
        block = _Block.one_round(part.mode)
        places = outline.collapsing // width, outline.collapsing % width
        for k in range(rounds):
            part = part.after(block)
            sign[places[0], k, places[1]], log[places[0], k, places[1]] = part.log_factor()
    return np.concatenate(again) if again else np.empty((0, 3), np.int64)


class _Recurrence:
    """The recurrence in doubles: `n <- b n + s x`, then `x <- x - n` (heavy ball) or `x - (b n + s x)` (Nesterov)."""

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
        """One round."""
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
            logs += self.exponent * _LOG_2
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
    """Where doubles may not suffice, from rough estimates: next to zeros, where |chi| crosses 1, nearly nilpotent."""

    low: Floats
    """log|chi| below which a mode that oscillates is next to a zero, before the first round of the stretch."""
    fall: Floats
    """What its envelope loses a round."""
    top: float
    """No mode's log|chi| exceeds this, nor this plus k times `top_fall` after k rounds."""
    top_fall: float
    collapsing: NDArray[np.int64]

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
        # A real mode with a positive trace never comes back to 1; any other may.
        returning = ~turning & (half_trace < 0)
        top = np.inf if returning.any() else envelope.max(initial=-np.inf)
        collapsing = np.flatnonzero(radius < _COLLAPSE)
        return cls(envelope + _NEAR_ZERO, fall, float(top), float(fall.max(initial=-np.inf)), collapsing)

    def suspects(self, k: int, logs: Floats, fast: NDArray[np.bool_]) -> NDArray[np.int64]:
        """The modes whose log after round k (from 0) deserves a second look; slow ones do not."""
        self.low += self.fall
        suspect = logs < self.low
        if self.top + (k + 1) * self.top_fall > -_NEAR_ONE:
            suspect |= (np.abs(logs) < _NEAR_ONE) & fast
        return np.flatnonzero(suspect) if suspect.any() else np.empty(0, np.int64)
