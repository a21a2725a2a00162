"""Late replicas without torchft: what they adopt, which syncs they enter without weight, and what can be saved."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest

from meeting import Meeting
from replicas import start
from twophase.diloco.communicator import Interrupted, SingleProcess
from twophase.rule import OuterRule

RULE = OuterRule(0.5, 0.9, nesterov=True)


@pytest.mark.parametrize(
    ("mixing", "donated", "restored", "newcomers"),
    [
        (0.0, 0, None, [0, 0]),
        (0.5, 0, None, [0, 0]),  # no replica has trained yet
        (0.0, 6, None, [0, 0]),
        (0.5, 6, None, [1, 0]),  # part of what the other has trained is still in it
        (0.0, 5, None, [1, 0]),
        (0.0, 5, 4, [0, 0]),
    ],
)
def test_a_state_adopted_at_the_beginning(mixing: float, donated: int, restored: int | None, newcomers: list[int]):
    """A replica that goes on from a peer's inner steps is without weight in one sync; not from its own, or from none.

    After so many inner steps of rounds of three is the state that it is given, and then its own checkpoint.
    """

    def state(steps: int) -> dict[str, Any]:
        run = start(RULE, [0], inner_steps=3, mixing=mixing)
        run.go(range(steps))
        return run.state()

    group = Meeting(state(donated))
    run = start(RULE, [0], inner_steps=3, mixing=mixing, communicator=group)
    group.attach(run.engine, run.state, run.load)
    assert run.engine.join(restore=lambda: None if restored is None else run.load(state(restored))) is None
    assert [report.newcomers for report in run.go(range(20, 26))] == newcomers


class Waits(Exception):  # noqa: N818 - no fault of the test
    """A sync lacks replicas; holds how many of the last one's are there, and how many must be."""


class Crowd(SingleProcess):
    """This process and others that hold the same; those of each roll call are listed."""

    elastic, replica = True, 0

    def __init__(self, allowance: float, calls: Sequence[Sequence[int]]) -> None:
        self.allowance, self.calls = allowance, list(calls)

    def enough(self, count: int, needed: int | None = None) -> bool:
        """End instead of waiting."""
        if needed is not None and count < needed:
            raise Waits(count, needed)
        return True

    def exchange(self, numbers: Sequence[float]) -> list[list[float]]:
        """The others say the same, but for their numbers."""
        if len(numbers) < 10:
            return [list(numbers)]
        return [[*numbers[:4], number, *numbers[5:]] for number in self.calls.pop(0)]


@pytest.mark.parametrize(
    ("allowance", "before", "then", "lacks"),
    [
        (float("inf"), [0, 1, 2], [0, 1], None),
        (float("inf"), [0, 1, 2], [0, 1, 2, 3, 4], None),
        (float("inf"), [0, 1, 2], [0], (1, 2)),
        (float("inf"), [0, 1], [0], (1, 2)),
        (float("inf"), [0, 1, 2, 3], [0, 1], (2, 3)),  # the other half might go on as well
        (float("inf"), [0, 1, 2], [0, 3, 4], (1, 2)),  # newcomers are no witnesses of the last sync
        (float("inf"), [0, 1, 2], [0, 0, 0], (1, 2)),  # a number counts once
        (2, [0, 1, 2, 3], [0, 1], None),
        (2, [0, 1, 2, 3], [0], (1, 3)),
        (1, [0, 1], [0], None),
    ],
)
def test_a_sync_needs_most_of_the_last_ones_replicas(
    allowance: float, before: list[int], then: list[int], lacks: tuple[int, int] | None
):
    """Or as many as are explicitly allowed, and the report says where that was used."""
    group = Crowd(allowance, [before, before, before, then])
    run = start(RULE, [0], inner_steps=1, communicator=group)
    assert run.engine.join() is None
    (first,) = run.go(range(1))
    assert (first.replicas, first.minority) == (len(before), False)
    if lacks is not None:
        with pytest.raises(Waits) as waits:
            run.go(range(1, 2))
        assert waits.value.args == lacks
    else:
        (second,) = run.go(range(1, 2))
        assert second.minority == (2 * len(set(before) & set(then)) <= len(before))


def healed(**options: Any) -> Any:
    """A run of two fragments that joins another, and at its first sync is given the state of a peer after 5 steps."""
    options |= {"inner_steps": 4, "fragments": 2}
    donor = start(RULE, [0], **options)
    donor.go(range(5))
    group = Meeting(None, donor.state())
    run = start(RULE, [0], communicator=group, **options)
    group.attach(run.engine, run.state, run.load)
    assert run.engine.join() is None
    return run


@pytest.mark.parametrize("mixing", [0.0, 0.5])
def test_a_newcomer_has_no_weight_in_the_first_sync_of_each_fragment(mixing: float):
    """A healed replica holds its donor's progress in the fragments that are in the middle of their round, too."""
    reports = healed(mixing=mixing).go(range(20, 32))
    assert [(r.fragments[0].name, r.newcomers) for r in reports[:4]] == [("0", 1), ("1", 1), ("0", 0), ("1", 0)]


