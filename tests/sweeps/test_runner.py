"""Running sweeps: one worker or several, stopped and killed ones, failures, and a second command that helps."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from commands import wait_until
from forked import Forked
from twophase.api import run_config
from twophase.errors import RunError, UsageError
from twophase.files import read_jsonl
from twophase.recipes.controls import grid_of
from twophase.runs.folder import ROUNDS
from twophase.sweeps.grid import RUNS, Axis, Sweep
from twophase.sweeps.runner import ERROR, Nodes, run_sweep
from twophase.sweeps.table import TABLE, read_rows

TASK = """
import os, time
from dataclasses import dataclass
from toytask import Toy


@dataclass(frozen=True)
class Fragile(Toy):
    width: int = 0
    slow: float = 0.0
    broken: str = ""

    def loss(self, model, batch):
        time.sleep(self.slow)
        while os.path.exists(self.broken + "-held"):
            time.sleep(0.01)
        if self.width == 2 and os.path.exists(self.broken):
            raise KeyError("the third layer")
        return super().loss(model, batch)
"""


def sweep(folder: Path, *axes: Axis, **values: Any) -> Sweep:
    """A sweep of a user's task, which fails for a width of 2 while `broken` exists, and waits while `broken-held`."""
    (folder / "fragile.py").write_text(TASK)
    own = {"task.broken": str(folder / "broken"), "steps": 12, "inner_steps": 3, "checkpoint_every": 1} | values
    base = run_config(f"{folder / 'fragile.py'}:Fragile", own)
    return Sweep(base, grid_of(base, axes, controls=False))


GRID = [Axis("outer.method", ("nesterov",)), Axis("outer.restart", ("never", 2, 3)), Axis("task.width", (0, 1))]


