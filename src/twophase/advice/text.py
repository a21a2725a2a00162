"""Put a diagnosis into words, with the changes that the theory suggests and their controls."""

from __future__ import annotations

import contextlib
import math
import textwrap
from collections.abc import Iterable, Iterator

from twophase.advice.change import LARGE_GAIN, MANY_ROUNDS
from twophase.advice.verdict import LEAST_ROUNDS, Diagnosis, Finding, step_alone
from twophase.restart import mean_outer_gain, parse
from twophase.rule import FORM_WORDS, OuterRule
from twophase.runs.record import WHOLE
from twophase.theory.contraction import restart_can_help

_WIDTH = 100
HEADLINES = {
    "oscillates": "The outer loop oscillates: its momentum carries it past the minimum and back.",
    "overshoots": "The outer loop overshoots: the step itself goes past the minimum, with any momentum.",
    "lags": "The outer loop lags: pseudo-gradient and buffer keep pointing the same way.",
    "held": "The outer loop would oscillate; its restarts stop it first.",
    "diverges": "The outer loop diverges.",
    "cannot tell": "Cannot tell.",
}
"""Sentence of each verdict."""
LIMITS = (
    "The theory is of linear modes under gradient descent with equal data. An inner AdamW, different data on the "
    "replicas and a loss that is not quadratic lie outside of it.",
    "Sigma is an average along the buffer's direction, weighted by the buffer's energy. Slow modes hardly show in "
    "it, and a restart changes it with the buffer.",
    "In the small language models measured for this project restarts made wrong settings less harmful and did not "
    "lower the best perplexity. A part of their effect is a smaller step. Try the controls before a restart.",
)
"""Limits of the diagnosis, for the reader."""
_SHORT_LIMITS = (
    "limits   the theory is linear, and sigma an average: try the controls before a change (--verbose says more)"
)


def describe(diagnosis: Diagnosis, name: str, *, verbose: bool = False) -> str:
    """Return the diagnosis of the run of that name as plain text; the limits are one line unless it is verbose."""
    planned = f" of {diagnosis.planned:,}" if diagnosis.planned is not None else ""
    lines = [f"run      {name}: {diagnosis.state}, {diagnosis.rounds:,}{planned} rounds recorded"]
    if diagnosis.outer:
        lines.append(f"{'outer' if diagnosis.rule is None else 'rule':8} {outer_words(diagnosis)}")
    for finding in diagnosis.findings:
        lines += ["", *_finding_lines(diagnosis, finding)]
    if diagnosis.change is not None:
        lines += ["", "one change", *items(change_sentences(diagnosis), whole=diagnosis.command)]
    lines += ["", "limits", *items(LIMITS)] if verbose else ["", _SHORT_LIMITS]
    return "\n".join(lines)


def change_sentences(diagnosis: Diagnosis) -> list[str]:
    """Return the one change that the evidence supports: the change, its size where it was measured, its command."""
    change = diagnosis.change
    assert change is not None
    size = f"Measured in this project's small language models: {change.size}." if change.size else ""
    return [sentence for sentence in (change.words, size, diagnosis.command) if sentence]


def both_forms(rule: OuterRule) -> str:
    """Return a rule with its form, and its learning rate in the other one."""
    other = _other_form(rule)
    return f"{rule.describe()}, the same as lr {other.lr:.4g} in {FORM_WORDS[other.form]}"


def outer_words(diagnosis: Diagnosis) -> str:
    """Return the outer optimizer in words, its rule in both forms; empty if it is not known."""
    rule = diagnosis.rule
    return diagnosis.outer if rule is None else diagnosis.outer.replace(rule.describe(), both_forms(rule))


def _other_form(rule: OuterRule) -> OuterRule:
    return rule.to("ema" if rule.form == "sum" else "sum")


def _finding_lines(diagnosis: Diagnosis, finding: Finding) -> Iterator[str]:
    yield f"{finding.block} (restart {finding.restarts}): {finding.verdict.upper()}"
    if finding.verdict != "cannot tell":  # the headline would only repeat the word
        yield textwrap.fill(HEADLINES[finding.verdict], _WIDTH)
    yield from items(finding.reasons)
    if len(finding.thirds) > 1:
        yield "over the run"
        for stage in finding.thirds:
            part = stage.evidence
            cosine = "no cosines" if math.isnan(part.cosine) else f"mean cosine {part.cosine:.2f}"
            sigma = "sigma unknown" if stage.sigma is None else f"sigma {stage.sigma[0]:.3g} to {stage.sigma[2]:.3g}"
            gain = "no gains" if math.isnan(part.gain) else f"median gain {part.gain:.3g}"
            summary = f"{stage.verdict}; {cosine}, {sigma}, {gain}"
            yield f"  rounds {part.first} to {part.last}: {summary}"
    advised = suggestions(diagnosis, finding)
    if advised:
        yield "what the theory suggests"
        yield from items(advised)


def suggestions(diagnosis: Diagnosis, finding: Finding) -> list[str]:
    """List changes to try and their controls, a sentence each; empty where there is nothing to say."""
    rule = diagnosis.rule
    if rule is None or finding.latest is None:
        return []
    policy = None
    with contextlib.suppress(ValueError):  # unknown to this process
        policy = parse(finding.restarts)
    if policy is not None and policy.takes_steps:
        return [
            f"The policy {finding.restarts} takes its own steps, to which nothing here applies. Compare it with "
            "plain averaging (--outer.method averaging --outer.restart never)."
        ]
    gain = None
    if policy is not None:
        with contextlib.suppress(ValueError):  # an adaptive policy
            gain = mean_outer_gain(rule, policy, max(min(diagnosis.planned or diagnosis.rounds, MANY_ROUNDS), 1))
    sentences = list(_step_advice(rule, finding, gain))
    if finding.advice:
        sentences.append(_period_words(finding))
        warnings = {warning for advice in finding.advice for warning in advice.warnings}
        sentences += sorted(warning for warning in warnings if "slows" not in warning)
    if rule.momentum > 0 and finding.latest.evidence.rounds >= LEAST_ROUNDS:
        sentences += _control_advice(finding, rule, gain)
    sentences += _form_advice(rule, finding)
    return sentences


