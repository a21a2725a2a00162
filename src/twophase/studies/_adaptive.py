"""What the two studies on adaptive policies share: arms over a grid in numbers, seed by seed, and words for them.

Everything is compared on log perplexity, seed by seed: a seed shares initial weights and data order between arms. An
interval is the percentile bootstrap's at 95 % (`experiment.bootstrap` says what that is worth for few seeds).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from twophase.figures.style import INK, MUTED, look, new_page
from twophase.judge.bootstrap import LEVEL, largest_coverage, percentile_interval
from twophase.recipes.adaptive import CORPUS, FIXED, WIDTH, inner_steps_of, momenta_of
from twophase.recipes.controls import AVERAGING_LR, MOMENTUM_FREE
from twophase.recipes.paper import BOTH_FORMS, RULES, Scale, arm_name
from twophase.studies._lm import SHORT_KINDS, seeds_words, tally
from twophase.studies._lm_figures import note
from twophase.studies.study import Result
from twophase.sweep.table import SEED, Row, format_table, readable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WITHIN = 0.25
"""A setting works when its perplexity is at most this much above the best of all, relatively."""
CLOSE = 0.005
"""Two tuned bests are as good as each other when they differ by at most this, relatively."""
AVERAGING = "plain averaging"
TUNED_FREE = "momentum-free, tuned"
BEST_OTHER = "best other, tuned"
BEST_K = "best fixed K"
_LR, _MOMENTUM = "outer.lr", "outer.momentum"

CHOSEN = "auto"
"""The arm that both studies are about."""

Runs = dict[tuple[Any, ...], dict[Any, float | None]]
"""From setting, in an arm (momentum, learning rate), to seed to log perplexity; None for a run that has diverged."""


def places_of(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows by what they may be compared within: width and text as they come, then communication period."""
    kinds = list(dict.fromkeys((row.values[WIDTH], row.values[CORPUS]) for row in rows))
    several = [len({kind[index] for kind in kinds}) > 1 for index in (0, 1)]
    found: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: (kinds.index(_place(row)[:2]), _place(row)[2])):
        width, corpus, inner_steps = _place(row)
        words = [f"S={inner_steps}", *([f"width {width}"] * several[0]), *([str(corpus)] * several[1])]
        found.setdefault(", ".join(words), []).append(row)
    return found


def _place(row: Row) -> tuple[Any, ...]:
    return row.values[WIDTH], row.values[CORPUS], row.values["inner_steps"]


def runs_of(rows: Sequence[Row], arm: str) -> Runs:
    """An arm's runs; those that are missing are left out."""
    found: Runs = {}
    for row in rows:
        if row.arm == arm and row.state in {"finished", "diverged"}:
            log = None if row.perplexity is None or row.state == "diverged" else math.log(row.perplexity)
            found.setdefault((row.values[_MOMENTUM], row.values[_LR]), {})[row.values[SEED]] = log
    return found


