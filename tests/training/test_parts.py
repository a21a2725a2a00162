"""Trees of tensors and plain values keep every bit on their way through a safetensors file."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given
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
    torch.tensor(7.0),
    torch.tensor(2**62 + 1),
    torch.tensor([1, 255], dtype=torch.uint8),
    torch.tensor([True, False, True]),
    torch.empty(0),
    torch.empty(3, 0, 2, dtype=torch.int64),
    SHARED[:16],
    SHARED[8:],
    torch.nn.Parameter(torch.ones(2, 2)),
]
PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=True) | st.text("aé.0", max_size=3)
KEYS = st.text("ab0.", max_size=2) | st.integers(-2, 2) | st.booleans() | st.none()
TREES = st.recursive(
    PLAIN | st.sampled_from(TENSORS),
    lambda inner: (
        st.lists(inner, max_size=4) | st.lists(inner, max_size=4).map(tuple) | st.dictionaries(KEYS, inner, max_size=5)
    ),
    max_leaves=12,
)


def described(value: Any) -> Any:
    """Spell out a tree with types and bits, so that equal means the same."""
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
@example(tree={0: torch.ones(1), "0": torch.zeros(1)})
def test_round_trip(tmp_path: Path, tree: Any) -> None:
    """Every tree comes back with the same keys in the same order, types, shapes and bits, in memory of its own."""
    path = tmp_path / "part.safetensors"
    part = parts.take_apart(tree)
    part.tensors = {name: tensor.clone() for name, tensor in part.tensors.items()}  # as a snapshot does
    parts.write(path, part)
    again = parts.read(path)
    path.write_bytes(b"")  # and independent of the file
    assert described(again) == described(tree)


def test_names_are_readable(tmp_path: Path) -> None:
    """A replica's weights and moments lie under their own names."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False))
    inner = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    model(torch.ones(1, 2)).sum().backward()
    inner.step()
    parts.write(tmp_path / "x", parts.take_apart({"model": model.state_dict(), "inner": inner.state_dict()}))
    moments = {f"inner.state.0.{name}" for name in ("step", "exp_avg", "exp_avg_sq")}
    assert set(load_file(tmp_path / "x")) == {"model.0.weight", *moments}


def test_trees_of_earlier_versions() -> None:
    """They spelled out numbers that are not finite."""
    tree = '{"dict": [["x", {"float": "-inf"}], [{"float": "nan"}, {"tuple": []}]]}'
    again = parts.put_together(parts.Part(tree, {}))
    assert again["x"] == -math.inf
    assert list(again.values())[1] == ()


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"a": {3: {1, 2}}}, r"cannot hold a\.3, of type set; make it a tensor, a number, text"),
        ({"a": [object()]}, r"cannot hold a\.0, of type object"),
        (b"x", r"cannot hold a part, of type bytes"),
    ],
)
def test_what_a_checkpoint_cannot_hold(tree: Any, message: str) -> None:
    """Anything that would not come back as it is is refused by its path."""
    with pytest.raises(ValueError, match=message):
        parts.take_apart(tree)


def test_a_foreign_file(tmp_path: Path) -> None:
    """A safetensors file without a tree is refused."""
    save_file({"x": torch.ones(2)}, tmp_path / "x")
    with pytest.raises(ValueError, match="holds tensors but no tree of them"):
        parts.read(tmp_path / "x")
