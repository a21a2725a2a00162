"""`Restarting` and the names of outer optimizers: equal to torch's own optimizers in a loop that makes them anew."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from outers import flat, give, noises, parameters, run
from replicas import same_bits, through_file
from twophase.diloco.engine import DiLoCo
from twophase.optim.build import outer_optimizer
from twophase.optim.names import NAMES, RULES, describe, numbers_of, options_of, rule_of
from twophase.optim.outer import OuterSGD
from twophase.optim.restarting import Restarting, named_optimizer
from twophase.restart import Restart, RestartPolicy, RoundSignal, State, register
from twophase.rule import OuterRule

SHAPES = [(7,), (3, 5), (6, 2)]
Made = Callable[[list[Any]], Any]

BUILDS: dict[str, Made] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.05, betas=(0.9, 0.99), weight_decay=0.0),
    "weight decay": lambda params: torch.optim.AdamW(params, lr=0.05, weight_decay=0.3),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "several": lambda params: [
        torch.optim.Muon([p for p in params if p.ndim == 2], lr=0.1, weight_decay=0.0, momentum=0.9),
        torch.optim.SGD([p for p in params if p.ndim != 2], lr=0.7, momentum=0.9, nesterov=True),
    ],
}
RESTARTS: dict[str, Callable[[int], bool]] = {
    "never": lambda _: False,
    "3": lambda number: number % 3 == 0,
    "cycle:2,3": lambda number: number % 5 in (0, 2),
    "at:4,9": lambda number: number in (4, 9),
}


def by_hand(build: Made, params: list[Any], restarts: Callable[[int], bool], rounds: int) -> None:
    """Step torch's optimizers, made anew where they restart."""
    optimizers = build(params)
    for number in range(1, rounds + 1):
        give(params, noises(1000 + number - 1, tuple(p.shape for p in params), params[0].dtype))
        for optimizer in optimizers if isinstance(optimizers, list) else [optimizers]:
            optimizer.step()
        if restarts(number):
            optimizers = build(params)


def steps(outer: Any, params: list[Any], rounds: range) -> None:
    """The same rounds by an outer optimizer, whose groups may hold the parameters in another order."""
    for number in rounds:
        give(params, noises(1000 + number, tuple(p.shape for p in params), params[0].dtype))
        outer.step()


@pytest.mark.parametrize("restart", RESTARTS)
@pytest.mark.parametrize("name", BUILDS)
def test_equals_torchs_optimizer_made_anew(name: str, restart: str):
    """Bit for bit, and the groups count rounds and restarts."""
    params, twins = parameters(0, SHAPES), parameters(0, SHAPES)
    outer = Restarting(BUILDS[name](params), restart)
    steps(outer, params, range(12))
    by_hand(BUILDS[name], twins, RESTARTS[restart], 12)
    assert all(map(same_bits, params, twins))
    for group in outer.param_groups:
        assert group["rounds"] == 12
        assert group["restarts"] == sum(map(RESTARTS[restart], range(1, 13)))


@pytest.mark.parametrize("name", BUILDS)
def test_resumed_after_any_round(name: str):
    """Through a file that is loaded with `weights_only`, and by a copy."""
    params, others = parameters(0, SHAPES), parameters(0, SHAPES)
    outer, other = Restarting(BUILDS[name](params), "cycle:2,3"), Restarting(BUILDS[name](others), "never")
    other.load_state_dict(through_file(outer.state_dict()))
    for number in range(9):
        steps(outer, params, range(number, number + 1))
        steps(other, others, range(number, number + 1))
        state = through_file(other.state_dict())
        other = Restarting(BUILDS[name](others), "never")
        other.load_state_dict(state)
    assert all(map(same_bits, params, others))
    twin = copy.deepcopy(other)
    moved = [p for group in twin.param_groups for p in group["params"]]
    run(other, range(9, 12))
    run(twin, range(9, 12))
    assert all(map(same_bits, moved, [p for group in other.param_groups for p in group["params"]]))


