"""Find mistakes of a training loop that raise no error, in its first round or by `DiLoCo.check`.

The first round is checked without a message to other processes: a replica's progress is compared with the anchor's
step. With empty buffers that step is a multiple of the mean progress. If both are parallel up to rounding, the replicas
have moved alike, as they do on the same batches.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from twophase.diloco.communicator import Communicator
from twophase.diloco.fragment import slots_of
from twophase.diloco.report import RoundReport
from twophase.diloco.state import EngineState
from twophase.optim.outer import OuterSGD

_log = logging.getLogger("twophase")
_FEWEST_NUMBERS, _MOST_NUMBERS = 16, 1 << 20
"""Elements of a model that its first round compares; fewer than the first number are parallel by chance."""
_PARALLEL = 1e-7
"""Distance of a cosine from 1 within which two float32 directions are the same up to rounding."""
_MOST_NAMES = 4
STILL = (
    "no parameter has moved in a round: the inner optimizer was not stepped, or holds other parameters than the "
    "engine's module (engine.check(inner=…) tells which)"
)
ALIKE = (
    "all replicas moved alike in the first round, as they do on the same batches. Give each its own part of the data, "
    "by its rank or number"
)


class Watch:
    """Watch an engine's first sync, later syncs without progress, and buffers that it does not synchronize.

    Args:
        buffers: argument of the engine, "local" or "mean".
        replicas: modules of the engine in this process.
        communicator: processes of the engine.

    Attributes:
        findings: sentences, one for each mistake.
        alike: facts that all processes must share, by the words that name them.
    """

    def __init__(self, buffers: str, replicas: Sequence[nn.Module], communicator: Communicator) -> None:
        if not replicas:
            raise ValueError("DiLoCo: replicas is empty; pass at least one module")
        for replica in replicas:
            if not isinstance(replica, nn.Module):
                raise ValueError(
                    f"DiLoCo: replicas holds a {type(replica).__name__}; pass the module itself, or a list of modules"
                )
        if buffers not in ("local", "mean"):
            raise ValueError(f'DiLoCo: buffers is {buffers!r}; it must be "local" or "mean"')
        if buffers == "mean" and communicator.sharded:
            raise ValueError('DiLoCo: buffers is "mean"; with sharded replicas, it must be "local"')
        self.buffers = buffers
        self.alike: dict[str, object] = {}
        if buffers == "mean":  # processes with unlike buffers would wait in the all-reduce for ever
            shapes = [[[name, str(list(b.shape))] for name, b in float_buffers(module)] for module in replicas]
            if any(of_one != shapes[0] for of_one in shapes):
                raise ValueError('DiLoCo: buffers is "mean", and the replicas have other buffers; build them alike')
            self.alike = {"averaged buffers": shapes[0], "numbers of replicas": len(replicas)}
        self.findings: list[str] = []
        self._first_buffers = {} if buffers == "mean" else _on_cpu(replicas[0])
        """Buffers that training does not change, as of a rotary embedding, stay equal in all replicas."""
        self._names: list[str] = []
        self._before: list[tuple[Tensor, Tensor]] = []
        """Anchor and first replica's progress of some parameters, before the first sync."""

    def begin(self, engine: EngineState) -> None:
        """Record the state before the first sync; compare the parameters before every sync."""
        self._names, self._before = [], []  # a first sync that failed is recorded again
        if not engine.syncs and (finding := self._of_buffers(engine)):
            self._warn(finding)
        slots = [slot for fragment in engine.fragments for slot in fragment.slots[0]]
        tables = [module._parameters for module in engine.replicas[0].modules()]  # `parameters()` takes far longer
        training = {id(p) for table in tables for p in table.values() if p is not None and p.requires_grad}
        if training != {id(slot.parameter) for slot in slots}:
            for finding in _of_parameters(engine):
                self._warn(finding)
        if engine.syncs or not _is_comparable(engine):
            return
        first, *others = [dict(module.named_parameters()) for module in engine.replicas]
        if any(not torch.equal(first[n], other[n].to(first[n].device)) for other in others for n in engine.anchor):
            return  # the replicas of this process differ, as they should
        room = _MOST_NUMBERS
        for name, view in engine.anchor.items():
            if view.numel() <= room and view.shape == first[name].shape:
                room -= view.numel()
                self._names.append(name)
                self._before.append((view.clone(), (view - first[name].detach()).double()))
        if room > _MOST_NUMBERS - _FEWEST_NUMBERS:
            self._before = []

    def end(self, engine: EngineState, report: RoundReport) -> RoundReport:
        """Check a sync's pseudo-gradient, and the first sync's step; average the buffers where the engine must."""
        if report.complete and self.buffers == "mean":
            average_buffers(engine.replicas, engine.communicator)
        if report.pseudo_gradient_norm == 0:
            self._warn(STILL)
        elif self._before:
            steps = [view - engine.anchor[name] for name, (view, _) in zip(self._names, self._before, strict=True)]
            step = torch.cat([part.double().flatten() for part in steps])
            progress = torch.cat([part.flatten() for _, part in self._before])
            if torch.cosine_similarity(step, progress, dim=0) > 1 - _PARALLEL:
                self._warn(ALIKE)
        self._names, self._before = [], []
        return report

    def check(self, engine: EngineState, inner: Sequence[Optimizer], *, strict: bool) -> tuple[str, ...]:
        """Return mistakes and suspicions; arguments as of `DiLoCo.check`."""
        seen = tuple(dict.fromkeys([*self.findings, *self._look(engine, inner)]))
        if strict and seen:
            raise ValueError(f"DiLoCo.check: {'; '.join(seen)}")
        return seen

    def _look(self, engine: EngineState, inner: Sequence[Optimizer]) -> Iterator[str]:
        """Yield the mistakes that are visible now."""
        yield from _of_parameters(engine)
        if not (engine.at_anchor or (engine.inner_step == 0 and _is_anchor(engine))):
            yield (
                f"the modules hold the replicas' own weights, {engine.inner_step} of {engine.schedule.inner_steps} "
                "inner steps into a round. Save or evaluate the shared ones in `with engine.anchored() as module:`"
            )
        # One replica may have several optimizers, as Muon for matrices and AdamW for the rest.
        shares = [inner] if len(engine.replicas) == 1 else [[optimizer] for optimizer in inner]
        for number, (module, share) in enumerate(zip(engine.replicas, shares if inner else (), strict=False)):
            yield from _of_inner(module, share, number)
        if inner and len(shares) != len(engine.replicas):
            yield f"there are {len(engine.replicas)} replicas in this process and {len(inner)} inner optimizers"
        counts = Counter(id(p) for optimizer in inner for group in optimizer.param_groups for p in group["params"])
        for number, module in enumerate(engine.replicas):
            if twice := [name for name, p in module.named_parameters() if counts[id(p)] > 1]:
                yield (
                    f"the inner optimizers hold {_some(twice)} of replica {number} more than once, and step it as "
                    "often; leave one place for each"
                )
        if finding := self._of_buffers(engine):
            yield finding

    def _of_buffers(self, engine: EngineState) -> str:
        """Return a sentence on buffers that the loop changes and the engine does not average; "" without any."""
        if self.buffers == "mean" or engine.replica_count == 1:
            return ""
        now = _on_cpu(engine.replicas[0])
        names = [name for name, b in self._first_buffers.items() if name in now and not torch.equal(b, now[name])]
        if not names:
            return ""
        remedy = 'DiLoCo(…, buffers="mean") averages them once a round'
        if engine.communicator.sharded:  # where the engine cannot
            remedy = "take a norm without running statistics (LayerNorm, GroupNorm), or average them in your loop"
        return f"the buffers {_some(names)} differ between replicas and are not synchronized; {remedy}"

    def _warn(self, finding: str) -> None:
        if finding not in self.findings:
            self.findings.append(finding)
            _log.warning("DiLoCo: %s", finding)


