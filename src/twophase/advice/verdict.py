"""Judge whether the outer loop oscillates, overshoots or lags: a verdict for each block, with its evidence.

The words, in the linear model's terms:

* **oscillates**: the momentum carries the parameters past the minimum and back. The pseudo-gradient turns against the
  buffer, and the estimated sigma lies where the eigenvalues are complex.
* **overshoots**: the step itself goes past the minimum, with any momentum. Then `lr w sigma` (with Nesterov's
  look-ahead `(1 + momentum)` times that) is 1 or more, or the eigenvalues are real and negative.
* **lags**: pseudo-gradient and buffer keep pointing the same way; what is left lies ahead.
* **held**: it would oscillate, but its restarts come before the buffer has turned.
* **diverges**: the pseudo-gradient grows without end, or the run was ended for that.
* **cannot tell**: anything else, with the reason.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from twophase.advice.change import LEAST_ROUNDS, Change, change
from twophase.advice.evidence import Evidence, Range, outside, stretches, within
from twophase.files import finite
from twophase.rule import OuterRule
from twophase.runs.record import Block, RunRecord
from twophase.theory.advice import Advice, advise
from twophase.theory.contraction import restart_rate
from twophase.theory.modes import asymptotic_rate, effective_step, phase, regime, stable_limit
from twophase.theory.observed import shrunk
from twophase.theory.periods import cancellation_periods

Verdict = Literal["oscillates", "overshoots", "lags", "held", "diverges", "cannot tell"]
_COMPLEX = ("oscillatory", "critical")
_REGIMES = {
    "oscillatory": "complex (it oscillates)",
    "critical": "at the border of oscillation",
    "real_below": "real and positive (it creeps)",
    "real_above": "real and negative (it jumps to and fro)",
    "negative_determinant": "real, of both signs",
    "nilpotent": "zero (it is gone in two rounds)",
}
_CLEAR = 4.0
"""Standard errors by which the mean cosine must exceed zero for `lags` where no third of the run shows it."""
_TOO_SOON = 0.6
"""Share of the first cancellation time before which a restart discards useful momentum."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Hold a stretch of rounds and what it shows."""

    verdict: Verdict
    reasons: tuple[str, ...]  # what it rests on, or why nothing can be told; plain sentences
    sigma: Range | None  # 95 %, within (0, 1]; None where it is not determined
    evidence: Evidence


