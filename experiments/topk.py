"""Does a model train as well where only the largest elements of a pseudo-gradient are sent, each in two bits?

A replica adds its pseudo-gradient to what it has not sent yet, e <- DECAY e + g, and sends the largest of every BLOCK
elements of e: place, sign, and whether the magnitude is nearer to the least or to the largest one sent of the block.
The rest stays in e, the error feedback. The outer step is plain averaging, x <- x - mean of what was sent.

    python experiments/topk.py                 half a minute on one core

Source: SparseLoCo (arXiv 2508.15706), in which lr is 1 and the outer momentum 0. Two replicas train the classifier of
the task `digits`, one after the other in this process; all runs of a seed see the same weights and batches.
"""

from __future__ import annotations

import math
import statistics

import pandas as pd
import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from common import script, show
from twophase.compare.compare import compare
from twophase.tasks.digits import Digits

BLOCK, DECAY = 512, 0.95
METHODS: dict[str, tuple[int, bool]] = {
    "float32": (0, False),
    "1 of 8": (8, True),
    "1 of 32": (32, True),
    "1 of 128": (128, True),
    "1 of 32, no feedback": (32, False),
}
"""Elements for each one that is sent (0 sends all as they are), and whether there is error feedback."""
REPLICAS, INNER_STEPS, LR = 2, 8, 2e-3
SEEDS, ROUNDS = range(3), 60


def top_k(values: Tensor, ratio: int) -> Tensor:
    """Return what arrives of a vector: in each block the largest of every `ratio` elements in 2 bits, 0 elsewhere.

    Shape (n,) as `values`. The last block is filled up with zeros.
    """
    blocks = torch.nn.functional.pad(values, (0, -len(values) % BLOCK)).view(-1, BLOCK)
    magnitudes, places = blocks.abs().topk(BLOCK // ratio, dim=1)
    largest, least = magnitudes[:, :1], magnitudes[:, -1:]
    levels = torch.where(2 * magnitudes > least + largest, largest, least)
    sent = torch.zeros_like(blocks).scatter(1, places, levels * blocks.gather(1, places).sign())
    return sent.flatten()[: len(values)]


def sent_bytes(elements: int, ratio: int) -> float:
    """Return the bytes that a replica sends a round: places of 9 bits and values of 2, and two float32 a block."""
    if ratio == 0:
        return 4.0 * elements
    return math.ceil(elements / BLOCK) * (8 + BLOCK // ratio * (math.log2(BLOCK) + 2) / 8)


def train(seed: int, rounds: int, ratio: int, *, feedback: bool) -> float:
    """Train the replicas; return the held-out loss of the anchor in nats an image."""
    task = Digits()
    models = [task.model(seed) for _ in range(REPLICAS)]
    inners = [torch.optim.AdamW(model.parameters(), lr=LR) for model in models]
    anchor = parameters_to_vector(models[0].parameters()).detach().clone()
    unsent = [torch.zeros_like(anchor) for _ in models]
    for number in range(rounds):
        total = torch.zeros_like(anchor)
        for replica, (model, inner) in enumerate(zip(models, inners, strict=True)):
            for step in range(number * INNER_STEPS, (number + 1) * INNER_STEPS):
                images, digits = map(torch.from_numpy, task.batch(seed, step, replica))
                task.loss(model, (images, digits)).backward()
                inner.step()
                inner.zero_grad()
            g = anchor - parameters_to_vector(model.parameters()).detach()
            if ratio:
                owed = DECAY * unsent[replica] + g if feedback else g
                g = top_k(owed, ratio)
                unsent[replica] = owed - g
            total += g
        anchor -= total / REPLICAS
        for model in models:
            vector_to_parameters(anchor.clone(), model.parameters())
    with torch.no_grad():
        return task.evaluate(models[0])["loss"]


def table() -> pd.DataFrame:
    """Train every method over the seeds; return a row each, its loss compared with float32's of the same seeds."""
    torch.set_num_threads(1)
    elements = sum(parameter.numel() for parameter in Digits().model(0).parameters())
    losses = {
        name: {seed: train(seed, ROUNDS, ratio, feedback=feedback) for seed in SEEDS}
        for name, (ratio, feedback) in METHODS.items()
    }
    rows = []
    for name, (ratio, _) in METHODS.items():
        found = compare(losses[name], losses["float32"], comparisons=len(METHODS) - 1)
        share = sent_bytes(elements, ratio) / sent_bytes(elements, 0)
        rows.append(
            {"sent": name, "bytes": share, "loss": statistics.fmean(losses[name].values())}
            | {"word": found.word, "ratio": found.ratio, "low": found.low, "high": found.high}
        )
    return pd.DataFrame(rows)


if __name__ == "__main__":
    script(__doc__, "topk", lambda _: {}, table, report=lambda found: show(found, digits=3))
