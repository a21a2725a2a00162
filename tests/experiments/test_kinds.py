"""Small tasks: what is vectorized over settings trains as torch's and this package's optimizers do."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import small_tasks
from small_tasks import Cell, Workload
from twophase.optim.orthogonal import orthogonal
from twophase.optim.outer_sgd import OuterSGD
from twophase.optim.schedules import Schedule, follow
from twophase.rule import OuterRule
from twophase.training.inner import MuonAdamW

SEED = 5
WORK = Workload("rings", 4, 24)
PLAIN = [
    Cell(0.016),
    Cell(0.008, OuterRule(0.7, 0.9, nesterov=True), 3),
    Cell(0.008, OuterRule(1.0, 0.6, nesterov=True, form="ema"), 2),
    Cell(0.016, OuterRule(0.3, 0.9, form="ema")),
    Cell(0.016, OuterRule(1.0, 0.6), 2),
    Cell(0.016, OuterRule(0.7, 0.0), kind="rising"),
]


def network(task: str, flat: torch.Tensor) -> nn.Sequential:
    if task == "conv":
        convolutions = [nn.Conv2d(1, 8, 3, 2, 1), nn.Tanh(), nn.Conv2d(8, 16, 3, 2, 1), nn.Tanh()]
        model = nn.Sequential(nn.Unflatten(-1, (1, 8, 8)), *convolutions, nn.Flatten(), nn.Linear(64, 10))
        for own, theirs in zip(model.parameters(), small_tasks.parameters(flat, task), strict=True):
            if own.ndim == 4:  # a patch has its channels last, an image of torch first
                theirs = theirs.view(len(own), 3, 3, -1).permute(0, 3, 1, 2)  # noqa: PLW2901
            elif theirs.ndim == 2:
                theirs = theirs.view(10, 4, 16).mT.flatten(1)  # noqa: PLW2901
            own.data.copy_(theirs)
        return model
    widths = small_tasks.SIZES[task]
    layers = [layer for i, o in pairwise(widths) for layer in (nn.Linear(i, o), nn.Tanh())]
    model = nn.Sequential(*layers[:-1])
    nn.utils.vector_to_parameters(flat, model.parameters())
    return model


def inner_optimizer(cell: Cell, model: nn.Module) -> torch.optim.Optimizer:
    settings: Any = SimpleNamespace(lr=cell.lr, weight_decay=0.01, betas=(0.9, 0.999), momentum=0.95)
    match cell.inner:
        case "muon":
            return MuonAdamW(model, settings)
        case "adamw":
            return torch.optim.AdamW(model.parameters(), cell.lr, weight_decay=0.01)
    return torch.optim.SGD(model.parameters(), cell.lr, momentum=0.9 * (cell.inner == "momentum"))


def by_optimizers(work: Workload, cell: Cell) -> float:
    random = torch.Generator().manual_seed(3 * SEED + 1)
    start = small_tasks.initial(work.task, random)
    inputs, targets, _ = small_tasks.points(work.task, (work.steps, work.replicas, work.batch), SEED, random)
    anchor, *replicas = [network(work.task, start.clone()) for _ in range(1 + work.replicas)]
    rule, names = cell.rule, [name for name, _ in anchor.named_parameters()]
    restart = "auto" if cell.kind == "auto" else cell.period or "never"
    outer = OuterSGD(
        anchor.parameters(), rule.lr, rule.momentum, nesterov=rule.nesterov, form=rule.form, restart=restart
    )
    if cell.kind == "rising":
        follow(outer, Schedule("linear", 2.0), work.steps // work.inner_steps)
    inners = [inner_optimizer(cell, model) for model in replicas]
    for step in range(work.steps):
        for r, (model, inner) in enumerate(zip(replicas, inners, strict=True)):
            for group in inner.param_groups:
                group["lr"] = cell.lr * small_tasks.rate(work.schedule, step / work.steps)
            inner.zero_grad()
            small_tasks.losses(model(inputs[step, r]).mT, targets[step, r]).backward()
            inner.step()
        if (step + 1) % work.inner_steps == 0:
            for x, *theirs in zip(*(m.parameters() for m in (anchor, *replicas)), strict=True):
                x.grad = x.detach() - torch.stack([w.detach() for w in theirs]).mean(0)
            if cell.kind == "filter":
                orthogonal({n: x.grad for n, x in zip(names, anchor.parameters(), strict=True) if x.grad is not None})
            outer.step()
            for model in replicas:
                model.load_state_dict(anchor.state_dict())
    random = torch.Generator().manual_seed(3 * SEED + 2)
    x, _, y = small_tasks.points(work.task, (small_tasks.HELD_OUT,), SEED, random, held_out=True)
    return float(small_tasks.losses(anchor(x).mT, y).detach())


@pytest.mark.parametrize(
    ("work", "cells", "tolerance"),
    [
        (WORK, PLAIN, 1e-5),
        (WORK, [Cell(0.016, kind="filter")], 1e-3),  # bfloat16 inside
        (WORK, [Cell(0.016, kind="auto")], 1e-5),
        (WORK._replace(inner_steps=8), [Cell(0.032, inner="muon")], 1e-3),
        (WORK._replace(schedule="wsd"), [Cell(0.1, inner="sgd"), Cell(0.2, PLAIN[1].rule, 2, inner="sgd")], 1e-5),
        (WORK._replace(replicas=2, batch=64), [Cell(0.02, inner="momentum")], 1e-5),
        (WORK._replace(task="conv"), [Cell(0.016)], 1e-5),
        (WORK._replace(task="deep"), [Cell(0.05, inner="sgd")], 1e-5),
    ],
)
def test_all_settings_at_once_train_as_one_by_one(work: Workload, cells: list[Cell], tolerance: float) -> None:
    """Losses are those of torch's inner optimizers and `OuterSGD`: restarts, both forms, the filter, inner Muon."""
    expected = [by_optimizers(work, cell) for cell in cells]
    found = [outcome.loss for outcome in small_tasks.run(work, [9, SEED], cells)[1]]
    assert found == pytest.approx(expected, rel=tolerance)
    assert len(set(expected)) == len(cells)


@pytest.mark.parametrize("task", [task for task in small_tasks.SIZES if task != "digits"])
def test_nothing_is_better_than_the_truth(task: str) -> None:
    """The known truth has an excess of 0, and its loss on noisy targets is the least: any change of it costs more."""
    random = torch.Generator().manual_seed(1)
    x, noisy, clean = small_tasks.points(task, (40_000,), 2, random)
    true = small_tasks.truth(task, x, clean)
    out = true if clean.is_floating_point() else true.clamp(min=1e-12).log()
    assert float(small_tasks.excess(out, true)) == pytest.approx(0, abs=1e-6)
    other = out + torch.randn(out.shape, generator=random)
    gap = small_tasks.losses(other, noisy) - small_tasks.losses(out, noisy)
    assert float(gap) == pytest.approx(float(small_tasks.excess(other, true)), rel=0.1, abs=1e-6)
