"""One small regression for every trainer: model, data, and the hand-written loop that their rounds must equal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from replicas import same_bits
from twophase.diloco.engine import DiLoCo
from twophase.rule import OuterRule

RULE = OuterRule(0.7, 0.9, nesterov=True)
INNER_STEPS, RESTART = 4, 3


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.02, foreach=False)


def batch(step: int, replica: int = 0) -> tuple[Tensor, Tensor]:
    """A replica's examples of an inner step."""
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1000 * replica + step))
    return x, x.sum(dim=1, keepdim=True)


def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(x) - y).square().mean()


def by_hand(
    steps: int, replicas: int = 1, *, parts: int = 1, epoch: int = 1000, finish: bool = True, **setting: Any
) -> tuple[DiLoCo, list[nn.Module], list[Any]]:
    """The loop of docs/own-loop.md, of `parts` batches a step, over epochs; the engine, the replicas, the reports."""
    models: list[nn.Module] = [build() for _ in range(replicas)]
    inners = [optimizer(model) for model in models]
    engine, reports = DiLoCo(models, RULE, **{"restart": RESTART, "inner_steps": INNER_STEPS, **setting}), []
    for step in range(steps):
        for replica, (model, inner) in enumerate(zip(models, inners, strict=True)):
            for part in range(parts):
                (loss(model, *batch((parts * step + part) % epoch, replica)) / parts).backward()
            inner.step()
            inner.zero_grad()
        reports.append(engine.step())
    reports.append(engine.finish() if finish else None)
    return engine, models, [report for report in reports if report is not None]


def facts(reports: Iterable[Any]) -> list[tuple[int, int, bool, str]]:
    """What two equal runs have in common of each round."""
    return [(report.round, report.inner_steps, report.restarted, report.checksum) for report in reports]


def same_weights(model: nn.Module, other: nn.Module) -> bool:
    return all(map(same_bits, model.parameters(), other.parameters()))
