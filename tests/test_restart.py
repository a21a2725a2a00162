"""Restart policies as values: their texts, rounds, refusals and conversions, `auto`, the gain they leave, new ones."""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Callable
from dataclasses import FrozenInstanceError, dataclass, fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies import ALL, RULES, Early, Oracle, convert, simulate
from twophase.restart import (
    MEASURED,
    AtRounds,
    Auto,
    Cycle,
    Never,
    Periodic,
    Restart,
    RestartPolicy,
    RoundSignal,
    Soft,
    State,
    Step,
    ask,
    mean_outer_gain,
    parse,
    register,
)
from twophase.rule import Form, OuterRule

PERIOD = st.integers(1, 12)
COEFFICIENT = st.floats(-2, 2)
POLICIES = st.one_of(
    st.just(Never()),
    st.builds(Periodic, PERIOD),
    st.builds(Cycle, st.lists(PERIOD, min_size=1, max_size=5).map(tuple)),
    st.builds(AtRounds, st.sets(st.integers(1, 40), min_size=1, max_size=6).map(lambda s: tuple(sorted(s)))),
    st.builds(Soft, PERIOD, COEFFICIENT, COEFFICIENT),
)
ANY_RULE = st.builds(OuterRule, st.floats(0.01, 2), st.floats(0, 0.99), st.booleans(), st.sampled_from(["sum", "ema"]))
OTHER: dict[str, Form] = {"sum": "ema", "ema": "sum"}
WHOLE: Any = np.int64
SINGLE: Any = np.float32


@pytest.mark.parametrize(
    ("text", "policy", "rounds"),
    [
        ("never", Never(), []),
        ("1", Periodic(1), list(range(1, 13))),
        ("3", Periodic(WHOLE(3)), [3, 6, 9, 12]),
        ("cycle:5,6,10", Cycle((5, 6, 10)), [5, 11]),
        ("cycle:1,2", Cycle([WHOLE(1), 2]), [1, 3, 4, 6, 7, 9, 10, 12]),  # type: ignore[arg-type]
        ("at:1,12,30", AtRounds([WHOLE(1), 12, 30]), [1, 12]),  # type: ignore[arg-type]
        ("soft:3:0.2:-1", Soft(3, 0.2, -1), [3, 6, 9, 12]),
        ("soft:3:1.0:1", Soft(3, 1.0, 1), [3, 6, 9, 12]),
        ("soft:3:0.10000000149011612:0", Soft(WHOLE(3), SINGLE(0.1), WHOLE(0)), [3, 6, 9, 12]),
    ],
)
def test_texts_and_their_rounds(text: str, policy: RestartPolicy, rounds: list[int]):
    """A text means its policy and is what it prints; of 12 rounds those listed restart. NumPy's numbers are plain."""
    assert parse(text) == parse(f" {text} ") == policy
    assert (str(policy), hash(policy)) == (text, hash(parse(text)))
    values = [getattr(policy, field.name) for field in fields(policy)]  # type: ignore[arg-type]
    assert {type(item) for v in values for item in (v if isinstance(v, tuple) else (v,))} <= {int, float}
    decisions = {t: policy.decide({}, RoundSignal(t, 99, 1.0, 2.0, -0.5, {"loss": 3.0}))[1] for t in range(1, 13)}
    assert [number for number, decision in decisions.items() if decision is not None] == rounds
    restart = Restart(policy.retain, policy.inject) if isinstance(policy, Soft) else Restart(0.0, 0.0)
    assert {decisions[number] for number in rounds} <= {restart}


@given(st.one_of(POLICIES, st.sampled_from(ALL).map(parse)))
def test_a_policy_is_a_value(policy: RestartPolicy):
    """`parse` is the inverse of `str` exactly, pickle keeps it, and no field can be changed."""
    assert parse(4) == parse(WHOLE(4)) == parse("4") == parse("periodic:4") == Periodic(4)
    for back in (parse(str(policy)), pickle.loads(pickle.dumps(policy)), parse(policy)):  # noqa: S301 - our own bytes
        assert (back, type(back), hash(back), str(back)) == (policy, type(policy), hash(policy), str(policy))
    for field in fields(policy):  # type: ignore[arg-type]
        with pytest.raises(FrozenInstanceError):
            setattr(policy, field.name, 1)


