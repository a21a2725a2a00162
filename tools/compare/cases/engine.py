"""Short trainings by the engine: in one process, in two over gloo, and as FSDP2 shards."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from differences import near
from suite import Outer, case, digests, grid, in_group

NESTEROV, HEAVY_BALL = Outer("nesterov"), Outer("heavy-ball", 0.4)
BLOCKS = {"first": r"^0\.", "rest": "."}
COMPRESSED = ("bfloat16", "int8")
COMPRESSED_LOSS = 0.02
"""Relative difference of the mean loss of the last steps; between seeds it is 0.2, between formats 0.001."""


@dataclass(frozen=True)
class Training:
    """Describe a training: seven rounds of four inner steps and a rest of two, unless it says otherwise.

    Args:
        model: plain, norm (BatchNorm), frozen (a layer does not train) or tied (two layers share their weights).
        resume: inner step after which all is saved, built anew, and loaded.
        finish: whether the rest of the last round is synchronized.
        options: further arguments of the engine.
    """

    outer: Outer | Callable[[Any], Callable[..., Any]] = NESTEROV
    restart: Any = 3
    replicas: int = 2
    dtype: torch.dtype = torch.float32
    model: str = "plain"
    steps: int = 30
    resume: int = 0
    finish: bool = True
    options: dict[str, Any] = field(default_factory=dict)


def model(kind: str, seed: int, dtype: torch.dtype) -> nn.Module:
    """Return a small network."""
    torch.manual_seed(seed)
    middle = nn.BatchNorm1d(8) if kind == "norm" else nn.LayerNorm(8)
    layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), middle, nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3))
    if kind == "tied":
        layers[4].weight = layers[3].weight
    if kind == "frozen":
        layers[3].requires_grad_(False)
    return layers.to(dtype)


def batch(step: int, replica: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a replica's examples of an inner step."""
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(1000 * replica + step))
    return x.to(dtype), torch.stack([x.sum(1), x[:, 0] * x[:, 1], x[:, 2].sin()], 1).to(dtype)


class Run:
    """The replicas of a training in this process, their inner optimizers and the engine."""

    def __init__(self, api: Any, training: Training, numbers: Sequence[int], seed: int = 0, mesh: Any = None) -> None:
        self.api, self.training, self.numbers = api, training, numbers
        self.models = [model(training.model, seed + number, training.dtype) for number in numbers]
        if mesh:
            for each in self.models:
                fully_shard(each, mesh=mesh["shard"])
        self.inners = [torch.optim.AdamW(each.parameters(), lr=0.02) for each in self.models]
        outer = training.outer if isinstance(training.outer, Outer) else training.outer(api)
        options = {"inner_steps": 4, **training.options}
        self.engine = api.engine(self.models, outer, training.restart, mesh, **options)
        self.losses: list[float] = []

    def step(self, step: int) -> Any:
        """Take an inner step of every replica, and the engine's."""
        for number, each, inner in zip(self.numbers, self.models, self.inners, strict=True):
            x, y = batch(step, number, self.training.dtype)
            loss = (each(x) - y).square().mean()
            loss.backward()
            inner.step()
            inner.zero_grad()
            self.losses.append(loss.item())
        return self.engine.step()

    def saved(self) -> Any:
        """Return all that a resumed training needs, through a file."""
        states = {
            "engine": self.api.engine_state(self.engine),
            "models": [each.state_dict() for each in self.models],
            "inners": [inner.state_dict() for inner in self.inners],
        }
        file = io.BytesIO()
        torch.save(states, file)
        file.seek(0)
        return torch.load(file, weights_only=True)

    def load(self, states: Any) -> None:
        """Continue from `saved()`."""
        self.api.load_engine_state(self.engine, states["engine"])
        for parts, saved in ((self.models, states["models"]), (self.inners, states["inners"])):
            for part, state in zip(parts, saved, strict=True):
                part.load_state_dict(state)

    def result(self, reports: list[Any]) -> dict[str, Any]:
        """Return the bits of all tensors, and the numbers of the reports."""
        states = self.api.outer_states(self.engine)
        tensors = {f"{name} {key}": value for name, state in states.items() for key, value in state.items()}
        return {
            "reports": [self.api.report_numbers(report) for report in reports if report is not None],
            "weights": {
                number: digests(each.state_dict()) for number, each in zip(self.numbers, self.models, strict=True)
            },
            "anchor": digests(self.engine.anchor),
            "momentum": digests({name: value for name, value in tensors.items() if torch.is_tensor(value)}),
        }


