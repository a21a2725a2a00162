"""The theory's numbers over regimes, rules and forms."""

from __future__ import annotations

import hashlib
from functools import partial
from typing import Any

import numpy as np

from differences import near
from suite import Outer, case, grid

TOLERANCE = 1e-9
"""Of the envelope; 0 would compare every bit. The recurrence is in float64, before it had twice the digits."""
SIGMAS = np.array([0.0, 1e-9, 1e-4, 0.003, 0.02, 0.0263, 0.05, 0.1, 0.22, 0.3, 0.45, 0.6, 0.75, 0.85, 0.95, 0.999, 1.0])
MODES = SIGMAS[4:]
MOMENTA, RATES = (0.0, 0.3, 0.7, 0.9, 0.99), (0.1, 0.7, 1.0, 1.6)
RULES = [Outer(**values) for values in grid(method=("heavy-ball", "nesterov"), form=("sum", "ema"))]


def rules(api: Any, kind: Outer) -> list[Any]:
    """Return the rules of a kind and form; one in sum form has the mean step of the other form."""
    made = []
    for momentum in MOMENTA:
        for lr in RATES:
            scale = 1 - momentum if kind.form == "sum" else 1.0
            made.append(api.rule(Outer(kind.method, lr * scale, momentum, kind.form)))
    return made


def numbers(values: Any, scale: Any = None) -> dict[str, Any]:
    """Return numbers, and while every bit counts a digest of them as well, which tells 0 from -0."""
    array = np.asarray(values, dtype=float)
    result = near(array.ravel(), TOLERANCE, None if scale is None else np.asarray(scale).ravel())
    return result if TOLERANCE else {"bits": hashlib.sha256(array.tobytes()).hexdigest()[:12], "numbers": result}


def factors(api: Any, kind: Outer) -> dict[str, Any]:
    """Compute restart factors of short periods by the table and of long ones alone, and their rates."""
    theory, result = api.theory, {}
    for index, each in enumerate(rules(api, kind)):
        sign, log = theory.restart_table(each, SIGMAS, 60)
        radius = -np.asarray(theory.asymptotic_rate(each, SIGMAS))  # log
        with np.errstate(all="ignore"):
            powers = np.exp(np.minimum(np.arange(1, 61)[:, None] * radius, 700))
            table = sign * np.exp(log)
        result[f"table {index}"] = numbers(table, np.maximum(powers, np.abs(table)))
        result[f"log {index}"] = numbers(theory.log_restart_factor(each, SIGMAS, [[1], [7], [100], [5000]])[1])
        result[f"rate {index}"] = numbers(theory.restart_rate(each, MODES, [[2], [9], [40]]))
    return result


def modes(api: Any, kind: Outer) -> dict[str, Any]:
    """Describe modes: regimes, rates, phases, envelopes, and whether a restart can help."""
    theory, result = api.theory, {}
    for index, each in enumerate(rules(api, kind)):
        envelope = theory.envelope(each, SIGMAS, [[0], [3], [30]])
        result[f"{index}"] = {
            "transition": numbers(theory.transition(each, SIGMAS)),
            "regime": np.asarray(theory.regime(each, SIGMAS)).tolist(),
            "rate": numbers(theory.asymptotic_rate(each, SIGMAS)),
            "phase": numbers(theory.phase(each, SIGMAS)),
            "shift": numbers(theory.phase_shift(each, SIGMAS), np.ones(SIGMAS.size)),
            "envelope": numbers(envelope),
            "oscillates between": numbers(theory.oscillatory_interval(each)),
            "stable below": numbers(theory.stable_limit(each)),
            "restart can help": (np.asarray(theory.restart_can_help(each, SIGMAS)) > 0).tolist(),
            "hurt by 3": numbers(theory.hurt_share(each, SIGMAS, 3)),
        }
    return result


