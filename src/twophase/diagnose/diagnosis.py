"""Say of a run's outer loop that it diverges, takes a large step, oscillates or is fine, and the one change to try.

The changes are a table of conditions (`CASES`); the first that holds counts. Each says the scale at which it was
measured in this project (docs/restarts.md, "What to use when", and docs/bench.md).
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import shlex
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from twophase.diagnose.observe import RECORD, observe
from twophase.errors import in_python
from twophase.restart import mean_outer_gain, parse
from twophase.runs.folder import RECORDED
from twophase.runs.record import Block, Column, RunRecord

LEAST_ROUNDS = 8
LARGE_GAIN = 2.0
"""Mean outer gain above which runs of up to some 100 rounds became better with a smaller step; averaging has 1."""
SMALL_GAIN = 0.95
"""Mean outer gain below which averaging was better."""
AGAINST, OFTEN = -0.5, 0.15
"""Cosine below which a pseudo-gradient points against the buffer, and the share of such rounds that is an oscillation:
noise in several directions has smaller cosines."""
RISEN, RISING = 3.0, 1.1
"""Factor by which |g| rises over the latest rounds in a divergence, and the least over the last few of them."""
SHRUNK = 0.936
"""Decline of |g| beyond which a rising outer rate was better than averaging: docs/bench.md, the map of regimes."""
_MOST_ROUNDS = 10_000  # over more, a mean outer gain is hardly another
_SCALE = "in this project's language models (31 thousand to 2 million parameters, AdamW inside, up to 300 rounds)"


@dataclass(frozen=True, slots=True)
class Facts:
    """What the conditions of `CASES` ask about a run or a block of it."""

    is_rule: bool = False  # False where the outer optimizer is more than a rule, or unknown
    momentum: bool = False  # whether that rule has one
    averages: bool = False  # no momentum, and a learning rate of at most 1, whatever else there is
    rounds: int = 0
    gain: float = math.nan  # mean outer gain of the rule under its restarts; nan where it is not known in advance
    diverges: bool = False
    oscillates: bool = False
    shrunk: float = 0.0
    inner: str = ""  # inner optimizer
    takes_muon: bool = True  # False where the model has no hidden matrix


@dataclass(frozen=True, slots=True)
class Case:
    """A row of the table: the state of a run, the condition for it, and the one change to try."""

    state: str
    holds: Callable[[Facts], bool]
    change: str
    values: Mapping[str, Any] = field(default_factory=dict)  # of the configuration, by dotted path
    inner: float = 1.0  # factor on the inner learning rate
    code: str = ""  # the same in a recorded loop


_AVERAGE: dict[str, Any] = {
    "values": {"outer.method": "averaging", "outer.lr": None, "outer.momentum": None, "outer.restart": "never"},
    "code": "OuterRule(lr=1, momentum=0)",
}
CASES = (
    Case(
        "diverges",
        lambda run: run.diverges and run.averages,
        "Halve the inner learning rate: averaging makes no linear mode diverge.",
        inner=0.5,
    ),
    Case(
        "diverges",
        lambda run: run.diverges,
        "Average the replicas, without outer momentum: no linear mode diverges under averaging, and no schedule of "
        "restarts stabilizes one that does.",
        **_AVERAGE,
    ),
    Case(
        "cannot tell",
        lambda run: not run.is_rule and not run.averages,
        "Average the replicas for comparison: what the numbers mean is known of averaging, and of momentum SGD with a "
        "learning rate and a momentum that stay the same.",
        **_AVERAGE,
    ),
    Case(
        "cannot tell", lambda run: run.rounds < LEAST_ROUNDS and not run.averages, f"None before {LEAST_ROUNDS} rounds."
    ),
    Case(
        "large step",
        lambda run: run.gain > LARGE_GAIN and run.momentum,
        "Average the replicas, without outer momentum: Nesterov momentum of 0.9 had 17 to 49 % higher perplexity, "
        "each at its best inner learning rate, in language models of 31 thousand parameters with AdamW inside. If the "
        "momentum must stay: a restart every 3 rounds lowered its perplexity 1.09 to 1.28 times, and heavy ball's 1.29 "
        "to 2.08 times, in runs of up to about 100 rounds.",
        **_AVERAGE,
    ),
    Case(
        "large step",
        lambda run: run.gain > LARGE_GAIN,
        f"Average the replicas: no larger rate without momentum was better than a rate of 1 {_SCALE}.",
        **_AVERAGE,
    ),
    Case(
        "oscillates",
        lambda run: run.oscillates and not run.averages,
        f"Average the replicas, without outer momentum: a tuned momentum was no better than averaging {_SCALE}.",
        **_AVERAGE,
    ),
    Case(
        "fine",
        lambda run: run.averages and (run.rounds < LEAST_ROUNDS or not run.is_rule),
        "Tune the inner learning rate, the doubled one first: without an outer momentum there is nothing to diagnose.",
        inner=2.0,
    ),
    Case(
        "fine",
        lambda run: run.gain < SMALL_GAIN,
        "Average the replicas: at one untuned inner learning rate it was better, by 3 to 89 %, than all 60 settings "
        f"with a momentum and a mean outer gain below {SMALL_GAIN}, in a language model of 31 thousand parameters.",
        **_AVERAGE,
    ),
    Case(
        "fine",
        lambda run: run.momentum or run.inner == "muon",
        "None: neither a momentum of this size, restarted or not, nor, with Muon inside, any change of the outer "
        f"optimizer was better than plain averaging {_SCALE}.",
    ),
    Case(
        "fine",
        lambda run: run.shrunk > SHRUNK,
        "Raise the inner learning rate: where |g| fell by more than 94 %, a rising outer rate (--outer.schedule "
        f"linear:2) was ahead in 12 of 14 cases, in all of which the inner one was below the best, {_SCALE}.",
        inner=2.0,
    ),
    Case(
        "fine",
        lambda run: run.is_rule and run.inner == "adamw" and run.takes_muon,
        "Take Muon as inner optimizer, at several inner learning rates: in the one language model with both "
        "(31 thousand parameters, 30 rounds), averaging over AdamW had 1.34 times the perplexity of averaging over "
        "Muon, each at its best inner rate, which for Muon was nearly six times as large.",
        values={"inner.method": "muon"},
        inner=4.0,
    ),
    Case(
        "fine",
        lambda run: run.is_rule,
        "Orthogonalize the pseudo-gradient of each matrix, at two or three inner learning rates, the doubled one among "
        f"them: averaging's perplexity was 7 to 25 % higher on six of eight workloads {_SCALE}, each at its best inner "
        "rate; less at larger width.",
        values={"outer.filter": "orthogonal"},
        inner=2.0,
        code='DiLoCo(model, "averaging", filter="orthogonal", inner_steps=…)',
    ),
)
"""The first case that holds is that of the run."""
STATES = tuple(dict.fromkeys(case.state for case in CASES))
"""The states, the worst first."""
Numbers = list[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class BlockState:
    """The state of a fragment or param group.

    Args:
        name: of the block.
        state: one of `STATES`.
        numbers: labels and values that it rests on, over its latest rounds.
    """

    name: str
    state: str
    numbers: Numbers


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The state of a run's outer loop.

    Args:
        state: one of `STATES`; of several blocks the worst.
        numbers: labels and values that it rests on, as text; of several blocks, what they have in common.
        change: the one change to try, with what was measured and at which scale; a sentence or two.
        command: makes the changed run; None without a change, or where only the user's loop can make it.
        blocks: of each fragment or param group; empty where there is only one.
    """

    state: str
    numbers: Numbers
    change: str
    command: str | None = None
    blocks: tuple[BlockState, ...] = ()

    def __str__(self) -> str:
        return describe(self)


