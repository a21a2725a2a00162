"""Check the arguments of the theory's functions: rules (single or an array of them), sigma, weights, counts.

Each check returns the argument as an array, or raises a ValueError that begins with the caller's name, `where`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from twophase.rule import Form, OuterRule

Floats: TypeAlias = NDArray[np.float64]
Rules: TypeAlias = OuterRule | Sequence[Any] | NDArray[np.object_]
"""One rule, or an array (or nested list) of rules that broadcasts like any array."""

_LARGEST_STEP = 1e100  # beyond it squares overflow, and no learning rate is meant that large


@dataclass(frozen=True, slots=True)
class RuleArrays:
    """Hold the numbers of one or several rules as arrays of one shape."""

    lr: Floats
    momentum: Floats
    injection: Floats
    """Weight with which a pseudo-gradient enters the buffer: 1 (sum form) or 1 - momentum (EMA form)."""
    nesterov: NDArray[np.bool_]
    ema: NDArray[np.bool_]

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the array of rules; () for one rule."""
        return self.lr.shape


def rule_grid(lr: ArrayLike, momentum: ArrayLike, nesterov: ArrayLike = False, form: Form = "sum") -> NDArray[Any]:
    """Return an array of outer rules, for calculations on many at once.

    Args:
        lr: outer learning rates in the named form, any shape.
        momentum: outer momenta, broadcast against `lr`.
        nesterov: True for a rule that looks ahead, broadcast too.
        form: `"sum"` or `"ema"`, the form of all of them.

    Returns:
        Array of `OuterRule` objects of the broadcast shape.

    Raises:
        ValueError: a value that `OuterRule` refuses.

    >>> rule_grid([[0.5], [0.7]], [0.0, 0.9]).shape
    (2, 2)
    """
    make = np.frompyfunc(lambda a, b, c: OuterRule(float(a), float(b), bool(c), form), 3, 1)
    return np.asarray(make(*np.broadcast_arrays(lr, momentum, nesterov)), dtype=object)


def rule_arrays(where: str, rule: Rules) -> RuleArrays:
    """Return the numbers of a rule or of an array of rules."""
    array = np.asarray(rule, dtype=object)
    refused = [item for item in array.flat if not isinstance(item, OuterRule)]
    if refused or not array.size:
        raise ValueError(
            f"{where}: rule is {refused[0] if refused else rule!r}; give an OuterRule such as OuterRule(0.7, 0.9), "
            "or an array of them (rule_grid makes one)"
        )

    rows = [(item.lr, item.momentum, item.injection, item.nesterov, item.form == "ema") for item in array.flat]
    lr, momentum, injection, nesterov, ema = np.array(rows, dtype=float).T.reshape(5, *array.shape)
    return RuleArrays(lr, momentum, injection, nesterov.astype(bool), ema.astype(bool))


def check_rule(where: str, rule: OuterRule) -> None:
    """Refuse all but a single rule, for functions of one."""
    if shape := rule_arrays(where, rule).shape:
        raise ValueError(f"{where}: rule is an array of shape {shape}; give one OuterRule, and call {where} for each")


def check_sigma(where: str, sigma: ArrayLike) -> Floats:
    """Return effective progress, every entry in [0, 1]."""
    values = check_numbers(where, "sigma", sigma)
    remedy = "effective progress lies in [0, 1]; effective_progress computes it from eigenvalues"
    refuse(where, "sigma", values, ~((values >= 0) & (values <= 1)), remedy)
    return values


def check_modes(where: str, sigma: ArrayLike) -> Floats:
    """Return `sigma` with its modes along the last axis, at least one mode; a single number is one mode."""
    values = np.atleast_1d(check_sigma(where, sigma))
    if values.shape[-1] == 0:
        raise ValueError(f"{where}: sigma is empty; give at least one mode")
    return values


