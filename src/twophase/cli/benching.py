"""The bench's runs: each place is a separate comparison, and one table holds the results."""

from __future__ import annotations

import csv
import io
import json
import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from twophase.base.config import RunError, UsageError, differences
from twophase.base.files import table_text, write_atomic
from twophase.base.reading import read_json_object
from twophase.cli.tuning import FRESH, TuneResults, Tuning, run_tuning
from twophase.figures.style import styled
from twophase.judge.bench import Against, Card, PlaceCard, behind, beside, results_of
from twophase.judge.cells import means, pandas
from twophase.recipes.arms import CONTROL, Arm
from twophase.recipes.bench import (
    CANDIDATES,
    FACTS,
    PLACES,
    PROTOCOL,
    REFERENCE,
    SIZES,
    Place,
    Size,
    protocol_fingerprint,
    short,
    stored,
    stored_facts,
)
from twophase.report.card import contents
from twophase.runs.folder import check_place, list_some
from twophase.runs.log import standard
from twophase.sweeps.work import PLAN

SPEC, RESULTS = "bench.json", "results.csv"
SETTINGS = ("inner.lr", "method.lr", "method.momentum", "method.mu_x", "method.beta", "policy.share", "period")
"""Tuned numbers, in the order of their columns; those of a policy or method of the user's come behind."""
_SAME = 1e-6
"""Relative difference up to which a run counts as repeated."""


