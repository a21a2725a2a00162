"""`twophase.record`: a standard run folder from a user's training loop."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from twophase.base.config import Tree, UsageError, flatten
from twophase.diloco.engine import DiLoCo
from twophase.diloco.group import SingleProcess, default_group
from twophase.diloco.report import RoundReport
from twophase.optim.outer_sgd import GroupRound, OuterSGD, rule_of
from twophase.optim.restarting import Restarting
from twophase.rule import OuterRule
from twophase.runs.folder import METRICS, RECORDED, ROUNDS, SUMMARY, USER, RunFolder, read_lines, read_rounds
from twophase.runs.method import options_of
from twophase.runs.trackers import check, tracked
from twophase.training.device import environment
from twophase.training.session import claimed, in_agreement

_log = logging.getLogger("twophase")
_CALLS = ("step", "finish")
_NAMES = {"loss": "train_loss"}
"""Names of metrics in reports and trackers."""
_PLAN = ("steps", "inner_steps", "replicas", "seed")
"""Values of the caller's configuration with the same meaning as in `twophase train`."""


class Recorder:
    """The open record of a loop, made by `record`.

    Attributes:
        path: the run's folder.
        step: inner steps of each replica so far, with those of earlier parts of the run. An `OuterSGD` sees no inner
            steps: then outer steps times `inner_steps` of the configuration, or 1.
        round: rounds that have ended.
    """

    def __init__(
        self,
        folder: RunFolder,
        engine: DiLoCo | OuterSGD,
        step: int,
        lead: bool,
        inner: Optimizer | None,
        *,
        opened: Callable[[], Any],
    ) -> None:
        self.path, self.step, self.round = folder.path, step, _rounds(engine)
        self._folder, self._engine, self._lead, self._inner, self._opened = folder, engine, lead, inner, opened
        self._lines: Any = None
        """The folder with its trackers, opened by the first line."""
        self._position: tuple[int, int, dict[str, int]] | None = None
        """Inner steps, rounds, and rounds by fragment, after which the next line belongs."""
        self._is_begun = False
        self.go_on()
        self._newest, self._round_is_finite = dict[str, float](), True

    def log(self, step: int | None = None, **values: float | Tensor) -> None:
        """Add a line to `metrics.jsonl` in process 0; a call in another process does nothing.

        Args:
            step: inner step of the numbers, by default the present one.
            values: numbers, or tensors of one element, by name. Pages know `loss` (training, mean a token or
                example), `validation_loss`, `perplexity`, `inner_lr` and `tokens` (so far); others become columns.

        Raises:
            ValueError: a value that is not one number, or tokens that are not finite.
        """
        if not self._lead:
            return
        line: dict[str, Any] = {"step": self.step, "round": self.round}
        for name, value in values.items() if step is None else {"step": step, **values}.items():
            try:
                number = float(value.detach() if isinstance(value, Tensor) else value)
                line[_NAMES.get(name, name)] = int(value) if name in ("step", "round") else number
            except (TypeError, ValueError, OverflowError, RuntimeError):  # RuntimeError: a tensor of several elements
                raise ValueError(f"record.log: {name} is {value!r}; give a single number") from None
        if not math.isfinite(line.get("tokens", 0)):
            raise ValueError(f"record.log: tokens is {line['tokens']}; give their number so far")
        self._newest |= line
        self.lines().log(METRICS, line)

    def end_round(self, report: Mapping[str, Any], signals: Mapping[str, float], finite: bool) -> None:
        """Write a round: the engine's report to `rounds.jsonl`, signals and inner learning rate to the metrics."""
        self.round = _rounds(self._engine)  # as after a resume: the rounds that all fragments have ended
        if not self._lead:
            return
        self.lines().log(ROUNDS, {"step": self.step, **report})
        values = {**signals, "step": self.step, "round": report["round"]}  # the line's own
        if self._inner is not None:
            values["inner_lr"] = max(float(group["lr"]) for group in self._inner.param_groups)
        self.log(**values)
        self._round_is_finite = finite

    def go_on(self) -> None:
        """Set the next line's place to the engine's position."""
        fragments = self._engine.fragments if isinstance(self._engine, DiLoCo) else ()
        parts = {fragment.name: fragment.round for fragment in fragments}
        self._position = self.step, _rounds(self._engine), parts

    def lines(self) -> Any:
        """Return the target of lines, in process 0; first cut the folder's lines after the loop's position.

        The cut waits for the first line, because the loop may load a state until then. The remaining lines count in
        the summary. A loop that begins again moves the files of an unfinished run into a subfolder.
        """
        if self._position is not None:
            (step, rounds, parts), folder = self._position, self._folder
            is_anew = not (self._is_begun or step or rounds) and _has_lines(folder)
            if is_anew:
                aside = folder.set_aside("begun-anew")
                _log.warning("record: the loop begins with round 1; %s keeps what was recorded before", aside)
            folder.cut(step, parts)
            logged = [item for line in read_lines(folder.path / METRICS) for item in line.items()]
            self._newest = {name: math.nan if value is None else value for name, value in logged} | self._newest
            device = _outers(self._engine)[0].param_groups[0]["params"][0].device
            folder.write_env(environment(device), anew=is_anew)
            self._position, self._is_begun = None, True
        if self._lines is None:  # after the folder was set aside, and with it the trackers' id
            self._lines = self._opened()
        return self._lines

    def rewind(self, step: int) -> None:
        """Continue from a loaded state after `step` inner steps: the next line cuts later lines."""
        rounds = _rounds(self._engine)
        is_back, self.step, self.round = (step, rounds) < (self.step, self.round), step, rounds
        if is_back:  # a later state cuts no line
            self._newest, self._round_is_finite = {}, True
        if is_back or self._position is not None:
            self.go_on()

    def summary(self, seconds: float) -> dict[str, Any]:
        """Return the numbers of `summary.json`; `seconds` are those of the run's last part."""
        loss, trained = map(self._newest.get, ("validation_loss", "train_loss"))
        diverged = not (self._round_is_finite and all(math.isfinite(value or 0.0) for value in (loss, trained)))
        return {
            **({"perplexity": self._newest["perplexity"]} if "perplexity" in self._newest else {}),
            "validation_loss": loss,
            "tokens": int(self._newest.get("tokens", 0)),
            "seconds": seconds,
            "diverged": diverged,
            "exit_reason": "diverged" if diverged else RECORDED,
            "steps": self.step,
            "rounds": self.round,
            "restarts": sum(g.get("restarts", 0) for outer in _outers(self._engine) for g in outer.param_groups),
        }


