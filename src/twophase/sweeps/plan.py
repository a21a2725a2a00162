"""What a sweep has to run, and what its runs share, known before anything is run.

**Merging.** Cells with runs that are the same in exact arithmetic need one run (`history.algebra`). Momentum 0 makes
both rules and all periods one. A period at or above the number of rounds is no restart. Period 1 is plain SGD, and
equal rules in different forms are one. The *canonical* run of each class is one of its cells and stands for its twins.
They would differ from it by rounding only; `cells.csv` names it.

**Sharing.** Runs that agree in everything but the outer optimizer take the same inner steps until their outer updates
first differ. The runs of a sweep therefore form trees. A node is a stretch of inner steps that all runs below it
share; its children differ in the outer update at its end:

    steps 0 ... 16      | 16 ... 64                    | 64 ... 480
    all runs            | lr 0.7, all periods          | lr 0.7, period 3
                        |                              | lr 0.7, never and the longer periods | ...
                        | lr 0.3, all periods          | ...

Runs share a stretch only if their updates are the same floating-point operations (`history.bits`). So each comes out
bit for bit as if run alone. Exact arithmetic would allow a little more sharing.

What is known of a run's updates supposes one outer optimizer for the whole model at a round's end. A run that is
synchronised otherwise (in fragments, with a policy each, with a delay) is a tree by itself, and no other's twin.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from twophase.base.config import Tree, fingerprint, to_tree
from twophase.restart import Never
from twophase.rule import OuterRule
from twophase.sweeps.grid import Sweep
from twophase.sweeps.history import algebra, bits

if TYPE_CHECKING:
    from twophase.training.config import RunConfig


@dataclass(frozen=True, slots=True)
class Node:
    """A stretch of inner steps that several runs share, and the outer rounds inside it.

    The stretch begins with the outer update at inner step `start` (unless that is 0), in which the node and its
    siblings differ. It ends before the update at `stop`, in which its children differ; a leaf ends with it.
    """

    id: str
    """Names the state at the end of the stretch: equal for equal histories, in every sweep."""
    parent: str | None
    start: int
    stop: int
    runs: tuple[str, ...]
    """Ids of the runs below."""

    @property
    def steps(self) -> int:
        """Inner steps of the stretch."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Job:
    """A piece of a forest for one worker: its node, and if it is `deep` everything below that."""

    id: str
    """Names the job; other runs below its node make another job."""
    node: str
    deep: bool
    runs: tuple[str, ...]
    after: str | None
    """Id of the job that must be done before."""


class Forest:
    """The prefix trees of a set of runs.

    Args:
        nodes: parents before children, children in the order of their first run.
    """

    def __init__(self, nodes: Iterable[Node]) -> None:
        self.nodes: dict[str, Node] = {node.id: node for node in nodes}
        self.children: dict[str | None, list[Node]] = {}
        for node in self.nodes.values():
            self.children.setdefault(node.parent, []).append(node)
        self.total: dict[str, int] = {}
        """Inner steps of each node and everything below it."""
        for node in reversed(self.nodes.values()):
            self.total[node.id] = node.steps + sum(self.total[child.id] for child in self.below(node))

    @property
    def roots(self) -> list[Node]:
        """The first node of each tree."""
        return self.children.get(None, [])

    @property
    def steps(self) -> int:
        """Inner steps of the whole forest."""
        return sum(node.steps for node in self.nodes.values())

    def below(self, node: Node) -> list[Node]:
        """Return the children of a node."""
        return self.children.get(node.id, [])

    def jobs(self, most: int) -> list[Job]:
        """Cut the forest into jobs: subtrees of at most `most` inner steps, and the nodes above them one by one.

        Each comes after the one that it needs; every node is in exactly one.
        """
        jobs: list[Job] = []
        waiting: list[tuple[Node, str | None]] = [(root, None) for root in reversed(self.roots)]
        while waiting:
            node, after = waiting.pop()
            deep = self.total[node.id] <= most or not self.below(node)
            job = Job(_digest("job", node.id, deep, *sorted(node.runs)), node.id, deep, node.runs, after)
            jobs.append(job)
            if not deep:
                waiting += [(child, job.id) for child in reversed(self.below(node))]
        return jobs


@dataclass(frozen=True)
class Plan:
    """What a sweep has to run.

    Args:
        runs: configurations of the canonical runs, by run id, in the order of the cells.
        stands_for: run id of the canonical run, by that of a cell that is not run.
        forest: shared stretches of the runs.
        cells: number of cells asked for.
        steps_asked: inner steps of all cells, each alone.
    """

    runs: Mapping[str, Any]
    stands_for: Mapping[str, str]
    forest: Forest = field(repr=False)
    cells: int
    steps_asked: int

    @property
    def steps(self) -> int:
        """Inner steps to be executed."""
        return self.forest.steps

    @property
    def counts(self) -> dict[str, int]:
        """Cells, runs and steps, for people."""
        return {"runs": len(self.runs), "cells": self.cells, "steps_asked": self.steps_asked, "steps": self.steps}


