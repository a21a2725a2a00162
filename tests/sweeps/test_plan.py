"""Plans: counts of known grids, prefix trees against brute force, merging against exact coefficients, jobs."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from coefficients import coefficients, registered
from twophase.base.config import with_values
from twophase.diloco.compression import COMPRESSIONS
from twophase.rule import FORMS
from twophase.sweeps.grid import Axis, Cell, Sweep, product
from twophase.sweeps.history import bits, is_scheduled
from twophase.sweeps.plan import Forest, Node, Plan, plan
from twophase.tasks.lm.config import TrainConfig
from twophase.training.config import OuterConfig


@pytest.fixture(autouse=True, scope="module")
def _policies() -> Iterator[None]:
    with registered():
        yield


def sweep_of(cells: list[Cell]) -> Sweep:
    return Sweep("test", cells[0].config, cells)


def grid(base: TrainConfig, **axes: tuple[Any, ...]) -> Sweep:
    outer = {field.name for field in dataclasses.fields(OuterConfig)}
    named = [Axis(f"outer.{name}" if name in outer else name, values) for name, values in axes.items()]
    return sweep_of(product(base, named))


# --- counts that were published before there was a planner --------------------------------------------------------
# Exact counts of the performance notes, section 3.2.

METHODS = ("heavy-ball", "nesterov")
BASE = TrainConfig(outer=OuterConfig("nesterov"))
GRID_1 = {"lr": (0.3, 0.5, 0.7, 0.9, 1.0, 1.2), "restart": ("1", "2", "4", "8", "16", "32", "never")}
WITH_ZERO, WITHOUT_ZERO = (0.0, 0.5, 0.7, 0.9, 0.95), (0.3, 0.5, 0.7, 0.9, 0.95)
TABLE_1 = {  # form and momenta: asked over executed rounds, and distinct runs, of 12 and 63 rounds
    ("sum", WITH_ZERO): {12: "2.93 222", 63: "1.59 318"},
    ("sum", WITHOUT_ZERO): {12: "2.36 276", 63: "1.27 396"},
    ("ema", WITH_ZERO): {12: "2.62 240", 63: "1.49 336"},
    ("ema", WITHOUT_ZERO): {12: "2.15 295", 63: "1.21 415"},
}


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [12, 63])
@pytest.mark.parametrize(("form", "momenta"), TABLE_1, ids=["sum-0", "sum", "ema-0", "ema"])
def test_counts_of_grid_1(rounds: int, form: str, momenta: Any) -> None:
    """Distinct runs, and asked over executed rounds, are those of the table, which counts in exact arithmetic."""
    base = with_values(TrainConfig(steps=rounds, inner_steps=1), {"outer.form": form})
    made = plan(grid(base, momentum=momenta, method=METHODS, **GRID_1))
    assert (made.cells, made.steps_asked) == (420, 420 * rounds)
    saving, runs = TABLE_1[form, momenta][rounds].split()
    assert len(made.runs) == int(runs)
    # In EMA form bits share a little less: there some coefficients agree on paper only.
    assert made.steps_asked / made.steps == pytest.approx(float(saving), abs=0.005, rel=0 if form == "sum" else 0.005)


GRID_2 = {
    "lr": (0.1, 0.3, 0.5, 0.7, 0.9, 1.1),
    "momentum": (0.1, 0.3, 0.5, 0.7, 0.9),
    "method": METHODS,
    "restart": ("2", "3", "5", "7", "9", "11", "never"),
}
TABLE_2 = {  # inner steps a round: distinct runs, executed steps in EMA form, saving in sum form
    512: (420, 3_893_200, "1.35"),
    1024: (420, 2_536_400, "2.08"),
    2048: (240, 1_259_200, "4.26"),
}


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("inner_steps", TABLE_2)
def test_counts_of_grid_2(inner_steps: int, form: str) -> None:
    """The paper's grid at 12,500 inner steps, the last round shorter: runs and steps are those of the table."""
    base = with_values(TrainConfig(steps=12_500, inner_steps=inner_steps), {"outer.form": form})
    made = plan(grid(base, **GRID_2))
    runs, executed, in_sum = TABLE_2[inner_steps]
    assert (made.steps_asked, len(made.runs)) == (420 * 12_500, runs)
    if form == "ema":
        assert executed < made.steps < 1.02 * executed
    else:
        assert f"{made.steps_asked / made.steps:.2f}" == in_sum