@dataclass(frozen=True, slots=True)
class Finding:
    """Hold what can be said of one block."""

    block: str
    verdict: Verdict  # on the latest rounds
    reasons: tuple[str, ...]  # what it rests on, or why nothing can be told
    latest: Stage | None  # the latest rounds; None without any
    thirds: tuple[Stage, ...]  # of the run
    advice: tuple[Advice, ...]  # the theory's for the three values of the latest sigma; empty without
    restarts: str  # the block's policy, as text

    @property
    def sigma(self) -> Range | None:
        """Return (low, estimate, high) of the latest rounds; None where it is not determined."""
        return self.latest.sigma if self.latest else None


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Hold what can be said of a run."""

    rule: OuterRule | None  # that moves the anchors; None if absent or unknown
    rounds: int  # recorded, of several fragments those that all of them have ended
    planned: int | None  # rounds of the whole run; None if it is not known
    state: str  # `finished`, `diverged` or `running`
    findings: tuple[Finding, ...]  # one a block
    change: Change | None = None  # the one that the evidence supports
    command: str = ""  # that makes the changed run
    outer: str = ""  # the outer optimizer in words; empty if it is not known


def diagnose(record: RunRecord) -> Diagnosis:
    """Return the diagnosis of a run that has been read, in any state."""
    rule, reason = record.rule, ""
    if rule is None and record.outer_words:
        reason = (
            f"The outer optimizer is {record.outer_words}. These verdicts are for momentum SGD with a learning rate "
            "and a momentum that stay the same, and say nothing of others."
        )
    elif rule is None:
        reason = "The configuration holds no outer rule (method, lr, momentum, form), so the record has no scale."
    elif not len(record.rounds["round"]):
        reason = "No round has been recorded yet."
    elif not record.blocks:
        reason = (
            "The rounds hold no norms and cosines of a momentum buffer: the outer optimizer is not OuterSGD. An "
            "optimizer that scales each coordinate (Adam, for one) is outside the theory."
        )
    if reason or rule is None:
        findings = (Finding("whole model", "cannot tell", (reason,), None, (), (), record.restart),)
    else:
        findings = tuple(_finding(record, block, rule) for block in record.blocks)
    norms = record.rounds["pseudo_gradient_norm"]
    ended = record.state == "finished" and len(norms) > 0 and bool(np.isfinite(norms).all())
    verdicts = [finding.verdict for finding in findings]
    fallen = shrunk(norms) if ended and len(record.blocks) == 1 else None
    changed = change(rule, verdicts, record.recorded, record.config, fallen, planned=record.planned_rounds)
    command = changed.command(str(record.path), record.config) if changed else ""
    return Diagnosis(
        rule,
        record.recorded,
        record.planned_rounds,
        record.state,
        findings,
        changed,
        command,
        record.outer_words,
    )


def _finding(record: RunRecord, block: Block, rule: OuterRule) -> Finding:
    evidence, parts = stretches(record, block, rule)
    ended = record.state == "diverged"
    stages = tuple(_stage(rule, part, ended=ended and part is parts[-1]) for part in parts)
    latest = weighed(_stage(rule, evidence, ended=ended), stages)
    policy = record.policy(block.name)
    reasons = [*latest.reasons, *outside(record)]
    if evidence.observed.foreign:
        reasons.append(
            f"In {evidence.observed.foreign} of these rounds the buffer or the step is not that of the configured "
            "rule. A policy took its own step, or other settings were in force. Those rounds are left out."
        )
    advice = tuple(advise(rule, [value], rounds=record.planned_rounds) for value in latest.sigma or () if rule.lr)
    restarts = "unknown" if policy is None else str(policy)
    return Finding(block.name, latest.verdict, tuple(reasons), latest, stages, advice, restarts)


def _stage(rule: OuterRule, evidence: Evidence, *, ended: bool) -> Stage:
    sigma = within(evidence.observed) if evidence.rates_known else None
    verdict, reasons = _judge(rule, evidence, sigma, ended=ended)
    return Stage(verdict, tuple(reasons), sigma, evidence)


def weighed(latest: Stage, thirds: tuple[Stage, ...]) -> Stage:
    """Return the stage, or "cannot tell" where it alone says `lags`, and not clearly."""
    alone = bool(thirds) and all(stage.verdict != "lags" for stage in thirds)
    if latest.verdict != "lags" or not alone or latest.evidence.cosine > _CLEAR * latest.evidence.cosine_error:
        return latest
    reason = f"No third of the run shows that by itself, and the mean cosine is not {_CLEAR:g} standard errors above 0."
    return dataclasses.replace(latest, verdict="cannot tell", reasons=(*latest.reasons, reason))


def _judge(rule: OuterRule, latest: Evidence, sigma: Range | None, *, ended: bool) -> tuple[Verdict, list[str]]:
    if growth := _growth(rule, latest, sigma, ended=ended):
        return "diverges", growth
    if refusal := _refusal(rule, latest):
        return "cannot tell", [refusal]
    reasons = [
        f"Rounds {latest.first} to {latest.last}: the mean cosine between pseudo-gradient and buffer is "
        f"{latest.cosine:.2f} (standard error {latest.cosine_error:.2f}), and negative in "
        f"{100 * latest.against:.0f} % of {latest.cosines} rounds"
        + ("." if math.isnan(latest.gain) else f"; the median gain is {latest.gain:.3g}.")
    ]
    if latest.turns is None:
        return "cannot tell", [*reasons, "Chance would give such signs as well: noise hides what the buffer does."]
    if sigma is None:
        reasons.append(_sigma_missing(latest))
        if latest.turns:
            reasons.append(
                "The updates seem to go past the minimum; noise that drives an oscillating mode looks alike. Whether "
                "by the momentum (an oscillation) or by the step itself (an overshoot) depends on sigma."
            )
        elif latest.restarts and 2 * latest.oldest < latest.rounds:
            reasons.append(
                "The buffer has not turned before a restart drops it; whether it would is unknown: none older than "
                f"{latest.oldest} rounds was measured."
            )
        else:
            return "lags", reasons
        return "cannot tell", reasons
    reasons.append(_sigma_words(rule, latest, sigma))
    noise = _noise(rule, latest, sigma[1]) if latest.turns else ""
    if noise:
        return "cannot tell", [*reasons, noise]
    verdict, reason = (_turning if latest.turns else _not_turning)(rule, latest, sigma)
    return verdict, [*reasons, *reason]


def _turning(rule: OuterRule, latest: Evidence, sigma: Range) -> tuple[Verdict, list[str]]:
    names = [str(regime(rule, value)) for value in sigma]
    alone = [step_alone(rule, value) for value in sigma]
    if alone[1] >= 1:
        reasons = [
            f"The part of the step that does not come from the momentum covers {alone[1]:.3g} of the way to the "
            "minimum. From 1 on it goes past it."
        ]
        if min(alone) < 1 <= max(alone):
            reasons.append("Within the interval of sigma it may also stay below 1; then it is the momentum.")
        return "overshoots", reasons
    if not all(name in _COMPLEX for name in names):
        return "cannot tell", [
            "Within its interval the eigenvalues are complex or real, so an oscillation is not certain."
        ]
    angles = np.array([float(phase(rule, value)) for value in sigma])
    turns = np.divide(math.pi, angles, out=np.full(3, math.nan), where=angles > 0)
    model = f"a mode of this sigma goes from side to side in {min(turns):.1f} to {max(turns):.1f} rounds"
    if math.isnan(latest.swing):
        return "oscillates", [f"In the model {model}."]
    return "oscillates", [f"The cosine swings every {latest.swing:.1f} rounds; in the model {model}."]


def _not_turning(rule: OuterRule, latest: Evidence, sigma: Range) -> tuple[Verdict, list[str]]:
    is_complex = str(regime(rule, sigma[1])) in _COMPLEX
    first = float(cancellation_periods(rule, sigma[1], 1)[0]) if is_complex else math.nan
    if latest.restarts and first > 0:
        if latest.every >= _TOO_SOON * first:
            return "held", [
                f"It would turn after {first:.1f} rounds; its restarts, every {latest.every:.3g} rounds, come before "
                "that or soon after."
            ]
        return "lags", [
            f"It would turn only after {first:.1f} rounds, and restarts come every {latest.every:.3g}: they discard "
            "useful momentum."
        ]
    if is_complex:
        turn = math.pi / float(phase(rule, sigma[1]))
        if turn > latest.rounds:
            return "lags", [
                f"In the model a mode of this sigma goes from side to side in {turn:.0f} rounds, not sooner."
            ]
        return "lags", [
            "A single mode of this sigma would oscillate, and this run does not. Its motion is that of many slower "
            "modes, which sigma along the buffer does not show. Trust the cosine."
        ]
    return "lags", ["The eigenvalues there are real: such a mode does not oscillate, and a restart slows it down."]


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


def _growth(rule: OuterRule, latest: Evidence, sigma: Range | None, *, ended: bool) -> list[str]:
    """Return what shows that the run diverges, or nothing."""
    reasons = []
    if ended:
        reasons.append("The run was ended because its loss or its pseudo-gradient left the allowed range.")
    if latest.lost:
        reasons.append(
            f"In the last {latest.lost} rounds neither norms nor cosine are finite numbers, and before they were."
        )
    if latest.risen > 0:
        a_round, in_all = (
            f"{math.exp(min(rise, 230.0)):.3g}" for rise in (latest.risen / (latest.risen_rounds - 1), latest.risen)
        )
        reasons.append(
            f"The norm of the pseudo-gradient itself grows by a factor {a_round} a round, {in_all} over the last "
            f"{latest.risen_rounds} rounds."
        )
    if reasons and sigma is not None:
        reasons.append(_sigma_words(rule, latest, sigma))
        limit = float(stable_limit(rule))
        if limit <= sigma[2]:
            reasons.append(
                f"Modes of sigma {limit:.3g} or more are unstable under this rule; no restart schedule can stabilise "
                "them (Theorem 2)."
            )
        elif latest.restarts and np.min(restart_rate(rule, sigma, round(latest.every))) < 0:
            reasons.append(
                f"In the linear model this sigma is stable, and restarts every {latest.every:.3g} rounds make it grow."
            )
        else:
            reasons.append(
                "In the linear model this sigma is stable, so the cause lies outside of the model. It may be the "
                "inner optimizer, the loss's shape, or single directions of larger sigma."
            )
    return reasons


def _noise(rule: OuterRule, latest: Evidence, sigma: float) -> str:
    """Return why the motion is not the model's, or an empty text: it does not shrink where the model's would."""
    rate = float(asymptotic_rate(rule, sigma))
    if latest.restarts:
        rate = float(restart_rate(rule, sigma, round(latest.every)))
    rate = min(rate, 1.0)
    if not rate > 0 or -latest.growth + 2 * latest.growth_error >= 0.5 * rate:
        return ""
    changes = f"{100 * math.expm1(latest.growth):+.2g} %".replace("-", "\N{MINUS SIGN}")
    return (
        "But the norm of the pseudo-gradient does not shrink as the model's would, by "
        f"{100 * (1 - math.exp(-rate)):.2g} % a round (it changes by {changes}). Noise, or a loss that is not linear "
        "here, keeps it moving. That looks alike, and no restart removes it."
    )


def step_alone(rule: OuterRule, sigma: float) -> float:
    """Return the share of the way to the minimum that a round's own pseudo-gradient covers, momentum left out."""
    return float(effective_step(rule, sigma)) * (1 + rule.momentum if rule.nesterov else 1.0)


