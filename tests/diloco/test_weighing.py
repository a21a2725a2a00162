"""`edit`: replicas that stand out are rejected and the others weighed, before their pseudo-gradients are averaged.

That two processes have the bits of one, resumed, sharded or elastic, is in test_processes.py and test_torchft.py.
"""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from outers import parameters
from policies import each_rule
from reference_outer import ReferenceOuter
from replicas import Run, drift, network, same_bits, start, through_file, unlike
from rounds import fill, report_of, shift
from twophase.cli.main import main
from twophase.diloco.engine import DiLoCo
from twophase.optim.optimizer import OuterOptimizer
from twophase.restart import Restart, RestartPolicy, RoundSignal, State, register
from twophase.restart import parse as parse_policy
from twophase.rule import OuterRule
from twophase.shelf.filters import EDiT
from twophase.shelf.outer import Outer, outer

RULE = OuterRule(0.3, 0.9, nesterov=True)
EQUAL = "edit:temperature=1e30:clip=1e30"
OFF = f"{EQUAL}:threshold=1e9"
FRESH = dict.fromkeys(EDiT.memory, 0.0)


def edit(text: str = EQUAL, rule: OuterRule = RULE) -> Outer:
    """An outer optimizer behind the filter."""
    value = outer(rule, filter=text)
    assert isinstance(value, Outer)
    return value


def moved(model: nn.Module) -> Tensor:
    """All parameters as one vector."""
    return torch.cat([p.detach().double().reshape(-1) for p in model.parameters()])


# --- the numbers alone ------------------------------------------------------------------------------------------------


def test_weighs_as_the_equations_say():
    """Over 40 rounds with outliers: mean and variance of all norms so far with their weights, z-test, softmax of -G."""
    value = EDiT(threshold=2.0, alpha=0.1, warmup=5, temperature=0.7)
    memory, history, rejected = FRESH, [], 0
    generator = torch.Generator().manual_seed(0)
    for number in range(40):
        norms = (5 + torch.randn(4, generator=generator, dtype=torch.float64)).tolist()
        norms[number % 4] += 9.0 * (number % 6 == 5)
        mean = sum(share * norm for share, norm in history)
        std = math.sqrt(sum(share * (norm - mean) ** 2 for share, norm in history))
        stays = [number < 5 or (norm - mean) / std <= 2.0 for norm in norms]
        softmax = [math.exp(-norm / 0.7) * stay for norm, stay in zip(norms, stays, strict=True)]
        weights, memory = value.weigh(norms, memory)
        for weight, share in zip(weights, softmax, strict=True):
            assert weight / sum(weights) == pytest.approx(share / sum(softmax), rel=1e-12)
        share = max(0.1, 1 / (number + 1))
        new = [norm for norm, stay in zip(norms, stays, strict=True) if stay]
        history = [((1 - share) * old, norm) for old, norm in history] + [(share / len(new), norm) for norm in new]
        mean = sum(share * norm for share, norm in history)
        variance = sum(share * (norm - mean) ** 2 for share, norm in history)
        expected = dict(zip(EDiT.memory, (number + 1, mean, variance), strict=True))
        assert memory == pytest.approx(expected, rel=1e-11)
        rejected += weights.count(0.0)
    assert rejected >= 6


@pytest.mark.parametrize(
    ("norms", "weights"),
    [
        ([1.0, 1.0], [1.0, 1.0]),
        ([0.0, 0.0], [1.0, 1.0]),
        ([1.0, math.nan], [1.0, 0.0]),
        ([math.inf, 2.0, 2.0], [0.0, 1.0, 1.0]),
        ([math.nan, math.inf], [0.0, 0.0]),
        ([3.0], [1.0]),
    ],
)
def test_a_replica_that_is_not_finite_never_counts(norms: list[float], weights: list[float]):
    """Also in the warmup; and only finite norms enter mean and variance, none where there is none."""
    result, memory = EDiT().weigh(norms, FRESH)
    assert result == weights
    finite = [norm for norm in norms if math.isfinite(norm)]
    assert memory == (dict(zip(EDiT.memory, (1, finite[0], 0.0), strict=True)) if finite else FRESH)


def test_a_new_level_is_no_outlier_for_ever():
    """Where all norms grow at once, all are rejected, and a few rounds later none."""
    value, memory = EDiT(warmup=2), FRESH
    for number in range(20):
        _, memory = value.weigh([1.0 + 0.1 * (number % 3), 1.1], memory)
    counts = []
    for _ in range(12):
        weights, memory = value.weigh([3.0, 3.1], memory)
        counts.append(weights.count(0.0))
    assert counts[0] == 2
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] == 0


# --- the engine -------------------------------------------------------------------------------------------------------


