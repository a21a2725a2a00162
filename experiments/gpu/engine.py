"""What rounds and checkpoints cost beside training of paper_150m, and that a killed run is resumed bit for bit.

    python experiments/gpu/engine.py --out runs/gpu           five minutes on one GPU

`engine.json`: at S = 1 and 16 tokens a second with the engine over those without, and its share of the time;
`resume_same_bits`; and for how many inner steps a checkpoint stops training.
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
from typing import Any

from machine import arguments, paper_150m, save_figures
from twophase.base.config import RunError
from twophase.experiments import train
from twophase.runs.folder import read_summary
from twophase.tasks.lm.config import TrainConfig
from twophase.training.checkpoint import latest_step

import engine_overhead  # isort: skip - machine names its folder
import storage  # isort: skip

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
            while kill and process.is_alive() and latest_step(folder / "checkpoint") is None:
                time.sleep(0.002)
            if kill:
                process.kill()
            process.join()
            if process.exitcode != (-signal.SIGKILL if kill else 0):
                raise RunError(f"a process of the run that is killed and resumed ended with status {process.exitcode}")
            ends.append(read_summary(folder) or {})
    return all(ends[0][name] == ends[2][name] for name in RESULT)


def main(words: Sequence[str] | None = None) -> int:
    """Measure, and write the files."""
    options = arguments(__doc__ or "", words)
    config = paper_150m(options)
    seconds, least, saves = (0.1, 1, 1) if options.tiny else (20.0, 4, 3)
    figures: dict[str, Any] = engine_overhead.measure(config, [1, 16], seconds, least)
    short = replace(
        config,
        data=replace(config.data, validation_windows=4),
        steps=400 if options.tiny else 12,
        inner_steps=4,
        outer=replace(config.outer, restart="2"),
        deterministic=True,
        checkpoint_every=1,
        evaluate_every=0,
        log_every=0,
    )
    figures["resume_same_bits"] = is_resumed_alike(short)
    figures |= storage.checkpointing(replace(config, inner_steps=1), saves)
    save_figures(options, "engine", figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
