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

import lm
from common import Result, select
from heatmap_page import NEVER_FIRES, PageRow, heatmap_page, line_at, never_fires
from lm import Line, perplexity_words
from paper import (
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
from twophase.figures.matplotlib_types import Figure
from twophase.rule import FORM_WORDS
from twophase.sweeps.table import Row, format_table

_OTHERS = ("hard", "never", "gain_matched", "momentum_free", "averaging")
"""What the best soft restart is compared with."""


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


# ------------------------------------------------------------------------------------------------- tables and figures


def tables(result: Result) -> str:
    """Write the best soft restart of each place, what it keeps and adds, and what the others reach."""
    header = ["", "K", "restarts", "soft", "keeps", "adds", *_OTHERS, "gain-matched/soft"]
    return format_table(header, [_table_line(name, facts) for name, facts in result.numbers["places"].items()])


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


def figures(result: Result) -> dict[str, Figure]:
    """Draw a page for each communication period; the short one has the bare name."""
    return {f"-S{steps}" if number else "": _page(result, steps) for number, steps in enumerate(_inner_steps(result))}


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
        measure="validation perplexity a token",
        finding=f"S={inner_steps}: soft restarts, and the same mean gain without",
        reading=f"{settings['rule']}, lr {settings['lr']:g}, momentum {settings['momentum']:g}{seeds}",
        words="outlined: no worse than the best of no restart, momentum-free, averaging; bottom left: hard restart\n"
        f"\N{EN DASH}: the mean gain is that of no restart, which is then the control{marked}",
    )


def main() -> None:
    """Run the experiment."""
    lm.experiment("soft_restart", lambda scale, _: soft_restart(scale), table, figures=figures, tables=tables)


if __name__ == "__main__":
    main()