@each_rule
@pytest.mark.parametrize("restart", ["never", "3", "soft:4:0.3:0.1"])
def test_equals_its_slow_twin(rule: OuterRule, restart: str):
    """Over 24 rounds of three float64 replicas, some of which jump, the anchor is that of a plain loop."""
    value = EDiT(threshold=2.0, alpha=0.1, warmup=3, temperature=2.0, clip=3.0)
    models = [network(0, torch.float64) for _ in range(3)]
    engine = DiLoCo(models, edit(str(value), rule), inner_steps=2, restart=restart)
    twin = ReferenceOuter(moved(models[0]), rule, parse_policy(restart))
    memory, rejections = FRESH, []
    for number in range(24):
        for replica, model in enumerate(models):
            drift(model, 2 * number, replica)
        assert engine.step() is None
        for replica, model in enumerate(models):
            drift(model, 2 * number + 1, replica)
        if number % 5 == 4:
            shift(*models[: 3 if number == 14 else 1], by=10.0)  # a bad batch
        gradients = [twin.x - moved(model) for model in models]
        report = report_of(engine)
        weights, memory = value.weigh([float(g.norm()) for g in gradients], memory)
        rejections.append(report.rejected)
        assert report.rejected == weights.count(0.0)
        if any(weights):
            shares = torch.tensor(weights, dtype=torch.float64) / sum(weights)
            mean = shares @ torch.stack(gradients)
            mean = mean * min(1.0, 3.0 / float(mean.norm()))
            buffer = twin.m.clone()
            twin.round(mean)
            assert report.pseudo_gradient_norm == pytest.approx(float(mean.norm()), rel=1e-12)
            assert report.buffer_norm == pytest.approx(float(buffer.norm()), rel=1e-11)
        anchor = torch.cat([a.reshape(-1) for a in engine.anchor.values()])
        torch.testing.assert_close(anchor, twin.x, rtol=1e-12, atol=1e-12)
        assert all(torch.equal(moved(model), anchor) for model in models)
    assert {0, 1, 3} <= set(rejections)


SCENES: dict[str, dict[str, Any]] = {
    "at once": {},
    "streams": {"fragments": 3, "delay": 2, "mixing": 0.5},
    "int8": {"fragments": 2, "wire": "int8"},
    "bfloat16, one sync": {"fragments": 3, "stagger": False, "wire": "bfloat16"},
}


@pytest.mark.parametrize("name", SCENES)
def test_keeping_all_alike_is_no_filter(name: str):
    """Thresholds that nothing reaches and equal weights: the bits and the reports of a rule by itself."""
    runs = [start(value, (0, 1, 2), restart=3, **SCENES[name]) for value in (RULE, edit(OFF))]
    reports = [[*run.go(range(23)), run.engine.finish()] for run in runs]
    assert unlike(*(run.tensors() for run in runs)) == []
    for plain, weighed in zip(*reports, strict=True):
        assert (plain.checksum, plain.gain, plain.cosine) == (weighed.checksum, weighed.gain, weighed.cosine)


@pytest.mark.parametrize("name", SCENES)
def test_a_diverged_replica_leaves_the_mean_of_the_others(name: str):
    """With one of three not a number in every round, the anchor has the bits of a run of the two others."""
    run, others = start(edit(), (0, 1, 2), **SCENES[name]), start(RULE, (0, 1), **SCENES[name])
    for step in range(23):
        fill(run.models[2], math.nan)
        report, other = run.step(step), others.step(step)
        if report is not None and other is not None:
            assert report.checksum == other.checksum
            assert (report.rejected, report.replicas, other.replicas) == (1, 3, 2)


@pytest.mark.parametrize(("diverged", "expected"), [([2], [0.5, 0.5, 0.5]), ([0, 1, 2], [0.0, 1.0, 2.0])])
@pytest.mark.parametrize("delay", [0, 1])
def test_buffers_are_the_mean_of_accepted_replicas(delay: int, diverged: list[int], expected: list[float]):
    """The others' mean reaches all, also from a reduction that is resumed; where all are rejected they stay."""

    def fresh() -> Run:
        models = [network(0) for _ in range(3)]
        for number, model in enumerate(models):
            model.register_buffer("seen", torch.tensor(float(number)))
        return Run(DiLoCo(models, edit(), inner_steps=2, delay=delay, buffers="mean"), models, (0, 1, 2))

    run = fresh()
    run.step(0)
    for number in diverged:
        next(run.models[number].parameters()).detach().fill_(math.nan)
    report = run.step(1)
    if delay:
        state = through_file(run.state())
        run = fresh()
        run.load(state)
        report = run.step(2)
    assert report is not None
    assert report.rejected == len(diverged)
    assert [float(model.get_buffer("seen")) for model in run.models] == expected


def test_buffers_of_another_number_of_replicas():
    """A reduction that three replicas began and two resume from ends with the mean of the two."""
    models = [network(0) for _ in range(3)]
    for number, model in enumerate(models):
        model.register_buffer("seen", torch.tensor(float(number)))

    def run(count: int) -> Run:
        numbers = tuple(range(count))
        engine = DiLoCo(models[:count], edit(), inner_steps=2, delay=1, buffers="mean")
        return Run(engine, models[:count], numbers)

    first = run(3)
    first.go(range(2))
    second = run(2)
    second.engine.load_state_dict(first.engine.state_dict())
    assert second.step(2) is not None
    assert [float(model.get_buffer("seen")) for model in models[:2]] == [0.5, 0.5]


