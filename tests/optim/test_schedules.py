"""Outer schedules: their numbers, their texts, and the steps of an optimizer that follows one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from outers import parameters, run
from replicas import through_file
from twophase.optim.outer_sgd import OuterSGD, rule_of
from twophase.optim.restarting import Restarting
from twophase.optim.schedules import Schedule, follow
from twophase.rule import OuterRule

RULE = OuterRule(0.5, 0.8, nesterov=True)


def test_numbers():
    """A line of learning rates to a factor, a rising momentum, and both end with the run; a text is read back."""
    lrs = [Schedule.parse("linear:2").at(RULE, t, 5).lr for t in range(1, 8)]
    np.testing.assert_allclose(lrs, [0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.0], rtol=1e-15)
    momenta = [Schedule.parse("momentum:0.3").at(RULE, t, 5).momentum for t in range(1, 8)]
    np.testing.assert_allclose(momenta, [0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.8], rtol=1e-15)
    assert Schedule.parse("constant").at(RULE, 3, 5) is RULE
    assert Schedule.parse("momentum:0").at(RULE, 1, 5).momentum > 0  # else there would be no buffer
    assert Schedule.parse("momentum:0.3").at(OuterRule(1.0, 0.0), 2, 5) == OuterRule(1.0, 0.0)
    assert Schedule.parse(Schedule("linear", 0.1)) == Schedule.parse(" linear:0.1 ") == Schedule("linear", 0.1)


@pytest.mark.parametrize(
    "text", ["cosine", "linear", "linear:-1", "linear:101", "linear:nan", "momentum:1", "constant:1", "momentum:x", ""]
)
def test_what_is_no_schedule_is_refused(text: str):
    """By its name."""
    with pytest.raises(ValueError, match="schedule"):
        Schedule.parse(text)
    with pytest.raises(ValueError, match="schedule"):
        Schedule("cosine")


@pytest.mark.parametrize("text", ["linear:2", "momentum:0.1"])
def test_a_loaded_optimizer_follows(text: str):
    """By the rounds of its groups, from the numbers that it was built with."""
    params, schedule = parameters(0), Schedule.parse(text)
    outer = OuterSGD(params, 0.5, 0.8, nesterov=True)
    for number in range(6):
        state = through_file(outer.state_dict())
        outer = OuterSGD(params, 0.5, 0.8, nesterov=True)
        follow(outer, schedule, 5)
        outer.load_state_dict(state)
        run(outer, [number])
        assert rule_of(outer.param_groups[0]) == schedule.at(RULE, number + 1, 5)


def test_of_another_optimizer_learning_rates_alone():
    """Each group's by its own first value; a momentum is refused."""
    params = parameters(0)
    outer = Restarting(torch.optim.Adam([{"params": params[:2], "lr": 0.2}, {"params": params[2:]}], lr=0.1))
    follow(outer, Schedule("linear", 0.0), 4)
    run(outer, range(2))
    assert [group["lr"] for group in outer.param_groups] == pytest.approx([0.15, 0.075])
    with pytest.raises(ValueError, match="momentum"):
        follow(outer, Schedule("momentum", 0.0), 4)
