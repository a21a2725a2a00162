"""Sweeps by the command line, with real runs: killed, merged, extended, with workers elsewhere, on a full disk."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import resource
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import textmaker
from commands import SMALL, outcome, snapshot
from forked import Forked
from twophase.cli.main import main
from twophase.cli.sweeping import MOST_CELLS, take_slurm_options
from twophase.sweep import crew as launch
from twophase.sweep.grid import Sweep, parse_axes, product
from twophase.sweep.plan import Plan, plan
from twophase.sweep.slurm import submit
from twophase.sweep.table import Row, read_rows
from twophase.sweep.work import Work, executed
from twophase.tasks.lm.config import DataConfig, ModelConfig, TrainConfig
from twophase.training.checkpoint import latest_step
from twophase.training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("forked_workers")

GRID = "--axis outer.momentum 0.5 0.9 --axis outer.restart never 2 3 --axis outer.lr 0.3 0.7".split()


@dataclass(frozen=True)
class Said:
    """What a command said, and its status."""

    status: int
    out: str
    err: str


Call = Callable[..., Said]


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    """A `file:` corpus."""
    return f"file:{textmaker.write(tmp_path / 'text.txt')}"


@pytest.fixture
def call(corpus: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Call:
    """A command in this process, which spares importing torch again; a sweep's is of small runs."""
    monkeypatch.delenv("TWOPHASE_STORAGE", raising=False)

    def run(*words: str | Path) -> Said:
        capsys.readouterr()
        given = [*words[:1], *SMALL, "--data.corpus", corpus, *words[1:]] if words[0] == "sweep" else words
        status = main(list(map(str, given)))
        said = capsys.readouterr()
        return Said(status, str(said.out), str(said.err))

    return run


def outcomes(folder: Path) -> dict[str, dict[str, Any]]:
    return {path.name: outcome(path) for path in (folder / "runs").iterdir()}


def numbers(rows: list[Row]) -> list[tuple[Any, ...]]:
    """Rows without their times."""
    return [(row.arm, row.run, dict(row.values), row.state, row.perplexity, row.validation_loss) for row in rows]


def planned(corpus: str, axes: Sequence[str], **options: Any) -> Plan:
    """The plan of a grid of small runs."""
    base = TrainConfig(
        model=ModelConfig(layers=1, hidden_size=16, intermediate_size=24),
        data=DataConfig(corpus=corpus, sequence_length=16, batch_size=4, validation_windows=8),
        steps=22,
        inner_steps=6,
        checkpoint_every=1,
    )
    entries = [entry.split() for entry in " ".join(axes).split("--axis ")[1:]]
    return plan(Sweep("sweep", base, product(base, parse_axes(entries, base))), **options)


def steps_done(folder: Path) -> int:
    return sum(record["steps"] for record in executed(folder))


# --------------------------------------------------------------------------------------------------------------- kills


def workers_of(folder: Path) -> list[int]:
    """The processes that write their output into a sweep's folder, as workers do, forked ones too; no zombies."""
    found = []
    for path in Path("/proc").glob("[0-9]*/fd/1"):
        with contextlib.suppress(OSError):  # it has ended meanwhile, or belongs to another user
            if path.readlink().is_relative_to(folder):
                found.append(int(path.parts[2]))
    return found


