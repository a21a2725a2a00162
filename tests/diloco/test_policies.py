"""Restart policies that decide by what is measured, told or probed: alike in one process and in two, taken up, NaN.

Run as a program, this file is one of the two processes of its own tests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from forked import bring, in_processes
from policies import Shrink
from replicas import NAMES, Run, drift, network, of_one_process, same_bits, start, through_file, unlike
from rounds import report_of, shift
from twophase import restart as restart_module
from twophase.diloco.engine import DiLoCo
from twophase.diloco.report import RoundReport
from twophase.restart import Restart, RestartPolicy, RoundSignal, State
from twophase.rule import OuterRule

RULE = OuterRule(0.5, 0.9, nesterov=True)
STEPS, STOP = 26, 15
SIGNALS = ("loss_end", "loss_start")
POLICIES = ("loss", "probe:keep,fresh,1.3", "test-agreeing:0.55")
OPTIONS: dict[str, dict[str, Any]] = {
    "whole": {},
    "streaming": {"fragments": 2, "delay": 2, "mixing": 0.5},
    "int8": {"fragments": 2, "delay": 1, "wire": "int8"},
}
CASES = [
    *((POLICIES[0], options) for options in ("whole", "streaming")),
    *((POLICIES[1], options) for options in OPTIONS),
    *((POLICIES[2], options) for options in ("streaming", "int8")),
    # `auto` by what a sync measures; both from memory, which would show in these if it were lost.
    *((policy, "streaming") for policy in ("auto", "test-longer:3")),
    *((policy, "int8") for policy in ("norm:1.5", "gain:1")),
]
STEPPING = ("probe", "auto", "gain")
"""What begins the names of policies whose decisions show in the gain, and not in restarts."""


@dataclass(frozen=True, slots=True)
class Agreeing(RestartPolicy):
    """Restart where the replicas hardly share a direction."""

    least: float
    needs: ClassVar[frozenset[str]] = frozenset({"agreement"})

    def decide(self, state: State, signal: RoundSignal) -> tuple[State, Restart | None]:
        """Compare with the least."""
        return state, Restart() if signal.value("agreement") < self.least else None


@pytest.fixture(autouse=True)
def _registered(register_policy: Callable[[str], Any]) -> Iterator[None]:
    register_policy("test-agreeing")(Agreeing)
    yield
    Agreeing.name = ""


@torch.no_grad()
def loss(model: nn.Module, replica: int, number: int) -> float:
    """On data of a replica's own, which change from time to time: a pull towards a place that they name."""
    position = math.sin(1.7 * number + replica)
    return sum(float(((p.double() - position) ** 2).mean()) for p in model.parameters())