def test_rule_of_thumb() -> None:
    """A sweep of the paper's periods around one rule executes 7T - 43 rounds for T > 11; 43 is the sum of K + 1."""
    for rounds, form, method in itertools.product((12, 13, 40), FORMS, METHODS):
        base = with_values(TrainConfig(steps=rounds, inner_steps=1), {"outer.form": form, "outer.method": method})
        made = plan(grid(base, restart=GRID_2["restart"]))
        assert made.steps == 7 * rounds - 43


# --- random sweeps ------------------------------------------------------------------------------------------------

POLICIES = (
    *("never", "1", "2", "3", "5", "cycle:2,1", "cycle:3", "at:2,4", "soft:2:0.5:0.25", "soft:2:0.5:2.5"),
    *("soft:3:0:1", "soft:3:0:0", "soft:2:1:0", "early:2:0:0", "twice:2:0", "measured:1.5"),
)
VALUES = {
    "outer.lr": st.sampled_from([0.0, 0.3, 0.7, 3.0, 7.0]),
    "outer.momentum": st.sampled_from([0.0, 0.5, 0.9, 0.9]),
    "outer.method": st.sampled_from(METHODS),
    "outer.form": st.sampled_from(FORMS),
    "outer.restart": st.sampled_from(POLICIES),
    "inner_steps": st.sampled_from([4, 4, 4, 7, 8, 30]),
    "steps": st.sampled_from([26, 26, 26, 26, 28]),
    "seed": st.sampled_from([0, 0, 0, 0, 1]),
}
CELLS = st.lists(st.fixed_dictionaries(VALUES), min_size=1, max_size=14)
CLOSE = {  # many twins
    "outer.lr": st.sampled_from([0.7, 7.0]),
    "outer.momentum": st.sampled_from([0.0, 0.9]),
    "inner_steps": st.sampled_from([4, 13]),
    "steps": st.sampled_from([26, 26, 26, 28]),
}
TWINS = st.lists(st.fixed_dictionaries(VALUES | CLOSE), min_size=8, max_size=20)


def cells_of(drawn: list[dict[str, Any]]) -> list[Cell]:
    return [Cell("", values, with_values(BASE, values)) for values in drawn]


class History(NamedTuple):
    """A run by brute force: what its data and inner steps depend on, and every update with the step it is taken at."""

    trunk: TrainConfig
    updates: tuple[tuple[int, Any], ...]

    def until(self, step: int) -> History:
        """With the updates at or before a step."""
        return History(self.trunk, tuple(update for update in self.updates if update[0] <= step))


def history(config: TrainConfig, how: str) -> History:
    """By the names of the bits (`"bits"`), or by the exact coefficients of an oracle (`"exact"`)."""
    syncs = [step for step in range(1, config.steps + 1) if step % config.inner_steps == 0 or step == config.steps]
    rule, policy = config.outer.known_rule(), config.outer.policy()
    names: list[Any]
    if how == "bits":
        names = [name.update for name in bits(rule, policy, len(syncs))]
    elif is_scheduled(rule, policy):
        names = [tuple(map(str, vector)) for vector in coefficients(rule, policy, len(syncs))]
    else:
        names = [(rule, str(policy), number) for number in range(len(syncs))]
    trunk = dataclasses.replace(config, outer=OuterConfig(), inner_steps=1)
    return History(trunk, tuple(zip(syncs, names, strict=True)))


def histories_of(runs: Mapping[str, TrainConfig], how: str = "bits") -> dict[str, History]:
    return {run: history(config, how) for run, config in runs.items()}


def path_to(forest: Forest, leaf: Node) -> list[Node]:
    path = [leaf]
    while path[0].parent is not None:
        path.insert(0, forest.nodes[path[0].parent])
    return path


