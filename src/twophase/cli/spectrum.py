"""`twophase spectrum RUN`: measures the blocks of a run, says what follows, and writes the figure and the numbers."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twophase.base.config import UsageError
from twophase.base.files import table_text
from twophase.base.progress import meter
from twophase.figures.style import rendered, styled, write_files
from twophase.runs.record import WHOLE, RunRecord, read_record
from twophase.spectrum.blocks import Forecast, Seen, forecast, plain, seen
from twophase.spectrum.figure import draw
from twophase.spectrum.measure import PROBES, STEPS, Measured, measure, patterns_of
from twophase.spectrum.text import describe
from twophase.tasks.lm.restored import restore

NAME = "spectrum"
MOST = 100
"""Eigenvalues of a block that can be asked for."""


@dataclass(frozen=True)
class Wish:
    """What is asked for.

    Args:
        run: the run's folder.
        blocks: `NAME=PATTERN` each; none means the run's named fragments, or the usual five.
        batches: of text that the curvature is a mean over.
        top: eigenvalues of each block that are found one by one.
        out: folder of the files; None means the run's own.
        as_json: print the numbers instead of words.
        quiet: show no progress.
        known: dotted paths that a configuration of this version has.
    """

    run: Path
    blocks: tuple[str, ...] = ()
    batches: int = 4
    top: int = 5
    out: Path | None = None
    as_json: bool = False
    quiet: bool = False
    known: frozenset[str] = frozenset()


def spectrum(wish: Wish, say: Callable[[str], None] = print) -> int:
    """Measure, say and write.

    Args:
        wish: what is asked for.
        say: takes the words.

    Returns:
        The exit status.

    Raises:
        UsageError: no run, one that cannot be measured, options that do not fit, or files that cannot be written.
    """
    patterns = _patterns(wish.blocks)
    for option, value in (("--batches", wish.batches), ("--top", wish.top)):
        if value < 1:
            raise UsageError(f"{option} is {value}; it must be a whole number >= 1")
    if wish.top > MOST:
        raise UsageError(f"--top is {wish.top}; it must be at most {MOST}: each eigenvalue is found by itself")
    record = read_record(wish.run, wish.known)
    out = wish.out or wish.run
    with styled():  # and the folder, before the computation: what is wrong is told at once
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--out {out}: cannot be made ({error.strerror}); choose another folder") from None
        restored = restore(wish.run)
        chosen = patterns_of(restored, patterns)
        with meter("spectrum", len(chosen), quiet=wish.quiet) as show:
            measured = measure(restored, chosen, batches=wish.batches, top=wish.top, show=show)
        forecasts = [forecast(block, measured.setting) for block in measured.blocks]
        rounds = _paired(seen(record, measured.setting), measured)
        figure, rows = draw(_title(measured), measured.setting, forecasts, rounds)
        pictures = rendered(figure)
    facts = as_json(record, measured, forecasts, rounds)
    text = json.dumps(facts, indent=2, allow_nan=False) + "\n"
    paths = write_files(out / NAME, pictures | {".csv": table_text(rows), ".json": text})
    if wish.as_json:
        say(text.rstrip())
        return 0
    say(describe(_heading(record, measured), measured.setting, forecasts, rounds))
    say("\n" + "\n".join(map(str, paths)))
    return 0


def _patterns(words: Sequence[str]) -> dict[str, str] | None:
    found: dict[str, str] = {}
    for word in words:
        name, equals, pattern = word.partition("=")
        if not (name and equals and pattern) or name in found:
            what = "a name twice" if name in found else "no block"
            raise UsageError(
                f"--blocks {word}: {what}; write NAME=PATTERN for each block, such as ends='embedding|head' rest=."
            )
        found[name] = pattern
    return found or None


def _paired(rounds: dict[str, Seen], measured: Measured) -> dict[str, Seen]:
    """What the rounds show, under a block's name only where that block is the run's own fragment."""
    own = measured.config.sync.parts()
    if isinstance(own, dict) and list(own.items()) == list(measured.patterns.items()):
        return rounds
    return {name if name == WHOLE else f"fragment {name}": one for name, one in rounds.items()}


def _title(measured: Measured) -> str:
    config = measured.config
    return (
        f"{measured.setting.rule.describe()}, S = {config.inner_steps}, {config.rounds} rounds; "
        f"curvature after {measured.step:,} inner steps"
    )


def _heading(record: RunRecord, measured: Measured) -> list[str]:
    config = measured.config
    lrs = [f"{max(rates):.2g}" for rates in measured.setting.inner_lrs.values()]
    given = config.sync.policies() or config.outer.policy()
    policies = list(given.values()) if isinstance(given, Mapping) else [given]
    own = sorted({str(policy) for policy in policies if policy.takes_steps or policy.by_coordinate})
    return [
        f"run      {record.path}: {record.state}, checkpoint of step {measured.step:,} of {config.steps:,}",
        f"rule     {measured.setting.rule.describe()}, {config.rounds} rounds of {config.inner_steps} inner steps",
        *(
            f"restart  {one} takes steps of its own: K and the rounds' sigma below are of the rule without it"
            for one in own
        ),
        f"inner    AdamW, learning rate {', '.join(lrs)} (early, mid, late), weight decay "
        f"{config.inner.weight_decay:g}; second moments of {measured.replicas} replicas",
        f"text     {measured.tokens:,} tokens of {config.data.corpus}, as trained on",
    ]


def as_json(
    record: RunRecord, measured: Measured, forecasts: Sequence[Forecast], rounds: Mapping[str, Seen]
) -> dict[str, Any]:
    """Everything that was found, as plain JSON values."""
    setting, config = measured.setting, measured.config
    facts = {
        "run": str(record.path),
        "state": record.state,
        "step": measured.step,
        "rule": dataclasses.asdict(setting.rule),
        "inner_steps": config.inner_steps,
        "rounds": setting.rounds,
        "inner_lrs": dict(setting.inner_lrs),
        "weight_decay": setting.weight_decay,
        "tokens": measured.tokens,
        "replicas": measured.replicas,
        "lanczos": {"steps": STEPS, "probes": PROBES},
        "blocks": [_block_json(found, measured.patterns) for found in forecasts],
        "from_rounds": {name: _seen_json(one) for name, one in rounds.items()},
    }
    return plain(facts)


def _block_json(found: Forecast, patterns: Mapping[str, str]) -> dict[str, Any]:
    block = found.curvature
    return {
        "name": block.name,
        "pattern": patterns[block.name],
        "parameters": block.parameters,
        "largest": block.raw,
        "largest_preconditioned": block.top,
        "mean_preconditioned": float(block.nodes @ block.weights),
        "quantiles": {f"{share:g}": block.quantile(share) for share in (0.1, 0.5, 0.9, 0.99, 0.999)},
        "density": {"eigenvalue": block.nodes, "share": block.weights, "sigma_mid": found.sigma},
        "progress": {place: dataclasses.asdict(one) for place, one in found.progress.items()},
        "spread_mid": {f"{share:g}": found.spread(share) for share in (0.05, 0.25, 0.5, 0.75, 0.95)},
        "period": found.chosen.period,
        "log_gain": found.chosen.log_gain,
        "period_at_mean": found.at_mean,
    }


def _seen_json(one: Seen) -> dict[str, Any]:
    interval = one.interval
    return {
        "sigma": one.whole.sigma,
        "standard_error": one.whole.standard_error,
        "noise_share": one.whole.noise_share,
        "shown": interval is not None,
        "why_not": one.whole.why_not,
        "interval": interval,
        "periods": one.periods,
        "thirds": {
            place: {"sigma": found.sigma, "standard_error": found.standard_error, "why_not": found.why_not}
            for place, found in one.thirds.items()
        },
    }
