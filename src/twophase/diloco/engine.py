"""`DiLoCo`: many inner steps alone, then one outer step together.

One round, with anchor a (the last agreed parameters) and R replicas theta_r over all processes:

    theta_r <- inner optimizer, `inner_steps` times           (the caller's loop)
    g = (1/R) sum_r (a - theta_r)                             one reduction of one flat buffer
    a <- outer optimizer (a, g)                               momentum, restarts
    theta_r <- a                                              the inner optimizer keeps its state

(16-bit replicas hold a rounded to their type, and their progress counts from there.)

In several fragments (streaming DiLoCo) each takes its rounds on its own, staggered over the inner steps; with a delay
the reduction runs while the replicas train on, and its result is mixed into what they have reached by then:

    theta_r <- mixing theta_r + (1 - mixing) a

Source: DiLoCo (arXiv 2311.08105), algorithm 1; streaming DiLoCo (arXiv 2501.18512); the restart paper, section 2.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from twophase.diloco.agreement import Attendance, Shared, agree, attend, averaged, prove, same_start, squares
from twophase.diloco.build import (
    OuterFactory,
    Restarts,
    build_outer,
    check_needs,
    check_schedule,
    cut,
    frozen,
    replicas_alike,
    restarts,
    settings,
)
from twophase.diloco.comm import Communicator, Elastic, Interrupted, default_communicator
from twophase.diloco.flat import checksum
from twophase.diloco.fragment import Fragment, fsdp_modules, partition, reshard
from twophase.diloco.report import FragmentRound, RoundReport, joined, merged
from twophase.diloco.sweep import goes_in_parts, goes_on_device, round_sweep, transfer_in_parts, write_on_device
from twophase.diloco.wire import PartTransfer, Transfer, check_wire
from twophase.optim.outer import GroupRound, OuterSGD, as_number, check_signals
from twophase.policies.base import AGREEMENT, MEASURED, PROBES
from twophase.policies.checks import check_count
from twophase.policies.text import parse
from twophase.rule import OuterRule

Probe = Callable[[nn.Module, int, int], float]
"""From a module, the number of a replica in this process and a round's number to the loss on a probe batch."""
Signals = Mapping[str, float] | Callable[[list[str]], Mapping[str, float]] | None
"""Values by name, or a function from the names of the fragments whose round ends to them."""


@dataclass(slots=True)
class _Sync:
    """Fragments whose pseudo-gradients are being reduced."""

    fragments: list[Fragment]
    steps: list[int]
    """Inner steps of each fragment's round."""
    transfers: list[Transfer]
    weight: int
    """Replicas of this process that count in the mean."""
    replicas: int
    """Replicas of all processes that do."""
    newcomers: int
    attempts: int
    age: int = 0
    """Inner steps since it was launched."""
    bytes_sent: int = 0
    """Sent for it by attempts that failed, or before it was loaded from a state."""
    seconds: dict[str, float] = field(default_factory=dict)
    in_parts: bool = False
    """Whether the fragments' sums are made in the outer step, part by part."""
    squares: list[Tensor | None] = field(default_factory=list)
    """Sum of the squared norms of this process's replicas' own pseudo-gradients, for a policy that needs it."""

    @property
    def all_bytes_sent(self) -> int:
        """With what has been sent since."""
        return self.bytes_sent + sum(transfer.bytes_sent for transfer in self.transfers)


@dataclass(frozen=True, slots=True)
class _OuterStep:
    """A fragment's outer step: the norm of g, each param group's round, and what was done on the way."""

    fragment: Fragment
    norm: float
    groups: tuple[GroupRound, ...]
    digests: Mapping[str, str]
    restored: bool
    """Whether the replicas have the new anchor."""


