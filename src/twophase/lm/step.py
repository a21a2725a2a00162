"""How a process computes losses and gradients: pieces of the batch, compiled code, attention kernels.

One `Step` serves all replicas and runs of a process, so code is compiled once. What it decides for itself, from the
memory and the machine at hand, changes the last bits of a run; so the decisions are plain values that a checkpoint
keeps and a resumed run takes over.
"""

from __future__ import annotations

import inspect
import os
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own custom
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import deterministic

from twophase.config import UsageError
from twophase.lm.config import ModelConfig, TrainConfig
from twophase.lm.model import Llama
from twophase.lm.speed import parameter_count

DTYPES = {"float32": None, "bf16-mixed": torch.bfloat16}
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
_REPEATABLE = ("flash", "efficient", "math")
"""Kernels whose backward pass can be told to add in a fixed order, the faster first."""
_COMPILER = ("torch._inductor", "torch._dynamo")
_CPU_IS_FULL = "can't allocate memory"
_USABLE_SHARE = 0.85
"""Of the memory at hand; the rest is for what the estimate does not know."""


class Step:
    """Forward and backward of a batch, for any model of one configuration on one device.

    Args:
        config: the run.
        vocabulary_size: of its model.
        device: where it trains.
        replicas: of this process; their optimizers' memory is left free.
    """

    def __init__(self, config: TrainConfig, vocabulary_size: int, device: torch.device, replicas: int) -> None:
        self.config = config
        self.vocabulary_size = vocabulary_size
        self.device = device
        self.replicas = replicas
        self.chosen: dict[str, Any] = {}
        """`micro_batch` and `attention`, from the first step on; plain values, for checkpoint and record."""
        self._loss = compiled_loss() if config.compute.compile else loss

    def gradients(self, model: Llama, tokens: Tensor, targets: Tensor) -> Tensor:
        """Add the gradient of the mean loss to `.grad`, piece by piece, without waiting for the device.

        A device that runs out of memory makes the pieces smaller, for good, unless their size was given.

        Args:
            model: with gradients that are None.
            tokens: (batch, length) int64 on the device.
            targets: likewise.

        Returns:
            The mean loss in nats a token, a scalar on the device.

        Raises:
            UsageError: out of memory with pieces that cannot be made smaller, or code that cannot be compiled.
        """
        self._choose(tokens.shape)
        while True:
            try:
                return self._pass(model, tokens, targets)
            except RuntimeError as error:
                reason = str(error).splitlines()[0]
                if type(error).__module__.startswith(_COMPILER):
                    raise UsageError(
                        f"--compute.compile: the compiler failed ({reason}); a CPU needs a C++ compiler (package "
                        "g++), a GPU triton, which comes with torch; or train without: --compute.no-compile"
                    ) from error
                if not (isinstance(error, torch.OutOfMemoryError) or _CPU_IS_FULL in str(error)):
                    raise
            # Outside the handler: the exception holds on to everything that the pass had allocated.
            model.zero_grad()
            self._shrink(reason)
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    @torch.no_grad()
    def loss(self, model: Llama, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of some sequences, forward only and piece by piece; a scalar on the device."""
        # For a training step's batch, whatever is evaluated here: a replica that comes late may probe before it trains,
        # and pieces of 3 that were chosen for a probe of 3 would be kept for batches of 8, which they do not divide.
        self._choose(torch.Size((self.config.data.batch_size, tokens.shape[1])))
        micro, batch = self.chosen["micro_batch"], len(tokens)
        total = torch.zeros((), device=self.device)
        for inputs, wanted in zip(tokens.split(micro), targets.split(micro), strict=True):
            total += self._loss(model, inputs, wanted, self.chosen["attention"]) * (len(inputs) / batch)
        return total

    def _pass(self, model: Llama, tokens: Tensor, targets: Tensor) -> Tensor:
        micro, batch = self.chosen["micro_batch"], len(tokens)
        # Around the backward pass, too: what is recomputed there must meet the same kernel.
        with _attention(self.chosen["attention"]):
            if micro == batch:  # no scale, no sum: a whole batch has exactly its own loss
                value = self._loss(model, tokens, targets, self.chosen["attention"])
                value.backward()
                return value.detach()
            total = torch.zeros((), device=self.device)
            for inputs, wanted in zip(tokens.split(micro), targets.split(micro), strict=True):
                value = self._loss(model, inputs, wanted, self.chosen["attention"]) * (micro / batch)
                value.backward()
                total += value.detach()
            return total

    def _shrink(self, reason: str) -> None:
        micro, data = self.chosen["micro_batch"], self.config.data
        smaller = [size for size in divisors(data.batch_size) if size < micro]
        if self.config.compute.micro_batch:
            remedy = "give a smaller one, or 0 for as many as the memory holds"
        elif not smaller:
            remedy = (
                f"not even one sequence of --data.sequence-length {data.sequence_length} fits; give shorter ones, "
                "--compute.recompute, --compute.precision bf16-mixed, a smaller model, or fewer replicas a process"
            )
        else:
            self.chosen["micro_batch"] = smaller[-1]
            return
        raise UsageError(
            f"--device {self.config.device}: out of memory at --compute.micro-batch {micro} ({reason}); {remedy}. "
            "What the run has saved is intact"
        )

    def _choose(self, shape: torch.Size) -> None:
        """Fill in what has not been decided yet."""
        compute, batch = self.config.compute, shape[0]
        if "micro_batch" not in self.chosen:
            self.chosen["micro_batch"] = compute.micro_batch or self._largest_that_fits(batch)
        if "attention" not in self.chosen:
            if self.device.type != "cuda":
                self.chosen["attention"] = "default"
                return
            names = tuple(BACKENDS) if compute.attention == "auto" else (compute.attention,)
            if self.config.deterministic:
                names = tuple(name for name in _REPEATABLE if name in names)
            shape = torch.Size((self.chosen["micro_batch"], shape[1]))
            repeat = self.config.deterministic
            found = fastest_attention(self.config.model, shape, compute.precision, names, self.device, timed=not repeat)
            if found == "default" and compute.attention != "auto":
                raise UsageError(
                    f"--compute.attention {compute.attention}: this kernel does not work here for {compute.precision}, "
                    f"heads of {self.config.model.hidden_size // self.config.model.heads}"
                    f"{' and --deterministic' * repeat}; use --compute.attention auto"
                )
            self.chosen["attention"] = found

    def _largest_that_fits(self, batch: int) -> int:
        """The largest divisor of the batch whose activations should fit; what does not is found out by trying."""
        room = memory_bytes(self.device) * _USABLE_SHARE
        numel = parameter_count(self.config.model, self.vocabulary_size)
        # float32: a replica's parameters and two moments; one gradient; anchor, pseudo-gradient and outer buffer.
        room -= 4 * numel * (3 * self.replicas + 4)
        one = activation_bytes(self.config, self.vocabulary_size)
        return max((size for size in divisors(batch) if size * one <= room), default=1)


def loss(model: Llama, tokens: Tensor, targets: Tensor, attention: str) -> Tensor:
    """The loss of a model: a function of the model, so that compiled code belongs to no single one.

    The attention kernel is chosen inside, because compiled code and its caches know of nothing else: with the choice
    made outside, code that was compiled for one kernel is taken for another, even by a later process.
    """
    with _attention(attention):
        return model.loss(tokens, targets)


def _attention(name: str) -> AbstractContextManager[Any]:
    return sdpa_kernel(BACKENDS[name]) if name in BACKENDS else nullcontext()


@cache
def compiled_loss() -> Callable[[Llama, Tensor, Tensor, str], Tensor]:
    """`loss`, compiled for exact shapes, which is markedly faster than for variable ones; one for the process."""
    options: dict[str, Any] = {"dynamic": False, "fullgraph": True}
    if "recompile_limit" in inspect.signature(torch.compile).parameters:  # not in older versions
        options["recompile_limit"] = 256  # a sweep may bring many shapes, one after the other
    return torch.compile(loss, **options)


def divisors(number: int) -> list[int]:
    """The divisors of a number >= 1, from 1 to itself.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    return [size for size in range(1, number + 1) if number % size == 0]


def activation_bytes(config: TrainConfig, vocabulary_size: int) -> int:
    """About how much memory one sequence takes between forward and backward pass.

    Per token and layer the inputs of every product and nonlinearity: 5 hidden and 3 intermediate vectors, and those of
    query, key and value; on a CPU, where little is fused, about twice that. With recomputation a hidden vector a layer,
    and one layer in full.
    """
    model = config.model
    size = 2 if config.compute.precision == "bf16-mixed" else 4
    kv = (model.kv_heads or model.heads) / model.heads
    layer = (6 + 2 * kv) * model.hidden_size + 3 * model.intermediate_size
    layer *= 1 if config.compute.compile else 2
    values = model.layers * model.hidden_size + layer if config.compute.recompute else model.layers * layer
    head = min(vocabulary_size, 4096) * 4  # logits exist in pieces
    return int(config.data.sequence_length * (values * size + 4 * model.hidden_size * size + head))


def memory_bytes(device: torch.device) -> int:
    """Memory of a device or of this machine: all of it, free or not, so that the same machine decides alike."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@cache
def fastest_attention(
    model: ModelConfig, shape: torch.Size, precision: str, names: tuple[str, ...], device: torch.device, *, timed: bool
) -> str:
    """The attention kernel that takes least time forward and backward on a GPU.

    Args:
        model: sizes.
        shape: (sequences, length).
        precision: as in the configuration.
        names: kernels of `BACKENDS` to try.
        device: the GPU.
        timed: whether the fastest is wanted; otherwise the first that works, for a choice by time could differ the
            next time.

    Returns:
        Its name, or `default` when none works.
    """
    seconds: dict[str, float] = {}
    heads, kv_heads, size = model.heads, model.kv_heads or model.heads, model.hidden_size // model.heads
    dtype = DTYPES[precision] or torch.float32
    # As in the model: one tensor from the product with query, key and value, heads behind the length.
    qkv = torch.randn(*shape, heads + 2 * kv_heads, size, device=device, dtype=dtype, requires_grad=True)
    gradient = torch.randn(*shape, heads, size, device=device, dtype=dtype).transpose(1, 2)

    def once(name: str) -> float:
        with sdpa_kernel(BACKENDS[name]):
            torch.cuda.synchronize(device)
            clock = time.perf_counter()
            q, k, v = (part.transpose(1, 2) for part in qkv.split((heads, kv_heads, kv_heads), 2))
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != kv_heads)
            torch.autograd.grad(out, qkv, gradient)
            torch.cuda.synchronize(device)
            return time.perf_counter() - clock

    for name in names:
        if name == "math" and seconds:
            continue  # it holds length x length scores and has never been the fastest
        try:
            once(name)  # compiles, tunes, refuses
            if not timed:
                return name
            seconds[name] = statistics.median(once(name) for _ in range(5))
        except RuntimeError:  # not built, not for this GPU, shape or type, or out of memory
            continue
    return min(seconds, key=lambda name: seconds[name]) if seconds else "default"


def make_repeatable(config: TrainConfig, device: torch.device) -> None:
    """On a GPU, let torch use any kernel or, under `--deterministic`, those that give the same bits every time only."""
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS is first used
        torch.use_deterministic_algorithms(config.deterministic)
        # What this fills is for finding faults, and costs time.
        deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]


def model_of(config: TrainConfig, vocabulary_size: int, device: torch.device) -> Llama:
    """A model of a configuration, freshly drawn, on a device."""
    compute = config.compute
    dtype = DTYPES[compute.precision]
    model = Llama(config.model, vocabulary_size, seed=config.seed, compute_dtype=dtype, recompute=compute.recompute)
    return model.to(device)
