"""Answer `twophase period`: when to restart a rule on a spectrum, in words, as JSON and as a figure. No torch."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from twophase.errors import UsageError
from twophase.files import finite
from twophase.rule import FORM_WORDS, Form, OuterRule
from twophase.theory.advice import Advice, Criterion, advise
from twophase.theory.inputs import Floats
from twophase.theory.modes import effective_progress

_FROM_CURVATURES = "for curvatures write --eigenvalues 10 1 --inner-lr 0.1 --inner-steps 50"
_RANGE_MODES = 33  # of --sigma-range, unless told
_MOST_MODES = 10_000  # of it; more say nothing new, and each costs memory


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

    def value(self) -> OuterRule:
        """Return the rule as a value; refuse numbers that make none."""
        try:
            return OuterRule(self.lr, self.momentum, self.method == "nesterov", self.form)
        except ValueError as error:
            raise UsageError(f"--outer.{error}") from None


@dataclass(frozen=True)
class Spectrum:
    """Hold the modes, in one of three ways."""

    sigma: tuple[float, ...] = ()
    """Effective progress of one or several modes, each in [0, 1]."""
    sigma_range: tuple[float, ...] = ()
    """LOW HIGH or LOW HIGH COUNT: equally spaced modes."""
    eigenvalues: tuple[float, ...] = ()
    """Curvatures of the modes; needs --inner-lr and --inner-steps."""
    inner_lr: float | None = None
    """Learning rate of the inner gradient descent, for --eigenvalues."""
    inner_steps: float | None = None
    """Inner steps a round (S), for --eigenvalues."""

    def option(self, *others: str) -> str:
        """Return the option that gives the modes, `others` included; refuse several of them. Empty where none does."""
        values = {"--sigma": self.sigma, "--sigma-range": self.sigma_range, "--eigenvalues": self.eigenvalues}
        named = [*(name for name, value in values.items() if value), *others]
        if len(named) > 1:
            raise UsageError(f"{' and '.join(named)} given; give one of them")
        if (self.inner_lr is not None, self.inner_steps is not None) != (bool(self.eigenvalues),) * 2:
            raise UsageError(
                "--eigenvalues needs --inner-lr and --inner-steps, for example --inner-lr 0.1 --inner-steps 50; they "
                "go with nothing else"
            )
        whole("--inner-steps", self.inner_steps)
        return named[0] if named else ""

    def ends(self, count: int) -> tuple[float, float, int]:
        """Return low and high end and count of `sigma_range`, which need not name its count."""
        ends = self.sigma_range
        modes = ends[2] if len(ends) == 3 else count
        if not 2 <= len(ends) <= 3 or not ends[0] <= ends[1] or not 2 <= modes <= _MOST_MODES or modes != int(modes):
            raise UsageError(
                f"--sigma-range {' '.join(f'{end:g}' for end in ends)}: write LOW HIGH [COUNT] with LOW <= HIGH and a "
                f"whole COUNT from 2 to {_MOST_MODES:,}, such as --sigma-range 0.3 0.95 20"
            )
        return ends[0], ends[1], int(modes)


@dataclass(frozen=True)
class Question(Spectrum):
    """Hold a rule, a spectrum and, if known, the length of the run."""

    outer: Rule = field(default_factory=Rule)
    spectrum: Path | None = None
    """A csv file with columns sigma and weight (or only sigma), with or without a line of names."""
    weights: tuple[float, ...] | None = None
    """One weight a mode; equal when left out."""
    rounds: float | None = None
    """Outer rounds of the run; without it the advice is for a long run."""
    max_period: float | None = None
    """Longest period to try; chosen from the spectrum when left out."""


def answer(question: Question) -> Advice:
    """Return the theory's advice.

    Raises:
        UsageError: no spectrum, several, or values out of range.
    """
    rule = question.outer.value()
    if rule.lr == 0:
        raise UsageError("--outer.lr is 0; nothing would move: give a number above 0")
    rounds, max_period = whole("--rounds", question.rounds), whole("--max-period", question.max_period)
    option = question.option(*["--spectrum"] if question.spectrum else [])
    try:
        sigma, weights = _modes(question, option)
        return advise(rule, sigma, weights=weights, rounds=rounds, max_period=max_period)
    except UsageError:
        raise
    except ValueError as error:
        of_weights = "--weights" if question.weights is not None else f"--spectrum {question.spectrum}: weights"
        raise UsageError(_in_options(str(error), option, of_weights)) from None


def _in_options(message: str, spectrum: str, weights: str) -> str:
    """Put options, those of the spectrum and its weights among them, in the place of the theory's arguments."""
    text = re.sub(r"^\w+: |\[\d+\]", "", message).replace("inner_lr", "--inner-lr")
    text = text.replace("effective_progress computes it from eigenvalues", _FROM_CURVATURES)
    options = {"sigma": spectrum, "eigenvalue": spectrum, "max_period": "--max-period", "weights": weights}
    word = text.partition(" ")[0]
    if word in options:
        return options[word] + text.removeprefix(word)
    if text.startswith("no mode moves"):
        return f"{spectrum}: no mode with a weight above 0 has a sigma above 0; nothing would move"
    return text if text.startswith("--") else f"--outer.lr: {text}"


