"""The report of one run: loss, rounds, effective progress, diagnosis, configuration, and how to repeat it."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from twophase.advice.text import HEADLINES, LIMITS, both_forms, suggestions
from twophase.advice.verdict import Diagnosis, Finding, Stage, diagnose
from twophase.figures.style import signed
from twophase.report.charts import Chart, Curve, figure
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
)
from twophase.report.rounds import MOST_BLOCKS, block_name, finite, rounds
from twophase.report.watch import SCRIPT, notice
from twophase.runs.record import RunRecord
from twophase.sweep.trials import hide_password
from twophase.theory.advice import Advice

_STEP = "inner steps of each replica"


def run_report(
    record: RunRecord, diagnosis: Diagnosis | None = None, *, refresh: float | None = None, back: str | None = None
) -> str:
    """Return the page of a run that has been read.

    Args:
        record: of `read_record`, in whatever state.
        diagnosis: its diagnosis, where the caller has made it already.
        refresh: seconds after which the page shows its newest self; only an unfinished run's does.
        back: relative path of the sweep's report, if the run belongs to one.
    """
    diagnosis = diagnosis or diagnose(record)
    watched = refresh if record.state == "unfinished" else None
    return page(
        record.path.resolve().name,
        join([_subtitle(record, diagnosis), *([" · ", link("the sweep that it belongs to", back)] if back else [])]),
        notice("run", watched, record.problems),
        section("In short", _summary(record, diagnosis), anchor="short"),
        section("Loss", *_losses(record), anchor="loss"),
        section("Diagnosis", *_diagnosis(diagnosis), anchor="diagnosis"),
        section("Effective progress and the period", *_progress(diagnosis), anchor="progress"),
        section("Rounds", *rounds(record), anchor="rounds"),
        section("Repeat it", *_repeat(record), anchor="repeat"),
        section("Configuration and environment", *_settings(record), anchor="settings"),
        script=SCRIPT if watched else "",
    )


def _subtitle(record: RunRecord, diagnosis: Diagnosis) -> str:
    rule = diagnosis.rule.describe() if diagnosis.rule else "outer rule unknown"
    return f"A run, {record.state}: {rule}, restart {record.restart}."


# ------------------------------------------------------------------------------------------------------------ summary


def _summary(record: RunRecord, diagnosis: Diagnosis) -> Html:
    end = record.summary or {}
    done = record.recorded
    planned = f" of {diagnosis.planned:,}" if diagnosis.planned else ""
    facts: list[tuple[str, Any]] = [
        ("Outer rule", both_forms(diagnosis.rule) if diagnosis.rule else "unknown"),
        ("Restart policy", record.restart),
        ("Rounds", f"{done:,}{planned}, of {_steps_of_a_round(record)}"),
        ("Restarts", f"{int(np.nansum(record.rounds['restarted'])):,}"),
        ("Replicas", _count_text(record, "replicas")),
        ("Validation perplexity", _quantity(end.get("perplexity"), "a token", fallback=_last(record, "perplexity"))),
        ("Validation loss", _quantity(end.get("validation_loss"), "nats a token")),
        ("Tokens", _quantity(end.get("tokens"), "")),
        ("Time", _quantity(end.get("seconds"), "s")),
        ("Share of time in the engine", _share(end.get("engine_share"))),
        ("Exit", end.get("exit_reason", "not finished")),
    ]
    return tag("dl", *(part for name, value in facts for part in (tag("dt", name), tag("dd", value))))


def _steps_of_a_round(record: RunRecord) -> str:
    steps = record.count("inner_steps")
    return counted(int(steps), "inner step") if math.isfinite(steps) else "an unknown number of inner steps"


def _count_text(record: RunRecord, path: str) -> str:
    value = record.count(path)
    return f"{value:,.0f}" if math.isfinite(value) else "an unknown number"


def _quantity(value: Any, unit: str, fallback: str = "unknown") -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return fallback
    text = f"{value:,}" if isinstance(value, int) and abs(value) < 10**18 else f"{float_of(value):.4g}"
    return minus(f"{text} {unit}".strip())


def float_of(value: float) -> float:
    """Return a number of a file as a float; whole numbers beyond its range become infinite."""
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _last(record: RunRecord, name: str) -> str:
    column = record.metrics.get(name)
    measured = column[np.isfinite(column)] if column is not None else []
    return f"{measured[-1]:.4g} a token, the last one measured" if len(measured) else "unknown"


def _share(value: Any) -> str:
    return f"{100 * value:.2g} %" if isinstance(value, float) and math.isfinite(value) else "unknown"


# ----------------------------------------------------------------------------------------------------------------- loss


def _losses(record: RunRecord) -> Iterator[Html | None]:
    curves = []
    inside, rounds = record.steps, record.metrics
    if "train_loss" in inside and "step" in inside:
        curves.append(Curve("training loss inside rounds", inside["step"], inside["train_loss"]))
    if "train_loss" in rounds and "step" in rounds:
        curves.append(Curve("training loss, mean over a round", rounds["step"], rounds["train_loss"]))
    if "validation_loss" in rounds and "step" in rounds:
        curves.append(Curve("validation loss", rounds["step"], rounds["validation_loss"]))
    steps = record.rounds["step"]
    drawn = figure(
        Chart(
            "loss",
            "Loss over the run",
            _STEP,
            "loss (nats a token)",
            curves,
            restarts=finite(steps[record.rounds["restarted"] == 1]),
            syncs=finite(steps),
        )
    )
    yield drawn or tag("p", "No loss has been recorded.")


# ----------------------------------------------------------------------------------------------------------- diagnosis


def _diagnosis(diagnosis: Diagnosis) -> Iterator[Html | None]:
    several = len(diagnosis.findings) > 1
    for finding in diagnosis.findings[:20]:
        if several:
            yield tag("h3", f"{block_name(finding.block)} (restart {finding.restarts})")
        yield tag(
            "div",
            tag("p", tag("strong", HEADLINES[finding.verdict])),
            notes([with_options(text) for text in finding.reasons]),
            class_="verdict",
        )
        if len(finding.thirds) > 1:
            yield _thirds(finding)
        advised = suggestions(diagnosis, finding)
        if advised:
            yield join([tag("h3", "What the theory suggests"), notes([with_options(text) for text in advised])])
    yield join([tag("h3", "Limits"), notes(LIMITS)])


def _thirds(finding: Finding) -> Html:
    rows = [
        [
            stage.evidence.name,
            f"{stage.evidence.first:,} to {stage.evidence.last:,}",
            stage.verdict,
            _number(stage.evidence.cosine, 2),
            "" if math.isnan(stage.evidence.against) else f"{100 * stage.evidence.against:.0f} %",
            minus(f"{stage.evidence.gain:.3g}") if math.isfinite(stage.evidence.gain) else "",
            _sigma_text(stage),
            f"{stage.evidence.restarts}",
        ]
        for stage in finding.thirds
    ]
    header = ["part", "rounds", "verdict", "mean cosine", "negative", "median gain", "sigma (95 %)", "restarts"]
    return table(header, rows, caption=f"Over the run: {block_name(finding.block)}.", numbers=(3, 4, 5, 7))


def _number(value: float, digits: int) -> str:
    return signed(value, digits) if math.isfinite(value) else ""


def _sigma_text(stage: Stage | None) -> str:
    if stage is None or stage.sigma is None:
        return "not determined"
    low, middle, high = stage.sigma
    return minus(f"{middle:.3g} ({low:.3g} to {high:.3g})")


def _progress(diagnosis: Diagnosis) -> Iterator[Html | None]:
    yield tag(
        "p",
        "Sigma is the share of a mode that one inner phase removes. It is estimated along the momentum buffer, from "
        "the norms and cosines of successive rounds, corrected for noise; a run that restarts often, or a buffer that "
        "hardly changes its length, leaves it undetermined.",
    )
    rows = []
    for finding in diagnosis.findings:
        if finding.latest is None:
            continue
        seen = finding.latest.evidence.observed
        rows.append(
            [
                block_name(finding.block),
                seen.pairs,
                _sigma_text(finding.latest),
                f"{seen.ceiling:.3g}" if math.isfinite(seen.ceiling) else "",
                f"{100 * seen.noise_share:.0f} %" if math.isfinite(seen.noise_share) else "",
                _periods(finding.advice),
                finding.restarts,
            ]
        )
    if not rows:
        yield tag("p", "Nothing to estimate it from.")
        return
    header = [
        "block",
        "pairs of rounds",
        "sigma (95 %)",
        "if nothing were noise",
        "noise in g",
        "period by theory",
        "now",
    ]
    caption = "Effective progress by block, over the latest rounds, and the period that the theory would choose."
    yield table(header, rows, caption=caption, numbers=(1, 3, 4))
    for finding in diagnosis.findings[:MOST_BLOCKS]:
        if finding.advice:
            yield _control_table(finding, finding.advice[1])


def _periods(advice: Sequence[Advice]) -> str:
    if not advice:
        return "cannot tell"
    periods = {choice.recommended.period for choice in advice}
    ends = sorted(period for period in periods if period is not None)
    words = " to ".join(dict.fromkeys(str(period) for period in (ends[0], ends[-1]))) if ends else ""
    return " or ".join(filter(None, [words, "none" if None in periods else ""]))


def _control_table(finding: Finding, advice: Advice) -> Html:
    period = advice.recommended.period
    chosen = "no restart" if period is None else f"a restart every {'round' if period == 1 else f'{period} rounds'}"
    rows = [[chosen, minus(f"{advice.recommended.rate:.3g}")], ["no restart", minus(f"{advice.without.rate:.3g}")]]
    rows += [[f"control: {name}", minus(f"{rate:.3g}")] for name, rate in advice.controls.items()]
    name = block_name(finding.block)
    caption = f"{name}: rate of a mode of sigma {advice.sigma[0]:.3g}, in nats a round; larger is faster."
    return table(["what", "rate"], rows, caption=caption, numbers=(1,))


# ------------------------------------------------------------------------------------------------------------ settings


def _repeat(record: RunRecord) -> Iterator[Html | None]:
    # Of an odd folder name, the shell must see one word; a line break would end the command.
    config = shlex.quote(str(record.path / "config.yaml").replace("\n", "?"))
    if record.config:
        yield tag("p", "The same run from the beginning, in a new folder:")
        yield tag("pre", f"twophase train --config {config} --out NEW")
    words = record.environment.get("command")
    if isinstance(words, list) and words and all(isinstance(word, str) for word in words):
        worker = "sweep-worker" in words
        how = "A worker of a sweep trained it:" if worker else "As it was started; from the same place, it resumes:"
        yield tag("p", how)
        start = ["python", "-m", "twophase"] if Path(words[0]).name == "__main__.py" else words[:1]
        yield tag("pre", hide_password(shlex.join([*start, *words[1:]])))
    elif not record.config:
        yield tag("p", "Neither its configuration nor its command could be read.")


def _settings(record: RunRecord) -> Iterator[Html | None]:
    rows = [[path, _plain(value)] for path, value in record.config.items()]
    if rows:
        listed = table(["option", "value"], rows, caption="Configuration (config.yaml).")
        yield details(f"Configuration, {counted(len(rows), 'value')}", listed)
    else:
        yield tag("p", "No configuration.")
    environment = [[name, _parts(value)] for name, value in record.environment.items() if name != "command"]
    if environment:
        yield table(["what", "value"], environment[:100], caption="Environment (env.json).")
    yield tag("p", f"Folder {record.path.resolve()}; report of {datetime.now(UTC):%Y-%m-%d %H:%M} UTC.")


def _parts(value: Any) -> object:
    """Return a value of the environment; a value with named parts becomes a list of them."""
    if isinstance(value, Mapping) and value:
        parts = [f"{str(name).replace('_', ' ')}: {hide_password(_plain(part))}" for name, part in value.items()]
        return notes(parts[:100])
    return hide_password(_plain(value))


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return "; ".join(f"{key}: {_plain(item)}" for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return " ".join(_plain(item) for item in value)
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value)
    except (TypeError, ValueError):  # a date in YAML, for one
        return str(value)
