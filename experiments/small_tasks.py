"""Small tasks, and replicas of small networks that train on them: many settings and seeds at once, in batched products.

All settings of a seed have the same initial weights, teacher and batches. `kinds-registration.md` and
`regimes/registration.md` describe the tasks. The inner optimizers have torch's numbers and no warmup.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from itertools import pairwise, product
from typing import NamedTuple

import torch
from torch import Generator, Tensor
from torch.func import vmap
from torch.nn.functional import one_hot, pad

from common import AVERAGING
from twophase.optim.orthogonal import orthogonal, orthogonalized
from twophase.optim.schedules import Schedule
from twophase.rule import OuterRule

SIZES = {"rings": (2, 16, 16, 3), "spirals": (2, 16, 16, 3), "teacher": (8, 16, 16, 1), "linear": (32, 1)}
SIZES |= {"modular": (22, 16, 16, 11), "clear rings": (2, 16, 16, 3), "digits": (64, 32, 10), "deep": (2, *[16] * 8, 1)}
"""Widths of the layers of each task's network, which has tanh between them."""
SPREAD, NOISE = {"rings": 0.4, "spirals": 0.2, "clear rings": 0.1}, 0.1
"""Standard deviations: of the points of each class about their ring or arm, and of the noise of values."""
CHANNELS = (1, 8, 16)  # of the convolutions of 3 x 3 at every second place in the network of the task `conv`
HELD_OUT = 2048  # points to evaluate on
AT_ONCE = 8064  # points of all settings of a batch, which fit into a cache


class Cell(NamedTuple):
    """A setting; a period of 0 never restarts. Kinds: plain, filter (orthogonal), rising (outer rate), auto."""

    lr: float
    rule: OuterRule = AVERAGING
    period: int = 0
    kind: str = "plain"
    inner: str = "adamw"


class Workload(NamedTuple):
    """What all settings of a comparison share; the steps are those of a replica, the batch is that of a replica."""

    task: str
    inner_steps: int
    steps: int
    batch: int = 16
    replicas: int = 4
    schedule: str = "cosine"


class Outcome(NamedTuple):
    """What a cell reached; `path` has of each pseudo-gradient (rounds, 4) what follows there."""

    loss: float  # held out
    excess: float  # beyond the least possible loss, at least 1e-12, which float32 does not tell from 0
    path: list[list[float]]  # squared norm, inner products with the last and the last but one, agreement of replicas


@cache
def images() -> tuple[Tensor, Tensor]:
    """Return scikit-learn's 1,797 digits in [0, 1], and their labels; every fifth is held out."""
    from sklearn.datasets import load_digits  # noqa: PLC0415 - for two tasks of ten

    x, label = map(torch.from_numpy, load_digits(return_X_y=True))
    return x.float() / 16, label


def points(task: str, shape: tuple[int, ...], seed: int, random: Generator, *, held_out: bool = False) -> list[Tensor]:
    """Draw inputs (*shape, width), the targets to train on, and those without label noise."""
    if task in ("digits", "conv"):
        x, label = (part[(torch.arange(len(part)) % 5 == 0) == held_out] for part in images())
        which = torch.randint(len(x), shape, generator=random)
        return [x[which], label[which], label[which]]
    if task == "modular":
        a, b, other = torch.randint(11, (3, *shape), generator=random)
        clean, wrong = (a + b) % 11, torch.rand(shape, generator=random) < 0.2
        return [torch.cat((one_hot(a, 11), one_hot(b, 11)), -1).float(), torch.where(wrong, other, clean), clean]
    x = torch.randn(*shape, SIZES[task][0], generator=random)
    if task == "deep":
        clean = (2 * x[..., 0]).sin() * x[..., 1].cos()
        return [x, clean + NOISE * torch.randn(shape, generator=random), clean]
    if task in ("teacher", "linear"):
        truth = Generator().manual_seed(3 * seed)
        if task == "linear":  # a covariance of condition 1,000, whose axes are no coordinates
            x = x * torch.logspace(0, -1.5, 32) @ torch.linalg.qr(torch.randn(32, 32, generator=truth))[0]
        clean = 2 * network(initial(task, truth), task, x)[..., 0, :]
        return [x, clean + NOISE * torch.randn(shape, generator=random), clean]
    label, turn = torch.randint(3, shape, generator=random), torch.rand(shape, generator=random)
    return [centre(task, label, turn) + SPREAD[task] * x, label, label]


