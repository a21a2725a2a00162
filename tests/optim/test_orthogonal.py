"""Filters of the pseudo-gradient: `orthogonal` against an SVD, `clip` against torch's, a user's own in the engine."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from outers import flat, randoms
from replicas import same_bits
from twophase.diloco.engine import DiLoCo
from twophase.optim.orthogonal import filter_of, orthogonal
from twophase.rule import OuterRule

SHAPES = [(7,), (3, 5), (2, 3, 4), (6, 2)]


def filtered(value: Any, gradients: list[Tensor]) -> list[Tensor]:
    """The gradients after a filter, which changes them in place."""
    new = {str(index): g.clone() for index, g in enumerate(gradients)}
    function = filter_of(value)
    assert function is not None
    function(new)
    return list(new.values())


@pytest.mark.parametrize("shape", [(6, 9), (9, 6), (4, 4), (3, 2, 5)])
def test_orthogonal_makes_the_singular_values_alike(shape: tuple[int, ...]):
    """The left and right vectors of g, values within 40 % of their root mean square, and g's norm."""
    (g,) = randoms(3, [shape])
    (new,) = filtered("orthogonal", [g])
    matrix = g.reshape(shape[0], -1)
    u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
    turned = u.T @ new.reshape(matrix.shape) @ vh.T
    values, level = torch.diagonal(turned), float(g.norm()) / math.sqrt(min(matrix.shape))
    assert float(new.norm()) == pytest.approx(float(g.norm()), rel=1e-12)
    assert (turned - values.diag()).abs().max() < 0.05 * level
    assert bool(((values > 0.6 * level) & (values < 1.4 * level)).all()), values / level


def test_orthogonal_leaves_vectors_and_zeros():
    """In half precision too, where the smallest divisor must be one that the type has."""
    vector, zeros = torch.randn(5), torch.zeros(3, 2, dtype=torch.float16)
    new = filtered("orthogonal", [vector, zeros])
    assert same_bits(new[0], vector)
    assert same_bits(new[1], zeros)


@pytest.mark.parametrize("norm", [0.3, 1e9])
def test_clip_is_torchs(norm: float):
    """The norm over all of them is at most its bound."""
    gradients = randoms(1, SHAPES)
    params = [nn.Parameter(g) for g in gradients]
    for p, g in zip(params, gradients, strict=True):
        p.grad = g.clone()
    nn.utils.clip_grad_norm_(params, norm)
    new = filtered(f"clip:{norm}", gradients)
    torch.testing.assert_close(flat(new), flat([p.grad for p in params]), rtol=1e-5, atol=0)
    assert norm < 1 or all(map(same_bits, new, gradients))


def halve(gradients: Mapping[str, Tensor]) -> None:
    """A user's own filter."""
    assert set(gradients) <= {"0.weight", "0.bias", "1.weight", "1.bias"}
    for g in gradients.values():
        g.mul_(0.5)


@pytest.mark.parametrize("fragments", [1, 2])
@pytest.mark.parametrize("value", [None, "clip:0.01", halve])
def test_the_engine_filters_before_the_outer_step(value: Any, fragments: int):
    """Averaging moves by the filtered pseudo-gradient, of which the report has the norm."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    engine = DiLoCo(model, OuterRule(1.0, 0.0), inner_steps=2, fragments=fragments, stagger=False, filter=value)
    moved = {name: torch.randn_like(p) for name, p in start.items()}
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.add_(moved[name])
    engine.step()
    report = engine.step()
    for fragment in engine.fragments:
        g = {name: -moved[name] for name, _ in fragment.named}
        for function in filter(None, [filter_of(value)]):
            function(g)
        for name, anchor in fragment.named:
            torch.testing.assert_close(anchor, start[name] - g[name], rtol=0, atol=1e-6)
    total = flat([start[name] - anchor for name, anchor in engine.anchor.items()]).norm()
    assert report is not None
    assert report.pseudo_gradient_norm == pytest.approx(float(total), rel=1e-4)


@pytest.mark.parametrize("text", ["clip", "clip:0", "clip:-1", "clip:x", "orthogonal:5", "heloco"])
def test_unknown_filters(text: str):
    """Are refused at construction."""
    with pytest.raises(ValueError, match="filter"):
        DiLoCo(nn.Linear(2, 2), "averaging", inner_steps=1, filter=text)
    with pytest.raises(ValueError, match="whole"):
        filter_of(orthogonal, total=list)
