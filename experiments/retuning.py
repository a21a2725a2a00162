"""Does tuning the restart period transfer over communication periods better than tuning the outer momentum?

The study compares momentum without restarts with the restart period, tuned once at the short communication period, then
at every one. Learning rate and momentum are those that are best without restarts, and those that are best with K = 3.
Every restarted setting has its gain-matched control without restarts, and every communication period momentum-free SGD.
A period that is not shorter than the run restarts nothing. Such settings are marked in the figure and excluded from
every statement on restarts.

Source: paper section 4, figure 4, and the curves of the appendix; theory notes E12, R31.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import lm
from common import Result, select
from lm import Line, perplexity_words
from paper import (
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
from retuning_figures import figures
from twophase.sweeps.table import Row, format_table


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


# --------------------------------------------------------------------------------------------------------------- tables


def tables(result: Result) -> str:
    """Write both sweeps of each place: best, spread (worst over best), and what keeping the tuned value costs."""
    return format_table(_HEADER, [_table_line(name, facts) for name, facts in result.numbers["places"].items()])


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


def main() -> None:
    """Run the experiment."""
    lm.experiment("retuning", retuning, table, figures=figures, tables=tables)


if __name__ == "__main__":
    main()
