"""The arithmetic of an outer step: torch.optim.SGD's bits on every path, inner products, and restarts of tensors."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from outers import SHAPES, buffers, flat, give, parameters, randoms
from policies import each_rule
from replicas import same_bits
from twophase.optim import functional
from twophase.optim.functional import Update, outer_step_
from twophase.optim.outer import OuterSGD
from twophase.optim.products import Angles, dots
from twophase.restart import Step
from twophase.rule import OuterRule

PIECES = 300_001  # elements: three internal pieces of 2^17 and a tail that no vector register fills
LENGTHS = [*range(34), 63, 64, 65, 127, 1000, 4097, 2**17 - 1, 2**17, PIECES]


def all_same(outer_params: Sequence[Tensor], sgd_params: Sequence[Tensor]) -> bool:
    return all(map(same_bits, outer_params, sgd_params)) and len(outer_params) == len(sgd_params)


def sgd_tensors(seed: int) -> list[Tensor]:
    """Many shapes: scalar, empty, tiny, transposed, sliced, larger than an internal piece, and zeros of both signs."""
    generator = torch.Generator().manual_seed(seed)
    draw = functools.partial(torch.randn, generator=generator)
    zeros = torch.tensor([0.0, -0.0, 0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45])
    return [
        *(draw(shape) for shape in SHAPES),
        draw(()),
        draw(0),
        draw(4, 0, 3),
        draw(5, 9).t(),
        draw(6, 4, 10)[:, ::2, ::3],
        draw(12, 1).expand(12, 1),
        draw(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        draw(PIECES),
        draw(400, 350),
        draw(350, 400).t(),
        zeros.roll(seed % 8),
        zeros.flip(0),
    ]


@pytest.mark.parametrize("foreach", [False, True], ids=["loop", "foreach"])
@pytest.mark.parametrize(
    ("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)], ids=["plain", "heavy ball", "nesterov"]
)
def test_equals_torch_sgd_bit_for_bit(momentum: float, nesterov: bool, foreach: bool):
    """With Never() in sum form, parameters and buffers are torch.optim.SGD's, however gradients lie in memory."""
    outer_params, sgd_params = ([nn.Parameter(x) for x in sgd_tensors(0)] for _ in range(2))

    def groups(params: list[Any]) -> list[dict[str, Any]]:
        second = {"lr": 0.03, "momentum": momentum / 3}
        return [{"params": params[::2]}, {"params": params[1::4]} | second, {"params": params[3::4], "lr": 1.5}]

    outer = OuterSGD(groups(outer_params), lr=0.7, momentum=momentum, nesterov=nesterov)
    sgd = torch.optim.SGD(groups(sgd_params), lr=0.7, momentum=momentum, nesterov=nesterov, foreach=foreach)
    for step in range(1, 9):
        for index, (p, q, g) in enumerate(zip(outer_params, sgd_params, sgd_tensors(step), strict=True)):
            turned = g.t().contiguous().t() if step % 2 and g.dim() == 2 else g
            p.grad, q.grad = (None, None) if (step + index) % 5 == 0 or step < index % 3 else (turned, turned.clone())
        outer.step()
        sgd.step()
    assert all_same(outer_params, sgd_params)
    if momentum:
        assert all_same(buffers(outer), buffers(sgd))