def claimants(folder: Path) -> set[int]:
    """The processes that have had a job of a sweep, and so have their imports behind them."""
    pids = set()
    for path in (folder / "claims").glob("[!.]*.*"):
        with contextlib.suppress(OSError, ValueError):  # it ends or begins at this moment
            pids.add(json.loads(path.read_text())["pid"])
    return pids


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(900)  # two whole sweeps, one of them killed again and again
@pytest.mark.skipif(not Path("/proc/self/fd/1").exists(), reason="finds the workers in /proc")
def test_killed_at_random_moments(tmp_path: Path, corpus: str, call: Call) -> None:
    """SIGKILL to random workers, and to the parent: in the end every run is bit for bit that of one quiet worker."""
    axes = "--axis outer.momentum 0.5 0.9 --axis outer.restart never 2 3 5 --axis outer.lr 0.3 0.7".split()
    size = ["--steps", "42"]
    quiet, folder = tmp_path / "quiet", tmp_path / "sweep"
    assert call("sweep", *size, *axes, "--out", quiet, "--workers", "0").status == 0
    assert call("sweep-worker", "--out", quiet).status == 0
    assert call("sweep", *size, *axes, "--out", quiet, "--workers", "0").status == 0

    words = ["sweep", *SMALL, "--data.corpus", corpus, *size, *axes, "--out", str(folder), "--workers", "4"]
    source, kills, ends = random.Random(0), 0, []
    while 0 not in ends:
        process = Forked(*words)
        while process.poll() is None:
            time.sleep(source.uniform(0.02, 0.2))
            victims = sorted(claimants(folder).intersection(workers_of(folder)))
            if kills < 5 and victims:
                os.kill(source.choice(victims), signal.SIGKILL)
                kills += 1
                if kills == 3:
                    process.kill()
        assert "Traceback" not in "".join(process.communicate(timeout=60))
        ends.append(process.returncode)
    assert kills >= 3, "the sweep was over before it could be killed; make it longer"
    assert ends.count(-signal.SIGKILL) == 1
    assert set(ends) <= {-signal.SIGKILL, 0, 1}  # 1 if a job has seen three workers die, which the next command forgets

    rows = read_rows(folder / "cells.csv")
    assert [row.state for row in rows] == ["finished"] * 16
    assert len({tuple(row.values.items()) for row in rows}) == 16
    assert numbers(rows) == numbers(read_rows(quiet / "cells.csv"))
    assert outcomes(folder) == outcomes(quiet)
    assert list((folder / "forest").iterdir()) == []
    assert workers_of(folder) == []
    assert "nothing has changed" in call("sweep", *size, *axes, "--out", folder, "--workers", "4").out


# ------------------------------------------------------------------------------------------------- merging and planning


