"""Does it matter how the pseudo-gradients travel: in float32, in bfloat16, or in int8 with error feedback?

Every run is done once for each wire, with all else equal: both rules at a small and a large momentum, with and without
restarts, at the short communication period, where most is sent. A run on a lossy wire is compared with the float32 run
of its own seed, and its change with what the seed alone changes. A verdict follows from two questions:

* is the change clear: is its mean over the seeds more than `CLEAR` standard errors from 0?
* is it large: is it beyond the seeds' own spread, one standard deviation of log perplexity in float32?

With so few seeds the first is answered yes rather too often (Student's distribution; the answer says how often), which
is the careful side for a claim that nothing changes.

A lossy run is another trajectory, not float32's plus an error: what rounding changes grows over a run until it
is of the size of any other small change. So single pairs differ even where the mean does not.

Source: `twophase.diloco.wire`; the paper sends float32.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import combinations
from itertools import product as product_of
from typing import Any

import numpy as np
from scipy.special import stdtr

from twophase.diloco.codec import BLOCK, packet_bytes
from twophase.diloco.transfer import WIRES
from twophase.judge.cells import ARM, BOTH, CONTROL, MISSING, DataFrame, Paired, fate, states
from twophase.recipes.paper import PERIOD, RULES, Scale, arm_name
from twophase.studies._lm import (
    SHORT_KINDS,
    Line,
    by_seed,
    change_words,
    lines_of,
    perplexity_words,
    pick,
    public,
    tally,
)
from twophase.studies._wires_figure import draw
from twophase.studies.study import Result
from twophase.sweep.grid import Axis, Cell, Sweep, product
from twophase.sweep.table import SEED, Row, format_table
from twophase.tasks.lm.config import VOCABULARY_SIZES, TrainConfig
from twophase.tasks.lm.speed import parameter_count

__all__ = ["QUESTION", "answer", "draw", "sent_bytes", "sweep", "table", "verdict"]
QUESTION = "Does sending pseudo-gradients in fewer bytes change what a language model reaches?"
EXACT, *LOSSY = WIRES
FORM, LR = "sum", 0.7
"""DiLoCo's usual learning rate, in its usual form."""
MOMENTA = (0.5, 0.9)
"""One at which the demo works, and DiLoCo's usual one, at which it needs restarts."""
RESTARTS = ("never", str(PERIOD))
_PLACE = ("rule", "momentum", "restart")
PROCESSES = 2
"""What is sent is counted for one replica a process."""
CLEAR = 2.0
"""Standard errors."""
NOISE = "within seed noise"
ONE_SEED = "one seed: not judged"


def sweep(scale: Scale, rows: Sequence[Row]) -> Sweep:
    """Wire x restart x momentum for both rules, at the short communication period; nothing depends on earlier rows."""
    del rows
    momenta = tuple(momentum for momentum in MOMENTA if momentum in scale.momenta)
    cells: list[Cell] = []
    for kind, ahead in RULES.items():
        for restart in RESTARTS:
            for wire in WIRES:
                fixed = {
                    "inner_steps": scale.short, "outer.form": FORM, "outer.nesterov": ahead, "outer.lr": LR,
                    "outer.restart": restart, "sync.wire": wire,
                }  # fmt: skip
                axes = [Axis("outer.momentum", momenta), Axis(SEED, scale.seeds)]
                arm = arm_name(FORM, kind, f"{_restart_words(restart)}, {wire}")
                cells += product(scale.base, axes, arm, fixed)
    return Sweep(f"wires-{scale.name}", scale.base, cells)


