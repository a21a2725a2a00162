"""Two network namespaces of a test's own, joined by a switch in a third: a link to cut and to slow down.

    with joined() as (hub, [here, there]):
        enter(here.file)  # this thread: from now on it reaches `there.address`
        hub.cut(1)

Nothing outside them is touched, and with them everything in them goes.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Place:
    """A namespace, and the address of what lives in it."""

    name: str
    address: str

    @property
    def file(self) -> str:
        """What a process enters it by."""
        return f"/run/netns/{self.name}"


@dataclass(frozen=True)
class Hub:
    """The switch; its ports are numbered as the places are."""

    name: str

    def cut(self, port: int) -> None:
        """Nothing gets through any more, in either direction."""
        _ip("-n", self.name, "link", "set", f"port{port}", "down")

    def mend(self, port: int) -> None:
        """As before."""
        _ip("-n", self.name, "link", "set", f"port{port}", "up")

    def shape(self, port: int, rate: str) -> None:
        """Send no faster than this to a place."""
        words = ["qdisc", "add", "dev", f"port{port}", "root", "tbf", "rate", rate, "burst", "64kb", "latency", "100ms"]
        _call(["tc", "-n", self.name, *words])

    def unshape(self, port: int) -> None:
        """As fast as it goes."""
        _call(["tc", "-n", self.name, "qdisc", "del", "dev", f"port{port}", "root"])


def enter(file: str) -> None:
    """Move this thread, with those that it will start, into a namespace."""
    with Path(file).open() as place:
        assert ctypes.CDLL(None).setns(place.fileno(), 0) == 0, file


class Refused(Exception):  # noqa: N818 - no error: the machine does not want this
    """Namespaces cannot be made here; says why."""


@contextmanager
def joined(places: int = 2) -> Iterator[tuple[Hub, list[Place]]]:
    """Make them, for the time of a `with` block.

    Raises:
        Refused: there are no tools for it, or this user may not.
    """
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise Refused(f"there is no {tool} (iproute2)")
    stem = f"twophase-{os.getpid()}"
    hub = Hub(f"{stem}-hub")
    created = [Place(f"{stem}-{number}", f"10.203.7.{number + 1}") for number in range(places)]
    made: list[str] = []
    try:
        try:
            for name in (hub.name, *(place.name for place in created)):
                _ip("netns", "add", name)
                made.append(name)
                _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", hub.name, "link", "add", "switch", "type", "bridge")
            _ip("-n", hub.name, "link", "set", "switch", "up")
            for number, place in enumerate(created):
                port = ["link", "add", f"port{number}", "type", "veth", "peer", "name", "eth0", "netns", place.name]
                _ip("-n", hub.name, *port)
                _ip("-n", hub.name, "link", "set", f"port{number}", "master", "switch", "up")
                _ip("-n", place.name, "address", "add", f"{place.address}/24", "dev", "eth0")
                _ip("-n", place.name, "link", "set", "eth0", "up")
            hub.shape(0, "50mbit")  # whether the kernel can
            hub.unshape(0)
        except subprocess.CalledProcessError as error:
            raise Refused(f"{' '.join(error.cmd)}: {error.stderr.strip()}") from None
        yield hub, created
    finally:
        for name in reversed(made):
            _ip("netns", "del", name)


def _ip(*words: str) -> None:
    _call(["ip", *words])


def _call(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=30)
