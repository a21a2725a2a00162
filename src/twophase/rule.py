"""The outer rule: what the outer optimizer does with a pseudo-gradient, as a value without tensors.

Mixing up the two writings of momentum changes the step size by `1/(1 - momentum)`, tenfold at momentum 0.9. Every rule
therefore names its form.

| form    | buffer               | heavy ball    | Nesterov                           |
|---------|----------------------|---------------|------------------------------------|
| `"sum"` | m <- b m + g         | x <- x - lr m | x <- x - lr (g + b m)              |
| `"ema"` | m <- b m + (1 - b) g | x <- x - lr m | x <- x - lr ((1 + b) m - b m_old)  |

Here `g = anchor - mean of the replicas` is the pseudo-gradient, `b` the momentum and `m_old` the buffer before the
round. The two are one rule in two notations: `lr_sum = lr_ema (1 - b)` and `m_ema = (1 - b) m_sum`.
`torch.optim.SGD` (dampening 0), optax and every DiLoCo engine write the sum form; the restart paper writes its
equations in the EMA form.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from numbers import Real
from operator import index
from typing import Literal, get_args

Form = Literal["ema", "sum"]
FORMS: tuple[Form, ...] = get_args(Form)
FORM_WORDS: dict[str, str] = {"sum": "sum form", "ema": "EMA form"}


def whole_number(name: str, value: object, least: int = 1) -> int:
    """Return a whole number, NumPy's included, as an int; a ValueError names one that is not >= `least`."""
    try:
        number = least - 1 if isinstance(value, bool) else index(value)  # type: ignore[arg-type]
    except TypeError:
        number = least - 1
    if not least <= number <= 10**15:  # which every float, JSON reader and tensor holds exactly
        raise ValueError(f"{name} must be a whole number >= {least}, got {value!r}")
    return number


@dataclass(frozen=True, slots=True)
class OuterRule:
    """Outer learning rate, momentum and kind of momentum, in the sum form of `torch.optim.SGD` or the paper's EMA form.

    `lr` is finite and >= 0 (the paper's nu in EMA form), `momentum` in [0, 1) (its beta_out). `form` says which of the
    two writings `lr` is meant in. Source: paper section 2, equations for T_HB and T_NAG.

    >>> OuterRule(0.7, 0.9, nesterov=True).to("ema").lr
    7.000000000000001
    """

    lr: float
    momentum: float
    nesterov: bool = False
    form: Form = "sum"

    def __post_init__(self) -> None:
        if self.nesterov not in (True, False):  # OuterRule(0.7, 0.9, "ema") would be Nesterov in sum form
            raise ValueError(f"nesterov must be True or False, got {self.nesterov!r}; form comes after it")
        if self.form not in FORMS:
            raise ValueError(f'form must be "sum" (as torch.optim.SGD) or "ema" (as the paper), got {self.form!r}')
        if not (isinstance(self.lr, Real) and 0 <= self.lr < math.inf):
            raise ValueError(f"lr must be a finite number >= 0, got {self.lr!r}")
        if not (isinstance(self.momentum, Real) and 0 <= self.momentum < 1):
            raise ValueError(f"momentum must be in [0, 1), got {self.momentum!r}")
        for name in ("lr", "momentum"):  # NumPy's scalars become plain numbers, which JSON and checkpoints take
            object.__setattr__(self, name, float(getattr(self, name)) + 0.0)  # no -0
        object.__setattr__(self, "nesterov", bool(self.nesterov))

    def to(self, form: Form) -> OuterRule:
        """Return the same trajectory written in the other form: `lr_sum = lr_ema (1 - momentum)`.

        Buffers differ by the same factor, `m_ema = (1 - momentum) m_sum`. A soft restart needs a conversion, too.
        """
        if form == self.form:
            return self
        scale = 1 - self.momentum
        return replace(self, form=form, lr=self.lr * scale if form == "sum" else self.lr / scale)

    @property
    def injection(self) -> float:
        """Weight with which a pseudo-gradient enters the buffer: 1 (sum form) or 1 - momentum (EMA form)."""
        return 1.0 if self.form == "sum" else 1 - self.momentum

    @property
    def weights(self) -> tuple[float, float]:
        """A and B of the update `A g + B m`, with the m before g is mixed in."""
        injection = 1.0 if self.form == "sum" else 1 - self.momentum
        if self.nesterov:
            return self.lr * (1 + self.momentum) * injection, self.lr * self.momentum * self.momentum
        return self.lr * injection, self.lr * self.momentum

    def describe(self) -> str:
        """Return one line for people: kind, numbers and form, for example `Nesterov lr 0.7 momentum 0.9 (sum form)`."""
        kind = "momentum-free" if self.momentum == 0 else "Nesterov" if self.nesterov else "heavy ball"
        return f"{kind} lr {self.lr:g} momentum {self.momentum:g} ({FORM_WORDS[self.form]})"
