"""Metrics to TensorBoard, trackio or Weights & Biases, beside a run's own logs.

The run's folder stays the record of the run; a tracker only shows it. So nothing that a tracker does may touch the
run: each works in a thread of its own behind a queue, and one that fails, blocks or falls behind is told about once
and left out from then on.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import json
import math
import os
import queue
import secrets
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from twophase.base.config import Tree, UsageError
from twophase.base.files import write_atomic

NAMES = ("none", "tensorboard", "trackio", "wandb")
PROJECT = "twophase"
START_SECONDS = 10.0
"""How long a run waits for a tracker to start; a slower one (a server far away) starts while the run goes on."""
CLOSE_SECONDS = 60.0
"""How long the end of a run waits for a tracker to send what it still has."""
_WAITING = 100_000  # lines that a slow tracker may be behind
_IDENTITY = "tracking.json"

Numbers = dict[str, float]


class Tracker(Protocol):
    """Where numbers are shown."""

    def log(self, values: Mapping[str, Any], step: int) -> None:
        """Show values of an inner step; what is not a finite number is left out."""

    def close(self) -> None:
        """Send what is left."""


def check(names: Sequence[str]) -> tuple[str, ...]:
    """The trackers that were asked for, each once and without `none`, if they are installed.

    Raises:
        UsageError: an unknown name, or a package that is missing.

    >>> check(["none"])
    ()
    """
    for name in names:
        if name not in NAMES:
            raise UsageError(f"--track {name}: there is no such tracker; choose from {', '.join(NAMES)}")
        # A module may also be put into sys.modules by hand, and then has nothing that find_spec looks for.
        if name != "none" and name not in sys.modules and importlib.util.find_spec(name) is None:
            raise UsageError(
                f"--track {name}: the package {name} is not installed; pip install 'twophase[{name}]', or leave "
                f"{name} out"
            )
    return tuple(dict.fromkeys(name for name in names if name != "none"))


def tracker(name: str | Sequence[str], *, run_name: str, run_id: str, folder: Path, config: Tree) -> Tracker:
    """A started tracker, or several as one.

    Args:
        name: one or more of `NAMES`.
        run_name: the run's name for people.
        run_id: what a resumed run is recognised by; see `identity`.
        folder: the run's folder; TensorBoard's files go to its `tensorboard/`, those of Weights & Biases to `wandb/`.
        config: the configuration, for the record.

    Returns:
        A tracker whose methods raise nothing and which neither waits for a server while the run goes on nor for ever
        at its end.

    Raises:
        UsageError: as `check`.
    """
    run = _Run(run_name, run_id, folder, config)
    backends: dict[str, Callable[[_Run], _Backend]] = {
        "tensorboard": _TensorBoard,
        "trackio": _Trackio,
        "wandb": _Wandb,
    }
    names = check([name] if isinstance(name, str) else name)
    return _Several([_Guard(each, lambda start=backends[each]: start(run)) for each in names])


def identity(folder: Path) -> str:
    """The id under which trackers know the run of a folder, the same whenever it is resumed, wherever it is moved."""
    path = folder / _IDENTITY
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return str(json.loads(path.read_text(encoding="utf-8"))["id"])
    # Not the fingerprint of the configuration: a run that is deleted and done anew is another one to the trackers.
    fresh = secrets.token_hex(6)
    write_atomic(path, json.dumps({"id": fresh}) + "\n", durable=False)
    return fresh


def numbers(values: Mapping[str, Any], prefix: str = "") -> Numbers:
    """The finite numbers among some values; nested mappings with `/` between the names, true and false as 1 and 0.

    >>> numbers({"gain": 1.5, "restarted": True, "seconds": {"outer": 0.25}, "checksum": "0f", "cosine": None})
    {'gain': 1.5, 'restarted': 1, 'seconds/outer': 0.25}
    """
    found: Numbers = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            found |= numbers(value, f"{prefix}{key}/")
        elif isinstance(value, bool):
            found[f"{prefix}{key}"] = int(value)
        elif isinstance(value, (int, float)) and math.isfinite(value):
            found[f"{prefix}{key}"] = value
    return found


# ------------------------------------------------------------------------------------------------------ around a run

_METRICS = {
    "train_loss": "loss/train",
    "validation_loss": "loss/validation",
    "perplexity": "perplexity/token",
    "perplexity_per_byte": "perplexity/byte",
    "inner_lr": "inner/lr",
}
_SKIPPED = ("step", "round")
_SKIPPED_OF_STEPS = (*_SKIPPED, "train_loss", "inner_lr")  # the learning rate stands among the metrics


class Tracked:
    """A run's folder whose lines also go to a tracker; everything else is the folder's own.

    Args:
        folder: a recorder of `twophase.training.train`.
        tracker: where numbers go, too.
    """

    def __init__(self, folder: Any, tracker: Tracker) -> None:
        self._folder = folder
        self._tracker = tracker

    def __getattr__(self, name: str) -> Any:
        return getattr(self._folder, name)

    def log_metrics(self, line: dict[str, Any], /) -> None:
        """Append a line of losses: `loss/train`, `loss/validation`, `perplexity/token`, `inner/lr`."""
        self._folder.log_metrics(line)
        named = {_METRICS.get(key, f"metrics/{key}"): value for key, value in line.items() if key not in _SKIPPED}
        self._tracker.log(named, line["step"])

    def log_round(self, line: dict[str, Any], /) -> None:
        """Append a line about the outer step: `round/gain`, `round/cosine`, and so on."""
        self._folder.log_round(line)
        named = {f"round/{key}": value for key, value in line.items() if key not in _SKIPPED}
        self._tracker.log({"round/number": line.get("round"), **named}, line["step"])

    def log_step(self, line: dict[str, Any], /) -> None:
        """Append a line about a stretch of inner steps: `loss/step`, `speed/tokens_per_second`, and so on."""
        self._folder.log_step(line)
        named = {f"speed/{key}": value for key, value in line.items() if key not in _SKIPPED_OF_STEPS}
        self._tracker.log({"loss/step": line.get("train_loss"), **named}, line["step"])

    # The rest stands here, although __getattr__ would do it, for type checkers.

    @property
    def path(self) -> Path:
        """The folder."""
        return self._folder.path

    @property
    def checkpoint_dir(self) -> Path:
        """The folder of the checkpoints."""
        return self._folder.checkpoint_dir

    @property
    def weights(self) -> Path:
        """The file of the final weights."""
        return self._folder.weights

    def write_env(self, env: dict[str, Any], /) -> None:
        """Record machine, versions and corpus."""
        self._folder.write_env(env)

    def position(self) -> dict[str, int]:
        """How far the logs go."""
        return self._folder.position()

    def rewind(self, position: dict[str, int], /) -> None:
        """Cut the logs back; a tracker recognises lines that it is given again by their step."""
        self._folder.rewind(position)

    def last_round(self) -> dict[str, Any] | None:
        """The newest line about an outer step."""
        return self._folder.last_round()

    def set_aside(self, name: str, /) -> Path:
        """Move the record into a folder of that name."""
        return self._folder.set_aside(name)

    def finish(self, summary: dict[str, Any], /) -> None:
        """Declare the run finished."""
        self._folder.finish(summary)


@contextmanager
def tracked(folder: Any, names: Sequence[str], *, run_name: str, config: Tree, lead: bool = True) -> Iterator[Any]:
    """A run's folder with trackers for as long as the run lasts.

    Args:
        folder: a claimed run folder.
        names: of the trackers; without any the folder itself is yielded.
        run_name: the run's name for people.
        config: the configuration, for the record.
        lead: whether this is process 0; the others track nothing.

    Raises:
        UsageError: as `check`; call that before the folder is made.
    """
    asked = check(names)
    if not asked or not lead:
        yield folder
        return
    to = tracker(asked, run_name=run_name, run_id=identity(folder.path), folder=folder.path, config=config)
    try:
        yield Tracked(folder, to)
    finally:
        to.close()


# ---------------------------------------------------------------------------------------------------- guarded trackers


@dataclass(frozen=True)
class _Run:
    name: str
    id: str
    folder: Path
    config: Tree


class _Backend(Protocol):
    """A tracker that may fail and wait."""

    def log(self, values: Numbers, step: int) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


class _Several:
    """Trackers as one."""

    def __init__(self, guards: Sequence[_Guard]) -> None:
        self._guards = guards

    def log(self, values: Mapping[str, Any], step: int) -> None:
        found = numbers(values)
        if found:
            for guard in self._guards:
                guard.log(found, step)

    def close(self) -> None:
        for guard in self._guards:
            guard.close()


class _Guard:
    """One tracker in a thread of its own; whatever it does, the run goes on."""

    def __init__(self, name: str, start: Callable[[], _Backend]) -> None:
        self._name = name
        self._lines: queue.Queue[tuple[Numbers, int] | None] = queue.Queue(_WAITING)
        self._ready, self._lock = threading.Event(), threading.Lock()
        self._gone = self._closed = False
        # A daemon: a tracker that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._work, args=(start,), name=f"tracker {name}", daemon=True)
        with _no_greetings():
            self._thread.start()
            self._ready.wait(START_SECONDS)

    def log(self, values: Numbers, step: int) -> None:
        if self._gone:
            return
        try:
            self._lines.put_nowait((values, step))
        except queue.Full:
            self._drop(f"it is {_WAITING:,} lines behind")

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with _no_greetings():
            try:
                self._lines.put(None, timeout=0 if self._gone else CLOSE_SECONDS)
            except queue.Full:  # nobody reads: one line makes room for the word that it is over, should it wake up
                with contextlib.suppress(queue.Empty, queue.Full):
                    self._lines.get_nowait()
                    self._lines.put_nowait(None)
            else:
                self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            self._drop(f"it has not finished within {CLOSE_SECONDS:.0f} s", "the run's own logs are complete")

    def _work(self, start: Callable[[], _Backend]) -> None:
        try:
            backend = start()
        except BaseException as error:  # an extension's SystemExit is no reason to end, either
            self._failed(error)
            return
        finally:
            self._ready.set()
        while (line := self._lines.get()) is not None:  # one that has failed is still closed at the end
            if self._gone:
                continue
            try:
                backend.log(*line)
                if self._lines.empty():
                    backend.flush()  # a killed run then shows what it has logged
            except BaseException as error:
                self._failed(error)
        try:
            backend.close()
        except BaseException as error:
            self._failed(error)

    def _failed(self, error: BaseException) -> None:
        self._drop(textwrap.shorten(str(error), 200) or type(error).__name__)

    def _drop(self, why: str, then: str = "the run goes on without it") -> None:
        with self._lock:
            told, self._gone = self._gone, True
        if not told:
            print(f"tracker {self._name} failed ({why}); {then}", file=sys.stderr, flush=True)


def _no_greetings() -> contextlib.AbstractContextManager[object]:
    """Keep off stdout what trackers print when they start and end; for moments in which we wait for them anyway."""
    return contextlib.redirect_stdout(io.StringIO())


# ------------------------------------------------------------------------------------------------------- the trackers


class _TensorBoard:
    """Event files in the run's folder."""

    def __init__(self, run: _Run) -> None:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - an optional package

        self._open = SummaryWriter
        self._run = run
        self._writer: Any = None

    def log(self, values: Numbers, step: int) -> None:
        if self._writer is None:
            # Readers drop what an earlier part of the run has logged from this step on: it is logged again.
            self._writer = self._open(str(self._run.folder / "tensorboard"), purge_step=step)
            text = json.dumps(self._run.config, indent=1).replace("\n", "\n    ")
            self._writer.add_text("config", f"    {text}", step)
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def flush(self) -> None:
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class _Trackio:
    """A SQLite file on this machine (`trackio show --project twophase`), or the server that TRACKIO_… names."""

    def __init__(self, run: _Run) -> None:
        trackio = importlib.import_module("trackio")
        # Its runs are recognised by their names.
        name = f"{run.name} {run.id}"
        self._run = trackio.init(project=PROJECT, name=name, resume="allow", config=run.config, embed=False)
        # Lines that it was given before the run was resumed; without that name it shows them twice, which is harmless.
        self._next = getattr(self._run, "_next_step", None) or 0

    def log(self, values: Numbers, step: int) -> None:
        if step >= self._next:
            self._run.log(values, step=step)

    def flush(self) -> None:
        """It has a thread for that."""

    def close(self) -> None:
        self._run.finish()


class _Wandb:
    """Weights & Biases; WANDB_MODE=offline keeps everything in the run's folder, to be sent by `wandb sync`."""

    def __init__(self, run: _Run) -> None:
        wandb = importlib.import_module("wandb")
        quiet = wandb.Settings(silent=True, console="off")
        if wandb.setup(settings=quiet).settings.mode == "online" and not wandb.login(prompt=False, verify=False):
            raise RuntimeError("it has no API key: run `wandb login`, or set WANDB_MODE=offline")
        hook = sys.excepthook
        try:
            self._run = wandb.init(
                project=PROJECT,
                name=run.name,
                id=run.id,
                resume="allow",
                dir=os.fspath(run.folder),
                config=run.config,
                settings=quiet,
            )
        finally:
            sys.excepthook = hook  # it puts its own there, which prints
        self._first = self._run.step  # the server has all before this step; what it is given again, it complains about

    def log(self, values: Numbers, step: int) -> None:
        if step >= self._first:
            self._run.log(values, step=step)

    def flush(self) -> None:
        """It has a process for that."""

    def close(self) -> None:
        self._run.finish()
