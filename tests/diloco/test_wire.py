"""What travels in a sum: how exact the codes are, what feedback saves, and the same bits on every process.

Run as a program, this file is one of the three processes of its own tests.
"""

from __future__ import annotations

import hashlib
import io
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from forked import in_processes
from twophase.diloco import transfer as transfer_module
from twophase.diloco import wire
from twophase.diloco.build import open_channel
from twophase.diloco.codec import BLOCK, Packet, packet, packet_bytes
from twophase.diloco.comm import Pending, ProcessGroup, SingleProcess
from twophase.diloco.transfer import WIRES, Channel, Transfer, check_wire

SIZE = 3
ROUNDS = 3
LENGTHS = [1, 127, 128, 129, 1_000_003]
CPU = torch.device("cpu")
LOSSY = [("bfloat16", False), ("bfloat16", True), ("int8", False), ("int8", True)]
each_lossy = pytest.mark.parametrize(("name", "feedback"), LOSSY)
SMALLEST, LARGEST = 2.0**-149, torch.finfo(torch.float32).max


def channel(name: str, numel: int, senders: int = 1, dtype: torch.dtype = torch.float32, **options: Any) -> Channel:
    return open_channel(name, numel, dtype=dtype, device=CPU, senders=senders, **options)


def through(name: str, x: Tensor, **options: Any) -> Tensor:
    """What others receive of `x`."""
    y = x.clone()
    channel(name, len(x), dtype=x.dtype, error_feedback=False, **options).quantize(y, 0)
    return y


