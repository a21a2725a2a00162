"""Mistakes of a training loop that raise no error by themselves: each is named, or made harmless.

Run as a program, this file is one of the two processes of its own tests.
"""

from __future__ import annotations

import copy
import math
import pickle
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.optim import Optimizer
from torch.testing._internal.two_tensor import TwoTensor

from diloco.scenarios import AVERAGING, HEAVY_BALL, Run, Scenario, drift, network, refusal, shift, start, unlike
from forked import bring, in_processes
from replicas import same_bits, through_file
from twophase.diloco.engine import DiLoCo
from twophase.diloco.group import ProcessGroup, SingleProcess
from twophase.integrations.rounds import Rounds
from twophase.optim.outer_sgd import OuterSGD
from twophase.rule import OuterRule

OPTIONS: dict[str, dict[str, Any]] = {
    "one fragment": {},
    "three": {"fragments": 3},
    "under way": {"fragments": 3, "delay": 2, "mixing": 0.5},
    "int8": {"fragments": 3, "delay": 3, "compression": "int8"},
}


def begun(rank: int, **options: Any) -> Run:
    """A run of rounds of six steps over a new group of both processes."""
    return start(
        "heavy ball",
        [rank],
        inner_steps=6,
        group=ProcessGroup(cast("dist.ProcessGroup", dist.new_group())),
        restart=None,
        **options,
    )


def worker(rank: int) -> dict[str, Any]:
    return {
        "uneven": [uneven(rank, steps, options) for options in OPTIONS.values() for steps in ((17, 20), (20, 18))],
        "unlike": [refusal(lambda call=call: call(rank)) for call in (saved_alone, loaded_unlike)],
        "twice": ended_twice(rank),
        "lost": lost(rank),
        "weighed": {name: weighed([rank], begun(rank, **options)) for name, options in OPTIONS.items()},
        "weight": unlike_weights(rank),
    }


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return in_processes(__file__, tmp_path_factory.mktemp("loops"), 2)


def buffered(**buffers: Tensor) -> nn.Module:
    module = nn.Linear(4, 3)
    for name, buffer in buffers.items():
        module.register_buffer(name, buffer)
    return module


