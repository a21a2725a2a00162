"""Tokens a second that the loader reads on one core: CPU time of `Corpus.batch`, the file in the page cache.

A file of random uint16 ids is made and read in shuffled windows of 2048 and 256 tokens, 64 a batch, one batch after the
other as a training run asks for them. Beside them, taken in turn: the least that any loader must do, copying a batch of
consecutive tokens into two int64 arrays. Last line: one JSON object; `loader_tokens_per_second` is the smaller of the
two lengths'.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from bounds import finish
from twophase.tasks.lm.config import DataConfig
from twophase.tasks.lm.corpus import build
from twophase.text.meta import TOKEN_BYTES, TRAIN, VALIDATION, Meta, Shard, write_meta

VOCABULARY = 32768
BATCH = 64


def make(folder: Path, size_bytes: int) -> None:
    """A folder of one training shard of `size_bytes` and a small validation shard."""
    random = np.random.default_rng(0)
    splits = {}
    for split, tokens in ((TRAIN, size_bytes // 2), (VALIDATION, 1 << 16)):
        ids = random.integers(0, VOCABULARY, tokens, dtype=np.uint16)
        path = folder / f"{split}-00000.bin"
        ids.tofile(path)
        sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
        splits[split] = (Shard(path.name, tokens, 1, tokens, int(ids.max()), sha256),)
    np.save(folder / TOKEN_BYTES, np.ones(VOCABULARY, np.int64))
    write_meta(folder, Meta("random", "0" * 64, VOCABULARY, 0, "uint16", {}, splits))


def rate(batch: Callable[[int], object], steps: range, tokens: int) -> float:
    """Tokens a second of CPU time over some steps of `tokens` each."""
    begin = time.process_time()
    for step in steps:
        batch(step)
    return len(steps) * tokens / (time.process_time() - begin)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=100, help="size of the training shard (default 100)")
    parser.add_argument(
        "--repeats", type=int, default=5, help="measurements, of which the median is printed (default 5)"
    )
    options = parser.parse_args()
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        make(Path(name), options.megabytes * 10**6)
        begin = time.process_time()
        build(DataConfig(corpus=f"tokens:{name}", validation_windows=1), 2, 0)
        figures["hash_megabytes_per_second"] = round(options.megabytes / (time.process_time() - begin))
        flat = np.fromfile(Path(name) / "train-00000.bin", np.uint16)
        print(f"{'T':>6}{'loader M tok/s':>16}{'copying M tok/s':>17}{'share':>8}")
        for length in (2048, 256):
            data = DataConfig(f"tokens:{name}", sequence_length=length, batch_size=BATCH, validation_windows=1)
            corpus = build(data, 2, 0)
            tokens, steps = BATCH * length, corpus.windows_per_replica // BATCH

            def least(step: int, tokens: int = tokens) -> object:
                part = flat[step * tokens : (step + 1) * tokens + 1]
                return part[:-1].astype(np.int64), part[1:].astype(np.int64)

            taken: dict[str, list[float]] = {"loader": [], "copy": []}
            for number in range(options.repeats + 1):
                # Another replica and seed each time, so that no order is remembered from the time before.
                loader = rate(lambda s, c=corpus, n=number: c.batch(n, s, n % 2), range(steps), tokens)
                copying = rate(least, range(steps), tokens)
                if number:  # the first round fills the page cache
                    taken["loader"].append(loader)
                    taken["copy"].append(copying)
            loader, copying = (statistics.median(values) for values in taken.values())
            print(f"{length:6}{loader / 1e6:16.1f}{copying / 1e6:17.1f}{loader / copying:8.2f}")
            figures[f"share_of_copying_t{length}"] = round(loader / copying, 3)
            figures[f"tokens_per_second_t{length}"] = round(loader)
    figures["loader_tokens_per_second"] = min(figures["tokens_per_second_t2048"], figures["tokens_per_second_t256"])
    return finish("loader", figures)


if __name__ == "__main__":
    sys.exit(main())