def test_all_rejected_is_no_outer_step():
    """Anchor, momentum and counters stay, the replicas are set back, and the report says so; then it goes on."""
    run = start(edit(f"{EQUAL}:warmup=1:threshold=3"), (0, 1), inner_steps=1, restart=2)
    run.go(range(3))
    fragment = run.engine.fragments[0]
    before = {name: tensor.clone() for name, tensor in run.tensors().items()}
    group = dict(fragment.outer.param_groups[0])
    for model in run.models:
        fill(model, math.nan)
    report = report_of(run.engine)
    assert (report.rejected, report.replicas, report.pseudo_gradient_norm, report.groups) == (2, 2, 0.0, ())
    assert "2 rejected" in str(report)
    assert math.isnan(report.gain)
    assert unlike(run.tensors(), before) == []
    after = fragment.outer.param_groups[0]
    assert {key: after[key] for key in group if key != "params"} == {k: v for k, v in group.items() if k != "params"}
    assert (fragment.round, run.engine.round) == (4, 4)
    assert run.engine.check() == ()
    assert next(iter(run.go([4]))).rejected == 0


def test_sixteen_bit_replicas_are_measured_from_where_they_began():
    """Replicas that stand still have norm 0 and weight 1, though the anchor is between the numbers that they hold."""
    models = [network(0, torch.bfloat16) for _ in range(2)]
    engine = DiLoCo(models, edit("edit"), inner_steps=1)
    with torch.no_grad():
        for view in engine.anchor.values():
            view.add_(1e-4 * view)
    engine._setting.restore()
    report = report_of(engine)
    assert (report.pseudo_gradient_norm, report.rejected) == (0.0, 0)


# --- what is refused --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Agreeing(RestartPolicy):
    """A policy that looks at how far the replicas agree."""

    needs: ClassVar[frozenset[str]] = frozenset({"agreement"})

    def decide(self, state: State, signal: RoundSignal) -> tuple[State, Restart | None]:
        """Never restart."""
        del signal
        return state, None


def loaded_alone() -> None:
    """A state with the filter, loaded where there is one replica."""
    state = start(edit(OFF)).engine.state_dict()
    start(outer(RULE, filter="clip"), [0]).engine.load_state_dict(state)


@pytest.mark.parametrize(
    ("attempt", "words"),
    [
        (lambda: start(edit(), [0]), "train two or more"),
        (lambda: OuterOptimizer(parameters(0), edit()), "give it to the engine"),
        (lambda: start(lambda params: OuterOptimizer(params, edit())), "give it to the engine"),
        (lambda: start(edit(), restart="test-agreeing"), "Take one of them away"),
        (loaded_alone, "train two or more"),
        (lambda: EDiT(threshold=0), "threshold"),
        (lambda: EDiT(alpha=0), "alpha"),
        (lambda: EDiT(alpha=1.5), "at most 1"),
        (lambda: EDiT(warmup=-1), "warmup"),
        (lambda: EDiT(temperature=-1), "temperature"),
        (lambda: EDiT(clip=math.inf), "clip"),
        (lambda: EDiT(clip=0), "clip"),
    ],
)
def test_refused(attempt: Any, words: str):
    """One replica, no engine, a policy that needs the replicas' own agreement, and numbers out of range."""
    register("test-agreeing")(Agreeing)
    with pytest.raises(ValueError, match=words):
        attempt()


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
def test_option_and_axis(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Filters are an option and an axis of the command line, and one replica is a mistake there."""
    common = "--task digits --steps 8 --inner-steps 2 --outer.method nesterov:lr=0.7:momentum=0.9".split()
    filters = ["none", "clip:norm=0.01", "edit:warmup=1"]
    words = ["sweep", *common, "--replicas", "2", "--axis", "outer.filter", *filters, "--out", str(tmp_path / "sweep")]
    assert main(words) == 0
    with (tmp_path / "sweep" / "cells.csv").open(encoding="utf-8", newline="") as file:
        rows = {row["outer.filter"]: float(row["validation_loss"]) for row in csv.DictReader(file)}
    assert list(rows) == filters
    assert len(set(rows.values())) == 3
    assert main(["train", *common, "--outer.filter", "edit", "--replicas", "1", "--out", str(tmp_path / "run")]) == 2
    assert "--outer.filter" in capsys.readouterr().err


def test_bits_hold_where_a_weight_is_one():
    """A single replica that counts is sent as it is: times 1, over 1."""
    run = start(edit("edit:temperature=1e-30:clip=1e30", OuterRule(1.0, 0.0)), (0, 1), inner_steps=1)
    for step in range(3):
        for replica, model in enumerate(run.models):
            drift(model, step, replica)
        anchor = {name: a.clone() for name, a in run.engine.anchor.items()}
        ends = [{name: p.detach().clone() for name, p in model.named_parameters()} for model in run.models]
        norms = [sum(float((anchor[n] - p).double().norm()) ** 2 for n, p in end.items()) for end in ends]
        shortest = ends[norms.index(min(norms))]
        run.engine.step()
        for name, a in run.engine.anchor.items():
            assert same_bits(a, anchor[name] - (anchor[name] - shortest[name]))
