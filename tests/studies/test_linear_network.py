"""The study of networks: the linear model is the theory's to rounding, the network departs from it, and both are seen.

The study's own measures are checked too: a wrong sigma, period or rule shows, and powers of the width are found.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from extras import need
from twophase.base.config import UsageError
from twophase.figures.style import styled
from twophase.rule import OuterRule
from twophase.studies import _digits, linear_network
from twophase.studies._digits import (
    QUICK,
    RULES,
    USUAL,
    Inner,
    Linearised,
    Network,
    deviations,
    fit,
    largest_eigenvalue,
    load_data,
    modes_of,
    modes_of_shards,
    train,
)
from twophase.studies._model import HEAVY_BALL as PAPER
from twophase.studies.study import Result
from twophase.theory.modes import transition

need("sklearn", "the extra studies is not installed")
need("matplotlib", "the extra plot is not installed")

TINY = replace(QUICK, images=12, inner_steps=4, rounds=6, linear_width=16, widths=(16, 32), seeds=2)
HALVES = [slice(0, 6), slice(6, None)]


@pytest.fixture(scope="module")
def result() -> Result:
    """A study smaller than the quick one, once for all tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_digits, "QUICK", replace(QUICK, images=20, inner_steps=4, rounds=12, shard_inner_steps=(1, 4)))
        return linear_network.table(quick=True)


@pytest.fixture(scope="module")
def data():
    return load_data(TINY.digits, TINY.images)


@pytest.fixture(scope="module")
def model(data) -> Linearised:
    return Linearised.of(Network(16, 0, data))


@pytest.fixture(scope="module")
def inner(model: Linearised) -> Inner:
    return Inner(0.4 / largest_eigenvalue(model), 5)  # halves have eigenvalues up to twice as large


# --- the linear model ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES, ids=OuterRule.describe)
@pytest.mark.slow
def test_linear_model_contracts_as_the_theory_says(result: Result, rule: OuterRule):
    """Every mode, restarted or not, is multiplied by `[T^K]_11` in a cycle, to 1e-8; T is multiplied out here."""
    rows = [row for row in result.rows if row["part"] == "linear" and row["rule"] == rule.describe()]
    restarts = {row["restart"] for row in rows}
    assert {"never", "3"} <= restarts
    for restart in restarts:
        modes = [row for row in rows if row["restart"] == restart]
        assert len(modes) == result.settings["images"]
        period = result.settings["rounds"] if restart == "never" else int(restart)
        matrices = transition(rule, [row["sigma"] for row in modes])
        expected = np.linalg.matrix_power(matrices, period)[:, 0, 0]
        measured = np.array([row["contraction"] for row in modes])
        assert np.isfinite(measured).mean() > 0.9
        good = np.isfinite(measured)
        np.testing.assert_allclose(measured[good], expected[good], rtol=0, atol=1e-8)
        assert max(row["deviation"] for row in modes) < 1e-8


@pytest.mark.slow
def test_linear_model_in_all_rounds(result: Result):
    """No mode is off by more than 1e-12 of the first residual in any round; almost all cycles could be measured."""
    linear = result.numbers["linear"]
    assert linear["runs"] >= 8
    assert linear["residual_deviation"] < 1e-12
    assert linear["contraction_deviation"] < 1e-8
    assert linear["contractions_measured"] > 0.9 * linear["contractions"]


def test_what_is_wrong_shows(model: Linearised, inner: Inner):
    """A sigma off by 1 %, another period, rule, form or kind, or no restart, is 1e-3 and more away."""
    modes = modes_of(model, inner)
    path = train(model, PAPER, "3", 12, inner, model.some(slice(None)))
    assert deviations(path, modes, PAPER, "3", 3)[0] < 1e-12
    for wrong, rule, restart, period in [
        (replace(modes, sigma=0.99 * modes.sigma), PAPER, "3", 3),
        (modes, PAPER, "4", 4),
        (modes, PAPER, "never", 12),
        (modes, USUAL, "3", 3),
        (modes, replace(PAPER, form="sum"), "3", 3),
        (modes, replace(PAPER, nesterov=True), "3", 3),
    ]:
        distance, contraction, factor = deviations(path, wrong, rule, restart, period)
        assert distance > 1e-3
        assert np.nanmax(np.abs(contraction - factor)) > 1e-3


def test_jacobian(data, model: Linearised):
    """The linear model has the value and the slope of its network, and the kernel written out by hand."""
    network = Network(16, 0, data)
    torch.testing.assert_close(model(), network())
    direction = torch.from_numpy(np.random.default_rng(0).standard_normal(model.theta.numel()))
    size, hidden = 1e-5, network.hidden.numel()
    values = []
    for sign in (1, -1):
        moved = Network(16, 0, data)
        with torch.no_grad():
            moved.hidden.add_(sign * size * direction[:hidden].view_as(moved.hidden))
            moved.readout.add_(sign * size * direction[hidden:])
            values.append(moved())
    slope = (values[0] - values[1]) / (2 * size)
    torch.testing.assert_close(model.jacobian @ direction, slope, rtol=1e-7, atol=1e-7)
    images, v = data[0], network.readout.detach()
    features = torch.tanh(images @ network.hidden.detach().T / 8)
    inside = (1 - features**2) * v
    kernel = (features @ features.T + (inside @ inside.T) * (images @ images.T) / 64) / 16
    torch.testing.assert_close(model.jacobian @ model.jacobian.T, kernel)


