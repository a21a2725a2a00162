"""Checks of the engine: at the start, before and after each round, and of mistakes that raise no error.

Replicas that drift apart would train on unnoticed, so everything that ranks must share is compared by a few bytes.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import twophase
from twophase.diloco.fragment import Fragment, Slot, local, reshard, slots_of
from twophase.diloco.group import SingleProcess
from twophase.errors import RunError
from twophase.optim.outer_sgd import Dots, OuterSGD, rule_of
from twophase.restart import MEASURED

if TYPE_CHECKING:
    from twophase.diloco.engine import DiLoCo
    from twophase.diloco.report import RoundReport

_log = logging.getLogger("twophase")


class Disagreement(RunError):  # noqa: N818 - a public name
    """Ranks hold different bits that should be equal; the message names the fragment and the ranks."""


# ------------------------------------------------------------------------------------------------------ at the start


def check_replicas(
    replicas: Sequence[nn.Module], slots: Sequence[Mapping[str, Slot]], group: SingleProcess, buffers: str
) -> None:
    """Refuse replicas that cannot be synchronised."""
    if buffers not in ("local", "mean") or (buffers == "mean" and group.sharded):
        raise ValueError(f'DiLoCo: buffers must be "local" or, without shards, "mean", got {buffers!r}')
    if not slots or not slots[0]:
        raise ValueError("DiLoCo: replicas must be modules with at least one parameter that requires a gradient")
    for number, (replica, by_name) in enumerate(zip(replicas, slots, strict=True)):
        if any(isinstance(module, DistributedDataParallel) for module in replica.modules()):
            raise ValueError("DiLoCo: replicas holds a DistributedDataParallel, which averages gradients; pass .module")
        if {n: s.tensor().shape for n, s in by_name.items()} != {n: s.tensor().shape for n, s in slots[0].items()}:
            raise ValueError(f"DiLoCo: replica {number} has other trainable parameters than replica 0")
        if len({slot.device for slot in by_name.values()}) > 1:
            raise ValueError(f"DiLoCo: parameters of replica {number} must be on one device")
        shapes = [{n: b.shape for n, b in of.named_buffers() if b.is_floating_point()} for of in (replica, replicas[0])]
        if buffers == "mean" and shapes[0] != shapes[1]:
            raise ValueError(f'DiLoCo: buffers is "mean", and replica {number} has other buffers than replica 0')
    if len({id(slot.parameter) for by_name in slots for slot in by_name.values()}) < len(slots) * len(slots[0]):
        raise ValueError("DiLoCo: replicas share parameters; make a copy.deepcopy() of the module for each")
    for name, slot in slots[0].items():
        placements = getattr(slot.parameter, "placements", ())
        if bool(placements) != group.sharded or not all(placement.is_shard() for placement in placements):
            raise ValueError(
                f"DiLoCo: parameter {name!r} must be sharded by fully_shard(module, mesh=mesh['shard']) and "
                "group=ProcessGroup.of_mesh(mesh), or neither"
            )
        if slot.parameter.is_meta or not slot.parameter.is_floating_point():
            raise ValueError(f"DiLoCo: parameter {name!r} must hold floating-point values, is {slot.dtype}")


def assert_started_equal(engine: DiLoCo, expect_equal: Mapping[str, Any]) -> int:
    """Refuse to train unless all ranks were started with the same model, settings and versions; count the replicas.

    Frozen parameters are never sent, so a difference, as of the base model under an adapter, would stay unnoticed.
    """
    replica, group = engine.replicas[0], engine.group
    frozen = [p for p in replica.parameters() if not p.requires_grad and not p.is_meta]
    own = {
        "twophase": twophase.__version__,
        "torch": str(torch.__version__),
        **spec_of(engine),
        "frozen parameters": digest([local(p) for p in frozen]) if frozen and not group.sharded else "",
        "buffers": [[name, list(buffer.shape)] for name, buffer in replica.named_buffers()],
        "types": sorted({str(slot.dtype) for fragment in engine.fragments for slot in fragment.slots[0]}),
        "outer": {fragment.name: describe(fragment.outer) for fragment in engine.fragments},
        "filter": engine.filter,
        "averaged buffers": engine.buffers,
        "replicas of a rank": len(engine.replicas) if engine.buffers == "mean" else None,
    }
    if twice := own.keys() & expect_equal.keys():
        raise ValueError(f"DiLoCo: expect_equal must not hold {min(twice)!r}, which the engine compares itself")
    try:
        own = json.loads(json.dumps({**expect_equal, **own}))  # first what names an option
    except TypeError as error:
        raise ValueError(f"DiLoCo: expect_equal must hold JSON values: {error}") from None
    text = json.dumps(own, sort_keys=True).encode()
    hashes = group.gather_json([len(engine.replicas), hashlib.sha256(text).hexdigest()])
    fault = ""
    if any(row[1] != hashes[0][1] for row in hashes):  # only then sent: many parameters make it very long
        for rank, theirs in enumerate(group.gather_json(own)):
            if not fault and (difference := first_difference(own, theirs)):
                name, mine, other = difference
                fault = f"DiLoCo: {name} differs: {mine} on rank {group.rank}, {other} on rank {rank}"
    if group.sharded:  # the shards without a fault would wait for those that have raised it
        fault = next(filter(None, group.gather_json(fault, shards=True)), "")
    if fault:
        raise ValueError(fault)
    return sum(int(row[0]) for row in hashes)


def spec_of(engine: DiLoCo) -> dict[str, Any]:
    """Return what ranks, and an engine and its state, must have in common, as JSON values."""
    parts = [[f.name, [[name, list(view.shape)] for name, view in f.named]] for f in engine.fragments]
    names = ("inner_steps", "stagger", "delay", "mixing", "compression")
    return {name: getattr(engine, name) for name in names} | {"fragments": parts}


def describe(outer: Optimizer) -> list[str]:
    """Return rule and restart of each param group; of another optimizer its class and settings."""
    if isinstance(outer, OuterSGD):
        return [f"{rule_of(group).describe()}, restart {group['restart']}" for group in outer.param_groups]
    names = " and ".join(type(each).__name__ for each in getattr(outer, "optimizers", [outer]))
    return [f"{names} lr {float(g['lr']):g}, restart {g.get('restart', 'never')}" for g in outer.param_groups]


def first_difference(first: Any, second: Any, name: str = "") -> tuple[str, str, str] | None:
    """Return the place of the first difference between two JSON values, and both values there as text."""
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        pairs = [(f"{name} {key}".strip(), first.get(key), second.get(key)) for key in {**first, **second}]
    elif isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        pairs = [(name, a, b) for a, b in zip(first, second, strict=True)]
    else:
        return None if first == second else (name, f"{first!s:.200}", f"{second!s:.200}")
    return next((found for key, a, b in pairs if (found := first_difference(a, b, key))), None)


# ------------------------------------------------------------------------------------------------ before an outer step


def check_signals(fragments: Sequence[Fragment], signals: Mapping[str, float]) -> None:
    """Refuse signals that are no numbers, or that lack what a restart policy needs."""
    for name, value in signals.items():
        try:
            float(value)
        except (TypeError, ValueError, RuntimeError):  # the last of tensors with several elements
            raise ValueError(f"DiLoCo: signals[{name!r}] must be a number, got {value!r:.80}") from None
    for fragment in fragments:
        if missing := getattr(fragment.outer, "needs", MEASURED) - MEASURED - signals.keys():
            raise ValueError(f"DiLoCo: step(signals=...) must have {min(missing)!r}, which a restart policy needs")


def share_inputs(
    engine: DiLoCo, fragments: Sequence[Fragment], signals: Mapping[str, float]
) -> tuple[dict[str, float], list[list[Dots]] | None]:
    """Return the means of the signals over the replicas, and inner products of shards or for policies that measure.

    Equal bits need not give equal norms on unlike machines, which sum in different orders, and a restart policy at its
    threshold would decide differently on two ranks. So every `OuterSGD` decides by rank 0's. The ranks' places in their
    rounds are compared, too.
    """
    group, values = engine.group, {name: float(signals[name]) for name in sorted(signals)}
    dots = None
    if group.sharded or any(MEASURED & getattr(fragment.outer, "needs", set()) for fragment in fragments):
        dots = [
            f.outer.dots() if isinstance(f.outer, OuterSGD) else [(f.gradient.norm().item() ** 2, 0.0, 0.0)]
            for f in fragments
        ]
    if group.size == 1 and not group.sharded:
        return values, dots
    place = {"fragments": [[f.name, f.round + 1, f.launched] for f in fragments], "signals": list(values)}
    numbers, weights, fault = list(values.values()), [float(len(engine.replicas))], ""
    rows: list[Any] = []
    for shards in (True, False) if group.sharded else (False,):
        rows = group.gather_json([place, numbers, dots, weights, fault], shards=shards)
        fault = next((row[4] for row in rows if row[4]), "") or _unlike_places(rows, "shard" if shards else "rank")
        if fault and shards:
            continue  # the other replicas must learn of it, or they would wait for this one
        if fault:
            raise Disagreement(f"DiLoCo: {fault}")
        shares = [1.0] * len(rows) if shards else [row[3][0] for row in rows]
        columns = zip(*(row[1] for row in rows), strict=True)
        # Equal values stay unrounded, for they may stand at a policy's threshold.
        numbers = [
            column[0]
            if all(number == column[0] for number in column)
            else sum(share * number for share, number in zip(shares, column, strict=True)) / sum(shares)
            for column in columns
        ]
        if shards:
            of_fragments = zip(*(row[2] for row in rows), strict=True)
            dots = [
                [tuple(map(sum, zip(*parts, strict=True))) for parts in zip(*of_fragment, strict=True)]  # type: ignore[misc]
                for of_fragment in of_fragments
            ]
    return dict(zip(values, numbers, strict=True)), rows[0][2]


def _unlike_places(rows: Sequence[Any], kind: str) -> str:
    """Return in words the first difference between the ranks' rounds or names of signals."""
    for rank, (place, *_) in enumerate(rows):
        if difference := first_difference(rows[0][0], place):
            name, first, other = difference
            return f"{name} differ at a round's end: {first} on {kind} 0, {other} on {kind} {rank}"
    return ""


