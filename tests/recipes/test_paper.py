"""The paper's experiments: the cells are those of its tables and captions, in both forms, with their controls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product

import pytest

from madeup import Value, rows
from twophase.base.config import with_values
from twophase.recipes.paper import (
    LAPTOP,
    PAPER,
    QUICK,
    SCALES,
    Scale,
    control_name,
    retuning,
    robustness_heatmaps,
    soft_restart,
    tuned,
)
from twophase.recipes.pretraining import paper_150m
from twophase.restart import Soft, mean_outer_gain
from twophase.sweeps.grid import Cell, Sweep, extends
from twophase.tasks.lm.config import check

FORMS, KINDS = ("sum", "ema"), ("heavy ball", "Nesterov")
RULES = [f"{form}, {kind}" for form in FORMS for kind in KINDS]


def place(cell: Cell) -> tuple[object, ...]:
    """Everything that a cell's figure places it by."""
    outer = cell.config.outer
    return cell.config.inner_steps, outer.form, outer.nesterov, outer.momentum, outer.lr, outer.restart


def bowl(lr: float, momentum: float) -> Callable[[Cell], float]:
    """Made-up perplexities whose best is at this learning rate and momentum, for all arms."""
    return lambda cell: 8 + abs(cell.config.outer.lr - lr) + abs(cell.config.outer.momentum - momentum)


BOWL = bowl(0.7, 0.5)


heatmaps_of, soft_of = cache(robustness_heatmaps), cache(soft_restart)


@cache
def whole_retuning(scale: Scale, value: Value = BOWL) -> Sweep:
    """`retuning` with both its stages."""
    return retuning(scale, rows(retuning(scale), value))


def test_paper_scale_is_table_1() -> None:
    """The axes of the paper's scale; tests/recipes/test_pretraining.py holds its base against both tables."""
    recipe = paper_150m()
    assert replace(PAPER.base, evaluate_every=recipe.evaluate_every, log_every=recipe.log_every) == recipe
    assert (PAPER.lrs, PAPER.momenta) == ((0.1, 0.3, 0.5, 0.7, 0.9, 1.1), (0.1, 0.3, 0.5, 0.7, 0.9))
    assert (PAPER.periods, PAPER.retuning) == ((2, 3, 5, 7, 9, 11), (64, 128, 512, 1024, 2048))
    assert (PAPER.short, PAPER.long) == (128, 512)
    assert [PAPER.rounds(s) for s in PAPER.retuning] == [196, 98, 25, 13, 7]


def test_laptop_scale_is_the_demo_with_the_papers_rounds() -> None:
    """480 steps at inner learning rate 4e-3, everything else the default run; rounds close to the paper's."""
    assert LAPTOP.base == with_values(type(LAPTOP.base)(), {"steps": 480, "inner.lr": 4e-3, "inner_steps": 5})
    assert [LAPTOP.rounds(s) for s in LAPTOP.retuning] == [96, 48, 24, 12, 6]
    assert (LAPTOP.rounds(LAPTOP.short), LAPTOP.rounds(LAPTOP.long)) == (96, 24)
    assert (LAPTOP.lrs, LAPTOP.momenta) == ((0.3, 0.7, 1.1), PAPER.momenta)
    assert (LAPTOP.periods, LAPTOP.seeds) == (PAPER.periods, (0, 1, 2))


@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
def test_every_scale_is_consistent(scale: Scale) -> None:
    """Tuning happens at a communication period of the sweep, which is the base's, and the base can be run."""
    assert scale.base.inner_steps == scale.short
    assert {scale.short} <= set(scale.retuning)
    assert scale.rounds(scale.long) == replace(scale.base, inner_steps=scale.long).rounds
    assert (scale.retain[0], scale.inject[0]) == (0.0, 0.0)
    check(scale.base)


