"""One table of runs, the inner step that they take, and a loop in plain tensors that says what must come out."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from replicas import same_bits
from twophase.diloco.engine import DiLoCo
from twophase.diloco.report import RoundReport
from twophase.optim.outer_sgd import OuterSGD
from twophase.rule import OuterRule

NAMES = ["0.weight", "0.bias", "2.weight", "2.bias", "3.weight", "3.bias"]
BLOCKS = {"first": r"^0\.", "norm": r"^2\.", "last": r"^3\."}
HEAVY_BALL, NESTEROV = OuterRule(0.3, 0.9), OuterRule(0.3, 0.9, nesterov=True)
EMA, EMA_HEAVY_BALL = OuterRule(1.0, 0.9, nesterov=True, form="ema"), OuterRule(1.0, 0.8, form="ema")
AVERAGING = OuterRule(1.0, 0.0)


@dataclass(frozen=True)
class Scenario:
    """A run; of fragments or param groups, `parts` has names, offset, rule and restart, for the plain loop."""

    outer: Any = NESTEROV
    restart: Any = None
    inner_steps: int = 4
    dtype: torch.dtype = torch.float32
    replicas: int = 2
    options: Mapping[str, Any] = field(default_factory=dict)
    parts: Sequence[tuple[Sequence[str], int, OuterRule, Any]] | None = None

    @property
    def steps(self) -> int:
        """Four rounds, and half of one."""
        return 4 * self.inner_steps + self.inner_steps // 2


_EMA_OF_GROUP, _LAST_OF_GROUP = OuterRule(0.7, 0.9, form="ema"), OuterRule(0.3, 0.5)
GROUPS = [(NAMES[:2], 3, NESTEROV, 2), (NAMES[2:4], 3, _EMA_OF_GROUP, "cycle:1,3")]
GROUPS.append((NAMES[4:], 3, _LAST_OF_GROUP, "soft:2:0.5:0.25"))


def groups(named: list[tuple[str, Tensor]]) -> OuterSGD:
    """An outer optimizer with a rule and a restart period for each of three blocks."""
    of_groups = [
        {"params": [p for name, p in named if name in names], "restart": restart} | asdict(rule)
        for names, _, rule, restart in GROUPS
    ]
    return OuterSGD(of_groups, lr=1.0)


IN_BLOCKS = [(NAMES[:2], 2, NESTEROV, 2), (NAMES[2:4], 4, NESTEROV, None), (NAMES[4:], 6, NESTEROV, 1)]


def cut(rule: OuterRule, offsets: Sequence[int], restarts: Sequence[Any] = (None,) * 6, **options: Any) -> Scenario:
    """A run of several fragments with these offsets in a round, of which the last is the round's length."""
    cuts = {2: [0, 2, 6], 3: [0, 1, 4, 6], 6: [0, 1, 2, 3, 4, 5, 6]}[len(offsets)]
    names = [NAMES[a:b] for a, b in pairwise(cuts)]
    parts = [(some, offset, rule, text) for some, offset, text in zip(names, offsets, restarts, strict=False)]
    policies = {str(number): part[3] for number, part in enumerate(parts)}
    return Scenario(rule, policies, offsets[-1], options={"fragments": len(offsets)} | options, parts=parts)


