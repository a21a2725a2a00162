"""The callback in the real Trainer of transformers: a hand-written loop's rounds, resumption, and a record."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import trainers
import twophase
from twophase.runs.folder import METRICS, ROUNDS, read_lines

pytest.importorskip("transformers", reason="the extra trainer is not installed")
pytest.importorskip("accelerate", reason="the extra trainer is not installed")

STEPS = 26


class Regression(nn.Module):
    """The shared network, with the loss where the Trainer looks for it."""

    def __init__(self) -> None:
        super().__init__()
        self.network = trainers.build()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return the loss of a batch."""
        return {"loss": trainers.loss(self.network, x, labels)}


def make_trainer(out: Path, callbacks: list[Any], *, steps: int = STEPS, replica: int = 0, **options: Any) -> Any:
    """A Trainer of the shared network over the shared batches, in their order, with a checkpoint every 10 steps."""
    from transformers import Trainer, TrainingArguments

    gc.freeze()  # each training has all objects collected, and those of the libraries are many
    model = Regression()
    inner = trainers.optimizer(model)
    arguments = TrainingArguments(
        output_dir=str(out), max_steps=steps, per_device_train_batch_size=8, max_grad_norm=0.0, save_steps=10,
        logging_steps=5, use_cpu=True, report_to="none", disable_tqdm=True, **options,
    )  # fmt: skip
    rows = [(x, y) for step in range(64) for x, y in zip(*trainers.batch(step, replica), strict=True)]
    schedule = torch.optim.lr_scheduler.LambdaLR(inner, lambda _: 1.0)
    data: Any = [{"x": x, "labels": y} for x, y in rows]
    trainer = Trainer(model, arguments, train_dataset=data, callbacks=callbacks, optimizers=(inner, schedule))
    trainer._get_train_sampler = lambda *_, **__: torch.utils.data.SequentialSampler(data)  # type: ignore[method-assign]
    return trainer


def make_callback(**options: Any) -> Any:
    from twophase.integrations.transformers import DiLoCoCallback

    setting = {"inner_steps": trainers.INNER_STEPS, "restart": trainers.RESTART, **options}
    return DiLoCoCallback(trainers.RULE, **setting)


def interrupt(at: int) -> Any:
    """A callback that ends a training like a Ctrl-C before a step."""
    from transformers import TrainerCallback

    class Interrupt(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
            if state.global_step == at:
                raise KeyboardInterrupt

    return Interrupt()


@pytest.mark.slow
@pytest.mark.parametrize("parts", [1, 2])
def test_rounds_are_those_of_a_hand_written_loop(tmp_path: Path, parts: int):
    """Weights and rounds have the bits of the loop in docs/own-loop.md, gradient accumulation included."""
    callback = make_callback()
    trainer = make_trainer(tmp_path, [callback], gradient_accumulation_steps=parts)
    trainer.train()
    _, (model,), reports = trainers.by_hand(STEPS, parts=parts)
    assert trainers.facts(callback.reports) == trainers.facts(reports)
    assert trainers.same_weights(trainer.model, model)


@pytest.mark.slow
@pytest.mark.parametrize("at", [13, 21])
def test_resumed_is_uninterrupted(tmp_path: Path, at: int):
    """A Trainer resumed from its last checkpoint, in a round's middle or at its end, ends with the same bits."""
    make = lambda *more: make_trainer(tmp_path, [rest, *more])  # noqa: E731
    rest = make_callback()
    with pytest.raises(KeyboardInterrupt):
        make(interrupt(at)).train()
    rest = make_callback()
    resumed = make()
    resumed.train(resume_from_checkpoint=True)
    _, (model,), reports = trainers.by_hand(STEPS)
    assert trainers.facts(rest.reports) == trainers.facts(reports)[at // 10 * 10 // 4 :]
    assert trainers.same_weights(resumed.model, model)


@pytest.mark.slow
def test_resumed_at_the_end_adds_no_step(tmp_path: Path):
    """A kill after the last checkpoint: the Trainer resumes with a step beyond the end, which changes nothing."""
    _, (model,), reports = trainers.by_hand(STEPS)
    make_trainer(tmp_path, [make_callback()]).train()
    for _ in range(2):
        rest = make_callback()
        resumed = make_trainer(tmp_path, [rest], save_strategy="steps")
        resumed.train(resume_from_checkpoint=True)
        assert trainers.same_weights(resumed.model, model)
        assert trainers.facts(rest.reports) in (trainers.facts(reports)[-1:], [])


@pytest.mark.slow
def test_record_is_a_run(tmp_path: Path):
    """`record` writes a standard run, an interrupted one goes on in its folder, and losses come from the Trainer.

    As in a notebook, the callback of the interrupted training is alive meanwhile, and gives its folder up.
    """
    folder = tmp_path / "run"
    first = make_trainer(tmp_path / "out", [make_callback(record=folder), interrupt(13)])
    with pytest.raises(KeyboardInterrupt):
        first.train()
    assert not (folder / "summary.json").exists()
    make_trainer(tmp_path / "out", [make_callback(record=folder)]).train(resume_from_checkpoint=True)
    assert first.callback_handler.callbacks
    run: Any = twophase.load(folder)
    _, _, reports = trainers.by_hand(STEPS)
    assert [line["checksum"] for line in read_lines(folder / ROUNDS)] == [report.checksum for report in reports]
    lines = read_lines(folder / METRICS)
    assert [line["step"] for line in lines if "train_loss" in line] == [5, 10, 15, 20, 25]
    assert {line["inner_lr"] for line in lines if "inner_lr" in line} == {0.02}
    assert run.summary["steps"] == STEPS


@pytest.mark.slow
def test_a_checkpoint_without_optimizer_is_refused(tmp_path: Path):
    """The Trainer would go on with fresh moments and the schedule's beginning, without a word."""
    make_trainer(tmp_path, [make_callback()], steps=10, save_only_model=True).train()
    with pytest.raises(ValueError, match=r"checkpoint-10 has no optimizer\.pt.*save_only_model=False"):
        make_trainer(tmp_path, [make_callback()]).train(resume_from_checkpoint=True)


@pytest.mark.slow
def test_an_engine_of_another_run_is_refused(tmp_path: Path):
    """Resumed from a checkpoint that does not lie in output_dir, where another run has one of the same step."""
    for name, scale in (("a", 1.0), ("b", 2.0)):
        trainer = make_trainer(tmp_path / name, [make_callback()], steps=10)
        with torch.no_grad():
            for p in trainer.model.parameters():
                p.mul_(scale)
        trainer.train()
    again = make_trainer(tmp_path / "b", [make_callback()])
    with pytest.raises(ValueError, match=r"belongs to other weights.*set output_dir to the folder"):
        again.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-10"))
