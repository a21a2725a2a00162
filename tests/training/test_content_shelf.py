"""A checkpoint of any outer method is taken as this run's, and one of other settings is not."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from twophase.diloco.engine import DiLoCo
from twophase.shelf.base import registered
from twophase.shelf.outer import outer
from twophase.training.content import check_tree

SCHEDULES = ["constant", "linear:rounds=9", "momentum:warmup=5"]


def engine(method: str, schedule: str, rounds: int) -> DiLoCo:
    """Return an engine of two replicas after some rounds."""
    torch.manual_seed(0)
    models = [torch.nn.Linear(4, 3) for _ in range(2)]
    made = DiLoCo(models, outer(method, schedule=schedule, filter="edit", readout="ema"), inner_steps=1)
    for number in range(rounds):
        for replica, model in enumerate(models):
            with torch.no_grad():
                model.weight.add_(0.01 * (number + replica + 1))
        made.step()
    return made


def cases() -> list[tuple[str, str]]:
    """Return each method that has no readout of its own with each schedule that goes with it."""
    methods: Any = {name: cls for name, cls in registered("method").items() if not getattr(cls, "reads_out", False)}
    pairs = itertools.product(methods, SCHEDULES)
    return [(name, text) for name, text in pairs if methods[name].first_moment or "momentum" not in text]


@pytest.mark.parametrize(("method", "schedule"), cases())
def test_what_rounds_change_is_no_other_setting(method: str, schedule: str) -> None:
    """Rates that a schedule sets, the weights of moments and a filter's averages may differ from a fresh run's."""
    saved, fresh = (engine(method, schedule, rounds).state_dict() for rounds in (4, 0))
    check_tree(saved["fragments"][0]["outer"]["param_groups"], fresh["fragments"][0]["outer"]["param_groups"], PATH)


PATH = "fragments.0.outer.param_groups"


@pytest.mark.parametrize(
    ("method", "schedule"),
    [("adamw:lr=0.03", "constant"), ("nesterov:momentum=0.8", "constant"), ("nesterov", "linear:rounds=10")],
)
def test_other_settings_are_refused(method: str, schedule: str) -> None:
    """Another learning rate, momentum or schedule is not this run's."""
    name = method.partition(":")[0]
    fresh = engine(name, "constant" if schedule == "constant" else "linear:rounds=9", 0).state_dict()
    saved = engine(method, schedule, 4).state_dict()
    with pytest.raises(ValueError, match=PATH):
        check_tree(saved["fragments"][0]["outer"]["param_groups"], fresh["fragments"][0]["outer"]["param_groups"], PATH)
