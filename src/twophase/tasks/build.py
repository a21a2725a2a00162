"""The task of a configuration, and what can be refused about several runs before a folder is made for them."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from twophase.base.config import fingerprint, to_tree
from twophase.tasks.lm.config import TrainConfig
from twophase.tasks.lm.task import LanguageTask
from twophase.tasks.named import instance_of
from twophase.tasks.own import OwnTask
from twophase.training.config import RunConfig
from twophase.training.outer import outer_of
from twophase.training.preflight import preflight
from twophase.training.task import Task


def task_of(config: RunConfig) -> Task:
    """Return the task of a configuration that has been checked."""
    if isinstance(config, TrainConfig):
        return LanguageTask(config)
    options: Any = config.task  # type: ignore[attr-defined]
    return _task_of_options(options, config.replicas)


@lru_cache(maxsize=2)  # a sweep's worker trains many runs on the same data
def _task_of_options(options: Any, replicas: int) -> OwnTask:
    return OwnTask(instance_of(options, replicas), options)


def data_name(config: Any) -> str:
    """Return a name for what a run trains on, equal for runs that share it."""
    part = "data" if isinstance(config, TrainConfig) else "task"
    return fingerprint({part: to_tree(getattr(config, part)), "replicas": config.replicas})


def preflight_all(configs: Iterable[RunConfig], *, verify: bool = False) -> dict[str, str]:
    """Refuse runs that this machine cannot train; each text is read once.

    Args:
        configs: the runs, checked.
        verify: True to read all of each text first, and compare it with its checksums.

    Returns:
        The fingerprint of what each trains on, by `data_name`.

    Raises:
        UsageError: as `preflight`.
    """
    # Text by text, because each is read once; of several runs on it the longest one takes most tokens.
    ordered = sorted(configs, key=lambda config: (data_name(config), config.steps))
    kinds: dict[Any, RunConfig] = {}
    for c in ordered:
        model = getattr(c, "model", None)
        kinds[data_name(c), c.device, c.repeat, model, c.sync.fragments, c.sync.compression, c.inner.method] = c
    for c in {c.outer.method: c for c in ordered}.values():
        outer_of(c)  # a user's file may be missing
    fingerprints = {}
    for config in kinds.values():
        task = task_of(config)
        if verify and data_name(config) not in fingerprints and (verify_data := getattr(task, "verify_data", None)):
            verify_data()
        preflight(config, task)
        fingerprints[data_name(config)] = task.describe()["fingerprint"]
    return fingerprints
