"""The demo: momentum restarts over a grid of outer learning rates and momenta, with the controls that keep it honest.

The question is whether restarting the outer momentum enlarges the region of hyperparameters that works. The main grid
answers it: heavy ball and Nesterov, 5 momenta, 3 learning rates, without restarts and with one every 3 rounds.

A restart empties the buffer, and a buffer that is emptied pushes less: in sum form, momentum 0.9 moves the anchor by 10
times the learning rate a round in the long run, but by 1.87 times when it restarts every 3 rounds. So the main grid
alone cannot tell a better use of momentum from a smaller step. Two controls can:

* `momentum-free`: outer SGD without momentum, at several learning rates (at 1 it is plain averaging of the replicas).
  Whatever momentum is worth, with or without restarts, it must be worth more than this.
* `..., never, gain of K=3`: for every restarted cell one with the same rule and momentum and no restart, whose learning
  rate is lowered until its mean outer gain over the run (`twophase.restart.mean_outer_gain`) equals that of the
  restarted cell. What remains between the two is what restarts do beyond taking a smaller step.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from twophase.base.config import with_values
from twophase.figures.heatmaps import Panel, heatmaps, scale_of
from twophase.recipes.controls import AVERAGING_LR, MOMENTUM_FREE, gain_matched_all, momentum_free, with_averaging
from twophase.rule import FORM_WORDS
from twophase.sweep.arms import arms_summary, pairs, pairs_summary
from twophase.sweep.grid import Axis, Cell, Sweep, product
from twophase.sweep.table import Row, Setting, State, best_of, format_table, readable, settings
from twophase.training.config import TrainConfig

PERIOD = 3
WITHIN = 0.25
"""A setting works when its perplexity is at most this much above the best of all, relatively."""
MARGIN = 0.05
"""A control is clearly better or worse when its perplexity differs by more than this, relatively."""
CLAIM_MOMENTUM, CLAIM_RATIO = 0.9, 1.2
"""The claim that the verdict checks: at this momentum, heavy ball without restarts is worse by at least this factor."""
_RULES = {"heavy ball": False, "Nesterov": True}
_LR, _MOMENTUM, _NESTEROV, _RESTART, _SEED = "outer.lr", "outer.momentum", "outer.nesterov", "outer.restart", "seed"
_LRS, _MOMENTA = (0.3, 0.7, 1.1), (0.1, 0.3, 0.5, 0.7, 0.9)
_QUICK_LRS, _QUICK_MOMENTA = (0.3, 1.1), (0.1, 0.5, 0.9)
_MATCHED_FROM, _QUICK_MATCHED_FROM = 0.5, 0.9
"""Gain-matched controls begin at this momentum: below 0.5 a restart changes the mean gain by less than a sixth."""
_QUICK = {"steps": 480, "inner.lr": 4e-3}
"""Half the steps at twice the inner learning rate: half the price, the same picture, its optimum at less momentum."""


def demo(
    quick: bool = False,
    seeds: Sequence[int] = (0,),
    controls: bool = True,
    base: TrainConfig | None = None,
) -> Sweep:
    """The demo's runs: 60 a seed for the main grid, 22 a seed for the controls.

    Args:
        quick: a smaller grid of shorter runs: 24 a seed, and 8 for the controls, each at half the price.
        seeds: each seed repeats every run; tables and figures then show means over the seeds.
        controls: add the momentum-free and the gain-matched runs.
        base: what all runs share (`TrainConfig()` when None); its outer learning rate, momentum, kind, restart and its
            seed are replaced, and with `quick` its steps and inner learning rate too.

    Returns:
        The sweep; its arms are named `heavy ball, never`, `heavy ball, K=3`, `Nesterov, never`, `Nesterov, K=3`,
        `momentum-free`, and the two restart-free ones with `, gain of K=3` behind.
    """
    base = base or TrainConfig()
    lrs, momenta = (_QUICK_LRS, _QUICK_MOMENTA) if quick else (_LRS, _MOMENTA)
    if quick:
        base = with_values(base, _QUICK)
    seed_axis = Axis(_SEED, tuple(seeds))
    cells: list[Cell] = []
    for kind, nesterov in _RULES.items():
        for restart in ("never", str(PERIOD)):
            axes = [seed_axis, Axis(_MOMENTUM, momenta), Axis(_LR, lrs)]
            cells += product(base, axes, _arm(kind, restart), {_NESTEROV: nesterov, _RESTART: restart})
    if controls:
        restarted = [cell for cell in cells if cell.values[_RESTART] != "never"]
        least = _QUICK_MATCHED_FROM if quick else _MATCHED_FROM
        cells += momentum_free(base, [seed_axis], with_averaging(_LRS))
        for kind, nesterov in _RULES.items():
            matched = [c for c in restarted if c.values[_NESTEROV] == nesterov and c.values[_MOMENTUM] >= least]
            cells += gain_matched_all(matched, _matched_arm(kind))
    return Sweep("demo-quick" if quick else "demo", base, cells)


def draw(rows: Sequence[Row], sweep: Sweep, folder: Path) -> list[Path]:
    """Draw `demo` (the main grid) and, if the sweep has controls, `controls` as `.png`, `.pdf` and `.csv`.

    Both are 2 x 2 heatmaps, heavy ball above Nesterov, on one colour scale; the left column of `controls` holds the
    gain-matched runs in the place of the restarted cells that they control. With several seeds they show means.

    Args:
        rows: of the sweep's `cells.csv`.
        sweep: the sweep that `demo` returned.
        folder: where the figures go, the sweep's `figures`.

    Returns:
        The paths written.
    """
    found = _by_place(rows)
    scale = scale_of([setting.perplexity for setting in settings(rows) if setting.perplexity is not None], WITHIN)
    form, seeds = _form(sweep), _seeds(sweep)
    run = f"{sweep.base.replicas} replicas, {sweep.base.inner_steps} inner steps a round, {sweep.base.rounds} rounds"
    many = f", mean over {len(seeds)} seeds" if len(seeds) > 1 else ""
    outlined = f"Outlined: within {WITHIN:.0%} of the best of all runs ({readable(best_of(rows)) or 'none yet'})."
    labels: dict[str, Any] = {
        "x_label": "outer learning rate",
        "y_label": "outer momentum",
        "colour_label": "validation perplexity a token",
        "scale": scale,
    }
    never, restarted = "no restart", f"restart every {PERIOD} rounds"
    main = [
        [
            _panel(f"{_capital(kind)}, {never}", found[_arm(kind, "never")]),
            _panel(f"{_capital(kind)}, {restarted}", found[_arm(kind, str(PERIOD))]),
        ]
        for kind in _RULES
    ]
    title = f"Outer momentum with and without restarts ({form}{many})"
    notes = [f"{_capital(run)}. {outlined}", _momentum_free(rows)]
    paths = heatmaps(main, title=title, note=_lines(notes), path_stem=folder / "demo", **labels)
    if all(_matched_arm(kind) in found for kind in _RULES):
        beside = [
            [
                _panel(f"{_capital(kind)}, {never}, mean gain of K={PERIOD}", found[_matched_arm(kind)]),
                _panel(f"{_capital(kind)}, {restarted}", found[_arm(kind, str(PERIOD))], found[_matched_arm(kind)]),
            ]
            for kind in _RULES
        ]
        title = f"The same mean outer gain without and with restarts ({form}{many})"
        notes = ["Left: learning rate lowered until the mean outer gain is that of the cell to the right.", outlined]
        paths += heatmaps(beside, title=title, note=_lines(notes), path_stem=folder / "controls", **labels)
    return paths


def verdict(rows: Sequence[Row], sweep: Sweep) -> str:
    """What the demo showed, in words and numbers: the arms, the controls, and the claim on heavy ball at momentum 0.9.

    Args:
        rows: of the sweep's `cells.csv`.
        sweep: the sweep that `demo` returned.

    Returns:
        Several lines of plain text, computed from the rows; nothing is known in advance.
    """
    seeds, best = _seeds(sweep), best_of(rows)
    what = f"mean over seeds {', '.join(map(str, seeds))}" if len(seeds) > 1 else f"seed {seeds[0]}"
    header = [
        "arm",
        "cells",
        "best",
        "at",
        "geo. mean",
        "worst",
        f"within {WITHIN:.0%}",
        "share",
        "diverged",
        "missing",
    ]
    table = [
        [
            arm.arm,
            arm.settings,
            readable(arm.best.perplexity) if arm.best else "",
            _place(arm.best) if arm.best else "",
            readable(arm.geometric_mean),
            readable(arm.worst),
            arm.within,
            f"{arm.share:.0%}",
            arm.diverged,
            arm.missing,
        ]
        for arm in arms_summary(rows, WITHIN)
    ]
    near = "not known yet" if best is None else f"at most {readable(best * (1 + WITHIN))}"
    parts = [
        f"Validation perplexity a token, {_form(sweep)}, {what}; within {WITHIN:.0%} of the best of all: {near}.",
        format_table(header, table),
        _spread_words(rows),
        _control_words(rows),
        _claim_words(rows, seeds),
    ]
    return "\n\n".join(part for part in parts if part)


def _arm(kind: str, restart: str) -> str:
    return f"{kind}, never" if restart == "never" else f"{kind}, K={restart}"


def _matched_arm(kind: str) -> str:
    return f"{kind}, never, gain of K={PERIOD}"


Places = dict[tuple[float, float], Setting]
"""From (momentum, learning rate) of the main grid to what was found there."""


def _by_place(rows: Sequence[Row]) -> dict[str, Places]:
    """Each arm's settings by their place in the main grid; a control takes the place of what it controls."""
    by_run = {row.run: row for row in rows}
    found: dict[str, Places] = {}
    for setting in settings(rows):
        row = by_run[setting.runs[0]]
        place = by_run[row.control_of] if row.control_of else row
        found.setdefault(setting.arm, {})[place.values[_MOMENTUM], place.values[_LR]] = setting
    return found


