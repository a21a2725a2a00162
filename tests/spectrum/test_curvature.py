"""Gauss-Newton and Hessian products, the largest eigenvalues and densities against dense matrices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call, jacrev
from torch.nn.attention import SDPBackend, sdpa_kernel

from twophase.spectrum.curvature import GaussNewton, Hessian
from twophase.tasks.lm.config import ModelConfig
from twophase.tasks.lm.model import Llama
from twophase.theory.eigenvalues import density, lanczos, largest_eigenpairs

Matrix = NDArray[np.float64]
BLOCKS = {
    "embedding": ["embedding"],
    "attention": ["blocks.0.query_key_value", "blocks.0.output"],
    "mlp": ["blocks.0.gate_up", "blocks.0.down"],
    "norms": ["norm", "blocks.0.attention_norm", "blocks.0.mlp_norm"],
    "head": ["head"],
}


@pytest.fixture(scope="module")
def model() -> Llama:
    config = ModelConfig(layers=1, hidden_size=8, intermediate_size=12, heads=2, kv_heads=1)
    model = Llama(config, 11, seed=3).double()
    with torch.no_grad():  # a drawn head is so small that the logits are nearly equal
        model.get_parameter("head").mul_(40)
    return model


@pytest.fixture(scope="module")
def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 11, shape, generator=generator) for shape in ((2, 5), (2, 5), (3, 4))]


@pytest.fixture(scope="module")
def scale(model: Llama) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        name: 0.1 + torch.rand(weight.shape, generator=generator, dtype=torch.float64)
        for name, weight in model.named_parameters()
    }


def dense(model: nn.Module, batches: list[Tensor], names: list[str], scale: dict[str, Tensor] | None) -> Matrix:
    """The same matrix from its definition, token by token."""
    block = {name: model.get_parameter(name).detach() for name in names}
    total: Tensor | None = None
    for tokens in batches:

        def logits(parameters: dict[str, Tensor], tokens: Tensor = tokens) -> Tensor:
            return functional_call(model, parameters, (tokens,))

        with sdpa_kernel(SDPBackend.MATH):  # the others have no rule for several directions at a time
            slopes = jacrev(logits)(block)
        z = logits(block).detach().flatten(0, 1)
        jacobian = torch.cat([slopes[name].flatten(0, 1).flatten(2) for name in names], 2)
        for row, p in zip(jacobian, z.softmax(-1), strict=True):
            share = row.T @ (torch.diag(p) - p[:, None] * p[None, :]) @ row
            total = share if total is None else total + share
    assert total is not None
    if scale is not None:
        factors = torch.cat([scale[name].flatten() for name in names])
        total = factors[:, None] * total * factors[None, :]
    return (total / sum(tokens.numel() for tokens in batches)).detach().numpy()


@pytest.mark.parametrize("preconditioned", [False, True], ids=["raw", "preconditioned"])
@pytest.mark.parametrize("name", BLOCKS)
def test_a_product_is_that_of_the_matrix(
    model: Llama, batches: list[Tensor], scale: dict[str, Tensor], name: str, preconditioned: bool
) -> None:
    """The operator is the positive Gauss-Newton matrix built from the Jacobian of each token."""
    factors = scale if preconditioned else None
    operator = GaussNewton(model, batches, BLOCKS[name], factors)
    matrix = dense(model, batches, BLOCKS[name], factors)
    size = np.abs(matrix).max()
    assert operator.size == len(matrix)
    for vector in np.random.default_rng(0).standard_normal((4, operator.size)):
        np.testing.assert_allclose(operator(vector), matrix @ vector, rtol=0, atol=1e-12 * size)
    assert np.linalg.eigvalsh(matrix)[0] > -1e-12 * size


def test_the_matrix_is_the_curvature_of_the_loss_in_the_head(model: Llama, batches: list[Tensor]) -> None:
    """In the head the logits are linear, so there the Gauss-Newton matrix is the Hessian of the cross-entropy."""
    head = model.get_parameter("head").detach()
    tokens = batches[0]
    targets = tokens.roll(1, 1)

    def loss(weight: Tensor) -> Tensor:
        logits = functional_call(model, {"head": weight}, (tokens,))
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    hessian = torch.autograd.functional.hessian(loss, head)
    assert isinstance(hessian, Tensor)
    wanted = hessian.reshape(head.numel(), head.numel()).numpy()
    operator = GaussNewton(model, [tokens], ["head"])
    vector = np.random.default_rng(1).standard_normal(operator.size)
    np.testing.assert_allclose(operator(vector), wanted @ vector, rtol=1e-10, atol=1e-13)


def test_graphs_are_kept_or_not(model: Llama, batches: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """A text that is too large for its graphs to be kept, or to go through the model at once, changes no product."""
    names = BLOCKS["attention"]
    operator = GaussNewton(model, batches, names)
    vector = np.random.default_rng(2).standard_normal(operator.size)
    wanted = operator(vector)
    monkeypatch.setattr("twophase.spectrum.curvature._CACHED_LOGITS", 1)
    monkeypatch.setattr("twophase.spectrum.curvature._PIECE", 1)
    anew = GaussNewton(model, batches, names)
    np.testing.assert_allclose(anew(vector), wanted, rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(anew(vector), wanted, rtol=1e-12, atol=1e-15)
    assert anew.products == 2
    assert all(weight.grad is None for weight in model.parameters())


def network() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    model.register_parameter("unused", nn.Parameter(torch.zeros(2, dtype=torch.float64)))
    return model


def examples(count: int, seed: int) -> dict[str, Any]:
    """A batch with sequences of five predictions, as a tree."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 5, 3, generator=generator, dtype=torch.float64)
    return {"x": x, "beside": (torch.randn(count, 1, generator=generator, dtype=torch.float64), [torch.arange(count)])}


