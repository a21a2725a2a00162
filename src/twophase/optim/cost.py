"""Count what a round of an outer optimizer reads, writes and remembers, as torch executes it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from twophase.optim.optimizer import OuterOptimizer
from twophase.optim.outer import OuterSGD
from twophase.rule import OuterRule
from twophase.shelf.outer import Outer


class _Traffic(TorchDispatchMode):
    """Count the elements that operations read and write; views cost nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        arguments = func._schema.arguments
        values = [*args, *((kwargs or {}).get(argument.name) for argument in arguments[len(args) :])]
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        if is_view or (not tree_leaves(result) and not any(a.alias_info for a in arguments)):
            return result
        before = {id(tensor) for tensor in tree_leaves(values) if isinstance(tensor, Tensor)}
        for argument, value in zip(arguments, values, strict=False):
            written = argument.alias_info is not None and argument.alias_info.is_write
            if func is torch.ops.aten._fused_sgd_.default and argument.name == "grads":
                written = False  # but with a loss scale
            read = not (written and func._schema.name.split("::")[-1].strip("_") in ("copy", "zero", "fill"))
            for tensor in tree_leaves(value):
                if isinstance(tensor, Tensor):
                    self.elements += tensor.numel() * (read + written)
        self.elements += sum(t.numel() for t in tree_leaves(result) if isinstance(t, Tensor) and id(t) not in before)
        return result


def cost(value: Outer | OuterRule) -> tuple[float, float]:
    """Return the passes over the parameters of a round, and the bytes a parameter that it remembers in float32.

    A pass is a read or a write of as many numbers as there are parameters. Measured in the third round of a matrix of
    64 x 64, in an optimizer by itself: an engine measures norms and cosine besides. Matrix products count as what they
    read and write.
    """
    x = torch.nn.Parameter(torch.ones(64, 64))
    outer = OuterSGD.from_rule([x], value) if isinstance(value, OuterRule) else OuterOptimizer([x], value)
    x.grad = torch.linspace(-1, 1, x.numel()).view(64, 64)
    for _ in range(2):
        outer.step()
    with _Traffic() as traffic:
        outer.step()
    held_bytes = sum(t.nbytes for t in outer.state[x].values() if isinstance(t, Tensor) and t.shape == x.shape)
    return traffic.elements / x.numel(), held_bytes / x.numel()
