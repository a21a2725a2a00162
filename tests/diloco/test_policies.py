"""Restart policies that decide by what is measured or told: alike in one process and in two, resumed, NaN.

Run as a program, this file is one of the two processes of its own tests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from forked import bring, in_processes
from policies import Rising, Shrink
from replicas import Run, drift, network, of_one_process, start, through_file, unlike
from twophase.diloco.engine import DiLoCo
from twophase.diloco.report import RoundReport
from twophase.rule import OuterRule

RULE = OuterRule(0.5, 0.9, nesterov=True)
STEPS, STOP = 26, 15
RISING = str(Rising(0.0))
OPTIONS: dict[str, dict[str, Any]] = {
    "whole": {},
    "streaming": {"fragments": 2, "delay": 2, "mixing": 0.5},
    "int8": {"fragments": 2, "delay": 1, "wire": "int8"},
}
CASES = [
    *((RISING, options) for options in OPTIONS),
    # `auto` by what a sync measures; both from memory, which would show in these if it were lost.
    *((policy, "streaming") for policy in ("auto", "test-longer:3")),
    *((policy, "int8") for policy in ("norm:1.5", "gain:1")),
]
STEPPING = ("auto", "gain")
"""What begins the names of policies whose decisions show in the gain, and not in restarts."""


@torch.no_grad()
def loss(model: nn.Module, replica: int, number: int) -> float:
    """On data of a replica's own, which change from time to time: a pull towards a place that they name."""
    position = math.sin(1.7 * number + replica)
    return sum(float(((p.double() - position) ** 2).mean()) for p in model.parameters())


class Supplied(Run):
    """A run whose policies are told the loss."""

    def step(self, step: int) -> RoundReport | None:
        """One inner step of every replica, and the engine's, with the mean loss."""
        for replica, model in zip(self.replicas, self.models, strict=True):
            drift(model, step, replica)
        losses = [loss(model, replica, step // 6) for replica, model in zip(self.replicas, self.models, strict=True)]
        return self.engine.step({"loss": sum(losses) / len(losses)})


def begin(policy: str, options: str, replicas: Sequence[int], seed: int = 0) -> Supplied:
    """A run that is ready to go."""
    run = start(RULE, replicas, seed=seed, restart=policy, signals=["loss"], **OPTIONS[options])
    return Supplied(run.engine, run.models, run.replicas)


def facts(report: RoundReport) -> dict[str, Any]:
    """What all processes must say alike."""
    names = ("round", "complete", "replicas", "restarted", "checksum", "gain", "cosine", "signals", "not_finite")
    return {name: getattr(report, name) for name in names}


def scenario(policy: str, options: str, replicas: Sequence[int], *, stop: int | None = None) -> dict[str, Any]:
    """Four rounds and more, set down and taken up once if `stop` is given."""
    run = begin(policy, options, replicas)
    reports = []
    for step in range(STEPS):
        reports += run.go([step])
        if step == stop:
            state = through_file(run.state())
            run = begin(policy, options, replicas, seed=40)
            run.load(state)
    final = run.engine.finish({"loss": 1.0})
    assert final is not None
    return {
        "reports": [facts(report) for report in [*reports, final]],
        "tensors": run.tensors(),
        "counters": [fragment.counters() for fragment in run.engine.fragments],
    }


@cache
def undecided(options: str) -> str:
    """The last checksum where no policy decides anything."""
    return scenario("never", options, [0, 1])["reports"][-1]["checksum"]


def worker(rank: int) -> dict[str, Any]:
    """One of the two processes."""
    return {
        which: {case: scenario(*case, [rank], stop=stop) for case in CASES}
        for which, stop in (("whole", None), ("resumed", STOP))
    }


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of the two brings home."""
    return in_processes(__file__, tmp_path_factory.mktemp("pair"), 2)


each_case = pytest.mark.parametrize(("policy", "options"), CASES)


@pytest.mark.dist
@each_case
def test_two_processes_decide_as_one(pair: list[dict[str, Any]], policy: str, options: str):
    """Two replicas here and one in each of two processes: the same decisions, bits, gains and counters everywhere."""
    expected = scenario(policy, options, [0, 1])
    for rank, actual in enumerate(answers["whole"][policy, options] for answers in pair):
        assert actual["reports"] == expected["reports"]
        assert actual["counters"] == expected["counters"]
        assert unlike(of_one_process(expected["tensors"], rank), actual["tensors"]) == []
    chosen = {report["gain"] if policy.startswith(STEPPING) else report["restarted"] for report in expected["reports"]}
    assert len(chosen) > 1
    assert expected["reports"][-1]["checksum"] != undecided(options)
    assert not any(report["not_finite"] for report in expected["reports"])


def assert_same(resumed: dict[str, Any], whole: dict[str, Any]) -> None:
    assert resumed["reports"] == whole["reports"]
    assert resumed["counters"] == whole["counters"]
    assert unlike(resumed["tensors"], whole["tensors"]) == []


@pytest.mark.dist
@each_case
def test_two_processes_resume(pair: list[dict[str, Any]], policy: str, options: str):
    """Saved in the middle of a round (with a delay, during a reduction) and resumed, a run has the same bits."""
    for answers in pair:
        assert_same(*(answers[which][policy, options] for which in ("resumed", "whole")))


@each_case
def test_in_process_replicas_resume(policy: str, options: str):
    """The same for two replicas in one process."""
    assert_same(scenario(policy, options, [0, 1], stop=STOP), scenario(policy, options, [0, 1]))


# --- what is missing, or not finite -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "replicas", "words"),
    [
        (RISING, 2, r"needs loss; pass .*signals=\['loss'\]"),
        (str(Shrink()), 2, r"policy test-shrink needs inner_lr; pass .*signals=\['inner_lr'\]"),
        ("ramp:0.5", 1, r"needs progress; pass .*signals=\['progress'\]"),
    ],
)
def test_a_missing_signal_is_refused(policy: str, replicas: int, words: str):
    """A policy that needs what the engine is not promised is refused when it is built."""
    with pytest.raises(ValueError, match=words):
        DiLoCo([network(number) for number in range(replicas)], RULE, inner_steps=2, restart=policy)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(
    ("policy", "name"), [(RISING, "loss"), ("gradient", "cosine"), ("norm:1.5", "pseudo_gradient_norm")]
)
def test_what_is_not_finite_is_reported(policy: str, name: str, options: str):
    """NaN in whatever a policy needs is named in the report of its round, and nothing restarts; before it is not."""
    run = start(RULE, [0, 1], restart=policy, signals=["loss"], **OPTIONS[options])
    reports: list[RoundReport] = []
    for step in range(24):
        broken = step >= 12
        for replica, model in enumerate(run.models):
            drift(model, step, replica)
            if broken and name != "loss":
                with torch.no_grad():
                    next(model.parameters())[0] = math.nan
        report = run.engine.step({"loss": math.nan if broken and name == "loss" else 1.0})
        if report is not None:
            assert broken or report.not_finite == ()
            reports += [report] if broken else []
    flagged = [report for report in reports if report.not_finite]
    assert flagged
    assert all(name in report.not_finite and not report.restarted for report in flagged)
    if name == "loss":
        assert len(flagged) == len(reports)


if __name__ == "__main__":
    bring(worker, 2)
