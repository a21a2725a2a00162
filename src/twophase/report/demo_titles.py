"""What the titles of the demo's figures say, from its numbers, and the curves over thresholds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from twophase.figures.style import in_words, region_words
from twophase.figures.thresholds import THRESHOLDS, Curve, curve_of
from twophase.judge.cells import Paired, outcome
from twophase.recipes.controls import MOMENTUM_FREE
from twophase.recipes.demo import PERIOD, RULES, arm_name, matched_arm
from twophase.sweeps.table import Row, Setting, result

WITHIN = 0.25
"""A setting works when its perplexity is at most this much above the best, relatively."""


def curves_of(rows: Sequence[Row], cells: Sequence[Setting], kind: str) -> list[Curve]:
    """Count what works in every arm of a rule; a control with fewer settings is compared on those."""
    controlled = {row.control_of for row in rows}
    arms = {"no restart": arm_name(kind, "never"), f"restart every {PERIOD} rounds": arm_name(kind, str(PERIOD))}
    by_name = {name: [cell for cell in cells if cell.arm == arm] for name, arm in arms.items()}
    by_name[f"restart every {PERIOD} rounds, where controlled"] = [
        cell for cell in by_name[f"restart every {PERIOD} rounds"] if cell.runs[0] in controlled
    ]
    by_name[f"no restart, mean gain of K={PERIOD}"] = [cell for cell in cells if cell.arm == matched_arm(kind)]
    by_name["no momentum, by learning rate"] = [cell for cell in cells if cell.arm == MOMENTUM_FREE]
    return [curve_of(name, some, cells) for name, some in by_name.items() if some]


def region_title(cells: Sequence[Setting], bound: float) -> str:
    """Say what a restart does to the number of settings near the best of all."""
    pairs = {}
    for kind in RULES:
        arms = [[cell for cell in cells if cell.arm == arm_name(kind, what)] for what in ("never", str(PERIOD))]
        counts = [sum(cell.result is not None and cell.result <= bound for cell in arm) for arm in arms]
        pairs[kind] = (*counts, len(arms[1]))
    if all(cell.result is None for cell in cells):
        return "Nothing is known yet: no setting has finished"
    word = region_words([pair[:2] for pair in pairs.values()], "of one rule and narrows the other's")
    counts = ", ".join(f"{kind} from {a} to {b} of {of} settings" for kind, (a, b, of) in pairs.items())
    return f"A restart every {PERIOD} rounds {word}: {counts} within {WITHIN:.0%} of the best"


def gain_title(rows: Sequence[Row]) -> str:
    """Say what is left of a restart's gain when the step is as long without it."""
    by_arm = control_pairs(rows)
    pairs = {kind: by_arm[matched_arm(kind)] for kind in RULES if matched_arm(kind) in by_arm}
    ratios = {kind: each.ratio for kind, each in pairs.items() if each.ratio is not None}
    if not ratios:
        return "Nothing is known yet: no control and its partner have both finished"
    word = in_words(
        [(1.0, round(ratio, 2)) for ratio in ratios.values()],
        more="is better",
        fewer="is worse",
        both="is better with one rule and worse with the other",
        same="is as good",
    )
    times = ", ".join(f"{ratio:.2f} times with {kind}" for kind, ratio in ratios.items())
    return f"At the same mean outer gain a restart every {PERIOD} rounds {word}: perplexity without it is {times}"


def threshold_title(panels: Mapping[str, Sequence[Curve]]) -> str:
    """Say at how many thresholds a restart gives more and fewer settings that work."""
    pairs = {}
    for kind, (never, restarted, *_) in panels.items():
        signs = [b - a for a, b in zip(never.within, restarted.within, strict=True)]
        pairs[kind] = sum(sign < 0 for sign in signs), sum(sign > 0 for sign in signs)
    word = in_words(
        list(pairs.values()),
        more="widens what works",
        fewer="narrows what works",
        both="widens what works with one rule and narrows it with the other",
        same="leaves what works as it is",
    )
    counts = "; ".join(f"with {kind} more settings at {b}, fewer at {a}" for kind, (a, b) in pairs.items())
    return f"A restart every {PERIOD} rounds {word}, over {len(THRESHOLDS)} thresholds: {counts}"


def control_pairs(rows: Sequence[Row]) -> dict[str, Paired]:
    """Compare every control with what it controls, by arm; each of their runs is a pair."""
    logs = {row.run: math.log(outcome(row.state, result(row))) for row in rows}
    gaps: dict[str, list[float]] = {}
    for row in rows:
        if row.control_of in logs:
            gaps.setdefault(row.arm, []).append(logs[row.run] - logs[row.control_of])
    return {arm: Paired(tuple(every)) for arm, every in gaps.items()}
