"""Measure the blocks of a run, say what follows in words and in JSON, and write the figure and the numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from twophase.advice.evidence import outside
from twophase.advice.text import items
from twophase.base.config import UsageError
from twophase.base.files import table_text
from twophase.base.progress import meter
from twophase.figures.style import check_numbers, rendered, styled, write_files
from twophase.runs.folder import standard
from twophase.runs.record import WHOLE, RunRecord
from twophase.spectrum.blocks import (
    PLACES,
    PROBES,
    STEPS,
    Facts,
    Setting,
    loss_weights,
    matrix_of,
    measure,
    patterns_of,
    seen,
    setting_of,
)
from twophase.spectrum.curvature import GaussNewton, Matrix
from twophase.spectrum.figure import LEAST_SHARE, draw
from twophase.sweeps.table import format_table
from twophase.tasks.lm.config import TrainConfig
from twophase.tasks.restored import Restored, restore
from twophase.theory.observed import Observed

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


def report(record: RunRecord, out: Path, asked: Mapping[str, str], count: int, *, quiet: bool) -> tuple[str, str]:
    """Measure the blocks of a run and write the files; return the words, and the JSON.

    Args:
        record: the run.
        out: folder of `spectrum.png`, `.pdf`, `.csv` and `.json`.
        asked: patterns by block; empty for the run's own blocks.
        count: number of batches.
        quiet: True to show no progress.

    Raises:
        UsageError: a run that cannot be measured, or files that cannot be written.
    """
    stem = out / "spectrum"
    with styled():  # and the folder, before the computation, so that a mistake is refused at once
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--out {out}: cannot be made ({error.strerror}); choose another folder") from None
        check_numbers([stem.with_suffix(".csv"), stem.with_suffix(".json")], '{\n  "run": ', f"--out {out}")
        restored = restore(record.path)
        patterns, setting = asked or patterns_of(restored), setting_of(restored.config)
        batches = restored.batches(count)
        with meter("spectrum", len(patterns), quiet=quiet) as show:
            blocks = measure(restored, patterns, batches, show=show)
        rounds = _paired(seen(record, setting), restored, patterns)
        title = (
            f"{setting.rule.describe()}, S = {restored.config.inner_steps}, {setting.rounds} rounds; "
            f"curvature after {restored.step:,} inner steps"
        )
        figure, rows = draw(title, setting, blocks, rounds)
        pictures = rendered(figure)
    (kind, _), (name, unit, size) = matrix_of(restored.task), _data(restored, batches)
    facts = {
        "run": str(record.path),
        **({"task": name, "matrix": kind.title} if unit == "examples" else {}),
        "state": record.state,
        "step": restored.step,
        "rule": asdict(setting.rule),
        "inner_steps": restored.config.inner_steps,
        "rounds": setting.rounds,
        "inner_lrs": setting.inner_lrs,
        "weight_decay": setting.weight_decay,
        unit: size,
        "replicas": restored.replicas,
        "lanczos": {"steps": STEPS, "probes": PROBES},
        "blocks": [
            {key: block[key] for key in block if key != "negative" or kind is not GaussNewton} for block in blocks
        ],
        "from_rounds": rounds,
    }
    text = json.dumps(standard(facts), indent=2, allow_nan=False, default=_plain) + "\n"
    paths = write_files(stem, pictures | {".csv": table_text(rows), ".json": text})
    heading = _heading(record, restored, setting, f"{size:,} {unit} of {name}")
    return "\n".join([describe(heading, setting, blocks, rounds, kind), "", *map(str, paths)]), text.rstrip()


def _data(restored: Restored, batches: Sequence[Any]) -> tuple[str, str, int]:
    """Return the name of the data, and of how much of it the curvature is: unit and number."""
    config = restored.config
    first: list[Tensor] = [tree_leaves(batch)[0] for batch in batches]
    if isinstance(config, TrainConfig):
        return config.data.corpus, "tokens", sum(tokens.numel() for tokens in first)
    options: Any = config.task  # type: ignore[attr-defined]
    return options.name, "examples", sum(len(examples) if examples.dim() else 1 for examples in first)


def _paired(rounds: dict[str, Facts], restored: Restored, patterns: Mapping[str, str]) -> dict[str, Facts]:
    """Name what the rounds show by a block only where that block is a fragment of the run."""
    fragments = restored.config.sync.parts()
    if isinstance(fragments, dict) and list(fragments.items()) == list(patterns.items()):
        return rounds
    return {name if name == WHOLE else f"fragment {name}": shown for name, shown in rounds.items()}


def _plain(value: Any) -> Any:
    """Return arrays and estimates as JSON has them."""
    if isinstance(value, Observed):
        return standard({name: getattr(value, name) for name in ("sigma", "standard_error", "why_not")})
    return value.tolist()


# -------------------------------------------------------------------------------------------------------------- words


def _heading(record: RunRecord, restored: Restored, setting: Setting, data: str) -> list[str]:
    config = restored.config
    lrs = ", ".join(f"{max(rates):.2g}" for rates in setting.inner_lrs.values())
    method, moments = "AdamW, learning rate", f"; second moments of {restored.replicas} replicas"
    if restored.scale is None:
        method, moments = f"SGD with momentum {config.inner.momentum:g}, learning rate / (1 - momentum)", ""
    restart = config.sync.policies() or config.outer.policy()
    policies = restart.values() if isinstance(restart, Mapping) else [restart]
    stepping = sorted({str(policy) for policy in policies if policy.takes_steps})
    outer = [] if config.outer.is_rule else [config.outer.describe()]
    lines = [
        ("run", f"{record.path}: {record.state}, checkpoint of step {restored.step:,} of {config.steps:,}"),
        ("rule", f"{setting.rule.describe()}, {config.rounds} rounds of {config.inner_steps} inner steps"),
        *(("sync", words) for words in outside(record)),
        *(("outer", f"{words}: the linear K and the rounds' sigma below are of that rule alone") for words in outer),
        *(
            ("restart", f"{policy} takes its own steps: K and the rounds' sigma below are of the rule without it")
            for policy in stepping
        ),
        ("inner", f"{method} {lrs} (early, mid, late), weight decay {config.inner.weight_decay:g}{moments}"),
        ("text" if isinstance(config, TrainConfig) else "data", f"{data}, as trained on"),
    ]
    return [f"{name:8} {words}" for name, words in lines]


def describe(
    heading: Sequence[str],
    setting: Setting,
    blocks: Sequence[Facts],
    rounds: Mapping[str, Facts],
    kind: type[Matrix] = GaussNewton,
) -> str:
    """Return the heading, the table of the blocks, and what stands out in each; `rounds` is by fragment."""
    rows = [_row(block, rounds.get(block["name"])) for block in blocks]
    lines = [
        *heading,
        "",
        f"largest, precond.: largest eigenvalue of the {kind.title}, and of the preconditioned one, with its",
        "quantiles. early, mid, late: effective progress of a round, mean by loss. K: best period of all modes of the",
        "block together, with what it leaves of the loss. K at mean, and K of the rounds: first cancellation of a mode",
        "of that sigma.",
        "",
        format_table([title for title, _ in rows[0]], [[text for _, text in row] for row in rows]),
        "",
        *items([*_remarks(blocks, setting), *_round_remarks(blocks, rounds, setting)]),
        "limits",
        *items(LIMITS if kind is GaussNewton else (*LIMITS, NEGATIVE)),
    ]
    return "\n".join(lines)


def _row(block: Facts, shown: Facts | None) -> list[tuple[str, str]]:
    """Return the title and the text of each cell of a block's row."""
    top, period = block["largest_preconditioned"], _period(block["period"])
    if block["period"] is not None:  # with the share of the loss that it is predicted to leave: `12 (0.31x)`
        share = math.exp(block["log_gain"])
        period += f" ({share:.2f}x)" if share >= 0.005 else f" ({share:.0e}x)"
    sigma, periods = "none recorded" if shown is None else "not shown", list[str]()
    if shown is not None and shown["shown"]:
        sigma = f"{shown['interval'][0]:.2g} to {shown['interval'][2]:.2g}"
        periods = list(map(_period, shown["periods"]))
    return [
        ("block", block["name"]),
        ("parameters", f"{block['parameters']:,}"),
        ("largest", f"{block['largest'][0]:.3g}" if len(block["largest"]) else "not found"),
        ("precond.", f"{top[0]:.3g}" if len(top) else "not found"),
        ("median", f"{block['quantiles']['0.5']:.2g}"),
        ("99 %", f"{block['quantiles']['0.99']:.2g}"),
        *((place, f"{block['progress'][place]['mean']:.2g}") for place in PLACES),
        ("K", period),
        ("K at mean", _period(block["period_at_mean"])),
        ("rounds: sigma", sigma),
        ("K", ", ".join(periods if len(set(periods)) > 1 else periods[:1])),
    ]


