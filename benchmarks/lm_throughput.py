"""A training step of our Llama against the device's matrix product and against transformers' Llama: one run, medians.

* `product`: a bf16 matrix product of random numbers (8192 cubed on a GPU; zeros would run faster than any real one);
* `ours`: our step as `twophase train` takes it (mixed precision, compiled, the recipe's attention);
* `eager`, `compiled`: transformers' LlamaForCausalLM at the same shape, from the same weights, with SDPA, autocast and
  fused AdamW, in smaller pieces where it runs out of memory; compiled is model and loss in one call.

A step is forward, backward, AdamW and zero_grad of a replica. Each contestant has a process of its own, so that each
peak memory is its own. Bursts of at least a second (0.3 s on a CPU) are taken in turn, so that clocks and heat affect
all alike; after one a contestant gives back what it has cached, because two steps at full size do not fit on one GPU.

    rho            = our floating-point operations a second (causal counting) / those of the matrix product
    eager_ratio    = our tokens a second / transformers'
    compiled_ratio = our tokens a second / compiled transformers'

On a machine without a GPU it runs at a small shape, to show that it runs. Last line: one JSON object.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import multiprocessing
import resource
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own custom
from torch import Tensor

from bounds import finish
from twophase.errors import UsageError
from twophase.recipes.pretraining import RECIPES
from twophase.tasks.lm.config import DataConfig, ModelConfig, TrainConfig, flops_per_token
from twophase.tasks.lm.step import DTYPES, Step, drawn

PEAK = {"H100": 989e12, "H200": 989e12, "A100": 312e12}
"""Dense bf16 operations a second by datasheet, the usual denominator of MFU."""
PRODUCT_SIZE = {"cuda": 8192, "cpu": 512}
PRODUCT_TYPE = {"cuda": torch.bfloat16, "cpu": torch.float32}
BURST = {"cuda": 1.0, "cpu": 0.3}
"""Seconds of a burst at least."""
Call = Callable[[], object]
Facts = dict[str, Any]
"""What a contestant has chosen: sequences at a time, attention kernel. Filled in by its first step."""


@dataclass
class Outcome:
    """What was measured of a contestant.

    Args:
        seconds: of one call, in each burst.
        peak_bytes: memory: allocated on a GPU, else held by its process.
        facts: what it has chosen.
        error: why it gave up, empty if it did not.
    """

    seconds: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    facts: Facts = field(default_factory=dict)
    error: str = ""


# The contestants: each builds a function that does the work once.


def product(config: TrainConfig, device: torch.device, facts: Facts) -> Call:
    """Return a matrix product of random numbers."""
    del config, facts
    size, dtype = PRODUCT_SIZE[device.type], PRODUCT_TYPE[device.type]
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out)


def batch(config: TrainConfig, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return random tokens and targets of one step."""
    shape = config.data.batch_size, config.data.sequence_length + 1
    windows = torch.randint(config.model.vocabulary_size, shape, generator=torch.Generator().manual_seed(0))
    return windows[:, :-1].contiguous().to(device), windows[:, 1:].contiguous().to(device)


def twophase_step(config: TrainConfig, device: torch.device, facts: Facts) -> Call:
    """Return our step, as `twophase train` takes it."""
    vocabulary = config.model.vocabulary_size
    compute = Step(config, vocabulary, device)
    model = drawn(config, vocabulary, config.seed).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens, targets = batch(config, device)

    def call() -> None:
        compute.gradients(model, (tokens, targets))
        optimizer.step()
        optimizer.zero_grad()
        facts.update(compute.chosen)  # memory that runs out later makes the pieces smaller

    return call


