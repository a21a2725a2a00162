"""The runs of `linear_network`: data, models, training by the engine, their modes, and what is measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import linregress
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.func import functional_call, jacrev

from common import select
from model import AVERAGING, HEAVY_BALL, NESTEROV, USUAL
from twophase.diloco.engine import DiLoCo
from twophase.restart import Periodic, mean_outer_gain
from twophase.rule import OuterRule
from twophase.theory import best_period, effective_progress, log_final_loss, restart_factor, rollout, rule_grid

Floats: TypeAlias = NDArray[np.float64]
Data: TypeAlias = tuple[Tensor, Tensor]
"""Images, one a row, and targets."""
Rows: TypeAlias = list[dict[str, Any]]
RULES = (HEAVY_BALL, NESTEROV, OuterRule(0.7, 0.9), USUAL)


@dataclass(frozen=True, slots=True)
class Settings:
    """What is computed; `safety` is inner lr times the largest eigenvalue."""

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


# ---------------------------------------------------------------------------------------- data, networks, training


def load_data(digits: tuple[int, int], count: int) -> Data:
    """Load the first images of two digits by turns, centred and of norm sqrt(pixels), and targets: 1 and -1."""
    pixels, labels = load_digits(return_X_y=True)
    order = np.stack([np.flatnonzero(labels == digit)[: count // 2] for digit in digits], axis=1).ravel()
    images = pixels[order] - pixels[order].mean(axis=0)
    images *= math.sqrt(images.shape[1]) / np.linalg.norm(images, axis=1, keepdims=True)
    return torch.from_numpy(images), torch.from_numpy(np.where(labels[order] == digits[0], -1.0, 1.0))


class Network(nn.Module):
    """The residual `tanh(X W^T / sqrt(d)) v / sqrt(width) - y` of one hidden layer; standard normal W and v."""

    def __init__(self, width: int, seed: int, data: Data) -> None:
        super().__init__()
        self.images, self.targets = data
        draw = np.random.default_rng([width, seed]).standard_normal
        self.hidden = nn.Parameter(torch.from_numpy(draw((width, self.images.shape[1]))))
        self.readout = nn.Parameter(torch.from_numpy(draw(width)))

    def forward(self) -> Tensor:
        """Return the residual of every image."""
        features = torch.tanh(self.images @ self.hidden.T / math.sqrt(self.images.shape[1]))
        return features @ self.readout / math.sqrt(len(self.readout)) - self.targets


class Linearised(nn.Module):
    """The residual `r0 + J (theta - theta0)` of some images, with the parameters in one vector."""

    def __init__(self, jacobian: Tensor, residual: Tensor, start: Tensor) -> None:
        super().__init__()
        self.jacobian, self.residual, self.start = jacobian, residual, start
        self.theta = nn.Parameter(start.clone())

    @classmethod
    def of(cls, network: nn.Module) -> Linearised:
        """Linearise a network at its parameters."""
        params = {name: p.detach() for name, p in network.named_parameters()}
        slopes = jacrev(lambda values: functional_call(network, values, ()))(params)
        residual = network().detach()
        jacobian = torch.cat([slopes[name].reshape(len(residual), -1) for name in params], dim=1)
        return cls(jacobian, residual, torch.cat([p.reshape(-1) for p in params.values()]))

    def some(self, images: slice) -> Linearised:
        """Return the same model of some of the images."""
        return Linearised(self.jacobian[images], self.residual[images], self.start)

    def forward(self) -> Tensor:
        """Return the residual of every image."""
        return self.residual + self.jacobian @ (self.theta - self.start)


class Inner(NamedTuple):
    """The inner phase: full-batch gradient descent with rate `lr` (eta), `steps` (S) a round."""

    lr: float
    steps: int


def train(whole: nn.Module, rule: OuterRule, restart: str, rounds: int, inner: Inner, *replicas: nn.Module) -> Floats:
    """Train with the engine on the mean squared residual over 2, full batches, plain gradient descent inside.

    All replicas begin at the parameters of the first, with different images. Without replicas the model of all images
    is trained.

    Returns:
        Residual of all images at the anchor before the first round and after each, shape (rounds + 1, images).
    """
    models = list(replicas or [whole])
    engine = DiLoCo(models, rule, restart=restart, inner_steps=inner.steps)
    descents = [torch.optim.SGD(model.parameters(), lr=inner.lr) for model in models]
    path = [whole().detach().numpy()]
    for _ in range(rounds * inner.steps):
        for model, descent in zip(models, descents, strict=True):
            descent.zero_grad()
            (0.5 * model().square().mean()).backward()
            descent.step()
        if engine.step() is not None:
            with torch.no_grad():
                path.append(functional_call(whole, engine.anchor, ()).numpy())
    return np.array(path)


# --------------------------------------------------------------------------------------------------- what theory says


@dataclass(frozen=True, slots=True, eq=False)
class Modes:
    """Modes of a residual: `r = basis x` and `x = inverse r`, their effective progress sigma, and x at the start."""

    sigma: Floats
    basis: Floats
    inverse: Floats
    initial: Floats

    def predict(self, rule: OuterRule, restart: str, rounds: int) -> Floats:
        """Return residuals round by round, shape (rounds + 1, images)."""
        return rollout(rule, self.sigma, rounds, restart, initial=self.initial).residual @ self.basis.T

    def period(self, rule: OuterRule, rounds: int) -> int:
        """Return the period with the lowest loss after `rounds`."""
        return best_period(rule, self.sigma, weights=self.initial**2, max_period=rounds, rounds=rounds)


def largest_eigenvalue(model: Linearised) -> float:
    """Return the largest eigenvalue of the kernel `J J^T / n`; the inner lr must not exceed its inverse."""
    return float(torch.linalg.matrix_norm(model.jacobian, 2)) ** 2 / len(model.jacobian)


def modes_of(model: Linearised, inner: Inner) -> Modes:
    """Return the theory's modes: eigenvectors of the kernel `J J^T / n`, with `sigma = 1 - (1 - eta lambda)^S`.

    Source: paper appendix A.1; theory note R1.
    """
    jacobian = model.jacobian.numpy()
    values, vectors = np.linalg.eigh(jacobian @ jacobian.T / len(jacobian))
    sigma = effective_progress(values.clip(0), inner.lr, inner.steps)
    return Modes(sigma, vectors, vectors.T, vectors.T @ model.residual.numpy())


def modes_of_shards(model: Linearised, shards: Sequence[slice], inner: Inner) -> Modes:
    """Return the exact modes of a linear model whose replicas have different data, in shards of equal size.

    Replica h removes the share `P_h = I - (I - eta Theta_hh / n_h)^S` of its residual. The mean pseudo-gradient then
    moves the residual of all images by `Theta D r`. Here `Theta = J J^T`, and D is block diagonal with the blocks
    `Theta_hh^-1 P_h / R`. The eigenvalues of `Theta D` are those of the symmetric `Theta^1/2 D Theta^1/2`, lie in [0,
    1], and replace sigma. With one shard the modes are those of `modes_of`; with several only at S = 1.
    """
    jacobian = model.jacobian.numpy()
    kernel = jacobian @ jacobian.T
    weight = np.zeros_like(kernel)
    for shard in shards:
        values, vectors = np.linalg.eigh(kernel[shard, shard])
        removed = effective_progress(values / len(values), inner.lr, inner.steps)
        weight[shard, shard] = vectors * (removed / values / len(shards)) @ vectors.T
    values, vectors = np.linalg.eigh(kernel)
    root, inverse_root = (vectors * values**power @ vectors.T for power in (0.5, -0.5))
    sigma, turn = np.linalg.eigh(root @ weight @ root)
    into = turn.T @ inverse_root
    return Modes(sigma.clip(0, 1), root @ turn, into, into @ model.residual.numpy())


# ----------------------------------------------------------------------------------------------- what is measured

MEASURABLE = 1e-5
"""Below this share of the first residual a mode is too close to rounding for its contraction to be measured."""


def deviations(path: Floats, modes: Modes, rule: OuterRule, restart: str, period: int) -> tuple[float, Floats, Floats]:
    """Compute the largest distance of a mode from the theory, relative to the first residual, and its contractions.

    Those of each cycle, (cycles, modes), are nan where the mode is too small; last comes what they should be, `chi_K`.
    """
    rounds, size = len(path) - 1, np.linalg.norm(path[0])
    x = path @ modes.inverse.T
    distance = np.abs(x - modes.predict(rule, restart, rounds) @ modes.inverse.T).max() / size
    ends = x[: rounds // period * period + 1 : period]
    large = np.abs(ends[:-1]) >= MEASURABLE * size
    contraction = np.where(large, ends[1:] / ends[:-1], np.nan)
    return float(distance), contraction, restart_factor(rule, modes.sigma, period)


def log10_loss(path: Floats) -> Floats:
    """Return log10 of half the mean squared residual, round by round."""
    return np.log10(0.5 * np.mean(path**2, axis=-1))


def departures(path: Floats, expected: Floats) -> dict[str, float]:
    """Return the distances of a run from its linear model: `departure` (largest) and `departure_last` (last round).

    Both relative to the first residual; `departure_of_rest` is the last one relative to what the linear model has left.
    """
    norm = np.linalg.norm
    distance = norm(path - expected, axis=1)
    return {
        "departure": distance.max() / norm(path[0]),
        "departure_last": distance[-1] / norm(path[0]),
        "departure_of_rest": distance[-1] / norm(expected[-1]),
        "log10_loss_linear": log10_loss(expected)[-1],
        "log10_loss": log10_loss(path)[-1],
    }


# ------------------------------------------------------------------------------------------------- the linear model


def measured(settings: Settings) -> tuple[Rows, dict[str, Any]]:
    """Train the linear model, networks of several widths, and the linear model on halves of the data."""
    data, threads = load_data(settings.digits, settings.images), torch.get_num_threads()
    torch.set_num_threads(1)  # sums have one order, and matrices this small gain nothing by more
    try:
        linear_rows, linear = linear_part(settings, data)
        network_rows, network = network_part(settings, data)
        shard_rows, shards = shard_part(settings, data, network["runs"][1]["restart"])
    finally:
        torch.set_num_threads(threads)
    return linear_rows + network_rows + shard_rows, {"linear": linear, "network": network, "shards": shards}


def linear_part(settings: Settings, data: Data) -> tuple[Rows, dict[str, Any]]:
    """Compare the linear model with the theory: two replicas with equal data, every rule, policy, mode and cycle."""
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
    """Compare networks of growing width with their linearisations, with and without restarts, and with controls."""
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
    named = [{"rule": rule.describe(), "restart": restart} for rule, restart in runs]
    pairs = [(named[0], named[1]), (named[2], named[3])]
    return rows, {
        "matched_lr": {rule.describe(): _mean_gain(rule, int(period)) for rule, period in (runs[1], runs[3])},
        "runs": [run | fit(rows, run, settings) for run in named],
        "restart_over_never": [departure_ratios(rows, *pair) for pair in pairs],
        "benefit": [benefit(rows, *pair, width) for pair in pairs for width in settings.widths],
        "tuned_log10_loss_linear": tuned,
    }


def plan(modes: Modes, rounds: int) -> list[tuple[OuterRule, str]]:
    """List the runs: two rules without and with restarts, averaging, and no momentum at the restarts' mean gain."""
    periods = {rule: modes.period(rule, rounds) for rule in (HEAVY_BALL, USUAL)}
    pairs = [(rule, restart) for rule, period in periods.items() for restart in ("never", str(period))]
    return [*pairs, (AVERAGING, "never"), (OuterRule(_mean_gain(HEAVY_BALL, periods[HEAVY_BALL]), 0.0), "never")]


