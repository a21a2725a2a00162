"""The study of periods by block: what it concludes from made-up runs, where it chooses, and that it really trains."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import textmaker
from madeup import Value, line_of, rows
from twophase.base.config import with_values
from twophase.figures.style import rendered, styled
from twophase.recipes.paper import LAPTOP, PAPER, QUICK, Scale
from twophase.studies import _blockwise_cells as cells
from twophase.studies import blockwise, study
from twophase.studies._blockwise_cells import ALL, MEAN, NEVER, ORACLE, ROUNDS, SEARCH, SHUFFLED
from twophase.sweeps import run as launch
from twophase.sweeps.grid import Cell, Sweep
from twophase.sweeps.table import Row

SEED_FACTOR = {0: 1.0, 1: 0.96, 2: 1.05, 3: 1.01}
BEST = {"embedding": "2", "attention": NEVER, "mlp": "5", "head": "2"}
"""The policy of each block that a world of separate blocks likes best."""
FORETOLD = {NEVER: -3.0, "5": -2.5, "3": -2.0, "2": -1.5, "1": -1.0}


def periods_of(cell: Cell) -> dict[str, str]:
    return dict(word.split("=") for word in cell.config.sync.restart)


def separate(cell: Cell) -> float:
    """A world in which every block costs 5 % for a policy that is not its best, whatever the others have."""
    wrong = sum(policy != BEST[name] for name, policy in periods_of(cell).items())
    return 10 * SEED_FACTOR[cell.config.seed] * 1.05**wrong


def measurement(pilot: str, periods: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    """What a pilot's measurement would say."""
    arms = dict.fromkeys((MEAN, ALL, ROUNDS), (NEVER,) * 4) | dict(periods)
    numbers = {
        name: [0.5, 0.4, 0.3, 0.2] for name in ("sigma", "low", "high", "unstable", "rounds_sigma", "rounds_error")
    }
    shown = {"rounds_shown": [True, False, False, False], "log_loss": FORETOLD}
    return {pilot: {"periods": {arm: list(each) for arm, each in arms.items()}} | numbers | shown}


def staged(value: Value, periods: Mapping[str, tuple[str, ...]], scale: Scale = LAPTOP) -> tuple[list[Row], Any, Sweep]:
    """All stages in a made-up world."""
    results: list[Row] = []
    measured: dict[str, Any] = {}
    while True:
        sweep = blockwise.sweep(scale, results, measured)
        results = rows(sweep, value)
        for place in cells.places(scale):
            measured |= measurement(cells.pilot(place), periods)
        if blockwise.sweep(scale, results, measured).runs.keys() == sweep.runs.keys():
            return results, measured, sweep


def result_of(value: Value, periods: Mapping[str, tuple[str, ...]], scale: Scale = LAPTOP) -> Any:
    results, measured, _ = staged(value, periods, scale)
    return blockwise.table(results, scale, measured)


RIGHT = {MEAN: tuple(BEST.values()), ROUNDS: ("1", "1", "1", "1")}


@pytest.mark.slow
def test_where_blocks_differ_the_oracle_finds_what_each_likes() -> None:
    """With separate blocks the search ends at each block's best, and so does a theory that is right; both are told."""
    result = result_of(separate, RIGHT)
    assert len(result.numbers["places"]) == 4
    for facts in result.numbers["places"].values():
        assert facts["chosen"] == "2"
        assert facts["arms"][ORACLE]["periods"] == [tuple(BEST.values())]
        for arm in (ORACLE, MEAN):
            assert facts["arms"][arm]["ratio"] == pytest.approx(1 / 1.05**2)
            assert facts["against_shuffled"][arm]["ratio"] < 1 / 1.05
            assert len(facts["arms"][SHUFFLED[arm]]["periods"]) == 2
        assert facts["arms"][ROUNDS]["ratio"] == pytest.approx(1.05**2)
    text = blockwise.answer(result)
    for claim in (f"{MEAN}: better than the chosen", f"{ORACLE}: better than the same periods on other"):
        assert line_of(text, claim).startswith("Holds: ")
    for claim in (f"{ALL}: better than the chosen", f"{ROUNDS}: better than the chosen"):
        assert line_of(text, claim).startswith("Does not hold: ")
    with styled():
        figure = blockwise.draw(result)
        assert rendered(figure, [".png"])[".png"]
    title = " ".join(figure.get_suptitle().split())
    assert re.search(r"beat the best one K for all in [1-9]\d* of \d+ comparisons", title)
    assert "searched block by block do in 4 of 4" in title
    with styled():
        nothing = blockwise.draw(result_of(lambda cell: 10 * SEED_FACTOR[cell.config.seed], RIGHT)).get_suptitle()
    assert re.search(r"in 0 of \d+ comparisons; periods searched block by block do in 0 of", " ".join(nothing.split()))


def test_where_nothing_matters_nothing_is_better() -> None:
    """In a world of seeds alone every change is 0, and no claim holds."""
    result = result_of(lambda cell: 10 * SEED_FACTOR[cell.config.seed], RIGHT)
    for facts in result.numbers["places"].values():
        assert all(arm["ratio"] == pytest.approx(1) for arm in facts["arms"].values())
        assert facts["order"] is None or abs(facts["order"]) <= 1
    claims = [line for line in blockwise.answer(result).splitlines() if ": better than" in line]
    assert len(claims) == 8
    assert all(line.startswith(("Does not hold: ", "Not known: ")) for line in claims)


