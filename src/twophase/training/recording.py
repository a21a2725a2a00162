"""`twophase.record`: a standard run folder from a training loop of your own."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from torch import Tensor

from twophase.config import Tree, fingerprint
from twophase.diloco.engine import DiLoCo
from twophase.diloco.group import default_group
from twophase.diloco.report import RoundReport
from twophase.errors import RunError, UsageError, python_words
from twophase.optim.outer_sgd import GroupRound, OuterSGD, rule_of
from twophase.rule import whole_number
from twophase.runs.config import options_of
from twophase.runs.folder import METRICS, RECORDED, ROUNDS, RunFolder, require_locks
from twophase.runs.record import MEASURED, read_rounds, read_steps, read_summary
from twophase.runs.trackers import call_each, open_trackers
from twophase.training.distributed import environment, raised_on_all_ranks

Engine = DiLoCo | OuterSGD
_PLAN = ("steps", "inner_steps", "replicas", "seed")
"""Values of the user's configuration with the same meaning as in `twophase train`; others are below `user`."""


@python_words()
def record(folder: str | Path, engine: Engine, config: Any = None, track: str | Sequence[str] = ()) -> Recorder:
    """Open a run folder that your loop writes, and that every page and command reads.

        run = twophase.record("runs/mine", engine, {"width": 32, "steps": 6400})
        for batch in batches:
            ...                              # forward, backward, inner.step(), inner.zero_grad()
            run.log_round(engine.step(), loss=loss, inner_lr=inner.param_groups[0]["lr"])
        run.log_round(engine.finish())
        run.finish(validation_loss=evaluate(model))

    A loop that continues loads the engine's state first: lines after its position are dropped, and written again. Every
    rank calls it, and rank 0 writes. A loop that changes the outer learning rate by hand sets the first one as the
    param group's `initial_lr`, as torch's schedulers do: the folder identifies its run by that value.

    Args:
        folder: the run's folder, new or of this run.
        engine: a `DiLoCo`, or an `OuterSGD` whose `step()` is a round.
        config: values that identify the run in addition to the engine's setting: a mapping, dataclass or argparse
            namespace. `steps` (inner steps planned), `inner_steps`, `replicas` and `seed` keep their meaning.
        track: trackers that get every line as well: tensorboard, trackio, wandb.

    Raises:
        UsageError: a folder with other content, of another or a finished run, or in use; a tracker that is not there.
    """
    tree, path, claim = setting(engine, config), Path(folder).absolute(), None
    ranks = engine.group if isinstance(engine, DiLoCo) and not engine.group.sharded else default_group()
    with raised_on_all_ranks(ranks):
        if ranks.rank == 0:
            require_locks()
            if read_summary(path, fingerprint(tree)):
                raise UsageError(f"{path}: must be a new or unfinished run, is finished")
            trackers = open_trackers([track] if isinstance(track, str) else track, path, tree)
            claim = RunFolder.claim(path, tree)
            claim.trackers = trackers
            claim.write_env(environment(_groups(engine)[0]["params"][0].device))
    return Recorder(claim, engine, int(tree.get("inner_steps", 1)))


