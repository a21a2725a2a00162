"""The blocks of a run as a table in words, with what each number rests on."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence

from twophase.runs.record import WHOLE
from twophase.spectrum.blocks import PLACES, Forecast, Period, Seen, Setting
from twophase.sweep.table import format_table

_WIDTH = 100
LIMITS = (
    "Linear modes of each block by itself: blocks that act on one another, replicas with different data, curvature and "
    "second moments that change, and the delay by AdamW's first moment are outside of it.",
    "The curvature is that of the checkpoint; early, mid and late differ in the inner learning rate alone.",
    "Directions are weighted by their curvature, as if the displacement were alike in all of them.",
)
"""What a reader must know before acting."""


def describe(
    heading: Sequence[str], setting: Setting, forecasts: Sequence[Forecast], rounds: Mapping[str, Seen]
) -> str:
    """The table, then what stands out in each block.

    Args:
        heading: lines about the run.
        setting: what the run does with the curvature.
        forecasts: of the blocks, in order.
        rounds: what the run's rounds show, by name of its fragments.
    """
    head = [
        "block",
        "parameters",
        "largest",
        "precond.",
        "median",
        "99 %",
        *PLACES,
        "K",
        "K at mean",
        "rounds: sigma",
        "K",
    ]
    lines = [
        *heading,
        "",
        "largest, precond.: largest eigenvalue of the Gauss-Newton matrix, and of the preconditioned one, with its",
        "quantiles. early, mid, late: effective progress of a round, mean by loss. K: best period of all modes of the",
        "block together, with what it leaves of the loss. K at mean, and K of the rounds: first cancellation of a mode",
        "of that sigma.",
        "",
        format_table(head, [_row(found, rounds.get(found.curvature.name)) for found in forecasts]),
        "",
        *(_item(text) for found in forecasts for text in _remarks(found)),
        *(_item(text) for text in _period_remarks(forecasts, setting)),
        *(_item(text) for text in _round_remarks(forecasts, rounds, setting)),
        "limits",
        *(_item(text) for text in LIMITS),
    ]
    return "\n".join(lines)


def period_words(period: Period) -> str:
    """`never`, or the period with what it is predicted to leave of the loss: `12 (0.31x)`."""
    if period.period is None:
        return "never"
    share = math.exp(period.log_gain)
    return f"{period.period} ({share:.2f}x)" if share >= 0.005 else f"{period.period} ({share:.0e}x)"


def _row(found: Forecast, seen: Seen | None) -> list[str]:
    block = found.curvature
    told = "none recorded" if seen is None else "not shown"
    interval = None if seen is None else seen.interval
    periods = ""
    if seen is not None and interval is not None:
        told = f"{interval[0]:.2g} to {interval[2]:.2g}"
        words = ["never" if one is None else str(one) for one in seen.periods]
        periods = words[1] if len(set(words)) == 1 else ", ".join(words)
    return [
        block.name,
        f"{block.parameters:,}",
        f"{block.raw[0]:.3g}",
        f"{block.top[0]:.3g}",
        f"{block.quantile(0.5):.2g}",
        f"{block.quantile(0.99):.2g}",
        *(f"{found.progress[place].mean:.2g}" for place in PLACES),
        period_words(found.chosen),
        "never" if found.at_mean is None else str(found.at_mean),
        told,
        periods,
    ]


def _remarks(found: Forecast) -> Iterator[str]:
    name, block = found.curvature.name, found.curvature
    if not block.loss_weights.any():
        yield f"{name}: no curvature was found; the text at hand does not use these parameters."
        return
    places = [place for place in PLACES if found.progress[place].step > 1]
    if places:
        worst = max(places, key=lambda place: found.progress[place].step)
        there = found.progress[worst]
        words = (
            f"{name}: the inner step passes the minimum of the steepest mode ({worst}: lr times eigenvalue "
            f"{there.step:.3g}; {_percent(there.passing)} of the loss in such modes, which count as removed)"
        )
        if there.step > 2:
            words += f"; beyond 2, where gradient descent would diverge, {_percent(there.unstable)}"
        yield f"{words}. There the linear model is not to be trusted."


def _period_remarks(forecasts: Sequence[Forecast], setting: Setting) -> Iterator[str]:
    """Why no restart is best where a single mode would want one: the slow modes of the same block."""
    never = [one for one in forecasts if one.chosen.period is None and one.at_mean is not None]
    if not never:
        return
    low, high = min(one.spread(0.05) for one in never), max(one.spread(0.95) for one in never)
    names = ", ".join(one.curvature.name for one in never)
    yield (
        f"{names}: over {setting.rounds} rounds no restart is best although a single mode at the mean would want one. "
        f"Sigma is spread within a block (90 % of the loss lies within {low:.2g} to {high:.2g}), and what is left at "
        "the end is in the slow modes, which every restart slows down."
    )


def _round_remarks(forecasts: Sequence[Forecast], rounds: Mapping[str, Seen], setting: Setting) -> Iterator[str]:
    if setting.rule.momentum == 0:
        yield "The rule has no momentum: there is nothing to restart, and rounds show no progress along a buffer."
        return
    names = [found.curvature.name for found in forecasts]
    for name, one in rounds.items():
        if one.interval is None:
            yield f"{name}, from the rounds: sigma is not shown, because {one.whole.why_not}."
        elif name not in names:
            low, _, high = one.interval
            yield f"{name}, from the rounds: sigma {low:.2g} to {high:.2g} (95 %)."
    if not rounds:
        yield "The rounds hold no norms and cosines, so they say nothing of sigma."
    elif not any(name in rounds for name in names):
        recorded = "the whole model as one" if list(rounds) == [WHOLE] else ", ".join(rounds)
        yield (
            f"The rounds were recorded of {recorded}; for each of these blocks train with --sync.fragments "
            "NAME=PATTERN ... --sync.no-stagger."
        )


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %" if share < 0.995 else "100 %"  # which .2g would write as 1e+02


def _item(text: str) -> str:
    return textwrap.fill(text, _WIDTH, initial_indent="  - ", subsequent_indent="    ")
