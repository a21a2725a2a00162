"""A manager's client that meets lighthouses that were started anew."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import pytest

from twophase.elastic import parts


def test_a_name_that_no_host_can_have() -> None:
    """A part over 63 characters is no address, and says nothing about where the lighthouse is."""
    name = 70 * "a"
    with pytest.raises(ValueError, match=f"host is '{name}'; it must be this machine's name"):
        parts.address_of(name, "127.0.0.1")
    assert parts.address_of("127.0.0.1", name) == "127.0.0.1"


def test_a_listener_that_is_open_to_every_network() -> None:
    """It is named by its port; on loopback alone it is none."""
    before = parts.listening()
    with socket.create_server(("127.0.0.1", 0)), socket.create_server(("0.0.0.0", 0)) as server:  # noqa: S104 - refused
        assert parts.listening() - before == {f"every address, port {server.getsockname()[1]}"}
    assert parts.listening() == before


def test_numbers_of_quorums_never_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that were left out of a quorum and others see one number, though a new lighthouse had used it for others.

    Where a new lighthouse knows fewer replicas than there were, it is asked again before any replica goes on.
    """
    monkeypatch.setattr(parts, "_ANEW", 0.0)
    monkeypatch.setattr(parts, "_ASKS_ANEW", 2)

    def seen(*answered: tuple[int, str, int, int], away: bool = False) -> list[int]:
        """The numbers that a process sees of (number, members, their step, how many of them are there already)."""
        answers = iter(
            SimpleNamespace(
                quorum_id=number,
                replica_ids=list(members),
                replica_world_size=len(members),
                max_step=step,
                max_world_size=level,
                heal=False,
            )
            for number, members, step, level in answered
        )
        client = parts._Client(SimpleNamespace(_quorum=lambda: next(answers)))
        client.was_away = lambda: away
        numbers = []
        while True:
            try:
                numbers.append(client._quorum().quorum_id)
            except StopIteration:
                return numbers

    both, healing, after = (2, "ab", 4, 2), (2, "ab", 7, 1), (2, "ab", 8, 2)
    alone = (1, "b", 5, 1)
    stayed = seen(both, alone, alone, alone, healing, after)  # asked three times: it was not alone before
    absent = seen(both, healing, after)
    assert len(stayed) == 4
    assert stayed[2:] == absent[1:]
    assert absent[0] == stayed[0]
    assert absent[1] == absent[2] != absent[0]
    assert seen(both, alone, alone, both) == [stayed[0]] * 2  # the last answer counts
    later = (3, "b", 5, 1)  # another has asked the new lighthouse before, and has gone unheard of since
    assert len(seen(both, later)) == 2
    assert seen(both, later, both, away=True) == [stayed[0]] * 2
    assert len(seen(both, alone, both, later, both)) == 3  # a heartbeat that the new one does not hear yet
    monkeypatch.setattr(parts, "_SETTLED", 0.0)
    assert len(seen(both, alone, both, later, both)) == 5
