"""torchft's own DiLoCo in real processes: our engine's rounds, resumption, kills, and what is refused."""

from __future__ import annotations

import copy
import os
import signal
import sys
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any, cast
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from torch import nn

import trainers
import twophase
from commands import wait_until
from forked import Program, finish
from processes import PATIENCE, lighthouse
from replicas import same_bits
from twophase.diloco.digest import digest, of_optimizer
from twophase.runs.record import read_record

pytest.importorskip("torchft", reason="the extra ft is not installed")

STEPS, STOP = 32, 13
"""Inner steps in all, and before a training is stopped: with two fragments three rounds, and one step more."""


class Replica:
    """One replica: model, inner optimizer, place in the data, torchft's manager as its documentation makes it."""

    def __init__(self, number: int, url: str, *, seed: int = 0, least: int = 2, restart: Any = 3) -> None:
        import torchft

        from twophase.integrations.torchft import diloco

        self.number, self.step, self.model = number, 0, trainers.build()
        with torch.no_grad():
            for p in self.model.parameters():
                p.add_(seed)
        self.inner = trainers.optimizer(self.model)
        self.store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.manager = torchft.Manager(
            pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=60)),
            state_dict=self.save,
            load_state_dict=self.load,
            min_replica_size=least,
            use_async_quorum=False,
            init_sync=False,
            quorum_retries=10,
            replica_id=f"replica_{number}",
            lighthouse_addr=url,
            hostname="127.0.0.1",
            store_addr="127.0.0.1",
            store_port=self.store.port,
            rank=0,
            world_size=1,
        )
        parts, rule = [self.model[0], self.model[2]], trainers.RULE
        self.rounds = diloco(
            self.manager, self.model, self.inner, rule, inner_steps=8, restart=restart, fragments=parts
        )

    def save(self) -> dict[str, Any]:
        """Return what a replica that comes back receives."""
        return {"model": self.model.state_dict(), "inner": self.inner.state_dict(), "step": self.step}

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.inner.load_state_dict(state["inner"])
        self.step = state["step"]

    def train(self, ends: Callable[[], bool]) -> dict[str, Any]:
        """Train until it ends; all that the replica holds then."""
        state: dict[str, Any] = {}
        with self.rounds:
            while not ends():
                trainers.loss(self.model, *trainers.batch(self.step, self.number)).backward()
                self.inner.step()
                self.inner.zero_grad()
                self.step += 1
            state |= copy.deepcopy(self.save()) | {"rounds": copy.deepcopy(self.rounds.state_dict())}
            with self.rounds.anchored():
                state["anchored"] = copy.deepcopy(self.model.state_dict())
        self.manager.shutdown(wait=False)
        return {**state, "agreed": self.model.state_dict()}


def resume(folder: Path, number: int, urls: list[str]) -> None:
    """Train in two parts, the second resumed from a file and recorded."""
    first = Replica(number, urls[0])
    torch.save(first.train(lambda: first.step == STOP), folder / f"stopped {number}.pt")
    rest, state = Replica(number, urls[1], seed=1), torch.load(folder / f"stopped {number}.pt", weights_only=True)
    rest.load(state)
    rest.rounds.load_state_dict(state["rounds"])
    outer = cast("Any", rest.rounds.outers[0])
    outer.register_step_pre_hook(lambda _, words, options: (words, {**options, "measure": True}))
    with twophase.record(folder / f"run {number}", outer, {"inner_steps": 8, "replicas": 2}) as run:

        def ends() -> bool:
            run.log_round(outer.last_round)
            return rest.step == STEPS

        torch.save(rest.train(ends), folder / f"{number}.pt")


def live(folder: Path, number: int, life: int, url: str) -> None:
    """Train until a file says stop, and write after each sync what all replicas must agree on."""
    replica, known = Replica(number, url, seed=life, least=1, restart="test-longer:1"), 0
    lines = (folder / f"{number} {life}.txt").open("w", buffering=1)

    def ends() -> bool:
        nonlocal known
        if (synced := replica.manager.current_step()) > known:
            outers, known = replica.rounds.outers, synced
            anchors = digest([t for anchor in replica.rounds.state_dict()["anchors"] for t in anchor.values()])
            digests = [digits for outer in outers for digits in of_optimizer(outer)]
            restarts = outers[0].param_groups[0]["restarts"]
            print(synced, replica.manager.num_participants(), restarts, anchors, *digests, file=lines)
        return (folder / "stop").exists()

    replica.train(ends)


