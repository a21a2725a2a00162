"""Networks beside their linear models."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import digits
import linear_network
from digits import HEAVY_BALL, USUAL, Inner, Linearised, Network
from extras import need
from twophase.theory import transition

need("sklearn", "the extra digits is not installed")


@pytest.fixture(scope="module")
def data() -> digits.Data:
    return digits.load_data((4, 9), 12)


@pytest.mark.slow
def test_the_theory_holds_as_far_as_the_network_is_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cycles of the linear model are `[T^K]_11` to 1e-8; departures fall with the width; halves have own modes."""
    small = replace(digits.QUICK, images=20, inner_steps=4, rounds=12, shard_inner_steps=(1, 4))
    monkeypatch.setattr(digits, "QUICK", small)
    result = linear_network.table(quick=True)
    assert result.numbers["linear"]["residual_deviation"] < 1e-12
    modes = [row for row in result.rows if row["part"] == "linear" and row["rule"] == USUAL.describe()]
    modes = [row for row in modes if row["restart"] == "3"]
    matrices = transition(USUAL, [row["sigma"] for row in modes])
    expected = np.linalg.matrix_power(matrices, 3)[:, 0, 0]
    np.testing.assert_allclose([row["contraction"] for row in modes], expected, rtol=0, atol=1e-8)
    for run in result.numbers["network"]["runs"]:
        assert run["departure"]["exponent"] < -2 * run["departure"]["standard_error"]
    for row in result.rows:
        if row["part"] == "shards":
            assert (row["departure"] < 1e-12) == (row["inner_steps"] == 1)
            assert row["departure_exact"] < 1e-12


def test_what_is_wrong_shows(data: digits.Data) -> None:
    """A sigma off by 1 %, another period or rule is 1e-3 and more away from a trained linear model."""
    model = Linearised.of(Network(16, 0, data))
    inner = Inner(0.4 / digits.largest_eigenvalue(model), 5)
    modes = digits.modes_of(model, inner)
    path = digits.train(model, HEAVY_BALL, "3", 12, inner, model.some(slice(None)))
    assert digits.deviations(path, modes, HEAVY_BALL, "3", 3)[0] < 1e-12
    for wrong, rule, period in (
        (replace(modes, sigma=0.99 * modes.sigma), HEAVY_BALL, 3),
        (modes, HEAVY_BALL, 4),
        (modes, USUAL, 3),
    ):
        assert digits.deviations(path, wrong, rule, str(period), period)[0] > 1e-3