def _period_words(finding: Finding) -> str:
    """Return the period that the theory chooses over the interval of sigma, and the present policy."""
    advice, option = finding.advice, "--outer.restart "
    if finding.block.startswith("param group "):  # of an optimizer in another program's loop
        option = "restart="
    elif finding.block != WHOLE:  # a fragment, of which `--outer.restart` may say nothing
        option = f"--sync.restart {finding.block}="
    low, middle, high = (item.recommended.period for item in advice)
    ends = f"sigma {float(advice[0].sigma[0]):.3g} to {float(advice[2].sigma[0]):.3g}"
    horizon = f"over {advice[1].rounds} rounds" if advice[1].rounds else "in a long run"
    if low == middle == high:
        chosen = "no restart" if middle is None else f"a restart every {middle} rounds ({option}{middle})"
    else:
        texts = ["none" if item is None else str(item) for item in (low, middle, high)]
        chosen = f"period {texts[0]}, {texts[1]} or {texts[2]} from low to high sigma ({option}{middle or 'never'})"
    return f"Period for a single mode of {ends}, {horizon}: {chosen}; now it is {finding.restarts}."


def _step_advice(rule: OuterRule, finding: Finding, gain: float | None) -> Iterator[str]:
    sigma = finding.sigma
    if finding.verdict == "overshoots" and sigma is not None:
        limit = rule.lr / step_alone(rule, sigma[1])
        yield (
            f"Lower the learning rate: below lr {limit:.3g} ({FORM_WORDS[rule.form]}) the step alone stays short of "
            f"the minimum at sigma {sigma[1]:.3g} (--outer.lr {0.9 * limit:.2g})."
        )
    if finding.verdict == "diverges":
        yield (
            f"Lower the learning rate or the momentum; no restart schedule stabilises a mode that diverges. Now: "
            f"{rule.describe()}."
        )
    if finding.verdict != "lags":
        return
    if sigma is not None and gain is not None and gain <= 1 and not restart_can_help(rule, sigma).any():
        yield (
            "In the linear model a larger learning rate is faster, and a restart slows this motion down. Compare it "
            f"with half the learning rate (--outer.lr {rule.lr / 2:.3g})."
        )
        return
    has_period = any(advice.recommended.period is not None for advice in finding.advice)
    slows = "" if has_period else "In the linear model a restart slows such a motion down. "
    if gain is None or gain <= LARGE_GAIN:
        yield (
            f"{slows}Whether a larger or a smaller step is better the record does not tell; half the learning rate is "
            "one of the controls."
        )
    else:
        yield (
            f"{slows}The mean gain of this rule is {gain:.3g}, where plain averaging has 1. In the small language "
            "models measured for this project, runs with so large a gain became better with a smaller step. A "
            "restart, less momentum or a lower lr gives one."
        )


def _control_advice(finding: Finding, rule: OuterRule, gain: float | None) -> Iterator[str]:
    if finding.advice:
        names = [f"{name}: rate {rate:.3g}" for name, rate in finding.advice[1].controls.items()]
        chosen = finding.advice[1].recommended
        whose = "without restarts it is" if chosen.period is None else "the period's own rate is"
        yield (
            f"Hold a restart against (nats a round at sigma {finding.advice[1].sigma[0]:.3g}; {whose} "
            f"{chosen.rate:.3g}): {'; '.join(names)}."
        )
    if gain is not None:
        yield (
            f"Controls: no momentum at this mean gain (--outer.method averaging --outer.lr {gain:.3g}), plain "
            f"averaging (--outer.method averaging), half the rate (--outer.lr {rule.lr / 2:.3g}, "
            f"{FORM_WORDS[rule.form]})."
        )


def _form_advice(rule: OuterRule, finding: Finding) -> Iterator[str]:
    """Name the mistake of a learning rate of one form used in the other, a factor 1 / (1 - momentum) in the step."""
    factor = 1 / (1 - rule.momentum)
    if factor < 2:
        return
    if rule.form == "sum" and finding.verdict in ("oscillates", "overshoots", "diverges"):
        yield (
            f"Check the form: if lr {rule.lr:g} was taken from equations in EMA form (the restart paper), its step "
            f"here is {factor:.3g} times too large. It would be --outer.lr {rule.lr / factor:.3g} in sum form."
        )
    if rule.form == "ema" and finding.verdict == "lags" and rule.lr < 2:
        yield (
            f"Check the form: if lr {rule.lr:g} was taken from torch.optim.SGD or DiLoCo (sum form), its step here "
            f"is {factor:.3g} times too small. It would be --outer.lr {rule.lr * factor:.3g} in EMA form, or "
            f"--outer.form sum. Now it equals lr {_other_form(rule).lr:.3g} in sum form."
        )


def items(texts: Iterable[str], whole: str = "") -> Iterator[str]:
    """Yield list items; the text `whole`, a command to paste, is on one line."""
    for text in texts:
        # Options and paths are not broken either.
        wrapped = textwrap.wrap(text, _WIDTH - 4, break_on_hyphens=False, break_long_words=False)
        yield "  - " + (text if text == whole else "\n    ".join(wrapped))
