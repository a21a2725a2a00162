"""A loop of one's own, recorded: a folder as of any run, and unchanged bits of the loop."""

from __future__ import annotations

import argparse
import copy
import json
import math
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn

import twophase
from forked import bring, in_processes
from twophase import DiLoCo, OuterRule, OuterSGD, Restarting, record
from twophase.config import load_yaml
from twophase.errors import RunError, UsageError
from twophase.runs.folder import METRICS
from twophase.runs.record import read_record, read_rounds, read_steps, read_summary
from twophase.tasks.lm.config import TrainConfig
from twophase.training.recording import Recorder, setting

RULE = OuterRule(0.7, 0.9, nesterov=True)
WIDTH, INNER_STEPS, STEPS, KILLED = 4, 4, 30, 25


class Loop:
    """A hand-written loop of two replicas, whose outer learning rate falls where asked."""

    def __init__(self, replicas: int = 2, falling: bool = False, **more: Any) -> None:
        torch.manual_seed(0)
        self.models = [nn.Linear(WIDTH, 1) for _ in range(replicas)]
        self.inners = [torch.optim.AdamW(model.parameters(), lr=0.05) for model in self.models]
        options: dict[str, Any] = {"restart": 3, "inner_steps": INNER_STEPS} | more
        self.engine = DiLoCo(self.models, RULE, **options)
        self.schedulers = [torch.optim.lr_scheduler.LambdaLR(self.engine.outer, lambda t: 0.9**t)] if falling else []
        self.parts = [*self.models, *self.inners, self.engine, *self.schedulers]

    def train(
        self, steps: range, run: Recorder | None = None, *, ends: bool = False, saved_at: int | None = None
    ) -> list[Any]:
        """Train; return everything that a resumed loop needs after one of the steps."""
        loss, state = math.nan, list[Any]()
        for step in steps:
            for replica, (model, inner) in enumerate(zip(self.models, self.inners, strict=True)):
                x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(10 * step + replica))
                loss = (model(x) - x.sum(dim=1, keepdim=True)).square().mean()
                inner.zero_grad()
                loss.backward()
                inner.step()
            report = self.engine.step()
            for scheduler in self.schedulers if report else ():
                scheduler.step()
            if run is not None:
                run.log_round(report, loss=loss, inner_lr=self.inners[0].param_groups[0]["lr"])
                if step == 20:
                    run.log(temperature=3)
            if step + 1 == saved_at:
                state = copy.deepcopy([part.state_dict() for part in self.parts])
        if ends:
            report = self.engine.finish()
            if run is not None:
                run.log_round(report)
                run.finish(validation_loss=self.models[0].weight.sum())
        return state

    def load(self, state: list[Any]) -> None:
        for part, saved in zip(self.parts, state, strict=True):
            part.load_state_dict(saved)


def written(folder: Path) -> list[dict[str, Any]]:
    """Rounds, metrics and summary as readers see them, without their times."""
    found = [*read_rounds(folder), *read_steps(folder / METRICS), read_summary(folder) or {}]
    return [{name: value for name, value in line.items() if name != "seconds"} for line in found]


def undisturbed(folder: Path, **options: Any) -> list[dict[str, Any]]:
    """What a loop writes that nothing interrupts."""
    loop = Loop(**options)
    loop.train(range(STEPS), record(folder, loop.engine), ends=True)
    return written(folder)


@pytest.mark.parametrize("options", [{}, {"fragments": 2}, {"delay": 2, "mixing": 0.5}], ids=str)
def test_the_record_is_the_engines(tmp_path: Path, options: dict[str, Any]) -> None:
    """Each round is a line, values are metrics, the summary has the last ones; the loop's bits are those without."""
    loop, bare = Loop(**options), Loop(**options)
    config = {"steps": STEPS, "data": {"kind": "noise"}}
    loop.train(range(STEPS), record(tmp_path, loop.engine, config), ends=True)
    bare.train(range(STEPS), ends=True)
    assert bare.engine.checksum() == loop.engine.checksum()
    run = read_record(tmp_path)
    rounds = math.ceil(STEPS / INNER_STEPS)
    assert (run.rounds["step"][-1], run.recorded, run.planned_rounds, run.state) == (STEPS, rounds, rounds, "finished")
    assert (run.rule, run.restart, run.config["user.data.kind"]) == (RULE, "3", "noise")
    assert (run.rounds["inner_lr"] == 0.05).sum() > 4
    assert [values.tolist() for values in run.curve("temperature")] == [[21], [3.0]]
    restarts = sum(int(block.restarted.sum()) for block in run.blocks)
    end = {"validation_loss": run.curve("validation_loss")[1][-1], "exit_reason": "recorded", "diverged": False}
    assert (run.summary or {}).items() >= (end | {"steps": STEPS, "rounds": rounds, "restarts": restarts}).items()


