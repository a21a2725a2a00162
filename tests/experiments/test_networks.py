"""Networks beside their linear models, and the curvature of trained models, against dense matrices."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call

import blocks
import digits
import linear_network
import textmaker
import trained
from curvature import GaussNewton, Hessian
from digits import HEAVY_BALL, USUAL, Inner, Linearised, Network
from eigenvalues import density, lanczos, largest_eigenpairs
from extras import need
from restored import restore
from twophase.theory.modes import transition

need("sklearn", "the extra digits is not installed")


@pytest.fixture(scope="module")
def data() -> digits.Data:
    return digits.load_data((4, 9), 12)


@pytest.mark.slow
def test_the_theory_holds_as_far_as_the_network_is_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cycles of the linear model are `[T^K]_11` to 1e-8; departures fall with the width; halves have own modes."""
    small = replace(digits.QUICK, images=20, inner_steps=4, rounds=12, shard_inner_steps=(1, 4))
    monkeypatch.setattr(digits, "QUICK", small)
    result = linear_network.table(quick=True)
    assert result.numbers["linear"]["residual_deviation"] < 1e-12
    modes = [row for row in result.rows if row["part"] == "linear" and row["rule"] == USUAL.describe()]
    modes = [row for row in modes if row["restart"] == "3"]
    matrices = transition(USUAL, [row["sigma"] for row in modes])
    expected = np.linalg.matrix_power(matrices, 3)[:, 0, 0]
    np.testing.assert_allclose([row["contraction"] for row in modes], expected, rtol=0, atol=1e-8)
    for run in result.numbers["network"]["runs"]:
        assert run["departure"]["exponent"] < -2 * run["departure"]["standard_error"]
    for row in result.rows:
        if row["part"] == "shards":
            assert (row["departure"] < 1e-12) == (row["inner_steps"] == 1)
            assert row["departure_exact"] < 1e-12


def test_what_is_wrong_shows(data: digits.Data) -> None:
    """A sigma off by 1 %, another period or rule is 1e-3 and more away from a trained linear model."""
    model = Linearised.of(Network(16, 0, data))
    inner = Inner(0.4 / digits.largest_eigenvalue(model), 5)
    modes = digits.modes_of(model, inner)
    path = digits.train(model, HEAVY_BALL, "3", 12, inner, model.some(slice(None)))
    assert digits.deviations(path, modes, HEAVY_BALL, "3", 3)[0] < 1e-12
    for wrong, rule, period in (
        (replace(modes, sigma=0.99 * modes.sigma), HEAVY_BALL, 3),
        (modes, HEAVY_BALL, 4),
        (modes, USUAL, 3),
    ):
        assert digits.deviations(path, wrong, rule, str(period), period)[0] > 1e-3


# ---------------------------------------------------------------------------------------------------------- curvature


def made_up(size: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """A random matrix with eigenvalues over several decades and zeros, and these eigenvalues, ascending."""
    stream = np.random.default_rng(seed)
    values = np.sort(10 ** stream.uniform(-6, 2, size) * (np.arange(size) >= size // 4))
    basis = np.linalg.qr(stream.standard_normal((size, size)))[0]
    return basis * values @ basis.T, values


@pytest.mark.parametrize("size", [10, 64, 150])
def test_eigenvalues_are_those_of_the_dense_matrix(size: int) -> None:
    """Lanczos in full length, the largest eigenvalues, and the mean of a density."""
    matrix, values = made_up(size, 1)
    largest, vectors = largest_eigenpairs(lambda v: matrix @ v, size, 3)
    np.testing.assert_allclose(largest, values[::-1][:3], rtol=1e-2)
    np.testing.assert_allclose(matrix @ vectors[:, 0], values[-1] * vectors[:, 0], atol=2e-2 * values[-1])
    nodes, weights = density(lambda v: matrix @ v, size, steps=size, probes=4, largest=(largest, vectors))
    assert weights.sum() == pytest.approx(1)
    assert nodes @ weights == pytest.approx(values.mean(), rel=0.2)
    small, exact = made_up(12, 2)
    diagonal, beside = lanczos(lambda v: small @ v, np.random.default_rng(0).standard_normal(12), 12)
    found = np.linalg.eigvalsh(np.diag(diagonal) + np.diag(beside, 1) + np.diag(beside, -1))
    np.testing.assert_allclose(found[-6:], exact[-6:], rtol=1e-6)


def test_products_are_those_of_dense_matrices() -> None:
    """Gauss-Newton and Hessian of a block of a small classifier, from its Jacobian and by autograd."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    batches = [torch.randn(6, 4, dtype=torch.float64) for _ in range(2)]
    names, classes = ["0.weight", "2.weight"], torch.tensor([0, 1, 2, 0, 1, 2])
    fixed = {name: weight.detach() for name, weight in model.named_parameters()}
    flat = torch.cat([fixed[name].reshape(-1) for name in names])

    def logits(theta: torch.Tensor) -> torch.Tensor:
        parts = theta.split([fixed[name].numel() for name in names])
        moved = fixed | {name: part.view_as(fixed[name]) for name, part in zip(names, parts, strict=True)}
        return functional_call(model, moved, (torch.cat(batches),))

    slopes = torch.autograd.functional.jacobian(logits, flat)  # (12, 3, parameters)
    p = logits(flat).softmax(-1)
    middle = torch.diag_embed(p) - p[:, :, None] * p[:, None]
    wanted = torch.einsum("nap,nab,nbq->pq", slopes, middle, slopes) / 12
    product = GaussNewton(model, batches, names)
    dense = np.stack([product(column) for column in np.eye(product.size)])
    np.testing.assert_allclose(dense, wanted.numpy(), atol=1e-12)

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch), classes)

    whole = torch.autograd.functional.hessian(
        lambda theta: nn.functional.cross_entropy(logits(theta), classes.repeat(2)), flat
    )
    product = Hessian(model, batches, names, None, loss)
    dense = np.stack([product(column) for column in np.eye(product.size)])
    assert isinstance(whole, torch.Tensor)
    np.testing.assert_allclose(dense, whole.numpy(), atol=1e-12)


@pytest.mark.slow
def test_a_run_is_read_and_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run read back has the weights that were evaluated, and every parameter is in one block of its measurement."""
    monkeypatch.setattr(blocks, "STEPS", 8)
    monkeypatch.setattr(blocks, "PROBES", 1)
    run = tmp_path / "run"
    trained.run(textmaker.small_run(textmaker.write(tmp_path / "text.txt"), steps=4, inner_steps=2), run)
    restored = restore(run)
    measured = blocks.measure(restored, blocks.patterns_of(restored), restored.batches(1))
    assert sum(block["parameters"] for block in measured) == sum(p.numel() for p in restored.model.parameters())
    assert all(0 <= facts["mean"] <= 1 for block in measured for facts in block["progress"].values())
