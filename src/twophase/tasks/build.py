"""The task of a configuration, and what can be refused about several runs before a folder is made for them."""

from __future__ import annotations

from collections.abc import Iterable

from twophase.tasks.lm.config import TrainConfig, check, text_name
from twophase.tasks.lm.task import LanguageTask
from twophase.training.task import check_fragments, preflight


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
    # Of several runs on the same text, the longest one takes most tokens.
    longest = sorted(configs, key=lambda config: config.steps)
    by_text = {
        (config.data, config.replicas, config.device, config.model.vocabulary_size, config.repeat): config
        for config in longest
    }
    by_parts = {(config.model, config.sync.fragments): config for config in longest}
    fingerprints = {}
    for config in by_text.values():
        task = task_of(config)
        preflight(config, task)
        fingerprints[text_name(config)] = task.describe()["fingerprint"]
    for config in by_parts.values():
        check_fragments(config, task_of(config))
    return fingerprints