@pytest.mark.slow
@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
def test_every_sweep_is_sound(scale: Scale) -> None:
    """Runs can be run; arms tell the truth about form, rule and restart; no cell is there twice; no arm is half.

    Every control has the mean gain of the run that it controls, is of its arm's controls, and differs in no more.
    """
    gain = cache(mean_outer_gain)  # the same for every seed
    for sweep in (heatmaps_of(scale), soft_of(scale), whole_retuning(scale)):
        for config in sweep.runs.values():
            check(config)
        cells = Counter((cell.arm, cell.control_of, *place(cell), cell.config.seed) for cell in sweep.cells)
        assert set(cells.values()) == {1}
        seeds = Counter((cell.arm, cell.config.seed) for cell in sweep.cells)
        assert all(seeds[arm, seed] == seeds[arm, scale.seeds[0]] for arm, _ in seeds for seed in scale.seeds)
        restarted = {(control_name(cell.arm), cell.run_id): cell for cell in sweep.cells if cell.arm != "momentum-free"}
        assert any(cell.control_of for cell in sweep.cells)
        for cell in sweep.cells:
            assert with_values(scale.base, cell.values) == cell.config
            if cell.arm == "momentum-free":
                assert (cell.config.outer.momentum, cell.config.outer.restart) == (0.0, "never")
                continue
            form, kind, treatment = cell.arm.split(", ", 2)
            assert (form, kind == "Nesterov") == (cell.config.outer.form, cell.config.outer.nesterov)
            without = treatment.startswith("never") or treatment == "beta sweep"
            assert (cell.config.outer.restart == "never") == without
            assert (cell.control_of is not None) == ("gain of" in treatment)
            if cell.control_of:
                of = restarted[cell.arm, cell.control_of].config
                assert with_values(cell.config, {"outer.lr": of.outer.lr, "outer.restart": of.outer.restart}) == of
                gains = [gain(c.outer.rule(), c.outer.policy(), c.rounds) for c in (cell.config, of)]
                assert gains[0] == pytest.approx(gains[1], rel=1e-5)


@pytest.mark.parametrize(("scale", "cells"), [(LAPTOP, 960), (PAPER, 734)], ids=["laptop", "paper"])
def test_robustness_heatmaps(scale: Scale, cells: int) -> None:
    """Nu x beta, never and K = 3, for two S, forms and rules; momentum-free at every S; controls where they matter."""
    sweep = heatmaps_of(scale)
    assert len(sweep.cells) == len(sweep.runs) == cells
    grid, seeds = len(scale.lrs) * len(scale.momenta), len(scale.seeds)
    arms = Counter(cell.arm for cell in sweep.cells)
    controlled = len([m for m in scale.momenta if m >= scale.matched_from]) * len(scale.lrs)
    assert arms == (
        dict.fromkeys([f"{rule}, never" for rule in RULES], 2 * grid * seeds)
        | dict.fromkeys([f"{rule}, K=3" for rule in RULES], 2 * grid * seeds)
        | dict.fromkeys([f"{rule}, never, gain of K=3" for rule in RULES], 2 * controlled * seeds)
        | {"momentum-free": 2 * (len(scale.lrs) + 1) * seeds}
    )
    both = (scale.short, scale.long)
    expected = set(product(both, FORMS, (False, True), scale.momenta, scale.lrs, ("never", "3")))
    assert {place(c) for c in sweep.cells if c.arm != "momentum-free" and not c.control_of} == expected
    free = {place(c) for c in sweep.cells if c.arm == "momentum-free"}
    assert free == set(product(both, ["sum"], [False], [0.0], [*scale.lrs, 1.0], ["never"]))
    if scale is PAPER:
        assert controlled == grid


