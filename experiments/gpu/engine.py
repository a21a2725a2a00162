"""What rounds and checkpoints cost beside training of paper_150m, and that a killed run is resumed bit for bit.

    python experiments/gpu/engine.py --out runs/gpu           five minutes on one GPU

`engine.json`: at S = 1 and 16 tokens a second with the engine over those without, and its share of the time; for how
long a checkpoint stops training, over an inner step (`benchmarks/storage.py`); `resume_same_bits`. Blocks with and
without the engine take turns; medians.
"""

from __future__ import annotations

import multiprocessing
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from machine import arguments, config_of, save_figures
from twophase.api import train
from twophase.runs.folder import CHECKPOINTS
from twophase.runs.record import read_summary
from twophase.tasks.lm.config import TrainConfig
from twophase.training.checkpoint import latest

sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from engine_overhead import measure
from storage import checkpointing

RESULT = ("checksum", "validation_loss", "restarts")


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
    figures = measure(config, (1, 16), seconds, least) | checkpointing(replace(config, inner_steps=1), saves=2)
    torch.cuda.empty_cache()
    short = replace(config, steps=100 if options.tiny else 12, inner_steps=4, outer=replace(config.outer, restart="2"))
    short = replace(short, deterministic=True, checkpoint_every=1, evaluate_every=0, log_every=0)
    save_figures(options, "engine", figures | {"resume_same_bits": is_resumed_alike(short)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
