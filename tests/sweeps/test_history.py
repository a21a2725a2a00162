"""Names of outer updates: equal for equal things, in exact arithmetic (`algebra`) and in floating point (`bits`)."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coefficients import Early, Twice, Vector, coefficients, registered
from policies import Half
from twophase.optim.outer_sgd import BUFFER, OuterSGD
from twophase.restart import AtRounds, Cycle, Never, Periodic, RestartPolicy, RoundSignal, Soft, parse
from twophase.rule import FORMS, OuterRule
from twophase.sweeps.history import ABSENT, ZERO, algebra, bits, is_scheduled, restarts

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
# After round 2 Soft(2, 0.5, 0.1) is not what Early(3, 0.5, 0.1) is before round 3: it injects another g. Early(2, 0, 1)
# mixes g_2 with itself in round 2, as at:1,3,5,7 does with g_3 in round 3.
TEXTS = (
    *("never", "1", "2", "3", "7", "cycle:3", "cycle:2,1", "at:3", "at:2,4", "at:1,3,5,7", "at:7"),
    *("soft:3:1:0", "soft:3:0:0", "soft:3:0.5:0", "soft:3:0.5:0.1", "soft:3:0.5:1", "soft:2:0.5:0.1", "soft:2:0:0.1"),
    *("soft:2:0:1", "soft:1:-0.5:0.3", "early:2:0:0", "early:2:0:1", "early:3:0.5:0.1", "early:3:0.5:1", "twice:2:0"),
    "twice:2:1",
)
with registered():
    POLICIES: list[RestartPolicy] = [parse(text) for text in TEXTS]
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


@given(ANY_RULE, SCHEDULES, st.integers(1, 14), st.integers(1, 14))
def test_names_do_not_depend_on_the_length(rule: OuterRule, policy: RestartPolicy, short: int, more: int) -> None:
    """A longer run begins with the names of the shorter one."""
    assert algebra(rule, policy, short + more)[:short] == algebra(rule, policy, short)
    assert bits(rule, policy, short + more)[:short] == bits(rule, policy, short)


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
    """After each round in float32: the anchor, what the update makes of a fixed anchor, and the buffer."""
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(37, generator=generator)
    moving, fixed = start.clone().requires_grad_(), start.clone().requires_grad_()
    rule, policy = run
    outer = OuterSGD([moving, fixed], **dataclasses.asdict(rule), restart=policy)
    states = []
    for _ in range(rounds):
        moving.grad = torch.randn(37, generator=generator)
        moving.grad[:2] = 0.0  # as of a parameter that is not used
        fixed.grad = moving.grad
        fixed.data.copy_(start)
        outer.step()
        buffer = outer.state[moving].get(BUFFER)
        anchor, update = (x.detach().numpy().tobytes() for x in (moving, fixed))
        states.append((anchor, update, None if buffer is None else buffer.clone()))
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
    """On a whole grid, equal names mean equal bits: of updates, of anchors after a history of them, and of buffers."""
    runs = [run for run in GRID if run[0].lr in (0.3, 0.6, 3.0)]
    check_floats(runs, ROUNDS)
    # Not in vain: most runs have a twin, and hundreds of pairs that part later share three updates or more.
    histories = {tuple(name.update for name in bits(*run, ROUNDS)) for run in runs}
    assert len(histories) < len(runs) / 2
    assert sum(math.comb(count, 2) for count in Counter(history[:3] for history in histories).values()) > 400


def test_different_bits_have_different_names() -> None:
    """Where rounding tells two runs of the same algebra apart, their names differ, from the first such round on."""
    told_apart = 0
    for lr_ema, momentum, lr in ((7.0, 0.9, 0.7), (1.4, 0.5, 0.7), (3.0, 0.9, 0.3)):
        ema = OuterRule(lr_ema, momentum, form="ema"), Periodic(5)
        plain = OuterRule(lr, momentum), Periodic(5)
        assert algebra(*ema, 12) == algebra(*plain, 12)
        for a, b, x, y in zip(bits(*ema, 12), bits(*plain, 12), floats(ema, 12), floats(plain, 12), strict=True):
            if x[1] != y[1]:
                assert a.update != b.update
                told_apart += 1
    assert told_apart >= 12


@pytest.mark.slow
def test_bits_imply_algebra() -> None:
    """On the grid, updates of equal bits are equal in algebra, and so is the future that buffers of equal bits have."""
    updates: dict[object, str] = {}
    futures: dict[object, list[str]] = {}
    for run in GRID:
        names = algebra(*run, ROUNDS)
        events = [*restarts(run[1], ROUNDS)]
        for t, name in enumerate(bits(*run, ROUNDS)):
            assert updates.setdefault((t, name.update), names[t]) == names[t], run
            if not any(events[t + 1 :]):  # under the same rule and without another restart, the buffer alone decides
                assert futures.setdefault((t, name.buffer, run[0]), names[t + 1 :]) == names[t + 1 :], run


def test_bits_are_not_finer_than_need_be() -> None:
    """Among runs of one form at momentum 0.9, bits tell apart no more than exact arithmetic, plain SGD aside."""
    for form in FORMS:
        runs = [
            (OuterRule(lr, 0.9, nesterov, form), policy)
            for lr, nesterov, policy in itertools.product((0.2, 0.38), (False, True), POLICIES)
        ]
        by_bits = {run: tuple(name.update for name in bits(*run, ROUNDS)) for run in runs}
        by_algebra = {run: tuple(algebra(*run, ROUNDS)) for run in runs}
        for run, other in itertools.combinations(runs, 2):
            if by_algebra[run] == by_algebra[other] and by_bits[run] != by_bits[other]:
                assert {run[1], other[1]} == {Periodic(1)}  # heavy ball and Nesterov, by different operations
                assert run[0].nesterov != other[0].nesterov


# --- the reductions, one by one -----------------------------------------------------------------------------------

BOTH = (False, True)  # heavy ball, Nesterov


def same(run: Run, other: Run, rounds: int = 12) -> tuple[bool, bool]:
    """Whether two runs are one in algebra, and in bits."""
    in_bits = [[name.update for name in bits(*each, rounds)] for each in (run, other)]
    return algebra(*run, rounds) == algebra(*other, rounds), in_bits[0] == in_bits[1]


# Policies that do the same in 12 rounds, whatever they are called: a restart after the last round never shows, one that
# changes nothing is none, and one before the mixing is one after the round before.
@pytest.mark.parametrize("policy", ["never", "1", "3", "cycle:2,3", "soft:2:0.5:0.25", "early:2:0:1", "measured:1.5"])
def test_momentum_zero_makes_all_one(policy: str) -> None:
    """At momentum 0 both rules, both forms and all policies are one run, in bits, and there is no buffer."""
    for nesterov, form in itertools.product(BOTH, FORMS):
        run = OuterRule(0.7, 0, nesterov, form), parse(policy)
        assert is_scheduled(*run)
        assert same(run, (OuterRule(0.7, 0), Never())) == (True, True)
        assert {name.buffer for name in bits(*run, 12)} == {ABSENT}


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


# --- adaptive policies --------------------------------------------------------------------------------------------


def test_adaptive_policies_are_opaque(monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy that measures or takes steps is like itself only: not like another value, rule, round, or a schedule."""
    rules = [OuterRule(lr, b, n, form) for lr, b, n, form in itertools.product((0.3, 0.7), (0.5, 0.9), BOTH, FORMS)]
    seen_bits = {name.update for rule in rules for policy in SIMPLE for name in bits(rule, policy, 5)}
    seen_algebra = {name for rule in rules for policy in SIMPLE for name in algebra(rule, policy, 5)}
    runs: list[Run] = [*itertools.product(rules, map(parse, ("measured:1.5", "measured:2"))), (rules[0], Half(3))]
    for run in runs:
        assert not is_scheduled(*run)
        names, in_bits = algebra(*run, 5), bits(*run, 5)
        assert (names, in_bits) == (algebra(*run, 5), bits(*run, 5))
        assert len(set(names)) == len({name.update for name in in_bits}) == len({name.buffer for name in in_bits}) == 5
        assert seen_algebra.isdisjoint(names)
        assert seen_bits.isdisjoint(name.update for name in in_bits)
        assert not {name.buffer for name in in_bits} & {ABSENT, ZERO}
        seen_algebra |= set(names)
        seen_bits |= {name.update for name in in_bits}
    monkeypatch.setattr(Half, "takes_steps", False)
    with pytest.raises(TypeError, match="takes_steps"):
        algebra(rules[0], Half(3), 5)


