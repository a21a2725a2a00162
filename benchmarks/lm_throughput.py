"""A training step of our Llama against the device's matrix product and against transformers' Llama: one run, medians.

Interleaved in one process: a bf16 matrix product of random numbers (8192 cubed on a GPU; zeros would run faster than
any real product), our step as `twophase train` takes it (mixed precision, compiled, attention chosen by timing), and
transformers' LlamaForCausalLM eager and compiled at the same shape, from the same weights, with SDPA, autocast and
fused AdamW, in smaller pieces where it runs out of memory. A step is forward, backward, AdamW, zero_grad of a replica.

    rho            = our floating-point operations a second (causal counting) / those of the matrix product
    eager_ratio    = our tokens a second / transformers'
    compiled_ratio = our tokens a second / compiled transformers'

On a machine without a GPU it runs at a small shape, to show that it runs. Last line: one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own custom
import transformers
from torch import Tensor

from twophase.lm.config import DataConfig, ModelConfig, TrainConfig
from twophase.lm.speed import flops_per_token
from twophase.lm.step import DTYPES, Step, divisors, model_of
from twophase.recipes.pretraining import RECIPES

PEAK = {"H100": 989e12, "H200": 989e12, "A100": 312e12}
"""Dense bf16 operations a second by datasheet, the usual denominator of MFU."""


def matrix_product(device: torch.device, size: int, dtype: torch.dtype) -> Callable[[], None]:
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)

    def product() -> None:
        torch.mm(a, b, out=out)

    return product


def our_step(config: TrainConfig, device: torch.device, tokens: Tensor, targets: Tensor) -> Callable[[], None]:
    vocabulary = config.model.vocabulary_size
    compute = Step(config, vocabulary, device, 1)
    model = model_of(config, vocabulary, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        compute.gradients(model, tokens, targets)
        optimizer.step()
        optimizer.zero_grad()

    step()
    print(f"ours: {compute.chosen}")
    return step


def their_step(
    config: TrainConfig, device: torch.device, tokens: Tensor, targets: Tensor, *, compiled: bool
) -> Callable[[], None]:
    ours = model_of(config, config.model.vocabulary_size, torch.device("cpu"))
    options = ours.hf_config(config.data.sequence_length) | {"attn_implementation": "sdpa", "use_cache": False}
    with torch.device(device):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**options))
    model.load_state_dict(ours.to_hf(), strict=not config.model.tie_embeddings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    dtype = DTYPES[config.compute.precision]
    call = torch.compile(model, dynamic=False) if compiled else model

    def one(micro: int) -> None:
        for inputs, wanted in zip(tokens.split(micro), targets.split(micro), strict=True):
            with torch.autocast(device.type, dtype) if dtype else nullcontext():
                logits = call(input_ids=inputs).logits
            loss = F.cross_entropy(logits.float().flatten(0, 1), wanted.flatten()) * (micro / len(tokens))
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for micro in reversed(divisors(len(tokens))):
        try:
            one(micro)
        except torch.OutOfMemoryError:
            pass
        else:
            print(f"transformers{' compiled' if compiled else ''}: {micro} sequences at a time")
            return lambda: one(micro)
        optimizer.zero_grad()
        torch.cuda.empty_cache()
    raise SystemExit("transformers' step does not fit at one sequence")


def interleaved(functions: dict[str, tuple[Callable[[], None], int]], seconds: float) -> dict[str, float]:
    """Median seconds of one call each, called in turn in short bursts, so that clocks and heat strike all alike."""
    cuda = torch.cuda.is_available()
    clock = time.perf_counter if cuda else time.process_time  # on a CPU, less what other programs take
    times: dict[str, list[float]] = {name: [] for name in functions}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or min(map(len, times.values())) < 3:
        for name, (function, repeats) in functions.items():
            function()  # the caches and clocks of the one before are not ours
            if cuda:
                torch.cuda.synchronize()
            begin = clock()
            for _ in range(repeats):
                function()
            if cuda:
                torch.cuda.synchronize()
            times[name].append((clock() - begin) / repeats)
    return {name: statistics.median(values) for name, values in times.items()}


def cpu_config() -> TrainConfig:
    config = RECIPES["nano"]()
    model = ModelConfig(layers=2, hidden_size=128, intermediate_size=344, heads=2, vocabulary_size=2048)
    data = DataConfig(sequence_length=128, batch_size=4)
    compute = replace(config.compute, precision="float32")
    return replace(config, model=model, data=data, compute=compute, device="cpu")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default="paper_150m", choices=list(RECIPES), help="shape on a GPU (paper_150m)")
    parser.add_argument("--seconds", type=float, help="time to measure for (60 on a GPU, 10 without)")
    parser.add_argument("--micro-batch", type=int, default=0, help="sequences at a time for ours (0: what fits)")
    parser.add_argument("--no-compile", action="store_true", help="leave our step uncompiled")
    parser.add_argument("--only-ours", action="store_true", help="leave transformers out")
    options = parser.parse_args()
    cuda = torch.cuda.is_available()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    device = torch.device("cuda" if cuda else "cpu")
    config = RECIPES[options.recipe]() if cuda else cpu_config()
    compute = replace(config.compute, micro_batch=options.micro_batch, compile=not options.no_compile)
    config = replace(config, compute=compute)
    data, vocabulary = config.data, config.model.vocabulary_size
    windows = torch.randint(vocabulary, (data.batch_size, data.sequence_length + 1), device=device)
    tokens, targets = windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
    size, dtype = (8192, torch.bfloat16) if cuda else (512, torch.float32)
    name = torch.cuda.get_device_name() if cuda else "CPU, one thread"
    print(f"{name}; torch {torch.__version__}, transformers {transformers.__version__}; {config.compute.precision}")

    functions = {"product": (matrix_product(device, size, dtype), 30)}
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    functions["ours"] = (our_step(config, device, tokens, targets), 5)
    peak_bytes = torch.cuda.max_memory_allocated() if cuda else 0
    if not options.only_ours:
        warnings.filterwarnings("ignore", module="transformers")
        for kind, compiled in (("eager", False), ("compiled", True)):
            functions[kind] = (their_step(config, device, tokens, targets, compiled=compiled), 2)
    seconds = interleaved(functions, options.seconds or (60.0 if cuda else 10.0))

    flops = flops_per_token(config.model, vocabulary, data.sequence_length)
    product = 2 * size**3 / seconds.pop("product")
    print(f"{size}^3 {dtype} product: {product / 1e12:.3f} TFLOP/s")
    rates = {kind: tokens.numel() / value for kind, value in seconds.items()}
    for kind, rate in rates.items():
        done = rate * flops.causal
        print(f"{kind:9} {rate:12,.0f} tok/s {done / 1e12:9.3f} TFLOP/s causal, {done / product:6.1%} of the product")
    figures = {"rho": rates["ours"] * flops.causal / product}
    figures |= {f"{kind}_ratio": rates["ours"] / rate for kind, rate in rates.items() if kind != "ours"}
    figures["tokens_per_second"] = rates["ours"]
    peak = next((value for chip, value in PEAK.items() if chip in name), None)
    if peak:
        figures["mfu_palm"] = rates["ours"] * flops.palm / peak
    if cuda:
        figures["peak_memory_gb"] = peak_bytes / 1e9
    print(json.dumps({key: round(value, 4) for key, value in figures.items()}))


if __name__ == "__main__":
    main()
