"""`theory.doubled`: sums and products of double-doubles against mpmath."""

from __future__ import annotations

from typing import Any

import mpmath
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from twophase.theory.doubled import Doubled, two_product, two_sum

UNIT = 2.0**-106  # relative size of a double-double's last place


def sizes(limit: int) -> st.SearchStrategy[float]:
    """Nonzero doubles of both signs, of magnitude 2^-limit to 2^limit."""
    mantissa = st.floats(1, 2, exclude_max=True)
    return st.builds(
        lambda m, exponent, sign: sign * float(np.ldexp(m, exponent)),
        mantissa,
        st.integers(-limit, limit),
        st.sampled_from([-1.0, 1.0]),
    )


def doubles(limit: int) -> st.SearchStrategy[Doubled]:
    """Normalised double-doubles of such magnitudes: the low part is at most half a unit of the high one."""
    # Whole multiples: a share of 1e-300 would be lost on the oracle's 80 digits.
    shares = st.integers(-(2**40), 2**40).map(lambda n: n / 2**40)
    return st.builds(lambda high, share: Doubled(*two_sum(high, share * high * 2.0**-53)), sizes(limit), shares)


def value(number: Doubled) -> Any:
    """The number that hi and lo stand for."""
    return mpmath.mpf(float(number.hi)) + mpmath.mpf(float(number.lo))


@given(sizes(480), sizes(480))
def test_two_product_and_two_sum_lose_nothing(a: float, b: float):
    """The rounded result and its error add up to the exact one, and the result is the double's own."""
    with mpmath.workdps(700):
        for exact, (result, rest) in [
            (mpmath.mpf(a) * mpmath.mpf(b), two_product(a, b)),
            (mpmath.mpf(a) + mpmath.mpf(b), two_sum(a, b)),
        ]:
            assert result == float(exact)
            assert mpmath.mpf(result) + mpmath.mpf(rest) == exact


@given(doubles(60), doubles(60), sizes(60))
def test_sums_and_products(a: Doubled, b: Doubled, c: float):
    """They are normalised, and right to a few units of their last place (sums with a double: of the operands')."""
    with mpmath.workdps(80):
        x, y, d = value(a), value(b), np.array(c)
        for result, exact, scale in [
            (a + b, x + y, 0),
            (a - b, x - y, 0),
            (a * b, x * y, 0),
            (a * d, x * c, 0),
            (d * a, x * c, 0),
            (a + d, x + c, max(abs(x), abs(c))),
            (d + a, x + c, max(abs(x), abs(c))),
            (a - d, x - c, max(abs(x), abs(c))),
            (d - a, c - x, max(abs(x), abs(c))),
        ]:
            assert abs(result.lo) <= abs(result.hi) * 2.0**-53
            assert abs(value(result) - exact) <= 8 * UNIT * max(abs(exact), scale)
        assert value(-a) == -x
        assert value(a.scaled(-300)) == mpmath.ldexp(x, -300)
