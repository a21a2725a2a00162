"""Fragments on their own schedules: staggered, delayed and mixed syncs against a loop that says the same plainly."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from replicas import NAMES, drift, network, same_bits, start, unlike
from rounds import blocks, holds_anchor
from twophase.diloco.engine import DiLoCo
from twophase.restart import Periodic
from twophase.rule import OuterRule

HEAVY_BALL = OuterRule(0.3, 0.9)
NESTEROV = OuterRule(0.3, 0.9, nesterov=True)
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
    rule: OuterRule
    due: Callable[[int], bool] = lambda _: False
    """After which of its rounds its momentum becomes `retain` m + `inject` g."""
    retain: float = 0.0
    inject: float = 0.0
    rounds: int = 0
    steps: int = 0
    momentum: dict[str, Tensor] = field(default_factory=dict)
    launched: dict[str, Tensor] | None = None
    """A pseudo-gradient under way."""
    age: int = 0


class Plain:
    """Streaming DiLoCo of two replicas, as one would write it down."""

    def __init__(self, parts: list[Part], inner_steps: int, delay: int = 0, mixing: float = 0.0) -> None:
        self.parts, self.inner_steps, self.delay, self.mixing = parts, inner_steps, delay, mixing
        self.models = [network(0), network(0)]
        self.named = [dict(model.named_parameters()) for model in self.models]
        self.anchor = {name: p.detach().clone() for name, p in self.named[0].items()}
        self.time = 0
        self.ended: list[list[tuple[int, int]]] = []
        """For each sync, the part and its round."""

    @torch.no_grad()
    def step(self) -> None:
        """One inner step."""
        for replica, model in enumerate(self.models):
            drift(model, self.time, replica)
        self.time += 1
        position = (self.time - 1) % self.inner_steps + 1
        for part in self.parts:
            part.steps += 1
            part.age += 1
        self.apply([part for part in self.parts if part.launched is not None and part.age == self.delay])
        due = [part for part in self.parts if part.offset == position]
        self.launch(due)
        if self.delay == 0:
            self.apply(due)

    def launch(self, parts: list[Part]) -> None:
        """Take pseudo-gradients."""
        first, second = self.named
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
                for named in self.named:
                    theta, a = named[name], self.anchor[name]
                    theta.copy_(a if self.mixing == 0 else theta.lerp(a, 1 - self.mixing))
            part.launched = None
        if parts:
            self.ended.append([(self.parts.index(part), part.rounds) for part in parts])

    def outer_step(self, part: Part, name: str, g: Tensor) -> None:
        """One parameter's."""
        b, ema = part.rule.momentum, part.rule.form == "ema"
        weight = 1 - b if ema else 1.0
        m = part.momentum.get(name)
        m = weight * g if m is None else m.mul(b).add(g, alpha=weight)
        update = m
        if part.rule.nesterov:
            update = m.mul(b).add(g, alpha=weight) if ema else g.add(m, alpha=b)
        self.anchor[name] = self.anchor[name].add(update, alpha=-part.rule.lr)
        if part.due(part.rounds):
            m = m.mul(part.retain) if part.retain else torch.zeros_like(m)
            m = m.add(g, alpha=part.inject) if part.inject else m
        part.momentum[name] = m

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
        for named in self.named:
            for name, p in named.items():
                p.copy_(self.anchor[name])

    def tensors(self) -> dict[str, Tensor]:
        """As `Run.tensors`."""
        tensors = {f"anchor {name}": a for name, a in self.anchor.items()}
        for number, named in enumerate(self.named):
            tensors |= {f"model {number} {name}": p.detach() for name, p in named.items()}
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
            Part(names, offset, rule, every(period))
            for names, offset, period in zip(CUTS[len(self.offsets)], self.offsets, periods, strict=False)
        ]
        return Plain(parts, self.inner_steps, self.delay, self.mixing)


