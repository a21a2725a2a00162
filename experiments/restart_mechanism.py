"""How restarts use the oscillation of outer momentum: the paper's figure 1, with its settings and missing controls.

The paper states neither the range of K, nor NAG's grid of momenta, nor the blocks' numbers of modes, and shows no
momentum-free control. Here each is a setting, and what depends on it is printed.

Source: paper figure 1 and its details in the appendix; theory notes E1, E15, E18, R15, R20, R31, anchors A0 to A4.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

from common import Result, compute, select
from model import (
    HEAVY_BALL,
    NESTEROV,
    PLAIN,
    SIX,
    Curve,
    blocks,
    curve_rows,
    draw_losses,
    listed,
    log10_joint,
    log10_loss,
    same_gain,
    series,
    tuned_momentum,
)
from twophase.figures.matplotlib_types import Axes, Figure
from twophase.figures.style import INK, MUTED, headline, look, name_panels, new_figure, new_page, share_legend
from twophase.rule import OuterRule
from twophase.sweeps.table import format_table
from twophase.theory.contraction import restart_rate
from twophase.theory.inputs import rule_grid
from twophase.theory.modes import asymptotic_rate, envelope
from twophase.theory.periods import best_period, block_periods, cancellation_periods, heuristic_period
from twophase.theory.rollout import rollout

SIGMA, ROUNDS, ROUNDS_MANY, ROUNDS_SHOWN = 0.95, 80, 120, 60
SLOW_SIGMA = 0.1
FACTOR_MAX = {"single": 80, "six": 20}
"""The range of K in which the paper's criterion, least |chi_K|, is applied; the paper states none."""
BLOCK_MODES = (3, 5, 9, 21)
SHOWN_MODES = 9
FLOOR = -90.0
"""Panel (a) ends here; what goes deeper is written there."""
Rows: TypeAlias = list[dict[str, Any]]
_COLUMNS = ("kind", "curve")
_LOOKS = {"none": 0, "factor": 1, "global": 2, "nag": 3, "heuristic": 4, "own": 5, "gain": 6, "sgd": 7}


def table(quick: bool = False) -> Result:
    """Compute every panel's loss curves and exact final losses; `quick`: coarser grids for rules without restarts."""
    points = 201 if quick else 2001
    panels = {"single": _single(points), "six": _six(), "blocks": _blocks(), "oscillation": _oscillation()}
    settings = {
        "rule": HEAVY_BALL.describe(),
        "loss": "log10 of 1/2 sum w x^2, equal weights of sum 1, x = 1 and m = 0 at first",
        "single": {"sigma": SIGMA, "rounds": ROUNDS, "factor_max_period": FACTOR_MAX["single"]},
        "six": {"sigma": SIX, "rounds": ROUNDS_MANY, "factor_max_period": FACTOR_MAX["six"]},
        "blocks": {"sigma": [list(part) for part in blocks(SHOWN_MODES)], "rounds": ROUNDS_MANY},
        "tuned_momenta": {"single": f"{points} equispaced in each interval", "six, blocks": "0, 0.01, ..., 0.99"},
    }
    rows = [row for some, _ in panels.values() for row in some]
    return Result(rows, {name: facts for name, (_, facts) in panels.items()}, settings)


# ----------------------------------------------------------------------------------------------------------- panels


