"""The end of a process whose torchrun agent was killed before it could look for it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch  # noqa: F401 - this process stands for an agent, which has it loaded

from twophase.base import leash

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
AWAIT_ORPHANHOOD = "while os.getppid() == int(sys.argv[1]): time.sleep(0.01)"
PROGRAM = """
import os, sys, time
from twophase.base.leash import follow_torchrun
{first}
follow_torchrun()
time.sleep({seconds})
"""
LAUNCHER = """
import os, subprocess, sys
command = [sys.executable, "-c", sys.argv[1], str(os.getpid())]
print(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).pid, flush=True)
"""
ENVIRONMENT = os.environ | {"TORCHELASTIC_RUN_ID": "none"}


DEAF = "import signal, twophase.base.leash as leash; leash.GRACE = 0.1; signal.signal(signal.SIGTERM, signal.SIG_IGN)"


@pytest.fixture(params=["", DEAF], ids=["", "deaf"])
def orphan(request: pytest.FixtureRequest) -> Iterator[int]:
    """A worker whose launcher ends before it looks; one of the two does not hear signals."""
    program = PROGRAM.format(first=f"{request.param}\n{AWAIT_ORPHANHOOD}", seconds=60)
    command = [sys.executable, "-c", LAUNCHER, program]
    said = subprocess.run(command, env=ENVIRONMENT, stdout=subprocess.PIPE, check=True).stdout
    yield int(said)
    with suppress(OSError):
        os.kill(int(said), 9)


@pytest.mark.slow
def test_an_agent_that_is_dead_before_the_first_look(orphan: int) -> None:
    """Its worker ends by itself."""
    end, state = time.monotonic() + 20, "R"
    while state not in ("", "Z"):
        assert time.monotonic() < end, "the worker goes on"
        time.sleep(0.1)
        state = ""
        with suppress(OSError):
            state = Path(f"/proc/{orphan}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.slow
@pytest.mark.parametrize("between", [[], ["sh", "-c", '"$@"; exit $?', "sh"]])
def test_an_agent_that_lives(between: list[str]) -> None:
    """A worker goes on to its end, also below a script that the agent has started."""
    program = PROGRAM.format(first="", seconds=1.2)
    assert subprocess.run([*between, sys.executable, "-c", program], env=ENVIRONMENT, check=False).returncode == 0


@pytest.mark.parametrize(("words", "may_be"), [(b"python\0train.py\0", True), (b"/sbin/init\0", False)])
def test_a_process_that_may_not_be_looked_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: bytes, may_be: bool
) -> None:
    """Its command says whether it may be an agent; a process that is not there at all may have been the agent."""

    def read(path: Path) -> bytes:
        if path.name == "maps":
            raise PermissionError
        return words

    monkeypatch.setattr(Path, "read_bytes", read)
    assert leash._may_be_agent(tmp_path) == may_be
    monkeypatch.undo()
    assert leash._has_agent(0)
    assert leash._has_agent(2**22 + 1)
