"""The study `outer_schedules`: arms tuned in the model of a place, and ranks against results of the bench."""

from __future__ import annotations

import csv
import io
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from twophase.figures.style import signed, styled
from twophase.recipes.arms import CONTROL
from twophase.recipes.bench import ARMS as OF_BENCH
from twophase.recipes.bench import PLACES as OF_PROTOCOL
from twophase.rule import OuterRule
from twophase.studies import outer_schedules
from twophase.studies.outer_schedules import ARMS, PLACES, Model, measured_gains, rank_correlations
from twophase.studies.study import Result, select
from twophase.theory.rollout import rollout

RISING = "memoryless+schedule=linear:final=2"
CONFIGS = {place.name: place.base() for place in OF_PROTOCOL}


def rows(gains: dict[str, dict[str, float]]) -> list[dict[str, str]]:
    """Rows of the bench's table, through a CSV, in which arms have these gains on three seeds of one place each."""
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(["protocol", "place", "arm", "seed", "result", "inner.lr", "seconds"])
    for place, by_arm in gains.items():
        for arm, gain in by_arm.items():
            for seed in (100, 101, 102):
                result = (
                    "" if math.isinf(gain) and seed == 101 else math.exp(seed / 50 - (0 if math.isinf(gain) else gain))
                )
                writer.writerow([1, place, arm, seed, result, 0.01, 9])
    return list(csv.DictReader(io.StringIO(text.getvalue())))


@pytest.fixture(scope="module")
def computed() -> Result:
    """The quick study, with fewer of the lines that are tried."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(outer_schedules, "_FINALS", (0.25, 0.5, 1.0, 2.0))
        patch.setattr(outer_schedules, "PLACES", ("short",))
        return outer_schedules.table(quick=True)


def test_arms_and_places_are_those_of_the_protocol() -> None:
    """Every arm but averaging is compared at every place, whose replicas have equal data."""
    assert set(ARMS) <= {CONTROL, *OF_BENCH}
    places = {place.name: place for place in OF_PROTOCOL}
    assert all(set(ARMS) <= {CONTROL, *places[name].arms} for name in PLACES)
    assert all(CONFIGS[name].data.split != "non-iid" for name in PLACES)


@pytest.mark.parametrize("name", PLACES)
def test_a_model_has_the_steps_of_its_place(name: str) -> None:
    """Rounds and modes are the place's; without noise, at a constant inner rate, the loss is that of `rollout`."""
    config = CONFIGS[name]
    model = Model(replace(config, inner=replace(config.inner, schedule="constant", warmup=0.0)), 0.0, 5)
    assert model.phases(0.1).progress.shape == (config.steps // config.inner_steps, 5)
    sigma = 1 - (1 - 0.1 * model.eigenvalue) ** config.inner_steps
    run = rollout(OuterRule(0.8, 0.4), sigma, len(model.phases(0.1).progress), "3", weights=model.eigenvalue)
    loss = model.losses(ARMS["heavy-ball:momentum=~0.6@3"], [0.1], [0.8], [0.4]).item()
    assert loss == pytest.approx(run.loss[-1] * model.eigenvalue.sum(), rel=1e-10)


def test_tuning_finds_the_least_loss() -> None:
    """No point of a finer grid is better than what tuning finds by more than 0.1 %; its loss is that of its point."""
    model = Model(CONFIGS["eight"], 0.3, 6)
    arm = ARMS["nesterov:momentum=~0.6"]
    best = model.tuned(arm)
    lrs, momenta, peaks = 2.0 ** np.arange(-3, 4, 0.25), np.arange(0, 0.9, 0.1), 2.0 ** np.arange(-4, 1.1, 0.25)
    assert best["loss"] <= 1.001 * model.losses(arm, peaks, lrs, momenta).min()
    assert model.losses(arm, [best["inner_lr"]], [best["lr"]], [best["momentum"]]).item() == pytest.approx(best["loss"])


@pytest.mark.slow
def test_no_arm_is_behind_what_it_holds(computed: Result) -> None:
    """But for the rising one, each arm is level with averaging or ahead, and with memoryless if it has a momentum."""
    for gains in computed.numbers["predicted"]["1"].values():
        assert gains[CONTROL] == 0
        for arm, how in ARMS.items():
            if arm != RISING:
                assert gains[arm] >= (gains["memoryless"] - 1e-12 if how.tuned == 2 else 0)


@pytest.mark.slow
def test_free_rates_gain_most(computed: Result) -> None:
    """The best rate of each round gains more than the best line, and that at least as much as the best constant."""
    for facts in computed.numbers["schedules"].values():
        assert facts["gain_best"] > facts["gain_line"] >= facts["gain_constant"] >= 0
        assert facts["gain_best"] >= facts["gain_held"] - 1e-12  # often they are the same rates
    assert len(select(computed.rows, panel="rates", schedule="cosine")) == 30


@pytest.mark.slow
def test_page_shows_what_the_command_prints() -> None:
    """docs/theory-schedules.md has the line of a case, and the predicted gains of memoryless at a place."""
    page = (Path(__file__).parents[2] / "docs" / "theory-schedules.md").read_text(encoding="utf-8")
    model = Model(CONFIGS["short"], outer_schedules.NOISE, outer_schedules.MODES)
    assert outer_schedules._line("noise 1, cosine, R=2", outer_schedules._schedule(model)[0]) in page
    losses = [model.tuned(ARMS[arm])["loss"] for arm in (CONTROL, "memoryless")]
    assert f"\nmemoryless{math.log(losses[0] / losses[1]):36.3f} " in page


def test_measured_gains_and_ranks() -> None:
    """Gains are paired by seed; a run that diverged ranks last; ranks are Spearman's, at each place and over all."""
    gains = {"short": {CONTROL: 0.0, "memoryless": 0.02, RISING: -0.01, "auto": 0.5},
             "long": {CONTROL: 0.0, "memoryless": -math.inf, RISING: 0.03}}  # fmt: skip
    measured = measured_gains(rows(gains))
    assert measured["short"] == pytest.approx({CONTROL: 0.0, "memoryless": 0.02, RISING: -0.01})
    assert measured["long"]["memoryless"] == -math.inf
    predicted = {place: {CONTROL: 0.0, "memoryless": 0.1, RISING: -0.2} for place in ("short", "long")}
    ranks = rank_correlations(predicted, measured)
    by_hand = {"short": 1.0, "long": -1.0, "all": -4 / math.sqrt(16 * 17)}
    assert {place: f["rho"] for place, f in ranks.items()} == pytest.approx(by_hand)
    assert (ranks["short"]["signs"], ranks["long"]["signs"], ranks["all"]["arms"]) == (1.0, 0.0, 6)
    level = rank_correlations({"short": dict.fromkeys(measured["short"], 0.0)}, measured)
    assert math.isnan(level["short"]["rho"])


@pytest.mark.slow
def test_answer_and_figure_follow_the_results(computed: Result) -> None:
    """The answer has the rank correlation at each place, and the figure that over all."""
    ranks = computed.numbers["ranks"]["1"]
    assert f"short {ranks['short']['rho']:.2f} (8; " in outer_schedules.answer(computed)
    with styled():
        figure = outer_schedules.draw(computed)
    assert f"with the bench {signed(ranks['all']['rho'], 2)}" in " ".join(figure.get_suptitle().split())
