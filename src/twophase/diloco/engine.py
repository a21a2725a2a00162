"""`DiLoCo`: many inner steps alone, then one outer step together.

One round, with anchor a (the last agreed parameters) and R replicas theta_r over all ranks:

    theta_r <- inner optimizer, `inner_steps` times           (the caller's loop)
    g = (1/R) sum_r (a - theta_r)                             one all-reduce of one flat buffer
    a <- outer optimizer (a, g)                               momentum, restarts
    theta_r <- a                                              the inner optimizer keeps its state

With several fragments (Streaming DiLoCo) each has its own rounds, staggered over the inner steps. With a delay the
all-reduce runs while the replicas train on, and its result is mixed into their parameters:

    theta_r <- mixing theta_r + (1 - mixing) a

Source: DiLoCo (arXiv 2311.08105), algorithm 1; Streaming DiLoCo (arXiv 2501.18512); the restart paper, section 2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from twophase.diloco import checks, state
from twophase.diloco.buffers import average_buffers, broadcast_buffers
from twophase.diloco.compression import BLOCK, COMPRESSIONS, Compression
from twophase.diloco.digest import digest
from twophase.diloco.fragment import Fragment, padded, partition, reshard, slots_of
from twophase.diloco.group import SingleProcess, default_group
from twophase.diloco.report import FragmentRound, RoundReport, merged
from twophase.diloco.watch import Watch
from twophase.optim.build import OuterChoice, outer_optimizer
from twophase.optim.orthogonal import Filter, filter_of
from twophase.restart import RestartPolicy
from twophase.rule import whole_number

Signals = Mapping[str, float] | None
Restarts = RestartPolicy | str | int | None


class DiLoCo:
    """The engine: call `step()` once after every inner optimizer step.

        engine = DiLoCo(model, "averaging", inner_steps=500)
        for batch in batches:
            ...                                  # forward, backward, inner.step(), inner.zero_grad()
            report = engine.step()               # a RoundReport when a round ends, else None
        engine.finish()                          # the last, shorter round

    A process may have one replica or several, alone or in a `torch.distributed` group; FSDP2 may shard a replica over
    ranks. All start from rank 0's first replica, also in their buffers. Parameters that require a gradient take part.

    Args:
        replicas: module, or list of modules with the same parameters, that train in this process.
        outer: an `OuterRule`; a name: "averaging", "heavy-ball", "nesterov", "adamw", "muon", "auto"; or a function
            from a fragment's named anchor parameters to a torch optimizer over them, or to several over parts of them.
        inner_steps: inner steps a round, >= 1 (S; H in DiLoCo papers).
        restart: policy, or policies by fragment name; of another optimizer than `OuterSGD` the whole state restarts.
        filter: of the pseudo-gradient before the outer step: "orthogonal", "clip:1" (a norm), or a function that
            changes a fragment's pseudo-gradients by name in place, the same on all ranks.
        fragments: number of fragments, >= 1, or patterns of parameter names by fragment name; see `partition`.
        stagger: True spreads the fragments' syncs evenly over a round; False has all at its end.
        delay: inner steps between the launch of an all-reduce and its application, in [0, inner_steps) (tau in
            Streaming DiLoCo).
        mixing: share of a replica's own parameters that stays when the new anchor is applied, in [0, 1).
        compression: of pseudo-gradients in transit: "float32" (none), "bfloat16" or "int8".
        group: ranks of the run; None is the default torch.distributed group where one is initialised.
        expect_equal: further JSON values that all ranks must have been started with.
        buffers: "mean" averages floating-point buffers that differ, as BatchNorm's, once a round; else "local".

    Attributes:
        anchor: the anchor's parameters by name, views of `flat`, which is float32 (float64 for float64 models).
        fragments, round: the fragments, each with its `outer` optimizer, and the rounds that all have ended.
        inner_step: inner steps since the round began; `taken` counts those of the whole run.
        syncs: outer steps of all fragments together.
        after_sync: functions without arguments, called whenever the replicas have been set to a new anchor, as to
            refresh an inner optimizer's float32 masters.

    Raises:
        ValueError: an argument outside its range, or replicas or ranks that differ.
    """

    def __init__(
        self,
        replicas: nn.Module | Sequence[nn.Module],
        outer: OuterChoice,
        *,
        inner_steps: int,
        restart: Restarts | Mapping[str, Restarts] = None,
        filter: str | Filter | None = None,  # noqa: A002 - what it is
        fragments: int | Mapping[str, str] = 1,
        stagger: bool = True,
        delay: int = 0,
        mixing: float = 0.0,
        compression: str = "float32",
        group: SingleProcess | None = None,
        expect_equal: Mapping[str, Any] | None = None,
        buffers: str = "local",
    ) -> None:
        self.delay, self.mixing, self.stagger = whole_number("DiLoCo: delay", delay, 0), float(mixing), bool(stagger)
        self._inner_steps = whole_number("DiLoCo: inner_steps", inner_steps)
        if self.delay >= self._inner_steps:
            raise ValueError(f"DiLoCo: delay must be in [0, inner_steps), got {delay} with inner_steps={inner_steps}")
        if not 0 <= self.mixing < 1:
            raise ValueError(f"DiLoCo: mixing must be in [0, 1), got {mixing}")
        if compression not in COMPRESSIONS:
            raise ValueError(f"DiLoCo: compression must be one of {', '.join(COMPRESSIONS)}, got {compression!r}")
        self.compression, self.buffers, self.group = compression, buffers, group or default_group()
        self.filter = filter if filter is None or isinstance(filter, str) else getattr(filter, "__qualname__", "own")
        self.replicas: list[nn.Module] = [replicas] if isinstance(replicas, nn.Module) else list(replicas)
        if foreign := [replica for replica in self.replicas if not isinstance(replica, nn.Module)]:
            raise ValueError(f"DiLoCo: replicas must be a module or a list of modules, holds {foreign[0]!r:.80}")
        reshard(self.replicas)
        slots = [slots_of(replica) for replica in self.replicas]
        checks.check_replicas(self.replicas, slots, self.group, buffers)
        self.group.bind(next(iter(slots[0].values())).parameter.device)
        self.round = self.inner_step = self.taken = self.syncs = 0
        parts = partition({name: slot.parameter.numel() for name, slot in slots[0].items()}, fragments)
        self._build(slots, parts, filter, outer, restart)
        self._closed = ""  # or why no step may be taken
        self._met: tuple[str, int] | None = None
        self.after_sync: list[Callable[[], object]] = []
        self.replica_count = len(self.replicas) * self.group.size
        checks.assert_started_equal(self, expect_equal or {})
        self.group.broadcast(self.flat)
        broadcast_buffers(self)
        self._watch = Watch(self)
        self.restore()
        self._loads = state.Loads()
        state.note_loads(self)

    def __getstate__(self) -> Any:
        """Refuse to copy or pickle an engine."""
        raise TypeError("DiLoCo: an engine is not copied or pickled; build another, and load this one's state_dict()")

    def _build(
        self,
        slots: Sequence[Mapping[str, Any]],
        parts: Mapping[str, Sequence[str]],
        filters: str | Filter | None,
        outer: OuterChoice,
        restart: Restarts | Mapping[str, Restarts],
    ) -> None:
        """Make the fragments over one flat anchor, which holds the first replica's parameters."""
        policies = restart if isinstance(restart, Mapping) else dict.fromkeys(parts, restart)
        if different := policies.keys() ^ parts.keys():
            raise ValueError(f"DiLoCo: restart must name the fragments {[*parts]}, differs in {min(different)!r}")
        tensors = {name: slot.tensor() for name, slot in slots[0].items()}
        lengths = [sum(padded(tensors[name].numel()) for name in names) for names in parts.values()]
        if self.group.fault_of_shards("empty" if 0 in lengths else ""):
            raise ValueError("DiLoCo: fragments must have elements on every shard; take fewer or larger ones")
        dtype = torch.float64 if any(t.dtype == torch.float64 for t in tensors.values()) else torch.float32
        self.flat = torch.zeros(sum(lengths), dtype=dtype, device=next(iter(tensors.values())).device)
        # Codes are made in blocks. Fragments that are never reduced at the same time share the room.
        sizes = [-(-length // BLOCK) * BLOCK if self.compression != "float32" else length for length in lengths]
        shares_room = self.stagger and self.delay < self._inner_steps // len(parts)
        room = torch.zeros(max(sizes) if shares_room else sum(sizes), dtype=dtype, device=self.flat.device)
        rooms = [room[:size] for size in sizes] if shares_room else room.split(sizes)
        senders = len(self.replicas) if self.group.size == 1 else 1
        chosen = filter_of(filters, self.group.sum_over_shards if self.group.sharded else None)
        self.fragments: list[Fragment] = []
        for (name, names), anchor, gradient in zip(parts.items(), self.flat.split(lengths), rooms, strict=True):
            compression = None if self.compression == "float32" else Compression(self.compression, gradient, senders)
            of_replicas = [[by_name[name] for name in names] for by_name in slots]
            fragment = Fragment(name, of_replicas, anchor, gradient, compression, filter=chosen)
            torch._foreach_copy_(fragment.views, [tensors[name] for name in names])
            # A shared optimizer would step on gradients of others, too.
            fragment.outer = made = outer_optimizer(fragment.named, outer, policies[name])
            if self.group.sharded and "Muon" in checks.kind_of(made):
                raise ValueError("DiLoCo: outer must not be Muon, for parameters are sharded")
            self.fragments.append(fragment)
            number = len(self.fragments) if self.stagger else len(parts)
            fragment.offset = -(-number * self._inner_steps // len(parts))
        self.anchor: dict[str, Tensor] = {name: view for fragment in self.fragments for name, view in fragment.named}

    # ------------------------------------------------------------------------------------------------- the rounds

    def step(self, signals: Signals = None, *, weight: float | Sequence[float] | None = None) -> RoundReport | None:
        """Count one inner step of every replica; launch and complete the syncs that are due.

        Args:
            signals: values of this process by name, such as its mean training loss, for the report and for restart
                policies. They are read where a round ends, and averaged over the replicas; all ranks give the same
                names.
            weight: of this inner step, >= 0, such as its tokens; or one for each replica of this process. In the mean a
                replica counts by the sum over its round; None in all steps is alike.

        Returns:
            The report of the round that has just ended, or None inside a round.

        Raises:
            ValueError: a round ends and a signal that a restart policy needs is missing; nothing has happened.
        """
        ending = self.ending
        numbers, weights = checks.check_call(self, ending, signals), checks.weights_of(self, weight)
        self.inner_step, self.taken = self.inner_step + 1, self.taken + 1
        for fragment in self.fragments:
            fragment.count(weights)
        due = [fragment for fragment in self.fragments if fragment.offset == self.inner_step]
        halfway = [f for f in self.fragments if f.age == (self.delay + 1) // 2 and f.halfway]
        self.inner_step %= self._inner_steps
        checks.meet(self, "step", [*due, *ending, *halfway], numbers)
        for fragment in halfway:
            fragment.advance()
        self._launch(due)  # first, so that an error below leaves no rank with a collective fewer
        return self._complete(ending, numbers) if ending else None

    def finish(self, signals: Signals = None) -> RoundReport | None:
        """End the run: apply the all-reduces under way and synchronise the remaining progress; None without any.

        Afterwards every replica equals the anchor, for any mixing. Arguments as of `step`.
        """
        left = [f for f in self.fragments if f.steps or f.age is not None]
        numbers = checks.check_call(self, left, signals)
        is_first = self._met != ("finish", self.taken)  # else no rank may wait
        checks.meet(self, "finish", left, numbers)
        if is_first:
            self._watch.compare(self)
        reports = []
        for age in sorted({f.age for f in self.fragments if f.age is not None}, reverse=True):
            reports += [self._complete([f for f in self.fragments if f.age == age], numbers)]
        for fragment in self.fragments:
            if fragment.steps:
                self._launch([fragment])
                reports.append(self._complete([fragment], numbers))
        if self.mixing:
            self.restore()
        self.inner_step = 0
        if not reports:
            self._watch.tell([self._watch.news])  # the same on all ranks
            return None
        self.round = max(fragment.round for fragment in self.fragments)
        return replace(merged(reports), round=self.round, complete=True)

    @property
    def ending(self) -> list[Fragment]:
        """The fragments whose round the next `step()` ends, and which so reads the signals."""
        if self.delay:
            return [f for f in self.fragments if f.age is not None and f.age + 1 == self.delay]
        return [f for f in self.fragments if f.offset == self.inner_step + 1]

    def _launch(self, fragments: Sequence[Fragment]) -> None:
        if self._loads.weights is not None:
            state.tell_loads(self)
        if fragments:
            reshard(self.replicas)
        for fragment in fragments:
            fragment.launch(self.group)

    @torch.no_grad()
    def _complete(self, fragments: Sequence[Fragment], signals: Mapping[str, float]) -> RoundReport:
        """Wait for the sums, take the outer steps, set the replicas to the new anchor, and compare all ranks."""
        self._watch.before_sync(self)
        self._closed = checks.INTERRUPTED  # until all fragments have the new anchor, also by Ctrl-C
        for fragment in fragments:
            with fragment.phase("reduce"):
                fragment.complete(self.replica_count)
        means, dots = checks.share_inputs(self, fragments, signals)
        for number, fragment in enumerate(fragments):
            with fragment.phase("outer"):
                fragment.step(means, dots[number] if dots else None)
        self._watch.after_outer_steps(self, fragments)
        reshard(self.replicas)
        for fragment in fragments:
            with fragment.phase("restore"):
                fragment.restore(self.mixing)
            fragment.round, fragment.age = fragment.round + 1, None
            if self.mixing == 0:
                fragment.steps, fragment.weights = 0, None  # the progress during the delay is discarded
        self._closed = ""
        complete = fragments[-1] is self.fragments[-1]
        self.round, self.syncs = self.round + complete, self.syncs + 1
        reports = [self._report(fragment, means, complete) for fragment in fragments]
        checks.assert_equal_on_all_ranks(self, fragments, [report.checksum for report in reports])
        if complete and self.buffers == "mean":
            average_buffers(self)
        for refresh in self.after_sync:
            refresh()
        return merged(reports)

    def _report(self, fragment: Fragment, means: Mapping[str, float], complete: bool) -> RoundReport:
        with fragment.phase("checksum"):
            checksum = digest([fragment.anchor])
        whole = self._inner_steps - (self.delay if self.mixing == 0 else 0)  # a delay without mixing is discarded
        return RoundReport(
            round=self.round + (not complete),
            inner_steps=fragment.launched,
            partial=fragment.launched < whole,
            complete=complete,
            replicas=self.replica_count,
            restarted=fragment.restarted,
            fragments=(FragmentRound(fragment.name, fragment.round, fragment.launched, fragment.restarted, checksum),),
            groups=fragment.groups,
            pseudo_gradient_norm=fragment.norm,
            signals=means,
            bytes_sent=fragment.bytes_sent,
            seconds=fragment.seconds,
            checksum=checksum,
        )

    # -------------------------------------------------------------------------------------------------- the state

    @property
    def inner_steps(self) -> int:
        """Inner steps a round. Between two rounds another engine may go on with others from the `state_dict()`."""
        return self._inner_steps

    @property
    def outer(self) -> Optimizer:
        """The outer optimizer of a model in one fragment; of several each has `fragments[i].outer`."""
        (fragment,) = self.fragments
        return fragment.outer

    @property
    def at_anchor(self) -> bool:
        """True if the replicas equal the anchor: no inner step since the last sync, and no all-reduce under way."""
        return self.mixing == 0 and not any(f.steps or f.age is not None for f in self.fragments)

    @torch.no_grad()
    def restore(self) -> None:
        """Set all replicas to the anchor."""
        reshard(self.replicas)
        for fragment in self.fragments:
            fragment.restore()
        for refresh in self.after_sync:
            refresh()

    @contextmanager
    def anchored(self, number: int = 0) -> Iterator[nn.Module]:
        """Yield a replica with the anchor's parameters, for an evaluation; restore its own afterwards.

        Between the syncs of several fragments, or while an all-reduce is under way, no replica equals the anchor.
        Weights that were changed by hand come back, too. `step()` and `finish()` are refused inside.
        """
        reshard(self.replicas)
        params = [p for fragment in self.fragments for p in fragment.parameters()[number]]
        anchor, closed = [*self.anchor.values()], self._closed
        is_anchor = all(torch.equal(theta, a.to(theta)) for theta, a in zip(params, anchor, strict=True))
        before = params if is_anchor else [theta.clone() for theta in params]
        self._closed = checks.SHOWN
        try:
            torch._foreach_copy_(params, anchor)
            yield self.replicas[number]
        finally:
            self._closed = closed if self._closed == checks.SHOWN else self._closed  # a later engine's
            reshard(self.replicas)
            torch._foreach_copy_(params, before)

    def checksum(self) -> str:
        """Return the digest of the anchor, which all ranks share."""
        return digest([self.flat])

    def state_dict(self) -> dict[str, Any]:
        """Return anchor, outer optimizers and position, the same on every rank.

        Models, inner optimizers and, with compression, each rank's `residuals()` complete the run. It holds tensors,
        numbers and text only (`torch.load(weights_only=True)`). The tensors are live: save them before the next step,
        or clone them. It waits for an all-reduce under way; then call it on all ranks.
        """
        if self._closed == checks.INTERRUPTED or (self._closed == checks.SHOWN and not self.at_anchor):
            raise RuntimeError(self._closed)
        checks.meet(self, "state_dict", [fragment for fragment in self.fragments if fragment.halfway])
        spec = state.spec(self)
        if not self.at_anchor:
            spec |= {"rank": self.group.rank, "weights": state.weights(self)}
        counters = {name: getattr(self, name) for name in state.COUNTERS}
        fragments = [fragment.state_dict() for fragment in self.fragments]
        return {"anchor": self.flat, "spec": spec, "fragments": fragments, **counters}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`. Construct the engine first, then load it, the models and inner optimizers.

        As for every torch optimizer, the saved settings (lr, momentum, restart policy) replace the constructor's. A
        state in which the replicas were the anchor also sets them to it; weights from inside a round are set before, or
        after it by the modules' `load_state_dict`.

        Raises:
            ValueError: not an engine's state, or of another model, schedule or outer optimizer.
        """
        state.load(self, state_dict)

    def residuals(self) -> dict[str, Tensor]:
        """Return what this rank still owes by compression, (senders, numel) by fragment; see `state_dict`."""
        return {f.name: f.compression.residuals for f in self.fragments if f.compression is not None}

    def load_residuals(self, residuals: Mapping[str, Tensor]) -> None:
        """Continue from `residuals()`; those that it lacks become zero."""
        for name, residual in self.residuals().items():
            saved = residuals[name] if name in residuals else torch.zeros_like(residual)
            if saved.shape != residual.shape:
                raise ValueError(f"DiLoCo: residuals of {name} must be {[*residual.shape]}, got {[*saved.shape]}")
            residual.copy_(saved)
        self._loads.owes = False

    def check(self, inner: Optimizer | Sequence[Optimizer] = ()) -> tuple[str, ...]:
        """Return a sentence for each mistake of the loop that no error shows.

        `inner` is the inner optimizer, or one for each replica of this process, or several of a single replica.
        """
        return self._watch.check(self, list(inner) if isinstance(inner, Sequence) else [inner])

    def __repr__(self) -> str:
        """Return replicas, outer optimizer, restart, inner steps and round in a line."""
        outers = dict.fromkeys(text for fragment in self.fragments for text in checks.describe(fragment.outer))
        counts = f"{self.replica_count} replicas, {len(self.fragments)} fragments, {self.inner_steps} inner steps"
        return f"DiLoCo({counts}, {' | '.join(outers)}, round {self.round})"
