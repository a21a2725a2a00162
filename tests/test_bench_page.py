"""The bench's page quotes what the stored tables say, and says how many places they have."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from twophase.recipes.arms import CONTROL
from twophase.recipes.bench import FULL, PLACES, PROTOCOL, protocol_fingerprint, stored, stored_facts
from twophase.studies import study

PAGE = Path(__file__).parents[1] / "docs" / "bench.md"


@pytest.mark.parametrize("name", ["bench", "regimes"])
def test_blocks_are_printed_by_the_studies(name: str) -> None:
    """Each study's answer stands on the page, line by line."""
    module = study.load(name)
    assert study.folded(module.answer(module.table())) in PAGE.read_text(encoding="utf-8")


def whole_places(rows: Iterable[Mapping[str, str]]) -> list[str]:
    """The places that have rows of averaging and of every arm of the protocol, in its order."""
    arms: dict[str, set[str]] = {}
    for row in rows:
        arms.setdefault(row["place"], set()).add(row["arm"])
    return [place.name for place in PLACES if {CONTROL, *place.arms} <= arms.get(place.name, set())]


def test_the_stored_table_is_of_this_protocol() -> None:
    """Its rows and its facts are of the protocol in the code; no place has an arm that is not the protocol's."""
    facts = stored_facts()
    assert (facts["protocol"], facts["fingerprint"]) == (PROTOCOL, protocol_fingerprint())
    rows = stored("reference.csv")
    assert {int(row["protocol"]) for row in rows} == {PROTOCOL}
    arms = {place.name: {"averaging", *place.arms} for place in PLACES}
    for place in {row["place"] for row in rows}:
        assert {row["arm"] for row in rows if row["place"] == place} <= arms[place]
        assert len({row["seed"] for row in rows if row["place"] == place}) >= 5
    for place in (place for place in PLACES if place.name in whole_places(rows)):
        fresh = set(FULL.at(place).fresh)
        for arm in arms[place.name]:
            assert {int(row["seed"]) for row in rows if (row["place"], row["arm"]) == (place.name, arm)} == fresh


def test_how_far_the_intervals_reach() -> None:
    """As the page says: of the comparisons with averaging, by place, the median."""
    reach: dict[str, list[float]] = {}
    main = {place.name for place in PLACES if not place.few}
    for line in study.load("bench").table().rows:
        if line["control"] == CONTROL and line["high"] and line["place"] in main:
            reach.setdefault(line["place"], []).append(100 * (line["high"] / line["ratio"] - 1))
    medians = {place: statistics.median(values) for place, values in reach.items()}
    digits = medians.pop("digits")
    least, largest = min(medians.values()), max(medians.values())
    words = f"reaches {least:.0f} to {largest:.0f} % to either side at the language models and {digits:.0f} % at digits"
    assert words in PAGE.read_text(encoding="utf-8")


def cell(line: dict[str, Any]) -> str:
    """The ratio, bold where the arm is better, and with its word where that is neither better nor undecided."""
    ratio = f"{line['ratio']:.2f}"
    return {"better": f"**{ratio}**", "undecided": ratio}.get(line["word"], f"{ratio} {line['word']}")


def test_the_first_table_has_the_ratios_and_words_of_the_stored_rows() -> None:
    """Averaging over each arm that it names, at every place that has ended, in the order of the places."""
    rows = stored("reference.csv")
    places = [place.name for place in PLACES if not place.few and place.name in whole_places(rows)]
    lines = {
        (line["place"], line["arm"]): line for line in study.load("bench").table().rows if line["control"] == CONTROL
    }
    table = PAGE.read_text(encoding="utf-8").partition("| tuned |")[2].partition("\n\n")[0]
    assert f" {', '.join(f'`{place}`' for place in places)}: " in table
    for arm in (
        "averaging+filter=orthogonal",
        "auto+filter=orthogonal",
        "nesterov:momentum=~0.6+filter=orthogonal",
        "memoryless+schedule=linear:final=2",
        "nesterov:momentum=~0.6",
        "nesterov:momentum=~0.6@3",
    ):
        cells = [cell(lines[place, arm]) for place in places]
        assert f"| {', '.join(cells)} |" in table, arm


def test_what_it_says_of_width() -> None:
    """Ratio and word of both filter candidates at every wider place whose arms have all run."""
    text = " ".join(PAGE.read_text(encoding="utf-8").split())
    wide = [name for name in whole_places(stored("reference.csv")) if name.startswith("width-")]
    assert wide
    for line in study.load("bench").table().rows:
        if line["place"] in wide and line["control"] == CONTROL and line["arm"].endswith("filter=orthogonal"):
            assert f"{100 * (line['ratio'] - 1):.1f} % at {line['place']} ({line['word']})" in text, line
