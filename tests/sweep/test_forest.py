"""A forest's leaves are the runs done alone, bit for bit, whatever is shared, spilled or interrupted."""

from __future__ import annotations

import itertools
import json
import random
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import textmaker
from amount import amount
from twophase.base.config import with_values
from twophase.diloco.transfer import WIRES
from twophase.policies.text import _REGISTRY
from twophase.restart import HARD, PROBES, RestartPolicy, register
from twophase.runs.folder import RunFolder, read_lines, read_summary
from twophase.sweep import forest, states
from twophase.sweep.forest import Grower, Stopped
from twophase.sweep.grid import Axis, Cell, Sweep, product
from twophase.sweep.plan import Plan, plan
from twophase.sweep.states import States
from twophase.tasks.build import build_task
from twophase.tasks.lm.config import DataConfig, ModelConfig, TrainConfig
from twophase.tasks.lm.task import corpus_of
from twophase.training.train import train
from twophase.training.trainer import Trainer

TIMES = ("seconds", "engine_share")


@pytest.fixture
def base(tmp_path: Path) -> TrainConfig:
    corpus = textmaker.write(tmp_path / "text.txt")
    return TrainConfig(
        model=ModelConfig(layers=1, hidden_size=8, intermediate_size=8, heads=1),
        data=DataConfig(corpus=f"file:{corpus}", sequence_length=8, batch_size=2, validation_windows=4),
        steps=26,
        inner_steps=4,
    )


class Shelf:
    """Run folders side by side."""

    def __init__(self, path: Path, made: Plan) -> None:
        self.path, self.made = path, made
        self.claims: list[str] = []

    def finished(self, run: str) -> bool:
        """As Place says."""
        return read_summary(self.path / run, run) is not None

    @contextmanager
    def claim(self, run: str) -> Iterator[RunFolder]:
        """As Place says."""
        self.claims.append(run)
        with RunFolder.claim(self.path / run, self.made.runs[run]) as folder:
            yield folder


def grower(made: Plan, path: Path, **options: Any) -> Grower:
    return Grower(made.forest, made.runs, Shelf(path / "runs", made), path / "states", **options)


def grow(made: Plan, path: Path, **options: Any) -> Grower:
    one = grower(made, path, **options)
    for root in made.forest.roots:
        one.grow(root.id)
    return one


def grow_in_parts(made: Plan, path: Path, limits: Iterable[int], **options: Any) -> int:
    """Grow, stopped after so many inner steps and taken up by a new grower, without a step twice: how many stops."""
    steps = 0
    for stops, limit in enumerate(limits):
        left = iter(range(1, limit))
        one = grower(made, path, should_stop=lambda left=left: next(left, None) is None, **options)
        try:
            for root in made.forest.roots:
                one.grow(root.id)
        except Stopped:
            steps += one.tally.steps
            continue
        assert steps + one.tally.steps == made.steps
        return stops
    raise AssertionError("the limits are at an end, and the forest is not grown")


def outcome(folder: Path) -> dict[str, Any]:
    """Everything that a run leaves, but times and the words of the machine."""
    summary = json.loads((folder / "summary.json").read_text())
    rounds, metrics = read_lines(folder / "rounds.jsonl"), read_lines(folder / "metrics.jsonl")
    return {
        "summary": {key: value for key, value in summary.items() if key not in TIMES},
        "rounds": [{key: value for key, value in line.items() if key not in TIMES} for line in rounds],
        "metrics": metrics,
        "weights": (folder / "weights.safetensors").read_bytes(),
        "config": (folder / "config.yaml").read_bytes(),
    }


def alone(made: Plan, path: Path) -> dict[str, dict[str, Any]]:
    found = {}
    for run, config in made.runs.items():
        with RunFolder.claim(path / run, config) as folder:
            train(build_task(config), config, folder)
        found[run] = outcome(path / run)
    return found


def check(made: Plan, path: Path, expected: dict[str, dict[str, Any]]) -> None:
    for run, wanted in expected.items():
        assert outcome(path / "runs" / run) == wanted, made.runs[run]
    assert not list((path / "states").glob("*")), "states of finished nodes stay behind"


POLICIES = ("never", "1", "2", "3", "5", "cycle:2,1", "at:2,4", "soft:2:0.5:0.25", "soft:3:0:1", "soft:2:1:0")


