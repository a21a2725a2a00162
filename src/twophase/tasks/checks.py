"""A task of the user's own class, as the training loop takes it, and the checks that protect its results.

Runs are resumed, shared by a sweep and compared, which is right only where the same arguments give the same batch and
the same weights. Whatever the class raises comes through with its traceback.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from twophase.config import to_tree
from twophase.errors import UsageError
from twophase.files import sha256

RESERVED = frozenset(
    "step round train_loss validation_loss inner_lr tokens seconds engine_share diverged exit_reason steps rounds "
    "restarts checksum execution config weights_sha256".split()
)
"""Columns of `metrics.jsonl` and `summary.json`, which numbers of an evaluation of the same name would overwrite."""


class OwnTask:
    """A task of any class: seeded, evaluated without gradients, and identified by its file and its options.

    The class has the methods of `twophase.training.task.Task`, and may lack `describe`. The options, a dataclass, are
    the values that made the task, and its `name`.
    """

    def __init__(self, task: Any, options: Any) -> None:
        self.task, self.options, self.name = task, options, options.name
        self.is_shipped = type(task).__module__.startswith("twophase.")
        missing = [name for name in ("model", "batch", "loss", "evaluate") if not hasattr(task, name)]
        if missing:
            raise UsageError(
                f"--task {self.name}: must have the methods model, batch, loss and evaluate, lacks {missing}"
            )
        for name in ("loss", "inner", "logits", "check_data"):
            if hasattr(task, name):
                setattr(self, name, getattr(task, name))

    def model(self, seed: int) -> nn.Module:
        """Return a model with fresh weights; what torch draws for them is seeded here."""
        _seed(seed)
        return self.task.model(seed)

    def batch(self, seed: int, step: int, replica: int) -> Any:
        """Return the batch of a replica's inner step, and seed what the step draws from torch, such as dropout.

        So resumed runs and runs that share steps draw the same. The training loop puts its caller's generator back.
        """
        batch = self.task.batch(seed, step, replica)
        digest = hashlib.blake2b(f"{seed} {step} {replica}".encode(), digest_size=7).digest()
        _seed(int.from_bytes(digest, "big"))
        return batch

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Return held-out numbers, of a model in evaluation mode, which is in the mode of before at the end."""
        mode = model.training
        numbers = {name: float(value) for name, value in self.task.evaluate(model.eval()).items()}
        model.train(mode)
        if "loss" not in numbers or RESERVED & numbers.keys():
            raise UsageError(
                f"--task {self.name}: evaluate() must return loss, and no column of the record "
                f"({', '.join(sorted(RESERVED))}), got {', '.join(numbers) or 'nothing'}"
            )
        return numbers

    def describe(self) -> dict[str, Any]:
        """Return what identifies model and data; `fingerprint` changes with it, and with the code of the class."""
        described = dict(self.task.describe()) if hasattr(self.task, "describe") else {}
        unit = described.pop("loss_unit", "")  # for pages alone
        identity = json.dumps([described, to_tree(self.options), self._source()], sort_keys=True)
        fingerprint = hashlib.sha256(identity.encode()).hexdigest()
        return {**described, "task": self.name, "loss_unit": unit, "fingerprint": fingerprint}

    def _source(self) -> list[str]:
        """Return the SHA-256 of the class's file and of those of its bases beside it."""
        modules = [sys.modules.get(kind.__module__) for kind in type(self.task).__mro__]
        files = [Path(file).absolute() for module in modules if (file := getattr(module, "__file__", None))]
        beside = [file for file in files if file.parent == files[0].parent and file.is_file()]
        return [] if self.is_shipped else list(map(sha256, beside))

    def check(self, device: torch.device) -> None:
        """Refuse weights or a batch that differ the second time; evaluate once, before hours of training."""
        if not self.is_shipped:
            with torch.random.fork_rng([device] if device.type == "cuda" else []):
                model, again = self.model(0), self.model(0)
                self._check_equal("model(0)", model.state_dict(), again.state_dict())
                self._check_equal("batch(0, 0, 0)", self.batch(0, 0, 0), self.batch(0, 0, 0))
                self.evaluate(model.to(device))
        self.describe()  # reads the data, which may be missing

    def _check_equal(self, call: str, first: Any, second: Any) -> None:
        (leaves, tree), (others, other_tree) = tree_flatten(first), tree_flatten(second)
        if tree != other_tree or not all(map(_is_equal, leaves, others)):
            raise UsageError(f"--task {self.name}: {call} must return the same twice; draw it from its arguments alone")


def _is_equal(first: Any, second: Any) -> bool:
    """Tell whether two leaves are the same; a NaN is equal to itself."""
    if isinstance(first, np.ndarray):
        return np.array_equal(first, second, equal_nan=first.dtype.kind == "f")
    return torch.equal(first.nan_to_num(), second.nan_to_num()) if isinstance(first, Tensor) else first == second


def _seed(seed: int) -> None:
    """Seed torch's generators; without an accelerator the CPU's alone, for the others would take 0.8 ms."""
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)
