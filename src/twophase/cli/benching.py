"""The bench's runs: each place is a comparison of its own, and one table holds what came out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from twophase.base.config import RunError, UsageError, differences
from twophase.base.files import table_text, write_atomic
from twophase.base.reading import read_json_object
from twophase.cli.tuning import TuneResults, Tuning, run_tuning
from twophase.recipes.bench import PLACES, PROTOCOL, Place, Size, protocol_fingerprint
from twophase.runs.folder import check_place, list_some

SPEC, RESULTS = "bench.json", "results.csv"
SETTINGS = ("inner.lr", "method.lr", "method.momentum", "method.mu_x", "method.beta", "policy.share", "period")
"""Tuned numbers, in the order of their columns."""


def run_bench(
    size: Size,
    out: Path,
    arms: Sequence[str] = (),
    *,
    places: Sequence[Place] = PLACES,
    workers: int | None = None,
    quiet: bool = False,
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Run arms through the protocol, place by place; repeating the call resumes it.

    Args:
        size: what is spent on each.
        out: folder of all comparisons and of `results.csv`, which is written anew after every place.
        arms: texts; none are those of each place.
        places: in the order in which they are run.
        workers: worker processes; None is one a core.
        quiet: show no progress.

    Returns:
        A row for each place, arm and held-out seed, averaging among them; and by place why it has none.

    Raises:
        UsageError: a folder of something else, or an arm that cannot be run anywhere.
    """
    spec = {"protocol": PROTOCOL, "fingerprint": protocol_fingerprint(), "arms": list(arms), "points": size.points}
    if check_place(out, SPEC, "bench"):
        different = differences(spec, read_json_object(out / SPEC))
        if different:
            raise UsageError(f"--out {out}: holds another bench: {list_some(different)}; choose another --out")
    out.mkdir(parents=True, exist_ok=True)
    write_atomic(out / SPEC, json.dumps(spec, indent=1) + "\n")
    rows: list[dict[str, Any]] = []
    refused: dict[str, str] = {}
    for place in places:
        spent = size.at(place)
        try:
            tuning = Tuning(place.base(), arms or place.arms, spent.points, None, spent.seeds, spent.fresh)
            outcome = run_tuning(tuning, out / place.name, workers=workers, quiet=quiet)
        except (UsageError, RunError) as error:  # such as a machine without that text
            refused[place.name] = str(error)
            continue
        rows += rows_of(place.name, outcome)
        write_atomic(out / RESULTS, table_text(rows))
    if not rows:
        raise UsageError("\n".join(f"{name}: {why}" for name, why in refused.items()))
    return rows, refused


def rows_of(place: str, outcome: TuneResults) -> list[dict[str, Any]]:
    """Return the rows of a place: for each arm and held-out seed the result, and what the search came to.

    An arm that diverged at every setting has one row, without a seed.
    """
    rows = []
    for tuned in sorted(outcome.arms, key=lambda tuned: tuned.arm):
        numbers = tuned.numbers or {}
        about: dict[str, Any] = {name: numbers.get(name) for name in SETTINGS}
        about |= {
            "settings": tuned.settings,
            "interior": tuned.interior,
            "tuned": tuned.tuned,
            "seconds": round(tuned.seconds, 1),
        }
        pairs = list(zip(outcome.fresh, tuned.results, strict=False)) or [(None, None)]
        rows += [
            {"protocol": PROTOCOL, "place": place, "arm": tuned.arm, "seed": seed, "result": result, **about}
            for seed, result in pairs
        ]
    return rows
