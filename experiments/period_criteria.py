"""How much does a criterion for the restart period lose against the best period, when the spectrum is random?

Each criterion sees the rule and the spectrum (the paper's heuristic only the mean sigma) and picks one period. Its
regret is log10 of its final loss minus log10 of the least final loss over all periods, no restart included.

Source: paper section 3 and its choice of K, appendix A.9; theory notes E1, E2, E7, R16, R20 to R22.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from scipy.special import logsumexp

from common import Frame, dot_chart, script, whole
from twophase import theory
from twophase.figures.style import HATCH, headline, look, new_figure

SPECTRA, MODES, SEED = 1500, 6, 0
ROUNDS, HORIZONS = 60, (12, 60, 120)
RANGES = (11, 20, 60)
"""Largest K of the criteria that have no range of their own; no larger than the rounds."""
BOOTSTRAPS = 400


@dataclass(frozen=True)
class Problems:
    """Random rules, in EMA form, of shape (N, 1), sigma and weights of their modes, (N, modes), and learning rates."""

    rules: Any
    sigma: np.ndarray
    weights: np.ndarray
    lr: np.ndarray

    @classmethod
    def draw(cls, count: int) -> Problems:
        """Return the first `count` problems of the seed."""
        stream = np.random.default_rng(SEED)

        def problem() -> tuple[Any, ...]:  # one after the other, so that fewer problems are the first of more
            rule = stream.uniform(0.3, 1.3), stream.uniform(0.6, 0.98), stream.integers(2) == 1
            return *rule, stream.uniform(0.05, 1, MODES), stream.dirichlet(np.ones(MODES))

        columns = zip(*(problem() for _ in range(count)), strict=True)
        lr, momentum, nesterov, sigma, weights = map(np.array, columns)
        rules = theory.rule_grid(lr[:, None], momentum[:, None], nesterov[:, None], "ema")
        return cls(rules, sigma, weights, lr[:, None])

    def log_squares(self, logs: np.ndarray) -> np.ndarray:
        """Return log of sum_j w_j exp(2 logs_j), over the modes."""
        return np.asarray(logsumexp(2 * logs + np.log(self.weights), axis=-1))

    def losses(self, rounds: int) -> tuple[np.ndarray, np.ndarray]:
        """Return log|chi_K| for K = 1 ... rounds, (K, N, modes), and log10 of the final losses, (K, N)."""
        logs = theory.restart_table(self.rules, self.sigma, rounds)[1]
        periods = np.arange(1, rounds + 1)
        rest = np.concatenate([np.zeros((1, *logs.shape[1:])), logs])[rounds % periods]
        ends = (rounds // periods)[:, None, None] * logs + rest
        return logs, (self.log_squares(ends) - np.log(2)) / np.log(10)


def choices(problems: Problems, logs: np.ndarray, losses: np.ndarray) -> dict[str, np.ndarray]:
    """Return the period, less 1, that each criterion picks for each problem; ties go to the smaller period."""
    (rounds, count), squares = losses.shape, problems.log_squares(logs)
    periods = np.arange(1, rounds + 1)[:, None]
    picked = {
        "final loss (exact)": losses.argmin(axis=0),
        "rate of the slowest mode": (logs.max(axis=-1) / periods).argmin(axis=0),
        **{f"rate of Σwχ², K ≤ {k}": (squares / periods)[:k].argmin(axis=0) for k in RANGES},
        **{f"paper: least Σwχ², K ≤ {k}": squares[:k].argmin(axis=0) for k in RANGES},
    }
    for name, corrected in (("paper: π/(2√s) at mean σ", False), ("corrected, at mean σ", True)):
        mean = problems.sigma.mean(axis=1, keepdims=True)
        picked[name] = whole(theory.heuristic_period(problems.rules, mean, corrected)[:, 0], rounds) - 1
    return picked | {"K = 3": np.full(count, 2), "no restart": np.full(count, rounds - 1)}


def table(count: int = SPECTRA) -> Frame:
    """Return each criterion's regret in dex by rounds, with standard errors, and the share of best periods in %.

    The last line of each horizon is the control: momentum-free outer SGD at the same learning rate. Its regret is below
    0 where it is better than every period.
    """
    problems = Problems.draw(count)
    samples = np.random.default_rng(SEED).integers(count, size=(BOOTSTRAPS, count))
    with np.errstate(divide="ignore"):
        log_sgd = np.log(np.abs(1 - problems.lr * problems.sigma))
    rows = []
    for rounds in HORIZONS:
        logs, losses = problems.losses(rounds)
        reached = {name: losses[k, np.arange(count)] for name, k in choices(problems, logs, losses).items()}
        reached["SGD, no momentum"] = (problems.log_squares(rounds * log_sgd) - np.log(2)) / np.log(10)
        for name, loss in reached.items():
            regret = loss - losses.min(axis=0)
            again = regret[samples]
            exact = float(np.mean(regret < 1e-9))
            rows.append(
                {"rounds": rounds, "criterion": name}
                | {"median": np.median(regret), "median_se": np.median(again, axis=1).std()}
                | {"mean": regret.mean(), "mean_se": regret.std() / np.sqrt(count)}
                | {"q10": np.quantile(regret, 0.1)}
                | {"q90": np.quantile(regret, 0.9), "q90_se": np.quantile(again, 0.9, axis=1).std()}
                | {"picks_best": 100 * exact, "better_than_never": 100 * float(np.mean(loss < losses[-1]))}
            )
    return pd.DataFrame(rows)


def draw(found: Frame) -> dict[str, Figure]:
    """Draw regret by criterion after 60 rounds, and the share of best periods that each picks."""
    rows = found[(found["rounds"] == ROUNDS) & ~found["criterion"].str.startswith("SGD")]
    figure, grid = new_figure(3.7, 1, 2, width_ratios=(2.4, 1))
    places = range(len(rows))
    left, right = grid[0]
    left.hlines(places, rows["q10"], rows["q90"], color=HATCH, linewidth=3, label="10 % to 90 %")
    left.plot(rows["median"], places, "o", color=look(0)["color"], label="median")
    left.plot(rows["mean"], places, "D", color=look(2)["color"], label="mean")
    dot_chart(left, rows["criterion"].tolist(), xlabel="regret in dex, lower is better")
    left.set_xlim(left=-0.1)
    left.legend(loc="upper right")
    right.barh(places, rows["picks_best"], color=look(6)["color"], height=0.6)
    for place, share in enumerate(rows["picks_best"]):
        right.text(share + 3, place, f"{share:.0f}", va="center", fontsize=7.5)
    dot_chart(right, [""] * len(rows), xlabel="picks the best period, %", xlim=(0, 115))
    headline(
        figure,
        "The rate of the slowest mode loses least",
        f"of all criteria that do not know the horizon; {ROUNDS} rounds, {SPECTRA} random spectra",
    )
    return {"": figure}


if __name__ == "__main__":
    script(__doc__, "period_criteria", draw, table)
