"""`OuterSGD`: equal to plain arithmetic and to its slow twin; reductions; its groups, its rounds and their reports."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from outers import SHAPES, flat, give, parameters, randoms, run, scalar
from policies import each_rule
from replicas import same_bits, through_file
from twophase.optim.outer import OuterSGD
from twophase.optim.reference import ReferenceOuter
from twophase.restart import (
    AtRounds,
    Cycle,
    Never,
    Periodic,
    Restart,
    RestartPolicy,
    RoundSignal,
    Soft,
    State,
    ask,
    parse,
)
from twophase.rule import OuterRule

POLICIES = [Never(), Periodic(3), Cycle((2, 3, 1)), AtRounds((4, 9)), Soft(3, 0.2, 0.1), Soft(2, -0.3, 0.6)]
each_policy = pytest.mark.parametrize("policy", POLICIES, ids=str)


def simulate(rule: OuterRule, policy: RestartPolicy, x: float, gradients: Sequence[float]) -> list[tuple[float, float]]:
    """(x, m) after each round on one number: the equations of house.md, written without any of our code.

    For scheduled policies only.
    """
    b, m, age, state, places = rule.momentum, 0.0, 0, policy.initial_state(), []
    for number, g in enumerate(gradients, start=1):
        age += 1
        old = m
        if rule.form == "sum":
            m = b * old + g
            x = x - rule.lr * (g + b * m) if rule.nesterov else x - rule.lr * m
        else:
            m = b * old + (1 - b) * g
            x = x - rule.lr * ((1 + b) * m - b * old) if rule.nesterov else x - rule.lr * m
        answer = ask(policy, state, RoundSignal(number, age))
        state, event = answer.state, answer.restart
        if event is not None:
            m, age = event.retain * m + event.inject * g, 0
        places.append((x, m))
    return places


@each_rule
@each_policy
def test_equals_the_printed_equations(rule: OuterRule, policy: RestartPolicy):
    """On one float64 number, optimizer and slow twin follow the equations of house.md, x and m, over 20 rounds."""
    gradients = [math.sin(t * t) + 0.3 for t in range(1, 21)]
    param = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
    outer = OuterSGD.from_rule([param], rule, policy)
    twin = ReferenceOuter([param], rule, policy)
    for g, (x, m) in zip(gradients, simulate(rule, policy, 1.5, gradients), strict=True):
        param.grad = torch.tensor(g, dtype=torch.float64)
        outer.step()
        twin.round([param.grad])
        assert param.item() == pytest.approx(x, rel=1e-13, abs=1e-14)
        assert twin.x[0].item() == pytest.approx(x, rel=1e-13, abs=1e-14)
        assert outer.state[param]["momentum_buffer"].item() == pytest.approx(m, rel=1e-13, abs=1e-14)
        assert twin.m[0].item() == pytest.approx(m, rel=1e-13, abs=1e-14)


def test_groups_keep_their_own_rule_period_and_age():
    """A restart period per block is a param group: each group is the twin of its own rule and policy."""
    blocks = [parameters(seed, SHAPES[3:]) for seed in range(4)]
    settings: list[dict[str, Any]] = [
        {"restart": Periodic(2)},
        {"restart": "cycle:3,4", "lr": 0.3, "nesterov": True},
        {"restart": 5, "form": "ema", "momentum": 0.6},
        {},
    ]
    groups = [{"params": block} | setting for block, setting in zip(blocks, settings, strict=True)]
    outer = OuterSGD(groups, lr=0.1, momentum=0.9, restart="soft:4:0.5:0.1")
    rules = [
        OuterRule(0.1, 0.9),
        OuterRule(0.3, 0.9, nesterov=True),
        OuterRule(0.1, 0.6, form="ema"),
        OuterRule(0.1, 0.9),
    ]
    policies = [Periodic(2), Cycle((3, 4)), Periodic(5), Soft(4, 0.5, 0.1)]
    twins = [ReferenceOuter(b, rule, policy) for b, rule, policy in zip(blocks, rules, policies, strict=True)]
    for number in range(1, 24):
        for index, (block, twin) in enumerate(zip(blocks, twins, strict=True)):
            gradients = randoms(10 * number + index, SHAPES[3:])
            give(block, gradients)
            twin.round(gradients)
        outer.step()
    for block, twin, group in zip(blocks, twins, outer.param_groups, strict=True):
        for p, x in zip(block, twin.x, strict=True):
            torch.testing.assert_close(p.detach(), x, rtol=1e-12, atol=1e-12)
        assert group["rounds_since_restart"] == twin.age
    assert [group["restarts"] for group in outer.param_groups] == [11, 6, 4, 5]
    assert [group["restart"] for group in outer.param_groups] == ["2", "cycle:3,4", "5", "soft:4:0.5:0.1"]


# --- reductions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["sum", "ema"])
@pytest.mark.parametrize("nesterov", [False, True])
@each_policy
def test_momentum_zero_is_plain_sgd(form: Any, nesterov: bool, policy: RestartPolicy):
    """Momentum 0, in either form and under any policy, is SGD of the same lr, in bits, and keeps no buffers."""
    outer_params, plain_params = parameters(0, dtype=torch.float32), parameters(0, dtype=torch.float32)
    outer = OuterSGD(outer_params, 0.7, 0.0, nesterov=nesterov, form=form, restart=policy)
    sgd = torch.optim.SGD(plain_params, 0.7)
    for number in range(12):
        for params in (outer_params, plain_params):
            give(params, randoms(number, dtype=torch.float32))
        outer.step(measure=number % 2 == 0)
        sgd.step()
    assert all(map(same_bits, outer_params, plain_params))
    assert not any(outer.state.values())


@each_rule
@pytest.mark.parametrize("policy", [Periodic(1), Soft(1, 0, 0), Cycle((1, 1)), AtRounds(tuple(range(1, 21)))], ids=str)
def test_period_one_is_momentum_free(rule: OuterRule, policy: RestartPolicy):
    """A restart every round is SGD with lr times 1 (sum), 1+b (sum, Nesterov), 1-b (EMA), 1-b^2 (EMA, Nesterov)."""
    b = rule.momentum
    factor = {("sum", False): 1, ("sum", True): 1 + b, ("ema", False): 1 - b, ("ema", True): 1 - b * b}
    outer_params, plain_params = parameters(0), parameters(0)
    outer = OuterSGD.from_rule(outer_params, rule, policy)
    sgd = torch.optim.SGD(plain_params, rule.lr * factor[rule.form, rule.nesterov])
    for number in range(20):
        for params in (outer_params, plain_params):
            give(params, randoms(number))
        outer.step()
        sgd.step()
    for p, q in zip(outer_params, plain_params, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-13, atol=1e-13)


@each_rule
@pytest.mark.parametrize(
    ("policy", "plain"),
    [
        *((policy, Never()) for policy in (Periodic(12), AtRounds((12, 40)), Cycle((12,)), Soft(4, 1, 0))),
        (Soft(3, 0, 0), Periodic(3)),
    ],
    ids=str,
)
def test_policies_that_are_simpler_ones(rule: OuterRule, policy: RestartPolicy, plain: RestartPolicy):
    """A period at or above the number of rounds, and a soft restart that retains everything, or nothing: in bits."""
    outer_params, plain_params = parameters(0, dtype=torch.float32), parameters(0, dtype=torch.float32)
    run(OuterSGD.from_rule(outer_params, rule, policy), range(12))
    run(OuterSGD.from_rule(plain_params, rule, plain), range(12))
    assert all(map(same_bits, outer_params, plain_params))


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_hard_restart_forgets_anything(poison: float):
    """After a hard restart the buffer is exactly zero, also where it held NaN or infinity (0 x inf would be NaN)."""
    params = parameters(0)
    outer = OuterSGD(params, 0.1, 0.9, restart=2)
    for p, g in zip(params, randoms(1), strict=True):
        p.grad = torch.full_like(g, poison)
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

    param = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))
    outer, twin = (
        OuterSGD([param], 0.5, 0.5, restart=First(inject)),
        ReferenceOuter([param], OuterRule(0.5, 0.5), First(inject)),
    )
    param.grad = torch.tensor(1.0, dtype=torch.float64)
    outer.step(measure=True)
    twin.round([param.grad])
    assert param.item() == twin.x[0].item() == 1 - 0.5 * (0.5 * inject + 1)
    assert outer.last_round[0].gain == 0.5 * (0.5 * inject + 1)
    assert outer.param_groups[0]["rounds_since_restart"] == twin.age == 1


# --- the round, group by group ----------------------------------------------------------------------------------------


@each_rule
@pytest.mark.parametrize("policy", ["3", "soft:2:0.3:0.5", "norm-ratio:0.5:2"])
def test_gradients_are_only_read(rule: OuterRule, policy: str, norm_ratio: type[RestartPolicy]):
    """The caller's gradients stay the same tensors with the same bits, and nothing writes to them even in passing."""
    assert norm_ratio.name == "norm-ratio"
    params = parameters(0)
    outer = OuterSGD.from_rule(params, rule, policy)
    gradients = randoms(1)
    for p, g in zip(params, gradients, strict=True):
        p.grad = g
    for _ in range(6):
        outer.step(measure=True)
    for p, g, original in zip(params, gradients, randoms(1), strict=True):
        assert p.grad is g
        assert same_bits(g, original)
        assert g._version == 0


