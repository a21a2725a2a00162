"""The table of cells: settings by seeds, and arms paired by it."""

from __future__ import annotations

import math
import sys
from statistics import fmean

import pytest
from hypothesis import given

from twophase.base.errors import UsageError
from twophase.judge.bootstrap import percentile_interval
from twophase.judge.cells import ARM, BOTH, CONTROL, MISSING, Paired, alike, fate, logs, means, outcomes, paired, worst
from twophase.sweeps.table import Row, settings
from verdict_tables import LR, MOMENTUM, TABLES, finished, row

PLACE = (LR, MOMENTUM)


def table(rows: list[Row], arm: str = "a"):
    return logs(outcomes([setting for setting in settings(rows) if setting.arm == arm], *PLACE))


@pytest.mark.slow
@given(TABLES)
def test_the_table_has_the_states_and_results_of_the_settings(rows: list[Row]) -> None:
    """Settings of which some run has ended are in it: logarithms, inf for a diverged run, NaN for a missing one."""
    for arm in {cell.arm for cell in rows}:
        logarithms = table(rows, arm)
        by_place = {tuple(s.values[path] for path in PLACE): s for s in settings(rows) if s.arm == arm}
        assert set(logarithms.index) == {place for place, s in by_place.items() if s.finished or s.diverged}
        for place, largest, mean in zip(logarithms.index, worst(logarithms), means(logarithms), strict=True):
            setting = by_place[place]
            values = [math.log(value) for value in setting.results if value is not None]
            assert mean == (math.inf if setting.diverged else pytest.approx(fmean(values)))
            if len(logarithms.columns) == len(setting.seeds):
                expected = {"finished": max(values, default=0.0), "diverged": math.inf, "missing": math.nan}
                assert largest == pytest.approx(expected[setting.state], nan_ok=True)


def test_pairs_are_over_equal_settings_and_seeds() -> None:
    """Log ratios are averaged over equal settings for each seed that both have, then over the seeds."""
    arm = finished("a", (8.0, 9.0, 7.0)) + finished("a", (6.0, 6.0, 6.0), lr=0.7)
    control = finished("b", (4.0, 3.0)) + finished("b", (3.0, 12.0), lr=0.7) + finished("b", (1.0, 1.0), lr=1.1)
    pairs = paired(table(arm), table(control, "b"))
    assert pairs is not None
    assert pairs.ratios == pytest.approx([2.0, math.sqrt(1.5)])
    assert pairs.ratio == pytest.approx(math.sqrt(2 * math.sqrt(1.5)))
    assert pairs.interval == percentile_interval(pairs.by_seed)
    assert pairs.error == pytest.approx(abs(pairs.by_seed[0] - pairs.by_seed[1]) / 2)
    assert pairs.error is not None
    assert pairs.ends(2.0) == pytest.approx((pairs.mean - 2 * pairs.error, pairs.mean + 2 * pairs.error))
    same = paired(alike(table(arm), table(arm).iloc[1]), table(arm))
    assert same is not None
    assert same.ratio == pytest.approx(fmean([1, 1]) * (6**3 / (8 * 9 * 7)) ** (1 / 6))


def test_what_cannot_be_paired() -> None:
    """A diverged run takes the comparison away, a missing one its seed; nothing in common is nothing."""
    whole = finished("b", (4.0, 3.0))
    assert paired(table([row("a", 8.0), row("a", None, seed=1, state="diverged")]), table(whole, "b")) is None
    missing = paired(table([row("a", 8.0), row("a", None, seed=1, state="missing")]), table(whole, "b"))
    assert missing is not None
    assert (missing.seeds, missing.ratio) == (1, pytest.approx(2.0))
    assert (missing.error, missing.interval, missing.ends(2.0)) == (None, None, (None, None))
    assert paired(table([row("a", 8.0, lr=0.7)]), table(whole, "b")) is None
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