def _single(points: int) -> tuple[Rows, dict[str, Any]]:
    """Compute panel (a), one mode, and panel (f), the no-restart rules over momentum."""
    best = best_period(HEAVY_BALL, SIGMA, max_period=ROUNDS, rounds=ROUNDS)
    factors = {k: best_period(HEAVY_BALL, SIGMA, max_period=k, objective="factor") for k in (10, 20, 40, 80)}
    factor = factors[FACTOR_MAX["single"]]
    target = float(log10_loss(HEAVY_BALL, SIGMA, ROUNDS, best))
    whole = np.linspace(0, 0.999, points)
    grids = {
        "[0.5, 1)": np.linspace(0.5, 0.999, points),
        "[0.5, 1), coarser": np.linspace(0.5, 0.999, 101),
        "[0.3, 0.99]": np.linspace(0.3, 0.99, points),
        "0.5, 0.6, ..., 0.9": np.linspace(0.5, 0.9, 5),
        "0.1, 0.3, ..., 0.9": np.linspace(0.1, 0.9, 5),
        "[0, 1)": whole,
    }
    tuned = {name: tuned_momentum([SIGMA], ROUNDS, momenta, nesterov=True) for name, momenta in grids.items()}
    nag = OuterRule(1.0, tuned["[0.5, 1)"]["momentum"], nesterov=True, form="ema")
    gain = same_gain(HEAVY_BALL, best, ROUNDS)
    none = {
        name: log10_loss(rule_grid(1.0, whole, nesterov, "ema"), SIGMA, ROUNDS)
        for name, nesterov in (("NAG", True), ("HB", False))
    }
    curves: dict[str, Curve] = {
        "none": ("HB, no restart", HEAVY_BALL, "never"),
        "factor": (f"HB, K={factor}: least |χ|, K ≤ {FACTOR_MAX['single']}", HEAVY_BALL, factor),
        "heuristic": ("NAG, β=0.9, no restart", NESTEROV, "never"),
        "nag": (f"NAG, β={nag.momentum:.3f}: best in [0.5, 1)", nag, "never"),
        "global": (f"HB, K={best}: least loss", HEAVY_BALL, best),
        "gain": (f"SGD, gain of K={best}", gain, "never"),
        "sgd": ("SGD, same ν", PLAIN, "never"),
    }
    rows = curve_rows([[SIGMA]], ROUNDS, curves, _COLUMNS, panel="a")
    rows += [
        {"panel": "f", "kind": kind, "curve": f"{name}, no restart", "momentum": float(b), "log10_loss": float(v)}
        for name, kind in (("HB", "none"), ("NAG", "nag"))
        for b, v in zip(whole, none[name], strict=True)
    ]
    nesterov = log10_loss(NESTEROV, SIGMA, ROUNDS, range(1, ROUNDS + 1))
    return rows, {
        "none": log10_loss(HEAVY_BALL, SIGMA, ROUNDS),
        "best_period": best,
        "by_period": {k: log10_loss(HEAVY_BALL, SIGMA, ROUNDS, k) for k in (best, 15, 4, 6, factor)},
        "best": target,
        "factor_period": factor,
        "rate_period": best_period(HEAVY_BALL, SIGMA, max_period=ROUNDS, objective="rate"),
        "factor_period_by_max_period": factors,
        "nag_none": nesterov[-1],
        "nag_best_period": int(nesterov.argmin()) + 1,
        "nag_best": nesterov.min(),
        "nag_tuned": tuned,
        "sgd": log10_loss(PLAIN, SIGMA, ROUNDS),
        "sgd_same_gain": log10_loss(gain, SIGMA, ROUNDS),
        "gain": gain.lr,
        "momentum_up_to_which_all_beat_restart": {
            k: float(whole[np.argmin([*(v < target), False]) - 1]) for k, v in none.items()
        },
        "largest_momentum_that_beats_restart": {k: float(whole[v < target].max()) for k, v in none.items()},
    }


