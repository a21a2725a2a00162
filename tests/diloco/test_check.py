"""Guard rails: each mistake of a loop is found, and a sound loop has none."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from forked import bring, in_processes
from rounds import Pair
from twophase.diloco.check import ALIKE, STILL
from twophase.diloco.engine import DiLoCo
from twophase.rule import OuterRule

RULE = OuterRule(0.7, 0.9, nesterov=True)


def model(*, norm: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), *([nn.BatchNorm1d(8)] if norm else []), nn.Linear(8, 1))


def batches(seed: int) -> Iterator[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randn(16, 4, generator=draw)


def rounds(
    engine: DiLoCo, inner: list[torch.optim.Optimizer], data: list[Iterator[Tensor]], steps: int, *, move: bool = True
) -> None:
    """Train the replicas of an engine."""
    for _ in range(steps):
        for module, optimizer, source in zip(engine.replicas, inner, data, strict=True):
            x = next(source)
            module(x).square().mean().backward()
            if move:
                optimizer.step()
            optimizer.zero_grad()
        engine.step()


def loop(replicas: int = 2, *, alike: bool = False, move: bool = True, steps: int = 8, **options: Any) -> DiLoCo:
    """Train a few rounds of a loop, with or without a mistake."""
    modules = [model() for _ in range(replicas)]
    engine = DiLoCo(modules, RULE, inner_steps=4, **options)
    inner: list[torch.optim.Optimizer] = [torch.optim.AdamW(module.parameters(), lr=0.01) for module in modules]
    data = [batches(0 if alike else number) for number in range(replicas)]
    rounds(engine, inner, data, steps, move=move)
    engine.finish()
    assert engine.check(inner) == tuple(engine._watch.findings)
    return engine


@pytest.mark.parametrize("options", [{}, {"fragments": 2}, {"delay": 1}, {"wire": "int8"}, {"restart": 1}])
def test_a_sound_loop_has_no_findings(options: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    """Replicas on their own data give no warning, whatever the engine's options."""
    assert loop(**options).check() == ()
    assert loop(1, **options).check() == ()
    assert caplog.records == []


def test_the_same_batches_are_noticed(caplog: pytest.LogCaptureFixture) -> None:
    """Replicas that see the same batches are warned of, once."""
    with caplog.at_level(logging.WARNING, "twophase"):
        assert loop(alike=True).check() == (ALIKE,)
        assert loop(3, alike=True, restart=1).check() == (ALIKE,)
    assert len(caplog.records) == 2


def test_one_number_is_no_evidence() -> None:
    """Replicas of one parameter always move along a line, which says nothing of their batches."""
    module = nn.Linear(1, 1, bias=False)
    engine = DiLoCo(module, RULE, inner_steps=1, communicator=Pair())
    rounds(engine, [torch.optim.SGD(module.parameters(), lr=0.01)], [iter([torch.ones(1, 1)])], 1)
    assert engine.check() == ()


def test_rounds_without_progress_are_noticed() -> None:
    """A loop that never steps its inner optimizer, or steps that of a copy, is warned of."""
    assert loop(move=False).check() == (STILL,)
    module, copy = model(), model()
    engine = DiLoCo(module, RULE, inner_steps=1)
    inner = torch.optim.AdamW(copy.parameters())
    rounds(engine, [inner], [batches(0)], 2)
    first, missing, foreign = engine.check(inner)
    assert first == STILL
    assert "0.weight" in missing
    assert "4 parameters" in foreign
    with pytest.raises(ValueError, match=r"0\.weight"):
        engine.check(inner, strict=True)


def test_mid_round_and_counts_are_told() -> None:
    """In mid-round the modules hold the replicas' own weights; one optimizer for two replicas is too few."""
    engine = loop()
    engine.step()
    engine.step()
    (mid,) = engine.check()
    assert "2 of 4 inner steps" in mid
    engine.finish()
    inner = torch.optim.AdamW(engine.replicas[0].parameters())
    count = engine.check(inner)[-1]
    assert "2 replicas" in count


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_replicas_at_the_anchor_with_mixing(dtype: torch.dtype) -> None:
    """Before the first round and after the end they are the anchor; in between the modules hold their own weights."""
    engine = DiLoCo([model().to(dtype), model().to(dtype)], RULE, inner_steps=4, mixing=0.5)
    assert engine.check(strict=True) == ()
    data: list[Iterator[Tensor]] = [(x.to(dtype) for x in batches(number)) for number in range(2)]
    rounds(engine, [torch.optim.SGD(m.parameters(), lr=0.1) for m in engine.replicas], data, 4)
    assert "0 of 4 inner steps" in engine.check()[0]
    engine.finish()
    assert engine.check(strict=True) == ()


