"""The loop trains whatever keeps the protocol of a task: here a linear regression, without a word of language."""

from __future__ import annotations

import gc
import json
import weakref
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from trained import stop_after
from twophase.base.config import UsageError, with_values
from twophase.diloco.group import SingleProcess
from twophase.runs.folder import SUMMARY, RunFolder, read_lines
from twophase.tasks.lm.config import TrainConfig
from twophase.training import device
from twophase.training.preflight import preflight
from twophase.training.task import PlainStep, step_of
from twophase.training.train import train
from twophase.training.trainer import RESERVED, Trainer

TRUTH = torch.tensor([[1.0, -2.0, 3.0]])
SHORT = {"steps": 12, "inner_steps": 4, "outer.restart": "never"}


@dataclass(frozen=True)
class Regression:
    """Fit a line to points that lie on it."""

    points: int = 16

    def model(self, seed: int) -> nn.Module:
        """Three weights."""
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return nn.Linear(3, 1, bias=False)

    def batch(self, seed: int, step: int, replica: int) -> Any:
        """An array and a tensor in a dictionary."""
        generator = torch.Generator().manual_seed(1000 * seed + 10 * step + replica)
        inputs = torch.randn(self.points, 3, generator=generator)
        return {"inputs": inputs.numpy(), "targets": inputs @ TRUTH.T}

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Mean squared error."""
        return (model(batch["inputs"]) - batch["targets"]).square().mean()

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Error of the weights, and a number that no other task has."""
        error = float((next(model.parameters()).detach() - TRUTH).square().mean())
        return {"loss": error, "perplexity": 1.0, "largest": float(TRUTH.max())}

    def describe(self) -> dict[str, Any]:
        """The number of points."""
        return {"fingerprint": f"regression-{self.points}"}


@pytest.fixture
def config() -> TrainConfig:
    """A run that converges, with a restart policy."""
    values = {"inner.lr": 0.1, "outer.restart": "3", "log_every": 7}
    return with_values(TrainConfig(steps=60, inner_steps=6, checkpoint_every=2), values)


def run(config: TrainConfig, path: Path, task: Any = None, **options: Any) -> dict[str, Any]:
    with RunFolder.claim(path, config) as folder:
        return train(task or Regression(), config, folder, **options)


def test_another_task_is_trained(config: TrainConfig, tmp_path: Path) -> None:
    """It learns; its own numbers are columns; the log has its speed; a stopped run goes on to the same bits."""
    whole = run(config, tmp_path / "whole")
    assert whole["validation_loss"] < 0.1 < Regression().evaluate(Regression().model(0))["loss"]
    assert (whole["largest"], whole["tokens"], whole["rounds"]) == (3.0, 0, 10)
    assert "batches_per_second" in read_lines(tmp_path / "whole" / "steps.jsonl")[0]
    lines = [*read_lines(tmp_path / "whole" / "metrics.jsonl"), json.loads((tmp_path / "whole" / SUMMARY).read_text())]
    assert set().union(*lines) - {"perplexity", "largest"} == RESERVED
    assert run(config, tmp_path / "parts", should_stop=stop_after(21))["exit_reason"] == "stopped"
    assert run(config, tmp_path / "parts")["checksum"] == whole["checksum"]


class Points(NamedTuple):
    """A batch by names."""

    inputs: Any
    targets: Any


def test_a_batch_of_named_tuples_keeps_its_kind() -> None:
    """They are tuples, whose classes take their values one by one."""
    batch = {"points": [Points(np.ones((3, 2)), (torch.ones(3),))]}
    (points,) = device.moved(batch, torch.device("cpu"))["points"]
    assert (type(points), points.inputs.shape, points.targets[0].shape) == (Points, (3, 2), (3,))


def test_the_plain_step_is_autograd(config: TrainConfig) -> None:
    """Without a step of its own a task is differentiated as a whole, and its loss has no bound but a finite number."""
    task, device = Regression(), torch.device("cpu")
    compute = step_of(task, device, 1, SingleProcess())
    assert isinstance(compute, PlainStep)
    trainer = Trainer(task, replace(config, replicas=1), SingleProcess())
    assert trainer.loss_bound == float("inf")
    model, batch = trainer.replicas[0].model, {"inputs": torch.ones(2, 3), "targets": torch.zeros(2, 1)}
    (weight,) = model.parameters()
    expected = 2 * weight.detach().sum() * torch.ones(1, 3)
    assert compute.gradients(model, batch) == task.loss(model, batch)
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad, expected)