def train(api: Any, training: Training, numbers: Sequence[int] = (), mesh: Any = None) -> dict[str, Any]:
    """Train to the end; JSON's keys are texts."""
    torch.set_num_threads(1)
    numbers = numbers or range(training.replicas)
    run, reports, held = Run(api, training, numbers, mesh=mesh), [], {}
    for step in range(training.steps):
        reports.append(run.step(step))
        if step == training.steps // 2:
            with run.engine.anchored() as evaluated:
                held = digests(evaluated.state_dict())
        if step + 1 == training.resume:
            states = run.saved()
            run = Run(api, training, numbers, seed=40, mesh=mesh)
            run.load(states)
    if training.finish:
        reports.append(run.engine.finish())
    result = run.result(reports)
    result["weights"] = {str(number): weights for number, weights in result["weights"].items()}
    if "compression" in training.options:  # whose bits may change one day, but not what it learns
        last = run.losses[-8 * len(numbers) :]
        result["must"] = {"loss": near(sum(last) / len(last), COMPRESSED_LOSS)}
    if isinstance(training.outer, Outer) and training.outer.method in {"adamw", "muon"}:  # torch's own, to rounding
        values = [float(view.double().sum()) for view in run.engine.anchor.values()]
        result["must"] = {"sums of the anchor": [near(value, 1e-5) for value in values]}
    return result | {"evaluated in the middle": held}


# -------------------------------------------------------------------------------------------------- in one process

for method, form, restart in (
    values.values()
    for values in grid(
        method=("heavy-ball", "nesterov"),
        form=("sum", "ema"),
        restart=("never", "3", "cycle:1,3", "at:2,5", "soft:2:0.3:0.1"),
    )
):
    momentum = Training(Outer(method, 0.5 if form == "sum" else 1.1, 0.8, form), restart)
    case(f"engine {method}, {form}, {restart}", partial(train, training=momentum))


def _blocks(api: Any) -> Callable[..., Any]:
    """Give the first layer's param group a period of its own."""

    def build(named: Any) -> Any:
        pairs = list(named)
        first = [pair for pair in pairs if pair[0].startswith("0.")]
        rest = [pair for pair in pairs if not pair[0].startswith("0.")]
        groups = [{"params": part, "restart": period} for part, period in ((first, 2), (rest, "at:3")) if part]
        return api.outer_sgd(groups, NESTEROV)

    return build


def _torch(kind: Any, **options: Any) -> Callable[[Any], Callable[..., Any]]:
    return lambda _: lambda named: kind([p for _, p in named], **options)


