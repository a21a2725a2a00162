"""The state of an engine: saved as tensors, numbers and text, and checked before it is loaded.

An engine also sees what else is loaded into its replicas: weights that would count as progress, and the model's state
that a resumed run lacks, or has of another rank.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from twophase.diloco.checks import INTERRUPTED, REPLACED, first_difference, kind_of, meet, spec_of
from twophase.diloco.digest import digest
from twophase.diloco.fragment import local, reshard
from twophase.optim.outer_sgd import OWNERS, keep_types, owner_of

if TYPE_CHECKING:
    from twophase.diloco.engine import DiLoCo

COUNTERS = ("round", "inner_step", "taken", "syncs")
LATE = "weights were loaded into the modules after the engine was built, whose anchor has followed; load them before"
JUMP = "weights loaded after the engine was built count as progress; load them before, or the engine's state, too"
LACKING = "the modules lack the weights of the engine's state, from inside a round; load the model's state, too"
OWING = "the residuals of the compression were not loaded; pass what engine.residuals() returned to load_residuals()"
FOREIGN = "this rank resumes with the weights of rank {}, inside a round; save and load a checkpoint for each rank"


@dataclass
class Loads:
    """What was loaded into an engine and its replicas since the last step."""

    weights: list[str] | None = None
    """Digests of before the first load, or of a state that was loaded and of its `rank`."""
    rank: int | None = None
    outermost: nn.Module | None = None
    """The module that is being loaded with those inside it."""
    finding: str = ""
    owes: bool = False


def note_loads(engine: DiLoCo) -> None:
    """Take the parameters from an earlier engine, and note by hooks what is loaded into the modules."""
    for slot in (slot for fragment in engine.fragments for slots in fragment.slots for slot in slots):
        if (earlier := owner_of(slot.parameter)) is not None:
            earlier._closed = REPLACED
        OWNERS[slot.parameter] = weakref.ref(engine)
    modules = {module for replica in engine.replicas for module in replica.modules()}
    handles = [module.register_load_state_dict_pre_hook(_before_load) for module in modules]
    handles += [module.register_load_state_dict_post_hook(_after_load) for module in modules]
    for handle in handles:
        weakref.finalize(engine, handle.remove)


def _loaded(module: nn.Module) -> DiLoCo | None:
    """Return the engine of a module, none of a copy's, which has the same hooks, and none within `anchored()`."""
    engine = next(filter(None, map(owner_of, module.parameters())), None)
    return None if engine is None or engine._closed else engine


def _before_load(module: nn.Module, *_: Any) -> None:
    if engine := _loaded(module):
        loads = engine._loads
        loads.outermost = module if loads.outermost is None else loads.outermost
        loads.weights = weights(engine) if loads.weights is None else loads.weights


def _after_load(module: nn.Module, *_: Any) -> None:
    if (engine := _loaded(module)) and engine._loads.outermost is module:
        engine._loads.outermost = None
        _compare(engine)


@torch.no_grad()
def _compare(engine: DiLoCo) -> None:
    """Find out whether the weights are other ones now; those that are put back, as after an evaluation, are not."""
    loads, own = engine._loads, weights(engine)
    if len(own) != len(loads.weights or ()):
        return  # in the state the replicas were the anchor, or lay on other ranks
    is_same, loads.finding = own == loads.weights, ""
    if loads.rank not in (None, engine.group.rank):
        loads.finding = FOREIGN.format(loads.rank) if is_same else ""
    elif not is_same:
        loads.finding = JUMP if loads.rank is None else LACKING
    if loads.rank is None and engine.taken == 0:  # the anchor of an engine that has not begun follows
        torch._foreach_copy_([*engine.anchor.values()], parameters_of(engine)[0])
        loads.finding = LATE if loads.finding and len({*own}) == 1 else loads.finding


def tell_loads(engine: DiLoCo) -> None:
    """Warn of what was loaded since the last step."""
    loads, engine._loads = engine._loads, Loads()
    engine._watch._warn([loads.finding] * bool(loads.finding) + [OWING] * loads.owes)


def weights(engine: DiLoCo) -> list[str]:
    """Return the digest of each replica's parameters in this process."""
    reshard(engine.replicas)
    return [digest(params) for params in parameters_of(engine)]


def parameters_of(engine: DiLoCo) -> list[list[Tensor]]:
    """Return the parameters of each replica, also of a module that was cast after its training."""
    of_replicas = zip(*(fragment.slots for fragment in engine.fragments), strict=True)
    return [[local(slot.parameter) for slots in parts for slot in slots] for parts in of_replicas]


@torch.no_grad()
def load(engine: DiLoCo, state: Mapping[str, Any]) -> None:
    """Load a state, or refuse it with a ValueError that names the difference."""
    if engine._closed not in ("", INTERRUPTED):
        raise RuntimeError(engine._closed)
    _check(engine, state)
    meet(engine, "load_state_dict", [fragment for fragment in engine.fragments if fragment.halfway])
    for fragment in engine.fragments:  # else it would write its sum into the loaded state
        fragment.settle()
    engine._closed, engine._met = INTERRUPTED, None  # other ranks may load another state
    engine.flat.copy_(state["anchor"])
    for fragment, saved in zip(engine.fragments, state["fragments"], strict=True):
        fragment.outer.load_state_dict(saved["outer"])
        keep_types(fragment.outer, saved["outer"])
        fragment.load_state_dict(saved)
    for name in COUNTERS:
        setattr(engine, name, state[name])
    engine._closed = ""
    if engine.at_anchor:
        engine.restore()
    origin = state["spec"]
    engine._loads = Loads(origin.get("weights", []), origin.get("rank", engine.group.rank))
    engine._loads.owes = engine.compression == origin["compression"] != "float32" and engine.taken > 0
    _compare(engine)


def spec(engine: DiLoCo) -> dict[str, Any]:
    """Return what an engine and a state that it loads must have in common, as JSON values."""
    kinds = [kind_of(fragment.outer).replace("OuterSGD", "SGD") for fragment in engine.fragments]  # load each other's
    return spec_of(engine) | {"replicas": engine.replica_count, "outer": kinds}


def _check(engine: DiLoCo, state: Mapping[str, Any]) -> None:
    where, names = "DiLoCo.load_state_dict:", ["fragments", "outer", "anchor"]
    own = spec(engine) | {"anchor": f"{len(engine.flat)} {engine.flat.dtype}"}
    try:
        other, parts = {"outer": own["outer"]} | state["spec"], state["fragments"]  # a fork's spec has no outer
        other["anchor"] = f"{len(state['anchor'])} {state['anchor'].dtype}"
        has_begun = state["inner_step"] or any(part["steps"] for part in parts)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{where} the state lacks {error}; pass what state_dict() returned") from None
    if any("age" in part for part in parts):  # a reduction ends by the schedule that it began in
        names = [*own]
    elif has_begun:  # so does a round
        names += ["inner_steps", "stagger"]
    if difference := first_difference({n: own[n] for n in names}, {n: other.get(n) for n in names}):
        name, mine, theirs = difference
        raise ValueError(f"{where} {name} must be {mine} as in this engine, is {theirs} in the state")
