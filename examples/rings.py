"""A task of one's own: a small network tells two rings of points apart. See docs/tasks.md."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn


@dataclass(frozen=True)
class Rings:
    """Two rings of points in the plane."""

    width: int = 8
    """Hidden units."""
    noise: float = 0.2
    """Standard deviation of the radius."""

    def points(self, key, count):
        """Draw points and the rings that they belong to."""
        draw = np.random.default_rng(key)
        label = draw.integers(0, 2, count)
        angle = draw.uniform(0, 2 * np.pi, count)
        radius = 1 + label + self.noise * draw.standard_normal(count)
        return np.float32(np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1)), label

    def model(self, seed):
        """Return a fresh model, the same for the same seed."""
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(2, self.width), nn.GELU(), nn.Dropout(0.1), nn.Linear(self.width, 2))

    def batch(self, seed, step, replica):
        """Return a replica's batch, a pure function of the three numbers."""
        return self.points((seed, step, replica), 16)

    def loss(self, model, batch):
        """Return the mean loss."""
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    def evaluate(self, model):
        """Return held-out numbers; loss must be among them."""
        points, label = map(torch.from_numpy, self.points((1, 2, 3, 4), 128))
        scores = model(points)
        loss = nn.functional.cross_entropy(scores, label)
        return {"loss": loss.item(), "accuracy": (scores.argmax(1) == label).float().mean().item()}
