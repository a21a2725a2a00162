"""`OuterSGD`: torch.optim.SGD's bits, an oracle in float64, groups and rounds, measures, refusals, DTensors."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from forked import bring, in_processes
from outers import SHAPES, buffers, counters, flat, give, parameters, randoms, run, scalar
from policies import ALL, RULES, Oracle, convert, each_rule
from replicas import same_bits
from twophase.optim.outer_sgd import BUFFER, OuterSGD, angles, dots
from twophase.restart import parse
from twophase.rule import OuterRule

SUPPLIED: dict[str, Any] = {
    "signals": lambda number: {"loss": math.cos(number), "inner_lr": 0.1 * (number % 3), "progress": (number + 1) / 18}
}


def outer_of(params: Any, rule: OuterRule, restart: Any = "never") -> OuterSGD:
    return OuterSGD(params, rule.lr, rule.momentum, nesterov=rule.nesterov, form=rule.form, restart=restart)


def all_same(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    return len(first) == len(second) and all(map(same_bits, first, second))


def tensors(seed: int, *, whole_vectors: bool) -> list[Tensor]:
    """Tensors of many shapes and layouts, zeros of both signs; or those whose sizes are multiples of 16."""
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(seed))
    zeros = torch.tensor([0.0, -0.0, 0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45] * 2)
    if whole_vectors:
        return [draw(16), draw(3, 32), draw(1 << 17, 9), zeros.roll(seed % 8), draw(33)[1:], draw(48).double()]
    odd = [draw(5, 9).t(), draw(6, 4, 10)[:, ::2, ::3], draw(12, 1).expand(12, 1)]
    odd += [draw(2, 3, 4, 5).contiguous(memory_format=torch.channels_last), draw(400, 350).t(), draw(350, 400)]
    some = [draw(shape) for shape in (*SHAPES, (0,), (4, 0, 3), (300_001,), (1 << 20,))]
    return [*some, *odd, zeros.roll(seed % 8), zeros.flip(0)[:13], draw(7).double()]


@pytest.mark.parametrize("path", ["loop", "foreach", "fused"])
@pytest.mark.parametrize(
    ("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)], ids=["plain", "heavy ball", "nesterov"]
)
@pytest.mark.parametrize("measure", [False, True])
def test_has_the_bits_of_torch_sgd(momentum: float, nesterov: bool, path: str, measure: bool):
    """With Never() in sum form, parameters and buffers are torch.optim.SGD's, measured or not, in any layout."""
    is_fused = path == "fused"  # which rounds what fills no vector register in another way, and takes all as contiguous
    draw = partial(tensors, whole_vectors=is_fused)
    params, twins = ([nn.Parameter(x) for x in draw(0)] for _ in range(2))

    def groups(params: list[Any]) -> list[dict[str, Any]]:
        second = {"lr": 0.03, "momentum": momentum / 3}
        return [{"params": params[::2]}, {"params": params[1::4]} | second, {"params": params[3::4], "lr": 1.5}]

    outer = OuterSGD(groups(params), lr=0.7, momentum=momentum, nesterov=nesterov)
    options: Any = {"fused": True} if is_fused else {"foreach": path == "foreach"}
    sgd = torch.optim.SGD(groups(twins), lr=0.7, momentum=momentum, nesterov=nesterov, **options)
    for step in range(1, 6):
        for index, (p, q, g) in enumerate(zip(params, twins, draw(step), strict=True)):
            turned = g.t().contiguous().t() if step % 2 and g.dim() == 2 and not is_fused else g
            rests = not is_fused and ((step + index) % 5 == 0 or step < index % 3)
            p.grad, q.grad = (None, None) if rests else (turned, turned.clone())
        outer.step(measure=measure)
        sgd.step()
        assert len(outer.last_round) == 3 * measure
    assert all_same(params, twins)
    assert all_same(buffers(outer), buffers(sgd)) if momentum else not any(outer.state.values())


