"""Two processes as replicas of each trainer, and what the integrations refuse.

Run as a program, this file is the two processes.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import trainers
from extras import need
from forked import finish, places
from modules import load
from twophase.base.config import UsageError
from twophase.diloco.communicator import SingleProcess
from twophase.diloco.flat import checksum

for package in ("transformers", "accelerate", "lightning"):
    need(package, "the extras trainer and lightning are not installed")

STEPS = 26
HERE = Path(__file__).parent


def digest(model: torch.nn.Module) -> str:
    return checksum(torch.cat([p.detach().flatten() for p in model.parameters()]))


def worker(folder: Path) -> None:
    """Train as one replica of two with accelerate, interrupted and resumed, then with both Trainers."""
    torch.set_num_threads(1)
    replica, ends = int(os.environ["RANK"]), {}
    local = load(HERE / "test_accelerate.py")
    rounds = []
    for begin, end in ((0, 10), (10, STEPS)):  # step 10 is in the middle of a round
        parts = local.start()
        if begin:
            parts[0].load_state(str(folder / "accelerate"))
        with parts[3]:
            rounds.append(local.train(parts, range(begin, end), replica))
            if not begin:
                parts[0].save_state(str(folder / "accelerate"))
    ends["accelerate"] = digest(parts[1])

    from twophase.integrations.rounds import join_replicas

    assert [join_replicas(), join_replicas()] == [replica, replica]
    local = load(HERE / "test_transformers.py")
    out, callback = folder / f"transformers {replica}", local.make_callback()
    local.make_trainer(out, [callback], replica=replica).train()
    for step in (20, STEPS):  # leaves that of step 10, in the middle of a round
        shutil.rmtree(out / f"checkpoint-{step}")
    trainer = local.make_trainer(out, [local.make_callback(record=folder / "run")], replica=replica)
    trainer.train(resume_from_checkpoint=True)
    ends["transformers"] = digest(trainer.model)
    local = load(HERE / "test_lightning.py")
    ends["lightning"] = digest(local.fit(folder / f"lightning {replica}", [local.make_callback()], 1, replica))
    (folder / f"{replica}.json").write_text(json.dumps(ends))
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="session")
def ends(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """Digests of the weights with which each of two processes ended."""
    folder = tmp_path_factory.mktemp("pair")
    finish(folder, [[__file__, str(folder)]], places(2)[:1])
    assert (folder / "run" / "summary.json").exists()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.dist
@pytest.mark.parametrize(("name", "steps"), [("accelerate", STEPS), ("transformers", STEPS), ("lightning", 10)])
def test_two_processes_are_two_replicas(ends: list[dict[str, str]], name: str, steps: int):
    """Both end with the bits of two replicas in a hand-written loop, though one loop was resumed from mid-round."""
    _, (model, _), _ = trainers.by_hand(steps, replicas=2)
    assert [end[name] for end in ends] == [digest(model)] * 2


# --- refusals -----------------------------------------------------------------------------------------------------


def hf(out: Path, **options: Any) -> None:
    """Train with transformers, where an argument of the Trainer is another."""
    local = load(HERE / "test_transformers.py")
    trainer = local.make_trainer(out, [local.make_callback()], steps=12)
    vars(trainer.args).update(options)
    trainer.train()


def hf_without_state(out: Path) -> None:
    hf(out)
    (out / "checkpoint-10" / "twophase.safetensors").unlink()
    local = load(HERE / "test_transformers.py")
    local.make_trainer(out, [local.make_callback()]).train(resume_from_checkpoint=str(out / "checkpoint-10"))


def pl(out: Path, **options: Any) -> None:
    """Begin with Lightning, where something of the Trainer or the module is another."""
    del out
    trainer: Any = SimpleNamespace(**{"world_size": 1, "global_step": 0, **options})
    module: Any = SimpleNamespace(automatic_optimization=options.get("automatic_optimization", True))
    callback = load(HERE / "test_lightning.py").make_callback()
    callback.setup(trainer, module, "fit")
    callback.on_train_start(trainer, module)


def accelerated(out: Path, kind: str) -> None:
    """Begin with accelerate, where the accelerator is of another kind."""
    del out
    from accelerate import DistributedType

    from twophase.integrations.accelerate import DiLoCo

    accelerator: Any = SimpleNamespace(distributed_type=DistributedType(kind))
    DiLoCo(accelerator, trainers.build(), 4)


def elsewhere(out: Path) -> None:
    """Resume at step 20 where the other replica resumes at step 10."""
    del out

    class Pair(SingleProcess):
        def gather(self, value: Any, kind: Any) -> list[Any]:
            return [20, 10] if value == 20 else super().gather(value, kind)

    callback = load(HERE / "test_transformers.py").make_callback(communicator=Pair())
    model = trainers.build()
    callback.begin(model, trainers.optimizer(model), 20, STEPS)


def joined(out: Path, **options: str) -> None:
    """Join torchrun with these variables."""
    del out
    from twophase.integrations.rounds import join_replicas

    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", **options}.items():
            patch.setenv(name, value)
        join_replicas()


@pytest.mark.parametrize(("visible", "taken"), [("", ""), ("-1", "-1"), ("3,5", "5")])
def test_replicas_may_hide_all_gpus(monkeypatch: pytest.MonkeyPatch, visible: str, taken: str):
    """Two usual ways to stay on the CPU, where more processes than names are none too many; else each takes its own."""
    from twophase.integrations import rounds

    monkeypatch.setattr(rounds.dist, "init_process_group", lambda _: None)
    monkeypatch.setattr(rounds.dist, "get_rank", lambda: 1)
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "CUDA_VISIBLE_DEVICES": visible}.items():
        monkeypatch.setenv(name, value)
    assert rounds.join_replicas() == 1
    assert os.environ["CUDA_VISIBLE_DEVICES"] == taken


@pytest.mark.parametrize(
    ("call", "options", "error", "words"),
    [
        (hf, {"load_best_model_at_end": True}, ValueError, "load_best_model_at_end is True"),
        (hf, {"save_total_limit": 1}, ValueError, "save_total_limit is 1.*give 2 or more"),
        (hf, {"enable_jit_checkpoint": True}, ValueError, "enable_jit_checkpoint and .* leave them out"),
        (
            hf,
            {"_n_gpu": 2},
            ValueError,
            r"torchrun --nproc-per-node 2 and call join_replicas\(\).*CUDA_VISIBLE_DEVICES=0",
        ),
        pytest.param(
            hf_without_state, {}, ValueError, r"checkpoint-10/twophase\.safetensors is missing", marks=pytest.mark.slow
        ),
        (pl, {"world_size": 2}, ValueError, "join_replicas"),
        (pl, {"automatic_optimization": False}, ValueError, "automatic_optimization is False"),
        (pl, {"global_step": 10}, ValueError, "step 10"),
        (accelerated, {"kind": "FSDP"}, ValueError, "distributed_type is FSDP"),
        (accelerated, {"kind": "DEEPSPEED"}, ValueError, "distributed_type is DEEPSPEED"),
        (elsewhere, {}, ValueError, r"steps \[20, 10\]"),
        (joined, {"CUDA_VISIBLE_DEVICES": "3"}, UsageError, "CUDA_VISIBLE_DEVICES is '3'"),
    ],
)
def test_refusals(tmp_path: Path, call: Any, options: dict[str, Any], error: type[Exception], words: str):
    """What would train wrongly is refused by the name of the setting and its value."""
    with pytest.raises(error, match=words):
        call(tmp_path, **options)


if __name__ == "__main__":
    other = os.fork()  # the packages are imported once
    if not other:
        os.environ.update(RANK="1", LOCAL_RANK="1")
    worker(Path(sys.argv[1]))
    assert not other or os.waitpid(other, 0)[1] == 0
    os._exit(0)  # a process that ends with gloo's threads alive may abort, in plain torch too
