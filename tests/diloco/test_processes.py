"""The engine in four processes: in pairs, all together, and as two replicas of two FSDP2 shards each.

Run as a program, this file is one of the four processes of its own tests.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from forked import bring, in_processes
from replicas import NAMES, Run, network, of_one_process, same_bits, start, through_file, unlike
from rounds import blocks
from twophase import restart as restart_module
from twophase.diloco.agreement import Disagreement
from twophase.diloco.comm import ProcessGroup
from twophase.diloco.communicator import Communicator
from twophase.diloco.engine import DiLoCo, RoundReport
from twophase.optim.outer import OuterSGD
from twophase.restart import Restart, RestartPolicy, RoundSignal, State
from twophase.rule import OuterRule

pytestmark = pytest.mark.dist

RULE = OuterRule(0.3, 0.9, nesterov=True)
BLOCKS = {"first": r"^0\.", "norm": r"^2\.", "last": r"^3\."}
STEPS, SHARD_STEPS = 23, 11  # nearly four rounds


@dataclass(frozen=True, slots=True)
class Below(RestartPolicy):
    """Restart when g is shorter than `limit`."""

    limit: float
    needs: ClassVar[frozenset[str]] = frozenset({"pseudo_gradient_norm"})

    def decide(self, state: State, signal: RoundSignal) -> tuple[State, Restart | None]:
        """Compare the length."""
        assert signal.pseudo_gradient_norm is not None
        return state, Restart() if signal.pseudo_gradient_norm < self.limit else None


# --- what the processes do ----------------------------------------------------------------------------------------

SCENARIOS: dict[str, dict[str, Any]] = {
    **{wire: {"fragments": 3, "delay": 2, "mixing": 0.5, "wire": wire} for wire in ("float32", "bfloat16", "int8")},
    "int8, one room": {"fragments": BLOCKS, "delay": 1, "wire": "int8"},
    "int8, at once": {"fragments": 3, "wire": "int8", "stagger": False},
    "two under way": {"fragments": 3, "delay": 5, "mixing": 0.25, "wire": "int8"},
    "heavy ball": {"outer": OuterRule(0.3, 0.9), "restart": "never"},
    "soft": {"outer": OuterRule(1.0, 0.9, nesterov=True, form="ema"), "restart": "soft:2:0.3:0.1"},
    "blocks": {"outer": blocks, "restart": None},
    "adamw": {"outer": "adamw", "restart": 2, "fragments": 3, "delay": 2, "filter": "clip:2"},
    "muon": {"outer": "muon", "restart": 2},
    "torch": {"outer": lambda named: torch.optim.NAdam([p for _, p in named], lr=0.05), "restart": 2},
    "orthogonal": {"outer": "averaging", "restart": None, "filter": "orthogonal"},
}

TOGETHER = ("float32", "two under way")  # of these, four processes
RESUMED = ("float32", "int8, one room", "two under way", "adamw")


def facts(report: RoundReport) -> dict[str, Any]:
    """What all processes must say alike, whether they are one or several."""
    names = ("round", "inner_steps", "partial", "complete", "replicas", "restarted", "checksum", "pseudo_gradient_norm")
    names = (*names, "buffer_norm", "cosine", "gain")
    values = {name: getattr(report, name) for name in names}
    return values | {"fragments": [(fragment.name, fragment.round, fragment.checksum) for fragment in report.fragments]}


def scenario(name: str, replicas: Sequence[int], communicator: Communicator | None, *, resumed: bool = False):
    """Nearly four rounds and finish(): reports and all tensors; resumed: set down and taken up after each step."""
    options = {"outer": RULE, "restart": 3, "communicator": communicator} | SCENARIOS[name]
    run = start(replicas=replicas, **options)
    reports = []
    for step in range(STEPS):
        reports += run.go([step])
        if resumed:
            wire, state = run.engine.wire_state_dict(), run.state()  # in the less lucky order
            state = through_file(state | {"wire": wire})
            run = start(replicas=replicas, seed=40, **options)
            run.load(state)
    last = run.engine.finish()
    assert last is not None
    return {"reports": [facts(report) for report in [*reports, last]], "tensors": run.tensors()}


def tampered(rank: int, harm: str, delay: int) -> tuple[str, int]:
    """Fragment 1 of 3 is harmed in process 2 after its first sync: the message, and the step at which it came."""
    run = start(RULE, [rank], fragments=3, delay=delay)
    run.go(range(6))
    fragment = run.engine.fragments[1]
    assert fragment.round == 1
    if rank == 2:
        with torch.no_grad():
            _, a = fragment.named[1]
            if harm == "anchor":
                a[0] = torch.nextafter(a[0], torch.tensor(9.0))
            elif harm == "momentum buffer":
                fragment.outer.state[a]["momentum_buffer"][0].mul_(1.001)
            else:
                fragment.outer.param_groups[0]["rounds_since_restart"] += 1
    for step in range(6, 18):
        try:
            run.step(step)
        except Disagreement as error:
            return str(error), step
    return "nothing", 18


def unlike_pairs(rank: int) -> list[Callable[[], Any]]:
    """Engines that the two processes of a pair build with a difference."""

    def built(module: nn.Module, rule: OuterRule = RULE, **options: Any) -> Callable[[], Any]:
        usual: dict[str, Any] = {"inner_steps": 6}
        return lambda: DiLoCo(module, rule, **(usual | options))

    def ordered(names: Sequence[str]) -> nn.Module:
        module = nn.Module()
        for name in names:
            module.register_parameter(name, nn.Parameter(torch.zeros(3)))
        return module

    def adapted(base: torch.Tensor) -> nn.Module:
        module = nn.Linear(3, 2)
        module.base = nn.Parameter(base, requires_grad=False)
        return module

    return [
        built(adapted(torch.zeros(3 + rank))),
        built(adapted(torch.zeros(3) + rank)),
        built(network(0), inner_steps=6 + rank),
        built(network(0), fragments=2 + rank),
        built(network(0), fragments=({"a": r"^0", "b": "."}, {"a": r"^[02]", "b": "."})[rank]),
        built(network(0), delay=rank),
        built(network(0), mixing=0.5 * rank),
        built(network(0), stagger=not rank),
        built(network(0), wire=("float32", "int8")[rank]),
        built(nn.Linear(3, 2 + rank)),
        built(ordered(("xy", "yx")[rank])),
        built(network(0, (torch.float32, torch.bfloat16)[rank])),
        built(network(0), fragments=2, restart={"0": 3, "1": 3 + rank}),
        built(network(0), alike={"seeds": 3, "texts": f"corpus {rank}"}),
        built(network(0), alike=({}, {"seeds": 3})[rank]),
        built(network(0), alike=({"seeds": 3}, {})[rank]),
    ]


WHATS = ("frozen parameters", "values of frozen parameters", "inner_steps", "numbers of fragments", "fragments")
WHATS = (*WHATS, *3 * ("schedules",), "wires", "parameters", "orders of parameters", "types", "outer settings")
WHATS = (*WHATS, "texts", "seeds", "seeds")


def refusal(attempt: Callable[[], Any]) -> str:
    """What is said of an attempt."""
    try:
        attempt()
    except (ValueError, Disagreement) as error:
        return str(error)
    return "nothing"


def refusals(rank: int, pair: Communicator) -> list[str]:
    """What the pair is told."""
    with forced(pair):
        return [refusal(build) for build in unlike_pairs(rank)]


@contextmanager
def forced(communicator: Communicator) -> Iterator[None]:
    """The default communicator is this one."""
    from twophase.diloco import comm

    usual, comm.default_communicator = comm.default_communicator, lambda: communicator
    try:
        yield
    finally:
        comm.default_communicator = usual


def at_the_threshold(rank: int, pair: Communicator) -> list[list[bool]]:
    """Restarts of a policy whose limit is the very norm of a round, where process 1 measures it a bit shorter."""
    restarts: list[list[bool]] = []
    limit = 0.0
    measure = OuterSGD.dots
    for harmed in (False, True):
        if harmed and rank == 1:
            OuterSGD.dots = lambda self: [tuple(x * (1 - 1e-7) for x in dots) for dots in measure(self)]  # type: ignore[method-assign]
        try:
            run = start(OuterRule(0.3, 0.9), [rank], restart=Below(limit), communicator=pair)
            reports = run.go(range(30))
        finally:
            OuterSGD.dots = measure  # type: ignore[method-assign]
        norms = sorted(report.pseudo_gradient_norm for report in reports)
        limit = norms[0]
        restarts.append([report.restarted for report in reports])
    return restarts


def signals(rank: int, pair: Communicator) -> list[tuple[dict[str, float], int]]:
    """One replica here and three there: what the reports say."""
    run = start(RULE, [[0], [1, 2, 3]][rank], inner_steps=1, communicator=pair)
    reports = [run.engine.step({"loss": float(rank), "step": 5.0}) for _ in range(2)]
    return [(dict(report.signals), report.replicas) for report in reports if report is not None]


def unlike_signals(rank: int, pair: Communicator) -> str:
    """Each gives a signal of its own: what it is told."""
    run = start(RULE, [rank], inner_steps=1, communicator=pair)
    return refusal(lambda: run.engine.step({["loss", "norm"][rank]: 1.0}))


# --- shards -------------------------------------------------------------------------------------------------------

SHARDED: dict[str, dict[str, Any]] = {
    "whole": {"restart": 2},
    "patterns": {"fragments": BLOCKS, "restart": {"first": 2, "norm": None, "last": 1}, "delay": 1, "mixing": 0.5},
    "sgd": {"fragments": 3},
    "int8": {"fragments": 3, "delay": 2, "wire": "int8"},
    "adamw": {"restart": 2},
    "clip": {"restart": 2, "fragments": 2, "filter": "clip:0.1"},
}


@dataclass
class Training(Run):
    """A run that trains by gradients, as a sharded model has to.

    It evaluates before every call of the engine, so that FSDP2 holds whole parameters when the engine comes.
    """

    inners: list[torch.optim.Optimizer]

    def step(self, step: int) -> RoundReport | None:
        """One inner step of every replica, a look at it and at the anchor, and the engine's."""
        for replica, model, inner in zip(self.replicas, self.models, self.inners, strict=True):
            generator = torch.Generator().manual_seed(1000 * replica + step)
            x, y = torch.randn(8, 4, generator=generator), torch.randn(8, 3, generator=generator)
            inner.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            inner.step()
            self.look(model)
        for number in range(len(self.models)):
            with self.engine.anchored(number) as model:
                self.look(model)
        for model in self.models:
            self.look(model)
        return self.engine.step()

    @torch.no_grad()
    def look(self, model: nn.Module) -> None:
        """Evaluate."""
        model(torch.ones(2, 4))


