"""The report of a sweep: what its table says, as heatmaps whose cells lead to their runs, curves and verdicts."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from twophase.config import UsageError, flatten
from twophase.experiment.launch import SPEC, TABLE
from twophase.experiment.plot import Scale, scale_of
from twophase.experiment.record import read_record
from twophase.experiment.run import read_summary
from twophase.experiment.table import SEED, Row, Setting, State, read_rows, readable, settings
from twophase.experiment.verdict import WITHIN, ArmVerdict, Verdict, select, verdict
from twophase.experiment.verdict_text import sections
from twophase.experiment.work import RUNS
from twophase.report.charts import Chart, Curve, figure
from twophase.report.page import (
    Html,
    clean,
    counted,
    details,
    join,
    link,
    minus,
    notes,
    page,
    scroll,
    section,
    table,
    tag,
)
from twophase.report.run import relative
from twophase.rule import FORM_WORDS

REPORT = "report.html"
"""Name of a report in its run's or sweep's folder."""
_MOST_FRAMES, _MOST_CURVES, _MOST_CELLS, _LONGEST_AXIS = 24, 6, 500, 60
_PAIRED = "Each number stands at the setting that it is the control of; what it differs in is below it."
_Placed = tuple[Mapping[str, Any], Setting]
_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
# From good to bad, by lightness alone in order: the ends and quarters of matplotlib's viridis, reversed.
_COLOURS = ((253, 231, 37), (94, 201, 98), (33, 145, 140), (59, 82, 139), (68, 1, 84))


@dataclass(slots=True)
class SweepRecord:
    """What a sweep's folder holds.

    Args:
        path: the folder.
        rows: a row a cell.
        problems: what is missing or wrong, a sentence each.
        forms: the forms of the outer rules that occur, in words.
    """

    path: Path
    rows: list[Row]
    problems: list[str]
    forms: str

    @property
    def going(self) -> bool:
        """Whether some cell has no result yet."""
        return any(row.state == "missing" for row in self.rows)


def is_sweep(path: Path) -> bool:
    """Whether a folder looks like that of a sweep."""
    return (path / SPEC).is_file() or (path / TABLE).is_file()


def read_sweep(path: Path, where: Mapping[str, str] | None = None) -> SweepRecord:
    """Read a sweep's folder, whatever state it is in.

    Args:
        path: the folder.
        where: only the cells with these values.

    Raises:
        UsageError: neither its table nor its cells can be read, or no cell has these values.
    """
    problems: list[str] = []
    spec = _spec(path / SPEC, problems)
    try:
        rows = read_rows(path / TABLE)
    except UsageError as error:
        found = _rows_of(spec, path)
        if found is None:
            raise
        fault = "is missing" if not (path / TABLE).exists() else f"is damaged ({error})"
        problems.append(f"{TABLE} {fault}; the cells are from {SPEC} and the summaries of their runs.")
        rows = found
    rows = select(rows, where or {})
    missing, failed = (sum(row.state == state for row in rows) for state in ("missing", "failed"))
    if missing:
        problems.append(f"{missing:,} of {len(rows):,} cells have no result yet; the sweep's command continues it.")
    if failed:
        problems.append(f"{failed:,} of {len(rows):,} cells could not be run.")
    forms = {str(row.values["outer.form"]) for row in rows if "outer.form" in row.values}
    base = flatten(spec["base"]) if spec and isinstance(spec.get("base"), Mapping) else {}
    forms |= set() if forms else {str(base.get("outer.form", ""))}
    words = " and ".join(FORM_WORDS.get(form, "form unknown") for form in sorted(forms))
    return SweepRecord(path, rows, problems, words)


def _spec(path: Path, problems: list[str]) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        problems.append(f"{SPEC} is missing or damaged.")
        return None
    return value


def _rows_of(spec: Mapping[str, Any] | None, folder: Path) -> list[Row] | None:
    """A row a cell from the sweep's description and the summaries of its runs; None without a description."""
    cells = spec.get("cells") if spec else None
    if not isinstance(cells, list):
        return None
    base = flatten(spec["base"]) if spec and isinstance(spec.get("base"), Mapping) else {}
    found = [cell for cell in cells if isinstance(cell, dict) and isinstance(cell.get("values"), dict)]
    paths = list(dict.fromkeys(str(path) for cell in found for path in cell["values"]))
    rows = []
    for cell in found:
        run, of = str(cell.get("run", "")), cell.get("control_of")
        values = {path: _scalar(cell["values"].get(path, base.get(path))) for path in paths}
        done = read_summary(folder / RUNS / run, run) if _RUN_ID.fullmatch(run) else None
        state: State = "missing" if done is None else "diverged" if done["diverged"] else "finished"
        numbers = (done["perplexity"], done["validation_loss"], done["seconds"]) if done else (None, None, None)
        rows.append(Row(str(cell.get("arm", "")), run, values, state, *numbers, of if isinstance(of, str) else None))
    return rows or None


