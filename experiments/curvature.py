"""Products with the curvature of a model's loss in a block of its parameters, with all others fixed.

    G = (1/N) sum_i J_i^T (diag p_i - p_i p_i^T) J_i,      J_i = d logits_i / d parameters,   p_i = softmax(logits_i)

is the generalised Gauss-Newton matrix of the mean cross-entropy over N predictions: the Hessian of the loss without the
curvature of the logits. A product with it is a product with J, with a small matrix for each prediction, and with J^T.
The Hessian is for losses that are no cross-entropy. Neither matrix is ever formed.

Source: Schraudolph, "Fast curvature matrix-vector products" (2002); Pearlmutter, "Fast exact multiplication by the
Hessian" (1994).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_flatten, tree_map

from twophase.errors import UsageError
from twophase.theory.inputs import Floats

Function = Callable[[nn.Module, Any], Tensor]
Product = Callable[[Sequence[Tensor]], Sequence[Tensor]]

_CACHED_LOGITS = 1 << 24  # up to so many logits their graphs stay in memory, which makes a product four times as quick
_PIECE = 1 << 13  # small batches are joined up to so many numbers: at a laptop's sizes calls cost most


class Matrix:
    """A symmetric matrix of a block as a linear operator; a subclass defines the matrix.

    Args:
        model: its parameters must be finite. Gradients of it are neither read nor written.
        batches: tensors or trees of them, examples along the first dimension.
        names: names of the block's parameters, in the order of the operator's coordinates.
        scale: factor of each coordinate on both sides, by parameter name: `D^-1/2` for the preconditioned matrix. None
            is all ones.
        function: function of model and batch that returns logits (classes along the last dimension) or a loss.

    Attributes:
        title: the matrix's name.
        floor: a lower bound of its eigenvalues.
        size: number of coordinates.
        products: number of vectors multiplied so far.
    """

    title: str
    floor: float

    def __init__(
        self,
        model: nn.Module,
        batches: Sequence[Any],
        names: Sequence[str],
        scale: Mapping[str, Tensor] | None = None,
        function: Function = lambda model, batch: model(batch),
    ) -> None:
        self._called = nn.Module()  # of which `functional_call` can replace the parameters
        self._called.add_module("model", model)
        self._called.forward = partial(function, model)
        self._fixed = {name: weight.detach() for name, weight in model.named_parameters()}
        self._block = {name: self._fixed.pop(name) for name in names}
        self._batches = batches
        self._scale = 1.0 if scale is None else _flat([scale[name].to(self._block[name]) for name in names])
        self.size = sum(weight.numel() for weight in self._block.values())
        self.products = 0

    def __call__(self, vector: Floats) -> Floats:
        """Return the product with a vector, (size,) float64; computed in the model's own type.

        Raises:
            UsageError: a product that is not finite, or a model that cannot be differentiated twice.
        """
        weights = list(self._block.values())
        v = torch.from_numpy(np.ascontiguousarray(vector)).to(weights[0]) * self._scale
        parts = v.split([weight.numel() for weight in weights])
        tangent = [part.view_as(weight) for part, weight in zip(parts, weights, strict=True)]
        total = torch.zeros_like(v)
        with sdpa_kernel(SDPBackend.MATH):  # the other kernels cannot be differentiated twice
            for number in range(len(self._batches)):
                total += _flat(self._product(number)(tangent)).detach()
        if not total.isfinite().all():
            raise UsageError(
                f"{self.title}: a product is not finite, because logits, loss or a derivative overflow on the run's "
                "batches; give another run, or correct the task"
            )
        self.products += 1
        return (total * self._scale).cpu().double().numpy()

    def _product(self, number: int) -> Product:
        """Return the share of a batch in a product."""
        raise NotImplementedError

    def _value(self, number: int) -> tuple[list[Tensor], Tensor]:
        """Return new leaves with the weights of the block, and the function on a batch at them."""
        leaves = [weight.detach().requires_grad_() for weight in self._block.values()]
        weights = self._fixed | dict(zip(self._block, leaves, strict=True))
        named = {f"model.{name}": weight for name, weight in weights.items()}
        # On a CPU, seeding the other devices' generators would take longer than a small product.
        seed = torch.default_generator.manual_seed if all(leaf.is_cpu for leaf in leaves) else torch.manual_seed
        with torch.random.fork_rng(devices=()):
            seed(number)  # a loss that draws noise draws the same for every product
            return leaves, functional_call(self._called, named, (self._batches[number],))


class GaussNewton(Matrix):
    """The Gauss-Newton matrix of the cross-entropy of some logits; arguments as of `Matrix`. It needs no targets."""

    title, floor = "Gauss-Newton matrix", 0.0

    def __init__(self, model: nn.Module, batches: Sequence[Any], *block: Any) -> None:
        super().__init__(model, _joined(batches), *block)
        with torch.no_grad():  # it also fills the caches of a model
            shapes = [self._value(number)[1].shape for number in range(len(self._batches))]
        self._predictions = sum(shape[:-1].numel() for shape in shapes)
        if sum(shape.numel() for shape in shapes) <= _CACHED_LOGITS:
            self._product = cache(self._product)

    def _product(self, number: int) -> Product:
        block, logits = self._value(number)
        # J v is the transpose of u -> J^T u, which is linear: its product from behind. So both graphs stay, and
        # forward-mode derivatives, which would run the model again for each product, are not needed.
        u = torch.zeros_like(logits).requires_grad_()
        back = _pulled([logits], block, [u])
        _check_twice(back)
        probabilities = logits.detach().softmax(-1)

        def product(tangent: Sequence[Tensor]) -> Sequence[Tensor]:
            (change,) = _pulled(back, [u], tangent)
            weighted = probabilities * change
            slope = weighted - probabilities * weighted.sum(-1, keepdim=True)
            return _pulled([logits], block, [slope / self._predictions])

        return product


class Hessian(Matrix):
    """The Hessian of the mean of a loss over some batches; arguments as of `Matrix`."""

    title, floor = "Hessian", -math.inf

    def _product(self, number: int) -> Product:
        block, loss = self._value(number)
        loss = loss / len(self._batches)
        gradient = _pulled([loss], block, [torch.ones_like(loss).requires_grad_()])  # for `_check_twice`
        _check_twice(gradient)
        return partial(_pulled, gradient, block)


def _pulled(outputs: Sequence[Tensor], inputs: Sequence[Tensor], cotangents: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the cotangents times the derivatives of the outputs, summed, by input: itself differentiable."""
    pairs = [pair for pair in zip(outputs, cotangents, strict=True) if pair[0].requires_grad]
    if not pairs:
        return [torch.zeros_like(tensor) for tensor in inputs]
    outputs, cotangents = zip(*pairs, strict=True)
    return torch.autograd.grad(outputs, inputs, cotangents, create_graph=True, materialize_grads=True)


def _check_twice(derivatives: Sequence[Tensor]) -> None:
    """Raise if a derivative cannot be differentiated; by input, autograd would silently take its derivative as zero."""
    nodes, seen = [derivative.grad_fn for derivative in derivatives], set()
    while nodes:
        node = nodes.pop()
        if type(node).__name__ == "Error":
            raise RuntimeError("an operation is marked as once_differentiable")
        if node is not None and node not in seen:
            seen.add(node)
            nodes += [before for before, _ in node.next_functions]


def _joined(batches: Sequence[Any]) -> list[Any]:
    """Join neighbouring batches of the same form where that saves calls."""
    pieces: list[Any] = []
    last, room = None, 0
    for batch in batches:
        leaves, form = tree_flatten(batch)
        shapes = form, [leaf.shape[1:] for leaf in leaves]
        numbers = max(leaf.numel() for leaf in leaves)
        if shapes == last and numbers <= room and len({leaf.shape[:1] for leaf in leaves}) == 1 and leaves[0].dim():
            pieces[-1] = tree_map(lambda *parts: torch.cat(parts), pieces[-1], batch)
        else:
            pieces.append(batch)
            last, room = shapes, _PIECE
        room -= numbers
    return pieces


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])
