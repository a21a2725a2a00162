"""Does it matter how the pseudo-gradients travel: in float32, bfloat16 or int8?

Every run is done once for each wire, with all else equal. Runs: both rules at a small and a large momentum, with and
without restarts, at the short communication period, which sends most. A run on a lossy wire is compared with the
float32 run of the same seed, and its change with what the seed alone changes. A verdict follows from two questions:

* is the change clear: is its mean over the seeds more than `CLEAR` standard errors from 0?
* is it large: is it beyond the seeds' own spread, one standard deviation of log perplexity in float32?

With so few seeds the first is answered yes too often (Student's distribution). For a claim
that nothing changes this is the careful side.

A lossy run is another trajectory, not float32's plus an error. The effect of rounding grows over a run to the size of
any other small change. So single pairs differ even where the mean does not.

The stored results have a fourth wire, top-k, which is gone; figure and table show the wires that a result has.

Source: `twophase.diloco.compression`; the paper sends float32.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import combinations
from itertools import product as product_of
from typing import Any

import numpy as np

import lm
from common import Result
from lm import SHORT_KINDS, change_words, first, lines_of, perplexity_words, public
from paper import PERIOD, RULES, Scale, arm_name
from twophase.diloco.compression import BLOCK, COMPRESSIONS
from twophase.figures.matplotlib_types import Axes, Figure
from twophase.figures.style import MUTED, headline, look, name_panels, new_page, share_legend
from twophase.judge.cells import ARM, BOTH, CONTROL, MISSING, DataFrame, Paired, comparable, outcomes
from twophase.sweeps.grid import Axis, Cell, Sweep, product
from twophase.sweeps.table import SEED, Row, format_table
from twophase.sweeps.table import arm_name as shown_name
from twophase.tasks.lm.config import parameter_count
from twophase.text.tokenizers import VOCABULARY_SIZES

EXACT, *LOSSY = COMPRESSIONS
FORM, LR = "sum", 0.7
"""DiLoCo's usual learning rate, in its usual form."""
MOMENTA = (0.5, 0.9)
"""One at which the demo works, and DiLoCo's usual one, at which it needs restarts."""
RESTARTS = ("never", str(PERIOD))
_AXES = ("outer.method", "outer.momentum", "outer.restart")
"""A place is a value of each."""
PROCESSES = 2
"""What is sent is counted for one replica a process."""
_CODES = {"bfloat16": 2 * BLOCK, "int8": BLOCK + 4}
"""Bytes of a block; of int8 with its scale."""
CLEAR = 2.0
"""Standard errors."""
NOISE = "within seed noise"
ONE_SEED = "one seed: not judged"


def sweep(scale: Scale) -> Sweep:
    """Cross wire, restart and momentum for both rules, at the short communication period."""
    momenta = tuple(momentum for momentum in MOMENTA if momentum in scale.momenta)
    cells: list[Cell] = []
    for kind, method in RULES.items():
        for restart in RESTARTS:
            for wire in COMPRESSIONS:
                fixed = {
                    "inner_steps": scale.short, "outer.form": FORM, "outer.method": method, "outer.lr": LR,
                    "outer.restart": restart, "sync.compression": wire,
                }  # fmt: skip
                axes = [Axis("outer.momentum", momenta), Axis(SEED, scale.seeds)]
                arm = arm_name(FORM, kind, f"{_restart_words(restart)}, {wire}")
                cells += product(scale.base, axes, arm, fixed)
    return Sweep(f"wires-{scale.name}", scale.base, cells)


