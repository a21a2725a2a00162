"""How long a checkpoint stops training, in inner steps: one process, checkpoints between timed steps.

`pause_ratio` is the time that `Writer.save` keeps the training thread, over one inner step of all replicas; the rest of
the checkpoint is written by a thread meanwhile, and `during_ratio` is what a step takes then, over one without. The
first save of a process allocates the copies that later ones use again, and is shown apart. On a GPU (`--device cuda`)
the recipe's own batch is trained, without one a batch of 2 sequences of 128 tokens, which makes the steps short and the
ratio larger than any real one. Last line: one JSON object.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from bounds import finish
from twophase.diloco.communicator import SingleProcess
from twophase.recipes.pretraining import RECIPES
from twophase.tasks.lm.task import LanguageTask
from twophase.training.checkpoint import ENGINE, Writer, replica_file
from twophase.training.trainer import Trainer


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", choices=list(RECIPES), help="model (nano; on a GPU paper_150m)")
    parser.add_argument("--device", default="cpu", help="a torch device (cpu)")
    parser.add_argument("--saves", type=int, default=5, help="checkpoints after the first (5)")
    options = parser.parse_args()
    cuda = torch.device(options.device).type == "cuda"
    torch.set_num_threads(1)
    config = RECIPES[options.recipe or ("paper_150m" if cuda else "nano")]()
    data = replace(config.data, corpus="python", vocabulary="bytes", tokenizer="", validation_windows=16)
    if not cuda:
        data = replace(data, batch_size=2, sequence_length=128)
    compute = replace(config.compute, compile=cuda, precision=config.compute.precision if cuda else "float32")
    config = replace(config, data=data, compute=compute, device=options.device, inner_steps=1)
    run = Trainer(LanguageTask(config), config, SingleProcess())

    def step() -> float:
        begin = time.perf_counter()
        run.inner_step()
        run.synchronize()
        run.settle()  # waits for the device
        return time.perf_counter() - begin

    plain = [step() for _ in range(6)][2:]
    during: list[float] = []
    pauses: list[float] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        Writer(Path(folder), fingerprint="", keep=1, communicator=run.comm) as writer,
    ):
        for _ in range(options.saves + 1):
            begin = time.perf_counter()
            parts = {replica_file(replica.number): replica.state_dict() for replica in run.replicas}
            writer.save(run.done.step, parts | {ENGINE: run.engine.state_dict()}, {})
            if cuda:
                torch.cuda.synchronize()
            pauses.append(time.perf_counter() - begin)
            during.append(step())
            while list(Path(folder).glob(".writing-*")):  # nothing of the next pause is waiting for this write
                time.sleep(0.01)
            plain.append(step())
        size = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
    usual, first = statistics.median(plain), pauses.pop(0)
    pause, beside = statistics.median(pauses), statistics.median(during)
    print(f"checkpoint of {size / 1e6:.0f} MB; a step takes {usual * 1e3:.0f} ms, {beside * 1e3:.0f} ms during a write")
    print(f"a save stops training for {pause * 1e3:.0f} ms, the first one for {first * 1e3:.0f} ms")
    figures = {"pause_ratio": pause / usual, "first_pause_ratio": first / usual, "during_ratio": beside / usual}
    return finish(
        "checkpoint_gpu" if cuda else "checkpoint", {name: round(value, 4) for name, value in figures.items()}
    )


if __name__ == "__main__":
    sys.exit(main())
