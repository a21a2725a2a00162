"""What should an outer schedule do for a given inner one, by the linear model with noise; and does the bench agree?

First the best momentum-free outer rate of each round under three inner schedules and three numbers of replicas. Then
arms of the bench, each tuned within the model at six of its places, next to what the bench's stored reference table has
measured. Spectrum, noise and places were fixed before any result of the bench was there; nothing is fitted to it.

Source: theory notes R32 and R33.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import spearmanr

from twophase.base.config import with_values
from twophase.figures.matplotlib_types import Figure
from twophase.figures.style import headline, look, name_panels, new_figure, signed, span
from twophase.judge.bench import results_of
from twophase.judge.cells import means
from twophase.recipes.arms import CONTROL
from twophase.recipes.bench import PLACES as BENCH
from twophase.recipes.bench import short, stored
from twophase.rule import OuterRule
from twophase.studies._model import dot_chart
from twophase.studies.study import Result, select
from twophase.theory.inputs import rule_grid
from twophase.theory.schedules import InnerPhases, best_rates, inner_phases, moments
from twophase.training.config import RunConfig, inner_lr

QUESTION = "What should an outer schedule do for a given inner one, and does the bench rank arms likewise?"

MODES, EXPONENT, NOISE = 48, 1.5, 1.0
"""Spectrum `i^-EXPONENT` with `E x^2 = 1` in each mode, and the noise that the bench is predicted with."""
NOISES = (0.3, NOISE, 3.0)
"""Noise levels; a mode's standard deviation is this times sqrt(lambda), as in linear regression with noisy labels."""
SCHEDULES, REPLICAS = ("constant", "cosine", "wsd"), (1, 2, 8)
PLACES = ("short", "one-replica", "code", "sparse", "eight", "long")
"""Places of the bench whose replicas have equal data and whose model is the same."""
_HEADER = ("round 1", "full", "least", "", "last", "line", "constant", "line", "held", "free")
_WIDTHS = (8, 7, 7, 5, 7, 7, 10, 7, 7, 7)
_FINALS = tuple(2.0 ** np.arange(-4, 4.5, 0.5))
"""Last over first rate of the straight lines that are tried."""


@dataclass(frozen=True, slots=True)
class Arm:
    """An arm in the model."""

    tuned: int = 2
    """Hyperparameters tuned together with the inner rate: none, `lr`, or `lr` and `momentum`."""
    nesterov: bool = False
    schedule: str = "constant"
    """Of learning rate and momentum."""
    restart: str = "never"


ARMS = {
    CONTROL: Arm(0),
    "memoryless": Arm(1),
    "memoryless+schedule=linear:final=2": Arm(1, schedule="linear:final=2"),
    "heavy-ball:momentum=~0.6": Arm(),
    "heavy-ball:momentum=~0.6@3": Arm(restart="3"),
    "nesterov:momentum=~0.6": Arm(nesterov=True),
    "nesterov:momentum=~0.6@3": Arm(nesterov=True, restart="3"),
    "heavy-ball:momentum=~0.6+schedule=momentum:warmup=0": Arm(schedule="momentum:warmup=0"),
}
"""By the bench's texts."""


@dataclass(frozen=True, slots=True)
class Model:
    """The linear model of a run, whose configuration gives replicas, steps and inner schedule."""

    config: RunConfig
    noise: float
    modes: int

    @property
    def eigenvalue(self) -> np.ndarray:
        """The spectrum."""
        return np.arange(1, self.modes + 1) ** -EXPONENT

    def phases(self, peaks: Any) -> InnerPhases:
        """Return every round's inner phase, for each peak inner learning rate."""
        config = with_values(self.config, {"inner.lr": 1.0})
        shape = np.array([inner_lr(config, step) for step in range(config.steps)]).reshape(-1, config.inner_steps)
        rates = np.multiply.outer(peaks, shape)
        return inner_phases(self.eigenvalue, rates, self.noise * np.sqrt(self.eigenvalue), config.replicas)

    def losses(self, arm: Arm, peaks: Any, lrs: Any, momenta: Any) -> np.ndarray:
        """Compute final losses by (learning rate, momentum, peak); inf where not finite."""
        rules = rule_grid(np.reshape(lrs, (-1, 1, 1)), np.reshape(momenta, (-1, 1)), arm.nesterov)
        run = moments(rules, self.phases(peaks), arm.restart, schedule=arm.schedule)
        return np.nan_to_num(run.loss(self.eigenvalue)[-1], nan=np.inf)

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


