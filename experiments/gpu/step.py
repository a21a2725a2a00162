"""How fast training and outer step of paper_150m are, beside a matrix product, transformers and torch.

    python experiments/gpu/step.py --out runs/gpu           seven minutes on one GPU

* `step.json`: `rho`, our floating-point operations a second (causal counting) over those of a bf16 matrix product of
  random numbers; `eager_ratio` and `compiled_ratio`, our tokens a second over transformers' LlamaForCausalLM with
  autocast, SDPA and fused AdamW; peak memories. Each takes turns with the product, whatever the GPU's clock does;
* `outer.json`: an ordinary outer step of `OuterSGD` over one of `torch.optim.SGD(fused=True)`, `time_ratio`, and one
  that also takes norms and cosine, `measured_ratio`;
* `step-attention.csv`: attention kernels at the model's shape, each by itself;
* `step-kernels.csv`: the twenty kernels of a step that take most;
* `step-sum.csv`: the step's kernels by class, and a named remainder, against the measured step.
"""

from __future__ import annotations

import importlib.util
import re
import statistics
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own custom
from torch import Tensor
from torch.autograd import DeviceType  # pyright: ignore[reportPrivateImportUsage]
from torch.profiler import ProfilerActivity, profile

from machine import Call, arguments, config_of, save_figures, save_rows, seconds_of, wait_for
from twophase.tasks.lm.config import TrainConfig, flops_per_token
from twophase.tasks.lm.step import DTYPES, Step, attention_kernel, drawn

sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from outer_step import seconds_of_steps

PRODUCT_SIZE = {"cuda": 8192, "cpu": 256}
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
ANNOTATIONS = re.compile(r"^(## |Optimizer\.|ProfilerStep|autograd::|Torch-Compiled)")
"""Names of stretches, not of kernels, which would count their kernels twice."""
TOP = 20


def batch(config: TrainConfig) -> tuple[Tensor, Tensor]:
    """Return random tokens and targets of one step."""
    shape = config.data.batch_size, config.data.sequence_length + 1
    windows = torch.randint(config.model.vocabulary_size, shape, generator=torch.Generator().manual_seed(0))
    return windows[:, :-1].contiguous().to(config.device), windows[:, 1:].contiguous().to(config.device)


def ours(config: TrainConfig, facts: dict[str, Any]) -> Call:
    """Return our step, as `twophase train` takes it."""
    vocabulary, device = config.model.vocabulary_size, torch.device(config.device)
    step, model = Step(config, vocabulary, device), drawn(config, vocabulary, config.seed).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    pair = batch(config)

    def call() -> None:
        step.gradients(model, pair)
        optimizer.step()
        optimizer.zero_grad()
        facts["micro_batch"] = step.chosen["micro_batch"]

    return call


def theirs(config: TrainConfig, facts: dict[str, Any], *, compiled: bool) -> Call:
    """Return the step of transformers' Llama, loss included, in smaller pieces where it runs out of memory."""
    import transformers  # noqa: PLC0415 - the rest runs without it

    llama = drawn(config, config.model.vocabulary_size, config.seed)
    options = llama.hf_config(config.data.sequence_length) | {"attn_implementation": "sdpa", "use_cache": False}
    made: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**options))
    model = made.to(config.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    dtype, (tokens, targets) = DTYPES[config.compute.precision], batch(config)
    facts["micro_batch"] = len(tokens)

    def loss(inputs: Tensor, wanted: Tensor) -> Tensor:
        return F.cross_entropy(model(input_ids=inputs).logits.float().flatten(0, 1), wanted.flatten())

    # The loss inside: left outside, its passes over float32 logits would be eager, which no user of it would accept.
    chosen = torch.compile(loss, dynamic=False) if compiled else loss

    def attempt(micro: int) -> bool:
        try:
            for inputs, wanted in zip(tokens.split(micro), targets.split(micro), strict=True):
                with torch.autocast(tokens.device.type, dtype) if dtype else nullcontext():
                    value = chosen(inputs, wanted)
                (value * (micro / len(tokens))).backward()
            optimizer.step()
        except torch.OutOfMemoryError:
            if micro == 1:
                raise
            return False
        return True

    def call() -> None:
        while not attempt(facts["micro_batch"]):
            facts["micro_batch"] //= 2
            optimizer.zero_grad()
            torch.cuda.empty_cache()
        optimizer.zero_grad()

    return call


def contest(config: TrainConfig, call: Call, turns: int, seconds: float) -> tuple[float, float, float]:
    """Return seconds of a step, its speed over the product's as a median over turns, and the product's TFLOP/s."""
    device = torch.device(config.device)
    size, dtype = PRODUCT_SIZE[device.type], DTYPES[config.compute.precision] or torch.float32
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    flops = flops_per_token(config.model, config.model.vocabulary_size, config.data.sequence_length)
    work, steps, products = config.step_tokens * flops / (2 * size**3), list[float](), list[float]()
    for _ in range(turns):
        products.append(seconds_of(lambda: torch.mm(a, b, out=out), seconds, device))
        steps.append(seconds_of(call, seconds, device))
    rho = statistics.median(work * product / step for product, step in zip(products, steps, strict=True))
    return statistics.median(steps), rho, 2e-12 * size**3 / statistics.median(products)


def attentions(config: TrainConfig, seconds: float) -> list[dict[str, Any]]:
    """Return a row an attention kernel, forward and backward at the model's shape, or the reason why it does not work.

    TFLOP/s are causal, the backward pass 2.5 times the forward; `step_ms` is for a step of the whole batch.
    """
    model, length, count, device = config.model, config.data.sequence_length, 16, torch.device(config.device)
    size, dtype = model.hidden_size // model.heads, DTYPES[config.compute.precision] or torch.float32
    # As in the model: heads behind the length.
    q, k, v = (
        torch.randn(count, length, model.heads, size, device=device, dtype=dtype).transpose(1, 2).requires_grad_()
        for _ in range(3)
    )
    gradient, rows = torch.randn_like(q), list[dict[str, Any]]()

    def both() -> None:
        torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, is_causal=True), (q, k, v), gradient)

    for name in ("cudnn", "flash", "efficient"):
        try:
            with attention_kernel(name):
                taken = seconds_of(both, seconds, device)
        except RuntimeError as error:  # not built, not for this GPU, shape or type
            rows.append({"kernel": name, "reason": str(error).splitlines()[0][:200]})
            continue
        rate = 3.5 * 2 * count * model.heads * length**2 * size / taken
        step_ms = 1e3 * taken * model.layers * config.data.batch_size / count
        rows.append({"kernel": name, "both_ms": 1e3 * taken, "tflops": rate / 1e12, "step_ms": step_ms})
    return rows


