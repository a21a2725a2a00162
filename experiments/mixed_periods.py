"""What do mixed restart periods gain over one period, and over what a tuned rule without restarts does anyway?

Three comparisons. In the long run, on intervals of sigma: the best single period, the best mix (a linear program), the
ceiling of every schedule. After a finite run, on the paper's spectra: schedules of whole cycles. And the same question
when learning rate and momentum are tuned as well, where restarts have least to offer.

Source: theory notes R22 to R25, anchors A2 and A3.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

from common import Result, compute, select
from model import (
    HEAVY_BALL,
    KINDS,
    PLAIN,
    SIX,
    Curve,
    blocks,
    curve_rows,
    dot_chart,
    draw_losses,
    log10_loss,
    log_residuals,
    same_gain,
    tuned_momentum,
)
from twophase.figures.matplotlib_types import Axes, Figure
from twophase.figures.style import HATCH, INK, headline, look, new_figure, share_legend
from twophase.restart import AtRounds
from twophase.rule import OuterRule
from twophase.sweeps.table import format_table
from twophase.theory import (
    asymptotic_rate,
    best_period,
    chebyshev_rate,
    mixed_periods,
    restart_rate,
    rollout,
    rule_grid,
)

INTERVALS = ((0.3, 0.95), (0.1, 1.0), (0.02, 1.0))
LRS, MOMENTUM = (1.0, 7.0), 0.9
MODES, MAX_PERIOD = 241, 40
ROUNDS, SCHEDULE_MAX_PERIOD = 120, 20
SCHEDULES = {
    "six modes": {2: 1, 5: 2, 6: 7, 8: 2, 10: 4},
    "three blocks of 9": {3: 1, 5: 1, 6: 2, 7: 3, 12: 3, 14: 1, 15: 1},
}
"""Whole cycles by their length, short ones first: what a local search from the linear program's mix once found."""
SPECTRA = {"six modes": np.array(SIX), "three blocks of 9": np.concatenate(blocks())}
TUNED_ROUNDS, LARGEST_LR, LARGEST_MOMENTUM = 24, 4.0, 0.95
GRIDS = {"coarse": (80, 39), "fine": (160, 77)}
"""Learning rates up to 4 (sum form) and momenta from 0 to 0.95, over which rules are tuned."""
_COLUMNS = ("curve", "case")
Place: TypeAlias = tuple[tuple[float, float], str]
"""An interval of sigma and a key of `KINDS`."""
_RATES = {
    "none": ("no restart", 0),
    "fixed": ("best single period", 2),
    "mix": ("mix of periods", 5),
    "tuned_momentum": ("no restart, momentum tuned", 3),
    "sgd_gain": ("SGD, gain of best period", 6),
    "sgd_ema": ("SGD, same lr in EMA form", 7),
    "sgd_sum": ("SGD, same lr in sum form", 1),
    "sgd_tuned": ("SGD, lr tuned", 4),
}


def table(quick: bool = False) -> Result:
    """Compute asymptotic rates, loss curves of schedules, and rates of tuned rules; `quick`: fewer modes, one grid."""
    modes = 61 if quick else MODES
    grids = {"quick": (20, 10)} if quick else GRIDS
    kinds = [(ends, kind) for ends in INTERVALS for kind in KINDS]
    names = {(ends, kind): f"{ends[0]:g} to {ends[1]:g}, {kind}" for ends, kind in kinds}
    rates = {f"{name}, lr {lr:g}": _rates(place, lr, modes) for place, name in names.items() for lr in LRS}
    rows: list[dict[str, Any]] = [
        {"panel": "a", "case": case, "curve": name, "rate": facts[name]}
        for case, facts in rates.items()
        for name in [*_RATES, "chebyshev"]
    ]
    schedules = {}
    for panel, name in zip("bc", SPECTRA, strict=True):
        some, schedules[name] = _schedules(panel, name)
        rows += some
    tuned = {
        grid: {name: _tuned(place, sizes, modes) for place, name in names.items()} for grid, sizes in grids.items()
    }
    rows += [
        {"panel": "d", "case": f"{grid}: {case}", "curve": name, "rate": facts[name]}
        for grid, cases in tuned.items()
        for case, facts in cases.items()
        for name in ("none", "restart", "chebyshev", "sgd")
    ]
    settings = {
        "rates": f"nats a round, slowest of {modes} equispaced modes; momentum {MOMENTUM}, lr in EMA form; "
        f"periods up to {MAX_PERIOD}",
        "schedules": f"{HEAVY_BALL.describe()}, {ROUNDS} rounds, cycles up to {SCHEDULE_MAX_PERIOD}, short ones "
        "first; log10 of 1/2 sum w x^2, equal weights",
        "tuned": f"{TUNED_ROUNDS} rounds, worst mode; momentum 0 to {LARGEST_MOMENTUM}, lr up to {LARGEST_LR} (sum "
        "form); grids (lrs, momenta) " + ", ".join(f"{name} {sizes}" for name, sizes in grids.items()),
    }
    return Result(rows, {"rates": rates, "schedules": schedules, "tuned": tuned}, settings)


