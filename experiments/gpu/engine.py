"""What rounds and checkpoints cost beside training of paper_150m, and that a killed run is resumed bit for bit.

    python experiments/gpu/engine.py --out runs/gpu           five minutes on one GPU

`engine.json`: at S = 1 and 16 tokens a second with the engine over those without, and its share of the time; for how
many seconds a checkpoint stops training; `resume_same_bits`. Blocks with and without the engine take turns; medians.
"""

from __future__ import annotations

import multiprocessing
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from machine import arguments, config_of, save_figures, wait_for
from twophase.api import train
from twophase.diloco.engine import DiLoCo
from twophase.diloco.group import SingleProcess
from twophase.runs.folder import CHECKPOINTS
from twophase.runs.record import read_summary
from twophase.tasks.lm.config import TrainConfig
from twophase.tasks.lm.task import LanguageTask
from twophase.training.checkpoint import Checkpointer, latest
from twophase.training.inner import Replica
from twophase.training.trainer import Trainer

RESULT = ("checksum", "validation_loss", "restarts")


class Loop:
    """The replicas of a run, with and without an engine."""

    def __init__(self, config: TrainConfig) -> None:
        self.config, self.device, self.number = config, torch.device(config.device), 0
        task = LanguageTask(config)
        step = task.step(self.device, config.replicas, SingleProcess())
        self.replicas = [Replica(config, number, task, step) for number in range(config.replicas)]

    def inner(self, steps: int, after: Callable[[], object] = lambda: None) -> float:
        """Return the seconds of some inner steps of all replicas, each followed by `after`."""
        begin = wait_for(self.device)
        for _ in range(steps):
            for replica in self.replicas:
                replica.step(self.number, self.config.inner.lr)
            self.number += 1
            after()
        return wait_for(self.device) - begin

    def compare(self, inner_steps: int, seconds: float, least: int) -> dict[str, float]:
        """Return the ratio of tokens a second and the engine's share of the time, at S inner steps a round.

        Three pairs of blocks, and `least` inner steps a block, are taken at least.
        """
        models = [replica.model for replica in self.replicas]
        engine = DiLoCo(models, "nesterov", restart=3, inner_steps=inner_steps)
        block = inner_steps * -(-least // inner_steps)  # whole rounds
        spent = 0.0

        def after() -> None:
            nonlocal spent
            before = wait_for(self.device) if engine.ending else 0.0  # else inner work would be the engine's
            if engine.step():
                spent += wait_for(self.device) - before

        self.inner(min(block, 4 * inner_steps), after)
        ratios, shares, end = [], [], time.perf_counter() + seconds
        while time.perf_counter() < end or len(ratios) < 3:
            spent = 0.0
            bare = self.inner(block) if len(ratios) % 2 else 0.0  # in turn, so that neither is always the first
            whole = self.inner(block, after)
            bare = bare or self.inner(block)
            ratios.append(bare / whole)
            shares.append(spent / whole)
        median = statistics.median
        return {f"tokens_ratio_s{inner_steps}": median(ratios), f"engine_share_s{inner_steps}": median(shares)}


def checkpointing(config: TrainConfig) -> dict[str, float]:
    """Return for how many seconds a checkpoint stops training, and its gigabytes."""
    trainer = Trainer(LanguageTask(config), replace(config, inner_steps=1), SingleProcess())
    trainer.inner_step()
    trainer.synchronize()
    with tempfile.TemporaryDirectory() as scratch:
        checkpointer = Checkpointer(Path(scratch), SingleProcess(), keep=1)
        begin = wait_for(trainer.compute.device)
        checkpointer.save(1, trainer.parts(), trainer.progress())
        stopped = wait_for(trainer.compute.device) - begin
        checkpointer.close()
        size = sum(file.stat().st_size for file in Path(scratch).rglob("*") if file.is_file())
    return {"checkpoint_stop_seconds": stopped, "checkpoint_gb": size / 1e9}


def is_resumed_alike(config: TrainConfig) -> bool:
    """Return whether a run that is killed after its first checkpoint ends with the bits of one that is not."""
    context = multiprocessing.get_context("spawn")
    ends = []
    with tempfile.TemporaryDirectory() as scratch:
        for name, kill in (("whole", False), ("killed", True), ("killed", False)):
            folder = Path(scratch) / name
            process = context.Process(target=train, args=("lm", config, folder), kwargs={"quiet": True})
            process.start()
            while kill and process.is_alive() and latest(folder / CHECKPOINTS) is None:
                time.sleep(0.002)
            if kill:
                process.kill()
            process.join()
            if process.exitcode != (-signal.SIGKILL if kill else 0):
                raise RuntimeError(f"a process of the run that is killed and resumed ended with {process.exitcode}")
            ends.append(read_summary(folder) or {})
    return all(ends[0][name] == ends[2][name] for name in RESULT)


def main(words: Sequence[str] | None = None) -> int:
    """Measure, and write the file."""
    options = arguments(__doc__ or "", words)
    config = config_of(options)
    seconds, least = (0.1, 1) if options.tiny else (30.0, 4)
    loop = Loop(config)
    figures = loop.compare(1, seconds, least) | loop.compare(16, seconds, least)
    del loop
    figures |= checkpointing(config)
    torch.cuda.empty_cache()
    short = replace(config, steps=100 if options.tiny else 12, inner_steps=4, outer=replace(config.outer, restart="2"))
    short = replace(short, deterministic=True, checkpoint_every=1, evaluate_every=0, log_every=0)
    save_figures(options, "engine", figures | {"resume_same_bits": is_resumed_alike(short)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
