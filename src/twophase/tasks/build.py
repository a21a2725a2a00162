"""The task of a configuration, and what can be refused about several runs before a folder is made for them."""

from __future__ import annotations

from collections.abc import Iterable

from twophase.tasks.lm.config import TrainConfig, check, text_name
from twophase.tasks.lm.task import LanguageTask
from twophase.training.task import preflight


def build_task(config: TrainConfig) -> LanguageTask:
    """Return the task of a configuration.

    Raises:
        UsageError: an impossible configuration.
    """
    return task_of(check(config))


def task_of(config: TrainConfig) -> LanguageTask:
    """Return the task of a configuration that has been checked; so far there is the language model only."""
    return LanguageTask(config)


def preflight_all(configs: Iterable[TrainConfig]) -> dict[str, str]:
    """Refuse runs that this machine cannot train; each text is read once.

    Args:
        configs: the runs, checked.

    Returns:
        The fingerprint of each text, by `twophase.tasks.lm.config.text_name`.

    Raises:
        UsageError: as `preflight`.
    """
    # Text by text, because each is read once; of several runs on it the longest one takes most tokens.
    ordered = sorted(configs, key=lambda config: (text_name(config), config.steps))
    kinds = {
        (config.data, config.replicas, config.device, config.repeat, config.model, config.sync.fragments): config
        for config in ordered
    }
    fingerprints = {}
    for config in kinds.values():
        task = task_of(config)
        preflight(config, task)
        fingerprints[text_name(config)] = task.describe()["fingerprint"]
    return fingerprints
