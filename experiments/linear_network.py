"""Does the mode theory, restarts included, hold in the training of a network?

A network linear in its parameters is `f(theta) = f0 + J (theta - theta0)`. Under gradient descent on squared loss its
residual modes are the theory's. With the kernel `J J^T / n = U diag(lambda) U^T` the mode `x_j = (U^T (f - y))_j` has
effective progress `sigma_j = 1 - (1 - eta lambda_j)^S`. A cycle of K rounds multiplies it by `chi_K(sigma_j)`. A wide
network is nearly linear; how nearly is measured here, and so is what replicas with different data do, which the theory
leaves out.

Everything is trained in parameter space, by `DiLoCo` with `torch.optim.SGD` inside, in float64. Data: scikit-learn's
digits, two classes with targets 1 and -1, full batches. Network: one hidden layer, tanh, in the parameterisation whose
kernel has a limit in width. Losses are half the mean squared residual.

Source: paper section 2, section 3 and appendix A.1; theory notes R1, R5, R20, R25, R31. How fast wide networks become
linear: at least as width^-1/2 (arXiv 1902.06720), as 1/width in an expansion (arXiv 1909.11304).
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np

import digits
from common import Result, compute, select
from model import AVERAGING, HEAVY_BALL, USUAL, signed
from twophase.figures.matplotlib_types import Axes, Figure
from twophase.figures.style import MUTED, headline, look, name_panels, new_figure
from twophase.sweeps.table import format_table
from twophase.theory import restart_factor


def table(quick: bool = False) -> Result:
    """Train the linear model, networks of several widths, and the linear model on halves of the data."""
    settings = digits.QUICK if quick else digits.FULL
    rows, numbers = digits.measured(settings)
    return Result(rows, numbers, asdict(settings))


# -------------------------------------------------------------------------------------------------- tables and figures


def tables(result: Result) -> str:
    """Write deviations from the theory, the network's departure by width, and the last losses of all rules."""
    linear, network, shards = (result.numbers[part] for part in ("linear", "network", "shards"))
    high = max(result.settings["widths"])
    runs = [
        [label(run), f"{run['departure']['exponent']:.2f}", f"{run['median_log10_loss'][high]:.2f}"]
        for run in network["runs"]
    ]
    tuned = network["tuned_log10_loss_linear"]
    facts = {
        "modes of the linear model, of the first residual": f"{linear['residual_deviation']:.0e}",
        "contractions of a cycle": f"{linear['contraction_deviation']:.0e}",
        "halves of the data: pooled modes": f"{shards['largest_departure']:.2f}",
        "halves of the data: modes of the mean progress": f"{shards['largest_departure_exact']:.0e}",
        **{f"tuned log10 loss {name}": f"{value:.2f}" for name, value in tuned.items()},
    }
    return "\n\n".join(
        [
            format_table(["departure of", "at most"], list(facts.items())),
            format_table(["", "departure as width to the", f"log10 loss at width {high}"], runs),
        ]
    )


def label(run: dict[str, Any]) -> str:
    """Name a run in few words."""
    if run["rule"] == AVERAGING.describe():
        return "averaging"
    if run["rule"].startswith("momentum-free"):
        return "matched gain"
    kind = "heavy ball" if run["rule"] == HEAVY_BALL.describe() else "Nesterov"
    return f"{kind}, {'no restart' if run['restart'] == 'never' else 'K = ' + run['restart']}"


LOOKS = {"heavy ball, no restart": 0, "heavy ball, K": 1, "Nesterov, no restart": 2, "averaging": 3, "Nesterov, K": 4}
"""A curve's look, the same in all panels."""


def figures(result: Result) -> dict[str, Figure]:
    """Draw contractions and departures, what restarts gain by width, and replicas with different data."""
    figure, grid = new_figure(3.6, 1, 2)
    _draw_contractions(grid[0][0], result)
    _draw_departures(grid[0][1], result)
    name_panels(grid[0], ["Linear model: contraction of a cycle", "Network: departure from its linear model"])
    headline(
        figure,
        "The theory is exact for a linear model, and a wide network is nearly one",
        "curves: theory, markers: measured; left: lower contracts faster; right: lower is closer to the theory",
    )
    shards, grid = new_figure(3.4)
    _draw_shards(grid[0][0], result)
    headline(
        shards,
        "Replicas with different data need the modes of the mean progress",
        "relative departure of the linear model from the theory, lower is closer; heavy ball, halves of the data",
    )
    return {"": figure, "-benefit": _benefit(result), "-shards": shards}


def _benefit(result: Result) -> Figure:
    widths = result.settings["widths"]
    figure, grid = new_figure(5.6, 2, 2)
    axes, ends = list(grid.flat), (min(widths), max(widths))
    for panel, width in zip(axes, ends, strict=False):
        _draw_losses(panel, result, width)
    _draw_benefit(axes[2], result)
    axes[3].set_axis_off()
    name_panels(axes[:3], [*(f"Network of width {width}" for width in ends), "What restarts gain, by width"])
    headline(
        figure,
        "The wider the network, the more of the promised gain it has",
        "loss: lower is better; gain: higher is better; medians, bars from the lowest seed to the highest",
    )
    return figure


