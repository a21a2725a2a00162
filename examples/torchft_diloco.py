"""A small Llama trained elastically by torchft's DiLoCo with restarts: replicas may die, come back, and join.

    torchft_lighthouse --min_replicas 1 --bind 127.0.0.1:29510 --join_timeout_ms 10000
    export TORCHFT_LIGHTHOUSE=http://127.0.0.1:29510 GLOO_SOCKET_IFNAME=lo
    python examples/torchft_diloco.py 0
    python examples/torchft_diloco.py 1

The lighthouse tells replicas of one another. Each replica is a process here, and may be a torchrun group on GPUs.
Kill one: after the lighthouse's heartbeat timeout (5 s) the other trains on alone. Start it again: it receives model,
optimizers and place in the data from the other, and both train on with the same weights.

GLOO_SOCKET_IFNAME=lo keeps the sums on this machine. The ports of torchft listen on every network, without
authentication, and a heal unpickles what the other replica sends: use it in networks that you trust.
"""

from __future__ import annotations

import argparse
import logging
from datetime import timedelta
from typing import Any

import torch
import torchft
from torch import nn
from torch.distributed import TCPStore

from twophase import OuterRule
from twophase.integrations.torchft import diloco
from twophase.tasks.lm.config import TrainConfig
from twophase.tasks.lm.task import LanguageTask

REPLICAS = 2
"""Shares of the data, which is Python's own documentation."""


def train(replica: int, rounds: int) -> None:
    """Train one replica until every fragment has had so many rounds, and print what happens."""
    task = LanguageTask(TrainConfig(replicas=REPLICAS))
    model = task.model(seed=0)  # all replicas begin with the same weights
    inner = torch.optim.AdamW(model.parameters(), lr=3e-3)
    step = 0

    def save() -> dict[str, Any]:
        """Return what a replica that comes back receives; torchft adds anchors and outer optimizers."""
        return {"model": model.state_dict(), "inner": inner.state_dict(), "step": step}

    def load(state: dict[str, Any]) -> None:
        nonlocal step
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["inner"])
        step = state["step"]

    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # torchrun brings its own
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=60)),  # longer than a heal takes
        state_dict=save,
        load_state_dict=load,
        min_replica_size=1,
        use_async_quorum=False,  # DiLoCo's rounds wait for the quorum
        init_sync=False,  # else the second replica would repeat the first one's first round
        quorum_timeout=timedelta(seconds=600),  # longer than the slowest replica's inner steps
        quorum_retries=10,  # a lighthouse may be started again meanwhile
        replica_id=f"replica_{replica}",
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
    )
    # Two fragments, each a module; embedding, norm and head are bare parameters, of which this makes one.
    rest = nn.ParameterDict({name: p for name, p in model.named_parameters() if not name.startswith("blocks.")})
    fragments = [model.blocks, rest]
    outer = diloco(
        manager, model, inner, OuterRule(0.7, 0.9, nesterov=True), inner_steps=16, restart=3, fragments=fragments
    )
    with outer:
        known = 0
        while (synced := manager.current_step()) < len(fragments) * rounds:
            if synced // 20 > known // 20:  # the agreed weights: those of this replica have trained on
                with outer.anchored():
                    perplexity = task.evaluate(model)["perplexity"]
                restarts = outer.outers[0].param_groups[0]["restarts"]
                facts = f"{manager.num_participants()} replica(s), {restarts} restarts, perplexity {perplexity:.3f}"
                print(f"sync {synced}: {facts}", flush=True)
            known = synced
            tokens, targets = map(torch.from_numpy, task.batch(0, step, replica))
            task.loss(model, (tokens, targets)).backward()
            inner.step()  # torchft's rounds hang on it
            inner.zero_grad()
            step += 1
    perplexity, norm = task.evaluate(model)["perplexity"], nn.utils.parameters_to_vector(model.parameters()).norm()
    print(f"replica {replica}: perplexity {perplexity:.3f} after {step} inner steps, agreed weights {norm:.9f}")
    manager.shutdown(wait=False)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A small Llama by torchft's DiLoCo with restarts.")
    parser.add_argument("replica", type=int, choices=range(REPLICAS), help="number of this replica")
    parser.add_argument("--rounds", type=int, default=120, help="rounds of 16 inner steps")
    options = parser.parse_args()
    logging.getLogger("torchft").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    train(options.replica, options.rounds)
