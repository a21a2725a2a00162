"""The bench: an outer optimizer, or all of the protocol's, against plain averaging, each tuned with the same budget.

    python experiments/bench/run.py "averaging outer.filter=orthogonal" --size quick --out runs/bench
    python experiments/bench/run.py --reference --out runs/reference         40 hours of one thread

An ARM is written as for `twophase tune`. A restart policy of your own is `averaging outer.restart=NAME`, if
`TWOPHASE_POLICIES` names its module. `results.csv` in --out has a row for each place, arm and held-out seed,
`against.csv` the verdicts. A repeated call resumes the comparison.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

from against import Against, results_of
from bracket import bracket
from protocol import PLACES, PROTOCOL, SIZES, TRIAL, Place, Size
from twophase.errors import RunError, UsageError
from twophase.files import csv_text, write_atomic
from twophase.sweeps.table import format_table
from twophase.tuning.methods import CONTROL
from twophase.tuning.results import TuneResults
from twophase.tuning.tune import Tuning, run_tuning

SETTINGS = ("inner.lr", "outer.lr", "outer.momentum", "outer.restart")
"""Tuned values, in the order of their columns."""


def run_bench(
    size: Size, out: Path, arms: Sequence[str], *, places: Sequence[Place], workers: int | None, quiet: bool
) -> list[dict[str, Any]]:
    """Run arms, or those of each place where none are given, through the protocol, place by place.

    `results.csv` is rewritten after every place.

    Returns:
        A row for each place, arm and held-out seed, averaging among them.

    Raises:
        UsageError: no arm of these can be run, or none of the places.
    """
    rows: list[dict[str, Any]] = []
    for place in places:
        spent = size.at(place)
        try:
            tuning = Tuning(place.base(), arms or place.arms, spent.points, None, spent.seeds, spent.fresh)
            outcome = run_tuning(tuning, out / place.name, workers=workers, quiet=quiet, search=bracket)
        except (UsageError, RunError) as error:  # such as a machine without that text
            if place is places[-1] and not rows:
                raise
            print(f"{place.name}: not run here. {error}")
            continue
        rows += rows_of(place.name, outcome)
        write_atomic(out / "results.csv", csv_text(rows))
    return rows


def rows_of(place: str, outcome: TuneResults) -> list[dict[str, Any]]:
    """Return the rows of a place: for each arm and held-out seed the result, and what the search came to.

    An arm that diverged at every setting has one row, without a seed.
    """
    rows = []
    for tuned in sorted(outcome.methods, key=lambda tuned: tuned.method):
        about: dict[str, Any] = {**dict.fromkeys(SETTINGS), **(tuned.numbers or {})}
        about |= {name: getattr(tuned, name) for name in ("settings", "open", "tuned")}
        about["seconds"] = round(tuned.seconds, 1)
        pairs = list(zip(outcome.fresh, tuned.results, strict=False)) or [(None, None)]
        rows += [
            {"protocol": PROTOCOL, "place": place, "arm": tuned.method, "seed": seed, "result": result, **about}
            for seed, result in pairs
        ]
    return rows


def against_averaging(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Hold every arm against averaging at each place; all words together may err with probability 0.05."""
    rows = list(rows)
    results = results_of(rows)
    pairs = [(place, arm) for place, arm in results.index if arm != CONTROL]
    seen = {(row["place"], row["arm"]): row for row in rows}
    return [
        {
            "place": place,
            "arm": arm,
            **asdict(Against.of(results, place, arm, CONTROL, len(pairs))),
            **{name: seen[place, arm].get(name) for name in (*SETTINGS, "settings", "open", "seconds")},
        }
        for place, arm in pairs
    ]


def main(words: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arm", nargs="?", metavar="ARM", help="METHOD [PATH=VALUE ...], in quotes")
    parser.add_argument("--reference", action="store_true", help="run the protocol's own arms")
    parser.add_argument("--size", choices=list(SIZES), help="what is spent (quick; of --reference full)")
    names = [place.name for place in PLACES]
    parser.add_argument("--places", nargs="+", choices=names, metavar="PLACE", help=f"only some of {', '.join(names)}")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), help="folder of the results (%(default)s)")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="worker processes (%(default)s)")
    parser.add_argument("--quiet", action="store_true", help="show no progress")
    options = parser.parse_args(words)
    if (options.arm is not None) == options.reference:
        parser.error("give an ARM, or --reference")
    import_module("policies").share_with_workers()  # parts of auto, as its controls; protocol names its folder
    size = SIZES[options.size or ("full" if options.reference else "quick")]
    places = [place for place in (*PLACES, TRIAL) if place.name in (options.places or size.places)]
    arms = [] if options.reference else [options.arm]
    try:
        rows = run_bench(size, options.out, arms, places=places, workers=options.workers, quiet=options.quiet)
    except (UsageError, RunError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    lines = against_averaging(rows)
    write_atomic(options.out / "against.csv", csv_text(lines))
    print(options.out / "against.csv")
    head = ["place", "arm", "word", "ratio", "low", "high"]
    print(format_table(head, [[_short(line[name]) for name in head] for line in lines]))
    return 0


def _short(value: Any) -> Any:
    return f"{value:.3f}" if isinstance(value, float) else value


if __name__ == "__main__":
    sys.exit(main())
