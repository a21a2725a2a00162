"""Is a soft restart, which keeps a share of the buffer and adds to it, worth its two more hyperparameters?

Perplexity over the share that is kept and the weight of the pseudo-gradient that is added, for Nesterov with learning
rate 0.9 and momentum 0.7, at a short and a long communication period; beside each setting its gain-matched control
without restarts, and for reference no restart, the hard restart, momentum-free SGD and plain averaging.

Source: paper appendix, the soft restart sweeps; theory notes R26, R27, E14.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from twophase.figures.style import new_page
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
from twophase.studies._lm import (
    MARGIN,
    Line,
    best,
    contrast,
    control_of,
    difference,
    first,
    free_and_averaging,
    lines_of,
    perplexity_words,
    pick,
    place_name,
    public,
    ratio_words,
    seeds_words,
    shown,
    tally,
    tally_above,
    tally_lower,
    with_controls,
)
from twophase.studies._lm_figures import NEVER_FIRES, colour_bar, colours_for, draw_heatmap, never_fires, note
from twophase.studies.study import Result
from twophase.sweep.grid import Sweep
from twophase.sweep.table import Row, format_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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


def sweep(scale: Scale, rows: Sequence[Row]) -> Sweep:
    """The runs (`recipes.paper.soft_restart`); nothing depends on earlier rows."""
    del rows
    return soft_restart(scale)


def table(rows: Sequence[Row], scale: Scale) -> Result:
    """Every setting with what it keeps and adds, and by communication period and form the best against the controls."""
    lines = lines_of(rows, scale)
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
        place_name(form, kind, inner_steps): _facts(lines, form, inner_steps, period)
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
        "seeds_words": seeds_words(scale),
        "inject_acts_on": "the buffer of the rule's own form, so it is relatively weaker in sum form",
    }
    return Result(public(lines), {"places": places}, settings)


def _facts(lines: Sequence[Line], form: str, inner_steps: int, period: int) -> dict[str, Any]:
    """One communication period and form."""
    here = pick(lines, inner_steps=inner_steps)
    arm = arm_name(form, SOFT_RULE[0], f"soft K={period}")
    soft, matched = pick(here, arm=arm), control_name(arm)
    hard, never = first(soft, retain=0.0, inject=0.0), first(here, arm=arm_name(form, SOFT_RULE[0], "never"))
    free, averaging = free_and_averaging(here, inner_steps)
    top = best(line for line in soft if line is not hard)
    control = None if top is None else control_of(here, matched, top)
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
        "soft": None if top is None else (shown(top) or {}) | {"retain": top["retain"], "inject": top["inject"]},
        "controls": {name: shown(line) for name, line in others.items()},
        "soft_minus": {name: difference(top, line) for name, line in others.items()},
        "over_gain_matched": contrast(with_controls(soft, here, matched)),
        "over_hard": contrast([(line, hard) for line in soft if line is not hard]),
    }


# ------------------------------------------------------------------------------------------------- answer and figure


def answer(result: Result) -> str:
    """What the best soft restart gains over the hard one and over every control, and whether its place moves."""
    places = result.numbers["places"]
    settings = result.settings
    header = [
        "",
        "K",
        "restarts",
        "soft",
        "keeps",
        "adds",
        *(short for short, _ in _OTHERS.values()),
        "gain-matched/soft",
    ]
    body = [_table_line(name, facts) for name, facts in places.items()]
    lines = [
        f"Validation perplexity, {settings['rule']}, lr {settings['lr']:g}, momentum {settings['momentum']:g} "
        f"({settings['seeds_words']}). 'soft' is the best of {next(iter(places.values()))['settings'] - 1} soft "
        "settings, chosen in hindsight; ratio: geometric mean over all settings, above 1 favours the restart.",
        format_table(header, body),
    ]
    for key, (_, words) in _OTHERS.items():
        claim = f"the best soft restart has a lower perplexity, for every seed, than {words}"
        lines.append(tally_lower(claim, {name: facts["soft_minus"][key] for name, facts in places.items()}))
    gains = {name: _gain(facts) for name, facts in places.items()}
    lines += [
        tally(
            f"what the best soft restart gains over the hard one is small, at most {SMALL:.0%}",
            {name: None if gain is None else gain <= SMALL for name, gain in gains.items()},
            {name: "" if gain is None else f"{gain:+.1%}" for name, gain in gains.items()},
        ),
        tally_above(
            f"soft and hard restarts are better than their gain-matched controls by more than {MARGIN:.0%}",
            {name: facts["over_gain_matched"] for name, facts in places.items()},
        ),
        _moves(places),
        "An equal weight is not an equal restart in the two forms: in sum form a steady buffer is "
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
        ratio_words(facts["over_gain_matched"]),
    ]


def _gain(facts: Mapping[str, Any]) -> float | None:
    """By how much of its perplexity the best soft restart is better than the hard one; means over the seeds."""
    soft, hard = facts["soft"], facts["controls"]["hard"]
    if soft is None or hard is None or hard["perplexity"] is None:
        return None
    return 1 - soft["perplexity"] / hard["perplexity"]


def _moves(places: Mapping[str, Any]) -> str:
    """Whether the best setting is another one at the other communication period."""
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
    return tally("the best setting is another one at the other communication period", is_moved, detail)


def draw(result: Result) -> Figure:
    """Rows: communication period and form; columns: the soft restarts, and their gain-matched controls."""
    places = result.numbers["places"]
    retain, inject, lines = result.settings["retain"], result.settings["inject"], result.rows
    figure = new_page(1.0 + len(places) * (0.2 * len(retain) + 0.5))
    axes = figure.subplots(len(places), 2, squeeze=False)
    drawn = [line for line in lines if line["retain"] is not None]
    colours = colours_for(drawn)
    for row, facts in zip(axes, places.values(), strict=True):
        arm = arm_name(facts["form"], SOFT_RULE[0], f"soft K={facts['period']}")
        here = pick(lines, inner_steps=facts["inner_steps"])
        # The page outlines what is no worse than the best that needs no restart at all.
        reference = [facts["controls"][name] for name in ("never", "momentum_free", "averaging")]
        bound = min((line["perplexity"] for line in reference if line and line["perplexity"]), default=-1.0)
        for panel, name in zip(row, (arm, control_name(arm)), strict=True):
            group = pick(here, arm=name)

            def line_at(adds: float, keeps: float, group: list[Any] = group) -> Any:
                return first(group, retain=keeps, inject=adds)

            draw_heatmap(panel, inject, retain, line_at, colours=colours, bound=bound, size=6.5)
        row[0].set_ylabel(
            f"{FORM_WORDS[facts['form']]}\nS={facts['inner_steps']}, K={facts['period']}\nkept share", fontsize=7
        )
        words = {name: f"{short} {perplexity_words(facts['controls'][name])}" for name, (short, _) in _OTHERS.items()}
        row[0].set_title(f"{words['never']}, {words['hard']}", fontsize=7)
        row[1].set_title(f"{words['momentum_free']}, plain {words['averaging']}", fontsize=7)
    for panel, what in zip(axes[0], ("Soft restarts", "No restart, same mean gain"), strict=True):
        panel.set_title(f"$\\bf{{{what.replace(' ', '~')}}}$\n{panel.get_title()}", fontsize=7)
    for panel in axes[-1]:
        panel.set_xlabel("weight of the pseudo-gradient that is added", fontsize=7, labelpad=1)
    colour_bar(figure, axes.ravel(), colours, drawn)
    marked = f" {NEVER_FIRES}: never fires." if any(map(never_fires, drawn)) else ""
    seeds = f"; means over {len(result.settings['seeds'])} seeds" if len(result.settings["seeds"]) > 1 else ""
    note(
        figure,
        f"{result.settings['rule']}, lr {result.settings['lr']:g}, momentum {result.settings['momentum']:g}{seeds}. "
        "Outlined: no worse than the best of never, momentum-free and plain averaging.\n"
        f"Bottom left: the hard restart. \N{EN DASH}: the mean gain is that of no restart, which is then the control."
        f"{marked}",
    )
    return figure
