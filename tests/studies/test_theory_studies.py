"""What the theory studies compute: the theory note's anchors to their printed digits, and independent oracles."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from twophase.figures.style import styled
from twophase.rule import OuterRule
from twophase.studies import mixed_periods, period_criteria, restart_mechanism, robustness_toy
from twophase.studies._model import SIX, WIDE
from twophase.studies.study import Result, folded, select
from twophase.theory.inputs import rule_grid
from twophase.theory.periods import best_period, log_final_loss
from twophase.theory.rollout import rollout


def printed(text: str) -> Any:
    """The value that was printed, to half a unit of its last digit."""
    digits = len(text.partition(".")[2])
    return pytest.approx(float(text), abs=0.5000001 * 10**-digits, rel=0)


# ------------------------------------------------------------------------------------------------ restart_mechanism


@pytest.fixture(scope="module")
def mechanism() -> Result:
    """Paper figure 1, in full."""
    return restart_mechanism.table()


ANCHORS = {
    # A1: one mode, 80 rounds, heavy ball by period, Nesterov, and outer SGD
    "single/none": "-3.96", "single/best": "-64.54", "single/nag_none": "-7.45", "single/nag_best": "-36.8",
    "single/best_period": 5, "single/rate_period": 5, "single/factor_period": 75, "single/sgd": "-208",
    "single/by_period": {5: "-64.54", 15: "-24.5", 4: "-23.7", 6: "-17.9", 75: "-10.0"},
    # E1: the least |chi_K| depends on the range of K; E18: tuned Nesterov is what its grid makes it
    "single/factor_period_by_max_period": {10: 5, 20: 15, 40: 35, 80: 75},
    "single/nag_tuned/[0.5, 1)/momentum": "0.516", "single/nag_tuned/[0.5, 1)/log10_loss": "-50.3",
    "single/nag_tuned/[0, 1)/momentum": "0.0175", "single/nag_tuned/[0, 1)/log10_loss": "-235",
    "single/nag_tuned/0.5, 0.6, ..., 0.9/log10_loss": "-47.0", "single/nag_tuned/[0.3, 0.99]/log10_loss": "-80.2",
    "single/nag_tuned/0.1, 0.3, ..., 0.9/log10_loss": "-148",
    "single/largest_momentum_that_beats_restart/NAG": "0.396",
    # A2: six modes, 120 rounds: global periods, a period per mode, the paper's criterion, tuned rules
    "six/none": "-6.16", "six/own": "-32.04", "six/sgd": "-38.3", "six/best_period": 7, "six/minimax_period": 7,
    "six/by_period": {3: "-7.3", 5: "-10.6", 6: "-12.5", 7: "-14.45", 17: "-6.64"},
    "six/own_periods": (5, 5, 6, 7, 8, 10), "six/factor_period_by_max_period": {11: 6, 20: 17, 120: 120},
    "six/tuned_without_restart/nag/momentum": "0.41", "six/tuned_without_restart/nag/log10_loss": "-57.1",
    "six/tuned_without_restart/hb/momentum": "0.30", "six/tuned_without_restart/hb/log10_loss": "-63.0",
    # A3: blocks of 9 modes: one period, a period per block, both heuristics
    "blocks/9/none": "-6.01", "blocks/9/best": "-8.85", "blocks/9/own": "-17.81", "blocks/9/heuristic": "-13.55",
    "blocks/9/corrected": "-15.56", "blocks/9/sgd": "-22.4",
    "blocks/9/periods": {"own": (5, 7, 13), "heuristic": (5, 6, 11), "corrected": (5, 7, 12)},
    "blocks/3/best_period": 16, "blocks/5/best_period": 16, "blocks/9/best_period": 8, "blocks/21/best_period": 8,
    # A4 and R15: first zero, how far |x_t| exceeds rho^t, and the sigma from which a period gains
    "oscillation/0.95/first_zero": "5.04", "oscillation/0.95/largest_ratio_to_radius": "1.000",
    "oscillation/0.3/largest_ratio_to_radius": "1.023", "oscillation/0.1/largest_ratio_to_radius": "1.136",
    "oscillation/lowest_sigma_that_gains": {3: "0.267", 5: "0.184", 7: "0.143"},
}  # fmt: skip
"""The theory note's anchors, by their place among the numbers; a text has the digits that the note prints."""


