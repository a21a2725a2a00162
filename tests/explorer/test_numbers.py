"""The page in headless Chromium: its numbers are the package's."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from typing import Any

import numpy as np
import pytest
from scipy.stats import kstest

from explorerview import PAPER, SIX, View, number, rule_of
from points import as_json, nasty_points, random_points
from twophase.explorer.page import POLICIES, State
from twophase.optim.schedules import Schedule
from twophase.restart import Never, mean_outer_gain, parse
from twophase.rule import OuterRule
from twophase.theory.advice import advise
from twophase.theory.advice import controls as theory_controls
from twophase.theory.contraction import log_restart_factor, restart_rate
from twophase.theory.inputs import rule_grid
from twophase.theory.modes import asymptotic_rate, effective_progress, phase, phase_shift, regime, transition
from twophase.theory.periods import cancellation_periods, heuristic_period, log_final_loss
from twophase.theory.rollout import rollout

pytestmark = pytest.mark.browser

HEIGHT = 3600
"""Of the window: every panel is in sight, for one that is not is drawn only when it comes."""


def close(text: str, true: float) -> bool:
    """Whether a number on the page is the true one to the four figures that it shows."""
    return text == "–" if math.isnan(true) else math.isclose(number(text), true, rel_tol=6e-4, abs_tol=1e-9)


def quickly(view: View, code: str, argument: Any) -> Any:
    """What a function of the page returns, much of it: as one text, for Playwright takes seconds with many values."""
    return json.loads(view.page.evaluate(f"text => JSON.stringify(({code})(JSON.parse(text)))", json.dumps(argument)))


def test_thousands_of_points_agree_with_the_theory(view: View) -> None:
    """log|chi| to a relative 1e-12 (1e-9 is promised), its sign, the regime, rates, phases and cancellations."""
    view.open()
    points = [*random_points(2000), *nasty_points()]
    code = """points => points.map(p => {
        const m = kernel.mode(p, p.sigma), t = kernel.table(m, p.period), o = kernel.oscillation(m);
        const text = v => v.map(x => Object.is(x, NaN) ? "nan" : String(x).replace("Infinity", "inf"));
        return [kernel.regime(m), ...text([t.sign[p.period], t.log[p.period], -kernel.logRadius(m),
            o ? o.phase : NaN, o ? o.shift : NaN, kernel.cancellations(m, 2)[1] ?? NaN,
            kernel.heuristic(m, true), kernel.heuristic(m, false)])];
    })"""
    results = quickly(view, code, as_json(points))
    rules = np.array([rule for rule, _, _ in points], dtype=object)
    sigma, period = np.array([p[1] for p in points]), np.array([p[2] for p in points])
    assert [row[0] for row in results] == regime(rules, sigma).tolist()
    numbers = np.array([[float(value) for value in row[1:]] for row in results]).T
    sign, log = log_restart_factor(rules, sigma, period)
    np.testing.assert_array_equal(numbers[0], sign)
    np.testing.assert_allclose(numbers[1], log, rtol=1e-12, atol=0)
    np.testing.assert_allclose(numbers[2], asymptotic_rate(rules, sigma), rtol=1e-12, atol=0)
    np.testing.assert_allclose(numbers[3], phase(rules, sigma), rtol=1e-12)
    np.testing.assert_allclose(numbers[4], phase_shift(rules, sigma), rtol=1e-12)
    np.testing.assert_allclose(numbers[5], cancellation_periods(rules, sigma, 2)[:, 1], rtol=1e-12)
    np.testing.assert_allclose(numbers[6], heuristic_period(rules, sigma), rtol=1e-12)
    np.testing.assert_allclose(numbers[7], heuristic_period(rules, sigma, corrected=False), rtol=1e-12)
    assert len(points) > 3000
    assert {"oscillatory", "critical", "real_below", "real_above", "negative_determinant", "nilpotent"} == {
        row[0] for row in results
    }


def test_progress_and_eigenvalues_agree(view: View) -> None:
    """Sigma from curvatures, and both eigenvalues of the one-round matrix, against NumPy's."""
    view.open()
    draw = np.random.default_rng(3)
    cases = [
        (float(10 ** draw.uniform(-9, 0)), float(draw.uniform(0, 1)), int(draw.integers(1, 3000))) for _ in range(200)
    ]
    cases += [(1.0, 1.0, 5), (0.0, 0.5, 7), (1e-300, 1.0, 3)]
    results = view.page.evaluate("cases => cases.map(c => kernel.effectiveProgress(...c))", cases)
    np.testing.assert_allclose(results, effective_progress(*map(np.array, zip(*cases, strict=True))), rtol=1e-13)
    points = random_points(300, seed=4)
    results = view.page.evaluate(
        "points => points.map(p => kernel.eigenvalues(kernel.mode(p, p.sigma)))", as_json(points)
    )
    for (rule, sigma, _), pair in zip(points, results, strict=True):
        matrix = transition(rule, sigma)
        for real, imaginary in pair:
            value = complex(real, imaginary)
            size = np.linalg.norm(matrix) * max(1.0, abs(value))
            assert abs(np.linalg.det(matrix - value * np.eye(2))) <= 1e-12 * size**2


