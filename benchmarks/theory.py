"""The accurate table of restart factors against the plain recurrence in NumPy, in one run.

Time: CPU time of one thread, medians of tables taken in turn. `plain` is what one writes without thinking about
digits: the recurrence over whole arrays, then the sign and the logarithm of each entry; `bare` is the same without the
logarithms. Memory: peak resident bytes of a process that makes one table of 1e6 modes x 64 periods and nothing else.
Error: worst relative error of log|chi| on modes next to critical damping and on slow modes, of the accurate table and
of the plain one, against mpmath. Last line: one JSON object, ratios first.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import mpmath
import numpy as np

from bounds import finish
from twophase.rule import OuterRule
from twophase.theory.contraction import restart_table

RULES = {"heavy ball": OuterRule(1.0, 0.9, form="ema"), "nesterov": OuterRule(1.0, 0.9, nesterov=True, form="ema")}
PERIODS = 64


def bare(rule: OuterRule, sigma: np.ndarray, periods: int) -> np.ndarray:
    """The factors of all periods by the recurrence, nothing else."""
    s, b = rule.to("sum").lr * sigma, rule.momentum
    x, n, table = np.ones_like(sigma), np.zeros_like(sigma), np.empty((periods, sigma.size))
    for k in range(periods):
        push = s * x
        n = b * n + push
        x = x - (b * n + push) if rule.nesterov else x - n
        table[k] = x
    return table


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
    """Median CPU seconds of one table, the three ways taken in turn."""
    sigma = np.random.default_rng(0).uniform(0, 1, modes)
    taken: dict[str, list[float]] = {"accurate": [], "plain": [], "bare": []}
    for number in range(repeats + 1):
        for name, table in (("accurate", restart_table), ("plain", plain), ("bare", bare)):
            start = time.process_time()
            table(rule, sigma, PERIODS)
            if number:  # the first round warms up
                taken[name].append(time.process_time() - start)
    return {name: statistics.median(values) for name, values in taken.items()}


def peak_resident() -> int:
    """Peak resident bytes of this process (Linux)."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))


def worst_errors(cases: int) -> dict[str, dict[str, float]]:
    """Worst relative error of log|chi_K|, K = 1 ... 64, by set and way."""
    rng = np.random.default_rng(1)
    errors: dict[str, dict[str, float]] = {"near critical": {}, "slow": {}}
    for _ in range(cases):
        b = float(rng.uniform(0.05, 0.99))
        edge = (1 - b**0.5) ** 2 * (1 + 10 ** rng.uniform(-15, -4))
        for name, sigma in (("near critical", edge), ("slow", 10 ** rng.uniform(-30, -8))):
            rule = OuterRule(1.0, b)
            exact = exact_logs(rule, float(sigma))
            for way, table in (("accurate", restart_table), ("plain", plain)):
                log = table(rule, np.array([sigma]), PERIODS)[1][:, 0]
                worst = max(float(abs((mpmath.mpf(float(value)) - e) / e)) for value, e in zip(log, exact, strict=True))
                errors[name][way] = max(errors[name].get(way, 0.0), worst)
    return errors


def exact_logs(rule: OuterRule, sigma: float) -> list[Any]:
    """log|chi_K| of heavy ball in sum form, to 100 digits and more."""
    with mpmath.workdps(120):
        s, b = mpmath.mpf(rule.lr) * mpmath.mpf(sigma), mpmath.mpf(rule.momentum)
        x, n, logs = mpmath.mpf(1), mpmath.mpf(0), []
        for _ in range(PERIODS):
            n = b * n + s * x
            x = x - n
            logs.append(mpmath.log(abs(x)))
        return logs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--modes", type=int, default=1_000_000, help="modes of the timed tables (default 1000000)")
    parser.add_argument("--repeats", type=int, default=5, help="timed tables of each way (default 5)")
    parser.add_argument("--peak", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak:
        restart_table(RULES["nesterov"], np.random.default_rng(0).uniform(0, 1, 1_000_000), PERIODS)
        print(peak_resident())
        return 0
    figures: dict[str, float] = {}
    for name, rule in RULES.items():
        taken = seconds(rule, options.modes, options.repeats)
        key = name.replace(" ", "_")
        figures |= {
            f"table_ratio_{key}": taken["accurate"] / taken["plain"],
            f"bare_ratio_{key}": taken["accurate"] / taken["bare"],
        }
        each = {way: 1e9 * value / (options.modes * PERIODS) for way, value in taken.items()}
        print(f"{name}, {options.modes} modes x {PERIODS} periods, nanoseconds an entry:")
        print("  " + ", ".join(f"{way} {value:.1f}" for way, value in each.items()))
    peak = subprocess.run([sys.executable, __file__, "--peak"], capture_output=True, text=True, check=True)
    figures["peak_bytes"] = int(peak.stdout)
    print(f"peak resident memory of 1e6 modes x {PERIODS} periods: {figures['peak_bytes'] / 2**30:.3f} GiB")
    for name, ways in worst_errors(50).items():
        print(f"worst relative error of log|chi|, {name}: " + ", ".join(f"{w} {e:.1e}" for w, e in ways.items()))
        figures |= {f"error_{name.replace(' ', '_')}_{way}": error for way, error in ways.items()}
    ratio = max(figures["table_ratio_heavy_ball"], figures["table_ratio_nesterov"])
    return finish("theory", {"table_ratio": round(ratio, 3)} | {k: float(f"{v:.4g}") for k, v in figures.items()})


if __name__ == "__main__":
    sys.exit(main())
