"""Does outer momentum pay at a Llama of 20 million parameters? The question of experiments/regimes, in one call.

    python experiments/gpu/regimes.py --out runs/gpu           at most eight minutes on one GPU

Averaging at rates in steps of 2, until its best is interior, then the others at three about that rate or below it: two
replicas, one seed, rounds of 16 steps, as many as a first run says there is time for. `regimes.csv` has a row a run;
printed are gains over averaging, both at their best rates, and the cost of doubling averaging's, in perplexity.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from machine import arguments, config_of, save_rows
from twophase.diloco.group import SingleProcess
from twophase.runs.config import OuterConfig
from twophase.tasks.lm.config import DataConfig, ModelConfig, TrainConfig
from twophase.tasks.registry import task_of
from twophase.training.trainer import Trainer

SECONDS = 440.0  # no run begins that would end later
MOST_RUNS, MOST_ROUNDS, MOST_RATES, MIDDLE = 15, 40, 5, 2e-3
USUAL = OuterConfig("nesterov", lr=0.7, momentum=0.9)
METHODS = {"averaging": OuterConfig(), "usual": USUAL, "usual, K = 3": replace(USUAL, restart="3")}
METHODS |= {"filter": OuterConfig(filter="orthogonal")}
FACTORS = dict.fromkeys(("usual", "usual, K = 3"), (0.25, 0.5, 1.0)) | {"filter": (0.5, 1.0, 2.0)}
MODEL = ModelConfig(layers=6, hidden_size=512, intermediate_size=1376, heads=8)
DATA = DataConfig("python-code", "bytes", sequence_length=512, batch_size=16, validation_windows=512)


def perplexity(config: TrainConfig, method: str, lr: float, rounds: int) -> float:
    """Train a run of so many rounds; return its perplexity on held-out text, infinite where it diverged."""
    steps = rounds * config.inner_steps
    config = replace(config, outer=METHODS[method], inner=replace(config.inner, lr=lr), steps=steps)
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
    affordable = int((SECONDS - (now - begun)) / MOST_RUNS / (now - start) * 4)
    rounds = max(1, min(affordable, 2 if options.tiny else MOST_ROUNDS))
    runs = dict[tuple[str, float], dict[str, Any]]()

    def run(method: str, lr: float) -> float:
        """Return the perplexity of a run, which trains once; infinite where there is no time left."""
        start, longest = time.monotonic(), max((row["seconds"] for row in runs.values()), default=0.0)
        if (method, lr) not in runs and start - begun + longest < SECONDS:
            reached = {"rounds": rounds, "perplexity": perplexity(config, method, lr, rounds)}
            runs[method, lr] = {"method": method, "inner_lr": lr} | reached | {"seconds": time.monotonic() - start}
        return runs[method, lr]["perplexity"] if (method, lr) in runs else math.inf

    base, rates = partial(run, "averaging"), [MIDDLE / 2, MIDDLE, 2 * MIDDLE]
    while (best := min(rates, key=base)) in (rates[0], rates[-1]) and len(rates) < MOST_RATES:
        rates = [rates[0] / 2, *rates] if best == rates[0] else [*rates, 2 * rates[-1]]
    doubled = base(2 * best) / base(best)
    others = {name: min((run(name, best * by), by) for by in factors) for name, factors in FACTORS.items()}
    save_rows(options, "regimes", [*runs.values()])
    print(f"averaging's best inner rate {best:g}, {'interior' if rates[0] < best < rates[-1] else 'at an end'}")
    print(f"cost of doubling it {doubled:.3f}; gain over averaging, both at their best rates, 0 where none has run:")
    for name, (least, by) in others.items():
        print(f"{name} {base(best) / least:.3f}, at {by:g} of that rate")
    return 0


if __name__ == "__main__":
    sys.exit(main())
