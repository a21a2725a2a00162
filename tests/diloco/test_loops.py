"""Mistakes of a training loop that raise no error by themselves: each is named, or made harmless."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from diloco.scenarios import AVERAGING
from twophase.diloco.engine import DiLoCo


def buffered(**buffers: Tensor) -> nn.Module:
    """A module with buffers."""
    module = nn.Linear(4, 3)
    for name, buffer in buffers.items():
        module.register_buffer(name, buffer)
    return module


# ------------------------------------------------------------- an inner optimizer that holds copies of the parameters


# ----------------------------------------------------------------------------------- schedule-free of its own package


# --------------------------------------------------------------------------- weights loaded after the engine was made


# ------------------------------------------------------------------- a resume without the model or without the engine


# --------------------------------------------------------------------------------- one rank's checkpoint on all ranks


# ----------------------------------------------------------------------------------- torchrun without a process group


# -------------------------------------------------------------------------------------------- ranks that end unevenly


# -------------------------------------------------------------------------------------- ranks that count unlike steps


# ------------------------------------------------------------------------------------------ step() once a micro-batch


# --------------------------------------------------------------------------------------- a replica that is not finite


# ----------------------------------------------------------- best weights restored inside a round; anchored() misused


# --------------------------------------------------------------------------------- buffers that differ from the start


def test_random_features_and_masks_are_the_first_replicas() -> None:
    """Buffers of every type and layout, as in DDP."""

    def build(seed: int) -> nn.Module:
        draw = torch.Generator().manual_seed(seed)
        features, phases = torch.randn(3, 3, generator=draw), torch.randn(2, 2, generator=draw)
        kinds = {"count": torch.tensor(seed), "mask": features > 0, "phases": torch.view_as_complex(phases)}
        kinds |= {"expanded": features[:, :1].expand(3, 3), "adjacency": (features + 9).to_sparse()}
        return buffered(features=features, empty=torch.zeros(0), **kinds)

    modules, expected = [build(seed) for seed in range(3)], build(0)
    DiLoCo(modules, AVERAGING, inner_steps=1)
    for module in modules:
        for name, buffer in module.named_buffers():
            assert torch.equal(buffer.to_dense(), expected.get_buffer(name).to_dense()), name


# ----------------------------------------------------------------------------- averages of buffers that no mean suits


@pytest.mark.parametrize("norm", [nn.utils.spectral_norm, parametrizations.spectral_norm])
def test_unit_vectors_stay_unit_vectors(norm: Callable[[nn.Module], nn.Module]) -> None:
    """The directions of a spectral norm are the same in all replicas, and of length 1."""
    modules = [norm(nn.Linear(4, 3)) for _ in range(3)]
    engine = DiLoCo(modules, AVERAGING, inner_steps=1, buffers="mean")
    for number, module in enumerate(modules):
        for buffer in module.buffers():
            buffer.copy_(nn.functional.normalize(buffer + number * torch.arange(len(buffer)), dim=0))
    engine.step()
    for first, *others in zip(*(module.buffers() for module in modules), strict=True):
        assert first.norm().item() == pytest.approx(1, abs=1e-6)
        assert all(torch.equal(first, other) for other in others)


def test_constants_do_not_move() -> None:
    """A float64 mean of equal values is not always that value, and its sum may overflow."""
    constants = torch.tensor([0.1, 1 / 3, 1.7e308, -math.inf, -0.0], dtype=torch.float64)
    modules = [buffered(constants=constants.clone()) for _ in range(7)]
    DiLoCo(modules, AVERAGING, inner_steps=1, buffers="mean").step()
    assert all(torch.equal(module.get_buffer("constants"), constants) for module in modules)


def test_buffers_of_any_layout_are_averaged() -> None:
    """Sparse, expanded, overlapping and complex ones; one that has grown in a replica stays its own."""
    modules = []
    for _ in range(2):
        whole = torch.ones(4)
        modules.append(buffered(sparse=torch.eye(2).to_sparse(), wide=torch.ones(1).expand(3), whole=whole))
        modules[-1].register_buffer("part", whole[:2])
        modules[-1].register_buffer("windows", whole.unfold(0, 2, 1))
        modules[-1].register_buffer("phases", torch.ones(2, dtype=torch.cfloat))
        modules[-1].register_buffer("cache", torch.zeros(1))
    engine = DiLoCo(modules, AVERAGING, inner_steps=1, buffers="mean")
    assert engine.check() == ()
    for number, module in enumerate(modules):
        wide, sparse = module.get_buffer("wide"), module.get_buffer("sparse")
        for values in (wide[:1], sparse._values(), module.get_buffer("whole"), module.get_buffer("phases")):
            values.mul_(1 + number)
        module.register_buffer("cache", torch.full((1 + number,), float(number)))
    engine.step()
    for number, module in enumerate(modules):
        for name, buffer in module.named_buffers():
            values = buffer._values() if buffer.is_sparse else buffer
            assert torch.equal(values, torch.full_like(values, number if name == "cache" else 1.5)), name


# --------------------------------------------------------------------------------------------- 16-bit optimizer state


# -------------------------------------------------------------------------------------- two engines where one belongs


# -------------------------------------- parameters that were resized; copies of the engine; another optimizer's state


# -------------------------------------------------------------------------------------- frozen parameters that change


# --------------------------------------------------------------------------------------------------- compiled modules


# --------------------------------------------------------------------------------------------------- unequal replicas
