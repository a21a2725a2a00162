"""Runs whose syncs are not the plain ones: fragments, delays, wires; and processes that were not started alike."""

from __future__ import annotations

import os
import re
import shutil
import socket
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from elastic import lighthouse, side_by_side, until
from forked import Program
from twophase.base.config import RunError, UsageError, dump_yaml, with_values
from twophase.cli.train import describe_run
from twophase.diloco.comm import SingleProcess
from twophase.runs.folder import RunFolder, read_lines
from twophase.runs.record import read_record
from twophase.tasks.build import build_task, preflight_all
from twophase.tasks.lm.config import TrainConfig, check
from twophase.training import checkpoint
from twophase.training.preflight import preflight
from twophase.training.train import train

SYNCS: dict[str, dict[str, Any]] = {
    "fragments": {"sync.fragments": ("3",), "sync.restart": ("0=1", "1=2", "2=never")},
    "delay": {"sync.delay": 4, "sync.mixing": 0.5},
    "streaming": {"sync.fragments": ("ends=embedding|head|norm", "rest=."), "sync.delay": 2, "sync.wire": "int8"},
    "bfloat16": {"sync.wire": "bfloat16", "sync.fragments": ("2",), "sync.stagger": False},
}


@pytest.fixture
def config(short_run: TrainConfig) -> TrainConfig:
    """What the tests change by their own values."""
    return short_run


def run(config: TrainConfig, path: Path, **options: Any) -> dict[str, Any]:
    with RunFolder.claim(path, config) as folder:
        return train(build_task(config), config, folder, **options)


def lines(path: Path, log: str) -> list[dict[str, Any]]:
    return [{key: value for key, value in line.items() if key != "seconds"} for line in read_lines(path / log)]


@pytest.mark.parametrize("name", SYNCS)
def test_resumed_equals_uninterrupted(config: TrainConfig, tmp_path: Path, name: str) -> None:
    """Stopped again and again, in the middle of rounds and delays, a run ends with the same bytes and lines."""
    config = with_values(config, SYNCS[name])
    whole = run(config, tmp_path / "whole")
    for stop in (1, 3, 5, 6, 7, 8, 12, 14, 19, 21):
        start = checkpoint.latest_step(tmp_path / "parts" / "checkpoint") or 0
        left = iter(range(start + 1, 100))
        part = run(config, tmp_path / "parts", should_stop=lambda s=stop, i=left: next(i) >= s)
        assert (part["exit_reason"], part["steps"]) == ("stopped", stop)
    parts = run(config, tmp_path / "parts")
    assert parts["checksum"] == whole["checksum"]
    for log in ("rounds.jsonl", "metrics.jsonl"):
        assert lines(tmp_path / "parts", log) == lines(tmp_path / "whole", log)
    weights = [(tmp_path / which / "weights.safetensors").read_bytes() for which in ("whole", "parts")]
    assert weights[0] == weights[1]


def test_each_is_a_run_of_its_own(config: TrainConfig, tmp_path: Path) -> None:
    """Every way of synchronising trains, and no two give the same weights."""
    plain = run(config, tmp_path / "plain")
    found = {plain["checksum"]}
    for name, values in SYNCS.items():
        summary = run(with_values(config, values), tmp_path / name)
        assert summary["perplexity"] < 60  # uniform would be 96
        found.add(summary["checksum"])
    assert len(found) == 1 + len(SYNCS)


def test_rounds_of_fragments_are_logged(config: TrainConfig, tmp_path: Path) -> None:
    """A line a sync, which names the fragment and its own round; restarts follow each fragment's own period."""
    run(with_values(config, SYNCS["fragments"]), tmp_path / "run")
    told = lines(tmp_path / "run", "rounds.jsonl")
    assert [line["step"] for line in told] == [2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22]
    parts = [part for line in told for part in line["fragments"]]
    assert [part["name"] for part in parts] == [*"012012012", "0", "1", "0", "2"]  # at the end what is left
    for part in parts:
        period = {"0": 1, "1": 2}.get(part["name"])
        assert part["restarted"] == (period is not None and part["round"] % period == 0)
    assert [line["complete"] for line in told] == [line["step"] % 6 == 0 or line["step"] == 22 for line in told]


