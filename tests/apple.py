"""A device `mps`, without Apple's GPU: its tensors lie in the CPU's memory, and none may be float64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only


class OnApple(Tensor):
    """A tensor that calls itself one of `mps`."""

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.clone()


class Apple(TorchFunctionMode):
    """Makes such tensors where `device="mps"` is asked for, and keeps what is computed from them there."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse float64, and tensors of the CPU beside those of the device but where they are copied."""
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if func == Tensor.is_cpu.__get__:  # type: ignore[attr-defined]
            return not isinstance(args[0], OnApple)
        if func == Tensor.device.__get__:  # type: ignore[attr-defined]
            return torch.device("mps" if isinstance(args[0], OnApple) else "cpu")
        devices = [torch.device(leaf) for leaf in (*args, kwargs.get("device")) if _is_device(leaf)]
        devices += [torch.device("cpu")] * (func is Tensor.cpu)
        is_there = devices[0].type == "mps" if devices else any(isinstance(t, OnApple) for t in tensors)
        if func in (Tensor.copy_, torch._foreach_copy_):
            is_there = isinstance(tensors[0], OnApple)
        elif is_there and not devices and any(t.ndim and not isinstance(t, OnApple) for t in tensors):
            raise RuntimeError(f"{func}: Expected all tensors to be on the same device, found mps:0 and cpu")
        args, kwargs = tree_map(lambda leaf: "cpu" if _is_device(leaf) else leaf, (args, kwargs))
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        made = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        if not made:
            return result
        for t in made if is_there else ():
            if t.dtype in (torch.float64, torch.complex128):
                raise TypeError("Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support it")
        kind = OnApple if is_there else Tensor
        return tree_map_only(Tensor, lambda t: t if type(t) in (kind, nn.Parameter) else t.as_subclass(kind), result)


def moved(module: nn.Module) -> nn.Module:
    for child in module.modules():
        child._parameters.update(
            {n: nn.Parameter(p.detach().to("mps")) for n, p in child._parameters.items() if p is not None}
        )
        child._buffers.update({name: b.to("mps") for name, b in child._buffers.items() if b is not None})
    return module


def _is_device(leaf: Any) -> bool:
    return isinstance(leaf, torch.device) or (isinstance(leaf, str) and leaf in ("mps", "cpu"))