POLICIES = ["never", *ALL]


@pytest.mark.parametrize(
    ("rule", "text", "dtype"),
    [
        *((RULES[(n + more) % 4], text, torch.float64) for n, text in enumerate(POLICIES) for more in (0, 3)),
        *((RULES[n % 4], text, (torch.bfloat16, torch.float16)[n // 4 % 2]) for n, text in enumerate(POLICIES)),
        *((OuterRule(0.7, 0.0, True, "ema"), text, torch.float64) for text in ("auto", "3", "test-rising:0.5")),
    ],
)
def test_follows_the_oracle(rule: OuterRule, text: str, dtype: torch.dtype):
    """Every policy has the parameters, buffers, cycles, memories and reports of the equations in float64.

    16-bit parameters are rounded at the end, to half a unit in the last place; inner products may come from elsewhere.
    """
    params, is_wide = parameters(0, [(), (1,), (7,), (3, 16), (33, 17)], dtype), dtype == torch.float64
    policy = convert(RULES[0], parse(text), rule.form)[1]
    outer, oracle = outer_of(params, rule, policy), Oracle(rule, policy, flat(params).numpy())
    keeps, rel = rule.momentum > 0 or policy.takes_steps, 1e-11 if is_wide else 1e-4
    for number in range(18):
        oracle.x, count = flat(params).numpy(), oracle.restarts
        run(outer, [number], measure=True, dots=lambda number: outer.dots() if number % 3 == 1 else None, **SUPPLIED)
        oracle.m *= keeps
        oracle.round(flat([p.grad for p in params]).numpy(), **SUPPLIED["signals"](number))
        unit = 1e-12 if is_wide else torch.finfo(dtype).eps * 2 ** np.floor(np.log2(np.abs(oracle.x) + 1e-4))
        assert (np.abs(flat(params).numpy() - oracle.x) <= 0.51 * unit).all()
        assert is_wide or (flat(params).numpy() != oracle.x).any()
        if keeps:
            assert {m.dtype for m in buffers(outer)} == {torch.float64 if is_wide else torch.float32}
            np.testing.assert_allclose(flat(buffers(outer)), oracle.m, rtol=rel, atol=rel)
        assert keeps or not any(outer.state.values())
        (report,) = outer.last_round
        seen = [report.pseudo_gradient_norm, report.buffer_norm, report.cosine, report.gain]
        assert seen == pytest.approx(oracle.seen, rel=rel, abs=rel)
        assert counters(outer)[:3] == [oracle.rounds, oracle.age, oracle.restarts]
        assert report.restarted == (oracle.restarts > count)
        assert json.loads(counters(outer)[3]) == pytest.approx(oracle.memory, rel=rel)
    assert text == "never" or oracle.restarts or policy.takes_steps


@each_rule
def test_a_group_of_several_types_has_the_bits_of_each_alone(rule: OuterRule):
    """None is rounded as its neighbour is."""
    types = (torch.float32, torch.bfloat16, torch.float64)
    params, alone = ([p for dtype in types for p in parameters(0, [(16,), (5,)], dtype)] for _ in range(2))
    outer = outer_of(params, rule, "soft:2:0.3:0.5")
    others = [outer_of([p], rule, "soft:2:0.3:0.5") for p in alone]
    for number in range(5):
        run(outer, [number])
        for p, q, other in zip(params, alone, others, strict=True):
            q.grad = p.grad
            other.step()
    assert all_same(params, alone)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_hard_restart_forgets_anything(poison: float):
    """The buffer is exactly zero, also where it held NaN or infinity (0 x inf would be NaN)."""
    params = parameters(0)
    outer = OuterSGD(params, 0.1, 0.9, restart=2)
    give(params, [torch.full_like(p, poison) for p in params])
    outer.step()
    assert not flat(buffers(outer)).isfinite().any()
    outer.step()
    assert flat(buffers(outer)).count_nonzero() == 0


def test_a_group_without_gradients_takes_no_round():
    """It keeps its age and the others go on; one gradient is enough; with none at all nothing happens."""
    first, second = parameters(0), parameters(1)
    outer = OuterSGD([{"params": first}, {"params": second}], 0.1, 0.9, restart=2)
    run(outer, range(2), first)
    second[0].grad = torch.ones_like(second[0])
    outer.step()
    assert [(group["rounds"], group["restarts"]) for group in outer.param_groups] == [(3, 1), (1, 0)]
    assert all_same(second[1:], randoms(1)[1:])
    outer.zero_grad()
    assert outer.step(lambda: torch.is_grad_enabled() and 9.0, measure=True) == 9.0
    assert ([group["rounds"] for group in outer.param_groups], outer.last_round) == ([3, 1], [])


@pytest.mark.parametrize(("restart", "remaining"), [("2", 0.0), ("soft:2:0.25:0.5", 0.25)])
def test_parameters_without_a_gradient_restart_with_their_group(restart: str, remaining: float):
    """What rests in the round of a restart begins the new cycle like the others, with a pseudo-gradient of 0."""
    a, b, c = scalar(0.0), scalar(0.0), scalar(0.0)
    outer = OuterSGD([a, b, c], lr=0.1, momentum=0.9, restart=restart)
    a.grad, b.grad = torch.ones(1), torch.ones(1)
    outer.step()
    b.grad = None
    outer.step()
    assert (outer.state[b][BUFFER].item(), b.item()) == (remaining, pytest.approx(-0.1))
    assert BUFFER not in outer.state.get(c, {})


def test_groups():
    """They are named, may come late, have the constructor's values or their own, and may get another policy."""
    numbers: Any = {"lr": np.float32(0.1), "momentum": 0.9, "restart": np.int64(2)}
    outer = OuterSGD(nn.Linear(3, 2).named_parameters(), **numbers, nesterov=True)
    run(outer, range(3))
    for own in ({"restart": parse("norm:0.5"), "form": "ema"}, {"restart": "5", "momentum": 0.0}, {}):
        outer.add_param_group({"params": [("more", scalar(1.0))]} | own)
    outer.param_groups[0]["restart"] = "3"
    assert outer.needs == {"pseudo_gradient_norm", "buffer_norm"}
    run(outer, range(3, 6))
    names = ("restart", "form", "nesterov", "momentum", "rounds", "restarts")
    settings = [" ".join(str(group[name]) for name in names) for group in outer.param_groups]
    first, second, *rest = settings
    assert (first, second[:-1]) == ("3 sum True 0.9 6 2", "norm:0.5 ema True 0.9 3 ")
    assert rest == ["5 sum True 0.0 3 0", "2 sum True 0.9 3 1"]
    assert outer.param_groups[0]["param_names"] == ["weight", "bias"]


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)])
def test_the_first_round(momentum: float, nesterov: bool):
    """A round is one also with g = 0, as hivemind takes it; a first step at lr 0, torch's own, is none."""
    x, y = scalar(1.0), scalar(1.0)
    outer, twin = (OuterSGD([p], 0.7, momentum, nesterov=nesterov, restart=3) for p in (x, y))
    x.grad, outer.param_groups[0]["lr"] = torch.zeros(1), 0.0
    outer.step()
    assert (counters(outer), BUFFER in outer.state[x]) == (counters(twin), momentum > 0)
    outer.param_groups[0]["lr"] = 0.7
    for number, g in enumerate((0.0, 1.0, 1.0, 1.0), start=1):
        for p, each in ((x, outer), (y, twin)):
            p.grad = torch.full((1,), g)
            each.step()
            assert counters(each)[:3] == [number, number % 3, number // 3]
    assert same_bits(x, y)
    engine = OuterSGD([x], 0.0, momentum)
    run(engine, [0], measure=True)  # as an engine steps, which torch does not
    assert counters(engine)[0] == 1


def test_what_takes_no_part_is_not_measured():
    """A parameter that joins later has a buffer of 0, and a buffer that is left over from another momentum is none."""
    params = parameters(0)
    outer = OuterSGD(params, 0.1, 0.9)
    run(outer, [0], params[:3])
    kept = float(flat([outer.state[p][BUFFER] for p in params[:3]]).norm())
    run(outer, [1], measure=True)
    assert outer.last_round[0].buffer_norm == pytest.approx(kept)
    outer.param_groups[0]["momentum"] = 0.0
    run(outer, [2], measure=True)
    (report,) = outer.last_round
    assert (report.buffer_norm, report.cosine, report.gain) == (0, 0, 0.1)


@pytest.mark.parametrize(
    "shapes", [[(70,)] * 3000, [(1 << 20,), (1 << 21,), (3,)], [(0,), (1 << 17,), (5, 7)]], ids=["many", "long", "few"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inner_products(shapes: list[Any], dtype: torch.dtype):
    """Of many small and of few large tensors, in any layout, with and without buffers: those of float64 to 1e-5."""
    g = [*(x.abs() for x in randoms(0, shapes, dtype)), torch.rand(500, 600).t().to(dtype)]
    m = [*(x.abs().float() for x in randoms(1, shapes, dtype)), torch.rand(600, 500)]
    a, b = flat(g), flat(m)
    assert dots(g, m) == pytest.approx((float(a @ a), float(b @ b), float(a @ b)), rel=1e-5)
    assert dots(g, [None] * len(g)) == pytest.approx((float(a @ a), 0.0, 0.0), rel=1e-5)


def test_angles_at_the_edges():
    """Zero vectors have cosine 0; of parallel ones it is at most 1, also where squares leave the range; NaN shows."""
    assert [angles(values)[2] for values in ((4.0, 0.0, 0.0), (0.0, 4.0, 0.0))] == [0, 0]
    for size, sign in itertools.product((1e-150, 1e-90, 1.0, 1e90, 1e150), (1, -1)):
        a = torch.tensor([3.0, 4.0], dtype=torch.float64) * size
        *norms, cosine = angles(dots([a], [0.1 * sign * a]))
        assert norms == pytest.approx([5 * size, 0.5 * size])
        assert cosine == pytest.approx(sign)
        assert abs(cosine) <= 1
    poisoned = angles(dots([torch.tensor([1.0, math.nan])], [torch.ones(2)]))
    assert [math.isnan(value) for value in poisoned] == [True, False, True]


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        *(("lr", {"lr": value}) for value in (-0.1, math.nan, "0.1")),
        *(("momentum", {"momentum": value}) for value in (1.0, -0.1)),
        *(("form", {"form": "mean"}), ("nesterov", {"nesterov": "ema"})),
        *(("restart", {"restart": value}) for value in ("sometimes", 0)),
        *((name, {name: 0.1}) for name in ("weight_decay", "dampening", "maximize")),
    ],
)
def test_impossible_values_are_refused_by_name(name: str, arguments: dict[str, Any]):
    """At construction and for one group, which can be added once it is corrected."""
    with pytest.raises(ValueError, match=name):
        OuterSGD([{"params": [scalar(0.0)]} | arguments], lr=0.1)
    outer, more = OuterSGD([scalar(0.0)], lr=0.5, momentum=0.9), scalar(0.0)
    with pytest.raises(ValueError, match=name):
        outer.add_param_group({"params": [more]} | arguments)
    outer.add_param_group({"params": [more]})
    assert len(outer.param_groups) == 2


def test_a_round_that_one_group_refuses_has_happened_in_none():
    """Whatever the second group's policy lacks, the first has not moved either; the next call is the same round."""
    params, twins = parameters(0), parameters(0)
    outer, twin = (
        OuterSGD([{"params": each[:1]}, {"params": each[1:], "restart": "test-rising:0.5"}], 0.5, 0.9)
        for each in (params, twins)
    )
    for number in range(3):
        with pytest.raises(KeyError, match="loss"):
            run(outer, [number])
        run(outer, [number], **SUPPLIED)
        run(twin, [number], **SUPPLIED)
    assert all_same(params, twins)
    assert counters(outer) == counters(twin)


def test_divergence_is_reported():
    """A need that is not finite is named, by a warning where no report could; the rule's own update is taken."""
    params, twins = parameters(0), parameters(0)
    outer, plain = OuterSGD(params, 0.1, 0.9, restart="norm:0.1"), OuterSGD(twins, 0.1, 0.9)
    for each, of_each in ((outer, params), (plain, twins)):
        give(of_each, [torch.full_like(p, math.inf) for p in of_each])
        each.step()
    (seen,) = outer.last_round
    assert (seen.not_finite, outer.param_groups[0]["restarts"]) == (("pseudo_gradient_norm",), 0)
    assert all_same(params, twins)
    outer.param_groups[0]["restart"] = "test-rising:0.0"
    with pytest.warns(RuntimeWarning, match="loss"):
        outer.step(signals={"loss": math.nan})


MIXED = [((7, 3), "shard 0"), ((4, 6), "shard 1"), ((5,), "replicate"), ((), "plain"), ((6, 2), "plain")]


def distributed_run(wrap: Callable[[Tensor, str], Tensor], text: str) -> dict[str, Any]:
    """Rounds on parameters that `wrap` makes of whole tensors, which come back whole with counters and angles."""
    shapes, kinds = [shape for shape, _ in MIXED], [kind for _, kind in MIXED]
    params = [nn.Parameter(wrap(x, how)) for x, how in zip(randoms(0, shapes), kinds, strict=True)]
    outer, seen = OuterSGD(params, 0.1, 0.9, nesterov=True, restart=text), []
    for number in range(10):
        for p, g, how in zip(params, randoms(number + 1, shapes), kinds, strict=True):
            p.grad = wrap(g, how)
        outer.step(measure=True)
        seen += [outer.last_round[0].cosine, outer.last_round[0].gain]
    other = OuterSGD(params, 0.1, 0.9)
    other.load_state_dict(outer.state_dict())  # shards stay shards
    for p, m in zip(params, buffers(other), strict=True):
        assert getattr(m, "placements", None) == getattr(p, "placements", None)
    sharded: list[Any] = [*params, *buffers(other)]
    whole = [t.full_tensor() if hasattr(t, "full_tensor") else t for t in sharded]
    return {"tensors": [t.detach().clone() for t in whole], "seen": seen, "counters": counters(outer)}


def of_a_process(_: int) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))

    def wrap(tensor: Tensor, how: str) -> Tensor:
        kind, *dim = how.split()
        place = Shard(int(dim[0])) if kind == "shard" else Replicate()
        return tensor if how == "plain" else distribute_tensor(tensor, mesh, [place])

    return {text: distributed_run(wrap, text) for text in ("3", "gradient", "auto")}


@pytest.mark.dist
def test_dtensors_in_two_processes(tmp_path: Path):
    """Two processes with half of each shard step like the whole tensor and decide alike, adaptive restarts included."""
    for answers in in_processes(__file__, tmp_path, 2):
        for text, actual in answers.items():
            whole = distributed_run(lambda x, _: x, text)
            torch.testing.assert_close(actual["tensors"], whole["tensors"], rtol=1e-13, atol=1e-13)
            assert actual["seen"] == pytest.approx(whole["seen"], rel=1e-9, abs=1e-12)
            assert actual["counters"][:3] == whole["counters"][:3]
            assert text == "auto" or whole["counters"][2] >= 2


if __name__ == "__main__":
    bring(of_a_process, 2)
