"""Restart policies as values: when they restart, their texts, conversions, the gain they leave, new ones."""

from __future__ import annotations

import dataclasses
import math
import os
import pickle
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from policies import ALL, each_rule, fired, simulate
from reference_outer import ReferenceOuter
from twophase.optim.outer import OuterSGD
from twophase.restart import (
    Answer,
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
    convert,
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
RULES = st.builds(OuterRule, st.floats(0.01, 2), st.floats(0, 0.99), st.booleans(), st.sampled_from(["sum", "ema"]))
OTHER: dict[str, Form] = {"sum": "ema", "ema": "sum"}


def answers(policy: RestartPolicy, rounds: int) -> list[Answer]:
    """The answers of a policy without memory."""
    return [ask(policy, {}, RoundSignal(number, number)) for number in range(1, rounds + 1)]


# --- when ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "policy", "rounds"),
    [
        ("never", Never(), []),
        ("1", Periodic(1), list(range(1, 13))),
        ("3", Periodic(3), [3, 6, 9, 12]),
        ("13", Periodic(13), []),
        ("cycle:5,6,10", Cycle((5, 6, 10)), [5, 11]),
        ("cycle:1,2", Cycle((1, 2)), [1, 3, 4, 6, 7, 9, 10, 12]),
        ("at:4,9", AtRounds((4, 9)), [4, 9]),
        ("at:1,12,30", AtRounds((1, 12, 30)), [1, 12]),
        ("soft:3:0.2:0.1", Soft(3, 0.2, 0.1), [3, 6, 9, 12]),
    ],
)
def test_promised_texts_and_their_rounds(text: str, policy: RestartPolicy, rounds: list[int]):
    """A text form means its policy and is what the policy prints; 12 rounds restart after those listed, from 1."""
    assert parse(text) == parse(f"  {text} ") == policy
    assert str(policy) == text
    assert fired(answers(policy, 12)) == rounds


@given(POLICIES, st.integers(1, 200), st.integers(0, 200))
def test_scheduled_policies_look_at_the_round_only(policy: RestartPolicy, number: int, age: int):
    """A schedule answers alike whatever it measures and however long ago the last restart was, and has no memory."""
    plain = policy.decide({}, RoundSignal(number, number))
    assert plain == policy.decide({}, RoundSignal(number, age, 1.0, 2.0, -0.5, {"loss": 3.0}))
    assert plain[0] == policy.initial_state() == {}
    assert not policy.needs


# --- values and texts ---------------------------------------------------------------------------------------------


@given(POLICIES)
def test_a_policy_is_a_value(policy: RestartPolicy):
    """Equal fields make equal policies with equal hashes; no field can be changed; pickle keeps it."""
    twin = dataclasses.replace(policy)  # type: ignore[type-var]
    assert twin == policy
    assert hash(twin) == hash(policy)
    assert pickle.loads(pickle.dumps(policy)) == policy  # noqa: S301 - our own bytes
    for field in dataclasses.fields(policy):  # type: ignore[arg-type]
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(policy, field.name, 1)


@given(st.one_of(POLICIES, st.sampled_from(ALL).map(parse)))
def test_text_there_and_back(policy: RestartPolicy):
    """`parse` is the inverse of `str`, exactly (floats keep all their digits)."""
    back = parse(str(policy))
    assert (back, type(back), hash(back), str(back)) == (policy, type(policy), hash(policy), str(policy))


@pytest.mark.parametrize(
    "text",
    [
        *("soft:3:1:0", "soft:3:1.0:0.0", "soft:3:-1:2", "soft:1:100000000000000000000:0"),
        *("norm:2", "norm:2.0", "norm:100000000000000000000"),
    ],
)
def test_numbers_keep_their_writing(text: str):
    """Whole numbers stay whole and floats floats: the names of runs are made of them."""
    assert str(parse(text)) == text


def test_what_parse_takes():
    """A policy is returned as it is, and a whole number is a period; 1 and 1.0 make equal policies."""
    policy = Soft(3, 1, 0.0)
    assert parse(policy) is policy
    assert parse("soft:3:1:0") == parse("soft:3:1.0:0.0") == policy
    assert hash(parse("soft:3:1:0")) == hash(parse("soft:3:1.0:0.0"))
    assert parse(4) == parse("4") == parse("periodic:4") == Periodic(4)


