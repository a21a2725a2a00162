"""A verdict in words and tables: for the terminal, as Markdown, and as the lines of a CSV."""

from __future__ import annotations

import dataclasses
import json
import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from twophase.base.config import UsageError
from twophase.base.files import table_text, write_atomic
from twophase.judge.bootstrap import Interval, largest_coverage
from twophase.judge.comparison import Comparison
from twophase.judge.difference import Difference, ratio_of
from twophase.judge.verdict import ArmVerdict, Verdict
from twophase.sweep.table import Setting, format_table, readable

_WIDTH = 100


def describe(judged: Verdict, *, markdown: bool = False) -> str:
    """The verdict as plain text for a terminal, in small tables, or as Markdown.

    Perplexities are per token; areas count diverged and missing settings as outside; what is not known stays empty.

    Args:
        judged: the verdict.
        markdown: write headings and Markdown tables.
    """
    parts = []
    for title, words, header, lines, notes in sections(judged):
        parts.append(f"## {title}" if markdown else f"{title}\n{'-' * len(title)}")
        parts += [words if markdown else textwrap.fill(words, _WIDTH)] if words else []
        if header:
            parts.append(format_table(header, lines, markdown=markdown))
        if notes:
            parts.append("\n".join(f"- {note}" if markdown else _hanging(note) for note in notes))
    return "\n\n".join(parts) if markdown else "\n".join(_spaced(parts))


def to_csv(judged: Verdict) -> str:
    """The figures of `to_rows` as CSV."""
    return table_text(to_rows(judged))


def to_rows(judged: Verdict) -> list[dict[str, Any]]:
    """One line a figure: first those of each arm (`control` is None), then those of each comparison.

    `value` is a perplexity, a share (areas: of the settings, `count` of `of` of them) or, in a comparison, the mean
    over seeds of a log ratio of perplexities or of a difference of areas, positive where the arm is better. None where
    there is none.
    """
    return [*_arm_rows(judged), *_comparison_rows(judged)]


def _arm_rows(judged: Verdict) -> Iterator[dict[str, Any]]:
    for arm in judged.arms:
        start = {"arm": arm.arm, "control": None}
        for measure, extreme in (("best", arm.best), ("worst", arm.worst)):
            yield start | {
                "measure": measure,
                "within": None,
                "value": extreme.perplexity if extreme else None,
                "spread": extreme.spread if extreme else None,
                "seeds": extreme.finished if extreme else None,
                "count": arm.finished,
                "of": arm.settings,
                "note": _place(extreme, arm.varied),
            }
        yield start | {"measure": "best held out", "value": arm.held_out, "seeds": len(arm.seeds)}
        for measure, value, count in (
            ("geometric mean", arm.geometric_mean, arm.finished),
            ("diverged", None, arm.diverged),
            ("missing", None, arm.missing),
        ):
            yield start | {"measure": measure, "value": value, "count": count, "of": arm.settings}
        for area in arm.areas:
            of = {"count": area.near, "of": arm.settings} if area.share is not None else {"of": arm.settings}
            yield start | {"measure": "area", "within": area.within, "value": area.share, **of}


def _comparison_rows(judged: Verdict) -> Iterator[dict[str, Any]]:
    for pair in judged.comparisons:
        for difference in pair.differences:
            yield {
                "arm": pair.arm,
                "control": pair.control,
                "measure": difference.measure,
                "within": difference.within,
                "value": difference.mean,
                "seeds": difference.seeds,
                "better": difference.better,
                "worse": difference.worse,
                "bootstrap_low": difference.bootstrap.low if difference.bootstrap else None,
                "bootstrap_high": difference.bootstrap.high if difference.bootstrap else None,
                "t_low": difference.t.low if difference.t else None,
                "t_high": difference.t.high if difference.t else None,
                "note": difference.note,
            }


def write(judged: Verdict, folder: Path, where: Mapping[str, str] | None = None) -> list[Path]:
    """Write `verdict.md`, `verdict.csv` (one line a figure) and `verdict.json` (everything) into a sweep's folder.

    Args:
        judged: the verdict.
        folder: the sweep's folder.
        where: as for `verdict.select`; the files of a part are named after it, such as `verdict-inner_steps=20.md`.

    Returns:
        The paths, each written in one step. What is not known is empty in the table and null in JSON.

    Raises:
        UsageError: the folder cannot be written.
    """
    stem = "-".join(["verdict", *(f"{path}={text}".replace("/", "_") for path, text in (where or {}).items())])
    contents = {
        f"{stem}.md": describe(judged, markdown=True) + "\n",
        f"{stem}.csv": to_csv(judged),
        f"{stem}.json": json.dumps(_plain(judged), indent=1, allow_nan=False, ensure_ascii=False) + "\n",
    }
    try:
        for name, content in contents.items():
            write_atomic(folder / name, content)
    except OSError as error:
        raise UsageError(f"{folder}: the verdict cannot be written ({error.strerror}); check the folder") from None
    return [folder / name for name in contents]


