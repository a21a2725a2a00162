"""`DiLoCo`: equal to a loop in plain torch, to several processes, and to itself resumed (to the theory: agreement/).

Run as a program, this file is one of the two processes of its own tests.
"""

from __future__ import annotations

import copy
import itertools
import math
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from forked import in_processes
from replicas import network, same_bits, through_file
from twophase import restart as restart_module
from twophase.diloco.comm import ProcessGroup
from twophase.diloco.communicator import Communicator, Done, SingleProcess
from twophase.diloco.engine import DiLoCo, RoundReport
from twophase.diloco.flat import checksum
from twophase.optim.outer import OuterSGD
from twophase.restart import Never, Periodic, Restart, RestartPolicy, RoundSignal, State, parse
from twophase.rule import OuterRule

# --- a small problem ----------------------------------------------------------------------------------------------


def build(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A small network and its inner optimizer."""
    model = network(seed)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def inner_step(model: nn.Module, inner: torch.optim.Optimizer, step: int, replica: int) -> None:
    """One inner step on data that is a function of step and replica."""
    generator = torch.Generator().manual_seed(1000 * replica + step)
    x, y = torch.randn(8, 4, generator=generator), torch.randn(8, 3, generator=generator)
    inner.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    inner.step()


@dataclass
class Run:
    """Replicas of a run that live in this process, and their engine."""

    engine: DiLoCo
    pairs: list[tuple[nn.Module, torch.optim.Optimizer]]
    replicas: Sequence[int]

    def go(self, steps: Iterable[int]) -> list[RoundReport]:
        """Inner steps of every replica, each followed by the engine's."""
        reports = []
        for step in steps:
            for replica, (model, inner) in zip(self.replicas, self.pairs, strict=True):
                inner_step(model, inner, step, replica)
            report = self.engine.step()
            if report is not None:
                reports.append(report)
        return reports

    def state(self) -> dict[str, Any]:
        """All that a resumed run needs."""
        return {
            "engine": self.engine.state_dict(),
            "models": [model.state_dict() for model, _ in self.pairs],
            "inner": [inner.state_dict() for _, inner in self.pairs],
        }

    def load(self, state: dict[str, Any]) -> None:
        """Continue from a state."""
        self.engine.load_state_dict(state["engine"])
        for (model, inner), weights, moments in zip(self.pairs, state["models"], state["inner"], strict=True):
            model.load_state_dict(weights)
            inner.load_state_dict(moments)


def start(outer: Any, replicas: Sequence[int] = (0, 1), *, inner_steps: int = 3, seed: int = 0, **options: Any) -> Run:
    """A run whose replicas begin differently, except replica 0 of seed 0, which all must take over."""
    pairs = [build(seed + replica) for replica in replicas]
    engine = DiLoCo([model for model, _ in pairs], outer, inner_steps=inner_steps, **options)
    return Run(engine, pairs, replicas)


def blocks(params: list[tuple[str, Tensor]]) -> OuterSGD:
    """An outer optimizer with a rule and a restart period for each of three blocks."""
    groups = [
        {"params": [p for n, p in params if n.startswith("0.")], "restart": Periodic(2), "nesterov": True},
        {"params": [p for n, p in params if n.startswith("2.")], "restart": "cycle:1,3", "form": "ema", "lr": 0.7},
        {"params": [p for n, p in params if n.startswith("3.")], "restart": "soft:3:0.5:0.25", "momentum": 0.5},
    ]
    return OuterSGD(groups, lr=0.3, momentum=0.9)


# --- equal to a loop in plain torch -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """The outer optimizer of a block, for the loop below: `due` says after which rounds m <- retain m + inject g."""

    lr: float
    momentum: float
    nesterov: bool
    form: str
    due: Callable[[int], bool] = lambda t: False  # noqa: ARG005
    retain: float = 0.0
    inject: float = 0.0


def reference_loop(block_of: Callable[[str], Block], inner_steps: int, steps: int) -> tuple[list[nn.Module], dict]:
    """DiLoCo with two replicas in plain torch: the models and the anchor at the end."""
    pairs = [build(0), build(1)]
    anchor = {name: p.detach().clone() for name, p in pairs[0][0].named_parameters()}
    pairs[1][0].load_state_dict(pairs[0][0].state_dict())
    momentum: dict[str, Tensor] = {}
    for step in range(steps):
        for replica, (model, inner) in enumerate(pairs):
            inner_step(model, inner, step, replica)
        if (step + 1) % inner_steps and step + 1 < steps:
            continue
        t = -(-(step + 1) // inner_steps)
        params = [dict(model.named_parameters()) for model, _ in pairs]
        with torch.no_grad():
            for name, a in anchor.items():
                block = block_of(name)
                g = ((a - params[0][name]) + (a - params[1][name])) / 2
                weight = 1 if block.form == "sum" else 1 - block.momentum
                m = momentum.get(name)
                m = weight * g if m is None else m.mul_(block.momentum).add_(g, alpha=weight)
                update = m
                if block.nesterov:
                    update = (
                        g.add(m, alpha=block.momentum) if weight == 1 else (m * block.momentum).add_(g, alpha=weight)
                    )
                a.add_(update, alpha=-block.lr)
                if block.due(t):
                    m = m.mul(block.retain) if block.retain else torch.zeros_like(m)
                    m = m.add(g, alpha=block.inject) if block.inject else m
                momentum[name] = m
                for replica in params:
                    replica[name].copy_(a)
    return [model for model, _ in pairs], anchor


def assert_equals_loop(run: Run, block_of: Callable[[str], Block], steps: int) -> None:
    run.go(range(steps))
    run.engine.finish()
    models, anchor = reference_loop(block_of, run.engine.inner_steps, steps)
    assert list(anchor) == list(run.engine.anchor)
    for name, a in anchor.items():
        assert same_bits(run.engine.anchor[name], a), name
    for (model, _), theirs in zip(run.pairs, models, strict=True):
        for p, q in zip(model.parameters(), theirs.parameters(), strict=True):
            assert same_bits(p, q)


def test_equals_a_plain_loop_with_a_period_per_block():
    """Blocks with rules, forms and restarts of their own have the bits of the plain loop."""
    table = {
        "0": Block(0.3, 0.9, True, "sum", lambda t: t % 2 == 0),
        "2": Block(0.7, 0.9, False, "ema", lambda t: t in (1, 4, 5, 8, 9)),
        "3": Block(0.3, 0.5, False, "sum", lambda t: t % 3 == 0, 0.5, 0.25),
    }
    assert_equals_loop(start(blocks), lambda name: table[name[0]], 29)


@pytest.mark.parametrize("nesterov", [False, True])
def test_any_torch_optimizer_is_an_outer_optimizer(nesterov: bool):
    """With torch.optim.SGD as the outer optimizer the run has the bits of the rule's; its report has no groups.

    The norm is that of the pseudo-gradient also where the optimizer overwrites it, as foreach Nesterov does.
    """
    rule = start(OuterRule(0.3, 0.9, nesterov))
    sgd = start(lambda params: torch.optim.SGD(params, lr=0.3, momentum=0.9, nesterov=nesterov, foreach=True))
    for ours, theirs in zip(rule.go(range(12)), sgd.go(range(12)), strict=True):
        assert ours.checksum == theirs.checksum
        assert theirs.groups == ()
        assert not theirs.restarted
        assert theirs.pseudo_gradient_norm == pytest.approx(ours.pseudo_gradient_norm, rel=1e-6)
        assert math.isnan(theirs.gain)
        assert theirs.cosine == theirs.buffer_norm == 0


# --- equal to several processes -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Against(RestartPolicy):
    """Restart before the mixing when g points less than `limit` along the buffer, and then wait two rounds."""

    limit: float
    needs: ClassVar[frozenset[str]] = frozenset({"cosine"})

    def initial_state(self) -> State:
        """Nothing to wait for."""
        return {"wait": 0}

    def decide(self, state: State, signal: RoundSignal) -> tuple[State, Restart | None]:
        """Look at the angle."""
        assert signal.cosine is not None
        if state["wait"] == 0 and signal.round > 1 and signal.cosine < self.limit:
            return {"wait": 2}, Restart(before=True)
        return {"wait": max(0, state["wait"] - 1)}, None


SCENARIOS: dict[str, tuple[Any, str | None]] = {
    "heavy ball": (OuterRule(0.3, 0.9), "never"),
    "nesterov, ema": (OuterRule(1.0, 0.9, nesterov=True, form="ema"), "3"),
    "soft": (OuterRule(0.3, 0.9, nesterov=True), "soft:2:0.3:0.1"),
    "blocks": (blocks, None),
    "adaptive": (OuterRule(0.3, 0.9, nesterov=True), "test-against:0.6"),
}


def scenario(name: str, replicas: Sequence[int], communicator: Communicator | None = None) -> dict[str, Any]:
    """Eight rounds and a shorter one; the anchor, the models and what the reports say."""
    outer, policy = SCENARIOS[name]
    run = start(outer, replicas, restart=policy, communicator=communicator)
    reports = run.go(range(26))
    last = run.engine.finish()
    assert last is not None
    return {
        "anchor": dict(run.engine.anchor),
        "models": [dict(model.named_parameters()) for model, _ in run.pairs],
        "reports": [
            {
                "checksum": report.checksum,
                "replicas": report.replicas,
                "bytes": report.bytes_sent,
                "restarted": report.restarted,
                "numbers": [report.pseudo_gradient_norm, report.buffer_norm, report.cosine, report.gain],
            }
            for report in [*reports, last]
        ],
    }


@pytest.fixture(scope="session")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two gloo processes brings home."""
    return in_processes(__file__, tmp_path_factory.mktemp("engine"), 2)


def worker(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=2)
    restart_module.register("test-against")(Against)
    found: dict[str, Any] = {"one": {name: scenario(name, [rank]) for name in SCENARIOS}}
    found["two"] = {name: scenario(name, [2 * rank, 2 * rank + 1], ProcessGroup()) for name in SCENARIOS}
    torch.save(found, folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("name", SCENARIOS)
def test_one_process_equals_two(told: list[dict[str, Any]], register_policy: Callable[[str], Any], name: str):
    """Two replicas in this process and one in each of two gloo processes: the same bits, reports and restarts."""
    register_policy("test-against")(Against)
    here = scenario(name, [0, 1])
    for rank, there in enumerate(answers["one"][name] for answers in told):
        for key, a in here["anchor"].items():
            assert same_bits(a, there["anchor"][key])
            assert same_bits(here["models"][rank][key], there["models"][0][key])
        for ours, theirs in zip(here["reports"], there["reports"], strict=True):
            for key in ("checksum", "replicas", "restarted"):
                assert ours[key] == theirs[key]
            assert ours["numbers"] == theirs["numbers"]
    assert any(report["restarted"] for report in here["reports"]) or name == "heavy ball"


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("name", SCENARIOS)
def test_two_processes_agree(told: list[dict[str, Any]], name: str):
    """In every round both processes have the same checksum and numbers, and send the padded buffer once."""
    first, second = (answers["one"][name] for answers in told)
    for ours, theirs in zip(first["reports"], second["reports"], strict=True):
        assert ours == theirs
        assert ours["bytes"] == 4 * sum(16 * math.ceil(a.numel() / 16) for a in first["anchor"].values())
    assert len({report["checksum"] for report in first["reports"]}) == 9


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("name", SCENARIOS)
def test_four_replicas_in_two_processes(told: list[dict[str, Any]], register_policy: Callable[[str], Any], name: str):
    """Two replicas in each of two processes agree with one another in bits, and with four in one to rounding."""
    register_policy("test-against")(Against)
    first, second = (answers["two"][name] for answers in told)
    here = scenario(name, [0, 1, 2, 3])
    for key, a in here["anchor"].items():
        assert same_bits(first["anchor"][key], second["anchor"][key])
        torch.testing.assert_close(a, first["anchor"][key], rtol=1e-4, atol=1e-4)
    assert [report["checksum"] for report in first["reports"]] == [report["checksum"] for report in second["reports"]]
    for ours, theirs in zip(here["reports"], first["reports"], strict=True):
        assert ours["replicas"] == theirs["replicas"] == 4
        assert ours["restarted"] == theirs["restarted"]
        assert ours["numbers"] == pytest.approx(theirs["numbers"], rel=1e-3, abs=1e-4)


class Recorder(SingleProcess):
    """Two processes that hold the same, three replicas in the other; it writes down what the engine asks of it."""

    size = 2

    def __init__(self) -> None:
        self.calls: list[str] = []

    def exchange(self, numbers: Sequence[float]) -> list[list[float]]:
        """The other holds the same."""
        self.calls.append(f"exchange {len(numbers)}")
        return [list(numbers)] * 2

    def launch_sum(self, tensor: Tensor) -> Done:
        """A flat buffer, which stays as it is."""
        self.calls.append(f"sum {tensor.dim()}-D of {tensor.numel()}")
        return Done(bytes_sent=7)

    def broadcast(self, tensor: Tensor) -> None:
        """Process 0 holds ones."""
        self.calls.append("broadcast")
        tensor.fill_(1.0)

    def gather(self, value: Any) -> list[Any]:
        """Another process of the same kind."""
        self.calls.append("gather")
        return [value, [value[0], 3]]


def test_one_reduction_a_round():
    """The engine talks once at the start and reduces one flat buffer a round; replicas elsewhere count in the mean."""
    recorder = Recorder()
    model = nn.Linear(3, 2)
    engine = DiLoCo(model, OuterRule(1.0, 0.0), inner_steps=1, communicator=recorder)
    assert recorder.calls == ["gather", "broadcast"]
    assert all(torch.equal(p, torch.ones_like(p)) for p in model.parameters())
    recorder.calls.clear()
    for _ in range(3):
        with torch.no_grad():
            model.weight.sub_(4.0)
        report = engine.step()
        assert report is not None
        assert (report.replicas, report.bytes_sent) == (4, 7)
    assert recorder.calls == ["sum 1-D of 32", "exchange 4", "exchange 6"] * 3
    assert torch.equal(model.weight, torch.full((2, 3), 1.0 - 3 * 4.0 / 4))


# --- equal to itself, resumed -------------------------------------------------------------------------------------


@pytest.mark.parametrize("saved_after", [0, 1, 6, 13, 14, 20], ids=lambda s: f"{s // 4} rounds {s % 4} steps")
@pytest.mark.parametrize(
    ("outer", "policy"),
    [
        (OuterRule(0.3, 0.9, nesterov=True), "cycle:2,3"),
        (OuterRule(1.0, 0.9, form="ema"), "soft:3:0.4:0.2"),
        (OuterRule(0.3, 0.9), "test-against:0.9"),
        (blocks, None),
    ],
    ids=["cycle", "soft", "adaptive", "blocks"],
)
def test_resumed_equals_uninterrupted(
    outer: Any, policy: str | None, saved_after: int, register_policy: Callable[[str], Any]
):
    """Saved anywhere, in the middle of a round and of a cycle too, a run continues with the same bits and reports."""
    register_policy("test-against")(Against)
    whole = start(outer, restart=policy, inner_steps=4)
    reports = whole.go(range(32))

    first = start(outer, restart=policy, inner_steps=4)
    before = first.go(range(saved_after))
    resumed = start(outer, restart=policy, inner_steps=4, seed=50)  # begins from other weights altogether
    resumed.load(through_file(first.state()))
    after = resumed.go(range(saved_after, 32))

    assert [r.checksum for r in before + after] == [r.checksum for r in reports]
    for ours, theirs in zip(before + after, reports, strict=True):
        assert (ours.round, ours.inner_steps, ours.restarted) == (theirs.round, theirs.inner_steps, theirs.restarted)
        assert ours.groups == theirs.groups
    for (model, _), (other, _) in zip(resumed.pairs, whole.pairs, strict=True):
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            assert same_bits(p, q)
    assert sum(r.restarted for r in reports) >= 2


def test_loading_copies_the_anchor():
    """After a load the engine and the dictionary it came from do not see each other."""
    first = start(OuterRule(0.3, 0.9))
    first.go(range(6))
    state = first.engine.state_dict()
    frozen = copy.deepcopy(state["anchor"])
    second = start(OuterRule(0.3, 0.9))
    second.engine.load_state_dict(state)
    second.go(range(6))
    assert same_bits(state["anchor"], frozen)


def small(model: nn.Module | None = None, **options: Any) -> DiLoCo:
    """An engine on a small model."""
    usual: dict[str, Any] = {"inner_steps": 2, "restart": 3}
    return DiLoCo(model or nn.Linear(3, 2), OuterRule(0.1, 0.5), **(usual | options))


def in_parts(*cut: str) -> DiLoCo:
    """An engine on four parameters in three fragments."""
    model = nn.ParameterDict({name: nn.Parameter(torch.ones(1)) for name in "abcd"})
    return small(model, fragments=dict(zip("xyz", cut, strict=True)), stagger=False)


@pytest.mark.parametrize(
    ("engine", "state", "message"),
    [
        (small, dict, "lacks anchor, fragments, inner_step, launching, layout, round, schedule, syncs, under_way"),
        (small, lambda: small().state_dict() | {"anchor": torch.zeros(3)}, "has 3 elements instead of"),
        (small, lambda: small().state_dict() | {"inner_step": 5}, "after 5 inner steps of its round, but inner_steps"),
        (small, lambda: small(nn.Linear(4, 2)).state_dict(), "the state belongs to a model of other parameters"),
        (small, lambda: small(nn.Sequential(nn.Linear(3, 2))).state_dict(), "the state belongs to a model of other"),
        (
            lambda: in_parts("a", "b", "c|d"),
            lambda: in_parts("a", "b|c", "d").state_dict(),
            r"fragment y has param groups of \[2\] parameters in the state and of \[1\] here",
        ),
    ],
    ids=["empty", "damaged", "beyond the round", "shape", "names", "cut"],
)
def test_a_state_of_another_engine_is_refused(
    engine: Callable[[], DiLoCo], state: Callable[[], dict[str, Any]], message: str
):
    """A state that lacks parts, is damaged, or belongs to another model is refused by name; nothing has changed."""
    mine = engine()
    before, groups = mine.checksum(), [dict(f.outer.param_groups[0]) for f in mine.fragments]
    with pytest.raises(ValueError, match=rf"^DiLoCo\.load_state_dict: .*{message}"):
        mine.load_state_dict(state())
    assert mine.checksum() == before
    assert (mine.round, mine.inner_step) == (0, 0)
    assert [dict(f.outer.param_groups[0]) for f in mine.fragments] == groups


# --- reductions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inner_steps", [1, 5])
@pytest.mark.parametrize("form", ["sum", "ema"])
def test_one_replica_without_momentum_is_the_inner_optimizer(inner_steps: int, form: Any):
    """One replica, lr 1 and no momentum: 40 AdamW steps end where AdamW alone ends, to float32 rounding."""
    run = start(OuterRule(1.0, 0.0, form=form), [0], inner_steps=inner_steps)
    run.go(range(40))
    model, inner = build(0)
    for step in range(40):
        inner_step(model, inner, step, 0)
    for p, q in zip(run.pairs[0][0].parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-5)


def test_one_inner_sgd_step_is_data_parallel():
    """One inner SGD step a round, lr 1, no momentum: three replicas are SGD on the three batches together."""
    models = [nn.Linear(4, 3) for _ in range(3)]
    engine = DiLoCo(models, OuterRule(1.0, 0.0), inner_steps=1)
    inners = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    together = copy.deepcopy(models[0])
    optimizer = torch.optim.SGD(together.parameters(), lr=0.1)
    for step in range(20):
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randn(3, 8, 4, generator=generator), torch.randn(3, 8, 3, generator=generator)
        for replica, (model, inner) in enumerate(zip(models, inners, strict=True)):
            inner.zero_grad()
            nn.functional.mse_loss(model(x[replica]), y[replica]).backward()
            inner.step()
        engine.step()
        optimizer.zero_grad()
        nn.functional.mse_loss(together(x.flatten(0, 1)), y.flatten(0, 1)).backward()
        optimizer.step()
    torch.testing.assert_close(models[1].weight, together.weight, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("policy", ["1", "soft:1:0:0"])
def test_period_one_is_momentum_free(policy: str):
    """A restart every round equals an outer optimizer without momentum."""
    ours, theirs = start(OuterRule(0.3, 0.9), restart=policy), start(OuterRule(0.3, 0.0))
    ours.go(range(12))
    theirs.go(range(12))
    for a, b in zip(ours.engine.anchor.values(), theirs.engine.anchor.values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


# --- rounds and reports -------------------------------------------------------------------------------------------


def test_rounds_end_when_they_should():
    """`step` reports at every third inner step; the last, shorter round is synchronised and says that it is partial."""
    run = start(OuterRule(0.3, 0.9), inner_steps=3)
    answers = []
    for step in range(11):
        for replica, (model, inner) in enumerate(run.pairs):
            inner_step(model, inner, step, replica)
        answers.append(run.engine.step())
    assert [number for number, answer in enumerate(answers, start=1) if answer] == [3, 6, 9]
    full = [answer for answer in answers if answer]
    assert [(r.round, r.inner_steps, r.partial) for r in full] == [(1, 3, False), (2, 3, False), (3, 3, False)]
    assert run.engine.inner_step == 2
    last = run.engine.finish()
    assert last is not None
    assert (last.round, last.inner_steps, last.partial, last.replicas) == (4, 2, True, 2)
    assert last.pseudo_gradient_norm > 0
    assert run.engine.finish() is None
    for (model, _), other in zip(run.pairs, run.pairs[::-1], strict=True):
        for p, q, a in zip(model.parameters(), other[0].parameters(), run.engine.anchor.values(), strict=True):
            assert same_bits(p, q)
            assert same_bits(p, a)
    run.go(range(11, 14))
    assert (run.engine.round, run.engine.inner_step) == (5, 0)


def test_a_round_of_full_length_is_not_partial():
    """`finish` after a full number of rounds has nothing to do, and before any step as well."""
    run = start(OuterRule(0.3, 0.9), inner_steps=2)
    assert run.engine.finish() is None
    reports = run.go(range(4))
    assert run.engine.finish() is None
    assert not any(report.partial for report in reports)


@pytest.mark.parametrize("outer", [OuterRule(0.3, 0.9, nesterov=True), OuterRule(1.0, 0.9, form="ema"), blocks])
def test_report_is_what_is_measured(outer: Any):
    """Norms, cosine and gain, over all and per group, equal what is measured on the tensors from outside."""
    run = start(outer, [0, 1, 2], restart=None if callable(outer) else "cycle:2,1")
    engine = run.engine
    names = list(engine.anchor)
    members = (
        [names] if not callable(outer) else [[n for n in names if n.startswith(block)] for block in ("0", "2", "3")]
    )
    restarted = []
    for number in range(7):
        before = {name: a.clone() for name, a in engine.anchor.items()}
        held = engine.outer.state
        m = {name: held[a].get("momentum_buffer", torch.zeros_like(a)).clone() for name, a in engine.anchor.items()}
        thetas, report = [], None
        for step in range(3 * number, 3 * number + 3):
            for replica, (model, inner) in enumerate(run.pairs):
                inner_step(model, inner, step, replica)
                if step % 3 == 2:
                    thetas.append({name: p.detach().clone() for name, p in model.named_parameters()})
            report = engine.step()
        assert report is not None
        g = {name: sum(before[name].double() - theta[name] for theta in thetas) / 3 for name in names}
        update = {name: before[name] - engine.anchor[name] for name in names}

        def flat(tensors: dict[str, Any], some: list[str]) -> Tensor:
            return torch.cat([tensors[name].double().reshape(-1) for name in some])

        for seen, some in zip([report, *report.groups], [names, *members], strict=True):
            a, b, u = flat(g, some), flat(m, some), flat(update, some)
            assert seen.pseudo_gradient_norm == pytest.approx(float(a.norm()), rel=1e-5)
            assert seen.buffer_norm == pytest.approx(float(b.norm()), rel=1e-5)
            cosine = float(a @ b / (a.norm() * b.norm())) if b.count_nonzero() else 0.0
            assert seen.cosine == pytest.approx(cosine, rel=1e-4, abs=1e-5)
            assert seen.gain == pytest.approx(float(u @ a / (a @ a)), rel=1e-3, abs=1e-4)
        assert report.bytes_sent == 0
        assert set(report.seconds) == {"pseudo_gradient", "reduce", "outer", "restore", "checksum"}
        assert all(seconds >= 0 for seconds in report.seconds.values())
        restarted.append([group.restarted for group in report.groups])
        assert report.restarted == any(restarted[-1])
        flat_anchor = torch.zeros(engine.fragments[0].layout.numel)
        for view, a in zip(engine.fragments[0].layout.views(flat_anchor), engine.anchor.values(), strict=True):
            view.copy_(a)
        assert report.checksum == engine.checksum() == checksum(flat_anchor)
    due = [{2, 3, 5, 6}] if not callable(outer) else [{2, 4, 6}, {1, 4, 5}, {3, 6}]
    assert restarted == [[number in rounds for rounds in due] for number in range(1, 8)]


def test_first_round_gain_is_known():
    """In the first round the gain is lr (heavy ball, sum), lr (1+b) (Nesterov, sum), and 1-b times that in EMA form."""
    for rule, gain in (
        (OuterRule(0.3, 0.9), 0.3),
        (OuterRule(0.3, 0.9, nesterov=True), 0.3 * 1.9),
        (OuterRule(0.3, 0.9, form="ema"), 0.3 * 0.1),
        (OuterRule(0.3, 0.9, nesterov=True, form="ema"), 0.3 * 0.1 * 1.9),
    ):
        (report,) = start(rule).go(range(3))
        assert report.gain == pytest.approx(gain, rel=1e-12)
        assert report.buffer_norm == report.cosine == 0


def test_signals_reach_the_policy(register_policy: Callable[[str], Any]):
    """Values promised and given to `step` at a round's end reach the policy; without them it says what is missing."""

    @register_policy("test-loss")
    @dataclass(frozen=True, slots=True)
    class AboveLoss(RestartPolicy):
        bound: float
        needs: ClassVar[frozenset[str]] = frozenset({"loss"})

        def decide(self, state: State, signal: RoundSignal) -> tuple[State, Restart | None]:
            assert signal.extra is not None
            return state, Restart() if signal.extra["loss"] > self.bound else None

    with pytest.raises(ValueError, match=r"test-loss:2\.0 needs loss; .*promise them here with signals=\['loss'\]"):
        start(OuterRule(0.3, 0.9), restart=AboveLoss(2.0), inner_steps=2)
    engine = start(OuterRule(0.3, 0.9), restart=AboveLoss(2.0), inner_steps=2, signals=["loss"]).engine
    restarted = []
    for loss in (1.0, 3.0, 1.5):
        assert engine.step() is None
        report = engine.step({"loss": loss})
        assert report is not None
        restarted.append(report.restarted)
    assert restarted == [False, True, False]
    engine.step()
    report = engine.finish({"loss": 9.0})
    assert report is not None
    assert report.restarted
    engine.step()
    with pytest.raises(
        ValueError, match=r"a round ends, .*test-loss:2\.0 needs loss; .*step.*finish\(signals=\.\.\.\)"
    ):
        engine.step()


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("where", ["step", "finish"])
def test_a_round_without_its_signals_has_not_happened(where: str, delay: int):
    """Refused before anything moves, at a round's end and at the run's: with the signals it is the same run."""

    def flat(tensors: Iterable[Tensor]) -> Tensor:
        return torch.cat([tensor.detach().clone().flatten() for tensor in tensors])

    def train(*, forget: bool) -> tuple[Tensor, Tensor]:
        run = start(OuterRule(0.3, 0.9), restart="loss", inner_steps=3, delay=delay, signals=["loss_start", "loss_end"])
        engine, given = run.engine, {"loss_start": 1.0, "loss_end": 2.0}
        for step in range(1, 9):
            for replica, (model, inner) in zip(run.replicas, run.pairs, strict=True):
                inner_step(model, inner, step, replica)
            if forget and where == "step" and engine.reports_next:
                with pytest.raises(ValueError, match="needs loss_end, loss_start"):
                    engine.step()
                assert not engine.at_anchor
            engine.step(given)
        if forget and where == "finish":
            with pytest.raises(ValueError, match="needs loss_end, loss_start"):
                engine.finish()
            assert not engine.at_anchor
        assert engine.finish(given) is not None
        assert engine.at_anchor
        return flat(engine.anchor.values()), flat(run.pairs[0][0].parameters())

    (a, x), (b, y) = train(forget=True), train(forget=False)
    assert torch.equal(a, b)
    assert torch.equal(x, a)
    assert torch.equal(x, y)


def test_a_function_is_asked_for_the_signals_of_each_round():
    """It is called where a round ends, once, with the fragments whose round it is; `finish` asks for each by itself."""
    engine = start(
        OuterRule(0.3, 0.9), restart="loss", inner_steps=4, fragments=2, signals=["loss_start", "loss_end"]
    ).engine
    asked: list[tuple[int, list[str]]] = []

    def given(names: list[str]) -> dict[str, float]:
        asked.append((step, names))
        return {"loss_start": float(len(asked)), "loss_end": 0.5}

    told = []
    for step in range(1, 8):  # noqa: B007 - the function reads it
        report = engine.step(given)
        told += [report.signals["loss_start"]] if report else []
    step = 8
    engine.finish(given)
    assert asked == [(2, ["0"]), (4, ["1"]), (6, ["0"]), (8, ["0"]), (8, ["1"])]
    assert told == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(("policy", "lacks"), [("loss", "loss_end, loss_start"), ("probe:keep,drop", "probes")])
def test_a_state_whose_policy_lacks_something_is_refused(policy: str, lacks: str):
    """As at construction, before anything is changed; an engine that has it takes the policy over."""

    def build_one(restart: Any, **more: Any) -> DiLoCo:
        return start(OuterRule(0.3, 0.9), restart=restart, inner_steps=2, **more).engine

    supply: dict[str, Any] = {"signals": ["loss_start", "loss_end"], "probe": lambda *_: 1.0}
    state = build_one(policy, **supply).state_dict()
    poor = build_one(3)
    with pytest.raises(ValueError, match=rf"DiLoCo: restart policy {policy}.* needs {lacks}"):
        poor.load_state_dict(state)
    assert poor.outer.param_groups[0]["restart"] == "3"
    rich = build_one(3, **supply)
    rich.load_state_dict(state)
    assert rich.outer.param_groups[0]["restart"].startswith(policy)


# --- what takes part ----------------------------------------------------------------------------------------------


def test_replicas_start_from_the_first():
    """All replicas begin with the bits of the first, whatever they were built with."""
    run = start(OuterRule(0.3, 0.9), [0, 1, 2])
    first = build(0)[0]
    for model, _ in run.pairs:
        for p, q in zip(model.parameters(), first.parameters(), strict=True):
            assert same_bits(p, q)


@pytest.mark.dist
@pytest.mark.slow
def test_processes_start_from_process_zero(told: list[dict[str, Any]]):
    """Replicas of process 1, built from another seed, end where replicas that began from process 0's end."""
    first, second = (answers["one"]["heavy ball"] for answers in told)
    for name, p in first["models"][0].items():
        assert same_bits(p, second["models"][0][name])
        assert not same_bits(p, dict(build(0)[0].named_parameters())[name].detach())


def test_one_module_or_a_list():
    """A single module is a list of one."""
    model, _ = build(0)
    engine = DiLoCo(model, OuterRule(0.3, 0.9), inner_steps=2)
    assert engine.replicas == [model]
    assert engine.replica_count == 1


def test_frozen_parameters_and_buffers_stay():
    """Parameters without gradient and module buffers are neither averaged nor overwritten."""
    models = [nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)) for _ in range(2)]
    layers: list[list[Any]] = [list(model) for model in models]
    for number, (first, norm, _) in enumerate(layers):
        first.requires_grad_(False)
        nn.init.constant_(first.weight, float(number))
        norm.running_mean.fill_(float(number))
    engine = DiLoCo(models, OuterRule(0.5, 0.9), inner_steps=1)
    assert list(engine.anchor) == ["1.weight", "1.bias", "2.weight", "2.bias"]
    for number, (_, _, last) in enumerate(layers):
        with torch.no_grad():
            last.weight.add_(float(number))
    engine.step()
    for number, (first, norm, _) in enumerate(layers):
        assert torch.equal(first.weight, torch.full((4, 3), float(number)))
        assert torch.equal(norm.running_mean, torch.full((4,), float(number)))
    assert same_bits(layers[0][2].weight, layers[1][2].weight)


