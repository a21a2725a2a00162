"""Do restarts enlarge the good region of outer learning rates and momenta of a small language model?

Heatmaps show validation perplexity without restarts, with one every 3 rounds, and without restarts at the latter's mean
outer gain. The last is the control that separates a better use of momentum from a smaller step. Both forms of the rule,
at a short and a long communication period.

Source: paper section 4, figure 3, and the last figure of the appendix; theory notes R31, E11.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import twophase.studies._lm as lm
from twophase.figures.matplotlib_types import Figure
from twophase.figures.style import region_words
from twophase.recipes.paper import BOTH_FORMS, PERIOD, RULES, Scale, arm_name, control_name, robustness_heatmaps
from twophase.rule import FORM_WORDS
from twophase.studies._lm import MARGIN, WITHIN, Line, perplexity_words, ratio_words
from twophase.studies._lm_figures import PageRow, heatmap_page, line_at
from twophase.studies.study import Result, select
from twophase.sweeps.grid import MOMENTUM_FREE
from twophase.sweeps.table import Row, format_table, readable

QUESTION = "Do restarts enlarge the good region of outer learning rate and momentum of a language model?"
_NEVER, _RESTARTED = "never", f"K={PERIOD}"
TAKES_TASK = True
sweep = robustness_heatmaps


def table(rows: Sequence[Row], scale: Scale) -> Result:
    """Tell every setting, and by communication period, form and rule regions, bests and comparisons with controls."""
    lines = lm.lines_of(rows, scale)
    places: dict[str, Any] = {}
    controls: dict[str, Any] = {}
    for inner_steps in (scale.short, scale.long):
        here = select(lines, inner_steps=inner_steps)
        top = lm.best(here)
        bound = None if top is None else top["perplexity"] * (1 + WITHIN)
        free, averaging = lm.free_and_averaging(lines, inner_steps)
        controls[str(inner_steps)] = {
            "rounds": scale.rounds(inner_steps),
            "best_of_all": lm.shown(top),
            "momentum_free": lm.shown(free),
            "averaging": lm.shown(averaging),
        }
        for form, kind in product(BOTH_FORMS, RULES):
            facts = _facts(here, (form, kind), bound, {"momentum_free": free, "averaging": averaging})
            places[lm.place_name(form, kind, inner_steps)] = {"inner_steps": inner_steps, **facts}
    settings = {
        "period": PERIOD,
        "seeds": scale.seeds,
        "seeds_words": lm.seeds_words(scale),
        "lrs": scale.lrs,
        "momenta": scale.momenta,
        "matched_from": scale.matched_from,
        "within": f"{WITHIN:.0%} of the best of all runs of the same communication period",
    }
    return Result(lm.public(lines), {"places": places, "controls": controls}, settings)


def _facts(
    lines: Sequence[Line], rule: tuple[str, str], bound: float | None, free: Mapping[str, Line | None]
) -> dict[str, Any]:
    """Compare the arms of one communication period, form and rule."""
    never, restarted = (select(lines, arm=arm_name(*rule, what)) for what in (_NEVER, _RESTARTED))
    matched_arm = control_name(arm_name(*rule, _RESTARTED))
    matched = select(lines, arm=matched_arm)
    beside = [(line, lm.first(never, momentum=line["momentum"], lr=line["lr"])) for line in restarted]
    controlled = lm.with_controls(restarted, matched, matched_arm)
    largest = max((line["momentum"] for line in restarted), default=None)
    top, controlled_lines = lm.best(restarted), [line for line, _ in controlled]
    return {
        "never": lm.summary(never, bound),
        "restarted": lm.summary(restarted, bound),
        "gain_matched": lm.summary(matched, bound),
        "restarted_where_matched": lm.summary(controlled_lines, bound),
        "over_never": lm.contrast(beside),
        "over_never_at_largest_momentum": lm.contrast([pair for pair in beside if pair[0]["momentum"] == largest]),
        "over_gain_matched": lm.contrast(controlled),
        "best_minus": {
            "never": lm.difference(top, lm.best(never)),
            # Where the controls begin only at some momentum, like is compared with like.
            "gain_matched": lm.difference(lm.best(controlled_lines), lm.best(matched)),
            **{name: lm.difference(top, line) for name, line in free.items()},
        },
    }


# ------------------------------------------------------------------------------------------------- answer and figure


def answer(result: Result) -> str:
    """Say what restarts gain in each place, against every control, and what of the paper's claim does not hold."""
    places, settings = result.numbers["places"], result.settings
    least, largest = min(settings["momenta"]), max(settings["momenta"])
    matched_from = min(momentum for momentum in settings["momenta"] if momentum >= settings["matched_from"])
    header = ["", "none", f"K={PERIOD}", "best none", f"best K={PERIOD}", "worst none", f"worst K={PERIOD}"]
    header += ["diverged", f"none/K={PERIOD}", f"gain-matched/K={PERIOD}", "better", "worse"]
    lines = [
        f"Validation {lm.judged(settings)} ({settings['seeds_words']}). 'none' and 'K={PERIOD}': settings within "
        f"{WITHIN:.0%} of the best of all runs of the same S. Ratios: geometric mean over the settings that have "
        "finished, above 1 favours the restart. Better and worse: settings in which the restart differs from its "
        f"gain-matched control by over {MARGIN:.0%}.",
        format_table(header, [_table_line(name, facts) for name, facts in places.items()]),
    ]
    for inner_steps, facts in result.numbers["controls"].items():
        at = f" (lr {facts['momentum_free']['lr']:g})" if facts["momentum_free"] else ""
        lines.append(
            f"S={inner_steps} ({facts['rounds']} rounds): best of all {perplexity_words(facts['best_of_all'])}; "
            f"momentum-free SGD {perplexity_words(facts['momentum_free'])}{at}; plain averaging "
            f"{perplexity_words(facts['averaging'])}."
        )

    def over(key: str) -> dict[str, Any]:
        return {name: facts[key] for name, facts in places.items()}

    lines += [
        _tally_regions(f"K={PERIOD} enlarges the region within {WITHIN:.0%} of the best", places, "restarted", "never"),
        lm.tally_above(
            f"at momentum {largest:g} K={PERIOD} is better than no restart by more than {MARGIN:.0%}",
            over("over_never_at_largest_momentum"),
        ),
        _tally_regions(
            f"the region is larger than that of the gain-matched control too (momentum {matched_from:g} and up)",
            places,
            "restarted_where_matched",
            "gain_matched",
        ),
        lm.tally_above(
            f"K={PERIOD} is better than its gain-matched control by more than {MARGIN:.0%}", over("over_gain_matched")
        ),
    ]
    others = {
        "never": "no restart, each at its best learning rate and momentum",
        "gain_matched": "its gain-matched controls at their best (where it has them)",
        "momentum_free": "momentum-free SGD at its best learning rate",
        "averaging": "plain averaging",
    }
    for key, words in others.items():
        claim = f"at its best, K={PERIOD} has a lower {lm.measure(settings)}, for every seed, than {words}"
        gaps = {name: facts["best_minus"][key] for name, facts in places.items()}
        lines.append(lm.tally_lower(claim, gaps, lm.gap_form(settings)))
    lines.append(
        f"Bests are chosen in hindsight: among {next(iter(places.values()))['restarted']['settings']} settings of "
        f"each arm with or without restarts (momentum {least:g} to {largest:g}), and few of the momentum-free arm."
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


def _tally_regions(claim: str, places: Mapping[str, Any], arm: str, other: str) -> str:
    """Say where more settings of an arm than of another are within the bound."""
    holds: dict[str, bool | None] = {}
    detail = {}
    for name, facts in places.items():
        mine, beside = facts[arm], facts[other]
        missing = mine["missing"] + beside["missing"]
        holds[name] = None if mine["best"] is None or missing else mine["within"] > beside["within"]
        detail[name] = f"{beside['within']} to {mine['within']} of {mine['settings']}"
        detail[name] += f", {missing} missing" if missing else ""
    return lm.tally(claim, holds, detail)


def draw(result: Result) -> Figure:
    """Draw the first rule at the short communication period."""
    return _page(result, *_pages(result)[0])


def details(result: Result) -> dict[str, Figure]:
    """Draw the other rule, and both at the long communication period."""
    return {
        f"{kind.replace(' ', '-').lower()}-S{steps}": _page(result, steps, kind) for steps, kind in _pages(result)[1:]
    }


def _pages(result: Result) -> list[tuple[str, str]]:
    return list(product(result.numbers["controls"], RULES))


def _page(result: Result, inner_steps: str, kind: str) -> Figure:
    """Draw rows by form; columns: no restart, K = 3, and no restart at the gain of K = 3."""
    controls, seeds = result.numbers["controls"][inner_steps], len(result.settings["seeds"])
    drawn = [line for line in result.rows if line["arm"] != MOMENTUM_FREE]
    here = select(drawn, inner_steps=int(inner_steps))
    # "within" is relative to the best of the same communication period, so each has its own bound.
    top = controls["best_of_all"]
    bound = -1.0 if top is None else top["perplexity"] * (1 + WITHIN)
    rows: list[PageRow] = []
    for form in BOTH_FORMS:
        restarted = arm_name(form, kind, _RESTARTED)
        arms = ((arm_name(form, kind, _NEVER), "lr"), (restarted, "lr"), (control_name(restarted), "of_lr"))
        cells = [line_at(select(here, arm=arm), lr_name, "momentum") for arm, lr_name in arms]
        rows.append((f"{FORM_WORDS[form]}\nouter momentum", bound, cells))
    mean = f"means over {seeds} seeds" if seeds > 1 else "one seed"
    return heatmap_page(
        rows,
        drawn,
        columns=("no restart", f"restart every {PERIOD} rounds", f"no restart, gain of K={PERIOD}"),
        x=result.settings["lrs"],
        y=result.settings["momenta"],
        x_label="outer learning rate",
        measure=f"validation {lm.judged(result.settings, unit=True)}",
        finding=f"{kind[0].upper()}{kind[1:]}, S={inner_steps}: {_region_words(result, kind, int(inner_steps))}",
        reading=f"{mean}; {_ratio_words(result, kind, int(inner_steps))}",
        words=f"outlined: within {WITHIN:.0%} of the best of all runs of this S; momentum-free SGD "
        f"{perplexity_words(controls['momentum_free'])}, plain averaging {perplexity_words(controls['averaging'])}",
    )


def _region_words(result: Result, kind: str, inner_steps: int) -> str:
    """Say what a restart does to the good region of a rule in both forms."""
    places = {form: result.numbers["places"][lm.place_name(form, kind, inner_steps)] for form in BOTH_FORMS}
    regions = {form: tuple(facts[arm]["within"] for arm in ("never", "restarted")) for form, facts in places.items()}
    if any(facts[arm]["best"] is None for facts in places.values() for arm in ("never", "restarted")):
        return "not known yet, an arm has no finished setting"
    verb = region_words(list(regions.values()), "in one form, narrows it in the other")
    of = max(facts["restarted"]["settings"] for facts in places.values())
    counts = ", ".join(f"{FORM_WORDS[form]} {before} to {after}" for form, (before, after) in regions.items())
    return f"a restart every {PERIOD} rounds {verb} ({counts} of {of})"


def _ratio_words(result: Result, kind: str, inner_steps: int) -> str:
    """Say how many times the perplexity of K = 3 no restart has over the grid, in both forms."""
    places = [result.numbers["places"][lm.place_name(form, kind, inner_steps)] for form in BOTH_FORMS]
    ratios = [facts["over_never"]["ratio"] for facts in places]
    times = " and ".join("?" if ratio is None else f"{ratio['mean']:.2f}" for ratio in ratios)
    return f"over the grid no restart has {times} times the {lm.measure(result.settings)}"
