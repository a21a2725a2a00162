"""Trees of tensors and plain values keep every bit on their way through a safetensors file."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from twophase.training import parts

SHARED = torch.arange(24.0)
TENSORS = [
    torch.tensor([1.0, -0.0, math.nan, math.inf]),
    torch.tensor([0x7FC12345, -4194303], dtype=torch.int32).view(torch.float32),  # NaNs with a payload
    torch.tensor([1.0, math.pi], dtype=torch.float64),
    torch.tensor([[1.5], [-3.0]], dtype=torch.bfloat16),
    torch.tensor([1.5], dtype=torch.float16),
    torch.tensor([0.5, -2.0]).to(torch.float8_e4m3fn),
    torch.tensor([0.5, -2.0]).to(torch.float8_e5m2),
    torch.tensor([1 + 2j]),
    torch.tensor(7.0),
    torch.tensor(2**62 + 1),
    torch.tensor([-1, 5], dtype=torch.int16),
    torch.tensor([1, 255], dtype=torch.uint8),
    torch.tensor([2**64 - 1], dtype=torch.uint64),
    torch.tensor([True, False, True]),
    torch.empty(0),
    torch.empty(3, 0, 2, dtype=torch.int64),
    torch.arange(12.0).view(3, 4).t(),
    torch.arange(10.0)[::3],
    torch.ones(1).expand(4, 2),
    SHARED[:16],
    SHARED[8:],
    SHARED,
    torch.nn.Parameter(torch.ones(2, 2)),
]
PLAIN = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=True)
    | st.text(st.characters(codec=None), max_size=5)  # half surrogate pairs included
)
KEYS = st.integers(-3, 3) | st.sampled_from(["0", "1", "a", "a.b", "b", "", "__metadata__", "tensor", "\udc80"])
TREES = st.recursive(
    PLAIN | st.sampled_from(TENSORS),
    lambda inner: (
        st.lists(inner, max_size=4) | st.lists(inner, max_size=3).map(tuple) | st.dictionaries(KEYS, inner, max_size=5)
    ),
    max_leaves=12,
)


def described(value: Any) -> Any:
    """A tree with types and bits spelled out, so that equal means the same."""
    if isinstance(value, Tensor):
        data = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return "tensor", value.dtype, tuple(value.shape), data
    if isinstance(value, dict):
        return "dict", [(type(key), key, described(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [described(item) for item in value]
    return type(value), value.hex() if isinstance(value, float) else value


@hypothesis_settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tree=TREES)
def test_round_trip(tmp_path: Path, tree: Any) -> None:
    """Every tree comes back with the same keys in the same order, types, shapes and bits, in memory of its own."""
    path = tmp_path / "part.safetensors"
    part = parts.take_apart(tree)
    part.tensors = {name: tensor.contiguous() for name, tensor in part.tensors.items()}
    entry = parts.write(path, part)
    data = path.read_bytes()
    assert entry == {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    again = parts.read(path)
    assert described(again) == described(tree)
    # The reader that everybody has finds the same tensors.
    found = load_file(path)
    assert {name: described(value) for name, value in found.items()} == {
        name: described(value) for name, value in part.tensors.items()
    }


def test_names_are_readable(tmp_path: Path) -> None:
    """A replica's weights and moments lie under their own names."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False))
    inner = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    model(torch.ones(1, 2)).sum().backward()
    inner.step()
    parts.write(tmp_path / "x", parts.take_apart({"model": model.state_dict(), "inner": inner.state_dict()}))
    assert set(load_file(tmp_path / "x")) == {
        "model.0.weight",
        "inner.state.0.step",
        "inner.state.0.exp_avg",
        "inner.state.0.exp_avg_sq",
    }


def test_larger_than_a_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor that is written in several pieces, the last one shorter, arrives whole."""
    monkeypatch.setattr(parts, "_PIECE", 1000)
    tensor, calls = torch.randn(1234), []
    parts.write(tmp_path / "x", parts.take_apart({"x": tensor}), lambda: calls.append(1))
    assert torch.equal(parts.read(tmp_path / "x")["x"], tensor)
    assert len(calls) == 1 + 5  # the header, and 4936 bytes


def test_what_is_read_does_not_hang_on_the_file(tmp_path: Path) -> None:
    """Tensors that were read stay as they are when the file goes, and the file as it is when they change."""
    parts.write(tmp_path / "x", parts.take_apart([torch.ones(1000)]))
    before = (tmp_path / "x").read_bytes()
    (tensor,) = parts.read(tmp_path / "x")
    tensor += 1
    assert (tmp_path / "x").read_bytes() == before
    with (tmp_path / "x").open("r+b") as file:
        file.truncate(10)
    assert tensor.sum() == 2000


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"a": {3: {1, 2}}}, r"cannot hold a\.3, of type set; make it a tensor, a number, text"),
        ({"a": [object()]}, r"cannot hold a\.0, of type object"),
        (b"x", r"cannot hold a part, of type bytes"),
        ({"a": {(1, 2): 3}}, r"cannot hold a: its key \(1, 2\) is neither text nor a number"),
        ({"a": torch.ones(2, 2).to_sparse()}, r"cannot hold a, a tensor of torch\.float32 and torch\.sparse_coo"),
        ({"a": torch.ones(2, dtype=torch.complex128)}, r"cannot hold a, a tensor of torch\.complex128"),
    ],
)
def test_what_a_checkpoint_cannot_hold(tree: Any, message: str) -> None:
    """Anything that would not come back as it is is refused by its path."""
    with pytest.raises(ValueError, match=message):
        parts.take_apart(tree)


def test_a_file_of_others(tmp_path: Path) -> None:
    """A safetensors file without a tree is said to be one."""
    save_file({"x": torch.ones(2)}, tmp_path / "x")
    with pytest.raises(ValueError, match="holds tensors but no tree of them"):
        parts.read(tmp_path / "x")
