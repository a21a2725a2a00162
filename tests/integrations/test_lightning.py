"""The callback in the real Trainer of Lightning: a hand-written loop's rounds, resumption, and a record."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import trainers
import twophase
from extras import need
from twophase.runs.folder import ROUNDS, read_lines

need("lightning", "the extra lightning is not installed")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning"),  # Lightning's tips
]
EPOCH, EPOCHS = 10, 3


def regression(manual: bool = False) -> Any:
    """The shared network as a LightningModule."""
    from lightning.pytorch import LightningModule

    class Regression(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = trainers.build()
            self.automatic_optimization = not manual

        def training_step(self, batch: Any, index: int) -> Any:  # noqa: ARG002
            return trainers.loss(self.network, *batch)

        def validation_step(self, batch: Any, index: int) -> None:  # noqa: ARG002
            self.log("val_loss", trainers.loss(self.network, *batch))
            self.log("step", 7.0)  # a usual way to set a logger's axis

        def configure_optimizers(self) -> Any:
            return trainers.optimizer(self)

    return Regression()


class Batches(torch.utils.data.Dataset):
    """The shared batches, whole."""

    def __init__(self, replica: int = 0) -> None:
        self.replica = replica

    def __len__(self) -> int:
        return EPOCH

    def __getitem__(self, index: int) -> Any:
        return trainers.batch(index, self.replica)


def fit(
    out: Path, callbacks: list[Any], epochs: int = EPOCHS, replica: int = 0, resume: Any = None, **options: Any
) -> Any:
    """Train epochs of the shared batches; the module."""
    from lightning.pytorch import Trainer

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = Trainer(
            max_epochs=epochs, accelerator="cpu", devices=1, default_root_dir=out, callbacks=callbacks, logger=False,
            enable_progress_bar=False, enable_model_summary=False, **options,
        )  # fmt: skip
        module, data = regression(), torch.utils.data.DataLoader(Batches(replica), batch_size=None)
        trainer.fit(module, data, data, ckpt_path=resume)
    return module


def make_callback(**options: Any) -> Any:
    from twophase.integrations.lightning import DiLoCoCallback

    return DiLoCoCallback(trainers.RULE, inner_steps=trainers.INNER_STEPS, restart=trainers.RESTART, **options)


@pytest.fixture(autouse=True)
def one_epoch_of_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hand-written loop begins its data anew with each epoch, as Lightning does."""
    monkeypatch.setattr(trainers, "batch", lambda step, replica=0, batch=trainers.batch: batch(step % EPOCH, replica))


@pytest.mark.parametrize("parts", [1, 2])
def test_rounds_are_those_of_a_hand_written_loop(tmp_path: Path, parts: int):
    """Weights and rounds have the bits of the loop in docs/own-loop.md; accumulated batches are no steps."""
    callback = make_callback()
    callback.setup(SimpleNamespace(world_size=2), None, "validate")  # which averages no gradient
    module = fit(tmp_path, [callback], accumulate_grad_batches=parts)
    _, (model,), reports = trainers.by_hand(EPOCH * EPOCHS // parts, parts=parts)
    assert trainers.facts(callback.reports) == trainers.facts(reports)
    assert trainers.same_weights(module, model)


@pytest.mark.parametrize("epochs", [1, 2, EPOCHS])
def test_resumed_is_uninterrupted(tmp_path: Path, epochs: int):
    """Resumed in the middle of a round, at its end, or after all steps, a training ends with the same bits."""
    from lightning.pytorch import Callback

    class Stop(Callback):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
            if trainer.current_epoch == epochs:
                raise RuntimeError("interrupted")

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
            raise RuntimeError("interrupted")

    with pytest.raises(RuntimeError, match="interrupted"):
        fit(tmp_path, [make_callback(), Stop()])
    (checkpoint,) = (tmp_path / "checkpoints").glob("*.ckpt")
    callback = make_callback()
    module = fit(tmp_path, [callback], resume=checkpoint)
    _, (model,), reports = trainers.by_hand(EPOCH * EPOCHS)
    assert trainers.facts(callback.reports) == trainers.facts(reports)[epochs * EPOCH // trainers.INNER_STEPS :]
    assert trainers.same_weights(module, model)


def test_record_is_a_run(tmp_path: Path):
    """`record` writes a standard run with the training loss of each round's last step and the validation loss."""
    callback = make_callback(record=tmp_path / "run")
    fit(tmp_path, [callback])
    run: Any = twophase.load(tmp_path / "run")
    assert [line["checksum"] for line in read_lines(tmp_path / "run" / ROUNDS)] == [
        report.checksum for report in callback.reports
    ]
    assert run.summary["steps"] == EPOCH * EPOCHS
    assert run.summary["validation_loss"] < 1.0
