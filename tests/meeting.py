"""A communicator of processes that come and go, for tests of one process without a library."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from twophase.diloco.communicator import SingleProcess


class Meeting(SingleProcess):
    """This process and another, which holds the same and counts; at its first syncs this one is given states.

    Args:
        given: the states; None is none.
    """

    elastic, replica = True, 0

    def __init__(self, *donated: Any) -> None:
        self.donated = list(donated)
        self.load: Callable[[Any], None]

    def attach(self, engine: Any, save: Any, load: Any) -> None:
        """Take what takes a state."""
        del engine, save
        self.load = load

    def enter(self, syncs: int, *, run: int = 0) -> None:
        """As far as anyone."""

    def enough(self, count: int, needed: int | None = None) -> bool:
        """Two are enough to begin."""
        return needed is not None or count == 2

    def begin(self) -> bool:
        """Give the next state."""
        state = self.donated.pop(0) if self.donated else None
        if state is not None:
            self.load(state)
        return state is not None

    def exchange(self, numbers: Sequence[float]) -> list[list[float]]:
        """The other says the same, and in a roll call that it counts."""
        return [list(numbers), [*numbers[:2], 1.0, *numbers[3:]] if len(numbers) > 4 else list(numbers)]
