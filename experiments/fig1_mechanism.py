"""How restarts use the oscillation of outer momentum: the paper's figure 1, with its settings and missing controls.

The paper states neither the range of K, nor Nesterov's grid of momenta, nor the blocks' numbers of modes, and shows no
momentum-free control. Here each is a setting, and what depends on it is printed.

Source: paper figure 1; theory notes E1, E15, E18, R15, R20, R31, anchors A0 to A4.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from common import AVERAGING, BLOCKS, HEAVY_BALL, NESTEROV, SIX, Frame, log10_loss, script, signed, whole
from twophase import theory
from twophase.figures.style import INK, headline, look, new_figure, share_legend
from twophase.restart import Periodic, mean_outer_gain
from twophase.rule import OuterRule

SINGLE = 0.95
THREE = [np.linspace(*ends, 9) for ends in BLOCKS]
CASES: dict[str, tuple[list[Any], int]] = {
    "one mode": ([[SINGLE]], 80),
    "six modes": ([[sigma] for sigma in SIX], 120),
    "three blocks": (THREE, 120),
}
"""Sigma of the modes, in groups that may have a period of their own, and rounds."""
RANGES = {"one mode": (10, 20, 40, 80), "six modes": (11, 20, 120)}
"""Largest K of the paper's criterion, least |chi_K|, which depends on it."""
MOMENTA = {
    "[0.5, 1)": np.linspace(0.5, 0.999, 2001),
    "[0.5, 1), 101 points": np.linspace(0.5, 0.999, 101),
    "[0.3, 0.99]": np.linspace(0.3, 0.99, 2001),
    "0.5, 0.6, ..., 0.9": np.linspace(0.5, 0.9, 5),
    "0.1, 0.3, ..., 0.9": np.linspace(0.1, 0.9, 5),
    "[0, 1)": np.linspace(0, 0.999, 2001),
}
"""Grids over which Nesterov's momentum is tuned on the one mode; the result is what its grid makes it."""


def blockwise_loss(groups: Sequence[Any], rounds: int, periods: Sequence[int]) -> float:
    """Return log10 of the final loss of heavy ball where each group of modes has its period; all modes weigh alike."""
    sizes = [np.size(group) for group in groups]
    losses = [10 ** log10_loss(HEAVY_BALL, group, rounds, k) for group, k in zip(groups, periods, strict=True)]
    return float(np.log10(np.average(losses, weights=sizes)))


def table() -> Frame:
    """Return log10 of the final losses by case and method, with the period or the periods of the groups."""
    rows: list[dict[str, Any]] = []

    def add(case: str, method: str, loss: float, period: Any = "") -> None:
        rows.append({"case": case, "method": method, "period": str(period).strip("[]"), "log10_loss": float(loss)})

    for case, (groups, rounds) in CASES.items():
        sigma = np.concatenate(groups)
        best = theory.best_period(HEAVY_BALL, sigma, max_period=rounds, rounds=rounds)
        add(case, "no restart", log10_loss(HEAVY_BALL, sigma, rounds))
        add(case, "best period", log10_loss(HEAVY_BALL, sigma, rounds, best), best)
        add(case, "momentum-free SGD, same lr", log10_loss(AVERAGING, sigma, rounds))
        matched = OuterRule(mean_outer_gain(HEAVY_BALL, Periodic(best), rounds), 0.0, form="ema")
        add(case, "momentum-free SGD, gain of best period", log10_loss(matched, sigma, rounds))
        for largest in RANGES.get(case, ()):
            k = theory.best_period(HEAVY_BALL, sigma, max_period=largest, objective="factor")
            add(case, f"least |chi|, K <= {largest}", log10_loss(HEAVY_BALL, sigma, rounds, k), k)
        if len(groups) > 1:
            means = [np.mean(group) for group in groups]
            for method, periods in {
                "a period each": theory.block_periods(HEAVY_BALL, groups, max_period=rounds, rounds=rounds),
                "paper's heuristic each": whole(theory.heuristic_period(HEAVY_BALL, means, False), rounds),
                "corrected heuristic each": whole(theory.heuristic_period(HEAVY_BALL, means, True), rounds),
            }.items():
                add(case, method, blockwise_loss(groups, rounds, periods), [int(k) for k in periods])
    nesterov = log10_loss(NESTEROV, SINGLE, 80, range(1, 81))
    add("one mode", "Nesterov, no restart", nesterov[-1])
    add("one mode", "Nesterov, best period", nesterov.min(), int(nesterov.argmin()) + 1)
    for name, momenta in MOMENTA.items():
        losses = log10_loss(theory.rule_grid(1.0, momenta, True, "ema"), SINGLE, 80)
        add("one mode", f"Nesterov, no restart, momentum in {name}", losses.min())
    return pd.DataFrame(rows)


