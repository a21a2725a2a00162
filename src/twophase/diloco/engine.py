"""`DiLoCo`: many inner steps alone, then one outer step together.

One round, with anchor a (the last agreed parameters) and R replicas theta_r over all processes:

    theta_r <- inner optimizer, `inner_steps` times           (the caller's loop)
    g = (1/R) sum_r (a - theta_r)                             one reduction of one flat buffer
    a <- outer optimizer (a, g)                               momentum, restarts
    theta_r <- a                                              the inner optimizer keeps its state

(16-bit replicas hold a rounded to their type, and their progress counts from there.)

With several fragments (streaming DiLoCo) each fragment has its own rounds, staggered over the inner steps. With a delay
the reduction runs while the replicas train on, and its result is mixed into their parameters:

    theta_r <- mixing theta_r + (1 - mixing) a

Source: DiLoCo (arXiv 2311.08105), algorithm 1; streaming DiLoCo (arXiv 2501.18512); the restart paper, section 2.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from twophase.diloco.agreement import same_start
from twophase.diloco.check import Watch
from twophase.diloco.communicator import Communicator
from twophase.diloco.fragment import Fragment
from twophase.diloco.report import RoundReport, merged
from twophase.diloco.setting import OuterChoice, Restarts, Schedule, Setting, Signals, check_kind, values_for
from twophase.diloco.state import EngineState
from twophase.diloco.sync import Sync
from twophase.optim.orthogonal import Filter


class DiLoCo(EngineState):
    """The engine: call `step()` once after every inner optimizer step.

        engine = DiLoCo(model, OuterRule(0.7, 0.9, nesterov=True), restart=Periodic(3), inner_steps=500)
        for batch in batches:
            ...                                  # forward, backward, inner.step(), inner.zero_grad()
            report = engine.step()               # a RoundReport when a round ends, else None
        engine.finish()                          # the last, shorter round

    A process may have one replica or several, alone or in a `torch.distributed` group; `step()` follows the inner steps
    of all of them. FSDP2 may shard a replica over processes (`ProcessGroup.of_mesh`). All start from process 0's first
    replica. Parameters that require a gradient take part. `check()` looks for mistakes of the loop; a warning names
    replicas that move alike in the first round, and rounds without any progress.

    The anchor is one flat buffer in float32 (float64 for float64 models); `anchor` maps names to views of it.

    Args:
        replicas: module, or list of modules with the same parameters, that train in this process.
        outer: `OuterRule`, a name (`"averaging"`, `"heavy-ball"`, `"nesterov"`, `"adamw"`, `"muon"`), or a policy that
            needs no rule, `"auto"`. A function from a fragment's named anchor parameters to a torch optimizer over
            them, or to several over parts of them, is allowed too.
        inner_steps: inner steps a round, >= 1 (S; H in DiLoCo papers).
        restart: policy of outer momentum restarts, or a mapping from fragment names to policies. Of another optimizer
            than a rule's the whole state begins anew (`Restarting`).
        filter: of the pseudo-gradient before the outer step: `"orthogonal"`, `"clip:1"` (a norm), or a function that
            changes a fragment's pseudo-gradients by name in place, equally on all processes (`optim.orthogonal`).
        fragments: number of fragments, >= 1, or a mapping from names to patterns; see `fragment.partition`.
        stagger: True spreads the fragments' syncs evenly over a round; False has all at its end.
        delay: inner steps between the launch of a reduction and its application, >= 0, < inner_steps.
        mixing: share of a replica's own parameters that stays when the new anchor is applied, in [0, 1).
        wire: number format of pseudo-gradients in transit: "float32" (the buffers' own type), "bfloat16" or "int8",
            which has error feedback.
        communicator: processes of the run; None means the default torch.distributed group where one is initialised.
        signals: names of the values that `step(signals=...)` will get; a restart policy that needs more is refused.
        alike: other facts that all processes must have been started with, by the words that name them (JSON values).
        buffers: "mean" averages float buffers, as of BatchNorm, once a round over all replicas; else "local".

    Raises:
        ValueError: no trainable parameters, replicas that differ, parameters on several devices, an argument outside
            its range, or a restart policy that needs other values.
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
        wire: str = "float32",
        communicator: Communicator | None = None,
        signals: Collection[str] = (),
        alike: Mapping[str, Any] | None = None,
        buffers: str = "local",
    ) -> None:
        self.schedule, self.wire = Schedule(inner_steps, stagger, delay, mixing), wire
        self.filter = filter if filter is None or isinstance(filter, str) else getattr(filter, "__qualname__", "own")
        if communicator is None:
            from twophase.diloco.comm import default_communicator  # noqa: PLC0415 - torch may lack process groups

            communicator = default_communicator()
        self.communicator: Communicator = communicator
        self.replicas: list[nn.Module] = [replicas] if isinstance(replicas, nn.Module) else list(replicas)
        self._watch = Watch(buffers, self.replicas, self.communicator)
        self._setting = Setting(
            self.replicas,
            self.communicator,
            self.schedule,
            outer=outer,
            restart=restart,
            filter=filter,
            fragments=fragments,
            wire=wire,
            alike={**self._watch.alike, **(alike or {}), "filters": self.filter},
        )
        self.fragments = self._setting.fragments
        self.anchor: dict[str, Tensor] = {name: view for f in self.fragments for name, view in f.named}
        self.replica_count = sum(same_start(self.communicator, self._setting.describe(), len(self.replicas)))
        self.communicator.broadcast(self._setting.anchor)
        self.round = self.inner_step = self.taken = self.syncs = 0
        self._under_way = []
        self._setting.promise(signals)
        self._setting.restore()

    def __repr__(self) -> str:
        """Return replicas, rule, restart, inner steps and round in a line."""
        outers = dict.fromkeys(text for fragment in self.fragments for text in fragment.describe_outer())
        parts = [
            f"{self.replica_count} {'replica' if self.replica_count == 1 else 'replicas'}",
            *([f"{len(self.fragments)} fragments"] if len(self.fragments) > 1 else []),
            " | ".join(outers),
            f"{self.inner_steps} inner steps a round",
            f"round {self.round}",
        ]
        return f"DiLoCo({', '.join(parts)})"

    def description(self) -> dict[str, Any]:
        """Return the facts that all processes must share, by the words that name them."""
        return self._setting.describe()

    @property
    def outer(self) -> Optimizer:
        """The outer optimizer of a model in one fragment; of several each has `fragments[i].outer`."""
        if len(self.fragments) > 1:
            raise ValueError("DiLoCo: outer is the optimizer of a single fragment; of several, take fragments[i].outer")
        return self.fragments[0].outer

    # ---------------------------------------------------------------------------------------------------- the rounds

    def step(self, signals: Signals = None) -> RoundReport | None:
        """Count one inner step of every replica; launch and complete the syncs that are due.

        Args:
            signals: values of this process, such as its mean training loss, for the report and for restart policies
                that need them. They are read where a round ends, and averaged over the replicas; all processes give
                the same names.

        Returns:
            The report of the round that has just ended, or None inside a round.

        Raises:
            ValueError: a round ends, and a signal is missing that a restart policy needs; nothing has happened.
            An interrupt before the outer step: the sync is undone, and the next one takes its progress. After an
                interrupt inside the outer step the engine refuses to continue.
        """
        check_kind(signals)  # in every step, and not only where a round ends
        self._setting.check_whole()
        due, ending = self._due(), self._ending()
        values = values_for(ending, signals) if ending else {}
        delay, following = self.schedule.delay, self.inner_step + 1
        self.inner_step, self.taken = following if following < self.inner_steps else 0, self.taken + 1
        for fragment in self.fragments:
            fragment.steps += 1
        report = None
        for sync in list(self._under_way):
            sync.age += 1
            if sync.age == delay:
                self._under_way.remove(sync)
                report = self._complete(sync, values)
            elif sync.age == (delay + 1) // 2:
                sync.advance()
        if due and delay:
            self._under_way.append(self._launch(due, blocking=False))
        elif due:
            report = self._complete(self._launch(due), values)
        return report

    def finish(self, signals: Signals = None) -> RoundReport | None:
        """End the run: apply the reductions under way and synchronise the remaining progress; None without any.

        Afterwards every replica equals the anchor, for any mixing.

        Args:
            signals: values as for `step`.

        Raises:
            ValueError: a signal is missing that a restart policy needs; call it again with all of them.
        """
        check_kind(signals)
        self._setting.check_whole()
        reports: list[RoundReport] = []
        while self._under_way:
            values = values_for(self._under_way[0].fragments, signals)
            reports.append(self._complete(self._under_way.pop(0), values))
        for fragment in [f for f in self.fragments if f.steps > 0]:
            values = values_for([fragment], signals)
            reports.append(self._complete(self._launch([fragment]), values))
        if self.schedule.mixing:
            self._setting.restore()
        self.inner_step = 0
        if not reports:
            return None
        self.round = max(fragment.round for fragment in self.fragments)
        return replace(merged(reports), round=self.round, complete=True)

    def _launch(self, fragments: list[Fragment], *, blocking: bool = True) -> Sync:
        """Begin a sync of these fragments; `blocking` if no inner step comes before its end."""
        with torch.no_grad():
            return Sync.launch(self._setting, fragments, self.replica_count, blocking=blocking)

    def _complete(self, sync: Sync, signals: Mapping[str, float]) -> RoundReport:
        """Wait for the sums, take the outer steps, and set the replicas to the new anchor."""
        with torch.no_grad():
            try:
                self._watch.begin(self)
                sync.receive(signals)
                sync.apply()
            except BaseException:  # Ctrl-C
                sync.withdraw()  # nothing where its outer step has begun
                raise
            complete = sync.fragments[-1] is self.fragments[-1]
            self.round += complete
            self.syncs += 1
            number, full = self.round + (not complete), self.schedule.full()
            return self._watch.end(self, sync.report(number, complete=complete, full=full))

    def check(self, inner: Optimizer | Sequence[Optimizer] = (), *, strict: bool = False) -> tuple[str, ...]:
        """Return a sentence for each mistake of the loop that no error shows (`twophase.diloco.check`).

        Args:
            inner: inner optimizer, or one for each replica of this process; several of a single replica.
            strict: True raises a ValueError where there are mistakes.
        """
        return self._watch.check(self, [inner] if isinstance(inner, Optimizer) else list(inner), strict=strict)

    # -------------------------------------------------------------------------------------------------- the schedule

    @property
    def inner_steps(self) -> int:
        """Inner steps a round; a sweep changes them where runs of different rounds part."""
        return self.schedule.inner_steps

    @inner_steps.setter
    def inner_steps(self, count: int) -> None:
        schedule = replace(self.schedule, inner_steps=count)
        gap = schedule.gap(len(self.fragments))
        if gap <= schedule.delay < self._setting.gap:  # else two reductions would write into the same buffer
            raise ValueError(
                f"DiLoCo: at inner_steps = {count} the fragments' syncs lie {gap} inner steps apart, and delay is "
                f"{schedule.delay}. Build the engine with these inner_steps, or take more of them"
            )
        self.schedule = schedule
        for fragment in self.fragments:
            fragment.offset = self.schedule.offset(fragment.number, len(self.fragments))

    def _due(self) -> list[Fragment]:
        """Return the fragments whose pseudo-gradient the next `step()` takes."""
        return [fragment for fragment in self.fragments if fragment.offset == self.inner_step + 1]

    def _ending(self) -> list[Fragment]:
        """Return the fragments whose round the next `step()` ends."""
        if delay := self.schedule.delay:
            return [f for sync in self._under_way if sync.age + 1 == delay for f in sync.fragments]
        return self._due()

    @property
    def reports_next(self) -> bool:
        """True if the next `step()` ends a round, and so reads the signals."""
        return bool(self._ending())