def _scalar(value: Any) -> Any:
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


@dataclass(frozen=True, slots=True)
class _Links:
    """From run ids to the pages or folders of the runs, as seen from the page."""

    sweep: Path
    page_folder: Path

    def of(self, run: str) -> str | None:
        """The run's own report, or its folder; None where there is neither, or the name is no run's."""
        if not _RUN_ID.fullmatch(run):
            return None
        folder = self.sweep / RUNS / run
        target = folder / REPORT if (folder / REPORT).is_file() else folder
        return relative(target, self.page_folder) if target.exists() else None


def sweep_report(
    record: SweepRecord,
    page_folder: Path,
    *,
    within: Sequence[float] = WITHIN,
    controls: Collection[str] = (),
    refresh: float | None = None,
) -> str:
    """The page of a sweep that has been read.

    Args:
        record: of `read_sweep`.
        page_folder: where the page will lie, for its links.
        within: distances from the best that robustness areas are given for.
        controls: further arms that the others are compared with.
        refresh: seconds after which the page loads itself again; only while cells are missing.
    """
    judged = verdict(record.rows, within, controls)
    found = settings(record.rows)
    links = _Links(record.path, page_folder)
    watched = refresh if record.going else None
    counts = {state: sum(one.state == state for one in found) for state in ("finished", "diverged", "missing")}
    words = ", ".join(f"{count:,} {state}" for state, count in counts.items() if count)
    first, *others = sections(judged)
    return page(
        record.path.resolve().name,
        f"A sweep of {counted(len(found), 'setting')} ({words}) over {counted(len(judged.arms), 'arm')}, "
        f"{record.forms}.",
        _notice(record, watched),
        section("In short", *_in_short(first, found, links), anchor="short"),
        section("Heatmaps", *_heatmaps(record, judged, found, links), anchor="heatmaps"),
        section("Curves", *_curves(record, judged), anchor="curves"),
        section("Verdict", *_verdict(others), anchor="verdict"),
        section("Every cell", *_cells(record, links), anchor="cells"),
        refresh=watched,
    )


def _notice(record: SweepRecord, refresh: float | None) -> Html | None:
    going = tag("p", f"The sweep is going on; this page loads itself again every {refresh:g} s.") if refresh else None
    if not record.problems and going is None:
        return None
    return tag("div", going, notes(record.problems), class_="notice", role="note")


def _in_short(first: tuple[Any, ...], found: Sequence[Setting], links: _Links) -> Iterator[Html | None]:
    _, words, _, _, remarks = first
    yield tag("p", tag("strong", words)) if words else None
    yield notes(remarks)
    ranked = sorted((one for one in found if one.perplexity is not None), key=lambda one: one.perplexity or 0.0)
    if not ranked:
        return
    chosen = [("best", one) for one in ranked[:5]] + [("worst", one) for one in ranked[5:][-3:]]
    varied = _varied(found)
    header = ["", "arm", *varied, "perplexity", "spread", "seeds", "run"]
    rows = [
        [
            f"{word}\N{NO-BREAK SPACE}{number + 1}" if word == "best" else "worst",
            _called(one.arm) or "(all)",
            *(_value(one.values.get(path)) for path in varied),
            _perplexity(one.perplexity),
            "" if one.spread is None else minus(readable(one.spread)),
            one.finished,
            _run_links(one, links),
        ]
        for number, (word, one) in enumerate(chosen)
    ]
    count = len(varied)
    caption = "Best and worst settings. Perplexity a token on held-out text; spread: standard deviation over seeds."
    yield table(header, rows, caption=caption, numbers=(count + 2, count + 3, count + 4))


