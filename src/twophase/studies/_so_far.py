"""What of a sweep's table can be compared before all its runs have ended.

An arm that lacks some settings of its grid, or one seed that others have, would be compared on other ground than they
are. So an arm counts in a place (model, text and communication period) with whole seeds, the same in all.

The runs may have been trained in several places: their tables are joined.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from twophase.base.config import UsageError
from twophase.runs.folder import list_some
from twophase.sweeps.table import SEED, Row

_PLACE = ("model.", "data.", "inner_steps")
"""Beginnings of the axes whose values are never compared with one another."""
ENDED = frozenset({"finished", "diverged"})
"""States of a run whose result is known."""


def run_counts(rows: Sequence[Row]) -> tuple[int, int]:
    """Count the runs that have ended, and all; a run that stands for others counts once."""
    ended = {row.twin_of or row.run for row in rows if row.state in ENDED}
    return len(ended), len({row.twin_of or row.run for row in rows})


def joined(rows: Sequence[Row], others: Mapping[str, Sequence[Row]]) -> list[Row]:
    """Fill in a study's rows that have not ended from other tables, by name; the first that has a run counts.

    Raises:
        UsageError: a table with rows that the study does not have.
    """
    runs = {(row.arm, row.run) for row in rows}
    for name, table in others.items():
        foreign = [row for row in table if (row.arm, row.run) not in runs]
        if foreign:
            raise UsageError(
                f"--table {name}: {len(foreign)} of its {len(table)} rows are no runs of this study (the first is run "
                f"{foreign[0].run} of {foreign[0].arm}); give tables of this study at this scale"
            )
    ended: dict[tuple[str, str], Row] = {}
    for row in chain(rows, *others.values()):
        if row.state in ENDED:
            ended.setdefault((row.arm, row.run), row)
    # A table of a part of the study need not have all its axes.
    return [replace(ended.get((row.arm, row.run), row), values=row.values) for row in rows]


def complete(rows: Sequence[Row], seeds: Collection[int] = ()) -> tuple[list[Row], str]:
    """Select the rows of whole arms over equal seeds, and say what is left out.

    An arm has a seed in a place when all its settings there have ended for it. A seed that no arm is to have there, as
    where a place was given fewer of them, is held against none.

    Without `seeds` those of which the most arms can be selected count, and among these as many seeds as possible. The
    words are a line on all and one on each place.
    """
    places: dict[tuple[tuple[str, Any], ...], list[Row]] = {}
    for row in rows:
        place = tuple((path, value) for path, value in row.values.items() if path.startswith(_PLACE))
        places.setdefault(place, []).append(row)
    every = {row.values[SEED] for row in rows}
    seeds_by_arm = {place: _seeds_by_arm(here, every) for place, here in places.items()}
    wanted = set(seeds) or _widest([its for arms in seeds_by_arm.values() for its in arms.values() if its])
    ended, count = run_counts(rows)
    lines = [f"{ended} of {count} runs have ended, and no arm is whole."]
    if wanted:
        which = f"seed{'s' * (len(wanted) > 1)} {', '.join(map(str, sorted(wanted)))}"
        lines = [f"{ended} of {count} runs have ended. Shown are the arms that are whole for {which}:"]
    selected: list[Row] = []
    varying = [path for path in dict(next(iter(places), ())) if len({dict(place)[path] for place in places}) > 1]
    for place, here in places.items():
        there = {row.values[SEED] for row in here}
        names = list(seeds_by_arm[place])
        arms = {arm for arm in names if wanted & there and wanted <= seeds_by_arm[place][arm]}
        selected += [row for row in here if row.arm in arms and row.values[SEED] in wanted]
        without = [name for name in names if name not in arms]
        words = (
            f"{len(arms)} of {len(names)} arms, without {list_some(without)}" if without else f"all {len(names)} arms"
        )
        name = ", ".join(f"{path} {dict(place)[path]}" for path in varying) or "all"
        lines.append(f"  {name}: {words if arms else 'no arm'}")
    return selected, "\n".join(lines)


def _seeds_by_arm(rows: Sequence[Row], every: Collection[int]) -> dict[str, set[int]]:
    """Map each arm to the seeds for which all its settings ended and, if there are any, those that no arm has here."""
    whole: dict[str, dict[int, bool]] = {}
    for row in rows:
        seeds, seed = whole.setdefault(row.arm, {}), row.values[SEED]
        seeds[seed] = seeds.get(seed, True) and row.state in ENDED
    absent = set(every) - {row.values[SEED] for row in rows}
    by_arm = {arm: {seed for seed in seeds if seeds[seed]} for arm, seeds in whole.items()}
    return {arm: seeds | absent if seeds else seeds for arm, seeds in by_arm.items()}


def _widest(sets: Sequence[set[int]]) -> set[int]:
    """Find the seeds that the most arms share; of several such, the most seeds, then the smallest.

    No seeds are shared by more arms than one of them alone, so only the largest sets around single seeds compete.
    """
    shared = []
    for seed in sorted(set[int]().union(*sets)):
        holding = [seeds for seeds in sets if seed in seeds]
        shared.append((len(holding), sorted(set.intersection(*holding))))
    best = max(shared, key=lambda each: (each[0], len(each[1]), [-seed for seed in each[1]]), default=(0, []))
    return set(best[1])
