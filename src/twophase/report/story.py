"""The demo's page: what a replica is, why momentum overshoots, what a restart does, the reader's own map, the limits.

It begins as an empty map and is written again while runs end. Every number comes from the demo's own folder.
"""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product, zip_longest
from typing import Any

import numpy as np

from twophase.figures.heatmaps import Panel, Scale
from twophase.report.maps import heat
from twophase.report.page import Html, asset, details, join, notes, page, section, table, tag, written
from twophase.report.plot import Chart, Curve, figure, script
from twophase.runs.record import RunRecord
from twophase.sweeps.table import Setting, readable

_SCRIPT = re.compile(r"<script>(.*?)</script>", re.DOTALL)
_WORDS = {"diverged": "div.", "failed": "failed", "missing": "\N{MIDDLE DOT}"}


@dataclass(frozen=True, slots=True)
class Story:
    """Content of the page.

    Args:
        base: the configuration that all runs share.
        findings: paragraphs on the results.
        maps: heatmaps of the main grid, rows of panels.
        scale: scale of their colours.
        beside: references of the grid, by name; None without a result.
        pair: a run without restarts and its twin with them, so far as they have ended.
        explorer: the page of `twophase explore`.
        table: every arm and control, as plain text.
        limits: sentences.
        following: commands that come next, and what each is for.
        refresh: seconds after which the page is written again; 0 when all runs have ended.
    """

    base: Any
    findings: Sequence[str]
    maps: Sequence[Sequence[Panel]]
    scale: Scale
    beside: Mapping[str, Setting | None]
    pair: Sequence[RunRecord]
    explorer: str
    table: str
    limits: Sequence[str]
    following: Mapping[str, str]
    refresh: float = 0


def build(story: Story) -> str:
    """Return the page; during the runs the map that fills in comes first."""
    short = section("In short", *_short_words(story.findings), anchor="short")
    own_map = section("Your map", *_map(story), anchor="map")
    following = [join([tag("code", command), f": {meaning}"]) for command, meaning in story.following.items()]
    return page(
        "What a restart of the momentum did here",
        f"A demo of two-phase training: {story.base.replicas} copies of one small language model, "
        f"{story.base.rounds} rounds, many settings.",
        short,
        own_map if story.refresh else None,
        section("What a replica is", *_replicas(story.base), anchor="replica"),
        section("Why momentum overshoots", *_overshoot(story), anchor="overshoot"),
        section("What a restart does", *_restart(story), anchor="restart"),
        None if story.refresh else own_map,
        section("Try it yourself", *_explorer(story.explorer), anchor="try"),
        section("What this does not show", notes(story.limits), anchor="limits"),
        section("What next", notes(following), anchor="next"),
        kind="demo",
        refresh=story.refresh,
        scripts=[script(), asset("story.js")],
        framed=_SCRIPT.findall(story.explorer),
        style=asset("story.css"),
    )


def _short_words(findings: Sequence[str]) -> Iterator[Html]:
    yield from (tag("p", text.replace("`", "")) for text in findings)
    yield tag(
        "p",
        "Heavy ball and Nesterov are two ways to take a step with momentum. A control is a run that a fair comparison "
        "needs. The other words are explained below.",
        class_="lead",
    )


def _replicas(base: Any) -> Iterator[Html]:
    yield tag(
        "p",
        "Two-phase training (also called DiLoCo) trains several copies of a model at once. Each copy is a ",
        tag("strong", "replica"),
        f". Here there are {base.replicas}. They rarely talk to each other, which is what makes it cheap. A ",
        tag("strong", "round"),
        " goes like this:",
    )
    yield tag(
        "ol",
        tag("li", "All replicas start from the same weights, the ", tag("strong", "anchor"), "."),
        tag("li", f"Each trains alone for {base.inner_steps} steps on its own text."),
        tag("li", "They meet. The mean of how far they went is what they ask for."),
        tag("li", "The ", tag("strong", "outer step"), " moves the anchor. The next round begins there."),
    )
    yield tag("p", f"A run of this demo has {base.rounds} rounds.")


