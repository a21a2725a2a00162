"""Metrics to TensorBoard, trackio or Weights & Biases, besides a run's logs, which stay its record."""

from __future__ import annotations

import importlib.util
import math
import secrets
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from twophase.config import Tree, flatten
from twophase.errors import UsageError

NAMES = ("none", "tensorboard", "trackio", "wandb")


class TensorBoard:
    """Event files in the run's `tensorboard/`."""

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder / "tensorboard")
        self._writer: Any = None

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Add the numbers; readers drop what an earlier part of the run has logged from the first step on."""
        if self._writer is None:
            writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter
            self._writer = writer(self._folder, purge_step=step)
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write the last ones."""
        if self._writer:
            self._writer.close()


class Server:
    """A run of wandb, or of trackio, which has the same functions and knows a run by its name."""

    def __init__(self, module: str, folder: Path, config: Tree) -> None:
        self._module, self._folder, self._config = module, folder, config
        self._run: Any = None

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Send the numbers."""
        if self._run is None:
            file, name = self._folder / f"{self._module}.id", self._folder.name
            if not file.exists():
                file.write_text(secrets.token_hex(6))
            identity = file.read_text()  # the same after the run has resumed
            own = {"name": name, "id": identity, "dir": str(self._folder)}
            if self._module == "trackio":
                own = {"name": f"{name} {identity}"}
            init = importlib.import_module(self._module).init
            self._run = init(project="twophase", resume="allow", config=self._config, **own)
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Send the last ones."""
        if self._run:
            self._run.finish()


Tracker = TensorBoard | Server


def open_trackers(names: Sequence[str], folder: Path, config: Tree) -> list[Tracker]:
    """Return the trackers of these `NAMES` for a run's folder; each starts with the first line.

    Raises:
        UsageError: an unknown name, or one that is not installed.
    """
    names = [name for name in dict.fromkeys(names) if name != "none"]
    for name in names:
        if name not in NAMES:
            raise UsageError(f"--track: must be of {', '.join(NAMES)}, got {name}")
        if name not in sys.modules and importlib.util.find_spec(name) is None:
            raise UsageError(f"--track {name}: needs a package; pip install 'twophase[{name}]'")
    return [TensorBoard(folder) if name == "tensorboard" else Server(name, folder, config) for name in names]


def send(trackers: list[Tracker], log: str, line: Mapping[str, Any]) -> None:
    """Send the finite numbers of a log's line, as `metrics/train_loss` or `rounds/gain`."""
    flat = {name.replace(".", "/"): value for name, value in flatten(line, f"{log}.").items()}
    numbers = {n: float(v) for n, v in flat.items() if isinstance(v, int | float) and math.isfinite(v)}
    call_each(trackers, "log", numbers, line["step"])


def call_each(trackers: list[Tracker], method: str, *arguments: Any) -> None:
    """Call a method of each tracker; one that fails, as its server may be away, is dropped, and the run goes on."""
    for tracker in trackers.copy():
        try:
            getattr(tracker, method)(*arguments)
        except Exception as error:
            trackers.remove(tracker)
            text = f"{type(tracker).__name__} failed ({error!r}); the run goes on without this tracker"
            warnings.warn(text, RuntimeWarning, stacklevel=4)
