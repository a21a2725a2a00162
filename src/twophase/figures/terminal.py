"""Heatmaps as text for a terminal, in colour where it has any."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

from twophase.figures.heatmaps import Panel, Scale, shade
from twophase.sweeps.table import State, readable

if TYPE_CHECKING:
    from rich.text import Text

_LABEL, _CELL = 4, 5
"""Characters of a row's label and of a cell: two panels of three columns are 40 wide."""
_WORDS = {"diverged": "div.", "failed": "fail"}


def text_maps(panels: Sequence[Sequence[Panel]], scale: Scale, *, x_label: str) -> Text:
    """Return rows of heatmaps as text, the largest y value on top as in a figure.

    A finished cell has its number and its colour, another one a word, and one that is still to come a dot. The label of
    the x values has at most three characters.
    """
    from rich.text import Text  # noqa: PLC0415 - only where it is shown

    text = Text()
    for row in panels:
        widths = [_LABEL + _CELL * len(panel.x) for panel in row]
        wrapped = [textwrap.wrap(panel.title, width) for panel, width in zip(row, widths, strict=True)]
        for titles in zip_longest(*wrapped, fillvalue=""):
            text.append("  ".join(map(str.ljust, titles, widths)).rstrip() + "\n", "bold")
        heads = (x_label.ljust(_LABEL) + "".join(f"{x:>{_CELL}g}" for x in panel.x) for panel in row)
        text.append("  ".join(heads) + "\n", "dim")
        for index in reversed(range(max(len(panel.y) for panel in row))):
            for number, panel in enumerate(row):
                text.append(f"{'  ' * (number > 0)}{panel.y[index]:<{_LABEL}g}", "dim")
                for state, value in panel.cells[index]:
                    text.append(*_cell(state, value, scale))
            text.append("\n")
    return text


def _cell(state: State, value: float | None, scale: Scale) -> tuple[str, str]:
    """Return the text of a cell and its style."""
    if value is None:
        return _WORDS.get(state, "\N{MIDDLE DOT}").rjust(_CELL), "dim" if state == "missing" else "bold"
    ground, ink = shade(value, scale)
    return readable(value).rjust(_CELL), f"{ink} on rgb{ground}".replace(" ", "").replace("onrgb", " on rgb")
