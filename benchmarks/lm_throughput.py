"""A training step of our Llama against the device's matrix product and against transformers' Llama: one run, medians.

* `product`: a bf16 matrix product of random numbers (8192 cubed on a GPU; zeros would run faster than any real one);
* `ours`: our step as `twophase train` takes it (mixed precision, compiled, attention chosen by timing);
* `eager`, `compiled`: transformers' LlamaForCausalLM at the same shape, from the same weights, with SDPA, autocast and
  fused AdamW, in smaller pieces where it runs out of memory; compiled is model and loss in one call.

A step is forward, backward, AdamW and zero_grad of a replica. Each contestant has a process of its own, so that each
peak memory is its own; it is told over a pipe to run a burst of at least a second (0.3 s on a CPU) while the others
wait. Bursts are equally long and taken in turn, so that clocks and heat strike all alike. Two steps at full size do not
fit on one GPU together: after a burst a contestant keeps weights and optimizer only, and a burst begins with untimed
steps, which take the memory again.

    rho            = our floating-point operations a second (causal counting) / those of the matrix product
    eager_ratio    = our tokens a second / transformers'
    compiled_ratio = our tokens a second / compiled transformers'

On a machine without a GPU it runs at a small shape, to show that it runs. Last line: one JSON object.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import resource
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own custom
from torch import Tensor

from bounds import finish
from twophase.base.config import RunError, UsageError, from_tree, to_tree
from twophase.recipes.pretraining import RECIPES
from twophase.tasks.lm.config import DataConfig, ModelConfig, TrainConfig
from twophase.tasks.lm.speed import flops_per_token
from twophase.tasks.lm.step import DTYPES, Step, divisors, drawn

PEAK = {"H100": 989e12, "H200": 989e12, "A100": 312e12}
"""Dense bf16 operations a second by datasheet, the usual denominator of MFU."""
PRODUCT_SIZE = {"cuda": 8192, "cpu": 512}
PRODUCT_TYPE = {"cuda": torch.bfloat16, "cpu": torch.float32}
BURST = {"cuda": 1.0, "cpu": 0.3}
"""Seconds of a burst at least."""
Call = Callable[[], object]
Facts = dict[str, Any]
"""What a contestant has chosen: sequences at a time, attention kernel. Filled in by its first step."""


@dataclass(frozen=True)
class Contestant:
    """What a process computes.

    Args:
        kind: a key of `KINDS`.
        config: shape, precision, compilation and device.
    """

    kind: str
    config: TrainConfig


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
    """A matrix product of random numbers."""
    del config, facts
    size, dtype = PRODUCT_SIZE[device.type], PRODUCT_TYPE[device.type]
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)

    def call() -> None:
        torch.mm(a, b, out=out)

    return call


def batch(config: TrainConfig, device: torch.device) -> tuple[Tensor, Tensor]:
    """Random tokens and targets of one step."""
    data = config.data
    shape = data.batch_size, data.sequence_length + 1
    windows = torch.randint(config.model.vocabulary_size, shape, generator=torch.Generator().manual_seed(0))
    return windows[:, :-1].contiguous().to(device), windows[:, 1:].contiguous().to(device)


def twophase_step(config: TrainConfig, device: torch.device, facts: Facts) -> Call:
    """Our step, as `twophase train` takes it."""
    vocabulary = config.model.vocabulary_size
    compute = Step(config, vocabulary, device, 1)
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
    """The step of transformers' Llama, loss included."""
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
                smaller = [size for size in divisors(len(tokens)) if size < facts["micro_batch"]]
            # Outside the handler: the exception holds on to everything that the step had allocated.
            if not smaller:
                raise RunError("transformers' step does not fit at one sequence; free the GPU's memory")
            facts["micro_batch"] = smaller[-1]
            optimizer.zero_grad()
            torch.cuda.empty_cache()

    return call


def theirs_compiled(config: TrainConfig, device: torch.device, facts: Facts) -> Call:
    """The step of transformers' Llama, model and loss in one compiled call."""
    return theirs(config, device, facts, compiled=True)


KINDS: Mapping[str, Callable[[TrainConfig, torch.device, Facts], Call]] = {
    "product": product,
    "ours": twophase_step,
    "eager": theirs,
    "compiled": theirs_compiled,
}


