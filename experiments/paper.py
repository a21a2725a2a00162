"""The paper's language-model experiments as sweeps, at its own scale and at a laptop's, with controls that it lacks.

* `robustness_heatmaps`: learning rate x momentum, without restarts and with K = 3, for two communication periods (paper
  figure 3 and its twin).
* `retuning`: rule tuned once at the short period; then momentum against restart period, over communication periods
  (paper figure 4). The results of its first stage decide the runs of the second.
* `soft_restart`: what a restart keeps of the buffer and adds to it (the appendix's soft restart sweeps).

The paper writes its rules in EMA form, and its pictures look like the sum form. At one learning rate and momentum the
two are different rules. So every sweep has both, and every arm but the momentum-free one names its form. The controls
are those of `twophase.recipes.controls`: momentum-free outer SGD, plain averaging, and runs without restarts at the
mean outer gain of the restarted ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product as product_of
from typing import Any

from twophase.recipes.controls import (
    FORM,
    LR,
    METHOD,
    MOMENTUM,
    RESTART,
    gain_matched_all,
    momentum_free,
    with_averaging,
)
from twophase.recipes.pretraining import paper_150m
from twophase.restart import Periodic, RestartPolicy, Soft
from twophase.rule import Form
from twophase.runs.config import InnerConfig
from twophase.sweeps.grid import Axis, Cell, Sweep, product
from twophase.sweeps.table import SEED, Row, settings
from twophase.tasks.lm.config import DataConfig, ModelConfig, TrainConfig

LRS = (0.1, 0.3, 0.5, 0.7, 0.9, 1.1)
"""Outer learning rates nu of the paper's table 1."""
MOMENTA = (0.1, 0.3, 0.5, 0.7, 0.9)
"""Outer momenta beta of the paper's table 1."""
PERIODS = (2, 3, 5, 7, 9, 11)
"""Restart periods K of the paper's table 1, in rounds."""
INNER_STEPS = (64, 128, 512, 1024, 2048)
"""Communication periods S of the paper's table 1, in inner steps."""
RULES = {"heavy ball": "heavy-ball", "Nesterov": "nesterov"}
"""The paper's two outer rules, and the method of each."""
BOTH_FORMS: tuple[Form, ...] = ("sum", "ema")
PERIOD = 3
"""The restart period of the paper's heatmaps."""
SOFT_RULE = ("Nesterov", 0.9, 0.7)
"""Rule, learning rate and momentum of the paper's soft restart sweeps."""
SOFT_PERIOD_SHORT, SOFT_PERIOD_LONG = 5, 3
"""Their restart periods at the short and at the long communication period."""


