"""The tests' own fork server."""

from __future__ import annotations

import socket

from forked import _SERVER, call


def test_a_process_that_dies_while_it_asks_for_another():
    """A command that is killed at any moment, as tests do, takes no other test's commands with it."""
    assert call("--version").returncode == 0
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(_SERVER._forkserver_address)
    assert call("--version").returncode == 0
