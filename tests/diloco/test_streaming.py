"""Fragments on their own schedules: staggered, delayed and mixed syncs against a loop that says the same plainly."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from replicas import NAMES, drift, network, same_bits, start, through_file, unlike
from twophase.diloco.communicator import Done, SingleProcess
from twophase.diloco.engine import DiLoCo
from twophase.diloco.report import RoundReport
from twophase.restart import Periodic
from twophase.rule import OuterRule

HEAVY_BALL = OuterRule(0.3, 0.9)
NESTEROV = OuterRule(0.3, 0.9, nesterov=True)
SPARSE = "topk:8:2bit"
EMA = OuterRule(1.0, 0.9, nesterov=True, form="ema")
each_rule = pytest.mark.parametrize("rule", [HEAVY_BALL, NESTEROV, EMA], ids=["heavy ball", "nesterov", "ema"])

BLOCKS = {"first": r"^0\.", "norm": r"^2\.", "last": r"^3\."}


# --- equal to a loop in plain torch -------------------------------------------------------------------------------


@dataclass
class Part:
    """A fragment of the plain loop."""

    names: list[str]
    offset: int
    """The inner step of a round, from 1, after which its pseudo-gradient is taken."""
    period: int
    """Its momentum restarts after every so many of its rounds; 0 means never."""
    rounds: int = 0
    steps: int = 0
    momentum: dict[str, Tensor] = field(default_factory=dict)
    launched: dict[str, Tensor] | None = None
    """A pseudo-gradient under way."""
    age: int = 0


class Plain:
    """Streaming DiLoCo of two replicas, as one would write it down."""

    def __init__(self, parts: list[Part], rule: OuterRule, *, inner_steps: int, delay: int, mixing: float) -> None:
        self.parts, self.rule = parts, rule
        self.inner_steps, self.delay, self.mixing = inner_steps, delay, mixing
        self.models = [network(0), network(0)]
        self.anchor = {name: p.detach().clone() for name, p in self.models[0].named_parameters()}
        self.time = 0
        self.ended: list[list[tuple[int, int]]] = []
        """For each sync, the part and its round."""

    @torch.no_grad()
    def step(self) -> None:
        """One inner step."""
        for replica, model in enumerate(self.models):
            drift(model, self.time, replica)
        self.time += 1
        place = (self.time - 1) % self.inner_steps + 1
        for part in self.parts:
            part.steps += 1
            part.age += 1
        self.apply([part for part in self.parts if part.launched is not None and part.age == self.delay])
        due = [part for part in self.parts if part.offset == place]
        self.launch(due)
        if self.delay == 0:
            self.apply(due)

    def launch(self, parts: list[Part]) -> None:
        """Take pseudo-gradients."""
        first, second = (dict(model.named_parameters()) for model in self.models)
        for part in parts:
            part.launched = {
                name: ((self.anchor[name] - first[name]) + (self.anchor[name] - second[name])) / 2
                for name in part.names
            }
            part.age = part.steps = 0

    def apply(self, parts: list[Part]) -> None:
        """Outer steps with them; the replicas take the anchors."""
        for part in parts:
            assert part.launched is not None
            part.rounds += 1
            if self.mixing == 0:
                part.steps = 0
            for name, g in part.launched.items():
                self.outer_step(part, name, g)
                for model in self.models:
                    theta = dict(model.named_parameters())[name]
                    theta.copy_(
                        self.anchor[name] if self.mixing == 0 else theta.lerp(self.anchor[name], 1 - self.mixing)
                    )
            part.launched = None
        if parts:
            self.ended.append([(self.parts.index(part), part.rounds) for part in parts])

    def outer_step(self, part: Part, name: str, g: Tensor) -> None:
        """One parameter's."""
        b, ema = self.rule.momentum, self.rule.form == "ema"
        weight = 1 - b if ema else 1.0
        m = part.momentum.get(name)
        m = weight * g if m is None else m.mul(b).add(g, alpha=weight)
        update = m
        if self.rule.nesterov:
            update = m.mul(b).add(g, alpha=weight) if ema else g.add(m, alpha=b)
        self.anchor[name] = self.anchor[name].add(update, alpha=-self.rule.lr)
        restarts = part.period and part.rounds % part.period == 0
        part.momentum[name] = torch.zeros_like(m) if restarts else m

    @torch.no_grad()
    def finish(self) -> None:
        """What is under way, what is left, and the anchor."""
        under_way = sorted((part for part in self.parts if part.launched is not None), key=lambda part: -part.age)
        for age in sorted({part.age for part in under_way}, reverse=True):
            self.apply([part for part in under_way if part.age == age])
        for part in self.parts:
            if part.steps:
                self.launch([part])
                self.apply([part])
        self.time = 0
        for model in self.models:
            for name, p in model.named_parameters():
                p.copy_(self.anchor[name])

    def tensors(self) -> dict[str, Tensor]:
        """As `Run.tensors`."""
        tensors = {f"anchor {name}": a for name, a in self.anchor.items()}
        for number, model in enumerate(self.models):
            tensors |= {f"model {number} {name}": p.detach() for name, p in model.named_parameters()}
        for part in self.parts:
            tensors |= {f"momentum_buffer {name}": m for name, m in part.momentum.items()}
        return tensors


