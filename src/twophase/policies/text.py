"""Write policies as text, read them back, and find the class of a name.

To add a policy, write a frozen dataclass that derives from `RestartPolicy` and decorate it with `@register("name")`.
Its text form (`name:value:...`), state saving, the optimizer and the engine then work unchanged. So do sweeps and the
command line, if the environment variable `TWOPHASE_POLICIES` names its module.
"""

from __future__ import annotations

import os
import re
from dataclasses import fields, is_dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any

from twophase.number import did_you_mean, number, shortened
from twophase.policies import adaptive, scheduled  # noqa: F401 - their policies register
from twophase.policies.base import REGISTRY, RestartPolicy

POLICIES_VARIABLE = "TWOPHASE_POLICIES"
"""Environment variable: modules that register further policies, separated by commas; loaded on an unknown name.
The command line and a sweep's workers, processes of their own, learn of such policies in this way."""


def _class_of(name: str) -> type[RestartPolicy] | None:
    if name not in REGISTRY:
        load_modules(POLICIES_VARIABLE)
    cls = REGISTRY.get(name)
    if cls is not None and not (is_dataclass(cls) and issubclass(cls, RestartPolicy)):
        raise ValueError(f"restart {name!r}: derive {cls.__name__} from RestartPolicy, and make it a frozen dataclass")
    return cls


def load_modules(variable: str) -> None:
    """Import the modules that an environment variable names; raise a ValueError where one cannot be."""
    for module in filter(None, map(str.strip, os.environ.get(variable, "").split(","))):
        try:
            import_module(module)
        except Exception as error:
            raise ValueError(
                f"{variable}: the module {module!r} cannot be imported ({type(error).__name__}: {error}); fix it, put "
                "its folder on PYTHONPATH, or unset the variable"
            ) from error


def parse(text: str | int | RestartPolicy) -> RestartPolicy:
    """Return the policy of a text form; a policy is returned as it is and a whole number is a period.

    `never`, `3`, `cycle:5,6,10`, `at:4,9`, `soft:3:0.2:0.1`, or `name:value:...` of a registered policy: its fields'
    values in order, those of a tuple separated by commas. Inverse of `str(policy)`.

    Raises:
        ValueError: unknown name, wrong number of values, or values out of range.

    >>> parse("3"), str(parse("soft:3:0.2:0.1"))
    (Periodic(period=3), 'soft:3:0.2:0.1')
    """
    if isinstance(text, str) or not isinstance(text, RestartPolicy):  # of an abstract class it takes ten times as long
        stripped = str(text).strip(" \t\r\n")
        policy = _parse_text(stripped)
        if REGISTRY.get(policy.name) is not type(policy):  # its class was defined anew
            _parse_text.cache_clear()
            policy = _parse_text(stripped)
        return policy
    if _class_of(text.name) is type(text):
        return text
    # Its text form would be that of another policy, or of none.
    raise ValueError(f'restart {text!r} has no text form; decorate {type(text).__name__} with @register("name")')


@lru_cache(maxsize=1024)
def _parse_text(text: str) -> RestartPolicy:
    name, *arguments = ["periodic", text] if re.fullmatch(r"-?[0-9]+", text) else text.split(":")
    cls = _class_of(name)
    if cls is None:
        forms = (
            "write never, a period such as 3, cycle:5,6,10, at:4,9, soft:3:0.2:0.1, or "
            f"one of {', '.join(sorted(REGISTRY))} with its values"
        )
        raise ValueError(
            f"restart {shortened(text)!r} is not known; {did_you_mean(name, REGISTRY, forms)} ({POLICIES_VARIABLE}, "
            "an environment variable, names modules with further policies; docs/policies.md)"
        )
    kinds = {field.name: str(field.type) for field in fields(cls)}  # type: ignore[arg-type]
    usage = ":".join([name, *(field.upper() + ",..." * ("tuple" in kind) for field, kind in kinds.items())])
    try:
        values = [_value(word, kind) for word, kind in zip(arguments, kinds.values(), strict=False)]
    except ValueError as error:
        raise ValueError(f"restart {shortened(text)!r}: {error}; write {usage}") from None
    try:
        return cls(*values, *arguments[len(values) :])
    except TypeError:
        raise ValueError(f"restart {shortened(text)!r} has the wrong number of values; write {usage}") from None


def _value(word: str, kind: str) -> Any:
    """Return the value of a field of some type: a number, or a tuple of numbers."""
    if "tuple" not in kind:
        return number(word)
    return tuple(map(number, word.split(","))) if word else ()
