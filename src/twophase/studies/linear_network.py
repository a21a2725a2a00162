"""Does the mode theory, restarts included, hold in the training of a network?

A network that is linear in its parameters, `f(theta) = f0 + J (theta - theta0)`, trained by gradient descent on
squared loss, has residual modes that are the theory's: with the kernel `J J^T / n = U diag(lambda) U^T` the mode
`x_j = (U^T (f - y))_j` has effective progress `sigma_j = 1 - (1 - eta lambda_j)^S`, and a cycle of K rounds multiplies
it by `chi_K(sigma_j)`. A wide network is nearly linear; how nearly is measured here, and so is what replicas with
different data do, which the theory leaves out.

Everything is trained in parameter space, by `DiLoCo` with `torch.optim.SGD` inside, in float64: scikit-learn's digits,
two classes with targets 1 and -1, full batches; one hidden layer, tanh, in the parameterisation whose kernel has a
limit in width. Losses are half the mean squared residual.

Source: paper section 2, section 3 and appendix A.1; theory notes R1, R5, R20, R25, R31. How fast wide networks become
linear: at least as width^-1/2 (arXiv 1902.06720), as 1/width in an expansion (arXiv 1909.11304).
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from scipy.stats import linregress

from twophase.rule import OuterRule
from twophase.studies._digits import (
    Data,
    Inner,
    Linearised,
    Modes,
    Network,
    departures,
    deviations,
    largest_eigenvalue,
    load_data,
    log10_loss,
    modes_of,
    modes_of_shards,
    one_thread,
    train,
)
from twophase.studies._linear_network_figure import AVERAGING, PAPER, USUAL, Rows, draw, label, of_run
from twophase.studies.study import Result
from twophase.theory.inputs import rule_grid
from twophase.theory.periods import log_final_loss

__all__ = ["FULL", "PAPER", "QUESTION", "QUICK", "RULES", "USUAL", "answer", "draw", "table"]
QUESTION = "Does the mode theory, restarts included, hold in the training of a network?"

RULES = (PAPER, OuterRule(1.0, 0.9, nesterov=True, form="ema"), OuterRule(0.7, 0.9), USUAL)


@dataclass(frozen=True, slots=True)
class Settings:
    """What the study computes; `safety` is inner lr times the largest eigenvalue."""

    digits: tuple[int, int] = (4, 9)
    images: int = 40
    safety: float = 0.9
    inner_steps: int = 32
    rounds: int = 24
    linear_width: int = 128
    widths: tuple[int, ...] = (16, 32, 64, 128, 256, 512, 1024)
    seeds: int = 4
    fitted_from: int = 64
    shard_inner_steps: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)


FULL = Settings()
QUICK = Settings(
    inner_steps=16,
    rounds=14,
    linear_width=32,
    widths=(16, 64, 256),
    seeds=2,
    fitted_from=16,
    shard_inner_steps=(1, 2, 4, 16),
)


def table(*, quick: bool = False) -> Result:
    """Train the linear model, networks of several widths, and the linear model on halves of the data.

    Raises:
        UsageError: scikit-learn is not installed.
    """
    settings = QUICK if quick else FULL
    data = load_data(settings.digits, settings.images)
    with one_thread():
        linear_rows, linear = linear_part(settings, data)
        network_rows, network = network_part(settings, data)
        shard_rows, shards = shard_part(settings, data, network["runs"][1]["restart"])
    numbers = {"linear": linear, "network": network, "shards": shards}
    return Result(linear_rows + network_rows + shard_rows, numbers, asdict(settings))


# ------------------------------------------------------------------------------------------------- the linear model


def linear_part(settings: Settings, data: Data) -> tuple[Rows, dict[str, Any]]:
    """The linear model against the theory: two replicas with equal data, every rule, policy, mode and cycle."""
    rounds = settings.rounds
    model = Linearised.of(Network(settings.linear_width, 0, data))
    inner = Inner(settings.safety / largest_eigenvalue(model), settings.inner_steps)
    modes = modes_of(model, inner)
    rows, distances, cycles = [], [], []
    for rule in RULES:
        best = modes.period(rule, rounds)
        for restart, period in {"never": rounds, str(best): best, "3": 3}.items():
            path = train(model, rule, restart, rounds, inner, model.some(slice(None)), model.some(slice(None)))
            distance, contraction, factor = deviations(path, modes, rule, restart, period)
            distances.append(distance)
            cycles.append(contraction)
            worst = np.nanmax(np.abs(contraction - factor), axis=0, initial=0.0)
            columns = {"sigma": modes.sigma, "factor": factor, "contraction": contraction[0], "deviation": worst}
            place = {"part": "linear", "rule": rule.describe(), "restart": restart, "chosen": period == best}
            rows += [place | dict(zip(columns, line, strict=True)) for line in zip(*columns.values(), strict=True)]
    return rows, {
        "parameters": model.theta.numel(),
        "runs": len(distances),
        "residual_deviation": max(distances),
        "contraction_deviation": max(row["deviation"] for row in rows),
        "contractions_measured": sum(int(np.isfinite(each).sum()) for each in cycles),
        "contractions": sum(each.size for each in cycles),
        "sigma_lowest": modes.sigma.min(),
        "sigma_median": np.median(modes.sigma),
    }


# ------------------------------------------------------------------------------------------------------- the network


def network_part(settings: Settings, data: Data) -> tuple[Rows, dict[str, Any]]:
    """Networks of growing width against their linearisations, with and without restarts, and the controls."""
    rounds, rows, runs, tuned = settings.rounds, [], [], {}
    extremes = min(settings.widths), max(settings.widths)
    for width in sorted(settings.widths, reverse=True):
        for seed in range(settings.seeds):
            model = Linearised.of(Network(width, seed, data))
            inner = Inner(settings.safety / largest_eigenvalue(model), settings.inner_steps)
            modes = modes_of(model, inner)
            if not runs:  # the widest network chooses the periods, for all
                runs, tuned = plan(modes, rounds), tuned_losses(modes, rounds)
            for rule, restart in runs:
                path = train(Network(width, seed, data), rule, restart, rounds, inner)
                expected = modes.predict(rule, restart, rounds)
                place = {"rule": rule.describe(), "restart": restart, "width": width, "seed": seed}
                rows.append({"part": "network"} | place | departures(path, expected))
                if seed == 0 and width in extremes:
                    losses = zip(log10_loss(expected), log10_loss(path), strict=True)
                    rows += [
                        {"part": "curve"} | place | {"round": t, "log10_loss_linear": linear, "log10_loss": actual}
                        for t, (linear, actual) in enumerate(losses)
                    ]
    names = [(rule.describe(), restart) for rule, restart in runs]
    pairs = [(names[0], names[1]), (names[2], names[3])]
    return rows, {
        "matched_lr": {rule: mean_gain(r, int(k)) for (r, k), (rule, _) in zip(runs[1:4:2], names[1:4:2], strict=True)},
        "runs": [{"rule": rule, "restart": restart} | fit(rows, rule, restart, settings) for rule, restart in names],
        "restart_over_never": [departure_ratios(rows, *pair) for pair in pairs],
        "benefit": [benefit(rows, *pair, width) for pair in pairs for width in settings.widths],
        "tuned_log10_loss_linear": tuned,
    }


def plan(modes: Modes, rounds: int) -> list[tuple[OuterRule, str]]:
    """The runs: two rules without and with restarts, averaging, and no momentum at the restarts' mean gain."""
    periods = {rule: modes.period(rule, rounds) for rule in (PAPER, USUAL)}
    pairs = [(rule, restart) for rule, period in periods.items() for restart in ("never", str(period))]
    return [*pairs, (AVERAGING, "never"), (OuterRule(mean_gain(PAPER, periods[PAPER]), 0.0), "never")]


