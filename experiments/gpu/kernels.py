"""How fast the device is, how fast the kernels of a step of paper_150m are on it, and where the step's time goes.

    python experiments/gpu/kernels.py --out runs/gpu           two minutes on one GPU

* `kernels-products.csv`, `kernels-attention.csv`: products and attention kernels at the model's shapes, each by itself;
* `kernels-top.csv`: the twenty kernels of a step that take most;
* `kernels-sum.csv`: the step's kernels by class, and a named remainder, against the measured step;
* `kernels.json`: a matrix product and a copy at full speed.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own custom
from torch import Tensor
from torch.autograd import DeviceType
from torch.nn import attention
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from machine import arguments, paper_150m, save_figures, save_rows
from twophase.base.config import RunError
from twophase.tasks.lm.config import TrainConfig
from twophase.tasks.lm.step import DTYPES, drawn

from lm_throughput import PRODUCT_SIZE, Call, burst, product, twophase_step, wait_for  # isort: skip - machine names its folder

CLASSES = (
    # Inductor names an elementwise kernel after all operations near it, attention and products included; only its
    # templates are products.
    ("matrix products", r"^triton_tem_|^triton_mm"),
    ("elementwise", r"^triton_"),
    ("attention", r"flash|fmha|attention|sdpa"),
    ("optimizer", r"multi_tensor_apply|fusedadam|fused_adam|_foreach"),
    ("matrix products", r"gemm|nvjet|cutlass|xmma|cublas|splitk|::(add)?mm|::bmm|mkldnn|matmul"),
    ("elementwise", r"elementwise|reduce|softmax|layer_norm|index|embedding|catarray|aten::"),
)
"""The first pattern that a kernel's lower-case name contains decides; the rest is `other` (copies, fills)."""
ATTENTION = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
LATER_FLASH = {"flash3": "FA3", "flash4": "FA4"}
"""Later generations of flash attention, from packages of their own, by torch's names for them."""
ANNOTATIONS = re.compile(r"^(## |Optimizer\.|ProfilerStep|autograd::|Torch-Compiled)")
"""Names of stretches, not of kernels, which would count their kernels twice."""
TOP = 20
HEAD_ROWS = 16384
"""Rows of the head's product: logits of a whole batch take gigabytes."""


def seconds_of(call: Call, seconds: float, device: torch.device) -> float:
    """Seconds of one call at full speed, repeated for some seconds after two that do not count."""
    call()
    call()
    return burst(call, seconds, 1, device)[0]


def copying(device: torch.device, seconds: float) -> float:
    """Bytes a second of copying on the device, read and written."""
    count = 1 << (28 if device.type == "cuda" else 22)  # float32: a gibibyte is far beyond every cache
    source, target = torch.randn(count, device=device), torch.empty(count, device=device)
    return 8 * count / seconds_of(lambda: target.copy_(source), seconds, device)


def products(config: TrainConfig, device: torch.device, rows: int, seconds: float) -> list[dict[str, Any]]:
    """Time the products of a block and of the head: forward, gradient of the input, gradient of the weight.

    Args:
        config: the model.
        device: where.
        rows: tokens that a product takes at a time.
        seconds: for each.

    Returns:
        A row a product: `ms`, `tflops`, and `step_ms`, what all of that kind take in a step of the whole batch.
    """
    model, dtype = config.model, DTYPES[config.compute.precision] or torch.float32
    size, inner, kv_heads = model.hidden_size, model.intermediate_size, model.kv_heads or model.heads
    kv_size = kv_heads * size // model.heads
    shapes = {
        "query_key_value": (size, size + 2 * kv_size, model.layers),
        "output": (size, size, model.layers),
        "gate_up": (size, 2 * inner, model.layers),
        "gate or up alone": (size, inner, 0),  # to compare: two of them make one gate_up
        "down": (inner, size, model.layers),
        "head": (size, model.vocabulary_size, 1),
    }
    lines: list[dict[str, Any]] = []
    for name, (width, outputs, count) in shapes.items():
        m = min(rows, HEAD_ROWS) if name == "head" else rows
        x, g, w = (
            torch.randn(*shape, device=device, dtype=dtype) for shape in ((m, width), (m, outputs), (outputs, width))
        )
        for kind, (first, second) in {"forward": (x, w.t()), "input": (g, w), "weight": (g.t(), x)}.items():
            taken = _product_seconds(first, second, seconds, device)
            line = {"product": name, "kind": kind, "rows": m, "in": width, "out": outputs, "ms": 1e3 * taken}
            step = 1e3 * taken * count * config.step_tokens / m
            lines.append(line | {"tflops": 2e-12 * m * width * outputs / taken, "step_ms": step})
        del x, g, w
    return lines


