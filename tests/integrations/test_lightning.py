"""The callback in the real Trainer of Lightning: the contract, and what would train wrongly is refused."""

from __future__ import annotations

import warnings
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.utils.data import DataLoader

import trainers
from extras import need
from integrations.contract import SAVE, SETTING, STEPS, Contract, Interrupted

need("lightning", "the extra lightning is not installed")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning"),  # Lightning's tips
]


def regression() -> Any:
    from lightning.pytorch import LightningModule

    class Regression(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = trainers.build()

        def training_step(self, batch: Any, index: int) -> Any:  # noqa: ARG002
            return trainers.loss(self.network, *batch)

        def validation_step(self, batch: Any, index: int) -> None:  # noqa: ARG002
            self.log("val_loss", trainers.loss(self.network, *batch))
            self.log("step", 7.0)  # a usual way to set a logger's axis

        def configure_optimizers(self) -> Any:
            return trainers.optimizer(self)

    return Regression()


def make_callback(record: Path | None = None) -> Any:
    from twophase.integrations.lightning import DiLoCoCallback

    return DiLoCoCallback(trainers.RULE, record=record, **SETTING)


class TestLightning(Contract):
    """The contract, in epochs of ten batches, for Lightning writes its checkpoints after each."""

    epoch, logged = SAVE, "validation_loss"

    def train(
        self, folder: Path, *, parts: int = 1, replica: int = 0, stop: int = -1, record: Path | None = None
    ) -> Any:
        from lightning.pytorch import Callback, Trainer

        class Stop(Callback):
            def on_train_batch_start(self, trainer: Any, *_: Any, **__: Any) -> None:
                if trainer.global_step == stop:
                    raise Interrupted

        out, callback, module = folder / f"lightning {replica}", make_callback(record), regression()
        data: Any = DataLoader([trainers.batch(step, replica) for step in range(SAVE)], batch_size=None)  # type: ignore[arg-type]
        with warnings.catch_warnings(), suppress(Interrupted):
            warnings.simplefilter("ignore")
            trainer = Trainer(
                max_epochs=parts * STEPS // SAVE, accelerator="cpu", devices=1, accumulate_grad_batches=parts,
                default_root_dir=out, callbacks=[callback, Stop()], logger=False, enable_progress_bar=False,
                enable_model_summary=False,
            )  # fmt: skip
            trainer.fit(module, data, data, ckpt_path=next((out / "checkpoints").glob("*.ckpt"), None))
        return module.network, callback


@pytest.mark.parametrize(
    ("name", "value", "word"),
    [
        ("world_size", 2, "devices"),
        ("automatic_optimization", False, "automatic_optimization"),
        ("global_step", 10, "state"),
    ],
)
def test_refusals(name: str, value: Any, word: str):
    """Averaged gradients, steps that cannot be counted, and a checkpoint without this callback's state."""
    both: Any = SimpleNamespace(
        world_size=1, global_step=0, automatic_optimization=True, estimated_stepping_batches=9, optimizers=[None]
    )
    setattr(both, name, value)
    callback = make_callback()
    callback.setup(both, both, "validate")  # which averages no gradient
    begin = callback.on_train_start if name == "global_step" else partial(callback.setup, stage="fit")
    with pytest.raises(ValueError, match=word):
        begin(both, both)
