"""Arms of a fair comparison: an outer optimizer with the numbers that are tuned, in one line of text.

    METHOD[:lr=X][:momentum=X][@RESTART][+filter=TEXT][+schedule=TEXT]      nesterov   nesterov@3   adamw@K   auto

METHOD is a name of `optim.names`, or a restart policy that needs no rule (`auto`). RESTART is a policy, or K for a
tuned period. Tuned are the inner learning rate, and learning rate and momentum of every method but averaging. A text
can fix each: `adamw:lr=0.1`. A value behind `~` is tuned from there: `nesterov:momentum=~0.6`, `averaging:lr=~1`, or,
of a policy that needs no rule, `along:~0.5`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from twophase.base.config import UsageError, with_values
from twophase.optim.names import NAMES, read_filter
from twophase.optim.schedules import Schedule
from twophase.recipes.controls import BLOCKS, FORM, LR, METHOD, MOMENTUM, RESTART, has_first_moment
from twophase.restart import RestartPolicy
from twophase.restart import parse as parse_policy
from twophase.runs.method import check_method, numbers_of
from twophase.sweeps.bracket import Scale
from twophase.sweeps.grid import Cell
from twophase.sweeps.table import SEED

INNER_LR = "inner.lr"
CONTROL = "averaging"
"""The arm that all others are held against."""
ARMS = (
    "averaging+filter=orthogonal",
    "nesterov+filter=orthogonal",
    "averaging:lr=~1+schedule=linear:2",
    "nesterov",
    "nesterov@3",
)
"""What is compared where nothing is asked for: what did well on the bench, and the usual rule, restarted and not."""
_USUAL = {"filter": "none", "schedule": "constant"}
_TUNED_PERIOD, _FIRST_PERIOD = "K", "3"
_TUNED = "~"


@dataclass(frozen=True, eq=False)
class Arm:
    """An outer optimizer with its tuned numbers.

    Args:
        text: text form of the module's docstring; the arm's name everywhere.
        inner_lr: start of the search of the inner learning rate.

    Raises:
        UsageError: a text that cannot be read, or parts that do not go together.
    """

    text: str
    inner_lr: float
    scales: Mapping[str, Scale] = field(init=False)
    """Of the tuned numbers: `inner.lr`, `method.lr`, `method.momentum`, `policy.FIELD`, `period`."""
    _fixed: Mapping[str, Any] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        try:
            scales, fixed = _read(self.text)
        except ValueError as error:
            raise UsageError(f"--arms {self.text}: {error}") from None
        object.__setattr__(self, "scales", {INNER_LR: Scale(self.inner_lr)} | scales)
        object.__setattr__(self, "_fixed", fixed)

    def cell(self, base: Any, numbers: Mapping[str, float], seed: int) -> Cell:
        """Return a run of the arm in a comparison of this configuration; `numbers` are values of the scales."""
        values: dict[str, Any] = {**self._fixed, INNER_LR: numbers[INNER_LR], SEED: seed}
        values |= {
            path: numbers[name] for name, path in (("method.lr", LR), ("method.momentum", MOMENTUM)) if name in numbers
        }
        if "period" in numbers:
            values[RESTART] = str(int(numbers["period"]))
        if of_policy := {name[7:]: value for name, value in numbers.items() if name.startswith("policy.")}:
            values[RESTART] = str(dataclasses.replace(parse_policy(values[RESTART]), **of_policy))  # type: ignore[type-var]
        # An arm's restart is that of all fragments, and the control has no filter or schedule of the base.
        plain = {f"outer.{name}": usual for name, usual in _USUAL.items()} if self.text == CONTROL else {}
        return Cell(self.text, values, with_values(base, {FORM: "sum", **plain, **values, BLOCKS: ()}))


def check_arm_options(paths: Iterable[str]) -> None:
    """Refuse options, by dotted path, that every arm has its own value of."""
    varied = {METHOD, RESTART, BLOCKS, SEED, LR, MOMENTUM, FORM}
    for path in varied.intersection(paths):
        remedy = "--seeds and --fresh" if path == SEED else "--arms, such as nesterov:lr=0.7@3"
        raise UsageError(f"--{path}: every run of a comparison has its own; leave it out, and write it into {remedy}")


def _read(text: str) -> tuple[dict[str, Scale], dict[str, Any]]:
    """Return the scales of an arm's text but for the inner learning rate's, and what it fixes by dotted path."""
    head, *parts = text.split("+")
    name, at, restart = head.partition("@")
    method, *options = name.split(":")
    if method in NAMES:
        scales, numbers = _numbers(method, options)
        policy = parse_policy(_FIRST_PERIOD if restart == _TUNED_PERIOD else restart if at else "never")
        if str(policy) != "never" and not has_first_moment(method):
            raise ValueError(f"{method} has no momentum, so that a restart changes nothing; leave @ out")
        if needs_no_rule(policy):
            raise ValueError(f"{policy} takes its own steps and ignores the method; write {policy.name} alone")
        fixed: dict[str, Any] = {METHOD: method, **numbers, RESTART: str(policy)}
        if restart == _TUNED_PERIOD:
            scales["period"] = Scale(float(_FIRST_PERIOD), "whole", low=1, high=1000)
    else:
        if at:
            raise ValueError(f"{name} is a restart policy itself; leave @{restart} out")
        value = _policy(name.replace(_TUNED, ""))
        fixed = {METHOD: CONTROL, LR: None, MOMENTUM: None, RESTART: str(value)}
        pairs = zip(dataclasses.fields(value), options, strict=False)  # type: ignore[arg-type]
        tuned = [field.name for field, word in pairs if word.startswith(_TUNED)]
        scales = {f"policy.{name}": Scale(getattr(value, name)) for name in tuned}
    for other in parts:
        slot, equals, value_text = other.partition("=")
        if slot not in _USUAL or not equals or f"outer.{slot}" in fixed:
            raise ValueError(f"{other!r} is no part of an arm; write +filter=TEXT or +schedule=TEXT, each once")
        if slot == "filter":
            read_filter(value_text)
        else:
            value_text = str(Schedule.parse(value_text))
        fixed[f"outer.{slot}"] = value_text
    return scales, fixed


def _numbers(method: str, options: Iterable[str]) -> tuple[dict[str, Scale], dict[str, float | None]]:
    """Return the scales of a method's tuned numbers, and learning rate and momentum where they are fixed."""
    paths, given = {"lr": LR, "momentum": MOMENTUM}, dict[str, str]()
    for word in options:
        name, equals, number = word.partition("=")
        if name not in paths or not equals or name in given:
            raise ValueError(f"{word!r} is no number of {method}; write lr=X or momentum=X, each once")
        given[name] = number
    starts = {name: float(number.removeprefix(_TUNED)) for name, number in given.items()}
    check_method(method, starts.get("momentum"))
    fixed = {name for name, number in given.items() if not number.startswith(_TUNED)}
    tuned = ({"lr", "momentum"} if method != CONTROL else {*given}) - fixed
    values = numbers_of({"method": method, **starts})
    scales = {"method.lr": Scale(values["lr"])} if "lr" in tuned else {}
    if "momentum" in tuned and values["momentum"] > 0:
        scales["method.momentum"] = Scale(values["momentum"], "odds", low=1e-3, high=0.9999)
    return scales, {path: starts[name] if name in fixed else None for name, path in paths.items()}


def _policy(text: str) -> RestartPolicy:
    """Return a policy that needs no rule."""
    try:
        policy = parse_policy(text)
    except ValueError:
        raise ValueError(f"{text!r} is no method; choose from {', '.join(NAMES)}, or auto") from None
    if not needs_no_rule(policy):
        raise ValueError(f"{text} restarts the momentum of a method; write it behind one, such as nesterov@{text}")
    return policy


def needs_no_rule(policy: RestartPolicy | str) -> bool:
    """Return whether a policy uses nothing of a rule, so that it is an arm by itself; False for an unknown one."""
    try:
        return parse_policy(policy).takes_steps
    except ValueError:
        return False