class Noted(Meeting):
    """A meeting of which some votes fail, and of whose syncs the last one's state can be donated to another."""

    def __init__(self, *donated: Any, votes: Sequence[bool] = ()) -> None:
        super().__init__(*donated)
        self.votes = list(votes)
        self.state: Any = None

    def attach(self, engine: Any, save: Any, load: Any) -> None:
        """Take both."""
        super().attach(engine, save, load)
        self.save = save

    def begin(self) -> bool:
        """Note the state."""
        self.state = copy.deepcopy(self.save())
        return super().begin()

    def commit(self) -> bool:
        """Vote."""
        return self.votes.pop(0) if self.votes else True


@pytest.mark.parametrize(
    ("steps", "repeats", "then"),
    [
        (8, False, [None, None, 1]),  # it repeats its first sync, and the peer launches its second
        (6, True, [1]),  # it launches its first sync, which the peer repeats
    ],
)
def test_a_newcomer_ends_the_sync_when_its_peer_does(steps: int, repeats: bool, then: list[int | None]):
    """A repeated sync ends at once and another one after the delay, whichever of the two this replica was about."""
    groups = Noted(votes=[True, False] if repeats else []), Noted(votes=[] if repeats else [True, False])
    peer, run = (start(RULE, [0], inner_steps=4, delay=2, mixing=0.5, communicator=group) for group in groups)
    for engine, group in ((peer, groups[0]), (run, groups[1])):
        group.attach(engine.engine, engine.state, engine.load)
        assert engine.engine.join() is None
    peer.go(range(steps))
    before = 3 if repeats else 5
    run.go(range(before))
    groups[1].donated = [groups[0].state]
    reports = [run.step(step) for step in range(before, before + len(then))]
    assert [report and report.newcomers for report in reports] == then
    assert run.engine.taken == steps + len(then) - 1


def test_weightlessness_outlives_a_stop():
    """Stopped after the first fragment's sync and resumed, a healed replica is still without weight in the second's."""
    run, steps = healed(), iter(range(20, 40))
    first = next(report for report in map(run.step, steps) if report is not None)
    assert (first.fragments[0].name, first.newcomers) == ("0", 1)
    state = copy.deepcopy(run.state())
    again = start(RULE, [0], communicator=Meeting(), inner_steps=4, fragments=2)
    again.engine.join(restore=lambda: again.load(state))
    reports = again.go(steps)
    assert [(report.fragments[0].name, report.newcomers) for report in reports[:3]] == [("1", 1), ("0", 0), ("1", 0)]


class Torn(Meeting):
    """Its collectives fail until the next vote."""

    torn = False

    def exchange(self, numbers: Sequence[float]) -> list[list[float]]:
        """Fail, or as ever."""
        if self.torn:
            raise Interrupted
        return super().exchange(numbers)

    def commit(self) -> bool:
        """End the attempt."""
        torn, self.torn = self.torn, False
        return not torn


def test_a_roll_call_that_fails_here_alone():
    """With a delay the others may have heard all, and train on: the sync is tried again when it is due, with them."""
    group = Torn()
    run = start(RULE, [0], inner_steps=4, delay=2, communicator=group)
    run.engine.join()
    run.go(range(3))
    group.torn = True
    reports = [run.step(step) for step in range(3, 6)]
    assert [report and (report.attempts, report.inner_steps) for report in reports] == [None, None, (2, 6)]


def test_syncs_that_overlap_are_refused():
    """A sync that fails is repeated at once, so the next may not have begun."""
    with pytest.raises(ValueError, match="delay is 2 and the fragments' syncs lie 2 inner steps apart"):
        start(RULE, [0], inner_steps=4, delay=2, fragments=2, communicator=Meeting())


def test_what_is_under_way_cannot_be_saved():
    """Where processes come and go a sync may be undone until its end: the state is refused meanwhile."""
    run = start(RULE, [0], inner_steps=4, delay=2, mixing=0.5, communicator=Meeting())
    run.engine.join()
    run.go(range(4))
    assert run.engine.under_way
    with pytest.raises(ValueError, match=r"a reduction is under way.* until engine\.under_way is False"):
        run.engine.state_dict()
    run.go(range(4, 6))
    assert not run.engine.under_way
    assert run.engine.state_dict()["round"] == 1


def test_what_is_under_way_cannot_be_brought_along():
    """Nor is such a state of another kind of run taken over: a replica that lacks it could not be healed."""
    run = start(RULE, [0], inner_steps=4, delay=2)
    run.go(range(4))
    assert run.engine.under_way
    other = start(RULE, [0], inner_steps=4, delay=2, communicator=Meeting())
    before = other.engine.checksum()
    with pytest.raises(ValueError, match=r"has a reduction under way.* until engine\.under_way is False"):
        other.engine.load_state_dict(run.engine.state_dict())
    assert other.engine.checksum() == before
