"""What the two studies on adaptive policies share: arms over a grid in numbers, seed by seed, and words for them.

Everything is compared on log perplexity, seed by seed: a seed shares initial weights and data order between arms. An
interval is the percentile bootstrap's at 95 % (`judge.bootstrap` says what that is worth for few seeds).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from twophase.judge.bootstrap import LEVEL, largest_coverage
from twophase.judge.cells import (
    DataFrame,
    Series,
    alike,
    cells_of,
    finished,
    logs,
    means,
    paired,
)
from twophase.recipes.adaptive import CORPUS, FIXED, WIDTH, inner_steps_of, momenta_of
from twophase.recipes.controls import AVERAGING_LR, MOMENTUM_FREE
from twophase.recipes.paper import BOTH_FORMS, RULES, Scale, arm_name
from twophase.studies._lm import SHORT_KINDS, seeds_words, tally
from twophase.studies.study import Result
from twophase.sweep.table import SEED, Row, format_table, readable

WITHIN = 0.25
"""A setting works when its perplexity is at most this much above the best of all, relatively."""
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


def places_of(cells: DataFrame) -> dict[str, DataFrame]:
    """Split cells by what they may be compared within: width and text as they come, then communication period."""
    kinds = cells[[WIDTH, CORPUS]].drop_duplicates()
    widths, texts = kinds.nunique()
    places = {}
    for width, corpus in kinds.itertuples(index=False):
        kind = cells[(cells[WIDTH] == width) & (cells[CORPUS] == corpus)]
        for inner_steps, place in kind.groupby("inner_steps"):
            words = [f"S={inner_steps}", *([f"width {width}"] if widths > 1 else []), *([corpus] if texts > 1 else [])]
            places[", ".join(words)] = place
    return places


def facts_of(cells: DataFrame, arms: Sequence[str], chosen: str) -> dict[str, Any]:
    """Put one place in numbers: every arm of every form and rule, and the chosen one against each.

    Args:
        cells: of the place.
        arms: names of the arms, without form and rule.
        chosen: the one that is compared with the others.

    Returns:
        `best`: the lowest mean perplexity of a setting of any arm; `averaging` and `momentum_free`: those of plain
        averaging and of momentum-free SGD at its best; `best_other`: the best setting of the other arms by name;
        `rules`: by short name of form and rule the arms; `single`: the three of these settings over the chosen arm.
    """
    import pandas as pd  # noqa: PLC0415 - an extra, and slow to import

    every = logs(cells, ["arm", *_GRID])
    names = every.index.get_level_values("arm")

    def grid_of(arm: str) -> DataFrame:
        return every[names == arm].droplevel("arm")

    top = finished(every).min()
    free = grid_of(MOMENTUM_FREE)
    of_chosen = {arm_name(form, kind, chosen) for form in BOTH_FORMS for kind in RULES}
    averaging = free[free.index.get_level_values(_LR) == AVERAGING_LR].max()
    tuned_free, _ = _best_setting(every[names == MOMENTUM_FREE])
    best_other, name = _best_setting(every[~names.isin(of_chosen)])
    facts: dict[str, Any] = {
        "best": _exp(top),
        "averaging": _exp_mean(averaging),
        "momentum_free": _exp_mean(tuned_free),
        "best_other": name,
        "rules": {},
    }
    grids = {}
    for form in BOTH_FORMS:
        for kind in RULES:
            grid_by_arm = {arm: grid for arm in arms if len(grid := grid_of(arm_name(form, kind, arm)))}
            if chosen not in grid_by_arm:
                continue
            grid = grids[form, kind] = grid_by_arm[chosen]
            fixed = [arm for arm in FIXED if arm in grid_by_arm and arm != "never"]
            ranked = [(mean, arm) for arm in fixed if (mean := _grid_mean(grid_by_arm[arm])) is not None]
            period = min(ranked)[1] if ranked else ""
            grid_by_arm[BEST_K] = grid_by_arm[period] if period else grid[:0]
            grid_by_arm[AVERAGING] = alike(grid, averaging)
            grid_by_arm[TUNED_FREE] = alike(grid, tuned_free)
            lines = {arm: _summary(runs, top) for arm, runs in grid_by_arm.items()}
            lines[BEST_K]["period"] = period
            for arm, line in lines.items():
                line["over_chosen"] = _ratio(grid_by_arm[arm], grid)
            never = grid_by_arm.get("never")
            lines[chosen]["against_never"] = None if never is None else _cell_by_cell(grid, never)
            facts["rules"][f"{form} {SHORT_KINDS[kind]}"] = lines
    whole = pd.concat(grids, names=["form", "kind"]) if grids else None
    single = {AVERAGING: averaging, TUNED_FREE: tuned_free, BEST_OTHER: best_other}
    facts["single"] = {
        what: None if whole is None else _ratio(alike(whole, by_seed), whole) for what, by_seed in single.items()
    }
    return facts


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
    ratios = [math.exp(mean) for mean in means(gaps)] if len(gaps) else []
    singles = [math.exp(gap) for gap in gaps.stack().dropna()] if len(gaps) else []
    return {
        "settings": len(good),
        "worse_for_every_seed": int((gaps.min(axis=1) > 0).sum()),
        "largest_ratio": max(ratios, default=None),
        "largest_of_a_seed": max(singles, default=None),
    }


def lines_of(places: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One line of the table for each place, rule and arm."""
    return [
        {
            "place": place,
            "rule": rule,
            "arm": arm,
            "settings": line["settings"],
            "diverged": line["diverged"],
            "geometric_mean": line["geometric_mean"],
            "best": line["best"],
            "worst": line["worst"],
            "within": line["within"],
            **{
                f"over_chosen_{what}": None if line["over_chosen"] is None else line["over_chosen"][what]
                for what in ("mean", "low", "high")
            },
            "period": line.get("period", ""),
        }
        for place, facts in places.items()
        for rule, arms in facts["rules"].items()
        for arm, line in arms.items()
    ]


