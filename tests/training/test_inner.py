"""Inner optimizers by name, and a task's own: reduced to plain loops, with groups under one schedule."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from toytask import Toy
from trained import trainer_of
from twophase.config import update
from twophase.errors import UsageError
from twophase.runs.config import InnerConfig
from twophase.tasks.lm.config import ModelConfig, TrainConfig
from twophase.tasks.lm.model import Llama
from twophase.training.inner import MuonAdamW, hidden_matrices, inner_optimizer


class Double(Toy):
    """In float64."""

    def model(self, seed: int) -> nn.Module:
        return super().model(seed).double()

    def batch(self, seed: int, step: int, replica: int) -> tuple[Tensor, Tensor]:
        x, y = super().batch(seed, step, replica)
        return x.double(), y.double()


def plain(config: TrainConfig, model: nn.Module) -> list[Any]:
    """The optimizers of a loop without replicas, with the constants written out."""
    inner, parameters = config.inner, list(model.parameters())
    shared: dict[str, Any] = {"lr": inner.lr, "weight_decay": 0.1}
    if inner.method == "sgd":
        return [torch.optim.SGD(parameters, momentum=inner.momentum, **shared)]
    if inner.method == "schedule-free":
        schedulefree = pytest.importorskip("schedulefree", reason="the extra schedulefree is not installed")
        return [schedulefree.AdamWScheduleFree(parameters, **shared)]
    hidden = parameters.pop(2)
    muon = torch.optim.Muon([hidden], momentum=0.9, adjust_lr_fn="match_rms_adamw", **shared)
    return [muon, torch.optim.AdamW(parameters, **shared)]


@pytest.mark.parametrize(
    ("method", "values"),
    [
        ("sgd", {"inner.momentum": 0.0}),
        ("sgd", {"inner.momentum": 0.9, "inner.clip_norm": 0.01}),
        # Muon computes in bfloat16, which makes much of a rounding: one round, whose end is the only one.
        ("muon", {"inner_steps": 30}),
        ("schedule-free", {}),
    ],
)
def test_one_replica_is_the_plain_optimizer(method: str, values: dict[str, Any]) -> None:
    """With outer learning rate 1 and no momentum, one replica walks as a plain loop does, up to rounding."""
    common = {"inner.method": method, "inner.schedule": "constant", "inner.warmup": 0.0, "inner.lr": 0.02}
    common |= {"replicas": 1, "steps": 30, "inner_steps": 7}
    config, task = update(TrainConfig(), common | values), Double()
    trainer, model = trainer_of(config, task), task.model(0)
    optimizers = plain(config, model)
    for step in range(30):
        trainer.inner_step()
        trainer.synchronize()
        for optimizer in optimizers:
            getattr(optimizer, "train", lambda: None)()
        task.loss(model, task.batch(0, step, 0)).backward()
        if config.inner.clip_norm:
            assert nn.utils.clip_grad_norm_(model.parameters(), config.inner.clip_norm) > config.inner.clip_norm
        for optimizer in optimizers:
            optimizer.step()
            getattr(optimizer, "eval", lambda: None)()
            optimizer.zero_grad()
    for name, weight in model.named_parameters():
        torch.testing.assert_close(trainer.engine.anchor[name], weight.detach(), rtol=1e-12, atol=1e-13)


def test_the_base_iterate_moves_along_with_the_average() -> None:
    """Schedule-free: what replaces the average by the anchor moves the point of the gradient by the same vector."""
    pytest.importorskip("schedulefree", reason="the extra schedulefree is not installed")
    points = []
    for shift in (0.0, 3.0):
        weight = nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
        inner: Any = inner_optimizer(nn.ParameterList([weight]), InnerConfig(method="schedule-free", weight_decay=0.0))
        for _ in range(4):
            inner.train()
            weight.grad = torch.ones_like(weight)
            inner.step()
            inner.eval()
        weight.data += shift
        inner.train()
        points.append(torch.stack((weight.detach(), inner.state[weight]["z"])))
    torch.testing.assert_close(points[1] - points[0], torch.full((2, 2), 3.0, dtype=torch.float64))


class Reader(nn.Module):
    """A language model whose head has no telling name; with `tied`, the table itself."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 4)
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)
        self.out = nn.Linear(4, 11, bias=False)
        if tied:
            self.out.weight = self.table.weight


SMALL = ModelConfig(layers=1, hidden_size=8, intermediate_size=8, heads=1)
LAYER = [f"blocks.0.{name}" for name in ("query_key_value", "output", "gate_up", "down")]


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: Llama(SMALL, 96, seed=0), LAYER),
        (lambda: Llama(replace(SMALL, tie_embeddings=True), 96, seed=0), LAYER),
        (lambda: Reader(False), ["up.weight", "down.weight"]),
        (lambda: Reader(True), ["up.weight", "down.weight"]),
        (lambda: Toy().model(0), ["hidden.weight"]),
        (lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 2)), []),
    ],
)
def test_hidden_matrices(make: Callable[[], nn.Module], names: list[str]) -> None:
    """Muon has the matrices between embedding and head; tables, heads, tied or not, norms and kernels are AdamW's."""
    model = make()
    places = {id(parameter): name for name, parameter in model.named_parameters()}
    assert [places[id(parameter)] for parameter in hidden_matrices(model)] == names
    if names:
        groups = [group["params"] for group in MuonAdamW(model, InnerConfig(method="muon")).param_groups]
        assert sorted(id(parameter) for group in groups for parameter in group) == sorted(places)


def test_what_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """No hidden matrix, or no package: one message that names the option."""
    monkeypatch.setitem(sys.modules, "schedulefree", None)
    for method in ("muon", "schedule-free"):
        with pytest.raises(UsageError, match=r"--inner\.method"):
            inner_optimizer(nn.Linear(2, 1), InnerConfig(method=method))  # type: ignore[arg-type]
