"""A verdict in words and tables, for the terminal and as Markdown, and as JSON."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from twophase.errors import UsageError
from twophase.files import finite, write_atomic
from twophase.judge.bootstrap import Interval, largest_coverage
from twophase.judge.cells import ratio_of
from twophase.judge.comparison import Comparison, Difference
from twophase.judge.verdict import ArmVerdict, Verdict
from twophase.sweeps.grid import MOMENTUM_FREE
from twophase.sweeps.table import PERPLEXITY, Setting, arm_name, format_table, place_words, readable

_WIDTH, _MOST_ARMS = 100, 8


def describe(judged: Verdict, *, markdown: bool = False) -> str:
    """Describe a verdict in plain text for a terminal, in small tables, or in Markdown.

    Perplexities are per token; areas count diverged and missing settings as outside; what is not known stays empty.
    """
    parts: list[str] = []
    for title, words, header, lines, notes in sections(judged):
        blocks = [words if markdown else textwrap.fill(words, _WIDTH)] if words else []
        if header:
            blocks.append(format_table(header, lines, markdown=markdown))
        if notes and markdown:
            blocks.append("\n".join(f"- {note}" for note in notes))
        elif notes:
            blocks += [textwrap.fill(note, _WIDTH, subsequent_indent="    ") for note in notes]
        heading = f"## {title}" if markdown else f"{title}\n{'-' * len(title)}"
        parts.append(("\n\n" if markdown else "\n").join([heading, *blocks]))
    return "\n\n".join(parts)


def write(judged: Verdict, folder: Path, where: Mapping[str, str] | None = None) -> list[Path]:
    """Write `verdict.md` (the tables) and `verdict.json` (everything) into a sweep's folder.

    Args:
        judged: verdict to write.
        folder: the sweep's folder.
        where: selection as in `verdict.select`; the files of a part are named after it, such as
            `verdict-inner_steps=20.md`.

    Returns:
        The paths, each written in one step. What is not known is null in JSON.

    Raises:
        UsageError: the folder cannot be written.
    """
    stem = part_stem("verdict", where or {})
    contents = {
        f"{stem}.md": describe(judged, markdown=True) + "\n",
        f"{stem}.json": json.dumps(judged, default=_fields, indent=1, allow_nan=False, ensure_ascii=False) + "\n",
    }
    try:
        for name, content in reversed(contents.items()):  # JSON first: a later report knows both files by it
            write_atomic(folder / name, content)
    except OSError as error:
        raise UsageError(f"{folder}: the verdict cannot be written ({error.strerror}); check the folder") from None
    return [folder / name for name in contents]


def part_stem(name: str, where: Mapping[str, str]) -> str:
    """Return the name of a file about the cells with some values, without its suffix: `verdict-inner_steps=20`."""
    return "-".join([name, *(f"{path}={text}".replace("/", "_") for path, text in where.items())])


_SETTING = ("arm", "values", "state", "result", "runs", "spread", "seeds", "states", "results", "measure")
_SAVED_NAMES = {"result": "perplexity", "results": "perplexities"}
"""What `verdict.json` has of a setting, and other names there, which its readers know."""


def _fields(item: Any) -> dict[str, Any]:
    """Return one of the results as JSON has it; a number that JSON has no word for becomes None."""
    computed = ("ratio", "seeds") if isinstance(item, Difference) else ()
    is_setting = isinstance(item, Setting)
    names = _SAVED_NAMES if is_setting else {}
    fields = _SETTING if is_setting else (*(field.name for field in dataclasses.fields(item)), *computed)
    values = {names.get(name, name): getattr(item, name) for name in fields}
    return finite({k: value._asdict() if isinstance(value, Interval) else value for k, value in values.items()})


Section = tuple[str, str, Sequence[str], list[list[Any]], Sequence[str]]
"""Title, introduction, header and lines of a table (no header: no table), notes below it."""


def sections(judged: Verdict) -> Iterator[Section]:
    """Yield the verdict in parts, to be set in text, in Markdown, or in a report."""
    opening, *others = finding(judged)
    words = name_words(judged)
    yield "Verdict", opening, (), [], [*others, *([words] if words else []), *judged.notes]
    reached, over_settings, areas = [], [], []
    for arm in judged.arms:
        name, best = arm_name(arm.arm), arm.best
        numbers = [readable(best.result), _small(best.spread), best.finished, readable(arm.held_out)] if best else []
        reached.append([name, arm.control, *(numbers or [None] * 4), _place(best, arm.varied) or "nothing finished"])
        worst = readable(arm.worst.result) if arm.worst else None
        counts = [arm.settings, arm.finished, arm.diverged, arm.missing]
        over_settings.append([name, *counts, readable(arm.geometric_mean), worst])
        shares = (
            None if area.share is None else f"{area.share:.0%} ({area.near}/{arm.settings})" for area in arm.areas
        )
        areas.append([name, *shares])
    yield (
        "What each arm reached",
        f"{_measure(judged).capitalize()} at the arm's best setting: mean and sample standard deviation over seeds. "
        "Held out: mean over seeds at the setting that is best on the other seeds, without selection bias.",
        ("arm", "control", "best", "spread", "seeds", "held out", "at"),
        reached,
        (),
    )
    yield (
        "Over all settings",
        "Geometric mean and worst are over the finished settings alone; a diverged one is worse than the worst.",
        ("arm", "settings", "finished", "diverged", "missing", "geo. mean", "worst"),
        over_settings,
        (),
    )
    yield (
        "Robustness area",
        "Share of an arm's settings within so much of the best of all arms; diverged and missing ones are outside.",
        ("arm", *map(_percent, judged.within)),
        areas,
        (),
    )
    for index, control in enumerate(dict.fromkeys(pair.control for pair in judged.comparisons)):
        beside = [pair for pair in judged.comparisons if pair.control == control]
        yield from _against(arm_name(control), beside, _how_to_read(judged) if index == 0 else "")


def finding(judged: Verdict) -> list[str]:
    """Say in sentences what a sweep shows: how much of each arm works, the best of each, and the paired controls."""
    best = judged.best
    if best is None or best.result is None:
        return ["Nothing has finished."]
    sentences = []
    several = [arm for arm in judged.arms if arm.settings > 1]
    if len(several) > 1:
        place = judged.within.index(max(judged.within))
        widest = sorted(several, key=lambda arm: (bool(arm.control), -arm.areas[place].near / arm.settings))
        shares = [f"{arm.areas[place].near} of {arm.settings} settings of {_named(arm)}" for arm in widest]
        sentences.append(f"Within {_percent(judged.within[place])} of the best of all: {_listed(shares)}.")
    spread = f" (spread {_small(best.spread)} over {best.finished} seeds)" if best.spread is not None else ""
    varied = next(arm.varied for arm in judged.arms if arm.arm == best.arm)
    sentences.append(
        f"Best of all: {best.measure} {readable(best.result)}{spread}, {arm_name(best.arm)}, {_place(best, varied)}."
    )
    others = [
        f"{readable(arm.best.result)} of {_named(arm)} ({arm.best.result / best.result - 1:+.1%})"
        for arm in sorted(judged.arms, key=lambda arm: (arm.best and arm.best.result) or math.inf)
        if arm.best is not None and arm.best.result is not None and arm.arm != best.arm
    ]
    if others:
        sentences.append(f"Best of each other arm: {_listed(others)}.")
    for pair in judged.comparisons:
        cells = next((d for d in pair.differences if d.measure == "cells" and d.mean is not None), None)
        if pair.cells.matching == "paired" and cells is not None:
            sentences.append(
                f'"{arm_name(pair.control)}" (control) has {_as_ratio(cells.mean or 0.0)} times the {best.measure} of '
                f'"{arm_name(pair.arm)}", cell by cell; it is the worse of the two in {cells.better} of {cells.seeds} '
                "seeds."
            )
    return sentences


def name_words(judged: Verdict) -> str:
    """Explain the words that the names of the arms are made of; empty where there are none."""
    parts = dict.fromkeys(part for arm in judged.arms for part in arm.arm.split(", "))
    periods, gains = ([part for part in parts if re.fullmatch(start + r"K=\d+", part)] for start in ("", "gain of "))
    words = []
    if periods:
        rounds = f"{periods[0][2:]} rounds" if len(periods) == 1 else "so many rounds"
        words.append(f"{', '.join(periods)}: the outer momentum is set to zero every {rounds}")
    if gains:
        words.append(
            f"{', '.join(gains)}: a control of that K, without restarts, at the learning rate of the same mean outer "
            "gain (update over pseudo-gradient)"
        )
    if MOMENTUM_FREE in parts:
        words.append(f"{MOMENTUM_FREE}: outer momentum 0")
    return f"Arms. {'; '.join(words)}." if words else ""


def _measure(judged: Verdict) -> str:
    """Return what the runs are judged by."""
    return judged.best.measure if judged.best else PERPLEXITY


def _named(arm: ArmVerdict) -> str:
    return f"{arm_name(arm.arm)}{' (control)' if arm.control else ''}"


def _listed(phrases: Sequence[str]) -> str:
    more = [f"and {len(phrases) - _MOST_ARMS} more"] if len(phrases) > _MOST_ARMS else []
    return "; ".join([*phrases[:_MOST_ARMS], *more])


def _how_to_read(judged: Verdict) -> str:
    few = min((d.seeds for pair in judged.comparisons for d in pair.differences if d.bootstrap), default=0)
    limit = (
        f" Over {few} seeds the bootstrap's holds the true mean in at most {_percent(largest_coverage(few))} of cases."
        if few and largest_coverage(few) < judged.level
        else ""
    )
    return (
        f"Ratio: the control's {_measure(judged)} over the arm's, geometric mean over seeds; above 1 the arm is "
        "better. Better: the seeds in which the arm is better, of those compared. Tuned best: both at their best "
        "settings, chosen on the seeds that judge them: biased towards the arm with more settings. Held out: chosen on "
        f"the other seeds. Intervals are of the mean over seeds, nominally {_percent(judged.level)}, each for its own "
        f"line: among many lines some miss.{limit} Student's t supposes normal differences."
    )


def _against(control: str, beside: Sequence[Comparison], words: str) -> Iterator[Section]:
    """Yield the tables of one control: perplexities, then areas where cells match."""
    areas = "Mean over seeds of the arm's area minus the control's, on matched cells, in percentage points."
    for title, column, unit, text in (
        (f"Against {control}", "ratio", _as_ratio, words),
        (f"Areas against {control}", "points", _as_points, areas),
    ):
        shown = [
            (pair.arm, d) for pair in beside for d in pair.differences if (d.measure == "area") == (unit is _as_points)
        ]
        notes = list(dict.fromkeys(difference.note for _, difference in shown if difference.note))
        lines = []
        for arm, d in shown:
            better = f"{d.better} of {d.seeds}" + (f", {d.equal} equal" if d.equal else "")
            lines.append(
                [
                    arm_name(arm),
                    d.measure if d.within is None else f"within {_percent(d.within)}",
                    None if d.mean is None else unit(d.mean),
                    better if d.seeds else None,
                    *(ends and f"[{unit(ends.low)}, {unit(ends.high)}]" for ends in (d.bootstrap, d.t)),
                    f"[{notes.index(d.note) + 1}]" if d.note else None,
                ]
            )
        if lines:
            header = ("arm", "measure", column, "better", "bootstrap", "t", "note")
            yield title, text, header, lines, [f"[{number}] {note}" for number, note in enumerate(notes, start=1)]


def _as_ratio(log_ratio: float) -> str:
    ratio = ratio_of(log_ratio)
    return f"{ratio:.3f}" if 1e-3 < ratio < 1e3 else f"{ratio:.0e}"


def _as_points(share: float) -> str:
    return f"{100 * share:+.0f}" if round(100 * share) else "0"


def _percent(share: float) -> str:
    return f"{100 * share:.10g}%"


def _small(spread: float | None) -> str | None:
    """Return a spread in two digits."""
    if not spread:
        return None if spread is None else "0"
    return f"{spread:.1e}" if spread < 1e-3 else f"{spread:.{max(0, 1 - math.floor(math.log10(spread)))}f}"


def _place(setting: Setting | None, varied: Sequence[str]) -> str | None:
    """Name a setting by the axes that vary within its arm."""
    if setting is None:
        return None
    return place_words(setting.values, varied) or "its only setting"