def contribution(numel: int, rank: int, number: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """What process `rank` brings to round `number`: many magnitudes."""
    generator = torch.Generator().manual_seed(1000 * number + rank)
    return torch.randn(numel, generator=generator, dtype=dtype) * torch.rand(numel, generator=generator, dtype=dtype)


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def digits(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.numpy().tobytes()).hexdigest()


def simulate(one: Channel, contributions: Sequence[Tensor]) -> Tensor:
    """The sum as several replicas in one process make it."""
    received = [x.clone() for x in contributions]
    for sender, x in enumerate(received):
        one.quantize(x, sender)
    total = received[0]
    for x in received[1:]:
        total += x
    one.launch(SingleProcess(), total, quantized=True).wait()
    return total


# --- several processes in one: each makes its calls in turn ---------------------------------------------------------


@dataclass
class Later:
    """A collective whose messages are read by `wait()`, when all have sent theirs."""

    deliver: Callable[[], Any]
    bytes_sent: int = 0

    def wait(self) -> None:
        """Read them."""
        self.deliver()


class Member(SingleProcess):
    """One of the processes that share `calls`: what was sent by whom in each collective."""

    def __init__(self, rank: int, size: int, calls: list[dict[int, Tensor]]) -> None:
        self.rank, self.size, self.calls = rank, size, calls
        self.handed_over: list[int] = []

    def call(self, sent: Tensor, deliver: Callable[[list[Tensor]], Any]) -> Pending:
        """A collective in which everybody sends something."""
        number = len(self.handed_over)
        self.calls.extend({} for _ in range(number + 1 - len(self.calls)))
        self.calls[number][self.rank] = sent.clone()
        self.handed_over.append(sent.nbytes)
        return Later(lambda: deliver([self.calls[number][rank] for rank in range(self.size)]))

    def launch_sum(self, tensor: Tensor) -> Pending:
        """Sum."""
        return self.call(tensor, lambda sent: tensor.copy_(torch.stack(sent).sum(0)))

    def launch_scatter(self, received: Tensor, sent: Tensor) -> Pending:
        """All-to-all."""
        return self.call(sent, lambda all_: received.copy_(torch.cat([x.chunk(self.size)[self.rank] for x in all_])))

    def launch_gather(self, received: Tensor, sent: Tensor) -> Pending:
        """All-gather."""
        return self.call(sent, lambda all_: received.copy_(torch.cat(all_)))


def members(size: int) -> list[Member]:
    calls: list[dict[int, Tensor]] = []
    return [Member(rank, size, calls) for rank in range(size)]


def together(channels: Sequence[Channel], contributions: Sequence[Tensor]) -> list[Tensor]:
    """The sum on each of several processes."""
    sums = [x.clone() for x in contributions]
    transfers = [one.launch(member, x) for one, member, x in zip(channels, members(len(channels)), sums, strict=True)]
    for transfer in transfers:
        transfer.advance()
    for transfer in transfers:
        transfer.wait()
    return sums


# --- codes ----------------------------------------------------------------------------------------------------------


def test_names():
    """The three names of the configuration, and one message for any other."""
    assert [check_wire(name) for name in WIRES] == ["float32", "bfloat16", "int8"]
    with pytest.raises(ValueError, match="wire is 'int4'; it must be one of float32, bfloat16, int8"):
        check_wire("int4")
    with pytest.raises(ValueError, match="wire is 'fp8'"):
        channel("fp8", 3)


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


@given(floats(32))
def test_int8_is_within_half_a_scale(values: list[float]):
    """Every finite float32, subnormal or huge, arrives within half of its block's scale, and finite."""
    x = torch.tensor(values, dtype=torch.float32)
    assert_close_by_block(x, through("int8", x))


@given(floats(64))
def test_int8_is_within_half_a_scale_in_float64(values: list[float]):
    """The same for float64 buffers, whose scales are float32 too."""
    x = torch.tensor(values, dtype=torch.float64)
    y = through("int8", x)
    assert y.dtype == torch.float64
    assert_close_by_block(x, y)


@pytest.mark.parametrize(
    "largest", [SMALLEST, 63 * SMALLEST, 180 * SMALLEST, 1e-42, 1e-38, 1.0, 1e30, 3e38, LARGEST], ids=str
)
def test_int8_reaches_the_ends_of_float32(largest: float):
    """From the least subnormal to the last number: a block's largest elements, of either sign, come back."""
    x = torch.linspace(-1, 1, BLOCK, dtype=torch.float64).mul_(largest).float()
    y = through("int8", x)
    assert y.isfinite().all()
    assert y[-1] == -y[0] > 0
    assert_close_by_block(x, y)


def test_int8_rounds_half_to_even():
    """With max|x| = 127 the scale is 1: whole numbers are kept, halves go to the even neighbour, -0 arrives as 0."""
    x = torch.tensor([127.0, -127.0, 0.5, 1.5, 2.5, -0.5, -1.5, 3.0, -0.0, 126.5])
    y = through("int8", x)
    assert torch.equal(bits(y), bits(torch.tensor([127.0, -127.0, 0.0, 2.0, 2.0, 0.0, -2.0, 3.0, 0.0, 126.0])))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_int8_zeros_stay_zeros(dtype: torch.dtype):
    """A block of zeros beside another arrives as zeros, and float64 numbers below every float32 do too."""
    x = torch.zeros(3 * BLOCK, dtype=dtype)
    x[BLOCK] = 5.0
    if dtype == torch.float64:
        x[-1] = 1e-300
    y = through("int8", x)
    assert torch.equal(bits(y[:BLOCK]), bits(torch.zeros(BLOCK, dtype=dtype)))
    assert torch.equal(y[2 * BLOCK :], torch.zeros(BLOCK, dtype=dtype))
    assert float(y[BLOCK]) == pytest.approx(5.0, rel=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf"), 1e300])
@pytest.mark.parametrize("feedback", [False, True])
def test_int8_shows_divergence(bad: float, feedback: bool):
    """A block with a NaN, an infinity or a float64 beyond float32 is NaN altogether; its neighbours do not notice."""
    x = contribution(3 * BLOCK + 5, 0, 0, torch.float64)
    y = x.clone()
    y[BLOCK + 17] = bad
    one = channel("int8", len(x), dtype=torch.float64, error_feedback=feedback)
    one.quantize(y, 0)
    assert y[BLOCK : 2 * BLOCK].isnan().all()
    expected = through("int8", x)
    for kept in (slice(0, BLOCK), slice(2 * BLOCK, None)):
        assert torch.equal(y[kept], expected[kept])
    if feedback:
        assert one.state_dict()["sent"][0].isnan().sum() == BLOCK
        again = x.clone()
        one.quantize(again, 0)
        assert again.isnan().sum() == BLOCK, "a divergence must not heal unseen"


@given(floats(32))
def test_bfloat16_rounds_to_nearest(values: list[float]):
    """Each element arrives as the nearest bfloat16."""
    x = torch.tensor([*values, float("nan"), float("inf")], dtype=torch.float32)
    assert torch.equal(bits(through("bfloat16", x)), bits(x.bfloat16().float()))


@each_lossy
@pytest.mark.parametrize("numel", [1, 255, 256, 257, 1111])
def test_pieces_do_not_matter(name: str, feedback: bool, numel: int, monkeypatch: pytest.MonkeyPatch):
    """Encoded in pieces of two blocks, a vector has the same bits, residuals included, as encoded whole."""

    def run() -> list[Tensor]:
        channels = [channel(name, numel, error_feedback=feedback) for _ in range(2)]
        sums = [x for n in range(2) for x in together(channels, [contribution(numel, r, n) for r in range(2)])]
        return sums + [x for one in channels for x in one.state_dict().get("sent", [])]

    whole = run()
    monkeypatch.setattr(wire, "_PIECE_ELEMENTS", 2 * BLOCK)
    assert len(whole) == (6 if feedback else 4)
    for one, other in zip(whole, run(), strict=True):
        assert torch.equal(bits(one), bits(other))


def test_a_packet_fills_its_bytes():
    """A block of int8 takes 128 bytes and a float32, an element of bfloat16 two bytes; views lie in the payload."""
    assert packet_bytes("int8", 3 * BLOCK) == 3 * 132
    assert packet_bytes("bfloat16", 3 * BLOCK) == 3 * 256
    payload = torch.zeros(3 * 132, dtype=torch.uint8)
    view = packet("int8", payload, 3 * BLOCK)
    view.codes.fill_(-1)
    assert view.scales is not None
    view.scales.fill_(1.0)
    assert payload.count_nonzero() == 3 * 128 + 3 * 2  # 1.0 has two bytes that are not zero
    piece = view.piece(BLOCK, 2 * BLOCK + 3)
    assert isinstance(piece, Packet)
    assert piece.scales is not None
    assert (len(piece.codes), len(piece.scales)) == (BLOCK + 3, 2)


# --- sums -----------------------------------------------------------------------------------------------------------


@given(
    lossy=st.sampled_from(LOSSY),
    size=st.integers(1, 5),
    numel=st.integers(1, 6 * BLOCK),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 99),
)
def test_one_process_finds_the_same_bits(lossy: tuple[str, bool], size: int, numel: int, dtype: torch.dtype, seed: int):
    """For any number of processes and any length: all hold the bits that one process with as many replicas holds."""
    name, feedback = lossy
    channels = [channel(name, numel, dtype=dtype, error_feedback=feedback) for _ in range(size)]
    alone = channel(name, numel, size, dtype=dtype, error_feedback=feedback)
    for number in range(ROUNDS):
        contributions = [contribution(numel, rank, seed + number, dtype) for rank in range(size)]
        expected = simulate(alone, contributions)
        for total in together(channels, contributions):
            assert torch.equal(bits(total), bits(expected))
    if feedback:
        returned = torch.cat([one.state_dict()["returned"] for one in channels])
        assert torch.equal(bits(returned), bits(alone.state_dict()["returned"]))
        for rank, one in enumerate(channels):
            assert torch.equal(bits(one.state_dict()["sent"][0]), bits(alone.state_dict()["sent"][rank]))


def test_float32_is_left_alone():
    """The wire float32 loses nothing, remembers nothing, and sums float64 in float64."""
    one = channel("float32", 5, dtype=torch.float64, error_feedback=True, transactional=True)
    x = contribution(5, 0, 0, torch.float64)
    y = x.clone()
    one.quantize(y, 0)
    assert (one.lossy, one.state_dict()) == (False, {})
    assert torch.equal(x, y)
    one.load_state_dict({})
    one.rollback()
    assert torch.equal(together([one], [x])[0], x)
    sums = together([one, channel("float32", 5, dtype=torch.float64)], [x, 2 * x])
    assert all(torch.equal(total, x + 2 * x) for total in sums)
    assert channel("int8", 5).lossy


def test_large_sums_go_in_pieces(monkeypatch: pytest.MonkeyPatch):
    """A float32 sum is cut into even pieces of about the given size, all launched at once, and covers every element."""
    monkeypatch.setattr(transfer_module, "_SUM_PIECE_BYTES", 400)
    for numel, pieces in [(1, 1), (100, 1), (149, 1), (200, 2), (1003, 10)]:
        member = members(1)[0]
        transfer = channel("float32", numel).launch(member, torch.ones(numel))
        assert len(member.handed_over) == pieces
        assert sum(member.handed_over) == 4 * numel
        assert max(member.handed_over) - min(member.handed_over) <= 4 * pieces
        transfer.wait()


def test_what_is_sent_is_an_encoded_vector_twice():
    """With four processes int8 hands over 0.26 of float32's bytes, bfloat16 half, whatever stage or rank."""
    numel, size = 100 * BLOCK, 4
    for name, ratio in [("int8", 132 / 512), ("bfloat16", 0.5)]:
        room = members(size)
        channels = [channel(name, numel) for _ in room]
        vectors = [contribution(numel, rank, 0) for rank in range(size)]
        transfers = [one.launch(m, x) for one, m, x in zip(channels, room, vectors, strict=True)]
        for transfer in [*transfers, *transfers]:
            transfer.advance()  # twice: the second time does nothing
        for transfer in [*transfers, *transfers]:
            transfer.wait()
        for member in room:
            assert member.handed_over == [ratio * 4 * numel, ratio * 4 * numel / size]


# --- error feedback -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "value"), [("int8", 0.2), ("bfloat16", 1 + 2.0**-10)])
def test_feedback_makes_the_mean_exact(name: str, value: float):
    """With feedback the mean of T rounds of one input is within about one level / T of it; without, it stays wrong."""
    x = torch.full((4 * BLOCK,), value)
    x[::BLOCK] = 127.0
    level = 1.0 if name == "int8" else 2.0**-7
    error: dict[tuple[bool, int], float] = {}
    for feedback in (False, True):
        one = channel(name, len(x), 2, error_feedback=feedback)
        mean = torch.zeros(len(x), dtype=torch.float64)
        for t in range(1, 65):
            mean += (simulate(one, [x, x]).double() / 2 - mean) / t
            error[feedback, t] = float((mean - x).abs().max())
    for t in (4, 16, 64):
        assert error[True, t] <= 1.5 * level / t  # half a level of each sender's residual, and one of the sum's
        assert error[False, t] > 0.1 * level


@pytest.mark.parametrize("name", ["bfloat16", "int8"])
@pytest.mark.parametrize("size", [1, 3])
def test_nothing_is_lost(name: str, size: int):
    """All that was received plus all residuals, of both stages, is all that was sent, to float64's rounding."""
    numel = 5 * BLOCK + 3
    channels = [channel(name, numel, dtype=torch.float64, error_feedback=True) for _ in range(size)]
    sent = received = torch.zeros(numel, dtype=torch.float64)
    for number in range(20):
        contributions = [contribution(numel, rank, number, torch.float64) for rank in range(size)]
        sent = sent + sum(contributions)
        received = received + together(channels, contributions)[0]
    states = [one.state_dict() for one in channels]
    left = sum(state["sent"][0] for state in states) + torch.cat([state["returned"] for state in states])
    assert float((sent - received).abs().max()) > 1e-4, "something must be left, or the test shows nothing"
    torch.testing.assert_close(received + left, sent, rtol=0, atol=1e-13)


def test_feedback_is_the_default_for_int8_only():
    """int8 keeps residuals unless told otherwise, bfloat16 only when told to."""
    kept = {
        (name, feedback): bool(channel(name, 3, error_feedback=feedback).state_dict())
        for name in WIRES
        for feedback in (None, True, False)
    }
    assert {key for key, value in kept.items() if value} == {("int8", None), ("int8", True), ("bfloat16", True)}


# --- state ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("transactional", [False, True])
def test_a_saved_channel_continues(size: int, transactional: bool):
    """Channels that load what others saved, through a file without pickled code, go on bit for bit."""
    numel = 3 * BLOCK + 1
    rounds = [[contribution(numel, rank, number) for rank in range(size)] for number in range(4)]

    def build() -> list[Channel]:
        return [channel("int8", numel, transactional=transactional) for _ in range(size)]

    first = build()
    uninterrupted: list[list[Tensor]] = []
    saved: list[list[bytes]] = []
    for contributions in rounds:
        files = [io.BytesIO() for _ in first]
        for one, file in zip(first, files, strict=True):
            torch.save(one.state_dict(), file)
        saved.append([file.getvalue() for file in files])
        uninterrupted.append(together(first, contributions))
    for start in range(4):
        resumed = build()
        for one, data in zip(resumed, saved[start], strict=True):
            one.load_state_dict(torch.load(io.BytesIO(data), weights_only=True))
        for contributions, expected in zip(rounds[start:], uninterrupted[start:], strict=True):
            assert torch.equal(bits(together(resumed, contributions)[0]), bits(expected[0]))
    forgetful = build()
    assert not torch.equal(together(forgetful, rounds[3])[0], uninterrupted[3][0])


def test_another_channels_state_is_refused():
    """States of another wire, of other senders and of another fragment are refused in one message; nothing changes."""
    numel = 2 * BLOCK
    one = channel("int8", numel, 2)
    simulate(one, [contribution(numel, rank, 0) for rank in range(2)])
    good = one.state_dict()
    before = [x.clone() for x in [*good["sent"], good["returned"]]]
    longer = torch.zeros(numel + 1)
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
            one.load_state_dict(state)
        after = [*one.state_dict()["sent"], one.state_dict()["returned"]]
        assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))
    with pytest.raises(ValueError, match="the state has residuals of wire int8, this channel no residuals"):
        channel("float32", numel).load_state_dict(good)