def train(name: str, replicas: Sequence[int], communicator: Communicator | None, shard: Callable[[nn.Module], Any]):
    """A run of a sharded scenario, ready to go."""
    models = [network(replica) for replica in replicas]
    for model in models:
        shard(model)
    inners: list[torch.optim.Optimizer] = [
        torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9) for model in models
    ]
    for model in models:  # from here on the model names whole parameters, until FSDP2 gives them up
        with torch.no_grad():
            model(torch.ones(2, 4))
    values: dict[str, Any] = {
        "sgd": lambda params: torch.optim.SGD(params, lr=0.3, momentum=0.9),
        "adamw": lambda named: torch.optim.AdamW(named, lr=0.05, eps=1e-3),
    }
    engine = DiLoCo(models, values.get(name, RULE), inner_steps=3, communicator=communicator, **SHARDED[name])
    return Training(engine, models, replicas, inners)


def trained(name: str, replicas: Sequence[int], communicator: Communicator | None, shard: Callable[[nn.Module], Any]):
    """Reports, anchor and models of a sharded scenario."""
    run = train(name, replicas, communicator, shard)
    reports = run.go(range(SHARD_STEPS))
    for model in run.models:
        run.look(model)
    last = run.engine.finish()
    assert last is not None
    return {
        "reports": [facts(report) for report in [*reports, last]],
        "anchor": {key: a.clone() for key, a in run.engine.anchor.items()},
        "models": [{key: whole(p) for key, p in model.named_parameters()} for model in run.models],
    }


