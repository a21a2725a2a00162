"""A training step of our Llama against transformers' LlamaForCausalLM: one process, one thread, interleaved, medians.

Both start from the same weights and see the same batch. A step is forward, backward, fused AdamW and zero_grad. Run it
with `python benchmarks/lm_step.py`; the last line of its output is one JSON object.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import transformers
from torch import Tensor, nn

from twophase.lm.config import ModelConfig
from twophase.lm.model import Llama

VOCABULARY = 96


@dataclass(frozen=True)
class Case:
    """A model size and a batch shape."""

    name: str
    model: ModelConfig
    batch: int
    length: int
    seconds: float
    """Time to spend on it."""


CASES = (
    Case("demo", ModelConfig(), batch=8, length=64, seconds=15),
    Case("hidden 256", ModelConfig(layers=4, hidden_size=256, intermediate_size=688, heads=8), 4, 256, seconds=20),
)


def training_step(model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], tokens: Tensor, targets: Tensor):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> Tensor:
        value = loss(tokens, targets)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        return value

    return step


def steps(case: Case) -> dict[str, Callable[[], Tensor]]:
    """A training step of each, after a check that they compute the same loss."""
    ours = Llama(case.model, VOCABULARY, seed=0)
    options = ours.hf_config() | {"attn_implementation": "sdpa", "use_cache": False}
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**options))
    theirs.load_state_dict(ours.to_hf())
    windows = torch.randint(VOCABULARY, (case.batch, case.length + 1), generator=torch.Generator().manual_seed(0))
    tokens, targets = windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

    def their_loss(tokens: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(theirs(tokens).logits.flatten(0, 1), targets.flatten())

    assert abs(ours.loss(tokens, targets).item() - their_loss(tokens, targets).item()) < 1e-5
    return {
        "ours": training_step(ours, ours.loss, tokens, targets),
        "transformers": training_step(theirs, their_loss, tokens, targets),
    }


def interleaved(functions: dict[str, Callable[[], Tensor]], seconds: float) -> dict[str, list[float]]:
    """CPU seconds of functions called in turn, so that a slow moment of the machine strikes all of them.

    CPU time, because with one thread it is the duration, less what other processes take from it.
    """
    for function in functions.values():
        for _ in range(3):
            function()
    times: dict[str, list[float]] = {name: [] for name in functions}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for name, function in functions.items():
            start = time.process_time()
            function()
            times[name].append(time.process_time() - start)
    return times


def main() -> None:
    torch.set_num_threads(1)
    figures: dict[str, tuple[float, float]] = {}
    print(
        f"torch {torch.__version__}, transformers {transformers.__version__}, one thread, median of interleaved steps"
    )
    print(f"{'case':12} {'steps':>6} {'ours':>10} {'transformers':>13} {'ratio':>6}")
    for case in CASES:
        times = interleaved(steps(case), case.seconds)
        ours, theirs = (1e3 * statistics.median(times[name]) for name in ("ours", "transformers"))
        figures[case.name] = theirs / ours, ours
        print(f"{case.name:12} {len(times['ours']):6} {ours:7.2f} ms {theirs:10.2f} ms {theirs / ours:6.2f}")
    (demo_ratio, demo_ms), (large_ratio, large_ms) = figures.values()
    result = {
        "transformers_ratio": demo_ratio,
        "transformers_ratio_256": large_ratio,
        "ms_per_step": demo_ms,
        "ms_per_step_256": large_ms,
    }
    print(json.dumps({name: round(value, 3) for name, value in result.items()}))


if __name__ == "__main__":
    main()
