"""The demo's page and figures, and what its runs say in words and numbers."""

from __future__ import annotations

import math
import shlex
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from twophase.explorer.page import State, build
from twophase.figures.heatmaps import Heatmaps, Panel, Scale, scale_of, tile
from twophase.figures.terminal import text_maps
from twophase.figures.thresholds import thresholds
from twophase.judge.cells import CONTROL, MISSING, fate, outcomes
from twophase.judge.verdict import ArmVerdict, Verdict, select
from twophase.judge.verdict import verdict as judge
from twophase.recipes.controls import AVERAGING_LR, LR, MOMENTUM, MOMENTUM_FREE
from twophase.recipes.demo import AUTO, PERIOD, RULES, arm_name, matched_arm
from twophase.report import story
from twophase.report.demo_titles import (
    WITHIN,
    control_pairs,
    curves_of,
    gain_title,
    region_title,
    threshold_title,
)
from twophase.rule import FORM_WORDS
from twophase.runs.folder import read_summary
from twophase.runs.record import read_record
from twophase.sweeps.grid import RUNS, Sweep
from twophase.sweeps.table import Row, Setting, format_table, readable, settings
from twophase.sweeps.table import arm_name as shown_name

if TYPE_CHECKING:
    from rich.text import Text

MARGIN = 0.05
"""One setting is clearly better or worse than another when their perplexities differ by more than this, relatively."""
CLAIM_MOMENTUM, CLAIM_RATIO = 0.9, 1.2
"""The claim that the verdict checks: at this momentum, heavy ball without restarts is worse by at least this factor."""

LIMITS = (
    "One small model on one text: a network of tens of thousands of weights, not of billions.",
    "One inner optimizer, learning rate and schedule. Averaging gains from a larger inner rate: docs/restarts.md.",
    "Short runs. In longer ones a restart can cost more than it gains: docs/restarts.md has some.",
    "One form of momentum, that of torch.optim.SGD. In the paper's form the same numbers mean other steps.",
    "A restart is no replacement for tuning. Compare it with a smaller momentum before you use it.",
)
"""What the demo does not show, for its page."""


def story_page(rows: Sequence[Row], sweep: Sweep, folder: Path, *, refresh: float = 0) -> str:
    """Return the demo's page, from a sweep's rows and its folder; it reloads itself after so many seconds."""
    rule = sweep.cells[0].config.outer.rule()
    state = State(rule.lr, rule.momentum, rule.nesterov, rule.form, rounds=sweep.base.rounds)
    pair = [folder / RUNS / cell.run_id for cell in sweep.cells[:2]]
    # Judging loads pandas, for which the first page, and with it the training, must not wait.
    is_judged = any(row.state != "missing" for row in rows)
    page = story.Story(
        sweep.base,
        findings(rows, sweep) if is_judged else ["No run has ended yet."],
        main_maps(rows),
        scale(rows),
        beside(rows),
        [read_record(path) for path in pair if read_summary(path, path.name) is not None],
        build(state, guided=True),
        verdict(rows, sweep) if is_judged else "",
        LIMITS,
        {
            f"twophase report {shlex.quote(str(folder))}": "every comparison, with intervals",
            "twophase explore --open": "the explorer in a browser window",
            "twophase period --help": "advice for your setting",
        },
        refresh,
    )
    return story.build(page)


def draw(rows: Sequence[Row], sweep: Sweep, folder: Path) -> list[Path]:
    """Draw `demo` (the main grid), `controls` (if the sweep has any) and `demo_thresholds`: `.png`, `.pdf` and `.csv`.

    The first two are 2 x 2 heatmaps, heavy ball above Nesterov, on one colour scale. The left column of `controls`
    holds gain-matched runs in the place of the restarted cells. With several seeds they show means. The third is the
    share of each arm's settings near the best, over how near. The folder is the sweep's `figures`; returned are the
    paths written.
    """
    cells = settings(rows)
    finished = [cell.result for cell in cells if cell.result is not None]
    seeds, base = _seeds(sweep), sweep.base
    form = FORM_WORDS[base.outer.form] + (f", mean over {len(seeds)} seeds" if len(seeds) > 1 else "")
    best = readable(min(finished, default=None)) or "none yet"
    outlined = f"Outlined: within {WITHIN:.0%} of the best of all runs ({best})."
    run = f"{base.replicas} replicas, {base.inner_steps} inner steps a round, {base.rounds} rounds. {outlined}"
    paths = []
    for name, panels, title, note in (
        (
            "demo",
            main_maps(rows),
            region_title(cells, scale(rows).bound),
            _lines([run, _momentum_free(rows)]),
        ),
        (
            "controls",
            _maps(rows, matched_arm, f"no restart, mean gain of K={PERIOD}"),
            gain_title(rows),
            f"Left: learning rate lowered until the mean outer gain is that of the cell to the right.\n{outlined}",
        ),
    ):
        if panels:
            page = Heatmaps(
                panels,
                x_label="outer learning rate",
                y_label="outer momentum",
                colour_label="validation perplexity a token",
                title=title,
                reading=form,
                note=note,
                scale=scale(rows),
            )
            paths += page.write(folder / name)
    curves = {kind: curves_of(rows, cells, kind) for kind in RULES}
    averaging = beside(rows)["plain averaging"]
    distance = averaging.result / min(finished) - 1 if averaging and averaging.result else None
    return paths + thresholds(
        curves,
        title=threshold_title(curves),
        reading=f"share of an arm's settings near the best, higher is better; {form}"
        + ("\nbands of the whole grids: the seeds, each against its own best" if len(seeds) > 1 else ""),
        path_stem=folder / "demo_thresholds",
        lines={} if distance is None else {"plain averaging": 100 * distance},
    )