def test_parameters_that_are_unfrozen_later_are_told() -> None:
    """The engine synchronizes what was trained when it was built."""
    module = model()
    module[0].requires_grad_(requires_grad=False)  # type: ignore[index]
    engine = DiLoCo(module, RULE, inner_steps=4)
    module[1] = nn.Sequential(module[1])  # type: ignore[index, operator] # the same parameters by other names
    assert engine.check() == ()
    module.requires_grad_(requires_grad=True)
    (finding,) = engine.check()
    assert finding.startswith("0.weight, 0.bias were unfrozen or put in after the engine was built")


def test_what_begins_or_ceases_to_train_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """By the next round, without `check`: replicas would part in silence, and momentum moves what is frozen."""
    modules = [model() for _ in range(2)]
    for module in modules:
        module[0].requires_grad_(requires_grad=False)  # type: ignore[index]
    engine = DiLoCo(modules, RULE, inner_steps=4)
    inner: list[torch.optim.Optimizer] = [torch.optim.SGD(m.parameters(), lr=0.1) for m in modules]
    data = [batches(number) for number in range(2)]
    rounds(engine, inner, data, 8)
    assert caplog.messages == []
    for module in modules:
        for layer, trains in enumerate((True, False)):
            module[layer].requires_grad_(requires_grad=trains)  # type: ignore[index]
    rounds(engine, inner, data, 8)
    unfrozen, frozen, _ = caplog.messages  # once each; and nothing that is synchronized has moved
    assert "0.weight, 0.bias were unfrozen or put in after the engine was built" in unfrozen
    assert "1.weight, 1.bias were frozen after the engine was built" in frozen


def test_a_module_that_takes_the_place_of_another_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """The engine goes on with the parameters of the one that is gone, and replicas would part in silence."""
    module = model()
    engine = DiLoCo(module, RULE, inner_steps=4)
    module[1] = copy.deepcopy(module[1])  # type: ignore[index, operator]
    rounds(engine, [torch.optim.SGD(module.parameters(), lr=0.1)], [batches(0)], 4)
    assert "1.weight, 1.bias were unfrozen or put in after the engine was built" in caplog.messages[0]


def test_optimizers_of_a_part_or_with_frozen_parameters_are_sound() -> None:
    """One replica may have several, and frozen parameters do no harm in one."""
    module = model()
    module[0].requires_grad_(requires_grad=False)  # type: ignore[index]
    engine = DiLoCo(module, RULE, inner_steps=4)
    assert engine.check(torch.optim.AdamW(module.parameters()), strict=True) == ()
    parts = [torch.optim.SGD([p], lr=0.1) for p in module[1].parameters()]  # type: ignore[index, union-attr]
    assert engine.check(parts, strict=True) == ()
    (finding,) = engine.check([parts[0], torch.optim.SGD([torch.zeros(1)], lr=0.1)])[:-1]
    assert finding == "the inner optimizers do not hold 1.bias, which the engine synchronizes and nothing trains"


def test_a_parameter_with_two_places_is_told() -> None:
    """A parameter in two inner optimizers, or in two groups of one, takes two steps in one."""
    module = model()
    engine = DiLoCo(module, RULE, inner_steps=1)
    whole = torch.optim.SGD(module.parameters(), lr=0.1)
    assert any(
        "0.bias" in finding for finding in engine.check([whole, torch.optim.SGD([module.get_parameter("0.bias")])])
    )
    assert engine.check(whole) == ()
    whole.param_groups.append(whole.param_groups[0] | {"params": [module.get_parameter("1.weight")]})
    (finding,) = engine.check(whole)
    assert "1.weight" in finding
    assert "0.bias" not in finding