def _panel(title: str, found: Places, where: Places | None = None) -> Panel:
    """One arm as a heatmap, at the places where it, or another arm, has runs."""
    places = found if where is None else where
    momenta, lrs = (sorted({place[axis] for place in places}) for axis in (0, 1))
    grid = [[found.get((momentum, lr)) for lr in lrs] for momentum in momenta]
    values = [[setting.perplexity if setting else None for setting in line] for line in grid]
    states: list[list[State]] = [[setting.state if setting else "missing" for setting in line] for line in grid]
    return Panel(title, lrs, momenta, values, states)


def _momentum_free(rows: Sequence[Row]) -> str:
    """One sentence on the momentum-free control, empty when the sweep has none."""
    known = [setting for setting in settings(rows) if setting.arm == MOMENTUM_FREE]
    finished = {setting.values[_LR]: setting.perplexity for setting in known if setting.perplexity is not None}
    if not finished:
        return "Momentum-free control: nothing finished yet." if known else ""
    lr = min(finished, key=lambda lr: finished[lr])
    averaging = readable(finished[AVERAGING_LR]) if AVERAGING_LR in finished else "missing"
    return (
        f"Momentum-free control: best {readable(finished[lr])} (lr {lr:g}); "
        f"plain averaging (lr {AVERAGING_LR:g}) {averaging}."
    )


