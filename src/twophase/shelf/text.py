"""Read the values of the shelf from text: `name:field=value:...`, the inverse of `str(value)`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import lru_cache
from typing import Any, get_type_hints

from twophase.number import did_you_mean, number, shortened
from twophase.policies.base import is_redefined
from twophase.policies.text import load_modules
from twophase.shelf import filters, methods, readouts, schedules  # noqa: F401 - their values register
from twophase.shelf.base import REGISTRY, Slot, Value

SHELF_VARIABLE = "TWOPHASE_SHELF"
"""Environment variable: modules that register further values, separated by commas; loaded on an unknown name."""


def registered(slot: Slot) -> Mapping[str, type[Value]]:
    """Return the values of a slot by name, in the order of their registration."""
    return REGISTRY[slot]


def parse(slot: Slot, text: str | Value, defaults: Mapping[str, Any] | None = None) -> Any:
    """Return the value of a text form; a value is returned as it is.

    Args:
        slot: of the value.
        text: `name`, or `name:field=value:...`.
        defaults: values of fields that the text does not name; those that the value lacks are left out.

    Raises:
        ValueError: an unknown name or field, or a value out of range.

    >>> parse("method", "adamw:lr=0.3").beta2
    0.99
    """
    if isinstance(text, Value):
        cls = REGISTRY[slot].get(getattr(text, "name", "")) if text.slot == slot else None
        if cls is not type(text):
            if cls and is_redefined(cls, type(text)):
                raise ValueError(f"{slot} {text!r} is of an earlier definition of {cls.__name__}; create it again")
            raise ValueError(f'{slot} {text!r} is no {slot} of the shelf; decorate its class with @register("name")')
        return text
    arguments = slot, str(text).strip(), tuple((defaults or {}).items())
    value = _parse_text(*arguments)
    if REGISTRY[slot].get(value.name) is not type(value):  # its class was defined anew
        _parse_text.cache_clear()
        value = _parse_text(*arguments)
    return value


@lru_cache(maxsize=1024)
def _parse_text(slot: Slot, text: str, defaults: tuple[tuple[str, Any], ...]) -> Value:
    name, *arguments = text.split(":")
    if name not in REGISTRY[slot]:
        load_modules(SHELF_VARIABLE)
    if name not in REGISTRY[slot]:
        raise ValueError(
            f"{slot} {shortened(name)!r} is not known; {did_you_mean(name, REGISTRY[slot])} ({SHELF_VARIABLE}, "
            "an environment variable, names modules with values of your own)"
        )
    cls = REGISTRY[slot][name]
    if not is_dataclass(cls):
        raise ValueError(f"{slot} {name!r}: make {cls.__name__} a frozen dataclass")
    names = {field.name for field in fields(cls)}
    hints = {name: hint for name, hint in get_type_hints(cls).items() if name in names}
    usage = ":".join([name, *(f"{field}={hint.__name__.upper()}" for field, hint in hints.items())])
    values: dict[str, Any] = {}
    for word in arguments:
        field, equals, value = word.partition("=")
        if field in values:
            raise ValueError(f"{slot} {shortened(text)!r}: {field} stands there twice; give it once")
        if not equals or field not in hints:
            remedy = did_you_mean(field, hints, f"write {usage}") if equals else f"write {usage}"
            raise ValueError(f"{slot} {shortened(text)!r}: {shortened(word)!r} is no field of {name}; {remedy}")
        try:
            values[field] = _read(value, hints[field])
        except ValueError as error:
            raise ValueError(f"{slot} {shortened(text)!r}: {field}: {error}; write {usage}") from None
    return cls(**{key: value for key, value in defaults if key in hints} | values)


def _read(word: str, hint: type) -> Any:
    if hint is bool:
        if word.lower() not in ("true", "false"):
            raise ValueError(f"{shortened(word)!r} is neither true nor false")
        return word.lower() == "true"
    return number(word) if hint in (int, float) else word
