"""What registration 1 of the bench expects, judged by the words of its comparisons."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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
        "6 moonshot: a candidate better than averaging and every schedule control in six places, never 1 % behind": (
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
