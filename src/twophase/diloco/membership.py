"""Membership: the replicas that take part in a sync, always the same or, in an elastic run, listed each time.

It returns values, and changes its own state alone. A late joiner's engine receives a peer's state inside
`Communicator.begin`.

A sync needs most of the replicas of the last successful one, so two halves of a run never both continue. Replicas are
counted by their numbers: a process that died and came back is the same replica.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from twophase.diloco.agreement import REMEDY, Disagreement, all_halves, first_difference, halves, same_start
from twophase.diloco.communicator import Interrupted
from twophase.diloco.fragment import Fragment, short_hash
from twophase.diloco.setting import Schedule, Setting


@dataclass(slots=True)
class Position:
    """Locate an engine in its run, by the numbers that a step or a sync changes.

    Args:
        syncing: numbers of the fragments of the newest sync. A late joiner receives them with the state, and goes
            straight into that sync.
        blocking: True if that sync ends where it begins: without a delay, at a run's end, or when it is repeated.
        round: rounds that all fragments have ended.
        inner_step: inner steps since the round began.
        taken: inner steps since the run began.
        syncs: successful syncs, over all fragments.
    """

    syncing: list[int]
    blocking: bool
    round: int = 0
    inner_step: int = 0
    taken: int = 0
    syncs: int = 0


@dataclass(frozen=True, slots=True)
class Members:
    """Count the replicas that take part in a sync.

    Args:
        weight: replicas of this process that count in the mean.
        replicas: replicas of all processes that count in it.
        newcomers: late joiners, with weight 0.
        attempts: number of attempts at the sync, this one included.
        seconds: time of the roll call, by phase.
        present: numbers of all replicas, in an elastic run.
        returned: number of them that took part in the last successful sync.
        needed: number of these that a sync needs: most of them, or 0 where all members allow so few replicas.
        minority: True if fewer than most of them returned.
        run: identity of the run, by process 0.
    """

    weight: int
    replicas: int
    newcomers: int = 0
    attempts: int = 1
    seconds: Mapping[str, float] = field(default_factory=dict)
    present: tuple[int, ...] = ()
    returned: int = 0
    needed: int = 0
    minority: bool = False
    run: int = 0


@dataclass(frozen=True, slots=True)
class Arrival:
    """Report an attempt to join.

    Args:
        members: members of the sync that this process joined in a run under way; else None.
        enough: True if a run could begin, once every replica has restored its checkpoint.
        begun: True if a run has begun.
    """

    members: Members | None = None
    enough: bool = False
    begun: bool = False


class Membership:
    """Track the processes of a run. Unless it is elastic, all begin with the anchor of process 0.

    Args:
        setting: values that all syncs share.
        delay: inner steps of a reduction.

    Attributes:
        replica_count: replicas of the whole run; of this process in an elastic one.
        joined: True if this process takes part in syncs: in an elastic run from `DiLoCo.join` on.
        run: identity of an elastic run: the milliseconds since 1970 at which it first began.
        present: numbers of the replicas of the last successful sync, in an elastic run.
        unweighted: numbers of the fragments that hold a donor's progress here; weight 0 until their next successful
            sync.

    Raises:
        ValueError: overlapping syncs in an elastic run; in another run, processes that were not started alike.
    """

    def __init__(self, setting: Setting, delay: int) -> None:
        self._setting, self._communicator = setting, setting.communicator
        self._replicas = self.replica_count = len(setting.modules)
        self.joined = not self._communicator.elastic
        self.run, self.present, self.unweighted = 0, list[int](), set[int]()
        self._members: Members | None = None
        if self.joined:
            self.replica_count = sum(same_start(self._communicator, setting.describe(), self._replicas))
            self._members = Members(self._replicas, self.replica_count)
            self._communicator.broadcast(setting.anchor)
        elif delay >= setting.gap:
            raise ValueError(
                f"DiLoCo: delay is {delay} and the fragments' syncs lie {setting.gap} inner steps apart. In an elastic "
                "run one must end before the next begins: take a shorter delay or fewer fragments"
            )

    def checked(self, schedule: Schedule) -> Schedule:
        """Check and return a schedule of other inner steps: syncs of fragments that share a buffer must not overlap."""
        gap = schedule.gap(len(self._setting.fragments))
        if gap <= schedule.delay < self._setting.gap:  # else two reductions would write into the same buffer
            raise ValueError(
                f"DiLoCo: at inner_steps = {schedule.inner_steps} the fragments' syncs lie {gap} inner steps apart, "
                f"and delay is {schedule.delay}. Build the engine with these inner_steps, or take more of them"
            )
        return schedule

    def check_joined(self) -> None:
        """Refuse a step of an elastic run before `DiLoCo.join`."""
        if not self.joined:
            raise ValueError("DiLoCo: call join() once before the first step(); it waits for the other processes")

    def state_dict(self) -> dict[str, Any]:
        """Return the membership's part of the engine's state."""
        return {"borrowed": sorted(self.unweighted), "run": self.run, "present": list(self.present)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`, which states of earlier versions lack."""
        self.unweighted = set(state.get("borrowed", ()))
        self.run, self.present = state.get("run", 0), list(state.get("present", ()))

    def attend(self, position: Position, attempts: int) -> Members:
        """Begin a sync with the processes that are present; a failed roll call counts as an attempt.

        Args:
            position: position of this process; the communicator loads a peer's where this process was left behind.
            attempts: number of this attempt.
        """
        if self._members is not None:
            return self._members
        start = time.perf_counter()
        while True:
            self._begin()
            weight = 0 if self.unweighted.intersection(position.syncing) else self._replicas
            try:
                members, _, _ = self._call_roll(position, weight, running=True, ready=True)
            except Interrupted:
                if not position.blocking:  # others may have completed it, and train on: the sync fails when it is due
                    return Members(weight, self._replicas, attempts=attempts)
                self._communicator.commit()  # ends the failed attempt, so that the next `begin` starts another
                attempts += 1
            else:
                if self._go_on(members):
                    return replace(members, attempts=attempts, seconds={"quorum": time.perf_counter() - start})

    def arrive(self, position: Position, *, ready: bool) -> Arrival:
        """Try once to join the other replicas.

        Args:
            position: position of this process; the communicator loads a peer's where a run is under way or a peer is
                further.
            ready: True if this process has restored its checkpoint.
        """
        communicator = self._communicator
        communicator.enter(1 + position.syncs if ready else 0)
        self._begin()
        try:
            members, running, all_ready = self._call_roll(position, 0, running=False, ready=ready)
            if running:
                self.joined = True
                # From now on this process holds its peers' state, and waits with them for more replicas.
                return Arrival(members if self._go_on(members) else self.attend(position, 1))
            # Each rank decides by its own minimum; no collective follows before the vote, so no rank waits.
            enough = communicator.enough(members.replicas + members.newcomers)
            # Only together: a vote while one replica still restores would fail by its timeout.
            begun = enough and all_ready and communicator.commit()
            if begun:
                self.run, self.present = members.run, list(members.present)
            return Arrival(enough=enough, begun=begun)
        except Interrupted:
            communicator.commit()  # ends the failed attempt, so that the next `begin` starts another
            return Arrival()

    def begin_run(self, position: Position, *, at_anchor: bool) -> None:
        """Take part with full weight from now on, unless this replica holds a donor's progress inside a round."""
        if at_anchor or (position.syncs == 0 and position.inner_step == 0):
            self.unweighted.clear()
        self._communicator.enter(1 + position.syncs, run=self.run)
        self.joined = True

    def complete(self, members: Members, fragments: Sequence[Fragment]) -> None:
        """Count a sync as successful: its fragments have full weight in the next one."""
        self.present = list(members.present)
        self.unweighted.difference_update([fragment.number for fragment in fragments])

    def _go_on(self, members: Members) -> bool:
        """Return whether a sync may continue with these members, the same on all of them; wait a moment if not."""
        return self._communicator.enough(members.returned, members.needed)

    def _begin(self) -> None:
        """Begin a sync; after a heal, give all fragments weight 0 and drop local error-feedback residuals."""
        if self._communicator.begin():
            self.unweighted = {fragment.number for fragment in self._setting.fragments}
            for fragment in self._setting.fragments:
                fragment.channel.clear()

    def _call_roll(self, position: Position, weight: int, *, running: bool, ready: bool) -> tuple[Members, bool, bool]:
        """Compare positions; return the members, whether any is in the middle of a run, and whether all are ready.

        A process is `running` once it has joined, and `ready` once it has restored its checkpoint.
        """
        communicator, fragments = self._communicator, self._setting.fragments
        description = self._setting.describe()
        # Exchange digests of fixed length first: descriptions of different length would fail without a reason. A late
        # joiner has compared its description before it loaded the state.
        kinds = communicator.exchange([running, *halves(short_hash(json.dumps(description, sort_keys=True)))])
        if not any(row[0] for row in kinds) and any(row != kinds[0] for row in kinds):
            same_start(communicator, description, self._replicas)
        progress = [(position.syncing or [0])[0], len(position.syncing), position.inner_step]
        digests = [fragment.digest() for fragment in fragments]
        run = self.run or int(1000 * time.time())
        facts = [running, self._replicas, weight, ready, communicator.replica, communicator.allowance, run]
        everyone = communicator.exchange([*facts, *progress, *all_halves(digests)])
        fault = first_difference([row[10:] for row in everyone], fragments, digests)
        under_way = any(row[0] for row in everyone)
        if under_way and fault is None:
            fault = _unlike_positions([row[7:10] for row in everyone])
        if fault is not None:
            remedy = REMEDY if under_way else "start all replicas from the same seed, checkpoint and options"
            raise Disagreement(f"DiLoCo: before a sync {fault}. {remedy}")
        present, counted = (int(sum(row[column] for row in everyone)) for column in (1, 2))
        if not counted:  # only late joiners: they count, or the progress of the replicas that died would be lost
            weight, counted = self._replicas, present
        numbers, last = sorted({int(row[4]) for row in everyone}), set(self.present)
        returned, majority = len(last.intersection(numbers)), len(last) // 2 + 1 if last else 0
        allowed = len(numbers) >= max(row[5] for row in everyone)  # by all, or some would wait where others continue
        members = Members(
            weight,
            counted,
            present - counted,
            present=tuple(numbers),
            returned=returned,
            needed=0 if allowed else majority,
            minority=returned < majority,
            run=int(everyone[0][6]),
        )
        return members, under_way, all(row[3] for row in everyone)


def _unlike_positions(everyone: list[list[float]]) -> str | None:
    """Name the process that synchronises other fragments than process 0, or after another inner step."""
    states = [f"{int(count)} from number {int(first)}, after inner step {int(step)}" for first, count, step in everyone]
    for other, state in enumerate(states):
        if state != states[0]:
            return f"the fragments of the sync differ between process 0 ({states[0]}) and process {other} ({state})"
    return None
