"""What can be refused about a run before a folder is made for it."""

from __future__ import annotations

import torch

from twophase.base.config import UsageError
from twophase.diloco.fragment import partition
from twophase.training.config import RunConfig
from twophase.training.device import usable_device
from twophase.training.task import Task


def preflight(config: RunConfig, task: Task, processes: int = 1) -> None:
    """Refuse a run that this machine cannot train.

    Args:
        config: the run, checked.
        task: what is trained.
        processes: number of processes that share its replicas.

    Raises:
        UsageError: replicas that the processes cannot share, an impossible device, data that cannot be used or does
            not last for the run, or fragments that the model cannot be cut into.
    """
    if config.replicas % processes:
        raise UsageError(
            f"--replicas is {config.replicas} and there are {processes} processes; replicas must be a multiple of the "
            f"processes, for example --replicas {processes}"
        )
    check_task = getattr(task, "check", lambda _: None)
    check_task(usable_device(config.device))
    check_fragments(config, task)


def check_fragments(config: RunConfig, task: Task) -> None:
    """Refuse fragments that the model cannot be cut into.

    Raises:
        UsageError: naming the fragments.
    """
    parts = config.sync.parts()
    if parts == 1:
        return
    with torch.device("meta"):  # the names and sizes of its parameters are enough
        model = task.model(config.seed)
    try:
        partition({name: parameter.numel() for name, parameter in model.named_parameters()}, parts)
    except ValueError as error:
        raise UsageError(f"--sync.fragments {' '.join(config.sync.fragments)}: {error}") from None