@contextmanager
def record(
    engine: DiLoCo | OuterSGD,
    folder: str | Path,
    config: Any = None,
    track: str | Sequence[str] = (),
    *,
    inner: Optimizer | None = None,
) -> Iterator[Recorder]:
    """Write a standard run folder, for every page and command, while a loop calls `engine.step()`.

        with twophase.record(engine, "runs/mine", {"width": 32, "steps": 6400}, inner=inner) as run:
            for batch in batches:
                ...                              # forward, backward, inner.step(), inner.zero_grad()
                engine.step({"loss": loss})      # signals are noted each round
            engine.finish()
            run.log(validation_loss=evaluate(model))

    Each round becomes a line of `rounds.jsonl`. When the block ends, `summary.json` has the
    last logged `validation_loss`. The run is diverged if its last loss or pseudo-gradient is not finite. If the block
    raises, the run stays unfinished. A loop may load an earlier state of the engine, before or inside the block. Its
    next line then cuts the rounds after that state, which the loop repeats. A loop that begins again moves the files of
    an unfinished run into a subfolder. A loop that changes the outer learning rate by hand sets the first
    one as the param group's `initial_lr`, as torch's schedulers do. The folder identifies its run by that value.

    Of several processes, process 0 writes.

    Args:
        engine: a `DiLoCo`, or an `OuterSGD` whose `step()` is a round.
        folder: the run's folder, new or of this run.
        config: values that identify the run in addition to the engine's setting: a mapping, dataclass or argparse
            namespace of plain values. `steps` (inner steps planned), `inner_steps`, `replicas` and `seed` keep their
            meaning.
        track: trackers that get every line as well: tensorboard, trackio, wandb.
        inner: the inner optimizer, or that of the first replica. Its largest learning rate is recorded each round, for
            `diagnose` and `explore --run`.

    Raises:
        UsageError: a folder with other content, a finished run, a folder in use by another process, or a tracker that
            is not installed. Nothing is changed then.
        ValueError: no engine, no optimizer, a configuration that contradicts the engine, or groups that take turns.
    """
    if not isinstance(engine, DiLoCo | OuterSGD):
        raise ValueError(f"record: {type(engine).__name__} is no engine; give a DiLoCo or an OuterSGD")
    if inner is not None and not hasattr(inner, "param_groups"):
        raise ValueError(
            f"record: inner is a {type(inner).__name__}; give one optimizer, of several the first replica's"
        )
    trackers = check([track] if isinstance(track, str) else track)
    # Absolute, since the loop may change its working directory: lines would be looked for in the new one.
    tree, path, started = setting(engine, config), Path(folder).absolute(), time.perf_counter()
    lead = (files := _processes(engine)).rank == 0
    with claimed(path, tree, files) as claim:
        step = _begin(claim, engine, files)  # refuse before a tracker begins
        with ExitStack() as open_trackers:
            target = tracked(claim, trackers, run_name=path.name, config=tree, lead=lead)
            run = Recorder(claim, engine, step, lead, inner, opened=partial(open_trackers.enter_context, target))
            size = int(tree.get("inner_steps", 1))
            with _observed(engine, run) if isinstance(engine, DiLoCo) else _hooked(engine, run, size):
                yield run
            if lead:
                run.lines()  # also for a loop without lines
        if lead:
            claim.finish(run.summary(time.perf_counter() - started))


