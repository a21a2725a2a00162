"""`TorchFT`: equal to a run in one process; a killed process comes back; nothing listens or loads what it should not.

Run as a program, this file is one of the processes of its own tests.
"""

from __future__ import annotations

import copy
import importlib.metadata
import io
import itertools
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
from torch import nn

from elastic import PATIENCE, lighthouse, listeners, side_by_side, until
from forked import Program
from policies import asked
from twophase.base.config import RunError
from twophase.diloco.agreement import Disagreement
from twophase.diloco.communicator import SingleProcess
from twophase.diloco.engine import DiLoCo, RoundReport
from twophase.elastic import healing, torchft
from twophase.elastic import parts as torchft_parts
from twophase.rule import OuterRule
from twophase.shelf.outer import outer

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="torchft is for Linux")
RULE = OuterRule(0.5, 0.9, nesterov=True)
URL = "http://127.0.0.1:1"

SCENARIOS: dict[str, dict[str, Any]] = {
    "plain": {"inner_steps": 3, "restart": "test-longer:3"},  # which decides by what it remembers
    "streams": {"inner_steps": 4, "restart": 3, "fragments": 2, "delay": 1, "mixing": 0.25, "wire": "int8"},
    "adamw": {"inner_steps": 3, "restart": 3, "outer": outer("adamw", lr=0.05, second="restart", schedule="warmup")},
}
ROUNDS = 12


# --- a small problem ------------------------------------------------------------------------------------------------


class Replica:
    """A model, its inner optimizer, and how many batches it has seen."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        self.inner = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.seen = 0

    def step(self, number: int) -> float:
        """One inner step on data that is a function of the replica's number and of what it has seen."""
        generator = torch.Generator().manual_seed(1000 * number + self.seen)
        x, y = torch.randn(8, 4, generator=generator), torch.randn(8, 3, generator=generator)
        self.inner.zero_grad()
        loss = nn.functional.mse_loss(self.model(x), y)
        loss.backward()
        self.inner.step()
        self.seen += 1
        return loss.item()

    def save(self) -> dict[str, Any]:
        """What a replica that comes late is given."""
        return {"model": self.model.state_dict(), "inner": self.inner.state_dict(), "seen": self.seen}

    def load(self, state: Any) -> None:
        """Take it."""
        self.model.load_state_dict(state["model"])
        self.inner.load_state_dict(state["inner"])
        self.seen = state["seen"]


def facts(report: RoundReport) -> dict[str, Any]:
    """What must be the same everywhere."""
    fragments = [(f.name, f.round, f.restarted, f.checksum) for f in report.fragments]
    norms = [(g.pseudo_gradient_norm, g.buffer_norm, g.cosine, g.restarted) for g in report.groups]
    return {
        "round": report.round,
        "checksum": report.checksum,
        "replicas": report.replicas,
        "newcomers": report.newcomers,
        "fragments": fragments,
        "norms": norms,
        "signals": dict(report.signals),
    }


def simulated(options: dict[str, Any]) -> tuple[list[dict[str, Any]], list[str]]:
    """Both replicas in this process: reports, and the digests of the fragments at the end."""
    replicas = [Replica(), Replica()]
    arguments: dict[str, Any] = {"outer": RULE, **options}
    engine = DiLoCo([r.model for r in replicas], communicator=SingleProcess(), **arguments)
    results = []
    while engine.round < ROUNDS:
        losses = [replica.step(number) for number, replica in enumerate(replicas)]
        report = engine.step({"loss": sum(losses) / 2})
        results += [facts(report)] if report else []
    return results, [str(fragment.digest()) for fragment in engine.fragments]


def alone_after_three(rounds: int) -> list[tuple[str, bool]]:
    """Checksums and restarts of three rounds of both replicas and further ones of replica 0 alone."""
    replicas = [Replica(), Replica()]
    engine = DiLoCo([r.model for r in replicas], RULE, communicator=SingleProcess(), **SCENARIOS["plain"])
    results = []
    while engine.round < rounds:
        if engine.round == 3 and len(replicas) == 2:
            del replicas[1]
            state = engine.state_dict()
            engine = DiLoCo(replicas[0].model, RULE, communicator=SingleProcess(), **SCENARIOS["plain"])
            engine.load_state_dict(state)
        for number, replica in enumerate(replicas):
            replica.step(number)
        report = engine.step({"loss": 0.0})
        results += [(report.checksum, report.restarted)] if report else []
    return results


