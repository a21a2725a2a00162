"""Copies of a state that training changes next: quick to take, and read by another thread."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from twophase.training.parts import Part, take_apart

_Key = tuple[str, str]
"""Name of a part, and of a tensor in it."""
_RESERVE = 0.1
"""Share of a device's memory that copies leave free."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Parts by file name at one moment; a device's event is complete when its copies are."""

    parts: dict[str, Part]
    events: dict[torch.device, torch.cuda.Event]

    @contextmanager
    def readable(self) -> Iterator[None]:
        """Let this thread read complete copies without waiting for training's work."""
        with ExitStack() as streams:
            for device, event in self.events.items():
                stream = torch.cuda.Stream(device)
                stream.wait_event(event)
                streams.enter_context(torch.cuda.stream(stream))
            yield


class Snapshots:
    """Takes one snapshot after the other into the same memory; the previous one must be out of use.

    The memory is reused because new memory costs several times the copying, a page fault a page. On a CUDA device the
    copies stay on the device if a tenth of its memory is then still free beyond training's reserved memory. The caller
    does not wait then. Otherwise, and for other devices, they go to main memory while the caller waits.
    """

    def __init__(self) -> None:
        self._copies: dict[_Key, Tensor] = {}

    @torch.no_grad()
    def take(self, trees: Mapping[str, Any]) -> Snapshot:
        """Copy trees, by file name, that `twophase.training.parts.take_apart` accepts."""
        parts = {name: take_apart(tree) for name, tree in trees.items()}
        live = {(part, name): tensor for part, taken in parts.items() for name, tensor in taken.tensors.items()}
        # Old keys go first, so that their memory is free for the new ones.
        self._copies = {key: copy for key, copy in self._copies.items() if key in live and _fits(copy, live[key])}
        self._copies |= _buffers({key: tensor for key, tensor in live.items() if key not in self._copies})
        for key, tensor in live.items():
            self._copies[key].copy_(tensor, non_blocking=tensor.device.type == "cuda")
            parts[key[0]].tensors[key[1]] = self._copies[key]
        devices = {tensor.device for tensor in live.values() if tensor.device.type == "cuda"}
        events = {device: torch.cuda.Event() for device in devices}
        for device, event in events.items():
            event.record(torch.cuda.current_stream(device))
            if any(tensor.device == device != self._copies[key].device for key, tensor in live.items()):
                event.synchronize()  # else a later step might change a tensor during its copy
        return Snapshot(parts, events)


def _fits(copy: Tensor, tensor: Tensor) -> bool:
    devices = (tensor.device, torch.device("cpu"))
    return copy.shape == tensor.shape and copy.dtype == tensor.dtype and copy.device in devices


def _buffers(live: Mapping[_Key, Tensor]) -> dict[_Key, Tensor]:
    """Allocate memory for copies: on the tensors' own devices where there is room, else in main memory."""
    buffers: dict[_Key, Tensor] = {}
    for device in {tensor.device for tensor in live.values()}:
        tensors = {key: tensor for key, tensor in live.items() if tensor.device == device}
        choices: list[dict[str, Any]] = [{}]
        if device.type == "cuda":
            choices = [{"pin_memory": True}]  # pinned copies have the bus's full speed
            free, total = torch.cuda.mem_get_info(device)
            if free - sum(tensor.nbytes for tensor in tensors.values()) >= _RESERVE * total:
                choices.insert(0, {"device": device})
        for options in choices:
            try:
                buffers |= {
                    key: torch.empty(tensor.shape, dtype=tensor.dtype, **options) for key, tensor in tensors.items()
                }
                break
            except torch.OutOfMemoryError:  # free memory may be in pieces, or under a limit of this process
                if options is choices[-1]:
                    raise
    return buffers
