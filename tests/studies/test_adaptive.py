"""The studies of adaptive policies: what they conclude from made-up runs, and that what they draw comes out."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from madeup import Value, rows
from twophase.figures.style import rendered, styled
from twophase.recipes.adaptive import ADAPTIVE, FIXED, RIVALS, choice, confirmation, inner_steps_of
from twophase.recipes.paper import QUICK
from twophase.restart import parse
from twophase.studies import adaptive_choice, adaptive_confirmation
from twophase.studies._adaptive import AVERAGING, BEST_K, BEST_OTHER, CHOSEN, TUNED_FREE, aims
from twophase.sweeps.grid import Cell, Sweep
from twophase.sweeps.plan import plan

STUDIES: dict[str, Any] = {"choice": (adaptive_choice, choice), "confirmation": (adaptive_confirmation, confirmation)}
SCALE = replace(QUICK, seeds=(0, 1, 2))
each_study = pytest.mark.parametrize("name", STUDIES)


@cache
def sweep_of(name: str) -> Sweep:
    return STUDIES[name][1](SCALE)


def world(cell: Cell) -> float:
    """Momentum costs, restarts help, and `auto` is 4 % better than plain averaging, which is 10; seeds differ."""
    outer, seed = cell.config.outer, 1 + 0.01 * (cell.config.seed % 3)
    if outer.momentum == 0:
        return seed * 10 * (1 + abs(outer.lr - 1))
    if outer.restart == "auto":
        return seed * 9.6
    costs = 1 + outer.momentum * {"never": 1.0, "3": 0.5}.get(outer.restart, 0.7)
    return seed * 9.7 * costs


def result_of(name: str, value: Value) -> Any:
    return STUDIES[name][0].table(rows(sweep_of(name), value), SCALE)


@pytest.mark.slow
@each_study
def test_what_the_world_is_made_of_is_found(name: str) -> None:
    """Means, bests, worsts, the best period, and ratios against every control are those of the made-up world."""
    result = result_of(name, world)
    for facts in result.numbers["places"].values():
        for lines in facts["rules"].values():
            if "auto" not in lines or "K=3" not in lines:
                continue
            auto, never = lines["auto"], lines["never"]
            assert auto["best"] == pytest.approx(auto["worst"])
            assert auto["geometric_mean"] == pytest.approx(0.96 * facts["averaging"])
            assert never["worst"] / never["best"] == pytest.approx(1.9 / 1.5)
            assert lines[BEST_K]["period"] == "K=3"
            ratio = lines[AVERAGING]["over_chosen"]
            assert [ratio[what] for what in ("mean", "low", "high")] == pytest.approx([1 / 0.96] * 3)
            assert lines[TUNED_FREE]["over_chosen"]["mean"] == pytest.approx(1 / 0.96)  # lr 1 is its best
            mean = math.sqrt(1.5 * 1.9)
            assert lines["never"]["over_chosen"]["mean"] == pytest.approx(9.7 * mean / 9.6)
            assert auto["within"] == auto["settings"] == 4
            assert never["within"] == 0
    text = STUDIES[name][0].answer(result)
    assert "Holds: 'auto is at or below best fixed K in geometric mean over the grid'" in text
    three, other = (9.7 * math.sqrt((1 + cost * 0.5) * (1 + cost * 0.9)) / 9.6 for cost in (0.5, 0.7))
    words = {name: ratios for name, *ratios in (re.split(r"  +", line.rstrip()) for line in text.splitlines())}
    for arm, ratio in {"K=3": three, "probed gate": other}.items():
        assert words[arm] == [f"{ratio:.3f} [{ratio:.3f}, {ratio:.3f}]"] * 4, arm
    assert words[BEST_K] == ["K=3"] * 4
    for place, facts in result.numbers["places"].items():  # momentum-free SGD at lr 1 is all three
        assert words[place] == [f"{1 / 0.96:.3f} [{1 / 0.96:.3f}, {1 / 0.96:.3f}]"] * 3
        assert facts["best_other"] == "momentum-free, momentum 0, lr 1"
    assert words[f"over {CHOSEN}"] == [AVERAGING, TUNED_FREE, BEST_OTHER]
    assert text.startswith(f"Validation perplexity (means over up to {5 if name == 'confirmation' else 3} seeds). ")
    covered = {"confirmation": "94% (5 seeds), 75% (3 seeds).", "choice": "75% (3 seeds)."}
    assert f"which can hold the true mean in at most {covered[name]}\n" in text


def test_a_place_without_the_chosen_arm_has_no_ratios() -> None:
    """What `--so-far` may show before `auto` is trained somewhere: the other arms, and nothing over `auto`."""
    without = [row for row in rows(sweep_of("confirmation"), world) if not row.arm.endswith("auto")]
    result = adaptive_confirmation.table(without, SCALE)
    text = adaptive_confirmation.answer(result)
    places = result.numbers["places"]
    assert text.count("over auto") == 1
    assert text.count("no pair") == 3 * len(places) == 15
    assert "[" not in text


@pytest.mark.slow
@each_study
def test_a_policy_that_fails_is_said_to(name: str) -> None:
    """Where `auto` is worse than everything, or has diverged, no aim is reached."""
    worse = result_of(name, lambda cell: world(cell) * (3.0 if cell.config.outer.restart == "auto" else 1.0))
    assert not any(any(answers.values()) for answers in aims(worse.numbers["places"]).values())
    text = STUDIES[name][0].answer(worse)
    assert text.count("Does not hold: '") == 4
    gone = result_of(name, lambda cell: "diverged" if cell.config.outer.restart == "auto" else world(cell))
    claims = aims(gone.numbers["places"])
    assert not any(answer for answers in claims.values() for answer in answers.values())
    assert "4 div." in STUDIES[name][0].answer(gone)


@pytest.mark.slow
@pytest.mark.parametrize(("first", "holds"), [(1.02, True), (0.97, False)])
def test_a_tuned_best_may_be_behind_within_what_the_seeds_can_tell(first: float, holds: bool) -> None:
    """A setting that is better than `auto` in the mean is no objection while it is worse for one seed of three."""

    def ahead(cell: Cell) -> float:
        seed = cell.config.seed
        here = (cell.config.outer.momentum, cell.config.outer.lr) == (0, 1)
        return (first if seed == 0 else 0.97) * 9.6 * (1 + 0.01 * seed) if here else world(cell)

    claims = aims(result_of("choice", ahead).numbers["places"])
    (claim,) = (claim for claim in claims if "best of all" in claim)
    assert set(claims[claim].values()) == {holds}


@pytest.mark.slow
def test_one_setting_that_is_worse_for_every_seed_is_counted() -> None:
    """A rule that is better than `auto` at one setting, for every seed, is counted there and nowhere else."""

    def one_better(cell: Cell) -> float:
        outer = cell.config.outer
        here = (outer.restart, outer.momentum, outer.lr, outer.nesterov, outer.form) == ("never", 0.5, 0.3, True, "sum")
        return (0.6 if cell.config.seed else 0.5) * world(cell) if here else world(cell)

    result = result_of("choice", one_better)
    for facts in result.numbers["places"].values():
        counts = {
            rule: lines["auto"]["against_never"]["worse_for_every_seed"] for rule, lines in facts["rules"].items()
        }
        assert counts == {"sum HB": 0, "sum NAG": 1, "ema HB": 0, "ema NAG": 0}
        against = facts["rules"]["sum NAG"]["auto"]["against_never"]
        assert against["largest_ratio"] > 1
        text = adaptive_choice.answer(result)
        assert f"sum NAG {against['largest_ratio']:.3f}, of a seed {against['largest_of_a_seed']:.3f}" in text
        seeds = len(result.settings["seeds"])
        assert against["largest_of_a_seed"] / against["largest_ratio"] == pytest.approx((6 / 5) ** (1 - 1 / seeds))


@pytest.mark.slow
def test_figures_come_out() -> None:
    """The figure of a world in which some runs have diverged is drawn, in colour and as a vector."""

    def partly(cell: Cell) -> float | str:
        return "diverged" if cell.config.outer.restart == "2" and cell.config.outer.lr > 1 else world(cell)

    with styled():
        result = result_of("choice", partly)
        figure, details = adaptive_choice.draw(result), adaptive_choice.details(result)
        pictures = rendered(figure, palette=True)
    assert "Over the grid auto is below" in figure.get_suptitle()
    assert {name.partition("-")[0] for name in details} <= {"sum", "ema"}
    assert all("perplexity rises" in " ".join(each.get_suptitle().split()) for each in details.values())
    assert pictures[".png"][:4] == b"\x89PNG"
    assert pictures[".pdf"][:4] == b"%PDF"


@pytest.mark.slow
def test_the_runs_of_the_choice() -> None:
    """Every policy is a policy; `auto` is one run a seed and communication period, whatever the rule."""
    for policy in (FIXED | ADAPTIVE | RIVALS).values():
        parse(policy)
    sweep = sweep_of("choice")
    assert {cell.config.inner_steps for cell in sweep.cells} == set(inner_steps_of(SCALE))
    alone = [config for config in plan(sweep).runs.values() if config.outer.restart == "auto"]
    assert len(alone) == 3 * len(SCALE.seeds)


def test_the_confirmation_shares_no_run_with_the_choice() -> None:
    """Its seeds, its width and its text took no part in choosing."""
    chosen, confirmed = sweep_of("choice"), sweep_of("confirmation")
    assert not set(chosen.runs) & set(confirmed.runs)
    assert {c.config.seed for c in chosen.cells} == {0, 1, 2}
    assert {c.config.seed for c in confirmed.cells} == {3, 4, 5, 6, 7}
    assert len({c.config.model.hidden_size for c in confirmed.cells}) == 2
    assert {c.config.data.corpus for c in confirmed.cells} == {"python", "python-code"}
