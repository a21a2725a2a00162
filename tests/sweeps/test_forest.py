"""A forest's leaves are the runs done alone, bit for bit, whatever is shared, spilled or interrupted."""

from __future__ import annotations

import math
import random
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import shardmaker
import textmaker
from amount import amount
from commands import outcome
from policies import Half, Shrink
from toytask import Toy
from twophase.base.config import RunError, with_values
from twophase.diloco.compression import COMPRESSIONS
from twophase.restart import Restart, RestartPolicy
from twophase.runs.folder import RunFolder, read_summary
from twophase.sweeps import forest, states
from twophase.sweeps.forest import Grower, Stopped
from twophase.sweeps.grid import Axis, Cell, Sweep, product
from twophase.sweeps.plan import Node, Plan, plan
from twophase.sweeps.states import FORMAT, States
from twophase.tasks.build import task_of
from twophase.tasks.lm.config import TrainConfig
from twophase.tasks.lm.task import corpus_of
from twophase.tasks.named import config_class, name_of
from twophase.training import parts
from twophase.training.config import RunConfig
from twophase.training.train import train
from twophase.training.trainer import Trainer


@pytest.fixture(scope="module")
def base() -> RunConfig:
    """A run of a moment, of a task whose steps cost next to nothing."""
    small = {"steps": 18, "inner_steps": 4, "inner.lr": 0.01}  # the last round is shorter
    small |= {"outer.method": "nesterov", "inner.schedule": "cosine"}
    return with_values(config_class(name_of(Toy))(), small)


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    """The same of the language model, for what depends on text, tokens or the sequences of a batch."""
    corpus = textmaker.write(tmp_path_factory.mktemp("text") / "text.txt")
    sizes = {"model.heads": 1, "model.intermediate_size": 8}
    return textmaker.small_run(corpus, 8, steps=18, inner_steps=4, **sizes)


Outcome = dict[str, Any]
Alone = Callable[[Plan], dict[str, Outcome]]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """The outcomes of a plan's runs, each trained alone once for all tests."""
    place = tmp_path_factory.mktemp("alone")
    outcomes: dict[str, Outcome] = {}

    def train_all(made: Plan) -> dict[str, Outcome]:
        for run, config in made.runs.items():
            if run not in outcomes:
                with RunFolder.claim(place / run, config) as folder:
                    train(task_of(config), config, folder)
                outcomes[run] = outcome(place / run)
        return {run: outcomes[run] for run in made.runs}

    return train_all


def check(made: Plan, path: Path, expected: dict[str, Outcome], *, no_states: bool = True) -> None:
    for run, wanted in expected.items():
        assert outcome(path / "runs" / run) == wanted, made.runs[run]
    assert not no_states or not list((path / "states").glob("*")), "states of finished nodes stay behind"


def grower(made: Plan, path: Path, **options: Any) -> Grower:
    return Grower(made.forest, made.runs, path / "runs", path / "states", **options)


def grow(made: Plan, path: Path, **options: Any) -> Grower:
    walker = grower(made, path, **options)
    for root in made.forest.roots:
        walker.grow(root.id)
    return walker


def grow_in_parts(made: Plan, path: Path, limits: Iterable[int], **options: Any) -> int:
    """Grow, stopped after so many inner steps and taken up by a new grower, without a step twice: how many stops."""
    steps = 0
    for stops, limit in enumerate(limits):
        calls = iter(range(1, limit))
        walker = grower(made, path, should_stop=lambda calls=calls: next(calls, None) is None, **options)
        try:
            for root in made.forest.roots:
                walker.grow(root.id)
        except Stopped:
            steps += walker.tally.steps
            continue
        assert steps + walker.tally.steps == made.steps
        return stops
    raise AssertionError("the limits are at an end, and the forest is not grown")


PATHS = {name: f"outer.{name}" for name in ("lr", "momentum", "restart", "method")}
PATHS |= {"compression": "sync.compression"}


def grid(base: RunConfig, **values: tuple[Any, ...]) -> Sweep:
    return Sweep("grid", base, product(base, [Axis(PATHS.get(name, name), column) for name, column in values.items()]))