def table(*, quick: bool = False) -> Result:
    """Compute best outer rates, predicted gains, and their rank correlation with measured ones."""
    modes, noises = (12, (NOISE,)) if quick else (MODES, NOISES)
    measured = measured_gains(stored("reference.csv"))
    lines: list[dict[str, Any]] = []
    schedules: dict[str, Any] = {}
    bases = {place.name: place.base() for place in BENCH if place.name in PLACES}
    for noise, kind, replicas in itertools.product(noises, SCHEDULES, REPLICAS[1:2] if quick else REPLICAS):
        config = with_values(bases["short"], {"inner.schedule": kind, "replicas": replicas})
        facts, rates = _schedule(Model(config, noise, modes))
        schedules[f"noise {noise:g}, {kind}, R={replicas}"] = facts
        about = {"panel": "rates", "noise": noise, "schedule": kind, "replicas": replicas}
        lines += [about | {"round": t + 1, "rate": rate} for t, rate in enumerate(rates.tolist())]
    predicted: dict[str, dict[str, dict[str, float]]] = {}
    for noise in noises:
        predicted[f"{noise:g}"] = by_place = {}
        for place in PLACES[:2] if quick else PLACES:
            best = {arm: Model(bases[place], noise, modes).tuned(how) for arm, how in ARMS.items()}
            by_place[place] = {arm: math.log(best[CONTROL]["loss"] / at["loss"]) for arm, at in best.items()}
            lines += [
                {"panel": "gains", "noise": noise, "place": place, "arm": arm, "predicted": by_place[place][arm],
                 "measured": measured[place][arm], **at}
                for arm, at in best.items()
            ]  # fmt: skip
    ranks = {noise: rank_correlations(by_place, measured) for noise, by_place in predicted.items()}
    settings = {
        "spectrum": f"lambda_i = i^-{EXPONENT}, {modes} modes, E x^2 = 1; noise level times sqrt(lambda_i)",
        "gains": "natural logarithm of averaging's expected final loss over the arm's, each tuned",
        "measured_places": PLACES,
    }
    return Result(lines, {"schedules": schedules, "predicted": predicted, "ranks": ranks}, settings)


def _schedule(model: Model) -> tuple[dict[str, float], np.ndarray]:
    """Summarize the best rates and their gains, at the inner rate that is best for averaging; add the rates."""
    averaging = model.tuned(ARMS[CONTROL])
    peak = averaging["inner_lr"]
    best = best_rates(model.phases(peak), model.eigenvalue)
    lrs = 2.0 ** np.arange(-4, 4, 0.05)
    by_final = {
        final: model.losses(Arm(1, schedule=f"linear:final={final!r}"), [peak], lrs, [0.0]).min()
        for final in map(float, _FINALS)
    }
    line = min(by_final, key=lambda final: by_final[final])
    full = round(model.config.inner.warmup * len(best.rates))  # the first round at the full inner rate
    body = best.rates[full:]
    least = full + int(body.argmin())
    flat = np.where(np.arange(len(best.rates)) > least, body.min(), best.rates)[:, None]
    phases = model.phases(peak)
    scaled = InnerPhases(flat * phases.progress, flat**2 * phases.variance)  # averaging of these is SGD at such rates
    flat_loss = float(moments(OuterRule(1.0, 0.0), scaled).loss(model.eigenvalue)[-1])
    facts = {
        "inner_lr": peak,
        "first": float(best.rates[0]),
        "full": float(body[0]),
        "least": float(body.min()),
        "least_round": least + 1,
        "last": float(body[-1]),
        "line": line,
        "gain_constant": math.log(averaging["loss"] / min(by_final[1.0], averaging["loss"])),
        "gain_line": math.log(averaging["loss"] / min(by_final[line], averaging["loss"])),
        "gain_held": math.log(averaging["loss"] / flat_loss),
        "gain_best": math.log(averaging["loss"] / best.loss),
    }
    return facts, best.rates


# ------------------------------------------------------------------------------------------------ the bench's results


def measured_gains(rows: Sequence[Mapping[str, str]]) -> dict[str, dict[str, float]]:
    """Return the mean logarithmic gain over averaging by place and arm, over the seeds that both have.

    A run that diverged is worse than any other: its arm's gain is -inf. A seed on which averaging diverged is left out.
    """
    logs = results_of(rows).map(math.log)
    gaps = logs.xs(CONTROL, level="arm").reindex(logs.index, level="place") - logs
    gains, by_place = means(gaps.where(gaps < math.inf)), {}
    for place, arm in gaps.index[gaps.index.isin(ARMS, level="arm")]:
        by_place.setdefault(place, {})[arm] = gains.get((place, arm), -math.inf)
    return by_place


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
    signs = [(a > 0) == (b > 0) for a, b, arm in pairs if arm != CONTROL]
    rho = math.nan if level else float(spearmanr(x, y).statistic)  # type: ignore[union-attr]
    return {"rho": rho, "arms": len(pairs), "signs": sum(signs) / len(signs)}


