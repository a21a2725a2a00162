"""`DiLoCo` in one process: equal to the plain loop; what takes part; interrupts; refusals."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

from apple import Apple, moved
from diloco import scenarios
from diloco.scenarios import AVERAGING, HEAVY_BALL, PLAIN, SCENARIOS, Plain, loss, network, shift, start, unlike
from replicas import same_bits
from twophase.diloco.digest import digest
from twophase.diloco.engine import DiLoCo
from twophase.diloco.report import RoundReport
from twophase.rule import OuterRule


def assert_reported(report: RoundReport | None, expected: dict[str, Any] | None) -> None:
    """The numbers of a report are those of the plain loop; measured ones to float32 rounding."""
    assert (report is None) == (expected is None)
    if report is None or expected is None:
        return
    for name in ("round", "complete", "inner_steps", "partial"):
        assert getattr(report, name) == expected[name], name
    for group, plain in zip(report.groups, expected["groups"], strict=True):
        assert group.restarted == plain.restarted
        for name in ("pseudo_gradient_norm", "buffer_norm", "cosine", "gain"):
            assert getattr(group, name) == pytest.approx(getattr(plain, name), rel=1e-5, abs=1e-6)
    assert report.restarted == any(plain.restarted for plain in expected["groups"])
    norms = [plain.pseudo_gradient_norm for plain in expected["groups"]]
    assert report.pseudo_gradient_norm == pytest.approx(math.hypot(*norms), rel=1e-6)  # of the rest, see test_report.py


@pytest.mark.parametrize("name", PLAIN)
def test_equals_a_plain_loop_at_every_step(name: str) -> None:
    """After each inner step and finish(), all has the bits of the plain loop, and every report its numbers."""
    run, plain = start(name), Plain(PLAIN[name])
    assert unlike(run.tensors(), plain.tensors()) == []
    for step in range(PLAIN[name].steps):
        announced, syncs = bool(run.engine.ending), run.engine.syncs
        report = run.step(step)
        assert announced == (report is not None) == (run.engine.syncs - syncs)
        assert_reported(report, plain.step(step))
        if report is not None:
            assert report.signals == {"loss": loss(step, run.replicas)}
            assert (report.replicas, report.bytes_sent) == (len(run.models), 0)
            ended = [f for f in run.engine.fragments if f.name in [part.name for part in report.fragments]]
            assert [part.checksum for part in report.fragments] == [digest([f.anchor]) for f in ended]
            assert set(report.seconds) == {"pseudo_gradient", "reduce", "outer", "restore", "checksum"}
        assert unlike(run.tensors(), plain.tensors()) == [], step
    assert_reported(run.finish(), plain.finish())
    assert unlike(run.tensors(), plain.tensors()) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ema", "three, delay", "three under way", "uneven", "at once", "crowded"])
def test_finish_in_every_position(name: str) -> None:
    """Ended after any number of inner steps, a run has the bits of the plain loop, and so it has if it goes on."""
    inner_steps = PLAIN[name].inner_steps
    for steps in range(2 * inner_steps + 2):
        run, plain = start(name), Plain(PLAIN[name])
        for step in range(steps):
            run.step(step)
            plain.step(step)
        assert_reported(run.finish(), plain.finish())
        assert run.engine.round == max(part.rounds for part in plain.parts)
        assert run.finish() is None
        for step in range(2 * inner_steps):
            assert unlike(run.tensors(), plain.tensors()) == [], (steps, step)
            run.step(step)
            plain.step(step)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("name", ["nesterov", "three", "at once"])
def test_any_torch_optimizer_is_an_outer_optimizer(name: str, nesterov: bool) -> None:
    """With torch.optim.SGD as the outer optimizer a run has the rule's bits and norms; its reports have no groups."""

    def sgd(named: list[tuple[str, Tensor]]) -> torch.optim.Optimizer:  # foreach Nesterov overwrites the gradients
        return torch.optim.SGD([p for _, p in named], lr=0.3, momentum=0.9, nesterov=nesterov, foreach=True)

    rule, other = (start(name, outer=outer, restart=None) for outer in (OuterRule(0.3, 0.9, nesterov), sgd))
    for expected, report in zip(rule.go(range(14)), other.go(range(14)), strict=True):
        assert expected.checksum == report.checksum
        assert report.pseudo_gradient_norm == pytest.approx(expected.pseudo_gradient_norm, rel=1e-6)
        assert (report.groups, report.restarted, report.cosine, report.buffer_norm) == ((), False, 0, 0)
        assert math.isnan(report.gain)
    assert "SGD lr 0.3" in repr(other.engine)