@pytest.mark.parametrize(("scale", "cells"), [(LAPTOP, 420), (PAPER, 258)], ids=["laptop", "paper"])
def test_soft_restart(scale: Scale, cells: int) -> None:
    """Alpha x beta at Nesterov (0.9, 0.7), K = 5 at the short and K = 3 at the long S, in both forms, with references.

    Paper: the captions of the soft restart sweeps.
    """
    sweep = soft_of(scale)
    assert len(sweep.cells) == len(sweep.runs) == cells
    for cell in sweep.cells:
        if cell.arm != "momentum-free":
            assert (cell.config.outer.nesterov, cell.config.outer.momentum) == (True, 0.7)
            assert cell.control_of or cell.config.outer.lr == 0.9
    for inner_steps, period in ((scale.short, 5), (scale.long, 3)):
        coefficients = set(product(scale.retain, scale.inject)) - {(0.0, 0.0)}
        policies = {str(Soft(period, *pair)) for pair in coefficients} | {str(period)}
        for form in FORMS:
            chosen = [
                cell for cell in sweep.cells if (cell.config.inner_steps, cell.config.outer.form) == (inner_steps, form)
            ]
            soft = Counter(c.config.outer.restart for c in chosen if c.arm == f"{form}, Nesterov, soft K={period}")
            assert soft == dict.fromkeys(policies, len(scale.seeds))
            controls = [c for c in chosen if c.arm == f"{form}, Nesterov, never, gain of soft K={period}"]
            assert len({c.control_of for c in controls}) == len(soft) * len(scale.seeds)
            assert sum(c.arm == f"{form}, Nesterov, never" for c in chosen) == len(scale.seeds)
        averaging = [c for c in sweep.cells if c.arm == "momentum-free" and c.config.outer.lr == 1.0]
        assert {c.config.inner_steps for c in averaging} == {scale.short, scale.long}


@pytest.mark.slow
def test_first_stage_is_a_part_of_the_heatmaps() -> None:
    """The tuning's runs are those of the heatmaps at the short communication period: none is trained for it alone."""
    for scale in SCALES.values():
        heatmaps, first = heatmaps_of(scale), retuning(scale)
        assert len(first.runs) == 8 * len(scale.lrs) * len(scale.momenta) * len(scale.seeds)
        assert set(first.runs) <= set(heatmaps.runs)
        arms = {(cell.arm, cell.run_id) for cell in heatmaps.cells}
        assert {(cell.arm, cell.run_id) for cell in first.cells} <= arms
        assert {cell.config.inner_steps for cell in first.cells} == {scale.short}
        assert {cell.config.outer.restart for cell in first.cells} == {"never", "3"}


def test_second_stage_extends_the_first() -> None:
    """The second stage begins with the first's cells, unchanged, and adds nothing further when its rows are known."""
    first, whole = retuning(QUICK), whole_retuning(QUICK)
    assert whole.cells[: len(first.cells)] == first.cells
    assert len(whole.cells) > len(first.cells)
    assert extends(whole.spec(), first.spec())
    assert retuning(QUICK, rows(whole, BOWL)).spec() == whole.spec()
    assert retuning(QUICK, rows(robustness_heatmaps(QUICK), BOWL)).spec() == whole.spec()