@pytest.mark.parametrize(
    ("options", "saved_at"),
    [({}, 18), ({"falling": True}, 20), ({"delay": 2, "mixing": 0.5}, 17), ({"fragments": 2}, 19), ({}, STEPS)],
)
def test_a_killed_loop_goes_on(tmp_path: Path, options: dict[str, Any], saved_at: int) -> None:
    """It writes the lines after its saved state once more, as an uninterrupted one; before its first line none goes."""
    killed, again, folder = Loop(**options), Loop(**options), tmp_path / "run"
    run = record(folder, killed.engine)
    state = killed.train(range(max(KILLED, saved_at)), run, saved_at=saved_at)
    run.close()
    assert read_summary(folder) is None
    before = written(folder)
    with suppress(ZeroDivisionError), record(folder, again.engine):
        raise ZeroDivisionError
    assert written(folder) == before
    again.load(state)
    again.train(range(saved_at, STEPS), record(folder, again.engine), ends=True)
    assert written(folder) == undisturbed(tmp_path / "whole", **options)


def test_a_state_that_is_loaded_while_it_records(tmp_path: Path) -> None:
    """A loop that goes back, as after a spike, drops the lines that it repeats."""
    loop = Loop()
    run = record(tmp_path / "run", loop.engine)
    loop.load(loop.train(range(KILLED), run, saved_at=18))
    loop.train(range(18, STEPS), run, ends=True)
    assert written(tmp_path / "run") == undisturbed(tmp_path / "whole")


def test_rounds_that_are_not_logged_are_counted(tmp_path: Path) -> None:
    """A record that closes with rounds taken and not logged warns with their number."""
    loop = Loop()
    run = record(tmp_path, loop.engine)
    for step in range(4 * INNER_STEPS):
        report = loop.engine.step()
        if step != 2 * INNER_STEPS - 1:
            run.log_round(report)
    with pytest.warns(UserWarning, match="1 rounds"):
        run.close()
    loop = Loop()
    silent = record(tmp_path / "silent", loop.engine)
    loop.train(range(2 * INNER_STEPS))
    with pytest.warns(UserWarning, match="2 rounds"):
        silent.finish(validation_loss=1.0)


def test_what_would_be_lost_is_said(tmp_path: Path) -> None:
    """A last round that is not taken, or after the end; a name that a step has; a step to come; a name of its own."""
    loop = Loop()
    run = record(tmp_path, loop.engine)
    loop.train(range(INNER_STEPS + 1), run)
    run.log(step=INNER_STEPS, accuracy=0.1, validation_loss=0.2)
    run.log(step=0, validation_loss=99.0)
    for values in (
        {"step": INNER_STEPS, "loss": 3}, {"step": 99, "accuracy": 0.2}, {"round": 7},
        *({"step": step, "a": 1} for step in (-1, 2.5, True, "3")),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="record: "):
            run.log(**values)
    with pytest.warns(UserWarning, match="last round"):
        run.finish()
    first, line = read_steps(tmp_path / METRICS)
    assert (first["step"], line["round"], line["accuracy"]) == (0, 1, 0.1)
    assert (read_summary(tmp_path) or {})["validation_loss"] == 0.2  # of the last step that has one
    with pytest.raises(RunError, match="finish"):
        run.log_round(loop.engine.finish())


@pytest.mark.parametrize("broken", ["loss", "weights"])
def test_a_diverged_loop(tmp_path: Path, broken: str) -> None:
    """A loss or a pseudo-gradient that is not finite makes the run a diverged one, whatever is logged afterwards."""
    model = nn.Linear(WIDTH, 1)
    engine = DiLoCo(model, "adamw" if broken == "weights" else "nesterov", inner_steps=1)
    with record(tmp_path, engine) as run, torch.no_grad():
        model.weight.add_(math.inf if broken == "weights" else 1.0)
        run.log_round(engine.step(), loss=math.nan if broken == "loss" else 1.0)
        run.log(accuracy=0.1)
    assert read_record(tmp_path).state == "diverged"


@pytest.mark.parametrize("measure", [True, False])
def test_an_outer_optimizer_alone(tmp_path: Path, measure: bool) -> None:
    """Its steps are rounds, with norms where it measures them; a call between two rounds writes nothing.

    `twophase.load` reads it as any run, finished or not, with the policy of each param group.
    """
    x, y = (nn.Parameter(torch.ones(3)) for _ in range(2))
    outer = OuterSGD([{"params": [x], "restart": 3}, {"params": [y], "restart": 4}], 0.7, 0.9, nesterov=True)
    with record(tmp_path, outer, {"inner_steps": 8}) as run:
        run.log_round(outer.last_round)
        for _ in range(7):
            x.grad, y.grad = x.detach() * 0.1, y.detach() * 0.1
            outer.step(measure=measure)
            for _ in range(2):
                run.log_round(outer.last_round, loss=x.sum())
        assert "running" in repr(twophase.load(tmp_path))
    found = cast(Any, twophase.load(tmp_path)).record
    assert (found.rounds["round"].tolist(), found.rounds["step"].tolist()) == ([*range(1, 8)], [*range(8, 57, 8)])
    assert found.rounds["restarted"].tolist() == [number in (3, 4, 6) for number in range(1, 8)]
    assert np.isfinite(found.rounds["gain"]).all() == measure
    assert (found.state, len(found.curve("train_loss")[0])) == ("finished", 7)
    assert [block.restart for block in found.blocks] == (["3", "4"] if measure else [])
    assert found.restart == "param group 0=3, param group 1=4"