STATES = {
    "paper": PAPER,
    "usual": State(),
    "one mode": State(1.0, 0.9, False, "ema", 5, 80, "one", sigma=0.95, mode=0),
    "slow": State(1.0, 0.9, False, "ema", 5, 120, "range", low=0.005, high=0.3, count=16, mode=15),
    "unstable": State(3.0, 0.9, True, "sum", 2, 40, "list", sigmas=(1.0, 0.4, 0.1), mode=0),
    "no momentum": State(0.7, 0.0, False, "sum", 0, 30, "list", sigmas=(0.9, 0.2), mode=1),
    "curvature": State(0.7, 0.9, True, "sum", 4, 60, "curvature", curvatures=(10, 3, 0.1), inner_steps=50, mode=2),
    "hardly any momentum": State(0.7, 1e-300, False, "sum", 0, 30, "list", sigmas=(0.9, 0.2), mode=1),
    "short": State(0.7, 0.9, True, "sum", 3, 1, "list", mode=0),
    "hardly any progress": State(1e-6, 0.999999, False, "ema", 0, 3, "list", sigmas=(0.9, 0.6), mode=0),
    "gone": State(1.0, 0.9, True, "sum", 3, 20, "list", sigmas=(1.0, 1.0), mode=0),
}


def modes_of(state: State) -> np.ndarray:
    """Effective progress of a state's modes, largest first."""
    values = {
        "one": [state.sigma],
        "list": state.sigmas,
        "range": np.linspace(state.low, state.high, state.count),
        "curvature": effective_progress(state.curvatures, state.inner_lr, state.inner_steps),
    }[state.spectrum]
    return np.sort(np.asarray(values))[::-1]