def _product_seconds(first: Tensor, second: Tensor, seconds: float, device: torch.device) -> float:
    out = first.new_empty(first.shape[0], second.shape[1])
    return seconds_of(lambda: torch.mm(first, second, out=out), seconds, device)


def attentions(config: TrainConfig, device: torch.device, batch: int, seconds: float) -> list[dict[str, Any]]:
    """Time each attention kernel forward, and forward and backward, at the model's shape.

    Returns:
        A row a kernel: milliseconds, TFLOP/s (causal, the backward pass 2.5 times the forward), `step_ms` for a step of
        the whole batch; one that does not work here has its reason.
    """
    model, length = config.model, config.data.sequence_length
    heads, kv_heads, size = model.heads, model.kv_heads or model.heads, model.hidden_size // model.heads
    dtype = DTYPES[config.compute.precision] or torch.float32
    # As in the model: heads behind the length.
    q, k, v = (
        torch.randn(batch, length, count, size, device=device, dtype=dtype).transpose(1, 2).requires_grad_()
        for count in (heads, kv_heads, kv_heads)
    )
    gradient = torch.randn_like(q)

    def forward() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != kv_heads)

    lines: list[dict[str, Any]] = []
    for name in (*ATTENTION, *LATER_FLASH):
        line: dict[str, Any] = {"kernel": name}
        lines.append(line)
        if name == "math" and device.type == "cuda":
            continue  # it holds length x length scores and is never the fastest
        try:
            with _kernel(name):
                once = seconds_of(forward, seconds, device)
                both = seconds_of(lambda: torch.autograd.grad(forward(), (q, k, v), gradient), seconds, device)
        except Exception as error:  # not built, not for this GPU, shape or type, out of memory, or a compiler's
            line["reason"] = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
            continue
        operations = 3.5 * 2 * batch * heads * length**2 * size
        line |= {"forward_ms": 1e3 * once, "both_ms": 1e3 * both, "tflops": 1e-12 * operations / both}
        line["step_ms"] = 1e3 * both * model.layers * config.data.batch_size / batch
    return lines


@contextmanager
def _kernel(name: str) -> Iterator[None]:
    """Attention by one kernel."""
    if name in ATTENTION:
        with sdpa_kernel(ATTENTION[name]):
            yield
        return
    if not hasattr(attention, "activate_flash_attention_impl"):
        raise RuntimeError("this torch has no torch.nn.attention.activate_flash_attention_impl")
    attention.activate_flash_attention_impl(LATER_FLASH[name])
    try:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            yield
    finally:
        attention.restore_flash_attention_impl()


def optimizer_seconds(config: TrainConfig, device: torch.device, seconds: float) -> float:
    """Seconds of AdamW's step on the model's parameters."""
    model = drawn(config, config.model.vocabulary_size, config.seed).to(device)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    return seconds_of(torch.optim.AdamW(model.parameters(), fused=True).step, seconds, device)


def class_of(kernel: str) -> str:
    """The class of a kernel, by its name."""
    name = kernel.lower()
    return next((kind for kind, pattern in CLASSES if re.search(pattern, name)), "other")


