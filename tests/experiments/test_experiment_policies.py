"""The parts of `auto` that experiments hold against it: their equations by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from twophase.optim.outer_sgd import OuterSGD

GENERATOR = np.random.default_rng(5)
GRADIENTS = GENERATOR.normal(size=(12, 5)) * np.exp(-0.2 * np.arange(12))[:, None]
NORMS = np.linalg.norm(GRADIENTS, axis=1)


def behind(share: Callable[[int], float]) -> np.ndarray:
    """Updates g + share |g| u / |u| with the last update u."""
    updates = [GRADIENTS[0]]
    for t, g in enumerate(GRADIENTS[1:], start=1):
        last = updates[-1]
        updates.append(g + share(t) * NORMS[t] / np.linalg.norm(last) * last)
    return np.array(updates)


def largest(t: int) -> float:
    """The largest norm since the last power of two but one, as `auto` keeps it."""
    return max(NORMS[2 ** max((t + 1).bit_length() - 2, 0) - 1 : t + 1])


EXPECTED = {
    "along:0.5": behind(lambda _: 0.5),
    "along:0": GRADIENTS,
    "ramp:0.5": behind(lambda t: 0.5 * (t + 1) / len(GRADIENTS)),
    "gain:1": np.array([(2 - NORMS[t] / largest(t)) * g for t, g in enumerate(GRADIENTS)]),
    "gain:0": GRADIENTS,
}


@pytest.mark.parametrize("rule", [{"lr": 0.7, "momentum": 0.9, "nesterov": True}, {"lr": 1.1, "form": "ema"}], ids=str)
@pytest.mark.parametrize("text", EXPECTED)
def test_equations(text: str, rule: dict[str, Any]) -> None:
    """In `OuterSGD` the updates are those of the equation, whatever the rule is."""
    x = nn.Parameter(torch.zeros(5, dtype=torch.float64))
    outer = OuterSGD([x], **rule, restart=text)
    for t, (g, update) in enumerate(zip(GRADIENTS, EXPECTED[text], strict=True)):
        before = x.detach().clone()
        x.grad = torch.from_numpy(g.copy())
        outer.step(signals={"progress": (t + 1) / len(GRADIENTS)})
        np.testing.assert_allclose((before - x.detach()).numpy(), update, rtol=1e-12, atol=1e-14)