@pytest.mark.parametrize(
    ("name", "make"),
    [
        *(("not known", text) for text in ("sometimes", "3.0", "²", "", "0x3", True, None)),
        ("periodic", "periodc:3"),
        *(("PERIOD:RETAIN:INJECT", text) for text in ("soft:3:0.2", "soft:3:1:1:1", "soft:3:lots:0.1", "soft")),
        ("write never", "never:3"),
        *(("period ", value) for value in (0, "-3", f"1{15 * '0'}1", "soft:2.5:0:0", lambda: Periodic(True))),
        *(("periods", value) for value in ("cycle:5,0", "cycle:", "cycle:2.5", lambda: Cycle((True,)))),
        *(("rounds", value) for value in ("at:0", "at:4,4", "at:9,4", "at:", lambda: AtRounds((4, 2.5)))),  # type: ignore[arg-type]
        *(("retain", text) for text in ("soft:3:nan:0", "soft:3:1e31:0", "soft:3:0:inf")),
        ("ratio", "norm:0"),
    ],
)
def test_what_is_no_policy_is_refused(name: str, make: Any):
    """A text or a value that makes no policy is a ValueError that names the argument, or what to write."""
    with pytest.raises(ValueError, match=name):
        make() if isinstance(make, Callable) else parse(make)


def largest(rule: OuterRule, policy: RestartPolicy, rounds: int) -> float:
    """How large x can get: the same recursion with absolute values."""
    if isinstance(policy, Soft):
        policy = Soft(policy.period, abs(policy.retain), abs(policy.inject))
    return max(abs(x) for x, _ in simulate(rule, [1.0] * rounds, policy))


@given(ANY_RULE, POLICIES, st.lists(st.floats(-1, 1), min_size=1, max_size=25))
def test_converted_rule_and_policy_take_the_same_path(rule: OuterRule, policy: RestartPolicy, gradients: list[float]):
    """`convert` keeps the trajectory, soft injections included; twice it is undone, to the same form it is nothing."""
    other = convert(rule, policy, OTHER[rule.form])
    assert (other[0], other[0].form) == (rule.to(OTHER[rule.form]), OTHER[rule.form])
    first, second = ([x for x, _ in simulate(its_rule, gradients, its)] for its_rule, its in ((rule, policy), other))
    assert first == pytest.approx(second, rel=1e-12, abs=1e-12 * (1 + largest(rule, policy, len(gradients))))
    back_rule, back = convert(*other, rule.form)
    assert back_rule.lr == pytest.approx(rule.lr, rel=1e-15)
    if isinstance(policy, Soft) and isinstance(back, Soft):
        assert back.inject == pytest.approx(policy.inject, rel=1e-15, abs=5e-324)
        back = replace(back, inject=policy.inject)
    assert back == policy
    assert convert(rule, policy, rule.form) == (rule, policy)


OTHERS = [Early(2, 0.5, 0.25), parse("test-half:3"), parse("test-longer:2")]  # before the mixing, steps, a memory


@settings(max_examples=100)
@given(ANY_RULE, POLICIES | st.sampled_from(OTHERS), st.integers(1, 60))
def test_gain_is_the_mean_step_on_a_constant_gradient(rule: OuterRule, policy: RestartPolicy, rounds: int):
    """It is how far a constant unit pseudo-gradient moves x in a simulation, over the rounds, in either form."""
    expected = -simulate(rule, [1.0] * rounds, policy)[-1][0] / rounds
    for its_rule, its in [(rule, policy), *([convert(rule, policy, "ema")] if policy not in OTHERS else [])]:
        gain = mean_outer_gain(its_rule, its, rounds)
        assert gain == pytest.approx(expected, rel=1e-12, abs=1e-13 * largest(rule, policy, rounds) / rounds)


@pytest.mark.parametrize(
    ("rounds", "policy", "name"), [(0, Never(), "rounds"), (9, Auto(), "auto"), (9, parse("norm:1.5"), "norm")]
)
def test_what_has_no_mean_gain(rounds: int, policy: RestartPolicy, name: str):
    """No rounds, and a policy whose answers depend on the gradients."""
    with pytest.raises(ValueError, match=name):
        mean_outer_gain(OuterRule(0.7, 0.9), policy, rounds)


