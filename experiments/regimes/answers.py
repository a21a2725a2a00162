"""The answers to `registration.md` and `registration-3.md`, and the figure, from the tables in `results`.

python experiments/regimes/answers.py     prints them and draws docs/regimes.png
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from common import DOCS, Frame, read, show
from run import CHOOSING, PAYS, PLACE, gathered  # pyright: ignore[reportAttributeAccessIssue] - or the bench's
from twophase.figures import style

SIGNALS = ("agreement", "late_agreement", "cosine", "late_cosine", "shrunk", "sigma")
NEAR, NO_HELP = 1.1, 1.05
FAR, LOW = 10.0, 0.25  # where larger costs of doubling, and divergence, are drawn, and smaller gains
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


def prediction(found: Frame, name: str, values: Frame, directions: tuple[bool, ...] = (True, False)) -> dict[str, Any]:
    """Choose a threshold, and whether momentum is predicted to pay above or below it, on one half; judge on the other.

    It is what is right most often; of several such thresholds the middle one. Values count by their order alone.
    """
    half, pays, x = found["choosing"].to_numpy(), found["pays"].to_numpy(), values.to_numpy(dtype=float)
    order, best = np.unique(x[half & np.isfinite(x)]), dict[str, Any]()
    cuts = np.concatenate([[order[0] - 1], (order[1:] + order[:-1]) / 2, [order[-1] + 1]])
    for above in directions:
        right = ((x > cuts[:, None]) == above) == pays
        share = right[:, half].mean(1)
        top = np.flatnonzero(np.isclose(share, share.max()))
        middle = top[len(top) // 2]
        if not best or share[middle] > best["right, choosing"]:
            best = {"by": name, "pays where": f"{'above' if above else 'below'} {cuts[middle]:.3g}"}
            best |= {"right, choosing": share[middle], "right, judging": right[middle, ~half].mean()}
    majority = max(pays[~half].mean(), 1 - pays[~half].mean())
    return best | {"majority": majority, "workloads": int((~half).sum())}


def answers(table: Frame) -> dict[str, Frame]:
    """Return the tables that answer the hypotheses, by name."""
    found = places(table)
    h1 = prediction(found, "log10 of the cost of doubling", np.log10(found["doubled"].clip(lower=1e-6)), (True,))
    h2 = [prediction(found, name, found[name]) for name in SIGNALS]
    best = max(h2, key=lambda row: row["right, choosing"])
    paying, idle = found[found["pays"]], found[~found["pays"]]
    theory = paying["momentum, K of the theory"] * NEAR >= paying["momentum, K tuned"]
    usual = paying["usual, K tuned"] * NEAR >= paying["momentum"]
    others = table.set_index(PLACE).loc[idle.index].query("method not in ('averaging', 'filter')")
    helped = others[(others["gain"] > NO_HELP) & (others["word"] == "better")].index.unique()
    judged = {
        "H1": (h1["right, judging"], max(0.85, h1["majority"] + 0.1), h1["workloads"]),
        "H2": (best["right, judging"], max(0.8, best["majority"] + 0.1), best["workloads"]),
        "H3a": (theory.mean(), 0.8, len(paying)),
        "H3b": (usual.mean(), 0.8, len(paying)),
        "H4": (1 - len(helped) / len(idle), 0.9, len(idle)),
    }
    said = pd.DataFrame([(name, *row) for name, row in judged.items()], columns=["hypothesis", "share", "needed", "of"])
    columns = ["doubled", "momentum", "usual", "usual, K tuned", "momentum, K tuned", "momentum, K of the theory"]
    return {
        "hypotheses": said.assign(holds=said["share"] >= said["needed"]),
        "predictions": pd.DataFrame([h1, *h2]),
        "workloads": found[[*columns, "rising", "auto", "filter", "pays"]].clip(upper=1e6).reset_index(),
    }


def described(table: Frame) -> Frame:
    """Return how often momentum pays, and medians, by what was seen to matter: a description, chosen after looking."""
    found = places(table).reset_index()
    found["K adds"] = found["momentum, K tuned"] > NEAR * found["momentum"]
    found["K costs"] = found["momentum"] > NEAR * found["momentum, K tuned"]
    groups = found.assign(plain_sgd=found["inner"] == "sgd").groupby(["plain_sgd", "replicas", "inner_steps"])
    counts, medians = ["pays", "K adds", "K costs"], ["momentum", "momentum, K tuned", "usual", "usual, K = 3"]
    return pd.concat([groups.size().rename("workloads"), groups[counts].sum(), groups[medians].median()], axis=1)


def follow_up(table: Frame, replicas: Frame, periods: Frame) -> dict[str, Frame]:
    """Return the tables that answer `registration-3.md`."""
    tuned = replicas.query("method == 'nesterov' and decided")
    gains = tuned.pivot(index="task", columns=["replicas", "batch"], values="gain")
    two, control, eight = (gains[arm] for arm in ((2, 16), (2, 64), (8, 16)))
    theory = periods.query("method != 'averaging'").sort_values("tuned").groupby(PLACE)[["sigma", "gain"]].first()
    of_theory = places(table).join(theory.add_prefix("again: "), how="inner")
    right = of_theory["again: gain"] * NEAR >= of_theory["momentum, K tuned"]
    counted = {
        "R1, more with eight": (eight > two).sum(),
        "R2, above 1.1 with eight": (eight > PAYS).sum(),
        "R2, above 1.1 with two": (two > PAYS).sum(),
        "R3, more with eight than in the control": (eight > control).sum(),
        f"S, near K tuned, of {len(right)}": right.sum(),
    }
    return {
        "gains by replicas, batch": gains.reset_index(),
        "the theory's K, again": of_theory[["again: sigma", "again: gain", "momentum, K tuned"]].reset_index(),
        "registration 3": pd.DataFrame(counted.items(), columns=["hypothesis", "workloads"]),
    }


def draw(table: Frame) -> Figure:
    """Draw the gain of momentum over the cost of doubling, a dot a workload, and that of restarts beside it."""
    found = places(table).reset_index()
    figure, grid = style.new_figure(3.6, 1, 2, sharex=True, sharey=True)
    for axes, (replicas, of_these) in zip(grid[0], found.groupby("replicas"), strict=True):
        for number, (inner, name) in enumerate(INNER.items()):
            rows = of_these[of_these["inner"] == inner]
            look = style.look(number, every=1) | {"linestyle": "none"}
            for method, filled, size in (("usual, K tuned", "none", 3), ("momentum", "full", 4.5)):
                x, y = rows["doubled"].clip(upper=FAR), rows[method].clip(lower=LOW)
                axes.plot(x, y, label=name if filled == "full" else None, fillstyle=filled, markersize=size, **look)
        axes.axhline(1, color=style.MUTED, linewidth=0.8, zorder=0)
        axes.set(xscale="log", yscale="log", title=f"{replicas} replicas", xlabel="cost of doubling averaging's rate")
        axes.set_xticks([1, 2, 4, FAR], ["1", "2", "4", "\N{GREATER-THAN OR EQUAL TO} 10"])
        axes.set_yticks([LOW, 0.5, 1, 2, 4], ["\N{LESS-THAN OR EQUAL TO} 0.25", "0.5", "1", "2", "4"])
        axes.minorticks_off()
    grid[0][0].set_ylabel("times better than averaging")
    style.share_legend(figure, [grid[0][0]], columns=4)
    style.headline(figure, TITLE, "large: a tuned momentum; small and hollow: DiLoCo's rule with restarts, K tuned")
    return figure


if __name__ == "__main__":
    found = gathered("regimes")
    more = {"by inner optimizer, replicas and inner steps": described(found).reset_index()}
    more |= follow_up(found, read("regimes-replicas"), read("regimes-periods"))
    for name, rows in (answers(found) | more).items():
        print(name)
        show(rows)
    print("undecided:", list(found[~found["decided"]].groupby(PLACE).groups) or "none")
    with style.styled():
        style.save(DOCS / "regimes.png", draw(found))