def centre(task: str, label: Tensor, turn: Tensor) -> Tensor:
    """Return the place (..., 2) on a ring or arm by its number and a number in [0, 1)."""
    angle, radius = math.tau * turn, label + 1.0
    if task == "spirals":
        angle, radius = 6 * turn + math.tau / 3 * label, 0.3 + 2 * turn
    return radius[..., None] * torch.stack((angle.cos(), angle.sin()), -1)


def drawn(task: str, shape: tuple[int, ...], random: dict[int, Generator], *, held_out: bool = False) -> list[Tensor]:
    """Return the points of several seeds, (seeds, *shape, ...)."""
    of_seeds = [points(task, shape, seed, each, held_out=held_out) for seed, each in random.items()]
    return [torch.stack(part) for part in zip(*of_seeds, strict=True)]


def truth(task: str, x: Tensor, clean: Tensor) -> Tensor:
    """Return the true probabilities (..., labels, points) of labels at some points, or the values without noise."""
    if clean.is_floating_point():
        return clean[..., None, :]
    if task in SPREAD:
        label, turn = torch.arange(3)[:, None], (torch.arange(256) + 0.5) / 256
        far = (x[..., None, None, :] - centre(task, label, turn[None])).square().sum(-1) / (2 * SPREAD[task] ** 2)
        return (-far).logsumexp(-1).softmax(-1).mT
    right, labels = (0.8, 11) if task == "modular" else (1.0, 10)
    return right * one_hot(clean, labels).float().mT + (1 - right) / labels


def shapes(task: str) -> list[tuple[int, ...]]:
    """Return the shapes of a network's matrices (out, in) and biases (out,), in turn."""
    widths = [(9 * i, o) for i, o in pairwise(CHANNELS)] + [(64, 10)] if task == "conv" else pairwise(SIZES[task])
    return [shape for i, o in widths for shape in ((o, i), (o,))]


def parameters(flat: Tensor, task: str) -> list[Tensor]:
    """Return matrices (..., out, in) and biases (..., out), in turn, as views of (..., elements)."""
    parts = flat.split([math.prod(shape) for shape in shapes(task)], -1)
    return [part.unflatten(-1, shape) for part, shape in zip(parts, shapes(task), strict=True)]


def initial(task: str, random: Generator) -> Tensor:
    """Draw a network's parameters as one vector: matrices of variance 1.5 / width, biases of 0."""
    flat = torch.zeros(sum(math.prod(shape) for shape in shapes(task)))
    for matrix in parameters(flat, task)[::2]:
        matrix.normal_(0, (1.5 / matrix.shape[1]) ** 0.5, generator=random)
    return flat


@cache
def patches(side: int, channels: int) -> Tensor:
    """Return the places (positions, 9 * channels) of each patch in (side * side * channels) values and a zero."""
    grid = torch.full((side + 2, side + 2, channels), side * side * channels)
    grid[1:-1, 1:-1] = torch.arange(side * side * channels).view(side, side, channels)
    return torch.stack([grid[i : i + 3, j : j + 3].flatten() for i in range(0, side, 2) for j in range(0, side, 2)])


