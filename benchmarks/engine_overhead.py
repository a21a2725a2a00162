"""What the engine costs: its own time as a share of training the demo's model, at several inner steps a round.

The engine's time is everything that is not forward, backward and inner optimizer: pseudo-gradient, outer step with
its norms, restoring the replicas, checksum, report. Both are taken in the same loop, as CPU time of this process, so
that other programs on the machine do not enter. Last line: one JSON object of shares.
"""

from __future__ import annotations

import argparse
import json
import time

import torch

from twophase.diloco.engine import DiLoCo
from twophase.lm.config import TrainConfig
from twophase.lm.trainer import Replica, preflight
from twophase.restart import Periodic


def share(inner_steps: int, steps: int) -> tuple[float, float]:
    """The engine's share of the CPU time, and milliseconds a round."""
    config = TrainConfig()
    corpus, device = preflight(config)
    replicas = [Replica(config, number, corpus, device) for number in range(config.replicas)]
    engine = DiLoCo(
        [replica.model for replica in replicas], config.outer.rule(), restart=Periodic(3), inner_steps=inner_steps
    )
    warmup = max(16, inner_steps)
    own = whole = 0.0
    rounds = 0
    for step in range(warmup + steps):
        begin = time.process_time()
        for replica in replicas:
            replica.step(step, config.inner.lr)
        before = time.process_time()
        report = engine.step()
        end = time.process_time()
        if step >= warmup:
            own += end - before
            whole += end - begin
            rounds += report is not None
    return own / whole, 1e3 * own / max(rounds, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=512, help="inner steps measured for each (default 512)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    figures: dict[str, float] = {}
    print(f"{'S':>4}{'share':>10}{'ms a round':>12}")
    for inner_steps in (1, 16, 128):
        fraction, milliseconds = share(inner_steps, options.steps)
        print(f"{inner_steps:4}{fraction:10.2%}{milliseconds:12.2f}")
        figures[f"engine_share_s{inner_steps}"] = round(fraction, 5)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
