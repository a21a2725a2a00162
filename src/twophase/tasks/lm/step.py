"""How a process computes losses and gradients: pieces of the batch, compiled code, attention kernels.

One `Step` serves all replicas and runs of a process, so code is compiled once. Its decisions depend on the memory and
the machine, and change the last bits of a run. So they are plain values that a checkpoint keeps and a resumed run takes
over.
"""

from __future__ import annotations

import inspect
import logging
import math
import os
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from twophase.base.errors import RunError, UsageError, first_line, is_out_of_memory
from twophase.diloco.group import SingleProcess
from twophase.tasks.lm.attention import DTYPES, activate, attention_kernel, choose
from twophase.tasks.lm.config import TrainConfig
from twophase.tasks.lm.loss import pieces_bytes
from twophase.tasks.lm.model import Llama
from twophase.tasks.lm.speed import matrix_count, parameter_count

T = TypeVar("T")
Batch = tuple[Tensor, Tensor]
"""Tokens and targets."""
_log = logging.getLogger("twophase")
_COMPILER = ("torch._inductor.compile_fx", "torch._dynamo.convert_frame", "triton.compiler")
"""Modules that run while code is compiled, and not while compiled code runs."""
_USABLE_SHARE = 0.85
"""Of the memory at hand; the rest is for what the estimate does not know."""


class Step:
    """Forward and backward of a batch, for any model of one configuration on one device.

    The memory of so many replicas' optimizers is left free; all processes of the run use the same attention kernel.
    """

    def __init__(
        self,
        config: TrainConfig,
        vocabulary_size: int,
        device: torch.device,
        replicas: int,
        communicator: SingleProcess | None = None,
    ) -> None:
        self.config = config
        self.vocabulary_size = vocabulary_size
        self.device = device
        self.replicas = replicas
        self.comm = communicator or SingleProcess()
        self.chosen: dict[str, Any] = {}
        """`micro_batch` and `attention`, from the first step on; plain values, for checkpoint and record."""
        self._loss = compiled_loss(autotune=config.compute.autotune) if config.compute.compile else loss

    def gradients(self, model: Llama, batch: Batch) -> Tensor:
        """Add the gradient of the mean loss to `.grad`, piece by piece, without waiting for the device.

        A device that runs out of memory makes the pieces smaller, for good, unless their size was given.

        Args:
            model: model whose gradients are None.
            batch: tokens and targets, each (batch, length) int64 on the device.

        Returns:
            The mean loss in nats a token, a scalar on the device.
        """
        self._choose(batch[0].shape)
        return self._until_it_fits(lambda: self._pass(model, *batch), model)

    @torch.no_grad()
    def nats(self, model: Llama, tokens: Tensor, targets: Tensor) -> float:
        """Sum the losses of many sequences, forward only, in a training step's pieces; wait for the device.

        Pieces have the training step's shape, so compiled code needs one more graph (without gradients) for any number
        of sequences. The remainder runs uncompiled.
        """
        self._choose_micro_batch(self.config.data.batch_size)

        def total() -> Tensor:
            # Only the process that evaluates is here, so nothing may be agreed on: before the first step torch chooses.
            micro, attention = self.chosen["micro_batch"], self.chosen.get("attention", "default")
            sums = []
            for inputs, labels in zip(tokens.split(micro), targets.split(micro), strict=True):
                value = (self._loss if len(inputs) == micro else loss)(model, inputs, labels, attention)
                sums.append(value.double() * labels.numel())
            return torch.stack(sums).sum()

        return self._until_it_fits(total, model).item()

    def _until_it_fits(self, compute: Callable[[], T], model: Llama) -> T:
        """Return the result of a computation; repeat it in smaller pieces if the memory is full."""
        while True:
            try:
                activate(self.chosen.get("attention", "default"))
                return compute()
            except Exception as error:
                cause = getattr(error, "inner_exception", error)  # what a backend of the compiler raised
                reason = first_line(cause)
                if not is_out_of_memory(cause):
                    if not _while_compiling(error):
                        raise
                    raise UsageError(
                        f"--compute.compile: the compiler failed ({reason}). A CPU needs a C++ compiler (package "
                        "g++), a GPU triton, which comes with torch, or another kernel (--compute.attention "
                        "efficient). Or train without: --compute.no-compile"
                    ) from error
            # Outside the handler: the exception holds on to everything that the pass had allocated.
            model.zero_grad()
            self._shrink(reason)
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def _pass(self, model: Llama, tokens: Tensor, targets: Tensor) -> Tensor:
        micro, batch = self.chosen["micro_batch"], len(tokens)
        # Around the backward pass, too: what is recomputed there must meet the same kernel.
        with attention_kernel(self.chosen["attention"]):
            if micro == batch:  # no scale, no sum: a whole batch has exactly its own loss
                value = self._loss(model, tokens, targets, self.chosen["attention"])
                value.backward()
                return value.detach()
            total = torch.zeros((), device=self.device)
            for inputs, labels in zip(tokens.split(micro), targets.split(micro), strict=True):
                value = self._loss(model, inputs, labels, self.chosen["attention"]) * (micro / batch)
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
            _log.warning(
                "--compute.micro-batch: %d sequences at a time do not fit on %s (%s); continuing with %d%s",
                micro,
                self.device,
                reason,
                smaller[-1],
                ", for which the step is compiled again" * self.config.compute.compile,
            )
            return
        raise RunError(
            f"--device {self.config.device}: out of memory at --compute.micro-batch {micro} ({reason}); {remedy}. "
            "What the run has saved is intact"
        )

    def _choose(self, shape: torch.Size) -> None:
        """Fill in what has not been decided yet."""
        self._choose_micro_batch(shape[0])
        if "attention" not in self.chosen:
            if self.device.type != "cuda":
                self.chosen["attention"] = "default"
                return
            shape = torch.Size((self.chosen["micro_batch"], shape[1]))
            self.chosen["attention"] = choose(self.config, shape, self.device, self.comm)

    def _choose_micro_batch(self, batch: int) -> None:
        if "micro_batch" not in self.chosen:
            self.chosen["micro_batch"] = self.config.compute.micro_batch or self._largest_that_fits(batch)

    def _largest_that_fits(self, batch: int) -> int:
        """Return the largest divisor of the batch whose activations should fit, by estimate."""
        room = memory_bytes(self.device) * _USABLE_SHARE
        numel = parameter_count(self.config.model, self.vocabulary_size)
        # float32: a replica's parameters and two moments; one gradient; anchor, pseudo-gradient and outer buffer.
        room -= 4 * numel * (3 * self.replicas + 4)
        config, vocabulary = self.config, self.vocabulary_size
        return max((size for size in divisors(batch) if activation_bytes(config, vocabulary, size) <= room), default=1)