def draw(base: TrainConfig, generator: random.Random, *, count: int) -> Sweep:
    """Random runs around few values, so that much is shared, in both forms and with several inner steps a round."""
    cells = {}
    for _ in range(count):
        values = {
            "outer.lr": generator.choice([0.3, 0.7, 7.0]),
            "outer.momentum": generator.choice([0.0, 0.5, 0.9]),
            "outer.nesterov": generator.random() < 0.5,
            "outer.form": generator.choice(["sum", "sum", "ema"]),
            "outer.restart": generator.choice(POLICIES),
            "inner_steps": generator.choice([4, 4, 4, 7, 13]),
            "seed": generator.choice([0, 0, 0, 1]),
        }
        cell = Cell("", values, with_values(base, values))
        cells[cell.run_id] = cell
    return Sweep("random", base, list(cells.values()))


@pytest.mark.parametrize("seed", range(amount(2, 20)))
def test_leaves_are_the_runs_alone(base: TrainConfig, tmp_path: Path, seed: int) -> None:
    """On a random grid every leaf has the weights, logs and summary of its run done alone, and no step is repeated."""
    generator = random.Random(seed)
    base = with_values(base, {"evaluate_every": generator.choice([0, 2])})
    made = plan(draw(base, generator, count=14), merge=seed % 2 == 0)
    one = grow(made, tmp_path, in_memory=generator.choice([0, 1, 8]))
    assert one.tally.steps == made.steps
    check(made, tmp_path, alone(made, tmp_path / "alone"))
    assert one.tally.in_memory == 0 == one.tally.memory_bytes


def grid(base: TrainConfig, **values: tuple[Any, ...]) -> Sweep:
    outer = ("lr", "momentum", "restart", "nesterov", "probe_sequences")
    names = {name: f"outer.{name}" for name in outer} | {"wire": "sync.wire"}
    return Sweep("grid", base, product(base, [Axis(names.get(name, name), some) for name, some in values.items()]))


@pytest.mark.parametrize("seed", range(amount(2, 10)))
def test_interrupted_at_random_steps(base: TrainConfig, tmp_path: Path, seed: int) -> None:
    """Stopped again and again and taken up by new processes' worth of state, it repeats no step and changes no bit."""
    generator = random.Random(100 + seed)
    made = plan(grid(base, momentum=(0.5, 0.9), restart=("never", "2", "3", "1"), inner_steps=(4, 7)))
    done = 0
    while True:
        left = generator.randrange(1, 60)

        def stop(budget: list[int] = [left]) -> bool:  # noqa: B006 - the budget of this attempt
            budget[0] -= 1
            return budget[0] <= 0

        one = grower(made, tmp_path, should_stop=stop, in_memory=generator.choice([0, 2]))
        try:
            for root in made.forest.roots:
                one.grow(root.id)
        except Stopped:
            done += one.tally.steps
            continue
        done += one.tally.steps
        break
    assert done == made.steps
    check(made, tmp_path, alone(made, tmp_path / "alone"))


def test_wires_share_nothing(base: TrainConfig) -> None:
    """Runs of different wires have no node in common, and none stands for another; those of one wire share as ever."""
    made = plan(grid(base, wire=WIRES, momentum=(0.0, 0.9), restart=("never", "1", "3")))
    assert len(made.forest.roots) == len(WIRES)
    for node in made.forest.nodes.values():
        assert len({made.runs[run].sync.wire for run in node.runs}) == 1
    alone = [plan(grid(base, wire=(wire,), momentum=(0.0, 0.9), restart=("never", "1", "3"))) for wire in WIRES]
    assert made.steps == sum(one.steps for one in alone)
    assert made.stands_for == {run: other for one in alone for run, other in one.stands_for.items()}
    assert len(made.stands_for) == len(WIRES) * len(alone[0].stands_for) > 0


def test_what_a_wire_owes_is_forked_with_the_runs(base: TrainConfig, tmp_path: Path) -> None:
    """On a lossy wire, leaves are the runs alone byte for byte: what was not sent is part of every branch's state."""
    made = plan(grid(base, wire=("bfloat16", "int8"), restart=("never", "2", "4")))
    expected = alone(made, tmp_path / "alone")
    for in_memory in (0, 8):  # every branch from disk, or none
        one = grow(made, tmp_path / str(in_memory), in_memory=in_memory)
        assert one.tally.steps == made.steps < len(made.runs) * base.steps
        assert (one.tally.spilled > 0) == (in_memory == 0)
        check(made, tmp_path / str(in_memory), expected)
    assert len({found["weights"] for found in expected.values()}) == len(made.runs)


