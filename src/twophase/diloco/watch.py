"""Mistakes of a training loop that raise no error: seen at a sync, or by `DiLoCo.check`."""

from __future__ import annotations

import logging
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any
from weakref import ReferenceType, WeakKeyDictionary, finalize, ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from twophase.diloco.digest import digest
from twophase.diloco.fragment import local, reshard, slots_of
from twophase.diloco.group import unjoined
from twophase.diloco.state import parameters_of
from twophase.optim.outer_sgd import rule_of
from twophase.restart import parse

if TYPE_CHECKING:
    from twophase.diloco.engine import DiLoCo
    from twophase.diloco.fragment import Fragment

_log = logging.getLogger("twophase")
_FEWEST_NUMBERS = 16
"""Elements that are compared at least, for fewer are alike by chance; of progress as many of each parameter."""
_SEEN_STEPS = 3
"""Steps of an inner optimizer, seen from outside, after which the next sync judges how often it steps."""
_ALIKE = 3e-4
"""Relative distance up to which the progress of two replicas is the same but for rounding."""
_NEAR, _SOME, _SOME_PARAMETERS = 0.3, 4096, 16
"""A copy is nearer to the parameters, in their norm, than the first, judged by as many elements of each and, where no
name tells which is whose, by as many of the largest parameters."""
LOST = "load a checkpoint of before, and look at its batches and its learning rate"


class Watch:
    """Looks for mistakes of a training loop that raise no error, in its first round, and by `DiLoCo.check`.

    `findings` has a sentence for each, and `news` those that rank 0 has not warned of.
    """

    def __init__(self, engine: DiLoCo) -> None:
        self.findings: list[str] = []
        self._group, self.news = engine.group, list[str]()
        self._steps: WeakKeyDictionary[Optimizer, list[int]] = WeakKeyDictionary()
        """For each optimizer of this process that steps in the first rounds, how often the engine had stepped then."""
        self._hook = register_optimizer_step_post_hook(partial(_note, ref(engine)))
        finalize(self, self._hook.remove)
        self._trains = False
        groups = [group for f in engine.fragments for group in f.outer.param_groups if "form" in group]
        ignored = [
            f"restart {group['restart']} takes the steps itself, and {rule_of(group).describe()} is ignored"
            for group in groups
            if parse(group["restart"]).takes_steps and (group["lr"], group["momentum"]) != (1, 0)
        ]
        self._warn([*unjoined(engine.group), *ignored])

    def before_sync(self, engine: DiLoCo) -> None:
        """Compare parameters and optimizers, before the first sync also buffers and what the replicas have learned."""
        self._warn(_of_parameters(engine))
        if self._steps:
            inner = self._inner(engine)
            self._trains = bool(inner)
            self._warn([*_of_steps(inner), *_of_copies(engine, inner or self._steps, syncing=True)])
            if any(len(steps) >= _SEEN_STEPS for steps in inner.values()):
                self._hook.remove()
                self._steps.clear()
        if engine.syncs == 0:
            self.compare(engine)
            if engine.replica_count > 1 and not engine.group.sharded:
                self._warn(_of_progress(engine))

    def compare(self, engine: DiLoCo) -> None:
        """Compare the buffers and frozen parameters of all replicas, which no sync sends."""
        if engine.replica_count > 1:
            rows = engine.group.gather_json([_unsent(engine, replica) for replica in engine.replicas])
            self._warn(_of_unsent([row for of_rank in rows for row in of_rank]))

    def after_outer_steps(self, engine: DiLoCo, fragments: Sequence[Fragment]) -> None:
        """Look at pseudo-gradients that are zero, or not finite, as a replica may be that still has its own values."""
        if all(f.norm == 0 for f in fragments) and not self._trains:  # a warmup may begin at a learning rate of 0
            still = "no parameter has moved in a round: the inner optimizer was not stepped, or holds others"
            self._warn([f"{still} (engine.check(inner=...) tells which)"])
        if all(math.isfinite(f.norm) for f in fragments) or any(LOST in finding for finding in self.findings):
            return
        of_replicas = enumerate(parameters_of(engine))
        lost = [f"replica {n}" for n, params in of_replicas if not all(p.isfinite().all() for p in params)]
        names = _some(lost) or "another replica, a filter or an overflow"
        self._warn([f"{names} made values that are not finite, which all replicas have taken now; {LOST}"])

    def check(self, engine: DiLoCo, inner: Sequence[Optimizer]) -> tuple[str, ...]:
        """Return the findings so far and what is visible now; `inner` as of `DiLoCo.check`."""
        found = [*self.findings, *_of_parameters(engine), *_of_steps(self._inner(engine)), *_of_copies(engine, inner)]
        found += _of_unsent([_unsent(engine, replica) for replica in engine.replicas])
        if inner:
            found += _of_places(engine, inner)
        return tuple(dict.fromkeys(found))

    def _inner(self, engine: DiLoCo) -> dict[Optimizer, list[int]]:
        """Return the optimizers seen that hold parameters of the replicas."""
        own = {id(p) for replica in engine.replicas for p in replica.parameters()}
        return {o: steps for o, steps in self._steps.items() if any(id(p) in own for p in _held(o))}

    def _warn(self, findings: Iterable[str]) -> None:
        """Note new findings for the next message between the ranks."""
        new = [finding for finding in dict.fromkeys(findings) if finding not in self.findings]
        self.findings += new
        self.news += new
        if self._group.size == 1:
            self.tell([self.news])

    def tell(self, news: Sequence[Sequence[str]]) -> None:
        """Warn, on rank 0, of the findings of each rank."""
        self.news, found = [], dict.fromkeys(finding for findings in news for finding in findings)
        for finding in found if self._group.rank == 0 else ():
            ranks = [str(rank) for rank, findings in enumerate(news) if finding in findings]
            where = f" (rank {', '.join(ranks)})" if len(ranks) < len(news) else ""
            _log.warning("DiLoCo: %s%s", finding, where)


