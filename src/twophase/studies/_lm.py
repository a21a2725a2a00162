"""What the language-model studies share: settings as lines, comparisons seed by seed, and words for them.

A setting is the runs of one arm that differ in the seed only. Its perplexity is the mean over its seeds and exists only
when all of them have finished. Comparisons pair equal seeds: a seed shares initial weights and data order between arms,
so the difference of a pair is less noisy than the difference of two means.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from twophase.judge.cells import ARM, BOTH, CONTROL, MISSING, DataFrame, Paired, fate, means
from twophase.policies.text import parse
from twophase.recipes.controls import AVERAGING_LR, MOMENTUM_FREE, restarts_that_count
from twophase.recipes.paper import RULES, Scale
from twophase.sweep.table import SEED, Row, geometric_mean, readable, settings
from twophase.sweep.table import result as result_of

WITHIN = 0.25
"""A setting works when its perplexity is at most this much above the best, relatively."""
MARGIN = 0.05
"""One setting is clearly better or worse than another when their perplexities differ by more than this, relatively."""
SHORT_KINDS = {"heavy ball": "HB", "Nesterov": "NAG"}

Line = dict[str, Any]
"""One setting: its place, its state, its perplexity over the seeds, and under `by_seed` that of each seed."""


def lines_of(rows: Sequence[Row], scale: Scale) -> list[Line]:
    """The settings of a sweep, in its order, each with everything that a figure or an answer needs of it.

    A control has the learning rate and the restart of what it controls under `of_lr` and `of_restart`. `restarts`
    counts those that a run feels: 0 for a period that the run is too short for. `by_seed` is for comparisons;
    `public` leaves it out, and the sweep's own `cells.csv` has every seed.
    """
    by_run = {row.run: row for row in rows}
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        # Two controls of one arm may share a learning rate; what they control tells them apart.
        of = by_run.get(row.control_of or "")
        place = tuple((path, value) for path, value in row.values.items() if path != SEED)
        controlled = (of.values["outer.lr"], of.values["outer.restart"]) if of else (None, None)
        groups.setdefault((row.arm, place, controlled), []).append(row)
    return [_line(group, scale, *controlled) for (*_, controlled), group in groups.items()]


def _line(group: Sequence[Row], scale: Scale, of_lr: float | None, of_restart: str | None) -> Line:
    (setting,) = settings(group)
    values, free = setting.values, setting.arm == MOMENTUM_FREE
    rounds = scale.rounds(values["inner_steps"])
    ended = [perplexity for perplexity in setting.perplexities if perplexity is not None]
    states = [row.state for row in group]
    return {
        "arm": setting.arm,
        "form": "" if free else values["outer.form"],
        "rule": "" if free else next(kind for kind, ahead in RULES.items() if ahead == values["outer.nesterov"]),
        "inner_steps": values["inner_steps"],
        "rounds": rounds,
        "momentum": values["outer.momentum"],
        "lr": values["outer.lr"],
        "restart": values["outer.restart"],
        "restarts": restarts_that_count(parse(values["outer.restart"]), rounds),
        "of_lr": of_lr,
        "of_restart": of_restart,
        "state": setting.state,
        "perplexity": setting.perplexity,
        "sd": setting.spread,
        "min": min(ended, default=None),
        "max": max(ended, default=None),
        "seeds": len(group),
        **{state: states.count(state) for state in ("finished", "diverged", "missing", "failed")},
        "by_seed": {row.values[SEED]: _value(row) for row in group},
    }


def _value(row: Row) -> float:
    """Its perplexity; infinite for a run that has diverged, NaN for one that is missing."""
    perplexity = result_of(row)
    return perplexity if perplexity is not None else math.inf if row.state == "diverged" else math.nan


def by_seed(lines: Iterable[Line], *names: str) -> DataFrame:
    """Arrange the perplexities of lines by setting, under these values of it, and seed."""
    import pandas as pd  # noqa: PLC0415 - an extra, and slow to import

    by_place = {tuple(line[name] for name in names): line["by_seed"] for line in lines}
    index = pd.MultiIndex.from_tuples(by_place, names=names)
    return pd.DataFrame(list(by_place.values()), index=index, dtype=float)


def public(lines: Iterable[Line]) -> list[dict[str, Any]]:
    """The lines as rows of a study's table."""
    return [{name: value for name, value in line.items() if name != "by_seed"} for line in lines]


def pick(lines: Iterable[Mapping[str, Any]], **values: Any) -> list[Any]:
    """The lines that have these values."""
    return [line for line in lines if all(line[name] == value for name, value in values.items())]


def one(lines: Iterable[Mapping[str, Any]], **values: Any) -> Any:
    """The first line that has these values, or None."""
    return next(iter(pick(lines, **values)), None)


