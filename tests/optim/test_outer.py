"""`OuterSGD`: equal to plain arithmetic; reductions; its groups, its rounds and their reports; what it refuses."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from outers import SHAPES, flat, give, parameters, randoms, run, scalar
from policies import SCHEDULED, each_rule, simulate
from reference_outer import ReferenceOuter
from replicas import same_bits, through_file
from twophase.optim.outer import OuterSGD
from twophase.optim.products import dots
from twophase.restart import Restart, RestartPolicy, RoundSignal, State, parse
from twophase.rule import OuterRule

each_policy = pytest.mark.parametrize("policy", ["never", *SCHEDULED])


def ends(*settings: tuple[OuterRule, Any], rounds: int = 12, dtype: torch.dtype = torch.float32) -> list[list[Tensor]]:
    """Where runs of several rules and policies end, on the same pseudo-gradients."""
    runs = [parameters(0, dtype=dtype) for _ in settings]
    for params, (rule, policy) in zip(runs, settings, strict=True):
        run(OuterSGD.from_rule(params, rule, policy), range(rounds))
    return runs


@each_rule
@each_policy
def test_equals_the_printed_equations(rule: OuterRule, policy: str):
    """On one float64 number, optimizer and slow twin follow the equations of house.md, x and m, over 20 rounds."""
    gradients = [math.sin(t * t) + 0.3 for t in range(1, 21)]
    param = nn.Parameter(torch.tensor([1.5], dtype=torch.float64))
    outer, twin = OuterSGD.from_rule([param], rule, policy), ReferenceOuter(param, rule, parse(policy))
    for g, expected in zip(gradients, simulate(rule, gradients, parse(policy), 1.5), strict=True):
        param.grad = torch.tensor([g], dtype=torch.float64)
        outer.step()
        twin.round(param.grad)
        for x, m in ((param, outer.state[param]["momentum_buffer"]), (twin.x, twin.m)):
            assert (x.item(), m.item()) == pytest.approx(expected, rel=1e-13, abs=1e-14)


# --- reductions -------------------------------------------------------------------------------------------------------


@each_rule
@each_policy
def test_momentum_zero_is_plain_sgd(rule: OuterRule, policy: str):
    """Momentum 0, in either form and under any policy, is SGD of the same lr, in bits, and keeps no buffers."""
    outer_params, plain_params = parameters(0, dtype=torch.float32), parameters(0, dtype=torch.float32)
    outer = OuterSGD(outer_params, 0.7, 0.0, nesterov=rule.nesterov, form=rule.form, restart=policy)
    for number in range(12):
        run(outer, range(number, number + 1), measure=number % 2 == 0)
    run(torch.optim.SGD(plain_params, 0.7), range(12))
    assert all(map(same_bits, outer_params, plain_params))
    assert not any(outer.state.values())


@each_rule
@pytest.mark.parametrize("policy", ["1", "soft:1:0:0", "cycle:1,1", "at:" + ",".join(map(str, range(1, 21)))])
def test_period_one_is_momentum_free(rule: OuterRule, policy: str):
    """A restart every round is SGD with lr times 1 (sum), 1+b (sum, Nesterov), 1-b (EMA), 1-b^2 (EMA, Nesterov)."""
    b = rule.momentum
    factor = {("sum", False): 1, ("sum", True): 1 + b, ("ema", False): 1 - b, ("ema", True): 1 - b * b}
    plain = OuterRule(rule.lr * factor[rule.form, rule.nesterov], 0.0)
    for p, q in zip(*ends((rule, policy), (plain, "never"), rounds=20, dtype=torch.float64), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-13, atol=1e-13)


@each_rule
@pytest.mark.parametrize(
    ("policy", "plain"),
    [*((policy, "never") for policy in ("12", "at:12,40", "cycle:12", "soft:4:1:0")), ("soft:3:0:0", "3")],
)
def test_policies_that_are_simpler_ones(rule: OuterRule, policy: str, plain: str):
    """A period at or above the number of rounds, and a soft restart that retains everything, or nothing: in bits."""
    assert all(map(same_bits, *ends((rule, policy), (rule, plain))))


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_hard_restart_forgets_anything(poison: float):
    """After a hard restart the buffer is exactly zero, also where it held NaN or infinity (0 x inf would be NaN)."""
    params = parameters(0)
    outer = OuterSGD(params, 0.1, 0.9, restart=2)
    give(params, [torch.full_like(p, poison) for p in params])
    outer.step()
    assert not outer.state[params[3]]["momentum_buffer"].isfinite().any()
    outer.step()
    assert all(outer.state[p]["momentum_buffer"].count_nonzero() == 0 for p in params)


@pytest.mark.parametrize("inject", [0.0, 0.25])
def test_restart_before_the_first_mixing(register_policy: Callable[[str], Any], inject: float):
    """A restart before the first mixing acts on a buffer of zeros: m = inject g, then the ordinary update."""

    @register_policy("test-first")
    @dataclass(frozen=True, slots=True)
    class First(RestartPolicy):
        inject: float

        def decide(self, state: State, signal: RoundSignal) -> tuple[State, Restart | None]:
            return state, Restart(0.5, self.inject, before=True) if signal.round == 1 else None

    param = nn.Parameter(torch.tensor([1.0], dtype=torch.float64))
    outer = OuterSGD([param], 0.5, 0.5, restart=First(inject))
    twin = ReferenceOuter(param, OuterRule(0.5, 0.5), First(inject))
    param.grad = torch.ones(1, dtype=torch.float64)
    outer.step(measure=True)
    twin.round(param.grad)
    assert param.item() == twin.x.item() == 1 - 0.5 * (0.5 * inject + 1)
    assert outer.last_round[0].gain == 0.5 * (0.5 * inject + 1)
    assert outer.param_groups[0]["rounds_since_restart"] == twin.age == 1


# --- the round, group by group ----------------------------------------------------------------------------------------


@each_rule
@pytest.mark.parametrize("policy", ["3", "soft:2:0.3:0.5", "norm:1.5"])
def test_gradients_are_only_read(rule: OuterRule, policy: str):
    """The caller's gradients stay the same tensors with the same bits, and nothing writes to them even in passing."""
    params, gradients = parameters(0), randoms(1)
    outer = OuterSGD.from_rule(params, rule, policy)
    for p, g in zip(params, gradients, strict=True):
        p.grad = g
    for _ in range(6):
        outer.step(measure=True)
    assert all(map(same_bits, gradients, randoms(1)))
    assert all(p.grad is g and g._version == 0 for p, g in zip(params, gradients, strict=True))