def theirs(config: TrainConfig, device: torch.device, facts: Facts, *, compiled: bool = False) -> Call:
    """Return the step of transformers' Llama, loss included."""
    import transformers  # noqa: PLC0415 - the other contestants run without it

    warnings.filterwarnings("ignore", module="transformers")
    llama = drawn(config, config.model.vocabulary_size, config.seed)
    options = llama.hf_config(config.data.sequence_length) | {"attn_implementation": "sdpa", "use_cache": False}
    with torch.device(device):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**options))
    model.load_state_dict(llama.to_hf(), strict=not config.model.tie_embeddings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    dtype = DTYPES[config.compute.precision]
    tokens, targets = batch(config, device)

    def loss(inputs: Tensor, wanted: Tensor) -> Tensor:
        logits = model(input_ids=inputs).logits
        return F.cross_entropy(logits.float().flatten(0, 1), wanted.flatten())

    # The loss inside: left outside, its passes over float32 logits would be eager, which no user of it would accept.
    chosen = torch.compile(loss, dynamic=False) if compiled else loss
    facts.update(transformers=transformers.__version__, micro_batch=config.compute.micro_batch or len(tokens))

    def attempt(micro: int) -> None:
        for inputs, wanted in zip(tokens.split(micro), targets.split(micro), strict=True):
            with torch.autocast(device.type, dtype) if dtype else nullcontext():
                value = chosen(inputs, wanted)
            (value * (micro / len(tokens))).backward()
        optimizer.step()
        optimizer.zero_grad()

    def call() -> None:
        while True:
            try:
                return attempt(facts["micro_batch"])
            except torch.OutOfMemoryError:
                if facts["micro_batch"] == 1:
                    raise
            # Outside the handler: the exception holds on to everything that the step had allocated.
            sizes = range(facts["micro_batch"] // 2, 0, -1)
            facts["micro_batch"] = next(size for size in sizes if len(tokens) % size == 0)
            optimizer.zero_grad()
            torch.cuda.empty_cache()

    return call


def theirs_compiled(config: TrainConfig, device: torch.device, facts: Facts) -> Call:
    """Return the step of transformers' Llama, model and loss in one compiled call."""
    return theirs(config, device, facts, compiled=True)


KINDS: Mapping[str, Callable[[TrainConfig, torch.device, Facts], Call]] = {
    "product": product,
    "ours": twophase_step,
    "eager": theirs,
    "compiled": theirs_compiled,
}


def wait_for(device: torch.device) -> float:
    """Return seconds since some time, after all launched work; on a CPU, less what other programs take."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return time.perf_counter()
    return time.process_time()


def burst(call: Call, seconds: float, repeats: int, device: torch.device) -> tuple[float, int]:
    """Repeat a call for at least some seconds, `repeats` times at first.

    Returns:
        Seconds of one call, and the repeats that took `seconds`.
    """
    while True:
        begin = wait_for(device)
        for _ in range(repeats):
            call()
        elapsed = wait_for(device) - begin
        if elapsed >= seconds:
            return elapsed / repeats, repeats
        repeats = math.ceil(repeats * min(10.0, 1.1 * seconds / max(elapsed, 1e-9)))


def work(kind: str, config: TrainConfig, pipe: Connection) -> None:
    """Build a contestant, then run a burst for each number of seconds that arrives, and answer with an `Outcome`."""
    outcome = Outcome()
    repeats, device = 1, torch.device(config.device)
    try:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        call = KINDS[kind](config, device, outcome.facts)
        call()  # compiles, tunes, chooses
        while True:
            if device.type == "cuda":
                outcome.peak_bytes = torch.cuda.max_memory_allocated(device)
                torch.cuda.empty_cache()  # the others choose their pieces by what is free
            else:
                outcome.peak_bytes = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            pipe.send(outcome)
            seconds = pipe.recv()
            call()  # the memory and the clocks of the contestant before are not ours
            call()
            taken, repeats = burst(call, seconds, repeats, device)
            outcome.seconds.append(taken)
    except EOFError:  # all is measured
        return
    except Exception as error:  # whatever it is, the other contestants go on
        outcome.error = (str(error).strip().splitlines() or [type(error).__name__])[0]
        pipe.send(outcome)


def contest(config: TrainConfig, kinds: Sequence[str], seconds: float, length: float) -> dict[str, Outcome]:
    """Let contestants work in turn, in bursts of at least `length` seconds, for `seconds` and three times at least.

    Returns:
        What was measured of each; one that fails is left out from then on and has an `error`.
    """
    context = multiprocessing.get_context("spawn")
    outcomes = {kind: Outcome() for kind in kinds}
    pipes: dict[str, Connection] = {}

    def listen(kind: str) -> None:
        try:
            outcomes[kind] = pipes[kind].recv()
        except EOFError:
            outcomes[kind].error = "its process ended"

    processes = []
    for kind in kinds:
        pipes[kind], theirs = context.Pipe()
        processes.append(context.Process(target=work, args=(kind, config, theirs), daemon=True))
        processes[-1].start()
        theirs.close()
        listen(kind)
        print(f"{kind}: {outcomes[kind].error or outcomes[kind].facts or 'ready'}", flush=True)
    end, turns = time.perf_counter() + seconds, 0
    while time.perf_counter() < end or turns < 3:
        for kind, outcome in outcomes.items():
            if not outcome.error:
                pipes[kind].send(length)
                listen(kind)
        turns += 1
    for kind, process in zip(outcomes, processes, strict=True):
        pipes[kind].close()
        process.join(20)
    return outcomes


def speed_ratio(outcome: Outcome, other: Outcome) -> float:
    """Return how many times as fast one contestant's calls are: the median over the bursts of each turn."""
    return statistics.median(b / a for a, b in zip(outcome.seconds, other.seconds, strict=True))


def figures_of(config: TrainConfig, outcomes: Mapping[str, Outcome]) -> dict[str, float]:
    """Return the figures, those of contestants that failed left out, and print each contestant's speed and memory."""
    flops = flops_per_token(config.model, config.model.vocabulary_size, config.data.sequence_length)
    operations = 2 * PRODUCT_SIZE[torch.device(config.device).type] ** 3
    figures: dict[str, float] = {}
    for name, outcome in outcomes.items():
        if outcome.error:
            print(f"{name}: {outcome.error}")
            continue
        memory = f"peak {outcome.peak_bytes / 1e9:.2f} GB"
        calls = 1 / statistics.median(outcome.seconds)
        if name == "product":
            figures["product_tflops"] = operations * calls / 1e12
            print(f"{name:9} {figures['product_tflops']:.3f} TFLOP/s, {memory}")
            continue
        rate = config.step_tokens * calls
        print(f"{name:9} {rate:,.0f} tok/s, {rate * flops.causal / 1e12:.3f} TFLOP/s, {memory}, {outcome.facts}")
        figures["peak_memory_gb" if name == "ours" else f"{name}_peak_memory_gb"] = outcome.peak_bytes / 1e9
        if name != "ours":
            figures |= {} if outcomes["ours"].error else {f"{name}_ratio": speed_ratio(outcomes["ours"], outcome)}
            continue
        figures["tokens_per_second"] = rate
        if not outcomes["product"].error:
            # From the ratio of neighbouring bursts: clocks that change over the run change both.
            work_ratio = config.step_tokens * flops.causal / operations
            figures["rho"] = speed_ratio(outcome, outcomes["product"]) * work_ratio
        device = torch.cuda.get_device_name() if config.device.startswith("cuda") else ""
        peak = next((value for chip, value in PEAK.items() if chip in device), None)
        figures |= {"mfu_palm": rate * flops.palm / peak} if peak else {}
    return {name: round(value, 4) for name, value in figures.items()}


def tiny_config() -> TrainConfig:
    """Return a small shape, for a machine without a GPU."""
    config = RECIPES["nano"]()
    model = ModelConfig(layers=2, hidden_size=128, intermediate_size=344, heads=2, vocabulary_size=2048)
    data = DataConfig(sequence_length=128, batch_size=4)
    compute = replace(config.compute, precision="float32")
    return replace(config, model=model, data=data, compute=compute, device="cpu")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="paper_150m", choices=list(RECIPES), help="shape on a GPU (paper_150m)")
    parser.add_argument("--seconds", type=float, help="time for all bursts (60 on a GPU, 15 without)")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = RECIPES[options.recipe]() if device == "cuda" else tiny_config()
    kinds = list(KINDS)
    if importlib.util.find_spec("transformers") is None:
        print("transformers is not installed here: its ratios are left out (pip install transformers)")
        kinds = ["product", "ours"]
    outcomes = contest(config, kinds, options.seconds or {"cuda": 60.0, "cpu": 15.0}[device], BURST[device])
    status = finish("lm_throughput_gpu" if device == "cuda" else "lm_throughput", figures_of(config, outcomes))
    return 1 if any(outcome.error for outcome in outcomes.values()) else status


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UsageError as error:
        sys.exit(f"error: {error}")