def logits_of(model: nn.Module, batch: Any) -> Tensor:
    return model(batch["x"]) * batch["beside"][0][..., None]


@pytest.mark.parametrize("piece", [1, 30, 1 << 13], ids=["single", "some joined", "all joined"])
def test_any_tree_has_the_matrix_of_its_logits(monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    """Of classifications on trees of tensors the matrix is that of the Jacobians, the mean over all predictions."""
    monkeypatch.setattr("twophase.spectrum.curvature._PIECE", piece)
    model, batches = network(), [examples(count, seed) for seed, count in enumerate((1, 1, 4))]
    names = [name for name, _ in model.named_parameters()]
    block = {name: weight.detach() for name, weight in model.named_parameters()}
    scale = {name: 0.5 + torch.rand_like(weight) for name, weight in block.items()}
    total = torch.zeros(1, dtype=torch.float64)
    for batch in batches:

        def logits(parameters: dict[str, Tensor], batch: Any = batch) -> Tensor:
            return functional_call(model, parameters, (batch["x"],)) * batch["beside"][0][..., None]

        slopes = jacrev(logits)(block)
        jacobian = torch.cat([slopes[name].flatten(0, 1).flatten(2) for name in names], 2)
        for row, p in zip(jacobian, logits(block).flatten(0, 1).softmax(-1), strict=True):
            total = total + row.T @ (torch.diag(p) - p[:, None] * p[None, :]) @ row / 30
    factors = torch.cat([scale[name].flatten() for name in names])
    wanted = (factors[:, None] * total * factors[None, :]).numpy()
    operator = GaussNewton(model, batches, names, scale, logits_of)
    columns = np.stack([operator(column) for column in np.eye(operator.size)])
    np.testing.assert_allclose(columns, wanted, rtol=0, atol=1e-14)


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    noise = 0.1 * torch.randn(3, dtype=torch.float64)  # as a diffusion model's, drawn anew in each loss
    return ((model(batch["x"]) - batch["x"].sin() + noise) ** 2).mean()


def test_a_loss_without_logits_has_its_hessian() -> None:
    """The operator is the Hessian of the mean of the batches' losses, negative eigenvalues and unused ones included."""
    model, batches = network(), [examples(count, seed) for seed, count in enumerate((2, 3))]
    names = [name for name, _ in model.named_parameters()]
    shapes = [weight.shape for _, weight in model.named_parameters()]

    def loss(flat: Tensor) -> Tensor:
        parts = flat.split([shape.numel() for shape in shapes])
        parameters = {name: part.view(shape) for name, part, shape in zip(names, parts, shapes, strict=True)}
        total = torch.zeros((), dtype=torch.float64)
        for number, batch in enumerate(batches):
            torch.manual_seed(number)
            noise = 0.1 * torch.randn(3, dtype=torch.float64)
            output = functional_call(model, parameters, (batch["x"],))
            total = total + ((output - batch["x"].sin() + noise) ** 2).mean() / 2
        return total

    flat = torch.cat([weight.detach().flatten() for weight in model.parameters()])
    hessian = torch.autograd.functional.hessian(loss, flat)
    assert isinstance(hessian, Tensor)
    before = torch.get_rng_state()
    operator = Hessian(model, batches, names, None, loss_of)
    columns = np.stack([operator(column) for column in np.eye(operator.size)])
    np.testing.assert_allclose(columns, hessian.numpy(), rtol=0, atol=1e-13)
    assert np.linalg.eigvalsh(columns)[0] < -1e-3  # or the test would show little
    assert torch.equal(torch.get_rng_state(), before)
    block = [name for name in names if name.startswith("2.")]
    places = np.concatenate([np.full(shape.numel(), name in block) for name, shape in zip(names, shapes, strict=True)])
    scale = {name: torch.full_like(model.get_parameter(name), 2.0) for name in block}
    part = Hessian(model, batches, block, scale, loss_of)
    columns = np.stack([part(column) for column in np.eye(part.size)])
    np.testing.assert_allclose(columns, 4 * hessian.numpy()[np.ix_(places, places)], rtol=0, atol=1e-13)


def test_negative_eigenvalues_are_returned_where_they_may_be() -> None:
    """Without a floor the density of an indefinite matrix has its trace; with one of 0, only the positive part's."""
    matrix, values = spectrum_of(90, 90, 3)
    values = values * np.where(np.arange(90) % 3, 1, -0.1)
    basis = np.linalg.eigh(matrix)[1]
    matrix = basis @ np.diag(values) @ basis.T
    pairs = largest_eigenpairs(lambda v: matrix @ v, 90, 10, floor=-np.inf)
    nodes, weights = density(lambda v: matrix @ v, 90, steps=90, probes=1, largest=pairs, floor=-np.inf)
    assert nodes[0] == pytest.approx(values.min(), rel=1e-6)
    assert nodes @ weights == pytest.approx(values.mean(), rel=0.05)
    assert density(lambda v: matrix @ v, 90, steps=90, probes=1)[0][0] == 0


def spectrum_of(size: int, rank: int, seed: int) -> tuple[Matrix, Matrix]:
    """A random matrix with eigenvalues over several decades and zeros, and these eigenvalues, ascending."""
    rng = np.random.default_rng(seed)
    values = np.zeros(size)
    values[size - rank :] = np.sort(10.0 ** rng.uniform(-4, 2, rank))
    basis = np.linalg.qr(rng.standard_normal((size, size)))[0]
    return basis @ np.diag(values) @ basis.T, values


@settings(max_examples=20, deadline=None)
@given(size=st.integers(65, 120), rank=st.integers(1, 60), seed=st.integers(0, 1000), count=st.integers(1, 5))
def test_the_largest_eigenvalues_are_found(size: int, rank: int, seed: int, count: int) -> None:
    """They are those of the dense matrix to the accuracy that is promised, zeros included."""
    matrix, values = spectrum_of(size, rank, seed)
    largest, vectors = largest_eigenpairs(lambda v: matrix @ v, size, count)
    np.testing.assert_allclose(largest, values[::-1][:count], rtol=2e-3, atol=1e-9 * values[-1])
    np.testing.assert_allclose(vectors.T @ vectors, np.eye(count), atol=1e-9)


def test_nothing_has_no_curvature() -> None:
    """A matrix of zeros has a density at zero and eigenvalues of zero, and stops nothing."""
    nodes, _ = density(lambda v: 0 * v, 100, steps=5, probes=2)
    assert nodes.tolist() == [0, 0]
    assert largest_eigenpairs(lambda v: 0 * v, 100, 3)[0].tolist() == [0, 0, 0]
    assert largest_eigenpairs(lambda v: 0 * v, 2, 3)[0].tolist() == [0, 0]


def test_lanczos_in_full_length_has_the_eigenvalues() -> None:
    """With as many steps as there are coordinates the tridiagonal matrix has the eigenvalues, each once."""
    matrix, values = spectrum_of(70, 70, 5)
    diagonal, beside = lanczos(lambda v: matrix @ v, np.ones(70), 200)
    assert (len(diagonal), len(beside)) == (70, 69)
    eigenvalues = np.linalg.eigvalsh(np.diag(diagonal) + np.diag(beside, 1) + np.diag(beside, -1))
    np.testing.assert_allclose(eigenvalues, values, atol=1e-10 * values[-1])


def test_a_density_has_the_moments_of_its_probes() -> None:
    """Quadrature by m steps has the powers up to 2 m - 1 exactly: `z^T A^k z / z^T z`, mean over the probes."""
    matrix, _ = spectrum_of(90, 50, 7)
    matrix /= np.linalg.norm(matrix, 2)
    nodes, weights = density(lambda v: matrix @ v, 90, steps=6, probes=3, seed=4)
    generator = np.random.default_rng(4)
    probes = [generator.choice([-1.0, 1.0], 90) for _ in range(3)]
    assert weights.sum() == pytest.approx(1)
    for power in range(12):
        wanted = np.mean([z @ np.linalg.matrix_power(matrix, power) @ z / 90 for z in probes])
        assert nodes**power @ weights == pytest.approx(wanted, rel=1e-9)


def test_largest_eigenvalues_are_counted_as_they_are() -> None:
    """With the largest ones apart the trace of one probe is far closer than without, and theirs is exact."""
    matrix, values = spectrum_of(400, 60, 8)
    largest = largest_eigenpairs(lambda v: matrix @ v, 400, 10)
    errors: dict[bool, list[float]] = {False: [], True: []}
    for seed in range(10):
        for apart, shares in errors.items():
            pairs = largest if apart else None
            nodes, weights = density(lambda v: matrix @ v, 400, steps=40, probes=1, largest=pairs, seed=seed)
            assert weights.sum() == pytest.approx(1)
            shares.append(nodes @ weights / values.mean() - 1)
            if apart:
                np.testing.assert_allclose(nodes[-10:], values[-10:], rtol=2e-3)
                assert weights[-10:] == pytest.approx(1 / 400)
    assert np.std(errors[True]) < 0.3 * np.std(errors[False])
    assert np.std(errors[True]) < 0.05


def test_a_small_matrix_is_taken_apart_exactly() -> None:
    """Up to 64 coordinates the density is the eigenvalues, each with the same weight."""
    matrix, values = spectrum_of(40, 30, 9)
    nodes, weights = density(lambda v: matrix @ v, 40, steps=2, probes=1)
    np.testing.assert_allclose(nodes, values, atol=1e-10 * values[-1])
    assert set(weights) == {1 / 40}


def test_large_blocks_keep_fewer_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where memory is short a density has 8 steps, and the largest eigenvalues are those they are."""
    matrix, values = spectrum_of(100, 80, 8)
    monkeypatch.setattr("twophase.theory.eigenvalues._ROOM", 100)
    nodes, _ = density(lambda v: matrix @ v, 100, steps=50, probes=1)
    assert len(nodes) == 8
    largest, _ = largest_eigenpairs(lambda v: matrix @ v, 100, 3)
    np.testing.assert_allclose(largest, values[::-1][:3], rtol=2e-3)