def _plain(item: Any) -> Any:
    """Nested results as plain JSON values; a number that JSON has no word for becomes None."""
    if isinstance(item, Difference):
        return {**_fields(item), "ratio": item.ratio, "seeds": item.seeds}
    if dataclasses.is_dataclass(item):
        return _fields(item)
    if hasattr(item, "_asdict"):  # an Interval
        return _plain(item._asdict())
    if isinstance(item, Mapping):
        return {str(key): _plain(value) for key, value in item.items()}
    if isinstance(item, (list, tuple)):
        return [_plain(value) for value in item]
    return None if isinstance(item, float) and not math.isfinite(item) else item


def _fields(item: Any) -> dict[str, Any]:
    return {field.name: _plain(getattr(item, field.name)) for field in dataclasses.fields(item)}


Section = tuple[str, str, Sequence[str], list[list[Any]], Sequence[str]]
"""Title, introduction, header and lines of a table (no header: no table), notes below it."""


def sections(judged: Verdict) -> Iterator[Section]:
    """The verdict in parts, to be set in text, in Markdown, or in a report.

    Args:
        judged: the verdict.
    """
    yield "Verdict", _opening(judged), (), [], judged.notes
    if not judged.arms:
        return
    yield (
        "What each arm reached",
        "Perplexity at the arm's best setting: mean and sample standard deviation over seeds. Held out: mean over "
        "seeds at the setting that is best on the other seeds, which luck in choosing does not flatter.",
        ("arm", "control", "best", "spread", "seeds", "held out", "at"),
        [_reached(arm) for arm in judged.arms],
        (),
    )
    yield (
        "Over all settings",
        "Geometric mean and worst are over the finished settings alone; a diverged one is worse than the worst.",
        ("arm", "settings", "finished", "diverged", "missing", "geo. mean", "worst"),
        [_over_settings(arm) for arm in judged.arms],
        (),
    )
    yield (
        "Robustness area",
        "Share of an arm's settings within so much of the best of all arms; diverged and missing ones are outside.",
        ("arm", *(f"{_percent(x)}" for x in judged.within)),
        [
            [_name(arm.arm), *(_area_text(area.near, arm.settings, area.share) for area in arm.areas)]
            for arm in judged.arms
        ],
        (),
    )
    for index, control in enumerate(dict.fromkeys(pair.control for pair in judged.comparisons)):
        beside = [pair for pair in judged.comparisons if pair.control == control]
        yield from _against(control, beside, _how_to_read(judged) if index == 0 else "")


def _opening(judged: Verdict) -> str:
    best, arm = judged.best, next((arm for arm in judged.arms if judged.best and arm.arm == judged.best.arm), None)
    if best is None or arm is None:
        return "Nothing has finished." if judged.arms else ""
    spread = f" (spread {_small(best.spread)} over {best.finished} seeds)" if best.spread is not None else ""
    where = f"{_name(arm.arm)}, {_place(best, arm.varied)}"
    return f"Best of all: perplexity {readable(best.perplexity)} a token{spread}, {where}."


def _reached(arm: ArmVerdict) -> list[Any]:
    best = arm.best
    if best is None:
        return [_name(arm.arm), arm.control, None, None, None, None, "nothing finished"]
    numbers = [readable(best.perplexity), _small(best.spread), best.finished, readable(arm.held_out)]
    return [_name(arm.arm), arm.control, *numbers, _place(best, arm.varied)]


def _over_settings(arm: ArmVerdict) -> list[Any]:
    counts = [arm.settings, arm.finished, arm.diverged, arm.missing]
    worst = readable(arm.worst.perplexity) if arm.worst else None
    return [_name(arm.arm), *counts, readable(arm.geometric_mean), worst]


