"""The experiments with the language model: which runs they plan, and that stored numbers follow from stored rows."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

import blockwise
import blockwise_cells
import common
import lm
import retuning
import robustness_heatmaps
import soft_restart
import wires
from madeup import rows
from paper import LAPTOP, PAPER, QUICK, Scale, tuned
from twophase.recipes.pretraining import paper_150m
from twophase.sweeps.grid import Cell
from twophase.sweeps.table import Row

FORMS, KINDS = ("sum", "ema"), ("heavy ball", "Nesterov")


def bowl(lr: float, momentum: float) -> Callable[[Cell], float]:
    """Made-up perplexities whose best is at this learning rate and momentum, for all arms."""
    return lambda cell: 8 + abs(cell.config.outer.lr - lr) + abs(cell.config.outer.momentum - momentum)


# ---------------------------------------------------------------------------------------------------------- the plans


def test_paper_scale_is_table_1() -> None:
    """The axes of the paper's scale, and the rounds of the laptop's, which are close to them."""
    recipe = paper_150m()
    assert replace(PAPER.base, evaluate_every=recipe.evaluate_every, log_every=recipe.log_every) == recipe
    assert (PAPER.lrs, PAPER.momenta) == ((0.1, 0.3, 0.5, 0.7, 0.9, 1.1), (0.1, 0.3, 0.5, 0.7, 0.9))
    assert (PAPER.periods, PAPER.retuning) == ((2, 3, 5, 7, 9, 11), (64, 128, 512, 1024, 2048))
    assert [PAPER.rounds(s) for s in PAPER.retuning] == [196, 98, 25, 13, 7]
    assert [LAPTOP.rounds(s) for s in LAPTOP.retuning] == [96, 48, 24, 12, 6]


@pytest.mark.slow
@pytest.mark.parametrize(("scale", "cells"), [(LAPTOP, (960, 420, 1824)), (PAPER, (734, 258, None)), (QUICK, None)])
def test_plans_can_be_run(scale: Scale, cells: tuple[int | None, ...] | None) -> None:
    """Every run is possible, no cell is there twice, and the numbers of runs are those that docs state."""
    first = robustness_heatmaps.robustness_heatmaps(scale), soft_restart.soft_restart(scale)
    whole = retuning.retuning(scale, rows(retuning.retuning(scale), bowl(0.7, 0.5)))
    for number, sweep in enumerate((*first, whole, wires.sweep(scale))):
        if cells and number < 3 and cells[number]:
            assert len(sweep.cells) == cells[number]
    assert set(retuning.retuning(scale).runs) <= set(first[0].runs)  # none is trained for the tuning alone


@pytest.mark.parametrize("at", [(0.3, 0.1), (0.7, 0.9), (1.1, 0.5)])
def test_tuning_finds_the_best(at: tuple[float, float]) -> None:
    """The known optimum is found for every form, rule and arm; a missing run keeps the sweep at its first stage."""
    first = retuning.retuning(LAPTOP)
    *ended, last = rows(first, bowl(*at))
    assert tuned(LAPTOP, [*ended, last]) == dict.fromkeys(product(FORMS, KINDS, ("never", "3")), at)
    assert tuned(LAPTOP, ended) is None
    assert retuning.retuning(LAPTOP, ended).spec() == first.spec()


def test_blockwise_goes_on_until_the_oracle_is_found() -> None:
    """With made-up results and no measurement each stage extends the last, and the oracle is the best by block."""

    def value(cell: Cell) -> float:
        policies = [word.partition("=")[2] for word in cell.config.sync.restart]
        return 10 + sum((policy == "never") == (place < 2) for place, policy in enumerate(policies))

    cells: Sequence[Cell] = []
    known: list[Row] = []
    while len((sweep := blockwise_cells.sweep(QUICK, known, {})).cells) > len(cells):
        assert {cell.run_id for cell in cells} <= {cell.run_id for cell in sweep.cells}
        cells, known = sweep.cells, rows(sweep, value)
    (place,) = blockwise_cells.places(QUICK)
    assert blockwise_cells.searched(place, blockwise_cells.scores_of(known))[1] == ("2", "2", "never", "never")
    arms = blockwise.table(known, QUICK, {}).numbers["places"][place.name]["arms"]
    assert arms["K_b, oracle"]["perplexity"] == pytest.approx(10)
    assert arms["K_b, oracle"]["ratio"] == pytest.approx(10 / 12)


# -------------------------------------------------------------------------------------------------- what was measured


def test_heatmaps_region_and_bests() -> None:
    """Paper figure 3: the settings within 25 % of the best, counted again in the stored rows."""
    result = common.load("robustness_heatmaps")
    counts = {}
    for form, kind in product(FORMS, KINDS):
        here = common.select(result.rows, inner_steps=5)
        bound = 1.25 * min(row["perplexity"] for row in here if row["perplexity"])
        for arm in ("never", "K=3"):
            cells = common.select(here, arm=f"{form}, {kind}, {arm}")
            counts[form, kind, arm] = sum((row["perplexity"] or math.inf) <= bound for row in cells)
            facts = result.numbers["places"][lm.place_name(form, kind, 5)]
            assert facts["never" if arm == "never" else "restarted"]["within"] == counts[form, kind, arm]
    assert counts["sum", "heavy ball", "never"] < counts["sum", "heavy ball", "K=3"]


def test_retuning_spreads() -> None:
    """Paper figure 4: worst over best of K* and of the momentum, computed again from the stored rows."""
    result = common.load("retuning")
    for facts in result.numbers["places"].values():
        rule = f"{facts['form']}, {facts['rule']}"
        for key, treatment in (("beta_sweep", "beta sweep"), ("k_sweep", "K sweep")):
            here = common.select(result.rows, arm=f"{rule}, {treatment}", inner_steps=facts["inner_steps"])
            here = [row for row in here if key == "beta_sweep" or row["restarts"]]
            values = [row["perplexity"] for row in here]
            if None not in values:
                assert facts[key]["worst_over_best"] == pytest.approx(max(values) / min(values), rel=1e-9)


def test_soft_restart_bests() -> None:
    """The appendix's soft restarts: the best of each place is that of the stored rows."""
    result = common.load("soft_restart")
    for facts in result.numbers["places"].values():
        arm = f"{facts['form']}, Nesterov, soft K={facts['period']}"
        here = common.select(result.rows, arm=arm, inner_steps=facts["inner_steps"])
        soft = [row["perplexity"] for row in here if (row["retain"], row["inject"]) != (0, 0) and row["perplexity"]]
        assert facts["soft"]["perplexity"] == pytest.approx(min(soft), rel=1e-9)


