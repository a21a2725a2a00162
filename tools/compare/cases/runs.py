"""Runs of the command and of Python, killed ones, sweeps, exports, and the demo in a short form."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from differences import near
from suite import HOME, Outer, case, digests, in_group

NESTEROV = Outer("nesterov")
SMALL = {
    "data__corpus": f"file:{HOME / 'text.txt'}",
    "data__sequence_length": 32,
    "data__batch_size": 4,
    "data__validation_windows": 32,
    "model__layers": 1,
    "model__hidden_size": 16,
    "model__intermediate_size": 40,
    "steps": 48,
    "inner_steps": 4,
    "inner__schedule": "cosine",
    "evaluate_every": 3,
    "checkpoint_every": 2,
}
OTHER = {name: SMALL[name] for name in ("steps", "inner_steps", "inner__schedule", "evaluate_every")}
"""The same for tasks without a text."""
DEMO_STEPS = 64
"""Of 960, so that a restart after the third round still counts."""

DEMO = 0.02
"""Relative tolerance of the whole demo's perplexities."""


def in_folder(work: Callable[[Any, Path], Any]) -> Callable[[Any], Any]:
    """Give a case a folder that is removed afterwards."""

    def run(api: Any) -> Any:
        with tempfile.TemporaryDirectory() as folder:
            return work(api, Path(folder))

    return run


def content(api: Any, out: Path) -> dict[str, Any]:
    """Return a run's weights and records."""
    rounds, metrics, summary = api.lines(out)
    weights = digests(load_file(out / "weights.safetensors"))
    return {"summary": summary, "metrics": metrics, "rounds": rounds, "weights": weights}


def run(api: Any, folder: Path, task: str, outer: Outer, restart: str, **values: Any) -> dict[str, Any]:
    """Train a run from Python."""
    base = SMALL if task == "lm" else OTHER
    api.train(task, api.config(outer, restart, **{**base, **values}), folder / "run")
    return content(api, folder / "run")


SYNC = {"replicas": 3, "sync__fragments": ["2"], "sync__delay": 1, "sync__mixing": 0.5}
RUNS: dict[str, tuple[Any, ...]] = {
    "lm, nesterov, 3": ("lm", NESTEROV, "3"),
    "lm, heavy ball, ema, soft, 3 replicas, 2 fragments, delay, mixing": (
        "lm", Outer("heavy-ball", 1.0, 0.9, "ema"), "soft:3:0.2:0.1", SYNC,
    ),
    "lm, auto": ("lm", NESTEROV, "auto"),
    "lm, averaging, filter orthogonal, schedule linear": (
        "lm", Outer("averaging", 1.0, filter="orthogonal", schedule="linear:2"), "never",
    ),
    "lm, nesterov, schedule momentum": ("lm", replace(NESTEROV, schedule="momentum:0"), "cycle:2,3"),
    "lm, inner wsd, clipped, bytes": (
        "lm", NESTEROV, "never", {"inner__schedule": "wsd", "inner__clip_norm": 0.5, "data__vocabulary": "bytes"},
    ),
    "lm, inner muon": ("lm", NESTEROV, "never", {"inner__method": "muon", "inner__lr": 0.01}),
    "lm, bf16-mixed, tied, grouped queries, micro-batches": (
        "lm", NESTEROV, "never",
        {
            "compute__precision": "bf16-mixed", "compute__micro_batch": 2,
            "model__tie_embeddings": True, "model__kv_heads": 1,
        },
    ),
    "lm, replicas with their own texts": ("lm", NESTEROV, "at:3", {"data__split": "non-iid"}),
    "lm, fragments by name, with their restarts": (
        "lm", NESTEROV, "never",
        {"sync__fragments": ["ends=embedding|head", "blocks=."], "sync__restart": ["ends=2", "blocks=soft:3:0.2:0.1"]},
    ),
    "lm, diverged": ("lm", NESTEROV, "never", {"inner__method": "sgd", "inner__lr": 900.0}),
    "digits, nesterov, 3": ("digits", NESTEROV, "3"),
    "digits, inner sgd": ("digits", NESTEROV, "never", {"inner__method": "sgd", "inner__lr": 0.05, "seed": 3}),
    "own task": (f"{HOME / 'old' / 'examples' / 'rings.py'}:Rings", NESTEROV, "3", {"task__width": 16}),
}  # fmt: skip
for name, (task, outer, restart, *values) in RUNS.items():
    others = values[0] if values else {}
    case(f"run {name}", in_folder(partial(run, task=task, outer=outer, restart=restart, **others)))


def exported(api: Any, folder: Path) -> dict[str, Any]:
    """Export a run, and train the exported model as a model of transformers."""
    run(api, folder, "lm", NESTEROV, "3")
    api.export(folder / "run", folder / "model")
    settings = json.loads((folder / "model" / "config.json").read_text(encoding="utf-8"))
    del settings["transformers_version"]
    tokenizer = sha256((folder / "model" / "tokenizer.json").read_bytes()).hexdigest()
    values = {"task__corpus": SMALL["data__corpus"], "task__vocabulary": "char", "task__sequence_length": 16}
    api.train(f"hf:{folder / 'model'}", api.config(NESTEROV, "3", **OTHER, **values, task__weights=True), folder / "hf")
    weights = digests(load_file(folder / "model" / "model.safetensors"))
    return {"weights": weights, "config": settings, "tokenizer": tokenizer, "hf": content(api, folder / "hf")}


