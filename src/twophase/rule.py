"""Hold the outer rule: what the outer optimizer does with a pseudo-gradient, as a value without tensors.

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
from typing import Literal, get_args

Form = Literal["ema", "sum"]
FORMS: tuple[Form, ...] = get_args(Form)
FORM_WORDS: dict[str, str] = {"sum": "sum form", "ema": "EMA form"}


def check_rule(where: str, lr: float, momentum: float, form: str, nesterov: object = False) -> None:
    """Raise a ValueError that begins with `where` unless the values make an outer rule."""
    if nesterov not in (True, False):  # OuterRule(0.7, 0.9, "ema") would be Nesterov in sum form
        raise ValueError(f"{where}: nesterov is {nesterov!r}; it must be True or False (form comes after it)")
    if form not in FORMS:
        raise ValueError(f'{where}: form is {form!r}; write "sum" (as torch.optim.SGD) or "ema" (as the restart paper)')
    if not (isinstance(lr, Real) and 0 <= lr < math.inf and not (isinstance(lr, int) and lr > 10**308)):
        raise ValueError(f"{where}: lr is {lr!r}; it must be a finite number >= 0 (DiLoCo uses 0.7, sum form)")
    if not (isinstance(momentum, Real) and 0 <= momentum < 1):
        raise ValueError(
            f"{where}: momentum is {momentum!r}; it must lie in [0, 1): at 1 the buffer never forgets (DiLoCo uses 0.9)"
        )


@dataclass(frozen=True, slots=True)
class OuterRule:
    """Hold the hyperparameters of an outer momentum step, in a named form: see the table of the module.

    Args:
        lr: outer learning rate, dimensionless, finite and >= 0 (the paper's nu when the form is `"ema"`).
        momentum: outer momentum, 0 <= momentum < 1 (the paper's beta_out).
        nesterov: whether the step looks ahead.
        form: `"sum"` or `"ema"`, which of the two writings `lr` is meant in.

    Raises:
        ValueError: a value outside its range.

    Source: paper section 2, equations for T_HB and T_NAG; the conversion is exact (theory note R3).

    >>> OuterRule(0.7, 0.9, nesterov=True).to("ema").lr
    7.000000000000001
    """

    lr: float
    momentum: float
    nesterov: bool = False
    form: Form = "sum"

    def __post_init__(self) -> None:
        """Refuse impossible values, so that no code that takes a rule has to."""
        check_rule("OuterRule", self.lr, self.momentum, self.form, self.nesterov)
        for name in ("lr", "momentum"):  # NumPy's scalars become plain numbers, which JSON and checkpoints take
            object.__setattr__(self, name, float(getattr(self, name)))
        object.__setattr__(self, "nesterov", bool(self.nesterov))

    def to(self, form: Form) -> OuterRule:
        """Return the same trajectory written in the other form: `lr_sum = lr_ema (1 - momentum)`.

        Buffers differ by the same factor, `m_ema = (1 - momentum) m_sum`. A soft restart needs a conversion, too.
        """
        check_rule("OuterRule.to", self.lr, self.momentum, form)
        if form == self.form:
            return self
        scale = 1 - self.momentum
        return replace(self, form=form, lr=self.lr * scale if form == "sum" else self.lr / scale)

    @property
    def injection(self) -> float:
        """Return the weight with which a pseudo-gradient enters the buffer: 1 (sum form) or 1 - momentum (EMA form)."""
        return 1.0 if self.form == "sum" else 1 - self.momentum

    def describe(self) -> str:
        """Return one line for people: kind, numbers and form, for example `Nesterov lr 0.7 momentum 0.9 (sum form)`."""
        kind = "momentum-free" if self.momentum == 0 else "Nesterov" if self.nesterov else "heavy ball"
        return f"{kind} lr {self.lr:g} momentum {self.momentum:g} ({FORM_WORDS[self.form]})"
