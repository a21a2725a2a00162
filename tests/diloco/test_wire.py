"""What travels in a sum: how exact the codes are, what feedback saves, and the same bits for any number of processes.

`test_comm` holds the same against three real processes.
"""

from __future__ import annotations

import io

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from channels import Failing, channel, contribution, contributions, members, residuals, same_bits, simulate, together
from twophase.diloco import transfer as transfer_module
from twophase.diloco import wire
from twophase.diloco.communicator import SingleProcess
from twophase.diloco.wire import BLOCK, packet_bytes

ROUNDS = 3
LOSSY = ["bfloat16", "int8"]
SMALLEST, LARGEST = 2.0**-149, torch.finfo(torch.float32).max


def received_of(name: str, x: Tensor) -> Tensor:
    """What others receive of `x`."""
    y = x.clone()
    channel(name, len(x), dtype=x.dtype).quantize(y, 0)
    return y


# --- codes ----------------------------------------------------------------------------------------------------------


def assert_close_by_block(x: Tensor, y: Tensor) -> None:
    """Each element within half a scale, max|x| / 254, to the rounding of a quotient and of a subnormal scale."""
    for block, received in zip(x.double().split(BLOCK), y.double().split(BLOCK), strict=True):
        bound = (block.abs().max() / 127 + 2 * SMALLEST) * (0.5 + 2**-15)
        assert torch.all((block - received).abs() <= bound), (block, received)


def floats(width: int) -> st.SearchStrategy[list[float]]:
    largest = LARGEST if width == 32 else 1e38
    whole = st.floats(-largest, largest, width=width)  # type: ignore[arg-type]
    like = st.floats(-1, 1, width=32) | st.floats(-(2.0**-133), 2.0**-133, width=32)
    return st.one_of(st.lists(whole, min_size=1, max_size=300), st.lists(like, min_size=1, max_size=300))


@given(st.one_of(floats(32).map(lambda x: (x, torch.float32)), floats(64).map(lambda x: (x, torch.float64))))
def test_int8_is_within_half_a_scale(drawn: tuple[list[float], torch.dtype]):
    """Every finite number, subnormal or huge, arrives within half of its block's float32 scale, and finite."""
    x = torch.tensor(drawn[0], dtype=drawn[1])
    y = received_of("int8", x)
    assert y.dtype == x.dtype
    assert_close_by_block(x, y)


@pytest.mark.parametrize("largest", [SMALLEST, 63 * SMALLEST, 180 * SMALLEST, 1e-42, 1e-38, 1.0, 1e30, LARGEST])
def test_int8_reaches_the_ends_of_float32(largest: float):
    """From the least subnormal to the last number: a block's largest elements, of either sign, come back."""
    x = torch.linspace(-1, 1, BLOCK, dtype=torch.float64).mul_(largest).float()
    y = received_of("int8", x)
    assert y.isfinite().all()
    assert y[-1] == -y[0] > 0
    assert_close_by_block(x, y)


def test_int8_rounds_half_to_even():
    """With max|x| = 127 the scale is 1: whole numbers stay, halves go to the even neighbour, -0 and 1e-300 become 0."""
    x = torch.tensor([127.0, -127.0, 0.5, 1.5, 2.5, -0.5, -1.5, 3.0, -0.0, 126.5])
    expected = torch.tensor([127.0, -127.0, 0.0, 2.0, 2.0, 0.0, -2.0, 3.0, 0.0, 126.0])
    assert same_bits(received_of("int8", x), expected)
    tiny = torch.zeros(2 * BLOCK, dtype=torch.float64)
    tiny[0], tiny[-1] = 127.0, 1e-300
    expected = torch.zeros(2 * BLOCK, dtype=torch.float64)
    expected[0] = 127.0
    assert same_bits(received_of("int8", tiny), expected)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf"), 1e300])
def test_int8_shows_divergence(bad: float):
    """A block with a NaN, an infinity or a float64 beyond float32 is NaN altogether, now and in the next rounds."""
    x = contribution(3 * BLOCK + 5, 0, 0, torch.float64)
    y = x.clone()
    y[BLOCK + 17] = bad
    one_sender = channel("int8", len(x), dtype=torch.float64)
    one_sender.quantize(y, 0)
    expected = received_of("int8", x)
    expected[BLOCK : 2 * BLOCK] = float("nan")
    assert torch.equal(y.nan_to_num(7.0), expected.nan_to_num(7.0)), "the neighbours do not notice"
    assert one_sender.state_dict()["sent"][0].isnan().sum() == BLOCK
    again = x.clone()
    one_sender.quantize(again, 0)
    assert again.isnan().sum() == BLOCK, "a divergence must not heal unseen"


