"""The policy `auto`: its equation by hand, what does not enter it, and what it promises whatever happens."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from twophase.diloco.engine import DiLoCo
from twophase.optim.outer import OuterSGD
from twophase.policies.adaptive import Auto
from twophase.restart import RoundSignal, State, Step, ask
from twophase.rule import OuterRule
from twophase.sweeps.history import algebra
from twophase.theory.rollout import rollout
from twophase.training.config import OuterConfig

RULES = [
    OuterRule(lr, momentum, nesterov, form)  # type: ignore[arg-type]
    for lr, momentum, nesterov, form in [(0.7, 0.9, True, "sum"), (1.1, 0.3, False, "ema"), (0.0, 0.99, True, "ema")]
]
NORMS = st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=40)


def by_hand(gradients: np.ndarray) -> np.ndarray:
    """The updates for given pseudo-gradients, (rounds, dim), with all norms so far at hand."""
    norms, updates = [], []
    for t, g in enumerate(gradients, start=1):
        norms.append(np.linalg.norm(g))
        # Two buckets, turned over at 1, 2, 4, ...: the newest two of the spans [1, 2), [2, 4), [4, 8), ...
        begin = 2 ** max(t.bit_length() - 2, 0)
        largest = max(norms[begin - 1 :])
        last = updates[-1] if updates else np.zeros_like(g)
        length = np.linalg.norm(last)
        along_buffer = (1 - norms[-1] / largest) * norms[-1] / length * last if length > 0 else 0 * last
        updates.append(g + along_buffer)
    return np.array(updates)


def test_the_equation() -> None:
    """In `OuterSGD` the updates are those of the equation, for shrinking, growing and turning pseudo-gradients."""
    generator = np.random.default_rng(0)
    gradients = generator.normal(size=(25, 6)) * np.exp(-0.1 * np.arange(25) + 0.6 * generator.normal(size=25))[:, None]
    x = nn.Parameter(torch.zeros(6, dtype=torch.float64))
    outer = OuterSGD([x], 0.7, 0.9, nesterov=True, restart="auto")
    for g, update in zip(gradients, by_hand(gradients), strict=True):
        before = x.detach().clone()
        x.grad = torch.from_numpy(g.copy())
        outer.step()
        np.testing.assert_allclose((before - x.detach()).numpy(), update, rtol=1e-12, atol=1e-14)
    assert outer.param_groups[0]["restarts"] == 0


def test_nothing_of_the_rule_enters() -> None:
    """Rules of any learning rate, momentum, kind and form take the same path, bit for bit, and are one run."""
    paths = []
    for rule in [*RULES, OuterRule(0.7, 0.0)]:
        x = nn.Parameter(torch.ones(100))
        outer = OuterSGD.from_rule([x], rule, "auto")
        generator = torch.Generator().manual_seed(0)
        for number in range(20):
            x.grad = (0.1 * x.detach() + 0.01 * torch.randn(100, generator=generator)) * 0.9**number
            outer.step()
        paths.append(x.detach().clone())
    assert all(torch.equal(path, paths[0]) for path in paths)
    names = {tuple(algebra(rule, Auto(), 7)) for rule in [*RULES, OuterRule(0.7, 0.0)]}
    assert len(names) == 1


def test_no_rule_is_needed() -> None:
    """Without a rule the optimizer and the engine do what they do with any; other policies name what is missing."""
    x, y = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizers = OuterSGD([x], restart="auto"), OuterSGD([y], 0.3, 0.9, restart="auto")
    for round_ in range(6):
        for parameter, optimizer in zip((x, y), optimizers, strict=True):
            parameter.grad = parameter.detach() / (round_ + 1)
            optimizer.step()
    assert torch.equal(x, y)
    engine = DiLoCo(torch.nn.Linear(2, 1), "auto", inner_steps=3)
    assert engine.outer.param_groups[0]["restart"] == "auto"
    for make in (
        lambda: OuterSGD([x]),
        lambda: OuterSGD([x], restart=3),
        lambda: DiLoCo(torch.nn.Linear(2, 1), "3", inner_steps=3),
    ):
        with pytest.raises(ValueError, match=r"there is none\. Give OuterSGD an lr"):
            make()
    with pytest.raises(ValueError, match="one of the two"):
        DiLoCo(torch.nn.Linear(2, 1), "auto", restart=3, inner_steps=3)


def test_a_rule_without_momentum_gets_a_buffer() -> None:
    """In rollouts, configurations and engines."""
    without, with_one = (rollout(OuterRule(0.3, momentum), [0.9, 0.2], 20, "auto") for momentum in (0.0, 0.9))
    np.testing.assert_array_equal(without.residual, with_one.residual)
    averaging = rollout(OuterRule(1.0, 0.0), [0.9, 0.2], 20, "never")
    assert not np.array_equal(without.residual, averaging.residual)
    assert OuterConfig(restart="auto").known_rule().momentum > 0
    assert OuterConfig(restart="3").rule() == OuterRule(1.0, 0.0)
    anchors = []
    for momentum in (0.0, 0.9):
        model = nn.Linear(2, 1)
        nn.init.ones_(model.weight)
        nn.init.ones_(model.bias)
        engine = DiLoCo(model, OuterRule(0.3, momentum), restart="auto", inner_steps=1)
        for number in range(6):
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(0.9 - 0.1 * number)
            engine.step()
        anchors.append([p.detach().clone() for p in engine.anchor.values()])
    assert all(torch.equal(a, b) for a, b in zip(*anchors, strict=True))


def steps(norms: list[float], buffer: float, unit: float = 1.0) -> tuple[list[Step], State]:
    """The steps for some norms of g and one of m, and the memory after them, which goes through JSON each round."""
    state: State = {}
    taken = []
    for number, norm in enumerate(norms, start=1):
        answer = ask(Auto(), state, RoundSignal(number, number, norm * unit, buffer * unit, -1.0, rule=RULES[0]))
        state = json.loads(json.dumps(answer.state))
        assert answer.step is not None
        assert answer.restart is None
        taken.append(answer.step)
    return taken, state


@given(NORMS, st.floats(1e-6, 1e6), st.floats(1e-3, 1e3))
def test_an_update_is_at_most_twice_as_long_as_averaging(norms: list[float], buffer: float, unit: float) -> None:
    """Whatever the norms have been, the buffer's part is at most |g| long and never points backwards.

    Pseudo-gradients and buffer in other units give the same weights.
    """
    target, _ = steps(norms, buffer, unit)
    for step, other, norm in zip(steps(norms, buffer)[0], target, norms, strict=True):
        assert step.along_g == 1
        assert 0 <= step.along_m * buffer <= norm * (1 + 1e-12)
        assert other.along_m == pytest.approx(step.along_m, rel=1e-9, abs=1e-12 * norm / buffer)


@given(st.integers(1, 300))
def test_it_remembers_at_least_half_of_the_rounds(last: int) -> None:
    """The largest norm that counts is that of at least half of the rounds, the present one included."""
    # The further back, the larger: what is remembered tells how far that is.
    state = steps([float(1000 - number) for number in range(1, last + 1)], 1.0)[1]
    remembered = last - (1000 - max(state["older"], state["newer"])) + 1
    assert last / 2 <= remembered <= last
