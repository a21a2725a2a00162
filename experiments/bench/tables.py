"""Which outer optimizer is better than averaging, each tuned? Registration 1, judged on the stored rows.

    python experiments/bench/tables.py --out runs/bench           draws, and prints what docs/bench.md shows

No run is made here: `reference.csv` has the rows of protocol 1. Its arms are labels; some cannot be written any more.
Families, words and expectations are those of `registration-1.md`.
"""

from __future__ import annotations

import csv
import math
import re
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np

from against import Against, behind, results_of
from protocol import FOLDER, PLACES
from twophase.figures.matplotlib_types import Axes, Figure
from twophase.figures.style import INK, MUTED, PAPER, headline, look, new_page, share_legend
from twophase.judge.cells import DataFrame
from twophase.judge.decision import MARGIN
from twophase.sweeps.table import format_table
from twophase.tuning.methods import CONTROL

from common import Result, options_of, save  # isort: skip - protocol names its folder

HEAVY_BALL, NESTEROV = "heavy-ball:momentum=~0.6", "nesterov:momentum=~0.6"
CANDIDATES = ("auto", "averaging+filter=orthogonal", "auto+filter=orthogonal")
"""Arms without an outer number to tune."""
SCHEDULES = (
    "memoryless+schedule=linear:final=2",
    f"{HEAVY_BALL}+schedule=momentum:warmup=0",
    "ramp:~0.5",
    "along:~0.5",
    "gain:~1",
)
"""Controls of `auto`: what depends on the round alone, or is one part of it."""
MOMENTUM = tuple(f"{rule}{restart}" for rule in (HEAVY_BALL, NESTEROV) for restart in ("", "@3", "@K"))
SHELF = ("adamw", "adamw@3", "muon", "muon@3", "slowmo", "slowmo@3", "averaging+readout=tail:rounds=3")
ONE_REPLICA = ("gpa", "schedule-free")
"""Arms for a single replica alone. There Nesterov is SNOO, and memoryless is Lookahead."""
ARMS = ("memoryless", *CANDIDATES, *SCHEDULES, *MOMENTUM, f"{NESTEROV}+filter=orthogonal", *SHELF)
"""Of protocol 1, beside averaging, at every place of the full list."""
FEW = ("memoryless", *CANDIDATES, "ramp:~0.5", NESTEROV, f"{NESTEROV}@3")
"""At the places that are there for a trend."""
MAIN = tuple(place.name for place in PLACES if not place.few)
TREND = tuple(place.name for place in PLACES if place.few)
CONTROLS = (CONTROL, "memoryless", *SCHEDULES)
"""What a candidate must beat."""
ENOUGH = 6
"""Places of eight that the stretch goal asks for."""
SIGNS = {"better": "+", "worse": "\N{MINUS SIGN}", "equivalent": "=", "undecided": ""}
"""What a word looks like in the map."""
FARTHEST = 30
"""Per cent behind the best, in the profiles."""
Words = Mapping[tuple[str, str, str], Mapping[str, Any]]
"""A comparison's line by place, arm and control."""