def test_tied_parameters_are_one():
    """A parameter under two names takes part once, and stays tied."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(5, 3)
            self.head = nn.Linear(3, 5, bias=False)
            self.head.weight = self.embedding.weight

    models = [Tied(), Tied()]
    engine = DiLoCo(models, OuterRule(1.0, 0.0), inner_steps=1)
    begin = models[0].head.weight.detach().clone()
    assert list(engine.anchor) == ["embedding.weight"]
    with torch.no_grad():
        models[0].head.weight.add_(1.0)
        models[1].embedding.weight.add_(3.0)
    engine.step()
    for model in models:
        assert model.head.weight is model.embedding.weight
        torch.testing.assert_close(model.head.weight.detach(), begin + 2.0)


def test_bfloat16_models_keep_a_float32_anchor():
    """The anchor of bfloat16 replicas is float32; progress counts from its rounding, where the replicas began."""
    models = [nn.Linear(16, 16, dtype=torch.bfloat16) for _ in range(2)]
    engine = DiLoCo(models, OuterRule(0.7, 0.9, nesterov=True), inner_steps=1)
    a = models[0].weight.detach().float()
    m = torch.zeros_like(a)
    generator = torch.Generator().manual_seed(0)
    for _ in range(6):
        with torch.no_grad():
            for model in models:
                model.weight.add_(0.01 * torch.randn(16, 16, generator=generator).bfloat16())
        g = sum(a.bfloat16().float() - model.weight.detach().float() for model in models) / 2
        engine.step()
        m = 0.9 * m + g
        a = a - 0.7 * (g + 0.9 * m)
        anchor = engine.anchor["weight"]
        assert anchor.dtype == torch.float32
        torch.testing.assert_close(anchor, a, rtol=1e-5, atol=1e-6)
        a = anchor.clone()
        for model in models:
            assert model.weight.dtype == torch.bfloat16
            assert same_bits(model.weight, anchor.bfloat16())
    assert not torch.equal(engine.anchor["weight"], models[0].weight.detach().float())


def test_bfloat16_replicas_that_stand_still_leave_the_anchor():
    """What rounding to bfloat16 loses is no progress: without inner steps the anchor stays, momentum or not."""
    model = nn.Linear(16, 16, dtype=torch.bfloat16)
    engine = DiLoCo(model, OuterRule(0.7, 0.9, nesterov=True), inner_steps=1)
    with torch.no_grad():
        engine.anchor["weight"].add_(1e-4)  # now no bfloat16 number
        model.weight.copy_(engine.anchor["weight"])
    before = engine.anchor["weight"].clone()
    for _ in range(5):
        engine.step()
    assert torch.equal(engine.anchor["weight"], before)


def test_float64_models_have_a_float64_anchor():
    """Float64 models keep all their digits."""
    model = nn.Linear(2, 2, dtype=torch.float64)
    engine = DiLoCo(model, OuterRule(1.0, 0.0), inner_steps=1)
    with torch.no_grad():
        model.weight.fill_(1 + 1e-12)
    engine.step()
    assert engine.anchor["weight"].dtype == torch.float64
    torch.testing.assert_close(model.weight.detach(), torch.full_like(model.weight, 1 + 1e-12), rtol=0, atol=1e-15)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_divergence_is_data(poison: float):
    """A replica with NaN or infinity ends up in the report and the anchor; nothing is raised."""
    run = start(OuterRule(0.3, 0.9), restart=2)
    with torch.no_grad():
        next(run.pairs[1][0].parameters())[0, 0] = poison
    reports = run.go(range(9))
    assert [report.round for report in reports] == [1, 2, 3]
    for report in reports:
        assert not math.isfinite(report.pseudo_gradient_norm)
        assert not math.isfinite(report.gain)
        assert len(report.checksum) == 16
    assert not all(a.isfinite().all() for a in run.engine.anchor.values())
    assert [report.restarted for report in reports] == [False, True, False]


def test_no_movement_is_no_update():
    """Replicas that have not moved leave the anchor as it is; the gain is then not a number."""
    model, _ = build(0)
    engine = DiLoCo(model, OuterRule(0.3, 0.9), inner_steps=1)
    before = engine.checksum()
    report = engine.step()
    assert report is not None
    assert report.checksum == before
    assert (report.pseudo_gradient_norm, report.cosine) == (0, 0)
    assert math.isnan(report.gain)


# --- mistakes -----------------------------------------------------------------------------------------------------


def shared() -> list[nn.Module]:
    """Two modules around the same parameters."""
    inside = nn.Linear(2, 2)
    return [nn.Sequential(inside), nn.Sequential(inside)]


def frozen() -> nn.Module:
    return nn.Linear(2, 2).requires_grad_(False)


def twice() -> list[nn.Module]:
    return [nn.Linear(2, 2)] * 2


def complex_module() -> nn.Module:
    return nn.ParameterDict({"z": torch.zeros(2, dtype=torch.complex64)})


RULE = OuterRule(0.3, 0.9)


@pytest.mark.parametrize(
    ("replicas", "outer", "options", "words"),
    [
        (frozen, RULE, {}, ["no parameter that requires a gradient"]),
        (list, RULE, {}, ["replicas is empty", "at least one"]),
        (twice, RULE, {}, ["listed twice", "copy.deepcopy()"]),
        (shared, RULE, {}, ["share parameters", "copy.deepcopy()"]),
        (complex_module, RULE, {}, ["'z'", "complex64", "floating-point"]),
        (lambda: [nn.Linear(2, 2), nn.Linear(2, 3)], RULE, {}, ["replica 1", "other trainable parameters"]),
        (lambda: [nn.Linear(2, 2), frozen()], RULE, {}, ["replica 1", "other trainable parameters"]),
        (lambda: [nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))], RULE, {}, ["replica 1", "build them alike"]),
        (lambda: nn.Linear(2, 2), RULE, {"inner_steps": 0}, ["inner_steps is 0", ">= 1"]),
        (lambda: nn.Linear(2, 2), RULE, {"inner_steps": -1}, ["inner_steps is -1", ">= 1"]),
        (lambda: nn.Linear(2, 2), RULE, {"inner_steps": 2.0}, ["inner_steps is 2.0", "whole number"]),
        (lambda: nn.Linear(2, 2), RULE, {"inner_steps": True}, ["inner_steps is True", "whole number"]),
        (lambda: nn.Linear(2, 2), RULE, {"restart": "sometimes"}, ["'sometimes'", "never"]),
        (lambda: nn.Linear(2, 2), RULE, {"restart": 0}, ["period is 0", ">= 1"]),
        (lambda: nn.Linear(2, 2), blocks, {"restart": 3}, ["restart goes with an OuterRule", "outer builds"]),
        (lambda: nn.Linear(2, 2), OuterSGD([torch.zeros(1)], 0.1), {}, ["outer is OuterSGD", "OuterRule", "lambda"]),
        (lambda: nn.Linear(2, 2), 0.7, {}, ["outer is float", "OuterRule", "lambda"]),
        (
            lambda: nn.Linear(2, 2),
            lambda params: OuterSGD([p for name, p in params if name == "weight"], 0.1),
            {},
            ["does not hold bias", "give it all"],
        ),
    ],
)
def test_mistakes_say_what_to_do(replicas: Callable[[], Any], outer: Any, options: dict[str, Any], words: list[str]):
    """Each impossible construction raises a ValueError that names the thing, its value and the remedy."""
    with pytest.raises(ValueError, match=r"DiLoCo|restart|Periodic") as caught:
        DiLoCo(replicas(), outer, **({"inner_steps": 2} | options))  # type: ignore[arg-type]
    assert all(word in str(caught.value) for word in words), caught.value


def test_sharded_parameters_are_refused(tmp_path: Path):
    """A DTensor parameter is refused by name: this engine takes whole parameters."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        module = nn.ParameterDict({"w": nn.Parameter(distribute_tensor(torch.zeros(4, 2), mesh, [Shard(0)]))})
        with pytest.raises(ValueError, match="parameter 'w' is sharded"):
            DiLoCo(module, RULE, inner_steps=2, communicator=SingleProcess())
    finally:
        dist.destroy_process_group()


