"""What the scripts of this folder share: their options, the model that they take, a clock, and the files they write."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from twophase.files import write_atomic
from twophase.recipes.pretraining import paper_150m
from twophase.tasks.lm.config import DataConfig, ModelConfig, TrainConfig

Call = Callable[[], object]


def arguments(doc: str, words: Sequence[str] | None) -> argparse.Namespace:
    """Read the options that every script has; ends with status 2 and one line where there is no GPU."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="folder of the results (runs/gpu)")
    parser.add_argument("--tiny", action="store_true", help="a toy model on a CPU, to try the script")
    options = parser.parse_args(words)
    if not (options.tiny or torch.cuda.is_available()):
        print(f"{Path(sys.argv[0]).name}: torch finds no GPU here; --tiny tries it with a toy", file=sys.stderr)
        raise SystemExit(2)
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    return options


def config_of(options: argparse.Namespace) -> TrainConfig:
    """Return the recipe of the paper's model on the running Python's documentation, or a toy in its place."""
    config = paper_150m()
    data = replace(config.data, corpus="python", tokenizer="", vocabulary="bytes", validation_windows=4)
    config = replace(config, data=data, repeat=True)
    if not options.tiny:
        return config
    text = f"file:{Path(__file__).parents[2] / 'README.md'}"
    data = DataConfig(text, sequence_length=32, batch_size=4, validation_windows=4, vocabulary="bytes")
    model = ModelConfig(layers=1, hidden_size=32, intermediate_size=88, heads=2, vocabulary_size=256)
    compute = replace(config.compute, precision="float32", compile=False)
    return replace(config, model=model, data=data, compute=compute, device="cpu")


def wait_for(device: torch.device) -> float:
    """Return seconds since some time, after all launched work; on a CPU, less what other programs take."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return time.perf_counter()
    return time.process_time()


def seconds_of(call: Call, seconds: float, device: torch.device) -> float:
    """Return seconds of one call, repeated for some seconds after two that do not count."""
    call()
    call()
    repeats = 1
    while True:
        begin = wait_for(device)
        for _ in range(repeats):
            call()
        elapsed = wait_for(device) - begin
        if elapsed >= seconds:
            return elapsed / repeats
        repeats = math.ceil(repeats * min(10.0, 1.1 * seconds / max(elapsed, 1e-9)))


def save_rows(options: argparse.Namespace, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows as a csv file, and print them."""
    text = pd.DataFrame(rows).to_csv(index=False, float_format="%.12g", lineterminator="\n")
    write_atomic(options.out / f"{name}.csv", text)
    print(options.out / f"{name}.csv", text, sep="\n", flush=True)


def save_figures(options: argparse.Namespace, name: str, figures: Mapping[str, Any]) -> None:
    """Write figures as a JSON file with date, device and versions, and print them."""
    device = "CPU" if options.tiny else torch.cuda.get_device_name()
    about = {"date": time.strftime("%Y-%m-%d %H:%M"), "device": device, "torch": torch.__version__}
    text = json.dumps({**figures, **about, "cuda": torch.version.cuda}, indent=1)
    write_atomic(options.out / f"{name}.json", text + "\n")
    print(options.out / f"{name}.json", text, sep="\n", flush=True)
