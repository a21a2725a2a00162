"""What the functions of the theory refuse, in one table: a ValueError that names the function and the argument.

Which values the checks themselves refuse is in test_inputs; here each function is shown to check each argument.
"""

from __future__ import annotations

import math
from typing import Any

import pytest

from oracle import HB, NAG, SIX
from policies import Half
from twophase import theory
from twophase.rule import OuterRule

RATES = [[0.1, 0.1]] * 3
PHASES = theory.inner_phases([1.0, 0.5], RATES, noise=1.0)
OF_A_MODE: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("effective_step", "transition", "regime", "asymptotic_rate", "phase", "phase_shift"), ()),
    **dict.fromkeys(("heuristic_period", "restart_can_help"), ()),
    **dict.fromkeys(("log_restart_factor", "restart_factor", "restart_rate", "restart_table"), (3,)),
    **dict.fromkeys(("soft_restart", "envelope"), (3,)),
    "cancellation_periods": (2,),
}
"""Functions of a rule and sigma, and their further arguments."""
OF_A_PERIOD = [name for name, rest in OF_A_MODE.items() if rest == (3,) and name != "envelope"]
OF_A_PERIOD += ["cycle_matrix", "hurt_share"]
COUNTED_FROM_0 = {"log_restart_factor", "restart_factor"}
each_function = pytest.mark.parametrize("name", OF_A_MODE)


def refused(name: str, message: str, *arguments: Any, **options: Any) -> None:
    """Assert that the call is refused with a message that begins with the function's name."""
    with pytest.raises(ValueError, match=f"^{name}: {message}"):
        getattr(theory, name)(*arguments, **options)


@each_function
def test_of_a_mode(name: str):
    """Each function refuses no rule, no sigma in [0, 1], shapes that do not broadcast and a step beyond 1e100."""
    rest = OF_A_MODE[name]
    for rule in (None, (0.7, 0.9), [HB, None]):
        refused(name, ".*rule is .*give an OuterRule such as", rule, 0.5, *rest)
    for sigma in (1.5, -5e-324, math.nan, "high"):
        refused(name, ".*sigma is", HB, sigma, *rest)
    refused(name, r"sigma\[1, 0\] is 1\.5; .*\[0, 1\]; effective_progress", HB, [[0.1, 0.2], [1.5, math.nan]], *rest)
    refused(name, ".*", [HB, NAG], [0.1, 0.2, 0.3], *rest)
    refused(name, ".*1e100", OuterRule(1.7e308, 0.9), 1.0, *rest)


@pytest.mark.parametrize("name", OF_A_PERIOD)
def test_of_a_period(name: str):
    """A period that is no whole number below 2^53, or 0 where that means nothing, is refused by each function."""
    for period in (-1, 2.5, True, 2**53, [], *([] if name in COUNTED_FROM_0 else [0])):
        refused(name, r"(max_)?period is .*whole number >= .*2\^53", HB, 0.5, period)
    if name == "restart_table":
        refused(name, "max_period is", HB, 0.5, [3, 4])
    else:
        refused(name, r"period\[1\] is -2", HB, 0.5, [1, -2])


