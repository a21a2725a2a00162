"""Real networks for the study `linear_network`: data, models, training by the engine, their modes, what is measured."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call, jacrev

from twophase.base.config import UsageError
from twophase.diloco.engine import DiLoCo
from twophase.rule import OuterRule
from twophase.theory.contraction import restart_factor
from twophase.theory.modes import effective_progress
from twophase.theory.periods import best_period
from twophase.theory.rollout import rollout

Floats: TypeAlias = NDArray[np.float64]
Data: TypeAlias = tuple[Tensor, Tensor]
"""Images, one a row, and targets."""


@contextmanager
def one_thread() -> Iterator[None]:
    """Give torch one thread: sums have one order, and matrices this small gain nothing by more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# ---------------------------------------------------------------------------------------- data, networks, training


def load_data(digits: tuple[int, int], count: int) -> Data:
    """The first images of two digits by turns, centred and of norm sqrt(pixels), and targets: 1 and -1.

    Raises:
        UsageError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits  # noqa: PLC0415 - an extra
    except ImportError:
        raise UsageError(
            "the study linear_network needs scikit-learn, which is not installed; pip install 'twophase[studies]'"
        ) from None
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
        """Residual of every image."""
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
        """The linearisation of a network at its parameters."""
        params = {name: p.detach() for name, p in network.named_parameters()}
        slopes = jacrev(lambda values: functional_call(network, values, ()))(params)
        residual = network().detach()
        jacobian = torch.cat([slopes[name].reshape(len(residual), -1) for name in params], dim=1)
        return cls(jacobian, residual, torch.cat([p.reshape(-1) for p in params.values()]))

    def some(self, images: slice) -> Linearised:
        """The same model of some of the images."""
        return Linearised(self.jacobian[images], self.residual[images], self.start)

    def forward(self) -> Tensor:
        """Residual of every image."""
        return self.residual + self.jacobian @ (self.theta - self.start)


class Inner(NamedTuple):
    """The inner phase: full-batch gradient descent with rate `lr` (eta), `steps` (S) a round."""

    lr: float
    steps: int


def train(whole: nn.Module, rule: OuterRule, restart: str, rounds: int, inner: Inner, *replicas: nn.Module) -> Floats:
    """Train with the engine on the mean squared residual over 2, full batches, plain gradient descent inside.

    The replicas begin at the parameters of the first, each with images of its own; without any, the model of all images
    is trained itself.

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
        """Residuals round by round, shape (rounds + 1, images)."""
        return rollout(rule, self.sigma, rounds, restart, initial=self.initial).residual @ self.basis.T

    def period(self, rule: OuterRule, rounds: int) -> int:
        """The period with the lowest loss after so many rounds."""
        return best_period(rule, self.sigma, weights=self.initial**2, max_period=rounds, rounds=rounds)


def largest_eigenvalue(model: Linearised) -> float:
    """Of the kernel `J J^T / n`: the inner lr must not exceed one over it."""
    return float(torch.linalg.matrix_norm(model.jacobian, 2)) ** 2 / len(model.jacobian)


def modes_of(model: Linearised, inner: Inner) -> Modes:
    """The theory's modes: eigenvectors of the kernel `J J^T / n`, with `sigma = 1 - (1 - eta lambda)^S`.

    Source: paper appendix A.1; theory note R1.
    """
    jacobian = model.jacobian.numpy()
    values, vectors = np.linalg.eigh(jacobian @ jacobian.T / len(jacobian))
    sigma = effective_progress(values.clip(0), inner.lr, inner.steps)
    return Modes(sigma, vectors, vectors.T, vectors.T @ model.residual.numpy())


def modes_of_shards(model: Linearised, shards: Sequence[slice], inner: Inner) -> Modes:
    """The modes of replicas with different data, shards of equal size, exactly, for a model that is linear.

    Replica h removes the share `P_h = I - (I - eta Theta_hh / n_h)^S` of its own residual, so that the mean
    pseudo-gradient moves the residual of all images by `Theta D r`, with `Theta = J J^T` and D block diagonal with
    the blocks `Theta_hh^-1 P_h / R`. Its eigenvalues are those of the symmetric `Theta^1/2 D Theta^1/2` and lie in
    [0, 1]: they take the place of sigma, and the outer rule sees modes as ever. With one shard these are the modes of
    `modes_of`; with several they are so at S = 1 only.
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
    """How far a run is from the theory, and what each mode did in each cycle of `period` rounds.

    Returns:
        (distance, contraction, factor): the largest distance of a mode from the theory in any round, relative to the
        norm of the first residual; the measured contractions, shape (whole cycles, modes), nan where the mode is too
        small; and what they should be, `chi_K(sigma)`.
    """
    rounds, size = len(path) - 1, np.linalg.norm(path[0])
    x = path @ modes.inverse.T
    distance = np.abs(x - modes.predict(rule, restart, rounds) @ modes.inverse.T).max() / size
    ends = x[: rounds // period * period + 1 : period]
    large = np.abs(ends[:-1]) >= MEASURABLE * size
    contraction = np.where(large, ends[1:] / ends[:-1], np.nan)
    return float(distance), contraction, restart_factor(rule, modes.sigma, period)


def log10_loss(path: Floats) -> Floats:
    """Log10 of half the mean squared residual, round by round."""
    return np.log10(0.5 * np.mean(path**2, axis=-1))


def departures(path: Floats, expected: Floats) -> dict[str, float]:
    """Distance of a run from its linear model, `departure` the largest, `departure_last` after the last round.

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