@dataclass(frozen=True)
class Schedule:
    """A schedule, and the offsets that it must lead to."""

    offsets: tuple[int, ...]
    inner_steps: int
    delay: int = 0
    mixing: float = 0.0
    stagger: bool = True

    def __str__(self) -> str:
        name = f"{len(self.offsets)}of{self.inner_steps}-delay{self.delay}-mix{self.mixing}"
        return name if self.stagger else f"{name}-together"

    def engine(self, rule: OuterRule, **options: Any):
        """Two replicas under the engine."""
        return start(
            rule,
            inner_steps=self.inner_steps,
            fragments=len(self.offsets),
            delay=self.delay,
            mixing=self.mixing,
            stagger=self.stagger,
            **options,
        )

    def plain(self, rule: OuterRule, periods: tuple[int, ...] = (0,) * 6) -> Plain:
        """Two replicas in plain torch."""
        parts = [
            Part(names, offset, period)
            for names, offset, period in zip(CUTS[len(self.offsets)], self.offsets, periods, strict=False)
        ]
        return Plain(parts, rule, inner_steps=self.inner_steps, delay=self.delay, mixing=self.mixing)


CUTS = {
    1: [NAMES],
    2: [NAMES[:2], NAMES[2:]],
    3: [NAMES[:1], NAMES[1:4], NAMES[4:]],
    6: [[name] for name in NAMES],
}
SCHEDULES = [
    Schedule((4,), 4),
    Schedule((4,), 4, delay=1),
    Schedule((4,), 4, delay=3, mixing=0.5),
    Schedule((1,), 1, mixing=0.3),
    Schedule((3, 6), 6, delay=2, mixing=0.25),
    Schedule((2, 4, 6), 6),
    Schedule((2, 4, 6), 6, delay=1, mixing=0.5),
    Schedule((2, 4, 6), 6, delay=2),
    Schedule((2, 4, 6), 6, delay=5, mixing=0.5),
    Schedule((3, 5, 7), 7, mixing=0.4),
    Schedule((3, 5, 7), 7, delay=3, mixing=0.5),
    Schedule((5, 5, 5), 5, delay=2, mixing=0.5, stagger=False),
    Schedule((1, 2, 2, 3, 4, 4), 4),
    Schedule((1, 2, 2, 3, 4, 4), 4, delay=3, mixing=0.5),
    Schedule((1, 1, 1, 1, 1, 1), 1),
]
each_schedule = pytest.mark.parametrize("schedule", SCHEDULES, ids=str)


