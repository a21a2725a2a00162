"""The table of restart factors beside the plain recurrence in NumPy, in one run.

Time: CPU time of one thread, medians of tables taken in turn. `plain` is what one writes without thinking about
digits: the recurrence over whole arrays, then the sign and the logarithm of each entry. Memory: peak resident bytes of
a process that makes one table of 1e6 modes x 64 periods and nothing else. Error: worst relative error of log|chi| of
slow modes, of both, against mpmath. Last line: one JSON object, ratios first.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import mpmath
import numpy as np

from bounds import finish
from twophase.rule import OuterRule
from twophase.theory import restart_table

RULES = {"heavy_ball": OuterRule(1.0, 0.9, form="ema"), "nesterov": OuterRule(1.0, 0.9, nesterov=True, form="ema")}
PERIODS = 64


def plain(rule: OuterRule, sigma: np.ndarray, periods: int) -> tuple[np.ndarray, np.ndarray]:
    """Sign and log|chi| of all periods by the recurrence, in the types that `restart_table` returns."""
    s, b = rule.to("sum").lr * sigma, rule.momentum
    x, n = np.ones_like(sigma), np.zeros_like(sigma)
    sign, log = np.empty((periods, sigma.size), np.int8), np.empty((periods, sigma.size))
    for k in range(periods):
        push = s * x
        n = b * n + push
        x = x - (b * n + push) if rule.nesterov else x - n
        sign[k], log[k] = np.sign(x), np.log(np.abs(x))
    return sign, log


def seconds(rule: OuterRule, modes: int, repeats: int) -> dict[str, float]:
    """Median CPU seconds of one table, both ways taken in turn."""
    sigma = np.random.default_rng(0).uniform(0, 1, modes)
    taken: dict[str, list[float]] = {"table": [], "plain": []}
    for number in range(repeats + 1):
        for name, table in (("table", restart_table), ("plain", plain)):
            start = time.process_time()
            table(rule, sigma, PERIODS)
            if number:  # the first round warms up
                taken[name].append(time.process_time() - start)
    return {name: statistics.median(values) for name, values in taken.items()}


def worst_errors(cases: int) -> dict[str, float]:
    """Worst relative error of log|chi_K|, K = 1 ... 64, of heavy ball on slow modes, by both ways."""
    rng, errors = np.random.default_rng(1), {"table": 0.0, "plain": 0.0}
    for _ in range(cases):
        rule, sigma = OuterRule(1.0, float(rng.uniform(0.05, 0.99))), float(10 ** rng.uniform(-30, -8))
        with mpmath.workdps(120):
            b, x, n, exact = mpmath.mpf(rule.momentum), mpmath.mpf(1), mpmath.mpf(0), []
            for _ in range(PERIODS):
                n = b * n + mpmath.mpf(sigma) * x
                x = x - n
                exact.append(mpmath.log(x))
        for way, table in (("table", restart_table), ("plain", plain)):
            log = table(rule, np.array([sigma]), PERIODS)[1][:, 0]
            worst = max(float(abs((float(value) - e) / e)) for value, e in zip(log, exact, strict=True))
            errors[way] = max(errors[way], worst)
    return errors


def main() -> int:
    """Print the figures; the status says whether a bound is broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--modes", type=int, default=1_000_000, help="modes of the timed tables (default 1000000)")
    parser.add_argument("--repeats", type=int, default=5, help="timed tables of each way (default 5)")
    parser.add_argument("--peak", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak:
        restart_table(RULES["nesterov"], np.random.default_rng(0).uniform(0, 1, 1_000_000), PERIODS)
        status = Path("/proc/self/status").read_text(encoding="ascii")
        print(1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))))
        return 0
    figures: dict[str, float] = {}
    for name, rule in RULES.items():
        taken = seconds(rule, options.modes, options.repeats)
        figures[f"table_ratio_{name}"] = taken["table"] / taken["plain"]
        each = {way: 1e9 * value / (options.modes * PERIODS) for way, value in taken.items()}
        print(f"{name}, nanoseconds an entry: " + ", ".join(f"{way} {value:.1f}" for way, value in each.items()))
    peak = subprocess.run([sys.executable, __file__, "--peak"], capture_output=True, text=True, check=True)
    figures["peak_bytes"] = int(peak.stdout)
    figures |= {f"error_slow_{way}": error for way, error in worst_errors(50).items()}
    ratio = max(figures["table_ratio_heavy_ball"], figures["table_ratio_nesterov"])
    return finish("theory", {"table_ratio": round(ratio, 3)} | {k: float(f"{v:.4g}") for k, v in figures.items()})


if __name__ == "__main__":
    sys.exit(main())