def test_buffers_are_told_or_averaged(caplog: pytest.LogCaptureFixture) -> None:
    """BatchNorm's statistics are named, in the first round too; with buffers="mean" they are the replicas' mean.

    A buffer that no step changes is none of them.
    """
    caplog.set_level(logging.WARNING, logger="twophase")
    for buffers in ("local", "mean"):
        caplog.clear()
        modules = [model(norm=True) for _ in range(2)]
        for module in modules:
            module.register_buffer("frequencies", torch.ones(2))
        engine = DiLoCo(modules, RULE, inner_steps=4, buffers=buffers)
        inner: list[torch.optim.Optimizer] = [torch.optim.SGD(module.parameters(), lr=0.1) for module in modules]
        data = [batches(0), batches(1)]
        rounds(engine, inner, data, 3)
        means = [module.get_buffer("1.running_mean").clone() for module in modules]
        rounds(engine, inner, data, 1)
        now = [module.get_buffer("1.running_mean") for module in modules]
        assert len(engine.check(inner)) == len(caplog.messages) == (buffers == "local")
        assert "frequencies" not in "".join(engine.check(inner))
        assert torch.equal(*now) == (buffers == "mean")
        assert not torch.equal(*means)
    for modules, buffers in (([model()], "sum"), ([nn.BatchNorm1d(3), nn.BatchNorm1d(3)], "mean")):
        if buffers == "mean":
            modules[1].register_buffer("more", torch.zeros(2))
        with pytest.raises(ValueError, match="buffers"):
            DiLoCo(modules, RULE, inner_steps=1, buffers=buffers)


def test_average_of_buffers_is_exact() -> None:
    """The mean is that of the replicas' buffers, in this process and over processes; integers stay."""
    from twophase.diloco.check import average_buffers

    modules = [model(norm=True) for _ in range(2)]
    for number, module in enumerate(modules):
        module.get_buffer("1.running_var").fill_(1.0 + number)
    average_buffers(modules, Pair())
    assert torch.equal(modules[0].get_buffer("1.running_var"), torch.full((8,), 1.5))
    assert modules[1].get_buffer("1.num_batches_tracked") == 0


@pytest.mark.dist
def test_two_processes(tmp_path: Path) -> None:
    """Over gloo the same batches are noticed in both processes, and others not; buffers become the same bits.

    Processes that were given other words for buffers, or other numbers of replicas, are refused, rather than wait for
    each other or take another mean.
    """
    first, second = in_processes(__file__, tmp_path, 2)
    assert first["findings"] == second["findings"] == [[ALIKE], []]
    assert torch.equal(first["mean"], second["mean"])
    assert not torch.equal(first["own"], second["own"])
    assert first["refused"] == second["refused"]
    assert len(first["refused"]) == 2
    assert first["refused"][1] == "numbers of replicas"


def _in_a_process(rank: int) -> dict[str, Any]:
    results: dict[str, Any] = {"findings": []}
    for seed in (0, rank):
        module = model()
        engine = DiLoCo(module, RULE, inner_steps=4)
        rounds(engine, [torch.optim.AdamW(module.parameters(), lr=0.01)], [batches(seed)], 8)
        results["findings"].append(list(engine.check()))
    module = model(norm=True)
    engine = DiLoCo(module, RULE, inner_steps=4, buffers="mean")
    inner: list[torch.optim.Optimizer] = [torch.optim.SGD(module.parameters(), lr=0.1)]
    data = [batches(rank)]
    rounds(engine, inner, data, 3)
    results["own"] = module.get_buffer("1.running_var").clone()
    rounds(engine, inner, data, 1)
    results["mean"] = module.get_buffer("1.running_var").clone()
    results["refused"] = []
    for replicas, buffers in ((1, ("mean", "local")[rank]), (1 + rank, "mean")):
        try:
            DiLoCo([model(norm=True) for _ in range(replicas)], RULE, inner_steps=4, buffers=buffers)
        except ValueError as error:
            results["refused"].append(str(error).split(":")[1].split(" differ")[0].strip())
    return results


if __name__ == "__main__":
    bring(_in_a_process, 2)