def mean_gain(rule: OuterRule, period: int) -> float:
    """What a slow mode sees a round in a cycle: the lr of the momentum-free rule of matched gain (theory note R31)."""
    ema = rule.to("ema")
    ages = np.arange(1, period + 1) + rule.nesterov
    return float(ema.lr * np.mean(1 - ema.momentum**ages))


def tuned_losses(modes: Modes, rounds: int) -> dict[str, float]:
    """What the linear theory promises to tuning: log10 of the lowest loss over lr up to 3, momentum and both kinds."""
    grid = rule_grid(np.arange(1, 61)[:, None, None] / 20, np.arange(20)[:, None] / 20, [False, True])
    losses = log_final_loss(grid, modes.sigma, rounds, np.arange(1, rounds + 1), weights=modes.initial**2)
    losses = losses / np.log(10) + math.log10(np.mean(modes.initial**2))  # its initial loss is 1/2
    never = losses[-1]
    return {"without momentum": never[:, 0].min(), "without restarts": never.min(), "with restarts": losses.min()}


def fit(rows: Rows, rule: str, restart: str, settings: Settings) -> dict[str, Any]:
    """The exponents with which departures fall with width (least squares in logarithms), and medians by width."""
    lines: dict[str, Any] = {}
    used = [row for row in of_run(rows, rule, restart) if row["width"] >= settings.fitted_from]
    for name in ("departure", "departure_last", "departure_of_rest"):
        line: Any = linregress(np.log([row["width"] for row in used]), np.log([row[name] for row in used]))
        lines[name] = {"exponent": line.slope, "standard_error": line.stderr, "intercept": line.intercept}
    by_width = {width: of_run(rows, rule, restart, width=width) for width in settings.widths}
    for name in ("departure", "departure_of_rest", "log10_loss_linear", "log10_loss"):
        lines[f"median_{name}"] = {width: np.median([row[name] for row in some]) for width, some in by_width.items()}
    return lines