def _draw_contractions(axes: Axes, result: Result) -> None:
    """Draw measured contractions over the curve `|chi_K|`, for the periods that the theory chose."""
    sigma = np.linspace(0, 1, 2001)
    for rule, name in ((HEAVY_BALL, "heavy ball, K"), (USUAL, "Nesterov, K")):
        rows = select(result.rows, part="linear", rule=rule.describe(), chosen=True)
        rows = [row for row in rows if row["restart"] != "never"]
        period, style = int(rows[0]["restart"]), look(LOOKS[name], every=1)
        axes.plot(sigma, np.abs(restart_factor(rule, sigma, period)), color=style["color"], linewidth=0.9)
        style |= {"linestyle": "", "markerfacecolor": "none"}
        measured = [abs(row["contraction"]) for row in rows]
        axes.plot([row["sigma"] for row in rows], measured, label=f"{name} = {period}", **style)
    axes.set(yscale="log", ylim=(1e-6, 2), xlabel="effective progress $\\sigma$", ylabel="|contraction| of a mode")
    digit, power = f"{result.numbers['linear']['contraction_deviation']:.0e}".split("e")
    axes.legend(loc="lower left", title=f"deviation at most ${digit}\\times10^{{{int(power)}}}$")


def _draw_departures(axes: Axes, result: Result) -> None:
    """Draw every network's largest departure and the fitted powers of the width."""
    widths = result.settings["widths"]
    fitted = np.array([result.settings["fitted_from"], max(widths)])
    for run in result.numbers["network"]["runs"]:
        name = label(run)
        if name == "matched gain" or name.startswith("Nesterov, K"):
            continue  # Nesterov's largest departure comes before its first restart
        rows = select(result.rows, part="network", rule=run["rule"], restart=run["restart"])
        style, line = look(LOOKS[name.split(" =")[0]], every=1), run["departure"]
        places = [row["width"] for row in rows], [row["departure"] for row in rows]
        axes.plot(*places, color=style["color"], linestyle="", marker=style["marker"], alpha=0.5)
        power = np.exp(line["intercept"]) * fitted ** line["exponent"]
        name = f"{name}: {signed(line['exponent'], 2)} ± {line['standard_error']:.2f}"
        axes.plot(fitted, power, color=style["color"], linestyle=style["linestyle"], label=name)
    axes.set(xscale="log", yscale="log", ylim=(2e-5, 0.7), xlabel="width", ylabel="largest departure / first residual")
    _name_widths(axes, widths)
    axes.legend(loc="lower left", title="exponent of the width")


def _draw_losses(axes: Axes, result: Result, width: int) -> None:
    """Draw losses of network and linear model, with and without restarts, and of averaging."""
    for run in result.numbers["network"]["runs"][2:5]:
        rows = select(result.rows, part="curve", width=width, rule=run["rule"], restart=run["restart"])
        rounds, name = [row["round"] for row in rows], label(run)
        colour = look(LOOKS[name.split(" =")[0]])["color"]
        axes.plot(rounds, [10 ** row["log10_loss"] for row in rows], color=colour, label=name)
        axes.plot(rounds, [10 ** row["log10_loss_linear"] for row in rows], color=colour, linestyle=":")
    axes.plot([], [], color=MUTED, linestyle=":", label="its linear model")
    axes.set(yscale="log", ylim=(1e-7, 10), xlabel="round", ylabel="half the mean squared residual")
    axes.legend(loc="upper right", ncols=2)


def _draw_benefit(axes: Axes, result: Result) -> None:
    """Draw the factors by which restarts lower the loss: medians, and the range over seeds."""
    for rule, name in ((HEAVY_BALL, "heavy ball, K"), (USUAL, "Nesterov, K")):
        gains = select(result.numbers["network"]["benefit"], rule=rule.describe())
        widths, style = [gain["width"] for gain in gains], look(LOOKS[name], every=1)
        colour, text = style["color"], f"{name} = {gains[0]['restart']}"
        actual = np.array([[gain["found"][key] for key in ("low", "median", "high")] for gain in gains])
        bars: dict[str, Any] = {"yerr": np.diff(actual, axis=1).T, "capsize": 2, "elinewidth": 0.7}
        axes.errorbar(widths, actual[:, 1], color=colour, marker=style["marker"], label=f"{text}, network", **bars)
        promised = [gain["promised"]["median"] for gain in gains]
        axes.plot(widths, promised, color=colour, linestyle=":", label=f"{text}, linear model")
    axes.axhline(0, color=MUTED, linewidth=0.6)
    axes.set(xscale="log", xlabel="width", ylabel="log10 of loss, no restart over K")
    axes.set_ylim(bottom=axes.get_ylim()[0] - 0.5)
    _name_widths(axes, result.settings["widths"])
    axes.legend(loc="lower right")


def _draw_shards(axes: Axes, result: Result) -> None:
    """Draw departures of two replicas with halves of the data from the modes of all data and of the halves."""
    rows = [row for row in select(result.rows, part="shards") if row["restart"] != "never"]
    steps = [row["inner_steps"] for row in rows]
    names = {
        "first_difference": "first pseudo-gradient, pooled",
        "departure": "rounds, modes of pooled data",
        "departure_exact": "rounds, modes of mean progress",
    }
    for number, (column, name) in enumerate(names.items()):
        axes.plot(steps, [row[column] for row in rows], label=name, **look(number, every=1))
    axes.set(xscale="log", yscale="log", xlabel="inner steps S", ylabel="relative departure", ylim=(1e-16, 30))
    _name_widths(axes, steps)
    axes.legend(loc="center", bbox_to_anchor=(0.62, 0.5))


def _name_widths(axes: Axes, values: list[int] | tuple[int, ...]) -> None:
    """Put a tick at every value of a logarithmic axis."""
    axes.set_xticks(values, [str(value) for value in values])
    axes.minorticks_off()


def main() -> None:
    """Run the experiment."""
    compute("linear_network", __doc__, table, figures, tables)


if __name__ == "__main__":
    main()
