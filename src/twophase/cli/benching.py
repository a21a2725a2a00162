"""The bench's runs: each place is a comparison of its own, and one table holds what came out."""

from __future__ import annotations

import csv
import io
import json
import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from twophase.base.config import RunError, UsageError, differences
from twophase.base.files import table_text, write_atomic
from twophase.base.reading import read_json_object
from twophase.cli.sweeping import complete
from twophase.cli.tuning import FRESH, TuneResults, Tuning, run_tuning
from twophase.judge.bench import Against, Card, PlaceCard, Results, behind, results_of
from twophase.recipes.arms import CONTROL, INNER_LR, Arm
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
from twophase.sweeps.grid import Sweep
from twophase.sweeps.run import TABLE
from twophase.sweeps.table import read_rows, result
from twophase.sweeps.work import PLAN
from twophase.tasks.build import preflight_all

SPEC, RESULTS = "bench.json", "results.csv"
SETTINGS = ("inner.lr", "method.lr", "method.momentum", "method.mu_x", "method.beta", "policy.share", "period")
"""Tuned numbers, in the order of their columns."""
_SAME = 1e-6
"""Relative difference up to which a run counts as repeated."""


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


def bench_arm(
    arm: str,
    size_name: str,
    out: Path,
    *,
    places: Sequence[Place] = PLACES,
    workers: int | None = None,
    quiet: bool = False,
) -> Card:
    """Run an arm through the protocol, hold it against averaging and the stored arms, and write its card.

    Args:
        arm: its text.
        size_name: of `SIZES`.
        out: folder of all runs and of `card.json`, `card.png`, `card.csv` and `card.html`.
        places: where it runs.
        workers: worker processes; None is one a core.
        quiet: show no progress.

    Raises:
        UsageError: as `run_bench`.
    """
    rows, refused = run_bench(SIZES[size_name], out, [arm], places=places, workers=workers, quiet=quiet)
    references, note = references_of(PROTOCOL, protocol_fingerprint())
    mine = results_of(rows)
    ended = [place for place in places if (place.name, arm) in mine]
    notes = {place.name: note for place in ended}
    if not note:
        notes = {place.name: _difference(place, references, out, workers, quiet) for place in ended}
    theirs = {
        key: by_seed for key, by_seed in results_of(references).items() if not notes.get(key[0], "-") and key[1] != arm
    }
    results = {**theirs, **mine}
    others = {place.name: [other for at, other in theirs if at == place.name and other != CONTROL] for place in ended}
    comparisons = sum(len(names) + 1 for names in others.values())
    by_place = [
        _place_card(
            place, arm, rows, results, [Against.of(results, place.name, arm, other, comparisons) for other in all_of]
        )
        for place in ended
        for all_of in [(CONTROL, *others[place.name])]
    ]
    everywhere = [place.name for place in ended if others[place.name]]
    named = dict.fromkeys([CONTROL, *(other for _, other in theirs), arm])
    card = Card(
        arm,
        size_name,
        tuple(replace(each, note=notes[each.place]) for each in by_place),
        refused,
        comparisons,
        behind(results, everywhere, named) if everywhere else {},
    )
    labels = {name: short(name) for name in [CONTROL, *CANDIDATES, arm] if name in named}
    for ending, content in contents(card, labels).items():
        write_atomic(out / f"card{ending}", content)
    plain = {**asdict(card), "line": card.line(), "protocol": PROTOCOL}
    write_atomic(out / "card.json", json.dumps(standard(plain), indent=1, allow_nan=False) + "\n")
    return card