class Recorder(AbstractContextManager["Recorder"]):
    """The open record of a loop, made by `record`; as a context manager it finishes the run unless the block raises.

    The first line, and one after the engine has loaded an earlier state, drops the lines after the engine's position.
    """

    def __init__(self, folder: RunFolder | None, engine: Engine, inner_steps: int) -> None:
        self._folder, self._engine, self._inner_steps = folder, engine, inner_steps
        self._begun, self._position, self._closed = time.perf_counter(), (math.inf, math.inf), False
        self._logged: object = engine.last_round if isinstance(engine, OuterSGD) else None
        self._rounds = self._taken  # those that the log has, or that were taken before it

    @property
    def round(self) -> int:
        """Rounds that have ended."""
        engine = self._engine
        return engine.round if isinstance(engine, DiLoCo) else max(group["rounds"] for group in engine.param_groups)

    @property
    def _taken(self) -> int:
        """Rounds that have ended, each fragment's counted by itself."""
        return sum(f.round for f in self._engine.fragments) if isinstance(self._engine, DiLoCo) else self.round

    @property
    def step(self) -> int:
        """Inner steps of each replica; of an `OuterSGD` its rounds times `inner_steps` of the configuration, or 1."""
        return self._engine.taken if isinstance(self._engine, DiLoCo) else self.round * self._inner_steps

    def log_round(self, report: RoundReport | Sequence[GroupRound] | None, **values: float | Tensor) -> None:
        """Write a round, and numbers at its end, as of `log`; the diagnosis of a run needs `inner_lr`.

        `report` is what `DiLoCo.step()` or `finish()` has returned, or the `last_round` of an `OuterSGD`, with norms
        after `step(measure=True)`. None, inside a round, and a round that is logged already write nothing.
        """
        if report is None or report is self._logged:
            return
        self._logged = report
        if isinstance(report, RoundReport):
            line, signals = report.as_dict(), report.signals
        else:  # replicas and checksums belong to the user's program
            norm = math.hypot(*(group.pseudo_gradient_norm for group in report))
            restarted = any(group["rounds_since_restart"] == 0 for group in _groups(self._engine))
            made = RoundReport(
                self.round, self._inner_steps, False, True, 1, restarted, (), tuple(report), norm, {}, 0, {}, ""
            )
            line = {name: value for name, value in made.as_dict().items() if report or name not in MEASURED}
            signals = {}
        self._rounds += len(line["fragments"]) or 1
        self._write(ROUNDS, {"step": self.step} | line)
        self.log(**{**signals, **values, "step": self.step})

    def log(self, step: int | None = None, **values: float | Tensor) -> None:
        """Add numbers, or tensors of one element, to the metrics of an inner step, by default the present one.

        Pages know `loss` (training, mean a token or example), `validation_loss`, `perplexity`, `inner_lr` and `tokens`
        (so far); others become columns. An earlier step takes names that it does not have yet.
        """
        line: dict[str, float] = {"step": self.step, "round": self.round}
        if "round" in values:
            raise ValueError("record: round must be another name, the record counts the rounds itself")
        if step is not None and whole_number("record: step", step, 0) != self.step:
            line = {"step": int(step)}
            lines = read_steps(self._folder.path / METRICS) if self._folder else []
            known = {name for each in lines if each["step"] == step for name in each}
            if step > self.step or known & {"train_loss" if name == "loss" else name for name in values}:
                raise ValueError(f"record: step {step} must be a past one without {', '.join(values)}, now {self.step}")
        for name, value in values.items() if self._folder is not None else ():  # another rank waits for no GPU
            number = float(value.item() if isinstance(value, Tensor) else value)
            line.setdefault("train_loss" if name == "loss" else name, number)
        self._write(METRICS, line)

    def _write(self, log: str, line: Mapping[str, Any]) -> None:
        if self._closed:
            raise RunError("record: the run is finished; log its last round, engine.finish(), before that")
        if self._folder is not None:
            if (position := (self.step, self.round)) < self._position:  # as at first: a state may have been loaded
                self._folder.truncate(self.step)
                if log == ROUNDS or read_rounds(self._folder.path):  # else no round before this line was logged
                    self._rounds = self._taken
            self._position = position
            self._folder.log(log, line)

    def finish(self, **values: float | Tensor) -> None:
        """Log the last numbers, write `summary.json` with the newest of all, and close, after `engine.finish()`.

        A run whose last loss or round is not finite, null in the logs, has diverged.
        """
        if values:
            self.log(None, **values)
        if isinstance(self._engine, DiLoCo) and any(f.steps or f.age is not None for f in self._engine.fragments):
            text = "record: the last round is not in it; call run.log_round(engine.finish()) before run.finish()"
            warnings.warn(text, stacklevel=2)
        if self._folder is not None:
            newest: dict[str, Any] = {}
            for line in read_steps(self._folder.path / METRICS):
                newest |= line
            last = (read_rounds(self._folder.path) or [{}])[-1]
            losses = (newest.get("train_loss", 0), newest.get("validation_loss", 0))
            diverged = None in (*losses, last.get("pseudo_gradient_norm", 0))
            summary = {
                "validation_loss": newest.get("validation_loss"),
                "tokens": int(newest.get("tokens") or 0),
                "seconds": time.perf_counter() - self._begun,
                "diverged": diverged,
                "exit_reason": "diverged" if diverged else RECORDED,
                "steps": self.step,
                "rounds": self.round,
                "restarts": sum(group.get("restarts", 0) for group in _groups(self._engine)),
            }
            self._folder.finish(newest | summary)
        self.close()

    def close(self) -> None:
        """Let other processes have the folder; without `finish` the run stays unfinished, to be continued."""
        self._closed = True
        if self._folder is not None:
            if (missing := self._taken - self._rounds) > 0:
                warnings.warn(f"record: {missing} rounds were taken and not logged by log_round", stacklevel=3)
            call_each(self._folder.trackers, "close")
            self._folder.release()
            self._folder = None

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close() if kind else self.finish()


