"""A float64 quadratic that in-process replicas train on by gradient descent, for the tests of theory against engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from twophase.diloco.engine import DiLoCo
from twophase.diloco.report import RoundReport
from twophase.optim.build import OuterFactory
from twophase.optim.schedules import Schedule, follow
from twophase.restart import RestartPolicy
from twophase.rule import OuterRule

CURVATURES = np.array([0.02, 0.1, 0.3, 0.55, 0.8, 1.0])
INNER_LR, INNER_STEPS, ROUNDS = 0.25, 4, 24
SIGMA = -np.expm1(INNER_STEPS * np.log1p(-INNER_LR * CURVATURES))
REPLICAS = [1, 2, 3, 4]


def disturbances(replicas: int) -> np.ndarray:
    """A different disturbance of every replica, mode and round, large enough to change what adaptive policies do."""
    return 0.2 * np.random.default_rng(replicas).normal(size=(ROUNDS, replicas, len(CURVATURES)))


class Disturbed(torch.optim.SGD):
    """Gradient descent that in the last inner step of a round also moves by minus the disturbance."""

    def __init__(self, params: Any, disturbance: np.ndarray | None) -> None:
        super().__init__(params, lr=INNER_LR)
        self.disturbance = disturbance
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        super().step(closure)
        self.steps += 1
        if self.disturbance is not None and self.steps % INNER_STEPS == 0:
            values = torch.from_numpy(self.disturbance[self.steps // INNER_STEPS - 1])
            (x,) = self.param_groups[0]["params"]
            x.sub_(values)


def engine_run(
    outer: OuterRule | OuterFactory,
    restart: RestartPolicy | None = None,
    noise: np.ndarray | None = None,
    *,
    schedule: str = "constant",
) -> tuple[np.ndarray, list[RoundReport]]:
    """The anchor before and after every round, shape (rounds + 1, modes), and the reports.

    The loss of a replica is `sum(curvature x^2) / 2`. Its parameters are one tensor, or, when `outer` is a function,
    one for every two modes, so that blocks can have param groups. What policies need is supplied as the theory defines
    it.
    """
    size = 2 if callable(outer) else len(CURVATURES)
    slices = [slice(i, i + size) for i in range(0, len(CURVATURES), size)]
    names = [f"x{number}" for number in range(len(slices))]
    models, inners = [], []
    for replica in range(2 if noise is None else noise.shape[1]):
        model = nn.ParameterDict({name: torch.ones(size, dtype=torch.float64) for name in names})
        models.append(model)
        for name, part in zip(names, slices, strict=True):
            disturbance = None if noise is None else noise[:, replica, part]
            inners.append(Disturbed([model.get_parameter(name)], disturbance))

    def place(model: nn.Module) -> np.ndarray:
        return torch.cat([model.get_parameter(name).detach() for name in names]).numpy()

    engine = DiLoCo(models, outer, restart=restart, inner_steps=INNER_STEPS)
    follow(engine.fragments[0].outer, Schedule.parse(schedule), ROUNDS)
    curvatures = torch.from_numpy(CURVATURES)
    places, reports = [np.ones_like(CURVATURES)], []
    for _ in range(ROUNDS * INNER_STEPS):
        for inner in inners:
            inner.zero_grad()
        for model in models:
            x = torch.cat([model.get_parameter(name) for name in names])
            (0.5 * curvatures * x * x).sum().backward()
        for inner in inners:
            inner.step()
        report = engine.step({"inner_lr": 1.0, "progress": len(places) / ROUNDS})
        if report is not None:
            places.append(torch.cat([engine.anchor[name] for name in names]).numpy().copy())
            reports.append(report)
    return np.array(places), reports


def assert_agree(places: np.ndarray, reports: Sequence[Any], expected: np.ndarray, restarts: np.ndarray) -> None:
    """Equal decisions in every round and equal residuals to 1e-12."""
    assert [report.restarted for report in reports] == restarts.tolist()
    assert places.shape == expected.shape
    assert np.abs(expected).max() < 10  # the modes are stable, so that 1e-12 means something
    np.testing.assert_allclose(places, expected, rtol=0, atol=1e-12)
