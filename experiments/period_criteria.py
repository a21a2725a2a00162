"""How much does a criterion for the restart period lose against the best period, when the spectrum is random?

Each criterion sees the rule and the spectrum (the paper's heuristic only the mean sigma) and picks one period. Its
regret is log10 of its final loss minus log10 of the least final loss over all periods, no restart included.

Source: paper section 3 and its choice of K, appendix A.9; theory notes E1, E2, E7, R16, R20 to R22.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import logsumexp

from common import Result, compute, select
from model import LOG_10, dot_chart, log_residuals
from twophase.figures.matplotlib_types import Axes, Figure
from twophase.figures.style import HATCH, headline, look, name_panels, new_figure, share_legend
from twophase.sweeps.table import format_table
from twophase.theory import heuristic_period, rule_grid

SPECTRA, MODES, SEED = 1500, 6, 0
ROUNDS, HORIZONS = 60, (12, 24, 60, 120)
RANGES = (11, 20, 60)
"""Largest periods for the criteria without a range."""
BOOTSTRAPS = 400
EXACT = 1e-9
"""Regret in dex below which a criterion has picked the best period, or an equal one."""
CRITERIA = {
    "loss": "final loss (exact)",
    "minimax": "rate of the slowest mode",
    **{f"rate {k}": f"rate of Σwχ², K ≤ {k}" for k in RANGES},
    **{f"factor {k}": f"paper: least Σwχ², K ≤ {k}" for k in RANGES},
    "heuristic": "paper: π/(2√s) at mean σ",
    "corrected": "corrected, at mean σ",
    "3": "K = 3",
    "never": "no restart",
}
_CURVES = {"minimax": 2, "factor 20": 1, "factor 60": 4, "corrected": 3, "3": 6, "never": 0}


@dataclass(frozen=True, slots=True)
class Draws:
    """Random problems: rules of shape (N,), sigma and weights of shape (N, modes), a table of log|chi| on top."""

    rules: np.ndarray
    sigma: np.ndarray
    weights: np.ndarray

    @classmethod
    def make(cls, count: int) -> Draws:
        """Return the first `count` problems of the seed."""
        stream = np.random.default_rng(SEED)
        columns: list[list[Any]] = [[] for _ in range(5)]
        for _ in range(count):  # problem after problem, so that fewer problems are the first of more
            columns[0].append(stream.uniform(0.3, 1.3))
            columns[1].append(stream.uniform(0.6, 0.98))
            columns[2].append(stream.integers(2) == 1)
            columns[3].append(stream.uniform(0.05, 1, MODES))
            columns[4].append(stream.dirichlet(np.ones(MODES)))
        lr, momentum, nesterov, sigma, weights = map(np.array, columns)
        return cls(rule_grid(lr, momentum, nesterov, "ema"), sigma, weights)

    def losses(self, rounds: int) -> tuple[np.ndarray, np.ndarray]:
        """Compute log|chi_K| for K = 1 ... rounds, shape (K, N, modes), and log10 of the final losses, shape (K, N)."""
        logs, ends = log_residuals(self.rules, self.sigma, rounds)
        return logs, (self.sum_of_squares(ends) - np.log(2)) / LOG_10

    def sum_of_squares(self, logs: np.ndarray) -> np.ndarray:
        """Return log sum_j w_j exp(2 logs_j)."""
        return np.asarray(logsumexp(2 * logs + np.log(self.weights), axis=-1))


def table(quick: bool = False) -> Result:
    """Compute every criterion's choice and regret on random spectra (`quick`: the first) for several horizons."""
    count = 200 if quick else SPECTRA
    draws = Draws.make(count)
    samples = np.random.default_rng(SEED).integers(count, size=(BOOTSTRAPS, count))
    lrs = np.array([rule.lr for rule in draws.rules])[:, None]
    rows: list[dict[str, Any]] = []
    numbers: dict[str, Any] = {}
    for rounds in HORIZONS:
        logs, losses = draws.losses(rounds)
        best = losses.min(axis=0)
        choices = _choices(draws, logs, losses)
        facts: dict[str, Any] = {}
        for name, index in choices.items():
            regret = losses[index, np.arange(count)] - best
            facts[name] = _summary(regret, samples)
            rows.append({"rounds": rounds, "criterion": name, "meaning": CRITERIA[name]} | facts[name])
        with np.errstate(divide="ignore"):  # one round of momentum-free SGD at the same learning rate
            log_plain = np.log(np.abs(1 - lrs * draws.sigma))
        plain = draws.sum_of_squares(rounds * log_plain) / LOG_10 - np.log10(2)
        facts["sgd"] = {
            "better_than_best_period": float((plain < best).mean()),
            "median": float(np.median(plain - best)),
            "better_than_never": float((plain < losses[-1]).mean()),
        }
        facts["never_is_best"] = float((losses[-1] <= best + EXACT).mean())
        numbers[str(rounds)] = facts
    settings = {
        "spectra": count,
        "seed": SEED,
        "draws": f"{MODES} modes sigma ~ U(0.05, 1), weights ~ Dirichlet(1), momentum ~ U(0.6, 0.98), "
        "lr ~ U(0.3, 1.3) in EMA form, heavy ball or Nesterov",
        "regret": "log10 final loss minus that of the best period of 1 to rounds (= no restart)",
        "range": "minimax and loss: K up to rounds; 'K <= k' criteria: up to min(k, rounds)",
        "standard_errors": f"{BOOTSTRAPS} bootstrap samples of the spectra",
    }
    return Result(rows, numbers, settings)


