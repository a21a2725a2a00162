"""Other kinds of task: what is vectorized over settings trains as torch's and this package's optimizers do."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import small_tasks
from small_tasks import Cell
from twophase.optim.orthogonal import orthogonal
from twophase.optim.outer_sgd import OuterSGD
from twophase.rule import OuterRule
from twophase.training.inner import MuonAdamW

STEPS, SEED = 24, 5
PLAIN = [
    Cell(4, 0.016),
    Cell(4, 0.008, OuterRule(0.7, 0.9, nesterov=True), 3),
    Cell(4, 0.008, OuterRule(1.0, 0.6, nesterov=True, form="ema"), 2),
    Cell(4, 0.016, OuterRule(0.3, 0.9, form="ema")),
    Cell(4, 0.016, OuterRule(1.0, 0.6), 2),
]


def network(flat: torch.Tensor) -> nn.Sequential:
    inputs, hidden, _, outputs = small_tasks.SIZES["rings"]
    model = nn.Sequential(
        nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, outputs)
    )
    nn.utils.vector_to_parameters(flat, model.parameters())
    return model


def by_optimizers(cell: Cell) -> float:
    random = torch.Generator().manual_seed(3 * SEED + 1)
    start = small_tasks.initial("rings", random)
    inputs, targets, _ = small_tasks.points("rings", (STEPS, small_tasks.REPLICAS, small_tasks.BATCH), SEED, random)
    anchor, replicas = network(start.clone()), [network(start.clone()) for _ in range(small_tasks.REPLICAS)]
    rule, names = cell.rule, [name for name, _ in anchor.named_parameters()]
    outer = OuterSGD(
        anchor.parameters(),
        rule.lr,
        rule.momentum,
        nesterov=rule.nesterov,
        form=rule.form,
        restart=cell.period or "never",
    )
    settings: Any = SimpleNamespace(lr=cell.lr, weight_decay=0.01, betas=(0.9, 0.999), momentum=0.95)
    inners = [
        MuonAdamW(m, settings) if cell.kind == "muon" else torch.optim.AdamW(m.parameters(), cell.lr, weight_decay=0.01)
        for m in replicas
    ]
    for step in range(STEPS):
        for r, (model, inner) in enumerate(zip(replicas, inners, strict=True)):
            for group in inner.param_groups:
                group["lr"] = cell.lr * (1 + math.cos(math.pi * step / STEPS)) / 2
            inner.zero_grad()
            nn.functional.cross_entropy(model(inputs[step, r]), targets[step, r]).backward()
            inner.step()
        if (step + 1) % cell.inner_steps == 0:
            for x, *theirs in zip(*(m.parameters() for m in (anchor, *replicas)), strict=True):
                x.grad = x.detach() - torch.stack([w.detach() for w in theirs]).mean(0)
            if cell.kind == "filter":
                orthogonal({n: x.grad for n, x in zip(names, anchor.parameters(), strict=True) if x.grad is not None})
            outer.step()
            for model in replicas:
                model.load_state_dict(anchor.state_dict())
    x, _, y = small_tasks.points("rings", (small_tasks.HELD_OUT,), SEED, torch.Generator().manual_seed(3 * SEED + 2))
    return float(nn.functional.cross_entropy(anchor(x), y).detach())


@pytest.mark.parametrize(
    ("cells", "tolerance"),
    [
        (PLAIN, 1e-5),
        ([Cell(4, 0.016, kind="filter")], 1e-3),  # bfloat16 inside
        ([Cell(8, 0.032, kind="muon")], 1e-3),
    ],
)
def test_all_settings_at_once_train_as_one_by_one(cells: list[Cell], tolerance: float) -> None:
    """Losses are those of torch's inner optimizer and `OuterSGD`: restarts, both forms, the filter, inner Muon."""
    expected = [by_optimizers(cell) for cell in cells]
    assert small_tasks.run("rings", [9, SEED], cells, STEPS)[1] == pytest.approx(expected, rel=tolerance)
    assert len(set(expected)) == len(cells)