@pytest.mark.slow
def test_seeds_alone(tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep whose only axis is the seed is one setting with a mean. Its worker is a real one, nothing is forked."""
    monkeypatch.setattr(launch, "subprocess", subprocess)
    done = call("sweep", "--axis", "seed", "0", "1", "--out", tmp_path / "sweep", "--workers", "1")
    assert done.status == 0, done.err
    assert "Mean over 2 seeds" in done.out
    assert (tmp_path / "sweep" / "figures" / "sweep.png").exists()


@pytest.mark.slow
def test_twins_and_no_merge(tmp_path: Path, call: Call) -> None:
    """Cells that are one run in exact arithmetic have one result; run apart they agree with it to rounding."""
    axes = "--axis outer.momentum 0 0.9 --axis outer.restart never 1 9".split()
    for name, options in (("merged", []), ("apart", ["--no-merge"])):
        words = ["sweep", *axes, *options, "--out", tmp_path / name, "--workers", "0"]
        assert call(*words).status == 0
        assert call("sweep-worker", "--out", tmp_path / name).status == 0
        assert call(*words).status == 0
    merged, apart = (read_rows(tmp_path / name / "cells.csv") for name in ("merged", "apart"))
    canonical = [row.twin_of or row.run for row in merged]
    assert [row.run for row in merged] == [row.run for row in apart]
    assert [row.twin_of for row in apart] == [None] * 6
    # Momentum 0 three times; 0.9 without restart, also beyond the end; 0.9 with a restart each round, which is SGD of
    # another learning rate.
    assert len(set(canonical)) == 3
    assert canonical[0] == canonical[1] == canonical[2]
    assert canonical[3] == canonical[5] != canonical[4]
    assert [row.twin_of is None for row in merged] == [True, False, False, True, True, False]
    found = {row.run: row.perplexity for row in apart}
    for row, run in zip(merged, canonical, strict=True):
        assert row.perplexity == found[run]  # the very run
        assert row.perplexity == pytest.approx(found[row.run], rel=1e-4)  # the same but for rounding
    assert {path.name for path in (tmp_path / "merged" / "runs").iterdir()} == set(canonical)
    with_option = call("sweep", *axes, "--no-merge", "--out", tmp_path / "merged", "--workers", "0")
    assert with_option.status == 2
    assert "was begun without --no-merge there, with it here" in with_option.err


def test_dry_run(tmp_path: Path, corpus: str, call: Call) -> None:
    """`--dry-run` tells the plan's numbers, of what is left too, and writes nothing, however large the grid."""
    axes = [*GRID, "--axis", "outer.form", "sum", "ema"]
    before = snapshot(tmp_path)
    said = call("sweep", *axes, "--out", tmp_path / "sweep", "--dry-run")
    assert said.status == 0
    assert snapshot(tmp_path) == before
    assert not (tmp_path / "sweep").exists()
    made = planned(corpus, axes)

    def told(text: str) -> dict[str, str]:
        lines = (line.rpartition("  ") for line in text.splitlines()[:6])
        return {name.strip(): value.strip() for name, _, value in lines}

    assert told(said.out) == {
        "cells asked": "24",
        "distinct runs": str(len(made.runs)),
        "of them finished": "0",
        "inner steps asked": str(24 * 22),
        "inner steps to execute": str(made.steps),
        "asked / to execute": f"{24 * 22 / made.steps:.2f}",
    }
    assert f"Merging leaves {len(made.runs)} of 24 runs" in said.out
    assert str(made.steps_algebra) in said.out
    assert "Estimated time: " in said.out
    many = ["--axis", "seed", *map(str, range(MOST_CELLS + 1))]
    assert told(call("sweep", *many, "--out", tmp_path / "sweep", "--dry-run").out)["cells asked"] == "1001"
    assert snapshot(tmp_path) == before


def test_many_cells_need_a_yes(tmp_path: Path, call: Call) -> None:
    """More than 1000 cells are refused in one line that names `--yes`; with it the sweep begins."""
    words = ["sweep", "--axis", "seed", *map(str, range(MOST_CELLS + 1)), "--out", tmp_path / "sweep", "--workers", "0"]
    before = snapshot(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("twophase.cli.sweeping.run_sweep", lambda *_, **__: pytest.fail("the sweep has begun"))
        said = call(*words)
        assert said.status == 2
        assert len(said.err.splitlines()) == 1
        assert "the grid has 1001 cells (1001 runs), more than 1000" in said.err
        assert "--yes" in said.err
        assert snapshot(tmp_path) == before
        with pytest.raises(pytest.fail.Exception, match="the sweep has begun"):
            call(*words, "--yes")


@pytest.mark.slow
def test_extension(tmp_path: Path, corpus: str, call: Call) -> None:
    """More values keep every byte of what is finished, execute what the plan says, and no finished node again."""
    folder = tmp_path / "sweep"
    small = "--axis outer.lr 0.3 0.7 --axis outer.momentum 0 0.9 --axis outer.restart 2".split()
    large = "--axis outer.lr 0.3 0.5 0.7 --axis outer.momentum 0 0.9 --axis outer.restart never 2 3".split()
    for axes in (small, large):
        finished = {path.name for path in folder.glob("runs/*")}
        before, steps = snapshot(folder / "runs") if finished else {}, steps_done(folder)
        made = planned(corpus, axes, finished=finished)
        assert finished <= set(made.runs)  # what is finished stands for its twins, though there are plainer ones now
        left = set(made.runs) - finished
        assert call("sweep", *axes, "--out", folder, "--workers", "0").status == 0
        assert call("sweep-worker", "--out", folder).status == 0
        said = call("sweep", *axes, "--out", folder, "--workers", "0")
        assert said.status == 0
        nodes = [node for node in made.forest.nodes.values() if not left.isdisjoint(node.runs)]
        assert steps_done(folder) - steps == sum(node.steps for node in nodes)
        after = snapshot(folder / "runs")
        assert {name: after[name] for name in before} == before
        assert [row.state for row in read_rows(folder / "cells.csv")] == ["finished"] * made.cells
        assert list((folder / "forest").iterdir()) == []
    refused = call("sweep", *small, "--out", folder, "--workers", "0")
    assert refused.status == 2
    assert "axis outer.lr is [0.3, 0.5, 0.7] there, [0.3, 0.7] here" in refused.err


@pytest.fixture
def stop_after(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, signal.Signals], None]:
    """Lets this process get a signal in its so-manyth inner step from now."""

    def arm(steps: int, number: signal.Signals) -> None:
        step, left = Trainer.inner_step, [steps]

        def counted(self: Trainer) -> None:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), number)
            step(self)

        monkeypatch.setattr(Trainer, "inner_step", counted)

    return arm


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_stopped_worker(
    tmp_path: Path, call: Call, stop_after: Callable[..., None], number: signal.Signals, status: int
) -> None:
    """A signal makes a worker save and give its job back; in the end not one inner step has been taken twice."""
    folder = tmp_path / "sweep"
    assert call("sweep", *GRID, "--out", folder, "--workers", "0").status == 0
    made = Work.read(folder)
    assert made is not None
    for steps in (3, 40, 25):
        stop_after(steps, number)
        assert call("sweep-worker", "--out", folder).status == status
    assert steps_done(folder) == 3 + 40 + 25
    assert call("sweep-worker", "--out", folder).status == 0
    assert steps_done(folder) == made.forest.steps == made.counts["steps"]
    assert "12 were finished before" in call("sweep", *GRID, "--out", folder, "--workers", "0").out


