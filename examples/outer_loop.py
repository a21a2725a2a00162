"""DiLoCo with momentum restarts in plain PyTorch: what `twophase.DiLoCo` does, without its checks.

    torchrun --nproc-per-node 2 examples/outer_loop.py

Each process is a replica. A round is `inner_steps` steps alone, then one all-reduce of the pseudo-gradient, one outer
step with Nesterov momentum, and every third round a restart, which sets the momentum to zero.
"""

import torch
import torch.distributed as dist
from torch import nn

LR, MOMENTUM, RESTART = 0.7, 0.9, 3


def train(model: nn.Module, rounds: int, inner_steps: int) -> None:
    """Train a replica on its own batches, in step with the other processes of torch.distributed."""
    rank, replicas = dist.get_rank(), dist.get_world_size()
    parameters = list(model.parameters())
    for p in parameters:  # all replicas begin with the same weights
        dist.broadcast(p.data, src=0)
    anchor = [p.detach().clone() for p in parameters]
    buffers = [torch.zeros_like(a) for a in anchor]
    inner = torch.optim.AdamW(parameters, lr=1e-2)  # keeps its state over the rounds
    for number in range(1, rounds + 1):
        for step in range(inner_steps):
            loss_of(model, batch(rank, number, step)).backward()
            inner.step()
            inner.zero_grad()
        with torch.no_grad():
            for p, a, m in zip(parameters, anchor, buffers, strict=True):
                g = a - p  # the pseudo-gradient: how far this replica has come
                dist.all_reduce(g)
                g /= replicas
                m.mul_(MOMENTUM).add_(g)
                a.add_(torch.add(g, m, alpha=MOMENTUM), alpha=-LR)  # Nesterov: g + b m in place of m
                if number % RESTART == 0:
                    m.zero_()
                p.copy_(a)  # all replicas go on from the new anchor
        if rank == 0:
            print(f"round {number}: loss {loss_of(model, batch(rank, number + 1, 0)).item():.4f}")


def batch(rank: int, number: int, step: int) -> torch.Tensor:
    """Return a batch of this replica's own data."""
    generator = torch.Generator().manual_seed(1_000_000 * rank + 1000 * number + step)
    return torch.randn(16, 8, generator=generator)


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return the mean squared error of learning the sum of the inputs."""
    return (model(x) - x.sum(1, keepdim=True)).pow(2).mean()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    train(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)), rounds=12, inner_steps=8)
    dist.destroy_process_group()
