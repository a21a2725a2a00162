"""The runs behind the map of regimes: what is measured, and that a repeated call makes nothing anew."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest

from twophase.base.config import UsageError
from twophase.cli import regimes
from twophase.cli.regimes import run_regimes, signals
from twophase.recipes.bench import TREATMENTS, Place, regime_cells

SMALL = Place("small", "", {"replicas": 2, "inner_steps": 4, "steps": 16, "inner.lr": 0.01}, "digits")
ALONE = Place("alone", "", {"replicas": 1, "inner_steps": 4, "steps": 16, "inner.lr": 0.01}, "digits")


def test_signals_of_a_record(tmp_path: Path) -> None:
    """Medians of the halves, the and the last quarter against the largest norm."""
    norms, cosines = [1.0, 4.0, 2.0, 1.0, 1.0, 1.0, 0.5, 0.5], [0.0, 0.9, 0.8, 0.7, 0.1, 0.2, 0.3, 0.4]
    lines = [{"pseudo_gradient_norm": norm, "cosine": cosine} for norm, cosine in zip(norms, cosines, strict=True)]
    path = tmp_path / "rounds.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    measured = signals(path)
    assert measured["early_cosine"] == 0.8  # the first round has nothing before it
    assert measured["cosine"] == pytest.approx(0.25)
    assert measured["shrunk"] == 1 - 0.5 / 4


def test_another_table_stays(tmp_path: Path) -> None:
    """A file in the place of the table is not replaced."""
    (tmp_path / "regimes.csv").write_text("mine")
    with pytest.raises(UsageError, match=r"would replace .*regimes\.csv, which is there and holds something else"):
        run_regimes(tmp_path, places=[SMALL], workers=1, quiet=True)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
def test_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each run has a row, those of averaging with what they measured; the same call again changes no byte."""
    monkeypatch.setattr(regimes, "regime_cells", lambda place: regime_cells(place)[:6])
    run_regimes(tmp_path, places=[SMALL, replace(SMALL, name="few", few=True), ALONE], workers=1, quiet=True)
    text = (tmp_path / "regimes.csv").read_bytes()
    rows = run_regimes(tmp_path, places=[SMALL, ALONE], workers=1, quiet=True)
    with (tmp_path / "regimes.csv").open(newline="") as file:
        stored = list(csv.DictReader(file))
    assert len(stored) == len(rows) == 12
    assert {row["arm"] for row in stored} == {arm for pair in TREATMENTS.values() for arm in pair}
    assert {row["place"] for row in stored if row["cosine"]} == {"small", "alone"}
    assert (tmp_path / "regimes.csv").read_bytes() == text
