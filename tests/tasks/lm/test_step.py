"""Gradients in pieces, compiled, in mixed precision, with recomputation: the same step; and what it decides itself."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from twophase.base.config import RunError, UsageError, with_values
from twophase.diloco.group import SingleProcess
from twophase.tasks.lm import step as step_module
from twophase.tasks.lm.config import TrainConfig
from twophase.tasks.lm.evaluate import total_nats
from twophase.tasks.lm.model import Llama
from twophase.tasks.lm.step import Step, activation_bytes, compiled_loss, divisors, drawn
from twophase.tasks.lm.task import LanguageTask
from twophase.training.config import ComputeConfig
from twophase.training.device import room_for
from twophase.training.trainer import Trainer

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


def gradients(config: TrainConfig, compute: Step | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    model = model_of(config)
    value = (compute or Step(config, VOCABULARY, CPU, 1)).gradients(model, batch(config))
    return value, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def same_gradients(values: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Compare to float32's rounding."""
    for name, gradient in expected.items():
        torch.testing.assert_close(values[name], gradient, rtol=1e-4, atol=1e-7)


def test_a_whole_batch_is_the_models_own_loss():
    """Without pieces, value and gradients are bit for bit those of `model.loss(...).backward()`."""
    config = TrainConfig()
    value, grads = gradients(config)
    model = Llama(config.model, VOCABULARY, seed=config.seed)
    plain = LanguageTask(config).loss(model, batch(config))
    plain.backward()
    assert torch.equal(value, plain)
    for name, p in model.named_parameters():
        assert p.grad is not None
        assert torch.equal(grads[name], p.grad)


@pytest.mark.parametrize("micro", [1, 2, 4])
def test_pieces_add_up(micro: int):
    """The gradient of a batch in pieces is that of the whole, to float32's rounding."""
    (value, whole), (sum_of, pieces) = gradients(TrainConfig()), gradients(config_of(micro_batch=micro))
    torch.testing.assert_close(sum_of, value, rtol=1e-6, atol=0)
    same_gradients(pieces, whole)


def test_recomputation_changes_no_bit():
    """Activation checkpointing computes the same numbers twice."""
    (value, plain), (again, recomputed) = gradients(TrainConfig()), gradients(config_of(recompute=True))
    assert torch.equal(value, again)
    assert all(torch.equal(plain[name], grad) for name, grad in recomputed.items())


def test_recomputation_keeps_less():
    """With recomputation the backward pass of a deep model is handed far fewer bytes."""

    def numbers_saved(recompute: bool) -> int:
        config = with_values(config_of(recompute=recompute), {"model.layers": 8})
        total = 0

        def pack(tensor: Tensor) -> Tensor:
            nonlocal total
            total += tensor.numel()
            return tensor

        model = model_of(config)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model.loss(*batch(config))
        return total

    assert numbers_saved(True) < numbers_saved(False) / 4


def test_mixed_precision_keeps_float32_where_it_counts():
    """Parameters, gradients and loss are float32, the residual stream is bfloat16, and values are close."""
    config = config_of(precision="bf16-mixed")
    model = model_of(config)
    seen: set[torch.dtype] = set()
    for block in model.blocks:
        block.register_forward_hook(lambda *args: seen.add(args[2].dtype))
    value = Step(config, VOCABULARY, CPU, 1).gradients(model, batch(config))
    assert seen == {torch.bfloat16}
    assert {p.dtype for p in model.parameters()} == {torch.float32} == {value.dtype}
    exact, grads = gradients(TrainConfig())
    assert abs(value - exact) < 2**-8 * exact  # bfloat16 has 8 significant bits
    for name, p in model.named_parameters():
        assert p.grad is not None
        assert p.grad.dtype == torch.float32
        assert (p.grad - grads[name]).norm() < 0.05 * grads[name].norm()


