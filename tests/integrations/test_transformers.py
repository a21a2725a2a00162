"""The callback in the real Trainer of transformers: the contract, and what would train wrongly is refused."""

from __future__ import annotations

import gc
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import trainers
from integrations.contract import SAVE, SETTING, STEPS, Contract, Interrupted

pytest.importorskip("transformers", reason="the extra trainer is not installed")
pytest.importorskip("accelerate", reason="the extra trainer is not installed")

pytestmark = pytest.mark.slow


class Regression(nn.Module):
    """The shared network, with the loss where the Trainer looks for it."""

    def __init__(self) -> None:
        super().__init__()
        self.network = trainers.build()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": trainers.loss(self.network, x, labels)}


def make(out: Path, *, stop: int = -1, replica: int = 0, record: Path | None = None, **options: Any) -> Any:
    """A Trainer of the shared network over the shared batches, in their order, and its callback."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from twophase.integrations.transformers import DiLoCoCallback

    class Stop(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
            if state.global_step == stop:
                raise Interrupted

    gc.freeze()  # each training has all objects collected, and those of the libraries are many
    model, callback = Regression(), DiLoCoCallback(trainers.RULE, record=record, **SETTING)
    inner = trainers.optimizer(model)
    arguments = TrainingArguments(
        output_dir=str(out), per_device_train_batch_size=8, max_grad_norm=0.0, save_steps=SAVE, logging_steps=5,
        use_cpu=True, report_to="none", disable_tqdm=True, **{"max_steps": STEPS, **options},
    )  # fmt: skip
    batches = [trainers.batch(step, replica) for step in range(2 * STEPS + 4)]
    data: Any = [{"x": x, "labels": y} for both in batches for x, y in zip(*both, strict=True)]
    schedule = torch.optim.lr_scheduler.LambdaLR(inner, lambda _: 1.0)
    callbacks = [callback, Stop()]
    trainer = Trainer(model, arguments, train_dataset=data, callbacks=callbacks, optimizers=(inner, schedule))
    trainer._get_train_sampler = lambda *_, **__: torch.utils.data.SequentialSampler(data)  # type: ignore[method-assign]
    return trainer, callback


class TestTransformers(Contract):
    """The contract."""

    logged = "train_loss"

    def train(
        self, folder: Path, *, parts: int = 1, replica: int = 0, stop: int = -1, record: Path | None = None
    ) -> Any:
        out = folder / f"transformers {replica}"
        trainer, callback = make(out, stop=stop, replica=replica, record=record, gradient_accumulation_steps=parts)
        with suppress(Interrupted):
            trainer.train(resume_from_checkpoint=any(out.glob("checkpoint-*")))
        return trainer.model.network, callback


@pytest.mark.parametrize(("name", "value"), [("load_best_model_at_end", True), ("save_total_limit", 1), ("_n_gpu", 2)])
def test_settings_of_the_trainer_are_refused(tmp_path: Path, name: str, value: Any):
    """Rounds that end from older weights, checkpoints without the engine's state, averaged gradients."""
    trainer, _ = make(tmp_path)
    vars(trainer.args)[name] = value
    with pytest.raises(ValueError, match=name if name[0] != "_" else "GPU"):
        trainer.train()


def test_checkpoints_that_do_not_fit_are_refused(tmp_path: Path):
    """The Trainer itself would go on with a fresh engine or optimizer, or with an engine of other weights."""
    make(tmp_path / "whole", max_steps=SAVE)[0].train()
    make(tmp_path / "other", max_steps=SAVE, replica=1)[0].train()
    for word, file in {"state": "twophase.pt", "optimizer": "optimizer.pt", "output_dir": ""}.items():
        shutil.copytree(tmp_path / "whole", tmp_path / word)
        folder = tmp_path / (word if file else "other") / f"checkpoint-{SAVE}"
        (folder / (file or "README.md")).unlink(missing_ok=True)
        with pytest.raises(ValueError, match=word):
            make(tmp_path / word)[0].train(resume_from_checkpoint=str(folder))
