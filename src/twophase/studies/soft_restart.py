"""Is a soft restart, which keeps a share of the buffer and adds to it, worth its two more hyperparameters?

The study shows perplexity over the share of the buffer that is retained and the weight of the pseudo-gradient that is
added. The rule is Nesterov with learning rate 0.9 and momentum 0.7, at a short and a long communication period. Each
setting has a gain-matched control without restarts. References: no restart, the hard restart, momentum-free SGD and
plain averaging.

Source: paper appendix, the soft restart sweeps; theory notes R26, R27, E14.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import twophase.studies._lm as lm
from twophase.figures.matplotlib_types import Figure
from twophase.figures.style import in_words
from twophase.recipes.paper import (
    BOTH_FORMS,
    SOFT_PERIOD_LONG,
    SOFT_PERIOD_SHORT,
    SOFT_RULE,
    Scale,
    arm_name,
    control_name,
    soft_policy,
    soft_restart,
)
from twophase.rule import FORM_WORDS
from twophase.studies._lm import MARGIN, Line, perplexity_words
from twophase.studies._lm_figures import NEVER_FIRES, PageRow, heatmap_page, line_at, never_fires
from twophase.studies.study import Result, select
from twophase.sweeps.table import Row, format_table

QUESTION = "Is a soft restart of the outer momentum worth its two more hyperparameters?"
SMALL = 0.01
"""A gain at or below this share of the perplexity is small."""
_OTHERS = {
    "hard": ("hard", "the hard restart"),
    "never": ("never", "no restart"),
    "gain_matched": ("gain-matched", "its own gain-matched control"),
    "momentum_free": ("momentum-free", "momentum-free SGD at its best learning rate"),
    "averaging": ("averaging", "plain averaging"),
}
"""What soft restarts are compared with: in a table's head, and in a sentence."""
TAKES_TASK = True
sweep = soft_restart


def table(rows: Sequence[Row], scale: Scale) -> Result:
    """List all settings, and compare the best of each communication period and form with the controls."""
    lines = lm.lines_of(rows, scale)
    of_text = {
        str(soft_policy(period, retain, inject)): (retain, inject)
        for period in (SOFT_PERIOD_SHORT, SOFT_PERIOD_LONG)
        for retain in scale.retain
        for inject in scale.inject
    }
    for line in lines:
        line["retain"], line["inject"] = of_text.get(line["of_restart"] or line["restart"], (None, None))
    kind, lr, momentum = SOFT_RULE
    places = {
        lm.place_name(form, kind, inner_steps): _facts(lines, form, inner_steps, period)
        for inner_steps, period in ((scale.short, SOFT_PERIOD_SHORT), (scale.long, SOFT_PERIOD_LONG))
        for form in BOTH_FORMS
    }
    settings = {
        "rule": kind,
        "lr": lr,
        "momentum": momentum,
        "retain": scale.retain,
        "inject": scale.inject,
        "seeds": scale.seeds,
        "seeds_words": lm.seeds_words(scale),
        "inject_acts_on": "the buffer of the rule's own form, so it is relatively weaker in sum form",
    }
    return Result(lm.public(lines), {"places": places}, settings)