def _rates(place: Place, lr: float, modes: int) -> dict[str, Any]:
    """Compute asymptotic rates of the slowest mode of an interval."""
    (low, high), nesterov = place[0], KINDS[place[1]]
    rule = OuterRule(lr, MOMENTUM, nesterov, "ema")
    sigma = np.linspace(low, high, modes)
    mix = mixed_periods(rule, sigma, max_period=MAX_PERIOD)
    momenta = np.linspace(0, 0.99, 100)
    by_momentum = asymptotic_rate(rule_grid(lr, momenta, nesterov, "ema")[:, None], sigma).min(axis=1)

    # Polyak's values: every mode of the interval then has complex or double roots of one modulus.
    root = np.sqrt(low / high)
    polyak = OuterRule(4 / (np.sqrt(low) + np.sqrt(high)) ** 2, ((1 - root) / (1 + root)) ** 2)

    def plain(step: float) -> float:
        return float(np.min(restart_rate(OuterRule(step, 0.0), sigma, 1)))

    return {
        "none": float(np.min(asymptotic_rate(rule, sigma))),
        "fixed": mix.fixed_rate,
        "fixed_period": mix.fixed_period,
        "mix": mix.rate,
        "mix_shares": dict(zip(mix.periods, mix.shares, strict=True)),
        "chebyshev": float(chebyshev_rate(low, high)),
        "tuned_momentum": float(by_momentum.max()),
        "momentum": float(momenta[by_momentum.argmax()]),
        "heavy_ball_tuned": float(np.min(asymptotic_rate(polyak, sigma))),
        "sgd_gain": plain(same_gain(rule, mix.fixed_period, MAX_PERIOD * mix.fixed_period).lr),
        "sgd_ema": plain(lr),
        "sgd_sum": plain(rule.to("sum").lr),
        "sgd_tuned": plain(2 / (low + high)),
    }


