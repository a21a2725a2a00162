"""Read what people type: numbers so that none means another than it seems to, and names that were misspelt.

Python's `int` and `float` take more than people mean: `0_2` is 2, other scripts' digits count, `1e400` is infinite.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable

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


def did_you_mean(name: str, names: Iterable[str], otherwise: str = "") -> str:
    """Return a remedy for a name that is not among some names: the likeliest, or else all of them.

    The right word in the wrong group counts, and so do initials; then what is spelt alike.

    Args:
        name: what was typed; case, hyphens and underscores do not matter.
        names: what there is.
        otherwise: the remedy where no name is near; `choose from`, and all names, if empty.

    >>> did_you_mean("outer.learning_rate", ["inner.lr", "outer.lr", "outer.momentum"])
    'did you mean outer.lr?'
    >>> did_you_mean("momentun", ["lr", "momentum"]), did_you_mean("x", ["lr", "momentum"])
    ('did you mean momentum?', 'choose from lr, momentum')
    """
    names = list(names)
    plain = {_plain(item): item for item in names}
    group, _, leaf = _plain(name).rpartition(".")
    leaves = {item: item.rpartition(".")[2] for item in plain}
    alike = [item for item, other in leaves.items() if leaf in (other, _initials(other)) or other == _initials(leaf)]
    near = [item for item in alike if item.rpartition(".")[0] == group] or alike
    near = near or difflib.get_close_matches(_plain(name), plain, n=1, cutoff=0.7)  # often is not soft
    if near:
        return f"did you mean {' or '.join(plain[item] for item in near)}?"
    return otherwise or f"choose from {', '.join(names)}"


def _plain(name: str) -> str:
    return name.lower().lstrip("-").replace("-", "_")


def _initials(name: str) -> str:
    """Return the first letters of several words; a single word has none that could be meant."""
    parts = [word for word in name.split("_") if word]
    return "".join(word[0] for word in parts) if len(parts) > 1 else "?"
