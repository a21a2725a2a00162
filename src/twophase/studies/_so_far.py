"""What of a sweep's table can be compared before all its runs have ended.

An arm that lacks some settings of its grid, or one seed that others have, would be compared on other ground than they
are. So an arm counts in a place (model, text and communication period) with whole seeds, the same in all.

The runs may have been trained in several places: their tables are joined.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from twophase.base.config import UsageError
from twophase.runs.folder import list_some
from twophase.sweep.table import SEED, Row

_PLACE = ("model.", "data.", "inner_steps")
"""Beginnings of the axes whose values are never compared with one another."""
ENDED = frozenset({"finished", "diverged"})
"""States of a run whose result is known."""


def joined(rows: Sequence[Row], others: Mapping[str, Sequence[Row]]) -> list[Row]:
    """A study's rows, where they have not ended with what other tables have of them.

    Args:
        rows: of the study's sweep, those of missing runs among them.
        others: rows of further tables, by a name for messages; the first that has a run counts.

    Raises:
        UsageError: a table with rows that the study does not have.
    """
    known = {(row.arm, row.run) for row in rows}
    found: dict[tuple[str, str], Row] = {}
    for name, theirs in others.items():
        foreign = [row for row in theirs if (row.arm, row.run) not in known]
        if foreign:
            raise UsageError(
                f"--table {name}: {len(foreign)} of its {len(theirs)} rows are no runs of this study (the first is run "
                f"{foreign[0].run} of {foreign[0].arm}); give tables of this study at this scale"
            )
        for row in theirs:
            if row.state in ENDED:
                found.setdefault((row.arm, row.run), row)
    ended = [row if row.state in ENDED else found.get((row.arm, row.run), row) for row in rows]
    # A table of a part of the study need not have all its axes.
    return [replace(one, values=row.values) for row, one in zip(rows, ended, strict=True)]


def complete(rows: Sequence[Row], seeds: Collection[int] = ()) -> tuple[list[Row], str]:
    """The rows of whole arms over equal seeds, and what is left out.

    An arm has a seed in a place when all its settings there have ended for it. A seed that no arm is to have there, as
    where a place was given fewer of them, is held against none.

    Args:
        rows: of a sweep, those of missing and failed runs among them.
        seeds: the ones to keep; without any, those for which the most arms can be kept, over all places, and among
            these as many seeds as possible.

    Returns:
        The rows that are kept, in order, and a line on all plus one on each place.
    """
    places: dict[tuple[tuple[str, Any], ...], list[Row]] = {}
    for row in rows:
        place = tuple((path, value) for path, value in row.values.items() if path.startswith(_PLACE))
        places.setdefault(place, []).append(row)
    every = {row.values[SEED] for row in rows}
    has = {place: _seeds_by_arm(found, every) for place, found in places.items()}
    wanted = set(seeds) or _widest([its for arms in has.values() for its in arms.values() if its])
    kept: list[Row] = []
    lines = [_head(rows, wanted)]
    varying = [path for path in dict(next(iter(places), ())) if len({dict(place)[path] for place in places}) > 1]
    for place, found in places.items():
        there = {row.values[SEED] for row in found}
        arms = {arm for arm, its in has[place].items() if wanted & there and wanted <= its}
        kept += [row for row in found if row.arm in arms and row.values[SEED] in wanted]
        name = ", ".join(f"{path} {dict(place)[path]}" for path in varying) or "all"
        lines.append(f"  {name}: {_told(list(has[place]), arms)}")
    return kept, "\n".join(lines)


def _head(rows: Sequence[Row], seeds: Collection[int]) -> str:
    ended = {row.twin_of or row.run for row in rows if row.state in ENDED}
    every = {row.twin_of or row.run for row in rows}
    words = f"{len(ended)} of {len(every)} runs have ended"
    if not seeds:
        return f"{words}, and no arm is whole."
    which = f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, sorted(seeds)))}"
    return f"{words}. Shown are the arms that are whole for {which}:"


def _seeds_by_arm(rows: Sequence[Row], every: Collection[int]) -> dict[str, set[int]]:
    """From arm to the seeds for which all its settings have ended, and if there are any, those that nobody has here."""
    found: dict[str, dict[int, bool]] = {}
    for row in rows:
        its = found.setdefault(row.arm, {})
        its[row.values[SEED]] = its.get(row.values[SEED], True) and row.state in ENDED
    absent = set(every) - {row.values[SEED] for row in rows}
    has = {arm: {seed for seed, whole in its.items() if whole} for arm, its in found.items()}
    return {arm: its | absent if its else its for arm, its in has.items()}


def _widest(sets: Sequence[set[int]]) -> set[int]:
    """The seeds that the most arms share; of several such, the most seeds."""
    candidates = {frozenset(found) for found in sets if found}
    candidates |= {frozenset({seed}) for found in sets for seed in found}
    for _ in range(len(sets)):  # what several arms share is an intersection of theirs
        more = {one & other for one in candidates for other in candidates if one & other}
        if more <= candidates:
            break
        candidates |= more

    def worth(seeds: frozenset[int]) -> tuple[int, int, list[int]]:
        return sum(seeds <= found for found in sets), len(seeds), [-seed for seed in sorted(seeds)]

    return set(max(candidates, key=worth, default=frozenset()))


def _told(names: Sequence[str], arms: Collection[str]) -> str:
    """`all 17 arms`, or which of them are left out."""
    if not arms:
        return "no arm"
    left = [name for name in names if name not in arms]
    return f"{len(arms)} of {len(names)} arms, without {list_some(left)}" if left else f"all {len(names)} arms"
