"""torchft's own `DiLoCo` with restarts: the settings that keep torchft 0.2.0 correct, without copying them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torchft.manager import Manager

from twophase.elastic import native
from twophase.elastic.native import manager
from twophase.integrations.rounds import USUAL
from twophase.optim.optimizer import outer_optimizer
from twophase.policies.base import Never, RestartPolicy
from twophase.rule import OuterRule
from twophase.shelf.outer import Outer

__all__ = ["diloco", "manager"]


def diloco(
    manager: Manager,
    model: nn.Module,
    inner: Optimizer,
    outer: OuterRule | Outer = USUAL,
    *,
    inner_steps: int,
    restart: RestartPolicy | str | int | None = None,
    fragments: Sequence[nn.Module] | None = None,
) -> native.Native:
    """Return torchft's `DiLoCo`, with an `OuterSGD` for each fragment.

        with manager(lighthouse, replica=0, replicas=2) as group:
            with diloco(group, model, inner, inner_steps=500, restart=3) as rounds:
                while group.current_step() < 100:        # fragment rounds
                    ...                                  # forward, backward
                    inner.step()                         # torchft's rounds hang on it
                    inner.zero_grad()

    A late joiner receives the model, the inner optimizer, the anchors, and the outer optimizers with their counters.
    For its place in the data, give `manager` functions. Overlap (`fragment_sync_delay`), buckets and quantization are
    not offered. With torchft 0.2.0, overlap may report a failed reduction as a success; buckets and quantization leave
    out tensors or do nothing. `twophase.elastic.torchft.TorchFT` has its own.

    Args:
        manager: torchft's, best `manager` of this module.
        model: this replica; all replicas begin with the same weights, for the first exchange is in the first round.
        inner: its optimizer.
        outer: the outer rule, or `twophase.outer(...)`.
        inner_steps: inner steps in which every fragment is synchronised once, a multiple of their number.
        restart: restart policy of the outer momentum, in rounds of each fragment; None is never. A policy that
            measures decides by each replica's own arithmetic: use it where the processors are alike.
        fragments: modules that together hold every trainable parameter once; None means the model.

    Raises:
        ValueError: fragments that leave out or share parameters; a manager with `init_sync` or `use_async_quorum`;
            buckets in the environment; a state with more than tensors, numbers, text.
        ImportError: another release of torchft than 0.2.0.
    """
    modules = [model] if fragments is None else [*fragments]
    native.check(manager, model, modules, inner_steps)
    policy = Never() if restart is None else restart
    outers = [outer_optimizer(module.named_parameters(), outer, policy) for module in modules]
    rounds = native.Native(manager, modules, inner, outers, inner_steps)

    def save() -> dict[str, Any]:
        return {"model": model.state_dict(), "inner": inner.state_dict()}

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["inner"])

    # Without both, a healed replica continues from old weights, and its next pseudo-gradient poisons the round of all.
    manager.register_state_dict_fn("twophase", load, save)
    native.check_state(manager)
    return rounds
