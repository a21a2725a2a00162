"""What a configuration's `outer` stands for: the rule of a method, its numbers, a line for people. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from twophase.optim.names import NAMES, RULES, TORCH
from twophase.rule import Form, OuterRule


def is_function(method: str) -> bool:
    """Return whether a method is a user's function, `FILE.py:FUNCTION`."""
    return ".py:" in method


def check_method(method: str, momentum: float | None = None) -> None:
    """Refuse a name that is not in the table, and a momentum of averaging.

    Raises:
        ValueError: naming the choices.
    """
    if method not in NAMES and not is_function(method):
        raise ValueError(f"method is {method!r}; choose from {', '.join(NAMES)}, or a function FILE.py:FUNCTION")
    if method == "averaging" and momentum:
        raise ValueError(f"method averaging has no momentum, got {momentum}; take heavy-ball or nesterov")


def rule_of(
    method: str, lr: float | None = None, momentum: float | None = None, form: Form = "sum"
) -> OuterRule | None:
    """Return the rule of a name, or None where the method is no rule.

    Args:
        method: a name of the table, or a user's function.
        lr: outer learning rate in the form named; None takes the method's own.
        momentum: the same, in [0, 1).
        form: `sum` or `ema`.

    Raises:
        ValueError: an unknown name, a momentum of averaging, or a number out of its range.

    >>> rule_of("nesterov", lr=0.5)
    OuterRule(lr=0.5, momentum=0.9, nesterov=True, form='sum')
    """
    check_method(method, momentum)
    if method not in RULES:
        return None
    own = RULES[method]
    lr, momentum = own.lr if lr is None else lr, own.momentum if momentum is None else momentum
    return OuterRule(lr, momentum, own.nesterov, form)


def numbers_of(options: Mapping[str, Any]) -> dict[str, float]:
    """Return the learning rate and momentum that a configuration's `outer` stands for; none of a user's function."""
    rule = rule_of(options["method"], options.get("lr"), options.get("momentum"))
    own = (rule.lr, rule.momentum) if rule is not None else TORCH.get(options["method"], ())
    given = (options.get("lr"), options.get("momentum"))
    return {n: float(o if g is None else g) for n, o, g in zip(("lr", "momentum"), own, given, strict=False)}


def describe(options: Mapping[str, Any]) -> str:
    """Return one line for people of a configuration's `outer`, without its restart policy."""
    rule = rule_of(options["method"], options.get("lr"), options.get("momentum"), options.get("form", "sum"))
    numbers = [f"{name} {value:g}" for name, value in numbers_of(options).items()]
    parts = [rule.describe() if rule is not None else " ".join([options["method"], *numbers])]
    if options["method"] == "averaging":
        parts = [f"averaging lr {numbers_of(options)['lr']:g}"]
    usual = {"filter": "none", "schedule": "constant"}
    return ", ".join([*parts, *(f"{n} {options[n]}" for n, text in usual.items() if options.get(n, text) != text)])


def options_of(rule: OuterRule) -> dict[str, Any]:
    """Return the values of a configuration's `outer` that stand for a rule.

    >>> options_of(OuterRule(0.7, 0.9, nesterov=True))
    {'method': 'nesterov', 'lr': 0.7, 'momentum': 0.9, 'form': 'sum'}
    """
    if rule.momentum == 0:
        return {"method": "averaging", "lr": rule.lr, "momentum": None, "form": rule.form}
    method = "nesterov" if rule.nesterov else "heavy-ball"
    return {"method": method, "lr": rule.lr, "momentum": rule.momentum, "form": rule.form}
