"""Does tuning the restart period transfer over communication periods better than tuning the outer momentum?

The study compares momentum without restarts with the restart period, tuned once at the short communication period, then
at every one. Learning rate and momentum are those that are best without restarts, and those that are best with K = 3.
Every restarted setting has its gain-matched control without restarts, and every communication period momentum-free SGD.
A period that is not shorter than the run restarts nothing. Such settings are marked in the figure and excluded from
every statement on restarts.

Source: paper section 4, figure 4, and the curves of the appendix; theory notes E12, R31.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any

import twophase.studies._lm as lm
from twophase.recipes.paper import (
    BETA_SWEEP,
    BOTH_FORMS,
    K_SWEEP,
    OWN_K_SWEEP,
    PERIOD,
    RULES,
    Scale,
    arm_name,
    control_name,
    retuning,
    tuned,
)
from twophase.studies._lm import MARGIN, Line, perplexity_words
from twophase.studies._retuning_figures import details, draw
from twophase.studies.study import Result, select
from twophase.sweeps.table import Row, format_table

__all__ = ["CHOOSES_RUNS", "QUESTION", "TAKES_TASK", "answer", "details", "draw", "sweep", "table"]
QUESTION = "Does a tuned restart period transfer over communication periods better than a tuned momentum?"
CHOOSES_RUNS = TAKES_TASK = True
sweep = retuning
Claims = dict[str, list[tuple[bool | None, float | None]]]
"""From form and rule to, for each communication period, whether a claim holds there and the number it rests on."""
_OTHERS = {
    "beta_sweep": "no restart with its momentum tuned at each S",
    "gain_matched": "its gain-matched control, or where it has none the best of the others'",
    "momentum_free": "momentum-free SGD with its learning rate tuned at each S",
    "averaging": "plain averaging",
}


def table(rows: Sequence[Row], scale: Scale) -> Result:
    """Tell every setting, and by communication period, form and rule both sweeps, their transfer and their controls."""
    lines = lm.lines_of(rows, scale)
    best = tuned(scale, rows) or {}
    rules = list(product(BOTH_FORMS, RULES))
    tunings = (("never", "never"), (f"K={PERIOD}", str(PERIOD)))
    numbers = {
        "tuned": {
            lm.place_name(*rule): {
                what: dict(zip(("lr", "momentum"), best[*rule, restart], strict=True))
                for what, restart in tunings
                if (*rule, restart) in best
            }
            for rule in rules
        },
        "places": {
            lm.place_name(*rule, inner_steps): _facts(lines, rule, inner_steps, scale, best.get((*rule, "never")))
            for rule, inner_steps in product(rules, scale.retuning)
        },
    }
    settings = {
        "tuned_at": scale.short,
        "tuning_period": PERIOD,
        "inner_steps": scale.retuning,
        "rounds": {inner_steps: scale.rounds(inner_steps) for inner_steps in scale.retuning},
        "momenta": scale.momenta,
        "periods": scale.periods,
        "seeds": scale.seeds,
        "seeds_words": lm.seeds_words(scale),
    }
    return Result(lm.public(lines), numbers, settings)


def _facts(
    lines: Sequence[Line], rule: tuple[str, str], inner_steps: int, scale: Scale, tuning: tuple[float, float] | None
) -> dict[str, Any]:
    """Compare the sweeps of one communication period, form and rule; `tuning` is what was best without restarts."""
    here = select(lines, inner_steps=inner_steps)
    beta = select(here, arm=arm_name(*rule, BETA_SWEEP))
    untouched = lm.first(beta, momentum=tuning and tuning[1])
    free, averaging = lm.free_and_averaging(here, inner_steps)
    facts: dict[str, Any] = {
        "form": rule[0],
        "rule": rule[1],
        "inner_steps": inner_steps,
        "rounds": scale.rounds(inner_steps),
        "momentum_free": lm.shown(free),
        "averaging": lm.shown(averaging),
        "kept_momentum": lm.shown(untouched),
        "beta_sweep": _curve(beta, untouched),
    }
    for what, key in ((K_SWEEP, "k_sweep"), (OWN_K_SWEEP, "own_k_sweep")):
        arm = arm_name(*rule, what)
        curve = select(here, arm=arm)
        fires = [line for line in curve if line["restarts"]]
        # The period that is not retuned is the best one where the tuning was done, on the same curve.
        at_tuning = lm.best(line for line in select(lines, arm=arm, inner_steps=scale.short) if line["restarts"])
        not_retuned = lm.first(fires, restart=at_tuning["restart"]) if at_tuning else None
        top = lm.best(fires)
        pairs = lm.with_controls(fires, here, control_name(arm))  # not every period of the own tuning has one
        # For a period without a control: the best of those that there are.
        control = lm.control_of(here, control_name(arm), top) if top else None
        control = control or lm.best(control for _, control in pairs)
        others = {"beta_sweep": lm.best(beta), "gain_matched": control, "momentum_free": free, "averaging": averaging}
        facts[key] = _curve(fires, not_retuned) | {
            "never_fires": [line["restart"] for line in curve if not line["restarts"]],
            "kept": lm.shown(not_retuned),
            "kept_minus_kept_momentum": lm.difference(not_retuned, untouched),
            "over_gain_matched": lm.contrast(pairs),
            "best_minus": {name: lm.difference(top, other) for name, other in others.items()},
        }
        if key == "k_sweep":
            facts[key]["over_same_setting_never"] = lm.contrast([(line, untouched) for line in fires])
    return facts


def _curve(curve: Sequence[Line], not_retuned: Line | None) -> dict[str, Any]:
    """Summarize a sweep over one hyperparameter: its best, its worst over its best, the price of not retuning it.

    `worst_over_best` is None when a setting has diverged or is missing: a curve that breaks off has no ratio.
    """
    top, states = lm.best(curve), [line["state"] for line in curve]
    values = [line["perplexity"] for line in curve if line["perplexity"] is not None]
    price = not_retuned["perplexity"] / top["perplexity"] if top and not_retuned and not_retuned["perplexity"] else None
    return {
        "settings": len(curve),
        "diverged": states.count("diverged"),
        "missing": states.count("missing"),
        "best": lm.shown(top),
        "worst_over_best": max(values) / min(values) if len(values) == len(curve) > 0 else None,
        "kept_over_best": price,
    }


# --------------------------------------------------------------------------------------------------------------- answer


def answer(result: Result) -> str:
    """Say whether the period transfers better than the momentum, and what it gains over every control."""
    settings, places = result.settings, result.numbers["places"]
    if not any(facts["beta_sweep"]["settings"] for facts in places.values()):
        return "Not known: the runs of the tuning have not all ended, or no setting of it has finished."
    at, rounds = settings["tuned_at"], settings["rounds"]
    tunings = []
    for place, tuning in result.numbers["tuned"].items():
        parts = [f"{what} lr {best['lr']:g}, momentum {best['momentum']:g}" for what, best in tuning.items()]
        tunings.append(f"{place} {'; '.join(parts) or 'nothing finished'}")
    lines = [
        f"Validation {lm.judged(settings)} ({settings['seeds_words']}). Tuned at S={at}: {'; '.join(tunings)}.",
        f"'spread': worst over best of a sweep; 'kept': cost of the value that was best at S={at}, relative to the "
        "best of the sweep. K*: restarts at the setting that was tuned without them; K**: at the one that was tuned "
        f"with K={settings['tuning_period']}. Ratios: geometric mean over the periods, above 1 favours restarts.",
        format_table(_HEADER, [_table_line(name, facts) for name, facts in places.items()]),
    ]
    for steps, count in rounds.items():
        idle = ", ".join(str(period) for period in settings["periods"] if period >= count)
        if idle:
            lines.append(f"S={steps} has {count} rounds: K = {idle} never fires there and is in none of these numbers.")
    every = list(places.values())
    moved = [facts for facts in every if facts["inner_steps"] != at]  # nothing was tuned there
    lines += [
        lm.tally_by_group(
            f"{lm.measure(settings)} varies less over K than over the momentum; the number is the spread over K",
            _grouped(every, lambda facts: (_flatter(facts), facts["k_sweep"]["worst_over_best"])),
            ".2f",
        ),
        lm.tally_by_group(
            "away from where it was tuned, keeping K costs less than keeping the momentum; the number is its cost",
            _grouped(moved, lambda facts: (_cheaper(facts), _cost(facts["k_sweep"]))),
            "+.1%",
        ),
        lm.tally_by_group(
            f"with nothing retuned, K* has a lower {lm.measure(settings)}, for every seed, than no restart",
            _grouped(moved, lambda facts: _lower(facts["k_sweep"]["kept_minus_kept_momentum"])),
            lm.gap_form(settings),
        ),
    ]
    for key, mark in (("k_sweep", "K*"), ("own_k_sweep", "K**")):
        lines += _gain_words(every, key, mark, settings)
    lines.append("A range is over the communication periods, of means over the seeds; every place is in the JSON.")
    return "\n".join(lines)


def _gain_words(places: Sequence[Mapping[str, Any]], key: str, mark: str, settings: Mapping[str, Any]) -> list[str]:
    """Say what the restarts of one of the two sweeps gain over each control."""
    lines = []
    for name, words in (
        ("over_same_setting_never", "its own setting without restarts"),
        ("over_gain_matched", "its gain-matched controls"),
    ):
        if name in places[0][key]:
            ratios = _grouped(places, lambda facts, name=name: _above(facts[key][name]))
            claim = f"{mark} is better than {words} by more than {MARGIN:.0%}"
            lines.append(lm.tally_by_group(claim, ratios, ".2f"))
    for name, words in _OTHERS.items():
        gaps = _grouped(places, lambda facts, name=name: _lower(facts[key]["best_minus"][name]))
        lower = f"a lower {lm.measure(settings)}, for every seed, than {words}"
        claim = f"with its period tuned at each S, {mark} has {lower}"
        lines.append(lm.tally_by_group(claim, gaps, lm.gap_form(settings)))
    return lines


def _above(contrast: Mapping[str, Any]) -> tuple[bool | None, float | None]:
    return lm.ratio_above(contrast), contrast["ratio"]["mean"] if contrast["ratio"] else None


def _lower(difference: Mapping[str, Any] | None) -> tuple[bool | None, float | None]:
    return lm.lower(difference), difference["mean"] if difference else None


def _grouped(
    places: Sequence[Mapping[str, Any]], of: Callable[[Mapping[str, Any]], tuple[bool | None, float | None]]
) -> Claims:
    claims: Claims = {}
    for facts in places:
        claims.setdefault(lm.place_name(facts["form"], facts["rule"]), []).append(of(facts))
    return claims


_HEADER = [
    "", "rounds", "best beta", "at", "spread", "kept", "best K*", "at", "spread", "kept", "best K**", "momentum-free",
    "averaging", "gain-matched/K*",
]  # fmt: skip


def _table_line(name: str, facts: Mapping[str, Any]) -> list[Any]:
    beta, k = facts["beta_sweep"], facts["k_sweep"]
    return [
        name,
        facts["rounds"],
        perplexity_words(beta["best"]),
        f"{beta['best']['momentum']:g}" if beta["best"] else "",
        *_spread_and_cost(beta),
        perplexity_words(k["best"]),
        k["best"]["restart"] if k["best"] else "",
        *_spread_and_cost(k),
        perplexity_words(facts["own_k_sweep"]["best"]),
        perplexity_words(facts["momentum_free"]),
        perplexity_words(facts["averaging"]),
        lm.ratio_words(k["over_gain_matched"]),
    ]


def _spread_and_cost(curve: Mapping[str, Any]) -> tuple[str, str]:
    cost, spread = _cost(curve), curve["worst_over_best"]
    gone = ", ".join(f"{curve[state]} {state}" for state in ("diverged", "missing") if curve[state])
    return gone or "none" if spread is None else f"{spread:.2f}", "" if cost is None else f"{cost:+.1%}"


def _cost(curve: Mapping[str, Any]) -> float | None:
    """Return what it costs, relatively, not to retune the value that was best where the tuning was done."""
    return None if curve["kept_over_best"] is None else curve["kept_over_best"] - 1


def _flatter(facts: Mapping[str, Any]) -> bool | None:
    """Return whether the curve over K is flatter; a curve that ends in divergence is not flat."""
    k, beta = facts["k_sweep"], facts["beta_sweep"]
    if not (k["settings"] and beta["settings"]) or k["missing"] or beta["missing"]:
        return None
    if k["diverged"] or beta["diverged"]:
        return None if k["diverged"] and beta["diverged"] else not k["diverged"]
    return k["worst_over_best"] < beta["worst_over_best"]


def _cheaper(facts: Mapping[str, Any]) -> bool | None:
    costs = [facts[key]["kept_over_best"] for key in ("k_sweep", "beta_sweep")]
    return None if None in costs else costs[0] < costs[1]