def test_validated_at_the_anchor(config: TrainConfig, tmp_path: Path) -> None:
    """A validation while replicas are ahead of the anchor is the anchor's and leaves the run as it was."""
    values = SYNCS["delay"] | {"evaluate_every": 1}
    seen = run(with_values(config, values), tmp_path / "seen")
    blind = run(with_values(config, SYNCS["delay"]), tmp_path / "blind")
    assert seen["checksum"] == blind["checksum"]
    losses = [line["validation_loss"] for line in lines(tmp_path / "seen", "metrics.jsonl")]
    assert len(losses) == 3  # after steps 10, 16 and 22
    assert losses[-1] == seen["validation_loss"]
    assert losses == sorted(losses, reverse=True)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"sync.delay": 6}, r"--sync\.delay is 6; it must be at least 0 and below inner_steps \(6\)"),
        ({"sync.mixing": 1.0}, r"--sync\.mixing is 1\.0; it must be at least 0 and below 1"),
        ({"sync.fragments": ("0",)}, r"--sync\.fragments is 0; it must be a whole number >= 1"),
        ({"sync.fragments": ("a", "b")}, r"--sync\.fragments is a; it must be NAME=VALUE, such as ends="),
        ({"sync.restart": ("0=3", "0=4")}, r"--sync\.restart is 0=4; it must be a name that has not been given yet"),
        ({"sync.restart": ("0=often",)}, r"--sync\.restart: restart 'often' is not known"),
        ({"sync.restart": ("1=3",)}, r"--sync\.restart names 1, and the fragments are 0; give each fragment its"),
        ({"sync.fragments": ("a=(",)}, r"pattern '\(' of fragment 'a' is no regular expression"),
        ({"sync.fragments": ("a=embedding",)}, r"no fragment's pattern is found in the parameter name 'norm'"),
        ({"sync.fragments": ("99",)}, r"fragments is 99; it must be .*between 1 and the number of parameters, 9"),
    ],
)
def test_mistakes_name_the_option(config: TrainConfig, values: dict[str, Any], message: str) -> None:
    """An impossible way of synchronising is refused in one message before a folder is made, alone or among others."""
    wrong = with_values(config, values)
    with pytest.raises(UsageError, match=message):
        preflight(check(wrong), build_task(wrong))
    with pytest.raises(UsageError, match=message):
        preflight_all(map(check, [config, wrong, replace(config, steps=config.steps + 1)]))


def test_the_words_on_a_run_have_its_fragments_policies(config: TrainConfig, tmp_path: Path) -> None:
    """In the terminal and in the report: not the one of `outer.restart`, which such a run does not use."""
    values = {"sync.fragments": ("2",), "sync.restart": ("0=3", "1=never"), "outer.restart": "7"}
    config = check(with_values(config, values))
    end = {"diverged": True, "steps": 6}
    assert ", restart 0=3, 1=never, S = " in describe_run(tmp_path, config, end)
    assert ", restart 7, S = " in describe_run(tmp_path, with_values(config, {"sync.restart": ()}), end)
    run(config, tmp_path / "run")
    assert read_record(tmp_path / "run").restart == "0=3, 1=never"