REFUSED: list[tuple[str, tuple[Any, ...], dict[str, Any], str]] = [
    ("stable_limit", (0.7,), {}, "rule is .*give an OuterRule such as"),
    *[("envelope", (HB, 0.5, rounds), {}, "rounds") for rounds in ("soon", -1, math.nan, None, [1, -2])],
    ("effective_progress", ([0.5, 2.0], 1.0, 3), {}, "inner_lr \\* eigenvalue of mode 1 is 2; .*<= 1.*to 0\\.5"),
    ("effective_progress", (1.0, 1.0000000000000002, 3), {}, ".*1\\.0000000000000002.*<= 1"),
    ("effective_progress", ([0.5, 0.1, -0.2], 1.0, 3), {}, "eigenvalue\\[2\\] is -0\\.2.*>= 0"),
    ("effective_progress", (0.5, 1.0, 0), {}, "inner_steps is 0.*>= 1"),
    ("effective_progress", ([0.1, 0.2], [1.0, 0.5, 0.1], 3), {}, ".*\\(2,\\).*\\(3,\\)"),
    ("scheduled_progress", (-1.0, [0.1]), {}, "eigenvalue"),
    ("scheduled_progress", (1.0, [0.1]), {"weight_decay": math.nan}, ""),
    ("scheduled_progress", ([1.0, 3.0], [0.1, 0.5]), {}, "eigenvalue\\[1\\] is 3\\.0; times inner_lr 0\\.5 .*clip"),
    ("scheduled_progress", (1.0, [1.0]), {"weight_decay": 0.1}, ".*with the decay"),
    ("scheduled_progress", (1.0, [[1.0]]), {}, "inner_lrs have shape \\(1, 1\\)"),
    *[("cancellation_periods", (HB, 0.5, count), {}, "count") for count in (0, 1.5, -1, True, "2")],
    ("log_final_loss", (HB, [0.5, 1.5], 10, 3), {}, "sigma\\[1\\] is 1.5"),
    ("log_final_loss", (HB, 0.5, 2.5, 3), {}, "rounds is 2.5"),
    ("log_final_loss", (HB, 0.5, 10, 0), {}, "period is 0"),
    ("log_final_loss", (HB, 0.5, 10, 3, [1, 1]), {}, "weights have shape"),
    ("best_period", (HB, SIX), {"max_period": 2.5}, "max_period is 2.5"),
    ("best_period", (HB, SIX), {"max_period": 5, "rounds": 0}, "rounds is 0"),
    ("best_period", (HB, SIX), {"max_period": 5, "weights": [1, 1]}, "weights have shape"),
    ("best_period", (HB, SIX), {"max_period": 5, "objective": "lose"}, ".*one of loss, minimax, rate, factor"),
    ("best_period", (HB, SIX), {"max_period": 5, "objective": "loss"}, 'objective "loss" needs rounds'),
    ("block_periods", (HB, []), {"max_period": 5}, ""),
    ("block_periods", ([HB], [[0.5], [0.6]]), {"max_period": 5}, ""),
    ("block_periods", (HB, [[0.5]]), {"weights": [[1], [1]], "max_period": 5}, ""),
    ("hurt_share", (HB, [0.5], 3, [1, 2]), {}, "weights have shape"),
    ("soft_restart", (OuterRule(1.0, 0.0), 0.5, 3), {}, ".*momentum is 0"),
    ("soft_restart", (OuterRule(0.0, 0.5), 0.5, 3), {}, ".*lr is 0"),
    ("soft_restart", (HB, [0.5, 0.0], 3), {}, ".*sigma is 0"),
    ("soft_restart", (OuterRule(3.0, 0.5, False, "ema"), 1.0, 2), {}, ".*leaves no trace"),
    ("soft_restart", (HB, [0.5, 0.6], [1, 2, 3]), {}, "shapes do not broadcast: modes \\(2,\\), period \\(3,\\)"),
    ("chebyshev_rate", ([0.1, 0.2], [0.5, 0.6, 0.7]), {}, "shapes do not broadcast: sigma_min \\(2,\\), sigma_max"),
    ("chebyshev_rate", ([0.1, 0.2], 0.5, [1, 2, 3]), {}, "shapes do not broadcast: .*rounds \\(3,\\)"),
    ("log_final_loss", ([HB] * 2, [[0.1, 0.2]] * 3, 10, 5), {}, "shapes do not broadcast: rule \\(2, 1\\), sigma"),
    ("best_period", ([HB] * 2, [[0.1, 0.2]] * 3), {"max_period": 5}, "shapes do not broadcast: rule \\(2, 1\\)"),
    ("cycle_matrix", (HB, 0.5, 3, math.nan), {}, "retain is nan; it must be a finite number"),
    ("cycle_matrix", (HB, 0.5, 3, 0.0, math.inf), {}, "inject is inf; it must be a finite number"),
    ("mixed_periods", (HB, [0.5, 2]), {"max_period": 5}, "sigma\\[1\\] is 2"),
    ("mixed_periods", (HB, [0.5]), {"max_period": 2.5}, "max_period is 2.5"),
    ("best_schedule", (HB, SIX), {"rounds": 0, "max_period": 5}, "rounds is 0"),
    ("best_schedule", (HB, SIX), {"rounds": 9, "max_period": 5, "weights": [1]}, "weights have shape"),
    *[("chebyshev_rate", ends, {}, "") for ends in ((0.5, 0.3), (0, 0), (-0.1, 0.5), (0.1, 1.5), (math.nan, 0.5))],
    ("chebyshev_rate", (0.1, 0.5, 0), {}, "rounds is 0"),
    ("controls", (HB, SIX, 0, 24), {}, "period is 0; it must be a whole number >= 1"),
    ("controls", (HB, SIX, 3, 2.5), {}, "rounds is 2.5; it must be a whole number >= 1"),
    *[
        (name, (rule, SIX, *rest), options, "rule is .*give (one|an) OuterRule")
        for rule in ([HB, NAG],)
        for name, rest, options in (
            ("advise", (), {}),
            ("controls", (3,), {}),
            ("hurt_share", (3,), {}),
            ("mixed_periods", (), {"max_period": 4}),
            ("best_schedule", (), {"rounds": 9, "max_period": 5}),
        )
    ],
    *[
        (name, arguments, {"initial": [1.0, 2.0, 3.0]}, "shapes do not broadcast: .*initial \\(3,\\)")
        for name, arguments in (("moments", (HB, PHASES)), ("best_rates", (PHASES, [1.0, 0.5])))
    ],
    ("inner_phases", ([1, -1], RATES), {}, "eigenvalue\\[1\\] is -1"),
    ("inner_phases", ([1], [0.1]), {}, ".*inner_lrs"),
    ("inner_phases", ([1], RATES, -1), {}, "noise is"),
    ("inner_phases", ([1, 2], RATES, [1, 2, 3]), {}, ".*noise"),
    ("inner_phases", ([1], RATES, 1, 0), {}, "replicas is"),
    ("moments", (HB, PHASES, "auto"), {}, "restart policy auto"),
    ("moments", (0.7, PHASES), {}, "rule is"),
    ("moments", ([HB, NAG], PHASES, Half(3)), {}, "restart policy test-half:3 treats the rules unlike"),
    ("moments", (HB, PHASES), {"spread": -1}, "spread is"),
    ("best_rates", (PHASES, [1.0]), {}, ".*eigenvalue"),
    ("best_rates", (PHASES, [1.0, 0.5]), {"initial": -1}, "initial is"),
    ("best_rates", (PHASES, [1.0, 0.5]), {"initial": [[1.0, 1.0]]}, "initial has shape \\(1, 2\\)"),
    ("single_mode_rates", (theory.inner_phases([1.0], RATES),), {}, "variance"),
    ("single_mode_rates", (PHASES,), {"initial": 0}, "initial"),
    ("single_mode_rates", (PHASES,), {"initial": [1.0, 2.0, 3.0]}, "shapes do not broadcast: .*initial \\(3,\\)"),
    ("moments", (HB, PHASES), {"spread": [1.0, 2.0, 3.0]}, "shapes do not broadcast: .*spread \\(3,\\)"),
    ("advise", (HB, [0.0, 0.0]), {}, "no mode moves"),
    ("advise", (OuterRule(0.0, 0.9), [0.5]), {}, "no mode moves \\(lr 0, sigma 0.5\\)"),
    ("advise", (HB, [0.5]), {"weights": [1, 2]}, "weights have shape"),
    ("advise", (HB, [0.5]), {"max_period": 10**9}, "max_period is 1000000000; it must be at most 1,000,000"),
]
"""Function, arguments, options and what the message says after the function's name."""


@pytest.mark.parametrize(("name", "arguments", "options", "message"), REFUSED)
def test_ranges_of_their_own(name: str, arguments: tuple[Any, ...], options: dict[str, Any], message: str):
    """An argument outside the range that a function gives it is refused by name."""
    refused(name, message, *arguments, **options)
