"""What the engine costs: tokens a second with it over those of the same inner steps without, at the demo's size.

`tokens_ratio_s16` is that with rounds of 16 inner steps, with all that a round brings (pseudo-gradient, outer step with
its norms, restoring the replicas, digest, report). Blocks of whole rounds with and without take turns in one run; CPU
time of this process, on a GPU wall time between synchronisations. `engine_share_s16` is the engine's part of the first.
Last line: one JSON object.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import torch

from bounds import finish
from twophase.diloco.engine import DiLoCo
from twophase.diloco.group import SingleProcess
from twophase.tasks.lm.config import TrainConfig
from twophase.tasks.lm.task import LanguageTask
from twophase.training.inner import Replica


class Loop:
    """The replicas of a run, with and without an engine."""

    def __init__(self, config: TrainConfig) -> None:
        self.config, self.device, self.step, task = config, torch.device(config.device), 0, LanguageTask(config)
        compute = task.step(self.device, config.replicas, SingleProcess())
        self.replicas = [Replica(config, number, task, compute) for number in range(config.replicas)]

    def clock(self) -> float:
        """Return seconds since some time, after all work that has been launched."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            return time.perf_counter()
        return time.process_time()

    def inner(self, steps: int, after: Callable[[], object] = lambda: None) -> float:
        """Return the seconds of some inner steps of all replicas, each followed by `after`."""
        begin = self.clock()
        for _ in range(steps):
            for replica in self.replicas:
                replica.step(self.step, self.config.inner.lr)
            self.step += 1
            after()
        return self.clock() - begin

    def compare(self, inner_steps: int, seconds: float, least: int) -> tuple[float, float]:
        """Return the ratio of tokens a second and the engine's share of the time, as medians over pairs of blocks.

        They are of rounds of S inner steps, in so many seconds, three pairs and `least` inner steps a block at least.
        """
        models = [replica.model for replica in self.replicas]
        engine = DiLoCo(models, "nesterov", restart=3, inner_steps=inner_steps)
        block = inner_steps * -(-least // inner_steps)  # whole rounds
        spent = 0.0

        def after() -> None:
            nonlocal spent
            before = self.clock() if engine.ending else 0.0  # else the inner steps' work would be the engine's
            if engine.step():
                spent += self.clock() - before

        self.inner(min(block, 4 * inner_steps), after)
        ratios: list[float] = []
        shares: list[float] = []
        end = time.perf_counter() + seconds
        while time.perf_counter() < end or len(ratios) < 3:
            spent = 0.0
            bare = self.inner(block) if len(ratios) % 2 else 0.0  # in turn, so that neither is always the first
            whole = self.inner(block, after)
            bare = bare or self.inner(block)
            ratios.append(bare / whole)
            shares.append(spent / whole)
        return statistics.median(ratios), statistics.median(shares)


def measure(config: TrainConfig, inner_steps: Sequence[int], seconds: float, least: int) -> dict[str, float]:
    """Print and return the figures at several numbers of inner steps a round; arguments as of `Loop.compare`."""
    loop, figures = Loop(config), dict[str, float]()
    for count in inner_steps:
        ratio, share = loop.compare(count, seconds, least)
        print(f"S = {count:4}: {ratio:.4f} of the tokens a second, the engine takes {share:.2%}", flush=True)
        figures |= {f"tokens_ratio_s{count}": round(ratio, 5), f"engine_share_s{count}": round(share, 5)}
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inner-steps", type=int, nargs="+", default=[1, 16, 128], help="S, one comparison each")
    parser.add_argument("--seconds", type=float, default=12.0, help="time for each, three blocks at least")
    options = parser.parse_args()
    torch.set_num_threads(1)
    return finish("engine_overhead", measure(TrainConfig(), options.inner_steps, options.seconds, least=16))


if __name__ == "__main__":
    sys.exit(main())
