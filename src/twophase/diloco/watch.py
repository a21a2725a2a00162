"""Mistakes of a training loop that raise no error: seen at a sync, or by `DiLoCo.check`."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim import Optimizer

from twophase.diloco.buffers import digests
from twophase.diloco.fragment import reshard, slots_of
from twophase.optim.outer_sgd import OuterSGD, off_mps

if TYPE_CHECKING:
    from twophase.diloco.engine import DiLoCo
    from twophase.diloco.report import RoundReport

_log = logging.getLogger("twophase")
_FEWEST_NUMBERS, _MOST_NUMBERS = 16, 1 << 17
"""Elements of a model that its first round compares; fewer than the first number are parallel by chance."""
_PARALLEL = 1e-7
"""Distance of a cosine from 1 within which two float32 directions are the same up to rounding."""
STILL = (
    "no parameter has moved in a round: the inner optimizer was not stepped, or holds other parameters than the "
    "engine's module (engine.check(inner=...) tells which)"
)
ALIKE = "all replicas moved alike in the first round, as on the same batches; give each its own part of the data"


class Watch:
    """Looks for mistakes of a training loop that raise no error, in its first round, and by `DiLoCo.check`.

    The first round is checked without a message to other ranks: with empty buffers the anchor's step is a multiple of
    the mean progress. If a replica's progress is parallel to it up to rounding, the replicas have moved alike.

    Attributes:
        findings: a sentence for each mistake.
    """

    def __init__(self, engine: DiLoCo) -> None:
        self.findings: list[str] = []
        # Buffers that training does not change, as of a rotary embedding, stay equal in all replicas.
        self._buffers = {} if engine.buffers == "mean" else digests(engine.replicas[0])
        self._before: dict[str, tuple[Tensor, Tensor]] = {}
        """Anchor and first replica's progress of some parameters, before the first sync."""

    def before_sync(self, engine: DiLoCo) -> None:
        """Compare the parameters; before the first sync note anchor and progress."""
        self._before = {}
        tables = [module._parameters for module in engine.replicas[0].modules()]  # `parameters()` takes far longer
        training = {id(p) for table in tables for p in table.values() if p is not None and p.requires_grad}
        slots = [slot for fragment in engine.fragments for slot in fragment.slots[0]]
        if training != {id(slot.parameter) for slot in slots}:
            self._warn(_of_parameters(engine))
        if engine.syncs:
            return
        self._warn(self._of_buffers(engine))
        if (
            engine.replica_count == 1
            or engine.group.sharded
            or len(engine.fragments) > 1
            or engine.compression != "float32"
            or not isinstance(engine.outer, OuterSGD)
            or any(slot.dtype.itemsize < 4 for slot in slots)
        ):
            return  # the anchor's first step need not be parallel to the mean progress
        fragment = engine.fragments[0]
        first, *others = fragment.parameters()
        if any(not torch.equal(a, b.to(a.device)) for other in others for a, b in zip(first, other, strict=True)):
            return  # the replicas of this process differ, as they should
        room = _MOST_NUMBERS
        for (name, view), theta in zip(fragment.named, first, strict=True):
            if view.numel() <= room:
                room -= view.numel()
                self._before[name] = view.clone(), off_mps(view - theta.to(view.device)).double()
        if room > _MOST_NUMBERS - _FEWEST_NUMBERS:
            self._before = {}

    def after_sync(self, engine: DiLoCo, report: RoundReport) -> None:
        """Look at a sync's pseudo-gradient, and at the first sync's step."""
        if report.pseudo_gradient_norm == 0:
            self._warn([STILL])
        elif self._before:
            step = torch.cat(
                [off_mps(a - engine.anchor[name]).double().flatten() for name, (a, _) in self._before.items()]
            )
            progress = torch.cat([part.flatten() for _, part in self._before.values()])
            if torch.cosine_similarity(step, progress, dim=0) > 1 - _PARALLEL:
                self._warn([ALIKE])

    def check(self, engine: DiLoCo, inner: Sequence[Optimizer]) -> tuple[str, ...]:
        """Return the findings so far and what is visible now; `inner` as of `DiLoCo.check`."""
        found = [*self.findings, *_of_parameters(engine), *self._of_buffers(engine)]
        places = [zip(f.views, params, strict=True) for f in engine.fragments for params in f.parameters()]
        if not all(torch.allclose(a.to(p), p, 0, 0, equal_nan=True) for place in places for a, p in place):
            found.append(
                f"the modules hold the replicas' own weights, {engine.inner_step} of {engine.inner_steps} inner steps "
                "into a round; save or evaluate the shared ones in `with engine.anchored() as module:`"
            )
        # One replica may have several optimizers, as Muon for matrices and AdamW for the rest.
        shares = [[*inner]] if len(engine.replicas) == 1 else [[optimizer] for optimizer in inner]
        if inner and len(shares) != len(engine.replicas):
            found.append(f"there are {len(engine.replicas)} replicas in this process, {len(inner)} inner optimizers")
        counts = Counter(id(p) for optimizer in inner for group in optimizer.param_groups for p in group["params"])
        for number, module in enumerate(engine.replicas if inner else ()):
            own = shares[number] if number < len(shares) else []
            optimized = {id(p) for optimizer in own for group in optimizer.param_groups for p in group["params"]}
            params = dict(module.named_parameters())
            if twice := [name for name, p in params.items() if counts[id(p)] > 1]:
                found.append(f"the inner optimizers hold {_some(twice)} of replica {number} more than once")
            if missing := [name for name, p in params.items() if p.requires_grad and id(p) not in optimized]:
                found.append(
                    f"the inner optimizer of replica {number} does not hold {_some(missing)}, which nothing trains"
                )
            if foreign := len(optimized - {id(p) for p in params.values()}):
                found.append(
                    f"the inner optimizer of replica {number} holds {foreign} parameters that are not the module's, as "
                    "after a copy or a move of the module"
                )
        return tuple(dict.fromkeys(found))

    def _of_buffers(self, engine: DiLoCo) -> list[str]:
        """Return a sentence on buffers that the loop changes and the engine does not average."""
        if engine.buffers == "mean" or engine.replica_count == 1:
            return []
        now = digests(engine.replicas[0])
        names = [name for name, before in self._buffers.items() if now.get(name, before) != before]
        remedy = "average them in your loop" if engine.group.sharded else 'DiLoCo(..., buffers="mean") averages them'
        return [f"the buffers {_some(names)} differ between replicas, and nothing averages them; {remedy}"] * bool(
            names
        )

    def _warn(self, findings: Iterable[str]) -> None:
        for finding in findings:
            if finding not in self.findings:
                self.findings.append(finding)
                _log.warning("DiLoCo: %s", finding)


def _of_parameters(engine: DiLoCo) -> Iterator[str]:
    """Yield a sentence on parameters that were unfrozen or frozen after the engine was built."""
    slots = [slot for fragment in engine.fragments for slot in fragment.slots[0]]
    if engine.group.sharded:
        reshard(engine.replicas)
    # By identity: a module that is wrapped later, as by torch.compile, gives the same parameters other names.
    known = {id(slot.parameter) for slot in slots}
    if late := [name for name, slot in slots_of(engine.replicas[0]).items() if id(slot.parameter) not in known]:
        yield f"{_some(late)} require a gradient since the engine was built, which does not synchronize them"
    if frozen := [slot.name for slot in slots if not slot.parameter.requires_grad]:
        yield f"{_some(frozen)} were frozen after the engine was built, and outer momentum still moves them"


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