@each_schedule
@each_rule
def test_equals_a_plain_loop_at_every_step(schedule: Schedule, rule: OuterRule):
    """Anchors, buffers and replicas have the bits of the plain loop after each inner step of some three rounds.

    After finish() too. A report is announced and comes exactly when a sync ends there, and each fragment restarts by
    its own rounds.
    """
    count = len(schedule.offsets)
    periods = (2, 0, 3, 1, 2, 0)[:count]
    policies = {str(number): Periodic(period) if period else "never" for number, period in enumerate(periods)}
    run, plain = schedule.engine(rule, restart=policies), schedule.plain(rule, periods)
    assert [fragment.offset for fragment in run.engine.fragments] == list(schedule.offsets)
    ended = []
    for step in range(3 * schedule.inner_steps + 2):
        expected = len(plain.ended)
        plain.step()
        announced = run.engine.reports_next
        report = run.step(step)
        assert announced == (report is not None)
        if report is not None:
            ended.append([(int(fragment.name), fragment.round) for fragment in report.fragments])
            whole = schedule.inner_steps - (schedule.delay if schedule.mixing == 0 else 0)
            assert report.partial == any(fragment.inner_steps < whole for fragment in report.fragments)
        assert len(plain.ended) - expected == (report is not None)
        assert unlike(run.tensors(), plain.tensors()) == [], step
    assert ended == plain.ended
    plain.finish()
    last = run.engine.finish()
    assert unlike(run.tensors(), plain.tensors()) == []
    rest = [fragment for sync in plain.ended[len(ended) :] for fragment in sync]
    assert [(int(fragment.name), fragment.round) for fragment in (last.fragments if last else ())] == rest


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [s for s in SCHEDULES if s.inner_steps > 1][::2], ids=str)
def test_finish_in_every_position(schedule: Schedule):
    """Ended after any number of inner steps, a run has the bits of the plain loop, and so it has if it goes on.

    All replicas are the anchor then, whatever the mixing, and nothing is left.
    """
    for steps in range(2 * schedule.inner_steps + 2):
        run, plain = schedule.engine(NESTEROV), schedule.plain(NESTEROV)
        for step in range(steps):
            run.step(step)
            plain.step()
        report = run.engine.finish()
        syncs = len(plain.ended)
        plain.finish()
        assert unlike(run.tensors(), plain.tensors()) == [], steps
        for model in run.models:
            assert all(same_bits(p.detach(), run.engine.anchor[name]) for name, p in model.named_parameters())
        assert (report is None) == (len(plain.ended) == syncs)
        if report is not None:
            assert report.complete
            assert report.round == run.engine.round == max(part.rounds for part in plain.parts)
            assert report.restarted is False
        before = run.engine.checksum()
        assert run.engine.finish() is None
        assert run.engine.checksum() == before
        for step in range(schedule.inner_steps + schedule.delay):
            run.step(step)
            plain.step()
            assert unlike(run.tensors(), plain.tensors()) == [], (steps, step)


@pytest.mark.parametrize(
    ("fragments", "rule", "restart"),
    [
        *((2, rule, None) for rule in (HEAVY_BALL, NESTEROV)),
        *((fragments, EMA, 2) for fragments in (3, 6, {"all": "."}, BLOCKS)),
        ({"ends": r"^[03]\.", "rest": "."}, NESTEROV, 2),
    ],
    ids=str,
)
def test_fragments_together_are_the_whole(rule: OuterRule, restart: int | None, fragments: Any):
    """Fragments that are synchronised together, by count or by pattern, have the bits of the model in one fragment.

    Their norms together are the same to rounding.
    """
    cut = start(rule, fragments=fragments, stagger=False, restart=restart)
    whole = start(rule, restart=restart)
    for step in range(26):
        cut_report, whole_report = cut.step(step), whole.step(step)
        assert unlike(cut.tensors(), whole.tensors()) == []
        if whole_report is None:
            assert cut_report is None
            continue
        assert cut_report is not None
        assert (cut_report.round, cut_report.complete, cut_report.partial, cut_report.restarted) == (
            whole_report.round,
            True,
            False,
            whole_report.restarted,
        )
        for what in ("pseudo_gradient_norm", "buffer_norm", "cosine", "gain"):
            assert getattr(cut_report, what) == pytest.approx(getattr(whole_report, what), rel=1e-5, abs=1e-6)
    cut_report, whole_report = cut.engine.finish(), whole.engine.finish()
    assert cut_report is not None
    assert whole_report is not None
    assert (cut_report.round, cut_report.inner_steps, cut_report.partial) == (5, 2, True)
    assert whole_report.round == 5
    assert cut_report.pseudo_gradient_norm == pytest.approx(whole_report.pseudo_gradient_norm, rel=1e-5)
    assert unlike(cut.tensors(), whole.tensors()) == []


