"""Filters of the pseudo-gradient: equal to slow twins from the papers' equations, and to `none` in their limits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from outers import buffers, flat, give, parameters, randoms, run
from policies import each_rule
from reference_outer import ReferenceOuter
from replicas import same_bits, through_file
from twophase.diloco.engine import DiLoCo
from twophase.optim.filters import Context, filtered
from twophase.optim.methods import orthogonalized
from twophase.optim.optimizer import OuterOptimizer
from twophase.restart import parse as parse_policy
from twophase.rule import OuterRule
from twophase.shelf.base import Filter
from twophase.shelf.filters import Clip, Orthogonal
from twophase.shelf.outer import outer
from twophase.shelf.text import parse, registered

SHAPES = [(7,), (3, 5), (2, 3, 4), (6, 2)]

Twin = Callable[[list[Tensor]], list[Tensor]]
each_restart = pytest.mark.parametrize("restart", ["never", "3", "soft:4:0.3:0.1"])


# --- slow twins: lists of numbers, an equation a line -----------------------------------------------------------------


def clipped(gradients: list[Tensor]) -> list[Tensor]:
    """The clip of torch.nn.utils, which the norm of all of them decides."""
    length = math.sqrt(sum(v * v for g in gradients for v in g.flatten().tolist()))
    return [g * min(1.0, 15.0 / length) for g in gradients]


def orthogonals(gradients: list[Tensor]) -> list[Tensor]:
    """Muon's iteration on each matrix, scaled to its Frobenius norm."""
    results = []
    for g in gradients:
        matrix = g.reshape(g.shape[0], -1)
        new = orthogonalized(matrix, 5).double()
        ratio = math.sqrt(sum(v * v for v in matrix.flatten().tolist()) / sum(v * v for v in new.flatten().tolist()))
        results.append(g if g.ndim < 2 else (new * ratio).view(g.shape))
    return results


TWINS: dict[str, Twin] = {
    "clip:norm=15": clipped,
    "orthogonal": orthogonals,
}


