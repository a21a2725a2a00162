"""What the two studies on adaptive policies share: arms over a grid in numbers, seed by seed, and words for them.

Everything is compared on log perplexity, seed by seed (`judge.cells`). An interval is the percentile bootstrap's at
95 % (`judge.bootstrap` says what that is worth for few seeds).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from twophase.judge.bootstrap import LEVEL, largest_coverage
from twophase.judge.cells import DataFrame, Series, alike, finished, logs, means, outcomes, paired
from twophase.recipes.adaptive import CORPUS, FIXED, WIDTH, inner_steps_of, momenta_of
from twophase.recipes.controls import AVERAGING_LR, MOMENTUM_FREE
from twophase.recipes.paper import BOTH_FORMS, RULES, Scale, arm_name
from twophase.studies._lm import SHORT_KINDS, WITHIN, judged, seeds_words, tally
from twophase.studies.study import Result
from twophase.sweeps.table import SEED, Row, Setting, format_table, readable, settings

CLOSE = 0.005
"""Two tuned bests are as good as each other when they differ by at most this, relatively."""
AVERAGING = "plain averaging"
TUNED_FREE = "momentum-free, tuned"
BEST_OTHER = "best other, tuned"
BEST_K = "best fixed K"
_LR = "outer.lr"
_GRID = ("outer.momentum", _LR)
CHOSEN = "auto"
"""The arm that both studies are about."""


def result_of(rows: Sequence[Row], scale: Scale, arms: Sequence[str]) -> Result:
    """Put every arm in numbers, by place, form and rule; `arms` are names without form and rule."""
    places = {place: _facts(cells, arms) for place, cells in _places(settings(rows)).items()}
    seeds = sorted({row.values[SEED] for row in rows})
    lines = []
    for place, facts in places.items():
        for rule, line_by_arm in facts["rules"].items():
            for arm, line in line_by_arm.items():
                over = line["over_chosen"] or {}
                numbers = {name: line[name] for name in _COLUMNS}
                numbers |= {f"over_chosen_{what}": over.get(what) for what in ("mean", "low", "high")}
                start = {"place": place, "rule": rule, "arm": arm}
                lines.append(start | numbers | {"period": line.get("period", "")})
    alone = seeds_words(replace(scale, seeds=tuple(seeds)))
    facts = {
        "seeds": seeds,
        "seeds_words": f"means over up to {len(seeds)} seeds" if len(seeds) > 1 else alone,
        "lrs": scale.lrs,
        "momenta": momenta_of(scale),
        "inner_steps": inner_steps_of(scale),
    }
    return Result(lines, {"places": places}, facts)


_COLUMNS = ("settings", "diverged", "geometric_mean", "best", "worst", "within")


def _places(cells: Sequence[Setting]) -> dict[str, list[Setting]]:
    """Split settings by what they may be compared within: width and text as they come, then communication period."""
    kinds = list(dict.fromkeys((cell.values.get(WIDTH), cell.values.get(CORPUS)) for cell in cells))
    widths, texts = (len(set(values)) for values in zip(*kinds, strict=True))
    places = {}
    for width, corpus in kinds:
        kind = [cell for cell in cells if (cell.values.get(WIDTH), cell.values.get(CORPUS)) == (width, corpus)]
        for inner_steps in sorted({cell.values["inner_steps"] for cell in kind}):
            words = [f"S={inner_steps}", *([f"width {width}"] if widths > 1 else []), *([corpus] if texts > 1 else [])]
            places[", ".join(words)] = [cell for cell in kind if cell.values["inner_steps"] == inner_steps]
    return places


def _facts(cells: Sequence[Setting], arms: Sequence[str]) -> dict[str, Any]:
    """Put one place in numbers: every arm of every form and rule, and the chosen one against each.

    Returns:
        `best`: the lowest mean perplexity of a setting of any arm; `averaging` and `momentum_free`: those of plain
        averaging and of momentum-free SGD at its best; `best_other`: the best setting of the other arms by name;
        `rules`: by short name of form and rule the arms; `single`: the three of these settings over the chosen arm.
    """
    import pandas as pd  # noqa: PLC0415 - an extra, and slow to import

    every = logs(outcomes(cells, "arm", *_GRID))
    names = every.index.get_level_values("arm")
    top = finished(every).min()
    free = every[names == MOMENTUM_FREE]
    averaging = free[free.index.get_level_values(_LR) == AVERAGING_LR].max()
    tuned_free, _ = _best_setting(free)
    rules = list(product(BOTH_FORMS, RULES))
    best_other, other_name = _best_setting(every[~names.isin([arm_name(*rule, CHOSEN) for rule in rules])])
    lines_by_rule, grids = {}, {}
    for rule in rules:
        grid_by_arm = {arm: every[names == arm_name(*rule, arm)].droplevel("arm") for arm in arms}
        grid_by_arm = {arm: grid for arm, grid in grid_by_arm.items() if len(grid)}
        if CHOSEN not in grid_by_arm:
            continue
        grid = grids[rule] = grid_by_arm[CHOSEN]
        fixed = [arm for arm in FIXED if arm in grid_by_arm and arm != "never"]
        ranked = [(mean, arm) for arm in fixed if (mean := _grid_mean(grid_by_arm[arm])) is not None]
        period = min(ranked)[1] if ranked else ""
        grid_by_arm[BEST_K] = grid_by_arm[period] if period else grid[:0]
        grid_by_arm |= {AVERAGING: alike(grid, averaging), TUNED_FREE: alike(grid, tuned_free)}
        lines = {arm: _summary(table, top) for arm, table in grid_by_arm.items()}
        lines[BEST_K]["period"] = period
        for arm, line in lines.items():
            line["over_chosen"] = _ratio(grid_by_arm[arm], grid)
        never = grid_by_arm.get("never")
        lines[CHOSEN]["against_never"] = None if never is None else _cell_by_cell(grid, never)
        lines_by_rule[f"{rule[0]} {SHORT_KINDS[rule[1]]}"] = lines
    whole = pd.concat(grids, names=["form", "kind"]) if grids else None
    single = {AVERAGING: averaging, TUNED_FREE: tuned_free, BEST_OTHER: best_other}
    return {
        "best": _exp(top),
        "averaging": _exp_mean(averaging),
        "momentum_free": _exp_mean(tuned_free),
        "best_other": other_name,
        "rules": lines_by_rule,
        "single": {
            what: None if whole is None else _ratio(alike(whole, by_seed), whole) for what, by_seed in single.items()
        },
    }


def _best_setting(table: DataFrame) -> tuple[Series, str]:
    """Find the setting with the lowest mean in any of the arms: its logs by seed, and its name.

    Like the best of the periods it is chosen on the runs that judge it, which flatters it.
    """
    ranked = [(mean, place) for place, mean in finished(table).items()]
    if not ranked:
        return table[:0].max(), ""
    arm, momentum, lr = place = min(ranked)[1]
    return table.loc[place], f"{arm}, momentum {momentum:g}, lr {lr:g}"


def _grid_mean(grid: DataFrame) -> float | None:
    """Average log perplexity over the grid; None when a run has diverged, which no mean can hold."""
    each = means(grid)
    mean = math.fsum(each) / len(each) if len(each) else math.inf
    return mean if mean < math.inf else None


def _exp(log: float) -> float | None:
    return math.exp(log) if math.isfinite(log) else None


def _exp_mean(by_seed: Series) -> float | None:
    ended = by_seed.dropna()
    return _exp(math.fsum(ended) / len(ended)) if len(ended) else None


def _summary(grid: DataFrame, top: float) -> dict[str, Any]:
    """Put an arm over its grid in numbers."""
    each, mean = finished(grid), _grid_mean(grid)
    return {
        "settings": len(grid),
        "diverged": len(grid) - len(each),
        "geometric_mean": None if mean is None else math.exp(mean),
        "best": _exp(each.min()),
        "worst": None if mean is None else math.exp(each.max()),
        "within": int((each <= top + math.log1p(WITHIN)).sum()),
    }


def _ratio(arm: DataFrame, grid: DataFrame) -> dict[str, Any] | None:
    """Divide the geometric mean of an arm by that of the chosen one: the mean over the seeds, and its interval."""
    pairs = paired(arm, grid)
    if pairs is None:
        return None
    low, high = map(math.exp, pairs.interval) if pairs.interval else (None, None)
    return {"mean": pairs.ratio, "low": low, "high": high, "seeds": pairs.seeds}


def _cell_by_cell(grid: DataFrame, never: DataFrame) -> dict[str, Any]:
    """Where no restart already works: settings in which the chosen one is worse for every seed, and by how much."""
    each = finished(never)
    good = each.index[each <= each.min() + math.log1p(WITHIN)]
    gaps = (grid.reindex(good) - never.loc[good]).dropna(how="all")
    return {
        "settings": len(good),
        "worse_for_every_seed": int((gaps.min(axis=1) > 0).sum()),
        "largest_ratio": max(map(math.exp, means(gaps)), default=None),
        "largest_of_a_seed": max(map(math.exp, gaps.stack().dropna()), default=None) if len(gaps) else None,
    }


# ---------------------------------------------------------------------------------------------------------------- words


def answer(result: Result) -> str:
    """Describe every arm, and say where the aims are reached."""
    places = result.numbers["places"]
    ratios = [
        line["over_chosen"] for facts in places.values() for lines in facts["rules"].values() for line in lines.values()
    ]
    counts = sorted({ratio["seeds"] for ratio in ratios if ratio and ratio["low"] is not None}, reverse=True)
    shares = ", ".join(f"{min(LEVEL, largest_coverage(count)):.0%} ({count} seeds)" for count in counts)
    brackets = (
        f" In brackets: the bootstrap's {LEVEL:.0%} over the seeds, which can hold the true mean in at most {shares}."
    )
    blocks = [
        f"Validation {judged(result.settings)} ({result.settings['seeds_words']}). Ratios above 1 favour {CHOSEN}."
        + (brackets if counts else "")
    ]
    for place, facts in places.items():
        blocks += _place_tables(place, facts)
    singles = (AVERAGING, TUNED_FREE, BEST_OTHER)
    body = [[place, *(_ratio_words(facts["single"][what]) for what in singles)] for place, facts in places.items()]
    blocks.append(format_table([f"over {CHOSEN}", *singles], body))
    which = "; ".join(f"{place}: {facts['best_other']}" for place, facts in places.items() if facts["best_other"])
    blocks.append(f"The best others, chosen on the runs that judge them, are {which or 'unknown'}.")
    return "\n".join(blocks + [tally(claim, holds) for claim, holds in aims(places).items()])


def _place_tables(place: str, facts: Mapping[str, Any]) -> list[str]:
    """Make tables of every arm by rule, in perplexity and over the chosen one."""
    best, free, averaging = (readable(facts[key]) or "unknown" for key in ("best", "momentum_free", "averaging"))
    blocks = [
        f"{place}. Best of all {best}; momentum-free {free} at its best; plain averaging {averaging}. For each "
        "rule: geometric mean over the grid, best and worst setting, and settings within "
        f"{WITHIN:.0%} of the best of all."
    ]
    every: Mapping[str, Any] = facts["rules"]
    for form in BOTH_FORMS:
        lines_by_rule = {rule: lines for rule, lines in every.items() if rule.startswith(form)}
        if lines_by_rule:
            header = ["", *(word for rule in lines_by_rule for word in (rule, "best", "worst", "within"))]
            body = [
                [arm, *(word for lines in lines_by_rule.values() for word in _line_words(lines.get(arm)))]
                for arm in arms_of(lines_by_rule.values())
            ]
            blocks.append(format_table(header, body))
    if every:
        arms = [arm for arm in arms_of(every.values()) if arm != CHOSEN]
        body = [
            [arm, *(_ratio_words(lines[arm]["over_chosen"]) if arm in lines else "" for lines in every.values())]
            for arm in arms
        ]
        body.append([BEST_K, *(lines[BEST_K]["period"] for lines in every.values())])
        blocks.append(format_table([f"over {CHOSEN}", *every], body))
    parts = []
    for rule, lines in every.items():
        worst = lines[CHOSEN]["against_never"]
        if worst and worst["largest_ratio"] is not None:
            parts.append(f"{rule} {worst['largest_ratio']:.3f}, of a seed {worst['largest_of_a_seed']:.3f}")
    if parts:
        words = f"{CHOSEN} over never in its worst setting of those that work without restarts"
        blocks.append(f"{words}: {'; '.join(parts)}.")
    return blocks


def _line_words(line: Mapping[str, Any] | None) -> tuple[str, str, str, str]:
    if line is None:
        return "", "", "", ""
    mean = line["geometric_mean"]  # below 1 it is of a loss
    mean = "missing" if mean is None else readable(mean) if mean < 1 else f"{mean:.2f}"
    mean = f"{line['diverged']} div." if line["diverged"] else mean
    return mean, readable(line["best"]), readable(line["worst"]), f"{line['within']}/{line['settings']}"


def _ratio_words(ratio: Mapping[str, Any] | None) -> str:
    if ratio is None:
        return "no pair"
    ends = "" if ratio["low"] is None else f" [{ratio['low']:.3f}, {ratio['high']:.3f}]"
    return f"{ratio['mean']:.3f}{ends}"


def arms_of(lines: Iterable[Collection[str]]) -> list[str]:
    """Return the arms that have runs, in the order of where there are most of them."""
    derived = {BEST_K, AVERAGING, TUNED_FREE}
    longest_first = sorted(lines, key=len, reverse=True)
    return [arm for arm in dict.fromkeys(arm for names in longest_first for arm in names) if arm not in derived]


def aims(places: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, bool | None]]:
    """Say what a policy without hyperparameters is for, and where it is reached; None where that is not known."""
    within = f"within {CLOSE:.1%} of the best of all, or within what the seeds can tell"
    reached: dict[str, dict[str, bool | None]] = {}
    for place, facts in places.items():
        over = facts["single"][BEST_OTHER]
        is_open = bool(over and over["high"] is not None and over["high"] >= 1)  # the seeds cannot tell which is ahead
        for rule, lines in facts["rules"].items():
            mine, never = lines[CHOSEN], lines[CHOSEN]["against_never"]
            holds: dict[str, bool | None] = {}
            for other in (BEST_K, AVERAGING):
                means = mine["geometric_mean"], lines[other]["geometric_mean"]
                claim = f"{CHOSEN} is at or below {other} in geometric mean over the grid"
                holds[claim] = None if None in means else means[0] <= means[1]
            bests = mine["best"], facts["best"]
            holds[f"the best setting of {CHOSEN} is {within}"] = (
                None if None in bests else bests[0] <= bests[1] * (1 + CLOSE) or is_open
            )
            holds[f"where no restart works, {CHOSEN} is in no setting worse for every seed"] = (
                never["worse_for_every_seed"] == 0 if never and never["settings"] else None
            )
            for claim, answer in holds.items():
                reached.setdefault(claim, {})[f"{rule} {place}"] = answer
    return reached
