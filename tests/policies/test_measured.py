"""Policies that decide from what a round measures: against tables by hand, the theory, and the notes' own losses."""

from __future__ import annotations

import itertools
import math
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from policies import ALL, EMA, MODELLED, OF_EXPERIMENTS, SUM, Rising, asked, columns, each_rule, fired
from twophase.restart import (
    Answer,
    AtRounds,
    Cycle,
    Periodic,
    Restart,
    RestartPolicy,
    RoundSignal,
    Soft,
    ask,
    convert,
    parse,
)
from twophase.rule import OuterRule
from twophase.theory.rollout import rollout

DROP = Restart(before=True)
SIX = (0.95, 0.85, 0.75, 0.60, 0.45, 0.30)
BLOCKS = tuple(np.concatenate([np.linspace(0.92, 1, 9), np.linspace(0.55, 0.65, 9), np.linspace(0.18, 0.26, 9)]))
WIDE = tuple(np.geomspace(0.01, 1, 12))


# --- text, JSON, range --------------------------------------------------------------------------------------------


SINGLE: Any = np.float32
WHOLE: Any = np.int64


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("norm:2", OF_EXPERIMENTS.NormRatio(2)),
        ("norm:0.5", OF_EXPERIMENTS.NormRatio(SINGLE(0.5))),
        ("soft:3:0:0.5", Soft(WHOLE(3), WHOLE(0), SINGLE(0.5))),
        ("3", Periodic(WHOLE(3))),
        ("cycle:2,3", Cycle([np.int32(2), 3])),  # type: ignore[arg-type]
        ("at:4,9", AtRounds([WHOLE(4), 9])),  # type: ignore[arg-type]
        ("test-rising:0.5", Rising(0.5)),
    ],
)
def test_what_texts_mean(text: str, policy: RestartPolicy):
    """A text names its values in the order of the fields.

    NumPy's numbers become plain ones and lists tuples, so that text and hash are those of an equal policy.
    """
    assert parse(text) == parse(str(policy)) == policy
    assert str(policy) == text
    assert hash(parse(text)) == hash(policy)
    values = [getattr(policy, field.name) for field in fields(policy)]  # type: ignore[arg-type]
    items = [item for value in values for item in (value if isinstance(value, tuple) else (value,))]
    assert {type(item) for item in items} <= {int, float}


# --- decisions by hand --------------------------------------------------------------------------------------------


def test_rounds_written_out():
    """`gradient` fires in exactly these rounds, always hard and before the mixing.

    Not in the first one, where the buffer holds nothing; in the round after a restart it holds one round.
    """
    answers = asked("gradient", columns("cosine", -1.0, 0.5, -0.1, -0.1, 0.0, -1e-9))
    assert fired(answers) == [3, 4, 6]
    assert {answer.restart for answer in answers} == {None, DROP}
    assert {answer.step for answer in answers} == {None}


def test_comparisons_written_out():
    """`norm:1.5` fires where |m| > 1.5 |g| strictly; a user's own compares a loss with that of the round before."""
    norms = columns("pseudo_gradient_norm buffer_norm", (1, 9), (1, 1.5), (1, 1.51), (2, 2.9), (0, 0.1))
    assert fired(asked("norm:1.5", norms)) == [3, 5]
    answers = asked("test-rising:0.5", columns("loss", 9.0, 4.0, 4.1, 4.1, 3.0, 3.1))
    assert fired(answers) == [3, 6]
    assert [answer.restart for answer in answers if answer.restart] == 2 * [Restart(0.5, before=True)]


# --- what is not there, or not finite -----------------------------------------------------------------------------


def complete(**changed: Any) -> RoundSignal:
    """A third round in which everything is there."""
    measured = {"pseudo_gradient_norm": 1.0, "buffer_norm": 2.0, "cosine": 0.5}
    extra = {"loss": 2.0, "inner_lr": 0.1, "progress": 0.5}
    extra |= {name: value for name, value in changed.items() if name in extra}
    measured |= {name: value for name, value in changed.items() if name in measured}
    return RoundSignal(3, 3, **measured, extra=extra, rule=SUM)


@pytest.mark.parametrize("text", ALL)
def test_what_is_not_finite_is_told(text: str):
    """Of whatever a policy needs, a NaN or infinity is named, decides nothing and leaves its memory as it is."""
    policy = parse(text)
    state = ask(policy, policy.initial_state(), complete()).state
    assert not ask(policy, state, complete()).not_finite
    for name, broken in itertools.product(policy.needs, (math.nan, math.inf, -math.inf)):
        signal = complete(**{name: broken})
        assert ask(policy, state, signal) == Answer(state, not_finite=(name,))
    unneeded = {"pseudo_gradient_norm", "buffer_norm", "cosine"} - policy.needs
    assert not ask(policy, state, complete(**dict.fromkeys(unneeded, math.nan))).not_finite