# ------------------------------------------------------------------------------------------------ answer and figure


def answer(result: Result) -> str:
    """Say the course of the best rates, the gains of the arms, and whether the bench ranks them likewise."""
    schedules, predicted, ranks = (result.numbers[name] for name in ("schedules", "predicted", "ranks"))
    header = "".join(f"{word:>{width}}" for word, width in zip(_HEADER, _WIDTHS, strict=True))
    lines = [
        "Inner peak rate tuned under averaging. Best outer rate: in round 1, after the inner warmup (full), least "
        "(round) and last. Best straight line: last over first rate. Gain over averaging, in logarithms of the "
        "expected loss: constant rate, line, best rates held at their least from there on, and best rates (free):",
        f"{'':25}{header}",
    ]
    lines += [_line(name, facts) for name, facts in schedules.items() if name.startswith(f"noise {NOISE:g},")]
    levels = span(map(float, predicted), "g")
    for kind in SCHEDULES:
        some = [f for name, f in schedules.items() if f" {kind}," in name]
        lines.append(
            f"{kind}, noise {levels}: after the inner warmup the best rate falls to "
            f"{span([f['least'] / f['full'] for f in some], '.2f')} of itself, then grows "
            f"{span([f['last'] / f['least'] for f in some], '.1f')} times. The best straight line (1/16 to 16) ends "
            f"at {span([f['line'] for f in some], '.2f')} of its start."
        )
    lines.append(f"Predicted gain over averaging, inner and outer numbers tuned, noise {NOISE:g}:")
    by_place = predicted[f"{NOISE:g}"]
    lines.append(f"{'':34}" + "".join(f"{place:>12}" for place in by_place))
    lines += [f"{short(arm):34}" + "".join(f"{gains[arm]:12.3f}" for gains in by_place.values()) for arm in ARMS]
    momenta = [row["momentum"] for row in select(result.rows, panel="gains") if ARMS[row["arm"]].tuned == 2]
    lines.append(
        f"The momentum that is best is 0 in {sum(momentum == 0 for momentum in momenta)} of {len(momenta)} cases (arms "
        f"with one, places, noise {levels}), and at most {max(momenta):.2f}."
    )
    lines.append("Spearman's rank correlation with the bench (arms; share of signs that agree):")
    for noise, by_place in ranks.items():
        words = [f"{place} {f['rho']:.2f} ({f['arms']}; {f['signs']:.0%})" for place, f in by_place.items()]
        lines.append(f"noise {noise}: {', '.join(words)}.")
    return "\n".join(lines)


def _line(name: str, facts: Mapping[str, float]) -> str:
    """Write what the best rates of one case look like and gain."""
    cells = [f"{facts['first']:.1f}", *(f"{facts[key]:.2f}" for key in ("full", "least"))]
    cells += [f"({facts['least_round']})", *(f"{facts[key]:.2f}" for key in ("last", "line"))]
    cells += [f"{facts[key]:.3f}" for key in ("gain_constant", "gain_line", "gain_held", "gain_best")]
    return f"{name:25}" + "".join(f"{cell:>{width}}" for cell, width in zip(cells, _WIDTHS, strict=True))


def draw(result: Result) -> Figure:
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
    dot_chart(grid[0][1], [short(arm) for arm in ARMS], xlabel="predicted gain, %")
    grid[0][1].legend(fontsize=6.5, ncols=2, loc="upper center", bbox_to_anchor=(0.4, -0.2))
    grid[0][2].set(xlabel="predicted gain, %", ylabel="measured gain, %")
    rank = list(result.numbers["ranks"][f"{NOISE:g}"].values())[-1]
    name_panels(grid[0], ["2 replicas", "each tuned", "against the bench"])
    cosine = result.numbers["schedules"][f"noise {NOISE:g}, cosine, R=2"]
    headline(
        figure,
        f"Under a cosine the best outer rate falls from {cosine['full']:.1f} to {cosine['least']:.1f}, then rises to "
        f"{cosine['last']:.1f}; rank correlation with the bench {signed(rank['rho'], 2)}",
        f"linear model with gradient noise {NOISE:g}; gains in expected loss over averaging, higher is better",
    )
    return figure