def setting(engine: DiLoCo | OuterSGD, config: Any = None) -> Tree:
    """Return the configuration of a recorded run: the engine's, and below `user` the caller's own values.

    Raises:
        ValueError: a caller's value that contradicts the engine.
    """
    tree: Tree = {RECORDED: True}
    outers = _outers(engine)
    if isinstance(engine, DiLoCo):
        tree["inner_steps"] = engine.inner_steps
        tree["replicas"] = engine.replica_count
    if all(isinstance(outer, OuterSGD) for outer in outers):
        every = [group for outer in outers for group in outer.param_groups]
        rules = dict.fromkeys(map(_first_rule, every))
        tree["outer"] = options_of(next(iter(rules)))
        if len(rules) > 1:
            text = "; ".join(rule.describe() for rule in rules)
            tree["outer"] = {"method": f"OuterSGD whose param groups are {text}"}
        tree["outer"]["restart"] = str(every[0]["restart"])
    elif all(isinstance(outer, Restarting) for outer in outers):
        names = [type(each).__name__ for each in outers[0].optimizers]  # type: ignore[attr-defined]
        tree["outer"] = {"method": " and ".join(names), "restart": outers[0].param_groups[0]["restart"]}
    if isinstance(engine, DiLoCo) and engine.fragments[0].filter is not None and "outer" in tree:
        tree["outer"]["filter"] = str(engine.filter)
    sync: Tree = {}
    groups = {f"param group {number}": group for number, group in enumerate(outers[0].param_groups)}
    if isinstance(engine, DiLoCo):
        syncs = {"delay": engine.delay, "mixing": engine.mixing, "compression": engine.compression}
        sync |= {name: value for name, value in syncs.items() if value not in (0, "float32")}
        if len(outers) > 1:
            groups = {fragment.name: fragment.outer.param_groups[0] for fragment in engine.fragments}
            sync["fragments"] = [*groups]
    restarts = {name: str(group.get("restart", "never")) for name, group in groups.items()}
    if len({*restarts.values()}) > 1:  # of blocks, by their names in a record
        sync["restart"] = [f"{name}={restart}" for name, restart in restarts.items()]
    tree |= {"sync": sync} if sync else {}
    values = _plain(config)
    for name in _PLAN:
        if name in values:
            value = values.pop(name)
            if tree.setdefault(name, value) != value:
                raise ValueError(f"record: config has {name} = {value}, and the engine {tree[name]}; leave it out")
    return tree | ({USER: values} if values else {})


def _first_rule(group: Mapping[str, Any]) -> OuterRule:
    """Return the rule that a param group had before a scheduler of torch changed it."""
    momentum = group.get("max_momentum", group["momentum"])
    return rule_of(dict(group) | {"lr": float(group.get("initial_lr", group["lr"])), "momentum": momentum})