# ---------------------------------------------------------------------------------------------------------------- words


def tables(places: Mapping[str, Mapping[str, Any]], chosen: str) -> list[str]:
    """For each place tables of every arm by rule, in perplexity and over the chosen one."""
    blocks = []
    for place, facts in places.items():
        best, free, averaging = (readable(facts[key]) or "unknown" for key in ("best", "momentum_free", "averaging"))
        blocks.append(
            f"{place}. Best of all {best}; momentum-free {free} at its best; plain averaging {averaging}. For each "
            "rule: geometric mean over the grid, best and worst setting, and settings within "
            f"{WITHIN:.0%} of the best of all."
        )
        for form in BOTH_FORMS:
            rules = [rule for rule in facts["rules"] if rule.startswith(form)]
            if rules:
                arms = arms_of(facts["rules"][rule] for rule in rules)
                header = ["", *(word for rule in rules for word in (rule, "best", "worst", "within"))]
                body = [[arm, *_line_words(facts, rules, arm)] for arm in arms]
                blocks.append(format_table(header, body))
        if facts["rules"]:
            others = [arm for arm in arms_of(facts["rules"].values()) if arm != chosen]
            body = [[arm, *_over_words(facts, arm)] for arm in (*others, BEST_K)]
            blocks.append(format_table([f"over {chosen}", *facts["rules"]], body))
        worst = {rule: _worst_words(lines[chosen]) for rule, lines in facts["rules"].items()}
        parts = [f"{rule} {words}" for rule, words in worst.items() if words]
        if parts:
            blocks.append(
                f"{chosen} over never in its worst setting of those that work without restarts: {'; '.join(parts)}."
            )
    singles = (AVERAGING, TUNED_FREE, BEST_OTHER)
    body = [[place, *(_ratio_words(facts["single"][what]) for what in singles)] for place, facts in places.items()]
    blocks.append(format_table([f"over {chosen}", *singles], body))
    which = "; ".join(f"{place}: {facts['best_other']}" for place, facts in places.items() if facts["best_other"])
    blocks.append(f"The best others, chosen on the runs that judge them, are {which or 'unknown'}.")
    return blocks


def _worst_words(line: Mapping[str, Any]) -> str:
    """In the mean over the seeds, and of a single seed."""
    worst = line.get("against_never")
    if not worst or worst["largest_ratio"] is None:
        return ""
    return f"{worst['largest_ratio']:.3f}, of a seed {worst['largest_of_a_seed']:.3f}"


def _line_words(facts: Mapping[str, Any], rules: Sequence[str], arm: str) -> list[str]:
    words: list[str] = []
    for rule in rules:
        line = facts["rules"][rule].get(arm)
        if line is None:
            words += ["", "", "", ""]
            continue
        mean = "missing" if line["geometric_mean"] is None else f"{line['geometric_mean']:.2f}"
        mean = f"{line['diverged']} div." if line["diverged"] else mean
        words += [mean, readable(line["best"]), readable(line["worst"]), f"{line['within']}/{line['settings']}"]
    return words


