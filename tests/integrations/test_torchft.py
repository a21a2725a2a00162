"""torchft's own DiLoCo in real processes: our engine's rounds, resumption, healing, and what is refused.

Run as a program, this file is one replica group.
"""

from __future__ import annotations

import contextlib
import copy
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import pytest
import torch
from torch import nn

import trainers
import twophase
from forked import Program
from processes import lighthouse
from replicas import same_bits
from twophase.diloco.engine import DiLoCo

pytest.importorskip("torchft", reason="the extra ft is not installed")

TESTS = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": TESTS}
STEPS, STOP = 32, 13
"""Inner steps in all, and before a training is stopped: with two fragments three rounds, and one step more."""


class Replica:
    """One replica group: model, inner optimizer and place in the data."""

    def __init__(self, number: int, seed: int = 0) -> None:
        self.number, self.step = number, 0
        self.model = trainers.build()
        with torch.no_grad():
            for p in self.model.parameters():
                p.add_(seed)
        self.inner = trainers.optimizer(self.model)

    def save(self) -> dict[str, Any]:
        """Return what a replica that comes back receives."""
        return {"model": self.model.state_dict(), "inner": self.inner.state_dict(), "step": self.step}

    def load(self, state: dict[str, Any]) -> None:
        """Take it over."""
        self.model.load_state_dict(state["model"])
        self.inner.load_state_dict(state["inner"])
        self.step = state["step"]

    def manager(self, lighthouse: str, store: torch.distributed.TCPStore) -> Any:
        """Make torchft's manager as its documentation does."""
        import torchft

        return torchft.Manager(
            pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=60)),
            state_dict=self.save,
            load_state_dict=self.load,
            min_replica_size=2,
            use_async_quorum=False,
            init_sync=False,
            quorum_retries=10,
            replica_id=f"replica_{self.number}",
            lighthouse_addr=lighthouse,
            hostname="127.0.0.1",
            store_addr="127.0.0.1",
            store_port=store.port,
            rank=0,
            world_size=1,
        )

    def train(
        self, lighthouse: str, until: Callable[[Any], bool], state: dict[str, Any] | None = None, folder: Any = None
    ) -> dict[str, Any]:
        """Train with two fragments until the manager has come so far; all that the replica holds then."""
        from twophase.integrations.torchft import diloco

        store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        manager, fragments = self.manager(lighthouse, store), [self.model[0], self.model[2]]
        ends: dict[str, Any] = {}
        with contextlib.ExitStack() as stack:
            stack.callback(manager.shutdown, wait=False)
            rounds = diloco(
                manager, self.model, self.inner, trainers.RULE, inner_steps=8, restart=3, fragments=fragments
            )
            if state is not None:
                self.load(state)
                rounds.load_state_dict(state["rounds"])
            if folder is not None:
                setting = {"inner_steps": 8, "replicas": 2}
                stack.enter_context(twophase.record(cast("Any", rounds.outers[0]), folder, setting, inner=self.inner))
            with rounds:
                while not until(manager):
                    trainers.loss(self.model, *trainers.batch(self.step, self.number)).backward()
                    self.inner.step()
                    self.inner.zero_grad()
                    self.step += 1
                ends["live"] = copy.deepcopy(self.save()) | {"rounds": rounds.state_dict()}
                with rounds.anchored():
                    ends["anchored"] = copy.deepcopy(self.model.state_dict())
        return {**ends, "agreed": self.model.state_dict()}


def worker(folder: Path, number: int, urls: list[str]) -> None:
    """Train in two parts, the second resumed from a file; then lose one replica and let it come back."""
    torch.set_num_threads(1)
    first = Replica(number)
    torch.save(first.train(urls[0], lambda _: first.step == STOP), folder / f"stopped {number}.pt")
    saved = torch.load(folder / f"stopped {number}.pt", weights_only=True)["live"]
    rest = Replica(number, seed=1)  # other weights, which the file replaces
    whole = rest.train(urls[1], lambda _: rest.step == STEPS, saved, folder / f"run {number}")
    torch.save(whole, folder / f"resumed {number}.pt")
    healed = Replica(number)
    if number == 1:
        healed.train(urls[2], lambda _: healed.step == STOP)
        healed = Replica(number, seed=1)  # comes back with nothing
    torch.save(healed.train(urls[2], lambda group: group.current_step() == 8), folder / f"healed {number}.pt")


# --- processes ------------------------------------------------------------------------------------------------------


def run(commands: list[list[str]], logs: list[Path]) -> None:
    """Run programs side by side until all have ended well."""
    processes: list[Any] = []
    try:
        for words, log in zip(commands, logs, strict=True):
            processes.append(Program(words, log, log, ONE_THREAD))
        codes = [process.wait(timeout=120) for process in processes]
        assert codes == [0] * len(codes), "\n".join(log.read_text()[-3000:] for log in logs)
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of two replicas' files."""
    folder = tmp_path_factory.mktemp("torchft")
    with contextlib.ExitStack() as stack:
        urls = [stack.enter_context(lighthouse(2)) for _ in range(3)]
        commands = [[__file__, str(folder), str(number), *urls] for number in range(2)]
        run(commands, [folder / "0.log", folder / "1.log"])
    return folder