@pytest.fixture
def fused(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The numbers of tensors in calls of torch's fused kernel as it is; or it rounds otherwise, is gone, or changed."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2 if "2" in request.param else 1)
    kernel, calls = torch._fused_sgd_, []

    def observed(params: list[Tensor], *rest: Any, **options: Any) -> None:
        kernel(params, *rest, **options)
        if request.param == "inexact":
            params[0][:1] *= 1 + torch.finfo(params[0].dtype).eps
        else:
            calls.append(len(params))

    def changed(params: list[Tensor]) -> None: ...

    if request.param == "missing":
        monkeypatch.delattr(torch, "_fused_sgd_")
    else:
        monkeypatch.setattr(torch, "_fused_sgd_", changed if request.param == "changed" else observed)
    functional.fused_is_exact.cache_clear()
    yield calls
    functional.fused_is_exact.cache_clear()
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("fused", "nesterov", "form", "dtype"),
    [
        *(
            ("fused", nesterov, form, dtype)
            for nesterov in (False, True)
            for form in ("sum", "ema")
            for dtype in (torch.float32, torch.float64)
        ),
        *(("fused, 2 threads", nesterov, "sum", torch.float32) for nesterov in (False, True)),
        *((kernel, True, "sum", torch.float32) for kernel in ("inexact", "missing", "changed")),
    ],
    indirect=["fused"],
)
def test_every_path_has_the_bits_of_torch_sgd(nesterov: bool, form: Any, dtype: torch.dtype, fused: list[int]):
    """Any length and place, fresh or not, whatever the kernel: torch.optim.SGD's bits, in EMA form the plain path's."""

    def draw(seed: int) -> list[Tensor]:  # the second half begins between vectors
        generator = torch.Generator().manual_seed(seed)
        long = [torch.randn(length + 1, dtype=dtype, generator=generator) for length in LENGTHS]
        return [x[1:] if number % 2 else x[:-1] for number, x in enumerate(long)]

    outer_params, plain = ([x.clone() for x in draw(0)] for _ in range(2))
    sgd_params = [nn.Parameter(x.clone()) for x in draw(0)]
    momenta, plain_momenta = ([torch.full_like(x, math.nan) for x in outer_params] for _ in range(2))
    sgd = torch.optim.SGD(sgd_params, lr=0.7, momentum=0.9, nesterov=nesterov, foreach=True)
    for step in range(2):
        gradients = draw(step + 1)
        update = Update(0.7, 0.9, nesterov, form, fresh=step == 0)
        outer_step_(outer_params, gradients, momenta, update)
        functional.in_pieces_(plain, gradients, plain_momenta, update, {})
        give(sgd_params, gradients)
        sgd.step()
    assert all_same(outer_params, plain)
    assert all_same(momenta, plain_momenta)
    if form == "sum":
        assert all_same(outer_params, sgd_params)
        assert all_same(momenta, buffers(sgd))
    # On a machine where the kernel rounds in another way, not taking it is right.
    exact = functional.fused_is_exact(dtype, Update(0.7, 0.9, nesterov, form))
    assert (max(fused, default=0) > 1) == exact  # the probe has one tensor
    assert exact <= (form == "sum" or not nesterov)


class Other(Tensor):
    """A subclass, which may do anything."""


@pytest.mark.parametrize(
    ("tensor", "rule", "lengths"),
    [
        (torch.ones(5, 7), {}, [32]),
        (torch.ones(5, 7), {"nesterov": False}, [32]),
        (torch.ones(5, 7), {"fresh": True}, [32]),
        (torch.ones(16).double(), {}, [16]),
        (torch.ones(48), {"form": "ema", "nesterov": False}, [48]),
        (torch.ones(15), {}, []),
        (torch.ones(0), {}, []),
        (torch.ones(16, 32).t(), {}, []),
        (torch.ones(16).as_subclass(Other), {}, []),
        (torch.ones(16).bfloat16(), {}, []),
        (torch.ones(16), {"form": "ema"}, []),
        (torch.ones(16), {"form": "ema", "nesterov": False, "fresh": True}, []),
        (torch.ones(16), {"momentum": 0.0}, []),
    ],
)
def test_the_fused_kernel_gets_only_what_it_takes(
    monkeypatch: pytest.MonkeyPatch, tensor: Tensor, rule: dict[str, Any], lengths: list[int]
):
    """Plain contiguous float32 and float64 tensors, up to a multiple of 16 elements, and the rules that it knows."""
    update = Update(**{"lr": 0.7, "momentum": 0.9, "nesterov": True, "form": "sum"} | rule)
    exact = functional.fused_is_exact(tensor.dtype, update)  # cached, before the kernel is replaced
    seen: list[int] = []
    monkeypatch.setattr(torch, "_fused_sgd_", lambda params, *_, **__: seen.extend(p.numel() for p in params))
    momenta = torch.ones_like(tensor, dtype=functional.buffer_dtype(tensor))
    outer_step_([tensor.clone()], [tensor], [momenta], update)
    assert seen == (lengths if exact else [])