def test_groups_have_restarts_of_their_own_and_follow_a_scheduler():
    """A group names its restart; one without gradients takes no round; torch's schedulers set the learning rate."""
    first, second = parameters(0, SHAPES[:2]), parameters(1, SHAPES[:2])
    groups = [{"params": first, "restart": 2}, {"params": second}]
    outer = Restarting(torch.optim.Adam(groups, lr=0.1), restart=3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(outer, 0.5)
    for number in range(6):
        give(first, noises(number, tuple(p.shape for p in first), first[0].dtype))
        if number % 2:
            give(second, noises(number, tuple(p.shape for p in second), second[0].dtype))
        outer.step()
        scheduler.step()
        outer.zero_grad()
    assert [(group["rounds"], group["restarts"]) for group in outer.param_groups] == [(6, 3), (3, 1)]
    assert outer.param_groups[0]["lr"] == pytest.approx(0.1 / 2**6)
    more = parameters(2, SHAPES[:1])
    outer.add_param_group({"params": more})
    give(more, noises(0, tuple(p.shape for p in more), more[0].dtype))
    before = flat(more)
    outer.step()
    assert not torch.equal(before, flat(more))


@register("test-shorter")
@dataclass(frozen=True)
class Shorter(RestartPolicy):
    """Restart where the pseudo-gradient is shorter than the first moment, or opposes it."""

    needs: ClassVar[frozenset[str]] = frozenset({"pseudo_gradient_norm", "buffer_norm", "cosine"})

    def decide(self, state: State, signal: RoundSignal) -> tuple[State, Restart | None]:
        """Compare them."""
        del state
        g, m, cosine = (signal.value(name) for name in ("pseudo_gradient_norm", "buffer_norm", "cosine"))
        return {"last": m}, Restart() if 0 < g < m or cosine < -0.2 else None


def test_a_policy_may_measure(monkeypatch: pytest.MonkeyPatch):
    """Norms and cosine are those of g and the first moment, 0 before the first round."""
    seen: list[tuple[float, ...]] = []

    def watch(_: Shorter, __: State, signal: RoundSignal) -> tuple[State, None]:
        seen.append((signal.value("pseudo_gradient_norm"), signal.value("buffer_norm"), signal.value("cosine")))
        return {"last": seen[-1][1]}, None

    monkeypatch.setattr(Shorter, "decide", watch)
    params = parameters(0, SHAPES)
    outer = Restarting(torch.optim.Adam(params, lr=0.1), Shorter())
    for number in range(3):
        moments = [outer.state[p]["exp_avg"].clone() for p in params if p in outer.state]
        run(outer, range(number, number + 1))
        g, m = flat([p.grad for p in params]), flat(moments) if moments else torch.zeros(1)
        cosine = float(g @ m / g.norm() / m.norm()) if moments else 0.0
        assert seen[-1] == pytest.approx((float(g.norm()), float(m.norm()), cosine))
        assert outer.param_groups[0]["policy_state"] == {"last": seen[-1][1]}


@pytest.mark.parametrize("restart", ["auto", "soft:3:0.2:0.1"])
def test_what_is_of_a_buffer_alone_is_refused(restart: str):
    """Steps of a policy, and a share of the buffer that stays."""
    with pytest.raises(ValueError, match="restart must be hard"):
        Restarting(torch.optim.Adam(parameters(0)), restart)


# ------------------------------------------------------------------------------------------------------- the names


def test_the_table():
    """Names with their own numbers; given ones replace them; a rule's options are its own."""
    numbers = {name: tuple(numbers_of({"method": name}).values()) for name in NAMES}
    assert numbers == {
        "averaging": (1.0, 0.0),
        "heavy-ball": (0.7, 0.9),
        "nesterov": (0.7, 0.9),
        "adamw": (0.02, 0.9),
        "muon": (0.1, 0.9),
    }
    assert rule_of("nesterov", 0.5, 0.8, "ema") == OuterRule(0.5, 0.8, nesterov=True, form="ema")
    assert rule_of("adamw") is None
    for rule in (*RULES.values(), OuterRule(0.3, 0.5, form="ema"), OuterRule(1.3, 0.0)):
        assert rule_of(**options_of(rule)) == rule
    assert describe({"method": "adamw", "filter": "clip:1", "schedule": "linear:2"}).startswith("adamw lr 0.02")
    for arguments, word in (
        (("averaging", None, 0.9), "heavy-ball or nesterov"),
        (("adam",), "averaging, heavy-ball"),
        (("nesterov", -1.0), "lr"),
        (("nesterov", 0.7, 1.0), "momentum"),
    ):
        with pytest.raises(ValueError, match=word):
            rule_of(*arguments)  # type: ignore[arg-type]


def test_adamw_and_muon_are_torchs():
    """AdamW for all parameters; Muon for matrices, and Nesterov's momentum for all others."""
    for name in ("adamw", "muon"):
        build = BUILDS["adamw" if name == "adamw" else "several"]
        shapes = [*SHAPES, (2, 3, 4)]
        params, twins = parameters(0, shapes), parameters(0, shapes)
        numbers = {"lr": 0.05, "momentum": 0.9} if name == "adamw" else {}
        named = [(str(index), p) for index, p in enumerate(params)]
        steps(Restarting(named_optimizer(named, name, **numbers), 3), params, range(9))
        by_hand(build, twins, RESTARTS["3"], 9)
        assert all(map(same_bits, params, twins))


def own(named: list[tuple[str, Tensor]]) -> torch.optim.Optimizer:
    """A user's function."""
    return torch.optim.RMSprop([p for _, p in named], lr=0.01)


@pytest.mark.parametrize(
    ("outer", "restart", "kind", "words"),
    [
        ("averaging", None, OuterSGD, "momentum-free lr 1"),
        ("nesterov", 3, OuterSGD, "Nesterov lr 0.7"),
        ("auto", None, OuterSGD, "auto"),
        ("adamw", None, Restarting, "AdamW, restart never"),
        ("muon", "2", Restarting, "Muon and SGD, restart 2"),
        (own, 2, Restarting, "RMSprop, restart 2"),
        (own, None, torch.optim.RMSprop, "RMSprop"),
        (OuterRule(0.5, 0.5), None, OuterSGD, "heavy ball lr 0.5"),
    ],
)
def test_the_engine_takes_any_of_them(outer: Any, restart: Any, kind: type, words: str):
    """And says so; its reports tell of restarts."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = DiLoCo(model, outer, restart=restart, inner_steps=1)
    restarted = []
    for number in range(6):
        inner.zero_grad()
        model(torch.ones(5, 3) * number).square().mean().backward()
        inner.step()
        restarted.append(engine.step().restarted)  # type: ignore[union-attr]
    assert isinstance(engine.outer, kind)
    assert words in repr(engine)
    period = int(restart or 0)
    assert (
        (isinstance(outer, str) and outer == "auto")
        or kind is torch.optim.RMSprop
        or restarted == [bool(period) and number % period == 0 for number in range(1, 7)]
    )


@pytest.mark.parametrize("outer", ["adam", "3", torch.optim.Adam, 0.7, lambda named: torch.optim.Adam([named[0][1]])])
def test_what_is_no_outer_optimizer(outer: Any):
    """A name that is not known, a policy that needs a rule, a class, a number, parameters left out."""
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="outer"):
        outer_optimizer(list(model.named_parameters()), outer)
