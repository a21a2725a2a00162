"""How restarts use the oscillation of outer momentum: the paper's figure 1, with its settings and missing controls.

The paper states neither the range of K, nor NAG's grid of momenta, nor the blocks' numbers of modes, and shows no
momentum-free control. Here each is a setting, and what depends on it is printed.

Source: paper figure 1 and its details in the appendix; theory notes E1, E15, E18, R15, R20, R31, anchors A0 to A4.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from twophase.figures.style import INK, MUTED, look, name_panels, new_page, signed
from twophase.policies.base import RestartPolicy
from twophase.rule import OuterRule
from twophase.studies._model import (
    HEAVY_BALL,
    NESTEROV,
    PLAIN,
    SIX,
    blocks,
    listed,
    log10_joint,
    log10_loss,
    loss_rows,
    nearest,
    same_gain,
    select,
    tuned_momentum,
    verdict,
)
from twophase.studies.study import Result
from twophase.theory.contraction import restart_rate
from twophase.theory.inputs import rule_grid
from twophase.theory.modes import asymptotic_rate, envelope
from twophase.theory.periods import best_period, block_periods, cancellation_periods, heuristic_period
from twophase.theory.rollout import Block, rollout, rollout_blocks

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

QUESTION = "Does restarting the outer momentum near its cancellations speed up quadratic modes (paper figure 1)?"

SIGMA, ROUNDS, ROUNDS_MANY, ROUNDS_SHOWN = 0.95, 80, 120, 60
SLOW_SIGMA = 0.1
FACTOR_MAX = {"single": 80, "six": 20}
"""The range of K in which the paper's criterion, least |chi_K|, is applied; the paper states none."""
BLOCK_MODES = (3, 5, 9, 21)
SHOWN_MODES = 9
FLOOR = -90.0
"""Panel (a) ends here; what goes deeper is written there."""
Rows: TypeAlias = list[dict[str, Any]]
_LOOKS = {"none": 0, "factor": 1, "global": 2, "nag": 3, "heuristic": 4, "own": 5, "gain": 6, "sgd": 7}


def table(*, quick: bool = False) -> Result:
    """Loss curves of every panel, and the exact final losses.

    Args:
        quick: 201 instead of 2001 momenta in the grids over which no-restart rules are tuned.
    """
    points = 201 if quick else 2001
    rows, numbers = [], {}
    for name, (some, facts) in {
        "single": _single(points),
        "six": _six(),
        "blocks": _blocks(),
        "oscillation": _oscillation(),
    }.items():
        rows += some
        numbers[name] = facts
    settings = {
        "rule": HEAVY_BALL.describe(),
        "loss": "log10 of 1/2 sum w x^2, equal weights of sum 1, x = 1 and m = 0 at first",
        "single": {"sigma": SIGMA, "rounds": ROUNDS, "factor_max_period": FACTOR_MAX["single"]},
        "six": {"sigma": SIX, "rounds": ROUNDS_MANY, "factor_max_period": FACTOR_MAX["six"]},
        "blocks": {"sigma": [list(part) for part in blocks(SHOWN_MODES)], "rounds": ROUNDS_MANY},
        "tuned_momenta": {"single": f"{points} equispaced in each interval", "six, blocks": "0, 0.01, ..., 0.99"},
    }
    return Result(rows, numbers, settings)


# ----------------------------------------------------------------------------------------------------------- panels