@pytest.mark.parametrize("size", [1, 3])
def test_rollback_restores_the_residuals(size: int):
    """After a failed round the residuals are, bit for bit, as committed, and the round repeated gives the same bits."""
    numel = 4 * BLOCK + 9
    channels = [channel("int8", numel, transactional=True) for _ in range(size)]
    twins = [channel("int8", numel) for _ in range(size)]

    def residuals() -> list[Tensor]:
        states = [one.state_dict() for one in channels]
        return [x.clone() for state in states for x in (*state["sent"], state["returned"])]

    for number in range(ROUNDS):
        contributions = [contribution(numel, rank, number) for rank in range(size)]
        expected = together(twins, contributions)[0]
        before = residuals() if number else []
        for attempt in range(3):
            assert torch.equal(bits(together(channels, contributions)[0]), bits(expected))
            if number:
                assert not all(torch.equal(x, y) for x, y in zip(before, residuals(), strict=True))
            if attempt < 2:
                for one in channels:
                    one.rollback()
                after = residuals() if number else []
                assert all(torch.equal(bits(x), bits(y)) for x, y in zip(before, after, strict=True))
        for one in channels:
            one.commit()
            one.rollback()  # nothing is left to undo


def test_rollback_undoes_all_since_the_last_commit():
    """Several updates of one sender since the last commit build on each other and are undone together."""
    numel = BLOCK + 7
    one, twin = channel("int8", numel, 2, transactional=True), channel("int8", numel, 2)
    for number in range(3):
        x, y = contribution(numel, 0, number), contribution(numel, 0, number)
        one.quantize(x, 1)
        twin.quantize(y, 1)
        assert torch.equal(bits(x), bits(y))
    assert torch.equal(one.state_dict()["sent"][1], twin.state_dict()["sent"][1])
    one.rollback()
    assert one.state_dict()["sent"][1].count_nonzero() == 0


