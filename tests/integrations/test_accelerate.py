"""`DiLoCo` beside accelerate's `LocalSGD`: a hand-written loop's rounds, resumption, and a record."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import trainers
import twophase
from twophase.runs.folder import ROUNDS, read_lines

pytest.importorskip("accelerate", reason="the extra trainer is not installed")

STEPS = 26


def start(parts: int = 1, **options: Any) -> tuple[Any, ...]:
    """Accelerator, prepared model and optimizer, and the rounds."""
    from accelerate import Accelerator

    from twophase.integrations.accelerate import DiLoCo

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=parts)
    model = trainers.build()
    model, inner = accelerator.prepare(model, trainers.optimizer(model))
    setting = {"inner_steps": trainers.INNER_STEPS, "outer": trainers.RULE, "restart": trainers.RESTART, **options}
    return accelerator, model, inner, DiLoCo(accelerator, model, **setting)


def train(parts: tuple[Any, ...], steps: range, replica: int = 0) -> list[Any]:
    """The loop of the documentation, over these batches."""
    accelerator, model, inner, rounds = parts
    reports = []
    for step in steps:
        with accelerator.accumulate(model):
            accelerator.backward(trainers.loss(model, *trainers.batch(step, replica)))
            inner.step()
            inner.zero_grad()
            reports.append(rounds.step())
    return [report for report in reports if report is not None]


@pytest.mark.parametrize("count", [1, 2])
def test_rounds_are_those_of_a_hand_written_loop(count: int):
    """Weights and rounds have the bits of the loop in docs/own-loop.md; accumulated batches are no inner steps."""
    parts = start(count)
    with parts[3]:
        reports = train(parts, range(count * STEPS))
    _, (model,), expected = trainers.by_hand(STEPS, parts=count)
    assert trainers.facts(reports) == trainers.facts(expected)[:-1]  # the block's end took the last one
    assert trainers.same_weights(parts[1], model)


@pytest.mark.parametrize("at", [10, 20])
def test_resumed_is_uninterrupted(tmp_path: Path, at: int):
    """What `save_state` wrote, in a round's middle or at its end, goes on with the same bits."""
    parts = start()
    with parts[3]:
        train(parts, range(at))
        parts[0].save_state(str(tmp_path))
    rest = start()
    rest[0].load_state(str(tmp_path))
    with rest[3]:
        train(rest, range(at, STEPS))
    _, (model,), _ = trainers.by_hand(STEPS)
    assert trainers.same_weights(rest[1], model)


def test_more_replicas_than_were_saved_are_refused(tmp_path: Path):
    """A process without a replica's state is told how many were saved; nothing of the engine has changed."""
    start()[0].save_state(str(tmp_path))
    (tmp_path / "twophase_replica_0.safetensors").rename(tmp_path / "twophase_replica_1.safetensors")
    rest = start()
    with pytest.raises(ValueError, match=r"replica_0\.safetensors is missing: replicas saved: 1, now: 1;"):
        rest[0].load_state(str(tmp_path))
    with pytest.raises(ValueError, match=r"each replica's own state; use accelerator\.load_state"):
        start()[3].load_state_dict(rest[3].state_dict())


def test_a_damaged_replica_is_refused(tmp_path: Path):
    """A file that was cut short or altered is named, with the remedy."""
    start()[0].save_state(str(tmp_path))
    path = tmp_path / "twophase_replica_0.safetensors"
    data = path.read_bytes()
    for damaged in (data[: len(data) // 2], data[:-1] + bytes([data[-1] ^ 1])):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"replica_0\.safetensors is damaged \(.*\); put it back"):
            start()[0].load_state(str(tmp_path))


def test_files_of_two_steps_are_refused(tmp_path: Path):
    """A folder that was written over, and of which a kill left one replica's older file, is refused before it loads."""
    parts, rest = start(), start()
    for at in (range(5), range(5, 9)):
        older = (tmp_path / "twophase_replica_0.safetensors").read_bytes() if at.start else b""
        train(parts, at)
        parts[0].save_state(str(tmp_path))
    (tmp_path / "twophase_replica_0.safetensors").write_bytes(older)
    with pytest.raises(ValueError, match=r"replica_0\.safetensors is of inner step 5, and the engine's state of 9"):
        rest[0].load_state(str(tmp_path))
    assert rest[3].engine.taken == 0


def test_each_of_two_models_has_its_own_replicas(tmp_path: Path):
    """Two engines on one accelerator save and load their own weights."""
    from twophase.integrations.accelerate import DiLoCo

    def build() -> tuple[Any, list[torch.nn.Module], list[DiLoCo]]:
        accelerator, model, _, rounds = start()
        other = accelerator.prepare(torch.nn.Linear(3, 1))
        return accelerator, [model, other], [rounds, DiLoCo(accelerator, other, inner_steps=4)]

    accelerator, models, rounds = build()
    for number, (model, each) in enumerate(zip(models, rounds, strict=True), start=1):
        with torch.no_grad():
            for p in model.parameters():
                p.add_(number)
        each.step()
    accelerator.save_state(str(tmp_path))
    accelerator, others, rounds = build()
    accelerator.load_state(str(tmp_path))
    assert all(map(trainers.same_weights, models, others))


def test_record_and_disabled(tmp_path: Path):
    """`twophase.record` of its engine is a standard run; with enabled=False the loop trains alone."""
    parts = start()
    with twophase.record(parts[3].engine, tmp_path, inner=parts[2]), parts[3]:
        train(parts, range(STEPS))
    run: Any = twophase.load(tmp_path)
    assert len(read_lines(tmp_path / ROUNDS)) == run.summary["rounds"] == 7
    alone = start(enabled=False)
    with alone[3]:
        assert train(alone, range(STEPS)) == []
    assert alone[3].engine is None
    assert not trainers.same_weights(alone[1], parts[1])