def departure_ratios(rows: Rows, never: tuple[str, str], restarted: tuple[str, str]) -> dict[str, Any]:
    """Departure with restarts over departure without: the geometric mean over all networks."""
    pairs = list(zip(of_run(rows, *restarted), of_run(rows, *never), strict=True))
    ratios = {
        name: math.exp(np.mean([math.log(a[name] / b[name]) for a, b in pairs]))
        for name in ("departure", "departure_last", "departure_of_rest")
    }
    return {"rule": restarted[0], "restart": restarted[1]} | ratios


def benefit(rows: Rows, never: tuple[str, str], restarted: tuple[str, str], width: int) -> dict[str, Any]:
    """Log10 of loss without over loss with restarts, promised by the linear model and found: median and range."""
    pairs = list(zip(of_run(rows, *never, width=width), of_run(rows, *restarted, width=width), strict=True))
    gains = {
        name: [a[column] - b[column] for a, b in pairs]
        for name, column in (("promised", "log10_loss_linear"), ("found", "log10_loss"))
    }
    return {"rule": restarted[0], "restart": restarted[1], "width": width} | {
        name: {"median": np.median(some), "low": min(some), "high": max(some)} for name, some in gains.items()
    }


# ---------------------------------------------------------------------------------------------------- different data


def shard_part(settings: Settings, data: Data, period: str) -> tuple[Rows, dict[str, Any]]:
    """The linear model with two replicas that see a half of the images each, against two sets of modes.

    Those of the pooled images, as the theory has them, and those of the mean of what the replicas remove.
    """
    rounds, half = settings.rounds, settings.images // 2
    model = Linearised.of(Network(settings.linear_width, 0, data))
    shards = [slice(0, half), slice(half, None)]
    lr = settings.safety / max(largest_eigenvalue(model.some(shard)) for shard in (slice(None), *shards))
    rows = []
    for steps in settings.shard_inner_steps:
        inner = Inner(lr, steps)
        pooled, exact = modes_of(model, inner), modes_of_shards(model, shards, inner)
        first = first_difference(model, shards, inner)
        for restart in ("never", period):
            path = train(model, PAPER, restart, rounds, inner, *(model.some(shard) for shard in shards))
            distances = departures(path, pooled.predict(PAPER, restart, rounds))
            del distances["departure_last"], distances["departure_of_rest"]
            exact_distance = departures(path, exact.predict(PAPER, restart, rounds))["departure"]
            rows.append(
                {"part": "shards", "rule": PAPER.describe(), "restart": restart, "inner_steps": steps}
                | {"first_difference": first}
                | distances
                | {"departure_exact": exact_distance}
                | {"sigma_lowest": pooled.sigma[0], "sigma_lowest_exact": exact.sigma[0]}
            )
    ends = [row for row in rows if row["inner_steps"] == settings.shard_inner_steps[-1]]
    return rows, {
        "at_one_inner_step": max(row["departure"] for row in rows if row["inner_steps"] == 1),
        "largest_departure": max(row["departure"] for row in rows),
        "largest_departure_exact": max(row["departure_exact"] for row in rows),
        "largest_first_difference": max(row["first_difference"] for row in rows),
        "benefit_at_most_inner_steps": {
            name: ends[0][column] - ends[1][column]
            for name, column in (("promised", "log10_loss_linear"), ("found", "log10_loss"))
        },
    }


