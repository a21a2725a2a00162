"""An outer optimizer as a value: what stands in its slots, from what a user or a configuration gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from twophase.number import did_you_mean
from twophase.policies.base import Never, RestartPolicy
from twophase.rule import OuterRule
from twophase.shelf.base import SLOTS, Filter, Method, Readout, Schedule, Slot, value_text
from twophase.shelf.text import parse

USUAL: dict[Slot, str] = {"method": "sgd", "filter": "none", "schedule": "constant", "readout": "last"}
"""What stands in the slots where a rule says it all; a configuration leaves them out."""
RULE_OPTIONS = ("lr", "momentum", "nesterov", "form")
"""Options of the outer optimizer that belong to momentum SGD."""


@dataclass(frozen=True)
class Outer:
    """An outer optimizer as a value: what stands in its slots, its restart policy apart.

    Args:
        method: how the update is made.
        filter, schedule, readout: the other slots.

    Raises:
        ValueError: a readout beside that of the method, or a schedule of what the method has not.
    """

    method: Method
    filter: Filter
    schedule: Schedule
    readout: Readout

    def __post_init__(self) -> None:
        if self.method.reads_out and self.readout.name != "last":
            raise ValueError(
                f"readout {self.readout} cannot go with method {self.method.name}, which evaluates its own average; "
                "take the readout away (last)"
            )
        if self.schedule.name == "transient" and not (self.method.plain or self.method.grows):
            raise ValueError(
                "schedule transient makes up for the short updates of a momentum that begins at 0, and method "
                f"{self.method.name} has none. Take constant, or a method of momentum SGD or FedOpt"
            )

        # Elsewhere a momentum of 0 is a choice, as a value of an axis; a torch optimizer may hide its own.
        unnamed = self.method.name == "torch" and self.rule().momentum == 0
        if self.schedule.name == "momentum" and (unnamed or not self.method.first_moment):
            raise ValueError(
                f"schedule momentum raises a momentum, and method {self.method.name} has none, or names none. Take "
                "constant, or a method with a momentum (of a torch optimizer write it out, such as betas=0.9/0.999)"
            )

    @property
    def is_plain(self) -> bool:
        """Whether it is a rule and nothing else, so that an `OuterRule` says it all."""
        return self.method.plain and self.unusual().keys() <= {"method"}

    def rule(self) -> OuterRule:
        """Return the method's rule, before its schedule."""
        return self.method.rule()

    def check_restart(self, policy: RestartPolicy, *, first_moment: bool) -> None:
        """Refuse a restart policy that the method cannot serve.

        Args:
            policy: it.
            first_moment: whether the method has a buffer that a restart acts on.
        """
        method = self.method
        if method.plain:
            rules = {policy.canonical(OuterRule(lr, momentum)) for lr, momentum in ((1.0, 0.9), (0.7, 0.5))}
            if len(rules) == 1 and self.schedule.name != "constant":
                raise ValueError(
                    f"restart policy {policy} takes steps that no learning rate or momentum enters, so that schedule "
                    f"{self.schedule} would change nothing; take schedule constant, or another policy"
                )
            return
        if not (first_moment and method.restarts) and policy != Never():
            raise ValueError(
                f"restart policy {policy} restarts a first moment, and method {method.name} has none"
                + (" that outlasts a round at momentum 0" if first_moment else "")
                + "; use never, or a method with a momentum"
            )
        if policy.takes_steps:
            raise ValueError(
                f"restart policy {policy} takes steps of momentum SGD, and method {method.name} has its own. Use it "
                "with sgd, heavy-ball or nesterov, or take a policy that only restarts, such as 3"
            )

    def texts(self) -> dict[Slot, str]:
        """Return each slot's text form."""
        return {slot: str(getattr(self, slot)) for slot in SLOTS}

    def unusual(self) -> dict[Slot, str]:
        """Return the text form of each slot that a rule does not say."""
        return {slot: text for slot, text in self.texts().items() if getattr(self, slot).name != USUAL[slot]}

    def describe(self) -> str:
        """Return one line for people: the method, and those of the other slots that do something."""
        parts = [self.method.rule().describe() if self.method.plain else str(self.method)]
        return ", ".join([*parts, *(f"{slot} {text}" for slot, text in self.unusual().items() if slot != "method")])

    @property
    def buffers(self) -> tuple[str, ...]:
        """Its tensors of a parameter's size, 4 bytes a parameter each in float32."""
        return (*self.method.buffers, *(() if self.readout.name == "last" else ("readout",)))