def test_equals_torch_sgd_under_a_scheduler():
    """Learning-rate schedulers drive it as they drive torch.optim.SGD, momentum cycling included, in bits."""
    outer_params, sgd_params = parameters(0, dtype=torch.float32), parameters(0, dtype=torch.float32)
    outer, sgd = OuterSGD(outer_params, 0.7, 0.9), torch.optim.SGD(sgd_params, 0.7, 0.9)
    schedules = [torch.optim.lr_scheduler.OneCycleLR(each, max_lr=0.5, total_steps=20) for each in (outer, sgd)]
    rates = set()
    for step in range(20):
        give(outer_params, randoms(step + 1, dtype=torch.float32))
        give(sgd_params, randoms(step + 1, dtype=torch.float32))
        outer.step()
        sgd.step()
        if step < 19:
            for schedule in schedules:
                schedule.step()
        rates.add((outer.param_groups[0]["lr"], outer.param_groups[0]["momentum"]))
        assert all_same(outer_params, sgd_params)
    assert len(rates) >= 15


# --- 16 bits, and what a policy's step does to tensors ----------------------------------------------------------------


@each_rule
def test_16_bit_step_rounds_once(rule: OuterRule):
    """A bfloat16 parameter takes the step of float32 arithmetic on its float32 buffer, rounded at the end."""
    x = nn.Parameter(randoms(0, [(50,)], torch.bfloat16)[0])
    outer = OuterSGD.from_rule([x], rule)
    m = torch.zeros(50)
    b, w = rule.momentum, 1.0 if rule.form == "sum" else 1 - rule.momentum
    for number in range(1, 8):
        before = x.detach().float()
        x.grad = randoms(number, [(50,)], torch.bfloat16)[0]
        outer.step()
        m = b * m + w * x.grad.float()
        step = w * x.grad.float() + b * m if rule.nesterov else m
        torch.testing.assert_close(outer.state[x]["momentum_buffer"], m, rtol=1e-6, atol=1e-7)
        # One rounding to a significand of 8 bits: half a unit in the last place, at most 2^-8 of the value.
        torch.testing.assert_close(x.detach().float(), before - rule.lr * step, rtol=2**-7.99, atol=1e-6)


