"""Weigh the replicas of a sync by a filter that compares their own pseudo-gradients, before these are summed.

Each process measures the pseudo-gradients of its replicas and sends the norms to all. So all compute the same weights,
and each scales its contribution to the sum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from twophase.diloco.communicator import Communicator
from twophase.diloco.fragment import Fragment, progress_of
from twophase.optim.optimizer import OuterOptimizer, filter_of_group


@dataclass(frozen=True, slots=True)
class Weighing:
    """Hold a filter's weights of a fragment's replicas; the same on all processes but for `first`.

    Args:
        total: sum of the weights of all replicas; 0 where all are rejected, so that there is no outer step.
        rejected: number of replicas with weight 0.
        memory: state of the filter after the round.
        weights: weights of all replicas, in order of rank; empty in states of an earlier version.
        first: number of this process's first replica among them.
    """

    total: float
    rejected: int
    memory: Mapping[str, float]
    weights: Sequence[float] = ()
    first: int = 0


def weigh(communicator: Communicator, fragment: Fragment, *, counts: bool) -> Weighing | None:
    """Return the weights of a fragment's replicas; None where its filter does not compare them.

    Args:
        communicator: processes of the run, which all make this call.
        fragment: fragment with its parameters looked up; its pseudo-gradient is overwritten.
        counts: True if this process's replicas take part.
    """
    if not isinstance(fragment.outer, OuterOptimizer):
        return None
    group = fragment.outer.param_groups[0]  # the only group, because only an engine builds such an optimizer
    value = filter_of_group(group)
    if not value.replicas:
        return None
    shards = communicator.exchange_in_replica(_squares(fragment)) if counts else []
    local = [sum(column) ** 0.5 for column in zip(*shards, strict=True)]
    norms_by_process = communicator.gather(local, list)  # one a replica
    norms = [float(norm) for row in norms_by_process for norm in row]
    weights, memory = value.weigh(norms, {name: group.get(name, 0.0) for name in value.memory})
    first = sum(map(len, norms_by_process[: communicator.rank]))
    return Weighing(sum(weights), weights.count(0.0), memory, weights, first)


def _squares(fragment: Fragment) -> list[float]:
    """Return the squared norm of each replica's pseudo-gradient, accumulated in float64; of shards, this process's."""
    squares = []
    for params in fragment.params:
        tensors = zip(fragment.anchor_views, params, fragment.gradient_views, strict=True)
        parts = [torch.linalg.vector_norm(progress_of(*three), dtype=torch.float64) for three in tensors]
        squares.append(torch.stack(parts).square().sum())
    return torch.stack(squares).tolist()
