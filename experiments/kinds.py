"""Do a tuned momentum, restarts, the filter and inner Muon pay on small tasks that are no language model?

Four replicas of a small network take 480 inner steps; all settings of a seed have the same initial weights and batches,
and `torch.func.vmap` trains many at once. `kinds-registration.md` says what is asked, and was written before the runs.

    python experiments/kinds.py --train laptop    on one core; begun again, it skips the tasks that are finished
"""

from __future__ import annotations

import math
import statistics
from itertools import pairwise, product
from typing import NamedTuple

import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Generator, Tensor
from torch.func import grad, vmap
from torch.nn.functional import cross_entropy, linear, mse_loss, one_hot

from common import AVERAGING, DILOCO, Frame, arguments, dot_chart, read, show, store, write
from twophase.compare.compare import compare
from twophase.figures import style
from twophase.optim.orthogonal import orthogonalized
from twophase.rule import FORMS, OuterRule

NAME, TITLE = "kinds", "Outer methods on other kinds of task"
SIZES = {"rings": (2, 16, 16, 3), "spirals": (2, 16, 16, 3), "teacher": (8, 16, 16, 1), "linear": (32, 1)}
SIZES |= {"modular": (22, 16, 16, 11), "clear rings": (2, 16, 16, 3)}
"""Widths of the layers of each task's network, which has tanh between them."""
REPLICAS, BATCH, HELD_OUT, AT_ONCE = 4, 16, 2048, 126
LEAST = {"linear": 8e-3, "modular": 4e-3, "spirals": 4e-3}
"""Least of the seven peak inner rates, each twice the one before, where it is not 2e-3."""
SCALES = {"quick": (32, range(1), range(100, 102)), "laptop": (480, range(2), range(100, 105))}
"""Inner steps, seeds that choose settings, and held-out seeds."""


class Cell(NamedTuple):
    """A setting; a period of 0 never restarts."""

    inner_steps: int
    lr: float
    rule: OuterRule = AVERAGING
    period: int = 0
    filtered: bool = False
    muon: bool = False


def methods(task: str, inner_steps: int) -> dict[str, list[Cell]]:
    """Return the settings of each method; the rates of inner Muon are twice the others."""
    rates = [LEAST.get(task, 2e-3) * 2**k for k in range(7)]
    found = {"averaging": [Cell(inner_steps, lr) for lr in rates]}
    outer = list(product((0.3, 0.7, 1.0), (0.3, 0.6, 0.9), (False, True)))
    for period, word in ((0, ""), (3, ", K = 3"), (7, ", K = 7")):
        found[f"usual{word}"] = [Cell(inner_steps, lr, DILOCO, period) for lr in rates]
        for form in FORMS:
            rules = [OuterRule(*numbers, form) for numbers in outer]
            found[f"{form}{word}"] = [Cell(inner_steps, lr, rule, period) for lr in rates for rule in rules]
    if len(SIZES[task]) > 2:  # a single vector of weights has one singular value
        found["filter"] = [Cell(inner_steps, lr, filtered=True) for lr in rates]
        found["muon"] = [Cell(inner_steps, 2 * lr, muon=True) for lr in rates]
    return found


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
        clean = 2 * network(initial(task, truth), SIZES[task], x)[..., 0]
        return x, clean + 0.1 * torch.randn(shape, generator=random), clean
    label, turn = torch.randint(3, shape, generator=random), torch.rand(shape, generator=random)
    angle, radius = math.tau * turn, label + 1.0
    if task == "spirals":
        angle, radius = 6 * turn + math.tau / 3 * label, 0.3 + 2 * turn
    centre = radius[..., None] * torch.stack((angle.cos(), angle.sin()), -1)
    return centre + {"rings": 0.4, "spirals": 0.2, "clear rings": 0.1}[task] * x, label, label


def parameters(flat: Tensor, sizes: tuple[int, ...]) -> list[Tensor]:
    """Return matrices (..., out, in) and biases (..., out), in turn, as views of (..., elements)."""
    shapes = [shape for i, o in pairwise(sizes) for shape in ((o, i), (o,))]
    parts = flat.split([math.prod(shape) for shape in shapes], -1)
    return [part.unflatten(-1, shape) for part, shape in zip(parts, shapes, strict=True)]


def initial(task: str, random: Generator) -> Tensor:
    """Draw a network's parameters as one vector: matrices of variance 1.5 / width, biases of 0."""
    flat = torch.zeros(sum(o * i + o for i, o in pairwise(SIZES[task])))
    for matrix in parameters(flat, SIZES[task])[::2]:
        matrix.normal_(0, (1.5 / matrix.shape[1]) ** 0.5, generator=random)
    return flat