@given(CELLS, st.booleans())
def test_the_forest_is_the_prefix_tree(drawn: list[dict[str, Any]], merge: bool) -> None:
    """A node has all runs whose updates to its start are its; children differ in the next; a path has a run's steps.

    Parents come before children, and children in the order of their first run.
    """
    made = plan(sweep_of(cells_of(drawn)), merge=merge)
    forest, histories = made.forest, histories_of(made.runs)
    order = forest_runs(forest)
    seen: set[str | None] = {None}
    event(f"{round(10 * made.steps / made.steps_asked) * 10} % executed")
    for node in forest.nodes.values():
        assert node.parent in seen
        seen.add(node.id)
        assert list(node.runs) == [run for run in order if run in node.runs]
        begun = histories[node.runs[0]].until(node.start)
        assert set(node.runs) == {run for run, history in histories.items() if history.until(node.start) == begun}
        children = forest.below(node)
        assert len(children) != 1
        firsts = [order.index(child.runs[0]) for child in children]
        assert firsts == sorted(firsts)
        if not children:
            assert len({histories[run] for run in node.runs}) == 1
            assert len(node.runs) == 1 or not merge
            continue
        assert sorted(run for child in children for run in child.runs) == sorted(node.runs)
        taken = [{dict(histories[run].updates).get(node.stop) for run in child.runs} for child in children]
        assert all(len(names) == 1 for names in taken)
        assert len(set.union(*taken)) == len(children)
    for run, config in made.runs.items():
        (leaf,) = [node for node in forest.nodes.values() if run in node.runs and not forest.below(node)]
        path = path_to(forest, leaf)
        assert [step for node in path for step in range(node.start, node.stop)] == list(range(config.steps))
        assert [node for node in forest.nodes.values() if run in node.runs] == path
    assert Counter(run for root in forest.roots for run in root.runs) == Counter(dict.fromkeys(made.runs, 1))


def states(made: Plan) -> dict[str, tuple[Any, ...]]:
    """From node id to what its end state depends on: the history, and where in it the node ends."""
    histories = histories_of(made.runs)
    ends = {}
    for node in made.forest.nodes.values():
        whole, leaf = histories[node.runs[0]], not made.forest.below(node)
        ends[node.id] = (whole.until(node.stop if leaf else max(node.start, node.stop - 1)), node.stop)
    return ends


@given(CELLS, st.data())
def test_ids_name_histories(drawn: list[dict[str, Any]], data: st.DataObject) -> None:
    """In a sweep, in another order of its cells, and in a part of it, equal ids are equal states and the reverse."""
    cells = cells_of(drawn)
    shuffled = data.draw(st.permutations(cells))
    part = shuffled[: data.draw(st.integers(1, len(cells)))]
    whole, mixed, some = (plan(sweep_of(some), merge=False) for some in (cells, shuffled, part))
    assert set(mixed.forest.nodes) == set(whole.forest.nodes)
    assert {(node.id, node.parent, frozenset(node.runs)) for node in mixed.forest.nodes.values()} == {
        (node.id, node.parent, frozenset(node.runs)) for node in whole.forest.nodes.values()
    }
    pairs = {*states(whole).items(), *states(mixed).items(), *states(some).items()}
    assert len(pairs) == len({name for name, _ in pairs}) == len({state for _, state in pairs})


@given(CELLS, st.one_of(st.integers(1, 40), st.integers(1, 300)))
def test_jobs_cover_the_forest(drawn: list[dict[str, Any]], most: int) -> None:
    """Every node is in one job, after the job that ends where it begins; whole trees are within the limit."""
    forest = plan(sweep_of(cells_of(drawn)), merge=False).forest
    jobs = forest.jobs(most)
    covered: Counter[str] = Counter()
    seen: dict[str, str] = {}
    for job in jobs:
        node = forest.nodes[job.node]
        inside = [other for other in forest.nodes.values() if node in path_to(forest, other)] if job.deep else [node]
        covered.update(other.id for other in inside)
        assert not job.deep or forest.total[node.id] == sum(other.stop - other.start for other in inside)
        assert job.runs == node.runs
        assert job.deep == (forest.total[node.id] <= most or not forest.below(node))
        assert (None if job.after is None else seen[job.after]) == node.parent
        seen[job.id] = job.node
    assert len(seen) == len(jobs)
    assert covered == Counter(dict.fromkeys(forest.nodes, 1))
    assert sorted(run for job in jobs if job.deep for run in job.runs) == sorted(forest_runs(forest))
    assert len(forest.jobs(max(forest.total.values()))) == len(forest.roots)  # a tree at the limit is one job


