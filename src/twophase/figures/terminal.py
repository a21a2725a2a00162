"""Heatmaps as text for a terminal, in colour where it has any."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

from twophase.figures.heatmap import Panel, Scale, text_of

if TYPE_CHECKING:
    from rich.text import Text

_LABEL, _CELL = 4, 5
"""Characters of a row's label and of a cell: two panels of three columns are 40 wide."""


def text_maps(panels: Sequence[Sequence[Panel]], scale: Scale, *, x_label: str) -> Text:
    """Return rows of heatmaps as text, the largest y value on top; the panels of a row have the same y values."""
    from rich.text import Text  # noqa: PLC0415 - only where it is shown

    text = Text()
    for row in panels:
        widths = [_LABEL + _CELL * len(panel.x) for panel in row]
        wrapped = [textwrap.wrap(panel.title, width) for panel, width in zip(row, widths, strict=True)]
        for titles in zip_longest(*wrapped, fillvalue=""):
            text.append("  ".join(map(str.ljust, titles, widths)).rstrip() + "\n", "bold")
        heads = (x_label.ljust(_LABEL) + "".join(f"{x:>{_CELL}g}" for x in panel.x) for panel in row)
        text.append("  ".join(heads) + "\n", "dim")
        for index in reversed(range(len(row[0].y))):
            for number, panel in enumerate(row):
                text.append(f"{'  ' * (number > 0)}{panel.y[index]:<{_LABEL}g}", "dim")
                for cell in panel.cells[index]:
                    style = "bold"
                    if cell is not None and cell.result is not None:
                        red, green, blue = scale.colour(cell.result)
                        style = f"{scale.ink(cell.result)} on rgb({red},{green},{blue})"
                    text.append(text_of(cell).rjust(_CELL), style)
            text.append("\n")
    return text