@each_rule
@each_restart
@pytest.mark.parametrize("text", TWINS)
def test_equals_its_slow_twin(text: str, restart: str, rule: OuterRule):
    """Over 24 rounds parameters and momentum are the twin's, with gradients that turn against the momentum at times."""
    params = parameters(0, SHAPES)
    twins = [ReferenceOuter(p.reshape(-1), rule, parse_policy(restart)) for p in params]
    optimizer = OuterOptimizer(params, outer(rule, filter=text), restart)
    for number in range(24):
        gradients = [
            g * (1 - 3 * (number % 7 == 5)) + 0.3 * math.cos(number) for g in randoms(1000 + number % 5, SHAPES)
        ]
        give(params, gradients)
        optimizer.step()
        seen = TWINS[text](gradients)
        for twin, g in zip(twins, seen, strict=True):
            twin.round(g.reshape(-1))
        torch.testing.assert_close(flat(params), flat([twin.x for twin in twins]), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(flat(buffers(optimizer)), flat([twin.m for twin in twins]), rtol=1e-12, atol=1e-12)
        assert same_bits(flat([p.grad for p in params]), flat(gradients))  # the caller's are only read


@pytest.mark.parametrize("shape", [(6, 9), (9, 6), (4, 4), (3, 2, 5)])
def test_orthogonal_makes_the_singular_values_alike(shape: tuple[int, ...]):
    """Against an SVD: the left and right vectors of g, values within 40 % of their root mean square, and g's norm."""
    (g,) = randoms(3, [shape])
    (new,) = filtered(Orthogonal(), [g], Context())
    matrix = g.reshape(shape[0], -1)
    u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
    turned = u.T @ new.reshape(matrix.shape) @ vh.T
    values, level = torch.diagonal(turned), float(g.norm()) / math.sqrt(min(matrix.shape))
    assert float(new.norm()) == pytest.approx(float(g.norm()), rel=1e-12)
    assert (turned - values.diag()).abs().max() < 0.05 * level
    assert bool(((values > 0.6 * level) & (values < 1.4 * level)).all()), values / level


# --- limits and reports -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["nesterov", "adamw"])
@pytest.mark.parametrize("text", ["clip:norm=1e9", "orthogonal:steps=1"])
def test_limits_are_no_filter(text: str, method: str):
    """A bound that nothing reaches, and vectors: the bits of `none`."""
    shapes = [(7,), (1,), (7,)] if text.startswith("orthogonal") else SHAPES
    ends = []
    for name in ("none", text):
        params = parameters(0, shapes, torch.float32)
        if text.startswith("orthogonal"):  # which needs a matrix, and leaves the others
            params.append(torch.nn.Parameter(torch.ones(1, 1)))
        value = outer(method, lr=0.1, momentum=0.9, filter=name)
        run(OuterOptimizer(params, value, "4"), range(12), measure=True)
        ends.append(params[:3])
    assert all(map(same_bits, *ends))


@pytest.mark.parametrize("text", registered("filter"))
def test_reports_are_of_the_filtered(text: str):
    """Norm, cosine and gain in the report are of g as the method sees it, and gain is measured along that g."""
    params = parameters(0, SHAPES)
    optimizer = OuterOptimizer(params, outer("heavy-ball", lr=0.3, momentum=0.9, filter=text))
    for number in range(3):
        gradients = randoms(40 - number, SHAPES)
        buffers = [optimizer.state.get(p, {}).get("momentum_buffer") for p in params]
        buffers = [None if m is None else m.clone() for m in buffers]
        g = flat(filtered(parse("filter", text), gradients, Context()))
        give(params, gradients)
        before = flat(params)
        optimizer.step(measure=True)
        (report,) = optimizer.last_round
        assert report.pseudo_gradient_norm == pytest.approx(float(g.norm()), rel=1e-12)
        assert report.gain == pytest.approx(float((before - flat(params)) @ g / (g @ g)), rel=1e-9)
        m = flat([torch.zeros_like(p) if b is None else b for p, b in zip(params, buffers, strict=True)])
        scale = float(g.norm() * m.norm())
        assert report.cosine == pytest.approx(float(g @ m) / scale if scale else 0.0, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("filters", [("clip:norm=0.1", "clip:norm=3"), ("orthogonal", "none")])
def test_groups_filter_by_themselves_and_resume(filters: Sequence[str]):
    """A filter for each group, set down and taken up after every round, has the bits of an uninterrupted run."""

    def built(seed: int) -> tuple[list[Tensor], OuterOptimizer]:
        params = parameters(seed, SHAPES)
        groups = [{"params": params[::2], "filter": filters[0]}, {"params": params[1::2], "filter": filters[1]}]
        return params, OuterOptimizer(groups, outer("nesterov", lr=0.2, momentum=0.9), "5")

    params, optimizer = built(0)
    run(optimizer, range(8))
    others, other = built(0)
    for number in range(8):
        run(other, range(number, number + 1))
        state = through_file(other.state_dict())
        values = [p.detach().clone() for p in others]
        others, other = built(9)
        other.load_state_dict(state)
        for p, value in zip(others, values, strict=True):
            p.data.copy_(value)
    assert all(map(same_bits, params, others))


@pytest.mark.parametrize("fragments", [1, 2, 4, {"vectors": "[13]", "rest": "."}])
def test_orthogonal_leaves_vectors_in_groups_and_fragments_of_their_own(fragments: Any):
    """Where vectors stand alone, each round has the bits of one that takes them beside the matrices."""
    params, others = parameters(0, SHAPES), parameters(0, SHAPES)
    value = outer("averaging", filter="orthogonal")
    optimizers = [OuterOptimizer(params, value), OuterOptimizer([{"params": [p]} for p in others], value)]
    for number in range(3):
        for group, optimizer in zip((params, others), optimizers, strict=True):
            give(group, randoms(number, SHAPES))
            optimizer.step()
    assert all(map(same_bits, params, others))
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    DiLoCo(model, value, inner_steps=4, fragments=fragments)


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "method", "words"),
    [
        ("orthogonal:steps=0", "nesterov", "steps"),
        ("orthogonal:steps=21", "nesterov", "at most 20"),
    ],
)
def test_refused(text: str, method: str, words: str):
    """What makes no filter, and a filter that has not what it works on, is refused with a remedy at construction."""
    with pytest.raises(ValueError, match=words):
        OuterOptimizer(parameters(0, SHAPES), outer(method, filter=text))


def test_a_filter_of_ones_own_has_the_arithmetic_of_its_class_or_is_refused():
    """A subclass of a filter filters as that one does; one without arithmetic is refused at construction."""

    class Same(Clip):
        pass

    class Without(Filter):
        name = "without"

    params, clipped_params = (parameters(0) for _ in range(2))
    for each, value in ((params, Same(0.5)), (clipped_params, Clip(0.5))):
        give(each, randoms(1))
        for p, new in zip(each, filtered(value, [p.grad for p in each], Context()), strict=True):
            p.data = new
    assert all(map(same_bits, params, clipped_params))
    with pytest.raises(ValueError, match=r"filter without has no arithmetic.*filter_of\(Without\)"):
        filtered(Without(), [torch.ones(2)], Context())


def test_orthogonal_of_zeros_in_half_precision():
    """A matrix of zeros stays one; the smallest divisor is one that the dtype has."""
    x = torch.nn.Parameter(torch.ones(3, 2, dtype=torch.float16))
    x.grad = torch.zeros_like(x)
    OuterOptimizer([x], outer("averaging", filter="orthogonal")).step()
    assert torch.equal(x.detach(), torch.ones(3, 2, dtype=torch.float16))


def test_a_sparse_pseudo_gradient_is_refused_before_the_filter():
    """The message names the remedy, whatever the filter would say."""
    x = torch.nn.Parameter(torch.ones(3, 2))
    x.grad = torch.ones(3, 2).to_sparse()
    with pytest.raises(ValueError, match=r"sparse; make it dense with \.to_dense\(\)"):
        OuterOptimizer([x], outer("averaging", filter="clip")).step()


@pytest.mark.parametrize("value", [Clip(2.0), Orthogonal(3)])
def test_text_and_value_are_one(value: Filter):
    """The text form of a filter is parsed to an equal value."""
    assert parse("filter", str(value)) == value