def test_group_without_gradients_takes_no_round():
    """A group in which no parameter has a gradient keeps its age; the others go on; one gradient is enough."""
    first, second = parameters(0), parameters(1)
    outer = OuterSGD([{"params": first}, {"params": second}], 0.1, 0.9, restart=2)
    give(first, randoms(2))
    outer.step()
    outer.step()
    assert [group["rounds"] for group in outer.param_groups] == [2, 0]
    assert all(same_bits(p, x) for p, x in zip(second, randoms(1), strict=True))
    second[0].grad = torch.ones_like(second[0])
    outer.step()
    assert [group["rounds"] for group in outer.param_groups] == [3, 1]
    assert [group["restarts"] for group in outer.param_groups] == [1, 0]
    assert all(same_bits(p, x) for p, x in zip(second[1:], randoms(1)[1:], strict=True))
    for p in first + second:
        p.grad = None
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
    x.grad = torch.ones(1)
    outer.step()
    x.grad = torch.zeros(1)
    outer.step()
    assert (outer.param_groups[0]["rounds"], x.item()) == (2, 1.0)


@pytest.mark.parametrize("new", ["norm-ratio:0.1:2", "object", 2, "2"], ids=str)
def test_policy_may_be_changed_between_rounds(norm_ratio: type[RestartPolicy], new: Any):
    """A policy, text or period written into a param group holds from the next round on, with its own memory."""
    policy = norm_ratio(0.1, 2) if new == "object" else parse(new)  # type: ignore[call-arg]
    params = parameters(0)
    outer = OuterSGD(params, 0.1, 0.9)
    run(outer, range(3))
    outer.param_groups[0]["restart"] = policy if new == "object" else new
    run(outer, range(3, 5))
    assert outer.param_groups[0]["restart"] == str(policy)
    assert outer.param_groups[0]["restarts"] == 1  # the ratio is large at once; 2 divides round 4
    assert set(outer.param_groups[0]["policy_state"]) == set(policy.initial_state())
    through_file(outer.state_dict())