def test_group_without_gradients_takes_no_round():
    """A group in which no parameter has a gradient keeps its age; the others go on; one gradient is enough."""
    first, second = parameters(0), parameters(1)
    outer = OuterSGD([{"params": first}, {"params": second}], 0.1, 0.9, restart=2)
    give(first, randoms(2))
    outer.step()
    outer.step()
    assert [group["rounds"] for group in outer.param_groups] == [2, 0]
    assert all(map(same_bits, second, randoms(1)))
    second[0].grad = torch.ones_like(second[0])
    outer.step()
    assert [(group["rounds"], group["restarts"]) for group in outer.param_groups] == [(3, 1), (1, 0)]
    assert all(map(same_bits, second[1:], randoms(1)[1:]))
    outer.zero_grad()
    outer.step(measure=True)
    assert [group["rounds"] for group in outer.param_groups] == [3, 1]
    assert outer.last_round == []


@pytest.mark.parametrize(("restart", "remaining"), [("2", 0.0), ("soft:2:0.25:0.5", 0.25)])
def test_parameters_without_a_gradient_restart_with_their_group(restart: str, remaining: float):
    """What rests in the round of a restart begins the new cycle like the others, with a pseudo-gradient of 0."""
    a, b, c = scalar(0.0), scalar(0.0), scalar(0.0)
    outer = OuterSGD([a, b, c], lr=0.1, momentum=0.9, restart=restart)
    a.grad, b.grad = torch.ones(1), torch.ones(1)
    outer.step()
    b.grad = None
    outer.step()
    assert outer.param_groups[0]["restarts"] == 1
    assert (outer.state[b]["momentum_buffer"].item(), b.item()) == (remaining, pytest.approx(-0.1))
    assert "momentum_buffer" not in outer.state.get(c, {})
    assert len(outer.state_dict()["state"]) == 2