def test_what_a_wire_owes_survives_interruptions(base: TrainConfig, tmp_path: Path) -> None:
    """Stopped every few inner steps, inside stretches and at branches, runs on int8 come out as if done alone."""
    made = plan(grid(base, wire=("int8",), restart=("never", "2", "3")))
    assert grow_in_parts(made, tmp_path, itertools.cycle((8, 9, 10)), in_memory=0) >= 4
    check(made, tmp_path, alone(made, tmp_path / "alone"))


def test_jobs_of_several_wires_in_turn(base: TrainConfig, tmp_path: Path) -> None:
    """One process that takes jobs of several wires in turn has each run's own wire, and what it owes, every time."""
    made = plan(grid(base, wire=WIRES, restart=("never", "2")))
    jobs = made.forest.jobs(1)
    one, steps = grower(made, tmp_path), 0
    for depth in (True, False):  # the three trunks, then their leaves
        for job in (job for job in jobs if (job.after is None) == depth):
            one.grow(job.node, deep=job.deep)
            steps += 1
    assert (steps, one.tally.steps) == (9, made.steps)
    for run, wanted in alone(made, tmp_path / "alone").items():
        assert outcome(tmp_path / "runs" / run) == wanted


IN_FRAGMENTS = {"sync.fragments": ("ends=embedding|head|norm", "rest=."), "outer.restart": "never"}
ALONE: tuple[dict[str, Any], ...] = (
    IN_FRAGMENTS,
    IN_FRAGMENTS | {"sync.restart": ("ends=auto", "rest=3")},
    IN_FRAGMENTS | {"sync.restart": ("ends=probe:keep,average", "rest=loss"), "outer.lr": 0.3},
    {"sync.fragments": ("1",), "sync.restart": ("0=2",)},
    {"sync.delay": 2, "sync.mixing": 0.25, "sync.wire": "int8"},
)
"""Ways of synchronising that share no steps."""


def mixed(base: TrainConfig, *alone: dict[str, Any]) -> Plan:
    """Some that share nothing, the first of them with two rates, among three plain ones."""
    cells = [Cell("", values, with_values(base, values)) for values in (*alone, alone[0] | {"outer.lr": 0.3})]
    cells[1:1] = product(base, [Axis("outer.restart", ("never", "2", "3"))])
    return plan(Sweep("mixed", base, cells))


def test_runs_that_share_nothing_are_the_runs_alone(base: TrainConfig, tmp_path: Path) -> None:
    """In fragments, with a policy each or a delay, a run is a tree of one with the bytes of `train`; others share."""
    base = with_values(base, {"log_every": 5})
    made = mixed(base, *ALONE)
    plain = [run for run, config in made.runs.items() if config.shares_steps]
    (shared,) = (root for root in made.forest.roots if len(root.runs) > 1)
    assert set(shared.runs) == set(plain)
    assert len(made.runs) == len(ALONE) + 1 + 3
    assert made.steps == (len(ALONE) + 1) * base.steps + made.forest.total[shared.id]
    one = grow(made, tmp_path)
    assert one.tally.steps == made.steps == len(one.tally.step_seconds)
    check(made, tmp_path, alone(made, tmp_path / "alone"))
    for run in made.runs:
        kept = {path.name for path in (tmp_path / "runs" / run).iterdir()} & {"checkpoint", "steps.jsonl"}
        assert len(kept) == (0 if run in plain else 2)