def _facts(lines: Sequence[Line], form: str, inner_steps: int, period: int) -> dict[str, Any]:
    """Summarize one communication period and form."""
    here = select(lines, inner_steps=inner_steps)
    arm = arm_name(form, SOFT_RULE[0], f"soft K={period}")
    soft, matched = select(here, arm=arm), control_name(arm)
    hard, never = lm.first(soft, retain=0.0, inject=0.0), lm.first(here, arm=arm_name(form, SOFT_RULE[0], "never"))
    free, averaging = lm.free_and_averaging(here, inner_steps)
    top = lm.best(line for line in soft if line is not hard)
    control = None if top is None else lm.control_of(here, matched, top)
    others = dict(zip(_OTHERS, (hard, never, control, free, averaging), strict=True))
    return {
        "inner_steps": inner_steps,
        "form": form,
        "period": period,
        "rounds": soft[0]["rounds"] if soft else None,
        "restarts": soft[0]["restarts"] if soft else None,
        "settings": len(soft),
        "diverged": sum(line["state"] == "diverged" for line in soft),
        "missing": sum(line["state"] == "missing" for line in soft),
        "soft": None if top is None else (lm.shown(top) or {}) | {"retain": top["retain"], "inject": top["inject"]},
        "controls": {name: lm.shown(line) for name, line in others.items()},
        "soft_minus": {name: lm.difference(top, line) for name, line in others.items()},
        "over_gain_matched": lm.contrast(lm.with_controls(soft, here, matched)),
        "over_hard": lm.contrast([(line, hard) for line in soft if line is not hard]),
    }


# ------------------------------------------------------------------------------------------------- answer and figure


def answer(result: Result) -> str:
    """Say the best soft restart's gain over the hard one and over every control, and whether its place moves."""
    places = result.numbers["places"]
    settings = result.settings
    header = ["", "K", "restarts", "soft", "keeps", "adds"]
    header += [*(short for short, _ in _OTHERS.values()), "gain-matched/soft"]
    body = [_table_line(name, facts) for name, facts in places.items()]
    lines = [
        f"Validation {lm.judged(settings)}, {settings['rule']}, lr {settings['lr']:g}, momentum "
        f"{settings['momentum']:g} ({settings['seeds_words']}). 'soft' is the best of "
        f"{next(iter(places.values()))['settings'] - 1} soft settings, chosen in hindsight; ratio: geometric mean over "
        "all settings, above 1 favours the restart.",
        format_table(header, body),
    ]
    for key, (_, words) in _OTHERS.items():
        claim = f"the best soft restart has a lower {lm.measure(settings)}, for every seed, than {words}"
        minus = {name: facts["soft_minus"][key] for name, facts in places.items()}
        lines.append(lm.tally_lower(claim, minus, lm.gap_form(settings)))
    gains = {name: _gain(facts) for name, facts in places.items()}
    lines += [
        lm.tally(
            f"what the best soft restart gains over the hard one is small, at most {SMALL:.0%}",
            {name: None if gain is None else gain <= SMALL for name, gain in gains.items()},
            {name: "" if gain is None else f"{gain:+.1%}" for name, gain in gains.items()},
        ),
        lm.tally_above(
            f"soft and hard restarts are better than their gain-matched controls by more than {MARGIN:.0%}",
            {name: facts["over_gain_matched"] for name, facts in places.items()},
        ),
        _moves(places),
        "An equal weight is not an equal restart in the two forms. In sum form a steady buffer is "
        f"{1 / (1 - settings['momentum']):.1f} pseudo-gradients long, in EMA form one.",
    ]
    return "\n".join(lines)


def _table_line(name: str, facts: Mapping[str, Any]) -> list[Any]:
    soft = facts["soft"]
    return [
        name,
        facts["period"],
        facts["restarts"],
        perplexity_words(soft),
        f"{soft['retain']:g}" if soft else "",
        f"{soft['inject']:g}" if soft else "",
        *(perplexity_words(facts["controls"][other]) for other in _OTHERS),
        lm.ratio_words(facts["over_gain_matched"]),
    ]


def _gain(facts: Mapping[str, Any]) -> float | None:
    """Return the relative gain in perplexity of the best soft restart over the hard one; means over the seeds."""
    soft, hard = facts["soft"], facts["controls"]["hard"]
    if soft is None or hard is None or hard["perplexity"] is None:
        return None
    return 1 - soft["perplexity"] / hard["perplexity"]


