"""torchft's own `DiLoCo` with restarts; settings with which torchft 0.2.0 lets replicas differ are refused.

States travel between replicas as pickles, by ports without authentication: use it in a trusted network. A policy that
measures decides by each replica's own arithmetic: use it where the processors are alike.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torchft import local_sgd
from torchft.manager import Manager

from twophase.diloco.engine import Restarts
from twophase.optim.build import OuterChoice, outer_optimizer


class DiLoCo(local_sgd.DiLoCo):
    """torchft's `DiLoCo` with an outer optimizer for each fragment, and a state to save; made by `diloco`.

    After its `with` block the model holds the agreed weights; inner steps since the last round are discarded.
    """

    @property
    def outers(self) -> list[Optimizer]:
        """The outer optimizers, one a fragment; docs/torchft.md shows how to record their rounds."""
        return [fragment._outer_optimizer for fragment in self._fragments]

    def __exit__(self, kind: Any, *rest: Any) -> bool:
        if kind is None:
            self._restore_parameters()
        return super().__exit__(kind, *rest)

    @contextmanager
    @torch.no_grad()
    def anchored(self) -> Iterator[None]:
        """Put the agreed weights, which replicas leave between rounds, into the model, for an evaluation."""
        params: list[Tensor] = [p for fragment in self._fragments for p in fragment._model_fragment.parameters()]
        before = [p.clone() for p in params]
        self._restore_parameters()
        try:
            yield
        finally:
            torch._foreach_copy_(params, before)

    def state_dict(self) -> dict[str, Any]:
        """Return the state without model and inner optimizer: anchors, outer states, counters."""
        return {
            "anchors": [dict(fragment.original_parameters) for fragment in self._fragments],
            "outers": [outer.state_dict() for outer in self.outers],
            "inner_step": self._local_step,
            "manager": self._manager.state_dict(),
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()` of the same fragments, before the first step; the caller loads the rest."""
        own, anchors = [fragment.original_parameters for fragment in self._fragments], state["anchors"]
        shapes = [[{name: [*t.shape] for name, t in anchor.items()} for anchor in each] for each in (own, anchors)]
        if shapes[0] != shapes[1]:
            raise ValueError(f"diloco: the state must have the fragments {shapes[0]}, has {shapes[1]}")
        for outer, saved in zip(self.outers, state["outers"], strict=True):
            outer.load_state_dict(saved)  # first: it may refuse
        for anchor, saved in zip(own, anchors, strict=True):
            torch._foreach_copy_([*anchor.values()], [saved[name] for name in anchor])
        self._local_step = state["inner_step"]
        self._manager.load_state_dict(state["manager"])


def diloco(
    manager: Manager,
    model: nn.Module,
    inner: Optimizer,
    outer: OuterChoice = "nesterov",
    *,
    inner_steps: int,
    restart: Restarts = None,
    fragments: Sequence[nn.Module] | None = None,
) -> DiLoCo:
    """Return torchft's `DiLoCo` with an outer optimizer for each fragment; `examples/torchft_diloco.py` trains with it.

    In its `with` block torchft's rounds hang on `inner.step()`. A replica that comes back receives what the manager's
    `state_dict` function returns, and from torchft the anchors and the outer optimizers with their counters.

    Args:
        manager: torchft's, with `use_async_quorum=False`, `init_sync=False`, and functions that save and load the
            model, the inner optimizer and the place in the data.
        model: this replica, which begins with the weights of all others.
        inner: its optimizer.
        outer: as of `twophase.DiLoCo`; "nesterov" is DiLoCo's published rule.
        inner_steps: inner steps in which every fragment is synchronised once, a multiple of their number.
        restart: restart policy of the outer momentum, in rounds of each fragment; None is never.
        fragments: modules that together hold every trainable parameter once; None means the model.

    Raises:
        ValueError: an argument outside its range, another manager, or buckets in the environment.
    """
    modules = [model] if fragments is None else [*fragments]
    held = [id(p) for module in modules for p in module.parameters()]
    lost = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in held]
    if lost or len(held) != len(set(held)):
        fault = f"lack {lost[0]}" if lost else "overlap"
        raise ValueError(f"diloco: fragments must hold every trainable parameter once, {fault}")
    if os.environ.get(local_sgd.USE_BUCKETIZATION_ENV) == "True":  # only the last bucket's tensors are copied back
        raise ValueError(f"diloco: {local_sgd.USE_BUCKETIZATION_ENV} must be unset, is True")
    if manager._init_sync:  # all would repeat the first replica's first round
        raise ValueError("diloco: init_sync of the manager must be False")
    if not manager._user_state_dicts:  # a replica that comes back would add old weights to the mean
        raise ValueError("diloco: the manager must have state_dict and load_state_dict of model, optimizer and data")
    outers = [outer_optimizer(module.named_parameters(), outer, restart) for module in modules]
    return DiLoCo(manager, modules, inner, outers, sync_every=inner_steps)