def network(flat: Tensor, sizes: tuple[int, ...], x: Tensor) -> Tensor:
    """Return the network's outputs (..., out) for one vector of parameters."""
    parts = parameters(flat, sizes)
    for matrix, bias in zip(parts[:-2:2], parts[1:-2:2], strict=True):
        x = linear(x, matrix, bias).tanh()
    return linear(x, *parts[-2:])


def orthogonalize(g: Tensor, sizes: tuple[int, ...]) -> None:
    """Filter the matrices of pseudo-gradients (cells, elements) in place, as `filter="orthogonal"` does."""
    for matrix in parameters(g, sizes)[::2]:
        flat = vmap(orthogonalized)(matrix).float()
        matrix.copy_(flat * (torch.linalg.matrix_norm(matrix) / torch.linalg.matrix_norm(flat))[:, None, None])


def outer_step(anchor: Tensor, buffer: Tensor, g: Tensor, cells: list[Cell], number: int) -> None:
    """Take round `number`, from 1, of all cells in place; the vectors are (cells, elements)."""
    numbers = [(c.rule.lr, c.rule.momentum, c.rule.injection, c.rule.nesterov) for c in cells]
    lr, momentum, weight, nesterov = torch.tensor(numbers)[..., None].unbind(1)
    buffer.mul_(momentum).add_(weight * g)
    anchor.sub_(lr * torch.where(nesterov > 0, weight * g + momentum * buffer, buffer))
    buffer[[c.period > 0 and number % c.period == 0 for c in cells]] = 0


