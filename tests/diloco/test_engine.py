"""`DiLoCo`: its rounds, what takes part in them, and mistakes (bits: test_streaming, test_resumed, test_processes)."""

from __future__ import annotations

import copy
import itertools
import json
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from policies import Rising
from replicas import Run, drift, network, same_bits, start
from rounds import blocks, report_of, shift
from twophase.diloco.communicator import Done, SingleProcess
from twophase.diloco.engine import DiLoCo
from twophase.diloco.flat import checksum
from twophase.diloco.setting import Setting
from twophase.optim.outer import OuterSGD
from twophase.restart import RestartPolicy, RoundSignal, State
from twophase.rule import OuterRule


def begin(outer: Any, replicas: Sequence[int] = (0, 1), *, inner_steps: int = 3, **options: Any) -> Run:
    """A run of short rounds."""
    return start(outer, replicas, inner_steps=inner_steps, **options)


# --- any optimizer ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nesterov", [False, True])
def test_any_torch_optimizer_is_an_outer_optimizer(nesterov: bool):
    """With torch.optim.SGD as the outer optimizer the run has the rule's bits and norms; its report has no groups."""
    rule = begin(OuterRule(0.3, 0.9, nesterov))
    sgd = begin(lambda params: torch.optim.SGD(params, lr=0.3, momentum=0.9, nesterov=nesterov, foreach=True))
    # Foreach Nesterov overwrites the pseudo-gradient, whose norm is reported.
    for expected, report in zip(rule.go(range(12)), sgd.go(range(12)), strict=True):
        assert expected.checksum == report.checksum
        assert report.groups == ()
        assert not report.restarted
        assert report.pseudo_gradient_norm == pytest.approx(expected.pseudo_gradient_norm, rel=1e-6)
        assert math.isnan(report.gain)
        assert report.cosine == report.buffer_norm == 0


# --- one reduction a round ----------------------------------------------------------------------------------------


class Recorder(SingleProcess):
    """Two processes that hold the same, three replicas in the other; it writes down what the engine asks of it."""

    size = 2

    def __init__(self) -> None:
        self.calls: list[str] = []

    def exchange(self, numbers: Sequence[float]) -> list[list[float]]:
        """The other holds the same, but three replicas."""
        is_start = not self.calls  # the number of replicas, before the two halves of a digest
        self.calls.append(f"exchange {len(numbers)}")
        return [list(numbers), [3.0, *numbers[1:]] if is_start else list(numbers)]

    def launch_sum(self, tensor: Tensor) -> Done:
        """A flat buffer, which stays as it is."""
        self.calls.append(f"sum {tensor.dim()}-D of {tensor.numel()}")
        return Done(bytes_sent=7)

    def broadcast(self, tensor: Tensor) -> None:
        """Process 0 holds ones."""
        self.calls.append("broadcast")
        tensor.fill_(1.0)

    def gather(self, value: Any, kind: Any) -> list[Any]:
        """Another process of the same kind."""
        self.calls.append(f"gather {kind.__name__}")
        return [value, value]


def test_one_reduction_a_round():
    """The engine talks once at the start and reduces one flat buffer a round; replicas elsewhere count in the mean."""
    recorder = Recorder()
    model = nn.Linear(3, 2)
    engine = DiLoCo(model, OuterRule(1.0, 0.0), inner_steps=1, communicator=recorder)
    assert recorder.calls == ["exchange 3", "broadcast"]
    assert all(torch.equal(p, torch.ones_like(p)) for p in model.parameters())
    for _ in range(3):
        shift(model, by=-4.0)
        report = report_of(engine)
        assert (report.replicas, report.bytes_sent) == (4, 7)
    assert recorder.calls[2:] == ["sum 1-D of 32", "exchange 3", "exchange 6"] * 3
    assert torch.equal(model.weight, torch.full((2, 3), 1.0 - 3 * 4.0 / 4))


# --- reductions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inner_steps", [1, 5])
@pytest.mark.parametrize("form", ["sum", "ema"])
def test_one_replica_without_momentum_is_the_inner_optimizer(inner_steps: int, form: Any):
    """One replica, lr 1 and no momentum: 40 steps end where they end without the engine, to float32 rounding."""
    run = begin(OuterRule(1.0, 0.0, form=form), [0], inner_steps=inner_steps)
    run.go(range(40))
    model = network(0)
    for step in range(40):
        drift(model, step, 0)
    for p, q in zip(run.models[0].parameters(), model.parameters(), strict=True):
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


