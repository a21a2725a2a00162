"""The demo's figures, and what its runs say in words and numbers."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from twophase.figures.heatmaps import Panel, heatmaps, scale_of
from twophase.judge.cells import CONTROL, MISSING, cells_of, fate
from twophase.judge.verdict import Verdict
from twophase.judge.verdict import verdict as judge
from twophase.recipes.controls import AVERAGING_LR, MOMENTUM_FREE
from twophase.recipes.demo import KINDS, PERIOD, arm_name, matched_arm
from twophase.rule import FORM_WORDS
from twophase.sweep.grid import Sweep
from twophase.sweep.table import SEED, Row, Setting, State, format_table, geometric_mean, readable, settings

WITHIN = 0.25
"""A setting works when its perplexity is at most this much above the best of all, relatively."""
MARGIN = 0.05
"""A control is clearly better or worse when its perplexity differs by more than this, relatively."""
CLAIM_MOMENTUM, CLAIM_RATIO = 0.9, 1.2
"""The claim that the verdict checks: at this momentum, heavy ball without restarts is worse by at least this factor."""
_LR, _MOMENTUM = "outer.lr", "outer.momentum"


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
    by_place = _by_place(rows)
    judged = judge(rows, (WITHIN,))
    scale = scale_of([setting.perplexity for setting in settings(rows) if setting.perplexity is not None], WITHIN)
    form, seeds = _form(sweep), _seeds(sweep)
    run = f"{sweep.base.replicas} replicas, {sweep.base.inner_steps} inner steps a round, {sweep.base.rounds} rounds"
    many = f", mean over {len(seeds)} seeds" if len(seeds) > 1 else ""
    outlined = f"Outlined: within {WITHIN:.0%} of the best of all runs ({readable(_best(judged)) or 'none yet'})."
    labels: dict[str, Any] = {
        "x_label": "outer learning rate",
        "y_label": "outer momentum",
        "colour_label": "validation perplexity a token",
        "scale": scale,
    }
    never, restarted = "no restart", f"restart every {PERIOD} rounds"
    main = [
        [
            _panel(f"{_capital(kind)}, {never}", by_place[arm_name(kind, "never")]),
            _panel(f"{_capital(kind)}, {restarted}", by_place[arm_name(kind, str(PERIOD))]),
        ]
        for kind in KINDS
    ]
    title = f"Outer momentum with and without restarts ({form}{many})"
    notes = [f"{_capital(run)}. {outlined}", _momentum_free(rows)]
    paths = heatmaps(main, title=title, note=_lines(notes), path_stem=folder / "demo", **labels)
    if all(matched_arm(kind) in by_place for kind in KINDS):
        beside = [
            [
                _panel(f"{_capital(kind)}, {never}, mean gain of K={PERIOD}", by_place[matched_arm(kind)]),
                _panel(
                    f"{_capital(kind)}, {restarted}", by_place[arm_name(kind, str(PERIOD))], by_place[matched_arm(kind)]
                ),
            ]
            for kind in KINDS
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
    seeds, judged = _seeds(sweep), judge(rows, (WITHIN,))
    best = _best(judged)
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
            readable(arm.worst.perplexity) if arm.worst else "",
            arm.areas[0].near,
            f"{arm.areas[0].near / arm.settings:.0%}",
            arm.diverged,
            arm.missing,
        ]
        for arm in judged.arms
    ]
    near = "not known yet" if best is None else f"at most {readable(best * (1 + WITHIN))}"
    parts = [
        f"Validation perplexity a token, {_form(sweep)}, {what}; within {WITHIN:.0%} of the best of all: {near}.",
        format_table(header, table),
        _spread_words(rows, best),
        _control_words(rows),
        _claim_words(rows, seeds),
    ]
    return "\n\n".join(part for part in parts if part)


Places = dict[tuple[float, float], Setting]
"""From (momentum, learning rate) of the main grid to what was found there."""


def _by_place(rows: Sequence[Row]) -> dict[str, Places]:
    """Each arm's settings by their place in the main grid; a control takes the place of what it controls."""
    by_run = {row.run: row for row in rows}
    by_place: dict[str, Places] = {}
    for setting in settings(rows):
        row = by_run[setting.runs[0]]
        place = by_run[row.control_of] if row.control_of else row
        by_place.setdefault(setting.arm, {})[place.values[_MOMENTUM], place.values[_LR]] = setting
    return by_place