ENV = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.mark.dist
def test_rounds_are_those_of_our_engine(tmp_path: Path):
    """Stopped in mid-round and resumed from a file, both end with the bits of our engine, and each has its record."""
    with lighthouse(2) as first, lighthouse(2) as second:
        finish(tmp_path, [[__file__, "resume", str(tmp_path), str(n), first, second] for n in range(2)], [ENV] * 2)
    setting = {"inner_steps": 8, "fragments": {"first": "0.", "second": "2."}, "finish": False}
    engine, models, _ = trainers.by_hand(STEPS, 2, **setting)
    ends = [torch.load(tmp_path / f"{number}.pt", weights_only=True) for number in range(2)]
    for number, (end, model) in enumerate(zip(ends, models, strict=True)):
        assert all(same_bits(p, end["model"][name]) for name, p in model.named_parameters())
        for name, a in engine.anchor.items():
            assert same_bits(a, end["anchored"][name])
            assert same_bits(a, end["agreed"][name])
        groups = [outer["param_groups"][0] for outer in end["rounds"]["outers"]]
        assert [(group["rounds"], group["restarts"]) for group in groups] == [(STEPS // 8, 1)] * 2
        run = read_record(tmp_path / f"run {number}")
        assert (run.summary or {})["rounds"] == STEPS // 8
        assert np.isfinite(run.rounds["gain"]).all()
    assert not all(same_bits(p, ends[1]["model"][name]) for name, p in ends[0]["model"].items())


@pytest.mark.dist
def test_a_killed_replica_comes_back(tmp_path: Path):
    """It takes over weights, momentum, counters and the policy's memory; all later rounds are alike."""

    def start(number: int, life: int) -> Any:
        words = [__file__, "live", str(tmp_path), str(number), str(life), url]
        process = Program(words, tmp_path / f"{number}.out", tmp_path / f"{number}.err", ENV)
        stack.callback(process.kill)
        return process

    def syncs(name: str, replicas: int) -> int:
        path = tmp_path / f"{name}.txt"
        return sum(line.split()[1] == str(replicas) for line in path.read_text().splitlines()) if path.exists() else 0

    with lighthouse(1) as url, ExitStack() as stack:
        first, second = start(0, 0), start(1, 0)
        for life in range(1, 3):
            wait_until(lambda name=f"1 {life - 1}": syncs(name, 2) > 4)
            second.kill()
            assert second.wait(PATIENCE) == -signal.SIGKILL
            alone = syncs("0 0", 1)
            if life % 2:  # else it is back before the lighthouse has missed it
                wait_until(lambda alone=alone: syncs("0 0", 1) > alone)
            second = start(1, life)
        wait_until(lambda: syncs("1 2", 2) > 4)
        (tmp_path / "stop").touch()
        assert [process.wait(PATIENCE) for process in (first, second)] == [0, 0]
    lines = defaultdict(list)
    for path in tmp_path.glob("*.txt"):
        is_whole = path.name in ("0 0.txt", "1 2.txt")  # else the survivor may have had to repeat the last sync
        for line in path.read_text().splitlines()[: None if is_whole else -1]:
            lines[line.split()[0]].append(line.split())
    shared = [of_sync for of_sync in lines.values() if len(of_sync) == 2]
    assert len(shared) > 12
    assert all(one == other for one, other in shared)
    assert any(of_sync[0][1] == "1" for of_sync in lines.values())
    assert int(shared[-1][0][2]) > 0


def rounds_of(value: float = 1.0, *, parts: Any = None, outer: Any = trainers.RULE, **setting: Any) -> Any:
    """Rounds over a model of equal weights, in two fragments, below a manager that is none."""
    from twophase.integrations.torchft import diloco

    model = nn.Sequential(*[nn.Linear(3, 3) for _ in range(3)])
    for p in model.parameters():
        nn.init.constant_(p, value)
    manager: Any = MagicMock(**{"_init_sync": False, "_use_async_quorum": False, **setting.pop("manager", {})})
    fragments = parts(model) if parts else [model[:2], model[2:]]
    inner, options = torch.optim.SGD(model.parameters(), lr=0.1), {"inner_steps": 6, "fragments": fragments, **setting}
    return diloco(manager, model, inner, outer, **options)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"manager": {"_init_sync": True}}, "init_sync"),
        ({"manager": {"_use_async_quorum": True}}, "use_async_quorum"),
        ({"manager": {"_user_state_dicts": {}}}, "state_dict"),
        ({"parts": lambda model: [model[0]]}, r"fragments.*1\.weight"),
        ({"parts": lambda model: [model, model[0]]}, "fragments"),
        ({"inner_steps": 7}, "sync_every"),  # by torchft
        ({}, "TORCHFT_USE_BUCKETIZATION"),
    ],
)
def test_refusals(monkeypatch: pytest.MonkeyPatch, setting: dict[str, Any], words: str):
    """Settings with which torchft lets replicas differ are refused by name."""
    monkeypatch.setenv("TORCHFT_USE_BUCKETIZATION", str("TORCHFT" in words))
    with pytest.raises(ValueError, match=words):
        rounds_of(**setting)


@pytest.mark.parametrize(
    ("own", "other"),
    [({}, {"parts": lambda model: [*model]}), ({"parts": lambda model: [*model]}, {}), ({}, {"outer": "adamw"})],
)
def test_a_state_that_does_not_fit_is_refused(own: dict[str, Any], other: dict[str, Any]):
    """A state of other fragments or of another method changes no anchor."""
    rounds = rounds_of(1.0, **own)
    with pytest.raises(ValueError, match=r"fragments|momentum"):
        rounds.load_state_dict(rounds_of(2.0, **other).state_dict())
    assert all(float(p.mean()) == 1.0 for anchor in rounds.state_dict()["anchors"] for p in anchor.values())


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "resume":
        resume(Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
    else:
        live(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
    os._exit(0)  # torchft's threads may outlive the manager