def _plain(config: Any) -> Tree:
    """Return a configuration as nested dictionaries of YAML and JSON values; other values become text."""
    if config is None:
        return {}
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        config = dataclasses.asdict(config)
    if isinstance(config, argparse.Namespace):
        config = vars(config)
    if not isinstance(config, Mapping):
        raise ValueError(f"record: config is a {type(config).__name__}; give a mapping, dataclass or namespace")

    def plain(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {str(key): plain(item) for key, item in value.items()}
        if isinstance(value, list | tuple | set | frozenset):
            items = [plain(item) for item in value]  # of a set, in an order that follows the hash seed
            return items if isinstance(value, list | tuple) else sorted(items, key=repr)
        if hasattr(value, "item") and getattr(value, "ndim", 0) == 0:  # a NumPy number or a tensor
            value = value.item()
        is_plain = value is None or type(value) in (bool, int, str)
        return value if is_plain or (type(value) is float and math.isfinite(value)) else str(value)

    tree: Tree = plain(config)
    try:  # text that config.yaml could not return
        json.dumps(flatten(tree), ensure_ascii=False).encode()
    except ValueError as error:
        raise ValueError(f"record: config cannot be written ({error})") from None
    return tree


def _processes(engine: DiLoCo | OuterSGD) -> SingleProcess:
    """Return the processes that share a folder: all."""
    if isinstance(engine, OuterSGD) or engine.group.sharded:
        return default_group()
    return engine.group


def _outers(engine: DiLoCo | OuterSGD) -> list[Optimizer]:
    """Return the outer optimizers, one a fragment."""
    return [fragment.outer for fragment in engine.fragments] if isinstance(engine, DiLoCo) else [engine]


def _rounds(engine: DiLoCo | OuterSGD) -> int:
    """Return the rounds that have ended."""
    return engine.round if isinstance(engine, DiLoCo) else max(group["rounds"] for group in engine.param_groups)


def _has_lines(folder: RunFolder) -> bool:
    return any([read_rounds(folder.path), read_lines(folder.path / METRICS)])  # both: a damaged file is refused


def _begin(folder: RunFolder, engine: DiLoCo | OuterSGD, files: SingleProcess) -> int:
    """Refuse a folder that cannot continue, unchanged; return the inner steps up to the engine's position.

    Args:
        folder: the run's folder.
        engine: engine of `record`.
        files: the processes that share the folder.
    """
    rounds, step = _rounds(engine), 0
    with in_agreement(files):
        if files.rank == 0:
            if folder.summary() is not None:
                raise UsageError(
                    f"{folder.path}: holds a finished run ({SUMMARY}); choose another folder, or move this one"
                )
            _has_lines(folder)  # refuses a damaged file
            step = max((line["step"] for line in read_rounds(folder.path) if line["round"] <= rounds), default=0)
            step = engine.taken if isinstance(engine, DiLoCo) else step
    return files.gather_json(step)[0]


@contextmanager
def _observed(engine: DiLoCo, run: Recorder) -> Iterator[None]:
    """Record the reports of an engine's calls; until the record ends, instance attributes hide the methods."""

    def noting(name: str) -> Any:
        call = getattr(engine, name)

        def observed(*args: Any, **options: Any) -> RoundReport | None:
            report = call(*args, **options)
            run.step = engine.taken
            if report is not None:
                run.end_round(report.as_dict(), report.signals, _is_finite(report))
            return report

        return observed

    load = engine.load_state_dict

    def loading(state: Mapping[str, Any]) -> None:
        load(state)
        run.rewind(engine.taken)

    calls = {name: noting(name) for name in _CALLS} | {"load_state_dict": loading}
    vars(engine).update(calls)
    try:
        yield
    finally:
        for name in calls:
            vars(engine).pop(name, None)


@contextmanager
def _hooked(outer: OuterSGD, run: Recorder, inner_steps: int) -> Iterator[None]:
    """Record each step of an outer optimizer, and let it measure its norms and cosines."""
    begun = time.perf_counter()

    def before(_: Any, args: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        nonlocal begun
        begun = time.perf_counter()
        # The step at lr 0 of torch.distributed.checkpoint is no round, and measured it would be one.
        is_trial = not outer.state and all(group["lr"] == group["rounds"] == 0 for group in outer.param_groups)
        return None if is_trial else (args, options | {"measure": True})

    def after(_: Any, __: Any, options: dict[str, Any]) -> None:
        if outer.last_round:
            run.step += inner_steps
            line = _line(outer, outer.last_round, inner_steps, time.perf_counter() - begun)
            if line["round"] <= run.round:
                raise ValueError(
                    f"record: round {run.round} ends again; param groups that take rounds in turn need an OuterSGD each"
                )
            run.end_round(line, options.get("signals") or {}, all(map(_is_finite, outer.last_round)))

    def loaded(_: Any) -> None:
        run.rewind(max(0, run.step - inner_steps * (run.round - _rounds(outer))))

    hooks = [outer.register_step_pre_hook(before), outer.register_step_post_hook(after)]  # type: ignore[arg-type]
    hooks.append(outer.register_load_state_dict_post_hook(loaded))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _is_finite(of: RoundReport | GroupRound) -> bool:
    return not of.not_finite and math.isfinite(of.pseudo_gradient_norm)


def _line(outer: OuterSGD, groups: Sequence[GroupRound], inner_steps: int, seconds: float) -> dict[str, Any]:
    """Return an outer step as a round's report; replicas and checksums belong to the caller."""
    return RoundReport(
        round=max(group["rounds"] for group in outer.param_groups),
        inner_steps=inner_steps,
        partial=False,
        complete=True,
        replicas=1,
        restarted=any(group.restarted for group in groups),
        fragments=(),
        groups=tuple(groups),
        pseudo_gradient_norm=math.hypot(*(group.pseudo_gradient_norm for group in groups)),
        signals={},
        bytes_sent=0,
        seconds={"outer": seconds},
        checksum="",
    ).as_dict()
