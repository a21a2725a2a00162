"""What the outer machinery costs: tokens a second with the engine over those of the bare inner loop.

`tokens_ratio_s16` compares, in one run and in turn, blocks of whole rounds of S = 16 inner steps of all replicas with
everything that a round brings (pseudo-gradient, reduction, outer step with its norms, restoring the replicas, checksum,
report) and the same inner steps without. On a CPU time is CPU time of this process, so that other programs do not
enter; on a GPU it is wall time between synchronisations. `engine_share_s16` is the engine's own part of the first.

Without options it takes the demo's model; `--recipe paper_150m` takes the paper's, on the documentation of the running
Python as bytes, whose content does not change the speed. Last line: one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from twophase.diloco.engine import DiLoCo
from twophase.lm.config import TrainConfig
from twophase.lm.step import Step
from twophase.lm.trainer import Replica, preflight
from twophase.recipes.pretraining import RECIPES
from twophase.restart import Periodic


class Loop:
    """Replicas of a run, with and without an engine."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        corpus, self.device = preflight(config)
        vocabulary = config.model.vocabulary_size or corpus.vocabulary.size
        compute = Step(config, vocabulary, self.device, config.replicas)
        self.replicas = [Replica(config, number, corpus, compute) for number in range(config.replicas)]
        self.step = 0

    def clock(self) -> float:
        """Seconds since some time, after all work that has been launched."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            return time.perf_counter()
        return time.process_time()

    def inner(self, steps: int, after: Callable[[], object] = lambda: None) -> float:
        """Seconds of some inner steps of all replicas."""
        begin = self.clock()
        for _ in range(steps):
            for replica in self.replicas:
                replica.step(self.step, self.config.inner.lr)
            self.step += 1
            after()
        return self.clock() - begin

    def compare(self, inner_steps: int, seconds: float, least: int) -> tuple[float, float]:
        """Medians of: bare time / time with the engine; the engine's own share of the latter."""
        rule = self.config.outer.rule()
        models = [replica.model for replica in self.replicas]
        engine = DiLoCo(models, rule, restart=Periodic(3), inner_steps=inner_steps)
        block = inner_steps * -(-least // inner_steps)  # whole rounds
        own = 0.0

        def after() -> None:
            nonlocal own
            ends = engine.inner_step + 1 == inner_steps
            before = self.clock() if ends else 0.0  # the engine would wait for the inner steps, which are not its own
            engine.step()
            own += self.clock() - before if ends else 0.0

        self.inner(min(block, 4 * inner_steps), after)
        ratios, shares = [], []
        end = time.perf_counter() + seconds
        while time.perf_counter() < end or len(ratios) < 3:
            own = 0.0
            bare = self.inner(block) if len(ratios) % 2 else 0.0  # in turn, so that neither is always the first
            whole = self.inner(block, after)
            bare = bare or self.inner(block)
            ratios.append(bare / whole)
            shares.append(own / whole)
        return statistics.median(ratios), statistics.median(shares)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", choices=list(RECIPES), help="a recipe's model (default: the demo's)")
    parser.add_argument("--device", help="a torch device (default: the recipe's)")
    parser.add_argument("--inner-steps", type=int, nargs="+", default=[1, 16, 512], help="S, one comparison each")
    parser.add_argument("--seconds", type=float, default=12.0, help="time for each, three blocks at least")
    parser.add_argument("--block", type=int, help="inner steps that are timed together at least (64; recipes: 8)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    config = TrainConfig()
    if options.recipe:
        config = RECIPES[options.recipe]()
        data = replace(config.data, corpus="python", vocabulary="bytes", validation_windows=16)
        config = replace(config, data=data)
    config = replace(config, device=options.device or config.device)
    loop = Loop(config)
    figures: dict[str, float] = {}
    print(f"{'S':>5}{'tokens ratio':>14}{'engine share':>14}")
    for inner_steps in options.inner_steps:
        ratio, share = loop.compare(inner_steps, options.seconds, options.block or (8 if options.recipe else 64))
        print(f"{inner_steps:5}{ratio:14.4f}{share:14.2%}")
        figures |= {f"tokens_ratio_s{inner_steps}": ratio, f"engine_share_s{inner_steps}": share}
    print(json.dumps({name: round(value, 5) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
