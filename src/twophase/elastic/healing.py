"""Send a replica's state to a late joiner over a TCP connection: tensors and numbers only.

The receiver reads tensors, numbers, text and containers of them by torch's weights-only reader. So a connection to a
wrong or hostile process cannot run code. There is neither authentication nor encryption: use a trusted network.

The donor makes no copy: it sends its live tensors, and changes them only after the transfer. So all replicas wait for a
heal, and a transfer that is too slow ends with `TooSlow` after the first attempt.
"""

from __future__ import annotations

import socket
import socketserver
import threading
import time
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


class TooSlow(ConnectionError):  # noqa: N818 - the cause in two words
    """The transfer rate of a state was too low for the timeout."""


def bytes_of(value: Any, path: str = "state") -> int:
    """Return the bytes of the tensors in a state.

    Raises:
        ValueError: it holds an object other than tensor, number or text, which the receiver would refuse.
    """
    if isinstance(value, Tensor):
        return value.nbytes
    if type(value) in (dict, OrderedDict):
        return sum(bytes_of(key, f"{path}'s key") + bytes_of(item, f"{path}[{key!r}]") for key, item in value.items())
    if type(value) in (list, tuple, torch.Size):
        return sum(bytes_of(item, f"{path}[{index}]") for index, item in enumerate(value))
    if type(value) not in _PLAIN:
        raise ValueError(
            f"TorchFT: {path} is a {type(value).__module__}.{type(value).__qualname__}; a state may hold "
            "tensors, numbers, text, and dictionaries, lists and tuples of them, so turn it into these"
        )
    return 0


class Healing(socketserver.ThreadingTCPServer):
    """Send this replica's state to others and receive theirs; a checkpoint transport in torchft's words.

    Args:
        address: IPv4 address to listen on, and on which others reach it.
        patience: seconds that either side waits for the other.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, address: str, patience: float) -> None:
        super().__init__((address, 0), socketserver.BaseRequestHandler)
        self._patience = patience
        self._changed = threading.Condition()
        self._offer: tuple[int, Mapping[str, Any]] | None = None
        self._open: set[socket.socket] = set()
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def metadata(self) -> str:
        """Return the address on which others reach it."""
        host, port = self.server_address[:2]
        return f"{host}:{port}"

    def send_checkpoint(
        self, dst_ranks: list[int], step: int, state_dict: Mapping[str, Any], timeout: timedelta
    ) -> None:
        """Serve a state to the processes that ask for this step, until `disallow_checkpoint`."""
        del dst_ranks, timeout
        with self._changed:
            self._offer = step, state_dict
            self._changed.notify_all()

    def disallow_checkpoint(self) -> None:
        """Stop serving the state; close open transfers, because the tensors change next."""
        with self._changed:
            self._offer = None
            for connection in self._open:
                with suppress(OSError):  # closed already
                    connection.shutdown(socket.SHUT_RDWR)

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> Mapping[str, Any]:
        """Return the state that another replica serves for this step.

        Raises:
            TooSlow: the rate was too low to complete the transfer before the timeout, or before the donor stopped
                waiting. The message gives the bytes received and the time needed.
            OSError: the donor does not serve such a state, or has died.
        """
        del src_rank
        host, _, port = metadata.rpartition(":")
        seconds = timeout.total_seconds()
        with (
            socket.create_connection((host, int(port)), timeout=seconds) as connection,
            connection.makefile("rb", buffering=1 << 20) as raw,
        ):
            stream = _Exactly(raw, connection, seconds)
            connection.sendall(f"{step}\n".encode())
            if raw.readline(len(_GREETING)) != _GREETING:
                raise ConnectionError(f"{metadata} has no state of step {step} to give")
            size = int(raw.readline(32))
            try:
                state = _streaming_load(cast("Any", stream), map_location="cpu", weights_only=True)
            except OSError as error:
                raise stream.judged(error, size) from None
        return cast("Mapping[str, Any]", state)

    def shutdown(self, wait: bool = True) -> None:
        """Stop listening."""
        del wait
        self.disallow_checkpoint()
        super().shutdown()
        self.server_close()

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Send the state to a reader; `socketserver` calls this on a thread for each."""
        del client_address
        request.settimeout(self._patience)
        with suppress(OSError, ValueError):  # the reader died, was disconnected, or speaks another protocol
            step = int(request.makefile("rb").readline(32))
            with self._changed:  # the reader may connect before `send_checkpoint`
                self._changed.wait_for(lambda: self._offer is not None, self._patience)
                if self._offer is None or self._offer[0] != step:
                    return
                state = self._offer[1]
                self._open.add(request)
            try:
                with request.makefile("wb", buffering=1 << 20) as stream:
                    stream.write(_GREETING + b"%d\n" % bytes_of(state))
                    _streaming_save(state, stream)
            finally:
                with self._changed:
                    self._open.discard(request)


class _Exactly:
    """Read exactly the requested bytes from a stream, and fail after a timeout.

    torch's reader takes a short answer for the whole.
    """

    def __init__(self, stream: Any, connection: socket.socket, seconds: float) -> None:
        self._stream, self._connection, self._seconds = stream, connection, seconds
        self._begin = self._last = time.monotonic()
        self._received = 0

    def read(self, count: int) -> bytearray:
        data = bytearray(count)  # writable, so that a tensor can be laid over it
        view, filled = memoryview(data), 0
        while filled < count:
            remaining = self._begin + self._seconds - time.monotonic()
            if remaining <= 0:
                raise TimeoutError("timed out")
            self._connection.settimeout(remaining)
            received = self._stream.readinto1(view[filled:])  # `readinto` would wait for all of a tensor
            if not received:
                raise ConnectionError(f"the connection ended after {filled} of the next {count} bytes of the state")
            filled += received
            self._received += received
            self._last = time.monotonic()
        return data

    def readline(self) -> bytes:
        return self._stream.readline()

    def judged(self, error: OSError, size: int) -> OSError:
        """Return the error to raise for an incomplete state of `size` bytes.

        A donor that stops waiting closes the connection shortly before or after the reader's own timeout. A donor that
        died closes it at any time; a stalled one, or a lost link, sends nothing more. Then another replica may send the
        state.
        """
        took = time.monotonic() - self._begin
        silent = time.monotonic() - self._last
        needed = took * max(size / max(self._received, 1), 1.0)
        if not isinstance(error, TimeoutError) and (took < self._seconds / 2 or needed <= self._seconds):
            return error
        if silent > took / 2:
            return TimeoutError(f"no more of another replica's state came for {silent:.1f} s")
        return TooSlow(
            f"{self._received / 1e6:.4g} of {size / 1e6:.4g} MB of another replica's state came in {took:.1f} s, then "
            f"its peers stopped waiting (timeout is {self._seconds:g} s). Give every replica a timeout of "
            f"{1.5 * needed:.0f} or more (twophase train: --sync-timeout), or a faster link"
        )