@pytest.mark.parametrize("kill", [False, True])
def test_a_run_that_shares_nothing_goes_on_from_its_checkpoint(
    base: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kill: bool
) -> None:
    """Stopped again and again it repeats no step; killed, none before its checkpoint; it ends with the same bytes."""
    made = mixed(with_values(base, {"checkpoint_every": 1}), ALONE[1])
    expected = alone(made, tmp_path / "alone")
    step, done, breaks = Trainer.inner_step, 0, 0
    left = iter(())

    def killed(self: Trainer) -> None:
        if kill and next(left, None) is None:
            raise KeyboardInterrupt  # what is no Exception leaves as suddenly as a process that is killed
        step(self)
        nonlocal done
        done += not self.config.shares_steps

    monkeypatch.setattr(Trainer, "inner_step", killed)
    while True:
        left = iter(range(15))
        try:
            stop = lambda left=left: not kill and next(left, None) is None  # noqa: E731
            grow(made, tmp_path, save_seconds=0.0 if kill else 60.0, should_stop=stop)
            break
        except (Stopped, KeyboardInterrupt):
            breaks += 1
    assert breaks >= 3
    again = done - 2 * base.steps
    # The newest checkpoint may not be whole yet.
    assert (0 < again <= breaks * 2 * base.inner_steps) if kill else (again == 0)
    check(made, tmp_path, expected)


def test_divergence_of_a_run_that_shares_nothing(base: TrainConfig, tmp_path: Path) -> None:
    """It ends early, as data; the others are done."""
    wild = IN_FRAGMENTS | {"outer.lr": 1e4, "divergence_loss": 6.0}
    cells = [Cell("", values, with_values(base, values)) for values in (wild, IN_FRAGMENTS)]
    made = plan(Sweep("wild", base, cells))
    one = grow(made, tmp_path)
    summaries = [read_summary(tmp_path / "runs" / run, run) or {} for run in made.runs]
    assert [summary["diverged"] for summary in summaries] == [True, False]
    assert one.tally.steps == summaries[0]["steps"] + base.steps < made.steps


def test_jobs_in_any_order(base: TrainConfig, tmp_path: Path) -> None:
    """Cut into jobs and done by several growers one after another, the forest takes the same steps to the same runs."""
    made = plan(grid(base, lr=(0.3, 0.7), momentum=(0.5, 0.9), restart=("never", "2", "3")))
    jobs = made.forest.jobs(40)
    assert len(jobs) > 4
    done, steps = set(), 0
    generator = random.Random(0)
    while len(done) < len(jobs):
        job = generator.choice([job for job in jobs if job.id not in done and (job.after is None or job.after in done)])
        one = grower(made, tmp_path)
        one.grow(job.node, deep=job.deep)
        steps += one.tally.steps
        done.add(job.id)
    assert steps == made.steps
    for run, wanted in alone(made, tmp_path / "alone").items():
        assert outcome(tmp_path / "runs" / run) == wanted


def test_lost_states_are_made_again(base: TrainConfig, tmp_path: Path) -> None:
    """A job whose states are gone, torn or of other runs goes back as far as it must; the result is the same."""
    made = plan(grid(base, momentum=(0.5, 0.9), restart=("never", "2", "3")))
    jobs = made.forest.jobs(30)
    for job in jobs:
        grower(made, tmp_path).grow(job.node, deep=job.deep)
        for number, path in enumerate(sorted((tmp_path / "states").glob("*.pt"))):
            if number % 2:
                path.unlink()
            else:
                path.write_bytes(path.read_bytes()[:1000])
    for run, wanted in alone(made, tmp_path / "alone").items():
        assert outcome(tmp_path / "runs" / run) == wanted


def test_a_finished_run_that_gets_lost_is_made_again(base: TrainConfig, tmp_path: Path) -> None:
    """States speak for the runs that were under way alone: one that was finished, and is lost, starts where it must."""
    made = plan(grid(base, momentum=(0.9,), restart=("never", "3", "4"), nesterov=(False,)))
    expected = alone(made, tmp_path / "alone")
    (never,) = (run for run, config in made.runs.items() if config.outer.restart == "never")
    (tmp_path / "runs").mkdir()
    (tmp_path / "alone" / never).rename(tmp_path / "runs" / never)
    calls = iter(range(1000))
    with pytest.raises(Stopped):
        grow(made, tmp_path, should_stop=lambda: next(calls) > 22)
    shutil.rmtree(tmp_path / "runs" / never)
    grow(made, tmp_path)
    check(made, tmp_path, expected)


