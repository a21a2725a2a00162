"""Copies of a state that training goes on to change: quick to take, and read by another thread."""

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
    """Parts as they were at one moment.

    Args:
        parts: from file name to part.
        events: for each CUDA device that holds copies, what has happened when they are complete.
    """

    parts: dict[str, Part]
    events: dict[torch.device, torch.cuda.Event]

    @contextmanager
    def readable(self) -> Iterator[None]:
        """In here, in this thread, the copies are complete, and reading them does not wait for training's work."""
        with ExitStack() as streams:
            for device, event in self.events.items():
                stream = torch.cuda.Stream(device)
                stream.wait_event(event)
                streams.enter_context(torch.cuda.stream(stream))
            yield


class Snapshots:
    """Takes one snapshot after the other into the same memory; the previous one must not be in use any more.

    The memory is kept because new memory costs several times the copying, a page fault a page. On a CUDA device the
    copies stay on the device if that leaves a tenth of it free beyond what training has reserved so far; the caller
    then waits for nothing. Otherwise, and for other devices, they go to main memory while the caller waits.
    """

    def __init__(self) -> None:
        self._copies: dict[_Key, Tensor] = {}

    @torch.no_grad()
    def take(self, trees: Mapping[str, Any]) -> Snapshot:
        """Copy trees of tensors and plain values.

        Args:
            trees: from file name to tree, as for `twophase.training.parts.take_apart`.

        Raises:
            ValueError: something that a checkpoint cannot hold.
        """
        parts = {name: take_apart(tree) for name, tree in trees.items()}
        live = {(part, name): tensor for part, taken in parts.items() for name, tensor in taken.tensors.items()}
        # Keys that are gone go first, so that their memory is there for the new ones.
        self._copies = {key: copied for key, copied in self._copies.items() if key in live and _fits(copied, live[key])}
        self._copies |= _buffers({key: tensor for key, tensor in live.items() if key not in self._copies})
        for key, tensor in live.items():
            self._copies[key].copy_(tensor, non_blocking=tensor.device.type == "cuda")
            parts[key[0]].tensors[key[1]] = self._copies[key]
        devices = {tensor.device for tensor in live.values() if tensor.device.type == "cuda"}
        events = {device: torch.cuda.Event() for device in devices}
        for device, event in events.items():
            event.record(torch.cuda.current_stream(device))
        for device in {live[key].device for key, copied in self._copies.items() if copied.device != live[key].device}:
            if device in events:
                events[device].synchronize()  # else a later step might change what is still being copied
        return Snapshot(parts, events)


def _fits(copied: Tensor, tensor: Tensor) -> bool:
    places = (tensor.device, torch.device("cpu"))
    return copied.shape == tensor.shape and copied.dtype == tensor.dtype and copied.device in places


def _buffers(live: Mapping[_Key, Tensor]) -> dict[_Key, Tensor]:
    """Memory for copies: on the tensors' own devices where there is room, else in main memory."""
    buffers: dict[_Key, Tensor] = {}
    for device in {tensor.device for tensor in live.values()}:
        wanted = {key: tensor for key, tensor in live.items() if tensor.device == device}
        buffers |= _on_device(wanted, device) or _in_main_memory(wanted, pinned=device.type == "cuda")
    return buffers


def _on_device(wanted: Mapping[_Key, Tensor], device: torch.device) -> dict[_Key, Tensor] | None:
    if device.type != "cuda":
        return None
    needed = sum(tensor.numel() * tensor.element_size() for tensor in wanted.values())
    free, total = torch.cuda.mem_get_info(device)
    if free - needed < _RESERVE * total:
        return None
    try:
        return {key: torch.empty(tensor.shape, dtype=tensor.dtype, device=device) for key, tensor in wanted.items()}
    except torch.OutOfMemoryError:
        return None


def _in_main_memory(wanted: Mapping[_Key, Tensor], *, pinned: bool) -> dict[_Key, Tensor]:
    # Pinned memory takes a copy at the full speed of the bus.
    return {key: torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned) for key, tensor in wanted.items()}
