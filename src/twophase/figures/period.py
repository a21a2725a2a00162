"""The figure of `twophase period --plot`: the oscillation in its true envelope, and rate or loss against the period."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from twophase.errors import UsageError
from twophase.figures.style import (
    INK,
    MUTED,
    check_numbers,
    headline,
    look,
    name_panels,
    new_figure,
    rendered,
    styled,
    write_files,
)
from twophase.files import csv_text
from twophase.rule import OuterRule
from twophase.theory.advice import Advice
from twophase.theory.contraction import log_restart_factor, restart_table
from twophase.theory.modes import asymptotic_rate, envelope
from twophase.theory.periods import cancellation_periods, log_final_loss

Rows = list[dict[str, Any]]

_MOST_ROUNDS = 400  # drawn of a trajectory
_MOST_MODES = 12  # drawn one by one
_MOST_PERIODS = 2000
_ENDINGS = (".png", ".pdf")
_HEADER = "panel,x,series,y\n"  # of the table of numbers


def check_files(path: Path) -> None:
    """Refuse a name that ends neither with .png nor with .pdf, or whose numbers would replace another table."""
    if path.suffix not in _ENDINGS:
        raise UsageError(f"--plot {path}: the name must end with {' or '.join(_ENDINGS)}")
    check_numbers([path.with_suffix(".csv")], _HEADER, f"--plot {path}")


def draw(advice: Advice, path: Path) -> list[Path]:
    """Write the figure to `path`, which `check_files` has passed, and its numbers next to it, as .csv."""
    parts = [_motion, _rates, *([_losses] if advice.rounds is not None else [])]
    rows: Rows = []
    with styled():
        figure, grid = new_figure(3.7, 1, len(parts))
        titles = [part(axes, advice, rows) for part, axes in zip(parts, grid[0], strict=True)]
        for axes in grid[0]:  # below the panel: wherever it lay inside, it would cover the curve of some rule
            axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18))
        name_panels(grid[0], titles)
        headline(
            figure, _finding(advice), f"{advice.rule.describe()}; residual and loss: lower is better; rate: higher is"
        )
        pictures = rendered(figure, [path.suffix])
    return write_files(path.with_suffix(""), pictures | {".csv": csv_text(rows)})


def _finding(advice: Advice) -> str:
    """Name the recommended period and what it gains on the slowest mode, or that nothing is gained."""
    best, without = advice.recommended, advice.without
    if best.period is None:
        return f"No restart is best: the slowest mode contracts by {without.rate:.3g} nats a round"
    return (
        f"Restart every {best.period} rounds: the slowest mode contracts by {best.rate:.3g} nats a round, without "
        f"restarts by {without.rate:.3g}"
    )


def _motion(axes: Any, advice: Advice, rows: Rows) -> str:
    """Draw the largest mode that oscillates, or the slowest if none does, with and without restarts."""
    rule, period = advice.rule, advice.recommended.period
    first = cancellation_periods(rule, advice.sigma, 1)[:, 0]
    turning = ~np.isnan(first)
    sigma = float(advice.sigma[turning].max() if turning.any() else advice.sigma.min())
    count = _shown_rounds(advice, first[turning & (advice.sigma == sigma)])
    if turning.any():
        name, fine = f"sigma {sigma:.4g}", np.linspace(0, count, 400)
        bound = envelope(rule, sigma, fine)
        axes.fill_between(fine, -bound, bound, color="#f0f0f0", linewidth=0)
        for side, label in ((bound, "true envelope"), (-bound, None)):
            axes.plot(fine, side, color=MUTED, linestyle=":", linewidth=1.0, label=label)
        zeros = cancellation_periods(rule, sigma, count + 2)  # at most one a round
        zeros = zeros[zeros <= count]
        marks = {"linestyle": "none", "marker": "|", "color": INK, "markersize": 7}
        axes.plot(zeros, np.zeros_like(zeros), label="cancellations", **marks)
        rows += _points("envelope", fine, name, bound)
        rows += _points("cancellation", zeros, name, np.zeros_like(zeros))
    axes.axhline(0, color=MUTED, linewidth=0.5)
    times = np.arange(count + 1)
    curves = {"no restart": residuals(rule, sigma, count, None), "recommended": residuals(rule, sigma, count, period)}
    for number, (name, values) in enumerate(curves.items(), start=1):
        rows += _points("residual", times, name, values)
        if number == 1 or period is not None:
            label = name if number == 1 else f"every {period} rounds"
            axes.plot(times, values, **look(number, every=1 if count <= 40 else max(1, count // 20)), label=label)
    axes.set(xlabel="round", ylabel="residual $x_t / x_0$", xlim=(0, count))
    axes.locator_params(axis="y", nbins=5)  # more would get longer labels, after the layout has been found
    return f"mode with sigma {sigma:.3g}"


def residuals(rule: OuterRule, sigma: float, rounds: int, period: int | None) -> Any:
    """Return x_t / x_0 for t = 0 ... rounds, with a restart every `period` rounds (None: none), from exact factors."""
    times = np.arange(rounds + 1)
    length = rounds + 1 if period is None else period
    full_sign, full = log_restart_factor(rule, sigma, length)
    sign, log = log_restart_factor(rule, sigma, times % length)
    cycles = times // length
    with np.errstate(invalid="ignore", over="ignore"):
        carried = np.where(cycles > 0, cycles * full, 0.0)
        return (
            np.where(full_sign == 0, cycles == 0, np.where(cycles % 2 == 1, full_sign, 1))
            * sign
            * np.exp(carried + log)
        )


def _shown_rounds(advice: Advice, first: Any) -> int:
    reach = int(np.ceil(5 * first.max())) if first.size else 60
    reach = max(reach, 3 * (advice.recommended.period or 1), 8)
    return min(reach, advice.rounds or reach, _MOST_ROUNDS)


def _rates(axes: Any, advice: Advice, rows: Rows) -> str:
    """Draw contraction a round against the period: the slowest mode's, and each mode's if they are few."""
    periods = np.arange(1, min(advice.max_period, _MOST_PERIODS) + 1)
    rates = -restart_table(advice.rule, advice.sigma, int(periods[-1]))[1] / periods[:, None]
    slowest = rates.min(axis=1)
    if 1 < advice.sigma.size <= _MOST_MODES:
        for j, values in enumerate(rates.T):
            axes.plot(periods, values, color="#b5b5b5", linewidth=0.7, label="each mode" if j == 0 else None)
            rows += _points("rate", periods, f"sigma {advice.sigma[j]:.6g}", values)
    axes.plot(periods, slowest, **look(2), label="slowest mode")
    without = float(np.min(asymptotic_rate(advice.rule, advice.sigma)))
    if np.isfinite(without):
        axes.axhline(without, **look(1), label="no restart, slowest")
    _gone(axes, periods[slowest == np.inf], edge=1)
    _ring(axes, advice.recommended.period, advice.recommended.rate, edge=1)
    rows += _points("rate", periods, "slowest mode", slowest)
    rows.append({"panel": "rate", "series": "no restart", "y": without})
    finite = np.append(slowest, without)
    drawn = finite[np.isfinite(finite)] if np.isfinite(finite).any() else np.zeros(1)  # a mode may vanish altogether
    top = max(1.25 * float(drawn.max()), 2 * abs(without) if np.isfinite(without) else 0.0, 1e-3)
    bottom = min(-0.05 * top, max(1.1 * drawn.min(), -top))
    axes.set(xlabel="restart period K", ylabel="rate (nats a round)", ylim=(bottom, top))
    return "rate against the period"


def _losses(axes: Any, advice: Advice, rows: Rows) -> str:
    """Draw the exact loss at the horizon against the period."""
    assert advice.rounds is not None
    periods = np.arange(1, min(advice.max_period, advice.rounds, _MOST_PERIODS) + 1)
    losses = log_final_loss(advice.rule, advice.sigma, advice.rounds, periods, advice.weights) / np.log(10)
    without = (advice.without.log_loss or 0.0) / np.log(10)
    axes.plot(periods, losses, **look(2), label="restart every K")
    axes.axhline(without, **look(1), label="no restart")
    _gone(axes, periods[losses == -np.inf], edge=0)
    if advice.recommended.log_loss is not None:
        _ring(axes, advice.recommended.period, advice.recommended.log_loss / np.log(10), edge=0)
    rows += _points("loss", periods, "log10 loss", losses)
    rows.append({"panel": "loss", "series": "no restart", "y": without})
    axes.set(xlabel="restart period K", ylabel="log10 final loss")
    return f"loss after {advice.rounds} rounds"


def _gone(axes: Any, periods: Any, edge: int) -> None:
    """Mark periods that leave nothing at the edge, 0 or 1, that the curve lies beyond there."""
    if periods.size:
        marks = {"marker": "^" if edge else "v", "color": INK, "linestyle": "none", "clip_on": False}
        height = np.full(periods.size, edge)
        axes.plot(periods, height, transform=axes.get_xaxis_transform(), label="exactly zero", **marks)


def _ring(axes: Any, period: int | None, height: float, edge: int) -> None:
    """Mark the recommended period; at an edge if its height is infinite."""
    if period is not None:
        marks = {"marker": "o", "markersize": 6, "markerfacecolor": "none", "color": INK, "linestyle": "none"}
        if not np.isfinite(height):
            height, marks = edge, marks | {"transform": axes.get_xaxis_transform(), "clip_on": False}
        axes.plot([period], [height], label=f"recommended: {period}", **marks)


def _points(panel: str, x: Any, series: str, y: Any) -> Rows:
    return [{"panel": panel, "x": position, "series": series, "y": value} for position, value in zip(x, y, strict=True)]
