"""Which outer optimizer is better than averaging, each tuned? The comparisons that registration 1 of the bench names.

No run is made here: the rows are those of the stored reference table. Families, words and expectations are those of
docs/bench/registration-1.md.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from twophase.figures.matplotlib_types import Axes, Figure
from twophase.figures.profiles import draw_profiles
from twophase.figures.style import INK, PAPER, headline, new_page, share_legend
from twophase.judge.bench import Against, behind, results_of
from twophase.judge.cells import DataFrame
from twophase.judge.decision import MARGIN
from twophase.recipes.arms import CONTROL, Arm
from twophase.recipes.bench import ARMS, CANDIDATES, NESTEROV, PLACES, SCHEDULES, families, short, stored
from twophase.studies.study import Result
from twophase.sweeps.bracket import Scale
from twophase.sweeps.table import format_table, geometric_mean

QUESTION = "Which outer optimizer is better than plain averaging, if both are tuned?"
MAIN = tuple(place.name for place in PLACES if not place.few)
CONTROLS = (CONTROL, "memoryless", *SCHEDULES)
"""What a candidate must beat."""
ENOUGH = 6
"""Places of eight that the stretch goal asks for."""
SIGNS = {"better": "+", "worse": "\N{MINUS SIGN}", "equivalent": "=", "undecided": ""}
"""What a word looks like in the map."""
Words = Mapping[tuple[str, str, str], Mapping[str, Any]]
"""A comparison's line by place, arm and control."""


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


def _line(pair: tuple[str, str, str], results: DataFrame, comparisons: int) -> dict[str, Any]:
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


# ---------------------------------------------------------------------------------------- what the registration expects


def candidate(arm: str, words: Words) -> dict[str, Any]:
    """Return in which places a candidate is better than all of its controls, and how far behind it falls."""
    lines = {place: [words[place, arm, control] for control in CONTROLS] for place in MAIN}
    ratios = [line["ratio"] for group in lines.values() for line in group]
    return {
        "better_than_all": [p for p, group in lines.items() if all(line["word"] == "better" for line in group)],
        "better_than_averaging": [p for p, group in lines.items() if group[0]["word"] == "better"],
        "worst_ratio": None if None in ratios else min(ratios),
    }


def expectations(words: Words) -> dict[str, dict[str, Any]]:
    """Judge what the registration expects: whether it holds, and by which fact."""

    def better(arm: str, control: str = CONTROL) -> list[str]:
        return [place for place in MAIN if words[place, arm, control]["word"] == "better"]

    def ratio(place: str, arm: str) -> float:
        return words[place, arm, CONTROL]["ratio"] or 0.0

    auto, orthogonal, both = CANDIDATES
    six = ["short", "non-iid", "one-replica", "code", "eight", "long"]
    ahead = [place for place in MAIN if ratio(place, both) > ratio(place, orthogonal)]
    restarts = [line["word"] for line in words.values() if line["arm"].partition("@")[0] == line["control"]]
    momentum = ("nesterov:momentum=~0.6", "heavy-ball:momentum=~0.6")
    facts = {arm: candidate(arm, words) for arm in CANDIDATES}
    width, adamw, muon = (ratio(place, orthogonal) for place in ("width-256", "short", "inner-muon"))
    claims = {
        "1 averaging+filter=orthogonal is better than averaging in six places, not at sparse and digits": (
            better(orthogonal) == six,
            f"better at {_names(better(orthogonal))}",
        ),
        "2 auto+filter=orthogonal is better than averaging in these six, and ahead of it without auto in five": (
            {*six} <= {*better(both)} and len(ahead) >= 5,
            f"better at {_names(better(both))}; ahead of it without auto at {_names(ahead)}",
        ),
        "3 auto is better than averaging in three places or more, and never better than ramp": (
            len(better(auto)) >= 3 and not better(auto, "ramp:~0.5"),
            f"better than averaging at {_names(better(auto))}; than ramp at {_names(better(auto, 'ramp:~0.5'))}",
        ),
        "4 a restart is better than none in at most four of 56 comparisons": (
            restarts.count("better") <= 4,
            f"better in {restarts.count('better')}, worse in {restarts.count('worse')}",
        ),
        "5 tuned heavy ball and Nesterov are better than averaging in at most two places each": (
            all(len(better(arm)) <= 2 for arm in momentum),
            "; ".join(f"{short(arm)} at {_names(better(arm))}" for arm in momentum),
        ),
        "6 stretch goal: a candidate better than averaging and all schedule controls in six places, never 1 % behind": (
            any(
                len(fact["better_than_all"]) >= ENOUGH and (fact["worst_ratio"] or 0) >= 1 / 1.01
                for fact in facts.values()
            ),
            "; ".join(
                f"{arm}: better than averaging and every schedule control in {len(fact['better_than_all'])} of "
                f"{len(MAIN)}"
                for arm, fact in facts.items()
            ),
        ),
        "7 averaging+filter=orthogonal is ahead of averaging at width 256": (width > 1, f"{width:.3f}"),
        "8 with inner Muon it gains less than half of what it gains with AdamW": (
            adamw > 0 and muon < math.sqrt(adamw),  # a ratio of 0 is that of an arm with a diverged run
            f"{muon:.3f} against {adamw:.3f}",
        ),
    }
    return {claim: {"holds": holds, "fact": fact} for claim, (holds, fact) in claims.items()}


