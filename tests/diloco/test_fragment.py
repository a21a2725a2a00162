"""Fragments: how parameters are cut into them, how replicas are set back, and what their digests depend on."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from replicas import same_bits
from twophase.diloco.engine import DiLoCo
from twophase.diloco.fragment import Fragment, checksum_of, partition
from twophase.optim.outer import OuterSGD
from twophase.rule import OuterRule

# --- cutting ------------------------------------------------------------------------------------------------------


def least_largest(sizes: list[int], count: int) -> int:
    """The least possible largest part, by trying all cuts."""
    cuts = itertools.combinations(range(1, len(sizes)), count - 1)
    return min(max(sum(sizes[a:b]) for a, b in itertools.pairwise([0, *inner, len(sizes)])) for inner in cuts)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=9), st.data())
def test_parts_are_contiguous_and_even(sizes: list[int], data: st.DataObject):
    """Every parameter is in one part, in order; parts as many as asked for, none empty, the largest least possible."""
    count = data.draw(st.integers(1, len(sizes)))
    named = {f"p{index}": size for index, size in enumerate(sizes)}
    parts = partition(named, count)
    assert list(parts) == [str(number) for number in range(count)]
    assert [name for part in parts.values() for name in part] == list(named)
    assert all(parts.values())
    assert max(sum(named[name] for name in part) for part in parts.values()) == least_largest(sizes, count)


@given(st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=8, unique=True))
def test_the_first_pattern_takes(names: list[str]):
    """A parameter goes to the first fragment whose pattern is found anywhere in its name, in the module's order."""
    patterns = {"both": "ab", "b": "b", "start": "^c", "rest": "."}
    taken = {name: next(key for key, pattern in patterns.items() if re.search(pattern, name)) for name in names}
    expected = {key: [name for name in names if taken[name] == key] for key in patterns}
    busy = {key: pattern for key, pattern in patterns.items() if expected[key]}
    sizes = dict.fromkeys(names, 1)
    assert partition(sizes, busy) == {key: expected[key] for key in busy}
    if idle := next((key for key in patterns if key not in busy), None):
        with pytest.raises(ValueError, match=f"fragment '{idle}' takes no parameter"):
            partition(sizes, patterns)


@pytest.mark.parametrize(
    ("fragments", "words"),
    [
        (0, ["fragments is 0", "between 1 and the number of parameters, 3, or patterns"]),
        (4, ["fragments is 4", "between 1 and the number of parameters, 3, or patterns"]),
        (-1, ["fragments is -1"]),
        (1.5, ["fragments is 1.5"]),
        (True, ["fragments is True"]),
        ("2", ["fragments is '2'"]),
        ({"a": "^a"}, ["'b.x'", "no fragment's pattern", "rest=."]),
        ({}, ["'a.x'", "no fragment's pattern"]),
        ({"a": "a", "again": "a.x", "rest": "."}, ["'again' takes no parameter", "'a.x'", "named like 'a.x'"]),
        ({"a": "(", "rest": "."}, ["'('", "'a'", "no regular expression"]),
        ({"a": 1}, ["pattern 1", "no regular expression"]),
    ],
)
def test_impossible_cuts_say_what_to_do(fragments: object, words: list[str]):
    """More parts than parameters, patterns that are none, idle patterns and parameters left over are refused."""
    with pytest.raises(ValueError, match=r"^partition: ") as caught:
        partition({"a.x": 1, "b.x": 2, "b.y": 3}, fragments)  # type: ignore[arg-type]
    assert all(word in str(caught.value) for word in words), caught.value


# --- what a fragment sends ----------------------------------------------------------------------------------------


@torch.no_grad()
def test_padding_is_sent_as_zeros():
    """What another fragment has left in a shared room is not sent: it would coarsen the scales of int8."""
    fragment, models = fragment_of(torch.float32, replicas=2)
    fragment.gradient.fill_(7.0)
    fragment.write_pseudo_gradient(alone=True)
    expected = torch.zeros_like(fragment.gradient)
    for view, a, p, q in zip(
        fragment.layout.views(expected), fragment.anchor_views, *(model.parameters() for model in models), strict=True
    ):
        view.copy_((a - p.detach()) + (a - q.detach()))
    assert same_bits(fragment.gradient, expected)


# --- setting replicas back ----------------------------------------------------------------------------------------


def fragment_of(dtype: torch.dtype, replicas: int = 1) -> tuple[Fragment, list[nn.Module]]:
    """A fragment after a round, so that it has a momentum buffer; its replicas are elsewhere."""
    torch.manual_seed(0)
    models: list[nn.Module] = [nn.Linear(5, 3).to(dtype) for _ in range(replicas)]
    engine = DiLoCo(models, OuterRule(0.3, 0.9), inner_steps=1, restart=3)
    for _ in range(2):
        with torch.no_grad():
            for model in models:
                for p in model.parameters():
                    p.add_(torch.randn_like(p))
        engine.step()
    with torch.no_grad():
        for model in models:
            for p in model.parameters():
                p.add_(torch.randn_like(p))
    return engine.fragments[0], models


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mixing", [0.0, 0.25, 0.5, 0.9])
def test_restore_mixes(dtype: torch.dtype, mixing: float):
    """Each replica becomes mixing theta + (1 - mixing) a, in its own type; without mixing, the anchor's very bits."""
    fragment, models = fragment_of(dtype, replicas=2)
    anchor = [a.clone() for a in fragment.anchor_views]
    before = [[p.detach().clone() for p in model.parameters()] for model in models]
    if mixing == 0:  # what a replica has reached is then no matter, whatever it is
        with torch.no_grad():
            next(models[1].parameters())[0, 0] = float("nan")
    with torch.no_grad():
        fragment.restore(mixing)
    digits = torch.finfo(dtype).eps
    for model, old in zip(models, before, strict=True):
        for p, theta, a in zip(model.parameters(), old, anchor, strict=True):
            assert p.dtype == dtype
            expected = mixing * theta.double() + (1 - mixing) * a.double()
            scale = float(torch.maximum(theta.double().abs(), a.double().abs()).max())
            torch.testing.assert_close(p.double(), expected, rtol=0, atol=3 * digits * scale)
            assert mixing != 0 or same_bits(p, a.to(dtype))
            assert mixing == 0 or (p.double() - a.double()).norm() > 0.1 * mixing
    assert all(map(same_bits, fragment.anchor_views, anchor))