@dataclass(frozen=True)
class Scale:
    """Size of the experiments.

    Args:
        name: name of the scale; part of the sweeps' names.
        base: values that all runs share, with the short communication period.
        lrs: outer learning rates of the grids.
        momenta: outer momenta of the grids.
        periods: restart periods of the sweeps over K, in rounds.
        short: the short communication period, in inner steps: the paper's 128, at which it tunes.
        long: the long one: the paper's 512.
        retuning: communication periods of `retuning`, the short one among them.
        retain: shares of the buffer that a soft restart keeps (the paper's alpha).
        inject: weights with which it adds the pseudo-gradient (the paper's beta of the soft restart).
        matched_from: cells of the heatmaps get a gain-matched control from this momentum on.
        own_matched: periods with a gain-matched control in `retuning`'s second sweep over K, at the tuning with K = 3.
            In the first sweep every period that fires has one.
        seeds: every run is repeated for each.
    """

    name: str
    base: TrainConfig
    lrs: tuple[float, ...]
    momenta: tuple[float, ...]
    periods: tuple[int, ...]
    short: int
    long: int
    retuning: tuple[int, ...]
    retain: tuple[float, ...]
    inject: tuple[float, ...]
    matched_from: float
    own_matched: tuple[int, ...]
    seeds: tuple[int, ...]

    def rounds(self, inner_steps: int) -> int:
        """Return the rounds of a run with this communication period."""
        return -(-self.base.steps // inner_steps)


# The paper gives neither its seeds nor the grid of its soft restarts; one seed and steps of 0.2 are our choice. In a
# sweep only the end of a run is judged.
PAPER = Scale(
    name="paper",
    base=replace(paper_150m(inner_steps=128), evaluate_every=0, log_every=0),
    lrs=LRS,
    momenta=MOMENTA,
    periods=PERIODS,
    short=128,
    long=512,
    retuning=INNER_STEPS,
    retain=(0.0, 0.2, 0.4, 0.6, 0.8),
    inject=(0.0, 0.2, 0.4, 0.6, 0.8, 1.0),
    matched_from=0.1,
    own_matched=PERIODS,
    seeds=(0,),
)
# The demo's model and text. 480 inner steps make 96, 48, 24, 12 and 6 rounds; the paper's communication periods make
# 196, 98, 25, 13 and 7. Only its shortest period has other numbers of restarts in a run.
LAPTOP = Scale(
    name="laptop",
    base=TrainConfig(inner=InnerConfig(lr=4e-3, schedule="cosine"), steps=480, inner_steps=5),
    lrs=(0.3, 0.7, 1.1),
    momenta=MOMENTA,
    periods=PERIODS,
    short=5,
    long=20,
    retuning=(5, 10, 20, 40, 80),
    retain=(0.0, 0.25, 0.5, 0.75),
    inject=(0.0, 0.25, 0.5, 1.0),
    matched_from=0.5,
    own_matched=(PERIOD,),
    seeds=(0, 1, 2),
)
# Small enough for a test of the machinery; too small to show anything about restarts.
QUICK = Scale(
    name="quick",
    base=TrainConfig(
        model=ModelConfig(layers=1, hidden_size=16, intermediate_size=44, heads=2),
        data=DataConfig(sequence_length=32, batch_size=4, validation_windows=64),
        inner=InnerConfig(lr=4e-3, schedule="cosine"),
        steps=24,
        inner_steps=4,
    ),
    lrs=(0.3, 1.1),
    momenta=(0.9,),
    periods=(2, 3),
    short=4,
    long=8,
    retuning=(4, 12),
    retain=(0.0, 0.5),
    inject=(0.0,),
    matched_from=0.5,
    own_matched=(3,),
    seeds=(0,),
)


def arm_name(form: str, kind: str, treatment: str) -> str:
    """Name of an arm: its form, its rule, and what its runs do.

    >>> arm_name("sum", "heavy ball", "K=3")
    'sum, heavy ball, K=3'
    """
    return f"{form}, {kind}, {treatment}"


def control_name(arm: str) -> str:
    """Name of the arm of the gain-matched controls of an arm of restarted runs.

    >>> control_name("sum, heavy ball, K=3"), control_name("sum, heavy ball, K sweep")
    ('sum, heavy ball, never, gain of K=3', 'sum, heavy ball, never, gain of K sweep')
    """
    form, kind, treatment = arm.split(", ", 2)
    return arm_name(form, kind, f"never, gain of {treatment}")


def robustness_heatmaps(scale: Scale) -> Sweep:
    """Plan learning rate x momentum, without restarts and with K = 3, for two communication periods, rules and forms.

    Args:
        scale: the size of everything.

    Returns:
        The sweep. Arms, for each form and rule: `sum, heavy ball, never`, `sum, heavy ball, K=3`, and from momentum
        `scale.matched_from` on the latter's controls `sum, heavy ball, never, gain of K=3`; and `momentum-free`.

    Source: paper section 4, figure 3 (S = 512) and the last figure of the appendix (S = 128).
    """
    cells: list[Cell] = []
    for inner_steps in (scale.short, scale.long):
        for rule in product_of(BOTH_FORMS, RULES):
            cells += _grid(scale, inner_steps, rule, "never")
            restarted = _grid(scale, inner_steps, rule, str(PERIOD))
            cells += restarted + _matched(cell for cell in restarted if cell.values[MOMENTUM] >= scale.matched_from)
        cells += _free(scale, inner_steps)
    return Sweep(f"robustness-heatmaps-{scale.name}", scale.base, cells)


def soft_restart(scale: Scale) -> Sweep:
    """Plan the share retained of the buffer x the weight added to it, for two communication periods and forms.

    The rule is Nesterov with learning rate 0.9 and momentum 0.7, as in the paper. K is 5 at the short communication
    period and 3 at the long one. Coefficients act on the buffer of the rule's own form, so an equal injection is
    relatively weaker in the sum form. Keeping and adding nothing is the hard restart, and is written as one.

    Args:
        scale: the size of everything.

    Returns:
        The sweep. Arms, for each form: `sum, Nesterov, soft K=5` (short) or `soft K=3` (long), its controls `sum,
        Nesterov, never, gain of soft K=5`, and `sum, Nesterov, never`; and `momentum-free`.

    Source: paper appendix, figure of the soft restart sweeps.
    """
    kind, lr, momentum = SOFT_RULE
    cells: list[Cell] = []
    for inner_steps, period in ((scale.short, SOFT_PERIOD_SHORT), (scale.long, SOFT_PERIOD_LONG)):
        policies = tuple(str(soft_policy(period, *pair)) for pair in product_of(scale.retain, scale.inject))
        for form in BOTH_FORMS:
            fixed = {MOMENTUM: momentum, LR: lr}
            cells += _runs(scale, inner_steps, (form, kind), "never", fixed, Axis(RESTART, ("never",)))
            restarted = _runs(scale, inner_steps, (form, kind), f"soft K={period}", fixed, Axis(RESTART, policies))
            cells += restarted + _matched(restarted)
        cells += _free(scale, inner_steps)
    return Sweep(f"soft-restart-{scale.name}", scale.base, cells)


def soft_policy(period: int, retain: float, inject: float) -> RestartPolicy:
    """Return the soft restart as a policy; retaining and adding nothing is the hard one, of the same trajectory."""
    return Soft(period, retain, inject) if retain or inject else Periodic(period)


def retuning(scale: Scale, rows: Sequence[Row] = ()) -> Sweep:
    """Plan tuning at the short communication period, then momentum against restart period at all periods.

    Stage 1 is, at the short communication period, the grid of learning rate and momentum without restarts and with
    K = 3: the cells of `robustness_heatmaps`. When all its runs have ended, `tuned` names the best, and stage 2 follows
    for every communication period, form and rule:

    * `beta sweep`: no restart, learning rate nu* (the best without restarts), every momentum;
    * `K sweep`: the best (nu*, beta*) without restarts, every period; `K sweep, own tuning`: the best with K = 3;
    * the gain-matched controls of the periods, and the momentum-free arm.

    Args:
        scale: the size of everything.
        rows: results so far, of this sweep or of `robustness_heatmaps`.

    Returns:
        The sweep; with stage 2 it begins with the cells of stage 1, so it extends a folder of that. Where no setting of
        an arm has finished for all seeds there is nothing to carry on, and its sweeps are left out.

    Source: paper section 4, figure 4, and the curves of the appendix.
    """
    first, best = _first_stage(scale), tuned(scale, rows)
    further = [] if best is None else _second_stage(scale, best)
    return Sweep(f"retuning-{scale.name}", scale.base, first + further)


def tuned(scale: Scale, rows: Iterable[Row]) -> dict[tuple[str, str, str], tuple[float, float]] | None:
    """Return the best learning rate and momentum of each arm of the first stage of `retuning`.

    Best is the lowest perplexity, mean over the seeds, of the settings that finished for every seed. Ties go to the
    smaller momentum, then to the smaller learning rate.

    Args:
        scale: the size of everything.
        rows: rows of any sweep that has these runs.

    Returns:
        From (form, rule, restart) to (learning rate, momentum); an arm of which nothing has finished for all seeds is
        left out. None as long as a run has not ended.
    """
    by_run = {row.run: row for row in rows}
    cells = _first_stage(scale)
    if any(cell.run_id not in by_run or by_run[cell.run_id].state in {"missing", "failed"} for cell in cells):
        return None
    # Taken by its run, not by its arm: the table may be that of another sweep with these runs.
    first_rows = [replace(by_run[cell.run_id], arm=cell.arm, values=cell.values) for cell in cells]
    kinds = {method: kind for kind, method in RULES.items()}
    best: dict[tuple[str, str, str], tuple[float, float, float]] = {}
    for setting in settings(first_rows):
        if setting.result is not None:
            values = setting.values
            key = (values[FORM], kinds[values[METHOD]], values[RESTART])
            candidate = (setting.result, values[MOMENTUM], values[LR])
            best[key] = min(candidate, best.get(key, candidate))
    return {key: (lr, momentum) for key, (_, momentum, lr) in best.items()}


BETA_SWEEP, K_SWEEP, OWN_K_SWEEP = "beta sweep", "K sweep", "K sweep, own tuning"
"""What the arms of the second stage of `retuning` do."""


def _first_stage(scale: Scale) -> list[Cell]:
    arms = product_of(product_of(BOTH_FORMS, RULES), ("never", str(PERIOD)))
    return [cell for rule, restart in arms for cell in _grid(scale, scale.short, rule, restart)]


def _second_stage(scale: Scale, best: Mapping[tuple[str, str, str], tuple[float, float]]) -> list[Cell]:
    cells: list[Cell] = []
    periods = tuple(map(str, scale.periods))
    own_tuning = (OWN_K_SWEEP, str(PERIOD), tuple(map(str, scale.own_matched)))
    for inner_steps in scale.retuning:
        for rule in product_of(BOTH_FORMS, RULES):
            if (*rule, "never") in best:
                fixed: dict[str, Any] = {LR: best[*rule, "never"][0], RESTART: "never"}
                cells += _runs(scale, inner_steps, rule, BETA_SWEEP, fixed, Axis(MOMENTUM, scale.momenta))
            for treatment, restart, controlled in ((K_SWEEP, "never", periods), own_tuning):
                if (*rule, restart) in best:
                    fixed = dict(zip((LR, MOMENTUM), best[*rule, restart], strict=True))
                    restarted = _runs(scale, inner_steps, rule, treatment, fixed, Axis(RESTART, periods))
                    cells += restarted + _matched(cell for cell in restarted if cell.values[RESTART] in controlled)
        cells += _free(scale, inner_steps)
    return cells


def _grid(scale: Scale, inner_steps: int, rule: tuple[str, str], restart: str) -> list[Cell]:
    """Return the runs of a rule over momentum x learning rate."""
    axes = (Axis(MOMENTUM, scale.momenta), Axis(LR, scale.lrs))
    treatment = "never" if restart == "never" else f"K={restart}"
    return _runs(scale, inner_steps, rule, treatment, {RESTART: restart}, *axes)


def _runs(
    scale: Scale, inner_steps: int, rule: tuple[str, str], treatment: str, fixed: Mapping[str, Any], *axes: Axis
) -> list[Cell]:
    """Return the runs of an arm, for every seed; `rule` is a form and a kind."""
    form, kind = rule
    shared = {"inner_steps": inner_steps, FORM: form, METHOD: RULES[kind], **fixed}
    return product(scale.base, [Axis(SEED, scale.seeds), *axes], arm_name(form, kind, treatment), shared)


def _free(scale: Scale, inner_steps: int) -> list[Cell]:
    """Return outer SGD without momentum; without it the forms are one rule, written as the sum form here."""
    fixed = {"inner_steps": inner_steps, FORM: "sum"}
    return momentum_free(scale.base, [Axis(SEED, scale.seeds)], with_averaging(scale.lrs), fixed)


def _matched(restarted: Iterable[Cell]) -> list[Cell]:
    """Return the gain-matched controls of restarted runs of one arm."""
    cells = list(restarted)
    return gain_matched_all(cells, control_name(cells[0].arm)) if cells else []
