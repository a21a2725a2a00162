"""`OuterSGD` in its surroundings: DTensors, torchft's DiLoCo.

Run as a program, this file is one of the processes of the DTensor test.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import MagicMock, create_autospec

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from forked import in_processes
from outers import counters, randoms
from replicas import same_bits, through_file
from twophase import restart as restart_module
from twophase.diloco.engine import DiLoCo
from twophase.optim.outer import OuterSGD
from twophase.restart import Restart, RestartPolicy, RoundSignal, State
from twophase.rule import OuterRule

MIXED = [((7, 3), "shard 0"), ((4, 6), "shard 1"), ((5,), "replicate"), ((), "plain"), ((6, 2), "plain")]


@dataclass(frozen=True, slots=True)
class Turned(RestartPolicy):
    """Hard restart before the mixing when the cosine between g and the buffer is below `limit`."""

    limit: float
    needs: ClassVar[frozenset[str]] = frozenset({"cosine"})

    def decide(self, state: State, signal: RoundSignal) -> tuple[State, Restart | None]:
        """Look at the angle."""
        assert signal.cosine is not None
        return state, Restart(before=True) if signal.cosine < self.limit and signal.rounds_since_restart > 1 else None


def distributed_run(wrap: Callable[[Tensor, str], Tensor], policy: str) -> dict[str, Any]:
    """The same rounds on parameters that `wrap` makes of whole tensors; whole tensors and counters come back."""
    params = [nn.Parameter(wrap(x, how)) for x, (_, how) in zip(randoms(0, [s for s, _ in MIXED]), MIXED, strict=True)]
    outer = OuterSGD(params, 0.1, 0.9, nesterov=True, restart=policy)
    angles = []
    for number in range(10):
        gradients = randoms(number + 1, [shape for shape, _ in MIXED])
        for p, g, (_, how) in zip(params, gradients, MIXED, strict=True):
            p.grad = wrap(g, how)
        outer.step(measure=True)
        angles += [outer.last_round[0].cosine, outer.last_round[0].gain]
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in params]  # type: ignore[operator]
    return {"x": [p.detach().clone() for p in whole], "angles": angles, "counters": counters(outer)}


def sharded(mesh: Any) -> Callable[[Tensor, str], Tensor]:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    def wrap(tensor: Tensor, how: str) -> Tensor:
        if how == "plain":
            return tensor
        kind, *dim = how.split()
        return distribute_tensor(tensor, mesh, [Shard(int(dim[0])) if kind == "shard" else Replicate()])

    return wrap


def join(rank: int, size: int, store: Path) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    return init_device_mesh("cpu", (size,))


@pytest.fixture
def mesh_of_one(tmp_path: Path) -> Iterator[Any]:
    yield join(0, 1, tmp_path / "store")
    dist.destroy_process_group()


def assert_same_run(actual: dict[str, Any], whole: dict[str, Any]) -> None:
    for a, b in zip(actual["x"], whole["x"], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)
    assert actual["angles"] == pytest.approx(whole["angles"], rel=1e-9, abs=1e-12)
    assert actual["counters"] == whole["counters"]


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["soft:2:0.3:0.5", "test-turned:0.1"])
def test_dtensors_in_one_process(mesh_of_one: Any, register_policy: Callable[[str], Any], policy: str):
    """DTensor parameters, mixed with plain ones in a group, step like whole tensors, adaptive restarts included."""
    register_policy("test-turned")(Turned)
    assert_same_run(distributed_run(sharded(mesh_of_one), policy), distributed_run(lambda x, _: x, policy))


def test_dtensor_state_round_trip(mesh_of_one: Any):
    """The state of DTensor parameters loads into a new optimizer over them, dtype and shards kept."""
    wrap = sharded(mesh_of_one)
    params = [nn.Parameter(wrap(x, "shard 0")) for x in randoms(0, [(6, 2), (8,)], torch.bfloat16)]
    outer = OuterSGD(params, 0.1, 0.9, restart=3)
    for p, g in zip(params, randoms(1, [(6, 2), (8,)], torch.bfloat16), strict=True):
        p.grad = wrap(g, "shard 0")
    outer.step()
    other = OuterSGD(params, 0.1, 0.9, restart=3)
    other.load_state_dict(copy.deepcopy(outer.state_dict()))
    for p in params:
        loaded, buffer = (optimizer.state[p]["momentum_buffer"] for optimizer in (other, outer))
        assert loaded.dtype == torch.float32
        assert loaded.placements == buffer.placements
        assert same_bits(loaded.full_tensor(), buffer.full_tensor())


@pytest.mark.dist
def test_dtensors_in_two_processes(tmp_path: Path, register_policy: Callable[[str], Any]):
    """Two processes with half of each shard step like the whole tensor and decide alike, adaptive restarts included."""
    register_policy("test-turned")(Turned)
    results = in_processes(__file__, tmp_path, 2)
    for policy in ("3", "test-turned:0.1"):
        whole = distributed_run(lambda x, _: x, policy)
        assert 2 <= whole["counters"][2] < 9
        for answers in results:
            assert_same_run(answers[policy], whole)


def worker(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    restart_module.register("test-turned")(Turned)
    wrap = sharded(join(rank, 2, folder / "store"))
    results = {policy: distributed_run(wrap, policy) for policy in ("3", "test-turned:0.1")}
    torch.save(results, folder / f"{rank}.pt")
    dist.destroy_process_group()


# --- inside torchft's DiLoCo ------------------------------------------------------------------------------------------


def torchft_manager() -> MagicMock:
    """A torchft Manager of one replica: the all-reduce leaves its tensor alone and every round commits."""
    manager_module = pytest.importorskip("torchft.manager")
    from torchft.work import _DummyWork

    manager = create_autospec(manager_module.Manager)
    manager._use_async_quorum = False
    manager.errored.return_value = None
    manager.current_step.return_value = 0
    manager.should_commit.return_value = True
    manager.allreduce.side_effect = lambda tensor, should_quantize=False: _DummyWork(tensor)  # noqa: ARG005
    return manager


def small_model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def inner_steps(model: nn.Module, inner: torch.optim.Optimizer, steps: range) -> Iterator[int]:
    """Inner training on data that is a function of the step."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randn(16, 4, generator=generator), torch.randn(16, 3, generator=generator)
        inner.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        inner.step()
        yield step


