"""What a command needs around a run: a good end on a signal, the processes of torchrun, the claimed folder."""

from __future__ import annotations

import argparse
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from twophase.base.config import RunError, UsageError
from twophase.diloco.comm import ProcessGroup
from twophase.diloco.communicator import Communicator, SingleProcess
from twophase.runs.folder import RunFolder
from twophase.training.config import RunConfig


class Stop(threading.Event):
    """Set by the first SIGINT or SIGTERM; `number` says which."""

    number = 0


@contextmanager
def signals() -> Iterator[Stop]:
    """Let the first SIGINT or SIGTERM ask for a checkpoint and a good end; a second one acts at once."""
    stop = Stop()

    def ask(number: int, _frame: object) -> None:
        stop.number = number
        stop.set()
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def world_size() -> int:
    """Return the number of processes that torchrun has started; 1 without it."""
    text = os.environ.get("WORLD_SIZE", "1")
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(
            f"the environment variable WORLD_SIZE is {text!r}; torchrun sets it to the number of processes: start them "
            "with torchrun, or unset it"
        )
    return int(text)


def take_device(config: RunConfig) -> None:
    """Under torchrun, make the GPU of this process's local rank the one that `cuda` means."""
    if world_size() == 1 or not config.device.startswith("cuda"):
        return
    if config.device != "cuda":
        raise UsageError(
            f"--device {config.device} would be every process's; use --device cuda, which gives each its own"
        )
    rank, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if rank >= count > 0:  # without any, a later check says so
        raise UsageError(
            f"--device cuda: process {rank} of this machine has no GPU, there are {count}; give torchrun "
            f"--nproc-per-node {count}"
        )
    if count:
        torch.cuda.set_device(rank)


@contextmanager
def communication(config: RunConfig, options: argparse.Namespace) -> Iterator[Communicator]:
    """Join the replicas that meet at a lighthouse, or the processes that torchrun started."""
    if options.lighthouse is None:
        with process_group(config, options.start_timeout, options.sync_timeout) as communicator:
            yield communicator
        return
    if world_size() > 1:
        raise UsageError("--lighthouse: here a replica is one process; start each by itself, without torchrun")
    if not 0 <= options.replica < config.replicas:
        raise UsageError(
            f"--replica is {options.replica}; it must be at least 0 and below --replicas, which is {config.replicas}"
        )
    from twophase.elastic.torchft import TorchFT  # noqa: PLC0415 - an extra

    try:
        elastic = TorchFT(
            replica=options.replica,
            replicas=config.replicas,
            lighthouse=options.lighthouse,
            host=options.host or "127.0.0.1",
            timeout=120.0 if options.sync_timeout is None else options.sync_timeout,
            quorum_timeout=3600.0 if options.quorum_timeout is None else options.quorum_timeout,
            start_timeout=options.start_timeout,
            min_replicas=options.min_replicas,
        )
    except (ValueError, ImportError) as error:
        raise UsageError(str(error)) from None
    with elastic:
        yield elastic


@contextmanager
def process_group(config: RunConfig, patience: float = 600.0, timeout: float | None = None) -> Iterator[Communicator]:
    """Join the processes that torchrun started; without it, this one is alone.

    Args:
        config: the run.
        patience: seconds to wait until the first process's address answers.
        timeout: seconds for a collective; None means ten minutes on GPUs and half an hour without.
    """
    if world_size() == 1:
        yield SingleProcess()
        return
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise UsageError(
            f"the environment has WORLD_SIZE={world_size()} but no {', '.join(missing)}; start the processes with "
            "torchrun, which sets them all, or unset WORLD_SIZE"
        )
    if timeout is not None and not 0 < timeout < math.inf:
        raise UsageError(f"--sync-timeout is {timeout}; it must be a positive number of seconds, such as 600")
    on_gpu = config.device.startswith("cuda")
    limit = timeout or (600.0 if on_gpu else dist.default_pg_timeout.total_seconds())
    if on_gpu:
        # Otherwise NCCL's watchdog may notice a dead peer first, and aborts the process: no message, no status 1.
        os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
    where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    try:
        _await_first(patience)
        # Torch would let the first process wait for the others for half an hour; that is for collectives, not for this.
        store, rank, size = next(rendezvous("env://", timeout=timedelta(seconds=patience)))
        store.set_timeout(timedelta(seconds=limit))
        dist.init_process_group(
            "gloo" if config.device == "cpu" else "cpu:gloo,cuda:nccl",
            store=dist.PrefixStore("twophase", store), rank=rank, world_size=size, timeout=timedelta(seconds=limit),
            device_id=torch.device("cuda", torch.cuda.current_device()) if on_gpu else None,  # `take_device` has set it
        )  # fmt: skip
    except (RuntimeError, ValueError) as error:
        raise RunError(
            f"the processes cannot meet at {where} ({str(error).splitlines()[0]}); give torchrun an address that all "
            "machines reach and a free port (--rdzv-endpoint HOST:PORT), and gloo its interface (GLOO_SOCKET_IFNAME)"
        ) from error
    try:
        communicator = ProcessGroup(timeout=limit)
        yield communicator
        communicator.gather(None)  # leave together: a process that goes first takes its connections with it
    except BaseException:
        if on_gpu:
            # Destroying the group waits for NCCL's collectives, and one that a dead peer has not joined never ends.
            with suppress(Exception):
                cast("dist.ProcessGroup", dist.group.WORLD).abort()
        raise
    finally:
        dist.destroy_process_group()


def _await_first(patience: float) -> None:
    """Wait until the address where the processes meet answers; torch would go on for half an hour, with warnings."""
    host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    end = time.monotonic() + patience
    while os.environ["RANK"] != "0" and port.isdecimal():
        try:
            socket.create_connection((host, int(port)), timeout=max(0.1, end - time.monotonic())).close()
            return
        except OSError as error:
            if time.monotonic() >= end:
                raise RuntimeError(f"no answer there for {patience:g} s: {error}") from None
            time.sleep(0.1)


@contextmanager
def claimed(
    out: Path, config: RunConfig, communicator: Communicator, *, accept_logs: bool = False
) -> Iterator[RunFolder]:
    """Claim the run's folder in process 0 on behalf of all; a refusal is raised in every process."""
    if communicator.elastic or communicator.size == 1:
        with RunFolder.claim(out, config, accept_logs=accept_logs) as folder:
            yield folder
        return
    folder, refusal = None, None
    if communicator.rank == 0:
        try:
            folder = RunFolder.claim(out, config, accept_logs=accept_logs)
        except UsageError as error:
            refusal = str(error)
    refusal = communicator.gather(refusal)[0]
    if refusal is not None:
        raise UsageError(refusal)
    try:
        yield folder or RunFolder(out, "", -1, resumed=True)  # the others read checkpoints and write no logs
    finally:
        if folder:
            folder.release()
