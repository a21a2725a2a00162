"""The table of cells: settings by seeds, and arms paired by it."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest
from hypothesis import given

from twophase.errors import UsageError
from twophase.judge.cells import ARM, BOTH, CONTROL, MISSING, Paired, fate, outcomes, worst
from twophase.sweeps.table import Row, settings
from verdict_tables import LR, MOMENTUM, TABLES, finished

PLACE = (LR, MOMENTUM)


def table(rows: list[Row], arm: str = "a"):
    return np.log(outcomes([setting for setting in settings(rows) if setting.arm == arm], *PLACE))


@pytest.mark.slow
@given(TABLES)
def test_the_table_has_the_states_and_results_of_the_settings(rows: list[Row]) -> None:
    """Each setting is in it, with inf for a diverged run, NaN for a missing one; `worst` tells its state."""
    for arm in {cell.arm for cell in rows}:
        logarithms = table(rows, arm)
        by_place = {tuple(s.values[path] for path in PLACE): s for s in settings(rows) if s.arm == arm}
        assert set(logarithms.index) == set(by_place)
        for place, largest in zip(logarithms.index, worst(logarithms), strict=True):
            setting = by_place[place]
            values = [math.log(value) for value in setting.results if value is not None]
            if len(logarithms.columns) == len(setting.seeds):
                expected = {"finished": max(values, default=0.0), "diverged": math.inf, "missing": math.nan}
                assert largest == pytest.approx(expected[setting.state], nan_ok=True)


def test_pairs_are_over_equal_settings_and_seeds() -> None:
    """Log ratios are averaged over the settings for each seed, then over the seeds."""
    arm = finished("a", (8.0, 9.0)) + finished("a", (6.0, 6.0), lr=0.7)
    control = finished("b", (3.0, 12.0), lr=0.7) + finished("b", (4.0, 3.0))
    pairs = Paired.over(table(arm) - table(control, "b"))
    assert pairs.ratios == pytest.approx([2.0, math.sqrt(1.5)])
    assert pairs.ratio == pytest.approx(math.sqrt(2 * math.sqrt(1.5)))
    first, second = pairs.by_seed
    assert pairs.error == pytest.approx((first - second) / 2)
    assert pairs.ends(2.0) == pytest.approx(((3 * second - first) / 2, (3 * first - second) / 2))


def test_one_seed_has_no_error() -> None:
    """Nor has it ends; two equal differences have an error of 0."""
    assert (Paired((0.5,)).error, Paired((0.5,)).ends(2.0)) == (None, (None, None))
    assert Paired((0.0, 0.0)).error == 0


def test_without_pandas_one_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """A comparison where the extra is not installed is refused with the remedy, not with a traceback."""
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UsageError, match=r"needs pandas.*pip install 'twophase\[sweep\]'"):
        outcomes([])


@pytest.mark.parametrize(
    ("arm", "control", "remark"),
    [
        (8.0, 9.0, ""),
        (math.inf, 9.0, ARM),
        (8.0, math.inf, CONTROL),
        (math.inf, math.inf, BOTH),
        (math.inf, math.nan, MISSING),
        (math.nan, 9.0, MISSING),
    ],
)
def test_fates(arm: float, control: float, remark: str) -> None:
    """A missing run says nothing, whatever the other did; otherwise the diverged side is named."""
    assert fate(arm, control) == remark