# --- the processes ----------------------------------------------------------------------------------------------------


def communicator(url: str, replica: int = 0, replicas: int = 2, **options: Any) -> Any:
    """A `TorchFT` on loopback."""
    from twophase.elastic.torchft import TorchFT

    return TorchFT(replica=replica, replicas=replicas, lighthouse=url, **{"timeout": 20.0, **options})


ABANDONED = "abandoned\n"


def worker(replica: int, folder: Path, urls: dict[str, str]) -> None:
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    for name, url in urls.items():
        options = {"min_replicas": 1} if name == "kill" else {}
        with communicator(url, replica, **options) as group:
            mine = Replica()
            scenario: dict[str, Any] = {"outer": RULE, **SCENARIOS.get(name, SCENARIOS["plain"])}
            engine = DiLoCo(mine.model, communicator=group, **scenario)
            group.attach(engine, mine.save, mine.load)
            reports: list[dict[str, Any]] = []
            if name == "kill":  # one may go on alone, and so might begin alone
                group._started()
                (folder / f"up-{replica}").touch()
                until("both are up", lambda: all((folder / f"up-{number}").exists() for number in range(2)))
                time.sleep(0.3)
            first = engine.join({"loss": 0.0})
            reports += [facts(first)] if first else []
            if name == "kill":
                results[name] = until_it_is_back(replica, mine, engine, reports)
                continue
            if name == "tampered":
                results[name] = tampered(replica, mine, engine)
                continue
            seconds = []
            while engine.round < ROUNDS:
                report = engine.step({"loss": mine.step(replica)})
                if report:
                    reports.append(facts(report))
                    seconds.append(report.seconds)
            results[name] = {
                "reports": reports,
                "digests": [str(fragment.digest()) for fragment in engine.fragments],
                "seconds": seconds,
                "bytes": group.launch_sum(torch.zeros(8)).bytes_sent,
                "listening": listeners("self"),
            }
    if replica == 0:
        os.write(2, ABANDONED.encode())  # from here on torchft's log goes on after `close()`
        results["abandoned"] = abandoned()
    torch.save(results, folder / f"{replica}.pt")


def abandoned() -> dict[str, Any]:
    """A replica that trains alone, whose lighthouse goes away; its torchft goes on calling for it, and logs that."""
    replica = Replica()
    with communicator(URL, patience=1.0, replicas=1) as group:
        engine = DiLoCo(replica.model, RULE, inner_steps=1, communicator=group)
        group.attach(engine, replica.save, replica.load)
        with lighthouse() as url:
            group.lighthouse, group._lighthouse_at = url, ("127.0.0.1", urlsplit(url).port or 0)
            assert engine.join() is None
            report = engine.step()
            assert report is not None
        try:
            engine.step()
            error = "not noticed"
        except RuntimeError as fault:
            error = str(fault)
    return {"alone": (report.replicas, report.bytes_sent), "url": url, "error": error}


def tampered(number: int, replica: Replica, engine: DiLoCo) -> str:
    """Round 3 ends with one bit of the anchor of replica 1 changed: what is said of it."""
    for _ in range(20):
        replica.step(number)
        try:
            report = engine.step({"loss": 0.0})
        except Disagreement as fault:
            return str(fault)
        if report and report.round == 3 and number == 1:
            engine.fragments[0].flat[5] += 1e-3
    return "not noticed"


def until_it_is_back(number: int, replica: Replica, engine: DiLoCo, reports: list[dict[str, Any]]) -> dict[str, Any]:
    """Process 1 kills itself in round 4; five rounds after its successor has come, all end."""
    successor = bool(reports)
    ended: list[float] = []
    while not any(report["newcomers"] for report in reports[:-5]):
        loss = replica.step(number)
        if number == 1 and not successor and engine.round == 3 and engine.inner_step == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if engine.round > 3:
            time.sleep(0.02)
        report = engine.step({"loss": loss})
        if report:
            reports.append({**facts(report), "attempts": report.attempts})
            ended.append(time.monotonic())
        assert engine.round < 5000, "the second has not come back"
    return {
        "reports": reports,
        "digests": [str(fragment.digest()) for fragment in engine.fragments],
        "counters": engine.fragments[0].counters()[1],
        "model": {key: value.clone() for key, value in replica.model.state_dict().items()},
        "stall": max(after - before for before, after in itertools.pairwise(ended)),
        "seen": replica.seen,
    }