@given(floats(32))
def test_bfloat16_rounds_to_nearest(values: list[float]):
    """Each element arrives as the nearest bfloat16."""
    x = torch.tensor([*values, float("nan"), float("inf")], dtype=torch.float32)
    assert same_bits(received_of("bfloat16", x), x.bfloat16().float())


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("numel", [1, 255, 256, 257, 1111])
def test_pieces_do_not_matter(name: str, numel: int, monkeypatch: pytest.MonkeyPatch):
    """Encoded in pieces of two blocks, a vector has the same bits, residuals included, as encoded whole."""

    def run() -> list[Tensor]:
        channels = [channel(name, numel) for _ in range(2)]
        return [x for n in range(2) for x in together(channels, contributions(numel, 2, n))] + residuals(channels)

    whole = run()
    monkeypatch.setattr(wire, "_PIECE_ELEMENTS", 2 * BLOCK)
    assert len(whole) == {"bfloat16": 4, "int8": 7}[name]
    assert all(map(same_bits, whole, run()))


# --- sums -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LOSSY)
@given(
    size=st.integers(1, 5),
    numel=st.integers(1, 6 * BLOCK) | st.integers(16, 9000),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 99),
)
def test_one_process_makes_the_same_bits(name: str, size: int, numel: int, dtype: torch.dtype, seed: int):
    """For any number of processes and any length: all hold the bits that one process with as many replicas holds."""
    channels = [channel(name, numel, dtype=dtype) for _ in range(size)]
    alone = channel(name, numel, size, dtype=dtype)
    for number in range(ROUNDS):
        parts = contributions(numel, size, seed + number, dtype)
        expected = simulate(alone, parts)
        assert all(same_bits(total, expected) for total in together(channels, parts))
    assert all(map(same_bits, residuals(channels), residuals([alone])))


def test_float32_is_left_alone():
    """The wire float32 loses nothing, remembers nothing, and sums float64 in float64."""
    exact = channel("float32", 5, dtype=torch.float64)
    x = contribution(5, 0, 0, torch.float64)
    y = x.clone()
    exact.quantize(y, 0)
    assert (exact.lossy, exact.state_dict(), channel("bfloat16", 5).state_dict()) == (False, {}, {})
    assert torch.equal(x, y)
    exact.load_state_dict({})
    exact.withdraw()
    assert torch.equal(together([exact], [x])[0], x)
    sums = together([exact, channel("float32", 5, dtype=torch.float64)], [x, 2 * x])
    assert all(torch.equal(total, x + 2 * x) for total in sums)
    assert channel("int8", 5).lossy


def test_large_sums_go_in_pieces(monkeypatch: pytest.MonkeyPatch):
    """A float32 sum is cut into even pieces of about the given size, all launched at once, and covers every element."""
    monkeypatch.setattr(transfer_module, "_SUM_PIECE_BYTES", 400)
    for numel, pieces in [(1, 1), (100, 1), (149, 1), (200, 2), (1003, 10)]:
        (member,) = members(1)
        transfer = channel("float32", numel).launch(member, torch.ones(numel))
        assert len(member.handed_over) == pieces
        assert sum(member.handed_over) == 4 * numel
        assert max(member.handed_over) - min(member.handed_over) <= 4 * pieces
        transfer.wait()


@pytest.mark.parametrize(("name", "ratio"), [("int8", 132 / 512), ("bfloat16", 0.5)])
def test_what_is_sent_is_an_encoded_vector_twice(name: str, ratio: float):
    """With four processes int8 hands over 0.26 of float32's bytes, bfloat16 half, whatever stage or rank."""
    numel, size = 100 * BLOCK, 4
    assert packet_bytes(name, numel) == 4 * ratio * numel
    group, parts = members(size), contributions(numel, size, 0)
    transfers = [channel(name, numel).launch(member, x) for member, x in zip(group, parts, strict=True)]
    for transfer in [*transfers, *transfers]:
        transfer.advance()  # twice: the second time does nothing
    for transfer in [*transfers, *transfers]:
        transfer.wait()
    for member in group:
        assert member.handed_over == [ratio * 4 * numel, ratio * 4 * numel / size]


# --- error feedback -------------------------------------------------------------------------------------------------


def test_feedback_makes_the_mean_exact():
    """The mean of T rounds of one input is within 1.5 levels / T of it: int8's senders and sum carry what they lack."""
    x = torch.full((4 * BLOCK,), 0.2)
    x[::BLOCK] = 127.0
    pair, mean = channel("int8", len(x), 2), torch.zeros(len(x), dtype=torch.float64)
    for t in range(1, 65):
        mean += (simulate(pair, [x, x]).double() / 2 - mean) / t
        assert float((mean - x).abs().max()) <= 1.5 / t
    assert float((received_of("int8", x) - x).abs().max()) > 0.1, "a single round must be wrong, or this shows nothing"


@pytest.mark.parametrize("size", [1, 3])
def test_nothing_is_lost(size: int):
    """All that was received plus all residuals, of both stages, is all that was sent, to float64's rounding."""
    numel = 5 * BLOCK + 3
    channels = [channel("int8", numel, dtype=torch.float64) for _ in range(size)]
    sent = received = torch.zeros(numel, dtype=torch.float64)
    for number in range(20):
        parts = contributions(numel, size, number, torch.float64)
        sent = sent + sum(parts)
        received = received + together(channels, parts)[0]
    states = [channel.state_dict() for channel in channels]
    residual = sum(state["sent"][0] for state in states) + torch.cat([state["returned"] for state in states])
    assert float((sent - received).abs().max()) > 1e-4, "without a residual the test shows nothing"
    torch.testing.assert_close(received + residual, sent, rtol=0, atol=1e-13)


