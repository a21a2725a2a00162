"""What the scripts of this folder share: their options, the model that they take, and the files that they write."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from twophase.base.files import table_text, write_atomic
from twophase.recipes.pretraining import RECIPES
from twophase.sweeps.table import format_table
from twophase.tasks.lm.config import DataConfig, ModelConfig, TrainConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))  # its timers and contestants


def arguments(doc: str, words: Sequence[str] | None, *, redraws: bool = False) -> argparse.Namespace:
    """Read the options that every script has; ends with status 2 and one line where there is no GPU.

    Args:
        doc: the script's docstring.
        words: of the command line; None takes those of this process.
        redraws: add `--redraw`, which needs no GPU.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="folder of the results (runs/gpu)")
    parser.add_argument("--corpus", default="python", help="python, file:PATH or tokens:FOLDER (python)")
    parser.add_argument("--tiny", action="store_true", help="a toy model on a CPU, to try the script")
    parser.set_defaults(redraw=False)
    if redraws:
        parser.add_argument("--redraw", action="store_true", help="draw the stored curve, measure nothing")
    options = parser.parse_args(words)
    if not (options.tiny or options.redraw or torch.cuda.is_available()):
        print(f"{Path(sys.argv[0]).name}: torch finds no GPU here; --tiny tries it with a toy", file=sys.stderr)
        raise SystemExit(2)
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    return options


def paper_150m(options: argparse.Namespace) -> TrainConfig:
    """Return the recipe of the paper's model on the corpus that was asked for, or a toy in its place."""
    config = RECIPES["paper_150m"]()
    vocabulary = config.data.vocabulary if options.corpus.startswith("tokens:") else "bytes"
    config = replace(config, data=replace(config.data, corpus=options.corpus, tokenizer="", vocabulary=vocabulary))
    config = replace(config, repeat=True)
    if not options.tiny:
        return config
    data = DataConfig(options.corpus, sequence_length=32, batch_size=4, validation_windows=4, vocabulary=vocabulary)
    model = ModelConfig(layers=1, hidden_size=32, intermediate_size=88, heads=2, vocabulary_size=256)
    compute = replace(config.compute, precision="float32", compile=False)
    return replace(config, model=model, data=data, compute=compute, device="cpu")


def save_rows(options: argparse.Namespace, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows as a csv file, and print them."""
    path = options.out / f"{name}.csv"
    write_atomic(path, table_text(rows))
    columns = list(dict.fromkeys(column for row in rows for column in row))
    table = format_table(columns, [[_short(row.get(column)) for column in columns] for row in rows])
    print(path, table, sep="\n", flush=True)


def _short(value: Any) -> Any:
    return f"{value:.4g}" if isinstance(value, float) else value if value is None else str(value)[:60]


def save_figures(options: argparse.Namespace, name: str, figures: Mapping[str, Any]) -> None:
    """Write figures as a JSON file with date, device and versions, and print them."""
    device = "CPU" if options.tiny else torch.cuda.get_device_name()
    about = {"date": time.strftime("%Y-%m-%d %H:%M"), "device": device, "torch": torch.__version__}
    text = json.dumps({**figures, **about, "cuda": torch.version.cuda}, indent=1)
    write_atomic(options.out / f"{name}.json", text + "\n")
    print(options.out / f"{name}.json", text, sep="\n", flush=True)