def facts_of(rows: Sequence[Row], arms: Sequence[str], chosen: str) -> dict[str, Any]:
    """One place: every arm of every form and rule in numbers, and the chosen one against each.

    Args:
        rows: of the place.
        arms: names of the arms, without form and rule.
        chosen: the one that is held against the others.

    Returns:
        `best`: the lowest mean perplexity of a setting of any arm; `averaging` and `momentum_free`: those of plain
        averaging and of momentum-free SGD at its best; `best_other`: the best setting of the other arms by name;
        `rules`: by short name of form and rule the arms; `single`: the three of these settings over the chosen arm.
    """
    free = runs_of(rows, MOMENTUM_FREE)
    every = {arm: runs_of(rows, arm) for arm in dict.fromkeys(row.arm for row in rows)}
    top = min((mean for runs in every.values() for mean in _means(runs).values()), default=None)
    ours = {arm_name(form, kind, chosen) for form in BOTH_FORMS for kind in RULES}
    best_other, name = _best_setting({arm: runs for arm, runs in every.items() if arm not in ours})
    averaging = {seed: log for (_, lr), by_seed in free.items() if lr == AVERAGING_LR for seed, log in by_seed.items()}
    tuned_free, _ = _best_setting({MOMENTUM_FREE: free})
    facts: dict[str, Any] = {
        "best": None if top is None else math.exp(top),
        "averaging": _exp_mean(averaging),
        "momentum_free": _exp_mean(tuned_free),
        "best_other": name,
        "rules": {},
    }
    grids: Runs = {}
    for form in BOTH_FORMS:
        for kind in RULES:
            found = {arm: runs for arm in arms if (runs := runs_of(rows, arm_name(form, kind, arm)))}
            if chosen not in found:
                continue
            fixed = [arm for arm in FIXED if arm in found and arm != "never"]
            ranked = [(mean, arm) for arm in fixed if (mean := _grid_mean(found[arm])) is not None]
            found[BEST_K] = found[min(ranked)[1]] if ranked else {}
            grid = found[chosen]
            grids |= {(*place, form, kind): by_seed for place, by_seed in grid.items()}
            found[AVERAGING] = dict.fromkeys(grid, averaging)
            found[TUNED_FREE] = dict.fromkeys(grid, tuned_free)
            lines = {arm: _summary(runs, top) for arm, runs in found.items()}
            lines[BEST_K]["period"] = min(ranked)[1] if ranked else ""
            for arm, runs in found.items():
                lines[arm]["over_chosen"] = _ratio(runs, grid)
            lines[chosen]["against_never"] = _cell_by_cell(grid, found["never"]) if "never" in found else None
            facts["rules"][f"{form} {SHORT_KINDS[kind]}"] = lines
    single = {AVERAGING: averaging, TUNED_FREE: tuned_free, BEST_OTHER: best_other}
    facts["single"] = {
        what: _ratio(dict.fromkeys(grids, by_seed), grids) if grids else None for what, by_seed in single.items()
    }
    return facts


def _means(runs: Runs) -> dict[tuple[Any, ...], float]:
    """Mean log perplexity of the settings that have finished on every seed."""
    found = {}
    for place, by_seed in runs.items():
        known = [log for log in by_seed.values() if log is not None]
        if known and len(known) == len(by_seed):
            found[place] = math.fsum(known) / len(known)
    return found


def _best_setting(arms: Mapping[str, Runs]) -> tuple[dict[Any, float | None], str]:
    """From seed to log perplexity of the setting with the lowest mean in any of the arms, and its name.

    Like the best of the periods it is chosen on the runs that judge it, which flatters it.
    """
    ranked = [(mean, arm, place) for arm, runs in arms.items() for place, mean in _means(runs).items()]
    if not ranked:
        return {}, ""
    _, arm, (momentum, lr) = min(ranked)
    return arms[arm][momentum, lr], f"{arm}, momentum {momentum:g}, lr {lr:g}"


def _grid_mean(runs: Runs) -> float | None:
    """Mean log perplexity over the grid; None when a run has diverged, which no mean can hold."""
    means = _means(runs)
    return math.fsum(means.values()) / len(means) if means and len(means) == len(runs) else None


def _exp_mean(by_seed: Mapping[Any, float | None]) -> float | None:
    known = [log for log in by_seed.values() if log is not None]
    return math.exp(math.fsum(known) / len(known)) if known and len(known) == len(by_seed) else None


def _summary(runs: Runs, top: float | None) -> dict[str, Any]:
    """An arm over its grid."""
    means, mean = _means(runs), _grid_mean(runs)
    bound = None if top is None else top + math.log1p(WITHIN)
    return {
        "settings": len(runs),
        "diverged": len(runs) - len(means),
        "geometric_mean": None if mean is None else math.exp(mean),
        "best": math.exp(min(means.values())) if means else None,
        "worst": math.exp(max(means.values())) if means and len(means) == len(runs) else None,
        "within": 0 if bound is None else sum(value <= bound for value in means.values()),
    }


def _ratio(runs: Runs, grid: Runs) -> dict[str, Any] | None:
    """Geometric mean of an arm over that of the chosen one: the mean over the seeds, and its interval."""
    seeds = [seed for seed in next(iter(grid.values())) if all(seed in by_seed for by_seed in runs.values())]
    gaps = []
    for seed in seeds:
        pairs = [(runs[place][seed], grid[place].get(seed)) for place in grid if place in runs]
        if not pairs or any(ours is None or theirs is None for ours, theirs in pairs):
            return None
        gaps.append(math.fsum(ours - theirs for ours, theirs in pairs if ours is not None and theirs is not None))
        gaps[-1] /= len(pairs)
    if not gaps:
        return None
    interval = percentile_interval(gaps)
    ends = (math.exp(interval.low), math.exp(interval.high)) if interval else (None, None)
    return {"mean": math.exp(math.fsum(gaps) / len(gaps)), "low": ends[0], "high": ends[1], "seeds": len(gaps)}


