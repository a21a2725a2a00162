"""Does outer momentum pay at a Llama of 20 million parameters? The question of experiments/regimes, in one call.

    python experiments/gpu/regimes.py --out runs/gpu           at most eight minutes on one GPU

Averaging at inner rates in steps of 2, until its best is interior, then DiLoCo's usual rule, the same with K = 3, and
the orthogonal filter at half, one and two times that rate: two replicas, one seed, rounds of 16 steps. A first run that
does not count says how many rounds there is time for. `regimes.csv` has a row a run; printed are each method's gain
over averaging, both at their best rates, and the cost of doubling averaging's, in perplexity.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from machine import arguments, config_of, save_rows
from twophase.diloco.group import SingleProcess
from twophase.runs.config import OuterConfig
from twophase.tasks.lm.config import DataConfig, ModelConfig, TrainConfig
from twophase.tasks.registry import task_of
from twophase.training.trainer import Trainer

SECONDS = 440.0
"""No run begins that would end later."""
MOST_RUNS, MOST_ROUNDS, MOST_RATES, MIDDLE = 15, 40, 5, 2e-3
USUAL = OuterConfig("nesterov", lr=0.7, momentum=0.9)
METHODS = {
    "averaging": OuterConfig(),
    "usual": USUAL,
    "usual, K = 3": replace(USUAL, restart="3"),
    "filter": OuterConfig(filter="orthogonal"),
}
MODEL = ModelConfig(layers=6, hidden_size=512, intermediate_size=1376, heads=8)
DATA = DataConfig("python-code", "bytes", sequence_length=512, batch_size=16, validation_windows=512)


def perplexity(config: TrainConfig, method: str, lr: float, rounds: int) -> float:
    """Train a run of so many rounds; return its perplexity on held-out text, infinite where it diverged."""
    inner, steps = replace(config.inner, lr=lr), rounds * config.inner_steps
    config = replace(config, outer=METHODS[method], inner=inner, steps=steps)
    with TemporaryDirectory() as scratch:
        summary = Trainer(task_of(config), config, SingleProcess()).run(Path(scratch), None, discard=True)
    return math.inf if summary["diverged"] else summary["perplexity"]


def main(words: Sequence[str] | None = None) -> int:
    """Measure, write the file and print what follows from it."""
    options, begun = arguments(__doc__ or "", words), time.monotonic()
    config = replace(config_of(options), log_every=0, evaluate_every=0, checkpoint_every=10**6, inner_steps=16)
    config = replace(config, inner_steps=2) if options.tiny else replace(config, model=MODEL, data=DATA)
    perplexity(config, "usual", MIDDLE, 1)  # compiles
    start = time.monotonic()
    perplexity(config, "usual", MIDDLE, 4)
    now = time.monotonic()
    rounds = max(1, min(int((SECONDS - (now - begun)) / MOST_RUNS / (now - start) * 4), MOST_ROUNDS))
    rounds, longest = 2 if options.tiny else rounds, 0.0
    found, rows = dict[tuple[str, float], float](), list[dict[str, Any]]()

    def run(method: str, lr: float) -> float:
        nonlocal longest
        start = time.monotonic()
        if (method, lr) not in found and start - begun + longest < SECONDS:
            found[method, lr] = perplexity(config, method, lr, rounds)
            seconds = time.monotonic() - start
            longest = max(longest, seconds)
            about = {"method": method, "inner_lr": lr, "rounds": rounds, "perplexity": found[method, lr]}
            rows.append(about | {"seconds": seconds})
        return found.get((method, lr), math.inf)

    rates = [MIDDLE / 2, MIDDLE, 2 * MIDDLE]
    while (best := min(rates, key=lambda lr: run("averaging", lr))) in (rates[0], rates[-1]) and len(
        rates
    ) < MOST_RATES:
        rates = [rates[0] / 2, *rates] if best == rates[0] else [*rates, 2 * rates[-1]]
    doubled = run("averaging", 2 * best) / run("averaging", best)
    others = {m: min(run(m, best * factor) for factor in (0.5, 1.0, 2.0)) for m in METHODS if m != "averaging"}
    save_rows(options, "regimes", rows)
    print(f"averaging's best inner rate {best:g}, {'interior' if rates[0] < best < rates[-1] else 'at an end'}")
    print(f"cost of doubling it {doubled:.3f}; gain over averaging, both at their best rates, 0 where none has run:")
    print(*(f"{method} {run('averaging', best) / other:.3f}" for method, other in others.items()), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
