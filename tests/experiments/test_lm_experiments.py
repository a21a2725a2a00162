"""The experiments with the language model: which runs they plan, and that stored numbers follow from stored rows."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

import blockwise
import blockwise_cells
import common
import wires
from madeup import rows
from paper import QUICK
from twophase.sweeps.grid import Cell
from twophase.sweeps.table import Row

FORMS, KINDS = ("sum", "ema"), ("heavy ball", "Nesterov")


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
