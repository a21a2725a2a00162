"""Verdicts: against slow recomputation on random tables, invariances, and sensible files."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as configure
from hypothesis import strategies as st

from twophase.judge.bootstrap import percentile_interval, t_interval
from twophase.judge.difference import Difference
from twophase.judge.verdict import Verdict, verdict
from twophase.judge.verdict_text import describe, write
from twophase.sweep.table import Row
from verdict_tables import (
    FIRST,
    LR,
    MATCHED,
    MOMENTUM,
    SECOND,
    TABLES,
    WITHIN,
    measured,
    only,
    row,
    values,
)

# ------------------------------------------------------------------------------------------- a slow way to the same


Place = tuple[Any, ...]


def by_place(rows: Sequence[Row], arm: str) -> dict[Place, dict[Any, Row]]:
    """(lr, momentum) -> seed -> row."""
    found: dict[Place, dict[Any, Row]] = {}
    for one in rows:
        if one.arm == arm:
            found.setdefault((one.values[LR], one.values[MOMENTUM]), {})[one.values.get("seed")] = one
    return found


def mean(rows: Sequence[Row]) -> float | None:
    if any(one.state != "finished" for one in rows):
        return None
    return sum(one.perplexity or math.nan for one in rows) / len(rows)


def means(rows: Sequence[Row], arm: str) -> dict[Place, float]:
    found = {place: mean(list(seeds.values())) for place, seeds in by_place(rows, arm).items()}
    return {place: value for place, value in found.items() if value is not None}


def lowest(found: dict[Place, float]) -> Place | None:
    return min(found, key=lambda place: found[place], default=None)


def gap(ours: Row, theirs: Row) -> float:
    """The log ratio log p_control - log p_arm, infinite where one diverged, nan where there is nothing to compare."""
    states = {ours.state, theirs.state}
    if states & {"missing", "failed"} or states == {"diverged"}:
        return math.nan
    if "diverged" in states:
        return -math.inf if ours.state == "diverged" else math.inf
    return math.log((theirs.perplexity or math.nan) / (ours.perplexity or math.nan))


def held_out(rows: Sequence[Row], arm: str, control: str, seeds: Sequence[Any]) -> list[float]:
    """For each seed the difference on it between what looks best in a table without it."""
    found = []
    for seed in seeds:
        rest = [one for one in rows if one.values["seed"] != seed]
        places = [lowest(means(rest, name)) for name in (arm, control)]
        judged = []
        for name, place in zip((arm, control), places, strict=True):
            if place is not None:
                judged.append(by_place(rows, name)[place][seed])
            else:
                hopeless = all(
                    any(one.state == "diverged" for one in runs.values()) for runs in by_place(rest, name).values()
                )
                judged.append(row(name, None, state="diverged" if hopeless else "missing"))
        found.append(gap(*judged))
    return found


def matched(rows: Sequence[Row], arm: str, control: str) -> list[tuple[dict[Any, Row], dict[Any, Row]]]:
    """Cells of both arms at one place, or linked; without those that are the same runs, unless all are."""
    ours, theirs = by_place(rows, arm), by_place(rows, control)
    if control == MATCHED:
        runs = {one.run: (one.values[LR], one.values[MOMENTUM]) for one in rows if one.arm == arm}
        linked = {place: {one.control_of or "" for one in cells.values()} for place, cells in theirs.items()}
        found = [
            (ours[runs[of]], theirs[place]) for place, targets in linked.items() for of in sorted(targets) if of in runs
        ]
        found = [pair for i, pair in enumerate(found) if all(pair[0] is not other[0] for other in found[:i])]
    else:
        # Momentum varies unless it has one value within each of the arms.
        momenta = [{place[1] for place in side} for side in (ours, theirs)]
        key = (lambda p: p) if any(len(side) > 1 for side in momenta) else (lambda p: p[:1])
        there = {key(place): cells for place, cells in theirs.items()}
        found = [(cells, there[key(place)]) for place, cells in ours.items() if key(place) in there]
    different = [pair for pair in found if any(one.twin_of is None for side in pair for one in side.values())]
    return different or found


def states_of(pair: tuple[dict[Any, Row], dict[Any, Row]]) -> set[str]:
    return {one.state for side in pair for one in side.values()}


def check_summary(difference: Difference, expected: Sequence[float]) -> None:
    """The figures of a difference against what follows from its values seed by seed."""
    assert values(difference) == pytest.approx(list(expected), rel=1e-9, abs=1e-12, nan_ok=True)
    known = [value for value in values(difference) if not math.isnan(value)]
    assert difference.better == sum(value > 0 for value in known)
    assert difference.worse == sum(value < 0 for value in known)
    assert difference.seeds == len(known)
    if not known or any(map(math.isinf, known)):
        assert (difference.mean, difference.bootstrap, difference.t) == (None, None, None)
        return
    assert difference.mean == pytest.approx(sum(known) / len(known), rel=1e-9, abs=1e-12)
    if len(set(known)) > 1:
        assert difference.bootstrap == percentile_interval(known)
        student = t_interval(known)
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
    best = min((value for arm in {one.arm for one in rows} for value in means(rows, arm).values()), default=None)
    assert (judged.best.perplexity if judged.best else None) == pytest.approx(best)
    for arm in judged.arms:
        cells, finished = by_place(rows, arm.arm), means(rows, arm.arm)
        diverged = sum(any(one.state == "diverged" for one in runs.values()) for runs in cells.values())
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
            assert arm.best.perplexity == pytest.approx(finished[place])
            assert arm.worst.perplexity == pytest.approx(max(finished.values()))
            assert arm.geometric_mean == pytest.approx(math.prod(finished.values()) ** (1 / len(finished)))
        seeds = sorted({one.values["seed"] for one in rows})
        chosen = [lowest(means([one for one in rows if one.values["seed"] != seed], arm.arm)) for seed in seeds]
        runs = [None if place is None else cells[place][seed] for place, seed in zip(chosen, seeds, strict=True)]
        if len(seeds) < 3 or any(run is None or run.state != "finished" for run in runs):
            assert arm.held_out is None
        else:
            assert arm.held_out == pytest.approx(mean([run for run in runs if run]))


@configure(deadline=None)
@given(TABLES)
def test_tuned_and_held_out(rows: list[Row]) -> None:
    """Best against best on the same seeds, and leave-one-seed-out by really leaving the seed out of the table."""
    judged, seeds = verdict(rows, WITHIN), sorted({one.values["seed"] for one in rows})
    for one in judged.comparisons:
        assert one.seeds == tuple(seeds)
        places = [lowest(means(rows, arm)) for arm in (one.arm, one.control)]
        tuned = measured(one, "tuned best")
        if None in places:
            assert tuned.by_seed == ()
            assert "nothing finished" in tuned.note
        else:
            sides = [
                by_place(rows, arm)[place or ()] for arm, place in zip((one.arm, one.control), places, strict=True)
            ]
            check_summary(tuned, [gap(sides[0][seed], sides[1][seed]) for seed in seeds])
        left_out = measured(one, "held out")
        if len(seeds) < 3:
            assert left_out.by_seed == ()
            assert "needs 3 seeds" in left_out.note
        else:
            check_summary(left_out, held_out(rows, one.arm, one.control, seeds))


@configure(deadline=None)
@given(TABLES)
def test_cells_and_areas(rows: list[Row]) -> None:
    """Matched cells: mean log ratio over those that finished everywhere, areas over all that are there."""
    judged = verdict(rows, WITHIN, controls=[FIRST])
    seeds = sorted({one.values["seed"] for one in rows})
    best = {
        seed: min(
            (r.perplexity or 0 for r in rows if r.values["seed"] == seed and r.state == "finished"), default=math.nan
        )
        for seed in seeds
    }
    assert {one.arm for one in judged.comparisons} == {SECOND}
    for one in judged.comparisons:
        cells = matched(rows, SECOND, one.control)
        assert bool(cells) == (one.cells.matched > 0) == (len(one.differences) > 2)
        if not cells:
            continue
        finished = [pair for pair in cells if states_of(pair) == {"finished"}]
        expected = [sum(gap(a[s], c[s]) for a, c in finished) / len(finished) for s in seeds if finished]
        if finished:
            check_summary(measured(one, "cells"), expected)
        there = [pair for pair in cells if not states_of(pair) & {"missing", "failed"}]
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
                check_summary(measured(one, "area", x), shares)


def near(one: Row, best: float, x: float) -> bool:
    return one.state == "finished" and one.perplexity is not None and one.perplexity <= best * (1 + x)


# ------------------------------------------------------------------------------------------------------ invariances


def summary_of(judged: Verdict) -> dict[Any, Any]:
    """Everything that must not depend on the order of rows or the names of seeds."""
    arms = {
        arm.arm: (arm.control, arm.areas, arm.best and arm.best.perplexity, arm.geometric_mean, arm.held_out)
        for arm in judged.arms
    }
    differences = {
        (one.arm, one.control, d.measure, d.within): (d.better, d.worse, d.mean, d.bootstrap, d.t, d.note)
        for one in judged.comparisons
        for d in one.differences
    }
    return arms | differences


@configure(deadline=None)
@given(TABLES, st.integers(0, 1000))
def test_order_does_not_matter(rows: list[Row], number: int) -> None:
    """Permuting rows, or giving the seeds other numbers, changes nothing."""
    rng = random.Random(number)
    seeds = sorted({one.values["seed"] for one in rows})
    renamed = dict(zip(seeds, rng.sample(range(100), len(seeds)), strict=True))
    changed = [replace(one, values={**one.values, "seed": renamed[one.values["seed"]]}) for one in rows]
    rng.shuffle(changed)
    assert summary_of(verdict(changed, WITHIN)) == summary_of(verdict(rows, WITHIN))


@configure(deadline=None)
@given(TABLES)
def test_scale_does_not_matter(rows: list[Row]) -> None:
    """Perplexities four times as high (exactly, for a float) leave areas, ratios and intervals as they are."""
    scaled = [replace(one, perplexity=one.perplexity and 4 * one.perplexity) for one in rows]
    before, after = verdict(rows, WITHIN), verdict(scaled, WITHIN)
    for ours, theirs in zip(before.arms, after.arms, strict=True):
        assert ours.areas == theirs.areas
        assert (theirs.best.perplexity if theirs.best else None) == (ours.best and 4 * (ours.best.perplexity or 0))
    for ours, theirs in zip(before.comparisons, after.comparisons, strict=True):
        for one, other in zip(ours.differences, theirs.differences, strict=True):
            assert (one.better, one.worse, one.note) == (other.better, other.worse, other.note)
            assert values(other) == pytest.approx(values(one), abs=1e-12, nan_ok=True)


@configure(deadline=None)
@given(TABLES)
def test_exchanging_arm_and_control(rows: list[Row]) -> None:
    """Which of two arms is called the control turns every sign and interval round, and inverts the ratio."""
    two = [one for one in rows if one.arm in {FIRST, SECOND} and one.values[MOMENTUM] > 0]
    there = only(verdict(two, WITHIN, controls=[FIRST]), SECOND, FIRST)
    back = only(verdict(two, WITHIN, controls=[SECOND]), FIRST, SECOND)
    for one, other in zip(there.differences, back.differences, strict=True):
        assert (one.better, one.worse, one.equal) == (other.worse, other.better, other.equal)
        assert [-value for value in values(one)] == pytest.approx(values(other), abs=1e-12, nan_ok=True)
        if one.ratio is not None and other.ratio is not None:
            assert one.ratio * other.ratio == pytest.approx(1)
        for ours, theirs in ((one.bootstrap, other.bootstrap), (one.t, other.t)):
            assert (ours is None) == (theirs is None)
            if ours and theirs:
                assert (-ours.high, -ours.low) == pytest.approx(theirs, abs=1e-12)


@configure(deadline=None)
@given(TABLES, st.floats(1e-3, 1e3))
def test_what_has_not_finished_enters_no_mean(rows: list[Row], junk: float) -> None:
    """Whatever number stands in a row that diverged, failed or is missing, the verdict is the same."""
    changed = [one if one.state == "finished" else replace(one, perplexity=junk) for one in rows]
    assert verdict(changed, WITHIN) == verdict(rows, WITHIN)


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