def _varied(found: Sequence[Setting]) -> list[str]:
    paths = list(dict.fromkeys(path for one in found for path in one.values))
    return [path for path in paths if len({str(one.values.get(path)) for one in found}) > 1]


def _run_links(setting: Setting, links: _Links) -> Html:
    """One link a seed, or one in all."""
    texts = [f"seed {seed}" if seed is not None else "run" for seed in setting.seeds]
    # A line breaks between them, not in "seed 0".
    found = [
        tag("span", link(text, links.of(run)), class_="once")
        for text, run in zip(texts, setting.canonical, strict=True)
    ]
    return join(itertools.chain.from_iterable((", ", one) if place else (one,) for place, one in enumerate(found)))


# ------------------------------------------------------------------------------------------------------------ heatmaps


def _heatmaps(record: SweepRecord, judged: Verdict, found: Sequence[Setting], links: _Links) -> Iterator[Html | None]:
    scale = scale_of([one.perplexity for one in found if one.perplexity is not None])
    yield tag(
        "p",
        "Validation perplexity a token, mean over the seeds; lower is better and lighter, on one logarithmic scale for "
        f"all maps, from {_perplexity(scale.low)} to {_perplexity(scale.high)}; what is worse has the same colour. The "
        "best of all is framed. A setting with a diverged or a missing seed has no mean. Each number leads to its run.",
    )
    boxes = []
    for arm in judged.arms:
        mine, paired = _places(arm, found, record.rows)
        title = tag("h3", f"{_called(arm.arm) or 'All settings'}{f' (control: {arm.control})' if arm.control else ''}")
        maps = tag("div", *_arm_maps(arm, mine, scale, judged.best, links), class_="frames")
        boxes.append(tag("div", title, tag("p", _PAIRED) if paired else None, maps))
    yield tag("div", *boxes, class_="maps")


def _places(arm: ArmVerdict, found: Sequence[Setting], rows: Sequence[Row]) -> tuple[Sequence[_Placed], bool]:
    """An arm's settings, each with its place on the maps, and whether these are those of the runs it is paired with.

    A paired control has a learning rate of its own for each setting; on these axes its map would be half empty.
    """
    mine = [one for one in found if one.arm == arm.arm]
    own = [(one.values, one) for one in mine]
    of = {row.run: row.control_of for row in rows if row.arm == arm.arm}
    partners = {run: one.values for one in found if one.arm != arm.arm for run in one.runs}
    there = [partners.get(of.get(one.runs[0]) or "") for one in mine]
    paired = [
        ({path: values.get(path) for path in arm.varied}, one)
        for values, one in zip(there, mine, strict=True)
        if values is not None
    ]
    different = {tuple(str(value) for value in values.values()) for values, _ in paired}
    if arm.control == "paired" and len(different) == len(mine):
        return paired, True
    return own, False


def _called(arm: str) -> str:
    """An arm's name; that of a sweep over restarts alone would be a bare "never"."""
    return re.sub(r"^never(?=,|$)", "no restart", arm)


def _arm_maps(
    arm: ArmVerdict, mine: Sequence[_Placed], scale: Scale, best: Setting | None, links: _Links
) -> Iterator[Html]:
    values = {path: _ordered({place.get(path) for place, _ in mine}) for path in arm.varied}
    # The two longest axes make the map, if they are numbers or few words; the others a map for each value.
    across, up, *others = [*values, "", ""][: max(2, len(values))]
    if any(len(axis) > _LONGEST_AXIS for axis in (values.get(across, []), values.get(up, []))):
        yield tag("p", f"An axis has more than {_LONGEST_AXIS} values; see the table of every cell.")
        return
    frames = list(itertools.product(*(values[path] for path in others)))
    if len(frames) > _MOST_FRAMES:
        yield tag("p", f"The first {_MOST_FRAMES} of {len(frames):,} maps; the table of every cell has all.")
    at = {tuple(str(place.get(path)) for path in arm.varied): (one, _own(place, one)) for place, one in mine}
    for frame in frames[:_MOST_FRAMES]:
        fixed = dict(zip(others, frame, strict=True))
        rows = []
        for y in values.get(up, [None]):
            cells = []
            for x in values.get(across, [None]):
                place = {across: x, up: y} | fixed
                cells.append(
                    _cell(*at.get(tuple(str(place.get(path)) for path in arm.varied), (None, "")), scale, best, links)
                )
            rows.append(tag("tr", tag("th", _value(y) if up else "", scope="row"), *cells))
        yield _map(arm, (across, up), values.get(across, [None]), rows, fixed)