def _spread_words(rows: Sequence[Row]) -> str:
    """How much the seed alone changes a setting that works: differences below this mean nothing. Empty for one seed."""
    best, found = best_of(rows), {row.run: row.perplexity for row in rows}
    if best is None:
        return ""
    near = [s for s in settings(rows) if s.perplexity is not None and s.perplexity <= best * (1 + WITHIN)]
    seeds = [[p for run in setting.runs if (p := found[run]) is not None] for setting in near]
    spreads = sorted(max(several) - min(several) for several in seeds if len(several) > 1)
    if not spreads:
        return ""
    middle = statistics.median(spreads)
    return (
        f"Seeds: largest minus smallest perplexity of a setting within {WITHIN:.0%} of the best: "
        f"{spreads[0]:.2f} to {spreads[-1]:.2f}, median {middle:.2f}."
    )


def _control_words(rows: Sequence[Row]) -> str:
    """The controls in words, empty when the sweep has none."""
    lines = [_momentum_free(rows)]
    summaries = pairs_summary(pairs(rows), MARGIN)
    if summaries:
        lines.append(
            f"Gain-matched control: no restart, lr lowered to the mean outer gain of K={PERIOD}. Ratio of its "
            f"perplexity to that of its K={PERIOD} cell (above 1 favours the restart; every seed is a pair):"
        )
        for one in summaries:
            mean = "no pair yet" if one.geometric_mean is None else f"geometric mean {one.geometric_mean:.3f}"
            lines.append(
                f"  {one.arm}: {mean} over {one.pairs} pairs; control better by more than {MARGIN:.0%} in "
                f"{one.better}, worse in {one.worse}; not comparable (diverged or missing): {one.unpaired}"
            )
    return _lines(lines)


