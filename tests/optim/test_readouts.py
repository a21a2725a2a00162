"""Readouts: averages of the anchors, in the optimizer, the engine and a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from commands import SMALL, outcome
from outers import counters, flat, give, parameters, randoms, run
from policies import ALL, SCHEDULED
from replicas import drift, network, same_bits, start
from trained import run_in_parts
from twophase.base.config import UsageError, from_tree, load_yaml
from twophase.cli.main import main
from twophase.diloco.engine import DiLoCo
from twophase.optim.methods import from_torch
from twophase.optim.optimizer import OuterOptimizer
from twophase.optim.outer import OuterSGD
from twophase.shelf.outer import outer
from twophase.tasks.lm.config import DataConfig, ModelConfig, TrainConfig
from twophase.tasks.lm.task import LanguageTask
from twophase.training import device
from twophase.training.config import OuterConfig
from twophase.training.preflight import preflight
from twophase.training.trainer import Trainer

READOUTS = ["last", "ema", "ema:decay=0.0", "tail:rounds=4", "tail:rounds=1", "tail:rounds=99"]


def averaged(readout: str, path: Any) -> Any:
    """The average of some places, from first to last, as one weighted mean."""
    name, _, value = readout.replace("ema", "ema:decay=0.9").removesuffix(":decay=0.0").partition("=")
    count = len(path)
    if readout == "ema:decay=0.0" or name == "last":
        weights = np.eye(count)[-1]
    elif name.startswith("ema"):
        weights = 0.9 ** np.arange(count)[::-1]
    else:  # the mean of the first ones; then each new place takes a part of the whole
        rounds = int(value)
        weights = np.ones(count) / min(rounds, count)
        keep = 1 - 1 / rounds
        ages = np.arange(count)[::-1]
        if count > rounds:
            weights = np.where(ages < count - rounds, keep**ages / rounds, keep ** (count - rounds) / rounds)
    return (weights[:, None] * np.asarray(path)).sum(axis=0) / weights.sum()


@pytest.mark.parametrize("readout", READOUTS)
def test_averages(readout: str):
    """After each round the readout is the weighted mean of all anchors so far; the anchors are those without it."""
    (x,), (other,) = (parameters(0, [(5,)]) for _ in range(2))
    optimizer = OuterOptimizer([x], outer("nesterov", readout=readout), restart=3)  # type: ignore[arg-type]
    twin = OuterOptimizer([other], "nesterov", restart=3)
    assert same_bits(optimizer.readout(x), x)
    path = []
    for number in range(10):
        run(optimizer, range(number, number + 1))
        run(twin, range(number, number + 1))
        assert same_bits(x, other)
        path.append(x.detach().numpy().copy())
        np.testing.assert_allclose(optimizer.readout(x).numpy(), averaged(readout, path), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("readout", READOUTS[1:])
@pytest.mark.parametrize("method", ["memoryless", from_torch(torch.optim.Adam, lr=0.1)], ids=["memoryless", "torch"])
@pytest.mark.parametrize("requires_grad", [True, False])
def test_a_parameter_that_rests_is_averaged_all_the_same(requires_grad: bool, method: Any, readout: str):
    """A round in which it has no gradient counts: its anchor stood still there. An anchor needs no `requires_grad`."""
    resting, moving = (p.requires_grad_(requires_grad) for p in parameters(0, [(5,), (5,)]))
    optimizer = OuterOptimizer([resting, moving], outer(method, readout=readout))
    path = []
    # Without `requires_grad` an anchor looks frozen until its first gradient, which therefore comes in round 1.
    turn = 1 if requires_grad else 0
    for number in range(10):
        resting.grad = torch.ones_like(resting) if number % 3 == turn else None
        moving.grad = torch.ones_like(moving)
        optimizer.step()
        path.append(resting.detach().numpy().copy())
        np.testing.assert_allclose(optimizer.readout(resting).numpy(), averaged(readout, path), rtol=1e-12, atol=1e-12)


def test_averages_of_16_bits_are_float32():
    """Small steps of a bfloat16 parameter's average are not rounded away."""
    (x,) = parameters(0, [(5,)], torch.bfloat16)
    optimizer = OuterOptimizer([x], outer("memoryless", lr=0.1, readout="tail:rounds=99"))
    run(optimizer, range(8))
    average = optimizer.readout(x)
    assert average.dtype == torch.float32
    assert not torch.equal(average, average.bfloat16().float())


@pytest.mark.parametrize("method", ["sgd", "gpa", "schedule-free", "adamw"])
@pytest.mark.parametrize("fragments", [1, 3])
def test_the_engine_lends_the_readout(method: str, fragments: int):
    """`anchored(readout=True)` shows the average of the anchors, inside a round too; the replica comes back."""
    readout = "tail:rounds=3" if method in ("sgd", "adamw") else "last"
    go = start(outer(method, readout=readout), fragments=fragments)
    with go.engine.anchored(readout=True) as model:  # before any round: the anchor
        assert all(map(same_bits, model.parameters(), go.engine.anchor.values()))
    go.go(range(27))  # four rounds and a half
    before = [p.detach().clone() for p in go.models[1].parameters()]
    with go.engine.anchored(1, readout=True) as model:
        values = dict(model.named_parameters())
        for fragment in go.engine.fragments:
            optimizer: Any = fragment.outer
            for name, a in fragment.named:
                assert same_bits(values[name].detach(), optimizer.readout(a))
                assert not same_bits(values[name].detach(), a)
    assert all(map(same_bits, go.models[1].parameters(), before))
    with go.engine.anchored(1) as model:
        assert all(map(same_bits, model.parameters(), [go.engine.anchor[name] for name, _ in model.named_parameters()]))


