"""Curves over the threshold: what they count, and what is written of them."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from twophase.figures.thresholds import THRESHOLDS, Curve, curve_of, thresholds
from twophase.sweeps.table import Row, Setting, settings


def cells(arm: str, *by_seed: tuple[float | None, ...]) -> list[Setting]:
    """Make one setting of each tuple, which holds its perplexity for each seed; None has diverged."""
    rows = [
        Row(arm, f"{arm}{lr}{seed}", {"outer.lr": lr, "seed": seed}, "finished" if value else "diverged", value)
        for lr, values in enumerate(by_seed)
        for seed, value in enumerate(values)
    ]
    return settings(rows)


def test_what_is_counted() -> None:
    """A setting counts from its distance on, a diverged one never; single seeds are held against their own best."""
    good = cells("good", (10.0, 20.0), (11.0, 22.0))
    bad = cells("bad", (12.0, 40.0), (10.0, None))
    every = [*good, *bad]
    curve = curve_of("bad", bad, every)
    assert (curve.name, curve.settings) == ("bad", 2)
    at = {x: place for place, x in enumerate(THRESHOLDS)}
    assert [curve.within[at[x]] for x in (1, 73, 74, 100)] == [0, 0, 1, 1]  # mean 26 against 15: 73.3 % above
    assert [curve.most[at[x]] for x in (1, 19, 20, 100)] == [1, 1, 2, 2]
    assert [curve.least[at[x]] for x in (1, 99, 100)] == [0, 0, 1]
    near = curve_of("good", good, every)
    assert [near.within[at[x]] for x in (1, 9, 10)] == [1, 1, 2]
    nothing = curve_of("none", cells("none", (None,)), cells("none", (None,)))
    assert set(nothing.within) == {0}


@pytest.mark.slow
def test_the_table_is_what_is_drawn(tmp_path: Path) -> None:
    """The csv has a line for each curve and threshold, with the number of settings and the range over the seeds."""
    pytest.importorskip("matplotlib")
    every = cells("a", (10.0, 20.0), (11.0, 30.0))
    curves = {"left": [curve_of("a", every, every)], "right": [Curve("b", 0, [0] * 100, [0] * 100, [0] * 100)]}
    paths = thresholds(curves, title="t", reading="r", path_stem=tmp_path / "f", lines={"averaging": 7.0})
    assert [path.name for path in paths] == ["f.png", "f.pdf", "f.csv"]
    with paths[2].open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 2 * len(THRESHOLDS)
    assert [int(line["within"]) for line in lines[:100]] == list(curves["left"][0].within)
    assert lines[9] == {"panel": "left", "arm": "a", "threshold": "10", "settings": "2", "within": "1", "least": "1",
                        "most": "2"}  # fmt: skip
