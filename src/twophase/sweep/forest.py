"""Many runs as one walk: inner steps that several runs share are taken once, and the state is forked where they part.

A forest (`twophase.sweep.plan`) is walked depth first in one process on one device, with one set of replicas. At
a branch the state is copied; the smallest branch goes first and the largest last, which then needs no copy any more, so
at most log2(runs) + 1 states are held at a time. On a GPU copies stay there while its memory lasts, and go to main
memory after that; those beyond a limit go to disk. Now and then everything that is not on disk yet is written there, so
a walk that is killed loses no more work than lies between two such saves.

While several runs share a stretch they share replicas and anchor, but not their momentum buffers: a period of 2 and no
restart take the same first two updates and forget differently after the second. So every *class* of runs, those of one
rule, buffer and restart event, takes its own outer step, the first on the anchor itself and the others on a scratch
copy of it, which must come out with the same bits. That check holds the plan to its word, at every shared round.

A run that can share nothing (`TrainConfig.shares_steps`) is a tree by itself. It is trained as `twophase train` would,
with checkpoints in its own folder.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from twophase.base.config import UsageError
from twophase.base.files import TEMPORARY, write_atomic
from twophase.diloco.comm import SingleProcess
from twophase.diloco.report import RoundReport
from twophase.optim.outer import BUFFER, COUNTERS, OuterSGD
from twophase.policies.base import Answer, RestartPolicy, RoundSignal, ask
from twophase.rule import OuterRule
from twophase.sweep.history import ABSENT, ZERO, bits
from twophase.training import checkpoint
from twophase.training.config import TrainConfig
from twophase.training.train import Recorder, train
from twophase.training.trainer import DIVERGED, RUNNING, STOPPED, Progress, Trainer, round_line

State = dict[str, Any]
"""Everything that a stretch of inner steps starts from; `torch.load(weights_only=True)` reads it."""
_FORMAT = 5


class Node(Protocol):
    """A stretch of inner steps that several runs share; see `twophase.sweep.plan.Node`."""

    @property
    def id(self) -> str: ...  # noqa: D102 - as there
    @property
    def parent(self) -> str | None: ...  # noqa: D102
    @property
    def start(self) -> int: ...  # noqa: D102
    @property
    def stop(self) -> int: ...  # noqa: D102
    @property
    def runs(self) -> tuple[str, ...]: ...  # noqa: D102


class Tree(Protocol):
    """The nodes; see `twophase.sweep.plan.Forest`."""

    @property
    def nodes(self) -> Mapping[str, Any]: ...  # noqa: D102
    @property
    def total(self) -> Mapping[str, int]: ...  # noqa: D102
    def below(self, node: Any) -> Sequence[Any]: ...  # noqa: D102


class Place(Protocol):
    """Where the runs are written."""

    def finished(self, run: str) -> bool:
        """Whether the run is finished and need not be done again."""
        ...

    def claim(self, run: str) -> AbstractContextManager[Recorder]:
        """The run's folder, for this process alone."""
        ...


class Stopped(Exception):  # noqa: N818 - no error: it was asked for
    """The walk was asked to stop; what it had is on disk."""


@dataclasses.dataclass(slots=True)
class Tally:
    """What a walk has done.

    Args:
        steps: inner steps executed.
        step_seconds: duration of each; on a GPU, which does them later, the mean of each round.
        held: branch states in main memory now.
        held_bytes: their size.
        on_device: branch states in a GPU's memory now; on a CPU there are none.
        device_bytes: their size.
        most_held: branch states in either memory at once so far.
        spilled: branch states that were kept on disk only, because of the limit.
        restored: times that a branch state was taken up again, from memory or disk.
    """

    steps: int = 0
    step_seconds: list[float] = dataclasses.field(default_factory=list)
    held: int = 0
    held_bytes: int = 0
    on_device: int = 0
    device_bytes: int = 0
    most_held: int = 0
    spilled: int = 0
    restored: int = 0

    def count(self, size: int, *, on_device: bool, sign: int) -> None:
        """Count a state of so many bytes that is held from now on (sign 1), or not any more (-1)."""
        if on_device:
            self.on_device += sign
            self.device_bytes += sign * size
        else:
            self.held += sign
            self.held_bytes += sign * size
        self.most_held = max(self.most_held, self.held + self.on_device)