def _panel(title: str, by_place: Places, where: Places | None = None) -> Panel:
    """One arm as a heatmap, at the places where it, or another arm, has runs."""
    places = by_place if where is None else where
    momenta, lrs = (sorted({place[axis] for place in places}) for axis in (0, 1))
    grid = [[by_place.get((momentum, lr)) for lr in lrs] for momentum in momenta]
    values = [[setting.perplexity if setting else None for setting in line] for line in grid]
    states: list[list[State]] = [[setting.state if setting else "missing" for setting in line] for line in grid]
    return Panel(title, lrs, momenta, values, states)


def _momentum_free(rows: Sequence[Row]) -> str:
    """One sentence on the momentum-free control, empty when the sweep has none."""
    free = [setting for setting in settings(rows) if setting.arm == MOMENTUM_FREE]
    finished = {setting.values[_LR]: setting.perplexity for setting in free if setting.perplexity is not None}
    if not finished:
        return "Momentum-free control: nothing finished yet." if free else ""
    lr = min(finished, key=lambda lr: finished[lr])
    averaging = readable(finished[AVERAGING_LR]) if AVERAGING_LR in finished else "missing"
    return (
        f"Momentum-free control: best {readable(finished[lr])} (lr {lr:g}); "
        f"plain averaging (lr {AVERAGING_LR:g}) {averaging}."
    )


def _best(judged: Verdict) -> float | None:
    return judged.best.perplexity if judged.best else None


def _spread_words(rows: Sequence[Row], best: float | None) -> str:
    """Say how much the seed alone changes a setting that works: differences below it mean nothing. Empty for one."""
    near = [s for s in settings(rows) if best and s.perplexity is not None and s.perplexity <= best * (1 + WITHIN)]
    each = [[value for value in setting.perplexities if value is not None] for setting in near]
    spreads = sorted(max(values) - min(values) for values in each if len(values) > 1)
    if not spreads:
        return ""
    middle = statistics.median(spreads)
    return (
        f"Seeds: largest minus smallest perplexity of a setting within {WITHIN:.0%} of the best: "
        f"{spreads[0]:.2f} to {spreads[-1]:.2f}, median {middle:.2f}."
    )


def _control_words(rows: Sequence[Row]) -> str:
    """The controls in words, empty when the sweep has none."""
    lines, cells = [_momentum_free(rows)], cells_of(rows)
    by_run = cells.drop_duplicates("run", keep="last").set_index("run")["perplexity"].astype(float)
    controls = cells[cells["control_of"].isin(by_run.index)]
    ratios = controls["perplexity"].astype(float) / controls["control_of"].map(by_run)
    if len(ratios):
        lines.append(
            f"Gain-matched control: no restart, lr lowered to the mean outer gain of K={PERIOD}. Ratio of its "
            f"perplexity to that of its K={PERIOD} cell (above 1 favours the restart; every seed is a pair):"
        )
    for arm, every in ratios.groupby(controls["arm"], sort=False):
        pairs = every.dropna()
        mean = geometric_mean(pairs.tolist())
        better, worse = (pairs < 1 / (1 + MARGIN)).sum(), (pairs > 1 + MARGIN).sum()
        lines.append(
            f"  {arm}: {'no pair yet' if mean is None else f'geometric mean {mean:.3f}'} over {len(pairs)} pairs; "
            f"control better by more than {MARGIN:.0%} in {better}, worse in {worse}; "
            f"not comparable (diverged or missing): {len(every) - len(pairs)}"
        )
    return _lines(lines)


def _claim_words(rows: Sequence[Row], seeds: Sequence[int]) -> str:
    """The claim on heavy ball: never / K=3 for every learning rate and seed, and whether it reaches its bound."""
    arms = (arm_name("heavy ball", "never"), arm_name("heavy ball", str(PERIOD)))
    at = {
        (row.arm, row.values[SEED], row.values[_LR]): row
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
    remark = MISSING if never is None or restarted is None else fate(restarted.state, never.state)
    if remark == MISSING:
        return "missing", None
    if remark:  # a run that could not be finished is worse than any ratio
        return ("never div.", True) if remark == CONTROL else (f"K={PERIOD} div.", False)
    assert never is not None
    assert restarted is not None
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
