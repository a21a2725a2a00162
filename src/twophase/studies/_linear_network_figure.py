"""The figure of the study `linear_network`: contractions, departures, losses, benefit, and different data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from twophase.figures.style import MUTED, look, name_panels, new_figure, signed
from twophase.rule import OuterRule
from twophase.studies.study import Result
from twophase.theory.contraction import restart_factor

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Rows: TypeAlias = list[dict[str, Any]]

PAPER = OuterRule(1.0, 0.9, form="ema")
"""The rule of the paper's figure 1."""
USUAL = OuterRule(0.7, 0.9, nesterov=True)
"""DiLoCo's usual rule."""
AVERAGING = OuterRule(1.0, 0.0)
"""No momentum: the anchor becomes the mean of the replicas."""


def of_run(rows: Rows, rule: str, restart: str, **fixed: Any) -> Rows:
    """The lines of part `network`, or of another, of one rule and policy."""
    wanted = {"part": "network", "rule": rule, "restart": restart} | fixed
    return [row for row in rows if all(row.get(name) == value for name, value in wanted.items())]


def label(run: dict[str, Any]) -> str:
    """A run in few words."""
    if run["rule"] == AVERAGING.describe():
        return "averaging"
    if run["rule"].startswith("momentum-free"):
        return "matched gain"
    kind = "heavy ball" if run["rule"] == PAPER.describe() else "Nesterov"
    return f"{kind}, {'never' if run['restart'] == 'never' else 'K = ' + run['restart']}"


LOOKS = {"heavy ball, never": 0, "heavy ball, K": 1, "Nesterov, never": 2, "averaging": 3, "Nesterov, K": 4}
"""A curve's look, the same in all panels."""


def draw(result: Result) -> Figure:
    """Contractions, departure by width, losses at two widths, benefit by width, and different data."""
    figure, grid = new_figure(7.3, 3, 2)
    axes = list(grid.flat)
    ends = min(result.settings["widths"]), max(result.settings["widths"])
    draw_contractions(axes[0], result)
    draw_departures(axes[1], result)
    for panel, width in zip(axes[2:4], ends, strict=True):
        draw_losses(panel, result, width)
    draw_benefit(axes[4], result)
    draw_shards(axes[5], result)
    titles = ["Linear model: contraction of a cycle", "Network: departure from its linear model"]
    titles += [f"Loss, network of width {width}" for width in ends]
    titles += ["Benefit of restarts, promised and found", "Linear model, replicas with different data"]
    name_panels(axes, titles)
    return figure


def draw_contractions(axes: Axes, result: Result) -> None:
    """Measured contractions over the curve `|chi_K|`, for the periods that the theory chose."""
    sigma = np.linspace(0, 1, 2001)
    for rule, name in ((PAPER, "heavy ball, K"), (USUAL, "Nesterov, K")):
        rows = [row for row in result.rows if row["part"] == "linear" and row["rule"] == rule.describe()]
        rows = [row for row in rows if row["chosen"] and row["restart"] != "never"]
        period, style = int(rows[0]["restart"]), look(LOOKS[name], every=1)
        axes.plot(sigma, np.abs(restart_factor(rule, sigma, period)), color=style["color"], linewidth=0.9)
        style |= {"linestyle": "", "markerfacecolor": "none"}
        measured = [abs(row["contraction"]) for row in rows]
        axes.plot([row["sigma"] for row in rows], measured, label=f"{name} = {period}", **style)
    axes.set(yscale="log", ylim=(1e-6, 2), xlabel="effective progress $\\sigma$", ylabel="|contraction| of a mode")
    digit, power = f"{result.numbers['linear']['contraction_deviation']:.0e}".split("e")
    axes.legend(loc="lower left", title=f"deviation at most ${digit}\\times10^{{{int(power)}}}$")


