"""torchft's own `DiLoCo` with restarts, refused where torchft 0.2.0 would let replicas differ without an error."""

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

from twophase.diloco.agreement import first_unlike
from twophase.integrations.rounds import USUAL
from twophase.optim.build import OuterChoice, outer_optimizer
from twophase.policies.base import Never, RestartPolicy

__all__ = ["DiLoCo", "diloco"]


class DiLoCo(local_sgd.DiLoCo):
    """torchft's `DiLoCo` with an outer optimizer for each fragment, and a state to save; made by `diloco`.

    After its `with` block the model holds the agreed weights; inner steps since the last round are discarded.

    Attributes:
        outers: outer optimizers, one a fragment; `twophase.record(rounds.outers[0], folder)` records its rounds.
    """

    def __init__(
        self, manager: Manager, fragments: Sequence[nn.Module], inner: Optimizer, outers: list[Optimizer], steps: int
    ) -> None:
        super().__init__(manager, [*fragments], inner, [*outers], sync_every=steps)
        self.outers = outers
        self._modules = [*fragments]

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        super().__exit__(kind, error, trace)
        if kind is None:
            for fragment in self._fragments:
                fragment.restore_parameters()
        return False

    @contextmanager
    @torch.no_grad()
    def anchored(self) -> Iterator[None]:
        """Put the agreed weights, torchft's `original_parameters`, into the model, for an evaluation.

        With several fragments no replica holds them between two rounds.
        """
        params: list[Tensor] = [p for module in self._modules for p in module.parameters()]
        before = [p.detach().clone() for p in params]
        for fragment in self._fragments:
            fragment.restore_parameters()
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
        """Continue from `state_dict()`, before the first step; model and inner optimizer are loaded by the caller.

        Raises:
            ValueError: a state of other fragments, parameters or outer methods; nothing has been changed.
        """
        current, stored = (
            {"fragments": [[[name, list(values.shape)] for name, values in anchor.items()] for anchor in anchors]}
            for anchors in ([fragment.original_parameters for fragment in self._fragments], state["anchors"])
        )
        difference = first_unlike(current, stored, ("these rounds", "the state"))
        if difference is not None:
            raise ValueError(f"diloco: {difference}; give the checkpoint's model and fragments")
        for outer, saved in zip(self.outers, state["outers"], strict=True):
            outer.load_state_dict(saved)  # first: it may refuse
        for fragment, anchor in zip(self._fragments, state["anchors"], strict=True):
            for name, values in anchor.items():
                fragment.original_parameters[name].copy_(values)
        self._local_step = state["inner_step"]
        self._manager.load_state_dict(state["manager"])


def diloco(
    manager: Manager,
    model: nn.Module,
    inner: Optimizer,
    outer: OuterChoice = USUAL,
    *,
    inner_steps: int,
    restart: RestartPolicy | str | int | None = None,
    fragments: Sequence[nn.Module] | None = None,
) -> DiLoCo:
    """Return torchft's `DiLoCo`, with an `OuterSGD` for each fragment.

        manager = torchft.Manager(
            pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=120)),
            state_dict=save, load_state_dict=load,   # model, inner optimizer, place in the data
            min_replica_size=2, use_async_quorum=False, init_sync=False, quorum_retries=10, ...,
        )
        with diloco(manager, model, inner, inner_steps=500, restart=3) as rounds:
            while manager.current_step() < 100:      # fragment rounds
                ...                                  # forward, backward
                inner.step()                         # torchft's rounds hang on it
                inner.zero_grad()

    `examples/torchft_diloco.py` is a whole program. A replica that comes back receives what `save` returns, and from
    torchft the anchors and the outer optimizers with their counters. Overlap (`fragment_sync_delay`), buckets and
    quantization are not offered. With torchft 0.2.0, overlap may report a failed reduction as a success; buckets and
    quantization leave out tensors or do nothing.

    Args:
        manager: torchft's, with `use_async_quorum=False`, `init_sync=False`, and functions that save and load the
            model, the inner optimizer and the place in the data.
        model: this replica; all replicas begin with the same weights, for the first exchange is in the first round.
        inner: its optimizer.
        outer: the outer rule, or another choice as of `twophase.DiLoCo`.
        inner_steps: inner steps in which every fragment is synchronised once, a multiple of their number.
        restart: restart policy of the outer momentum, in rounds of each fragment; None is never. A policy that
            measures decides by each replica's own arithmetic: use it where the processors are alike.
        fragments: modules that together hold every trainable parameter once; None means the model.

    Raises:
        ValueError: fragments that leave out or share parameters; a manager with `init_sync` or `use_async_quorum`, or
            without functions for the state; buckets in the environment.
    """
    modules = [model] if fragments is None else [*fragments]
    check(manager, model, modules, inner_steps)
    policy = Never() if restart is None else restart
    outers = [outer_optimizer(module.named_parameters(), outer, policy) for module in modules]
    return DiLoCo(manager, modules, inner, outers, inner_steps)


def check(manager: Manager, model: nn.Module, fragments: Sequence[nn.Module], inner_steps: int) -> None:
    """Refuse settings with which torchft 0.2.0 lets replicas differ without an error."""
    if os.environ.get(local_sgd.USE_BUCKETIZATION_ENV) == "True":
        raise ValueError(
            f"diloco: the environment has {local_sgd.USE_BUCKETIZATION_ENV}=True, and torchft copies back the tensors "
            "of the last bucket alone; it must be unset"
        )
    if manager._use_async_quorum:
        raise ValueError("diloco: the manager's use_async_quorum is True; it must be False")
    if manager._init_sync:
        raise ValueError(
            "diloco: the manager's init_sync is True, and every other replica would repeat the first replica's round; "
            "it must be False, with the same weights in all replicas at the start"
        )
    if not manager._user_state_dicts:
        raise ValueError(
            "diloco: the manager has no state_dict and load_state_dict; they must save and load the model, the inner "
            "optimizer and the place in the data, or a replica that comes back adds old weights to the mean"
        )
    if inner_steps % len(fragments) or inner_steps < len(fragments):
        raise ValueError(
            f"diloco: inner_steps is {inner_steps}; it must be a multiple of the {len(fragments)} fragments, for "
            f"torchft synchronises one every inner_steps/{len(fragments)} steps"
        )
    names = [id(p) for fragment in fragments for p in fragment.parameters()]
    lost = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in names]
    if lost or len(names) != len(set(names)):
        fault = f"leave out {', '.join(lost[:3])}{' …' * (len(lost) > 3)}" if lost else "overlap"
        raise ValueError(
            f"diloco: the fragments {fault}, so replicas would differ; give modules that together hold every trainable "
            "parameter of the model once"
        )