def run_bench(
    size: Size,
    out: Path,
    arms: Sequence[str] = (),
    *,
    code: str = "",
    places: Sequence[Place] = PLACES,
    workers: int | None = None,
    quiet: bool = False,
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Run arms through the protocol, place by place; repeating the call resumes it.

    `results.csv` in the folder is rewritten after every place, with the rows of places of earlier calls. No arms are
    those of each place; `code` is the digest of an arm's code that is not of this package.

    Returns:
        A row for each place, arm and held-out seed, averaging among them; and by place why it has none.

    Raises:
        UsageError: a folder of something else, or an arm that cannot be run anywhere.
    """
    pandas()
    spec = {
        "protocol": PROTOCOL,
        "fingerprint": protocol_fingerprint(),
        "arms": list(arms),
        "code": code,
        "points": size.points,
    }
    if check_place(out, SPEC, "bench"):
        if (out / RESULTS).is_file():
            _rows(out / RESULTS)  # is refused now, if it is damaged, and not after hours of runs
        different = differences(spec, {"code": "", **_spec(out)})
        if different:
            raise UsageError(f"--out {out}: holds another bench: {list_some(different)}; choose another --out")
    out.mkdir(parents=True, exist_ok=True)
    write_atomic(out / SPEC, json.dumps(spec, indent=1) + "\n")
    rows: list[dict[str, Any]] = []
    refused: dict[str, str] = {}
    for place in places:
        spent = size.at(place)
        try:
            # PROTOCOL 1 has the first search: with another one the stored rows would be of another protocol.
            tuning = Tuning(
                place.base(), arms or place.arms, spent.points, None, spent.seeds, spent.fresh, is_first=True
            )
            outcome = run_tuning(tuning, out / place.name, workers=workers, quiet=quiet)
        except (UsageError, RunError) as error:  # such as a machine without that text
            refused[place.name] = str(error)
            continue
        rows += rows_of(place.name, outcome)
        write_atomic(out / RESULTS, table_text(_with_others(rows, out / RESULTS)))
    if not rows:
        names = {why: [name for name in refused if refused[name] == why] for why in refused.values()}
        raise UsageError("\n".join(f"{', '.join(where)}: {why}" for why, where in names.items()))
    return rows, refused


def _spec(out: Path) -> dict[str, Any]:
    try:
        return read_json_object(out / SPEC)
    except ValueError:
        raise UsageError(f"--out {out}: its {SPEC} is damaged; put it back or choose another --out") from None


def _with_others(rows: Sequence[Mapping[str, Any]], path: Path) -> list[Mapping[str, Any]]:
    """Return rows and those that a table has of other places and arms, in the protocol's order of places."""
    new = {(row["place"], row["arm"]) for row in rows}
    others = [row for row in _rows(path) if (row["place"], row["arm"]) not in new] if path.is_file() else []
    order = {place.name: number for number, place in enumerate(PLACES)}
    return sorted([*rows, *others], key=lambda row: (order.get(row["place"], len(order)), row["arm"]))


def _rows(path: Path) -> list[dict[str, str]]:
    rows = list(csv.DictReader(io.StringIO(path.read_text(encoding="utf-8"))))
    if rows and not {"place", "arm", "seed", "result"} <= rows[0].keys():
        raise UsageError(f"{path}: is damaged; put it back, or delete it: the places that have ended are not run again")
    return rows


def rows_of(place: str, outcome: TuneResults) -> list[dict[str, Any]]:
    """Return the rows of a place: for each arm and held-out seed the result, and what the search came to.

    An arm that diverged at every setting has one row, without a seed.
    """
    rows = []
    for tuned in sorted(outcome.arms, key=lambda tuned: tuned.arm):
        numbers = tuned.numbers or {}
        about: dict[str, Any] = {**dict.fromkeys(SETTINGS), **numbers}
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


def bench_arm(
    arm: str,
    size_name: str,
    out: Path,
    *,
    code: str = "",
    places: Sequence[Place] = PLACES,
    workers: int | None = None,
    quiet: bool = False,
) -> Card:
    """Run an arm through the protocol, hold it against averaging and the stored arms, and write its card.

    Raises:
        UsageError: as `run_bench`, or a text that is no arm, or no matplotlib.
    """
    with styled():  # What cannot be drawn, or is no arm anywhere, is refused before hours of runs.
        _check_arm(arm)
    size = SIZES[size_name]
    rows, refused = run_bench(size, out, [arm], code=code, places=places, workers=workers, quiet=quiet)
    references, facts, note = references_of(PROTOCOL, protocol_fingerprint())
    mine = results_of(rows)
    ended = [place for place in places if (place.name, arm) in mine.index]
    there = {row["place"] for row in references}
    facts = {name: fact for name, fact in facts.get("places", {}).items() if name in there}
    notes = {place.name: note or _difference(place, facts.get(place.name), out) for place in ended}
    placed = beside(results_of(references), mine, CONTROL, size.fresh)  # means over other seeds are not comparable
    theirs = placed[~placed.index.isin([arm, CONTROL], level="arm")]
    results = mine.combine_first(theirs)
    others = {place.name: [other for at, other in theirs.index if at == place.name] for place in ended}
    comparisons = {CONTROL: len(ended), "stored": sum(map(len, others.values()))}

    def against(place: str, other: str) -> Against | None:
        return Against.of(results, place, arm, other, comparisons[CONTROL if other == CONTROL else "stored"])

    by_place = []
    for place in ended:
        answers = [against(place.name, other) for other in (CONTROL, *others[place.name])]
        by_place.append(_place_card(place, size.at(place), arm, rows, answers, note=notes[place.name]))
    everywhere = [place.name for place in ended if others[place.name]]
    named = dict.fromkeys([CONTROL, *(other for _, other in theirs.index), arm])
    card = Card(
        arm,
        size_name,
        tuple(by_place),
        refused,
        comparisons,
        behind(results, everywhere, named) if everywhere else {},
    )
    labels = {name: short(name) for name in named}
    if list(labels.values()).count(labels[arm]) > 1:  # a stored arm differs in the start of its search only
        labels[arm] = f"{arm} (this one)"
    for ending, content in contents(card, labels, CANDIDATES).items():
        write_atomic(out / f"card{ending}", content)
    plain = {**asdict(card), "line": card.line(), "protocol": PROTOCOL}
    write_atomic(out / "card.json", json.dumps(standard(plain), indent=1, allow_nan=False) + "\n")
    return card


def _check_arm(text: str) -> None:
    """Refuse a text that is no arm at any place."""
    if text == CONTROL:
        raise UsageError(f"{CONTROL} is what every arm is held against; name another one")
    try:
        Arm(text, 1.0)
    except UsageError as error:
        raise UsageError(str(error).removeprefix("--arms ")) from None


def write_reference(out: Path, into: Path) -> None:
    """Write the places that have ended in a folder of `twophase bench --reference` into the stored table.

    Rows that the table has of other places and arms stay, so that it can be made in parts and on several machines.

    Raises:
        UsageError: a folder of something else, of another protocol, or in which no place has ended. Also if stored arms
            of a place have another text, other versions, or another result of averaging.
    """
    if not check_place(out, SPEC, "bench") or not (out / RESULTS).is_file():
        raise UsageError(
            f"--out {out}: no place of a bench has ended there; run twophase bench --reference --out {out}"
        )
    protocol = {"protocol": PROTOCOL, "fingerprint": protocol_fingerprint(), "points": SIZES["full"].points}
    spec = _spec(out)
    strange = {*spec["arms"]} - {arm for place in PLACES for arm in place.arms}
    if strange or differences(protocol, {name: spec[name] for name in protocol}):
        raise UsageError(
            f"--out {out}: holds the bench of an arm that is not the protocol's, or of another size or protocol; "
            "choose another --out"
        )
    facts = read_json_object(into / FACTS) if (into / FACTS).is_file() else {"places": {}}
    if {name: facts.get(name) for name in protocol} != protocol:
        facts = {"places": {}}  # rows of another protocol are not comparable
    rows = _rows(out / RESULTS)
    places = dict.fromkeys(row["place"] for row in rows)
    merged = _with_others(rows, into / REFERENCE) if facts["places"] else rows
    seconds = {(row["place"], row["arm"]): float(row["seconds"]) for row in merged}
    by_place = {}
    for place in dict.fromkeys(row["place"] for row in merged):
        by_place[place] = merged_facts = dict(facts["places"].get(place, {}))
        if place in places:
            new = _facts_here(out, place)
            if merged_facts and spec["arms"]:
                different = differences(new, {name: merged_facts[name] for name in new})
                if different or not _repeats(rows, _rows(into / REFERENCE), place):
                    raise UsageError(
                        f"--into {into}: its other arms at {place} are of another text, Python or torch, or "
                        "averaging does not repeat here. Run all arms of this place on one kind of machine"
                    )
            merged_facts |= new
        merged_facts["seconds"] = round(sum(s for (name, _), s in seconds.items() if name == place))
    into.mkdir(parents=True, exist_ok=True)
    write_atomic(into / REFERENCE, table_text(merged))
    write_atomic(into / FACTS, json.dumps({**protocol, "places": by_place}, indent=1) + "\n")


def _repeats(rows: Sequence[Mapping[str, str]], others: Sequence[Mapping[str, str]], place: str) -> bool:
    """Return whether averaging has the same results in two tables, where both have it."""
    here, there = (results_of(table).reindex([(place, CONTROL)]).iloc[0] for table in (rows, others))
    return all(math.isclose(ratio, 1, rel_tol=_SAME) for ratio in (here / there).dropna())


def references_of(protocol: int, fingerprint: str) -> tuple[list[dict[str, str]], dict[str, Any], str]:
    """Return the stored rows and their facts, or none and why there is no comparing with them."""
    try:
        rows, facts = stored(REFERENCE), stored_facts()
    except UsageError as error:
        return [], {}, f"Compared with averaging alone: {error}"
    if (facts.get("protocol"), facts.get("fingerprint")) != (protocol, fingerprint):
        why = (
            f"Compared with averaging alone: the stored arms are of protocol {facts.get('protocol')} "
            f"({facts.get('fingerprint')}), and this is {protocol} ({fingerprint}); remake them with twophase bench "
            "--reference"
        )
        return [], {}, why
    return [row for row in rows if row["protocol"] == str(protocol)], facts, ""


def _facts_here(out: Path, place: str) -> dict[str, Any]:
    """Return what tells runs of a place apart but for the processor."""
    return {
        "python": platform.python_version(),
        "torch": version("torch"),
        # Of what the runs trained on: another Python has another text.
        "texts": sorted(read_json_object(out / place / FRESH / PLAN)["texts"].values()),
    }


def _difference(place: Place, old: Mapping[str, Any] | None, out: Path) -> str:
    """Return a note on what a place and its stored arms differ in; nothing where they do not."""
    if old is None:
        return f"{place.name}: there are no stored arms."
    new = _facts_here(out, place.name)
    parts = [f"{name} {old[name]} for {new[name]}" for name in ("python", "torch") if old[name] != new[name]]
    parts += ["another text"] * (old["texts"] != new["texts"])
    return f"{place.name}: the stored arms ran with {', '.join(parts)}." if parts else ""


def _place_card(
    place: Place,
    size: Size,
    arm: str,
    rows: Sequence[Mapping[str, Any]],
    against: Sequence[Against | None],
    *,
    note: str = "",
) -> PlaceCard:
    """Return how an arm did at a place, by the rows of `run_bench`, against averaging first, then the stored arms."""
    here = [row for row in rows if row["place"] == place.name]
    by_arm = {row["arm"]: row for row in here}
    row = by_arm[arm]
    mean = means(results_of(here).map(math.log)).get((place.name, arm), math.inf)
    columns = [name for name in row if name in SETTINGS or name.startswith(("method.", "policy."))]
    tuned = {name: row[name] for name in columns if row[name] is not None}
    # An arm without a setting that survived has no held-out run.
    seconds, of_control = (
        r["seconds"] / (r["settings"] * len(size.seeds) + len(size.fresh) * (r["seed"] is not None))
        for r in (row, by_arm[CONTROL])
    )
    return PlaceCard(
        place.name,
        place.title,
        tuned,
        math.exp(mean) if mean < math.inf else None,
        row["settings"],
        row["interior"],
        seconds,
        of_control,
        against[0],
        tuple(other for other in against[1:] if other is not None),
        note,
    )