def test_one_bad_folder_does_not_starve_the_others(base: TrainConfig, tmp_path: Path) -> None:
    """A run whose folder cannot be claimed is named at the end; all other runs are done."""
    made = plan(grid(base, restart=("never", "2", "3", "4")))
    (bad,) = (run for run, config in made.runs.items() if config.outer.restart == "2")
    (tmp_path / "runs" / bad).mkdir(parents=True)
    (tmp_path / "runs" / bad / "config.yaml").write_text("[")
    with pytest.raises(ValueError, match="damaged") as caught:
        grow(made, tmp_path)
    assert caught.value.__notes__ == [f"run {bad}"]
    assert [read_summary(tmp_path / "runs" / run, run) is not None for run in made.runs] == [
        run != bad for run in made.runs
    ]


def test_many_late_branches_hold_few_states(base: TrainConfig, tmp_path: Path) -> None:
    """However the runs branch, no more than log2(runs) + 1 states are held."""
    base = with_values(base, {"steps": 64, "inner_steps": 1})
    policies = ["never", *(f"at:{64 - 4**level - extra}" for level in range(3) for extra in range(2))]
    made = plan(grid(base, restart=tuple(policies), momentum=(0.9,)))
    one = grow(made, tmp_path)
    assert 1 <= one.tally.most_held <= len(made.runs).bit_length()


def test_divergence_in_a_shared_stretch(base: TrainConfig, tmp_path: Path) -> None:
    """When runs diverge together, each is written as diverged, as if alone, and nothing below is trained."""
    base = with_values(base, {"divergence_loss": 5.0, "outer.lr": 1000.0})
    made = plan(grid(base, lr=(1000.0, 0.7), momentum=(0.5,), restart=("never", "3", "4", "5")))
    one = grow(made, tmp_path)
    assert one.tally.steps < made.steps
    expected = alone(made, tmp_path / "alone")
    assert sum(wanted["summary"]["diverged"] for wanted in expected.values()) >= 3
    check(made, tmp_path, expected)


def test_held_states_are_few(base: TrainConfig, tmp_path: Path) -> None:
    """Depth first, smallest branch first: at most log2(runs) + 1 states at a time; a limit of 0 holds none."""
    made = plan(
        grid(
            with_values(base, {"steps": 36}),
            lr=(0.3,),
            momentum=(0.5, 0.9),
            restart=("2", "3", "4", "5", "never"),
        )
    )
    one = grow(made, tmp_path / "a")
    assert 1 <= one.tally.most_held <= len(made.runs).bit_length()
    assert one.tally.spilled == 0
    other = grow(made, tmp_path / "b", in_memory=0)
    assert (other.tally.most_held, other.tally.spilled > 0) == (0, True)


@pytest.mark.parametrize("room", ["all", "some", "one piece too small"])
def test_states_stay_on_the_device_while_there_is_room(
    base: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: str
) -> None:
    """Copies on the device are the runs alone, too, so nothing that trains goes on writing to them.

    What finds no room is in main memory; and nothing is written to disk in a walk that is shorter than `save_seconds`.
    """
    made = plan(grid(base, lr=(0.3, 0.7, 1.1), restart=("never", "2", "4")))  # three ways at the first branch
    sizes, written, copied = [], [], []
    usual = states._cloned

    def cloned(value: Any, device: str | None = None) -> Any:
        if isinstance(value, dict) and "engine" in value:  # a whole state
            copied.append(device)
            if room == "one piece too small" and copied == [None]:
                raise torch.OutOfMemoryError("no such piece")
        return usual(value, device)

    def free(device: torch.device) -> int:
        sizes.append(one.tally.device_bytes)
        assert device.type == "cpu"
        return 0 if room == "some" and one.tally.on_device else 10**9

    monkeypatch.setattr(states, "_cloned", cloned)
    monkeypatch.setattr(States, "write", lambda *_: written.append(1))
    one = grower(made, tmp_path, free=free)
    for root in made.forest.roots:
        one.grow(root.id)
    assert one.tally.steps == made.steps
    check(made, tmp_path, alone(made, tmp_path / "alone"))
    assert written == []
    assert (max(sizes) > 0) == (room != "one piece too small")
    assert ("cpu" in copied) == (room != "all")
    assert (one.tally.most_held, one.tally.spilled) == (2, 0)
    assert one.tally.in_memory == one.tally.memory_bytes == one.tally.on_device == one.tally.device_bytes == 0