def _schedules(panel: str, name: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Compute loss curves of one period, of a mix of periods, and of controls."""
    sigma, counts = SPECTRA[name], SCHEDULES[name]
    best = best_period(HEAVY_BALL, sigma, max_period=ROUNDS, rounds=ROUNDS)
    lengths = np.repeat(list(counts), list(counts.values()))
    schedule = AtRounds(tuple(np.cumsum(lengths).tolist()))
    momentum = tuned_momentum(sigma, ROUNDS, np.linspace(0, 0.99, 100), nesterov=False)
    gain = same_gain(HEAVY_BALL, best, ROUNDS)
    tuned = OuterRule(1.0, momentum["momentum"], form="ema")
    curves: dict[str, Curve] = {
        "none": ("no restart", HEAVY_BALL, "never"),
        "sgd_gain": (f"SGD, gain of K={best}", gain, "never"),
        "fixed": (f"K={best}", HEAVY_BALL, best),
        "mix": ("mixed periods", HEAVY_BALL, schedule),
        "sgd_ema": ("SGD, same lr", PLAIN, "never"),
        "tuned_momentum": (f"HB, β={tuned.momentum:.2f}, no restart", tuned, "never"),
    }
    rows = curve_rows([sigma], ROUNDS, curves, _COLUMNS, panel=panel)
    return rows, {
        "none": log10_loss(HEAVY_BALL, sigma, ROUNDS),
        "fixed_period": best,
        "fixed": log10_loss(HEAVY_BALL, sigma, ROUNDS, best),
        "mix": float(np.log10(rollout(HEAVY_BALL, sigma, ROUNDS, schedule).loss[-1])),
        "counts": counts,
        "tail": int(ROUNDS - lengths.sum()),
        "sgd": log10_loss(PLAIN, sigma, ROUNDS),
        "sgd_gain": log10_loss(gain, sigma, ROUNDS),
        "tuned_momentum": momentum,
    }


def _tuned(place: Place, sizes: tuple[int, int], modes: int) -> dict[str, Any]:
    """Compute the best worst-case rate of a finite run, lr and momentum tuned on a grid, with and without K."""
    (low, high), nesterov = place[0], KINDS[place[1]]
    lrs = np.linspace(0, LARGEST_LR, sizes[0] + 1)[1:]
    sigma = np.linspace(low, high, modes)
    best: dict[str, dict[str, Any]] = {"none": {"rate": -np.inf}, "restart": {"rate": -np.inf}}
    for momentum in np.linspace(0, LARGEST_MOMENTUM, sizes[1]).tolist():
        rules = rule_grid(lrs, momentum, nesterov)
        # The rate by every twelfth mode is an upper bound: rules below the best by it need no other modes.
        bound = -log_residuals(rules, sigma[::12], TUNED_ROUNDS)[1].max(axis=-1) / TUNED_ROUNDS
        promising = (bound[-1] >= best["none"]["rate"]) | (bound.max(axis=0) >= best["restart"]["rate"])
        if not promising.any():
            continue
        worst = log_residuals(rules[promising], sigma, TUNED_ROUNDS)[1].max(axis=-1)
        rates = -worst / TUNED_ROUNDS  # of shape (periods, learning rates); the last period is no restart
        for name, first in (("none", TUNED_ROUNDS - 1), ("restart", 0)):
            k, i = np.unravel_index(np.argmax(rates[first:]), rates[first:].shape)
            rate, period = float(rates[first + k, i]), first + int(k) + 1
            if rate > best[name]["rate"]:
                best[name] = {"rate": rate, "lr": float(lrs[promising][i]), "momentum": momentum, "period": period}
    return {
        "none": best["none"]["rate"],
        "restart": best["restart"]["rate"],
        "at": best,
        "chebyshev": float(chebyshev_rate(low, high, TUNED_ROUNDS)),
        "sgd": float(np.min(restart_rate(OuterRule(2 / (low + high), 0.0), sigma, 1))),
    }


# -------------------------------------------------------------------------------------------------- tables and figures


def tables(result: Result) -> str:
    """Write rates of the slowest mode, final losses of the schedules, and rates with tuned rules."""
    rates, schedules, tuned = (result.numbers[name] for name in ("rates", "schedules", "tuned"))
    keys = ("none", "fixed", "fixed_period", "mix", "chebyshev", "tuned_momentum", "sgd_tuned")
    ends = ("none", "fixed", "fixed_period", "mix", "sgd", "sgd_gain")
    finite = ("none", "restart", "chebyshev", "sgd")
    cases = {f"{grid}: {case}": facts for grid, some in tuned.items() for case, facts in some.items()}
    return "\n\n".join(
        format_table([head, *columns], [[name, *(f"{f[key]:.4g}" for key in columns)] for name, f in facts.items()])
        for head, columns, facts in (
            ("rate of the slowest mode", keys, rates),
            ("log10 loss", ends, schedules),
            (f"rate over {TUNED_ROUNDS} rounds, all tuned", finite, cases),
        )
    )


def figures(result: Result) -> dict[str, Figure]:
    """Draw rates by interval and rule, loss curves of schedules, and rates of tuned rules."""
    figure, grid = new_figure(5.0)
    _draw_rates(grid[0][0], select(result.rows, panel="a"))
    headline(
        figure,
        "Mixed periods are faster than one, and a tuned momentum is faster still",
        f"rate of the slowest mode in the long run, momentum {MOMENTUM}, lr in EMA form; further right is better",
    )
    share_legend(figure, grid[0])
    looks = {name: number for name, (_, number) in _RATES.items()}
    schedules, grid = new_figure(4.3, 1, 2)
    for panel, letter, name in zip(grid[0], "bc", result.numbers["schedules"], strict=True):
        draw_losses(panel, select(result.rows, panel=letter), _COLUMNS, looks, every=24)
        panel.set_title(name)
        panel.legend(loc="upper center", bbox_to_anchor=(0.45, -0.2), fontsize=7.5)
    headline(
        schedules,
        f"Mixed periods over {ROUNDS} rounds",
        f"log10 loss by outer round, lower is better; in brackets the last; {HEAVY_BALL.describe()}",
    )
    last = list(result.numbers["tuned"])[-1]
    tuned, grid = new_figure(4.0)
    _draw_tuned(grid[0][0], [row for row in select(result.rows, panel="d") if row["case"].startswith(f"{last}: ")])
    headline(
        tuned,
        "The best period, with learning rate and momentum tuned as well",
        f"rate of the worst mode over {TUNED_ROUNDS} rounds, further right is better; by interval of σ and rule",
    )
    share_legend(tuned, grid[0])
    return {"": figure, "-schedules": schedules, "-tuned": tuned}


def _draw_rates(axes: Axes, rows: list[Any]) -> None:
    cases = list(dict.fromkeys(row["case"] for row in rows))
    for place, case in enumerate(cases):
        rates = {row["curve"]: row["rate"] for row in select(rows, case=case)}
        ceiling = rates["chebyshev"]
        axes.plot([ceiling] * 2, [place - 0.4, place + 0.4], color=INK, linewidth=2.5,
                  label=None if place else "ceiling of every schedule (Chebyshev)")  # fmt: skip
        for name, (text, number) in _RATES.items():
            style = look(number, every=1) | {"linestyle": "none", "markersize": 4.5, "zorder": 3}
            axes.plot([max(rates[name], np.nan)], [place], label=None if place else text, **style)
    axes.set_xscale("log")
    axes.grid(axis="y", linewidth=0.4, color=HATCH)
    labels = [f"σ from {case}" for case in cases]
    dot_chart(axes, labels, xlabel="nats a round (log scale; rules that diverge are left out)")


def _draw_tuned(axes: Axes, rows: list[Any]) -> None:
    cases = list(dict.fromkeys(row["case"] for row in rows))
    names = {"none": ("no restart", "none", 0.2), "restart": ("best period", "fixed", -0.2)}
    for name, (text, like, shift) in names.items():
        rates = [row["rate"] for row in select(rows, curve=name)]
        places = [place - shift for place in range(len(cases))]
        axes.barh(places, rates, height=0.36, color=look(_RATES[like][1])["color"], label=text,
                  hatch="///" if name == "restart" else None, edgecolor="white", linewidth=0)  # fmt: skip
    for place, case in enumerate(cases):
        ceiling = select(rows, curve="chebyshev", case=case)[0]["rate"]
        label = None if place else "ceiling"
        axes.plot([ceiling] * 2, [place - 0.42, place + 0.42], color=INK, linewidth=2, label=label)
    labels = [case.split(": ")[1].replace(" to ", "–") for case in cases]
    axes.set_yticks(range(len(cases)), labels)
    axes.set(xlabel=f"nats a round, {TUNED_ROUNDS} rounds", ylim=(len(cases) - 0.4, -0.6))
    axes.spines[["top", "right"]].set_visible(False)


def main() -> None:
    """Run the experiment."""
    compute("mixed_periods", __doc__, table, figures, tables)


if __name__ == "__main__":
    main()