@dataclass
class Supplied(Run):
    """A run whose policies are given what they need; it notes what it has probed, and whether that left a trace."""

    local: list[list[float]] = field(default_factory=list)
    """Of each candidate, the losses of this process's replicas."""
    shared: list[list[list[float]]] = field(default_factory=list)
    untouched: list[bool] = field(default_factory=list)

    def probe(self, model: nn.Module, number: int, round_: int) -> float:
        """The loss of a candidate on a replica's data."""
        value = loss(model, self.replicas[number], round_)
        if number == 0:
            self.local.append([])
        self.local[-1].append(value)
        return value

    def watch(self) -> None:
        """See that probing leaves everything as it was."""
        before: dict[str, Any] = {}

        def watch_fragment(fragment: Any) -> None:
            hand_over, take_step = fragment.hand_over, fragment.outer.step

            def before_probing(**options: Any) -> None:
                hand_over(**options)
                before.update((name, t.clone()) for name, t in self.tensors().items())

            def after_probing(**options: Any) -> None:
                if options["probes"]:
                    self.untouched.append(unlike(before, self.tensors()) == [])
                    self.shared.append([list(options["probes"])])
                take_step(**options)

            fragment.hand_over, fragment.outer.step = before_probing, after_probing

        for fragment in self.engine.fragments:
            watch_fragment(fragment)

    def step(self, step: int) -> RoundReport | None:
        """One inner step of every replica, and the engine's, with the losses."""
        for replica, model in zip(self.replicas, self.models, strict=True):
            drift(model, step, replica)
        losses = [loss(model, replica, step // 6) for replica, model in zip(self.replicas, self.models, strict=True)]
        ends = [value * (1 + 0.02 * math.sin(step)) for value in losses]  # a mean first would round otherwise
        return self.engine.step({"loss_start": sum(losses) / len(losses), "loss_end": sum(ends) / len(ends)})


def begin(policy: str, options: str, replicas: Sequence[int], seed: int = 0) -> Supplied:
    """A run that is ready to go."""
    runs: list[Supplied] = []
    more = OPTIONS[options] | {"restart": policy, "signals": SIGNALS}

    def probe(model: nn.Module, number: int, round_: int) -> float:
        return runs[0].probe(model, number, round_)

    run = start(RULE, replicas, seed=seed, probe=probe, **more)
    runs.append(Supplied(run.engine, run.models, run.replicas))
    runs[0].watch()
    return runs[0]


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
    final = run.engine.finish(dict.fromkeys(SIGNALS, 1.0))
    assert final is not None
    counters = [fragment.counters() for fragment in run.engine.fragments]
    return {
        "reports": [facts(report) for report in [*reports, final]],
        "tensors": run.tensors(),
        "counters": counters,
        "own": run.local,
        "shared": run.shared,
        "untouched": run.untouched,
    }


@cache
def undecided(options: str) -> str:
    """The last checksum where no policy decides anything."""
    return scenario("never", options, [0, 1])["reports"][-1]["checksum"]


def worker(rank: int) -> dict[str, Any]:
    """One of the two processes."""
    restart_module.register("test-agreeing")(Agreeing)
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


@pytest.mark.dist
@each_case
def test_probes_are_means_and_leave_no_trace(pair: list[dict[str, Any]], policy: str, options: str):
    """What is decided by is the mean over both processes of their own losses; no tensor of either has changed."""
    both = [answers["whole"][policy, options] for answers in pair]
    assert both[0]["shared"] == both[1]["shared"]
    flat = [value for sync in both[0]["shared"] for fragment in sync for value in fragment]
    means = [(a[0] + b[0]) / 2 for a, b in zip(both[0]["own"], both[1]["own"], strict=True)]
    assert flat == means
    assert (len(flat) > 0) == policy.startswith("probe")
    assert both[0]["own"] == [] or both[0]["own"] != both[1]["own"]
    for answers in both:
        assert answers["untouched"] == [True] * len(answers["shared"])


@pytest.mark.dist
@each_case
def test_two_processes_resume(pair: list[dict[str, Any]], policy: str, options: str):
    """Saved in the middle of a round (with a delay, during a reduction) and resumed, a run has the same bits."""
    for answers in pair:
        whole, resumed = (answers[which][policy, options] for which in ("whole", "resumed"))
        assert resumed["reports"] == whole["reports"]
        assert resumed["counters"] == whole["counters"]
        assert unlike(resumed["tensors"], whole["tensors"]) == []


@each_case
def test_in_process_replicas_resume(policy: str, options: str):
    """The same for two replicas in one process, whose memory of the agreement is saved as well."""
    whole, resumed = scenario(policy, options, [0, 1]), scenario(policy, options, [0, 1], stop=STOP)
    assert resumed["reports"] == whole["reports"]
    assert resumed["counters"] == whole["counters"]
    assert unlike(resumed["tensors"], whole["tensors"]) == []
    assert whole["untouched"] == [True] * len(whole["shared"])


@pytest.mark.parametrize(("moves", "expected"), [((1.0, 1.0), 1.0), ((1.0, 0.0), 0.5), ((1.0, -1.0), 0.0)])
def test_agreement_is_reported(moves: tuple[float, float], expected: float):
    """Where a policy has it measured, a report has |g|^2 over the mean squared norm; else it has no such entry."""
    for policy in ("test-agreeing:0.1", "3"):
        models = [network(0) for _ in moves]
        engine = DiLoCo(models, RULE, inner_steps=1, restart=policy)
        for model, move in zip(models, moves, strict=True):
            shift(model, by=move)
        fragment = report_of(engine).as_dict()["fragments"][0]
        assert ("agreement" in fragment) == (policy != "3")
        assert fragment.get("agreement", expected) == pytest.approx(expected, abs=1e-6)


def test_candidates_have_the_other_fragments_at_the_anchor():
    """A fragment's candidates are judged with the others as they were agreed on, at the candidate's own step."""
    seen: list[dict[str, torch.Tensor]] = []

    def probe(model: nn.Module, _replica: int, _round: int) -> float:
        seen.append({name: p.detach().clone() for name, p in model.named_parameters()})
        return float(len(seen))

    run = start(RULE, [0, 1], fragments=2, restart="probe:average,0.5", probe=probe)
    anchor = {name: a.clone() for name, a in run.engine.anchor.items()}
    replicas = [{}, {}]
    for step in range(3):  # the first fragment's sync is after the third of six
        for replica, model in enumerate(run.models):
            drift(model, step, replica)
            replicas[replica] = {name: p.detach().clone() for name, p in model.named_parameters()}
        run.engine.step()
    first = {name for name, _ in run.engine.fragments[0].named}
    assert 0 < len(first) < len(NAMES)
    assert len(seen) == 4  # each on the data of two replicas
    for share, weights in zip((1.0, 1.0, 0.5, 0.5), seen, strict=True):
        for name, value in weights.items():
            mean = (replicas[0][name] + replicas[1][name]) / 2
            if name in first:
                torch.testing.assert_close(value, anchor[name] + share * (mean - anchor[name]), rtol=0, atol=1e-6)
            else:
                assert same_bits(value, anchor[name])


class Centered(nn.BatchNorm1d):
    """A norm that puts a new tensor in its buffer's place, as many that are written by hand do."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's name
        """Move the mean, too."""
        self.running_mean = 0.9 * self.running_mean + 0.1 * input.detach().mean(0)  # type: ignore[operator, assignment]
        return super().forward(input)


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, Centered])
def test_module_buffers_come_out_of_probing_as_well(norm: type[nn.Module]):
    """The statistics of batch norm, which a forward pass in training changes, are those from before the probes."""
    models = [nn.Sequential(nn.Linear(3, 3), norm(3)) for _ in range(2)]
    seen: list[int] = []

    def probe(model: nn.Module, replica: int, _round: int) -> float:
        seen.append(replica)
        return float(model(torch.arange(12.0).view(4, 3)).square().mean())

    engine = DiLoCo(models, RULE, inner_steps=1, restart="probe:keep,average", probe=probe)
    before = [{name: buffer.clone() for name, buffer in model.named_buffers()} for model in models]
    assert engine.step() is not None
    assert seen == [0, 1, 0, 1]
    for model, old in zip(models, before, strict=True):
        assert all(torch.equal(buffer, old[name]) for name, buffer in model.named_buffers())


# --- what is missing, or not finite -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "replicas", "words"),
    [
        (
            "loss",
            2,
            r"policy loss:0\.0 needs loss_end, loss_start; pass them to step\(signals=\.\.\.\), and promise them with ",
        ),
        (str(Shrink()), 2, r"policy test-shrink needs inner_lr; pass .*signals=\['inner_lr'\]"),
        ("ramp:0.5", 1, r"needs progress; pass .*signals=\['progress'\]"),
        ("probe:keep,drop", 2, r"policy probe:keep,drop needs probes; give the engine a function .*probe=\.\.\."),
        ("test-agreeing:0.4", 1, r"needs agreement; train two or more replicas: it compares them, and there is 1"),
    ],
)
def test_a_missing_signal_is_refused(policy: str, replicas: int, words: str):
    """A policy that needs what the engine is not promised, or more replicas, is refused when it is built."""
    with pytest.raises(ValueError, match=rf"DiLoCo: restart {words}" if words.startswith("policy") else words):
        DiLoCo([network(number) for number in range(replicas)], RULE, inner_steps=2, restart=policy)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(
    ("policy", "name"),
    [("loss", "loss_start"), ("loss", "loss_end"), ("probe:keep,drop,average", "probes"), ("gradient", "cosine"),
     ("norm:1.5", "pseudo_gradient_norm"), ("test-agreeing:0.4", "agreement")],
)  # fmt: skip
def test_what_is_not_finite_is_reported(policy: str, name: str, options: str):
    """NaN in whatever a policy needs is named in the report of its round, and nothing restarts; before it is not."""
    broken = False

    def probe(model: nn.Module, replica: int, round_: int) -> float:
        return math.nan if broken else loss(model, replica, round_)

    run = start(RULE, [0, 1], restart=policy, signals=SIGNALS, probe=probe, **OPTIONS[options])
    reports: list[RoundReport] = []
    for step in range(24):
        broken = step >= 12
        for replica, model in enumerate(run.models):
            drift(model, step, replica)
            if broken and name in ("cosine", "pseudo_gradient_norm", "agreement"):
                with torch.no_grad():
                    next(model.parameters())[0] = math.nan
        signals = {"loss_start": 1.0, "loss_end": 2.0} | ({name: math.nan} if broken and name in SIGNALS else {})
        report = run.engine.step(signals)
        if report is not None:
            assert broken or report.not_finite == ()
            reports += [report] if broken else []
    flagged = [report for report in reports if report.not_finite]
    assert flagged
    assert all(name in report.not_finite and not report.restarted for report in flagged)
    if name in (*SIGNALS, "probes"):
        assert len(flagged) == len(reports)


if __name__ == "__main__":
    bring(worker, 2)