class DiLoCo:
    """The engine: call `step()` once after every inner optimizer step.

        engine = DiLoCo(model, OuterRule(0.7, 0.9, nesterov=True), restart=Periodic(3), inner_steps=500)
        for batch in batches:
            ...                                  # forward, backward, inner.step(), inner.zero_grad()
            report = engine.step()               # a RoundReport when a round ends, else None
        engine.finish()                          # the last, shorter round

    The same object serves one replica in each process of a `torch.distributed` group, several replicas in one process
    (then `step()` follows the inner steps of all of them), several in each of several processes, and a replica that is
    sharded over processes by FSDP2 (`ProcessGroup.of_mesh`). All replicas start from process 0's first replica.
    Parameters that require a gradient take part; frozen parameters and module buffers (batch-norm statistics) stay as
    they are.

    The anchor is one flat buffer, allocated once, in float32 (float64 for float64 models) whatever the parameters'
    dtype; `anchor` maps names to views of it.

    Args:
        replicas: the module, or a list of modules of the same parameters, that train in this process.
        outer: an `OuterRule`, or a function from the named anchor parameters of a fragment to any torch optimizer over
            them (param groups give blocks their own rule and restart period).
        inner_steps: inner steps a round, >= 1 (S; H in DiLoCo papers).
        restart: when the outer momentum restarts, or a mapping from fragment names to that; only with an `OuterRule`.
        fragments: number of fragments, >= 1, or a mapping from names to patterns; see `fragment.partition`.
        stagger: spread the fragments' syncs evenly over the inner steps of a round, the last at its end; else all are
            synchronised at its end.
        delay: inner steps between the launch of a reduction and its application, >= 0, < inner_steps.
        mixing: share of a replica's own parameters that stays when the anchor comes back, in [0, 1).
        wire: how pseudo-gradients travel: "float32" (the buffers' own type), "bfloat16", or "int8" (blocks with error
            feedback).
        communicator: None means the default torch.distributed group where one is initialised.
        signals: names of what `step(signals=...)` will be given; a restart policy that needs more is refused.
        probe: for restart policies that weigh candidates: `probe(module, replica, round)` is the module's loss, forward
            only, on a probe batch that depends on the number of the replica in this process and on the round alone. The
            module is one of the replicas, with a candidate's parameters.
        alike: what else all processes must have been started with, by the words that name it (JSON values).

    Raises:
        ValueError: no trainable parameters, replicas that differ (in this process or between processes), parameters
            spread over devices, an argument outside its range, or a restart policy that needs what is not supplied.
    """

    def __init__(
        self,
        replicas: nn.Module | Sequence[nn.Module],
        outer: OuterRule | OuterFactory,
        *,
        inner_steps: int,
        restart: Restarts | Mapping[str, Restarts] = None,
        fragments: int | Mapping[str, str] = 1,
        stagger: bool = True,
        delay: int = 0,
        mixing: float = 0.0,
        wire: str = "float32",
        communicator: Communicator | None = None,
        signals: Collection[str] = (),
        probe: Probe | None = None,
        alike: Mapping[str, Any] | None = None,
    ) -> None:
        self.inner_steps = check_count("DiLoCo", "inner_steps", inner_steps)
        self.stagger, self.delay, self.mixing, self.wire = stagger, delay, mixing, check_wire(wire)
        check_schedule(stagger, delay, mixing, self.inner_steps)
        self.communicator = communicator or default_communicator()
        self.replicas: list[nn.Module] = [replicas] if isinstance(replicas, nn.Module) else list(replicas)
        slots = replicas_alike(self.replicas, self.communicator)
        self._fsdp = [fsdp_modules(replica) for replica in self.replicas]
        # Fragments that are never reduced at the same time share the room for their pseudo-gradients.
        parts = partition({slot.name: slot.parameter.numel() for slot in slots[0]}, fragments)
        gap = self.inner_steps // len(parts) if stagger else self.inner_steps
        shared = stagger and delay < gap
        if self.communicator.elastic and not delay < gap:
            raise ValueError(
                f"DiLoCo: delay is {delay} and the fragments' syncs lie {gap} inner steps apart; where processes come "
                "and go one must end before the next begins, so take a shorter delay or fewer fragments"
            )
        self.fragments, self._anchor, self.layout = cut(slots, parts, self.wire, self.communicator, shared=shared)
        self._launching = self.fragments
        self._at_once = delay == 0
        """Whether the sync of those ends where it begins: without a delay, or when it is over and is repeated."""
        self._under_way: list[_Sync] = []
        self._alike = dict(alike or {}) | frozen(self.replicas[0], sharded=self.communicator.sharded)
        self.round = 0
        self.inner_step = 0
        self.syncs = 0
        """Syncs that have been completed, over all fragments."""
        for fragment, policy in zip(self.fragments, restarts(restart, self.fragments), strict=True):
            fragment.outer = build_outer(fragment, outer, policy)
        self.anchor: dict[str, Tensor] = {name: view for f in self.fragments for name, view in f.named}
        self.replica_count = len(self.replicas)
        self.probe = probe
        self._absent = self.communicator.elastic
        """Whether this process has still to `join` the others."""
        self._borrowed: set[int] = set()
        """Fragments in which this process holds another's progress, each until a sync of it has succeeded."""
        if not self._absent:
            counts = same_start(self.communicator, self._description(), len(self.replicas))
            self.replica_count = sum(counts)
        self._signals = frozenset(signals)
        supplied = self._check_needs(group for optimizer in self._outers() for group in optimizer.param_groups)
        for optimizer in self._outers():
            optimizer.promised |= supplied  # a state may bring another policy
        if not self._absent:
            self.communicator.broadcast(self._anchor)
        self._restore(self.fragments, mixing=0.0)

    def _outers(self) -> list[OuterSGD]:
        """The outer optimizers that have restart policies."""
        return [fragment.outer for fragment in self.fragments if isinstance(fragment.outer, OuterSGD)]

    def _check_needs(self, groups: Iterable[Mapping[str, Any]]) -> frozenset[str]:
        known = None if self.communicator.elastic else self.replica_count
        return check_needs(groups, self._signals, probes=self.probe is not None, replicas=known)

    def _description(self) -> dict[str, Any]:
        """What all processes must have been started with, by the words that name it."""
        slots = [(f, slot) for f in self.fragments for slot in f.layout.slots]
        return self._alike | {
            "numbers of fragments": len(self.fragments),
            "parameters": {slot.name: str(list(slot.shape)) for _, slot in slots},
            "orders of parameters": [slot.name for _, slot in slots],
            "types": {slot.name: str(slot.dtype) for f in self.fragments for slot in f.slots[0]},
            "fragments": {slot.name: f.name for f, slot in slots},
            "inner_steps": self.inner_steps,
            "schedules": {"stagger": self.stagger, "delay": self.delay, "mixing": self.mixing},
            "wires": self.wire,
            "outer settings": {f"fragment {f.name}": settings(f.outer) for f in self.fragments},
            # Their last bits differ.
            "kernels of the outer round": {f.name: goes_on_device(f) for f in self.fragments if not f.flat.is_cpu},
        }

    @property
    def outer(self) -> Optimizer:
        """The outer optimizer of a model in one fragment; several have `fragments[i].outer` each."""
        if len(self.fragments) > 1:
            raise ValueError("DiLoCo: outer is the optimizer of a single fragment; of several, take fragments[i].outer")
        return self.fragments[0].outer

    # ---------------------------------------------------------------------------------------------------- the rounds

    def step(self, signals: Signals = None) -> RoundReport | None:
        """Count one inner step of every replica; end what ends with it.

        Args:
            signals: this process's values, such as its mean training loss, for the report and for restart policies
                that need them; looked at where a round ends, and averaged over the replicas. The same names on every
                process. Or a function that is called where a round ends, with the names of the fragments whose round
                it is, and returns the values: what was trained since their last outer step.

        Returns:
            The report of the round that has just ended, or None inside a round.

        Raises:
            ValueError: a round ends, and a signal is missing that a restart policy needs; nothing has happened.
            Any error of the probe, or an interrupt before the outer step: the sync is undone, and the next one takes
                its progress. After an interrupt inside the outer step the engine refuses to go on from it.
        """
        _check_kind(signals)  # in every step, and not only where a round ends
        self._check_ready()
        given = self._given(signals, ending) if (ending := self._ending()) else None
        self.inner_step += 1
        for fragment in self.fragments:
            fragment.steps += 1
        due = [f for f in self.fragments if self.offset(f) == self.inner_step]
        if self.inner_step >= self.inner_steps:
            self.inner_step = 0
        report = None
        for sync in list(self._under_way):
            sync.age += 1
            if sync.age == self.delay:
                report = self._complete(sync, given)
            elif sync.age == (self.delay + 1) // 2:
                with suppress(Interrupted):  # `wait` says it again, where it can be helped
                    for transfer in sync.transfers:  # at the same step everywhere: collectives go in one order
                        transfer.advance()
        if due and self.delay == 0:
            # FSDP2's come and go with its forward passes, and another replica's state may replace any.
            stay = () if any(self._fsdp) or self.communicator.elastic else due
            try:
                for fragment in stay:
                    fragment.hold_params()
                return self._complete(self._launch(due), given)
            finally:
                for fragment in stay:
                    fragment.release_params()
        if due:
            self._launch(due)
        return report

    def finish(self, signals: Signals = None) -> RoundReport | None:
        """End the run: apply what is under way and synchronise what is left; None when there is nothing.

        Afterwards every replica is the anchor, whatever the mixing.

        Args:
            signals: as for `step`; a function is called for each fragment by itself.

        Raises:
            ValueError: a signal is missing that a restart policy needs; call it again with all of them.
        """
        _check_kind(signals)
        self._check_whole()
        under_way = list(self._under_way)
        reports = [self._complete(sync, self._given(signals, sync.fragments)) for sync in under_way]
        while left := [fragment for fragment in self.fragments if fragment.steps > 0]:  # a heal may change them
            given = self._given(signals, left[:1])
            reports.append(self._complete(self._launch(left[:1], at_once=True), given))
        if self.mixing:
            self._restore(self.fragments, mixing=0.0)
        self.inner_step = 0
        if not reports:
            return None
        self.round = max(fragment.round for fragment in self.fragments)
        return replace(merged(reports), round=self.round, complete=True)

    def offset(self, fragment: Fragment) -> int:
        """The inner step of a round, from 1, after which a fragment's pseudo-gradient is taken."""
        if not self.stagger:
            return self.inner_steps
        return -(-(fragment.number + 1) * self.inner_steps // len(self.fragments))

    @property
    def reports_next(self) -> bool:
        """Whether the next `step()` ends a round, and so looks at the signals."""
        return bool(self._ending())

    def _ending(self) -> list[Fragment]:
        """The fragments whose round the next `step()` ends."""
        if self.delay:
            return [f for sync in self._under_way if sync.age + 1 == self.delay for f in sync.fragments]
        return [f for f in self.fragments if self.offset(f) == self.inner_step + 1]

    def _given(self, signals: Signals, fragments: Sequence[Fragment]) -> Mapping[str, float] | None:
        """The signals for the end of these fragments' round, before anything of it happens."""
        given = signals([fragment.name for fragment in fragments]) if callable(signals) else signals
        outers = [fragment.outer for fragment in fragments if isinstance(fragment.outer, OuterSGD)]
        for policy in [group["restart"] for outer in outers for group in outer.param_groups]:
            missing = parse(policy).needs - MEASURED - {PROBES, AGREEMENT} - set(given or ())
            if missing:
                raise ValueError(
                    f"DiLoCo: a round ends, and restart policy {policy} needs {', '.join(sorted(missing))}; pass them "
                    "to step(signals=...) and finish(signals=...)"
                )
        check_signals("DiLoCo", given or {})
        return given

    @property
    def under_way(self) -> bool:
        """Whether a reduction has been launched whose result is still to be applied (only with a delay)."""
        return bool(self._under_way)

    @property
    def at_anchor(self) -> bool:
        """Whether the replicas are the anchor: no inner step has been taken since, and nothing is under way."""
        return self.mixing == 0 and not self._under_way and all(fragment.steps == 0 for fragment in self.fragments)

    @contextmanager
    def anchored(self, number: int = 0) -> Iterator[nn.Module]:
        """A replica of this process with the anchor's parameters, for an evaluation; its own come back afterwards.

        Between the syncs of several fragments, or while a reduction is under way, no replica is the anchor.

        Args:
            number: of the replica in this process.
        """
        if self.at_anchor:
            yield self.replicas[number]
            return
        reshard(self._fsdp[number])
        held = [[slot.tensor().clone() for slot in f.slots[number]] for f in self.fragments]
        try:
            self._set(number, [fragment.anchor_views for fragment in self.fragments])
            yield self.replicas[number]
        finally:
            self._set(number, held)

    @torch.no_grad()
    def _set(self, number: int, values: Sequence[Sequence[Tensor]]) -> None:
        reshard(self._fsdp[number])
        for fragment, of_fragment in zip(self.fragments, values, strict=True):
            torch._foreach_copy_([slot.tensor() for slot in fragment.slots[number]], list(of_fragment))

    @torch.no_grad()
    def _launch(self, fragments: list[Fragment], attempts: int = 1, *, at_once: bool = False) -> _Sync:
        """Take the fragments' pseudo-gradients and begin to sum them."""
        seconds: dict[str, float] = {}
        # Whoever comes late is given both with our state: no inner steps must go by there while we wait for the end.
        self._launching, self._at_once = fragments, at_once or self.delay == 0
        weight, replicas, newcomers = len(self.replicas), self.replica_count, 0
        if self.communicator.elastic:
            with _phase("quorum", seconds):
                weight, replicas, newcomers, attempts = self._attend(attempts)
        return self._reduce(_Sync(self._launching, [], [], weight, replicas, newcomers, attempts, seconds=seconds))

    def _reduce(self, sync: _Sync) -> _Sync:
        alone = self._is_alone
        for fragment in sync.fragments:
            fragment.divisor = sync.replicas
        # Elastic: nothing of the anchor may change before the vote on the whole sum. After a delay all of it is there.
        # Sharded: the norms of all shards are added up before the step.
        may_part = self._at_once and not (alone or self.communicator.elastic or self.communicator.sharded)
        sync.in_parts = may_part and all(map(goes_in_parts, sync.fragments))
        with _phase("pseudo_gradient", sync.seconds):
            for modules in self._fsdp:
                reshard(modules)
            for fragment in sync.fragments:
                fragment.on_device = goes_on_device(fragment)
            sync.squares = [None if sync.in_parts else self._take(f, sync, alone=alone) for f in sync.fragments]
        with _phase("reduce", sync.seconds):
            if sync.in_parts:
                sync.transfers = [transfer_in_parts(f, self.communicator) for f in sync.fragments]
            else:
                sync.transfers = [
                    f.channel.launch(self.communicator, f.gradient, quantized=alone) for f in sync.fragments
                ]
        sync.steps = [fragment.steps for fragment in sync.fragments]
        for fragment in sync.fragments:
            fragment.steps = 0
        self._under_way.append(sync)
        return sync

    def _take(self, fragment: Fragment, sync: _Sync, *, alone: bool) -> Tensor | None:
        """Write a fragment's pseudo-gradient; the sum of its replicas' squared norms for a policy that needs it."""
        if not sync.weight:
            fragment.gradient.zero_()
            return None
        if fragment.on_device:
            write_on_device(fragment, sync.replicas if alone else 1)
            fragment.divisor = 1 if alone else sync.replicas
            return None
        measure = isinstance(fragment.outer, OuterSGD) and AGREEMENT in fragment.outer.needs
        return fragment.write_pseudo_gradient(alone=alone, measure=measure)

    @torch.no_grad()
    def _complete(self, sync: _Sync, signals: Mapping[str, float] | None) -> RoundReport:
        """Wait for the sums, take the outer steps, and give the replicas the new anchor."""
        shared = self._receive(sync, signals)
        while shared is None:  # processes went away: once more with those that are left
            again = self._launch(sync.fragments, sync.attempts + 1, at_once=True)
            for key, value in sync.seconds.items():
                again.seconds[key] = again.seconds.get(key, 0.0) + value
            again.bytes_sent += sync.all_bytes_sent  # what was in vain was sent, too
            sync = again
            shared = self._receive(sync, signals)
        self._under_way.remove(sync)
        for fragment in sync.fragments:
            fragment.torn = True
        try:
            steps = [self._outer_step(sync, shared, index) for index in range(len(sync.fragments))]
        except ValueError:  # refused: nothing of a single fragment has changed
            for fragment in sync.fragments:
                fragment.torn = sync.in_parts or len(sync.fragments) > 1
            raise
        with _phase("restore", sync.seconds):
            self._restore([step.fragment for step in steps if not step.restored], self.mixing)
        for fragment in sync.fragments:
            fragment.torn = False
            fragment.round += 1
            if self.mixing == 0:
                fragment.steps = 0  # what was trained during the delay is given up
        with _phase("checksum", sync.seconds):
            digests = [] if self._is_alone else [step.fragment.digest(step.digests) for step in steps]
            anchors = [digest["anchor"] for digest in digests]
            anchors = anchors or [step.digests.get("anchor") or checksum(step.fragment.flat) for step in steps]
        report = self._report(sync, shared, steps, anchors)
        prove(self.communicator, report.round, sync.fragments, digests)
        return report

    @property
    def _is_alone(self) -> bool:
        """Whether all replicas live in this process, so that there is nothing to compare."""
        return self.communicator.size == 1 and not self.communicator.elastic

    def _outer_step(self, sync: _Sync, shared: Shared, index: int) -> _OuterStep:
        """One fragment's outer step; in one sweep with all that follows it, where it can be swept."""
        fragment = sync.fragments[index]
        measured = shared.dots[index] if shared.dots is not None else None
        with _phase("outer", sync.seconds):
            if not isinstance(fragment.outer, OuterSGD):
                # Before the step: some optimizers overwrite g.
                norm = measured[0][0] ** 0.5 if measured else float(torch.linalg.vector_norm(fragment.gradient))
                fragment.outer.step()
                return _OuterStep(fragment, norm, (), {}, restored=False)
            probes = shared.probes[index] if shared.probes and shared.probes[index] else None
            for modules in self._fsdp:
                reshard(modules)
            transfer = cast("PartTransfer", sync.transfers[index]) if sync.in_parts else None
            swept = round_sweep(fragment, transfer, restore=self.mixing == 0, prove=not self._is_alone)
            fragment.outer.step(
                signals=shared.shown(index),
                measure=True,
                measured=measured,
                probes=probes,
                sweep=swept and swept.sweep,
            )
        for phase, spent in ({} if transfer is None else transfer.seconds).items():
            sync.seconds[phase] += spent
            sync.seconds["outer"] -= spent
        digests = {} if swept is None else swept.digests()
        groups = tuple(fragment.outer.last_round)
        norm = sum(group.pseudo_gradient_norm**2 for group in groups) ** 0.5
        return _OuterStep(fragment, norm, groups, digests, restored=swept is not None and self.mixing == 0)

    def _receive(self, sync: _Sync, signals: Mapping[str, float] | None) -> Shared | None:
        """Wait for the mean pseudo-gradients and what is decided by; None when a process has gone meanwhile."""
        shared = None
        try:
            with suppress(Interrupted):
                shared = self._shared(sync, signals)
            if not self.communicator.commit():
                shared = None
        except BaseException:  # of the probe, or Ctrl-C: the replicas hold their progress, and the next sync takes it
            self._withdraw(sync)
            raise
        if shared is None:
            self._withdraw(sync)
            return None
        for fragment in sync.fragments:
            self._borrowed.discard(fragment.number)
            fragment.channel.commit()
        return shared

    def _shared(self, sync: _Sync, signals: Mapping[str, float] | None) -> Shared:
        """What all processes decide by, once the sums are there."""
        with _phase("reduce", sync.seconds):
            for transfer in [] if sync.in_parts else sync.transfers:
                transfer.wait()
            for fragment in sync.fragments:
                if not sync.in_parts and not fragment.on_device:
                    fragment.divide()
                fragment.hand_over()
        with _phase("outer", sync.seconds):
            own = squares(self.communicator, sync.squares, len(self.replicas))
            shared = agree(self.communicator, sync.fragments, sync.weight, {**(signals or {}), **own})
        if any(isinstance(f.outer, OuterSGD) and f.outer.candidate_count for f in sync.fragments):
            with _phase("probe", sync.seconds):
                shared = replace(shared, probes=self._probes(sync))
        return shared

    def _withdraw(self, sync: _Sync) -> None:
        """Undo a sync that has not been agreed on."""
        self._under_way.remove(sync)
        for fragment, steps in zip(sync.fragments, sync.steps, strict=True):
            fragment.channel.withdraw()
            fragment.steps += steps

    def _probes(self, sync: _Sync) -> list[list[float]]:
        """The losses of each fragment's candidates, with the other fragments at the anchor; means over the replicas.

        Before the vote on the round, so that it may fail like the reduction itself. The replicas stay as they are.
        """
        if self.probe is None:  # the policy came later than the engine
            raise ValueError(
                "DiLoCo: a restart policy needs probes; give the engine a function, DiLoCo(..., probe=...)"
            )
        model = self.replicas[0]
        reshard(self._fsdp[0])
        held = [[slot.tensor().clone() for slot in fragment.slots[0]] for fragment in self.fragments]
        buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]  # batch norm's change in a forward pass
        found: list[list[float]] = []
        try:
            for fragment in sync.fragments:
                outer, losses = fragment.outer, []
                count = outer.candidate_count if isinstance(outer, OuterSGD) else 0
                for number in range(count):
                    new = {id(p): value for p, value in cast("OuterSGD", outer).candidate(number)}
                    self._set(0, [[new.get(id(view), view) for view in f.anchor_views] for f in self.fragments])
                    replicas = range(len(self.replicas))
                    with torch.no_grad():
                        told = [self.probe(model, replica, fragment.round + 1) for replica in replicas]
                        own = [as_number("DiLoCo: what the probe returned", loss) for loss in told]
                    losses.append(sum(own) / len(own))
                found.append(losses)
        finally:
            self._set(0, held)
            for buffer, old in buffers:
                buffer.copy_(old)
        return averaged(self.communicator, sync.weight, found)

    def _report(
        self,
        sync: _Sync,
        shared: Shared,
        outer_steps: Sequence[_OuterStep],
        checksums: list[str],
    ) -> RoundReport:
        groups = [step.groups for step in outer_steps]
        norms = [step.norm for step in outer_steps]
        restarted = [any(group.restarted for group in of_fragment) for of_fragment in groups]
        told = tuple(
            FragmentRound(fragment.name, fragment.round, steps, whether, digits)
            for fragment, steps, whether, digits in zip(sync.fragments, sync.steps, restarted, checksums, strict=True)
        )
        given_up = self.delay if self.mixing == 0 else 0
        complete = sync.fragments[-1] is self.fragments[-1]
        self.round += complete
        self.syncs += 1
        return RoundReport(
            round=self.round + (not complete),
            inner_steps=max(sync.steps),
            partial=any(steps < self.inner_steps - given_up for steps in sync.steps),
            complete=complete,
            replicas=sync.replicas,
            newcomers=sync.newcomers,
            attempts=sync.attempts,
            restarted=any(restarted),
            fragments=told,
            groups=tuple(group for of_fragment in groups for group in of_fragment),
            pseudo_gradient_norm=sum(norm**2 for norm in norms) ** 0.5 if len(norms) > 1 else norms[0],
            signals=shared.given,
            bytes_sent=sync.all_bytes_sent,
            seconds=sync.seconds,
            checksum=joined(checksums),
        )

    @torch.no_grad()
    def _restore(self, fragments: Sequence[Fragment], mixing: float) -> None:
        """theta_r <- mixing theta_r + (1 - mixing) a."""
        for modules in self._fsdp:
            reshard(modules)
        for fragment in fragments:
            fragment.restore(mixing)

    def checksum(self) -> str:
        """Sixteen hexadecimal digits that depend on every bit of the anchor; equal on all processes after a round."""
        return checksum(self._anchor)

    # ----------------------------------------------------------------------------------- processes that come and go

    @torch.no_grad()
    def join(
        self, signals: Mapping[str, float] | None = None, *, restore: Callable[[], None] = lambda: None
    ) -> RoundReport | None:
        """Join the others, where processes come and go; once, before the first `step()`.

        Into a run that is under way it leads by another replica's state, at the moment when that one has ended its
        inner steps: this replica then takes part in that sync without weight, because what it has was the other's. At a
        run's beginning it waits until enough replicas are there; each restores what it has on disk, and those that are
        behind are given the state of one that is not. Whoever restores for so long that the others have begun meanwhile
        comes into their run, even if it has more on disk.

        Args:
            signals: as for `step`, with the same names: the others may be at the end of a round.
            restore: loads this replica's newest checkpoint, if there is one; called where no run is under way.

        Returns:
            The report of the sync that this replica has come into, if that ended a round.

        Raises:
            ValueError: the replicas were not started alike.
            RuntimeError: too few of them came in time.
        """
        if not self._absent:
            return None
        elastic = cast("Elastic", self.communicator)
        self._launching = []
        restored = False
        while True:
            elastic.enter(1 + self.syncs if restored else 0)
            if elastic.begin():
                self._take_over()
            try:
                here = self._roll_call(0, running=False, ready=restored)
                if here.running:
                    break
                if elastic.enough(here.present):  # by our own measure: from here to the vote nobody waits for another
                    if here.ready and elastic.commit():  # all together: nobody votes while others still restore
                        if self.at_anchor or (self.syncs == 0 and self.inner_step == 0):  # nobody's progress
                            self._borrowed.clear()
                        elastic.enter(1 + self.syncs, running=True)
                        self._absent = False
                        return None
                    if not restored:
                        restore()
                        restored = True
            except Interrupted:
                elastic.commit()  # which it does not; it is what ends an attempt
        self._absent = False
        weight, replicas = self._shares(0, here)
        sync = self._reduce(_Sync(self._launching, [], [], weight, replicas, here.present - replicas, attempts=1))
        return self._complete(sync, signals) if self._at_once else None

    def _check_whole(self) -> None:
        if any(fragment.torn for fragment in self.fragments):
            raise ValueError(
                "DiLoCo: the last outer step was interrupted, and a part of the anchor is ahead of the others; go back "
                "to the newest checkpoint with load_state_dict()"
            )

    def _check_ready(self) -> None:
        self._check_whole()
        if self._absent:
            raise ValueError("DiLoCo: call join() once before the first step(); it waits for the other processes")

    def _attend(self, attempts: int) -> tuple[int, int, int, int]:
        """Begin a sync with those who are there.

        Returns:
            Replicas of this process that count, those of all that do, newcomers, and attempts so far.
        """
        while True:
            if self.communicator.begin():  # this process was left behind
                self._take_over()
            borrowed = self._borrowed.intersection(fragment.number for fragment in self._launching)
            weight = 0 if borrowed else len(self.replicas)
            try:
                here = self._roll_call(weight, running=True, ready=True)
            except Interrupted:
                self.communicator.commit()
                attempts += 1
            else:
                weight, replicas = self._shares(weight, here)
                return weight, replicas, here.present - replicas, attempts

    def _take_over(self) -> None:
        """What this process holds is another's now, and it owes nothing."""
        self._borrowed = {fragment.number for fragment in self.fragments}
        self.load_wire_state_dict({})

    def _shares(self, weight: int, here: Attendance) -> tuple[int, int]:
        """Replicas of this process that count, and of all; where only newcomers are left, they count instead."""
        return (weight, here.replicas) if here.replicas else (len(self.replicas), here.present)

    def _roll_call(self, weight: int, *, running: bool, ready: bool) -> Attendance:
        return attend(
            self.communicator,
            self.fragments,
            self._description(),
            own=len(self.replicas),
            weight=weight,
            running=running,
            ready=ready,
            position=(self._launching[0].number if self._launching else 0, len(self._launching), self.inner_step),
        )

    # ------------------------------------------------------------------------------------------------------- states

    def state_dict(self) -> dict[str, Any]:
        """Anchor, outer optimizers and position, the same on every process.

        (Where processes come and go, also which fragments of this one hold another's progress, and so have no weight.)

        With the models, the inner optimizers, and what a lossy wire owes (`wire_state_dict`), it is the whole run. It
        holds tensors, numbers and text only, so `torch.load(weights_only=True)` reads it. The tensors are the live
        ones; save them before the next step, or clone them. With a reduction under way, which is waited for, it must be
        called on all processes.

        Raises:
            ValueError: a reduction is `under_way` where processes come and go: its result may never be.
        """
        self._check_whole()
        if self._under_way and self.communicator.elastic:
            raise ValueError(
                "DiLoCo.state_dict: a reduction is under way, of which nobody knows whether the others will end it; "
                "take inner steps until engine.under_way is False, and save then"
            )
        if self._under_way:
            self._settle()
        return {
            "anchor": self._anchor,
            "layout": self.layout.describe(),
            "fragments": [
                {
                    "name": f.name,
                    "round": f.round,
                    "steps": f.steps,
                    "outer": f.outer.state_dict(),
                }
                for f in self.fragments
            ],
            "under_way": [
                {
                    "fragments": [fragment.number for fragment in sync.fragments],
                    "steps": sync.steps,
                    "sums": [fragment.gradient for fragment in sync.fragments],
                    "age": sync.age,
                    "replicas": sync.replicas,
                    "divisors": [fragment.divisor for fragment in sync.fragments],
                    "bytes_sent": sync.all_bytes_sent,
                    "squares": self._mean_squares(sync),
                }
                for sync in self._under_way
            ],
            "schedule": self._schedule(),
            "launching": [fragment.number for fragment in self._launching],
            "at_once": self._at_once,
            "borrowed": sorted(self._borrowed),
            "round": self.round,
            "inner_step": self.inner_step,
            "syncs": self.syncs,
        }

    def _mean_squares(self, sync: _Sync) -> list[float | None]:
        """The mean squared norms of all replicas' own pseudo-gradients, of the fragments that need them."""
        own = [[] if total is None else [float(total) / len(self.replicas)] for total in sync.squares]
        return [found[0] if found else None for found in averaged(self.communicator, sync.weight, own)]

    def _schedule(self) -> dict[str, Any]:
        """When which fragments are reduced."""
        return {"inner_steps": self.inner_steps, "stagger": self.stagger, "delay": self.delay}

    def _settle(self) -> None:
        """Wait for the sums under way; their outer steps come when they are due."""
        with suppress(Interrupted):  # `_receive` meets it again, and repeats the sync
            for sync in self._under_way:
                for transfer in sync.transfers:
                    transfer.wait()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`. Construct the engine first, then load it, the models and the inner optimizers.

        As for every torch optimizer, the saved settings (lr, momentum, restart policy) win over the constructor's. A
        state in which the replicas were the anchor also sets them to it.

        Raises:
            ValueError: no engine's state, the state of another model, a position that this engine's rounds do not
                have, or a restart policy that needs what this one was not promised; nothing has been changed.
        """
        self._check_state(state)
        policies = [
            saved["outer"]["param_groups"]
            for fragment, saved in zip(self.fragments, state["fragments"], strict=True)
            if isinstance(fragment.outer, OuterSGD)
        ]
        self._check_needs(group for groups in policies for group in groups if "restart" in group)
        self._settle()  # a sum that is given up must not end later, in what is loaded
        self._borrowed = set(state.get("borrowed", ()))  # of our own, until `_take_over` says that it is another's
        for fragment, saved in zip(self.fragments, state["fragments"], strict=True):
            fragment.outer.load_state_dict(saved["outer"])  # first: it may refuse
        with torch.no_grad():
            self._anchor.copy_(state["anchor"])
            for fragment, saved in zip(self.fragments, state["fragments"], strict=True):
                fragment.round, fragment.steps, fragment.torn = saved["round"], saved["steps"], False
            self.round, self.inner_step, self.syncs = state["round"], state["inner_step"], state["syncs"]
            self._launching = [self.fragments[number] for number in state["launching"]]
            self._at_once = state.get("at_once", self.delay == 0)
            self._under_way = []
            for modules in self._fsdp:
                reshard(modules)
            for saved in state["under_way"]:
                fragments = [self.fragments[number] for number in saved["fragments"]]
                divisors = saved.get("divisors") or [saved["replicas"]] * len(fragments)
                for fragment, total, divisor in zip(fragments, saved["sums"], divisors, strict=True):
                    fragment.gradient.copy_(total)
                    fragment.on_device = goes_on_device(fragment)
                    fragment.divisor = divisor
                own = len(self.replicas)
                sync = _Sync(fragments, list(saved["steps"]), [], own, saved["replicas"], 0, 1, saved["age"])
                sync.bytes_sent = saved["bytes_sent"]
                for mean in saved.get("squares", ()):
                    sync.squares.append(None if mean is None else torch.tensor(mean * own, dtype=torch.float64))
                self._under_way.append(sync)
            if self.at_anchor:
                self._restore(self.fragments, mixing=0.0)

    def _check_state(self, state: Mapping[str, Any]) -> None:
        parts = ("anchor", "layout", "fragments", "under_way", "schedule", "launching", "round", "inner_step", "syncs")
        missing = set(parts) - set(state)
        if missing:
            raise ValueError(
                f"DiLoCo.load_state_dict: the state lacks {', '.join(sorted(missing))}; pass what state_dict() returned"
            )
        names = [fragment.name for fragment in self.fragments]
        saved = [fragment["name"] for fragment in state["fragments"]]
        if saved != names:
            raise ValueError(
                f"DiLoCo.load_state_dict: the state has the fragments {', '.join(saved)} and this engine "
                f"{', '.join(names)}; build the engine with the checkpoint's fragments"
            )
        if state["layout"] != self.layout.describe():
            raise ValueError(
                "DiLoCo.load_state_dict: the state belongs to a model of other parameters; build the model of the "
                "checkpoint, or start a new run"
            )
        if state["anchor"].shape != self._anchor.shape:
            raise ValueError(
                f"DiLoCo.load_state_dict: the anchor has {state['anchor'].numel()} elements instead of "
                f"{self._anchor.numel()}; the state is damaged"
            )
        for fragment, saved in zip(self.fragments, state["fragments"], strict=True):
            ours = [len(group["params"]) for group in fragment.outer.param_groups]
            theirs = [len(group["params"]) for group in saved["outer"]["param_groups"]]
            if ours != theirs:
                raise ValueError(
                    f"DiLoCo.load_state_dict: fragment {fragment.name} has param groups of {theirs} parameters in the "
                    f"state and of {ours} here; build the engine with the checkpoint's fragments and param groups"
                )
        if state["inner_step"] >= self.inner_steps:
            raise ValueError(
                f"DiLoCo.load_state_dict: the state was saved after {state['inner_step']} inner steps of its round, "
                f"but inner_steps is {self.inner_steps}; use the checkpoint's, or a checkpoint of a round's end"
            )
        ours, theirs = self._schedule(), state["schedule"]
        unlike = [key for key in ours if ours[key] != theirs.get(key)]
        if unlike and state["under_way"]:
            raise ValueError(
                "DiLoCo.load_state_dict: a reduction is under way in the state, whose "
                f"{', '.join(f'{key} is {theirs.get(key)} (here {ours[key]})' for key in unlike)}; use the "
                "checkpoint's, or a checkpoint of a run's end"
            )

    def wire_state_dict(self) -> dict[str, Any]:
        """What this process still owes the others on a lossy wire, by fragment; empty on float32.

        It differs between processes, so each saves its own. With a reduction under way, which is waited for because its
        second stage owes digits too, it must be called on all processes.
        """
        self._settle()
        return {f.name: state for f in self.fragments if (state := f.channel.state_dict())}

    def load_wire_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `wire_state_dict()`; what is not in it is owed no longer."""
        for fragment in self.fragments:
            if fragment.name in state:
                fragment.channel.load_state_dict(state[fragment.name])
            else:
                fragment.channel.clear()


def _check_kind(signals: Signals) -> None:
    if not (signals is None or callable(signals) or isinstance(signals, Mapping)):
        raise ValueError(f"DiLoCo: signals are {signals!r}; give names and values, such as {{'loss': 2.3}}")


class _phase:  # noqa: N801 - a context manager; of a generator each would take longer than a small model's phase
    """Time a phase, under a profiler scope of its name; what has failed took its time too."""

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