@pytest.mark.slow
def test_second_stage_cells() -> None:
    """At every S: beta at nu*, K at (nu*, beta*) and the own tuning, controls for the K that fire, momentum-free."""

    def perplexity(cell: Cell) -> float:
        best = (0.7, 0.9) if cell.config.outer.restart == "3" else (1.1, 0.5)
        return bowl(*best)(cell)

    scale = LAPTOP
    first, whole = retuning(scale), whole_retuning(scale, perplexity)
    second = whole.cells[len(first.cells) :]
    seeds = len(scale.seeds)
    for inner_steps in scale.retuning:
        fires = [k for k in scale.periods if k < scale.rounds(inner_steps)]
        for rule, nesterov in [(rule, rule.endswith("Nesterov")) for rule in RULES]:
            form = rule.split(", ")[0]
            chosen = [c for c in second if c.arm.startswith(rule) and c.config.inner_steps == inner_steps]
            arms: dict[str, list[tuple[object, ...]]] = {}
            for cell in chosen:
                arms.setdefault(cell.arm.removeprefix(f"{rule}, "), []).append(place(cell))
            where = (inner_steps, form, nesterov)
            assert Counter(arms["beta sweep"]) == dict.fromkeys(
                [(*where, beta, 1.1, "never") for beta in scale.momenta], seeds
            )
            for arm, (lr, momentum) in {"K sweep": (1.1, 0.5), "K sweep, own tuning": (0.7, 0.9)}.items():
                at = [(*where, momentum, lr, str(period)) for period in scale.periods]
                assert Counter(arms[arm]) == dict.fromkeys(at, seeds)
                controlled = fires if arm == "K sweep" else set(fires) & set(scale.own_matched)
                assert len(arms[f"never, gain of {arm}"]) == len(controlled) * seeds
        free = [c for c in second if c.arm == "momentum-free" and c.config.inner_steps == inner_steps]
        assert Counter(c.config.outer.lr for c in free) == dict.fromkeys([0.3, 0.7, 1.0, 1.1], seeds)
    assert len(whole.cells) == 360 + 3 * (4 * (5 * (5 + 6 + 6) + (6 * 4 + 3) + 5) + 5 * 4)


def test_second_stage_waits_for_every_run() -> None:
    """One run of the tuning that is missing or could not be run keeps the sweep at its first stage."""
    first = retuning(QUICK)
    *ended, last = rows(first, BOWL)
    for state in ("missing", "failed"):
        open_ = [*ended, replace(last, state=state, perplexity=None)]
        assert retuning(QUICK, open_).spec() == first.spec()
        assert tuned(QUICK, open_) is None
    assert retuning(QUICK, ended).spec() == first.spec()
    assert tuned(QUICK, ended) is None


@pytest.mark.parametrize("at", [(0.3, 0.1), (0.7, 0.9), (1.1, 0.5)])
def test_tuning_finds_the_best(at: tuple[float, float]) -> None:
    """The known optimum is found for every form, rule and arm, in terms of learning rate and momentum."""
    tuning = tuned(LAPTOP, rows(retuning(LAPTOP), bowl(*at)))
    assert tuning == dict.fromkeys(product(FORMS, KINDS, ("never", "3")), at)


def test_ties_go_to_the_smaller_momentum_then_learning_rate() -> None:
    """When all settings are equal, the smallest momentum and learning rate are taken."""
    tuning = tuned(LAPTOP, rows(retuning(LAPTOP), lambda _: 8.0))
    assert set((tuning or {}).values()) == {(0.3, 0.1)}


def test_tuning_judges_means_over_all_seeds() -> None:
    """A setting that is best but diverged for one seed is not taken, nor one that is worse on average."""

    def value(cell: Cell) -> float | str:
        at = (cell.config.outer.lr, cell.config.outer.momentum, cell.config.seed)
        is_unlucky = at == (0.3, 0.5, 1)
        return "diverged" if at == (0.7, 0.5, 2) else bowl(0.7, 0.5)(cell) + 5 * is_unlucky

    tuning = tuned(LAPTOP, rows(retuning(LAPTOP), value))
    assert set((tuning or {}).values()) == {(0.7, 0.3)}


def test_an_arm_of_which_nothing_finished_has_no_second_stage() -> None:
    """Where all of an arm's settings diverged, its sweeps are left out and the others go on."""

    def value(cell: Cell) -> float | str:
        return "diverged" if cell.arm == "sum, heavy ball, never" else BOWL(cell)

    first = retuning(QUICK)
    whole = retuning(QUICK, rows(first, value))
    arms = {cell.arm for cell in whole.cells[len(first.cells) :]}
    assert not {"sum, heavy ball, beta sweep", "sum, heavy ball, K sweep"} & arms
    assert {"sum, heavy ball, K sweep, own tuning", "ema, heavy ball, K sweep", "momentum-free"} <= arms