def check_weights(where: str, weights: ArrayLike | None, modes: int) -> Floats:
    """Return the weights of the modes, normalised to sum 1; equal weights when None."""
    if weights is None:
        return np.full(modes, 1 / modes)
    values = np.atleast_1d(check_numbers(where, "weights", weights))
    if values.shape != (modes,):
        raise ValueError(f"{where}: weights have shape {values.shape}; give one a mode, shape ({modes},)")
    refuse(where, "weights", values, ~((values >= 0) & np.isfinite(values)), "a weight is a finite number >= 0")
    largest = values.max()
    if largest == 0:
        raise ValueError(f"{where}: weights are all 0; at least one must be positive")
    scaled = values / largest  # first, so that tiny or huge weights neither vanish nor overflow in the sum
    return scaled / scaled.sum()


def check_counts(where: str, name: str, value: ArrayLike, least: int = 1) -> NDArray[np.int64]:
    """Return whole numbers >= `least` and below 2^53 as an int64 array; refuse floats that are not whole."""
    remedy = f"it must be a whole number >= {least} and below 2^53"
    numbers = check_numbers(where, name, value, remedy)
    if not numbers.size:
        raise ValueError(f"{where}: {name} is {value!r}; {remedy}")
    whole = (numbers == np.floor(numbers)) & (numbers >= least) & (numbers < 2.0**53)
    refuse(where, name, np.asarray(value), ~whole, remedy)
    return numbers.astype(np.int64)


def check_count(where: str, name: str, value: ArrayLike, least: int = 1) -> int:
    """Return one such number."""
    array = check_counts(where, name, value, least)
    if array.ndim:
        raise ValueError(f"{where}: {name} is {value!r}; give one number, not several")
    return int(array)


def check_finite(where: str, name: str, value: ArrayLike, least: float = -np.inf) -> Floats:
    """Return finite numbers >= `least`."""
    values = check_numbers(where, name, value)
    remedy = "it must be a finite number" + (f" >= {least:g}" if np.isfinite(least) else "")
    refuse(where, name, values, ~(np.isfinite(values) & (values >= least)), remedy)
    return values


def check_numbers(
    where: str, name: str, value: ArrayLike, remedy: str = "give a number or an array of numbers"
) -> Floats:
    """Return a float64 copy of real numbers, infinities and nan included."""
    try:
        array = np.asarray(value)
        objects = array.flat if array.dtype.kind == "O" else ()
        if array.dtype.kind not in "iufO" or any(isinstance(item, NoneType | bool | str) for item in objects):
            raise TypeError
        return array.astype(np.float64)
    except (TypeError, ValueError):
        raise ValueError(f"{where}: {name} is {value!r:.200}; {remedy}") from None


def common_shape(where: str, **shapes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape to which the arguments broadcast."""
    try:
        return np.broadcast_shapes(*shapes.values())
    except ValueError:
        listed = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        remedy = "add axes of length 1 where they differ"
        raise ValueError(f"{where}: shapes do not broadcast: {listed}; {remedy}") from None


def check_steps(where: str, step: Floats) -> None:
    """Refuse effective steps lr sigma beyond any meaning, where squares would overflow."""
    if step.size and step.max() > _LARGEST_STEP:
        raise ValueError(f"{where}: the effective step lr * sigma reaches {step.max():g}; lr must keep it below 1e100")


def refuse(where: str, name: str, values: NDArray[Any], wrong: NDArray[np.bool_], remedy: str) -> None:
    """Raise a ValueError that names the first wrong entry, if there is one."""
    if np.any(wrong):
        index = tuple(int(axis[0]) for axis in np.nonzero(np.atleast_1d(wrong)))
        suffix = f"[{', '.join(map(str, index))}]" if values.ndim else ""
        entry = np.atleast_1d(values)[index]
        entry = entry.item() if isinstance(entry, np.generic) else entry
        raise ValueError(f"{where}: {name}{suffix} is {entry!r}; {remedy}")
