"""Do restarts enlarge the good region of outer learning rates and momenta of a small language model?

Heatmaps of validation perplexity without restarts, with one every 3 rounds, and without restarts at the latter's mean
outer gain: the control that tells a better use of momentum from a smaller step. Both forms of the rule, at a short and
a long communication period.

Source: paper section 4, figure 3, and the last figure of the appendix; theory notes R31, E11.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from twophase.figures.style import new_page
from twophase.recipes.paper import BOTH_FORMS, PERIOD, RULES, Scale, arm_name, control_name, robustness_heatmaps
from twophase.rule import FORM_WORDS
from twophase.studies._lm import (
    MARGIN,
    WITHIN,
    Line,
    best,
    contrast,
    control_of,
    difference,
    difference_words,
    free_and_averaging,
    lines_of,
    lower,
    one,
    perplexity_words,
    pick,
    place_name,
    public,
    ratio_above,
    ratio_words,
    seeds_words,
    shown,
    summary,
    tally,
)
from twophase.studies._lm_figures import colour_bar, colours_for, draw_heatmap, note
from twophase.studies.study import Result
from twophase.sweep.grid import MOMENTUM_FREE, Sweep
from twophase.sweep.table import Row, format_table, readable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

QUESTION = "Do restarts enlarge the good region of outer learning rate and momentum of a language model?"
_NEVER, _RESTARTED = "never", f"K={PERIOD}"


def sweep(scale: Scale, rows: Sequence[Row]) -> Sweep:
    """The runs (`recipes.paper.robustness_heatmaps`); nothing depends on earlier rows."""
    del rows
    return robustness_heatmaps(scale)


def table(rows: Sequence[Row], scale: Scale) -> Result:
    """Every setting, and by communication period, form and rule: regions, bests and comparisons with the controls."""
    lines = lines_of(rows, scale)
    places: dict[str, Any] = {}
    free: dict[str, Any] = {}
    for inner_steps in (scale.short, scale.long):
        here = pick(lines, inner_steps=inner_steps)
        top = best(here)
        bound = None if top is None else top["perplexity"] * (1 + WITHIN)
        plain, averaging = free_and_averaging(lines, inner_steps)
        free[str(inner_steps)] = {
            "rounds": scale.rounds(inner_steps),
            "best_of_all": shown(top),
            "momentum_free": shown(plain),
            "averaging": shown(averaging),
        }
        for form in BOTH_FORMS:
            for kind in RULES:
                places[place_name(form, kind, inner_steps)] = {
                    "inner_steps": inner_steps,
                    **_facts(here, form, kind, bound=bound, free=(plain, averaging)),
                }
    settings = {
        "period": PERIOD,
        "seeds": scale.seeds,
        "seeds_words": seeds_words(scale),
        "lrs": scale.lrs,
        "momenta": scale.momenta,
        "matched_from": scale.matched_from,
        "within": f"{WITHIN:.0%} of the best of all runs of the same communication period",
    }
    return Result(public(lines), {"places": places, "controls": free}, settings)


def _facts(
    lines: Sequence[Line], form: str, kind: str, *, bound: float | None, free: tuple[Line | None, Line | None]
) -> dict[str, Any]:
    """One communication period, form and rule."""
    never, restarted = (pick(lines, arm=arm_name(form, kind, what)) for what in (_NEVER, _RESTARTED))
    matched_arm = control_name(arm_name(form, kind, _RESTARTED))
    matched = pick(lines, arm=matched_arm)
    beside = [(line, one(never, momentum=line["momentum"], lr=line["lr"])) for line in restarted]
    controlled = [(line, control_of(matched, matched_arm, line)) for line in restarted]
    controlled = [(line, control) for line, control in controlled if control is not None]
    largest = max((line["momentum"] for line in restarted), default=None)
    top, top_controlled = best(restarted), best(line for line, _ in controlled)
    return {
        "never": summary(never, bound),
        "restarted": summary(restarted, bound),
        "gain_matched": summary(matched, bound),
        "restarted_where_matched": summary([line for line, _ in controlled], bound),
        "over_never": contrast(beside),
        "over_never_at_largest_momentum": contrast([pair for pair in beside if pair[0]["momentum"] == largest]),
        "over_gain_matched": contrast(controlled),
        "best_minus": {
            "never": difference(top, best(never)),
            # Where the controls begin only at some momentum, like is compared with like.
            "gain_matched": difference(top_controlled, best(matched)),
            "momentum_free": difference(top, free[0]),
            "averaging": difference(top, free[1]),
        },
    }


# ------------------------------------------------------------------------------------------------- answer and figure


def answer(result: Result) -> str:
    """What restarts gain in each place, against every control, and what of the paper's claim does not hold."""
    places, controls = result.numbers["places"], result.numbers["controls"]
    seeds, (least, largest) = result.settings["seeds_words"], _ends(result.settings["momenta"])
    header = ["", "none", f"K={PERIOD}", "best none", f"best K={PERIOD}", "worst none", f"worst K={PERIOD}"]
    header += ["diverged", f"none/K={PERIOD}", f"gain-matched/K={PERIOD}", "better", "worse"]
    body = [_table_line(name, facts) for name, facts in places.items()]
    lines = [
        f"Validation perplexity ({seeds}). 'none' and 'K={PERIOD}': settings within {WITHIN:.0%} of the best of all "
        "runs of the same S. Ratios: geometric mean over the settings that have finished, above 1 favours the restart; "
        f"better and worse: settings in which the restart differs from its gain-matched control by over {MARGIN:.0%}.",
        format_table(header, body),
        *(_control_words(inner_steps, facts) for inner_steps, facts in controls.items()),
    ]

    def claim(text: str, held: Mapping[str, bool | None], detail: Mapping[str, str]) -> None:
        lines.append(tally(text, held, detail))

    def each(key: str) -> dict[str, Any]:
        return {name: facts[key] for name, facts in places.items()}

    def best_minus(key: str) -> dict[str, Any]:
        return {name: facts["best_minus"][key] for name, facts in places.items()}

    claim(
        f"K={PERIOD} enlarges the region within {WITHIN:.0%} of the best",
        {name: _larger(facts, "restarted", "never") for name, facts in places.items()},
        {name: _counts(facts, "never", "restarted") for name, facts in places.items()},
    )
    claim(
        f"at momentum {largest:g} K={PERIOD} is better than no restart by more than {MARGIN:.0%}",
        {name: ratio_above(found) for name, found in each("over_never_at_largest_momentum").items()},
        {name: ratio_words(found) for name, found in each("over_never_at_largest_momentum").items()},
    )
    claim(
        f"the region is larger than that of the gain-matched control too (momentum {_matched_from(result):g} and up)",
        {name: _larger(facts, "restarted_where_matched", "gain_matched") for name, facts in places.items()},
        {name: _counts(facts, "gain_matched", "restarted_where_matched") for name, facts in places.items()},
    )
    claim(
        f"K={PERIOD} is better than its gain-matched control by more than {MARGIN:.0%}",
        {name: ratio_above(found) for name, found in each("over_gain_matched").items()},
        {name: ratio_words(found) for name, found in each("over_gain_matched").items()},
    )
    others = {
        "never": "no restart, each at its best learning rate and momentum",
        "gain_matched": "its gain-matched controls at their best (where it has them)",
        "momentum_free": "momentum-free SGD at its best learning rate",
        "averaging": "plain averaging",
    }
    for key, words in others.items():
        claim(
            f"at its best, K={PERIOD} has a lower perplexity, for every seed, than {words}",
            {name: lower(found) for name, found in best_minus(key).items()},
            {name: difference_words(found) for name, found in best_minus(key).items()},
        )
    cells = next(iter(places.values()))
    lines.append(
        f"Bests are chosen in hindsight, among {cells['restarted']['settings']} settings of each restart arm and each "
        f"arm without restarts (momentum {least:g} to {largest:g}), and few of the momentum-free arm."
    )
    return "\n".join(lines)


