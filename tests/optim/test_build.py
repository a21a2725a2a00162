"""The outer optimizer from what a user chooses: the table of names, rules, `auto`, functions, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from outers import parameters, run
from replicas import same_bits
from twophase.optim.build import named_optimizer, outer_optimizer
from twophase.optim.names import RULES
from twophase.optim.outer_sgd import OuterSGD
from twophase.optim.restarting import Restarting
from twophase.restart import Auto, Periodic, parse
from twophase.rule import OuterRule

SHAPES = [(7,), (3, 5), (6, 2), (2, 3, 4)]
SINGLE: Any = nn.Parameter(torch.ones(2, 2))


def named(params: list[Any]) -> list[tuple[str, Any]]:
    return [(str(number), p) for number, p in enumerate(params)]


@pytest.mark.parametrize("method", ["adamw", "muon"])
@pytest.mark.parametrize("numbers", [{}, {"lr": 0.05, "momentum": 0.5}, {"momentum": 0.0}], ids=str)
def test_adamw_and_muon_are_torchs(method: str, numbers: dict[str, float]):
    """AdamW for all parameters; Muon for matrices, and momentum SGD for all others; by name those of the table."""
    lr, b = ({"lr": 0.02 if method == "adamw" else 0.1, "momentum": 0.9} | numbers).values()
    params, twins, by_name = parameters(0, SHAPES), parameters(0, SHAPES), parameters(0, SHAPES)
    if method == "adamw":
        theirs = [torch.optim.AdamW(twins, lr, (b, 0.99), weight_decay=0.0)]
    else:
        theirs = [torch.optim.Muon([p for p in twins if p.ndim == 2], lr, 0.0, b)]
        theirs += [torch.optim.SGD([p for p in twins if p.ndim != 2], 0.7, b, nesterov=b > 0)]
    run(Restarting(named_optimizer(named(params), method, **numbers)), range(4), params)
    run(Restarting(theirs), range(4), twins)
    assert all(map(same_bits, params, twins))
    run(outer_optimizer(named(by_name), method), range(4), by_name)
    assert all(map(same_bits, by_name, twins)) == (not numbers)
    assert len(named_optimizer(named(params)[:1], method)) == len(named_optimizer(named(params)[1:2], method)) == 1


def rmsprop(named: list[tuple[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.RMSprop([p for _, p in named], lr=0.01)


@pytest.mark.parametrize(
    ("outer", "restart", "kind", "policy"),
    [
        ("nesterov", 3, OuterSGD, Periodic(3)),
        ("auto", None, OuterSGD, Auto()),
        (Auto(), None, OuterSGD, Auto()),
        (OuterRule(0.5, 0.5, form="ema"), "soft:2:0.1:0.2", OuterSGD, parse("soft:2:0.1:0.2")),
        ("muon", "2", Restarting, "2"),
        (rmsprop, 2, Restarting, "2"),
        (rmsprop, None, torch.optim.RMSprop, None),
        (lambda named: OuterSGD(named, 0.1, 0.5, restart=4), None, OuterSGD, Periodic(4)),
        (lambda named: Restarting(rmsprop(named), 5), None, Restarting, "5"),
        (lambda named: [rmsprop(named[:1]), rmsprop(named[1:])], 2, Restarting, "2"),
    ],
)
def test_choices(outer: Any, restart: Any, kind: type, policy: Any):
    """A rule, a name, `auto` or a policy that takes steps, and a function; with the restart that was asked for."""
    made = outer_optimizer(named(parameters(0)), outer, restart)
    assert type(made) is kind
    assert all(str(group.get("restart")) == str(policy) for group in made.param_groups)
    rule = RULES.get(outer) if isinstance(outer, str) else outer
    if isinstance(rule, OuterRule):
        group = made.param_groups[0]
        assert OuterRule(group["lr"], group["momentum"], group["nesterov"], group["form"]) == rule


@pytest.mark.parametrize(
    ("name", "outer", "restart"),
    [
        *(("outer", outer, None) for outer in ("adam", "3", torch.optim.Adam, rmsprop([("", SINGLE)]), 0.7, None)),
        *(("outer", outer, None) for outer in (Periodic(3), lambda _: None, lambda _: [], lambda _: ["adam"])),
        ("lacks 1", lambda named: rmsprop(named[:1]), None),
        *(("restart", outer, 3) for outer in ("auto", Auto(), lambda named: OuterSGD(named, 0.1))),
        ("restart", lambda named: Restarting(rmsprop(named), 5), 3),
        ("hard", "adamw", "soft:3:0.2:0.1"),
    ],
)
def test_what_is_no_outer_optimizer(name: str, outer: Any, restart: Any):
    """A name that is not known, a policy that needs a rule, a class, a number, a function without a result."""
    with pytest.raises(ValueError, match=name):
        outer_optimizer(named(parameters(0)), outer, restart)