def forest_runs(forest: Forest) -> list[str]:
    return [run for root in forest.roots for run in root.runs]


@given(CELLS, st.lists(st.integers(1, 100), min_size=2, max_size=2), st.data())
def test_job_ids(drawn: list[dict[str, Any]], limits: list[int], data: st.DataObject) -> None:
    """With fewer runs or another limit, a job keeps its id if it has the same node, depth and runs, and only then."""
    cells = cells_of(drawn)
    part = [cell for cell in cells if data.draw(st.booleans())] or cells[:1]
    pairs = {
        (job.id, (job.node, job.deep, tuple(sorted(job.runs))))
        for forest in (plan(sweep_of(some), merge=False).forest for some in (cells, part))
        for most in limits
        for job in forest.jobs(most)
    }
    assert len(pairs) == len({name for name, _ in pairs}) == len({job for _, job in pairs})


# --- merging ------------------------------------------------------------------------------------------------------


def check_merge(sweep: Sweep, made: Plan) -> dict[History, list[str]]:
    classes: dict[History, list[str]] = {}
    for run, history in histories_of(sweep.runs, "exact").items():
        classes.setdefault(history, []).append(run)
    assert set(made.runs).isdisjoint(made.stands_for)
    assert set(made.runs) | set(made.stands_for) == set(sweep.runs)
    assert set(made.stands_for.values()) <= set(made.runs)
    assert list(made.runs) == [run for run in sweep.runs if run in made.runs]
    for members in classes.values():
        (canonical,) = set(members) & set(made.runs)
        assert all(made.stands_for[run] == canonical for run in members if run != canonical)
    return classes


@pytest.mark.slow
@given(TWINS, st.data())
def test_merging_is_equality_of_coefficients(drawn: list[dict[str, Any]], data: st.DataObject) -> None:
    """Runs become one, a finished one or the plainest, if all else and the exact coefficients of every update agree."""
    sweep = sweep_of(cells_of(drawn))
    event(f"{len(plan(sweep).stands_for)} twins")
    finished = {run for run in sweep.runs if data.draw(st.booleans())}
    fresh, again = plan(sweep), plan(sweep, finished=finished)
    assert plan(sweep).forest.nodes == fresh.forest.nodes
    assert list(plan(sweep, finished=list(sweep.runs)).runs) == list(fresh.runs)  # when all are there, none is special
    for made, done in ((fresh, set[str]()), (again, finished)):
        for members in check_merge(sweep, made).values():
            (canonical,) = set(members) & set(made.runs)
            candidates = [run for run in members if run in done] or members
            assert canonical in candidates
            plain = [plainness(sweep.runs[run].outer) for run in candidates]
            assert canonical == candidates[plain.index(min(plain))]


def plainness(outer: OuterConfig) -> tuple[bool, ...]:
    """Momentum-free first, then without restarts, then heavy ball, then in sum form."""
    return outer.momentum != 0, outer.restart != "never", outer.method == "nesterov", outer.form == "ema"


@given(CELLS)
def test_without_merging_all_are_kept(drawn: list[dict[str, Any]]) -> None:
    """Without merging every distinct configuration is run and stands for itself, however many cells have it."""
    cells = cells_of([*drawn, *drawn[:3]])
    for finished in ((), [cells[0].run_id]):
        made = plan(sweep_of(cells), merge=False, finished=finished)
        assert dict(made.runs) == {cell.run_id: cell.config for cell in cells}
        assert made.stands_for == {}
        assert (made.cells, made.steps_asked) == (len(cells), sum(cell.config.steps for cell in cells))