def main_maps(rows: Sequence[Row]) -> list[list[Panel]]:
    """Return the heatmaps of the main grid: for each kind of rule one without restarts and one with them."""
    return _maps(rows, lambda kind: arm_name(kind, "never"), "no restart")


def _maps(rows: Sequence[Row], arm_of: Callable[[str], str], words: str) -> list[list[Panel]]:
    """Map an arm of each kind and the restarted one, at places where the arm has runs; nothing where it has none."""
    by_run = {row.run: row for row in rows}
    by_arm: dict[str, dict[tuple[float, float], Setting]] = {}
    for cell in settings(rows):
        # A control takes the place of what it controls.
        row = by_run[cell.runs[0]]
        values = by_run[row.control_of or row.run].values
        by_arm.setdefault(cell.arm, {})[values[MOMENTUM], values[LR]] = cell
    panels = []
    for kind in RULES:
        places = by_arm.get(arm_of(kind), {})
        momenta, lrs = (sorted({place[axis] for place in places}) for axis in (0, 1))
        columns = {words: places, f"restart every {PERIOD} rounds": by_arm[arm_name(kind, str(PERIOD))]}
        panels.append(
            [
                Panel(
                    f"{kind[0].upper()}{kind[1:]}, {title}",
                    lrs,
                    momenta,
                    [[tile(cells.get((momentum, lr))) for lr in lrs] for momentum in momenta],
                )
                for title, cells in columns.items()
            ]
        )
    return panels if all(panel.x for row in panels for panel in row) else []


def scale(rows: Sequence[Row]) -> Scale:
    """Return the colours of all maps of the demo: from the best of all results."""
    return scale_of([cell.result for cell in settings(rows) if cell.result is not None], WITHIN)


def terminal_maps(rows: Sequence[Row]) -> Text:
    """Return the main grid as text that fills in while the demo runs, and the references below it."""
    text = text_maps(main_maps(rows), scale(rows), x_label="lr")
    results = (f"{name} {readable(cell.result)}" for name, cell in beside(rows).items() if cell and cell.result)
    text.append(f"Perplexity; lower is better. Rows: momentum.\n{', '.join(results) or 'Nothing beside it yet'}")
    return text


def beside(rows: Sequence[Row]) -> dict[str, Setting | None]:
    """Return what the grid is to be held against: the best without momentum, plain averaging, and `auto`."""
    cells = settings(rows)
    free = [cell for cell in cells if cell.arm == MOMENTUM_FREE]
    finished = [cell for cell in free if cell.result is not None]
    return {
        "no momentum": min(finished, key=lambda cell: cell.result or 0.0, default=None),
        "plain averaging": next((cell for cell in free if cell.values[LR] == AVERAGING_LR), None),
        "`auto`": next((cell for cell in cells if cell.arm == AUTO), None),
    }


def findings(rows: Sequence[Row], sweep: Sweep) -> list[str]:
    """Say what was compared, what the restart changed, and what it did not: a short paragraph each, from any results.

    Every number is one of `twophase.judge.verdict`, which compares each restarted arm with its twin without restarts
    and with its gain-matched control.
    """
    judged = judge(rows, (WITHIN,), [arm_name(kind, "never") for kind in RULES])
    arms = {arm.arm: arm for arm in judged.arms}
    without, restarted = ([arms[arm_name(kind, each)] for kind in RULES] for each in ("never", str(PERIOD)))
    return [
        _compared(rows, sweep, judged, without),
        _changed(rows, judged, without, restarted),
        _unchanged(rows, sweep, without, restarted),
    ]


