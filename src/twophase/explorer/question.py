"""The question that the page begins with: a rule and its restarts, the modes, the length of the run."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from twophase.config import require
from twophase.diagnose.observe import RECORD, observe
from twophase.errors import UsageError
from twophase.explorer.page import LIMITS, State
from twophase.restart import Never, Periodic, Soft, parse
from twophase.runs.config import OuterConfig
from twophase.runs.record import read_record

_RANGE_MODES = 16
"""Modes of --sigma-range without a COUNT."""


@dataclass(frozen=True)
class Question:
    """Hold where the page begins."""

    outer: OuterConfig = field(default_factory=lambda: OuterConfig("nesterov", restart="3"))
    sigma: tuple[float, ...] = ()
    """Effective progress of one or several modes, each in [0, 1]."""
    sigma_range: tuple[float, ...] = ()
    """LOW HIGH or LOW HIGH COUNT: equally spaced modes."""
    rounds: int = State.rounds
    """Outer rounds of the run."""


def of_run(path: Path) -> tuple[Question, tuple[float, ...]]:
    """Return the question with a run's rule, restarts and length, and each block's effective progress if it shows any.

    A longer run than the page shows is cut; restarts that it does not know, or that differ by fragment, are never.

    Raises:
        UsageError: no run, or one whose outer optimizer is more than a rule.
    """
    record = read_record(path)
    if record.rule is None or record.outer is None:
        words = record.outer_words or "missing in its config.yaml"
        raise UsageError(f"--run {path}: its outer optimizer must be momentum SGD with constant numbers, is {words}")
    text = "" if record.config.get("sync.restart") else record.config.get("outer.restart", "")
    policy = parse(text) if text else None
    outer = replace(record.outer, restart=str(policy) if _is_shown(policy) else "never")
    rounds = record.planned_rounds or len(record.rounds["round"]) or 1
    question = Question(outer, rounds=min(rounds, int(LIMITS["rounds"][1])))
    seen: list[float] = []
    for block in record.blocks if _is_shown(policy) and not record.numbers.get("sync.mixing", 0) > 0 else []:
        columns = (getattr(block, name) for name in RECORD)
        observed = observe(record.rule, *columns, inner_lr=record.rounds["inner_lr"][block.index])
        if observed.shown_interval is not None:
            seen.append(min(1.0, observed.sigma))
    return question, tuple(seen[: int(LIMITS["count"][1])])


def _is_shown(policy: object) -> bool:
    return isinstance(policy, Never | Soft) or (isinstance(policy, Periodic) and policy.period <= LIMITS["restart"][1])


def state_of(question: Question, seen: tuple[float, ...] = ()) -> State:
    """Return the page's first state, which shows the slowest mode: the loss ends with it.

    Args:
        question: the rule, and the modes if they are given.
        seen: modes of a run, for a question that gives none.

    Raises:
        UsageError: values that make no rule or lie outside the page's limits, or restarts that it does not show.
    """
    rule, policy = question.outer.rule(), question.outer.policy
    if rule is None or not question.outer.is_rule:
        raise UsageError(
            f"--outer.method: must be averaging, heavy-ball or nesterov without filter and schedule, got "
            f"{question.outer.describe()}"
        )
    require(_is_shown(policy), "outer.restart", policy, "never, a period up to 10000, or soft:K:RETAIN:INJECT")
    sigmas = _sigmas(question) or seen or State.sigmas
    return State(
        rule.lr,
        rule.momentum,
        rule.nesterov,
        rule.form,
        policy.period if isinstance(policy, Periodic | Soft) else 0,
        question.rounds,
        sigmas,
        sigmas.index(min(sigmas)),
        *((policy.retain, policy.inject) if isinstance(policy, Soft) else ()),
    )


def _sigmas(question: Question) -> tuple[float, ...]:
    """Return the modes that the options give."""
    if not (ends := question.sigma_range):
        return question.sigma
    if question.sigma:
        raise UsageError("--sigma and --sigma-range given; give one of them")
    count = ends[2] if len(ends) == 3 else _RANGE_MODES
    is_range = 2 <= len(ends) <= 3 and ends[0] <= ends[1] and count in range(2, int(LIMITS["count"][1]) + 1)
    require(is_range, "sigma-range", " ".join(f"{end:g}" for end in ends), "LOW HIGH [COUNT], COUNT a whole 2 to 64")
    return tuple(np.linspace(ends[0], ends[1], int(count)).round(6).tolist())
