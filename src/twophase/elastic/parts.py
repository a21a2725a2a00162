"""Make the parts of torchft that `TorchFT` needs, each bound to one address.

Private names of torchft occur in this room alone; `VERSION` is the release that they belong to.
"""

from __future__ import annotations

import importlib.metadata
import ipaddress
import logging
import math
import os
import socket
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO
from urllib.parse import urlsplit

import torch
from torch.distributed import TCPStore

VERSION = "0.2.0"
"""The release of torchft that has the private names used here."""

ASK_EVERY = 2.0
"""Seconds between two requests to a lighthouse that does not answer."""
_LOOK_EVERY = 0.5
"""Seconds between two checks of the lighthouse's address."""
_ANEW, _ASKS_ANEW = 1.0, 30
"""Seconds between two requests to a restarted lighthouse, and their number. A manager that has lost the lighthouse
retries after pauses that grow to ten seconds."""
_FORMING = 0.75
"""Seconds in which a group must form at the first attempt; doubled after each failure, up to `connect_timeout`."""
_SETTLED = 15.0
"""Seconds after which the heartbeats of all live replicas reach a restarted lighthouse. Their pauses grow to ten
seconds as well. So a live replica may be silent for seconds after its first heartbeat, and count as dead. The
measured silence was up to a third of the outage."""

_log = logging.getLogger("twophase")
_OVERRIDING = """
    TORCHFT_TIMEOUT_SEC TORCHFT_QUORUM_TIMEOUT_SEC TORCHFT_CONNECT_TIMEOUT_SEC TORCHFT_QUORUM_RETRIES
    TORCHFT_USE_BUCKETIZATION TORCHFT_USE_OTEL
""".split()


# --- arguments and environment ----------------------------------------------------------------------------------------


def check_installed() -> None:
    """Refuse another release of torchft than `VERSION`, or a missing one."""
    try:
        version = importlib.metadata.version("torchft")
        import torchft  # noqa: F401, PLC0415 - whether it can be loaded
    except ImportError as error:
        raise ImportError(f"TorchFT: torchft cannot be loaded ({error}); pip install 'twophase[ft]'") from None
    if version != VERSION:
        raise ImportError(f"TorchFT: torchft is {version}, but only {VERSION} is supported; pip install 'twophase[ft]'")


def check_environment() -> None:
    """Refuse variables that would override arguments, and a replica of several processes."""
    names = [name for name in _OVERRIDING if name in os.environ]
    if names:
        raise ValueError(
            f"TorchFT: the environment has {', '.join(names)}, which would override arguments; unset them and pass "
            "arguments instead"
        )
    watchdog = "TORCHFT_WATCHDOG_TIMEOUT_SEC"
    if not os.environ.get(watchdog, "30").isdecimal():  # the import of torchft would fail
        raise ValueError(
            f"TorchFT: the environment's {watchdog} is {os.environ[watchdog]!r}; it must be a whole number of seconds, "
            "or unset"
        )
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise ValueError(
            f"TorchFT: WORLD_SIZE is {os.environ['WORLD_SIZE']}, so a replica would be spread over several processes, "
            "which is not supported yet. Start each replica as its own process, without torchrun"
        )


def lighthouse(url: str) -> tuple[str, tuple[str, int]]:
    """Return a checked URL, and its host and port."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        parts, host, port = urlsplit(""), None, None
    if parts.scheme != "http" or host is None or port is None:
        raise ValueError(f"TorchFT: lighthouse is {url!r}; it must be like http://10.0.0.1:29510")
    return f"http://{f'[{host}]' if ':' in host else host}:{port}", (host, port)


def address_of(host: str, lighthouse_host: str) -> str:
    """Return the IPv4 address of a host, on which other replicas and the lighthouse must reach this one."""
    try:
        address = socket.gethostbyname(host)
    except (OSError, UnicodeError):  # UnicodeError: a label of the name is empty or over 63 characters
        address = ""
    if not host or not address:
        raise ValueError(f"TorchFT: host is {host!r}; it must be this machine's name or IPv4 address")
    if ipaddress.ip_address(address).is_unspecified:
        raise ValueError(
            f"TorchFT: host is {host!r}, which means every network. The training state would be served to all of them "
            "without authentication. Pass this machine's address in a trusted network"
        )
    if ipaddress.ip_address(address).is_loopback and _is_elsewhere(lighthouse_host):
        raise ValueError(
            f"TorchFT: host is {host} and the lighthouse is at {lighthouse_host}, on another machine, which cannot "
            "reach this one under that address. Pass host (twophase train: --host), this machine's address in the "
            "network that the replicas share"
        )
    return address


def _is_elsewhere(host: str) -> bool:
    """Return whether an address or name means another machine; False for an unknown name, which connecting reports."""
    addresses: list[Any] = []
    with suppress(OSError, UnicodeError):
        addresses = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    for family, *_, address in addresses:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            try:
                probe.bind((address[0], 0, *address[2:]))  # an address of this machine alone can be bound
            except OSError:
                return True
    return False


# --- listeners --------------------------------------------------------------------------------------------------------


def store(address: str) -> TCPStore:
    """Make a key-value store that listens on one address; torch's own constructor listens on all."""
    with socket.socket() as listener:
        listener.bind((address, 0))
        listener.listen(128)
        port = listener.getsockname()[1]
        return TCPStore(
            address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach(), use_libuv=True
        )


