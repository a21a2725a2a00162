"""What tests of the engine's rounds do again and again, and a second process that holds the same as this one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from replicas import Run, same_bits
from twophase.diloco.communicator import Pending, SingleProcess
from twophase.diloco.engine import DiLoCo
from twophase.diloco.report import RoundReport
from twophase.optim.outer import OuterSGD


class Pair(SingleProcess):
    """Two processes that hold the same: every sum is twice this process's."""

    size: int = 2  # type: ignore[override]

    def launch_sum(self, tensor: Tensor) -> Pending:
        """Twice the tensor."""
        return super().launch_sum(tensor.mul_(2))

    def launch_scatter(self, received: Tensor, sent: Tensor) -> Pending:
        """The first half, of both."""
        half = sent[: len(sent) // 2]
        return super().launch_scatter(received, torch.cat([half, half]))

    def launch_gather(self, received: Tensor, sent: Tensor) -> Pending:
        """The tensor twice."""
        return super().launch_gather(received, torch.cat([sent, sent]))

    def exchange_bytes(self, sent: bytes, *, in_replica: bool = False) -> list[bytes]:
        """The bytes twice."""
        return [sent] if in_replica else [sent, sent]


@torch.no_grad()
def shift(*modules: nn.Module, by: float = 1.0) -> None:
    """Move every parameter."""
    for module in modules:
        for p in module.parameters():
            p.add_(by)


@torch.no_grad()
def fill(module: nn.Module, value: float) -> None:
    """Set every parameter."""
    for p in module.parameters():
        p.fill_(value)


def report_of(engine: DiLoCo, *signals: Any) -> RoundReport:
    """The report of a step in which a round ends."""
    report = engine.step(*signals)
    assert report is not None
    return report


def holds_anchor(run: Run) -> bool:
    """Whether every replica has the anchor's bits."""
    named = [pair for model in run.models for pair in model.named_parameters()]
    return all(same_bits(p.detach(), run.engine.anchor[name]) for name, p in named)


def blocks(params: list[tuple[str, Tensor]]) -> OuterSGD:
    """An outer optimizer with a rule and a restart period for each of three blocks."""
    groups = [
        {"params": [p for n, p in params if n.startswith("0.")], "restart": "2", "nesterov": True},
        {"params": [p for n, p in params if n.startswith("2.")], "restart": "cycle:1,3", "form": "ema", "lr": 0.7},
        {"params": [p for n, p in params if n.startswith("3.")], "restart": "soft:3:0.5:0.25", "momentum": 0.5},
    ]
    return OuterSGD(groups, lr=0.3, momentum=0.9)
