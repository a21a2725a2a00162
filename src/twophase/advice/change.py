"""The one change that the evidence supports for a run: what to change, what it was worth where it was measured.

The evidence is this project's own, of small models: docs/restarts.md, "What to use when", and docs/bench.md.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from twophase.restart import Never, RestartPolicy, mean_outer_gain, parse
from twophase.rule import OuterRule
from twophase.runs.config import OuterConfig
from twophase.runs.folder import RECORDED
from twophase.theory.modes import stable_limit

LEAST_ROUNDS = 8
MANY_ROUNDS = 10_000
"""Rounds over which a mean outer gain is computed at most: over more it is hardly another, and takes time."""
LARGE_GAIN = 2.0
"""Mean outer gain above which runs of up to some 100 rounds became better with a smaller step; averaging has 1."""
_WORTH = {
    True: "each at its own best inner learning rate, a restart every 3 rounds (--outer.restart 3) gave 1.09 to 1.28 "
    "times lower perplexity than none. That is still 7 to 28 % above averaging; over 300 rounds neither is "
    "distinguished",
    False: "at momentum 0.9 a restart every 3 rounds (--outer.restart 3) gave 1.29 to 2.08 times lower perplexity "
    "than none. After 300 rounds it is still 1.20 times, and 8 % above averaging",
}
"""What restarts and averaging were worth, with Nesterov momentum or heavy ball."""
RISING = 0.936
"""Limit of `shrunk` above which a rising outer rate was better than averaging: docs/bench.md, the map of regimes."""
_SMALL_GAIN = 0.95
"""Mean outer gain below which averaging was better."""
_OF_SMALL_GAINS = (
    "at one untuned inner learning rate averaging was better than all 68 settings with a momentum and so small a gain, "
    "by 3 to 89 %"
)
_FILTER = "orthogonal"


@dataclass(frozen=True, slots=True)
class Change:
    """Hold a change of the outer optimizer."""

    words: str  # what to change and why
    size: str  # what it was worth where it was measured
    values: Mapping[str, Any]  # of the configuration, by dotted path; empty where nothing should change

    def command(self, run: str, config: Mapping[str, Any]) -> str:
        """Return the command, or for a recorded loop the code, that makes the changed run; empty without a change."""
        if not self.values:
            return ""
        if config.get(RECORDED):
            if "outer.filter" in self.values:
                return f'in your loop: DiLoCo(model, "averaging", filter="{_FILTER}", inner_steps=…)'
            values: dict[str, Any] = {**config, **self.values, "outer.restart": "never"}
            rule = OuterConfig(**{path[6:]: values[path] for path in values if path.startswith("outer.")}).rule()
            assert rule is not None
            looks = ", nesterov=True" if rule.nesterov else ""
            # Without a momentum both forms are the same.
            looks += ', form="ema"' if rule.momentum and rule.form == "ema" else ""
            return f"in your loop: OuterRule(lr={rule.lr:g}, momentum={rule.momentum:g}{looks})"
        options = [f"--{path} {'none' if value is None else value}" for path, value in self.values.items()]
        config_file, out = shlex.quote(f"{run}/config.yaml"), shlex.quote(f"{run}-changed")
        return f"twophase train --config {config_file} {' '.join(options)} --out {out}"


def change(
    rule: OuterRule | None,
    verdicts: list[str],
    rounds: int,
    config: Mapping[str, Any],
    shrunk: float | None = None,
    *,
    planned: int | None = None,
) -> Change | None:
    """Return the change for a run; None where too little is recorded to say anything.

    `shrunk` is that of `theory.observed`, None of a run that has not ended. The gain is a mean over the `planned`
    rounds of the whole run, where they are known.
    """
    if rule is None or rounds < LEAST_ROUNDS:
        return None
    policy: RestartPolicy | None = None
    with contextlib.suppress(ValueError):  # unknown to this process
        policy = parse(config.get("outer.restart", "never"))
    if "diverges" in verdicts and not (policy and policy.takes_steps):
        half, text = {"outer.lr": round(rule.lr / 2, 6)}, rule.describe()
        if stable_limit(rule) <= 1:
            advice = f"Halve the outer learning rate: {text} diverges, and no restart stabilizes a mode that does."
        elif rule.momentum > 0 or rule.lr > 1:  # effective progress is at most 1: no mode of the theory diverges
            more = "" if policy == Never() else " without restarts"
            advice = (
                f"Lower the inner learning rate, or halve the outer one: under {text} no linear mode diverges{more}."
            )
        else:
            advice, half = "Lower the inner learning rate: averaging makes no linear mode diverge.", {}
        return Change(advice, "whether it is enough, the run shows", half)
    if policy is None or policy.takes_steps or config.get("sync.restart"):
        return Change("None: there is no evidence about this policy; hold it against plain averaging.", "", {})
    if rule.momentum == 0:
        return _of_averaging(rule, config, shrunk)
    gain = None
    with contextlib.suppress(ValueError):  # an adaptive policy has no gain that is known in advance
        gain = mean_outer_gain(rule, policy, min(planned or rounds, MANY_ROUNDS))
    own = {"outer.lr": None, "outer.momentum": None}
    averaging = {"outer.method": "averaging", **own, "outer.restart": "never"}
    if gain is not None and gain < _SMALL_GAIN:
        return Change(
            f"Average the replicas, without outer momentum: the mean outer gain of this rule is {gain:.3g}, where "
            "averaging has 1.",
            _OF_SMALL_GAINS,
            averaging,
        )
    if gain is None or gain <= LARGE_GAIN:
        outer_gain = "" if gain is None else f" (its mean outer gain is {gain:.3g}, where averaging has 1)"
        return Change(
            f"None: nothing measured supports one at a step of this size{outer_gain}; plain averaging is the control.",
            "at a momentum of 0.1 or 0.3, tuned without restarts, periods from 2 to 11 and none were at most 2 % apart",
            {},
        )
    return Change(
        f"Average the replicas, without outer momentum: the mean outer gain of this rule is {gain:.3g}, where "
        f"averaging has 1. Above {LARGE_GAIN:g} a smaller step was better in runs of up to some 100 rounds.",
        _WORTH[rule.nesterov],
        averaging,
    )


def _of_averaging(rule: OuterRule, config: Mapping[str, Any], shrunk: float | None) -> Change:
    """Return the change for a rule without momentum."""
    if not _SMALL_GAIN <= rule.lr <= LARGE_GAIN:
        return Change(
            f"Average the replicas: without momentum and at lr {rule.lr:g} the anchor goes {rule.lr:g} times the way.",
            "with its rate tuned, SGD without momentum was level with averaging on the bench",
            {"outer.lr": 1.0},
        )
    if shrunk is not None and shrunk > RISING and not config.get(RECORDED):
        return Change(
            "Raise the inner learning rate, if it has not been tuned; else let the outer one rise from 1 to 2 over "
            f"the run. The pseudo-gradient has come down by {100 * shrunk:.1f} % of its largest norm, and beyond "
            f"{100 * RISING:.1f} % a rising rate was mostly better.",
            "in the bench's map of regimes this limit had 14 of 16 signs right at held-out places. A rising rate "
            "was better by 2 to 7 % in the 5 beyond it. But four of these had an inner rate below averaging's best, "
            "and where it was the best one, this helped at one of three places",
            {"outer.schedule": "linear:2"} | ({} if rule.lr == 1 else {"outer.lr": 1.0}),
        )
    if config.get("inner.method") == "muon":
        return Change(
            "None: averaging at a tuned inner learning rate is what the evidence has for inner Muon.",
            "at the bench's place with inner Muon orthogonalizing the pseudo-gradient changed nothing that five seeds "
            "could tell",
            {},
        )
    return Change(
        "Orthogonalize the pseudo-gradient of each matrix, at two or three inner learning rates, larger ones among "
        "them.",
        "each at its own best inner learning rate, ahead of averaging at 8 of 8 places of the bench's map, by 0.5 "
        "to 15 %. At five of them the rate is twice averaging's. Without tuning nothing (at the default of 2e-3 "
        "between -3 and 2 %)",
        {"outer.filter": _FILTER},
    )