def profiled(call: Call, device: torch.device, steps: int) -> tuple[list[dict[str, Any]], dict[str, float], float]:
    """Where a call's time goes on the device.

    Args:
        call: launches the work.
        device: where it runs.
        steps: how often to call it under the profiler.

    Returns:
        The kernels that take most, a row each; milliseconds a call by class; milliseconds a call under the profiler.
    """
    cuda = device.type == "cuda"
    wait_for(device)
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as profiler:
        begin = wait_for(device)
        for _ in range(steps):
            call()
        milliseconds = 1e3 * (wait_for(device) - begin) / steps
    lines: list[dict[str, Any]] = []
    classes = dict.fromkeys([*(kind for kind, _ in CLASSES), "other"], 0.0)
    for kernel in profiler.key_averages():
        if (kernel.device_type == DeviceType.CPU) == cuda or ANNOTATIONS.match(kernel.key):
            continue
        total = kernel.self_device_time_total if cuda else kernel.self_cpu_time_total
        kind = class_of(kernel.key)
        line = {"ms": 1e-3 * total / steps, "class": kind, "calls": kernel.count / steps, "kernel": kernel.key[:160]}
        classes[kind] += line["ms"]
        lines.append(line)
    if not lines:
        raise RunError(
            "the profiler shows no kernels; this machine does not let programs trace its GPU, which its administrator "
            "can allow (or a container's privileges)"
        )
    return sorted(lines, key=lambda line: -line["ms"])[:TOP], classes, milliseconds


def closing_sum(step_ms: float, classes: dict[str, float], alone: dict[str, float]) -> list[dict[str, Any]]:
    """The sum that closes: kernels by class and a named remainder, against the measured step.

    Args:
        step_ms: milliseconds of a step, measured without a profiler.
        classes: milliseconds a step by class.
        alone: what the kernels of a class take for a step where each was timed by itself, if it was.

    Returns:
        A row a class, the kernels' sum, the remainder and the step.
    """
    kernels = sum(classes.values())
    parts = classes | {"sum of kernels": kernels, "remainder: no kernel runs": step_ms - kernels, "step": step_ms}
    return [{"part": name, "ms": ms, "share": ms / step_ms, "alone_ms": alone.get(name)} for name, ms in parts.items()]


def main(words: Sequence[str] | None = None) -> int:
    """Measure, and write the files."""
    options = arguments(__doc__ or "", words)
    config = paper_150m(options)
    device = torch.device(config.device)
    step_seconds, long, short = (0.05, 0.02, 0.005) if options.tiny else (5.0, 1.5, 0.2)
    batch = min(config.data.batch_size, 32)
    rate = 2 * PRODUCT_SIZE[device.type] ** 3 / seconds_of(product(config, device, {}), long, device)
    figures = {"product_tflops": rate / 1e12, "copy_gb_per_second": copying(device, long) / 1e9}
    lines = products(config, device, batch * config.data.sequence_length, short)
    save_rows(options, "kernels-products", lines)
    alone: dict[str, float] = {"matrix products": sum(line["step_ms"] for line in lines)}
    lines = attentions(config, device, batch, short)
    save_rows(options, "kernels-attention", lines)
    alone["attention"] = min(line["step_ms"] for line in lines if "step_ms" in line)
    alone["optimizer"] = 1e3 * optimizer_seconds(config, device, short)
    facts: dict[str, Any] = {}
    call = twophase_step(config, device, facts)
    step_ms = 1e3 * seconds_of(call, step_seconds, device)
    top, classes, profiled_ms = profiled(call, device, 3)
    save_rows(options, "kernels-top", top)
    save_rows(options, "kernels-sum", closing_sum(step_ms, classes, alone))
    save_figures(options, "kernels", figures | {"step_ms": step_ms, "profiled_step_ms": profiled_ms, **facts})
    return 0


if __name__ == "__main__":
    sys.exit(main())