def _compared(rows: Sequence[Row], sweep: Sweep, judged: Verdict, without: Sequence[ArmVerdict]) -> str:
    """Say how many settings of what were compared, over how many seeds, and how many runs are still missing."""
    pairs, seeds = sum(arm.settings for arm in without), _seeds(sweep)
    momenta, lrs = (len({s.values[path] for s in settings(rows) if s.arm == without[0].arm}) for path in (MOMENTUM, LR))
    others = sum(arm.settings for arm in judged.arms) - 2 * pairs
    of_seeds = f"seed {seeds[0]}" if len(seeds) == 1 else f"mean over {len(seeds)} seeds"
    missing = sum(row.state in {"missing", "failed"} for row in rows)
    return " ".join(
        [
            f"Compared: {pairs} settings of the outer step ({' and '.join(RULES)}, {momenta} momenta, {lrs} learning "
            f"rates), each without a restart and with one every {PERIOD} rounds ({of_seeds}).",
            *([f"Beside them stand {others} settings as controls."] if others else []),
            *([f"So far {len(rows) - missing} of {len(rows)} runs have ended."] if missing else []),
        ]
    )


def _changed(
    rows: Sequence[Row], judged: Verdict, without: Sequence[ArmVerdict], restarted: Sequence[ArmVerdict]
) -> str:
    """Say how many settings work with restarts and without, and how the largest momentum and a smaller step fare."""
    if judged.best is None:
        return "Changed: nothing has finished yet."
    fewer, more = (sum(arm.areas[0].near for arm in arms) for arms in (without, restarted))
    pairs = sum(arm.settings for arm in without)
    word = "more" if more > fewer else "fewer" if more < fewer else "as many"
    sentences = [
        f"Changed: with restarts {word} settings work. {more} of {pairs} end within {WITHIN:.0%} of the best result of "
        f"all ({readable(judged.best.result)}); without, {fewer} of {pairs}."
    ]
    diverged = [sum(arm.diverged for arm in arms) for arms in (restarted, without)]
    if any(diverged):
        sentences.append(f"{diverged[0]} diverged with restarts, {diverged[1]} without.")
    largest = max(row.values[MOMENTUM] for row in rows)
    of_largest = judge(select(rows, {MOMENTUM: f"{largest!r}"}), (WITHIN,), [arm.arm for arm in without])
    if ratios := _ratios(of_largest, lambda kind: arm_name(kind, "never")):
        sentences.append(
            f"At momentum {largest:g} a run without restarts ends at {ratios} times the perplexity of its twin with "
            "them."
        )
    if ratios := _ratios(judged, matched_arm):
        sentences.append(f"A smaller learning rate with the same mean step, and no restart: {ratios} times.")
    return " ".join(sentences)


def _unchanged(
    rows: Sequence[Row], sweep: Sweep, without: Sequence[ArmVerdict], restarted: Sequence[ArmVerdict]
) -> str:
    """Say whether the best result improved, and what it is to be held against."""
    bests = [min((s.best.result or 0.0 for s in arms if s.best), default=None) for arms in (restarted, without)]
    numbers = {"with restarts": bests[0], "without": bests[1]}
    numbers |= {name: cell.result for name, cell in beside(rows).items() if cell is not None}
    shown = ", ".join(f"{name} {readable(value) or 'no result'}" for name, value in numbers.items())
    if bests[0] is None or bests[1] is None:
        return f"The best results: {shown}."
    ratio = bests[1] / bests[0]
    if ratio > 1 + MARGIN:
        head = "Changed, too: the best result"
    else:
        head = f"Not changed: the best result {'did not improve' if ratio <= 1 else 'hardly improved'}"
    sentences = [f"{head}: {shown}."]
    fewer, more = (sum(arm.areas[0].near for arm in arms) for arms in (without, restarted))
    if more > fewer and ratio <= 1 + MARGIN and all(row.state in {"finished", "diverged"} for row in rows):
        sentences.append("A restart made a poor momentum less harmful; a good one did not need it.")
    if len(_seeds(sweep)) == 1:
        sentences.append("One seed: a difference of a few percent may be luck.")
    return " ".join(sentences)


def _ratios(judged: Verdict, control_of: Callable[[str], str]) -> str:
    """Return for each kind a control's perplexity over the restarted arm's, over matched settings, in words."""
    ratio_by_arms = {
        (pair.arm, pair.control): difference.ratio
        for pair in judged.comparisons
        for difference in pair.differences
        if difference.measure == "cells" and difference.ratio is not None
    }
    pairs = {kind: (arm_name(kind, str(PERIOD)), control_of(kind)) for kind in RULES}
    return " and ".join(f"{ratio_by_arms[arms]:.2f} ({kind})" for kind, arms in pairs.items() if arms in ratio_by_arms)