# --- what is not shared -------------------------------------------------------------------------------------------


OTHER_VALUES = {
    "inner.lr": (1e-3, 2e-3, 4e-3),
    "seed": (0, 1),
    "replicas": (1, 2),
    "data.batch_size": (4, 8),
    "steps": (40, 44),
    "sync.compression": COMPRESSIONS,
}


@pytest.mark.parametrize("path", OTHER_VALUES)
def test_nothing_else_is_shared(path: str) -> None:
    """Runs that differ in more than the outer optimizer have a tree for each value, and twins, as if planned apart."""
    values = OTHER_VALUES[path]
    base, outer = (
        dataclasses.replace(BASE, steps=40, inner_steps=4),
        {"momentum": (0.0, 0.9), "restart": ("never", "2")},
    )
    made = plan(grid(base, **{path: values}, **outer))
    apart = [plan(grid(with_values(base, {path: value}), **outer)) for value in values]
    assert len(made.forest.roots) == len(values)
    assert list(made.forest.nodes) == [name for alone in apart for name in alone.forest.nodes]
    assert made.steps == sum(alone.steps for alone in apart)
    assert made.stands_for == {run: other for alone in apart for run, other in alone.stands_for.items()}
    assert len(made.runs) == 3 * len(values)


def test_runs_in_fragments_share_nothing() -> None:
    """Runs that are not combined whole at a round's end are trees of one without twins; others plan as ever."""
    blocks = {"sync.fragments": ("a=x", "b=."), "sync.restart": ("a=2", "b=measured:2")}
    base, outer = (
        dataclasses.replace(BASE, steps=40, inner_steps=4),
        {"momentum": (0.5, 0.9), "restart": ("never", "2")},
    )
    alone = [
        cell
        for values in ({"sync.fragments": ("2",)}, blocks, {"sync.delay": 1}, {"sync.delay": 1, "sync.mixing": 0.5})
        for cell in grid(with_values(base, values), **outer).cells
    ]
    plain = plan(grid(base, **outer))
    made = plan(sweep_of([*alone, *grid(base, **outer).cells]))
    assert len(made.runs) == 16 + len(plain.runs) == 16 + 4
    assert made.stands_for == plain.stands_for
    assert made.steps == 16 * 40 + plain.steps
    trees = made.forest.roots[:16]
    assert [(root.start, root.stop, root.runs) for root in trees] == [(0, 40, (cell.run_id,)) for cell in alone]
    assert not any(made.forest.below(root) for root in trees)
    assert [(job.deep, job.runs) for job in made.forest.jobs(1)[:16]] == [(True, (cell.run_id,)) for cell in alone]


PRINT_PLAN = """
import json
from twophase.sweeps.grid import Axis, Sweep, product
from dataclasses import astuple
from twophase.sweeps.plan import plan
from twophase.tasks.lm.config import TrainConfig
from twophase.training.config import OuterConfig

axes = [Axis("outer.momentum", (0.0, 0.5, 0.9)), Axis("outer.restart", ("1", "2", "soft:3:0.5:0.1", "never"))]
base = TrainConfig(steps=26, outer=OuterConfig("nesterov"))
cells = product(base, [*axes, Axis("inner_steps", (4, 6)), Axis("seed", (0, 1))])
made = plan(Sweep("test", TrainConfig(), cells))
jobs = [job.id for job in made.forest.jobs(30)]
facts = [[astuple(node) for node in made.forest.nodes.values()], dict(made.stands_for), jobs]
"""


def test_a_plan_is_the_same_in_every_process() -> None:
    """Nodes, twins and jobs do not depend on the process or its hash seed: workers on many machines agree."""
    namespace: dict[str, Any] = {}
    exec(PRINT_PLAN, namespace)  # noqa: S102 - the same text as in the other process
    done = subprocess.run(
        [sys.executable, "-c", PRINT_PLAN + "print(json.dumps(facts))"],
        env=os.environ | {"PYTHONHASHSEED": "12345"},
        capture_output=True,
        check=True,
    )
    assert json.loads(done.stdout) == json.loads(json.dumps(namespace["facts"]))