def _names(places: Sequence[str]) -> str:
    return ", ".join(places) or "none"


# ---------------------------------------------------------------------------------------------------- answer and figure


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
            "Their optimum may lie outside the searched range.",
            f"Tuned momenta at the least value of whole steps: {numbers['least']} of {numbers['momenta']}.",
            f"By the clock all runs took {numbers['hours']:.1f} hours of one thread.",
        ]
    )


def draw(result: Result) -> Figure:
    """Draw each arm's ratio to averaging at each place, with the words, and how often each is near the best."""
    figure = new_page(7.2)
    upper, lower = figure.subplots(2, 1, height_ratios=(2.3, 1))
    _map(upper, result)
    _profile(lower, result)
    share_legend(figure, [lower], columns=4)
    arms, count = result.numbers["arms"], len(MAIN)
    most = max(facts["better"] for facts in arms.values())
    first = [short(arm) for arm, facts in arms.items() if facts["better"] == most]
    finding = f"{', '.join(first)}: better than averaging at {most} of {count}" if most else "no arm is better anywhere"
    headline(figure, finding, f"{count} of {count} places; every arm tuned with the same budget, held-out seeds")
    return figure


def _map(axes: Axes, result: Result) -> None:
    from matplotlib import colormaps  # noqa: PLC0415 - an extra

    lines = {(line["arm"], line["place"]): line for line in result.rows if line["control"] == CONTROL}
    arms, places = ranked(result.numbers["arms"]), result.numbers["places"]
    values = np.full((len(arms), len(places)), math.nan)
    for i, arm in enumerate(arms):
        for j, place in enumerate(places):
            line = lines.get((arm, place))
            if line and line["ratio"]:
                values[i, j] = 100 * (line["ratio"] - 1)
    largest = max(5.0, float(np.nanmax(np.abs(values), initial=0.0)))
    colours = colormaps["PuOr"].resampled(21)  # few, because the PNG's palette is small
    axes.imshow(values, cmap=colours, vmin=-largest, vmax=largest, aspect="auto")
    for (i, j), value in np.ndenumerate(values):
        if not math.isnan(value):
            text = f"{value:+.1f} {SIGNS.get(lines[arms[i], places[j]]['word'], '')}".replace("-", "\N{MINUS SIGN}")
            colour = PAPER if abs(value) > 0.6 * largest else INK
            axes.text(j, i, text, ha="center", va="center", fontsize=6, color=colour)
    axes.set_yticks(range(len(arms)), list(map(short, arms)), fontsize=6.5)
    axes.set_xticks(range(len(places)), places, fontsize=6.5, rotation=20)
    axes.set_title("ratio to averaging less 1, %: + better, \N{MINUS SIGN} worse, = equivalent", fontsize=7.5)


def _profile(axes: Axes, result: Result) -> None:
    distances = result.numbers["behind"]
    shown = (CONTROL, *CANDIDATES, "ramp:~0.5", NESTEROV, f"{NESTEROV}+filter=orthogonal")
    last = [*(arm for arm in distances if arm not in shown), *shown]
    draw_profiles(axes, {arm: distances[arm] for arm in last}, {arm: short(arm) for arm in shown})


def ranked(arms: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Order arms by the number of places at which they are better, then by their mean ratio."""
    return sorted(arms, key=lambda arm: (-arms[arm]["better"], -(arms[arm]["mean_ratio"] or 0)))