@pytest.fixture(scope="session")
def processes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two processes bring home; the second is killed at the end and started once more."""
    folder = tmp_path_factory.mktemp("torchft")

    def launch(replica: int, urls: dict[str, str]) -> Program:
        pairs = [f"{name}={url}" for name, url in urls.items()]
        log = folder / f"{replica}.log"
        return Program(["-W", "error", __file__, str(replica), str(folder), *pairs], log, log, os.environ)

    with ExitStack() as stack:
        a, b, d, e, f, g = [stack.enter_context(lighthouse()) for _ in range(6)]
        urls = {"plain": a, "streams": b, "weighed": f, "adamw": g, "tampered": d, "kill": e}
        first, second = launch(0, urls), launch(1, urls)
        try:
            killed = second.wait(timeout=120)
            assert killed == -signal.SIGKILL, (folder / "1.log").read_text()[-3000:]
            until("the survivor notices", lambda: "replica 1 has left" in (folder / "0.log").read_text())
            second = launch(1, {"kill": e})
            assert [first.wait(timeout=120), second.wait(timeout=120)] == [0, 0], (folder / "0.log").read_text()[-3000:]
        finally:
            for process in (first, second):
                process.kill()
                process.wait()
    answers = [torch.load(folder / f"{replica}.pt", weights_only=True) for replica in range(2)]
    answers[0]["log"] = (folder / "0.log").read_text().partition(ABANDONED)[0]
    return answers


@pytest.mark.dist
@pytest.mark.parametrize("name", SCENARIOS)
def test_equals_a_run_in_one_process(processes: list[dict[str, Any]], name: str):
    """12 rounds of two processes have the checksums, norms, restarts and final states of both replicas in one.

    Store, manager, healing and gloo listen on 127.0.0.1 alone.
    """
    reports, digests = simulated(SCENARIOS[name])
    here = processes[0][name]
    assert here["reports"] == [report | {"replicas": 2, "newcomers": 0} for report in reports]
    assert here["digests"] == digests
    assert here["bytes"] == 32
    assert len(here["listening"]) >= 4
    assert {address.partition(":")[0] for address in here["listening"]} == {"0100007F"}
    assert [f[2] for r in here["reports"] for f in r["fragments"] if f[1] == 3] == [True] * len(digests)


@pytest.mark.dist
def test_a_killed_process_comes_back(processes: list[dict[str, Any]]):
    """One of two is killed inside a round and started again: it comes in once, without weight, and both stay equal.

    The survivor goes on alone meanwhile, counts each round once, and restarts when its policy would; afterwards
    weights, momentum, counters, the policy's memory and checksums are the same on both.
    """
    survivor, back = (answers["kill"] for answers in processes)
    rounds = [report["round"] for report in survivor["reports"]]
    assert rounds == list(range(1, len(rounds) + 1))
    common = [report for report in survivor["reports"] if report["round"] >= back["reports"][0]["round"]]
    assert [{**r, "attempts": 1} for r in back["reports"]] == [{**r, "attempts": 1} for r in common]
    assert [report["newcomers"] for report in common] == [1, 0, 0, 0, 0, 0]
    assert [report["replicas"] for report in common] == [1, 2, 2, 2, 2, 2]
    before = survivor["reports"][: -len(common)]
    assert [report["replicas"] for report in before] == [2] * 3 + [1] * (len(before) - 3)
    assert not any(report["newcomers"] for report in before)
    assert survivor["digests"] == back["digests"]
    assert survivor["counters"] == back["counters"]
    assert survivor["counters"][0]["policy_state"]["period"] > 0
    for name, value in survivor["model"].items():
        assert torch.equal(value, back["model"][name]), name
    solo = [(report["checksum"], report["fragments"][0][2]) for report in survivor["reports"][: len(before) + 1]]
    assert solo == alone_after_three(len(solo))  # the newcomer's own round included: it has no weight
    assert survivor["seen"] == 3 * len(rounds)  # no inner step was lost or taken twice
    assert back["seen"] == survivor["seen"]
    print(f"longest wait between two rounds of the survivor: {survivor['stall']:.2f} s, rounds: {len(rounds)}")


@pytest.mark.dist
def test_what_the_survivor_says(processes: list[dict[str, Any]]):
    """Standard error has a line when a process goes and one when it comes, and nothing else.

    A changed anchor ends the run at the next sync, with the fragment's name; a replica that trains alone ends when the
    lighthouse has been away for `patience` seconds.
    """
    lines = processes[0]["log"].splitlines()
    end = lines[lines.index("replica 1 has left; 1 of 2 are present") :]
    assert end[1] == "replica 1 has joined; 2 of 2 are present"
    assert all(line.startswith("replica 1 has ") for line in lines), lines
    message = processes[0]["tampered"]
    assert "before a sync fragment '0' differs in its anchor between process 0 and process 1" in message
    results = processes[0]["abandoned"]
    assert results["alone"] == (1, 0)
    for word in (f"the lighthouse at {results['url']} cannot be reached", "checkpoints are intact"):
        assert word in results["error"]


# --- in this process --------------------------------------------------------------------------------------------------


def refused(words: list[str], call: Callable[[], Any], kind: type[Exception] = ValueError) -> None:
    with pytest.raises(kind) as fault:
        call()
    for word in words:
        assert word in str(fault.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"replica": 2}, ["replica is 2", "replicas - 1"]),
        ({"min_replicas": 3}, ["min_replicas is 3", "between 1 and replicas = 2"]),
        ({"min_replicas": 0}, ["min_replicas is 0"]),
        ({"timeout": 0.0}, ["timeout is 0.0", "above 0"]),
        ({"patience": float("inf")}, ["patience is inf"]),
        ({"max_attempts": 0}, ["max_attempts is 0"]),
        ({"url": "127.0.0.1:29510"}, ["lighthouse is '127.0.0.1:29510'", "http://10.0.0.1:29510"]),
        ({"url": "http://127.0.0.1"}, ["lighthouse is 'http://127.0.0.1'"]),
        ({"url": "http://127.0.0.1:seven"}, ["lighthouse is"]),
        ({"host": "0.0.0.0"}, ["host is '0.0.0.0'", "every network"]),  # noqa: S104 - refused
        ({"host": ""}, ["host is ''"]),
        ({"host": "::"}, ["host is '::'", "IPv4"]),
        ({"url": "http://10.0.0.1:29510"}, ["host is 127.0.0.1 and", "10.0.0.1, on another machine", "--host"]),
        ({"TORCHFT_TIMEOUT_SEC": "1"}, ["TORCHFT_TIMEOUT_SEC", "unset"]),
        ({"TORCHFT_USE_BUCKETIZATION": "1"}, ["TORCHFT_USE_BUCKETIZATION", "unset"]),
        ({"TORCHFT_WATCHDOG_TIMEOUT_SEC": "abc"}, ["TORCHFT_WATCHDOG_TIMEOUT_SEC is 'abc'", "unset"]),
        ({"WORLD_SIZE": "2"}, ["WORLD_SIZE is 2", "not supported yet"]),
    ],
)
def test_mistakes_say_what_to_do(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], words: list[str]):
    """Arguments outside their range, and variables that would override one, are refused by name and value."""
    for name in filter(str.isupper, options):
        monkeypatch.setenv(name, options[name])
    arguments: dict[str, Any] = {"url": URL} | {name: v for name, v in options.items() if not name.isupper()}
    refused(["TorchFT: ", *words], lambda: communicator(**arguments))


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "no.such.host.invalid"])
def test_a_lighthouse_that_may_be_here(host: str):
    """Loopback of both kinds is no other machine, and an unknown name is left to the attempt to connect."""
    name = f"[{host}]" if ":" in host else host
    assert torchft_parts.lighthouse(f"http://{name}:1") == (f"http://{name}:1", (host, 1))
    assert torchft_parts.address_of("127.0.0.1", host) == "127.0.0.1"


def test_missing_and_other_torchft_are_refused(monkeypatch: pytest.MonkeyPatch):
    """Without torchft there is one line that installs it; another release, whose private names differ, is refused."""
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.1.1")  # noqa: ARG005
    refused(["torchft is 0.1.1", "0.2.0"], lambda: communicator(URL), ImportError)
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "torchft", None)
    refused(["pip install 'twophase[ft]'"], lambda: communicator(URL), ImportError)


def test_what_heals_must_be_said_before_joining():
    """Without attach, with a state that lacks the models or holds an object, or that takes too long: refused."""
    mine = Replica()
    group = communicator(URL)
    engine = DiLoCo(mine.model, RULE, inner_steps=3, communicator=group)
    refused(["attach(engine, save, load)", "before engine.join()"], engine.join)
    refused(["save() returned 0 bytes", "the replicas alone have"], lambda: group.attach(engine, dict, mine.load))
    odd = {**mine.save(), "sampler": object()}
    refused(["save()['sampler'] is a builtins.object"], lambda: group.attach(engine, lambda: odd, mine.load))
    large = {**mine.save(), "table": torch.zeros(1).expand(400_000_000)}
    refused(["timeout is 20 s", "1.60 GB", "Pass timeout=21"], lambda: group.attach(engine, lambda: large, mine.load))
    refused(["call join()"], engine.step)
    group.close()
    refused(["it is closed; make a new one"], engine.join)
    elsewhere = communicator(URL, host="192.0.2.1")
    engine = DiLoCo(mine.model, RULE, inner_steps=3, communicator=elsewhere)
    elsewhere.attach(engine, mine.save, mine.load)
    refused(["cannot listen on 192.0.2.1", "--host"], engine.join, RunError)


def test_a_run_that_cannot_begin_is_one_clear_error():
    """Without a lighthouse joining ends after connect_timeout; a run that two must begin ends after start_timeout."""
    with lighthouse() as url:
        cases: tuple[tuple[str, dict[str, Any], list[str]], ...] = (
            (URL, {"connect_timeout": 0.5}, [f"the lighthouse at {URL} cannot be reached", "start it"]),
            (url, {"start_timeout": 0.5}, ["1 of 2 replicas are present after 0.5 s"]),
        )
        for at, options, words in cases:
            replica = Replica()
            with communicator(at, **options) as group:
                engine = DiLoCo(replica.model, RULE, inner_steps=1, communicator=group)
                group.attach(engine, replica.save, replica.load)
                refused(words, engine.join, RuntimeError)
            group.close()  # again is nothing


# --- several in this process ------------------------------------------------------------------------------------------


class Died(BaseException):
    """What ends a replica at once."""


Live = Callable[[int, Any, Replica, DiLoCo], Any]


def lives(monkeypatch: pytest.MonkeyPatch, live: Live, *options: tuple[dict[str, Any], dict[str, Any]]) -> list[Any]:
    """Replicas in threads, at a lighthouse of their own: what `live` returns for each, or has raised.

    Args:
        monkeypatch: pytest's.
        live: what each does, by its place, communicator, model and engine.
        options: of each one's communicator and engine.
    """
    replicas = [Replica() for _ in options]  # not in the threads: their weights come from one generator

    def option(number: int, url: str) -> Any:
        replica, (of_group, of_engine) = replicas[number], options[number]
        with communicator(
            url, **{"replica": number, "replicas": len(options), "start_timeout": 20.0, **of_group}
        ) as group:
            engine = DiLoCo(replica.model, **{"outer": RULE, "inner_steps": 1, **of_engine}, communicator=group)
            group.attach(engine, replica.save, replica.load)
            return live(number, group, replica, engine)

    with lighthouse() as url:
        return side_by_side(monkeypatch, *(partial(option, number, url) for number in range(len(options))))


def one_comes_in_vain() -> Live:
    """The first trains alone until the second, which comes once that has begun, has failed.

    The first returns its reports, which end with a sync that succeeded at once; the second its error, and whether it
    has its old anchor.
    """
    begun, gone = threading.Event(), threading.Event()

    def live(number: int, group: Any, replica: Replica, engine: DiLoCo) -> Any:
        if number:
            begun.wait(PATIENCE)
            before = engine.checksum()
            try:
                return engine.join(), False
            except (RunError, ValueError) as error:
                return error, before == engine.checksum()
            finally:
                group.close()
                gone.set()
        engine.join()
        reports = []
        while not gone.is_set() or reports[-1].attempts > 1:
            replica.step(number)
            reports.append(engine.step())
            begun.set()
        assert {(report.replicas, report.newcomers) for report in reports} == {(1, 0)}
        return reports

    return live


@pytest.mark.dist
@pytest.mark.parametrize(
    ("what", "options"),
    [
        ("numbers of fragments", ({"fragments": 1}, {"fragments": 2})),
        ("outer settings", ({"restart": 2}, {"restart": 3})),
    ],
)
def test_unlike_replicas_do_not_begin(monkeypatch: pytest.MonkeyPatch, what: str, options: tuple[dict[str, Any], ...]):
    """A difference in how they were started is named on both, also one by which they would not send as many numbers."""
    both = [({}, {"inner_steps": 2} | option) for option in options]
    for error in lives(monkeypatch, lambda *these: these[3].join(), *both):
        assert isinstance(error, ValueError), repr(error)
        assert re.match(rf"DiLoCo: {what} differ between process . \(.*\) and process . \(.*\); start all", str(error))


@pytest.mark.dist
def test_a_lone_replica_says_what_it_waits_for(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    """Where the lighthouse itself wants more replicas, it says so once, soon, and not only when it gives up."""
    monkeypatch.setattr(torchft, "_NOTICE", 0.2)
    with lighthouse(2) as url:

        def option() -> Any:
            with communicator(url, quorum_timeout=1.0) as group:
                replica = Replica()
                engine = DiLoCo(replica.model, RULE, communicator=group, inner_steps=1)
                group.attach(engine, replica.save, replica.load)
                return engine.join()

        (error,) = side_by_side(monkeypatch, option)
    assert "the other replicas did not come to a sync within 1 s" in str(error)
    (said,) = [message for message in caplog.messages if "waits at the lighthouse" in message]
    assert said.startswith(f"replica 0 waits at the lighthouse {url} until its peers end their inner steps, or until ")
    assert "--min_replicas are present. It gives up after 1 s (--quorum-timeout)" in said


@pytest.mark.dist
def test_two_with_one_number_do_not_begin(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    """They would train on the same text: each warns once, and after start_timeout one ends with the number of both."""
    both = threading.Barrier(2)

    def live(number: int, group: Any, replica: Replica, engine: DiLoCo) -> Any:
        del number, replica
        group._started()  # so that none is there alone for long
        both.wait(PATIENCE)
        return engine.join()

    same = {"replica": 0, "replicas": 2, "start_timeout": 0.3}
    results = lives(monkeypatch, live, (same, {}), (same, {}))
    assert all(isinstance(error, RunError) for error in results), results
    assert any("two processes are replica 0, and would train on the" in str(error) for error in results)
    assert caplog.messages.count("replica 0 is present twice") == 2


@pytest.mark.dist
@pytest.mark.parametrize(
    ("group", "inner_steps", "message"),
    [
        ({"replica": 1}, 2, "TorchFT: inner_steps differ between this replica (2) and the run that it joins (1)"),
        ({"replica": 0}, 1, "TorchFT: replica 0 is in this run already, and two would train on the same data"),
    ],
)
def test_a_replica_that_may_not_come_into_a_run(
    monkeypatch: pytest.MonkeyPatch, group: dict[str, Any], inner_steps: int, message: str
):
    """One with a number that is taken is refused, and one started unlike before it adopts a state; the run goes on."""
    alone = {"min_replicas": 1, "replicas": 2}
    options = [(alone, {}), (alone | group, {"inner_steps": inner_steps})]
    _, (error, untouched) = lives(monkeypatch, one_comes_in_vain(), *options)
    assert str(error).startswith(message)
    assert untouched or group["replica"] == 0


@pytest.mark.dist
def test_replicas_may_ask_for_unlike_numbers(monkeypatch: pytest.MonkeyPatch):
    """One that would begin with two waits for the one that wants three, and no message of either is left unanswered."""
    tried = threading.Event()

    def live(number: int, group: Any, replica: Replica, engine: DiLoCo) -> Any:
        failures: list[Exception] = []
        fail, enough = group._fail, group.enough
        group._fail = lambda error: (failures.append(error), fail(error))

        def enough_for(count: int, needed: int | None = None) -> bool:
            answer = enough(count, needed)
            if number == 1 and count == 2:
                tried.set()
            return answer

        group.enough = enough_for
        if number == 2:
            tried.wait(PATIENCE)
        engine.join()
        replica.step(number)
        report = engine.step()
        assert report is not None
        return report.replicas, failures

    third = {"timeout": 6.0}
    options = [third | {"min_replicas": count} for count in (2, 3, 3)]
    assert lives(monkeypatch, live, *((option, {}) for option in options)) == [(3, [])] * 3


@pytest.mark.dist
def test_one_of_two_does_not_go_on_alone(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    """It waits for the other, which has gone, and ends after start_timeout with the option that would let it go on."""

    def live(number: int, group: Any, replica: Replica, engine: DiLoCo) -> Any:
        engine.join()
        group.start_timeout = 0.5
        reports = []
        while number == 0 or not reports:
            replica.step(number)
            try:
                reports.append(engine.step())
            except RunError as error:
                return reports, str(error)
        return reports, engine.run

    (reports, error), (_, run) = lives(monkeypatch, live, ({}, {}), ({}, {}))
    assert [(report.replicas, report.minority) for report in reports] == [(2, False)]
    assert "1 of the last sync's replicas are present after 0.5 s, but 2 are needed" in error
    assert "--min-replicas 1" in error
    assert abs(run / 1000 - time.time()) < PATIENCE
    assert caplog.messages.count("1 of the last sync's replicas are present, 2 are needed; waiting for the rest") == 1


@pytest.mark.dist
@pytest.mark.parametrize("others", [1, 0])
def test_a_newcomer_has_no_weight_in_a_repeated_sync(monkeypatch: pytest.MonkeyPatch, others: int):
    """A newcomer's donor dies in the sync: the newcomer holds the donor's progress, but does not count in its stead.

    Where no other replica is left, it does: the progress would be lost. (With lr 1 and no momentum the new anchor is
    the mean of the replicas that count.)
    """
    newcomer, begun = others + 1, threading.Event()
    states: dict[int, list[torch.Tensor]] = {}

    def live(number: int, group: Any, replica: Replica, engine: DiLoCo) -> Any:
        reduce = engine._reduce

        def dies(members: Any) -> Any:
            if number != newcomer and group._healing._offer is not None:
                raise Died
            return reduce(members)

        engine._reduce = dies
        if number == newcomer:
            begun.wait(PATIENCE)
        report = engine.join({"loss": 7.0})
        while report is None or report.attempts == 1:
            replica.step(number)
            states[number] = [p.detach().clone() for p in replica.model.parameters()]
            report = engine.step({"loss": float(number)})
            begun.set()
        return report, [a.clone() for a in engine.anchor.values()]

    rule = {"outer": OuterRule(1.0, 0.0)}
    results = lives(monkeypatch, live, *[({"min_replicas": others + 1}, rule)] * (others + 2))
    (dead,) = (number for number, option in enumerate(results) if isinstance(option, Died))
    counts = 1 - dead if others else dead
    for report, anchor in (option for number, option in enumerate(results) if number != dead):
        assert (report.replicas, report.newcomers) == (1, others)
        assert report.attempts == 2
        assert report.minority
        assert dict(report.signals) == {"loss": float(counts) if others else 7.0}
        assert {"quorum", "reduce"} <= set(report.seconds)
        for mean, original in zip(anchor, states[counts], strict=True):
            torch.testing.assert_close(mean, original)


@pytest.mark.dist
def test_a_newcomer_comes_into_a_delayed_sync_that_is_repeated(monkeypatch: pytest.MonkeyPatch):
    """A sum under way is lost with one of two, and when it is repeated a third is there: it ends for both at once.

    Inner steps of the newcomer meanwhile would lead it to the next fragment's sync, where no replica waits for it. Its
    restart policy remembers what the other's does, which the repeated sync is told to once.
    """
    dead = threading.Event()
    groups: dict[int, Any] = {}

    def live(number: int, group: Any, replica: Replica, engine: DiLoCo) -> Any:
        groups[number] = group
        if number == 2:
            dead.wait(PATIENCE)
        reports = [report] if (report := engine.join()) else []
        while engine.round < 3:  # after a fourth, `auto` would have forgotten the repeated one
            replica.step(number)
            if report := engine.step():
                reports.append(report)
            if number < 2 and engine.round == 1 and engine.under_way:
                if number == 1:
                    dead.set()
                    raise Died
                until("the third is up", lambda: 2 in groups and groups[2]._manager)
                time.sleep(0.3)  # until the lighthouse knows of it
        return reports, [(fragment.counters(), fragment.digest()) for fragment in engine.fragments]

    options = {"inner_steps": 6, "fragments": 2, "delay": 2, "mixing": 0.5, "restart": "auto"}
    monkeypatch.setattr(torchft, "_HEAL_MARGIN", 2.0)
    patience = {"min_replicas": 2, "timeout": 3.0}  # a thread that dies leaves its connections open
    (here, states), gone, (there, healed) = lives(monkeypatch, live, *[(patience, options)] * 3)
    assert isinstance(gone, Died)
    assert healed == states
    for fragment, ((round_, (group,), _), _) in zip("01", states, strict=True):
        original = [
            g for report in here for f, g in zip(report.fragments, report.groups, strict=True) if f.name == fragment
        ]
        seen = [{"pseudo_gradient_norm": g.pseudo_gradient_norm, "buffer_norm": g.buffer_norm} for g in original]
        assert round_ == len(seen) > 1
        assert group["policy_state"] == asked("auto", seen)[-1].state
    assert [report.attempts for report in here][:2] == [1, 1]
    assert (here[2].newcomers, here[2].replicas) == (1, 1)
    assert here[2].attempts > 1
    assert [facts(report) for report in there] == [facts(report) for report in here[2:]]
    assert {report.attempts for report in here[3:]} == {1}


@pytest.mark.dist
def test_a_heal_slower_than_the_timeout_ends_the_newcomer_alone(monkeypatch: pytest.MonkeyPatch):
    """Its first try tells it what had come and which timeout would do; the other goes on, whatever `max_attempts`."""

    def slowly(state: Any, stream: Any) -> None:
        data = io.BytesIO()
        save(state, data)
        for start in range(0, data.tell(), 40_000):
            stream.write(data.getvalue()[start : start + 40_000])
            stream.flush()
            time.sleep(0.3)

    save, original = healing._streaming_save, Replica.save
    monkeypatch.setattr(healing, "_streaming_save", slowly)
    monkeypatch.setattr(torchft, "_HEAL_MARGIN", 0.0)

    monkeypatch.setattr(Replica, "save", lambda replica: original(replica) | {"more": torch.zeros(100_000)})
    options = {"min_replicas": 1, "timeout": 2.0, "max_attempts": 1}
    reports, (error, _) = lives(monkeypatch, one_comes_in_vain(), (options, {}), (options, {}))
    assert isinstance(error, RunError)
    pattern = (
        r"TorchFT: (\S+) of (\S+) MB of another replica's state came in (\S+) s, then its peers stopped "
        r"waiting \(timeout is 2 s\)\. Give every replica a timeout of (\d+) or more \(twophase train: --sync-timeout\)"
    )
    results = re.match(pattern, str(error))
    assert results, str(error)
    received, size, seconds, enough = map(float, results.groups())
    assert 0 < received < size
    assert enough == pytest.approx(1.5 * seconds * size / received, abs=0.6 + 0.1 * enough)
    assert max(report.attempts for report in reports) > 1
    assert [report.round for report in reports] == list(range(1, len(reports) + 1))


@pytest.mark.dist
def test_a_run_under_way_is_not_taken_over(monkeypatch: pytest.MonkeyPatch):
    """A replica that restores until the others have begun receives their state, however much further it was."""
    begun, done = threading.Event(), threading.Event()
    further = Replica()
    engine = DiLoCo(further.model, RULE, inner_steps=1, communicator=SingleProcess())
    for _ in range(9):
        further.step(0)
        engine.step()
    state = copy.deepcopy(engine.state_dict())

    def live(number: int, group: Any, replica: Replica, engine: DiLoCo) -> Any:
        if number:  # as after restoring: it says how far it is, and meets those that have begun
            begun.wait(PATIENCE)
            engine.load_state_dict(state)
            enter = group.enter
            group.enter = lambda syncs, **options: enter(max(syncs, 1 + engine.syncs), **options)
        report = engine.join({})
        if number:
            done.set()
            return report
        reports = []
        while not done.is_set() or len(reports) < 2:
            replica.step(number)
            reports.append(engine.step())
            begun.set()
        return reports

    first, second = {"min_replicas": 1}, {"min_replicas": 2}
    reports, joined = lives(monkeypatch, live, (first, {}), (second, {}))
    assert isinstance(joined, RoundReport), joined
    assert joined.newcomers == 1
    assert [report.round for report in reports] == list(range(1, len(reports) + 1))
    assert reports[joined.round - 1].checksum == joined.checksum


if __name__ == "__main__":
    worker(int(sys.argv[1]), Path(sys.argv[2]), dict(pair.split("=", 1) for pair in sys.argv[3:]))