# --- the network --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_wider_network_is_closer_to_the_linear_model(result: Result):
    """Departures fall from width to width, with clearly negative exponents; gains come closer to what is promised."""
    runs = result.numbers["network"]["runs"]
    assert len(runs) == 6
    for run in runs:
        medians = [run["median_departure"][width] for width in result.settings["widths"]]
        assert all(wide < narrow for narrow, wide in pairwise(medians)), run
        assert run["departure"]["exponent"] < -2 * run["departure"]["standard_error"]
    gains = result.numbers["network"]["benefit"]
    for rule in (PAPER, USUAL):
        first, *_, last = (gain for gain in gains if gain["rule"] == rule.describe())
        gaps = [abs(gain["found"]["median"] / gain["promised"]["median"] - 1) for gain in (first, last)]
        assert gaps[1] < 0.3
        assert gaps[1] < gaps[0]


def test_exponents_are_found():
    """The fit gives back a power of the width and ignores the widths below the fitted ones."""
    settings = replace(TINY, widths=(4, 16, 32, 64), fitted_from=16)
    names = ("departure", "departure_last", "departure_of_rest", "log10_loss_linear", "log10_loss")
    rows = [
        {"part": "network", "rule": "r", "restart": "3", "width": width, "seed": seed}
        | dict.fromkeys(names, 2.0 * (width if width > 4 else 99) ** -0.75)
        for width in settings.widths
        for seed in range(2)
    ]
    fitted = fit(rows, {"rule": "r", "restart": "3"}, settings)["departure"]
    assert fitted["exponent"] == pytest.approx(-0.75)
    assert fitted["standard_error"] == pytest.approx(0, abs=1e-6)
    assert np.exp(fitted["intercept"]) == pytest.approx(2)


@pytest.mark.parametrize("restart", ["never", "3"])
def test_replicas_with_equal_data_change_nothing(data, inner: Inner, restart: str):
    """Two replicas with the data of one give the same bits, four too; three divide by three, which rounds."""
    alone = train(Network(16, 0, data), USUAL, restart, 6, inner)
    for count in (2, 3, 4):
        replicas = [Network(16, seed, data) for seed in range(count)]  # all begin at the first's parameters
        path = train(Network(16, 0, data), USUAL, restart, 6, inner, *replicas)
        np.testing.assert_allclose(path, alone, rtol=0, atol=0 if count != 3 else 1e-13)


@pytest.mark.slow
def test_tuning_never_hurts(result: Result):
    """More to tune cannot make the best promised loss worse, and tuning beats the rules that the study runs."""
    network = result.numbers["network"]
    tuned = network["tuned_log10_loss_linear"]
    assert tuned["with restarts"] <= tuned["without restarts"] <= tuned["without momentum"]
    width = max(result.settings["widths"])
    rows = [row for row in result.rows if row["part"] == "network" and row["width"] == width and row["seed"] == 0]
    for row in rows:
        best = tuned["with restarts"] if row["restart"] != "never" else tuned["without restarts"]
        assert best <= row["log10_loss_linear"] + 0.05  # the grid may miss a rule by a little


# --- different data -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_different_data(result: Result):
    """At one inner step halves are as good as the whole; at more they are not, but follow their own modes."""
    rows = [row for row in result.rows if row["part"] == "shards"]
    assert {row["restart"] != "never" for row in rows} == {True, False}
    for row in rows:
        is_single = row["inner_steps"] == 1
        for name in ("first_difference", "departure"):
            assert row[name] < 1e-12 if is_single else row[name] > 1e-2
        assert row["departure_exact"] < 1e-12


def test_modes_of_shards(model: Linearised, inner: Inner):
    """With one shard, or one inner step, they are the theory's; with several they lie in [0, 1] and are others."""
    pooled = modes_of(model, inner)
    np.testing.assert_allclose(modes_of_shards(model, [slice(None)], inner).sigma, pooled.sigma, rtol=0, atol=1e-12)
    single = modes_of_shards(model, HALVES, inner._replace(steps=1))
    np.testing.assert_allclose(single.sigma, modes_of(model, inner._replace(steps=1)).sigma, rtol=0, atol=1e-12)
    split = modes_of_shards(model, HALVES, inner)
    assert split.sigma.min() >= 0
    assert split.sigma.max() <= 1
    assert np.abs(split.sigma - pooled.sigma).max() > 1e-2
    np.testing.assert_allclose(split.inverse @ split.basis, np.eye(12), rtol=0, atol=1e-10)


# --- the study as a whole -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_answer_and_figures(result: Result):
    """The answer is what the numbers say: change one, and its line changes; all six panels have data and names."""
    text = linear_network.answer(result)
    assert "chi_K(sigma)" in text
    assert "Not covered" in text
    other = result.numbers["linear"] | {"contraction_deviation": 0.25}
    changed = linear_network.answer(replace(result, numbers=result.numbers | {"linear": other}))
    assert [a != b for a, b in zip(text.splitlines(), changed.splitlines(), strict=True)].count(True) == 1
    assert "to 2e-01" in changed
    with styled():
        figures = [linear_network.draw(result), *linear_network.details(result).values()]
    assert all(figure.get_suptitle() for figure in figures)
    panels = [panel for figure in figures for panel in figure.axes if panel.axison]
    assert len(panels) == 6
    for panel in panels:
        assert panel.lines
        assert panel.get_xlabel()
        assert panel.get_ylabel()


def test_without_scikit_learn(monkeypatch: pytest.MonkeyPatch):
    """A missing scikit-learn is told with the remedy."""
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(UsageError, match=r"scikit-learn.*pip install 'twophase\[digits\]'"):
        linear_network.table(quick=True)