def _of_parameters(engine: EngineState) -> Iterator[str]:
    """Yield a sentence on parameters that were unfrozen or frozen after the engine was built."""
    slots = [slot for fragment in engine.fragments for slot in fragment.slots[0]]
    # By identity: a module that is wrapped later, as by torch.compile, gives the same parameters other names.
    synchronized = {id(slot.parameter) for slot in slots}
    if late := [slot.name for slot in slots_of(engine.replicas[0]) if id(slot.parameter) not in synchronized]:
        yield (
            f"{_some(late)} were unfrozen or put in after the engine was built, which does not synchronize them; "
            "build the engine again"
        )
    if frozen := [slot.name for slot in slots if not slot.parameter.requires_grad]:
        yield (
            f"{_some(frozen)} were frozen after the engine was built, and outer momentum still moves them; build "
            "the engine again"
        )


def _is_anchor(engine: EngineState) -> bool:
    """Return whether the replicas equal the anchor by value, as with mixing at the beginning and at the end."""
    return not engine.communicator.sharded and all(
        torch.equal(view.to(p.dtype), p.detach().to(view.device))
        for fragment in engine.fragments
        for parameters in fragment.params
        for view, p in zip(fragment.anchor_views, parameters, strict=True)
    )


def _is_comparable(engine: EngineState) -> bool:
    """Return whether the anchor's first step is parallel to the mean progress, in precise enough numbers."""
    return (
        engine.replica_count > 1
        and not engine.communicator.sharded
        and len(engine.fragments) == 1
        and not engine.fragments[0].channel.lossy
        and isinstance(engine.fragments[0].outer, OuterSGD)
        and all(p.dtype in (torch.float32, torch.float64) for p in engine.replicas[0].parameters())
    )


