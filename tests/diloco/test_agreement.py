"""What processes must have in common before they train together."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import threads
import twophase
from twophase.base import source
from twophase.diloco import agreement, communicator
from twophase.diloco.agreement import (
    agree,
    same_start,
    versions,
)
from twophase.diloco.communicator import Communicator, SingleProcess


def test_shards_with_unlike_signals() -> None:
    """Their values would be averaged under one name."""

    class Shard(SingleProcess):
        def exchange_in_replica(self, numbers: Sequence[float]) -> list[list[float]]:
            return [list(numbers), [0.0] * len(numbers)]

    with pytest.raises(ValueError, match="has other names in another shard of this replica; give the same ones"):
        agreement._same_signals(Shard(), {"loss": 1.0})


def test_an_edit_is_another_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Equal sources have equal versions wherever they lie; one changed byte, or a renamed file, is told by name."""
    copy = tmp_path / "twophase"
    shutil.copytree(Path(twophase.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    original = versions()

    def of_copy() -> dict[str, str]:
        source._digest.cache_clear()
        with monkeypatch.context() as patch:
            patch.setattr(agreement, "__file__", str(copy / "diloco" / "agreement.py"))
            return versions()

    assert of_copy() == original
    with (copy / "rule.py").open("a") as file:
        file.write("#")
    edited = of_copy()
    refusals = together(lambda member: same_start(member, original, 1), lambda member: same_start(member, edited, 1))
    for number, refusal in enumerate(refusals):
        words = rf"DiLoCo: versions of twophase differ between process {number} \(0\..*, source .*\) and process"
        assert re.match(words, str(refusal))
    shutil.copy(Path(__file__).parents[2] / "src/twophase/rule.py", copy / "rule.py")
    (copy / "rule.py").rename(copy / "rules.py")
    assert of_copy() not in (original, edited)


def test_a_long_description_is_compared_by_its_digest(monkeypatch: pytest.MonkeyPatch):
    """Names of very many parameters are longer than any message may be, and where they are alike none is sent."""
    monkeypatch.setattr(communicator, "_LONGEST", 100)
    names = {"parameters": [f"experts.{number}.weight" for number in range(100)]}
    assert together(*[lambda member: same_start(member, names, 1 + member.rank)] * 2) == [[1, 2], [1, 2]]


def test_what_json_cannot_hold_is_refused():
    with pytest.raises(ValueError, match=r"DiLoCo: alike: .*Tensor.*; give numbers, texts, lists and dicts"):
        same_start(SingleProcess(), {"seed": torch.ones(2)}, 1)


def together(*calls: Callable[[Communicator], Any]) -> list[Any]:
    """What each call brings home, made at the same time."""
    return threads.together(len(calls), lambda member: calls[member.rank](member))


def test_processes_weigh_by_their_replicas():
    """A signal is a mean over replicas, and all learn it."""
    agreed = together(
        lambda group: agree(group, [], 1, {"loss": 1.0}),
        lambda group: agree(group, [], 3, {"loss": 5.0}),
    )
    assert [shared.signals for shared in agreed] == 2 * [{"loss": 4.0}]


@given(st.floats(0, 1), st.lists(st.integers(1, 5), min_size=1, max_size=9))
@settings(max_examples=200, deadline=None)
def test_what_all_have_alike_is_not_rounded(value: float, weights: list[int]):
    """The progress of a run stands at a policy's threshold; it is the same for any number of processes."""

    class Same(SingleProcess):
        size = 2

        def exchange(self, numbers: Sequence[float]) -> list[list[float]]:
            if len(numbers) == 2:  # weight and value
                return [[float(weight), numbers[1]] for weight in weights]
            return [list(numbers) for _ in weights]  # the names

        def exchange_in_replica(self, numbers: Sequence[float]) -> list[list[float]]:
            return [list(numbers) for _ in weights]

    assert agree(Same(), [], 1, {"progress": value}).signals == {"progress": value}
