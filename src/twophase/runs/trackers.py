"""Metrics to TensorBoard, trackio or Weights & Biases, besides a run's logs.

The run's folder stays the record of the run; a tracker only shows it, and must not touch the run. So each works in a
thread behind a queue. A tracker that fails, blocks or falls behind is reported once and left out from then on.
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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from twophase.base.config import Tree, UsageError, flatten
from twophase.base.files import write_atomic
from twophase.base.reading import read_json_object
from twophase.number import did_you_mean
from twophase.runs.folder import METRICS, ROUNDS, STEPS, TRACKING

NAMES = ("none", "tensorboard", "trackio", "wandb")
PROJECT = "twophase"
START_SECONDS = 10.0
"""Time that a run waits for a tracker to start; a slower one (a remote server) starts during the run."""
CLOSE_SECONDS = 60.0
"""Time that the end of a run waits for a tracker to send its last lines."""
_WAITING = 100_000  # lines that a slow tracker may be behind
_METRICS = {
    "step": "",
    "round": "",
    "train_loss": "loss/train",
    "validation_loss": "loss/validation",
    "perplexity": "perplexity/token",
    "perplexity_per_byte": "perplexity/byte",
    "inner_lr": "inner/lr",
}
_NAMES = {
    METRICS: (_METRICS, "metrics"),
    ROUNDS: ({"step": "", "round": "round/number"}, "round"),
    STEPS: ({"step": "", "train_loss": "loss/step", "inner_lr": ""}, "speed"),
}
"""Trackers' names for the keys of each log, and the first word of those for other keys; no name is not sent."""

Numbers = dict[str, float]


def check(names: Sequence[str]) -> tuple[str, ...]:
    """Return the trackers that were asked for, each once and without `none`, if they are installed.

    Raises:
        UsageError: an unknown name, or a package that is missing.

    >>> check(["none"])
    ()
    """
    for name in names:
        if name not in NAMES:
            raise UsageError(f"--track {name}: there is no such tracker; {did_you_mean(name, NAMES)}")
        # A module may also be put into sys.modules by hand, and then has nothing that find_spec looks for.
        if name != "none" and name not in sys.modules and importlib.util.find_spec(name) is None:
            raise UsageError(
                f"--track {name}: the package {name} is not installed; pip install 'twophase[{name}]', or leave "
                f"{name} out"
            )
    return tuple(dict.fromkeys(name for name in names if name != "none"))


def identity(folder: Path) -> str:
    """Return the id under which trackers know the run of a folder, the same after resuming or moving it."""
    path = folder / TRACKING
    # A power cut may leave an empty file, since it is not synced; the trackers then see a new run.
    with contextlib.suppress(FileNotFoundError, ValueError, KeyError):
        return str(read_json_object(path)["id"])
    # Not the fingerprint of the configuration: a run that is deleted and repeated is another run to the trackers.
    fresh = secrets.token_hex(6)
    write_atomic(path, json.dumps({"id": fresh}) + "\n", durable=False)
    return fresh


def numbers(values: Mapping[str, Any]) -> Numbers:
    """Return the finite numbers among some values, true and false as 1 and 0; `/` joins the names of nested mappings.

    >>> numbers({"gain": 1.5, "restarted": True, "seconds": {"outer": 0.25}, "checksum": "0f", "cosine": None})
    {'gain': 1.5, 'restarted': 1, 'seconds/outer': 0.25}
    """
    flat = {name.replace(".", "/"): value for name, value in flatten(values).items()}
    plain = {name: int(value) if isinstance(value, bool) else value for name, value in flat.items()}
    return {name: value for name, value in plain.items() if isinstance(value, (int, float)) and math.isfinite(value)}


class Tracked:
    """A run's folder that also sends its lines to trackers; everything else is the folder's."""

    def __init__(self, folder: Any, trackers: Sequence[Tracker]) -> None:
        self._folder = folder
        self._trackers = trackers

    def __getattr__(self, name: str) -> Any:
        return getattr(self._folder, name)

    def log(self, log: str, line: dict[str, Any], /) -> None:
        """Append a line; send its numbers by names such as `loss/train`, `round/gain`, `speed/tokens_per_second`."""
        self._folder.log(log, line)
        names, others = _NAMES[log]
        named = {name: value for key, value in line.items() if (name := names.get(key, f"{others}/{key}"))}
        for tracker in self._trackers:
            tracker.log(numbers(named), line["step"])


@contextmanager
def tracked(folder: Any, names: Sequence[str], *, run_name: str, config: Tree, lead: bool = True) -> Iterator[Any]:
    """Yield a run's folder with trackers for as long as the run lasts.

    Args:
        folder: a claimed run folder.
        names: trackers, as returned by `check`; without any the folder itself is yielded.
        run_name: the run's name for people.
        config: the configuration, for the record.
        lead: True in process 0; other processes track nothing.
    """
    if not names or not lead:
        yield folder
        return
    run_id = identity(folder.path)
    trackers = [Tracker(name, run_name=run_name, run_id=run_id, folder=folder.path, config=config) for name in names]
    try:
        yield Tracked(folder, trackers)
    finally:
        for tracker in trackers:
            tracker.close()


