"""The answers to `registration.md`, and the figure, from the tables of all parts.

python experiments/regimes/answers.py                      prints and draws the stored table, results/regimes.csv
python experiments/regimes/answers.py --parts runs/regimes     gathers the parts into it first
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from numpy.typing import NDArray

from common import Frame, script, show
from run import CHOOSING  # pyright: ignore[reportAttributeAccessIssue] - the bench has one, too
from twophase.figures import style

PLACE = ["task", "inner", "inner_steps", "batch", "replicas", "schedule"]
SIGNALS = ("agreement", "late_agreement", "cosine", "late_cosine", "shrunk", "sigma")
PAYS, NEAR, NO_HELP = 1.1, 1.1, 1.05
FAR = 100.0
"""A cost of doubling beyond this, a divergence too, is drawn here."""
INNER = {"sgd": "SGD", "momentum": "SGD with momentum", "adamw": "AdamW", "muon": "Muon"}
TITLE = "The cost of a larger inner rate does not tell where outer momentum pays"


def places(table: Frame) -> Frame:
    """Return a row for each workload: its signals, whether momentum pays, and gains of methods by name."""
    gains = table.pivot(index=PLACE, columns="method", values="gain")
    tuned = table.pivot(index=PLACE, columns="method", values="tuned")
    found = table.groupby(PLACE)[["doubled", *SIGNALS]].first().join(gains)
    for name in ("", ", K = 3", ", K = 7", ", K tuned", ", K of the theory"):
        first = tuned[f"heavy ball{name}"] <= tuned[f"nesterov{name}"]
        found[f"momentum{name}"] = gains[f"heavy ball{name}"].where(first, gains[f"nesterov{name}"])
    found["choosing"] = found.index.get_level_values("task").isin(CHOOSING)
    decided = found[table.groupby(PLACE)["decided"].first()]
    return decided.assign(pays=decided["momentum"] > PAYS)


def best_split(
    values: NDArray[np.float64], pays: NDArray[np.bool_], directions: tuple[bool, ...]
) -> tuple[float, float, bool]:
    """Return the share that is right, the threshold, and whether above it pays, which are right most often.

    Of several thresholds the middle one; values are compared by their order alone.
    """
    order = np.unique(values[np.isfinite(values)])
    cuts = np.concatenate([[order[0] - 1], (order[1:] + order[:-1]) / 2, [order[-1] + 1]])
    options = []
    for above in directions:
        right = [np.mean(((values > cut) == above) == pays) for cut in cuts]
        top = np.flatnonzero(np.isclose(right, max(right)))
        options.append((float(max(right)), float(cuts[top[len(top) // 2]]), above))
    return max(options, key=lambda option: option[0])


def prediction(found: Frame, name: str, values: Frame, directions: tuple[bool, ...] = (True, False)) -> dict[str, Any]:
    """Choose a threshold, and one of some directions (whether above it pays), on one half; judge it on the other."""
    half, pays = found["choosing"].to_numpy(), found["pays"].to_numpy()
    x = values.to_numpy(dtype=float)
    right, cut, above = best_split(x[half], pays[half], directions)
    judged = np.mean(((x > cut) == above)[~half] == pays[~half])
    majority = max(np.mean(pays[~half]), 1 - np.mean(pays[~half]))
    words = {"by": name, "pays where": f"{'above' if above else 'below'} {cut:.3g}", "right, choosing": right}
    return words | {"right, judging": judged, "majority": majority, "workloads": int((~half).sum())}


def answers(table: Frame) -> dict[str, Frame]:
    """Return the tables that answer the hypotheses, by name."""
    found = places(table)
    cost = np.log(found["doubled"].clip(lower=1e-6, upper=1e6))
    h1 = prediction(found, "cost of doubling (log)", cost, (True,))
    h2 = [prediction(found, name, found[name]) for name in SIGNALS]
    best = max(h2, key=lambda row: row["right, choosing"])
    paying, idle = found[found["pays"]], found[~found["pays"]]
    theory = paying["momentum, K of the theory"] * NEAR >= paying["momentum, K tuned"]
    usual = paying["usual, K tuned"] * NEAR >= paying["momentum"]
    others = table.set_index(PLACE).loc[idle.index].query("method not in ('averaging', 'filter')")
    helped = others[(others["gain"] > NO_HELP) & (others["word"] == "better")].index.unique()
    held = {
        "H1": h1["right, judging"] >= max(0.85, h1["majority"] + 0.1),
        "H2": best["right, judging"] >= max(0.8, best["majority"] + 0.1),
        "H3a": theory.mean() >= 0.8,
        "H3b": usual.mean() >= 0.8,
        "H4": 1 - len(helped) / len(idle) >= 0.9,
    }
    numbers = [h1["right, judging"], best["right, judging"], theory.mean(), usual.mean(), 1 - len(helped) / len(idle)]
    counts = [h1["workloads"], best["workloads"], len(paying), len(paying), len(idle)]
    said = pd.DataFrame({"hypothesis": list(held), "holds": held.values(), "share": numbers, "of": counts})
    columns = ["doubled", "momentum", "usual", "usual, K tuned", "momentum, K tuned", "momentum, K of the theory"]
    return {
        "hypotheses": said,
        "predictions": pd.DataFrame([h1, *h2]),
        "workloads": found[[*columns, "rising", "auto", "filter", "pays"]].reset_index(),
    }


def described(table: Frame) -> Frame:
    """Return shares and medians by inner optimizer and replicas: chosen after looking, a description alone."""
    found = places(table).reset_index()
    groups = found.groupby(["inner", "replicas"])
    columns = {
        "momentum": "momentum",
        "with K tuned": "momentum, K tuned",
        "usual": "usual",
        "usual, K = 3": "usual, K = 3",
    }
    medians = groups[[*columns.values()]].median().set_axis([*columns], axis=1)
    return pd.concat([groups["pays"].agg(workloads="count", pays="sum"), medians], axis=1).reset_index()


def report(table: Frame) -> None:
    """Print all answers."""
    for name, rows in (answers(table) | {"by inner optimizer and replicas": described(table)}).items():
        print(name)
        show(rows)


def draw(table: Frame) -> Mapping[str, Figure]:
    """Draw the gain of momentum over the cost of doubling, a dot a workload, restarts beside it."""
    found = places(table).reset_index()
    figure, grid = style.new_figure(3.4, 1, 2, sharex=True, sharey=True)
    methods = {"momentum": "tuned momentum", "usual, K tuned": "DiLoCo's rule, restarted (K tuned)"}
    for axes, (method, label) in zip(grid[0], methods.items(), strict=True):
        for number, (inner, name) in enumerate(INNER.items()):
            for replicas, fill in ((2, "none"), (8, "full")):
                rows = found[(found["inner"] == inner) & (found["replicas"] == replicas)]
                look = style.look(number, every=1) | {"linestyle": "none", "fillstyle": fill, "markersize": 4}
                axes.plot(rows["doubled"].clip(upper=FAR), rows[method], label=name if replicas == 8 else None, **look)
        axes.axhline(1, color=style.MUTED, linewidth=0.8, zorder=0)
        axes.set(xscale="log", yscale="log", title=label, xlabel="cost of doubling averaging's inner rate")
        axes.set_xticks([1, 10, FAR], ["1", "10", "diverges"])
        axes.set_yticks([0.25, 0.5, 1, 2, 4], ["0.25", "0.5", "1", "2", "4"])
        axes.minorticks_off()
    grid[0][0].set_ylabel("times better than averaging")
    style.share_legend(figure, [grid[0][0]], columns=4)
    style.headline(figure, TITLE, "a dot a workload; filled: eight replicas, hollow: two")
    return {"": figure}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--parts", type=Path)
    options, sys.argv[1:] = parser.parse_known_args()
    parts = sorted(options.parts.glob("regimes-*.csv")) if options.parts else []
    gather = (lambda: pd.concat([pd.read_csv(path, comment="#") for path in parts])) if options.parts else None
    script(__doc__, "regimes", draw, gather, report=report)