@pytest.mark.parametrize("name", STATES)
def test_what_is_shown_is_what_the_theory_says(view: View, name: str) -> None:
    """Readouts, the table of choices and the two forms: every displayed number equals the package's."""
    state = STATES[name]
    page, rule, sigma = view.show(state), rule_of(state), modes_of(state)
    advice, shown = advise(rule, sigma, rounds=state.rounds), view.readouts()
    log10 = 1 / math.log(10)
    chosen, cycle = sigma[state.mode], state.restart or state.rounds
    angle = float(phase(rule, chosen))
    expected = {
        "Spectral radius, ρ": math.exp(-asymptotic_rate(rule, chosen)),
        "Angle a round, φ": angle,
        "Cancellation, t₀": cancellation_periods(rule, chosen, 1)[0],
        "Then every, π/φ": math.pi / angle,
        "log₁₀ loss, no restart": advice.without.log_loss * log10,  # type: ignore[operator]
        "log₁₀ loss, restart": log_final_loss(rule, sigma, state.rounds, cycle) * log10,
    }
    for what, true in expected.items():
        assert close(shown[what], float(true)), (what, shown[what], true)
    period = advice.recommended.period
    assert shown["Recommended K"] == ("never" if period is None else str(period))
    same = theory_controls(rule, sigma, state.restart or None, state.rounds)
    gain = next(re.findall(r"mean gain \(lr ([\d.e+-]+)\)", text)[0] for text in same if "mean gain" in text)
    assert close(shown["Mean gain, restart"], float(gain))
    rows = view.cells("#choices tbody tr")
    for row, criterion in zip(rows, [*advice.criteria, advice.without], strict=False):
        assert row[1] == ("never" if criterion.period is None else str(criterion.period)), row
        assert close(row[2], criterion.rate), row
        assert close(row[3], criterion.log_loss * log10), row  # type: ignore[operator]
    for row, value in zip(rows[6:8], reversed(advice.heuristics), strict=True):
        assert math.isclose(number(row[0].split("(")[1].rstrip(")")), value, rel_tol=6e-3), row
    assert close(rows[8][3], float(expected["log₁₀ loss, restart"]))
    rates = [number(words) for words in page.inner_text("#controls").split(": ", 1)[1].split("; ")]
    assert rates == pytest.approx(list(same.values()), rel=6e-4, abs=1e-9)
    other = dataclasses.replace(rule, form="ema" if rule.form == "sum" else "sum")
    cells = {row[0]: row[1:] for row in view.cells("#forms tbody tr")}
    assert close(cells["Learning rate lr"][0], rule.to("sum").lr)
    assert close(cells["Learning rate lr"][1], rule.to("ema").lr)
    assert close(
        cells["log₁₀ loss, no restart"][1], float(log_final_loss(other, sigma, state.rounds, state.rounds)) * log10
    )
    again = advise(other, sigma, rounds=state.rounds).recommended.period
    words = "never" if again is None else "every round" if again == 1 else f"every {again} rounds"
    assert cells["Recommended restart"][1] == words


def test_curves_and_map_are_those_of_the_theory(view: View) -> None:
    """The tables that are downloaded: residuals, loss and rates of a simulation, and every cell of the map."""
    page = view.open()
    tables = {}
    for name in ("residual", "loss", "eigen", "rate", "map", "gain"):
        if name == "map":
            page.evaluate("() => { while (lossMap.work(1000)); }")
        with page.expect_download() as caught:
            page.locator(f"#{name} button", has_text="CSV").click()
        assert caught.value.suggested_filename == f"explore-{name}.csv"
        head, *lines = caught.value.path().read_text().splitlines()
        tables[name] = dict(zip(head.split(","), zip(*(line.split(",") for line in lines), strict=True), strict=True))
        assert "NaN" not in page.inner_html(f"#{name}")
        if name in ("residual", "map"):  # not of all: Chromium lets a page save ten files in a row
            with page.expect_download() as caught:
                page.locator(f"#{name} button", has_text="SVG").click()
            picture = caught.value.path().read_text()
            assert picture.startswith("<svg ")
            assert "NaN" not in picture

    def column(table: str, name: str) -> np.ndarray:
        return np.array([float(value.replace("Infinity", "inf")) for value in tables[table][name]])

    rule = rule_of(PAPER)
    for arm, restart in {"no_restart": "never", "restart": "7"}.items():
        run = rollout(rule, SIX, 120, restart)
        np.testing.assert_allclose(column("residual", f"residual_{arm}"), run.residual[:, 0], rtol=0, atol=1e-12)
        np.testing.assert_allclose(column("loss", f"log10_loss_{arm}"), np.log10(run.loss), atol=1e-9)
    assert np.all(np.abs(column("residual", "residual_no_restart")) <= column("residual", "envelope") * (1 + 1e-12))
    periods = np.arange(1, 121)
    slowest = restart_rate(rule, np.array(SIX)[:, None], periods).min(axis=0)
    np.testing.assert_allclose(column("rate", "rate_slowest_mode"), slowest, rtol=1e-9)
    losses = log_final_loss(rule, SIX, 120, periods) / np.log(10)
    np.testing.assert_allclose(column("rate", "log10_loss_at_horizon"), losses, rtol=1e-9)
    rules = rule_grid(column("map", "lr"), column("map", "momentum"), False, "ema")
    for name, period in {"log10_loss_no_restart": 120, "log10_loss_restart": 7}.items():
        true = log_final_loss(rules, np.tile(SIX, (len(rules), 1)), 120, period)
        np.testing.assert_allclose(column("map", name), np.asarray(true) / np.log(10), rtol=1e-6)