@pytest.mark.parametrize(
    ("wire", "rule"), [("float32", HEAVY_BALL), ("bfloat16", EMA), ("int8", NESTEROV), (SPARSE, EMA)]
)
def test_each_block_is_as_if_alone(rule: OuterRule, wire: str):
    """A staggered fragment with a restart period of its own has the bits of a model whose other blocks are frozen.

    That model's first round is as much shorter as the fragment's offset says. It is no matter what other fragments
    sent, on a lossy wire either.
    """
    policies = {"first": 2, "norm": "cycle:1,3", "last": "soft:3:0.5:0.25"}
    run = start(rule, fragments=BLOCKS, restart=policies, wire=wire)
    run.go(range(38))
    for number, (block, policy) in enumerate(policies.items()):
        alone = start(rule)
        for model in alone.models:
            for p, name in zip(model.parameters(), NAMES, strict=True):
                p.requires_grad_(name in dict(run.engine.fragments[number].named))
        alone.engine = DiLoCo(alone.models, rule, inner_steps=6, restart=policy, wire=wire)
        for step in range(38):
            alone.step(step)
            if step + 1 == 2 * (number + 1) < 6:
                alone.engine.finish()
        tensors = run.tensors()
        assert len(alone.engine.anchor) == 2
        for name, tensor in alone.tensors().items():
            if name.split()[-1] in alone.engine.anchor:
                assert same_bits(tensors[name], tensor), (block, name)


# --- resumed ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "wire"),
    [
        (Schedule((4,), 4, delay=2, mixing=0.5), "int8"),
        (Schedule((2, 4, 6), 6), "int8"),
        (Schedule((2, 4, 6), 6, delay=1), "bfloat16"),
        (Schedule((2, 4, 6), 6, delay=5, mixing=0.5), "int8"),
        (Schedule((3, 5, 7), 7, delay=3), "float32"),
        (Schedule((5, 5, 5), 5, delay=2, mixing=0.5, stagger=False), "int8"),
        (Schedule((2, 4, 6), 6), SPARSE),
        (Schedule((5, 5, 5), 5, delay=2, mixing=0.5, stagger=False), SPARSE),
    ],
    ids=str,
)
def test_resumed_anywhere_equals_uninterrupted(schedule: Schedule, wire: str):
    """Saved after any inner step, with reductions under way and owed digits too, a run goes on with the same bits.

    Its reports say the same.
    """
    options: dict[str, Any] = {"wire": wire, "restart": 2}
    steps = 2 * schedule.inner_steps + schedule.delay + 2
    whole = schedule.engine(NESTEROV, **options)
    states = [through_file(whole.state())]
    reports: dict[int, RoundReport] = {}
    ends = []
    for step in range(steps):
        report = whole.step(step)
        if report is not None:
            reports[step] = report
        states.append(through_file(whole.state()))
        ends.append({name: tensor.clone() for name, tensor in whole.tensors().items()})
    last = whole.engine.finish()
    for saved in range(steps + 1):
        resumed = schedule.engine(NESTEROV, seed=50, **options)
        resumed.load(states[saved])
        for step in range(saved, steps):
            report = resumed.step(step)
            assert unlike(resumed.tensors(), ends[step]) == [], (saved, step)
            assert (report is None) == (step not in reports)
            if report is not None:
                assert without_times(report) == without_times(reports[step])
        final = resumed.engine.finish()
        assert (final is None) == (last is None)
        if final is not None and last is not None:
            assert without_times(final) == without_times(last)
        assert unlike(resumed.tensors(), whole.tensors()) == []