def _mean_gain(rule: OuterRule, period: int) -> float:
    """Return a slow mode's mean gain a round: the lr of the momentum-free rule of matched gain (theory note R31)."""
    return mean_outer_gain(rule, Periodic(period), period)


def tuned_losses(modes: Modes, rounds: int) -> dict[str, float]:
    """Return log10 of the linear theory's lowest loss, tuned over lr up to 3, momentum and both kinds."""
    grid = rule_grid(np.arange(1, 61)[:, None, None] / 20, np.arange(20)[:, None] / 20, [False, True])
    losses = log_final_loss(grid, modes.sigma, rounds, np.arange(1, rounds + 1), weights=modes.initial**2)
    losses = losses / np.log(10) + math.log10(np.mean(modes.initial**2))  # its initial loss is 1/2
    never = losses[-1]
    return {"without momentum": never[:, 0].min(), "without restarts": never.min(), "with restarts": losses.min()}


Run: TypeAlias = dict[str, str]
"""The rule and the restart of a run, as its rows have them."""
_DEPARTURES = ("departure", "departure_last", "departure_of_rest")
_GAINS = {"promised": "log10_loss_linear", "found": "log10_loss"}


def fit(rows: Rows, run: Run, settings: Settings) -> dict[str, Any]:
    """Fit the exponents with which departures fall with width (least squares in logarithms); add medians by width."""
    lines: dict[str, Any] = {}
    used = [row for row in select(rows, part="network", **run) if row["width"] >= settings.fitted_from]
    for name in _DEPARTURES:
        line: Any = linregress(np.log([row["width"] for row in used]), np.log([row[name] for row in used]))
        lines[name] = {"exponent": line.slope, "standard_error": line.stderr, "intercept": line.intercept}
    by_width = {width: select(rows, part="network", width=width, **run) for width in settings.widths}
    for name in ("departure", "departure_of_rest", "log10_loss_linear", "log10_loss"):
        lines[f"median_{name}"] = {width: np.median([row[name] for row in some]) for width, some in by_width.items()}
    return lines


