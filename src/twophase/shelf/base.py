"""The four slots of an outer optimizer as values: method, filter, schedule, readout (the fifth is the restart policy).

A round of an outer optimizer with the pseudo-gradient g, the first-moment buffer m and the anchor x:

    g <- filter(g, m)                  the pseudo-gradient that everything below sees
    (lr, momentum) <- schedule(round)  of the method
    x <- x - method(g, m, ...)         the method mixes g into m, with or without further buffers
    m <- retain m + inject g           if the restart policy says so
    r <- readout(r, x)                 what is evaluated and exported

Each value is a frozen dataclass of plain numbers and words that knows nothing of tensors; `twophase.optim.methods` and
`twophase.optim.filters` hold the arithmetic. The text form is `name:field=value:...`, so that all of them are options,
axes of a sweep, and entries of a state.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal, Self, TypeVar, get_args

from twophase.policies.base import check_name
from twophase.policies.checks import check_number
from twophase.rule import OuterRule

Slot = Literal["method", "filter", "schedule", "readout"]
SLOTS: tuple[Slot, ...] = get_args(Slot)
REGISTRY: dict[Slot, dict[str, type[Value]]] = {slot: {} for slot in SLOTS}
"""The values of each slot by name, in the order of their registration."""


class Value:
    """A named value of a slot: a frozen dataclass with `@register("name")`.

    Class variables, for docs/shelf.md:

    * `equation`: in the letters of the slots, one line.
    * `source`: paper, or the library that it is from.
    * `users`: programs and papers that train with it.
    * `linear`: whether its update is linear in the pseudo-gradients, so that `theory.rollout` has it.
    * `test`: the test that holds it to an independent implementation.
    """

    slot: ClassVar[Slot]
    name: ClassVar[str] = ""
    equation: ClassVar[str] = ""
    source: ClassVar[str] = ""
    users: ClassVar[str] = ""
    linear: ClassVar[bool] = False
    test: ClassVar[str] = ""

    def __str__(self) -> str:
        """Return the text form: the name, and each field by its name."""
        values = [(field.name, getattr(self, field.name)) for field in fields(self)]  # type: ignore[arg-type]
        return ":".join([self.name, *(f"{name}={value_text(value)}" for name, value in values)])

    def check(self, field: str, low: float, high: float, example: str) -> None:
        """Refuse a field outside its span (`policies.checks.check_number`), and make it a plain number."""
        value = check_number(f"{self.slot} {self.name}", field, getattr(self, field), (low, high), example)
        object.__setattr__(self, field, value)

    def choose(self, field: str, *choices: str) -> None:
        """Refuse a word that is not among the choices."""
        if getattr(self, field) not in choices:
            raise ValueError(
                f"{self.slot} {self.name}: {field} is {getattr(self, field)!r}; choose from {', '.join(choices)}"
            )


class Method(Value):
    """How an outer update is made of a pseudo-gradient.

    A method with a first moment has the buffer m of its `rule()`, `m <- b m + w g` with w = 1 (sum form) or 1 - b (EMA
    form). Norms, cosine and restarts are of that buffer.
    """

    slot: ClassVar[Slot] = "method"
    plain: ClassVar[bool] = False
    """Whether the update is that of its rule, momentum SGD."""
    first_moment: ClassVar[bool] = True
    """Whether it has a buffer that a restart acts on."""
    grows: ClassVar[bool] = False
    """Whether its update is short while its first moment holds few pseudo-gradients, which a schedule may correct."""
    matrices: ClassVar[bool] = False
    """Whether it works on whole matrices, so that no parameter may be cut into shards."""
    reads_out: ClassVar[bool] = False
    """Whether it brings its own readout, an average of its anchors."""
    buffers: ClassVar[tuple[str, ...]] = ("momentum_buffer",)
    """Its tensors of a parameter's size."""

    ahead: ClassVar[bool] = False
    """Whether it looks ahead, where it has no field `nesterov`."""
    form: ClassVar[str] = "sum"
    """Form of its rule."""

    def __post_init__(self) -> None:
        """Refuse values that make no rule."""
        try:
            self.rule()
        except ValueError as error:
            raise ValueError(str(error).replace("OuterRule:", f"method {self.name}:", 1)) from None

    @property
    def restarts(self) -> bool:
        """Whether a restart changes anything: a first moment outlasts its round."""
        return self.first_moment

    def rule(self) -> OuterRule:
        """Return learning rate (1 without such a field) and momentum (0), and of a plain method the whole update."""
        values: dict[str, Any] = {"lr": 1.0, "momentum": 0.0, "nesterov": self.ahead, "form": self.form}
        names = {field.name for field in fields(self)} & values.keys()  # type: ignore[arg-type]
        return OuterRule(**values | {name: getattr(self, name) for name in names})


@dataclass(frozen=True)
class Filter(Value):
    """What happens to a pseudo-gradient before the method sees it."""

    slot: ClassVar[Slot] = "filter"
    matrices: ClassVar[bool] = False
    """Whether it works on whole matrices."""


@dataclass(frozen=True)
class Schedule(Value):
    """How learning rate and momentum change from round to round."""

    slot: ClassVar[Slot] = "schedule"
    linear: ClassVar[bool] = True

    def at(self, rule: OuterRule, number: int, age: int) -> OuterRule:
        """Return the rule of a round.

        Args:
            rule: of the method.
            number: of the round, from 1.
            age: rounds since the last restart, this round included.
        """
        raise NotImplementedError

    def over(self, rounds: int) -> Self:
        """Return the same schedule where `rounds=0` stands for a run of so many."""
        return replace(self, rounds=rounds) if getattr(self, "rounds", None) == 0 else self


@dataclass(frozen=True)
class Readout(Value):
    """Which point is evaluated and exported: the anchor, or an average of anchors, with its bytes."""

    slot: ClassVar[Slot] = "readout"
    linear: ClassVar[bool] = True

    def weight(self, count: int) -> float:
        """Return w of `r <- r + w (x - r)` at the anchor of that number, from 1; 1 forgets all earlier ones."""
        raise NotImplementedError


V = TypeVar("V", bound=type[Value])


def register(name: str) -> Any:
    """Make a value known under `name` to text, configurations and the command line; a class decorator.

    A class of the same module and name replaces the earlier definition, as when a notebook's cell runs again.

    Raises:
        ValueError: the name belongs to another value of the slot.
    """

    def add(cls: V) -> V:
        check_name(cls.slot, name, REGISTRY[cls.slot].get(name), cls)
        cls.name = name
        REGISTRY[cls.slot][name] = cls
        return cls

    return add


def value_text(value: Any) -> str:
    """Return a field's value as a text form has it."""
    return str(value).lower() if isinstance(value, bool) else str(value)