@pytest.mark.slow
def test_extension_of_a_stopped_sweep(tmp_path: Path, call: Call, stop_after: Callable[..., None]) -> None:
    """A sweep that was stopped in the middle and extended gives the bits of the larger one in one go."""
    large = [*GRID, "0.5"]  # another outer.lr
    assert call("sweep", *GRID, "--out", tmp_path / "sweep", "--workers", "0").status == 0
    stop_after(70, signal.SIGTERM)
    assert call("sweep-worker", "--out", tmp_path / "sweep").status == 143
    assert list((tmp_path / "sweep" / "forest").iterdir()) != []
    for folder in (tmp_path / "sweep", tmp_path / "one go"):
        for words in (["sweep", *large], ["sweep-worker"], ["sweep", *large]):
            rest = ["--workers", "0"] if words[0] == "sweep" else []
            assert call(*words, "--out", folder, *rest).status == 0
        assert list((folder / "forest").iterdir()) == []
    assert outcomes(tmp_path / "sweep") == outcomes(tmp_path / "one go")
    assert numbers(read_rows(tmp_path / "sweep" / "cells.csv")) == numbers(read_rows(tmp_path / "one go" / "cells.csv"))


# ------------------------------------------------------------------------------------------- runs that share no steps

BLOCKS = "--sync.fragments a=embedding|head b=.".split()
BY_BLOCK = "--axis sync.restart none a=loss,b=auto a=probe:keep,average,b=cycle:5,6".split()


