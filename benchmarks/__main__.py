"""Run all benchmarks, a failed one included, in the lengths that suit their bounds: `python benchmarks [NAME ...]`.

At the end a line for each: whether it held its bounds, and seconds. The exit status is 1 if any failed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

from bounds import BOUNDS

FOLDER = Path(__file__).parent
BENCHMARKS = {
    "outer_step": ["--rounds", "12"],
    "sync": ["--rounds", "5"],
    "engine_overhead": ["--seconds", "10"],
    "storage": [],
    "theory": ["--modes", "300000"],
    "explorer": [],
}
"""The options of each. What needs a GPU is in experiments/gpu."""


def run(name: str) -> str:
    """Run a benchmark and show what it prints.

    Returns:
        "ok" if it has ended well and measured all that has a bound, "skipped" if it could measure nothing here, or
        what is wrong.
    """
    command = [sys.executable, "-u", str(FOLDER / f"{name}.py"), *BENCHMARKS[name]]
    last = ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            last = line
    if process.returncode not in (0, 1) or not last.startswith("{"):
        return f"failed, status {process.returncode}"
    if process.returncode:
        return "a bound is broken"
    figures = json.loads(last)
    if not figures:
        return "skipped"
    missing = [figure for figure in BOUNDS.get(name, {}) if figures.get(figure) is None]
    return f"not measured: {', '.join(missing)}" if missing else "ok"


def main(names: list[str]) -> int:
    """Run some benchmarks, or all; returns the exit status."""
    strange = [name for name in names if name not in BENCHMARKS]
    if strange:
        print(f"no benchmark {strange[0]!r}; give some of {', '.join(BENCHMARKS)}", file=sys.stderr)
        return 2
    outcomes, status = [], 0
    for name in names or BENCHMARKS:
        print(f"== {name} {' '.join(BENCHMARKS[name])}", flush=True)
        began = time.perf_counter()
        outcome = run(name)
        outcomes.append(f"{name:16} {time.perf_counter() - began:6.0f} s  {outcome}")
        status = max(status, int(outcome not in ("ok", "skipped")))
    print("==", *outcomes, sep="\n")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
