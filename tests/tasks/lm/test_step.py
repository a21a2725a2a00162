"""Gradients in pieces, compiled, in mixed precision, with recomputation: the same step; and what it decides itself."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from twophase.config import update
from twophase.diloco.group import SingleProcess
from twophase.runs.config import ComputeConfig
from twophase.tasks.lm.config import TrainConfig, flops_per_token
from twophase.tasks.lm.model import Llama
from twophase.tasks.lm.step import Step, compiled_loss, drawn

CPU = torch.device("cpu")
VOCABULARY = 96


def config_of(**compute: Any) -> TrainConfig:
    return TrainConfig(compute=ComputeConfig(**compute))


def model_of(config: TrainConfig) -> Llama:
    return drawn(config, VOCABULARY, config.seed)


def batch(config: TrainConfig, seed: int = 0) -> tuple[Tensor, Tensor]:
    shape = (config.data.batch_size, config.data.sequence_length + 1)
    windows = torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def gradients(
    config: TrainConfig, step: Step | None = None, model: Llama | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    model = model or model_of(config)
    value = (step or Step(config, VOCABULARY, CPU)).gradients(model, batch(config))
    return value, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def same_gradients(values: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Compare to float32's rounding."""
    for name, gradient in expected.items():
        torch.testing.assert_close(values[name], gradient, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("micro", [1, 2, 4, 8])
def test_pieces_add_up(micro: int) -> None:
    """The gradient of a batch in pieces is that of the whole, to float32's rounding; of a whole one bit for bit."""
    config = config_of(micro_batch=micro)
    value, pieces = gradients(config)
    model = Llama(config.model, VOCABULARY, seed=config.seed)
    plain = model.loss(*batch(config))
    plain.backward()
    whole = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    torch.testing.assert_close(value, plain, rtol=1e-6, atol=0)
    same_gradients(pieces, whole)
    if micro == config.data.batch_size:
        assert all(torch.equal(pieces[name], gradient) for name, gradient in whole.items())


def test_recomputation_keeps_less_and_changes_no_bit() -> None:
    """Activation checkpointing computes the same numbers twice, and keeps far fewer for the backward pass."""
    found = []
    for recompute in (False, True):
        config = update(config_of(recompute=recompute), {"model.layers": 8})
        saved: list[int] = []

        def pack(tensor: Tensor, saved: list[int] = saved) -> Tensor:
            saved.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            found.append((*gradients(config), sum(saved)))
    (value, plain, kept), (again, recomputed, less) = found
    assert torch.equal(value, again)
    assert all(torch.equal(plain[name], gradient) for name, gradient in recomputed.items())
    assert less < kept / 1.5  # the second count has what is computed again


def test_mixed_precision_keeps_float32_where_it_counts() -> None:
    """Parameters, gradients and loss are float32, the residual stream is bfloat16, and values are close."""
    config = config_of(precision="bf16-mixed")
    model = model_of(config)
    seen: set[torch.dtype] = set()
    for block in model.blocks:
        block.register_forward_hook(lambda *args: seen.add(args[2].dtype))
    value, mixed = gradients(config, model=model)
    assert seen == {torch.bfloat16}
    assert {p.dtype for p in model.parameters()} == {torch.float32} == {value.dtype}
    exact, grads = gradients(TrainConfig())
    assert abs(value - exact) < 2**-8 * exact  # bfloat16 has 8 significant bits
    for name, gradient in mixed.items():
        assert gradient.dtype == torch.float32
        assert (gradient - grads[name]).norm() < 0.05 * grads[name].norm()


def test_a_step_never_waits_for_the_device() -> None:
    """On the meta device, where every read of a value raises, a step in pieces with clipping and AdamW goes through."""
    meta = torch.device("meta")
    config = config_of(precision="bf16-mixed", micro_batch=4)
    model = model_of(config).to(meta)
    tokens, targets = (part.to(meta) for part in batch(config))
    value = Step(config, VOCABULARY, meta).gradients(model, (tokens, targets))
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    torch.optim.AdamW(model.parameters(), foreach=True).step()
    with pytest.raises(RuntimeError, match="meta"):
        value.item()


def test_speed_is_counted_in_tokens_and_operations() -> None:
    """Those of so many batches over so many seconds."""
    flops = flops_per_token(TrainConfig().model, VOCABULARY, 64)
    found = Step(TrainConfig(), VOCABULARY, CPU).rates(10, 2.0)
    assert list(found.values()) == [2560.0, 2560 * flops]


class Full(Llama):
    """A model on a device whose memory holds `room` sequences, from the `since`-th forward pass on."""

    def __init__(self, room: int, since: int = 0) -> None:
        super().__init__(TrainConfig().model, VOCABULARY, seed=0)
        self.room, self.since, self.calls = room, since, 0

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        self.calls += 1
        if len(tokens) > self.room and self.calls > self.since:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 16.8 GiB")
        return super().loss(tokens, targets)


@pytest.mark.parametrize(
    ("size", "room", "since", "expected"),
    [(8, 8, 0, 8), (8, 7, 0, 4), (8, 1, 0, 1), (8, 2, 1, 2), (9, 4, 0, 3)],
)
def test_out_of_memory_makes_pieces_smaller(size: int, room: int, since: int, expected: int) -> None:
    """The largest divisor that fits is found and stays, and gradients of failed tries are not counted."""
    config = update(TrainConfig(), {"data.batch_size": size})
    step = Step(config, VOCABULARY, CPU)
    step.chosen = {"micro_batch": 4} if since else {}  # of which some pieces go well before one fails
    value, grads = gradients(config, step, Full(room, since))
    assert step.chosen == {"micro_batch": expected}
    exact, whole = gradients(config)
    torch.testing.assert_close(value, exact, rtol=1e-6, atol=0)
    same_gradients(grads, whole)


@pytest.mark.parametrize("micro", [0, 4])
def test_out_of_memory_for_good(micro: int) -> None:
    """When not one sequence fits, or the size was given, torch's own error comes through."""
    with pytest.raises(torch.OutOfMemoryError, match=r"16\.8 GiB"):
        gradients(config_of(micro_batch=micro), model=Full(0))


class Ranks(SingleProcess):
    """A rank beside others that have found these sizes."""

    def __init__(self, *others: int) -> None:
        self.others, self.calls = others, 0

    def gather_json(self, value: Any) -> list[Any]:
        self.calls += 1
        return [value, *self.others]


@pytest.mark.parametrize(("others", "expected"), [((8, 8), 4), ((2, 8), 2)])
def test_all_ranks_take_the_smallest_pieces(others: tuple[int, ...], expected: int) -> None:
    """Agreed once, in the first step, whose gradients count once; a resumed run and a given size ask nobody."""
    config, group = TrainConfig(), Ranks(*others)
    step = Step(config, VOCABULARY, CPU, group)
    _, grads = gradients(config, step, Full(4))
    gradients(config, step, Full(4))
    assert (step.chosen, group.calls) == ({"micro_batch": expected}, 1)
    same_gradients(grads, gradients(config)[1])
    resumed = Step(config, VOCABULARY, CPU, group)
    resumed.chosen = dict(step.chosen)
    gradients(config, resumed, Full(4))
    given = config_of(micro_batch=4)
    gradients(given, Step(given, VOCABULARY, CPU, group), Full(4))
    assert (resumed.chosen, group.calls) == (step.chosen, 1)


@pytest.fixture
def fresh_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No compiled code of earlier tests, and none left behind.

    Graphs are made and guarded as ever, but run as they are: to make C++ of them takes a minute, for torch's own part.
    """
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    compiled_loss.cache_clear()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()
    compiled_loss.cache_clear()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_code_takes_the_kernel_that_was_chosen() -> None:
    """Compiled for one attention kernel and then asked for another, the step is compiled anew and runs that one."""
    from torch.profiler import ProfilerActivity, profile

    config = update(config_of(compile=True), {"model.layers": 1})
    model = model_of(config)
    step = Step(config, VOCABULARY, CPU)
    ran: dict[str, bool] = {}
    for name in ("auto", "flash", "math"):
        step.attention = name
        with profile(activities=[ProfilerActivity.CPU]) as trace:
            step.gradients(model, batch(config))
        ran[name] = any("flash_attention" in event.key for event in trace.key_averages())
    assert ran == {"auto": True, "flash": True, "math": False}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler's own, about its own parts
@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_training_is_the_same_training() -> None:
    """Over 12 steps of two models losses agree to 1e-4, and one compilation serves both models."""
    plain = update(TrainConfig(), {"model.layers": 1})
    losses = []
    for config in (plain, update(plain, {"compute.compile": True})):
        step, models = Step(config, VOCABULARY, CPU), [model_of(config) for _ in range(2)]
        optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
        losses.append([])
        for number in range(12):
            for replica, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
                losses[-1].append(step.gradients(model, batch(config, 2 * number + replica)).item())
                optimizer.step()
                optimizer.zero_grad()
    difference = (torch.tensor(losses[0]) - torch.tensor(losses[1])).abs().max().item()
    assert difference < 1e-4
    assert losses[0][0] != losses[0][-1]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