@pytest.mark.slow
def test_policies_by_block(tmp_path: Path, corpus: str, call: Call) -> None:
    """Cells with a policy for each fragment are the runs of `train` byte for byte, and arms of the sweep's tables."""
    folder = tmp_path / "sweep"
    words = ["sweep", *BLOCKS, *BY_BLOCK, "--axis", "outer.lr", "0.3", "0.7", "--controls", "--out", folder]
    said = call(*words, "--workers", "0")
    assert said.status == 0, said.err
    assert call("sweep-worker", "--out", folder).status == 0
    said = call(*words, "--workers", "0")
    assert "9 were finished before" in said.out
    rows = read_rows(folder / "cells.csv")
    texts = ["none", "a=loss:0.0,b=auto", "a=probe:keep,average,b=cycle:5,6"]
    found = [(row.arm, row.values["sync.restart"], row.state, row.twin_of) for row in rows]
    grid = [(arm, text, "finished", None) for arm, text in zip(["never", *texts[1:]], texts, strict=True)]
    assert found == [grid[0]] * 2 + [grid[1]] * 2 + [grid[2]] * 2 + [("momentum-free", "none", "finished", None)] * 3
    assert steps_done(folder) == 9 * 22
    for row, policies in ((rows[1], ""), (rows[3], "--sync.restart a=loss:0.0 b=auto")):
        alone = tmp_path / row.run
        given = [*SMALL, "--data.corpus", corpus, *BLOCKS, *policies.split(), "--outer.lr", "0.7"]
        assert call("train", *given, "--out", alone).status == 0
        assert outcome(folder / "runs" / row.run) == outcome(alone)
        kept = {path.name for path in (folder / "runs" / row.run / "checkpoint").iterdir()}
        assert kept == {path.name for path in (alone / "checkpoint").iterdir()} != set()
    report = call("report", folder)
    assert report.status == 0
    assert texts[1] in report.out
    assert "nothing has changed" in call(*words, "--workers", "2").out


def test_dry_run_of_what_shares_nothing(tmp_path: Path, corpus: str, call: Call) -> None:
    """Plain cells share their steps as ever; the others are counted whole, and none of them is another's twin."""
    plain = "--axis outer.momentum 0 0.9 --axis outer.restart never 2 3".split()
    made = planned(corpus, plain)
    said = call("sweep", *plain, "--axis", "sync.delay", "0", "2", "--out", tmp_path / "sweep", "--dry-run")
    assert said.status == 0, said.err
    told = dict(re.split(r"  +", line) for line in said.out.splitlines()[:5])
    assert told == {
        "cells asked": "12",
        "distinct runs": str(len(made.runs) + 6),
        "of them finished": "0",
        "inner steps asked": str(12 * 22),
        "inner steps to execute": str(made.steps + 6 * 22),
    }
    assert not (tmp_path / "sweep").exists()


def test_fragments_that_the_model_does_not_have(tmp_path: Path, call: Call) -> None:
    """One cell of a sweep that the model cannot be cut for is told by the option, and nothing is made."""
    axis = "--axis sync.fragments 1 a=embedding|head,b=tail".split()
    said = call("sweep", *axis, "--workers", "0", "--out", tmp_path / "sweep")
    assert said.status == 2
    assert "--sync.fragments a=embedding|head b=tail: " in said.err
    assert "no fragment's pattern is found in the parameter name 'norm'" in said.err
    assert not (tmp_path / "sweep").exists()


@pytest.mark.slow
@pytest.mark.dist
def test_killed_in_a_run_that_shares_nothing(tmp_path: Path, call: Call, stop_after: Callable[..., None]) -> None:
    """Stopped or killed in such a run, a worker leaves a checkpoint from which another goes on, to the same bytes."""
    axes = "--steps 160 --sync.delay 2 --axis outer.restart never 2".split()
    quiet, folder = tmp_path / "quiet", tmp_path / "sweep"
    for path in (quiet, folder):
        assert call("sweep", *axes, "--out", path, "--workers", "0").status == 0
    assert call("sweep-worker", "--out", quiet).status == 0
    stop_after(27, signal.SIGTERM)  # in the middle of a round
    assert call("sweep-worker", "--out", folder).status == 143
    (run,) = (path for path in folder.glob("runs/*"))
    assert (steps_done(folder), latest_step(run / "checkpoint")) == (27, 27)

    process = Forked("sweep-worker", "--out", folder)
    while process.poll() is None and (latest_step(run / "checkpoint") or 0) < 60:
        time.sleep(0.01)
    process.kill()
    process.communicate(timeout=60)
    kept = latest_step(run / "checkpoint") or 0
    assert kept >= 60
    assert not (run / "summary.json").exists(), "the run was over before it could be killed; make it longer"
    assert call("sweep-worker", "--out", folder).status == 0
    assert steps_done(folder) == 27 + (160 - kept) + 160
    assert call("sweep", *axes, "--out", folder, "--workers", "0").status == 0
    assert outcomes(folder) == outcomes(quiet)
    assert [row.state for row in read_rows(folder / "cells.csv")] == ["finished"] * 2