def test_refusals(tmp_path: Path) -> None:
    """A finished run, another run's folder, one in use, a tracker that does not exist; nothing changes."""
    engine = Loop().engine
    record(tmp_path / "done", engine).finish()
    before = {path: path.read_bytes() for path in (tmp_path / "done").iterdir() if path.name[0] != "."}
    with record(tmp_path / "open", engine):
        for folder, config, track, word in (
            ("done", None, (), "finished"),
            ("done", {"width": 9}, (), "width"),
            ("open", None, (), "in use"),
            ("new", None, "no-such", "track"),
        ):
            with pytest.raises(UsageError, match=word):
                record(tmp_path / folder, engine, config, track)
    assert {path: path.read_bytes() for path in (tmp_path / "done").iterdir() if path.name[0] != "."} == before


def test_the_setting_of_a_loop(tmp_path: Path) -> None:
    """The engine's values, and the user's own, from whatever holds them."""
    engine = Loop(delay=1, mixing=0.5, compression="bfloat16", filter="orthogonal").engine
    tree = setting(engine, argparse.Namespace(steps=8, width=np.int64(9), kind=torch.float32, layers={8, 0}))
    assert tree["sync"] == {"delay": 1, "mixing": 0.5, "compression": "bfloat16"}
    assert (tree["steps"], tree["inner_steps"], tree["replicas"], tree["outer"]["filter"]) == (8, 4, 2, "orthogonal")
    assert tree["user"] == {"width": 9, "kind": "torch.float32", "layers": [0, 8]}
    assert setting(engine, {"model": TrainConfig().model})["user"]["model"]["layers"] == TrainConfig().model.layers
    assert setting(Loop(fragments=2).engine)["sync"].items() >= {"fragments": ["0", "1"]}.items()  # which restart alike
    record(tmp_path, engine, {"a": tree}).close()
    assert load_yaml(tmp_path / "config.yaml") == setting(engine, {"a": tree})


def test_a_schedule_is_recorded_as_it_began() -> None:
    """The configuration of a recorded loop is the same at the start and in the middle of a schedule."""
    x = nn.Parameter(torch.ones(3))
    outer = OuterSGD([x], 0.7, 0.9)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(outer, max_lr=0.7, total_steps=20)
    before = setting(outer)
    for _ in range(5):
        x.grad = 0.5 * x.detach()
        outer.step()
        scheduler.step()
    assert outer.param_groups[0]["momentum"] < 0.95 == before["outer"]["momentum"]
    assert setting(outer) == before


def test_the_setting_of_other_outer_optimizers() -> None:
    """Param groups with different rules, and several optimizers of torch, are described."""
    x, y = (nn.Parameter(torch.ones(3)) for _ in range(2))
    two = setting(OuterSGD([{"params": [x]}, {"params": [y], "momentum": 0.5}], 0.7, 0.9))["outer"]["method"]
    assert {"0.9", "0.5"} <= {*two.split()}

    def both(named: Any) -> Restarting:
        (_, weight), (_, bias) = named
        return Restarting([torch.optim.AdamW([weight]), torch.optim.SGD([bias])], 3)

    assert setting(DiLoCo(nn.Linear(2, 2), both, inner_steps=2))["outer"] == {"method": "AdamW and SGD", "restart": "3"}


@pytest.mark.dist
def test_rank_0_writes(tmp_path: Path) -> None:
    """Of two ranks the first writes; a refusal is raised on both."""
    first, second = in_processes(__file__, tmp_path, 2)
    assert first == second == {"refused": True, "step": STEPS, "checksum": first["checksum"]}
    assert len(read_rounds(tmp_path / "run")) == math.ceil(STEPS / INNER_STEPS)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == STEPS


def on_a_rank(_: int) -> dict[str, Any]:
    folder, loop, refused = Path(sys.argv[2]), Loop(replicas=1), False
    run = record(folder / "run", loop.engine)
    loop.train(range(STEPS), run, ends=True)
    try:
        record(folder / "run", loop.engine)
    except UsageError:
        refused = True
    return {"refused": refused, "step": run.step, "checksum": loop.engine.checksum()}


if __name__ == "__main__":
    bring(on_a_rank, 2)
