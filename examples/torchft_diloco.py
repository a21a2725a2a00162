"""torchft's own `DiLoCo` with restarts: `twophase.OuterSGD` as its outer optimizer, one for each fragment.

Start the lighthouse, then each replica group in a shell of its own:

    torchft_lighthouse --min_replicas 2 --bind 127.0.0.1:29510 --join_timeout_ms 10000
    python examples/torchft_diloco.py --replica 0 --replicas 2 --lighthouse http://127.0.0.1:29510
    python examples/torchft_diloco.py --replica 1 --replicas 2 --lighthouse http://127.0.0.1:29510

`pip install torchft==0.2.0` (Linux). Restarts need nothing from torchft: the round counter and the momentum buffer are
in `OuterSGD.state_dict()`, which torchft's DiLoCo itself hands to a replica that comes back. What is written here with
a reason beside it is what keeps a run with torchft 0.2.0 correct; change it with care.

Everything listens on this machine alone (`HOST`). torchft has no authentication, and a replica that heals unpickles
what it is sent: between machines put the address of a private network there, behind a firewall.

The data are made here: a small network learns a sum of sines.
"""

from __future__ import annotations

import argparse
import os
import socket
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchft import manager as manager_module
from torchft.checkpointing import http_transport
from torchft.checkpointing.http_transport import HTTPTransport
from torchft.local_sgd import DiLoCo
from torchft.manager import Manager
from torchft.process_group import ProcessGroupGloo

from twophase import OuterSGD, Periodic

HOST = "127.0.0.1"
SYNC_EVERY = 8  # inner steps in which every fragment is synchronised once; with two fragments one of them every 4
TIMEOUT = timedelta(seconds=120)  # longer than a heal takes: the others wait for it inside their all-reduce


def build() -> tuple[nn.ModuleList, torch.optim.Optimizer, list[OuterSGD]]:
    """The two fragments of a small network, the inner optimizer, and an outer optimizer for each fragment.

    One outer optimizer over both would apply stale inner gradients to the fragment whose turn it is not.
    """
    torch.manual_seed(0)  # equal on all replicas: nothing is exchanged before the first round (init_sync=False)
    fragments = nn.ModuleList([nn.Sequential(nn.Linear(8, 32), nn.Tanh()), nn.Linear(32, 1)])
    inner = torch.optim.AdamW(fragments.parameters(), lr=3e-3)
    outers = [
        OuterSGD(fragment.parameters(), lr=0.7, momentum=0.9, nesterov=True, restart=Periodic(3))
        for fragment in fragments
    ]
    return fragments, inner, outers


def batch(replica: int, step: int, size: int = 64) -> tuple[Tensor, Tensor]:
    """A replica's batch of an inner step: x of shape (size, 8) and y of shape (size, 1)."""
    x = torch.randn(size, 8, generator=torch.Generator().manual_seed(1_000_000 * replica + step))
    return x, x.sin().sum(dim=1, keepdim=True)


def inner_step(fragments: nn.ModuleList, inner: torch.optim.Optimizer, replica: int, step: int) -> float:
    """One ordinary training step; torchft's rounds hang on `inner.step()`."""
    x, y = batch(replica, step)
    inner.zero_grad()
    loss = nn.functional.mse_loss(fragments[1](fragments[0](x)), y)
    loss.backward()
    inner.step()
    return loss.item()


class LocalTransport(HTTPTransport):
    """The server of checkpoints, at an address of ours instead of the machine's name."""

    def address(self) -> str:
        """Where a replica that heals finds this server."""
        return f"http://{HOST}:{self._server.socket.getsockname()[1]}/checkpoint/"


def listen_locally() -> None:
    """Bind what torchft 0.2.0 would bind to all interfaces to `HOST`. It offers no option, so private names change."""
    if version("torchft") != "0.2.0":
        raise RuntimeError(f"torchft is {version('torchft')}; the private names changed here are those of 0.2.0")
    server, http_server = manager_module.ManagerServer, http_transport._IPv6HTTPServer

    def manager_server(*, bind: str, **options: Any) -> Any:
        return server(bind=bind.replace("[::]", HOST), **options)

    class LocalServer(http_server):
        """The same on `HOST`, which a socket of IPv6 takes in its mapped form."""

        def __init__(self, address: tuple[str, int], handler: Any) -> None:
            super().__init__((f"::ffff:{HOST}", address[1]), handler)

    manager_module.ManagerServer = manager_server  # type: ignore[assignment]
    http_transport._IPv6HTTPServer = LocalServer
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the interface that has HOST


