"""What a rule and a restart policy do to the pseudo-gradients, without any: which outer updates are the same.

Every outer update is a linear combination of the pseudo-gradients so far, `u_t = sum_i c_ti g_i`. Its coefficients are
known in advance for a policy that reads the round number only. Two runs on the same data stay the same run for as long
as their updates are the same, in one of two senses:

* **algebra**: equal coefficients in exact arithmetic, numbers being what they are in decimal (0.7 is 7/10). The usual
  identities follow. Momentum 0 makes heavy ball, Nesterov and all periods one rule. A period at or above the number of
  rounds is no restart. Period 1 is plain SGD. A rule in its other form is the same rule.
* **bits**: the same floating-point operations on the same numbers, so that `twophase.optim.outer_sgd` gives the same
  bits. This holds for float32 and float64 anchors; of 16-bit ones, momentum 0 rounds differently. Equal bits imply
  equal algebra, up to the reading of decimals. The converse fails: lr 7 in EMA form and 0.7 in sum form at momentum 0.9
  round differently.

Source: theory notes R2 to R4; the operations are those of `OuterSGD.step` and `restart_`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from twophase.restart import Restart, RestartPolicy, RoundSignal, State, age_after, ask
from twophase.rule import OuterRule
from twophase.training.config import OF_STEPS

ABSENT = "-"
"""The buffer of a run that has none yet, or needs none (momentum 0)."""
ZERO = "0"
"""The buffer after a hard restart."""

_PRIME = 2**127 - 1
_POINT = 0x5DEECE66D1CE4E5B9A3F17C2D4B60A87 % _PRIME  # any fixed number that no grid of decimals knows of


@dataclass(frozen=True, slots=True)
class Round:
    """One round of a run, in names that are equal if and only if (up to chance 1e-30) the things are."""

    update: str
    """What is subtracted from the anchor."""
    buffer: str
    """The momentum buffer after the round, restart included."""


def is_scheduled(rule: OuterRule, policy: RestartPolicy) -> bool:
    """Return whether the updates are known in advance: no steps of the policy, and no measurements that matter."""
    return not policy.takes_steps and (not policy.needs or rule.momentum == 0)


def restarts(policy: RestartPolicy, rounds: int) -> Iterator[Restart | None]:
    """Yield a scheduled policy's restart in each round, or None."""
    state: State = {}
    age = 0
    for number in range(1, rounds + 1):
        state, decision, _ = ask(policy, state, RoundSignal(number, age + 1))
        age = age_after(decision, age + 1)
        yield decision if isinstance(decision, Restart) else None


def algebra(rule: OuterRule, policy: RestartPolicy, rounds: int) -> list[str]:
    """Name each round's update: equal names for equal coefficients `c_t1 ... c_tt`, in exact arithmetic.

    The coefficients are not written out, because their digits grow with the rounds. Instead `sum_i c_ti X^i` is
    computed modulo a prime of 127 bits at a fixed X. Two different updates agree with probability below rounds / 2^127.

    Args:
        rule: the outer rule; its numbers count as the decimals that they print as.
        policy: the restart policy.
        rounds: T >= 1.

    Returns:
        T names. An adaptive policy's updates are not known in advance: they are named after the policy itself.
    """
    if not is_scheduled(rule, policy):
        return [_opaque(OF_STEPS if policy.takes_steps else rule, policy, number) for number in range(1, rounds + 1)]
    lr, momentum = _residue(rule.lr), _residue(rule.momentum)
    weight = 1 if rule.form == "sum" else (1 - momentum) % _PRIME
    buffer, gradient, names = 0, 1, []
    for restart in restarts(policy, rounds) if not policy.needs else [None] * rounds:
        gradient = gradient * _POINT % _PRIME
        rewritten = None if restart is None else (_residue(restart.retain), _residue(restart.inject))
        if rewritten and restart and restart.before:
            buffer = (rewritten[0] * buffer + rewritten[1] * gradient) % _PRIME
        buffer = (momentum * buffer + weight * gradient) % _PRIME
        update = lr * (momentum * buffer + weight * gradient if rule.nesterov else buffer)
        names.append(f"{update % _PRIME:x}")
        if rewritten and restart and not restart.before:
            buffer = (rewritten[0] * buffer + rewritten[1] * gradient) % _PRIME
    return names


def bits(rule: OuterRule, policy: RestartPolicy, rounds: int) -> list[Round]:
    """Name each round's update and buffer: equal names only for the same floating-point operations.

    The arguments are those of `algebra`.
    """
    if not is_scheduled(rule, policy):
        names = [_opaque(rule, policy, number) for number in range(1, rounds + 1)]
        return [Round(name, f"m{name}" if rule.momentum or policy.takes_steps else ABSENT) for name in names]
    if rule.momentum == 0:
        return [Round(_name("step", rule.lr, _scaled(1.0, t)), ABSENT) for t in range(1, rounds + 1)]
    buffer, history = ABSENT, []
    for number, restart in enumerate(restarts(policy, rounds), start=1):
        if restart is not None and restart.before:
            buffer = _rewritten(buffer, restart, number)
        buffer = _mixed(buffer, rule.momentum, rule.injection, number)
        direction = buffer
        if rule.nesterov:
            direction = _name("ahead", rule.form, rule.momentum, buffer, number)
        update = _name("step", rule.lr, direction)
        if restart is not None and not restart.before:
            buffer = _rewritten(buffer, restart, number)
        history.append(Round(update, buffer))
    return history


def _mixed(buffer: str, momentum: float, weight: float, number: int) -> str:
    """Name `momentum m + weight g`; with any m = 0 it is `weight g`."""
    if buffer in (ABSENT, ZERO):
        return _scaled(weight, number)
    return _name("mix", buffer, momentum, weight, number)


def _rewritten(buffer: str, restart: Restart, number: int) -> str:
    """Name `retain m + inject g`, as `restart_` computes it; a hard restart leaves exact zeros."""
    if buffer in (ABSENT, ZERO) or restart.retain == 0:
        retained = ZERO
    else:
        retained = buffer if restart.retain == 1 else _name("keep", buffer, float(restart.retain))
    if restart.inject == 0:
        return retained
    weight = float(restart.inject)
    return _scaled(weight, number) if retained == ZERO else _name("add", retained, weight, number)


def _scaled(weight: float, number: int) -> str:
    return _name("g", number) if weight == 1 else _name("g", number, weight)


def _opaque(rule: OuterRule, policy: RestartPolicy, number: int) -> str:
    return _name("adaptive", rule, policy, number)


@lru_cache(4096)
def _residue(value: float) -> int:
    exact = Fraction(repr(float(value)))
    return exact.numerator * pow(exact.denominator, -1, _PRIME) % _PRIME


def _name(*parts: object) -> str:
    # Names are chained: an expression's name is made of those of its operands, so it stays short at any round.
    return hashlib.blake2b("\0".join(map(str, parts)).encode(), digest_size=12).hexdigest()
