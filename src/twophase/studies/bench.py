"""Which outer optimizer is better than averaging, each tuned? The comparisons that registration 1 of the bench names.

No run is made here: the rows are those of the stored reference table. Families, words and expectations are those of
docs/bench/registration-1.md.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from twophase.judge.bench import Against, Results, behind, results_of
from twophase.judge.decision import MARGIN
from twophase.recipes.arms import CONTROL, Arm
from twophase.recipes.bench import ARMS, CANDIDATES, PLACES, families, short, stored
from twophase.studies._bench_expected import MAIN, candidate, expectations
from twophase.studies._bench_figure import SIGNS, draw, ranked
from twophase.studies.study import Result
from twophase.sweeps.bracket import Scale
from twophase.sweeps.table import format_table, geometric_mean

__all__ = ["QUESTION", "answer", "draw", "table"]
QUESTION = "Which outer optimizer is better than plain averaging, if both are tuned?"


def table(*, quick: bool = False) -> Result:
    """Judge the stored rows; `quick` is of no meaning here."""
    del quick
    rows = stored("reference.csv")
    results = results_of(rows)
    lines = [
        {"family": family.title, **_line(pair, results, len(family.pairs))}
        for family in families()
        for pair in family.pairs
    ]
    words = {(line["place"], line["arm"], line["control"]): line for line in lines}
    searches = {(row["place"], row["arm"]): row.get("interior") for row in rows}
    numbers = {
        "places": [place.name for place in PLACES],
        "words": {family.title: _counts(lines, family.title) for family in families()},
        "arms": {arm: _summary(arm, words) for arm in dict.fromkeys(line["arm"] for line in lines)},
        "candidates": {arm: candidate(arm, words) for arm in CANDIDATES},
        "behind": behind(results, MAIN, dict.fromkeys([CONTROL, *ARMS])),
        "expectations": expectations(words),
        "searches": len(searches),
        "cut": sum(value == "false" for value in searches.values()),
        **_momenta(rows),
        "hours": sum({(row["place"], row["arm"]): float(row["seconds"]) for row in rows}.values()) / 3600,
    }
    settings = {"main_places": MAIN, "margin": MARGIN, "comparisons": {f.title: len(f.pairs) for f in families()}}
    return Result(lines, numbers, settings)


def _line(pair: tuple[str, str, str], results: Results, comparisons: int) -> dict[str, Any]:
    """Hold an arm against another at a place."""
    place, arm, control = pair
    against = Against.of(results, *pair, comparisons)
    assert against is not None, f"the stored table lacks {pair}"
    ends = {name: getattr(against, name) for name in ("ratio", "low", "high")}
    return {"place": place, "arm": arm, "control": control, "word": against.word, **ends}


def _momenta(rows: Sequence[Mapping[str, str]]) -> dict[str, int]:
    """Count tuned momenta, and those that whole steps of protocol 1's search cannot lower any further."""
    momenta = {(r["place"], r["arm"]): float(r["method.momentum"]) for r in rows if r.get("method.momentum")}
    least = {}
    for arm in {arm for _, arm in momenta}:
        start = Arm(arm, 1.0).scales["method.momentum"].start
        scale = Scale(start, "complement")
        least[arm] = next(scale.value(-k) for k in itertools.count() if not scale.allows(-k - 1))
    return {"momenta": len(momenta), "least": sum(value <= least[arm] for (_, arm), value in momenta.items())}


def _counts(lines: Sequence[Mapping[str, Any]], family: str) -> dict[str, int]:
    words = [line["word"] for line in lines if line["family"] == family]
    return {word: words.count(word) for word in dict.fromkeys([*SIGNS, *words])}


def _summary(arm: str, words: Mapping[Any, Mapping[str, Any]]) -> dict[str, Any]:
    """Return how an arm did against averaging in the places of the full list."""
    lines = [words[place, arm, CONTROL] for place in MAIN if (place, arm, CONTROL) in words]
    ratios = [line["ratio"] for line in lines]
    is_whole = None not in ratios
    return {
        "places": len(lines),
        **{word: sum(line["word"] == word for line in lines) for word in SIGNS},
        "mean_ratio": geometric_mean(ratios) if is_whole else None,
        "worst_ratio": min(ratios) if is_whole else None,
    }


def answer(result: Result) -> str:
    """Say what came out of each expectation, then arm by arm."""
    numbers = result.numbers
    moon = next(fact for claim, fact in numbers["expectations"].items() if claim.startswith("6"))
    head = ["arm", "better", "equivalent", "undecided", "worse", "mean ratio", "least ratio"]
    body = [
        [
            short(arm), *(str(facts[word]) for word in ("better", "equivalent", "undecided", "worse")),
            *("" if facts[key] is None else f"{facts[key]:.3f}" for key in ("mean_ratio", "worst_ratio")),
        ]
        for arm in ranked(numbers["arms"]) for facts in [numbers["arms"][arm]]
    ]  # fmt: skip
    families_head = ["family", "comparisons", *SIGNS]
    by_family = [
        [title, str(result.settings["comparisons"][title]), *(str(counts.get(word, 0)) for word in SIGNS)]
        for title, counts in numbers["words"].items()
    ]
    return "\n".join(
        [
            f"{'A' if moon['holds'] else 'No'} parameter-free outer method is better than averaging and every schedule "
            "control, all tuned, in six of eight places.",
            f"Against averaging at {', '.join(MAIN)}, ratio above 1 where the arm is better:",
            format_table(head, body),
            format_table(families_head, by_family),
            *(
                f"{claim}: {'holds' if fact['holds'] else 'does not hold'} ({fact['fact']})."
                for claim, fact in numbers["expectations"].items()
            ),
            f"Searches whose best has a neighbour that was not tried: {numbers['cut']} of {numbers['searches']}. "
            "Their best may be beyond.",
            f"Tuned momenta at the least value of whole steps: {numbers['least']} of {numbers['momenta']}.",
            f"By the clock all runs took {numbers['hours']:.1f} hours of one thread.",
        ]
    )