def free_memory(device: torch.device) -> int:
    """Bytes of a GPU's memory that copies may take; none of a CPU, whose memory is counted by states.

    What a step has needed beside the parameters at its peak is left to it, and a tenth of the memory, for a longer
    evaluation, another process, or an allocator whose free pieces are too small.
    """
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    peak, allocated = torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
    return free + torch.cuda.memory_reserved(device) - peak - total // 10 if peak > allocated else 0


@dataclasses.dataclass(slots=True)
class _Branch:
    """The end of a node whose children are being walked: how many are left, and the state, unless it was spilled."""

    node: Node
    left: int
    state: State | None = None
    size: int = 0
    on_device: bool = False
    saved: bool = False


class Grower:
    """Walks a forest, or pieces of one.

    Args:
        tree: the nodes.
        configs: from run id to configuration, for every run of the tree.
        place: where the runs are written.
        states: folder of the states on disk.
        in_memory: branch states held in main memory at most; those beyond are read back from disk.
        save_seconds: time between saves, and so about the most work that a kill can undo.
        should_stop: asked after every inner step; true saves the state and raises `Stopped`.
        on_progress: called with a line of text a few times a minute at most.
        free: bytes of a device's memory that copies of states may take.
    """

    def __init__(
        self,
        tree: Tree,
        configs: Mapping[str, TrainConfig],
        place: Place,
        states: Path,
        *,
        in_memory: int = 8,
        save_seconds: float = 60.0,
        should_stop: Callable[[], bool] = lambda: False,
        on_progress: Callable[[str], None] = lambda _: None,
        free: Callable[[torch.device], int] = free_memory,
    ) -> None:
        self.tree = tree
        self.configs = configs
        self.place = place
        self.states = states
        self.in_memory = in_memory
        self.save_seconds = save_seconds
        self.should_stop = should_stop
        self.on_progress = on_progress
        self.free = free
        self.tally = Tally()
        self._trainer: Trainer | None = None
        self._scratch: OuterSGD | None = None
        self._branches: list[_Branch] = []
        """Those whose state is held."""
        self._saved_at = time.perf_counter()
        self._clear()

    def grow(self, name: str, *, deep: bool = True) -> None:
        """Do a node, and with `deep` everything below it; what is finished or saved is not done again.

        Args:
            name: id of the node. What lies above it is read from disk, or done again if it is not there.
            deep: go on to the leaves; otherwise end with the state at the node's end on disk.

        Raises:
            Stopped: `should_stop` said so.
            UsageError: a run's folder cannot be claimed.
        """
        self.states.mkdir(parents=True, exist_ok=True)
        self._saved_at = time.perf_counter()
        node: Node = self.tree.nodes[name]
        if deep:
            self._walk(node)
        elif self._left(node):
            self._reach(node)
            self._keep_end(node)  # other jobs go on from there
        above: Node | None = node
        while above is not None and not self._left(above):  # the last job below a node tidies it up
            self._forget(above)
            above = None if above.parent is None else self.tree.nodes[above.parent]

    def _walk(self, node: Node) -> None:
        """A node and everything below it, depth first."""
        failed: Exception | None = None
        self._branches.clear()
        waiting: list[tuple[Node, _Branch | None]] = [(node, None)]
        while waiting:
            node, branch = waiting.pop()
            if branch is not None and node is branch.node:  # its children are done
                self._forget(node)
                continue
            state = self._leave(branch) if branch is not None else None
            if not self._left(node):
                continue
            if not self.tree.below(node):
                failed = self._try_leaf(node, state) or failed
                continue
            children = sorted(self._open(node), key=self._size)
            if len(children) > 1 or not self._begun(children[0]):
                self._reach(node, state)
            branch = _Branch(node, len(children))
            waiting.append((node, branch))
            waiting += [(child, branch) for child in reversed(children)]
            if len(children) > 1:
                self._hold(branch)
        if failed is not None:
            raise failed

    def _try_leaf(self, node: Node, state: State | None) -> Exception | None:
        """Do a leaf; one that cannot be done, say for what lies in its folder, must not take its siblings with it."""
        try:
            if self.configs[node.runs[0]].shares_steps:
                self._reach(node, state)
            else:
                self._train(node.runs[0])
        except (Stopped, OSError):  # with a full disk the next one would fare no better
            raise
        except Exception as error:
            self._at = None
            error.add_note(f"run {', '.join(node.runs)}")
            return error
        self._forget(node)
        return None

    def _train(self, run: str) -> None:
        """A run that shares nothing, from its newest checkpoint to its end."""
        self._trainer = self._scratch = None  # it makes replicas of its own, and the memory may not hold both
        self._clear()
        with self.place.claim(run) as folder:
            before, clock = checkpoint.latest_step(folder.checkpoint_dir) or 0, time.perf_counter()
            summary = train(self.configs[run], folder, should_stop=self.should_stop)
        steps = summary["steps"] - before
        self.tally.steps += steps
        self.tally.step_seconds += steps * [(time.perf_counter() - clock) / max(steps, 1)]
        if summary["exit_reason"] == STOPPED:
            raise Stopped

    # --------------------------------------------------------------------------------------------------- branches

    def _open(self, node: Node) -> list[Node]:
        """The children of a node that are not done."""
        return [child for child in self.tree.below(node) if self._left(child)]

    def _begun(self, node: Node) -> bool:
        """Whether a state on disk lies inside or below a node, so that its parent's end is of no use any more."""
        if any(self._path(node, what).exists() for what in ("end", "part")):
            return True
        children = self._open(node)
        return len(children) == 1 and self._begun(children[0])

    def _left(self, node: Node) -> list[str]:
        """The runs below a node that are not finished."""
        return [run for run in node.runs if not self.place.finished(run)]

    def _size(self, node: Node) -> tuple[int, int]:
        """By runs, which bounds the states held by the logarithm of their number; then by inner steps."""
        return len(node.runs), self.tree.total[node.id]

    def _hold(self, branch: _Branch) -> None:
        """Keep the present state for the children that come after the first one."""
        branch.saved = self._path(branch.node, "end").exists()
        state = self._state()
        size = _size_bytes(state)
        if size <= self.free(self._run.replicas[0].device):
            # A round of a small model takes less than a copy of its state through main memory.
            with suppress(torch.OutOfMemoryError):  # in pieces that are too small
                branch.state, branch.on_device = _cloned(state), True
        if branch.state is None:
            if self.tally.held >= self.in_memory:
                self.tally.spilled += 1
                self._keep_end(branch.node)
                return
            branch.state = _cloned(state, "cpu")
        branch.size = size
        self._branches.append(branch)
        self.tally.count(size, on_device=branch.on_device, sign=1)

    def _leave(self, branch: _Branch) -> State | None:
        """The state for the next child: None if the replicas stand there already or it must be read from disk."""
        branch.left -= 1
        state = branch.state
        if state is not None and branch.left == 0:
            branch.state = None
            self._branches.remove(branch)
            self.tally.count(branch.size, on_device=branch.on_device, sign=-1)
        elif state is not None and self._at != branch.node.id:
            state = _cloned(state)  # others need it too
        return None if self._at == branch.node.id else state

    # --------------------------------------------------------------------------------------------------- stretches

    def _reach(self, node: Node, start: State | None = None) -> None:
        """Bring replicas, anchor and buffers to the end of a node.

        Args:
            node: the node.
            start: the state at its parent's end, where it is at hand.
        """
        runs = self._left(node)
        saved = self._read(node, "end", runs)
        if saved is not None:
            self._restore(saved, node)
            return
        self._path(node, "end").unlink(missing_ok=True)  # what lies there is torn, or of other runs
        saved = self._read(node, "part", runs)
        if saved is not None:
            self._restore(saved, node)
        elif node.parent is None:
            self._begin(node)
        elif self._at != node.parent or not set(runs) <= set(self._counters):
            parent = self.tree.nodes[node.parent]
            if start is None:
                self._reach(parent)
                self._keep_end(parent)  # another job has lost it, and others may look for it
            else:
                self._restore(start, parent)
        self._stretch(node, runs)

    def _stretch(self, node: Node, runs: list[str]) -> None:
        """From the end of the parent, or from inside the stretch, to its end."""
        run = self._run
        self._at = self._launched = None
        # Those that are done with this stretch only: a state must not speak for others, whose counters stand still.
        self._counters = {one: self._counters[one] for one in runs}
        self._held = {one: self._held[one] for one in runs}
        # The runs of a node differ in the outer optimizer only, or have had no round yet.
        run.config = self.configs[max(runs, key=lambda one: self.configs[one].inner_steps)]
        run.engine.inner_steps = run.config.inner_steps
        leaf = not self.tree.below(node)
        before, started = run.done.seconds, time.perf_counter()
        with ExitStack() as claims:
            logs = {one: self._log(claims, one) for one in runs} if leaf else {}
            if run.done.step == node.start > 0:
                self._synchronize(runs, logs)
            while run.done.step < node.stop and run.done.exit_reason == RUNNING:
                self._inner_step(node)
                if run.done.step < node.stop or leaf:
                    self._synchronize(runs, logs)
                now = time.perf_counter()
                run.done.seconds = before + now - started
                if run.done.step == node.stop or run.done.exit_reason != RUNNING:
                    break
                stopping = self.should_stop()
                if stopping or now - self._saved_at > self.save_seconds:
                    self._save(node, "part")
                    self.on_progress(self._progress_text(node))
                if stopping:
                    raise Stopped
            run.done.seconds = before + time.perf_counter() - started
            if leaf:
                self._finish(logs)
        if run.done.exit_reason == DIVERGED:
            for one in runs:  # below a shared stretch all of them have diverged
                if not self.place.finished(one):
                    with ExitStack() as claims:
                        self._finish({one: self._log(claims, one)})
        self._at = node.id
        if leaf or run.done.exit_reason != RUNNING:
            self._path(node, "part").unlink(missing_ok=True)
        elif time.perf_counter() - self._saved_at > self.save_seconds:
            self._save(node, "end")

    def _inner_step(self, node: Node) -> None:
        """One inner step and its duration; a GPU does it later, and is waited for at the end of a round."""
        run = self._run
        self._launched = self._launched or (0, time.perf_counter())
        count, clock = self._launched[0] + 1, self._launched[1]
        self._launched = count, clock
        run.inner_step()
        self.tally.steps += 1
        ends = run.engine.inner_step + 1 >= run.engine.inner_steps or run.done.step == node.stop
        if ends or run.compute.device.type == "cpu":
            run.settle()
            self.tally.step_seconds += count * [(time.perf_counter() - clock) / count]
            self._launched = None

    def _synchronize(self, runs: list[str], logs: Mapping[str, Recorder]) -> None:
        """Count an inner step; at the end of a round take the outer step of every class of runs, and log it."""
        run, engine = self._run, self._run.engine
        if engine.inner_step + 1 < engine.inner_steps and run.done.step < run.config.steps:
            run.synchronize()
            return
        number = engine.round + 1
        classes = self._classes(runs, number)
        before = [view.clone() for view in engine.anchor.values()] if len(classes) > 1 else []
        report: RoundReport | None = None
        buffers: dict[str, list[Tensor]] = {}
        rounds: list[list[Any]] = []
        for members in classes:
            if report is None:
                outer = cast("OuterSGD", engine.outer)
                self._load(outer, members[0])
                report = one = run.synchronize()
                assert report is not None
            else:
                outer = self._try(before, members[0], report.signals)
                groups = tuple(outer.last_round)
                whether = any(group.restarted for group in groups)
                parts = tuple(dataclasses.replace(part, restarted=whether) for part in report.fragments)
                one = dataclasses.replace(report, groups=groups, restarted=whether, fragments=parts)
            assert one is not None
            rounds.append([members if len(classes) > 1 else None, round_line(one, run.done.step)])
            self._keep(outer, members, number, buffers)
        assert report is not None
        self._buffers = buffers
        entry = {"metrics": run.end_round(report), "rounds": rounds}
        self._lines.append(entry)
        for one, log in logs.items():
            _write_line(log, entry, one)

    # ------------------------------------------------------------------------------------------------ outer states

    def _classes(self, runs: list[str], number: int) -> list[list[str]]:
        """The runs by what their outer optimizers do in this round: rule, buffer and restart."""
        found: dict[Any, list[str]] = {}
        for run in runs:
            outer, counters = self.configs[run].outer, self._counters[run]
            policy = outer.policy()
            if policy.needs:
                happening: Any = (policy, repr(counters))
            else:
                answer = _counted(outer.rule(), policy, counters, number)[1]
                happening = (answer.restart, answer.step)
            found.setdefault((outer.rule(), self._held[run], happening), []).append(run)
        return list(found.values())

    def _load(self, outer: OuterSGD, run: str) -> None:
        """Make an optimizer that of a run: its rule, policy, counters and buffer."""
        config = self.configs[run].outer
        (group,) = outer.param_groups
        rule = dataclasses.asdict(config.rule())
        group.update(rule | {"restart": str(config.policy())} | self._counters[run])
        held = self._buffers.get(self._held[run])
        for index, param in enumerate(group["params"]):
            if held is None:
                outer.state[param].pop(BUFFER, None)
            else:
                outer.state[param][BUFFER] = held[index].clone()  # others may hold the same one

    def _keep(self, outer: OuterSGD, members: list[str], number: int, buffers: dict[str, list[Tensor]]) -> None:
        """Take counters and buffer back after a class's outer step."""
        (group,) = outer.param_groups
        for run in members:
            policy = self.configs[run].outer.policy()
            if policy.needs:
                self._counters[run] = {key: group[key] for key in (*COUNTERS, "policy_state")}
            else:
                rule = self.configs[run].outer.rule()
                self._counters[run] = _counted(rule, policy, self._counters[run], number)[0]
            name = self._held[run] = self._names(run)[number - 1]
            if name not in (ABSENT, ZERO) and name not in buffers:
                buffers[name] = [outer.state[param][BUFFER] for param in group["params"]]
        for param in group["params"]:
            outer.state[param].pop(BUFFER, None)  # it belongs to `buffers` now

    def _try(self, before: list[Tensor], run: str, signals: Mapping[str, float]) -> OuterSGD:
        """Another class's outer step, on a scratch copy of the anchor, which must come out as the anchor has.

        At momentum 0 its policy may need signals, although they change nothing but the count of its restarts.
        """
        anchor = list(self._run.engine.anchor.values())
        if self._scratch is None:
            self._scratch = OuterSGD([torch.empty_like(view) for view in anchor], lr=0.0)
        params = self._scratch.param_groups[0]["params"]
        for param, old, view in zip(params, before, anchor, strict=True):
            param.copy_(old)
            param.grad = view.grad
        self._load(self._scratch, run)
        self._scratch.step(measure=True, signals=signals)
        if not all(_same(ours, theirs) for ours, theirs in zip(params, anchor, strict=True)):
            raise RuntimeError(
                f"forest: run {run} does not take the update of the runs that it should share this round with: a fault "
                "of the plan; please report it with the sweep's plan.json"
            )
        return self._scratch

    def _names(self, run: str) -> list[str]:
        """The name of a run's buffer after each round."""
        if run not in self._named:
            config = self.configs[run]
            history = bits(config.outer.rule(), config.outer.policy(), config.rounds, config.probed)
            self._named[run] = [one.buffer for one in history]
        return self._named[run]

    # --------------------------------------------------------------------------------------------------------- runs

    def _log(self, claims: ExitStack, run: str) -> Recorder:
        """Claim a run's folder and write what has happened so far."""
        log = claims.enter_context(self.place.claim(run))
        log.write_env(self._run.environment())
        log.rewind({})
        for entry in self._lines:
            _write_line(log, entry, run)
        return log

    def _finish(self, logs: Mapping[str, Recorder]) -> None:
        """Write the outcome of runs that have ended here."""
        outcome = self._run.outcome()
        for run, log in logs.items():
            write_atomic(log.weights, self._run.weights(self.configs[run]))
            log.finish(outcome | self._run.summary(self._counters[run]["restarts"]))

    # ------------------------------------------------------------------------------------------------------- states

    @property
    def _run(self) -> Trainer:
        assert self._trainer is not None
        return self._trainer

    def _clear(self) -> None:
        self._launched: tuple[int, float] | None = None
        """Inner steps that have not been waited for yet, and when the first was launched."""
        self._at: str | None = None
        """Node at whose end the replicas stand."""
        self._buffers: dict[str, list[Tensor]] = {}
        self._held: dict[str, str] = {}
        self._counters: dict[str, dict[str, Any]] = {}
        self._lines: list[dict[str, Any]] = []
        self._named: dict[str, list[str]] = {}

    def _begin(self, node: Node) -> None:
        """A new tree: fresh replicas."""
        self._trainer, self._scratch = Trainer(self.configs[node.runs[0]], SingleProcess()), None
        self._clear()
        for run in node.runs:
            initial = self.configs[run].outer.policy().initial_state()
            self._counters[run] = dict.fromkeys(COUNTERS, 0) | {"policy_state": initial}
            self._held[run] = ABSENT

    def _state(self) -> State:
        """Everything, live: clone it or write it before the next step."""
        run = self._run
        run.settle()
        engine = run.engine.state_dict()
        engine["fragments"][0]["outer"]["state"] = {}  # the buffers are ours
        return {
            "format": _FORMAT,
            "text": run.text,
            "replicas": [replica.state_dict() for replica in run.replicas],
            "engine": engine,
            "wire": run.engine.wire_state_dict(),
            "buffers": self._buffers,
            "held": dict(self._held),
            "counters": dict(self._counters),
            "done": dataclasses.asdict(run.done),
            "execution": run.execution,
            "lines": list(self._lines),
        }

    def _restore(self, state: State, node: Node) -> None:
        """Continue from a state, which is ours from now on, at the end of a node or inside it."""
        first = self.configs[node.runs[0]]
        if self._trainer is None or _trunk(self._trainer.config) != _trunk(first):
            self._trainer, self._scratch = Trainer(first, SingleProcess()), None
            self._named = {}
        run = self._trainer
        if state["text"] != run.text:
            raise UsageError("the text is not the one that this sweep began with; put it back or choose another --out")
        run.engine.inner_steps = max(self.configs[one].inner_steps for one in node.runs)
        run.engine.load_state_dict(state["engine"])
        run.engine.load_wire_state_dict(state["wire"])
        for replica, saved in zip(run.replicas, state["replicas"], strict=True):
            replica.load_state_dict(saved)
        run.done, run.validation = Progress(**state["done"]), None
        run.restore_execution(state["execution"])
        device = run.replicas[0].device
        self._buffers = {name: [part.to(device) for part in parts] for name, parts in state["buffers"].items()}
        self._held, self._counters = state["held"], state["counters"]
        self._lines = state["lines"]
        self._at = node.id if run.done.step == node.stop else None
        self.tally.restored += 1

    def _path(self, node: Node, what: str) -> Path:
        return self.states / f"{node.id}.{what}.pt"

    def _save(self, node: Node, what: str) -> None:
        """Write the present state and all that are held in memory only: from these any child goes on.

        Finished runs are on disk already, so nothing that was done before would be done again.
        """
        for branch in self._branches:
            if branch.state is not None and not branch.saved:
                self._write(branch.node, "end", branch.state)
                branch.saved = True
        self._write(node, what, self._state())
        self._saved_at = time.perf_counter()

    def _keep_end(self, node: Node) -> None:
        """See that the state at a node's end, where the replicas stand, is on disk."""
        if self._at == node.id and self._run.done.exit_reason == RUNNING and not self._path(node, "end").exists():
            self._write(node, "end", self._state())

    def _write(self, node: Node, what: str, state: State) -> None:
        path = self._path(node, what)
        # A kill leaves the page cache as it is, so no fsync; a torn file after a power cut is read as none at all.
        temporary = path.with_name(f"{TEMPORARY}{path.name}-{os.getpid()}-{secrets.token_hex(4)}")
        try:
            torch.save(state, temporary)
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        if what == "end":
            self._path(node, "part").unlink(missing_ok=True)

    def _read(self, node: Node, what: str, runs: Sequence[str]) -> State | None:
        """A saved state that covers the runs, or None."""
        path = self._path(node, what)
        if not path.exists():
            return None
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # whatever is wrong with it, it can be made again
            self.on_progress(f"{path.name} cannot be read ({error}); that part is done again")
            return None
        if state.get("format") != _FORMAT or not set(runs) <= set(state["counters"]):
            return None
        return state

    def _forget(self, node: Node) -> None:
        """Everything below a node is done: its states are of no use any more."""
        for what in ("end", "part"):
            self._path(node, what).unlink(missing_ok=True)

    def _progress_text(self, node: Node) -> str:
        tally, run = self.tally, self._run
        return (
            f"step {run.done.step} of {node.start}..{node.stop} for {len(node.runs)} runs; holding {tally.held} states "
            f"in memory ({tally.held_bytes / 2**20:.0f} MiB) and {tally.on_device} on the GPU "
            f"({tally.device_bytes / 2**20:.0f} MiB), at most {tally.most_held} at once; {tally.spilled} spilled"
        )