def wait_for(device: torch.device) -> float:
    """Seconds since some time, after all work that has been launched; on a CPU, less what other programs take."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return time.perf_counter()
    return time.process_time()


def burst(call: Call, seconds: float, repeats: int, device: torch.device) -> tuple[float, int]:
    """Repeat a call for some seconds.

    Args:
        call: launches the work.
        seconds: how long at least.
        repeats: how often to try first; grows until the calls take that long.
        device: where they run.

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


def peak_bytes(device: torch.device) -> int:
    """The largest memory so far: allocated on a GPU, else held by this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


# The process of a contestant, and its end of the pipe.


def leave_memory(device: torch.device) -> None:
    """Give what this process has cached to the others, which choose their pieces by what is free."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def work(kind: str, config: TrainConfig) -> None:
    """Build a contestant, then run a burst for each line of standard input, which holds its seconds."""
    answers, sys.stdout = sys.stdout, sys.stderr  # libraries print; the pipe is for answers

    def answer(**values: Any) -> None:
        print(json.dumps(values), file=answers, flush=True)

    try:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        device = torch.device(config.device)
        facts: Facts = {}
        call = KINDS[kind](config, device, facts)
        call()  # compiles, tunes, chooses
        leave_memory(device)
        repeats = 1
        answer(facts=facts, peak_bytes=peak_bytes(device))
        for line in sys.stdin:
            call()  # the memory and the clocks of the contestant before are not ours
            call()
            seconds, repeats = burst(call, float(line), repeats, device)
            leave_memory(device)
            answer(seconds=seconds, facts=facts, peak_bytes=peak_bytes(device))
    except Exception as error:  # whatever it is, the other contestants go on
        answer(error=str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__)