def diagnose(record: RunRecord) -> Diagnosis:
    """Return the diagnosis of a run that has been read, in any state.

    It is about the latest rounds: the last third, but at least 30 if there are so many.
    """
    rule, configured, shrunk = record.rule, record.outer.rule() if record.outer else None, 0.0
    g = record.rounds["pseudo_gradient_norm"]
    if record.state == "finished" and len(record.blocks) == 1 and np.isfinite(g).all() and g.any():
        shrunk = float(1 - g[-max(len(g) // 4, 1) :].mean() / g.max())
    run = Facts(
        is_rule=rule is not None,
        momentum=rule is not None and rule.momentum > 0,
        averages=configured is not None and configured.momentum == 0 and configured.lr <= 1,
        rounds=record.recorded,
        diverges=record.state == "diverged",
        shrunk=shrunk,
        inner=str(record.config.get("inner.method", "")),
        takes_muon=record.environment.get("hidden_matrices") != 0,
    )
    found = [_judge(record, block, run) for block in record.blocks] or [(run, [])]
    cases = [next(case for case in CASES if case.holds(facts)) for facts, _ in found]
    worst = min(cases, key=CASES.index)
    planned = f" of {record.planned_rounds:,}" if record.planned_rounds else ""
    numbers = [
        ("outer optimizer", record.outer_words or "unknown"),
        ("rounds", f"{record.recorded:,}{planned}, {record.state}"),
    ]
    blocks: tuple[BlockState, ...] = ()
    if len(found) == 1:
        numbers += found[0][1]
    else:
        each = zip(record.blocks, cases, found, strict=True)
        blocks = tuple(BlockState(block.name, case.state, words) for block, case, (_, words) in each)
    change = in_python(worst.change) if record.config.get(RECORDED) else worst.change
    return Diagnosis(worst.state, numbers, change, _command(record, worst), blocks)


def describe(diagnosis: Diagnosis) -> str:
    """Return the diagnosis as plain text: the state, its numbers, those of each block, the change and its command."""
    groups = [("", diagnosis.numbers), *((f"{block.name}: {block.state}", block.numbers) for block in diagnosis.blocks)]
    width = max(len(label) for _, numbers in groups for label, _ in numbers)
    lines = [diagnosis.state]
    for title, numbers in groups:
        lines += ["", *([title] if title else []), *(f"  {label:{width}}  {value}" for label, value in numbers)]
    change = textwrap.fill(diagnosis.change, 100, break_on_hyphens=False)
    return "\n".join([*lines, "", change, *([diagnosis.command] if diagnosis.command else [])])


def _judge(record: RunRecord, block: Block, run: Facts) -> tuple[Facts, Numbers]:
    """Return the facts of a block, and the numbers of its latest rounds."""
    count, rule, policy, gain = len(block.index), record.rule, None, math.nan
    with contextlib.suppress(ValueError):  # a policy that this process does not know, or that decides by what it sees
        policy = parse(block.restart) if block.restart is not None else None
        if rule and policy and not policy.takes_steps:
            gain = mean_outer_gain(rule, policy, min(record.planned_rounds or count, _MOST_ROUNDS))
    latest = slice(max(0, count - max(30, math.ceil(count / 3))), count)
    rates, g = record.rounds["inner_lr"][block.index], block.pseudo_gradient_norm[latest]
    knows_rates = bool(np.isfinite(rates).any())
    rises = _rises(g) and (not knows_rates or _rises(g / np.where(rates > 0, rates, math.nan)[latest]))
    # lost: norms and cosine have ceased to be numbers, in the last two rounds and not in all
    finite = np.isfinite(block.pseudo_gradient_norm) | np.isfinite(block.buffer_norm) | np.isfinite(block.cosine)
    # only rounds that had a buffer have a cosine: not the first one after a restart
    had_buffer = np.append(False, ~block.restarted[:-1]) & (block.buffer_norm > 0)
    cosine = block.cosine[latest][(had_buffer & np.isfinite(block.cosine))[latest]]
    against = float(np.mean(cosine < AGAINST)) if len(cosine) else math.nan
    facts = dataclasses.replace(
        run,
        gain=gain,
        diverges=run.diverges or rises or bool(finite.any() and not finite[-2:].any()),
        oscillates=len(cosine) >= LEAST_ROUNDS - 2 and against >= OFTEN,
    )
    first, _, last = _medians(g, 3)
    numbers = {
        "mean outer gain of the rule (averaging: 1)": gain,
        "median gain of the rounds": _medians(block.gain[latest], 1)[0],
        "|g|, last third of them by first": last / first if first > 0 else math.nan,
        "median cosine of g and buffer": _medians(cosine, 1)[0],
        f"share of rounds with a cosine below {AGAINST:g}": against,
    }
    words = [
        ("latest rounds", f"{block.number[latest][0]:,.0f} to {block.number[-1]:,.0f}"),
        ("restarts", f"{block.restart if policy else 'unknown'}; {block.restarted[latest].sum():,} in these rounds"),
        *((label, f"{value:.3g}") for label, value in numbers.items() if math.isfinite(value)),
    ]
    # A policy's own steps, and parameters that replicas keep, would be taken for progress.
    if rule and policy and not policy.takes_steps and not record.numbers.get("sync.mixing", 0) > 0:
        seen = observe(rule, *(getattr(block, name) for name in RECORD), inner_lr=rates)
        if shown := seen.shown_interval:
            words.append(("sigma along the buffer (95 %)", f"{seen.sigma:.3g} ({shown[0]:.3g} to {shown[1]:.3g})"))
    return facts, words


def _medians(values: Column, parts: int) -> list[float]:
    """Return the median of what is finite in each part of some values; nan where nothing is."""
    finite = [part[np.isfinite(part)] for part in np.array_split(values, parts)]
    return [float(np.median(part)) if len(part) else math.nan for part in finite]


def _rises(values: Column) -> bool:
    """Return whether values rise from third to third, by `RISEN` in all, and go on rising within the last third."""
    first, middle, last = _medians(values, 3)
    before, end = _medians(values[-(len(values) // 3) :], 2)
    return len(values) >= LEAST_ROUNDS and first < middle < last > RISEN * first and end > RISING * before


def _command(record: RunRecord, case: Case) -> str | None:
    """Return the command that makes the changed run, or the code for it in a recorded loop."""
    if record.config.get(RECORDED):
        return f"in your loop: {case.code}" if case.code else None
    values, rate = dict(case.values), record.numbers.get("inner.lr")
    if case.inner != 1 and rate is not None:
        values["inner.lr"] = f"{case.inner * rate:g}"
    if not values or not record.config:
        return None
    options = " ".join(f"--{path} {'none' if value is None else value}" for path, value in values.items())
    config, out = (shlex.quote(f"{record.path}{end}") for end in ("/config.yaml", "-changed"))
    return f"twophase train --config {config} {options} --out {out}"
