"""Does tuning the restart period transfer over communication periods better than tuning the outer momentum?

Tuned once at the short communication period, then at every one: the momentum without restarts against the restart
period, at the learning rate and momentum that are best without restarts and at those that are best with K = 3. Beside
every restarted setting its gain-matched control without restarts, and at every communication period momentum-free SGD.
A period that is not shorter than the run restarts nothing: a flat curve there says nothing about restarts, so such
settings are marked in the figure and left out of every statement on restarts.

Source: paper section 4, figure 4, and the curves of the appendix; theory notes E12, R31.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from twophase.recipes.paper import (
    BETA_SWEEP,
    BOTH_FORMS,
    K_SWEEP,
    OWN_K_SWEEP,
    PERIOD,
    RULES,
    Scale,
    arm_name,
    control_name,
    retuning,
    tuned,
)
from twophase.studies._lm import (
    MARGIN,
    Line,
    best,
    contrast,
    control_of,
    difference,
    free_and_averaging,
    lines_of,
    lower,
    one,
    perplexity_words,
    pick,
    place_name,
    public,
    ratio_above,
    ratio_words,
    seeds_words,
    shown,
    tally_by_group,
)
from twophase.studies._retuning_figure import draw
from twophase.studies.study import Result
from twophase.sweep.grid import Sweep
from twophase.sweep.table import Row, format_table

__all__ = ["QUESTION", "answer", "draw", "sweep", "table"]

QUESTION = "Does a tuned restart period transfer over communication periods better than a tuned momentum?"
CHOOSES_RUNS = True
Found = dict[str, list[tuple[bool | None, float | None]]]
"""From form and rule to, for each communication period, whether a claim holds there and the number it rests on."""
_OTHERS = {
    "beta_sweep": "no restart with its momentum tuned at each S",
    "gain_matched": "its own gain-matched control",
    "momentum_free": "momentum-free SGD with its learning rate tuned at each S",
    "averaging": "plain averaging",
}


def sweep(scale: Scale, rows: Sequence[Row]) -> Sweep:
    """The runs (`recipes.paper.retuning`): the tuning, and when its rows are known what follows from it."""
    return retuning(scale, rows)


def table(rows: Sequence[Row], scale: Scale) -> Result:
    """Every setting, and by communication period, form and rule both sweeps, their transfer and their controls."""
    lines = lines_of(rows, scale)
    found = tuned(scale, rows) or {}
    places = {
        place_name(form, kind, inner_steps): _facts(lines, (form, kind), inner_steps, scale, found)
        for form in BOTH_FORMS
        for kind in RULES
        for inner_steps in scale.retuning
    }
    numbers = {
        "tuned": {
            place_name(form, kind): {
                what: dict(zip(("lr", "momentum"), found[form, kind, restart], strict=True))
                for what, restart in (("never", "never"), (f"K={PERIOD}", str(PERIOD)))
                if (form, kind, restart) in found
            }
            for form in BOTH_FORMS
            for kind in RULES
        },
        "places": places,
    }
    settings = {
        "tuned_at": scale.short,
        "tuning_period": PERIOD,
        "inner_steps": scale.retuning,
        "rounds": {inner_steps: scale.rounds(inner_steps) for inner_steps in scale.retuning},
        "momenta": scale.momenta,
        "periods": scale.periods,
        "seeds": scale.seeds,
        "seeds_words": seeds_words(scale),
    }
    return Result(public(lines), numbers, settings)


def _facts(
    lines: Sequence[Line], rule: tuple[str, str], inner_steps: int, scale: Scale, found: Mapping[Any, Any]
) -> dict[str, Any]:
    """One communication period, form and rule."""
    form, kind = rule
    here = pick(lines, inner_steps=inner_steps)
    beta = pick(here, arm=arm_name(form, kind, BETA_SWEEP))
    momentum = found[form, kind, "never"][1] if (form, kind, "never") in found else None
    untouched = one(beta, momentum=momentum)
    free, averaging = free_and_averaging(here, inner_steps)
    facts: dict[str, Any] = {
        "form": form,
        "rule": kind,
        "inner_steps": inner_steps,
        "rounds": scale.rounds(inner_steps),
        "momentum_free": shown(free),
        "averaging": shown(averaging),
        "kept_momentum": shown(untouched),
        "beta_sweep": _curve(beta, untouched),
    }
    for what, key in ((K_SWEEP, "k_sweep"), (OWN_K_SWEEP, "own_k_sweep")):
        arm = arm_name(form, kind, what)
        curve = pick(here, arm=arm)
        fires = [line for line in curve if line["restarts"]]
        # The period that is kept is the best one where the tuning was done, on the same curve.
        kept = best(line for line in pick(lines, arm=arm, inner_steps=scale.short) if line["restarts"])
        kept = None if kept is None else one(fires, restart=kept["restart"])
        top = best(fires)
        pairs = [(line, control_of(here, control_name(arm), line)) for line in fires]
        controls = [pair for pair in pairs if pair[1] is not None]  # not every period of the own tuning has one
        top_control = None if top is None else control_of(here, control_name(arm), top)
        if top_control is None:  # a period without a control of its own: the best of those that there are
            top_control = best(control for _, control in controls if control is not None)
        others = {"beta_sweep": best(beta), "gain_matched": top_control, "momentum_free": free, "averaging": averaging}
        facts[key] = _curve(fires, kept) | {
            "never_fires": [line["restart"] for line in curve if not line["restarts"]],
            "kept": shown(kept),
            "kept_minus_kept_momentum": difference(kept, untouched),
            "over_gain_matched": contrast(controls),
            "best_minus": {name: difference(top, other) for name, other in others.items()},
        }
    facts["k_sweep"]["over_same_setting_never"] = contrast(
        [(line, untouched) for line in pick(here, arm=arm_name(form, kind, K_SWEEP)) if line["restarts"]]
    )
    return facts


def _curve(curve: Sequence[Line], kept: Line | None) -> dict[str, Any]:
    """A sweep over one hyperparameter: its best, its worst over its best, and the price of not retuning it.

    `flatness` is None when a setting has diverged or is missing: a curve that breaks off has no ratio.
    """
    top = best(curve)
    values = [line["perplexity"] for line in curve if line["perplexity"] is not None]
    whole = bool(curve) and len(values) == len(curve)
    regret = None if not (kept and top and kept["perplexity"]) else kept["perplexity"] / top["perplexity"]
    return {
        "settings": len(curve),
        "diverged": sum(line["state"] == "diverged" for line in curve),
        "missing": sum(line["state"] == "missing" for line in curve),
        "best": shown(top),
        "worst_over_best": max(values) / min(values) if whole else None,
        "kept_over_best": regret,
    }


# --------------------------------------------------------------------------------------------------------------- answer


def answer(result: Result) -> str:
    """Whether the period transfers better than the momentum, and what it gains over every control."""
    settings, places = result.settings, result.numbers["places"]
    if not any(facts["beta_sweep"]["settings"] for facts in places.values()):
        return "Not known: the runs of the tuning have not all ended, or no setting of it has finished."
    at, rounds = settings["tuned_at"], settings["rounds"]
    idle = {steps: [period for period in settings["periods"] if period >= rounds[steps]] for steps in rounds}
    lines = [
        f"Validation perplexity ({settings['seeds_words']}). Tuned at S={at}: {_tuned_words(result)}.",
        f"'spread': worst over best of a sweep; 'kept': what keeping the value that was best at S={at} costs, relative "
        "to the best of the sweep. K*: restarts at the setting that was tuned without them; K**: at the one that was "
        f"tuned with K={settings['tuning_period']}. Ratios: geometric mean over the periods, above 1 favours restarts.",
        format_table(_HEADER, [_table_line(name, facts) for name, facts in places.items()]),
        *(
            f"S={steps} has {rounds[steps]} rounds: K = {', '.join(map(str, periods))} never fires there and is in "
            "none of these numbers."
            for steps, periods in idle.items()
            if periods
        ),
    ]
    moved = [facts for facts in places.values() if facts["inner_steps"] != at]
    lines += _transfer_words(list(places.values()), moved)
    for key, mark in (("k_sweep", "K*"), ("own_k_sweep", "K**")):
        lines += _gain_words(list(places.values()), key, mark)
    lines.append("A range is over the communication periods, of means over the seeds; every place is in the JSON.")
    return "\n".join(lines)


def _transfer_words(places: Sequence[Mapping[str, Any]], moved: Sequence[Mapping[str, Any]]) -> list[str]:
    """Whether the period is flatter and transfers better; `moved` are the places where nothing was tuned."""

    def kept_gap(facts: Mapping[str, Any]) -> tuple[bool | None, float | None]:
        gap = facts["k_sweep"]["kept_minus_kept_momentum"]
        return lower(gap), gap["mean"] if gap else None

    return [
        tally_by_group(
            "perplexity varies less over K than over the momentum; the number is the spread over K",
            _grouped(places, lambda facts: (_flatter(facts), facts["k_sweep"]["worst_over_best"])),
            ".2f",
        ),
        tally_by_group(
            "away from where it was tuned, keeping K costs less than keeping the momentum; the number is its cost",
            _grouped(moved, lambda facts: (_cheaper(facts), _cost(facts["k_sweep"]))),
            "+.1%",
        ),
        tally_by_group(
            "with nothing retuned, K* has a lower perplexity, for every seed, than no restart",
            _grouped(moved, kept_gap),
            "+.2f",
        ),
    ]


def _gain_words(places: Sequence[Mapping[str, Any]], key: str, mark: str) -> list[str]:
    """What the restarts of one of the two sweeps gain over each control."""

    def ratio(name: str) -> Found:
        def of(facts: Mapping[str, Any]) -> tuple[bool | None, float | None]:
            found = facts[key][name]
            return ratio_above(found), found["ratio"]["mean"] if found["ratio"] else None

        return _grouped(places, of)

    def gap(name: str) -> Found:
        def of(facts: Mapping[str, Any]) -> tuple[bool | None, float | None]:
            found = facts[key]["best_minus"][name]
            return lower(found), found["mean"] if found else None

        return _grouped(places, of)

    ratios = {
        "over_same_setting_never": "its own setting without restarts",
        "over_gain_matched": "its gain-matched controls",
    }
    return [
        *(
            tally_by_group(f"{mark} is better than {words} by more than {MARGIN:.0%}", ratio(name), ".2f")
            for name, words in ratios.items()
            if name in places[0][key]
        ),
        *(
            tally_by_group(
                f"with its period tuned at each S, {mark} has a lower perplexity, for every seed, than {words}",
                gap(name),
                "+.2f",
            )
            for name, words in _OTHERS.items()
        ),
    ]


def _grouped(
    places: Sequence[Mapping[str, Any]], of: Callable[[Mapping[str, Any]], tuple[bool | None, float | None]]
) -> Found:
    found: Found = {}
    for facts in places:
        found.setdefault(place_name(facts["form"], facts["rule"]), []).append(of(facts))
    return found


_HEADER = [
    "", "rounds", "best beta", "at", "spread", "kept", "best K*", "at", "spread", "kept", "best K**", "momentum-free",
    "averaging", "gain-matched/K*",
]  # fmt: skip


def _table_line(name: str, facts: Mapping[str, Any]) -> list[Any]:
    beta, k, own = facts["beta_sweep"], facts["k_sweep"], facts["own_k_sweep"]
    return [
        name,
        facts["rounds"],
        perplexity_words(beta["best"]),
        f"{beta['best']['momentum']:g}" if beta["best"] else "",
        _spread(beta),
        _kept(beta),
        perplexity_words(k["best"]),
        k["best"]["restart"] if k["best"] else "",
        _spread(k),
        _kept(k),
        perplexity_words(own["best"]),
        perplexity_words(facts["momentum_free"]),
        perplexity_words(facts["averaging"]),
        ratio_words(k["over_gain_matched"]),
    ]


def _tuned_words(result: Result) -> str:
    words = []
    for place, found in result.numbers["tuned"].items():
        parts = [f"{what} lr {at['lr']:g}, momentum {at['momentum']:g}" for what, at in found.items()]
        words.append(f"{place} {'; '.join(parts) or 'nothing finished'}")
    return "; ".join(words)


def _spread(curve: Mapping[str, Any]) -> str:
    if curve["worst_over_best"] is not None:
        return f"{curve['worst_over_best']:.2f}"
    return ", ".join(f"{curve[state]} {state}" for state in ("diverged", "missing") if curve[state]) or "none"


def _kept(curve: Mapping[str, Any]) -> str:
    cost = _cost(curve)
    return "" if cost is None else f"{cost:+.1%}"


def _cost(curve: Mapping[str, Any]) -> float | None:
    """What it costs, relatively, to keep the value that was best where the tuning was done."""
    return None if curve["kept_over_best"] is None else curve["kept_over_best"] - 1


def _flatter(facts: Mapping[str, Any]) -> bool | None:
    """Whether the curve over K is flatter; a curve that breaks off by divergence is not flat."""
    k, beta = facts["k_sweep"], facts["beta_sweep"]
    if (
        not (k["settings"] and beta["settings"])
        or k["missing"]
        or beta["missing"]
        or (k["diverged"] and beta["diverged"])
    ):
        return None
    if k["diverged"] or beta["diverged"]:
        return not k["diverged"]
    return k["worst_over_best"] < beta["worst_over_best"]


def _cheaper(facts: Mapping[str, Any]) -> bool | None:
    kept = [facts[key]["kept_over_best"] for key in ("k_sweep", "beta_sweep")]
    return None if None in kept else kept[0] < kept[1]