@pytest.mark.slow
@pytest.mark.parametrize("path", ANCHORS)
def test_anchors(mechanism: Result, path: str) -> None:
    """Each anchor of paper figure 1 has its printed digits."""
    value: Any = mechanism.numbers
    for name in path.split("/"):
        value = value[name]

    def wanted(anchor: Any) -> Any:
        if isinstance(anchor, dict):
            return {key: wanted(item) for key, item in anchor.items()}
        return printed(anchor) if isinstance(anchor, str) else anchor

    assert value == wanted(ANCHORS[path])


@pytest.mark.slow
def test_blocks_of_every_size_rank_the_same(mechanism: Result) -> None:
    """Whatever the number of modes, each finer choice of periods is better; no residual leaves its true envelope."""
    for f in mechanism.numbers["blocks"].values():
        assert f["none"] > f["best"] > f["heuristic"] > f["corrected"] > f["own"] > f["sgd"]
    for sigma in ("0.95", "0.3", "0.1"):
        assert mechanism.numbers["oscillation"][sigma]["largest_ratio_to_envelope"] <= 1 + 1e-12


@pytest.mark.slow
def test_momentum_that_beats_the_restart(mechanism: Result) -> None:
    """Up to the momentum stated every one on the grid beats K=5, and the next one does not (direct evaluation)."""
    mode = mechanism.numbers["single"]
    grid = np.linspace(0, 0.999, 2001)
    for kind, nesterov in (("HB", False), ("NAG", True)):
        end = mode["momentum_up_to_which_all_beat_restart"][kind]
        beats = log_final_loss(rule_grid(1.0, grid, nesterov, "ema"), 0.95, 80, 80) / np.log(10) < mode["best"]
        assert beats[grid <= end].all()
        assert not beats[grid > end][0]


def test_curves_end_at_the_exact_losses(mechanism: Result) -> None:
    """The simulated curves that are drawn end at the exact final losses, to 1e-9 dex (heavy cancellation apart)."""
    mode, six, nine = (mechanism.numbers["single"], mechanism.numbers["six"], mechanism.numbers["blocks"]["9"])
    exact = {
        "a": {name: mode[key] for name, key in (("none", "none"), ("global", "best"), ("heuristic", "nag_none"))}
        | {"factor": mode["by_period"][75], "nag": mode["nag_tuned"]["[0.5, 1)"]["log10_loss"]},
        "b": {
            name: six[key] for name, key in (("none", "none"), ("global", "best"), ("factor", "factor"), ("own", "own"))
        },
        "c": {"none": nine["none"], "global": nine["best"], "factor": nine["heuristic"], "own": nine["own"]}
        | {"heuristic": nine["corrected"]},
    }
    for panel, facts in (("a", mode), ("b", six), ("c", nine)):
        exact[panel] |= {"gain": facts["sgd_same_gain"], "sgd": facts["sgd"]}
        if panel != "a":
            exact[panel]["nag"] = facts["tuned_without_restart"]["nag"]["log10_loss"]
        ends = {row["kind"]: row["log10_loss"] for row in select(mechanism.rows, panel=panel)}  # the last of each
        assert ends == {kind: pytest.approx(value, abs=1e-9) for kind, value in exact[panel].items()}


def test_gain_control_moves_as_far(mechanism: Result) -> None:
    """The SGD control's step is the mean gain of restarted heavy ball: mean of 1 - 0.9^j for j = 1 ... 5 (R31)."""
    assert mechanism.numbers["single"]["gain"] == pytest.approx(np.mean([1 - 0.9**j for j in range(1, 6)]), rel=1e-12)


# --------------------------------------------------------------------------------------------------- robustness_toy


@pytest.fixture(scope="module")
def robustness() -> Result:
    """Paper figure 2, in full."""
    return robustness_toy.table()