case("export, and a run of hf:MODEL", in_folder(exported))


def killed(api: Any, folder: Path, outer: Outer, restart: str, **values: Any) -> dict[str, Any]:
    """Kill a run twice and repeat it each time; its end must be that of the run left alone."""
    config = api.config(outer, restart, **SMALL | {"steps": 96, "checkpoint_every": 3} | values)
    api.train("lm", config, folder / "whole")
    out = folder / "killed"
    for rounds in (7, 16):
        child = os.fork()
        if not child:
            api.train("lm", config, out)
            os._exit(0)
        while not (out / "metrics.jsonl").exists() or (out / "metrics.jsonl").read_bytes().count(b"\n") < rounds:
            if os.waitpid(child, os.WNOHANG) != (0, 0):
                raise RuntimeError("the run ended before it could be killed")
            time.sleep(0.001)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    was_killed = not (out / "summary.json").exists()
    api.train("lm", config, out)
    whole, resumed = content(api, folder / "whole"), content(api, out)
    return {"was killed": was_killed, "ends as the whole": whole == resumed, "whole": whole}


case("killed nesterov, 3", in_folder(partial(killed, outer=NESTEROV, restart="3")))
case("killed auto", in_folder(partial(killed, outer=NESTEROV, restart="auto")))
streamed = partial(killed, outer=Outer("heavy-ball", 1.0, 0.9, "ema"), restart="soft:3:0.2:0.1", **SYNC)
case("killed heavy ball, ema, soft, 2 fragments, delay, mixing", in_folder(streamed))


def command(api: Any, folder: Path) -> dict[str, Any]:
    """Train by the command, from Python, and from Python in two processes."""
    config = api.config(NESTEROV, "cycle:2,3", **SMALL, sync__fragments="2")
    words = ["-m", "twophase", "train", *api.words(config), "--out", folder / "command"]
    done = subprocess.run([sys.executable, *words], check=False, capture_output=True, text=True, timeout=200)
    if done.returncode:
        raise RuntimeError(done.stderr.splitlines()[-1])
    config |= {"sync.fragments": ["2"]}
    api.train("lm", config, folder / "one")
    in_group(2, lambda _: api.train("lm", config, folder / "two"), join=False)
    one, two, said = (content(api, folder / out) for out in ("one", "two", "command"))
    return {"weights alike": said["weights"] == one["weights"] == two["weights"], "command": said, "two": two}


case("command, Python, and two processes", in_folder(command))

# --------------------------------------------------------------------------------------------------------- sweeps

AXES = {"outer.lr": [0.3, 0.7, 1.1], "outer.momentum": [0.5, 0.9], "outer.restart": ["never", "3"], "seed": [0, 1]}


def swept(api: Any, folder: Path, task: str, axes: dict[str, Any], **values: Any) -> dict[str, Any]:
    """Run a sweep with controls; one of its cells alone must end alike."""
    config = api.config(NESTEROV, "never", **values)
    shared = {path: value for path, value in config.items() if path not in axes}
    api.sweep(task, axes, shared, folder / "sweep")
    cells = api.cells(folder / "sweep" / "cells.csv")
    last = {path: list(v[-1]) if isinstance(v[-1], tuple) else v[-1] for path, v in axes.items()}
    api.train(task, {**config, **last}, folder / "alone")
    loss = repr(api.lines(folder / "alone")[2]["validation_loss"])
    alike = [cell for cell in cells.values() if cell["validation_loss"] == loss]
    return {"cells": cells, "alone as in the sweep": len(alike)}


digits = partial(swept, task="digits", axes=AXES, **OTHER | {"steps": 24})
case("sweep of 24 cells, two seeds, controls", in_folder(digits))
texts = partial(swept, task="lm", axes={"outer.restart": ["never", "auto", "cycle:2,3", "soft:3:0.2:0.1"]}, **SMALL)
case("sweep of policies", in_folder(texts))
parted = partial(swept, task="lm", axes={"sync.fragments": [("1",), ("2",)], "outer.restart": ["never", "3"]}, **SMALL)
case("sweep of fragments", in_folder(parted))


def short_demo(api: Any, folder: Path) -> dict[str, Any]:
    """Train the demo's 83 cells for a few rounds."""
    plan = api.demo(folder / "demo", DEMO_STEPS)
    return {"plan": plan, "cells": api.cells(folder / "demo" / "cells.csv")}


case("demo, 83 cells, short", in_folder(short_demo))


def whole_demo(api: Any, folder: Path) -> dict[str, Any]:
    """Train the demo as the command does; the stored cells are of another processor, and without `auto`."""
    cells = api.whole_demo(folder / "demo").items()
    return {
        key: [cell["state"], near(float(cell["perplexity"] or "nan"), DEMO)]
        for key, cell in cells
        if not key.startswith("auto")
    }


case("demo, 83 cells, whole", in_folder(whole_demo))