def periods(api: Any, kind: Outer) -> dict[str, Any]:
    """Choose periods: cancellation, heuristic, oracle of a mode and of several, blocks, and the losses."""
    theory, result = api.theory, {}
    for index, each in enumerate(rules(api, kind)):
        best = partial(theory.best_period, each, max_period=60)
        blocks = [MODES[:4], MODES[4:9], MODES[9:]]
        result[f"{index}"] = {
            "cancellation": numbers(theory.cancellation_periods(each, SIGMAS, 3)),
            "rounded": np.asarray(theory.rounded_period(each, SIGMAS)).tolist(),
            "heuristic": [numbers(theory.heuristic_period(each, SIGMAS, corrected)) for corrected in (False, True)],
            "of a mode": [best(sigma) for sigma in MODES],
            "of all": [best(MODES, rounds=120), best(MODES, objective="rate"), best(MODES, objective="minimax")],
            "of all, paper": best(MODES, objective="factor"),
            "of blocks": list(theory.block_periods(each, blocks, max_period=40, rounds=120)),
            "log of the loss": numbers(theory.log_final_loss(each, MODES, 120, [1, 3, 10, 200])),
        }
    return result


def mixed(api: Any, kind: Outer) -> dict[str, Any]:
    """Mix periods by the linear program."""
    result = {}
    for momentum in (0.5, 0.9):
        each = api.rule(Outer(kind.method, 1.0 if kind.form == "ema" else 1 - momentum, momentum, kind.form))
        mix = api.theory.mixed_periods(each, np.linspace(0.3, 0.95, 41), max_period=40)
        rates = numbers([mix.rate, mix.fixed_rate, *mix.shares])
        result[str(momentum)] = {"periods": [*mix.periods, mix.fixed_period], "rates": rates}
    return result


def soft(api: Any, kind: Outer) -> dict[str, Any]:
    """Compute soft restarts and the matrix of a cycle."""
    theory, result = api.theory, {}
    for index, each in enumerate(rules(api, kind)):
        if each.momentum:
            retain, inject = theory.soft_restart(each, MODES, [[2], [3], [8]])
            cycle = theory.cycle_matrix(each, MODES, 3, 0.2, 0.1)
            result[f"{index}"] = [
                numbers(retain),
                numbers(inject),
                numbers(cycle, np.full(cycle.size, np.abs(cycle).max())),
            ]
    return result


def rollouts(api: Any, kind: Outer) -> dict[str, Any]:
    """Simulate policies with noise and without, and blocks with their own."""
    theory, result = api.theory, {}
    each = api.rule(Outer(kind.method, 0.9 if kind.form == "ema" else 0.2, 0.8, kind.form))
    for policy in ("never", "4", "cycle:3,5", "at:2,9,10", "soft:3:0.2:0.1", "auto"):
        for noise in ({}, {"noise": 0.1, "replicas": 3, "seeds": 2}):
            run = theory.rollout(each, MODES, 40, policy, **noise)
            name = f"{policy}, noise" if noise else policy
            result[name] = {
                "loss": numbers(run.loss),
                "residual": numbers(run.residual),
                "restarts": run.restarts.tolist(),
            }
    blocks = theory.rollout_blocks(
        [theory.Block([0.95], each, "5"), theory.Block([0.6, 0.5], each, "soft:7:0.1:0")], 35
    )
    return result | {"blocks": numbers(blocks.loss)}


for kind in RULES:
    for name, run in {
        "factors": factors, "modes": modes, "periods": periods, "mixed": mixed, "soft": soft, "rollouts": rollouts
    }.items():  # fmt: skip
        case(f"theory {name}, {kind.method}, {kind.form}", partial(run, kind=kind))


def progress(api: Any) -> dict[str, Any]:
    """Compute effective progress, and the Chebyshev bound."""
    theory, eigenvalues = api.theory, np.geomspace(1e-6, 80, 23)
    rates = 0.01 * np.cos(np.linspace(0, 1.5, 16))
    low, high = np.array([0.01, 0.1, 0.3]), np.array([0.5, 0.95, 1.0])
    return {
        "constant": numbers(theory.effective_progress(eigenvalues, 0.01, [[1], [16], [500]])),
        "scheduled": numbers(theory.scheduled_progress(eigenvalues, rates)),
        "Chebyshev": [numbers(theory.chebyshev_rate(low, high)), numbers(theory.chebyshev_rate(low, high, 20))],
    }


case("theory progress", progress)
