"""Processes of torchrun, as whole commands: what they exchange, how they meet, and what ends them."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import forkedrun
import shardmaker
from forked import places
from processes import DRIVER, Processes, free_port, state_of, until
from trained import run, stop_after
from twophase.base.config import dump_yaml, with_values
from twophase.runs.folder import WEIGHTS, RunFolder, read_lines
from twophase.tasks.lm.config import TrainConfig
from twophase.tasks.lm.task import LanguageTask
from twophase.text.shards import open_shards
from twophase.training.train import train

pytestmark = [pytest.mark.dist, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def config(short_run: TrainConfig) -> TrainConfig:
    """18 rounds of 4 inner steps, with a checkpoint after each."""
    data = replace(short_run.data, validation_windows=32)
    return replace(short_run, data=data, steps=72, inner_steps=4, checkpoint_every=1)


@pytest.fixture(scope="module")
def weights(config: TrainConfig, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The result of one process."""
    with RunFolder.claim(tmp_path_factory.mktemp("alone"), config) as folder:
        train(LanguageTask(config), config, folder)
    return (folder.path / WEIGHTS).read_bytes()


class Group(Processes):
    """The two processes of a run; of each, words may say what happens to it and when."""

    def __init__(self, folder: Path, config: TrainConfig, *options: str) -> None:
        super().__init__(folder / "words")
        (folder / "config.yaml").write_text(dump_yaml(config))
        self.out = folder / "run"
        self.words = ["train", "--config", str(folder / "config.yaml"), "--out", str(self.out), "--quiet", *options]

    def both(self, faults: Sequence[Sequence[str]] = ((), ())) -> list[Any]:
        """Start them, each as on a machine of its own."""
        return [
            self.start(str(rank), [sys.executable, str(DRIVER), *words, "--", *self.words], **env | {"LOCAL_RANK": "0"})
            for rank, (words, env) in enumerate(zip(faults, places(2), strict=True))
        ]


@pytest.fixture
def group(config: TrainConfig, tmp_path: Path) -> Iterator[Group]:
    """Processes that wait 2 seconds for one another."""
    with Group(tmp_path, config, "--start-timeout", "2") as processes:
        yield processes


def last_words(processes: Processes, name: str) -> list[str]:
    """What the command itself said; here torch was imported before the command could silence torch's own warnings."""
    return [line for line in processes.said(name) if "twophase train" in line]


def test_nothing_is_unpickled(group: Group, weights: bytes):
    """A whole run in which `pickle` cannot read has the bytes of one process."""
    for rank, process in enumerate(group.both([["unpickle=never"]] * 2)):
        group.ended(str(rank), process)
    assert (group.out / "weights.safetensors").read_bytes() == weights