@pytest.mark.parametrize("number", ["100000000000000000000", "-100000000000000000000", str(10**30), "1e30"])
def test_coefficients_that_no_integer_of_a_tensor_holds(number: str):
    """A whole number beyond 64 bits does what the same float does, in the optimizer and its slow twin."""
    for text in (f"soft:1:{number}:0", f"soft:1:0:{number}"):
        param = torch.nn.Parameter(torch.zeros(3))
        outer = OuterSGD([param], 1e-30, 0.5, restart=text)
        twin = ReferenceOuter(param.detach().double(), OuterRule(1e-30, 0.5), parse(text))
        param.grad = torch.full((3,), 1e-10)
        outer.step()
        twin.round(param.grad.double())
        torch.testing.assert_close(outer.state[param]["momentum_buffer"].double(), twin.m, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("sometimes", "'sometimes' is not known; write never, .*cycle:5,6,10, at:4,9, soft:3:0.2:0.1"),
        ("periodc:3", "'periodc:3' is not known; did you mean periodic[?]"),
        ("²", "'²' is not known"),
        ("3.0", "'3.0' is not known; .* a period such as 3"),
        ("-3", "period is -3; .* >= 1"),
        ("never:3", "'never:3' has the wrong number of values; write never"),
        ("soft:3:0.2", "'soft:3:0.2' has the wrong number of values; write soft:PERIOD:RETAIN:INJECT"),
        ("soft:3:lots:0.1", "'lots' is not a number"),
        ("soft:3:nan:0.1", "'nan' is not a number"),
        ("3\u00a0", "is not known"),
        ("soft:3:0_2:0.1", "'0_2' is not a number such as 3, 0.25 or 1e-3; write soft:PERIOD:RETAIN:INJECT"),
        ("soft:٣:0.2:0.1", "'٣' is not a number"),
        ("soft:3: 0.2:0.1", "' 0.2' is not a number"),
        ("soft:3:+0.2:0.1", "is not a number"),
        ("soft:3:0x2:0.1", "is not a number"),
        ("soft:3:1e400:0.1", "'1e400' is not a number"),
        ("+3", "'\\+3' is not known"),
        ("1_0", "'1_0' is not known"),
        ("٣", "is not known"),
        ("0x3", "is not known"),
        ("1" + 15 * "0" + "1", "period is 10000000000000001; .* at most 10\\^15"),
        ("9" * 5000, "is not a number"),
        ("soft:2.5:0:0", "period is 2.5; .*whole number"),
        ("cycle", "'cycle' has the wrong number of values"),
        ("cycle:5,,6", "'cycle:5,,6': '' is not a number"),
        ("cycle:5,0", "period is 0; .* >= 1"),
        ("norm:0", "NormRatio: ratio is 0; .* above 0, for example norm:1.5"),
        ("norm:1" + 310 * "0", "'1000+…' is not a number"),
        ("norm:inf", "'inf' is not a number"),
        ((Periodic, True), "Periodic: period is True; .*whole number"),
        ((Cycle, ()), "Cycle: periods is empty; .*cycle:5,6,10"),
        ((AtRounds, ()), "AtRounds: rounds is empty; .*at:4,9"),
        ((AtRounds, (0,)), "AtRounds: a round is 0; .* >= 1"),
        ((AtRounds, (4, 4)), r"AtRounds: rounds \(4, 4\) .*repetitions"),
        ((Soft, 3, 0.2, -math.inf), r"Soft: inject is -inf; .*from -1e\+30 to 1e\+30"),
        ((Soft, 3, 1e31, 0.1), r"Soft: retain is 1e\+31; .*soft:3:0.2:0.1"),
        ((Soft, 3, 10**400, 0), "Soft: retain is 1000"),
        ((Soft, 3, False, 0), "Soft: retain is False"),
    ],
)
def test_refusals(value: Any, message: str):
    """A text or a value that makes no policy is a ValueError that repeats it and shows what to write."""
    with pytest.raises(ValueError, match=message):
        parse(value) if isinstance(value, str) else value[0](*value[1:])


# --- conversion and gain ------------------------------------------------------------------------------------------


def largest(rule: OuterRule, policy: RestartPolicy, rounds: int) -> float:
    """How large x can get: the same recursion with absolute values."""
    if isinstance(policy, Soft):
        policy = Soft(policy.period, abs(policy.retain), abs(policy.inject))
    return max(abs(x) for x, _ in simulate(rule, [1.0] * rounds, policy))


@given(RULES, POLICIES, st.lists(st.floats(-1, 1), min_size=1, max_size=25))
def test_converted_rule_and_policy_take_the_same_path(rule: OuterRule, policy: RestartPolicy, gradients: list[float]):
    """`convert` keeps the whole trajectory, soft injections included, for any pseudo-gradients; twice it is undone."""
    other = convert(rule, policy, OTHER[rule.form])
    first, second = ([x for x, _ in simulate(its_rule, gradients, its)] for its_rule, its in ((rule, policy), other))
    assert first == pytest.approx(second, rel=1e-12, abs=1e-12 * (1 + largest(rule, policy, len(gradients))))
    back_rule, back = convert(*other, rule.form)
    assert back_rule.lr == pytest.approx(rule.lr, rel=1e-15)
    if isinstance(policy, Soft):
        assert isinstance(back, Soft)
        assert (back.period, back.retain) == (policy.period, policy.retain)
        assert back.inject == pytest.approx(policy.inject, rel=1e-15, abs=5e-324)
    else:
        assert back == other[1] == policy
    assert convert(rule, policy, rule.form) == (rule, policy)