def whole(option: str, value: float | None) -> int | None:
    """Return a whole number from an option that takes any number, so that a mistake in it is one line like others."""
    if value is not None and not (1 <= value < 2**53 and value == int(value)):
        raise UsageError(f"{option} is {value:g}; it must be a whole number >= 1")
    return None if value is None else int(value)


def _modes(question: Question, option: str) -> tuple[Floats, Floats | None]:
    """Return sigma and weights of the modes that an option gives."""
    if question.weights == ():
        raise UsageError("--weights: no numbers given; write one a mode, or leave it out for equal weights")
    weights = None if question.weights is None else np.array(question.weights)
    match option:
        case "--sigma":
            return np.array(question.sigma), weights
        case "--sigma-range":
            return np.linspace(*question.ends(_RANGE_MODES)), weights
        case "--eigenvalues":
            assert question.inner_lr is not None
            assert question.inner_steps is not None
            return effective_progress(question.eigenvalues, question.inner_lr, int(question.inner_steps)), weights
    if question.spectrum is None:
        raise UsageError(
            "no spectrum given; give one of --sigma 0.95 0.6, --sigma-range 0.3 0.95, --eigenvalues with --inner-lr "
            "and --inner-steps, --spectrum FILE.csv"
        )
    sigma, column = read_spectrum(question.spectrum)
    if column is not None and weights is not None:
        raise UsageError(f"--weights and a weight column in {question.spectrum} given; leave one out")
    return sigma, weights if column is None else column


def read_spectrum(path: Path) -> tuple[Floats, Floats | None]:
    """Read modes and weights of a csv file: columns `sigma` and, if present, `weight`; a header is optional.

    Raises:
        UsageError: a file that cannot be read or is no such table; the message names the line.
    """
    try:
        reader = csv.reader(path.read_text(encoding="utf-8-sig").splitlines(), skipinitialspace=True)
        lines = [(reader.line_num, line) for line in reader if any(word.strip() for word in line)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"--spectrum {path}: cannot be read ({error}); give a csv file") from None
    names = [word.strip().lower() for word in lines[0][1]] if lines else []
    if "sigma" in names:
        if "weight" not in names and any("weight" in name for name in names):
            raise UsageError(f"--spectrum {path}: columns are {', '.join(names)}; weights must be named weight")
        columns = [names.index(name) for name in ("sigma", "weight") if name in names]
        rows = [(number, [line[column] for column in columns if column < len(line)]) for number, line in lines[1:]]
    else:
        columns, rows = list(range(min(len(names), 2))), lines
    table = []
    for number, cells in rows:
        try:
            if len(cells) != len(columns):
                raise ValueError
            table.append([float(word) for word in cells])
        except ValueError:
            raise UsageError(
                f"--spectrum {path}: row {number} is {','.join(cells)!r}; write sigma, or sigma,weight, as numbers, "
                "below a line with these names or none"
            ) from None
    if not table:
        raise UsageError(f"--spectrum {path}: no modes in it; write one a line, sigma or sigma,weight")
    array = np.array(table)
    return array[:, 0], array[:, 1] if len(columns) == 2 else None