def _overshoot(story: Story) -> Iterator[Html | None]:
    yield tag(
        "p",
        tag("strong", "Momentum"),
        " adds a part of the earlier outer steps to each new one. Steady progress gets faster by it. But it also "
        "carries on with what was right some rounds ago and no longer is. Then it pushes the anchor past, or aside.",
    )
    rule = story.pair[0].rule if story.pair else None
    if rule is None:
        yield tag("p", "Here two runs of this demo will move as soon as they have ended.", class_="notice")
        return
    both = (
        f"Below are two runs of this demo. Both have {rule.describe()}. The first never restarts its momentum; the "
        f"second sets it to zero every {story.pair[-1].restart} rounds. Their first rounds are the same."
    )
    single = f"Below is a run of this demo: {rule.describe()}. Its twin, with or without restarts, follows."
    yield tag("p", both if len(story.pair) > 1 else single)
    yield tag(
        "p",
        "Here lr is the learning rate, by which the outer step is multiplied; in the sum form momentum adds up earlier "
        "steps.",
    )
    yield _arrows(story.pair)
    yield tag("p", _arrow_words(story.pair))


def _arrows(pair: Sequence[RunRecord]) -> Html:
    """Return the moving picture: its data, which `story.js` draws, what steers it, and the same as a table."""
    names, runs = list(map(_name, pair)), [list(_rounds(run)) for run in pair]
    data = [{"name": name, "rounds": list(map(_json, lines))} for name, lines in zip(names, runs, strict=True)]
    kinds = {"ask": "what the replicas ask for", "carried": "carried over by momentum", "step": "the outer step"}
    rows = []
    for number, lines in enumerate(zip_longest(*runs, fillvalue={}), start=1):
        pairs = product(lines, ("asked", "length", "angle", "loss"))
        rows.append([number, *(written(line.get(key, math.nan), ".3g") for line, key in pairs)])
    quantities = ("asked", "carried over", "angle", "loss")
    header = ["round", *(f"{quantity}, {name.lower()}" for name in names for quantity in quantities)]
    caption = (
        "Each round: lengths of what is asked and of what is carried over, the angle between them in degrees, and "
    )
    return tag(
        "figure",
        tag("script", Html(json.dumps(data).replace("<", "\\u003c")), type="application/json"),
        tag("div", class_="views"),
        tag(
            "p",
            tag("button", "Play", type="button"),
            tag("label", "Round ", tag("input", type="range", min=1, max=len(rows), value=len(rows) // 2, step=1)),
            tag("output"),
            class_="steer",
        ),
        tag("ul", *(tag("li", tag("i", class_=kind), text) for kind, text in kinds.items()), class_="kinds"),
        tag(
            "figcaption",
            "Arrows of one round, in the plane of what the replicas ask for (to the right) and what momentum carries "
            "over. The outer step is the learning rate times their sum. One scale for both runs.",
        ),
        details("Every round as a table", table(header, rows, caption=f"{caption}the training loss.")),
        class_="rounds",
    )


def _name(run: RunRecord) -> str:
    return "No restart" if run.restart == "never" else f"Restart every {run.restart} rounds"


def _json(line: Mapping[str, float]) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in line.items()}


def _rounds(run: RunRecord) -> Iterator[dict[str, float]]:
    """Yield each round's arrows: lengths, the angle between them, the outer step's two coordinates, and the loss.

    The angle is nan where nothing is carried over.
    """
    rule, block, loss = run.rule, run.blocks[0], run.metrics["train_loss"]
    assert rule is not None
    weight = 1.0 if rule.form == "sum" else 1 - rule.momentum
    for index in range(min(len(block.cosine), len(loss))):
        g, m, cosine = (
            float(column[index]) for column in (block.pseudo_gradient_norm, block.buffer_norm, block.cosine)
        )
        if not all(map(math.isfinite, (g, m, cosine))):
            return  # diverged: there is nothing to draw any more
        angle = math.acos(max(-1.0, min(1.0, cosine))) if m > 0 else 0.0
        carried = rule.momentum * m * (rule.momentum if rule.nesterov else 1.0)
        asked = g * weight * (1 + rule.momentum if rule.nesterov else 1.0)
        x, y = asked + carried * math.cos(angle), carried * math.sin(angle)
        numbers = {"asked": asked, "length": carried, "x": rule.lr * x, "y": rule.lr * y, "loss": float(loss[index])}
        numbers["angle"] = math.degrees(angle) if m > 0 else math.nan
        yield {name: float(f"{value:.4g}") for name, value in numbers.items()}


def _arrow_words(pair: Sequence[RunRecord]) -> str:
    """Say in numbers what the picture shows: medians over the second half of both runs."""
    sentences = []
    for run in pair:
        rounds = list(_rounds(run))
        late = [line for line in rounds[len(rounds) // 2 :] if line["angle"] >= 0 and line["asked"]]
        if late:
            length, angle = np.median([(line["length"] / line["asked"], line["angle"]) for line in late], axis=0)
            sentences.append(
                f"{_name(run)}: what is carried over is {length:.1f} times as long as what is asked for, at "
                f"{angle:.0f}° to it."
            )
    note = (
        "(0° is the same way, 90° aside, 180° back. Medians over the second half of the run, without the rounds in "
        "which momentum is empty.)"
    )
    return " ".join([*sentences, note] if sentences else [])


def _restart(story: Story) -> Iterator[Html | None]:
    yield tag(
        "p",
        "A ",
        tag("strong", "restart"),
        " sets the momentum to zero. The next outer step is then only what the replicas ask for, and momentum grows "
        "again from there. Old pushes cannot pile up. The price: steady progress is cut short, too.",
    )
    losses = [Curve(_name(run).lower(), run.metrics["round"], run.metrics["train_loss"]) for run in story.pair]
    ends = [readable(float((run.summary or {}).get("perplexity") or math.nan)) for run in story.pair]
    yield figure(Chart("rounds", "Training loss of these runs", "round", "loss (nats a character)", losses))
    if len(ends) > 1 and "nan" not in ends:
        yield tag(
            "p",
            "On text that was held back, the first run ends at a ",
            tag("strong", "perplexity"),
            f" of {ends[0]}, the second at {ends[1]}. Perplexity is, roughly, between how many characters the model "
            "still wavers; lower is better.",
        )


def _map(story: Story) -> Iterator[Html | None]:
    yield tag(
        "p",
        "Each number is the perplexity of a run of yours. Across: the outer ",
        tag("strong", "learning rate"),
        ", by which the outer step is multiplied. Up: the momentum, the share that is carried over. Lighter is better. "
        f"Outlined: within {story.scale.bound / story.scale.low - 1:.0%} of the best of all."
        * math.isfinite(story.scale.bound),
    )
    yield tag("div", *(_heat(panel, story.scale) for row in story.maps for panel in row), class_="grids")
    cells = [(name, cell) for name, cell in story.beside.items() if cell is not None]
    if cells:
        meaning = {
            "no momentum": "nothing is carried over; the best learning rate of those tried",
            "plain averaging": "the anchor goes exactly where the replicas ask: no momentum, learning rate 1",
            "`auto`": "sets each step from what it measures: no learning rate, momentum or period to tune",
        }
        rows = [[name.strip("`"), readable(cell.result) or cell.state, meaning.get(name, "")] for name, cell in cells]
        yield tag("p", "Hold the map against these. They need fewer settings, or none.")
        yield table(
            ["beside the map", "perplexity", "what it is"], rows, caption="Runs beside the map.", hide_caption=True
        )
    if story.table:
        yield details("Every arm and control", tag("pre", story.table, tabindex="0"))


def _heat(panel: Panel, scale: Scale) -> Html:
    texts = [[_WORDS[state] if value is None else readable(value) for state, value in row] for row in panel.cells]
    axes = tag("span", "; across: learning rate; up: momentum", class_="quiet")
    return heat(panel, scale, [tag("strong", panel.title), axes], lambda i, j: [tag("span", texts[j][i])])


def _explorer(explorer: str) -> Iterator[Html]:
    yield tag(
        "p",
        "The same on a simple model that is computed while you move its sliders. Begin with the momentum: make it "
        "oscillate, then restart it.",
    )
    # Its own page, with its own policy, in a frame.
    frame = f'<iframe title="The explorer" loading="lazy" srcdoc="{html.escape(explorer)}"></iframe>'
    yield tag("details", tag("summary", "The explorer"), Html(frame), open=True, class_="framed")