def _single(points: int) -> tuple[Rows, dict[str, Any]]:
    """Panel (a), one mode, and panel (f), the no-restart rules over momentum."""
    best = best_period(HEAVY_BALL, SIGMA, max_period=ROUNDS, rounds=ROUNDS)
    factor = best_period(HEAVY_BALL, SIGMA, max_period=FACTOR_MAX["single"], objective="factor")
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
    shown = OuterRule(1.0, tuned["[0.5, 1)"]["momentum"], nesterov=True, form="ema")
    gain = same_gain(HEAVY_BALL, best, ROUNDS)
    none = {
        "NAG": log10_loss(rule_grid(1.0, whole, True, "ema"), SIGMA, ROUNDS),
        "HB": log10_loss(rule_grid(1.0, whole, False, "ema"), SIGMA, ROUNDS),
    }
    rows = [
        *_curve("a", "none", "HB, no restart", HEAVY_BALL),
        *_curve("a", "factor", f"HB, K={factor}: least |χ|, K ≤ {FACTOR_MAX['single']}", HEAVY_BALL, period=factor),
        *_curve("a", "heuristic", "NAG, β=0.9, no restart", NESTEROV),
        *_curve("a", "nag", f"NAG, β={shown.momentum:.3f}: best in [0.5, 1)", shown),
        *_curve("a", "global", f"HB, K={best}: least loss", HEAVY_BALL, period=best),
        *_curve("a", "gain", f"SGD, gain of K={best}", gain),
        *_curve("a", "sgd", "SGD, same ν", PLAIN),
        *(
            {"panel": "f", "kind": kind, "curve": f"{name}, no restart", "momentum": float(b), "log10_loss": float(v)}
            for name, kind in (("HB", "none"), ("NAG", "nag"))
            for b, v in zip(whole, none[name], strict=True)
        ),
    ]
    nesterov = log10_loss(NESTEROV, SIGMA, ROUNDS, range(1, ROUNDS + 1))
    numbers = {
        "none": log10_loss(HEAVY_BALL, SIGMA, ROUNDS),
        "best_period": best,
        "by_period": {k: log10_loss(HEAVY_BALL, SIGMA, ROUNDS, k) for k in (best, 15, 4, 6, factor)},
        "best": target,
        "factor_period": factor,
        "rate_period": best_period(HEAVY_BALL, SIGMA, max_period=ROUNDS, objective="rate"),
        "factor_period_by_max_period": {
            k: best_period(HEAVY_BALL, SIGMA, max_period=k, objective="factor") for k in (10, 20, 40, 80)
        },
        "nag_none": nesterov[-1],
        "nag_best_period": int(nesterov.argmin()) + 1,
        "nag_best": nesterov.min(),
        "nag_tuned": tuned,
        "sgd": log10_loss(PLAIN, SIGMA, ROUNDS),
        "sgd_same_gain": log10_loss(gain, SIGMA, ROUNDS),
        "gain": gain.lr,
        "momentum_up_to_which_all_beat_restart": {k: _last_of_first_run(whole, v < target) for k, v in none.items()},
        "largest_momentum_that_beats_restart": {k: float(whole[v < target].max()) for k, v in none.items()},
    }
    return rows, numbers


def _six() -> tuple[Rows, dict[str, Any]]:
    """Panel (b): one period for all modes, one for each, and the paper's criterion."""
    best = best_period(HEAVY_BALL, SIX, max_period=ROUNDS_MANY, rounds=ROUNDS_MANY)
    factor = {k: best_period(HEAVY_BALL, SIX, max_period=k, objective="factor") for k in (11, 20, ROUNDS_MANY)}
    paper = factor[FACTOR_MAX["six"]]
    own = block_periods(HEAVY_BALL, [[s] for s in SIX], max_period=ROUNDS_MANY, rounds=ROUNDS_MANY)
    gain, tuned = same_gain(HEAVY_BALL, best, ROUNDS_MANY), _tuned_many(SIX)
    nag = OuterRule(1.0, tuned["nag"]["momentum"], nesterov=True, form="ema")
    rows = [
        *_curve("b", "none", "HB, no restart", HEAVY_BALL, sigma=SIX),
        *_curve(
            "b", "factor", f"HB, K={paper}: least Σχ², K ≤ {FACTOR_MAX['six']}", HEAVY_BALL, period=paper, sigma=SIX
        ),
        *_curve("b", "gain", f"SGD, gain of K={best}", gain, sigma=SIX),
        *_curve("b", "global", f"HB, K={best}: least loss", HEAVY_BALL, period=best, sigma=SIX),
        *_own_periods("b", "own", f"HB, K={listed(own)} per mode", [[s] for s in SIX], own),
        *_curve("b", "sgd", "SGD, same ν", PLAIN, sigma=SIX),
        *_curve("b", "nag", f"NAG, β={nag.momentum:.2f}: tuned", nag, sigma=SIX),
    ]
    numbers = {
        "none": log10_loss(HEAVY_BALL, SIX, ROUNDS_MANY),
        "best_period": best,
        "by_period": {k: log10_loss(HEAVY_BALL, SIX, ROUNDS_MANY, k) for k in (3, 5, 6, best, paper)},
        "best": log10_loss(HEAVY_BALL, SIX, ROUNDS_MANY, best),
        "own_periods": own,
        "own": log10_joint(HEAVY_BALL, [[s] for s in SIX], ROUNDS_MANY, own),
        "factor_period_by_max_period": factor,
        "factor_period": paper,
        "factor": log10_loss(HEAVY_BALL, SIX, ROUNDS_MANY, paper),
        "minimax_period": best_period(HEAVY_BALL, SIX, max_period=ROUNDS_MANY),
        "sgd": log10_loss(PLAIN, SIX, ROUNDS_MANY),
        "sgd_same_gain": log10_loss(gain, SIX, ROUNDS_MANY),
        "tuned_without_restart": tuned,
    }
    return rows, numbers


