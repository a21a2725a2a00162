"""Text, batches and checkpoints: does preparing need more memory for more text, and how long do disks stop training?

* `peak_memory_ratio`: peak memory of `twophase data prepare` over that for an eighth of the text, in C4's schema.
* `loader_share_of_copying`: tokens a second of CPU time of `Corpus.batch` in shuffled windows of 2048 tokens over those
  of the least that any loader must do, copying consecutive tokens into two int64 arrays; both in turn, from the cache.
* `pause_ratio`: time that `Checkpointer.save` keeps the training thread, over an inner step of all replicas; a thread
  writes the rest, and a step meanwhile takes `during_ratio` of one without. The recipe's batch is cut to 2 x 128
  tokens, which makes steps shorter, and the ratio larger, than any real one.

The text is the documentation of the Python that runs this. Last line: one JSON object.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import pydoc_data.topics
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from bounds import finish
from twophase.diloco.group import SingleProcess
from twophase.recipes.pretraining import RECIPES
from twophase.tasks.lm.config import DataConfig, TrainConfig
from twophase.tasks.lm.data import build
from twophase.tasks.lm.task import LanguageTask
from twophase.training.checkpoint import Checkpointer
from twophase.training.trainer import Trainer

PREPARE = """
import sys, time
from pathlib import Path
from twophase.text.prepare import Request, prepare
prepare(Request((sys.argv[1],), sys.argv[2], sys.argv[3], quiet=True))
status = Path("/proc/self/status").read_text()
print(time.process_time(), status.partition("VmHWM:")[2].split()[0])
"""
"""Prints CPU seconds and peak kB (Linux; `ru_maxrss` would begin at the parent's peak)."""
TOKENIZERS = ("mistral", "bytes")
BATCH, LENGTH = 64, 2048


def write_text(path: Path, megabytes: float, seed: int) -> None:
    """Write a packed file of documents of about 2 kB."""
    source = random.Random(seed)
    paragraphs = [p for text in pydoc_data.topics.topics.values() for p in text.split("\n\n") if p.strip()]
    size = 0
    with gzip.open(path, "wt", encoding="utf-8", compresslevel=1) as file:
        while size < megabytes * 1e6:
            text = "\n".join(source.choice(paragraphs) for _ in range(source.randint(1, 12)))
            size += len(text.encode())
            file.write(json.dumps({"text": text}) + "\n")


def preparing(base: Path, megabytes: float) -> dict[str, float]:
    """Prepare text and an eighth of it with each tokenizer; leaves the tokens in `large-bytes`."""
    figures = {"peak_memory_ratio": 0.0}
    for name, files in {"small": 1, "large": 8}.items():
        (base / name).mkdir()
        for number in range(files):
            write_text(base / name / f"c4-train.{number:05d}-of-00008.json.gz", megabytes / 8, number)
    environment = os.environ | {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    for tokenizer in TOKENIZERS:
        measured = []
        for name in ("small", "large"):
            words = [sys.executable, "-c", PREPARE, str(base / name), str(base / f"{name}-{tokenizer}"), tokenizer]
            said = subprocess.run(words, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
            measured.append([float(word) for word in said.split()])
        (start, eighth), (slow, peak) = measured
        speed = megabytes * 7 / 8 / (slow - start)  # of the difference: imports do not enter
        print(f"{tokenizer}: {speed:.1f} MB/s a core, peak {peak / 1e3:.0f} MB, at an eighth {eighth / 1e3:.0f} MB")
        figures["peak_memory_ratio"] = max(figures["peak_memory_ratio"], peak / eighth)
        figures[f"{tokenizer}_mb_per_second_per_core"] = speed
    return figures


def loading(folder: Path, repeats: int = 5) -> dict[str, float]:
    """Read a folder of tokens in batches."""
    data = DataConfig(f"tokens:{folder}", sequence_length=LENGTH, batch_size=BATCH, validation_windows=1)
    corpus, tokens = build(data, 2, 0), BATCH * LENGTH
    flat = np.fromfile(folder / "train-00000.bin", np.uint16)
    steps = range(min(corpus.windows_per_replica // BATCH, (len(flat) - 1) // tokens))

    def copied(step: int) -> object:
        part = flat[step * tokens : (step + 1) * tokens + 1]
        return part[:-1].astype(np.int64), part[1:].astype(np.int64)

    def rate(batch: Callable[[int], object]) -> float:
        begin = time.process_time()
        for step in steps:
            batch(step)
        return len(steps) * tokens / (time.process_time() - begin)

    # Another replica and seed each time, so that no order is remembered; the first time fills the page cache.
    pairs = [(rate(lambda s, n=n: corpus.batch(n, s, n % 2)), rate(copied)) for n in range(repeats + 1)][1:]
    loader, copying = (statistics.median(values) for values in zip(*pairs, strict=True))
    print(f"loader {loader / 1e6:.1f} M tokens/s, copying {copying / 1e6:.1f}")
    return {"loader_share_of_copying": loader / copying, "loader_tokens_per_second": loader}


def checkpointing(config: TrainConfig, saves: int) -> dict[str, float]:
    """Save checkpoints between timed steps; the first save also allocates memory that later ones use again."""
    run = Trainer(LanguageTask(config), config, SingleProcess())

    def step() -> float:
        begin = time.perf_counter()
        run.inner_step()
        run.synchronize()
        run.read_losses()  # waits for the device
        return time.perf_counter() - begin

    plain = [step() for _ in range(6)][2:]
    during: list[float] = []
    pauses: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        checkpointer = Checkpointer(Path(folder), SingleProcess(), keep=1)
        for _ in range(saves + 1):
            begin = time.perf_counter()
            checkpointer.save(run.done.step, run.parts(), run.progress())
            pauses.append(time.perf_counter() - begin)
            during.append(step())
            checkpointer.close()  # nothing of the next pause is waiting for this write
            plain.append(step())
    usual, first, pause = statistics.median(plain), pauses[0], statistics.median(pauses[1:])
    print(
        f"a step takes {1e3 * usual:.0f} ms; a save stops it for {1e3 * pause:.0f} ms, the first {1e3 * first:.0f} ms"
    )
    ratios = {"pause_ratio": pause, "first_pause_ratio": first, "during_ratio": statistics.median(during)}
    return {name: seconds / usual for name, seconds in ratios.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=12, help="text (12)")
    parser.add_argument("--saves", type=int, default=5, help="checkpoints after the first (5)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        figures = preparing(Path(scratch), options.megabytes) | loading(Path(scratch) / "large-bytes")
    config = RECIPES["nano"]()
    data = replace(config.data, corpus="python", vocabulary="bytes", tokenizer="", validation_windows=16)
    data = replace(data, batch_size=2, sequence_length=128)
    compute = replace(config.compute, compile=False, precision="float32")
    config = replace(config, data=data, compute=compute, device="cpu", inner_steps=1)
    figures |= checkpointing(config, options.saves)
    return finish("storage", {name: round(value, 4) for name, value in figures.items()})


if __name__ == "__main__":
    sys.exit(main())