def _sigma_words(rule: OuterRule, latest: Evidence, sigma: Range) -> str:
    names = list(dict.fromkeys(_REGIMES[str(regime(rule, value))] for value in sigma))
    clipped = ", cut at 1, beyond which a linear mode cannot lie" if latest.observed.interval[1] > 1 else ""
    return (
        f"Estimated sigma along the buffer: {sigma[1]:.3g} (95 %: {sigma[0]:.3g} to {sigma[2]:.3g}{clipped}), where "
        f"the eigenvalues are {' or '.join(names)}."
    )


def _sigma_missing(latest: Evidence) -> str:
    """Return why there is no sigma."""
    observed = latest.observed
    if not latest.rates_known:
        return (
            "Sigma is not determined: the inner learning rate of these rounds is unknown (metrics.jsonl), and "
            "pseudo-gradients that shrink with it look like progress."
        )
    if math.isnan(observed.sigma):
        bound = "" if math.isnan(observed.ceiling) else f"; if nothing were noise it would be {observed.ceiling:.3g}"
        return f"Sigma is not determined by the {observed.pairs} pairs of rounds that can be used{bound}."
    return (
        f"Sigma is not determined: {observed.why_not}. The estimate is {observed.sigma:.3g}, with about "
        f"{100 * observed.noise_share:.0f} % of the pseudo-gradient's square being noise; without the correction for "
        f"noise it would seem to be {observed.ceiling:.3g}."
    )


def as_json(diagnosis: Diagnosis) -> dict[str, Any]:
    """Return the diagnosis as plain JSON values; numbers that are not finite are null."""
    tree = dataclasses.asdict(diagnosis)
    for entry, finding in zip(tree["findings"], diagnosis.findings, strict=True):
        entry["advice"] = [
            {"sigma": float(item.sigma[0]), "period": item.recommended.period, "controls": item.controls}
            for item in finding.advice
        ]
    return finite(tree)