# ------------------------------------------------------------------------------------------------ after an outer step


def assert_equal_on_all_ranks(group: SingleProcess, fragments: Sequence[Fragment], anchors: Sequence[str]) -> None:
    """Compare anchors, by their digests, and outer optimizers between all ranks: a few bytes a round.

    Raises:
        Disagreement: two ranks differ, which both then raise.
    """
    if group.size == 1:
        return
    names = ("anchor", "outer state", "outer settings")
    digests = [(anchor, *of_optimizer(f.outer)) for f, anchor in zip(fragments, anchors, strict=True)]
    rows = group.gather_bytes("".join(map("".join, digests)).encode())
    fault = ""
    for rank, row in enumerate(rows):
        if row != rows[0] and not fault:
            differs = next(i for i in range(0, len(row), 16) if row[i : i + 16] != rows[0][i : i + 16]) // 16
            fragment, name = fragments[differs // 3].name, names[differs % 3]
            fault = f"{name} of fragment {fragment!r} differs between rank 0 and rank {rank}"
    if group.sharded:
        fault = next(filter(None, group.gather_json(fault, shards=True)), "")
    if fault:
        raise Disagreement(
            f"DiLoCo: after round {fragments[0].round} {fault}; look for code that changes it on one rank, or for "
            "faulty memory, and resume from the newest checkpoint"
        )


def digest(tensors: Sequence[Tensor]) -> str:
    """Return sixteen hexadecimal digits that depend on every bit of tensors and their order; on a CPU it is XXH3."""
    if not all(t.is_cpu for t in tensors):
        return digest_on_device(tensors)
    state = xxhash.xxh3_64()
    for t in tensors:
        state.update(t.detach().reshape(-1).contiguous().view(torch.uint8).numpy().data)
    return state.hexdigest()


def digest_on_device(tensors: Sequence[Tensor]) -> str:
    """As `digest`, by a few operations on any device, of which one number reaches the host.

    Each 64-bit word is mixed with its place by one-to-one functions, and the results are added up modulo 2^64. A single
    flipped bit changes one word, and so the sum.
    """
    device = next((t.device for t in tensors if not t.is_cpu), None)  # a step count may lie on the CPU
    total = torch.zeros((), dtype=torch.int64, device=device)
    for number, t in enumerate(tensors):
        for start, piece in enumerate(t.detach().reshape(-1).contiguous().view(torch.uint8).split(1 << 27)):
            if len(piece) % 8 or piece.storage_offset() % 8:  # torch reads eight bytes from multiples of eight alone
                piece = nn.functional.pad(piece, (0, -len(piece) % 8))  # noqa: PLW2901 - the same bytes
            words = piece.view(torch.int64)
            place = torch.arange(len(words), device=words.device).add_((number << 40) + (start << 24))
            word = words.bitwise_xor(place.mul_(_ODD[0])).mul_(_ODD[1])
            total += word.bitwise_xor_((word >> 32) & 0xFFFFFFFF).mul_(_ODD[0]).sum()
    return f"{total.item() % (1 << 64):016x}"


_ODD = (0x9E3779B97F4A7C15 - (1 << 64), 0xC2B2AE3D27D4EB4F - (1 << 64))
"""Odd 64-bit constants, of the golden ratio and of xxhash, as signed words."""


def of_optimizer(optimizer: Optimizer) -> tuple[str, str]:
    """Return the digests of an optimizer's tensors, and of its settings and counters."""
    states = [optimizer.state.get(p, {}) for group in optimizer.param_groups for p in group["params"]]
    tensors = [state[key] for state in states for key in sorted(state) if isinstance(state[key], Tensor)]
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    groups = [{k: v.tolist() if isinstance(v, Tensor) else v for k, v in group.items()} for group in groups]
    plain = [{key: value for key, value in state.items() if not isinstance(value, Tensor)} for state in states]
    text = json.dumps([groups, plain], sort_keys=True, default=lambda value: repr(value).partition(" at 0x")[0])
    return digest(tensors) if tensors else "0" * 16, hashlib.sha256(text.encode()).hexdigest()[:16]


# ---------------------------------------------------------------------------------------- mistakes without an error

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
        self._buffers = {} if engine.buffers == "mean" else _float_buffers(engine.replicas[0])
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
                self._before[name] = view.clone(), (view - theta.to(view.device)).double()
        if room > _MOST_NUMBERS - _FEWEST_NUMBERS:
            self._before = {}

    def after_sync(self, engine: DiLoCo, report: RoundReport) -> None:
        """Look at a sync's pseudo-gradient, and at the first sync's step."""
        if report.pseudo_gradient_norm == 0:
            self._warn([STILL])
        elif self._before:
            step = torch.cat([(a - engine.anchor[name]).double().flatten() for name, (a, _) in self._before.items()])
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
        now = _float_buffers(engine.replicas[0])
        names = [name for name, before in self._buffers.items() if name in now and not torch.equal(before, now[name])]
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


# ------------------------------------------------------------------------------------------------------------ buffers


def _float_buffers(module: nn.Module) -> dict[str, Tensor]:
    return {n: b.detach().to("cpu", copy=True) for n, b in module.named_buffers() if b.is_floating_point()}


@torch.no_grad()
def average_buffers(replicas: Sequence[nn.Module], group: SingleProcess) -> None:
    """Set the floating-point buffers of all replicas, such as BatchNorm's statistics, to their mean, in float64.

    Args:
        replicas: modules of this process, as many as on every other rank.
        group: ranks of the run.
    """
    buffers = [[b for _, b in module.named_buffers() if b.is_floating_point()] for module in replicas]
    if not buffers[0]:
        return
    device = buffers[0][0].device  # another replica may be elsewhere
    total = torch.zeros(sum(b.numel() for b in buffers[0]), dtype=torch.float64, device=device)
    for of_one in buffers:
        total += torch.cat([b.double().flatten().to(device) for b in of_one])
    group.all_reduce(total).wait()
    mean = total / (len(replicas) * group.size)
    for of_one in buffers:
        for b, part in zip(of_one, mean.split([b.numel() for b in of_one]), strict=True):
            b.copy_(part.view_as(b))
