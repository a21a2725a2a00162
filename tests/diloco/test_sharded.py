"""Two replicas of two FSDP2 shards each, in four processes, equal two unsharded replicas in one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from diloco.scenarios import BLOCKS, NAMES, NESTEROV, Run, facts, network, refusal
from forked import bring, in_processes
from replicas import same_bits, through_file
from twophase.diloco.engine import DiLoCo
from twophase.diloco.group import ProcessGroup, SingleProcess
from twophase.diloco.report import RoundReport

pytestmark = pytest.mark.dist

STEPS = 11  # nearly four rounds
OPTIONS: dict[str, dict[str, Any]] = {
    "whole": {"restart": 2, "delay": 1},
    "patterns": {"fragments": BLOCKS, "restart": {"first": 2, "norm": None, "last": 1}, "delay": 1, "mixing": 0.5},
    "auto": {"outer": "auto"},
    "sgd": {"outer": lambda named: torch.optim.SGD([p for _, p in named], lr=0.3, momentum=0.9), "fragments": 3},
    "adamw": {"outer": "adamw", "restart": 2},
    "clip": {"restart": 2, "fragments": 2, "filter": "clip:0.1"},
    "int8": {"fragments": 3, "delay": 2, "compression": "int8"},
}
EXACT = ("whole", "patterns", "sgd", "adamw")
"""Runs of which no number is a sum over the shards, nor a block of codes cut by them."""
Shard = Callable[[nn.Module], Any]


@dataclass
class Training(Run):
    """Trains by gradients, and evaluates before every call of the engine, so that FSDP2 holds whole parameters then."""

    inners: Sequence[torch.optim.Optimizer]

    def step(self, step: int) -> RoundReport | None:
        """One inner step of every replica, a look at it and at the anchor, and the engine's."""
        for replica, model, inner in zip(self.replicas, self.models, self.inners, strict=True):
            x, y = torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(1000 * replica + step))
            inner.zero_grad()
            nn.functional.mse_loss(model(x), y[:, :3]).backward()
            inner.step()
            look(model)
        for number in range(len(self.models)):
            with self.engine.anchored(number) as model:
                look(model)
        for model in self.models:
            look(model)
        return self.engine.step({"loss": float(dist.get_rank() if dist.is_initialized() else 0)})


@torch.no_grad()
def look(model: nn.Module) -> None:
    model(torch.ones(2, 4))


def begin(name: str, replicas: Sequence[int], group: SingleProcess | None, shard: Shard, seed: int = 0) -> Training:
    models = [network(seed + replica) for replica in replicas]
    for model in models:
        shard(model)
    inners = [torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9) for model in models]
    for model in models:  # from here on the model names whole parameters, until FSDP2 gives them up
        look(model)
    options: dict[str, Any] = {"outer": NESTEROV} | OPTIONS[name]
    engine = DiLoCo(models, inner_steps=3, group=group, **options)
    return Training(engine, models, replicas, inners)


def trained(run: Training, again: Callable[[], Training] | None = None) -> dict[str, Any]:
    """Reports, anchor and models of a run to its end; another takes it up while a reduction is under way."""
    reports = run.go(range(4))
    if again is not None:
        state, parts = through_file(run.engine.state_dict()), [each.state_dict() for each in (*run.models, *run.inners)]
        run = again()
        run.engine.load_state_dict(state)
        for module, saved in zip((*run.models, *run.inners), parts, strict=True):
            module.load_state_dict(saved)
    reports += run.go(range(4, STEPS))
    for model in run.models:
        look(model)
    last = run.finish()
    assert last is not None
    told = [*reports, last]
    return {
        "reports": [facts(report) for report in told],
        "plain": [(r.round, r.inner_steps, r.partial, r.complete, r.replicas, r.restarted) for r in told],
        "measured": [[r.pseudo_gradient_norm, r.buffer_norm, r.cosine, r.gain] for r in told],
        "signals": [report.signals["loss"] for report in reports],
        "anchor": {key: a.clone() for key, a in run.engine.anchor.items()},
        "models": [{key: getattr(p, "full_tensor", p.clone)() for key, p in m.named_parameters()} for m in run.models],
    }


