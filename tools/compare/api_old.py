"""Every use of the package by the cases, in the names of e62799b0; `api_new` has those of today."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

import twophase
import twophase.theory
from suite import Outer
from twophase.diloco.comm import ProcessGroup
from twophase.restart import Restart, RestartPolicy, register

theory = twophase.theory

# ---------------------------------------------------------------------------------------------------------- rules


def rule(outer: Outer) -> Any:
    """Return the rule of a momentum method."""
    if outer.method == "averaging":
        return twophase.OuterRule(outer.lr, 0.0, form=outer.form)
    return twophase.OuterRule(outer.lr, outer.momentum, outer.method == "nesterov", outer.form)


def _slots(outer: Outer) -> dict[str, str]:
    """Return filter and schedule as this side's texts."""
    name, _, value = outer.filter.partition(":")
    texts = {"filter": f"clip:norm={value}" if name == "clip" else outer.filter}
    name, _, value = outer.schedule.partition(":")
    ends = {"constant": "", "linear": f":final={value}:rounds={outer.rounds}"}
    return texts | {"schedule": name + ends.get(name, f":start={value}:warmup={outer.rounds}")}


def _outer_value(outer: Outer) -> Any:
    """Return the outer optimizer as `DiLoCo` takes it."""
    if outer.method == "auto":
        return "auto"
    if outer.method in {"adamw", "muon"}:
        return twophase.outer(outer.method, lr=outer.lr, **_slots(outer))
    return twophase.outer(rule(outer), **_slots(outer))


@register("shrinking")
@dataclass(frozen=True)
class Shrinking(RestartPolicy):
    """A policy of the user's own: restart when g is shorter than a share of the longest so far, or opposes m."""

    share: float = 0.3
    needs: ClassVar[frozenset[str]] = frozenset({"pseudo_gradient_norm", "cosine"})

    def decide(self, state: Any, signal: Any) -> Any:
        """Compare lengths and direction."""
        g, cosine = signal.value("pseudo_gradient_norm"), signal.value("cosine")
        longest = max(g, state.get("longest", 0.0))
        return {"longest": longest}, Restart() if g < self.share * longest or cosine < -0.1 else None


# --------------------------------------------------------------------------------------------------------- engine


def engine(
    replicas: Sequence[nn.Module], outer: Outer | Callable[..., Any], restart: Any, mesh: Any, **options: Any
) -> Any:
    """Build a `DiLoCo`; options are inner_steps, fragments, stagger, delay, mixing, compression, buffers."""
    wire = options.pop("compression", "float32")
    restart = Shrinking() if restart == "own" else restart
    communicator = ProcessGroup.of_mesh(mesh) if mesh else None
    value = _outer_value(outer) if isinstance(outer, Outer) else outer
    return twophase.DiLoCo(replicas, value, restart=restart, wire=wire, communicator=communicator, **options)


def engine_state(engine: Any) -> dict[str, Any]:
    """Return all that a saved engine needs."""
    return {"wire": engine.wire_state_dict(), "engine": engine.state_dict()}


def load_engine_state(engine: Any, state: Mapping[str, Any]) -> None:
    """Continue from a saved state."""
    engine.load_state_dict(state["engine"])
    engine.load_wire_state_dict(state["wire"])


def outer_states(engine: Any) -> dict[str, dict[str, Any]]:
    """Return the outer optimizer's state of each parameter, by its name."""
    return {name: dict(fragment.outer.state.get(a, {})) for fragment in engine.fragments for name, a in fragment.named}


def report_numbers(report: Any) -> dict[str, Any]:
    """Return the numbers of a round's report, or of a line of rounds.jsonl, without seconds and digests."""
    values = report if isinstance(report, dict) else report.as_dict()

    def chosen(part: Mapping[str, Any], names: str) -> dict[str, Any]:
        return {name: part[name] for name in names.split()}

    measured = "restarted pseudo_gradient_norm buffer_norm cosine gain"
    numbers = chosen(values, f"round inner_steps partial complete replicas bytes_sent {measured}")
    numbers["fragments"] = [chosen(part, "name round inner_steps restarted") for part in values["fragments"]]
    return numbers | {"groups": [chosen(group, measured) for group in values["groups"]]}


# ------------------------------------------------------------------------------------------------------- OuterSGD


def outer_sgd(params: Any, outer: Outer, restart: Any = "never") -> Any:
    """Build an `OuterSGD`."""
    made = rule(outer)
    return twophase.OuterSGD(params, made.lr, made.momentum, nesterov=made.nesterov, form=made.form, restart=restart)


def momentum_buffers(optimizer: Any) -> list[Tensor]:
    """Return the buffers of an optimizer in the order of its parameters."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    states = [optimizer.state.get(p, {}) for p in params]
    return [state["momentum_buffer"] for state in states if "momentum_buffer" in state]


def counters(optimizer: Any) -> list[list[int]]:
    """Return rounds, rounds since the restart and restarts of each param group."""
    return [[group[n] for n in ("rounds", "rounds_since_restart", "restarts")] for group in optimizer.param_groups]


def torchft_diloco(manager: Any, model: nn.Module, inner: Any, outer: Outer, **options: Any) -> Any:
    """Build the integration's rounds in torchft's own `DiLoCo`."""
    from twophase.integrations.torchft import diloco  # noqa: PLC0415 - slow to import

    return diloco(manager, model, inner, rule(outer), **options)