def load(results: Path, name: str) -> list[dict[str, Any]]:
    return [torch.load(results / f"{name} {number}.pt", weights_only=True) for number in range(2)]


pytestmark = pytest.mark.dist


def test_rounds_are_those_of_our_engine(results: Path):
    """Stopped in mid-round and resumed from a file, both end with the bits of our engine in two fragments."""
    models: list[nn.Module] = [trainers.build() for _ in range(2)]
    inners = [trainers.optimizer(model) for model in models]
    engine = DiLoCo(models, trainers.RULE, restart=3, inner_steps=8, fragments={"first": "0.", "second": "2."})
    for step in range(STEPS):
        for number, (model, inner) in enumerate(zip(models, inners, strict=True)):
            trainers.loss(model, *trainers.batch(step, number)).backward()
            inner.step()
            inner.zero_grad()
        engine.step()
    ends = load(results, "resumed")
    for end, model in zip(ends, models, strict=True):
        assert all(same_bits(p, end["live"]["model"][name]) for name, p in model.named_parameters())
        for name, a in engine.anchor.items():
            assert same_bits(a, end["anchored"][name])
            assert same_bits(a, end["agreed"][name])
        groups = [outer["param_groups"][0] for outer in end["live"]["rounds"]["outers"]]
        assert [(group["rounds"], group["restarts"]) for group in groups] == [(STEPS // 8, 1)] * 2
    assert not all(same_bits(p, ends[1]["live"]["model"][name]) for name, p in ends[0]["live"]["model"].items())


def test_a_healed_replica_agrees(results: Path):
    """A replica that comes back with other weights takes over weights, buffers and counters, and goes on alike."""
    first, second = load(results, "healed")
    assert all(same_bits(p, second["agreed"][name]) for name, p in first["agreed"].items())
    for one_state, other in zip(first["live"]["rounds"]["outers"], second["live"]["rounds"]["outers"], strict=True):
        assert one_state["param_groups"] == other["param_groups"]
        for key, state in one_state["state"].items():
            assert same_bits(state["momentum_buffer"], other["state"][key]["momentum_buffer"])


def test_record_is_a_run(results: Path):
    """`twophase.record` of an outer optimizer writes a standard run, one a replica."""
    for number in range(2):
        loaded: Any = twophase.load(results / f"run {number}")
        assert loaded.summary["rounds"] == STEPS // 8


# --- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"init_sync": True}, "init_sync is True"),
        ({"use_async_quorum": True}, "use_async_quorum is True"),
        ({"bucket": "True"}, "TORCHFT_USE_BUCKETIZATION"),
        ({"fragments": [0]}, r"leave out 2\.weight"),
        ({"fragments": [0, 2, 0]}, "overlap"),
        ({"inner_steps": 7}, "inner_steps is 7"),
        ({"state": {}}, "no state_dict"),
    ],
)
def test_refusals(monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], words: str):
    """Settings with which torchft lets replicas differ are refused by name, before anything is registered."""
    from twophase.integrations.torchft import diloco

    group: Any = SimpleNamespace(
        _init_sync=change.get("init_sync", False),
        _use_async_quorum=change.get("use_async_quorum", False),
        _user_state_dicts=change.get("state", {"default": dict}),
    )
    if "bucket" in change:
        monkeypatch.setenv("TORCHFT_USE_BUCKETIZATION", change["bucket"])
    model = trainers.build()
    fragments = [model[index] for index in change.get("fragments", [0, 2])]
    steps = change.get("inner_steps", 12)
    with pytest.raises((ValueError, ImportError), match=words):
        diloco(group, model, trainers.optimizer(model), inner_steps=steps, fragments=fragments)


def rounds_of(value: float, *, outer: Any = trainers.RULE, is_split: bool = False) -> Any:
    """Rounds over a model of equal weights, in two fragments or three."""
    from twophase.integrations.torchft import diloco

    model = nn.Sequential(*[nn.Linear(3, 3) for _ in range(3)])
    for p in model.parameters():
        nn.init.constant_(p, value)
    parts, inner = [*model] if is_split else [model[:2], model[2:]], torch.optim.SGD(model.parameters(), lr=0.1)
    return diloco(
        MagicMock(_init_sync=False, _use_async_quorum=False), model, inner, outer, inner_steps=6, fragments=parts
    )


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ({}, {"is_split": True}, r"diloco: fragments differ between these rounds .* give the checkpoint's"),
        ({"is_split": True}, {}, r"diloco: fragments differ between these rounds .* give the checkpoint's"),
        ({"outer": "adamw"}, {}, "same optimizers"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(first: dict[str, Any], second: dict[str, Any], words: str):
    """The first difference in fragments or method is named, and no anchor has changed."""
    rounds = rounds_of(1.0, **first)
    before = [anchors.keys() for anchors in rounds.state_dict()["anchors"]]
    with pytest.raises(ValueError, match=words):
        rounds.load_state_dict(rounds_of(2.0, **second).state_dict())
    after = rounds.state_dict()["anchors"]
    assert [anchors.keys() for anchors in after] == before
    assert all(float(p.mean()) == 1.0 for anchors in after for p in anchors.values())


if __name__ == "__main__":
    worker(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