def _choices(draws: Draws, logs: np.ndarray, losses: np.ndarray) -> dict[str, np.ndarray]:
    """Return each criterion's pick for each problem, as index (period - 1); ties go to the smaller period."""
    rounds, count = losses.shape
    column = np.arange(1, rounds + 1)[:, None]
    squares = draws.sum_of_squares(logs)
    mean = draws.sigma.mean(axis=1)
    picked = {"loss": losses.argmin(axis=0), "minimax": (logs.max(axis=-1) / column).argmin(axis=0)}
    for largest in RANGES:
        picked[f"rate {largest}"] = (squares / column)[:largest].argmin(axis=0)
        picked[f"factor {largest}"] = squares[:largest].argmin(axis=0)
    for name, corrected in (("heuristic", False), ("corrected", True)):
        period = np.floor(heuristic_period(draws.rules, mean, corrected) + 0.5)
        picked[name] = np.clip(period, 1, rounds).astype(int) - 1
    picked["3"], picked["never"] = np.full(count, 2), np.full(count, rounds - 1)
    return {name: picked[name] for name in CRITERIA}


def _summary(regret: np.ndarray, samples: np.ndarray) -> dict[str, float]:
    """Compute quantiles and mean of the regret with standard errors, and the share without regret."""
    again = np.sort(regret[samples], axis=1)
    middle = again[:, (regret.size - 1) // 2 : regret.size // 2 + 1]
    first, share = divmod(0.9 * (regret.size - 1), 1)
    high = again[:, int(first) : int(first) + 2]  # of sorted rows these few numbers are enough
    exact = float((regret < EXACT).mean())
    return {
        "median": float(np.median(regret)),
        "median_error": float(middle.mean(axis=1).std()),
        "mean": float(regret.mean()),
        "mean_error": float(regret.std() / np.sqrt(regret.size)),
        "q10": float(np.quantile(regret, 0.1)),
        "q90": float(np.quantile(regret, 0.9)),
        "q90_error": float(np.quantile(high, share, axis=1).std()),
        "exact": exact,
        "exact_error": float(np.sqrt(exact * (1 - exact) / regret.size)),
    }


# -------------------------------------------------------------------------------------------------- tables and figures


def tables(result: Result) -> str:
    """Write every criterion's regret, with standard errors, and how often it picks the best period."""
    facts = result.numbers[str(ROUNDS)]
    rows = []
    for name, text in CRITERIA.items():
        f = facts[name]
        cells = [f"{f[key]:.2f} ({f[key + '_error']:.2f})" for key in ("median", "mean", "q90")]
        rows.append([text, *cells, f"{f['exact']:.0%}"])
    return format_table([f"regret in dex, {ROUNDS} rounds", "median", "mean", "90 %", "picks the best"], rows)


def figures(result: Result) -> dict[str, Figure]:
    """Draw regret by criterion with the share of best periods that each picks, and the regret over the horizon."""
    figure, grid = new_figure(3.9, 1, 2, width_ratios=(2.4, 1))
    rows = select(result.rows, rounds=ROUNDS)
    _draw_regret(grid[0][0], rows)
    _draw_exact(grid[0][1], rows)
    name_panels(grid[0], [f"regret after {ROUNDS} rounds", "picks the best period"])
    headline(
        figure,
        "What each criterion for the restart period loses",
        f"log10 of the final loss over that of the best period (dex), lower is better; {result.settings['spectra']} "
        "random spectra",
    )
    horizons, grid = new_figure(3.3, 1, 2, width_ratios=(2, 1))
    _draw_horizons(grid[0][0], result)
    share_legend(horizons, grid[0][:1], grid[0][1:])
    headline(
        horizons,
        "In longer runs more is at stake",
        "median regret against the best period (dex), lower is better; bars: standard errors over spectra",
    )
    return {"": figure, "-rounds": horizons}


def _draw_regret(axes: Axes, rows: list[Any]) -> None:
    for place, row in enumerate(rows):
        label = None if place else {"range": "10 % to 90 %", "median": "median", "mean": "mean"}
        names = label or dict.fromkeys(("range", "median", "mean"))
        axes.plot([row["q10"], row["q90"]], [place, place], color=HATCH, linewidth=3, label=names["range"])
        axes.plot([row["median"]], [place], "o", color=look(0)["color"], label=names["median"], markersize=4.5)
        axes.plot([row["mean"]], [place], "D", color=look(2)["color"], label=names["mean"], markersize=4)
    labels = [row["meaning"] for row in rows]
    dot_chart(axes, labels, xlabel="regret in dex (0: as good as the best period)\n(lower is better)")
    axes.set_xlim(left=-0.1)
    axes.grid(axis="x", linewidth=0.4)
    axes.set_axisbelow(True)
    axes.legend(loc="upper right")


def _draw_exact(axes: Axes, rows: list[Any]) -> None:
    places = range(len(rows))
    shares, errors = ([100 * row[key] for row in rows] for key in ("exact", "exact_error"))
    axes.barh(places, shares, xerr=errors, color=look(6)["color"], height=0.6, error_kw={"linewidth": 0.8})
    for place, share in zip(places, shares, strict=True):
        axes.text(share + 4, place, f"{share:.0f}", va="center", fontsize=7.5)
    axes.set_yticks([])
    axes.set(xlabel="% of the spectra\n(more is better)", ylim=(len(rows) - 0.5, -0.5), xlim=(0, 115))
    axes.set_xticks([0, 50, 100])
    axes.spines[["top", "right"]].set_visible(False)


def _draw_horizons(axes: Axes, result: Result) -> None:
    for name, number in _CURVES.items():
        some = select(result.rows, criterion=name)
        x = [row["rounds"] for row in some]
        y, errors = [row["median"] for row in some], [row["median_error"] for row in some]
        axes.errorbar(x, y, errors, label=CRITERIA[name], capsize=2, elinewidth=0.8, **look(number, every=1))
    axes.set_xscale("log")
    axes.set_xticks(HORIZONS, [str(rounds) for rounds in HORIZONS])
    axes.minorticks_off()
    axes.set(xlabel="rounds (log scale)", ylabel="median regret in dex")


def main() -> None:
    """Run the experiment."""
    compute("period_criteria", __doc__, table, figures, tables)


if __name__ == "__main__":
    main()
