"""The figures of the paper: numbers that docs/reproduce.md quotes, computed again; each table is drawn."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import common
import fig1_mechanism
import fig2_toy
import fig3_heatmaps
import fig4_retuning
import fig5_soft
import period_criteria
from common import HEAVY_BALL, SIX
from trainings import LAPTOP, PAPER, QUICK, Scale
from twophase import theory
from twophase.recipes.pretraining import paper_150m
from twophase.rule import OuterRule


def printed(text: str) -> Any:
    """The value that was printed, to half a unit of its last digit."""
    return pytest.approx(float(text), abs=0.5000001 * 10 ** -len(text.partition(".")[2]), rel=0)


ANCHORS = {
    ("one mode", "no restart"): ("", "-3.96"),
    ("one mode", "best period"): ("5", "-64.54"),
    ("one mode", "least |chi|, K <= 80"): ("75", "-10.0"),
    ("one mode", "Nesterov, no restart, momentum in [0.3, 0.99]"): ("", "-80.2"),
    ("six modes", "a period each"): ("5, 5, 6, 7, 8, 10", "-32.04"),
    ("six modes", "least |chi|, K <= 20"): ("17", "-6.64"),
    ("six modes", "momentum-free SGD, same lr"): ("", "-38.26"),
    ("three blocks", "best period"): ("8", "-8.85"),
    ("three blocks", "paper's heuristic each"): ("5, 6, 11", "-13.55"),
    ("three blocks", "corrected heuristic each"): ("5, 7, 12", "-15.56"),
}
"""Anchors A1 to A3 of the theory note: periods and log10 losses."""


def test_mechanism_has_the_anchors() -> None:
    """Periods and losses of paper figure 1 have their printed digits, and a rollout ends at them."""
    found = fig1_mechanism.table().set_index(["case", "method"])
    for place, (period, loss) in ANCHORS.items():
        assert (found["period"][place], found["log10_loss"][place]) == (period, printed(loss)), place
    loss = theory.rollout(HEAVY_BALL, SIX, 120, 7).loss[-1]
    assert math.log10(loss) == pytest.approx(found["log10_loss"]["six modes", "best period"], abs=1e-9)


@pytest.mark.parametrize(
    ("form", "none", "best", "three"), [("ema", ".66", ".79", ".70"), ("sum", ".75", ".93", ".75")]
)
def test_toy_shares(form: Any, none: str, best: str, three: str) -> None:
    """Anchor A5; K = 3 hurts more cells than it helps; no period rescues a cell (R18); a cell is its simulation."""
    loss = fig2_toy.cells(SIX, form, nesterov=False)
    shares = [np.mean(loss[method] <= -6) for method in ("none", "best_K", "K3")]
    assert shares == [printed(none), printed(best), printed(three)]
    assert np.mean(loss["K3"] < loss["none"] - 0.1) < np.mean(loss["K3"] > loss["none"] + 0.1)
    assert np.all((loss["best_K"] > math.log10(0.5) + 1e-9) == (loss["none"] > math.log10(0.5) + 1e-9))
    rule = OuterRule(fig2_toy.LRS[form][20], fig2_toy.MOMENTA[25], form=form)
    assert loss["K3"][25, 20] == pytest.approx(math.log10(theory.rollout(rule, SIX, 60, 3).loss[-1]), abs=1e-6)


def test_choices_by_criteria() -> None:
    """Losses and exact choices are those of the theory."""
    problems = period_criteria.Problems.draw(5)
    logs, losses = problems.losses(12)
    picked = period_criteria.choices(problems, logs, losses)
    for i, (sigma, weights) in enumerate(zip(problems.sigma, problems.weights, strict=True)):
        rule, settings = np.ravel(problems.rules)[i], {"weights": weights, "max_period": 12}
        exact = theory.log_final_loss(rule, sigma, 12, range(1, 13), weights) / np.log(10)
        assert losses[:, i] == pytest.approx(exact, abs=1e-9)
        assert picked["final loss (exact)"][i] + 1 == theory.best_period(rule, sigma, rounds=12, **settings)
        assert picked["rate of the slowest mode"][i] + 1 == theory.best_period(rule, sigma, **settings)


def test_a_table_whose_numbers_agree_is_left_alone(tmp_path: Path) -> None:
    """Other last digits do not rewrite a table; another number does, and the origin stands in the first line."""
    common.write("some", pd.DataFrame({"x": [1.0, math.nan], "restart": ["3", "never"]}), tmp_path)
    before = (tmp_path / "some.csv").read_bytes()
    assert before.startswith(b"# python ")
    common.write("some", pd.DataFrame({"x": [1.0 + 1e-7, math.nan], "restart": ["3", "never"]}), tmp_path)
    assert (tmp_path / "some.csv").read_bytes() == before
    common.write("some", pd.DataFrame({"x": [1.01, math.nan], "restart": ["3", "never"]}), tmp_path)
    assert common.read("some", tmp_path)["x"][0] == 1.01


# ------------------------------------------------------------------------------------------------------ trained figures


@pytest.mark.parametrize("scale", [QUICK, replace(LAPTOP, seeds=(0,)), PAPER])
def test_plans_can_be_run(scale: Scale) -> None:
    """Every cell is there once; what figure 4 tunes at are runs of figure 3, so that none is trained for it alone."""
    tuning = fig4_retuning.tuning(scale)
    heatmaps = fig3_heatmaps.plan(scale)
    for cells in (heatmaps, fig5_soft.plan(scale), tuning):
        assert len({(cell.arm, cell.run_id, cell.control_of) for cell in cells}) == len(cells)
    assert {cell.run_id for cell in tuning} <= {cell.run_id for cell in heatmaps}
    recipe = paper_150m()
    assert replace(PAPER.base, evaluate_every=recipe.evaluate_every, log_every=recipe.log_every) == recipe