def best(lines: Iterable[Line]) -> Line | None:
    """The line of the lowest perplexity, of equal ones that of the smaller momentum, then of the smaller lr."""
    ended = [line for line in lines if line["perplexity"] is not None]
    return min(ended, key=lambda line: (line["perplexity"], line["momentum"], line["lr"]), default=None)


def free_and_averaging(lines: Sequence[Line], inner_steps: int) -> tuple[Line | None, Line | None]:
    """The best momentum-free line at a communication period, and plain averaging there."""
    free = pick(lines, arm=MOMENTUM_FREE, inner_steps=inner_steps)
    return best(free), one(free, lr=AVERAGING_LR)


def control_of(lines: Iterable[Line], arm: str, line: Line) -> Line | None:
    """The gain-matched control of a line in an arm of controls, or None."""
    place = {name: line[name] for name in ("inner_steps", "momentum")}
    return one(lines, arm=arm, of_lr=line["lr"], of_restart=line["restart"], **place)


def shown(line: Line | None) -> dict[str, Any] | None:
    """A line as a number with its place."""
    names = ("perplexity", "min", "max", "state", "lr", "momentum", "restart", "restarts")
    return None if line is None else {name: line[name] for name in names}


def summary(lines: Sequence[Line], bound: float | None) -> dict[str, Any]:
    """An arm in numbers: how many settings, how many at or below a bound, the best with its place, the worst.

    Diverged and missing settings are counted, are in no mean, and lie outside the bound.
    """
    ended = [line["perplexity"] for line in lines if line["perplexity"] is not None]
    return {
        "settings": len(lines),
        "within": sum(value <= bound for value in ended) if bound is not None else 0,
        "diverged": sum(line["state"] == "diverged" for line in lines),
        "missing": sum(line["state"] == "missing" for line in lines),
        "best": shown(best(lines)),
        "worst": max(ended, default=None),
        "geometric_mean": geometric_mean(ended),
    }


def difference(mine: Line | None, other: Line | None) -> dict[str, Any] | None:
    """Perplexity of one setting minus that of another, paired by seed: mean, smallest, largest, number of seeds.

    None when there is no seed for which both have finished; negative means that `mine` is better.
    """
    if mine is None or other is None:
        return None
    pairs = [(value, other["by_seed"].get(seed, math.nan)) for seed, value in mine["by_seed"].items()]
    gaps = [a - b for a, b in pairs if math.isfinite(a) and math.isfinite(b)]
    if not gaps:
        return None
    return {"mean": statistics.fmean(gaps), "min": min(gaps), "max": max(gaps), "seeds": len(gaps)}


def contrast(pairs: Sequence[tuple[Line, Line | None]]) -> dict[str, Any]:
    """Restarted settings against others, one pair each: the ratio other / restarted, above 1 where restarts win.

    Returns:
        `ratio` is the geometric mean over the pairs for each seed, then the mean over the seeds, with the seeds'
        smallest and largest; only pairs that have finished for all seeds on both sides are in it (`compared`). A pair
        is `better` when the restarted one is better by more than the margin, or the other alone has diverged
        (`diverged_without`), and `worse` the other way round; `diverged_both` and `missing` pairs are neither.
    """
    remarks = [fate(mine["state"], other["state"] if other else "missing") for mine, other in pairs]
    ended = [(mine, other) for (mine, other), remark in zip(pairs, remarks, strict=True) if other and not remark]
    each, over_pairs = [], None
    if ended:
        restarted, others = (_numbered(side) for side in zip(*ended, strict=True))
        gaps = np.log(others / restarted)
        each, over_pairs = means(gaps).tolist(), Paired.over(gaps)
    ratios = over_pairs.ratios if over_pairs else []
    return {
        "pairs": len(pairs),
        "seeds": len(ratios),
        "ratio": {"mean": statistics.fmean(ratios), "min": min(ratios), "max": max(ratios)} if ratios else None,
        "compared": len(ended),
        "better": sum(gap > math.log(1 + MARGIN) for gap in each) + remarks.count(CONTROL),
        "worse": sum(gap < -math.log(1 + MARGIN) for gap in each) + remarks.count(ARM),
        "diverged_without": remarks.count(CONTROL),
        "diverged_with": remarks.count(ARM),
        "diverged_both": remarks.count(BOTH),
        "missing": remarks.count(MISSING),
    }


def _numbered(lines: Sequence[Line]) -> DataFrame:
    return by_seed([{"number": number, "by_seed": line["by_seed"]} for number, line in enumerate(lines)], "number")


# --------------------------------------------------------------------------------------------------------------- words


def place_name(form: str, kind: str, inner_steps: int | None = None) -> str:
    """`sum HB S=5`, for tables and lists."""
    return f"{form} {SHORT_KINDS[kind]}" + ("" if inner_steps is None else f" S={inner_steps}")


