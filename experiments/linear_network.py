"""Does the mode theory, restarts included, hold in the training of a network?

A network linear in its parameters is `f(theta) = f0 + J (theta - theta0)`. Under gradient descent on squared loss its
residual modes are the theory's: with the kernel `J J^T / n = U diag(lambda) U^T` the mode `x_j = (U^T (f - y))_j` has
effective progress `sigma_j = 1 - (1 - eta lambda_j)^S`. A wide network is nearly linear; how nearly is measured here,
and so is what replicas with different data do, which the theory leaves out.

Everything is trained by `DiLoCo` with `torch.optim.SGD` inside, in float64 and full batches, on scikit-learn's digits 4
and 9 with targets 1 and -1. Losses are half the mean squared residual.

Source: paper sections 2 and 3 and appendix A.1; theory notes R1, R5, R20, R31. How fast wide networks become linear: at
least as width^-1/2 (arXiv 1902.06720), as 1/width in an expansion (arXiv 1909.11304).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.func import functional_call, jacrev

from common import AVERAGING, DILOCO, HEAVY_BALL, Frame, script, show
from twophase import theory
from twophase.diloco.engine import DiLoCo
from twophase.figures.style import MUTED, headline, look, new_figure
from twophase.rule import OuterRule

Data = tuple[Tensor, Tensor]
RULES = {"heavy ball": HEAVY_BALL, "DiLoCo": DILOCO, "averaging": AVERAGING}
RESTARTED = ("heavy ball", "DiLoCo")


@dataclass(frozen=True)
class Settings:
    """What is trained; `safety` is the inner learning rate times the largest eigenvalue of the kernel."""

    images: int = 40
    safety: float = 0.9
    inner_steps: int = 32
    rounds: int = 24
    linear_width: int = 128
    widths: tuple[int, ...] = (1024, 512, 256, 128, 64, 32, 16)
    seeds: int = 4
    shard_inner_steps: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)


SCALES = {"laptop": Settings(), "quick": Settings(20, 0.9, 8, 12, 32, (256, 64), 1, (1, 4))}


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


class Linear(nn.Module):
    """The residual `r0 + J change` of some images; what trains is `change = theta - theta0`, one vector."""

    def __init__(self, jacobian: Tensor, residual: Tensor) -> None:
        super().__init__()
        self.jacobian, self.residual = jacobian, residual
        self.change = nn.Parameter(torch.zeros_like(jacobian[0]))

    @classmethod
    def of(cls, network: nn.Module) -> Linear:
        """Linearise a network at its parameters."""
        params = {name: p.detach() for name, p in network.named_parameters()}
        slopes = jacrev(lambda values: functional_call(network, values, ()))(params)
        residual = network().detach()
        return cls(torch.cat([slopes[name].reshape(len(residual), -1) for name in params], dim=1), residual)

    def some(self, images: slice) -> Linear:
        """Return the same model of some of the images."""
        return Linear(self.jacobian[images], self.residual[images])

    def steepest(self) -> float:
        """Return the largest eigenvalue of `J J^T / n`; the inner learning rate must not exceed its inverse."""
        return float(torch.linalg.matrix_norm(self.jacobian, 2)) ** 2 / len(self.jacobian)

    def forward(self) -> Tensor:
        """Return the residual of every image."""
        return self.residual + self.jacobian @ self.change


class Inner(NamedTuple):
    """The inner phase: full-batch gradient descent with rate `lr` (eta), `steps` (S) a round."""

    lr: float
    steps: int


@dataclass(frozen=True, eq=False)
class Modes:
    """Modes of a residual, `r = basis x` and `x = inverse r`, with their effective progress and x at the start."""

    sigma: np.ndarray
    basis: np.ndarray
    inverse: np.ndarray
    initial: np.ndarray

    @classmethod
    def of(cls, model: Linear, inner: Inner, shards: Sequence[slice] = (slice(None),)) -> Modes:
        """Return the modes of replicas that have these shards of the images, of equal size.

        Replica h removes `P_h = I - (I - eta Theta_hh / n_h)^S` of its residual, so that the mean pseudo-gradient moves
        that of all images by `Theta D r`, with `Theta = J J^T` and D the sum of the blocks `Theta_hh^-1 P_h / R`. The
        eigenvalues of `Theta^1/2 D Theta^1/2` are sigma; with one shard they are `1 - (1 - eta lambda)^S`.
        """
        jacobian = model.jacobian.numpy()
        kernel = jacobian @ jacobian.T
        weight = np.zeros_like(kernel)
        for shard in shards:
            values, vectors = np.linalg.eigh(kernel[shard, shard])
            removed = theory.effective_progress(values.clip(0) / len(values), inner.lr, inner.steps)
            weight[shard, shard] += vectors * (removed / values / len(shards)) @ vectors.T
        values, vectors = np.linalg.eigh(kernel)
        root, inverse_root = (vectors * values**power @ vectors.T for power in (0.5, -0.5))
        sigma, turn = np.linalg.eigh(root @ weight @ root)
        inverse = turn.T @ inverse_root
        return cls(sigma.clip(0, 1), root @ turn, inverse, inverse @ model.residual.numpy())

    def predict(self, rule: OuterRule, restart: str, rounds: int) -> np.ndarray:
        """Return the theory's residuals, of shape (rounds + 1, images)."""
        return theory.rollout(rule, self.sigma, rounds, restart, initial=self.initial).residual @ self.basis.T

    def period(self, rule: OuterRule, rounds: int) -> str:
        """Return the period with the lowest loss after `rounds`; the modes must be orthogonal, as with one shard."""
        weights = (np.linalg.norm(self.basis, axis=0) * self.initial) ** 2
        return str(theory.best_period(rule, self.sigma, weights=weights, max_period=rounds, rounds=rounds))