def as_outer(value: Outer | OuterRule | Method | str) -> Outer:
    """Return what a user gave as an `Outer`, with nothing in the slots that it does not speak of."""
    if isinstance(value, Outer):
        return value
    defaults = {f.name: getattr(value, f.name) for f in fields(value)} if isinstance(value, OuterRule) else {}
    method = parse("method", "sgd" if isinstance(value, OuterRule) else value, defaults)
    return Outer(method, parse("filter", "none"), parse("schedule", "constant"), parse("readout", "last"))


def configured(options: Mapping[str, Any], rounds: int = 0) -> OuterRule | Outer:
    """Return the outer optimizer of a configuration's options, by their names behind `outer.`.

    Args:
        options: lr, momentum, nesterov and form of method `sgd`, and the slots' texts, where they are not the usual.
        rounds: of the run, for a schedule that ends with it.

    Raises:
        ValueError: values that make none.
    """
    texts = {slot: str(options.get(slot, usual)) for slot, usual in USUAL.items()}
    of_sgd = texts["method"].partition(":")[0] == USUAL["method"]
    method = parse("method", texts["method"], {name: options[name] for name in RULE_OPTIONS} if of_sgd else {})
    schedule = parse("schedule", texts["schedule"]).over(rounds)
    value = Outer(method, parse("filter", texts["filter"]), schedule, parse("readout", texts["readout"]))
    return value.rule() if value.is_plain else value


def anchor_rule(value: OuterRule | Outer) -> OuterRule | None:
    """Return the rule that moves the anchors, whatever is read out of them; None where more than a rule does."""
    if isinstance(value, OuterRule):
        return value
    return value.rule() if value.method.plain and value.unusual().keys() <= {"method", "readout"} else None


def described(options: Mapping[str, Any]) -> str:
    """Return one line for people of `configured`: a rule in words, other values as the configuration has them."""
    value = configured(options)
    rule = value if isinstance(value, OuterRule) else value.rule()
    is_rule = isinstance(value, OuterRule) or value.method.plain
    parts = [rule.describe() if is_rule else str(options["method"])]
    others = {slot: usual for slot, usual in USUAL.items() if slot != "method" and options.get(slot, usual) != usual}
    return ", ".join([*parts, *(f"{slot} {options[slot]}" for slot in others)])


def outer(
    method: str | Method | OuterRule,
    *,
    filter: str | Filter = "none",  # noqa: A002 - the slot's name
    schedule: str | Schedule = "constant",
    readout: str | Readout = "last",
    **fields_of_method: Any,
) -> OuterRule | Outer:
    """Return an outer optimizer as a value, for `DiLoCo` and every other place that takes a rule.

    Args:
        method: its name or text form, such as `"adamw"` or `"adamw:lr=0.3"`, or an `OuterRule`.
        filter: of the pseudo-gradient, a text form or a value.
        schedule: of learning rate and momentum, the same.
        readout: what is evaluated, the same.
        fields_of_method: fields of the method, such as `lr=0.3, beta2=0.99`.

    Returns:
        An `OuterRule` where that says it all (heavy ball, Nesterov and their presets), else an `Outer`.

    Raises:
        ValueError: a name, a field or a value that is not known, or out of its range; an `Outer`.

    >>> outer("nesterov", lr=0.7, momentum=0.9)
    OuterRule(lr=0.7, momentum=0.9, nesterov=True, form='sum')
    >>> outer("adamw", lr=0.3).method.momentum
    0.9
    """
    if isinstance(method, Outer):
        raise ValueError("outer: this is an Outer already; give all its parts in one call, or use dataclasses.replace")
    if isinstance(method, str) and fields_of_method:
        method = ":".join([method, *(f"{name}={value_text(value)}" for name, value in fields_of_method.items())])
    elif fields_of_method:
        names = [field.name for field in fields(method)]  # type: ignore[arg-type]
        for name in sorted(fields_of_method.keys() - set(names)):
            raise ValueError(f"outer: {name!r} is no field of {method!r}; {did_you_mean(name, names)}")
        method = replace(method, **fields_of_method)  # type: ignore[type-var]
    value = replace(
        as_outer(method),
        filter=parse("filter", filter),
        schedule=parse("schedule", schedule),
        readout=parse("readout", readout),
    )
    return value.rule() if value.is_plain else value
