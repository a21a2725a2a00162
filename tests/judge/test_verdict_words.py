"""What verdicts say on small tables, wherever numbers lack, and in their files."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from twophase.errors import UsageError
from twophase.judge.verdict import select, verdict
from twophase.judge.verdict_text import describe, write
from twophase.sweeps.table import Row, read_rows
from verdict_tables import LR, finished, measured, name, only, row, values


def test_tuned_best_by_hand() -> None:
    """Three seeds, two settings: the plain choice flatters, the held-out one does not, and both say so."""
    rows = finished("a", (8.0, 8.0, 8.0), lr=0.3) + finished("a", (4.0, 9.0, 9.5), lr=0.7)
    rows += finished("free", (9.0, 9.0, 9.0), momentum=0.0)
    pair = only(verdict(rows), "a", "free")
    tuned, honest = measured(pair, "tuned best"), measured(pair, "held out")
    assert values(tuned) == pytest.approx([math.log(9 / 4), 0.0, math.log(9 / 9.5)])
    assert (tuned.better, tuned.worse, tuned.equal) == (1, 1, 1)
    # Without seed 0 the first setting looks best; without one of the others, the lucky second one.
    assert values(honest) == pytest.approx([math.log(9 / 8), 0.0, math.log(9 / 9.5)])
    assert "other settings than tuned best in 1 of 3 seeds" in honest.note
    arm = verdict(rows).arms[0]
    assert arm.best is not None
    assert (arm.best.result, arm.held_out) == (7.5, pytest.approx((8 + 9 + 9.5) / 3))


def test_the_first_of_equals_is_best() -> None:
    """Settings with the same mean: the one that comes first in the table is the best of its arm and of all."""
    rows = finished("a", (8.0, 9.0), lr=0.7) + finished("a", (9.0, 8.0), lr=0.3) + finished("b", (8.5, 8.5))
    judged = verdict(rows)
    assert judged.best is judged.arms[0].best
    assert judged.best is not None
    assert judged.best.values[LR] == 0.7


def test_a_held_out_divergence_counts_against_the_arm() -> None:
    """A setting that is best on the other seeds and diverges on the held-out one: worse in that seed, and no mean."""
    rows = [*finished("a", (8.0, 8.0), lr=0.3), row("a", None, 0.3, seed=2, state="diverged")]
    rows += finished("a", (9.0, 9.1, 9.2), lr=0.7) + finished("free", (10.0, 10.1, 10.2), momentum=0.0)
    difference = measured(only(verdict(rows), "a", "free"), "held out")
    assert [seed.remark for seed in difference.by_seed] == ["", "", "arm diverged"]
    assert (difference.better, difference.worse, difference.mean) == (2, 1, None)
    assert "arm diverged in 1 of 3 seeds; no mean" in difference.note


def test_same_runs() -> None:
    """A control that is the same runs as the arm's cell differs by exactly 0, and that is said, not counted."""
    twins = [f"t{seed}" for seed in range(3)]
    rows = [row(arm, 8.0 + s, 0.3, 0.0, s, shared=t) for s, t in enumerate(twins) for arm in ("a", "free")]
    rows += [row("a", 9.5 + s, 0.3, 0.9, s) for s in range(3)]
    pair = only(verdict(rows), "a", "free")
    for difference in pair.differences:
        assert set(values(difference)) == {0.0}
        assert (difference.mean, difference.bootstrap, difference.t) == (0.0, None, None)
        assert "same runs" in difference.note
    assert (pair.cells.matched, pair.cells.same) == (1, 1)


def test_copies_of_a_pair_count_once() -> None:
    """Beside other cells the same runs are left out of the mean, and two pairs of the same runs are one."""
    rows = []
    for seed in range(3):
        for arm, value in (("a", 9.5), ("b", 8.0)):
            rows.append(row(arm, 7.0, 0.3, 0.0, seed, shared=f"t{seed}"))
            rows.append(row(arm, value + seed, 0.3, 0.9, seed))
            rows.append(row(arm, value + seed, 0.7, 0.9, seed, shared=name(arm, 0.3, 0.9, seed)))
            rows.append(row(arm, value - seed, 1.1, 0.9, seed))
    pair = only(verdict(rows, controls=["b"]), "a", "b")
    assert (pair.cells.matched, pair.cells.same) == (3, 1)
    expected = [(math.log((8 + s) / (9.5 + s)) + math.log((8 - s) / (9.5 - s))) / 2 for s in range(3)]
    assert values(measured(pair, "cells")) == pytest.approx(expected)
    assert measured(pair, "cells").note == "2 of 3 cells; left out: 1 the same runs"


