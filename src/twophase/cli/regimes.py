"""The runs behind the map of regimes: what averaging measures, and what changes of the outer optimizer give."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from twophase.base.files import table_text, write_atomic
from twophase.cli.sweeping import complete
from twophase.figures.style import check_numbers
from twophase.recipes.bench import PLACES, Place, regime_cells
from twophase.runs.folder import ROUNDS
from twophase.sweeps.grid import Sweep
from twophase.sweeps.run import RUNS, TABLE
from twophase.sweeps.table import read_rows, result
from twophase.tasks.build import preflight_all
from twophase.theory.observed import shrunk

RESULTS = "regimes.csv"


def run_regimes(
    out: Path, *, places: Sequence[Place] = PLACES, workers: int | None = None, quiet: bool = False
) -> list[dict[str, Any]]:
    """Run the treatments of the map of regimes at each place of the full list; repeating the call resumes it.

    `regimes.csv` is rewritten after every place; places with few arms are left out.

    Returns:
        A row for each run, with what was measured in those of averaging.
    """
    out.mkdir(parents=True, exist_ok=True)
    check_numbers([out / RESULTS], "place,arm,inner.lr,seed,result", f"--out {out}")
    rows: list[dict[str, Any]] = []
    for place in places:
        if place.few:
            continue
        cells, folder = regime_cells(place), out / place.name
        sweep = Sweep(f"regimes-{place.name}", place.base(), cells)
        complete(sweep, folder, texts=preflight_all(sweep.runs.values()), workers=workers, quiet=quiet)
        by_run = {row.run: row for row in read_rows(folder / TABLE)}
        for cell in cells:
            row = by_run[cell.run_id]
            measured = signals(folder / RUNS / cell.run_id / ROUNDS) if cell.arm == "observe" else {}
            rows.append(
                {
                    "place": place.name,
                    "arm": cell.arm,
                    "inner.lr": cell.config.inner.lr,
                    "seed": cell.config.seed,
                    "result": result(row),
                    **measured,
                }
            )
        write_atomic(out / RESULTS, table_text(rows))
    return rows


def signals(rounds: Path) -> dict[str, float]:
    """Return the measurements of a run of averaging.

    Returns:
        `cosine`, `early_cosine`: median cosine of successive pseudo-gradients in the second and first half of the
        rounds. `shrunk`: see `theory.observed.shrunk`.
    """
    lines = [json.loads(line) for line in rounds.read_text(encoding="utf-8").splitlines()]
    norms = [line["pseudo_gradient_norm"] for line in lines]
    cosines = [line["cosine"] for line in lines[1:]]
    half = len(cosines) // 2
    return {
        "cosine": statistics.median(cosines[half:]),
        "early_cosine": statistics.median(cosines[:half]),
        "shrunk": shrunk(norms),
    }
