"""`twophase train`: one run."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twophase.cli.common import RunOptions, command_line, parse_run
from twophase.config import dump_yaml


@dataclass(frozen=True)
class Options(RunOptions):
    """Train one run; repeat the command to resume it."""

    track: tuple[str, ...] = ()
    """Send the metrics to tensorboard, trackio or wandb as well; the run does not depend on them."""
    timeout: float | None = None
    """Under torchrun: seconds for the start of all ranks, and for each collective (600 on GPUs, 1800 without)."""


def main(argv: Sequence[str]) -> int:
    """Run the command; return its exit status."""
    # Torch reads it when it is imported: a rank's death would else print stack traces before our one message.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    options, config, _ = parse_run(Options, argv, "train")
    if options.print_config:
        print(dump_yaml(config), end="")
        return 0
    from twophase.api import default_folder, train_run

    out = options.out or default_folder(config)
    summary = train_run(config, out, track=options.track, quiet=options.quiet, timeout=options.timeout)
    leads = os.environ.get("RANK", "0") == "0"
    if summary["exit_reason"] == "stopped":
        if leads:
            print(f"stopped; resume with: {command_line(['train', *argv])}", file=sys.stderr)
        return int(summary["status"])
    if leads:
        print(describe(out, config, summary))
    return 1 if summary["diverged"] else 0


def describe(out: Path, config: Any, summary: dict[str, Any]) -> str:
    """Describe a finished run in one line."""
    from twophase.api import restart_words

    head = f"{out}: {config.outer.describe()}, {restart_words(config)}, S = {config.inner_steps}"
    if summary["diverged"]:
        return f"{head}: diverged at step {summary['steps']} of {config.steps}"
    result = f"validation loss {summary['validation_loss']:.4g}"
    if summary.get("perplexity") is not None:
        result = f"validation perplexity {summary['perplexity']:.3f} a token"
    if summary.get("perplexity_per_byte") is not None:
        result += f" ({summary['perplexity_per_byte']:.3f} a byte)"
    counts = f"{summary['rounds']} rounds, {summary['restarts']} restarts"
    return f"{head}: {result}, {counts}, {summary['seconds']:.1f} s"