def without_times(report: RoundReport) -> dict[str, Any]:
    """What does not depend on the machine, NaN-safe."""
    slots = (name for name in RoundReport.__dataclass_fields__ if name != "seconds")
    return {name: str(getattr(report, name)) for name in slots}


def test_loading_ends_what_is_under_way():
    """A run that is set back while it reduces goes on as the state says, on a lossy wire too."""
    schedule = Schedule((4,), 4, delay=2, mixing=0.5)
    run = schedule.engine(NESTEROV, wire="int8")
    run.go(range(4))
    state = through_file(run.state())
    run.go(range(4, 13))
    ends = {name: tensor.clone() for name, tensor in run.tensors().items()}
    run.load(state)
    run.go(range(4, 13))
    assert unlike(run.tensors(), ends) == []


def test_a_sum_is_divided_by_those_that_made_it():
    """A sum of two replicas that is under way in a state counts as two's, also where one replica goes on from it."""
    two = start(NESTEROV, delay=2)
    two.go(range(7))
    single = start(NESTEROV, [0], delay=2, seed=3)
    single.engine.load_state_dict(through_file(two.engine.state_dict()))
    (pair_report,), (single_report,) = two.go([7]), single.go([7])
    assert single_report.checksum == pair_report.checksum
    assert single_report.pseudo_gradient_norm == pair_report.pseudo_gradient_norm


def test_bytes_of_a_sum_are_told_once():
    """Bytes sent before a run was set down, in mid-delay, are in the report of the run that ends the sync."""

    class Sending(SingleProcess):
        """Two processes that hold the same."""

        size = 2

        def gather(self, value: Any, kind: Any) -> list[Any]:
            """The value twice."""
            del kind
            return [value, value]

        def exchange(self, numbers: Sequence[float]) -> list[list[float]]:
            """The numbers twice."""
            return [list(numbers)] * 2

        def launch_sum(self, tensor: Tensor) -> Done:
            """Leave it as it is."""
            del tensor
            return Done(bytes_sent=7)

    run = start(NESTEROV, delay=3, communicator=Sending())
    run.go(range(6))
    for step in (6, 7):  # twice in one delay
        state = through_file(run.state())
        run = start(NESTEROV, delay=3, communicator=Sending(), seed=9)
        run.load(state)
        assert run.step(step) is None
    (report,) = run.go([8])
    assert report.bytes_sent == 7
    (report,) = run.go(range(9, 15))
    assert report.bytes_sent == 7


def under_way(**options: Any) -> dict[str, Any]:
    """A state with a reduction under way."""
    usual: dict[str, Any] = {"inner_steps": 6, "fragments": 3, "delay": 1}
    run = start(NESTEROV, **(usual | options))
    run.go(range(6))
    return run.engine.state_dict()


@pytest.mark.parametrize(
    ("state", "options", "words"),
    [
        (lambda: under_way(fragments=2), {}, ["fragments differ", "(3 of them)", "(2)", "checkpoint's"]),
        (lambda: under_way(fragments={"a": "[03]", "b": "."}), {"fragments": 2}, ["fragments differ", "(0)", "(a)"]),
        (lambda: under_way(delay=3), {"delay": 1, "inner_steps": 7}, ["reduction under way", "the checkpoint's"]),
        (under_way, {"delay": 0}, ["reduction under way", "the checkpoint's"]),
        (under_way, {"stagger": False}, ["reduction under way", "the checkpoint's"]),
        (under_way, {"inner_steps": 9}, ["reduction under way", "the checkpoint's"]),
    ],
)  # fmt: skip
def test_states_of_other_schedules_are_refused(state: Callable[[], Any], options: dict[str, Any], words: list[str]):
    """Other fragments, and another schedule while reductions are under way, are refused; nothing has changed."""
    usual: dict[str, Any] = {"inner_steps": 6, "fragments": 3, "delay": 1}
    engine = start(NESTEROV, **(usual | options)).engine
    before = engine.checksum()
    with pytest.raises(ValueError, match=r"^DiLoCo\.load_state_dict: ") as caught:
        engine.load_state_dict(state())
    assert all(word in str(caught.value) for word in words), caught.value
    assert engine.checksum() == before
    assert (engine.round, engine.inner_step, engine.syncs) == (0, 0, 0)


