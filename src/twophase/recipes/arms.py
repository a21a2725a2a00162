"""Arms of a fair comparison: an outer optimizer with the numbers that are tuned, in one line of text.

    METHOD[@RESTART][+SLOT=TEXT ...]        nesterov   nesterov@3   adamw@K   auto   nesterov+readout=tail:rounds=10

METHOD is one of the shelf, or a restart policy that needs no rule (`auto`). RESTART is a policy, or K for a tuned
period; SLOT is filter, schedule or readout. Tuned are the inner learning rate, the method's `lr` and its main number (a
momentum, or a share of an average). A text can fix each: `adamw:beta2=0.99:lr=0.1`. A value behind `~` is where a
search starts: `nesterov:momentum=~0.6`, or, of a policy that needs no rule, `along:~0.5`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from twophase.base.config import UsageError, with_values
from twophase.policies.base import RestartPolicy
from twophase.policies.text import parse as parse_policy
from twophase.recipes.controls import BLOCKS, RESTART, has_first_moment
from twophase.shelf.base import Method, Slot
from twophase.shelf.outer import USUAL
from twophase.shelf.text import parse, registered
from twophase.sweeps.bracket import Scale
from twophase.sweeps.grid import Cell
from twophase.sweeps.table import SEED
from twophase.training.config import RULE_OPTIONS

METHOD, INNER_LR = "outer.method", "inner.lr"
CONTROL = "averaging"
"""The arm that all others are held against."""
ARMS = (
    "averaging+filter=orthogonal",
    "nesterov+filter=orthogonal",
    "memoryless+schedule=linear:final=2",
    "nesterov",
    "nesterov@3",
)
"""What is compared where nothing is asked for: what did well on the bench, and the usual rule, restarted and not."""
_MAIN = ("momentum", "mu_x", "beta")
"""Fields that may be a method's main number next to the learning rate; the first that it has counts."""
_SLOTS: tuple[Slot, ...] = ("filter", "schedule", "readout")
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
    """Of the tuned numbers, by dotted path, `method.FIELD`, `policy.FIELD` or `period`."""
    _fixed: Mapping[str, str] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        try:
            scales, fixed = _read(self.text)
        except ValueError as error:
            raise UsageError(f"--arms {self.text}: {error}") from None
        object.__setattr__(self, "scales", {INNER_LR: Scale(self.inner_lr)} | scales)
        object.__setattr__(self, "_fixed", fixed)

    def cell(self, base: Any, numbers: Mapping[str, float], seed: int) -> Cell:
        """Return a run of the arm in a comparison of this configuration; `numbers` are values of the scales."""
        tuned = [f"{name[7:]}={value!r}" for name, value in numbers.items() if name.startswith("method.")]
        values: dict[str, Any] = {**self._fixed, INNER_LR: numbers[INNER_LR], SEED: seed}
        values[METHOD] = ":".join([self._fixed[METHOD], *tuned])
        if "period" in numbers:
            values[RESTART] = str(int(numbers["period"]))
        if of_policy := {name[7:]: value for name, value in numbers.items() if name.startswith("policy.")}:
            values[RESTART] = str(dataclasses.replace(parse_policy(values[RESTART]), **of_policy))  # type: ignore[type-var]
        # An arm's restart is that of all fragments, and the control has no filter, schedule or readout of the base.
        plain = {f"outer.{slot}": USUAL[slot] for slot in _SLOTS} if self.text == CONTROL else {}
        return Cell(self.text, values, with_values(base, {**plain, **values, BLOCKS: ()}))


def check_arm_options(paths: Iterable[str]) -> None:
    """Refuse options, by dotted path, that every arm has its own value of."""
    varied = {METHOD, RESTART, BLOCKS, SEED, *(f"outer.{name}" for name in RULE_OPTIONS)}
    for path in varied.intersection(paths):
        remedy = "--seeds and --fresh" if path == SEED else "--arms, such as nesterov:lr=0.7@3"
        raise UsageError(f"--{path}: every run of a comparison has its own; leave it out, and write it into {remedy}")


