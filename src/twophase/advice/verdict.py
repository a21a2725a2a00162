"""Judge whether the outer loop oscillates, overshoots or lags: a verdict for each block, with its evidence.

The words, in the linear model's terms:

* **oscillates**: the momentum carries the parameters past the minimum and back. The pseudo-gradient turns against the
  buffer, and the estimated sigma lies where the eigenvalues are complex.
* **overshoots**: the step itself goes past the minimum, whatever the momentum: `lr w sigma` (with Nesterov's look-ahead
  `(1 + momentum)` times that) is 1 or more, or the eigenvalues are real and negative.
* **lags**: pseudo-gradient and buffer keep pointing the same way; what is left lies ahead.
* **held**: it would oscillate, but its restarts come before the buffer has turned.
* **diverges**: the pseudo-gradient grows without end, or the run was ended for that.
* **cannot tell**: anything else, with the reason.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, Literal

from twophase.advice.evidence import Evidence, stretches
from twophase.advice.reasons import cosine_words, sigma_missing, sigma_words, step_alone, swing_words
from twophase.base.config import UsageError
from twophase.rule import OuterRule
from twophase.runs.record import Block, RunRecord
from twophase.theory.advice import Advice, advise
from twophase.theory.contraction import restart_rate
from twophase.theory.modes import asymptotic_rate, regime, stable_limit
from twophase.theory.periods import cancellation_periods

Verdict = Literal["oscillates", "overshoots", "lags", "held", "diverges", "cannot tell"]
LEAST_ROUNDS = 8
_COMPLEX = ("oscillatory", "critical")
_CLEAR = 4.0
"""Standard errors by which the mean cosine must exceed zero for `lags` where no third of the run shows it."""
_TOO_SOON = 0.6
"""Share of the first cancellation time before which a restart throws away momentum that is still of use."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Hold a stretch of rounds and what it shows.

    Args:
        verdict: in one word.
        reasons: what it rests on, or why nothing can be told; plain sentences.
        sigma: (low, estimate, high), 95 %, within (0, 1]; None where it is not determined.
        evidence: the numbers.
    """

    verdict: Verdict
    reasons: tuple[str, ...]
    sigma: tuple[float, float, float] | None
    evidence: Evidence


@dataclass(frozen=True, slots=True)
class Finding:
    """Hold what can be said of one block.

    Args:
        block: its name.
        verdict: on the latest rounds.
        reasons: what it rests on, or why nothing can be told; plain sentences.
        latest: the latest rounds; None where there are none.
        thirds: the thirds of the run.
        advice: the theory's for the three values of the latest sigma; empty without.
        restarts: the block's policy, as text.
    """

    block: str
    verdict: Verdict
    reasons: tuple[str, ...]
    latest: Stage | None
    thirds: tuple[Stage, ...]
    advice: tuple[Advice, ...]
    restarts: str

    @property
    def sigma(self) -> tuple[float, float, float] | None:
        """Return (low, estimate, high) of the latest rounds; None where it is not determined."""
        return self.latest.sigma if self.latest else None


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Hold what can be said of a run.

    Args:
        rule: its outer rule; None if it is not known.
        rounds: rounds recorded, of several fragments those that all of them have ended.
        planned: rounds of the whole run; None if it is not known.
        state: `finished`, `diverged` or `unfinished`.
        findings: one a block.
        problems: what is missing or wrong in the folder.
    """

    rule: OuterRule | None
    rounds: int
    planned: int | None
    state: str
    findings: tuple[Finding, ...]
    problems: tuple[str, ...] = field(default=())


def diagnose(record: RunRecord) -> Diagnosis:
    """Return the diagnosis of a run that has been read.

    Args:
        record: of `read_record`, in whatever state.
    """
    rule, count = record.rule, record.recorded
    if rule is None:
        reason = "The configuration holds no outer rule (lr, momentum, nesterov, form), so the record has no scale."
        findings = [_unknown("whole model", reason)]
    elif not len(record.rounds["round"]):
        findings = [_unknown("whole model", "No round has been recorded yet.")]
    elif not record.blocks:
        reason = (
            "The rounds hold no norms and cosines of a momentum buffer: the outer optimizer is not OuterSGD. An "
            "optimizer that scales each coordinate (Adam, for one) is outside the theory."
        )
        findings = [_unknown("whole model", reason)]
    else:
        findings = [_finding(record, block, rule) for block in record.blocks]
    return Diagnosis(rule, count, record.planned_rounds, record.state, tuple(findings), tuple(record.problems))


def _unknown(block: str, reason: str) -> Finding:
    return Finding(block, "cannot tell", (reason,), None, (), (), "unknown")