def test_closure_is_evaluated_with_gradients():
    """The closure runs once, before the step, with autograd on, and its value is returned."""
    x = nn.Parameter(torch.tensor(3.0, dtype=torch.float64))
    outer = OuterSGD([x], 0.5)
    calls = []

    def closure() -> Tensor:
        calls.append(x.item())
        outer.zero_grad()
        loss = x * x
        loss.backward()
        return loss

    assert outer.step(closure) == 9
    assert outer.step(None) is None
    assert calls == [3.0]
    assert x.item() == 3 - 0.5 * 6 - 0.5 * 6


def test_a_round_at_learning_rate_zero_is_a_round():
    """Only a step without state and without any pseudo-gradient is taken for one of torch's own."""
    x = scalar(1.0)
    outer = OuterSGD([x], lr=0.0, momentum=0.9)
    for g in (torch.ones(1), torch.zeros(1)):
        x.grad = g
        outer.step()
    assert (outer.param_groups[0]["rounds"], x.item()) == (2, 1.0)


@pytest.mark.parametrize("new", ["norm-ratio:0.1:2", "object", 2, "2"], ids=str)
def test_policy_may_be_changed_between_rounds(norm_ratio: type[RestartPolicy], new: Any):
    """A policy, text or period written into a param group holds from the next round on, with a memory that begins."""
    policy = norm_ratio(0.1, 2) if new == "object" else parse(new)  # type: ignore[call-arg]
    outer = OuterSGD(parameters(0), 0.1, 0.9)
    run(outer, range(3))
    (group,) = outer.param_groups
    group["restart"] = policy if new == "object" else new
    run(outer, range(3, 5))
    assert (group["restart"], group["restarts"]) == (str(policy), 1)  # the ratio is large at once; 2 divides round 4
    assert set(group["policy_state"]) == set(policy.initial_state())
    through_file(outer.state_dict())
    if new == "object":
        group["restart"] = policy
        run(outer, range(5, 6))
        assert group["restarts"] == 2  # with the memory of before it would keep quiet


def test_named_parameters_and_late_groups():
    """Named parameters are taken, and a group added later begins at age 0 with its own values."""
    outer = OuterSGD(nn.Linear(3, 2).named_parameters(), 0.1, 0.9, restart=2)
    run(outer, range(3))
    extra = nn.Parameter(torch.ones(2))
    outer.add_param_group({"params": [("extra", extra)], "restart": parse("5"), "form": "ema"})
    run(outer, range(3, 5))
    assert outer.param_groups[0]["param_names"] == ["weight", "bias"]
    settings = [(group["rounds"], group["restart"], group["form"]) for group in outer.param_groups]
    assert settings == [(5, "2", "sum"), (2, "5", "ema")]


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lr": -0.1}, "lr is -0.1; .*>= 0"),
        ({"lr": math.nan}, "lr is nan; .*finite"),
        ({"momentum": 1.0}, r"momentum is 1.0; .*\[0, 1\)"),
        ({"form": "mean"}, 'form is \'mean\'; .*"sum".*"ema"'),
        ({"restart": "sometimes"}, "'sometimes' is not known; .*never"),
        ({"restart": 0}, "period is 0; .*>= 1"),
        ({"restart": "test-rising:0"}, r"needs loss; .*step\(signals=\.\.\.\)"),
        ({"restart": "auto", "momentum": 0.0}, "policy auto needs a buffer, and at momentum 0 there is none"),
    ],
)
def test_impossible_values_say_what_to_do(arguments: dict[str, Any], message: str):
    """A value outside its range is refused with the remedy, for all groups or one, addable once corrected."""
    everywhere: dict[str, Any] = {"lr": 0.1} | arguments
    with pytest.raises(ValueError, match=message):
        OuterSGD(parameters(0), **everywhere)
    outer, more = OuterSGD([scalar(0.0)], lr=0.5, momentum=0.9), scalar(0.0)
    with pytest.raises(ValueError, match=message):
        outer.add_param_group({"params": [more]} | arguments)
    assert len(outer.param_groups) == 1
    outer.add_param_group({"params": [more]})
    assert len(outer.param_groups) == 2