# ---------------------------------------------------------------------------------------------------- workers elsewhere


@pytest.mark.slow
@pytest.mark.parametrize("database", [False, True])
def test_workers_elsewhere(tmp_path: Path, call: Call, database: bool) -> None:
    """`--workers 0` writes the plan and says how to go on; what it says works, with trials in a database too."""
    folder = tmp_path / "sweep"
    url = f"sqlite:///{tmp_path}/trials.db"
    storage = ["--storage", url] if database else []
    words = ["sweep", *GRID, "--out", folder, *storage, "--workers", "0"]
    said = call(*words)
    assert said.status == 0
    assert "0 runs finished" in said.out
    assert "best 0 of 12 settings, 12 missing" in said.out
    hint = next(line for line in said.out.splitlines() if line.startswith("see how far it is"))
    assert shlex.split(hint)[-2:] == ["--workers", "0"]
    assert hint.count("--workers") == 1
    assert call("sweep-worker", "--out", folder).status == 0
    assert (folder / "trials.journal").exists() is not database
    said = call(*words)
    assert said.status == 0
    assert "12 were finished before" in said.out
    assert "best 10 of 12 settings" in said.out
    assert "see how far it is" not in said.out
    assert {path.name for path in (folder / "figures").iterdir()} == {"sweep.png", "sweep.pdf", "sweep.csv"}
    assert "nothing has changed" in call(*words).out


def test_worker_in_the_wrong_place(tmp_path: Path, call: Call) -> None:
    """A worker in a folder without a plan ends with status 2 and says so, and makes nothing."""
    said = call("sweep-worker", "--out", tmp_path / "absent")
    assert (said.status, len(said.err.splitlines())) == (2, 1)
    assert "holds no plan.json; start the sweep there first" in said.err
    assert not (tmp_path / "absent").exists()


@pytest.mark.slow
def test_unreachable_storage(tmp_path: Path, call: Call) -> None:
    """A database that is not there: status 2, one message without the password; nothing is lost, and it goes on."""
    folder, axes = tmp_path / "sweep", ["--axis", "outer.lr", "0.3", "0.7"]
    assert call("sweep", *axes, "--out", folder, "--workers", "0").status == 0
    assert call("sweep-worker", "--out", folder).status == 0
    runs, more = snapshot(folder / "runs"), [*axes, "0.9"]
    # Port 1 of the loopback is closed; without PostgreSQL's driver the message is that it is missing.
    for url, reason in (
        ("postgresql://me:hunter2@127.0.0.1:1/name", ""),
        (f"sqlite:///{tmp_path}/absent/q.db", "unable to open"),
    ):
        said = call("sweep", *more, "--out", folder, "--workers", "1", "--storage", url, "--quiet")
        assert (said.status, len(said.err.splitlines())) == (2, 1), said.err
        assert f"--storage {url.replace('hunter2', '***')}" in said.err
        assert reason in said.err
        assert "hunter2" not in said.err
        assert snapshot(folder / "runs") == runs
    assert call("sweep", *more, "--out", folder, "--workers", "0").status == 0
    assert call("sweep-worker", "--out", folder).status == 0
    assert "3 were finished before" in call("sweep", *more, "--out", folder, "--workers", "0").out
    after = snapshot(folder / "runs")
    assert {name: after[name] for name in runs} == runs


# --------------------------------------------------------------------------------------------------------------- Slurm


def test_slurm_options() -> None:
    """`--slurm-NAME VALUE`, `--slurm-NAME=VALUE` and `--slurm-NAME` are taken out, wherever they stand."""
    words = (
        "--slurm-time 60 --axis outer.lr 0.3 --slurm-exclusive --workers 4 --slurm-mem=8GB --slurm-nice -5 --slurm-x"
    )
    assert take_slurm_options(words.split()) == (
        ["--axis", "outer.lr", "0.3", "--workers", "4"],
        {"time": "60", "exclusive": True, "mem": "8GB", "nice": "-5", "x": True},
    )
    assert take_slurm_options([]) == ([], {})
    assert take_slurm_options(["--slurm-comment", ""]) == ([], {"comment": ""})


