"""A task whose steps cost next to nothing, for tests of what the machinery around a task does."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own custom
from torch import Tensor, nn


@dataclass(frozen=True)
class Toy:
    """Learn a function of four numbers."""

    batch_size: int = 4

    def model(self, seed: int) -> nn.Module:
        """Return three layers, named as those of a language model."""
        torch.default_generator.manual_seed(seed)
        layers = {"embedding": nn.Linear(4, 6), "hidden": nn.Linear(6, 6), "bend": nn.Tanh(), "head": nn.Linear(6, 1)}
        return nn.Sequential(OrderedDict(layers))

    def batch(self, seed: int, step: int, replica: int) -> tuple[Tensor, Tensor]:
        x = np.random.default_rng((seed, step, replica)).standard_normal((self.batch_size, 4), np.float32)
        return torch.from_numpy(x), torch.from_numpy(3 * np.sin(x.sum(1, keepdims=True)))

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.mse_loss(model(batch[0]), batch[1])

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {"loss": self.loss(model, self.batch(0, 10**6, 0)).item()}

    def describe(self) -> dict[str, str]:
        return {"fingerprint": f"toy-{self.batch_size}"}