def write_reference(out: Path, into: Path) -> None:
    """Write the stored table from a folder of `twophase bench --reference`: its rows, and how they were made.

    Places that have not ended there are missing in it.

    Args:
        out: that folder.
        into: folder of `reference.csv` and `reference.json`.

    Raises:
        UsageError: a folder of something else, of another protocol, or in which no place has ended.
    """
    if not check_place(out, SPEC, "bench") or not (out / RESULTS).is_file():
        raise UsageError(
            f"--out {out}: no place of a bench has ended there; run twophase bench --reference --size full"
        )
    spec = read_json_object(out / SPEC)
    if spec["arms"] or (spec["protocol"], spec["fingerprint"]) != (PROTOCOL, protocol_fingerprint()):
        raise UsageError(f"--out {out}: holds the bench of an arm, or of another protocol; choose another --out")
    text = (out / RESULTS).read_text(encoding="utf-8")
    rows = list(csv.DictReader(io.StringIO(text)))
    seconds = {(row["place"], row["arm"]): float(row["seconds"]) for row in rows}
    places = dict.fromkeys(row["place"] for row in rows)
    facts = {
        "protocol": PROTOCOL,
        "fingerprint": spec["fingerprint"],
        "points": spec["points"],
        "python": platform.python_version(),
        "torch": version("torch"),
        # Of what the runs trained on: another Python has another text.
        "texts": {place: sorted(read_json_object(out / place / FRESH / PLAN)["texts"].values()) for place in places},
        "seconds": {place: round(sum(s for (at, _), s in seconds.items() if at == place)) for place in places},
    }
    into.mkdir(parents=True, exist_ok=True)
    write_atomic(into / REFERENCE, text)
    write_atomic(into / FACTS, json.dumps(facts, indent=1) + "\n")


def references_of(protocol: int, fingerprint: str) -> tuple[list[dict[str, str]], str]:
    """Return the stored rows, or none and why there is no comparing with them."""
    try:
        rows, facts = stored(REFERENCE), stored_facts()
    except UsageError as error:
        return [], f"Compared with averaging alone: {error}"
    if (facts.get("protocol"), facts.get("fingerprint")) != (protocol, fingerprint):
        return [], (
            f"Compared with averaging alone: the stored arms are of protocol {facts.get('protocol')} "
            f"({facts.get('fingerprint')}), and this is {protocol} ({fingerprint}); make them anew with twophase bench "
            "--reference"
        )
    return rows, ""


def _difference(
    place: Place, references: Sequence[Mapping[str, str]], out: Path, workers: int | None, quiet: bool
) -> str:
    """Repeat a stored run of averaging; return why the stored arms of a place cannot be compared with, or nothing."""
    row = next((r for r in references if r["place"] == place.name and r["arm"] == CONTROL and r["result"]), None)
    if row is None:
        return "The stored table lacks this place."
    base = place.base()
    cell = Arm(CONTROL, base.inner.lr).cell(base, {INNER_LR: float(row[INNER_LR])}, int(row["seed"]))
    sweep, folder = Sweep("repeated", base, [cell]), out / place.name / "repeated"
    complete(sweep, folder, texts=preflight_all([cell.config]), workers=workers, quiet=quiet)
    here, there = result(read_rows(folder / TABLE)[0]), float(row["result"])
    if here is not None and math.isclose(here, there, rel_tol=_SAME):
        return ""
    return (
        f"{place.name}: averaging with seed {row['seed']} came to {here} here, and to {there} in the stored table: "
        "another text, machine or version of torch. Its stored arms are left out."
    )


def _place_card(
    place: Place, arm: str, rows: Sequence[Mapping[str, Any]], results: Results, against: Sequence[Against | None]
) -> PlaceCard:
    row, control = (next(r for r in rows if (r["place"], r["arm"]) == (place.name, name)) for name in (arm, CONTROL))
    logs = [math.log(value) for value in results[place.name, arm].values()]
    return PlaceCard(
        place.name,
        place.title,
        {name: row[name] for name in SETTINGS if row[name] is not None},
        math.exp(math.fsum(logs) / len(logs)) if logs and math.isfinite(math.fsum(logs)) else None,
        row["settings"],
        row["interior"],
        row["seconds"],
        control["seconds"],
        against[0],
        tuple(other for other in against[1:] if other is not None),
    )
