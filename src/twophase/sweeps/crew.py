"""The worker processes that a sweep starts on its own machine, replaces when they die, and stops in good order."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from twophase.base.errors import RunError

DEATHS = 5
"""Give up after this many worker deaths per worker with no run finished or failed in between.

A job fails at the third death under it, but several workers spread theirs over still more jobs."""


class Crew:
    """The worker processes that one call of `run_sweep` has started; `devices` are dealt out to them in turn."""

    def __init__(
        self, folder: Path, command: list[str], size: int, environment: Mapping[str, str], devices: Sequence[str]
    ) -> None:
        self.folder, self.command, self.size = folder, [*command, "--leash"], size
        self.environment, self.devices = environment, devices
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self.deaths = 0
        self.progressed = 0

    def start(self) -> None:
        """Start all of them."""
        for number in range(self.size):
            self._start(number)

    def in_trouble(self) -> bool:
        """Return whether a worker has failed, or all have ended."""
        codes = self._codes()
        return all(code is not None for code in codes) or any(codes)

    def replace(self, progressed: int) -> list[str]:
        """Restart dead workers and return the causes; raise RunError after repeated deaths.

        Args:
            progressed: runs that have ended or failed so far.
        """
        if progressed > self.progressed:
            self.deaths, self.progressed = 0, progressed
        causes = []
        codes = self._codes()
        for number, code in enumerate(codes):
            if code is None or (code == 0 and None in codes):
                continue
            # All have ended well, on an empty queue, and yet something is left: let another one look again.
            how = f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"
            cause = f"worker {number} {how}; see {self._log(number).name}"
            self.deaths += 1
            if self.deaths > DEATHS * self.size or (code == 2 and progressed == 0):
                raise RunError(f"{cause}: {self._last_words(number)}")
            causes.append(cause)
            self._unleash(self.processes[number])
            self._start(number)
        return causes

    def finish(self, patience: float = 10.0) -> None:
        """Let them end by themselves, now that nothing is left."""
        deadline = time.monotonic() + patience
        for process in self.processes.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline - time.monotonic(), 0.0))

    def stop(self, grace_seconds: float) -> None:
        """Ask all to end, wait, and end those that do not; safe to repeat."""
        try:
            for process in self.processes.values():
                process.send_signal(signal.SIGTERM)  # nothing, where it has ended
            self.finish(grace_seconds)
        finally:
            for process in self.processes.values():
                process.kill()
                process.wait()
                self._unleash(process)

    def _codes(self) -> list[int | None]:
        return [process.poll() for process in self.processes.values()]

    def _unleash(self, process: subprocess.Popen[bytes]) -> None:
        with suppress(OSError):
            process.stdin.close() if process.stdin else None

    def _start(self, number: int) -> None:
        device = {"CUDA_VISIBLE_DEVICES": self.devices[number % len(self.devices)]} if self.devices else {}
        try:
            with self._log(number).open("ab") as log:
                self.processes[number] = subprocess.Popen(  # noqa: S603 - the command is the caller's own
                    self.command,
                    stdin=subprocess.PIPE,  # its end tells a worker that this process is gone
                    stdout=log,
                    stderr=log,
                    env={**self.environment, **device},
                    # Ctrl-C on the terminal reaches this process only, which then stops the workers in good order.
                    process_group=0,
                )
        except OSError as error:
            raise RunError(f"a worker cannot be run with {' '.join(self.command)!r}: {error}") from error

    def _log(self, number: int) -> Path:
        return self.folder / f"worker-{number}.log"

    def _last_words(self, number: int) -> str:
        lines = self._log(number).read_text(encoding="utf-8", errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "no output")