def _counted(
    rule: OuterRule, policy: RestartPolicy, counters: Mapping[str, Any], number: int
) -> tuple[dict[str, Any], Answer]:
    """A scheduled policy's counters after a round, as `OuterSGD` keeps them, and its answer."""
    age = counters["rounds_since_restart"] + 1
    answer = ask(policy, counters["policy_state"], RoundSignal(number, age, rule=rule))
    restarts = counters["restarts"] + answer.restarted
    after = {"rounds": number, "rounds_since_restart": answer.age(age), "restarts": restarts}
    return after | {"policy_state": answer.state}, answer


def _write_line(log: Recorder, entry: Mapping[str, Any], run: str) -> None:
    """A round's lines in a run's logs."""
    line = next(line for runs, line in entry["rounds"] if runs is None or run in runs)
    log.log_round(line)
    log.log_metrics(entry["metrics"])


def _trunk(config: TrainConfig) -> TrainConfig:
    """What the runs of a tree have in common."""
    plain = TrainConfig()
    return dataclasses.replace(config, outer=plain.outer, inner_steps=1)


def _same(ours: Tensor, theirs: Tensor) -> bool:
    return torch.equal(ours, theirs) or bool(((ours == theirs) | (ours.isnan() & theirs.isnan())).all())


def _cloned(value: Any, device: str | None = None) -> Any:
    """A copy of a state, on a device or where each tensor lies; plain values and finished lines are shared.

    They never change.
    """
    if isinstance(value, Tensor):
        return value.clone() if device is None else value.to(device, copy=True)
    if isinstance(value, dict):
        return {key: _cloned(item, device) for key, item in value.items()}
    if isinstance(value, list) and value and isinstance(value[0], dict) and "metrics" in value[0]:
        return list(value)
    return [_cloned(item, device) for item in value] if isinstance(value, list) else value


def _size_bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, dict):
        return sum(map(_size_bytes, value.values()))
    return sum(map(_size_bytes, value)) if isinstance(value, list) else 0