def test_another_schedule_may_follow_a_rounds_end():
    """With nothing under way, a run may go on with another number of inner steps, another delay and unstaggered."""
    run = start(NESTEROV, fragments=3, delay=1)
    run.go(range(6))
    run.engine.finish()
    other = start(NESTEROV, fragments=3, delay=2, inner_steps=4, stagger=False, seed=9)
    other.engine.load_state_dict(through_file(run.engine.state_dict()))
    assert other.engine.checksum() == run.engine.checksum()
    reports = other.go(range(6))
    assert [report.round for report in reports] == [run.engine.round + 1]


# --- what is reported ---------------------------------------------------------------------------------------------


def test_reports_of_a_staggered_run():
    """Round, completeness, fragments, counts and the shorter first rounds over a whole run with a delay."""
    run = start(NESTEROV, fragments=BLOCKS, delay=1, restart={"first": 2, "norm": None, "last": 1})
    rows = []
    for step in range(1, 17):
        report = run.step(step)
        if report is None:
            continue
        (part,) = report.fragments
        assert report.checksum == part.checksum
        assert (report.replicas, report.newcomers, report.attempts, report.bytes_sent) == (2, 0, 1, 0)
        assert report.inner_steps == part.inner_steps
        assert report.restarted == part.restarted == any(group.restarted for group in report.groups)
        assert len(report.groups) == 1
        assert report.partial == (part.inner_steps < 5)  # without mixing, the step of the delay does not count
        assert set(report.seconds) == {"pseudo_gradient", "reduce", "outer", "restore", "checksum"}
        rows.append((step, report.round, report.complete, part.name, part.round, part.inner_steps, part.restarted))
    assert rows == [
        (3, 1, False, "first", 1, 2, False),
        (5, 1, False, "norm", 1, 4, False),
        (7, 1, True, "last", 1, 6, True),
        (9, 2, False, "first", 2, 5, True),
        (11, 2, False, "norm", 2, 5, False),
        (13, 2, True, "last", 2, 5, True),
        (15, 3, False, "first", 3, 5, False),
    ]
    assert (run.engine.round, run.engine.syncs) == (2, 7)
    # "norm" is under way; of "first", 1 step is left, and 3 of "last".
    last = run.engine.finish()
    assert last is not None
    assert [(part.name, part.round, part.inner_steps, part.restarted) for part in last.fragments] == [
        ("norm", 3, 5, False),
        ("first", 4, 1, True),
        ("last", 3, 3, True),
    ]
    assert (last.round, last.complete, last.partial, last.inner_steps, last.restarted) == (4, True, True, 5, True)
    assert len(last.groups) == 3
    assert last.pseudo_gradient_norm**2 == pytest.approx(sum(group.pseudo_gradient_norm**2 for group in last.groups))
    assert [part.round for part in run.engine.fragments] == [4, 3, 3]
    assert (run.engine.round, run.engine.syncs, run.engine.inner_step) == (4, 10, 0)


@pytest.mark.parametrize("optimizer", ["rule", "sgd"])
def test_norms_are_of_what_was_synchronised(optimizer: str):
    """The norm of a fragment's pseudo-gradient counts its own elements only, whatever lay in the room before."""
    outer: Any = HEAVY_BALL if optimizer == "rule" else lambda params: torch.optim.SGD(params, lr=0.3, momentum=0.9)
    run = start(outer, fragments=3)
    for step in range(18):
        anchors = {name: a.clone() for name, a in run.engine.anchor.items()}
        thetas = []
        for replica, model in enumerate(run.models):
            drift(model, step, replica)
            thetas.append({name: p.detach().clone() for name, p in model.named_parameters()})
        report = run.engine.step()
        if report is not None:
            names = dict(run.engine.fragments[int(report.fragments[0].name)].named)
            g = torch.cat([(anchors[n] - (thetas[0][n] + thetas[1][n]) / 2).flatten() for n in names])
            assert report.pseudo_gradient_norm == pytest.approx(float(g.norm()), rel=1e-5)


