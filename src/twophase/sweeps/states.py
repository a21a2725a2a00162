"""States at the branches of a forest: on disk, and in memory or on a GPU while there is room.

`States.write` and `States.read` alone know what a file in `forest/` looks like: a sealed file of
`twophase.training.parts`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from twophase.base.reading import check_regular
from twophase.sweeps.plan import Node
from twophase.sweeps.work import state_file
from twophase.training import parts

State = dict[str, Any]
"""Everything that a stretch of inner steps starts from: a tree that `twophase.training.parts` takes."""
FORMAT = 6


@dataclass(slots=True)
class Tally:
    """What a walk has done."""

    steps: int = 0
    step_seconds: list[float] = field(default_factory=list)
    """Duration of each inner step; on a GPU, which does them later, the mean of each round."""
    most_held: int = 0
    """Most branch states in memory at once so far, on a GPU and in main memory."""
    spilled: int = 0
    """Branch states that are on disk only, because of the limit."""
    restored: int = 0
    """Times that a branch state was taken up again, from memory or disk."""


def free_memory(device: torch.device) -> int:
    """Return the bytes of a GPU's memory that copies may take; none of a CPU, where states are counted instead.

    Memory of a step's peak stays free, and a tenth of the whole: for a longer evaluation, another process, or
    fragmentation of the allocator.
    """
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    peak, allocated = torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
    return free + torch.cuda.memory_reserved(device) - peak - total // 10 if peak > allocated else 0


@dataclass(slots=True, eq=False)
class Branch:
    """The end of a node with children that are being walked, and how many of these have not been reached yet."""

    node: Node
    pending: int
    state: State | None = None
    """The state there, unless it is on disk only."""
    on_device: bool = False
    saved: bool = False


class States:
    """The states of one walk: in a folder, and `in_memory` at most in main memory; see `Grower`."""

    def __init__(self, folder: Path, tally: Tally, *, in_memory: int, on_progress: Callable[[str], None]) -> None:
        self.folder = folder
        self.tally = tally
        self.in_memory = in_memory
        self.on_progress = on_progress
        self.branches: list[Branch] = []
        """The branches with a state in memory."""

    def hold(self, branch: Branch, state: State, device: torch.device) -> bool:
        """Copy a branch's state into memory; False where that is full, and the state must go to disk."""
        if 2 * _size_bytes(state) <= free_memory(device):  # `leave` copies it once more
            # A round of a small model takes less than a copy of its state through main memory.
            with suppress(torch.OutOfMemoryError):  # in pieces that are too small
                branch.state, branch.on_device = _cloned(state), True
        if branch.state is None:
            if sum(not other.on_device for other in self.branches) >= self.in_memory:
                self.tally.spilled += 1
                return False
            branch.state = _cloned(state, "cpu")
        branch.saved = self.path(branch.node, "end").exists()
        self.branches.append(branch)
        self.tally.most_held = max(self.tally.most_held, len(self.branches))
        return True

    def leave(self, branch: Branch, *, in_place: bool) -> State | None:
        """Return the state for a branch's next child; None if the replicas are `in_place` or it is read from disk."""
        branch.pending -= 1
        state = branch.state
        if state is not None and branch.pending == 0:
            branch.state = None
            self.branches.remove(branch)
        elif state is not None and not in_place:
            state = _cloned(state)  # the other children need it, too
        return None if in_place else state

    def save_branches(self) -> None:
        """Write the states that are in memory only."""
        for branch in self.branches:
            if branch.state is not None and not branch.saved:
                self.write(branch.node, "end", branch.state)
                branch.saved = True

    def memory_text(self) -> str:
        """Describe the states in memory, for people."""
        on_gpu = sum(branch.on_device for branch in self.branches)
        return f"{len(self.branches) - on_gpu} states in memory and {on_gpu} on the GPU"

    def path(self, node: Node, kind: str) -> Path:
        """Return the file of a state at a node's end (`end`) or inside the node (`part`)."""
        return state_file(self.folder, node.id, kind)

    def write(self, node: Node, kind: str, state: State) -> None:
        """Write a state, atomically and durably."""
        path = self.path(node, kind)
        # The logs of a long run as a tensor: safetensors bounds its header, where the rest of the tree goes.
        lines = torch.frombuffer(bytearray(json.dumps(state["lines"]).encode()), dtype=torch.uint8)
        try:
            parts.save(path, state | {"lines": lines, "file": path.name})
        except OSError as error:
            why = error.strerror or error
            raise OSError(f"a state cannot be written into {self.folder} ({why}); free space there") from error
        if kind == "end":
            self.path(node, "part").unlink(missing_ok=True)

    def read(self, node: Node, kind: str, runs: Sequence[str]) -> State | None:
        """Return a saved state that covers the runs, or None."""
        path = self.path(node, kind)
        if not path.exists():
            return None
        try:
            check_regular(path)
            state = parts.read(path, sealed=True)
            if (state["format"], state["file"]) != (FORMAT, path.name):
                raise ValueError(f"it is {state['file']} in format {state['format']}")
            state["lines"] = json.loads(state["lines"].numpy().tobytes())
        except Exception as error:  # any damage: it can be made again
            self.on_progress(f"{path.name} cannot be used ({error}); that part is done again")
            return None
        return state if set(runs) <= set(state["counters"]) else None

    def forget(self, node: Node) -> None:
        """Remove the states of a node below which everything is done."""
        for kind in ("end", "part"):
            self.path(node, kind).unlink(missing_ok=True)

    def clear(self) -> None:
        """Remove all states."""
        for path in self.folder.glob(f"*{parts.ENDING}"):
            path.unlink(missing_ok=True)


def _cloned(value: Any, device: str | None = None) -> Any:
    """Copy a state, to a device or in place; share plain values and finished lines, which never change."""
    if isinstance(value, Tensor):
        return value.to(device=device, copy=True)
    if isinstance(value, dict):
        return {key: _cloned(item, device) for key, item in value.items()}
    if isinstance(value, list) and value and isinstance(value[0], dict) and "metrics" in value[0]:
        return list(value)
    return [_cloned(item, device) for item in value] if isinstance(value, list) else value


def _size_bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return sum(map(_size_bytes, parts))