def every(period: int) -> Callable[[int], bool]:
    """A restart after every so many rounds; 0 means never."""
    return lambda number: period > 0 and number % period == 0


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
    """After each inner step, and finish(), all has the bits of the plain loop, and reports come when its syncs end."""
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


def test_equals_a_plain_loop_with_a_rule_per_block():
    """Param groups with rules, forms and restarts of their own have the bits of the plain loop."""
    parts = [
        Part(NAMES[:2], 3, OuterRule(0.3, 0.9, nesterov=True), every(2)),
        Part(NAMES[2:4], 3, OuterRule(0.7, 0.9, form="ema"), lambda number: number in (1, 4, 5, 8, 9)),
        Part(NAMES[4:], 3, OuterRule(0.3, 0.5), every(3), 0.5, 0.25),
    ]
    run, plain = start(blocks, inner_steps=3), Plain(parts, inner_steps=3)
    for step in range(29):
        run.step(step)
        plain.step()
        assert unlike(run.tensors(), plain.tensors()) == []
    run.engine.finish()
    plain.finish()
    assert unlike(run.tensors(), plain.tensors()) == []


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [s for s in SCHEDULES if s.inner_steps > 1][::2], ids=str)
def test_finish_in_every_position(schedule: Schedule):
    """Ended after any number of inner steps, a run has the bits of the plain loop, and so it has if it goes on."""
    for steps in range(2 * schedule.inner_steps + 2):
        run, plain = schedule.engine(NESTEROV), schedule.plain(NESTEROV)
        for step in range(steps):
            run.step(step)
            plain.step()
        report = run.engine.finish()
        syncs = len(plain.ended)
        plain.finish()
        assert unlike(run.tensors(), plain.tensors()) == [], steps
        assert holds_anchor(run)
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
    """Fragments that are synchronised together have the bits of the model in one, and its norms to rounding."""
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


@pytest.mark.parametrize(("wire", "rule"), [("float32", HEAVY_BALL), ("bfloat16", EMA), ("int8", NESTEROV)])
def test_each_block_is_as_if_alone(rule: OuterRule, wire: str):
    """A staggered fragment has the bits of a model whose other blocks are frozen and whose first round is shorter."""
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
        assert (report.replicas, report.bytes_sent) == (2, 0)
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
    """At any step a replica is the anchor under `anchored()` alone, then itself again, and the run goes on."""
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
    """`at_anchor` is true of the anchor's bits: at first, after a sync of all fragments, and after finish()."""
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
                assert holds_anchor(run)
        assert seen == places, options
        run.step(13)
        assert not run.engine.at_anchor
        run.engine.finish()
        assert run.engine.at_anchor == ("mixing" not in options)
        assert holds_anchor(run)


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
    """Pseudo-gradients never reduced at the same time lie in one room, as long as the longest; others lie apart."""
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


@pytest.mark.parametrize(("options", "count"), [({"delay": 3}, 4), ({}, 1)], ids=str)
def test_fragments_that_share_a_room_never_come_to_meet(options: dict[str, Any], count: int):
    """Fewer inner steps, with which two reductions would write into the same room, are refused; more are taken."""
    engine = start(NESTEROV, fragments=2, inner_steps=8, **options).engine
    with pytest.raises(ValueError, match=f"at inner_steps = {count} the fragments' syncs lie .* apart, and delay is"):
        engine.inner_steps = count
    assert engine.inner_steps == 8
    engine.inner_steps = 16
    assert [fragment.offset for fragment in engine.fragments] == [8, 16]


def test_one_outer_optimizer_of_several_is_asked_for_by_fragment():
    """`engine.outer` is the optimizer of one fragment; of several it says where they are."""
    engine = start(NESTEROV).engine
    assert engine.outer is engine.fragments[0].outer
    with pytest.raises(ValueError, match=r"fragments\[i\]\.outer"):
        _ = start(NESTEROV, fragments=2).engine.outer