GOOD = {  # anchor A5: shares of good cells without restarts, with the best period of each cell, with K=3
    "six modes, ema, HB": (".66", ".79", ".70"),
    "six modes, ema, NAG": (".59", ".65", ".60"),
    "six modes, sum, HB": (".75", ".93", ".75"),
    "six modes, sum, NAG": (".68", ".71", ".67"),
    "wide, ema, HB": (".48", ".48", ".26"),
    "wide, ema, NAG": (".35", ".35", ".20"),
    "wide, sum, HB": (".57", ".62", ".42"),
    "wide, sum, NAG": (".37", ".39", ".29"),
}


SHARES = {  # anchor A5: shares of six-mode cells that diverge, and that K=3 helps and hurts by more than 0.1 dex
    "six modes, ema, HB": {"diverged": (".092", ".105"), "every_3_helps": ".35", "every_3_hurts": ".58"},
    "six modes, ema, NAG": {"diverged": (".220", ".227")},
    "six modes, sum, HB": {"every_3_helps": ".24", "every_3_hurts": ".68"},
    "wide, ema, HB": {"every_3_helps": "0", "every_3_hurts": ".81"},
    "wide, sum, HB": {"every_3_helps": ".01", "every_3_hurts": ".70"},
}


@pytest.mark.slow
def test_shares_of_cells(robustness: Result) -> None:
    """Anchor A5's tables and minima; in line with R18 the best period rescues no cell, and K=3 loses some."""
    assert list(robustness.numbers) == list(GOOD)
    for name, facts in robustness.numbers.items():
        good, diverged = facts["good"], facts["diverged"]
        assert [good["none"], good["best"], good["every_3"]] == [printed(text) for text in GOOD[name]], name
        assert diverged["best"] == diverged["none"] <= diverged["every_3"], name
        for key, text in SHARES.get(name, {}).items():
            if isinstance(text, tuple):
                assert (diverged["none"], diverged["every_3"]) == tuple(map(printed, text)), name
            else:
                assert facts[key] == printed(text), (name, key)
    hurt = [facts["best_restart_hurts"] for name, facts in robustness.numbers.items() if name.startswith("six")]
    assert (min(hurt), max(hurt)) == (printed(".16"), printed(".39"))  # so no restart must be a candidate
    heavy, nesterov = (robustness.numbers[f"six modes, ema, {rule}"]["minimum"] for rule in ("HB", "NAG"))
    assert heavy["none"] == heavy["best"] == printed("-62.9")
    assert (nesterov["none"], nesterov["best"]) == (printed("-47.0"), printed("-59.6"))


@pytest.mark.slow
def test_cells_against_simulation(robustness: Result) -> None:
    """Cells drawn at random equal a simulation, the momentum-free controls included (rows are rounded to 1e-6)."""
    stream = np.random.default_rng(0)
    spectra = {"six modes": SIX, "wide": WIDE}
    for index in stream.integers(len(robustness.rows), size=20):
        row = robustness.rows[index]
        rule = OuterRule(row["lr"], row["momentum"], row["rule"] == "NAG", row["form"])
        sigma = spectra[row["spectrum"]]

        def simulated(rule: OuterRule, period: int, sigma: Any = sigma) -> float:
            return math.log10(rollout(rule, sigma, 60, period).loss[-1])

        close = pytest.approx
        assert row["none"] == close(simulated(rule, 60), abs=2e-6)
        assert row["best"] == close(simulated(rule, row["best_period"]), abs=2e-6)
        assert row["every_3"] == close(simulated(rule, 3), abs=2e-6)
        assert row["sgd"] == close(simulated(OuterRule(row["lr"], 0.0, form=row["form"]), 60), abs=2e-6)
        ahead = 2 if row["rule"] == "NAG" else 1  # R31: mean of 1 - b^j (Nesterov: b^(j+1)), over 1 - b in sum form
        gain = np.mean([1 - rule.momentum ** (j + ahead) for j in range(3)]) * rule.injection / (1 - rule.momentum)
        assert row["sgd_gain_3"] == close(simulated(OuterRule(row["lr"] * float(gain), 0.0), 60), abs=2e-6)


