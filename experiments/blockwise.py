"""Do restart periods by block, as the theory gives them, beat one period for all in a trained language model?

For each width and communication period, with DiLoCo's usual rule:

* one K for all blocks, and no restart at all; plain averaging as the control without momentum;
* K_b from the curvature of a run without restarts (`spectrum.py`): by the first cancellation at its mean progress
  (the paper's form), or by exact loss;
* K_b from what the rounds of that run show;
* K_b as an oracle: searched block by block on another seed;
* the controls: the same periods on other blocks, drawn at random.

All are compared with the one K that is best on the search seed, seed by seed. A difference is clear where its mean lies
more than `CLEAR` standard errors from 0. With so few seeds that is said rather too often.

Source: paper appendix A.9 (blockwise extension); theory notes R1, R13, R16, R20, R29.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import blockwise_cells as cells
from blockwise_cells import ALL, FREE, MEAN, NEVER, ONE, ORACLE, ROUNDS, SHUFFLED, Place
from common import Result, load, options_of, save
from lm import change_words, place_of, train_in_stages
from paper import Scale
from twophase.config import coerce
from twophase.figures.matplotlib_types import Axes, Figure
from twophase.figures.style import MUTED, PAPER, headline, look, name_panels, new_figure
from twophase.files import write_atomic
from twophase.judge.cells import Paired, means, outcomes
from twophase.sweeps.grid import Sweep
from twophase.sweeps.table import SEED, Row, format_table, readable, settings

CLEAR = 2.0
"""Standard errors."""
ARMS = (FREE, *(name for arm, control in SHUFFLED.items() for name in (arm, control)))


# -------------------------------------------------------------------------------------------------------- comparisons


def table(rows: Sequence[Row], scale: Scale, measured: Mapping[str, Any]) -> Result:
    """Tell every arm of every place with its change against the chosen K, and what was measured there."""
    places = {place.name: _place(rows, place, measured) for place in cells.places(scale)}
    lines = []
    for name, facts in places.items():
        for arm, line in facts["arms"].items():
            periods = " / ".join(",".join(periods) for periods in line["periods"])
            ratios = {f"ratio_{number}": ratio for number, ratio in enumerate(line["ratios"], start=1)}
            values = {key: value for key, value in line.items() if key != "ratios"}
            lines.append({"place": name, "arm": arm} | values | {"periods": periods} | ratios)
    made = cells.design(scale)
    settings = {
        "blocks": cells.BLOCKS, "form": cells.FORM, "lr": cells.LR, "momentum": cells.MOMENTUM, "steps": made.steps,
        "policies": made.policies, "search_seed": made.search_seed, "seeds": made.seeds, "draws": made.draws,
        "clear": CLEAR,
    }  # fmt: skip
    return Result(lines, {"places": places}, settings)


def _place(rows: Sequence[Row], place: Place, measured: Mapping[str, Any]) -> dict[str, Any]:
    """Put one width and communication period in numbers."""
    made = place.design
    here = [
        row
        for row in rows
        if (row.values["model.hidden_size"], row.values["inner_steps"]) == (place.width, place.inner_steps)
    ]
    judged = [row for row in here if row.values[SEED] in made.seeds]
    chosen = cells.best_alike(place, cells.scores_of(rows))
    alike = {
        policy: Arm([row for row in judged if row.arm == ONE and _periods(row)[0] == policy])
        for policy in made.policies
    }
    arms = {f"{ONE}: {policy}": arm for policy, arm in alike.items()}
    arms |= {name: Arm([row for row in judged if row.arm == name]) for name in ARMS}
    arms = {name: arm for name, arm in arms.items() if arm.periods}
    pairs = {name: control for name, control in SHUFFLED.items() if {name, control} <= arms.keys()}
    facts = measured.get(cells.pilot(place))
    return {
        "width": place.width,
        "inner_steps": place.inner_steps,
        "rounds": -(-made.steps // place.inner_steps),
        "chosen": chosen,
        "arms": {
            name: {"periods": arm.periods, "state": arm.state, "perplexity": arm.perplexity}
            | arm.change(alike.get(chosen or ""))
            for name, arm in arms.items()
        },
        "against_shuffled": {name: arms[name].change(arms[control]) for name, control in pairs.items()},
        "measured": facts,
        "order": _order({policy: arm.perplexity for policy, arm in alike.items()}, facts),
    }


def _periods(row: Row) -> tuple[str, ...]:
    policies = row.values["sync.restart"]
    words = coerce(tuple[str, ...], policies)  # a table's file has them as text
    return tuple(word.partition("=")[2] for word in words)


class Arm:
    """The rows of an arm: its periods, its state, and by seed the mean log perplexity over its draws."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.periods = list(dict.fromkeys(_periods(row) for row in rows))
        whole = outcomes(settings(rows)).map(math.log).dropna(how="all")
        logs = means(whole.dropna(axis="columns").T) if len(whole) == len(self.periods) else {}
        self.logs = {seed: log for seed, log in logs.items() if log < math.inf}
        is_whole = self.logs and self.logs.keys() == {row.values[SEED] for row in rows}
        self.perplexity = math.exp(statistics.fmean(self.logs.values())) if is_whole else None
        self.state = min({row.state for row in rows} - {"finished"}, default="finished" if rows else "missing")

    def change(self, other: Arm | None) -> dict[str, Any]:
        """Return the geometric mean ratio of perplexities over the seeds, with its error; below 1 is better."""
        pairs = Paired(())
        if other is not None and None not in (self.perplexity, other.perplexity):
            pairs = Paired.of(other.logs, self.logs)
        low, high = (None if end is None else math.exp(end) for end in pairs.ends(CLEAR))
        return {"ratio": pairs.ratio, "error": pairs.error, "low": low, "high": high, "ratios": pairs.ratios}


