"""Names of outer updates: equal for equal things, in exact arithmetic (`algebra`) and in floating point (`bits`)."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import event, given
from hypothesis import strategies as st

from coefficients import Early, Measured, Twice, Vector, coefficients, decimal, registered
from twophase.optim.outer import BUFFER, OuterSGD
from twophase.restart import AtRounds, Cycle, Never, Periodic, RestartPolicy, RoundSignal, Soft, parse
from twophase.rule import FORMS, OuterRule
from twophase.sweep.history import ABSENT, ZERO, algebra, answers, bits, is_scheduled

Run = tuple[OuterRule, RestartPolicy]


@pytest.fixture(autouse=True, scope="module")
def _policies() -> Iterator[None]:
    with registered():
        yield


# Few and round numbers, so that much coincides: 0.3 is also 0.6 (1 - 0.5), 3 (1 - 0.9), 0.2 (1 + 0.5) and
# 0.4 (1 - 0.5^2), and 1 is 0.1 / (1 - 0.9), the injection of the same soft restart in the other form.
RATES = (0.0, 0.2, 0.3, 0.38, 0.4, 0.6, 0.7, 1.4, 3.0, 7.0)
MOMENTA = (0.0, 0.5, 0.9)
RULES = [
    OuterRule(lr, momentum, nesterov, form)
    for lr, momentum, nesterov, form in itertools.product(RATES, MOMENTA, (False, True), FORMS)
]
ROUNDS = 7
POLICIES: list[RestartPolicy] = [
    Never(),
    Periodic(1),
    Periodic(2),
    Periodic(3),
    Periodic(ROUNDS),
    Cycle((3,)),
    Cycle((2, 1)),
    AtRounds((3,)),
    AtRounds((2, 4)),
    AtRounds((1, 3, 5, 7)),
    AtRounds((ROUNDS,)),
    Soft(3, 1, 0),
    Soft(3, 0, 0),
    Soft(3, 0.5, 0),
    Soft(3, 0.5, 0.1),
    Soft(3, 0.5, 1),
    Soft(2, 0.5, 0.1),  # after round 2 it is not what Early(3, 0.5, 0.1) is before round 3: it injects another g
    Soft(2, 0, 0.1),
    Soft(2, 0, 1),
    Soft(1, -0.5, 0.3),
    Early(2, 0, 0),
    Early(2, 0, 1),  # mixes g_2 with itself in round 2, as at:1,3,5,7 does with g_3 in round 3
    Early(3, 0.5, 0.1),
    Early(3, 0.5, 1),
    Twice(2, 0),
    Twice(2, 1),
]
GRID: list[Run] = list(itertools.product(RULES, POLICIES))


@cache
def exact(run: Run, rounds: int = ROUNDS) -> list[Vector]:
    return coefficients(*run, rounds)


# --- algebra ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_names_are_the_coefficients() -> None:
    """On a whole grid, in every round, the names of all runs are in one-to-one relation with their coefficients."""
    names = [algebra(*run, ROUNDS) for run in GRID]
    vectors = [exact(run) for run in GRID]
    for t in range(ROUNDS):
        pairs = {(name[t], vector[t]) for name, vector in zip(names, vectors, strict=True)}
        assert len(pairs) == len({name for name, _ in pairs}) == len({vector for _, vector in pairs})
    # Not one by one in vain: most of the runs are another's twin, and the grid still has many that differ.
    whole = Counter(map(tuple, names))
    assert len(GRID) / 4 < len(whole) < len(GRID) / 2
    assert sum(count for count in whole.values() if count > 1) > len(GRID) / 2


TENTHS = st.integers(-10, 20).map(lambda n: n / 10)
SCHEDULES = st.one_of(
    st.just(Never()),
    st.builds(Periodic, st.integers(1, 15)),
    st.builds(Cycle, st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple)),
    st.builds(AtRounds, st.sets(st.integers(1, 15), min_size=1, max_size=4).map(lambda s: tuple(sorted(s)))),
    st.builds(Soft, st.integers(1, 15), TENTHS, TENTHS),
    st.builds(Early, st.integers(1, 15), TENTHS, TENTHS),
    st.builds(Twice, st.integers(1, 8), st.sampled_from([0, 1])),
)
# 20ths of a rate and these momenta make products with few digits, which floats print as they are.
ANY_RULE = st.builds(
    OuterRule,
    st.integers(0, 40).map(lambda n: n / 20),
    st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.75, 0.8, 0.9, 0.95]),
    st.booleans(),
    st.sampled_from(FORMS),
)


def times(*factors: float | Fraction) -> float:
    """A product of decimals as the float that prints as the exact result."""
    product = Fraction(1)
    for factor in factors:
        product *= factor if isinstance(factor, Fraction) else decimal(factor)
    assert decimal(float(product)) == product
    return float(product)


def rewritten(run: Run, draw: st.DrawFn) -> Run:
    """A run that is close to another: often the same in all or some rounds, sometimes not."""
    rule, policy = run
    shrink = 1 - decimal(rule.momentum)

    def other(**changes: object) -> OuterRule:
        values = {"lr": rule.lr, "momentum": rule.momentum, "nesterov": rule.nesterov, "form": rule.form}
        return OuterRule(**(values | changes))  # type: ignore[arg-type]

    near: list[Run] = [
        (rule, draw(SCHEDULES)),
        (rule, Never()),
        (other(momentum=0.5), policy),
        (other(nesterov=not rule.nesterov), policy),
        (other(lr=times(rule.lr, shrink), momentum=0.0), policy),
        (other(lr=times(rule.lr, 1 + decimal(rule.momentum)), nesterov=False), Periodic(1)),
        (other(form="sum" if rule.form == "ema" else "ema"), policy),
        (other(lr=times(rule.lr, shrink), form="sum"), policy),
    ]
    if isinstance(policy, Periodic):
        near += [(rule, Soft(policy.period, 0, 0)), (rule, Cycle((policy.period,))), (rule, AtRounds((policy.period,)))]
    return draw(st.sampled_from(near))


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Run, Run, int]:
    run = draw(ANY_RULE), draw(SCHEDULES)
    other = run
    for _ in range(draw(st.integers(0, 2))):
        other = rewritten(other, draw)
    return run, other, draw(st.integers(1, 14))


@given(pairs())
def test_names_of_two_runs(drawn: tuple[Run, Run, int]) -> None:
    """Of any two runs, in any round, the names are equal if and only if the exact coefficients are."""
    run, other, rounds = drawn
    same = [a == b for a, b in zip(algebra(*run, rounds), algebra(*other, rounds), strict=True)]
    assert same == [a == b for a, b in zip(coefficients(*run, rounds), coefficients(*other, rounds), strict=True)]
    event("all rounds equal" if all(same) else "some rounds equal" if any(same) else "no round equal")


@given(ANY_RULE, SCHEDULES, st.integers(1, 14), st.integers(1, 14))
def test_names_do_not_depend_on_the_length(rule: OuterRule, policy: RestartPolicy, short: int, more: int) -> None:
    """A longer run begins with the names of the shorter one."""
    assert algebra(rule, policy, short + more)[:short] == algebra(rule, policy, short)
    assert bits(rule, policy, short + more)[:short] == bits(rule, policy, short)


@given(st.integers(1, 60), st.sampled_from([0.1, 0.5, 0.75, 0.9, 0.95]), st.booleans(), SCHEDULES, st.integers(1, 14))
def test_a_rule_in_its_other_form_is_the_same(
    n: int, momentum: float, nesterov: bool, policy: RestartPolicy, rounds: int
) -> None:
    """With lr_sum = lr_ema (1 - b) and inject_ema = inject_sum (1 - b), in decimals, both forms have the same names."""
    lr, shrink, in_ema = n / 20, 1 - decimal(momentum), policy
    if isinstance(policy, (Soft, Early)):
        in_ema = type(policy)(policy.period, policy.retain, times(policy.inject, shrink))
    sum_form = OuterRule(times(lr, shrink), momentum, nesterov)
    assert algebra(sum_form, policy, rounds) == algebra(OuterRule(lr, momentum, nesterov, "ema"), in_ema, rounds)


@pytest.mark.parametrize(
    ("number", "other", "same"),
    [
        pytest.param(1, 1.0, True, id="int-float"),
        pytest.param(0.7, np.float64(0.7), True, id="numpy"),
        pytest.param(0.3, 0.1 + 0.2, False, id="0.1+0.2"),
        pytest.param(0.7, 7 * (1 - 0.9), False, id="7(1-0.9)"),
        pytest.param(1e-3, 0.001, True, id="exponent"),
        pytest.param(0.0, -0.0, True, id="zero"),
    ],
)
def test_numbers_are_what_they_print_as(number: float, other: float, same: bool) -> None:
    """Rates and soft restarts are equal when they print alike; a rounding error in the input is another number."""
    assert (algebra(OuterRule(number, 0.9), Never(), 3) == algebra(OuterRule(other, 0.9), Never(), 3)) is same
    soft = [algebra(OuterRule(1.0, 0.9), Soft(1, value, value), 3)[1:] for value in (number, other)]
    assert (soft[0] == soft[1]) is same
    assert (soft[0][0] == soft[1][0]) is same


# --- bits ---------------------------------------------------------------------------------------------------------


def floats(run: Run, rounds: int, seed: int = 0) -> list[tuple[bytes, bytes, torch.Tensor | None]]:
    """A run in float32 on pseudo-gradients of a seed.

    After each round: the anchor, what the update makes of a fixed anchor, and the buffer.
    """
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(37, generator=generator)
    moving, fixed = start.clone().requires_grad_(), start.clone().requires_grad_()
    outer = OuterSGD.from_rule([moving, fixed], *run)
    states = []
    for _ in range(rounds):
        moving.grad = torch.randn(37, generator=generator)
        moving.grad[:2] = 0.0  # as of a parameter that is not used
        fixed.grad = moving.grad
        fixed.data.copy_(start)
        outer.step()
        buffer = outer.state[moving].get(BUFFER)
        states.append(
            (
                moving.detach().numpy().tobytes(),
                fixed.detach().numpy().tobytes(),
                None if buffer is None else buffer.clone(),
            )
        )
    return states


def check_floats(runs: list[Run], rounds: int, seed: int = 0) -> None:
    anchors: dict[tuple[str, ...], bytes] = {}
    updates: dict[str, bytes] = {}
    buffers: dict[str, torch.Tensor] = {}
    for run in runs:
        taken: tuple[str, ...] = ()
        for name, (anchor, update, buffer) in zip(bits(*run, rounds), floats(run, rounds, seed), strict=True):
            taken = (*taken, name.update)
            assert anchors.setdefault(taken, anchor) == anchor, run
            assert updates.setdefault(name.update, update) == update, run
            if name.buffer in (ABSENT, ZERO):
                assert buffer is None or not buffer.any(), run
            else:
                assert buffer is not None, run
                assert torch.equal(buffers.setdefault(name.buffer, buffer), buffer), run


@pytest.mark.slow
def test_equal_names_are_equal_bits() -> None:
    """On a whole grid, as long as the names of two runs agree, so do the bits of their anchors.

    An update of the same name does the same to any anchor, and buffers of the same name are equal.
    """
    runs = [run for run in GRID if run[0].lr in (0.3, 0.6, 3.0)]
    check_floats(runs, ROUNDS)
    # Not in vain: most runs have a twin, and hundreds of pairs that part later share three updates or more.
    histories = {tuple(name.update for name in bits(*run, ROUNDS)) for run in runs}
    assert len(histories) < len(runs) / 2
    assert sum(math.comb(count, 2) for count in Counter(history[:3] for history in histories).values()) > 400


@given(pairs(), st.integers(0, 2**31))
def test_equal_names_are_equal_bits_of_two_runs(drawn: tuple[Run, Run, int], seed: int) -> None:
    """The same for any two runs that are often near relatives, on random pseudo-gradients."""
    run, other, rounds = drawn
    check_floats([run, other], rounds, seed)


def test_different_bits_have_different_names() -> None:
    """Where rounding tells two runs of the same algebra apart, their names differ, from the first such round on."""
    told_apart = 0
    for lr_ema, momentum in ((7.0, 0.9), (1.4, 0.5), (3.0, 0.9)):
        ema = OuterRule(lr_ema, momentum, form="ema"), Periodic(5)
        plain = OuterRule(times(lr_ema, 1 - decimal(momentum)), momentum), Periodic(5)
        assert algebra(*ema, 12) == algebra(*plain, 12)
        for a, b, x, y in zip(bits(*ema, 12), bits(*plain, 12), floats(ema, 12), floats(plain, 12), strict=True):
            if x[1] != y[1]:
                assert a.update != b.update
                told_apart += 1
    assert told_apart >= 12


def test_bits_imply_algebra() -> None:
    """On the grid, updates of equal bits are equal in algebra, and so is the future that buffers of equal bits have."""
    updates: dict[object, str] = {}
    futures: dict[object, list[str]] = {}
    for run in GRID:
        names = algebra(*run, ROUNDS)
        events = [answer.restart for answer in answers(*run, ROUNDS)]
        for t, name in enumerate(bits(*run, ROUNDS)):
            assert updates.setdefault((t, name.update), names[t]) == names[t], run
            if not any(events[t + 1 :]):  # under the same rule and without another restart, the buffer alone decides
                assert futures.setdefault((t, name.buffer, run[0]), names[t + 1 :]) == names[t + 1 :], run


def test_bits_are_not_finer_than_need_be() -> None:
    """Among runs of one form at momentum 0.9, what bits tell apart exact arithmetic tells apart.

    The exception is heavy ball and Nesterov at period 1: plain SGD by different operations.
    """
    for form in FORMS:
        runs = [
            (OuterRule(lr, 0.9, nesterov, form), policy)
            for lr, nesterov, policy in itertools.product((0.2, 0.38), (False, True), POLICIES)
        ]
        by_bits = {run: tuple(name.update for name in bits(*run, ROUNDS)) for run in runs}
        by_algebra = {run: tuple(algebra(*run, ROUNDS)) for run in runs}
        for run, other in itertools.combinations(runs, 2):
            if by_algebra[run] == by_algebra[other] and by_bits[run] != by_bits[other]:
                assert {run[1], other[1]} == {Periodic(1)}
                assert run[0].nesterov != other[0].nesterov


# --- the reductions, one by one -----------------------------------------------------------------------------------

SHARP = (False, True)  # heavy ball, Nesterov


def same(run: Run, other: Run, rounds: int = 12) -> tuple[bool, bool]:
    """Whether two runs are one in algebra, and in bits."""
    in_bits = [[name.update for name in bits(*each, rounds)] for each in (run, other)]
    return algebra(*run, rounds) == algebra(*other, rounds), in_bits[0] == in_bits[1]


@pytest.mark.parametrize("policy", ["never", "1", "3", "cycle:2,3", "at:4", "soft:2:0.5:0.25", "early:2:0:1"])
def test_momentum_zero_makes_all_one(policy: str) -> None:
    """At momentum 0 both rules, both forms and all policies are one run, in bits, and there is no buffer."""
    plain = OuterRule(0.7, 0), Never()
    for nesterov, form in itertools.product(SHARP, FORMS):
        run = OuterRule(0.7, 0, nesterov, form), parse(policy)
        assert same(run, plain) == (True, True)
        assert {name.buffer for name in bits(*run, 12)} == {ABSENT}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("nesterov", SHARP, ids=["hb", "nag"])
def test_a_period_at_or_above_the_rounds_is_no_restart(nesterov: bool, form: str) -> None:
    """A restart after the last round never shows; one before it does."""
    rule = OuterRule(0.7, 0.9, nesterov, form)  # type: ignore[arg-type]
    for policy in (Periodic(12), Periodic(13), AtRounds((12, 30)), Cycle((12, 1)), Soft(12, 0.5, 0.5)):
        assert same((rule, policy), (rule, Never())) == (True, True)
    for policy in (Periodic(11), AtRounds((11,)), Cycle((11, 1)), Soft(11, 0.5, 0.5), Early(12, 0, 0)):
        assert same((rule, policy), (rule, Never())) == (False, False)


@pytest.mark.parametrize(
    ("form", "nesterov", "rate", "in_bits"),
    [
        pytest.param("sum", False, 0.7, True, id="sum-hb"),  # lr
        pytest.param("sum", True, 1.33, False, id="sum-nag"),  # lr (1 + b)
        pytest.param("ema", False, 0.07, False, id="ema-hb"),  # lr (1 - b)
        pytest.param("ema", True, 0.133, False, id="ema-nag"),  # lr (1 - b^2)
    ],
)
def test_period_one_is_plain_sgd(form: str, nesterov: bool, rate: float, in_bits: bool) -> None:
    """At period 1 momentum 0.9 only scales the learning rate; in bits that is plain SGD when nothing is multiplied."""
    rule = OuterRule(0.7, 0.9, nesterov, form)  # type: ignore[arg-type]
    assert same((rule, Periodic(1)), (OuterRule(rate, 0), Never())) == (True, in_bits)
    half = OuterRule(0.7, 0.5, nesterov, form), Periodic(1)  # type: ignore[arg-type]
    assert same((rule, Periodic(1)), half) == (in_bits, in_bits)  # the rate depends on the momentum in all other cases
    assert {name.buffer for name in bits(rule, Periodic(1), 12)} == {ZERO}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("policy", "twin"),
    [
        ("soft:3:1:0", "never"),
        ("soft:3:0:0", "3"),
        ("cycle:3", "3"),
        ("cycle:3,3", "3"),
        ("cycle:2,4", "at:2,6,8"),
        ("at:4,8", "4"),
        ("early:2:0:0", "at:1,3,5,7,9,11"),
        ("early:3:1:0", "never"),
        ("early:13:0:0", "never"),
        ("twice:3:0", "at:3,6"),
        ("twice:3:1", "at:2,4"),
        ("twice:12:0", "never"),
    ],
)
def test_policies_that_do_the_same(policy: str, twin: str, form: str) -> None:
    """Policies that do the same are one run in bits, whatever they are called.

    So are restarts that change nothing, and one before the mixing is one after the round before.
    """
    for nesterov in SHARP:
        rule = OuterRule(0.7, 0.9, nesterov, form)  # type: ignore[arg-type]
        assert same((rule, parse(policy)), (rule, parse(twin))) == (True, True)


def test_first_update_of_heavy_ball() -> None:
    """In sum form heavy ball's first update is the same for every momentum, in bits.

    In EMA form, and for Nesterov, it is for equal lr (1 - b), lr (1 + b), lr (1 - b^2), in exact arithmetic only.
    """
    first = {(bits(OuterRule(0.7, b), Never(), 2)[0], algebra(OuterRule(0.7, b), Never(), 2)[0]) for b in MOMENTA[1:]}
    assert len(first) == 1
    assert bits(OuterRule(0.7, 0.0), Never(), 1)[0].update == first.pop()[0].update
    for nesterov, form, values, others in (
        (False, "ema", (0.6, 0.5), (3.0, 0.9)),
        (True, "sum", (0.95, 0.0), (0.5, 0.9)),
        (True, "ema", (0.76, 0.5), (3.0, 0.9)),
    ):
        a, b = OuterRule(*values, nesterov, form), OuterRule(*others, nesterov, form)  # type: ignore[arg-type]
        assert same((a, Never()), (b, Never()), rounds=1) == (True, False)
        assert not any(x == y for x, y in list(zip(algebra(a, Never(), 5), algebra(b, Never(), 5), strict=True))[1:])
        unlike = OuterRule(values[0], others[1], nesterov, form)  # type: ignore[arg-type]
        assert same((a, Never()), (unlike, Never()), rounds=1) == (False, False)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("nesterov", SHARP, ids=["hb", "nag"])
@pytest.mark.parametrize("period", [1, 2, 5, 11])
def test_a_period_shares_its_first_rounds(period: int, nesterov: bool, form: str) -> None:
    """A run of period K has the updates 1 ... K of its sibling without restarts and none of the later ones.

    The buffer differs after round K already.
    """
    rule = OuterRule(0.7, 0.9, nesterov, form)  # type: ignore[arg-type]
    restarted, sibling = bits(rule, Periodic(period), 12), bits(rule, Never(), 12)
    alike = [a.update == b.update for a, b in zip(restarted, sibling, strict=True)]
    assert alike == [t <= period for t in range(1, 13)]
    alike = [a == b for a, b in zip(algebra(rule, Periodic(period), 12), algebra(rule, Never(), 12), strict=True)]
    assert alike == [t <= period for t in range(1, 13)]
    buffers = [a.buffer == b.buffer for a, b in zip(restarted, sibling, strict=True)]
    assert buffers == [t < period for t in range(1, 13)]
    assert [t for t, name in enumerate(restarted, 1) if name.buffer == ZERO] == list(range(period, 13, period))


def test_lr_zero_does_nothing() -> None:
    """At learning rate 0 all updates are 0, and one, in exact arithmetic."""
    names = {name for rule in RULES if rule.lr == 0 for policy in POLICIES for name in algebra(rule, policy, 5)}
    assert len(names) == 1


# --- adaptive policies --------------------------------------------------------------------------------------------


def test_adaptive_policies_are_opaque() -> None:
    """A policy that measures is like itself only: not like another value, rule, round, or any schedule."""
    runs: list[Run] = [
        (OuterRule(lr, momentum, nesterov, form), Measured(limit))
        for lr, momentum, nesterov, form, limit in itertools.product((0.3, 0.7), (0.5, 0.9), SHARP, FORMS, (1.5, 2.0))
    ]
    assert not any(is_scheduled(*run) for run in runs)
    schedules = [(rule, Never()) for rule, _ in runs]
    seen_bits: set[str] = {one.update for run in schedules for one in bits(*run, 5)}
    seen_algebra: set[str] = {name for run in schedules for name in algebra(*run, 5)}
    for run in runs:
        names, in_bits = algebra(*run, 5), bits(*run, 5)
        assert (names, in_bits) == (algebra(*run, 5), bits(*run, 5))
        assert len(set(names)) == len({name.update for name in in_bits}) == len({name.buffer for name in in_bits}) == 5
        assert seen_algebra.isdisjoint(names)
        assert seen_bits.isdisjoint(name.update for name in in_bits)
        assert not {name.buffer for name in in_bits} & {ABSENT, ZERO}
        seen_algebra |= set(names)
        seen_bits |= {name.update for name in in_bits}


def test_adaptive_policies_at_momentum_zero() -> None:
    """With nothing to forget, a policy that measures is plain SGD as well."""
    for nesterov, form in itertools.product(SHARP, FORMS):
        run = OuterRule(0.7, 0, nesterov, form), Measured(1.5)
        assert is_scheduled(*run)
        assert same(run, (OuterRule(0.7, 0), Never())) == (True, True)


@pytest.mark.parametrize("form", FORMS)
def test_coordinates_that_forget_for_themselves_are_opaque(form: str) -> None:
    """Which coordinates `opposed` forgets is not known in advance: it is like no schedule, and plain at momentum 0."""
    for nesterov in SHARP:
        run = OuterRule(0.7, 0.9, nesterov, form), parse("opposed")  # type: ignore[arg-type]
        assert not is_scheduled(*run)
        names, in_bits = algebra(*run, 5), bits(*run, 5)
        for schedule in (Never(), Periodic(1), Periodic(2)):
            assert set(names).isdisjoint(algebra(run[0], schedule, 5))
            assert {name.update for name in in_bits}.isdisjoint(name.update for name in bits(run[0], schedule, 5))
        assert same((OuterRule(0.7, 0, nesterov), parse("opposed")), (OuterRule(0.7, 0), Never())) == (True, True)


@pytest.mark.parametrize("policy", ["lookahead:0.1:0.1", "cap:1", "probe:keep,average"])
def test_steps_at_momentum_zero_leave_no_buffer(policy: str) -> None:
    """A policy that measures and takes steps is opaque at momentum 0 as well, but there is no buffer to be kept."""
    run = OuterRule(0.7, 0.0), parse(policy)
    assert set(algebra(*run, 5)).isdisjoint(algebra(run[0], Never(), 5))
    assert {name.buffer for name in bits(*run, 5)} == {ABSENT}
    assert ABSENT not in {name.buffer for name in bits(OuterRule(0.7, 0.9), run[1], 5)}


# --- restarts, processes ------------------------------------------------------------------------------------------


@given(SCHEDULES, st.integers(1, 20))
def test_restarts_are_the_optimizer_s(policy: RestartPolicy, rounds: int) -> None:
    """The restarts listed are those that `OuterSGD` performs, for policies with memory and with `before` as well."""
    x = torch.zeros(1, requires_grad=True)
    outer = OuterSGD([x], 0.7, 0.9, restart=policy)
    rule = OuterRule(0.7, 0.9)
    for number, answer in enumerate(answers(rule, policy, rounds), start=1):
        before = outer.param_groups[0]["restarts"]
        state = outer.param_groups[0]["policy_state"]
        age = outer.param_groups[0]["rounds_since_restart"] + 1
        assert policy.decide(state, RoundSignal(number, age))[1] == answer.restart
        x.grad = torch.ones(1)
        outer.step()
        assert outer.param_groups[0]["restarts"] - before == answer.restarted