def _of_inner(module: nn.Module, optimizers: Sequence[Optimizer], number: int) -> Iterator[str]:
    """Compare the parameters of a replica's optimizers with those of its module; frozen ones do no harm in them."""
    several = len(optimizers) > 1
    name = "the inner optimizers" if several else f"the inner optimizer of replica {number}"
    optimized = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    params = {id(p): (key, p) for key, p in module.named_parameters()}
    if missing := [key for identity, (key, p) in params.items() if p.requires_grad and identity not in optimized]:
        lacks = "do not hold" if several else "does not hold"
        yield f"{name} {lacks} {_some(missing)}, which the engine synchronizes and nothing trains"
    if foreign := len(optimized - params.keys()):
        holds = "hold" if several else "holds"
        yield f"{name} {holds} {foreign} parameters that are not the module's, as after a copy or a move of the module"


def _some(names: Iterable[str]) -> str:
    names = list(names)
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more


# -------------------------------------------------------------------------------------------------------------- buffers


def float_buffers(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the buffers that training changes by small amounts, such as BatchNorm's running statistics."""
    return [(name, buffer) for name, buffer in module.named_buffers() if buffer.is_floating_point()]


def _on_cpu(module: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.detach().to("cpu", copy=True) for name, buffer in float_buffers(module)}


@torch.no_grad()
def average_buffers(replicas: Sequence[nn.Module], communicator: Communicator) -> None:
    """Set the floating-point buffers of all replicas to their mean, in float64.

    Args:
        replicas: modules of this process, as many as in every other process.
        communicator: processes of the run.
    """
    buffers = [[buffer for _, buffer in float_buffers(module)] for module in replicas]
    if not buffers[0]:
        return
    count = len(replicas) * communicator.size
    device = buffers[0][0].device  # a replica may be elsewhere
    total = torch.zeros(sum(buffer.numel() for buffer in buffers[0]), dtype=torch.float64, device=device)
    for of_one in buffers:
        total += torch.cat([buffer.double().flatten().to(device) for buffer in of_one])
    communicator.launch_sum(total).wait()
    mean = total / count
    for of_one in buffers:
        for buffer, part in zip(of_one, mean.split([buffer.numel() for buffer in of_one]), strict=True):
            buffer.copy_(part.view_as(buffer))