def departure_ratios(rows: Rows, never: Run, restarted: Run) -> dict[str, Any]:
    """Return departure with restarts over departure without: the geometric mean over all networks."""
    pairs = list(zip(*(select(rows, part="network", **run) for run in (restarted, never)), strict=True))
    return restarted | {
        name: math.exp(np.mean([math.log(a[name] / b[name]) for a, b in pairs])) for name in _DEPARTURES
    }


def benefit(rows: Rows, never: Run, restarted: Run, width: int) -> dict[str, Any]:
    """Return log10 of loss without over loss with restarts, predicted and measured: median and range."""
    pairs = list(zip(*(select(rows, part="network", width=width, **run) for run in (never, restarted)), strict=True))
    gains: dict[str, Any] = {**restarted, "width": width}
    for name, column in _GAINS.items():
        some = [a[column] - b[column] for a, b in pairs]
        gains[name] = {"median": np.median(some), "low": min(some), "high": max(some)}
    return gains


# ---------------------------------------------------------------------------------------------------- different data


def shard_part(settings: Settings, data: Data, period: str) -> tuple[Rows, dict[str, Any]]:
    """Compare the linear model, with two replicas that see a half of the images each, with two sets of modes.

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
            path = train(model, HEAVY_BALL, restart, rounds, inner, *(model.some(shard) for shard in shards))
            distances = departures(path, pooled.predict(HEAVY_BALL, restart, rounds))
            del distances["departure_last"], distances["departure_of_rest"]
            exact_distance = departures(path, exact.predict(HEAVY_BALL, restart, rounds))["departure"]
            rows.append(
                {"part": "shards", "rule": HEAVY_BALL.describe(), "restart": restart, "inner_steps": steps}
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
        "benefit_at_most_inner_steps": {name: ends[0][column] - ends[1][column] for name, column in _GAINS.items()},
    }


def first_difference(model: Linearised, shards: list[slice], inner: Inner) -> float:
    """Return the relative distance of the first pseudo-gradient of replicas with different data from the pooled one."""
    moves = []
    for replicas in ([model.some(slice(None))], [model.some(shard) for shard in shards]):
        train(model, AVERAGING, "never", 1, inner, *replicas)
        moves.append((replicas[0].theta - replicas[0].start).detach().numpy())
    return float(np.linalg.norm(moves[1] - moves[0]) / np.linalg.norm(moves[0]))