SIMPLE = (Never(), Periodic(1), Periodic(2))


@pytest.mark.parametrize("policy", ["gain:1", "auto"])
def test_steps_of_a_policy_have_a_buffer(policy: str) -> None:
    """A policy that takes the steps is opaque at any momentum, has its buffer at any, and nothing of a rule enters."""
    free, other = (OuterRule(0.7, 0.0), parse(policy)), (OuterRule(0.7, 0.9), parse(policy))
    assert set(algebra(*free, 5)).isdisjoint(algebra(free[0], Never(), 5))
    assert algebra(*free, 5) == algebra(*other, 5)
    assert ABSENT not in {name.buffer for run in (free, other) for name in bits(*run, 5)}


# --- restarts, processes ------------------------------------------------------------------------------------------


@given(SCHEDULES, st.integers(1, 20))
def test_restarts_are_the_optimizer_s(policy: RestartPolicy, rounds: int) -> None:
    """The restarts listed are those that `OuterSGD` performs, for policies with memory and with `before` as well."""
    x = torch.zeros(1, requires_grad=True)
    outer = OuterSGD([x], 0.7, 0.9, restart=policy)
    for number, restart in enumerate(restarts(policy, rounds), start=1):
        before = outer.param_groups[0]["restarts"]
        state = outer.param_groups[0]["policy_state"]
        age = outer.param_groups[0]["rounds_since_restart"] + 1
        assert policy.decide(state, RoundSignal(number, age))[1] == restart
        x.grad = torch.ones(1)
        outer.step()
        assert outer.param_groups[0]["restarts"] - before == (restart is not None)
