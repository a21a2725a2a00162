"""The bench's registered comparisons: counts, words, and what an expectation needs before it is judged."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pytest

from twophase.figures.style import styled
from twophase.judge.bench import results_of
from twophase.judge.decision import decide
from twophase.recipes.arms import CONTROL
from twophase.recipes.bench import PLACES, families
from twophase.studies import bench
from twophase.studies.study import Result

ORTHOGONAL = "averaging+filter=orthogonal"
EXPECTED = {"candidates against averaging": 24, "candidates against schedule controls": 144,
            "other arms against averaging": 162, "with a restart against without": 56,
            "places for a trend, against averaging": 28}  # fmt: skip
"""Of docs/bench/registration-1.md."""


def rows_of(gains: Mapping[str, float], noise: float = 0.01) -> list[dict[str, str]]:
    """Rows in which an arm is ahead of averaging by its gain, a natural logarithm, everywhere."""
    random = np.random.default_rng(3)
    rows = []
    for place in PLACES:
        base = random.normal(2.0, 0.1, 10)
        for arm in (CONTROL, *place.arms):
            for seed in range(5 if place.few else 10):
                result = math.exp(base[seed] - gains.get(arm, 0.0) + random.normal(0, noise))
                rows.append({"place": place.name, "arm": arm, "seed": str(100 + seed), "result": repr(result),
                             "seconds": "36"})  # fmt: skip
    return rows


def table_of(monkeypatch: pytest.MonkeyPatch, rows: list[dict[str, str]]) -> Result:
    """The study of other rows than the stored ones."""
    monkeypatch.setattr(bench, "stored", lambda _name: rows)
    return bench.table()


def holds(monkeypatch: pytest.MonkeyPatch, gains: Mapping[str, float]) -> dict[str, bool]:
    """Whether each expectation holds, by its number."""
    expectations = table_of(monkeypatch, rows_of(gains)).numbers["expectations"]
    return {claim.split()[0]: fact["holds"] for claim, fact in expectations.items()}


def test_the_families_are_those_of_the_registration() -> None:
    """Each has its registered number of comparisons, and none is in two of them."""
    assert {family.title: len(family.pairs) for family in families()} == EXPECTED
    pairs = [pair for family in families() for pair in family.pairs]
    assert len(set(pairs)) == len(pairs)


def test_words_are_corrected_for_their_family(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line's word and interval are those of `decide` on common seeds, with its family's number of comparisons."""
    rows = rows_of({"auto": 0.02})
    results = results_of(rows)
    for line in table_of(monkeypatch, rows).rows:
        mine, other = (results.loc[(line["place"], line[side]), :] for side in ("arm", "control"))
        logs = np.log(other / mine).dropna().tolist()
        decision = decide(logs, comparisons=EXPECTED[line["family"]])
        assert line["word"] == decision.word
        assert math.log(line["low"]) == pytest.approx(decision.low)


def test_expectations(monkeypatch: pytest.MonkeyPatch) -> None:
    """The moonshot holds where a candidate is far ahead of all, and not where a schedule is level with it."""
    ahead = {ORTHOGONAL: 0.15, "auto+filter=orthogonal": 0.2, "auto": 0.05}
    every = holds(monkeypatch, ahead)
    assert every["6"] is True
    assert holds(monkeypatch, {**ahead, "ramp:~0.5": 0.2})["6"] is False
    assert (every["3"], every["4"], every["5"], every["7"]) == (False, True, True, True)  # better than ramp
    assert holds(monkeypatch, {"nesterov:momentum=~0.6": 0.1})["5"] is False
    assert holds(monkeypatch, {"adamw@3": 0.1})["4"] is False


@pytest.mark.slow
def test_an_arm_that_diverged_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """An arm without a surviving setting has a word of its own and no ratio; diverged seeds are worst."""
    rows = [row for row in rows_of({}) if row["arm"] != "adamw" or row["place"] != "short"]
    rows += [{"place": "short", "arm": "adamw", "seed": "", "result": "", "seconds": "1"}]
    rows = [{**row, "result": ""} if row["arm"] == "muon" and row["place"] == "long" else row for row in rows]
    result = table_of(monkeypatch, rows)
    words = {(line["place"], line["arm"], line["control"]): line["word"] for line in result.rows}
    assert words["short", "adamw", CONTROL] == "all diverged"
    assert words["long", "muon", CONTROL] in ("worse", "undecided")
    assert result.numbers["arms"]["adamw"]["mean_ratio"] is None
    assert bench.answer(result).startswith("No parameter-free outer method")
    with styled():
        assert bench.draw(result).get_suptitle().strip() == "no arm is better anywhere"