@pytest.mark.parametrize("fault", ["signals", "sparse", "lr"])
def test_a_round_that_one_group_refuses_has_happened_in_none(fault: str):
    """Whatever the second group lacks, the first has not moved either; the next call is the same round."""
    policy = "test-rising:0" if fault == "signals" else "never"
    params, twin = parameters(0), parameters(0)
    groups = [{"params": params[:1]}, {"params": params[1:], "restart": policy}]
    outer = OuterSGD(groups, 0.5, 0.9, signals=parse(policy).needs)
    supplied: dict[str, Any] = {"signals": {"loss": 1.0}}
    give(params, randoms(1))
    outer.step(**supplied)
    before = [p.detach().clone() for p in params]
    give(params, randoms(2))
    if fault == "sparse":
        params[1].grad = randoms(2)[1].to_sparse()
    if fault == "lr":
        outer.param_groups[1]["lr"] = -1.0
    with pytest.raises(ValueError, match="OuterSGD"):
        outer.step(**{key: value for key, value in supplied.items() if key != fault})
    assert all(map(same_bits, params, before))
    assert [group["rounds"] for group in outer.param_groups] == [1, 1]
    outer.param_groups[1]["lr"] = 0.5
    give(params, randoms(2))
    outer.step(**supplied)
    same = OuterSGD(twin, 0.5, 0.9)
    for number in (1, 2):
        give(twin, randoms(number))
        same.step()
    assert [group["rounds"] for group in outer.param_groups] == [2, 2]
    assert all(map(same_bits, params, twin))


@pytest.mark.parametrize("value", [None, "low", torch.ones(2)])
def test_what_is_no_number_is_refused_by_name(value: Any):
    """A signal that is none, before anything moves; a scalar tensor is one."""
    params = parameters(0)
    give(params, randoms(1))
    outer = OuterSGD(params, 0.5, 0.9, restart="test-rising:0", signals=["loss"])
    with pytest.raises(ValueError, match=r"signals\['loss'\] is .*; give a single number"):
        outer.step(signals={"loss": value})
    assert all(map(same_bits, params, randoms(0)))
    outer.step(signals={"loss": torch.tensor(1.0)})  # type: ignore[dict-item]
    assert outer.param_groups[0]["rounds"] == 1


def test_auto_keeps_its_buffer():
    """A momentum of 0 that comes later, with a state or by the caller, is refused as it is at construction."""
    x = scalar(1.0)
    outer = OuterSGD([x], lr=0.5, momentum=0.9, restart="auto")
    with pytest.raises(ValueError, match="restart policy auto needs a buffer, and at momentum 0 there is none"):
        outer.load_state_dict(torch.optim.SGD([scalar(1.0)], lr=0.7).state_dict())
    assert outer.param_groups[0]["momentum"] == 0.9
    outer.param_groups[0]["momentum"] = 0.0
    x.grad = torch.ones(1)
    with pytest.raises(ValueError, match="restart policy auto needs a buffer, and at momentum 0 there is none"):
        outer.step()
    assert (x.item(), outer.param_groups[0]["rounds"]) == (1.0, 0)


# --- what a round measures --------------------------------------------------------------------------------------------