def test_slurm_options_without_slurm(tmp_path: Path, call: Call) -> None:
    """An option of Slurm without `--launcher slurm` is refused by name, and nothing is made."""
    said = call("sweep", "--axis", "outer.lr", "0.3", "--slurm-time", "60", "--out", tmp_path / "sweep")
    assert (said.status, len(said.err.splitlines())) == (2, 1)
    assert "--slurm-time is given without --launcher slurm" in said.err
    assert not (tmp_path / "sweep").exists()


def test_slurm_launcher(tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--launcher slurm` submits workers, which need the folder alone; `--workers 0` submits none."""
    calls, url = [], f"sqlite:///{tmp_path}/trials.db"

    def fake(folder: Path, command: list[str], workers: int, options: dict[str, Any]) -> list[str]:
        calls.append((folder, list(command), workers, dict(options)))
        return [f"7_{number}" for number in range(workers)]

    assert callable(submit)
    monkeypatch.setattr("twophase.sweep.slurm.submit", fake)
    folder = tmp_path / "sweep"
    words = ["sweep", "--axis", "outer.lr", "0.3", "0.7", "--launcher", "slurm", "--slurm-time", "60", "--out", folder]
    words += ["--storage", url]
    said = call(*words, "--workers", "5")
    assert said.status == 0
    assert "submitted 5 workers to Slurm: 7_0, 7_1, 7_2, 7_3 …" in said.out
    ((place, command, workers, options),) = calls
    assert (place, workers, options) == (folder, 5, {"time": "60"})
    assert command[-3:] == ["sweep-worker", "--out", str(folder)]
    assert call(*words, "--workers", "0").status == 0
    assert len(calls) == 1


# ------------------------------------------------------------------------------------------------------------ full disk


@contextlib.contextmanager
def small_files(limit: int) -> Iterator[None]:
    """Neither this process nor the workers that it starts can let a file grow beyond the limit."""
    usual, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (usual, hard))


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("what", ["states", "weights"])
def test_full_disk(tmp_path: Path, call: Call, what: str) -> None:
    """Writes that fail in the middle, of states or weights: status 1 and the reason, once; then it goes on as ever."""
    limit, more, reason = {
        "states": (
            40_000,
            "--in-memory 0 --axis outer.restart never 2 --axis seed 0 1",
            "OSError: a state cannot be written into",
        ),
        "weights": (16_000, "--axis outer.restart never --axis seed 0 1 2", "OSError: [Errno 27] File too large"),
    }[what]
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
    folder = tmp_path / "sweep"
    first = ["sweep", *"--axis outer.restart never --axis seed 0".split(), "--out", folder, "--workers", "0"]
    assert call(*first).status == 0
    assert call("sweep-worker", "--out", folder).status == 0
    runs = snapshot(folder / "runs")
    words = ["sweep", *more.split(), "--out", folder, "--workers", "1"]
    with small_files(limit):
        done = call(*words, "--quiet")
    assert done.status == 1, done.err
    assert done.err.count(reason) == 1
    assert "Traceback" not in done.err
    assert "try the failed runs again with" in done.err
    states = [row.state for row in read_rows(folder / "cells.csv")]
    assert states[0] == "finished"
    assert states.count("failed") == 2  # in a sweep with states the fourth run has no sibling left, and needs none
    after = snapshot(folder / "runs")
    assert {name: after[name] for name in runs} == runs
    said = call(*words)
    assert said.status == 0, said.err
    assert {row.state for row in read_rows(folder / "cells.csv")} == {"finished"}
    assert list((folder / "forest").iterdir()) == []
    assert {name: snapshot(folder / "runs")[name] for name in runs} == runs
    made = Work.read(folder)
    assert made is not None
    assert set(outcomes(folder)) == set(made.runs)  # nothing half-written anywhere
