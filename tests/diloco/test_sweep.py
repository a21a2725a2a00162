"""The outer round part by part: the same bits as whole, whatever the rule, the policy and the parts."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from rounds import Pair, report_of, shift
from twophase.diloco import fragment, sweep, transfer
from twophase.diloco import sync as sync_module
from twophase.diloco.communicator import Pending
from twophase.diloco.engine import DiLoCo
from twophase.rule import OuterRule

PART = 1 << 12  # elements


class Sum:
    """A sum that is made when it is waited for."""

    bytes_sent = 0

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor

    def wait(self) -> None:
        """Add what the twin has."""
        assert self.tensor is not None, "waited for twice"
        self.tensor.mul_(2)
        self.tensor = None


class Twins(Pair):
    """Two processes that hold the same, whose sums come when they are waited for."""

    def launch_sum(self, tensor: Tensor) -> Pending:
        """Twice the tensor, later."""
        return Sum(tensor)


def model(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Tensors of odd lengths, larger and smaller than a part, one of them transposed."""
    generator = torch.Generator().manual_seed(0)
    module = nn.Module()
    for number, shape in enumerate([(3, 7), (3 * PART + 5,), (33,), (101, 75), (5,)]):
        module.register_parameter(f"p{number}", nn.Parameter(torch.randn(shape, generator=generator).to(dtype)))
    return module


def rounds(way: str, monkeypatch: pytest.MonkeyPatch, *, replicas: int, dtype: torch.dtype, **options: Any) -> Any:
    """What four rounds lead to: reports, anchor, buffers and replicas."""
    with monkeypatch.context() as patch:
        patch.setattr(transfer, "_PART_BYTES", 8 * PART)
        patch.setattr(sweep, "_PART_ELEMENTS", PART)
        patch.setattr(sweep, "SMALL", 1 << 10 if way == "parts" else 1 << 30)
        patch.setattr(fragment, "SMALL", 1 << 30 if way == "few calls" else 0)
        if way == "whole":
            patch.setattr(sync_module, "round_sweep", lambda *_, **__: None)
        models = [model(dtype) for _ in range(replicas)]
        engine = DiLoCo(models, inner_steps=1, communicator=Twins(), **options)
        reports = []
        for number in range(4):
            for index, module in enumerate(models):
                generator = torch.Generator().manual_seed(10 * number + index)
                with torch.no_grad():
                    for p in module.parameters():
                        p.add_(0.1 * torch.randn(p.shape, generator=generator))
            reports.append(report_of(engine))
        state = engine.fragments[0].outer.state
        buffers = [state[p].get("momentum_buffer", torch.zeros(())) for p in engine.anchor.values()]
        trained = [p for module in models for p in module.parameters()]
        return reports, [*engine.anchor.values(), *buffers, *trained], engine


RULES = [
    (OuterRule(0.7, 0.9, nesterov=True), "never"),
    (OuterRule(0.7, 0.9), "2"),
    (OuterRule(3.0, 0.8, nesterov=True, form="ema"), "soft:2:0.2:0.1"),
    (OuterRule(3.0, 0.8, form="ema"), "at:1,3"),
    (OuterRule(1.0, 0.0), "never"),
    (OuterRule(0.7, 0.9), "auto"),
    (OuterRule(0.7, 0.9), "norm:0.5"),
]


@pytest.mark.parametrize(("rule", "restart"), RULES, ids=str)
@pytest.mark.parametrize(("replicas", "dtype"), [(1, torch.float32), (3, torch.float32), (2, torch.bfloat16)])
def test_parts_change_no_bit(
    rule: OuterRule, restart: str, replicas: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
):
    """Anchor, buffers, replicas and digests are the same bits whole, swept, and in parts that arrive one by one."""
    options: dict[str, Any] = {"outer": rule, "restart": restart, "replicas": replicas, "dtype": dtype}
    reports, tensors, engine = rounds("whole", monkeypatch, **options)
    for way in ("swept", "parts", "few calls"):
        swept, swept_tensors, swept_engine = rounds(way, monkeypatch, **options)
        assert all(map(torch.equal, swept_tensors, tensors)), way
        for report, other in zip(swept, reports, strict=True):
            assert (report.checksum, report.restarted, report.round) == (other.checksum, other.restarted, other.round)
            for name in ("pseudo_gradient_norm", "buffer_norm", "cosine", "gain"):
                assert getattr(report, name) == pytest.approx(getattr(other, name), rel=1e-5, abs=1e-6)
        assert swept_engine.fragments[0].digest() == engine.fragments[0].digest()
    if rule == OuterRule(1.0, 0.0) and replicas == 1:  # plain averaging of twins
        assert all(map(torch.allclose, engine.anchor.values(), engine.replicas[0].parameters()))
        numel = engine.fragments[0].layout.numel
        assert reports[0].pseudo_gradient_norm == pytest.approx(0.1 * numel**0.5, rel=0.01)