STREAM = {"fragments": 3, "delay": 2, "mixing": 0.5, "inner_steps": 6}
TRAININGS = {
    "auto": Training(Outer("auto"), None, steps=42),
    "auto, 3 fragments": Training(Outer("auto"), None, steps=42, options={"fragments": 3, "inner_steps": 6}),
    "averaging": Training(Outer("averaging", 1.0), "never"),
    "own policy": Training(HEAVY_BALL, "own", steps=50),
    "1 replica": Training(replicas=1),
    "3 replicas": Training(replicas=3),
    "3 replicas, heavy ball, ema, soft": Training(Outer("heavy-ball", 1.0, 0.9, "ema"), "soft:3:0.2:0.1", replicas=3),
    "2 fragments": Training(options={"fragments": 2}),
    "3 fragments at once": Training(options={"fragments": 3, "stagger": False}),
    "3 fragments, delay 1": Training(HEAVY_BALL, options={"fragments": 3, "delay": 1, "inner_steps": 6}),
    "3 fragments, delay 2, mixing": Training(options=STREAM),
    "3 fragments, two under way": Training(options={**STREAM, "delay": 5, "mixing": 0.25}),
    "1 fragment, delay 2": Training(options={"delay": 2}),
    "1 fragment, delay 3, mixing": Training(HEAVY_BALL, 2, options={"delay": 3, "mixing": 0.3}),
    "named fragments with their restarts": Training(
        restart={"first": "2", "rest": "soft:3:0.2:0.1"}, options={"fragments": BLOCKS}
    ),
    "named fragments, delay, 3 replicas": Training(
        replicas=3, options={"fragments": BLOCKS, "delay": 1, "mixing": 0.5}
    ),
    "bfloat16 replicas": Training(dtype=torch.bfloat16),
    "bfloat16 replicas, 3 fragments": Training(HEAVY_BALL, dtype=torch.bfloat16, replicas=3, options=STREAM),
    "bfloat16 replicas, ema": Training(Outer("nesterov", 1.0, 0.9, "ema"), dtype=torch.bfloat16),
    "float64": Training(dtype=torch.float64),
    "filter orthogonal": Training(replace(NESTEROV, filter="orthogonal")),
    "filter orthogonal, averaging": Training(Outer("averaging", 1.0, filter="orthogonal"), "never", replicas=3),
    "filter orthogonal, 2 fragments": Training(replace(HEAVY_BALL, filter="orthogonal"), options={"fragments": 2}),
    "filter clip": Training(replace(NESTEROV, filter="clip:0.5")),
    "filter clip, 3 fragments": Training(replace(HEAVY_BALL, filter="clip:0.3"), options=STREAM),
    "schedule linear": Training(replace(NESTEROV, schedule="linear:0.2", rounds=8)),
    "schedule linear, rising": Training(Outer("averaging", 0.7, schedule="linear:2", rounds=8), "never"),
    "schedule momentum": Training(replace(HEAVY_BALL, schedule="momentum:0.2", rounds=5)),
    "schedule momentum, filter orthogonal": Training(
        replace(NESTEROV, schedule="momentum:0", filter="orthogonal", rounds=8)
    ),
    "param groups with their periods": Training(_blocks, None),
    "param groups, 2 fragments": Training(_blocks, None, options={"fragments": 2}),
    "torch AdamW by a function": Training(_torch(torch.optim.AdamW, lr=0.02), None),
    "torch SGD by a function": Training(_torch(torch.optim.SGD, lr=0.5, momentum=0.9, weight_decay=0.01), None),
    "adamw by name": Training(Outer("adamw", 0.02), "never"),
    "muon by name": Training(Outer("muon", 0.1), "never"),
    "buffers, mean": Training(model="norm", options={"buffers": "mean"}),
    "buffers, local": Training(model="norm"),
    "frozen layer": Training(model="frozen", options={"fragments": 2}),
    "tied layers": Training(model="tied", options={"fragments": 2}),
    "resumed": Training(resume=14),
    "resumed, heavy ball, ema, soft": Training(Outer("heavy-ball", 1.0, 0.9, "ema"), "soft:3:0.2:0.1", resume=14),
    "resumed, auto": Training(Outer("auto"), None, resume=14),
    "resumed, cycle, 3 fragments": Training(restart="cycle:1,3", resume=15, options={"fragments": 3}),
    "resumed, two under way": Training(resume=17, options={**STREAM, "delay": 5}),
    "resumed, own policy": Training(HEAVY_BALL, "own", steps=50, resume=30),
    "resumed, param groups": Training(_blocks, None, resume=14),
    "resumed, bfloat16 replicas": Training(dtype=torch.bfloat16, resume=14),
    "resumed, schedule and filter": Training(
        replace(NESTEROV, schedule="linear:0.2", filter="orthogonal", rounds=8), resume=14
    ),
}
for name, each in TRAININGS.items():
    case(f"engine {name}", partial(train, training=each))