def _order(reached: Mapping[str, float | None], facts: Mapping[str, Any] | None) -> float | None:
    """Correlate the ranks of the predicted losses of one K for all and of the perplexities; 1 where both agree."""
    perplexities = {policy: value for policy, value in reached.items() if value is not None}
    if facts is None or len(reached) < 3 or len(perplexities) < len(reached):
        return None
    columns: list[list[float]] = [[values[p] for p in reached] for values in (facts["log_loss"], perplexities)]
    ranks = [[sorted(values).index(value) for value in values] for values in columns]
    return statistics.correlation(*ranks) if all(len(set(each)) > 1 for each in ranks) else None


# -------------------------------------------------------------------------------------------------- tables and figure


def tables(result: Result) -> str:
    """Write what each arm reached against one K for all, and the progress that was measured in each block."""
    places = result.numbers["places"]
    return "\n\n".join(
        [
            format_table(["", "arm", "periods", "perplexity", "against one K"], _body(places)),
            format_table(
                ["", "block", "sigma", "from", "to", "rounds"], _sigma_body(places, list(result.settings["blocks"]))
            ),
        ]
    )


def _body(places: Mapping[str, Any]) -> list[list[Any]]:
    body = []
    for name, facts in places.items():
        for number, (arm, line) in enumerate(facts["arms"].items()):
            chosen = " (chosen)" if arm == f"{ONE}: {facts['chosen']}" else ""
            each = " / ".join(",".join("-" if p == NEVER else p for p in periods) for periods in line["periods"])
            words = [readable(line["perplexity"]) or line["state"], change_words(line)]
            body.append([name if number == 0 else "", arm + chosen, "" if arm == FREE else each, *words])
    return body


def _sigma_body(places: Mapping[str, Any], blocks: Sequence[str]) -> list[list[Any]]:
    body = []
    for name, facts in places.items():
        seen = facts["measured"]
        for number, block in enumerate(blocks if seen else ()):
            shown, sigma = seen["rounds_shown"][number], seen["rounds_sigma"][number]
            rounds = "none" if sigma is None else f"{sigma:.2g}{'' if shown else ' (not shown)'}"
            values = [f"{seen[key][number]:.2g}" for key in ("sigma", "low", "high")]
            body.append([name if number == 0 else "", block, *values, rounds])
    return body


_LINES = {
    "one K for all": 0,
    FREE: 7,
    MEAN: 2,
    ALL: 5,
    ROUNDS: 1,
    ORACLE: 3,
}
"""Plot style by arm-name prefix."""
_FARTHEST = 60.0
"""Per cent beyond which a point is put at the edge, with its number."""


