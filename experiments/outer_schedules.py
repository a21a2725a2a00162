"""What should an outer schedule do for a given inner one, by the linear model with noise; and does the bench agree?

First the best momentum-free outer rate of each round under three inner schedules and three numbers of replicas. Then
arms of the bench, each tuned within the model at six of its places, next to what the bench's stored reference table has
measured. Spectrum, noise and places were fixed before any result of the bench was there; nothing is fitted to it.

Source: theory notes R32 and R33.
"""

from __future__ import annotations

import csv
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from scipy.stats import spearmanr

from common import RESULTS, Result, compute, select
from model import dot_chart
from schedules import InnerPhases, OuterSchedule, best_rates, inner_phases, second_moments
from twophase.figures.matplotlib_types import Figure
from twophase.figures.style import headline, look, name_panels, new_figure
from twophase.runs.config import InnerConfig, inner_lr
from twophase.sweeps.table import format_table
from twophase.tasks.lm.config import TrainConfig

MODES, EXPONENT, NOISE = 48, 1.5, 1.0
"""Spectrum `i^-EXPONENT` with `E x^2 = 1` in each mode, and the noise that the bench is predicted with."""
NOISES = (0.3, NOISE, 3.0)
"""Noise levels; a mode's standard deviation is this times sqrt(lambda), as in linear regression with noisy labels."""
Schedule = Literal["constant", "cosine", "wsd"]
SCHEDULES: tuple[Schedule, ...] = ("constant", "cosine", "wsd")
REPLICAS = (1, 2, 8)
WORKLOADS: dict[str, tuple[int, int, int, Schedule]] = {
    "short": (2, 16, 480, "cosine"),
    "one-replica": (1, 16, 960, "cosine"),
    "code": (2, 16, 480, "wsd"),
    "sparse": (2, 64, 768, "wsd"),
    "eight": (8, 8, 240, "cosine"),
    "long": (2, 16, 960, "cosine"),
}
"""Replicas, inner steps a round, inner steps and inner schedule of those of the bench with equal data and model."""
_FINALS = tuple(2.0 ** np.arange(-4, 4.5, 0.5))
"""Last over first rate of the straight lines that are tried."""


CONSTANT = OuterSchedule()


@dataclass(frozen=True, slots=True)
class Arm:
    """A method of the comparison: how many outer numbers are tuned with the inner rate, and its schedule."""

    tuned: int
    """None, `lr`, or `lr` and `momentum`."""
    how: OuterSchedule = CONSTANT


AVERAGING = "averaging"
ARMS = {
    AVERAGING: Arm(0),
    "memoryless": Arm(1),
    "memoryless+schedule=linear:final=2": Arm(1, OuterSchedule(final=2)),
    "heavy-ball:momentum=~0.6": Arm(2),
    "heavy-ball:momentum=~0.6@3": Arm(2, OuterSchedule(period=3)),
    "nesterov:momentum=~0.6": Arm(2, OuterSchedule(nesterov=True)),
    "nesterov:momentum=~0.6@3": Arm(2, OuterSchedule(nesterov=True, period=3)),
    "heavy-ball:momentum=~0.6+schedule=momentum:warmup=0": Arm(2, OuterSchedule(ramp=True)),
}
"""By the bench's names."""
_NAMES = dict(
    zip(
        ARMS,
        ("averaging", "memoryless", "memoryless+rising rate", "heavy-ball", "heavy-ball@3", "nesterov", "nesterov@3",
         "heavy-ball+momentum ramp"),
        strict=True,
    )
)  # fmt: skip


def base(workload: str, schedule: Schedule | None = None, replicas: int = 0) -> TrainConfig:
    """Return the configuration of a workload, at peak inner learning rate 1; with another schedule and replicas."""
    its_replicas, inner_steps, steps, its_schedule = WORKLOADS[workload]
    inner = InnerConfig(lr=1.0, schedule=schedule or its_schedule, warmup=0.1, decay=0.2)
    return TrainConfig(inner=inner, replicas=replicas or its_replicas, inner_steps=inner_steps, steps=steps)