def _note(engine: ReferenceType[DiLoCo], optimizer: Optimizer, *_: Any) -> None:
    """Note a step of any of torch's optimizers but the outer ones."""
    if not torch.compiler.is_compiling() and (alive := engine()) and not alive._closed:
        alive._watch._steps.setdefault(optimizer, []).append(alive.taken)


def _unsent(engine: DiLoCo, module: nn.Module) -> dict[str, str]:
    """Return the digests of a replica's frozen parameters and buffers by name."""
    tensors: dict[str, Tensor] = {}
    if not engine.group.sharded:
        tensors |= {n: p for n, p in module.named_parameters() if not (p.requires_grad or p.is_meta)}
    if engine.buffers != "mean":
        dense = {n: local(b).to_dense() for n, b in module.named_buffers() if b.is_floating_point() and not b.is_meta}
        tensors |= dense
    return {name: digest([t]) for name, t in tensors.items()}


def _of_unsent(rows: Sequence[Mapping[str, str]]) -> Iterator[str]:
    """Yield a sentence on tensors that are not the same in all replicas."""
    first, *others = rows
    if names := [name for name in first if any(row.get(name, first[name]) != first[name] for row in others)]:
        yield (
            f"the buffers or frozen parameters {_some(names)} differ between replicas, and no sync sends them; change "
            'them alike in all, or have buffers averaged by DiLoCo(..., buffers="mean"), without shards'
        )