def load_data(count: int) -> Data:
    """Load the first images of digits 4 and 9 by turns, centred and of norm sqrt(pixels), and targets: 1 and -1."""
    pixels, labels = load_digits(return_X_y=True)
    order = np.stack([np.flatnonzero(labels == digit)[: count // 2] for digit in (4, 9)], axis=1).ravel()
    images = pixels[order] - pixels[order].mean(axis=0)
    images *= math.sqrt(images.shape[1]) / np.linalg.norm(images, axis=1, keepdims=True)
    return torch.from_numpy(images), torch.from_numpy(np.where(labels[order] == 4, -1.0, 1.0))


def train(
    whole: nn.Module, rule: OuterRule, restart: str, rounds: int, inner: Inner, *replicas: nn.Module
) -> np.ndarray:
    """Train replicas, or the model of all images where there are none, with plain gradient descent inside.

    Returns:
        Residual of all images at the anchor before the first round and after each, (rounds + 1, images).
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


def departure(path: np.ndarray, expected: np.ndarray) -> float:
    """Return the largest distance of a run from what is expected, relative to the first residual."""
    return float(np.linalg.norm(path - expected, axis=1).max() / np.linalg.norm(path[0]))


def linear_models(settings: Settings, data: Data) -> Frame:
    """Compare a linear model of two replicas, with the same images or with halves of them, with two sets of modes.

    Those of all images, as the theory has them, and those of the mean of what the replicas remove. With the same images
    also the contractions of the first cycle.
    """
    model, half = Linear.of(Network(settings.linear_width, 0, data)), settings.images // 2
    halves, same = [slice(0, half), slice(half, None)], [slice(None), slice(None)]
    lr = settings.safety / max(model.some(shard).steepest() for shard in (*same, *halves))
    modes = Modes.of(model, Inner(lr, settings.inner_steps))
    runs: list[tuple[str, str, int, list[slice]]] = [("averaging", "never", settings.inner_steps, same)]
    for name in RESTARTED:
        runs += [(name, k, settings.inner_steps, same) for k in ("never", modes.period(RULES[name], settings.rounds))]
    runs += [("heavy ball", "6", steps, halves) for steps in settings.shard_inner_steps]
    rows = []
    for name, restart, steps, shards in runs:
        inner = Inner(lr, steps)
        path = train(model, RULES[name], restart, settings.rounds, inner, *map(model.some, shards))
        pooled, exact = (
            departure(path, Modes.of(model, inner, images).predict(RULES[name], restart, settings.rounds))
            for images in ([slice(None)], shards)
        )
        place = {"part": "same data" if shards is same else "halves", "rule": name, "restart": restart}
        rows.append(place | {"inner_steps": steps, "departure": pooled, "departure_of_mean": exact})
        if shards is same and restart != "never":
            shares = path[int(restart)] @ modes.inverse.T / modes.initial
            place["part"] = "cycle"
            rows += [place | {"sigma": s, "contraction": c} for s, c in zip(modes.sigma, shares, strict=True)]
    return pd.DataFrame(rows)


def networks(settings: Settings, data: Data) -> Frame:
    """Compare networks of falling width with their linear models, with and without restarts."""
    rows, rounds = [], settings.rounds
    runs = [(name, "never") for name in RULES]
    for width, seed in product(settings.widths, range(settings.seeds)):
        model = Linear.of(Network(width, seed, data))
        inner = Inner(settings.safety / model.steepest(), settings.inner_steps)
        modes = Modes.of(model, inner)
        if not rows:  # the widest network chooses the periods, for all
            runs += [(name, modes.period(RULES[name], rounds)) for name in RESTARTED]
        for name, restart in runs:
            path = train(Network(width, seed, data), RULES[name], restart, rounds, inner)
            expected = modes.predict(RULES[name], restart, rounds)
            loss, loss_linear = (np.log10(0.5 * np.mean(residual[-1] ** 2)) for residual in (path, expected))
            rows.append(
                {"part": "network", "rule": name, "restart": restart, "inner_steps": inner.steps, "width": width}
                | {"seed": seed, "departure": departure(path, expected)}
                | {"log10_loss": loss, "log10_loss_linear": loss_linear}
            )
    return pd.DataFrame(rows)


def gains(rows: Frame) -> Frame:
    """Return log10 of the loss without restarts over that with them by rule and width: medians, and range of seeds."""
    network = rows[rows["part"] == "network"].set_index(["rule", "width", "seed"])
    never, restarted = network[network["restart"] == "never"], network[network["restart"] != "never"]
    columns = {"promised": "log10_loss_linear", "gained": "log10_loss"}
    found = pd.DataFrame({name: (never[column] - restarted[column]).dropna() for name, column in columns.items()})
    found = found.groupby(["rule", "width"]).agg(
        promised=("promised", "median"), gained=("gained", "median"), low=("gained", "min"), high=("gained", "max")
    )
    return found.reset_index()


LOOKS = {"heavy ball": (0, 1), "DiLoCo": (3, 2), "averaging": (4, 4)}
"""Looks by rule, without and with restarts."""


def draw(rows: Frame) -> dict[str, Figure]:
    """Draw contractions of a cycle, departures by width, and what restarts gain by width."""
    figure, ((left, middle, right),) = new_figure(3.3, 1, 3)
    sigma = np.linspace(0, 1, 2001)
    for (name, restart), cycle in rows[rows["part"] == "cycle"].groupby(["rule", "restart"], sort=False):
        style = look(LOOKS[name][1], every=1) | {"linestyle": ""}
        left.plot(sigma, np.abs(theory.restart_factor(RULES[name], sigma, int(restart))), color=style["color"])
        left.plot(cycle["sigma"], cycle["contraction"].abs(), label=f"{name}, K = {restart}", **style)
    left.set(yscale="log", ylim=(1e-6, 2), xlabel="effective progress σ", title="contraction of a cycle")
    for (name, restart), run in rows[rows["part"] == "network"].groupby(["rule", "restart"], sort=False):
        style = look(LOOKS[name][restart != "never"], every=1) | {"linestyle": ""}
        label = name if name == "averaging" else f"{name}, {'no restart' if restart == 'never' else f'K = {restart}'}"
        middle.plot(run["width"], run["departure"], label=label, **style)
    middle.set(xscale="log", yscale="log", ylim=(1e-5, 1), xlabel="width", title="departure from the linear model")
    for name, found in gains(rows).groupby("rule"):
        style = look(LOOKS[name][1], every=1)
        bars = np.abs(found[["low", "high"]].to_numpy().T - found["gained"].to_numpy())
        right.errorbar(found["width"], found["gained"], bars, capsize=2, label=f"{name}, network", **style)
        right.plot(found["width"], found["promised"], ":", color=style["color"], label=f"{name}, linear model")
    right.axhline(0, color=MUTED, linewidth=0.6)
    right.set(xscale="log", xlabel="width", ylim=(-1.5, 2.2), title="log₁₀ loss, gained by restarts")
    for axes, place in ((left, "lower right"), (middle, "lower left"), (right, "lower right")):
        axes.legend(loc=place)
    headline(
        figure,
        "Exact for linear models, and nearly for wide networks",
        "left: lines theory, markers trained; middle: largest distance over first residual; right: bars span the seeds",
    )
    return {"": figure}


def train_all(options: argparse.Namespace) -> Frame:
    """Train everything."""
    torch.set_num_threads(1)  # sums have one order, and matrices this small gain nothing by more
    data = load_data(options.scale.images)
    return pd.concat([linear_models(options.scale, data), networks(options.scale, data)])


def report(rows: Frame) -> None:
    """Print the largest departures, and what restarts gain."""
    show(rows.groupby("part")[["departure", "departure_of_mean"]].max().dropna(how="all").reset_index(), 16)
    show(gains(rows))


if __name__ == "__main__":
    script(__doc__, "linear_network", draw, train=train_all, scales=SCALES, report=report)
