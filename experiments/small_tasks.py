"""Small tasks, and replicas of small networks that train on them: many settings and seeds at once, in batched products.

All settings of a seed have the same initial weights, teacher and batches. `kinds-registration.md` describes the tasks.
The inner optimizer is AdamW of torch's numbers, without warmup, on a cosine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Generator, Tensor
from torch.func import vmap
from torch.nn.functional import one_hot

from common import AVERAGING
from twophase.optim.orthogonal import orthogonal, orthogonalized
from twophase.rule import OuterRule

SIZES = {"rings": (2, 16, 16, 3), "spirals": (2, 16, 16, 3), "teacher": (8, 16, 16, 1), "linear": (32, 1)}
SIZES |= {"modular": (22, 16, 16, 11), "clear rings": (2, 16, 16, 3)}
"""Widths of the layers of each task's network, which has tanh between them."""
REPLICAS, BATCH, HELD_OUT, AT_ONCE = 4, 16, 2048, 126


class Cell(NamedTuple):
    """A setting; a period of 0 never restarts. Kinds: plain, filter (of the pseudo-gradient), muon (inside)."""

    inner_steps: int
    lr: float
    rule: OuterRule = AVERAGING
    period: int = 0
    kind: str = "plain"


def points(task: str, shape: tuple[int, ...], seed: int, random: Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Draw inputs (*shape, width), the targets to train on, and those without label noise."""
    if task == "modular":
        a, b, other = torch.randint(11, (3, *shape), generator=random)
        clean, wrong = (a + b) % 11, torch.rand(shape, generator=random) < 0.2
        return torch.cat((one_hot(a, 11), one_hot(b, 11)), -1).float(), torch.where(wrong, other, clean), clean
    x = torch.randn(*shape, SIZES[task][0], generator=random)
    if task in ("teacher", "linear"):
        truth = Generator().manual_seed(3 * seed)
        if task == "linear":  # a covariance of condition 1,000, whose axes are no coordinates
            x = x * torch.logspace(0, -1.5, 32) @ torch.linalg.qr(torch.randn(32, 32, generator=truth))[0]
        clean = 2 * network(initial(task, truth), task, x)[..., 0, :]
        return x, clean + 0.1 * torch.randn(shape, generator=random), clean
    label, turn = torch.randint(3, shape, generator=random), torch.rand(shape, generator=random)
    angle, radius = math.tau * turn, label + 1.0
    if task == "spirals":
        angle, radius = 6 * turn + math.tau / 3 * label, 0.3 + 2 * turn
    centre = radius[..., None] * torch.stack((angle.cos(), angle.sin()), -1)
    return centre + {"rings": 0.4, "spirals": 0.2, "clear rings": 0.1}[task] * x, label, label


def drawn(task: str, shape: tuple[int, ...], seeds: Sequence[int], random: list[Generator]) -> list[Tensor]:
    """Return the points of several seeds, (seeds, *shape, ...)."""
    of_seeds = [points(task, shape, seed, each) for seed, each in zip(seeds, random, strict=True)]
    return [torch.stack(part) for part in zip(*of_seeds, strict=True)]


def parameters(flat: Tensor, task: str) -> list[Tensor]:
    """Return matrices (..., out, in) and biases (..., out), in turn, as views of (..., elements)."""
    shapes = [shape for i, o in pairwise(SIZES[task]) for shape in ((o, i), (o,))]
    parts = flat.split([math.prod(shape) for shape in shapes], -1)
    return [part.unflatten(-1, shape) for part, shape in zip(parts, shapes, strict=True)]


def initial(task: str, random: Generator) -> Tensor:
    """Draw a network's parameters as one vector: matrices of variance 1.5 / width, biases of 0."""
    flat = torch.zeros(sum(o * i + o for i, o in pairwise(SIZES[task])))
    for matrix in parameters(flat, task)[::2]:
        matrix.normal_(0, (1.5 / matrix.shape[1]) ** 0.5, generator=random)
    return flat


def network(flat: Tensor, task: str, x: Tensor) -> Tensor:
    """Return outputs (..., out, points) at inputs (..., points, width), for parameters (..., elements)."""
    *hidden, last, bias = parameters(flat, task)
    x = x.mT
    for matrix, shift in zip(hidden[::2], hidden[1::2], strict=True):
        x = (matrix @ x + shift[..., None]).tanh()
    return last @ x + bias[..., None]


def losses(flat: Tensor, task: str, x: Tensor, y: Tensor) -> Tensor:
    """Return mean squared errors, or for labels cross-entropies in nats, of parameters (..., elements)."""
    out, y = network(flat, task, x), y.expand(*flat.shape[:-1], -1)
    if y.is_floating_point():
        return (out[..., 0, :] - y).square().mean(-1)
    return -out.log_softmax(-2).gather(-2, y[..., None, :])[..., 0, :].mean(-1)


def filtered(g: Tensor, task: str) -> Tensor:
    """Return a pseudo-gradient (elements,) with its matrices orthogonalized."""
    orthogonal({str(number): part for number, part in enumerate(parameters(g, task))})
    return g


def run(task: str, seeds: Sequence[int], cells: list[Cell], steps: int) -> list[list[float]]:
    """Train cells of one S and kind; return held-out losses by seed and cell, infinite where one diverged."""
    inner_steps, kind = cells[0].inner_steps, cells[0].kind
    random = [Generator().manual_seed(3 * seed + 1) for seed in seeds]
    anchor = torch.stack([initial(task, each) for each in random])[:, None].repeat(1, len(cells), 1)
    inputs, targets, _ = drawn(task, (steps, REPLICAS, BATCH), seeds, random)
    numbers = [(c.lr, c.rule.lr, c.rule.momentum, c.rule.injection, c.rule.nesterov, c.period) for c in cells]
    rates, outer_lr, momentum, weight, nesterov, period = torch.tensor(numbers)[..., None].unbind(1)
    x, buffer = anchor[:, :, None].repeat(1, 1, REPLICAS, 1), torch.zeros_like(anchor)
    mean, square, trace = torch.zeros_like(x), torch.zeros_like(x), torch.zeros_like(x)
    for step in range(steps):
        x.requires_grad_()
        (g,) = torch.autograd.grad(losses(x, task, inputs[:, None, step], targets[:, None, step]).sum(), x)
        x, lr = x.detach(), rates[..., None] * (1 + math.cos(math.pi * step / steps)) / 2
        mean.lerp_(g, 0.1)
        square.mul_(0.999).addcmul_(g, g, value=0.001)
        move = (mean / (1 - 0.9 ** (step + 1))).div_((square / (1 - 0.999 ** (step + 1))).sqrt_().add_(1e-8))
        if kind == "muon":
            ahead = g.lerp(trace.lerp_(g, 0.05), 0.95)
            for part, of in zip(parameters(move, task)[:-2:2], parameters(ahead, task)[:-2:2], strict=True):
                flat = vmap(orthogonalized)(of.flatten(0, 2))
                part.copy_(0.2 * max(of.shape[-2:]) ** 0.5 * flat.view_as(of))
        x.mul_(1 - 0.01 * lr).sub_(move.mul_(lr))
        if (step + 1) % inner_steps == 0:
            g = anchor - x.mean(-2)
            if kind == "filter":
                g = vmap(vmap(lambda g: filtered(g, task)))(g)
            buffer.mul_(momentum).add_(weight * g)
            anchor -= outer_lr * torch.where(nesterov > 0, weight * g + momentum * buffer, buffer)
            buffer *= (period == 0) | ((step + 1) // inner_steps % period != 0)
            x.copy_(anchor[:, :, None].expand_as(x))
    inputs, _, targets = drawn(task, (HELD_OUT,), seeds, [Generator().manual_seed(3 * seed + 2) for seed in seeds])
    found = [losses(anchor[:, c], task, inputs, targets) for c in range(len(cells))]
    return torch.stack(found, 1).nan_to_num(math.inf, math.inf).tolist()


def train(task: str, seeds: Sequence[int], cells: set[Cell], steps: int) -> dict[Cell, dict[int, float]]:
    """Train all cells on all seeds; return their held-out losses by seed."""
    found: dict[Cell, dict[int, float]] = {cell: {} for cell in cells}
    at_once = AT_ONCE // len(seeds)
    for kind in ("plain", "filter", "muon"):
        alike = sorted((cell for cell in cells if cell.kind == kind), key=str)
        for some in (alike[i : i + at_once] for i in range(0, len(alike), at_once)):
            for seed, of_seed in zip(seeds, run(task, seeds, some, steps), strict=True):
                for cell, loss in zip(some, of_seed, strict=True):
                    found[cell][seed] = loss
    return found
