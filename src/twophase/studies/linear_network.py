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

from twophase.figures.matplotlib_types import Axes, Figure
from twophase.figures.style import MUTED, headline, look, name_panels, new_figure, signed
from twophase.studies._model import AVERAGING, HEAVY_BALL, USUAL
from twophase.studies.study import Result, select
from twophase.theory.contraction import restart_factor

QUESTION = "Does the mode theory, restarts included, hold in the training of a network?"


def table(*, quick: bool = False) -> Result:
    """Train the linear model, networks of several widths, and the linear model on halves of the data."""
    from twophase.studies import _digits  # noqa: PLC0415 - torch, which a list of studies does without

    settings = _digits.QUICK if quick else _digits.FULL
    rows, numbers = _digits.measured(settings)
    return Result(rows, numbers, asdict(settings))


# ------------------------------------------------------------------------------------------------ what it amounts to


def answer(result: Result) -> str:
    """Say the findings, their controls, and what does not hold."""
    linear, network, shards = (result.numbers[part] for part in ("linear", "network", "shards"))
    settings, runs = result.settings, network["runs"]
    low, high = min(settings["widths"]), max(settings["widths"])
    exponents = [run["departure"] for run in runs]
    steepest, flattest = (
        f"{line['exponent']:.2f} +- {line['standard_error']:.2f}"
        for line in (pick(exponents, key=lambda e: e["exponent"]) for pick in (min, max))
    )
    tuned = network["tuned_log10_loss_linear"]
    lines = [
        f"Linear model ({linear['parameters']} parameters, two replicas with equal data, {linear['runs']} runs). "
        f"Modes follow the theory to {linear['residual_deviation']:.0e} of the first residual in every round. The "
        f"{linear['contractions_measured']} of {linear['contractions']} contractions over a cycle that are large "
        f"enough to measure equal chi_K(sigma) to {linear['contraction_deviation']:.0e}.",
        f"Network: its largest departure from the linear model falls as width to the {flattest} (slowest of "
        f"{len(runs)} runs) to {steepest} (fastest). Fitted from width {settings['fitted_from']} to {high}. Known: "
        "-1/2 or faster (arXiv 1902.06720), -1 in an expansion (arXiv 1909.11304).",
    ]
    for name, ratio in zip(("Heavy ball", "Nesterov"), network["restart_over_never"], strict=True):
        lines.append(
            f"{name}, K = {ratio['restart']} over no restart: largest departure x{ratio['departure']:.2f}, last "
            f"x{ratio['departure_last']:.2f}, last relative to what is left x{ratio['departure_of_rest']:.2f}."
        )
    lines += [
        f"Restarts every {gain['restart']} rounds, {gain['rule']}, width {gain['width']}: the linear model promises "
        f"a loss lower by {gain['promised']['median']:.2f} in log10. The network has {gain['found']['median']:.2f} "
        f"(medians; seeds {gain['found']['low']:.2f} to {gain['found']['high']:.2f})."
        for gain in network["benefit"]
        if gain["width"] in (low, high)
    ]
    losses = ", ".join(f"{label(run)} {run['median_log10_loss'][high]:.2f}" for run in runs)
    heavy, nesterov = network["matched_lr"].values()
    lines += [
        f"Controls, log10 of the last loss at width {high}, median: {losses}. Averaging is no momentum at lr 1; "
        f"at the restarts' mean gain its lr is {heavy:.2f} for heavy ball, and for Nesterov would be {nesterov:.2f}"
        f"{', beyond 2, where it diverges' if nesterov > 2 else ''}.",
        f"Tuned lr, momentum and kind, by the linear theory of one network: {tuned['without momentum']:.2f} "
        f"without momentum, {tuned['without restarts']:.2f} without restarts, {tuned['with restarts']:.2f} with the "
        f"best period too. To tuning, restarts add {tuned['without restarts'] - tuned['with restarts']:.2f}.",
        f"Different data (halves, heavy ball): the pooled data's modes are off by {shards['at_one_inner_step']:.0e} "
        f"of the first residual at one inner step, up to {shards['largest_departure']:.2f} at more. The first "
        f"pseudo-gradient is off by up to {shards['largest_first_difference']:.0%}. What fails is the formula for "
        "sigma: the eigenvalues of what the replicas remove on average, in its place, predict every round to "
        f"{shards['largest_departure_exact']:.0e}.",
        "Not covered: other tasks and depths, mini-batches, AdamW inside, test error, language models.",
    ]
    return "\n".join(lines)


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


def draw(result: Result) -> Figure:
    """Draw contractions of the linear model, and a network's departure from it by width."""
    figure, grid = new_figure(3.6, 1, 2)
    _draw_contractions(grid[0][0], result)
    _draw_departures(grid[0][1], result)
    name_panels(grid[0], ["Linear model: contraction of a cycle", "Network: departure from its linear model"])
    exponents = [run["departure"]["exponent"] for run in result.numbers["network"]["runs"]]
    verb = "falls with its width" if max(exponents) < 0 else "does not always fall with its width"
    headline(
        figure,
        f"The theory predicts a linear model's cycles to {result.numbers['linear']['contraction_deviation']:.0e}; what "
        f"a network departs from it {verb}, as width to the {signed(max(exponents), 2)} to {signed(min(exponents), 2)}",
        "curves: theory, markers: measured; left: lower contracts faster; right: lower is closer to the theory",
    )
    return figure


def details(result: Result) -> dict[str, Figure]:
    """Draw what restarts gain, at two widths and by width; and replicas with different data."""
    widths = result.settings["widths"]
    figure, grid = new_figure(5.6, 2, 2)
    axes, ends = list(grid.flat), (min(widths), max(widths))
    for panel, width in zip(axes, ends, strict=False):
        _draw_losses(panel, result, width)
    _draw_benefit(axes[2], result)
    axes[3].set_axis_off()
    titles = [*(f"Network of width {width}" for width in ends), "What restarts gain, by width"]
    name_panels(axes[:3], titles)
    gains = [gain for gain in result.numbers["network"]["benefit"] if gain["width"] == ends[1]]
    words = ", ".join(
        f"by {gain['found']['median']:.2f} with {gain['rule'].split(' lr')[0]} (promised "
        f"{gain['promised']['median']:.2f})"
        for gain in gains
    )
    headline(
        figure,
        f"At width {ends[1]} restarts lower log10 of the loss {words}",
        "loss: lower is better; gain: higher is better; medians, bars from the lowest seed to the highest",
    )
    shards, grid = new_figure(3.4)
    _draw_shards(grid[0][0], result)
    facts = result.numbers["shards"]
    headline(
        shards,
        f"With different data on the replicas the pooled modes are off by up to {facts['largest_departure']:.2f}, the "
        f"modes of the mean progress by {facts['largest_departure_exact']:.0e}",
        "relative departure of the linear model from the theory, lower is closer; heavy ball, halves of the data",
    )
    return {"benefit": figure, "shards": shards}


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