def test_room_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a step needs at its peak stays free, and a tenth of the whole; before a step nobody knows what it needs."""
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


def test_a_killed_walk_loses_little(base: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed after any number of steps, it repeats no more than the steps of `save_seconds`; the ends are the same."""
    made = plan(grid(base, restart=("3", "4", "never")))  # a long trunk, and a branch within a branch
    expected = alone(made, tmp_path / "alone")
    step, done, limit = Trainer.inner_step, 0, 0

    def killed(self: Trainer) -> None:
        nonlocal done
        if done == limit:
            raise KeyboardInterrupt
        step(self)
        done += 1

    monkeypatch.setattr(Trainer, "inner_step", killed)
    monkeypatch.setattr(forest, "time", SimpleNamespace(perf_counter=lambda: float(done)))  # a step takes a second
    for kill in range(2, made.steps, 3):
        done, limit, path = 0, kill, tmp_path / str(kill)
        options: dict[str, Any] = {"in_memory": (0, 8)[kill % 2], "save_seconds": 2.0}
        with pytest.raises(KeyboardInterrupt):
            grow(made, path, **options)
        limit = -1
        grow(made, path, **options)
        assert 0 <= done - made.steps <= 3, kill
        check(made, path, expected)


def test_a_wrong_plan_is_noticed(base: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the plan calls two different updates the same, the walk stops instead of mixing the runs up."""
    made = plan(grid(base, lr=(0.3, 0.7), restart=("never", "2")))
    true = made.forest.roots[0]
    monkeypatch.setitem(made.forest.children, true.id, [])
    with pytest.raises(RuntimeError, match="does not take the update"):
        grower(made, tmp_path).grow(true.id)


def test_two_runs_of_one_history(base: TrainConfig, tmp_path: Path) -> None:
    """Without merging, runs of the same bits share all steps and still get a folder each."""
    made = plan(grid(base, momentum=(0.0,), restart=("never", "2"), nesterov=(False, True)), merge=False)
    assert len(made.runs) == 4
    one = grow(made, tmp_path)
    assert one.tally.steps == 26
    check(made, tmp_path, alone(made, tmp_path / "alone"))


def test_adaptive_policies_walk_alone(base: TrainConfig, tmp_path: Path) -> None:
    """A policy that decides from measured signals shares the first round's inner steps only, and keeps its memory."""

    @register("test_every_other")
    @dataclass(frozen=True, slots=True)
    class EveryOther(RestartPolicy):
        needs = frozenset({"cosine"})

        def decide(self, state, signal):  # type: ignore[no-untyped-def]
            seen = state.get("seen", 0.0) + (signal.cosine is not None)
            return {"seen": seen}, HARD if seen % 2 == 0 else None

    try:
        made = plan(grid(base, momentum=(0.5, 0.9), restart=("never", "test_every_other")))
        assert made.steps == 4 * 26 - 3 * 4
        grow(made, tmp_path)
        check(made, tmp_path, alone(made, tmp_path / "alone"))
    finally:
        del _REGISTRY["test_every_other"]


def test_other_text_is_refused(base: TrainConfig, tmp_path: Path) -> None:
    """States of another text are not continued: one clear message."""
    made = plan(grid(base, restart=("never", "2")))
    calls = iter(range(1000))
    with pytest.raises(Stopped):
        grower(made, tmp_path, should_stop=lambda: next(calls) > 10).grow(made.forest.roots[0].id)
    path = Path(base.data.corpus.removeprefix("file:"))
    path.write_text(path.read_text()[::-1])
    corpus_of.cache_clear()
    with pytest.raises(ValueError, match="text is not the one"):
        grow(made, tmp_path)


ADAPTIVE = (
    *("opposed", "loss:0.0", "slowmo", "tracked:3", "lookahead:0.2:0.2", "debiased:3"),
    *("probe:drop,average", "probe:keep,average"),
)


@pytest.mark.parametrize(("momentum", "merge"), [(0.0, False), (0.9, True)])
def test_policies_that_need_signals_are_as_alone(
    base: TrainConfig, tmp_path: Path, momentum: float, merge: bool
) -> None:
    """Runs whose policies need losses, learning rates, probes or steps come out of a sweep as if done alone.

    Beside schedules that share their first round's inner steps and, at momentum 0, all that a step does not change; and
    also, with momentum, when the sweep is stopped again and again, in rounds in which they remember something.
    """
    steep = {"inner.lr": 0.03, "outer.lr": 4.0}  # the loss rises again and again
    base = with_values(base, {"steps": 14, "inner_steps": 2, **steep})
    made = plan(grid(base, momentum=(momentum,), restart=("never", "1", "2", *ADAPTIVE)), merge=merge)
    one = grow(made, tmp_path, in_memory=1)
    assert one.tally.steps == made.steps < len(made.runs) * base.steps
    expected = alone(made, tmp_path / "alone")
    check(made, tmp_path, expected)
    if momentum:
        assert grow_in_parts(made, tmp_path / "parts", itertools.repeat(11)) >= 8
        check(made, tmp_path / "parts", expected)
    found = {made.runs[run].outer.restart: wanted["summary"] for run, wanted in expected.items()}
    differing = {"1", "2", *ADAPTIVE} if momentum else {"lookahead:0.2:0.2", *ADAPTIVE[-2:]}
    assert found["never"]["checksum"] not in {found[policy]["checksum"] for policy in differing}
    assert all(found[policy]["restarts"] > 0 for policy in ("loss:0.0", "tracked:3"))
    assert len(made.runs) == 3 + len(ADAPTIVE)  # nobody stands for another: their updates differ, or may


def test_a_policy_with_a_buffer_of_its_own_has_it_at_momentum_0_too(base: TrainConfig, tmp_path: Path) -> None:
    """`auto` takes nothing of the rule: alone and in a sweep, at momentum 0 it is the same run as at any other."""
    base = with_values(base, {"steps": 18, "outer.lr": 1.0})
    both = grid(base, momentum=(0.0, 0.5), restart=("never", "auto"))
    assert len(plan(both).runs) == 3
    made = plan(both, merge=False)
    grow(made, tmp_path)
    expected = alone(made, tmp_path / "alone")
    check(made, tmp_path, expected)
    ends: dict[str, set[str]] = {}
    for run, found in expected.items():
        ends.setdefault(made.runs[run].outer.restart, set()).add(found["summary"]["checksum"])
    assert len(ends["auto"]) == 1
    assert len(ends["never"]) == 2
    assert not ends["auto"] & ends["never"]  # one of which is plain averaging


@pytest.mark.parametrize("merge", [True, False])
def test_probes_of_several_sizes_are_as_alone(base: TrainConfig, tmp_path: Path, merge: bool) -> None:
    """Runs that are shown more and fewer sequences share their first round, and each decides by its own number.

    The number changes nothing where no policy probes, and one that is all of a batch is as good as none.
    """
    base = with_values(base, {"data.batch_size": 3, "steps": 18, "inner.lr": 0.05})  # where other numbers choose others
    given = grid(base, restart=("never", "probe:0.25,0.5,0.75,1,1.5,2,2.5,3,4"), probe_sequences=(3, 2, 1, 0))
    made = plan(given, merge=merge)
    none, probing = 1, 3
    assert made.steps == base.inner_steps + (none + probing) * (base.steps - base.inner_steps)
    assert len(made.runs) == (none + probing if merge else 8)
    one = grow(made, tmp_path)
    assert one.tally.steps == made.steps
    expected = alone(made, tmp_path / "alone")
    check(made, tmp_path, expected)
    assert len({found["summary"]["checksum"] for found in expected.values()}) == none + probing


def test_a_policy_that_only_restarts_may_probe_at_momentum_0(base: TrainConfig, tmp_path: Path) -> None:
    """Unmerged it stands beside schedules and other sizes of the probe, and counts its own restarts."""

    @register("test_tries")
    @dataclass(frozen=True, slots=True)
    class Tries(RestartPolicy):
        needs = frozenset({PROBES})

        def candidates(self, rule):  # type: ignore[no-untyped-def]
            del rule
            return (None, HARD)

        def decide(self, state, signal):  # type: ignore[no-untyped-def]
            first = signal.probes[0] if signal.probes else 0.0
            return state, HARD if int(1e6 * first) % 2 else None

    try:
        given = grid(base, momentum=(0.0,), restart=("never", "test_tries"), probe_sequences=(0, 1))
        assert len(plan(given).runs) == 1
        made = plan(given, merge=False)
        grow(made, tmp_path)
        expected = alone(made, tmp_path / "alone")
        check(made, tmp_path, expected)
        counts = [found["summary"]["restarts"] for found in expected.values()]
        assert len(set(counts)) == 3  # never has none, and two sizes see other digits
    finally:
        del _REGISTRY["test_tries"]
