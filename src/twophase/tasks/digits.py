"""The shipped task `digits`: a small convolutional classifier of scikit-learn's 1,797 images of handwritten digits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own custom
from numpy.typing import NDArray
from torch import Tensor, nn

from twophase.config import require
from twophase.errors import UsageError

_HELD_OUT = 5  # one image of so many


@cache
def _images() -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return the images (1797, 1, 8, 8), scaled to [0, 1], and their digits."""
    if (package := find_spec("sklearn")) is None:
        raise UsageError("--task digits needs scikit-learn; pip install 'twophase[digits]'")
    # The file that `load_digits` reads: to import scikit-learn for it would take every process two seconds.
    path = Path(str(package.origin)).with_name("datasets") / "data" / "digits.csv.gz"
    pixels, digits = np.hsplit(np.loadtxt(path, delimiter=","), [-1])
    return (pixels / 16).astype(np.float32).reshape(-1, 1, 8, 8), digits.astype(np.int64).reshape(-1)


@dataclass(frozen=True)
class Digits:
    """A small classifier of handwritten digits; each replica draws from all training images."""

    width: int = 16
    """Channels of the first convolution; the second has twice as many."""
    batch_size: int = 16
    """Images a replica and inner step."""

    def __post_init__(self) -> None:
        require(self.width >= 1, "task.width", self.width, "at least 1")
        require(self.batch_size >= 1, "task.batch_size", self.batch_size, "at least 1")

    def model(self, seed: int) -> nn.Module:
        """Return two convolutions and two linear layers."""
        torch.manual_seed(seed)
        width = self.width
        return nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1), nn.GELU(), nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1), nn.GELU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(8 * width, 4 * width), nn.GELU(), nn.Linear(4 * width, 10),
        )  # fmt: skip

    def batch(self, seed: int, step: int, replica: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Draw images (batch, 1, 8, 8) and their digits (batch,)."""
        images, digits = _images()
        training = np.flatnonzero(np.arange(len(digits)) % _HELD_OUT)
        drawn = np.random.default_rng((seed, step, replica)).choice(training, self.batch_size)
        return images[drawn], digits[drawn]

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Compute the mean cross-entropy in nats an image."""
        return F.cross_entropy(model(batch[0]), batch[1])

    def logits(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Compute the scores (batch, 10)."""
        return model(batch[0])

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Compute loss and accuracy on the held-out images."""
        device = next(model.parameters()).device
        images, digits = (torch.from_numpy(array[::_HELD_OUT].copy()).to(device) for array in _images())
        scores = model(images)
        hits = scores.argmax(1) == digits
        return {"loss": F.cross_entropy(scores, digits).item(), "accuracy": hits.float().mean().item()}