def _finding(record: RunRecord, block: Block, rule: OuterRule) -> Finding:
    evidence, parts = stretches(record, block, rule)
    ended = record.state == "diverged"
    stages = tuple(_stage(rule, part, ended=ended and part is parts[-1]) for part in parts)
    latest = weighed(_stage(rule, evidence, ended=ended), stages)
    policy = record.policy(block.name)
    reasons = list(latest.reasons)
    if record.number("sync.mixing") > 0:
        reasons.append("Replicas kept a share of their own parameters (--sync.mixing), which the estimate ignores.")
    if evidence.observed.foreign:
        reasons.append(
            f"In {evidence.observed.foreign} of these rounds the buffer or the step is not the one that the configured "
            "rule makes: a policy took a step of its own, or other settings were in force; those rounds are left out."
        )
    return Finding(
        block.name,
        latest.verdict,
        tuple(reasons),
        latest,
        stages,
        _advice(rule, latest.sigma, record.planned_rounds),
        "unknown" if policy is None else str(policy),
    )


def _stage(rule: OuterRule, evidence: Evidence, *, ended: bool) -> Stage:
    sigma = sigma_range(evidence)
    verdict, reasons = _judge(rule, evidence, sigma, ended=ended)
    return Stage(verdict, tuple(reasons), sigma, evidence)


def weighed(latest: Stage, thirds: tuple[Stage, ...]) -> Stage:
    """Return the stage, or "cannot tell" where it alone says `lags`, and not clearly."""
    seen = latest.evidence
    alone = bool(thirds) and all(stage.verdict == "cannot tell" for stage in thirds)
    if latest.verdict != "lags" or not alone or seen.cosine > _CLEAR * seen.cosine_error:
        return latest
    reason = f"No third of the run shows that by itself, and the mean cosine is not {_CLEAR:g} standard errors above 0."
    return dataclasses.replace(latest, verdict="cannot tell", reasons=(*latest.reasons, reason))


def sigma_range(evidence: Evidence) -> tuple[float, float, float] | None:
    """Return low, estimate and high of sigma (95 %) within (0, 1]; None where the record does not determine it."""
    shown = evidence.observed.shown_interval
    if shown is None or not evidence.rates_known:
        return None
    low, high = shown
    return low, min(max(evidence.observed.sigma, low), 1.0), min(high, 1.0)


def _advice(rule: OuterRule, sigma: tuple[float, float, float] | None, rounds: int | None) -> tuple[Advice, ...]:
    if sigma is None or rule.lr == 0:
        return ()
    return tuple(advise(rule, [value], rounds=rounds) for value in sigma)


# ----------------------------------------------------------------------------------------------------------- judging


def _judge(
    rule: OuterRule, latest: Evidence, sigma: tuple[float, float, float] | None, *, ended: bool
) -> tuple[Verdict, list[str]]:
    grown = _grows(rule, latest, sigma, ended=ended)
    if grown:
        return "diverges", grown
    refusal = _refusal(rule, latest)
    if refusal:
        return "cannot tell", [refusal]
    said = [cosine_words(latest)]
    if latest.turns is None:
        return "cannot tell", [*said, "Chance would give such signs as well: noise hides what the buffer does."]
    if sigma is None:
        said.append(sigma_missing(latest))
        if latest.turns:
            said.append(
                "The updates seem to go past the minimum; noise that drives an oscillating mode looks alike. Whether "
                "by the momentum (an oscillation) or by the step itself (an overshoot) depends on sigma."
            )
        elif latest.restarts and 2 * latest.oldest < latest.rounds:
            said.append(
                "The buffer has not turned before a restart drops it; whether it would is unknown: none older than "
                f"{latest.oldest} rounds was measured."
            )
        else:
            return "lags", said
        return "cannot tell", said
    said.append(sigma_words(rule, latest, sigma))
    noise = _noise(rule, latest, sigma) if latest.turns else ""
    if noise:
        return "cannot tell", [*said, noise]
    return _by_regime(rule, latest, sigma, said)


def _by_regime(
    rule: OuterRule, latest: Evidence, sigma: tuple[float, float, float], said: list[str]
) -> tuple[Verdict, list[str]]:
    names = [str(regime(rule, value)) for value in sigma]
    passes = [step_alone(rule, value) >= 1 for value in sigma]
    middle = names[1]
    if latest.turns:
        if passes[1] or middle in ("real_above", "negative_determinant", "nilpotent"):
            said.append(
                f"The part of the step that does not come from the momentum covers {step_alone(rule, sigma[1]):.3g} of "
                "the way to the minimum; from 1 on it goes past it."
            )
            if len(set(passes)) > 1:
                said.append("Within the interval of sigma it may also stay below 1; then it is the momentum.")
            return "overshoots", said
        if all(name in _COMPLEX for name in names):
            said.append(swing_words(rule, latest, sigma))
            return "oscillates", said
        said.append("Within its interval the eigenvalues are complex or real, so an oscillation is not certain.")
        return "cannot tell", said
    first = float(cancellation_periods(rule, sigma[1], 1)[0]) if middle in _COMPLEX else math.nan
    if latest.restarts and first > 0:
        every = latest.rounds / latest.restarts
        if every >= _TOO_SOON * first:
            said.append(
                f"It would turn after {first:.1f} rounds; its restarts, every {every:.3g} rounds, come before that or "
                "soon after."
            )
            return "held", said
        said.append(
            f"It would turn only after {first:.1f} rounds, and restarts come every {every:.3g}: they take away "
            "momentum that is still of use."
        )
        return "lags", said
    if middle in _COMPLEX:
        said.append(
            "A single mode of this sigma would oscillate, and this run does not: its motion is that of many slower "
            "modes, which sigma along the buffer does not show. Trust the cosine."
        )
    else:
        said.append("The eigenvalues there are real: such a mode does not oscillate, and a restart slows it down.")
    return "lags", said


