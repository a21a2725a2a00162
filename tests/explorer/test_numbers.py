"""The numbers of the page's model, in the browser's own JavaScript, against `twophase.theory`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import twophase.explorer
from twophase import theory
from twophase.restart import Soft
from twophase.rule import OuterRule

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.browser

Ask = Callable[[str, Any], list[Any]]
RULES = [
    OuterRule(lr, momentum, nesterov, form)
    for lr, momentum in ((0.7, 0.9), (1.0, 0.99), (0.05, 0.5), (2.5, 0.3), (1.0, 0.0))
    for nesterov, form in product((False, True), ("sum", "ema"))
]
SIGMAS = (1.0, 0.95, 0.6, 0.3, 0.05, 1e-3, 1e-6)
SIX = (0.95, 0.85, 0.75, 0.6, 0.45, 0.3)
ROUNDS = 300


@pytest.fixture(scope="module")
def ask(browser: Browser) -> Iterator[Ask]:
    """Evaluate an expression of a rule, and of the other values of its case, for each of several cases."""
    page = browser.new_page()
    page.add_script_tag(content=(Path(twophase.explorer.__file__).parent / "model.js").read_text(encoding="utf-8"))

    def evaluate(expression: str, cases: Any) -> list[Any]:
        plain = [(dataclasses.asdict(rule), *values) for rule, *values in cases]
        spelled = "(_, v) => Math.abs(v) === Infinity ? String(v) : v"  # JSON has no infinity
        return json.loads(page.evaluate(f"cases => JSON.stringify(cases.map({expression}), {spelled})", plain))

    yield evaluate
    page.close()


def numbers(values: list[Any]) -> np.ndarray:
    """Numbers that the page gave, infinities spelled out."""
    return np.array([np.nan if value is None else float(value) for value in values])


CASES = list(product(RULES, SIGMAS))


def test_restart_factors_are_those_of_the_theory(ask: Ask) -> None:
    """Signs and logs of chi_K for K up to 300 in every regime; next to zeros relative to the factors beside them."""
    shown = ask(
        "([rule, sigma]) => { const { sign, log } = theory.table(theory.modeOf(rule, sigma), 300); "
        "return [Array.from(sign), Array.from(log)]; }",
        CASES,
    )
    for (rule, sigma), (signs, logs) in zip(CASES, shown, strict=True):
        true_sign, true_log = (values[:, 0] for values in theory.restart_table(rule, [sigma], ROUNDS))
        assert (signs[0], logs[0]) == (1, 0)
        sign, log = np.array(signs[1:]), numbers(logs[1:])
        beside = np.pad(true_log, 1, mode="edge")
        scale = np.maximum.reduce([beside[:-2], beside[1:-1], beside[2:], np.full(ROUNDS, -1e300)])
        with np.errstate(over="ignore"):
            error = sign * np.exp(log - scale) - true_sign * np.exp(true_log - scale)
        assert np.abs(error).max() < 1e-9, (rule, sigma)
        slow = (true_log > -0.5) & (true_log < 0.5)
        np.testing.assert_allclose(log[slow], true_log[slow], rtol=1e-9, err_msg=f"{rule} {sigma}")


def test_modes_are_those_of_the_theory(ask: Ask) -> None:
    """Regime, rate, first cancellation, angle, and the interval of sigma in which a mode oscillates."""
    shown = ask(
        "([rule, sigma]) => { const mode = theory.modeOf(rule, sigma), turn = theory.oscillation(mode); return ["
        "theory.regime(mode), theory.rate(mode), turn?.cancellation ?? null, turn?.phase ?? null, "
        "...theory.oscillatory(rule)]; }",
        CASES,
    )
    for (rule, sigma), (regime, *values) in zip(CASES, shown, strict=True):
        assert regime == theory.regime(rule, sigma), (rule, sigma)
        true = [
            theory.asymptotic_rate(rule, sigma),
            theory.cancellation_periods(rule, sigma, 1)[0],
            theory.phase(rule, sigma),
            *theory.oscillatory_interval(rule),
        ]
        np.testing.assert_allclose(numbers(values), np.array(true, float), rtol=1e-8, err_msg=f"{rule} {sigma}")


RUNS = list(product(RULES, (SIX, (0.95,), (0.3, 0.02)), (20, 60), (0, 1, 4, 7, 90)))


def test_losses_and_best_periods_are_those_of_the_theory(ask: Ask) -> None:
    """log10 loss at the horizon under any period, as the map shows it, and the period with the lowest one."""
    shown = ask(
        "([rule, sigmas, rounds, restart]) => [theory.finalLoss(rule, sigmas, rounds, {restart, retain: 0, inject: 0}),"
        " theory.bestPeriod(sigmas.map(sigma => theory.table(theory.modeOf(rule, sigma), rounds)), rounds)]",
        RUNS,
    )
    for (rule, sigmas, rounds, restart), (loss, best) in zip(RUNS, shown, strict=True):
        periods = [restart or rounds, best or rounds]
        true, at_best = (float(theory.log_final_loss(rule, sigmas, rounds, period)) for period in periods)
        np.testing.assert_allclose(float(loss) * np.log(10), true, rtol=1e-8, err_msg=str((rule, sigmas)))
        lowest = min(theory.log_final_loss(rule, sigmas, rounds, range(1, rounds + 1)))
        assert at_best <= lowest + 1e-8 * abs(lowest)


def test_soft_restarts_are_those_of_the_theory(ask: Ask) -> None:
    """Residuals under soft restarts are the rollout's; the coefficients are those of the rule's own form."""
    cases = list(product(RULES, (0.95, 0.3), [(3, 0.2, 0.1), (4, -0.4, 0.8), (1, 0.5, 0.0)]))
    shown = ask(
        "([rule, sigma, [restart, retain, inject]]) => { const { sign, log } = "
        "theory.table(theory.modeOf(rule, sigma), 40, {restart, retain, inject}); "
        "return Array.from(sign, (value, t) => value * Math.exp(log[t])); }",
        cases,
    )
    for (rule, sigma, soft), residual in zip(cases, shown, strict=True):
        run = theory.rollout(rule, [sigma], 40, Soft(*soft)).residual[:, 0]
        size = np.maximum.accumulate(np.abs(run)[::-1])[::-1]  # what still is to come
        assert np.all(np.abs(numbers(residual) - run) <= 1e-9 * size + 1e-300), (rule, sigma, soft)