def _map(
    arm: ArmVerdict, axes: tuple[str, str], columns: Sequence[Any], rows: Sequence[Html], fixed: Mapping[str, Any]
) -> Html:
    across, up = axes
    # In the corner the names would take most of a phone's width; the caption wraps.
    head = tag("tr", tag("td"), *(tag("th", _value(x), scope="col") for x in columns))
    words = [f"{path} {_value(value)}" for path, value in fixed.items()]
    words += [f"across: {across}"] if across else []
    words += [f"down: {up}"] if up else []
    name = _called(arm.arm) or "all settings"
    caption = "; ".join([name, *words])
    element = tag(
        "table",
        tag("caption", tag("span", f"{name}; ", class_="quiet"), *_unbroken(words)),
        tag("thead", head),
        tag("tbody", *rows),
        class_="heat",
    )
    return scroll(element, caption)


def _unbroken(words: Sequence[str]) -> Iterator[object]:
    for place, word in enumerate(words):
        yield "; " if place else None
        yield tag("span", word, class_="once")


def _own(place: Mapping[str, Any], one: Setting) -> str:
    """The values in which a setting differs from its place."""
    other = [(path, one.values.get(path)) for path, value in place.items() if one.values.get(path) != value]
    words = (f"{value:.3g}" if isinstance(value, float) else _value(value) for _, value in other)
    return ", ".join(f"{path.rpartition('.')[2]} {word}" for (path, _), word in zip(other, words, strict=True))


def _cell(one: Setting | None, own: str, scale: Scale, best: Setting | None, links: _Links) -> Html:
    if one is None:
        return tag("td", tag("span", "–"), class_="void", title="the design has no such setting")
    seeds = join(
        [
            tag("small", own) if own else None,
            tag("small", _seed_links(one, links)) if len(one.runs) > 1 else None,
        ]
    )
    target = links.of(one.canonical[0]) if len(one.runs) == 1 else None
    if one.perplexity is None:
        word = "diverged" if one.state == "diverged" else "missing"
        return tag("td", tag("span", link(word, target)), seeds, class_="gone" if word == "diverged" else "void")
    ground, ink = _colours(one.perplexity, scale)
    return tag(
        "td",
        link(_perplexity(one.perplexity), target),
        tag("small", "best of all") if one == best else None,
        seeds,
        style=f"background:{ground};color:{ink}",
        class_="best" if one == best else None,
    )


def _seed_links(one: Setting, links: _Links) -> Html:
    """How many seeds, each leading to its run; what became of those that have no result."""
    marks = {"finished": "", "diverged": " div.", "missing": " miss."}
    parts: list[object] = [f"{len(one.runs)} seeds: "]
    for place, (seed, run, state) in enumerate(zip(one.seeds, one.canonical, one.states, strict=True)):
        parts += [", " if place else None, link(f"{seed}{marks.get(state, '')}", links.of(run))]
    return join(parts)


def _colours(value: float, scale: Scale) -> tuple[str, str]:
    """Ground and ink of a cell; the ink is whichever of black and white has the higher contrast (WCAG 2)."""
    share = math.log(value / scale.low) / math.log(scale.high / scale.low)
    place = min(max(share, 0.0), 1.0) * (len(_COLOURS) - 1)
    low = min(int(place), len(_COLOURS) - 2)
    mixed = [a + (place - low) * (b - a) for a, b in zip(_COLOURS[low], _COLOURS[low + 1], strict=True)]
    linear = [c / 255 / 12.92 if c <= 10.3 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in mixed]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    ink = "#fff" if 1.05 / (luminance + 0.05) > (luminance + 0.05) / 0.05 else "#000"
    return f"rgb({','.join(f'{c:.0f}' for c in mixed)})", ink


def _perplexity(value: float | None) -> str:
    """A perplexity in about three digits, written out up to a million."""
    return f"{value:,.0f}" if value is not None and 1e4 <= value < 1e6 else minus(readable(value))


