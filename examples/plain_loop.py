"""A plain PyTorch loop with `twophase.DiLoCo`: in one process, or one replica a process under torchrun.

    python examples/plain_loop.py
    GLOO_SOCKET_IFNAME=lo torchrun --standalone --nproc-per-node 2 examples/plain_loop.py

GLOO_SOCKET_IFNAME=lo keeps the processes' traffic on this machine. The loop is the same in both cases: between rounds
every process trains on its own data without a word to the others; when a round ends, `engine.step()` averages their
progress and takes the outer step, and all replicas go on from the same weights. A digest of those weights, equal on all
processes, is in every round's report.

The data are made here: a small network learns a sum of sines. The model must not be wrapped in
`DistributedDataParallel`, which would average the gradients of every inner step.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn

from twophase import DiLoCo


def batch(replica: int, step: int, size: int = 64) -> tuple[Tensor, Tensor]:
    """A replica's batch of an inner step: x of shape (size, 8) and y of shape (size, 1)."""
    x = torch.randn(size, 8, generator=torch.Generator().manual_seed(1_000_000 * replica + step))
    return x, x.sin().sum(dim=1, keepdim=True)


@torch.no_grad()
def loss(model: nn.Module) -> float:
    """Mean squared error on data that no replica trains on."""
    x, y = batch(replica=999, step=0, size=4096)
    return nn.functional.mse_loss(model(x), y).item()


def train(steps: int, inner_steps: int) -> None:
    """Train this process's replica and print what happens."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(rank)  # replicas may be built differently: all start from the weights of process 0
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    inner = torch.optim.AdamW(model.parameters(), lr=3e-3)
    engine = DiLoCo(model, "averaging", inner_steps=inner_steps)
    print(f"process {rank}: loss {loss(model):.6f} before, {engine.replica_count} replica(s)", flush=True)
    for step in range(steps):
        x, y = batch(rank, step)
        nn.functional.mse_loss(model(x), y).backward()
        inner.step()
        inner.zero_grad()
        report = engine.step()
        if report is not None and rank == 0 and report.round % 3 == 0:
            print(f"round {report.round}: {report.bytes_sent} bytes sent, loss {loss(model):.6f}")
    engine.finish()  # the last round, if it was cut short
    print(f"process {rank}: loss {loss(model):.6f} after, checksum {engine.checksum()}", flush=True)


def main(arguments: list[str] | None = None) -> None:
    """Join the other processes, if torchrun started some, and train."""
    parser = argparse.ArgumentParser(description="A plain PyTorch loop with twophase.DiLoCo.")
    parser.add_argument("--steps", type=int, default=300, help="inner steps in all")
    parser.add_argument("--inner-steps", type=int, default=16, help="inner steps a round")
    options = parser.parse_args(arguments)
    several = "RANK" in os.environ  # torchrun tells each process its number
    if several:
        dist.init_process_group("gloo")
    try:
        train(options.steps, options.inner_steps)
    finally:
        if several:
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
