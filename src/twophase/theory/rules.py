"""Hold many outer rules as arrays of numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from twophase.rule import FORMS, Form, OuterRule
from twophase.theory.checks import Floats, numbers


@dataclass(frozen=True, slots=True, eq=False)
class Rules:
    """Hold outer rules as arrays of one shape; `rules[index]` is some of them, or an `OuterRule` where it is one."""

    lr: Floats
    momentum: Floats
    nesterov: NDArray[np.bool_]
    ema: NDArray[np.bool_]

    @classmethod
    def of(cls, rule: AnyRule) -> Rules:
        """Return one rule, or an array or a nested sequence of rules, as `Rules`; these are returned as they are."""
        if isinstance(rule, Rules):
            return rule
        array = np.asarray(rule, dtype=object)
        wrong = [each for each in array.flat if not isinstance(each, OuterRule)]
        if wrong:
            raise ValueError(f"rule must be an OuterRule or an array of them, got {wrong[0]!r:.100}")
        rows = [(each.lr, each.momentum, each.nesterov, each.form == "ema") for each in array.flat]
        columns = np.array(rows, dtype=np.float64).reshape(-1, 4).T.reshape(4, *array.shape)
        return cls(columns[0], columns[1], columns[2] > 0, columns[3] > 0)

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the arrays."""
        return self.lr.shape

    @property
    def injection(self) -> Floats:
        """Return the weights with which pseudo-gradients enter the buffers: 1, in EMA form 1 - momentum."""
        return np.where(self.ema, 1 - self.momentum, 1.0)

    def __getitem__(self, index: Any) -> Any:
        """Return the rules at an index of the arrays."""
        lr, momentum, nesterov, ema = self.lr[index], self.momentum[index], self.nesterov[index], self.ema[index]
        if np.ndim(lr):
            return Rules(lr, momentum, nesterov, ema)
        return OuterRule(float(lr), float(momentum), bool(nesterov), "ema" if ema else "sum")

    def __len__(self) -> int:
        return len(self.lr)

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))

    def column(self, *shape: int) -> Rules:
        """Return the rules broadcast to a shape, with a last axis of length 1 along which modes broadcast."""
        columns: tuple[Any, ...] = (self.lr, self.momentum, self.nesterov, self.ema)
        return Rules(*(np.broadcast_to(column[..., None], (*shape, 1)) for column in columns))


AnyRule: TypeAlias = OuterRule | Rules | Sequence[Any] | NDArray[Any]
"""One rule, what `rule_grid` returns, or an array or nested sequence of rules; broadcast like any array."""


def rule_grid(lr: ArrayLike, momentum: ArrayLike, nesterov: ArrayLike = False, form: Form = "sum") -> Rules:
    """Return many outer rules, for calculations on all of them at once.

    The arguments are those of `OuterRule`, learning rates in the named form; the first three broadcast.

    >>> rule_grid([[0.5], [0.7]], [0.0, 0.9])[1, 1]
    OuterRule(lr=0.7, momentum=0.9, nesterov=False, form='sum')
    """
    rates, momenta = numbers("lr", lr, 0), numbers("momentum", momentum, 0, np.nextafter(1, 0))
    ahead = np.asarray(nesterov)
    if ahead.dtype != bool:  # rule_grid(0.7, 0.9, "ema") would be Nesterov in sum form
        raise ValueError(f"nesterov must be True or False, got {nesterov!r:.100}; form comes after it")
    if form not in FORMS:
        raise ValueError(f'form must be "sum" or "ema", got {form!r}')
    return Rules(*np.broadcast_arrays(rates + 0.0, momenta + 0.0, ahead, form == "ema"))  # no -0