# --- policies, schedules and noise: run round by round ----------------------------------------------------------------

FACTORS = {
    "constant": lambda _share: 1.0,
    "linear": lambda share: 1 - share,
    "cosine": lambda share: (1 + math.cos(math.pi * share)) / 2,
}


def falling(name: str) -> Schedule:
    """The page's schedule of a name, of which the package has the linear one alone."""

    class Falling(Schedule):
        def at(self, rule: OuterRule, number: int, rounds: int) -> OuterRule:
            """Scale the learning rate."""
            return dataclasses.replace(rule, lr=rule.lr * FACTORS[name]((number - 1) / rounds))

    return Falling("linear")


USUAL, HEAVY = State(mode=0), State(0.2, 0.8, False, "sum", 4, 50, "list", sigmas=(0.9, 0.4, 0.1), mode=0)
RUNS = {
    "auto": dataclasses.replace(USUAL, policy="auto"),
    "auto in noise": dataclasses.replace(HEAVY, policy="auto", noise=0.2, seed=3),
    "auto without momentum": dataclasses.replace(HEAVY, policy="auto", momentum=0.0, noise=0.01),
    "cycle": dataclasses.replace(USUAL, policy="cycle:2,5", form="ema"),
    "at": dataclasses.replace(HEAVY, policy="at:4,9,20"),
    "soft": dataclasses.replace(USUAL, policy="soft:3:0.2:0.1"),
    "soft, ema": dataclasses.replace(HEAVY, policy="soft:4:-0.4:0.8", form="ema", schedule="linear", noise=0.05),
    "linear": dataclasses.replace(USUAL, schedule="linear"),
    "cosine, no restart": dataclasses.replace(HEAVY, schedule="cosine", restart=0),
    "noise": dataclasses.replace(USUAL, noise=0.3, seed=7),
    "all": dataclasses.replace(HEAVY, noise=0.1, schedule="cosine", nesterov=True, form="ema", restart=7),
}


@pytest.mark.parametrize("name", RUNS)
def test_simulated_runs_are_rollouts(view: View, name: str) -> None:
    """Residuals, losses, restarts and gains under policies, schedules and the page's noise are `rollout`'s."""
    state = RUNS[name]
    page, rule, sigma = view.show(state), rule_of(state), modes_of(state)
    result = page.evaluate(
        """() => {
            const { state, residual, modes, losses, restarts, gains } = app.model;
            const place = (j, t) => { const [sign, log] = residual(j, t); return sign * Math.exp(log); };
            return {
                draws: Array.from(simulation.draws(state.seed, state.rounds, modes.length)),
                residual: Array.from(losses.none, (_, t) => modes.map((_, j) => place(j, t))),
                none: Array.from(losses.none),
                restart: Array.from(losses.restart),
                restarts,
                gain: gains.restart,
            };
        }"""
    )
    noise = state.noise * np.array(result["draws"]).reshape(state.rounds, 1, len(sigma))
    policy = parse(state.policy or (str(state.restart) if state.restart else "never"))
    for arm, chosen in {"none": Never(), "restart": policy}.items():
        run = rollout(rule, sigma, state.rounds, chosen, schedule=falling(state.schedule), noise=noise)
        np.testing.assert_allclose(result[arm], np.log10(run.loss), rtol=1e-9, atol=1e-9)
        if arm == "restart":
            np.testing.assert_allclose(result["residual"], run.residual, rtol=1e-8, atol=1e-12)
            assert result["restarts"] == (np.flatnonzero(run.restarts[:-1]) + 1).tolist()
    if state.schedule == "constant" and not policy.needs:
        assert result["gain"] == pytest.approx(mean_outer_gain(rule, policy, state.rounds), rel=1e-9)
    else:
        assert policy.needs == frozenset() or result["gain"] is None or math.isnan(result["gain"])
    assert close(view.readouts()["log₁₀ loss, restart"], result["restart"][-1])


