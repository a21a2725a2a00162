"""Surroundings of a command's run: a clean end on a signal, the processes of torchrun, the claimed folder."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from twophase.base.errors import RunError, UsageError, first_line, message_of
from twophase.diloco.group import ProcessGroup, SingleProcess
from twophase.runs.folder import RunFolder
from twophase.training.config import RunConfig


class Stop(threading.Event):
    """The event of the first SIGINT or SIGTERM, whose number is `number`."""

    number = 0


@contextmanager
def signals() -> Iterator[Stop]:
    """Let the first SIGINT or SIGTERM ask for a checkpoint and a clean end; a second signal acts at once.

    Outside the main thread, signals cannot be handled.
    """
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def ask(number: int, _frame: object) -> None:
        stop.number = number
        stop.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def world_size() -> int:
    """Return the number of processes that torchrun has started; 1 without torchrun."""
    text = os.environ.get("WORLD_SIZE", "1")
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(
            f"the environment variable WORLD_SIZE is {text!r}; torchrun sets it to the number of processes: start them "
            "with torchrun, or unset it"
        )
    return int(text)


def take_device(config: RunConfig) -> None:
    """Set `cuda` to the GPU of this process's local rank, under torchrun."""
    if world_size() == 1 or not config.device.startswith("cuda"):
        return
    if config.device != "cuda":
        raise UsageError(
            f"--device {config.device} would be every process's; use --device cuda, which gives each its own"
        )
    rank, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if rank >= count > 0:  # without GPUs, a later check refuses
        raise UsageError(
            f"--device cuda: process {rank} of this machine has no GPU, there are {count}; give torchrun "
            f"--nproc-per-node {count}"
        )
    if count:
        torch.cuda.set_device(rank)


@contextmanager
def process_group(config: RunConfig, patience: float = 600.0, timeout: float | None = None) -> Iterator[SingleProcess]:
    """Join the processes that torchrun started; without torchrun, this process is alone.

    Args:
        config: the run.
        patience: seconds until all processes have joined, are connected, and have answered once.
        timeout: seconds for a later collective; None means ten minutes on GPUs and half an hour without.
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
    on_gpu = config.device.startswith("cuda")
    limit = timeout or (600.0 if on_gpu else dist.default_pg_timeout.total_seconds())
    if on_gpu:
        # Otherwise NCCL's watchdog may notice a dead peer first, and aborts the process: no message, no status 1.
        os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else None  # `take_device` has set it
    where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"

    def form() -> ProcessGroup:
        _await_first(patience)
        rank, size, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun serves the store
        store = dist.TCPStore(
            os.environ["MASTER_ADDR"], port, is_master=rank == 0 and not agent, timeout=timedelta(seconds=patience),
            wait_for_workers=False,
        )  # fmt: skip
        dist.init_process_group(
            "gloo" if config.device == "cpu" else "cpu:gloo,cuda:nccl",
            store=dist.PrefixStore(_meeting(store, rank, size, patience), store), rank=rank, world_size=size,
            timeout=timedelta(seconds=patience), device_id=device,
        )  # fmt: skip
        group = ProcessGroup(timeout=patience)
        group.gather_json(0)  # detects now, and not after `limit`, a peer that has died or hangs since it joined
        group.timeout = limit
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=limit))
        return group

    try:
        communicator = _within(patience + 1, form)  # most limits inside end with a better reason
    except (RuntimeError, ValueError) as error:
        reason = first_line(error.__cause__ or error)
        raise RunError(
            f"the processes cannot meet at {where} ({reason}). Give torchrun an address that all machines reach and a "
            "free port (--master-addr, --master-port), and gloo its interface (GLOO_SOCKET_IFNAME)"
        ) from error
    try:
        yield communicator
        communicator.gather_json(0)  # leave together: a process that ends first closes its connections
    except BaseException:
        if on_gpu:
            # Destroying the group waits for NCCL's collectives, and a collective without a dead peer never ends.
            with suppress(Exception):
                cast("dist.ProcessGroup", dist.group.WORLD).abort()
        raise
    finally:
        dist.destroy_process_group()


def _within(seconds: float, call: Callable[[], ProcessGroup]) -> ProcessGroup:
    """Return a call's result in time: torch's store waits in C code, for ever if its host hangs."""
    future: Future[ProcessGroup] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # of any type: it belongs to the waiting caller
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name="twophase meeting").start()
    try:
        return future.result(seconds)
    except TimeoutError:
        raise RuntimeError(f"no answer for {seconds:g} s") from None


def _await_first(patience: float) -> None:
    """Wait until the meeting address answers; torch would retry for half an hour, with warnings."""
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


def _meeting(store: dist.Store, rank: int, size: int, patience: float) -> str:
    """Return a prefix of the store's keys that only the processes of this start share.

    Processes that torchrun has restarted meet in a store that still holds the addresses of the last ones. So the first
    process names the meeting, and each other process continues only when its own new name is in the first one's list.
    """
    key, end = uuid.uuid4().hex, time.monotonic() + patience
    if rank == 0:
        store.set("twophase", key)
        for other in range(1, size):
            try:
                store.wait([f"{key}/{other}"], timedelta(seconds=max(0.01, end - time.monotonic())))
            except dist.DistStoreError:
                raise RuntimeError(f"process {other} has not come in {patience:g} s") from None
        store.set(f"{key}/all", " ".join(store.get(f"{key}/{other}").decode() for other in range(1, size)))
        return key
    while time.monotonic() < end:
        if store.check(["twophase"]):
            meeting = store.get("twophase").decode()
            store.set(f"{meeting}/{rank}", key)
            if store.check([f"{meeting}/all"]) and key.encode() in store.get(f"{meeting}/all"):
                return meeting
        time.sleep(0.05)
    raise RuntimeError(f"a process has not come in {patience:g} s")


@contextmanager
def claimed(out: Path, config: Any, communicator: SingleProcess, *, accept_logs: bool = False) -> Iterator[RunFolder]:
    """Claim the run's folder in process 0 on behalf of all; a refusal is raised in every process."""
    folder = RunFolder(out, "", None)
    with in_agreement(communicator):
        if communicator.rank == 0:  # other processes read checkpoints and write no logs
            folder = RunFolder.claim(out, config, accept_logs=accept_logs)
    with folder:
        yield folder


@contextmanager
def in_agreement(group: SingleProcess) -> Iterator[None]:
    """Raise the error of the first rank in which the block fails on all ranks, which would wait for it otherwise.

    All ranks enter; the block itself exchanges nothing.

    Raises:
        UsageError: another rank has raised it.
        RunError: another rank has raised another error.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:  # of any type: no rank may wait for this one
        failure = error
    failed = [] if failure is None else [isinstance(failure, UsageError), message_of(failure)]
    for rank, row in enumerate(group.gather_json(failed)):
        if row and failure is not None and rank == group.rank:
            raise failure
        if row:
            raise (UsageError if row[0] else RunError)(row[1]) from failure