def test_auto_is_its_equation():
    """`u <- g + (1 - |g| / M) |g| u / |u|, x <- x - u`, for pseudo-gradients that shrink, grow and turn."""
    generator, oracle, u, norms = np.random.default_rng(0), Oracle(RULES[3], Auto(), np.zeros(6)), np.zeros(6), []
    for t in range(1, 40):
        g = generator.normal(size=6) * math.exp(-0.1 * t + 0.6 * generator.normal())
        norms.append(float(np.linalg.norm(g)))
        # The newest two of the spans [1, 2), [2, 4), [4, 8), ...: at least half of the rounds.
        share = 1 - norms[-1] / max(norms[2 ** max(t.bit_length() - 2, 0) - 1 :])
        u = g + (share * norms[-1] / np.linalg.norm(u) * u if t > 1 else 0)
        before = oracle.x
        oracle.round(g)
        np.testing.assert_allclose(before - oracle.x, u, rtol=1e-12, atol=1e-14)
    assert oracle.restarts == 0


@given(st.lists(st.one_of(st.just(0.0), st.floats(1e-6, 1e6)), min_size=1, max_size=40), st.floats(0, 1e6))
def test_an_update_of_auto_is_at_most_twice_as_long_as_averaging(norms: list[float], buffer: float):
    """Whatever the norms have been, the buffer's part is at most |g| long and never points backwards."""
    state: State = {}
    for number, norm in enumerate(norms, start=1):
        state, step, _ = ask(Auto(), json.loads(json.dumps(state)), RoundSignal(number, number, norm, buffer))
        assert isinstance(step, Step)
        assert step.lr == 1
        assert 0 <= step.momentum * buffer <= norm * (1 + 1e-12)


@pytest.mark.parametrize("text", [text for text in ALL if parse(text).needs])
def test_what_is_not_finite_or_missing(text: str):
    """A need that is not finite is named, decides nothing and leaves the memory; a missing one is a KeyError."""
    policy = parse(text)
    complete = dict.fromkeys(policy.needs, 0.5)

    def signal(values: dict[str, float]) -> RoundSignal:
        measured = {name: value for name, value in values.items() if name in MEASURED}
        return RoundSignal(3, 3, **measured, extra={name: v for name, v in values.items() if name not in measured})

    memory, _, broken = ask(policy, {}, signal(complete))
    assert broken == ()
    for name in policy.needs:
        for value in (math.nan, math.inf):
            assert ask(policy, memory, signal(complete | {name: value})) == (memory, None, (name,))
        with pytest.raises(KeyError, match=name):
            ask(policy, memory, signal({key: value for key, value in complete.items() if key != name}))


@pytest.mark.parametrize("decision", [True, 3, {}, "restart", Step(1.0)])
def test_a_wrong_answer_is_refused(decision: Any):
    """What is no decision, and a step of a policy that does not say that it takes steps; the memory given is kept."""

    @dataclass(frozen=True)
    class Slip(RestartPolicy):
        def decide(self, state: State, signal: RoundSignal) -> Any:
            state["rounds"] = signal.round
            return state, decision

    memory: State = {"rounds": 0}
    with pytest.raises(TypeError, match="decide"):
        ask(Slip(), memory, RoundSignal(1, 1))
    assert memory == {"rounds": 0}


def test_names_are_taken_once(register_policy: Callable[[str], Any]):
    """Another class's name is refused; the same class may be defined again, as by a notebook's cell that runs twice."""
    for name in ("periodic", "auto"):
        with pytest.raises(ValueError, match=name):
            register(name)(dataclass(frozen=True)(type("Mine", (Never,), {})))

    def define(after: int) -> Any:
        @register_policy("test-behind")
        @dataclass(frozen=True)
        class Behind(Never):
            word: str
            rounds: int = after

        return Behind

    define(0)
    newer = define(2)
    assert parse("test-behind:word:3") == newer("word", 3)
    assert parse(newer("word")) == parse("test-behind:word:2")


def test_a_policy_without_a_name_of_its_own_is_refused(register_policy: Callable[[str], Any]):
    """Its text would be another policy's, or none; a class derived from a policy may be registered."""

    @dataclass(frozen=True)
    class Odd(Periodic):
        pass

    nameless = dataclass(frozen=True)(type("Nameless", (RestartPolicy,), {"decide": Never.decide}))
    for policy in (nameless(), Odd(3)):
        with pytest.raises(ValueError, match="register"):
            parse(policy)
    register_policy("test-odd")(Odd)
    assert parse("test-odd:3") == parse(Odd(3)) != Periodic(3)
