"""What every figure shares: texts, and files in a folder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from twophase.errors import UsageError
from twophase.figures.style import check_numbers, write_files
from twophase.files import csv_text


def test_texts() -> None:
    """Tables have 12 digits and nothing without a number."""
    rows = [{"a": 1 / 3, "b": None}, {"b": float("nan"), "c": True}, {"a": np.int64(7), "c": "x, y"}]
    assert csv_text(rows) == 'a,b,c\n0.333333333333,,\n,,true\n7,,"x, y"\n'


def test_unwritable_folder(tmp_path: Path) -> None:
    """A figure that cannot be written says where."""
    with pytest.raises(UsageError, match="missing"):
        write_files(tmp_path / "missing" / "f", {".csv": "a\n"})


def test_numbers_of_something_else_stay(tmp_path: Path) -> None:
    """A table that no figure wrote is not replaced; one that begins as the figure's may be."""
    path = tmp_path / "f.csv"
    path.write_text("sigma,weight\n")
    check_numbers([path], "sigma", "--plot")
    with pytest.raises(UsageError, match="--plot"):
        check_numbers([path], "period", "--plot")