def test_wires_bytes_and_changes() -> None:
    """The bytes are those of the engine's packets; the change over all places is the mean of the stored seeds."""
    result = common.load("wires")
    sent = result.numbers["bytes_a_round"]
    assert [wires.sent_bytes(wire, 31392) for wire in wires.COMPRESSIONS] == [sent[wire] for wire in wires.COMPRESSIONS]
    assert sent["int8"] == 2 * 132 * math.ceil(31392 / 256)
    int8 = [row for row in common.select(result.rows, wire="int8") if row["float32_log_seed0"] is not None]
    logs = [row[f"float32_log_seed{seed}"] for row in int8 for seed in result.settings["seeds"]]
    assert result.numbers["all_places"]["change"]["int8"]["log"] == pytest.approx(sum(logs) / len(logs), abs=1e-9)


def test_blockwise_order() -> None:
    """The chosen K is the best of the search seed, and no restart is worst at S = 5, against the theory's order."""
    result = common.load("blockwise")
    counts = Counter(facts["chosen"] for facts in result.numbers["places"].values())
    assert counts == {"1": 4}
    arms: dict[str, Any] = result.numbers["places"]["width 32, S=5"]["arms"]
    ratios = [arms[f"one K for all: {policy}"]["ratio"] for policy in ("never", "5", "2", "1")]
    assert ratios == sorted(ratios, reverse=True)
