"""The way on which a replica that comes late is given another's state: one TCP connection, tensors and numbers only.

The receiver builds nothing but tensors, numbers, text and containers of them from what it reads
(`torch.load(weights_only=True)`'s reader), so that a connection to a wrong or hostile process cannot run code. There is
neither authentication nor encryption: it is for a trusted network.

The giver copies nothing: it sends its live tensors, which it does not change before all have what they need.
"""

from __future__ import annotations

import socket
import socketserver
import threading
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed._serialization import _streaming_load, _streaming_save

_PLAIN = (int, float, bool, str, bytes, type(None), torch.dtype, torch.device)
_GREETING = b"twophase state\n"


def bytes_of(value: Any, path: str = "state") -> int:
    """Bytes of the tensors in a state.

    Raises:
        ValueError: something in it is neither tensor, number nor text, and would be refused by the receiver.
    """
    if isinstance(value, Tensor):
        return value.nbytes
    if type(value) in (dict, OrderedDict):
        return sum(bytes_of(key, f"{path}'s key") + bytes_of(item, f"{path}[{key!r}]") for key, item in value.items())
    if isinstance(value, list | tuple):
        return sum(bytes_of(item, f"{path}[{index}]") for index, item in enumerate(value))
    if type(value) not in _PLAIN:
        raise ValueError(
            f"TorchFT.attach: {path} is a {type(value).__module__}.{type(value).__qualname__}; a state may hold "
            "tensors, numbers, text, and dictionaries, lists and tuples of them, so turn it into these"
        )
    return 0


class Healing:
    """Gives this replica's state to others, and takes theirs; what torchft calls a checkpoint transport.

    Args:
        address: the IPv4 address to listen on, and on which others reach it.
        timeout: seconds that either side waits for the other.
    """

    def __init__(self, address: str, timeout: float) -> None:
        self._timeout = timeout
        self._changed = threading.Condition()
        self._offer: tuple[int, Mapping[str, Any]] | None = None
        self._open: set[socket.socket] = set()
        self._server = _Server((address, 0), _handler(self, timeout))
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def metadata(self) -> str:
        """Where others find it."""
        host, port = self._server.server_address[:2]
        return f"{host}:{port}"

    def send_checkpoint(
        self, dst_ranks: list[int], step: int, state_dict: Mapping[str, Any], timeout: timedelta
    ) -> None:
        """Offer a state to whoever asks for this step, until `disallow_checkpoint`."""
        del dst_ranks, timeout
        with self._changed:
            self._offer = step, state_dict
            self._changed.notify_all()

    def disallow_checkpoint(self) -> None:
        """Offer nothing any longer. Who still reads is cut off: what it would get may change from now on."""
        with self._changed:
            self._offer = None
            for connection in self._open:
                _shut(connection)

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> Mapping[str, Any]:
        """The state that another offers for this step."""
        del src_rank
        host, _, port = metadata.rpartition(":")
        with (
            socket.create_connection((host, int(port)), timeout=timeout.total_seconds()) as connection,
            connection.makefile("rb", buffering=1 << 20) as stream,
        ):
            connection.sendall(f"{step}\n".encode())
            if stream.readline(len(_GREETING)) != _GREETING:
                raise ConnectionError(f"{metadata} has no state of step {step} to give")
            state = _streaming_load(cast("Any", _Exactly(stream)), map_location="cpu", weights_only=True)
        return cast("Mapping[str, Any]", state)

    def shutdown(self, wait: bool = True) -> None:
        """Stop listening."""
        del wait
        self.disallow_checkpoint()
        self._server.shutdown()
        self._server.server_close()

    def _serve(self, connection: socket.socket, stream: Any) -> None:
        step = int(connection.makefile("rb").readline(32))
        with self._changed:  # the other may be quicker than our own offer
            if not self._changed.wait_for(lambda: self._offer is not None, self._timeout):
                return
            assert self._offer is not None
            offered, state = self._offer
            if offered != step:
                return
            self._open.add(connection)
        try:
            stream.write(_GREETING)
            _streaming_save(state, stream)
        except OSError:
            pass  # the other has gone, or was cut off
        finally:
            with self._changed:
                self._open.discard(connection)


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128


def _handler(healing: Healing, seconds: float) -> type[socketserver.BaseRequestHandler]:
    class Handler(socketserver.StreamRequestHandler):
        timeout = seconds
        wbufsize = 1 << 20

        def handle(self) -> None:
            with suppress(OSError, ValueError):  # nobody who speaks our language
                healing._serve(self.connection, self.wfile)

        def finish(self) -> None:
            with suppress(OSError):
                super().finish()

    return Handler


class _Exactly:
    """A stream that never returns less than what was asked for: torch's reader takes a short answer for the whole."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def read(self, count: int) -> bytearray:
        data = bytearray(count)  # writable, so that a tensor can be laid over it
        view, filled = memoryview(data), 0
        while filled < count:
            got = self._stream.readinto(view[filled:])
            if not got:
                raise ConnectionError(f"the connection ended after {filled} of the next {count} bytes of the state")
            filled += got
        return data

    def readline(self) -> bytes:
        return self._stream.readline()


def _shut(connection: socket.socket) -> None:
    with suppress(OSError):  # it is closed already
        connection.shutdown(socket.SHUT_RDWR)