def test_policy_object_put_there_twice_starts_anew(norm_ratio: type[RestartPolicy]):
    """Putting a policy object into a group forgets the memory of the policy that was there."""
    params = parameters(0)
    outer = OuterSGD(params, 0.1, 0.9, restart=norm_ratio(0.1, 9))  # type: ignore[call-arg]
    run(outer, range(3))
    assert outer.param_groups[0]["restarts"] == 1  # the second round; then it keeps quiet
    outer.param_groups[0]["restart"] = norm_ratio(0.1, 9)  # type: ignore[call-arg]
    run(outer, range(3, 4))
    assert outer.param_groups[0]["restarts"] == 2


def test_named_parameters_and_late_groups():
    """Named parameters are taken, and a group added later begins at age 0 with its own values."""
    model = nn.Linear(3, 2)
    outer = OuterSGD(model.named_parameters(), 0.1, 0.9, restart=2)
    run(outer, range(3))
    extra = nn.Parameter(torch.ones(2))
    outer.add_param_group({"params": [("extra", extra)], "restart": Periodic(5), "form": "ema"})
    run(outer, range(3, 5))
    assert outer.param_groups[0]["param_names"] == ["weight", "bias"]
    assert [group["rounds"] for group in outer.param_groups] == [5, 2]
    assert outer.param_groups[1]["restart"] == "5"
    assert [group["form"] for group in outer.param_groups] == ["sum", "ema"]


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"lr": -0.1}, ["lr is -0.1", ">= 0"]),
        ({"lr": math.nan}, ["lr is nan", "finite"]),
        ({"lr": 0.1, "momentum": 1.0}, ["momentum is 1.0", "[0, 1)"]),
        ({"lr": 0.1, "form": "mean"}, ["form is 'mean'", '"sum"', '"ema"']),
        ({"lr": 0.1, "restart": "sometimes"}, ["'sometimes'", "never", "cycle:5,6,10"]),
        ({"lr": 0.1, "restart": 0}, ["period is 0", ">= 1"]),
    ],
)
def test_impossible_values_say_what_to_do(arguments: dict[str, Any], words: list[str]):
    """A value outside its range, for all parameters or in one group, raises a ValueError with value, range, remedy."""
    for build in (
        lambda: OuterSGD(parameters(0), **arguments),
        lambda: OuterSGD([{"params": parameters(0)} | arguments], 0.1, 0.9),
    ):
        with pytest.raises(ValueError, match=r"is") as caught:
            build()
        assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize("bad", [{"restart": "foo"}, {"lr": -1.0}, {"restart": "loss"}])