def processes(tmp_path: Path, *words: list[str]) -> list[tuple[int, str]]:
    """Status and standard error of one process for each list of words, which form a group."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = ["-m", "twophase", "train", "--config", str(tmp_path / "config.yaml"), "--quiet"]
    started, told = [], []
    for rank, more in enumerate(words):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": len(words), "MASTER_PORT": port}
        env = os.environ | {key: str(value) for key, value in place.items()}
        env |= {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        told.append(tmp_path / f"errors-{rank}")
        started.append(Program([*command, *more], tmp_path / f"said-{rank}", told[-1], env))
    return [(process.wait(120), path.read_text()) for process, path in zip(started, told, strict=True)]


@pytest.mark.dist
@pytest.mark.slow
def test_two_processes_equal_one(config: TrainConfig, tmp_path: Path) -> None:
    """Streaming fragments on an int8 wire, and candidates probed: one replica a process, or two in one, same bytes."""
    probed = {"outer.restart": "probe:average,drop,1.3", "outer.probe_sequences": 3}
    config = with_values(config, SYNCS["streaming"] | probed)
    here = run(config, tmp_path / "one")
    (tmp_path / "config.yaml").write_text(dump_yaml(config))
    words = ["--out", str(tmp_path / "two")]
    assert processes(tmp_path, words, words) == [(0, ""), (0, "")]
    weights = [(tmp_path / which / "weights.safetensors").read_bytes() for which in ("one", "two")]
    assert weights[0] == weights[1]
    told, alone = (lines(tmp_path / which, "rounds.jsonl") for which in ("two", "one"))
    assert [line["checksum"] for line in told] == [line["checksum"] for line in alone]
    assert told[-1]["round"] == here["rounds"]
    assert all(line["bytes_sent"] > 0 for line in told)


@pytest.mark.dist
@pytest.mark.slow
def test_unlike_processes_are_refused(config: TrainConfig, tmp_path: Path) -> None:
    """Another rule in one process ends both with status 2 and the option's name, before any training."""
    (tmp_path / "config.yaml").write_text(dump_yaml(replace(config, threads=1)))
    words = ["--out", str(tmp_path / "run")]
    ended = processes(tmp_path, words, [*words, "--outer.lr", "0.25"])
    assert [status for status, _ in ended] == [2, 2]
    for rank, (_, text) in enumerate(ended):
        assert f"--outer.lr differ between process {rank} (" in text
    assert not (tmp_path / "run" / "rounds.jsonl").exists()


class Alone(SingleProcess):
    """An elastic communicator of one replica, to which nobody comes."""

    elastic, replica = True, 0

    def attach(self, engine: Any, save: Any, load: Any) -> None:
        """Nobody asks for a state."""

    def enter(self, syncs: int, *, running: bool = False) -> None:
        """Nobody is further."""

    def enough(self, count: int) -> bool:
        """One is enough."""
        return count == 1


def test_a_replica_that_stops_alone(config: TrainConfig, tmp_path: Path) -> None:
    """Asked to stop, also just after a round, an elastic replica ends there with a checkpoint, and resumes it."""
    whole = run(config, tmp_path / "whole", communicator=Alone())
    for stop in (5, 6, 12):  # inside a round, after the first one, and after one that is saved anyway
        start = checkpoint.latest_step(tmp_path / "parts" / "checkpoint") or 0
        left = iter(range(start + 1, 100))
        part = run(
            config,
            tmp_path / "parts",
            communicator=Alone(),
            should_stop=lambda s=stop, i=left: next(i) >= s,
        )
        assert (part["exit_reason"], part["steps"]) == ("stopped", stop)
        assert checkpoint.latest_step(tmp_path / "parts" / "checkpoint") == stop
    parts = run(config, tmp_path / "parts", communicator=Alone())
    assert (parts["exit_reason"], parts["checksum"]) == ("finished", whole["checksum"])


def test_stopped_with_a_sync_under_way(config: TrainConfig, tmp_path: Path) -> None:
    """A sync with a delay is ended before an elastic replica stops, and the resumed run is the uninterrupted one."""
    config = with_values(config, {"sync.delay": 2, "sync.mixing": 0.5})
    whole = run(config, tmp_path / "whole", communicator=Alone())
    left = iter(range(1, 100))
    part = run(config, tmp_path / "parts", communicator=Alone(), should_stop=lambda: next(left) >= 6)
    assert (part["exit_reason"], part["steps"], part["rounds"]) == ("stopped", 8, 1)
    parts = run(config, tmp_path / "parts", communicator=Alone())
    assert (parts["exit_reason"], parts["checksum"]) == ("finished", whole["checksum"])


