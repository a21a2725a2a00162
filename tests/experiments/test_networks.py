"""Linear models of networks: the theory holds, and what is wrong shows."""

from __future__ import annotations

from dataclasses import replace

import linear_network
from linear_network import DILOCO, HEAVY_BALL, Inner, Linear, Modes, Network
from twophase.rule import OuterRule


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
