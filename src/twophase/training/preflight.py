"""Checks of a run before a folder is made for it."""

from __future__ import annotations

import torch
from torch import nn

from twophase.base.config import UsageError
from twophase.diloco.fragment import partition
from twophase.training.config import RunConfig
from twophase.training.device import check_memory, prepare_repeatable, usable_device
from twophase.training.inner import check_inner
from twophase.training.outer import outer_of
from twophase.training.task import Task


def _outline(task: Task, seed: int) -> nn.Module:
    """Return the model, without memory for its weights where its code allows it."""
    try:
        with torch.device("meta"):
            return task.model(seed)
    except Exception:  # code that reads a value, or weights from a file
        return task.model(seed)


def preflight(config: RunConfig, task: Task, processes: int = 1) -> None:
    """Refuse a run that this machine cannot train with so many processes, before a folder is made for it.

    Raises:
        UsageError: replicas that the processes cannot share, an impossible device, unusable or too little data, an
            impossible optimizer, too little memory, or impossible fragments.
    """
    if config.replicas % processes:
        raise UsageError(
            f"--replicas is {config.replicas} and there are {processes} processes; replicas must be a multiple of the "
            f"processes, for example --replicas {processes}"
        )
    prepare_repeatable()  # a task's check may take a matrix product
    device, share = usable_device(config.device), config.replicas // processes
    if check_task := getattr(task, "check", None):
        check_task(device)
    if not config.repeat and (check_data := getattr(task, "check_data", None)):
        check_data(config.steps)
    model = _outline(task, config.seed)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters() if parameter.requires_grad}
    frozen = sum(parameter.nbytes for parameter in model.parameters() if not parameter.requires_grad)
    if make_inner := getattr(task, "inner", None):
        make_inner(task.model(config.seed), config.inner)  # its own code may refuse, or return something else
    else:
        check_inner(model, config.inner)
    # Both AdamWs have two. Others may have fewer, and a run that fits must not be refused.
    moments = 0 if hasattr(task, "inner") or config.inner.method in ("sgd", "muon") else 2
    outer_of(config)  # a user's file may be missing
    rule = config.outer.rule()
    buffers = {"adamw": 2}.get(config.outer.method, 1) if rule is None else int(rule.momentum != 0)
    check_memory(
        f"the weights and optimizers of {share} replicas of {sum(sizes.values()):,} parameters",
        # In float32: weights, gradients and moments of each replica; anchor, pseudo-gradient and the outer buffers.
        4 * ((2 + moments) * share + 2 + buffers) * sum(sizes.values()) + share * frozen,
        device,
        "take a smaller model, fewer --replicas, or more processes by torchrun",
    )
    try:
        partition(sizes, config.sync.parts())
    except ValueError as error:
        raise UsageError(f"--sync.fragments {' '.join(config.sync.fragments)}: {error}") from None