def _blocks() -> tuple[Rows, dict[str, Any]]:
    """Panel (c): one period for all blocks, one for each, and the heuristics for it."""
    facts: dict[str, Any] = {}
    rows: Rows = []
    for modes in BLOCK_MODES:
        parts = blocks(modes)
        everything = np.concatenate(parts)
        best = best_period(HEAVY_BALL, everything, max_period=ROUNDS_MANY, rounds=ROUNDS_MANY)
        periods = {
            "own": block_periods(HEAVY_BALL, parts, max_period=ROUNDS_MANY, rounds=ROUNDS_MANY),
            "heuristic": _heuristics(parts, corrected=False),
            "corrected": _heuristics(parts, corrected=True),
        }
        gain = same_gain(HEAVY_BALL, best, ROUNDS_MANY)
        facts[str(modes)] = {
            "none": log10_loss(HEAVY_BALL, everything, ROUNDS_MANY),
            "best_period": best,
            "best": log10_loss(HEAVY_BALL, everything, ROUNDS_MANY, best),
            "periods": periods,
            **{kind: log10_joint(HEAVY_BALL, parts, ROUNDS_MANY, list(ks)) for kind, ks in periods.items()},
            "sgd": log10_loss(PLAIN, everything, ROUNDS_MANY),
            "sgd_same_gain": log10_loss(gain, everything, ROUNDS_MANY),
            "tuned_without_restart": _tuned_many(everything),
        }
        if modes == SHOWN_MODES:
            nag = OuterRule(1.0, facts[str(modes)]["tuned_without_restart"]["nag"]["momentum"], True, "ema")
            own, paper, corrected = periods["own"], periods["heuristic"], periods["corrected"]
            rows = [
                *_curve("c", "none", "HB, no restart", HEAVY_BALL, sigma=everything),
                *_curve("c", "gain", f"SGD, gain of K={best}", gain, sigma=everything),
                *_curve("c", "global", f"HB, K={best}: least loss", HEAVY_BALL, period=best, sigma=everything),
                *_own_periods("c", "factor", f"HB, K={listed(paper)}: paper's π/(2√s)", parts, paper),
                *_own_periods("c", "heuristic", f"HB, K={listed(corrected)}: corrected", parts, corrected),
                *_own_periods("c", "own", f"HB, K={listed(own)} per block", parts, own),
                *_curve("c", "sgd", "SGD, same ν", PLAIN, sigma=everything),
                *_curve("c", "nag", f"NAG, β={nag.momentum:.2f}: tuned", nag, sigma=everything),
            ]
    return rows, facts


def _oscillation() -> tuple[Rows, dict[str, Any]]:
    """Panels (d) and (e): the residual in both envelopes, and the times at which it passes through 0."""
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


# ---------------------------------------------------------------------------------------------------------- helpers


