"""Read numbers from text so that none means another number than it seems to.

Python's `int` and `float` take more than people mean: `0_2` is 2, other scripts' digits count, `1e400` is infinite.
"""

from __future__ import annotations

import math
import re

_NUMBER = re.compile(r"-?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_WHOLE = re.compile(r"-?[0-9]{1,40}")


def whole_number(text: str) -> int:
    """Return the whole number that at most 40 digits write, with a minus sign or none; else raise a ValueError.

    >>> whole_number("12")
    12
    """
    if not _WHOLE.fullmatch(text):
        raise ValueError(f"{shortened(text)!r} is not a whole number of at most 40 digits")
    return int(text)


def number(text: str) -> int | float:
    """Return the finite number that a text writes, an int where it has digits alone; else raise a ValueError.

    >>> number("-3"), number("0.25"), number("1e-3")
    (-3, 0.25, 0.001)
    """
    if _WHOLE.fullmatch(text):
        return int(text)
    value = float(text) if _NUMBER.fullmatch(text) else math.nan
    if not math.isfinite(value):
        raise ValueError(f"{shortened(text)!r} is not a number such as 3, 0.25 or 1e-3")
    return value


def shortened(text: str) -> str:
    """Return a text for a message: its beginning where it is long.

    >>> shortened("a" * 99)[-3:]
    'aa…'
    """
    return text if len(text) <= 60 else f"{text[:60]}…"
