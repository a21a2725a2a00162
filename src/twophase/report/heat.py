"""The heatmaps of pages: the panels of `figures.heatmap`, as `heat.html` shows them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from twophase.figures.heatmap import Panel, Scale, text_of
from twophase.sweeps.table import Setting, cell_text


def heat(
    panel: Panel, scale: Scale, curve_of: Callable[[Setting], tuple[int, str] | None] = lambda _: None
) -> dict[str, Any]:
    """Return the values of the macro `heat`: heads, and rows of cells from the top.

    Args:
        panel: panel of settings.
        scale: colours of its values.
        curve_of: number and name of the curve that a press on a setting's cell shows; None for no button.
    """
    rows = []
    for y, cells in reversed([*zip(panel.y, panel.cells, strict=True)]):
        row: list[dict[str, Any]] = []
        for cell in cells:
            row.append(
                {"text": text_of(cell), "look": "void" if cell is None else cell.state, "style": "", "curve": None}
            )
            if cell is not None and cell.result is not None:
                row[-1]["style"] = f"background:rgb{scale.colour(cell.result)};color:{scale.ink(cell.result)}"
                row[-1]["look"] = "near" if cell.result <= scale.bound else "finished"
            if isinstance(cell, Setting):
                row[-1]["curve"] = curve_of(cell)
        rows.append({"y": cell_text(y), "cells": row})
    return {
        "title": panel.title,
        "across": panel.x_label,
        "up": panel.y_label,
        "x": [cell_text(x) for x in panel.x],
        "rows": rows,
    }
