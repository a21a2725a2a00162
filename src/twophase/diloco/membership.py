"""Membership: the replicas that take part in a sync, always the same (`Fixed`) or found anew each time (`Elastic`).

Both return values. The state of a replica that comes late is replaced by a peer's inside `Communicator.begin`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from twophase.diloco import communicator as protocols
from twophase.diloco.agreement import Attendance, attend, same_start
from twophase.diloco.build import describe
from twophase.diloco.communicator import Communicator, Interrupted
from twophase.diloco.replicas import Replicas


@dataclass(slots=True)
class Position:
    """The engine's place in a run: what a step or a sync changes, and what all processes have alike.

    Args:
        launching: numbers of the fragments of the newest sync. A late joiner receives them with the state, and goes
            straight into that sync.
        at_once: whether that sync ends where it begins: without a delay, at a run's end, or when it is repeated.
        round: rounds that all fragments have ended.
        inner_step: inner steps since the round began.
        syncs: syncs that have succeeded, over all fragments.
    """

    launching: list[int]
    at_once: bool
    round: int = 0
    inner_step: int = 0
    syncs: int = 0


@dataclass(frozen=True, slots=True)
class Members:
    """The replicas that take part in a sync.

    Args:
        weight: replicas of this process that count in the mean.
        replicas: replicas of all processes that count in it.
        newcomers: replicas that are there without weight.
        attempts: how often the sync has been tried, this time included.
        seconds: time spent on finding them, by phase.
    """

    weight: int
    replicas: int
    newcomers: int = 0
    attempts: int = 1
    seconds: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Arrival:
    """The outcome of one attempt to join.

    Args:
        members: members of the sync of a run under way, which this process has come into; else None.
        enough: whether a run could begin, once every replica has restored its checkpoint.
        begun: whether a run has begun.
    """

    members: Members | None = None
    enough: bool = False
    begun: bool = False


class Fixed:
    """The same processes from the first round to the last."""

    replaces_state = False
    """Whether a sync may begin with a peer's state."""
    absent = False
    """Whether this process has still to join the others."""

    def __init__(self, communicator: Communicator, replicas: Replicas, constants: Mapping[str, Any]) -> None:
        counts = same_start(communicator, describe(replicas.fragments, constants), len(replicas))
        self.replica_count: int | None = sum(counts)
        """Replicas of the whole run; None where that changes."""
        self.borrowed: set[int] = set()
        """Fragments in which this process holds a peer's progress, each until a sync of it has succeeded."""
        self._members = Members(len(replicas), sum(counts))

    def attend(self, position: Position, attempts: int) -> Members:
        """Return the members of the next sync."""
        del position, attempts
        return self._members


class Elastic:
    """Processes that come and go: every sync begins with a roll call of those that are there."""

    replaces_state = True

    def __init__(self, communicator: Communicator, replicas: Replicas, constants: Mapping[str, Any]) -> None:
        self.replica_count: int | None = None
        self.borrowed: set[int] = set()
        self.absent = True
        self._communicator = cast("protocols.Elastic", communicator)
        self._replicas, self._constants = replicas, constants

    def attend(self, position: Position, attempts: int) -> Members:
        """Begin a sync with the processes that are there; a failed roll call is another attempt.

        Args:
            position: this process's; replaced by a peer's where this process was left behind.
            attempts: number of this attempt.
        """
        start = time.perf_counter()
        while True:
            self._begin()
            weight = 0 if self.borrowed.intersection(position.launching) else len(self._replicas)
            try:
                attendance = self._call_roll(position, weight, running=True, ready=True)
            except Interrupted:
                self._communicator.commit()  # ends the failed attempt, so that the next `begin` starts another
                attempts += 1
            else:
                return self._members(weight, attendance, attempts, {"quorum": time.perf_counter() - start})

    def arrive(self, position: Position, *, ready: bool) -> Arrival:
        """Try once to join the others.

        Args:
            position: this process's; replaced by a peer's where a run is under way or a peer is further.
            ready: whether this process has restored its checkpoint.
        """
        communicator = self._communicator
        communicator.enter(1 + position.syncs if ready else 0)
        self._begin()
        try:
            attendance = self._call_roll(position, 0, running=False, ready=ready)
            if attendance.running:
                self.absent = False
                return Arrival(self._members(0, attendance, 1, {}))
            # Each rank judges by its own minimum; no collective follows before the vote, so none waits for another.
            enough = communicator.enough(attendance.present)
            # Only together: a vote while one replica still restores would fail by its timeout.
            return Arrival(enough=enough, begun=enough and attendance.ready and communicator.commit())
        except Interrupted:
            communicator.commit()  # ends the failed attempt, so that the next `begin` starts another
            return Arrival()

    def begin_run(self, position: Position, *, at_anchor: bool) -> None:
        """Take part with full weight from now on, unless this replica was set to a peer's progress inside a round."""
        if at_anchor or (position.syncs == 0 and position.inner_step == 0):
            self.borrowed.clear()
        self._communicator.enter(1 + position.syncs, running=True)
        self.absent = False

    def _begin(self) -> None:
        """Begin a sync; adopt a state healed from a peer, and drop local error-feedback residuals then."""
        if self._communicator.begin():
            self.borrowed = {fragment.number for fragment in self._replicas.fragments}
            for fragment in self._replicas.fragments:
                fragment.channel.clear()

    def _members(self, weight: int, attendance: Attendance, attempts: int, seconds: Mapping[str, float]) -> Members:
        if attendance.replicas:
            replicas = attendance.replicas
        else:  # only newcomers are there: they count, or the progress of the replicas that have gone would be lost
            weight, replicas = len(self._replicas), attendance.present
        return Members(weight, replicas, attendance.present - replicas, attempts, seconds)

    def _call_roll(self, position: Position, weight: int, *, running: bool, ready: bool) -> Attendance:
        launching = position.launching
        return attend(
            self._communicator,
            self._replicas.fragments,
            describe(self._replicas.fragments, self._constants),
            replicas=len(self._replicas),
            weight=weight,
            running=running,
            ready=ready,
            position=(launching[0] if launching else 0, len(launching), position.inner_step),
        )


def membership(communicator: Communicator, replicas: Replicas, constants: Mapping[str, Any]) -> Fixed | Elastic:
    """Return the membership that a communicator has.

    Args:
        communicator: the processes.
        replicas: the replicas of this process.
        constants: values that all processes must have been started with; see `build.constants`.
    """
    return (Elastic if communicator.elastic else Fixed)(communicator, replicas, constants)
