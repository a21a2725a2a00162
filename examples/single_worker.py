"""One worker with an outer optimizer on its own progress (SNOO), with and without restarts, written in two ways.

    python examples/single_worker.py
    python examples/single_worker.py --steps 400 --restart never

Every S inner steps of AdamW the progress since the last round, anchor minus weights, is a pseudo-gradient for Nesterov
momentum. There is no peer to average with: it is DiLoCo with one replica. `with_engine` leaves the rounds to
`twophase.DiLoCo`; `by_hand` writes them out around a bare `twophase.OuterSGD`. Both give the same bits.

The data are made here: a small network learns a sum of sines. Which of the lines printed is best depends on the rule
and on how long it runs: this shows how to write it, not what it gains.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

from twophase import DiLoCo, OuterRule, OuterSGD

INNER_STEPS = 8  # S: inner steps a round
RULE = OuterRule(lr=0.7, momentum=0.9, nesterov=True)


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A small network from 8 numbers to one, and its inner optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3)


def batch(step: int, size: int = 64) -> tuple[Tensor, Tensor]:
    """The batch of an inner step: x of shape (size, 8) and y of shape (size, 1)."""
    x = torch.randn(size, 8, generator=torch.Generator().manual_seed(step))
    return x, x.sin().sum(dim=1, keepdim=True)


def inner_step(model: nn.Module, inner: torch.optim.Optimizer, step: int) -> None:
    """One ordinary training step."""
    x, y = batch(step)
    inner.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    inner.step()


def plain(steps: int) -> nn.Module:
    """The inner optimizer alone."""
    model, inner = build()
    for step in range(steps):
        inner_step(model, inner, step)
    return model


def with_engine(steps: int, restart: str) -> nn.Module:
    """The engine counts the steps and takes the rounds."""
    model, inner = build()
    engine = DiLoCo(model, RULE, restart=restart, inner_steps=INNER_STEPS)
    for step in range(steps):
        inner_step(model, inner, step)
        engine.step()
    engine.finish()
    return model


def by_hand(steps: int, restart: str) -> nn.Module:
    """The same rounds around a bare `OuterSGD`, whose parameters are the anchor."""
    model, inner = build()
    anchor = [p.detach().clone() for p in model.parameters()]
    outer = OuterSGD(anchor, RULE.lr, RULE.momentum, nesterov=RULE.nesterov, restart=restart)
    for step in range(1, steps + 1):
        inner_step(model, inner, step - 1)
        if step % INNER_STEPS == 0 or step == steps:  # the last round may be shorter
            with torch.no_grad():
                for a, p in zip(anchor, model.parameters(), strict=True):
                    a.grad = a - p
                outer.step()
                for a, p in zip(anchor, model.parameters(), strict=True):
                    p.copy_(a)
    return model


@torch.no_grad()
def loss(model: nn.Module) -> float:
    """Mean squared error on data that no training step has seen."""
    x, y = batch(step=-1, size=4096)
    return nn.functional.mse_loss(model(x), y).item()


def main(arguments: list[str] | None = None) -> None:
    """Train without outer optimizer, without restarts and with them, and print the losses."""
    parser = argparse.ArgumentParser(description="One worker with an outer optimizer on its own progress (SNOO).")
    parser.add_argument("--steps", type=int, default=300, help="inner steps in all")
    parser.add_argument("--restart", default="3", help="restart policy: 3, cycle:5,6,10, soft:3:0.2:0.1, never ...")
    options = parser.parse_args(arguments)
    print(f"{RULE.describe()}, a round every {INNER_STEPS} steps, {options.steps} steps; loss at the end")
    print(f"  {loss(plain(options.steps)):.6f}  inner optimizer alone")
    for restart in ("never", options.restart):
        print(f"  {loss(with_engine(options.steps, restart)):.6f}  engine, restart {restart}")
        print(f"  {loss(by_hand(options.steps, restart)):.6f}  by hand, restart {restart}")


if __name__ == "__main__":
    main()
