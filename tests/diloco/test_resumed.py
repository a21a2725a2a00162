"""States: saved anywhere, a run goes on with the same bits; what another engine has saved is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from policies import Rising
from replicas import start, through_file, unlike
from rounds import Pair, blocks, shift
from twophase.diloco.communicator import Done
from twophase.diloco.engine import DiLoCo
from twophase.diloco.report import RoundReport
from twophase.rule import OuterRule

NESTEROV = OuterRule(0.3, 0.9, nesterov=True)


# --- equal to itself, resumed -------------------------------------------------------------------------------------

RUNS: dict[str, dict[str, Any]] = {
    "cycle": {"restart": "cycle:2,3"},
    "soft": {"outer": OuterRule(1.0, 0.9, form="ema"), "restart": "soft:3:0.4:0.2"},
    "adaptive": {"outer": OuterRule(0.3, 0.9), "restart": "norm-ratio:1.2:1"},
    "blocks": {"outer": blocks, "restart": None},
    "delay": {"delay": 2, "mixing": 0.5, "wire": "int8"},
    "in turn": {"fragments": 3, "inner_steps": 6, "wire": "int8"},
    "in turn, delay": {"fragments": 3, "inner_steps": 6, "delay": 1, "wire": "bfloat16"},
    "in turn, all under way": {"fragments": 3, "inner_steps": 6, "delay": 5, "mixing": 0.5, "wire": "int8"},
    "in turn, uneven": {"fragments": 3, "inner_steps": 7, "delay": 3},
    "at once": {"fragments": 3, "inner_steps": 5, "delay": 2, "mixing": 0.5, "stagger": False, "wire": "int8"},
}


@pytest.mark.usefixtures("norm_ratio")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if "fragments" in RUNS[name] else []) for name in RUNS]
)
def test_resumed_anywhere_equals_uninterrupted(name: str):
    """Saved after any inner step, with what is under way and owed, a run goes on with the same bits and reports."""
    options = {"outer": NESTEROV, "restart": 2, "inner_steps": 4} | RUNS[name]
    rounds = 4 if "fragments" in options else 6  # two restarts
    whole, steps = start(**options), rounds * options["inner_steps"] + 2
    states, ends, reports = [through_file(whole.state())], [], []
    for step in range(steps):
        reports.append(without_times(whole.step(step)))
        states.append(through_file(whole.state()))
        ends.append({name: tensor.clone() for name, tensor in whole.tensors().items()})
    last = without_times(whole.engine.finish())
    for saved, state in enumerate(states):
        resumed = start(seed=50, **options)  # begins from other weights altogether
        resumed.load(state)
        for step in range(saved, steps):
            assert without_times(resumed.step(step)) == reports[step]
            assert unlike(resumed.tensors(), ends[step]) == [], (saved, step)
        assert without_times(resumed.engine.finish()) == last
        assert unlike(resumed.tensors(), whole.tensors()) == []
    said = [report for report in reports if report is not None]
    assert sum(report["restarted"] == "True" for report in said) >= 2


def without_times(report: RoundReport | None) -> dict[str, Any] | None:
    """What does not depend on the machine, NaN-safe."""
    if report is None:
        return None
    slots = (name for name in RoundReport.__dataclass_fields__ if name != "seconds")
    return {name: str(getattr(report, name)) for name in slots}


def test_loading_ends_what_is_under_way():
    """A run that is set back while it reduces goes on as the state says, on a lossy wire too."""
    run = start(NESTEROV, inner_steps=4, delay=2, mixing=0.5, wire="int8")
    run.go(range(4))
    state = through_file(run.state())
    run.go(range(4, 13))
    ends = {name: tensor.clone() for name, tensor in run.tensors().items()}
    run.load(state)
    run.go(range(4, 13))
    assert unlike(run.tensors(), ends) == []


def test_a_sum_that_arrives_late_changes_no_loaded_state():
    """The message of a reduction under way may arrive after a load, and would be written into the loaded sum."""

    @dataclass
    class Arrival:
        tensor: Tensor
        bytes_sent: int = 0
        is_there: bool = False

        def wait(self) -> None:
            if not self.is_there:
                self.tensor.mul_(2)
            self.is_there = True

    class Slow(Pair):
        def launch_sum(self, tensor: Tensor) -> Arrival:
            arrivals.append(Arrival(tensor))
            return arrivals[-1]

    arrivals: list[Arrival] = []
    run = start(NESTEROV, [0], inner_steps=4, delay=2, communicator=Slow())
    run.go(range(4))
    state = through_file(run.state())
    run.go(range(4, 12))
    ends = {name: tensor.clone() for name, tensor in run.tensors().items()}
    run.load(state)
    for arrival in arrivals:
        arrival.wait()
    run.go(range(4, 12))
    assert unlike(run.tensors(), ends) == []


def test_what_a_state_does_not_name_is_owed_no_longer():
    """An older state than the wire's leaves no residual of later rounds behind."""
    run = start(outer=NESTEROV, restart=2, inner_steps=2, wire="int8")
    for step in range(4):
        run.step(step)
    (owed,) = run.engine.wire_state_dict().values()
    assert any(residual.any() for residual in owed["sent"])
    run.engine.load_wire_state_dict({})
    assert not any(residual.any() for residual in owed["sent"])


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

    class Sending(Pair):
        def launch_sum(self, tensor: Tensor) -> Done:
            del tensor
            return Done(bytes_sent=7)

    run = start(NESTEROV, delay=3, communicator=Sending())
    run.go(range(6))
    for step in (6, 7):  # twice in one delay
        state = through_file(run.state())
        run = start(NESTEROV, delay=3, communicator=Sending(), seed=9)
        run.load(state)
        assert run.step(step) is None
    assert [report.bytes_sent for report in run.go(range(8, 15))] == [7, 7]


