"""The figure of the study `wires`: each wire against float32 on the seeds' own spread, and what it sends."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from twophase.figures.style import MUTED, look, name_panels, new_page
from twophase.studies._lm import first, perplexity_words
from twophase.studies._lm_figures import note

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from twophase.studies.study import Result

_LOOKS = {"bfloat16": 1, "int8": 2}


def draw(result: Result) -> Figure:
    """(a) Rows: the places; across: each wire's change against float32, on the seeds' own spread. (b) Bytes a round."""
    places = result.numbers["places"] | {"all places": result.numbers["all_places"]}
    settings, several = result.settings, len(result.settings["seeds"]) > 1
    figure = new_page(1.5 + 0.33 * len(places))
    changes, sent = figure.subplots(1, 2, width_ratios=(3.2, 1))
    for row, facts in enumerate(places.values()):
        if facts["spread"] is not None:
            ends = (-100 * facts["spread"], 100 * facts["spread"])
            changes.fill_betweenx([row - 0.42, row + 0.42], *ends, color="#e4e4e4", linewidth=0)
        for wire, shift in zip(_LOOKS, (-0.17, 0.17), strict=True):
            line: Mapping[str, Any] = {}  # the mean over the places has no dots of its own
            if "rule" in facts:
                place = {name: facts[name] for name in ("rule", "momentum", "restart")}
                line = first(result.rows, wire=wire, **place) or {}
            dots = [value for name, value in line.items() if name.startswith("float32_log_seed") and value is not None]
            _draw_change(changes, row + shift, facts["change"][wire], wire, dots)
    changes.axvline(0, color=MUTED, linewidth=0.7, zorder=1)
    names = [f"{name}\n{perplexity_words(facts)}" if "perplexity" in facts else name for name, facts in places.items()]
    changes.set_yticks(range(len(places)), names, fontsize=6.5)
    changes.axhline(len(places) - 1.5, color=MUTED, linewidth=0.5)
    changes.set_ylim(len(places) - 0.4, -0.6)
    changes.set_xlabel("perplexity against float32, same seed, %")
    for wire, number in _LOOKS.items():
        style = look(number, every=1)
        changes.plot([], [], color=style["color"], marker=style["marker"], linestyle="-", label=wire)
    changes.fill_between([], [], [], color="#e4e4e4", label="float32, another seed: one standard deviation")
    _draw_bytes(sent, result)
    name_panels([changes, sent], ["What it changes", "What it sends"])
    figure.legend(*changes.get_legend_handles_labels(), loc="outside upper center", ncols=3)
    bars = f"Geometric means; bars: {settings['clear']:g} standard errors; strokes: the seeds. " if several else ""
    mean = f", mean of {len(settings['seeds'])} seeds" if several else ""
    note(
        figure,
        f"{bars}Below each name: perplexity in float32{mean}.\n"
        f"{settings['form']} form, lr {settings['lr']:g}, S={settings['inner_steps']}, {settings['rounds']} rounds; "
        f"rule, momentum, restart. Bytes: what each of {settings['processes']} processes sends.",
    )
    return figure


def _draw_change(panel: Axes, height: float, change: Mapping[str, Any], wire: str, dots: Sequence[float]) -> None:
    """Draw one wire in one place: its mean with its error, and the seeds' log ratios as strokes."""
    style = look(_LOOKS[wire], every=1)
    colour = style["color"]
    if change["ratio"] is None:
        word = "div." if "diverged" in change["verdict"] else "missing"
        panel.text(0, height, f"{wire}: {word}", color=colour, fontsize=6, ha="center", va="center")
        return
    if change["low"] is not None:
        ends, seeds = ([100 * math.expm1(log) for log in logs] for logs in ((change["low"], change["high"]), dots))
        panel.plot(ends, [height, height], color=colour, linewidth=1.1, zorder=3)
        panel.plot(seeds, [height] * len(seeds), "|", color=colour, markersize=5, markeredgewidth=0.8, zorder=2)
    panel.plot([100 * (change["ratio"] - 1)], [height], marker=style["marker"], color=colour, markersize=4, zorder=4)


def _draw_bytes(panel: Axes, result: Result) -> None:
    sent, share = result.numbers["bytes_a_round"], result.numbers["bytes_over_float32"]
    colours = [look(number)["color"] for number in (0, *_LOOKS.values())]
    thousands = [number / 1000 for number in sent.values()]
    panel.barh(range(len(sent)), thousands, color=colours, height=0.6)
    for row, wire in enumerate(sent):
        end, words = thousands[row], f"{share[wire]:.3f}"
        if row == 0:  # the longest bar has its number inside
            panel.text(end * 0.97, row, words, ha="right", va="center", fontsize=7, color="white")
        else:
            panel.text(end + 3, row, words, ha="left", va="center", fontsize=7, color="black")
    panel.set_yticks(range(len(sent)), list(sent))
    panel.invert_yaxis()
    panel.set_xlabel("kB a round")
