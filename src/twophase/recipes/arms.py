"""Arms of a fair comparison: an outer optimizer with the numbers that are tuned, in one line of text.

    METHOD[@RESTART][+SLOT=TEXT ...]        nesterov   nesterov@3   adamw@K   auto   nesterov+readout=tail:rounds=10

METHOD is one of the shelf, or a restart policy that needs no rule (`auto`). RESTART is a policy, or K for a tuned
period; SLOT is filter, schedule or readout. Tuned are the inner learning rate, the method's `lr` and its own main
number (a momentum, or a share of an average), each unless the text fixes it: `adamw:beta2=0.99:lr=0.1`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from twophase.base.config import UsageError, with_values
from twophase.policies.text import parse as parse_policy
from twophase.recipes.controls import RESTART
from twophase.shelf.base import parse, registered
from twophase.sweeps.bracket import Scale
from twophase.sweeps.grid import Cell
from twophase.sweeps.table import SEED

INNER_LR = "inner.lr"
CONTROL = "averaging"
"""The arm that all others are held against."""
_MAIN = ("momentum", "mu_x", "beta")
"""Fields of a method that are its main number beside the learning rate, the first that it has."""
_SLOTS = ("filter", "schedule", "readout")


@dataclass(frozen=True, eq=False)
class Arm:
    """An outer optimizer with its tuned numbers.

    Args:
        text: as the module describes it; its name everywhere.
        inner_lr: where the search of the inner learning rate starts.

    Raises:
        UsageError: a text that cannot be read, or parts that do not go together.
    """

    text: str
    inner_lr: float
    scales: Mapping[str, Scale] = field(init=False)
    """Of the tuned numbers, by dotted path, `method.FIELD` or `period`."""
    _fixed: Mapping[str, str] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        try:
            scales, fixed = _read(self.text, self.inner_lr)
        except ValueError as error:
            raise UsageError(f"--arms {self.text}: {error}") from None
        object.__setattr__(self, "scales", scales)
        object.__setattr__(self, "_fixed", fixed)

    def cell(self, base: Any, numbers: Mapping[str, float], seed: int) -> Cell:
        """Return a run of the arm.

        Args:
            base: configuration of the comparison.
            numbers: values of the scales.
            seed: of the run.
        """
        values: dict[str, Any] = {**self._fixed, INNER_LR: numbers[INNER_LR], SEED: seed}
        tuned = {name.removeprefix("method."): value for name, value in numbers.items() if name.startswith("method.")}
        method = self._fixed["outer.method"]
        values["outer.method"] = ":".join([method, *(f"{name}={value!r}" for name, value in tuned.items())])
        if "period" in numbers:
            values[RESTART] = str(int(numbers["period"]))
        return Cell(self.text, values, with_values(base, values))


def _read(text: str, inner_lr: float) -> tuple[dict[str, Scale], dict[str, str]]:
    """Return the scales of an arm's text, and what it fixes by dotted path."""
    head, *others = text.split("+")
    method, at, restart = head.partition("@")
    scales = {INNER_LR: Scale(inner_lr)}
    fixed = {"outer.method": method, RESTART: restart or "never"}
    if method.partition(":")[0] not in registered("method"):
        if at:
            raise ValueError(f"{method!r} is no method of the shelf; twophase methods lists them")
        parse_policy(method).own_rule()  # refuses a policy of a rule, and what is no policy
        fixed = {"outer.method": "sgd", RESTART: method}
    else:
        value = parse("method", method)
        fixed_fields = {word.partition("=")[0] for word in method.split(":")[1:]}
        names = [field.name for field in dataclasses.fields(value)]
        main = next((name for name in _MAIN if name in names), None)
        if "lr" in names and "lr" not in fixed_fields:
            scales["method.lr"] = Scale(value.lr)
        if main and main not in fixed_fields and getattr(value, main) > 0:
            scales[f"method.{main}"] = Scale(getattr(value, main), "complement", low=0.0)
    if restart == "K":
        scales["period"], fixed[RESTART] = Scale(3, "whole", low=1, high=1000), "3"
    for other in others:
        slot, equals, value = other.partition("=")
        if slot not in _SLOTS or not equals:
            raise ValueError(f"{other!r} is no part of an arm; write +SLOT=TEXT with {', '.join(_SLOTS)}")
        fixed[f"outer.{slot}"] = str(parse(slot, value))
    return scales, fixed
