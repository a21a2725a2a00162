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
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_flatten, tree_map

from twophase.base.errors import UsageError, first_line, is_out_of_memory

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
        self._called = _Called(model, function)
        self._fixed = {name: weight.detach() for name, weight in model.named_parameters()}
        self._block = {name: self._fixed.pop(name) for name in names}
        self._batches = batches
        self._scale = None if scale is None else _flat([scale[name].to(self._block[name]) for name in names])
        self.size = sum(weight.numel() for weight in self._block.values())
        self.products = 0

    def __call__(self, vector: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the product with a vector, (size,) float64; computed in the model's own type.

        Raises:
            UsageError: a product that is not finite, or a model that cannot be differentiated twice.
        """
        v = torch.from_numpy(np.ascontiguousarray(vector, dtype=np.float64)).to(next(iter(self._block.values())))
        if self._scale is not None:
            v = v * self._scale
        parts = iter(v.split([weight.numel() for weight in self._block.values()]))
        tangent = [next(parts).view(weight.shape) for weight in self._block.values()]
        total = torch.zeros_like(v)
        try:
            with sdpa_kernel(SDPBackend.MATH):  # the other kernels cannot be differentiated twice
                for product in self._products():
                    total += _flat(product(tangent)).detach()
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            fault = f"torch cannot compute it ({first_line(error)}); the model must be differentiable twice"
            raise UsageError(f"{self.title}: {fault}") from error
        if not total.isfinite().all():
            raise UsageError(
                f"{self.title}: a product is not finite, because logits, loss or a derivative overflow on the run's "
                "batches; give another run, or correct the task"
            )
        if self._scale is not None:
            total = total * self._scale
        self.products += 1
        return total.cpu().double().numpy()

    def _products(self) -> Iterable[Product]:
        return map(self._product, range(len(self._batches)))

    def _product(self, number: int) -> Product:
        """Return the share of a batch in a product."""
        raise NotImplementedError

    def _value(self, number: int, block: Sequence[Tensor]) -> Tensor:
        """Compute the function on a batch, at some weights of the block."""
        weights = self._fixed | dict(zip(self._block, block, strict=True))
        # On a CPU, seeding the other devices' generators would take longer than a small product.
        seed = torch.default_generator.manual_seed if all(weight.is_cpu for weight in block) else torch.manual_seed
        with torch.random.fork_rng(devices=()):
            seed(number)  # a loss that draws noise draws the same for every product
            named = {f"model.{name}": weight for name, weight in weights.items()}
            return functional_call(self._called, named, (self._batches[number],))

    def _leaves(self) -> list[Tensor]:
        return [weight.detach().requires_grad_() for weight in self._block.values()]


class GaussNewton(Matrix):
    """The Gauss-Newton matrix of the cross-entropy of some logits; arguments as of `Matrix`. It needs no targets."""

    title, floor = "Gauss-Newton matrix", 0.0

    def __init__(self, model: nn.Module, batches: Sequence[Any], *block: Any) -> None:
        super().__init__(model, _joined(batches), *block)
        with torch.no_grad():  # it also fills the caches of a model
            shapes = [self._value(number, list(self._block.values())).shape for number in range(len(self._batches))]
        self._keeps = sum(shape.numel() for shape in shapes) <= _CACHED_LOGITS
        self._predictions = sum(shape[:-1].numel() for shape in shapes)
        self._cached: list[Product] = []

    def _products(self) -> Iterable[Product]:
        if self._keeps and not self._cached:
            self._cached = list(super()._products())
        return self._cached or super()._products()

    def _product(self, number: int) -> Product:
        block = self._leaves()
        value = self._value(number, block)
        # J v is the transpose of u -> J^T u, which is linear: its product from behind. So both graphs stay, and
        # forward-mode derivatives, which would run the model again for each product, are not needed.
        u = torch.zeros_like(value).requires_grad_()
        back = _pulled([value], block, [u])
        _check_twice(back)
        probabilities = value.detach().softmax(-1)

        def product(tangent: Sequence[Tensor]) -> Sequence[Tensor]:
            (change,) = _pulled(back, [u], tangent)
            weighted = probabilities * change
            slope = weighted - probabilities * weighted.sum(-1, keepdim=True)
            return _pulled([value], block, [slope / self._predictions])

        return product


class Hessian(Matrix):
    """The Hessian of the mean of a loss over some batches; arguments as of `Matrix`."""

    title, floor = "Hessian", -math.inf

    def _product(self, number: int) -> Product:
        block = self._leaves()
        loss = self._value(number, block) / len(self._batches)
        gradient = _pulled([loss], block, [torch.ones_like(loss).requires_grad_()])  # for `_check_twice`
        _check_twice(gradient)
        return lambda tangent: _pulled(gradient, block, tangent)


class _Called(nn.Module):
    """A function of a model and a batch as a module, of which `functional_call` can replace the parameters."""

    def __init__(self, model: nn.Module, function: Function) -> None:
        super().__init__()
        self.model, self.function = model, function

    def forward(self, batch: Any) -> Tensor:
        return self.function(self.model, batch)


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
