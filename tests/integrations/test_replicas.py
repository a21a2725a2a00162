"""Two processes as replicas of each trainer; run as a program, this file is the two processes."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import trainers
from extras import need
from forked import finish, places
from twophase.diloco.digest import digest
from twophase.diloco.group import SingleProcess
from twophase.errors import UsageError

for package in ("transformers", "accelerate", "lightning"):
    need(package, "the extras trainer and lightning are not installed")

from integrations.contract import SAVE, SETTING, Contract  # noqa: E402
from integrations.test_accelerate import TestAccelerate as Accelerate  # noqa: E402
from integrations.test_lightning import TestLightning as Lightning  # noqa: E402
from integrations.test_transformers import TestTransformers as Transformers  # noqa: E402

TRAINERS: list[type[Contract]] = [Accelerate, Transformers, Lightning]
"""The first one goes by the variables of torchrun, which the others must not see."""


def worker(folder: Path) -> None:
    """Train as one replica of two with each of them, interrupted in the middle of a round and resumed."""
    from twophase.integrations.rounds import join_replicas

    torch.set_num_threads(1)
    replica, ends = int(os.environ["RANK"]), []
    for kind in TRAINERS:
        kind().train(folder, replica=replica, stop=SAVE + 3)
        model, _ = kind().train(folder, replica=replica, record=folder / f"run {kind.__name__}")
        ends.append(digest([*model.parameters()]))
        assert [join_replicas(), join_replicas()] == [replica, replica]
    (folder / f"{replica}.json").write_text(json.dumps(ends))
    torch.distributed.destroy_process_group()


@pytest.mark.dist
def test_two_processes_are_two_replicas(tmp_path: Path):
    """Both end with the bits of two replicas in a hand-written loop, though they were resumed from mid-round."""
    finish(tmp_path, [[__file__, str(tmp_path)]], places(2)[:1])
    expected = [digest([*kind().by_hand(replicas=2)[0][0].parameters()]) for kind in TRAINERS]
    assert [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)] == [expected] * 2
    assert all((tmp_path / f"run {kind.__name__}" / "summary.json").exists() for kind in TRAINERS)


@pytest.mark.parametrize(("visible", "taken"), [("", ""), ("-1", "-1"), ("3,5", "5"), ("3", None)])
def test_each_replica_takes_its_gpu(monkeypatch: pytest.MonkeyPatch, visible: str, taken: str | None):
    """The one at its place among those that are visible; two usual ways to hide all of them stay as they are."""
    from twophase.integrations import rounds

    monkeypatch.setattr(rounds.dist, "init_process_group", lambda _: None)
    monkeypatch.setattr(rounds.dist, "get_rank", lambda: 1)
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "CUDA_VISIBLE_DEVICES": visible}.items():
        monkeypatch.setenv(name, value)
    if taken is None:
        with pytest.raises(UsageError, match="CUDA_VISIBLE_DEVICES"):
            rounds.join_replicas()
    else:
        assert rounds.join_replicas() == 1
        assert os.environ["CUDA_VISIBLE_DEVICES"] == taken


def test_replicas_that_resume_from_different_steps_are_refused():
    """A kill between two replicas' checkpoints leaves them so."""
    from twophase.integrations.rounds import Rounds

    class Pair(SingleProcess):
        def gather_json(self, value: Any) -> list[Any]:
            return [value, {**value, "inner steps taken": 10}]

    model = trainers.build()
    rounds = Rounds(trainers.RULE, group=Pair(), **SETTING)
    with pytest.raises(ValueError, match="inner steps taken"):
        rounds.begin(model, trainers.optimizer(model), 20, 30, {"engine": {}, "residuals": {}})


if __name__ == "__main__":
    other = os.fork()  # the packages are imported once
    if not other:
        os.environ.update(RANK="1", LOCAL_RANK="1")
    worker(Path(sys.argv[1]))
    assert not other or os.waitpid(other, 0)[1] == 0
    os._exit(0)  # a process that ends with gloo's threads alive may abort, in plain torch too
