"""`twophase spectrum RUN`: measures the blocks of a run, says what follows, and writes the figure and the numbers.

`cli.spectrum` parses the options; this module loads torch.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from twophase.advice.evidence import outside
from twophase.advice.text import items
from twophase.base.config import UsageError
from twophase.base.files import table_text
from twophase.base.progress import meter
from twophase.cli.block_figure import LEAST_SHARE, draw
from twophase.cli.commands import config_paths
from twophase.figures.style import check_numbers, rendered, styled, write_files
from twophase.runs.folder import standard
from twophase.runs.record import WHOLE, RunRecord, read_record
from twophase.spectrum import (
    PLACES,
    PROBES,
    STEPS,
    Forecast,
    Seen,
    Setting,
    forecast,
    measure,
    patterns_of,
    seen,
    setting_of,
)
from twophase.sweeps.table import format_table
from twophase.tasks.lm.config import TrainConfig
from twophase.tasks.restored import Restored, restore
from twophase.theory.observed import Observed
from twophase.training.curvature import GaussNewton, Matrix

NAME = "spectrum"
LIMITS = (
    "Linear modes of each block alone. Not modelled: interacting blocks, replicas with different data, changing "
    "curvature and second moments, and the delay by the inner momentum.",
    "The curvature is that of the checkpoint; early, mid and late differ in the inner learning rate alone.",
    "Directions are weighted by their curvature, as if the displacement were alike in all of them.",
)
"""Limits of the forecast, for the reader."""
NEGATIVE = (
    "The matrix is the Hessian of the loss, because the task has no logits(). Along a negative eigenvalue the linear "
    "model has no minimum: such directions count as flat, without loss and progress."
)


def spectrum(options: argparse.Namespace, asked: Mapping[str, str] | None) -> int:
    """Measure the blocks of a run, say what follows and write the files; return the exit status.

    Raises:
        UsageError: no run, one that cannot be measured, or files that cannot be written.
    """
    record = read_record(options.run, config_paths())
    out = options.out or options.run
    with styled():  # and the folder, before the computation, so that a mistake is refused at once
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--out {out}: cannot be made ({error.strerror}); choose another folder") from None
        check_numbers([out / f"{NAME}.csv", out / f"{NAME}.json"], '{\n  "run": ', f"--out {out}")
        restored = restore(options.run)
        patterns, setting = patterns_of(restored, asked), setting_of(restored.config)
        batches = restored.batches(options.batches)
        with meter("spectrum", len(patterns), quiet=options.quiet) as show:
            blocks = measure(restored, patterns, batches, top=options.top, show=show)
        forecasts = [forecast(block, setting) for block in blocks]
        rounds = _paired(seen(record, setting), restored, patterns)
        title = (
            f"{setting.rule.describe()}, S = {restored.config.inner_steps}, {setting.rounds} rounds; "
            f"curvature after {restored.step:,} inner steps"
        )
        figure, rows = draw(title, setting, forecasts, rounds)
        pictures = rendered(figure)
    (kind, _), (name, unit, count) = restored.matrix, _data(restored, batches)
    facts = {
        "run": str(record.path),
        **({"task": name, "matrix": kind.title} if unit == "examples" else {}),
        "state": record.state,
        "step": restored.step,
        "rule": dataclasses.asdict(setting.rule),
        "inner_steps": restored.config.inner_steps,
        "rounds": setting.rounds,
        "inner_lrs": dict(setting.inner_lrs),
        "weight_decay": setting.weight_decay,
        unit: count,
        "replicas": restored.replicas,
        "lanczos": {"steps": STEPS, "probes": PROBES},
        "blocks": [_block_json(block, patterns, kind) for block in forecasts],
        "from_rounds": {name: _seen_json(shown) for name, shown in rounds.items()},
    }
    text = json.dumps(standard(facts), indent=2, allow_nan=False) + "\n"
    paths = write_files(out / NAME, pictures | {".csv": table_text(rows), ".json": text})
    if options.json:
        print(text.rstrip())
    else:
        heading = _heading(record, restored, setting, f"{count:,} {unit} of {name}")
        print(describe(heading, setting, forecasts, rounds, kind))
        print("\n" + "\n".join(map(str, paths)))
    return 0


def _data(restored: Restored, batches: Sequence[Any]) -> tuple[str, str, int]:
    """Return the name of the data, and of how much of it the curvature is: unit and number."""
    config = restored.config
    first: list[Tensor] = [tree_leaves(batch)[0] for batch in batches]
    if isinstance(config, TrainConfig):
        return config.data.corpus, "tokens", sum(tokens.numel() for tokens in first)
    options: Any = config.task  # type: ignore[attr-defined]
    return options.name, "examples", sum(len(examples) if examples.dim() else 1 for examples in first)


def _paired(rounds: dict[str, Seen], restored: Restored, patterns: Mapping[str, str]) -> dict[str, Seen]:
    """Name what the rounds show by a block only where that block is a fragment of the run."""
    fragments = restored.config.sync.parts()
    if isinstance(fragments, dict) and list(fragments.items()) == list(patterns.items()):
        return rounds
    return {name if name == WHOLE else f"fragment {name}": shown for name, shown in rounds.items()}


def _block_json(block: Forecast, patterns: Mapping[str, str], kind: type[Matrix]) -> dict[str, Any]:
    curvature = block.curvature
    return {
        "name": curvature.name,
        "pattern": patterns[curvature.name],
        "parameters": curvature.parameters,
        "largest": curvature.raw.tolist(),
        "largest_preconditioned": curvature.top.tolist(),
        "mean_preconditioned": float(curvature.nodes @ curvature.weights),
        "quantiles": {f"{share:g}": curvature.quantile(share) for share in (0.1, 0.5, 0.9, 0.99, 0.999)},
        "density": {
            "eigenvalue": curvature.nodes.tolist(),
            "share": curvature.weights.tolist(),
            "sigma_mid": block.sigma.tolist(),
        },
        "progress": {place: dataclasses.asdict(progress) for place, progress in block.progress.items()},
        "spread_mid": {f"{share:g}": block.spread(share) for share in (0.05, 0.25, 0.5, 0.75, 0.95)},
        "period": block.chosen.period,
        "log_gain": block.chosen.log_gain,
        "period_at_mean": block.at_mean,
        **({} if kind is GaussNewton else {"negative": curvature.negative}),
    }


def _seen_json(shown: Seen) -> dict[str, Any]:
    def part(observed: Observed, *names: str) -> dict[str, Any]:
        return {name: getattr(observed, name) for name in ("sigma", "standard_error", *names, "why_not")}

    shown_words = {"shown": shown.interval is not None, "interval": shown.interval, "periods": shown.periods}
    thirds = {place: part(third) for place, third in shown.thirds.items()}
    return part(shown.whole, "noise_share") | shown_words | {"thirds": thirds}


# -------------------------------------------------------------------------------------------------------------- words


def _heading(record: RunRecord, restored: Restored, setting: Setting, data: str) -> list[str]:
    config = restored.config
    lrs = [f"{max(rates):.2g}" for rates in setting.inner_lrs.values()]
    method, moments = "AdamW, learning rate", f"; second moments of {restored.replicas} replicas"
    if restored.scale is None:
        method, moments = f"SGD with momentum {config.inner.momentum:g}, learning rate / (1 - momentum)", ""
    restart = config.sync.policies() or config.outer.policy()
    policies = list(restart.values()) if isinstance(restart, Mapping) else [restart]
    stepping = sorted({str(policy) for policy in policies if policy.takes_steps})
    outer = [] if config.outer.is_rule else [config.outer.describe()]
    return [
        f"run      {record.path}: {record.state}, checkpoint of step {restored.step:,} of {config.steps:,}",
        f"rule     {setting.rule.describe()}, {config.rounds} rounds of {config.inner_steps} inner steps",
        *(f"sync     {words}" for words in outside(record)),
        *(f"outer    {method}: the linear K and the rounds' sigma below are of that rule alone" for method in outer),
        *(
            f"restart  {policy} takes its own steps: K and the rounds' sigma below are of the rule without it"
            for policy in stepping
        ),
        f"inner    {method} {', '.join(lrs)} (early, mid, late), weight decay {config.inner.weight_decay:g}{moments}",
        f"{'text' if isinstance(config, TrainConfig) else 'data'}     {data}, as trained on",
    ]


def describe(
    heading: Sequence[str],
    setting: Setting,
    forecasts: Sequence[Forecast],
    rounds: Mapping[str, Seen],
    kind: type[Matrix] = GaussNewton,
) -> str:
    """Return the heading, the table of the blocks, and what stands out in each; `rounds` is by fragment."""
    head = ["block", "parameters", "largest", "precond.", "median", "99 %", *PLACES, "K", "K at mean"]
    remarks = [*_remarks(forecasts, setting), *_round_remarks(forecasts, rounds, setting)]
    lines = [
        *heading,
        "",
        f"largest, precond.: largest eigenvalue of the {kind.title}, and of the preconditioned one, with its",
        "quantiles. early, mid, late: effective progress of a round, mean by loss. K: best period of all modes of the",
        "block together, with what it leaves of the loss. K at mean, and K of the rounds: first cancellation of a mode",
        "of that sigma.",
        "",
        format_table(
            [*head, "rounds: sigma", "K"], [_row(block, rounds.get(block.curvature.name)) for block in forecasts]
        ),
        "",
        *items(remarks),
        "limits",
        *items(LIMITS if kind is GaussNewton else (*LIMITS, NEGATIVE)),
    ]
    return "\n".join(lines)


def _row(block: Forecast, shown: Seen | None) -> list[str]:
    curvature, period = block.curvature, _period(block.chosen.period)
    if block.chosen.period is not None:  # with the share of the loss that it is predicted to leave: `12 (0.31x)`
        share = math.exp(block.chosen.log_gain)
        period += f" ({share:.2f}x)" if share >= 0.005 else f" ({share:.0e}x)"
    sigma, periods = "none recorded" if shown is None else "not shown", ""
    if shown is not None and (interval := shown.interval) is not None:
        sigma = f"{interval[0]:.2g} to {interval[2]:.2g}"
        words = list(map(_period, shown.periods))
        periods = words[1] if len(set(words)) == 1 else ", ".join(words)
    return [
        curvature.name,
        f"{curvature.parameters:,}",
        *(f"{values[0]:.3g}" if len(values) else "not found" for values in (curvature.raw, curvature.top)),
        f"{curvature.quantile(0.5):.2g}",
        f"{curvature.quantile(0.99):.2g}",
        *(f"{block.progress[place].mean:.2g}" for place in PLACES),
        period,
        _period(block.at_mean),
        sigma,
        periods,
    ]


def _period(period: int | None) -> str:
    return "never" if period is None else str(period)


def _remarks(forecasts: Sequence[Forecast], setting: Setting) -> Iterator[str]:
    for block in forecasts:
        name, negative = block.curvature.name, block.curvature.negative
        if negative > LEAST_SHARE:
            yield f"{name}: {_percent(negative)} of the curvature, by absolute eigenvalues, is negative and left out."
        if not block.curvature.loss_weights.any():
            if not negative:
                yield f"{name}: no curvature was found; the data at hand does not use these parameters."
            continue
        place = max(PLACES, key=lambda place: block.progress[place].step)
        worst = block.progress[place]
        if worst.step > 1:
            words = (
                f"{name}: the inner step passes the minimum of the steepest mode ({place}: lr times eigenvalue "
                f"{worst.step:.3g}). Such modes have {_percent(worst.passing)} of the loss and count as removed"
            )
            if worst.step > 2:
                words += f"; beyond 2, where gradient descent would diverge, {_percent(worst.unstable)}"
            yield f"{words}. There the linear model is not to be trusted."
    # No restart is best where a single mode would want one: the slow modes of the same block are the reason.
    never = [block for block in forecasts if block.chosen.period is None and block.at_mean is not None]
    if never:
        low, high = min(block.spread(0.05) for block in never), max(block.spread(0.95) for block in never)
        yield (
            f"{', '.join(block.curvature.name for block in never)}: over {setting.rounds} rounds no restart is best "
            "although a single mode at the mean would want one. Sigma is spread within a block (90 % of the loss lies "
            f"within {low:.2g} to {high:.2g}). The loss at the end is in the slow modes, which every restart slows "
            "down."
        )


def _round_remarks(forecasts: Sequence[Forecast], rounds: Mapping[str, Seen], setting: Setting) -> Iterator[str]:
    if setting.rule.momentum == 0:
        yield "The rule has no momentum: there is nothing to restart, and rounds show no progress along a buffer."
        return
    names = [block.curvature.name for block in forecasts]
    for name, shown in rounds.items():
        if shown.interval is None:
            yield f"{name}, from the rounds: sigma is not shown, because {shown.why_not}."
        elif name not in names:
            low, _, high = shown.interval
            yield f"{name}, from the rounds: sigma {low:.2g} to {high:.2g} (95 %)."
    if not rounds:
        yield "The rounds hold no norms and cosines, so they say nothing of sigma."
    elif not any(name in rounds for name in names):
        recorded = "the whole model as one" if list(rounds) == [WHOLE] else ", ".join(rounds)
        yield (
            f"The rounds were recorded of {recorded}; for each of these blocks train with --sync.fragments "
            "NAME=PATTERN ... --sync.no-stagger."
        )


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %" if share < 0.995 else "100 %"  # which .2g would write as 1e+02