def _over_words(facts: Mapping[str, Any], arm: str) -> list[str]:
    """An arm over the chosen one for each rule, with its interval; of the best period, which it is."""
    words: list[str] = []
    for lines in facts["rules"].values():
        line = lines.get(arm)
        cell = "" if line is None else line["period"] if arm == BEST_K else _ratio_words(line["over_chosen"])
        words.append(cell)
    return words


def _ratio_words(ratio: Mapping[str, Any] | None) -> str:
    if ratio is None:
        return "no pair"
    ends = "" if ratio["low"] is None else f" [{ratio['low']:.3f}, {ratio['high']:.3f}]"
    return f"{ratio['mean']:.3f}{ends}"


def arms_of(lines: Iterable[Mapping[str, Any]]) -> list[str]:
    """The arms that have runs, in the order of where there are most of them."""
    derived = {BEST_K, AVERAGING, TUNED_FREE}
    longest_first = sorted(lines, key=len, reverse=True)
    return [arm for arm in dict.fromkeys(arm for one in longest_first for arm in one) if arm not in derived]


def aims(places: Mapping[str, Mapping[str, Any]], chosen: str) -> dict[str, dict[str, bool | None]]:
    """What a policy without hyperparameters is for, and where it is reached."""
    reached: dict[str, dict[str, bool | None]] = {}
    for place, facts in places.items():
        for rule, arms in facts["rules"].items():
            name, mine = f"{rule} {place}", arms[chosen]

            def at_most(other: str, mine: Any = mine, arms: Any = arms) -> bool | None:
                ours, theirs = mine["geometric_mean"], arms.get(other, {}).get("geometric_mean")
                return None if ours is None or theirs is None else ours <= theirs

            never = mine.get("against_never")
            close = (
                None if facts["best"] is None or mine["best"] is None else mine["best"] <= facts["best"] * (1 + CLOSE)
            )
            over = facts["single"][BEST_OTHER]
            if close is False and over is not None and over["high"] is not None:
                close = over["high"] >= 1
            for claim, held in (
                (f"{chosen} is at or below {BEST_K} in geometric mean over the grid", at_most(BEST_K)),
                (f"{chosen} is at or below {AVERAGING} in geometric mean over the grid", at_most(AVERAGING)),
                (
                    f"the best setting of {chosen} is within {CLOSE:.1%} of the best of all, or within what the seeds "
                    "can tell",
                    close,
                ),
                (
                    f"where no restart works, {chosen} is in no setting worse for every seed",
                    None if never is None or not never["settings"] else never["worse_for_every_seed"] == 0,
                ),
            ):
                reached.setdefault(claim, {})[name] = held
    return reached


# -------------------------------------------------------------------------------------------------------- both studies


def result_of(rows: Sequence[Row], scale: Scale, arms: Sequence[str]) -> Result:
    """Every arm by place, form and rule."""
    places = {name: facts_of(cells, arms, CHOSEN) for name, cells in places_of(cells_of(rows)).items()}
    seeds = sorted({row.values[SEED] for row in rows})
    alone = seeds_words(replace(scale, seeds=tuple(seeds)))
    settings = {
        "seeds": seeds,
        "seeds_words": f"means over up to {len(seeds)} seeds" if len(seeds) > 1 else alone,
        "lrs": scale.lrs,
        "momenta": momenta_of(scale),
        "inner_steps": inner_steps_of(scale),
    }
    return Result(lines_of(places), {"places": places}, settings)


def answer_of(result: Result) -> str:
    """Every arm, and where the aims are reached."""
    places = result.numbers["places"]
    lines = [
        f"Validation perplexity ({result.settings['seeds_words']}). Ratios above 1 favour {CHOSEN}.{_coverage(places)}"
    ]
    lines += tables(places, CHOSEN)
    lines += [tally(claim, held) for claim, held in aims(places, CHOSEN).items()]
    return "\n".join(lines)


def _coverage(places: Mapping[str, Mapping[str, Any]]) -> str:
    """What brackets hold, and the most that they can cover, by number of seeds."""
    lines = [
        line["over_chosen"] for facts in places.values() for arms in facts["rules"].values() for line in arms.values()
    ]
    counts = sorted({ratio["seeds"] for ratio in lines if ratio is not None and ratio["low"] is not None}, reverse=True)
    shares = ", ".join(f"{min(LEVEL, largest_coverage(count)):.0%} ({count} seeds)" for count in counts)
    words = (
        f" In brackets: the bootstrap's {LEVEL:.0%} over the seeds, which can hold the true mean in at most {shares}."
    )
    return words if counts else ""