def start_store() -> dist.TCPStore:
    """This replica group's key-value store, on a socket of ours because the store's own listens everywhere."""
    listener = socket.create_server((HOST, 0))
    port = listener.getsockname()[1]
    return dist.TCPStore(HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


class Replica:
    """One replica group of one process: what it trains, and where in its data it is."""

    def __init__(self, number: int, replicas: int, lighthouse: str) -> None:
        self.number = number
        self.fragments, self.inner, self.outers = build()
        self.step = 0
        listen_locally()
        os.environ.pop("TORCHFT_USE_BUCKETIZATION", None)  # several buckets are never reduced, without an error
        self.store = start_store()
        self.manager = Manager(
            pg=ProcessGroupGloo(timeout=TIMEOUT),
            load_state_dict=self.load_state_dict,  # without both a replica that heals trains on from old weights,
            state_dict=self.state_dict,  # and its next pseudo-gradient poisons the round of all
            min_replica_size=replicas,  # the lighthouse's --min_replicas too: no replica begins alone
            use_async_quorum=False,  # DiLoCo asks for it
            init_sync=False,  # True: all but one throw their first round away and repeat another's
            quorum_retries=10,  # 0: a lighthouse that is away for seconds ends all replicas
            timeout=TIMEOUT,
            quorum_timeout=TIMEOUT,  # longer than the slowest replica takes for its inner steps
            connect_timeout=timedelta(seconds=10),
            rank=0,
            world_size=1,
            store_addr=HOST,
            store_port=self.store.port,
            lighthouse_addr=lighthouse,
            replica_id=f"replica-{number}",
            hostname=HOST,
            checkpoint_transport=LocalTransport(timeout=TIMEOUT, num_chunks=0),
        )

    def state_dict(self) -> dict[str, Any]:
        """What a healing replica takes over, besides the outer state and global weights that DiLoCo registers."""
        return {"fragments": self.fragments.state_dict(), "inner": self.inner.state_dict(), "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over another replica's state."""
        self.fragments.load_state_dict(state["fragments"])
        self.inner.load_state_dict(state["inner"])
        self.step = state["step"]

    def train(self, rounds: int) -> None:
        """Train until every fragment has taken its rounds; the fragments then hold the global weights."""
        outers: list[torch.optim.Optimizer] = [*self.outers]
        with DiLoCo(self.manager, [*self.fragments], self.inner, outers, sync_every=SYNC_EVERY) as diloco:
            synced = 0
            while synced < rounds * len(self.fragments):
                loss = inner_step(self.fragments, self.inner, self.number, self.step)
                self.step += 1
                if self.manager.current_step() > synced:  # counts the rounds of all fragments
                    synced = self.manager.current_step()
                    outer = self.outers[(synced - 1) % len(self.outers)].param_groups[0]
                    print(
                        f"replica {self.number}: fragment round {synced}, {self.manager.num_participants()} replicas, "
                        f"restarts {outer['restarts']}, loss {loss:.6f}",
                        flush=True,
                    )
            diloco._restore_parameters()  # between its rounds a fragment's live weights are this replica's alone

    def result(self) -> dict[str, Any]:
        """Global weights, momentum buffers and counters, all of which agree between replicas."""
        return {"weights": self.fragments.state_dict(), "outers": [outer.state_dict() for outer in self.outers]}


def main(arguments: list[str] | None = None) -> None:
    """Train one replica group."""
    parser = argparse.ArgumentParser(description="torchft's DiLoCo with twophase.OuterSGD.")
    parser.add_argument("--replica", type=int, required=True, help="number of this replica group, from 0")
    parser.add_argument("--replicas", type=int, required=True, help="replica groups in all")
    parser.add_argument("--lighthouse", required=True, help="address, such as http://127.0.0.1:29510")
    parser.add_argument("--rounds", type=int, default=12, help="rounds of every fragment")
    parser.add_argument("--out", type=Path, help="file for weights and outer state at the end")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    replica = Replica(options.replica, options.replicas, options.lighthouse)
    try:
        replica.train(options.rounds)
    finally:
        replica.manager.shutdown()
    if options.out:
        torch.save(replica.result(), options.out)


if __name__ == "__main__":
    main()
