"""What a peer sends is read as JSON of an expected type, and nothing else: no byte of it is unpickled or run.

Run as a program, this file is one of the two processes of its own test.
"""

from __future__ import annotations

import json
import os
import pickle
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from forked import in_processes
from twophase.base.errors import RunError
from twophase.diloco.comm import ProcessGroup
from twophase.diloco.communicator import SingleProcess


class Bomb:
    """What makes a folder when it is unpickled."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.proof),)


def hostile(proof: Path) -> dict[str, tuple[float | None, bytes, str]]:
    """The length that the peer announces (None is the true one), its bytes, and words of the refusal."""
    return {
        "pickle": (None, pickle.dumps(Bomb(proof)), "sent no JSON"),
        "not text": (None, b"\xff\xfe", "sent no JSON"),
        "deep": (None, b"[" * 200_000, "sent no JSON (RecursionError)"),
        "another type": (None, b'["a"]', "sent a value of type list"),
        "nothing": (0.0, b"", "sent a message of 0 bytes"),
        "too much": (2.0**40, b"", "sent a message of 1.09951e+12 bytes"),
        "NaN": (float("nan"), b"", "sent a message of nan bytes"),
    }


class Stranger(SingleProcess):
    """A group in which the other process is hostile."""

    size = 2

    def __init__(self, length: float | None, text: bytes) -> None:
        self.answers = [struct.pack("=d", len(text) if length is None else length), text]

    def exchange_bytes(self, sent: bytes, *, in_replica: bool = False) -> list[bytes]:
        """The other sends its next answer."""
        del in_replica
        return [sent, self.answers.pop(0)[: len(sent)].ljust(len(sent))]


def test_foreign_messages_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Each of these ends in one message that names the process; honest values of any length and type arrive whole."""
    cases = hostile(tmp_path / "proof")
    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, None)
    for name, (length, text, words) in cases.items():
        with pytest.raises(RunError) as refusal:
            Stranger(length, text).gather({"a": 1}, dict)
        assert str(refusal.value).startswith(f"process 1 {words}"), name
        assert str(refusal.value).count("\n") == 0
    assert not (tmp_path / "proof").exists()
    for value in ({"é": [1, None]}, "", "x" * 5000, None, 3, True):
        assert Stranger(None, json.dumps(value).encode()).gather(value, type(value)) == [value, value]


@pytest.mark.dist
def test_a_peer_that_sends_pickles(tmp_path: Path):
    """Over gloo: a member that exchanges objects as torch does, or that follows our lengths, runs no code here."""
    answers = in_processes(__file__, tmp_path, 2)
    assert "process 1 sent no JSON (" in answers[0]["refusals"]
    assert "process 1 sent a message of " in answers[0]["refusals"]
    assert not (tmp_path / "proof").exists()


def worker(rank: int, folder: Path) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=2)
    group, refusals, bomb = ProcessGroup(), [], Bomb(folder / "proof")
    if rank == 0:
        for _ in range(2):
            try:
                group.gather({}, dict)
            except RunError as error:
                refusals.append(str(error))
        torch.save({"refusals": "; ".join(refusals)}, folder / "0.pt")
        dist.destroy_process_group()
        return
    text = pickle.dumps(bomb)
    group.exchange([len(text)])
    group.exchange_bytes(text)
    torch.save({}, folder / "1.pt")
    try:
        dist.all_gather_object([None, None], bomb)
    except RuntimeError:  # the other has gone after the lengths
        return
    raise AssertionError("the other process has taken it")


if __name__ == "__main__":
    worker(int(sys.argv[1]), Path(sys.argv[2]))