def test_16_bit_replicas_show_the_rounded_average():
    """A bfloat16 replica is lent the engine's float32 average in its own type."""
    model = network(0, torch.bfloat16)
    engine = DiLoCo(model, outer("nesterov", readout="ema"), inner_steps=2)
    for step in range(8):
        drift(model, step, 0)
        engine.step()
    optimizer: Any = engine.outer
    with engine.anchored(readout=True) as lent:
        for p, a in zip(lent.parameters(), engine.anchor.values(), strict=True):
            assert same_bits(p, optimizer.readout(a).bfloat16())


@pytest.mark.parametrize("policy", [*ALL, *SCHEDULED])
def test_a_readout_changes_no_round(policy: str):
    """Under every restart policy, those that take steps of their own included, a readout leaves every bit as it is."""
    params, others = (parameters(0, [(3, 5), (7,)]) for _ in range(2))
    names = ("loss", "inner_lr", "progress")
    plain = OuterSGD(params, 0.3, 0.9, nesterov=True, restart=policy, signals=names)
    averaging = outer("nesterov", lr=0.3, readout="ema")
    average = OuterOptimizer(others, averaging, restart=policy, signals=names)
    for number in range(14):
        noise = randoms(number, [(3, 5), (7,)])
        for x, optimizer in ((params, plain), (others, average)):
            give(x, [0.3 * p.detach() + g for p, g in zip(x, noise, strict=True)])
            signals = {"loss": float(flat(x) @ flat(x)), "inner_lr": 1 / (1 + number), "progress": number / 14}
            optimizer.step(signals=signals, measure=True)
        assert same_bits(flat(params), flat(others))
        assert average.last_round == plain.last_round
    assert counters(average) == counters(plain)


def test_memory_for_averages_is_asked_first(monkeypatch: pytest.MonkeyPatch):
    """A run whose outer buffers do not fit beside everything else is refused before it begins, a readout's included."""
    data = DataConfig(sequence_length=16, batch_size=4, validation_windows=8)
    config = TrainConfig(model=ModelConfig(layers=2, hidden_size=64, intermediate_size=96), data=data)
    task = LanguageTask(config)
    numel = sum(p.numel() for p in task.model(0).parameters())
    # Of each of two replicas weights, gradient and AdamW's moments; anchor, pseudo-gradient and momentum buffer.
    monkeypatch.setattr(device, "machine_bytes", lambda: 4 * numel * (2 * 4 + 3))
    preflight(config, task)
    for outer_config in (OuterConfig(readout="ema"), OuterConfig(method="adamw"), OuterConfig(method="gpa")):
        with pytest.raises(UsageError, match="memory"):
            preflight(replace(config, outer=outer_config), task)


@pytest.mark.slow
def test_a_run_evaluates_and_exports_the_average(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """`--outer.readout` trains as without it; what it evaluates and exports is the average, resumed bit for bit."""
    anchors: dict[str, list[Any]] = {}
    end_round = Trainer.end_round

    def spy(self: Trainer, report: Any) -> dict[str, Any]:
        for name, a in self.engine.anchor.items():
            anchors.setdefault(name, []).append(a.flatten().double().numpy().copy())
        return end_round(self, report)

    monkeypatch.setattr(Trainer, "end_round", spy)
    words = ["train", *SMALL, *"--steps 13 --inner-steps 3 --evaluate-every 1 --outer.restart 2 --out".split()]
    assert main([*words, str(tmp_path / "plain")]) == 0
    anchors.clear()
    assert main([*words, str(tmp_path / "average"), "--outer.readout", "tail:rounds=3"]) == 0
    monkeypatch.undo()
    plain, average = (outcome(tmp_path / name) for name in ("plain", "average"))
    assert plain["summary"]["checksum"] == average["summary"]["checksum"]  # of the anchor
    assert plain["metrics"][0] == average["metrics"][0]
    assert plain["metrics"][1] != average["metrics"][1]
    weights = load_file(tmp_path / "average" / "weights.safetensors")
    for name, path in anchors.items():
        mean = averaged("tail:rounds=3", path)
        np.testing.assert_allclose(weights[name].flatten().double().numpy(), mean, rtol=1e-5, atol=1e-7)
    assert main(["export", str(tmp_path / "average"), str(tmp_path / "out")]) == 0
    assert "the readout tail:rounds=3 after" in capsys.readouterr().out
    config = from_tree(TrainConfig, load_yaml(tmp_path / "average" / "config.yaml"))
    assert config.outer.readout == "tail:rounds=3"
    task = LanguageTask(config)
    model = task.model(0)
    model.load_state_dict(weights)
    assert task.evaluate(model)["loss"] == pytest.approx(average["summary"]["validation_loss"], rel=1e-12)
    run_in_parts(config, tmp_path / "resumed", [4, 9])
    assert outcome(tmp_path / "resumed")["weights"] == average["weights"]
