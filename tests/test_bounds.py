"""What a benchmark's figures are held against."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

import bounds

FOLDER = Path(bounds.__file__).parent


@pytest.mark.parametrize(
    ("value", "status"),
    [(1.5, 0), (2.5, 0), (2.6, 1), (1.4, 1), (math.nan, 1), (math.inf, 1), (None, 0)],
)
def test_status_says_whether_a_bound_is_broken(
    value: float | None, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A value beyond its bound, or NaN, gives status 1 and one line; the figures are the last line whatever happens."""
    monkeypatch.setattr(bounds, "BOUNDS", {"walk": {"ratio": {"min": 1.5, "max": 2.5}, "absent": {"max": 1.0}}})
    figures = {"ratio": value, "seconds": 7.0}
    assert bounds.finish("walk", figures) == status
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == status + 1
    assert json.dumps(json.loads(lines[-1])) == json.dumps(figures)


def test_a_benchmark_without_bounds_ends_well(capsys: pytest.CaptureFixture[str]) -> None:
    """A name that bounds.json does not hold is no fault: new figures may be printed before they are bound."""
    assert bounds.finish("no such benchmark", {"ratio": 1e9}) == 0
    assert json.loads(capsys.readouterr().out) == {"ratio": 1e9}


def test_stored_bounds() -> None:
    """Each bound belongs to a benchmark that exists, has a limit and the source of its number."""
    for name, stored in bounds.BOUNDS.items():
        assert (FOLDER / f"{name}.py").is_file(), name
        for figure, bound in stored.items():
            assert bound.keys() & {"min", "max"}, (name, figure)
            assert bound.keys() <= {"min", "max", "source"}, (name, figure)
            assert bound.get("source"), (name, figure)