def difference_words(facts: Mapping[str, Any] | None) -> str:
    """`-0.12 [-0.20, -0.03]`: the mean over the seeds and their range."""
    if facts is None:
        return "not known"
    ends = f" [{facts['min']:+.2f}, {facts['max']:+.2f}]" if facts["seeds"] > 1 else ""
    return f"{facts['mean']:+.2f}{ends}"


def ratio_words(facts: Mapping[str, Any]) -> str:
    """`1.08 [1.05, 1.11], 2 div. without`: the mean over the seeds, their range, and what is in no ratio."""
    ratio, words = facts["ratio"], []
    if ratio is not None:
        ends = f" [{ratio['min']:.2f}, {ratio['max']:.2f}]" if facts["seeds"] > 1 else ""
        words = [f"{ratio['mean']:.2f}{ends}"]
    words += [f"{facts[f'diverged_{which}']} div. {which}" for which in _WHICH if facts[f"diverged_{which}"]]
    words += [f"{facts['missing']} missing"] if facts["missing"] else []
    return ", ".join(words) or "no pair"


_WHICH = ("without", "with", "both")


def ratio_above(facts: Mapping[str, Any]) -> bool | None:
    """Whether restarts are better by more than the margin, as the mean over the seeds.

    Runs that have diverged on one side only are in no ratio; they decide where nothing else can be compared, and a
    restarted one that diverges alone refutes.
    """
    if facts["diverged_with"]:
        return False
    if facts["ratio"] is None:
        return True if facts["diverged_without"] else None
    return facts["ratio"]["mean"] > 1 + MARGIN


def change_words(facts: Mapping[str, Any]) -> str:
    """`+0.3% ± 0.2%`: a geometric mean ratio as a change, with its standard error."""
    if facts["ratio"] is None:
        return ""
    error = "" if facts["error"] is None else f" \N{PLUS-MINUS SIGN} {facts['error']:.1%}"
    return f"{facts['ratio'] - 1:+.1%}{error}"


def perplexity_words(facts: Mapping[str, Any] | None) -> str:
    """A setting's perplexity, or why there is none."""
    if facts is None:
        return "none"
    return readable(facts["perplexity"]) or ("div." if facts["state"] == "diverged" else str(facts["state"]))


def lower(facts: Mapping[str, Any] | None) -> bool | None:
    """Whether a difference is negative for every seed; None when it is not known."""
    return None if facts is None else facts["max"] < 0


def tally(claim: str, held: Mapping[str, bool | None], detail: Mapping[str, str] | None = None) -> str:
    """A claim with where it holds: `Holds in 2 of 3: 'claim' (sum HB yes; ...)`, computed so that it cannot go stale.

    Args:
        claim: in words.
        held: from place to whether it holds there, None where that is not known.
        detail: from place to the numbers.
    """
    answers = [answer for answer in held.values() if answer is not None]
    if not answers:
        head = "Not known"
    elif all(answers):
        head = "Holds" if len(answers) > 1 or len(held) == 1 else "Holds in the one place that is known"
    elif any(answers):
        head = f"Holds in {sum(answers)} of {len(answers)}"
    else:
        head = "Does not hold"
    if answers and len(answers) < len(held):
        head += f" ({len(held) - len(answers)} not known)"
    words = {True: "yes", False: "no", None: "not known"}
    mixed = any(answers) and not all(answers)
    parts = [
        " ".join(part for part in (place, words[answer] if mixed else "", (detail or {}).get(place, "")) if part)
        for place, answer in held.items()
    ]
    listed = f" ({'; '.join(parts)})" if mixed or detail else ""
    return f"{head}: '{claim}'{listed}."


def tally_by_group(claim: str, groups: Mapping[str, Sequence[tuple[bool | None, float | None]]], form: str) -> str:
    """A claim over several places a group: `Holds in 3 of 10: 'claim' (sum HB 2 of 5, -0.20 to +0.10; ...)`.

    Args:
        claim: in words.
        groups: from group to, for each place, whether the claim holds there and the number it rests on (None: unknown).
        form: format of the numbers.
    """
    places = {f"{group} {number}": held for group, all_ in groups.items() for number, (held, _) in enumerate(all_)}
    head = tally("", places).partition(":")[0]
    parts = []
    for group, all_ in groups.items():
        answers = [held for held, _ in all_ if held is not None]
        numbers = [number for _, number in all_ if number is not None]
        ends = f", {min(numbers):{form}} to {max(numbers):{form}}" if numbers else ""
        parts.append(f"{group} {sum(answers)} of {len(answers)}{ends}")
    return f"{head}: '{claim}' ({'; '.join(parts)})."


def seeds_words(scale: Scale) -> str:
    """How many seeds there are and how they are shown."""
    if len(scale.seeds) == 1:
        return f"seed {scale.seeds[0]} alone, so there is no spread to judge differences by"
    return f"{len(scale.seeds)} seeds: means, and in brackets the smallest and largest of the seeds"