POLICIES = ("never", "1", "2", "3", "5", "cycle:2,1", "at:2,4", "soft:2:0.5:0.25", "soft:3:0:1", "soft:2:1:0")


def draw(base: RunConfig, generator: random.Random, *, count: int) -> Sweep:
    """Random runs around few values, so that much is shared, in both forms and with several inner steps a round."""
    cells = {}
    for _ in range(count):
        values = {
            "outer.lr": generator.choice([0.3, 0.7, 7.0]),
            "outer.momentum": generator.choice([0.0, 0.5, 0.9]),
            "outer.method": generator.choice(["heavy-ball", "nesterov"]),
            "outer.form": generator.choice(["sum", "sum", "ema"]),
            "outer.restart": generator.choice(POLICIES),
            "inner_steps": generator.choice([4, 4, 4, 7, 13]),
            "seed": generator.choice([0, 0, 0, 1]),
        }
        cell = Cell("", values, with_values(base, values))
        cells[cell.run_id] = cell
    return Sweep("random", base, list(cells.values()))


# ------------------------------------------------------------------------------------------- leaves are the runs alone


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(amount(2, 20)))
def test_leaves_are_the_runs_alone(base: RunConfig, lm: TrainConfig, tmp_path: Path, alone: Alone, seed: int) -> None:
    """On a random grid every leaf has the weights, logs and summary of its run done alone, and no step is repeated."""
    generator = random.Random(seed)
    config = with_values((lm, base)[seed % 2], {"evaluate_every": generator.choice([0, 2])})
    made = plan(draw(config, generator, count=(5, 8)[seed % 2]), merge=seed % 2 == 0)
    walker = grow(made, tmp_path, in_memory=generator.choice([0, 1, 8]))
    assert walker.tally.steps == made.steps
    assert walker.states.branches == []
    check(made, tmp_path, alone(made))


ADAPTIVE = ("worse", str(Shrink()), "ramp:0.5", str(Half(3)))
SIGNALS = {"restart": ("never", "1", "2", *ADAPTIVE)}
STEEP = {"steps": 14, "inner_steps": 2, "inner.lr": 0.03, "outer.lr": 4.0}  # the loss rises again and again
CASES: dict[str, tuple[dict[str, Any], dict[str, tuple[Any, ...]], bool]] = {
    "one history": ({}, {"momentum": (0.0,), "restart": ("never", "2"), "method": ("heavy-ball", "nesterov")}, False),
    "a policy that measures": ({}, {"momentum": (0.5, 0.9), "restart": ("never", "every-other")}, True),
    # `auto` takes nothing of the rule: at momentum 0 it is the same run as at any other.
    "a buffer of its own": ({"outer.lr": 1.0}, {"momentum": (0.0, 0.5), "restart": ("never", "auto")}, False),
    "signals": (STEEP, SIGNALS | {"momentum": (0.9,)}, True),
    "signals at momentum 0": (STEEP, SIGNALS | {"momentum": (0.0,)}, False),
    # Whatever an inner optimizer remembers is part of a branch's state.
    **{
        method: ({"inner.method": method, "inner.schedule": schedule}, {"restart": ("never", "2")}, True)
        for method, schedule in (("sgd", "wsd"), ("muon", "cosine"), ("schedule-free", "constant"))
    },
    "divergence together": (
        {"divergence_loss": 5.0},
        {"lr": (1000.0, 0.7), "momentum": (0.5,), "restart": ("never", "3", "4", "5")},
        True,
    ),
}


@pytest.fixture
def _policies(register_policy: Callable[[str], Callable[[type], type]]) -> None:
    @register_policy("every-other")
    @dataclass(frozen=True, slots=True)
    class EveryOther(RestartPolicy):
        needs = frozenset({"cosine"})

        def decide(self, state, signal):  # type: ignore[no-untyped-def]
            rounds = state.get("rounds", 0.0) + (signal.cosine is not None)
            return {"rounds": rounds}, Restart() if rounds % 2 == 0 else None

    @register_policy("worse")
    @dataclass(frozen=True, slots=True)
    class Worse(RestartPolicy):
        needs = frozenset({"train_loss"})

        def decide(self, state, signal):  # type: ignore[no-untyped-def]
            loss = signal.value("train_loss")
            return {"loss": loss}, Restart() if loss > state.get("loss", math.inf) else None