def network(flat: Tensor, task: str, x: Tensor) -> Tensor:
    """Return outputs (..., out, points) at inputs (..., points, width), for parameters (..., elements)."""
    *hidden, last, bias = parameters(flat, task)
    x = x.mT
    for number, (matrix, shift) in enumerate(zip(hidden[::2], hidden[1::2], strict=True)):
        if task == "conv":
            of_patches = pad(x, (0, 0, 0, 1))[..., patches(8 >> number, CHANNELS[number]), :]
            x = (matrix[..., None, :, :] @ of_patches + shift[..., None, :, None]).tanh().flatten(-3, -2)
        else:
            x = (matrix @ x + shift[..., None]).tanh()
    return last @ x + bias[..., None]


def losses(out: Tensor, y: Tensor) -> Tensor:
    """Return mean squared errors, or for labels cross-entropies in nats, of outputs (..., out, points)."""
    y = y.expand(*out.shape[:-2], -1)
    if y.is_floating_point():
        return (out[..., 0, :] - y).square().mean(-1)
    return -out.log_softmax(-2).gather(-2, y[..., None, :])[..., 0, :].mean(-1)


def excess(out: Tensor, true: Tensor) -> Tensor:
    """Return the loss beyond the least possible one: squared errors, or Kullback-Leibler divergences in nats."""
    if out.shape[-2] == 1:
        return (out - true)[..., 0, :].square().mean(-1)
    return (torch.xlogy(true, true) - true * out.log_softmax(-2)).sum(-2).mean(-1)


def filtered(g: Tensor, task: str) -> Tensor:
    """Return a pseudo-gradient (elements,) with its matrices orthogonalized."""
    orthogonal({str(number): part for number, part in enumerate(parameters(g, task))})
    return g


def inner_move(inner: str, task: str, g: Tensor, state: list[Tensor], step: int) -> Tensor:
    """Return what the inner optimizer subtracts at a learning rate of 1; `state` is three tensors of zeros at first."""
    mean, square, trace = state
    if inner == "sgd":
        return g
    if inner == "momentum":
        return trace.mul_(0.9).add_(g)
    mean.lerp_(g, 0.1)
    square.mul_(0.999).addcmul_(g, g, value=0.001)
    move = (mean / (1 - 0.9 ** (step + 1))).div_((square / (1 - 0.999 ** (step + 1))).sqrt_().add_(1e-8))
    if inner == "muon":  # of hidden matrices; AdamW moves the rest
        ahead = g.lerp(trace.lerp_(g, 0.05), 0.95)
        for part, of in zip(parameters(move, task)[:-2:2], parameters(ahead, task)[:-2:2], strict=True):
            flat = vmap(orthogonalized)(of.flatten(0, -3))
            part.copy_(0.2 * max(of.shape[-2:]) ** 0.5 * flat.view_as(of))
    return move


def outer_step(cells: Sequence[Cell], rounds: int, g: Tensor, buffer: Tensor, norms: Tensor) -> Tensor:
    """Return what is subtracted from the anchors (seeds, cells, elements), and move the buffers.

    `norms` are those of this and of all earlier pseudo-gradients, (rounds so far, seeds, cells, 1).
    """
    at = len(norms)
    if cells[0].kind == "auto":
        now, largest = norms[-1], norms[(1 << max(at.bit_length() - 2, 0)) - 1 :].amax(0)  # of at least half the rounds
        along = torch.where(now < largest, (1 - now / largest) * now / buffer.norm(dim=-1, keepdim=True), 0)
        return buffer.copy_(g + along * buffer)
    rules = [Schedule("linear", 2.0).at(c.rule, at, rounds) if c.kind == "rising" else c.rule for c in cells]
    numbers = [(rule.lr, rule.momentum, rule.injection, rule.nesterov) for rule in rules]
    lr, momentum, weight, nesterov = torch.tensor(numbers)[..., None].unbind(1)
    buffer.mul_(momentum).add_(weight * g)
    step = lr * torch.where(nesterov > 0, weight * g + momentum * buffer, buffer)
    buffer *= torch.tensor([[c.period == 0 or at % c.period != 0] for c in cells])
    return step


