"""Networks beside their linear models: the theory holds as far as the network is linear, and what is wrong shows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import linear_network
from linear_network import DILOCO, HEAVY_BALL, Inner, Linear, Modes, Network, Settings
from twophase import theory
from twophase.rule import OuterRule

SMALL = Settings(20, 0.9, 4, 12, 32, (256, 64), 1, (1, 4))


@pytest.mark.slow
def test_the_theory_holds_as_far_as_the_network_is_linear() -> None:
    """Cycles of the linear model are `[T^K]_11` to 1e-8; departures fall with the width; halves have own modes."""
    data = linear_network.load_data(SMALL.images)
    linear = linear_network.linear_models(SMALL, data)
    runs = linear[linear["part"] != "cycle"]
    assert (runs["departure_of_mean"] < 1e-12).all()
    is_pooled = (runs["part"] == "same data") | (runs["inner_steps"] == 1)
    assert ((runs["departure"] < 1e-12) == is_pooled).all()
    cycle = linear[(linear["part"] == "cycle") & (linear["rule"] == "DiLoCo")]
    matrices = theory.transition(DILOCO, cycle["sigma"].to_numpy())
    expected = np.linalg.matrix_power(matrices, int(cycle["restart"].iloc[0]))[:, 0, 0]
    np.testing.assert_allclose(cycle["contraction"], expected, rtol=0, atol=1e-8)
    networks = linear_network.networks(SMALL, data)
    by_width = networks.pivot_table(index=["rule", "restart"], columns="width", values="departure")
    assert (by_width[256] < by_width[64] / 2).all()


def test_what_is_wrong_shows() -> None:
    """A sigma off by 1 %, another period or rule is 1e-3 and more away from a trained linear model."""
    model = Linear.of(Network(16, 0, linear_network.load_data(12)))
    inner = Inner(0.4 / model.steepest(), 5)
    modes = Modes.of(model, inner)
    path = linear_network.train(model, HEAVY_BALL, "3", 12, inner)

    def departure(modes: Modes, rule: OuterRule, restart: str) -> float:
        return linear_network.departure(path, modes.predict(rule, restart, 12))

    assert departure(modes, HEAVY_BALL, "3") < 1e-12
    assert departure(replace(modes, sigma=0.99 * modes.sigma), HEAVY_BALL, "3") > 1e-3
    assert departure(modes, HEAVY_BALL, "4") > 1e-3
    assert departure(modes, DILOCO, "3") > 1e-3