@pytest.mark.parametrize(("sign", "order"), [(1, 1.0), (-1, -1.0)])
def test_the_order_of_periods_is_held_against_the_forecast(sign: int, order: float) -> None:
    """Rank correlation 1 where runs come out as foretold, -1 where they come out the other way round."""

    def value(cell: Cell) -> float:
        logs = [FORETOLD[policy] for policy in periods_of(cell).values()]
        return SEED_FACTOR[cell.config.seed] * math.exp(3 + sign * sum(logs) / 8)

    result = result_of(value, RIGHT)
    for facts in result.numbers["places"].values():
        assert facts["order"] == pytest.approx(order)
    assert line_of(blockwise.answer(result), "foretell the order").startswith("Holds" if sign > 0 else "Does not hold")


def test_what_is_chosen_is_chosen_on_one_seed_and_judged_on_others() -> None:
    """The seeds that judge change no cell; and no arm but the one K is judged on the seed that chooses."""
    _, _, plain = staged(separate, RIGHT)

    def adverse(cell: Cell) -> float:
        wrong = 20.0 if cell.config.seed and periods_of(cell)["mlp"] == "5" else 1.0
        return wrong * separate(cell)

    _, _, other = staged(adverse, RIGHT)
    assert [cell.run_id for cell in plain.cells] == [cell.run_id for cell in other.cells]
    assert {cell.config.seed for cell in plain.cells if cell.arm == SEARCH} == {0}
    assert {cell.config.seed for cell in plain.cells if cell.arm in blockwise.ARMS} == {1, 2, 3}


def test_a_run_that_diverges_is_data() -> None:
    """A policy that diverges is never chosen, is named, and takes part in no mean."""

    def value(cell: Cell) -> float | str:
        return "diverged" if "1" in periods_of(cell).values() else separate(cell)

    result = result_of(value, RIGHT)
    facts = result.numbers["places"]["width 16, S=5"]
    assert facts["arms"]["one K for all: 1"]["state"] == facts["arms"][ROUNDS]["state"] == "diverged"
    assert facts["arms"][ROUNDS]["ratio"] is None
    assert facts["arms"][ORACLE]["ratio"] == pytest.approx(1 / 1.05**2)
    assert "diverged" in blockwise.answer(result)


@pytest.mark.parametrize("scale", [QUICK, LAPTOP, PAPER], ids=["quick", "laptop", "paper"])
def test_runs_differ_in_periods_seed_and_place_alone(scale: Scale) -> None:
    """All runs of a place have the same model, text, steps and blocks, and each shuffle holds the same periods."""
    _, _, sweep = staged(separate, RIGHT, scale)
    for place in cells.places(scale):
        here = [cell for cell in sweep.cells if cell.config.inner_steps == place.inner_steps]
        here = [cell for cell in here if cell.config.model.hidden_size == place.width]
        alike = {"sync.restart": (), "seed": 0, "outer.lr": 1.0, "outer.momentum": 0.0, "outer.nesterov": False}
        assert len({repr(with_values(cell.config, alike)) for cell in here}) == 1
        for arm, control in SHUFFLED.items():
            sets = {tuple(sorted(periods_of(cell).values())) for cell in here if cell.arm == arm}
            assert {tuple(sorted(periods_of(cell).values())) for cell in here if cell.arm == control} in (sets, set())
            pairs = {tuple(periods_of(cell).values()) for cell in here if cell.arm == arm}
            assert not pairs & {tuple(periods_of(cell).values()) for cell in here if cell.arm == control}


@pytest.fixture
def small(tmp_path: Path) -> Scale:
    corpus = textmaker.write(tmp_path / "text.txt")
    values = {"data.corpus": f"file:{corpus}", "data.sequence_length": 16, "data.batch_size": 2}
    values |= {"model.hidden_size": 8, "model.intermediate_size": 12}
    return replace(QUICK, base=with_values(QUICK.base, values))


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
def test_it_really_trains_and_measures_and_is_resumed(
    small: Scale, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Quick, end to end: the files are there, every run is finished once, and a repeated call trains nothing."""
    monkeypatch.setattr(study, "rendered", lambda *_, **__: {})  # its figure is drawn above
    seen: list[launch.Status] = []
    outcome = study.run("blockwise", tmp_path / "out", scale=small, progress=seen.append)
    facts = json.loads((tmp_path / "out" / "blockwise.json").read_text())
    (place,) = facts["numbers"]["places"].values()
    assert set(place["arms"]) >= {"averaging", MEAN, ALL, ROUNDS, ORACLE}
    assert all(arm["state"] == "finished" for arm in place["arms"].values())
    assert all(len(periods) == 4 for arm in place["arms"].values() for periods in arm["periods"])
    assert len(place["measured"]["sigma"]) == 4
    assert "width 8, S=4" in outcome.answer
    trained = [status.run for status in seen if status.event == "finished"]
    assert len(trained) == len(set(trained)) == len(list((tmp_path / "out" / "runs").iterdir()))
    before = {path: path.read_bytes() for path in outcome.paths}
    again: list[launch.Status] = []
    study.run("blockwise", tmp_path / "out", scale=small, progress=again.append)
    assert {status.event for status in again} == {"begun"}
    assert {path: path.read_bytes() for path in outcome.paths} == before
