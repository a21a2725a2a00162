"""Do restart periods by block, as the theory gives them, beat one period for all in a trained language model?

For each width and communication period, with DiLoCo's usual rule:

* one K for all blocks, and no restart at all; plain averaging as the control without momentum;
* K_b from the curvature of a run without restarts (`twophase spectrum`), once as the first cancellation at each block's
  mean progress (the paper's closed form), once by the exact loss of all its modes;
* K_b from what the rounds of that run show;
* K_b as an oracle: searched block by block on another seed;
* the controls: the same periods on other blocks, drawn at random.

All are compared with the one K that is best on the search seed, seed by seed. A difference is clear where its mean lies
more than `CLEAR` standard errors from 0. With so few seeds that is said rather too often.

Source: paper appendix A.9 (blockwise extension); theory notes R1, R13, R16, R20, R29.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from twophase.judge.cells import Paired, logs, outcomes
from twophase.recipes.paper import Scale
from twophase.studies import _blockwise_cells as cells
from twophase.studies._blockwise_cells import ALL, FREE, MEAN, NEVER, ONE, ORACLE, ROUNDS, SHUFFLED, Place
from twophase.studies._blockwise_figure import draw
from twophase.studies._lm import change_words, tally
from twophase.studies.study import Result
from twophase.sweep.grid import Sweep
from twophase.sweep.table import SEED, Row, format_table, readable, settings

__all__ = ["QUESTION", "answer", "draw", "measure", "sweep", "table"]
QUESTION = "Do restart periods by block, from curvature or from a run, beat one period for all blocks?"
CLEAR = 2.0
"""Standard errors."""
ARMS = (FREE, *(name for arm, control in SHUFFLED.items() for name in (arm, control)))


def sweep(scale: Scale, rows: Sequence[Row], measured: Mapping[str, Any] | None = None) -> Sweep:
    """The cells that can be known from rows and measurements."""
    return cells.sweep(scale, rows, measured or {})


def measure(scale: Scale, rows: Sequence[Row], runs: Path, known: Mapping[str, Any]) -> dict[str, Any]:
    """Curvature and rounds of the runs without restarts on the search seed."""
    return cells.measure(scale, rows, runs, known)


# -------------------------------------------------------------------------------------------------------- comparisons


def table(rows: Sequence[Row], scale: Scale, measured: Mapping[str, Any]) -> Result:
    """Every arm of every place with its change against the chosen K, and what was measured there."""
    scores = {
        row.run: math.inf if row.perplexity is None else row.perplexity
        for row in rows
        if row.state in ("finished", "diverged")
    }
    found = {place.name: _place(rows, scale, place, scores, measured) for place in cells.places(scale)}
    lines = [
        {"place": name, "arm": arm} | {key: value for key, value in one.items() if key != "logs"}
        for name, facts in found.items()
        for arm, one in facts["arms"].items()
    ]
    for line in lines:
        line["periods"] = " / ".join(",".join(periods) for periods in line["periods"])
        line |= {f"ratio_{number}": ratio for number, ratio in enumerate(line.pop("ratios"), start=1)}
    numbers = {
        "places": {
            name: facts
            | {"arms": {arm: {k: v for k, v in one.items() if k != "logs"} for arm, one in facts["arms"].items()}}
            for name, facts in found.items()
        }
    }
    made = cells.design(scale)
    settings = {
        "blocks": cells.BLOCKS, "form": cells.FORM, "lr": cells.LR, "momentum": cells.MOMENTUM, "steps": made.steps,
        "policies": made.policies, "search_seed": made.search_seed, "seeds": made.seeds, "draws": made.draws,
        "clear": CLEAR,
    }  # fmt: skip
    return Result(lines, numbers, settings)


def _place(
    rows: Sequence[Row], scale: Scale, place: Place, scores: Mapping[str, float], measured: Mapping[str, Any]
) -> dict[str, Any]:
    """One width and communication period."""
    made = cells.design(scale)
    here = [
        row
        for row in rows
        if (row.values["model.hidden_size"], row.values["inner_steps"]) == (place.width, place.inner_steps)
    ]
    judged = [row for row in here if row.values[SEED] in made.seeds]
    chosen = cells.best_alike(scale, place, scores)
    alike = {
        policy: _arm([row for row in judged if row.arm == ONE and _periods(row)[0] == policy])
        for policy in made.policies
    }
    reference = alike[chosen] if chosen is not None else None
    arms = {f"{ONE}: {policy}": one for policy, one in alike.items()}
    arms |= {arm: _arm([row for row in judged if row.arm == arm]) for arm in ARMS}
    arms = {arm: one for arm, one in arms.items() if one["periods"]}
    arms = {arm: one | _change(one, reference) for arm, one in arms.items()}
    found = measured.get(cells.pilot(scale, place))
    return {
        "width": place.width,
        "inner_steps": place.inner_steps,
        "rounds": -(-made.steps // place.inner_steps),
        "chosen": chosen,
        "arms": arms,
        "against_shuffled": {
            arm: _change(arms[arm], arms.get(SHUFFLED[arm]))
            for arm in SHUFFLED
            if arm in arms and SHUFFLED[arm] in arms
        },
        "measured": found,
        "order": _order(alike, found),
    }


def _periods(row: Row) -> tuple[str, ...]:
    return tuple(word.partition("=")[2] for word in row.values["sync.restart"])


def _arm(rows: Sequence[Row]) -> dict[str, Any]:
    """The rows of an arm: its periods, and by seed the mean log perplexity over its draws."""
    periods = list(dict.fromkeys(_periods(row) for row in rows))
    whole = logs(outcomes(settings(rows))) if rows else None
    states = {row.state for row in rows} - {"finished"}
    by_seed = {}
    if whole is not None and len(whole) == len(periods):
        by_seed = {seed: statistics.fmean(whole[seed]) for seed in whole if np.isfinite(whole[seed]).all()}
    every = {row.values[SEED] for row in rows}
    perplexity = math.exp(statistics.fmean(by_seed.values())) if by_seed and len(by_seed) == len(every) else None
    state = next(iter(sorted(states)), "finished" if rows else "missing")
    return {"periods": periods, "state": state, "perplexity": perplexity, "logs": by_seed}


def _change(mine: Mapping[str, Any], other: Mapping[str, Any] | None) -> dict[str, Any]:
    """Geometric mean ratio of perplexities, paired by seed, with its standard error; below 1 is better."""
    both = mine["logs"].keys() & other["logs"].keys() if other is not None else set()
    if other is None or mine["perplexity"] is None or other["perplexity"] is None or not both:
        return dict.fromkeys(("ratio", "error", "low", "high")) | {"ratios": []}
    pairs = Paired(tuple(mine["logs"][seed] - other["logs"][seed] for seed in sorted(both)))
    low, high = (None if end is None else math.exp(end) for end in pairs.ends(CLEAR))
    return {"ratio": pairs.ratio, "error": pairs.error, "low": low, "high": high, "ratios": pairs.ratios}


def _order(alike: Mapping[str, Mapping[str, Any]], found: Mapping[str, Any] | None) -> float | None:
    """Rank correlation between the predicted losses of one K for all and the perplexities; 1 where both order alike."""
    if found is None or len(alike) < 3 or any(one["perplexity"] is None for one in alike.values()):
        return None
    predicted, reached = (
        [values[policy] for policy in alike]
        for values in (found["log_loss"], {p: one["perplexity"] for p, one in alike.items()})
    )
    ranks = [[sorted(values).index(value) for value in values] for values in (predicted, reached)]
    return statistics.correlation(*ranks) if all(len(set(one)) > 1 for one in ranks) else None


def better(change: Mapping[str, Any]) -> bool | None:
    """Whether a change is clearly for the better; None where it cannot be judged."""
    return None if change["high"] is None else change["high"] < 1


# ------------------------------------------------------------------------------------------------------------- answer


def answer(result: Result) -> str:
    """What each arm reached against one K for all, what the theory had foretold, and where that holds."""
    found, settings = result.numbers["places"], result.settings
    seeds = settings["seeds"]
    judged = (
        f"{len(seeds)} seeds, means with their standard errors; 'clear' is more than {CLEAR:g} of them"
        if len(seeds) > 1
        else "one seed, so nothing can be judged"
    )
    lines = [
        f"Validation perplexity, Nesterov lr {settings['lr']:g} momentum {settings['momentum']:g} ({settings['form']} "
        f"form), {settings['steps']} inner steps, blocks {', '.join(settings['blocks'])} in this order; {judged}. "
        f"Against: the one K that is best on seed {settings['search_seed']}, paired by seed.",
        format_table(["", "arm", "periods", "perplexity", "against one K"], _body(found)),
        "What was measured in the run without restarts: progress of a round in the middle of the run by curvature "
        "(mean, and where 90 % of the loss lies), and by the rounds (the estimate, where it may be shown).",
        format_table(["", "block", "sigma", "from", "to", "rounds"], _sigma_body(found, list(settings["blocks"]))),
    ]
    lines += [
        _claim(
            f"{arm}: better than the chosen one K for all",
            {name: facts["arms"].get(arm) for name, facts in found.items()},
        )
        for arm in (MEAN, ALL, ROUNDS, ORACLE)
    ]
    lines += [
        _claim(
            f"{arm}: better than the same periods on other blocks",
            {name: facts["against_shuffled"].get(arm) for name, facts in found.items()},
        )
        for arm in SHUFFLED
    ]
    orders = {name: facts["order"] for name, facts in found.items()}
    lines.append(
        tally(
            "the modes of all blocks foretell the order of the periods for all (rank correlation at least 0.5)",
            {name: None if order is None else order >= 0.5 for name, order in orders.items()},
            {name: "" if order is None else f"{order:+.2f}" for name, order in orders.items()},
        )
    )
    return "\n".join(lines)


def _body(found: Mapping[str, Any]) -> list[list[Any]]:
    body = []
    for name, facts in found.items():
        for number, (arm, one) in enumerate(facts["arms"].items()):
            chosen = " (chosen)" if arm == f"{ONE}: {facts['chosen']}" else ""
            each = " / ".join(",".join("-" if p == NEVER else p for p in periods) for periods in one["periods"])
            words = [readable(one["perplexity"]) or one["state"], change_words(one)]
            body.append([name if number == 0 else "", arm + chosen, "" if arm == FREE else each, *words])
    return body


def _sigma_body(found: Mapping[str, Any], blocks: Sequence[str]) -> list[list[Any]]:
    body = []
    for name, facts in found.items():
        seen = facts["measured"]
        for number, block in enumerate(blocks if seen else ()):
            shown, sigma = seen["rounds_shown"][number], seen["rounds_sigma"][number]
            rounds = "none" if sigma is None else f"{sigma:.2g}{'' if shown else ' (not shown)'}"
            values = [f"{seen[key][number]:.2g}" for key in ("sigma", "low", "high")]
            body.append([name if number == 0 else "", block, *values, rounds])
    return body


def _claim(claim: str, found: Mapping[str, Mapping[str, Any] | None]) -> str:
    held = {name: None if one is None else better(one) for name, one in found.items()}
    return tally(claim, held, {name: "" if one is None else change_words(one) for name, one in found.items()})
