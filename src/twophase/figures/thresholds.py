"""Curves over thresholds: the share of an arm's settings within x % of the best of all, over x."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from twophase.figures.style import (
    MUTED,
    headline,
    literal,
    look,
    new_figure,
    rendered,
    share_legend,
    styled,
    write_files,
)
from twophase.files import csv_text
from twophase.sweeps.table import Setting

THRESHOLDS = range(1, 101)
"""Per cent above the best of all."""
_TICKS = (1, 2, 5, 10, 25, 50, 100)


@dataclass(frozen=True, slots=True)
class Curve:
    """How many of an arm's settings come near the best of all; diverged and missing ones do at no threshold."""

    name: str
    settings: int
    within: Sequence[int]
    """How many are near at each of `THRESHOLDS`, by their means over the seeds."""
    least: Sequence[int]
    """Fewest of `within` and of the single seeds, each held against its own best."""
    most: Sequence[int]


def curve_of(name: str, cells: Sequence[Setting], settings: Sequence[Setting]) -> Curve:
    """Count the settings of an arm at each threshold; the best is that of all `settings`."""
    by_seed: dict[object, list[float]] = {}
    best: dict[object, float] = {}
    for cell in settings:
        for seed, value in zip(cell.seeds, cell.results, strict=True):
            if value is not None:
                best[seed] = min(value, best.get(seed, value))
    for cell in cells:
        for seed, value in zip(cell.seeds, cell.results, strict=True):
            by_seed.setdefault(seed, []).extend([value / best[seed]] if value is not None else [])
    top = min((cell.result for cell in settings if cell.result is not None), default=1.0)
    within = _counts([cell.result / top for cell in cells if cell.result is not None])
    counts = [_counts(ratios) for ratios in by_seed.values()] if len(by_seed) > 1 else [within]
    return Curve(name, len(cells), within, list(map(min, *counts, within)), list(map(max, *counts, within)))


def _counts(ratios: Sequence[float]) -> list[int]:
    bounds = 1 + np.array(THRESHOLDS) / 100
    return (np.array(ratios)[:, None] <= bounds).sum(axis=0).tolist()


def thresholds(
    panels: Mapping[str, Sequence[Curve]],
    *,
    title: str,
    reading: str,
    path_stem: Path,
    lines: Mapping[str, float],
) -> list[Path]:
    """Draw curves over the threshold, a panel a title, and write them as `.png`, `.pdf` and `.csv`.

    Curves of one name look alike. `lines` are single settings, by name, at their distance from the best in per cent.
    """
    names = list(dict.fromkeys(curve.name for curves in panels.values() for curve in curves))
    rows = []
    with styled():
        figure, grid = new_figure(4.1, 1, len(panels), sharey=True)
        for axes, (head, curves) in zip(grid[0], panels.items(), strict=True):
            for curve in curves:
                style, share = look(names.index(curve.name)), 100 / max(curve.settings, 1)
                low, high, middle = (share * np.array(counts) for counts in (curve.least, curve.most, curve.within))
                if curve.settings == max(other.settings for other in curves):  # more bands would hide one another
                    axes.fill_between(THRESHOLDS, low, high, step="post", color=style["color"], alpha=0.18, linewidth=0)
                axes.plot(THRESHOLDS, middle, drawstyle="steps-post", label=literal(curve.name), **style)
                rows += [
                    {"panel": head, "arm": curve.name, "threshold": x, "settings": curve.settings}
                    | {"within": n, "least": least, "most": most}
                    for x, n, least, most in zip(THRESHOLDS, curve.within, curve.least, curve.most, strict=True)
                ]
            for name, value in lines.items():
                axes.axvline(value, color=MUTED, linewidth=0.9, linestyle=(0, (1, 1.5)), label=f"{name}: {value:.1f} %")
            axes.set(title=f"{head[0].upper()}{head[1:]}", xscale="log", xlim=(1, 100), ylim=(-2, 103))
            axes.set_xlabel("x: at most this much above the best of all, %")
            axes.set_xticks(_TICKS, list(map(str, _TICKS)))
            axes.minorticks_off()
            axes.grid(color="#ebebeb", linewidth=0.5)
        grid[0][0].set_ylabel("settings within x % of the best, %\n(higher is better)")
        headline(figure, title, reading)
        share_legend(figure, grid[0], columns=2)
        pictures = rendered(figure)
    return write_files(path_stem, pictures | {".csv": csv_text(rows)})
