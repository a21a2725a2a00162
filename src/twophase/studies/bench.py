"""Which outer optimizer is better than averaging, each tuned? The comparisons that registration 1 of the bench names.

No run is made here: the rows are those of the stored reference table. Families, words and expectations are those of
docs/bench/registration-1.md. An expectation is judged only if all places that it names have been run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from twophase.judge.decision import MARGIN, Decision, decide
from twophase.recipes.arms import CONTROL
from twophase.recipes.bench import CANDIDATES, PLACES, families, short, stored
from twophase.studies._bench_expected import MAIN, candidate, expectations
from twophase.studies._bench_figure import SIGNS, draw
from twophase.studies.study import Result
from twophase.sweeps.table import format_table

__all__ = ["QUESTION", "answer", "draw", "table"]
QUESTION = "Which outer optimizer is better than plain averaging, if both are tuned?"
Results = dict[tuple[str, str], dict[int, float]]
"""By place and arm the result of each held-out seed, infinite where the run diverged."""


def table(*, quick: bool = False, rows: Sequence[Mapping[str, str]] | None = None) -> Result:
    """Judge the stored rows.

    Args:
        quick: of no meaning here.
        rows: in the place of the stored ones.
    """
    del quick
    rows = stored("reference.csv") if rows is None else rows
    results = results_of(rows)
    lines = [
        {"family": family.title, **_line(pair, results, len(family.pairs))}
        for family in families()
        for pair in family.pairs
    ]
    words = {(line["place"], line["arm"], line["control"]): line for line in lines}
    ended = [place for place in MAIN if (place, CONTROL) in results]
    numbers = {
        "places": ended + [place.name for place in PLACES if place.few and (place.name, CONTROL) in results],
        "words": {family.title: _counts(lines, family.title) for family in families()},
        "arms": {arm: _summary(arm, words, ended) for arm in dict.fromkeys(line["arm"] for line in lines)},
        "candidates": {arm: candidate(arm, words, ended) for arm in CANDIDATES},
        "expectations": expectations(words, ended),
        "cpu_hours": sum({(row["place"], row["arm"]): float(row["seconds"]) for row in rows}.values()) / 3600,
    }
    settings = {"main_places": MAIN, "margin": MARGIN, "comparisons": {f.title: len(f.pairs) for f in families()}}
    return Result(lines, numbers, settings)


def results_of(rows: Sequence[Mapping[str, str]]) -> Results:
    """Return the results of some rows by place and arm; an arm without a setting that survived has no seed."""
    results: Results = {}
    for row in rows:
        by_seed = results.setdefault((row["place"], row["arm"]), {})
        if row["seed"]:
            by_seed[int(row["seed"])] = float(row["result"]) if row["result"] else math.inf
    return results


def _line(pair: tuple[str, str, str], results: Results, comparisons: int) -> dict[str, Any]:
    """Hold an arm against another at a place; the word is `missing` where either has not been run."""
    place, arm, control = pair
    mine, other = results.get((place, arm)), results.get((place, control))
    line: dict[str, Any] = {"place": place, "arm": arm, "control": control, "word": "missing"}
    if mine is None or other is None:
        return line | dict.fromkeys(("ratio", "low", "high", "seeds"))
    if not mine or not other:
        return line | dict.fromkeys(("ratio", "low", "high"), None) | {"word": "all diverged", "seeds": 0}
    decision = decided(mine, other, comparisons)
    ends = {name: getattr(decision, value) for name, value in (("ratio", "mean"), ("low", "low"), ("high", "high"))}
    return line | {
        "word": decision.word,
        **{name: None if end is None else math.exp(end) for name, end in ends.items()},
        "seeds": decision.seeds,
    }


def decided(mine: Mapping[int, float], other: Mapping[int, float], comparisons: int) -> Decision:
    """Decide between two arms on the seeds that both have; positive differences are the first one's."""
    pairs = [(mine[seed], other[seed]) for seed in sorted(mine.keys() & other.keys())]
    logs = [math.log(b) - math.log(a) for a, b in pairs if math.isfinite(a) or math.isfinite(b)]
    return decide(logs, comparisons=comparisons)


def _counts(lines: Sequence[Mapping[str, Any]], family: str) -> dict[str, int]:
    words = [line["word"] for line in lines if line["family"] == family]
    return {word: words.count(word) for word in dict.fromkeys([*SIGNS, *words])}


def _summary(arm: str, words: Mapping[Any, Mapping[str, Any]], ended: Sequence[str]) -> dict[str, Any]:
    """Return how an arm did against averaging in the places of the full list."""
    lines = [words[place, arm, CONTROL] for place in ended if (place, arm, CONTROL) in words]
    ratios = [line["ratio"] for line in lines]
    finite = [ratio for ratio in ratios if ratio is not None]
    return {
        "places": len(lines),
        **{word: sum(line["word"] == word for line in lines) for word in SIGNS},
        "mean_ratio": math.exp(math.fsum(map(math.log, finite)) / len(finite))
        if len(finite) == len(lines) > 0
        else None,
        "worst_ratio": min(finite) if len(finite) == len(lines) > 0 else None,
    }


def answer(result: Result) -> str:
    """Say what came out of each expectation, then arm by arm."""
    numbers = result.numbers
    ended = [place for place in numbers["places"] if place in MAIN]
    moon = next(fact for claim, fact in numbers["expectations"].items() if claim.startswith("6"))
    verdict = {True: "holds", False: "does not hold", None: "open"}
    said = "outer method is better than averaging and every schedule control, all tuned, in six of eight places."
    first = {
        True: f"A parameter-free {said}",
        False: f"No parameter-free {said}",
        None: f"{len(ended)} of {len(MAIN)} places have been run.",
    }[moon["holds"]]
    head = ["arm", "better", "equivalent", "undecided", "worse", "mean ratio", "least ratio"]
    arms = sorted(numbers["arms"].items(), key=lambda item: -(item[1]["mean_ratio"] or 0))
    body = [
        [
            short(arm), *(str(facts[word]) for word in ("better", "equivalent", "undecided", "worse")),
            *("" if facts[key] is None else f"{facts[key]:.3f}" for key in ("mean_ratio", "worst_ratio")),
        ]
        for arm, facts in arms if facts["places"]
    ]  # fmt: skip
    families_head = ["family", "comparisons", *SIGNS]
    by_family = [
        [title, str(result.settings["comparisons"][title]), *(str(counts.get(word, 0)) for word in SIGNS)]
        for title, counts in numbers["words"].items()
    ]
    return "\n".join(
        [
            first,
            f"Against averaging at {len(ended)} places, ratio above 1 where the arm is better:",
            format_table(head, body),
            format_table(families_head, by_family),
            *(
                f"{claim}: {verdict[fact['holds']]} ({fact['fact']})."
                for claim, fact in numbers["expectations"].items()
            ),
            f"{numbers['cpu_hours']:.1f} CPU-hours.",
        ]
    )