# -------------------------------------------------------------------------------------------------- period_criteria


@pytest.fixture(scope="module")
def criteria() -> Result:
    """The regret table, in full."""
    return period_criteria.table()


REGRETS = {  # R22: median and mean, from other draws of the same distribution
    "minimax": (0.00, 0.33),
    "factor 11": (1.31, 1.84),
    "factor 20": (1.08, 1.75),
    "factor 60": (1.20, 1.80),
    "rate 11": (1.83, None),
    "rate 20": (1.57, None),
    "rate 60": (1.38, None),
    "heuristic": (1.81, None),
    "corrected": (1.52, None),
    "3": (3.32, None),
    "never": (1.48, None),
}


@pytest.mark.slow
def test_regrets(criteria: Result) -> None:
    """R22's regrets at 60 rounds lie within three standard errors of ours; exact loss has none, and none is below 0."""
    for name, pair in REGRETS.items():
        facts = criteria.numbers["60"][name]
        for key, value in zip(("median", "mean"), pair, strict=True):
            if value is not None:
                assert abs(facts[key] - value) <= 3 * math.sqrt(2) * facts[f"{key}_error"] + 0.005, name
    for facts in criteria.numbers.values():
        assert facts["loss"]["exact"] == 1
        assert facts["loss"]["q90"] == 0
        assert all(facts[name]["q10"] >= 0 for name in period_criteria.CRITERIA)


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [12, 60])
def test_choices_are_the_theorys(rounds: int) -> None:
    """The vectorised choices and losses equal `best_period` and `log_final_loss`, problem by problem."""
    draws = period_criteria.Draws.make(25)
    logs, losses = draws.losses(rounds)
    choices = period_criteria._choices(draws, logs, losses)
    for i, (rule, sigma, weights) in enumerate(zip(draws.rules, draws.sigma, draws.weights, strict=True)):
        exact = log_final_loss(rule, sigma, rounds, range(1, rounds + 1), weights) / np.log(10)
        assert losses[:, i] == pytest.approx(exact, abs=1e-9)
        assert choices["loss"][i] + 1 == best_period(rule, sigma, weights=weights, max_period=rounds, rounds=rounds)
        limits = {"minimax": rounds} | {f"{kind} {k}": min(k, rounds) for kind in ("rate", "factor") for k in (11, 60)}
        for name, largest in limits.items():
            chosen = best_period(rule, sigma, weights=weights, max_period=largest, objective=name.split()[0])  # type: ignore[arg-type]
            assert choices[name][i] + 1 == chosen, name


def test_fewer_spectra_are_the_first() -> None:
    """The quick table is about the first of the full table's spectra."""
    few, many = period_criteria.Draws.make(3), period_criteria.Draws.make(5)
    assert np.array_equal(few.sigma, many.sigma[:3])
    assert list(few.rules) == list(many.rules[:3])


# ---------------------------------------------------------------------------------------------------- mixed_periods


@pytest.fixture(scope="module")
def mixed() -> Result:
    """The study on the theory note's grid; the finer one only costs time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mixed_periods, "GRIDS", {"coarse": mixed_periods.GRIDS["coarse"]})
        return mixed_periods.table()


RATES = {  # R24: no restart, best single period and its length, mix
    "0.3 to 0.95, HB, lr 1": (".0527", ".1315", 7, ".1946"),
    "0.3 to 0.95, HB, lr 7": (".0527", ".3605", 2, ".5051"),
    "0.3 to 0.95, NAG, lr 7": (".1705", ".5092", 1, ".7152"),
}
GAINS = {  # of the mix over one period, by interval: heavy ball at lr 1 and 7, Nesterov at lr 1 and 7
    "0.3 to 0.95": ("1.48", "1.40", None, "1.40"),
    "0.1 to 1": ("1.95", "2.50", "1.55", "1.58"),
    "0.02 to 1": ("1.00", None, "1.00", None),
}


@pytest.mark.slow
def test_rates_of_mixes(mixed: Result) -> None:
    """R24's table: no restart, best single period, mix; and the gain of the mix on three intervals."""
    rates = mixed.numbers["rates"]
    for case, (none, fixed, period, mix) in RATES.items():
        facts = rates[case]
        assert (facts["none"], facts["fixed"], facts["mix"]) == (printed(none), printed(fixed), printed(mix)), case
        assert facts["fixed_period"] == period
    for interval, gains in GAINS.items():
        for rule, gain in zip(("HB, lr 1", "HB, lr 7", "NAG, lr 1", "NAG, lr 7"), gains, strict=True):
            facts = rates[f"{interval}, {rule}"]
            assert gain is None or facts["mix"] / facts["fixed"] == printed(gain), (interval, rule)