# --- rounds and reports -------------------------------------------------------------------------------------------


def test_report_and_engine_in_words():
    """A report is a line of numbers and a dictionary for JSON, signals aside; an engine says what it is set to."""
    run = begin(OuterRule(0.7, 0.9, nesterov=True), restart=2)
    assert repr(run.engine) == (
        "DiLoCo(2 replicas, Nesterov lr 0.7 momentum 0.9 (sum form), restart 2, 3 inner steps a round, round 0)"
    )
    for step in range(5):
        run.step(step)
    drift(run.models[0], 5, 0)
    report = report_of(run.engine, {"loss": 2.0})
    values = json.loads(json.dumps(report.as_dict()))
    for name in ("gain", "cosine", "buffer_norm", "pseudo_gradient_norm", "restarted", "checksum", "round", "seconds"):
        assert values[name] == getattr(report, name)
    assert report.buffer_norm > 0
    assert "signals" not in values
    text = str(report)
    assert text.startswith("round 2: 3 inner steps, 2 replicas, restarted, gain ")
    assert f"cosine {report.cosine:.3g}, buffer norm {report.buffer_norm:.3g}, pseudo-gradient norm " in text
    assert "\n" not in text
    assert repr(run.engine).endswith("round 2)")
    several = begin(blocks, [0], fragments={"a": "0.", "b": "."}, stagger=False)
    assert "1 replica, 2 fragments, Nesterov lr 0.3 momentum 0.9 (sum form), restart 2 | " in repr(several.engine)
    assert str(run_round(several)).startswith("round 1: 3 inner steps, 1 replica, a: no restart, b: restarted, gain ")
    adam = begin(lambda named: torch.optim.Adam([p for _, p in named], lr=0.1), [0])
    assert "1 replica, Adam, 3 inner steps" in repr(adam.engine)
    assert "gain" not in str(run_round(adam))


def run_round(run: Run) -> Any:
    """The last report of the first round."""
    return [report for step in range(3) if (report := run.step(step)) is not None][-1]


