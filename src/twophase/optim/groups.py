"""Param groups of an outer optimizer: completed and checked where they enter, and reported in plain numbers."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from torch import Tensor

from twophase.optim.products import Angles
from twophase.policies.base import MEASURED, PROBES, Answer
from twophase.policies.text import parse
from twophase.rule import OuterRule, check_rule

COUNTERS = ("rounds", "rounds_since_restart", "restarts")


@dataclass(frozen=True, slots=True)
class GroupRound:
    """What a param group did in its last round.

    Args:
        restarted: whether its buffer restarted.
        pseudo_gradient_norm: Euclidean norm of g over the group.
        buffer_norm: Euclidean norm of m before g was mixed in.
        cosine: cosine of the angle between that m and g, 0 when either vanishes.
        gain: `<update, g> / <g, g>`, with update = x before - x after; 1 would be plain averaging. NaN when g = 0.
            (Of a policy that rewrites single coordinates, without that.)
        not_finite: what its restart policy needs and what was not finite: the run has diverged, and nothing restarted.
    """

    restarted: bool
    pseudo_gradient_norm: float
    buffer_norm: float
    cosine: float
    gain: float
    not_finite: tuple[str, ...] = ()


def rule_of(group: Mapping[str, Any]) -> OuterRule:
    """Return a group's rule."""
    return _rule(group["lr"], group["momentum"], group["nesterov"], group["form"])


_rule = functools.lru_cache(maxsize=64)(OuterRule)  # a schedule changes lr between rounds; a round asks several times


def candidates_of(groups: Sequence[Mapping[str, Any]]) -> int:
    """See `OuterSGD.candidate_count`."""
    policies = {str(p): p for group in groups if PROBES in (p := parse(group["restart"])).needs}
    if len(policies) > 1:
        raise ValueError(
            f"OuterSGD: the groups have different probing policies, {listed(policies)}; give all of them the same "
            "one: they are judged together"
        )
    if not policies:
        return 0
    rule = OuterRule(0.0, 0.0)  # how many there are does not depend on it
    return len(next(iter(policies.values())).candidates(rule))


def check_round(
    group: dict[str, Any], params: list[Tensor], signals: Mapping[str, float] | None, *, probes: bool
) -> None:
    """Refuse a round that the group cannot take."""
    if True in [p.grad.is_sparse for p in params if p.grad is not None]:
        raise ValueError("OuterSGD: a pseudo-gradient is sparse; make it dense with .to_dense() before the step")
    _check(group)  # a scheduler may have changed it; after the update would be too late
    policy = parse(group["restart"])
    missing = policy.needs - MEASURED - set(signals or ()) - ({PROBES} if probes else set())
    if missing:
        raise ValueError(f"OuterSGD: restart policy {policy} needs {listed(missing)}; {remedy(missing)}")
    check_signals("OuterSGD", {name: value for name, value in (signals or {}).items() if name in policy.needs})


def check_promised(group: Mapping[str, Any], promised: frozenset[str], of: str = "") -> None:
    """Refuse a policy that needs what is not promised.

    Args:
        group: a completed param group.
        promised: names that `signals=` gave at construction.
        of: the policy's origin, for the message.
    """
    missing = parse(group["restart"]).needs - MEASURED - promised
    if missing:
        raise ValueError(
            f"OuterSGD: {of}restart policy {group['restart']} needs {listed(missing)}; {remedy(missing)}, and promise "
            f"it at construction with signals={sorted(missing)!r}"
        )