def test_restart_may_be_given_in_every_form():
    """A policy, its text and a period are the same restart, and None is never."""
    texts = {}
    for given in (Periodic(3), "3", 3, None, Never()):
        engine = DiLoCo(nn.Linear(2, 2), RULE, inner_steps=2, restart=given)
        texts[str(given)] = engine.outer.param_groups[0]["restart"]
    assert texts == {"3": "3", "None": "never", "never": "never"}
    assert parse(texts["3"]) == Periodic(3)


if __name__ == "__main__":
    worker(int(sys.argv[1]), Path(sys.argv[2]))


@pytest.mark.parametrize("harm", ["double", "assign", "replace"])
def test_replaced_parameters_are_noticed(harm: str):
    """A model that was cast or given other parameters after the engine was built is refused, not trained in vain."""
    model = nn.Sequential(nn.Linear(3, 2))
    engine = DiLoCo(model, OuterRule(0.7, 0.9), inner_steps=1)
    if harm == "double":
        model.double()
    elif harm == "assign":
        model.load_state_dict({key: value.clone() for key, value in model.state_dict().items()}, assign=True)
    else:
        model[0].bias = nn.Parameter(torch.zeros(2))
    with pytest.raises(
        ValueError, match=r"parameter '0\..*' was replaced, moved or cast after .* build the engine last"
    ):
        engine.step()


