"""The report of one run: result, verdict and a recommendation; then curves; then the record and how to repeat it."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from twophase.advice.text import HEADLINES, LIMITS, change_sentences, outer_words, suggestions
from twophase.advice.verdict import Diagnosis, Finding, Stage
from twophase.config import flatten
from twophase.report.page import (
    Html,
    counted,
    details,
    join,
    link,
    minus,
    notes,
    page,
    section,
    table,
    tag,
    with_options,
    written,
)
from twophase.report.plot import Chart, Curve, figure, script
from twophase.report.rounds import block_name, finite, phases, rounds
from twophase.runs.folder import CONFIG, ENV, LOGS, RECORDED, SUMMARY
from twophase.runs.record import LARGEST, RunRecord

FILES = (CONFIG, ENV, *LOGS, SUMMARY)
"""Files of a run that its page is made of."""
_MOST_FINDINGS, _MOST_LINES = 20, 100


def run_report(record: RunRecord, diagnosis: Diagnosis, *, refresh: float = 0, back: str | None = None) -> str:
    """Return the page of a run that has been read.

    Args:
        record: record of `read_record`, in any state.
        diagnosis: diagnosis of this record.
        refresh: seconds after which the page of an unfinished run shows its newest self; 0 without a watch.
        back: relative path of the sweep's report, if the run belongs to one.
    """
    outer = record.outer_words or "outer optimizer unknown"
    return page(
        record.path.resolve().name,
        join(
            [
                f"A run, {record.state}: {outer}, restart {record.restart}.",
                join([" · ", link("the sweep that it belongs to", back)]) if back else None,
            ]
        ),
        section("In short", *_short(record, diagnosis), anchor="short"),
        section("Loss", _losses(record), anchor="loss"),
        section("Rounds", *rounds(record), anchor="rounds"),
        section("Diagnosis", *_diagnosis(diagnosis), anchor="diagnosis"),
        section("Effective progress and the period", *_progress(diagnosis), anchor="progress"),
        section("Record", _summary(record, diagnosis), phases(record), anchor="record"),
        section("Repeat it", *_repeat(record), anchor="repeat"),
        section("Configuration and environment", *_settings(record), anchor="settings"),
        kind="run",
        problems=["The run has not finished."] * (record.state == "running"),
        refresh=refresh if record.state == "running" else 0,
        scripts=[script()],
    )


def _short(record: RunRecord, diagnosis: Diagnosis) -> Iterator[Html | None]:
    """Yield the result, the verdict and the first thing to try; the rest of the page is their reasons."""
    # Of several blocks the first with a verdict speaks; the section on the diagnosis has all.
    findings = sorted(diagnosis.findings, key=lambda finding: finding.verdict == "cannot tell")
    finding = findings[0]
    block = f" ({block_name(finding.block)})" if len(findings) > 1 else ""
    has_change = diagnosis.change is not None and diagnosis.change.values
    advised = change_sentences(diagnosis) if has_change else suggestions(diagnosis, finding)
    facts = {
        "Result": result_words(record),
        f"Verdict{block}": " ".join(
            [HEADLINES[finding.verdict], *(finding.reasons[-1:] if finding.verdict == "cannot tell" else ())]
        ),
        "Try next": with_options(advised[0]) if advised else "Nothing follows from this record.",
    }
    yield tag("dl", *(part for name, value in facts.items() for part in (tag("dt", name), tag("dd", value))))


def result_words(record: RunRecord) -> str:
    """Return the validation loss and perplexity of a run, or its last measurement, or why it has none."""
    summary = record.summary or {}
    parts = [
        f"{name.replace('_', ' ')} {value:.4g}{unit}"
        for name, unit in (("validation_loss", record.unit), ("perplexity", ""))
        if isinstance(value := summary.get(name), (int, float)) and abs(value) < LARGEST
    ]
    if parts:
        return f"{record.state}: {', '.join(parts)}"
    for name in ("perplexity", "validation_loss", "train_loss"):
        if values := finite(record.metrics.get(name, np.array([]))):
            unit = record.unit if name != "perplexity" else " a token" if record.unit.endswith(" a token") else ""
            return f"{record.state}: last {name.replace('_', ' ')} {values[-1]:.4g}{unit}"
    return f"{record.state}: no loss recorded"


def _summary(record: RunRecord, diagnosis: Diagnosis) -> Html:
    summary = record.summary or {}
    steps, replicas = record.number("inner_steps"), record.number("replicas")
    planned = f" of {diagnosis.planned:,}" if diagnosis.planned else ""
    size = counted(int(steps), "inner step") if math.isfinite(steps) else "an unknown number of inner steps"

    def last(name: str, unit: str) -> str:
        values = finite(record.metrics.get(name, np.array([])))
        return f"{values[-1]:.4g}{unit}, the last one measured" if values else "unknown"

    def quantity(name: str, unit: str = "", factor: float = 1.0, spec: str = ".4g") -> str:
        """Return a value of the summary, nothing for what is no number, or none that a float holds."""
        value = summary.get(name)
        if not isinstance(value, (int, float)) or not abs(value) < 1e300:
            return ""
        return written(factor * value, ",.0f" if isinstance(value, int) else spec, unit)

    perplexity = quantity("perplexity", " a token") or last("perplexity", " a token")
    is_recorded = record.config.get(RECORDED) is True
    has_tokens = record.unit.endswith(" a token") or "perplexity" in summary
    facts: dict[str, Any] = {
        "Outer optimizer": outer_words(diagnosis) or "unknown",
        "Restart policy": record.restart,
        "Rounds": f"{record.recorded:,}{planned}, of {size}",
        "Restarts": f"{sum(int(block.restarted.sum()) for block in record.blocks):,}",  # of each fragment
        "Replicas": written(replicas, ",.0f") or "an unknown number",
        "Validation perplexity": perplexity if has_tokens else "",
        "Validation loss": quantity("validation_loss", record.unit) or last("validation_loss", record.unit),
        "Tokens": (quantity("tokens") or "unknown") if has_tokens else "",
        "Time": quantity("seconds", " s") or "unknown",
        "Share of time in the engine": quantity("engine_share", " %", 100.0, ".2g") or "unknown" * (not is_recorded),
        "Exit": summary.get("exit_reason", "not finished"),
    }
    entries = {name: value for name, value in facts.items() if value}
    return tag("dl", *(part for name, value in entries.items() for part in (tag("dt", name), tag("dd", value))))


def _losses(record: RunRecord) -> Html:
    steps = record.rounds["step"]
    curves = [
        # A recorded loop logs what it likes.
        Curve(
            f"training loss{'' if record.config.get(RECORDED) else ', mean over a round'}", *record.curve("train_loss")
        ),
        Curve("validation loss", *record.curve("validation_loss")),
    ]
    if {"step", "train_loss"} <= record.steps.keys():
        curves.insert(0, Curve("training loss inside rounds", record.steps["step"], record.steps["train_loss"]))
    chart = Chart(
        "loss",
        "Loss over the run",
        "inner steps of each replica",
        f"loss ({record.unit.strip()})" if record.unit else "loss",
        curves,
        restarts=finite(steps[record.rounds["restarted"] == 1]),
        syncs=finite(steps),
    )
    drawn = figure(chart)
    return drawn or tag("p", "No loss has been recorded.")


# ----------------------------------------------------------------------------------------------------------- diagnosis


def _diagnosis(diagnosis: Diagnosis) -> Iterator[Html | None]:
    for finding in diagnosis.findings[:_MOST_FINDINGS]:
        if len(diagnosis.findings) > 1:
            yield tag("h3", f"{block_name(finding.block)} (restart {finding.restarts})")
        headline = tag("p", tag("strong", HEADLINES[finding.verdict]))
        yield tag("div", headline, notes([with_options(text) for text in finding.reasons]), class_="verdict")
        if len(finding.thirds) > 1:
            yield _thirds(finding)
        if advised := suggestions(diagnosis, finding):
            yield tag("h3", "What the theory suggests")
            yield notes([with_options(text) for text in advised])
    if diagnosis.change is not None:
        yield tag("h3", "What the evidence supports")
        yield notes([with_options(text) for text in change_sentences(diagnosis)])
    yield details("Limits of such a verdict", notes(LIMITS))


def _thirds(finding: Finding) -> Html:
    rows = [
        [
            part.name,
            f"{part.first:,} to {part.last:,}",
            stage.verdict,
            written(part.cosine, ".2f"),
            written(100 * part.against, ".0f", " %"),
            written(part.gain, ".3g"),
            _sigma_text(stage),
            f"{part.restarts}",
        ]
        for stage in finding.thirds
        for part in [stage.evidence]
    ]
    header = ["part", "rounds", "verdict", "mean cosine", "negative", "median gain", "sigma (95 %)", "restarts"]
    return table(header, rows, caption=f"Over the run: {block_name(finding.block)}.")


def _sigma_text(stage: Stage) -> str:
    if stage.sigma is None:
        return "not determined"
    low, middle, high = stage.sigma
    return minus(f"{middle:.3g} ({low:.3g} to {high:.3g})")


def _progress(diagnosis: Diagnosis) -> Iterator[Html | None]:
    yield tag(
        "p",
        "Sigma is the share of a mode that one inner phase removes. It is estimated along the momentum buffer, from "
        "the norms and cosines of successive rounds, corrected for noise. A run that restarts often, or a buffer of "
        "nearly constant length, leaves it undetermined.",
    )
    rows = [
        [
            block_name(finding.block),
            seen.pairs,
            _sigma_text(finding.latest),
            written(seen.ceiling, ".3g"),
            written(100 * seen.noise_share, ".0f", " %"),
            _periods(finding),
            finding.restarts,
        ]
        for finding in diagnosis.findings
        if finding.latest is not None
        for seen in [finding.latest.evidence.observed]
    ]
    if not rows:
        yield tag("p", "Nothing to estimate it from.")
        return
    header = "block, pairs of rounds, sigma (95 %), if nothing were noise, noise in g, period by theory, now"
    caption = "Effective progress by block, over the latest rounds, and the period that the theory would choose."
    yield table(header.split(", "), rows, caption=caption)


def _periods(finding: Finding) -> str:
    """Return the periods that the theory would choose over the interval of sigma."""
    periods = {choice.recommended.period for choice in finding.advice}
    ends = sorted(period for period in periods if period is not None)
    text = " to ".join(dict.fromkeys(map(str, (ends[0], ends[-1])))) if ends else ""
    return " or ".join(filter(None, [text, "none" if None in periods else ""])) or "cannot tell"


# ------------------------------------------------------------------------------------------------------------ settings


def _repeat(record: RunRecord) -> Iterator[Html | None]:
    # Of an odd folder name, the shell must see one word; a line break would end the command.
    config = shlex.quote(str(record.path / "config.yaml").replace("\n", "?"))
    started = "As it was started; from the same place, it resumes:"
    if record.config.get(RECORDED) is True:
        started = "An external loop trained this run and recorded it (twophase.record). As it was started:"
    elif record.config:
        yield tag("p", "The same run from the beginning, in a new folder:")
        yield tag("pre", f"twophase train --config {config} --out NEW")
    command = record.environment.get("command")
    if arguments := list(map(str, command)) if isinstance(command, list) else []:
        worker = arguments[0].endswith("runner.py")
        yield tag("p", "A worker of a sweep trained it:" if worker else started)
        script = ["python"] * arguments[0].endswith(".py") + arguments[:1]
        start = ["python", "-m", "twophase"] if Path(arguments[0]).name == "__main__.py" else script
        yield tag("pre", _hide_password(shlex.join([*start, *arguments[1:]])))
    elif not record.config:
        yield tag("p", "Neither its configuration nor its command could be read.")


def _settings(record: RunRecord) -> Iterator[Html | None]:
    rows = [[path, plain(value)] for path, value in record.config.items()]
    if rows:
        listed = table(["option", "value"], rows, caption="Configuration (config.yaml).")
        yield details(f"Configuration, {counted(len(rows), 'value')}", listed)
    else:
        yield tag("p", "No configuration.")
    environment = flatten({name: value for name, value in record.environment.items() if name != "command"})
    if rows := [[name, _hide_password(plain(value))] for name, value in environment.items()]:
        yield table(["what", "value"], rows[:_MOST_LINES], caption="Environment (env.json).")
    yield tag("p", f"Folder {record.path.resolve()}; report of {datetime.now(UTC):%Y-%m-%d %H:%M} UTC.")


def plain(value: Any) -> str:
    """Return a value of a configuration as its option takes it."""
    if isinstance(value, (list, tuple)):
        return " ".join(map(plain, value))
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _hide_password(text: str) -> str:
    """Replace the password of every URL in a text, such as that of a database, by three stars."""
    # Up to the last @: a password that should have been percent-encoded, and was not, is hidden as well.
    return re.sub(r"(://[^\s:/@]*:)\S*(@)|([?&]password=)[^&\s]*", r"\1\3***\2", text)