@pytest.mark.filterwarnings("ignore:FSDP is switching to use")
def test_wrapped_replicas_are_refused():
    """DistributedDataParallel averages gradients in every step, and the first FSDP's shards look like whole parameters.

    The module inside is taken.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        parallel = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
        sharded = FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu"))
        for wrapped, words in (
            (parallel, r"DistributedDataParallel, which averages .*\. Pass its \.module"),
            (sharded, "holds a FullyShardedDataParallel; shard it by FSDP2's fully_shard"),
        ):
            for replica in (wrapped, [nn.Sequential(wrapped)]):
                with pytest.raises(ValueError, match=words):
                    DiLoCo(replica, OuterRule(0.7, 0.9), inner_steps=2)
        DiLoCo(parallel.module, OuterRule(0.7, 0.9), inner_steps=2)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("outer", [OuterRule(0.3, 0.9, nesterov=True), OuterRule(1.0, 0.9, form="ema"), blocks])
def test_report_is_what_is_measured(outer: Any):
    """Norms, cosine and gain, over all and per group, equal what is measured on the tensors from outside."""
    run = begin(outer, [0, 1, 2], restart=None if callable(outer) else "cycle:2,1")
    engine = run.engine
    names = list(engine.anchor)
    members = (
        [names] if not callable(outer) else [[n for n in names if n.startswith(block)] for block in ("0", "2", "3")]
    )
    restarted = []
    for number in range(7):
        before = {name: a.clone() for name, a in engine.anchor.items()}
        state = engine.outer.state
        m = {name: state[a].get("momentum_buffer", torch.zeros_like(a)).clone() for name, a in engine.anchor.items()}
        thetas, report = [], None
        for step in range(3 * number, 3 * number + 3):
            for replica, model in enumerate(run.models):
                drift(model, step, replica)
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


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("where", ["step", "finish"])
def test_a_round_without_its_signals_has_not_happened(where: str, delay: int):
    """Refused before anything moves, at a round's end and at the run's: with the signals it is the same run."""

    def flat(tensors: Iterable[Tensor]) -> Tensor:
        return torch.cat([tensor.detach().clone().flatten() for tensor in tensors])

    def train(*, forget: bool) -> tuple[Tensor, Tensor]:
        run = begin(OuterRule(0.3, 0.9), restart=Rising(0.0), inner_steps=3, delay=delay, signals=["loss"])
        engine, losses = run.engine, {"loss": 1.0}
        for step in range(1, 9):
            for replica, model in enumerate(run.models):
                drift(model, step, replica)
            if forget and where == "step" and engine.reports_next:
                with pytest.raises(ValueError, match="needs loss"):
                    engine.step()
                assert not engine.at_anchor
            engine.step(losses)
        if forget and where == "finish":
            with pytest.raises(ValueError, match="needs loss"):
                engine.finish()
            assert not engine.at_anchor
        assert engine.finish(losses) is not None
        assert engine.at_anchor
        return flat(engine.anchor.values()), flat(run.models[0].parameters())

    (a, x), (b, y) = train(forget=True), train(forget=False)
    assert torch.equal(a, b)
    assert torch.equal(x, a)
    assert torch.equal(x, y)


# --- what takes part ----------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_replicas_that_stand_still_leave_the_anchor(dtype: torch.dtype):
    """Without inner steps the anchor stays, and the gain is not a number; what rounding loses is no progress."""
    model = nn.Linear(16, 16, dtype=dtype)
    engine = DiLoCo(model, OuterRule(0.7, 0.9, nesterov=True), inner_steps=1)
    with torch.no_grad():
        engine.anchor["weight"].add_(1e-4)  # now no bfloat16 number
        model.weight.copy_(engine.anchor["weight"])
    before, checksum_before = engine.anchor["weight"].clone(), engine.checksum()
    for _ in range(5):
        report = report_of(engine)
        assert (report.checksum, report.pseudo_gradient_norm, report.cosine) == (checksum_before, 0, 0)
        assert math.isnan(report.gain)
    assert torch.equal(engine.anchor["weight"], before)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_divergence_is_data(poison: float):
    """A replica with NaN or infinity ends up in the report and the anchor; nothing is raised."""
    run = begin(OuterRule(0.3, 0.9), restart=2)
    with torch.no_grad():
        next(run.models[1].parameters())[0, 0] = poison
    reports = run.go(range(9))
    assert [report.round for report in reports] == [1, 2, 3]
    for report in reports:
        assert not math.isfinite(report.pseudo_gradient_norm)
        assert not math.isfinite(report.gain)
        assert len(report.checksum) == 16
    assert not all(a.isfinite().all() for a in run.engine.anchor.values())
    assert [report.restarted for report in reports] == [False, True, False]


# --- mistakes -----------------------------------------------------------------------------------------------------


def shared() -> list[nn.Module]:
    """Two modules around the same parameters."""
    inside = nn.Linear(2, 2)
    return [nn.Sequential(inside), nn.Sequential(inside)]


def frozen() -> nn.Module:
    """No parameter that trains."""
    return nn.Linear(2, 2).requires_grad_(False)


RULE = OuterRule(0.3, 0.9)
PARTS = {"first": r"^0\.", "norm": r"^2\.", "last": r"^3\."}


@pytest.mark.parametrize(
    ("replicas", "words"),
    [
        (frozen, ["no parameter that requires a gradient"]),
        (lambda: nn.Linear(2, 2).parameters(), ["holds a Parameter", "the module itself"]),
        (list, ["replicas is empty", "at least one"]),
        (lambda: [nn.Linear(2, 2), 3], ["holds a int", "a list of modules"]),
        (lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta")), ["on several devices"]),
        (lambda: [nn.Linear(2, 2)] * 2, ["share parameters", "copy.deepcopy()"]),
        (shared, ["share parameters", "copy.deepcopy()"]),
        (lambda: nn.ParameterDict({"z": torch.zeros(2).to(torch.complex64)}), ["'z'", "complex64", "floating-point"]),
        (lambda: [nn.Linear(2, 2), nn.Linear(2, 3)], ["replica 1", "other trainable parameters"]),
        (lambda: [nn.Linear(2, 2), frozen()], ["replica 1", "other trainable parameters"]),
        (lambda: [nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))], ["replica 1", "build them alike"]),
        (lambda: nn.Linear(2, 2, device="meta"), ["'weight'", "on meta"]),
    ],
)
def test_replicas_that_cannot_be_trained(replicas: Callable[[], Any], words: list[str]):
    """Modules that are none, too few, unlike or tied to one another are refused with the remedy."""
    with pytest.raises(ValueError, match="DiLoCo") as caught:
        DiLoCo(replicas(), RULE, inner_steps=2)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"inner_steps": 0}, ["inner_steps is 0", ">= 1"]),
        ({"inner_steps": -1}, ["inner_steps is -1", ">= 1"]),
        ({"inner_steps": 2.0}, ["inner_steps is 2.0", "whole number"]),
        ({"inner_steps": True}, ["inner_steps is True", "whole number"]),
        ({"restart": "sometimes"}, ["'sometimes'", "never"]),
        ({"restart": 0}, ["period is 0", ">= 1"]),
        ({"outer": blocks, "restart": 3}, ["restart 3", "outer builds"]),
        ({"outer": OuterSGD([torch.zeros(1)], 0.1)}, ["outer must be an OuterRule"]),
        ({"outer": 0.7}, ["outer must be an OuterRule", "0.7"]),
        ({"outer": OuterSGD}, ["outer must be an OuterRule"]),
        ({"outer": torch.optim.SGD}, ["outer must be", "SGD"]),
        ({"outer": lambda _: None}, ["outer must build a torch optimizer", "None"]),
        ({"outer": "adam"}, ["outer must be", "adamw"]),
        ({"outer": lambda params: OuterSGD([params[0][1]], 0.1)}, ["must hold every parameter, lacks 0.bias"]),
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
        ({"fragments": PARTS, "restart": {"first": 2, "norm": 3}}, ["(last)", "first, norm, last"]),
        ({"fragments": PARTS, "restart": {"first": 2, "norm": 3, "last": 1, "x": 1}}, ["(x)", "give each its policy"]),
        ({"restart": {"1": 2}}, ["(0, 1)", "the fragments are 0"]),
        ({"fragments": 2, "restart": {"0": 2, "1": "sometimes"}}, ["'sometimes'"]),
    ],
)
def test_mistakes_say_what_to_do(options: dict[str, Any], words: list[str]):
    """Each impossible option is refused with its value, the range and the remedy."""
    with pytest.raises(ValueError, match=r"DiLoCo|restart|Periodic|partition") as caught:
        start(**({"outer": RULE} | options))  # type: ignore[arg-type]
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_fragment_without_elements_is_refused():
    """It would have nothing to sum."""
    model = nn.ParameterDict({"a": nn.Parameter(torch.zeros(0)), "b": nn.Parameter(torch.zeros(3))})
    with pytest.raises(ValueError, match=r"a fragment is empty\. Its parameters have no elements"):
        DiLoCo(model, RULE, inner_steps=2, fragments={"none": "a", "rest": "."})


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


@pytest.mark.parametrize(("delay", "reached"), [(0, -8), (1, -6)], ids=["at-once", "delayed"])
@pytest.mark.parametrize("wire", ["float32", "int8"])
def test_an_exception_inside_a_sync_loses_nothing(
    delay: int, reached: float, wire: str, monkeypatch: pytest.MonkeyPatch
):
    """Ctrl-C before the outer step undoes the sync: the next one takes its progress, once."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    rule = OuterRule(1.0, 0.0)  # averaging: the anchor is what one replica has reached
    engine = DiLoCo(model, rule, inner_steps=2, delay=delay, wire=wire)
    asked, look = itertools.count(), engine._watch.begin

    def begin(*arguments: Any) -> None:
        if next(asked) == 0:
            raise KeyboardInterrupt
        look(*arguments)

    monkeypatch.setattr(engine._watch, "begin", begin)
    interrupted = 0
    for _ in range(8):
        shift(model, by=-1.0)
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