@pytest.mark.slow
def test_ceiling(mixed: Result) -> None:
    """R25: Chebyshev's limits; no mix, and no rule without restarts, is above them; SGD's rates at ν=1 and tuned."""
    rates = mixed.numbers["rates"]
    for interval, limit in {"0.3 to 0.95": "1.271", "0.1 to 1": ".655", "0.02 to 1": ".285"}.items():
        for case in (case for case in rates if case.startswith(interval)):
            assert rates[case]["chebyshev"] == printed(limit)
            tops = [rates[case][name] for name in mixed_periods._RATES if name != "fixed"]
            assert max(tops) <= rates[case]["chebyshev"] + 1e-9
            assert rates[case]["heavy_ball_tuned"] == pytest.approx(rates[case]["chebyshev"], rel=1e-6)
    plain = rates["0.3 to 0.95, HB, lr 1"]
    assert (plain["sgd_ema"], plain["sgd_tuned"]) == (printed(".357"), printed(".654"))


@pytest.mark.slow
def test_schedules(mixed: Result) -> None:
    """R24, finite horizon: the losses and cycles of the best schedules on the spectra of A2 and A3."""
    six, three = mixed.numbers["schedules"].values()
    assert (six["none"], six["fixed"], six["mix"]) == (printed("-6.16"), printed("-14.45"), printed("-20.94"))
    assert (three["none"], three["fixed"], three["mix"]) == (printed("-6.01"), printed("-8.85"), printed("-16.64"))
    # An unfinished last cycle is one more cycle: only the lengths matter (R23).
    lengths = [
        sorted([*(k for k, count in facts["counts"].items() for _ in range(count)), facts["tail"]])
        for facts in (six, three)
    ]
    assert lengths[0] == sorted([2, 5, 5, *[6] * 7, 8, *[10] * 5, 8])
    assert lengths[1] == sorted([5, 6, 6, 7, 7, 7, 12, 12, 12, 14, 14, 15, 3])
    for panel, facts in (("b", six), ("c", three)):
        end = select(mixed.rows, panel=panel, curve="mix")[-1]["log10_loss"]
        assert end == pytest.approx(facts["mix"], abs=1e-6)


@pytest.mark.slow
def test_tuned_rules(mixed: Result) -> None:
    """R25, lr and momentum tuned, 24 rounds: a period adds nothing to heavy ball, and a little to Nesterov."""
    tuned = mixed.numbers["tuned"]["coarse"]
    for interval, rate in {"0.3 to 0.95": "1.1235", "0.1 to 1": ".570", "0.02 to 1": ".216"}.items():
        facts = tuned[f"{interval}, HB"]
        assert facts["none"] == facts["restart"] == printed(rate)
        assert facts["at"]["restart"]["period"] == 24
    pairs = {"0.3 to 0.95": (0.896, 0.948), "0.1 to 1": (0.401, 0.425), "0.02 to 1": (0.149, 0.165)}
    for interval, pair in pairs.items():
        facts = tuned[f"{interval}, NAG"]
        assert (facts["none"], facts["restart"]) == pytest.approx(pair, rel=0.02)  # more depends on grid and modes
        assert facts["none"] < facts["restart"] < tuned[f"{interval}, HB"]["none"] < facts["chebyshev"]
    ceilings = [tuned[f"{interval}, HB"]["chebyshev"] for interval in ("0.3 to 0.95", "0.1 to 1", "0.02 to 1")]
    assert ceilings == [printed("1.2425"), printed(".6260"), printed(".2559")]
    facts = tuned["0.1 to 1, NAG"]
    best = facts["at"]["restart"]
    run = rollout(OuterRule(best["lr"], best["momentum"], True), np.linspace(0.1, 1, 241), 24, best["period"])
    assert -np.log(np.abs(run.residual[-1]).max()) / 24 == pytest.approx(facts["restart"], rel=1e-9)  # simulated