def _curve(
    panel: str,
    kind: str,
    name: str,
    rule: OuterRule,
    *,
    period: int | None = None,
    sigma: Sequence[float] | np.ndarray = (SIGMA,),
) -> Rows:
    restart: RestartPolicy | str | int = "never" if period is None else period
    losses = rollout(rule, sigma, ROUNDS if panel == "a" else ROUNDS_MANY, restart).loss
    return loss_rows(losses, panel=panel, kind=kind, curve=name)


def _own_periods(panel: str, kind: str, name: str, parts: Sequence[Any], periods: Sequence[int]) -> Rows:
    each = [Block(part, HEAVY_BALL, period) for part, period in zip(parts, periods, strict=True)]
    return loss_rows(rollout_blocks(each, ROUNDS_MANY).loss, panel=panel, kind=kind, curve=name)


def _tuned_many(sigma: Any) -> dict[str, Any]:
    momenta = np.linspace(0, 0.99, 100)
    return {k: tuned_momentum(sigma, ROUNDS_MANY, momenta, nesterov=k == "nag") for k in ("hb", "nag")}


def _heuristics(parts: Sequence[np.ndarray], *, corrected: bool) -> tuple[int, ...]:
    means = [float(part.mean()) for part in parts]
    return tuple(nearest(heuristic_period(HEAVY_BALL, mean, corrected), ROUNDS_MANY) for mean in means)


def _last_of_first_run(grid: np.ndarray, good: np.ndarray) -> float:
    return float(grid[len(good) - 1 if good.all() else int(np.argmin(good)) - 1])


# ------------------------------------------------------------------------------------------------- answer and figure


def answer(result: Result) -> str:
    """What holds of the paper's figure 1, with controls, and what does not."""
    one, six, osc = (result.numbers[name] for name in ("single", "six", "oscillation"))
    some = result.numbers["blocks"][str(SHOWN_MODES)]
    tuned = one["nag_tuned"]
    ends = one["momentum_up_to_which_all_beat_restart"]
    lowest = osc["lowest_sigma_that_gains"]
    ordered = all(f["none"] > f["best"] > f["own"] for f in (six, some)) and one["none"] > one["best"]
    steps = all(f["best"] < f["sgd_same_gain"] for f in (one, six, some))
    replaces = min(one["sgd"] - one["best"], six["sgd"] - six["own"], some["sgd"] - some["own"]) > 0
    picks = one["factor_period_by_max_period"]
    return "\n".join(
        [
            f"log10 of the final loss; {HEAVY_BALL.describe()}.",
            f"One mode, sigma {SIGMA}, {ROUNDS} rounds: no restart {one['none']:.2f}, best K={one['best_period']} "
            f"{one['best']:.2f}; NAG at the same momentum {one['nag_none']:.2f}, with its best "
            f"K={one['nag_best_period']} {one['nag_best']:.1f}.",
            f"Six modes, {ROUNDS_MANY} rounds: no restart {six['none']:.2f}, best K={six['best_period']} "
            f"{six['best']:.2f}, a K per mode {six['own']:.2f}.",
            f"Three blocks of {SHOWN_MODES}: no restart {some['none']:.2f}, best K={some['best_period']} "
            f"{some['best']:.2f}, a K per block {listed(some['periods']['own'])} {some['own']:.2f}; by the paper's "
            f"heuristic {listed(some['periods']['heuristic'])} {some['heuristic']:.2f}, corrected "
            f"{listed(some['periods']['corrected'])} {some['corrected']:.2f}.",
            f"{verdict(ordered)}: 'one period is better than none, a period per block or mode better still'.",
            f"{verdict(steps)}: 'the gain is more than a smaller step': outer SGD with the mean gain of the restarted "
            f"rule (best K) has {one['sgd_same_gain']:.1f}, {six['sgd_same_gain']:.1f}, {some['sgd_same_gain']:.1f}.",
            f"{verdict(replaces)}: 'restarts replace tuning the momentum'. Outer SGD at the same learning rate has "
            f"{one['sgd']:.0f}, {six['sgd']:.1f}, {some['sgd']:.1f}. NAG without restart beats heavy ball with "
            f"K={one['best_period']} at every momentum up to {ends['NAG']:.3f}, heavy ball without up to "
            f"{ends['HB']:.3f}.",
            "'Tuned NAG' on the one mode is what its grid of momenta makes it: "
            + "; ".join(f"{name} {best['log10_loss']:.1f}" for name, best in tuned.items())
            + ". A single mode ends at exactly 0 at some momenta: the finer the grid, the deeper.",
            "The paper's criterion, least |chi_K|, is what its range of K makes it: on the one mode "
            f"{listed(picks.values())} for K up to {listed(picks)}, and K={one['factor_period']} has "
            f"{one['by_period'][one['factor_period']]:.1f}; on six modes K={six['factor_period']} has "
            f"{six['factor']:.2f}.",
            f"rho^t is no bound: |x_t| reaches {osc[str(SLOW_SIGMA)]['largest_ratio_to_radius']:.3f} rho^t at sigma "
            f"{SLOW_SIGMA}; sqrt(1+C^2) rho^t is. Slow modes lose by restarts: K=3, 5, 7 gain only from sigma "
            + ", ".join(f"{sigma:.3f}" for sigma in lowest.values())
            + " on.",
        ]
    )