def draw_departures(axes: Axes, result: Result) -> None:
    """Every network's largest departure and the fitted powers of the width."""
    widths = result.settings["widths"]
    fitted = np.array([result.settings["fitted_from"], max(widths)])
    for run in result.numbers["network"]["runs"]:
        name = label(run)
        if name not in {"heavy ball, never", "Nesterov, never", "averaging", f"heavy ball, K = {run['restart']}"}:
            continue  # Nesterov's largest departure comes before its first restart
        rows = of_run(result.rows, run["rule"], run["restart"])
        style, line = look(LOOKS[name.split(" =")[0]], every=1), run["departure"]
        places = [row["width"] for row in rows], [row["departure"] for row in rows]
        axes.plot(*places, color=style["color"], linestyle="", marker=style["marker"], alpha=0.5)
        power = np.exp(line["intercept"]) * fitted ** line["exponent"]
        name = f"{name}: {signed(line['exponent'], 2)} ± {line['standard_error']:.2f}"
        axes.plot(fitted, power, color=style["color"], linestyle=style["linestyle"], label=name)
    axes.set(xscale="log", yscale="log", ylim=(2e-5, 0.7), xlabel="width", ylabel="largest departure / first residual")
    name_widths(axes, widths)
    axes.legend(loc="lower left", title="exponent of the width")


def draw_losses(axes: Axes, result: Result, width: int) -> None:
    """Losses of network and linear model, with and without restarts, and of averaging."""
    for run in result.numbers["network"]["runs"][2:5]:
        rows = of_run(result.rows, run["rule"], run["restart"], part="curve", width=width)
        rounds, name = [row["round"] for row in rows], label(run)
        colour = look(LOOKS[name.split(" =")[0]])["color"]
        axes.plot(rounds, [10 ** row["log10_loss"] for row in rows], color=colour, label=name)
        axes.plot(rounds, [10 ** row["log10_loss_linear"] for row in rows], color=colour, linestyle=":")
    axes.plot([], [], color=MUTED, linestyle=":", label="its linear model")
    axes.set(yscale="log", ylim=(1e-7, 10), xlabel="round", ylabel="half the mean squared residual")
    axes.legend(loc="upper right", ncols=2)


def draw_benefit(axes: Axes, result: Result) -> None:
    """How many times lower restarts make the loss: medians, and the range over seeds."""
    for rule, name in ((PAPER, "heavy ball, K"), (USUAL, "Nesterov, K")):
        gains = [gain for gain in result.numbers["network"]["benefit"] if gain["rule"] == rule.describe()]
        widths, style = [gain["width"] for gain in gains], look(LOOKS[name], every=1)
        colour, text = style["color"], f"{name} = {gains[0]['restart']}"
        actual = np.array([[gain["found"][key] for key in ("low", "median", "high")] for gain in gains])
        bars: dict[str, Any] = {"yerr": np.diff(actual, axis=1).T, "capsize": 2, "elinewidth": 0.7}
        axes.errorbar(widths, actual[:, 1], color=colour, marker=style["marker"], label=f"{text}, network", **bars)
        promised = [gain["promised"]["median"] for gain in gains]
        axes.plot(widths, promised, color=colour, linestyle=":", label=f"{text}, linear model")
    axes.axhline(0, color=MUTED, linewidth=0.6)
    axes.set(xscale="log", xlabel="width", ylabel="log10 of loss, never over K")
    axes.set_ylim(bottom=axes.get_ylim()[0] - 0.5)
    name_widths(axes, result.settings["widths"])
    axes.legend(loc="lower right")


def draw_shards(axes: Axes, result: Result) -> None:
    """Departures of two replicas with halves of the data from the modes of all, and from their own."""
    rows = [row for row in result.rows if row["part"] == "shards" and row["restart"] != "never"]
    steps = [row["inner_steps"] for row in rows]
    names = {
        "first_difference": "first pseudo-gradient, pooled",
        "departure": "rounds, modes of pooled data",
        "departure_exact": "rounds, modes of mean progress",
    }
    for number, (column, name) in enumerate(names.items()):
        axes.plot(steps, [row[column] for row in rows], label=name, **look(number, every=1))
    axes.set(xscale="log", yscale="log", xlabel="inner steps S", ylabel="relative departure", ylim=(1e-16, 30))
    name_widths(axes, steps)
    axes.legend(loc="center", bbox_to_anchor=(0.62, 0.5))


def name_widths(axes: Axes, values: list[int] | tuple[int, ...]) -> None:
    """A tick at every value of a logarithmic axis."""
    axes.set_xticks(values, [str(value) for value in values])
    axes.minorticks_off()
