"""The map of regimes: gains of treatments by hand, and a rule that is judged where it was not chosen."""

from __future__ import annotations

import math

import pytest

from twophase.figures.style import styled
from twophase.recipes.bench import FITTED, PLACES, TREATMENTS, regime_cells
from twophase.studies import regimes
from twophase.studies.study import Result
from twophase.tasks.named import check

MAIN = [place.name for place in PLACES if not place.few]


def rows_of(flipped: bool = False) -> list[dict[str, str]]:
    """Rows in which momentum helps where the cosine is large; elsewhere where it is small, if flipped."""
    rows = []
    for place in MAIN:
        for lr, cosine in ((0.1, 0.2), (0.2, 0.8)):
            helps = (cosine > 0.5) != (flipped and place not in FITTED)
            for arm in dict.fromkeys(arm for pair in TREATMENTS.values() for arm in pair):
                result = 10 * (0.9 if helps else 1.1) if arm == TREATMENTS["momentum"][0] else 10.0
                row = {"place": place, "arm": arm, "inner.lr": str(lr), "seed": "20", "result": str(result)}
                measured = {"cosine": str(cosine), "early_cosine": "0.5", "shrunk": "0.9", "agreement": "0.5"}
                rows.append(row | (measured if arm == "observe" else {}))
    return rows


def table_of(monkeypatch: pytest.MonkeyPatch, rows: list[dict[str, str]]) -> Result:
    """The study of other rows than the stored ones."""
    monkeypatch.setattr(regimes, "stored", lambda _name: rows)
    return regimes.table()


def test_a_rule_is_judged_on_other_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """What holds everywhere is usable; what holds only where it was chosen is not."""
    rule = table_of(monkeypatch, rows_of()).numbers["rules"]["momentum"]
    assert (rule["rule"], rule["share"], rule["majority"], rule["usable"]) == ("cosine above 0.5", 1.0, 0.5, True)
    assert rule["clear"] == rule["cells"] == 8
    flipped = table_of(monkeypatch, rows_of(flipped=True)).numbers["rules"]["momentum"]
    assert (flipped["fitted"], flipped["share"], flipped["usable"]) == (1.0, 0.0, False)


def test_gains() -> None:
    """A gain is the control's mean logarithm less the arm's; infinite where one diverged, missing where both did."""
    rows = rows_of()
    assert regimes.cells_of(rows)[0]["momentum"] == pytest.approx(-math.log(1.1))
    arm, control = TREATMENTS["a restart of it"]
    for broken, expected in (({arm}, -math.inf), ({control}, math.inf), ({arm, control}, None)):
        changed = [{**row, "result": ""} if row["arm"] in broken else row for row in rows]
        assert regimes.cells_of(changed)[0].get("a restart of it") == expected


def test_runs_of_every_place_are_possible() -> None:
    """All runs can be checked, and no two at a place are the same."""
    for place in PLACES:
        if not place.few:
            cells = regime_cells(place)
            assert len({check(cell.config) and cell.run_id for cell in cells}) == len(cells)


def test_words_and_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table has a line a treatment, and the figure a panel."""
    result = table_of(monkeypatch, rows_of())
    assert "cosine above 0.5" in regimes.answer(result)
    with styled():
        assert "predicted from averaging's own run: momentum" in regimes.draw(result).get_suptitle()