for compression in COMPRESSED:
    narrow = {"compression": compression}
    case(f"compressed {compression}", partial(train, training=Training(options=narrow)))
    case(f"compressed {compression}, resumed", partial(train, training=Training(resume=14, options=narrow)))
    streamed = Training(HEAVY_BALL, replicas=3, options=STREAM | narrow)
    case(f"compressed {compression}, 3 fragments, delay, mixing", partial(train, training=streamed))

# ------------------------------------------------------------------------------------------------------ processes


def in_two(api: Any, training: Training) -> dict[str, Any]:
    """Train in two gloo processes; say whether it gives the bits of one process."""
    ranks = in_group(2, lambda rank: train(api, training, [rank]))
    alone = train(api, training)
    weights = {**ranks[0]["weights"], **ranks[1]["weights"]}
    same = {part: ranks[0][part] == ranks[1][part] == alone[part] for part in ("anchor", "momentum")} | {
        "weights": weights == alone["weights"]
    }
    for part in (*ranks, alone):
        part["bytes"] = [report.pop("bytes_sent") for report in part["reports"]]
    same["reports"] = ranks[0]["reports"] == ranks[1]["reports"] == alone["reports"]
    return {"must": {"same as in one process": same}, "ranks": ranks}


def in_shards(api: Any, training: Training, replicas: int) -> list[dict[str, Any]]:
    """Train replicas of two FSDP2 shards each."""

    def work(rank: int) -> dict[str, Any]:
        mesh = init_device_mesh("cpu", (replicas, 2), mesh_dim_names=("replica", "shard"))
        return train(api, training, [rank // 2], mesh)

    return in_group(2 * replicas, work)


GROUPS = {
    "nesterov, 3": Training(),
    "heavy ball, ema, soft": Training(Outer("heavy-ball", 1.0, 0.9, "ema"), "soft:2:0.3:0.1"),
    "auto": Training(Outer("auto"), None),
    "own policy": Training(HEAVY_BALL, "own", steps=50),
    "3 fragments, delay 2, mixing": Training(options=STREAM),
    "bfloat16 replicas, two under way": Training(dtype=torch.bfloat16, options={**STREAM, "delay": 5}),
    "filter orthogonal, schedule linear": Training(
        replace(NESTEROV, filter="orthogonal", schedule="linear:0.2", rounds=8)
    ),
    "buffers, mean": Training(model="norm", options={"buffers": "mean"}),
    "resumed, 3 fragments": Training(resume=17, options=STREAM),
}
for name, each in GROUPS.items():
    case(f"gloo {name}", partial(in_two, training=each))
for compression in COMPRESSED:
    case(
        f"compressed {compression}, gloo",
        partial(in_two, training=Training(options=STREAM | {"compression": compression})),
    )
SHARDS = {
    "1 replica": (1, Training(restart=2)),
    "2 replicas": (2, Training()),
    "2 replicas, heavy ball, ema": (2, Training(Outer("heavy-ball", 1.0, 0.9, "ema"), "soft:2:0.3:0.1")),
    "2 replicas, 2 fragments, delay": (2, Training(options={"fragments": BLOCKS, "delay": 1, "mixing": 0.5})),
    "2 replicas, filter clip": (2, Training(replace(NESTEROV, filter="clip:0.5"))),
    "2 replicas, resumed": (2, Training(resume=12)),
}
for name, (replicas, each) in SHARDS.items():
    case(f"shards {name}", partial(in_shards, training=each, replicas=replicas))
