"""What registration 1 of the bench expects, judged by the words of its comparisons."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from twophase.recipes.arms import CONTROL
from twophase.recipes.bench import CANDIDATES, PLACES, SCHEDULES, short

MAIN = tuple(place.name for place in PLACES if not place.few)
CONTROLS = (CONTROL, "memoryless", *SCHEDULES)
"""What a candidate must beat."""
ENOUGH = 6
"""Places of eight in which the moonshot asks for it."""

Words = Mapping[tuple[str, str, str], Mapping[str, Any]]
"""A comparison's line by place, arm and control."""


def candidate(arm: str, words: Words, ended: Sequence[str]) -> dict[str, Any]:
    """Return in which places a candidate is better than all of its controls, and how far behind it falls."""
    lines = {place: [words[place, arm, control] for control in CONTROLS] for place in ended}
    ratios = [line["ratio"] for group in lines.values() for line in group]
    return {
        "better_than_all": [p for p, group in lines.items() if all(line["word"] == "better" for line in group)],
        "better_than_averaging": [p for p, group in lines.items() if group[0]["word"] == "better"],
        "worst_ratio": None if None in ratios or not ratios else min(ratios),
    }


def expectations(words: Mapping[Any, Mapping[str, Any]], ended: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Judge what the registration expects; `holds` is None where a place that it names is missing."""

    def word(place: str, arm: str, control: str = CONTROL) -> str:
        return words[place, arm, control]["word"]

    def ratio(place: str, arm: str, control: str = CONTROL) -> float:
        return words[place, arm, control]["ratio"] or 0.0

    auto, orthogonal, both = CANDIDATES
    six = ("short", "non-iid", "one-replica", "code", "eight", "long")
    restarts = [line for line in words.values() if line["arm"].partition("@")[0] == line["control"]]
    momentum = ("nesterov:momentum=~0.6", "heavy-ball:momentum=~0.6")
    few = {place.name for place in PLACES if place.few}

    def moonshot() -> tuple[bool, str]:
        facts = {arm: candidate(arm, words, ended) for arm in CANDIDATES}
        good = [
            arm
            for arm, fact in facts.items()
            if len(fact["better_than_all"]) >= ENOUGH and (fact["worst_ratio"] or 0) >= 1 / 1.01
        ]
        return bool(good), "; ".join(
            f"{arm}: better than averaging and every schedule control in {len(fact['better_than_all'])} of {len(ended)}"
            for arm, fact in facts.items()
        )

    claims: dict[str, tuple[set[str], Callable[[], tuple[bool, str]]]] = {
        "1 averaging+filter=orthogonal is better than averaging in six places, not at sparse and digits": (
            set(MAIN),
            lambda: (
                all((word(p, orthogonal) == "better") == (p in six) for p in MAIN),
                "better at " + _names(p for p in MAIN if word(p, orthogonal) == "better"),
            ),
        ),
        "2 auto+filter=orthogonal is better than averaging in these six, and ahead of it without auto in five": (
            set(MAIN),
            lambda: (
                all(word(p, both) == "better" for p in six)
                and sum(ratio(p, both) > ratio(p, orthogonal) for p in MAIN) >= 5,
                "better at " + _names(p for p in MAIN if word(p, both) == "better") + "; ahead of it without auto "
                "at " + _names(p for p in MAIN if ratio(p, both) > ratio(p, orthogonal)),
            ),
        ),
        "3 auto is better than averaging in three places or more, and never better than ramp": (
            set(MAIN),
            lambda: (
                sum(word(p, auto) == "better" for p in MAIN) >= 3
                and not any(word(p, auto, "ramp:~0.5") == "better" for p in MAIN),
                "better than averaging at "
                + _names(p for p in MAIN if word(p, auto) == "better")
                + "; than ramp at "
                + _names(p for p in MAIN if word(p, auto, "ramp:~0.5") == "better"),
            ),
        ),
        "4 a restart is better than none in at most four of 56 comparisons": (
            set(MAIN),
            lambda: (
                (count := sum(line["word"] == "better" for line in restarts)) <= 4,
                f"better in {count}, worse in {sum(line['word'] == 'worse' for line in restarts)}",
            ),
        ),
        "5 tuned heavy ball and Nesterov are better than averaging in at most two places each": (
            set(MAIN),
            lambda: (
                all(sum(word(p, arm) == "better" for p in MAIN) <= 2 for arm in momentum),
                "; ".join(f"{short(arm)} at {_names(p for p in MAIN if word(p, arm) == 'better')}" for arm in momentum),
            ),
        ),
        "6 moonshot: a candidate better than averaging and every schedule control in six places, never 1 % behind": (
            set(MAIN),
            moonshot,
        ),
        "7 averaging+filter=orthogonal is ahead of averaging at width 256": (
            {"width-256"},
            lambda: (ratio("width-256", orthogonal) > 1, f"{ratio('width-256', orthogonal):.3f}"),
        ),
        "8 with inner Muon it gains less than half of what it gains with AdamW": (
            {"short", "inner-muon"},
            lambda: (  # a ratio of 0 is that of an arm with a diverged run
                ratio("short", orthogonal) > 0
                and ratio("inner-muon", orthogonal) < math.sqrt(ratio("short", orthogonal)),
                f"{ratio('inner-muon', orthogonal):.3f} against {ratio('short', orthogonal):.3f}",
            ),
        ),
    }
    there = {*ended} | {place for place in few if words[place, "auto", CONTROL]["word"] != "missing"}
    judged: dict[str, dict[str, Any]] = {}
    for claim, (places, judge) in claims.items():
        absent = sorted(places - there)
        if not absent:
            holds, fact = judge()
        else:
            so_far = f"so far {judge()[1]}; " if places == set(MAIN) and ended else ""
            holds, fact = None, f"{so_far}not run yet: {_names(absent)}"
        judged[claim] = {"holds": holds, "fact": fact}
    return judged


def _names(places: Any) -> str:
    return ", ".join(places) or "none"
