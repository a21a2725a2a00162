"""The demo's figures, and what its runs say in words and numbers."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from twophase.figures.heatmaps import Panel, heatmaps, scale_of, tile
from twophase.judge.cells import CONTROL, MISSING, fate, outcome
from twophase.judge.verdict import verdict as judge
from twophase.recipes.controls import AVERAGING_LR, LR, MOMENTUM, MOMENTUM_FREE
from twophase.recipes.demo import arm_name, matched_arm
from twophase.recipes.paper import PERIOD, RULES
from twophase.rule import FORM_WORDS
from twophase.studies._lm import MARGIN, WITHIN
from twophase.sweep.grid import Sweep
from twophase.sweep.table import SEED, Row, Setting, format_table, geometric_mean, readable, result, settings

CLAIM_MOMENTUM, CLAIM_RATIO = 0.9, 1.2
"""The claim that the verdict checks: at this momentum, heavy ball without restarts is worse by at least this factor."""


def draw(rows: Sequence[Row], sweep: Sweep, folder: Path) -> list[Path]:
    """Draw `demo` (the main grid) and, if the sweep has controls, `controls` as `.png`, `.pdf` and `.csv`.

    Both are 2 x 2 heatmaps, heavy ball above Nesterov, on one colour scale; the left column of `controls` holds the
    gain-matched runs in the place of the restarted cells that they control. With several seeds they show means. The
    folder is the sweep's `figures`; returned are the paths written.
    """
    cells, by_run = settings(rows), {row.run: row for row in rows}
    by_arm: dict[str, dict[tuple[float, float], Setting]] = {}
    for cell in cells:
        # A control takes the place of what it controls.
        row = by_run[cell.runs[0]]
        values = by_run[row.control_of or row.run].values
        by_arm.setdefault(cell.arm, {})[values[MOMENTUM], values[LR]] = cell
    finished = [cell.perplexity for cell in cells if cell.perplexity is not None]
    seeds, base = _seeds(sweep), sweep.base
    form = FORM_WORDS[base.outer.form] + (f", mean over {len(seeds)} seeds" if len(seeds) > 1 else "")
    best = readable(min(finished, default=None)) or "none yet"
    outlined = f"Outlined: within {WITHIN:.0%} of the best of all runs ({best})."
    run = f"{base.replicas} replicas, {base.inner_steps} inner steps a round, {base.rounds} rounds. {outlined}"

    def panel(kind: str, words: str, arm: str, where: str) -> Panel:
        """Make an arm a heatmap at the places where it, or another arm, has runs."""
        momenta, lrs = (sorted({place[axis] for place in by_arm[where]}) for axis in (0, 1))
        grid = [[by_arm[arm].get((momentum, lr)) for lr in lrs] for momentum in momenta]
        return Panel(f"{kind[0].upper()}{kind[1:]}, {words}", lrs, momenta, [list(map(tile, row)) for row in grid])

    paths = []
    for name, arm_of, words, title, note in (
        (
            "demo",
            {kind: arm_name(kind, "never") for kind in RULES},
            "no restart",
            f"Outer momentum with and without restarts ({form})",
            _lines([run, _momentum_free(rows)]),
        ),
        (
            "controls",
            {kind: matched_arm(kind) for kind in RULES},
            f"no restart, mean gain of K={PERIOD}",
            f"The same mean outer gain without and with restarts ({form})",
            f"Left: learning rate lowered until the mean outer gain is that of the cell to the right.\n{outlined}",
        ),
    ):
        if by_arm.keys() >= set(arm_of.values()):
            every = f"restart every {PERIOD} rounds"
            paths += heatmaps(
                [
                    [panel(kind, words, arm, arm), panel(kind, every, arm_name(kind, str(PERIOD)), arm)]
                    for kind, arm in arm_of.items()
                ],
                title=title,
                note=note,
                path_stem=folder / name,
                x_label="outer learning rate",
                y_label="outer momentum",
                colour_label="validation perplexity a token",
                scale=scale_of(finished, WITHIN),
            )
    return paths


def verdict(rows: Sequence[Row], sweep: Sweep) -> str:
    """Say in plain text what the demo showed: the arms, the controls, and the claim on heavy ball at momentum 0.9."""
    seeds, judged = _seeds(sweep), judge(rows, (WITHIN,))
    what = f"mean over seeds {', '.join(map(str, seeds))}" if len(seeds) > 1 else f"seed {seeds[0]}"
    header = "arm,cells,best,at,geo. mean,worst,within 25%,share,diverged,missing".split(",")
    table = []
    for arm in judged.arms:
        best, near = arm.best, arm.areas[0].near
        at = f"momentum {best.values[MOMENTUM]:g}, lr {best.values[LR]:g}" if best else ""
        bests = (arm.settings, readable(best.perplexity) if best else "", at, readable(arm.geometric_mean))
        worst = readable(arm.worst.perplexity) if arm.worst else ""
        table.append([arm.arm, *bests, worst, near, f"{near / arm.settings:.0%}", arm.diverged, arm.missing])
    bound = judged.best.perplexity * (1 + WITHIN) if judged.best and judged.best.perplexity else None
    near = "not known yet" if bound is None else f"at most {readable(bound)}"
    parts = [
        f"Validation perplexity a token, {FORM_WORDS[sweep.base.outer.form]}, {what}; "
        f"within {WITHIN:.0%} of the best of all: {near}.",
        format_table(header, table),
        _spread_words(rows, bound or 0.0),
        _control_words(rows),
        _claim_words(rows, seeds),
    ]
    return "\n\n".join(part for part in parts if part)


def _momentum_free(rows: Sequence[Row]) -> str:
    """Describe the momentum-free control in one sentence, empty when the sweep has none."""
    free = [setting for setting in settings(rows) if setting.arm == MOMENTUM_FREE]
    by_lr = {setting.values[LR]: setting.perplexity for setting in free if setting.perplexity is not None}
    if not by_lr:
        return "Momentum-free control: nothing finished yet." if free else ""
    lr = min(by_lr, key=lambda lr: by_lr[lr])
    averaging = readable(by_lr.get(AVERAGING_LR)) or "missing"
    best = f"best {readable(by_lr[lr])} (lr {lr:g})"
    return f"Momentum-free control: {best}; plain averaging (lr {AVERAGING_LR:g}) {averaging}."


def _spread_words(rows: Sequence[Row], bound: float) -> str:
    """Say how much the seed alone changes a setting that works: differences below it mean nothing. Empty for one."""
    near = [s for s in settings(rows) if s.perplexity is not None and s.perplexity <= bound]
    each = [[value for value in setting.perplexities if value is not None] for setting in near]
    spreads = sorted(max(values) - min(values) for values in each if len(values) > 1)
    if not spreads:
        return ""
    return (
        f"Seeds: largest minus smallest perplexity of a setting within {WITHIN:.0%} of the best: "
        f"{spreads[0]:.2f} to {spreads[-1]:.2f}, median {statistics.median(spreads):.2f}."
    )


def _control_words(rows: Sequence[Row]) -> str:
    """Describe the controls, empty when the sweep has none; every seed of a gain-matched one is a pair."""
    lines, by_run = [_momentum_free(rows)], {row.run: result(row) for row in rows}
    ratios: dict[str, list[float | None]] = {}
    for row in rows:
        if row.control_of in by_run:
            mine, other = result(row), by_run[row.control_of]
            ratios.setdefault(row.arm, []).append(mine / other if mine and other else None)
    if ratios:
        lines.append(
            f"Gain-matched control: no restart, lr lowered to the mean outer gain of K={PERIOD}. Ratio of its "
            f"perplexity to that of its K={PERIOD} cell (above 1 favours the restart; every seed is a pair):"
        )
    for arm, every in ratios.items():
        pairs = [ratio for ratio in every if ratio is not None]
        mean = geometric_mean(pairs)
        better, worse = sum(ratio < 1 / (1 + MARGIN) for ratio in pairs), sum(ratio > 1 + MARGIN for ratio in pairs)
        lines.append(
            f"  {arm}: {'no pair yet' if mean is None else f'geometric mean {mean:.3f}'} over {len(pairs)} pairs; "
            f"control better by more than {MARGIN:.0%} in {better}, worse in {worse}; "
            f"not comparable (diverged or missing): {len(every) - len(pairs)}"
        )
    return _lines(lines)


def _claim_words(rows: Sequence[Row], seeds: Sequence[int]) -> str:
    """Check the claim on heavy ball: never / K=3 for every learning rate and seed, and whether it reaches its bound."""
    arms = (arm_name("heavy ball", "never"), arm_name("heavy ball", str(PERIOD)))
    at = {
        (row.arm, row.values[SEED], row.values[LR]): outcome(row.state, result(row))
        for row in rows
        if row.arm in arms and row.values[MOMENTUM] == CLAIM_MOMENTUM
    }
    lrs = sorted({lr for _, _, lr in at})
    answers: list[bool | None] = []
    table: list[list[str]] = []
    for seed in seeds:
        table.append([str(seed)])
        for lr in lrs:
            never, restarted = (at.get((arm, seed, lr), float("nan")) for arm in arms)
            remark = fate(restarted, never)
            if remark == MISSING:
                words, holds = "missing", None
            elif remark:  # a run that could not be finished is worse than any ratio
                words, holds = ("never div.", True) if remark == CONTROL else (f"K={PERIOD} div.", False)
            else:
                words, holds = f"{never / restarted:.3f}", never / restarted >= CLAIM_RATIO
            table[-1].append(words)
            answers.append(holds)
    answer = "not known yet" if None in answers and False not in answers else "yes" if all(answers) else "no"
    return (
        f"Heavy ball at momentum {CLAIM_MOMENTUM:g}: perplexity without restarts / with K={PERIOD}\n"
        + format_table(["seed", *(f"lr {lr:g}" for lr in lrs)], table)
        + f"\nAt least {CLAIM_RATIO:g} at every learning rate and seed: {answer}."
    )


def _seeds(sweep: Sweep) -> list[int]:
    return list(dict.fromkeys(cell.config.seed for cell in sweep.cells))


def _lines(sentences: Sequence[str]) -> str:
    return "\n".join(sentence for sentence in sentences if sentence)