@dataclass(frozen=True, slots=True)
class Model:
    """The linear model of a run, whose configuration gives replicas, steps and inner schedule."""

    config: TrainConfig
    noise: float
    modes: int

    @property
    def eigenvalue(self) -> np.ndarray:
        """The spectrum."""
        return np.arange(1, self.modes + 1) ** -EXPONENT

    def phases(self, peaks: Any) -> InnerPhases:
        """Return every round's inner phase, for each peak inner learning rate."""
        config = self.config
        shape = np.array([inner_lr(config, step) for step in range(config.steps)]).reshape(-1, config.inner_steps)
        rates = np.multiply.outer(peaks, shape)
        return inner_phases(self.eigenvalue, rates, self.noise * np.sqrt(self.eigenvalue), config.replicas)

    def losses(self, arm: Arm, peaks: Any, lrs: Any, momenta: Any) -> np.ndarray:
        """Compute final losses by (learning rate, momentum, peak); inf where not finite."""
        xx = second_moments(self.phases(peaks), np.reshape(lrs, (-1, 1, 1)), np.reshape(momenta, (-1, 1)), arm.how)
        return np.nan_to_num(0.5 * (self.eigenvalue * xx).sum(axis=-1), nan=np.inf)

    def tuned(self, arm: Arm) -> dict[str, float]:
        """Tune the arm: a grid of powers of two, then ever finer grids around the best point.

        The grid holds learning rate 1 and momentum 0, so that no arm is behind one that it has as a special case.
        """
        widths = [1.0] * (1 + arm.tuned)
        points = [np.arange(-8, 2.0), np.arange(-3, 6.0), np.arange(-5, 1.0)][: 1 + arm.tuned]
        best, least = (0.0, 0.0, 0.0), np.inf
        for _ in range(12):
            peak, lr, decay = [*points, *[np.zeros(1)] * (2 - arm.tuned)]
            losses = self.losses(arm, 2.0 ** np.minimum(peak, 1), 2.0**lr, 1 - 2.0 ** np.minimum(decay, 0))
            if losses.min() <= least:
                i, j, k = np.unravel_index(losses.argmin(), losses.shape)
                best, least = (float(min(peak[k], 1)), float(lr[i]), float(min(decay[j], 0))), float(losses.min())
            widths = [width / 2 for width in widths]
            points = [at + width * np.arange(-2, 3) for at, width in zip(best, widths, strict=False)]
        return {"loss": least, "inner_lr": 2.0 ** best[0], "lr": 2.0 ** best[1], "momentum": 1 - 2.0 ** best[2]}


def table(quick: bool = False) -> Result:
    """Compute best outer rates, predicted gains, and their rank correlation with measured ones."""
    modes, noises = (12, (NOISE,)) if quick else (MODES, NOISES)
    measured = measured_gains()
    lines: list[dict[str, Any]] = []
    schedules: dict[str, Any] = {}
    for noise, kind, replicas in itertools.product(noises, SCHEDULES, REPLICAS[1:2] if quick else REPLICAS):
        config = base("short", kind, replicas)
        facts, rates = _schedule(Model(config, noise, modes))
        schedules[f"noise {noise:g}, {kind}, R={replicas}"] = facts
        about = {"panel": "rates", "noise": noise, "schedule": kind, "replicas": replicas}
        lines += [about | {"round": t + 1, "rate": rate} for t, rate in enumerate(rates.tolist())]
    predicted: dict[str, dict[str, dict[str, float]]] = {}
    for noise in noises:
        predicted[f"{noise:g}"] = by_place = {}
        for place in [*WORKLOADS][:2] if quick else WORKLOADS:
            best = {name: Model(base(place), noise, modes).tuned(arm) for name, arm in ARMS.items()}
            by_place[place] = {name: math.log(best[AVERAGING]["loss"] / at["loss"]) for name, at in best.items()}
            lines += [
                {"panel": "gains", "noise": noise, "place": place, "arm": arm, "predicted": by_place[place][arm],
                 "measured": measured[place][arm], **at}
                for arm, at in best.items()
            ]  # fmt: skip
    ranks = {noise: rank_correlations(by_place, measured) for noise, by_place in predicted.items()}
    settings = {
        "spectrum": f"lambda_i = i^-{EXPONENT}, {modes} modes, E x^2 = 1; noise level times sqrt(lambda_i)",
        "gains": "natural logarithm of averaging's expected final loss over the arm's, each tuned",
    }
    return Result(lines, {"schedules": schedules, "predicted": predicted, "ranks": ranks}, settings)


def _schedule(model: Model) -> tuple[dict[str, float], np.ndarray]:
    """Summarize the best rates and their gains, at the inner rate that is best for averaging; add the rates."""
    averaging = model.tuned(ARMS[AVERAGING])
    peak = averaging["inner_lr"]
    phases = model.phases(peak)
    best, loss = best_rates(phases, model.eigenvalue)
    lrs = 2.0 ** np.arange(-4, 4, 0.05)
    by_final = {
        final: model.losses(Arm(1, OuterSchedule(final=final)), [peak], lrs, [0.0]).min()
        for final in map(float, _FINALS)
    }
    line = min(by_final, key=lambda final: by_final[final])
    full = round(model.config.inner.warmup * len(best))  # the first round at the full inner rate
    body = best[full:]
    least = full + int(body.argmin())
    flat = np.where(np.arange(len(best)) > least, body.min(), best)[:, None]
    scaled = InnerPhases(flat * phases.progress, flat**2 * phases.variance)  # averaging of these is SGD at such rates
    held = float((model.eigenvalue * second_moments(scaled, 1.0, 0.0, CONSTANT)).sum()) / 2
    facts = {
        "inner_lr": peak,
        "first": float(best[0]),
        "full": float(body[0]),
        "least": float(body.min()),
        "least_round": least + 1,
        "last": float(body[-1]),
        "line": line,
        "gain_constant": math.log(averaging["loss"] / min(by_final[1.0], averaging["loss"])),
        "gain_line": math.log(averaging["loss"] / min(by_final[line], averaging["loss"])),
        "gain_held": math.log(averaging["loss"] / held),
        "gain_best": math.log(averaging["loss"] / loss),
    }
    return facts, best