def test_phases_add_up(monkeypatch: pytest.MonkeyPatch):
    """A phase that is entered twice in a sync, as the reduction's launch and its end are, reports the time of both."""
    now = iter(range(1000))
    monkeypatch.setattr("twophase.diloco.sync.time.perf_counter", lambda: float(next(now)))
    (report,) = start(NESTEROV).go(range(6))
    # one tick lies between a phase's begin and its end
    assert dict(report.seconds) == {"pseudo_gradient": 1, "reduce": 2, "outer": 2, "restore": 1, "checksum": 1}


def test_signals_of_the_step_that_reports():
    """The signals of the step at which a delayed round ends are those that its report has."""
    engine = start(NESTEROV, fragments=2, delay=2, signals=["loss"]).engine
    reports = [engine.step({"loss": float(step)} if engine.reports_next else None) for step in range(1, 15)]
    assert [report.signals["loss"] for report in reports if report is not None] == [5.0, 8.0, 11.0, 14.0]


# --- positions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_anchored_and_back(dtype: torch.dtype):
    """At any step the replica under `anchored()` is the anchor and comes back bit for bit, after an error too.

    The other replicas stay as they are, and the run goes on as if it had not been read.
    """
    options: dict[str, Any] = {"fragments": 3, "delay": 3, "mixing": 0.5, "inner_steps": 6}
    models = [network(0, dtype), network(1, dtype)]
    engine = DiLoCo(models, NESTEROV, **options)
    untouched = [network(0, dtype), network(1, dtype)]
    other = DiLoCo(untouched, NESTEROV, **options)
    for step in range(20):
        for number in range(2):
            before = [p.detach().clone() for model in models for p in model.parameters()]
            with engine.anchored(number) as model:
                assert model is models[number]
                for name, p in model.named_parameters():
                    assert same_bits(p.detach(), engine.anchor[name].to(dtype))
                others = list(models[1 - number].parameters())
                assert all(same_bits(p, q) for p, q in zip(others, before[6 * (1 - number) :], strict=False))
            with pytest.raises(KeyError), engine.anchored(number):
                raise KeyError
            after = [p.detach() for model in models for p in model.parameters()]
            assert all(same_bits(p, q) for p, q in zip(after, before, strict=True))
        for replica in range(2):
            drift(models[replica], step, replica)
            drift(untouched[replica], step, replica)
        engine.step()
        other.step()
        assert engine.checksum() == other.checksum()


def test_when_the_replicas_are_the_anchor():
    """`at_anchor` says so at the beginning, after a sync of all fragments and after finish(), and at no other moment.

    Where it says so the replicas are the anchor's bits.
    """

    def is_anchor(run: Any) -> bool:
        return all(
            same_bits(p.detach(), run.engine.anchor[name])
            for model in run.models
            for name, p in model.named_parameters()
        )

    cases: list[tuple[dict[str, Any], set[int]]] = [
        ({}, {6, 12}),
        ({"fragments": 3, "stagger": False}, {6, 12}),
        ({"fragments": 3}, set()),
        ({"delay": 2}, {8}),
        ({"mixing": 0.5}, set()),
    ]
    for options, places in cases:
        run = start(NESTEROV, **options)
        assert run.engine.at_anchor == ("mixing" not in options)
        seen = set()
        for step in range(1, 13):
            run.step(step)
            if run.engine.at_anchor:
                seen.add(step)
                assert is_anchor(run)
        assert seen == places, options
        run.step(13)
        assert not run.engine.at_anchor
        run.engine.finish()
        assert run.engine.at_anchor == ("mixing" not in options)
        assert is_anchor(run)


