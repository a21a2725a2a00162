"""How a process computes losses and gradients of the language model: pieces of the batch, compiled code, kernels."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from twophase.diloco.group import SingleProcess
from twophase.tasks.lm.config import TrainConfig, flops_per_token
from twophase.tasks.lm.model import Llama

DTYPES = {"float32": None, "bf16-mixed": torch.bfloat16}
_REPEATABLE = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
KERNELS = {
    "auto": [SDPBackend.CUDNN_ATTENTION, *_REPEATABLE],
    "deterministic": _REPEATABLE,  # whose backward pass can be told to add in a fixed order
    "cudnn": [SDPBackend.CUDNN_ATTENTION],
    "flash": [SDPBackend.FLASH_ATTENTION],
    "efficient": [SDPBackend.EFFICIENT_ATTENTION],
    "math": [SDPBackend.MATH],
}
"""Attention kernels of a GPU by name; torch takes the first that is built there and fits shape and type."""
_log = logging.getLogger("twophase")


def attention_kernel(name: str) -> AbstractContextManager[Any]:
    """Restrict attention to the kernels of a name; `default` leaves the choice to torch, as on a CPU."""
    return sdpa_kernel(KERNELS[name], set_priority=True) if name in KERNELS else nullcontext()


class Step:
    """Forward and backward of a batch on a device, for any model of one configuration and vocabulary.

    One object serves all replicas of a process; the ranks of a group take pieces of the same size.
    """

    def __init__(
        self,
        config: TrainConfig,
        vocabulary_size: int,
        device: torch.device,
        group: SingleProcess | None = None,
        evaluate: Callable[[Any], Mapping[str, float]] = lambda _: {},
    ) -> None:
        self.config, self.device, self.group, self.evaluate = config, device, group or SingleProcess(), evaluate
        self.tokens = config.step_tokens
        self.loss_bound = 3 * math.log(vocabulary_size)
        self.flops = flops_per_token(config.model, vocabulary_size, config.data.sequence_length)
        self.chosen: dict[str, Any] = {}
        """`micro_batch`, from the first step on: it changes the last bits, so a resumed run takes it over."""
        is_auto = config.compute.attention == "auto"
        kernel = "deterministic" if is_auto and config.deterministic else config.compute.attention
        self.attention = kernel if device.type == "cuda" else "default"
        self._loss = compiled_loss(autotune=config.compute.autotune) if config.compute.compile else loss

    def gradients(self, model: Llama, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Add the gradient of the mean loss to `.grad`, piece by piece, without waiting for the device.

        A GPU that runs out of memory halves the pieces, for good, unless their size was given. The first call is a
        collective one: then all ranks take the smallest size that one of them has found. Later, when optimizer states
        exist too, like ranks run out of memory at the same batch.

        The model's gradients are None before; tokens and targets are (batch, length) int64 on the device, and so is
        the mean loss in nats a token, a scalar.
        """
        given = self.config.compute.micro_batch
        is_first = "micro_batch" not in self.chosen
        micro = self.chosen.setdefault("micro_batch", given or len(batch[0]))
        while True:
            try:
                value = self._pass(model, *batch, micro)
                break
            except torch.OutOfMemoryError:
                if given or micro == 1:
                    raise
            # Outside the handler: the exception holds on to everything that the pass had allocated.
            model.zero_grad()
            torch.cuda.empty_cache()
            smaller = next(size for size in range(micro // 2, 0, -1) if len(batch[0]) % size == 0)
            _log.warning("compute.micro_batch: %d sequences do not fit, going on with %d", micro, smaller)
            micro = self.chosen["micro_batch"] = smaller
        if is_first and not given and (smallest := min(self.group.gather_json(micro))) < micro:
            self.chosen["micro_batch"] = smallest
            model.zero_grad()
            value = self._pass(model, *batch, smallest)
        return value

    def _pass(self, model: Llama, tokens: Tensor, targets: Tensor, micro: int) -> Tensor:
        # Around the backward pass, too: what is recomputed there must meet the same kernel.
        with attention_kernel(self.attention):
            if micro == len(tokens):  # no scale, no sum: a whole batch has exactly its own loss
                value = self._loss(model, tokens, targets, self.attention)
                value.backward()
                return value.detach()
            total = torch.zeros((), device=self.device)
            for inputs, labels in zip(tokens.split(micro), targets.split(micro), strict=True):
                value = self._loss(model, inputs, labels, self.attention) * (micro / len(tokens))
                value.backward()
                total += value.detach()
            return total

    def rates(self, batches: int, seconds: float) -> dict[str, float]:
        """Compute tokens and floating-point operations a second."""
        rate = batches * self.tokens / seconds if seconds > 0 else 0.0
        return {"tokens_per_second": rate, "flops_per_second": rate * self.flops}


def loss(model: Llama, tokens: Tensor, targets: Tensor, attention: str) -> Tensor:
    """Compute the loss of a model: a function of the model, so that compiled code belongs to no single one.

    The attention kernel is chosen inside, because compiled code and its caches do not see a choice made outside. Code
    compiled for one kernel would then be taken for another, even by a later process.
    """
    with attention_kernel(attention):
        return model.loss(tokens, targets)


@cache
def compiled_loss(*, autotune: bool = False) -> Callable[[Llama, Tensor, Tensor, str], Tensor]:
    """Compile `loss` for exact shapes, which is markedly faster than for variable ones; once a process."""
    options: dict[str, Any] = {"dynamic": False, "fullgraph": True}
    if "recompile_limit" in inspect.signature(torch.compile).parameters:  # not in older versions
        options["recompile_limit"] = 256  # a sweep may bring many shapes, one after the other
    if autotune:
        options["mode"] = "max-autotune-no-cudagraphs"
    return torch.compile(loss, **options)


def drawn(config: TrainConfig, vocabulary_size: int, seed: int) -> Llama:
    """Draw a fresh model of a configuration, on the CPU."""
    dtype, recompute = DTYPES[config.compute.precision], config.compute.recompute
    return Llama(config.model, vocabulary_size, seed=seed, compute_dtype=dtype, recompute=recompute)
