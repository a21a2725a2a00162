"""One outer step on 30M float32 parameters in 1 and in 200 tensors: `OuterSGD` over `torch.optim.SGD(fused=True)`.

`time_ratio` is that of an ordinary step, `measured_ratio` of one that also takes norms and cosine, `auto_ratio` of the
policy `auto`, which needs norms. All take turns in one run, and ours and fused exchange their buffers after each turn:
where tensors lie in memory makes up to an eighth of a difference. The ratios are those of medians of CPU time with one
thread, of the worse rule. Steps that restart, every tenth, are left out. Last line: one JSON object.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch

from bounds import finish
from twophase.optim.outer_sgd import BUFFER, OuterSGD

PARAMETERS = 30_000_000


def seconds_of_steps(
    params: list[torch.nn.Parameter], *, nesterov: bool, rounds: int, clock: Callable[[], float] = time.process_time
) -> dict[str, float]:
    """Median seconds of a step of each optimizer, on the same parameters, by a clock that waits for the device."""
    for p in params:
        p.grad = torch.randn_like(p)
    rule = {"lr": 0.7, "momentum": 0.9, "nesterov": nesterov}
    fused = torch.optim.SGD(params, fused=True, **rule)
    ours = OuterSGD(params, restart=10, **rule)
    auto = OuterSGD(params, 1.0, restart="auto")
    turns = {"fused": fused.step, "time": ours.step, "measured": lambda: ours.step(measure=True), "auto": auto.step}
    taken: dict[str, list[float]] = {name: [] for name in turns}
    for number in range(rounds + 2):
        for name in reversed(turns) if number % 2 else turns:
            start = clock()
            turns[name]()
            end = clock()
            if number >= 2 and not (name in ("time", "measured") and ours.param_groups[0]["rounds_since_restart"] == 0):
                taken[name].append(end - start)
            torch._foreach_mul_([p.grad for p in params if p.grad is not None], 0.99)
        for p in params:
            ours.state[p][BUFFER], fused.state[p][BUFFER] = fused.state[p][BUFFER], ours.state[p][BUFFER]
    return {name: statistics.median(values) for name, values in taken.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="timed turns of all optimizers (default 20)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    figures: dict[str, float] = {}
    print(f"{PARAMETERS / 1e6:.0f}M float32 parameters, ms a step and its ratio to torch.optim.SGD(fused=True)")
    for count in (1, 200):
        for kind, nesterov in (("heavy ball", False), ("Nesterov", True)):
            params = [torch.nn.Parameter(torch.randn(PARAMETERS // count // 16 * 16)) for _ in range(count)]
            times = seconds_of_steps(params, nesterov=nesterov, rounds=options.rounds)
            for name, value in times.items():
                ratio = value / times["fused"]
                print(f"{count:4} tensors  {kind:12}{name:10}{1e3 * value:8.2f}{ratio:8.2f}")
                figure = f"{name}_ratio_{count}"
                if name != "fused":
                    figures[figure] = round(max(ratio, figures.get(figure, 0.0)), 3)
    return finish("outer_step", figures)


if __name__ == "__main__":
    sys.exit(main())