class Failing(Member):
    """A process whose second collective fails."""

    def launch_gather(self, received: Tensor, sent: Tensor) -> Pending:
        """What fails when it is waited for."""

        def fail() -> None:
            raise ConnectionError("gone")

        del received, sent
        return Later(fail)


def test_a_failed_transfer_can_be_given_up():
    """Where a collective fails, rollback() frees channel and residuals; the round repeated is as it would be."""
    numel = 2 * BLOCK
    channels = [channel("int8", numel, transactional=True) for _ in range(2)]
    contributions = [contribution(numel, rank, 0) for rank in range(2)]
    calls: list[dict[int, Tensor]] = []
    transfers = [one.launch(Failing(rank, 2, calls), contributions[rank].clone()) for rank, one in enumerate(channels)]
    for one, transfer in zip(channels, transfers, strict=True):
        with pytest.raises(ConnectionError):
            transfer.wait()
        with pytest.raises(AssertionError, match="wait for the transfer under way"):
            one.launch(SingleProcess(), contributions[0].clone())
        one.rollback()
    expected = together([channel("int8", numel) for _ in range(2)], contributions)
    assert torch.equal(bits(together(channels, contributions)[0]), bits(expected[0]))


def test_misuse_is_our_own_mistake():
    """Undoing without a copy, quantized sums of several processes and tensors of another shape are asserted away."""
    one = channel("int8", 4)
    one.commit()
    with pytest.raises(AssertionError, match="transactional"):
        one.rollback()
    with pytest.raises(AssertionError, match="both stages"):
        one.launch(members(2)[0], torch.zeros(4), quantized=True)
    with pytest.raises(AssertionError, match="a vector of 4 elements"):
        one.quantize(torch.zeros(5), 0)