def _cell_by_cell(grid: Runs, never: Runs) -> dict[str, Any]:
    """Where no restart already works: settings in which the chosen one is worse for every seed, and by how much."""
    means = _means(never)
    good = [place for place, mean in means.items() if mean <= min(means.values()) + math.log1p(WITHIN)]
    worse, ratios, singles = 0, [], []
    for place in good:
        gaps = [
            (math.inf if ours is None else ours) - theirs
            for seed, theirs in never[place].items()
            if theirs is not None and seed in grid.get(place, {})
            for ours in [grid[place][seed]]
        ]
        worse += bool(gaps) and min(gaps) > 0
        ratios += [math.exp(math.fsum(gaps) / len(gaps))] if gaps else []
        singles += map(math.exp, gaps)
    return {
        "settings": len(good),
        "worse_for_every_seed": worse,
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
                arms = _arms(facts["rules"][rule] for rule in rules)
                header = ["", *(word for rule in rules for word in (rule, "best", "worst", "within"))]
                body = [[arm, *_line_words(facts, rules, arm)] for arm in arms]
                blocks.append(format_table(header, body))
        if facts["rules"]:
            others = [arm for arm in _arms(facts["rules"].values()) if arm != chosen]
            body = [[arm, *_over_words(facts, arm)] for arm in (*others, BEST_K)]
            blocks.append(format_table([f"over {chosen}", *facts["rules"]], body))
        worst = {rule: _worst_words(lines[chosen]) for rule, lines in facts["rules"].items()}
        told = [f"{rule} {words}" for rule, words in worst.items() if words]
        if told:
            blocks.append(
                f"{chosen} over never in its worst setting of those that work without restarts: {'; '.join(told)}."
            )
    singles = (AVERAGING, TUNED_FREE, BEST_OTHER)
    body = [[place, *(_ratio_words(facts["single"][what]) for what in singles)] for place, facts in places.items()]
    blocks.append(format_table([f"over {chosen}", *singles], body))
    which = "; ".join(f"{place}: {facts['best_other']}" for place, facts in places.items() if facts["best_other"])
    blocks.append(f"The best others, chosen on the runs that judge them, are {which or 'unknown'}.")
    return blocks


def _worst_words(line: Mapping[str, Any]) -> str:
    """In the mean over the seeds, and of a single seed."""
    found = line.get("against_never")
    if not found or found["largest_ratio"] is None:
        return ""
    return f"{found['largest_ratio']:.3f}, of a seed {found['largest_of_a_seed']:.3f}"


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
        told = "" if line is None else line["period"] if arm == BEST_K else _ratio_words(line["over_chosen"])
        words.append(told)
    return words


def _ratio_words(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return "no pair"
    ends = "" if found["low"] is None else f" [{found['low']:.3f}, {found['high']:.3f}]"
    return f"{found['mean']:.3f}{ends}"


def aims(places: Mapping[str, Mapping[str, Any]], chosen: str) -> dict[str, dict[str, bool | None]]:
    """What a policy without hyperparameters is for, and where it is reached."""
    found: dict[str, dict[str, bool | None]] = {}
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
                found.setdefault(claim, {})[name] = held
    return found


# --------------------------------------------------------------------------------------------------------------- figure


def ranges(places: Mapping[str, Mapping[str, Any]], chosen: str, words: str) -> Figure:
    """Of every arm the geometric mean over its grid, from its best setting to its worst.

    Rows: form and rule; columns: places. The vertical line is plain averaging.
    """
    names = list(places)
    rules = list(dict.fromkeys(rule for facts in places.values() for rule in facts["rules"]))
    drawn = {rule: _arms(facts["rules"].get(rule, {}) for facts in places.values()) for rule in rules}
    heights = [0.3 + 0.125 * len(drawn[rule]) for rule in rules]
    figure = new_page(0.8 + sum(heights))
    shape: dict[str, Any] = {"sharey": "row", "sharex": "col", "gridspec_kw": {"height_ratios": heights}}
    panels = figure.subplots(len(rules), len(names), squeeze=False, **shape)
    for row, rule in zip(panels, rules, strict=True):
        for panel, name in zip(row, names, strict=True):
            lines = places[name]["rules"].get(rule, {})
            for height, arm in enumerate(reversed(drawn[rule])):
                if arm in lines:
                    _draw_range(
                        panel, height, lines[arm], look(2 if arm == chosen else 1 if arm in FIXED else 0)["color"]
                    )
            if places[name]["averaging"] is not None:
                panel.axvline(places[name]["averaging"], color=INK, linewidth=0.6, linestyle=(0, (2, 2)), zorder=0)
            panel.set_xscale("log")
            panel.set_yticks(range(len(drawn[rule])), list(reversed(drawn[rule])), fontsize=6)
            panel.set_ylim(-0.7, len(drawn[rule]) - 0.3)
            panel.tick_params(axis="x", labelsize=6)
        row[0].set_ylabel(rule, fontsize=7.5)
    for column in panels.T:
        _plain_ticks(column)
    for panel, name in zip(panels[0], names, strict=True):
        panel.set_title(name.replace(", ", "\n", 1), fontsize=7)
    panels[-1][len(names) // 2].set_xlabel("validation perplexity a token", fontsize=6.5)
    note(
        figure,
        f"Dot: geometric mean over the grid; line: from its best setting to its worst. Dashed: averaging. {words}",
    )
    return figure


def _arms(lines: Iterable[Mapping[str, Any]]) -> list[str]:
    """The arms that have runs, in the order of where there are most of them."""
    derived = {BEST_K, AVERAGING, TUNED_FREE}
    longest_first = sorted(lines, key=len, reverse=True)
    return [arm for arm in dict.fromkeys(arm for one in longest_first for arm in one) if arm not in derived]


def _draw_range(panel: Any, height: int, line: Mapping[str, Any], colour: Any) -> None:
    if line["best"] is None:
        panel.annotate(f"{line['diverged']} div.", (0.02, height), xycoords=("axes fraction", "data"), **_SMALL)
        return
    right = line["worst"] if line["worst"] is not None else line["best"]
    panel.plot([line["best"], right], [height, height], color=colour, linewidth=1.1)
    if line["geometric_mean"] is not None:
        panel.plot(line["geometric_mean"], height, marker="o", color=colour, markersize=3.2)
    if line["diverged"]:
        panel.annotate(f" {line['diverged']} div.", (right, height), **_SMALL)


_SMALL: dict[str, Any] = {"fontsize": 5.5, "color": MUTED, "va": "center"}


def _plain_ticks(column: Sequence[Any]) -> None:
    """A few plain numbers instead of powers of ten on the shared logarithmic axis of a column."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator  # noqa: PLC0415 - an extra

    low, high = column[0].get_xlim()
    for subs in ((1, 1.1, 1.2, 1.35, 1.5, 1.75, 2, 2.5, 3, 4, 5, 6, 8), (1, 1.5, 2, 3, 5, 7), (1, 2, 5), (1, 3), (1,)):
        ticks = [sub * 10.0**power for power in range(-1, 12) for sub in subs if low <= sub * 10.0**power <= high]
        if len(ticks) <= _TICKS:
            break
    for panel in column:
        panel.xaxis.set_major_locator(FixedLocator(ticks))
        panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        panel.xaxis.set_minor_locator(NullLocator())


_TICKS = 6


# -------------------------------------------------------------------------------------------------------- both studies


def result_of(rows: Sequence[Row], scale: Scale, arms: Sequence[str]) -> Result:
    """Every arm by place, form and rule."""
    places = {name: facts_of(found, arms, CHOSEN) for name, found in places_of(rows).items()}
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
    counts = sorted({found["seeds"] for found in lines if found is not None and found["low"] is not None}, reverse=True)
    shares = ", ".join(f"{min(LEVEL, largest_coverage(count)):.0%} ({count} seeds)" for count in counts)
    words = (
        f" In brackets: the bootstrap's {LEVEL:.0%} over the seeds, which can hold the true mean in at most {shares}."
    )
    return words if counts else ""


def draw_of(result: Result) -> Figure:
    """The arms' ranges."""
    count = len(result.settings["seeds"])
    return ranges(result.numbers["places"], CHOSEN, f"Means over up to {count} seeds." if count > 1 else "One seed.")
