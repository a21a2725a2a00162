"""The sparse wire: a slow twin, error-feedback residuals, saved states (bits and failed syncs: test_wire)."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from channels import channel, contribution, contributions, members, residuals, same_bits, simulate, together
from twophase.diloco import sparse
from twophase.diloco.formats import LONGEST_CHUNK, TopK, check_wire
from twophase.diloco.setting import open_channel

NAME = "topk:128:2bit"
SHAPES = [(NAME, 128), (NAME, 5000), ("topk:8:2bit", 4096), ("topk:16:4bit", 4097), ("topk:100:8bit", 9001)]
"""A wire, and a length: one chunk, several, of a padded end or none, of a ratio that is no power of two."""


def twin(residual: NDArray[np.float64], g: NDArray[np.float64], ratio: int, bits: int) -> NDArray[np.float64]:
    """Return what a sender sends, and subtract it from the residual: from the equations, element by element."""
    residual[:] = 0.95 * residual + g
    sent, steps = np.zeros_like(residual), 2 ** (bits - 1) - 1
    chunks = -(-len(g) // (4096 // ratio * ratio))
    length = -(-len(g) // (chunks * ratio)) * ratio
    for start in range(0, len(g), length):
        chunk = residual[start : start + length]
        largest = np.argsort(-np.abs(chunk), kind="stable")[: length // ratio]
        least, most = (float(np.float32(end(abs(chunk[largest])))) for end in (min, max))
        for index in largest:
            step = (most - least) / steps or 1.0
            size = least + np.clip(np.round((abs(chunk[index]) - least) / step), 0, steps) * step
            sent[start + index] = np.copysign(size, chunk[index])
    residual -= sent
    return sent


@pytest.mark.parametrize(("name", "numel"), SHAPES)
def test_equals_the_slow_twin(name: str, numel: int):
    """24 rounds of three senders: sums and residuals are those of the equations in float64, to 1e-12."""
    format_ = TopK.of(name)
    assert format_ is not None
    senders = channel(name, numel, 3, dtype=torch.float64)
    residual = [np.zeros(numel) for _ in range(3)]
    for number in range(24):
        parts = contributions(numel, 3, number, torch.float64)
        expected = sum(twin(e, g.numpy(), format_.ratio, format_.bits) for e, g in zip(residual, parts, strict=True))
        np.testing.assert_allclose(simulate(senders, parts).numpy(), expected, rtol=0, atol=1e-12)
        np.testing.assert_allclose(np.stack(residuals([senders])), np.stack(residual), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("name", "numel"), SHAPES)
def test_nothing_is_lost(name: str, numel: int, dtype: torch.dtype):
    """In each round, what is sent and the residual are the decayed residual and the contribution, to one rounding."""
    sender, before = channel(name, numel, dtype=dtype), torch.zeros(numel, dtype=dtype)
    for number in range(6):
        g = contribution(numel, 0, number, dtype)
        sent = g.clone()
        sender.quantize(sent, 0)
        (after,) = residuals([sender])
        total = before * sparse.DECAY + g
        torch.testing.assert_close(sent + after, total, rtol=torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps)
        untouched = sent == 0
        assert same_bits(after[untouched], total[untouched])
        assert bool((after.abs() <= total.abs()).all()), "an element must not lose more than its size"
        before = after


@given(
    st.lists(st.floats(-(2.0**99), 2.0**99, width=32), min_size=16, max_size=80),
    st.sampled_from([2, 4, 8]),
    st.sampled_from([2, 5, 16]),
)
def test_what_is_kept_is_within_half_a_step(values: list[float], bits: int, ratio: int):
    """The largest elements arrive with their sign, within half a step of what they were; 0 arrives as 0."""
    x = torch.tensor(values, dtype=torch.float64)
    y = x.clone()
    channel(f"topk:{ratio}:{bits}bit", len(x), dtype=torch.float64).quantize(y, 0)
    count = -(-len(x) // ratio)
    order = x.abs().sort(descending=True).values
    step = (order[0] - order[count - 1]) / (2 ** (bits - 1) - 1)
    nonzero = y != 0
    assert int(nonzero.sum()) <= count
    assert bool((y[nonzero].sign() == x[nonzero].sign()).all())
    assert bool(((y - x)[nonzero].abs() <= step / 2 + 1e-6 * order[0]).all())
    assert bool((x[nonzero].abs() >= order[count - 1]).all())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e300])
def test_divergence_shows(bad: float):
    """A NaN, an infinity or a float64 beyond float32 makes all that its chunk sends NaN, now and in the next rounds."""
    x = contribution(3 * LONGEST_CHUNK, 0, 0, torch.float64)
    y, one_sender = x.clone(), channel(NAME, len(x), dtype=torch.float64)
    y[LONGEST_CHUNK + 17] = bad
    for sent in (y, x.clone()):
        one_sender.quantize(sent, 0)
        assert [chunk.isnan().sum().item() for chunk in sent.chunk(3)] == [0, 32, 0]


@pytest.mark.parametrize(("name", "least"), [(NAME, 250), ("topk:64:2bit", 130), ("topk:32:8bit", 49)])
def test_bytes(name: str, least: float):
    """With two processes a replica sends so many times fewer bytes than float32; with M, M - 1 packets, all counted."""
    numel, format_ = 100 * LONGEST_CHUNK, TopK.of(name)
    assert format_ is not None
    for size in (2, 5):
        group = members(size)
        transfers = [channel(name, numel).launch(member, torch.ones(numel)) for member in group]
        for transfer in transfers:
            transfer.wait()
        assert [member.handed_over for member in group] == [[format_.packet_bytes(numel)]] * size
        float32_bytes = 2 * (size - 1) / size * 4 * numel
        assert float32_bytes / ((size - 1) * format_.packet_bytes(numel)) >= 2 / size * least


def test_no_value_is_read_back():
    """Tensors without values do as well: on an accelerator no step waits for the device."""
    numel, device = 50_001, torch.device("meta")
    target = open_channel("topk:100:2bit", numel, dtype=torch.float32, device=device, senders=2)
    x = torch.zeros(numel, device=device)
    for sender in range(2):
        target.quantize(x, sender)
    assert together([target], [x])[0].device == device


@given(st.integers(1, 20).flatmap(lambda w: st.tuples(st.just(w), st.lists(st.integers(0, 2**w - 1), min_size=1))))
def test_words_of_any_width_are_packed(drawn: tuple[int, list[int]]):
    """Words of some bits come back from as few bytes as hold them."""
    width, words = drawn
    packed = sparse._packed(torch.tensor([words, words[::-1]]), width)
    assert (packed.dtype, packed.shape) == (torch.uint8, (2, -(-width * len(words) // 8)))
    assert sparse._unpacked(packed, width, len(words)).tolist() == [words, words[::-1]]


# --- state ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("committed", [True, False])
def test_a_saved_channel_continues(size: int, committed: bool):
    """Channels that load what others saved, through a file without pickled code, go on bit for bit.

    Also where the last sum was not applied yet: if it never is, they go back as far as the others would.
    """
    numel = 300
    channels = [channel("topk:16:2bit", numel) for _ in range(size)]
    for number in range(3):
        for target in channels:
            target.commit()
        together(channels, contributions(numel, size, number))
    for target in channels if committed else ():
        target.commit()
    resumed = [channel("topk:16:2bit", numel) for _ in range(size)]
    for source, target in zip(channels, resumed, strict=True):
        file = io.BytesIO()
        torch.save(source.state_dict(), file)
        target.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    for both in (channels, resumed):
        for target in both:
            target.withdraw()
    assert all(map(same_bits, residuals(channels), residuals(resumed)))
    parts = contributions(numel, size, 3)
    assert all(map(same_bits, together(channels, parts), together(resumed, parts)))
    assert all(map(same_bits, residuals(channels), residuals(resumed)))


def test_another_channels_state_is_refused():
    """States of another sparse wire, of int8 and of another length are refused; nothing changes."""
    numel = 256
    target = channel("topk:16:2bit", numel)
    target.quantize(contribution(numel, 0, 0), 0)
    good, before = target.state_dict(), residuals([target])
    bad = [
        channel("topk:16:4bit", numel).state_dict(),
        channel("int8", numel).state_dict(),
        good | {"sent": [torch.zeros(numel + 1)]},
        good | {"committed": [torch.zeros(numel + 1)]},
    ]
    for state in bad:
        with pytest.raises(ValueError, match="start a new run"):
            target.load_state_dict(state)
        assert all(map(same_bits, before, residuals([target])))


OUT_OF_RANGE = ["topk:0:2bit", "topk:1:2bit", "topk:4097:2bit", "topk:128:3bit", "topk:128:32bit"]
NO_WIRE = ["topk", "topk:128", "topk:128:2", "topk:-1:2bit", "topk:1.5:2bit", "topk:٣:2bit", 8, "int4"]


@pytest.mark.parametrize("name", [*OUT_OF_RANGE, *NO_WIRE])
def test_other_formats_are_refused(name: str):
    """A ratio outside 2 to 4096, and other bits than 2, 4 and 8, are refused with the range; other words by name."""
    words = r"\. RATIO must be .*2 to 4096.*2bit, 4bit or 8bit.*topk:128:2bit"
    if name in NO_WIRE:
        words = "; it must be one of float32, bfloat16, int8 and topk:RATIO:BITS"
    with pytest.raises(ValueError, match=rf"DiLoCo: wire is '?{name}'?{words}"):
        check_wire(name)


def test_a_ratio_larger_than_the_tensor_is_refused():
    """Less than one element of the smallest fragment cannot be kept; as many as the ratio can."""
    with pytest.raises(ValueError, match=f"{NAME}, which keeps one of 128 .* has 127. Take a RATIO of at most 127"):
        channel(NAME, 127)
    assert channel(NAME, 128).lossy
    with pytest.raises(ValueError, match="wire is 'int4'"):
        channel("int4", 3)
