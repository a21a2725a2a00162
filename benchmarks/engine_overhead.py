"""What the outer machinery costs: tokens a second with the engine over those of the bare inner loop.

`tokens_ratio_s16` compares, in one run and in turn, blocks of whole rounds of S = 16 inner steps of all replicas with
everything that a round brings (pseudo-gradient, reduction, outer step with its norms, restoring the replicas, checksum,
report) and the same inner steps without. On a CPU time is CPU time of this process, so that other programs do not
enter; on a GPU it is wall time between synchronisations. `engine_share_s16` is the engine's own part of the first, and
the table shows its phases in wall milliseconds a round (on a GPU most phases only launch work, see `RoundReport`).

`record_ratio_s8` (`--record`) is the time of whole rounds of S = 8 with `twophase.record` over that without.

Without options it takes the demo's model; `--recipe paper_150m` takes the paper's, on the documentation of the running
Python as bytes, whose content does not change the speed. Last line: one JSON object.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

import twophase
from bounds import finish
from twophase.diloco.communicator import SingleProcess
from twophase.diloco.engine import DiLoCo
from twophase.diloco.report import RoundReport
from twophase.recipes.pretraining import RECIPES
from twophase.restart import Periodic
from twophase.rule import OuterRule
from twophase.tasks.lm.config import TrainConfig
from twophase.tasks.lm.task import LanguageTask
from twophase.training.inner import Replica
from twophase.training.preflight import preflight

RULE = OuterRule(0.7, 0.9, nesterov=True)
_RECORDED = 8
"""S at which the record is timed."""


@dataclass(frozen=True)
class Overhead:
    """What the engine costs at one number of inner steps a round.

    Args:
        tokens_ratio: tokens a second with the engine over those without, a median over pairs of blocks.
        engine_share: the engine's part of the time with it, likewise.
        phases: median wall seconds of each phase of a round.
    """

    tokens_ratio: float
    engine_share: float
    phases: dict[str, float]


class Loop:
    """Replicas of a run, with and without an engine."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        task, self.device = LanguageTask(config), torch.device(config.device)
        preflight(config, task)
        compute = task.step(self.device, config.replicas, SingleProcess())
        self.replicas = [Replica(config, number, task, compute) for number in range(config.replicas)]
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

    def compare(self, inner_steps: int, seconds: float, least: int) -> Overhead:
        """Time blocks of whole rounds, with the engine and without in turn.

        Args:
            inner_steps: S, of a round.
            seconds: to measure for; three pairs of blocks at least.
            least: inner steps of a block at least.
        """
        models = [replica.model for replica in self.replicas]
        engine = DiLoCo(models, RULE, restart=Periodic(3), inner_steps=inner_steps)
        block = inner_steps * -(-least // inner_steps)  # whole rounds
        engine_seconds = 0.0
        reports: list[RoundReport] = []

        def after() -> None:
            nonlocal engine_seconds
            ends = engine.inner_step + 1 == inner_steps
            before = self.clock() if ends else 0.0  # the engine would wait for the inner steps, which are not its own
            report = engine.step()
            if ends:
                engine_seconds += self.clock() - before
                assert report is not None
                reports.append(report)

        self.inner(min(block, 4 * inner_steps), after)
        reports.clear()
        ratios, shares = [], []
        end = time.perf_counter() + seconds
        while time.perf_counter() < end or len(ratios) < 3:
            engine_seconds = 0.0
            bare = self.inner(block) if len(ratios) % 2 else 0.0  # in turn, so that neither is always the first
            whole = self.inner(block, after)
            bare = bare or self.inner(block)
            ratios.append(bare / whole)
            shares.append(engine_seconds / whole)
        phases = {name: statistics.median(report.seconds[name] for report in reports) for name in reports[0].seconds}
        return Overhead(statistics.median(ratios), statistics.median(shares), phases)


def measure(config: TrainConfig, inner_steps: list[int], seconds: float, least: int) -> dict[int, Overhead]:
    """Compare at several numbers of inner steps a round, and print a line for each.

    Args:
        config: model, text, replicas and device.
        inner_steps: S, one comparison each.
        seconds: for each.
        least: inner steps of a block at least.
    """
    loop = Loop(config)
    overheads: dict[int, Overhead] = {}
    print(f"{'S':>5}{'tokens ratio':>14}{'engine share':>14}  ms of each phase of a round")
    for count in inner_steps:
        overheads[count] = overhead = loop.compare(count, seconds, least)
        phases = ", ".join(f"{name} {1e3 * value:.3g}" for name, value in overhead.phases.items())
        print(f"{count:5}{overhead.tokens_ratio:14.4f}{overhead.engine_share:14.2%}  {phases}", flush=True)
    return overheads


def record_ratio(config: TrainConfig, inner_steps: int, seconds: float) -> float:
    """Time of whole rounds with `twophase.record` over that without, in turn; a median over pairs of blocks."""
    loops = Loop(config), Loop(config)
    engines = [DiLoCo([r.model for r in loop.replicas], RULE, restart=3, inner_steps=inner_steps) for loop in loops]
    with tempfile.TemporaryDirectory() as folder, twophase.record(engines[0], f"{folder}/run"):
        ratios: list[float] = []
        end = time.perf_counter() + seconds
        while time.perf_counter() < end or len(ratios) < 4:  # the first pair warms up
            order = (0, 1) if len(ratios) % 2 else (1, 0)
            times = {number: loops[number].inner(4 * inner_steps, engines[number].step) for number in order}
            ratios.append(times[0] / times[1])
    return statistics.median(ratios[1:])


def figures_of(overheads: dict[int, Overhead]) -> dict[str, float]:
    """The figures of the last line."""
    figures: dict[str, float] = {}
    for count, overhead in overheads.items():
        figures[f"tokens_ratio_s{count}"] = round(overhead.tokens_ratio, 5)
        figures[f"engine_share_s{count}"] = round(overhead.engine_share, 5)
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", choices=list(RECIPES), help="a recipe's model (default: the demo's)")
    parser.add_argument("--device", help="a torch device (default: the recipe's)")
    parser.add_argument("--inner-steps", type=int, nargs="+", default=[1, 16, 128], help="S, one comparison each")
    parser.add_argument("--seconds", type=float, default=12.0, help="time for each, three blocks at least")
    parser.add_argument("--record", action="store_true", help="time twophase.record, too")
    parser.add_argument("--block", type=int, help="inner steps that are timed together at least (16; recipes: 8)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    config = TrainConfig()
    if options.recipe:
        config = RECIPES[options.recipe]()
        data = replace(config.data, corpus="python", vocabulary="bytes", tokenizer="", validation_windows=16)
        config = replace(config, data=data)
    config = replace(config, device=options.device or config.device)
    overheads = measure(config, options.inner_steps, options.seconds, options.block or (8 if options.recipe else 16))
    figures = figures_of(overheads)
    if options.record:
        ratio = figures[f"record_ratio_s{_RECORDED}"] = round(record_ratio(config, _RECORDED, options.seconds), 5)
        print(f"rounds of S = {_RECORDED} with twophase.record take {ratio:.4f} times as long")
    # Bounds are for the demo's model on a CPU and for a recipe on a GPU: other pairs show that the commands run.
    name = {(False, "cpu"): "engine_overhead", (True, "cuda"): "engine_overhead_gpu"}
    kind = bool(options.recipe), torch.device(config.device).type
    return finish(name.get(kind, "engine_overhead_other"), figures)


if __name__ == "__main__":
    sys.exit(main())
