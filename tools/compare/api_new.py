"""Every use of the package by the cases, in the names of today; `api_old` has the same functions at e62799b0."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor, nn

import twophase
import twophase.theory
from suite import Outer
from twophase.config import get, update
from twophase.diloco.group import ProcessGroup
from twophase.optim.build import named_optimizer
from twophase.optim.schedules import Schedule, follow
from twophase.restart import Restart, RestartPolicy, register

theory = twophase.theory

# ---------------------------------------------------------------------------------------------------------- rules


def rule(outer: Outer) -> Any:
    """Return the rule of a momentum method."""
    if outer.method == "averaging":
        return twophase.OuterRule(outer.lr, 0.0, form=outer.form)
    return twophase.OuterRule(outer.lr, outer.momentum, outer.method == "nesterov", outer.form)


def _outer_value(outer: Outer) -> Any:
    """Return the outer optimizer as `DiLoCo` takes it."""
    if outer.method == "auto":
        return "auto"
    if outer.method in {"adamw", "muon"}:
        return partial(named_optimizer, method=outer.method, lr=outer.lr)
    return rule(outer)


@register("shrinking")
@dataclass(frozen=True)
class Shrinking(RestartPolicy):
    """A policy of the user's own: restart when g is shorter than a share of the longest so far, or opposes m."""

    share: float = 0.3
    needs: ClassVar[frozenset[str]] = frozenset({"pseudo_gradient_norm", "cosine"})

    def decide(self, state: Any, signal: Any) -> Any:
        """Compare lengths and direction."""
        g, cosine = signal.value("pseudo_gradient_norm"), signal.value("cosine")
        longest = max(g, state.get("longest", 0.0))
        return {"longest": longest}, Restart() if g < self.share * longest or cosine < -0.1 else None


# --------------------------------------------------------------------------------------------------------- engine


def engine(
    replicas: Sequence[nn.Module], outer: Outer | Callable[..., Any], restart: Any, mesh: Any, **options: Any
) -> Any:
    """Build a `DiLoCo`; options are inner_steps, fragments, stagger, delay, mixing, compression, buffers."""
    restart = Shrinking() if restart == "own" else restart
    group = ProcessGroup(mesh.get_group("replica"), mesh.get_group("shard")) if mesh else None
    options |= {"restart": restart, "group": group}
    if not isinstance(outer, Outer):
        return twophase.DiLoCo(replicas, outer, **options)
    made = twophase.DiLoCo(replicas, _outer_value(outer), filter=outer.filter, **options)
    for fragment in made.fragments:
        follow(fragment.outer, Schedule.parse(outer.schedule), outer.rounds)
    return made


def engine_state(engine: Any) -> dict[str, Any]:
    """Return all that a saved engine needs."""
    return {"residuals": engine.residuals(), "engine": engine.state_dict()}


def load_engine_state(engine: Any, state: Mapping[str, Any]) -> None:
    """Continue from a saved state."""
    engine.load_state_dict(state["engine"])
    engine.load_residuals(state["residuals"])


def outer_states(engine: Any) -> dict[str, dict[str, Any]]:
    """Return the outer optimizer's state of each parameter, by its name."""
    return {name: dict(fragment.outer.state.get(a, {})) for fragment in engine.fragments for name, a in fragment.named}


def report_numbers(report: Any) -> dict[str, Any]:
    """Return the numbers of a round's report, or of a line of rounds.jsonl, without seconds and digests."""
    values = report if isinstance(report, dict) else report.as_dict()

    def chosen(part: Mapping[str, Any], names: str) -> dict[str, Any]:
        return {name: part[name] for name in names.split()}

    measured = "restarted pseudo_gradient_norm buffer_norm cosine gain"
    numbers = chosen(values, f"round inner_steps partial complete replicas bytes_sent {measured}")
    numbers["fragments"] = [chosen(part, "name round inner_steps restarted") for part in values["fragments"]]
    return numbers | {"groups": [chosen(group, measured) for group in values["groups"]]}


# ------------------------------------------------------------------------------------------------------- OuterSGD


def outer_sgd(params: Any, outer: Outer, restart: Any = "never") -> Any:
    """Build an `OuterSGD`."""
    made = rule(outer)
    return twophase.OuterSGD(params, made.lr, made.momentum, nesterov=made.nesterov, form=made.form, restart=restart)