@pytest.mark.parametrize("policy", ["soft:3:0.2:0.1", "norm-ratio:1.5:1"])
def test_inside_torchft(policy: str, norm_ratio: type[RestartPolicy]):
    """Unchanged inside torchft's DiLoCo, it gives our engine's weights, bit for bit, over 10 rounds with restarts."""
    assert norm_ratio.name == "norm-ratio"
    local_sgd = pytest.importorskip("torchft.local_sgd")
    rule, count = OuterRule(0.7, 0.9, nesterov=True), 4

    wrapped = small_model(0)
    inner = torch.optim.AdamW(wrapped.parameters(), lr=1e-2)
    outer = OuterSGD.from_rule(wrapped.parameters(), rule, policy)
    manager = torchft_manager()
    with local_sgd.DiLoCo(manager, [wrapped], inner, outer, sync_every=count):
        for _ in inner_steps(wrapped, inner, range(10 * count)):
            pass
    assert manager.should_commit.call_count == 10

    actual = small_model(0)
    inner = torch.optim.AdamW(actual.parameters(), lr=1e-2)
    engine = DiLoCo(actual, rule, restart=policy, inner_steps=count)
    for _ in inner_steps(actual, inner, range(10 * count)):
        engine.step()
    assert engine.round == 10
    for p, q in zip(actual.parameters(), wrapped.parameters(), strict=True):
        assert same_bits(p, q)
    assert isinstance(engine.outer, OuterSGD)
    assert counters(outer) == counters(engine.outer)
    assert outer.param_groups[0]["restarts"] > 0


@pytest.mark.parametrize("policy", ["3", "norm-ratio:1.5:1"])
def test_heals_inside_torchft(policy: str, norm_ratio: type[RestartPolicy]):
    """A joiner that loads what torchft moves has equal counters and weights ever after, through the next restarts."""
    assert norm_ratio.name == "norm-ratio"
    local_sgd = pytest.importorskip("torchft.local_sgd")
    replicas = []
    for seed in (0, 1):
        model = small_model(seed)
        inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
        outer = OuterSGD(model.parameters(), 0.7, 0.9, nesterov=True, restart=policy)
        manager = torchft_manager()
        diloco = local_sgd.DiLoCo(manager, [model], inner, outer, sync_every=2)
        (key, load, save), _ = manager.register_state_dict_fn.call_args
        assert "0" in key
        replicas.append((diloco, model, inner, outer, load, save))
    donor, joiner = replicas
    with donor[0], joiner[0]:
        for _ in inner_steps(donor[1], donor[2], range(10)):
            pass
        for _ in inner_steps(joiner[1], joiner[2], range(100, 102)):  # one round alone, on other data
            pass
        moved = through_file({"outer": donor[5](), "model": donor[1].state_dict(), "inner": donor[2].state_dict()})
        joiner[1].load_state_dict(moved["model"])
        joiner[2].load_state_dict(moved["inner"])
        joiner[4](moved["outer"])
        for start in range(10, 24, 2):
            for _, model, inner, *_ in replicas:
                for _ in inner_steps(model, inner, range(start, start + 2)):
                    pass
            for p, q in zip(donor[1].parameters(), joiner[1].parameters(), strict=True):
                assert same_bits(p, q)
            assert counters(donor[3]) == counters(joiner[3])
    assert donor[3].param_groups[0]["rounds"] == 12
    assert donor[3].param_groups[0]["restarts"] >= 3


if __name__ == "__main__":
    worker(int(sys.argv[1]), Path(sys.argv[2]))
