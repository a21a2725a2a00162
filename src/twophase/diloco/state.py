"""The state of an engine: saved as tensors, numbers and text, and checked before it is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from twophase.diloco.checks import first_difference, spec_of
from twophase.rule import whole_number

if TYPE_CHECKING:
    from twophase.diloco.engine import DiLoCo

_COUNTERS = ("round", "inner_step", "taken", "syncs")


def saved(engine: DiLoCo) -> dict[str, Any]:
    """Return an engine's state; its tensors are live."""
    return {
        "anchor": engine.flat,
        "spec": spec_of(engine) | {"replicas": engine.replica_count},
        "fragments": [fragment.state_dict() for fragment in engine.fragments],
        **{name: getattr(engine, name) for name in _COUNTERS},
    }


@torch.no_grad()
def load(engine: DiLoCo, state: Mapping[str, Any]) -> None:
    """Load a state, or refuse it with a ValueError that names the difference and change nothing."""
    _check(engine, state)
    for fragment in engine.fragments:  # else it would write its sum into the loaded state
        fragment.settle()
    before = [fragment.outer.state_dict() for fragment in engine.fragments]
    try:
        for fragment, saved in zip(engine.fragments, state["fragments"], strict=True):
            fragment.outer.load_state_dict(saved["outer"])
    except Exception:  # of a later fragment: undo the earlier ones
        for fragment, outer in zip(engine.fragments, before, strict=True):
            fragment.outer.load_state_dict(outer)
        raise
    engine.flat.copy_(state["anchor"])
    for fragment, saved in zip(engine.fragments, state["fragments"], strict=True):
        fragment.load_state_dict(saved)
    for name in _COUNTERS:
        setattr(engine, name, state[name])


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
        sizes = [[len(g["params"]) for g in groups] for _, part in parts for groups in [part["outer"]["param_groups"]]]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{where} the state lacks {error}; pass what state_dict() returned") from None
    names = own if len(tensors) > 1 else ("fragments",)  # a reduction ends by the schedule that it began in
    if difference := first_difference({n: own[n] for n in names}, {n: spec.get(n) for n in names}):
        name, mine, other = difference
        raise ValueError(f"{where} {name} must be {mine} as in this engine, is {other} in the state")
    for name, value in counts.items():
        whole_number(f"{where} {name}", value, 0)
    if state["inner_step"] >= engine.inner_steps:
        raise ValueError(f"{where} inner_step must be below inner_steps, is {state['inner_step']} in the state")
    if unlike or sizes != [[len(group["params"]) for group in f.outer.param_groups] for f in fragments]:
        raise ValueError(f"{where} anchor, sums and param groups must have the shapes and types of this engine's")


@torch.no_grad()
def load_residuals(own: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    """Set residuals to saved ones of the same fragments and shapes, others to zero."""
    for name, residual in own.items():
        if name in saved and saved[name].shape != residual.shape:
            raise ValueError(f"DiLoCo: residuals of {name} must be {[*residual.shape]}, got {[*saved[name].shape]}")
    for name, residual in own.items():
        residual.copy_(saved[name]) if name in saved else residual.zero_()