def _moves(places: Mapping[str, Any]) -> str:
    """Say whether the best setting differs at the other communication period."""
    is_moved, detail = {}, {}
    for form in BOTH_FORMS:
        at = {facts["inner_steps"]: facts["soft"] for facts in places.values() if facts["form"] == form}
        different = {(soft["retain"], soft["inject"]) for soft in at.values() if soft}
        is_moved[form] = len(different) > 1 if all(at.values()) else None
        detail[form] = ", ".join(
            f"S={inner_steps}: keeps {soft['retain']:g}, adds {soft['inject']:g}"
            for inner_steps, soft in at.items()
            if soft
        )
    return lm.tally("the best setting is another one at the other communication period", is_moved, detail)


def draw(result: Result) -> Figure:
    """Draw the short communication period."""
    return _page(result, _inner_steps(result)[0])


def details(result: Result) -> dict[str, Figure]:
    """Draw the long communication period."""
    return {f"S{steps}": _page(result, steps) for steps in _inner_steps(result)[1:]}


def _inner_steps(result: Result) -> list[int]:
    return list(dict.fromkeys(facts["inner_steps"] for facts in result.numbers["places"].values()))


def _page(result: Result, inner_steps: int) -> Figure:
    """Draw rows by form; columns: the soft restarts, and their gain-matched controls."""
    settings = result.settings
    places = [facts for facts in result.numbers["places"].values() if facts["inner_steps"] == inner_steps]
    every = [line for line in result.rows if line["retain"] is not None]
    drawn = select(every, inner_steps=inner_steps)
    rows: list[PageRow] = []
    for facts in places:
        arm = arm_name(facts["form"], SOFT_RULE[0], f"soft K={facts['period']}")
        # The page outlines what is no worse than the best that needs no restart at all.
        reference = [facts["controls"][name] for name in ("never", "momentum_free", "averaging")]
        bound = min((line["perplexity"] for line in reference if line and line["perplexity"]), default=-1.0)
        label = f"{FORM_WORDS[facts['form']]}\nkept share"
        cells = [line_at(select(drawn, arm=name), "inject", "retain") for name in (arm, control_name(arm))]
        rows.append((label, bound, cells))
    marked = f"; {NEVER_FIRES}: never fires" if any(map(never_fires, drawn)) else ""
    seeds = f"; means over {len(settings['seeds'])} seeds" if len(settings["seeds"]) > 1 else ""
    return heatmap_page(
        rows,
        every,
        columns=(f"restart every {places[0]['period']} rounds", "no restart, same mean gain"),
        x=settings["inject"],
        y=settings["retain"],
        x_label="weight of the pseudo-gradient that is added",
        measure=f"validation {lm.judged(settings, unit=True)}",
        finding=f"S={inner_steps}: {_best_words(places)}",
        reading=f"{settings['rule']}, lr {settings['lr']:g}, momentum {settings['momentum']:g}{seeds}",
        words="outlined: no worse than the best of no restart, momentum-free, averaging; bottom left: hard restart\n"
        f"\N{EN DASH}: the mean gain is that of no restart, which is then the control{marked}",
    )


def _best_words(places: Sequence[Mapping[str, Any]]) -> str:
    """Hold the best soft restart of each form against the hard one, no restart and plain averaging."""
    words = []
    pairs: list[tuple[float, float]] = []
    for facts in places:
        averaging = facts["controls"]["averaging"]
        values = facts["soft"], averaging, facts["controls"]["hard"], facts["controls"]["never"]
        soft, free, hard, never = map(perplexity_words, values)
        words.append(f"{FORM_WORDS[facts['form']]} {soft}, averaging {free}, hard {hard}, none {never}")
        if facts["soft"] and averaging and averaging["perplexity"]:
            pairs.append((averaging["perplexity"], facts["soft"]["perplexity"]))
    verb = in_words(
        pairs,
        more="is worse than plain averaging",
        fewer="is better than plain averaging",
        both="is better than plain averaging in one form only",
        same="is as good as plain averaging" if pairs else "and plain averaging have not both finished",
    )
    return f"the best soft restart {verb} ({'; '.join(words)})"
