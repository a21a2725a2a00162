"""The protocol between the training loop and a task, and plain computation with autograd."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn


class Task(Protocol):
    """Define what is trained: a model, its batches, its loss and its evaluation.

    Optional methods:

    | method                                 | result                                                              |
    |----------------------------------------|---------------------------------------------------------------------|
    | `step(device, replicas, group)`        | a `Step`, which computes in place of `PlainStep`                    |
    | `inner(model, config)`                 | an inner optimizer in place of the one that an `InnerConfig` names  |
    | `logits(model, batch)`                 | logits whose mean cross-entropy is the loss, (examples, …, classes) |
    | `check(device)`                        | None; a UsageError if data or device cannot be used                 |
    | `check_data(steps)`                    | None; a UsageError if the run needs more data than there is         |
    """

    def model(self, seed: int) -> nn.Module:
        """Return a model with fresh weights on the CPU, the same for the same seed."""
        ...

    def batch(self, seed: int, step: int, replica: int) -> Any:
        """Return the batch of a replica's inner step, a pure function of its arguments.

        Returns:
            NumPy arrays, tensors, or tuples, lists and dictionaries of them; examples lie along the first dimension.
        """
        ...

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the mean loss of a batch on the model's device, a scalar to be minimized."""
        ...

    def evaluate(self, model: nn.Module) -> Mapping[str, float]:
        """Return held-out numbers; `loss` is required, and any other number becomes a column of the record."""
        ...

    def describe(self) -> Mapping[str, Any]:
        """Return plain values for `env.json`; `fingerprint` is required, and changes with the data."""
        ...


class Step(Protocol):
    """Compute for a task: one object for all replicas and runs of a process."""

    device: torch.device
    chosen: dict[str, Any]
    """Decisions about how to compute, as plain values; a checkpoint keeps them, and a resumed run computes alike."""
    tokens: int
    """Tokens of a batch; 0 where the data has none."""
    loss_bound: float
    """Loss above which a run counts as diverged, unless the configuration names another."""
    data_name: str
    """The data's name in messages."""

    def gradients(self, model: Any, batch: Any) -> Tensor:
        """Add the gradient of the mean loss to `.grad`; return the loss, a scalar that the device may still compute."""
        ...

    def evaluate(self, model: Any, /) -> Mapping[str, float]:
        """Evaluate as `Task.evaluate` does."""
        ...

    def rates(self, batches: int, seconds: float) -> dict[str, float]:
        """Return the speed of so many inner steps of one replica, for `steps.jsonl`."""
        ...


class PlainStep:
    """Compute a whole batch at once with autograd alone."""

    tokens = 0
    loss_bound = math.inf

    def __init__(self, task: Task, device: torch.device) -> None:
        self.task, self.device, self.evaluate = task, device, task.evaluate
        self.chosen: dict[str, Any] = {}
        self.data_name = f"--task {name}" if (name := getattr(task, "name", "")) else type(task).__name__

    def gradients(self, model: nn.Module, batch: Any) -> Tensor:
        """Differentiate the task's loss."""
        loss = self.task.loss(model, batch)
        loss.backward()
        return loss.detach()

    def rates(self, batches: int, seconds: float) -> dict[str, float]:
        """Return batches a second."""
        return {"batches_per_second": batches / seconds if seconds > 0 else 0.0}
