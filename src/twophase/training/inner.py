"""One replica of a run: its model, its inner optimizer and the learning rate of each inner step."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from twophase.training.config import RunConfig
from twophase.training.device import first_examples, moved, room_for
from twophase.training.task import Step, Task


class Replica:
    """A model with its own inner AdamW, which persists over rounds, and its own part of the data."""

    def __init__(self, config: RunConfig, number: int, task: Task, compute: Step) -> None:
        self.config = config
        self.number = number
        self.task = task
        self.compute = compute
        self.model = task.model(config.seed).to(compute.device)
        self.inner = torch.optim.AdamW(
            self.model.parameters(),
            lr=config.inner.lr,
            betas=config.inner.betas,
            weight_decay=config.inner.weight_decay,
            fused=True,
        )
        self.round_losses: list[float] = []
        """Its training losses, one an inner step, since the longest-running fragment began its round."""

    def step(self, step: int, lr: float) -> Tensor:
        """Take one inner step; return the training loss, a scalar that is still on the device.

        Nothing here waits for the device, so its next work is always queued.
        """
        batch = moved(self.task.batch(self.config.seed, step, self.number), self.compute.device)
        loss = self.compute.gradients(self.model, batch)
        with room_for("the inner optimizer", self.config.device):
            if self.config.inner.clip_norm > 0:
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.inner.clip_norm)
            for group in self.inner.param_groups:
                group["lr"] = lr
            self.inner.step()
        self.inner.zero_grad()
        return loss

    def probe(self, model: nn.Module, step: int, examples: int = 0) -> float:
        """Compute a model's mean loss, forward only, on the first examples (0: all) of an inner step's batch."""
        batch = first_examples(self.task.batch(self.config.seed, step, self.number), examples)
        return float(self.compute.loss(model, moved(batch, self.compute.device)))

    @torch.no_grad()
    def evaluate(self) -> Mapping[str, float]:
        """Evaluate this replica's model on held-out data."""
        return self.compute.evaluate(self.model)

    def state_dict(self) -> dict[str, Any]:
        """Return model, inner optimizer, and the losses of the round."""
        return {"model": self.model.state_dict(), "inner": self.inner.state_dict(), "round_losses": self.round_losses}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`."""
        self.model.load_state_dict(state["model"])
        self.inner.load_state_dict(state["inner"])
        self.round_losses = list(map(float, state.get("round_losses", ())))  # older states have their sum

    def has_moved(self, numbers: Collection[int]) -> bool:
        """Tell whether one of some parameters, by their numbers, differs from its first value."""
        pairs = zip(self.model.parameters(), self.task.model(self.config.seed).parameters(), strict=True)
        return any(not torch.equal(now.cpu(), first) for n, (now, first) in enumerate(pairs) if n in numbers)


def inner_lr(config: RunConfig, step: int) -> float:
    """Compute the inner learning rate at step t, counted from 0: linear warmup over w = warmup x steps, a schedule.

    * t < w: `lr (t + 1) / w`;
    * cosine: `lr (1 + cos(pi (t - w) / (steps - w))) / 2`;
    * linear: `lr (steps - t) / (steps - w)`; wsd: the same with w = steps - decay x steps, and `lr` before it;
    * constant: `lr`.
    """
    inner, steps = config.inner, config.steps
    start = round(inner.warmup * steps)
    if step < start:
        return inner.lr * (step + 1) / start
    if inner.schedule == "wsd":
        start = max(start, steps - round(inner.decay * steps))
    if inner.schedule == "constant" or step < start:
        return inner.lr
    if inner.schedule == "cosine":
        return inner.lr * (1 + math.cos(math.pi * (step - start) / max(steps - start, 1))) / 2
    return inner.lr * (steps - step) / (steps - start)
