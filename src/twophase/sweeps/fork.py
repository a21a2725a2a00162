"""The prefix tree of a sweep: runs that take the same steps up to a round train them once.

A node is an ordinary run. It goes to its end, or stops before the outer step in which its children differ; each child
forks from the checkpoint that it leaves there (`Trainer.load`), and is bit for bit the run alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from twophase.config import fingerprint, to_tree
from twophase.restart import RoundSignal, State, age_after, ask
from twophase.runs.config import RunConfig


@dataclass(frozen=True)
class Node:
    """A run of the tree."""

    name: str
    """Name of its folder: the run's id, or that of a shared beginning."""
    config: RunConfig
    """Of a shared beginning that of the first run below it."""
    parent: str | None
    """Name of the node that it forks from."""
    start: int
    stop: int | None
    """Inner step before whose outer step it ends, or None: it is a run of the sweep."""

    @property
    def steps(self) -> int:
        """Inner steps that it takes by itself."""
        return (self.config.steps if self.stop is None else self.stop) - self.start


def tree(configs: Mapping[str, RunConfig]) -> dict[str, Node]:
    """Return the nodes of a sweep's runs (plain configurations by run id) by name, parents before their children."""
    groups: dict[str, list[str]] = {}
    for run, config in configs.items():
        sync = config.sync
        is_shared = sync.parts == 1 and sync.delay == 0 and sync.mixing == 0 and not sync.restart
        trunk = to_tree(config) | {"outer": None}
        groups.setdefault(fingerprint(trunk) if is_shared else run, []).append(run)
    steps = {run: outer_steps(config) for run, config in configs.items()}
    nodes = [node for group in groups.values() for node in _grow(group, configs, steps, None, 0)]
    return {node.name: node for node in nodes}


def outer_steps(config: RunConfig) -> list[str]:
    """Return what each outer step of a run is, so that runs with equal beginnings begin alike.

    It is the rule with its settings, and what the restart policy decides; all of a policy that has a memory or looks at
    measured values stands for each of its decisions.
    """
    policy, settings = config.outer.policy, repr(replace(config.outer, restart="never"))
    state: State = {}
    age, decisions = 0, []
    for number in range(1, config.rounds + 1):
        if policy.needs or state:
            return [f"{settings} {policy}"] * config.rounds
        state, decision, _ = ask(policy, state, RoundSignal(number, age + 1))
        age = age_after(decision, age + 1)
        decisions.append(f"{settings} {decision}")
    return decisions


def _grow(
    runs: list[str], configs: Mapping[str, RunConfig], steps: Mapping[str, list[str]], parent: Node | None, taken: int
) -> Iterator[Node]:
    """Yield the nodes of runs that take the same outer steps up to `taken`."""
    config = configs[runs[0]]
    name, start = (parent.name, parent.stop or 0) if parent else (None, 0)
    if len(runs) == 1:
        yield Node(runs[0], config, name, start, None)
        return
    # Runs whose outer steps are all equal, as with a period beyond the end, part before the last one.
    while taken < config.rounds - 1 and len({steps[run][taken] for run in runs}) == 1:
        taken += 1
    stop = min((taken + 1) * config.inner_steps, config.steps)
    node = Node(f"fork-{fingerprint(to_tree(config) | {'stop': stop})}", config, name, start, stop)
    yield node
    groups: dict[str, list[str]] = {}
    for run in runs:
        groups.setdefault(run if taken == config.rounds - 1 else steps[run][taken], []).append(run)
    for group in groups.values():
        yield from _grow(group, configs, steps, node, taken + 1)
