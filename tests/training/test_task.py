"""The loop trains whatever keeps the protocol of a task, without a word of language."""

from __future__ import annotations

import gc
import json
import weakref
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from commands import outcome
from toytask import Toy
from trained import run, trainer_of
from twophase.config import require, update
from twophase.errors import UsageError
from twophase.files import read_jsonl
from twophase.runs.config import inner_lr
from twophase.tasks.lm.config import TrainConfig
from twophase.training.distributed import to_device

VALUES = {"inner.lr": 0.05, "outer.method": "nesterov", "outer.restart": "3", "log_every": 7}
CONFIG = update(TrainConfig(steps=60, inner_steps=6), VALUES)
SHORT = update(CONFIG, {"steps": 12, "inner_steps": 4})


class Experts(Toy):
    """Two experts, of which replica 1 does not meet the second before step 8."""

    def model(self, seed: int) -> nn.Module:
        return nn.ModuleList([super().model(seed), super().model(seed + 1)])

    def batch(self, seed: int, step: int, replica: int) -> Any:
        return super().batch(seed, step, replica), torch.tensor(2 if replica == 0 or step >= 8 else 1)

    def loss(self, model: Any, batch: Any) -> Tensor:
        (inputs, targets), number = batch
        return (sum(expert(inputs) for expert in model[: int(number)]) - targets).square().mean()

    def evaluate(self, model: Any) -> dict[str, float]:
        return {"loss": self.loss(model, self.batch(0, 10**6, 0)).item()}


class Frozen(Toy):
    """A part that does not learn, and the rest, which does."""

    def model(self, seed: int) -> nn.Module:
        model = super().model(seed)
        model.get_submodule("embedding").requires_grad_(requires_grad=False)
        return model


class Grouped(Toy):
    """With two learning rates, under an optimizer whose moments have other shapes than their parameters."""

    def inner(self, model: nn.Module, config: Any) -> torch.optim.Optimizer:
        """The head's bias learns ten times as fast as the rest."""
        first, *rest = reversed(list(model.parameters()))
        return torch.optim.Adafactor([{"params": rest}, {"params": [first], "lr": 10 * config.lr}], lr=config.lr)


def test_another_task_is_trained(tmp_path: Path) -> None:
    """It learns; the log has its speed; there are no tokens."""
    summary = run(CONFIG, tmp_path, Toy())
    assert summary["validation_loss"] < 0.8 * Toy().evaluate(Toy().model(0))["loss"]
    assert (summary["tokens"], summary["rounds"]) == (0, 10)
    assert "batches_per_second" in read_jsonl(tmp_path / "steps.jsonl")[0]
    assert json.loads((tmp_path / "env.json").read_text())["corpus"]["fingerprint"] == "toy-4"


@pytest.mark.parametrize("kind", [Experts, Frozen, Grouped])
def test_unusual_tasks_are_resumed(tmp_path: Path, kind: type[Toy]) -> None:
    """A parameter that one replica has not met, frozen weights, optimizers of other kinds: the bits of one go."""
    run(SHORT, tmp_path / "whole", kind())
    assert run(SHORT, tmp_path / "parts", kind(), asked_at=6)["exit_reason"] == "stopped"
    run(SHORT, tmp_path / "parts", kind())
    assert outcome(tmp_path / "parts") == outcome(tmp_path / "whole")


class Little(Toy):
    """A task whose data are enough for ten steps."""

    def check_data(self, steps: int) -> None:
        require(steps <= 10, "steps", steps, "at most 10, or with --repeat")


def test_few_data() -> None:
    """A run that needs more data than there is is refused, unless they may repeat."""
    with pytest.raises(UsageError, match="--repeat"):
        trainer_of(SHORT, Little())
    trainer_of(update(SHORT, {"steps": 10}), Little())
    trainer_of(update(SHORT, {"repeat": True}), Little())


def test_groups_keep_their_ratios() -> None:
    """Under the schedule each group has its own learning rate times one factor."""
    trainer = trainer_of(SHORT, Grouped())
    for step in range(12):
        trainer.inner_step()
        slow, fast = (group["lr"] for group in trainer.replicas[0].inner.param_groups)
        assert (slow, fast) == (inner_lr(SHORT, step), pytest.approx(10 * inner_lr(SHORT, step), rel=1e-15))


class Points(NamedTuple):
    """A batch by names."""

    inputs: Any
    targets: Any


def test_a_batch_of_named_tuples_keeps_its_kind() -> None:
    """They are tuples, whose classes take their values one by one."""
    (points,) = to_device({"points": [Points(np.ones((3, 2)), (torch.ones(3),))]}, torch.device("cpu"))["points"]
    assert (type(points), points.inputs.shape, points.targets[0].shape) == (Points, (3, 2), (3,))


def test_a_run_that_is_over_holds_no_memory() -> None:
    """Without the garbage collector, which comes by when it likes: on a GPU the next run may need the room."""
    gc.disable()
    try:
        trainer = trainer_of(SHORT, Toy())
        model = weakref.ref(trainer.replicas[0].model)
        del trainer
        assert model() is None
    finally:
        gc.enable()
