"""Replicas of a small network whose inner steps cost nothing, for tests of the engine's rounds."""

from __future__ import annotations

import io
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from twophase.diloco.engine import DiLoCo
from twophase.diloco.report import RoundReport

NAMES = ["0.weight", "0.bias", "2.weight", "2.bias", "3.weight", "3.bias"]


def network(seed: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Parameters of 32, 8, 8, 8, 24 and 3 elements: the last leaves most of its sixteen empty."""
    torch.default_generator.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 3)).to(dtype)


@cache
def noise(name: str, shape: torch.Size, dtype: torch.dtype, step: int, replica: int) -> Tensor:
    """What an inner step adds to a parameter, drawn once however many runs take the step."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {step} {replica}".encode()))
    size = 1.0 if name == NAMES[0] else 0.1
    return (size * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype)


@torch.no_grad()
def drift(model: nn.Module, step: int, replica: int) -> None:
    """An inner step: theta <- 0.9 theta + noise, of which each element knows the step, the replica and its name only.

    It forgets nothing of where theta was, so whatever was restored wrongly shows; each parameter moves by itself, and
    the first one far more than the others.
    """
    names, params = zip(*model.named_parameters(), strict=True)
    torch._foreach_mul_(params, 0.9)
    torch._foreach_add_(params, [noise(n, p.shape, p.dtype, step, replica) for n, p in zip(names, params, strict=True)])


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal in shape, dtype and every bit."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.dtype.itemsize]
    return torch.equal(a.detach().contiguous().view(integer), b.detach().contiguous().view(integer))


@dataclass
class Run:
    """Replicas of a run that live in this process, and their engine."""

    engine: DiLoCo
    models: list[nn.Module]
    replicas: Sequence[int]

    def step(self, step: int) -> RoundReport | None:
        """One inner step of every replica, and the engine's."""
        for replica, model in zip(self.replicas, self.models, strict=True):
            drift(model, step, replica)
        return self.engine.step()

    def go(self, steps: Iterable[int]) -> list[RoundReport]:
        """Inner steps, and the reports of the syncs that end in them."""
        return [report for report in map(self.step, steps) if report is not None]

    def tensors(self) -> dict[str, Tensor]:
        """Anchor, models and momentum buffers, live, by name."""
        tensors = {f"anchor {name}": a for name, a in self.engine.anchor.items()}
        for number, model in enumerate(self.models):
            tensors |= {f"model {number} {name}": p.detach() for name, p in model.named_parameters()}
        for fragment in self.engine.fragments:
            for name, a in fragment.named:
                for key, value in fragment.outer.state.get(a, {}).items():
                    tensors[f"{key} {name}"] = value
        return tensors

    def state(self) -> dict[str, Any]:
        """All that a resumed run needs, in the order in which one would ask for it."""
        return {
            "engine": self.engine.state_dict(),
            "wire": self.engine.wire_state_dict(),
            "models": [model.state_dict() for model in self.models],
        }

    def load(self, state: dict[str, Any]) -> None:
        """Continue from a state."""
        self.engine.load_state_dict(state["engine"])
        self.engine.load_wire_state_dict(state["wire"])
        for model, weights in zip(self.models, state["models"], strict=True):
            model.load_state_dict(weights)


def start(outer: Any, replicas: Sequence[int] = (0, 1), *, inner_steps: int = 6, seed: int = 0, **options: Any) -> Run:
    """A run whose replicas begin differently, except replica 0 of seed 0, which all must take over."""
    models = [network(seed + replica) for replica in replicas]
    return Run(DiLoCo(models, outer, inner_steps=inner_steps, **options), models, replicas)


def unlike(first: dict[str, Tensor], second: dict[str, Tensor]) -> list[str]:
    """Names of the tensors that are not the same bits in both."""
    return [name for name in {**first, **second} if name not in first or name not in second
            or not same_bits(first[name], second[name])]  # fmt: skip


def of_one_process(tensors: dict[str, Tensor], rank: int) -> dict[str, Tensor]:
    """Of a run of two replicas in one process, what a process with one of them holds."""
    return {key.replace(f"model {rank}", "model 0"): t for key, t in tensors.items() if f"l {1 - rank}" not in key}


def through_file(state: Any) -> Any:
    """What `torch.save` writes and `torch.load(weights_only=True)` reads."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)
