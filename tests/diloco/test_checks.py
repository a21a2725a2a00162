"""Checks: digests depend on every bit; each mistake of a loop is found, and a sound loop has none."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from diloco.scenarios import NESTEROV, Scenario, shift, start
from twophase.diloco.digest import digest, digest_on_device, of_optimizer
from twophase.diloco.engine import DiLoCo
from twophase.restart import Never, Periodic

TYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8]
each_digest = pytest.mark.parametrize("of", [digest, digest_on_device])


@each_digest
@given(
    st.lists(st.tuples(st.sampled_from(TYPES), st.integers(1, 70)), min_size=1, max_size=4),
    st.integers(0, 2**30),
    st.integers(0, 2**30),
)
def test_a_single_bit_changes_the_digest(
    of: Callable[[Sequence[Tensor]], str], kinds: list[tuple[torch.dtype, int]], which: int, bit: int
) -> None:
    """Each bit of tensors of any types and sizes counts; the digest is of the bits alone, wherever they lie."""
    generator = torch.Generator().manual_seed(bit)
    tensors = [torch.randint(0, 255, (n * d.itemsize,), generator=generator).byte().view(d) for d, n in kinds]
    before = of(tensors)
    assert len(before) == 16
    offset = [torch.cat([t.new_zeros(1), t])[1:] for t in tensors]  # no multiple of eight bytes
    assert of(offset) == of([t.detach().clone() for t in tensors]) == before
    touched = tensors[which % len(tensors)].view(torch.uint8)
    touched[bit // 8 % len(touched)] ^= 1 << bit % 8
    assert of(tensors) != before


@each_digest
def test_the_order_of_tensors_changes_the_digest(of: Callable[[Sequence[Tensor]], str]) -> None:
    """So does that of their elements; transposed tensors count as they read."""
    a, b, word = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]), torch.tensor([1, 2, 3])
    digests = [of([a, b]), of([b, a]), of([a.flip(0), b]), of([word]), of([word.flip(0)]), of([word[:2], word[2:]])]
    assert len(set(digests[:5])) == 5
    assert of([torch.ones(3, 2).cumsum(0).t()]) == of([torch.ones(3, 2).cumsum(0).t().contiguous()])
    assert of([torch.tensor(1.0), torch.empty(0)]) == of([torch.tensor(1.0), torch.empty(0)]) != of([torch.tensor(2.0)])


def test_objects_of_an_optimizer_count_by_what_they_say() -> None:
    """Not by their address, which differs between ranks."""
    owns, x = (object(), object(), Periodic(2), Never()), nn.Parameter(torch.ones(1))
    first, second, *others = (of_optimizer(torch.optim.SGD([{"params": [x], "own": own}]))[1] for own in owns)
    assert first == second
    assert len({first, *others}) == 3


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_digest_of_a_gpu() -> None:
    """It is that of the same operations on a CPU, also where a step count lies on the CPU."""
    tensors = [torch.randn(1000), torch.randn(7).bfloat16()]
    step = torch.tensor(3.0)
    assert digest([step, *(t.cuda() for t in tensors)]) == digest_on_device([step, *tensors])


def model(*, norm: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), *([nn.BatchNorm1d(8)] if norm else []), nn.Linear(8, 1))


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1)


def rounds(engine: DiLoCo, count: int) -> None:
    """Rounds in which the replicas move, each in its own direction."""
    for _ in range(count * engine.inner_steps):
        for number, module in enumerate(engine.replicas):
            shift(module, by=number + 1.0)
        engine.step()


def test_the_same_batches_are_noticed(caplog: pytest.LogCaptureFixture) -> None:
    """Replicas that move alike are warned of, once; one number is no evidence, and signs are none."""
    with caplog.at_level(logging.WARNING, "twophase"):
        for options in ({}, {"restart": 1}):
            run = start(Scenario(), [0, 0, 0], **options)
            run.go(range(8))
            (finding,) = run.engine.check()
            assert "alike" in finding
    assert len(caplog.records) == 2
    for size in (1, 8):  # as by Lion, or a first step of AdamW on large batches
        engine = DiLoCo([nn.Linear(size, size, bias=False) for _ in range(2)], NESTEROV, inner_steps=1)
        shift(*engine.replicas)
        engine.step()
        assert engine.check() == ()


def test_rounds_without_progress_are_noticed(caplog: pytest.LogCaptureFixture) -> None:
    """A loop that steps the inner optimizer of a copy is warned of, and told why."""
    module = model()
    other = copy.deepcopy(module)
    shift(other)
    engine, inner = DiLoCo(module, NESTEROV, inner_steps=1), sgd(other)
    with caplog.at_level(logging.WARNING, "twophase"):
        reports = [engine.step() for _ in range(2)]
    assert len(caplog.records) == 1
    for report in reports:
        assert report is not None
        assert math.isnan(report.gain)
    assert len(engine.check(inner)) == 3  # nothing moves, and parameters are missing and foreign


def test_what_begins_or_ceases_to_train_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """By the next round, without `check`: replicas would part in silence, and momentum moves what is frozen."""
    modules = [model() for _ in range(2)]
    for module in modules:
        module[0].requires_grad_(requires_grad=False)
    engine = DiLoCo(modules, NESTEROV, inner_steps=4)
    for module in modules:
        module[1] = nn.Sequential(module[1])  # the same parameters by other names
    rounds(engine, 2)
    (finding,) = engine.check()
    assert "frozen parameters 0.weight" in finding  # which these rounds move, too
    caplog.clear()
    for module in modules:
        module[0].requires_grad_(requires_grad=True)
        module[1].requires_grad_(requires_grad=False)
    rounds(engine, 2)
    unfrozen, frozen = caplog.messages  # once each
    assert "0.weight, 0.bias" in unfrozen
    assert "1.weight, 1.bias" in frozen
    caplog.clear()
    module = model()
    engine = DiLoCo(module, NESTEROV, inner_steps=4)
    module[1] = copy.deepcopy(module[1])  # the engine goes on with the parameters of the one that is gone
    rounds(engine, 1)
    assert "1.weight, 1.bias" in caplog.messages[0]


def test_places_of_parameters_in_inner_optimizers() -> None:
    """A replica may have several, and frozen parameters do no harm in one; each parameter is in one place of one."""
    module = model()
    module[0].requires_grad_(requires_grad=False)
    engine, parts = DiLoCo(module, NESTEROV, inner_steps=4), [torch.optim.SGD([p]) for p in module[1].parameters()]
    assert engine.check(sgd(module)) == engine.check(parts) == ()
    twice = sgd(module)
    twice.param_groups.append(twice.param_groups[0] | {"params": [module.get_parameter("1.weight")]})
    many = nn.ParameterDict({name: nn.Parameter(torch.zeros(1)) for name in "abcdef"})
    pair = start("heavy ball")
    for word, (finding,) in {
        "1.bias": engine.check(parts[:1]),
        "0.bias": engine.check([sgd(module), torch.optim.SGD([module.get_parameter("0.bias")])]),
        "1.weight": engine.check(twice),
        "b, c, d, e": DiLoCo(many, NESTEROV, inner_steps=4).check(torch.optim.SGD([many["a"]])),
        "of replica 1": pair.engine.check(sgd(pair.models[0]))[:1],
    }.items():
        assert word in finding


@pytest.mark.parametrize("buffers", ["local", "mean"])
def test_buffers_are_told_or_averaged(buffers: str, caplog: pytest.LogCaptureFixture) -> None:
    """Floats that steps change are named, in the first round too; with "mean" they are the replicas', in float64."""
    modules = [model(norm=True) for _ in range(3)]
    for module in modules:
        module.register_buffer("frequencies", torch.ones(2))
    engine = DiLoCo(modules, NESTEROV, inner_steps=1, buffers=buffers)
    for number, module in enumerate(modules):
        module(torch.randn(16 + number, 4, generator=torch.Generator().manual_seed(number)))
        module.get_buffer("1.num_batches_tracked").fill_(number)
    before = [module.get_buffer("1.running_var").double() for module in modules]
    rounds(engine, 1)
    after = [module.get_buffer("1.running_var") for module in modules]
    assert [int(module.get_buffer("1.num_batches_tracked")) for module in modules] == [0, 1, 2]
    expected = [torch.stack(before).sum(0) / 3] * 3 if buffers == "mean" else before
    assert all(torch.equal(b, e.float()) for b, e in zip(after, expected, strict=True))
    findings = engine.check()
    assert len(findings) == len(caplog.messages) == (buffers == "local")
    assert all("1.running_var" in finding and "frequencies" not in finding for finding in findings)


def test_buffers_that_have_no_mean() -> None:
    """Replicas with buffers of their own are refused; without buffers there is nothing to do."""
    with pytest.raises(ValueError, match="buffers"):
        DiLoCo([model(), model().append(nn.BatchNorm1d(1, affine=False))], NESTEROV, inner_steps=1, buffers="mean")
    rounds(DiLoCo([model(), model()], NESTEROV, inner_steps=1, buffers="mean"), 1)
