"""Check the numbers of a policy, and return them as plain numbers."""

from __future__ import annotations

import math
from contextlib import suppress
from numbers import Integral, Real

LARGEST = 1e30
"""The largest number that a policy may multiply a buffer or a pseudo-gradient with; a float32 holds it."""


MOST = 10**15
"""The largest count: no run has as many rounds, and every float, JSON reader and tensor holds it exactly."""


def check_count(where: str, name: str, value: object, least: int = 1) -> int:
    """Return `value` as a plain int if it is a whole number >= `least` (NumPy's included); else raise a ValueError."""
    if isinstance(value, bool) or not isinstance(value, Integral) or not least <= int(value) <= MOST:
        raise ValueError(f"{where}: {name} is {value!r}; it must be a whole number >= {least} and at most 10^15")
    return int(value)


def check_number(where: str, name: str, value: object, span: tuple[float, float], example: str) -> float:
    """Return `value` as a plain finite number (NumPy's included) in a span; else raise a ValueError.

    The ends belong to the span where both are finite; above 0 is `(0, inf)`, any number `(-inf, inf)`.
    """
    low, high = span
    number = math.nan
    if isinstance(value, Real) and not isinstance(value, bool):
        with suppress(OverflowError):  # of a whole number that no float can hold
            number = int(value) if isinstance(value, Integral) and math.isfinite(value) else float(value)
    if high < math.inf:
        below = "below " * (high < float(f"{high:g}"))  # 1 - 1e-12 is written 1
        inside, requirement = low <= number <= high, f"a number from {low:g} to {below}{high:g}"
    else:
        inside = low < number < high
        requirement = "a finite number" + (f" above {low:g}" if math.isfinite(low) else "")
    if not inside:
        raise ValueError(f"{where}: {name} is {value!r}; it must be {requirement}, for example {example}")
    return number