@pytest.mark.dist
@pytest.mark.skipif(sys.platform != "linux", reason="torchft is for Linux")
def test_who_comes_into_the_last_sync_is_finished(
    config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica that comes into the last sync, or is given the state of a run's end, has a whole run with that end."""
    from twophase.elastic.torchft import TorchFT

    config = replace(config, steps=12)

    def pair(url: str, least: int) -> list[dict[str, Any]]:
        """Both; where one may begin alone, the other comes after the last round but one."""
        groups = [TorchFT(replica=n, replicas=2, lighthouse=url, min_replicas=least, timeout=20.0) for n in (0, 1)]

        def one(number: int) -> dict[str, Any]:
            def await_other(line: dict[str, Any]) -> None:
                if least == 1 and number == 0 and line["step"] == 6:
                    until("the other is up", lambda: groups[1]._manager)
                    time.sleep(0.3)  # until the lighthouse knows of it

            with groups[number] as group:
                if least == 1 and number == 1:
                    until("the first round is over", lambda: read_lines(tmp_path / "0" / "rounds.jsonl"))
                return run(config, tmp_path / str(number), communicator=group, on_round=await_other)

        return side_by_side(monkeypatch, lambda: one(0), lambda: one(1))

    with lighthouse() as url:
        first, late = pair(url, 1)
        (line,) = read_lines(tmp_path / "1" / "rounds.jsonl")
        assert (line["round"], line["replicas"], line["newcomers"]) == (2, 1, 1)
        assert checkpoint.latest_step(tmp_path / "1" / "checkpoint") == 12
        (tmp_path / "0" / "summary.json").unlink()  # as if it had been killed before this was written
        shutil.rmtree(tmp_path / "1")
        again, given = pair(url, 2)
    for summary in (late, again, given):
        for key in ("exit_reason", "steps", "rounds", "checksum", "perplexity"):
            assert summary[key] == first[key], (key, summary)
    assert first["exit_reason"] == "finished"
    assert checkpoint.latest_step(tmp_path / "1" / "checkpoint") == 12


@pytest.mark.dist
@pytest.mark.skipif(sys.platform != "linux", reason="torchft is for Linux")
def test_a_newer_checkpoint_is_not_mixed_with_a_run_that_began_without_it(
    config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The replica that holds it ends with what can be done, its folder untouched, and the run goes on without it."""
    from twophase.elastic.torchft import TorchFT

    late = tmp_path / "1"
    left = iter(range(1, 100))
    run(config, late, communicator=Alone(), should_stop=lambda: next(left) >= 14)
    held = {path: path.read_bytes() for path in sorted(late.rglob("*")) if path.is_file()}

    def one(number: int, group: TorchFT) -> Any:
        def on_round(line: dict[str, Any]) -> None:
            if line["step"] == 6:
                begun.set()
                until("the other is up", lambda: groups[1]._manager)
                time.sleep(0.3)  # until the lighthouse knows of it

        with group:
            if number:
                begun.wait(60)
            return run(config, tmp_path / str(number), communicator=group, on_round=on_round)

    begun = threading.Event()
    with lighthouse() as url:
        groups = [TorchFT(replica=n, replicas=2, lighthouse=url, min_replicas=1, timeout=20.0) for n in (0, 1)]
        calls = (partial(one, number, group) for number, group in enumerate(groups))
        summary, refusal = side_by_side(monkeypatch, *calls)
    assert isinstance(refusal, RunError), refusal
    assert re.match(
        r".*/1/checkpoint has a checkpoint of step 14, but the other .* are at step 12; start", str(refusal)
    )
    assert {path: path.read_bytes() for path in sorted(late.rglob("*")) if path.is_file()} == held
    assert (summary["exit_reason"], summary["steps"]) == ("finished", config.steps)
    assert [line["round"] for line in read_lines(tmp_path / "0" / "rounds.jsonl")] == [1, 2, 3, 4]
