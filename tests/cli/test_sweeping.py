"""Sweeps by the command line, with real runs: killed, merged, extended, with workers elsewhere, on a full disk."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import textmaker
from commands import SMALL, outcome, snapshot
from twophase.base.config import RunError, fingerprint
from twophase.cli import sweeping
from twophase.cli.main import main
from twophase.figures import overview
from twophase.figures.style import write_files
from twophase.runs.folder import read_lines
from twophase.sweeps import crew as launch
from twophase.sweeps.grid import Sweep, parse_axes, product
from twophase.sweeps.plan import Plan, plan
from twophase.sweeps.run import Outcome
from twophase.sweeps.table import Row, read_rows
from twophase.sweeps.work import DONE_LOG, Work
from twophase.tasks.lm.config import TrainConfig
from twophase.tasks.lm.task import corpus_of
from twophase.training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("forked_workers")

DRAW = overview.draw
GRID = "--axis outer.momentum 0.5 0.9 --axis outer.restart never 2 --axis outer.lr 0.3 0.7".split()


@dataclass(frozen=True)
class Said:
    """What a command said."""

    out: str
    err: str


Call = Callable[..., Said]


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    """A `file:` corpus."""
    return f"file:{textmaker.write(tmp_path / 'text.txt')}"


@pytest.fixture
def call(corpus: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Call:
    """A command in this process, with its status; sweeps are of small runs, their figures, which take longer, empty."""
    monkeypatch.setattr(overview, "draw", lambda *words: write_files(words[2] / "sweep", {".png": b""}))

    def run(*words: str | Path, status: int = 0) -> Said:
        capsys.readouterr()
        small = [*words[:1], *SMALL, "--data.corpus", corpus, *words[1:]] if words[0] == "sweep" else words
        ended = main(list(map(str, small)))
        said = capsys.readouterr()
        assert ended == status, said.err
        return Said(str(said.out), str(said.err))

    return run


@pytest.mark.parametrize(
    ("words", "package"),
    [
        (["sweep", *GRID], "matplotlib"),
        (["tune", "digits", "--points", "3"], "pandas"),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_a_missing_extra_is_refused_before_the_first_run(
    call: Call, words: list[str], package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cannot draw, or compare, ends with one message and makes no folder."""
    monkeypatch.setitem(sys.modules, package, None)
    said = call(*words, "--workers", "1", "--out", tmp_path / "sweep", status=2)
    assert package in said.err
    assert ("twophase[plot]" if package == "matplotlib" else "twophase[sweep]") in said.err
    assert not (tmp_path / "sweep").exists()


@pytest.mark.parametrize(("visible", "count", "devices"), [("4,7", 1, ["4", "7"]), ("", 2, ["0", "1"])])
def test_each_worker_has_a_gpu_that_is_visible(
    monkeypatch: pytest.MonkeyPatch, visible: str, count: int, devices: list[str]
) -> None:
    """By the names that CUDA_VISIBLE_DEVICES has, or all; none where no run asks for one."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)
    assert sweeping.devices_of([TrainConfig(), TrainConfig(device="cuda")]) == devices
    assert sweeping.devices_of([TrainConfig()]) == []


def test_a_failed_run_is_an_error_in_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of them is named, with its own message."""
    monkeypatch.setattr("twophase.cli.sweeping.run_sweep", lambda *_, **__: SimpleNamespace(errors={"a": "no room"}))
    with pytest.raises(RunError, match="1 runs failed, a with: no room"):
        sweeping.complete(Sweep("s", TrainConfig(), product(TrainConfig(), [])), tmp_path, texts={}, workers=1)


