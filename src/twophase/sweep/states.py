"""States at the branches of a forest: in memory or on a GPU while there is room, and on disk."""

from __future__ import annotations

import dataclasses
import os
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from twophase.base.files import TEMPORARY
from twophase.sweep.plan import Node

State = dict[str, Any]
"""Everything that a stretch of inner steps starts from; `torch.load(weights_only=True)` reads it."""
FORMAT = 5


@dataclasses.dataclass(slots=True)
class Tally:
    """What a walk has done.

    Args:
        steps: inner steps executed.
        step_seconds: duration of each; on a GPU, which does them later, the mean of each round.
        in_memory: branch states in main memory now.
        memory_bytes: their size.
        on_device: branch states in a GPU's memory now; on a CPU there are none.
        device_bytes: their size.
        most_held: branch states in either memory at once so far.
        spilled: branch states that were kept on disk only, because of the limit.
        restored: times that a branch state was taken up again, from memory or disk.
    """

    steps: int = 0
    step_seconds: list[float] = dataclasses.field(default_factory=list)
    in_memory: int = 0
    memory_bytes: int = 0
    on_device: int = 0
    device_bytes: int = 0
    most_held: int = 0
    spilled: int = 0
    restored: int = 0

    def count(self, size: int, *, on_device: bool, sign: int) -> None:
        """Count a state of so many bytes that is held from now on (sign 1), or not any more (-1)."""
        if on_device:
            self.on_device += sign
            self.device_bytes += sign * size
        else:
            self.in_memory += sign
            self.memory_bytes += sign * size
        self.most_held = max(self.most_held, self.in_memory + self.on_device)


def free_memory(device: torch.device) -> int:
    """Bytes of a GPU's memory that copies may take; none of a CPU, where states are counted instead.

    What a step has needed beside the parameters at its peak is left to it, and a tenth of the memory, for a longer
    evaluation, another process, or an allocator with free pieces that are too small.
    """
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    peak, allocated = torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
    return free + torch.cuda.memory_reserved(device) - peak - total // 10 if peak > allocated else 0


@dataclasses.dataclass(slots=True)
class Branch:
    """The end of a node with children that are being walked.

    Args:
        node: the node.
        pending: children that have not been reached yet.
        state: the state there, unless it is on disk only.
        size: its bytes.
        on_device: whether it lies in a GPU's memory.
        saved: whether it is on disk, too.
    """

    node: Node
    pending: int
    state: State | None = None
    size: int = 0
    on_device: bool = False
    saved: bool = False


class States:
    """The states of one walk.

    Args:
        folder: folder of the states on disk.
        tally: what counts them.
        in_memory: branch states in main memory at most.
        free: bytes of a device's memory that copies of states may take.
        on_progress: called with a line of text about a state that cannot be read.
    """

    def __init__(
        self,
        folder: Path,
        tally: Tally,
        *,
        in_memory: int,
        free: Callable[[torch.device], int],
        on_progress: Callable[[str], None],
    ) -> None:
        self.folder = folder
        self.tally = tally
        self.in_memory = in_memory
        self.free = free
        self.on_progress = on_progress
        self.branches: list[Branch] = []
        """Those with a state in memory."""

    def hold(self, branch: Branch, state: State, device: torch.device) -> bool:
        """Copy a branch's state into memory; False where that is full, and the state must go to disk."""
        branch.saved = self.path(branch.node, "end").exists()
        size = _size_bytes(state)
        if size <= self.free(device):
            # A round of a small model takes less than a copy of its state through main memory.
            with suppress(torch.OutOfMemoryError):  # in pieces that are too small
                branch.state, branch.on_device = _cloned(state), True
        if branch.state is None:
            if self.tally.in_memory >= self.in_memory:
                self.tally.spilled += 1
                return False
            branch.state = _cloned(state, "cpu")
        branch.size = size
        self.branches.append(branch)
        self.tally.count(size, on_device=branch.on_device, sign=1)
        return True

    def leave(self, branch: Branch, *, here: bool) -> State | None:
        """The state for a branch's next child.

        Args:
            branch: the branch.
            here: whether the replicas stand at the branch.

        Returns:
            None if the replicas stand there, or the state must be read from disk.
        """
        branch.pending -= 1
        state = branch.state
        if state is not None and branch.pending == 0:
            branch.state = None
            self.branches.remove(branch)
            self.tally.count(branch.size, on_device=branch.on_device, sign=-1)
        elif state is not None and not here:
            state = _cloned(state)  # the other children need it, too
        return None if here else state

    def save_branches(self) -> None:
        """Write the states that are in memory only."""
        for branch in self.branches:
            if branch.state is not None and not branch.saved:
                self.write(branch.node, "end", branch.state)
                branch.saved = True

    def path(self, node: Node, what: str) -> Path:
        """The file of a state at a node's end (`end`) or inside the node (`part`)."""
        return self.folder / f"{node.id}.{what}.pt"

    def write(self, node: Node, what: str, state: State) -> None:
        """Write a state, atomically."""
        path = self.path(node, what)
        # A kill leaves the page cache as it is, so no fsync; a torn file after a power cut is read as none at all.
        temporary = path.with_name(f"{TEMPORARY}{path.name}-{os.getpid()}-{secrets.token_hex(4)}")
        try:
            torch.save(state, temporary)
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        if what == "end":
            self.path(node, "part").unlink(missing_ok=True)

    def read(self, node: Node, what: str, runs: Sequence[str]) -> State | None:
        """A saved state that covers the runs, or None."""
        path = self.path(node, what)
        if not path.exists():
            return None
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # whatever is wrong with it, it can be made again
            self.on_progress(f"{path.name} cannot be read ({error}); that part is done again")
            return None
        if state.get("format") != FORMAT or not set(runs) <= set(state["counters"]):
            return None
        return state

    def forget(self, node: Node) -> None:
        """Remove the states of a node below which everything is done."""
        for what in ("end", "part"):
            self.path(node, what).unlink(missing_ok=True)


def _cloned(value: Any, device: str | None = None) -> Any:
    """A copy of a state, on a device or where each tensor lies; plain values and finished lines are shared.

    They never change.
    """
    if isinstance(value, Tensor):
        return value.clone() if device is None else value.to(device, copy=True)
    if isinstance(value, dict):
        return {key: _cloned(item, device) for key, item in value.items()}
    if isinstance(value, list) and value and isinstance(value[0], dict) and "metrics" in value[0]:
        return list(value)
    return [_cloned(item, device) for item in value] if isinstance(value, list) else value


def _size_bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, dict):
        return sum(map(_size_bytes, value.values()))
    return sum(map(_size_bytes, value)) if isinstance(value, list) else 0
