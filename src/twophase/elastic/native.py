"""torchft's own `DiLoCo` and `Manager`, restricted to the settings with which torchft 0.2.0 keeps replicas equal.

The integration of torchft is the public interface; torchft's private names stay in this room.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torchft.local_sgd import DiLoCo
from torchft.manager import Manager

from twophase.diloco.agreement import first_unlike
from twophase.elastic import parts
from twophase.elastic.healing import Healing, bytes_of
from twophase.optim.outer import OuterSGD

_BUCKETS = "TORCHFT_USE_BUCKETIZATION"
_log = logging.getLogger("twophase")


class Native(DiLoCo):
    """torchft's `DiLoCo` with an `OuterSGD` for each fragment; made by `diloco` of the integration.

    After its `with` block the model holds the agreed weights; inner steps since the last round are discarded.

    Attributes:
        outers: outer optimizers, one a fragment; `twophase.record(rounds.outers[0], folder)` records its rounds.
    """

    def __init__(
        self, manager: Manager, fragments: Sequence[nn.Module], inner: Optimizer, outers: list[OuterSGD], steps: int
    ) -> None:
        super().__init__(manager, [*fragments], inner, [*outers], sync_every=steps)
        self.outers = outers

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        super().__exit__(kind, error, trace)
        if kind is None:
            self._restore_parameters()
        return False

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


def check(manager: Manager, model: nn.Module, fragments: Sequence[nn.Module], steps: int) -> None:
    """Refuse settings with which torchft 0.2.0 lets replicas differ without an error."""
    parts.check_installed()
    if os.environ.get(_BUCKETS) == "True":
        raise ValueError(
            f"diloco: the environment has {_BUCKETS}=True, and torchft {parts.VERSION} leaves out tensors of every "
            "bucket but the last; it must be unset"
        )
    if manager._use_async_quorum:
        raise ValueError(
            "diloco: the manager's use_async_quorum is True, and a replica that heals would train on from old "
            "weights. Pass Manager(use_async_quorum=False), or take `manager` of the module of diloco"
        )
    if manager._init_sync:
        raise ValueError(
            "diloco: the manager's init_sync is True, and every other replica would repeat the first replica's round. "
            "Pass Manager(init_sync=False) and begin all with the same weights"
        )
    if steps % len(fragments) or steps < len(fragments):
        raise ValueError(
            f"diloco: inner_steps is {steps}; it must be a multiple of the {len(fragments)} fragments, for torchft "
            f"synchronises one every inner_steps/{len(fragments)} steps"
        )
    names = [id(p) for fragment in fragments for p in fragment.parameters()]
    lost = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in names]
    if lost or len(names) != len(set(names)):
        fault = f"leave out {', '.join(lost[:3])}{' …' * (len(lost) > 3)}" if lost else "overlap"
        raise ValueError(
            f"diloco: the fragments {fault}, so replicas would differ; give modules that together hold every trainable "
            "parameter of the model once"
        )


def check_state(manager: Manager) -> None:
    """Refuse a state that a restarted replica could not receive: all would wait for it in every round."""
    if isinstance(manager._checkpoint_transport, Healing):  # another one sends pickles
        bytes_of(manager._manager_state_dict(), "the state")


def begin_alike(manager: Manager) -> None:
    """Switch off torchft's initial copy of weights; for managers that a trainer has made."""
    manager._init_sync = False


@contextmanager
def manager(
    lighthouse: str,
    *,
    replica: int,
    replicas: int,
    state_dict: Callable[[], Any] | None = None,
    load_state_dict: Callable[[Any], None] | None = None,
    host: str = "127.0.0.1",
    timeout: float = 120.0,
    quorum_timeout: float = 3600.0,
    connect_timeout: float = 10.0,
) -> Iterator[Manager]:
    """Yield torchft's `Manager` for a replica of one process, and leave the group at its end.

    Its store, its server and the transfer of states listen on `host` alone, and a peer's message is never unpickled.

    Args:
        lighthouse: address of the lighthouse, such as `http://10.0.0.1:29510`.
        replica: number of this replica, from 0.
        replicas: number of replicas; a round needs all of them, so give the lighthouse the same `--min_replicas`.
        state_dict: function that returns the state that a restarted replica needs, except model and optimizers: the
            data position and such, in tensors, numbers and text.
        load_state_dict: function that loads this state.
        host: name or address of this machine in a trusted network, which other replicas and the lighthouse reach.
        timeout: seconds for a reduction, more than a heal takes.
        quorum_timeout: seconds for the slowest replica's inner steps.
        connect_timeout: seconds to reach the lighthouse.

    Raises:
        ValueError: an invalid address, or one of every network, or variables that override these arguments.
        ImportError: another release of torchft than 0.2.0.
    """
    parts.check_installed()
    parts.check_environment()
    url, (lighthouse_host, _) = parts.lighthouse(lighthouse)
    address = parts.address_of(host, lighthouse_host)
    store, healing = parts.store(address), Healing(address, timeout)
    group = parts.group(address, timeout, connect_timeout)
    made = None
    try:
        made = parts.manager(
            address,
            store.port,
            pg=group,
            state_dict=state_dict,
            load_state_dict=load_state_dict,
            min_replica_size=replicas,  # no replica begins alone
            timeout=timedelta(seconds=timeout),
            quorum_timeout=timedelta(seconds=quorum_timeout),
            connect_timeout=timedelta(seconds=connect_timeout),
            lighthouse_addr=url,
            replica_id=f"replica-{replica}",
            checkpoint_transport=healing,
            quorum_retries=math.ceil(quorum_timeout / parts.ASK_EVERY),  # a lighthouse may restart meanwhile
        )
        made._logger.exception = _tell
        yield made
    finally:
        if made is None:
            healing.shutdown()
        else:
            made.shutdown(wait=False)  # stops healing as well
        group.abort(errored=False)


def _tell(msg: str) -> None:
    """Log an error of torchft: it repeats a failed heal in every round, and no other message gives the reason."""
    _log.log(logging.WARNING if "recovery" in msg else logging.DEBUG, "torchft %s", msg)
