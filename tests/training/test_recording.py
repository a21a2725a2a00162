"""An external training loop, recorded: a folder as of any run, and unchanged bits of the loop."""

from __future__ import annotations

import argparse
import copy
import math
import shutil
import sys
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import twophase
from forked import in_processes
from twophase import DiLoCo, OuterRule, OuterSGD, record
from twophase.base.config import UsageError, load_yaml
from twophase.cli.main import main
from twophase.diloco.group import SingleProcess
from twophase.runs.folder import read_lines, read_rounds, read_summary
from twophase.runs.log import standard
from twophase.runs.record import read_record
from twophase.tasks.lm.config import TrainConfig
from twophase.training.recording import setting

RULE = OuterRule(0.7, 0.9, nesterov=True)
WIDTH, INNER_STEPS, STEPS, KILLED = 4, 4, 30, 25


TOTALS = ("steps", "rounds", "restarts")


class Loop:
    """A hand-written loop of two replicas, with a learning rate that falls."""

    def __init__(
        self, group: SingleProcess | None = None, replicas: int = 2, *, falling: str = "", **options: Any
    ) -> None:
        torch.manual_seed(0)
        self.models = [nn.Linear(WIDTH, 1) for _ in range(replicas)]
        self.inners = [torch.optim.AdamW(model.parameters(), lr=0.05) for model in self.models]
        options = {"restart": 3, "inner_steps": INNER_STEPS, "group": group} | options
        self.engine = DiLoCo(self.models, RULE, **options)
        self.falling, of_outer = falling, self.engine.fragments[0].outer.param_groups[0]
        self.schedules = []
        if falling == "by a scheduler":
            self.schedules.append(torch.optim.lr_scheduler.LambdaLR(self.engine.outer, lambda t: 0.9**t))
        elif falling:
            of_outer["initial_lr"] = of_outer["lr"]

    def train(self, steps: range) -> Iterator[float]:
        """Yield the loss of each step, after which the caller calls the engine."""
        for step in steps:
            losses = []
            for replica, (model, inner) in enumerate(zip(self.models, self.inners, strict=True)):
                inner.param_groups[0]["lr"] = 0.05 * (1 - step / STEPS)
                x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(10 * step + replica))
                loss = (model(x) - x.sum(dim=1, keepdim=True)).square().mean()
                inner.zero_grad()
                loss.backward()
                inner.step()
                losses.append(loss.item())
            yield sum(losses) / len(losses)

    def state(self) -> list[Any]:
        """Everything that a resumed loop needs."""
        return [part.state_dict() for part in self._parts()]

    def load(self, state: list[Any]) -> None:
        """Go on from `state()`."""
        for part, saved in zip(self._parts(), state, strict=True):
            part.load_state_dict(saved)

    def _parts(self) -> list[Any]:
        return [*self.models, *self.inners, self.engine, *self.schedules]

    def end_round(self) -> None:
        """Lower the outer learning rate, where it falls."""
        for schedule in self.schedules:
            schedule.step()
        if self.falling == "by hand":
            self.engine.outer.param_groups[0]["lr"] *= 0.9


def recorded(
    loop: Loop,
    folder: Path,
    steps: range = range(STEPS),
    config: Any = None,
    *,
    saved_at: Collection[int] = (),
    killed: bool = False,
) -> list[Any]:
    """Train and record; return the reports. A loop may save itself after some steps, and end by an error."""
    reports, loss = [], math.nan
    with suppress(ZeroDivisionError), record(loop.engine, folder, config, inner=loop.inners[0]) as run:
        assert run.step == steps.start
        for step, loss in zip(steps, loop.train(steps), strict=True):
            reports.append(loop.engine.step({"loss": loss}))
            if reports[-1] is not None:
                loop.end_round()
            run.log(mark=step + 1)
            if step == 20:
                run.log(loss=torch.tensor(loss), temperature=3)
            if step + 1 in saved_at:
                torch.save(loop.state(), folder.parent / f"{step + 1}.pt")
        if killed:
            raise ZeroDivisionError
        reports.append(loop.engine.finish({"loss": loss}))
        run.log(validation_loss=loss)
    return [report for report in reports if report is not None]


