"""Faults, with the whole command as real processes: killed, paused, cut off, without a lighthouse; and what is left.

After each of them the replicas agree on every round, no round counts twice, and the run ends about as good as one that
nothing has disturbed. The times to recover are printed (`pytest -s`), and never judged.
"""

from __future__ import annotations

import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import elastic
import textmaker
from elastic import (
    DRIVER,
    HEARTBEAT,
    Processes,
    Run,
    check_rounds,
    free_port,
    lighthouse,
    listens,
    stopped,
    until,
    wake,
)
from forked import call, places
from namespaces import Hub, Place, Refused, joined
from twophase.base.config import dump_yaml, with_values
from twophase.cli.main import main
from twophase.runs.folder import RunFolder, read_lines, read_summary
from twophase.tasks.lm.config import DataConfig, ModelConfig, TrainConfig
from twophase.tasks.lm.task import LanguageTask
from twophase.training.checkpoint import latest_step
from twophase.training.train import train

pytestmark = [
    pytest.mark.dist,
    pytest.mark.timeout(240, func_only=True),  # without the fixtures, for which a busy machine takes minutes
    pytest.mark.skipif(sys.platform != "linux", reason="torchft is for Linux"),
]
PERIOD = 3
ROUNDS = 18
KINDS: dict[str, dict[str, Any]] = {
    "two": {},
    "three": {"replicas": 3},
    "streaming": {
        "inner_steps": 6,
        "sync.fragments": ("2",),
        "sync.delay": 2,
        "sync.mixing": 0.5,
        "sync.wire": "int8",
    },
}
KINDS["delayed"] = {"inner_steps": 6, "sync.delay": 2, "sync.mixing": 0.5}
KINDS["three streaming"] = KINDS["streaming"] | {"replicas": 3, "steps": 96}
KINDS["long"] = {"steps": 96}  # a replica that has been away for long needs time to come back


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    """18 rounds of 4 inner steps, a restart after every third."""
    assert call("--version").returncode == 0  # waits for the fork server, which imports torch
    text = textmaker.write(tmp_path_factory.mktemp("faults") / "text.txt")
    config = TrainConfig(
        model=ModelConfig(layers=1, hidden_size=16, intermediate_size=24),
        data=DataConfig(corpus=f"file:{text}", sequence_length=16, batch_size=4, validation_windows=32),
        steps=4 * ROUNDS,
        inner_steps=4,
        checkpoint_every=3,
    )
    return with_values(config, {"outer.restart": str(PERIOD), "outer.nesterov": True})


Undisturbed = Callable[..., Path]


