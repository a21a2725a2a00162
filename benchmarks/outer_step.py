"""One outer step on 100M float32 parameters: `OuterSGD` against torch's own SGD, fused and foreach, in one run.

Once with a fixed restart period, and once with the policy `auto`, which has norms measured in every round before the
step and then takes its own. The pseudo-gradients shrink by a hundredth a round, as under a decaying inner learning
rate; for `auto, averaging` they do not, and it averages, as in every round whose pseudo-gradient is the largest so far:
then it writes a buffer that it has not read, which takes longer.

Time: medians of interleaved steps on the same parameters. Ours and fused take eight steps each a round, and exchange
their buffers after it, because where tensors lie in memory made up to an eighth of a difference. CPU time with one
thread, so that other programs count less, else wall time. `time_ratio`, `auto_ratio` and `averaging_ratio` are those of
the worse rule over `torch.optim.SGD(fused=True)`, the fastest that torch has; `foreach_ratio` is that over
`foreach=True`. Steps that restart, every third one, write the buffer twice: `time_ratio`
and `foreach_ratio` are of the others, and `restart_ratio` is of these. Memory: growth of the process's peak resident
set during the first step from a fresh process each (that is where buffers and scratch appear).
Last line: one JSON object.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

from bounds import finish
from twophase.optim.outer import BUFFER, OuterSGD

KINDS = {"heavy ball": False, "nesterov": True}
SHAPES = [(4096, 1024)] * 23 + [(1024, 1024)] * 3 + [(1024,)] * 400  # a transformer's mix: 100.0M parameters


def tensors() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator)
    return params


PERIOD = 3
AVERAGING = "auto, averaging"
OURS = {"ours": str(PERIOD), "auto": "auto", AVERAGING: "auto"}
RESTARTS = "at a restart"
SHRINK = 0.99  # of a pseudo-gradient from round to round
PAIRS = 8  # of ours and fused a round: single steps vary by a tenth, and their ratio is to be known to a hundredth


def build(name: str, params: list[torch.nn.Parameter], nesterov: bool) -> torch.optim.Optimizer:
    if name in OURS:
        return OuterSGD(params, lr=0.7, momentum=0.9, nesterov=nesterov, restart=OURS[name])
    return torch.optim.SGD(params, lr=0.7, momentum=0.9, nesterov=nesterov, **{name: True})


def peak_growth(name: str, nesterov: bool) -> int:
    """Bytes by which the peak resident set grows over three steps (run in a process of its own)."""
    torch.set_num_threads(1)
    optimizer = build(name, tensors(), nesterov)
    before = peak_resident()
    for _ in range(3):
        optimizer.step()
    return peak_resident() - before


def peak_in_process(name: str, nesterov: bool) -> int:
    """`peak_growth` in a process of its own."""
    command = [sys.executable, __file__, "--peak", name, str(int(nesterov))]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def peak_resident() -> int:
    """Peak resident bytes of this process (Linux; `ru_maxrss` would begin at the parent's peak)."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))


def times(nesterov: bool, rounds: int) -> dict[str, float]:
    """Median seconds a step of each, taken in turn on the same parameters."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    params = tensors()
    gradients = [p.grad for p in params if p.grad is not None]
    constant = [g.clone() for g in gradients]
    optimizers = {name: build(name, params, nesterov) for name in (*OURS, "fused", "foreach")}
    others = [name for name in optimizers if name not in ("ours", "fused")]
    turns = ["ours", "fused"] * PAIRS + others
    seconds: dict[str, list[float]] = {name: [] for name in optimizers}
    count = 0  # of our own steps
    for number in range(rounds + 2):
        torch._foreach_mul_(gradients, SHRINK)
        # Every second time the other way round: what a step finds in the cache depends on the one before it.
        for name in reversed(turns) if number % 2 else turns:
            for p, gradient in zip(params, constant if name == AVERAGING else gradients, strict=True):
                p.grad = gradient
            start = clock()
            optimizers[name].step()
            taken = clock() - start
            count += name == "ours"
            if number >= 2:  # the first steps allocate
                row = RESTARTS if name == "ours" and count % PERIOD == 0 else name
                seconds.setdefault(row, []).append(taken)
        for p in params:
            first, second = optimizers["ours"].state[p], optimizers["fused"].state[p]
            first[BUFFER], second[BUFFER] = second[BUFFER], first[BUFFER]
    return {name: statistics.median(values) for name, values in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30, help="timed rounds of all optimizers (default 30)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default 1)")
    parser.add_argument("--peak", nargs=2, metavar=("NAME", "NESTEROV"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak:
        print(peak_growth(options.peak[0], options.peak[1] == "1"))
        return
    torch.set_num_threads(options.threads)
    figures: dict[str, float] = {}
    count = sum(torch.Size(shape).numel() for shape in SHAPES)
    print(f"{count / 1e6:.1f}M float32 parameters in {len(SHAPES)} tensors, {options.threads} thread(s)")
    print(f"{'':18}{'s':>8}{'of fused':>10}{'of foreach':>12}{'MB':>8}")
    for kind, nesterov in KINDS.items():
        seconds = times(nesterov, options.rounds)
        peak = {name: peak_in_process(name, nesterov) for name in ("ours", "foreach")}
        print(kind)
        for name, value in seconds.items():
            memory = f"{peak[name] / 1e6:8.0f}" if name in peak else ""
            print(f"  {name:16}{value:8.3f}{value / seconds['fused']:10.2f}{value / seconds['foreach']:12.2f}{memory}")
        short = kind.replace(" ", "_")
        for figure, name, other in (
            ("time_ratio", "ours", "fused"),
            ("restart_ratio", RESTARTS, "fused"),
            ("auto_ratio", "auto", "fused"),
            ("averaging_ratio", AVERAGING, "fused"),
            ("foreach_ratio", "ours", "foreach"),
        ):
            figures[f"{figure}_{short}"] = round(seconds[name] / seconds[other], 3)
        figures[f"memory_ratio_{short}"] = round(peak["ours"] / peak["foreach"], 3)
    ratios = [f"{name}_ratio" for name in ("time", "restart", "auto", "averaging", "foreach", "memory")]
    worst = {ratio: max(value for name, value in figures.items() if name.startswith(ratio)) for ratio in ratios}
    sys.exit(finish("outer_step", worst | figures))


if __name__ == "__main__":
    main()
