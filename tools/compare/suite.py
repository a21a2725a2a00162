"""What the cases share: their table, digests of tensors, and processes over gloo."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import tempfile
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

HOME = Path(__file__).parents[2] / ".compare"
"""Where `setup` has put the old side, and a text."""
LONGEST = 900
"""Seconds after which a case is ended; far more than any takes but on a busy machine."""
CASES: dict[str, Callable[[Any], Any]] = {}
"""Cases by name. Each takes an adapter (`api_old`, `api_new`) and returns numbers, texts, lists and dicts of them."""


class GoneError(Exception):
    """What a case needs is not there any more; raised by an adapter, with the reason."""


@dataclass(frozen=True)
class Outer:
    """An outer optimizer in words that neither side uses; the adapters translate it.

    Args:
        method: averaging, heavy-ball, nesterov, adamw, muon, or auto (the policy that brings its own rule).
        filter: "none", "orthogonal" or "clip:NORM".
        schedule: "constant", "linear:FINAL" or "momentum:START", over `rounds`.
    """

    method: str
    lr: float = 0.7
    momentum: float = 0.9
    form: Literal["sum", "ema"] = "sum"
    filter: str = "none"
    schedule: str = "constant"
    rounds: int = 0


def case(name: str, run: Callable[[Any], Any]) -> None:
    """Add a case to the table."""
    assert name not in CASES, name
    CASES[name] = run


def digest(tensor: Tensor) -> str:
    """Return digits of every bit of a tensor, its type and its shape; of a sharded one, of this rank's part."""
    local: Tensor = getattr(tensor, "to_local", lambda: tensor)()
    local = local.detach().cpu().contiguous()
    data = local.view(torch.uint8).numpy().tobytes() if local.dim() else local.reshape(1).view(torch.uint8).numpy()
    return hashlib.sha256(f"{local.dtype} {list(local.shape)} ".encode() + bytes(data)).hexdigest()[:12]


def digests(tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """Return the digest of each tensor by name."""
    return {name: digest(tensor) for name, tensor in dict(tensors).items()}


def in_group(size: int, work: Callable[[int], Any], *, join: bool = True) -> list[Any]:
    """Fork `size` ranks that meet over gloo; return what `work(rank)` gives in each.

    Args:
        size: number of ranks.
        work: what each does; its result must fit into JSON.
        join: False leaves it to `work` to join the group, by the variables that torchrun sets.

    Raises:
        RuntimeError: with the last line of the traceback of the first rank that failed.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    each = partial(_joined, work) if join else work
    with tempfile.TemporaryDirectory() as folder:
        children = [_fork(rank, size, Path(folder), port, each) for rank in range(size)]
        for child in children:
            os.waitpid(child, 0)
        results = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(size)]
    for result in results:
        if "error" in result:
            raise RuntimeError(result["error"])
    return [result["result"] for result in results]


def _fork(rank: int, size: int, folder: Path, port: int, work: Callable[[int], Any]) -> int:
    if child := os.fork():
        return child
    signal.alarm(LONGEST)
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in places.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", GLOO_SOCKET_IFNAME="lo")
    path = folder / f"{rank}.json"
    path.write_text(json.dumps({"error": f"rank {rank} ended early"}))
    try:
        path.write_text(json.dumps({"result": work(rank)}))
    except BaseException as error:
        path.write_text(json.dumps({"error": f"rank {rank}: {last_line(error)}"}))
    finally:
        os._exit(0)


def _joined(work: Callable[[int], Any], rank: int) -> Any:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    result = work(rank)
    dist.barrier()
    return result


def last_line(error: BaseException) -> str:
    """Return the last line of an error's traceback and where it was raised."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''} ({frame.name}:{frame.lineno})"


def grid(**axes: Sequence[Any]) -> list[dict[str, Any]]:
    """Return every combination of some values by name."""
    combinations: list[dict[str, Any]] = [{}]
    for name, values in axes.items():
        combinations = [{**known, name: value} for known in combinations for value in values]
    return combinations
