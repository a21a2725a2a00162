"""The state of an engine: saved as tensors, numbers and text, and checked before it is loaded.

An engine also sees what else is loaded into its replicas: weights that would count as progress, and the model's state
that a resumed run lacks, or has of another rank.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from twophase.diloco.checks import INTERRUPTED, first_difference, kind_of, meet, spec_of
from twophase.diloco.digest import digest
from twophase.diloco.fragment import local, reshard
from twophase.optim.outer_sgd import OWNERS, keep_types, owner_of
from twophase.rule import whole_number

if TYPE_CHECKING:
    from twophase.diloco.engine import DiLoCo

_COUNTERS = ("round", "inner_step", "taken", "syncs")
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
        self._places: dict[int, list[tuple[int, Tensor, list[Tensor]]]] = {}
        """By module: the replica that it is in, and of its parameters the anchor and all replicas' own."""
        self._before: dict[int, str] = {}
        self._jumps: set[int] = set()
        self._is_late = False
        self.spec: Mapping[str, Any] | None = None
        """Of a state that was loaded since the last step."""
        self._lacks, self.owes = "", False
        modules: dict[int, nn.Module] = {id(replica): replica for replica in engine.replicas}
        for fragment in engine.fragments:
            for view, *slots in zip(fragment.views, *fragment.slots, strict=True):
                for number, slot in enumerate(slots):
                    place = (number, view, [each.parameter for each in slots])
                    self._places.setdefault(id(slot.module), []).append(place)
                    modules[id(slot.module)] = slot.module
                    if (earlier := owner_of(slot.parameter)) is not None:
                        earlier._is_replaced = True
                    OWNERS[slot.parameter] = weakref.ref(engine)
        handles = [module.register_load_state_dict_pre_hook(_before_load) for module in modules.values()]
        handles += [module.register_load_state_dict_post_hook(_after_load) for module in modules.values()]
        weakref.finalize(engine, lambda: [handle.remove() for handle in handles])

    def _digest(self, module: nn.Module) -> str:
        return digest([local(params[number]) for number, _, params in self._places.get(id(module), [])])

    def before(self, module: nn.Module) -> None:
        """Note a module's weights before it loads others."""
        if self.spec is None:
            self._before.setdefault(id(module), self._digest(module))

    @torch.no_grad()
    def after(self, engine: DiLoCo, module: nn.Module) -> None:
        """Compare a module's weights after a load with those before."""
        if self.spec is not None:  # a resumed run, whose modules may be loaded before or after
            self._lacks = self._lacking(engine) if module in engine.replicas else ""
            return
        places, key = self._places.get(id(module), []), id(module)
        is_jump = self._digest(module) != self._before.get(id(module))
        if is_jump and engine.taken == 0:
            key = id(places[0][1])
            for number, view, params in places:
                if number == 0:
                    view.copy_(local(params[0]))
                    self._is_late = True
            pairs = [(local(p), view) for _, view, params in places for p in params]
            is_jump = any(not torch.equal(p, view.to(p)) for p, view in pairs)
        (self._jumps.add if is_jump else self._jumps.discard)(key)

    def resume(self, engine: DiLoCo, spec: Mapping[str, Any]) -> None:
        """Note that a state was loaded; look for its weights in the modules."""
        self.spec, self._is_late, self._jumps = spec, False, set()
        self.owes = engine.compression == spec.get("compression") != "float32" and engine.taken > 0
        self._lacks = self._lacking(engine)

    def _lacking(self, engine: DiLoCo) -> str:
        spec, count = self.spec or {}, len(engine.replicas)
        if len(spec.get("weights", ())) != count:  # the replicas were the anchor, or lay on other ranks
            return ""
        saved, own, rank = spec["weights"], weights(engine), spec["rank"]
        if rank == engine.group.rank:
            return LACKING if saved != own else ""
        return FOREIGN.format(rank) if {*saved} & {*own} else ""

    def tell(self, engine: DiLoCo) -> None:
        """Warn of what was loaded since the last step."""
        if self._before or self.spec is not None:
            found = {self._lacks: self._lacks, JUMP: self._jumps, LATE: self._is_late, OWING: self.owes}
            engine._watch._warn(finding for finding, is_so in found.items() if is_so)
            self._before, self._jumps, self._is_late, self.spec, self._lacks = {}, set(), False, None, ""
            self.owes = False


def _before_load(module: nn.Module, *_: Any) -> None:  # functions, which a copy of the module may share
    if (engine := _engine_of(module)) and not engine._showing:
        engine._loads.before(module)


def _after_load(module: nn.Module, _: Any) -> None:
    if (engine := _engine_of(module)) and not engine._showing:
        engine._loads.after(engine, module)


def _engine_of(module: nn.Module) -> DiLoCo | None:
    return next(filter(None, map(owner_of, module.parameters())), None)


def refuse_copy(_: DiLoCo) -> Any:
    """Refuse to copy or pickle an engine."""
    raise TypeError("DiLoCo: an engine is not copied or pickled; build another and load_state_dict() its state_dict()")


# ---------------------------------------------------------------------------------------------------- saved and loaded