def test_loading_a_rounds_end_sets_the_replicas():
    """The replicas are the anchor then, whatever they were; engine and dictionary do not see each other afterwards."""
    donor, engine = small(), small()
    shift(*donor.replicas)
    state = donor.state_dict()
    before = copy.deepcopy(state["anchor"])
    engine.load_state_dict(state)
    assert torch.equal(engine.replicas[0].get_parameter("weight").detach(), donor.anchor["weight"])
    for _ in range(2):
        shift(*engine.replicas)
        engine.step()
    assert not torch.equal(engine.anchor["weight"], donor.anchor["weight"])
    assert torch.equal(state["anchor"], before)


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


# --- states of others ---------------------------------------------------------------------------------------------


def small(model: nn.Module | None = None, **options: Any) -> DiLoCo:
    """An engine on a small model."""
    usual: dict[str, Any] = {"inner_steps": 2, "restart": 3}
    return DiLoCo(model or nn.Linear(3, 2), OuterRule(0.1, 0.5), **(usual | options))


def in_parts(*cut: str) -> DiLoCo:
    """An engine on four parameters in three fragments."""
    model = nn.ParameterDict({name: nn.Parameter(torch.ones(1)) for name in "abcd"})
    return small(model, fragments=dict(zip("xyz", cut, strict=True)), stagger=False)


def streaming(steps: int = 0, **options: Any) -> DiLoCo:
    """An engine of three fragments with a delay; after six steps a reduction is under way."""
    usual: dict[str, Any] = {"inner_steps": 6, "fragments": 3, "delay": 1}
    run = start(NESTEROV, **(usual | options))
    run.go(range(steps))
    return run.engine


def with_short_sums() -> dict[str, Any]:
    """A state whose sums under way have one element, which torch would spread over a whole fragment."""
    state = streaming(6).state_dict()
    return state | {"under_way": [sync | {"sums": [part[:1] for part in sync["sums"]]} for sync in state["under_way"]]}


UNDER_WAY = "reduction under way.* the checkpoint's"