def test_the_map_of_simulated_runs(view: View) -> None:
    """Cells of the map under noise, a schedule and cycles equal rollouts of their rules."""
    state = dataclasses.replace(HEAVY, noise=0.1, policy="cycle:3,4", rounds=20)
    page = view.show(state)
    cells = page.evaluate("() => { while (lossMap.work(1000)); return lossMap.csv().slice(1); }")
    noise = 0.1 * np.array(page.evaluate("Array.from(simulation.draws(0, 20, 3))")).reshape(20, 1, 3)
    for lr, momentum, form, *losses in cells[::97]:
        rule = OuterRule(lr, momentum, False, form)
        for value, policy in zip(losses, ("never", "cycle:3,4"), strict=True):
            true = np.log10(rollout(rule, modes_of(state), 20, policy, noise=noise).loss[-1])
            assert value == pytest.approx(true, rel=1e-9, abs=1e-9)


def test_a_gain_below_zero_is_in_sight(view: View) -> None:
    """A soft restart with a negative share turns the buffer round: no point of the curve lies below the frame."""
    page = view.show(State(0.7, 0.9, False, "sum", 0, 12, policy="soft:3:-1:0"))
    ends = page.evaluate("app.model.gainAt.restart(3)")
    assert ends == pytest.approx(0.7 * (1 - 0.9 * 2.71))
    page.evaluate("stage.show()")
    *_, curve = page.eval_on_selector_all("#gain svg g[clip-path] path", "all => all.map(one => one.getAttribute('d'))")
    bottom = page.evaluate("Number(document.querySelector('#gain svg').getAttribute('height')) - 40")
    assert max(float(y) for y in re.findall(r",([\d.e+-]+)", curve)) <= bottom


@pytest.mark.parametrize("state", [State(), State(rounds=1), State(rounds=3, sigmas=(1.0, 1e-3))])
def test_the_colour_bar_of_the_map_is_named_where_its_colours_are(view: View, state: State) -> None:
    """Between the start, log10 of 1/2, and the lowest number, which ends it, every number stands in proportion."""
    page = view.show(state)
    page.evaluate("() => { while (lossMap.work(1000)); app.later(); }")
    view.drawn()
    texts = "all => all.map(text => [Number(text.getAttribute('x')), text.textContent])"
    start, *named = page.eval_on_selector_all("#map-bar text", texts)[:-1]  # the last is of what is worse
    assert start[1] == "start: loss ½"
    end, lowest = named[-1][0], number(named[-1][1].removeprefix("≤ "))
    for x, words in named[:-1]:
        share = (number(words) - math.log10(0.5)) / (lowest - math.log10(0.5))
        assert x == pytest.approx(start[0] + share * (end - start[0]), abs=0.1)


def test_noise_is_white_and_normal(view: View) -> None:
    """Draws have the moments and distribution of white noise, and are the same whatever the horizon and the modes."""
    view.open()
    draws = "all => all.map(one => Array.from(simulation.draws(...one)))"
    sizes = [(5, 2000, 50), (6, 2000, 50), (5, 20, 3)]
    results = zip(quickly(view, draws, sizes), sizes, strict=True)
    many, others, few = (np.array(values).reshape(size[1:]) for values, size in results)
    np.testing.assert_array_equal(few, many[:20, :3])
    error = 1 / math.sqrt(many.size)  # standard error of a mean of products
    for product in (many, many[1:] * many[:-1], many[:, 1:] * many[:, :-1], many * others, many**3):
        assert abs(product.mean()) < 4 * error * max(1, product.std())
    assert abs((many**2).mean() - 1) < 4 * math.sqrt(2) * error
    assert kstest(many.ravel(), "norm").pvalue > 1e-3