def _refusal(rule: OuterRule, latest: Evidence) -> str:
    """Return why nothing can be told, or an empty text."""
    if rule.momentum == 0:
        return "The rule has no momentum: there is no buffer that could oscillate, and nothing to restart."
    if latest.rounds < LEAST_ROUNDS:
        return f"Too few rounds: {latest.rounds}, and at least {LEAST_ROUNDS} are needed."
    if latest.restarts >= latest.rounds - 1:
        return "The momentum restarts in every round, so that no buffer is ever measured; this is no momentum at all."
    if latest.cosines < LEAST_ROUNDS - 2:
        return (
            f"Too few cosines: only in {latest.cosines} of the last {latest.rounds} rounds was there a buffer that had "
            "not just been dropped, with finite numbers."
        )
    return ""


def _grows(rule: OuterRule, latest: Evidence, sigma: tuple[float, float, float] | None, *, ended: bool) -> list[str]:
    """Return what shows that the run diverges, or nothing."""
    said = []
    if ended:
        said.append("The run was ended because its loss or its pseudo-gradient left the allowed range.")
    if latest.lost:
        said.append(
            f"In the last {latest.lost} rounds neither norms nor cosine are finite numbers, and before they were."
        )
    if latest.risen > 0:
        a_round = _factor(latest.risen / (latest.risen_rounds - 1))
        said.append(
            f"The norm of the pseudo-gradient itself grows by a factor {a_round} a round, {_factor(latest.risen)} over "
            f"the last {latest.risen_rounds} rounds."
        )
    if said and sigma is not None:
        said.append(sigma_words(rule, latest, sigma))
        limit = float(stable_limit(rule))
        if limit <= sigma[2]:
            said.append(
                f"Modes of sigma {limit:.3g} or more are unstable under this rule; no restart schedule can stabilise "
                "them (Theorem 2)."
            )
        else:
            said.append(
                "In the linear model this sigma is stable, so the cause lies outside of it: the inner optimizer, the "
                "loss's shape, or single directions of larger sigma."
            )
    return said


def _factor(logarithm: float) -> str:
    return f"{math.exp(min(logarithm, 230.0)):.3g}"


def _noise(rule: OuterRule, latest: Evidence, sigma: tuple[float, float, float]) -> str:
    """Return why the motion is not the model's, or an empty text: it does not shrink where the model's would."""
    rate = float(asymptotic_rate(rule, sigma[1]))
    if latest.restarts:
        rate = float(restart_rate(rule, sigma[1], max(1, round(latest.rounds / latest.restarts))))
    rate = min(rate, 1.0)
    if not rate > 0 or -latest.growth + 2 * latest.growth_error >= 0.5 * rate:
        return ""
    return (
        f"But the norm of the pseudo-gradient does not shrink as the model's would, by {_percent(1 - math.exp(-rate))} "
        f"a round (it changes by {_percent(math.expm1(latest.growth), sign=True)}): noise, or a loss that is not "
        "linear here, keeps it moving. That looks alike, and no restart removes it."
    )


def _percent(share: float, *, sign: bool = False) -> str:
    return f"{100 * share:{'+' if sign else ''}.2g} %".replace("-", "\N{MINUS SIGN}")


# ------------------------------------------------------------------------------------------------------------ output


def check_run(record: RunRecord) -> None:
    """Refuse a folder from which nothing at all could be read.

    Raises:
        UsageError: neither a configuration nor rounds.
    """
    if not record.config and not len(record.rounds["round"]):
        raise UsageError(
            f"{record.path}: holds neither a readable config.yaml nor any round; there is nothing to judge"
        )


def as_json(diagnosis: Diagnosis) -> dict[str, Any]:
    """Return the diagnosis as plain JSON values; numbers that are not finite are null."""

    def plain(value: Any) -> Any:
        if isinstance(value, Advice):
            return {
                "sigma": float(value.sigma[0]),
                "period": value.recommended.period,
                "controls": plain(value.controls),
            }
        if dataclasses.is_dataclass(value):
            return {item.name: plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [plain(item) for item in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return plain(diagnosis)
