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


class Tracker:
    """A logger of one of `NAMES` for a run's folder, which starts with the first line."""

    def __init__(self, name: str, folder: Path, config: Tree) -> None:
        self.name, self.folder, self.config = name, folder, config
        self._backend: Any = None

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Send the numbers of a step."""
        if self._backend is None:
            self._backend = self._start(step)
        if self.name != "tensorboard":
            self._backend.log(dict(values), step=step)
            return
        for name, value in values.items():
            self._backend.add_scalar(name, value, step)

    def _start(self, step: int) -> Any:
        if self.name == "tensorboard":  # whose readers drop what an earlier part of the run has logged from this step
            writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter
            return writer(str(self.folder / self.name), purge_step=step)
        file, name = self.folder / f"{self.name}.id", self.folder.name
        if not file.exists():
            file.write_text(secrets.token_hex(6))
        identity = file.read_text()  # the same after the run has resumed; trackio knows a run by its name
        own = {"name": f"{name} {identity}"}
        if self.name == "wandb":
            own = {"name": name, "id": identity, "dir": str(self.folder)}
        init = importlib.import_module(self.name).init
        return init(project="twophase", resume="allow", config=self.config, **own)

    def close(self) -> None:
        """Send the last ones."""
        if self._backend is not None:
            self._backend.close() if self.name == "tensorboard" else self._backend.finish()


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
    return [Tracker(name, folder, config) for name in names]


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
            text = f"--track {tracker.name} failed ({error!r}); the run goes on without this tracker"
            warnings.warn(text, RuntimeWarning, stacklevel=4)