def first_difference(model: Linearised, shards: list[slice], inner: Inner) -> float:
    """Distance of the first pseudo-gradient of replicas with different data from the pooled one, relative to it."""
    moves = []
    for replicas in ([model.some(slice(None))], [model.some(shard) for shard in shards]):
        train(model, AVERAGING, "never", 1, inner, *replicas)
        moves.append((replicas[0].theta - replicas[0].start).detach().numpy())
    return float(np.linalg.norm(moves[1] - moves[0]) / np.linalg.norm(moves[0]))


# ------------------------------------------------------------------------------------------------ what it amounts to


def answer(result: Result) -> str:
    """What was found, its controls, and what does not hold."""
    linear, network, shards = (result.numbers[part] for part in ("linear", "network", "shards"))
    settings, runs = result.settings, network["runs"]
    low, high = min(settings["widths"]), max(settings["widths"])
    exponents = [run["departure"] for run in runs]
    steepest, flattest = (
        f"{line['exponent']:.2f} +- {line['standard_error']:.2f}"
        for line in (pick(exponents, key=lambda e: e["exponent"]) for pick in (min, max))
    )
    tuned = network["tuned_log10_loss_linear"]
    lines = [
        f"Linear model ({linear['parameters']} parameters, two replicas with equal data, {linear['runs']} runs): the "
        f"modes follow the theory to {linear['residual_deviation']:.0e} of the first residual in every round, and the "
        f"{linear['contractions_measured']} of {linear['contractions']} contractions over a cycle that are large "
        f"enough to measure equal chi_K(sigma) to {linear['contraction_deviation']:.0e}.",
        f"Network: its largest departure from the linear model falls as width to the {flattest} (slowest of "
        f"the {len(runs)} runs) to {steepest} (fastest), fitted from width {settings['fitted_from']} to "
        f"{high}. Known: -1/2 or faster (arXiv 1902.06720), -1 in an expansion (arXiv 1909.11304).",
    ]
    for name, ratio in zip(("Heavy ball", "Nesterov"), network["restart_over_never"], strict=True):
        lines.append(
            f"{name}, K = {ratio['restart']} over never: largest departure x{ratio['departure']:.2f}, last "
            f"x{ratio['departure_last']:.2f}, last relative to what is left x{ratio['departure_of_rest']:.2f}."
        )
    lines += [
        f"Restarts every {gain['restart']} rounds, {gain['rule']}, width {gain['width']}: the linear model promises a "
        f"loss lower by {gain['promised']['median']:.2f} in log10, the network has {gain['found']['median']:.2f} "
        f"(medians; seeds {gain['found']['low']:.2f} to {gain['found']['high']:.2f})."
        for gain in network["benefit"]
        if gain["width"] in (low, high)
    ]
    losses = ", ".join(f"{label(run)} {run['median_log10_loss'][high]:.2f}" for run in runs)
    heavy, nesterov = network["matched_lr"].values()
    lines += [
        f"Controls, log10 of the last loss at width {high}, median: {losses}. Averaging is no momentum at lr 1; "
        f"at the restarts' mean gain its lr is {heavy:.2f} for heavy ball, and for Nesterov would be {nesterov:.2f}"
        f"{', beyond 2, where it diverges' if nesterov > 2 else ''}.",
        f"Tuned lr, momentum and kind, as the linear theory of one network has it: {tuned['without momentum']:.2f} "
        f"without momentum, {tuned['without restarts']:.2f} without restarts, {tuned['with restarts']:.2f} with the "
        f"best period too: to tuning, restarts add {tuned['without restarts'] - tuned['with restarts']:.2f}.",
        f"Different data (halves, heavy ball): the pooled data's modes are off by {shards['at_one_inner_step']:.0e} of "
        f"the first residual at one inner step and by up to {shards['largest_departure']:.2f} at more, the first "
        f"pseudo-gradient by up to {shards['largest_first_difference']:.0%}. What fails is the formula for sigma: the "
        "eigenvalues of what the replicas remove on average, in its place, predict every round to "
        f"{shards['largest_departure_exact']:.0e}.",
        "Not covered: other tasks and depths, mini-batches, AdamW inside, test error, language models.",
    ]
    return "\n".join(lines)
