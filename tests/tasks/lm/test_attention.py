"""Which attention kernel is used, and that all processes use the same: process 0's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import local
from typing import Any

import pytest
import torch

from threads import Member, together
from twophase.base.config import UsageError, with_values
from twophase.diloco.group import SingleProcess
from twophase.tasks.lm import attention
from twophase.tasks.lm.attention import activate, choose, fastest_attention
from twophase.tasks.lm.config import TrainConfig

GPU, SHAPE = torch.device("cuda", 1), torch.Size((8, 64))
Tried = list[tuple[tuple[str, ...], bool]]


def stub(works: set[str], tried: Tried) -> Callable[..., str]:
    """A machine on which these kernels work, the last of those that are tried being the fastest."""

    def fastest(model: Any, shape: Any, precision: str, names: tuple[str, ...], device: Any, *, timed: bool) -> str:
        del model, precision
        assert (shape, device) == (SHAPE, GPU)
        tried.append((names, timed))
        working = [name for name in names if name in works]
        return (working[-1] if timed else working[0]) if working else "default"

    return fastest


@pytest.mark.parametrize(
    ("values", "names", "timed"),
    [
        ({}, ("cudnn", "flash3", "flash", "efficient", "math"), True),
        ({"deterministic": True}, ("flash", "efficient", "math"), False),
        ({"compute.attention": "efficient"}, ("efficient",), True),
    ],
)
def test_which_kernels_are_tried(
    monkeypatch: pytest.MonkeyPatch, values: dict[str, Any], names: tuple[str, ...], timed: bool
):
    """All by default; those that repeat, untimed, under --deterministic; the given one alone."""
    tried: Tried = []
    monkeypatch.setattr(attention, "fastest_attention", stub(set(attention.BACKENDS), tried))
    config = with_values(TrainConfig(), values)
    assert choose(config, SHAPE, GPU, SingleProcess()) == names[-1 if timed else 0]
    assert tried == [(names, timed)]


@pytest.mark.parametrize(
    ("setting", "deterministic", "remedy"),
    [("flash", False, "heads of 16; use .* auto"), ("cudnn", True, "and --deterministic; use .* auto")],
)
def test_a_kernel_that_does_not_work_is_refused(
    monkeypatch: pytest.MonkeyPatch, setting: str, deterministic: bool, remedy: str
):
    """A given kernel that fails, or does not repeat as was asked, is a message; `auto` leaves it to torch."""
    monkeypatch.setattr(attention, "fastest_attention", stub({"cudnn"}, []))
    config = with_values(TrainConfig(), {"compute.attention": setting, "deterministic": deterministic})
    with pytest.raises(UsageError, match=rf"--compute.attention {setting}: .*{remedy}"):
        choose(config, SHAPE, GPU, SingleProcess())
    monkeypatch.setattr(attention, "fastest_attention", stub(set(), []))
    assert choose(TrainConfig(), SHAPE, GPU, SingleProcess()) == "default"


@pytest.mark.parametrize(
    ("machines", "outcome"),
    [
        ([{"cudnn", "flash"}, {"cudnn", "flash", "efficient"}, {"flash"}], "flash"),
        ([{"cudnn", "flash"}, {"efficient"}, {"flash"}], UsageError),
        ([set(), {"flash"}, {"flash"}], "default"),
    ],
)
def test_all_processes_take_process_0s_choice(
    monkeypatch: pytest.MonkeyPatch, machines: list[set[str]], outcome: str | type[UsageError]
):
    """Only process 0 times; the others try its choice once; where one cannot, all end with the same message."""
    tried: list[Tried] = [[], [], []]
    rank = local()

    def fastest(*arguments: Any, timed: bool) -> str:
        return stub(machines[rank.value], tried[rank.value])(*arguments, timed=timed)

    def process(member: Member) -> str:
        rank.value = member.rank
        try:
            return choose(TrainConfig(), SHAPE, GPU, member)
        except UsageError as error:
            return str(error)

    monkeypatch.setattr(attention, "fastest_attention", fastest)
    results = together(3, process)
    assert len(set(results)) == 1
    assert results[0] == outcome if isinstance(outcome, str) else "process 1" in results[0]
    assert [[timed for _, timed in calls] for calls in tried[:1]] == [[True]]
    assert all(calls in ([], [((outcome,), False)], [(("flash",), False)]) for calls in tried[1:])


def test_a_kernel_may_fail_as_it_likes(monkeypatch: pytest.MonkeyPatch):
    """Every kind of exception but an interruption means that the kernel is not for here: the next one is tried."""
    failures = {"cudnn": AssertionError("layout"), "flash": NotImplementedError(), "efficient": KeyError("stride")}

    def kernel(name: str) -> Any:
        raise failures.get(name) or KeyboardInterrupt

    monkeypatch.setattr(attention, "attention_kernel", kernel)
    model, device = TrainConfig().model, torch.device("cpu")
    names = tuple(failures)
    assert fastest_attention(model, SHAPE, "float32", names, device, timed=True) == "default"
    with pytest.raises(KeyboardInterrupt):
        fastest_attention(model, SHAPE, "float32", (*names, "math"), device, timed=False)


def test_the_fastest_that_works_is_taken(monkeypatch: pytest.MonkeyPatch):
    """By its time where it is timed, else by the order; `math` only where no other works."""
    costs, now, running = {"flash": 3.0, "efficient": 2.0, "math": 1.0}, 0.0, "none"

    @contextmanager
    def kernel(name: str) -> Iterator[None]:
        nonlocal running
        if name not in costs:
            raise RuntimeError("not built")
        running = name
        yield

    def clock() -> float:
        nonlocal now
        now += costs[running]
        return now

    monkeypatch.setattr(attention, "attention_kernel", kernel)
    monkeypatch.setattr(attention, "activate", lambda _: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(attention.time, "perf_counter", clock)
    for names, timed, taken in (
        (("cudnn", "flash", "efficient", "math"), True, "efficient"),
        (("cudnn", "flash", "efficient", "math"), False, "flash"),
        (("cudnn", "math"), True, "math"),
    ):
        arguments = TrainConfig().model, SHAPE, "float32", names, torch.device("cpu")
        assert fastest_attention.__wrapped__(*arguments, timed=timed) == taken


def test_flash3_is_switched_on_and_off(monkeypatch: pytest.MonkeyPatch):
    """Only a change calls torch, a torch without the switch is left alone, and what is missing is one message."""
    calls: list[str | None] = []
    module = attention.attention
    monkeypatch.setattr(module, "current_flash_attention_impl", lambda: calls[-1] if calls else None, raising=False)
    monkeypatch.setattr(module, "activate_flash_attention_impl", calls.append, raising=False)
    monkeypatch.setattr(module, "restore_flash_attention_impl", lambda: calls.append(None), raising=False)
    for name in ("flash", "flash3", "flash3", "cudnn", "default"):
        activate(name)
    assert calls == ["FA3", None]
    for name in ("current", "activate", "restore"):
        monkeypatch.delattr(module, f"{name}_flash_attention_impl")
    activate("flash")
    with pytest.raises(UsageError, match=r"--compute.attention flash3: .*use --compute.attention auto"):
        activate("flash3")