def _six() -> tuple[Rows, dict[str, Any]]:
    """Compute panel (b): one period for all modes, one for each, and the paper's criterion."""
    modes = [[s] for s in SIX]
    best = best_period(HEAVY_BALL, SIX, max_period=ROUNDS_MANY, rounds=ROUNDS_MANY)
    factors = {k: best_period(HEAVY_BALL, SIX, max_period=k, objective="factor") for k in (11, 20, ROUNDS_MANY)}
    factor = factors[FACTOR_MAX["six"]]
    by_mode = block_periods(HEAVY_BALL, modes, max_period=ROUNDS_MANY, rounds=ROUNDS_MANY)
    curves, controls = _many(SIX, best)
    curves |= {
        "factor": (f"HB, K={factor}: least Σχ², K ≤ {FACTOR_MAX['six']}", HEAVY_BALL, factor),
        "own": (f"HB, K={listed(by_mode)} per mode", HEAVY_BALL, by_mode),
    }
    curves = {kind: curves[kind] for kind in ("none", "factor", "gain", "global", "own", "sgd", "nag")}
    return curve_rows(modes, ROUNDS_MANY, curves, _COLUMNS, panel="b"), {
        "none": log10_loss(HEAVY_BALL, SIX, ROUNDS_MANY),
        "best_period": best,
        "by_period": {k: log10_loss(HEAVY_BALL, SIX, ROUNDS_MANY, k) for k in (3, 5, 6, best, factor)},
        "best": log10_loss(HEAVY_BALL, SIX, ROUNDS_MANY, best),
        "own_periods": by_mode,
        "own": log10_joint(HEAVY_BALL, modes, ROUNDS_MANY, by_mode),
        "factor_period_by_max_period": factors,
        "factor_period": factor,
        "factor": log10_loss(HEAVY_BALL, SIX, ROUNDS_MANY, factor),
        "minimax_period": best_period(HEAVY_BALL, SIX, max_period=ROUNDS_MANY),
    } | controls


def _blocks() -> tuple[Rows, dict[str, Any]]:
    """Compute panel (c): one period for all blocks, one for each, and the heuristics for it."""
    facts: dict[str, Any] = {}
    rows: Rows = []
    for modes in BLOCK_MODES:
        parts = blocks(modes)
        everything, means = np.concatenate(parts), np.array([part.mean() for part in parts])
        best = best_period(HEAVY_BALL, everything, max_period=ROUNDS_MANY, rounds=ROUNDS_MANY)
        periods = {
            "own": block_periods(HEAVY_BALL, parts, max_period=ROUNDS_MANY, rounds=ROUNDS_MANY),
            "heuristic": _heuristic(means, corrected=False),
            "corrected": _heuristic(means, corrected=True),
        }
        curves, controls = _many(everything, best)
        facts[str(modes)] = {
            "none": log10_loss(HEAVY_BALL, everything, ROUNDS_MANY),
            "best_period": best,
            "best": log10_loss(HEAVY_BALL, everything, ROUNDS_MANY, best),
            "periods": periods,
            **{kind: log10_joint(HEAVY_BALL, parts, ROUNDS_MANY, ks) for kind, ks in periods.items()},
            **controls,
        }
        if modes == SHOWN_MODES:
            names = {"factor": ("heuristic", "{}: paper's π/(2√s)"), "heuristic": ("corrected", "{}: corrected")}
            for kind, (which, name) in (names | {"own": ("own", "{} per block")}).items():
                curves[kind] = (f"HB, K={name.format(listed(periods[which]))}", HEAVY_BALL, periods[which])
            order = ("none", "gain", "global", "factor", "heuristic", "own", "sgd", "nag")
            curves = {kind: curves[kind] for kind in order}
            rows = curve_rows(parts, ROUNDS_MANY, curves, _COLUMNS, panel="c")
    return rows, facts


def _many(sigma: Any, best: int) -> tuple[dict[str, Curve], dict[str, Any]]:
    """Return curves of the best single period and of the controls without restarts, and the controls' losses."""
    gain, momenta = same_gain(HEAVY_BALL, best, ROUNDS_MANY), np.linspace(0, 0.99, 100)
    tuned = {kind: tuned_momentum(sigma, ROUNDS_MANY, momenta, nesterov=kind == "nag") for kind in ("hb", "nag")}
    nag = OuterRule(1.0, tuned["nag"]["momentum"], nesterov=True, form="ema")
    curves: dict[str, Curve] = {
        "none": ("HB, no restart", HEAVY_BALL, "never"),
        "gain": (f"SGD, gain of K={best}", gain, "never"),
        "global": (f"HB, K={best}: least loss", HEAVY_BALL, best),
        "sgd": ("SGD, same ν", PLAIN, "never"),
        "nag": (f"NAG, β={nag.momentum:.2f}: tuned", nag, "never"),
    }
    return curves, {
        "sgd": log10_loss(PLAIN, sigma, ROUNDS_MANY),
        "sgd_same_gain": log10_loss(gain, sigma, ROUNDS_MANY),
        "tuned_without_restart": tuned,
    }