@pytest.fixture(scope="module")
def undisturbed(base: TrainConfig, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """The folder of a run of some kind and seed that nothing disturbs, in this process; each is made once."""
    made: dict[tuple[str, int], Path] = {}

    def run(kind: str, seed: int = 0) -> Path:
        if (kind, seed) not in made:
            path = tmp_path_factory.mktemp("undisturbed")
            config = with_values(base, {**KINDS[kind], "seed": seed})
            with RunFolder.claim(path, config) as folder:
                train(LanguageTask(config), config, folder)
            made[kind, seed] = path
        return made[kind, seed]

    return run


Good = Callable[..., None]


@pytest.fixture(scope="module")
def good(undisturbed: Undisturbed) -> Good:
    """Check that replicas agree on all rounds, and that the run is within noise of one that nothing disturbed.

    The rule: the perplexity is no further from the undisturbed run's than undisturbed runs of three seeds lie apart.
    """

    def summary(kind: str, seed: int = 0) -> dict[str, Any]:
        values = read_summary(undisturbed(kind, seed))
        assert values is not None
        return values

    seeds = [summary("two", seed)["perplexity"] for seed in (0, 1, 2)]
    noise = max(seeds) - min(seeds)

    def check(run: Run, kind: str, *, of: Sequence[int] = (0, 1), always: Sequence[int] = (0,), **facts: Any) -> None:
        """Check replicas `of` a run, of which some were never killed, and what the first of these has seen."""
        wanted = summary(kind)
        period = None if kind == "probing" else PERIOD
        check_rounds(run, of, always=always, like=undisturbed(kind), period=period)
        assert {name: getattr(run, name)(always[0]) for name in facts} == facts
        perplexity = run.summary(of[0])["perplexity"]
        say(f"perplexity {perplexity:.3f}, undisturbed {wanted['perplexity']:.3f}; three seeds lie {noise:.3f} apart")
        assert abs(perplexity - wanted["perplexity"]) <= noise

    return check


Begin = Callable[..., Run]


@pytest.fixture
def begin(base: TrainConfig, tmp_path: Path) -> Iterator[Begin]:
    """Prepare a run of some kind at a lighthouse of its own; all its processes end with the test."""
    with ExitStack() as stack:

        def prepare(kind: str, *options: str, url: str | None = None, alone: int = 0) -> Run:
            file = tmp_path / "config.yaml"
            file.write_text(dump_yaml(with_values(base, KINDS[kind])))
            url = url or stack.enter_context(lighthouse())
            return stack.enter_context(Run(tmp_path / "replicas", file, url, *options, alone=alone))

        yield prepare


def say(text: str) -> None:
    print(f"  {text}")


def tell_recovery(run: Run, fault: str, of: int, survivor: int) -> None:
    """Print how long the others waited, and how long the one that died took to come back."""
    waited, back = run.wait_after(fault, of, survivor), run.way_back(of)
    say(f"{fault}: the next round counted {waited:.2f} s later (heartbeat timeout {HEARTBEAT:g} s)")
    say(f"replica {of} counted its first round {back:.2f} s after it was started again")


def killed(run: Run, name: str, process: subprocess.Popen[bytes]) -> None:
    """Wait until it has killed itself."""
    run.ended(name, process, -signal.SIGKILL)


def all_end(run: Run, processes: Iterable[Any], status: int = 0) -> None:
    """Wait for the ends of replicas 0, 1 and so on, which must be these."""
    for number, process in enumerate(processes):
        run.ended(str(number), process, status)


# --- one of several is killed -----------------------------------------------------------------------------------------


def test_killed_in_the_inner_phase_and_while_it_is_healed(begin: Begin, good: Good) -> None:
    """One of two dies between its inner steps, its successor while it reads the other's state; the third stays.

    The one that lives goes on alone meanwhile, repeats the sync in which the second died, and sees one newcomer.
    """
    run = begin("two", alone=2)
    first = run.replica(0, "hold=second@inner:33", "hold=third@inner:53")
    killed(run, "1", run.replica(1, "kill@inner:22"))
    until("the other goes on alone", lambda: run.lines(0)[-1]["replicas"] == 1)
    killed(run, "1", run.replica(1, "touch=second@up:1", "kill@taking:1"))
    third = run.replica(1, "touch=third@up:1")
    all_end(run, [first, third])
    good(run, "two", newcomers=[1], sizes=[2, 1, 2])
    assert [line["round"] for line in run.lines(0) if line["minority"]] == [6]  # the first that the other one missed
    assert max(line["attempts"] for line in run.lines(0) if line["round"] < 9) == 1  # a dead replica is not waited for
    assert max(line["attempts"] for line in run.lines(0) if line["replicas"] == 1) >= 2  # the heal that broke off
    tell_recovery(run, "kill at inner", of=1, survivor=0)
    say(f"the sync in which the heal broke off: {run.wait_after('kill at taking', 1, 0):.2f} s")


def test_one_of_three_is_killed_and_then_the_one_that_heals_it(begin: Begin, good: Good) -> None:
    """One of three dies; the one that gives its successor the state dies over it; the last one gives it instead."""
    run = begin("three", alone=3)
    giving = ("hold=second@inner:33", "kill=died@giving:1", "hold=third@inner:57")
    others = {number: run.replica(number, *giving) for number in (0, 2)}
    killed(run, "1", run.replica(1, "kill@inner:22"))
    until("the others go on", lambda: run.lines(0)[-1]["replicas"] == 2)
    second = run.replica(1, "touch=second@up:1")
    until("one of the others is dead", lambda: any(process.poll() is not None for process in others.values()))
    (giver,) = (number for number, process in others.items() if process.poll() is not None)
    (last,) = {0, 2} - {giver}
    killed(run, str(giver), others[giver])
    until("the last one gives it", lambda: run.newcomers(last) == [1])
    third = run.replica(giver, "touch=third@up:1")
    for number, process in ((last, others[last]), (1, second), (giver, third)):
        run.ended(str(number), process)
    good(run, "three", of=(0, 1, 2), always=(last,), newcomers=[1, 1], sizes=[3, 2, 1, 2, 3])
    tell_recovery(run, "kill at inner", of=1, survivor=last)
    tell_recovery(run, "kill at giving", of=giver, survivor=last)


def test_of_three_one_is_killed_at_each_moment(begin: Begin, good: Good) -> None:
    """Between quorum and reduction, its successor while it is healed, and another one with a delayed sum under way.

    Each time the other two go on together, in two fragments on an int8 wire.
    """
    run = begin("three streaming")
    first = run.replica(0, "hold=second@inner:25", "hold=third@inner:43", "hold=fourth@inner:70")
    other = run.replica(2, "kill@under way:38")
    killed(run, "1", run.replica(1, "kill@reduce:5"))
    killed(run, "1", run.replica(1, "touch=second@up:1", "kill@taking:1"))
    third = run.replica(1, "touch=third@up:1")
    killed(run, "2", other)
    fourth = run.replica(2, "touch=fourth@up:1")
    all_end(run, [first, third, fourth])
    good(run, "three streaming", of=(0, 1, 2), sizes=[3, 2, 3, 2, 3], newcomers=[1, 1, 1, 1])  # each in each fragment
    for fault, of in (("kill at reduce", 1), ("kill at taking", 1), ("kill at under way", 2)):
        say(f"{fault}: the next round counted {run.wait_after(fault, of, 0):.2f} s later")


@pytest.mark.parametrize(
    ("kind", "fault", "step"),
    [
        ("two", "reduce:6", 33),
        ("two", "counted:7", 33),
        ("streaming", "under way:11", 40),
    ],
)
def test_one_of_two_is_killed(begin: Begin, good: Good, kind: str, fault: str, step: int) -> None:
    """Between quorum and outer step, or with a sum of two fragments under way.

    The other repeats the sync alone unless it had succeeded, and waits at a step for the successor. No round counts
    twice.
    """
    run = begin(kind, alone=2)
    first = run.replica(0, f"hold=second@inner:{step}")
    killed(run, "1", run.replica(1, f"kill@{fault}"))
    second = run.replica(1, "touch=second@up:1")
    all_end(run, [first, second])
    good(run, kind, newcomers=[1] * (2 if "under way" in fault else 1), sizes=[2, 1, 2])  # one in each fragment
    lines = run.lines(0)
    moment = fault.partition(":")[0]
    if kind == "two":
        counted = moment == "counted"  # both had all that the round needs
        assert (lines[5]["attempts"] == 1) == counted
        assert lines[5]["replicas"] == (2 if counted else 1)
    else:
        assert max(line["attempts"] for line in lines) > 1
    tell_recovery(run, f"kill at {moment}", of=1, survivor=0)


def test_both_are_stopped_with_a_sync_under_way(begin: Begin, good: Good) -> None:
    """Ctrl-C on both while one waits for the other at a sync with a delay: that one ends the sync first, alone.

    So it is further than the other when both are started again, and gives it its state.
    """
    run = begin("delayed", alone=2)
    both = [run.replica(0, "touch=there@inner:18"), run.replica(1, "hold=go@inner:17")]
    run.await_event(1, "hold at inner")
    until("the first is at the sync of step 18", (run.folder / "there").exists)
    for process in both:
        process.send_signal(signal.SIGINT)
    run.touch("go")
    all_end(run, both, 130)
    steps = [latest_step(run.out / f"replica-{number}" / "checkpoint") for number in (0, 1)]
    assert steps == [20, 17]
    both = [run.replica(number, options=["--min-replicas", "2"]) for number in (0, 1)]
    all_end(run, both)
    good(run, "delayed", sizes=[2, 1, 2])


def test_a_history_of_its_own_is_set_aside(begin: Begin, good: Good) -> None:
    """A replica repeats a round alone and saves it; killed, it comes back into another's repetition of that round.

    What it has then is the other's, so its own record does not go on, and is kept.
    """
    run = begin("two", "--sync-timeout", "3", "--checkpoint-every", "1", alone=2)
    first = run.replica(0, "stop@reduce:6")
    second = run.replica(1, "hold=never@inner:26")
    until("stopped", lambda: stopped(first))
    run.await_event(1, "hold at inner")
    until("a checkpoint of step 24", lambda: latest_step(run.out / "replica-1" / "checkpoint") == 24)
    second.kill()
    run.ended("1", second, -signal.SIGKILL)
    again = run.replica(1, "touch=up@up:1", options=["--min-replicas", "2"])
    until("up", (run.folder / "up").exists)
    time.sleep(0.5)
    wake(first)
    all_end(run, [first, again])
    good(run, "two")
    (old,) = run.out.glob("replica-1/parted-*")
    assert old.name == "parted-00000024"
    rounds = {line["round"]: line["checksum"] for line in read_lines(old / "rounds.jsonl")}
    assert sorted(rounds) == list(range(1, 7))
    checksums = {line["round"]: line["checksum"] for line in run.lines(0)}
    assert [number for number in rounds if rounds[number] != checksums[number]] == [6]
    assert latest_step(old / "checkpoint") == 24
    (said,) = (line for line in run.said("1") if "parted" in line)
    assert "step 24 of this replica's record is not of this run, which begins a new one; " in said


def test_a_record_of_an_earlier_life_is_set_aside_at_the_first_sync(begin: Begin, good: Good) -> None:
    """Both die before their first checkpoint; one begins again alone, and the other comes into its first sync."""
    run = begin("two", "--checkpoint-every", "100", alone=2)
    both = [run.replica(number, "kill@inner:14") for number in (0, 1)]
    for number, process in enumerate(both):
        killed(run, str(number), process)
    assert [line["round"] for line in run.lines(1)] == [1, 2, 3]
    first = run.replica(0, "hold=second@inner:2", options=["--min-replicas", "1"])
    run.await_event(0, "hold at inner")
    second = run.replica(1, "touch=second@up:1", options=["--min-replicas", "1"])
    all_end(run, [first, second])
    good(run, "two")
    assert [line["round"] for line in run.lines(1)] == list(range(1, ROUNDS + 1))
    (old,) = run.out.glob("replica-1/parted-*")
    assert [line["round"] for line in read_lines(old / "rounds.jsonl")] == [1, 2, 3]


# --- paused, cut off, without a lighthouse ----------------------------------------------------------------------------


def test_paused_for_longer_than_the_timeouts(begin: Begin, good: Good) -> None:
    """SIGSTOP between inner steps and in a reduction, longer than the timeouts: left behind, and healed afterwards."""
    run = begin("long", "--sync-timeout", "3", alone=2)
    paces = ("pace=back@inner:34", "pace=again@inner:66")  # else the first could end before the second is back
    first = run.replica(0, "hold=once@inner:33", "hold=twice@inner:65", *paces)
    second = run.replica(1, "stop@inner:14", "touch=back@healed:1", "stop@reduce:8", "touch=again@healed:2")
    for number, file in enumerate(("once", "twice"), start=1):
        until("stopped", lambda: stopped(second))
        # It has gone on alone: first the time of the heartbeat was up, then that of the sync.
        run.await_event(0, "hold at inner", number)
        wake(second)
        run.touch(file)
    all_end(run, [first, second])
    good(run, "long", newcomers=[1, 1], sizes=[2, 1, 2, 1, 2])
    assert max(line["attempts"] for line in run.lines(0)) > 1
    say(f"stopped in the inner phase: next round after {run.wait_after('stop at inner', 1, 0):.2f} s")
    say(f"stopped in a reduction (timeout 3 s): next round after {run.wait_after('stop at reduce', 1, 0):.2f} s")


def test_the_lighthouse_is_killed_and_comes_back(
    begin: Begin, good: Good, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    """Without a lighthouse for some seconds all wait at the next sync, and then go on together, as if nothing were.

    The one that comes back counts quorums from 1 again and knows no replica: the first that asks must not go on alone.
    """
    port = free_port()
    command = [sys.executable, elastic.__file__, str(port)]
    with Processes(tmp_path / "light") as lights:
        light = lights.start("lighthouse", command, RUST_LOG="off")
        until("a lighthouse", lambda: listens(port))
        run = begin("two", url=f"http://127.0.0.1:{port}")
        both = [run.replica(number, "hold=dark@inner:41") for number in range(2)]
        run.await_event(0, "hold at inner")
        light.kill()
        light.wait()
        dark = time.time()
        run.touch("dark")
        time.sleep(1.5 * HEARTBEAT)
        assert all(event["time"] < dark for event in run.events(0) if event["what"] == "round")
        lights.start("lighthouse", command, RUST_LOG="off")
        until("a lighthouse", lambda: listens(port))
        lit = time.time()
        all_end(run, both)
        good(run, "two", always=(0, 1), newcomers=[], sizes=[2])
        wanted = read_summary(undisturbed("two"))
        assert wanted is not None
        assert run.summary(0)["checksum"] == wanted["checksum"]  # two processes add as one does, so every bit is there
        after = min(e["time"] for e in run.events(0) if e["what"] == "round" and e["time"] > dark)
        say(f"no lighthouse for {lit - dark:.2f} s; the next round counted {after - lit:.2f} s after it came back")


Link = tuple[Hub, list[Place], str]


@pytest.fixture(scope="module")
def link() -> Iterator[Link]:
    """Three places with links between them, where the tests may make such, and a lighthouse at the first."""
    with ExitStack() as stack:
        try:
            hub, places = stack.enter_context(joined(3))
        except Refused as reason:
            pytest.skip(f"no network namespaces: {reason}")
        yield hub, places, stack.enter_context(lighthouse(place=places[0]))


def at_places(run: Run, places: list[Place], *faults: tuple[str, ...], options: Sequence[str] = ()) -> list[Any]:
    """Start a replica at each."""
    return [
        run.replica(number, f"net={place.file}", *words, options=["--host", place.address, *options])
        for number, (place, words) in enumerate(zip(places, faults, strict=True))
    ]


def test_a_link_is_cut_for_longer_than_the_timeout(begin: Begin, good: Good, link: Link) -> None:
    """With the link between two machines cut in a reduction, the one at the lighthouse goes on; the other is healed."""
    hub, (*places, _), url = link
    run = begin("long", "--sync-timeout", "3", url=url, alone=2)
    there = ("hold=cut@reduce:6", "touch=healed@healed:1")
    both = at_places(run, places, ("hold=cut@reduce:6", "hold=whole@inner:33", "pace=healed@inner:34"), there)
    for number in range(2):
        run.await_event(number, "hold at reduce")
    hub.cut(1)
    run.touch("cut")
    cut = time.time()
    run.await_event(0, "hold at inner")  # it goes on alone after its timeout, which the other's began with
    hub.mend(1)
    mended = time.time()
    run.touch("whole")
    all_end(run, both)
    good(run, "long", newcomers=[1], sizes=[2, 1, 2])
    assert run.lines(0)[5]["attempts"] > 1
    here, back = (min(e["time"] for e in run.events(n) if e["what"] == "round" and e["time"] > cut) for n in (0, 1))
    say(f"cut in a reduction (timeout 3 s): next round after {here - cut:.2f} s")
    say(f"cut for {mended - cut:.2f} s: the other counted a round again {back - mended:.2f} s after that")


def test_a_slow_link(begin: Begin, link: Link, tmp_path: Path) -> None:
    """At 50 Mbit/s replicas agree as ever, and int8 sends a quarter of float32's bytes."""
    hub, (*places, _), url = link
    big = ["--model.hidden-size", "256", "--model.intermediate-size", "512", "--model.layers", "2", "--steps", "4"]
    lines_by_wire: dict[str, list[dict[str, Any]]] = {}
    for number in range(2):
        hub.shape(number, "50mbit")
    try:
        for wire in ("float32", "int8"):
            run = begin("two", "--out", str(tmp_path / "replicas" / wire), url=url)
            run.out = tmp_path / "replicas" / wire
            both = at_places(run, places, (), (), options=[*big, "--inner-steps", "2", "--sync.wire", wire])
            all_end(run, both)
            lines_by_wire[wire] = run.lines(0)
            assert [line["checksum"] for line in lines_by_wire[wire]] == [line["checksum"] for line in run.lines(1)]
            assert [line["replicas"] for line in lines_by_wire[wire]] == [2] * 2
    finally:
        for number in range(2):
            hub.unshape(number)
    sent = {wire: lines[0]["bytes_sent"] for wire, lines in lines_by_wire.items()}
    assert 0.25 < sent["int8"] / sent["float32"] < 0.27
    for wire, lines in lines_by_wire.items():
        spent = statistics.median(line["seconds"]["reduce"] for line in lines)
        say(f"{wire} at 50 Mbit/s: {sent[wire] / 1e6:.2f} MB, {spent:.2f} s in a reduction")


# --- one result for one run -------------------------------------------------------------------------------------------


def takes_the_result(run: Run, late: Any) -> None:
    """Replica 1 comes after replica 0's end, and ends with the same result, bit for bit, and one line that says so."""
    run.ended("1", late)
    (line,) = [line for line in run.said("1") if "the run ended without this replica" in line]
    assert run.summary(0)["checksum"] in line
    for key in ("checksum", "perplexity", "steps", "rounds", "exit_reason"):
        assert run.summary(1)[key] == run.summary(0)[key], key
    weights = [(run.out / f"replica-{number}/weights.safetensors").read_bytes() for number in (0, 1)]
    assert weights[0] == weights[1]


@pytest.mark.parametrize(("kind", "alone"), [("three", 0), ("two", 2)])
def test_suspended_for_longer_than_the_run(begin: Begin, good: Good, kind: str, alone: int) -> None:
    """Stopped until the others have finished, a replica has their result, also where it might go on alone."""
    run = begin(kind, alone=alone)
    late = run.replica(1, "stop@inner:22")
    others = {number: run.replica(number) for number in (0, *((2,) if kind == "three" else ()))}
    for number, process in others.items():
        run.ended(str(number), process)
    assert stopped(late)
    wake(late)
    takes_the_result(run, late)
    good(run, kind)
    assert max(line["round"] for line in run.lines(1)) == 5
    assert any(line["minority"] for line in run.lines(0)) == (alone > 0)


def test_restarted_after_the_others_have_finished(begin: Begin, tmp_path: Path) -> None:
    """Killed, and started again after the end: it is refused while the result is out of reach, and then takes it over.

    The lighthouse may be gone by then. A file that holds the end of another configuration's run is refused as well.
    """
    record = tmp_path / "the record.json"
    run = begin("two", "--run-record", str(record), alone=2)
    others = [run.replica(0)]
    killed(run, "1", run.replica(1, "kill@inner:22"))
    all_end(run, others)
    run.words[run.words.index("--lighthouse") + 1] = f"http://127.0.0.1:{free_port()}"
    (run.out / "replica-0").rename(tmp_path / "elsewhere")
    run.ended("1", run.replica(1), 1)
    line = run.said("1")[-1]
    assert f"the run is over ({record}), with checksum " in line
    assert "Copy weights.safetensors from there to " in line
    run.ended("1", run.replica(1, options=["--outer.lr", "0.5", "--out", str(tmp_path / "new")]), 2)
    assert "holds the end of another run" in run.said("1")[-1]
    (tmp_path / "elsewhere").rename(run.out / "replica-0")
    takes_the_result(run, run.replica(1))


def test_a_run_that_began_earlier_does_not_meddle(begin: Begin, good: Good, tmp_path: Path) -> None:
    """A replica of an earlier run wakes up at the lighthouse of a new one: it ends, and that goes on."""
    with lighthouse() as url:
        old = begin("two", "--min-replicas", "1", "--out", str(tmp_path / "old"), url=url)
        sleeper = old.replica(0, "stop@inner:61")
        until("stopped", lambda: stopped(sleeper))
        time.sleep(HEARTBEAT + 0.5)
        run = begin("two", url=url)
        both = [run.replica(number, "hold=awake@inner:21") for number in (0, 1)]
        for number in (0, 1):
            run.await_event(number, "hold at inner")
        wake(sleeper)
        time.sleep(0.5)
        run.touch("awake")
        old.ended("0", sleeper, 1)
        all_end(run, both)
    good(run, "two", always=(0, 1))
    assert any("this replica belongs to run " in line for line in old.said("0"))


def test_a_minority_waits(begin: Begin, good: Good, link: Link) -> None:
    """Cut off with the lighthouse from both others, one of three trains no round alone, and goes on with them later."""
    hub, places, url = link
    run = begin("three", url=url)
    processes = at_places(run, places, *[("hold=cut@inner:22",)] * 3)
    for number in range(3):
        run.await_event(number, "hold at inner")
    for port in (1, 2):
        hub.cut(port)
    run.touch("cut")
    until("the one at the lighthouse waits", lambda: any("1 of the last sync's replicas" in s for s in run.said("0")))
    time.sleep(1.5 * HEARTBEAT)
    assert [line["round"] for line in run.lines(0)] == [1, 2, 3, 4, 5]
    for port in (1, 2):
        hub.mend(port)
    all_end(run, processes)
    good(run, "three", of=(0, 1, 2))
    assert min(line["replicas"] for line in run.lines(0)) >= 2
    assert not any(line["minority"] for line in run.lines(0))


def test_two_of_three_die_one_after_the_other(begin: Begin, good: Good) -> None:
    """The second dies while it waits for the first one to be found dead, and is named once more: that costs no 30 s."""
    run = begin("three", alone=3)
    first, last = run.replica(0), run.replica(2)
    killed(run, "1", run.replica(1, "kill@reduce:6"))
    time.sleep(0.3)
    last.kill()
    run.ended("2", last, -signal.SIGKILL)
    all_end(run, [first])
    good(run, "three", of=(0,), sizes=[3, 1])
    waited = run.wait_after("kill at reduce", 1, 0)
    say(f"two of three killed: the next round counted {waited:.2f} s later (heartbeat timeout {HEARTBEAT:g} s)")
    assert waited < 10 * HEARTBEAT  # a single wait, with whatever else the machine does; tests/faults judges the many


# --- torchrun's processes ---------------------------------------------------------------------------------------------


@pytest.fixture
def words(base: TrainConfig, tmp_path: Path) -> list[str]:
    """A command that trains in the folder `run`; a later `--out` names another."""
    (tmp_path / "config.yaml").write_text(dump_yaml(base))
    return ["train", "--config", str(tmp_path / "config.yaml"), "--out", str(tmp_path / "run"), "--quiet"]


def test_one_of_a_group_is_killed(words: list[str], undisturbed: Undisturbed, tmp_path: Path) -> None:
    """The other ends with status 1 and one message; the repeated command gives the bytes of an undisturbed run."""
    with Processes(tmp_path / "words") as processes:
        env = places(2)
        first = processes.start("0", [sys.executable, "-m", "twophase", *words], **env[0])
        command = [sys.executable, str(DRIVER), f"events={tmp_path / 'events'}", "kill@reduce:14", "--", *words]
        second = processes.start("1", command, **env[1])
        processes.ended("1", second, -signal.SIGKILL)
        dead = time.time()
        processes.ended("0", first, 1)
        say(f"killed: the other ended {time.time() - dead:.2f} s later")
        (line,) = processes.said("0")
        assert line.startswith("twophase train: failed: the connection to the other processes is lost (")
        assert "Checkpoints are intact: repeat the command to resume" in line
        again = [processes.start("again", [sys.executable, "-m", "twophase", *words], **env) for env in places(2)]
        for process in again:
            processes.ended("again", process)
    whole = undisturbed("two")
    assert (tmp_path / "run/weights.safetensors").read_bytes() == (whole / "weights.safetensors").read_bytes()
    checksums = [[line["checksum"] for line in read_lines(path / "rounds.jsonl")] for path in (tmp_path / "run", whole)]
    assert checksums[0] == checksums[1]


def test_one_of_a_group_stands_still(words: list[str], tmp_path: Path) -> None:
    """It closes no connection, so the other waits for it, but no longer than its timeout; then the same message."""
    with Processes(tmp_path / "words") as processes:
        env = places(2)
        first = processes.start("0", [sys.executable, "-m", "twophase", *words, "--sync-timeout", "2"], **env[0])
        command = [sys.executable, str(DRIVER), f"events={tmp_path / 'events'}", "stop@reduce:2", "--", *words]
        second = processes.start("1", command, **env[1])
        processes.ended("0", first, 1)
        (line,) = processes.said("0")
        assert line.startswith("twophase train: failed: the connection to the other processes is lost (")
        second.kill()


# --- replicas that cannot begin --------------------------------------------------------------------------------------


def test_a_replica_that_cannot_begin_says_so_once(words: list[str], tmp_path: Path) -> None:
    """A taken port, no first process, and no lighthouse: one message each and status 1, in bounded time."""
    command = [sys.executable, str(DRIVER), "connect=1", "--", *words, "--start-timeout", "1"]
    with Processes(tmp_path / "words") as processes, socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        first, second = places(2)
        nowhere = second["MASTER_PORT"]

        def start(name: str, *more: str, **env: str) -> tuple[str, Any]:
            return name, processes.start(name, [*command, "--out", str(tmp_path / name), *more], **env)

        dark = start("dark", "--lighthouse", f"http://127.0.0.1:{nowhere}", "--replica", "0")
        for name, process in (start("taken", **first | {"MASTER_PORT": str(port)}), start("nowhere", **second), dark):
            processes.ended(name, process, 1)
        said = {name: processes.said(name) for name in ("taken", "nowhere", "dark")}
    for name, where in (("taken", port), ("nowhere", nowhere)):
        (line,) = said[name]
        assert f"failed: the processes cannot meet at 127.0.0.1:{where} (" in line
        assert "Give torchrun an address that all machines reach and a free port" in line
    (line,) = said["dark"]
    assert f"failed: TorchFT: the lighthouse at http://127.0.0.1:{nowhere} cannot be reached for 1 s (" in line
    assert not any((tmp_path / name / "rounds.jsonl").exists() for name in said)


def test_a_timeout_that_a_heal_would_outlast(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is refused with status 1 before anything is trained, with what would do."""
    assert main([*words, "--lighthouse", "http://127.0.0.1:1", "--replica", "0", "--sync-timeout", "4"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "timeout is 4 s, but a restarted replica receives about" in line
    assert "Pass timeout=5 or more" in line
    assert not (tmp_path / "run/replica-0/rounds.jsonl").exists()