# --- digests ------------------------------------------------------------------------------------------------------


def flip(tensor: Tensor, element: int, bit: int) -> None:
    """Flip one bit of one element."""
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.dtype.itemsize]
    words = tensor.detach().view(integer).view(-1)
    bits = 8 * tensor.dtype.itemsize
    words[element] ^= -(1 << (bits - 1)) if bit == bits - 1 and integer != torch.uint8 else 1 << bit


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_digests_see_every_bit(dtype: torch.dtype):
    """Equal states have equal digests; one flipped bit of the anchor or the buffer changes that digest and no other."""
    fragment, _ = fragment_of(dtype)
    digest = fragment.digest()
    assert list(digest) == ["anchor", "momentum buffer", "counters"]
    assert all(len(digits) == 16 and int(digits, 16) >= 0 for digits in digest.values())
    assert fragment_of(dtype)[0].digest() == digest
    for change, tensors in (
        ("anchor", fragment.anchor_views),
        ("momentum buffer", [fragment.outer.state[a]["momentum_buffer"] for a in fragment.anchor_views]),
    ):
        for tensor in tensors:
            for element, bit in itertools.product((0, tensor.numel() - 1), range(8 * tensor.dtype.itemsize)):
                flip(tensor, element, bit)
                changed = fragment.digest()
                assert {key for key in digest if digest[key] != changed[key]} == {change}, (change, element, bit)
                flip(tensor, element, bit)
    assert fragment.digest() == digest


HARMS: dict[str, Callable[[Fragment], object]] = {
    "round": lambda fragment: setattr(fragment, "round", fragment.round + 1),
    "step": lambda fragment: fragment.outer.state[fragment.anchor_views[1]].update(step=1),
    **{
        key: lambda fragment, key=key, value=value: fragment.outer.param_groups[0].update({key: value})
        for key, value in {
            "rounds": 7,
            "rounds_since_restart": 0,
            "restarts": 1,
            "restart": "4",
            "policy_state": {"place": 1.0},
            "lr": 0.3000000000000001,
            "momentum": 0.8,
            "nesterov": True,
            "form": "ema",
        }.items()
    },
}


@pytest.mark.parametrize("harm", HARMS)
def test_digests_see_every_counter(harm: str):
    """Round, ages, policy, its memory and the rule: each changes the counters' digest and no other."""
    fragment, _ = fragment_of(torch.float32)
    digest = fragment.digest()
    HARMS[harm](fragment)
    changed = fragment.digest()
    assert {key for key in digest if digest[key] != changed[key]} == {"counters"}


def test_digests_see_a_learning_rate_in_a_tensor():
    """As some optimizers hold it: the last bit shows, which its text would round away."""
    fragment, _ = fragment_of(torch.float32)
    rate = torch.tensor(0.7)
    digests = []
    for value in (rate, rate.clone(), torch.nextafter(rate, torch.tensor(1.0))):
        fragment.outer.param_groups[0]["lr"] = value
        digests.append(fragment.digest()["counters"])
    assert digests[0] == digests[1] != digests[2]


def test_a_buffer_that_is_missing_shows():
    """A fragment without a buffer, or whose two buffers changed places, differs from one with them."""
    fragment, _ = fragment_of(torch.float32)
    digest = fragment.digest()["momentum buffer"]
    weight, bias = fragment.anchor_views
    outer = fragment.outer
    assert isinstance(outer, OuterSGD)
    popped = outer.state[weight].pop("momentum_buffer")
    assert fragment.digest()["momentum buffer"] != digest
    outer.state[weight]["momentum_buffer"] = outer.state[bias]["momentum_buffer"]
    outer.state[bias]["momentum_buffer"] = popped
    assert fragment.digest()["momentum buffer"] != digest


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8],
)
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (7,)])
def test_checksums_of_every_type(dtype: torch.dtype, shape: tuple[int, ...]):
    """Tensors of any type and shape, odd lengths and single numbers too, have a checksum that sees each bit."""
    tensor = (100 * torch.rand(shape, generator=torch.Generator().manual_seed(1))).to(dtype)
    digits = checksum_of(tensor)
    assert checksum_of(tensor.clone()) == digits
    seen = {digits}
    for element, bit in itertools.product(range(tensor.numel()), range(8 * dtype.itemsize)):
        flip(tensor, element, bit)
        seen.add(checksum_of(tensor))
        flip(tensor, element, bit)
    assert len(seen) == 1 + tensor.numel() * 8 * dtype.itemsize
    if len(shape) == 2:
        assert checksum_of(tensor.t().contiguous().t()) == digits  # the values count, not how they lie in memory
    assert checksum_of(torch.zeros(0, dtype=dtype)) not in seen
