"""What a configuration's `outer` stands for: the rule of a method, its numbers, a line for people. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from twophase.optim.names import NAMES, RULES, TORCH
from twophase.rule import Form, OuterRule


def is_function(method: str) -> bool:
    """Return whether a method is a user's function, `FILE.py:FUNCTION`."""
    return ".py:" in method


def check_method(method: str) -> None:
    """Refuse a name that is not in the table, with a ValueError that names the choices."""
    if method not in NAMES and not is_function(method):
        raise ValueError(f"method is {method!r}; choose from {', '.join(NAMES)}, or a function FILE.py:FUNCTION")


def rule_of(
    method: str, lr: float | None = None, momentum: float | None = None, form: Form = "sum"
) -> OuterRule | None:
    """Return the rule of a name, or None where the method is no rule; a number that is None is the method's own.

    Raises:
        ValueError: an unknown name, or a number out of its range.

    >>> rule_of("nesterov", lr=0.5)
    OuterRule(lr=0.5, momentum=0.9, nesterov=True, form='sum')
    """
    check_method(method)
    if method not in RULES:
        return None
    own = RULES[method]
    if momentum is None or method == "averaging":  # which has none
        momentum = own.momentum
    return OuterRule(own.lr if lr is None else lr, momentum, own.nesterov, form)


def numbers_of(options: Mapping[str, Any]) -> dict[str, float]:
    """Return the learning rate and momentum that a configuration's `outer` stands for; none of a user's function."""
    rule = rule_of(options["method"], options.get("lr"), options.get("momentum"))
    if rule is not None:
        return {"lr": rule.lr, "momentum": rule.momentum}
    own = dict(zip(("lr", "momentum"), TORCH.get(options["method"], ()), strict=False))
    return {name: number if options.get(name) is None else float(options[name]) for name, number in own.items()}


def describe(options: Mapping[str, Any]) -> str:
    """Return one line for people of a configuration's `outer`, without its restart policy."""
    rule = rule_of(options["method"], options.get("lr"), options.get("momentum"), options.get("form", "sum"))
    if options["method"] == "averaging":
        text = f"averaging lr {numbers_of(options)['lr']:g}"
    elif rule is not None:
        text = rule.describe()
    else:
        text = " ".join([options["method"], *(f"{name} {value:g}" for name, value in numbers_of(options).items())])
    usual = {"filter": "none", "schedule": "constant"}
    return ", ".join(
        [text, *(f"{name} {options[name]}" for name in usual if options.get(name, usual[name]) != usual[name])]
    )


def options_of(rule: OuterRule) -> dict[str, Any]:
    """Return the values of a configuration's `outer` that stand for a rule.

    >>> options_of(OuterRule(0.7, 0.9, nesterov=True))
    {'method': 'nesterov', 'lr': 0.7, 'momentum': 0.9, 'form': 'sum'}
    """
    method = "averaging" if rule.momentum == 0 else "nesterov" if rule.nesterov else "heavy-ball"
    return {"method": method, "lr": rule.lr, "momentum": rule.momentum or None, "form": rule.form}