def setting(engine: Engine, config: Any = None) -> Tree:
    """Return the configuration of a recorded run: the engine's, and below `user` the user's own values."""
    values = json.loads(json.dumps(config or {}, default=_plain))
    tree: Tree = {RECORDED: True} | {name: values.pop(name) for name in _PLAN if name in values}
    groups, sync = _groups(engine), {}
    blocks = {f"param group {number}": group for number, group in enumerate(groups)}
    if all("form" in group for group in groups):  # of an `OuterSGD`
        # Before a scheduler of torch changed their numbers: a resumed loop has the same folder.
        first = {"lr": "initial_lr", "momentum": "max_momentum"}
        begun = [group | {name: group.get(key, group[name]) for name, key in first.items()} for group in groups]
        rules = [*dict.fromkeys(map(rule_of, begun))]
        words = f"OuterSGD whose param groups are {'; '.join(rule.describe() for rule in rules)}"
        outer = options_of(rules[0]) if len(rules) == 1 else {"method": words}
    else:
        made: Any = engine.fragments[0].outer if isinstance(engine, DiLoCo) else engine
        outer = {"method": " and ".join(type(each).__name__ for each in getattr(made, "optimizers", [made]))}
    if isinstance(engine, DiLoCo):
        tree |= {"inner_steps": engine.inner_steps, "replicas": engine.replica_count}
        outer |= {"filter": str(engine.filter)} if engine.filter not in (None, "none") else {}
        sync = {"delay": engine.delay, "mixing": engine.mixing, "compression": engine.compression}
        if len(engine.fragments) > 1:
            blocks = {fragment.name: fragment.outer.param_groups[0] for fragment in engine.fragments}
            sync["fragments"] = [*blocks]
    restarts = {name: str(group.get("restart", "never")) for name, group in blocks.items()}
    outer["restart"] = next(iter(restarts.values()))
    if len({*restarts.values()}) > 1:
        sync["restart"] = [f"{name}={restart}" for name, restart in restarts.items()]
    return tree | {"outer": outer, "sync": sync, "user": values}


def _groups(engine: Engine) -> list[dict[str, Any]]:
    outers = [fragment.outer for fragment in engine.fragments] if isinstance(engine, DiLoCo) else [engine]
    return [group for outer in outers for group in outer.param_groups]


def _plain(value: Any) -> Any:
    """Return what JSON does not know as a value that it knows."""
    if isinstance(value, set | frozenset):
        return sorted(value)  # else in another order in each process
    if dataclasses.is_dataclass(value) or isinstance(value, argparse.Namespace):
        return vars(value)
    if isinstance(value, Mapping):
        return dict(value)
    return value.item() if getattr(value, "ndim", None) == 0 else str(value)  # a NumPy number or a tensor