def run(task: str, seed: int, cells: list[Cell], steps: int) -> list[float]:
    """Train cells of one S, filter and inner optimizer; return their held-out losses, infinite where one diverged."""
    sizes, random = SIZES[task], Generator().manual_seed(3 * seed + 1)
    anchor = initial(task, random).repeat(len(cells), 1)
    inputs, targets, _ = points(task, (steps, REPLICAS, BATCH), seed, random)

    def loss(flat: Tensor, x: Tensor, y: Tensor) -> Tensor:
        out = network(flat, sizes, x)
        return mse_loss(out[..., 0], y) if y.is_floating_point() else cross_entropy(out, y)

    gradients, rates = vmap(vmap(grad(loss)), (0, None, None)), torch.tensor([c.lr for c in cells])[:, None, None]
    x, buffer = anchor[:, None].repeat(1, REPLICAS, 1), torch.zeros_like(anchor)
    mean, square, trace = torch.zeros_like(x), torch.zeros_like(x), torch.zeros_like(x)
    for step in range(1, steps + 1):
        g, lr = (
            gradients(x, inputs[step - 1], targets[step - 1]),
            rates * (1 + math.cos(math.pi * (step - 1) / steps)) / 2,
        )
        mean.lerp_(g, 0.1)
        square.lerp_(g * g, 0.001)
        move = mean / (1 - 0.9**step) / ((square / (1 - 0.999**step)).sqrt() + 1e-8)
        if cells[0].muon:
            nesterov = g.lerp(trace.lerp_(g, 0.05), 0.95)
            for part, of in zip(parameters(move, sizes)[:-2:2], parameters(nesterov, sizes)[:-2:2], strict=True):
                part.copy_(0.2 * max(of.shape[-2:]) ** 0.5 * vmap(vmap(orthogonalized))(of))
        x.mul_(1 - 0.01 * lr).sub_(lr * move)
        if step % cells[0].inner_steps == 0:
            g = anchor - x.mean(1)
            if cells[0].filtered:
                orthogonalize(g, sizes)
            outer_step(anchor, buffer, g, cells, step // cells[0].inner_steps)
            x.copy_(anchor[:, None].expand_as(x))
    inputs, _, targets = points(task, (HELD_OUT,), seed, Generator().manual_seed(3 * seed + 2))
    return vmap(loss, (0, None, None))(anchor, inputs, targets).nan_to_num(math.inf, math.inf).tolist()


def train(task: str, seed: int, cells: set[Cell], steps: int) -> dict[Cell, float]:
    """Train all cells of a seed; return their held-out losses."""
    losses: dict[Cell, float] = {}
    for muon, filtered in ((False, False), (False, True), (True, False)):
        alike = sorted((cell for cell in cells if (cell.muon, cell.filtered) == (muon, filtered)), key=str)
        for some in (alike[i : i + AT_ONCE] for i in range(0, len(alike), AT_ONCE)):
            losses |= zip(some, run(task, seed, some, steps), strict=True)
    return losses


def study(task: str, inner_steps: int, steps: int, choosing: range, held_out: range) -> Frame:
    """Choose each method's setting on some seeds, and compare them on others; return a row for each comparison."""
    found = methods(task, inner_steps)
    runs = [train(task, seed, {cell for cells in found.values() for cell in cells}, steps) for seed in choosing]
    losses = {cell: statistics.geometric_mean(each[cell] for each in runs) for cell in runs[0]}
    best = {name: min(cells, key=losses.__getitem__) for name, cells in found.items()}
    judged = {seed: train(task, seed, set(best.values()), steps) for seed in held_out}
    results = {name: {seed: judged[seed][cell] for seed in held_out} for name, cell in best.items()}
    rows = []
    for name, cells in found.items():
        form = name.partition(",")[0]
        row = {"task": task, "S": inner_steps, "method": name, "inner_lr": best[name].lr}
        row |= {"outer": best[name].rule.describe(), "loss": statistics.geometric_mean(results[name].values())}
        if form in FORMS:
            rivals = [cell for other in found if other.startswith((form, "averaging")) for cell in found[other]]
            for where, rates in (("averagings_lr", {best["averaging"].lr}), ("own_lr", {cell.lr for cell in rivals})):
                good = 1.25 * min(losses[cell] for cell in rivals if cell.lr in rates)
                near = {cell.rule for cell in cells if cell.lr in rates and losses[cell] <= good}
                row[f"good_at_{where}"] = len(near)
        for control in [other for other in ("averaging", form) if other != name and other in found] or [name]:
            said = compare(results[name], results[control], comparisons=2 * len(SIZES))
            answer = {"word": said.word, "ratio": said.ratio, "low": said.low, "high": said.high}
            rows.append(row | {"control": control} | answer)
    return pd.DataFrame(rows)


def draw(table: Frame) -> dict[str, Figure]:
    """Draw how many times better than averaging the methods are, a panel each, a line each workload."""
    panels = {
        "sum": "tuned momentum",
        "sum, K = 3": "the same, K = 3",
        "usual": "DiLoCo's usual",
        "usual, K = 3": "usual, K = 3",
    }
    panels |= {"filter": "orthogonal filter", "muon": "inner Muon"}
    workloads = list(product(SIZES, (8, 16)))
    figure, grid = style.new_figure(3.2, 1, len(panels), sharex=True, sharey=True)
    for axes, (method, label) in zip(grid[0], panels.items(), strict=True):
        rows = table[(table["method"] == method) & (table["control"] == "averaging")]
        y = [workloads.index(place) for place in zip(rows["task"], rows["S"], strict=True)]
        axes.axvline(1, color=style.MUTED, linewidth=0.8)
        axes.hlines(y, rows["low"], rows["high"], color=style.INK, linewidth=1)
        axes.plot(rows["ratio"], y, "o", color=style.INK)
        dot_chart(axes, [f"{task}, S = {s}" for task, s in workloads], xscale="log", xlim=(1 / 16, 16))
        axes.set_xticks([1 / 8, 1, 8], ["1/8", "1", "8"], minor=False)
        axes.set_title(label)
    style.headline(
        figure, TITLE, "averaging's held-out loss over the method's, both tuned; right of 1 is better than averaging"
    )
    return {"": figure}


def summary(table: Frame) -> Frame:
    """Count words and good settings over the ten workloads with noise, by method and control."""
    noisy = table[table["task"] != "clear rings"]
    lines = []
    for (method, control), rows in noisy.groupby(["method", "control"], sort=False):
        words = {word: (rows["word"] == word).sum() for word in ("better", "equal", "undecided", "worse")}
        line = {"method": method, "control": control, "ahead": (rows["ratio"] > 1).sum(), "of": len(rows)} | words
        ratios = {"least": rows["ratio"].min(), "largest": rows["ratio"].max()}
        lines.append(line | ratios | rows[["good_at_averagings_lr", "good_at_own_lr"]].sum().to_dict())
    return pd.DataFrame(lines)


def main() -> None:
    """Draw the stored comparisons, or train."""
    options = arguments(__doc__, scales=SCALES)
    if options.train:
        torch.set_num_threads(1)
        options.out.mkdir(parents=True, exist_ok=True)
        for task, inner_steps in product(SIZES, (8, 16)):
            done = (
                read(NAME, options.out)
                if (options.out / f"{NAME}.csv").exists()
                else pd.DataFrame({"task": [], "S": []})
            )
            if not ((done["task"] == task) & (done["S"] == inner_steps)).any():
                write(NAME, pd.concat([done, study(task, inner_steps, *SCALES[options.train])]), options.out)
    table = read(NAME, options.out) if options.train else read(NAME)
    show(summary(table))
    store(NAME, table, draw, options.out)


if __name__ == "__main__":
    main()