def momentum_buffers(optimizer: Any) -> list[Tensor]:
    """Return the buffers of an optimizer in the order of its parameters."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    states = [optimizer.state.get(p, {}) for p in params]
    return [state["momentum_buffer"] for state in states if "momentum_buffer" in state]


def counters(optimizer: Any) -> list[list[int]]:
    """Return rounds, rounds since the restart and restarts of each param group."""
    return [[group[n] for n in ("rounds", "rounds_since_restart", "restarts")] for group in optimizer.param_groups]


def torchft_diloco(manager: Any, model: nn.Module, inner: Any, outer: Outer, **options: Any) -> Any:
    """Build the integration's rounds in torchft's own `DiLoCo`."""
    from twophase.integrations.torchft import diloco  # noqa: PLC0415 - slow to import

    return diloco(manager, model, inner, rule(outer), **options)


# ----------------------------------------------------------------------------------------------------------- runs


def config(outer: Outer, restart: str = "never", **values: Any) -> dict[str, Any]:
    """Return a run's values by dotted path; of `values` the names have two underscores where paths have a dot."""
    paths = {"outer.method": outer.method, "outer.lr": outer.lr, "outer.form": outer.form, "outer.restart": restart}
    paths |= {"outer.filter": outer.filter, "outer.schedule": outer.schedule}
    if outer.method != "averaging":
        paths["outer.momentum"] = outer.momentum
    return paths | {name.replace("__", "."): value for name, value in values.items()}


def words(config: Mapping[str, Any]) -> list[str]:
    """Return the same values as options of the command."""
    said = []
    for path, value in config.items():
        option = f"--{path.replace('_', '-')}"
        if not isinstance(value, bool):
            said += [option, str(value)]
        elif value:
            said.append(option)
    return said


def train(task: str, config: Mapping[str, Any], out: Path) -> None:
    """Train a run."""
    twophase.train(task, config, out, quiet=True)


def sweep(task: str, axes: Mapping[str, Sequence[Any]], config: Mapping[str, Any], out: Path) -> None:
    """Run a sweep with controls, by one worker."""
    twophase.sweep(task, axes, config, out, controls=True, workers=1, quiet=True)


def demo(out: Path, steps: int) -> list[dict[str, Any]]:
    """Train the demo's cells, so many steps each; return the configuration of each cell."""
    from twophase.recipes.demo import demo as plan  # noqa: PLC0415
    from twophase.sweeps.runner import run_sweep  # noqa: PLC0415

    made = plan(base=update(plan().base, {"steps": steps}))  # the recipe's own values, whatever the defaults are
    run_sweep(made, out, workers=1, quiet=True).check(out)
    return [{"arm": cell.arm, **_canonical(cell.config)} for cell in made.cells]


def whole_demo(out: Path) -> dict[str, Any]:
    """Train the demo's cells by the command; return them."""
    subprocess.run([sys.executable, "-m", "twophase", "demo", "--out", out], check=True)
    return cells(out / "cells.csv")


_DEFAULT = {"lr": 0.7, "momentum": 0.9, "nesterov": True, "form": "sum"}


def _canonical(config: Any) -> dict[str, Any]:
    """Return the values that matter, in the names of e62799b0."""
    names = "seed steps inner_steps replicas inner.lr inner.schedule inner.warmup model.hidden_size data.batch_size"
    # Of the rule nothing enters auto; e62799b0 has its default there.
    rule = _DEFAULT if config.outer.restart == "auto" else asdict(config.outer.rule())
    outer = {f"outer.{name}": value for name, value in rule.items()} | {"outer.restart": config.outer.restart}
    return {name: get(config, name) for name in names.split()} | outer


def cells(table: Path) -> dict[str, Any]:
    """Return the results of a sweep's cells, by arm and values in the names of e62799b0."""
    with table.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    axes = ("outer.lr", "outer.momentum", "outer.restart", "seed", "sync.fragments")
    for row in rows:
        row.update({"outer.lr": "0.7", "outer.momentum": "0.9"} if row["arm"] == "auto" else {})
    values = {row["run"]: [f"{axis} {row[axis]}" for axis in axes if axis in row] for row in rows}
    keys = {row["run"]: ", ".join([row["arm"], *values[row["run"]]]) for row in rows}
    names = ("perplexity", "validation_loss", "diverged", "state")
    return {
        keys[row["run"]]: {name: row[name] for name in names} | {"control of": keys.get(row["control_of"], "")}
        for row in rows
    }


def lines(out: Path) -> tuple[list[Any], list[Any], dict[str, Any]]:
    """Return the rounds, metrics and summary of a run, without times, digests and places."""
    rounds, metrics = (
        [json.loads(line) for line in (out / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]
        for name in ("rounds", "metrics")
    )
    summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    names = "validation_loss perplexity perplexity_per_byte tokens diverged exit_reason steps rounds restarts accuracy"
    kept = {name: summary[name] for name in names.split() if name in summary}
    timed = ("seconds", "tokens_per_second", "engine_share", "peak_memory")
    metrics = [{name: value for name, value in line.items() if name not in timed} for line in metrics]
    return [{"step": line["step"], **report_numbers(line)} for line in rounds], metrics, kept


def export(run: Path, out: Path) -> None:
    """Export a run as a Hugging Face folder."""
    from twophase.tasks.lm.export import export as write  # noqa: PLC0415 - slow to import

    write(run, out)
