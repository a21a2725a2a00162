"""Saved and loaded anywhere, a run goes on with the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch import Tensor

from diloco.scenarios import SCENARIOS, facts, start, unlike
from diloco.test_processes import played
from replicas import same_bits, through_file
from twophase.diloco.group import SingleProcess


@pytest.mark.parametrize("name", SCENARIOS)
def test_saved_and_loaded_at_every_step_equals_uninterrupted(name: str) -> None:
    """Through a file after each inner step, with what is under way and owed, a run has the same bits and reports."""
    whole, again = (played(name, resumed=resumed) for resumed in (False, True))
    assert again["reports"] == whole["reports"]
    assert unlike(again["tensors"], whole["tensors"]) == []


def test_a_sum_that_arrives_late_changes_no_loaded_state() -> None:
    """The result of a reduction under way may arrive after a load, and must not be written into the loaded sum."""

    class Slow(SingleProcess):
        size = 2  # type: ignore[assignment]

        def all_reduce(self, tensor: Tensor) -> Iterator[int]:
            """The sum of two ranks that hold the same."""

            def late() -> Iterator[int]:
                yield 7
                tensor.mul_(2)

            arrivals.append(late())
            return arrivals[-1]

        def gather_json(self, value: Any) -> list[Any]:
            return [value, value]

        gather_bytes = gather_json  # type: ignore[assignment]

    arrivals: list[Iterator[int]] = []
    run = start("nesterov", [0], delay=2, group=Slow())
    run.go(range(4))
    state = through_file(run.state())
    reports = run.go(range(4, 12))
    assert [report.bytes_sent for report in reports] == [7, 7]  # those sent before the save count, once
    ends = {name: tensor.clone() for name, tensor in run.tensors().items()}
    run.load(state)
    for arrival in arrivals:
        list(arrival)
    assert [facts(report) for report in run.go(range(4, 12))] == [facts(report) for report in reports]
    assert unlike(run.tensors(), ends) == []


def test_another_schedule_may_follow_a_rounds_end() -> None:
    """With nothing under way, a run goes on with other replicas, which are the anchor then; the donor sees nothing."""
    run = start("three, delay")
    run.go(range(6))
    run.finish()
    options = {"delay": 2, "stagger": False}
    other = start("three, delay", replicas=[0], inner_steps=4, seed=9, **options)
    before = run.engine.checksum()
    other.engine.load_state_dict(run.engine.state_dict())
    assert other.engine.checksum() == before
    assert all(same_bits(p.detach(), run.engine.anchor[name]) for name, p in other.models[0].named_parameters())
    assert [report.round for report in other.go(range(6))] == [run.engine.round + 1]
    assert run.engine.checksum() == before != other.engine.checksum()
    run.go([6])
    with pytest.raises(ValueError, match="inner_steps must be 4"):
        other.engine.load_state_dict(run.engine.state_dict())


def test_what_a_state_does_not_name_is_owed_no_longer() -> None:
    """Residuals of fragments that a saved dictionary lacks become zero; those of another shape are refused."""
    run = start("int8, at once")
    run.go(range(4))
    owed = run.engine.residuals()
    first, second = (owed[name].clone() for name in "01")
    assert all(residual.any() for residual in owed.values())
    run.engine.load_residuals({"1": second})
    assert [bool(residual.any()) for residual in owed.values()] == [False, True, False]
    with pytest.raises(ValueError, match="residuals"):
        run.engine.load_residuals({"0": first, "1": second[:1]})