def _claim_words(rows: Sequence[Row], seeds: Sequence[int]) -> str:
    """The claim on heavy ball: never / K=3 for every learning rate and seed, and whether it reaches its bound."""
    arms = (_arm("heavy ball", "never"), _arm("heavy ball", str(PERIOD)))
    at = {
        (row.arm, row.values[_SEED], row.values[_LR]): row
        for row in rows
        if row.arm in arms and row.values[_MOMENTUM] == CLAIM_MOMENTUM
    }
    lrs = sorted({lr for _, _, lr in at})
    checked = {
        (seed, lr): _claim(at.get((arms[0], seed, lr)), at.get((arms[1], seed, lr))) for seed in seeds for lr in lrs
    }
    holds = [held for _, held in checked.values()]
    answer = "not known yet" if None in holds and False not in holds else "yes" if all(holds) else "no"
    table = [[str(seed), *(checked[seed, lr][0] for lr in lrs)] for seed in seeds]
    return (
        f"Heavy ball at momentum {CLAIM_MOMENTUM:g}: perplexity without restarts / with K={PERIOD}\n"
        + format_table(["seed", *(f"lr {lr:g}" for lr in lrs)], table)
        + f"\nAt least {CLAIM_RATIO:g} at every learning rate and seed: {answer}."
    )


def _claim(never: Row | None, restarted: Row | None) -> tuple[str, bool | None]:
    """The ratio in words, and whether the claim holds there (None: not known yet)."""
    if never is None or restarted is None or {never.state, restarted.state} & {"missing", "failed"}:
        return "missing", None
    if restarted.state == "diverged":
        return f"K={PERIOD} div.", False
    if never.state == "diverged":
        return "never div.", True  # the run that could not be finished is worse than any ratio
    assert never.perplexity is not None
    assert restarted.perplexity is not None
    ratio = never.perplexity / restarted.perplexity
    return f"{ratio:.3f}", ratio >= CLAIM_RATIO


def _place(setting: Setting) -> str:
    values = setting.values
    return f"momentum {values[_MOMENTUM]:g}, lr {values[_LR]:g}"


def _form(sweep: Sweep) -> str:
    return FORM_WORDS[sweep.base.outer.form]


def _seeds(sweep: Sweep) -> list[int]:
    return list(dict.fromkeys(cell.config.seed for cell in sweep.cells))


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def _lines(sentences: Sequence[str]) -> str:
    return "\n".join(sentence for sentence in sentences if sentence)
