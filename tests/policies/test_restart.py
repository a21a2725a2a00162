"""Restart policies as values: when they restart, their texts and JSON, conversions, the gain they leave, new ones."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from policies import ALL
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
    convert,
    from_json,
    mean_outer_gain,
    parse,
    register,
    to_json,
)
from twophase.rule import OuterRule

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


def decisions(policy: RestartPolicy, rounds: int) -> dict[int, Restart]:
    """Round number to restart, as an optimizer would ask."""
    state, age, events = policy.initial_state(), 0, {}
    for number in range(1, rounds + 1):
        age += 1
        state, restart = policy.decide(state, RoundSignal(number, age))
        if restart is not None:
            events[number], age = restart, 0
    return events


# --- when ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "rounds"),
    [
        (Never(), []),
        (Periodic(1), list(range(1, 26))),
        (Periodic(3), [3, 6, 9, 12, 15, 18, 21, 24]),
        (Periodic(25), [25]),
        (Periodic(26), []),
        (Cycle((5, 6, 10)), [5, 11, 21]),
        (Cycle((1, 2)), [1, 3, 4, 6, 7, 9, 10, 12, 13, 15, 16, 18, 19, 21, 22, 24, 25]),
        (AtRounds((4, 9)), [4, 9]),
        (AtRounds((1, 25, 30)), [1, 25]),
        (Soft(7, 0.2, 0.1), [7, 14, 21]),
    ],
)
def test_rounds_written_out(policy: RestartPolicy, rounds: list[int]):
    """In 25 rounds each policy restarts after exactly the rounds listed here, counted from 1."""
    assert list(decisions(policy, 25)) == rounds


@given(POLICIES)
def test_rounds_by_definition(policy: RestartPolicy):
    """The restarts of 100 rounds are those of the definition, and each is what the policy says (hard or soft)."""
    rounds = range(1, 101)
    match policy:
        case Periodic(period) | Soft(period, _, _):
            due = {t for t in rounds if t % period == 0}
        case Cycle(periods):
            ends = itertools.accumulate(itertools.cycle(periods))
            due = set(itertools.takewhile(lambda t: t <= 100, ends))
        case AtRounds(listed):
            due = set(listed)
        case _:
            due = set()
    event = Restart(policy.retain, policy.inject) if isinstance(policy, Soft) else Restart(0.0, 0.0)
    assert decisions(policy, 100) == dict.fromkeys(sorted(due), event)


@given(POLICIES, st.integers(1, 200), st.integers(0, 200))
def test_scheduled_policies_look_at_the_round_only(policy: RestartPolicy, number: int, age: int):
    """A schedule answers alike whatever it measures and however long ago the last restart was, and has no memory."""
    plain = policy.decide({}, RoundSignal(number, number))
    rich = policy.decide({}, RoundSignal(number, age, 1.0, 2.0, -0.5, {"loss": 3.0}))
    assert plain == rich
    assert plain[0] == {}
    assert policy.initial_state() == {}
    assert not policy.needs


# --- range and value ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: Periodic(2.5), ["Periodic: period is 2.5", "whole number"]),  # type: ignore[arg-type]
        (lambda: Periodic(True), ["Periodic: period is True", "whole number"]),
        (lambda: Cycle(()), ["Cycle: periods is empty", "cycle:5,6,10"]),
        (lambda: AtRounds(()), ["AtRounds: rounds is empty", "at:4,9"]),
        (lambda: AtRounds((0,)), ["AtRounds: a round is 0", ">= 1"]),
        (lambda: AtRounds((4, 4)), ["AtRounds: rounds (4, 4)", "repetitions"]),
        (lambda: Soft(3, 0.2, -math.inf), ["Soft: inject is -inf", "from -1e+30 to 1e+30"]),
        (lambda: Soft(3, 1e31, 0.1), ["Soft: retain is 1e+31", "from -1e+30 to 1e+30", "soft:3:0.2:0.1"]),
        (lambda: Soft(3, 10**400, 0), ["Soft: retain is 1000"]),
        (lambda: Soft(3, "0.2", 0.1), ["Soft: retain is '0.2'"]),  # type: ignore[arg-type]
        (lambda: Soft(3, False, 0), ["Soft: retain is False"]),
        (lambda: from_json({"kind": "sometimes"}), ["from_json: kind 'sometimes'", "never", "periodic"]),
        (lambda: from_json({"kind": ["never"]}), ["from_json: kind ['never']"]),
        (lambda: from_json({"period": 3}), ["from_json: kind None"]),
        (lambda: from_json({"kind": "periodic"}), ["from_json: 'periodic' takes ['period'], got []"]),
        (lambda: from_json({"kind": "periodic", "period": 3, "retain": 0}), ["got ['period', 'retain']"]),
        (lambda: from_json({"kind": "periodic", "period": 0}), ["period is 0"]),
    ],
)
def test_impossible_values_say_what_to_do(build: Callable[[], object], words: list[str]):
    """A value or JSON object that is no policy raises a ValueError with the argument, its value and the range."""
    with pytest.raises(ValueError, match=re.escape(words[0])) as caught:
        build()
    assert all(word in str(caught.value) for word in words), caught.value


@given(POLICIES)
def test_a_policy_is_a_value(policy: RestartPolicy):
    """Equal fields make equal policies with equal hashes; no field can be changed; pickle keeps it."""
    values = [getattr(policy, field.name) for field in dataclasses.fields(policy)]  # type: ignore[arg-type]
    twin = type(policy)(*values)
    assert twin == policy
    assert hash(twin) == hash(policy)
    assert pickle.loads(pickle.dumps(policy)) == policy  # noqa: S301 - our own bytes
    for field in dataclasses.fields(policy):  # type: ignore[arg-type]
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(policy, field.name, 1)


# --- text and JSON ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("never", Never()),
        ("3", Periodic(3)),
        ("cycle:5,6,10", Cycle((5, 6, 10))),
        ("at:4,9", AtRounds((4, 9))),
        ("soft:3:0.2:0.1", Soft(3, 0.2, 0.1)),
    ],
)
def test_promised_texts(text: str, policy: RestartPolicy):
    """The five text forms of house.md mean their policy, and the policy prints as that text."""
    assert parse(text) == policy
    assert str(policy) == text
    assert parse(f"  {text} ") == policy


@pytest.mark.parametrize(
    "text",
    [
        "soft:3:0.2:0.1",
        "soft:3:1:0",
        "soft:3:1.0:0.0",
        "soft:3:-1:2",
        "soft:1:100000000000000000000:0",
        "norm:2",
        "norm:2.0",
        "cosine:0",
        "cap:1",
        "bound:100000000000000000000",
        "lookahead:0:1",
        "probe:keep,1,1.0,1.30",
    ],
)
def test_numbers_keep_their_writing(text: str):
    """Whole numbers stay whole and floats floats, in text and JSON: the names of runs are made of them."""
    policy = parse(text)
    assert str(policy) == text
    back = from_json(json.loads(json.dumps(to_json(policy))))
    assert (back, str(back)) == (policy, text)


@pytest.mark.parametrize("number", ["100000000000000000000", "-100000000000000000000", str(10**30), "1e30"])
def test_coefficients_that_no_integer_of_a_tensor_holds(number: str):
    """A whole number beyond 64 bits does what the same float does, in the optimizer and its slow twin."""
    for text in (f"soft:1:{number}:0", f"soft:1:0:{number}"):
        param = torch.nn.Parameter(torch.zeros(3))
        outer = OuterSGD([param], 1e-30, 0.5, restart=text)
        twin = ReferenceOuter([param.detach().double()], OuterRule(1e-30, 0.5), parse(text))
        param.grad = torch.full((3,), 1e-10)
        outer.step()
        twin.round([param.grad.double()])
        torch.testing.assert_close(outer.state[param]["momentum_buffer"].double(), twin.m[0], rtol=1e-6, atol=0)


@given(st.one_of(POLICIES, st.sampled_from(ALL).map(parse)))
def test_text_and_json_there_and_back(policy: RestartPolicy):
    """`parse` is the inverse of `str` and `from_json` of `to_json`, exactly (floats keep all their digits)."""
    for back in (parse(str(policy)), from_json(json.loads(json.dumps(to_json(policy), allow_nan=False)))):
        assert back == policy
        assert type(back) is type(policy)
        assert (hash(back), str(back)) == (hash(policy), str(policy))


def test_what_parse_takes_and_from_json_leaves():
    """A policy is returned as it is, a whole number is a period; a JSON object can be read again."""
    policy, data = Soft(3, 1, 0.0), {"kind": "cycle", "periods": [5, 6]}
    assert parse(policy) is policy
    assert parse("soft:3:1:0") == parse("soft:3:1.0:0.0") == policy
    assert hash(parse("soft:3:1:0")) == hash(parse("soft:3:1.0:0.0"))
    assert parse(4) == parse("4") == parse("periodic:4") == Periodic(4)
    assert from_json(data) == from_json(data) == Cycle((5, 6))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("sometimes", ["'sometimes'", "never", "cycle:5,6,10", "at:4,9", "soft:3:0.2:0.1"]),
        ("", ["''", "never"]),
        ("--3", ["'--3'", "never"]),
        ("²", ["'²'", "never"]),
        ("3.0", ["'3.0'", "a period such as 3"]),
        ("-3", ["period is -3", ">= 1"]),
        ("never:3", ["'never:3'", "wrong number of values", "write never"]),
        ("soft:3:0.2", ["'soft:3:0.2'", "wrong number of values", "soft:PERIOD:RETAIN:INJECT"]),
        ("soft:3:lots:0.1", ["'lots'", "not a number"]),
        ("soft:3:nan:0.1", ["retain is nan"]),
        ("soft:2.5:0:0", ["period is 2.5", "whole number"]),
        ("cycle", ["'cycle'", "whole numbers separated by commas"]),
        ("cycle:5,,6", ["'cycle:5,,6'", "whole numbers separated by commas"]),
        ("cycle:5:6", ["'cycle:5:6'", "whole numbers separated by commas"]),
        ("cycle:5,0", ["period is 0", ">= 1"]),
        ("cosine:1.5", ["Cosine: threshold is 1.5", "from -1 to 1", "cosine:0.2"]),
        ("norm:0", ["NormRatio: ratio is 0", "above 0", "norm:1.5"]),
        ("norm:1" + 310 * "0", ["NormRatio: ratio is 1000", "finite number above 0"]),
        ("norm:inf", ["NormRatio: ratio is inf", "finite number above 0", "norm:1.5"]),
        ("loss:", ["'loss:'", "'' is not a number", "loss:RETAIN"]),
        ("loss:1", ["LossTest: retain is 1", "loss:0.5"]),
        ("tracked:1", ["Tracked: first is 1", "whole number >= 2"]),
        ("cap:-1", ["GainCap: gain is -1", "above 0", "cap:1"]),
        ("bound:0.0", ["BufferBound: ratio is 0.0", "above 0", "bound:1.5"]),
        ("reseed:0", ["Reseed: period is 0", "whole number >= 1"]),
        ("debiased:-1", ["Debiased: period is -1", "whole number >= 0"]),
        ("lookahead:1.1:0", ["LookAheadGate: early is 1.1", "from 0 to 1", "lookahead:0.1:0.1"]),
        ("lookahead:0:-1", ["LookAheadGate: late is -1", "from 0 to 1", "lookahead:0.1:0.1"]),
        ("probe", ["probe:keep,average"]),
        ("probe:keep", ["Probe: candidates are keep", "two different", "probe:keep,average"]),
        ("probe:keep,keep", ["Probe: candidates are keep,keep", "two different", "probe:keep,average"]),
        ("probe:keep,often", ["Probe: candidate 'often'", "keep, drop, half, average, fresh", "1.3"]),
    ],
)
def test_bad_texts_say_what_to_write(text: str, words: list[str]):
    """A text that is no policy raises a ValueError that repeats it and shows what to write."""
    with pytest.raises(ValueError, match=re.escape(words[0])) as caught:
        parse(text)
    assert all(word in str(caught.value) for word in words), caught.value


# --- conversion ---------------------------------------------------------------------------------------------------


def trajectory(rule: OuterRule, policy: RestartPolicy, gradients: list[float]) -> list[float]:
    """Where x is after each round, from x = m = 0, by the equations of house.md on one number."""
    b, x, m, state, age, places = rule.momentum, 0.0, 0.0, policy.initial_state(), 0, []
    for number, g in enumerate(gradients, start=1):
        age += 1
        answer = ask(policy, state, RoundSignal(number, age))
        state, restart = answer.state, answer.restart
        if restart and restart.before:
            m, age = restart.retain * m + restart.inject * g, 1
        if rule.form == "sum":
            m = b * m + g
            x -= rule.lr * (g + b * m if rule.nesterov else m)
        else:
            old, m = m, b * m + (1 - b) * g
            x -= rule.lr * ((1 + b) * m - b * old if rule.nesterov else m)
        if restart and not restart.before:
            m, age = restart.retain * m + restart.inject * g, 0
        places.append(x)
    return places


@given(RULES, POLICIES, st.lists(st.floats(-1, 1), min_size=1, max_size=25))
def test_converted_rule_and_policy_take_the_same_path(rule: OuterRule, policy: RestartPolicy, gradients: list[float]):
    """`convert` keeps the whole trajectory, soft injections included, for any pseudo-gradients."""
    other = convert(rule, policy, "ema" if rule.form == "sum" else "sum")
    here, there = trajectory(rule, policy, gradients), trajectory(*other, gradients)
    size = max(map(abs, trajectory_bound(rule, policy, len(gradients))), default=0.0)
    assert here == pytest.approx(there, rel=1e-12, abs=1e-12 * (1 + size))


def trajectory_bound(rule: OuterRule, policy: RestartPolicy, rounds: int) -> list[float]:
    """How large x can get: the same recursion with absolute values."""
    if isinstance(policy, Soft):
        policy = Soft(policy.period, abs(policy.retain), abs(policy.inject))
    return trajectory(rule, policy, [1.0] * rounds)


@given(RULES, POLICIES)
def test_convert_there_and_back(rule: OuterRule, policy: RestartPolicy):
    """Two conversions give back rule and policy, to a few roundings; a conversion to the own form changes nothing."""
    other = convert(rule, policy, "ema" if rule.form == "sum" else "sum")
    back_rule, back = convert(*other, rule.form)
    assert back_rule.lr == pytest.approx(rule.lr, rel=1e-15)
    if isinstance(policy, Soft):
        assert isinstance(back, Soft)
        assert (back.period, back.retain) == (policy.period, policy.retain)
        assert back.inject == pytest.approx(policy.inject, rel=1e-15, abs=5e-324)
    else:
        assert back == other[1] == policy
    assert convert(rule, policy, rule.form) == (rule, policy)


def test_soft_injection_scales_with_the_buffer():
    """`inject_sum = inject_ema / (1 - momentum)`: 0.1 in EMA form at momentum 0.9 is 1 in sum form; retain stays."""
    rule, policy = convert(OuterRule(7, 0.9, form="ema"), Soft(3, 0.2, 0.1), "sum")
    assert (rule.form, rule.lr) == ("sum", pytest.approx(0.7))
    assert isinstance(policy, Soft)
    assert (policy.period, policy.retain, policy.inject) == (3, 0.2, pytest.approx(1.0))


# --- mean outer gain ----------------------------------------------------------------------------------------------


@given(RULES, POLICIES, st.integers(1, 60))
def test_gain_is_the_mean_step_on_a_constant_gradient(rule: OuterRule, policy: RestartPolicy, rounds: int):
    """The gain is the distance that a constant unit pseudo-gradient moves x, over the rounds, in either form."""
    expected = -trajectory(rule, policy, [1.0] * rounds)[-1] / rounds
    scale = max(map(abs, trajectory_bound(rule, policy, rounds))) / rounds
    other = convert(rule, policy, "ema" if rule.form == "sum" else "sum")
    for gain in (mean_outer_gain(rule, policy, rounds), mean_outer_gain(*other, rounds)):
        assert gain == pytest.approx(expected, rel=1e-12, abs=1e-13 * scale)


@given(RULES, st.one_of(st.just(Never()), st.builds(Periodic, PERIOD)), st.integers(1, 60))
def test_gain_in_closed_form(rule: OuterRule, policy: RestartPolicy, rounds: int):
    """`mean (1 - b^(j + nesterov))` in EMA units, j = rounds since the buffer was zero (engines note, section 1)."""
    b = rule.momentum
    ages = [(t - 1) % policy.period + 1 if isinstance(policy, Periodic) else t for t in range(1, rounds + 1)]
    mean = math.fsum(1 - b ** (age + rule.nesterov) for age in ages) / rounds
    assert mean_outer_gain(rule, policy, rounds) == pytest.approx(rule.to("ema").lr * mean, rel=1e-12)


def test_gain_numbers_of_the_engines_note():
    """At K = 3 with Nesterov a restart leaves 0.642 (b = 0.7) and 0.268 (b = 0.9) of the stationary gain."""
    for momentum, share in ((0.7, 0.642), (0.9, 0.268)):
        rule = OuterRule(1.0, momentum, nesterov=True, form="ema")
        assert mean_outer_gain(rule, Periodic(3), 3) == pytest.approx(share, abs=5e-4)


def test_gain_of_a_restart_before_the_mixing(register_policy):
    """A policy that acts before the mixing is simulated with its own timing, injection included."""

    @register_policy("test-before")
    @dataclass(frozen=True, slots=True)
    class Before(RestartPolicy):
        def decide(self, state: State, signal: RoundSignal) -> tuple[State, Restart | None]:
            return state, Restart(0.5, 0.25, before=True) if signal.round == 2 else None

    # Round 1: m = 1. Round 2: m = 0.5 + 0.25, then m = 0.5 * 0.75 + 1. Round 3: m = 0.5 * 1.375 + 1.
    assert mean_outer_gain(OuterRule(1, 0.5), Before(), 3) == pytest.approx((1 + 1.375 + 1.6875) / 3)


def test_gain_refuses_what_it_cannot_know(norm_ratio):
    """No rounds, or a policy that decides from measured signals: a ValueError that says which."""
    with pytest.raises(ValueError, match=r"mean_outer_gain: rounds is 0; it must be a whole number >= 1"):
        mean_outer_gain(OuterRule(1, 0.9), Never(), 0)
    with pytest.raises(ValueError, match=r"mean_outer_gain: norm-ratio:1\.5:2 decides from measured signals"):
        mean_outer_gain(OuterRule(1, 0.9), norm_ratio(1.5, 2), 10)


# --- a user's own policy ------------------------------------------------------------------------------------------


def test_new_policy_has_text_and_json(norm_ratio):
    """A registered policy has its text form and JSON form, there and back, and appears in the messages."""
    policy = norm_ratio(1.5, 2)
    assert str(policy) == "norm-ratio:1.5:2"
    assert parse("norm-ratio:1.5:2") == policy
    assert from_json(json.loads(json.dumps(to_json(policy)))) == policy
    with pytest.raises(ValueError, match="norm-ratio:LIMIT:QUIET"):
        parse("norm-ratio:1.5")
    with pytest.raises(ValueError, match=r"one of .*norm-ratio"):
        parse("sometimes")


def test_names_are_taken_once():
    """A second policy of the same name is refused by name, with the remedy, and the first one stays."""
    other = type("Other", (RestartPolicy,), {"decide": Never.decide})
    twin = type("Periodic", (RestartPolicy,), {"decide": Never.decide})
    taken = r"register: .* named 'periodic' exists already \(twophase\.policies\.scheduled\.Periodic\); choose another"
    for cls in (other, twin):
        with pytest.raises(ValueError, match=taken):
            register("periodic")(cls)
    assert parse("periodic:3") == Periodic(3)


def test_a_policy_may_be_defined_again(register_policy):
    """A class of the same place, as of a notebook's cell that runs twice, takes the older one's name, text and JSON."""

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
    assert older is not newer
    policy = parse("test-behind:3")
    assert type(stale) is older
    assert type(policy) is type(from_json(to_json(policy))) is newer
    assert parse(policy) is policy
    assert list(decisions(policy, 9)) == [5]
    with pytest.raises(ValueError, match=r"Behind\(rounds=3\) is of an earlier definition of Behind; make it anew"):
        parse(stale)


def test_unregistered_policies_are_refused(register_policy):
    """A policy without a name of its own is refused, for its text form would be another policy's, or nobody's.

    A class derived from a policy keeps its own name and text once it is registered.
    """

    @dataclass(frozen=True, slots=True)
    class Nameless(RestartPolicy):
        def decide(self, state: State, signal: RoundSignal) -> tuple[State, Restart | None]:
            return state, Restart() if signal.round == 1 else None

    @dataclass(frozen=True, slots=True)
    class OddPeriodic(Periodic):
        pass

    for policy in (Nameless(), OddPeriodic(3)):
        with pytest.raises(ValueError, match=rf"decorate {type(policy).__name__} with @register"):
            OuterSGD([torch.zeros(1)], 0.1, restart=policy)
    register_policy("test-odd")(OddPeriodic)
    assert str(OddPeriodic(3)) == "test-odd:3"
    assert parse("test-odd:3") == OddPeriodic(3) != Periodic(3)


def test_modules_with_policies_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, register_policy):
    """`TWOPHASE_POLICIES` makes another program's policies known, when a text first names one."""
    (tmp_path / "theirs.py").write_text(
        "from dataclasses import dataclass\n"
        "from twophase.restart import Restart, RestartPolicy, register\n\n"
        "@register('test-theirs')\n"
        "@dataclass(frozen=True, slots=True)\n"
        "class Theirs(RestartPolicy):\n"
        "    first: int = 1\n\n"
        "    def decide(self, state, signal):\n"
        "        return state, Restart() if signal.round == self.first else None\n"
    )
    (tmp_path / "broken.py").write_text("import a_module_that_is_nowhere\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"test-theirs:4' is not known.*TWOPHASE_POLICIES .* names modules"):
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
    parse("opposed")
except ValueError as error:
    assert "TWOPHASE_POLICIES=twophase.studies.policies" in str(error)
from twophase.studies.policies import share_with_workers
share_with_workers()
share_with_workers()
print(os.environ["TWOPHASE_POLICIES"], parse("opposed"))
for name in ("opposed", "soft", "auto"):
    try:
        register(name)(type("Mine", (Never,), {}))
    except ValueError as error:
        print("exists already" in str(error))
"""
    bare = {name: value for name, value in os.environ.items() if name != "TWOPHASE_POLICIES"}
    ended = subprocess.run([sys.executable, "-c", code], env=bare, capture_output=True, text=True, check=True)
    assert ended.stdout.split() == ["twophase.studies.policies", "opposed", "True", "True", "True"]