def _table_line(name: str, facts: Mapping[str, Any]) -> list[str]:
    never, restarted, matched = facts["never"], facts["restarted"], facts["over_gain_matched"]
    return [
        name,
        f"{never['within']}/{never['settings']}",
        f"{restarted['within']}/{restarted['settings']}",
        perplexity_words(never["best"]),
        perplexity_words(restarted["best"]),
        readable(never["worst"]),
        readable(restarted["worst"]),
        f"{never['diverged']}, {restarted['diverged']}",
        ratio_words(facts["over_never"]),
        ratio_words(matched),
        f"{matched['better']}/{matched['pairs']}",
        f"{matched['worse']}/{matched['pairs']}",
    ]


def _control_words(inner_steps: str, facts: Mapping[str, Any]) -> str:
    free = facts["momentum_free"]
    at = f" (lr {free['lr']:g})" if free else ""
    return (
        f"S={inner_steps} ({facts['rounds']} rounds): best of all {perplexity_words(facts['best_of_all'])}; momentum-"
        f"free SGD {perplexity_words(free)}{at}; plain averaging {perplexity_words(facts['averaging'])}."
    )


def _counts(facts: Mapping[str, Any], before: str, after: str) -> str:
    gone = facts[before]["missing"] + facts[after]["missing"]
    words = f"{facts[before]['within']} to {facts[after]['within']} of {facts[after]['settings']}"
    return words + (f", {gone} missing" if gone else "")


