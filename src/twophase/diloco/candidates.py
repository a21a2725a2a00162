"""Measure the losses of the candidate anchors between which a restart policy chooses."""

from __future__ import annotations

from collections.abc import Sequence

from twophase.diloco.agreement import averaged
from twophase.diloco.fragment import Fragment
from twophase.diloco.setting import Setting
from twophase.optim.groups import as_number
from twophase.policies.base import PROBES


def probe_candidates(setting: Setting, fragments: Sequence[Fragment], weight: int) -> list[list[float]]:
    """Return the losses of each fragment's candidates, with the other fragments at the anchor.

    The replicas are restored. Probing comes before the vote on the round, so that it may fail like the reduction.

    Args:
        setting: replicas and probe of the engine.
        fragments: fragments that take their outer step next.
        weight: number of this process's replicas that count in the mean.

    Returns:
        Means over all replicas that count, a list for each fragment.
    """
    if setting.probe is None:  # a loaded state or the user changed the policy after the engine was built
        raise ValueError("DiLoCo: a restart policy needs probes; give the engine a function, DiLoCo(..., probe=...)")
    losses: list[list[float]] = []
    with setting.lend(0) as model:
        # Batch norm changes its buffers in a forward pass; other modules replace a buffer's tensor.
        slots = [(m, name, b) for m in model.modules() for name, b in m.named_buffers(recurse=False)]
        buffers = [(module, name, buffer, buffer.clone()) for module, name, buffer in slots]
        try:
            for fragment in fragments:
                means = []
                for number in range(count_candidates(fragment)):
                    new = {id(p): value for p, value in fragment.outer_sgd.candidate(number)}
                    setting.write(0, [[new.get(id(view), view) for view in f.anchor_views] for f in setting.fragments])
                    answers = [
                        setting.probe(model, replica, fragment.round + 1) for replica in range(len(setting.modules))
                    ]
                    numbers = [as_number("DiLoCo: what the probe returned", answer) for answer in answers]
                    means.append(sum(numbers) / len(numbers))
                losses.append(means)
        finally:
            for module, name, buffer, before in buffers:
                setattr(module, name, buffer)
                buffer.copy_(before)
    return averaged(setting.communicator, weight, losses)


def count_candidates(fragment: Fragment) -> int:
    """Return the number of candidate anchors that a fragment's restart policies weigh; 0 without such a policy."""
    return fragment.outer_sgd.candidate_count if PROBES in fragment.needs else 0