def _heuristic(means: np.ndarray, *, corrected: bool) -> tuple[int, ...]:
    periods = np.floor([heuristic_period(HEAVY_BALL, mean, corrected) + 0.5 for mean in means.tolist()])
    return tuple(periods.clip(1, ROUNDS_MANY).astype(int).tolist())


def _oscillation() -> tuple[Rows, dict[str, Any]]:
    """Compute panels (d) and (e): the residual in both envelopes, and the times of its zeros."""
    rows: Rows = []
    facts: dict[str, Any] = {}
    times = np.arange(ROUNDS + 1)
    for panel, sigma in {"d": SIGMA, "-": 0.3, "e": SLOW_SIGMA}.items():
        residual = rollout(HEAVY_BALL, [sigma], ROUNDS).residual[:, 0]
        radius = np.exp(-times * asymptotic_rate(HEAVY_BALL, sigma))
        bound = np.asarray(envelope(HEAVY_BALL, sigma, times))
        zeros = cancellation_periods(HEAVY_BALL, sigma, 8)
        facts[str(sigma)] = {
            "first_zero": zeros[0],
            "largest_ratio_to_radius": float(np.max(np.abs(residual) / radius)),
            "largest_ratio_to_envelope": float(np.max(np.abs(residual) / bound)),
        }
        if panel in "de":
            rows += [
                {"panel": panel, "kind": "residual", "round": t, "residual": x, "radius": r, "envelope": e}
                for t, x, r, e in zip(times[: ROUNDS_SHOWN + 1].tolist(), residual, radius, bound, strict=False)
            ]
            rows += [
                {"panel": panel, "kind": "cancellation", "round": z, "residual": 0.0} for z in zeros if z < ROUNDS_SHOWN
            ]
    grid = np.linspace(0.0005, 1, 2000)
    helps = {k: restart_rate(HEAVY_BALL, grid, k) > asymptotic_rate(HEAVY_BALL, grid) for k in (3, 5, 7)}
    facts["lowest_sigma_that_gains"] = {k: float(grid[better].min()) for k, better in helps.items()}
    return rows, facts


# -------------------------------------------------------------------------------------------------- tables and figures


def tables(result: Result) -> str:
    """Write log10 of the final losses: without restarts, with the best period, with one for each, and of controls."""
    mode, six, osc = (result.numbers[name] for name in ("single", "six", "oscillation"))
    some = result.numbers["blocks"][str(SHOWN_MODES)]
    keys = ("none", "best_period", "best", "own", "heuristic", "corrected", "sgd_same_gain", "sgd")
    cases = {"one mode": mode, "six modes": six, f"three blocks of {SHOWN_MODES}": some}
    cells = [[name, *(_word(facts.get(key, "")) for key in keys)] for name, facts in cases.items()]
    ratio = osc[str(SLOW_SIGMA)]["largest_ratio_to_radius"]
    return "\n\n".join(
        [
            format_table(["", *keys], cells),
            format_table(
                ["tuned NAG, momenta", "log10 loss"],
                [[name, _word(best["log10_loss"])] for name, best in mode["nag_tuned"].items()],
            ),
            f"largest |x_t| / rho^t at sigma {SLOW_SIGMA}: {ratio:.3f}",
            f"lowest sigma that gains, by K: {osc['lowest_sigma_that_gains']}",
        ]
    )


def _word(value: Any) -> str:
    return str(value) if isinstance(value, (int, str)) else f"{float(value):.2f}"


def figures(result: Result) -> dict[str, Figure]:
    """Draw loss curves as in the paper, with the controls that it lacks; two modes' oscillation; tuned momenta."""
    return {"": _losses(result), "-oscillation": _oscillations(result), "-tuning": _tuning(result)}