def _period(period: int | None) -> str:
    return "never" if period is None else str(period)


def _remarks(blocks: Sequence[Facts], setting: Setting) -> Iterator[str]:
    for block in blocks:
        name, negative, progress = block["name"], block["negative"], block["progress"]
        if negative > LEAST_SHARE:
            yield f"{name}: {_percent(negative)} of the curvature, by absolute eigenvalues, is negative and left out."
        if not loss_weights(block["density"]).any():
            if not negative:
                yield f"{name}: no curvature was found; the data at hand does not use these parameters."
            continue
        place, worst = max(progress.items(), key=lambda item: item[1]["step"])
        if worst["step"] > 1:
            words = (
                f"{name}: the inner step passes the minimum of the steepest mode ({place}: lr times eigenvalue "
                f"{worst['step']:.3g}). Such modes have {_percent(worst['passing'])} of the loss and count as removed"
            )
            if worst["step"] > 2:
                words += f"; beyond 2, where gradient descent would diverge, {_percent(worst['unstable'])}"
            yield f"{words}. There the linear model is not to be trusted."
    # No restart is best where a single mode would want one: the slow modes of the same block are the reason.
    never = [block for block in blocks if block["period"] is None and block["period_at_mean"] is not None]
    if never:
        low = min(block["spread_mid"]["0.05"] for block in never)
        high = max(block["spread_mid"]["0.95"] for block in never)
        yield (
            f"{', '.join(block['name'] for block in never)}: over {setting.rounds} rounds no restart is best "
            "although a single mode at the mean would want one. Sigma is spread within a block (90 % of the loss lies "
            f"within {low:.2g} to {high:.2g}). The loss at the end is in the slow modes, which every restart slows "
            "down."
        )


def _round_remarks(blocks: Sequence[Facts], rounds: Mapping[str, Facts], setting: Setting) -> Iterator[str]:
    if setting.rule.momentum == 0:
        yield "The rule has no momentum: there is nothing to restart, and rounds show no progress along a buffer."
        return
    names = [block["name"] for block in blocks]
    for name, shown in rounds.items():
        if not shown["shown"]:
            yield f"{name}, from the rounds: sigma is not shown, because {shown['why_not']}."
        elif name not in names:
            low, _, high = shown["interval"]
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