_CRITERIA = {
    "loss": "exact final loss",
    "minimax": "slowest mode's rate",
    "rate": "mean rate of a cycle",
    "factor": "factor of a cycle (paper)",
    "none": "no restart",
}
_REGIMES = {
    "oscillatory": "oscillatory",
    "critical": "critically damped",
    "real_below": "real, below the oscillatory interval",
    "real_above": "real, above the oscillatory interval",
    "negative_determinant": "real, of both signs",
    "nilpotent": "gone after two rounds",
}


def describe(advice: Advice) -> str:
    """Return the advice in words."""
    rule, other = advice.rule, advice.rule.to("ema" if advice.rule.form == "sum" else "sum")
    count = advice.sigma.size
    span = f"{advice.sigma.min():.4g}" if count == 1 else f"{advice.sigma.min():.4g} to {advice.sigma.max():.4g}"
    lines = [
        f"rule     {rule.describe()}, the same as lr {other.lr:.4g} in {FORM_WORDS[other.form]}",
        f"modes    {count}, sigma {span}",
        "regime   " + ", ".join(f"{_share(share)} {_REGIMES[name]}" for name, share in advice.regimes.items()),
    ]
    if advice.first_cancellation:
        low, high = advice.first_cancellation
        span = f"{low:.2f}" if high - low < 0.005 else f"{low:.2f} to {high:.2f}"
        paper, corrected = advice.heuristics
        lines.append(
            f"first cancellation after {span} rounds "
            f"(closed form at the mean sigma: {corrected:.2f}, as in the paper {paper:.2f})"
        )
    best = advice.recommended
    horizon = f"over {advice.rounds} rounds" if advice.rounds else "in a long run"
    chosen = (
        "no restart" if best.period is None else f"restart every {best.period} rounds (--outer.restart {best.period})"
    )
    head = f"{'criterion':26} {'period':>7} {'rate':>9}" + (f" {'log10 loss':>11}" if advice.rounds else "")
    lines += ["", f"recommended {horizon}: {chosen}", "", head, *map(_row, (*advice.criteria, advice.without)), ""]
    if best.period is not None:
        lines.append(f"a restart every {best.period} rounds slows down {_share(advice.hurt)} of the modes (by weight)")
    lines.append("what a restart must be held against, rate of the slowest mode without restarts:")
    lines += [f"  {rate:9.4f}  {name}" for name, rate in advice.controls.items()]
    lines += [f"warning: {text}" for text in advice.warnings]
    lines += ["", "model: linear modes, gradient descent inside a round, equal data on all replicas; no noise"]
    return "\n".join(lines)


def _row(criterion: Criterion) -> str:
    period = "never" if criterion.period is None else str(criterion.period)
    loss = "" if criterion.log_loss is None else f" {criterion.log_loss / math.log(10):11.3f}"
    return f"{_CRITERIA[criterion.objective]:26} {period:>7} {criterion.rate:9.4f}{loss}"


def _share(share: float) -> str:
    return f"{100 * share:.3g} %"


def to_json(advice: Advice) -> str:
    """Return the advice as one JSON object; infinite rates are null."""
    tree = dataclasses.asdict(advice) | {
        "sigma": advice.sigma.tolist(),
        "weights": advice.weights.tolist(),
        "recommended": advice.recommended.period,
        "restart": str(advice.policy),
    }
    return json.dumps(finite(tree), indent=2, allow_nan=False)