PLAIN = {
    "heavy ball": Scenario(HEAVY_BALL),
    "nesterov": Scenario(NESTEROV, 2, options={"delay": 1}),
    "ema": Scenario(EMA, "cycle:1,3", options={"delay": 3, "mixing": 0.5}),
    "soft": Scenario(EMA_HEAVY_BALL, "soft:2:0.5:0.25", replicas=1),
    "averaging": Scenario(AVERAGING, 2, replicas=3),
    "before": Scenario(EMA, "test-early:2:0.5:0.25", 2),
    "own steps": Scenario(NESTEROV, "test-half:3", 2),
    "param groups": Scenario(groups, None, 3, parts=GROUPS),
    "float64": Scenario(EMA, 2, dtype=torch.float64, replicas=3, options={"mixing": 0.25}),
    "bfloat16 model": Scenario(NESTEROV, 2, dtype=torch.bfloat16, options={"delay": 1, "mixing": 0.5}),
    "two": cut(HEAVY_BALL, (3, 6), delay=2, mixing=0.25),
    "three": cut(EMA, (2, 4, 6), (2, None, 1)),
    "three, delay": cut(NESTEROV, (2, 4, 6), ("cycle:1,3", "at:2,3", 2), delay=1),
    "three under way": cut(NESTEROV, (2, 4, 6), delay=5, mixing=0.5),
    "uneven": cut(HEAVY_BALL, (3, 5, 7), (None, 2, 1), delay=3),
    "at once": cut(EMA, (5, 5, 5), (2, None, 1), delay=2, mixing=0.5, stagger=False),
    "crowded": cut(NESTEROV, (1, 2, 2, 3, 4, 4), (2, None, 1, 2, None, 1), delay=3, mixing=0.5),
    "blocks": Scenario(
        NESTEROV, {"first": 2, "norm": None, "last": 1}, 6, options={"fragments": BLOCKS, "delay": 2}, parts=IN_BLOCKS
    ),
}
"""Runs that the plain loop knows."""

_THREE = {"fragments": 3, "delay": 2, "mixing": 0.5}
_INT8 = {"compression": "int8"}
OTHERS = {
    "rising": Scenario(HEAVY_BALL, "test-rising:0.0", 6, options=_THREE),
    "norm": Scenario(NESTEROV, "norm:1.5"),
    "auto": Scenario("auto", None, 6, options=_THREE),
    "auto, int8": Scenario("auto", options=_INT8 | {"fragments": 2}),
    "adamw": Scenario("adamw", 2, 6, options=_THREE | {"filter": "clip:2"}),
    "muon": Scenario("muon", 2),
    "torch": Scenario(lambda named: torch.optim.NAdam([p for _, p in named], lr=0.05)),
    "orthogonal": Scenario("averaging", options={"filter": "orthogonal"}),
    "bfloat16": Scenario(EMA, 2, 6, options=_THREE | {"compression": "bfloat16"}),
    "int8": Scenario(NESTEROV, "soft:2:0.5:0.25", options=_INT8),
    "int8, three": Scenario(HEAVY_BALL, 2, 6, options=_THREE | _INT8),
    "int8, one room": Scenario(NESTEROV, None, 6, options=_INT8 | {"fragments": BLOCKS, "delay": 1}),
    "int8, at once": Scenario(options=_INT8 | {"fragments": 3, "delay": 3, "stagger": False}),
}
"""Further ones, for comparisons of an engine with another engine."""
SCENARIOS = PLAIN | OTHERS


def network(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Parameters of 32, 8, 8, 8, 24 and 3 elements: the last leaves most of its sixteen empty."""
    torch.default_generator.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 3)).to(dtype)


@cache
def noise(name: str, shape: torch.Size, dtype: torch.dtype, step: int, replica: int) -> Tensor:
    """What an inner step adds to a parameter, drawn once however many runs take the step."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {step} {replica}".encode()))
    size = 1.0 if name == NAMES[0] else 0.1
    return (size * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype)


@torch.no_grad()
def drift(model: nn.Module, step: int, replica: int) -> None:
    """An inner step: theta <- 0.9 theta + noise, of which each element knows the step, the replica and its name only.

    It forgets nothing of where theta was, so whatever was restored wrongly shows; each parameter moves by itself, and
    the first one far more than the others.
    """
    names, params = zip(*model.named_parameters(), strict=True)
    torch._foreach_mul_(params, 0.9)
    torch._foreach_add_(params, [noise(n, p.shape, p.dtype, step, replica) for n, p in zip(names, params, strict=True)])


@torch.no_grad()
def shift(*modules: nn.Module, by: float = 1.0) -> None:
    for module in modules:
        for p in module.parameters():
            p.add_(by)


def loss(step: int, replicas: Iterable[int]) -> float:
    """The mean of a number that each replica has at a step."""
    values = [math.sin(1.7 * step + replica) for replica in replicas]
    return sum(values) / len(values)


