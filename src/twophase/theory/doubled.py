"""Compute on arrays in double-double arithmetic: every number is an unevaluated sum hi + lo, about 32 digits.

The phase after K rounds is K times an angle, and a matrix near critical damping is a difference of nearly equal
numbers. In doubles the one loses K units, the other half of the digits. Twice the digits make both exact to the last
double. NumPy's `longdouble` would do on some machines and silently be a double on others.

Source: T. J. Dekker, A floating-point technique for extending the available precision, Numer. Math. 18 (1971).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import numpy as np

Array: TypeAlias = Any  # an array of doubles or a double
_SPLITTER = 134217729.0  # 2^27 + 1: halves a double's 53 bits

T = TypeVar("T", bound="Arrays")


class Arrays:
    """Hold arrays of one shape in the fields of `__slots__`, which may be such values again."""

    __slots__ = ()

    def each(self: T, function: Callable[..., Any], *others: T) -> T:
        """Apply a function to every array (and to the same array of `others`)."""
        parts = []
        for name in self.__slots__:
            part, rest = getattr(self, name), [getattr(other, name) for other in others]
            parts.append(part.each(function, *rest) if isinstance(part, Arrays) else function(part, *rest))
        return type(self)(*parts)

    def __getitem__(self: T, index: Any) -> T:
        return self.each(lambda array: array[index])


def where(condition: Array, yes: T, no: T) -> T:
    """Choose elementwise."""
    return yes.each(lambda a, b: np.where(condition, a, b), no)


def choose(condition: Array, yes: Callable[[], T], no: Callable[[], T]) -> T:
    """Choose elementwise between two computations; of which only those that are chosen somewhere are done."""
    if condition.all():
        return yes()
    return where(condition, yes(), no()) if condition.any() else no()


class Doubled(Arrays):
    """Hold an array of double-doubles. `+ - *` take another one or an array of doubles; parts must stay below 1e290."""

    __slots__ = ("hi", "lo")
    __array_ufunc__ = None  # so that array * Doubled asks Doubled

    def __init__(self, hi: Array, lo: Array = 0.0) -> None:
        self.hi = hi
        self.lo = lo

    def each(self, function: Callable[..., Any], *others: Doubled) -> Doubled:  # type: ignore[override]
        """Apply a function to both parts (and to those of `others`)."""
        return Doubled(function(self.hi, *[x.hi for x in others]), function(self.lo, *[x.lo for x in others]))

    def __neg__(self) -> Doubled:
        return Doubled(-self.hi, -self.lo)

    def __add__(self, other: Doubled | Array) -> Doubled:
        if not isinstance(other, Doubled):
            high, low = two_sum(self.hi, other)
            return _normal(high, low + self.lo)
        high, low = two_sum(self.hi, other.hi)
        high2, low2 = two_sum(self.lo, other.lo)
        high, low = _fast_two_sum(high, low + high2)
        return _normal(high, low + low2)

    __radd__ = __add__

    def __sub__(self, other: Doubled | Array) -> Doubled:
        return self + (-other)

    def __rsub__(self, other: Array) -> Doubled:
        return -self + other

    def __mul__(self, other: Doubled | Array) -> Doubled:
        if not isinstance(other, Doubled):
            high, low = two_product(self.hi, other)
            return _normal(high, low + self.lo * other)
        high, low = two_product(self.hi, other.hi)
        return _normal(high, low + (self.hi * other.lo + self.lo * other.hi))

    __rmul__ = __mul__

    def scaled(self, exponent: Array) -> Doubled:
        """Return this times 2^exponent, without rounding."""
        return self.each(lambda part: np.ldexp(part, exponent))


def two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    """Return the rounded sum and its exact rounding error."""
    total = a + b
    back = total - a
    return total, (a - (total - back)) + (b - back)


def two_product(a: Array, b: Array) -> tuple[Array, Array]:
    """Return the rounded product and its exact rounding error, for magnitudes below 1e290 (no underflow)."""
    product = a * b
    a_hi, a_lo = _split(a)
    b_hi, b_lo = _split(b)
    return product, ((a_hi * b_hi - product) + a_hi * b_lo + a_lo * b_hi) + a_lo * b_lo


def _split(a: Array) -> tuple[Array, Array]:
    wide = _SPLITTER * a
    high = wide - (wide - a)
    return high, a - high


def _fast_two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    total = a + b
    return total, b - (total - a)


def _normal(high: Array, low: Array) -> Doubled:
    return Doubled(*_fast_two_sum(high, low))
