"""Inner optimizers by name, and a task's own: resumed, reduced to plain loops, with groups under one schedule."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from commands import outcome
from trained import run, run_in_parts, stop_after
from twophase.base.config import UsageError, with_values
from twophase.diloco.group import SingleProcess
from twophase.runs.folder import RunFolder
from twophase.tasks.lm.config import ModelConfig, TrainConfig
from twophase.tasks.lm.model import Llama
from twophase.tasks.lm.task import LanguageTask
from twophase.training.config import InnerConfig, inner_lr
from twophase.training.inner import MuonAdamW, check_inner, hidden_matrices, inner_optimizer
from twophase.training.train import train
from twophase.training.trainer import Trainer

METHODS: dict[str, dict[str, Any]] = {
    "sgd": {"inner.momentum": 0.5},
    "muon": {},
    "schedule-free": {"inner.schedule": "constant"},
}


def valued(config: TrainConfig, method: str, **more: Any) -> TrainConfig:
    return with_values(config, {"inner.method": method, **METHODS.get(method, {}), **more})


def make_tower() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 6, bias=False), nn.Tanh(), nn.Linear(6, 2))


@dataclass(frozen=True)
class Tower:
    """Regression with a small network in float64, whose optimizer may be the task's own."""

    def model(self, seed: int) -> nn.Module:
        """Two hidden matrices and a head."""
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return make_tower().double()

    def batch(self, seed: int, step: int, replica: int) -> Tensor:
        """Eight random inputs."""
        generator = torch.Generator().manual_seed(1000 * seed + 10 * step + replica)
        return torch.randn(8, 3, generator=generator, dtype=torch.float64)

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        """Mean squared error."""
        return (model(batch) - batch[:, :2].sin()).square().mean()

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Loss of one batch."""
        return {"loss": float(self.loss(model, self.batch(7, 7, 7)))}

    def describe(self) -> dict[str, Any]:
        """One name."""
        return {"fingerprint": "tower"}


class Grouped(Tower):
    """With two learning rates, under an optimizer whose moments have other shapes than their parameters."""

    def inner(self, model: nn.Module, config: InnerConfig) -> Optimizer:
        """The head learns ten times as fast as the rest."""
        first, *rest = reversed(list(model.parameters()))
        groups = [{"params": rest}, {"params": [first], "lr": 10 * config.lr}]
        return torch.optim.Adafactor(groups, lr=config.lr)


# -------------------------------------------------------------------------------------------------- stopped and resumed


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_resumed_equals_uninterrupted(short_run: TrainConfig, tmp_path: Path, method: str) -> None:
    """Stopped inside and at the end of rounds and resumed, a run leaves the same bytes, numbers and log lines."""
    config = valued(short_run, method)
    run(config, tmp_path / "whole")
    run_in_parts(config, tmp_path / "parts", (3, 12, 20))
    assert outcome(tmp_path / "parts") == outcome(tmp_path / "whole")


@pytest.mark.parametrize("method", ["adamw", *METHODS])
def test_a_setting_that_another_version_lacks(short_run: TrainConfig, method: str) -> None:
    """A saved param group without one of its entries is loaded with the value that the run has."""
    config = valued(short_run, method)
    trainer = Trainer(LanguageTask(config), config, SingleProcess())
    trainer.inner_step()
    replica = trainer.replicas[0]
    state = replica.state_dict()
    groups = state["inner"]["param_groups"]
    for key in groups[0].keys() - {"params"}:
        without = state["inner"] | {"param_groups": [{k: v for k, v in group.items() if k != key} for group in groups]}
        replica.load_state_dict(state | {"inner": without})
        loaded = replica.inner.state_dict()["param_groups"]
        assert [group.get(key) for group in loaded] == [group.get(key) for group in groups]


# ----------------------------------------------------------------------------------------------------------- reductions


def plain(config: TrainConfig, model: nn.Module) -> list[Any]:
    """The optimizers of a loop without replicas, with the constants written out."""
    inner, parameters = config.inner, list(model.parameters())
    shared: dict[str, Any] = {"lr": inner.lr, "weight_decay": 0.1}
    if inner.method == "sgd":
        return [torch.optim.SGD(parameters, momentum=inner.momentum, **shared)]
    if inner.method == "schedule-free":
        schedulefree = pytest.importorskip("schedulefree", reason="the extra schedulefree is not installed")
        return [schedulefree.AdamWScheduleFree(parameters, **shared)]
    first, bias, second, head, last = parameters
    muon = torch.optim.Muon([first, second], momentum=0.9, adjust_lr_fn="match_rms_adamw", **shared)
    return [muon, torch.optim.AdamW([bias, head, last], **shared)]


@pytest.mark.parametrize(
    ("method", "values"),
    [
        ("sgd", {"inner.momentum": 0.0}),
        ("sgd", {"inner.momentum": 0.9}),
        ("sgd", {"inner.momentum": 0.9, "inner.clip_norm": 0.01}),
        # Muon computes in bfloat16, which makes much of a rounding: one round, whose end is the only one.
        ("muon", {"inner_steps": 30}),
        ("schedule-free", {}),
    ],
)
def test_one_replica_is_the_plain_optimizer(method: str, values: dict[str, Any]) -> None:
    """With outer learning rate 1 and no momentum, one replica walks as a plain loop does, up to rounding."""
    common = {"inner.schedule": "constant", "inner.warmup": 0.0}
    common |= {"inner.lr": 0.02, "replicas": 1, "steps": 30, "inner_steps": 7}
    config = valued(TrainConfig(), method, **common | values)
    task, trainer = Tower(), Trainer(Tower(), config, SingleProcess())
    model = task.model(0)
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
        inner = inner_optimizer(nn.ParameterList([weight]), InnerConfig(method="schedule-free", weight_decay=0.0))
        for _ in range(4):
            inner.train()  # pyright: ignore[reportAttributeAccessIssue]
            weight.grad = torch.ones_like(weight)
            inner.step()
            inner.eval()  # pyright: ignore[reportAttributeAccessIssue]
        weight.data += shift
        inner.train()  # pyright: ignore[reportAttributeAccessIssue]
        points.append(torch.stack((weight.detach(), inner.state[weight]["z"])))
    torch.testing.assert_close(points[1] - points[0], torch.full((2, 2), 3.0, dtype=torch.float64))


# --------------------------------------------------------------------------------------------------------------- groups


def test_groups_keep_their_ratios(tmp_path: Path) -> None:
    """Under the schedule each group has its own learning rate times one factor, before and after a stop."""
    config = with_values(TrainConfig(steps=20, inner_steps=5, checkpoint_every=1), {"inner.lr": 0.01})
    trainer = Trainer(Grouped(), config, SingleProcess())
    for step in range(20):
        trainer.inner_step()
        slow, fast = (group["lr"] for group in trainer.replicas[0].inner.param_groups)
        assert (slow, fast) == (inner_lr(config, step), pytest.approx(10 * inner_lr(config, step), rel=1e-15))

    def run_task(folder: str, **options: Any) -> dict[str, Any]:
        with RunFolder.claim(tmp_path / folder, config) as claimed:
            return train(Grouped(), config, claimed, **options)

    assert run_task("parts", should_stop=stop_after(7))["exit_reason"] == "stopped"
    assert run_task("parts")["checksum"] == run_task("whole")["checksum"]


# ------------------------------------------------------------------------------------------------------- which matrices


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
        (make_tower, ["0.weight", "2.weight"]),
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
    """No hidden matrix, or no package: one message that names the remedy."""
    with pytest.raises(UsageError, match=r"--inner\.method adamw"):
        check_inner(nn.Linear(2, 1), InnerConfig(method="muon"))
    monkeypatch.delitem(sys.modules, "twophase.training.schedule_free", raising=False)
    monkeypatch.setitem(sys.modules, "schedulefree", None)
    with pytest.raises(UsageError, match=r"twophase\[schedulefree\]"):
        check_inner(nn.Linear(2, 1), InnerConfig(method="schedule-free"))