def _losses(result: Result) -> Figure:
    figure = new_page(6.6)
    panels = figure.subplot_mosaic("aaabbb;ccc|||")
    titles = [f"one mode, σ={SIGMA}", "six modes", f"three blocks of {SHOWN_MODES} modes"]
    name_panels([panels[name] for name in "abc"], titles)
    for name in "abc":
        draw_losses(panels[name], select(result.rows, panel=name), _COLUMNS, _LOOKS)
    panels["a"].set_ylim(FLOOR, 4)
    # Outside the panels: inside, eight curves leave no room. To the right of (c) there is a free place.
    for name in "ab":
        panels[name].legend(loc="upper center", bbox_to_anchor=(0.5, -0.2))
    panels["|"].axis("off")
    panels["|"].legend(*panels["c"].get_legend_handles_labels(), loc="center left", title="(log₁₀ of the final loss)")
    headline(
        figure,
        "A good restart period lowers the loss; no momentum lowers it further",
        f"log10 loss by outer round, lower is better; {HEAVY_BALL.describe()}",
    )
    return figure


def _oscillations(result: Result) -> Figure:
    figure, grid = new_figure(3.4, 1, 2, sharey=True)
    for panel, name in zip(grid[0], "de", strict=True):
        _draw_oscillation(panel, select(result.rows, panel=name))
    name_panels(grid[0], [f"σ={SIGMA}", f"σ={SLOW_SIGMA}"])
    share_legend(figure, grid[0], columns=4)
    headline(
        figure,
        "A mode swings through zero, where a restart keeps it",
        f"residual of one mode without restarts, nearer to 0 is better; {HEAVY_BALL.describe()}",
    )
    return figure


def _tuning(result: Result) -> Figure:
    figure, grid = new_figure(3.4)
    _draw_tuning(grid[0][0], result)
    headline(
        figure,
        "A small momentum without restarts beats momentum 0.9 with them",
        f"log10 loss after {ROUNDS} rounds, lower is better; one mode, σ={SIGMA}, learning rate 1 (EMA form)",
    )
    share_legend(figure, grid[0])
    return figure


def _draw_oscillation(axes: Axes, rows: list[Any]) -> None:
    moves, zeros = select(rows, kind="residual"), select(rows, kind="cancellation")
    x = [row["round"] for row in moves]
    for sign in (1, -1):
        labels = {"bound": r"$\pm\sqrt{1+C^2}\,\rho^t$", "radius": r"$\pm\rho^t$"} if sign == 1 else {}
        axes.plot(x, [sign * row["envelope"] for row in moves], label=labels.get("bound"), **look(1))
        axes.plot(x, [sign * row["radius"] for row in moves], label=labels.get("radius"), **look(7))
    axes.axhline(0, color=MUTED, linewidth=0.5)
    axes.plot(x, [row["residual"] for row in moves], label="residual, no restart", **look(2))
    times = [row["round"] for row in zeros]
    axes.plot(times, [0] * len(times), "o", color=INK, label=r"cancellation times $t_\ell$")
    axes.set(xlabel="outer round", ylabel="residual $x_t$", xlim=(0, ROUNDS_SHOWN), ylim=(-1.25, 1.25))


def _draw_tuning(axes: Axes, result: Result) -> None:
    mode = result.numbers["single"]
    rows = select(result.rows, panel="f")
    for name in dict.fromkeys(row["curve"] for row in rows):
        some = select(rows, curve=name)
        axes.plot(*series(some, "momentum", "log10_loss"), label=name, **look(_LOOKS[some[0]["kind"]]))
    axes.axhline(mode["best"], label=f"HB, β=0.9, K={mode['best_period']}", **look(_LOOKS["global"]))
    axes.set(xlabel="outer momentum β", ylabel=f"log₁₀ loss at {ROUNDS}", xlim=(0, 1))


def main() -> None:
    """Run the experiment."""
    compute("restart_mechanism", __doc__, table, figures, tables)


if __name__ == "__main__":
    main()