def draw(result: Result) -> Figure:
    """Six panels: (a) to (d) as in the paper, (e) a slow mode, (f) what tuning momentum instead does."""
    figure = new_page(8.4)
    panels = figure.subplot_mosaic("aaabbb;ccc|||;ddeeff", height_ratios=(1, 1, 0.8))
    titles = [
        f"one mode, σ={SIGMA}",
        "six modes",
        f"three blocks of {SHOWN_MODES} modes",
        f"oscillation, σ={SIGMA}",
        f"oscillation, σ={SLOW_SIGMA}",
        "tuned momentum",
    ]
    name_panels([panels[name] for name in "abcdef"], titles)
    for name in "abc":
        _draw_losses(panels[name], select(result.rows, panel=name))
    panels["a"].set_ylim(FLOOR, 4)
    # Outside the panels: inside, eight curves leave no room. To the right of (c) there is a free place.
    for name in "ab":
        panels[name].legend(loc="upper center", bbox_to_anchor=(0.5, -0.2))
    panels["|"].axis("off")
    panels["|"].legend(*panels["c"].get_legend_handles_labels(), loc="center left", title="(log₁₀ of the final loss)")
    for name in "de":
        _draw_oscillation(panels[name], select(result.rows, panel=name))
    _draw_tuning(panels["f"], result)
    return figure


def _draw_losses(axes: Axes, rows: list[Any]) -> None:
    for number, name in enumerate(dict.fromkeys(row["curve"] for row in rows)):
        some = [row for row in rows if row["curve"] == name and row["log10_loss"] is not None]
        x, y = [row["round"] for row in some], [row["log10_loss"] for row in some]
        marks = (3 + 2 * number, x[-1] // 5)
        axes.plot(x, y, label=f"{name} ({signed(y[-1])})", **look(_LOOKS[some[0]["kind"]], every=marks))
    axes.set(xlabel="outer round", ylabel="log₁₀ loss", xlim=(0, rows[-1]["round"]))


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
    axes.legend(loc="upper center", bbox_to_anchor=(0.45, -0.28))


def _draw_tuning(axes: Axes, result: Result) -> None:
    one = result.numbers["single"]
    rows = select(result.rows, panel="f")
    for name in dict.fromkeys(row["curve"] for row in rows):
        some = [row for row in rows if row["curve"] == name]
        axes.plot(
            [row["momentum"] for row in some],
            [row["log10_loss"] for row in some],
            label=name,
            **look(_LOOKS[some[0]["kind"]]),
        )
    axes.axhline(one["best"], label=f"HB, β=0.9, K={one['best_period']}", **look(_LOOKS["global"]))
    axes.set(xlabel="outer momentum β", ylabel=f"log₁₀ loss at {ROUNDS}", xlim=(0, 1))
    axes.legend(loc="upper center", bbox_to_anchor=(0.45, -0.28))
