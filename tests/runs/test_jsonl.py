"""Values of JSON become numbers, one by one or a column at a time."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twophase.runs.jsonl import LARGEST, column, number, read_columns

NUMBERS = st.floats() | st.integers() | st.booleans() | st.none() | st.just(10**400)
VALUES = NUMBERS | st.text(max_size=3) | st.lists(st.integers(), max_size=2)


@given(st.lists(NUMBERS, max_size=8) | st.lists(VALUES, max_size=8), st.booleans())
def test_a_column_is_its_numbers(values: list[Any], flag: bool) -> None:
    """A column has what each value is by itself: numbers up to the largest, flags that count, nan for all else."""
    found = column(values, flag=flag)
    np.testing.assert_array_equal(found, [number(value, flag=flag) for value in values])
    for value, seen in zip(values, found.tolist(), strict=True):
        taken = isinstance(value, (int, float)) and (flag or not isinstance(value, bool))
        if taken and -LARGEST <= value <= LARGEST:
            assert seen == value or abs(seen - value) <= 1e-15 * abs(value)
        else:
            assert math.isnan(seen)


ENDS = {"LF": b"\n", "CRLF": b"\r\n", "CR": b"\r"}


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"], ids=["plain", "with a byte order mark"])
@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_ends_of_lines(tmp_path: Path, end: bytes, mark: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Line ends and byte order marks of every kind of editor are read, whatever portions a file is read in."""
    file = tmp_path / "rounds.jsonl"
    lines = [b'{"step": %d, "pad": "%s"}' % (step, b"x" * step) for step in range(1, 41)]
    for longest in (1 << 22, 100):
        monkeypatch.setattr("twophase.runs.jsonl._LONGEST_LINE", longest)
        problems: list[str] = []
        file.write_bytes(mark + end.join([*lines, b""]))
        assert read_columns(file, problems, expected=True)["step"].tolist() == list(range(1, 41))
        assert problems == []
        file.write_bytes(mark + end.join(lines)[:-5])
        assert read_columns(file, problems, expected=True)["step"].tolist() == list(range(1, 40))
        assert problems == ["The last line of rounds.jsonl is cut in its middle; left out."]


def test_absurd_numbers_are_named(tmp_path: Path) -> None:
    """Numbers that nothing in a run could be are no numbers, and their names and count are said."""
    file, problems = tmp_path / "metrics.jsonl", []
    file.write_text('{"a": 1e308, "b": 1}\n{"a": null, "b": 1%s}\n{"a": NaN, "b": -1e101}\n' % ("0" * 400))
    found = read_columns(file, problems, expected=True)
    assert np.isnan(found["a"]).all()
    assert np.isnan(found["b"]).tolist() == [False, True, True]
    (problem,) = problems
    assert "3 numbers are larger than anything that a run counts or measures ('a', 'b')" in problem