def _ordered(values: Collection[Any]) -> list[Any]:
    numbers = [v for v in values if isinstance(v, (int, float)) and not isinstance(v, bool)]
    return [*sorted(numbers), *sorted((v for v in values if v not in numbers), key=str)]


def _value(value: Any) -> str:
    return (
        str(value).lower()
        if isinstance(value, bool)
        else minus(f"{value:g}")
        if isinstance(value, float)
        else str(value)
    )


# --------------------------------------------------------------------------------------------------------- other parts


def _curves(record: SweepRecord, judged: Verdict) -> Iterator[Html | None]:
    """The training loss of each arm's best setting, its first seed."""
    arms = [arm for arm in judged.arms if arm.best is not None]
    curves = []
    for arm in arms[:_MOST_CURVES]:
        assert arm.best is not None
        run = arm.best.canonical[0]
        folder = record.path / RUNS / run
        if not _RUN_ID.fullmatch(run) or not folder.is_dir():
            continue
        try:
            metrics = read_record(folder).metrics
        except UsageError:
            continue
        if "step" in metrics and "train_loss" in metrics:
            name = f"{clean(_called(arm.arm))[:80] or '(all)'}: {_perplexity(arm.best.perplexity)}"
            curves.append(Curve(name, metrics["step"], metrics["train_loss"]))
    drawn = figure(
        Chart(
            "curves",
            "Training loss of the best setting of each arm",
            "inner steps of each replica",
            "loss (nats a token)",
            curves,
            note="Mean over a round; one seed; the number behind an arm is its validation perplexity over all seeds.",
        )
    )
    yield drawn or tag("p", "No run has recorded a loss yet, or the runs' folders are not here.")
    if len(arms) > _MOST_CURVES:
        yield tag("p", f"The first {_MOST_CURVES} of {len(arms)} arms.")


def _verdict(parts: Sequence[tuple[Any, ...]]) -> Iterator[Html | None]:
    """The tables of `twophase report`, as they stand in verdict.md."""
    for heading, words, header, lines, remarks in parts:
        title = re.sub(r"(?<=gainst )never(?=,|$)", "no restart", heading)
        yield tag("h3", title)
        yield tag("p", words) if words else None
        if header:
            right = [i for i in range(1, len(header)) if all(_reads_as_number(line[i]) for line in lines)]
            cells = [[_called(str(line[0])), *map(_with_minus, line[1:])] for line in lines]
            yield table(header, cells, caption=title, numbers=right, hide_caption=True)
        yield notes(remarks)
    if not parts:
        yield tag("p", "There is nothing to compare yet.")


def _with_minus(cell: Any) -> Any:
    """A cell of a table, with a true minus sign if it is a number or an interval, and not a name."""
    if cell is None:
        return ""
    return minus(cell) if isinstance(cell, str) and (_reads_as_number(cell) or cell.startswith("[")) else cell


def _reads_as_number(cell: Any) -> bool:
    return cell is None or bool(re.fullmatch(r"[-+]?[\d.,]+(e[-+]?\d+)?%?( \(\d+/\d+\))?", str(cell)))


def _cells(record: SweepRecord, links: _Links) -> Iterator[Html | None]:
    rows = record.rows[:_MOST_CELLS]
    paths = list(dict.fromkeys(path for row in rows for path in row.values))
    header = ["run", "arm", *(path for path in paths if path != SEED), SEED, "state", "perplexity", "time (s)"]
    lines = [
        [
            link(row.run, links.of(row.twin_of or row.run)),
            row.arm,
            *(_value(row.values.get(path, "")) for path in paths if path != SEED),
            _value(row.values.get(SEED, "")),
            row.state,
            _perplexity(row.perplexity) if row.perplexity is not None and np.isfinite(row.perplexity) else "",
            "" if row.seconds is None else f"{row.seconds:.1f}",
        ]
        for row in rows
    ]
    shown = f"The first {len(rows)} of {len(record.rows):,} cells" if len(rows) < len(record.rows) else "All cells"
    count = len(header)
    caption = f"{shown}; {TABLE} has them all."
    yield details(f"{shown}, as a table", table(header, lines, caption=caption, numbers=(count - 2, count - 1)))