def test_cells_without_a_partner() -> None:
    """Cells that only one side has, or has on other seeds, are in no comparison, and are counted."""
    rows = [*finished("a", (8.0, 8.1)), row("a", 5.0, lr=0.7, seed=2), row("a", 5.0, lr=1.1)]
    rows += [*finished("b", (9.0, 9.2)), row("b", 4.0, lr=0.7, seed=3)]
    pair = only(verdict(rows, controls=["b"]), "a", "b")
    assert pair.seeds == (0, 1)
    assert (pair.cells.matched, pair.cells.missing, pair.cells.same) == (2, 1, 0)
    assert (pair.cells.arm_alone, pair.cells.control_alone) == (1, 0)
    assert values(measured(pair, "cells")) == pytest.approx([math.log(9 / 8), math.log(9.2 / 8.1)])
    words = "1 of 2 cells; left out: 1 missing; without a partner: 1 setting of the arm"
    assert measured(pair, "cells").note == words


def test_which_arms_are_controls() -> None:
    """Linked, named and momentum-free arms are controls, for the reason that is shown; the others are compared.

    A sweep that does not vary the momentum has no momentum-free arms.
    """
    unvaried = [Row(arm, arm, {LR: 0.3}, "finished", 8.0) for arm in ("a", "b")]
    assert [arm.control for arm in verdict(unvaried).arms] == ["", ""]
    rows = [row("a", 8.0), row("b", 8.1), row("free", 8.2, momentum=0.0)]
    rows.append(row("match", 8.3, 0.1, control_of=rows[0].run))
    judged = verdict(rows, controls=["b"])
    assert [arm.control for arm in judged.arms] == ["", "named", "momentum-free", "paired"]
    assert [(pair.arm, pair.control) for pair in judged.comparisons] == [("a", "b"), ("a", "free"), ("a", "match")]
    assert only(judged, "a", "match").cells.matching == "paired"
    with pytest.raises(UsageError, match=r"--controls 'c'.*'a', 'b', 'free', 'match'"):
        verdict(rows, controls=["c"])


@pytest.mark.parametrize(
    ("path", "usual", "other"),
    [
        ("outer.filter", "none", "another"),
        ("outer.schedule", "constant", "another"),
        ("outer.restart", "3", "auto"),
        ("outer.restart", "never", "unknown-here"),
        ("outer.restart", None, "auto"),  # a blank cell of the table
        ("sync.restart", "none", "a=3,b=probe:keep,average"),
        ("sync.restart", ("a=3", "b=never"), ("a=3", "b=auto")),
        ("sync.restart", None, ("a=auto",)),
    ],
)
def test_other_methods_are_no_control(path: str, usual: Any, other: Any) -> None:
    """An arm that is more than momentum SGD is none without momentum, whatever the option outer.momentum says.

    So is one whose restart policy takes steps of its own.
    """
    more = {path: usual}
    rows = [row("a", 8.0), row("free", 8.2, momentum=0.0), row("other", 8.1, momentum=0.0)]
    rows = [replace(each, values=dict(each.values) | more) for each in rows]
    rows[2] = replace(rows[2], values=dict(rows[2].values) | {path: other})
    judged = verdict(rows)
    assert [arm.control for arm in judged.arms] == ["", "momentum-free", ""]
    assert [(pair.arm, pair.control) for pair in judged.comparisons] == [("a", "free"), ("other", "free")]


def test_pairs_agree_with_the_sweeps_own_table() -> None:
    """On a real table with 3 seeds, the paired cells have the geometric mean that the pairs of runs have."""
    rows = read_rows(Path(__file__).parents[2] / "docs" / "demo-cells.csv")
    judged = verdict(rows)
    by_run = {row.run: row for row in rows}
    for kind in ("heavy ball", "Nesterov"):
        matched = f"{kind}, never, gain of K=3"
        pairs = [(row, by_run[row.control_of or ""]) for row in rows if row.arm == matched]
        ratios = [control.perplexity / of.perplexity for control, of in pairs if control.perplexity and of.perplexity]
        difference = measured(only(judged, f"{kind}, K=3", matched), "cells")
        assert difference.ratio == pytest.approx(statistics.geometric_mean(ratios))
        assert difference.seeds == 3
    text = describe(judged)
    assert max(map(len, text.splitlines())) <= 110
    assert "holds the true mean in at most 75% of cases" in " ".join(text.split())


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], ["The table has no cells."]),
        ([row("a", 8.0)], ["One arm only", "One seed", "its only setting"]),
        ([row("", 8.0, seed=None), row("", 9.0, lr=0.7, seed=None)], ["(all), lr 0.3", "One arm only", "One seed"]),
        ([row("a", 8.0), row("b", 8.0)], ["No controls"]),
        ([row("a", 8.0, momentum=0.0), row("b", 8.0, momentum=0.0)], ["Every arm is a control"]),
        ([row("a", 8.0), row("free", 9.0, momentum=0.0)], ["1.125", "1 of 1", "one seed: no interval"]),
        (
            [row("a", None, state="diverged"), row("free", 9.0, momentum=0.0)],
            ["nothing finished in the arm", "1 setting with a diverged run", "0% (0/1)"],
        ),
        (
            [row("a", None, state="diverged"), row("free", None, momentum=0.0, state="diverged")],
            ["Nothing has finished.", "nothing finished in the arm and the control"],
        ),
        ([row("a", 8.0), row("free", 9.0, momentum=0.0, seed=1)], ["different seeds", "no seed in common"]),
        (
            finished("a", (8.0, 8.2, 8.1)) + finished("free", (9.0, 9.1), momentum=0.0),
            ["different seeds", "2 of 2", "needs 3 seeds, 2 in common"],
        ),
        (
            [
                *finished("a", (8.0, 8.2)),
                *finished("f", (9.0,), momentum=0.0),
                row("f", None, 0.3, 0.0, 1, state="missing"),
            ],
            ["1 setting with a missing run", "nothing finished in the control"],
        ),
        (
            [replace(row("a", None), validation_loss=-3.0), row("free", None, momentum=0.0, state="missing")],
            ["validation loss of 0 or below, and so without a result: 1;", "add a constant to it"],
        ),
    ],
)
def test_words_where_numbers_lack(rows: list[Row], words: list[str]) -> None:
    """One seed, one arm, no controls, nothing finished, seeds on one side only: sensible words, never a crash."""
    text = " ".join(describe(verdict(rows)).split())
    for word in words:
        assert word in text
    assert "0.000" not in text
    assert "Over 0 seeds" not in text


