"""A sync from its launch to its report: pseudo-gradients, reduction, agreement, outer steps, restored replicas.

launch -> (advance) -> receive -> apply -> report
                          |
                          +-> withdraw: interrupted; the next sync takes the progress
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch.optim import Optimizer

from twophase.diloco.agreement import Shared, agree, prove
from twophase.diloco.flat import checksum
from twophase.diloco.fragment import Fragment
from twophase.diloco.report import FragmentRound, RoundReport, merged
from twophase.diloco.setting import Setting
from twophase.diloco.sweep import goes_in_parts, round_sweep, step_of, transfer_in_parts
from twophase.diloco.transfer import PartTransfer, Transfer
from twophase.optim.groups import GroupRound
from twophase.optim.outer import OuterSGD

PHASES = ("pseudo_gradient", "reduce", "outer", "restore", "checksum")


@dataclass(slots=True)
class Part:
    """A fragment in a sync.

    Args:
        fragment: fragment with its buffers.
        steps: inner steps of its round.
        transfer: reduction of its pseudo-gradient; None where nothing is sent.
        norm: Euclidean norm of g, after its outer step.
        groups: round of each param group.
        digests: digests taken during the step.
        restored: True if the replicas have the new anchor.
        restarted: True if an outer optimizer other than `OuterSGD` has begun anew.
    """

    fragment: Fragment
    steps: int
    transfer: Transfer | None = None
    norm: float = 0.0
    groups: tuple[GroupRound, ...] = ()
    digests: Mapping[str, str] = field(default_factory=dict)
    restored: bool = False
    restarted: bool = False


class Sync:
    """A sync under way: fragments, and the reduction of their pseudo-gradients.

    Args:
        setting: values that all syncs share.
        replicas: number of replicas in all processes.
        parts: fragments of the sync.
        blocking: True if no inner step comes between its launch and its end.
    """

    def __init__(self, setting: Setting, replicas: int, parts: list[Part], *, blocking: bool) -> None:
        self.setting, self.replicas, self.parts = setting, replicas, parts
        self.fragments = [part.fragment for part in parts]
        """In their order."""
        self.age = 0
        """Inner steps since the launch."""
        self.bytes_before = 0
        """Bytes sent for it before it was loaded from a state."""
        self._in_parts = False
        self._blocking = blocking
        self._shared = Shared({})
        self.seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        """Wall time of each phase so far."""

    @classmethod
    def launch(cls, setting: Setting, fragments: Sequence[Fragment], replicas: int, *, blocking: bool) -> Sync:
        """Write the fragments' pseudo-gradients and begin to sum them; arguments as of the class."""
        sync = cls(setting, replicas, [Part(fragment, 0) for fragment in fragments], blocking=blocking)
        try:
            sync._send()
        except BaseException:  # Ctrl-C
            sync.withdraw()
            raise
        return sync

    def _send(self) -> None:
        communicator, alone = self.setting.communicator, self.setting.alone
        for part in self.parts:
            part.steps, part.fragment.steps = part.fragment.steps, 0
        with self._phase("pseudo_gradient"):
            self.setting.look_up(self.fragments)
            # In parts only where the outer step may begin before the whole sum is there. With a delay it has arrived by
            # then. Shards add up their norms before the step.
            whole = alone or not self._blocking or communicator.sharded
            self._in_parts = not whole and all(map(goes_in_parts, self.fragments))
            for part in self.parts:
                part.fragment.divisor = self.replicas
                if not self._in_parts:
                    part.fragment.write_pseudo_gradient(alone=alone)
        with self._phase("reduce"):
            for part in self.parts:
                fragment = part.fragment
                if self._in_parts:
                    part.transfer = transfer_in_parts(fragment, communicator)
                elif fragment.channel.lossy or not alone:
                    part.transfer = fragment.channel.launch(communicator, fragment.gradient, quantized=alone)

    @property
    def bytes_sent(self) -> int:
        """Bytes that this process has sent for the sync so far."""
        return self.bytes_before + sum([part.transfer.bytes_sent for part in self.parts if part.transfer is not None])

    def advance(self) -> None:
        """Launch the second stage of a lossy reduction, once the first has had half the delay.

        At the same step on all processes: collectives must begin in one order everywhere, or they would deadlock.
        """
        for part in self.parts:
            if part.transfer is not None:
                part.transfer.advance()

    def settle(self) -> None:
        """Wait for the sums, without the outer steps."""
        for part in self.parts:
            if part.transfer is not None:
                part.transfer.wait()

    def receive(self, signals: Mapping[str, float]) -> None:
        """Wait for the mean pseudo-gradients, and agree on the values that the outer steps depend on.

        Args:
            signals: values of this process.
        """
        setting = self.setting
        with self._phase("reduce"):
            if not self._in_parts:
                self.settle()
            for part in self.parts:
                fragment = part.fragment
                if not self._in_parts:
                    fragment.divide()
                    fragment.apply_filter()
                fragment.hand_over()
        with self._phase("outer"):
            self._shared = agree(setting.communicator, self.fragments, len(setting.modules), signals)

    def withdraw(self) -> None:
        """Undo the sync: the replicas hold their progress, and the next sync takes it."""
        if any(part.fragment.torn for part in self.parts):  # the outer step has begun, and cannot be undone
            return
        for part in self.parts:
            part.fragment.channel.withdraw()
            part.fragment.steps, part.steps = part.fragment.steps + part.steps, 0

    def apply(self) -> None:
        """Take the outer steps, and set the replicas to the new anchor."""
        setting, fragments = self.setting, self.fragments
        for fragment in fragments:
            fragment.torn = True
            if isinstance(fragment.outer, OuterSGD):
                fragment.outer.begun = False
        try:
            with self._phase("outer"):
                if setting.are_sharded or not self._blocking:
                    setting.look_up(fragments)
                for index, part in enumerate(self.parts):
                    self._outer_step(part, index)
        except ValueError:
            # Refused before its first param group: nothing has changed. An optimizer of torch does not tell.
            if not self._in_parts and len(fragments) == 1 and not getattr(fragments[0].outer, "begun", True):
                fragments[0].torn = False
            raise
        with self._phase("restore"):
            for part in self.parts:
                fragment = part.fragment
                if not part.restored:
                    fragment.restore(setting.mixing)
                fragment.round += 1
                if setting.mixing == 0:
                    fragment.steps = 0  # the progress during the delay is discarded
            for fragment in fragments:
                fragment.torn = False

    def _outer_step(self, part: Part, index: int) -> None:
        """Take a fragment's outer step; where possible in one sweep with restore and digests."""
        fragment, shared, restores = part.fragment, self._shared, self.setting.mixing == 0
        measured = None if shared.dots is None else shared.dots[index]
        if not isinstance(fragment.outer, OuterSGD):
            # Before the step: some optimizers overwrite g.
            part.norm = measured[0][0] ** 0.5 if measured else float(torch.linalg.vector_norm(fragment.gradient))
            before = _restarts(fragment.outer)
            fragment.outer.step()
            part.restarted = _restarts(fragment.outer) > before
            return
        transfer = part.transfer if isinstance(part.transfer, PartTransfer) else None
        swept = round_sweep(fragment, transfer, restore=restores, prove=not self.setting.alone)
        step_of(fragment.outer)(
            signals=shared.signals,
            measure=True,
            measured=measured,
            sweep=swept,
        )
        if transfer is not None:
            for name, seconds in transfer.seconds.items():
                self.seconds[name] += seconds
                self.seconds["outer"] -= seconds
        part.groups = tuple(fragment.outer.last_round)
        part.norm = sum([group.pseudo_gradient_norm**2 for group in part.groups]) ** 0.5
        if swept is not None:
            part.digests, part.restored = swept.digests, restores

    def report(self, round_: int, *, complete: bool, full: int) -> RoundReport:
        """Report the round, and compare anchor, buffers and counters between the processes.

        Args:
            round_: number of the round.
            complete: True if all fragments have ended the round.
            full: inner steps of a whole round.
        """
        alone = self.setting.alone
        with self._phase("checksum"):
            if alone:
                digests = [{"anchor": p.digests.get("anchor") or checksum(p.fragment.flat)} for p in self.parts]
            else:
                digests = [part.fragment.digest(part.digests) for part in self.parts]
        reports = []
        for part, digest in zip(self.parts, digests, strict=True):
            restarted = part.restarted or any(group.restarted for group in part.groups)
            name, number = part.fragment.name, part.fragment.round
            reports.append(
                RoundReport(
                    round=round_,
                    inner_steps=part.steps,
                    partial=part.steps < full,
                    complete=complete,
                    replicas=self.replicas,
                    restarted=restarted,
                    fragments=(FragmentRound(name, number, part.steps, restarted, digest["anchor"]),),
                    groups=part.groups,
                    pseudo_gradient_norm=part.norm,
                    signals=self._shared.signals,
                    bytes_sent=self.bytes_sent,
                    seconds=self.seconds,
                    checksum=digest["anchor"],
                )
            )
        if not alone:
            prove(self.setting.communicator, round_, self.fragments, digests)
        if len(reports) == 1:
            return reports[0]
        return replace(merged(reports), bytes_sent=self.bytes_sent, seconds=self.seconds)

    def _phase(self, name: str) -> _Phase:
        return _Phase(self.seconds, name)


def _restarts(outer: Optimizer) -> int:
    """Return the restarts of an optimizer so far; 0 where it does not count them."""
    return sum(group.get("restarts", 0) for group in outer.param_groups)


class _Phase:
    """Add the time of a phase, also of a failed one, to `seconds`, under a profiler scope of its name.

    A class, because a generator's context manager takes twice as long to enter and leave.
    """

    __slots__ = ("_name", "_scope", "_seconds", "_start")

    def __init__(self, seconds: dict[str, float], name: str) -> None:
        self._seconds, self._name = seconds, name

    def __enter__(self) -> None:
        self._scope = None
        if torch.autograd.profiler._is_profiler_enabled:  # a scope takes time even without a profiler
            self._scope = torch.profiler.record_function(f"twophase::{self._name}").__enter__()
        self._start = time.perf_counter()

    def __exit__(self, *exception: object) -> None:
        self._seconds[self._name] = self._seconds.get(self._name, 0.0) + time.perf_counter() - self._start
        if self._scope is not None:
            self._scope.__exit__(None, None, None)
