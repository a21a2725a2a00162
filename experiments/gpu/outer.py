"""One outer step on the parameters of paper_150m: `OuterSGD` over `torch.optim.SGD(fused=True)`, on one GPU.

    python experiments/gpu/outer.py --out runs/gpu           one minute on one GPU

`outer.json`: `time_ratio` is that of an ordinary step, `measured_ratio` of one that also takes norms and cosine. All
take turns in one run; medians.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence

import torch
from torch import nn

from machine import arguments, config_of, save_figures, wait_for
from twophase.optim.outer_sgd import OuterSGD
from twophase.tasks.lm.step import drawn

ROUNDS = 30
RULE = {"lr": 0.7, "momentum": 0.9, "nesterov": True}


def main(words: Sequence[str] | None = None) -> int:
    """Measure, and write the file."""
    options = arguments(__doc__ or "", words)
    config = config_of(options)
    device = torch.device(config.device)
    params = list(drawn(config, config.model.vocabulary_size, 0).to(device).parameters())
    for p in params:
        p.grad = torch.randn_like(p)
    fused, ours = torch.optim.SGD(params, fused=True, **RULE), OuterSGD(params, **RULE)

    turns = {"fused": fused.step, "time": ours.step, "measured": lambda: ours.step(measure=True)}
    taken: dict[str, list[float]] = {name: [] for name in turns}
    for number in range(ROUNDS + 2):
        for name in reversed(turns) if number % 2 else turns:
            begin = wait_for(device)
            turns[name]()
            taken[name].append(wait_for(device) - begin)
    medians = {name: statistics.median(values[2:]) for name, values in taken.items()}
    figures = {f"{name}_ratio": medians[name] / medians["fused"] for name in turns if name != "fused"}
    sizes = {"parameters": sum(map(nn.Parameter.numel, params)), "fused_ms": 1e3 * medians["fused"]}
    save_figures(options, "outer", figures | sizes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