def figures(result: Result) -> dict[str, Figure]:
    """Draw rows by arm; across: perplexity against the chosen K for all, in per cent; hollow: on other blocks."""
    places, settings = result.numbers["places"], result.settings
    columns = min(len(places), 2)
    rows = -(-len(places) // columns)
    names = list(dict.fromkeys(arm for facts in places.values() for arm in facts["arms"] if arm not in _CONTROLS))
    figure, grid = new_figure(1.3 + rows * (0.6 + 0.19 * len(names)), rows, columns, sharex="col", sharey=True)
    panels = list(grid.flat)
    for panel, facts in zip(panels, places.values(), strict=False):
        _panel(panel, facts, names)
    for panel in panels[len(places) :]:
        panel.set_axis_off()
    name_panels(panels[: len(places)], [f"{name}, {facts['rounds']} rounds" for name, facts in places.items()])
    for panel in grid[-1]:
        low, high = panel.get_xlim()  # of the column
        panel.set_xlim(low, min(high, _FARTHEST * 1.02) if math.isfinite(high) else _FARTHEST)
        panel.set_xlabel("perplexity against the chosen K, %\n(left of 0 is better)")
    several = len(settings["seeds"]) > 1
    bars = f"bars: {settings['clear']:g} standard errors; strokes: the seeds" if several else "one seed"
    headline(
        figure,
        "Periods by block against the best one K for all",
        f"perplexity against the one K for all that is best on another seed (ringed), lower is better; {bars}\n"
        f"hollow: the same periods on other blocks; blocks {', '.join(settings['blocks'])}; Nesterov lr "
        f"{settings['lr']:g}, momentum {settings['momentum']:g}, {settings['form']} form",
    )
    return {"": figure}


_CONTROLS = {control: arm for arm, control in SHUFFLED.items()}


def _panel(panel: Axes, facts: Mapping[str, Any], names: Sequence[str]) -> None:
    for arm, line in facts["arms"].items():
        of = _CONTROLS.get(arm, arm)
        is_control = arm in _CONTROLS
        row = names.index(of) + 0.28 * is_control
        style = look(next(number for start, number in _LINES.items() if str(of).startswith(start)), every=1)
        colour = style["color"]
        if line["ratio"] is None:
            panel.text(0, row, line["state"], color=colour, fontsize=7, ha="center", va="center")
            continue
        percent = 100 * (line["ratio"] - 1)
        if percent > _FARTHEST:  # at the edge of the panel, wherever that will be
            words = f"+{percent:.0f} % \N{RIGHTWARDS ARROW}"
            panel.text(0.98, row, words, transform=panel.get_yaxis_transform(), fontsize=7, ha="right", va="center")
            continue
        if line["low"] is not None:
            ends = [100 * (line[end] - 1) for end in ("low", "high")]
            panel.plot(ends, [row, row], color=colour, linewidth=0.7 if is_control else 1.0)
        if not is_control:
            seeds = [100 * (ratio - 1) for ratio in line["ratios"]]
            panel.plot(seeds, [row] * len(seeds), "|", color=colour, markersize=4.5, markeredgewidth=0.7)
        face = PAPER if is_control else colour
        panel.plot([percent], [row], marker=style["marker"], color=colour, markerfacecolor=face, markersize=3.8)
        if arm == f"one K for all: {facts['chosen']}":
            panel.plot([percent], [row], marker="o", markersize=7, markerfacecolor="none", color=colour)
    panel.axvline(0, color=MUTED, linewidth=0.7, zorder=0)
    shown = {ONE: "one K for all", ": never": ": no restart", "K_b, ": "by block: ", "curvature, ": ""}
    labels = list(names)
    for old, new in shown.items():
        labels = [label.replace(old, new) for label in labels]
    panel.set_yticks(range(len(names)), labels)
    panel.set_ylim(len(names) - 0.4, -0.6)


def main() -> None:
    """Run the experiment: what is measured in trained runs decides which come next."""
    options = options_of(__doc__, trains=True).parse_args()
    if options.redraw:
        print(*save("blockwise", options.out, load("blockwise"), figures), sep="\n")
    else:
        scale, folder = place_of("blockwise", options)
        runs, path = options.out / "runs", folder / "measured.json"
        measured: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}

        def plan(rows: Sequence[Row]) -> Sweep:
            new = cells.measure(scale, rows, runs, measured)
            if new != measured:
                measured.update(new)
                write_atomic(path, json.dumps(new) + "\n")
            return cells.sweep(scale, rows, measured)

        rows = train_in_stages(plan, folder, workers=options.workers, runs=runs)
        result = table(rows, scale, measured)
        print(tables(result), *save("blockwise", options.out, result, figures), sep="\n")


if __name__ == "__main__":
    main()