def test_parameters_not_modules():
    """The parameters in place of the module are refused with the remedy."""
    with pytest.raises(ValueError, match="replicas holds a Parameter; pass the module itself"):
        DiLoCo(nn.Linear(2, 2).parameters(), OuterRule(0.7, 0.9), inner_steps=1)  # type: ignore[arg-type]


def test_loading_a_rounds_end_sets_the_replicas():
    """After loading a state of a round's end the replicas are the anchor, whatever they were."""
    donor = DiLoCo(nn.Linear(3, 2), OuterRule(0.7, 0.9), inner_steps=2)
    model = nn.Linear(3, 2)
    engine = DiLoCo(model, OuterRule(0.7, 0.9), inner_steps=2)
    engine.load_state_dict(donor.state_dict())
    assert torch.equal(model.weight.detach(), donor.anchor["weight"])


@pytest.mark.parametrize(("delay", "reached"), [(0, -8), (1, -6)], ids=["at-once", "delayed"])
@pytest.mark.parametrize("wire", ["float32", "int8"])
def test_an_exception_inside_a_sync_loses_nothing(delay: int, reached: float, wire: str):
    """A probe that raises, or Ctrl-C there, undoes the sync: the next one takes its progress, once."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    asked = itertools.count()

    def probe(*_: Any) -> float:
        if next(asked) == 0:
            raise KeyboardInterrupt
        return 0.0

    rule = OuterRule(1.0, 0.0)  # averaging: the anchor is what one replica has reached
    engine = DiLoCo(model, rule, inner_steps=2, delay=delay, wire=wire, restart="probe:keep,average", probe=probe)
    interrupted = 0
    for _ in range(8):
        with torch.no_grad():
            model.weight -= 1.0
        try:
            engine.step()
        except KeyboardInterrupt:
            interrupted += 1
            assert not engine.under_way
            assert len(engine.state_dict()["under_way"]) == 0
    engine.finish()
    assert interrupted == 1
    assert model.weight.item() == pytest.approx(reached, rel=1e-2)  # a delay gives up a step of each sync, as always
    assert engine.at_anchor


@pytest.mark.parametrize("signals", [0.5, torch.tensor(0.5), [1.0]])
def test_signals_without_names_are_refused_at_once(signals: Any):
    """A bare number is refused in the first step, not where a round ends."""
    engine = DiLoCo(nn.Linear(1, 1), OuterRule(0.7, 0.9), inner_steps=5)
    with pytest.raises(ValueError, match=r"DiLoCo: signals are .*give names and values, such as \{'loss': 2.3\}"):
        engine.step(signals)
    with pytest.raises(ValueError, match="DiLoCo: signals are"):
        engine.finish(signals)
    assert engine.inner_step == 0
    with pytest.raises(ValueError, match="mixing is 'a'"):
        DiLoCo(nn.Linear(1, 1), OuterRule(0.7, 0.9), inner_steps=5, mixing="a")  # type: ignore[arg-type]