def _larger(facts: Mapping[str, Any], mine: str, other: str) -> bool | None:
    if facts[mine]["best"] is None or facts[mine]["missing"] or facts[other]["missing"]:
        return None
    return facts[mine]["within"] > facts[other]["within"]


def _ends(values: Sequence[float]) -> tuple[float, float]:
    return min(values), max(values)


def _matched_from(result: Result) -> float:
    least = result.settings["matched_from"]
    return min(momentum for momentum in result.settings["momenta"] if momentum >= least)


def draw(result: Result) -> Figure:
    """Rows: communication period, form and rule; columns: no restart, K = 3, and no restart at the gain of K = 3."""
    lines, lrs, momenta = result.rows, result.settings["lrs"], result.settings["momenta"]
    controls, places = result.numbers["controls"], list(result.numbers["places"])
    height = 1.0 + len(places) * (0.16 * len(momenta) + 0.2)
    figure = new_page(height)
    axes = figure.subplots(len(places), 3, squeeze=False)
    drawn = [line for line in lines if line["arm"] != MOMENTUM_FREE]
    colours = colours_for(drawn)
    titles = ("no restart", f"restart every {PERIOD} rounds", f"no restart, mean gain of K={PERIOD}")
    for row, (inner_steps, form, kind) in zip(axes, _order(controls), strict=True):
        restarted = arm_name(form, kind, _RESTARTED)
        here = pick(lines, inner_steps=int(inner_steps))
        # "within" is relative to the best of the same communication period, so each has its own bound.
        top = controls[inner_steps]["best_of_all"]
        bound = -1.0 if top is None else top["perplexity"] * (1 + WITHIN)

        def beside(arm: str, here: list[Any] = here) -> Any:
            return lambda lr, momentum: one(here, arm=arm, lr=lr, momentum=momentum)

        def matched(lr: float, momentum: float, here: list[Any] = here, arm: str = control_name(restarted)) -> Any:
            return one(here, arm=arm, of_lr=lr, momentum=momentum)

        found = (beside(arm_name(form, kind, _NEVER)), beside(restarted), matched)
        for panel, what in zip(row, found, strict=True):
            draw_heatmap(panel, lrs, momenta, what, colours=colours, bound=bound)
        row[0].set_ylabel(f"{FORM_WORDS[form]}, S={inner_steps}\n{kind}", fontsize=7)
    for panel, title in zip(axes[0], titles, strict=True):
        panel.set_title(title)
    for panel in axes[:-1].ravel():
        panel.set_xticklabels([])
    for panel in axes[-1]:
        panel.set_xlabel("outer learning rate", fontsize=7, labelpad=1)
    colour_bar(figure, axes.ravel(), colours, drawn)
    outlined = f"Outlined: within {WITHIN:.0%} of the best of all runs of the same S."
    note(figure, f"Vertical: outer momentum. {outlined} {_page_words(result)}")
    return figure


def _order(controls: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    return [(inner_steps, form, kind) for inner_steps in controls for form in BOTH_FORMS for kind in RULES]


def _page_words(result: Result) -> str:
    seeds = len(result.settings["seeds"])
    mean = f"Means over {seeds} seeds. " if seeds > 1 else ""
    controls = "; ".join(
        f"S={inner_steps}: momentum-free {perplexity_words(facts['momentum_free'])}, plain averaging "
        f"{perplexity_words(facts['averaging'])}"
        for inner_steps, facts in result.numbers["controls"].items()
    )
    return f"{mean}\n{controls}."