def _read(text: str) -> tuple[dict[str, Scale], dict[str, str]]:
    """Return the scales of an arm's text but for the inner learning rate's, and what it fixes by dotted path."""
    head, *parts = text.split("+")
    name, at, restart = head.partition("@")
    value = _method_or_policy(name.replace(_TUNED, ""))
    scales: dict[str, Scale] = {}
    if isinstance(value, RestartPolicy):
        if at:
            raise ValueError(f"{name} is a restart policy itself; leave @{restart} out")
        fixed = {METHOD: "sgd", RESTART: str(value)}
        pairs = zip(dataclasses.fields(value), name.split(":")[1:], strict=False)  # type: ignore[arg-type]
        tuned = [field.name for field, word in pairs if word.startswith(_TUNED)]
        scales = {f"policy.{name}": Scale(getattr(value, name)) for name in tuned}
    else:
        options = [word.partition("=") for word in name.split(":")[1:]]
        tuned = [name for name, _, number in options if number.startswith(_TUNED)]
        scales = _scales(value, {name for name, _, _ in options} - {*tuned})
        if others := [name for name in tuned if f"method.{name}" not in scales]:
            raise ValueError(
                f"{', '.join(others)} of {value.name} is not tuned; fix it, as beta2=0.99, without {_TUNED}"
            )
        name = ":".join([name.partition(":")[0], *("".join(word) for word in options if word[0] not in tuned)])
        policy = parse_policy(_FIRST_PERIOD if restart == _TUNED_PERIOD else restart if at else "never")
        _check_restart(value, policy)
        fixed = {METHOD: name, RESTART: str(policy)}
        if restart == _TUNED_PERIOD:
            scales["period"] = Scale(float(_FIRST_PERIOD), "whole", low=1, high=1000)
    for other in parts:
        slot, equals, text = other.partition("=")
        if slot not in _SLOTS or not equals or f"outer.{slot}" in fixed:
            raise ValueError(f"{other!r} is no part of an arm; write +SLOT=TEXT with each of {', '.join(_SLOTS)} once")
        fixed[f"outer.{slot}"] = str(parse(slot, text))
    return scales, fixed


def _method_or_policy(text: str) -> Method | RestartPolicy:
    """Return a method of the shelf, or a policy that needs no rule."""
    try:
        return parse("method", text)
    except ValueError:
        if text.partition(":")[0] in registered("method"):
            raise
        try:
            policy = parse_policy(text)
        except ValueError:
            policy = None
        if policy is None:
            raise
    if not needs_no_rule(policy):
        raise ValueError(f"{text} restarts the momentum of a method; write it behind one, such as nesterov@{text}")
    return policy


def _check_restart(method: Method, policy: RestartPolicy) -> None:
    """Refuse a restart that changes nothing, or that makes the method's numbers change nothing."""
    if str(policy) != "never" and not has_first_moment(method):
        raise ValueError(f"{method.name} has no first moment, so that a restart changes nothing; leave @ out")
    if method.plain and needs_no_rule(policy):
        raise ValueError(f"{policy} takes its own steps and ignores the method; write {policy.name} alone")


def needs_no_rule(policy: RestartPolicy | str) -> bool:
    """Return whether a policy uses nothing of a rule, so that it is an arm by itself; False for an unknown one."""
    try:
        parse_policy(policy).own_rule()
    except ValueError:
        return False
    return True


def _scales(method: Method, fixed: Collection[str]) -> dict[str, Scale]:
    """Return the scales of a method's learning rate and main number, unless they are fixed."""
    values = {field.name: getattr(method, field.name) for field in dataclasses.fields(method)}  # type: ignore[arg-type]
    main = next((name for name in _MAIN if name in values), "")
    scales = {}
    if "lr" in values and "lr" not in fixed:
        scales["method.lr"] = Scale(values["lr"])
    if main and main not in fixed and values[main] > 0:
        scales[f"method.{main}"] = Scale(values[main], "odds", low=1e-3, high=0.9999)
    return scales