def refusals(mesh: Any, group: ProcessGroup, shard: Shard) -> dict[str, str]:
    """What is said of shards without their mesh, whole or empty parameters, and what needs whole matrices."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, distribute_tensor

    sharded, in_part, short = network(), network(), nn.Linear(3, 1)
    shard(sharded)
    fully_shard(in_part[0], mesh=mesh["shard"])  # type: ignore[index]
    fully_shard(short, mesh=mesh["shard"])
    copied = nn.Parameter(distribute_tensor(torch.zeros(4, 2), mesh["shard"], [Replicate()]))
    attempts: dict[str, tuple[nn.Module, dict[str, Any]]] = {
        "0.weight": (sharded, {"group": None}),
        "'0.weight'": (network(), {}),
        "2.weight": (in_part, {}),
        "'w'": (nn.ParameterDict({"w": copied}), {}),
        "fragments": (short, {}),
        "outer": (sharded, {"outer": "muon"}),
        "filter": (sharded, {"filter": "orthogonal"}),
    }
    usual = {"outer": NESTEROV, "group": group, "inner_steps": 2}
    return {
        word: refusal(lambda model=model, options=usual | options: DiLoCo(model, **options))
        for word, (model, options) in attempts.items()
    }


def worker(rank: int) -> dict[str, Any]:
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    group = ProcessGroup(mesh.get_group("replica"), mesh.get_group("shard"))

    def shard(model: nn.Module) -> None:
        fully_shard(model[0], mesh=mesh["shard"])  # type: ignore[index]
        fully_shard(model, mesh=mesh["shard"])

    def made(name: str, seed: int) -> Training:
        return begin(name, [rank // 2], group, shard, seed)

    answers: dict[str, Any] = {name: trained(made(name, 0), partial(made, name, 7)) for name in OPTIONS}
    answers["refused"] = refusals(mesh, group, shard)
    run = made("patterns", 0)
    run.go(range(3))
    if rank == 3:
        run.engine.anchor["3.weight"].view(torch.int32)[0, 0] ^= 1
    answers["tampered"] = refusal(lambda: run.go(range(3, 9)))
    run = made("whole", 0)
    run.go(range(4))
    answers["found"] = list(run.engine.check())  # shards are not taken for other parameters than whole ones
    name = "loss" if rank < 3 else "norm"
    answers["signals"] = refusal(lambda: [run.engine.step({name: 1.0}) for _ in range(3)])
    unlike = {"inner_steps": 2 + (rank == 3), "outer": NESTEROV, "group": group}
    answers["inner_steps"] = refusal(lambda: DiLoCo(run.models, **unlike))
    return answers


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return in_processes(__file__, tmp_path_factory.mktemp("sharded"), 4)


@pytest.mark.parametrize("name", OPTIONS)
def test_shards_equal_the_whole(ranks: list[dict[str, Any]], name: str) -> None:
    """Saved and loaded, shards have the bits of unsharded replicas, or nearly; both replicas' are the same."""
    here = trained(begin(name, [0, 1], None, lambda _: None))
    answers = [answer[name] for answer in ranks]
    assert answers[0]["reports"] == answers[2]["reports"]
    assert answers[1]["reports"] == answers[3]["reports"]
    tolerance = 0.0 if name in EXACT else 0.05 if name == "int8" else 2e-5
    for rank, there in enumerate(answers):
        assert there["plain"] == here["plain"]
        assert str(there["measured"]) == str(answers[0]["measured"])
        for mine, theirs in zip(here["measured"], there["measured"], strict=True):
            assert theirs == pytest.approx(mine, rel=max(1e-4, 20 * tolerance), abs=max(1e-5, tolerance), nan_ok=True)
        assert set(there["signals"]) == {1.5}  # the mean of 0, 1, 2 and 3
        for key in NAMES:
            shard = here["anchor"][key].chunk(2)[rank % 2]
            torch.testing.assert_close(there["anchor"][key], shard, rtol=tolerance, atol=tolerance)
            assert same_bits(there["models"][0][key].chunk(2)[rank % 2], there["anchor"][key])


def test_what_cannot_be_in_shards_is_refused(ranks: list[dict[str, Any]]) -> None:
    """All say so of shards without their mesh, of parameters that are not in shards, and of what needs matrices."""
    for answers in ranks:
        for word, message in answers["refused"].items():
            assert message.startswith("ValueError")
            assert word in message


def test_a_harmed_shard_is_found_by_all(ranks: list[dict[str, Any]]) -> None:
    """In its round, though half of the ranks see one changed bit of rank 3 by themselves; so are unlike options."""
    for answers in ranks:
        assert answers["found"] == []
        for word in ("Disagreement", "anchor of fragment 'last'"):
            assert word in answers["tampered"]
        assert all(word in answers[word] for word in ("signals", "inner_steps"))


if __name__ == "__main__":
    bring(worker, 4)
