"""What a study says before its runs have all ended: of whole arms over equal seeds only, and nothing is written."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import madeup
import textmaker
from twophase.base.config import UsageError, with_values
from twophase.cli.main import main
from twophase.recipes.paper import QUICK, Scale
from twophase.studies import _training, robustness_heatmaps, study
from twophase.studies._so_far import complete
from twophase.sweeps.table import SEED, Row, write_rows

NAME = "wires"
SCALE = replace(QUICK, name="small", seeds=(0, 1, 2), lrs=(0.3,), momenta=(0.9,))
ARMS, SETTINGS, SEEDS = ("a", "b", "c"), (0.1, 0.5), (0, 1, 2)


def place_of(row: Row) -> Any:
    return row.values["inner_steps"]


def grid(states: Callable[[int, str, float, int], str]) -> list[Row]:
    """Two places, three arms, two settings, three seeds."""
    rows = []
    for inner_steps, arm, lr, seed in product((4, 16), ARMS, SETTINGS, SEEDS):
        values = {"outer.lr": lr, "inner_steps": inner_steps, SEED: seed}
        state: Any = states(inner_steps, arm, lr, seed)
        rows.append(Row(arm, f"{inner_steps}-{arm}-{lr}-{seed}", values, state, 9.0))
    return rows


@pytest.mark.slow
@given(st.lists(st.sampled_from(["finished", "finished", "diverged", "missing", "failed"]), min_size=36, max_size=36))
@settings(max_examples=200, deadline=None)
def test_selected_are_whole_arms_over_equal_seeds_and_no_choice_of_seeds_selects_more(drawn: list[str]) -> None:
    """Against every subset of the seeds: none has more whole arms in all places; none with as many has more seeds."""
    queue = iter(drawn)
    rows = grid(lambda *_: next(queue))
    selected, words = complete(rows)
    assert selected == [row for row in rows if row in selected]  # in order
    seeds = {row.values[SEED] for row in selected}
    open_seeds: dict[Any, set[int]] = {(place, arm): set() for place in (4, 16) for arm in ARMS}
    for row in rows:
        if row.state in {"missing", "failed"}:
            open_seeds[place_of(row), row.arm].add(row.values[SEED])
    whole = {key: set(SEEDS) - those for key, those in open_seeds.items()}
    best = max(
        (sum(set(wanted) <= those for those in whole.values()), len(wanted))
        for size in (1, 2, 3)
        for wanted in combinations(SEEDS, size)
    )
    arms = {(place_of(row), row.arm) for row in selected}
    assert arms == {key for key, those in whole.items() if seeds and seeds <= those}
    assert len(selected) == len(arms) * len(SETTINGS) * len(seeds)
    assert (len(arms), len(seeds)) == (best if best[0] else (0, 0))
    assert ("no arm is whole" in words) == (not arms)
    for place in (4, 16):
        count = sum(key[0] == place for key in arms)
        line = next(line for line in words.splitlines() if line.startswith(f"  inner_steps {place}:"))
        assert f": {({0: 'no arm', 3: 'all 3 arms'}).get(count, f'{count} of 3 arms, without ')}" in line


def test_seeds_that_are_asked_for_are_kept_and_arms_without_them_are_named() -> None:
    rows = grid(lambda _, arm, lr, seed: "missing" if (arm, lr, seed) == ("b", 0.5, 2) else "finished")
    selected, words = complete(rows)
    assert {row.values[SEED] for row in selected} == {0, 1}
    assert {row.arm for row in selected} == set(ARMS)
    selected, words = complete(rows, [2])
    assert {row.values[SEED] for row in selected} == {2}
    assert {row.arm for row in selected} == {"a", "c"}
    assert words.splitlines() == [
        "34 of 36 runs have ended. Shown are the arms that are whole for seed 2:",
        "  inner_steps 4: 2 of 3 arms, without b",
        "  inner_steps 16: 2 of 3 arms, without b",
    ]


def test_many_seeds_are_no_burden() -> None:
    """Of 40 seeds those that both arms have are found at once; every choice of them would take years."""
    rows = [
        Row(arm, f"{arm}-{seed}", {"inner_steps": 4, SEED: seed}, "missing" if arm == "b" and seed > 29 else "finished")
        for arm, seed in product("ab", range(40))
    ]
    assert {row.values[SEED] for row in complete(rows)[0]} == set(range(30))


def test_a_run_that_stands_for_others_counts_once() -> None:
    rows = [replace(row, twin_of="one") for row in grid(lambda *_: "finished")]
    assert complete(rows)[1].startswith("1 of 1 runs")


def begun(name: str, out: Path, scale: Scale, lacks: Callable[[Row], bool] = lambda _: False) -> list[Row]:
    """Make a study's folder with its table, in which some runs have not ended; return the rows."""
    sweep = study.load(name).sweep(scale)
    gone = {"state": "missing", "perplexity": None, "validation_loss": None, "seconds": None}
    made: list[Row] = madeup.rows(sweep, lambda cell: 9 + cell.config.outer.lr + 0.1 * cell.config.seed)
    rows = [replace(row, **gone) if lacks(row) else row for row in made]
    folder = out / f"{name}-{scale.name}"
    folder.mkdir(parents=True)
    write_rows(folder / "cells.csv", rows)
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("name", [NAME, "robustness_heatmaps"])
def test_it_says_what_the_study_says_of_those_runs_and_writes_nothing(name: str, tmp_path: Path) -> None:
    """With all runs the study's own answer; without the last seed's that of a study of the first two."""
    module: Any = study.load(name)
    third = sorted({cell.config.seed for cell in module.sweep(SCALE).cells})[2]
    for first_open in (third, 99):
        out = tmp_path / str(first_open)
        rows = begun(name, out, SCALE, lambda row, seed=first_open: row.values[SEED] >= seed)
        before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
        words = study.so_far(name, out, scale=SCALE)
        assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
        rows = [row for row in rows if row.state == "finished"]
        seeds = tuple(sorted({row.values[SEED] for row in rows}))
        answer = study.folded(module.answer(module.table(rows, replace(SCALE, seeds=seeds))))
        assert words.endswith(answer)
        assert "without" not in words.removesuffix(answer)
        assert words.startswith(f"{len({row.run for row in rows})} of ")