def test_refused_group_leaves_nothing(bad: dict[str, Any]):
    """A param group that is refused is not there, and may be added once it is mended."""
    outer, more = OuterSGD([scalar(0.0)], lr=0.5, momentum=0.9), scalar(0.0)
    with pytest.raises(ValueError, match=r"OuterSGD|restart"):
        outer.add_param_group({"params": [more]} | bad)
    assert len(outer.param_groups) == 1
    outer.add_param_group({"params": [more]})
    assert len(outer.param_groups) == 2


@pytest.mark.parametrize("fault", ["signals", "probes", "sparse", "lr"])
def test_a_round_that_one_group_refuses_has_happened_in_none(fault: str):
    """Whatever the second group lacks, the first has not moved either; the next call is the same round."""
    policy, needs = {"signals": ("loss", ["loss_start", "loss_end"]), "probes": ("probe:keep,drop", ["probes"])}.get(
        fault, ("never", [])
    )
    params, twin = parameters(0), parameters(0)
    same = OuterSGD(twin, 0.5, 0.9)
    groups = [{"params": params[:1]}, {"params": params[1:], "restart": policy}]
    outer = OuterSGD(groups, 0.5, 0.9, signals=needs)
    supplied = {"signals": {"loss_start": 1.0, "loss_end": 1.0}, "probe": lambda: 1.0}
    give(params, randoms(1))
    outer.step(**supplied)
    before = [p.detach().clone() for p in params]
    give(params, randoms(2))
    if fault == "sparse":
        params[1].grad = randoms(2)[1].to_sparse()
    if fault == "lr":
        outer.param_groups[1]["lr"] = -1.0
    with pytest.raises(ValueError, match="OuterSGD"):
        outer.step(**{key: value for key, value in supplied.items() if not key.startswith(fault[:5])})
    assert all(map(same_bits, params, before))
    assert [group["rounds"] for group in outer.param_groups] == [1, 1]
    outer.param_groups[1]["lr"] = 0.5
    give(params, randoms(2))
    outer.step(**supplied)
    for number in (1, 2):
        give(twin, randoms(number))
        same.step()
    assert [group["rounds"] for group in outer.param_groups] == [2, 2]
    assert all(map(same_bits, params, twin))


@pytest.mark.parametrize("value", [None, "low", torch.ones(2)])
def test_what_is_no_number_is_refused_by_name(value: Any):
    """A signal or a probe's loss that is none, before anything moves; a scalar tensor is one."""
    params = parameters(0)
    needs = ["loss_start", "loss_end"]
    outer = OuterSGD(params, 0.5, 0.9, restart="loss", signals=needs)
    give(params, randoms(1))
    before = [p.detach().clone() for p in params]
    with pytest.raises(ValueError, match=r"signals\['loss_end'\] is .*; give a single number"):
        outer.step(signals={"loss_start": 1.0, "loss_end": value})
    outer.step(signals={"loss_start": 1.0, "loss_end": torch.tensor(1.0)})  # type: ignore[dict-item]
    assert outer.param_groups[0]["rounds"] == 1
    params = parameters(0)
    probing = OuterSGD(params, 0.5, 0.9, restart="probe:keep,drop", signals=["probes"])
    give(params, randoms(1))
    with pytest.raises(ValueError, match=r"what probe\(\) returned is .*; give a single number"):
        probing.step(probe=lambda: value)
    assert all(map(same_bits, params, before))


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
@pytest.mark.parametrize("policy", ["never", "1", "3", "soft:2:0.3:0.5", "norm-ratio:0.5:1"])
@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_reported_round_is_the_measured_one(
    rule: OuterRule, policy: str, momentum: float, norm_ratio: type[RestartPolicy]
):
    """Norms, cosine and gain of each group equal what is measured from outside: <update, g> / <g, g> and so on."""
    assert norm_ratio.name == "norm-ratio"
    groups = [parameters(0, SHAPES[:4]), parameters(1, SHAPES[4:])]
    outer = OuterSGD(
        [{"params": groups[0]}, {"params": groups[1], "lr": 0.3, "form": "sum"}],
        rule.lr,
        momentum,
        nesterov=rule.nesterov,
        form=rule.form,
        restart=policy,
    )
    restarts = 0
    for number in range(8):
        before = [[p.detach().clone() for p in params] for params in groups]
        buffers = [
            [outer.state[p].get("momentum_buffer", torch.zeros_like(p)).clone() for p in params] for params in groups
        ]
        for index, params in enumerate(groups):
            give(params, randoms(2 * number + index, [tuple(p.shape) for p in params]))
        outer.step(measure=True)
        for index, params in enumerate(groups):
            g = flat([p.grad for p in params])
            m = flat(buffers[index])
            update = flat(before[index]) - flat(params)
            seen = outer.last_round[index]
            assert seen.pseudo_gradient_norm == pytest.approx(float(g.norm()), rel=1e-12)
            assert seen.buffer_norm == pytest.approx(float(m.norm()), rel=1e-12, abs=1e-300)
            cosine = float(g @ m / (g.norm() * m.norm())) if m.count_nonzero() else 0.0
            assert seen.cosine == pytest.approx(cosine, rel=1e-9, abs=1e-12)
            assert seen.gain == pytest.approx(float(update @ g / (g @ g)), rel=1e-9, abs=1e-12)
            restarts += seen.restarted
    assert restarts == sum(group["restarts"] for group in outer.param_groups)
    assert restarts > 0 or policy == "never" or momentum == 0