@given(RULES, POLICIES, st.integers(1, 60))
def test_gain_is_the_mean_step_on_a_constant_gradient(rule: OuterRule, policy: RestartPolicy, rounds: int):
    """The gain is the distance that a constant unit pseudo-gradient moves x, over the rounds, in either form.

    Without soft restarts it is `mean (1 - b^(j + nesterov))` in EMA units, j = rounds since the buffer was zero.
    """
    expected = -simulate(rule, [1.0] * rounds, policy)[-1][0] / rounds
    scale = largest(rule, policy, rounds) / rounds
    for gain in (mean_outer_gain(rule, policy, rounds), mean_outer_gain(*convert(rule, policy, "ema"), rounds)):
        assert gain == pytest.approx(expected, rel=1e-12, abs=1e-13 * scale)
    if isinstance(policy, Never | Periodic):
        ages = [(t - 1) % policy.period + 1 if isinstance(policy, Periodic) else t for t in range(1, rounds + 1)]
        mean = math.fsum(1 - rule.momentum ** (age + rule.nesterov) for age in ages) / rounds
        assert expected == pytest.approx(rule.to("ema").lr * mean, rel=1e-12)


def test_gains_by_hand(register_policy):
    """The engines note's share of the stationary gain at K = 3 with Nesterov, and a restart before the mixing."""
    for momentum, share in ((0.7, 0.642), (0.9, 0.268)):
        rule = OuterRule(1.0, momentum, nesterov=True, form="ema")
        assert mean_outer_gain(rule, Periodic(3), 3) == pytest.approx(share, abs=5e-4)

    @register_policy("test-before")
    @dataclass(frozen=True, slots=True)
    class Before(RestartPolicy):
        def decide(self, state: State, signal: RoundSignal) -> tuple[State, Restart | None]:
            return state, Restart(0.5, 0.25, before=True) if signal.round == 2 else None

    # Round 1: m = 1. Round 2: m = 0.5 + 0.25, then m = 0.5 * 0.75 + 1. Round 3: m = 0.5 * 1.375 + 1.
    assert mean_outer_gain(OuterRule(1, 0.5), Before(), 3) == pytest.approx((1 + 1.375 + 1.6875) / 3)


@each_rule
def test_gain_of_a_policy_with_steps(rule: OuterRule):
    """Half steps under restarts have half the gain of the restarts alone, in any number of rounds."""
    for rounds in (1, 2, 3, 7, 12):
        halved, plain = (mean_outer_gain(rule, parse(text), rounds) for text in ("test-half:3", "3"))
        assert halved == pytest.approx(plain / 2, rel=1e-12)


@pytest.mark.parametrize(
    ("text", "rounds", "message"),
    [
        ("never", 0, "rounds is 0; it must be a whole number >= 1"),
        ("norm:1.5", 10, r"norm:1\.5 decides from measured signals"),
    ],
)
def test_gain_refuses_what_it_cannot_know(text: str, rounds: int, message: str):
    """No rounds, or a policy that decides from measured signals: a ValueError that says which."""
    with pytest.raises(ValueError, match=f"mean_outer_gain: {message}"):
        mean_outer_gain(OuterRule(1, 0.9), parse(text), rounds)


# --- a user's own policy ------------------------------------------------------------------------------------------


def test_names_are_taken_once():
    """A second policy of the same name is refused by name, with the remedy, and the first one stays."""
    for name in ("Other", "Periodic"):
        taken = r"register: .* named 'periodic' exists already \(twophase\.policies\.scheduled\.Periodic\); choose"
        with pytest.raises(ValueError, match=taken):
            register("periodic")(type(name, (RestartPolicy,), {"decide": Never.decide}))
    assert parse("periodic:3") == Periodic(3)


def test_a_policy_may_be_defined_again(register_policy):
    """A class of the same place, as of a notebook's cell that runs twice, takes the older one's name and text."""

    def define(after: int) -> type[Any]:
        @register_policy("test-behind")
        @dataclass(frozen=True, slots=True)
        class Behind(RestartPolicy):
            rounds: int = 1

            def decide(self, state: State, signal: RoundSignal) -> tuple[State, Restart | None]:
                return state, Restart() if signal.round == self.rounds + after else None

        return Behind

    older, stale = define(0), parse("test-behind:3")
    newer = define(2)
    policy = parse("test-behind:3")
    assert (type(stale), type(policy)) == (older, newer)
    assert older is not newer
    assert parse(policy) is policy
    assert fired(answers(policy, 9)) == [5]
    with pytest.raises(ValueError, match=r"Behind\(rounds=3\) has no text form"):
        parse(stale)