class Process:
    """Our end of a contestant's pipe."""

    def __init__(self, name: str, contestant: Contestant) -> None:
        self.name = name
        self.outcome = Outcome()
        words = ["--contestant", contestant.kind, "--config", json.dumps(to_tree(contestant.config))]
        self._process = subprocess.Popen(
            [sys.executable, __file__, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._listen()

    def run(self, seconds: float) -> None:
        """Have it run a burst, and keep what it answers."""
        assert self._process.stdin
        try:
            print(seconds, file=self._process.stdin, flush=True)
        except BrokenPipeError:
            self.outcome.error = "its process has died"
        else:
            self._listen()

    def _listen(self) -> None:
        assert self._process.stdout
        line = self._process.stdout.readline()
        answer: dict[str, Any] = json.loads(line or "{}")
        if not line:
            answer["error"] = f"its process ended with status {self._process.wait()}"
        outcome = self.outcome
        outcome.error = answer.get("error", "")
        outcome.peak_bytes = answer.get("peak_bytes", outcome.peak_bytes)
        outcome.facts = answer.get("facts", outcome.facts)
        outcome.seconds += [answer["seconds"]] if "seconds" in answer else []

    def close(self) -> None:
        """End it; one that does not listen is killed."""
        assert self._process.stdin
        assert self._process.stdout
        try:
            self._process.stdin.close()
            self._process.wait(20)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


def contest(contestants: Mapping[str, Contestant], seconds: float, length: float) -> dict[str, Outcome]:
    """Let contestants work in turn, in bursts.

    Args:
        contestants: by name, each for a process of its own.
        seconds: for all bursts; three of each at least.
        length: seconds of a burst at least.

    Returns:
        What was measured of each; one that fails is left out from then on and has an `error`.
    """
    processes: list[Process] = []
    try:
        for name, contestant in contestants.items():
            processes.append(process := Process(name, contestant))
            print(f"{name}: {process.outcome.error or process.outcome.facts or 'ready'}", flush=True)
        end = time.perf_counter() + seconds
        rounds = 0
        while time.perf_counter() < end or rounds < 3:
            for process in processes:
                if not process.outcome.error:
                    process.run(length)
            rounds += 1
    finally:
        for process in processes:
            process.close()
    return {process.name: process.outcome for process in processes}


def speed_ratio(outcome: Outcome, other: Outcome) -> float:
    """How many times as fast one contestant's calls are as another's: the median over the bursts of each turn."""
    return statistics.median(b / a for a, b in zip(outcome.seconds, other.seconds, strict=True))


def figures_of(config: TrainConfig, outcomes: Mapping[str, Outcome], device_name: str) -> dict[str, float]:
    """Print a line for each contestant, and return the figures of the last line."""
    model, data = config.model, config.data
    flops = flops_per_token(model, model.vocabulary_size, data.sequence_length)
    device = torch.device(config.device).type
    good = {name: outcome for name, outcome in outcomes.items() if not outcome.error}
    figures: dict[str, float] = {}
    for name, outcome in good.items():
        memory = f"peak {outcome.peak_bytes / 1e9:6.2f} GB"
        if name == "product":
            rate = 2 * PRODUCT_SIZE[device] ** 3 / statistics.median(outcome.seconds)
            print(f"product     {PRODUCT_SIZE[device]}^3 {PRODUCT_TYPE[device]}: {rate / 1e12:.3f} TFLOP/s, {memory}")
            figures["product_tflops"] = rate / 1e12
            continue
        rate = config.step_tokens / statistics.median(outcome.seconds)
        share = ""
        if "product" in good:
            # From the ratio of neighbouring bursts: clocks that change over the run change both.
            work_ratio = config.step_tokens * flops.causal / (2 * PRODUCT_SIZE[device] ** 3)
            rho = speed_ratio(outcome, good["product"]) * work_ratio
            share = f" causal, {rho:6.1%} of the product"
            figures |= {"rho": rho} if name == "ours" else {}
        print(
            f"{name:9} {rate:12,.0f} tok/s {rate * flops.causal / 1e12:9.3f} TFLOP/s{share}, {memory}, {outcome.facts}"
        )
        figures["peak_memory_gb" if name == "ours" else f"{name}_peak_memory_gb"] = outcome.peak_bytes / 1e9
        if name == "ours":
            figures["tokens_per_second"] = rate
            peak = next((value for chip, value in PEAK.items() if chip in device_name), None)
            figures |= {"mfu_palm": rate * flops.palm / peak} if peak else {}
        elif "ours" in good:
            figures[f"{name}_ratio"] = speed_ratio(good["ours"], outcome)
    return {name: round(value, 4) for name, value in figures.items()}


def cpu_config() -> TrainConfig:
    """A small shape, for a machine without a GPU."""
    config = RECIPES["nano"]()
    model = ModelConfig(layers=2, hidden_size=128, intermediate_size=344, heads=2, vocabulary_size=2048)
    data = DataConfig(sequence_length=128, batch_size=4)
    compute = replace(config.compute, precision="float32")
    return replace(config, model=model, data=data, compute=compute, device="cpu")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="paper_150m", choices=list(RECIPES), help="shape on a GPU (paper_150m)")
    parser.add_argument("--seconds", type=float, help="time for all bursts (60 on a GPU, 15 without)")
    parser.add_argument("--micro-batch", type=int, default=0, help="sequences at a time for ours (0: what fits)")
    parser.add_argument("--no-compile", action="store_true", help="leave our step uncompiled")
    parser.add_argument("--only-ours", action="store_true", help="leave transformers out")
    parser.add_argument("--contestant", choices=list(KINDS), help=argparse.SUPPRESS)
    parser.add_argument("--config", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contestant:
        work(options.contestant, from_tree(TrainConfig, json.loads(options.config)))
        return 0
    cuda = torch.cuda.is_available()
    config = RECIPES[options.recipe]() if cuda else cpu_config()
    compute = replace(config.compute, micro_batch=options.micro_batch, compile=not options.no_compile)
    mine = replace(config, compute=compute)
    name = torch.cuda.get_device_name() if cuda else "CPU, one thread"
    print(f"{name}; torch {torch.__version__}; {config.compute.precision}", flush=True)
    contestants = {"product": Contestant("product", config), "ours": Contestant("ours", mine)}
    if options.only_ours:
        pass
    elif importlib.util.find_spec("transformers") is None:
        print("transformers is not installed here: its ratios are left out (pip install transformers)")
    else:
        contestants |= {kind: Contestant(kind, config) for kind in ("eager", "compiled")}
    outcomes = contest(contestants, options.seconds or (60.0 if cuda else 15.0), BURST["cuda" if cuda else "cpu"])
    figures = figures_of(config, outcomes, name)
    errors = [f"{name}: {outcome.error}" for name, outcome in outcomes.items() if outcome.error]
    print(*errors, sep="\n", end="\n" * bool(errors))
    status = finish("lm_throughput_gpu" if cuda else "lm_throughput", figures)
    return 1 if errors else status


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UsageError as error:
        sys.exit(f"error: {error}")