@each_rule
@pytest.mark.parametrize("policy", ["never", "1", "3", "soft:2:0.3:0.5", "norm:0.5"])
@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_reported_round_is_the_measured_one(rule: OuterRule, policy: str, momentum: float):
    """Norms, cosine and gain of each group equal what is measured from outside: <update, g> / <g, g> and so on."""
    blocks = [parameters(0, SHAPES[:4]), parameters(1, SHAPES[4:])]
    groups = [{"params": blocks[0]}, {"params": blocks[1], "lr": 0.3, "form": "sum"}]
    outer = OuterSGD(groups, rule.lr, momentum, nesterov=rule.nesterov, form=rule.form, restart=policy)
    restarts = 0
    for number in range(8):
        if momentum and number == 7:  # a buffer that is left over takes no part
            outer.param_groups[1]["momentum"] = 0.0
        for index, params in enumerate(blocks):
            give(params, randoms(2 * number + index, [tuple(p.shape) for p in params]))
        if number == 0:  # a parameter that joins later has a buffer of 0
            blocks[0][-1].grad = None
        before = [[p.detach().clone() for p in params] for params in blocks]
        momenta = [[outer.state.get(p, {}).get("momentum_buffer", 0 * p).clone() for p in ps] for ps in blocks]
        outer.step(measure=True)
        for params, old, buffers, group, report in zip(
            blocks, before, momenta, outer.param_groups, outer.last_round, strict=True
        ):
            g = flat([0 * p if p.grad is None else p.grad for p in params])
            m = flat(buffers) * (group["momentum"] > 0)
            update = flat(old) - flat(params)
            assert report.pseudo_gradient_norm == pytest.approx(float(g.norm()), rel=1e-12)
            assert report.buffer_norm == pytest.approx(float(m.norm()), rel=1e-12, abs=1e-300)
            cosine = float(g @ m / (g.norm() * m.norm())) if m.count_nonzero() else 0.0
            assert report.cosine == pytest.approx(cosine, rel=1e-9, abs=1e-12)
            assert report.gain == pytest.approx(float(update @ g / (g @ g)), rel=1e-9, abs=1e-12)
            restarts += report.restarted
    assert restarts == sum(group["restarts"] for group in outer.param_groups)
    assert restarts > 0 or policy == "never" or momentum == 0


def test_measuring_changes_nothing():
    """A run that measures ends with the bits of a run that does not; unmeasured rounds leave no report."""
    outer_params, plain_params = parameters(0, dtype=torch.float32), parameters(0, dtype=torch.float32)
    measured, plain = OuterSGD(outer_params, 0.1, 0.9, restart=3), OuterSGD(plain_params, 0.1, 0.9, restart=3)
    run(measured, range(7), measure=True)
    run(plain, range(7))
    assert all(map(same_bits, outer_params, plain_params))
    assert (len(measured.last_round), plain.last_round) == (1, [])


def test_norms_of_complex_parameters():
    """|z| counts, as in torch's norm: both parts of a coordinate."""
    x = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    outer = OuterSGD([x, y := scalar(0.0)], lr=0.1, momentum=0.9, restart="norm:1.5")
    x.grad, y.grad = torch.tensor([3 + 2.9j, 1j]), torch.tensor([2.0])
    outer.step(measure=True)
    norm = math.sqrt(float(torch.linalg.vector_norm(x.grad)) ** 2 + 4)
    assert outer.last_round[0].pseudo_gradient_norm == pytest.approx(norm)
    outer.step(measure=True)
    assert outer.last_round[0].cosine == pytest.approx(1)


def test_inner_products_are_summed_in_pieces():
    """Float32 sums over many elements round visibly; pieces of them in float64 do not."""
    x = torch.rand(1 << 22, generator=torch.Generator().manual_seed(0))
    expected = float((x.double() ** 2).sum())
    assert dots([x], [])[0] == pytest.approx(expected, rel=5e-6)
    assert float(torch.dot(x, x)) != pytest.approx(expected, rel=5e-6)


def test_a_step_that_makes_the_buffers_is_no_round():
    """Hivemind's averager takes one with gradients of 0, at the outer learning rate, before it looks at the state."""
    params, outers = [scalar(1.0), scalar(1.0)], []
    for x, is_made in zip(params, (True, False), strict=True):
        outer = OuterSGD([x], 0.7, 0.9, nesterov=True, restart=3)
        if is_made:
            x.grad = torch.zeros_like(x)
            outer.step()
            assert outer.state[x]["momentum_buffer"].item() == 0
        outers.append(outer)
    restarts = []
    for _ in range(7):
        for x, outer in zip(params, outers, strict=True):
            x.grad = torch.full_like(x, 0.1)
            outer.step()
        restarts.append([outer.param_groups[0]["restarts"] for outer in outers])
    assert restarts == [[0, 0], [0, 0], [1, 1], [1, 1], [1, 1], [2, 2], [2, 2]]
    assert same_bits(*params)
    plain = OuterSGD([params[0]], 0.7, 0.0)  # nothing to make: at lr 0 it may be torch's, else it is a round
    for lr, rounds in ((0.0, 0), (0.7, 1), (0.7, 2)):
        plain.param_groups[0]["lr"], params[0].grad = lr, torch.zeros_like(params[0])
        plain.step()
        assert plain.param_groups[0]["rounds"] == rounds
