"""The state of an engine: saved as tensors, numbers and text, and checked before it is loaded.

An engine also sees what else is loaded into its replicas: weights that would count as progress, and the model's state
that a resumed run lacks, or has of another rank.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from twophase.diloco.checks import first_difference, kind_of, meet, spec_of
from twophase.diloco.digest import digest
from twophase.diloco.fragment import local, reshard
from twophase.optim.outer_sgd import OWNERS, keep_types, owner_of

if TYPE_CHECKING:
    from twophase.diloco.engine import DiLoCo

COUNTERS = ("round", "inner_step", "taken", "syncs")
LATE = "weights were loaded into the modules after the engine was built, whose anchor has followed; load them before"
JUMP = (
    "weights were loaded into the modules after the engine was built and count as progress of this round; load them "
    "into all replicas before, or load the engine's state of the same checkpoint, too"
)
LACKING = (
    "the engine's state is from inside a round, and the modules do not hold the weights that it was saved with; load "
    "the model's state of the same checkpoint, too"
)
OWING = "the residuals of the compression were not loaded; pass what engine.residuals() returned to load_residuals()"
FOREIGN = "this rank resumes with the weights of rank {}, inside a round; save and load a checkpoint for each rank"


class Loads:
    """What is loaded into an engine's replicas: noted by hooks on their modules, told at the next step.

    The engine takes the parameters from an earlier one. The anchor of an engine that has not begun follows the first
    replica's weights. Weights that others replace for an evaluation, and that are put back, are none.
    """

    def __init__(self, engine: DiLoCo) -> None:
        self._forget()
        for slot in (slot for fragment in engine.fragments for slots in fragment.slots for slot in slots):
            if (earlier := owner_of(slot.parameter)) is not None:
                earlier._is_replaced = True
            OWNERS[slot.parameter] = weakref.ref(engine)
        modules = {module for replica in engine.replicas for module in replica.modules()}
        handles = [module.register_load_state_dict_pre_hook(partial(_on_load, Loads.before)) for module in modules]
        handles += [module.register_load_state_dict_post_hook(partial(_on_load, Loads.after)) for module in modules]
        weakref.finalize(engine, lambda: [handle.remove() for handle in handles])

    def _forget(self) -> None:
        self._loading: nn.Module | None = None
        """The outermost module that is being loaded."""
        self._weights: list[str] | None = None
        """Digests of before the first load since the last step, or of a state that was loaded and of its `_rank`."""
        self._rank: int | None = None
        self._finding, self.owes = "", False

    def before(self, engine: DiLoCo, module: nn.Module) -> None:
        """Note the weights before others are loaded."""
        self._loading = module if self._loading is None else self._loading
        if self._weights is None:
            self._weights = weights(engine)

    def after(self, engine: DiLoCo, module: nn.Module) -> None:
        """Compare the weights once all modules are loaded."""
        if module is self._loading:
            self._loading = None
            self._compare(engine)

    def resume(self, engine: DiLoCo, spec: Mapping[str, Any]) -> None:
        """Note that a state was loaded; the modules' may be loaded before or after it."""
        self._forget()
        self._weights, self._rank = spec.get("weights", []), spec.get("rank", engine.group.rank)
        self.owes = engine.compression == spec.get("compression") != "float32" and engine.taken > 0
        self._compare(engine)

    @torch.no_grad()
    def _compare(self, engine: DiLoCo) -> None:
        own, is_own = weights(engine), self._rank in (None, engine.group.rank)
        if len(own) != len(self._weights or ()):
            return  # in the state the replicas were the anchor, or lay on other ranks
        is_same, self._finding = own == self._weights, ""
        if is_own and not is_same:
            self._finding = JUMP if self._rank is None else LACKING
        elif is_same and not is_own:
            self._finding = FOREIGN.format(self._rank)
        if self._rank is None and engine.taken == 0:
            torch._foreach_copy_([*engine.anchor.values()], _parameters(engine, 0))
            self._finding = LATE if self._finding and len({*own}) == 1 else self._finding

    def tell(self, engine: DiLoCo) -> None:
        """Warn of what was loaded since the last step."""
        if self._weights is not None:
            engine._watch._warn([self._finding] * bool(self._finding) + [OWING] * self.owes)
            self._forget()


def _on_load(act: Callable[[Loads, DiLoCo, nn.Module], None], module: nn.Module, *_: Any) -> None:
    engine = next(filter(None, map(owner_of, module.parameters())), None)  # none of a copy, which has the same hooks
    if engine and not engine._showing:
        act(engine._loads, engine, module)


# ---------------------------------------------------------------------------------------------------- saved and loaded


def weights(engine: DiLoCo) -> list[str]:
    """Return the digest of each replica's parameters in this process."""
    reshard(engine.replicas)
    return [digest(_parameters(engine, number)) for number in range(len(engine.replicas))]


def _parameters(engine: DiLoCo, number: int) -> list[Tensor]:  # also of a module that was cast after its training
    return [local(slot.parameter) for fragment in engine.fragments for slot in fragment.slots[number]]


@torch.no_grad()
def load(engine: DiLoCo, state: Mapping[str, Any]) -> None:
    """Load a state, or refuse it with a ValueError that names the difference."""
    _check(engine, state)
    meet(engine, "load_state_dict", [fragment for fragment in engine.fragments if fragment.halfway])
    for fragment in engine.fragments:  # else it would write its sum into the loaded state
        fragment.settle()
    engine._interrupted, engine._met = True, None  # other ranks may load another state
    engine.flat.copy_(state["anchor"])
    for fragment, saved in zip(engine.fragments, state["fragments"], strict=True):
        fragment.outer.load_state_dict(saved["outer"])
        keep_types(fragment.outer, saved["outer"])
        fragment.load_state_dict(saved)
    for name in COUNTERS:
        setattr(engine, name, state[name])
    engine._interrupted = False
    if engine.at_anchor:
        engine.restore()
    engine._loads.resume(engine, state["spec"])


def spec(engine: DiLoCo) -> dict[str, Any]:
    """Return what an engine and a state that it loads must have in common, as JSON values."""
    kinds = [kind_of(fragment.outer).replace("OuterSGD", "SGD") for fragment in engine.fragments]  # load each other's
    return spec_of(engine) | {"replicas": engine.replica_count, "outer": kinds}


def _check(engine: DiLoCo, state: Mapping[str, Any]) -> None:
    where, own, names = "DiLoCo.load_state_dict:", spec(engine), ("fragments", "outer")
    try:
        other, parts = {"outer": own["outer"]} | state["spec"], state["fragments"]
        has_begun = state["inner_step"] or any(part["steps"] for part in parts)
        tensors = [(engine.flat, state["anchor"])]
        tensors += [
            (f.gradient, part["sum"]) for f, part in zip(engine.fragments, parts, strict=False) if "age" in part
        ]
        is_unlike = any((a.shape, a.dtype) != (b.shape, b.dtype) for a, b in tensors)
        is_unlike |= any(len(part.get("weights") or engine.replicas) != len(engine.replicas) for part in parts)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{where} the state lacks {error}; pass what state_dict() returned") from None
    if len(tensors) > 1:  # a reduction ends by the schedule that it began in
        names = tuple(own)
    elif has_begun:  # so does a round
        names += ("inner_steps", "stagger")
    if difference := first_difference({n: own[n] for n in names}, {n: other.get(n) for n in names}):
        name, mine, theirs = difference
        raise ValueError(f"{where} {name} must be {mine} as in this engine, is {theirs} in the state")
    if is_unlike:
        raise ValueError(f"{where} anchor, sums and weights must have the shapes and types of this engine's")
