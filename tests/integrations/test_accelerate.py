"""`DiLoCo` beside accelerate's `LocalSGD`: the contract, its checkpoints, and several models."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import trainers
import twophase
from integrations.contract import SAVE, SETTING, STEPS, Contract, Interrupted

pytest.importorskip("accelerate", reason="the extra trainer is not installed")


def start(parts: int = 1, **options: Any) -> tuple[Any, Any, Any, Any]:
    from accelerate import Accelerator

    from twophase.integrations.accelerate import DiLoCo

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=parts)
    model = trainers.build()
    model, inner = accelerator.prepare(model, trainers.optimizer(model))
    return accelerator, model, inner, DiLoCo(accelerator, model, outer=trainers.RULE, **SETTING, **options)


class TestAccelerate(Contract):
    """The contract."""

    def train(
        self, folder: Path, *, parts: int = 1, replica: int = 0, stop: int = -1, record: Path | None = None
    ) -> Any:
        accelerator, model, inner, rounds = start(parts)
        checkpoint, reports = folder / "accelerate", []
        if checkpoint.exists():
            accelerator.load_state(str(checkpoint))
        begin = rounds.engine.taken
        with suppress(Interrupted), ExitStack() as stack:
            run = stack.enter_context(twophase.record(record, rounds.engine)) if record else None
            stack.enter_context(rounds)
            for step in range(begin, parts * STEPS):
                if step == stop:
                    raise Interrupted
                if step > begin and step % SAVE == 0 and parts == 1:
                    accelerator.save_state(str(checkpoint))
                with accelerator.accumulate(model):
                    accelerator.backward(trainers.loss(model, *trainers.batch(step, replica)))
                    inner.step()
                    inner.zero_grad()
                    reports.append(rounds.step())
                if run is not None:
                    run.log_round(reports[-1], inner_lr=inner.param_groups[0]["lr"])
            if run is not None:
                run.log_round(rounds.finish())
        return accelerator.unwrap_model(model), SimpleNamespace(reports=[*filter(None, reports)])


def test_checkpoints_that_do_not_fit_are_refused(tmp_path: Path):
    """A missing file of a replica, a damaged one, and one of another step are named; the engine has not changed."""
    accelerator, _, _, rounds = start()
    accelerator.save_state(str(tmp_path))
    (path,) = tmp_path.glob("twophase*.pt")
    data, digest = path.read_bytes(), path.with_suffix(".sha256")
    before = digest.read_text()
    rounds.engine.step()
    accelerator.save_state(str(tmp_path))
    for content, word in (
        (None, ""), (data[: len(data) // 2], "damaged"), (data[:-1] + b"?", "damaged"), (data, "inner step"),
    ):  # fmt: skip
        path.unlink() if content is None else path.write_bytes(content)
        digest.write_text(before)
        rest = start()
        with pytest.raises((ValueError, FileNotFoundError, RuntimeError), match=rf"{path.name}.*{word}"):
            rest[0].load_state(str(tmp_path))
        assert rest[3].engine.taken == 0


def test_each_of_two_models_has_its_own_engine(tmp_path: Path):
    """Two engines on one accelerator save and load their own states."""
    from twophase.integrations.accelerate import DiLoCo

    def engines() -> tuple[Any, list[Any]]:
        accelerator, _, _, rounds = start()
        return accelerator, [rounds, DiLoCo(accelerator, accelerator.prepare(torch.nn.Linear(3, 1)), 9)]

    accelerator, rounds = engines()
    rounds[0].step()
    accelerator.save_state(str(tmp_path))
    accelerator, rounds = engines()
    accelerator.load_state(str(tmp_path))
    assert [each.engine.taken for each in rounds] == [1, 0]


@pytest.mark.parametrize("kind", ["FSDP", "DEEPSPEED"])
def test_sharded_models_are_refused(kind: str):
    """Their parameters are not all in this process."""
    from accelerate import DistributedType

    from twophase.integrations.accelerate import DiLoCo

    with pytest.raises(ValueError, match="distributed_type"):
        DiLoCo(SimpleNamespace(distributed_type=DistributedType(kind)), trainers.build(), 4)  # type: ignore[arg-type]
