"""Which attention kernel a GPU uses, and that all processes of a run use the same one."""

from __future__ import annotations

import logging
import statistics
import time
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own custom
from torch.nn import attention
from torch.nn.attention import SDPBackend, sdpa_kernel

from twophase.base.config import UsageError
from twophase.diloco.group import SingleProcess
from twophase.tasks.lm.config import ModelConfig, TrainConfig

_log = logging.getLogger("twophase")
DTYPES = {"float32": None, "bf16-mixed": torch.bfloat16}
BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash3": SDPBackend.FLASH_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
"""By name, in the order in which they are tried."""
_REPEATABLE = ("flash", "efficient", "math")
"""Kernels whose backward pass can be told to add in a fixed order, the faster first."""


def attention_kernel(name: str) -> AbstractContextManager[Any]:
    """Restrict attention to the kernel of that name; any other name, such as `default`, leaves the choice to torch."""
    return sdpa_kernel(BACKENDS[name]) if name in BACKENDS else nullcontext()


def activate(name: str) -> None:
    """Let torch's flash attention be that of FlashAttention 3 for `flash3`, and torch's own for any other name.

    A switch of the whole process, which compiled code cannot make: call this before the code runs.
    """
    current = getattr(attention, "current_flash_attention_impl", lambda: None)()  # not in older versions
    implementation = "FA3" if name == "flash3" else None
    if implementation == current:
        return
    if implementation is None:
        attention.restore_flash_attention_impl()
        return
    try:
        attention.activate_flash_attention_impl(implementation)
    except (AttributeError, ImportError, RuntimeError, ValueError) as error:
        raise UsageError(
            f"--compute.attention {name}: FlashAttention 3 cannot be used here ({error}). It needs a torch with "
            "torch.nn.attention.activate_flash_attention_impl and the package flash_attn_interface; or use "
            "--compute.attention auto"
        ) from error


def choose(config: TrainConfig, shape: torch.Size, device: torch.device, communicator: SingleProcess) -> str:
    """Return the attention kernel that every process of the run uses from now on; a collective call.

    Process 0 chooses for all: kernels round differently, and processes that time for themselves may differ.

    The shape is (sequences, length) of a forward pass in this process.

    Returns:
        A name of `BACKENDS`, or `default` where torch shall choose.
    """
    setting, model, precision = config.compute.attention, config.model, config.compute.precision
    names = tuple(BACKENDS) if setting == "auto" else (setting,)
    if config.deterministic:
        names = tuple(name for name in _REPEATABLE if name in names)
    timed = not config.deterministic

    def fastest(names: tuple[str, ...], timed: bool) -> str:
        return fastest_attention(model, shape, precision, names, device, timed=timed)

    name = fastest(names, timed) if communicator.rank == 0 else ""
    if communicator.size > 1:
        name = communicator.gather_json(name)[0]
        works = communicator.rank == 0 or name == "default" or fastest((name,), timed=False) == name
        verdicts = communicator.gather_json(works)
        if not all(verdicts):
            raise UsageError(
                f"--compute.attention {setting}: process 0 chose {name}, which does not work in process "
                f"{verdicts.index(False)}. Start all processes on like GPUs with the same torch, or name a kernel "
                "that all have: --compute.attention efficient"
            )
    if name == "default" and setting != "auto":
        raise UsageError(
            f"--compute.attention {setting}: this kernel does not work here for {precision}, "
            f"heads of {model.hidden_size // model.heads}"
            f"{' and --deterministic' * config.deterministic}; use --compute.attention auto"
        )
    return name


@cache
def fastest_attention(
    model: ModelConfig, shape: torch.Size, precision: str, names: tuple[str, ...], device: torch.device, *, timed: bool
) -> str:
    """Return the attention kernel that takes least time forward and backward on a GPU, or `default` when none works.

    The shape is (sequences, length). Untimed, the first that works is taken: by time the next choice may differ.
    """
    seconds: dict[str, float] = {}
    heads, kv_heads, size = model.heads, model.kv_heads or model.heads, model.hidden_size // model.heads
    dtype = DTYPES[precision] or torch.float32
    # As in the model: one tensor from the product with query, key and value, heads behind the length.
    qkv = torch.randn(*shape, heads + 2 * kv_heads, size, device=device, dtype=dtype, requires_grad=True)
    gradient = torch.randn(*shape, heads, size, device=device, dtype=dtype).transpose(1, 2)

    def once(name: str) -> float:
        activate(name)
        with attention_kernel(name):
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
        except Exception as error:  # not built, not for this GPU, shape or type, out of memory, or a faulty kernel
            _log.debug("attention kernel %s: %s", name, error)
    return min(seconds, key=lambda name: seconds[name]) if seconds else "default"
