"""State transfer to a late joiner: complete or an error, within the timeout, without unpickling."""

from __future__ import annotations

import io
import os
import pickle
import re
import socket
import threading
from collections import namedtuple
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from elastic import PATIENCE
from twophase.elastic import healing
from twophase.elastic.healing import _GREETING, Healing, TooSlow, bytes_of


@pytest.fixture
def giver() -> Iterator[Healing]:
    """What gives states away, on loopback."""
    server = Healing("127.0.0.1", 5.0)
    yield server
    server.shutdown()


def fetch(healing: Healing, step: int = 7, address: str | None = None) -> Any:
    return healing.recv_checkpoint(0, address or healing.metadata(), step, timedelta(seconds=5))


def test_a_state_arrives_as_it_is(giver: Healing):
    """Tensors of all kinds, shared and empty ones, and nested numbers arrive; also when asked for too early."""
    shared = torch.randn(5000)
    state = {
        "tensors": [torch.arange(3), torch.empty(0), torch.randn(3, 1).bfloat16(), shared[:10], shared],
        "numbers": {"a": (1, 2.5, None, True), 3: "text", "type": torch.float16},
    }
    threading.Timer(0.2, lambda: giver.send_checkpoint([1], 7, state, timedelta(seconds=5))).start()
    received = fetch(giver)
    assert received["numbers"] == state["numbers"]
    for actual, sent in zip(received["tensors"], state["tensors"], strict=True):
        assert actual.dtype == sent.dtype
        assert torch.equal(actual, sent)
    assert received["tensors"][3].untyped_storage().data_ptr() == received["tensors"][4].untyped_storage().data_ptr()
    received["tensors"][4].zero_()  # it is the receiver's own
    assert bytes_of(state) == 24 + 6 + 40 + 20000
    with pytest.raises(ConnectionError, match="no state of step 8"):
        fetch(giver, 8)


@pytest.mark.parametrize("value", [np.float64(1), namedtuple("Pair", "a b")(1, 2), {1, 2}, object()])
def test_what_a_receiver_would_refuse_is_refused_at_the_giver(value: object):
    """Only what torch reads without running code may be sent; sizes are such tuples, named tuples are not."""
    assert bytes_of({"size": torch.Size([2]), "pair": (1, "b")}) == 0
    with pytest.raises(ValueError, match=r"TorchFT: state\['x'\]\[0\] is a .* turn it into these"):
        bytes_of({"x": [value]})


def test_a_slow_reader_is_cut_off(giver: Healing):
    """When the giver goes on, a half-read state is an error, not a torn state."""
    giver.send_checkpoint([1], 7, {"x": torch.zeros(20_000_000)}, timedelta(seconds=5))
    host, _, port = giver.metadata().rpartition(":")
    with socket.create_connection((host, int(port)), timeout=5) as connection:
        connection.sendall(b"7\n")
        got = connection.recv(1000)
        giver.disallow_checkpoint()
        while more := connection.recv(1 << 20):
            got += more
    assert got.startswith(_GREETING)
    assert len(got) < 80_000_000
    address = impostor(got)
    with pytest.raises(ConnectionError, match="connection ended"):
        fetch(giver, 7, address)


@pytest.mark.slow
@pytest.mark.parametrize("silent", [False, True])
def test_a_slow_and_a_silent_giver(giver: Healing, monkeypatch: pytest.MonkeyPatch, silent: bool):
    """A steady stream inside one tensor ends with the time, and all that came counts; a silent giver is not slow."""
    whole, over = healing._streaming_save, threading.Event()

    def by_pieces(state: Any, stream: Any) -> None:
        data = io.BytesIO()
        whole(state, data)
        for start in range(0, data.tell(), 100_000):
            stream.write(data.getvalue()[start : start + 100_000])
            stream.flush()
            over.wait(PATIENCE if silent else 0.1)

    monkeypatch.setattr(healing, "_streaming_save", by_pieces)
    giver.send_checkpoint([1], 7, {"x": torch.zeros(1_000_000)}, timedelta(seconds=5))
    with pytest.raises(OSError, match="of another replica's state") as caught:
        giver.recv_checkpoint(0, giver.metadata(), 7, timedelta(seconds=0.8))
    over.set()
    assert isinstance(caught.value, TooSlow) != silent, caught.value
    if silent:
        assert re.fullmatch(r"no more of another replica's state came for \d\.\d s", str(caught.value))
    else:
        received = re.match(r"(\S+) of 4 MB of another replica's state came in \d\.\d s", str(caught.value))
        assert received
        assert 0.1 < float(received[1]) < 3.0  # and not the little that came before the tensor


class Code:
    """What runs a command when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.path}",)


def impostor(answer: bytes) -> str:
    """The address of a server that gives this answer to one caller."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with listener, listener.accept()[0] as connection:
            connection.recv(100)
            connection.sendall(answer)

    threading.Thread(target=serve, daemon=True).start()
    return f"127.0.0.1:{listener.getsockname()[1]}"


def test_code_is_refused(giver: Healing, tmp_path: Path):
    """A pickle that would run a command, as the state or in its table of contents, is refused and does not run it."""
    proof = tmp_path / "proof"
    stream = io.BytesIO()
    healing._streaming_save({"x": Code(proof)}, stream)
    for answer in (stream.getvalue(), pickle.dumps([Code(proof)], protocol=2)):
        with pytest.raises(pickle.UnpicklingError, match=r"(?i)unsupported|weights"):
            fetch(giver, 7, impostor(_GREETING + b"1\n" + answer))
        assert not proof.exists()
    stream.seek(0)
    healing._streaming_load(stream, weights_only=False)
    assert proof.exists(), "so it would have run"