def _how_to_read(judged: Verdict) -> str:
    counts = [d.seeds for pair in judged.comparisons for d in pair.differences if d.bootstrap]
    few = min(counts, default=0)
    limit = (
        f" Over {few} seeds the bootstrap's holds the true mean in at most {_percent(largest_coverage(few))} of cases."
        if few and largest_coverage(few) < judged.level
        else ""
    )
    return (
        "Ratio: the control's perplexity over the arm's, geometric mean over seeds; above 1 the arm is better. "
        "Better: the seeds in which the arm is better, of those compared. Tuned best: both at their best settings, "
        "chosen on the seeds that judge them, which flatters the arm with more settings. Held out: chosen on the "
        f"other seeds. Intervals are of the mean over seeds, nominally {_percent(judged.level)}, each for its own "
        f"line: among many lines some miss.{limit} Student's t supposes normal differences."
    )


def _against(control: str, beside: Sequence[Comparison], words: str) -> Iterator[Section]:
    """The tables of one control: perplexities, then areas where cells match."""
    for title, unit, wanted in (
        (f"Against {_name(control)}", _as_ratio, lambda d: d.measure != "area"),
        (f"Areas against {_name(control)}", _as_points, lambda d: d.measure == "area"),
    ):
        notes: dict[str, int] = {}
        lines = [
            _difference_line(pair, difference, unit, notes)
            for pair in beside
            for difference in pair.differences
            if wanted(difference)
        ]
        if not lines:
            continue
        if unit is _as_points:
            words = "Mean over seeds of the arm's area minus the control's, on matched cells, in percentage points."
        header = ("arm", "measure", "ratio" if unit is _as_ratio else "points", "better", "bootstrap", "t", "note")
        yield title, words, header, lines, [f"[{number}] {note}" for note, number in notes.items()]


def _difference_line(
    pair: Comparison, difference: Difference, unit: Callable[[float], str], notes: dict[str, int]
) -> list[Any]:
    note = difference.note
    number = notes.setdefault(note, len(notes) + 1) if note else None
    measure = difference.measure if difference.within is None else f"within {_percent(difference.within)}"
    return [
        _name(pair.arm),
        measure,
        None if difference.mean is None else unit(difference.mean),
        _better(difference),
        _interval(difference.bootstrap, unit),
        _interval(difference.t, unit),
        number and f"[{number}]",
    ]


def _better(difference: Difference) -> str | None:
    if not difference.seeds:
        return None
    equal = f", {difference.equal} equal" if difference.equal else ""
    return f"{difference.better} of {difference.seeds}{equal}"


def _interval(interval: Interval | None, unit: Callable[[float], str]) -> str | None:
    return None if interval is None else f"[{unit(interval.low)}, {unit(interval.high)}]"


def _as_ratio(log_ratio: float) -> str:
    ratio = ratio_of(log_ratio)
    return f"{ratio:.3f}" if 1e-3 < ratio < 1e3 else f"{ratio:.0e}"


def _as_points(share: float) -> str:
    return f"{100 * share:+.0f}" if round(100 * share) else "0"


def _percent(share: float) -> str:
    return f"{100 * share:.10g}%"


def _area_text(near: int, settings: int, share: float | None) -> str | None:
    return None if share is None else f"{share:.0%} ({near}/{settings})"


def _small(spread: float | None) -> str | None:
    """A spread in two digits."""
    if spread is None or spread == 0:
        return None if spread is None else "0"
    return f"{spread:.1e}" if spread < 1e-3 else f"{spread:.{max(0, 1 - math.floor(math.log10(spread)))}f}"


def _name(arm: str) -> str:
    return arm or "(all)"


def _place(setting: Setting | None, varied: Sequence[str]) -> str | None:
    """Where a setting stands on the axes that vary within its arm, by their last words where these are unambiguous."""
    if setting is None:
        return None
    last = [path.rpartition(".")[2] for path in varied]
    words = [leaf if last.count(leaf) == 1 else path for path, leaf in zip(varied, last, strict=True)]
    return (
        ", ".join(f"{word} {_value(setting.values.get(path))}" for word, path in zip(words, varied, strict=True))
        or "its only setting"
    )


def _value(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def _hanging(note: str) -> str:
    return textwrap.fill(note, _WIDTH, subsequent_indent="    ")


def _spaced(parts: Sequence[str]) -> Iterator[str]:
    """Sections apart from each other, and nothing else."""
    for index, part in enumerate(parts):
        title = "\n" in part and set(part.rpartition("\n")[2]) == {"-"}
        yield f"\n{part}" if title and index else part