# --- state ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_saved_channel_continues(size: int):
    """Channels that load what others saved, through a file without pickled code, go on bit for bit."""
    numel = 3 * BLOCK + 1
    rounds = [contributions(numel, size, number) for number in range(4)]
    channels = [channel("int8", numel) for _ in range(size)]
    uninterrupted: list[Tensor] = []
    saved: list[list[bytes]] = []
    for parts in rounds:
        files = [io.BytesIO() for _ in channels]
        for source, file in zip(channels, files, strict=True):
            torch.save(source.state_dict(), file)
        saved.append([file.getvalue() for file in files])
        uninterrupted.append(together(channels, parts)[0])
    for start in range(4):
        resumed = [channel("int8", numel) for _ in range(size)]
        for target, data in zip(resumed, saved[start], strict=True):
            target.load_state_dict(torch.load(io.BytesIO(data), weights_only=True))
        for parts, expected in zip(rounds[start:], uninterrupted[start:], strict=True):
            assert same_bits(together(resumed, parts)[0], expected)
    forgetful = [channel("int8", numel) for _ in range(size)]
    assert not torch.equal(together(forgetful, rounds[3])[0], uninterrupted[3])


def test_another_channels_state_is_refused():
    """States of another wire, of other senders and of another fragment are refused in one message; nothing changes."""
    numel = 2 * BLOCK
    pair = channel("int8", numel, 2)
    simulate(pair, contributions(numel, 2, 0))
    good, before, longer = pair.state_dict(), residuals([pair]), torch.zeros(numel + 1)
    bad = {
        "the state has no residuals, this channel residuals of wire int8": {},
        "the state has residuals of wire bfloat16, this channel residuals of wire int8": good | {"wire": "bfloat16"},
        "the state has 1 senders' residuals, this channel 2": good | {"sent": good["sent"][:1]},
        r"sender 1's residual has shape \(257,\) instead of \(256,\)": good | {"sent": [longer[1:], longer]},
        r"the part's residual, \(257,\) at 0, is not within 256": good | {"returned": longer},
        r"the part's residual, \(256,\) at 128, is not within 256": good | {"returned_start": 128},
    }
    for message, state in bad.items():
        with pytest.raises(ValueError, match=rf"Channel\.load_state_dict: {message}.*start a new run"):
            pair.load_state_dict(state)
        assert all(map(torch.equal, before, residuals([pair])))
    for name in ("float32", "bfloat16"):
        with pytest.raises(ValueError, match="the state has residuals of wire int8, this channel no residuals"):
            channel(name, numel).load_state_dict(good)


def test_a_failed_transfer_can_be_given_up():
    """Where a collective fails, withdraw() frees the channel, and its residuals keep what the next sum takes."""
    numel, calls = 2 * BLOCK, []
    channels = [channel("int8", numel) for _ in range(2)]
    parts = contributions(numel, 2, 0)
    transfers = [channels[rank].launch(Failing(rank, 2, calls), parts[rank].clone()) for rank in range(2)]
    for member_channel, transfer in zip(channels, transfers, strict=True):
        with pytest.raises(ConnectionError):
            transfer.wait()
        with pytest.raises(AssertionError, match="wait for the transfer under way"):
            member_channel.launch(SingleProcess(), parts[0].clone())
        member_channel.withdraw()
    sums = together(channels, parts)
    assert same_bits(sums[0], sums[1])


def test_clear_forgets_everything():
    """After clear() a channel is as new, also when a transfer was under way; loading gives that one up as well."""
    numel = 2 * BLOCK + 1
    cleared, loaded, fresh = (channel("int8", numel, 2) for _ in range(3))
    first, second = (contributions(numel, 2, number) for number in range(2))
    entries, expected = fresh.state_dict().keys(), simulate(fresh, second)
    for used in (cleared, loaded):
        simulate(used, first)
        used.launch(members(2)[0], first[0].clone())
    cleared.clear()
    assert cleared.state_dict().keys() == entries
    loaded.load_state_dict(channel("int8", numel, 2).state_dict())
    for renewed in (cleared, loaded):
        assert same_bits(simulate(renewed, second), expected)


def test_processes_come_and_go():
    """From 3 processes to 2: senders' residuals still count, those of owners of other parts are dropped."""
    numel = 6 * BLOCK
    channels = [channel("int8", numel) for _ in range(3)]
    together(channels, contributions(numel, 3, 0))
    fresh = [channel("int8", numel) for _ in range(2)]
    for target, source in zip(fresh, channels, strict=False):
        target.load_state_dict({"wire": "int8", "sent": [source.state_dict()["sent"][0].clone()]})
    parts = contributions(numel, 2, 1)
    assert all(map(same_bits, together(channels[:2], parts), together(fresh, parts)))
