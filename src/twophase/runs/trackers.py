"""Metrics to TensorBoard, trackio or Weights & Biases, besides a run's logs, which stay its record."""

from __future__ import annotations

import importlib.util
import math
import secrets
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from twophase.config import Tree, flatten
from twophase.errors import UsageError

NAMES = ("none", "tensorboard", "trackio", "wandb")


class TensorBoard:
    """Event files in the run's `tensorboard/`."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._writer = str(folder / "tensorboard"), None

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Add the numbers; readers drop what an earlier part of the run has logged from the first step on."""
        module = importlib.import_module("torch.utils.tensorboard")
        self._writer: Any = self._writer or module.SummaryWriter(self._folder, purge_step=step)
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write the last ones."""
        if self._writer:
            self._writer.close()


class Server:
    """A run of wandb, or of trackio, which has the same functions and knows a run by its name."""

    def __init__(self, module: str, folder: Path, title: str, config: Tree) -> None:
        file = folder / f"{module}.id"  # the same after the run has resumed
        if not file.exists():
            file.write_text(secrets.token_hex(6))
        own = {"name": title, "id": file.read_text(), "dir": str(folder)}
        if module == "trackio":
            own = {"name": f"{title} {own['id']}"}
        self._options = {"project": "twophase", "resume": "allow", "config": config, **own}
        self._module, self._run = module, None

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Send the numbers."""
        self._run: Any = self._run or importlib.import_module(self._module).init(**self._options)
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Send the last ones."""
        if self._run:
            self._run.finish()


Tracker = TensorBoard | Server


def check_trackers(names: Sequence[str]) -> list[str]:
    """Return the names of trackers, each once; a UsageError refuses an unknown one, or one that is not installed."""
    names = [name for name in dict.fromkeys(names) if name != "none"]
    for name in names:
        if name not in NAMES:
            raise UsageError(f"--track: must be of {', '.join(NAMES)}, got {name}")
        if name not in sys.modules and importlib.util.find_spec(name) is None:
            raise UsageError(f"--track {name}: needs a package; pip install 'twophase[{name}]'")
    return names


def open_trackers(names: Sequence[str], folder: Path, title: str, config: Tree) -> list[Tracker]:
    """Return the trackers of these `NAMES`, which start with the first line; a UsageError as of `check_trackers`."""
    names = check_trackers(names)
    return [TensorBoard(folder) if name == "tensorboard" else Server(name, folder, title, config) for name in names]


def send(trackers: list[Tracker], log: str, line: Mapping[str, Any]) -> None:
    """Send the finite numbers of a log's line, as `metrics/train_loss` or `rounds/gain`."""
    flat = {name.replace(".", "/"): value for name, value in flatten(line, f"{log}.").items()}
    numbers = {n: float(v) for n, v in flat.items() if isinstance(v, int | float) and math.isfinite(v)}
    _each(trackers, lambda tracker: tracker.log(numbers, line["step"]))


def close(trackers: list[Tracker]) -> None:
    """Close all trackers and empty the list."""
    _each(trackers, lambda tracker: tracker.close())
    trackers.clear()


def _each(trackers: list[Tracker], call: Callable[[Tracker], None]) -> None:
    """Do something with each tracker; one that fails, as its server may be away, is dropped, and the run goes on."""
    for tracker in trackers.copy():
        try:
            call(tracker)
        except Exception as error:
            trackers.remove(tracker)
            text = f"{type(tracker).__name__} failed ({error!r}); the run goes on without this tracker"
            warnings.warn(text, RuntimeWarning, stacklevel=4)
