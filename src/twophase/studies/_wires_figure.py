"""The figure of the study `wires`: each wire against float32 on the seeds' own spread, and what it sends."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from twophase.figures.style import MUTED, look, name_panels, new_page
from twophase.studies._lm import one, perplexity_words
from twophase.studies._lm_figures import note

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from twophase.studies.study import Result

_LOOKS = {"bfloat16": 1, "int8": 2}


def draw(result: Result) -> Figure:
    """(a) Rows: the places; across: each wire's change against float32, on the seeds' own spread. (b) Bytes a round."""
    places = result.numbers["places"] | {"all places": result.numbers["all_places"]}
    figure = new_page(1.5 + 0.33 * len(places))
    left, right = figure.subplots(1, 2, width_ratios=(3.2, 1))
    for row, facts in enumerate(places.values()):
        if facts["spread"] is not None:
            left.fill_betweenx(
                [row - 0.42, row + 0.42], -100 * facts["spread"], 100 * facts["spread"], color="#e4e4e4", linewidth=0
            )
        for wire, shift in zip(_LOOKS, (-0.17, 0.17), strict=True):
            _draw_change(left, row + shift, facts, wire, _seeds(result, facts, wire))
    left.axvline(0, color=MUTED, linewidth=0.7, zorder=1)
    names = [f"{name}\n{perplexity_words(facts)}" if "perplexity" in facts else name for name, facts in places.items()]
    left.set_yticks(range(len(places)), names, fontsize=6.5)
    left.axhline(len(places) - 1.5, color=MUTED, linewidth=0.5)
    left.set_ylim(len(places) - 0.4, -0.6)
    left.set_xlabel("perplexity against float32, same seed, %")
    for wire, number in _LOOKS.items():
        style = look(number, every=1)
        left.plot([], [], color=style["color"], marker=style["marker"], linestyle="-", label=wire)
    left.fill_between([], [], [], color="#e4e4e4", label="float32, another seed: one standard deviation")
    _draw_bytes(right, result)
    name_panels([left, right], ["What it changes", "What it sends"])
    figure.legend(*left.get_legend_handles_labels(), loc="outside upper center", ncols=3)
    settings = result.settings
    several = len(settings["seeds"]) > 1
    judged = f"Geometric means; bars: {settings['clear']:g} standard errors; strokes: the seeds. " if several else ""
    mean = f", mean of {len(settings['seeds'])} seeds" if several else ""
    note(
        figure,
        f"{judged}Below each name: perplexity in float32{mean}.\n"
        f"{settings['form']} form, lr {settings['lr']:g}, S={settings['inner_steps']}, {settings['rounds']} rounds; "
        f"rule, momentum, restart. Bytes: what each of {settings['processes']} processes sends.",
    )
    return figure


def _seeds(result: Result, facts: Mapping[str, Any], wire: str) -> list[float]:
    """Each seed's change in one place, in %; none for the mean over the places."""
    if "rule" not in facts:
        return []
    line = one(result.rows, wire=wire, **{name: facts[name] for name in ("rule", "momentum", "restart")})
    logs = [] if line is None else [value for name, value in line.items() if name.startswith("float32_log_seed")]
    return [100 * math.expm1(log) for log in logs if log is not None]


def _draw_change(panel: Axes, height: float, facts: Mapping[str, Any], wire: str, dots: Sequence[float]) -> None:
    """One wire in one place: its mean with its error, and the seeds as dots."""
    found, style = facts["change"][wire], look(_LOOKS[wire], every=1)
    colour = style["color"]
    if found["ratio"] is None:
        word = "div." if "diverged" in found["verdict"] else "missing"
        panel.text(0, height, f"{wire}: {word}", color=colour, fontsize=6, ha="center", va="center")
        return
    if found["low"] is not None:
        ends = [100 * math.expm1(found[end]) for end in ("low", "high")]
        panel.plot(ends, [height, height], color=colour, linewidth=1.1, zorder=3)
        panel.plot(dots, [height] * len(dots), "|", color=colour, markersize=5, markeredgewidth=0.8, zorder=2)
    panel.plot([100 * (found["ratio"] - 1)], [height], marker=style["marker"], color=colour, markersize=4, zorder=4)


def _draw_bytes(panel: Axes, result: Result) -> None:
    sent, share = result.numbers["bytes_a_round"], result.numbers["bytes_over_float32"]
    colours = [look(number)["color"] for number in (0, *_LOOKS.values())]
    thousands = [number / 1000 for number in sent.values()]
    panel.barh(range(len(sent)), thousands, color=colours, height=0.6)
    for row, wire in enumerate(sent):
        inside = row == 0
        panel.text(
            thousands[row] * (0.97 if inside else 1) + (0 if inside else 3), row, f"{share[wire]:.3f}",
            ha="right" if inside else "left", va="center", fontsize=7, color="white" if inside else "black",
        )  # fmt: skip
    panel.set_yticks(range(len(sent)), list(sent))
    panel.invert_yaxis()
    panel.set_xlabel("kB a round")
