"""Complete, check and report the param groups of an outer optimizer."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from twophase.optim.products import Angles
from twophase.policies.base import MEASURED, Answer
from twophase.policies.checks import check_count
from twophase.policies.text import parse
from twophase.rule import OuterRule, check_rule

COUNTERS = ("rounds", "rounds_since_restart", "restarts")


@dataclass(frozen=True, slots=True)
class GroupRound:
    """Describe the last round of a param group.

    Args:
        restarted: True if its buffer restarted.
        pseudo_gradient_norm: Euclidean norm of g over the group.
        buffer_norm: Euclidean norm of m before g was mixed in.
        cosine: cosine of the angle between that m and g, 0 when either vanishes.
        gain: `<update, g> / <g, g>`, with update = x before - x after; 1 would be plain averaging. NaN when g = 0.
            (Behind an engine's filter all five are of its g.)
        not_finite: needs of its restart policy that were not finite: the run has diverged, and nothing restarted.
    """

    restarted: bool
    pseudo_gradient_norm: float
    buffer_norm: float
    cosine: float
    gain: float
    not_finite: tuple[str, ...] = ()

    @classmethod
    def of(cls, group: Mapping[str, Any], angles: Angles, answer: Answer) -> GroupRound:
        """Return the round in numbers; the gain follows from the angles because the update is linear in g and m."""
        norm = angles.pseudo_gradient_norm
        along = angles.cosine * angles.buffer_norm / norm if norm else math.nan  # <m, g> / <g, g>
        along_g, along_m = answer.weights(rule_of(group))
        gain = along_g + along_m * along
        return cls(answer.restarted, norm, angles.buffer_norm, angles.cosine, gain, answer.not_finite)


def rule_of(group: Mapping[str, Any]) -> OuterRule:
    """Return a group's rule; raise a ValueError if it has none."""
    return _rule(group["lr"], group["momentum"], group["nesterov"], group["form"])


@functools.lru_cache(maxsize=64)  # a schedule changes lr between rounds; a round asks several times
def _rule(lr: Any, momentum: Any, nesterov: Any, form: Any) -> OuterRule:
    check_rule("OuterSGD", lr, momentum, form, nesterov)
    return OuterRule(lr, momentum, nesterov, form)


def complete_(group: dict[str, Any]) -> None:
    """Fill a param group's missing entries and check the present ones."""
    policy = parse(group.get("restart", "never"))
    memory = group.get("policy_state", policy.initial_state())
    group |= {"form": "sum", "nesterov": False, **dict.fromkeys(COUNTERS, 0)} | group
    if isinstance(memory, str):
        try:
            memory = json.loads(memory)
        except (ValueError, RecursionError) as error:
            message = f"OuterSGD: the loaded policy's memory cannot be read ({error}); load what was saved"
            raise ValueError(message) from None
    group |= {"restart": str(policy), "policy_state": memory}
    check_group(group)


def check_group(group: Mapping[str, Any]) -> None:
    """Refuse what no outer step has, values that make no rule, and a policy that the rule cannot serve."""
    for key in ("dampening", "weight_decay", "maximize", "together"):
        if group.get(key):
            raise ValueError(
                f"OuterSGD: a param group has {key}={group[key]}; an outer step has no {key}: leave it out"
            )
    rule, policy = rule_of(group), parse(group["restart"])
    if policy.effective(rule).momentum != rule.momentum:
        raise ValueError(
            f"OuterSGD: restart policy {policy} needs a buffer, and at momentum 0 there is none; "
            "give any momentum above 0: its value does not enter"
        )


def check_needs(group: Mapping[str, Any], supplied: Collection[str], origin: str = "") -> None:
    """Refuse a policy that needs what is not supplied.

    Args:
        group: a completed param group.
        supplied: names of the present or promised signals.
        origin: the policy's origin, for the message.
    """
    missing = parse(group["restart"]).needs - MEASURED - set(supplied)
    if missing:
        raise ValueError(
            f"OuterSGD: {origin}restart policy {group['restart']} needs {', '.join(sorted(missing))}; pass them to "
            "step(signals=...), the same on every replica, and promise them at construction with "
            f"signals={sorted(missing)!r}"
        )


def loaded_groups(
    state: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], promised: frozenset[str]
) -> list[dict[str, Any]]:
    """Return a state's param groups, checked and completed; a state of SGD keeps the policies of `groups`."""
    if not {"state", "param_groups"} <= set(state) or any("momentum" not in group for group in state["param_groups"]):
        raise ValueError(
            "OuterSGD: this is no state of an OuterSGD or a torch.optim.SGD, for its groups have no momentum; load "
            "the state_dict() of one"
        )
    loaded = []
    for index, group in enumerate(state["param_groups"]):
        current = groups[index] if index < len(groups) else {}
        loaded.append({"restart": current.get("restart", "never")} | group)
        complete_(loaded[-1])
        for name in COUNTERS:
            check_count("OuterSGD: the loaded state's group", name, loaded[-1][name], 0)
        memory = loaded[-1]["policy_state"]
        if not isinstance(memory, dict) or any(
            math.isnan(as_number(f"OuterSGD: the loaded policy's {name}", value)) for name, value in memory.items()
        ):
            raise ValueError(
                f"OuterSGD: the loaded policy's memory {memory!r:.200} holds no numbers; load what was saved"
            )
        check_needs(loaded[-1], promised, "the loaded state's ")
    for group, current in zip(loaded, groups, strict=False):  # torch counts them
        for index, param in zip(group["params"], current["params"], strict=False):
            saved = state["state"].get(index, {}).get("momentum_buffer")
            if saved is not None and saved.shape != param.shape:
                raise ValueError(
                    f"OuterSGD: the loaded buffer of parameter {index} has shape {tuple(saved.shape)}, the "
                    f"parameter {tuple(param.shape)}; load the state of an optimizer of these parameters"
                )
    return loaded


def as_number(name: str, value: Any) -> float:
    """Return a signal as a float; raise a ValueError where it is no number."""
    try:
        return float(value.detach() if hasattr(value, "detach") else value)
    except (TypeError, ValueError, RuntimeError):  # the last of tensors with several elements
        raise ValueError(f"{name} is {value!r}; give a single number") from None


def saved_group(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a param group as plain numbers and text, which loading with `weights_only` takes."""
    saved = {key: value.item() if hasattr(value, "item") else value for key, value in group.items()}
    if not isinstance(saved["restart"], str):  # the user put a policy there, which has not begun yet
        saved |= {"restart": str(saved["restart"]), "policy_state": parse(saved["restart"]).initial_state()}
    # One leaf, with any memory of the policy: torch.distributed.checkpoint restores those leaves alone that a
    # fresh optimizer's state has as well.
    return saved | {"policy_state": json.dumps(saved["policy_state"], default=lambda value: value.item())}