def tensors_of(anchor: Mapping[str, Tensor], models: Sequence[nn.Module], parts: Iterable[Any]) -> dict[str, Tensor]:
    """All tensors of a run by name; `parts` are pairs of named anchors and their outer optimizer."""
    tensors = {f"anchor {name}": a.detach() for name, a in anchor.items()}
    for number, model in enumerate(models):
        tensors |= {f"model {number} {name}": p.detach() for name, p in model.named_parameters()}
    for named, outer in parts:
        for name, a in named:
            tensors |= {f"{key} {name}": value for key, value in outer.state.get(a, {}).items()}
    return tensors


@dataclass
class Run:
    """Replicas of a run that live in this process, and their engine."""

    engine: DiLoCo
    models: list[Any]
    replicas: Sequence[int]

    def step(self, step: int) -> RoundReport | None:
        for replica, model in zip(self.replicas, self.models, strict=True):
            drift(model, step, replica)
        return self.engine.step({"loss": loss(step, self.replicas)})

    def go(self, steps: Iterable[int]) -> list[RoundReport]:
        return [report for report in map(self.step, steps) if report is not None]

    def finish(self) -> RoundReport | None:
        return self.engine.finish({"loss": 1.0})

    def tensors(self) -> dict[str, Tensor]:
        """Anchor, models and state of the outer optimizers, live, by name."""
        return tensors_of(self.engine.anchor, self.models, [(f.named, f.outer) for f in self.engine.fragments])

    def state(self) -> dict[str, Any]:
        models = [model.state_dict() for model in self.models]
        return {"engine": self.engine.state_dict(), "residuals": self.engine.residuals(), "models": models}

    def load(self, state: Mapping[str, Any]) -> None:
        for model, weights in zip(self.models, state["models"], strict=True):
            model.load_state_dict(weights)
        self.engine.load_state_dict(state["engine"])
        self.engine.load_residuals(state["residuals"])


def start(scenario: str | Scenario = "nesterov", replicas: Sequence[int] = (), *, seed: int = 0, **changes: Any) -> Run:
    """A run whose replicas begin differently, except replica 0 of seed 0, which all must take over.

    `replicas` are those in this process, empty for all; `changes` are fields of the scenario and options of the engine.
    """
    made = SCENARIOS[scenario] if isinstance(scenario, str) else scenario
    fields = {name: value for name, value in changes.items() if name in Scenario.__dataclass_fields__}
    made = replace(made, **fields)
    options = {**made.options, **{name: value for name, value in changes.items() if name not in fields}}
    replicas = replicas or range(made.replicas)
    models = [network(seed + replica, made.dtype) for replica in replicas]
    engine = DiLoCo(models, made.outer, inner_steps=made.inner_steps, restart=made.restart, **options)
    return Run(engine, models, replicas)


def facts(report: RoundReport | None) -> str:
    """What all ranks, and a run and its repetition, must report alike, as text (a gain may be NaN)."""
    if report is None:
        return "none"
    return str({name: value for name, value in report.as_dict().items() if name not in ("seconds", "bytes_sent")})


