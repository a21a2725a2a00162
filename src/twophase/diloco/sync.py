"""One sync from its launch to its report: pseudo-gradients, reduction, agreement, outer steps, restored replicas.

launch -> (advance) -> receive -> apply -> report -> prove
                          |
                          +-> withdraw: no agreement came about; the next sync takes the progress
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch import Tensor

from twophase.diloco.agreement import Shared, agree, averaged, prove, squares
from twophase.diloco.candidates import Probe, count_candidates, probe_candidates
from twophase.diloco.communicator import Communicator, Interrupted
from twophase.diloco.flat import checksum
from twophase.diloco.fragment import Fragment
from twophase.diloco.membership import Members
from twophase.diloco.replicas import Replicas
from twophase.diloco.report import FragmentRound, RoundReport, joined
from twophase.diloco.sweep import goes_in_parts, goes_on_device, round_sweep, transfer_in_parts, write_on_device
from twophase.diloco.transfer import PartTransfer, Transfer
from twophase.optim.groups import GroupRound
from twophase.optim.outer import OuterSGD
from twophase.policies.base import AGREEMENT


@dataclass(frozen=True, slots=True)
class Setting:
    """What is the same in every sync of an engine.

    Args:
        replicas: the replicas of this process.
        communicator: the processes.
        mixing: share of a replica's own parameters that stays when the anchor comes back.
        probe: the loss of a candidate anchor; None where no policy needs it.
        alone: whether all replicas live in this process for good, so that there is nothing to compare.
        may_part: whether a sum may be used part by part, each before the next has come.
    """

    replicas: Replicas
    communicator: Communicator
    mixing: float
    probe: Probe | None
    alone: bool
    may_part: bool

    @classmethod
    def of(cls, replicas: Replicas, communicator: Communicator, mixing: float, probe: Probe | None) -> Setting:
        """Derive `alone` and `may_part` from the communicator."""
        alone = communicator.size == 1 and not communicator.elastic
        # Elastic: the vote on the whole sum comes before any change of the anchor. Sharded: the norms of all shards are
        # added up before the outer step.
        may_part = not (alone or communicator.elastic or communicator.sharded)
        return cls(replicas, communicator, mixing, probe, alone, may_part)


@dataclass(frozen=True, slots=True)
class OuterStep:
    """The outcome of a fragment's outer step.

    Args:
        fragment: the fragment.
        norm: Euclidean norm of g.
        groups: each param group's round.
        digests: those taken during the step.
        restored: whether the replicas have the new anchor.
    """

    fragment: Fragment
    norm: float
    groups: tuple[GroupRound, ...]
    digests: Mapping[str, str]
    restored: bool


@dataclass(slots=True)
class Sync:
    """A sync under way: fragments, and the reduction of their pseudo-gradients.

    Args:
        setting: what all syncs share.
        fragments: the fragments.
        members: the replicas that take part.
        steps: inner steps of each fragment's round.
        transfers: the reduction of each fragment.
        age: inner steps since the launch.
        bytes_before: bytes sent for it by attempts that failed, or before it was loaded from a state.
        seconds: wall time by phase.
        in_parts: whether the sums are made during the outer step, part by part.
        squares: sum of the squared norms of this process's replicas' pseudo-gradients, for policies that need it.
    """

    setting: Setting
    fragments: list[Fragment]
    members: Members
    steps: list[int]
    transfers: list[Transfer] = field(default_factory=list)
    age: int = 0
    bytes_before: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    in_parts: bool = False
    squares: list[Tensor | None] = field(default_factory=list)

    @classmethod
    def launch(cls, setting: Setting, fragments: list[Fragment], members: Members, *, at_once: bool) -> Sync:
        """Write the fragments' pseudo-gradients and begin to sum them.

        Args:
            setting: what all syncs share.
            fragments: the fragments.
            members: the replicas that take part.
            at_once: whether the sum is received before the next inner step.
        """
        sync = cls(setting, fragments, members, [fragment.steps for fragment in fragments])
        sync.seconds.update(members.seconds)
        # A delayed sum has arrived whole when it is used.
        sync.in_parts = at_once and setting.may_part and all(map(goes_in_parts, fragments))
        with phase("pseudo_gradient", sync.seconds):
            setting.replicas.reshard()
            for fragment in fragments:
                fragment.divisor, fragment.on_device = members.replicas, goes_on_device(fragment)
            sync.squares = [None if sync.in_parts else sync._write(fragment) for fragment in fragments]
        communicator = setting.communicator
        with phase("reduce", sync.seconds):
            for fragment in fragments:
                if sync.in_parts:
                    transfer: Transfer = transfer_in_parts(fragment, communicator)
                else:
                    transfer = fragment.channel.launch(communicator, fragment.gradient, quantized=setting.alone)
                sync.transfers.append(transfer)
        for fragment in fragments:
            fragment.steps = 0
        return sync

    def _write(self, fragment: Fragment) -> Tensor | None:
        """Write a pseudo-gradient; return the sum of its replicas' squared norms for a policy that needs it."""
        alone = self.setting.alone
        if not self.members.weight:
            fragment.gradient.zero_()
            return None
        if fragment.on_device:
            write_on_device(fragment, self.members.replicas if alone else 1)
            fragment.divisor = 1 if alone else self.members.replicas
            return None
        measure = isinstance(fragment.outer, OuterSGD) and AGREEMENT in fragment.outer.needs
        return fragment.write_pseudo_gradient(alone=alone, measure=measure)

    @property
    def bytes_sent(self) -> int:
        """Bytes that this process has sent for the sync so far."""
        return self.bytes_before + sum(transfer.bytes_sent for transfer in self.transfers)

    def advance(self) -> None:
        """Launch the second stage of a lossy reduction, once the first has had half the delay.

        At the same step on all processes: collectives must begin in one order everywhere, or they would deadlock.
        """
        with suppress(Interrupted):  # `receive` meets it again, and the sync is repeated
            for transfer in self.transfers:
                transfer.advance()

    def settle(self) -> None:
        """Wait for the sums; the outer steps come when they are due."""
        with suppress(Interrupted):  # as in `advance`
            for transfer in self.transfers:
                transfer.wait()

    def mean_squares(self) -> list[float | None]:
        """Return the mean squared norms of all replicas' pseudo-gradients, where they are measured."""
        count = len(self.setting.replicas)
        local = [[] if total is None else [float(total) / count] for total in self.squares]
        means = averaged(self.setting.communicator, self.members.weight, local)
        return [mean[0] if mean else None for mean in means]

    def receive(self, signals: Mapping[str, float]) -> Shared | None:
        """Wait for the mean pseudo-gradients and what the outer steps decide by.

        Returns:
            That, the same on every process; None when a process has gone meanwhile, and the sync has been withdrawn.
        """
        shared = None
        try:
            with suppress(Interrupted):
                shared = self._agree(signals)
            if not self.setting.communicator.commit():
                shared = None
        except BaseException:  # an error of the probe, or Ctrl-C
            self.withdraw()
            raise
        if shared is None:
            self.withdraw()
            return None
        for fragment in self.fragments:
            fragment.channel.commit()
        return shared

    def _agree(self, signals: Mapping[str, float]) -> Shared:
        setting, fragments, weight = self.setting, self.fragments, self.members.weight
        with phase("reduce", self.seconds):
            if not self.in_parts:
                for transfer in self.transfers:
                    transfer.wait()
            for fragment in fragments:
                if not self.in_parts and not fragment.on_device:
                    fragment.divide()
                fragment.hand_over()
        with phase("outer", self.seconds):
            measured = squares(setting.communicator, self.squares, len(setting.replicas))
            shared = agree(setting.communicator, fragments, weight, {**signals, **measured})
        if any(map(count_candidates, fragments)):
            with phase("probe", self.seconds):
                losses = probe_candidates(setting.probe, setting.replicas, fragments, setting.communicator, weight)
                shared = replace(shared, probes=losses)
        return shared

    def add(self, failed: Sync) -> None:
        """Count the time and the bytes of a failed attempt as this one's, too."""
        for name, seconds in failed.seconds.items():
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        self.bytes_before += failed.bytes_sent

    def withdraw(self) -> None:
        """Undo the sync: the replicas hold their progress, and the next one takes it."""
        for fragment, steps in zip(self.fragments, self.steps, strict=True):
            fragment.channel.withdraw()
            fragment.steps += steps

    def apply(self, shared: Shared) -> list[OuterStep]:
        """Take the outer steps, and set the replicas to the new anchor."""
        for fragment in self.fragments:
            fragment.torn = True
        try:
            steps = [self._outer_step(shared, index) for index in range(len(self.fragments))]
        except ValueError:  # refused: nothing of a single fragment has changed
            for fragment in self.fragments:
                fragment.torn = self.in_parts or len(self.fragments) > 1
            raise
        with phase("restore", self.seconds):
            self.setting.replicas.restore([step.fragment for step in steps if not step.restored], self.setting.mixing)
        for fragment in self.fragments:
            fragment.torn = False
            fragment.round += 1
            if self.setting.mixing == 0:
                fragment.steps = 0  # what was trained during the delay is given up
        return steps

    def _outer_step(self, shared: Shared, index: int) -> OuterStep:
        """Take a fragment's outer step; in one sweep with all that follows it, where it can be swept."""
        fragment, mixing = self.fragments[index], self.setting.mixing
        measured = None if shared.dots is None else shared.dots[index]
        transfer = cast("PartTransfer", self.transfers[index]) if self.in_parts else None
        with phase("outer", self.seconds):
            if not isinstance(fragment.outer, OuterSGD):
                # Before the step: some optimizers overwrite g.
                norm = measured[0][0] ** 0.5 if measured else float(torch.linalg.vector_norm(fragment.gradient))
                fragment.outer.step()
                return OuterStep(fragment, norm, (), {}, restored=False)
            self.setting.replicas.reshard()
            swept = round_sweep(fragment, transfer, restore=mixing == 0, prove=not self.setting.alone)
            fragment.outer.step(
                signals=shared.shown(index),
                measure=True,
                measured=measured,
                probes=(shared.probes[index] or None) if shared.probes else None,
                sweep=swept and swept.sweep,
            )
        for name, seconds in ({} if transfer is None else transfer.seconds).items():
            self.seconds[name] += seconds
            self.seconds["outer"] -= seconds
        groups = tuple(fragment.outer.last_round)
        norm = sum(group.pseudo_gradient_norm**2 for group in groups) ** 0.5
        digests = {} if swept is None else swept.digests()
        return OuterStep(fragment, norm, groups, digests, restored=swept is not None and mixing == 0)

    def report(
        self, shared: Shared, steps: Sequence[OuterStep], round_: int, *, complete: bool, full: int
    ) -> RoundReport:
        """Report the round, and compare anchor, buffers and counters between the processes.

        Args:
            shared: what `receive` has returned.
            steps: what `apply` has returned.
            round_: number of the round.
            complete: whether all fragments have ended it.
            full: inner steps of a whole round.
        """
        with phase("checksum", self.seconds):
            if self.setting.alone:
                digests = []
                anchors = [step.digests.get("anchor") or checksum(step.fragment.flat) for step in steps]
            else:
                digests = [step.fragment.digest(step.digests) for step in steps]
                anchors = [digest["anchor"] for digest in digests]
        fragments = tuple(
            FragmentRound(
                step.fragment.name, step.fragment.round, count, any(group.restarted for group in step.groups), digits
            )
            for step, count, digits in zip(steps, self.steps, anchors, strict=True)
        )
        report = RoundReport(
            round=round_,
            inner_steps=max(self.steps),
            partial=any(count < full for count in self.steps),
            complete=complete,
            replicas=self.members.replicas,
            newcomers=self.members.newcomers,
            attempts=self.members.attempts,
            restarted=any(fragment.restarted for fragment in fragments),
            fragments=fragments,
            groups=tuple(group for step in steps for group in step.groups),
            pseudo_gradient_norm=sum(s.norm**2 for s in steps) ** 0.5 if len(steps) > 1 else steps[0].norm,
            signals=shared.reported,
            bytes_sent=self.bytes_sent,
            seconds=self.seconds,
            checksum=joined(anchors),
        )
        prove(self.setting.communicator, round_, self.fragments, digests)
        return report


class phase:  # noqa: N801 - a context manager; of a generator each would take longer than a small model's phase
    """Time a phase, under a profiler scope of its name; a failed phase counts, too."""

    __slots__ = ("name", "scope", "seconds", "start")

    def __init__(self, name: str, seconds: dict[str, float]) -> None:
        self.name, self.seconds = name, seconds

    def __enter__(self) -> None:
        self.scope = None
        if torch.autograd.profiler._is_profiler_enabled:  # entered without a profiler it takes time all the same
            self.scope = torch.profiler.record_function(f"twophase::{self.name}")
            self.scope.__enter__()
        self.start = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self.seconds[self.name] = self.seconds.get(self.name, 0.0) + time.perf_counter() - self.start
        if self.scope is not None:
            self.scope.__exit__(*error)
