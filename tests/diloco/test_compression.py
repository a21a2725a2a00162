"""What compression sends: how exact the codes are, and that error feedback loses nothing."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn

from replicas import same_bits
from twophase.diloco.compression import BLOCK, Compression, encode

COMPRESSIONS = ["bfloat16", "int8"]
SMALLEST, LARGEST = 2.0**-149, torch.finfo(torch.float32).max


def received(name: str, x: Tensor) -> Tensor:
    """What others receive of a vector, which is filled up to whole blocks."""
    y = nn.functional.pad(x, (0, -len(x) % BLOCK))
    Compression(name, y, 1).quantize_(y, 0)
    return y[: len(x)]


def random(numel: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(numel, generator=generator, dtype=torch.float64) * torch.rand(numel, generator=generator)


LIKE = st.floats(-1, 1, width=32) | st.floats(-(2.0**-133), 2.0**-133, width=32)
FLOATS = st.lists(st.floats(-LARGEST, LARGEST, width=32), min_size=1, max_size=300) | st.lists(LIKE, min_size=1)


@given(FLOATS, st.sampled_from([torch.float32, torch.float64]))
@example([SMALLEST, -SMALLEST], torch.float32)
@example([180 * SMALLEST, 63 * SMALLEST, -1e-38], torch.float32)
@example([LARGEST, -LARGEST, LARGEST / 127], torch.float32)
def test_int8_is_within_half_a_scale(values: list[float], dtype: torch.dtype) -> None:
    """Every finite number, subnormal or huge, arrives within half of its block's float32 scale, and finite."""
    x = torch.tensor(values, dtype=dtype)
    if dtype == torch.float64:
        x /= 3  # between the numbers of float32
    y = received("int8", x)
    assert y.dtype == x.dtype
    assert y.isfinite().all()
    for block, decoded in zip(x.double().split(BLOCK), y.double().split(BLOCK), strict=True):
        bound = (block.abs().max() / 127 + 2 * SMALLEST) * (0.5 + 2**-15)  # to the rounding of a quotient and the scale
        assert torch.all((block - decoded).abs() <= bound), (block, decoded)


def test_int8_rounds_half_to_even() -> None:
    """With max|x| = 127 the scale is 1: whole numbers stay, halves go to the even neighbour; each block has its own."""
    x = torch.tensor([127.0, -127.0, 0.5, 1.5, 2.5, -0.5, -1.5, 3.0, -0.0, 126.5])
    expected = torch.tensor([127.0, -127.0, 0.0, 2.0, 2.0, 0.0, -2.0, 3.0, 0.0, 126.0])
    assert same_bits(received("int8", x), expected)
    blocks = torch.cat([x, torch.zeros(BLOCK - len(x)), x / 1024])
    assert same_bits(received("int8", blocks)[BLOCK:], received("int8", x / 1024))
    assert received("int8", blocks)[BLOCK] == pytest.approx(127 / 1024)


@given(FLOATS)
def test_bfloat16_rounds_to_nearest(values: list[float]) -> None:
    """Each element arrives as the nearest bfloat16, also NaN and infinity."""
    x = torch.tensor([*values, math.nan, math.inf], dtype=torch.float32)
    assert same_bits(received("bfloat16", x), (x + 0).bfloat16().float())  # -0 plus a residual of 0 is 0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e300])
def test_int8_shows_divergence(bad: float) -> None:
    """A block with a NaN, an infinity or a float64 beyond float32 is NaN as a whole, now and in the next rounds."""
    x = random(3 * BLOCK)
    y = x.clone()
    y[BLOCK + 17] = bad
    sender = Compression("int8", x, 1)
    sender.quantize_(y, 0)
    expected = received("int8", x)
    expected[BLOCK : 2 * BLOCK] = math.nan
    assert torch.equal(y.nan_to_num(7.0), expected.nan_to_num(7.0)), "the neighbours do not notice"
    again = x.clone()
    sender.quantize_(again, 0)
    assert again.isnan().sum() == BLOCK, "a divergence must not heal unseen"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", COMPRESSIONS)
def test_codes_of_a_gpu(name: str) -> None:
    """They are those of a CPU."""
    x = random(5 * BLOCK).float()
    assert torch.equal(encode(name, x), encode(name, x.cuda()).cpu())


@pytest.mark.parametrize("name", COMPRESSIONS)
def test_nothing_is_lost(name: str) -> None:
    """All that a sender has sent plus its residual is all that it was given; senders have a residual each."""
    numel = 5 * BLOCK
    senders = Compression(name, torch.zeros(numel, dtype=torch.float64), 2)
    given_, sent = torch.zeros(2, numel, dtype=torch.float64), torch.zeros(2, numel, dtype=torch.float64)
    for number in range(20):
        for sender in range(2):
            x = random(numel, 2 * number + sender)
            given_[sender] += x
            senders.quantize_(x, sender)
            sent[sender] += x
    assert float((given_ - sent).abs().max()) > 1e-4, "without a residual the test shows nothing"
    assert not torch.equal(*senders.residuals)
    torch.testing.assert_close(sent + senders.residuals, given_, rtol=0, atol=1e-13)