def rate(schedule: str, share: float) -> float:
    """Return the inner learning rate after a share of the run, over the largest: a cosine to 0, or wsd."""
    return (1 + math.cos(math.pi * share)) / 2 if schedule == "cosine" else min(1.0, 5 * (1 - share))


def run(work: Workload, seeds: Sequence[int], cells: Sequence[Cell]) -> list[list[Outcome]]:
    """Train cells of one kind and inner optimizer; return what each reached by seed, infinite if it diverged."""
    task, inner, rounds = work.task, cells[0].inner, work.steps // work.inner_steps
    random = {seed: Generator().manual_seed(3 * seed + 1) for seed in seeds}
    anchor = torch.stack([initial(task, each) for each in random.values()])[:, None].repeat(1, len(cells), 1)
    inputs, targets, _ = drawn(task, (work.steps, work.replicas, work.batch), random)
    lr, decay = torch.tensor([cell.lr for cell in cells])[:, None, None], 0.01 * (inner in ("adamw", "muon"))
    x, buffer = anchor[:, :, None].repeat(1, 1, work.replicas, 1), torch.zeros_like(anchor)
    state, before, path = [torch.zeros_like(x) for _ in range(3)], [torch.zeros_like(anchor)] * 2, []
    for step in range(rounds * work.inner_steps):
        x.requires_grad_()
        out = network(x, task, inputs[:, None, step])
        (g,) = torch.autograd.grad(losses(out, targets[:, None, step]).sum(), x)
        x, now = x.detach(), lr * rate(work.schedule, step / work.steps)
        x.mul_(1 - decay * now).sub_(inner_move(inner, task, g, state, step) * now)
        if (step + 1) % work.inner_steps == 0:
            g, alone = anchor - x.mean(-2), (anchor[:, :, None] - x).square().sum((-1, -2)) / work.replicas
            square = g.square().sum(-1)
            agreement = (work.replicas * square / alone - 1) / (work.replicas - 1)
            path.append(torch.stack([square, *((g * old).sum(-1) for old in before), agreement], -1))
            before = [g, before[0]]
            if cells[0].kind == "filter":
                g = vmap(vmap(lambda g: filtered(g, task)))(g)
            anchor -= outer_step(cells, rounds, g, buffer, torch.stack(path)[..., :1].sqrt())
            x.copy_(anchor[:, :, None].expand_as(x))
    random = {seed: Generator().manual_seed(3 * seed + 2) for seed in seeds}
    inputs, _, targets = drawn(task, (HELD_OUT,), random, held_out=True)
    true, outs = truth(task, inputs, targets), (network(anchor[:, c], task, inputs) for c in range(len(cells)))
    found = torch.stack([torch.stack([losses(out, targets), excess(out, true).clamp(1e-12)], -1) for out in outs], 1)
    reached, paths = found.nan_to_num(math.inf, math.inf).tolist(), torch.stack(path, 2).tolist()
    return [
        [Outcome(loss, beyond, of) for (loss, beyond), of in zip(a, b, strict=True)]
        for a, b in zip(reached, paths, strict=True)
    ]


def train(work: Workload, seeds: Sequence[int], cells: set[Cell]) -> dict[Cell, dict[int, Outcome]]:
    """Train all cells on all seeds; return what they reached by seed."""
    found: dict[Cell, dict[int, Outcome]] = {}
    at_once = max(AT_ONCE // (len(seeds) * work.replicas * work.batch), 1)
    for kinds, inner in product((("plain", "rising"), ("filter",), ("auto",)), {cell.inner for cell in cells}):
        alike = sorted((cell for cell in cells if cell.kind in kinds and cell.inner == inner), key=str)
        for some in (alike[i : i + at_once] for i in range(0, len(alike), at_once)):
            by_cell = zip(some, *run(work, seeds, some), strict=True)
            found |= {cell: dict(zip(seeds, outcomes, strict=True)) for cell, *outcomes in by_cell}
    return found
