"""The figure of `twophase period --plot`: the oscillation in its true envelope, and rate or loss against the period."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from twophase.base.config import UsageError
from twophase.base.files import table_text
from twophase.figures.style import (
    INK,
    MUTED,
    look,
    name_panels,
    new_figure,
    rendered,
    styled,
    write_files,
)
from twophase.rule import OuterRule
from twophase.theory.advice import Advice
from twophase.theory.contraction import log_restart_factor, restart_table
from twophase.theory.modes import asymptotic_rate, envelope
from twophase.theory.periods import cancellation_periods, log_final_loss

_MOST_ROUNDS = 400  # drawn of a trajectory
_MOST_MODES = 12  # drawn one by one
_MOST_PERIODS = 2000
_ENDINGS = (".png", ".pdf")


def check_ending(path: Path) -> None:
    """Refuse a name that ends neither with .png nor with .pdf."""
    if path.suffix not in _ENDINGS:
        raise UsageError(f"--plot {path}: the name must end with {' or '.join(_ENDINGS)}")


def draw(advice: Advice, path: Path) -> list[Path]:
    """Write the figure to `path` (.png or .pdf) and the numbers that it shows beside it, as .csv.

    Raises:
        UsageError: another ending, matplotlib missing, or files that cannot be written.
    """
    check_ending(path)
    rows: list[dict[str, Any]] = []
    with styled():
        columns = 2 if advice.rounds is None else 3
        figure, grid = new_figure(3.3, 1, columns)
        panels = list(grid[0])
        titles = [_motion(panels[0], advice, rows), _rates(panels[1], advice, rows)]
        if advice.rounds is not None:
            titles.append(_losses(panels[2], advice, rows))
        name_panels(panels, titles)
        figure.suptitle(advice.rule.describe(), fontsize=9.5, fontweight="bold")
        picture = rendered(figure)[path.suffix]
    return write_files(path.with_suffix(""), {path.suffix: picture, ".csv": table_text(rows)})


def _motion(axes: Any, advice: Advice, rows: list[dict[str, Any]]) -> str:
    """The largest mode that oscillates, or the slowest if none does, with and without restarts."""
    rule = advice.rule
    first = cancellation_periods(rule, advice.sigma, 1)[:, 0]
    turning = ~np.isnan(first)
    sigma = float(advice.sigma[turning].max() if turning.any() else advice.sigma.min())
    count = _shown_rounds(advice, first[turning & (advice.sigma == sigma)])
    times = np.arange(count + 1)
    plain, restarted = residuals(rule, sigma, count, None), residuals(rule, sigma, count, advice.recommended.period)
    if turning.any():
        fine = np.linspace(0, count, 400)
        bound = envelope(rule, sigma, fine)
        axes.fill_between(fine, -bound, bound, color="#f0f0f0", linewidth=0)
        for side, label in ((bound, "true envelope"), (-bound, None)):
            axes.plot(fine, side, color=MUTED, linestyle=":", linewidth=1.0, label=label)
        zeros = cancellation_periods(rule, sigma, count + 2)  # at most one a round
        zeros = zeros[zeros <= count]
        axes.plot(
            zeros, np.zeros_like(zeros), linestyle="none", marker="|", color=INK, markersize=7, label="cancellations"
        )
        rows += [
            {"panel": "envelope", "x": t, "series": f"sigma {sigma:.4g}", "y": e}
            for t, e in zip(fine, bound, strict=True)
        ]
        rows += [{"panel": "cancellation", "x": t, "series": f"sigma {sigma:.4g}", "y": 0.0} for t in zeros]
    axes.axhline(0, color=MUTED, linewidth=0.5)
    axes.plot(times, plain, **look(1, every=1 if count <= 40 else max(1, count // 20)), label="no restart")
    if advice.recommended.period is not None:
        axes.plot(
            times,
            restarted,
            **look(2, every=1 if count <= 40 else max(1, count // 20)),
            label=f"every {advice.recommended.period} rounds",
        )
    for name, values in (("no restart", plain), ("recommended", restarted)):
        rows += [{"panel": "residual", "x": int(t), "series": name, "y": x} for t, x in zip(times, values, strict=True)]
    axes.set(xlabel="round", ylabel="residual $x_t / x_0$", xlim=(0, count))
    axes.locator_params(axis="y", nbins=5)  # more would get longer labels, after the layout has been found
    _legend(axes)
    return f"mode with sigma {sigma:.3g}"


def residuals(rule: OuterRule, sigma: float, rounds: int, period: int | None) -> Any:
    """x_t / x_0 for t = 0 ... rounds, with a restart every `period` rounds (None: none), from exact factors."""
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


def _rates(axes: Any, advice: Advice, rows: list[dict[str, Any]]) -> str:
    """Contraction a round against the period: the slowest mode's, and each mode's if they are few."""
    periods = np.arange(1, min(advice.max_period, _MOST_PERIODS) + 1)
    rates = -restart_table(advice.rule, advice.sigma, int(periods[-1]))[1] / periods[:, None]
    slowest = rates.min(axis=1)
    few = advice.sigma.size <= _MOST_MODES
    if few and advice.sigma.size > 1:
        for j, values in enumerate(rates.T):
            axes.plot(periods, values, color="#b5b5b5", linewidth=0.7, label="each mode" if j == 0 else None)
            rows += _points("rate", periods, f"sigma {advice.sigma[j]:.6g}", values)
    axes.plot(periods, slowest, **look(2), label="slowest mode")
    without = float(np.min(asymptotic_rate(advice.rule, advice.sigma)))
    if np.isfinite(without):
        axes.axhline(without, **look(1), label="no restart, slowest")
    best = advice.recommended
    if best.period is not None:
        axes.plot(
            [best.period],
            [best.rate],
            marker="o",
            markersize=6,
            markerfacecolor="none",
            color=INK,
            linestyle="none",
            label=f"recommended: {best.period}",
        )
    rows += [
        *_points("rate", periods, "slowest mode", slowest),
        {"panel": "rate", "series": "no restart", "y": without},
    ]
    finite = np.append(slowest, without)
    shown = finite[np.isfinite(finite)] if np.isfinite(finite).any() else np.zeros(1)  # a mode may vanish altogether
    top = max(1.25 * float(shown.max()), 2 * abs(without) if np.isfinite(without) else 0.0, 1e-3)
    axes.set(
        xlabel="restart period K",
        ylabel="rate (nats a round)",
        ylim=(min(-0.05 * top, max(1.1 * shown.min(), -top)), top),
    )
    _legend(axes)
    return "rate against the period"


def _losses(axes: Any, advice: Advice, rows: list[dict[str, Any]]) -> str:
    """Exact loss at the horizon against the period."""
    assert advice.rounds is not None
    periods = np.arange(1, min(advice.max_period, advice.rounds, _MOST_PERIODS) + 1)
    losses = log_final_loss(advice.rule, advice.sigma, advice.rounds, periods, advice.weights) / np.log(10)
    without = (advice.without.log_loss or 0.0) / np.log(10)
    axes.plot(periods, losses, **look(2), label="restart every K")
    axes.axhline(without, **look(1), label="no restart")
    best = advice.recommended
    if best.period is not None and best.log_loss is not None:
        axes.plot(
            [best.period],
            [best.log_loss / np.log(10)],
            marker="o",
            markersize=6,
            markerfacecolor="none",
            color=INK,
            linestyle="none",
            label=f"recommended: {best.period}",
        )
    rows += [*_points("loss", periods, "log10 loss", losses), {"panel": "loss", "series": "no restart", "y": without}]
    axes.set(xlabel="restart period K", ylabel="log10 final loss")
    _legend(axes)
    return f"loss after {advice.rounds} rounds"


def _legend(axes: Any) -> None:
    """Name the curves below a panel: wherever it lay inside, it would cover the envelope or a curve of some rule."""
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18))


def _points(panel: str, periods: Any, series: str, values: Any) -> list[dict[str, Any]]:
    return [{"panel": panel, "x": int(k), "series": series, "y": v} for k, v in zip(periods, values, strict=True)]
