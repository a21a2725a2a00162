"""The end of an elastic run: one result in one file, and nothing else is taken for it."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from commands import outcome
from trained import run
from twophase.base.config import RunError
from twophase.runs.folder import SUMMARY, WEIGHTS
from twophase.tasks.lm.config import TrainConfig
from twophase.training.ending import Ending

ENDED = {"checksum": "0123456789abcdef", "perplexity": 3.25, "validation_loss": float("nan")}


def test_the_first_result_stays(tmp_path: Path) -> None:
    """A second result of a run is answered with the first, which only that run finds; another run's is refused."""
    ending = Ending(tmp_path / "run.json")
    assert ending.read() is None
    assert not ending.is_over(5)
    first = ending.conclude(5, "alike", tmp_path / "replica-0", ENDED)
    again = ending.conclude(5, "alike", tmp_path / "replica-1", ENDED | {"checksum": "f" * 16})
    assert again == first == ending.read(5) == ending.read()
    assert (first["checksum"], first["folder"]) == (ENDED["checksum"], str(tmp_path / "replica-0"))
    assert first["summary"] == ENDED | {"validation_loss": None}
    assert ending.is_over(5)
    assert ending.is_over(0)
    assert ending.read(6) is None
    assert not ending.is_over(6)
    with pytest.raises(RunError, match="holds the end of another run"):
        ending.conclude(6, "alike", tmp_path / "replica-0", ENDED)
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


@pytest.mark.slow
def test_weights_are_written_once(config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They come before the record, where a late replica looks for them, and the summary is last.

    A failure at each of these writes leaves a run that the repeated command ends with the same bytes.
    """
    config = dataclasses.replace(config, steps=8)
    names = [WEIGHTS, "run.json", SUMMARY]
    replace, link = Path.replace, os.link
    written: list[str] = []
    failing: set[str] = set()

    def note(path: Path) -> None:
        if path.name in failing:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        if path.name in names:
            written.append(path.name)

    monkeypatch.setattr(Path, "replace", lambda path, target: (note(target), replace(path, target)))
    monkeypatch.setattr(os, "link", lambda path, target: (note(target), link(path, target)))
    results = {}
    for fails_at in ("", *names):
        folder = tmp_path / (fails_at or "whole") / "replica-0"
        ending = Ending(folder.parent / "run.json")
        if fails_at:
            failing.add(fails_at)
            with pytest.raises(OSError, match="Input/output error"):
                run(config, folder, ending=ending)
            assert not (folder / SUMMARY).exists()
            failing.clear()
        written.clear()
        run(config, folder, ending=ending)
        results[folder.parent.name] = outcome(folder)
        assert written in (names, [WEIGHTS, SUMMARY])
        record = ending.read()
        assert record is not None
        assert record["checksum"] == results["whole"]["summary"]["checksum"]
    assert all(result == results["whole"] for result in results.values())


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
    ending.conclude(5, "alike", tmp_path, ENDED)
    ending.path.write_text(damage(ending.path.read_text()))
    assert not ending.is_over(5)
    with pytest.raises(RunError, match=r"--run-record .*run\.json: is not the record of a run's end"):
        ending.read()