def weights(engine: DiLoCo) -> list[str]:
    """Return the digest of each replica's parameters in this process."""
    reshard(engine.replicas)
    parts = [fragment.parameters() for fragment in engine.fragments]
    return [digest([p for of_replicas in parts for p in of_replicas[number]]) for number in range(len(engine.replicas))]


def saved(engine: DiLoCo) -> dict[str, Any]:
    """Return an engine's state; its tensors are live."""
    if engine._interrupted:
        raise RuntimeError(INTERRUPTED)
    meet(engine, "state_dict", [fragment for fragment in engine.fragments if fragment.halfway])
    spec = spec_of(engine) | {"replicas": engine.replica_count, "outer": _kinds(engine)}
    if not engine.at_anchor:
        spec |= {"rank": engine.group.rank, "weights": weights(engine)}
    return {
        "anchor": engine.flat,
        "spec": spec,
        "fragments": [fragment.state_dict() for fragment in engine.fragments],
        **{name: getattr(engine, name) for name in _COUNTERS},
    }


@torch.no_grad()
def load(engine: DiLoCo, state: Mapping[str, Any]) -> None:
    """Load a state, or refuse it with a ValueError that names the difference and change nothing."""
    _check(engine, state)
    meet(engine, "load_state_dict", [fragment for fragment in engine.fragments if fragment.halfway])
    for fragment in engine.fragments:  # else it would write its sum into the loaded state
        fragment.settle()
    before = [fragment.outer.state_dict() for fragment in engine.fragments]
    try:
        for fragment, saved in zip(engine.fragments, state["fragments"], strict=True):
            fragment.outer.load_state_dict(saved["outer"])
            keep_types(fragment.outer, saved["outer"])
    except Exception:  # of a later fragment: undo the earlier ones
        for fragment, outer in zip(engine.fragments, before, strict=True):
            fragment.outer.load_state_dict(outer)
        raise
    engine.flat.copy_(state["anchor"])
    for fragment, saved in zip(engine.fragments, state["fragments"], strict=True):
        fragment.load_state_dict(saved)
    for name in _COUNTERS:
        setattr(engine, name, state[name])
    engine._interrupted, engine._met = False, None  # other ranks may have loaded another state
    if engine.at_anchor:
        engine.restore()
    engine._loads.resume(engine, state["spec"])


def _kinds(engine: DiLoCo) -> list[str]:
    return [
        kind_of(fragment.outer).replace("OuterSGD", "SGD") for fragment in engine.fragments
    ]  # which load each other


def _check(engine: DiLoCo, state: Mapping[str, Any]) -> None:
    where, fragments = "DiLoCo.load_state_dict:", engine.fragments
    try:
        own, spec = spec_of(engine) | {"replicas": engine.replica_count}, dict(state["spec"])
        parts = list(zip(fragments, state["fragments"], strict=False))
        counts = {name: state[name] for name in _COUNTERS}
        tensors = [(engine.flat, state["anchor"])]
        for fragment, part in parts:
            if missing := {"state", "param_groups"} - part["outer"].keys():
                raise KeyError(min(missing))  # below
            counts |= {f"{name} of fragment {part['name']}": part[name] for name in ("round", "steps")}
            if "age" in part:
                counts |= {
                    f"{name} of fragment {part['name']}": part[name] for name in ("age", "launched", "bytes_sent")
                }
                tensors.append((fragment.gradient, part["sum"]))
        unlike = any((a.shape, a.dtype) != (b.shape, b.dtype) for a, b in tensors)
        unlike |= any(len(part.get("weights", engine.replicas)) != len(engine.replicas) for _, part in parts)
        sizes = [[len(g["params"]) for g in groups] for _, part in parts for groups in [part["outer"]["param_groups"]]]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{where} the state lacks {error}; pass what state_dict() returned") from None
    for name, value in counts.items():
        whole_number(f"{where} {name}", value, 0)
    own["outer"] = kinds = _kinds(engine)
    spec, names = {"outer": kinds} | spec, ("fragments", "outer")
    if len(tensors) > 1:  # a reduction ends by the schedule that it began in
        names = tuple(own)
    elif state["inner_step"] or any(part["steps"] for _, part in parts):  # so does a round
        names += ("inner_steps", "stagger")
    if difference := first_difference({n: own[n] for n in names}, {n: spec.get(n) for n in names}):
        name, mine, other = difference
        raise ValueError(f"{where} {name} must be {mine} as in this engine, is {other} in the state")
    if state["inner_step"] >= engine.inner_steps:
        raise ValueError(f"{where} inner_step must be below inner_steps, is {state['inner_step']} in the state")
    if unlike or sizes != [[len(group["params"]) for group in f.outer.param_groups] for f in fragments]:
        raise ValueError(
            f"{where} anchor, sums, weights and param groups must have the shapes and types of this engine's"
        )


@torch.no_grad()
def load_residuals(engine: DiLoCo, saved: Mapping[str, Tensor]) -> None:
    """Set residuals to saved ones of the same fragments and shapes, others to zero."""
    own = engine.residuals()
    for name, residual in own.items():
        if name in saved and saved[name].shape != residual.shape:
            raise ValueError(f"DiLoCo: residuals of {name} must be {[*residual.shape]}, got {[*saved[name].shape]}")
    for name, residual in own.items():
        residual.copy_(saved[name]) if name in saved else residual.zero_()
    engine._loads.owes = False