TEXTS = """auto auto:1 loss probe:keep,drop cycle:5,6,10 cycle:5 cycle: cycle:0,3 cycle:1.5 cycle
at:4,9 at:9,4 at:4,4 at:0 soft:3:0.2:0.1 soft:3:-0.4:0.8 soft:3:0.2 soft:0:1:1 soft:3:1e31:0 soft:3:nan:0
nothing constructor cycle:3.0,4 cycle:1e3 at:1e1 at:03 soft:3.0:0.2:0.1 soft:3:.2:-0 soft:3:1e-1:2.
""".split()


def test_policies_are_read_as_the_package_reads_them(view: View) -> None:
    """A text is a policy on the page exactly if it is one for `parse`."""
    results = view.open().evaluate("texts => texts.map(text => simulation.read(text) !== null)", TEXTS)

    def is_policy(text: str) -> bool:
        try:
            return isinstance(parse(text), POLICIES)
        except ValueError:
            return False

    assert dict(zip(TEXTS, results, strict=True)) == {text: is_policy(text) for text in TEXTS}


SAID = {
    "nothing moves": (State(sigmas=(0, 0), mode=0), "never", "Nothing moves, with or without restarts: every σ is 0."),
    "one that does not": (State(spectrum="one", sigma=0, mode=0), "never", "Nothing moves"),
    "some that do not": (State(sigmas=(0.5, 0), mode=0), None, "1 mode has σ 0 and is left out: nothing moves it."),
    "hardly any momentum": (State(momentum=1e-300), "never", "every restart slows every mode down."),
    "none": (State(momentum=0.0), "never", "Without momentum there is nothing to restart."),
    "all diverge": (State(lr=50.0), "never", "6 of 6 modes diverge, and a restart cannot make them stable:"),
    "grows": (State(0.78, 0.95, False, "sum", 1, 60, "one", sigma=1, mode=0), None, ""),
    "late": (State(restart=60), None, "A restart every 60 rounds comes after the end of 60 rounds: it is no restart."),
    "at once": (State(restart=1, rounds=1), None, "A restart every round comes after the end of 1 round:"),
}


@pytest.mark.parametrize("name", SAID)
def test_recommendation_and_warnings_do_not_contradict(view: View, name: str) -> None:
    """Never is recommended where nothing moves or oscillates, and no sentence speaks of what is not there."""
    state, best, said = SAID[name]
    page = view.show(state)
    words, text = page.inner_text("#warning"), view.readouts()["Recommended K"]
    assert said in words
    assert best is None or text == best
    assert ("is no momentum at all" in words) == (text == "1")
    assert not ("diverge" in said and "slows" in words)
    bold = page.inner_text("#choices tr.chosen button")
    assert bold == text
    assert not re.search(r"\b(every )?1 rounds", page.inner_text("body"))
    if state.restart >= state.rounds:
        assert "no restart within the horizon" in page.inner_html("#residual")


LEGENDS = [(0, "", 1), (5, "", 2), (60, "", 1), (5, "soft:3:0.2:0.1", 2)]


@pytest.mark.parametrize(("restart", "policy", "names"), LEGENDS)
def test_a_legend_names_each_curve_once(view: View, restart: int, policy: str, names: int) -> None:
    """Without a restart in the run both curves are one, in the residual, the loss and the gain."""
    page = view.show(State(restart=restart, policy=policy))
    for plot in ("#residual", "#loss", "#gain"):
        words = page.locator(f"{plot} svg text").all_text_contents()
        assert sum(bool(re.match("(no )?restart|soft", word)) for word in words) == names