@pytest.mark.parametrize("fault", ["kill@meeting:1", "kill@met:1", "stop@meeting:1", "stop@met:1"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_peer_is_lost_while_the_group_forms(group: Group, victim: int, fault: str):
    """The other ends within its start timeout with one message and status 1; nothing has been written."""
    other = 1 - victim
    processes = group.both([[fault], []] if victim == 0 else [[], [fault]])
    group.ended(str(other), processes[other], 1)
    (line,) = last_words(group, str(other))
    assert "failed: the processes cannot meet at 127.0.0.1:" in line or "failed: the connection to another rank" in line
    assert not group.out.exists()


@pytest.mark.parametrize(
    ("is_folder", "status", "words"),
    [
        (True, 1, "failed: the run's files cannot be written to "),
        (False, 2, "rounds.jsonl: is not the log that the checkpoint of step 12 counts"),
    ],
)
def test_process_0_cannot_restore(group: Group, config: TrainConfig, is_folder: bool, status: int, words: str):
    """All end with its message and its status at once, and none reports a lost connection."""
    run(config, group.out, should_stop=stop_after(12))
    log = group.out / "rounds.jsonl"
    log.unlink()
    if is_folder:
        log.mkdir()
    for rank, process in enumerate(group.both()):
        group.ended(str(rank), process, status)
        (line,) = last_words(group, str(rank))
        assert words in line


def token_folders(folder: Path, config: TrainConfig, count: int, damaged: int) -> TrainConfig:
    """Prepare a folder of token shards for each process, of which one is damaged unseen; returns the configuration."""
    ids = [np.random.default_rng(0).integers(1, 90, size, dtype=np.uint16) for size in (20_000, 4000)]
    for number in range(count):
        place = folder / f"place-{number}"
        place.mkdir(parents=True)
        open_shards(shardmaker.prepared(place / "tokens", ids[:1], ids[1:], 90))
    shardmaker.flip(folder / f"place-{damaged}" / "tokens" / "train-00000.bin")
    return with_values(config, {"data.corpus": "tokens:tokens"})


@pytest.mark.parametrize("victim", [0, 1])
def test_damaged_tokens_in_one_process(tmp_path: Path, config: TrainConfig, victim: int):
    """All processes of a group end with status 1 and one message that names the shard, whichever of them has it."""
    with Group(tmp_path, token_folders(tmp_path, config, 2, victim)) as group:
        for rank, process in enumerate(group.both([[f"cd={tmp_path}/place-{rank}"] for rank in range(2)])):
            group.ended(str(rank), process, 1)
            (line,) = last_words(group, str(rank))
            assert "tokens/train-00000.bin was damaged since it was prepared" in line
            assert "damaged-data keeps what rests on it" in line
        assert not (group.out / "summary.json").exists()


def test_one_is_killed(config: TrainConfig, weights: bytes, tmp_path: Path):
    """The other ends with status 1 and one message; the repeated command gives the bytes of an undisturbed run."""
    with Group(tmp_path, config) as group:
        first, second = group.both([[], ["kill@reduce:14"]])
        group.ended("1", second, -signal.SIGKILL)
        group.ended("0", first, 1)
        (line,) = last_words(group, "0")
        assert "failed: the connection to another rank is lost (" in line
        for rank, process in enumerate(group.both()):
            group.ended(str(rank), process)
    assert (tmp_path / "run" / WEIGHTS).read_bytes() == weights


def test_one_stands_still(config: TrainConfig, tmp_path: Path):
    """It closes no connection, so the other waits for it, but no longer than its timeout; then the same message."""
    with Group(tmp_path, config, "--sync-timeout", "2") as group:
        first, second = group.both([[], ["stop@reduce:2"]])
        group.ended("0", first, 1)
        (line,) = last_words(group, "0")
        assert "failed: the connection to another rank is lost (" in line
        second.kill()


def test_a_process_that_cannot_begin_says_so_once(group: Group):
    """A taken port, and no first process: one message each and status 1, in bounded time."""
    first, second = places(2)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        first["MASTER_PORT"] = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "twophase", *group.words]
        for name, env in (("taken", first), ("nowhere", second)):
            group.ended(name, group.start(name, command, **env), 1)
            (line,) = last_words(group, name)
            assert f"failed: the processes cannot meet at 127.0.0.1:{env['MASTER_PORT']} (" in line
    assert not group.out.exists()


def workers(agent: int) -> list[int]:
    """The processes that another one has started."""
    return list(map(int, Path(f"/proc/{agent}/task/{agent}/children").read_text().split()))


def running(process: int) -> bool:
    """Whether it has neither ended nor become a zombie."""
    return state_of(process) not in "ZX"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_torchrun_restarts_its_workers_and_is_killed(group: Group, weights: bytes):
    """A killed worker is replaced, though the store still holds its address; those of a killed agent end by themselves.

    The folder then resumes, to the bytes of one process.
    """
    hold = group.folder / "hold"
    program = [sys.executable, forkedrun.__file__, "--nproc-per-node", "2", "--max-restarts", "1"]
    program += ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    command = [str(DRIVER), "grace=1", f"hold={hold}@inner:60", "--", *group.words, "--start-timeout", "60"]
    agent = group.start("agent", [*program, *command], GLOO_SOCKET_IFNAME="lo")
    rounds = group.out / "rounds.jsonl"

    def count() -> int:
        return len(read_lines(rounds)) if rounds.exists() else 0

    until("some rounds", lambda: count() > 2)
    first = workers(agent.pid)
    os.kill(first[1], signal.SIGKILL)
    until("both have been replaced", lambda: len(workers(agent.pid)) == 2 and not set(first) & set(workers(agent.pid)))
    until("all rounds before the hold", lambda: count() == 14)
    second = workers(agent.pid)
    agent.kill()
    killed = time.monotonic()
    try:
        until("they have ended", lambda: not any(map(running, second)))
        print(f"  the workers ended {time.monotonic() - killed:.2f} s after torchrun")
        assert time.monotonic() - killed < 11
    finally:
        for process in filter(running, second):
            os.kill(process, signal.SIGKILL)
    for rank, process in enumerate(group.both()):
        group.ended(str(rank), process)
    assert (group.out / "weights.safetensors").read_bytes() == weights