def draw(found: Frame) -> dict[str, Figure]:
    """Draw loss curves, the oscillation of two modes, and final losses over the momentum."""
    return {"": losses(found), "-oscillation": oscillation(), "-tuning": tuning(found)}


def losses(found: Frame) -> Figure:
    """Draw the loss by round without restarts, with the best period, with one for each group, and without momentum."""
    figure, grid = new_figure(3.1, 1, 3)
    periods: Mapping[Any, str] = found.set_index(["case", "method"])["period"]
    for axes, (case, (groups, rounds)) in zip(grid[0], CASES.items(), strict=True):
        sigma, best = np.concatenate(groups), int(periods[case, "best period"])
        curves = {
            "no restart": theory.rollout(HEAVY_BALL, sigma, rounds).loss,
            "one period": theory.rollout(HEAVY_BALL, sigma, rounds, best).loss,
            "no momentum, no restart": theory.rollout(AVERAGING, sigma, rounds).loss,
        }
        if len(groups) > 1:
            each = [int(k) for k in periods[case, "a period each"].split(",")]
            parts = [theory.Block(group, HEAVY_BALL, str(k)) for group, k in zip(groups, each, strict=True)]
            curves["a period for each mode or block"] = theory.rollout_blocks(parts, rounds).loss
        for number, (name, loss) in enumerate(curves.items()):
            logs = np.log10(loss)
            axes.plot(logs, label=name, **look(number, every=rounds // 5))
            axes.annotate(signed(logs[-1]), (rounds, max(logs[-1], -70)), xytext=(2, 0), textcoords="offset points",
                          color=look(number)["color"], fontsize=6.5, va="center", annotation_clip=False)  # fmt: skip
        axes.set(title=f"{case}, K = {best}", xlabel="outer round", xlim=(0, rounds), ylim=(-70, 2))
    grid[0][0].set_ylabel("log₁₀ loss")
    share_legend(figure, list(grid[0]), columns=4)
    headline(
        figure,
        "Restarts lower the loss; no momentum lowers it further",
        f"{HEAVY_BALL.describe()}; the last loss stands at each curve's end",
    )
    return figure


def oscillation() -> Figure:
    """Draw the residual of a fast and a slow mode, its two envelopes, and its zeros."""
    figure, grid = new_figure(3.1, 1, 2, sharey=True)
    rounds = np.arange(61)
    for axes, sigma in zip(grid[0], (SINGLE, 0.1), strict=True):
        radius = np.exp(-rounds * theory.asymptotic_rate(HEAVY_BALL, sigma))
        bound = np.asarray(theory.envelope(HEAVY_BALL, sigma, rounds))
        for sign in (1, -1):
            axes.plot(sign * bound, label=r"$\pm\sqrt{1+C^2}\,\rho^t$" if sign == 1 else None, **look(1))
            axes.plot(sign * radius, label=r"$\pm\rho^t$" if sign == 1 else None, **look(7))
        axes.plot(theory.rollout(HEAVY_BALL, [sigma], 60).residual[:, 0], label="residual, no restart", **look(2))
        zeros = np.asarray(theory.cancellation_periods(HEAVY_BALL, sigma, 20))
        zeros = zeros[zeros < 60]
        axes.plot(zeros, 0 * zeros, "o", color=INK, label=r"cancellation times $t_\ell$")
        axes.set(title=f"σ = {sigma}", xlabel="outer round", xlim=(0, 60), ylim=(-1.25, 1.25))
    grid[0][0].set_ylabel("residual $x_t$")
    share_legend(figure, list(grid[0]), columns=4)
    headline(figure, "A mode swings through zero, where a restart keeps it", HEAVY_BALL.describe())
    return figure


def tuning(found: Frame) -> Figure:
    """Draw final losses over the momentum without restarts, beside the restarted heavy ball of momentum 0.9."""
    figure, grid = new_figure(3.1)
    axes, momenta = grid[0][0], MOMENTA["[0, 1)"]
    for number, (name, nesterov) in enumerate({"heavy ball": False, "Nesterov": True}.items()):
        rules = theory.rule_grid(1.0, momenta, nesterov, "ema")
        axes.plot(momenta, log10_loss(rules, SINGLE, 80), label=f"{name}, no restart", **look(3 * number))
    best = found[(found["case"] == "one mode") & (found["method"] == "best period")].iloc[0]
    axes.axhline(best["log10_loss"], label=f"heavy ball, momentum 0.9, K = {best['period']}", **look(2))
    axes.set(xlabel="outer momentum", ylabel="log₁₀ loss after 80 rounds", xlim=(0, 1))
    axes.legend()
    headline(
        figure,
        "A small momentum without restarts beats momentum 0.9 with them",
        f"one mode, σ = {SINGLE}, learning rate 1 (EMA form)",
    )
    return figure


if __name__ == "__main__":
    script(__doc__, "fig1_mechanism", draw, table)