def stored(name: str) -> list[dict[str, str]]:
    """Return the rows of a stored table: `reference.csv` or `regimes.csv`."""
    with (FOLDER / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def families() -> dict[str, tuple[tuple[str, str, str], ...]]:
    """Return the comparisons of registration 1, in its order: place, arm and control, by title.

    Those of a family share a chance of 5 % for any wrong word among them.
    """

    def of_all(arms: Iterable[str], controls: Iterable[str]) -> tuple[tuple[str, str, str], ...]:
        pairs = list(product(arms, controls))
        there = {place: (*ARMS, *ONE_REPLICA) if place == "one-replica" else ARMS for place in MAIN}
        return tuple((place, *pair) for place in MAIN for pair in pairs if pair[0] in there[place])

    others = [arm for arm in (*ARMS, *ONE_REPLICA) if arm not in CANDIDATES]
    restarted = [arm for arm in ARMS if "@" in arm]
    return {
        "candidates against averaging": of_all(CANDIDATES, [CONTROL]),
        "candidates against schedule controls": of_all(CANDIDATES, CONTROLS[1:]),
        "other arms against averaging": of_all(others, [CONTROL]),
        "with a restart against without": tuple(
            pair for arm in restarted for pair in of_all([arm], [arm.partition("@")[0]])
        ),
        "places for a trend, against averaging": tuple((place, arm, CONTROL) for place in TREND for arm in FEW),
    }


def short(arm: str) -> str:
    """Return an arm's text for a table: without where searches begin, and its parts in words."""
    return (
        re.sub(r"~[\d.]+(e[+-]?\d+)?", "C", re.sub(r":momentum=~0\.6(?![\d.e])", "", arm))
        .replace("filter=", "")
        .replace("schedule=linear:final=2", "rising rate")
        .replace("schedule=momentum:warmup=0", "momentum ramp")
        .replace("readout=tail:rounds=3", "tail average")
    )


def table() -> Result:
    """Judge the stored rows."""
    rows = stored("reference.csv")
    results = results_of(rows)
    lines = [
        {"family": title, **_line(pair, results, len(pairs))} for title, pairs in families().items() for pair in pairs
    ]
    words = {(line["place"], line["arm"], line["control"]): line for line in lines}
    searches = {(row["place"], row["arm"]): row.get("interior") for row in rows}
    numbers = {
        "places": [place.name for place in PLACES],
        "words": {title: _counts(lines, title) for title in families()},
        "arms": {arm: _summary(arm, words) for arm in dict.fromkeys(line["arm"] for line in lines)},
        "candidates": {arm: candidate(arm, words) for arm in CANDIDATES},
        "behind": behind(results, MAIN, dict.fromkeys([CONTROL, *ARMS])),
        "expectations": expectations(words),
        "searches": len(searches),
        "cut": sum(value == "false" for value in searches.values()),
        "hours": sum({(row["place"], row["arm"]): float(row["seconds"]) for row in rows}.values()) / 3600,
    }
    comparisons = {title: len(pairs) for title, pairs in families().items()}
    return Result(lines, numbers, {"main_places": MAIN, "margin": MARGIN, "comparisons": comparisons})


def _line(pair: tuple[str, str, str], results: DataFrame, comparisons: int) -> dict[str, Any]:
    """Hold an arm against another at a place."""
    place, arm, control = pair
    against = Against.of(results, *pair, comparisons)
    ends = {name: getattr(against, name) for name in ("ratio", "low", "high")}
    return {"place": place, "arm": arm, "control": control, "word": against.word, **ends}


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
        "mean_ratio": statistics.geometric_mean(ratios) if is_whole else None,
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
            f"By the clock all runs took {numbers['hours']:.1f} hours of one thread.",
        ]
    )


def figures(result: Result) -> dict[str, Figure]:
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
    return {"": figure}


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
    """Draw the share of places in which each arm is within x of the best, over x; most in grey."""
    distances = result.numbers["behind"]
    shown = (CONTROL, *CANDIDATES, "ramp:~0.5", NESTEROV, f"{NESTEROV}+filter=orthogonal")
    for number, arm in enumerate([*(arm for arm in distances if arm not in shown), *shown]):
        style: dict[str, Any] = look(shown.index(arm)) if arm in shown else {"color": MUTED, "alpha": 0.25}
        finite = [distance for distance in distances[arm] if math.isfinite(distance)]
        shares = [count / max(len(distances[arm]), 1) for count in (*range(len(finite) + 1), len(finite))]
        label = short(arm) if arm in shown else None
        axes.step([0, *finite, 1e9], shares, where="post", label=label, zorder=2 + number / 100, **style)
    axes.set_xlim(-0.5, FARTHEST)
    axes.set_xlabel("x, % behind the best arm of the place")
    axes.set_ylabel("share of places within x")


def ranked(arms: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Order arms by the number of places at which they are better, then by their mean ratio."""
    return sorted(arms, key=lambda arm: (-arms[arm]["better"], -(arms[arm]["mean_ratio"] or 0)))


def main(words: Sequence[str] | None = None) -> int:
    """Draw, write the numbers, and print the answer."""
    options = options_of(__doc__).parse_args(words)
    result = table()
    print(answer(result), *save("bench", options.out, result, figures), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