def whole(p: Tensor) -> Tensor:
    """All of a parameter."""
    return (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()  # type: ignore[operator]


def sharded(rank: int, mesh: Any) -> dict[str, Any]:
    """Two replicas of two shards each."""
    from torch.distributed.fsdp import fully_shard

    def shard(model: nn.Module) -> None:
        fully_shard(model[0], mesh=mesh["shard"])  # type: ignore[index]
        fully_shard(model, mesh=mesh["shard"])

    group = ProcessGroup.of_mesh(mesh)
    replica = [rank // 2]
    results: dict[str, Any] = {name: trained(name, replica, group, shard) for name in SHARDED}
    results["refused"] = refusal(lambda: train("whole", replica, None, shard))
    results["not shards"] = not_shards(mesh, group)
    results["cut matrices"] = cut_matrices(group, shard)
    run = train("patterns", replica, group, shard)
    run.go(range(4))
    assert run.engine.under_way
    results["unfrozen"] = [finding for finding in run.engine.check() if "unfrozen" in finding]
    state = through_file(run.engine.state_dict())
    models, inners = [
        copy.deepcopy([module.state_dict() for module in some])
        for some in (run.models, run.inners)  # type: ignore[attr-defined]
    ]
    run = train("patterns", replica, group, shard)
    run.engine.load_state_dict(state)
    for model, inner, weights, moments in zip(run.models, run.inners, models, inners, strict=True):
        model.load_state_dict(weights)
        inner.load_state_dict(moments)
    results["resumed"] = [facts(report) for report in run.go(range(4, SHARD_STEPS))]
    results["signals"] = dict(run.engine.finish({"loss": float(rank)}).signals)  # type: ignore[union-attr]
    run = train("patterns", replica, group, shard)
    run.go(range(3))
    with torch.no_grad():
        if rank == 3:
            run.engine.anchor["3.weight"].add_(1.0)
    results["tampered"] = refusal(lambda: run.go(range(3, 9)))
    return results


def cut_matrices(group: Communicator, shard: Callable[[nn.Module], Any]) -> list[str]:
    """What is said of outer optimizers that would orthogonalize shards."""
    model = network(0)
    shard(model)
    options: list[Any] = [{"outer": "muon"}, {"outer": RULE, "filter": "orthogonal"}]
    return [refusal(lambda each=each: DiLoCo(model, inner_steps=6, communicator=group, **each)) for each in options]


def not_shards(mesh: Any, group: Communicator) -> list[str]:
    """What is said of models of which a process holds all, or nothing."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, distribute_tensor

    in_part, short = network(0), nn.Linear(3, 1)
    fully_shard(in_part[0], mesh=mesh["shard"])  # type: ignore[index]
    fully_shard(short, mesh=mesh["shard"])
    copied = nn.Parameter(distribute_tensor(torch.zeros(4, 2), mesh["shard"], [Replicate()]))
    models = (network(0), in_part, nn.ParameterDict({"w": copied}), short)
    return [refusal(lambda model=model: DiLoCo(model, RULE, inner_steps=2, communicator=group)) for model in models]


def worker(rank: int) -> dict[str, Any]:
    """One of the four processes."""
    restart_module.register("test-below")(Below)
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    pair: Any = dist.new_group([0, 1])
    results: dict[str, Any] = {"four": {name: scenario(name, [rank], None) for name in TOGETHER}}
    results["tampered"] = {
        (harm, delay): tampered(rank, harm, delay)
        for harm in ("anchor", "momentum buffer", "counters")
        for delay in (0, 1)
    }
    results["sharded"] = sharded(rank, mesh)
    if rank < 2:
        two = ProcessGroup(pair)
        results["two"] = {name: scenario(name, [rank], two) for name in SCENARIOS}
        results["two each"] = {"float32": scenario("float32", [2 * rank, 2 * rank + 1], two)}
        results["resumed"] = {name: scenario(name, [rank], two, resumed=True) for name in RESUMED}
        results["refused"] = refusals(rank, two)
        results["threshold"] = at_the_threshold(rank, two)
        results["signals"] = signals(rank, two)
        results["unlike signals"] = unlike_signals(rank, two)
    return results


@pytest.fixture(scope="session")
def brought(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of the four brings home."""
    return in_processes(__file__, tmp_path_factory.mktemp("processes"), 4)


# --- one replica a process ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCENARIOS)
def test_two_processes_are_one(brought: list[dict[str, Any]], name: str):
    """Two replicas in this process and one in each of two: the same bits everywhere, and the same reports."""
    expected = scenario(name, [0, 1], None)
    for rank, actual in enumerate(answers["two"][name] for answers in brought[:2]):
        assert str(actual["reports"]) == str(expected["reports"])  # a gain may be NaN
        assert unlike(of_one_process(expected["tensors"], rank), actual["tensors"]) == []
    assert any(report["restarted"] for report in expected["reports"]) == (name not in ("heavy ball", "orthogonal"))


@pytest.mark.parametrize("name", RESUMED)
def test_two_processes_resume_after_every_step(brought: list[dict[str, Any]], name: str):
    """Two processes that are set down and taken up after every step end with the bits and reports of two others."""
    for answers in brought[:2]:
        assert str(answers["resumed"][name]["reports"]) == str(answers["two"][name]["reports"])
        assert unlike(answers["resumed"][name]["tensors"], answers["two"][name]["tensors"]) == []


@pytest.mark.parametrize(("where", "name"), [*(("four", name) for name in TOGETHER), ("two each", "float32")])
def test_four_replicas_agree(brought: list[dict[str, Any]], where: str, name: str):
    """In four processes or two they hold the same bits at every round's end, and those in one process nearly so."""
    first, *others = (answers[where][name] for answers in brought[: 4 if where == "four" else 2])
    here = scenario(name, [0, 1, 2, 3], None)
    for other in others:
        assert other["reports"] == first["reports"]
        assert unlike(other["tensors"], first["tensors"]) == []
    tolerance = 1e-5 if SCENARIOS[name]["wire"] == "float32" else 0.1  # rounding, or the steps of its scales
    for key, value in first["tensors"].items():
        torch.testing.assert_close(here["tensors"][key], value, rtol=tolerance, atol=tolerance)
    for actual, expected in zip(here["reports"], first["reports"], strict=True):
        assert [part[:2] for part in actual["fragments"]] == [part[:2] for part in expected["fragments"]]
        assert actual["pseudo_gradient_norm"] == pytest.approx(expected["pseudo_gradient_norm"], rel=tolerance)
        assert actual["replicas"] == expected["replicas"] == 4


# --- agreement ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("harm", ["anchor", "momentum buffer", "counters"])
def test_a_harmed_process_is_caught_by_all(brought: list[dict[str, Any]], harm: str, delay: int):
    """One process's anchor, buffer or counters are touched: at that fragment's next round all say what differs."""
    shows = "anchor" if harm == "momentum buffer" else harm  # the harmed buffer has moved the anchor by then
    for answers in brought:
        message, step = answers["tampered"][harm, delay]
        assert step == 6 + 4 - 1 + delay
        assert f"fragment '1' differs in its {shows} between process 0 and process 2" in message
        assert message.startswith("DiLoCo: after round 2 ")
        assert "resume from the newest checkpoint" in message


def test_unlike_processes_are_refused_by_both(brought: list[dict[str, Any]]):
    """Every difference in how two processes were started is named on both, also what only one of them has."""
    for rank, answers in enumerate(brought[:2]):
        assert len(answers["refused"]) == len(WHATS)
        for what, message in zip(WHATS, answers["refused"], strict=True):
            assert re.fullmatch(
                rf"DiLoCo: {what} differ between process {rank} \(.*\) and process {1 - rank} \(.*\); "
                "start all processes with the same program and options",
                message,
            )


def test_machines_that_measure_unlike_decide_alike(brought: list[dict[str, Any]]):
    """A norm at a policy's threshold that is 1e-7 shorter on process 1 restarts none: all decide by process 0's."""
    first, second = (answers["threshold"] for answers in brought[:2])
    assert first == second
    assert not any(first[1])  # process 1 by itself would have restarted


def test_unlike_signals_are_refused_by_both(brought: list[dict[str, Any]]):
    """They would be averaged with one another, or end the processes without a reason."""
    for answers in brought[:2]:
        assert "process 0 (loss) and process 1 (norm)" in answers["unlike signals"]


def test_signals_are_means_over_the_replicas(brought: list[dict[str, Any]]):
    """Process 0 with one replica and process 1 with three, which say 0 and 1: 0.75, in every report of both."""
    for answers in brought[:2]:
        assert answers["signals"] == [({"loss": 0.75, "step": 5.0}, 4)] * 2


# --- shards -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHARDED)
def test_shards_equal_the_whole(brought: list[dict[str, Any]], name: str):
    """Two replicas of two shards each are nearly two unsharded ones; shards of both have the same bits and reports.

    An evaluation has unsharded the model before every call of the engine.
    """
    alone = trained(name, [0, 1], None, lambda _: None)
    shards = [answers["sharded"][name] for answers in brought]
    # To rounding, or to the steps of int8's scales.
    tolerance = 0.05 if name == "int8" else 2e-5
    checksums = [[report["checksum"] for report in answers["reports"]] for answers in shards]
    assert checksums[0] == checksums[2] != checksums[1] == checksums[3]
    plain = ("round", "inner_steps", "partial", "complete", "replicas", "restarted")
    measured = ("pseudo_gradient_norm", "buffer_norm", "cosine", "gain")
    for answers in shards:
        for whole, shard_report, firsts in zip(alone["reports"], answers["reports"], shards[0]["reports"], strict=True):
            assert [whole[key] for key in plain] == [shard_report[key] for key in plain]
            assert str([shard_report[key] for key in measured]) == str([firsts[key] for key in measured])
            for key in measured:
                assert shard_report[key] == pytest.approx(
                    whole[key], rel=100 * tolerance, abs=tolerance, nan_ok=True
                ), key
    for rank, answers in enumerate(shards):
        for key, a in alone["anchor"].items():
            shard = a.chunk(2)[rank % 2]
            torch.testing.assert_close(answers["anchor"][key], shard, rtol=tolerance, atol=tolerance)
            assert same_bits(answers["models"][0][key].chunk(2)[rank % 2], answers["anchor"][key])
    assert list(alone["anchor"]) == NAMES


def test_shards_resume(brought: list[dict[str, Any]]):
    """Sharded, with a reduction under way, a resumed run has the reports and checksums of the uninterrupted one."""
    for answers in brought:
        resumed = answers["sharded"]["resumed"]
        assert len(resumed) == 7
        assert resumed == answers["sharded"]["patterns"]["reports"][-1 - len(resumed) : -1]


def test_what_cannot_be_in_shards_is_refused(brought: list[dict[str, Any]]):
    """All four say so of shards without their mesh, of parameters that are not in shards, and of what needs matrices.

    A whole parameter would be counted once a process, a process without any has nothing to sum, and Muon and
    orthogonalized pseudo-gradients would take each shard for a matrix.
    """
    for answers in (answers["sharded"] for answers in brought):
        assert "is sharded (a DTensor); pass communicator=ProcessGroup.of_mesh(mesh)" in answers["refused"]
        *whole, empty = answers["not shards"]
        for name, message in zip(("0.weight", "2.weight", "w"), whole, strict=True):
            assert f"parameter {name!r} is whole on every process of the mesh's shard axis" in message
            assert "fully_shard(module, mesh=mesh['shard'])" in message
        assert "or fewer rows than the replica has shards" in empty
        assert ["whole" in message for message in answers["cut matrices"]] == [True] * 2


def test_shards_are_not_taken_for_unfrozen_parameters(brought: list[dict[str, Any]]):
    """`check()` looks for parameters that are trained only since the engine was built; shards stand for whole ones."""
    assert [answers["sharded"]["unfrozen"] for answers in brought] == [[]] * len(brought)


def test_signals_are_means_over_shards_and_replicas(brought: list[dict[str, Any]]):
    """The mean of 0, 1, 2 and 3, told by the four processes of two replicas."""
    assert [answers["sharded"]["signals"] for answers in brought] == [{"loss": 1.5}] * 4


def test_a_harmed_shard_is_caught_by_all(brought: list[dict[str, Any]]):
    """Process 3's shard is touched: those that hold this shard name the fragment, those that do not say whose fault."""
    messages = [answers["sharded"]["tampered"] for answers in brought]
    for message in messages[1::2]:
        assert "fragment 'last' differs in its anchor between process 0 and process 1" in message
    for message in messages[::2]:
        assert "a fragment differs in another shard of this replica" in message


if __name__ == "__main__":
    bring(worker, 4)