def sent_bytes(wire: str, numel: int, processes: int = PROCESSES) -> int:
    """Bytes that each process sends to others to sum a vector of float32 over processes, as the engine reports them.

    With n elements and M processes, in float32 a ring sends 2 (M - 1) parts of 4 n / M bytes; a lossy wire sends a
    packet to each other's owner and its own part's packet to each other: 2 (M - 1) packets of ceil(n / 128 M) blocks.

    Args:
        wire: one of `WIRES`.
        numel: elements, >= 1.
        processes: >= 1.
    """
    if wire == EXACT:
        return 2 * (processes - 1) * 4 * numel // processes
    blocks = -(-numel // (processes * BLOCK))
    return 2 * (processes - 1) * packet_bytes(wire, blocks * BLOCK)


def table(rows: Sequence[Row], scale: Scale) -> Result:
    """Every setting with its change against float32 by seed, and by place, restart and wire what that comes to."""
    lines, wire_of = lines_of(rows, scale), {row.arm: row.values["sync.wire"] for row in rows}
    for line in lines:
        line["wire"] = wire_of[line["arm"]]
    kinds, momenta = list(RULES), sorted({line["momentum"] for line in lines})
    at = list(product_of(kinds, momenta, RESTARTS))
    every = np.log(by_seed(lines, "wire", *_PLACE))
    logs = {wire: every[every.index.get_level_values("wire") == wire].droplevel("wire").reindex(at) for wire in WIRES}
    exact = {tuple(line[name] for name in _PLACE): line for line in pick(lines, wire=EXACT)}
    sent = {wire: sent_bytes(wire, _parameters(scale.base)) for wire in WIRES}
    numbers = {
        "places": {_place(*place): _facts(logs, place, exact.get(place)) for place in at},
        "all_places": _all_facts(logs),
        "restart_gain": {
            f"{SHORT_KINDS[kind]} {momentum:g}": _gain_facts(logs, kind, momentum)
            for kind, momentum in product_of(kinds, momenta)
        },
        "typical": _typical(logs),
        "bytes_a_round": sent,
        "bytes_over_float32": {wire: sent[wire] / sent[EXACT] for wire in WIRES},
    }
    for line in lines:
        _add_changes(line, logs, sent)
    settings = {
        "form": FORM, "lr": LR, "momenta": momenta, "restarts": RESTARTS, "inner_steps": scale.short,
        "rounds": scale.rounds(scale.short), "seeds": scale.seeds, "clear": CLEAR,
        "parameters": _parameters(scale.base), "processes": PROCESSES,
        "error_feedback": {"bfloat16": False, "int8": True},
    }  # fmt: skip
    return Result(public(lines), numbers, settings)


def _parameters(config: TrainConfig) -> int:
    return parameter_count(config.model, config.model.vocabulary_size or VOCABULARY_SIZES[config.data.vocabulary])


def _restart_words(restart: str) -> str:
    return restart if restart == "never" else f"K={restart}"


def _place(kind: str, momentum: float, restart: str) -> str:
    return f"{SHORT_KINDS[kind]} {momentum:g} {_restart_words(restart)}"


# ------------------------------------------------------------------------------------------------------- comparisons

_REASONS = {ARM: "diverged", CONTROL: "the other diverged", BOTH: BOTH, MISSING: MISSING}


def _change(arm: DataFrame, control: DataFrame) -> dict[str, Any]:
    """Summarize paired differences of log perplexities: for each seed the mean over the places, then over the seeds.

    Returns:
        `ratio` the geometric mean ratio of perplexities, `log` its logarithm, `error` the standard error of that over
        the seeds, `low` and `high` the ends of `CLEAR` of these either way, `rms` the root mean square of single pairs.
        Places that cannot be compared are in `without`, by reason, and in no number.
    """
    remarks = [fate(mine, other) for mine, other in zip(states(arm), states(control), strict=True)]
    reasons = [_REASONS[remark] for remark in remarks if remark]
    change: dict[str, Any] = {"places": remarks.count("")}
    change["without"] = {reason: reasons.count(reason) for reason in reasons}
    if not change["places"]:
        return change | dict.fromkeys(("ratio", "log", "error", "low", "high", "rms"))
    gaps = (arm - control)[[not remark for remark in remarks]]
    pairs = Paired.over(gaps)
    low, high = pairs.ends(CLEAR)
    rms = math.sqrt(statistics.fmean((gaps**2).to_numpy().ravel()))
    return change | {
        "ratio": pairs.ratio, "log": pairs.mean, "error": pairs.error, "low": low, "high": high, "rms": rms,
    }  # fmt: skip


def _judged(arm: DataFrame, control: DataFrame, spread: float | None) -> dict[str, Any]:
    change = _change(arm, control)
    return change | {"verdict": verdict(change, spread)}


def _facts(logs: Mapping[str, DataFrame], place: tuple[str, float, str], line: Line | None) -> dict[str, Any]:
    """One place: float32, what its seeds alone change, and each lossy wire against it."""
    here = {wire: every.loc[[place]] for wire, every in logs.items()}
    spread = _spread(here[EXACT])
    return {
        **dict(zip(("rule", "momentum", "restart"), place, strict=True)),
        "perplexity": None if line is None else line["perplexity"],
        "state": "missing" if line is None else line["state"],
        "spread": spread,
        "change": {wire: _judged(here[wire], here[EXACT], spread) for wire in LOSSY},
    }


def _spread(logs: DataFrame) -> float | None:
    """The seeds' own spread: standard deviation of the mean over the places that have finished on every seed."""
    ended = logs[[state == "finished" for state in states(logs)]]
    error = Paired.over(ended).error if len(ended) else None
    return None if error is None else error * math.sqrt(len(logs.columns))


def _all_facts(logs: Mapping[str, DataFrame]) -> dict[str, Any]:
    """The same for the mean over the places, where the noise of single runs is smallest."""
    spread = _spread(logs[EXACT])
    return {"spread": spread, "change": {wire: _judged(logs[wire], logs[EXACT], spread) for wire in LOSSY}}


def _gain_facts(logs: Mapping[str, DataFrame], kind: str, momentum: float) -> dict[str, Any]:
    """What a restart gains on each wire (never over K), and how that differs from float32's, seed by seed."""
    sides = {
        wire: [every.xs((kind, momentum, restart), drop_level=False).droplevel("restart") for restart in RESTARTS]
        for wire, every in logs.items()
    }
    gains = {wire: _minus(*both) for wire, both in sides.items()}
    spread = _spread(gains[EXACT])
    return {
        "gain": {wire: _change(*both) for wire, both in sides.items()},
        "spread": spread,
        "shift": {wire: _judged(gains[wire], gains[EXACT], spread) for wire in LOSSY},
    }


def _minus(arm: DataFrame, control: DataFrame) -> DataFrame:
    """Subtract settings, as a table of logarithms: inf where one has diverged, NaN where one is missing."""
    gaps = arm - control
    for place, mine, other in zip(gaps.index, states(arm), states(control), strict=True):
        remark = fate(mine, other)
        if remark:
            gaps.loc[place] = math.nan if remark == MISSING else math.inf
    return gaps


def _typical(logs: Mapping[str, DataFrame]) -> dict[str, float | None]:
    """Root mean square change of log perplexity: another wire and the same seed; another seed and float32."""
    facts = {wire: _change(logs[wire], logs[EXACT])["rms"] for wire in LOSSY}
    ended = [line for line in logs[EXACT].to_numpy().tolist() if all(map(math.isfinite, line))]
    squares = [(a - b) ** 2 for line in ended for a, b in combinations(line, 2)]
    return facts | {"another seed": math.sqrt(statistics.fmean(squares)) if squares else None}


def verdict(change: Mapping[str, Any], spread: float | None) -> str:
    """A change in words, by the module's two questions.

    Args:
        change: of `_change`, of one place.
        spread: standard deviation of the seeds' logarithms in float32.
    """
    if change["log"] is None:
        return next(iter(change["without"]))
    if spread is None or change["low"] is None:
        return ONE_SEED
    clear = not change["low"] <= 0 <= change["high"]
    large = abs(change["log"]) > spread
    if not clear:
        return "open" if large else NOISE
    return ("higher" if change["log"] > 0 else "lower") + ("" if large else ", by less than a seed")


def _add_changes(line: Line, logs: Mapping[str, DataFrame], sent: Mapping[str, int]) -> None:
    """Add what the figure shows of a setting, as columns."""
    place = tuple(line[name] for name in _PLACE)
    mine, exact = logs[line["wire"]].loc[[place]], logs[EXACT].loc[[place]]
    change, lossy = _change(mine, exact), line["wire"] != EXACT
    line["bytes_a_round"] = sent[line["wire"]]
    for name in ("ratio", "error", "low", "high"):
        line[f"float32_{name}"] = change[name] if lossy else None
    gaps = (mine - exact).iloc[0]
    for seed in line["by_seed"]:
        line[f"float32_log_seed{seed}"] = gaps[seed] if lossy and change["places"] else None


# ------------------------------------------------------------------------------------------------------------- answer


def answer(result: Result) -> str:
    """Each wire against float32 in each place, against what the seed alone does, and what is sent."""
    numbers, settings = result.numbers, result.settings
    places = numbers["places"] | {"all places": numbers["all_places"] | {"perplexity": None, "state": ""}}
    seeds = len(settings["seeds"])
    header = ["", "float32", "seeds", *(word for wire in LOSSY for word in (wire, "verdict"))]
    body = [_table_line(name, facts) for name, facts in places.items()]
    chance = 2 * float(stdtr(seeds - 1, -CLEAR)) if seeds > 1 else 0.0
    comparisons = len(LOSSY) * len(places)
    rule = (
        f" '{NOISE}': within {CLEAR:g} standard errors of 0, and no larger than 'seeds'; without any effect "
        f"{chance * comparisons:.1f} of the {comparisons} would be beyond {CLEAR:g} standard errors."
    )
    lines = [
        f"Validation perplexity, {FORM} form, lr {LR:g}, S={settings['inner_steps']}, {settings['rounds']} rounds; "
        f"rule, momentum, restart ({_seeds_words(seeds)}). 'seeds': what the seed alone changes in float32, one "
        "standard deviation of the logarithm. Wires: change of the geometric mean against float32, paired by seed, "
        f"with its standard error.{rule if seeds > 1 else ''}",
        format_table(header, body),
    ]
    for wire in LOSSY:
        changes = {name: facts["change"][wire] for name, facts in places.items()}
        lines.append(
            _claim(f"sent as {wire}, the model reaches what it reaches in float32, within seed noise", changes)
        )
    for wire in LOSSY:
        shifts = {name: facts["shift"][wire] for name, facts in numbers["restart_gain"].items()}
        lines.append(
            _claim(
                f"sent as {wire}, K={PERIOD} gains over no restart what it gains in float32, within seed noise", shifts
            )
        )
    lines += [_gains_words(numbers["restart_gain"]), _typical_words(numbers["typical"])]
    sent, share = numbers["bytes_a_round"], numbers["bytes_over_float32"]
    each = ", ".join(f"{wire} {sent[wire]:,} ({share[wire]:.3f} of float32's)" for wire in WIRES)
    lines.append(
        f"Bytes that each of {PROCESSES} processes sends a round, {settings['parameters']:,} parameters: {each}. "
        "Computed from the wire's packets: the runs themselves have both replicas in one process, which rounds as two "
        "do and sends nothing."
    )
    return "\n".join(lines)


def _seeds_words(seeds: int) -> str:
    return f"{seeds} seeds" if seeds > 1 else "one seed, so there is no noise to judge by"


def _table_line(name: str, facts: Mapping[str, Any]) -> list[Any]:
    spread = "" if facts["spread"] is None else f"{facts['spread']:.1%}"
    changes = [word for change in facts["change"].values() for word in (change_words(change), change["verdict"])]
    return [name, perplexity_words(facts), spread, *changes]


def _claim(claim: str, by_place: Mapping[str, Mapping[str, Any]]) -> str:
    """Where the verdict is seed noise. Divergence where float32 has none refutes; open is not known."""
    unknown = ("open", "missing", "both diverged", "the other diverged", ONE_SEED)
    held = {
        name: None if facts["verdict"] in unknown else facts["verdict"] == NOISE for name, facts in by_place.items()
    }
    detail = {
        name: " ".join(word for word in (change_words(facts), "" if held[name] else facts["verdict"]) if word)
        for name, facts in by_place.items()
    }
    return tally(claim, held, detail)


def _gains_words(gains: Mapping[str, Any]) -> str:
    parts = []
    for name, facts in gains.items():
        ratios = [f"{facts['gain'][wire]['ratio']:.2f}" for wire in WIRES if facts["gain"][wire]["ratio"] is not None]
        parts.append(f"{name} {' / '.join(ratios) or 'not known'}")
    return f"Perplexity without restarts over that with K={PERIOD}, {' / '.join(WIRES)}: {'; '.join(parts)}."


def _typical_words(facts: Mapping[str, float | None]) -> str:
    words = [f"{what} {value:.1%}" for what, value in facts.items() if value is not None]
    return f"A single run's change of log perplexity, root mean square: {', '.join(words) or 'not known'}."
