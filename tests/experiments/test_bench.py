"""The bench: its protocol can be run, and its families are those of the registration."""

from __future__ import annotations

import csv
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BENCH = ROOT / "experiments" / "bench"


def python(code: str, *words: str) -> str:
    """Run code in a process without tests/, which has a module `policies`, too; return what it printed."""
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{BENCH}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, *words], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_what_is_registered_and_told(tmp_path: Path) -> None:
    """Families have the sizes that intervals are corrected for, docs/bench.md the tables, README.md the numbers.

    The methods of the protocol go together with each workload, and no two of them are the same.
    """
    said = python(
        "import run, tables, takeaway\n"
        "from workloads import FEW, METHODS, WORKLOADS\n"
        "from twophase.tuning.tune import Tuning\n"
        "tables.main(); print('FAMILIES', [len(f) for f in tables.families().values()])\n"
        "takeaway.main(); print(takeaway.table().to_csv())\n"
        "for w in WORKLOADS.values(): Tuning(w.base(), FEW if w.few else METHODS, 4)\n",
        *("--out", str(tmp_path)),
    )
    shown, _, rest = said.partition("FAMILIES ")
    assert rest.startswith("[24, 144, 162, 56, 28]")
    assert shown.rstrip("\n") in (ROOT / "docs" / "bench.md").read_text(encoding="utf-8")
    rows = csv.DictReader(rest[rest.index(",method") :].splitlines())
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        found.setdefault(row["method"], {})[row["workload"]] = float(row["ratio"])
    muon, filtered, *_, restarted, usual = found.values()
    assert sorted(usual.values())[0:7:6] == pytest.approx([1.17, 1.49], abs=0.005)
    assert usual["digits"] == pytest.approx(5.5, abs=0.05)
    assert [min(restarted.values()), max(restarted.values())] == pytest.approx([1.07, 1.28], abs=0.005)
    gains = sorted(1 / ratio for workload, ratio in filtered.items() if workload not in ("digits", "sparse"))
    assert [gains[0], gains[-1]] == pytest.approx([1.07, 1.25], abs=0.005)
    assert 1 / muon["short"] == pytest.approx(1.339, abs=0.0005)


@pytest.mark.slow
def test_a_tiny_bench(tmp_path: Path) -> None:
    """A method and averaging are tuned and compared at one workload; a repeated call says the same without a run."""
    words = ["averaging outer.filter=orthogonal", "--size", "tiny", "--quiet", "--workers", "1", "--out", str(tmp_path)]
    said = python("import run; print(run.main(), run.main())", *words).splitlines()
    assert said.pop() == "0 0"
    assert said[: len(said) // 2] == said[len(said) // 2 :]
    with (tmp_path / "results.csv").open(newline="") as file:
        results = {(row["method"], row["seed"]): math.log(float(row["result"])) for row in csv.DictReader(file)}
    assert {*results} == {(m, s) for m in ("averaging", words[0]) for s in ("100", "101")}
    with (tmp_path / "comparisons.csv").open(newline="") as file:
        (line,) = csv.DictReader(file)
    gap = sum(sign * log for (method, _), log in results.items() for sign in [1 if method == "averaging" else -1])
    assert float(line["ratio"]) == pytest.approx(math.exp(gap / 2))
