"""Answer `twophase period`: when to restart a rule on modes of given sigma, as text and as JSON. No torch."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from twophase.config import require
from twophase.errors import UsageError
from twophase.files import finite
from twophase.rule import FORM_WORDS, Form, OuterRule
from twophase.runs.config import LARGEST
from twophase.theory import Advice, Criterion, advise, cancellation_periods, regime, stable_limit

CANNOT = (
    "cannot tell which setting trains a model best: linear modes, no noise, gradient descent inside a round; on "
    "language models its order of settings was reversed (docs/theory.md)"
)
"""What the model cannot tell, the first line of every answer."""
_NAMES = {
    "loss": "exact final loss",
    "minimax": "slowest mode's rate",
    "rate": "mean rate of a cycle",
    "factor": "factor of a cycle (paper)",
}
_MODES, _MOST_MODES = 33, 1000  # of --sigma-range


@dataclass(frozen=True)
class Rule:
    """The outer rule."""

    method: Literal["heavy-ball", "nesterov"] = "nesterov"
    """Heavy ball, or Nesterov momentum."""
    lr: float = 0.7
    """Outer learning rate, in the form named below."""
    momentum: float = 0.9
    """Outer momentum, in [0, 1)."""
    form: Form = "sum"
    """`sum` (as torch.optim.SGD) or `ema` (as the restart paper); lr_sum = lr_ema (1 - momentum)."""

    def __post_init__(self) -> None:
        require(0 < self.lr <= LARGEST, "outer.lr", self.lr, f"above 0 and at most {LARGEST:g}")
        require(0 <= self.momentum < 1, "outer.momentum", self.momentum, "in [0, 1)")


@dataclass(frozen=True)
class Question:
    """A rule, its modes and, if known, the length of the run."""

    outer: Rule = field(default_factory=Rule)
    sigma: tuple[float, ...] = ()
    """Effective progress of one or several modes, each in [0, 1]."""
    sigma_range: tuple[float, ...] = ()
    """LOW HIGH or LOW HIGH COUNT: equally spaced modes, 33 unless told."""
    rounds: int | None = None
    """Outer rounds of the run; without it the advice is for a long run."""

    def __post_init__(self) -> None:
        for option, values in (("sigma", self.sigma), ("sigma-range", self.sigma_range[:2])):
            require(all(0 <= value <= 1 for value in values), option, _words(values), "in [0, 1]")
        require(self.rounds is None or self.rounds >= 1, "rounds", self.rounds, "at least 1")


def answer(question: Question) -> Advice:
    """Return the theory's advice.

    Raises:
        UsageError: no modes, or both ways to give them, or values out of range.
    """
    outer = question.outer
    rule = OuterRule(outer.lr, outer.momentum, outer.method == "nesterov", outer.form)
    if bool(question.sigma) == bool(question.sigma_range):
        raise UsageError("--sigma or --sigma-range: must be given, one of them, such as --sigma-range 0.05 0.95")
    sigma = question.sigma
    if given := question.sigma_range:
        low, high, count = given if len(given) == 3 else (*given, _MODES) if len(given) == 2 else (1, 0, 0)
        is_range = low <= high and 2 <= count <= _MOST_MODES and count == int(count)
        range_ = f"LOW HIGH [COUNT] with LOW <= HIGH and a whole COUNT from 2 to {_MOST_MODES}"
        require(is_range, "sigma-range", _words(given), range_)
        sigma = tuple(np.linspace(low, high, int(count)).tolist())
    require(max(sigma) > 0, "sigma", _words(sigma[:1]), "above 0 for one mode at least")
    return advise(rule, sigma, rounds=question.rounds)


def describe(advice: Advice) -> str:
    """Return the advice as text: what the model cannot tell, the rule and its modes, then settings side by side."""
    rule, best, sigma = advice.rule, advice.recommended, advice.sigma
    other = rule.to("ema" if rule.form == "sum" else "sum")
    first = cancellation_periods(rule, sigma, 1)[:, 0]
    turning = np.isfinite(first)
    names, counts = np.unique(np.atleast_1d(regime(rule, sigma)), return_counts=True)
    shares = ", ".join(
        f"{100 * count / sigma.size:.3g} % {name.replace('_', ' ')}" for name, count in zip(names, counts, strict=True)
    )
    lines = [
        f"model    {CANNOT}",
        f"rule     {rule.describe()}, the same as lr {other.lr:.4g} in {FORM_WORDS[other.form]}",
        f"modes    {sigma.size}, sigma {sigma.min():.4g} to {sigma.max():.4g}: {shares}",
    ]
    if turning.any():
        low, high = first[turning].min(), first[turning].max()
        lines.append(f"zeros    a mode passes zero first after {low:.2f} to {high:.2f} rounds")
    if (limit := float(stable_limit(rule))) <= sigma.max():
        lr = rule.lr * limit / sigma.max()
        lines.append(f"unstable from sigma {limit:.3g} on, which no restart changes: lower lr below {lr:.4g}")
    if best.period is not None:
        lines.append(f"slower   {100 * advice.hurt:.3g} % of the modes, by the best restart")
    *others, tuned = advice.controls
    rows = [
        (f"best restart: --outer.restart {best.period}" if best.period else "best restart: none helps", best),
        (f"best without: {tuned.name}", tuned),
        ("the rule itself, no restart", advice.without),
        *((control.name, control) for control in others),
    ]
    losses = f"log10 loss after {advice.rounds} rounds" if advice.rounds else ""
    lines += ["", f"{'setting':62} {'rate':>8}  {losses}".rstrip(), *(_row(*row) for row in rows)]
    chosen = (f"{_NAMES[item.name]} {item.period or 'never'}" for item in advice.criteria)
    lines += ["", "rate: nats a round of the slowest mode, in a long run", f"period by criterion: {', '.join(chosen)}"]
    return "\n".join(lines)


def _row(name: str, setting: Criterion) -> str:
    rate = f"{setting.rate:8.4f}" if setting.rate > 0 else "diverges"
    loss = "" if setting.log_loss is None else f"{setting.log_loss / math.log(10):10.3f}"
    return f"{name:62} {rate}  {loss}".rstrip()


def _words(values: tuple[float, ...]) -> str:
    return " ".join(f"{value:g}" for value in values)


def to_json(advice: Advice) -> str:
    """Return the advice as one JSON object; infinite rates are null."""
    tree: dict[str, Any] = dataclasses.asdict(advice)
    tree |= {"cannot_tell": CANNOT, "recommended": advice.recommended.period}
    return json.dumps(finite(tree), indent=2, allow_nan=False)
