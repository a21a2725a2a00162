"""What processes must have in common before they train together."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import twophase
from twophase.diloco import agreement
from twophase.diloco.agreement import Attendance, Disagreement, attend, same_start, versions
from twophase.diloco.comm import SingleProcess


class Two(SingleProcess):
    """This process, and another one that says something else."""

    def __init__(self, theirs: dict[str, Any]) -> None:
        self.theirs = theirs

    def exchange(self, numbers: Sequence[float]) -> list[list[float]]:
        """The other has done an inner step more."""
        return [list(numbers), [*numbers[:6], numbers[6] + 1, *numbers[7:]] if len(numbers) > 4 else list(numbers)]

    def gather(self, value: Any) -> list[Any]:
        """Both say what they were started with."""
        here, replicas = value
        return [[here, replicas], [here | self.theirs, replicas]]


def test_places_in_a_run_are_compared():
    """Replicas that hold the same but synchronise at unlike places are stopped; before a run begins there is none."""

    def call(*, running: bool) -> Attendance:
        place = (1, 2, 16)
        return attend(Two({}), [], {}, own=1, weight=1, running=running, ready=True, position=place)

    with pytest.raises(
        Disagreement, match=r"between process 0 \(2 from number 1, after inner step 16\) and process 1 \(2"
    ):
        call(running=True)
    assert call(running=False).present == 2


def test_an_edit_is_another_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Equal sources have equal versions wherever they lie; one changed byte, or a renamed file, is told by name."""
    copy = tmp_path / "twophase"
    shutil.copytree(Path(twophase.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    ours = versions()
    monkeypatch.setattr(agreement, "__file__", str(copy / "diloco" / "agreement.py"))
    assert versions.__wrapped__() == ours
    with (copy / "rule.py").open("a") as file:
        file.write("#")
    edited = versions.__wrapped__()
    with pytest.raises(
        ValueError, match=r"versions of twophase differ between process 0 \(0\..*, source .*\) and process"
    ):
        same_start(Two(edited), {}, 1)
    assert same_start(Two(ours), {}, 1) == [1, 1]
    shutil.copy(Path(__file__).parents[2] / "src/twophase/rule.py", copy / "rule.py")
    (copy / "rule.py").rename(copy / "rules.py")
    assert versions.__wrapped__() not in (ours, edited)