def test_measures_parameters_that_have_no_buffer_yet():
    """When some parameters of a group join later, their buffer counts as 0 and their gradient counts."""
    params = parameters(0)
    outer = OuterSGD(params, 0.1, 0.9)
    give(params[:3], randoms(1)[:3])
    outer.step()
    buffers = flat([outer.state[p]["momentum_buffer"] for p in params[:3]])
    give(params, randoms(2))
    before = flat(params)
    outer.step(measure=True)
    g = flat(randoms(2))
    seen, inner = outer.last_round[0], g[: len(buffers)] @ buffers
    assert seen.pseudo_gradient_norm == pytest.approx(float(g.norm()), rel=1e-12)
    assert seen.buffer_norm == pytest.approx(float(buffers.norm()), rel=1e-12)
    assert seen.cosine == pytest.approx(float(inner / (g.norm() * buffers.norm())), rel=1e-9)
    assert seen.gain == pytest.approx(float((before - flat(params)) @ g / (g @ g)), rel=1e-9)


def test_a_buffer_left_over_from_a_larger_momentum_takes_no_part():
    """At momentum 0 the buffer counts as none: in the step, in what is measured and reported, and for policies."""
    params = parameters(0)
    outer = OuterSGD(params, 0.7, 0.9, restart="norm:1.5")
    run(outer, range(3), measure=True)
    assert outer.last_round[0].buffer_norm > 0
    outer.param_groups[0]["momentum"] = 0.0
    before = [p.detach().clone() for p in params]
    run(outer, range(3, 4), measure=True)
    (report,) = outer.last_round
    g = flat([p.grad for p in params])
    update = flat(before) - flat([p.detach() for p in params])
    assert (report.buffer_norm, report.cosine) == (0, 0)
    assert report.gain == pytest.approx(float(update @ g / (g @ g)))
    assert report.gain == pytest.approx(0.7)


def test_measuring_changes_nothing():
    """A run that measures ends with the bits of a run that does not; unmeasured rounds leave no report."""
    outer_params, plain_params = parameters(0, dtype=torch.float32), parameters(0, dtype=torch.float32)
    measured, plain = OuterSGD(outer_params, 0.1, 0.9, restart=3), OuterSGD(plain_params, 0.1, 0.9, restart=3)
    run(measured, range(7), measure=True)
    run(plain, range(7))
    assert all(map(same_bits, outer_params, plain_params))
    assert len(measured.last_round) == 1
    assert plain.last_round == []


def test_zero_gradient_has_no_gain():
    """With g = 0 the gain is NaN, the cosine 0, and nothing fails."""
    x = nn.Parameter(torch.ones(3))
    outer = OuterSGD([x], 0.1, 0.9)
    x.grad = torch.zeros(3)
    outer.step(measure=True)
    seen = outer.last_round[0]
    assert (seen.pseudo_gradient_norm, seen.buffer_norm, seen.cosine) == (0, 0, 0)
    assert math.isnan(seen.gain)


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