def plan(sweep: Sweep, *, merge: bool = True, finished: Collection[str] = ()) -> Plan:
    """Find the canonical runs of a sweep and the forest that they form.

    Args:
        sweep: its configurations have an outer rule and policy, `steps`, `inner_steps` and `shares_steps`.
        merge: let one run stand for all that are the same in exact arithmetic.
        finished: ids of runs that are there already; a class that has one takes it as its canonical run.

    Returns:
        The plan; the same for the same arguments, on every machine.
    """
    trees = {cell.run_id: cell.tree for cell in sweep.cells}
    histories = {run: _History.of(config, trees[run], merge=merge) for run, config in sweep.runs.items()}
    classes: dict[Any, list[str]] = {}
    for run, history in histories.items():
        classes.setdefault((history.trunk, history.algebra) if merge else run, []).append(run)
    chosen: dict[str, str] = {}
    for members in classes.values():  # of equally plain ones the first
        canonical = min(members, key=lambda run: (run not in finished, _plainness(sweep.runs[run])))
        chosen |= dict.fromkeys(members, canonical)
    canonical_runs = {run: sweep.runs[run] for run in sweep.runs if chosen[run] == run}
    return Plan(
        runs=canonical_runs,
        stands_for={run: other for run, other in chosen.items() if run != other},
        forest=Forest(_grow(canonical_runs, histories)),
        cells=len(sweep.cells),
        steps_asked=sum(cell.config.steps for cell in sweep.cells),
    )


Updates = tuple[tuple[int, str], ...]
"""The outer updates of a run: the inner step at which each is taken, and its name."""


@dataclass(frozen=True, slots=True)
class _History:
    """A run as planning sees it; `trunk` is equal for runs that differ in the outer optimizer only, if those share."""

    trunk: str
    steps: int
    bits: Updates
    algebra: Updates

    @classmethod
    def of(cls, config: RunConfig, tree: Tree, *, merge: bool) -> _History:
        if not config.shares_steps:
            alone = ((config.steps, "alone"),)
            plain = {**tree, "outer": to_tree(config.outer.plain())}  # without values that change nothing
            return cls(fingerprint(plain if merge else tree), config.steps, alone, alone)
        trunk = {path: value for path, value in tree.items() if path not in {"outer", "inner_steps"}}
        rule, policy = config.outer.known_rule(), config.outer.policy()
        # The last round may be shorter.
        syncs = [*range(config.inner_steps, config.steps, config.inner_steps), config.steps]
        same_bits = (update.update for update in bits(rule, policy, len(syncs)))
        same_algebra = algebra(rule, policy, len(syncs))
        return cls(
            fingerprint(trunk),
            config.steps,
            tuple(zip(syncs, same_bits, strict=True)),
            tuple(zip(syncs, same_algebra, strict=True)),
        )


def _grow(runs: Iterable[str], histories: Mapping[str, _History]) -> Iterator[Node]:
    """Yield the nodes of the forest of some runs, parents first."""
    trunks: dict[str, list[str]] = {}
    for run in runs:
        trunks.setdefault(histories[run].trunk, []).append(run)
    # (runs, updates that they have taken, name of these updates, parent, inner steps taken)
    waiting: list[tuple[list[str], int, str, str | None, int]] = [
        (group, 0, trunk, None, 0) for trunk, group in reversed(trunks.items())
    ]
    while waiting:
        group, taken, name, parent, start = waiting.pop()
        updates = [histories[run].bits for run in group]
        first = updates[0]
        while taken < len(first) and all(other[taken : taken + 1] == first[taken : taken + 1] for other in updates):
            name = _digest(name, *first[taken])
            taken += 1
        if taken == len(first):
            stop = histories[group[0]].steps
            yield Node(_digest("end", name, stop), parent, start, stop, tuple(group))
            continue
        stop = min(other[taken][0] for other in updates)
        node = Node(_digest("end", name, stop), parent, start, stop, tuple(group))
        yield node
        parts: dict[tuple[int, str] | None, list[str]] = {}
        for run, other in zip(group, updates, strict=True):
            parts.setdefault(other[taken] if other[taken][0] == stop else None, []).append(run)
        waiting += [
            (part, taken, name, node.id, stop)
            if update is None  # these have no sync here: they go on inside their round
            else (part, taken + 1, _digest(name, *update), node.id, stop)
            for update, part in reversed(parts.items())
        ]


def _plainness(config: RunConfig) -> tuple[bool, bool, bool, bool]:
    """Return the sort key of equal runs: the plainest configuration comes first."""
    rule = config.outer.rule() or OuterRule(1.0, 0.0)
    restarts = config.outer.policy() != Never()
    return rule.momentum > 0, restarts, rule.nesterov, rule.form != "sum"


def _digest(*parts: object) -> str:
    return hashlib.blake2b("\0".join(map(str, parts)).encode(), digest_size=8).hexdigest()
