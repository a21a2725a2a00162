"""Many runs as one walk: inner steps that several runs share are taken once, and the state is forked where they part.

A forest (`twophase.sweeps.plan`) is walked depth first in one process on one device, with one set of replicas. At a
branch the state is copied. The smallest branch goes first; the largest goes last and needs no copy. So memory holds at
most log2(runs) + 1 states at a time. On a GPU copies stay there while its memory lasts, and go to main memory after
that; those beyond a limit go to disk. From time to time all states in memory are written to disk, so a killed walk
loses only the work since the last save.

Runs that share a stretch share replicas and anchor, but not momentum buffers. A period of 2 and no restart take the
same first two updates and forget differently after the second. So every *class* of runs, with equal rule, buffer and
restart event, takes its own outer step. The first class steps on the anchor, further classes on a scratch copy
(`twophase.sweeps.outers`). All must give the same bits, which checks the plan.

A run that can share nothing (`RunConfig.shares_steps`) is a tree by itself. It is trained as `twophase train` would,
with checkpoints in its own folder.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import torch

from twophase.base.config import RunError, UsageError
from twophase.diloco.group import SingleProcess
from twophase.optim.outer_sgd import OuterSGD
from twophase.runs.folder import METRICS, ROUNDS, RunFolder, read_summary
from twophase.sweeps.outers import Outers
from twophase.sweeps.plan import Forest, Node
from twophase.sweeps.states import FORMAT, Branch, State, States, Tally
from twophase.sweeps.work import Stopped
from twophase.tasks.build import task_of
from twophase.training import checkpoint
from twophase.training.config import OuterConfig, RunConfig
from twophase.training.train import disk, train
from twophase.training.trainer import DIVERGED, RUNNING, STOPPED, Progress, Trainer

_SAVE_SECONDS = 60.0
"""Time between saves, and so about the most work that a kill can undo."""


class Grower:
    """Walks a forest, or pieces of one.

    Args:
        tree: the nodes.
        configs: configuration of every run of the tree, by run id.
        runs: folder of the run folders, by run id.
        states: folder of the states on disk.
        in_memory: branch states held in main memory at most; those beyond are read back from disk.
        should_stop: asked after every inner step; true saves the state and raises `Stopped`.
        on_progress: called with a line of text a few times a minute at most.
    """

    def __init__(
        self,
        tree: Forest,
        configs: Mapping[str, RunConfig],
        runs: Path,
        states: Path,
        *,
        in_memory: int = 8,
        should_stop: Callable[[], bool] = lambda: False,
        on_progress: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.tree = tree
        self.configs = configs
        self.runs = runs
        self.should_stop = should_stop
        self.on_progress = on_progress
        self.tally = Tally()
        self.states = States(states, self.tally, in_memory=in_memory, on_progress=on_progress)
        self._ended: set[str] = set()
        """Runs that have been seen to be finished, which they then stay."""
        self._saved_at = time.perf_counter()
        self._trainer: Trainer | None = None
        self._clear()

    def grow(self, name: str, *, deep: bool = True) -> None:
        """Do a node, and what lies above it and is not on disk; what is finished or saved is not done again.

        Args:
            name: id of the node.
            deep: go on to the leaves; otherwise end with the state at the node's end on disk.

        Raises:
            Stopped: `should_stop` said so.
            UsageError: a run's folder cannot be claimed.
        """
        self.states.folder.mkdir(parents=True, exist_ok=True)
        self._saved_at = time.perf_counter()
        node: Node = self.tree.nodes[name]
        if deep:
            self._walk(node)
        elif self._unfinished(node):
            self._reach(node)
            self._keep_end(node)  # other jobs go on from there
        above: Node | None = node
        while above is not None and not self._unfinished(above):  # the last job below a node tidies it up
            self.states.forget(above)
            above = None if above.parent is None else self.tree.nodes[above.parent]

    def _walk(self, node: Node) -> None:
        """Do a node and everything below it, depth first."""
        failed: Exception | None = None
        self.states.branches.clear()
        waiting: list[tuple[Node, Branch | None]] = [(node, None)]
        while waiting:
            node, branch = waiting.pop()
            if branch is not None and node is branch.node:  # its children are done
                self.states.forget(node)
                continue
            state = self.states.leave(branch, in_place=self._position == branch.node.id) if branch is not None else None
            if not self._unfinished(node):
                continue
            if not self.tree.below(node):
                failed = self._try_leaf(node, state) or failed
                continue
            # By runs, which bounds the states held by the logarithm of their number; then by inner steps.
            children = sorted(self._open(node), key=lambda child: (len(child.runs), self.tree.total[child.id]))
            if len(children) > 1 or not self._begun(children[0]):
                self._reach(node, state)
            branch = Branch(node, len(children))
            waiting.append((node, branch))
            waiting += [(child, branch) for child in reversed(children)]
            # For the children that come after the first one.
            if len(children) > 1 and not self.states.hold(branch, self._state(), self._run.compute.device):
                self._keep_end(node)
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
            self._position = None
            error.add_note(f"run {', '.join(node.runs)}")
            return error
        self.states.forget(node)
        return None

    def _train(self, run: str) -> None:
        """Train a run that shares nothing, from its newest checkpoint to its end."""
        self._trainer = None  # it makes new replicas, and the memory may not hold both
        self._clear()
        with self._claim(run) as folder:
            before, clock = checkpoint.latest_step(folder.checkpoint_dir) or 0, time.perf_counter()
            summary = train(task_of(self.configs[run]), self.configs[run], folder, should_stop=self.should_stop)
        steps = summary["steps"] - before
        self.tally.steps += steps
        self.tally.step_seconds += steps * [(time.perf_counter() - clock) / max(steps, 1)]
        if summary["exit_reason"] == STOPPED:
            raise Stopped

    # --------------------------------------------------------------------------------------------------- branches

    def _open(self, node: Node) -> list[Node]:
        """Return the children of a node that are not done."""
        return [child for child in self.tree.below(node) if self._unfinished(child)]

    def _begun(self, node: Node) -> bool:
        """Return whether a state inside or below a node is on disk, so that its parent's end is of no use any more."""
        if any(self.states.path(node, kind).exists() for kind in ("end", "part")):
            return True
        children = self._open(node)
        return len(children) == 1 and self._begun(children[0])

    def _unfinished(self, node: Node) -> list[str]:
        """Return the runs below a node that are not finished."""
        return [run for run in node.runs if not self._is_finished(run)]

    def _is_finished(self, run: str) -> bool:
        if run not in self._ended and read_summary(self.runs / run, run) is not None:
            self._ended.add(run)
        return run in self._ended

    # --------------------------------------------------------------------------------------------------- stretches

    def _reach(self, node: Node, start: State | None = None) -> None:
        """Bring replicas, anchor and buffers to a node's end; `start` is the state at its parent's end, or None."""
        runs = self._unfinished(node)
        saved = self.states.read(node, "end", runs)
        if saved is not None:
            self._restore(saved, node)
            return
        self.states.path(node, "end").unlink(missing_ok=True)  # what lies there is torn, or of other runs
        saved = self.states.read(node, "part", runs)
        if saved is not None:
            self._restore(saved, node)
        elif node.parent is None:
            self._begin(node)
        elif self._position != node.parent or not set(runs) <= set(self._outers.counters):
            parent = self.tree.nodes[node.parent]
            if start is None:
                self._reach(parent)
                self._keep_end(parent)  # another job has lost it, and others may look for it
            else:
                self._restore(start, parent)
        self._stretch(node, runs)

    def _stretch(self, node: Node, runs: list[str]) -> None:
        """Go from the end of the parent, or from inside the stretch, to its end."""
        run = self._run
        self._position = self._launched = None
        # Those that are done with this stretch only: a state must not speak for others: their counters stand still.
        self._outers.restrict(runs)
        # The runs of a node differ in the outer optimizer only, or have had no round yet.
        run.config = self.configs[max(runs, key=lambda name: self.configs[name].inner_steps)]
        run.engine._set_inner_steps(run.config.inner_steps)  # inside of a round, in whose first steps they agree
        leaf = not self.tree.below(node)
        before, started = run.done.seconds, time.perf_counter()
        with ExitStack() as claims:
            logs = {name: self._log(claims, name) for name in runs} if leaf else {}
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
                self._check_data()
                stopping = self.should_stop()
                if stopping or now - self._saved_at > _SAVE_SECONDS:
                    self._save(node, "part")
                    self.on_progress(
                        f"step {run.done.step} of {node.start}..{node.stop} for {len(node.runs)} runs; holding "
                        f"{self.states.memory_text()}, at most {self.tally.most_held} at once; {self.tally.spilled} "
                        "spilled"
                    )
                if stopping:
                    raise Stopped
            run.done.seconds = before + time.perf_counter() - started
            if leaf:
                self._finish(logs)
        if run.done.exit_reason == DIVERGED and not leaf:
            for name in runs:  # below a shared stretch all of them have diverged
                with ExitStack() as claims:
                    self._finish({name: self._log(claims, name)})
        self._position = node.id
        if leaf or run.done.exit_reason != RUNNING:
            self.states.path(node, "part").unlink(missing_ok=True)
        elif time.perf_counter() - self._saved_at > _SAVE_SECONDS:
            self._save(node, "end")

    def _inner_step(self, node: Node) -> None:
        """Take an inner step and its duration; a GPU does it later, and is waited for at the end of a round."""
        run = self._run
        steps, clock = self._launched or (0, time.perf_counter())
        self._launched = steps + 1, clock
        run.inner_step()
        self.tally.steps += 1
        ends = run.engine.inner_step + 1 >= run.engine.inner_steps or run.done.step == node.stop
        if ends or run.compute.device.type == "cpu":
            run.settle()
            self.tally.step_seconds += (steps + 1) * [(time.perf_counter() - clock) / (steps + 1)]
            self._launched = None

    def _synchronize(self, runs: list[str], logs: Mapping[str, RunFolder]) -> None:
        """Count an inner step; at the end of a round take the outer step of every class of runs, and log it."""
        run, engine = self._run, self._run.engine
        if engine.inner_step + 1 < engine.inner_steps and run.done.step < run.config.steps:
            run.synchronize()
            return
        number = engine.round + 1
        first, *others = self._outers.classes(runs, number)
        before = engine.flat.clone() if others else torch.empty(0)
        outer = cast("OuterSGD", engine.outer)
        self._outers.load(outer, first[0])
        report = run.synchronize()
        assert report is not None
        rounds: list[list[Any]] = [[first if others else None, {"step": run.done.step} | report.as_dict()]]
        buffers = self._outers.unload(outer, first, number)
        for members in others:
            outer = self._outers.repeat(members[0], before, engine.fragments[0], report.signals)
            groups = tuple(outer.last_round)
            restarted = any(group.restarted for group in groups)
            parts = tuple(dataclasses.replace(part, restarted=restarted) for part in report.fragments)
            same = dataclasses.replace(report, groups=groups, restarted=restarted, fragments=parts)
            rounds.append([members, {"step": run.done.step} | same.as_dict()])
            buffers = self._outers.unload(outer, members, number) | buffers
        self._outers.buffers = buffers
        entry = {"metrics": run.end_round(report), "rounds": rounds}
        self._lines.append(entry)
        for name, log in logs.items():
            with disk(log):
                _write_line(log, entry, name)

    # --------------------------------------------------------------------------------------------------------- runs

    def _claim(self, run: str) -> RunFolder:
        return RunFolder.claim(self.runs / run, self.configs[run])

    def _log(self, claims: ExitStack, run: str) -> RunFolder:
        """Claim a run's folder and write what has happened so far."""
        log = claims.enter_context(self._claim(run))
        with disk(log):
            log.write_env(self._run.environment())
            log.rewind({})
            for entry in self._lines:
                _write_line(log, entry, run)
        return log

    def _finish(self, logs: Mapping[str, RunFolder]) -> None:
        """Write the outcome of runs that have ended here."""
        self._check_data(wait=True)
        outcome = self._run.outcome()
        for run, log in logs.items():
            summary = outcome | self._run.summary(self._outers.counters[run]["restarts"])
            with disk(log):
                log.write_weights(self._run.weights(self.configs[run]))
                log.finish(summary)

    def _check_data(self, *, wait: bool = False) -> None:
        """Refuse to go on with damaged data; every state on disk may rest on it, and is made again."""
        if fault := self._run.data_fault(wait=wait):
            self.states.clear()
            raise RunError(f"{fault}; then repeat the command")

    # ------------------------------------------------------------------------------------------------------- states

    @property
    def _run(self) -> Trainer:
        assert self._trainer is not None
        return self._trainer

    def _clear(self) -> None:
        self._launched: tuple[int, float] | None = None
        """Inner steps that have not been waited for yet, and when the first was launched."""
        self._position: str | None = None
        """Node that the replicas stand at the end of."""
        self._outers = Outers(self.configs)
        self._lines: list[dict[str, Any]] = []

    def _begin(self, node: Node) -> None:
        """Begin a new tree with fresh replicas."""
        first = self.configs[node.runs[0]]
        self._trainer = None  # its memory first
        self._trainer = Trainer(task_of(first), first, SingleProcess())
        self._clear()
        self._outers.begin(node.runs)

    def _state(self) -> State:
        """Return everything, live: clone it or write it before the next step."""
        run = self._run
        run.settle()
        engine = run.engine.state_dict()
        engine["fragments"][0]["outer"]["state"] = {}  # `Outers` has the buffers
        return {
            "format": FORMAT,
            "text": run.data_fingerprint,
            "replicas": [replica.state_dict() for replica in run.replicas],
            "engine": engine,
            "residuals": run.engine.residuals(),
            **self._outers.state(),
            "done": dataclasses.asdict(run.done),
            "execution": run.execution,
            "lines": list(self._lines),
        }

    def _restore(self, state: State, node: Node) -> None:
        """Continue from a state, at the end of a node or inside it; the state's tensors are used, not copied."""
        first = self.configs[node.runs[0]]
        if self._trainer is None or _trunk(self._trainer.config) != _trunk(first):
            self._trainer = None  # its memory first
            self._trainer, self._outers = Trainer(task_of(first), first, SingleProcess()), Outers(self.configs)
        run = self._trainer
        if state["text"] != run.data_fingerprint:
            raise UsageError("the text is not the one that this sweep began with; put it back or choose another --out")
        run.engine._set_inner_steps(max(self.configs[name].inner_steps for name in node.runs))
        run.engine.load_state_dict(state["engine"])
        run.engine.load_residuals(state["residuals"])
        for replica, saved in zip(run.replicas, state["replicas"], strict=True):
            replica.load_state_dict(saved)
        run.done, run.validation = Progress(**state["done"]), None
        run.restore_execution(state["execution"])
        self._outers.restore(state, run.compute.device)
        self._lines = state["lines"]
        self._position = node.id if run.done.step == node.stop else None
        self.tally.restored += 1

    def _save(self, node: Node, kind: str) -> None:
        """Write the present state and all that are held in memory only: any child can continue from these."""
        self.states.save_branches()
        self.states.write(node, kind, self._state())
        self._saved_at = time.perf_counter()

    def _keep_end(self, node: Node) -> None:
        """See that the state at a node's end, where the replicas stand, is on disk."""
        stands_there = self._position == node.id and self._run.done.exit_reason == RUNNING
        if stands_there and not self.states.path(node, "end").exists():
            self.states.write(node, "end", self._state())


def _write_line(log: RunFolder, entry: Mapping[str, Any], run: str) -> None:
    """Write a round's lines into a run's logs."""
    line = next(line for runs, line in entry["rounds"] if runs is None or run in runs)
    log.log(ROUNDS, line)
    log.log(METRICS, entry["metrics"])


def _trunk(config: RunConfig) -> RunConfig:
    """Return what the runs of a tree have in common."""
    return dataclasses.replace(config, outer=OuterConfig(), inner_steps=1)
