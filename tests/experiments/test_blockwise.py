"""The curvature of trained models against dense matrices, and the blockwise experiment at its smallest."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call

import textmaker
import trained

sys.path.append(str(Path(__file__).parents[2] / "experiments" / "blockwise"))

from curvature import density, gauss_newton
from spectrum import LLAMA, measure, restore
from twophase.rule import OuterRule


def made_up(size: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """A random matrix with eigenvalues over several decades and zeros, and these eigenvalues, ascending."""
    stream = np.random.default_rng(seed)
    values = np.sort(10 ** stream.uniform(-6, 2, size) * (np.arange(size) >= size // 4))
    basis = np.linalg.qr(stream.standard_normal((size, size)))[0]
    return basis * values @ basis.T, values


@pytest.mark.parametrize("size", [10, 64, 150])
def test_a_density_is_that_of_the_dense_matrix(size: int) -> None:
    """Its largest node is the largest eigenvalue, its shares sum to 1, and its mean is that of the eigenvalues."""
    matrix, values = made_up(size, 1)
    nodes, shares = density(lambda v: matrix @ v, size, steps=size, probes=4)
    assert nodes[-1] == pytest.approx(values[-1], rel=1e-2)
    assert shares.sum() == pytest.approx(1)
    assert nodes @ shares == pytest.approx(values.mean(), rel=0.2)


def test_products_are_those_of_dense_matrices() -> None:
    """The Gauss-Newton matrix of a block of a small classifier, from its Jacobian."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    batches = [torch.randn(6, 4, dtype=torch.float64) for _ in range(2)]
    names = ["0.weight", "2.weight"]
    fixed = {name: weight.detach() for name, weight in model.named_parameters()}
    flat = torch.cat([fixed[name].reshape(-1) for name in names])
    scale = torch.rand(len(flat), dtype=torch.float64)

    def logits(theta: torch.Tensor) -> torch.Tensor:
        parts = theta.split([fixed[name].numel() for name in names])
        moved = fixed | {name: part.view_as(fixed[name]) for name, part in zip(names, parts, strict=True)}
        return functional_call(model, moved, (torch.cat(batches),))

    slopes = torch.autograd.functional.jacobian(logits, flat)  # (12, 3, parameters)
    p = logits(flat).softmax(-1)
    middle = torch.diag_embed(p) - p[:, :, None] * p[:, None]
    wanted = torch.einsum("nap,nab,nbq->pq", slopes, middle, slopes) / 12
    product = gauss_newton(model, batches, names, lambda model, batch: model(batch), scale)
    dense = np.stack([product(column) for column in np.eye(len(flat))])
    np.testing.assert_allclose(dense, (scale[:, None] * wanted * scale).numpy(), atol=1e-12)


@pytest.mark.slow
def test_a_run_is_read_and_measured(tmp_path: Path) -> None:
    """Every parameter of a run read back is in one block, with progress in [0, 1] and a period within the run."""
    run = tmp_path / "run"
    trained.run(textmaker.small_run(textmaker.write(tmp_path / "text.txt"), steps=4, inner_steps=2), run)
    restored = restore(run)
    blocks = measure(restored, LLAMA, batches=1)
    assert sum(block.parameters for block in blocks) == sum(p.numel() for p in restored.model.parameters())
    rule = OuterRule(0.7, 0.9, nesterov=True)
    for block in blocks:
        assert 0 <= block.mean <= 1
        assert 1 <= block.period(rule, 8) <= 8
        assert block.log_loss(rule, 8, block.period(rule, 8)) <= block.log_loss(rule, 8, 8) + 1e-12