@pytest.mark.parametrize("text", [text for text in ALL if parse(text).needs])
def test_what_is_missing_is_an_error(text: str):
    """A policy that is asked without what it needs raises a KeyError with its name: that is a caller's mistake."""
    policy = parse(text)
    with pytest.raises(KeyError) as caught:
        ask(policy, policy.initial_state(), RoundSignal(3, 3, rule=SUM))
    assert caught.value.args[0] in policy.needs


# --- reductions, forms --------------------------------------------------------------------------------------------


def noisy(rule: OuterRule, policy: RestartPolicy | str, replicas: int = 2) -> Any:
    """Thirty rounds on six modes with noise that is large enough for every rule to fire."""
    noise = 0.3 * np.random.default_rng(5).normal(size=(30, replicas, len(SIX)))
    return rollout(rule, SIX, 30, policy, noise=noise)


@each_rule
@pytest.mark.parametrize("text", MODELLED)
def test_the_same_path_in_the_other_form(rule: OuterRule, text: str):
    """Rule and policy converted to the other form take the same path with the same restarts."""
    policy = parse("norm:3.0") if text == "norm:1.5" and rule.form == "sum" else parse(text)
    other = convert(rule, policy, "ema" if rule.form == "sum" else "sum")
    first, second = noisy(rule, policy), noisy(*other)
    np.testing.assert_allclose(first.residual, second.residual, rtol=0, atol=1e-11)
    assert first.restarts.tolist() == second.restarts.tolist()
    assert (other[1] == policy) is not isinstance(policy, OF_EXPERIMENTS.NormRatio)
    if isinstance(policy, OF_EXPERIMENTS.NormRatio):
        ratios: list[Any] = [policy, other[1]]
        assert ratios[1].ratio == pytest.approx(ratios[0].ratio * (0.1 if rule.form == "sum" else 10))


@pytest.mark.parametrize("text", [text for text in MODELLED if not parse(text).takes_steps])
def test_without_momentum_nothing_can_be_forgotten(text: str):
    """At momentum 0 a policy that takes no steps of its own changes nothing, in both forms and kinds."""
    for nesterov, form in itertools.product((False, True), ("sum", "ema")):
        rule = OuterRule(0.8, 0.0, nesterov, form)  # type: ignore[arg-type]
        assert np.array_equal(noisy(rule, text).residual, noisy(rule, "never").residual)


# --- the notes' losses --------------------------------------------------------------------------------------------

R30 = [
    (SIX, OuterRule(1.0, 0.7, form="ema"), {"never": "-9.76", "gradient": "-16.6"}),
    (SIX, EMA, {"never": "-3.26", "gradient": "-7.65"}),
    (SIX, OuterRule(1.0, 0.97, form="ema"), {"never": "-1.32", "gradient": "-4.63"}),
    (SIX, OuterRule(1.0, 0.9, True, "ema"), {"never": "-4.50", "gradient": "-9.11"}),
    (SIX, OuterRule(0.7, 0.9), {"never": "-3.32", "gradient": "-19.9"}),
    (SIX, OuterRule(0.7, 0.9, True), {"never": "-10.0", "gradient": "-37.3"}),
    (BLOCKS, EMA, {"never": "-3.30", "gradient": "-6.64"}),
    (WIDE, EMA, {"never": "-1.62", "gradient": "-1.48"}),
    (WIDE, OuterRule(0.7, 0.9), {"never": "-3.25", "gradient": "-3.49"}),
]


def assert_prints(loss: float, printed: str) -> None:
    """log10 of a loss is what the note prints, whose -16.6 stands for -16.546: to half a digit and a tenth of that."""
    digit = 10.0 ** -len(printed.partition(".")[2])
    assert math.log10(loss) == pytest.approx(float(printed), abs=0.55 * digit, rel=0)


@pytest.mark.parametrize(("sigma", "rule", "losses"), R30, ids=range(len(R30)))
def test_final_losses_of_note_r30(sigma: tuple[float, ...], rule: OuterRule, losses: dict[str, str]):
    """After 60 rounds without noise every rule has the final loss of the note's table, to the digits printed there."""
    for text, printed in losses.items():
        assert_prints(rollout(rule, sigma, 60, text).loss[-1], printed)
