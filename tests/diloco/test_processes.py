"""The engine in two processes equals one process with two replicas; what differs between ranks is found and named."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from diloco.scenarios import HEAVY_BALL, NESTEROV, SCENARIOS, facts, network, refusal, shift, start, unlike
from forked import bring, in_processes
from replicas import through_file
from tracer import functions_of
from twophase.diloco.engine import DiLoCo
from twophase.optim.outer_sgd import BUFFER, OuterSGD
from twophase.rule import OuterRule

pytestmark = pytest.mark.dist

NAMES = [name for name, scenario in SCENARIOS.items() if scenario.replicas == 2]
RESUMED = ["ema", "three under way", "rising", "auto", "adamw", "bfloat16", "int8, three", "int8, one room"]


def played(name: str, replicas: Sequence[int] = (), *, resumed: bool = False, **changes: Any) -> dict[str, Any]:
    """A whole run: reports and all tensors; resumed: saved and loaded into one of other weights after each step."""
    run = start(name, replicas, **changes)
    reports = []
    for step in range(SCENARIOS[name].steps):
        reports += run.go([step])
        if resumed:
            state = through_file(run.state())
            run = start(name, replicas, seed=40, **changes)
            run.load(state)
    reports += [report for report in [run.finish()] if report is not None]
    alike = [run.engine.taken, run.engine.syncs, *map(facts, reports)]
    return {"reports": alike, "tensors": run.tensors()}


def tampered(rank: int, harm: str, delay: int) -> tuple[str, int]:
    """Fragment 1 of 3 is changed by one bit on rank 1 after its first sync: the message, and the step at which it came.

    At so small a learning rate a bit of the momentum does not reach the anchor.
    """
    run = start("three", [rank], outer=OuterRule(1e-4, 0.9), restart=None, delay=delay)
    run.go(range(6))
    fragment = run.engine.fragments[1]
    assert fragment.round == 1
    _, a = fragment.named[1]
    if rank == 1 and harm == "counters":
        fragment.outer.param_groups[0]["rounds_since_restart"] += 1
    elif rank == 1:
        target = a if harm == "anchor" else fragment.outer.state[a][BUFFER]
        target.view(torch.int32)[0] ^= 1 << (0 if harm == "anchor" else 6)  # of less the next round loses sight
    for step in range(6, 18):
        if (message := refusal(lambda step=step: run.step(step))) != "nothing":
            return message, step
    return "nothing", 18


def built(module: nn.Module | Sequence[nn.Module], outer: Any = NESTEROV, **options: Any) -> Callable[[], Any]:
    usual: dict[str, Any] = {"inner_steps": 6}
    return lambda: DiLoCo(module, outer, **(usual | options))


def unlike_starts(rank: int) -> dict[str, Callable[[], Any]]:
    """Engines that the two ranks build with a difference, by what the refusal must name."""
    adapted, ordered = nn.Linear(3, 2), nn.Module()
    adapted.base = nn.Parameter(torch.zeros(3) + rank, requires_grad=False)
    for name in ("xy", "yx")[rank]:
        ordered.register_parameter(name, nn.Parameter(torch.zeros(3)))
    buffered = [nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)) for _ in range(2)]
    return {
        "frozen parameters": built(adapted),
        "inner_steps": built(network(), inner_steps=6 + rank),
        "delay": built(network(), delay=rank),
        "compression": built(network(), compression=("float32", "int8")[rank]),
        "fragments": built(network(), fragments=2 + rank),
        "fragments ": built(ordered),
        "parameters": built(network(dtype=(torch.float32, torch.bfloat16)[rank])),
        "outer": built(network(), (HEAVY_BALL, NESTEROV)[rank]),
        "outer 1": built(network(), fragments=2, restart={"0": 3, "1": 3 + rank}),
        "filter": built(network(), filter=(None, "clip:1")[rank]),
        "averaged buffers": built(buffered[0], buffers=("mean", "local")[rank]),
        "buffers": built(nn.BatchNorm1d(2, track_running_stats=bool(rank))),
        "replicas": built([network() for _ in range(1 + rank)]),
        "seed": built(network(), expect_equal=({}, {"seed": 3})[rank]),
    }


def at_the_threshold(rank: int) -> list[list[bool]]:
    """Restarts by a limit that is the very ratio of a round's norms, where rank 1 measures g a bit shorter."""
    restarts, limit, measure = [], 1e9, OuterSGD.dots
    for harmed in (False, True):
        if harmed and rank == 1:
            OuterSGD.dots = lambda self: [(gg * (1 - 1e-7), mm, gm) for gg, mm, gm in measure(self)]  # type: ignore[method-assign]
        reports = start("norm", [rank], restart=f"norm:{limit!r}").go(range(30))
        OuterSGD.dots = measure  # type: ignore[method-assign]
        limit = max(report.buffer_norm / report.pseudo_gradient_norm for report in reports) * (1 + 1e-12)
        restarts.append([report.restarted for report in reports])
    return restarts


def found(rank: int, *, alike: bool) -> list[str]:
    """The mistakes that are found where the ranks train on the same data, and where they do not."""
    run = start("heavy ball", [0 if alike else rank])
    run.go(range(8))
    return list(run.engine.check())