def test_clear_forgets_everything():
    """After clear() a channel is as new, also when a transfer was under way; loading gives that one up as well."""
    numel = 2 * BLOCK + 1
    one, other, fresh = (channel("int8", numel, 2, transactional=True) for _ in range(3))
    first, second = ([contribution(numel, rank, number) for rank in range(2)] for number in range(2))
    expected = simulate(fresh, second)
    for kept in (one, other):
        simulate(kept, first)
        kept.launch(members(2)[0], first[0].clone())
    one.clear()
    assert torch.equal(bits(simulate(one, second)), bits(expected))
    other.load_state_dict(channel("int8", numel, 2).state_dict())
    assert torch.equal(bits(simulate(other, second)), bits(expected))


def test_processes_come_and_go():
    """From 3 processes to 2: what senders kept still counts, what owners kept of other parts is forgotten."""
    numel = 6 * BLOCK
    channels = [channel("int8", numel) for _ in range(3)]
    together(channels, [contribution(numel, rank, 0) for rank in range(3)])
    sent = [one.state_dict()["sent"][0].clone() for one in channels]
    fresh = [channel("int8", numel) for _ in range(2)]
    for one, residual in zip(fresh, sent, strict=False):
        one.load_state_dict({"wire": "int8", "sent": [residual]})
    contributions = [contribution(numel, rank, 1) for rank in range(2)]
    for x, y in zip(together(channels[:2], contributions), together(fresh, contributions), strict=True):
        assert torch.equal(bits(x), bits(y))