def profiled(call: Call, device: torch.device, steps: int = 3) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Return the kernels of a call that take most, a row each, and milliseconds a call by class."""
    cuda = device.type == "cuda"
    wait_for(device)
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as profiler:
        for _ in range(steps):
            call()
        wait_for(device)
    rows, classes = list[dict[str, Any]](), dict.fromkeys([*(kind for kind, _ in CLASSES), "other"], 0.0)
    for kernel in profiler.key_averages():
        if (kernel.device_type == DeviceType.CPU) == cuda or ANNOTATIONS.match(kernel.key):
            continue
        total = kernel.self_device_time_total if cuda else kernel.self_cpu_time_total
        kind = next((kind for kind, pattern in CLASSES if re.search(pattern, kernel.key.lower())), "other")
        classes[kind] += 1e-3 * total / steps
        calls = kernel.count / steps
        rows.append({"ms": 1e-3 * total / steps, "class": kind, "calls": calls, "kernel": kernel.key[:160]})
    return sorted(rows, key=lambda row: -row["ms"])[:TOP], classes


def closing_sum(step_ms: float, classes: dict[str, float]) -> list[dict[str, Any]]:
    """Return milliseconds and shares of a measured step: kernels by class, their sum, a named remainder, the step."""
    kernels = sum(classes.values())
    parts = classes | {"sum of kernels": kernels, "remainder: no kernel runs": step_ms - kernels, "step": step_ms}
    return [{"part": name, "ms": ms, "share": ms / step_ms} for name, ms in parts.items()]


def outer_steps(config: TrainConfig) -> dict[str, float]:
    """Return the ratios of `outer.json`."""
    device = torch.device(config.device)
    params = list(drawn(config, config.model.vocabulary_size, 0).to(device).parameters())
    taken = seconds_of_steps(params, nesterov=True, rounds=30, clock=lambda: wait_for(device))
    ratios = {f"{name}_ratio": taken[name] / taken["fused"] for name in ("time", "measured")}
    return ratios | {"parameters": sum(p.numel() for p in params), "fused_ms": 1e3 * taken["fused"]}


def main(words: Sequence[str] | None = None) -> int:
    """Measure, and write the files."""
    options = arguments(__doc__ or "", words)
    config = config_of(options)
    device = torch.device(config.device)
    turns, seconds = (1, 0.02) if options.tiny else (8, 2.0)
    save_rows(options, "step-attention", attentions(config, seconds / 4))
    figures, rhos = dict[str, Any](), dict[str, float]()
    kinds = ["ours", "eager", "compiled"] if importlib.util.find_spec("transformers") else ["ours"]
    for kind in kinds[:2] if options.tiny else kinds:
        torch.cuda.empty_cache()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        facts = dict[str, Any]()
        call = ours(config, facts) if kind == "ours" else theirs(config, facts, compiled=kind == "compiled")
        taken, rhos[kind], product = contest(config, call, turns, seconds)
        if device.type == "cuda":
            facts["peak_memory_gb"] = torch.cuda.max_memory_allocated(device) / 1e9
        facts |= {"tokens_per_second": config.step_tokens / taken, "product_tflops": product}
        figures[kind] = facts
        if kind == "ours":
            top, classes = profiled(call, device)
            save_rows(options, "step-kernels", top)
            save_rows(options, "step-sum", closing_sum(1e3 * taken, classes))
        del call
    ratios = {f"{kind}_ratio": rhos["ours"] / rho for kind, rho in rhos.items() if kind != "ours"}
    save_figures(options, "step", {"rho": rhos["ours"]} | ratios | figures)
    save_figures(options, "outer", outer_steps(config))
    return 0


if __name__ == "__main__":
    sys.exit(main())
