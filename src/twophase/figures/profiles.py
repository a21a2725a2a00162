"""Performance profiles: the share of places in which an arm is within x of the best, over all x."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from twophase.figures.matplotlib_types import Axes
from twophase.figures.style import MUTED, look

_FARTHEST = 30
"""Per cent behind the best."""


def draw_profiles(axes: Axes, behind: Mapping[str, Sequence[float]], named: Mapping[str, str]) -> None:
    """Draw the share of places in which each arm is within x of the best, over x; those that are not named in grey.

    `behind` is that of `judge.bench`; what comes later lies above. `named` are labels, in the order of the looks.
    """
    for number, (arm, distances) in enumerate(behind.items()):
        style: dict[str, Any] = look([*named].index(arm)) if arm in named else {"color": MUTED, "alpha": 0.25}
        finite = [distance for distance in distances if math.isfinite(distance)]
        shares = [count / max(len(distances), 1) for count in (*range(len(finite) + 1), len(finite))]
        axes.step([0, *finite, 1e9], shares, where="post", label=named.get(arm), zorder=2 + number / 100, **style)
    axes.set_xlim(-0.5, _FARTHEST)
    axes.set_xlabel("x, % behind the best arm of the place")
    axes.set_ylabel("share of places within x")