@pytest.mark.parametrize(
    ("engine", "state", "message"),
    [
        (small, dict, "lacks anchor, fragments, inner_step, layout, round, schedule, syncs, taken, under_way"),
        (small, lambda: None, "pass what state_dict"),
        (small, lambda: small().state_dict() | {"anchor": torch.zeros(3)}, r"elements of the anchor .*\(32\).*\(3\)"),
        (small, lambda: small().state_dict() | {"inner_step": 5}, "after 5 inner steps of its round, but inner_steps"),
        (small, lambda: small(nn.Linear(4, 2)).state_dict(), r"parameters of the model .*\(3\).*\(4\)"),
        (small, lambda: small(nn.Sequential(nn.Linear(3, 2))).state_dict(), r"model .*\(weight\).*\(0.weight\)"),
        (
            lambda: in_parts("a", "b", "c|d"),
            lambda: in_parts("a", "b|c", "d").state_dict(),
            r"param groups differ between this engine \(1\) and the state \(2\)",
        ),
        (streaming, lambda: streaming(6, fragments=2).state_dict(), r"\(3 of them\).*\(2\).*checkpoint's"),
        (lambda: streaming(fragments=1), lambda: streaming(1).state_dict(), r"fragments differ .*\(1 of.*\(3\)"),
        (
            lambda: streaming(fragments=2),
            lambda: streaming(6, fragments={"a": "[03]", "b": "."}).state_dict(),
            r"fragments differ .*\(0\).*\(a\)",
        ),
        (lambda: streaming(inner_steps=7), lambda: streaming(6, delay=3).state_dict(), UNDER_WAY),
        (lambda: streaming(delay=0), lambda: streaming(6).state_dict(), UNDER_WAY),
        (lambda: streaming(stagger=False), lambda: streaming(6).state_dict(), UNDER_WAY),
        (lambda: streaming(inner_steps=9), lambda: streaming(6).state_dict(), UNDER_WAY),
        (streaming, with_short_sums, r"of shape \(1,\) where this engine has"),
    ],
)
def test_a_state_of_another_engine_is_refused(
    engine: Callable[[], DiLoCo], state: Callable[[], dict[str, Any]], message: str
):
    """One that lacks parts, is damaged, or is of another model or schedule is refused by name; nothing has changed."""
    mine = engine()
    before, groups = mine.checksum(), [dict(f.outer.param_groups[0]) for f in mine.fragments]
    with pytest.raises(ValueError, match=rf"^DiLoCo\.load_state_dict: .*{message}"):
        mine.load_state_dict(state())
    assert mine.checksum() == before
    assert (mine.round, mine.inner_step, mine.syncs) == (0, 0, 0)
    assert [dict(f.outer.param_groups[0]) for f in mine.fragments] == groups


def test_a_state_whose_policy_lacks_something_is_refused():
    """As at construction, before anything is changed; an engine that has it takes the policy over."""
    policy = str(Rising(0.0))
    state = small(restart=policy, signals=["loss"]).state_dict()
    poor, rich = small(), small(signals=["loss"])
    with pytest.raises(ValueError, match=rf"DiLoCo: restart policy {policy} needs loss"):
        poor.load_state_dict(state)
    assert poor.outer.param_groups[0]["restart"] == "3"
    rich.load_state_dict(state)
    assert rich.outer.param_groups[0]["restart"] == policy


def test_a_state_that_a_later_fragment_refuses_changes_none():
    """The outer optimizers load one after the other; those before the refusal go back."""
    engine, donor = (in_parts("a", "b", "c|d") for _ in range(2))
    for _ in range(4):
        shift(*donor.replicas, by=-0.1)
        donor.step()
    state = donor.state_dict()
    (buffers,) = list(state["fragments"][1]["outer"]["state"].values())
    buffers["momentum_buffer"] = torch.zeros(3)
    with pytest.raises(ValueError, match=r"the loaded buffer of parameter 0 has shape \(3,\)"):
        engine.load_state_dict(state)
    assert [fragment.outer.param_groups[0]["rounds"] for fragment in engine.fragments] == [0, 0, 0]
    assert not any(fragment.outer.state for fragment in engine.fragments)