def timeless(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Lines without their times."""
    return [{name: value for name, value in line.items() if name != "seconds"} for line in lines]


@pytest.mark.parametrize("options", [{}, {"fragments": 2}, {"delay": 2, "mixing": 0.5}], ids=str)
def test_the_record_is_the_engines(tmp_path: Path, options: dict[str, Any]) -> None:
    """Each round is its report; losses and rates are metrics; the loop's bits are those without a record."""
    loop, bare = Loop(**options), Loop(**options)
    reports = recorded(loop, tmp_path / "run", config={"steps": STEPS, "data": {"kind": "noise"}})
    for loss in bare.train(range(STEPS)):
        bare.engine.step({"loss": loss})
    bare.engine.finish()
    assert bare.engine.checksum() == loop.engine.checksum()
    lines = read_lines(tmp_path / "run" / "rounds.jsonl")
    assert timeless(lines) == timeless(
        [standard({"step": line["step"]} | report.as_dict()) for line, report in zip(lines, reports, strict=True)]
    )
    assert lines[-1]["step"] == STEPS
    assert lines[-1]["round"] == math.ceil(STEPS / INNER_STEPS)
    metrics = read_lines(tmp_path / "run" / "metrics.jsonl")
    rates = {line["step"]: line["inner_lr"] for line in metrics if "inner_lr" in line}
    assert rates == pytest.approx({step: 0.05 * (1 - (step - 1) / STEPS) for step in rates})
    noted = next(line for line in metrics if "temperature" in line)
    assert noted["step"] == 21
    assert noted["temperature"] == 3.0
    assert noted["train_loss"] > 0
    assert not {"step", "finish", "join"} & set(vars(loop.engine)), "the engine is as it was"
    assert load_yaml(tmp_path / "run" / "config.yaml")["user"] == {"data": {"kind": "noise"}}
    summary = read_summary(tmp_path / "run")
    assert summary is not None
    assert summary["validation_loss"] == metrics[-1]["validation_loss"]
    assert (summary["rounds"], summary["steps"], summary["diverged"]) == (lines[-1]["round"], STEPS, False)
    assert summary["restarts"] == sum(part["restarted"] for line in lines for part in line["fragments"])


def test_pages_and_commands_work_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Report, overlay, diagnosis and explorer take the folder; nothing is missing, and no unit is made up."""
    for name in ("a", "b"):
        config = argparse.Namespace(steps=STEPS, width=WIDTH, kind=torch.float32)
        recorded(Loop(inner_steps=1), tmp_path / name, config=config)
    monkeypatch.chdir(tmp_path)
    for line in ("report a", "report a b", "diagnose a", "explore --run a --sigma 0.5 --out e.html"):
        assert main(line.split()) == 0, capsys.readouterr()
    out = capsys.readouterr().out
    assert f"{STEPS} of {STEPS} rounds recorded" in out
    assert "missing" not in out
    assert "does not know" not in out
    page = (tmp_path / "a" / "report.html").read_text(encoding="utf-8")
    assert "nats" not in page
    assert "twophase train --config" not in page


@pytest.mark.parametrize(
    ("options", "saved_at"),
    [
        *(({"falling": falling}, [18]) for falling in ("", "by a scheduler", "by hand")),
        ({"delay": 2, "mixing": 0.5}, range(16, 21)),
        ({"fragments": 2}, range(18, 21)),
    ],
)
def test_an_interrupted_loop_goes_on(tmp_path: Path, options: dict[str, Any], saved_at: Collection[int]) -> None:
    """A loop that was killed after its last save writes the lines after that again, and once, as an undisturbed one.

    Also where the outer learning rate falls, and where a sync's line comes after its round's end.
    """
    whole, loop = Loop(**options), Loop(**options)
    recorded(whole, tmp_path / "whole")
    assert (whole.engine.fragments[0].outer.param_groups[0]["lr"] < RULE.lr / 2) == bool(options.get("falling"))
    recorded(loop, tmp_path / "killed", range(KILLED), saved_at=saved_at, killed=True)
    assert read_summary(tmp_path / "killed") is None, "an unfinished run"
    end = read_summary(tmp_path / "whole") or {}
    assert end["restarts"] > 0
    for step in saved_at:
        parts = shutil.copytree(tmp_path / "killed", tmp_path / str(step))
        again = Loop(**options)
        again.load(torch.load(tmp_path / f"{step}.pt", weights_only=True))
        recorded(again, parts, range(step, STEPS))
        for name in ("rounds.jsonl", "metrics.jsonl"):
            assert timeless(read_lines(parts / name)) == timeless(read_lines(tmp_path / "whole" / name)), (step, name)
        assert read_record(parts).problems == []
        assert {name: (read_summary(parts) or {})[name] for name in TOTALS} == {name: end[name] for name in TOTALS}


@pytest.mark.parametrize("saved_at", [16, 28, STEPS])
def test_the_newest_numbers_outlive_a_restart(tmp_path: Path, saved_at: int) -> None:
    """A loop resumed behind its last validation, or at its very end, has the summary of an uninterrupted one."""
    summaries = []
    for parts in ([range(STEPS)], [range(saved_at), range(saved_at, STEPS)]):
        loop, folder = Loop(), tmp_path / str(len(parts))
        for steps in parts:
            with suppress(KeyboardInterrupt), record(loop.engine, folder) as run:
                for step, loss in zip(steps, loop.train(steps), strict=True):
                    loop.engine.step({"loss": loss})
                    run.log(tokens=step + 1)
                    if step == 12:
                        run.log(validation_loss=2.0, perplexity=math.nan)
                if steps is not parts[-1]:
                    raise KeyboardInterrupt
        summaries.append({**(read_summary(folder) or {}), "seconds": 0, "summary_sha256": ""})
    assert summaries[1] == summaries[0]
    assert (summaries[0]["validation_loss"], summaries[0]["perplexity"], summaries[0]["tokens"]) == (2.0, None, STEPS)


def test_a_state_that_is_loaded_inside_of_the_block(tmp_path: Path) -> None:
    """A loop that goes back in its process, as after an interrupted outer step, has the logs of an undisturbed one."""
    recorded(Loop(), tmp_path / "whole")
    loop, loss = Loop(), math.nan
    with record(loop.engine, tmp_path / "parts", inner=loop.inners[0]) as run:
        for steps, broken in ((range(18), False), (range(18, KILLED), True), (range(18, STEPS), False)):
            if broken:
                torch.save(loop.state(), tmp_path / "state.pt")
            for loss in loop.train(steps):
                if loop.engine.step({"loss": math.nan if broken else loss}) is not None:
                    loop.end_round()
            if broken:
                loop.load(torch.load(tmp_path / "state.pt", weights_only=True))
                assert run.step == 18
        loop.engine.finish({"loss": loss})
    rounds, whole = (timeless(read_lines(tmp_path / name / "rounds.jsonl")) for name in ("parts", "whole"))
    assert rounds == whole
    assert [line["step"] for line in read_lines(tmp_path / "parts" / "metrics.jsonl")] == [r["step"] for r in rounds]
    assert read_record(tmp_path / "parts").problems == []
    assert (read_summary(tmp_path / "parts") or {})["exit_reason"] == "recorded"


@pytest.mark.parametrize("is_bare", [False, True])
def test_a_new_process_that_loads_its_state_inside_of_the_block(tmp_path: Path, is_bare: bool) -> None:
    """It goes on with the folder as one that loads before; until its first line nothing is moved or cut."""
    path, states = tmp_path / "run", [list[Any]()]

    def lines() -> list[dict[str, Any]]:
        return timeless(read_lines(path / "rounds.jsonl"))

    def go(rounds: range, *loaded: list[Any]) -> None:
        loop, x = Loop(), nn.Parameter(torch.ones(3))
        outer = OuterSGD([x], 0.7, 0.9)
        config = {"inner_steps": INNER_STEPS}
        with suppress(ZeroDivisionError), record(outer if is_bare else loop.engine, path, config) as run:
            for state in loaded:
                loop.load(state[:-1])
                outer.load_state_dict(state[-1])
            assert run.step == INNER_STEPS * rounds.start
            for _ in rounds:
                x.grad = torch.ones(3)
                outer.step()
                for loss in loop.train(range(INNER_STEPS)):
                    loop.engine.step({"loss": loss})
                states.append(copy.deepcopy([*loop.state(), outer.state_dict()]))
            raise ZeroDivisionError

    go(range(6))
    for start, loaded in ((4, [4]), (3, [1, 3]), (2, [3, 2])):
        before = lines()
        go(range(start, start), *(states[number] for number in loaded))
        assert lines() == before, "a loop that fails before its first line"
        go(range(start, start + 1), *(states[number] for number in loaded))
        assert lines() == before[: start + 1]
    assert not (path / "begun-anew").exists()


@pytest.mark.parametrize("fragments", [1, 2])
def test_a_last_round_that_is_taken_again(tmp_path: Path, fragments: int) -> None:
    """`finish()` ends a shorter round without an inner step: a loop that goes back to before it writes it once."""
    loop, loss, state = Loop(fragments=fragments, stagger=False), 1.0, list[Any]()
    with suppress(ZeroDivisionError), record(loop.engine, tmp_path / "run") as run:
        for loss in loop.train(range(STEPS)):
            loop.engine.step({"loss": loss, "step": 3.0, "round": 7.0})  # names of a line's own, which stay its own
        state = copy.deepcopy(loop.state())
        for _ in range(2):
            loop.engine.finish({"loss": loss})
            run.log(validation_loss=loss, fragments=3)
            loop.load(state)
        loop.engine.finish({"loss": loss})
        raise ZeroDivisionError
    loop = Loop(fragments=fragments, stagger=False)
    loop.load(state)
    with record(loop.engine, tmp_path / "run") as run:
        loop.engine.finish({"loss": loss})
        run.log(validation_loss=loss)
    lines = read_lines(tmp_path / "run" / "rounds.jsonl")
    numbers = [(part["name"], part["round"]) for line in lines for part in line["fragments"]]
    assert len(set(numbers)) == len(numbers) == fragments * math.ceil(STEPS / INNER_STEPS)
    metrics = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert all(line["step"] > 3 for line in metrics)
    assert sum("validation_loss" in line for line in metrics) == 1
    assert read_record(tmp_path / "run").problems == []


def test_a_loop_that_begins_anew_loses_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Without a state the rounds begin with 1 again; those of before lie in a folder beside, which a warning names."""
    recorded(Loop(), tmp_path / "run", range(KILLED), killed=True)
    before = (tmp_path / "run" / "rounds.jsonl").read_bytes()
    recorded(Loop(), tmp_path / "run")
    assert (tmp_path / "run" / "begun-anew" / "rounds.jsonl").read_bytes() == before
    assert "begun-anew" in caplog.text
    assert read_record(tmp_path / "run").problems == []


@pytest.mark.parametrize(
    ("name", "damage", "words"),
    [
        ("rounds", ('"round": 2', '"rouod": 2'), "a line has no step, round or checksum"),
        ("metrics", (":", ""), r"metrics\.jsonl: line 1 is not a JSON object"),
    ],
)
def test_a_damaged_line_is_refused(tmp_path: Path, name: str, damage: tuple[str, str], words: str) -> None:
    """It ends in one message, and costs no others: a loop that goes on would cut all lines after it."""
    recorded(loop := Loop(), tmp_path / "run", range(15), killed=True)
    log = tmp_path / "run" / f"{name}.jsonl"
    log.write_text(log.read_text().replace(*damage, 1))
    before = log.read_bytes()
    with pytest.raises(UsageError, match=words), record(loop.engine, log.parent):
        pass
    assert log.read_bytes() == before


def test_refusals(tmp_path: Path) -> None:
    """A finished run, another run's folder, one in use, a contradiction, no engine, an odd value: nothing changes."""
    recorded(Loop(), tmp_path / "run")
    files = {path: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    engine = Loop().engine
    with record(engine, tmp_path / "open") as run:
        for folder, options, error, words in (
            ("run", {}, UsageError, "holds a finished run"),
            ("run", {"config": {"width": 9}}, UsageError, "belongs to another run"),
            ("open", {}, UsageError, "another process"),
            ("new", {"config": {"inner_steps": 5}}, ValueError, "inner_steps = 5, and the engine 4"),
            ("new", {"config": 3}, ValueError, "a mapping"),
            ("new", {"config": {"a": {"b": 1}, "a.b": 2}}, ValueError, "record: config"),
            ("new", {"config": {"a": "\ud800"}}, ValueError, "record: config"),
            ("new", {"track": "no-such"}, UsageError, "no such tracker"),
            ("new", {"inner": [torch.optim.SGD(nn.Linear(1, 1).parameters())]}, ValueError, "inner is a list"),
        ):
            with pytest.raises(error, match=words), record(engine, tmp_path / folder, **options):  # type: ignore[arg-type]
                pass
        with pytest.raises(ValueError, match="give a DiLoCo"), record(nn.Linear(1, 1), tmp_path / "new"):  # type: ignore[arg-type]
            pass
        for name, value, words in (
            ("loss", torch.zeros(2), "single number"),
            ("tokens", math.nan, "log: tokens is nan; give their number"),
            ("x", 10**400, "log: x is"),
            ("step", "x", "log: step is"),
            ("step", math.inf, "log: step is"),
        ):
            with pytest.raises(ValueError, match=words):
                run.log(**{name: value})  # type: ignore[arg-type]
        assert len(vars(engine)) == len(vars(Loop().engine)) + 3, "a refused record leaves the open one's calls"
    assert not (tmp_path / "new").exists()
    assert {path: path.read_bytes() for path in (tmp_path / "run").iterdir()} == files


@pytest.mark.parametrize(("broken", "restart"), [("loss", "auto"), ("weights", "auto"), ("weights", "never")])
def test_a_diverged_loop(tmp_path: Path, broken: str, restart: str) -> None:
    """A loss or a pseudo-gradient that is not finite makes the run a diverged one, whatever is logged afterwards."""
    loop = Loop(restart=restart)
    with record(loop.engine, tmp_path / "run") as run:
        for step, loss in enumerate(loop.train(range(8))):
            if broken == "weights" and step == 7:  # whose loss is known by now
                with torch.no_grad():
                    loop.models[0].weight.fill_(math.inf)
            loop.engine.step({"loss": math.nan if broken == "loss" else loss})
        run.log(accuracy=0.1)
    summary = read_summary(tmp_path / "run")
    assert summary is not None
    assert summary["diverged"]
    assert summary["validation_loss"] is None


def test_an_outer_optimizer_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its steps are rounds with norms, cosine and gain, which it then measures; afterwards it does not.

    The bits are the same. A step of torch's own, which makes a state, is no round. A loop may change its folder.
    """
    monkeypatch.chdir(tmp_path)
    x, y = (nn.Parameter(torch.ones(3)) for _ in range(2))
    outer, bare = (OuterSGD([parameter], 0.7, 0.9, nesterov=True, restart=3) for parameter in (x, y))
    with record(outer, "run", {"inner_steps": 8}) as run:
        monkeypatch.chdir("/")
        for round_ in range(7):
            for parameter, optimizer in ((x, outer), (y, bare)):
                parameter.grad = parameter.detach() * 0.1 + round_
                optimizer.step()
            run.log(loss=x.sum())
    assert torch.equal(x, y)
    lines = read_lines(tmp_path / "run" / "rounds.jsonl")
    assert [(line["round"], line["step"]) for line in lines] == [(n, 8 * n) for n in range(1, 8)]
    assert [line["restarted"] for line in lines] == [n % 3 == 0 for n in range(1, 8)]
    assert lines[1]["groups"][0]["buffer_norm"] > 0
    assert lines[1]["gain"] > 0.7
    again, saved = OuterSGD([x], 0.7, 0.9), None
    with record(again, tmp_path / "again", {"inner_steps": 8}) as run:
        for round_ in range(5):
            again.step()
            saved = again.state_dict() if round_ == 2 else saved
        again.load_state_dict(saved or {})
        assert run.step == 24
        again.step()
    lines = read_lines(tmp_path / "again" / "rounds.jsonl")
    assert [(line["round"], line["step"]) for line in lines] == [(n, 8 * n) for n in range(1, 5)]
    outer.step()
    assert outer.last_round == []
    fresh = OuterSGD([nn.Parameter(torch.ones(3))], 0.7, 0.9)
    with record(fresh, tmp_path / "fresh"):
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

        get_optimizer_state_dict(nn.ParameterList(fresh.param_groups[0]["params"]), fresh)
    assert fresh.param_groups[0]["rounds"] == 0
    assert not (tmp_path / "fresh" / "rounds.jsonl").exists()


@pytest.mark.dist
def test_process_0_writes(tmp_path: Path) -> None:
    """Of two processes the first writes; a refusal is raised in both."""
    first, second = in_processes(__file__, tmp_path, 2)
    assert first == second == {"refused": True, "step": STEPS, "checksum": first["checksum"]}
    assert len(read_lines(tmp_path / "run" / "rounds.jsonl")) == math.ceil(STEPS / INNER_STEPS)
    assert read_record(tmp_path / "run").problems == []


def _in_a_process(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    loop = Loop(replicas=1)
    with record(loop.engine, folder / "run", inner=loop.inners[0]) as run:
        for loss in loop.train(range(STEPS)):
            loop.engine.step({"loss": loss})
            run.log(loss=loss)
        loop.engine.finish({"loss": 1.0})
    try:
        with record(Loop(replicas=1).engine, folder / "run"):
            pass
    except UsageError as error:
        refused = "finished" in str(error)
    else:
        refused = False
    torch.save({"refused": refused, "step": run.step, "checksum": loop.engine.checksum()}, folder / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    _in_a_process(int(sys.argv[1]), Path(sys.argv[2]))


def of_two_groups(path: Path, *options: dict[str, Any]) -> Any:
    """The run of an outer optimizer whose param groups have these options."""
    groups = [{"params": [nn.Parameter(torch.ones(3))]} | more for more in options]
    outer = OuterSGD(groups, 0.7, 0.9)
    with record(outer, path):
        for _ in range(12):
            for group in groups:
                (x,) = group["params"]
                x.grad = 0.1 * x.detach()
            outer.step()
    return twophase.load(path)


def test_each_param_group_has_its_own_period(tmp_path: Path) -> None:
    """Groups that restart at different times are judged and described by their own policies; alike ones as before."""
    run = of_two_groups(tmp_path / "run", {"restart": 3}, {"restart": 4})
    assert [finding.restarts for finding in run.diagnosis().findings] == ["3", "4"]
    assert run.record.restart == "param group 0=3, param group 1=4"
    alike = [{"params": [nn.Parameter(torch.ones(3))]} for _ in range(2)]
    assert "sync" not in setting(OuterSGD(alike, 0.7, 0.9, restart=3))


def test_param_groups_of_several_rules_have_none(tmp_path: Path) -> None:
    """Nothing is said of a run by the rule of its first param group where another group has another rule."""
    run = of_two_groups(tmp_path / "run", {}, {"momentum": 0.5})
    assert run.record.rule is None
    assert all(f"momentum {momentum}" in run.record.outer_words for momentum in (0.9, 0.5))
    assert run.diagnosis().change is None


def test_the_setting_of_a_loop() -> None:
    """Syncs are there where they are unusual, and equal sets have one order."""
    assert "sync" not in setting(Loop().engine)
    engine = Loop(delay=1, mixing=0.5, compression="bfloat16").engine
    assert setting(engine)["sync"] == {"delay": 1, "mixing": 0.5, "compression": "bfloat16"}
    assert setting(Loop(fragments=2).engine)["sync"] == {"fragments": ["0", "1"]}  # which restart alike
    assert setting(engine, {"width": np.int64(9)})["user"] == {"width": 9}
    assert setting(engine, TrainConfig().model)["user"]["layers"] == TrainConfig().model.layers
    for layers in ({8, 0}, {0, 8}, frozenset([8, 0])):
        assert setting(engine, {"layers": layers})["user"] == {"layers": [0, 8]}


def cycled(x: nn.Parameter) -> tuple[OuterSGD, torch.optim.lr_scheduler.LRScheduler]:
    """An outer optimizer under a scheduler that writes momenta, too."""
    outer = OuterSGD([x], 0.7, 0.9)
    return outer, torch.optim.lr_scheduler.OneCycleLR(outer, max_lr=0.7, total_steps=20)


def test_a_schedule_is_recorded_as_it_began() -> None:
    """The configuration of a recorded loop is the same at the start and in the middle of a schedule."""
    x = nn.Parameter(torch.ones(3))
    outer, scheduler = cycled(x)
    before = setting(outer)
    for _ in range(5):
        x.grad = 0.5 * x.detach()
        outer.step()
        scheduler.step()
    assert outer.param_groups[0]["momentum"] < 0.95 == before["outer"]["momentum"]
    assert setting(outer) == before


def test_param_groups_that_take_rounds_in_turn_are_refused(tmp_path: Path) -> None:
    """A round's number would stand twice in the folder, and nothing could read it."""
    x, y = (nn.Parameter(torch.ones(3)) for _ in range(2))
    outer = OuterSGD([{"params": [x]}, {"params": [y]}], 0.7, 0.9)
    with record(outer, tmp_path / "run"):
        x.grad = torch.ones(3)
        outer.step()
        x.grad, y.grad = None, torch.ones(3)
        with pytest.raises(ValueError, match="round 1 ends again"):
            outer.step()
    assert [line["round"] for line in read_rounds(tmp_path / "run")] == [1]


@pytest.mark.parametrize("stagger", [True, False])
def test_blocks_of_fragments_with_several_groups(tmp_path: Path, stagger: bool) -> None:
    """Each group of each fragment is a block of its own, also where fragments end their rounds in turn.

    Of fragments that always end theirs together, no line shows which group is whose.
    """
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1))

    def halves(named: Any) -> OuterSGD:
        groups = [{"params": [parameter]} for _, parameter in named]
        return OuterSGD(groups, lr=0.7, momentum=0.9)

    engine = DiLoCo(model, halves, inner_steps=2, fragments=2, stagger=stagger)
    with record(engine, tmp_path / "run") as run:
        for step in range(8):
            with torch.no_grad():
                for number, parameter in enumerate(model.parameters()):
                    parameter.sub_(0.1 * (number + 1) * (step + 1))
            engine.step()
        run.log(validation_loss=1.0)
    blocks = read_record(tmp_path / "run").blocks
    (first, second) = (len(fragment.named) for fragment in engine.fragments)
    assert (first, second) == (1, 3)
    names = ["0", *(f"param group {group} of fragment 1" for group in range(second))]
    assert sorted(block.name for block in blocks) == (names if stagger else [f"param group {n}" for n in range(4)])
    for block in blocks:
        assert block.number.tolist() == [1, 2, 3, 4]