@pytest.mark.slow
@pytest.mark.usefixtures("_policies")
@pytest.mark.parametrize("case", CASES)
def test_kinds_of_runs_are_as_alone(base: RunConfig, tmp_path: Path, alone: Alone, case: str) -> None:
    """Policies that measure, take steps or keep a buffer come out of a sweep as if done alone, steps once."""
    changes, axes, merge = CASES[case]
    made = plan(grid(with_values(base, changes), **axes), merge=merge)
    walker = grow(made, tmp_path, in_memory=1)
    expected = alone(made)
    check(made, tmp_path, expected)
    together = case == "divergence together"
    assert (walker.tally.steps < made.steps) if together else (walker.tally.steps == made.steps)
    by_policy: dict[str, list[dict[str, Any]]] = {}
    for run, config in made.runs.items():
        by_policy.setdefault(config.outer.restart, []).append(expected[run]["summary"])
    ends = {policy: {summary["checksum"] for summary in some} for policy, some in by_policy.items()}
    if together:
        assert sum(reference["summary"]["diverged"] for reference in expected.values()) >= 3
    elif case == "one history":
        assert (len(made.runs), made.steps) == (4, 18)
    elif case == "a policy that measures":
        assert made.steps == 4 * 18 - 3 * 4
    elif case == "a buffer of its own":
        assert (len(ends["auto"]), len(ends["never"])) == (1, 2)
        assert not ends["auto"] & ends["never"]  # one of which is plain averaging
    elif case in ("signals", "signals at momentum 0"):
        differing = {"1", "2", *ADAPTIVE} if case == "signals" else set(ADAPTIVE[-2:])
        assert not any(ends["never"] & ends[policy] for policy in differing)
        assert by_policy["worse"][0]["restarts"] > 0
        assert len(made.runs) == 3 + len(ADAPTIVE)  # none stands for another: their updates differ, or may
    else:
        assert made.steps == 2 * 18 - 3 * 4


# ------------------------------------------------------------------------------------------------------- interruptions


@pytest.mark.slow
@pytest.mark.usefixtures("_policies")
@pytest.mark.parametrize("case", ["schedules", "compression", "signals"])
def test_interrupted_again_and_again(base: RunConfig, tmp_path: Path, alone: Alone, case: str) -> None:
    """Stopped inside stretches and at branches, and taken up anew, a walk repeats no step and changes no bit."""
    generator = random.Random(100)
    made = {
        "schedules": lambda: plan(grid(base, momentum=(0.9,), restart=("never", "2", "3", "1"), inner_steps=(4, 7))),
        "compression": lambda: plan(grid(base, compression=("int8",), restart=("never", "2", "1"))),
        "signals": lambda: plan(grid(with_values(base, STEEP), momentum=(0.9,), **SIGNALS)),
    }[case]()
    limits: Iterator[int] = iter(lambda: generator.randrange(5, 12), None)
    assert grow_in_parts(made, tmp_path, limits, in_memory=0 if case == "compression" else 2) >= 3
    check(made, tmp_path, alone(made))


