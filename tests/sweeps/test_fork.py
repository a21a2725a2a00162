"""The prefix tree: which steps runs share, and that a run of the tree is the run alone."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from commands import outcome
from twophase.api import run_config, train_run
from twophase.runs.config import OuterConfig, RunConfig, SyncConfig
from twophase.sweeps.fork import outer_steps, tree
from twophase.sweeps.grid import RUNS, Axis, Sweep, product
from twophase.sweeps.runner import run_sweep

POLICIES = st.one_of(
    st.just("never"),
    st.integers(1, 9).map(str),
    st.lists(st.integers(1, 5), min_size=1, max_size=3).map(lambda periods: f"cycle:{','.join(map(str, periods))}"),
    st.sets(st.integers(1, 12), min_size=1, max_size=3).map(lambda at: f"at:{','.join(map(str, sorted(at)))}"),
    st.integers(1, 4).map(lambda period: f"soft:{period}:0.5:0.1"),
    st.just("auto"),
)
OUTERS = st.builds(OuterConfig, st.sampled_from(["averaging", "nesterov", "adamw"]), st.sampled_from([0.3, 0.7]))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(OUTERS, POLICIES), min_size=1, max_size=8), st.integers(1, 12), st.integers(1, 5))
def test_the_tree_takes_each_shared_step_once(outers: list[tuple[OuterConfig, str]], rounds: int, inner_steps: int):
    """Nodes add up to every run, and two runs share exactly the rounds before their first different outer step."""
    steps = rounds * inner_steps - inner_steps // 2
    cells = [
        product(RunConfig(steps=steps, inner_steps=inner_steps, outer=outer), [Axis("outer.restart", (policy,))])[0]
        for outer, policy in outers
        if not (outer.method == "adamw" and policy.startswith(("soft", "auto")))
    ]
    configs = {cell.run_id: cell.config for cell in cells}
    nodes = tree(configs)
    for run in configs:
        node, path = nodes[run], 0
        while node is not None:
            path, node = path + node.steps, nodes.get(node.parent)  # type: ignore[arg-type, assignment]
        assert path == steps
    sequences = {run: outer_steps(config) for run, config in configs.items()}
    shared = {tuple(sequence[:n]) for sequence in sequences.values() for n in range(len(sequence))}
    brute = sum(min((len(prefix) + 1) * inner_steps, steps) - len(prefix) * inner_steps for prefix in shared)
    same_to_the_end = len(set(map(tuple, sequences.values()))) < len(configs)
    assert sum(node.steps for node in nodes.values()) == brute or same_to_the_end


def test_other_syncs_share_nothing():
    """Fragments, delays, mixing and policies by fragment have another order of events: such runs are whole."""
    for sync in (SyncConfig(("2",)), SyncConfig(delay=1), SyncConfig(mixing=0.5), SyncConfig(restart=("0=3",))):
        cells = product(RunConfig(sync=sync, outer=OuterConfig("nesterov")), [Axis("outer.lr", (0.3, 0.7))])
        assert all(node.parent is None for node in tree({cell.run_id: cell.config for cell in cells}).values())


def test_each_cell_of_a_grid_equals_the_run_alone(tmp_path: Path):
    """20 cells over methods, rates, periods, soft restarts, filters and schedules: bit for bit, with their logs."""
    base = run_config("digits", {"steps": 20, "inner_steps": 4, "evaluate_every": 2})
    rates = Axis("outer.lr", (0.3, 0.7))
    cells = product(base, [rates, Axis("outer.method", ("nesterov",)), Axis("outer.restart", ("never", 2, 3, 100))])
    cells += product(base, [Axis("outer.method", ("heavy-ball",)), Axis("outer.restart", ("never", "soft:2:0.5:0.1"))])
    cells += product(base, [Axis("outer.method", ("averaging", "adamw"))])
    cells += product(base, [Axis("outer.filter", ("orthogonal", "clip:1"))])
    late = {"outer.method": "nesterov", "steps": 22}  # the last round is a shorter one
    cells += product(base, [Axis("outer.schedule", ("momentum:0.5", "linear:3"))], fixed=late)
    cells += product(base, [Axis("outer.restart", ("auto", "6", "at:1", "at:1,3"))], fixed=late)
    sweep = Sweep(base, cells)
    assert len(sweep.runs) == 20
    run_sweep(sweep, tmp_path, workers=1, quiet=True).check(tmp_path)
    assert not list((tmp_path / RUNS).glob("fork-*"))
    for run, config in sweep.runs.items():
        train_run(config, tmp_path / "alone" / run, quiet=True)
        assert outcome(tmp_path / RUNS / run) == outcome(tmp_path / "alone" / run)
