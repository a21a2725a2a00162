"""The question that the page begins with: a rule, a spectrum, the length of the run; from options or from a run."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from twophase.advice.period import Rule, Spectrum
from twophase.errors import UsageError
from twophase.explorer.from_run import FromRun
from twophase.explorer.page import POLICIES_WORDS, State, shows
from twophase.restart import Never, Periodic
from twophase.restart import parse as parse_policy

_RANGE_MODES = 16
"""Modes of --sigma-range without a COUNT."""


@dataclass(frozen=True)
class Outer(Rule):
    """The outer rule, and when its momentum restarts."""

    restart: str = str(State.restart)
    """Rounds between restarts, `never`, or another policy: cycle, at, soft, auto."""


@dataclass(frozen=True)
class Question(Spectrum):
    """Hold where the page begins: a rule, a spectrum (or the run's), and the length of the run."""

    outer: Outer = field(default_factory=Outer)
    rounds: int = State.rounds
    """Outer rounds of the run."""


def of_run(run: FromRun) -> Question:
    """Return the question with a run's own rule, period and length, on which options come on top."""
    rule = run.rule
    method: Any = "nesterov" if rule.nesterov else "heavy-ball"
    outer = Outer(method, rule.lr, rule.momentum, rule.form, run.restart)
    return Question(outer=outer, rounds=run.rounds)


def state_of(question: Question, run: FromRun | None = None) -> State:
    """Return the page's first state.

    Raises:
        UsageError: several spectra, values that make no rule, or a restart policy that the page does not know. Also a
            run that shows no effective progress, without a further spectrum.
    """
    if run and question.eigenvalues and question.inner_steps is None:
        question = replace(question, inner_steps=run.inner_steps)
    outer = question.outer
    outer.value()  # refuses what makes no rule
    try:
        policy = parse_policy(outer.restart)
    except ValueError as error:
        raise UsageError(f"--outer.restart {outer.restart}: {error}") from None
    if not (isinstance(policy, (Never, Periodic)) or shows(policy)):
        raise UsageError(f"--outer.restart {outer.restart}: {POLICIES_WORDS}")
    state = State(
        lr=float(outer.lr),
        momentum=float(outer.momentum),
        nesterov=outer.method == "nesterov",
        form=outer.form,
        restart=policy.period if isinstance(policy, Periodic) else 0,
        policy=str(policy) if shows(policy) else "",
        rounds=question.rounds,
        inner_steps=State.inner_steps if run is None else run.inner_steps,
    )
    state = replace(state, **_spectrum(question, run))
    modes = {"one": 1, "list": len(state.sigmas), "range": state.count, "curvature": len(state.curvatures)}
    modes["run"] = len(run.spectrum.sigma) if run else 0
    return replace(state, mode=modes[state.spectrum] - 1)  # the slowest mode, which the loss ends with


def _spectrum(question: Question, run: FromRun | None) -> dict[str, Any]:
    """Return the values of the state that say which spectrum it shows; one by option replaces the run's."""
    match question.option():
        case "--eigenvalues":
            assert question.inner_steps is not None
            inner = {"inner_lr": question.inner_lr, "inner_steps": int(question.inner_steps)}
            return {"spectrum": "curvature", "curvatures": question.eigenvalues} | inner
        case "--sigma-range":
            low, high, count = question.ends(_RANGE_MODES)
            return {"spectrum": "range", "low": low, "high": high, "count": count}
        case "--sigma":
            is_single = len(question.sigma) == 1
            return (
                {"spectrum": "one", "sigma": question.sigma[0]}
                if is_single
                else {"spectrum": "list", "sigmas": question.sigma}
            )
    if run is not None and not run.spectrum.sigma:
        raise UsageError(
            f"--run {run.spectrum.name}: effective progress {run.spectrum.note} Give --sigma, --sigma-range or "
            "--eigenvalues together with --run, which then gives the rule, the period and the rounds"
        )
    return {"spectrum": "run" if run else "list"}