def loaded_groups(
    state: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], promised: frozenset[str]
) -> list[dict[str, Any]]:
    """Return a state's param groups, checked and completed; a state of SGD keeps the policies of `groups`."""
    if not {"state", "param_groups"} <= set(state) or any("momentum" not in group for group in state["param_groups"]):
        raise ValueError(
            "OuterSGD: this is no state of an OuterSGD or a torch.optim.SGD, for its groups have no momentum; load "
            "what the state_dict() of one has returned"
        )
    loaded = []
    for index, group in enumerate(state["param_groups"]):
        for key in ("dampening", "weight_decay", "maximize"):
            if group.get(key):
                raise ValueError(f"OuterSGD: the loaded state has {key}={group[key]}; an outer step has no {key}")
        here = groups[index] if index < len(groups) else {}
        loaded.append({key: here[key] for key in ("restart", "together") if key in here} | group)
        complete_(loaded[-1])
        check_promised(loaded[-1], promised, "the loaded state's ")
    candidates_of(loaded)
    return loaded


def check_signals(where: str, signals: Mapping[str, Any]) -> None:
    """Raise a ValueError unless all values are numbers."""
    for name, value in signals.items():
        as_number(f"{where}: signals[{name!r}]", value)


def as_number(what: str, value: Any) -> float:
    """Return a loss or signal as a float; raise a ValueError where it is no number."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):  # the last of tensors with several elements
        raise ValueError(f"{what} is {value!r}; give a single number") from None


def remedy(missing: Collection[str]) -> str:
    """How to supply what a policy needs."""
    ways = []
    if set(missing) - {PROBES}:
        ways.append("pass them to step(signals=...), the same on every replica")
    if PROBES in missing:
        ways.append("pass the loss on a probe batch as a function, step(probe=...)")
    return " and ".join(ways)


def listed(names: Iterable[str]) -> str:
    """Return names in alphabetical order, as text."""
    return ", ".join(sorted(names))


def group_round(group: dict[str, Any], seen: Angles, answer: Answer) -> GroupRound:
    """The group's round in numbers; the gain follows from the angles because the update is linear in g and m."""
    norm = seen.pseudo_gradient_norm
    along = seen.cosine * seen.buffer_norm / norm if norm else math.nan  # <m, g> / <g, g>
    along_g, along_m = answer.weights(rule_of(group))
    gain = along_g + along_m * along
    return GroupRound(answer.restarted, norm, seen.buffer_norm, seen.cosine, gain, answer.not_finite)


def gradient_of(param: Tensor) -> Tensor:
    """Return the gradient of a parameter that has one."""
    assert param.grad is not None
    return param.grad


def complete_(group: dict[str, Any]) -> None:
    """Fill a param group's missing entries and check the others."""
    group.setdefault("form", "sum")
    group.setdefault("nesterov", False)
    group.setdefault("together", False)
    policy = parse(group.get("restart", "never"))
    group["restart"] = str(policy)
    for key in COUNTERS:
        group.setdefault(key, 0)
    group.setdefault("policy_state", policy.initial_state())
    if isinstance(group["policy_state"], str):
        group["policy_state"] = json.loads(group["policy_state"])
    _check(group)


def _check(group: dict[str, Any]) -> None:
    check_rule("OuterSGD", group["lr"], group["momentum"], group["form"], group["nesterov"])
    if parse(group["restart"]).effective(rule_of(group)).momentum != group["momentum"]:
        raise ValueError(
            f"OuterSGD: restart policy {group['restart']} needs a buffer, and at momentum 0 there is none; "
            "give any momentum above 0, which does not enter"
        )


def memory_text(memory: Mapping[str, float], policy: str) -> str:
    """A policy's memory as JSON."""
    try:
        return json.dumps(memory, default=lambda value: int(value) if isinstance(value, Integral) else float(value))
    except (TypeError, ValueError):
        raise TypeError(
            f"OuterSGD: restart policy {policy} remembers {memory!r}; a policy's memory must be numbers under names"
        ) from None


def plain_number(value: Any) -> Any:
    """A NumPy number as Python's own, which loading with `weights_only` takes; anything else as it is."""
    if isinstance(value, Integral) and type(value) not in (int, bool):
        return int(value)
    if isinstance(value, Real) and type(value) not in (int, bool, float):
        return float(value)
    return value