def told(rank: int) -> list[str]:
    """What is logged where rank 1's inner optimizer keeps a copy, and its frozen parameters change."""
    messages: list[str] = []
    log = logging.getLogger("twophase")
    log.addFilter(lambda record: bool(messages.append(record.getMessage())))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4).requires_grad_(requires_grad=False), nn.Linear(4, 4))
    inner = (torch.optim.SGD, torch.optim.ASGD)[rank](model[1].parameters(), lr=0.01)
    engine = DiLoCo(model, HEAVY_BALL, inner_steps=4)
    for step in range(5):
        model(torch.full((1, 4), step + 0.1 * rank)).square().sum().backward()
        inner.step()
        engine.step()
    nn.init.constant_(model[0].bias, rank)  # type: ignore[arg-type]
    engine.finish()
    log.filters.clear()
    return messages


def averaged(rank: int) -> list[Tensor]:
    """A buffer that differs before the engine is made, then one before and after a round that averages it."""
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    model.register_buffer("mask", torch.tensor([True, rank == 1]))
    engine = DiLoCo(model, HEAVY_BALL, inner_steps=1, buffers="mean")
    started = model.get_buffer("mask").clone()
    model.get_buffer("1.running_var").copy_(torch.tensor([1.0, 0.1 + rank]))
    before = model.get_buffer("1.running_var").clone()
    shift(model)
    engine.step()
    return [started, before, model.get_buffer("1.running_var").clone()]


def entered(rank: int) -> set[tuple[str, str]]:
    """Files and functions of the package that a round's last `step()` runs through."""
    run = start("nesterov", [rank])
    run.go(range(run.engine.inner_steps - 1))
    return functions_of(lambda: run.engine.step({"loss": 1.0}))


def worker(rank: int) -> dict[str, Any]:
    return {
        "played": {name: played(name, [rank], resumed=name in RESUMED) for name in NAMES},
        "tampered": {
            (harm, delay): tampered(rank, harm, delay)
            for harm in ("anchor", "momentum", "counters")
            for delay in (0, 1)
        },
        "refused": {name: refusal(attempt) for name, attempt in unlike_starts(rank).items()},
        "threshold": at_the_threshold(rank),
        "found": [found(rank, alike=True), found(rank, alike=False)],
        "told": told(rank),
        "averaged": averaged(rank),
        "entered": entered(rank),
    }


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return in_processes(__file__, tmp_path_factory.mktemp("processes"), 2)


@pytest.mark.parametrize("name", NAMES)
def test_two_processes_are_one(ranks: list[dict[str, Any]], name: str) -> None:
    """Two replicas here and one in each of two, some loaded anew after every step: the same bits and reports."""
    here = played(name, [0, 1])
    for rank, there in enumerate(answers["played"][name] for answers in ranks):
        assert there["reports"] == here["reports"]
        mine = {key: t for key, t in here["tensors"].items() if not key.startswith(f"model {1 - rank}")}
        assert unlike({key.replace(f"model {rank}", "model 0"): t for key, t in mine.items()}, there["tensors"]) == []


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize(
    ("harm", "word"), [("anchor", "anchor"), ("momentum", "outer state"), ("counters", "outer settings")]
)
def test_a_changed_bit_is_found_in_its_round(ranks: list[dict[str, Any]], harm: str, word: str, delay: int) -> None:
    """One rank's anchor, buffer or counters are touched: at that fragment's next round both say what differs."""
    for answers in ranks:
        message, step = answers["tampered"][harm, delay]
        assert step == 6 + 4 - 1 + delay
        assert message.startswith("Disagreement")
        for part in (f"{word} of fragment '1'", "rank 1", "round 2"):
            assert part in message


@pytest.mark.parametrize("name", unlike_starts(0))
def test_ranks_that_start_unlike_are_refused(ranks: list[dict[str, Any]], name: str) -> None:
    """Every difference in how two ranks were started is named on both, also what only one of them has."""
    for rank, answers in enumerate(ranks):
        assert answers["refused"][name].startswith(f"ValueError: DiLoCo: {name.strip()}")
        assert f"on rank {1 - rank}" in answers["refused"][name]


def test_ranks_that_measure_unlike_decide_alike(ranks: list[dict[str, Any]]) -> None:
    """A norm at a policy's threshold that is 1e-7 shorter on rank 1 restarts none: all decide by rank 0's."""
    first, second = (answers["threshold"] for answers in ranks)
    assert first == second
    assert not any(first[1])


def test_the_same_batches_are_noticed_between_ranks(ranks: list[dict[str, Any]]) -> None:
    """On both, and other ones on neither."""
    for answers in ranks:
        (same,), none = answers["found"]
        assert "alike" in same
        assert none == []


def test_rank_0_warns_with_the_ranks_concerned(ranks: list[dict[str, Any]]) -> None:
    """Of what one rank has found, and of what only a comparison of all finds."""
    (copy, frozen), none = (answers["told"] for answers in ranks)
    assert none == []
    assert "ASGD" in copy
    assert "rank 1" in copy
    assert "0.bias" in frozen


def test_buffers_are_averaged_over_ranks(ranks: list[dict[str, Any]]) -> None:
    """In float64, to the same bits on both; they begin as rank 0's."""
    masks, before, after = zip(*(answers["averaged"] for answers in ranks), strict=True)
    assert [mask.tolist() for mask in masks] == [[True, False]] * 2
    expected = (before[0].double() + before[1].double()) / 2
    assert all(torch.equal(tensor, expected.float()) for tensor in after)
    assert not torch.equal(*before)


def test_a_round_can_be_followed(ranks: list[dict[str, Any]]) -> None:
    """A reader who follows the end of a round meets at most 40 functions in six files."""
    for rank in ranks:
        files = {file for file, _ in rank["entered"]}
        assert "diloco/engine.py" in files
        assert len(rank["entered"]) <= 40, sorted(rank["entered"])
        assert len(files) <= 6, files


if __name__ == "__main__":
    bring(worker, 2)