@pytest.mark.parametrize("step", [(1.0, 0.0), (0.0, 0.3), (0.7, 0.21)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_step_rounds_16_bit_parameters_once(dtype: torch.dtype, step: tuple[float, float]):
    """`x - a g - b m` of 16-bit parameters is the exact one rounded to their type: half a unit in the last place."""
    params, gradients, momenta = randoms(0, dtype=dtype), randoms(1, dtype=dtype), randoms(2, dtype=torch.float32)
    rows = zip(params, gradients, momenta, strict=True)
    expected = [x.double() - step[0] * g.double() - step[1] * m.double() for x, g, m in rows]
    outer_step_(params, gradients, momenta, Update(9.0, 0.9, True, "sum", step=Step(*step)))
    for x, exact in zip(params, expected, strict=True):
        unit = torch.finfo(dtype).eps * 2 ** torch.floor(torch.log2(exact.abs()))
        assert bool(((x.double() - exact).abs() <= 0.501 * unit).all())
        assert x.numel() == 1 or not bool((x.double() == exact).all())  # there was something to round


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_a_step_has_the_bits_of_each_type_alone(dtypes: tuple[torch.dtype, torch.dtype]):
    """In a group of several types none is rounded as its neighbour is."""
    update = Update(9.0, 0.9, True, "sum", step=Step(0.7, 0.21))
    columns = [[*randoms(seed, dtype=dtypes[0]), *randoms(seed + 5, dtype=dtypes[1])] for seed in range(2)]
    columns.append([m.float() for m in randoms(2) * 2])
    alone = [[column[index].clone() for column in columns] for index in range(len(columns[0]))]
    outer_step_(columns[0], columns[1], columns[2], update)
    for index, (x, g, m) in enumerate(alone):
        outer_step_([x], [g], [m], update)
        assert same_bits(x, columns[0][index])


@pytest.mark.parametrize("along_g", [1.0, 0.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_step_that_keeps_nothing_of_the_buffer(dtype: torch.dtype, along_g: float):
    """`x <- x - a g, m <- g`, as of `auto` where |g| has not shrunk: SGD's bits, and nothing of the old m is read."""
    outer_params, plain, gradients = randoms(0, dtype=dtype), parameters(0, dtype=dtype), randoms(1, dtype=dtype)
    momenta = [torch.full_like(g, math.nan, dtype=torch.promote_types(dtype, torch.float32)) for g in gradients]
    step = Step(along_g, 0.0, mix=(0.0, 1.0))
    outer_step_(outer_params, gradients, momenta, Update(9.0, 0.9, True, "ema", step=step))
    give(plain, gradients)
    torch.optim.SGD(plain, lr=along_g).step()
    assert all_same(outer_params, plain)
    assert all(torch.equal(m, g.to(m.dtype)) for m, g in zip(momenta, gradients, strict=True))


@each_rule
def test_parameters_on_several_devices(rule: OuterRule):
    """One group over several devices steps as torch.optim.SGD does; meta stands in for the second one."""
    on_cpu, on_meta = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3, device="meta"))
    alone = nn.Parameter(torch.ones(3))
    outers = [OuterSGD.from_rule([on_cpu, on_meta], rule), OuterSGD.from_rule([alone], rule)]
    for _ in range(3):
        for p in (on_cpu, on_meta, alone):
            p.grad = torch.full_like(p, 0.5)
        for outer in outers:
            outer.step()
    assert same_bits(on_cpu, alone)


# --- inner products ---------------------------------------------------------------------------------------------------


def test_angles_at_the_edges():
    """No buffers and zero buffers count as m = 0; parallel vectors have |cosine| at most 1; NaN shows."""
    g = randoms(0, SHAPES, torch.float32)
    norm = pytest.approx(float(flat(g).norm()), rel=1e-6)
    zeros = [torch.zeros_like(x) for x in g]
    for nothing in ([], zeros):
        seen = Angles.of(dots(g, nothing))
        assert (seen.pseudo_gradient_norm, seen.buffer_norm, seen.cosine) == (norm, 0, 0)
    assert Angles.of(dots(zeros, g)).cosine == 0
    for seed in range(20):
        x = randoms(seed, [(1000,)], torch.float32)
        for factor, sign in ((0.3, 1), (-7.1, -1)):
            cosine = Angles.of(dots(x, [factor * x[0]])).cosine
            assert cosine == pytest.approx(sign, abs=1e-6)
            assert abs(cosine) <= 1
    for size, sign in itertools.product((1e-150, 1e-90, 1e90, 1e150), (1, -1)):  # squares whose product is no double
        a = torch.tensor([3.0, 4.0], dtype=torch.float64) * size
        assert Angles.of(dots([a], [sign * a])).cosine == pytest.approx(sign)
    poisoned = Angles.of(dots([torch.tensor([1.0, math.nan])], [torch.ones(2)]))
    assert math.isnan(poisoned.pseudo_gradient_norm)
    assert math.isnan(poisoned.cosine)