@pytest.mark.parametrize(
    ("wire", "fault"),
    [
        ("float32", "refused"),
        ("float32", "looked at"),
        *(("int8", fault) for fault in ("refused", "written", "looked at")),
    ],
)
def test_a_sync_that_fails_before_its_outer_step_is_undone(wire: str, fault: str, monkeypatch: pytest.MonkeyPatch):
    """Ctrl-C while a pseudo-gradient is written or looked at, or an outer step refused: its progress counts once."""
    model = nn.Linear(8, 8, bias=False)
    engine = DiLoCo(model, OuterRule(1.0, 0.0), inner_steps=2, wire=wire)
    start, moves = model.weight.detach().clone(), torch.arange(64.0).view(8, 8) / 100
    channel = engine.fragments[0].channel
    quantize = channel.quantize
    places = {"written": (channel, "quantize"), "looked at": (engine._watch, "begin")}

    def interrupt(*words: Any) -> None:
        if fault == "written":
            quantize(*words)
        raise KeyboardInterrupt

    for step in range(1, 9):
        with torch.no_grad():
            model.weight -= moves
        with monkeypatch.context() as patch:
            if step == 4 and fault == "refused":
                patch.setitem(engine.outer.param_groups[0], "lr", math.nan)
            elif step == 4:
                target, name = places[fault]
                patch.setattr(target, name, interrupt)
            with pytest.raises((KeyboardInterrupt, ValueError)) if step == 4 else nullcontext():
                engine.step()
        if step == 4:
            assert (engine.fragments[0].steps, engine.at_anchor, engine.round) == (2, False, 1)
            assert engine.check()
            with engine.anchored() as anchored:
                assert torch.equal(anchored.get_parameter("weight"), engine.anchor["weight"])
    engine.finish()
    residual = engine.wire_state_dict().get("0", {}).get("sent", [torch.zeros(64)])[0].view(8, 8)
    moved = start - engine.anchor["weight"] + residual  # a lossy wire's rounding of the failed sync is given up
    assert moved.sum().item() == pytest.approx(8 * moves.sum().item(), rel=0.05)


