"""The card of an arm that went through the bench: a picture and a page, from what `twophase.judge.bench` says."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from twophase.base.files import table_text
from twophase.figures.profiles import draw_profiles
from twophase.figures.style import INK, MUTED, headline, new_page, rendered, share_legend, styled
from twophase.judge.bench import Against, Card, PlaceCard
from twophase.recipes.arms import CONTROL
from twophase.report.page import Html, image, page, section, table, tag, written

_COLOURS = {"better": "#0072b2", "worse": "#d55e00"}


def contents(card: Card, labels: Mapping[str, str], untuned: Collection[str]) -> dict[str, str | bytes]:
    """Return a card's files by their endings: the picture, the numbers that it shows, and the page.

    Args:
        card: card to show.
        labels: short names of all arms.
        untuned: arms without an outer number to tune; they are not grey in the picture.

    Raises:
        UsageError: matplotlib is not installed.
    """
    lines = [
        {"place": place.place, "word": against.word, "ratio": against.ratio, "low": against.low, "high": against.high}
        for place in card.places
        for against in [place.control or Against(card.arm, "no control")]
    ]
    coloured = {arm: labels[arm] for arm in dict.fromkeys([CONTROL, *untuned, card.arm]) if arm in labels}
    png = _picture(card, coloured)
    return {".png": png, ".csv": table_text(lines), ".html": _document(card, png, labels, untuned)}


def _picture(card: Card, labels: Mapping[str, str]) -> bytes:
    """Draw a card: on the left the arm against averaging place by place, on the right the performance profiles."""
    with styled():
        figure = new_page(max(3.2, 1.4 + 0.22 * len(card.places)))
        # Without stored arms there is nothing to draw on the right.
        ratios, *right = figure.subplots(1, 2, width_ratios=(1, 1.1)) if card.behind else [figure.subplots()]
        controls = [place.control for place in reversed(card.places)]
        ahead = [abs(100 * (c.ratio - 1)) for c in controls if c and c.ratio is not None]
        # Of two or three seeds an interval may be a hundred times as long as what is to be seen.
        widest = max(5.0, 2.5 * max(ahead, default=0.0))
        for row, control in enumerate(controls):
            if control is None or control.ratio is None or control.low is None or control.high is None:
                ratios.text(0, row, control.word if control else "no control", fontsize=6.5, va="center", color=MUTED)
                continue
            colour = _COLOURS.get(control.word, INK)
            low, mean, high = (100 * (value - 1) for value in (control.low, control.ratio, control.high))
            ratios.plot([max(low, -widest), min(high, widest)], [row, row], color=colour, linewidth=1.2)
            ratios.plot([mean], [row], marker="o", markersize=3.5, color=colour)
            for cut, end, marker in ((low < -widest, -widest, "<"), (high > widest, widest, ">")):
                if cut:
                    ratios.plot([end], [row], marker=marker, markersize=3.5, color=colour, clip_on=False)
        ratios.axvline(0, color=MUTED, linewidth=0.6)
        ratios.set_xlim(-widest, widest)
        ratios.set_ylim(-0.5, len(controls) - 0.5)
        ratios.set_yticks(range(len(controls)), [place.place for place in reversed(card.places)])
        ratios.set_xlabel("% ahead of averaging")
        for shares in right:
            draw_profiles(shares, card.behind, labels)
            share_legend(figure, right, columns=3)
        reading = "mean and interval, an arrowhead beyond the axis"
        if right:
            reading = f"left: {reading}\nright: the higher the nearer to the best arm, each over its bench's averaging"
        counts = card.counts()
        lost = f", diverged at {counts['all diverged']}" if "all diverged" in counts else ""
        headline(
            figure,
            f"{labels.get(card.arm, card.arm)}: better than averaging at {counts['better']} of {len(card.places)} "
            f"places, worse at {counts['worse']}{lost}",
            reading,
        )
        return rendered(figure, [".png"])[".png"]


def _document(card: Card, png: bytes, labels: Mapping[str, str], untuned: Collection[str]) -> str:
    """Return a card's page, complete in one file."""
    picture = image(png, card.line())
    head = [
        "place", "best setting", "result", "averaging over arm", "interval", "word", "settings", "search",
        "seconds a run", "of averaging",
    ]  # fmt: skip
    rows = [_row(place) for place in card.places]
    against = [
        [
            place.place,
            *(
                ", ".join(labels[other.other] for other in place.stored if other.word == word)
                for word in ("better", "equivalent", "worse")
            ),
            _best([other for other in place.stored if other.other in untuned], labels),
            _best(place.stored, labels),
        ]
        for place in card.places
        if place.stored and place.setting
    ]
    nowhere = ", ".join(place.place for place in card.places if not place.setting)
    problems = [f"{name}: not run here. {why}" for name, why in card.refused.items()]
    problems += dict.fromkeys(place.note for place in card.places if place.note)
    return page(
        f"Bench card: {card.arm}",
        card.line(),
        section(
            "At each place",
            picture,
            table(head, rows, caption="Against averaging, tuned with the same budget on the same seeds"),
            tag(
                "p",
                "A result is the geometric mean over the held-out seeds: perplexity, or the validation loss of a task "
                "that has none. A ratio above 1 means that the arm is better. The intervals hold for all places "
                "together. Seconds are by the clock, of runs with one thread.",
            ),
            anchor="places",
        ),
        section(
            "Against the stored arms",
            table(
                ["place", "better than", "equivalent to", "worse than", "best without outer numbers", "best of all"],
                against,
                caption="Words for each stored arm, seed by seed",
            )
            if against
            else tag("p", "There is nothing to compare with stored arms."),
            tag("p", f"At {nowhere} this arm diverged at every setting that was tried.") if nowhere else "",
            tag(
                "p",
                "Each result is divided by that of averaging in the same bench with the same seed, because processors "
                "round differently. The stored arms were tuned with the budget of the size full, this one with that of "
                f"{card.size}. Words are corrected for the {card.comparisons['stored']} comparisons of this table. Not "
                "named: undecided.",
            )
            if against
            else "",
            anchor="stored",
        ),
        kind="bench",
        problems=problems,
    )


def _row(place: PlaceCard) -> list[object]:
    control = place.control
    numbers = " ".join(f"{name.removeprefix('method.')}={value:g}" for name, value in place.setting.items())
    ends = [] if control is None else [end for end in (control.low, control.high) if end is not None]
    return [
        tag("span", place.place, title=place.title),
        numbers,
        "" if place.result is None else written(place.result, ".4g"),
        "" if control is None or control.ratio is None else written(control.ratio, ".3f"),
        " to ".join(written(end, ".3f") for end in ends),
        control.word if control else "no control",
        place.settings,
        "bracketed" if place.interior else "at the edge of what was tried",
        written(place.seconds, ".0f"),
        written(place.seconds_of_control, ".0f"),
    ]


def _best(stored: Sequence[Against], labels: Mapping[str, str]) -> Html | str:
    """Return the stored arm that is farthest ahead of this one, or that none is."""
    best: Any = min((a for a in stored if a.ratio is not None), key=lambda against: against.ratio or 0.0, default=None)
    if best is None:
        return ""
    return "this one" if best.ratio >= 1 else f"{labels[best.other]}, by {written(100 * (1 / best.ratio - 1), '.1f')} %"
