"""Verdicts: against slow recomputation on random tables, invariances, and sensible files."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as configure

from twophase.judge.bootstrap import percentile_interval, t_interval
from twophase.judge.comparison import Difference
from twophase.judge.verdict import verdict
from twophase.judge.verdict_text import describe, write
from twophase.sweeps.table import Row
from verdict_tables import FIRST, LR, MATCHED, MOMENTUM, SECOND, TABLES, WITHIN, measured, row, values

# ------------------------------------------------------------------------------------------- a slow way to the same


Place = tuple[Any, ...]


def by_place(rows: Sequence[Row], arm: str) -> dict[Place, dict[Any, Row]]:
    """(lr, momentum) -> seed -> row."""
    places: dict[Place, dict[Any, Row]] = {}
    for cell in rows:
        if cell.arm == arm:
            places.setdefault((cell.values[LR], cell.values[MOMENTUM]), {})[cell.values.get("seed")] = cell
    return places


def mean(rows: Sequence[Row]) -> float | None:
    if any(row.state != "finished" for row in rows):
        return None
    return sum(row.perplexity or math.nan for row in rows) / len(rows)


def means(rows: Sequence[Row], arm: str) -> dict[Place, float]:
    each = {place: mean(list(seeds.values())) for place, seeds in by_place(rows, arm).items()}
    return {place: value for place, value in each.items() if value is not None}


def lowest(each: dict[Place, float]) -> Place | None:
    return min(each, key=lambda place: each[place], default=None)


def gap(arm: Row, control: Row) -> float:
    """The log ratio log p_control - log p_arm, infinite where one diverged, nan where there is nothing to compare."""
    states = {arm.state, control.state}
    if states & {"missing", "failed"} or states == {"diverged"}:
        return math.nan
    if "diverged" in states:
        return -math.inf if arm.state == "diverged" else math.inf
    return math.log((control.perplexity or math.nan) / (arm.perplexity or math.nan))


def held_out(rows: Sequence[Row], arm: str, control: str, seeds: Sequence[Any]) -> list[float]:
    """For each seed the difference on it between what looks best in a table without it."""
    differences = []
    for seed in seeds:
        rest, judged = [row for row in rows if row.values["seed"] != seed], []
        for name in (arm, control):
            place = lowest(means(rest, name))
            if place is not None:
                judged.append(by_place(rows, name)[place][seed])
            else:
                diverged = [any(r.state == "diverged" for r in runs.values()) for runs in by_place(rest, name).values()]
                judged.append(row(name, None, state="diverged" if all(diverged) else "missing"))
        differences.append(gap(*judged))
    return differences


def matched(rows: Sequence[Row], arm: str, control: str) -> list[tuple[dict[Any, Row], dict[Any, Row]]]:
    """Cells of both arms at one place, or linked; without those that are the same runs, unless all are."""
    cells, others = by_place(rows, arm), by_place(rows, control)
    if control == MATCHED:
        place_of = {row.run: (row.values[LR], row.values[MOMENTUM]) for row in rows if row.arm == arm}
        linked = {place: {row.control_of or "" for row in seeds.values()} for place, seeds in others.items()}
        pairs = [
            (cells[place_of[of]], others[place])
            for place, targets in linked.items()
            for of in sorted(targets)
            if of in place_of
        ]
        pairs = [pair for i, pair in enumerate(pairs) if all(pair[0] is not other[0] for other in pairs[:i])]
    else:
        # Momentum varies unless it has one value within each of the arms.
        momenta = [{place[1] for place in side} for side in (cells, others)]
        key = (lambda p: p) if any(len(side) > 1 for side in momenta) else (lambda p: p[:1])
        there = {key(place): seeds for place, seeds in others.items()}
        pairs = [(seeds, there[key(place)]) for place, seeds in cells.items() if key(place) in there]
    different = [
        pair for pair in pairs if any(not row.run.startswith("plain") for side in pair for row in side.values())
    ]
    return different or pairs


def states_of(pair: tuple[dict[Any, Row], dict[Any, Row]]) -> set[str]:
    return {row.state for side in pair for row in side.values()}


def check_summary(difference: Difference, expected: Sequence[float]) -> None:
    """The figures of a difference against what follows from its values seed by seed."""
    assert values(difference) == pytest.approx(list(expected), rel=1e-9, abs=1e-12, nan_ok=True)
    numbers = [value for value in values(difference) if not math.isnan(value)]
    assert difference.better == sum(value > 0 for value in numbers)
    assert difference.worse == sum(value < 0 for value in numbers)
    assert difference.seeds == len(numbers)
    if not numbers or any(map(math.isinf, numbers)):
        assert (difference.mean, difference.bootstrap, difference.t) == (None, None, None)
        return
    assert difference.mean == pytest.approx(sum(numbers) / len(numbers), rel=1e-9, abs=1e-12)
    if len(set(numbers)) > 1:
        assert difference.bootstrap == percentile_interval(numbers)
        student = t_interval(numbers)
        assert student is not None
        if difference.measure == "area":
            assert difference.t == (max(student.low, -1), min(student.high, 1))
        else:
            assert difference.t == student
    else:
        assert (difference.bootstrap, difference.t) == (None, None)


@configure(deadline=None)
@given(TABLES)
def test_arms(rows: list[Row]) -> None:
    """Counts, best, spread, areas, geometric mean, worst and held-out perplexity of each arm, computed otherwise."""
    judged = verdict(rows, WITHIN)
    best = min((value for arm in {row.arm for row in rows} for value in means(rows, arm).values()), default=None)
    assert (judged.best.result if judged.best else None) == pytest.approx(best)
    for arm in judged.arms:
        cells, finished = by_place(rows, arm.arm), means(rows, arm.arm)
        diverged = sum(any(row.state == "diverged" for row in runs.values()) for runs in cells.values())
        assert (arm.settings, arm.finished, arm.diverged) == (len(cells), len(finished), diverged)
        assert arm.finished + arm.diverged + arm.missing == arm.settings
        assert [area.near for area in arm.areas] == [
            sum(value <= (best or 0) * (1 + x) for value in finished.values()) for x in WITHIN
        ]
        assert [area.share for area in arm.areas] == [
            None if best is None else area.near / len(cells) for area in arm.areas
        ]
        place = lowest(finished)
        assert (place is None) == (arm.best is None) == (arm.worst is None) == (arm.geometric_mean is None)
        if place is not None and arm.best and arm.worst:
            assert (arm.best.values[LR], arm.best.values[MOMENTUM]) == place
            assert arm.best.result == pytest.approx(finished[place])
            assert arm.worst.result == pytest.approx(max(finished.values()))
            assert arm.geometric_mean == pytest.approx(math.prod(finished.values()) ** (1 / len(finished)))
        seeds = sorted({row.values["seed"] for row in rows})
        chosen = [lowest(means([row for row in rows if row.values["seed"] != seed], arm.arm)) for seed in seeds]
        runs = [None if place is None else cells[place][seed] for place, seed in zip(chosen, seeds, strict=True)]
        if len(seeds) < 3 or any(run is None or run.state != "finished" for run in runs):
            assert arm.held_out is None
        else:
            assert arm.held_out == pytest.approx(mean([run for run in runs if run]))


@configure(deadline=None)
@given(TABLES)
def test_tuned_and_held_out(rows: list[Row]) -> None:
    """Best against best on the same seeds, and leave-one-seed-out by really leaving the seed out of the table."""
    judged, seeds = verdict(rows, WITHIN), sorted({row.values["seed"] for row in rows})
    for pair in judged.comparisons:
        assert pair.seeds == tuple(seeds)
        places = [lowest(means(rows, arm)) for arm in (pair.arm, pair.control)]
        tuned = measured(pair, "tuned best")
        if None in places:
            assert tuned.by_seed == ()
            assert "nothing finished" in tuned.note
        else:
            sides = [
                by_place(rows, arm)[place or ()] for arm, place in zip((pair.arm, pair.control), places, strict=True)
            ]
            check_summary(tuned, [gap(sides[0][seed], sides[1][seed]) for seed in seeds])
        left_out = measured(pair, "held out")
        if len(seeds) < 3:
            assert left_out.by_seed == ()
            assert "needs 3 seeds" in left_out.note
        else:
            check_summary(left_out, held_out(rows, pair.arm, pair.control, seeds))


@configure(deadline=None)
@given(TABLES)
def test_cells_and_areas(rows: list[Row]) -> None:
    """Matched cells: mean log ratio over those that finished everywhere, areas over all that are there."""
    judged = verdict(rows, WITHIN, controls=[FIRST])
    seeds = sorted({row.values["seed"] for row in rows})
    best = {
        seed: min(
            (r.perplexity or 0 for r in rows if r.values["seed"] == seed and r.state == "finished"), default=math.nan
        )
        for seed in seeds
    }
    assert {pair.arm for pair in judged.comparisons} == {SECOND}
    for pair in judged.comparisons:
        cells = matched(rows, SECOND, pair.control)
        assert bool(cells) == (pair.cells.matched > 0) == (len(pair.differences) > 2)
        if not cells:
            continue
        finished = [sides for sides in cells if states_of(sides) == {"finished"}]
        expected = [sum(gap(a[s], c[s]) for a, c in finished) / len(finished) for s in seeds if finished]
        if finished:
            check_summary(measured(pair, "cells"), expected)
        there = [sides for sides in cells if not states_of(sides) & {"missing", "failed"}]
        for x in WITHIN:
            shares = [
                (sum(near(a[s], best[s], x) for a, _ in there) - sum(near(c[s], best[s], x) for _, c in there))
                / len(there)
                if not math.isnan(best[s])
                else math.nan
                for s in seeds
                if there
            ]
            if there:
                check_summary(measured(pair, "area", x), shares)


def near(row: Row, best: float, x: float) -> bool:
    return row.state == "finished" and row.perplexity is not None and row.perplexity <= best * (1 + x)


# ----------------------------------------------------------------------------------------------------- words and files


@pytest.mark.slow
@configure(deadline=None)
@given(TABLES)
def test_every_table_has_words_and_files(tmp_path_factory: pytest.TempPathFactory, rows: list[Row]) -> None:
    """Any table can be described and written; the JSON has null and no NaN."""
    folder = tmp_path_factory.mktemp("sweep")
    judged = verdict(rows)
    paths = write(judged, folder)
    assert [path.name for path in paths] == ["verdict.md", "verdict.json"]
    text = paths[1].read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    assert len(json.loads(text)["arms"]) == len(judged.arms)
    assert "nan" not in describe(judged)
    assert max(map(len, describe(judged).splitlines())) <= 110