@pytest.mark.slow
def test_a_killed_walk_loses_little(
    base: RunConfig, tmp_path: Path, alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed after any number of steps, it repeats no more than the steps between two saves; the ends are the same."""
    made = plan(grid(base, restart=("2", "3", "never")))  # a long trunk, and a branch within a branch
    expected = alone(made)
    step, done, limit = Trainer.inner_step, 0, 0

    def killed(self: Trainer) -> None:
        nonlocal done
        if done == limit:
            raise KeyboardInterrupt
        step(self)
        done += 1

    monkeypatch.setattr(Trainer, "inner_step", killed)
    monkeypatch.setattr(forest, "_SAVE_SECONDS", 2.0)
    monkeypatch.setattr(forest, "time", SimpleNamespace(perf_counter=lambda: float(done)))  # a step takes a second
    for kill in range(2, made.steps, 7):
        done, limit, path = 0, kill, tmp_path / str(kill)
        in_memory = (0, 8)[kill % 2]
        with pytest.raises(KeyboardInterrupt):
            grow(made, path, in_memory=in_memory)
        limit = -1
        grow(made, path, in_memory=in_memory)
        assert 0 <= done - made.steps <= 3, kill
        check(made, path, expected)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["a process each", "lost states", "one process, several compressions"])
def test_jobs_in_any_order(base: RunConfig, tmp_path: Path, alone: Alone, case: str) -> None:
    """Jobs in any order make the same runs, each with its compression, in the same steps unless states are damaged."""
    damaged, together = case == "lost states", "compressions" in case
    axes = {"compression": COMPRESSIONS[1:]} if together else {"momentum": (0.5, 0.9)}
    made = plan(grid(base, restart=("never", "2"), **axes))
    jobs = made.forest.jobs(20)
    assert len(jobs) > 2
    done, steps = set(), 0
    generator = random.Random(0)
    walker = grower(made, tmp_path)
    while len(done) < len(jobs):
        job = generator.choice([job for job in jobs if job.id not in done and (job.after is None or job.after in done)])
        walker = walker if together else grower(made, tmp_path)
        before = walker.tally.steps
        walker.grow(job.node, deep=job.deep)
        steps += walker.tally.steps - before
        done.add(job.id)
        for number, path in enumerate(sorted((tmp_path / "states").glob("*.safetensors")) if damaged else ()):
            data = path.read_bytes()
            middle, kind = len(data) * 3 // 4, (number + len(done)) % 3
            if kind == 0:
                path.unlink()
            else:
                path.write_bytes((data[:1000], data[:middle] + b"\x01\x40" + data[middle + 2 :])[kind - 1])
    assert (steps == made.steps) != damaged
    check(made, tmp_path, alone(made), no_states=not damaged)


@pytest.mark.slow
def test_a_finished_run_that_gets_lost_is_made_again(base: RunConfig, tmp_path: Path, alone: Alone) -> None:
    """States speak for the runs that were under way alone: one that was finished, and is lost, starts where it must."""
    made = plan(grid(base, momentum=(0.9,), restart=("never", "2", "3")))
    expected = alone(made)
    (never,) = (run for run, config in made.runs.items() if config.outer.restart == "never")
    grow(plan(grid(base, momentum=(0.9,), restart=("never",))), tmp_path)
    calls = iter(range(1000))
    with pytest.raises(Stopped):
        grow(made, tmp_path, should_stop=lambda: next(calls) > 15)
    shutil.rmtree(tmp_path / "runs" / never)
    grow(made, tmp_path)
    check(made, tmp_path, expected)


def test_one_bad_folder_does_not_starve_the_others(base: RunConfig, tmp_path: Path) -> None:
    """A run whose folder cannot be claimed is named at the end; all other runs are done."""
    made = plan(grid(base, restart=("never", "2", "3")))
    (bad,) = (run for run, config in made.runs.items() if config.outer.restart == "2")
    (tmp_path / "runs" / bad).mkdir(parents=True)
    (tmp_path / "runs" / bad / "config.yaml").write_text("[")
    with pytest.raises(ValueError, match="damaged") as caught:
        grow(made, tmp_path)
    assert caught.value.__notes__ == [f"run {bad}"]
    assert [run for run in made.runs if read_summary(tmp_path / "runs" / run, run) is None] == [bad]


def test_other_text_is_refused(lm: TrainConfig, tmp_path: Path) -> None:
    """States of another text are not continued: one clear message."""
    path = textmaker.write(tmp_path / "text.txt", seed=1)
    made = plan(grid(with_values(lm, {"data.corpus": f"file:{path}"}), restart=("never", "2")))
    calls = iter(range(1000))
    with pytest.raises(Stopped):
        grow(made, tmp_path, should_stop=lambda: next(calls) > 10)
    path.write_text(path.read_text()[::-1])
    corpus_of.cache_clear()
    with pytest.raises(ValueError, match="text is not the one"):
        grow(made, tmp_path)


def test_a_wrong_plan_is_noticed(base: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the plan calls two different updates the same, the walk stops instead of mixing the runs up."""
    made = plan(grid(base, lr=(0.3, 0.7), restart=("never", "2")))
    true = made.forest.roots[0]
    monkeypatch.setitem(made.forest.children, true.id, [])
    with pytest.raises(RuntimeError, match="does not take the update"):
        grower(made, tmp_path).grow(true.id)


# ------------------------------------------------------------------------------------------- runs that share no steps

IN_FRAGMENTS = {"sync.fragments": ("ends=embedding|head|norm", "rest=."), "outer.restart": "never"}
ALONE: tuple[dict[str, Any], ...] = (
    IN_FRAGMENTS,
    IN_FRAGMENTS | {"sync.restart": ("ends=auto", "rest=3")},
    IN_FRAGMENTS | {"sync.restart": ("ends=ramp:0.5", "rest=cycle:2,1"), "outer.lr": 0.3},
    {"sync.fragments": ("1",), "sync.restart": ("0=2",)},
    {"sync.delay": 2, "sync.mixing": 0.25, "sync.compression": "int8"},
    IN_FRAGMENTS | {"outer.lr": 1e4, "divergence_loss": 100.0},
)
"""Ways of synchronising that share no steps."""


def mixed(base: RunConfig, *alone: dict[str, Any]) -> Plan:
    """Some that share nothing, the first of them with two rates, among three plain ones."""
    cells = [Cell("", values, with_values(base, values)) for values in (*alone, alone[0] | {"outer.lr": 0.3})]
    cells[1:1] = product(base, [Axis("outer.restart", ("never", "2", "3"))])
    return plan(Sweep("mixed", base, cells))


@pytest.mark.slow
def test_runs_that_share_nothing_are_the_runs_alone(base: RunConfig, tmp_path: Path, alone: Alone) -> None:
    """In fragments, with a policy each or a delay, a run is a tree of one with the bytes of `train`; others share.

    One that diverges ends early, as data.
    """
    base = with_values(base, {"log_every": 2})
    made = mixed(base, *ALONE)
    plain = [run for run, config in made.runs.items() if config.shares_steps]
    (shared,) = (root for root in made.forest.roots if len(root.runs) > 1)
    assert set(shared.runs) == set(plain)
    assert len(made.runs) == len(ALONE) + 1 + 3
    assert made.steps == (len(ALONE) + 1) * base.steps + made.forest.total[shared.id]
    expected = alone(made)
    walker = grow(made, tmp_path)
    check(made, tmp_path, expected)
    (early,) = (reference["summary"] for reference in expected.values() if reference["summary"]["diverged"])
    assert walker.tally.steps == made.steps - base.steps + early["steps"] == len(walker.tally.step_seconds)
    assert early["steps"] < base.steps
    for run in made.runs:
        places = {path.name for path in (tmp_path / "runs" / run).iterdir()} & {"checkpoint", "steps.jsonl"}
        assert len(places) == (0 if run in plain else 2)


@pytest.mark.slow
@pytest.mark.parametrize("kill", [False, True])
def test_a_run_that_shares_nothing_goes_on_from_its_checkpoint(
    base: RunConfig, tmp_path: Path, alone: Alone, monkeypatch: pytest.MonkeyPatch, kill: bool
) -> None:
    """Stopped again and again it repeats no step; killed, none before its checkpoint; it ends with the same bytes."""
    made = mixed(with_values(base, {"checkpoint_every": 1}), ALONE[1])
    expected = alone(made)
    step, done, breaks = Trainer.inner_step, 0, 0
    budget = iter(())

    def killed(self: Trainer) -> None:
        if kill and next(budget, None) is None:
            raise KeyboardInterrupt  # what is no Exception leaves as suddenly as a process that is killed
        step(self)
        nonlocal done
        done += not self.config.shares_steps

    monkeypatch.setattr(Trainer, "inner_step", killed)
    monkeypatch.setattr(forest, "_SAVE_SECONDS", 0.0 if kill else 60.0)
    while True:
        budget = iter(range(15))
        try:
            stop = lambda budget=budget: not kill and next(budget, None) is None  # noqa: E731
            grow(made, tmp_path, should_stop=stop)
            break
        except (Stopped, KeyboardInterrupt):
            breaks += 1
    assert breaks >= 3
    again = done - 2 * base.steps
    # The newest checkpoint may not be whole yet.
    assert (0 < again <= breaks * 2 * base.inner_steps) if kill else (again == 0)
    check(made, tmp_path, expected)


# ------------------------------------------------------------------------------------------------------ states on disk


WEIGHT = torch.arange(40.0).view(5, 8).T
STATE: dict[str, Any] = {
    "format": FORMAT,
    "replicas": [{"weight": WEIGHT, "tied": WEIGHT, "state": {0: {"step": torch.tensor(3.0)}}}],
    "counters": {"run": {"rounds": 2, "policy_state": ()}},
    "lines": [{"metrics": {"loss": math.nan}, "rounds": [[["run"], {"step": 1}]]}],
}


@pytest.fixture
def store(tmp_path: Path) -> tuple[States, list[str]]:
    """States in an empty folder, and the lines that it prints."""
    lines: list[str] = []
    return States(tmp_path, states.Tally(), in_memory=0, on_progress=lines.append), lines


def test_a_full_disk(store: tuple[States, list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """A state that cannot be written is told with its folder; those that are there can be removed together."""
    (saved, _), node = store, Node("node", None, 0, 8, ("run",))
    saved.write(node, "end", STATE)
    monkeypatch.setattr(states.parts, "save", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match=r"cannot be written into .* \(No space left on device\); free space there"):
        saved.write(node, "part", STATE)
    assert len(list(saved.folder.iterdir())) == 1
    saved.clear()
    assert list(saved.folder.iterdir()) == []


def test_damaged_states_are_never_used(store: tuple[States, list[str]]) -> None:
    """A state with any byte altered, or cut anywhere, is reported in one line, or is read with every bit as written."""
    (saved, lines), node, generator = store, Node("node", None, 0, 8, ("run",)), random.Random(0)
    saved.write(node, "end", STATE)
    path = saved.path(node, "end")
    data, unused = path.read_bytes(), 0
    for case in range(240):
        index, lines[:] = generator.randrange(len(data)), []
        other = bytes([data[index] ^ 1 << generator.randrange(8)])
        path.write_bytes(data[:index] + (other + data[index + 1 :] if case % 4 else b""))
        state = saved.read(node, "end", ["run"])
        assert (state is None) == (len(lines) == 1)
        assert all("that part is done again" in line and "\n" not in line for line in lines)
        unused += state is None
        if state is not None:  # a byte that says nothing, such as a space
            assert repr(state | {"file": ""}) == repr(STATE | {"file": ""})
            assert state["replicas"][0]["weight"].equal(WEIGHT)
    assert unused > 220


@pytest.mark.parametrize("case", ["of another node", "of an earlier version", "of other runs", "unsealed"])
def test_other_states_are_not_used(store: tuple[States, list[str]], case: str) -> None:
    """A state says which node, runs and format it is of; those of earlier versions are named, and go with the node."""
    (saved, lines), node = store, Node("node", None, 0, 8, ("run",))
    path = saved.path(node, "end")
    if case == "of an earlier version":
        saved.write(node, "end", STATE | {"format": FORMAT - 1})
    elif case == "unsealed":
        plain: dict[str, Any] = {"counters": {"run": {}}, "lines": torch.tensor(list(b"[]"), dtype=torch.uint8)}
        parts.write(path, parts.take_apart(plain | {"format": FORMAT, "file": path.name}))
    else:
        saved.write(Node("other" if "node" in case else "node", None, 0, 8, ("run",)), "end", STATE)
    if case == "of another node":
        saved.path(Node("other", None, 0, 8, ("run",)), "end").rename(path)
    assert saved.read(node, "end", ["run", "more"] if "runs" in case else ["run"]) is None
    assert [line.split()[0] for line in lines] == ([] if "runs" in case else [path.name])
    saved.forget(node)
    assert list(saved.folder.iterdir()) == []


@pytest.mark.slow
def test_damaged_tokens_end_a_walk(lm: TrainConfig, tmp_path: Path) -> None:
    """On a shard with a flipped bit no run finishes, and no state stays that the repaired sweep would use."""
    ids = [np.arange(size, dtype=np.uint16) * 7 % 90 for size in (4000, 600)]
    tokens = shardmaker.prepared(tmp_path / "tokens", ids[:1], ids[1:], 90)
    made = plan(grid(with_values(lm, {"data.corpus": f"tokens:{tokens}"}), lr=(0.3, 0.7), restart=("never", "2")))
    grow(made, tmp_path / "whole")
    expected = {run: outcome(tmp_path / "whole" / "runs" / run) for run in made.runs}
    shardmaker.flip(tokens / "train-00000.bin")
    corpus_of.cache_clear()
    with pytest.raises(RunError, match=r"train-00000\.bin was damaged since"):
        grow(made, tmp_path, in_memory=0)
    assert list((tmp_path / "states").iterdir()) == []
    assert not any(read_summary(tmp_path / "runs" / run) for run in made.runs)
    shardmaker.flip(tokens / "train-00000.bin")
    corpus_of.cache_clear()
    assert grow(made, tmp_path).tally.steps == made.steps
    check(made, tmp_path, expected)


# ----------------------------------------------------------------------------------------------------- states in memory


@pytest.mark.slow
def test_few_states_are_held(base: RunConfig, tmp_path: Path) -> None:
    """However the runs branch, at most log2(runs) + 1 states are held; a limit of 0 holds none."""
    base = with_values(base, {"steps": 24, "inner_steps": 1})
    policies = ["never", *(f"at:{24 - 3**level - extra}" for level in range(3) for extra in range(2))]
    made = plan(grid(base, restart=tuple(policies), momentum=(0.9,)))
    tally, none = (grow(made, tmp_path / str(limit), in_memory=limit).tally for limit in (8, 0))
    assert 1 <= tally.most_held <= len(made.runs).bit_length()
    assert (tally.spilled, none.most_held) == (0, 0)
    assert none.spilled > 0


@pytest.mark.slow
@pytest.mark.parametrize("room", ["all", "some", "one piece too small"])
def test_states_stay_on_the_device_while_there_is_room(
    base: RunConfig, tmp_path: Path, alone: Alone, monkeypatch: pytest.MonkeyPatch, room: str
) -> None:
    """Copies on the device, or in main memory without room there, are the runs alone, too; a short walk writes none."""
    made = plan(grid(base, lr=(0.3, 0.7, 1.1), restart=("never", "2", "3")))  # three ways at the first branch
    on_device, written, copied = [], [], []
    usual = states._cloned

    def cloned(value: Any, device: str | None = None) -> Any:
        if isinstance(value, dict) and "engine" in value:  # a whole state
            copied.append(device)
            if room == "one piece too small" and copied == [None]:
                raise torch.OutOfMemoryError("no such piece")
        return usual(value, device)

    def free(device: torch.device) -> int:
        on_device.append(any(branch.on_device for branch in walker.states.branches))
        assert device.type == "cpu"
        return 0 if room == "some" and on_device[-1] else 10**9

    monkeypatch.setattr(states, "_cloned", cloned)
    monkeypatch.setattr(States, "write", lambda *_: written.append(1))
    monkeypatch.setattr(states, "free_memory", free)
    walker = grower(made, tmp_path)
    for root in made.forest.roots:
        walker.grow(root.id)
    assert walker.tally.steps == made.steps
    check(made, tmp_path, alone(made))
    assert written == walker.states.branches == []
    assert any(on_device) == (room != "one piece too small")
    assert ("cpu" in copied) == (room != "all")
    assert (walker.tally.most_held, walker.tally.spilled) == (2, 0)


def test_room_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a step needs at its peak stays free, and a tenth of the whole; none before a step has shown its need."""
    numbers = {"memory_reserved": 30, "max_memory_allocated": 25, "memory_allocated": 20}
    for name, number in numbers.items():
        monkeypatch.setattr(torch.cuda, name, lambda _, number=number: number)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (10, 80))
    gpu = torch.device("cuda:0")
    # Beside 20 bytes in use 10 are cached and 10 free; 5 come and go with each step, and 8 are a tenth of 80.
    assert states.free_memory(gpu) == (10 + 30 - 20) - (25 - 20) - 8
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 20)
    assert states.free_memory(gpu) == 0
    assert states.free_memory(torch.device("cpu")) == 0
