"""`theory.doubled`: sums and products of double-doubles against mpmath."""

from __future__ import annotations

from typing import Any

import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twophase.theory.doubled import Doubled, two_product, two_sum

UNIT = 2.0**-106  # relative size of a double-double's last place


def sizes(limit: int) -> st.SearchStrategy[float]:
    """Nonzero doubles of both signs, of magnitude 2^-limit to 2^limit."""
    return st.builds(
        lambda mantissa, exponent, sign: sign * float(np.ldexp(mantissa, exponent)),
        st.floats(1, 2, exclude_max=True),
        st.integers(-limit, limit),
        st.sampled_from([-1.0, 1.0]),
    )


def doubles(limit: int) -> st.SearchStrategy[Doubled]:
    """Normalised double-doubles of such magnitudes: the low part is at most half a unit of the high one."""

    def build(high: float, share: float) -> Doubled:
        high, low = two_sum(high, share * high * 2.0**-53)
        return Doubled(np.array([high]), np.array([low]))

    # Whole multiples: a share of 1e-300 would be lost on the oracle's 80 digits.
    shares = st.integers(-(2**40), 2**40).map(lambda n: n / 2**40)
    return st.builds(build, sizes(limit), shares)


def value(number: Doubled) -> Any:
    """The number that hi and lo stand for."""
    return mpmath.mpf(float(number.hi[0])) + mpmath.mpf(float(number.lo[0]))


def close(number: Doubled, exact: Any, units: float, scale: Any = None) -> bool:
    """Whether a result is normalised and within some units of its exact value (or of `scale`)."""
    normal = bool(abs(number.lo[0]) <= abs(number.hi[0]) * 2.0**-53)
    return normal and abs(value(number) - exact) <= units * UNIT * abs(exact if scale is None else scale)


@given(sizes(480), sizes(480))
def test_two_product_and_two_sum_lose_nothing(a: float, b: float):
    """The rounded result and its error add up to the exact one, and the result is the double's own."""
    with mpmath.workdps(700):
        product, rest = two_product(a, b)
        assert product == a * b
        assert mpmath.mpf(product) + mpmath.mpf(rest) == mpmath.mpf(a) * mpmath.mpf(b)
        total, rest = two_sum(a, b)
        assert total == a + b
        assert mpmath.mpf(total) + mpmath.mpf(rest) == mpmath.mpf(a) + mpmath.mpf(b)


@given(doubles(60), doubles(60), sizes(60))
def test_sums(a: Doubled, b: Doubled, c: float):
    """Sums and differences, with a double on either side too, are right to two units of the larger operand's place."""
    with mpmath.workdps(80):
        x, y = value(a), value(b)
        assert close(a + b, x + y, 4)
        assert close(a - b, x - y, 4)
        d = np.array([c])
        for result, exact in [(a + d, x + c), (d + a, x + c), (a - d, x - c), (d - a, c - x)]:
            assert abs(value(result) - exact) <= 2 * UNIT * max(abs(x), abs(c))
        assert value(-a) == -x


@given(doubles(150), doubles(150), sizes(150))
def test_products(a: Doubled, b: Doubled, c: float):
    """Products are right to a few units of their own, with a double on either side too."""
    with mpmath.workdps(80):
        x, y = value(a), value(b)
        assert close(a * b, x * y, 8)
        assert close(a * np.array([c]), x * c, 4)
        assert close(np.array([c]) * a, x * c, 4)


@pytest.mark.parametrize("tiny", [2.0**-53, 2.0**-80, 2.0**-100])
def test_next_to_one(tiny: float):
    """The purpose: 1 + e and its square keep e where a double has nothing of it left."""
    number = Doubled(np.array([1.0]), np.array([tiny]))
    assert 1 + tiny == 1
    assert value(number - 1) == tiny
    assert value(number * number - 1) == 2 * tiny