def loss(model: Llama, tokens: Tensor, targets: Tensor, attention: str) -> Tensor:
    """Compute the loss of a model: a function of the model, so that compiled code belongs to no single one.

    The attention kernel is chosen inside, because compiled code and its caches do not see a choice made outside. Code
    compiled for one kernel would then be taken for another, even by a later process.
    """
    with attention_kernel(attention):
        return model.loss(tokens, targets)


@cache
def compiled_loss(*, autotune: bool = False) -> Callable[[Llama, Tensor, Tensor, str], Tensor]:
    """Compile `loss` for exact shapes, which is markedly faster than for variable ones; once a process.

    With `autotune` the compiler times several versions of each product and kernel, which takes minutes once.
    """
    options: dict[str, Any] = {"dynamic": False, "fullgraph": True}
    if "recompile_limit" in inspect.signature(torch.compile).parameters:  # not in older versions
        options["recompile_limit"] = 256  # a sweep may bring many shapes, one after the other
    if autotune:
        options["mode"] = "max-autotune-no-cudagraphs"
    return torch.compile(loss, **options)


def _while_compiling(error: BaseException) -> bool:
    """Return whether an exception of any type comes from a compiler: a compiler's type, or raised while it ran."""
    if type(error).__module__.startswith(("torch._inductor", "torch._dynamo", "triton.")):
        return True
    frame = error.__traceback__
    while frame is not None:
        if frame.tb_frame.f_globals.get("__name__", "").startswith(_COMPILER):
            return True
        frame = frame.tb_next
    return False


def divisors(number: int) -> list[int]:
    """List the divisors of a number >= 1, from 1 to itself.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    return [size for size in range(1, number + 1) if number % size == 0]


def activation_bytes(config: TrainConfig, vocabulary_size: int, sequences: int) -> int:
    """Estimate the peak memory of some sequences between forward and backward pass.

    On a GPU, saved per token and layer: the inputs of every product and nonlinearity. These are 5 hidden vectors (two
    of the residual stream, two norms, attention), 3 intermediate ones, and query, key and value twice. The second copy
    is rotated query and key, and the whole product of which the value is a view. Uncompiled code saves SiLU's result
    and float32 values of the norms, too. Recomputation saves a hidden vector a layer. Outside the layers: the last norm
    and the loss's gradient, and the weights cast for the products. In flight: the larger of the logits' pieces and a
    layer's backward pass (gradients, and the recomputed layer).

    Measured on fake CUDA tensors this is right to 4 %. On a CPU, where little is fused, it is cruder.
    """
    model, compute, length = config.model, config.compute, config.data.sequence_length
    size = 2 if compute.precision == "bf16-mixed" else 4
    kv = (model.kv_heads or model.heads) / model.heads
    hidden, inner, tokens = model.hidden_size, model.intermediate_size, sequences * length
    if torch.device(config.device).type == "cpu":
        layer = ((6 + 2 * kv) * hidden + 3 * inner) * (1 if compute.compile else 2)
        values = model.layers * hidden + layer if compute.recompute else model.layers * layer
        head = min(vocabulary_size, 4096) * 4  # logits exist in pieces
        return sequences * int(length * (values * size + 4 * hidden * size + head))
    layer = ((7 + 3 * kv) * hidden + 3 * inner) * size + 4 * (model.heads + 2)
    in_flight = 0.0
    if not compute.compile:
        layer += inner * size + 2 * (8 - size) * hidden
        in_flight = 5 * inner * size
    saved = model.layers * layer
    if compute.recompute:
        saved = model.layers * hidden * size
        in_flight = layer + (in_flight or 0.3 * layer)
    weights = 10 * vocabulary_size * hidden + (matrix_count(model) * size if size == 2 else 0)
    logits = pieces_bytes(tokens, vocabulary_size, size, compiled=compute.compile)
    return math.ceil(tokens * (saved + 2 * hidden * size) + weights + max(tokens * in_flight, logits))


def memory_bytes(device: torch.device) -> int:
    """Return all memory of a device or of this machine, free or not, so that the same machine decides alike."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def drawn(config: TrainConfig, vocabulary_size: int, seed: int) -> Llama:
    """Draw a fresh model of a configuration, on the CPU."""
    compute = config.compute
    dtype = DTYPES[compute.precision]
    return Llama(config.model, vocabulary_size, seed=seed, compute_dtype=dtype, recompute=compute.recompute)
