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

import lm
from common import Result, select
from heatmap_page import PageRow, heatmap_page, line_at
from lm import WITHIN, Line, perplexity_words, ratio_words
from paper import BOTH_FORMS, PERIOD, RULES, Scale, arm_name, control_name, robustness_heatmaps
from twophase.figures.matplotlib_types import Figure
from twophase.rule import FORM_WORDS
from twophase.sweeps.grid import MOMENTUM_FREE
from twophase.sweeps.table import Row, format_table, readable

_NEVER, _RESTARTED = "never", f"K={PERIOD}"


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


# ------------------------------------------------------------------------------------------------- tables and figures


def tables(result: Result) -> str:
    """Write how many settings are near the best with and without restarts, the ratios to the controls, and bests."""
    places = result.numbers["places"]
    header = ["", "none", f"K={PERIOD}", "best none", f"best K={PERIOD}", "worst none", f"worst K={PERIOD}"]
    header += ["diverged", f"none/K={PERIOD}", f"gain-matched/K={PERIOD}", "better", "worse"]
    controls = [
        [f"S={inner_steps}", *(perplexity_words(facts[key]) for key in ("best_of_all", "momentum_free", "averaging"))]
        for inner_steps, facts in result.numbers["controls"].items()
    ]
    return "\n\n".join(
        [
            format_table(header, [_table_line(name, facts) for name, facts in places.items()]),
            format_table(["", "best of all", "momentum-free", "averaging"], controls),
        ]
    )


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


def figures(result: Result) -> dict[str, Figure]:
    """Draw a page for each rule and communication period; the first one has the bare name."""
    (steps, kind), *others = _pages(result)
    pages = {f"-{kind.replace(' ', '-').lower()}-S{steps}": _page(result, steps, kind) for steps, kind in others}
    return {"": _page(result, steps, kind)} | pages


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
        measure="validation perplexity a token",
        finding=f"{kind[0].upper()}{kind[1:]}, S={inner_steps}: a restart every {PERIOD} rounds, and its control",
        reading=mean,
        words=f"outlined: within {WITHIN:.0%} of the best of all runs of this S; momentum-free SGD "
        f"{perplexity_words(controls['momentum_free'])}, plain averaging {perplexity_words(controls['averaging'])}",
    )


def main() -> None:
    """Run the experiment."""
    lm.experiment(
        "robustness_heatmaps", lambda scale, _: robustness_heatmaps(scale), table, figures=figures, tables=tables
    )


if __name__ == "__main__":
    main()
