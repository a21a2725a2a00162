"""Probing: the losses of the anchors between which a restart policy chooses."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from twophase.diloco.agreement import averaged
from twophase.diloco.communicator import Communicator
from twophase.diloco.fragment import Fragment
from twophase.diloco.replicas import Replicas
from twophase.optim.groups import as_number
from twophase.optim.outer import OuterSGD

Probe = Callable[[nn.Module, int, int], float]
"""From a module, the number of a replica in this process and a round's number to the loss on a probe batch."""


def count_candidates(fragment: Fragment) -> int:
    """Return how many candidate anchors a fragment's restart policies weigh; 0 if none does."""
    return fragment.outer.candidate_count if isinstance(fragment.outer, OuterSGD) else 0


def probe_candidates(
    probe: Probe | None, replicas: Replicas, fragments: Sequence[Fragment], communicator: Communicator, weight: int
) -> list[list[float]]:
    """Return the losses of each fragment's candidates, with the other fragments at the anchor.

    The replicas stay as they are. Probing comes before the vote on the round, so that it may fail like the reduction.

    Args:
        probe: the engine's function.
        replicas: all replicas of this process.
        fragments: those that take their outer step next.
        communicator: the processes.
        weight: number of this process's replicas that count in the mean.

    Returns:
        Means over all replicas that count, a list for each fragment.
    """
    if probe is None:  # a loaded state, or the user, has brought the policy after the engine was built
        raise ValueError("DiLoCo: a restart policy needs probes; give the engine a function, DiLoCo(..., probe=...)")
    losses: list[list[float]] = []
    with replicas.lend(0) as model:
        buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]  # batch norm's change in a forward pass
        try:
            for fragment in fragments:
                means = []
                for number in range(count_candidates(fragment)):
                    new = {id(p): value for p, value in fragment.outer_sgd.candidate(number)}
                    replicas.write(
                        0, [[new.get(id(view), view) for view in f.anchor_views] for f in replicas.fragments]
                    )
                    with torch.no_grad():
                        answers = [probe(model, replica, fragment.round + 1) for replica in range(len(replicas))]
                    numbers = [as_number("DiLoCo: what the probe returned", answer) for answer in answers]
                    means.append(sum(numbers) / len(numbers))
                losses.append(means)
        finally:
            for buffer, before in buffers:
                buffer.copy_(before)
    return averaged(communicator, weight, losses)