# --- three processes ------------------------------------------------------------------------------------------------


class Counting(ProcessGroup):
    """Counts the bytes of what it is given to send to others."""

    counted = 0

    def launch_sum(self, tensor: Tensor) -> Pending:
        """Sum."""
        self.counted += 2 * (tensor.nbytes * (self.size - 1) // self.size)
        return super().launch_sum(tensor)

    def launch_scatter(self, received: Tensor, sent: Tensor) -> Pending:
        """All-to-all."""
        self.counted += sum(part.nbytes for part in sent.chunk(self.size)[: self.size - 1])
        return super().launch_scatter(received, sent)

    def launch_gather(self, received: Tensor, sent: Tensor) -> Pending:
        """All-gather."""
        self.counted += sent.nbytes * (self.size - 1)
        return super().launch_gather(received, sent)


def talk(rank: int) -> dict[str, Any]:
    """What one process finds: for each wire and length, digits of the sums of each round, and bytes."""
    answers: dict[str, Any] = {}
    for name, feedback in LOSSY:
        for numel in LENGTHS:
            one, group, found, sent = channel(name, numel, error_feedback=feedback), Counting(), [], 0
            for number in range(ROUNDS):
                total = contribution(numel, rank, number)
                transfer = one.launch(group, total)
                transfer.wait()
                found.append(digits(total))
                sent += transfer.bytes_sent
            answers[f"{name} {feedback} {numel}"] = found, sent, group.counted
    return answers | {"whole": exact(rank), "pieces": exact(rank, 1 << 16)} | {"failed": after_failure(rank)}


def exact(rank: int, piece: int | None = None) -> list[Any]:
    """Sums of whole numbers, which no order of adding changes, over the wire float32, and what they cost."""
    if piece is not None:
        transfer_module._SUM_PIECE_BYTES = piece
    found = []
    for numel in LENGTHS:
        total, group = contribution(numel, rank, 0).mul_(1000).round_(), Counting()
        transfer = channel("float32", numel).launch(group, total)
        transfer.wait()
        found.append((digits(total), transfer.bytes_sent, group.counted))
    return found


def after_failure(rank: int) -> list[str]:
    """Two rounds; the second is undone and repeated, with another fragment's sum between the stages of both."""
    one, other = channel("int8", 5000, transactional=True), channel("bfloat16", 700)
    found = []
    for number, keep in [(0, True), (1, False), (1, True)]:
        first, second = contribution(5000, rank, number), contribution(700, rank, number)
        transfers: list[Transfer] = [one.launch(ProcessGroup(), first), other.launch(ProcessGroup(), second)]
        for transfer in transfers:
            transfer.advance()
        for transfer in reversed(transfers):
            transfer.wait()
        found += [digits(first), digits(second)]
        if keep:
            one.commit()
        else:
            one.rollback()
    return found


@pytest.fixture(scope="session")
def heard_over_wire(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of three processes found."""
    return in_processes(__file__, tmp_path_factory.mktemp("wire"), SIZE)


@pytest.mark.dist
@pytest.mark.slow
@each_lossy
@pytest.mark.parametrize("numel", LENGTHS)
def test_three_processes_hold_the_same_bits(
    heard_over_wire: list[dict[str, Any]],
    name: str,
    feedback: bool,
    numel: int,
):
    """In every round all three hold the bits that one process with three replicas finds."""
    alone = channel(name, numel, SIZE, error_feedback=feedback)
    rounds = [[contribution(numel, rank, number) for rank in range(SIZE)] for number in range(ROUNDS)]
    expected = [digits(simulate(alone, contributions)) for contributions in rounds]
    for answers in heard_over_wire:
        assert answers[f"{name} {feedback} {numel}"][0] == expected


@pytest.mark.dist
@pytest.mark.slow
def test_bytes_are_those_handed_over(heard_over_wire: list[dict[str, Any]]):
    """Bytes reported are bytes counted at the communicator; a large vector costs half of float32's, or 0.26 of them."""
    for answers in heard_over_wire:
        for name, feedback in LOSSY:
            for numel in LENGTHS:
                _, reported, counted = answers[f"{name} {feedback} {numel}"]
                assert counted == reported > 0
        _, float32, counted = answers["whole"][-1]
        assert abs(counted - float32) <= 2
        int8, bfloat16 = (answers[f"{key} 1000003"][1] / ROUNDS / float32 for key in ("int8 True", "bfloat16 False"))
        assert int8 <= 0.27
        assert 0.49 <= bfloat16 <= 0.51


@pytest.mark.dist
@pytest.mark.slow
def test_float32_is_the_all_reduce(heard_over_wire: list[dict[str, Any]]):
    """Over float32 whole numbers sum exactly, in one call and in many."""
    for index, numel in enumerate(LENGTHS):
        parts = [contribution(numel, rank, 0).mul_(1000).round_() for rank in range(SIZE)]
        for answers in heard_over_wire:
            assert answers["whole"][index][0] == answers["pieces"][index][0] == digits(parts[0] + parts[1] + parts[2])


@pytest.mark.dist
@pytest.mark.slow
def test_an_undone_round_repeats_itself(heard_over_wire: list[dict[str, Any]]):
    """A round that was rolled back and repeated gives the same bits, on all processes, beside another fragment's."""
    for answers in heard_over_wire:
        assert answers["failed"] == heard_over_wire[0]["failed"]
        first, _, undone, _, repeated, _ = answers["failed"]
        assert undone == repeated != first


def worker(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=SIZE)
    torch.save(talk(rank), folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    worker(int(sys.argv[1]), Path(sys.argv[2]))
