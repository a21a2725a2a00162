"""Filters of the pseudo-gradient: `orthogonal` against an SVD, `clip` against torch's, what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from outers import flat, give, randoms
from replicas import same_bits
from twophase.optim.orthogonal import filter_of, orthogonal


def filtered(value: Any, gradients: list[Tensor], **options: Any) -> list[Tensor]:
    new = {str(index): g.clone() for index, g in enumerate(gradients)}
    function = filter_of(value, **options)
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
    gradients = [torch.randn(5), torch.zeros(3, 2, dtype=torch.float16), torch.zeros(0, 3)]
    assert all(map(same_bits, filtered("orthogonal", gradients), gradients))


@pytest.mark.parametrize("norm", [0.3, 1e9])
def test_clip_is_torchs(norm: float):
    """The norm over all of them, and over all shards, is at most its bound; zeros stay."""
    gradients = randoms(1, [(7,), (3, 5), (2, 3, 4)])
    params = [nn.Parameter(g) for g in gradients]
    give(params, gradients)
    nn.utils.clip_grad_norm_(params, norm)
    new = filtered(f"clip:{norm}", gradients)
    torch.testing.assert_close(flat(new), flat([p.grad for p in params]), rtol=1e-5, atol=0)
    assert norm < 1 or all(map(same_bits, new, gradients))
    halves = filtered(f"clip:{norm}", gradients, total=lambda squares: [4 * s for s in squares])
    torch.testing.assert_close(flat(halves), flat(new) * (0.5 if norm < 1 else 1), rtol=1e-12, atol=0)
    assert not flat(filtered(f"clip:{norm}", [0 * g for g in gradients])).any()


def test_other_filters():
    """None and `none` are none, a function is itself; of shards, what needs whole parameters is refused."""
    assert (filter_of(None), filter_of("none"), filter_of(orthogonal)) == (None, None, orthogonal)
    for value in ("orthogonal", orthogonal):
        with pytest.raises(ValueError, match="whole"):
            filter_of(value, total=list)