def verdict(rows: Sequence[Row], sweep: Sweep) -> str:
    """Say in plain text what the demo showed: the arms, the controls, and the claim on heavy ball at momentum 0.9."""
    seeds, judged = _seeds(sweep), judge(rows, (WITHIN,))
    what = f"mean over seeds {', '.join(map(str, seeds))}" if len(seeds) > 1 else f"seed {seeds[0]}"
    header = "arm,cells,best,at,geo. mean,worst,within 25%,share,diverged,missing".split(",")
    table = []
    for arm in judged.arms:
        best, near = arm.best, arm.areas[0].near
        at = f"momentum {best.values[MOMENTUM]:g}, lr {best.values[LR]:g}" if best and arm.arm != AUTO else ""
        bests = (arm.settings, readable(best.result) if best else "", at, readable(arm.geometric_mean))
        worst = readable(arm.worst.result) if arm.worst else ""
        table.append(
            [shown_name(arm.arm), *bests, worst, near, f"{near / arm.settings:.0%}", arm.diverged, arm.missing]
        )
    bound = judged.best.result * (1 + WITHIN) if judged.best and judged.best.result else None
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
    best, averaging, _ = beside(rows).values()
    if averaging is None:
        return ""
    if best is None:
        return "Momentum-free control: nothing finished yet."
    return (
        f"Momentum-free control: best {readable(best.result)} (lr {best.values[LR]:g}); plain averaging (lr "
        f"{AVERAGING_LR:g}) {readable(averaging.result) or 'missing'}."
    )


def _spread_words(rows: Sequence[Row], bound: float) -> str:
    """Say how much the seed alone changes a setting that works: differences below it mean nothing. Empty for one."""
    near = [s for s in settings(rows) if s.result is not None and s.result <= bound]
    each = [[value for value in setting.results if value is not None] for setting in near]
    spreads = sorted(max(values) - min(values) for values in each if len(values) > 1)
    if not spreads:
        return ""
    return (
        f"Seeds: largest minus smallest perplexity of a setting within {WITHIN:.0%} of the best: "
        f"{spreads[0]:.2f} to {spreads[-1]:.2f}, median {statistics.median(spreads):.2f}."
    )


def _control_words(rows: Sequence[Row]) -> str:
    """Describe the controls, empty when the sweep has none; every seed of a gain-matched one is a pair."""
    lines, by_arm = [_momentum_free(rows)], control_pairs(rows)
    if by_arm:
        lines.append(
            f"Gain-matched control: no restart, lr lowered to the mean outer gain of K={PERIOD}. Ratio of its "
            f"perplexity to that of its K={PERIOD} cell (above 1 favours the restart; every seed is a pair):"
        )
    for arm, pairs in by_arm.items():
        better, worse = (sum(sign * gap > math.log(1 + MARGIN) for gap in pairs.finite) for sign in (-1, 1))
        lines.append(
            f"  {shown_name(arm)}: {'no pair yet' if pairs.ratio is None else f'geometric mean {pairs.ratio:.3f}'} "
            f"over {len(pairs.finite)} pairs; control better by more than {MARGIN:.0%} in {better}, worse in {worse}; "
            f"not comparable (diverged or missing): {len(pairs.by_seed) - len(pairs.finite)}"
        )
    return _lines(lines)


def _claim_words(rows: Sequence[Row], seeds: Sequence[int]) -> str:
    """Check the claim on heavy ball: never / K=3 for every learning rate and seed, and whether it reaches its bound."""
    cells = [cell for cell in settings(rows) if cell.values[MOMENTUM] == CLAIM_MOMENTUM]
    arms = (arm_name("heavy ball", restart) for restart in ("never", str(PERIOD)))
    tables = [outcomes((cell for cell in cells if cell.arm == arm), MOMENTUM, LR) for arm in arms]
    places = sorted({place for table in tables for place in table.index})
    sides = [table.reindex(places, columns=list(seeds)) for table in tables]
    answers: list[bool | None] = []
    table: list[list[str]] = []
    for seed in seeds:
        table.append([str(seed)])
        for never, restarted in zip(*(side[seed] for side in sides), strict=True):
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
        + format_table(["seed", *(f"lr {lr:g}" for _, lr in places)], table)
        + f"\nAt least {CLAIM_RATIO:g} at every learning rate and seed: {answer}."
    )


def _seeds(sweep: Sweep) -> list[int]:
    return list(dict.fromkeys(cell.config.seed for cell in sweep.cells))


def _lines(sentences: Sequence[str]) -> str:
    return "\n".join(sentence for sentence in sentences if sentence)