def test_a_step_never_waits_for_the_device():
    """On the meta device, where every read of a value raises, a step in pieces with clipping and AdamW goes through."""
    meta = torch.device("meta")
    config = config_of(precision="bf16-mixed", micro_batch=4)
    model = model_of(config).to(meta)
    tokens, targets = (part.to(meta) for part in batch(config))
    value = Step(config, VOCABULARY, meta, 2).gradients(model, (tokens, targets))
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    torch.optim.AdamW(model.parameters(), foreach=True).step()
    with pytest.raises(RuntimeError, match="meta"):
        value.item()


# --- memory ---------------------------------------------------------------------------------------------------------


def full_above(size: int) -> Callable[[Llama, Tensor, Tensor, str], Tensor]:
    """A loss on a device whose memory holds `size` sequences."""

    def loss(model: Llama, tokens: Tensor, targets: Tensor, _: str) -> Tensor:
        value = model.loss(tokens, targets)
        if len(tokens) > size:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 16.8 GiB\nand so on")
        return value

    return loss


@pytest.mark.parametrize(("room", "expected"), [(8, 8), (7, 4), (3, 2), (1, 1)])
def test_out_of_memory_makes_pieces_smaller(room: int, expected: int, caplog: pytest.LogCaptureFixture):
    """The largest divisor that fits is found and stays, each try is told, and the step that met the limit is right."""
    config = TrainConfig()
    compute = Step(config, VOCABULARY, CPU, 1)
    compute._loss = full_above(room)
    value, grads = gradients(config, compute)
    assert compute.chosen["micro_batch"] == expected
    assert len(caplog.records) == (8 // expected).bit_length() - 1
    exact, whole = gradients(TrainConfig())
    torch.testing.assert_close(value, exact, rtol=1e-6, atol=0)
    same_gradients(grads, whole)


def test_out_of_memory_in_a_later_piece_counts_nothing_twice():
    """Gradients of pieces that went well before the memory ran out are dropped with the others."""
    config = config_of()
    compute = Step(config, VOCABULARY, CPU, 1)
    compute.chosen = {"micro_batch": 4, "attention": "default"}
    calls = iter([1, 9, 1, 1, 1, 1])  # the second piece of the first try fails

    def loss(model: Llama, tokens: Tensor, targets: Tensor, _: str) -> Tensor:
        if next(calls) == 9:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return model.loss(tokens, targets)

    compute._loss = loss
    _, grads = gradients(config, compute)
    assert compute.chosen["micro_batch"] == 2
    same_gradients(grads, gradients(TrainConfig())[1])


@pytest.mark.parametrize(
    ("micro", "remedy"), [(0, "--compute.recompute"), (4, "give a smaller one, or 0 for as many as the memory holds")]
)
def test_out_of_memory_for_good(micro: int, remedy: str):
    """When not one sequence fits, or the size was given, one message names the size and what would help."""
    config = config_of(micro_batch=micro)
    compute = Step(config, VOCABULARY, CPU, 1)
    compute._loss = full_above(0)
    with pytest.raises(RunError, match=rf"--compute.micro-batch {micro or 1} .*16.8 GiB.*{remedy}.*intact"):
        gradients(config, compute)


def test_the_cpus_own_words_for_it():
    """Torch has no exception of its own for a CPU that is full; other errors are not taken for it."""
    compute = Step(TrainConfig(), VOCABULARY, CPU, 1)

    def loss(model: Llama, tokens: Tensor, targets: Tensor, _: str) -> Tensor:
        if len(tokens) > 2:
            torch.empty(1 << 60, dtype=torch.uint8)
        return model.loss(tokens, targets)

    compute._loss = loss
    gradients(TrainConfig(), compute)
    assert compute.chosen["micro_batch"] == 2

    def broken(*_: object) -> Tensor:
        raise RuntimeError("shapes do not match")

    compute._loss = broken
    with pytest.raises(RuntimeError, match="shapes do not match"):
        gradients(TrainConfig(), compute)


def test_the_first_guess_follows_the_memory(monkeypatch: pytest.MonkeyPatch):
    """The less memory, the smaller the pieces, always divisors, never below 1; a given size is taken as it is."""
    config = with_values(TrainConfig(), {"data.batch_size": 12})
    sizes = []
    for gigabytes in (64.0, 0.03, 0.01, 0.005, 0.0):
        monkeypatch.setattr(step_module, "memory_bytes", lambda _, g=gigabytes: int(g * 1e9))
        compute = Step(config, VOCABULARY, CPU, 2)
        compute.gradients(model_of(config), batch(config))
        sizes.append(compute.chosen["micro_batch"])
    assert sizes[0] == 12
    assert sizes[-1] == 1
    assert sizes == sorted(sizes, reverse=True)
    assert set(sizes) <= set(divisors(12))
    fixed = replace(config, compute=ComputeConfig(micro_batch=6))
    compute = Step(fixed, VOCABULARY, CPU, 2)
    compute.gradients(model_of(fixed), batch(fixed))
    assert compute.chosen["micro_batch"] == 6


def test_the_estimate_of_the_paper_model():
    """Within 5 % of the peaks counted in the compiler's CUDA code, less gradients, compiled or not."""
    from twophase.recipes.pretraining import paper_150m

    def gigabytes(sequences: int = 64, **values: Any) -> float:
        changed = {name.replace("__", "."): value for name, value in values.items()}
        return activation_bytes(with_values(paper_150m(), changed), 32000, sequences) / 1e9

    three: dict[str, Any] = {"model__layers": 3}
    assert gigabytes() == pytest.approx(60.95, rel=0.05)
    assert gigabytes(16, **three) == pytest.approx(6.24, rel=0.05)
    assert gigabytes(**three, compute__precision="float32") == pytest.approx(34.63, rel=0.05)
    assert gigabytes(**three, model__kv_heads=4) == pytest.approx(15.64, rel=0.05)
    assert gigabytes(**three, compute__recompute=True) == pytest.approx(8.30, rel=0.05)
    three["compute__compile"] = False
    assert gigabytes(**three) == pytest.approx(25.67, rel=0.05)
    assert gigabytes(**three, compute__recompute=True) == pytest.approx(12.18, rel=0.05)
    assert gigabytes(**three, compute__precision="float32") == pytest.approx(45.27, rel=0.05)


# --- compiled -------------------------------------------------------------------------------------------------------


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """No compiled code of earlier tests, and none left behind."""
    torch._dynamo.reset()
    compiled_loss.cache_clear()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()
    compiled_loss.cache_clear()


@pytest.fixture
def traced_only(monkeypatch: pytest.MonkeyPatch, fresh_compiler: None) -> None:
    """Graphs are made and guarded as ever, but run as they are: what makes C++ of them takes most of the time."""
    del fresh_compiler
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("traced_only")
def test_compiled_code_takes_the_kernel_that_was_chosen():
    """Compiled for one attention kernel and then asked for another, the step is compiled anew and runs that one."""
    from torch.profiler import ProfilerActivity, profile

    config = with_values(config_of(compile=True), {"model.layers": 1})
    model = model_of(config)
    compute = Step(config, VOCABULARY, CPU, 1)
    ran: dict[str, bool] = {}
    for name in ("flash", "math"):
        compute.chosen = {"micro_batch": 8, "attention": name}
        with profile(activities=[ProfilerActivity.CPU]) as trace:
            compute.gradients(model, batch(config))
        ran[name] = any("flash_attention" in event.key for event in trace.key_averages())
    assert ran == {"flash": True, "math": False}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("traced_only")
@pytest.mark.skipif("recompile_limit" not in inspect.signature(torch.compile).parameters, reason="torch is too old")
@torch._dynamo.config.patch(recompile_limit=1)
def test_many_shapes_in_one_process():
    """More shapes than torch compiles by default for one function go through, as a sweep over sizes needs."""
    config = with_values(config_of(compile=True), {"model.layers": 0, "data.batch_size": 1})
    model = model_of(config)
    compute = Step(config, VOCABULARY, CPU, 1)
    for length in (4, 5):
        tokens = torch.zeros(1, length, dtype=torch.int64)
        compute.gradients(model, (tokens, tokens))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")  # the compiler's own, about its own parts
@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_training_is_the_same_training():
    """Over 12 steps of two replicas on real text losses agree to 1e-4, and one compilation serves both replicas."""
    plain = with_values(TrainConfig(), {"steps": 12, "inner_steps": 4, "model.layers": 1})
    losses = []
    for config in (plain, with_values(plain, {"compute.compile": True})):
        trainer = Trainer(LanguageTask(config), config, SingleProcess())
        losses.append([])
        for _ in range(12):
            trainer.inner_step()
            losses[-1].append([value.item() for value in trainer._losses[-2:]])
            trainer.synchronize()
    difference = (torch.tensor(losses[0]) - torch.tensor(losses[1])).abs().max().item()
    assert difference < 1e-4
    assert losses[0][0] != losses[0][-1]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.usefixtures("fresh_compiler")
def test_a_missing_compiler_is_told(monkeypatch: pytest.MonkeyPatch):
    """Where nothing can be compiled, one message names the option and what would help."""
    monkeypatch.setattr("torch._inductor.config.cpp.cxx", (None, "/no/such/compiler"))
    monkeypatch.setattr("torch._inductor.config.force_disable_caches", True)
    with pytest.raises(UsageError, match=r"--compute.compile: the compiler failed \(.*--compute.no-compile"):
        gradients(with_values(config_of(compile=True), {"model.layers": 1}))


def test_autotune_is_a_mode_of_the_compiler(monkeypatch: pytest.MonkeyPatch):
    """Without CUDA graphs, whose memory the pieces would write over."""
    modes: list[str | None] = []
    monkeypatch.setattr(torch, "compile", lambda _, **options: modes.append(options.get("mode")))
    for autotune in (False, True):
        step_module.compiled_loss.__wrapped__(autotune=autotune)
    assert modes == [None, "max-autotune-no-cudagraphs"]


def test_a_gpus_kernel_is_chosen_once_for_the_pieces(monkeypatch: pytest.MonkeyPatch):
    """On a GPU the attention kernel is chosen before the first step, for the shape of a forward pass."""
    shapes: list[torch.Size] = []
    monkeypatch.setattr(step_module, "choose", lambda _config, shape, *_: shapes.append(shape) or "math")
    config = config_of(micro_batch=8)
    compute = Step(config, VOCABULARY, CPU, 1)
    monkeypatch.setattr(compute, "device", torch.device("cuda"))
    for _ in range(2):
        compute.gradients(model_of(config), batch(config))
    assert compute.chosen == {"micro_batch": 8, "attention": "math"}
    assert shapes == [torch.Size((8, 64))]


# --- evaluation -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.usefixtures("traced_only")
def test_the_steps_evaluation_is_the_plain_one():
    """Windows that are no multiple of the pieces: the nats of `evaluate`, at the cost of one graph, and no gradient."""
    config = with_values(config_of(compile=True, micro_batch=4), {"model.layers": 1})
    model = model_of(config)
    tokens, targets = (part[:7].repeat(2, 1)[:11] for part in batch(config))
    compute = Step(config, VOCABULARY, CPU, 1)
    nats = compute.nats(model, tokens, targets)
    compute.nats(model, tokens[:9], targets[:9])
    assert nats == pytest.approx(total_nats(model, tokens, targets, 3), rel=1e-6)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert all(p.grad is None for p in model.parameters())


def test_an_evaluation_that_does_not_fit_takes_smaller_pieces():
    """Evaluation meets the memory's limit as a step does, and its result is the whole one's."""
    config = config_of(micro_batch=0)
    model = model_of(config)
    compute = Step(config, VOCABULARY, CPU, 1)
    compute._loss = full_above(3)
    tokens, targets = batch(config)
    nats = compute.nats(model, tokens, targets)
    assert compute.chosen["micro_batch"] == 2
    assert nats == pytest.approx(total_nats(model, tokens, targets, 8), rel=1e-6)


def test_weights_that_do_not_fit_are_told_in_one_message():
    """A device too small for weights or optimizers: a message with the remedy; other faults pass."""
    message = r"--device cpu: out of memory for the weights.*smaller model"
    with pytest.raises(RunError, match=message), room_for("the weights", "cpu"):
        torch.empty(1 << 60, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="shapes"), room_for("the weights", "cpu"):
        raise RuntimeError("shapes do not match")