class Tracker:
    """A tracker in its own thread; its methods raise nothing and never wait for a server for ever.

    TensorBoard's files go to the run's `tensorboard/`, those of Weights & Biases to its `wandb/`; `run_id` recognises a
    resumed run.
    """

    def __init__(self, name: str, *, run_name: str, run_id: str, folder: Path, config: Tree) -> None:
        self._name = name
        self._start = partial(_BACKENDS[name], run_name, run_id, folder, config)
        self._lines: queue.Queue[tuple[Numbers, int] | None] = queue.Queue()
        self._ready = threading.Event()
        self._failed = False
        # A daemon: a tracker that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        with _no_greetings():
            self._thread.start()
            self._ready.wait(START_SECONDS)

    def log(self, values: Numbers, step: int) -> None:
        """Show the numbers of an inner step."""
        if self._lines.qsize() >= _WAITING:
            self._drop(f"it is {_WAITING:,} lines behind")
        if values and not self._failed:
            self._lines.put((values, step))

    def close(self) -> None:
        """Send the last lines; safe to repeat."""
        self._lines.put(None)
        with _no_greetings():
            self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            self._drop(f"it has not finished within {CLOSE_SECONDS:.0f} s", "the run's own logs are complete")

    def _work(self) -> None:
        backend: Any = None
        with self._guarded():
            backend = self._start()
        self._ready.set()
        while backend is not None and (line := self._lines.get()) is not None:
            with self._guarded():
                if not self._failed:  # a tracker that has failed is still closed at the end
                    backend.log(*line)
                    if self._lines.empty():
                        backend.flush()  # a killed run then shows what it has logged
        with self._guarded():
            if backend is not None:
                backend.close()

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:  # an extension's SystemExit is no reason to end, either
            self._drop(textwrap.shorten(str(error), 200) or type(error).__name__)

    def _drop(self, why: str, then: str = "the run continues without it") -> None:
        if not self._failed:
            self._failed = True
            print(f"tracker {self._name} failed ({why}); {then}", file=sys.stderr, flush=True)


def _no_greetings() -> contextlib.AbstractContextManager[object]:
    """Keep off stdout what trackers print when they start and end; for moments in which we wait for them anyway."""
    return contextlib.redirect_stdout(io.StringIO())


class _TensorBoard:
    """Event files in the run's folder."""

    def __init__(self, _name: str, _id: str, folder: Path, config: Tree) -> None:
        self._open = importlib.import_module("torch.utils.tensorboard").SummaryWriter
        self._folder, self._config = str(folder / "tensorboard"), config
        self._writer: Any = None

    def log(self, values: Numbers, step: int) -> None:
        if self._writer is None:
            # Readers drop what an earlier part of the run has logged from this step on: it is logged again.
            self._writer = self._open(self._folder, purge_step=step)
            text = json.dumps(self._config, indent=1).replace("\n", "\n    ")
            self._writer.add_text("config", f"    {text}", step)
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class _Server:
    """A run of trackio or Weights & Biases, which flush by themselves; lines before its first step are repetitions."""

    def __init__(self, run: Any, first: int) -> None:
        self._run, self._first = run, first
        self.close = run.finish

    def log(self, values: Numbers, step: int) -> None:
        if step >= self._first:
            self._run.log(values, step=step)

    def flush(self) -> None: ...


def _trackio(run_name: str, run_id: str, _folder: Path, config: Tree) -> _Server:
    """Start a run in a SQLite file on this machine, or on the server that TRACKIO_… names."""
    name = f"{run_name} {run_id}"  # by which trackio recognises it
    init = importlib.import_module("trackio").init
    run = init(project=PROJECT, name=name, resume="allow", config=config, embed=False)
    return _Server(run, getattr(run, "_next_step", None) or 0)  # without that name repeated lines show twice: harmless


def _wandb(run_name: str, run_id: str, folder: Path, config: Tree) -> _Server:
    """Start a run of Weights & Biases; WANDB_MODE=offline keeps everything in the run's folder."""
    wandb = importlib.import_module("wandb")
    quiet = wandb.Settings(silent=True, console="off")
    if wandb.setup(settings=quiet).settings.mode == "online" and not wandb.login(prompt=False, verify=False):
        raise RuntimeError("it has no API key: run `wandb login`, or set WANDB_MODE=offline")
    options = {"name": run_name, "id": run_id, "resume": "allow", "dir": os.fspath(folder), "config": config}
    hook = sys.excepthook
    try:
        run = wandb.init(project=PROJECT, settings=quiet, **options)
    finally:
        sys.excepthook = hook  # wandb replaces it by a hook that prints
    return _Server(run, run.step)  # the server has all before this step, and complains about repetitions


_BACKENDS = {"tensorboard": _TensorBoard, "trackio": _trackio, "wandb": _wandb}