def test_measured_norms_win_over_the_sweeps(monkeypatch: pytest.MonkeyPatch):
    """Where shards have added up their norms, a sweep of one shard's elements does not take their place."""
    monkeypatch.setattr(sweep, "SMALL", 0)
    engine = DiLoCo(model(), OuterRule(0.7, 0.9), inner_steps=1)
    (whole,) = engine.fragments
    whole.hand_over()
    swept = sweep.round_sweep(whole, None, restore=True, prove=False)
    assert swept is not None
    assert swept.measure
    whole.outer_sgd.step(measure=True, measured=[(4.0, 1.0, 0.0)], sweep=swept)
    assert whole.outer_sgd.last_round[0].pseudo_gradient_norm == 2.0


@pytest.mark.parametrize("arrived", [0, 1])
def test_an_interrupted_sweep_is_refused(arrived: int, monkeypatch: pytest.MonkeyPatch):
    """A partly updated anchor is neither saved nor trained on; loading a checkpoint repairs it."""
    monkeypatch.setattr(sweep, "SMALL", 1 << 10)
    monkeypatch.setattr(transfer, "_PART_BYTES", 8 * PART)
    module = model()
    engine = DiLoCo(module, OuterRule(0.7, 0.9), inner_steps=1, communicator=Twins())
    engine.step()
    saved = copy.deepcopy(engine.state_dict())
    before = [view.clone() for view in engine.anchor.values()]
    waits = []

    def interrupted(self: Sum) -> None:
        waits.append(self)
        if len(waits) > arrived:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Sum, "wait", interrupted)
        shift(module)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    assert all(map(torch.equal, before, engine.anchor.values())) == (arrived == 0)
    for action in (engine.step, engine.finish, engine.state_dict):
        with pytest.raises(ValueError, match="interrupted"):
            action()
    engine.load_state_dict(saved)
    assert all(map(torch.equal, before, engine.anchor.values()))
    assert engine.step() is not None


def test_gaps_do_not_count(monkeypatch: pytest.MonkeyPatch):
    """A buffer whose steps have left -0 between the parameters has the digest of one that was loaded."""
    _, _, engine = rounds(
        "swept", monkeypatch, replicas=1, dtype=torch.float32, outer=OuterRule(0.7, 0.9), restart="soft:2:-0.5:0"
    )
    loaded = DiLoCo(model(), OuterRule(0.7, 0.9), restart="soft:2:-0.5:0", inner_steps=1, communicator=Twins())
    loaded.load_state_dict(copy.deepcopy(engine.state_dict()))
    assert loaded.fragments[0].digest() == engine.fragments[0].digest()


def test_a_hook_of_the_outer_optimizer_sees_the_whole_gradient(monkeypatch: pytest.MonkeyPatch):
    """With a hook before its step, an outer optimizer is given gradients that are whole, and its changes count."""
    monkeypatch.setattr(sweep, "SMALL", 0)
    module = model()
    engine = DiLoCo(module, OuterRule(1.0, 0.0), inner_steps=1, communicator=Twins())

    def halve(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for p in optimizer.param_groups[0]["params"]:
            p.grad.mul_(0.5)

    engine.outer.register_step_pre_hook(halve)
    before = [p.detach().clone() for p in module.parameters()]
    shift(module)
    engine.step()
    for p, old in zip(module.parameters(), before, strict=True):
        torch.testing.assert_close(p.detach(), old + 0.5)


def test_what_a_hook_makes_of_the_anchor_counts():
    """A hook after the outer step, such as a decay, changes what the replicas are given and what is compared."""
    module = model()
    engine = DiLoCo(module, OuterRule(1.0, 0.9), inner_steps=1, communicator=Twins())

    def decay(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        with torch.no_grad():
            torch._foreach_mul_(optimizer.param_groups[0]["params"], 0.5)

    engine.outer.register_step_post_hook(decay)
    for _ in range(2):
        shift(module)
        report = engine.step()
        assert report is not None
        assert report.checksum == engine.checksum()
        for p, anchor in zip(module.parameters(), engine.anchor.values(), strict=True):
            assert torch.equal(p, anchor)


def test_what_looks_at_a_step_sees_that_of_an_engine():
    """Hooks, a scheduler and a profiler notice each outer step, though without them it goes past torch's wrapper."""
    module = model()
    engine = DiLoCo(module, OuterRule(1.0, 0.9), inner_steps=1, communicator=Twins())
    seen: list[str] = []
    hooks = [
        engine.outer.register_step_post_hook(lambda *_: seen.append("own")),
        register_optimizer_step_pre_hook(lambda *_: seen.append("all")),
        register_optimizer_step_post_hook(lambda *_: seen.append("all")),
    ]
    for hook in hooks:
        engine.step()
        hook.remove()
    assert seen == ["all", "own", "all", "all", "all", "all"]
    with torch.profiler.profile() as profiler:
        engine.step()
    assert "Optimizer.step#OuterSGD.step" in {event.key for event in profiler.key_averages()}
    schedule = torch.optim.lr_scheduler.ExponentialLR(engine.outer, 0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of a scheduler before its optimizer
        engine.step()
        schedule.step()
    assert len(seen) == 6
