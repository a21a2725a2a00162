"""The protocol between the training loop and a task, plain computation with autograd, and tasks of any class."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
import sys
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from twophase.config import to_tree
from twophase.errors import UsageError
from twophase.files import sha256
from twophase.training.distributed import to_device


class Task(Protocol):
    """Define what is trained: a model, its batches, its loss and its evaluation.

    Optional methods:

    | method                                 | result                                                              |
    |----------------------------------------|---------------------------------------------------------------------|
    | `step(device, replicas, group)`        | a `Step`, which computes in place of `PlainStep`                    |
    | `inner(model, config)`                 | an inner optimizer in place of the one that an `InnerConfig` names  |
    | `logits(model, batch)`                 | logits whose mean cross-entropy is the loss, (examples, …, classes) |
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

    def gradients(self, model: nn.Module, batch: Any) -> Tensor:
        """Differentiate the task's loss."""
        loss = self.task.loss(model, batch)
        loss.backward()
        return loss.detach()

    def rates(self, batches: int, seconds: float) -> dict[str, float]:
        """Return batches a second."""
        return {"batches_per_second": batches / seconds if seconds > 0 else 0.0}


class OwnTask:
    """A task of any class: seeded, evaluated without gradients, and identified by its file and its options.

    The class has the methods of `Task`, and may lack `describe`; what it raises comes through with its traceback. The
    options, a dataclass, are the values that make the task, and its `name`. Runs are resumed, shared by a sweep and
    compared, which is right only where the same arguments give the same batch and the same weights: `check` does it.
    """

    def __init__(self, kind: type, options: Any, replicas: int) -> None:
        self.options, self.name = options, options.name
        self.is_shipped = kind.__module__.startswith("twophase.")
        values = {"replicas": replicas, "source": self.name.removeprefix("hf:")} | vars(options)
        fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
        self.task: Any = kind(**{field.name: values[field.name] for field in fields if field.init})
        needed = ("model", "batch", "loss", "evaluate")
        if missing := [name for name in needed if not hasattr(self.task, name)]:
            raise UsageError(f"--task {self.name}: must have the methods {', '.join(needed)}, lacks {missing}")
        for name in ("loss", "inner", "logits", "check_data"):
            if hasattr(self.task, name):
                setattr(self, name, getattr(self.task, name))

    def model(self, seed: int) -> nn.Module:
        """Return a model with fresh weights; what torch draws for them is seeded here."""
        torch.manual_seed(seed)
        return self.task.model(seed)

    def batch(self, seed: int, step: int, replica: int) -> Any:
        """Return the batch of a replica's inner step, and seed what the step draws from torch, such as dropout.

        So resumed runs and runs that share steps draw the same. The training loop puts its caller's generator back.
        """
        batch = self.task.batch(seed, step, replica)
        digest = hashlib.blake2b(f"{seed} {step} {replica}".encode(), digest_size=7).digest()
        # Without an accelerator the CPU's generator alone, for the others would take 0.8 ms.
        generators = torch if torch.accelerator.is_available() else torch.default_generator
        generators.manual_seed(int.from_bytes(digest, "big"))
        return batch

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Return held-out numbers, of a model in evaluation mode, which is in the mode of before at the end."""
        mode = model.training
        numbers = self.task.evaluate(model.eval())
        model.train(mode)
        if not isinstance(numbers, Mapping) or "loss" not in numbers:
            raise UsageError(
                f"--task {self.name}: evaluate() must return numbers by name with a loss, got {numbers!r:.80}"
            )
        return {name: float(value) for name, value in numbers.items()}

    def describe(self) -> dict[str, Any]:
        """Return what identifies model and data; `fingerprint` changes with it, and with the code of the class."""
        described = dict(self.task.describe()) if hasattr(self.task, "describe") else {}
        unit = described.pop("loss_unit", "")  # for pages alone
        sources: list[str] = []
        if not self.is_shipped:  # the class's file and those of its bases beside it
            modules = [sys.modules.get(kind.__module__) for kind in type(self.task).__mro__]
            files = [Path(file).absolute() for module in modules if (file := getattr(module, "__file__", None))]
            sources = [sha256(file) for file in files if file.parent == files[0].parent and file.is_file()]
        identity = json.dumps([described, to_tree(self.options), sources], sort_keys=True)
        fingerprint = hashlib.sha256(identity.encode()).hexdigest()
        return {**described, "task": self.name, "loss_unit": unit, "fingerprint": fingerprint}

    @torch.no_grad()
    def check(self, device: torch.device, seed: int = 0) -> None:
        """Refuse weights or a batch that differ the second time, or a seed but 0 that is as 0 or the next; evaluate."""
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            model, batch = self.model(0), self.batch(0, 0, 0)
            again = {"model(0)": self.model(0).state_dict(), "batch(0, 0, 0)": self.batch(0, 0, 0)}
            for (call, second), first in zip(again.items(), (model.state_dict(), batch), strict=True):
                if not _is_same(first, second):
                    remedy = "must return the same twice; draw it from its arguments alone"
                    raise UsageError(f"--task {self.name}: {call} {remedy}")
            self.check_seeds([0, seed, seed + 1] if seed else [], device)
            self.evaluate(model.to(device))

    @torch.no_grad()
    def check_seeds(self, seeds: Iterable[int], device: torch.device | str = "cpu") -> None:
        """Refuse seeds of which two give the same weights, batch and loss: one run, which would count as two."""
        with torch.random.fork_rng([]):
            batches = {seed: self.batch(seed, 0, 0) for seed in seeds}
            for one, other in itertools.combinations(batches, 2):
                if _is_same(batches[one], batches[other]) and _is_same(*(self._drawn(n, device) for n in (one, other))):
                    raise UsageError(f"--seed: {one} and {other} must differ, --task {self.name} makes one run of them")

    def _drawn(self, seed: int, device: torch.device | str) -> Any:
        """Return the weights of a seed and their loss, with the dropout that the seed decides, too."""
        model = self.model(seed).to(device).train()
        return model.state_dict(), self.task.loss(model, to_device(self.batch(seed, 0, 0), torch.device(device)))


def _is_same(first: Any, second: Any) -> bool:
    """Tell whether two trees hold the same."""
    (leaves, tree), (others, other_tree) = tree_flatten(first), tree_flatten(second)
    return tree == other_tree and all(map(_is_equal, leaves, others))


def _is_equal(first: Any, second: Any) -> bool:
    """Tell whether two leaves are the same; a NaN is equal to itself."""
    if isinstance(first, np.ndarray):
        return np.array_equal(first, second, equal_nan=first.dtype.kind == "f")
    return torch.equal(first.nan_to_num(), second.nan_to_num()) if isinstance(first, Tensor) else first == second


own_task = lru_cache(maxsize=2)(OwnTask)  # a sweep's worker trains many runs on the same data