def test_what_takes_part() -> None:
    """Frozen parameters are neither averaged nor overwritten; a tied parameter takes part once."""
    models: list[Any] = [nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))) for _ in range(2)]
    for model in models:
        model[2].weight = model[1].weight
        model[0].requires_grad_(requires_grad=False)
    engine = DiLoCo(models, AVERAGING, inner_steps=1)
    assert list(engine.anchor) == ["1.weight", "1.bias", "2.bias"]
    before = engine.anchor["1.weight"].clone()
    for number, model in enumerate(models):
        model[0].weight.fill_(float(number))
        shift(model[2], by=1.0 + 2 * number)
    engine.step()
    for number, model in enumerate(models):
        assert torch.equal(model[0].weight, torch.full((4, 4), float(number)))
        assert model[2].weight is model[1].weight
        torch.testing.assert_close(model[1].weight.detach(), before + 2.0)


@pytest.mark.parametrize("name", ["auto", "adamw", "orthogonal", "int8, three", "bfloat16 model"])
def test_on_a_device_without_float64(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On Apple's GPU every part of a round, and an average of buffers, gives what it gives on a CPU."""
    noise = scenarios.noise

    def go(move: Callable[[Any], Any]) -> dict[str, Tensor]:
        monkeypatch.setattr(scenarios, "noise", lambda *of: move(noise(*of)))
        monkeypatch.setattr(
            scenarios, "network", lambda *of: move(network(*of).append(nn.BatchNorm1d(1, affine=False)))
        )
        run = start(name, buffers="mean")
        run.models[-1].get_buffer("4.running_mean").add_(3.0)
        run.go(range(SCENARIOS[name].steps))
        run.finish()
        assert run.engine.check() == ()
        run.load(run.state())
        return run.tensors() | {"buffer": run.models[0].get_buffer("4.running_mean")}

    expected = go(lambda there: there)
    with Apple():
        found = go(lambda there: moved(there) if isinstance(there, nn.Module) else there.to("mps"))
        assert {t.device.type for key, t in found.items() if not key.startswith("step")} == {"mps"}
    for key, tensor in expected.items():
        torch.testing.assert_close(found[key].as_subclass(Tensor), tensor, msg=key)


@pytest.mark.parametrize("compression", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_divergence_is_data(poison: float, compression: str) -> None:
    """NaN or infinity is in each later report and in the anchor; nothing is raised."""
    run = start("nesterov", restart=2, inner_steps=3, delay=0, compression=compression)
    with torch.no_grad():
        run.models[1].get_parameter("0.weight")[0, 0] = poison
    for number, report in enumerate(run.go(range(9)), start=1):
        assert report.round == number
        assert not math.isfinite(report.pseudo_gradient_norm)
        assert not math.isfinite(report.gain)
        assert report.restarted == (number == 2)
        assert not run.engine.anchor["0.weight"].isfinite().all()


@pytest.mark.parametrize("name", ["three under way", "bfloat16 model"])
def test_anchored_and_back(name: str) -> None:
    """At any step a replica is the anchor under `anchored()` alone, then itself again, and the run goes on."""
    run, other = start(name), start(name)
    for step in range(14):
        for number, model in enumerate(run.models):
            before = {key: tensor.clone() for key, tensor in run.tensors().items()}
            with suppress(KeyError), run.engine.anchored(number) as shared:
                assert shared is model
                for key, p in shared.named_parameters():
                    assert same_bits(p.detach(), run.engine.anchor[key].to(p.dtype))
                assert all(key.startswith(f"model {number}") for key in unlike(run.tensors(), before))
                raise KeyError
            assert unlike(run.tensors(), before) == []
        run.step(step)
        other.step(step)
        assert unlike(run.tensors(), other.tensors()) == []


@pytest.mark.parametrize(
    ("changes", "places"),
    [({}, {4, 8}), ({"fragments": 3, "stagger": False}, {4, 8}), ({"fragments": 2}, set()), ({"delay": 1}, {5})],
    ids=str,
)
def test_where_the_replicas_are_the_anchor(changes: dict[str, Any], places: set[int]) -> None:
    """`at_anchor` is true of the anchor's bits: at first, after a sync of all fragments, and after finish()."""
    run = start("heavy ball", **changes)
    assert run.engine.at_anchor
    assert {step for step in range(1, 9) if run.go([step]) is not None and run.engine.at_anchor} == places
    run.go([9, 10])
    assert not run.engine.at_anchor
    run.finish()
    assert run.engine.at_anchor
    for name, a in run.engine.anchor.items():
        assert all(same_bits(model.get_parameter(name).detach(), a) for model in run.models)
    assert not start("heavy ball", mixing=0.3).engine.at_anchor  # never for certain


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize(
    ("error", "word", "signals"),
    [(ValueError, "loss", {}), (ValueError, "high", {"loss": "high"}), (TypeError, "list", {"loss": 1, "norm": [1.0]})],
)
def test_a_round_without_its_signals_has_not_happened(
    delay: int, error: type[Exception], word: str, signals: dict[str, Any]
) -> None:
    """A signal that is missing or no number, needed or not, is refused before anything moves; then all goes on."""

    def train(*, forget: bool) -> dict[str, Tensor]:
        run = start("rising", replicas=[0], inner_steps=3, delay=delay, fragments=1, mixing=0.0)
        for step in range(1, 9):
            if forget and run.engine.ending:
                with pytest.raises(error, match=word):
                    run.engine.step(signals)
            run.step(step)
        if forget:
            with pytest.raises(error, match=word):
                run.engine.finish(signals)
            assert not run.engine.at_anchor
        assert run.finish() is not None
        return run.tensors()

    assert unlike(train(forget=True), train(forget=False)) == []


def test_an_interrupted_outer_step_ends_the_engine_until_it_is_loaded() -> None:
    """It refuses to go on from half an outer step; from a checkpoint it has the bits of an undisturbed run."""
    run, whole = start("int8, three"), start("int8, three")
    run.go(range(9))
    state = copy.deepcopy(run.state())
    hook = run.engine.fragments[1].outer.register_step_post_hook(Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        run.go(range(9, 20))
    hook.remove()
    for call in (run.engine.step, run.engine.finish, run.engine.state_dict):
        with pytest.raises(RuntimeError, match="load_state_dict"):
            call()
    run.load(state)
    run.go(range(9, 20))
    whole.go(range(20))
    assert unlike(run.tensors(), whole.tensors()) == []


@pytest.mark.parametrize(
    ("replicas", "word"),
    [
        (lambda: nn.Linear(2, 2).requires_grad_(requires_grad=False), "replicas"),
        (lambda: [nn.Linear(2, 2), 3], "replicas"),
        (lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta")), "one device"),
        (lambda: nn.ParameterDict({"none": nn.Parameter(torch.zeros(0))}), "fragments"),  # nothing to reduce
        (lambda: nn.ParameterDict({"z": torch.zeros(2).to(torch.complex64)}), "'z'"),
        (lambda: [nn.Sequential(inside) for inside in [nn.Linear(2, 2)] * 2], "replicas share"),
        (lambda: [nn.Linear(2, 2), nn.Linear(2, 3)], "replica 1"),
    ],
)
def test_replicas_that_cannot_be_trained(replicas: Callable[[], Any], word: str) -> None:
    """Modules that are none, too few, unlike or tied to one another are refused."""
    with pytest.raises(ValueError, match=rf"DiLoCo.*{word}"):
        DiLoCo(replicas(), HEAVY_BALL, inner_steps=2)


REFUSED: dict[str, Sequence[Any]] = {
    "inner_steps": (0, -1, 2.0, True, "4"),
    "delay": (-1, 4, 1.0, True),
    "mixing": (1.0, -0.1, math.nan),
    "compression": ("float16", None),
    "fragments": (0, 7, 1.5, True, {}, {"a": "nothing"}, {"a": r"^0\."}, {"a": ".", "b": "."}),
    "restart": ("sometimes", 0, {"1": 2}, {"0": 2, "x": 1}, {"0": "sometimes"}),
    "outer": (0.7, "never"),
    "filter": ("clip", "clip:-1", "clip:x", "clip:inf", "clip:nan", "clip:0", "none:1", "orthogonal:5", "heloco", ""),
    "buffers": ("sum",),
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in REFUSED.items() for value in values])
def test_refusals_name_the_argument(name: str, value: Any) -> None:
    """Each argument outside its range is refused by its name."""
    options = {"outer": HEAVY_BALL, "inner_steps": 4} | {name: value}
    with pytest.raises(ValueError, match=name):
        DiLoCo(network(), **options)