def results(folder: Path) -> dict[str, Any]:
    """Rows of the table and the rounds of each run, without times."""
    rows = [(row.run, row.state, row.validation_loss) for row in read_rows(folder / TABLE)]
    logs = {run: read_jsonl(folder / RUNS / run / ROUNDS) for run, *_ in rows}
    return {run: (state, loss, [(r["step"], r["checksum"]) for r in logs[run]]) for run, state, loss in rows}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Results of one undisturbed worker."""
    folder = tmp_path_factory.mktemp("undisturbed")
    run_sweep(sweep(folder, *GRID), folder / "out", workers=1, quiet=True).check(folder)
    return results(folder / "out")


def same(folder: Path, expected: dict[str, Any]) -> bool:
    """Whether a sweep has the undisturbed results (its runs have other ids: the task's file lies elsewhere)."""
    return list(results(folder).values()) == list(expected.values())


@pytest.mark.dist
@pytest.mark.usefixtures("forked_workers")
def test_two_workers_and_a_second_command_give_the_same(tmp_path: Path, expected: dict[str, Any]):
    """Two processes, and beside them this one: every run is trained once, and nothing is left behind."""
    made, out = sweep(tmp_path, *GRID, **{"task.slow": 0.002}), tmp_path / "out"
    other = threading.Thread(target=run_sweep, args=(made, out), kwargs={"workers": 2, "quiet": True})
    other.start()
    wait_until((out / TABLE).exists)
    run_sweep(made, out, workers=1, quiet=True).check(out)
    other.join()
    assert same(out, expected)
    assert not list((out / RUNS).glob("fork-*"))


def test_a_stopped_sweep_resumes_to_the_bit(tmp_path: Path, expected: dict[str, Any]):
    """Stopped again and again, after every few inner steps."""
    made, out = sweep(tmp_path, *GRID), tmp_path / "out"
    for _ in range(100):
        left = iter([False] * 17)
        outcome = run_sweep(made, out, workers=1, quiet=True, should_stop=lambda left=left: next(left, True))
        if {row.state for row in outcome.rows} == {"finished"}:
            break
    assert same(out, expected)


def test_failures_are_named_and_tried_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """A run that fails leaves its traceback; the others go on; the same command tries it again."""
    made, out = sweep(tmp_path, *GRID[:2], Axis("task.width", (0, 2))), tmp_path / "out"
    (tmp_path / "broken").touch()
    outcome = run_sweep(made, out, workers=1)
    failed = {row.run for row in outcome.rows if row.values["task.width"] == 2}
    assert {row.run for row in outcome.rows if row.state == "failed"} == failed == outcome.errors.keys()
    assert all("in loss" in error and "the third layer" in error for error in outcome.errors.values())
    with pytest.raises(RunError, match=str(out)):
        outcome.check(out)
    (tmp_path / "broken").unlink()
    again = run_sweep(made, out, workers=1, quiet=True)
    again.check(out)
    assert {row.state for row in again.rows} == {"finished"}
    assert not list(out.rglob(ERROR))
    assert "left" in capsys.readouterr().err  # an estimate of the time


@pytest.mark.dist
@pytest.mark.usefixtures("forked_workers")
def test_a_killed_worker_is_the_error_of_its_run(tmp_path: Path):
    """A worker that the system kills is named in the folder of its run, and the rest goes on."""
    made, out = sweep(tmp_path, Axis("task.width", (0, 1, 3))), tmp_path / "out"
    (tmp_path / "broken-held").touch()
    outcome: list[Any] = []
    running = threading.Thread(target=lambda: outcome.append(run_sweep(made, out, workers=2, quiet=True)))
    running.start()

    def owners() -> list[dict[str, Any]]:
        return [json.loads(claim.read_bytes() or "{}") for claim in sorted((out / RUNS).glob("*/.claim-*"))]

    wait_until(lambda: len(owners()) > 1 and all(owners()))
    os.kill(owners()[0]["pid"], signal.SIGKILL)
    wait_until(lambda: any(out.rglob(ERROR)))  # else the other worker, let go, might train this one's run
    (tmp_path / "broken-held").unlink()
    running.join()
    (error,) = outcome[0].errors.values()
    assert "-9" in error
    assert sorted(row.state for row in outcome[0].rows) == ["failed", "finished", "finished"]
    run_sweep(made, out, workers=1, quiet=True).check(out)


@pytest.mark.dist
def test_a_command_that_is_stopped_resumes(tmp_path: Path, expected: dict[str, Any]):
    """Stopped by signals, with the status that says so, and repeated, it ends with the undisturbed results."""
    made, out = sweep(tmp_path, *GRID, **{"task.slow": 0.01}), tmp_path / "out"
    words = f"sweep --task {tmp_path}/fragile.py:Fragile --task.broken {tmp_path}/broken --task.slow 0.01 --steps 12"
    words += f" --inner-steps 3 --checkpoint-every 1 --workers 1 --quiet --out {out}"
    for axis in GRID:
        words += f" --axis {axis.path} {' '.join(map(str, axis.values))}"
    for number, begun in ((signal.SIGINT, 2), (signal.SIGTERM, 4)):
        process = Forked(*words.split())
        wait_until(lambda begun=begun: len(list(out.glob(f"{RUNS}/*/{ROUNDS}"))) >= begun)
        process.send_signal(number)
        assert process.wait(60) == 128 + number
    run_sweep(made, out, workers=1, quiet=True).check(out)
    assert same(out, expected)


def test_a_diverged_beginning_diverges_below(tmp_path: Path):
    """Runs whose shared beginning diverges diverge by themselves, with the same results as alone."""
    made, out = sweep(tmp_path, *GRID[:2], divergence_loss=1e-9), tmp_path / "out"
    outcome = run_sweep(made, out, workers=1, quiet=True)
    assert {row.state for row in outcome.rows} == {"diverged"}
    assert not list((out / RUNS).glob("fork-*"))


@pytest.mark.parametrize("more", ["", ", 'perplexity': 2.0**loss"])
def test_a_loss_below_0(tmp_path: Path, more: str):
    """It has no ratio, which the first run that ends says, not the last; a perplexity has one."""
    evaluate = f"    def evaluate(self, model):\n        loss = -1.0\n        return {{'loss': loss{more}}}\n"
    (tmp_path / "low.py").write_text(f"{TASK}\n{evaluate}")
    base = run_config(f"{tmp_path}/low.py:Fragile", {"steps": 12, "inner_steps": 3})
    made, out = Sweep(base, grid_of(base, [Axis("seed", (0, 1))], controls=False)), tmp_path / "out"
    if more:
        assert [row.outcome for row in run_sweep(made, out, workers=1, quiet=True).rows] == [0.5, 0.5]
    else:
        with pytest.raises(UsageError, match="above 0"):
            run_sweep(made, out, workers=1, quiet=True)
        assert len(list(out.glob("*/*/summary.json"))) == 1


def test_a_finished_sweep_trains_nothing(tmp_path: Path):
    """The same command again reads the results; a run that was removed is trained again."""
    made, out = sweep(tmp_path, *GRID[:2]), tmp_path / "out"
    run_sweep(made, out, workers=1, quiet=True)
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}
    time.sleep(0.01)
    assert not run_sweep(made, out, workers=1, quiet=True).errors
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()} == before
    assert Nodes(made.runs, out).pending() == []
