"""Read a spectrum for the page from a run's folder: effective progress as its record shows it, block by block."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from twophase.advice.evidence import observed_in, outside
from twophase.errors import UsageError
from twophase.explorer.page import LIMITS, RunSpectrum, shows
from twophase.restart import Never, Periodic
from twophase.rule import OuterRule
from twophase.runs.folder import METRICS, ROUNDS
from twophase.runs.record import Block, RunRecord, read_record
from twophase.theory.observed import Observed

_MOST_NAMED = 6  # blocks that the note names


@dataclass(frozen=True)
class FromRun:
    """Hold the values of a run for the page.

    Args:
        rule: its outer rule.
        restart: its restart policy in text, `never` where the page does not know it.
        rounds: its length in rounds.
        inner_steps: its inner steps a round.
        problems: sentences on missing or damaged files, and on settings that the page cannot show; may be empty.
        spectrum: its estimated effective progress; without values, and a note that says why, where it shows none.
    """

    rule: OuterRule
    restart: str
    rounds: int
    inner_steps: int
    problems: str
    spectrum: RunSpectrum


def read_run(path: Path) -> FromRun:
    """Return what the folder of a run, finished or not, holds for the page.

    Raises:
        UsageError: no run, or no outer rule.
    """
    record = read_record(path)
    rule, policy = record.rule, record.policy()
    if rule is None and record.outer_words:
        raise UsageError(
            f"--run {path}: its outer optimizer is {record.outer_words}, and the page shows momentum SGD with "
            "constant learning rate and momentum. Give another run, or leave --run out"
        )
    if rule is None:
        raise UsageError(
            f"--run {path}: its config.yaml holds no outer rule; give the folder of a run, or leave --run out"
        )
    seen = {block.name: _observed(record, block, rule) for block in record.blocks}
    usable = {name: observed for name, (observed, why_not) in seen.items() if not why_not}
    if usable:
        note = _note(usable, len(seen) - len(usable))
    else:
        reasons = sorted({why_not for _, why_not in seen.values()}) or [_no_blocks(record)]
        note = f"cannot be estimated: {'; '.join(reasons)}."
    by_fragment = record.config.get("sync.restart")
    is_period = isinstance(policy, Periodic) and policy.period <= LIMITS["restart"][1]
    is_shown = not by_fragment and (is_period or isinstance(policy, Never) or shows(policy))
    rounds, said = record.planned_rounds or len(record.rounds["round"]) or 1, list[str]()
    if not is_shown:
        said.append(f"The run's own restarts ({record.restart}) are not among those of the page.")
    if rounds > LIMITS["rounds"][1]:
        said.append(f"Of the run's {rounds:,} rounds the page shows the first {LIMITS['rounds'][1]:,.0f}.")
    values = sorted((min(1.0, observed.sigma) for observed in usable.values()), reverse=True)
    most = min(int(LIMITS["count"][1]), len(values))  # as many as the page takes, evenly spread
    indices = np.linspace(0, len(values) - 1, most).round().astype(int)
    sigma = tuple(values[index] for index in indices)
    return FromRun(
        rule=rule,
        restart=str(policy) if is_shown else "never",
        rounds=_within("rounds", rounds),
        inner_steps=_within("inner_steps", record.number("inner_steps")),
        problems=" ".join(said),
        spectrum=RunSpectrum(path.resolve().name, sigma, " ".join([note, *said])),
    )


def _observed(record: RunRecord, block: Block, rule: OuterRule) -> tuple[Observed, str]:
    """Return a block's estimate, and why it must not be shown (as in a report; empty if it may be)."""
    g, m, cosine = block.pseudo_gradient_norm, block.buffer_norm, block.cosine
    rates = record.inner_lr(block.index)
    seen = observed_in(block, rule, rates)
    measured = np.isfinite(g) & np.isfinite(m) & np.isfinite(cosine)
    lacking = int(np.sum(~measured & (m != 0)))  # with an empty buffer there is no angle
    if rule.momentum == 0:
        return seen, "without momentum a run does not show it"
    if beyond := outside(record):
        return seen, " ".join(beyond).removesuffix(".")
    if lacking and not np.any(measured & (m != 0)):
        return seen, f"no round of {ROUNDS} has the norms of pseudo-gradient and buffer and the cosine between them"
    if rates is None:
        return seen, (
            f"the inner learning rate of the rounds is unknown ({METRICS}), and pseudo-gradients that shrink with it "
            "look like progress"
        )
    if seen.why_not and lacking:
        return seen, f"{seen.why_not} ({lacking} of {len(g)} rounds lack a norm or the cosine)"
    return seen, seen.why_not


def _no_blocks(record: RunRecord) -> str:
    if record.recorded:
        return f"no line of {ROUNDS} has the param groups (groups) with the norms that it needs"
    return f"{ROUNDS} records no rounds"


def _note(usable: dict[str, Observed], unusable: int) -> str:
    parts = [
        f"{name} σ = {seen.sigma:.3g} ± {seen.interval[1] - seen.sigma:.2g} from {seen.pairs} pairs of rounds"
        for name, seen in list(usable.items())[:_MOST_NAMED]
    ]
    if len(usable) > _MOST_NAMED:
        parts.append(f"and {len(usable) - _MOST_NAMED} more blocks")
    more = f" No estimate for {unusable} other block{'s' if unusable > 1 else ''}." if unusable else ""
    return (
        f"{'; '.join(parts)} (95 %).{more} An average over the modes in the momentum buffer. AdamW inside a round and "
        "different data on the replicas are outside the model."
    )


def _within(name: str, value: float) -> int:
    low, high = LIMITS[name]
    return int(min(high, max(low, value))) if math.isfinite(value) else int(low)