def sent_bytes(wire: str, numel: int, processes: int = PROCESSES) -> int:
    """Count the bytes that each process sends to sum a vector of float32 over processes, as the engine reports them.

    With n elements and M processes, a ring in float32 sends 2 (M - 1) parts of 4 n / M bytes. A lossy wire sends each
    other owner its part's codes, and each its part's result: 2 (M - 1) times those of ceil(n / 128 M) blocks.
    """
    if wire == EXACT:
        return 2 * (processes - 1) * 4 * numel // processes
    blocks = -(-numel // (processes * BLOCK))
    return 2 * (processes - 1) * blocks * _CODES[wire]


def table(rows: Sequence[Row], scale: Scale) -> Result:
    """Compare every setting with float32 by seed, and say by place, restart and wire what that comes to."""
    lines, wire_of = lines_of(rows, scale), {row.arm: row.values["sync.compression"] for row in rows}
    rules, momenta = list(RULES.items()), sorted({line["momentum"] for line in lines})
    at = list(product_of(RULES.values(), momenta, RESTARTS))
    every = np.log(outcomes([line["setting"] for line in lines], "sync.compression", *_AXES))
    wires = every.index.get_level_values("sync.compression")
    logs = {wire: every[wires == wire].droplevel("sync.compression").reindex(at) for wire in COMPRESSIONS}
    exact = {
        (RULES[line["rule"]], line["momentum"], line["restart"]): line
        for line in lines
        if wire_of[line["arm"]] == EXACT
    }
    places = {}
    for (kind, method), momentum, restart in product_of(rules, momenta, RESTARTS):
        line = exact.get((method, momentum, restart), {"perplexity": None, "state": "missing"})
        places[_place_name(kind, momentum, restart)] = {
            "rule": kind, "momentum": momentum, "restart": restart,
            "perplexity": line["perplexity"], "state": line["state"],
            **_facts({wire: of_wire.loc[[(method, momentum, restart)]] for wire, of_wire in logs.items()}),
        }  # fmt: skip
    config = scale.base
    vocabulary = config.model.vocabulary_size or VOCABULARY_SIZES[config.data.vocabulary]
    parameters = parameter_count(config.model, vocabulary)
    sent = {wire: sent_bytes(wire, parameters) for wire in COMPRESSIONS}
    numbers = {
        "places": places,
        "all_places": _facts(logs),
        "restart_gain": {
            f"{SHORT_KINDS[kind]} {momentum:g}": _gain_facts(logs, (method, momentum))
            for (kind, method), momentum in product_of(rules, momenta)
        },
        "typical": _typical(logs),
        "bytes_a_round": sent,
        "bytes_over_float32": {wire: sent[wire] / sent[EXACT] for wire in COMPRESSIONS},
    }
    gaps = {wire: of_wire - logs[EXACT] for wire, of_wire in logs.items()}
    for line in lines:
        wire, rule, momentum, restart = wire_of[line["arm"]], line["rule"], line["momentum"], line["restart"]
        change = places[_place_name(rule, momentum, restart)]["change"].get(wire, {"places": 0})  # float32 has none
        line |= {"wire": wire, "bytes_a_round": sent[wire]}
        line |= {f"float32_{name}": change.get(name) for name in ("ratio", "error", "low", "high")}
        by_seed = gaps[wire].loc[(RULES[rule], momentum, restart)]
        for seed in line["setting"].seeds:
            line[f"float32_log_seed{seed}"] = by_seed[seed] if change["places"] else None
    settings = {
        "form": FORM, "lr": LR, "momenta": momenta, "restarts": RESTARTS, "inner_steps": scale.short,
        "rounds": scale.rounds(scale.short), "seeds": scale.seeds, "clear": CLEAR, "parameters": parameters,
        "processes": PROCESSES, "error_feedback": {wire: wire != "bfloat16" for wire in LOSSY},
    }  # fmt: skip
    return Result(public(lines), numbers, settings)


def _place_name(kind: str, momentum: float, restart: str) -> str:
    return f"{SHORT_KINDS[kind]} {momentum:g} {_restart_words(restart)}"


def _restart_words(restart: str) -> str:
    return restart if restart == "never" else f"K={restart}"


# ------------------------------------------------------------------------------------------------------- comparisons

_REASONS = {ARM: "diverged", CONTROL: "the other diverged", BOTH: BOTH, MISSING: MISSING}


def _change(arm: DataFrame, control: DataFrame) -> dict[str, Any]:
    """Summarize paired differences of log perplexities: for each seed the mean over the places, then over the seeds.

    Returns:
        `ratio` is the geometric mean ratio of perplexities, `log` its logarithm, `error` the standard error of `log`
        over the seeds. `low` and `high` are `CLEAR` errors either way, `rms` the root mean square of single pairs.
        Places that cannot be compared are in `without`, by reason, and in no number.
    """
    remarks, ended, others = comparable(arm, control)
    reasons = [_REASONS[remark] for remark in remarks if remark]
    change: dict[str, Any] = {"places": len(ended)}
    change["without"] = {reason: reasons.count(reason) for reason in reasons}
    if not change["places"]:
        return change | dict.fromkeys(("ratio", "log", "error", "low", "high", "rms"))
    gaps = ended - others
    pairs = Paired.over(gaps)
    low, high = pairs.ends(CLEAR)
    rms = math.sqrt(statistics.fmean((gaps**2).to_numpy().ravel()))
    return change | {
        "ratio": pairs.ratio, "log": pairs.mean, "error": pairs.error, "low": low, "high": high, "rms": rms,
    }  # fmt: skip


def _judged(logs: Mapping[str, DataFrame], spread: float | None) -> dict[str, Any]:
    """Compare each lossy wire with float32."""
    changes = {wire: _change(logs[wire], logs[EXACT]) for wire in LOSSY}
    return {wire: change | {"verdict": verdict(change, spread)} for wire, change in changes.items()}


def _facts(logs: Mapping[str, DataFrame]) -> dict[str, Any]:
    """Say what the seeds alone change in float32, and each lossy wire; over many places the noise is smallest."""
    spread = _spread(logs[EXACT])
    return {"spread": spread, "change": _judged(logs, spread)}


def _spread(logs: DataFrame) -> float | None:
    """Measure the seeds' own spread: standard deviation of the mean over the places that finished on every seed."""
    ended = logs[np.isfinite(logs).all(axis=1)]
    error = Paired.over(ended).error if len(ended) else None
    return None if error is None else error * math.sqrt(len(logs.columns))


def _gain_facts(logs: Mapping[str, DataFrame], rule: tuple[str, float]) -> dict[str, Any]:
    """Say what a restart gains on each wire (never over K), and how that differs from float32's, seed by seed."""
    sides = {
        wire: [every.loc[[(*rule, restart)]].reset_index(drop=True) for restart in RESTARTS]
        for wire, every in logs.items()
    }
    gains = {}
    for wire, (never, restarted) in sides.items():
        (remark,), _, _ = comparable(never, restarted)
        gains[wire] = never - restarted
        if remark:  # as a table of logarithms has it
            gains[wire].loc[:, :] = math.nan if remark == MISSING else math.inf
    spread = _spread(gains[EXACT])
    return {
        "gain": {wire: _change(*both) for wire, both in sides.items()},
        "spread": spread,
        "shift": _judged(gains, spread),
    }


def _typical(logs: Mapping[str, DataFrame]) -> dict[str, float | None]:
    """Measure the root mean square change of log perplexity by another wire, and by another seed in float32."""
    facts = {wire: _change(logs[wire], logs[EXACT])["rms"] for wire in LOSSY}
    ended = logs[EXACT][np.isfinite(logs[EXACT]).all(axis=1)].to_numpy().tolist()
    squares = [(a - b) ** 2 for line in ended for a, b in combinations(line, 2)]
    return facts | {"another seed": math.sqrt(statistics.fmean(squares)) if squares else None}


def verdict(change: Mapping[str, Any], spread: float | None) -> str:
    """Judge a change by the module's two questions; `spread` is the seeds' standard deviation in float32."""
    if change["log"] is None:
        return next(iter(change["without"]))
    if spread is None or change["low"] is None:
        return ONE_SEED
    clear = not change["low"] <= 0 <= change["high"]
    large = abs(change["log"]) > spread
    if not clear:
        return "open" if large else NOISE
    return ("higher" if change["log"] > 0 else "lower") + ("" if large else ", by less than a seed")


# -------------------------------------------------------------------------------------------------- tables and figure


def tables(result: Result) -> str:
    """Write the change of each wire against float32 by place, and the bytes that each process sends a round."""
    numbers, lossy = result.numbers, lossy_wires(result)
    places = numbers["places"] | {"all places": numbers["all_places"] | {"perplexity": None, "state": ""}}
    header = ["", "float32", "seeds", *(word for wire in lossy for word in (wire, "verdict"))]
    sent, share = numbers["bytes_a_round"], numbers["bytes_over_float32"]
    return "\n\n".join(
        [
            format_table(header, [_table_line(name, facts) for name, facts in places.items()]),
            format_table(["", "bytes", "of float32's"], [[wire, sent[wire], f"{share[wire]:.3f}"] for wire in sent]),
        ]
    )


def _table_line(name: str, facts: Mapping[str, Any]) -> list[Any]:
    spread = "" if facts["spread"] is None else f"{facts['spread']:.1%}"
    changes = [word for change in facts["change"].values() for word in (change_words(change), change["verdict"])]
    return [name, perplexity_words(facts), spread, *changes]


def lossy_wires(result: Result) -> list[str]:
    """Return the wires of a result that lose digits; a stored one may have more than a new one."""
    return [wire for wire in result.numbers["bytes_a_round"] if wire != EXACT]


def figures(result: Result) -> dict[str, Figure]:
    """Draw (a) rows by place; across: each wire's change against float32, on the seeds' spread; (b) bytes a round."""
    places = result.numbers["places"] | {"all places": result.numbers["all_places"]}
    settings, several = result.settings, len(result.settings["seeds"]) > 1
    lossy = lossy_wires(result)
    looks = {wire: number for number, wire in enumerate(lossy, start=1)}
    figure = new_page(1.7 + 0.36 * len(places))
    changes, sent = figure.subplots(1, 2, width_ratios=(3.2, 1))
    for row, facts in enumerate(places.values()):
        if facts["spread"] is not None:
            ends = (-100 * facts["spread"], 100 * facts["spread"])
            changes.fill_betweenx([row - 0.42, row + 0.42], *ends, color="#e4e4e4", linewidth=0)
        for index, wire in enumerate(lossy):
            line: Mapping[str, Any] = {}  # the mean over the places has no dots
            if "rule" in facts:
                place = {name: facts[name] for name in ("rule", "momentum", "restart")}
                line = first(result.rows, wire=wire, **place) or {}
            dots = [value for name, value in line.items() if name.startswith("float32_log_seed") and value is not None]
            shift = 0.25 * (index - (len(lossy) - 1) / 2)
            _draw_change(changes, row + shift, facts["change"][wire], (wire, looks[wire]), dots)
    changes.axvline(0, color=MUTED, linewidth=0.7, zorder=1)
    names = [f"{name}\n{perplexity_words(facts)}" if "perplexity" in facts else name for name, facts in places.items()]
    changes.set_yticks(range(len(places)), map(shown_name, names))
    changes.axhline(len(places) - 1.5, color=MUTED, linewidth=0.5)
    changes.set_ylim(len(places) - 0.4, -0.6)
    changes.set_xlabel("perplexity against float32, same seed, %\n(left of 0 is better)")
    for wire, number in looks.items():
        style = look(number, every=1)
        changes.plot([], [], color=style["color"], marker=style["marker"], linestyle="-", label=wire)
    changes.fill_between([], [], [], color="#e4e4e4", label="float32, another seed: one standard deviation")
    _draw_bytes(sent, result)
    name_panels([changes, sent], ["What it changes", "What it sends"])
    share_legend(figure, [changes])
    bars = f"geometric means; bars: {settings['clear']:g} standard errors; strokes: the seeds; " if several else ""
    mean = f", mean of {len(settings['seeds'])} seeds" if several else ""
    headline(
        figure,
        "Fewer bytes cost little, unless hardly any are left",
        f"change of perplexity, lower is better; {bars}below each name: perplexity in "
        f"float32{mean}\n"
        f"{settings['form']} form, lr {settings['lr']:g}, S={settings['inner_steps']}, {settings['rounds']} rounds; "
        f"rule, momentum, restart; bytes: what each of {settings['processes']} processes sends",
    )
    return {"": figure}


def _draw_change(
    panel: Axes, height: float, change: Mapping[str, Any], wire: tuple[str, int], dots: Sequence[float]
) -> None:
    """Draw one wire, by its name and number, in one place: mean with error; log ratios of the seeds as strokes."""
    style = look(wire[1], every=1)
    colour = style["color"]
    if change["ratio"] is None:
        word = "div." if "diverged" in change["verdict"] else "missing"
        panel.text(0, height, f"{wire[0]}: {word}", color=colour, fontsize=7, ha="center", va="center")
        return
    if change["low"] is not None:
        ends, seeds = ([100 * math.expm1(log) for log in logs] for logs in ((change["low"], change["high"]), dots))
        panel.plot(ends, [height, height], color=colour, linewidth=1.1, zorder=3)
        panel.plot(seeds, [height] * len(seeds), "|", color=colour, markersize=5, markeredgewidth=0.8, zorder=2)
    panel.plot([100 * (change["ratio"] - 1)], [height], marker=style["marker"], color=colour, markersize=4, zorder=4)


def _draw_bytes(panel: Axes, result: Result) -> None:
    sent, share = result.numbers["bytes_a_round"], result.numbers["bytes_over_float32"]
    colours = [look(number)["color"] for number in range(len(sent))]
    thousands = [number / 1000 for number in sent.values()]
    panel.barh(range(len(sent)), thousands, color=colours, height=0.6)
    for row, wire in enumerate(sent):
        end, words = thousands[row], f"{share[wire]:.3f}"
        if row == 0:  # the longest bar has its number inside
            panel.text(end * 0.97, row, words, ha="right", va="center", fontsize=7.5, color="white")
        else:
            panel.text(end + 3, row, words, ha="left", va="center", fontsize=7.5, color="black")
    panel.set_yticks(range(len(sent)), list(sent))
    panel.invert_yaxis()
    panel.set_xlabel("kB a round\n(less is better)")


def main() -> None:
    """Run the experiment."""
    lm.experiment("wires", lambda scale, _: sweep(scale), table, figures=figures, tables=tables)


if __name__ == "__main__":
    main()