def group(address: str, timeout: float, connect_timeout: float) -> Any:
    """Make torchft's gloo group: it listens on one address, and has a shorter timeout while it forms than afterwards.

    The lighthouse may list a replica that asked for this quorum and died less than a heartbeat timeout ago. The group
    cannot form then, so the first attempt is short; over a slow link a later one succeeds.
    """
    from torch._C import _distributed_c10d  # noqa: PLC0415 - not on every platform
    from torchft.process_group import ProcessGroupGloo  # noqa: PLC0415 - optional

    Gloo: Any = _distributed_c10d.ProcessGroupGloo  # noqa: N806 - a class

    class Group(ProcessGroupGloo):
        members: Sequence[int] = ()
        forming = _FORMING

        def configure(self, *args: Any, **kwargs: Any) -> None:
            *_, self.members = args  # numbers of the replicas, in order of rank
            self._timeout = timedelta(seconds=min(self.forming, connect_timeout))
            self.forming *= 2
            super().configure(*args, **kwargs)
            self.forming = _FORMING

        def _create_pg(self, store: Any, rank: int, world_size: int) -> Any:
            options = Gloo._Options()
            options._timeout = self._timeout
            options._devices = [Gloo.create_device(hostname=address)]
            backend = Gloo(store, rank, world_size, options)
            backend._set_default_timeout(timedelta(seconds=timeout))
            group = torch.distributed.ProcessGroup(store, rank, world_size)
            group._set_default_backend(torch.distributed.ProcessGroup.BackendType.GLOO)
            for kind in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
                group._register_backend(torch.device(kind), torch.distributed.ProcessGroup.BackendType.GLOO, backend)
            return group

    return Group()


@contextmanager
def _bound_to(module: Any, address: str) -> Iterator[None]:
    """Bind the server of a Manager made in the block to one address; torchft takes a port only."""
    server = module.ManagerServer

    def bound(*, bind: str, **options: Any) -> Any:
        return server(bind=f"{address}:{bind.rpartition(':')[2]}", **options)

    module.ManagerServer = bound
    try:
        yield
    finally:
        module.ManagerServer = server


def listening() -> set[str]:
    """Return the wildcard addresses on which this process listens."""
    sockets = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            sockets.add(str(descriptor.readlink()))
    open_ports = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            address, port = local.split(":")
            if state == "0A" and f"socket:[{rest[5]}]" in sockets and not int(address, 16):
                open_ports.add(f"every address, port {int(port, 16)}")
    return open_ports


# --- the manager ------------------------------------------------------------------------------------------------------


def manager(address: str, store_port: int, **options: Any) -> Any:
    """Make the manager of a replica group of one process, with a blocking quorum and without an initial copy."""
    from torchft import manager as module  # noqa: PLC0415 - optional

    with _bound_to(module, address):
        made: Any = module.Manager(
            use_async_quorum=False,
            init_sync=False,
            rank=0,
            world_size=1,
            store_addr=address,
            store_port=store_port,
            port=0,
            hostname=address,
            **{"min_replica_size": 1, **options},
        )
    made._logger, made._executor, made._client = _Quiet(), _Background(), _Client(made._client)
    return made