def _held(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _of_progress(engine: DiLoCo) -> Iterator[str]:
    """Yield a sentence if all replicas have moved alike in the first round, by a few elements of each parameter."""
    anchor = _first_of(engine.anchor.values(), _FEWEST_NUMBERS)
    replicas = [_first_of(params, _FEWEST_NUMBERS) for params in parameters_of(engine)]
    rows = engine.group.gather_json([(anchor - theta).tolist() for theta in replicas])
    first, *others = (torch.tensor(row, dtype=torch.float64) for of_rank in rows for row in of_rank)
    near = [(first - other).norm() <= _ALIKE * first.norm() for other in others]
    sizes = (first / first.abs().max()).round(decimals=3).unique()  # steps of signs alone are alike by themselves
    if first.count_nonzero() >= _FEWEST_NUMBERS <= 2 * len(sizes) and all(near):
        yield "all replicas moved alike in the first round, as on the same batches; give each its own part of the data"


def _of_places(engine: DiLoCo, inner: Sequence[Optimizer]) -> Iterator[str]:
    """Yield a sentence on parameters that the inner optimizers lack, hold twice or hold besides."""
    count = len(engine.replicas)
    named = [
        (f"{name} of replica {number}" if count > 1 else name, p)
        for number, module in enumerate(engine.replicas)
        for name, p in module.named_parameters()
    ]
    held = Counter(id(p) for optimizer in inner for p in _held(optimizer))
    if twice := [name for name, p in named if held[id(p)] > 1]:
        yield f"the inner optimizers hold {_some(twice)} more than once"
    own = {id(p): p for _, p in named}
    if any(_holds_copies(optimizer, own) for optimizer in inner):
        return  # as named above, unless they are refreshed
    if missing := [name for name, p in named if p.requires_grad and id(p) not in held]:
        yield f"the inner optimizers do not hold {_some(missing)}, which nothing trains"
    if foreign := len(held.keys() - own.keys()):
        yield f"the inner optimizers hold {foreign} parameters that are no replica's, as after a copy or move of it"


def _of_steps(inner: Mapping[Optimizer, Sequence[int]]) -> Iterator[str]:
    """Yield a sentence if the engine counts several steps for each of the inner optimizers', which may take turns."""
    counts = sorted({count for steps in inner.values() for count in steps})
    if len(counts) >= _SEEN_STEPS and (gap := min(b - a for a, b in pairwise(counts))) > 1:
        yield f"engine.step() is called {gap} times for each inner.step(), as once a micro-batch; call it once after it"


def _of_copies(engine: DiLoCo, optimizers: Iterable[Any], *, syncing: bool = False) -> Iterator[str]:
    """Yield a sentence on optimizers that keep parameters of their own, which no sync changes.

    The state of torch's and of most other optimizers is far from the parameters. Copies, averages and second iterates
    of these are near.
    """
    own = {id(p): p for replica in engine.replicas for p in replica.parameters() if p.requires_grad}
    for optimizer in () if engine.after_sync else optimizers:
        kind, mode = type(optimizer).__name__, optimizer.param_groups[0].get("train_mode")
        copies: dict[str, list[tuple[Tensor, Tensor]]] = defaultdict(list)
        for p, memory in optimizer.state.items():
            for key, value in memory.items() if id(p) in own else ():
                if isinstance(value, Tensor) and value.is_floating_point() and local(value).numel() == local(p).numel():
                    copies[key].append((value, p))
        least = max(_FEWEST_NUMBERS, sum(p.numel() for p in optimizer.state if id(p) in own) / 2)
        near = [k for k, pairs in copies.items() if sum(p.numel() for _, p in pairs) >= least and _are_near(pairs)]
        if mode is not None and (syncing if mode else near):
            yield (
                f"{kind} is in train_mode at a sync, or keeps a second iterate, which no sync moves; twophase.training."
                "schedule_free.ScheduleFreeAdamW moves it, with eval() before engine.step() and train() after it"
            )
        elif (near and not mode) or _holds_copies(optimizer, own):
            kept = f", its state {near[0]!r}," if near else ""
            yield (
                f"{kind} has copies of the parameters{kept} which no sync changes; if its steps write them back they "
                "undo each sync: refresh them by a function in engine.after_sync, or give it the module's own"
            )


def _holds_copies(optimizer: Any, own: Mapping[int, Tensor]) -> bool:
    """Return whether an optimizer holds copies, apart or flattened, of parameters by id, and none of themselves."""
    held = _held(optimizer)
    largest = sorted(own.values(), key=Tensor.numel)[-_SOME_PARAMETERS:]
    return not any(id(q) in own for q in held) and any(
        q.numel() >= p.numel() and _are_near([(local(q).reshape(-1)[: local(p).numel()], p)])
        for q in held
        for p in largest
    )


def _are_near(pairs: Sequence[tuple[Tensor, Tensor]]) -> bool:
    """Return whether first elements of some tensors are far nearer to those of the second ones than these to zero."""
    first, second = (_first_of(tensors, _SOME) for tensors in zip(*pairs, strict=True))
    return bool((first - second).norm() < _NEAR * second.norm())


def _first_of(tensors: Iterable[Tensor], count: int) -> Tensor:
    return torch.cat([local(t).reshape(-1)[:count].cpu().double() for t in tensors])


def _of_parameters(engine: DiLoCo) -> Iterator[str]:
    """Yield a sentence on parameters that were unfrozen or frozen after the engine was built."""
    slots = [slot for fragment in engine.fragments for slot in fragment.slots[0]]
    # By identity: a module that is wrapped later, as by torch.compile, gives the same parameters other names.
    known = {id(slot.parameter) for slot in slots}
    tables = [module._parameters for module in engine.replicas[0].modules()]  # `parameters()` takes far longer
    if known == {id(p) for table in tables for p in table.values() if p is not None and p.requires_grad}:
        return
    reshard(engine.replicas)
    if late := [name for name, slot in slots_of(engine.replicas[0]).items() if id(slot.parameter) not in known]:
        yield f"{_some(late)} require a gradient since the engine was built, which does not synchronize them"
    if frozen := [slot.name for slot in slots if not slot.parameter.requires_grad]:
        yield f"{_some(frozen)} were frozen after the engine was built, and outer momentum still moves them"


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
