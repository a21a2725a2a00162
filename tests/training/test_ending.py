"""The end of an elastic run: one result in one file, and nothing else is taken for it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from twophase.base.config import RunError
from twophase.training.ending import Ending

SUMMARY = {"checksum": "0123456789abcdef", "perplexity": 3.25, "validation_loss": float("nan")}


def test_the_first_result_stays(tmp_path: Path) -> None:
    """A second result of a run is answered with the first, which only that run finds; another run's is refused."""
    ending = Ending(tmp_path / "run.json")
    assert ending.read() is None
    assert not ending.is_over(5)
    first = ending.conclude(5, "alike", tmp_path / "replica-0", SUMMARY)
    again = ending.conclude(5, "alike", tmp_path / "replica-1", SUMMARY | {"checksum": "f" * 16})
    assert again == first == ending.read(5) == ending.read()
    assert (first["checksum"], first["folder"]) == (SUMMARY["checksum"], str(tmp_path / "replica-0"))
    assert first["summary"] == SUMMARY | {"validation_loss": None}
    assert ending.is_over(5)
    assert ending.is_over(0)
    assert ending.read(6) is None
    assert not ending.is_over(6)
    with pytest.raises(RunError, match="holds the end of another run"):
        ending.conclude(6, "alike", tmp_path / "replica-0", SUMMARY)
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:0],
        lambda text: text[:-20],
        lambda text: text.replace("0123456789abcdef", "0123456789abcdee"),
        lambda text: text.replace("3.25", "3.5"),
        lambda text: json.dumps([json.loads(text)]),
        lambda text: text[0] + "}",
    ],
)
def test_a_damaged_record_is_no_end(tmp_path: Path, damage: Callable[[str], str]) -> None:
    """Whatever changes in it is noticed: it is refused where a replica begins, and ends no run under way."""
    ending = Ending(tmp_path / "run.json")
    ending.conclude(5, "alike", tmp_path, SUMMARY)
    ending.path.write_text(damage(ending.path.read_text()))
    assert not ending.is_over(5)
    with pytest.raises(RunError, match=r"--run-record .*run\.json: is not the record of a run's end"):
        ending.read(5)