class _Client:
    """Replace the manager's client by one that survives a restarted lighthouse, which counts from 1 again.

    Such a lighthouse has heard of the first replica alone, and would start a quorum of one. So this client repeats its
    request for some seconds, until as many replicas are present as before. It does so at the next syncs as well, until
    all heartbeats reach the lighthouse.

    torchft forms a new group only where the number of a quorum changes. One number for two memberships would leave some
    ranks in an old group, and the other ranks would wait until a timeout. So each membership gets its own number.
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        self._number, self._size = -1, 0  # of the last quorum, by the lighthouse's count
        self._unique = 0
        self._unsettled_until = -math.inf
        self.others_heal = False
        """True if others are behind in the last quorum, and this process is not."""
        self.furthest = 0
        """The largest progress number in the last quorum."""
        self.was_away: Callable[[], bool] = lambda: False
        """True if the lighthouse's address was unreachable while this process waited for a quorum."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def _quorum(self, **options: Any) -> Any:
        quorum = self._client._quorum(**options)
        fewer = quorum.replica_world_size < self._size
        if self.was_away() or quorum.quorum_id < self._number or (quorum.quorum_id == self._number and fewer):
            self._unsettled_until = time.monotonic() + _SETTLED
        for _ in range(_ASKS_ANEW if time.monotonic() < self._unsettled_until else 0):
            if quorum.replica_world_size >= self._size:
                break
            time.sleep(_ANEW)
            quorum = self._client._quorum(**options)
        left_out = quorum.max_world_size < quorum.replica_world_size  # a rank that may have an old number
        if left_out or quorum.quorum_id != self._number:
            self._unique = zlib.crc32(f"{quorum.quorum_id} {quorum.max_step} {quorum.replica_ids}".encode())
        self._number, self._size = quorum.quorum_id, quorum.replica_world_size
        self.others_heal = left_out and not quorum.heal
        self.furthest = quorum.max_step
        quorum.quorum_id = self._unique
        return quorum


class _Background:
    """Replace the manager's thread pool by daemon threads, which do not delay the end of the process."""

    def __init__(self) -> None:
        self._future: Future[Any] = Future()

    def submit(self, call: Callable[..., Any], **arguments: Any) -> Future[Any]:
        """Call a function on a new thread."""
        future = self._future = Future()

        def run() -> None:
            try:
                result = call(**arguments)
            except Exception as error:  # the waiting caller raises it
                with suppress(InvalidStateError):
                    future.set_exception(error)
            else:
                with suppress(InvalidStateError):  # its caller has stopped waiting
                    future.set_result(result)

        threading.Thread(target=run, daemon=True, name="twophase quorum").start()
        return future

    def give_up(self) -> None:
        """Release the caller that waits for the last call."""
        with suppress(InvalidStateError):
            self._future.set_exception(TimeoutError("the lighthouse is unreachable"))

    def shutdown(self, wait: bool = True) -> None:
        """Do nothing: daemon threads need no end."""
        del wait


class Watch(threading.Thread):
    """Call `give_up` when an address has been unreachable for `patience` seconds."""

    def __init__(self, address: tuple[str, int], patience: float, give_up: Callable[[], None]) -> None:
        super().__init__(daemon=True, name="twophase lighthouse watch")
        self._address, self._patience, self._give_up = address, patience, give_up
        self.over = threading.Event()
        self.away_for = 0.0
        """Seconds of the outage, once it has called `give_up`."""
        self.missed = False
        """True if the address was unreachable at least once."""

    def run(self) -> None:
        """Connect repeatedly until `over` is set."""
        seen = time.monotonic()
        while not self.over.wait(min(_LOOK_EVERY, self._patience)):
            try:
                socket.create_connection(self._address, timeout=ASK_EVERY).close()
                seen = time.monotonic()
            except OSError:
                self.missed = True
                away = time.monotonic() - seen
                if away >= self._patience and not self.over.is_set():
                    self.away_for = away
                    self._give_up()
                    return


class _Quiet:
    """Replace the manager's logger, which writes whole tracebacks when a process dies."""

    def info(self, msg: str) -> None:
        _log.debug("%s", msg)

    warn = exception = info


class Hush:
    """Filter torchft's log, ten lines a sync, from the process's standard error.

    Compiled code writes it straight to file descriptor 2 and has no switch. Python's own `sys.stderr` bypasses the
    filter, so that the last message of a dying process is not lost.
    """

    def __init__(self) -> None:
        self._stderr = os.dup(2)
        self._python: TextIO = sys.stderr
        self._direct: TextIO | None = None
        with suppress(OSError, ValueError, AttributeError):  # sys.stderr may be missing, or lack a descriptor
            self._python.flush()
            if self._python.fileno() == 2:
                self._direct = open(self._stderr, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
                sys.stderr = self._direct
        read, write = os.pipe()
        os.dup2(write, 2)
        os.close(write)
        self._thread = threading.Thread(target=self._pass_on, args=(read,), daemon=True, name="twophase stderr")
        self._thread.start()

    def _pass_on(self, read: int) -> None:
        with open(read, "rb") as stream, suppress(OSError):
            for line in stream:
                if b"] [torchft::" not in line:
                    os.write(self._stderr, line)

    def close(self) -> None:
        """Restore standard error."""
        os.dup2(self._stderr, 2)
        if self._direct is not None:
            if sys.stderr is self._direct:
                sys.stderr = self._python
            self._direct.close()
        self._thread.join(timeout=1.0)
        if not self._thread.is_alive():  # else a child process still holds the pipe's other end
            os.close(self._stderr)
