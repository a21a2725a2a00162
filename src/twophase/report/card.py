"""The card of an arm that went through the bench: a picture and a page, from what `twophase.judge.bench` says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from twophase.base.files import table_text
from twophase.figures.profiles import draw_profiles
from twophase.figures.style import INK, MUTED, headline, log_ticks, new_page, rendered, share_legend, styled
from twophase.judge.bench import Against, Card, PlaceCard
from twophase.report.page import Html, image, page, section, table, tag, written

_COLOURS = {"better": "#0072b2", "worse": "#d55e00"}


def contents(card: Card, labels: Mapping[str, str]) -> dict[str, str | bytes]:
    """Return a card's files by their endings: the picture, the numbers that it shows, and the page.

    Args:
        card: what is shown.
        labels: as for `picture`.
    """
    lines = [
        {"place": place.place, "word": against.word, "ratio": against.ratio, "low": against.low, "high": against.high}
        for place in card.places
        for against in [place.control or Against(card.arm, "no control")]
    ]
    png = picture(card, labels)
    return {".png": png, ".csv": table_text(lines), ".html": document(card, png)}


def picture(card: Card, labels: Mapping[str, str]) -> bytes:
    """Draw a card as PNG: on the left the arm against averaging place by place, on the right the performance profiles.

    Args:
        card: what is drawn.
        labels: names of the arms that are not grey on the right, the card's own among them.

    Raises:
        UsageError: matplotlib is not installed.
    """
    with styled():
        figure = new_page(max(2.6, 1.4 + 0.22 * len(card.places)))
        ratios, shares = figure.subplots(1, 2, width_ratios=(1, 1.1))
        ends = [1.0]
        for row, place in enumerate(reversed(card.places)):
            control = place.control
            if control is None or control.ratio is None or control.low is None or control.high is None:
                ratios.text(1.0, row, control.word if control else "no control", fontsize=6.5, va="center", color=MUTED)
                continue
            colour = _COLOURS.get(control.word, INK)
            ratios.plot([control.low, control.high], [row, row], color=colour, linewidth=1.2)
            ratios.plot([control.ratio], [row], marker="o", markersize=3.5, color=colour)
            ends += [control.low, control.high]
        ratios.axvline(1.0, color=MUTED, linewidth=0.6)
        ratios.set_xscale("log")
        low, high = min(ends) / 1.02, max(ends) * 1.02
        ratios.set_xlim(low, high)
        ticks = log_ticks(low, high)
        ratios.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        ratios.set_xticks([], minor=True)
        ratios.set_yticks(range(len(card.places)), [place.place for place in reversed(card.places)])
        ratios.set_xlabel("averaging's result over the arm's")
        if card.behind:
            draw_profiles(shares, card.behind, labels)
            share_legend(figure, [shares], columns=3)
        else:
            shares.axis("off")
        counts = card.counts()
        headline(
            figure,
            f"{card.arm}: better than averaging at {counts['better']} of {len(card.places)} places, worse at "
            f"{counts['worse']}",
            "left: right of the line the arm is better; right: the higher the nearer to the best arm",
        )
        return rendered(figure)[".png"]


def document(card: Card, png: bytes) -> str:
    """Return a card's page, complete in one file."""
    shown = image(png, card.line())
    head = [
        "place", "best setting", "result", "averaging over arm", "interval", "word", "settings", "search",
        "seconds", "of averaging",
    ]  # fmt: skip
    rows = [_row(place) for place in card.places]
    against = [
        [place.place, *(_others(place.stored, word) for word in ("better", "equivalent", "worse")), _best(place)]
        for place in card.places
        if place.stored
    ]
    problems = [f"{name}: not run here. {why}" for name, why in card.refused.items()]
    problems += dict.fromkeys(place.note for place in card.places if place.note)
    return page(
        f"Bench card: {card.arm}",
        card.line(),
        section(
            "At each place",
            shown,
            table(head, rows, caption="Against averaging, tuned with the same budget on the same seeds"),
            tag(
                "p",
                "A result is the geometric mean over the held-out seeds: perplexity, or the validation loss of a task "
                "that has none. A ratio above 1 means that the arm is better. The seconds, by the clock, are "
                "those of all runs of a side, one thread each.",
            ),
            anchor="places",
        ),
        section(
            "Against the stored arms",
            table(
                ["place", "better than", "equivalent to", "worse than", "the place's best"],
                against,
                caption="Words for each stored arm, seed by seed",
            )
            if against
            else tag("p", "There are no stored arms to compare with."),
            tag(
                "p",
                f"Intervals and words are corrected for {card.comparisons} comparisons. Not named: undecided. The "
                "stored arms were tuned with the budget of the size full.",
            ),
            anchor="stored",
        ),
        what="bench",
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
        "ended" if place.interior else "cut by its budget",
        written(place.seconds, ".0f"),
        written(place.seconds_of_control, ".0f"),
    ]


def _others(stored: Sequence[Against], word: str) -> str:
    return ", ".join(against.other for against in stored if against.word == word)


def _best(place: PlaceCard) -> Html | str:
    """Return the stored arm that is farthest ahead of this one, or that none is."""
    finite = [against for against in place.stored if against.ratio is not None]
    best: Any = min(finite, key=lambda against: against.ratio or 0.0, default=None)
    if best is None:
        return ""
    return "this one" if best.ratio >= 1 else f"{best.other}, by {written(100 * (1 / best.ratio - 1), '.1f')} %"