def test_failed_runs_are_explained(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reason that runs share is said once, with how to try them again, though there may be no table."""

    def fail(sweep: Sweep, *_: Any, **__: Any) -> Outcome:
        return Outcome(0, 0, len(sweep.runs), 0, 1.0, {run: f"OSError: no room for {run}" for run in sweep.runs})

    monkeypatch.setattr("twophase.cli.sweeping.run_sweep", fail)
    words = ["sweep", "--axis", "outer.lr", "0.3", "0.7", "--workers", "1", "--out", tmp_path / "sweep"]
    said = call(*words, status=1)
    assert said.err.count("no room") == 1
    assert "again with" in said.err


@pytest.mark.slow
def test_a_plan_with_an_odd_value(call: Call, tmp_path: Path) -> None:
    """A worker names the file, the value and the remedy."""
    call("sweep", "--axis", "outer.lr", "0.3", "0.7", "--workers", "0", "--out", tmp_path / "sweep")
    path = tmp_path / "sweep" / "plan.json"
    changed = path.read_text().replace('"steps":22,"inner_steps":6', '"steps":"22","inner_steps":6')
    plan = {name: value for name, value in json.loads(changed).items() if name != "fingerprint"}
    signed = json.dumps(plan | {"fingerprint": fingerprint(plan)})
    for text, fault in ((changed, "it has changed"), (signed, "steps is '22', which is not of the kind of ")):
        path.write_text(text)
        said = call("sweep-worker", "--out", tmp_path / "sweep", status=2)
        assert f"its plan.json cannot be used ({fault}" in said.err
        assert "remove that file and repeat the sweep's command" in said.err


def complete(call: Call, folder: Path, *axes: str) -> Said:
    """A sweep that is planned, done by a worker and shown, all in this process."""
    for words in (["sweep", *axes, "--workers", "0"], ["sweep-worker"]):
        call(*words, "--out", folder)
    return call("sweep", *axes, "--workers", "0", "--out", folder)


def outcomes(folder: Path) -> dict[str, dict[str, Any]]:
    return {path.name: outcome(path) for path in (folder / "runs").iterdir()}


def numbers(rows: list[Row]) -> list[tuple[Any, ...]]:
    """Rows without their times."""
    return [(row.arm, row.run, dict(row.values), row.state, row.perplexity, row.validation_loss) for row in rows]


def planned(corpus: str, axes: Sequence[str], **options: Any) -> Plan:
    """The plan of a grid of small runs."""
    text = Path(corpus.removeprefix("file:"))
    base = textmaker.small_run(text, steps=22, inner_steps=6, checkpoint_every=1)
    entries = [entry.split() for entry in " ".join(axes).split("--axis ")[1:]]
    return plan(Sweep("sweep", base, product(base, parse_axes(entries, base))), **options)


def steps_done(folder: Path) -> int:
    return sum(record["steps"] for record in read_lines(folder / DONE_LOG))


# ------------------------------------------------------------------------------------------------- merging and planning


@pytest.mark.slow
def test_seeds_alone(tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep of seeds is one setting with a mean and a figure. Its worker is a real one, nothing is forked."""
    monkeypatch.setattr(launch, "subprocess", subprocess)
    monkeypatch.setattr(overview, "draw", DRAW)
    out = tmp_path / "a sweep"
    done = call("sweep", "--axis", "seed", "0", "1", "--out", out, "--workers", "1")
    assert "Mean over 2 seeds" in done.out
    assert {path.name for path in (out / "figures").iterdir()} == {"sweep.png", "sweep.pdf", "sweep.csv"}
    (next_command,) = (line.partition(": ")[2] for line in done.out.splitlines() if "twophase report" in line)
    assert shlex.split(next_command) == ["twophase", "report", str(out)]  # a folder with a blank is one word


@pytest.mark.slow
def test_twins_and_no_merge(tmp_path: Path, call: Call) -> None:
    """Cells that are one run in exact arithmetic have one result; run apart they agree with it to rounding."""
    axes = "--steps 14 --axis outer.momentum 0 0.9 --axis outer.restart never 1 9".split()
    for name, options in (("merged", []), ("apart", ["--no-merge"])):
        complete(call, tmp_path / name, *axes, *options)
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
    by_run = {row.run: row.perplexity for row in apart}
    for row, run in zip(merged, canonical, strict=True):
        assert row.perplexity == by_run[run]  # the very run
        assert row.perplexity == pytest.approx(by_run[row.run], rel=1e-4)  # the same but for rounding
    assert {path.name for path in (tmp_path / "merged" / "runs").iterdir()} == set(canonical)
    with_option = call("sweep", *axes, "--no-merge", "--out", tmp_path / "merged", "--workers", "0", status=2)
    assert "was begun without --no-merge there, with it here" in with_option.err


def test_dry_run(tmp_path: Path, corpus: str, call: Call) -> None:
    """`--dry-run` tells the plan's numbers and writes nothing; cells that share no steps are counted whole."""
    before = snapshot(tmp_path)
    said = call("sweep", *GRID, "--axis", "sync.delay", "0", "2", "--out", tmp_path / "sweep", "--dry-run")
    assert snapshot(tmp_path) == before
    made = planned(corpus, GRID)
    steps = made.steps + 8 * 22
    lines = (line.rpartition("  ") for line in said.out.splitlines()[:6])
    assert {name.strip(): value.strip() for name, _, value in lines} == {
        "cells asked": "16",
        "distinct runs": str(len(made.runs) + 8),
        "of them finished": "0",
        "inner steps asked": str(16 * 22),
        "inner steps to execute": str(steps),
        "asked / to execute": f"{16 * 22 / steps:.2f}",
    }
    assert f"Merging leaves {len(made.runs) + 8} of 16 runs" in said.out
    assert "Estimated time: " in said.out


@pytest.mark.slow
def test_a_large_grid_is_asked_about(tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """More cells than the limit are run with `--yes` alone."""
    monkeypatch.setattr("twophase.cli.sweeping.MOST_CELLS", 3)
    words = ["sweep", *GRID, "--workers", "0", "--out", tmp_path / "sweep"]
    said = call(*words, status=2)
    assert re.search(r"the grid has 8 cells \(8 runs\), more than 3; .* --yes", said.err)
    call(*words, "--yes")


@pytest.mark.slow
def test_extension(tmp_path: Path, corpus: str, call: Call) -> None:
    """More values keep every byte of what is finished, execute what the plan says, and no finished node again."""
    folder = tmp_path / "sweep"
    small = "--axis outer.lr 0.3 0.7 --axis outer.momentum 0 0.9 --axis outer.restart 2".split()
    large = "--axis outer.lr 0.3 0.5 0.7 --axis outer.momentum 0 0.9 --axis outer.restart never 2".split()
    for axes in (small, large):
        finished = {path.name for path in folder.glob("runs/*")}
        before, steps = snapshot(folder / "runs") if finished else {}, steps_done(folder)
        made = planned(corpus, axes, finished=finished)
        assert finished <= set(made.runs)  # what is finished stands for its twins, though there are plainer ones now
        missing = set(made.runs) - finished
        complete(call, folder, *axes)
        nodes = [node for node in made.forest.nodes.values() if not missing.isdisjoint(node.runs)]
        assert steps_done(folder) - steps == sum(node.steps for node in nodes)
        after = snapshot(folder / "runs")
        assert {name: after[name] for name in before} == before
        assert [row.state for row in read_rows(folder / "cells.csv")] == ["finished"] * made.cells
        assert list((folder / "forest").iterdir()) == []
    refused = call("sweep", *small, "--out", folder, "--workers", "0", status=2)
    assert "axis outer.lr is [0.3, 0.5, 0.7] there, [0.3, 0.7] here" in refused.err


@pytest.fixture
def stop_after(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, signal.Signals], None]:
    """Lets this process get a signal in its so-manyth inner step from now."""

    def arm(steps: int, number: signal.Signals) -> None:
        step, budget = Trainer.inner_step, [steps]

        def counted(self: Trainer) -> None:
            budget[0] -= 1
            if budget[0] == 0:
                os.kill(os.getpid(), number)
            step(self)

        monkeypatch.setattr(Trainer, "inner_step", counted)

    return arm


@pytest.mark.slow
def test_stopped_worker(tmp_path: Path, call: Call, stop_after: Callable[..., None]) -> None:
    """A signal makes a worker save and give its job back; in the end not one inner step has been taken twice."""
    folder = tmp_path / "sweep"
    call("sweep", *GRID, "--out", folder, "--workers", "0")
    made = Work.read(folder)
    assert made is not None
    for steps, number, status in ((3, signal.SIGINT, 130), (40, signal.SIGTERM, 143), (25, signal.SIGTERM, 143)):
        stop_after(steps, number)
        call("sweep-worker", "--out", folder, status=status)
    assert steps_done(folder) == 3 + 40 + 25
    call("sweep-worker", "--out", folder)
    assert steps_done(folder) == made.forest.steps == made.counts["steps"]
    assert "8 were finished before" in call("sweep", *GRID, "--out", folder, "--workers", "0").out


@pytest.mark.slow
def test_extension_of_a_stopped_sweep(tmp_path: Path, call: Call, stop_after: Callable[..., None]) -> None:
    """A sweep that was stopped in the middle and extended gives the bits of the larger one in one go."""
    grid = "--axis outer.restart never 2 --axis outer.lr 0.3 0.7".split()
    large = [*grid, "0.5"]  # another outer.lr
    call("sweep", *grid, "--out", tmp_path / "sweep", "--workers", "0")
    stop_after(30, signal.SIGTERM)
    call("sweep-worker", "--out", tmp_path / "sweep", status=143)
    assert list((tmp_path / "sweep" / "forest").iterdir()) != []
    for folder in (tmp_path / "sweep", tmp_path / "one go"):
        complete(call, folder, *large)
    assert outcomes(tmp_path / "sweep") == outcomes(tmp_path / "one go")
    assert numbers(read_rows(tmp_path / "sweep" / "cells.csv")) == numbers(read_rows(tmp_path / "one go" / "cells.csv"))


# ------------------------------------------------------------------------------------------- runs that share no steps

BLOCKS = "--sync.fragments a=embedding|head b=.".split()
BY_BLOCK = "--axis sync.restart none a=2,b=auto a=soft:2:0.5:0,b=cycle:5,6".split()


@pytest.mark.slow
def test_policies_by_block(tmp_path: Path, corpus: str, call: Call) -> None:
    """Cells with a policy for each fragment are the runs of `train` byte for byte, and arms of the sweep's tables."""
    folder = tmp_path / "sweep"
    words = [*BLOCKS, *BY_BLOCK, "--axis", "outer.lr", "0.7", "--controls"]
    said = complete(call, folder, *words)
    assert "5 were finished before" in said.out
    rows = read_rows(folder / "cells.csv")
    texts = ["none", "a=2,b=auto", "a=soft:2:0.5:0,b=cycle:5,6"]
    facts = [(row.arm, row.values["sync.restart"], row.state, row.twin_of) for row in rows]
    grid = [(arm, text, "finished", None) for arm, text in zip(["never", *texts[1:]], texts, strict=True)]
    assert facts == [*grid, *[("momentum-free", "none", "finished", None)] * 2]
    assert steps_done(folder) == 5 * 22
    for row, policies in ((rows[0], ""), (rows[1], "--sync.restart a=2 b=auto")):
        alone = tmp_path / row.run
        values = [*SMALL, "--data.corpus", corpus, *BLOCKS, *policies.split(), "--outer.lr", "0.7"]
        call("train", *values, "--out", alone)
        assert outcome(folder / "runs" / row.run) == outcome(alone)
        checkpoints = {path.name for path in (folder / "runs" / row.run / "checkpoint").iterdir()}
        assert checkpoints == {path.name for path in (alone / "checkpoint").iterdir()} != set()
    assert texts[1] in call("report", folder).out


# ---------------------------------------------------------------------------------------------------- workers elsewhere


@pytest.mark.slow
def test_workers_elsewhere(tmp_path: Path, call: Call) -> None:
    """`--workers 0` writes the plan and says how to go on; what it says works."""
    folder = tmp_path / "sweep"
    words = ["sweep", *GRID, "--out", folder, "--workers", "0"]
    said = call(*words)
    assert "0 runs finished" in said.out
    assert "best 0 of 8 settings, 8 missing" in said.out
    hint = next(line for line in said.out.splitlines() if line.startswith("see how far it is"))
    assert shlex.split(hint)[-2:] == ["--workers", "0"]
    assert hint.count("--workers") == 1
    call("sweep-worker", "--out", folder)
    said = call(*words)
    assert "8 were finished before" in said.out
    assert re.search(r"best \d+ of 8 settings", said.out)
    assert "see how far it is" not in said.out
    shutil.rmtree(folder / "figures")  # as after a kill before they were drawn
    assert call(*words).out.splitlines()[1:] == said.out.splitlines()[1:]
    assert (folder / "figures" / "sweep.png").exists()


@pytest.mark.slow
def test_worker_with_another_text(tmp_path: Path, corpus: str, call: Call) -> None:
    """A worker that sees another text than the sweep was begun with takes no job."""
    folder = tmp_path / "sweep"
    call("sweep", *GRID, "--out", folder, "--workers", "0")
    path = Path(corpus.removeprefix("file:"))
    path.write_text(path.read_text()[::-1])
    corpus_of.cache_clear()
    said = call("sweep-worker", "--out", folder, status=2)
    assert "this machine's text is not the one" in said.err
    assert list((folder / "runs").iterdir()) == []