@pytest.mark.slow
@pytest.mark.parametrize("name", [NAME, "robustness_heatmaps", "soft_restart", "wires"])
def test_whatever_is_missing_something_is_said(name: str, tmp_path: Path) -> None:
    """All, half or a few runs, or whole arms are missing at random, as while a study trains: never an error."""
    arms = sorted({cell.arm for cell in study.load(name).sweep(SCALE).cells})
    for number, share in enumerate((1.0, 0.5, 0.02, 0.0)):
        rng = random.Random(number)
        gone, out = set(rng.sample(arms, rng.randint(0, len(arms) - 1))), tmp_path / str(number)
        begun(name, out, SCALE, lambda row, g=gone, r=rng, s=share: row.arm in g or r.random() < s)
        words = study.so_far(name, out, scale=SCALE)
        assert " runs have ended" in words
        assert "nan" not in words
        if share == 1:
            first, *places = words.splitlines()
            assert first.startswith("0 of ")
            assert first.endswith("and no arm is whole.")
            assert all(line.endswith(": no arm") for line in places)


def test_a_damaged_table_is_told_and_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--so-far` says so; the study itself counts the runs that lie there and goes on."""
    begun("robustness_heatmaps", tmp_path, SCALE)
    table = tmp_path / "robustness_heatmaps-small" / "cells.csv"
    table.write_text("arm,run\nx")
    with pytest.raises(UsageError, match=r"is not a table.*repeat"):
        study.so_far("robustness_heatmaps", tmp_path, scale=SCALE)
    table.write_text("")
    swept: list[Any] = []

    def stopped(sweep: Any, folder: Path, **_: Any) -> Any:
        swept.append((sweep, folder))
        raise RuntimeError("as far as this")

    monkeypatch.setattr(_training, "run_sweep", stopped)
    monkeypatch.setattr("twophase.tasks.build.preflight_all", lambda _: {})
    with pytest.raises(RuntimeError, match="as far as this"):
        study.run("robustness_heatmaps", tmp_path, scale=SCALE)
    assert swept[0][1] == table.parent


def test_a_study_is_not_drawn_from_a_part_of_its_runs(tmp_path: Path) -> None:
    """`--workers 0` fills the queue and starts no worker: the study says what to do, and writes no answer."""
    corpus = f"file:{textmaker.write(tmp_path / 'text.txt')}"
    scale = replace(SCALE, base=with_values(SCALE.base, {"data.corpus": corpus}), seeds=(0,))
    with pytest.raises(RuntimeError, match=r"runs of .* have not ended, .*sweep-worker --out .*repeat the command"):
        study.run("robustness_heatmaps", tmp_path / "out", scale=scale, workers=0)
    assert not list((tmp_path / "out").glob("*.json"))
    assert study.so_far("robustness_heatmaps", tmp_path / "out", scale=scale).startswith("0 of ")


def test_what_cannot_be_said_so_far(tmp_path: Path) -> None:
    chooses = "by its earlier ones"
    for name, reason in (("restart_mechanism", "trains nothing"), ("blockwise", chooses), ("retuning", chooses)):
        with pytest.raises(UsageError, match=f"--so-far: the study {name} .*{reason}.*leave the option out"):
            study.so_far(name, tmp_path)
    with pytest.raises(UsageError, match=r"--so-far: .*cells\.csv is not there; begin the study"):
        study.so_far("robustness_heatmaps", tmp_path)
    begun("robustness_heatmaps", tmp_path, SCALE)
    with pytest.raises(UsageError, match="--so-far 7: the study has no such seed; it has 0, 1, 2"):
        study.so_far("robustness_heatmaps", tmp_path, scale=SCALE, seeds=[7, 0])


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    begun("robustness_heatmaps", tmp_path, QUICK)
    assert main(["study", "robustness_heatmaps", "--quick", "--out", str(tmp_path), "--so-far"]) == 0
    plain = capsys.readouterr().out
    assert main(["study", "robustness_heatmaps", "--quick", "--out", str(tmp_path), "--so-far", "0"]) == 0
    assert capsys.readouterr().out == plain
    assert plain.startswith(robustness_heatmaps.QUESTION)
    assert "all" in plain
    assert sorted(path.name for path in tmp_path.iterdir()) == ["robustness_heatmaps-quick"]


@pytest.mark.slow
def test_tables_from_several_places_are_joined(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Seeds trained in several places say what they say from one; a part's table may lack axes that it has not."""
    rows = begun(NAME, tmp_path / "whole", SCALE)
    whole = study.so_far(NAME, tmp_path / "whole", scale=SCALE)
    seeds = sorted({row.values[SEED] for row in rows})
    tables = [tmp_path / f"{seed}.csv" for seed in seeds]
    for seed, table in zip(seeds, tables, strict=True):
        part = [row for row in rows if row.values[SEED] == seed]
        same = {path for path in part[0].values if len({row.values[path] for row in part}) == 1}
        write_rows(table, [replace(row, values={p: v for p, v in row.values.items() if p not in same}) for row in part])
    assert study.so_far(NAME, tmp_path / "nowhere", scale=SCALE, tables=tables) == whole
    assert not (tmp_path / "nowhere").exists()
    first = tmp_path / "first"
    begun(NAME, first, SCALE, lambda row: row.values[SEED] != seeds[0])
    assert study.so_far(NAME, first, scale=SCALE, tables=tables[1:]) == whole
    assert study.so_far(NAME, first, scale=SCALE, tables=tables[1:2]) != whole
    begun("robustness_heatmaps", first, SCALE)
    with pytest.raises(
        UsageError, match=r"--table .*\.csv: .* of its .* rows are no runs of this study.* at this scale"
    ):
        study.so_far("robustness_heatmaps", first, scale=SCALE, tables=tables[:1])
    begun(NAME, tmp_path, QUICK)
    words = ["study", NAME, "--quick", "--out", str(tmp_path / "nowhere")]
    table = str(tmp_path / f"{NAME}-quick" / "cells.csv")
    assert main([*words, "--so-far", "--table", table]) == 0
    assert " runs have ended" in capsys.readouterr().out
    assert main([*words, "--table", table]) == 0
    assert {path.suffix for path in (tmp_path / "nowhere").iterdir()} == {".csv", ".json", ".pdf", ".png"}


@pytest.mark.slow
def test_tables_that_hold_every_run_are_drawn_and_nothing_is_trained(tmp_path: Path) -> None:
    """Made-up runs cannot be trained, so whatever is said is the tables'; a run that lacks is named.

    What counts as every run is the study's set of today: one that an older folder's table lacks is missing.
    """
    rows = begun(NAME, tmp_path, SCALE)
    tables = [tmp_path / "even.csv", tmp_path / "odd.csv"]
    for parity, path in enumerate(tables):
        write_rows(path, [row for row in rows if row.values[SEED] % 2 == parity])
    outcome = study.run(NAME, tmp_path / "out", scale=SCALE, tables=tables)
    assert study.so_far(NAME, tmp_path, scale=SCALE).endswith("\n" + outcome.answer)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(path.name for path in outcome.paths)
    with pytest.raises(UsageError, match=rf"--table: \d+ of the \d+ runs of {NAME} have ended in no table"):
        study.run(NAME, tmp_path / "none", scale=SCALE, tables=tables[:1])
    assert not (tmp_path / "none").exists()
    for other, reason in (("restart_mechanism", "trains nothing"), ("retuning", "by its earlier ones")):
        with pytest.raises(UsageError, match=f"--table: the study {other} .*{reason}"):
            study.run(other, tmp_path / "none", tables=tables)
    last = rows[-1].run
    older = [row for row in rows if row.run != last]
    write_rows(tables[0], older)
    write_rows(
        tmp_path / f"{NAME}-small" / "cells.csv", [*older, replace(rows[0], arm="an arm of before", run="0123456789ab")]
    )
    with pytest.raises(UsageError, match=rf"1 of the .* runs of {NAME} have ended in no table"):
        study.run(NAME, tmp_path, scale=SCALE, tables=tables[:1])
