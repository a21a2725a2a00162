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


@pytest.fixture
def orphan() -> Iterator[int]:
    """A worker whose launcher ends before it looks."""
    program = PROGRAM.format(first=AWAIT_ORPHANHOOD, seconds=60)
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