class Experts(Regression):
    """Two experts, of which replica 1 does not meet the second before step 8."""

    def model(self, seed: int) -> nn.Module:
        """Return both."""
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return nn.ModuleList([nn.Linear(3, 1, bias=False) for _ in range(2)])

    def batch(self, seed: int, step: int, replica: int) -> Any:
        """Return a batch, and how many experts it takes."""
        return super().batch(seed, step, replica) | {"experts": torch.tensor(2 if replica == 0 or step >= 8 else 1)}

    def loss(self, model: Any, batch: Any) -> Tensor:
        """Compute the error of the experts' sum."""
        outputs = sum(expert(batch["inputs"]) for expert in model[: int(batch["experts"])])
        return (outputs - batch["targets"]).square().mean()


def test_a_parameter_that_one_replica_has_not_met(config: TrainConfig, tmp_path: Path) -> None:
    """Its optimizer has no moments of what the outer step has moved already; the run goes on all the same."""
    config = with_values(config, SHORT)
    assert run(config, tmp_path, Experts(), should_stop=stop_after(6))["exit_reason"] == "stopped"
    assert run(config, tmp_path, Experts())["exit_reason"] == "finished"


class DualAveraging(torch.optim.Optimizer):
    """Momentum without a buffer of that name, as of MADGRAD; a setting that only Adam has; a count in the group.

    The momentum grows in the first steps, as Muon's often does.
    """

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": 0.8, "amsgrad": False, "count": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Move towards the first weights less the sum of gradients."""
        del closure
        for group in self.param_groups:
            group["count"] += 1
            group["momentum"] = min(0.9, group["momentum"] + 0.01)
            for p in group["params"]:
                memory = self.state[p]
                memory.setdefault("first", p.clone())
                self.state["calls"] = torch.tensor([group["count"]])  # type: ignore[index] # as MADGRAD's "k"
                memory.setdefault("sum", torch.zeros_like(p)).add_(p.grad)
                p.lerp_(memory["first"] - group["lr"] * memory["sum"], 1 - group["momentum"])


def test_an_inner_optimizer_of_another_kind_is_resumed(
    config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may remember other things than torch's, and change its settings: the bits are those of a run in one go."""
    config = with_values(config, SHORT | {"inner.lr": 0.01})
    inner = lambda _, model, config: DualAveraging(model.parameters(), lr=config.lr)  # noqa: E731
    monkeypatch.setattr(Regression, "inner", inner, raising=False)
    whole = run(config, tmp_path / "whole")
    assert run(config, tmp_path / "parts", should_stop=stop_after(6))["exit_reason"] == "stopped"
    assert run(config, tmp_path / "parts")["checksum"] == whole["checksum"]


class Frozen(Regression):
    """A large part that does not learn, and a small one that does."""

    size = 3

    def model(self, seed: int) -> nn.Module:
        """Return both parts."""
        body = nn.Linear(self.size, self.size, bias=False).requires_grad_(requires_grad=False)
        return nn.ModuleDict({"body": body, "head": super().model(seed)})

    def loss(self, model: Any, batch: Any) -> Tensor:
        """Compute the error of the part that learns."""
        return super().loss(model["head"], batch)


def test_frozen_weights_need_neither_a_fragment_nor_moments(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine does not cut them, and no optimizer has a buffer for them."""
    preflight(with_values(config, {"sync.fragments": ["all=head"]}), Frozen())
    monkeypatch.setattr(Frozen, "size", 1 << 10)
    monkeypatch.setattr(device, "machine_bytes", lambda: 2 * 4 * (1 << 20) + (1 << 19))
    preflight(config, Frozen())
    monkeypatch.setattr(device, "machine_bytes", lambda: 4 * (1 << 20))
    with pytest.raises(UsageError, match="need at least"):
        preflight(config, Frozen())


def test_a_run_that_is_over_holds_no_memory(config: TrainConfig) -> None:
    """Without the garbage collector, which comes by when it likes: on a GPU the next run may need the room."""
    gc.disable()
    try:
        trainer = Trainer(Regression(), config, SingleProcess())
        model = weakref.ref(trainer.replicas[0].model)
        del trainer
        assert model() is None
    finally:
        gc.enable()