def measured_gains() -> dict[str, dict[str, float]]:
    """Return the mean logarithmic gain over averaging by workload and arm that the bench's stored table has."""
    gains: dict[str, dict[str, float]] = {}
    with (RESULTS / "outer_schedules-measured.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            gains.setdefault(row["place"], {})[row["arm"]] = float(row["gain"])
    return gains


def rank_correlations(
    predicted: Mapping[str, Mapping[str, float]], measured: Mapping[str, Mapping[str, float]]
) -> dict[str, dict[str, float]]:
    """Return Spearman's rank correlation of predicted and measured gains at each place, and over all of them.

    With the number of arms, the share of signs that agree (averaging's own left out), and nan where all are level.
    Predictions that agree to 1e-4 are level.
    """
    pairs = {
        place: [(round(gain, 4), measured[place][arm], arm) for arm, gain in gains.items()]
        for place, gains in predicted.items()
    }
    pairs["all"] = [pair for some in pairs.values() for pair in some]
    return {place: _correlation(some) for place, some in pairs.items()}


def _correlation(pairs: Sequence[tuple[float, float, str]]) -> dict[str, float]:
    x, y = ([pair[axis] for pair in pairs] for axis in (0, 1))
    level = len(set(x)) < 2 or len(set(y)) < 2  # no order, of which SciPy warns
    signs = [(a > 0) == (b > 0) for a, b, arm in pairs if arm != AVERAGING]
    rho = math.nan if level else float(spearmanr(x, y).statistic)  # type: ignore[union-attr]
    return {"rho": rho, "arms": len(pairs), "signs": sum(signs) / len(signs)}


# -------------------------------------------------------------------------------------------------- tables and figure


def tables(result: Result) -> str:
    """Write the course and the gains of the best rates, the predicted gains of the arms, and the rank correlations."""
    schedules, predicted, ranks = (result.numbers[name] for name in ("schedules", "predicted", "ranks"))
    keys = ("first", "full", "least", "least_round", "last", "line", "gain_constant", "gain_line", "gain_held",
            "gain_best")  # fmt: skip
    shown = {name: facts for name, facts in schedules.items() if name.startswith(f"noise {NOISE:g},")}
    by_place = predicted[f"{NOISE:g}"]
    return "\n\n".join(
        [
            format_table(["", *keys], [[n, *(f"{f[key]:.3g}" for key in keys)] for n, f in shown.items()]),
            format_table(
                ["predicted gain", *by_place],
                [[_NAMES[arm], *(f"{gains[arm]:.3f}" for gains in by_place.values())] for arm in ARMS],
            ),
            format_table(
                ["rank correlation", *next(iter(ranks.values()))],
                [[f"noise {noise}", *(f"{facts['rho']:.2f}" for facts in by.values())] for noise, by in ranks.items()],
            ),
        ]
    )


def figures(result: Result) -> dict[str, Figure]:
    """Draw the best rates by round, and the predicted and measured gains by arm."""
    rows = [row for row in result.rows if row["noise"] == NOISE]
    gains = select(rows, panel="gains")
    figure, grid = new_figure(3.6, 1, 3)
    for number, kind in enumerate(SCHEDULES):
        some = select(rows, panel="rates", schedule=kind, replicas=2)
        grid[0][0].plot([row["round"] for row in some], [row["rate"] for row in some], label=kind, **look(number))
    grid[0][0].set(yscale="log", xlabel="round", ylabel="best outer learning rate")
    grid[0][0].legend()
    for number, place in enumerate(dict.fromkeys(row["place"] for row in gains)):
        values = [100 * row["predicted"] for row in select(gains, place=place)]
        style = look(number, every=1) | {"linestyle": "none"}
        grid[0][1].plot(values, range(len(values)), label=place, markersize=4, **style)
        finite = [row for row in select(gains, place=place) if math.isfinite(row["measured"])]
        pairs = [[100 * row[kind] for row in finite] for kind in ("predicted", "measured")]
        grid[0][2].plot(*pairs, markersize=4, **style)
    dot_chart(grid[0][1], list(_NAMES.values()), xlabel="predicted gain, %")
    grid[0][1].legend(fontsize=6.5, ncols=2, loc="upper center", bbox_to_anchor=(0.4, -0.2))
    grid[0][2].set(xlabel="predicted gain, %", ylabel="measured gain, %")
    name_panels(grid[0], ["2 replicas", "each tuned", "against the bench"])
    headline(
        figure,
        "Best outer learning rates, predicted gains, and the bench's",
        f"linear model with gradient noise {NOISE:g}; gains in expected loss over averaging, higher is better",
    )
    return {"": figure}


def main() -> None:
    """Run the experiment."""
    compute("outer_schedules", __doc__, table, figures, tables)


if __name__ == "__main__":
    main()
