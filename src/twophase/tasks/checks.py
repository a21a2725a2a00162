"""A task of the user's own class, as the training loop takes it, and the checks that protect its results.

Runs are resumed, shared by a sweep and compared, which is right only where the same arguments give the same batch and
the same weights. Whatever the class raises comes through with its traceback.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from functools import lru_cache
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
    the values that make the task, and its `name`.
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
        sources: list[str] = []
        if not self.is_shipped:  # the class's file and those of its bases beside it
            modules = [sys.modules.get(kind.__module__) for kind in type(self.task).__mro__]
            files = [Path(file).absolute() for module in modules if (file := getattr(module, "__file__", None))]
            sources = [sha256(file) for file in files if file.parent == files[0].parent and file.is_file()]
        identity = json.dumps([described, to_tree(self.options), sources], sort_keys=True)
        fingerprint = hashlib.sha256(identity.encode()).hexdigest()
        return {**described, "task": self.name, "loss_unit": unit, "fingerprint": fingerprint}

    def check(self, device: torch.device) -> None:
        """Refuse weights or a batch that differ the second time; evaluate once, before hours of training."""
        if self.is_shipped:
            return
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            model = self.model(0)
            pairs = {
                "model(0)": (model.state_dict(), self.model(0).state_dict()),
                "batch(0, 0, 0)": (self.batch(0, 0, 0), self.batch(0, 0, 0)),
            }
            for call, (first, second) in pairs.items():
                (leaves, tree), (others, other_tree) = tree_flatten(first), tree_flatten(second)
                if tree != other_tree or not all(map(_is_equal, leaves, others)):
                    remedy = "must return the same twice; draw it from its arguments alone"
                    raise UsageError(f"--task {self.name}: {call} {remedy}")
            self.evaluate(model.to(device))


own_task = lru_cache(maxsize=2)(OwnTask)  # a sweep's worker trains many runs on the same data


def _is_equal(first: Any, second: Any) -> bool:
    """Tell whether two leaves are the same; a NaN is equal to itself."""
    if isinstance(first, np.ndarray):
        return np.array_equal(first, second, equal_nan=first.dtype.kind == "f")
    return torch.equal(first.nan_to_num(), second.nan_to_num()) if isinstance(first, Tensor) else first == second
