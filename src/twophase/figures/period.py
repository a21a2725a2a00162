"""The figure of `twophase period --plot`: a mode with and without restarts, and rate or loss against the period."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from twophase.config import require
from twophase.figures.style import INK, MUTED, headline, look, new_figure, save, styled
from twophase.theory import (
    Advice,
    asymptotic_rate,
    cancellation_periods,
    envelope,
    log_final_loss,
    restart_factor,
    restart_table,
)

_MOST_ROUNDS = 400  # drawn of a mode's motion
_MOST_PERIODS = 2000


def draw(advice: Advice, path: Path) -> None:
    """Write the figure of an answer as a PNG or PDF.

    Raises:
        UsageError: matplotlib is not installed, or a path that does not end with .png or .pdf.
    """
    require(path.suffix in (".png", ".pdf"), "plot", path, "a file whose name ends with .png or .pdf")
    panels = [_motion, _rates, *([_losses] if advice.rounds is not None else [])]
    with styled():
        figure, axes = new_figure(3.4, 1, len(panels))
        for panel, place in zip(panels, axes[0], strict=True):
            panel(place, advice)
            place.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18))  # inside, it would cover a curve
        best = advice.recommended.period
        choice = "No restart is best" if best is None else f"A restart every {best} rounds is best"
        headline(figure, f"{choice} in the linear model")
        save(path, figure)


def _motion(axes: Any, advice: Advice) -> None:
    """Draw the slowest mode that oscillates, or the slowest if none does, with and without restarts."""
    first = cancellation_periods(advice.rule, advice.sigma, 1)[:, 0]
    turning = np.isfinite(first)
    sigma = float(advice.sigma[turning].min() if turning.any() else advice.sigma.min())
    period = advice.recommended.period
    reach = max(int(5 * np.max(first, where=turning, initial=12)), 3 * (period or 0))
    count = min(reach, advice.rounds or reach, _MOST_ROUNDS)
    if turning.any():
        fine = np.linspace(0, count, 400)
        bound = envelope(advice.rule, sigma, fine)
        axes.fill_between(fine, -bound, bound, color="#f0f0f0", linewidth=0, label="envelope")
        zeros = cancellation_periods(advice.rule, sigma, count + 1)
        zeros = zeros[zeros <= count]
        axes.plot(zeros, np.zeros_like(zeros), "|", color=INK, markersize=7, label="passes zero")
    axes.axhline(0, color=MUTED, linewidth=0.5)
    times = np.arange(count + 1)
    for number, cycle in enumerate([count + 1] if period is None else [count + 1, period]):
        with np.errstate(all="ignore"):  # of a rule that diverges beyond all doubles
            x = restart_factor(advice.rule, sigma, cycle) ** (times // cycle)
            x = x * restart_factor(advice.rule, sigma, times % cycle)
        label = f"restart every {period} rounds" if number else "no restart"
        axes.plot(x, **look(number + 1, every=max(1, count // 20)), label=label)
    axes.set(title=f"mode with sigma {sigma:.3g}", xlabel="round", ylabel="residual $x_t / x_0$", xlim=(0, count))


def _rates(axes: Any, advice: Advice) -> None:
    """Draw the contraction of the slowest mode against the period."""
    periods = np.arange(1, min(advice.max_period, _MOST_PERIODS) + 1)
    rates = (-restart_table(advice.rule, advice.sigma, len(periods))[1] / periods[:, None]).min(axis=1)
    without = float(np.min(asymptotic_rate(advice.rule, advice.sigma)))
    _curve(axes, periods, rates, without, advice.recommended.period)
    axes.set(title="rate of the slowest mode", xlabel="restart period K", ylabel="rate (nats a round)")
    finite = [*rates[np.isfinite(rates)], *([without] if np.isfinite(without) else []), 0.0]
    top = max(1.25 * max(finite), 1e-3)
    axes.set_ylim(max(min(-0.05 * top, 1.1 * min(finite)), -top), top)


def _losses(axes: Any, advice: Advice) -> None:
    """Draw the exact loss at the horizon against the period."""
    assert advice.rounds is not None
    periods = np.arange(1, min(advice.max_period, advice.rounds, _MOST_PERIODS) + 1)
    losses, without = (
        np.asarray(log_final_loss(advice.rule, advice.sigma, advice.rounds, choice, advice.weights)) / np.log(10)
        for choice in (periods, advice.rounds)
    )
    _curve(axes, periods, losses, float(without), advice.recommended.period)
    axes.set(title=f"loss after {advice.rounds} rounds", xlabel="restart period K", ylabel="log10 loss")


def _curve(axes: Any, periods: Any, values: Any, without: float, best: int | None) -> None:
    """Draw a quantity against the period, beside that of no restart, the best period ringed."""
    axes.plot(periods, np.where(np.isfinite(values), values, np.nan), **look(2), label="restart every K rounds")
    if np.isfinite(without):
        axes.axhline(without, **look(1), label="no restart")
    if best is not None and best <= len(periods) and np.isfinite(values[best - 1]):
        axes.plot(best, values[best - 1], "o", color=INK, markerfacecolor="none", markersize=6, label=f"K = {best}")