def go(engine: DiLoCo, inner: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        for p in engine.replicas[0].parameters():
            p.grad = torch.ones_like(p)
        inner.step()
        engine.step()


# ------------------------------------------------------------- an inner optimizer that holds copies of the parameters


class Masters(torch.optim.SGD):
    """SGD on masters in its state, which each step copies into the parameters."""

    @torch.no_grad()
    def step(self, _: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            master = self.state[p].setdefault("master", p.detach().clone())
            master.add_(p.grad, alpha=-self.param_groups[0]["lr"])
            p.copy_(master)


@pytest.mark.parametrize("options", [{}, {"mixing": 0.5}, {"delay": 1}, {"fragments": 2}])
def test_masters_that_no_sync_refreshes_are_named(options: dict[str, Any]) -> None:
    """Refreshed by `after_sync`, the run is that of an optimizer without masters, bit for bit."""
    ends = []
    for kind, refreshed in ((torch.optim.SGD, False), (Masters, True), (Masters, False)):
        model = network()
        inner = kind(model.parameters(), lr=0.1)
        engine = DiLoCo(model, OuterRule(0.5, 0.5), inner_steps=3, **options)
        if refreshed:
            engine.after_sync.append(
                lambda state=inner.state: [state[p].update(master=p.detach().clone()) for p in state]
            )
        go(engine, inner, 4)
        named = kind is Masters and not refreshed
        assert all(
            any("master" in finding for finding in found) == named for found in (engine.check(), engine.check(inner))
        )
        go(engine, inner, 4)
        engine.finish()
        ends.append([engine.flat, *(p - engine.anchor[name] for name, p in model.named_parameters())])
    assert all(map(torch.equal, ends[0], ends[1]))
    assert not torch.equal(ends[0][0], ends[2][0])


@pytest.mark.parametrize("flat", [False, True])
def test_an_optimizer_over_masters_alone_is_named(flat: bool) -> None:
    """As Megatron's or DeepSpeed's, whose inner optimizer holds none of the module's parameters."""
    model = nn.Linear(8, 8).bfloat16()
    params = [*model.parameters()]
    masters = [p.detach().float() for p in params]
    masters = [torch.cat([m.flatten() for m in masters])] if flat else masters
    inner = torch.optim.SGD(masters, lr=0.1)
    engine = DiLoCo(model, AVERAGING, inner_steps=2)
    for _ in range(2):
        for m in masters:
            m.grad = torch.ones_like(m)
        inner.step()
        nn.utils.vector_to_parameters(torch.cat([m.flatten() for m in masters]).bfloat16(), params)
        engine.step()
    for found in (engine.check(), engine.check(inner)):
        assert "after_sync" in found[0]
    engine.after_sync.append(lambda: None)  # as if it refreshed them
    assert engine.check(inner) == engine.check()


COPIES = """
    ASGD A2Grad AccSGD AdaSmooth DAdaptAdaGrad DAdaptSGD MADGRAD Prodigy Ranger SPlus SRMM ScheduleFreeAdamW
    ScheduleFreeRAdam ScheduleFreeSGD Lookahead ScheduleFreeWrapper
""".split()
"""Optimizers that keep averages, second iterates or the start of the parameters."""


def every_optimizer() -> Iterator[Any]:
    """Those of torch.optim and, where it is installed, of pytorch-optimizer."""
    kinds = [kind for kind in vars(torch.optim).values() if isinstance(kind, type) and issubclass(kind, Optimizer)]
    yield from [kind for kind in kinds if kind is not Optimizer]
    if find_spec("pytorch_optimizer"):
        package = import_module("pytorch_optimizer")
        yield from map(package.load_optimizer, package.get_supported_optimizers())
        for wrapper in (package.Lookahead, package.ScheduleFreeWrapper):
            yield lambda params, wrapper=wrapper: wrapper(torch.optim.SGD(params, lr=0.01))


def trained(kind: Callable[[Any], Any]) -> Iterator[tuple[nn.Module, Any]]:
    """A layer and its optimizer before and after each of some steps."""
    torch.manual_seed(0)
    model = nn.Linear(8, 4, bias=False)
    inner = kind(model.parameters())
    getattr(inner, "train", lambda: None)()
    yield model, inner
    for _ in range(9):
        x = torch.randn(16, 8)
        inner.zero_grad()
        (model(x) - x[:, :4].tanh()).square().mean().backward(create_graph="Hess" in str(kind))
        inner.step()
        yield model, inner


@pytest.mark.filterwarnings("ignore")
def test_optimizers_that_keep_copies_are_named_and_no_others(caplog: pytest.LogCaptureFixture) -> None:
    """At any step of a right loop, by `check` and by the engine itself."""
    named, count = set(), 0
    for kind in every_optimizer():
        try:
            deque(trained(kind))
        except Exception:  # noqa: S112 - it wants a closure, a model, sparse gradients, a package, …
            continue
        run, count = trained(kind), count + 1
        engine = DiLoCo(next(run)[0], OuterRule(0.7, 0.9), inner_steps=4)
        for _, inner in run:
            engine.step()
            named |= {type(inner).__name__} if engine.check(inner) or engine.check() else set()
    assert count > (100 if find_spec("pytorch_optimizer") else 8)
    assert named == {name for name in COPIES if find_spec("pytorch_optimizer") or name == "ASGD"}
    assert len(caplog.messages) == len(named)


# ----------------------------------------------------------------------------------- schedule-free of its own package


@pytest.mark.parametrize(
    ("by", "ours"), [("", False), ("hand", False), ("callback", False), ("", True), ("hand", True), ("callback", True)]
)
def test_schedule_free_is_named_unless_it_moves_along(by: str, ours: bool) -> None:
    """Our class moves its second iterate, in eval mode around `engine.step()`, which trainers' callbacks set."""
    pytest.importorskip("schedulefree", reason="the extra schedulefree is not installed")
    from twophase.training import schedule_free as own

    model = network()
    inner: Any = (own.ScheduleFreeAdamW if ours else own.AdamWScheduleFree)(model.parameters(), lr=0.01)
    inner.train()
    rounds = Rounds(OuterRule(0.7, 0.9), inner_steps=3)
    rounds.begin(model, inner, 0, None)
    step = rounds.engine.step
    acts = {"": (step,), "callback": (rounds.step,), "hand": (inner.eval, step, inner.train)}[by]
    for number in range(4):
        model(torch.randn(4, 4, generator=torch.Generator().manual_seed(number))).square().sum().backward()
        inner.step()
        for act in acts:
            act()
    assert ["train_mode" in finding for finding in rounds.engine.check()] == [True] * (by == "" or not ours)


# --------------------------------------------------------------------------- weights loaded after the engine was made


@pytest.mark.parametrize("prefix", ["", "m.", "0."], ids=["itself", "around it", "a part"])
def test_weights_that_are_loaded_late_are_no_progress(prefix: str, caplog: pytest.LogCaptureFixture):
    """Before the first step the anchor follows them, with a warning; of one replica alone they count, as it says."""
    for count, word in ((1, "followed"), (2, "progress")):
        caplog.clear()
        run = start("heavy ball", range(count))
        model, other = run.models[0], network(seed=7).state_dict()
        if prefix == "0.":
            model[0].load_state_dict({"weight": other["0.weight"], "bias": other["0.bias"]})
        else:
            whole = nn.ModuleDict({"m": model}) if prefix else model
            whole.load_state_dict({f"{prefix}{name}": value for name, value in other.items()})
        assert same_bits(run.engine.anchor["0.weight"], other["0.weight"])
        run.go(range(5))
        assert word in caplog.messages[0]


def test_weights_that_are_loaded_in_mid_run_are_told(caplog: pytest.LogCaptureFixture):
    """Those that are put back, as after an evaluation, or loaded into a copy, are not."""
    run = start("heavy ball")
    run.go(range(5))
    before, other = copy.deepcopy(run.models[0].state_dict()), network(seed=7).state_dict()
    for weights in (other, before):
        run.models[0].load_state_dict(weights)
    copy.deepcopy(run.models[0]).load_state_dict(other)
    run.go([5])
    assert caplog.messages == []
    run.models[0].load_state_dict(other)
    run.go([6])
    assert ["progress" in message for message in caplog.messages] == [True]


# ------------------------------------------------------------------- a resume without the model or without the engine


@pytest.mark.parametrize("steps", [2, 4, 6])
@pytest.mark.parametrize("order", ["engine model", "model engine", "engine", "model"])
def test_a_resume_without_the_model_or_the_engine_is_told(steps: int, order: str, caplog: pytest.LogCaptureFixture):
    """Both in any order are right; without the model at a round's end only, where the replicas are the anchor."""
    run = start("heavy ball", [0])
    run.go(range(steps))
    states = through_file({"model": run.models[0].state_dict(), "engine": run.engine.state_dict()})
    resumed = start("heavy ball", [0], seed=0)
    for name in order.split():
        {"model": resumed.models[0], "engine": resumed.engine}[name].load_state_dict(states[name])  # type: ignore[attr-defined]
    resumed.go(range(steps, 8))
    word = {"model": "after the engine was built", "engine": "inside a round" * (steps != 4)}.get(order, "")
    assert [word in message for message in caplog.messages] == [True] * bool(word)


def test_a_resume_without_residuals_is_told(caplog: pytest.LogCaptureFixture):
    """What a compression still owes belongs to the run."""
    run = start("int8", [0])
    run.go(range(4))
    state = run.state()
    run.load(state)
    run.go([4])
    assert caplog.messages == []
    run.engine.load_state_dict(state["engine"])
    run.go([5])
    assert "residuals" in caplog.messages[0]


# --------------------------------------------------------------------------------- one rank's checkpoint on all ranks


def test_the_checkpoint_of_another_rank_is_told(caplog: pytest.LogCaptureFixture):
    """Inside a round, with its weights; with one's own weights any rank's engine state is right."""
    saved, mine, resumed = start("heavy ball", [0]), start("heavy ball", [1], seed=0), start("heavy ball", [2], seed=0)
    for run in (saved, mine):
        run.go(range(2))
    state = through_file(saved.state())
    state["engine"]["spec"]["rank"] = 3
    resumed.load(state | {"models": [mine.models[0].state_dict()]})
    resumed.go([2])
    assert caplog.messages == []
    resumed.load(state)
    resumed.go([2])
    assert "rank 3" in caplog.messages[0]


# ----------------------------------------------------------------------------------- torchrun without a process group


def test_torchrun_without_a_process_group(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Each process would train alone."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    start(group=SingleProcess())
    assert caplog.messages == []
    (finding,) = start("heavy ball").engine.check()
    assert "WORLD_SIZE" in finding
    assert len(caplog.messages) == 1


# -------------------------------------------------------------------------------------------- ranks that end unevenly


def uneven(rank: int, steps: Sequence[int], options: dict[str, Any]) -> str:
    run = begun(rank, **options)
    return refusal(lambda: [run.go(range(steps[rank])), run.finish()])


def ended_twice(rank: int) -> str:
    run = begun(rank)
    return refusal(lambda: [run.go(range(8)), run.finish(), run.finish() if rank else None])


@pytest.mark.dist
def test_ranks_that_end_unevenly(ranks: list[dict[str, Any]]) -> None:
    """All hear where each rank is, before they wait for each other; a second `finish()` waits for nobody."""
    assert [answers["twice"] for answers in ranks] == ["nothing"] * 2
    for message, other in zip(*(answers["uneven"] for answers in ranks), strict=True):
        assert message == other
        assert message.startswith("Disagreement")
        assert all(part in message for part in ("finish(", "step(", "rank 0", "rank 1"))


# -------------------------------------------------------------------------------------- ranks that count unlike steps


def saved_alone(rank: int) -> None:
    """Only rank 0 saves, which begins the second half of a sum."""
    run = begun(rank, **OPTIONS["int8"])
    run.go(range(2))
    run.go(range(3 + rank, 6)) if rank else run.state()


def loaded_unlike(rank: int) -> None:
    """Each rank resumes from another step."""
    run, states = begun(rank, **OPTIONS["under way"]), []
    for step in range(12):
        run.step(step)
        states.append(through_file(run.state()))
    run.load(states[(7, 9)[rank]])
    run.go(range(12, 18))


@pytest.mark.dist
def test_ranks_that_count_unlike(ranks: list[dict[str, Any]]) -> None:
    """They are named at the first call that would pair with another one's."""
    for message, other in zip(*(answers["unlike"] for answers in ranks), strict=True):
        assert message == other
        assert message.startswith("Disagreement: DiLoCo: ranks make unlike calls")


# ------------------------------------------------------------------------------------------ step() once a micro-batch


@pytest.mark.parametrize("accumulation", [1, 2, 4])
def test_a_step_of_the_engine_for_each_micro_batch_is_named(accumulation: int) -> None:
    """Optimizers may take turns, and a GradScaler may skip steps at first."""
    model = nn.Linear(6, 6)
    inners = [torch.optim.AdamW([p]) for p in model.parameters()]
    engine = DiLoCo(model, OuterRule(0.7, 0.9), inner_steps=4)
    for step in range(16):
        model(torch.randn(8, 6)).square().mean().backward()
        if step % accumulation == accumulation - 1 and step > 2:
            for inner in [inners[step % 2]] if accumulation == 1 else inners:
                inner.step()
                inner.zero_grad()
        engine.step()
    assert [f"{accumulation} times" in finding for finding in engine.check(inners)] == [True] * (accumulation > 1)
    assert engine.check() == engine.check(inners)


# --------------------------------------------------------------------------------------- a replica that is not finite


def lost(rank: int) -> list[str]:
    run = begun(rank)
    run.go(range(5))
    if rank:
        next(run.models[0].parameters()).data.view(-1)[3] = float("nan")
    run.step(5)
    return list(run.engine.check())


@pytest.mark.dist
def test_a_replica_that_is_not_finite(ranks: list[dict[str, Any]], caplog: pytest.LogCaptureFixture) -> None:
    """It is named once, in one process and in several."""
    for answers, word in zip(ranks, ("another replica", "replica 0 "), strict=True):
        (finding,) = answers["lost"]
        assert word in finding
    run = start("heavy ball", [0, 1, 2])
    shift(run.models[1], by=float("inf"))
    run.go(range(10))
    (message,) = caplog.messages
    assert "replica 1 " in message


# ----------------------------------------------------------- best weights restored inside a round; anchored() misused


def test_best_weights_restored_inside_a_round_are_told(caplog: pytest.LogCaptureFixture) -> None:
    """The last round would take them for progress; loaded after it they are not."""
    run = start("heavy ball", [0])
    run.go(range(4))
    best = copy.deepcopy(run.models[0].state_dict())
    run.go(range(4, 10))
    run.models[0].load_state_dict(best)
    run.finish()
    run.models[0].load_state_dict(best)
    assert run.finish() is None
    assert ["progress" in message for message in caplog.messages] == [True]


def test_a_step_within_anchored_is_refused() -> None:
    """It would end a round of the anchor's own weights; an evaluation in another one is allowed."""
    run = start("heavy ball")
    run.go([0])
    with run.engine.anchored(), run.engine.anchored(1):
        for call in (run.engine.step, run.engine.finish, run.engine.state_dict):  # which would lack the round's steps
            with pytest.raises(RuntimeError, match="anchored"):
                call()
    assert run.go(range(1, 4))


def test_weights_changed_by_hand_are_not_shown_as_the_anchor() -> None:
    """Also where no inner step was counted since the last sync."""
    engine = start("averaging").engine
    shift(*engine.replicas)
    with engine.anchored() as shown:
        assert all(torch.equal(p, engine.anchor[name]) for name, p in shown.named_parameters())
    assert not torch.equal(engine.anchor["0.weight"], engine.replicas[0].get_parameter("0.weight"))
    engine.replicas[0].get_submodule("0").weight = nn.Parameter(torch.zeros(3, 4))
    assert "replaced" in refusal(lambda: engine.anchored().__enter__())


@pytest.mark.parametrize("replicas", [[0], [0, 1, 0]])
@pytest.mark.parametrize(
    "options",
    [{}, {"mixing": 0.5}, {"fragments": 2}, {"delay": 2}, {"compression": "int8"}, {"restart": 1}, {"outer": "adamw"}],
)
def test_a_right_loop_is_quiet_at_any_step(
    replicas: list[int], options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """In mid-round, with a delay or with mixing the replicas hold weights of their own, as they should."""
    run = start(Scenario(), replicas, **options)
    inners = [torch.optim.SGD(model.parameters(), lr=0.1) for model in run.models]
    for step in range(9):
        assert run.engine.check(inners) == ()
        run.go([step])
    run.finish()
    assert run.engine.check(inners) == ()
    assert caplog.messages == []


# --------------------------------------------------------------------------------- buffers that differ from the start


def test_random_features_and_masks_are_the_first_replicas() -> None:
    """Buffers of any type, as in DDP."""
    modules = []
    for seed in range(3):
        features = torch.randn(3, 3, generator=torch.Generator().manual_seed(seed))
        kinds = {"mask": features > 0, "count": torch.tensor(seed), "phases": features * 1j}
        modules.append(buffered(features=features, empty=torch.zeros(0), **kinds))
    first = copy.deepcopy(modules[0])
    DiLoCo(modules, AVERAGING, inner_steps=1)
    for name, buffer in first.named_buffers():
        assert all(torch.equal(module.get_buffer(name), buffer) for module in modules), name


@pytest.mark.filterwarnings("ignore:torch.quantize")
def test_buffers_of_other_layouts_are_named() -> None:
    """Quantized weights, frozen or in buffers, are left alone."""
    modules: list[Any] = []
    for seed in range(2):
        row = torch.randn(1, 3, generator=torch.Generator().manual_seed(seed))
        codes = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
        modules.append(buffered(expanded=row.expand(2, 3), sparse=row.to_sparse(), codes=codes))
        modules[-1].base = nn.Parameter(TwoTensor(torch.ones(2), torch.ones(2)), requires_grad=False)
        modules[-1].register_buffer("parts", TwoTensor(torch.ones(2), torch.ones(2)))
    engine = DiLoCo(modules, AVERAGING, inner_steps=1)
    (finding,) = engine.check()
    assert all(
        (name in finding) == (name in ("expanded", "sparse")) for name in ("expanded", "sparse", "codes", "parts")
    )


# ----------------------------------------------------------------------------- averages of buffers that no mean suits


@pytest.mark.parametrize("norm", [nn.utils.spectral_norm, parametrizations.spectral_norm])
def test_unit_vectors_stay_unit_vectors(norm: Callable[[nn.Module], nn.Module]) -> None:
    """The directions of a spectral norm are the same in all replicas, and of length 1."""
    modules = [norm(nn.Linear(4, 3)) for _ in range(3)]
    engine = DiLoCo(modules, AVERAGING, inner_steps=1, buffers="mean")
    for number, module in enumerate(modules):
        for buffer in module.buffers():
            buffer.copy_(nn.functional.normalize(buffer + number * torch.arange(len(buffer)), dim=0))
    engine.step()
    for first, *others in zip(*(module.buffers() for module in modules), strict=True):
        assert first.norm().item() == pytest.approx(1, abs=1e-6)
        assert all(torch.equal(first, other) for other in others)


def test_constants_do_not_move() -> None:
    """A float64 mean of equal values is not always that value, and its sum may overflow."""
    constants = torch.tensor([0.1, 1 / 3, 1.7e308, -math.inf, -0.0], dtype=torch.float64)
    modules = [buffered(constants=constants.clone()) for _ in range(7)]
    DiLoCo(modules, AVERAGING, inner_steps=1, buffers="mean").step()
    assert all(torch.equal(module.get_buffer("constants"), constants) for module in modules)


def test_overlapping_buffers_are_averaged() -> None:
    """Expanded ones stay each replica's own, and one that has grown in a replica."""
    modules = []
    for _ in "ab":
        whole, wide = torch.ones(4), torch.ones(1).expand(3)
        modules.append(buffered(whole=whole, part=whole[:2], cache=whole[:1] - 1, wide=wide))
    engine = DiLoCo(modules, AVERAGING, inner_steps=1, buffers="mean")
    for number, module in enumerate(modules):
        module.get_buffer("whole").mul_(1 + number)
        module.register_buffer("cache", torch.full((1 + number,), float(number)))
    engine.step()
    for number, module in enumerate(modules):
        assert module.get_buffer("whole").tolist() == [1.5] * 4
        assert module.get_buffer("cache").tolist() == [number] * (1 + number)


# --------------------------------------------------------------------------------------------- 16-bit optimizer state


class Mixed(torch.optim.SGD):
    """Momentum in another type than the parameters'."""

    @torch.no_grad()
    def step(self, _: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            kind = torch.float32 if p.dtype == torch.bfloat16 else torch.bfloat16
            m = self.state[p].setdefault("m", torch.zeros_like(p, dtype=kind))
            p.sub_(0.1 * m.mul_(0.9).add_(p.grad))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_optimizer_state_of_another_type_resumes_exactly(dtype: torch.dtype):
    """Torch loads it in the parameters' type; a trainer's callback, and the engine for its outer ones, do not."""

    def train(steps: range, state: Any = None) -> Any:
        model = network(dtype=dtype)
        inner = Mixed(model.parameters(), 0.1)
        if state:
            model.load_state_dict(state["model"])
            inner.load_state_dict(state["optimizer"])
        rounds = Rounds(lambda named: Mixed([p for _, p in named], 0.1), inner_steps=2)
        rounds.begin(model, inner, steps[0], 6, state)
        for number in steps:
            for p in model.parameters():
                p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(number)).to(p)
            inner.step()
            rounds.step()
        return through_file(rounds.saved() | {"optimizer": inner.state_dict(), "model": model.state_dict()})

    whole, resumed = train(range(6)), train(range(3, 6), train(range(3)))
    assert same_bits(whole["engine"]["anchor"], resumed["engine"]["anchor"])
    assert unlike(whole["model"], resumed["model"]) == []


# -------------------------------------------------------------------------------------- two engines where one belongs


def test_two_engines_on_one_module_are_refused():
    """The later one takes over; the earlier one is refused a step, until then both may be rebound as in a notebook."""
    model = network()
    first = DiLoCo(model, AVERAGING, inner_steps=2)
    second = DiLoCo(model[0], AVERAGING, inner_steps=2)
    assert "later engine" in refusal(first.step)
    assert "later engine" in refusal(first.finish)
    second.step()


@pytest.mark.parametrize(
    ("outer", "words"), [("averaging", ""), ("auto", ""), (OuterRule(0.7, 0.9), "lr 0.7 momentum")]
)
def test_a_rule_of_which_nothing_enters_is_told(outer: Any, words: str, caplog: pytest.LogCaptureFixture) -> None:
    DiLoCo(nn.Linear(2, 1), outer, inner_steps=1, restart="auto" if outer != "auto" else None)
    assert (words in caplog.text) if words else not caplog.records


def test_an_inner_optimizer_is_no_outer_one():
    """`OuterSGD` on a replica's parameters is refused, as long as the engine lives."""
    model = network()
    inner, engine = OuterSGD(model.parameters(), 0.1), DiLoCo(model, AVERAGING, inner_steps=2)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    assert "inner optimizer" in refusal(inner.step)
    del engine
    inner.step()


def test_data_parallel_is_refused():
    """As DistributedDataParallel."""
    assert "DataParallel" in refusal(lambda: DiLoCo(nn.DataParallel(network()), AVERAGING, inner_steps=1))


# -------------------------------------- parameters that were resized; copies of the engine; another optimizer's state


@pytest.mark.parametrize(
    "harm",
    [
        lambda model: setattr(model[0].weight, "data", torch.zeros(6, 4)),
        lambda model: model.double(),
        lambda model: model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True),
        lambda model: setattr(model[0], "weight", nn.Parameter(torch.zeros(8, 4))),
    ],
    ids=["resized", "cast", "assigned", "replaced"],
)
def test_a_parameter_that_is_another_is_named(harm: Callable[[nn.Module], Any]) -> None:
    """By the next step: the engine would train in vain."""
    model = network()
    engine = DiLoCo(model, AVERAGING, inner_steps=1)
    harm(model)
    assert "'0.weight' was replaced, resized" in refusal(engine.step)


@pytest.mark.parametrize("attempt", [copy.copy, copy.deepcopy, pickle.dumps])
def test_copies_of_an_engine_are_refused(attempt: Callable[[Any], Any]):
    """Their replicas would be others'; the message names what to do."""
    with pytest.raises(TypeError, match="state_dict"):
        attempt(DiLoCo(network(), AVERAGING, inner_steps=1))


def outer(kind: Any) -> DiLoCo:
    """An engine with torch's optimizer of some class as outer optimizer, after a round."""
    engine = DiLoCo(network(), lambda named: kind([p for _, p in named], lr=0.1), inner_steps=1)
    shift(*engine.replicas)
    engine.step()
    return engine


def test_the_state_of_another_outer_optimizer_is_refused():
    """Also of one with the same settings; OuterSGD and torch's SGD alone load each other's."""
    adamw, sgd = outer(torch.optim.AdamW), outer(torch.optim.SGD)
    for other in (outer(torch.optim.Adam), outer(torch.optim.Adagrad), sgd):
        assert "outer must be AdamW" in refusal(lambda other=other: adamw.load_state_dict(other.state_dict()))
    DiLoCo(network(), HEAVY_BALL, inner_steps=1).load_state_dict(sgd.state_dict())
    assert "closure" in refusal(lambda: outer(torch.optim.LBFGS))


# -------------------------------------------------------------------------------------- frozen parameters that change


@pytest.mark.parametrize("inner_steps", [1, 4])
@pytest.mark.parametrize("changed", [[], [1], [0, 1]])
def test_frozen_parameters_that_change_in_one_replica_are_named(changed: list[int], inner_steps: int) -> None:
    """As by merged adapters; by `check` at any time and by `finish`, which compares all ranks."""
    models: list[Any] = [
        nn.ModuleDict({"base": nn.Linear(4, 4).requires_grad_(False), "head": nn.Linear(4, 4)}) for _ in "ab"
    ]
    models[1]["base"].load_state_dict(models[0]["base"].state_dict())
    engine = DiLoCo(models, AVERAGING, inner_steps=inner_steps)
    shift(models[0]["head"])
    engine.step()
    for number in changed:
        nn.init.zeros_(models[number]["base"].weight)
    named = [len(changed) == 1]
    assert ["base.weight" in finding for finding in engine.check()] == named * any(named)
    engine.finish()
    assert ["base.weight" in finding for finding in engine._watch.findings] == named * any(named)


# --------------------------------------------------------------------------------------------------- compiled modules


def test_the_state_of_a_compiled_module_is_that_of_the_module():
    """Both ways, also of a block inside."""
    compiled: Any = partial(torch.compile, backend="eager")
    engines = [DiLoCo(module, AVERAGING, inner_steps=1) for module in (network(), compiled(network()))]
    nested = network()
    nested[0] = compiled(nested[0])
    engines.append(DiLoCo(nested, AVERAGING, inner_steps=1))
    for engine in engines:
        assert list(engine.anchor) == list(engines[0].anchor)
        engine.load_state_dict(engines[0].state_dict())


# --------------------------------------------------------------------------------------------------- unequal replicas


def weighed(replicas: Sequence[int], run: Run) -> dict[str, Any]:
    """Tensors and norms of a run in which replica 0 has three times the tokens; it is resumed after each step."""
    norms = []
    for step in range(20):
        for replica, model in zip(replicas, run.models, strict=True):
            drift(model, step, replica)
        report = run.engine.step({"loss": 1.0}, weight=[(step + 1) * (3.0, 1.0)[replica] for replica in replicas])
        norms.append(report and report.pseudo_gradient_norm)
        run.load(through_file(run.state()))
    return {"tensors": run.tensors(), "norms": norms}


def unlike_weights(rank: int) -> str:
    run = begun(rank, delay=1)
    return refusal(lambda: [run.engine.step(weight=None if rank else 2.0) for _ in range(7)])


@pytest.mark.dist
@pytest.mark.parametrize("name", OPTIONS)
def test_unequal_replicas_are_weighed(ranks: list[dict[str, Any]], name: str) -> None:
    """In one process as in two."""
    here = weighed([0, 1], start("heavy ball", inner_steps=6, restart=None, **OPTIONS[name]))
    for rank, answers in enumerate(ranks):
        there = answers["weighed"][name]
        assert there["norms"] == here["norms"]
        mine = {key: t for key, t in here["tensors"].items() if not key.startswith(f"model {1 - rank}")}
        assert unlike({key.replace(f"model {rank}", "model 0"): t for key, t in mine.items()}, there["tensors"]) == []


@pytest.mark.parametrize(("weights", "share"), [([7.7, 7.7], 0.5), ([3, 1], 0.75), ([1, 0], 1.0)])
def test_the_mean_counts_tokens(weights: list[float], share: float) -> None:
    """Of a round; equal weights change no bit; a weight of 0 leaves out even what is not finite."""
    run, plain = (start("averaging", [0, 1], restart=None) for _ in "ab")
    first = second = torch.empty(0)
    for step in range(4):
        for number, model in enumerate(run.models):
            drift(model, step, number)
        if share == 1:
            shift(run.models[1], by=float("nan"))
        first, second = (model[0].weight.detach().nan_to_num() for model in run.models)
        run.engine.step({"loss": 1.0}, weight=weights)
    plain.go(range(4))
    torch.testing.assert_close(run.engine.anchor["0.weight"], share * first + (1 - share) * second)
    assert (share == 0.5) == torch.equal(run.engine.anchor["0.weight"], plain.engine.anchor["0.weight"])


@pytest.mark.dist
def test_weights_that_make_no_mean(ranks: list[dict[str, Any]]) -> None:
    """They are numbers from 0, one for each replica, in each step of a round and on all ranks, or nowhere."""
    run = start("heavy ball")
    for weight in (-1.0, float("nan"), [1.0], [1.0, 2.0, 3.0]):
        with pytest.raises(ValueError, match="weight"):
            run.engine.step({"loss": 1.0}, weight=weight)  # type: ignore[arg-type]
    run.engine.step({"loss": 1.0}, weight=2.0)
    with pytest.raises(ValueError, match="weight"):
        run.engine.step({"loss": 1.0})
    assert all("Disagreement" in answers["weight"] and "weight" in answers["weight"] for answers in ranks)


if __name__ == "__main__":
    bring(worker, 2)