def refusal(attempt: Callable[[], Any]) -> str:
    """What is said of an attempt, behind the error's name."""
    try:
        attempt()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def unlike(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> list[str]:
    """Names of the tensors that are not the same bits in both."""
    both = first.keys() & second.keys()
    return [*(first.keys() ^ second.keys()), *(name for name in both if not same_bits(first[name], second[name]))]


@dataclass
class Part:
    """Parameters of the plain loop with a place in the round and an outer optimizer of their own."""

    names: Sequence[str]
    offset: int
    outer: OuterSGD
    steps: int = 0
    held: int = 0
    age: int = 0
    launched: dict[str, Tensor] | None = None

    @property
    def rounds(self) -> int:
        return self.outer.param_groups[0]["rounds"]


class Plain:
    """Streaming DiLoCo as one would write it down; of its outer steps, test_outer_sgd.py has the oracle."""

    def __init__(self, scenario: Scenario) -> None:
        self.inner_steps = scenario.inner_steps
        self.delay, self.mixing = scenario.options.get("delay", 0), scenario.options.get("mixing", 0.0)
        self.models = [network(0, scenario.dtype) for _ in range(scenario.replicas)]
        self.named = [dict(model.named_parameters()) for model in self.models]
        self.wide = torch.float64 if scenario.dtype == torch.float64 else torch.float32
        self.anchor = {name: nn.Parameter(p.detach().to(self.wide, copy=True)) for name, p in self.named[0].items()}
        self.parts = []
        for names, offset, rule, restart in scenario.parts or [
            (NAMES, scenario.inner_steps, scenario.outer, scenario.restart)
        ]:
            anchors = [self.anchor[name] for name in names]
            self.parts.append(Part(names, offset, OuterSGD(anchors, **asdict(rule), restart=restart or "never")))
        self.position = 0

    @torch.no_grad()
    def step(self, step: int) -> dict[str, Any] | None:
        for replica, model in enumerate(self.models):
            drift(model, step, replica)
        self.position = self.position % self.inner_steps + 1
        for part in self.parts:
            part.steps, part.age = part.steps + 1, part.age + 1
        ending = [part for part in self.parts if part.launched is not None and part.age == self.delay]
        report = self.apply(ending) if ending else None
        due = [part for part in self.parts if part.offset == self.position]
        self.launch(due)
        return self.apply(due) if due and self.delay == 0 else report

    def launch(self, parts: Iterable[Part]) -> None:
        """Take pseudo-gradients: progress of a 16-bit replica counts from where it began, the rounded anchor."""
        for part in parts:
            part.launched = {}
            for name in part.names:
                a, thetas = self.anchor[name], [named[name].detach() for named in self.named]
                begun = a.to(thetas[0].dtype).to(self.wide)
                total = begun - thetas[0].to(self.wide)
                for theta in thetas[1:]:
                    total = total + (begun - theta.to(self.wide))
                part.launched[name] = total / len(thetas)
            part.held, part.steps, part.age = part.steps, 0, 0

    def apply(self, parts: Sequence[Part]) -> dict[str, Any]:
        """Outer steps with them; the replicas take the anchors."""
        groups = []
        for part in parts:
            assert part.launched is not None
            for name, g in part.launched.items():
                self.anchor[name].grad = g
            part.outer.step(measure=True)
            groups += part.outer.last_round
            for named in self.named:
                for name in part.names:
                    theta, a = named[name], self.anchor[name].to(named[name].dtype)
                    theta.copy_(a if self.mixing == 0 else theta.lerp(a, 1 - self.mixing))
            part.launched = None
            part.steps = part.steps if self.mixing else 0
        whole = self.inner_steps - (0 if self.mixing else self.delay)
        return {
            "round": max(part.rounds for part in parts),
            "complete": parts[-1] is self.parts[-1],
            "inner_steps": max(part.held for part in parts),
            "partial": any(part.held < whole for part in parts),
            "groups": groups,
        }

    @torch.no_grad()
    def finish(self) -> dict[str, Any] | None:
        under_way = [part for part in self.parts if part.launched is not None]
        ages = sorted({part.age for part in under_way}, reverse=True)
        reports = [self.apply([part for part in under_way if part.age == age]) for age in ages]
        for part in self.parts:
            if part.steps:
                self.launch([part])
                reports.append(self.apply([part]))
        for named in self.named:
            for name, p in named.items():
                p.copy_(self.anchor[name])
        self.position = 0
        if not reports:
            return None
        return {
            "round": max(part.rounds for part in self.parts),
            "complete": True,
            "inner_steps": max(report["inner_steps"] for report in reports),
            "partial": any(report["partial"] for report in reports),
            "groups": [group for report in reports for group in report["groups"]],
        }

    def tensors(self) -> dict[str, Tensor]:
        parts = [([(name, self.anchor[name]) for name in part.names], part.outer) for part in self.parts]
        return tensors_of(self.anchor, self.models, parts)
