"""The bench: its protocol can be run, and its families are those of the registration."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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
    """Families have the sizes that intervals are corrected for, and docs/bench.md has the tables.

    The methods of the protocol go together with each workload, and no two of them are the same.
    """
    said = python(
        "import run, tables\n"
        "from workloads import FEW, METHODS, WORKLOADS\n"
        "from twophase.tuning.tune import Tuning\n"
        "tables.main(); print('FAMILIES', [len(f) for f in tables.families().values()])\n"
        "for w in WORKLOADS.values(): Tuning(w.base(), FEW if w.few else METHODS, 4)\n",
        *("--out", str(tmp_path)),
    )
    shown, _, rest = said.partition("FAMILIES ")
    assert rest.startswith("[24, 144, 162, 56, 28]")
    assert shown.rstrip("\n") in (ROOT / "docs" / "bench.md").read_text(encoding="utf-8")