@pytest.mark.parametrize("within", [(), (-0.1,), (math.nan,), (0.1, math.inf)])
def test_impossible_distances(within: tuple[float, ...]) -> None:
    """A distance that is negative or not finite is refused, and so is having none."""
    with pytest.raises(UsageError, match="--within"):
        verdict([row("a", 8.0)], within)


# ------------------------------------------------------------------------------------------------------------ files


def test_what_is_written_is_complete(tmp_path: Path) -> None:
    """The files hold the tables, and every number by its name; what JSON has no word for becomes null."""
    rows = finished("a", (8.0, 8.2, 8.1)) + finished("free", (9.0, 9.1, 9.4), momentum=0.0)
    judged = verdict(rows, [0.05], ["free"])
    markdown, data = write(judged, tmp_path)
    assert "| a   | tuned best |" in markdown.read_text()
    tree = json.loads(data.read_text())
    tuned = tree["comparisons"][0]["differences"][0]
    assert tuned["ratio"] == pytest.approx(math.exp(tuned["mean"]))
    assert (tuned["better"], tuned["seeds"]) == (3, 3)
    assert tree["arms"][0]["best"]["perplexities"] == [8.0, 8.2, 8.1]
    infinite = verdict([row("a", 8.0, lr=math.inf), row("a", 9.0, lr=0.3)])
    tree = json.loads(write(infinite, tmp_path)[1].read_text(), parse_constant=pytest.fail)
    assert tree["best"]["values"][LR] is None


def test_verdict_on_a_part(tmp_path: Path) -> None:
    """`where` judges the cells with some values as if they were all, and names its files after it."""
    rows = [
        row(arm, 8.0 + lr + m, lr, m, seed)
        for arm in ("a", "b")
        for lr in (0.3, 1.0)
        for m in (0.0, 0.5)
        for seed in (0, 1)
    ]
    part = verdict([cell for cell in rows if cell.values["outer.lr"] == 1.0])
    for text in ("1.0", "1", "1e0"):
        assert verdict(select(rows, {"outer.lr": text})) == part
    assert verdict(select(rows, {"outer.lr": "1", "outer.momentum": "0"})).arms[0].settings == 1
    names = {path.name for path in write(part, tmp_path, {"outer.lr": "1"})}
    assert names == {"verdict-outer.lr=1.md", "verdict-outer.lr=1.json"}
    for where, words in (
        ({"outer.form": "sum"}, "does not vary outer.form; it varies outer.lr, outer.momentum, seed"),
        ({"outer.lr": "2"}, "no cell has that value; there are 0.3, 1.0"),
        ({"outer.lr": "low"}, "no cell has that value"),
        ({"outer.lr": "1", "outer.momentum": "0"}, "no cell has all of outer.lr=1, outer.momentum=0"),
    ):
        with pytest.raises(UsageError, match=words):
            select([cell for cell in rows if cell.values["outer.lr"] + cell.values["outer.momentum"] != 1], where)


def test_write_refuses(tmp_path: Path) -> None:
    """A folder that cannot be written is a usage error that names it."""
    with pytest.raises(UsageError, match=r"nowhere.*cannot be written"):
        write(verdict([row("a", 8.0)]), tmp_path / "nowhere")