# ------------------------------------------------------------------------------------------------------ the answers


@pytest.mark.slow
def test_verdicts_are_computed(mechanism: Result, robustness: Result, criteria: Result, mixed: Result) -> None:
    """Each answer states what holds and what does not, and a verdict turns when its numbers do."""
    results = (mechanism, robustness, criteria, mixed)
    modules = (restart_mechanism, robustness_toy, period_criteria, mixed_periods)
    for module, result in zip(modules, results, strict=True):
        assert "olds: '" in module.answer(result) or "hold: '" in module.answer(result)
    claim = "'one period is better than none, a period per block or mode better still'"
    assert f"Holds: {claim}" in restart_mechanism.answer(mechanism)
    numbers = copy.deepcopy(mechanism.numbers)
    numbers["six"]["own"] = 0.0
    assert f"Does not hold: {claim}" in restart_mechanism.answer(Result([], numbers))
    assert "Does not hold: 'restarts stabilise'" in robustness_toy.answer(robustness)
    assert "Does not hold: 'mixing replaces tuning'" in mixed_periods.answer(mixed)
    assert "Holds: 'without the horizon" in period_criteria.answer(criteria)


@pytest.mark.slow
def test_reproduce_page(mechanism: Result, robustness: Result, criteria: Result, mixed: Result) -> None:
    """docs/reproduce.md shows what the commands print (of the longest one, all but the lines about the finer grid)."""
    page = (Path(__file__).parents[2] / "docs" / "reproduce.md").read_text(encoding="utf-8")
    assert folded(restart_mechanism.answer(mechanism)) in page
    assert folded(robustness_toy.answer(robustness)) in page
    assert folded(period_criteria.answer(criteria)) in page
    before, _, _ = mixed_periods.answer(mixed).partition("Does not hold: 'a period helps tuned heavy ball'")
    assert before.count("coarse grid") == 6
    assert folded(before) in page


# -------------------------------------------------------------------------------------------------------------- titles


def changed(numbers: Any, **values: float) -> Any:
    """Return a study's numbers with some of them replaced wherever they stand."""
    if not isinstance(numbers, dict):
        return numbers
    return {key: values[key] if key in values else changed(value, **values) for key, value in numbers.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("study", "values", "words"),
    [
        ("mechanism", {}, "lowers the final loss in 3 of 3 spectra; no momentum at all"),
        ("mechanism", {"none": -99.0, "sgd": 0.0}, "lowers the final loss in 0 of 3 spectra"),
        ("robustness", {"none": 0.9, "every_3": 0.5}, "narrows the good region"),
        ("robustness", {"none": 0.5, "every_3": 0.9}, "widens the good region"),
        ("robustness", {"none": 0.5, "every_3": 0.5}, "leaves the good region as wide as it is"),
        ("mixed", {"mix": 1.0, "tuned_momentum": 2.0}, "faster than the mix in 12 of 12 cases"),
        ("mixed", {"mix": 2.0, "tuned_momentum": 1.0}, "faster than the mix in 0 of 12 cases"),
    ],
)
def test_titles_follow_the_numbers(
    study: str, values: dict[str, float], words: str, request: pytest.FixtureRequest
) -> None:
    """With other numbers the title of the same figure says something else."""
    result: Result = request.getfixturevalue(study)
    module = {"mechanism": restart_mechanism, "robustness": robustness_toy, "mixed": mixed_periods}[study]
    with styled():
        figure = module.draw(replace(result, numbers=changed(result.numbers, **values)))
    assert words in " ".join(figure.get_suptitle().split())