# --- memory -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "rooms"),
    [
        ({"inner_steps": 6}, 1),
        ({"inner_steps": 6, "delay": 1}, 1),
        ({"inner_steps": 6, "delay": 2}, 3),
        ({"inner_steps": 6, "stagger": False}, 3),
        ({"inner_steps": 2}, 3),
        ({"inner_steps": 3}, 1),
    ],
)
def test_fragments_that_never_meet_share_a_room(options: dict[str, Any], rooms: int):
    """Pseudo-gradients of fragments that are never reduced at the same time lie in one room, as long as the longest.

    Those of others never overlap.
    """
    engine = start(NESTEROV, fragments=3, **options).engine
    gradients = [fragment.gradient for fragment in engine.fragments]
    assert len({gradient.data_ptr() for gradient in gradients}) == rooms
    room = gradients[0].untyped_storage()
    assert all(gradient.untyped_storage().data_ptr() == room.data_ptr() for gradient in gradients)
    lengths = [gradient.numel() for gradient in gradients]
    assert room.nbytes() == 4 * (max(lengths) if rooms == 1 else sum(lengths))
    assert sum(fragment.flat.numel() for fragment in engine.fragments) == engine._setting.anchor.numel()
    spans = sorted((g.data_ptr(), g.data_ptr() + g.nbytes) for g in gradients)
    assert rooms == 1 or all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))


# --- mistakes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"delay": -1}, ["DiLoCo: delay is -1", "from 0 to inner_steps - 1 = 5"]),
        ({"delay": 6}, ["DiLoCo: delay is 6", "from 0 to inner_steps - 1 = 5"]),
        ({"delay": 1.0}, ["DiLoCo: delay is 1.0", "whole number"]),
        ({"delay": True}, ["DiLoCo: delay is True", "whole number"]),
        ({"stagger": "no"}, ["DiLoCo: stagger is 'no'", "True", "False"]),
        ({"mixing": 1.0}, ["DiLoCo: mixing is 1.0", "[0, 1)"]),
        ({"mixing": -0.1}, ["DiLoCo: mixing is -0.1", "[0, 1)"]),
        ({"mixing": float("nan")}, ["DiLoCo: mixing is nan", "[0, 1)"]),
        ({"fragments": 7}, ["fragments is 7", "number of parameters, 6"]),
        ({"fragments": {"a": "nothing"}}, ["'0.weight'", "no fragment's pattern"]),
        ({"wire": "float16"}, ["wire is 'float16'", "float32, bfloat16, int8"]),
        ({"fragments": 2, "wire": "topk:64:2bit"}, ["topk:64:2bit", "the smallest fragment has 48", "at most 48"]),
        ({"fragments": BLOCKS, "restart": {"first": 2, "norm": 3}}, ["(last)", "first, norm, last"]),
        ({"fragments": BLOCKS, "restart": {"first": 2, "norm": 3, "last": 1, "x": 1}}, ["(x)", "give each its policy"]),
        ({"restart": {"1": 2}}, ["(0, 1)", "the fragments are 0"]),
        ({"fragments": 2, "restart": {"0": 2, "1": "sometimes"}}, ["'sometimes'"]),
    ],
)
def test_mistakes_say_what_to_do(options: dict[str, Any], words: list[str]):
    """Each impossible schedule is refused with its value, the range and the remedy."""
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the words are matched below
        start(NESTEROV, **options)
    assert all(word in str(caught.value) for word in words), caught.value


def test_one_outer_optimizer_of_several_is_asked_for_by_fragment():
    """`engine.outer` is the optimizer of one fragment; of several it says where they are."""
    engine = start(NESTEROV).engine
    assert engine.outer is engine.fragments[0].outer
    with pytest.raises(ValueError, match=r"fragments\[i\]\.outer"):
        _ = start(NESTEROV, fragments=2).engine.outer