def test_a_lent_replica_is_restored_over_an_interrupt(monkeypatch: pytest.MonkeyPatch):
    """Ctrl-C while it gets its own weights back: it has them."""
    model = nn.Linear(2, 2, bias=False)
    engine = DiLoCo(model, RULE, inner_steps=2)
    shift(model, by=1.0)
    engine.step()
    before, write, calls = model.weight.detach().clone(), Setting.write, iter([False, True, False])

    def interrupted(*words: Any) -> None:
        if next(calls):
            raise KeyboardInterrupt
        write(*words)

    monkeypatch.setattr(Setting, "write", interrupted)
    with pytest.raises(KeyboardInterrupt), engine.anchored() as anchored:
        assert not torch.equal(anchored.get_parameter("weight"), before)
    assert torch.equal(model.weight, before)


def test_a_policy_that_raises_after_a_group_has_stepped_leaves_no_half_round(register_policy: Callable[[str], Any]):
    """The anchor is half a step ahead then: the engine refuses to go on from it."""

    @register_policy("picky")
    @dataclass(frozen=True, slots=True)
    class Picky(RestartPolicy):
        def decide(self, state: State, signal: RoundSignal) -> tuple[State, Any]:  # noqa: ARG002 - the base's
            raise ValueError("picky: no")

    model = nn.ParameterDict({name: nn.Parameter(torch.zeros(1)) for name in "ab"})

    def make(params: Any) -> OuterSGD:
        first, second = list(params)
        groups = [{"params": [first]}, {"params": [second], "restart": "picky"}]
        return OuterSGD(groups, lr=1.0)

    engine = DiLoCo(model, make, inner_steps=1)
    with torch.no_grad():
        model["a"] += 1.0
    with pytest.raises(ValueError, match="picky: no"):
        engine.step()
    with pytest.raises(ValueError, match="the last outer step was interrupted"):
        engine.step()


def test_an_interrupted_outer_step_is_mended_with_what_is_owed():
    """The refusal names all that goes back to a checkpoint, after which the run has the bits of an undisturbed one."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    def begin() -> Run:
        return start(OuterRule(1.0, 0.0), [0], inner_steps=2, wire="int8")

    run, whole = begin(), begin()
    run.go(range(4))
    state = copy.deepcopy(run.state())
    hook = run.engine.outer.register_step_post_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        run.go(range(4, 8))
    hook.remove()
    with pytest.raises(ValueError, match=r"load_state_dict\(\), on a lossy wire load_wire_state_dict\(\) as well"):
        run.step(6)
    run.load(state)
    run.go(range(4, 8))
    whole.go(range(8))
    assert run.engine.checksum() == whole.engine.checksum()


@pytest.mark.parametrize("signals", [0.5, torch.tensor(0.5), [1.0]])
def test_signals_without_names_are_refused_at_once(signals: Any):
    """A bare number is refused in the first step, not where a round ends."""
    engine = DiLoCo(nn.Linear(1, 1), OuterRule(0.7, 0.9), inner_steps=5)
    with pytest.raises(ValueError, match=r"DiLoCo: signals are .*give names and values, such as \{'loss': 2.3\}"):
        engine.step(signals)
    with pytest.raises(ValueError, match="DiLoCo: signals are"):
        engine.finish(signals)
    assert engine.inner_step == 0