def test_unregistered_policies_are_refused(register_policy):
    """A policy without a name of its own is refused: its text form would be another policy's, or none.

    A class derived from a policy keeps its own name and text once it is registered.
    """

    @dataclass(frozen=True, slots=True)
    class OddPeriodic(Periodic):
        pass

    nameless = dataclass(frozen=True)(type("Nameless", (RestartPolicy,), {"decide": Never.decide}))
    for policy in (nameless(), OddPeriodic(3)):
        with pytest.raises(ValueError, match=rf"decorate {type(policy).__name__} with @register"):
            OuterSGD([torch.zeros(1)], 0.1, restart=policy)
    register_policy("test-odd")(OddPeriodic)
    assert str(OddPeriodic(3)) == "test-odd:3"
    assert parse("test-odd:3") == OddPeriodic(3) != Periodic(3)


def test_a_forgotten_decorator_or_base_is_named(register_policy):
    """What parse meets is the class alone: without fields, or without what every policy has."""
    bare = type("Bare", (RestartPolicy,), {"decide": Never.decide})
    for name, cls in {"test-bare": bare, "test-other": dataclass(frozen=True)(type("Other", (), {}))}.items():
        with pytest.raises(ValueError, match=f"derive {register_policy(name)(cls).__name__} from RestartPolicy, and"):
            parse(name)
    with pytest.raises(ValueError, match="make it a frozen dataclass"):
        OuterSGD([torch.zeros(1)], 0.1, restart=bare())


def test_an_empty_tuple_there_and_back(register_policy):
    """Nothing after a colon is no word, which would be another value."""

    @register_policy("test-words")
    @dataclass(frozen=True, slots=True)
    class Words(Never):
        words: tuple[str, ...] = ("some",)

    assert parse(str(Words(()))) == Words(())


@pytest.mark.parametrize(
    "answer",
    [None, ({}, True), (None, None), ({"all": [1, 2]}, None), ({"mean": math.nan}, None), ({1: 2.0}, None)],
    ids=str,
)
def test_answers_that_no_state_could_hold_are_refused(answer: Any, register_policy):
    """By the policy's name and in the first round: a checkpoint with such a memory could not be loaded."""

    @register_policy("test-slip")
    @dataclass(frozen=True, slots=True)
    class Slip(RestartPolicy):
        def decide(self, state: State, signal: RoundSignal) -> Any:
            del state, signal
            return answer

    with pytest.raises(ValueError, match=r"restart policy test-slip answers .* in round 1\. Its decide"):
        ask(Slip(), {}, RoundSignal(1, 1))


def test_modules_with_policies_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, register_policy):
    """`TWOPHASE_POLICIES` makes another program's policies known, when a text first names one."""
    (tmp_path / "theirs.py").write_text(
        "from dataclasses import dataclass\n"
        "from twophase.restart import Never, register\n\n"
        "@register('test-theirs')\n"
        "@dataclass(frozen=True, slots=True)\n"
        "class Theirs(Never):\n"
        "    first: int = 1\n"
    )
    (tmp_path / "broken.py").write_text("import a_module_that_is_nowhere\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"test-theirs:4' is not known.*TWOPHASE_POLICIES, .* names modules"):
        parse("test-theirs:4")
    monkeypatch.setenv("TWOPHASE_POLICIES", "broken")
    with pytest.raises(ValueError, match=r"TWOPHASE_POLICIES: the module 'broken' cannot be imported .*PYTHONPATH"):
        parse("test-theirs:4")
    assert parse("3") == Periodic(3)
    monkeypatch.setenv("TWOPHASE_POLICIES", " theirs ,")
    register_policy("test-theirs")  # so that it is forgotten in the end
    assert str(parse("test-theirs:4")) == "test-theirs:4"


def test_every_process_finds_the_policies():
    """A fresh process refuses a study's policy and names the remedy; a study's workers have it; names are not taken."""
    code = """
import os
from twophase.restart import Never, parse, register
try:
    parse("gradient")
except ValueError as error:
    assert "docs/policies.md" in str(error)
from policies import share_with_workers
share_with_workers()
share_with_workers()
print(os.environ["TWOPHASE_POLICIES"], parse("gradient"))
for name in ("gradient", "soft", "auto"):
    try:
        register(name)(type("Mine", (Never,), {}))
    except ValueError as error:
        print("exists already" in str(error))
"""
    bare = {name: value for name, value in os.environ.items() if name != "TWOPHASE_POLICIES"}
    ended = subprocess.run([sys.executable, "-c", code], env=bare, capture_output=True, text=True, check=True)
    assert ended.stdout.split() == ["policies", "gradient", "True", "True", "True"]
